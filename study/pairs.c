#include "study/pairs.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "solver/constrained.h"
#include "study/learned_scores.h"
#include <math.h>
#include <stdlib.h>

// ---- Counting -------------------------------------------------------------------------------------------------------

static void count_context(pair_set *p, size_t k)
{
    const record_context_info *c = selection_context(p->from, k);
    for (uint32_t q = 0; q < c->n_questions; q++) {
        uint32_t queries = c->questions[q].n_queries;
        p->n_skipped += queries == 0 && q < p->from->max_questions;
        if (!selection_has(p->from, &c->questions[q], q)) continue;
        p->n_pairs++;
        p->n_continued += c->questions[q].n_suffix <= 1; // only the token that the answer is predicted from
        if (queries < p->fewest_queries) p->fewest_queries = queries;
        if (queries > p->most_queries) p->most_queries = queries;
    }
}

// Counts the pairs and checks that each leaves something to choose.
static kvb_status count_pairs(pair_set *p, kvb_error *err)
{
    p->fewest_queries = UINT32_MAX;
    for (size_t k = 0; k < p->from->n_contexts; k++) {
        const record_context_info *c = selection_context(p->from, k);
        uint32_t before = p->n_pairs;
        count_context(p, k);
        if (p->n_pairs == before) continue;
        p->n_contexts++;
        if (c->n_tokens > p->longest.n_tokens) p->longest.n_tokens = c->n_tokens;
        if ((uint64_t)p->about.sink + p->about.window >= c->n_tokens)
            return kvb_fail(err, KVB_ARGUMENT,
                            "%s: context %s: %s protects %u + %u of its %u tokens, so there is nothing to choose; "
                            "leave it out with --contexts, or lower --sink and --window",
                            p->from->path, c->id, p->metric, p->about.sink, p->about.window, c->n_tokens);
    }
    if (p->n_pairs == 0)
        return kvb_fail(err, KVB_ARGUMENT, "%s: no question with recorded queries is selected; nothing to solve",
                        p->from->path);
    return KVB_OK;
}

// If the record has a learned ranking's scores, it also says what the ranking protects, and of what its curves are.
static kvb_status take_recorded(pair_set *p, kvb_error *err)
{
    record_metric own;
    if (!record_has_metric(selection_context(p->from, 0), p->metric)) return KVB_OK;
    kvb_status status = record_metric_read(&own, p->from->r, p->metric, err);
    if (status != KVB_OK) return status;
    p->about.sink = own.sink;
    p->about.window = own.window;
    p->about.refit = own.refit;
    record_metric_free(&own);
    return KVB_OK;
}

// Chooses the pairs' loss. The output loss needs the protected tokens that the record's curves were made with.
static kvb_status choose_loss(pair_set *p, const study_options *o, kvb_error *err)
{
    bool there = o->loss != LOSS_IMPORTANCE && !o->oracle_order && output_loss_is_there(p->from, p->metric);
    bool own = p->about.sink == p->recorded_sink && p->about.window == p->recorded_window;
    p->loss = there && own ? LOSS_OUTPUT : LOSS_IMPORTANCE;
    if (o->loss == LOSS_OUTPUT && !there)
        return kvb_fail(
            err, KVB_MISMATCH,
            "%s: has no curves of output errors of %s for all of these questions, with gains of the layers; "
            "profile with --curves, or add a metric that is new with them (kvbudget profile --add -m METRIC --curves)",
            p->from->path, p->metric);
    if (o->loss == LOSS_OUTPUT && !own)
        return kvb_fail(
            err, KVB_MISMATCH,
            "%s: the curves of %s were recorded with %u sinks and a window of %u tokens, not with %u and %u; "
            "profile with --sink and --window",
            p->from->path, p->metric, p->recorded_sink, p->recorded_window, p->about.sink, p->about.window);
    if (p->loss != LOSS_OUTPUT) return KVB_OK;
    p->gain = need(p->longest.n_layers, sizeof *p->gain, "gains");
    return output_gains_read(p->gain, p->from, err);
}

kvb_status pairs_open(pair_set *p, const selection *from, const char *metric, const study_options *o, kvb_error *err)
{
    record_shape model = record_get_shape(from->r);
    *p = (pair_set){.from = from, .metric = metric};
    const kvb_ranking *ranking = selection_ranking(from, metric);
    kvb_status status = KVB_OK;
    if (ranking) record_metric_learned(&p->about, ranking);
    else status = record_metric_read(&p->about, from->r, metric, err);
    if (status != KVB_OK) return status;
    if (ranking) status = take_recorded(p, err);
    if (status != KVB_OK) return status;
    p->recorded_sink = p->about.sink;
    p->recorded_window = p->about.window;
    if (o->sink != AS_RECORDED) p->about.sink = (uint32_t)o->sink;
    if (o->window != AS_RECORDED) p->about.window = (uint32_t)o->window;
    p->longest = (cache_shape){model.n_layers, model.n_kv_heads, 0, p->about.sink, p->about.window};
    status = count_pairs(p, err);
    if (status == KVB_OK) status = cache_shape_check(&p->longest, err);
    return status == KVB_OK ? choose_loss(p, o, err) : status;
}

