#include "study/holdout_fit.h"
#include "formats/need.h"
#include <stdlib.h>

static const double SHRINKS[] = {0, 0.1, 0.2, 0.3}; // of METHOD_MEAN_LOSS and those after it
static const double CVAR_SHARE = 0.5;               // half of the texts: of few texts 0.2 would be the worst one

// Subsets of texts that a point of the learning curve averages over, at most.
enum { DRAWS_MAX = 6 };

size_t holdout_cells(const holdout *h)
{
    return (size_t)h->n_rows * shape_heads(&h->pairs.longest);
}

// ---- Tables ---------------------------------------------------------------------------------------------------------

// The two tables that learning curves and transfer compare.
static kvb_status fit_either(const solve_options *options, uint32_t method, double *table,
                             const pair_sums *const *parts, uint32_t n, kvb_error *err)
{
    return method == 0 ? pair_sums_mean_ratio(table, parts, n, err)
                       : pair_sums_mean_loss(table, parts, n, DEFAULT_SHRINK, options, err);
}

static kvb_status fit_methods(holdout *h, const pair_sums *const *parts, uint32_t n, kvb_error *err)
{
    holdout_work *w = h->work;
    kvb_status status = pair_sums_mean_ratio(w->tables[METHOD_PAPER], parts, n, err);
    for (uint32_t i = 0; i < sizeof SHRINKS / sizeof *SHRINKS && status == KVB_OK; i++)
        status = pair_sums_mean_loss(w->tables[METHOD_MEAN_LOSS + i], parts, n, SHRINKS[i], &w->options, err);
    if (status == KVB_OK) status = pair_sums_tail(w->tables[METHOD_WORST], parts, n, 0, &w->options, err);
    if (status == KVB_OK) status = pair_sums_tail(w->tables[METHOD_CVAR], parts, n, CVAR_SHARE, &w->options, err);
    return status;
}

// The training parts of a fold: every text but `held`, of `from`; subset: chosen [m] of these, or NULL for all.
static uint32_t choose_parts(const holdout *h, const pair_sums *from, uint32_t held, const uint32_t *chosen, uint32_t m,
                             const pair_sums **parts)
{
    uint32_t n = 0, others = 0;
    for (uint32_t t = 0; t < h->n_texts; t++) {
        if (t == held) continue;
        bool in = !chosen;
        for (uint32_t i = 0; i < m && chosen; i++) in |= chosen[i] == others;
        others++;
        if (in && from[t].mean.count) parts[n++] = &from[t];
    }
    return n;
}

static kvb_status fit_entries(holdout *h, const pair_sums **parts, uint32_t held, kvb_error *err)
{
    holdout_work *w = h->work;
    kvb_status status = KVB_OK;
    uint32_t *chosen = need(h->n_texts, sizeof *chosen, "texts");
    for (size_t e = 0; e < w->n_entries && status == KVB_OK; e++) {
        holdout_entry *one = &w->entries[e];
        uint32_t n;
        if (one->curve == &h->questions) {
            n = choose_parts(h, w->levels[one->level], held, NULL, 0, parts);
        } else {
            // Entries of one level are draws of its subsets, the two methods of a draw side by side.
            uint32_t m = one->curve->level[one->level];
            draw_subset(chosen, m, h->n_texts - 1, h->seed, (uint64_t)(e / 2) << 32 | held);
            n = choose_parts(h, w->texts, held, chosen, m, parts);
        }
        status = fit_either(&w->options, one->method, one->table, parts, n, err);
    }
    free(chosen);
    return status;
}

kvb_status holdout_fit_fold(holdout *h, problem *p, uint32_t text, kvb_error *err)
{
    holdout_work *w = h->work;
    if (!h->by_question && w->fitted == text) return KVB_OK;
    const pair_sums **parts = need(h->n_texts, sizeof *parts, "texts");
    uint32_t n = choose_parts(h, w->texts, text, NULL, 0, parts);
    kvb_status status = KVB_OK;
    if (h->by_question) {
        status = problem_solve(p, err);
        if (status == KVB_OK) status = pair_sums_without(&w->rest, &w->texts[text], p, err);
        if (w->rest.mean.count) parts[n++] = &w->rest;
    }
    if (status == KVB_OK) status = fit_methods(h, parts, n, err);
    if (status == KVB_OK && !h->by_question) status = fit_entries(h, parts, text, err);
    w->fitted = text;
    free(parts);
    return status;
}

