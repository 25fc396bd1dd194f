#include "study/refine.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// The state of the search: a centre in the space of groups.
typedef struct refine_state {
    const refine_task *task;
    uint32_t n_knots, n_groups; // K, D
    const uint32_t *group;      // [n_heads] the group that a head moves with
    const double *origin;       // [K, n_heads] shifts from which the groups move
    const double *scale;        // [K] loss of the table on the calibration set
    double *centre;             // [K, D] where the search stands
    double *value;              // [K] its loss on the calibration set, in units of scale
    double spent;               // evaluations
    uint32_t round;
} refine_state;

// A loss that is nearly nothing: smaller ones are not told apart.
static const double LEAST_SCALE = 1e-6;

// ---- Candidates ----

// Shifts of heads [K, n_heads] of one point [K, D].
static void expand_point(const refine_state *s, const double *point, double *shift)
{
    size_t n = s->task->n_heads;
    for (uint32_t k = 0; k < s->n_knots; k++)
        for (size_t h = 0; h < n; h++)
            shift[k * n + h] = s->origin[k * n + h] + point[(size_t)k * s->n_groups + s->group[h]];
}

static double mean_over_texts(const double *loss, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += loss[i] / n;
    return sum;
}

// A candidate [K, heads] on all texts of a set, as one loss per knot, [K].
static kvb_status measure_shift(const refine_task *t, bool selection, const double *shift, double *loss, kvb_error *err)
{
    uint32_t n = selection ? t->n_selection : t->n_texts, *texts = need(n, sizeof *texts, "texts");
    double *each = need((size_t)t->n_knots * n, sizeof *each, "losses");
    for (uint32_t i = 0; i < n; i++) texts[i] = i;
    kvb_status status = t->measure(t->context, selection, shift, 1, texts, n, each, err);
    for (size_t k = 0; k < t->n_knots && status == KVB_OK; k++) loss[k] = mean_over_texts(each + k * n, n);
    free_all(each, texts);
    return status;
}

// The centre on the calibration texts, in units of scale.
static kvb_status measure_centre(refine_state *s, kvb_error *err)
{
    double *shift = need((size_t)s->n_knots * s->task->n_heads, sizeof *shift, "shifts");
    expand_point(s, s->centre, shift);
    kvb_status status = measure_shift(s->task, false, shift, s->value, err);
    for (uint32_t k = 0; k < s->n_knots && status == KVB_OK; k++) s->value[k] /= s->scale[k];
    s->spent++;
    free(shift);
    return status;
}

// ---- The start ----

static const double START_PARTS[] = {0.5, 0.75, 1};
enum { START_ROUNDS = sizeof START_PARTS / sizeof *START_PARTS };

// From the table towards each start in turn, whatever that loses: the selection set chooses where to stay.
static kvb_status go_towards_start(refine_state *s, uint32_t i, kvb_error *err)
{
    size_t n = (size_t)s->n_knots * s->n_groups;
    const double *start = s->task->starts + i / START_ROUNDS * n;
    for (size_t k = 0; k < n; k++) s->centre[k] = START_PARTS[i % START_ROUNDS] * start[k];
    return measure_centre(s, err);
}

// ---- Depth ----

// How far the last layer's shift is above the first one's. What an error costs while all layers are cut follows depth
// more than anything else, and in which direction is a matter of the model; so few texts tell.
static const double TILTS[] = {-0.5, 0.5, -1, 1};
enum { TILT_ROUNDS = sizeof TILTS / sizeof *TILTS };

// The groups are layers.
static kvb_status tilt(refine_state *s, uint32_t i, kvb_error *err)
{
    uint32_t L = s->n_groups;
    for (uint32_t k = 0; k < s->n_knots; k++)
        for (uint32_t l = 0; l < L; l++)
            s->centre[(size_t)k * L + l] = L > 1 ? TILTS[i] * ((double)l / (L - 1) - 0.5) : 0;
    return measure_centre(s, err);
}

// ---- One search ----

typedef struct refine_job {
    const refine_task *task;
    refine_result *best;
    double *scale;       // [K] the table's losses, at least LEAST_SCALE
    double *shift;       // [K, n_heads] the centre's
    double *calibration; // [K] its losses, for the report
    double *selection;   // [K] its losses there
} refine_job;

static void report_round(const refine_job *j, const refine_state *s)
{
    const refine_task *t = j->task;
    if (!t->report) return;
    for (uint32_t k = 0; k < t->n_knots; k++) j->calibration[k] = s->value[k] * j->scale[k];
    t->report(t->context, &(refine_progress){s->spent, t->evaluations, s->round, j->calibration, j->selection,
                                             j->best->calibration_before, j->best->selection_before});
}

