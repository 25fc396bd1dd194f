#include "study/refine.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

static const double PARTS[] = {0.5, 0.75, 1}; // of the way to a start, or to balanced layers
enum { PART_COUNT = sizeof PARTS / sizeof *PARTS };
static const double MOST_UNBALANCED = 10; // a layer's q is at most this, and at least its inverse
static const double MOST_MOVE = 3;        // a head's shift to another table at most

static uint32_t heads_of(const refine_task *t)
{
    return t->base->n_layers * t->base->n_kv_heads;
}

// ---- To another table ----

// What a head of a table keeps at place x of the axis: linear between rows, everything at the axis's begin.
static double kept_at(const shift_base *b, uint32_t head, double x)
{
    uint32_t n = b->n_layers * b->n_kv_heads;
    double from = SHIFT_AXIS_BEGIN, kept = 1;
    for (uint32_t r = 0; r < b->n_rows; r++) {
        double to = shift_axis(b->ratio[r]), next = fmin(kept, 1 - b->prune[(size_t)r * n + head]);
        if (x <= to) return kept + (next - kept) * fmax(0, x - from) / (to - from);
        from = to;
        kept = next;
    }
    return kept;
}

// Where on the axis a head keeps this much; the first such place if there are several.
static double place_of(const shift_base *b, uint32_t head, double keep)
{
    uint32_t n = b->n_layers * b->n_kv_heads;
    double from = SHIFT_AXIS_BEGIN, kept = 1;
    for (uint32_t r = 0; r < b->n_rows; r++) {
        double to = shift_axis(b->ratio[r]), next = fmin(kept, 1 - b->prune[(size_t)r * n + head]);
        if (keep >= next && kept > next) return from + (to - from) * fmin(1, fmax(0, (kept - keep) / (kept - next)));
        from = to;
        kept = next;
    }
    return from;
}

void shifts_to_table(const shift_base *base, const shift_base *to, const double *knots, uint32_t n_knots, double *shift)
{
    uint32_t n = base->n_layers * base->n_kv_heads;
    for (uint32_t k = 0; k < n_knots; k++)
        for (uint32_t h = 0; h < n; h++) {
            double x = shift_axis(knots[k]), move = place_of(base, h, kept_at(to, h, x)) - x;
            shift[(size_t)k * n + h] = fmin(MOST_MOVE, fmax(-MOST_MOVE, move));
        }
}

// ---- Candidates ----

typedef struct refine_job {
    const refine_task *task;
    refine_result *best;
    double *shift;                   // [K, heads] of the candidate at hand
    double *calibration, *selection; // [K] its losses
} refine_job;

static void report_candidate(const refine_job *j)
{
    const refine_task *t = j->task;
    const refine_result *r = j->best;
    if (t->report)
        t->report(t->context, &(refine_progress){r->tried, r->rounds, j->calibration, j->selection,
                                                 r->calibration_before, r->selection_before});
}

static kvb_status measure_candidate(refine_job *j, kvb_error *err)
{
    const refine_task *t = j->task;
    kvb_status status = t->measure(t->context, false, j->shift, 1, j->calibration, err);
    return status == KVB_OK ? t->measure(t->context, true, j->shift, 1, j->selection, err) : status;
}

// Goes from one set of shifts towards another and takes over, knot by knot, what the selection set finds better.
static kvb_status try_towards(refine_job *j, const double *from, const double *to, bool *better, kvb_error *err)
{
    const refine_task *t = j->task;
    size_t n = heads_of(t);
    kvb_status status = KVB_OK;
    for (int p = 0; p < PART_COUNT && status == KVB_OK; p++) {
        for (size_t i = 0; i < t->n_knots * n; i++) j->shift[i] = from[i] + PARTS[p] * (to[i] - from[i]);
        status = measure_candidate(j, err);
        if (status != KVB_OK) return status;
        for (uint32_t k = 0; k < t->n_knots; k++) {
            if (!(j->selection[k] < j->best->selection[k])) continue;
            *better = true;
            j->best->selection[k] = j->selection[k];
            j->best->calibration[k] = j->calibration[k];
            memcpy(j->best->shift + k * n, j->shift + k * n, n * sizeof *j->shift);
        }
        j->best->tried++;
        report_candidate(j);
    }
    return status;
}

// ---- Balanced layers ----

