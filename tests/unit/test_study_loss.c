// Tables that minimise what eviction does to the model's output: curves and gains written by hand, the budgets that
// follow from them, and rivals that lose less on texts that a table has not seen.
#include "study/formats.h"
#include "study/layer_losses.h"
#include "study/output_loss.h"
#include "study/versus.h"
#include "study_help.h"

enum { T = 40, N = RECORD_CURVE_LEVELS };

static const case_context A = {.id = "a", .n_tokens = T, .n_questions = 1, .questions = {{9, {1, 1}, NULL}}};
static const case_context B = {.id = "b", .n_tokens = T, .n_questions = 1, .questions = {{9, {1, 1}, NULL}}};

static bool packed = true; // records say what formats lose

// The error of head h falls in a straight line from top[h] to 0 at T; `bump` is added at level 8 of head 1.
static void put_losses(record_writer *w, const char *id, const float top[2], float bump, float gain)
{
    float curves[2 * N], gains[RECORD_GAIN_KINDS * 2], packings[2 * RECORD_PACKINGS];
    const char *const metric = "keydiff";
    const float *const put = curves;
    const record_losses l = {&metric, &put, 1, gain > 0 ? gains : NULL, packed ? packings : NULL};
    for (int i = 0; i < 2 * RECORD_PACKINGS; i++)
        packings[i] = top[i / RECORD_PACKINGS] / (float)(2 << 2 * (2 - i % 3));
    for (int h = 0; h < 2; h++)
        for (uint32_t i = 0; i < N; i++)
            curves[h * N + (int)i] =
                top[h] * (float)(T - record_curve_tokens(i, T, 2)) / T + (h == 1 && i == 8 ? bump : 0);
    for (int k = 0; k < RECORD_GAIN_KINDS; k++) gains[2 * k] = gain * (float)(k + 1), gains[2 * k + 1] = 2;
    help_ok(record_put_losses(w, id, 0, &l, err));
}

static const char *make(const char *name, const float a[2], const float b[2], float bump)
{
    static char path[256];
    strcpy(path, help_path("%s", name));
    record_writer *w;
    const record_shape shape = {1, 4, CASE_HEADS, 8};
    const char *const ids[] = {"a", "b"};
    cJSON *attributes = case_attributes(CASE_PROTECTED);
    help_ok(record_begin(&w, path, &shape, attributes, RECORD_NEW, err));
    case_put_context(w, &A, CASE_METRIC, 1);
    case_put_context(w, &B, CASE_METRIC, 1);
    put_losses(w, "a", a, bump, 4);
    if (b) put_losses(w, "b", b, bump, 0);
    help_ok(record_finish(w, ids, 2, err));
    record_writer_free(w);
    cJSON_Delete(attributes);
    return path;
}

static const float STEEP[2] = {8, 1}, OPPOSITE[2] = {1, 8};

// Opens a record and solves its table; close_case() frees both.
static void solve_case(study_table *t, selection *s, const study_options *o, const char *path)
{
    case_select(s, path);
    help_ok(study_table_open(t, s, "keydiff", o, false, err));
    help_ok(study_table_solve(t, NULL, err));
}

static void close_case(study_table *t, selection *s)
{
    study_table_free(t);
    selection_close(s);
}

UNIT_TEST(test_gains_are_geometric_means)
{
    selection s;
    double gain;
    case_select(&s, make("gains.h5", STEEP, STEEP, 0));
    help_ok(output_gains_read(&gain, &s, err));
    ck_near(gain, cbrt(2.0 * 4 * 6));
    ck_assert(output_loss_is_there(&s, "keydiff") && !output_loss_is_there(&s, "snapkv"));
    selection_close(&s);
    case_select(&s, make("half.h5", STEEP, NULL, 0));
    ck_assert(!output_loss_is_there(&s, "keydiff"));
    study_table t;
    study_options o = case_options("mean_loss");
    help_ok(study_table_open(&t, &s, "keydiff", &o, false, err)); // then importance is used
    ck_assert_int_eq(t.pairs.loss, LOSS_IMPORTANCE);
    study_table_free(&t);
    o.loss = LOSS_OUTPUT;
    help_fails(study_table_open(&t, &s, "keydiff", &o, false, err), KVB_MISMATCH, "has no curves of output errors");
    close_case(&t, &s);
}