// Measures the centre on the selection set and takes over what is better there.
static kvb_status judge_centre(refine_job *j, refine_state *s, kvb_error *err)
{
    const refine_task *t = j->task;
    size_t n = t->n_heads;
    expand_point(s, s->centre, j->shift);
    kvb_status status = measure_shift(t, true, j->shift, j->selection, err);
    if (status != KVB_OK) return status;
    s->spent += (double)t->n_selection / t->n_texts;
    for (uint32_t k = 0; k < t->n_knots; k++) {
        if (!(j->selection[k] < j->best->selection[k])) continue;
        j->best->selection[k] = j->selection[k];
        j->best->calibration[k] = s->value[k] * j->scale[k];
        memcpy(j->best->shift + k * n, j->shift + k * n, n * sizeof *j->shift);
    }
    j->best->evaluations = s->spent;
    j->best->rounds = s->round;
    report_round(j, s);
    return KVB_OK;
}

// Centres that a step sets and measures, one after the other, from the best so far: of single heads, or of layers.
static kvb_status run_stage(refine_job *j, refine_state *s, bool heads, uint32_t rounds,
                            kvb_status (*step)(refine_state *s, uint32_t round, kvb_error *err), kvb_error *err)
{
    const refine_task *t = j->task;
    uint32_t per_layer = t->n_heads / t->n_layers, *group = need(t->n_heads, sizeof *group, "heads");
    double *origin = need_copy(j->best->shift, (size_t)t->n_knots * t->n_heads, sizeof *origin, "shifts");
    kvb_status status = KVB_OK;
    s->n_groups = heads ? t->n_heads : t->n_layers;
    s->centre = need((size_t)t->n_knots * s->n_groups, sizeof *s->centre, "shifts");
    for (uint32_t h = 0; h < t->n_heads; h++) group[h] = heads ? h : h / per_layer;
    s->group = group;
    s->origin = origin;
    for (uint32_t i = 0; i < rounds && status == KVB_OK; i++) {
        s->round++;
        status = step(s, i, err);
        if (status == KVB_OK) status = judge_centre(j, s, err);
    }
    free_all(group, origin, s->centre);
    s->centre = NULL;
    return status;
}

// The table itself on both sets.
static kvb_status measure_table(refine_job *j, refine_state *s, kvb_error *err)
{
    const refine_task *t = j->task;
    refine_result *best = j->best;
    size_t knots = t->n_knots * sizeof(double);
    kvb_status status = measure_shift(t, false, best->shift, best->calibration_before, err);
    if (status == KVB_OK) status = measure_shift(t, true, best->shift, best->selection_before, err);
    if (status != KVB_OK) return status;
    memcpy(best->calibration, best->calibration_before, knots);
    memcpy(best->selection, best->selection_before, knots);
    memcpy(j->selection, best->selection_before, knots);
    for (uint32_t k = 0; k < t->n_knots; k++) {
        j->scale[k] = fmax(fabs(best->calibration_before[k]), LEAST_SCALE);
        s->value[k] = best->calibration[k] / j->scale[k];
    }
    s->spent = t->start_cost + 1 + (double)t->n_selection / t->n_texts;
    best->evaluations = s->spent;
    report_round(j, s);
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
    size_t K = task->n_knots;
    *out = (refine_result){.shift = need(K * task->n_heads, sizeof(double), "shifts"),
                           .calibration_before = need(K, sizeof(double), "losses"),
                           .calibration = need(K, sizeof(double), "losses"),
                           .selection_before = need(K, sizeof(double), "losses"),
                           .selection = need(K, sizeof(double), "losses")};
    double *memory = need(4 * K + K * task->n_heads, sizeof *memory, "shifts"); // four lists over knots, the centre's
    refine_job j = {task, out, memory, memory + 4 * K, memory + K, memory + 2 * K};
    refine_state s = {.task = task, .n_knots = task->n_knots, .scale = memory, .value = memory + 3 * K};
    status = measure_table(&j, &s, err);
    if (status == KVB_OK) status = run_stage(&j, &s, true, START_ROUNDS * task->n_starts, go_towards_start, err);
    if (status == KVB_OK) status = run_stage(&j, &s, false, TILT_ROUNDS, tilt, err);
    free(memory);
    if (status != KVB_OK) refine_free(out);
    return status;
}

void refine_free(refine_result *r)
{
    free_all(r->shift, r->calibration_before, r->calibration, r->selection_before, r->selection);
    *r = (refine_result){0};
}
