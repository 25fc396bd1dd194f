// Budgets in the files of other programs: every number of every format against counts that are chosen by hand.
#include "formats/budget_export.h"
#include "formats/json_file.h"
#include "formats/npy.h"
#include "formats_help.h"
#include "test_runtime_cases.h"

enum { TOKENS = 100 };
static const uint32_t KEEP[6] = {100, 20, 50, 31, 6, 7}; // three layers of two KV heads, six query heads
static kvb_table *table;
static budget_export b;

static void setup(void)
{
    help_setup();
    const table_case c = case_default(); // sink 4, window 1
    table = case_open(&c);
    b = (budget_export){table, "t.safetensors", 0.65, TOKENS, 0, KEEP};
}

static void teardown(void)
{
    kvb_table_close(table);
    help_teardown();
}

static double number(const cJSON *o, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(o, name);
    ck_assert_msg(cJSON_IsNumber(item), "%s", name);
    return item->valuedouble;
}

static double element(const cJSON *o, const char *name, int i)
{
    return cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(o, name), i)->valuedouble;
}

UNIT_TEST(duo)
{
    size_t size;
    help_ok(export_duo(&b, help_path("duo"), err));
    char *tsv = (char *)help_slurp(help_path("duo/full_attention_heads.tsv"), &size);
    ck_assert_str_eq(tsv, "1\t0.2\n0.5\t0.31\n0.06\t0.07\n");
    free(tsv);
    cJSON *config = help_json(help_path("duo/config.json"));
    // Four heads keep less than half, 16 tokens on average: 4 sinks and the latest 12.
    ck_assert_double_eq(number(config, "sink_size"), 4);
    ck_assert_double_eq(number(config, "recent_size"), 12);
    ck_assert_double_eq_tol(number(config, "head_compression_ratio"), 4 / 6.0, 1e-15);
    ck_assert_double_eq_tol(number(config, "effective_ratio"), 1 - (200 + 4 * 16) / 600.0, 1e-15);
    cJSON_Delete(config);
    help_fails(export_duo(&b, help_path("duo"), err), KVB_ARGUMENT, "duo");
}

UNIT_TEST(duo_without_streaming_heads)
{
    const uint32_t all[6] = {100, 100, 100, 100, 100, 100};
    b.keep = all;
    help_ok(export_duo(&b, help_path("duo"), err));
    cJSON *config = help_json(help_path("duo/config.json"));
    ck_assert_double_eq(number(config, "recent_size"), 1); // the table's window
    ck_assert_double_eq(number(config, "head_compression_ratio"), 0);
    ck_assert_double_eq(number(config, "effective_ratio"), 0);
    cJSON_Delete(config);
}

static void expect_layers(const double tokens[3], double effective_ratio)
{
    help_ok(export_per_layer(&b, help_path("layers.json"), err));
    cJSON *o = help_json(help_path("layers.json"));
    for (int l = 0; l < 3; l++) {
        double ratio = element(o, "compression_ratios", l);
        ck_assert_double_eq(element(o, "tokens", l), tokens[l]);
        ck_assert(ratio >= 0 && floor(TOKENS * (1 - ratio)) == tokens[l]); // as kvpress computes it
    }
    ck_assert_double_eq(number(o, "sink"), 4);
    ck_assert_double_eq_tol(number(o, "effective_ratio"), effective_ratio, 1e-15);
    ck_assert_double_eq(number(cJSON_GetObjectItem(o, "kvbudget"), "n_tokens"), TOKENS);
    cJSON_Delete(o);
}

UNIT_TEST(per_layer)
{
    // Means of 60, 40.5 and 6.5 tokens: 107 in all. With equal remainders, the lower layer gets the token.
    expect_layers((const double[]){60, 41, 6}, 1 - 107 / 300.0);
    // 107 tokens are 6.7 pages of 16, so there are 7; each layer has at least one.
    b.block = 16;
    expect_layers((const double[]){48, 48, 16}, 1 - 112 / 300.0);
    const uint32_t all[6] = {100, 100, 100, 100, 1, 1};
    b.keep = all, b.block = 0;
    expect_layers((const double[]){100, 100, 1}, 1 - 201 / 300.0);
}

