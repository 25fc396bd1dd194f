#include "study/window.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "study/learned_scores.h"
#include "study/pair_sums.h"
#include "study/pairs.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double RATIOS[PROTECTION_RATIOS] = {0.5, 0.8, 0.9};
static const solve_options OPTIONS = {HULL_FEASIBLE, SCOPE_GLOBAL, RATIOS, PROTECTION_RATIOS, NULL};

// One text: its scores, and its importance, the mean over its questions.
typedef struct text {
    cache_shape shape; // protection is the one that is tried
    float *scores, *importance;
    double mass;
    problem p;     // its own optimum
    pair_sums sum; // what the other texts' tables take from it
} text;

typedef struct window_work {
    const selection *from;
    const study_options *o;
    text *texts;
    uint32_t n_texts, shortest, longest; // texts with questions; tokens of the shortest, number of the longest
    const pair_sums **others;            // [n_texts]
    double *table;                       // [ratios, heads]
    uint32_t *keep;                      // [heads]
    study_progress *progress;
} window_work;

// ---- Texts ----

static kvb_status read_text(text *t, const selection *s, const char *metric, size_t k, kvb_error *err)
{
    const record_context_info *c = selection_context(s, k);
    const kvb_ranking *ranking = selection_ranking(s, metric);
    size_t n = (size_t)shape_heads(&t->shape) * c->n_tokens;
    float *one = need(n, sizeof *one, "importances");
    t->scores = need(n, sizeof *t->scores, "scores");
    t->importance = need(n, sizeof *t->importance, "importances");
    kvb_status status = ranking ? learned_scores_read(s, k, ranking, t->scores, err)
                                : record_read_scores(s->r, s->contexts[k], metric, t->scores, err);
    for (uint32_t q = 0; q < c->n_questions && status == KVB_OK; q++) {
        if (!selection_has(s, &c->questions[q], q)) continue;
        status = record_read_oracle(s->r, s->contexts[k], q, one, err);
        for (size_t i = 0; i < n && status == KVB_OK; i++) t->importance[i] += one[i];
    }
    for (size_t i = 0; i < n && status == KVB_OK; i++) t->mass += t->importance[i];
    free(one);
    return status;
}

static kvb_status read_texts(window_work *w, const pair_set *pairs, kvb_error *err)
{
    const selection *s = w->from;
    size_t heads = shape_heads(&pairs->longest);
    w->texts = need(s->n_contexts, sizeof *w->texts, "texts");
    w->others = need(s->n_contexts, sizeof *w->others, "texts");
    w->table = need(PROTECTION_RATIOS * heads, sizeof *w->table, "ratios");
    w->keep = need(heads, sizeof *w->keep, "heads");
    kvb_status status = KVB_OK;
    for (size_t k = 0; k < s->n_contexts && status == KVB_OK; k++) {
        if (selection_count(s, k) == 0) continue;
        text *t = &w->texts[w->n_texts++];
        t->shape = pairs->longest;
        t->shape.n_tokens = selection_context(s, k)->n_tokens;
        if (w->n_texts == 1 || t->shape.n_tokens < w->shortest) w->shortest = t->shape.n_tokens;
        if (t->shape.n_tokens > w->texts[w->longest].shape.n_tokens) w->longest = w->n_texts - 1;
        status = read_text(t, s, pairs->metric, k, err);
    }
    return status;
}

static void free_work(window_work *w)
{
    for (uint32_t t = 0; t < w->n_texts; t++) {
        free(w->texts[t].scores);
        free(w->texts[t].importance);
    }
    free(w->texts);
    free(w->others);
    free(w->table);
    free(w->keep);
}

// ---- One protection ----

static kvb_status solve_text(window_work *w, text *t, const protection *with, kvb_error *err)
{
    cache_shape grid = w->texts[w->longest].shape;
    metric_order order = {0};
    t->shape.sink = grid.sink = with->sink;
    t->shape.window = grid.window = with->window;
    kvb_status status = metric_order_make(&order, &t->shape, t->scores, err);
    if (status == KVB_OK) status = problem_init(&t->p, &t->shape, &OPTIONS, err);
    if (status == KVB_OK) status = loss_curves_fill(&t->p.curves, &order, t->importance, err);
    if (status == KVB_OK) status = problem_solve(&t->p, err);
    if (status == KVB_OK) status = pair_sums_init(&t->sum, &grid, STUDY_GRID, PROTECTION_RATIOS, err);
    if (status == KVB_OK) status = pair_sums_add(&t->sum, &t->p, err);
    metric_order_free(&order);
    return status;
}

