// Tables as they are written and exported; the reader that checks them is the runtime's.
#include "formats/npy.h"
#include "formats/sha256.h"
#include "formats/table_export.h"
#include "formats/table_write.h"
#include "formats_help.h"
#include "runtime/safetensors.h"
#include <math.h>

enum { R = 99, L = 2, G = 3, N = R * L * G };

static double prune[N], deviation[N], rows[6][R];
static uint8_t saturated[R];

static cJSON *metadata(void)
{
    return help_table_metadata(
        "{\"model_id\":\"tiny \\\"quoted\\\" \xc3\xa9\",\"n_heads\":\"9\",\"n_kv_heads\":\"3\","
        "\"head_dim\":\"64\",\"metric\":\"snapkv:kvpress\",\"window\":\"64\","
        "\"metric_parameters\":\"{\\\"window\\\":64,\\\"kernel\\\":5,\\\"pool\\\":\\\"avg\\\"}\","
        "\"aggregate\":\"mean_ratio\",\"calibration_tokens\":\"1600,4125\",\"n_contexts\":\"2\","
        "\"n_questions\":\"30\",\"n_queries\":\"12,63\"}");
}

static table_content content(const cJSON *m)
{
    for (int i = 0; i < R; i++) {
        for (int h = 0; h < L * G; h++) {
            prune[i * L * G + h] = (i + 1) / 100.0 * (1 - 0.01 * h);
            deviation[i * L * G + h] = 0.001 * h;
        }
        rows[0][i] = (i + 1) / 100.0;
        for (int k = 1; k < 6; k++) rows[k][i] = 0.001 * i * k;
        saturated[i] = i > 95;
    }
    return (table_content){R,       L,       G,       prune,     rows[0], deviation, rows[1], rows[2],
                           rows[3], rows[4], rows[5], saturated, NULL,    NULL,      m};
}

UNIT_TEST(written_tables_open)
{
    cJSON *m = metadata(), *back;
    table_content t = content(m);
    const char *path = help_path("t.safetensors");
    help_ok(table_write(path, &t, err));
    kvb_table *table;
    help_ok(kvb_table_open(&table, path, NULL, err));
    ck_assert(memcmp(kvb_table_prune_ratios(table), prune, sizeof prune) == 0);
    kvb_row row;
    help_ok(kvb_table_row(table, 96, &row, err));
    ck_assert(row.ratio == rows[0][96] && row.loss == rows[1][96] && row.lower_bound == rows[2][96]);
    ck_assert(row.lambda == rows[3][96] && row.table_loss == rows[4][96] && row.effective_ratio == rows[5][96]);
    ck_assert(row.saturated == 1 && row.std[5] == 0.005);
    ck_assert_str_eq(kvb_table_info(table)->model_id, "tiny \"quoted\" \xc3\xa9");
    kvb_table_close(table);
    help_ok(table_metadata_read(&back, path, err));
    ck_assert_ptr_nonnull(cJSON_GetObjectItem(back, KVB_CONTENT_KEY));
    cJSON_DeleteItemFromObject(back, KVB_CONTENT_KEY);
    ck_assert(cJSON_Compare(m, back, 1));
    cJSON_Delete(back);

    unsigned char *a, *b;
    size_t n, k;
    help_ok(table_serialize(&a, &n, &t, err));
    b = help_slurp(path, &k);
    ck_assert(n == k && memcmp(a, b, n) == 0);
    uint64_t header = 0;
    memcpy(&header, a, 8);
    ck_assert(header % 8 == 0 && n == 8 + header + (2 * N + 6 * R) * 8 + R);
    free(a);
    free(b);
    cJSON_Delete(m);
}

