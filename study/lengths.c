// Two walks over every record: the first sums up each text at each length, the second judges every pair by tables that
// have not seen its text, whatever the length.
#include "study/lengths.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "study/gather.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Rows and columns of the transfer matrix.
static uint32_t place(const lengths *x, uint32_t cut_at, uint32_t text)
{
    return text * x->n_cuts + cut_at;
}

static const char *text_name(const lengths *x, uint32_t text)
{
    return selection_context(&x->cuts[0].from, text)->id;
}

// ---- Records --------------------------------------------------------------------------------------------------------

// Leaves in every record the contexts of the first one, in its order.
static kvb_status match_contexts(lengths *x, kvb_error *err)
{
    const selection *first = &x->cuts[0].from;
    x->n_texts = (uint32_t)first->n_contexts;
    if (x->n_texts < 2 || x->n_texts > LENGTH_TEXTS_MAX)
        return kvb_fail(err, KVB_ARGUMENT, "--lengths: expected 2 to %d contexts in %s, found %zu (--contexts chooses)",
                        LENGTH_TEXTS_MAX, first->path, first->n_contexts);
    for (uint32_t k = 1; k < x->n_cuts; k++) {
        selection *s = &x->cuts[k].from;
        size_t order[LENGTH_TEXTS_MAX] = {0};
        for (uint32_t t = 0; t < x->n_texts; t++) {
            size_t i = 0, n = s->n_contexts;
            while (i < n && strcmp(selection_context(s, i)->id, text_name(x, t)) != 0) i++;
            if (i == n)
                return kvb_fail(err, KVB_MISMATCH,
                                "%s: has no context %s, which is in %s; profile the same calibration data at every "
                                "length (--max-tokens)",
                                s->path, text_name(x, t), first->path);
            order[t] = s->contexts[i];
        }
        memcpy(s->contexts, order, x->n_texts * sizeof *order);
        s->n_contexts = x->n_texts;
    }
    return KVB_OK;
}

static kvb_status check_cut(const lengths *x, const length_cut *c, kvb_error *err)
{
    const selection *first = &x->cuts[0].from;
    record_shape shape = record_get_shape(first->r);
    const cache_shape *own = &c->pairs.longest;
    if (own->n_layers != shape.n_layers || own->n_kv_heads != shape.n_kv_heads)
        return kvb_fail(err, KVB_MISMATCH, "%s: expected %u layers x %u KV heads as in %s, found %u x %u", c->from.path,
                        shape.n_layers, shape.n_kv_heads, first->path, own->n_layers, own->n_kv_heads);
    if (c->pairs.n_contexts != x->n_texts)
        return kvb_fail(err, KVB_ARGUMENT, "%s: %u of %u contexts have no question with recorded queries", c->from.path,
                        x->n_texts - c->pairs.n_contexts, x->n_texts);
    return selection_require_model(&c->from, record_text(first->r, "model_sha256"), first->path, err);
}

static kvb_status open_pairs(lengths *x, cache_shape *longest, kvb_error *err)
{
    kvb_status status = match_contexts(x, err);
    for (uint32_t k = 0; k < x->n_cuts && status == KVB_OK; k++) {
        length_cut *c = &x->cuts[k];
        status = pairs_open(&c->pairs, &c->from, c->from.metrics[0], &x->options, err);
        if (status == KVB_OK) status = check_cut(x, c, err);
        if (c->pairs.longest.n_tokens > longest->n_tokens) *longest = c->pairs.longest;
        c->tokens = c->pairs.longest.n_tokens;
        c->fitted = x->n_texts;
        x->n_pairs += c->pairs.n_pairs;
        snprintf(c->name, sizeof c->name, "%u", c->tokens);
    }
    return status;
}

// Memory for the sums and tables of a record.
static void open_sums(lengths *x, length_cut *c, const cache_shape *longest)
{
    c->texts = need(x->n_texts, sizeof *c->texts, "texts");
    for (uint32_t from = 0; from < x->n_cuts + 2; from++)
        c->tables[from] = need(x->cells, sizeof **c->tables, "ratios");
    for (uint32_t t = 0; t < x->n_texts; t++) {
        uint32_t at = place(x, (uint32_t)(c - x->cuts), t);
        snprintf(x->names[at], sizeof *x->names, "%.9s %u", text_name(x, t), c->tokens);
        pair_sums_init(&c->texts[t], longest, STUDY_GRID, ROWS);
    }
}

kvb_status lengths_open(lengths *x, char *const *paths, size_t n, const selection_request *wanted,
                        const study_options *o, kvb_error *err)
{
    cache_shape longest = {0};
    *x = (lengths){.options = *o};
    if (n < 2 || n > LENGTHS_MAX)
        return kvb_fail(err, KVB_ARGUMENT, "--lengths: expected 2 to %d records, one for each length, found %zu",
                        LENGTHS_MAX, n);
    x->cuts = need(n, sizeof *x->cuts, "records");
    kvb_status status = KVB_OK;
    while (x->n_cuts < n && status == KVB_OK) {
        status = selection_open(&x->cuts[x->n_cuts].from, paths[x->n_cuts], wanted, err);
        x->n_cuts++;
    }
    if (status == KVB_OK) status = open_pairs(x, &longest, err);
    if (status != KVB_OK) return status;
    size_t side = (size_t)x->n_cuts * x->n_texts;
    x->cells = ROWS * (size_t)shape_heads(&longest);
    x->own = need(side * x->cells, sizeof *x->own, "ratios");
    x->transfer = need(ROWS * side * side, sizeof *x->transfer, "losses");
    for (uint32_t k = 0; k < x->n_cuts; k++) open_sums(x, &x->cuts[k], &longest);
    return KVB_OK;
}

