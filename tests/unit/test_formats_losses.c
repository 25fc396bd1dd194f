// Curves and gains in records: what is put is read, additions and merges give the bytes of one run, records without
// them stay what they were, and damage is named.
#include "formats/record_growth.h"
#include "formats_record_help.h"
#include <math.h>

enum {
    T = 9,
    COUNT = SMALL_L * SMALL_G * T,
    CURVE = SMALL_L * SMALL_G * RECORD_CURVE_LEVELS,
    GAIN = SMALL_L * RECORD_GAIN_KINDS * 2
};

static const char *const names[] = {"tova", "keydiff"};

static float shift;

static float curve_of(size_t metric, uint32_t q, size_t i)
{
    return (float)(i * (metric + 1) + q) / 64 + shift;
}

static void put_losses(record_writer *w, uint32_t q, unsigned metrics, bool gains)
{
    static float curves[2][CURVE], gain[GAIN];
    const char *put[2];
    const float *arrays[2];
    record_losses l = {put, arrays, 0, gains ? gain : NULL};
    for (size_t m = 0; m < 2; m++) {
        if (!(metrics & 1u << m)) continue;
        for (size_t i = 0; i < CURVE; i++) curves[m][i] = curve_of(m, q, i);
        put[l.n] = names[m];
        arrays[l.n++] = curves[m];
    }
    for (size_t i = 0; i < GAIN; i++) gain[i] = (float)i + 0.5f;
    help_ok(record_put_losses(w, "one", q, &l, err));
}

static void put_context(record_writer *w, unsigned metrics)
{
    static float scores[2][COUNT];
    const char *put[2];
    const float *arrays[2];
    int32_t ids[T];
    size_t n = 0;
    for (int t = 0; t < T; t++) ids[t] = t;
    for (size_t m = 0; m < 2; m++) {
        if (!(metrics & 1u << m)) continue;
        for (size_t i = 0; i < COUNT; i++) scores[n][i] = small_score(0, m, i);
        put[n] = names[m];
        arrays[n] = scores[n];
        n++;
    }
    help_ok(record_put_context(w, "one", ids, T, put, arrays, n, err));
}

static void put_question(record_writer *w, uint32_t q)
{
    float oracle[COUNT];
    const int32_t ids[2] = {1, 2};
    for (size_t i = 0; i < COUNT; i++) oracle[i] = small_oracle(0, q, i);
    record_question one = {oracle, ids, 2, ids, 2, 1};
    help_ok(record_put_question(w, "one", q, &one, err));
}

static cJSON *attributes_of(unsigned metrics)
{
    cJSON *a = cJSON_CreateObject();
    cJSON_AddStringToObject(a, "model_sha256", "m");
    cJSON_AddNumberToObject(a, "seed", 1);
    cJSON_AddNumberToObject(a, "given_answers", 0);
    cJSON_AddNumberToObject(a, "max_questions", 0);
    cJSON_AddStringToObject(a, "metrics",
                            metrics == 3   ? "{\"tova\":{},\"keydiff\":{}}"
                            : metrics == 1 ? "{\"tova\":{}}"
                                           : "{\"keydiff\":{}}");
    help_ok(record_set_calibration(a, "1111111111111111111111111111111111111111111111111111111111111111", err));
    return a;
}

static void finish(record_writer *w)
{
    const char *const id = "one";
    help_ok(record_finish(w, &id, 1, err));
    record_writer_free(w);
}

// Two questions; losses of the metrics in `losses`, gains with the first question.
static const char *make(const char *name, unsigned metrics, unsigned losses)
{
    const char *path = help_path("%s", name);
    record_writer *w;
    cJSON *a = attributes_of(metrics);
    help_ok(record_begin(&w, path, &small_shape, a, RECORD_REPLACE, err));
    put_context(w, metrics);
    for (uint32_t q = 0; q < 2; q++) {
        if (losses) put_losses(w, q, losses, q == 0 && losses & 2);
        put_question(w, q);
    }
    finish(w);
    cJSON_Delete(a);
    return path;
}