UNIT_TEST(refusals)
{
    cJSON *m = metadata();
    const char *path = help_path("t.safetensors");
    table_content t = content(m);
    prune[7] = 1.0001;
    help_fails(table_write(path, &t, err), KVB_FORMAT, "element 7");
    prune[7] = NAN;
    help_fails(table_write(path, &t, err), KVB_NUMERIC, "\"prune_ratio\": element 7");
    t = content(m);
    rows[3][98] = INFINITY;
    help_fails(table_write(path, &t, err), KVB_NUMERIC, "\"lambda\": element 98");
    t = content(m);
    rows[0][50] = rows[0][49];
    help_fails(table_write(path, &t, err), KVB_FORMAT, "\"ratio\": element 50");
    t = content(m);
    saturated[3] = 2;
    help_fails(table_write(path, &t, err), KVB_FORMAT, "saturated");
    t = content(m);
    t.lambda = NULL;
    help_fails(table_write(path, &t, err), KVB_ARGUMENT, "lambda");
    t = content(m);
    t.n_layers = 3000000000U, t.n_kv_heads = 3000000000U;
    help_fails(table_write(path, &t, err), KVB_ARGUMENT, "impossible shape");
    t = content(m);
    cJSON_AddNumberToObject(m, "number", 1);
    help_fails(table_write(path, &t, err), KVB_FORMAT, "\"number\": expected a string");
    cJSON_DeleteItemFromObject(m, "number");
    cJSON_DeleteItemFromObject(m, "sink"); // the runtime's reader would refuse it
    help_fails(table_write(path, &t, err), KVB_FORMAT, "sink");
    cJSON_DeleteItemFromObject(m, "format");
    help_fails(table_write(path, &t, err), KVB_FORMAT, "kvbudget-table");
    ck_assert(!help_exists(path));
    cJSON_Delete(m);
}

UNIT_TEST(export_for_kvpress)
{
    cJSON *m = metadata(), *back;
    table_content c = content(m);
    const char *path = help_path("curve.npy");
    cJSON *press =
        cJSON_Parse("{\"press\":\"SnapKVPress\",\"arguments\":{\"window_size\":64,\"share\":0.30000000000000004,"
                    "\"use_vnorm\":true,\"mode\":\"mean\"},\"warning\":\"not quite\"}");
    help_ok(table_export_npy(path, &c, press, err));
    cJSON_Delete(press);
    size_t size, text_size;
    unsigned char *data = help_slurp(path, &size);
    npy_array a;
    help_ok(npy_parse(&a, data, size, path, err));
    ck_assert(a.type == NPY_F64 && a.n_dims == 3 && a.shape[0] == R && a.shape[1] == L && a.shape[2] == G);
    ck_assert(memcmp(a.data, prune, sizeof prune) == 0);
    char sha256[65];
    sha256_hex(data, size, sha256);
    unsigned char *text = help_slurp(help_path("curve.json"), &text_size);
    back = cJSON_Parse((char *)text);
    ck_assert(cJSON_Compare(m, cJSON_GetObjectItem(back, "metadata"), 1));
    ck_assert_str_eq(cJSON_GetObjectItem(back, "npy_sha256")->valuestring, sha256);
    cJSON_Delete(back);
    ck_assert(strstr((char *)text,
                     "SnapKVPress(window_size=64, share=0.30000000000000004, use_vnorm=True, mode=\\\"mean\\\")") !=
              NULL);
    // Rows 96 to 98 are saturated, so the warning says what the table really prunes at 0.97.
    ck_assert_ptr_nonnull(strstr((char *)text,
                                 "\"not quite; from ratio 0.97 on less is pruned than LUKVPress is asked for, "
                                 "since heads stopped at their floor: 0.48 at 0.97\""));
    ck_assert(strstr((char *)text, "sink=4, window=64") != NULL && strstr((char *)text, "curve.npy") != NULL);
    free(text);
    free(data);
    cJSON_Delete(m);
}

