// What validate prints, as text and as JSON.
#include "tools/report/study_report.h"
#include "tools/report/words.h"
#include <math.h>

static double relative(double more, double base)
{
    return base > 0 ? more / base - 1 : 0;
}

void print_validation(const validation *v)
{
    int unproved = 0;
    char pairs[WORDS_SIZE];
    printf("%s: %s, sink %u, window %u, %s, %s%s\n", v->pairs.metric,
           questions_on(pairs, v->pairs.n_pairs, v->pairs.n_contexts, "context"), v->pairs.about.sink,
           v->pairs.about.window, scope_words(v->options.scope), v->options.aggregate_name,
           v->options.limits ? ", under constraints" : "");
    printf("   pruned   greedy %%  optimum %%    bound %%  greedy-optimum  optimum-bound%s\n",
           v->table ? "    table %  table-optimum" : "");
    for (uint32_t r = 0; r < v->options.n_rows; r++) {
        printf("  %5.4g %%  %9.5f  %9.5f  %9.5f      %9.2e %%    %9.2e %%", 100 * v->options.ratios[r],
               100 * v->greedy[r], 100 * v->optimum[r], 100 * v->bound[r], 100 * relative(v->greedy[r], v->optimum[r]),
               100 * (1 - (v->optimum[r] > 0 ? v->bound[r] / v->optimum[r] : 1)));
        if (v->table)
            printf("  %9.5f  %9.2e %%", 100 * v->table_loss[r], 100 * relative(v->table_loss[r], v->optimum[r]));
        printf("%s\n", v->unproved[r] ? "  NOT PROVED" : "");
        unproved += v->unproved[r] > 0;
    }
    printf("  Losses are shares of all importance that can be lost; gaps and costs are shares of the optimum.\n");
    if (v->table)
        printf("  The optimum is of mean curves, the table of whole tokens at every length: it can be a trifle lower "
               "where "
               "heads are at their floor.\n");
    if (unproved)
        printf("  %d rows are not proved: a problem was too large, and greedy's loss stands for the optimum.\n",
               unproved);
}

static void add_row(results *to, const validation *v, uint32_t r)
{
    cJSON *row = results_row(to);
    cJSON_AddStringToObject(row, "metric", v->pairs.metric);
    cJSON_AddNumberToObject(row, "ratio", v->options.ratios[r]);
    cJSON_AddNumberToObject(row, "greedy", v->greedy[r]);
    cJSON_AddNumberToObject(row, "optimum", v->optimum[r]);
    cJSON_AddNumberToObject(row, "lower_bound", v->bound[r]);
    cJSON_AddNumberToObject(row, "greedy_gap", v->greedy[r] - v->optimum[r]);
    cJSON_AddNumberToObject(row, "bound_gap", v->optimum[r] - v->bound[r]);
    cJSON_AddBoolToObject(row, "proved", v->unproved[r] == 0);
    if (v->table) cJSON_AddNumberToObject(row, "table_loss", v->table_loss[r]);
}

void add_validation(results *to, const validation *v)
{
    cJSON *about = results_detail(to);
    cJSON_AddStringToObject(about, "metric", v->pairs.metric);
    cJSON_AddNumberToObject(about, "sink", v->pairs.about.sink);
    cJSON_AddNumberToObject(about, "window", v->pairs.about.window);
    cJSON_AddStringToObject(about, "scope", scope_name(v->options.scope));
    cJSON_AddStringToObject(about, "aggregate", v->options.aggregate_name);
    cJSON_AddNumberToObject(about, "n_contexts", v->pairs.n_contexts);
    cJSON_AddNumberToObject(about, "n_questions", v->pairs.n_pairs);
    cJSON_AddNumberToObject(about, "n_problems", v->n_problems);
    cJSON_AddNumberToObject(about, "greedy_seconds", v->greedy_seconds);
    cJSON_AddNumberToObject(about, "exact_seconds", v->exact_seconds);
    cJSON_AddNumberToObject(about, "relaxations", (double)v->work);
    cJSON_AddBoolToObject(about, "constrained", v->options.limits != NULL);
    for (uint32_t r = 0; r < v->options.n_rows; r++) add_row(to, v, r);
}
