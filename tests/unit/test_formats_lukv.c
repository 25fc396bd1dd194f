// The published directory layout: exported from a record and imported again, and as others write it.
#include "formats/lukv_steps.h"
#include "formats/npy.h"
#include "formats_record_help.h"

UNIT_TEST(there_and_back)
{
    record *r;
    help_ok(small_write(help_path("run.h5"), false, err));
    help_ok(record_open(&r, help_path("run.h5"), err));
    help_ok(lukv_steps_export(r, help_path("steps"), err));
    help_fails(lukv_steps_export(r, help_path("steps"), err), KVB_ARGUMENT, "not empty");
    record_close(r);
    static const char *const files[] = {"context_zeta/snapkv.npy",         "context_zeta/keydiff.npy",
                                        "context_zeta/question_0.npy",     "context_zeta/question_12.npy",
                                        "context_zeta/context_ids.npy",    "context_zeta/answer_ids_12.npy",
                                        "context_alpha-2/suffix_ids_1.npy"};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++)
        ck_assert_msg(help_exists(help_path("steps/%s", files[i])), "%s", files[i]);
    ck_assert(!help_exists(help_path("steps/context_zeta/question_1.npy"))); // it was skipped
    help_ok(lukv_steps_import(help_path("steps"), help_path("back.h5"), NULL, err));
    size_t n, m;
    unsigned char *a = help_slurp(help_path("run.h5"), &n), *b = help_slurp(help_path("back.h5"), &m);
    ck_assert(n == m && memcmp(a, b, n) == 0); // nothing was lost: not an attribute, not a skipped question
    free(a);
    free(b);
}

// As other programs write it: no side file, int64 ids, some arrays in float64, names in no order.
static void write_published(void)
{
    static float array[2 * 3 * 5];
    double wide[2 * 3 * 5];
    int64_t ids[5] = {10, 11, 12, 13, 14};
    const uint64_t shape[3] = {2, 3, 5}, five = 5, four = 4;
    for (int i = 0; i < 30; i++) wide[i] = array[i] = (float)i / 8;
    mkdir(help_path("pub"), 0777);
    for (int c = 2; c <= 10; c += 8) {
        mkdir(help_path("pub/context_%d", c), 0777);
        help_ok(npy_write(help_path("pub/context_%d/ea.npy", c), NPY_F64, 3, shape, wide, err));
        help_ok(npy_write(help_path("pub/context_%d/my_metric.npy", c), NPY_F32, 3, shape, array, err));
        help_ok(npy_write(help_path("pub/context_%d/question_0.npy", c), NPY_F32, 3, shape, array, err));
        help_ok(npy_write(help_path("pub/context_%d/question_1.npy", c), NPY_F32, 3, shape, array, err));
    }
    help_ok(npy_write(help_path("pub/context_2/context_ids.npy"), NPY_I64, 1, &five, ids, err));
    help_ok(npy_write(help_path("pub/context_2/answer_ids_1.npy"), NPY_I64, 1, &four, ids, err));
    help_spew(help_path("pub/context_2/notes.txt"), "x", 1);
}

static void protect_known(const char *metric, uint32_t *sink, uint32_t *window)
{
    ck_assert(*sink == 4 && *window == 1);
    if (strcmp(metric, "ea:lukv") == 0) *window = 32;
}

