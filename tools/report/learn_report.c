#include "tools/report/learn_report.h"
#include "formats/json_file.h"
#include <stdio.h>
#include <stdlib.h>

enum { SHOWN_SETS = 6 };

static void print_set(const learned *l, uint32_t set)
{
    const char *between = "";
    for (uint32_t i = 0; i < l->from->n_metrics; i++) {
        if (!(set >> i & 1)) continue;
        printf("%s%s", between, l->from->metrics[i]);
        between = " + ";
    }
}

static void print_trial(const learned *l, const learn_trial *t)
{
    printf("  ");
    for (int r = 0; r < LEARN_RATIOS; r++) printf("%8.2f", 100 * t->loss[r]);
    printf("   ");
    print_set(l, t->set);
}

static int by_score(const void *a, const void *b)
{
    const learn_trial *x = *(const learn_trial *const *)a, *y = *(const learn_trial *const *)b;
    return (x->score > y->score) - (x->score < y->score);
}

// Prints the sets that lose least, and the chosen one wherever it ranks.
static void print_sets(const learned *l)
{
    const learn_trial *sorted[LEARN_TRIALS_MAX] = {NULL};
    uint32_t n = 0, set = l->trials[l->chosen].set;
    double lambda = l->trials[l->best].lambda, exponent = l->trials[l->best].exponent;
    for (uint32_t i = (uint32_t)l->from->n_metrics; i < l->n_trials; i++) {
        const learn_trial *t = &l->trials[i];
        bool again = false; // the trials of settings repeat the chosen set
        for (uint32_t k = 0; k < n; k++) again |= sorted[k]->set == t->set;
        if (!again && t->lambda == lambda && t->exponent == exponent) sorted[n++] = t;
    }
    qsort(sorted, n, sizeof *sorted, by_score);
    printf("sets of metrics, fitted (lambda %g, exponent %g):\n", lambda, exponent);
    for (uint32_t i = 0; i < n; i++) {
        if (i >= SHOWN_SETS && sorted[i]->set != set) continue;
        print_trial(l, sorted[i]);
        printf(" (cost %g)%s\n", sorted[i]->cost, sorted[i]->set == set ? " <- chosen" : "");
    }
}

void print_learned(const learned *l, const char *name)
{
    const learn_trial *t = &l->trials[l->chosen];
    printf("Importance lost on texts left out, in %% of what can be lost, at 50, 80 and 90 %% pruned:\n");
    printf("a metric's own order:\n");
    for (uint32_t i = 0; i < l->from->n_metrics; i++) {
        print_trial(l, &l->trials[i]);
        printf("\n");
    }
    print_sets(l);
    printf("chosen: lambda %g, exponent %g, target %s:\n", t->lambda, t->exponent,
           l->options.target == TARGET_MAX ? "max" : "mean");
    print_trial(l, t);
    printf("\n%s: %u folds over %zu texts\n", name, l->n_folds, l->from->n_contexts);
    const char *bounded = record_text(l->from->r, "bounded_layers");
    if (*bounded) printf("layers with a sliding window (%s) are not ranked: their caches do not grow\n", bounded);
}

static cJSON *trial_to_json(const learned *l, const learn_trial *t)
{
    cJSON *o = cJSON_CreateObject(), *metrics = cJSON_AddArrayToObject(o, "metrics");
    cJSON_AddItemToObject(o, "loss", cJSON_CreateDoubleArray(t->loss, LEARN_RATIOS));
    json_put(o, "plain %d lambda %g exponent %g cost %g", t->plain, t->lambda, t->exponent, t->cost);
    for (uint32_t i = 0; i < l->from->n_metrics; i++)
        if (t->set >> i & 1) cJSON_AddItemToArray(metrics, cJSON_CreateString(l->from->metrics[i]));
    return o;
}

cJSON *learned_to_json(const learned *l, const char *name)
{
    cJSON *o = cJSON_CreateObject(), *trials;
    cJSON_AddItemToObject(o, "ratios", cJSON_CreateDoubleArray(LEARN_RATIO, LEARN_RATIOS));
    trials = cJSON_AddArrayToObject(o, "trials");
    json_put(o, "name %s chosen %u best_set %u folds %u", name, l->chosen, l->best, l->n_folds);
    for (uint32_t i = 0; i < l->n_trials; i++) cJSON_AddItemToArray(trials, trial_to_json(l, &l->trials[i]));
    return o;
}
