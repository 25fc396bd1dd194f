// A learned ranking as a metric: its scores are the runtime's, made of its features' scores; who is refused.
#include "formats/rank_write.h"
#include "profiler/learned.h"
#include "runtime/rank.h"
#include "test_profiler_views.h"
#include <unistd.h>

enum { LAYERS = 2 };
static char path[64];

// Features for the shape's heads, weights that differ from head to head.
static void write_ranking(const char *features, uint32_t n_features, uint32_t G)
{
    char about[512];
    double weights[LAYERS * 8 * 6];
    kvb_error err = {0};
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) weights[i] = 0.1 * (double)(i % 13) - 0.5;
    snprintf(about, sizeof about, "{\"name\":\"learned:0123456789ab\",\"features\":[%s],\"sink\":4,\"folds\":[]}",
             features);
    const rank_content content = {0, LAYERS, G, 2 * n_features + 2, weights, about};
    cJSON *m = cJSON_CreateObject();
    cJSON_AddStringToObject(m, "model_sha256", "AAAA");
    kvb_status status = rank_write(path, &content, m, &err);
    ck_assert_msg(status == KVB_OK, "%s", err.message);
    cJSON_Delete(m);
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
    strcpy(path, "/tmp/kvb-learned-XXXXXX");
    close(mkstemp(path));
}

static void teardown(void)
{
    unlink(path);
}

START_TEST(scores_are_the_runtimes)
{
    const shape s = {9, 3, 8};
    enum { T = 50 };
    learned_list list = {0};
    metric m, knorm, snapkv;
    kvb_error err = {0};
    layer_view v = view_make(s, T, 1);
    v.layer = 1;
    write_ranking(TWO, 2, s.G);
    ck_assert_msg(learned_parse(&m, named(), &list, &err) == KVB_OK, "%s", err.message);
    ck_assert_str_eq(m.spec, "learned:0123456789ab");
    metric_parse(&knorm, "knorm", NULL);
    metric_parse(&snapkv, "snapkv:kvpress:window=8", NULL);
    ck_assert_uint_eq(metric_needs(&m), metric_needs(&knorm) | metric_needs(&snapkv));
    ck_assert_uint_eq(metric_needs_on_device(&m), metric_needs_on_device(&knorm) | metric_needs_on_device(&snapkv));
    ck_assert_uint_eq(metric_least_tokens(&m), metric_least_tokens(&snapkv));
    ck_assert_uint_eq(metric_protect_window(&m), 1);
    float got[3 * T], a[3 * T], b[3 * T], want[T];
    ck_assert_int_eq(metric_score(&m, &v, got, &err), KVB_OK);
    ck_assert_int_eq(metric_score(&knorm, &v, a, &err), KVB_OK);
    ck_assert_int_eq(metric_score(&snapkv, &v, b, &err), KVB_OK);
    for (uint32_t g = 0; g < s.G; g++) {
        const float *features[] = {a + g * T, b + g * T};
        ck_assert_int_eq(kvb_rank_fold(learned_ranking_of(&m), 0, s.G + g, features, T, want, &err), KVB_OK);
        ck_assert(memcmp(got + g * T, want, sizeof want) == 0);
    }
    v.layer = LAYERS;
    ck_assert_int_eq(metric_score(&m, &v, got, &err), KVB_MISMATCH);
    view_free(&v);
    learned_list_close(&list);
}
END_TEST

START_TEST(refusals)
{
    learned_list list = {0};
    metric m;
    kvb_error err = {0};
    write_ranking(TWO, 2, 3);
    ck_assert_int_eq(learned_parse(&m, named(), &list, &err), KVB_OK);
    ck_assert_int_eq(learned_check_model(&m, LAYERS, 3, "aaaa", &err), KVB_OK);
    ck_assert_int_eq(learned_check_model(&m, LAYERS, 3, "bbbb", &err), KVB_MISMATCH);
    ck_assert_int_eq(learned_check_model(&m, LAYERS, 2, "aaaa", &err), KVB_MISMATCH);
    write_ranking("{\"metric\":\"nonsense\",\"log\":false}", 1, 3);
    ck_assert_int_eq(learned_parse(&m, named(), &list, &err), KVB_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(err.message, "ranking learned:0123456789ab"));
    write_ranking("{\"metric\":\"streaming:kvpress\",\"log\":false}", 1, 3); // its order depends on the budget
    ck_assert_int_eq(learned_parse(&m, named(), &list, &err), KVB_ARGUMENT);
    ck_assert_int_eq(learned_parse(&m, "learned:0123456789ab", &list, &err), KVB_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(err.message, "RANK.safetensors"));
    ck_assert_int_eq(learned_parse(&m, "learned=/no/such/file", &list, &err), KVB_IO);
    ck_assert_int_eq(learned_parse(&m, "keydiff", &list, &err), KVB_OK);
    ck_assert_ptr_null(learned_ranking_of(&m));
    ck_assert_int_eq(learned_check_model(&m, 1, 1, "x", &err), KVB_OK);
    learned_list_close(&list);
    learned_list_close(&list);
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, scores_are_the_runtimes);
    tcase_add_test(tc, refusals);
}

UNIT_MAIN("profiler_learned", fill)
