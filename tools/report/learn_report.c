#include "tools/report/learn_report.h"
#include "formats/json_file.h"
#include <stdio.h>

static void print_losses(const learn_trial *t)
{
    printf("  ");
    for (int r = 0; r < LEARN_RATIOS; r++) printf("%8.2f", 100 * t->loss[r]);
    printf("   ");
}

void print_learned(const learned *l, const char *name)
{
    const learn_trial *t = &l->trials[l->chosen];
    printf("Importance lost on texts left out, in %% of what can be lost, at 50, 80 and 90 %% pruned:\n");
    printf("a metric's own order:\n");
    for (uint32_t i = 0; i < l->from->n_metrics; i++) {
        print_losses(&l->trials[i]);
        printf("%s\n", l->from->metrics[i]);
    }
    printf("all fitted, chosen: lambda %g, exponent %g, target %s:\n", t->lambda, t->exponent,
           l->options.target == TARGET_MAX ? "max" : "mean");
    print_losses(t);
    for (uint32_t i = 0; i < l->from->n_metrics; i++) printf("%s%s", i ? " + " : "", l->from->metrics[i]);
    printf("\n%s: %u folds over %zu texts\n", name, l->n_folds, l->from->n_contexts);
    const char *bounded = record_text(l->from->r, "bounded_layers");
    if (*bounded) printf("layers with a sliding window (%s) are not ranked: their caches do not grow\n", bounded);
}

static cJSON *trial_to_json(const learned *l, uint32_t i)
{
    const learn_trial *t = &l->trials[i];
    bool plain = i < l->from->n_metrics;
    int n = plain ? 1 : (int)l->from->n_metrics;
    cJSON *o = cJSON_CreateObject();
    cJSON_AddItemToObject(o, "metrics", cJSON_CreateStringArray(l->from->metrics + (plain ? i : 0), n));
    cJSON_AddItemToObject(o, "loss", cJSON_CreateDoubleArray(t->loss, LEARN_RATIOS));
    json_put(o, "plain %d lambda %g exponent %g", plain, t->lambda, t->exponent);
    return o;
}

cJSON *learned_to_json(const learned *l, const char *name)
{
    cJSON *o = cJSON_CreateObject(), *trials;
    cJSON_AddItemToObject(o, "ratios", cJSON_CreateDoubleArray(LEARN_RATIO, LEARN_RATIOS));
    trials = cJSON_AddArrayToObject(o, "trials");
    json_put(o, "name %s chosen %u folds %u", name, l->chosen, l->n_folds);
    for (uint32_t i = 0; i < l->n_trials; i++) cJSON_AddItemToArray(trials, trial_to_json(l, i));
    return o;
}
