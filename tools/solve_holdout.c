// Leave-one-out losses: two walks over the pairs. The first sums up what each text's tables are made from; the second
// judges, on every pair, tables that have not seen its text (or, by question, not the pair itself).
#include "tools/solve_holdout.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

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
static const double CVAR_SHARE = 0.5;               // half of the texts: of few texts 0.2 would be the worst one

// Subsets of texts that a point of the learning curve averages over, at most.
enum { DRAWS_MAX = 6 };

// A table of one point of a curve, made for the text that is held out.
typedef struct entry {
    learning_curve *curve;
    uint32_t level, method;
    double weight; // 1 / tables at this point
    double *table; // [R, N]
} entry;

typedef struct study {
    holdout h; // first: actions get its address
    solve_options options;
    uint64_t seed;
    cache_shape longest;
    study_part *texts;              // [n_texts]
    study_part *levels[LEVELS_MAX]; // [n_texts] the questions of each text that a level of the curve leaves in
    study_part rest;                // by question: the pair's text without it
    double *tables[N_METHODS];      // [R, N] made without the text, or the pair, that is held out
    double *own;                    // [n_texts, R, N] tables of single texts, for the transfer matrix
    entry *entries;                 // of the learning curves
    size_t n_entries;
    uint32_t fitted; // text that tables and entries are made for; n_texts: none
    uint32_t pair;   // that the walk is at
    uint32_t *keep;  // [N] scratch
} study;

static size_t table_cells(const study *x)
{
    return (size_t)x->h.n_rows * shape_heads(&x->longest);
}

static uint32_t text_at(const study *x)
{
    uint32_t t = 0;
    while (x->h.selected[t] != x->h.job.context) t++;
    return t;
}

// ---- First walk -----------------------------------------------------------------------------------------------------

static kvb_status collect_pair(solve_command *s, metric_job *job, problem *p, kvb_error *err)
{
    study *x = (study *)job;
    uint32_t t = text_at(x), n = x->h.first[t + 1] - x->h.first[t], index = x->pair - x->h.first[t];
    (void)s;
    kvb_status status = problem_solve(p, err);
    if (status == KVB_OK) status = study_part_add(&x->texts[t], p, err);
    for (uint32_t r = 0; r < x->h.n_rows && status == KVB_OK; r++)
        x->h.loss[((size_t)r * N_METHODS + METHOD_OPTIMUM) * x->h.n_pairs + x->pair] = p->loss[r];
    for (uint32_t l = 0; l < x->h.questions.n_levels && status == KVB_OK; l++) {
        uint32_t *chosen = malloc(n * sizeof *chosen), k = x->h.questions.level[l] < n ? x->h.questions.level[l] : n;
        if (!chosen) return kvb_fail(err, KVB_MEMORY, "no memory for %u questions", n);
        status = draw_subset(chosen, k, n, s->seed, (uint64_t)t * LEVELS_MAX + l, err);
        bool in = false;
        for (uint32_t i = 0; i < k && status == KVB_OK; i++) in |= chosen[i] == index;
        free(chosen);
        if (status == KVB_OK && in) status = study_part_add(&x->levels[l][t], p, err);
    }
    x->pair++;
    return status;
}

// ---- Tables ---------------------------------------------------------------------------------------------------------

// The two tables that learning curves and transfer compare.
static kvb_status fit_either(const study *x, uint32_t method, double *table, const study_part *const *parts, uint32_t n,
                             kvb_error *err)
{
    return method == 0 ? study_mean_ratio(table, parts, n, err)
                       : study_mean_loss(table, parts, n, DEFAULT_SHRINK, &x->options, err);
}

static kvb_status fit_methods(study *x, const study_part *const *parts, uint32_t n, kvb_error *err)
{
    kvb_status status = study_mean_ratio(x->tables[METHOD_PAPER], parts, n, err);
    for (uint32_t i = 0; i < sizeof SHRINKS / sizeof *SHRINKS && status == KVB_OK; i++)
        status = study_mean_loss(x->tables[METHOD_MEAN_LOSS + i], parts, n, SHRINKS[i], &x->options, err);
    if (status == KVB_OK) status = study_tail(x->tables[METHOD_WORST], parts, n, 0, &x->options, err);
    if (status == KVB_OK) status = study_tail(x->tables[METHOD_CVAR], parts, n, CVAR_SHARE, &x->options, err);
    return status;
}

