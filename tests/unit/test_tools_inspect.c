// What `kvbudget inspect` says of rankings and of results, and the picture of a ranking's weights.
#include "formats/table_write.h"
#include "formats_help.h"
#include "tools/json_print.h"
#include "tools/report/inspect_answers.h"
#include "tools/report/inspect_rank.h"
#include "tools/report/inspect_results.h"
#include "tools/report/weights_picture.h"

enum { L = 2, G = 1, P = 4 };

#define ABOUT "{\"features\":[{\"metric\":\"knorm\",\"log\":false}],\"sink\":1,\"folds\":[]}"

// One feature: w, w', recency, constant. What one deviation does: |w + w'|, and of recency |w_r|.
static double weights[L * G * P] = {3, 0, 1, 0, -2, 0.5, 0.5, 3};

static const char *ranking_file(void)
{
    const char *path = help_path("rank.safetensors");
    char name[24];
    rank_content content = {0, L, G, P, weights, ABOUT};
    char *named = rank_name(name, &content);
    content.about = named;
    cJSON *metadata = cJSON_CreateObject();
    cJSON_AddStringToObject(metadata, "model_sha256", "abc");
    help_ok(rank_write(path, &content, metadata, err));
    cJSON_Delete(metadata);
    free(named);
    return path;
}

static double number(const cJSON *of, const char *name)
{
    return cJSON_GetNumberValue(cJSON_GetObjectItem(of, name));
}

START_TEST(rankings)
{
    cJSON *doc = cJSON_CreateObject();
    help_ok(inspect_ranking(doc, ranking_file(), err));
    const cJSON *effect = cJSON_GetObjectItem(doc, "mean_effect");
    ck_assert_double_eq_tol(number(effect, "knorm"), (3 + 1.5) / 2, 1e-12);
    ck_assert_double_eq_tol(number(effect, "recency"), (1 + 0.5) / 2, 1e-12);
    ck_assert(number(doc, "n_layers") == L && number(doc, "n_kv_heads") == G);
    ck_assert_str_eq(cJSON_GetStringValue(cJSON_GetObjectItem(doc, "model_sha256")), "abc");
    cJSON_Delete(doc);
    doc = cJSON_CreateObject();
    help_fails(inspect_ranking(doc, help_path("none.safetensors"), err), KVB_IO, "none.safetensors");
    cJSON_Delete(doc);
}
END_TEST

// Of a ranking of whole layers: own parts, the layer's means, recency, each under its name.
START_TEST(effects_of_whole_layers)
{
    static const double of_head[2 * 3 + 2] = {1, -3, 0.5, 0.5, 4, -5, -6, 7};
    static const char *const metrics[] = {"keydiff", "knorm"}, *const names[] = {"keydiff", "knorm", "layer's keydiff",
                                                                                 "layer's knorm", "recency"};
    static const double want[] = {2, 1, 4, 5, 6};
    const kvb_ranking_info r = {
        .n_features = 2, .n_columns = 8, .metrics = metrics, .weights = of_head, .layer_mean = 1};
    ck_assert_uint_eq(weights_effects(&r), 5);
    for (uint32_t i = 0; i < 5; i++) {
        char name[32];
        weights_effect_name(&r, i, name, sizeof name);
        ck_assert_str_eq(name, names[i]);
        ck_assert_double_eq(weights_effect(&r, 0, i), want[i]);
    }
}
END_TEST

START_TEST(weights_as_a_picture)
{
    static char text[16384];
    kvb_ranking *ranking;
    help_ok(kvb_ranking_open(&ranking, ranking_file(), err));
    FILE *out = fmemopen(text, sizeof text - 1, "w");
    weights_svg(ranking, out);
    ck_assert_int_eq(fclose(out), 0);
    kvb_ranking_close(ranking);
    ck_assert(strstr(text, "<svg ") && strstr(text, "</svg>"));
    const char *knorm = strstr(text, "knorm"), *recency = strstr(text, "recency");
    ck_assert(knorm && recency && knorm < recency);
    ck_assert(is_results(text, strlen(text))); // inspect knows it again
}
END_TEST

START_TEST(results)
{
    static const char json[] =
        "{\"schema\":\"kvbudget-results\",\"schema_version\":1,\"tool_version\":\"0\",\"command\":"
        "\"eval\",\"arguments\":[\"eval\"],\"inputs\":[],\"settings\":{},\"rows\":[{\"metric\":"
        "\"knorm\",\"kl\":1},{\"metric\":\"knorm\",\"ratio\":0.5}],\"details\":{}}";
    static const char csv[] = "metric,ratio,kl\nknorm,0.5,1\nknorm,0.8,2\n";
    ck_assert(is_results(json, strlen(json)) && is_results(csv, strlen(csv)));
    ck_assert(!is_results("{}", 2) && !is_results("", 0) && !is_results("tasks,", 6));
    cJSON *doc = cJSON_CreateObject();
    help_ok(inspect_results(doc, json, strlen(json), "worth.json", err));
    ck_assert(number(doc, "n_rows") == 2);
    ck_assert_int_eq(cJSON_GetArraySize(cJSON_GetObjectItem(doc, "columns")), 3); // metric, kl, ratio
    cJSON_Delete(doc);
    doc = cJSON_CreateObject();
    help_ok(inspect_results(doc, csv, strlen(csv), "worth.csv", err));
    ck_assert(number(doc, "n_rows") == 2);
    cJSON_Delete(doc);
    doc = cJSON_CreateObject();
    help_fails(inspect_results(doc, json, strlen(json) - 9, "cut.json", err), KVB_FORMAT, "cut.json");
    cJSON_Delete(doc);
}
END_TEST

// A document as text: names and values, inner objects indented, nothing that a terminal would obey.
START_TEST(documents_as_text)
{
    static char text[1024];
    cJSON *doc = cJSON_Parse(
        "{\"a\":1.5,\"b\":\"x\\u001b[2J\",\"c\":{\"d\":true},\"e\":[1,2],\"f\":[{\"g\":1,\"h\":{\"i\":2}}]}");
    FILE *kept = stdout;
    stdout = fmemopen(text, sizeof text - 1, "w");
    document_print(doc);
    ck_assert_int_eq(fclose(stdout), 0);
    stdout = kept;
    ck_assert_str_eq(text, "a: 1.5\nb: \"x\\u001b[2J\"\nc:\n  d: yes\ne: [1, 2]\nf:\n  - g 1\n    h:\n      i: 2\n");
    cJSON_Delete(doc);
}
END_TEST

START_TEST(answers_need_a_record_and_its_model)
{
    cJSON *doc = cJSON_CreateObject();
    help_fails(inspect_answers(doc, help_path("none.h5"), help_path("none.gguf"), NULL, err), KVB_IO, "none.h5");
    ck_assert_int_eq(cJSON_GetArraySize(cJSON_GetObjectItem(doc, "answers")), 0);
    cJSON_Delete(doc);
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, rankings);
    tcase_add_test(tc, effects_of_whole_layers);
    tcase_add_test(tc, weights_as_a_picture);
    tcase_add_test(tc, results);
    tcase_add_test(tc, documents_as_text);
    tcase_add_test(tc, answers_need_a_record_and_its_model);
}

UNIT_MAIN("tools_inspect", fill)
