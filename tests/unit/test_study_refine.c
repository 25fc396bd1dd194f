// The search for better budgets on losses with a known best: layers are balanced, the selection set decides, starts are
// tried, and a stop leaves nothing.
#include "study/refine.h"
#include "test_solver_cases.h"

enum { LAYERS = 6, HEADS = 12, KNOTS = 2, ROWS = 99, T = 4000, PER_ROUND = 3 };
static const double KNOT[KNOTS] = {0.6, 0.9};

// A head of layer l loses weight[l] / n with n tokens, nothing with all T; the selection set has weights of its own.
typedef struct power_law {
    double ratio[ROWS], prune[ROWS * HEADS], weight[2][LAYERS];
    shift_base base;
    uint32_t stop_after, calls, reports;
} power_law;

static void law_make(power_law *b, double spread)
{
    *b = (power_law){.base = {ROWS, LAYERS, HEADS / LAYERS, b->ratio, b->prune, NULL, false}};
    for (int r = 0; r < ROWS; r++) {
        b->ratio[r] = (r + 1) / 100.0;
        for (int h = 0; h < HEADS; h++) b->prune[r * HEADS + h] = b->ratio[r];
    }
    for (int l = 0; l < LAYERS; l++) b->weight[0][l] = b->weight[1][l] = exp(spread * (2 * case_uniform() - 1));
}

static double layer_loss(const power_law *b, int set, int layer, const double *keep)
{
    double sum = 0;
    for (int h = 2 * layer; h < 2 * layer + 2; h++)
        sum += keep[h] < T - 0.5 ? b->weight[set][layer] * (1 / keep[h] - 1.0 / T) : 0;
    return sum;
}

static void keep_of(const power_law *b, const double *shift, double keep[KNOTS][HEADS])
{
    static double prune[ROWS * HEADS];
    kvb_error err = {0};
    must(shift_table(&b->base, KNOT, KNOTS, shift, prune, &err), &err);
    for (int k = 0; k < KNOTS; k++)
        for (int h = 0; h < HEADS; h++) keep[k][h] = T * (1 - prune[(k ? 89 : 59) * HEADS + h]);
}

static double loss_of(const power_law *b, int set, const double *keep)
{
    double sum = 0;
    for (int l = 0; l < LAYERS; l++) sum += layer_loss(b, set, l, keep);
    return sum;
}

static kvb_status measure(void *context, bool selection, const double *shift, uint32_t n, double *loss, kvb_error *err)
{
    power_law *b = context;
    double keep[KNOTS][HEADS];
    (void)err;
    if (b->stop_after && ++b->calls > b->stop_after) return KVB_INTERRUPTED;
    for (uint32_t i = 0; i < n; i++) {
        keep_of(b, shift + (size_t)i * KNOTS * HEADS, keep);
        for (int k = 0; k < KNOTS; k++) loss[i * KNOTS + (uint32_t)k] = loss_of(b, selection, keep[k]);
    }
    return KVB_OK;
}

static kvb_status restore(void *context, const double *shift, double *loss, double *kept, kvb_error *err)
{
    power_law *b = context;
    double keep[KNOTS][HEADS];
    (void)err;
    if (b->stop_after && ++b->calls > b->stop_after) return KVB_INTERRUPTED;
    keep_of(b, shift, keep);
    memcpy(kept, keep, sizeof keep);
    for (int k = 0; k < KNOTS; k++)
        for (int l = -1; l < LAYERS; l++)
            loss[k * (1 + LAYERS) + 1 + l] = loss_of(b, 0, keep[k]) - (l < 0 ? 0 : layer_loss(b, 0, l, keep[k]));
    return KVB_OK;
}

static void listen(void *context, const refine_progress *p)
{
    power_law *b = context;
    ck_assert_uint_eq(p->tried, b->reports++); // first of the table itself
    for (int k = 0; k < KNOTS; k++) ck_assert(p->selection[k] > 0 && p->selection_before[k] > 0);
}

static refine_task task_of(power_law *b, uint32_t rounds)
{
    return (refine_task){.base = &b->base,
                         .knots = KNOT,
                         .n_knots = KNOTS,
                         .n_tokens = T,
                         .rounds = rounds,
                         .measure = measure,
                         .restore = restore,
                         .report = listen,
                         .context = b};
}

// The least loss of any budgets with the table's total: tokens as the roots of the weights.
static double least_loss(const power_law *b, double knot)
{
    double roots = 0, keep[HEADS];
    for (int h = 0; h < HEADS; h++) roots += sqrt(b->weight[0][h / 2]);
    for (int h = 0; h < HEADS; h++) keep[h] = HEADS * T * (1 - knot) * sqrt(b->weight[0][h / 2]) / roots;
    return loss_of(b, 0, keep);
}

