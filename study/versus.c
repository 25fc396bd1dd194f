#include "study/versus.h"
#include "formats/need.h"
#include "study/pair_sums.h"
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

// The sums of each text of the selection, [n], from which tables without a text are made.
typedef struct text_sums {
    pair_sums *of;
    size_t n;
} text_sums;

static void open_sums(text_sums *s, const pair_set *pairs)
{
    s->n = pairs->from->n_contexts;
    s->of = need(s->n, sizeof *s->of, "texts");
    for (size_t k = 0; k < s->n; k++) pair_sums_init(&s->of[k], &pairs->longest, STUDY_GRID, ROWS);
}

static void close_sums(text_sums *s)
{
    for (size_t k = 0; k < s->n; k++) pair_sums_free(&s->of[k]);
    free(s->of);
}

// Sums up all pairs, text by text, under the loss of `pairs`.
static kvb_status read_sums(text_sums *s, const pair_set *pairs, const study_options *o, study_progress *progress,
                            kvb_error *err)
{
    open_sums(s, pairs);
    pair_walk w = pair_walk_open(pairs, study_solve_options(o), o->min_keep, progress);
    while (pair_walk_next(&w, err)) {
        w.status = problem_solve(&w.problem, err);
        if (w.status == KVB_OK) w.status = pair_sums_add(&s->of[w.context], &w.problem, err);
    }
    return pair_walk_close(&w);
}

// Lists the texts that have pairs, all but `without`. Returns how many.
static uint32_t others_of(const pair_sums **out, const text_sums *s, size_t without)
{
    uint32_t n = 0;
    for (size_t k = 0; k < s->n; k++)
        if (k != without && s->of[k].mean.count) out[n++] = &s->of[k];
    return n;
}

typedef struct judging {
    versus *v;
    study_table *t;
    text_sums own, published;
    const pair_sums **others;
    double *tables[N_RIVALS]; // [ROWS, N], made without `text`
    size_t text;
} judging;

static kvb_status make_tables(judging *j, size_t text, kvb_error *err)
{
    solve_options solve = study_solve_options(&j->t->options);
    uint32_t n = others_of(j->others, &j->own, text);
    kvb_status status = pair_sums_mean_loss(j->tables[RIVAL_NONE], j->others, n, j->t->options.shrink, &solve, err);
    n = others_of(j->others, &j->published, text);
    if (status == KVB_OK) status = pair_sums_mean_ratio(j->tables[RIVAL_PUBLISHED], j->others, n, err);
    j->text = text;
    return status;
}

static kvb_status judge(judging *j, study_progress *progress, kvb_error *err)
{
    study_table *t = j->t;
    j->text = SIZE_MAX;
    pair_walk w = pair_walk_open(&t->pairs, study_solve_options(&t->options), t->options.min_keep, progress);
    while (pair_walk_next(&w, err)) {
        if (w.context != j->text) w.status = make_tables(j, w.context, err);
        for (int r = 0; r < N_RIVALS && w.status == KVB_OK; r++)
            w.status = judge_table(j->v->loss[r], &w.problem.curves, NULL, ROWS, j->tables[r], err);
    }
    for (int r = 0; r < N_RIVALS; r++)
        for (int i = 0; i < ROWS; i++) j->v->loss[r][i] /= t->pairs.n_pairs;
    return pair_walk_close(&w);
}

// Tells whether a row prunes what its ratio says, to half a token over all heads. Published budgets do not if the floor
// of a short context stops them: they would win by what they keep beyond the budget.
static bool keeps_the_budget(const study_table *t, const double *table, int r)
{
    double mean = 0;
    for (size_t h = 0; h < t->n_heads; h++) mean += table[(size_t)r * t->n_heads + h] / t->n_heads;
    return fabs(mean - t->options.ratios[r]) <= 0.5 / ((double)t->n_heads * t->pairs.longest.n_tokens) + 1e-12;
}

// Puts the rows of rivals that are better, made from all texts, into the table.
static kvb_status put_rows(judging *j, kvb_error *err)
{
    study_table *t = j->t;
    uint32_t n = others_of(j->others, &j->published, SIZE_MAX);
    kvb_status status = pair_sums_mean_ratio(j->tables[RIVAL_PUBLISHED], j->others, n, err);
    for (int r = 0; r < ROWS && status == KVB_OK; r++) {
        rival *best = &j->v->best[r];
        for (rival k = RIVAL_UNIFORM; k < N_RIVALS; k++)
            if (j->v->loss[k][r] < j->v->loss[*best][r] && !t->saturated[r] && keeps_the_budget(t, j->tables[k], r))
                *best = k;
        if (*best != RIVAL_NONE)
            memcpy(t->prune_ratio + (size_t)r * t->n_heads, j->tables[*best] + (size_t)r * t->n_heads,
                   t->n_heads * sizeof *t->prune_ratio);
    }
    return status;
}

kvb_status versus_choose(versus *v, study_table *t, study_progress *progress, kvb_error *err)
{
    *v = (versus){.compared = t->pairs.n_contexts > 1};
    if (!v->compared) return KVB_OK;
    judging j = {.v = v, .t = t};
    size_t cells = (size_t)ROWS * t->n_heads;
    pair_set importance = {0};
    study_options o = t->options;
    o.loss = LOSS_IMPORTANCE;
    o.aggregate = AGGREGATE_MEAN_RATIO;
    o.shrink = 0;
    j.others = need(t->pairs.from->n_contexts, sizeof *j.others, "texts");
    for (int r = 0; r < N_RIVALS; r++) j.tables[r] = need(cells, sizeof(double), "tables");
    for (size_t i = 0; i < cells; i++) j.tables[RIVAL_UNIFORM][i] = t->options.ratios[i / t->n_heads];
    study_progress_begin(progress, 4.0 * t->pairs.n_pairs);
    kvb_status status = pairs_open(&importance, t->pairs.from, t->pairs.metric, &o, err);
    if (status == KVB_OK) status = read_sums(&j.own, &t->pairs, &t->options, progress, err);
    if (status == KVB_OK) status = read_sums(&j.published, &importance, &o, progress, err);
    if (status == KVB_OK) status = judge(&j, progress, err);
    if (status == KVB_OK) status = put_rows(&j, err);
    if (status == KVB_OK) status = study_table_judge(t, progress, err);
    for (int r = 0; r < ROWS && status == KVB_OK; r++)
        if (v->best[r] != RIVAL_NONE) { // a loss below the bound, by rounding, is a bound too
            t->loss[r] = t->table_loss[r];
            t->bound[r] = fmin(t->bound[r], t->loss[r]);
            t->table_bound[r] = fmin(t->table_bound[r], t->loss[r]);
        }
    close_sums(&j.own);
    close_sums(&j.published);
    pairs_close(&importance);
    for (int r = 0; r < N_RIVALS; r++) free(j.tables[r]);
    free(j.others);
    return status;
}