UNIT_TEST(published)
{
    write_published();
    cJSON *extra = cJSON_CreateObject();
    cJSON_AddStringToObject(extra, "model_id", "tiny");
    lukv_steps_options o = {.n_heads = 9, .head_dim = 64, .attributes = extra, .protect = protect_known};
    help_ok(lukv_steps_import(help_path("pub"), help_path("run.h5"), &o, err));
    record *r;
    help_ok(record_open(&r, help_path("run.h5"), err));
    help_ok(small_read_all(r, err));
    record_shape s = record_get_shape(r);
    ck_assert(s.n_layers == 2 && s.n_heads == 9 && s.n_kv_heads == 3 && s.head_dim == 64);
    unit_strings(cJSON_GetObjectItem(record_attributes(r), "model_id")->valuestring, "tiny",
                 cJSON_GetObjectItem(record_attributes(r), "imported_from")->valuestring, "lukv-steps");
    ck_assert(cJSON_IsTrue(cJSON_GetObjectItem(record_attributes(r), "n_queries_assumed")));
    ck_assert_str_eq(cJSON_GetObjectItem(record_attributes(r), "metrics")->valuestring,
                     "{\"ea:lukv\":{\"protect_sink\":4,\"protect_window\":32},"
                     "\"my_metric\":{\"protect_sink\":4,\"protect_window\":1}}");
    const record_context_info *c = record_context(r, 0);
    ck_assert_str_eq(c->id, "2"); // before "10"
    unit_strings(c->metrics[0], "ea:lukv", c->metrics[1], "my_metric");
    ck_assert(c->n_questions == 2 && c->questions[0].n_queries == 63 && c->questions[1].n_queries == 3);
    int32_t ids[5];
    float array[30];
    help_ok(record_read_tokens(r, 0, ids, err));
    ck_assert_int_eq(ids[4], 14);
    help_ok(record_read_scores(r, 0, "ea:lukv", array, err));
    ck_assert(array[29] == 29.0F / 8);
    help_ok(record_read_tokens(r, 1, ids, err));
    ck_assert_int_eq(ids[4], -1);
    record_close(r);
    cJSON_Delete(extra);
}

UNIT_TEST(mistakes)
{
    const uint64_t shape[3] = {2, 3, 4}, flat[2] = {2, 12};
    static const float array[24];
    const char *out = help_path("run.h5");
    help_fails(lukv_steps_import(help_path("none"), out, NULL, err), KVB_IO, "none");
    mkdir(help_path("empty"), 0777);
    help_fails(lukv_steps_import(help_path("empty"), out, NULL, err), KVB_FORMAT, "context_<id>");
    mkdir(help_path("empty/context_a"), 0777);
    help_fails(lukv_steps_import(help_path("empty"), out, NULL, err), KVB_FORMAT, "no array");
    help_ok(npy_write(help_path("empty/context_a/m.npy"), NPY_F32, 2, flat, array, err));
    help_fails(lukv_steps_import(help_path("empty"), out, NULL, err), KVB_FORMAT, "m.npy");
    help_ok(npy_write(help_path("empty/context_a/m.npy"), NPY_I32, 3, shape, array, err));
    help_fails(lukv_steps_import(help_path("empty"), out, NULL, err), KVB_UNSUPPORTED, "<i4");
    write_published();
    help_ok(npy_write(help_path("pub/context_10/question_1.npy"), NPY_F32, 3, shape, array, err));
    help_fails(lukv_steps_import(help_path("pub"), out, NULL, err), KVB_MISMATCH, "context_10/question_1.npy");
    help_fails(lukv_steps_import(help_path("pub"), out, NULL, err), KVB_MISMATCH, "--resume");
    help_remove(help_path("run.h5.parts"));
    help_spew(help_path("pub/kvbudget.json"), "{}", 2);
    help_fails(lukv_steps_import(help_path("pub"), out, NULL, err), KVB_FORMAT, "kvbudget.json");
    remove(help_path("pub/kvbudget.json"));
    mkdir(help_path("pub/context_a b"), 0777);
    help_fails(lukv_steps_import(help_path("pub"), out, NULL, err), KVB_FORMAT, "context_a b");
}

// An export that fails leaves no folder, and the next one removes what a killed export left.
UNIT_TEST(exports_are_whole_or_not_there)
{
    record *r;
    help_ok(small_write(help_path("run.h5"), false, err));
    help_ok(record_open(&r, help_path("run.h5"), err));
    mkdir(help_path("steps.0123abcd.partial"), 0777);
    mkdir(help_path("steps.0123abcd.partial/context_a"), 0777);
    help_spew(help_path("steps.0123abcd.partial/context_a/x.npy"), "x", 1);
    ck_assert_int_eq(truncate(help_path("run.h5"), 4000), 0); // reading fails
    ck_assert_int_ne(lukv_steps_export(r, help_path("steps"), NULL), KVB_OK);
    record_close(r);
    ck_assert(!help_exists(help_path("steps")) && !help_exists(help_path("steps.0123abcd.partial")));
    char command[300];
    snprintf(command, sizeof command, "test $(ls %s | wc -l) = 1", help_folder);
    ck_assert_int_eq(system(command), 0);
}

UNIT_MAIN_EACH("formats_lukv", help_setup, help_teardown)
