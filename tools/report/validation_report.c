// What validate prints, as text and as JSON, and draws.
#include "tools/report/study_report.h"
#include "tools/report/svg.h"
#include "tools/report/words.h"
#include <math.h>

static double relative(double more, double base)
{
    return base > 0 ? more / base - 1 : 0;
}

// The last columns: of a table its loss, else what choices and rows are left to say.
static void print_rest(const validation *v, uint32_t r)
{
    char nested[32];
    if (v->table) printf("  %9.5f  %9.2e %%", 100 * v->table_loss[r], 100 * relative(v->table_loss[r], v->optimum[r]));
    if (v->options.limits) return;
    if (v->n_problems == 1) snprintf(nested, sizeof nested, "%s", v->nested[r] ? "yes" : "no");
    else snprintf(nested, sizeof nested, "%u of %u", v->nested[r], v->n_problems);
    printf("     %7.3f %%  %s", 100 * v->surviving[r] / v->n_problems, nested);
}

void print_validation(const validation *v)
{
    int unproved = 0;
    char pairs[WORDS_SIZE];
    printf("%s: %s, sink %u, window %u, %s, %s%s\n", v->pairs.metric,
           questions_on(pairs, v->pairs.n_pairs, v->pairs.n_contexts, "context"), v->pairs.about.sink,
           v->pairs.about.window, scope_words(v->options.scope), v->options.aggregate_name,
           v->options.limits ? ", under constraints" : "");
    printf("   pruned   greedy %%  optimum %%    bound %%  greedy-optimum  optimum-bound%s%s\n",
           v->table ? "    table %  table-optimum" : "", v->options.limits ? "" : "  choices left  nested");
    for (uint32_t r = 0; r < v->options.n_rows; r++) {
        printf("  %5.4g %%  %9.5f  %9.5f  %9.5f      %9.2e %%    %9.2e %%", 100 * v->options.ratios[r],
               100 * v->greedy[r], 100 * v->optimum[r], 100 * v->bound[r], 100 * relative(v->greedy[r], v->optimum[r]),
               100 * (1 - (v->optimum[r] > 0 ? v->bound[r] / v->optimum[r] : 1)));
        print_rest(v, r);
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
    if (v->options.limits) return;
    cJSON_AddNumberToObject(row, "certificate", v->certificate[r]);
    cJSON_AddNumberToObject(row, "surviving", v->surviving[r] / v->n_problems);
    cJSON_AddNumberToObject(row, "nested", v->nested[r]);
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

void draw_validation(const validation *v, FILE *out)
{
    enum { WIDTH = 760, HEIGHT = 250, TOP = 78 };
    char title[160], subtitle[160], pairs[WORDS_SIZE];
    double greedy[ROWS], bound[ROWS], surviving[ROWS];
    for (uint32_t r = 0; r < v->options.n_rows; r++) {
        greedy[r] = relative(v->greedy[r], v->optimum[r]);
        bound[r] = v->optimum[r] > 0 ? 1 - v->bound[r] / v->optimum[r] : 0;
        surviving[r] = v->surviving[r] / v->n_problems;
    }
    const svg_series losses[] = {{.name = "greedy", .y = v->greedy},
                                 {.name = "optimum", .y = v->optimum},
                                 {.name = "lower bound", .y = v->bound},
                                 {.name = "the table", .y = v->table_loss}};
    const svg_series gaps[] = {{.name = "greedy", .y = greedy}, {.name = "lower bound", .y = bound}};
    const svg_series left[] = {{.name = "by greedy's gap", .y = surviving}};
    static const char *const titles[] = {"Loss, share of all importance that can be lost",
                                         "Distance from the optimum, share of its loss",
                                         "Choices that can be part of an optimum"};
    const svg_series *const series[] = {losses, gaps, left};
    bool limited = v->options.limits != NULL;
    const size_t n_series[] = {v->table ? 4 : 3, 2, 1};
    int n_charts = limited ? 2 : 3;
    snprintf(title, sizeof title, "%s against the optimum: %.120s", v->table ? "A table" : "Greedy", v->pairs.metric);
    snprintf(subtitle, sizeof subtitle, "%s, %s, %s%s",
             questions_on(pairs, v->pairs.n_pairs, v->pairs.n_contexts, "context"), scope_words(v->options.scope),
             v->options.aggregate_name, limited ? ", under constraints" : "");
    svg_begin(out, 2 * SVG_MARGIN + WIDTH, TOP + n_charts * (HEIGHT + 16) + SVG_MARGIN, title, subtitle);
    for (int i = 0; i < n_charts; i++) {
        svg_chart chart = {.title = titles[i],
                           .x_label = "per cent pruned",
                           .x = v->options.ratios,
                           .n = v->options.n_rows,
                           .n_series = n_series[i],
                           .series = series[i],
                           .logarithmic = true};
        svg_chart_put(out, &chart, SVG_MARGIN, TOP + i * (HEIGHT + 16), WIDTH, HEIGHT);
    }
    svg_end(out);
}
