// What `kvbudget inspect` prints about rankings, and how documents are printed.
#include "formats/table_write.h"
#include "formats_help.h"
#include "tools/json_print.h"
#include "tools/report/inspect_files.h"

enum { L = 2, G = 1, P = 4 };

#define ABOUT "{\"features\":[{\"metric\":\"knorm\",\"log\":false}],\"sink\":1,\"folds\":[]}"

// One feature: w, w', recency, constant. One deviation changes the score by |w + w'|, and recency's by |w_r|.
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

UNIT_TEST(rankings)
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

// A document as text: names and values, inner objects indented, no control characters.
UNIT_TEST(documents_as_text)
{
    static char text[2048];
    cJSON *doc = cJSON_Parse(
        "{\"a\":1.5,\"b\":\"x\\u001b[2J\",\"c\":{\"d\":true},\"e\":[1,2],\"f\":[{\"g\":1,\"h\":{\"i\":2}}]}");
    char size[12], *at, *long_text = calloc(3001, 1);
    for (int i = 0; i < 1500; i++) strcat(long_text, "\u00fc"); // two bytes each
    cJSON_AddStringToObject(doc, "k", long_text);
    free(long_text);
    FILE *kept = stdout;
    stdout = fmemopen(text, sizeof text - 1, "w");
    document_print(doc);
    ck_assert_int_eq(fclose(stdout), 0);
    stdout = kept;
    ck_assert_ptr_nonnull(at = strstr(text, "k: "));
    snprintf(size, sizeof size, "%zu", strspn(at + 4, "\u00fc"));
    ck_assert_str_eq(size, "998"); // only whole characters
    ck_assert_str_eq(strstr(at, "..."), "... (3002 bytes)\n");
    *at = '\0';
    ck_assert_str_eq(text, "a: 1.5\nb: \"x\\u001b[2J\"\nc:\n  d: true\ne: [1,2]\nf:\n  - g 1\n    h:\n      i: 2\n");
    cJSON_Delete(doc);
    doc = cJSON_CreateString("a\xff"); // JSON is UTF-8, whatever a file's name is
    char *whole = json_to_text(doc);
    ck_assert_str_eq(whole, "\"a?\"");
    cJSON_free(whole);
    cJSON_Delete(doc);
}

UNIT_MAIN("tools_inspect")