UNIT_TEST(test_curves_are_lines_between_the_levels)
{
    selection s;
    loss_curves c;
    float buffer[2 * N];
    const double gain = 3;
    const cache_shape shape = {1, 2, T, 1, 1};
    case_select(&s, make("lines.h5", STEEP, STEEP, 5));
    c = loss_curves_make(&shape);
    help_ok(output_curves_fill(&c, &s, 0, 0, "keydiff", &gain, buffer, err));
    ck_assert(c.rises);
    ck_near(c.total, 1);
    for (uint32_t b = 2; b <= T; b++) ck_assert_double_eq_tol(loss_at(&c, 0, b), 3 * 8.0 * (T - b) / T, 1e-5);
    uint32_t bumped = record_curve_tokens(8, T, 2);
    ck_assert_double_eq_tol(loss_at(&c, 1, bumped), 3 * (1.0 * (T - bumped) / T + 5), 1e-5);
    ck_assert_double_eq_tol(loss_at(&c, 1, T), 0, 1e-6); // all tokens lose nothing
    loss_curves_free(&c);
    selection_close(&s);
}

// Half and a quarter of the tokens are kept: straight lines, times the gain.
UNIT_TEST(test_layers_have_gains_and_losses)
{
    layer_losses l;
    const char *path = make("layers.h5", STEEP, STEEP, 0);
    double g = cbrt(2.0 * 4 * 6);
    help_ok(layer_losses_read(&l, path, "keydiff", 0.5, err));
    ck_assert_uint_eq(l.n_layers, 1);
    ck_near(l.layer[0], 0);
    ck_near(l.gain[0], g);
    ck_assert_double_eq_tol(l.loss[0], g * 9 * 0.5, 1e-5);
    layer_losses_free(&l);
    help_ok(layer_losses_read(&l, path, "keydiff", 0.75, err));
    ck_assert_double_eq_tol(l.loss[0], g * 9 * 0.75, 1e-5);
    layer_losses_free(&l);
    help_fails(layer_losses_read(&l, make("half.h5", STEEP, NULL, 0), "keydiff", 0.5, err), KVB_MISMATCH,
               "has no curves");
    layer_losses_free(&l);
}

// The head that matters eight times as much for the output keeps what it can. The prediction is in nats, and judging
// the table finds the loss that it states.
UNIT_TEST(test_budgets_follow_the_output)
{
    selection s;
    study_table t;
    study_options o = case_options("mean_loss");
    o.loss = LOSS_OUTPUT;
    solve_case(&t, &s, &o, make("solve.h5", STEEP, STEEP, 0));
    ck_assert_int_eq(t.pairs.loss, LOSS_OUTPUT);
    double g = cbrt(2.0 * 4 * 6);
    ck_near(t.prune_ratio[2 * 24], 0); // 25 %: 20 of 80 tokens, all from head 1
    ck_near(t.prune_ratio[2 * 24 + 1], 0.5);
    ck_assert_double_eq_tol(t.table_loss[24], g * 0.5, 1e-5);
    ck_assert_double_eq_tol(t.uniform_loss[24], g * 9 * 0.25, 1e-5);
    ck_assert(t.bound[24] <= t.loss[24] + 1e-12);
    help_ok(study_table_judge(&t, NULL, err));
    ck_assert_double_eq_tol(t.table_loss[24], g * 0.5, 1e-5);
    versus v;
    help_ok(versus_choose(&v, &t, NULL, err));
    ck_assert(v.compared);
    ck_assert_int_eq(v.best[24], RIVAL_NONE);
    ck_assert(v.loss[RIVAL_NONE][24] < v.loss[RIVAL_UNIFORM][24]);
    close_case(&t, &s);
}

// Each text's budgets are the worst for the other, so uniform ones lose less on left-out texts and are taken.
UNIT_TEST(test_rivals_are_taken)
{
    selection s;
    study_table t;
    versus v;
    study_options o = case_options("mean_loss");
    o.loss = LOSS_OUTPUT;
    solve_case(&t, &s, &o, make("rivals.h5", STEEP, OPPOSITE, 0));
    help_ok(versus_choose(&v, &t, NULL, err));
    ck_assert(v.best[24] != RIVAL_NONE && v.loss[v.best[24]][24] < v.loss[RIVAL_NONE][24]);
    ck_near(t.prune_ratio[2 * 24], 0.25);
    ck_near(t.prune_ratio[2 * 24 + 1], 0.25);
    ck_near(t.loss[24], t.table_loss[24]);
    ck_assert(t.bound[24] <= t.loss[24]);
    cJSON *about;
    help_ok(study_table_describe(&t, &about, err));
    unit_strings(cJSON_GetObjectItem(about, "loss")->valuestring, "output",
                 cJSON_GetObjectItem(about, "gains")->valuestring, "all");
    cJSON_Delete(about);
    close_case(&t, &s);
}