UNIT_TEST(balanced_layers_are_the_optimum_of_a_power_law)
{
    kvb_error err = {0};
    refine_result r, again;
    case_seed("refine");
    for (int draw = 0; draw < 5; draw++) {
        power_law b;
        law_make(&b, 0.8);
        refine_task task = task_of(&b, 4);
        must(refine_run(&r, &task, &err), &err);
        ck_assert(r.rounds >= 1 && r.tried == PER_ROUND * r.rounds && b.reports == r.tried + 1);
        for (int k = 0; k < KNOTS; k++) {
            double left = (r.selection[k] - least_loss(&b, KNOT[k])) / (r.selection_before[k] - least_loss(&b, KNOT[k]));
            ck_assert_msg(left < 0.05, "knot %d: %.3f of what could be gained is left", k, left);
            ck_assert_double_eq_tol(r.calibration[k], r.selection[k], 1e-12); // here both sets are alike
            for (int h = 0; h < HEADS; h += 2) ck_assert(r.shift[k * HEADS + h] == r.shift[k * HEADS + h + 1]);
        }
        b.reports = 0;
        must(refine_run(&again, &task, &err), &err);
        ck_assert(memcmp(r.shift, again.shift, sizeof(double) * KNOTS * HEADS) == 0);
        refine_free(&r);
        refine_free(&again);
    }
}

UNIT_TEST(the_selection_set_decides)
{
    kvb_error err = {0};
    power_law b;
    refine_result r;
    case_seed("refine, selection");
    law_make(&b, 0.8);
    for (int l = 0; l < LAYERS; l++) b.weight[1][l] = 1 / b.weight[0][l]; // wants the contrary
    refine_task task = task_of(&b, 9);
    must(refine_run(&r, &task, &err), &err);
    ck_assert_uint_eq(r.rounds, 1);
    for (int i = 0; i < KNOTS * HEADS; i++) ck_assert(r.shift[i] == 0);
    for (int k = 0; k < KNOTS; k++) ck_assert(r.selection[k] == r.selection_before[k]);
    refine_free(&r);
}

UNIT_TEST(a_stop_leaves_nothing)
{
    kvb_error err = {0};
    case_seed("refine, stops");
    for (uint32_t stop = 1; stop < 10; stop++) {
        power_law b;
        refine_result r;
        law_make(&b, 0.8);
        b.stop_after = stop;
        refine_task task = task_of(&b, 4);
        ck_assert(refine_run(&r, &task, &err) == KVB_INTERRUPTED);
        ck_assert_ptr_null(r.shift);
    }
    refine_task nothing = {0};
    ck_assert(refine_run(&(refine_result){0}, &nothing, &err) == KVB_ARGUMENT);
}

// The budgets of another table, here the best ones, are tried from the table on: half of the way, more, all of it.
UNIT_TEST(a_start_is_tried_and_judged)
{
    kvb_error err = {0};
    case_seed("refine, start");
    for (int part = 2; part <= 4; part++) {
        power_law b;
        refine_result r;
        double prune[KNOTS * HEADS], shift[2 * KNOTS * HEADS] = {0}, roots = 0;
        law_make(&b, 0.5);
        for (int h = 0; h < HEADS; h++) roots += sqrt(b.weight[0][h / 2]);
        for (int i = 0; i < KNOTS * HEADS; i++)
            prune[i] = 1 - HEADS * (1 - KNOT[i / HEADS]) * sqrt(b.weight[0][i % HEADS / 2]) / roots;
        const shift_base to = {KNOTS, LAYERS, HEADS / LAYERS, KNOT, prune, NULL, false};
        shifts_to_table(&b.base, &to, KNOT, KNOTS, shift + KNOTS * HEADS); // behind a start that changes nothing
        for (int i = 0; i < KNOTS * HEADS; i++) shift[KNOTS * HEADS + i] *= 4.0 / part;
        refine_task task = task_of(&b, 0);
        task.n_starts = 2;
        task.starts = shift;
        must(refine_run(&r, &task, &err), &err);
        for (int k = 0; k < KNOTS; k++)
            ck_assert_msg(fabs(r.selection[k] / least_loss(&b, KNOT[k]) - 1) < 1e-3, "part %d, knot %d: %g of the least",
                          part, k, r.selection[k] / least_loss(&b, KNOT[k]));
        ck_assert(r.tried == 2 * PER_ROUND && r.rounds == 0);
        refine_free(&r);
    }
}

UNIT_MAIN("study/refine")
