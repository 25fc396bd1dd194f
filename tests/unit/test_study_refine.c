// The search for better budgets on losses with a known best: starts and slopes are tried, and the selection set judges.
#include "study/refine.h"
#include "test_solver_cases.h"

enum { LAYERS = 6, HEADS = 12, KNOTS = 2, TEXTS = 4, SELECTION = 2 };

// Text t loses base * (1 + sum of curvature * ((shift - goal)^2 - goal^2)): at shift 0 exactly base.
typedef struct bowl {
    double goal[KNOTS][HEADS], drift[TEXTS + SELECTION][HEADS];
    uint32_t stop_after, calls, reports;
    double spent;
} bowl;

static double loss_of(const bowl *b, const double *shift, uint32_t k, uint32_t t)
{
    double sum = 0, mean = 0;
    for (int h = 0; h < HEADS; h++) mean += shift[k * HEADS + h] / HEADS; // a common shift has no effect
    for (int h = 0; h < HEADS; h++) {
        double goal = b->goal[k][h] + b->drift[t][h], x = shift[k * HEADS + h] - mean;
        sum += (x - goal) * (x - goal) - goal * goal;
    }
    return (1 + t) * 0.01 * (1 + 0.05 * sum);
}

static kvb_status measure(void *context, bool selection, const double *shift, double *loss, kvb_error *err)
{
    bowl *b = context;
    uint32_t n = selection ? SELECTION : TEXTS;
    (void)err;
    if (b->stop_after && ++b->calls > b->stop_after) return KVB_INTERRUPTED;
    for (uint32_t i = 0; i < KNOTS * n; i++) loss[i] = loss_of(b, shift, i / n, i % n + (selection ? TEXTS : 0));
    return KVB_OK;
}

static void listen(void *context, const refine_progress *p)
{
    bowl *b = context;
    b->reports++;
    ck_assert(p->evaluations >= b->spent && p->wanted > 0);
    b->spent = p->evaluations;
    for (int k = 0; k < KNOTS; k++) ck_assert(p->selection[k] > 0 && p->selection_before[k] > 0);
}

static void bowl_make(bowl *b, double drift)
{
    *b = (bowl){0};
    for (int k = 0; k < KNOTS; k++)
        for (int h = 0; h < HEADS; h++) // layers differ, heads differ less, knots hardly
            b->goal[k][h] = (h / 2 % 2 ? 0.5 : -0.5) + (h % 2 ? 0.2 : -0.2) + 0.05 * k;
    for (int t = 0; t < TEXTS + SELECTION; t++)
        for (int h = 0; h < HEADS; h++) b->drift[t][h] = drift * (2 * case_uniform() - 1);
}

static refine_task task_of(bowl *b, uint32_t evaluations)
{
    return (refine_task){.n_layers = LAYERS,
                         .n_heads = HEADS,
                         .n_knots = KNOTS,
                         .n_texts = TEXTS,
                         .n_selection = SELECTION,
                         .heads = true,
                         .evaluations = evaluations,
                         .measure = measure,
                         .report = listen,
                         .context = b};
}

UNIT_TEST(a_stop_leaves_nothing)
{
    for (uint32_t stop = 1; stop < 10; stop++) {
        bowl b;
        refine_result r;
        bowl_make(&b, 0.1);
        b.stop_after = stop;
        refine_task task = task_of(&b, 1000);
        ck_assert_int_eq(refine_run(&r, &task, NULL), KVB_INTERRUPTED);
        ck_assert_ptr_null(r.shift);
    }
}

UNIT_TEST(layers_alone_move_together)
{
    bowl b;
    refine_result r;
    bowl_make(&b, 0.1);
    refine_task task = task_of(&b, 60);
    task.heads = false;
    help_ok(refine_run(&r, &task, err));
    for (int i = 0; i < KNOTS * HEADS; i += 2) ck_assert(r.shift[i] == r.shift[i + 1]);
    refine_free(&r);
    task.n_selection = 0;
    help_fails(refine_run(&r, &task, err), KVB_ARGUMENT, "");
}

UNIT_TEST(a_start_is_tried_and_judged)
{
    bowl b;
    refine_result r;
    double starts[2][KNOTS * HEADS] = {0}, *start = starts[0];
    bowl_make(&b, 0);
    refine_task task = task_of(&b, 20);
    task.starts = start, task.n_starts = 1, task.start_cost = 15;
    for (int part = 2; part <= 4; part++) { // the best is at a half, three quarters, or the whole of it
        for (int i = 0; i < KNOTS * HEADS; i++) start[i] = b.goal[i / HEADS][i % HEADS] * 4 / part;
        b.spent = 0;
        help_ok(refine_run(&r, &task, err));
        for (int i = 0; i < HEADS; i++)
            ck_assert_msg(fabs(r.shift[i] - b.goal[0][i]) < 1e-12, "part %d, head %d: %g, expected %g", part, i,
                          r.shift[i], b.goal[0][i]);
        ck_assert(r.rounds == 3 + 4 && r.evaluations >= 15 + 4 && r.selection[0] < r.selection_before[0]);
        refine_free(&r);
    }
    b.spent = 0;
    // The wrong way: not taken. Of the tilts, one towards late layers is nearest to the goal.
    for (int i = 0; i < KNOTS * HEADS; i++) start[i] = -b.goal[i / HEADS][i % HEADS];
    help_ok(refine_run(&r, &task, err));
    for (int i = 0; i < KNOTS * HEADS; i++) ck_assert(fabs(r.shift[i] - 0.5 * ((i % HEADS / 2) / 5.0 - 0.5)) < 1e-12);
    ck_assert(r.rounds == 3 + 4);
    refine_free(&r);
    b.spent = 0;
    for (int i = 0; i < KNOTS * HEADS; i++)
        starts[1][i] = b.goal[i / HEADS][i % HEADS]; // from the table, not from -goal
    task.n_starts = 2;
    help_ok(refine_run(&r, &task, err));
    for (int i = 0; i < HEADS; i++) ck_assert(fabs(r.shift[i] - b.goal[0][i]) < 1e-12);
    ck_assert(r.rounds == 6 + 4);
    refine_free(&r);
}

UNIT_MAIN_EACH("study/refine", case_seed, NULL)
