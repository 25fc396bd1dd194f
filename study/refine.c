#include "study/refine.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "study/refine_parts.h"
#include <gsl/gsl_errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

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

// Candidates [n, K, heads] on some texts of a set (NULL: all), as one loss per knot, [n, K].
static kvb_status measure_shifts(const refine_task *t, bool selection, const double *shift, uint32_t n,
                                 const uint32_t *texts, uint32_t n_texts, double *loss, kvb_error *err)
{
    uint32_t *all = NULL;
    if (!texts) {
        n_texts = selection ? t->n_selection : t->n_texts;
        texts = all = need(n_texts, sizeof *all, "texts");
        for (uint32_t i = 0; i < n_texts; i++) all[i] = i;
    }
    double *each = need((size_t)n * t->n_knots * n_texts, sizeof *each, "losses");
    kvb_status status = t->measure(t->context, selection, shift, n, texts, n_texts, each, err);
    for (size_t i = 0; i < (size_t)n * t->n_knots && status == KVB_OK; i++)
        loss[i] = mean_over_texts(each + i * n_texts, n_texts);
    free(each);
    free(all);
    return status;
}

kvb_status refine_points(refine_state *s, const double *points, uint32_t n, const uint32_t *texts, uint32_t n_texts,
                         double *loss, kvb_error *err)
{
    size_t heads = (size_t)s->n_knots * s->task->n_heads, groups = (size_t)s->n_knots * s->n_groups;
    double *shift = need(n * heads, sizeof *shift, "shifts");
    for (uint32_t i = 0; i < n; i++) expand_point(s, points + i * groups, shift + i * heads);
    kvb_status status = measure_shifts(s->task, false, shift, n, texts, n_texts, loss, err);
    for (size_t i = 0; i < (size_t)n * s->n_knots && status == KVB_OK; i++) loss[i] /= s->scale[i % s->n_knots];
    s->spent += texts ? (double)n * n_texts / s->task->n_texts : n;
    free(shift);
    return status;
}

// ---- The start ----

static const double START_PARTS[] = {0.5, 0.75, 1};
enum { START_ROUNDS = sizeof START_PARTS / sizeof *START_PARTS };

// The centre goes on towards the start, whatever that loses: the selection set chooses where to stay.
static kvb_status go_towards_start(refine_state *s, kvb_error *err)
{
    double part = START_PARTS[s->round - 1]; // the start comes first
    for (size_t i = 0; i < (size_t)s->n_knots * s->n_groups; i++) s->centre[i] = part * s->task->start[i];
    return refine_points(s, s->centre, 1, NULL, 0, s->value, err);
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

static void report(const refine_job *j, const refine_state *s)
{
    const refine_task *t = j->task;
    if (!t->report) return;
    for (uint32_t k = 0; k < t->n_knots; k++) j->calibration[k] = s->value[k] * j->scale[k];
    t->report(t->context, &(refine_progress){s->spent, t->evaluations, s->round, j->calibration, j->selection,
                                             j->best->calibration_before, j->best->selection_before});
}

// Measures the centre on the selection set and takes over what is better there. Whether anything is.
static kvb_status judge_centre(refine_job *j, refine_state *s, bool *better, kvb_error *err)
{
    const refine_task *t = j->task;
    size_t n = t->n_heads;
    expand_point(s, s->centre, j->shift);
    kvb_status status = measure_shifts(t, true, j->shift, 1, NULL, 0, j->selection, err);
    if (status != KVB_OK) return status;
    s->spent += (double)t->n_selection / t->n_texts;
    *better = false;
    for (uint32_t k = 0; k < t->n_knots; k++) {
        if (!(j->selection[k] < j->best->selection[k])) continue;
        *better = true;
        j->best->selection[k] = j->selection[k];
        j->best->calibration[k] = s->value[k] * j->scale[k];
        memcpy(j->best->shift + k * n, j->shift + k * n, n * sizeof *j->shift);
    }
    j->best->evaluations = s->spent;
    j->best->rounds = s->round;
    report(j, s);
    return KVB_OK;
}

// What a stage moves, and when it is over.
typedef struct refine_stage {
    bool start; // towards the start, instead of a search
    bool heads; // single heads move, else layers together
    double until;
    uint32_t patience, rounds; // most of both
} refine_stage;

// Rounds until the evaluations are spent or the selection set has gained nothing for so long.
static kvb_status run_stage(refine_job *j, refine_state *s, const refine_stage *stage, kvb_error *err)
{
    gradient_model *m = stage->start ? NULL : gradient_model_open(s);
    uint32_t idle = 0;
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; status == KVB_OK && i < stage->rounds; i++) {
        bool better = false;
        if (s->spent >= stage->until || idle >= stage->patience) break;
        s->round++;
        status = m ? gradient_model_round(m, s, err) : go_towards_start(s, err);
        if (status == KVB_OK) status = judge_centre(j, s, &better, err);
        idle = better ? 0 : idle + 1;
    }
    j->best->settled = idle >= stage->patience;
    gradient_model_close(m);
    return status;
}

