// Two walks over the pairs. The first sums up what each text's tables are made from; the second judges, on every pair,
// tables that have not seen its text.
#include "study/holdout.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>

const char *const holdout_methods[N_METHODS] = {"uniform",
                                                "mean_ratio (paper)",
                                                "mean_loss",
                                                "mean_loss, shrink 0.1",
                                                "mean_loss, shrink 0.2",
                                                "mean_loss, shrink 0.3",
                                                "worst",
                                                "cvar:0.5",
                                                "question's optimum"};

static const double SHRINKS[] = {0, 0.1, 0.2, 0.3}; // of METHOD_MEAN_LOSS and those after it
static const double CVAR_SHARE = 0.5;               // half of the texts: 0.2 of few texts would be the worst one alone

static uint32_t text_at(const holdout *h, const pair_walk *w)
{
    uint32_t t = 0;
    while (h->selected[t] != w->context) t++;
    return t;
}

static double *losses_of(holdout *h, uint32_t row, uint32_t method)
{
    return h->loss + ((size_t)row * N_METHODS + method) * h->n_pairs;
}

static kvb_status collect_pair(holdout *h, pair_walk *w, kvb_error *err)
{
    kvb_status status = problem_solve(&w->problem, err);
    if (status == KVB_OK) status = pair_sums_add(&h->texts[text_at(h, w)], &w->problem, err);
    for (uint32_t r = 0; r < ROWS && status == KVB_OK; r++)
        losses_of(h, r, METHOD_OPTIMUM)[w->pair] = w->problem.loss[r];
    return status;
}

// Makes the tables without a text.
static kvb_status fit_without(holdout *h, uint32_t text, kvb_error *err)
{
    const solve_options options = study_solve_options(&h->options);
    const pair_sums **parts = need(h->n_texts, sizeof *parts, "texts");
    uint32_t n = 0;
    for (uint32_t t = 0; t < h->n_texts; t++)
        if (t != text) parts[n++] = &h->texts[t];
    kvb_status status = pair_sums_mean_ratio(h->tables[METHOD_PAPER], parts, n, err);
    for (uint32_t i = 0; i < sizeof SHRINKS / sizeof *SHRINKS && status == KVB_OK; i++)
        status = pair_sums_mean_loss(h->tables[METHOD_MEAN_LOSS + i], parts, n, SHRINKS[i], &options, err);
    if (status == KVB_OK) status = pair_sums_tail(h->tables[METHOD_WORST], parts, n, 0, &options, err);
    if (status == KVB_OK) status = pair_sums_tail(h->tables[METHOD_CVAR], parts, n, CVAR_SHARE, &options, err);
    h->fitted = text;
    free(parts);
    return status;
}

static kvb_status judge_pair(holdout *h, pair_walk *w, kvb_error *err)
{
    uint32_t text = text_at(h, w);
    kvb_status status = h->fitted == text ? KVB_OK : fit_without(h, text, err);
    for (uint32_t m = 0; m < METHOD_OPTIMUM && status == KVB_OK; m++) {
        double loss[ROWS] = {0};
        status = judge_table(loss, &w->problem.curves, NULL, ROWS, h->tables[m], err);
        for (uint32_t r = 0; r < ROWS; r++) losses_of(h, r, m)[w->pair] = loss[r];
    }
    return status;
}

// Finds the texts with selected questions, and where their pairs begin.
static kvb_status count_texts(holdout *h, kvb_error *err)
{
    const selection *s = h->pairs.from;
    h->first = need(s->n_contexts + 1, sizeof *h->first, "contexts");
    h->selected = need(s->n_contexts, sizeof *h->selected, "contexts");
    for (size_t k = 0; k < s->n_contexts; k++) {
        uint32_t n = selection_count(s, k);
        if (n == 0) continue;
        h->selected[h->n_texts++] = k;
        h->n_pairs += n;
        h->first[h->n_texts] = h->n_pairs;
    }
    if (h->n_texts < 2)
        return kvb_fail(err, KVB_ARGUMENT,
                        "--holdout: expected at least 2 texts with questions in %s, found 1; nothing can be held out",
                        s->path);
    return KVB_OK;
}

kvb_status holdout_open(holdout *h, const selection *from, const char *metric, const study_options *o, kvb_error *err)
{
    *h = (holdout){.options = *o};
    kvb_status status = pairs_open(&h->pairs, from, metric, o, err);
    if (status == KVB_OK) status = count_texts(h, err);
    if (status != KVB_OK) return status;
    size_t heads = shape_heads(&h->pairs.longest), cells = ROWS * heads;
    h->loss = need((size_t)ROWS * N_METHODS * h->n_pairs, sizeof *h->loss, "losses");
    h->texts = need(h->n_texts, sizeof *h->texts, "texts");
    h->fitted = h->n_texts;
    for (int m = 0; m < N_METHODS; m++) h->tables[m] = need(cells, sizeof *h->tables[m], "ratios");
    for (size_t i = 0; i < cells; i++) h->tables[METHOD_UNIFORM][i] = o->ratios[i / heads];
    for (uint32_t t = 0; t < h->n_texts; t++) pair_sums_init(&h->texts[t], &h->pairs.longest, STUDY_GRID, ROWS);
    return KVB_OK;
}

void holdout_free(holdout *h)
{
    for (uint32_t t = 0; t < h->n_texts && h->texts; t++) pair_sums_free(&h->texts[t]);
    for (int m = 0; m < N_METHODS; m++) free(h->tables[m]);
    free_all(h->texts, h->first, h->selected, h->loss);
    pairs_close(&h->pairs);
    *h = (holdout){.n_texts = 0};
}

// Calls `take` for every pair. Pairs are solved without shrinkage, as in the paper; the tables shrink their own curves.
static kvb_status walk(holdout *h, kvb_status (*take)(holdout *, pair_walk *, kvb_error *), study_progress *progress,
                       kvb_error *err)
{
    pair_walk w = pair_walk_open(&h->pairs, study_solve_options(&h->options), h->options.min_keep, progress);
    while (pair_walk_next(&w, err)) w.status = take(h, &w, err);
    return pair_walk_close(&w);
}

kvb_status holdout_run(holdout *h, study_progress *progress, kvb_error *err)
{
    study_progress_begin(progress, 2.0 * h->n_pairs);
    kvb_status status = walk(h, collect_pair, progress, err);
    if (status == KVB_OK) status = walk(h, judge_pair, progress, err);
    for (uint32_t r = 0; r < ROWS && status == KVB_OK; r++) {
        loss_sample sample = {N_METHODS, h->n_pairs, h->n_texts, losses_of(h, r, 0), h->first};
        loss_intervals(&sample, METHOD_PAPER, h->mean[r], h->ratio[r]);
    }
    return status;
}

double holdout_worst_change(const holdout *h, int method, int *percent)
{
    double worst = -INFINITY;
    for (int p = 30; p <= 95; p++) {
        double change = h->ratio[p - 1][method].value;
        if (!(change > worst)) continue;
        worst = change;
        *percent = p;
    }
    return worst;
}