// The whole model keeps what was asked for, within half a page. Rounding each layer up would keep up to a page more in
// every layer.
UNIT_TEST(pages_keep_the_total)
{
    table_case c = case_default();
    c.n_layers = 30, c.n_kv_heads = 3;
    kvb_table *deep = case_open(&c);
    uint32_t keep[90];
    for (uint32_t tokens = 300; tokens < 4200; tokens += 611) {
        const kvb_budget_options options = {.block = 16};
        help_ok(kvb_budgets(deep, 0.9, tokens, &options, keep, 90, err));
        const budget_export deep_b = {deep, "t", 0.9, tokens, 16, keep};
        help_ok(export_per_layer(&deep_b, help_path("deep.json"), err));
        cJSON *o = help_json(help_path("deep.json"));
        ck_assert_double_eq_tol(number(o, "effective_ratio"), 0.9, 16 / (30.0 * tokens));
        cJSON_Delete(o);
    }
    kvb_table_close(deep);
}

// 133 tokens are kept in the two layers that have a budget; readers round their shares down.
UNIT_TEST(shares)
{
    static const struct {
        const char *name;
        double keep;
    } wanted[] = {{"L0H0", 100}, {"L0H1", 20}, {"L1H0", -1}, {"L2H0", 6}, {"L2H1", 7}};
    static double prune[99 * 6];
    for (int i = 0; i < 99 * 6; i++) prune[i] = i % 6 / 2 == 1 ? 0 : (1 + i / 6) / 100.0;
    table_case c = case_default();
    c.prune_ratio = prune;
    c.edit_from = "\"note\"", c.edit_to = "\"bounded_layers\":\"1\",\"note\"";
    kvb_table *windows = case_open(&c);
    b.table = windows;
    help_ok(export_shares(&b, help_path("shares.json"), err));
    cJSON *o = help_json(help_path("shares.json"));
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(o, wanted[i].name);
        ck_assert_msg(item ? floor(item->valuedouble * 133) == wanted[i].keep : wanted[i].keep < 0, "%s",
                      wanted[i].name);
    }
    cJSON_Delete(o);
    kvb_table_close(windows);
}

static void expect_array(const char *name, const int32_t *expected, size_t count)
{
    size_t size;
    npy_array a;
    int32_t values[64];
    unsigned char *bytes = help_slurp(help_path("arrays/%s", name), &size);
    help_ok(npy_parse(&a, bytes, size, name, err));
    unit_numbers(a.count, count, a.type, NPY_I32);
    help_ok(npy_to_i32(&a, values, name, err));
    for (size_t i = 0; i < count; i++)
        ck_assert_msg(values[i] == expected[i], "%s[%zu]: %d, expected %d", name, i, values[i], expected[i]);
    free(bytes);
}

UNIT_TEST(varlen)
{
    const uint32_t pages[6] = {100, 16, 48, 32, 16, 16};
    b.keep = pages, b.block = 48;
    help_ok(export_varlen(&b, help_path("arrays"), err));
    expect_array("lengths.npy", (const int32_t *)pages, 6);
    expect_array("cu_seqlens.npy", (const int32_t[]){0, 100, 116, 0, 48, 80, 0, 16, 32}, 9);
    expect_array("page_indptr.npy", (const int32_t[]){0, 3, 4, 0, 1, 2, 0, 1, 2}, 9);
    expect_array("block_table.npy",
                 (const int32_t[]){0, 1, 2, 3, -1, -1, /**/ 0, -1, -1, 1, -1, -1, /**/ 0, -1, -1, 1, -1, -1}, 18);
    cJSON *about = help_json(help_path("arrays/kvbudget.json"));
    ck_assert_double_eq(number(about, "block"), 48);
    cJSON_Delete(about);
}

UNIT_TEST(varlen_without_pages)
{
    help_ok(export_varlen(&b, help_path("arrays"), err));
    expect_array("lengths.npy", (const int32_t *)KEEP, 6);
    ck_assert_int_ne(access(help_path("arrays/block_table.npy"), F_OK), 0);
}

UNIT_TEST(varlen_counts_in_32_bits)
{
    const uint32_t many[6] = {INT32_MAX, 1, 1, 1, 1, 1};
    b.keep = many;
    help_fails(export_varlen(&b, help_path("arrays"), err), KVB_UNSUPPORTED, "int32");
    ck_assert_int_ne(access(help_path("arrays"), F_OK), 0); // nothing is left
}

UNIT_MAIN_EACH("formats_export", setup, teardown)