// The same record with other curves of the second question.
static void spoil_curve(const char *path)
{
    record_writer *w;
    cJSON *a = attributes_of(3);
    help_ok(record_begin(&w, path, &small_shape, a, RECORD_REPLACE, err));
    put_context(w, 3);
    shift = 1;
    for (uint32_t q = 0; q < 2; q++) {
        put_losses(w, q, 3, q == 0);
        put_question(w, q);
    }
    shift = 0;
    finish(w);
    cJSON_Delete(a);
}

UNIT_TEST(test_what_is_put_is_read)
{
    record *r;
    float curves[CURVE], gains[GAIN];
    help_ok(record_open(&r, make("all.h5", 3, 3), err));
    for (uint32_t q = 0; q < 2; q++)
        for (size_t m = 0; m < 2; m++) {
            ck_assert(record_has_curves(r, 0, q, names[m]));
            help_ok(record_read_curves(r, 0, q, names[m], curves, err));
            for (size_t i = 0; i < CURVE; i++) ck_assert_float_eq(curves[i], curve_of(m, q, i));
        }
    ck_assert(record_has_gains(r, 0, 0));
    ck_assert(!record_has_gains(r, 0, 1));
    help_ok(record_read_gains(r, 0, 0, gains, err));
    for (size_t i = 0; i < GAIN; i++) ck_assert_float_eq(gains[i], (float)i + 0.5f);
    help_fails(record_read_gains(r, 0, 1, gains, err), KVB_MISMATCH, "question 1 has no gains of metric");
    help_fails(record_read_curves(r, 0, 0, "ea", curves, err), KVB_MISMATCH, "has no curves of metric ea");
    record_close(r);
    help_ok(record_open(&r, make("old.h5", 3, 0), err));
    ck_assert(!record_has_curves(r, 0, 0, NULL) && !record_has_gains(r, 0, 0));
    record_close(r);
}

UNIT_TEST(test_additions_and_merges_are_one_run)
{
    const char *all = make("all.h5", 3, 3), *tova = make("tova.h5", 1, 1), *keydiff = make("keydiff.h5", 2, 2),
               *out = help_path("out.h5");
    const char *const forth[] = {tova, keydiff}, *const back[] = {keydiff, tova}, *const twice[] = {all, tova};
    help_ok(record_merge(out, forth, 2, false, err));
    help_same_file(all, out);
    help_ok(record_merge(out, twice, 2, true, err));
    help_same_file(all, out);
    record *r;
    help_ok(record_merge(out, back, 2, true, err)); // attributes name the metrics in another order
    help_ok(record_open(&r, out, err));
    for (int m = 0; m < 2; m++) ck_assert(record_has_curves(r, 0, 1, names[m]));
    record_close(r);
    record_writer *w;
    cJSON *a = attributes_of(3);
    help_ok(record_begin(&w, tova, &small_shape, a, RECORD_ADD, err));
    for (uint32_t q = 0; q < 2; q++) put_losses(w, q, 2, q == 0);
    put_context(w, 2);
    finish(w);
    cJSON_Delete(a);
    help_same_file(all, tova);
}

UNIT_TEST(test_wrong_numbers_are_refused)
{
    float curves[CURVE] = {0}, gains[GAIN] = {0};
    const char *const metric = "tova";
    const float *const put = curves;
    record_losses l = {&metric, &put, 1, gains};
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
    help_fails(record_put_losses(w, "..", 0, &l, err), KVB_ARGUMENT, "context id");
    record_writer_free(w);
    // Two runs that disagree.
    const char *const inputs[] = {make("a.h5", 3, 3), make("b.h5", 3, 3)};
    spoil_curve(inputs[1]);
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
    ck_assert_uint_eq(record_curve_tokens(0, 10000, 5), 30);
    ck_assert_uint_eq(record_curve_tokens(0, 10000, 68), 68);
    ck_assert_uint_eq(last, 8500);
}

UNIT_MAIN_EACH("formats losses", help_setup, help_teardown)