void lengths_free(lengths *x)
{
    for (uint32_t k = 0; k < x->n_cuts; k++) {
        length_cut *c = &x->cuts[k];
        for (uint32_t t = 0; t < x->n_texts && c->texts; t++) pair_sums_free(&c->texts[t]);
        for (uint32_t from = 0; from < x->n_cuts + 2; from++) free(c->tables[from]);
        free(c->texts);
        pairs_close(&c->pairs);
        selection_close(&c->from);
    }
    free(x->cuts);
    free(x->own);
    free(x->transfer);
    *x = (lengths){.n_cuts = 0};
}

// ---- Walks ----------------------------------------------------------------------------------------------------------

static kvb_status collect_pair(lengths *x, length_cut *c, pair_walk *w, kvb_error *err)
{
    (void)x;
    kvb_status status = problem_solve(&w->problem, err);
    c->n_pairs[w->context]++;
    return status == KVB_OK ? pair_sums_add(&c->texts[w->context], &w->problem, err) : status;
}

static solve_options solve_for(const lengths *x)
{
    return study_solve_options(&x->options);
}

// From the texts but `held` of all lengths that `from` says: a length, n_cuts for all, n_cuts + 1 for all but `on`.
static kvb_status fit(lengths *x, uint32_t from, uint32_t on, uint32_t held, double *table, kvb_error *err)
{
    const pair_sums *parts[CUTS_MAX];
    solve_options solve = solve_for(x);
    uint32_t n = 0;
    for (uint32_t k = 0; k < x->n_cuts; k++) {
        bool in = from < x->n_cuts ? k == from : from == x->n_cuts || k != on;
        for (uint32_t t = 0; t < x->n_texts && in; t++)
            if (t != held) parts[n++] = &x->cuts[k].texts[t];
    }
    return pair_sums_mean_loss(table, parts, n, DEFAULT_SHRINK, &solve, err);
}

static kvb_status judge_pair(lengths *x, length_cut *c, pair_walk *w, kvb_error *err)
{
    const loss_curves *curves = &w->problem.curves;
    uint32_t text = (uint32_t)w->context, on = (uint32_t)(c - x->cuts), side = x->n_cuts * x->n_texts;
    kvb_status status = KVB_OK;
    for (uint32_t from = 0; from < x->n_cuts + 2 && status == KVB_OK; from++) {
        double loss[ROWS] = {0};
        if (c->fitted != text) status = fit(x, from, on, text, c->tables[from], err);
        if (status == KVB_OK) status = judge_table(loss, curves, NULL, ROWS, c->tables[from], err);
        for (uint32_t r = 0; r < ROWS; r++) x->loss[from][on][r] += loss[r] / c->pairs.n_pairs;
    }
    c->fitted = text;
    for (uint32_t i = 0; i < side && status == KVB_OK; i++) {
        double loss[ROWS] = {0};
        status = judge_table(loss, curves, NULL, ROWS, x->own + i * x->cells, err);
        for (uint32_t r = 0; r < ROWS; r++)
            x->transfer[((size_t)r * side + i) * side + place(x, on, text)] += loss[r] / c->n_pairs[text];
    }
    return status;
}

// The pairs' own problems are solved as the paper does; the tables pull their curves together themselves.
static kvb_status walk(lengths *x, uint32_t at, kvb_status (*take)(lengths *, length_cut *, pair_walk *, kvb_error *),
                       study_progress *progress, kvb_error *err)
{
    pair_walk w;
    length_cut *c = &x->cuts[at];
    solve_options solve = solve_for(x);
    study_progress_begin(progress, c->pairs.n_pairs);
    kvb_status status = KVB_OK;
    pair_walk_open(&w, &c->pairs, &solve, x->options.min_keep, progress);
    while (status == KVB_OK && (status = pair_walk_next(&w, err)) == KVB_OK && !w.ended)
        status = pair_walk_name(&w, take(x, c, &w, err), err);
    pair_walk_close(&w);
    return status;
}

kvb_status lengths_read(lengths *x, uint32_t at, study_progress *progress, kvb_error *err)
{
    return walk(x, at, collect_pair, progress, err);
}

kvb_status lengths_fit(lengths *x, kvb_error *err)
{
    kvb_status status = KVB_OK;
    solve_options solve = solve_for(x);
    for (uint32_t k = 0; k < x->n_cuts; k++)
        for (uint32_t t = 0; t < x->n_texts && status == KVB_OK; t++) {
            const pair_sums *part = &x->cuts[k].texts[t];
            double *table = x->own + place(x, k, t) * x->cells;
            status = pair_sums_mean_loss(table, &part, 1, DEFAULT_SHRINK, &solve, err);
        }
    return status;
}

kvb_status lengths_judge(lengths *x, uint32_t at, study_progress *progress, kvb_error *err)
{
    return walk(x, at, judge_pair, progress, err);
}

// ---- What was found -------------------------------------------------------------------------------------------------

double lengths_change(const lengths *x, uint32_t from, uint32_t on, uint32_t row)
{
    double own = x->loss[on][on][row];
    return own > 0 ? x->loss[from][on][row] / own - 1 : 0;
}

double lengths_regret(const lengths *x, uint32_t from, uint32_t to, uint32_t row)
{
    size_t side = (size_t)x->n_cuts * x->n_texts;
    const double *loss = x->transfer + row * side * side;
    double own = loss[to * side + to];
    return own > 0 ? loss[from * side + to] / own - 1 : 0;
}

const char *lengths_source(const lengths *x, uint32_t from)
{
    return from < x->n_cuts ? x->cuts[from].name : from == x->n_cuts ? "all lengths" : "all but this";
}