// From the best so far.
static kvb_status search_groups(refine_job *j, refine_state *s, const refine_stage *stage, kvb_error *err)
{
    const refine_task *t = j->task;
    size_t n = (size_t)t->n_knots * t->n_heads;
    uint32_t per_layer = t->n_heads / t->n_layers, *group = need(t->n_heads, sizeof *group, "heads");
    double *origin = need_copy(j->best->shift, n, sizeof *origin, "shifts");
    s->n_groups = stage->heads ? t->n_heads : t->n_layers;
    s->centre = need((size_t)t->n_knots * s->n_groups, sizeof *s->centre, "shifts");
    for (uint32_t h = 0; h < t->n_heads; h++) group[h] = stage->heads ? h : h / per_layer;
    for (uint32_t k = 0; k < t->n_knots; k++) s->value[k] = j->best->calibration[k] / j->scale[k];
    s->group = group;
    s->origin = origin;
    kvb_status status = run_stage(j, s, stage, err);
    free(group);
    free(origin);
    free(s->centre);
    s->centre = NULL;
    return status;
}

// The table itself on both sets.
static kvb_status measure_table(refine_job *j, refine_state *s, kvb_error *err)
{
    const refine_task *t = j->task;
    refine_result *best = j->best;
    size_t knots = t->n_knots * sizeof(double);
    kvb_status status = measure_shifts(t, false, best->shift, 1, NULL, 0, best->calibration_before, err);
    if (status == KVB_OK) status = measure_shifts(t, true, best->shift, 1, NULL, 0, best->selection_before, err);
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
    report(j, s);
    return KVB_OK;
}

// The start, layers, and heads, which share what the start leaves.
static kvb_status run_stages(refine_job *j, refine_state *s, kvb_error *err)
{
    const refine_task *t = j->task;
    const refine_stage start = {true, true, INFINITY, START_ROUNDS, START_ROUNDS};
    kvb_status status = t->start ? search_groups(j, s, &start, err) : KVB_OK;
    double left = fmax(0, t->evaluations - s->spent);
    const refine_stage stages[] = {
        {false, false, t->evaluations - (t->heads ? left / 2 : 0), REFINE_PATIENCE, UINT32_MAX},
        {false, true, t->evaluations, REFINE_PATIENCE, UINT32_MAX}};
    for (int i = 0; i < (t->heads ? 2 : 1) && status == KVB_OK; i++) status = search_groups(j, s, &stages[i], err);
    return status;
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
    gsl_error_handler_t *before = gsl_set_error_handler_off(); // GSL's failures here are a lack of memory
    gsl_rng *rng = needed(gsl_rng_alloc(gsl_rng_mt19937), "random generators");
    refine_job j = {task, out, memory, memory + 4 * K, memory + K, memory + 2 * K};
    refine_state s = {.task = task, .n_knots = task->n_knots, .scale = memory, .value = memory + 3 * K, .rng = rng};
    gsl_rng_set(rng, (unsigned long)task->seed);
    status = measure_table(&j, &s, err);
    if (status == KVB_OK) status = run_stages(&j, &s, err);
    gsl_rng_free(rng);
    gsl_set_error_handler(before);
    free(memory);
    return status;
}

bool refine_gained(const refine_result *r, uint32_t n_knots)
{
    for (uint32_t k = 0; k < n_knots; k++)
        if (r->selection[k] < r->selection_before[k]) return true;
    return false;
}

void refine_free(refine_result *r)
{
    free(r->shift);
    free(r->calibration_before);
    free(r->calibration);
    free(r->selection_before);
    free(r->selection);
    *r = (refine_result){0};
}
