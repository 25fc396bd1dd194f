#include "study/refine.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

// The state of the search, with K knots and groups of heads that move together.
typedef struct refine_job {
    const refine_task *task;
    refine_result *best;
    uint32_t n_groups;
    double *point;                   // [K, n_groups] what is added to the best before this stage
    double *shift;                   // [K, n_heads] the candidate: their sum
    double *calibration, *selection; // [K] the candidate's losses
} refine_job;

// Measures the mean losses [K] of a shift over all texts of a set.
static kvb_status measure_shift(const refine_task *t, bool selection, const double *shift, double *loss, kvb_error *err)
{
    uint32_t n = selection ? t->n_selection : t->n_texts;
    double *each = need((size_t)t->n_knots * n, sizeof *each, "losses");
    kvb_status status = t->measure(t->context, selection, shift, each, err);
    for (size_t k = 0; k < t->n_knots && status == KVB_OK; k++) {
        loss[k] = 0;
        for (uint32_t i = 0; i < n; i++) loss[k] += each[k * n + i] / n;
    }
    free(each);
    return status;
}

// Measures the candidate on both sets.
static kvb_status measure(refine_job *j, kvb_error *err)
{
    const refine_task *t = j->task;
    kvb_status status = measure_shift(t, false, j->shift, j->calibration, err);
    if (status == KVB_OK) status = measure_shift(t, true, j->shift, j->selection, err);
    j->best->evaluations += 1 + (double)t->n_selection / t->n_texts;
    return status;
}

static void report(const refine_job *j)
{
    const refine_task *t = j->task;
    const refine_result *r = j->best;
    if (!t->report) return;
    t->report(t->context, &(refine_progress){r->evaluations, t->evaluations, r->rounds, j->calibration, j->selection,
                                             r->calibration_before, r->selection_before});
}

static const double START_PARTS[] = {0.5, 0.75, 1};
enum { START_ROUNDS = sizeof START_PARTS / sizeof *START_PARTS };

// Goes from the table towards each start in turn, whatever that loses: the selection set chooses the best point.
static void go_towards_start(refine_job *j, uint32_t i)
{
    size_t n = (size_t)j->task->n_knots * j->n_groups;
    const double *start = j->task->starts + i / START_ROUNDS * n;
    for (size_t k = 0; k < n; k++) j->point[k] = START_PARTS[i % START_ROUNDS] * start[k];
}

// How much larger the last layer's shift is than the first one's. What an error costs while all layers are cut depends
// on depth more than on anything else, in a direction that differs between models; a few texts are enough to tell it.
static const double TILTS[] = {-0.5, 0.5, -1, 1};
enum { TILT_ROUNDS = sizeof TILTS / sizeof *TILTS };

// Sets the i-th tilt. The groups are layers.
static void tilt(refine_job *j, uint32_t i)
{
    uint32_t L = j->n_groups;
    for (uint32_t k = 0; k < j->task->n_knots; k++)
        for (uint32_t l = 0; l < L; l++)
            j->point[(size_t)k * L + l] = L > 1 ? TILTS[i] * ((double)l / (L - 1) - 0.5) : 0;
}

// Takes over the candidate at those knots where it is better on the selection set.
static void keep_better(refine_job *j)
{
    size_t n = j->task->n_heads;
    for (uint32_t k = 0; k < j->task->n_knots; k++) {
        if (!(j->selection[k] < j->best->selection[k])) continue;
        j->best->selection[k] = j->selection[k];
        j->best->calibration[k] = j->calibration[k];
        memcpy(j->best->shift + k * n, j->shift + k * n, n * sizeof *j->shift);
    }
}

// Measures the points that `go` sets, each added to the best before this stage. The groups are heads or layers.
static kvb_status run_stage(refine_job *j, bool heads, uint32_t rounds, void (*go)(refine_job *j, uint32_t round),
                            kvb_error *err)
{
    const refine_task *t = j->task;
    size_t n = t->n_heads, all = t->n_knots * n;
    j->n_groups = heads ? t->n_heads : t->n_layers;
    j->point = need((size_t)t->n_knots * j->n_groups, sizeof *j->point, "shifts");
    double *origin = need_copy(j->best->shift, all, sizeof *origin, "shifts");
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; i < rounds && status == KVB_OK; i++) {
        go(j, i);
        for (size_t h = 0; h < all; h++)
            j->shift[h] = origin[h] + j->point[h / n * j->n_groups + h % n / (n / j->n_groups)];
        j->best->rounds++;
        status = measure(j, err);
        if (status != KVB_OK) break;
        keep_better(j);
        report(j);
    }
    free_all(origin, j->point);
    j->point = NULL;
    return status;
}

// Measures the table itself.
static kvb_status measure_table(refine_job *j, kvb_error *err)
{
    refine_result *best = j->best;
    size_t knots = j->task->n_knots * sizeof(double);
    best->evaluations = j->task->start_cost;
    kvb_status status = measure(j, err);
    if (status != KVB_OK) return status;
    memcpy(best->calibration_before, j->calibration, knots);
    memcpy(best->selection_before, j->selection, knots);
    memcpy(best->calibration, j->calibration, knots);
    memcpy(best->selection, j->selection, knots);
    report(j);
    return KVB_OK;
}

static kvb_status check_task(const refine_task *t, kvb_error *err)
{
    if (t->n_layers && t->n_heads && t->n_heads % t->n_layers == 0 && t->n_knots && t->n_texts && t->n_selection &&
        t->evaluations && t->measure)
        return KVB_OK;
    return kvb_fail(err, KVB_ARGUMENT,
                    "refine: %u heads in %u layers, %u ratios, %u and %u texts, %u evaluations: expected some of each",
                    t->n_heads, t->n_layers, t->n_knots, t->n_texts, t->n_selection, t->evaluations);
}

kvb_status refine_run(refine_result *out, const refine_task *task, kvb_error *err)
{
    *out = (refine_result){0};
    kvb_status status = check_task(task, err);
    if (status != KVB_OK) return status;
    size_t K = task->n_knots, heads = K * task->n_heads;
    *out = (refine_result){.shift = need(heads, sizeof(double), "shifts"),
                           .calibration_before = need(K, sizeof(double), "losses"),
                           .calibration = need(K, sizeof(double), "losses"),
                           .selection_before = need(K, sizeof(double), "losses"),
                           .selection = need(K, sizeof(double), "losses")};
    double *memory = need(heads + 2 * K, sizeof *memory, "shifts");
    refine_job j = {
        .task = task, .best = out, .shift = memory, .calibration = memory + heads, .selection = memory + heads + K};
    status = measure_table(&j, err);
    if (status == KVB_OK) status = run_stage(&j, true, START_ROUNDS * task->n_starts, go_towards_start, err);
    if (status == KVB_OK) status = run_stage(&j, false, TILT_ROUNDS, tilt, err);
    free(memory);
    if (status != KVB_OK) refine_free(out);
    return status;
}

void refine_free(refine_result *r)
{
    free_all(r->shift, r->calibration_before, r->calibration, r->selection_before, r->selection);
    *r = (refine_result){0};
}
