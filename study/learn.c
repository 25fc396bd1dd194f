#include "study/learn.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "study/learn_parts.h"
#include "study/learned_scores.h"
#include "study/record_metric.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double EXPONENTS[] = {0, 0.25, 0.5};
static const double LAMBDAS[] = {1e-4, 1e-3, 1e-2, 1e-1};
enum { N_EXPONENTS = sizeof EXPONENTS / sizeof *EXPONENTS, N_LAMBDAS = sizeof LAMBDAS / sizeof *LAMBDAS };
#define FIRST_LAMBDA 1e-3 // while sets of metrics are compared
#define FIRST_EXPONENT 0.25

// Everything that a fit works with.
typedef struct fit {
    learned *l;
    learn_text text;
    learn_systems systems[N_EXPONENTS];
    uint32_t n_systems;
    study_progress *progress;
} fit;

// ---- Trials ---------------------------------------------------------------------------------------------------------

static const learn_systems *systems_of(const fit *f, double exponent)
{
    for (uint32_t i = 0; i < f->n_systems; i++)
        if (f->systems[i].exponent == exponent) return &f->systems[i];
    return &f->systems[0];
}

static void add_trial(learned *l, uint32_t set, bool plain, double lambda, double exponent)
{
    learn_trial *t = &l->trials[l->n_trials++];
    *t = (learn_trial){.set = set, .plain = plain, .lambda = lambda, .exponent = exponent};
    for (uint32_t i = 0; i < l->from->n_metrics; i++)
        if (set >> i & 1) t->cost += l->cost[i];
}

// Trials from `first` on, text by text: each text is read once for all of them.
static kvb_status run_trials(fit *f, uint32_t first, kvb_error *err)
{
    learned *l = f->l;
    kvb_status status = KVB_OK;
    for (size_t k = 0; k < l->from->n_contexts && status == KVB_OK; k++) {
        status = learn_text_read(&f->text, l, k, err);
        for (uint32_t i = first; i < l->n_trials && status == KVB_OK; i++) {
            learn_trial *t = &l->trials[i];
            status = learn_try(t, systems_of(f, t->exponent), &f->text, l->fold[k], err);
            if (status == KVB_OK && !study_progress_step(f->progress))
                return kvb_fail(err, KVB_INTERRUPTED, "stopped; nothing was written");
        }
    }
    for (uint32_t i = first; i < l->n_trials; i++) {
        learn_trial *t = &l->trials[i];
        double product = 1;
        for (int r = 0; r < LEARN_RATIOS; r++) product *= t->loss[r] /= (double)l->from->n_contexts;
        t->score = cbrt(product);
    }
    return status;
}

// The one with the least score among trials from `first` on; with slack, the cheapest within that of it (of equally
// cheap ones the better).
static uint32_t pick(const learned *l, uint32_t first, double slack)
{
    uint32_t best = first;
    for (uint32_t i = first; i < l->n_trials; i++)
        if (l->trials[i].score < l->trials[best].score) best = i;
    uint32_t chosen = best;
    for (uint32_t i = first; i < l->n_trials; i++) {
        const learn_trial *t = &l->trials[i], *c = &l->trials[chosen];
        if (t->score > l->trials[best].score * (1 + slack)) continue;
        if (t->cost < c->cost || (t->cost == c->cost && t->score < c->score)) chosen = i;
    }
    return chosen;
}

// ---- Steps ----------------------------------------------------------------------------------------------------------

static kvb_status gather(fit *f, kvb_error *err)
{
    learned *l = f->l;
    double own = l->options.exponent;
    kvb_status status = KVB_OK;
    for (; f->n_systems < (isnan(own) ? N_EXPONENTS : 1); f->n_systems++)
        f->systems[f->n_systems] = learn_systems_init(l, isnan(own) ? EXPONENTS[f->n_systems] : own);
    for (size_t k = 0; k < l->from->n_contexts && status == KVB_OK; k++) {
        status = learn_text_read(&f->text, l, k, err);
        for (uint32_t i = 0; i < f->n_systems && status == KVB_OK; i++)
            learn_systems_add(&f->systems[i], l, &f->text, l->fold[k]);
        if (status == KVB_OK && !study_progress_step(f->progress))
            return kvb_fail(err, KVB_INTERRUPTED, "stopped; nothing was written");
    }
    return status;
}

// Every plain metric, to compare with; then every set of metrics, or the whole one.
static kvb_status search_sets(fit *f, uint32_t *set, kvb_error *err)
{
    learned *l = f->l;
    uint32_t F = (uint32_t)l->from->n_metrics, all = (uint32_t)((1ull << F) - 1);
    double lambda = isnan(l->options.lambda) ? FIRST_LAMBDA : l->options.lambda,
           exponent = isnan(l->options.exponent) ? FIRST_EXPONENT : l->options.exponent;
    for (uint32_t i = 0; i < F; i++) add_trial(l, 1u << i, true, 0, 0);
    uint32_t first = l->n_trials;
    for (uint32_t s = l->options.all_features ? all : 1; s <= all; s++) add_trial(l, s, false, lambda, exponent);
    kvb_status status = run_trials(f, 0, err);
    if (status != KVB_OK) return status;
    l->best = pick(l, first, 0);
    l->chosen = pick(l, first, l->options.slack);
    *set = l->trials[l->chosen].set;
    return KVB_OK;
}