kvb_status holdout_fit_own(holdout *h, kvb_error *err)
{
    holdout_work *w = h->work;
    kvb_status status = KVB_OK;
    for (uint32_t t = 0; t < h->n_texts && h->transfer && status == KVB_OK; t++) {
        const pair_sums *part = &w->texts[t];
        status = fit_either(&w->options, 1, w->own + t * holdout_cells(h), &part, 1, err);
    }
    return status;
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

// Room for the sums of every text.
static kvb_status init_sums(const holdout *h, pair_sums **out, kvb_error *err)
{
    kvb_status status = KVB_OK;
    *out = need(h->n_texts, sizeof **out, "texts");
    for (uint32_t t = 0; t < h->n_texts && status == KVB_OK; t++)
        status = pair_sums_init(&(*out)[t], &h->pairs.longest, STUDY_GRID, h->n_rows, err);
    return status;
}

// 1, 2, 4, ... and `most`.
static void set_levels(learning_curve *c, uint32_t most)
{
    for (uint32_t k = 1; c->n_levels < LEVELS_MAX - 1 && k < most; k *= 2) c->level[c->n_levels++] = k;
    if (most) c->level[c->n_levels++] = most;
}

static void add_entries(holdout *h, learning_curve *curve, uint32_t level, uint32_t draws)
{
    holdout_work *w = h->work;
    for (uint32_t d = 0; d < draws; d++)
        for (uint32_t m = 0; m < 2; m++)
            w->entries[w->n_entries++] =
                (holdout_entry){curve, level, m, 1.0 / draws, need(holdout_cells(h), sizeof(double), "ratios")};
}

// Learning curves and transfer, where they fit: sums for every level and text.
static kvb_status prepare_curves(holdout *h, kvb_error *err)
{
    holdout_work *w = h->work;
    uint32_t most = 0;
    for (uint32_t t = 0; t < h->n_texts; t++)
        most = most > h->first[t + 1] - h->first[t] ? most : h->first[t + 1] - h->first[t];
    if (h->by_question || h->n_texts > TRANSFER_MAX) return KVB_OK;
    set_levels(&h->questions, most);
    set_levels(&h->texts, h->n_texts - 1);
    kvb_status status = KVB_OK;
    w->entries = need((size_t)LEVELS_MAX * 2 * (1 + DRAWS_MAX), sizeof *w->entries, "tables of learning curves");
    h->transfer = need((size_t)h->n_rows * h->n_texts * h->n_texts, sizeof *h->transfer, "losses");
    w->own = need(h->n_texts * holdout_cells(h), sizeof *w->own, "ratios");
    for (uint32_t l = 0; l < h->questions.n_levels && status == KVB_OK; l++) {
        status = init_sums(h, &w->levels[l], err);
        add_entries(h, &h->questions, l, 1);
    }
    for (uint32_t l = 0; l < h->texts.n_levels; l++)
        add_entries(h, &h->texts, l, h->texts.level[l] == h->n_texts - 1 ? 1 : DRAWS_MAX);
    return status;
}

kvb_status holdout_work_init(holdout *h, kvb_error *err)
{
    size_t cells = holdout_cells(h), heads = shape_heads(&h->pairs.longest);
    holdout_work *w = h->work = need(1, sizeof *w, "held-out studies");
    w->keep = need(heads, sizeof *w->keep, "heads");
    for (int m = 0; m < N_METHODS; m++) w->tables[m] = need(cells, sizeof *w->tables[m], "ratios");
    w->options = (solve_options){h->options.hull, h->options.scope, h->ratios, h->n_rows, h->options.limits};
    w->fitted = h->n_texts;
    for (size_t i = 0; i < cells; i++) w->tables[METHOD_UNIFORM][i] = h->ratios[i / heads];
    kvb_status status = init_sums(h, &w->texts, err);
    if (status == KVB_OK && h->by_question)
        status = pair_sums_init(&w->rest, &h->pairs.longest, STUDY_GRID, h->n_rows, err);
    return status == KVB_OK ? prepare_curves(h, err) : status;
}

void holdout_work_free(holdout *h)
{
    holdout_work *w = h->work;
    if (!w) return;
    for (uint32_t t = 0; t < h->n_texts; t++) {
        if (w->texts) pair_sums_free(&w->texts[t]);
        for (int l = 0; l < LEVELS_MAX; l++)
            if (w->levels[l]) pair_sums_free(&w->levels[l][t]);
    }
    for (int l = 0; l < LEVELS_MAX; l++) free(w->levels[l]);
    for (int m = 0; m < N_METHODS; m++) free(w->tables[m]);
    for (size_t e = 0; e < w->n_entries; e++) free(w->entries[e].table);
    pair_sums_free(&w->rest);
    free(w->texts);
    free(w->entries);
    free(w->own);
    free(w->keep);
    free(w);
    h->work = NULL;
}