// The training parts of a fold: every text but `held`, of `from`; subset: chosen [m] of these, or NULL for all.
static uint32_t choose_parts(const study *x, const study_part *from, uint32_t held, const uint32_t *chosen, uint32_t m,
                             const study_part **parts)
{
    uint32_t n = 0, others = 0;
    for (uint32_t t = 0; t < x->h.n_texts; t++) {
        if (t == held) continue;
        bool in = !chosen;
        for (uint32_t i = 0; i < m && chosen; i++) in |= chosen[i] == others;
        others++;
        if (in && from[t].mean.count) parts[n++] = &from[t];
    }
    return n;
}

static kvb_status fit_entries(study *x, const study_part **parts, uint32_t held, kvb_error *err)
{
    kvb_status status = KVB_OK;
    uint32_t *chosen = malloc(x->h.n_texts * sizeof *chosen);
    if (!chosen) return kvb_fail(err, KVB_MEMORY, "no memory for %u texts", x->h.n_texts);
    for (size_t e = 0; e < x->n_entries && status == KVB_OK; e++) {
        entry *one = &x->entries[e];
        uint32_t n;
        if (one->curve == &x->h.questions) {
            n = choose_parts(x, x->levels[one->level], held, NULL, 0, parts);
        } else {
            // Entries of one level are draws of its subsets, the two methods of a draw side by side.
            uint32_t m = one->curve->level[one->level];
            status = draw_subset(chosen, m, x->h.n_texts - 1, x->seed, (uint64_t)(e / 2) << 32 | held, err);
            n = choose_parts(x, x->texts, held, chosen, m, parts);
        }
        if (status == KVB_OK) status = fit_either(x, one->method, one->table, parts, n, err);
    }
    free(chosen);
    return status;
}

// Makes the tables for the pair at hand where those of the pair before do not serve.
static kvb_status fit_fold(study *x, problem *p, uint32_t text, kvb_error *err)
{
    if (!x->h.by_question && x->fitted == text) return KVB_OK;
    const study_part **parts = calloc(x->h.n_texts, sizeof *parts);
    if (!parts) return kvb_fail(err, KVB_MEMORY, "no memory for %u texts", x->h.n_texts);
    uint32_t n = choose_parts(x, x->texts, text, NULL, 0, parts);
    kvb_status status = KVB_OK;
    if (x->h.by_question) {
        status = problem_solve(p, err);
        if (status == KVB_OK) status = study_part_without(&x->rest, &x->texts[text], p, err);
        if (x->rest.mean.count) parts[n++] = &x->rest;
    }
    if (status == KVB_OK) status = fit_methods(x, parts, n, err);
    if (status == KVB_OK && !x->h.by_question) status = fit_entries(x, parts, text, err);
    x->fitted = text;
    free(parts);
    return status;
}

// ---- Second walk ----------------------------------------------------------------------------------------------------