// lambda and exponent for the chosen set, where they are not given.
static kvb_status search_settings(fit *f, uint32_t set, kvb_error *err)
{
    learned *l = f->l;
    const learn_options *o = &l->options;
    uint32_t first = l->n_trials;
    for (uint32_t e = 0; e < f->n_systems; e++)
        for (int i = 0; i < N_LAMBDAS && (i == 0 || isnan(o->lambda)); i++)
            add_trial(l, set, false, isnan(o->lambda) ? LAMBDAS[i] : o->lambda, f->systems[e].exponent);
    kvb_status status = run_trials(f, first, err);
    if (status == KVB_OK) l->chosen = pick(l, first, 0);
    return status;
}

// Weights from all texts, then without each fold.
static kvb_status fit_weights(fit *f, kvb_error *err)
{
    learned *l = f->l;
    const learn_trial *t = &l->trials[l->chosen];
    const learn_systems *s = systems_of(f, t->exponent);
    for (uint32_t i = 0; i < l->from->n_metrics; i++)
        if (t->set >> i & 1) l->feature[l->n_features++] = i;
    size_t numbers = (size_t)s->n_heads * learn_columns(l->n_features, s->layer_mean);
    l->weights = need((1 + l->n_folds) * numbers, sizeof *l->weights, "weights");
    kvb_status status = learn_systems_solve(s, t->set, t->lambda, UINT32_MAX, l->weights, err);
    for (uint32_t fold = 0; fold < l->n_folds && status == KVB_OK; fold++)
        status = learn_systems_solve(s, t->set, t->lambda, fold, l->weights + (1 + fold) * numbers, err);
    l->options.lambda = t->lambda;
    l->options.exponent = t->exponent;
    return status;
}

static kvb_status check_request(const learned *l, kvb_error *err)
{
    size_t most = l->options.all_features ? KVB_RANK_FEATURES_MAX : LEARN_SEARCH_MAX;
    if (l->from->n_metrics > most)
        return kvb_fail(err, KVB_ARGUMENT,
                        "%zu metrics: sets of at most %zu can be searched; name fewer with --feature",
                        l->from->n_metrics, most);
    for (size_t i = 0; i < l->from->n_metrics; i++)
        if (selection_ranking(l->from, l->from->metrics[i]))
            return kvb_fail(err, KVB_ARGUMENT, "%s: a ranking cannot be a feature of another", l->from->metrics[i]);
    return KVB_OK;
}

// What an engine pays for each metric, as the record says.
static kvb_status read_costs(learned *l, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < l->from->n_metrics && status == KVB_OK; i++) {
        record_metric about;
        status = record_metric_read(&about, l->from->r, l->from->metrics[i], err);
        l->cost[i] = about.cost;
        record_metric_free(&about);
    }
    return status;
}

// Contexts of the same tokens, with other questions, are one text and left out together.
static kvb_status deal_folds(learned *l, kvb_error *err)
{
    size_t n = l->from->n_contexts;
    uint32_t n_texts = 0;
    kvb_status status = KVB_OK;
    l->contexts = need(n, sizeof *l->contexts, "contexts");
    l->fold = need(n, sizeof *l->fold, "contexts");
    for (size_t k = 0; k < n && status == KVB_OK; k++) {
        size_t same = 0;
        status = context_sha256(l->from, k, l->contexts[k], err);
        while (strcmp(l->contexts[same], l->contexts[k]) != 0) same++;
        l->fold[k] = same < k ? l->fold[same] : n_texts++ % LEARN_FOLDS_MAX;
    }
    l->n_folds = n_texts < LEARN_FOLDS_MAX ? n_texts : LEARN_FOLDS_MAX;
    if (status != KVB_OK || n_texts > 1) return status;
    return kvb_fail(err, KVB_ARGUMENT,
                    "%s: one text is selected; a ranking is judged on texts left out, so at least two are needed",
                    l->from->path);
}

static double count_steps(const learned *l)
{
    double F = (double)l->from->n_metrics, sets = l->options.all_features ? 1 : exp2(F) - 1;
    double settings = (isnan(l->options.lambda) ? N_LAMBDAS : 1) * (isnan(l->options.exponent) ? N_EXPONENTS : 1);
    return (double)l->from->n_contexts * (1 + F + sets + settings);
}

kvb_status learn_fit(learned *out, const selection *from, const learn_options *o, study_progress *progress,
                     kvb_error *err)
{
    *out = (learned){.from = from, .options = *o};
    out->options.layer_mean = o->layer_mean && record_get_shape(from->r).n_kv_heads > 1;
    fit f = {.l = out, .progress = progress};
    uint32_t set = 0;
    kvb_status status = check_request(out, err);
    if (status == KVB_OK) status = read_costs(out, err);
    if (status != KVB_OK) return status;
    study_progress_begin(progress, count_steps(out));
    status = deal_folds(out, err);
    if (status == KVB_OK) status = learn_text_init(&f.text, out, err);
    if (status == KVB_OK) status = learn_find_signs(out, &f.text, err);
    if (status == KVB_OK) status = gather(&f, err);
    if (status == KVB_OK) status = search_sets(&f, &set, err);
    if (status == KVB_OK) status = search_settings(&f, set, err);
    if (status == KVB_OK) status = fit_weights(&f, err);
    for (uint32_t i = 0; i < f.n_systems; i++) learn_systems_free(&f.systems[i]);
    learn_text_free(&f.text);
    return status;
}

void learn_free(learned *l)
{
    free(l->weights);
    free(l->contexts);
    free(l->fold);
    l->weights = NULL;
    l->contexts = NULL;
    l->fold = NULL;
}
