#include "study/window.h"
#include "runtime/fail.h"
#include "study/learned_scores.h"
#include "study/pairs.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double RATIOS[WINDOW_RATIOS] = {0.5, 0.8, 0.9};

// One text: its scores, and its importance, the mean over its questions.
typedef struct text {
    cache_shape shape; // without a window yet
    float *scores, *importance, *spare;
    double mass;
} text;

static kvb_status read_text(text *t, const pair_set *pairs, size_t k, kvb_error *err)
{
    const selection *s = pairs->from;
    const record_context_info *c = selection_context(s, k);
    const kvb_ranking *ranking = selection_ranking(s, pairs->metric);
    t->shape.n_tokens = c->n_tokens;
    size_t n = (size_t)shape_heads(&t->shape) * c->n_tokens;
    kvb_status status = ranking ? learned_scores_read(s, k, ranking, t->scores, err)
                                : record_read_scores(s->r, s->contexts[k], pairs->metric, t->scores, err);
    memset(t->importance, 0, n * sizeof *t->importance);
    for (uint32_t q = 0; q < c->n_questions && status == KVB_OK; q++) {
        if (!selection_has(s, &c->questions[q], q)) continue;
        status = record_read_oracle(s->r, s->contexts[k], q, t->spare, err);
        for (size_t i = 0; i < n && status == KVB_OK; i++) t->importance[i] += t->spare[i];
    }
    t->mass = 0;
    for (size_t i = 0; i < n && status == KVB_OK; i++) t->mass += t->importance[i];
    return status;
}

// Adds the losses of one text with one window; a row that cannot be reached makes the candidate's loss NAN.
static kvb_status try_window(double loss[WINDOW_RATIOS], const text *t, uint32_t window, kvb_error *err)
{
    const solve_options options = {HULL_FEASIBLE, SCOPE_GLOBAL, RATIOS, WINDOW_RATIOS, NULL};
    cache_shape shape = t->shape;
    metric_order order = {0};
    problem p = {0};
    shape.window = window;
    kvb_status status = metric_order_make(&order, &shape, t->scores, err);
    if (status == KVB_OK) status = problem_init(&p, &shape, &options, err);
    if (status == KVB_OK) status = loss_curves_fill(&p.curves, &order, t->importance, err);
    if (status == KVB_OK) status = problem_solve(&p, err);
    for (int r = 0; r < WINDOW_RATIOS && status == KVB_OK; r++)
        loss[r] += p.allocation.saturated[r] || t->mass <= 0 ? NAN : p.loss[r] * p.curves.total / t->mass;
    problem_free(&p);
    metric_order_free(&order);
    return status;
}

static void list_windows(window_choice *c, const pair_set *pairs)
{
    static const uint32_t usual[WINDOWS - 1] = {1, 4, 16, 32, 64, 128, 256};
    uint32_t shortest = UINT32_MAX;
    for (size_t k = 0; k < pairs->from->n_contexts; k++)
        if (selection_count(pairs->from, k) > 0 && selection_context(pairs->from, k)->n_tokens < shortest)
            shortest = selection_context(pairs->from, k)->n_tokens;
    c->recorded = pairs->about.window;
    c->window[c->n++] = c->recorded;
    for (int i = 0; i < WINDOWS - 1; i++)
        if (usual[i] != c->recorded && (uint64_t)pairs->about.sink + usual[i] < shortest) c->window[c->n++] = usual[i];
}

static kvb_status try_all(window_choice *c, const pair_set *pairs, text *t, study_progress *progress, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t k = 0; k < pairs->from->n_contexts && status == KVB_OK; k++) {
        if (selection_count(pairs->from, k) == 0) continue;
        status = read_text(t, pairs, k, err);
        for (uint32_t i = 0; i < c->n && status == KVB_OK; i++) {
            status = try_window(c->loss[i], t, c->window[i], err);
            if (status == KVB_OK && !study_progress_step(progress))
                return kvb_fail(err, KVB_INTERRUPTED, "stopped; nothing was written");
        }
    }
    return status;
}

kvb_status window_choose(window_choice *out, const selection *from, const char *metric, const study_options *o,
                         study_progress *progress, kvb_error *err)
{
    pair_set pairs = {0};
    text t = {0};
    study_options own = *o;
    own.window = AS_RECORDED;
    *out = (window_choice){0};
    kvb_status status = pairs_open(&pairs, from, metric, &own, err);
    if (status == KVB_OK) {
        t.shape = pairs.longest;
        size_t n = (size_t)shape_heads(&t.shape) * t.shape.n_tokens;
        t.scores = malloc(n * sizeof *t.scores);
        t.importance = malloc(n * sizeof *t.importance);
        t.spare = malloc(n * sizeof *t.spare);
        if (!t.scores || !t.importance || !t.spare) status = kvb_fail(err, KVB_MEMORY, "no memory for %zu numbers", n);
    }
    if (status == KVB_OK) {
        list_windows(out, &pairs);
        study_progress_begin(progress, (double)out->n * pairs.n_contexts);
        status = try_all(out, &pairs, &t, progress, err);
    }
    for (uint32_t i = 0; i < out->n && status == KVB_OK; i++) {
        double product = 1;
        for (int r = 0; r < WINDOW_RATIOS; r++) product *= out->loss[i][r] /= pairs.n_contexts;
        out->score[i] = cbrt(product);
        if (out->score[i] < out->score[out->chosen]) out->chosen = i; // NAN is never less
    }
    free(t.scores);
    free(t.importance);
    free(t.spare);
    pairs_close(&pairs);
    return status;
}