// Adds what one text loses under the other texts' budgets; with no other text, under its own.
static kvb_status judge_text(window_work *w, uint32_t number, protection *with, kvb_error *err)
{
    text *t = &w->texts[number];
    uint32_t n = 0;
    double loss[PROTECTION_RATIOS] = {0};
    for (uint32_t i = 0; i < w->n_texts; i++)
        if (i != number) w->others[n++] = &w->texts[i].sum;
    kvb_status status = n ? pair_sums_mean_loss(w->table, w->others, n, w->o->shrink, &OPTIONS, err) : KVB_OK;
    if (status != KVB_OK) return status;
    if (n) table_loss_add(loss, &t->p.curves, PROTECTION_RATIOS, w->table, w->keep);
    else memcpy(loss, t->p.loss, sizeof loss);
    for (int r = 0; r < PROTECTION_RATIOS; r++)
        with->loss[r] +=
            t->p.allocation.saturated[r] || t->mass <= 0 ? NAN : loss[r] * t->p.curves.total / t->mass / w->n_texts;
    return KVB_OK;
}

static kvb_status try_protection(window_work *w, protection *with, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (uint32_t t = 0; t < w->n_texts && status == KVB_OK; t++) status = solve_text(w, &w->texts[t], with, err);
    for (uint32_t t = 0; t < w->n_texts && status == KVB_OK; t++) status = judge_text(w, t, with, err);
    for (uint32_t t = 0; t < w->n_texts; t++) {
        problem_free(&w->texts[t].p);
        pair_sums_free(&w->texts[t].sum);
        w->texts[t].p = (problem){.loss = NULL};
        w->texts[t].sum = (pair_sums){.mean = {.count = 0}};
    }
    double product = 1;
    for (int r = 0; r < PROTECTION_RATIOS; r++) product *= with->loss[r];
    with->score = cbrt(product);
    if (status == KVB_OK && !study_progress_step(w->progress))
        return kvb_fail(err, KVB_INTERRUPTED, "stopped; nothing was written");
    return status;
}

// ---- The choice ----

// Tries one more, unless it has been tried or the shortest text has no room.
static kvb_status try_next(window_choice *c, window_work *w, uint32_t sink, uint32_t window, kvb_error *err)
{
    for (uint32_t i = 0; i < c->n; i++)
        if (c->each[i].sink == sink && c->each[i].window == window) return KVB_OK;
    if (c->n && (uint64_t)sink + window >= w->shortest) return KVB_OK;
    protection *with = &c->each[c->n];
    *with = (protection){.sink = sink, .window = window};
    kvb_status status = try_protection(w, with, err);
    if (status != KVB_OK) return status;
    if (with->score < c->each[c->chosen].score) c->chosen = c->n; // NAN is never less
    c->n++;
    return KVB_OK;
}

static kvb_status try_all(window_choice *c, window_work *w, uint32_t sink, uint32_t window, kvb_error *err)
{
    static const uint32_t windows[WINDOWS - 1] = {1, 4, 16, 32, 64, 128, 256}, sinks[SINKS] = {0, 1, 2, 4, 8, 16};
    study_progress_begin(w->progress, w->o->sink == AS_RECORDED ? PROTECTIONS : WINDOWS);
    kvb_status status = try_next(c, w, sink, window, err);
    for (int i = 0; i < WINDOWS - 1 && status == KVB_OK; i++) status = try_next(c, w, sink, windows[i], err);
    uint32_t best = c->each[c->chosen].window;
    for (int i = 0; i < SINKS && status == KVB_OK && w->o->sink == AS_RECORDED; i++)
        status = try_next(c, w, sinks[i], best, err);
    return status;
}

kvb_status window_choose(window_choice *out, const selection *from, const char *metric, const study_options *o,
                         study_progress *progress, kvb_error *err)
{
    pair_set pairs = {0};
    study_options own = *o;
    own.window = AS_RECORDED;
    *out = (window_choice){.n = 0};
    window_work w = {.from = from, .o = o, .progress = progress};
    kvb_status status = pairs_open(&pairs, from, metric, &own, err);
    if (status == KVB_OK) status = read_texts(&w, &pairs, err);
    if (status == KVB_OK) status = try_all(out, &w, pairs.about.sink, pairs.about.window, err);
    out->held_out = w.n_texts > 1;
    free_work(&w);
    pairs_close(&pairs);
    return status;
}
