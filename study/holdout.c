// Two walks over the pairs. The first sums up what each text's tables are made from; the second judges, on every pair,
// tables that have not seen its text (or, by question, not the pair itself).
#include "study/holdout.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "study/holdout_fit.h"
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

// ---- First walk -----------------------------------------------------------------------------------------------------

static uint32_t text_at(const holdout *h, const pair_walk *w)
{
    uint32_t t = 0;
    while (h->selected[t] != w->context) t++;
    return t;
}

// Whether a level of the learning curve leaves in the question number `index` of the text's n.
static bool is_drawn(const holdout *h, uint32_t level, uint32_t text, uint32_t index, uint32_t n)
{
    uint32_t *chosen = need(n, sizeof *chosen, "questions"), k = h->questions.level[level];
    bool in = false;
    if (k > n) k = n;
    draw_subset(chosen, k, n, h->seed, (uint64_t)text * LEVELS_MAX + level);
    for (uint32_t i = 0; i < k; i++) in |= chosen[i] == index;
    free(chosen);
    return in;
}

static kvb_status collect_pair(holdout *h, pair_walk *w, kvb_error *err)
{
    problem *p = &w->problem;
    uint32_t t = text_at(h, w), n = h->first[t + 1] - h->first[t];
    kvb_status status = problem_solve(p, err);
    if (status == KVB_OK) status = pair_sums_add(&h->work->texts[t], p, err);
    for (uint32_t r = 0; r < h->n_rows && status == KVB_OK; r++)
        h->loss[((size_t)r * N_METHODS + METHOD_OPTIMUM) * h->n_pairs + w->pair] = p->loss[r];
    for (uint32_t l = 0; l < h->questions.n_levels && status == KVB_OK; l++)
        if (is_drawn(h, l, t, w->pair - h->first[t], n)) status = pair_sums_add(&h->work->levels[l][t], p, err);
    return status;
}

// ---- Second walk ----------------------------------------------------------------------------------------------------

// What a table loses on the pair, row by row.
static void judge(const holdout *h, const loss_curves *c, const double *table, double loss[ROWS])
{
    for (uint32_t r = 0; r < h->n_rows; r++) loss[r] = 0;
    table_loss_add(loss, c, h->n_rows, table, h->work->keep);
}

static kvb_status judge_pair(holdout *h, pair_walk *w, kvb_error *err)
{
    const holdout_work *x = h->work;
    const loss_curves *c = &w->problem.curves;
    uint32_t text = text_at(h, w), n_rows = h->n_rows, n_questions = h->first[text + 1] - h->first[text];
    double loss[ROWS];
    kvb_status status = holdout_fit_fold(h, &w->problem, text, err);
    if (status != KVB_OK) return status;
    for (uint32_t m = 0; m < METHOD_OPTIMUM; m++) {
        judge(h, c, x->tables[m], loss);
        for (uint32_t r = 0; r < n_rows; r++) h->loss[((size_t)r * N_METHODS + m) * h->n_pairs + w->pair] = loss[r];
    }
    for (size_t e = 0; e < x->n_entries; e++) {
        const holdout_entry *one = &x->entries[e];
        judge(h, c, one->table, loss);
        for (uint32_t r = 0; r < n_rows; r++)
            one->curve->loss[one->level][one->method][r] += loss[r] * one->weight / h->n_pairs;
    }
    for (uint32_t t = 0; t < h->n_texts && h->transfer; t++) {
        judge(h, c, x->own + t * holdout_cells(h), loss);
        for (uint32_t r = 0; r < n_rows; r++)
            h->transfer[((size_t)r * h->n_texts + t) * h->n_texts + text] += loss[r] / n_questions;
    }
    return KVB_OK;
}

// ---- The whole ------------------------------------------------------------------------------------------------------