// kvpress takes row round(100 r) of 99, and ignores constraints.
UNIT_TEST(what_kvpress_cannot_do)
{
    cJSON *m = metadata();
    cJSON_AddStringToObject(m, "constraints", "{\"block\":16}");
    table_content c = content(m);
    char *warning = table_kvpress_warning(&c, NULL);
    ck_assert_ptr_nonnull(strstr(warning, "choose the kvpress scorer"));
    ck_assert_ptr_nonnull(strstr(warning, "; LUKVPress ignores the table's constraints"));
    ck_assert_ptr_nonnull(strstr(warning, "; from ratio 0.97 on"));
    free(warning);
    cJSON_AddStringToObject(m, "n_rows", "41");
    c.n_rows = 41;
    help_fails(table_export_npy(help_path("curve.npy"), &c, NULL, err), KVB_UNSUPPORTED,
               "the table has 41 rows up to ratio 0.41, and kvpress's LUKVPress takes row");
    ck_assert(!help_exists(help_path("curve.npy")));
    cJSON_Delete(m);
}

// An open table can be written again unchanged.
UNIT_TEST(content_of_an_open_table)
{
    cJSON *m = metadata();
    const table_content c = content(m);
    const char *path = help_path("t.safetensors"), *again = help_path("again.safetensors");
    kvb_table *table;
    rank_content none;
    size_t n, k;
    help_ok(table_write(path, &c, err));
    help_ok(kvb_table_open(&table, path, NULL, err));
    const table_content read = table_content_of(table, m, &none);
    help_ok(table_write(again, &read, err));
    unsigned char *a = help_slurp(path, &n), *b = help_slurp(again, &k);
    ck_assert(n == k && memcmp(a, b, n) == 0);
    free(a);
    free(b);
    kvb_table_close(table);
    cJSON_Delete(m);
}

// Between two rows a head's bytes are between theirs, in proportion, unless all of its tokens take less than that.
static void check_mixed_bytes(const kvb_table *table, double ratio)
{
    static const double PER_NUMBER[KVB_PACKINGS] = {2, 1.125, 0.625, 0.375}; // a group of 32 has 4 bytes of its own
    const kvb_budget_options opt = {.rounding = KVB_ROUND_FLOOR, .lookup = KVB_LOOKUP_LINEAR};
    const double low = floor(ratio * 100) / 100, at[3] = {low, low + 0.01, ratio};
    double bytes[3][L * G];
    uint32_t keep[L * G], n_tokens = 1u << 30;
    uint8_t codes[L * G * 2];
    for (int i = 0; i < 3; i++) {
        help_ok(kvb_budgets(table, at[i], n_tokens, &opt, keep, L * G, err));
        help_ok(kvb_formats(table, at[i], codes, sizeof codes, err));
        for (size_t h = 0; h < L * G; h++)
            bytes[i][h] = keep[h] / (double)n_tokens * (PER_NUMBER[codes[2 * h]] + PER_NUMBER[codes[2 * h + 1]]);
    }
    for (size_t h = 0; h < L * G; h++) {
        double want = fma((ratio - low) * 100, bytes[1][h] - bytes[0][h], bytes[0][h]);
        ck_assert(fabs(bytes[2][h] - want) < 1e-6 || (keep[h] == n_tokens && bytes[2][h] < want));
    }
}

