// Records that are merged: which attributes the result has, what is refused, and that its bytes are those of one run;
// and loss curves and gains in records: what was written is read, and damage is named.
#include "formats/record_growth.h"
#include "formats_record_help.h"

enum {
    T = 9,
    COUNT = SMALL_L * SMALL_G * T,
    CURVE = SMALL_L * SMALL_G * RECORD_CURVE_LEVELS,
    GAIN = SMALL_L * RECORD_GAIN_KINDS * 2,
    PACKING = SMALL_L * SMALL_G * RECORD_PACKINGS
};

// A record of some contexts, metrics and questions; bit i stands for the i-th name below.
typedef struct piece {
    unsigned contexts, metrics, questions;
    const char *files, *settings; // NULL: that of the contexts' own files; {}
    int seed;
    float spoil;     // added to the first score
    unsigned losses; // metrics that have curves; with keydiff's, each first question has gains, and all have packings
    float shift;     // added to the curves
} piece;

static const char *const context_names[] = {"one", "two", "three"}, *const metric_names[] = {"tova", "keydiff", "ea"};
static const char *const file_hashes[3] = {"1111111111111111111111111111111111111111111111111111111111111111",
                                           "2222222222222222222222222222222222222222222222222222222222222222",
                                           "3333333333333333333333333333333333333333333333333333333333333333"};

static unsigned bits(unsigned set)
{
    return (set & 1) + (set >> 1 & 1) + (set >> 2 & 1);
}

static cJSON *attributes_of(const piece *p)
{
    char files[256] = "", metrics[256] = "{";
    for (int i = 0; i < 3; i++)
        if (p->contexts & 1u << i)
            snprintf(files + strlen(files), sizeof files - strlen(files), "%s%s", *files ? "," : "", file_hashes[i]);
    for (int i = 0; i < 3; i++)
        if (p->metrics & 1u << i)
            snprintf(metrics + strlen(metrics), sizeof metrics - strlen(metrics), "%s\"%s\":%s", metrics[1] ? "," : "",
                     metric_names[i], p->settings ? p->settings : "{\"window\":0.1}");
    strcat(metrics, "}");
    cJSON *a = cJSON_CreateObject();
    cJSON_AddStringToObject(a, "model_sha256", "m");
    cJSON_AddNumberToObject(a, "seed", p->seed);
    cJSON_AddNumberToObject(a, "given_answers", bits(p->contexts) * bits(p->questions));
    cJSON_AddNumberToObject(a, "max_questions", p->questions == 7 ? 0 : bits(p->questions));
    cJSON_AddStringToObject(a, "metrics", metrics);
    record_set_calibration(a, p->files ? p->files : files);
    return a;
}

static void put_context(record_writer *w, size_t c, unsigned metrics, float spoil)
{
    static float scores[3][COUNT];
    const char *names[3];
    const float *arrays[3];
    int32_t ids[T];
    size_t n = 0;
    for (int t = 0; t < T; t++) ids[t] = (int32_t)(100 * c) + t;
    for (size_t m = 0; m < 3; m++) {
        if (!(metrics & 1u << m)) continue;
        for (size_t i = 0; i < COUNT; i++) scores[n][i] = small_score(c, m, i);
        scores[n][0] += spoil;
        names[n] = metric_names[m];
        arrays[n] = scores[n];
        n++;
    }
    help_ok(record_put_context(w, context_names[c], ids, T, names, arrays, n, err));
}

static float curve_of(size_t metric, uint32_t q, size_t i)
{
    return (float)(i * (metric + 1) + q) / 64;
}

static void put_losses(record_writer *w, size_t c, uint32_t q, const piece *p)
{
    static float curves[3][CURVE], gain[GAIN], packing[PACKING];
    const char *put[3];
    const float *arrays[3];
    record_losses l = {put, arrays, 0, q == 0 && p->losses & 2 ? gain : NULL, p->losses & 2 ? packing : NULL};
    for (size_t m = 0; m < 3; m++) {
        if (!(p->losses & 1u << m)) continue;
        for (size_t i = 0; i < CURVE; i++) curves[m][i] = curve_of(m, q, i) + p->shift;
        put[l.n] = metric_names[m];
        arrays[l.n++] = curves[m];
    }
    for (size_t i = 0; i < GAIN; i++) gain[i] = (float)i + 0.5f;
    for (size_t i = 0; i < PACKING; i++) packing[i] = (float)(i + q) / 8;
    help_ok(record_put_losses(w, context_names[c], q, &l, err));
}