// Texts with selected questions, and where their pairs begin.
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
    if ((h->by_question ? h->n_pairs : h->n_texts) < 2)
        return kvb_fail(
            err, KVB_ARGUMENT, "--holdout %s: expected at least 2 %s in %s, found 1; nothing can be held out",
            h->by_question ? "question" : "text", h->by_question ? "questions" : "texts with questions", s->path);
    return KVB_OK;
}

kvb_status holdout_open(holdout *h, const selection *from, const char *metric, const study_options *o, bool by_question,
                        uint64_t seed, kvb_error *err)
{
    *h = (holdout){.options = *o, .by_question = by_question, .seed = seed};
    // By question tables are made for every pair, so fewer rows must do.
    for (uint32_t i = by_question ? 5 : 1; i <= ROWS; i += by_question ? 5 : 1) h->ratios[h->n_rows++] = i / 100.0;
    kvb_status status = pairs_open(&h->pairs, from, metric, o, err);
    if (status == KVB_OK) status = count_texts(h, err);
    if (status != KVB_OK) return status;
    h->loss = need((size_t)h->n_rows * N_METHODS * h->n_pairs, sizeof *h->loss, "losses");
    return holdout_work_init(h, err);
}

void holdout_free(holdout *h)
{
    holdout_work_free(h);
    free(h->first);
    free(h->selected);
    free(h->loss);
    free(h->transfer);
    pairs_close(&h->pairs);
    *h = (holdout){.n_rows = 0};
}

// The pairs' own problems are solved as the paper does; the tables pull their curves together themselves.
static kvb_status walk(holdout *h, kvb_status (*take)(holdout *, pair_walk *, kvb_error *), study_progress *progress,
                       kvb_error *err)
{
    pair_walk w;
    kvb_status status = KVB_OK;
    pair_walk_open(&w, &h->pairs, &h->work->options, h->options.min_keep, progress);
    while (status == KVB_OK && (status = pair_walk_next(&w, err)) == KVB_OK && !w.ended)
        status = pair_walk_name(&w, take(h, &w, err), err);
    pair_walk_close(&w);
    return status;
}

kvb_status holdout_run(holdout *h, study_progress *progress, kvb_error *err)
{
    study_progress_begin(progress, 2.0 * h->n_pairs);
    kvb_status status = walk(h, collect_pair, progress, err);
    if (status == KVB_OK) status = holdout_fit_own(h, err);
    if (status == KVB_OK) status = walk(h, judge_pair, progress, err);
    for (uint32_t r = 0; r < h->n_rows && status == KVB_OK; r++) {
        loss_sample sample = {N_METHODS, h->n_pairs, h->n_texts, h->loss + (size_t)r * N_METHODS * h->n_pairs,
                              h->first};
        loss_intervals(&sample, METHOD_PAPER, h->mean[r], h->ratio[r]);
    }
    return status;
}

// ---- What was found -------------------------------------------------------------------------------------------------

int holdout_row(const holdout *h, int percent)
{
    for (uint32_t r = 0; r < h->n_rows; r++)
        if ((int)rint(100 * h->ratios[r]) == percent) return (int)r;
    return -1;
}

double holdout_worst_change(const holdout *h, int method, int *percent)
{
    double worst = -INFINITY;
    for (uint32_t r = 0; r < h->n_rows; r++) {
        int p = (int)rint(100 * h->ratios[r]);
        if (p < 30 || p > 95 || !(h->ratio[r][method].value > worst)) continue;
        worst = h->ratio[r][method].value;
        *percent = p;
    }
    return worst;
}

double holdout_regret(const holdout *h, int row, uint32_t from, uint32_t to)
{
    const double *loss = h->transfer + (size_t)row * h->n_texts * h->n_texts;
    double own = loss[(size_t)to * h->n_texts + to];
    return own > 0 ? loss[(size_t)from * h->n_texts + to] / own - 1 : 0;
}

const record_context_info *holdout_text(const holdout *h, uint32_t text)
{
    return selection_context(h->pairs.from, h->selected[text]);
}
