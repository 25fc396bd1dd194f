// A learned ranking as a metric: its scores are what the runtime makes of its features' scores; and what is refused.
#include "formats/table_write.h"
#include "profiler/metric/learned.h"
#include "runtime/rank.h"
#include "test_profiler_views.h"

enum { LAYERS = 2 };
static char path[64], ranking_name[24];

// Writes a ranking by these features, with weights that differ from head to head.
static void write_ranking(const char *features, uint32_t n_features, uint32_t G)
{
    char about[512];
    double weights[LAYERS * 8 * 6];
    kvb_error err = {0};
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) weights[i] = 0.1 * (double)(i % 13) - 0.5;
    snprintf(about, sizeof about, "{\"features\":[%s],\"sink\":4,\"folds\":[]}", features);
    rank_content content = {0, LAYERS, G, 2 * n_features + 2, weights, about};
    char *named = rank_name(ranking_name, &content);
    content.about = named;
    cJSON *m = cJSON_CreateObject();
    cJSON_AddStringToObject(m, "model_sha256", "AAAA");
    kvb_status status = rank_write(path, &content, m, &err);
    ck_assert_msg(status == KVB_OK, "%s", err.message);
    cJSON_Delete(m);
    free(named);
}

#define TWO "{\"metric\":\"knorm\",\"log\":false},{\"metric\":\"snapkv:kvpress:window=8\",\"log\":true}"

static char *named(void)
{
    static char text[96];
    snprintf(text, sizeof text, LEARNED_FILE "%s", path);
    return text;
}

static void setup(void)
{
    help_setup();
    strcpy(path, help_path("ranking"));
}

UNIT_TEST(scores_are_the_runtimes)
{
    const shape s = {9, 3, 8};
    enum { T = 50 };
    learned_list list = {0};
    metric m, knorm, snapkv;
    layer_view v = view_make(s, T, 1);
    v.layer = 1;
    write_ranking(TWO, 2, s.G);
    help_ok(learned_parse(&m, named(), &list, err));
    ck_assert_str_eq(m.spec, ranking_name);
    ck_assert(m.fold == 0 && learned_fold(&m, 2).fold == 2);
    metric_parse(&knorm, "knorm", NULL);
    metric_parse(&snapkv, "snapkv:kvpress:window=8", NULL);
    ck_assert_uint_eq(metric_needs(&m), metric_needs(&knorm) | metric_needs(&snapkv));
    ck_assert_uint_eq(metric_least_tokens(&m), metric_least_tokens(&snapkv));
    ck_assert_uint_eq(metric_protect_window(&m), 1);
    float got[3 * T], a[3 * T], b[3 * T], want[T];
    help_ok(metric_score(&m, &v, got, err));
    help_ok(metric_score(&knorm, &v, a, err));
    help_ok(metric_score(&snapkv, &v, b, err));
    for (uint32_t g = 0; g < s.G; g++) {
        const float *features[] = {a + g * T, b + g * T};
        help_ok(kvb_rank_heads(learned_ranking_of(&m), 0, s.G + g, 1, features, T, want, err));
        ck_assert(memcmp(got + g * T, want, sizeof want) == 0);
    }
    v.layer = LAYERS;
    help_fails(metric_score(&m, &v, got, err), KVB_MISMATCH, "");
    view_free(&v);
    learned_list_close(&list);
}

UNIT_TEST(refusals)
{
    learned_list list = {0};
    metric m;
    write_ranking(TWO, 2, 3);
    help_ok(learned_parse(&m, named(), &list, err));
    help_ok(learned_check_model(&m, LAYERS, 3, "aaaa", err));
    help_fails(learned_check_model(&m, LAYERS, 3, "bbbb", err), KVB_MISMATCH, "");
    help_fails(learned_check_model(&m, LAYERS, 2, "aaaa", err), KVB_MISMATCH, "");
    write_ranking("{\"metric\":\"nonsense\",\"log\":false}", 1, 3);
    help_fails(learned_parse(&m, named(), &list, err), KVB_ARGUMENT, ranking_name);
    write_ranking("{\"metric\":\"streaming:kvpress\",\"log\":false}", 1, 3); // its order depends on the budget
    help_fails(learned_parse(&m, named(), &list, err), KVB_ARGUMENT, "");
    help_fails(learned_parse(&m, "learned:0123456789ab", &list, err), KVB_ARGUMENT, "RANK.safetensors");
    help_fails(learned_parse(&m, "learned=/no/such/file", &list, err), KVB_IO, "");
    help_ok(learned_parse(&m, "keydiff", &list, err));
    ck_assert_ptr_null(learned_ranking_of(&m));
    help_ok(learned_check_model(&m, 1, 1, "x", err));
    learned_list_close(&list);
    learned_list_close(&list);
}

// Writes a table that carries the ranking of the file `ranking`, or none if that is NULL.
static void write_table(const char *table, const char *ranks_by, const char *ranking)
{
    static double prune[99 * LAYERS * 3], row[99];
    static uint8_t saturated[99];
    kvb_error err = {0};
    kvb_ranking *r = NULL;
    rank_content carried = {0};
    char changes[128];
    snprintf(changes, sizeof changes, "{\"n_heads\":\"3\",\"n_kv_heads\":\"3\",\"head_dim\":\"8\",\"metric\":\"%s\"}",
             ranks_by);
    cJSON *m = help_table_metadata(changes);
    for (int i = 0; i < 99; i++) row[i] = (i + 1) / 100.0;
    if (ranking) ck_assert_int_eq(kvb_ranking_open(&r, ranking, &err), KVB_OK);
    if (ranking) carried = rank_content_of(r);
    if (ranking) cJSON_AddStringToObject(m, "ranking", carried.about);
    const table_content t = {
        99, LAYERS, 3, prune, row, prune, row, row, row, row, row, saturated, NULL, ranking ? &carried : NULL, m};
    kvb_status status = table_write(table, &t, &err);
    ck_assert_msg(status == KVB_OK, "%s", err.message);
    kvb_ranking_close(r);
    cJSON_Delete(m);
}

UNIT_TEST(of_a_table)
{
    learned_list list = {0};
    metric m, again;
    kvb_table *table;
    char file[80];
    snprintf(file, sizeof file, "%s.table", path);
    write_ranking(TWO, 2, 3);
    write_table(file, ranking_name, path);
    help_ok(kvb_table_open(&table, file, NULL, err));
    help_ok(learned_of_table(&m, table, &list, err));
    help_ok(learned_of_table(&again, table, &list, err));
    ck_assert_ptr_eq(learned_ranking_of(&m), kvb_table_ranking(table));
    ck_assert(list.n == 1 && strcmp(m.spec, again.spec) == 0); // opened once
    learned_list_close(&list);
    kvb_table_close(table);
    write_table(file, "knorm", NULL);
    help_ok(kvb_table_open(&table, file, NULL, err));
    help_ok(learned_of_table(&m, table, &list, err));
    ck_assert_ptr_null(learned_ranking_of(&m));
    ck_assert_str_eq(m.spec, "knorm");
    kvb_table_close(table);
    unlink(file);
}

UNIT_MAIN_EACH("profiler_learned", setup, help_teardown)