static void put_question(record_writer *w, size_t c, uint32_t q)
{
    float oracle[COUNT];
    const int32_t ids[4] = {1, 2, 3, (int32_t)q};
    for (size_t i = 0; i < COUNT; i++) oracle[i] = small_oracle(c, q, i);
    record_question one = {oracle, ids, 4, ids, 2, 63, NULL};
    help_ok(record_put_question(w, context_names[c], q, &one, err));
}

static void finish(record_writer *w, unsigned contexts)
{
    const char *ids[3];
    size_t n = 0;
    for (int c = 0; c < 3; c++)
        if (contexts & 1u << c) ids[n++] = context_names[c];
    help_ok(record_finish(w, ids, n, err));
    record_writer_free(w);
}

static const char *make(const char *name, const piece *p)
{
    const char *path = help_path("%s", name);
    record_writer *w;
    cJSON *a = attributes_of(p);
    help_ok(record_begin(&w, path, &small_shape, a, RECORD_REPLACE, err));
    for (unsigned c = 0; c < 3; c++) {
        if (!(p->contexts & 1u << c)) continue;
        put_context(w, c, p->metrics, p->spoil);
        for (uint32_t q = 0; q < 3; q++)
            if (p->questions & 1u << q) {
                if (p->losses) put_losses(w, c, q, p);
                put_question(w, c, q);
            }
    }
    finish(w, p->contexts);
    cJSON_Delete(a);
    return path;
}

#define INPUTS(...) (const char *const[]){__VA_ARGS__}, sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)

// ---- merging whole records ----

UNIT_TEST(test_texts_and_metrics_join_to_the_bytes_of_one_run)
{
    const char *all = make("all.h5", &(piece){.contexts = 7, .metrics = 7, .questions = 3}), *out = help_path("out.h5");
    const char *a = make("a.h5", &(piece){.contexts = 1, .metrics = 3, .questions = 3}),
               *b = make("b.h5", &(piece){.contexts = 6, .metrics = 3, .questions = 3});
    const char *c = make("c.h5", &(piece){.contexts = 7, .metrics = 4, .questions = 3});
    help_ok(record_merge(out, INPUTS(a, b, c), false, err));
    help_same_file(all, out);
    const char *a4 = make("a4.h5", &(piece){.contexts = 1, .metrics = 4, .questions = 3}),
               *b4 = make("b4.h5", &(piece){.contexts = 6, .metrics = 4, .questions = 3});
    help_ok(record_merge(out, INPUTS(a, b, a4, b4), true, err));
    help_same_file(all, out);
    help_ok(record_merge(out, INPUTS(all, a4), true, err)); // a part of it again
    help_same_file(all, out);
    const char *few = make("few.h5", &(piece){.contexts = 7, .metrics = 7, .questions = 1}),
               *more = make("more.h5", &(piece){.contexts = 7, .metrics = 7, .questions = 7});
    help_ok(record_merge(out, INPUTS(few, more), true, err)); // the same texts with more questions
    help_same_file(more, out);
}