// How many tokens each layer should have for one that it has now, factor [L], from loss [1 + L] (refine_restore). Layers
// that keep everything stay as they are.
static void balance_layers(const refine_task *t, const double *loss, const double *kept, double *factor)
{
    uint32_t L = t->base->n_layers, G = t->base->n_kv_heads;
    double gains = 0, tokens = 0;
    for (uint32_t l = 0; l < L; l++) {
        double n = 0;
        for (uint32_t g = 0; g < G; g++) n += kept[l * G + g];
        factor[l] = n < (double)G * t->n_tokens && n > 0 ? (loss[0] - loss[1 + l]) / n : NAN;
        if (isnan(factor[l])) continue;
        gains += loss[0] - loss[1 + l];
        tokens += n;
    }
    for (uint32_t l = 0; l < L; l++) {
        double q = gains > 0 ? factor[l] * tokens / gains : 1;
        factor[l] = isnan(q) ? 1 : sqrt(fmin(MOST_UNBALANCED, fmax(1 / MOST_UNBALANCED, q)));
    }
}

// The shifts [K, heads] of the best so far with its layers balanced.
static kvb_status find_balance(const refine_job *j, double *balanced, kvb_error *err)
{
    const refine_task *t = j->task;
    uint32_t n = heads_of(t), L = t->base->n_layers, G = t->base->n_kv_heads;
    double *memory = need((size_t)t->n_knots * (1 + L + n) + L + n, sizeof *memory, "losses of layers"), *loss = memory,
           *kept = loss + (size_t)t->n_knots * (1 + L), *factor = kept + (size_t)t->n_knots * n, *prune = factor + L;
    kvb_status status = t->restore(t->context, j->best->shift, loss, kept, err);
    for (uint32_t k = 0; k < t->n_knots && status == KVB_OK; k++) {
        const double *now = kept + (size_t)k * n;
        const shift_base to = {1, L, G, t->knots + k, prune, NULL, false}; // one row: nothing needs to fall along it
        balance_layers(t, loss + (size_t)k * (1 + L), now, factor);
        for (uint32_t h = 0; h < n; h++) prune[h] = 1 - fmin(1, now[h] * factor[h / G] / t->n_tokens);
        shifts_to_table(t->base, &to, t->knots + k, 1, balanced + (size_t)k * n);
    }
    free(memory);
    return status;
}

static kvb_status run_rounds(refine_job *j, kvb_error *err)
{
    const refine_task *t = j->task;
    size_t n = (size_t)t->n_knots * heads_of(t);
    double *from = need(2 * n, sizeof *from, "shifts"), *to = from + n;
    bool better = true;
    kvb_status status = KVB_OK;
    while (status == KVB_OK && better && j->best->rounds < t->rounds) {
        better = false;
        memcpy(from, j->best->shift, n * sizeof *from);
        status = find_balance(j, to, err);
        j->best->rounds++;
        if (status == KVB_OK) status = try_towards(j, from, to, &better, err);
    }
    free(from);
    return status;
}

// ---- The search ----

static kvb_status run_search(refine_job *j, kvb_error *err)
{
    const refine_task *t = j->task;
    refine_result *best = j->best;
    size_t n = (size_t)t->n_knots * heads_of(t), knots = t->n_knots * sizeof(double);
    double *table = need(n, sizeof *table, "shifts");
    kvb_status status = measure_candidate(j, err); // shift 0, the table itself
    if (status == KVB_OK) {
        memcpy(best->calibration_before, j->calibration, knots);
        memcpy(best->calibration, j->calibration, knots);
        memcpy(best->selection_before, j->selection, knots);
        memcpy(best->selection, j->selection, knots);
        report_candidate(j);
    }
    for (uint32_t i = 0; i < t->n_starts && status == KVB_OK; i++)
        status = try_towards(j, table, t->starts + i * n, &(bool){false}, err);
    free(table);
    return status == KVB_OK ? run_rounds(j, err) : status;
}

kvb_status refine_run(refine_result *out, const refine_task *task, kvb_error *err)
{
    *out = (refine_result){0};
    if (!task->base || !heads_of(task) || !task->base->n_rows || !task->n_knots || !task->measure || !task->restore)
        return kvb_fail(err, KVB_ARGUMENT, "refine: expected a table, ratios, and ways to measure");
    size_t K = task->n_knots, n = K * heads_of(task);
    *out = (refine_result){.shift = need(n, sizeof(double), "shifts"),
                           .calibration_before = need(K, sizeof(double), "losses"),
                           .calibration = need(K, sizeof(double), "losses"),
                           .selection_before = need(K, sizeof(double), "losses"),
                           .selection = need(K, sizeof(double), "losses")};
    double *memory = need(n + 2 * K, sizeof *memory, "shifts");
    kvb_status status = run_search(&(refine_job){task, out, memory, memory + n, memory + n + K}, err);
    free(memory);
    if (status != KVB_OK) refine_free(out);
    return status;
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