static kvb_status judge_pair(solve_command *s, metric_job *job, problem *p, kvb_error *err)
{
    study *x = (study *)job;
    holdout *h = &x->h;
    uint32_t text = text_at(x), n_rows = h->n_rows;
    size_t cells = table_cells(x);
    (void)s;
    kvb_status status = fit_fold(x, p, text, err);
    if (status != KVB_OK) return status;
    for (uint32_t m = 0; m < METHOD_OPTIMUM; m++) {
        double loss[ROWS] = {0};
        table_loss_add(loss, &p->curves, n_rows, x->tables[m], x->keep);
        for (uint32_t r = 0; r < n_rows; r++) h->loss[((size_t)r * N_METHODS + m) * h->n_pairs + x->pair] = loss[r];
    }
    for (size_t e = 0; e < x->n_entries; e++) {
        double loss[ROWS] = {0};
        entry *one = &x->entries[e];
        table_loss_add(loss, &p->curves, n_rows, one->table, x->keep);
        for (uint32_t r = 0; r < n_rows; r++)
            one->curve->loss[one->level][one->method][r] += loss[r] * one->weight / h->n_pairs;
    }
    for (uint32_t t = 0; t < h->n_texts && h->transfer; t++) {
        double loss[ROWS] = {0};
        uint32_t questions = h->first[text + 1] - h->first[text];
        table_loss_add(loss, &p->curves, n_rows, x->own + t * cells, x->keep);
        for (uint32_t r = 0; r < n_rows; r++)
            h->transfer[((size_t)r * h->n_texts + t) * h->n_texts + text] += loss[r] / questions;
    }
    x->pair++;
    return KVB_OK;
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

// Texts with selected questions, and where their pairs begin.
static kvb_status count_texts(const solve_command *s, holdout *h, kvb_error *err)
{
    h->first = calloc(s->n_selected + 1, sizeof *h->first);
    h->selected = calloc(s->n_selected + 1, sizeof *h->selected);
    if (!h->first || !h->selected) return kvb_fail(err, KVB_MEMORY, "no memory for %zu contexts", s->n_selected);
    for (size_t k = 0; k < s->n_selected; k++) {
        const record_context_info *c = record_context(s->r, s->selected[k]);
        uint32_t n = 0;
        for (uint32_t q = 0; q < c->n_questions; q++) n += is_selected(s, &c->questions[q], q);
        if (n == 0) continue;
        h->selected[h->n_texts++] = k;
        h->n_pairs += n;
        h->first[h->n_texts] = h->n_pairs;
    }
    if ((h->by_question ? h->n_pairs : h->n_texts) < 2)
        return kvb_fail(err, KVB_ARGUMENT,
                        "--holdout %s: expected at least 2 %s in %s, found 1; nothing can be held out", s->holdout_name,
                        h->by_question ? "questions" : "texts with questions", s->path);
    return KVB_OK;
}

// 1, 2, 4, ... and `most`.
static void set_levels(learning_curve *c, uint32_t most)
{
    for (uint32_t k = 1; c->n_levels < LEVELS_MAX - 1 && k < most; k *= 2) c->level[c->n_levels++] = k;
    if (most) c->level[c->n_levels++] = most;
}

static kvb_status add_entries(study *x, learning_curve *curve, uint32_t level, uint32_t draws, kvb_error *err)
{
    for (uint32_t d = 0; d < draws; d++)
        for (uint32_t m = 0; m < 2; m++) {
            entry *e = &x->entries[x->n_entries];
            *e = (entry){curve, level, m, 1.0 / draws, malloc(table_cells(x) * sizeof *e->table)};
            if (!e->table) return kvb_fail(err, KVB_MEMORY, "no memory for a learning curve");
            x->n_entries++;
        }
    return KVB_OK;
}

// Learning curves and transfer, where they fit: sums for every level and text.
static kvb_status prepare_curves(study *x, kvb_error *err)
{
    holdout *h = &x->h;
    uint32_t most = 0;
    for (uint32_t t = 0; t < h->n_texts; t++)
        most = most > h->first[t + 1] - h->first[t] ? most : h->first[t + 1] - h->first[t];
    if (h->by_question || h->n_texts > TRANSFER_MAX) return KVB_OK;
    set_levels(&h->questions, most);
    set_levels(&h->texts, h->n_texts - 1);
    kvb_status status = KVB_OK;
    x->entries = calloc((size_t)LEVELS_MAX * 2 * (1 + DRAWS_MAX), sizeof *x->entries);
    h->transfer = calloc((size_t)h->n_rows * h->n_texts * h->n_texts, sizeof *h->transfer);
    x->own = malloc(h->n_texts * table_cells(x) * sizeof *x->own);
    if (!x->entries || !h->transfer || !x->own) return kvb_fail(err, KVB_MEMORY, "no memory for %u texts", h->n_texts);
    for (uint32_t l = 0; l < h->questions.n_levels && status == KVB_OK; l++) {
        x->levels[l] = calloc(h->n_texts, sizeof *x->levels[l]);
        if (!x->levels[l]) return kvb_fail(err, KVB_MEMORY, "no memory for %u texts", h->n_texts);
        for (uint32_t t = 0; t < h->n_texts && status == KVB_OK; t++)
            status = study_part_init(&x->levels[l][t], &x->longest, STUDY_GRID, h->n_rows, err);
        if (status == KVB_OK) status = add_entries(x, &h->questions, l, 1, err);
    }
    for (uint32_t l = 0; l < h->texts.n_levels && status == KVB_OK; l++)
        status = add_entries(x, &h->texts, l, h->texts.level[l] == h->n_texts - 1 ? 1 : DRAWS_MAX, err);
    return status;
}

static kvb_status study_begin(solve_command *s, study *x, kvb_error *err)
{
    holdout *h = &x->h;
    // By question tables are made for every pair, so fewer rows must do.
    for (uint32_t i = h->by_question ? 5 : 1; i <= ROWS; i += h->by_question ? 5 : 1)
        h->ratios[h->n_rows++] = i / 100.0;
    s->options.ratios = h->ratios;
    s->options.n_rows = h->n_rows;
    x->options = s->options;
    x->seed = s->seed;
    kvb_status status = prepare_pairs(s, &h->job, &x->longest, err);
    if (status == KVB_OK) status = count_texts(s, h, err);
    if (status != KVB_OK) return status;
    h->job.n_visits = 2;
    x->fitted = h->n_texts;
    size_t cells = table_cells(x);
    h->loss = calloc((size_t)h->n_rows * N_METHODS * h->n_pairs, sizeof *h->loss);
    x->keep = malloc(shape_heads(&x->longest) * sizeof *x->keep);
    x->texts = calloc(h->n_texts, sizeof *x->texts);
    bool ok = h->loss && x->keep && x->texts;
    for (int m = 0; m < N_METHODS; m++) ok = (x->tables[m] = malloc(cells * sizeof *x->tables[m])) && ok;
    if (!ok) return kvb_fail(err, KVB_MEMORY, "no memory for %u pairs", h->n_pairs);
    for (size_t i = 0; i < cells; i++) x->tables[METHOD_UNIFORM][i] = h->ratios[i / shape_heads(&x->longest)];
    for (uint32_t t = 0; t < h->n_texts && status == KVB_OK; t++)
        status = study_part_init(&x->texts[t], &x->longest, STUDY_GRID, h->n_rows, err);
    if (status == KVB_OK && h->by_question) status = study_part_init(&x->rest, &x->longest, STUDY_GRID, h->n_rows, err);
    return status == KVB_OK ? prepare_curves(x, err) : status;
}

static void study_free(study *x)
{
    for (uint32_t t = 0; t < x->h.n_texts; t++) {
        if (x->texts) study_part_free(&x->texts[t]);
        for (int l = 0; l < LEVELS_MAX; l++)
            if (x->levels[l]) study_part_free(&x->levels[l][t]);
    }
    for (int l = 0; l < LEVELS_MAX; l++) free(x->levels[l]);
    for (int m = 0; m < N_METHODS; m++) free(x->tables[m]);
    for (size_t e = 0; e < x->n_entries; e++) free(x->entries[e].table);
    study_part_free(&x->rest);
    free(x->texts);
    free(x->entries);
    free(x->own);
    free(x->keep);
    free(x->h.first);
    free(x->h.selected);
    free(x->h.loss);
    free(x->h.transfer);
    release_pairs(&x->h.job);
    free(x);
}

// ---- The whole ------------------------------------------------------------------------------------------------------

static kvb_status run_walks(solve_command *s, study *x, kvb_error *err)
{
    uint32_t done = 0;
    holdout *h = &x->h;
    kvb_status status = walk_pairs(s, &h->job, collect_pair, &done, err);
    for (uint32_t t = 0; t < h->n_texts && h->transfer && status == KVB_OK; t++) {
        const study_part *part = &x->texts[t];
        status = fit_either(x, 1, x->own + t * table_cells(x), &part, 1, err);
    }
    x->pair = 0;
    if (status == KVB_OK) status = walk_pairs(s, &h->job, judge_pair, &done, err);
    for (uint32_t r = 0; r < h->n_rows && status == KVB_OK; r++) {
        loss_sample sample = {N_METHODS, h->n_pairs, h->n_texts, h->loss + (size_t)r * N_METHODS * h->n_pairs,
                              h->first};
        status = bootstrap_losses(&sample, METHOD_PAPER, s->seed, h->mean[r], h->ratio[r], err);
    }
    return status;
}

kvb_status solve_holdout(solve_command *s, const char *metric, cJSON *list, kvb_error *err)
{
    study *x = calloc(1, sizeof *x);
    if (!x) return kvb_fail(err, KVB_MEMORY, "no memory for metric %s", metric);
    x->h.job.metric = metric;
    x->h.by_question = strcmp(s->holdout_name, "question") == 0;
    // The pairs' own problems are solved as the paper does; the tables pull their curves together themselves.
    aggregation aggregate = s->aggregate;
    bool mean_loss = s->mean_loss;
    s->aggregate = AGGREGATE_MEAN_RATIO;
    s->mean_loss = false;
    kvb_status status = study_begin(s, x, err);
    if (status == KVB_OK && metric == s->metrics[0]) warn_of_pairs(&x->h.job);
    if (status == KVB_OK) {
        progress_begin(&s->bar, metric, s->quiet);
        status = run_walks(s, x, err);
        progress_end(&s->bar, "%s", status == KVB_OK ? "held out and judged" : "stopped");
    }
    if (status == KVB_OK) status = show_holdout(s, &x->h, list, err);
    s->aggregate = aggregate;
    s->mean_loss = mean_loss;
    study_free(x);
    return status;
}