UNIT_TEST(test_what_does_not_belong_together_is_refused)
{
    const struct {
        piece a, b;
        const char *why;
    } cases[] = {
        {{.contexts = 1, .metrics = 3, .questions = 3},
         {.contexts = 2, .metrics = 3, .questions = 3, .seed = 5},
         "seed is 0 in the first, 5 in the second"},
        {{.contexts = 1, .metrics = 3, .questions = 3},
         {.contexts = 2, .metrics = 3, .questions = 3, .settings = "{\"window\":0.2}"},
         "metric tova has different settings"},
        {{.contexts = 1, .metrics = 3, .questions = 3},
         {.contexts = 2, .metrics = 1, .questions = 3},
         "context two has no scores of metric keydiff"},
        {{.contexts = 1, .metrics = 3, .questions = 3},
         {.contexts = 1, .metrics = 3, .questions = 3, .files = file_hashes[2]},
         "both have context one, and none of"},
        {{.contexts = 3, .metrics = 3, .questions = 3},
         {.contexts = 6, .metrics = 3, .questions = 3},
         "1 of 2 calibration files"},
        {{.contexts = 1, .metrics = 3, .questions = 3},
         {.contexts = 1, .metrics = 3, .questions = 3, .spoil = 1},
         "both have context one, with different"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *a = make("a.h5", &cases[i].a), *b = make("b.h5", &cases[i].b), *out = help_path("out.h5");
        help_fails(record_merge(out, INPUTS(a, b), false, err), KVB_MISMATCH, cases[i].why);
        ck_assert(!help_exists(out));
    }
}

// ---- attributes ----

UNIT_TEST(test_calibration_is_the_hash_of_one_file_or_of_all)
{
    cJSON *a = cJSON_CreateObject();
    char two[130];
    record_set_calibration(a, file_hashes[0]);
    ck_assert_str_eq(cJSON_GetObjectItem(a, "calibration_sha256")->valuestring, file_hashes[0]);
    ck_assert_ptr_null(cJSON_GetObjectItem(a, "calibration_files"));
    snprintf(two, sizeof two, "%s,%s", file_hashes[0], file_hashes[1]);
    record_set_calibration(a, two);
    ck_assert_str_eq(cJSON_GetObjectItem(a, "calibration_files")->valuestring, two);
    ck_assert_str_eq(cJSON_GetObjectItem(a, "calibration_sha256")->valuestring, // printf 11..22.. | sha256sum
                     "ca9034371c79ec26ec0496b53420a1117d4f765800dfdce138138b139d591f13");
    cJSON_Delete(a);
}

#define FACTS "{\"window\":0.1,\"cost\":4,\"kin\":\"snapkv\"}"

UNIT_TEST(test_attributes_join_by_relation)
{
    cJSON *a = attributes_of(&(piece){.contexts = 1, .metrics = 1, .questions = 3}),
          *b = attributes_of(&(piece){.contexts = 2, .metrics = 2, .questions = 7}), *all;
    record_relation relation;
    help_ok(record_relate(&relation, "a", a, "b", b, err));
    ck_assert_int_eq(relation, RECORD_NEW_TEXTS);
    help_ok(record_relate(&relation, "a", a, "a", a, err));
    ck_assert_int_eq(relation, RECORD_SAME_TEXTS);
    static const double given[] = {3, 3, 5}, limit[] = {0, 0, 0};
    for (int r = RECORD_SAME_TEXTS; r <= RECORD_NEW_TEXTS; r++) {
        help_ok(record_join_attributes(&all, "a", a, "b", b, (record_relation)r, err));
        ck_assert_double_eq(cJSON_GetObjectItem(all, "given_answers")->valuedouble, given[r]);
        ck_assert_double_eq(cJSON_GetObjectItem(all, "max_questions")->valuedouble, limit[r]);
        ck_assert_str_eq(cJSON_GetObjectItem(all, "metrics")->valuestring,
                         "{\"tova\":{\"window\":0.1},\"keydiff\":{\"window\":0.1}}");
        cJSON_Delete(all);
    }
    // Facts that follow from a metric's name are not settings, and older records lack them.
    cJSON *old = attributes_of(&(piece){.contexts = 1, .metrics = 1, .questions = 3}),
          *now = attributes_of(&(piece){.contexts = 1, .metrics = 1, .questions = 3, .settings = FACTS});
    help_ok(record_join_attributes(&all, "old", old, "now", now, RECORD_SAME_TEXTS, err));
    cJSON_Delete(all);
    cJSON_Delete(now);
    cJSON_Delete(old);
    cJSON_AddStringToObject(b, "tokenizer_sha256", "t"); // one of them may lack it, but not have another
    help_ok(record_join_attributes(&all, "a", a, "b", b, RECORD_NEW_TEXTS, err));
    ck_assert_str_eq(cJSON_GetObjectItem(all, "tokenizer_sha256")->valuestring, "t");
    cJSON_Delete(all);
    cJSON_AddStringToObject(a, "tokenizer_sha256", "u");
    help_fails(record_join_attributes(&all, "a", a, "b", b, RECORD_NEW_TEXTS, err), KVB_MISMATCH,
               "a and b cannot be joined: tokenizer_sha256");
    cJSON_ReplaceItemInObject(a, "tokenizer_sha256", cJSON_CreateString("t"));
    cJSON_ReplaceItemInObject(b, "metrics", cJSON_CreateString("[1]"));
    help_fails(record_join_attributes(&all, "a", a, "b", b, RECORD_NEW_TEXTS, err), KVB_FORMAT, "b: attribute metrics");
    cJSON_Delete(b);
    cJSON_Delete(a);
}

// ---- adding to a finished record ----

static record_writer *begin_add(const char *path, const piece *whole, kvb_status expected, const char *why)
{
    record_writer *w = NULL;
    cJSON *a = attributes_of(whole);
    if (expected == KVB_OK) help_ok(record_begin(&w, path, &small_shape, a, RECORD_ADD, err));
    else help_fails(record_begin(&w, path, &small_shape, a, RECORD_ADD, err), expected, why);
    cJSON_Delete(a);
    return w;
}

UNIT_TEST(test_what_is_added_gives_the_bytes_of_one_run)
{
    const piece whole = {.contexts = 7, .metrics = 7, .questions = 7};
    const char *all = make("all.h5", &whole),
               *path = make("run.h5", &(piece){.contexts = 3, .metrics = 3, .questions = 3}),
               *old = make("old.h5", &(piece){.contexts = 3, .metrics = 3, .questions = 3});
    record_writer *w = begin_add(path, &whole, KVB_OK, NULL);
    ck_assert(!record_writer_has_context(w, "one")); // it lacks a metric
    ck_assert(record_writer_has_question(w, "one", 1) && !record_writer_has_question(w, "one", 2));
    put_context(w, 0, 4, 0);
    put_context(w, 1, 4, 0);
    ck_assert(record_writer_has_context(w, "one"));
    put_question(w, 0, 2);
    record_writer_free(w); // stopped, then resumed
    help_same_file(path, old);
    w = begin_add(path, &whole, KVB_OK, NULL);
    put_question(w, 1, 2);
    put_context(w, 2, 7, 0);
    for (uint32_t q = 0; q < 3; q++) put_question(w, 2, q);
    help_same_file(path, old);
    finish(w, 7);
    help_same_file(path, all);
    w = begin_add(path, &whole, KVB_OK, NULL); // nothing is left to add
    ck_assert(record_writer_has_context(w, "three") && record_writer_has_question(w, "three", 2));
    finish(w, 7);
    help_same_file(path, all);
    ck_assert(!help_exists(help_path("run.h5.parts")));
    record *r;
    help_ok(record_open(&r, path, err));
    ck_assert(record_has_metric(record_context(r, 1), "ea") && !record_has_metric(record_context(r, 1), "e"));
    record_close(r);
}

UNIT_TEST(test_an_addition_that_does_not_fit_is_refused)
{
    const char *path = make("run.h5", &(piece){.contexts = 3, .metrics = 3, .questions = 3}), *ids[] = {"one", "two"};
    begin_add(help_path("none.h5"), &(piece){.contexts = 7, .metrics = 7, .questions = 7}, KVB_IO, "none.h5");
    begin_add(path, &(piece){.contexts = 7, .metrics = 7, .questions = 7, .seed = 4}, KVB_MISMATCH,
              "run.h5 and what is added cannot be joined: seed");
    begin_add(path, &(piece){.contexts = 7, .metrics = 1, .questions = 7}, KVB_MISMATCH, "has other metrics than");
    ck_assert(!help_exists(help_path("run.h5.parts")));
    record_writer *w = begin_add(path, &(piece){.contexts = 7, .metrics = 7, .questions = 7}, KVB_OK, NULL), *second;
    put_context(w, 0, 4, 0);
    help_fails(record_finish(w, ids, 2, err), KVB_MISMATCH, "context two has no scores of the metrics that are added");
    cJSON *a = attributes_of(&(piece){.contexts = 7, .metrics = 7, .questions = 7});
    help_ok(record_begin(&second, path, &small_shape, a, RECORD_ADD_JOIN, err));
    ck_assert(record_writer_has_context(second, "one") && !record_writer_has_context(second, "two"));
    record_writer_free(second);
    record_writer_free(w);
    cJSON_Delete(a);
    begin_add(path, &(piece){.contexts = 7, .metrics = 7, .questions = 3}, KVB_MISMATCH,
              "holds an addition that was stopped, with");
    ck_assert(help_exists(path));
}

// ---- loss curves and gains ----

UNIT_TEST(test_losses_are_read_as_they_were_put)
{
    record *r;
    float curves[CURVE], gains[GAIN], packings[PACKING];
    help_ok(record_open(&r, make("all.h5", &(piece){.contexts = 1, .metrics = 3, .questions = 3, .losses = 3}), err));
    for (uint32_t q = 0; q < 2; q++)
        for (size_t m = 0; m < 2; m++) {
            ck_assert(record_has_curves(r, 0, q, metric_names[m]));
            help_ok(record_read_curves(r, 0, q, metric_names[m], curves, err));
            for (size_t i = 0; i < CURVE; i++) ck_assert_float_eq(curves[i], curve_of(m, q, i));
        }
    ck_assert(record_has_gains(r, 0, 0) && !record_has_gains(r, 0, 1));
    help_ok(record_read_gains(r, 0, 0, gains, err));
    for (size_t i = 0; i < GAIN; i++) ck_assert_float_eq(gains[i], (float)i + 0.5f);
    help_fails(record_read_gains(r, 0, 1, gains, err), KVB_MISMATCH, "question 1 has no gains of metric");
    help_fails(record_read_curves(r, 0, 0, "ea", curves, err), KVB_MISMATCH, "has no curves of metric ea");
    ck_assert(record_has_packings(r, 0, 1));
    help_ok(record_read_packings(r, 0, 1, packings, err));
    for (size_t i = 0; i < PACKING; i++) ck_assert_float_eq(packings[i], (float)(i + 1) / 8);
    record_close(r);
    help_ok(record_open(&r, make("old.h5", &(piece){.contexts = 1, .metrics = 3, .questions = 3, .losses = 0}), err));
    ck_assert(!record_has_curves(r, 0, 0, NULL) && !record_has_gains(r, 0, 0));
    ck_assert(!record_has_packings(r, 0, 0));
    help_fails(record_read_packings(r, 0, 0, packings, err), KVB_MISMATCH, "question 0 has no packings of metric");
    record_close(r);
}

UNIT_TEST(test_losses_join_to_the_bytes_of_one_run)
{
    const char *all = make("all.h5", &(piece){.contexts = 1, .metrics = 3, .questions = 3, .losses = 3}),
               *tova = make("tova.h5", &(piece){.contexts = 1, .metrics = 1, .questions = 3, .losses = 1}),
               *keydiff = make("keydiff.h5", &(piece){.contexts = 1, .metrics = 2, .questions = 3, .losses = 2}),
               *out = help_path("out.h5");
    help_ok(record_merge(out, INPUTS(tova, keydiff), false, err));
    help_same_file(all, out);
    help_ok(record_merge(out, INPUTS(all, tova), true, err));
    help_same_file(all, out);
    record *r;
    help_ok(record_merge(out, INPUTS(keydiff, tova), true, err)); // attributes name the metrics in another order
    help_ok(record_open(&r, out, err));
    for (int m = 0; m < 2; m++) ck_assert(record_has_curves(r, 0, 1, metric_names[m]));
    record_close(r);
    const piece whole = {.contexts = 1, .metrics = 3, .questions = 3, .losses = 2};
    record_writer *w = begin_add(tova, &whole, KVB_OK, NULL);
    for (uint32_t q = 0; q < 2; q++) put_losses(w, 0, q, &whole);
    put_context(w, 0, 2, 0);
    finish(w, 1);
    help_same_file(all, tova);
}

UNIT_TEST(test_wrong_losses_are_refused)
{
    float curves[CURVE] = {0}, gains[GAIN] = {0}, packings[PACKING] = {[3] = INFINITY};
    const char *const metric = "tova";
    const float *const put = curves;
    record_losses l = {&metric, &put, 1, gains, NULL};
    record_writer *w;
    const char *path = help_path("bad.h5");
    help_ok(record_begin(&w, path, &small_shape, NULL, RECORD_NEW, err));
    curves[RECORD_CURVE_LEVELS * SMALL_G] = -1;
    help_fails(record_put_losses(w, "one", 0, &l, err), KVB_NUMERIC,
               "question 1: curves of tova: layer 1, row 0, column 0: found -1");
    curves[RECORD_CURVE_LEVELS * SMALL_G] = 0;
    gains[0] = NAN;
    help_fails(record_put_losses(w, "one", 0, &l, err), KVB_NUMERIC,
               "gains of keydiff: layer 0, row 0, column 0: found nan");
    gains[0] = 0;
    l.packings = packings;
    help_fails(record_put_losses(w, "one", 0, &l, err), KVB_NUMERIC,
               "packings of groups-of-32: layer 0, row 0, column 3: found inf");
    help_fails(record_put_losses(w, "..", 0, &l, err), KVB_ARGUMENT, "context id");
    record_writer_free(w);
    // Two runs that disagree.
    const char *const inputs[] = {
        make("a.h5", &(piece){.contexts = 1, .metrics = 3, .questions = 3, .losses = 3}),
        make("b.h5", &(piece){.contexts = 1, .metrics = 3, .questions = 3, .losses = 3, .shift = 1})};
    help_fails(record_merge(help_path("c.h5"), inputs, 2, false, err), KVB_MISMATCH,
               "with different curves of keydiff");
}

UNIT_TEST(test_levels_grow_and_protect)
{
    uint32_t last = 0;
    for (uint32_t i = 0; i < RECORD_CURVE_LEVELS; i++) {
        uint32_t n = record_curve_tokens(i, 10000, 5);
        ck_assert_uint_gt(n, last);
        last = n;
        ck_assert_uint_eq(record_curve_tokens(i, 10, 12), 10); // all are protected
        ck_assert_uint_ge(record_curve_tokens(i, 3, 0), 1);
    }
    unit_numbers(record_curve_tokens(0, 10000, 5), 30, record_curve_tokens(0, 10000, 68), 68, last, 8500);
}

UNIT_MAIN_EACH("formats growth", help_setup, help_teardown)