// A curve that rises between its ends: the hull passes below the bump, and the optimum stays above the bound.
UNIT_TEST(test_a_curve_may_rise)
{
    selection s;
    study_table t;
    study_options o = case_options("mean_loss");
    o.exact = true;
    solve_case(&t, &s, &o, make("rise.h5", STEEP, STEEP, 2));
    for (int r = 0; r < ROWS; r++) {
        ck_assert(t.bound[r] <= t.optimum[r] + 1e-9 && t.optimum[r] <= t.greedy[r] + 1e-9);
        ck_assert(t.table_loss[r] <= t.greedy[r] + 1e-9);
    }
    close_case(&t, &s);
}

// The same format costs head 0 eight times as much, so it gets the first bits; and the checker agrees.
UNIT_TEST(test_formats_follow_the_output)
{
    selection s;
    study_options o = study_options_make();
    study_table t;
    const char *path = make("formats.h5", STEEP, STEEP, 0);
    o.loss = LOSS_OUTPUT;
    o.shrink = 0;
    help_ok(study_options_packings(&o, "int2,bf16,int8", err));
    ck_assert(o.n_packings == 3 && o.packings[0] == KVB_PACK_INT2 && o.packings[1] == KVB_PACK_BF16);
    help_fails(study_options_packings(&(study_options){0}, "int4,int3", err), KVB_ARGUMENT, "found 'int4,int3'");
    help_fails(study_options_packings(&(study_options){0}, "int4,int4", err), KVB_ARGUMENT, "each once at most");
    uint8_t f[2];
    formats_of(&o, 5, f);
    ck_assert(f[0] == KVB_PACK_BF16 && f[1] == KVB_PACK_INT8);
    case_select(&s, path);
    double gain, sum[2 * RECORD_PACKINGS];
    help_ok(output_gains_read(&gain, &s, err));
    help_ok(output_packings_read(sum, &s, &gain, err));
    for (int i = 0; i < 2 * RECORD_PACKINGS; i++) ck_near(sum[i], gain * (i < 6 ? 8.0 : 1.0) / (2 << 2 * (2 - i % 3)));
    ck_near(formats_loss(sum, 1, f), sum[RECORD_PACKINGS + 3]);
    help_ok(study_table_open(&t, &s, "keydiff", &o, false, err));
    help_ok(study_table_solve(&t, NULL, err));
    loss_curves c = loss_curves_make(&t.pairs.longest);
    uint64_t budget[ROWS];
    bytes_problem p = formats_problem(&o, t.packing_loss, &c, 8, budget);
    unit_numbers(p.n_formats, 9, budget[9], (uint64_t)(0.9 * 2 * T * 8 * 4));
    int better = 0;
    for (int r = 0; r < ROWS; r++) {
        uint64_t bytes = 0;
        for (int h = 0; h < 2; h++) {
            const uint8_t *own = t.formats + (r * 2 + h) * 2;
            uint32_t kept = (uint32_t)rint((1 - t.prune_ratio[r * 2 + h]) * T);
            bytes += kvb_packed_bytes(own[0], KVB_KEYS, kept, 8) + kvb_packed_bytes(own[1], KVB_VALUES, kept, 8);
        }
        ck_assert(t.saturated[r] || bytes <= budget[r]);
        ck_assert(t.bound[r] <= t.loss[r] + 1e-12 && fabs(t.table_loss[r] - t.loss[r]) < 1e-9);
        better += t.formats[4 * r] % 3 < t.formats[4 * r + 2] % 3; // bf16 0, int8 1, int2 3
    }
    loss_curves_free(&c);
    formats_problem_free(&p);
    close_case(&t, &s);
    packed = false;
    case_select(&s, make("bare.h5", STEEP, STEEP, 0));
    packed = true;
    help_fails(study_table_open(&t, &s, "keydiff", &o, false, err), KVB_MISMATCH,
               "does not say of any of these questions what");
    close_case(&t, &s);
}

UNIT_MAIN_EACH("study loss", help_setup, help_teardown)