void pairs_close(pair_set *p)
{
    record_metric_free(&p->about);
    free(p->gain);
    *p = (pair_set){0};
}

// ---- Reading --------------------------------------------------------------------------------------------------------

pair_walk pair_walk_open(const pair_set *pairs, solve_options solve, double min_keep, study_progress *progress)
{
    size_t heads = shape_heads(&pairs->longest), numbers = heads * pairs->longest.n_tokens,
           curves = heads * RECORD_CURVE_LEVELS;
    return (pair_walk){.pairs = pairs,
                       .solve = solve,
                       .min_keep = min_keep,
                       .progress = progress,
                       .scores = need(numbers, sizeof(float), "scores"),
                       .oracle = need(numbers > curves ? numbers : curves, sizeof(float), "importances")};
}

static void leave_context(pair_walk *w)
{
    problem_free(&w->problem);
    metric_order_free(&w->order);
}

kvb_status pair_walk_close(pair_walk *w)
{
    kvb_status status = w->status;
    leave_context(w);
    free_all(w->scores, w->oracle);
    *w = (pair_walk){0};
    return status;
}

// Reads the scores, makes their order, and a problem of the context's shape.
static kvb_status enter_context(pair_walk *w, kvb_error *err)
{
    const selection *s = w->pairs->from;
    cache_shape shape = w->pairs->longest;
    shape.n_tokens = selection_context(s, w->context)->n_tokens;
    const kvb_ranking *ranking = selection_ranking(s, w->pairs->metric);
    kvb_status status = ranking ? learned_scores_read(s, w->context, ranking, w->scores, err)
                                : record_read_scores(s->r, s->contexts[w->context], w->pairs->metric, w->scores, err);
    if (status == KVB_OK) status = metric_order_make(&w->order, &shape, w->scores, err);
    if (status != KVB_OK) return status;
    uint32_t least = (uint32_t)ceil(w->min_keep * shape.n_tokens);
    problem_init(&w->problem, &shape, &w->solve);
    if (w->problem.curves.floor < least) w->problem.curves.floor = least;
    return KVB_OK;
}

// Finds the first pair from the present place on. Returns false if there is none.
static bool find_pair(pair_walk *w, kvb_error *err)
{
    const selection *s = w->pairs->from;
    for (; w->context < s->n_contexts; w->context++, w->question = 0) {
        const record_context_info *c = selection_context(s, w->context);
        bool entered = w->problem.loss != NULL;
        while (w->question < c->n_questions && !selection_has(s, &c->questions[w->question], w->question))
            w->question++;
        if (w->question < c->n_questions) {
            if (!entered) w->status = enter_context(w, err);
            return true;
        }
        leave_context(w);
    }
    return false;
}

// If the work on a pair failed, puts record, context and question before its message.
static void name_pair(const pair_walk *w, kvb_error *err)
{
    if (w->status == KVB_OK || !err) return;
    const record_context_info *c = selection_context(w->pairs->from, w->context);
    kvb_error inner = *err;
    kvb_fail(err, w->status, "%s: context %s, question %u: %s", w->pairs->from->path, c->id,
             c->questions[w->question].number, inner.message);
}

bool pair_walk_next(pair_walk *w, kvb_error *err)
{
    const selection *s = w->pairs->from;
    name_pair(w, err);
    if (w->status == KVB_OK && w->begun && !study_progress_step(w->progress))
        w->status = kvb_fail(err, KVB_INTERRUPTED, "stopped; nothing was written");
    w->question += w->begun;
    w->pair += w->begun;
    w->begun = true;
    if (w->status != KVB_OK || !find_pair(w, err) || w->status != KVB_OK) return false;
    loss_curves *c = &w->problem.curves;
    if (w->pairs->loss == LOSS_OUTPUT) {
        w->status = output_curves_fill(c, s, w->context, w->question, w->pairs->metric, w->pairs->gain, w->oracle, err);
        return w->status == KVB_OK;
    }
    w->status = record_read_oracle(s->r, s->contexts[w->context], w->question, w->oracle, err); // errors name the place
    if (w->status != KVB_OK) return false;
    w->status = loss_curves_fill(c, &w->order, w->oracle, err);
    name_pair(w, err);
    return w->status == KVB_OK;
}

// ---- Judging --------------------------------------------------------------------------------------------------------

kvb_status judge_table(double *sum, const loss_curves *c, const kvb_limits *limits, uint32_t n_rows,
                       const double *prune_ratio, kvb_error *err)
{
    uint32_t *keep = need(shape_heads(&c->shape), sizeof *keep, "heads");
    kvb_status status = KVB_OK;
    if (limits) status = constrained_loss_add(sum, c, limits, n_rows, prune_ratio, keep, err);
    else table_loss_add(sum, c, n_rows, prune_ratio, keep);
    free(keep);
    return status;
}
