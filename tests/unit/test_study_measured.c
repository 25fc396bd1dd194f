// Budgets from measured curves of heads: near the known best, or with one shift for all heads of a layer, and unchanged
// if the table is best already.
#include "study/measured.h"
#include "test_solver_cases.h"

enum { R = 99, LAYERS = 4, HEADS = 3, N = LAYERS * HEADS, KNOTS = 3 };

static const double KNOT[KNOTS] = {0.5, 0.8, 0.9};

// Head h keeps share s at the table's row r if 1/s - 1 = slow[h] * pace(r), and loses weight[h] * (1/s - 1).
typedef struct bed {
    double ratio[R], prune[R * N], weight[N], shift[KNOTS * N], out[R * N], loss[MEASURED_LEVELS_MAX * N];
    double levels[MEASURED_LEVELS_MAX];
    uint32_t n_levels;
    shift_base base;
} bed;

static double loss_of(const bed *b, int h, double share)
{
    return b->weight[h] * (1 / share - 1);
}

static void bed_make(bed *b, bool best)
{
    double slow[N];
    memset(b, 0, sizeof *b);
    for (int h = 0; h < N; h++) b->weight[h] = exp(3 * case_uniform() - 1.5);
    for (int h = 0; h < N; h++) slow[h] = best ? 1 : exp(2 * case_uniform() - 1);
    for (int h = 0; h < N && best; h++) b->weight[h] = 1;
    for (int r = 0; r < R; r++) {
        double pace = case_pace(slow, N, b->ratio[r] = (r + 1) / 100.0);
        for (int h = 0; h < N; h++) b->prune[r * N + h] = 1 - 1 / (1 + pace * slow[h]);
    }
    b->base = (shift_base){R, LAYERS, HEADS, b->ratio, b->prune, NULL, false};
    b->n_levels = measured_levels(KNOT, KNOTS, b->levels);
    for (uint32_t i = 0; i < b->n_levels; i++) {
        double pace = case_pace(slow, N, b->levels[i]);
        for (int h = 0; h < N; h++) b->loss[i * N + h] = loss_of(b, h, 1 / (1 + pace * slow[h]));
    }
}

static double total(const bed *b, const double *prune)
{
    double sum = 0;
    for (int h = 0; h < N; h++) sum += loss_of(b, h, 1 - prune[h]);
    return sum;
}

// Returns the least that heads lose if they keep `keep` together: shares are like the roots of the weights, at most 1.
static double least(const bed *b, double keep)
{
    double low = 0, high = 1e6, sum = 0;
    for (int i = 0; i < 200; i++) {
        double middle = (low + high) / 2, kept = 0;
        for (int h = 0; h < N; h++) kept += fmin(1, middle * sqrt(b->weight[h]));
        if (kept > keep) high = middle;
        else low = middle;
    }
    for (int h = 0; h < N; h++) sum += loss_of(b, h, fmin(1, low * sqrt(b->weight[h])));
    return sum;
}

UNIT_TEST(budgets_are_near_the_best)
{
    for (int round = 0; round < 20; round++) {
        bed b;
        bed_make(&b, false);
        help_ok(measured_shifts(&b.base, b.levels, b.n_levels, b.loss, true, KNOT, KNOTS, b.shift, err));
        help_ok(shift_table(&b.base, KNOT, KNOTS, b.shift, b.out, err));
        for (int k = 0; k < KNOTS; k++) {
            int row = (int)lround(100 * KNOT[k]) - 1;
            double before = total(&b, b.prune + row * N), after = total(&b, b.out + row * N),
                   best = least(&b, N * (1 - KNOT[k]));
            ck_assert_msg(after < best + 0.1 * (before - best) + 1e-3 * best,
                          "round %d, %.2f: table %.4f, best %.4f, found %.4f", round, KNOT[k], before, best, after);
        }
    }
}

UNIT_TEST(a_shift_leads_to_another_table)
{
    bed from, to;
    bed_make(&from, false);
    bed_make(&to, false);
    shifts_to_table(&from.base, &to.base, KNOT, KNOTS, from.shift);
    help_ok(shift_table(&from.base, KNOT, KNOTS, from.shift, from.out, err));
    for (int k = 0; k < KNOTS; k++)
        for (int h = 0; h < N; h++) {
            int i = (int)lround(100 * KNOT[k] - 1) * N + h;
            ck_assert_msg(fabs(from.out[i] - to.prune[i]) < 5e-3, "%.2f, head %d: %.4f, expected %.4f", KNOT[k], h,
                          from.out[i], to.prune[i]);
        }
    shifts_to_table(&from.base, &from.base, KNOT, KNOTS, from.shift);
    for (int i = 0; i < KNOTS * N; i++) ck_assert(fabs(from.shift[i]) < 1e-9);
}

UNIT_TEST(layers_move_together)
{
    bed b;
    bed_make(&b, false);
    help_ok(measured_shifts(&b.base, b.levels, b.n_levels, b.loss, false, KNOT, KNOTS, b.shift, err));
    for (int i = 0; i < KNOTS * N; i++) ck_assert(b.shift[i] == b.shift[i / HEADS * HEADS]);
    help_ok(shift_table(&b.base, KNOT, KNOTS, b.shift, b.out, err));
    ck_assert(total(&b, b.out + 79 * N) < total(&b, b.prune + 79 * N));
    b.base.by_layer = true; // each layer meets the ratio by itself, and so do its heads' budgets
    help_ok(measured_shifts(&b.base, b.levels, b.n_levels, b.loss, true, KNOT, KNOTS, b.shift, err));
    help_ok(shift_table(&b.base, KNOT, KNOTS, b.shift, b.out, err));
    ck_assert(total(&b, b.out + 79 * N) < total(&b, b.prune + 79 * N));
}

UNIT_TEST(the_best_table_stays)
{
    bed b;
    bed_make(&b, true);
    help_ok(measured_shifts(&b.base, b.levels, b.n_levels, b.loss, true, KNOT, KNOTS, b.shift, err));
    for (int i = 0; i < KNOTS * N; i++)
        ck_assert_msg(fabs(b.shift[i]) < 0.05, "head %d moves by %g", i % N, b.shift[i]);
}

UNIT_TEST(what_makes_no_sense_is_refused)
{
    bed b;
    bed_make(&b, false);
    const double falling[2] = {0.8, 0.5};
    help_fails(measured_shifts(&b.base, falling, 2, b.loss, true, KNOT, KNOTS, b.shift, err), KVB_ARGUMENT, "");
    help_fails(measured_shifts(&b.base, b.levels, 1, b.loss, true, KNOT, KNOTS, b.shift, err), KVB_ARGUMENT, "");
    b.loss[5] = -1; // an NLL may fall; it counts as nothing lost
    help_ok(measured_shifts(&b.base, b.levels, b.n_levels, b.loss, true, KNOT, KNOTS, b.shift, err));
    b.loss[5] = NAN;
    help_fails(measured_shifts(&b.base, b.levels, b.n_levels, b.loss, true, KNOT, KNOTS, b.shift, err), KVB_NUMERIC,
               "");
    ck_assert_uint_eq(measured_levels(KNOT + 1, 1, b.levels), 4);
    ck_assert(b.levels[0] < 0.55 && b.levels[3] > 0.94 && b.levels[1] < b.levels[2]);
}

UNIT_MAIN_EACH("study/measured", case_seed, NULL)