// Formats are read row by row as they were written, and wrong ones are refused.
UNIT_TEST(formats_of_heads)
{
    static uint8_t codes[R * L * G * 2], got[L * G * 2];
    cJSON *m = metadata();
    table_content c = content(m);
    kvb_table *table;
    const char *path = help_path("v2.safetensors");
    uint32_t near[L * G], mixed[L * G];
    const kvb_budget_options linear = {.lookup = KVB_LOOKUP_LINEAR};
    for (size_t i = 0; i < sizeof codes; i++) codes[i] = (uint8_t)(i * 7 / 3 % KVB_PACKINGS);
    help_ok(table_write(path, &c, err));
    help_ok(kvb_table_open(&table, path, NULL, err));
    ck_assert(!kvb_table_has_formats(table) && !kvb_table_has_formats(NULL));
    help_ok(kvb_formats(table, 0.5, got, sizeof got, err));
    for (size_t i = 0; i < sizeof got; i++) ck_assert_uint_eq(got[i], KVB_PACK_BF16);
    kvb_table_close(table);
    c.formats = codes;
    cJSON_ReplaceItemInObject(m, "format_version", cJSON_CreateString("2"));
    help_ok(table_write(path, &c, err));
    help_ok(kvb_table_open(&table, path, NULL, err));
    ck_assert(kvb_table_has_formats(table));
    for (int row = 0; row < R; row++) {
        help_ok(kvb_formats(table, (row + 1.3) / 100, got, sizeof got, err));
        ck_assert_mem_eq(got, codes + row * sizeof got, sizeof got);
    }
    help_ok(kvb_budgets(table, 0.5, 1000, NULL, near, L * G, err));
    help_ok(kvb_budgets(table, 0.5, 1000, &linear, mixed, L * G, err));
    ck_assert_mem_eq(near, mixed, sizeof near);
    for (double ratio = 0.0045; ratio < 0.99; ratio += 0.0103) check_mixed_bytes(table, ratio);
    help_ok(kvb_formats(table, 0, got, sizeof got, err));
    for (size_t i = 0; i < sizeof got; i++) ck_assert_uint_eq(got[i], KVB_PACK_BF16);
    help_fails(kvb_formats(table, 0.5, got, sizeof got - 1, err), KVB_CAPACITY, "formats");
    help_fails(kvb_formats(table, 1, got, sizeof got, err), KVB_ARGUMENT, "ratio");
    help_fails(kvb_formats(NULL, 0.5, got, sizeof got, err), KVB_ARGUMENT, "NULL");
    kvb_table_close(table);
    codes[5] = KVB_PACKINGS;
    help_fails(table_write(path, &c, err), KVB_FORMAT,
               "tensor \"formats\": element 5: expected a format below 4, found 4");
    codes[5] = 1;
    cJSON_AddStringToObject(m, "bounded_layers", "0");
    for (int i = 0; i < R; i++) memset(prune + i * L * G, 0, G * sizeof *prune);
    help_fails(table_write(path, &c, err), KVB_FORMAT, "element 1: expected a format below 4, and 0 in bounded layers");
    cJSON_Delete(m);
}

// Copies that are cut short or have one wrong bit are refused, or else give the numbers of the whole one.
UNIT_TEST(damage)
{
    cJSON *m = metadata();
    table_content t = content(m);
    unsigned char *good;
    size_t size, opened = 0, header = 0;
    help_ok(table_serialize(&good, &size, &t, err));
    memcpy(&header, good, 8);
    for (size_t i = 0; i < size; i += i < header + 64 ? 1 : 37) {
        kvb_table *table;
        kvb_error e;
        unsigned char *copy = malloc(i + 1);
        memcpy(copy, good, i);
        ck_assert(kvb_table_open_memory(&table, copy, i, "t.safetensors", NULL, &e) != KVB_OK);
        ck_assert(strstr(e.message, "t.safetensors") != NULL);
        free(copy);
        good[i] ^= (unsigned char)(1 << i % 8);
        if (kvb_table_open_memory(&table, good, size, "t.safetensors", NULL, &e) == KVB_OK) {
            opened++;
            ck_assert(memcmp(kvb_table_prune_ratios(table), prune, sizeof prune) == 0);
        } else ck_assert(strstr(e.message, "t.safetensors") != NULL);
        kvb_table_close(table);
        good[i] ^= (unsigned char)(1 << i % 8);
    }
    ck_assert_uint_le(opened, strlen(KVB_CONTENT_KEY)); // where the key of the hash itself was hit
    free(good);
    cJSON_Delete(m);
}

UNIT_MAIN_EACH("formats_table", help_setup, help_teardown)
