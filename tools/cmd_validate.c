// kvbudget validate: how far greedy is from the true optimum, and whether a table's bounds hold.
#include "runtime/fail.h"
#include "tools/svg.h"
#include "tools/validate.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Of one metric: shares of each problem's mass, mean over the problems.
typedef struct validation {
    metric_job job; // first: actions get its address
    double greedy[ROWS], optimum[ROWS], nested_loss[ROWS], bound[ROWS], surviving[ROWS];
    uint32_t nested[ROWS], unproved[ROWS]; // problems
    uint32_t n_problems;
    double greedy_seconds, exact_seconds;
    uint64_t work;
} validation;

static kvb_status validate_curves(const solve_command *s, validation *v, problem *p, const loss_curves *c,
                                  double weight, kvb_error *err)
{
    double start = seconds_now(), middle;
    exact_result x = {0};
    kvb_status status = problem_solve_curves(p, c, err);
    middle = seconds_now();
    if (status == KVB_OK) status = exact_init(&x, &c->shape, s->options.scope, ROWS, err);
    if (status == KVB_OK) status = exact_solve(&x, c, &p->allocation, NULL, err);
    v->greedy_seconds += middle - start;
    v->exact_seconds += seconds_now() - middle;
    v->work += x.work;
    v->n_problems++;
    for (int r = 0; r < ROWS && status == KVB_OK; r++) {
        v->greedy[r] += weight * x.greedy[r];
        v->optimum[r] += weight * x.optimum[r];
        v->bound[r] += weight * x.bound[r];
        v->surviving[r] += x.surviving[r];
        v->nested[r] += x.nested[r];
        v->unproved[r] += !x.proved[r];
    }
    if (status == KVB_OK) status = exact_nest(&x, c, &p->allocation, NULL, err);
    for (int r = 0; r < ROWS && status == KVB_OK; r++) v->nested_loss[r] += weight * x.loss[r];
    exact_free(&x);
    return status;
}

static kvb_status validate_pair(solve_command *s, metric_job *job, problem *p, kvb_error *err)
{
    const loss_curves *c = &p->curves;
    if (s->mean_loss) return merge_pair(s, job, c, err);
    loss_curves_shrink(&p->curves, s->shrink);
    return validate_curves(s, (validation *)job, p, c, c->total > 0 ? 1 / (c->total * job->n_pairs) : 0, err);
}

static kvb_status validate_merged(const solve_command *s, validation *v, kvb_error *err)
{
    problem p = {0};
    merge_finish(s, &v->job);
    kvb_status status = problem_init(&p, &v->job.merged.curves.shape, &s->options, err);
    if (status == KVB_OK) status = validate_curves(s, v, &p, &v->job.merged.curves, 1, err);
    problem_free(&p);
    return status;
}

static kvb_status run_metric(solve_command *s, validation *v, kvb_error *err)
{
    metric_job *job = &v->job;
    cache_shape shape;
    kvb_status status = prepare_pairs(s, job, &shape, err);
    if (status != KVB_OK) return status;
    uint32_t done = 0;
    job->n_visits = 1;
    progress_begin(&s->bar, job->metric, s->quiet);
    status = walk_pairs(s, job, validate_pair, &done, err);
    if (status == KVB_OK && s->mean_loss) status = validate_merged(s, v, err);
    if (status != KVB_OK) {
        progress_end(&s->bar, status == KVB_INTERRUPTED ? "stopped" : "failed");
        return status;
    }
    progress_end(&s->bar, "%u problems, %d ratios each: greedy %.2f s, exact %.2f s", v->n_problems, ROWS,
                 v->greedy_seconds, v->exact_seconds);
    return KVB_OK;
}

// ---- What comes out -------------------------------------------------------------------------------------------------

static double relative(double more, double base)
{
    return base > 0 ? more / base - 1 : 0;
}

static void print_table(const solve_command *s, const validation *v)
{
    const metric_job *job = &v->job;
    int unproved = 0;
    printf("%s: %u questions on %u contexts, sink %u, window %u, %s, %s\n", job->metric, job->n_pairs, job->n_contexts,
           job->sink, job->window, s->options.scope == SCOPE_LAYER ? "layer by layer" : "over all layers",
           s->aggregate_name);
    printf("  pruned   greedy %%  optimum %%    bound %%  greedy-optimum  optimum-bound  nested cost  choices left  "
           "nested\n");
    for (int r = 0; r < ROWS; r++) {
        char nested[32];
        if (v->n_problems == 1) snprintf(nested, sizeof nested, "%s", v->nested[r] ? "yes" : "no");
        else snprintf(nested, sizeof nested, "%u of %u", v->nested[r], v->n_problems);
        printf("  %4d %%  %9.5f  %9.5f  %9.5f      %9.2e %%    %9.2e %%  %9.2e %%     %7.3f %%  %s%s\n", r + 1,
               100 * v->greedy[r], 100 * v->optimum[r], 100 * v->bound[r], 100 * relative(v->greedy[r], v->optimum[r]),
               100 * (1 - (v->optimum[r] > 0 ? v->bound[r] / v->optimum[r] : 1)),
               100 * relative(v->nested_loss[r], v->optimum[r]), 100 * v->surviving[r] / v->n_problems, nested,
               v->unproved[r] ? "  NOT PROVED" : "");
        unproved += v->unproved[r] > 0;
    }
    printf("  Losses are shares of all importance that can be lost; the two gaps and the cost of nesting are shares of "
           "the optimum.\n");
    if (unproved)
        printf("  %d rows are not proved: a problem was too large, and greedy's loss stands for the optimum.\n",
               unproved);
}

static bool add_json(cJSON *list, const solve_command *s, const validation *v)
{
    const metric_job *job = &v->job;
    cJSON *item = cJSON_CreateObject(), *rows;
    bool ok = item && cJSON_AddItemToArray(list, item) && cJSON_AddStringToObject(item, "metric", job->metric) &&
              cJSON_AddNumberToObject(item, "sink", job->sink) &&
              cJSON_AddNumberToObject(item, "window", job->window) &&
              cJSON_AddStringToObject(item, "scope", s->scope_name) &&
              cJSON_AddStringToObject(item, "aggregate", s->aggregate_name) &&
              cJSON_AddNumberToObject(item, "n_contexts", job->n_contexts) &&
              cJSON_AddNumberToObject(item, "n_questions", job->n_pairs) &&
              cJSON_AddNumberToObject(item, "n_problems", v->n_problems) &&
              cJSON_AddNumberToObject(item, "greedy_seconds", v->greedy_seconds) &&
              cJSON_AddNumberToObject(item, "exact_seconds", v->exact_seconds) &&
              cJSON_AddNumberToObject(item, "relaxations", (double)v->work);
    rows = ok ? cJSON_AddArrayToObject(item, "rows") : NULL;
    ok = rows != NULL;
    for (int r = 0; ok && r < ROWS; r++) {
        cJSON *row = cJSON_CreateObject();
        ok = row && cJSON_AddItemToArray(rows, row) && cJSON_AddNumberToObject(row, "ratio", (r + 1) / 100.0) &&
             cJSON_AddNumberToObject(row, "greedy", v->greedy[r]) &&
             cJSON_AddNumberToObject(row, "optimum", v->optimum[r]) &&
             cJSON_AddNumberToObject(row, "lower_bound", v->bound[r]) &&
             cJSON_AddNumberToObject(row, "greedy_gap", v->greedy[r] - v->optimum[r]) &&
             cJSON_AddNumberToObject(row, "bound_gap", v->optimum[r] - v->bound[r]) &&
             cJSON_AddNumberToObject(row, "nested_loss", v->nested_loss[r]) &&
             cJSON_AddNumberToObject(row, "surviving", v->surviving[r] / v->n_problems) &&
             cJSON_AddNumberToObject(row, "nested", v->nested[r]) &&
             cJSON_AddBoolToObject(row, "proved", v->unproved[r] == 0);
    }
    return ok;
}

static void draw(const solve_command *s, const void *what, FILE *out)
{
    const validation *v = what;
    enum { WIDTH = 760, HEIGHT = 250, TOP = 78 };
    char title[160], subtitle[160];
    double greedy[ROWS], bound[ROWS], nested[ROWS], surviving[ROWS];
    for (int r = 0; r < ROWS; r++) {
        greedy[r] = relative(v->greedy[r], v->optimum[r]);
        bound[r] = v->optimum[r] > 0 ? 1 - v->bound[r] / v->optimum[r] : 0;
        nested[r] = relative(v->nested_loss[r], v->optimum[r]);
        surviving[r] = v->surviving[r] / v->n_problems;
    }
    const svg_series losses[] = {{.name = "greedy", .y = v->greedy},
                                 {.name = "optimum", .y = v->optimum},
                                 {.name = "lower bound", .y = v->bound}};
    const svg_series gaps[] = {
        {.name = "greedy", .y = greedy}, {.name = "lower bound", .y = bound}, {.name = "optimum, nested", .y = nested}};
    const svg_series left[] = {{.name = "by greedy's gap", .y = surviving}};
    static const char *const titles[] = {"Loss, share of all importance that can be lost",
                                         "Distance from the optimum, share of its loss",
                                         "Choices that can be part of an optimum"};
    const svg_series *const series[] = {losses, gaps, left};
    const size_t n_series[] = {3, 3, 1};
    snprintf(title, sizeof title, "Greedy against the optimum: %.120s", v->job.metric);
    snprintf(subtitle, sizeof subtitle, "%u questions on %u contexts, %s, %s", v->job.n_pairs, v->job.n_contexts,
             s->options.scope == SCOPE_LAYER ? "layer by layer" : "over all layers", s->aggregate_name);
    svg_begin(out, 2 * SVG_MARGIN + WIDTH, TOP + 3 * (HEIGHT + 16) + SVG_MARGIN, title, subtitle);
    for (int i = 0; i < 3; i++) {
        svg_chart chart = {.title = titles[i],
                           .x_label = "per cent pruned",
                           .x = s->ratios,
                           .n = ROWS,
                           .n_series = n_series[i],
                           .series = series[i],
                           .logarithmic = true};
        svg_chart_put(out, &chart, SVG_MARGIN, TOP + i * (HEIGHT + 16), WIDTH, HEIGHT);
    }
    svg_end(out);
}

static kvb_status validate_metric(solve_command *s, const char *metric, cJSON *list, kvb_error *err)
{
    validation *v = calloc(1, sizeof *v);
    if (!v) return kvb_fail(err, KVB_MEMORY, "no memory for metric %s", metric);
    v->job.metric = metric;
    kvb_status status = run_metric(s, v, err);
    if (status == KVB_OK && s->output) status = write_picture(s, s->output, metric, draw, v, err);
    if (status == KVB_OK && list && !add_json(list, s, v))
        status = kvb_fail(err, KVB_MEMORY, "no memory for the JSON text");
    if (status == KVB_OK && !list) print_table(s, v);
    release_pairs(&v->job);
    free(v);
    return status;
}

static kvb_status validate_all(solve_command *s, kvb_error *err)
{
    char path[PATH_SIZE];
    cJSON *list = s->json ? cJSON_CreateArray() : NULL;
    kvb_status status = s->json && !list ? kvb_fail(err, KVB_MEMORY, "no memory for the JSON text") : KVB_OK;
    if (status == KVB_OK) status = select_from_record(s, err);
    if (status == KVB_OK && s->output) status = output_path(path, s->output, s->metrics[0], "", s->n_metrics > 1, err);
    for (size_t i = 0; i < s->n_metrics && status == KVB_OK; i++) status = validate_metric(s, s->metrics[i], list, err);
    if (status == KVB_OK && list) {
        char *text = cJSON_Print(list);
        if (text) puts(text);
        else status = kvb_fail(err, KVB_MEMORY, "no memory for the JSON text");
        cJSON_free(text);
    }
    cJSON_Delete(list);
    return status;
}

static int run_validate(const cli_command *self, int argc, char **argv)
{
    const char *certificate = NULL;
    solve_command s = {.self = self,
                       .aggregate_name = NULL,
                       .shrink = NAN,
                       .min_keep = NAN,
                       .scope_name = "global",
                       .hull_name = "feasible",
                       .order_name = "metric",
                       .sink = NOT_GIVEN,
                       .window = NOT_GIVEN,
                       .max_questions = NOT_GIVEN};
    const cli_option options[] = {
        {"metric", 'm', CLI_LIST, &s.metric_names, "M", "as for solve: eviction metric, repeatable, or 'all'"},
        {"output", 'o', CLI_TEXT, &s.output, "FILE.svg",
         "also draw it; for several metrics a folder, or a name with {metric} in it"},
        {"certificate", 0, CLI_TEXT, &certificate, "TABLE", "check the bounds of this table instead"},
        {"aggregate", 'a', CLI_TEXT, &s.aggregate_name, "HOW",
         "mean_ratio (default): every question is a problem; mean_loss: their average is"},
        {"shrink", 0, CLI_REAL, &s.shrink, "A", "as for solve"},
        {"min-keep", 0, CLI_REAL, &s.min_keep, "F", "as for solve"},
        {"scope", 0, CLI_TEXT, &s.scope_name, "SCOPE", "global (default), or layer"},
        {"sink", 0, CLI_COUNT, &s.sink, "N", "first tokens that always stay (default: as recorded with the metric)"},
        {"window", 0, CLI_COUNT, &s.window, "N", "last tokens that always stay (default: as recorded with the metric)"},
        {"contexts", 'c', CLI_TEXT, &s.contexts, "IDS", "use only these contexts, commas between"},
        {"questions", 'q', CLI_COUNT, &s.max_questions, "N", "use only the first N questions of every context"},
        {"json", 0, CLI_FLAG, &s.json, NULL, "print JSON"},
        {"quiet", 0, CLI_FLAG, &s.quiet, NULL, "no progress, no file names"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first);
    bool holds = true;
    char any[] = "all";
    if (code == EXIT_DONE && argc - first != 1)
        code =
            cli_usage_error(self, "expected one record, found %d operands: kvbudget %s", argc - first, self->synopsis);
    if (code == EXIT_DONE && certificate && (s.metric_names.count || s.output))
        code = cli_usage_error(self, "--certificate takes the metric from the table and draws nothing");
    if (code == EXIT_DONE) {
        // A table names its metric itself.
        const char *word = any;
        cli_list given = s.metric_names;
        if (certificate) s.metric_names = (cli_list){&word, 1};
        if (!s.aggregate_name) s.aggregate_name = "mean_ratio";
        code = check_solve_options(&s);
        s.metric_names = given;
        if (code == EXIT_DONE && s.aggregate == AGGREGATE_TAIL)
            code = cli_usage_error(self, "--aggregate: expected mean_ratio or mean_loss, found '%s'", s.aggregate_name);
    }
    if (code == EXIT_DONE) {
        kvb_error err = {0};
        s.path = argv[first];
        cli_catch_signals();
        kvb_status status = certificate ? validate_certificate(&s, certificate, &holds, &err) : validate_all(&s, &err);
        if (status == KVB_OK && !holds)
            status =
                kvb_fail(&err, KVB_MISMATCH, "%s: the certificate does not hold; solve the record again", certificate);
        if (status != KVB_OK) code = cli_failed(self, &err);
    }
    record_close(s.r);
    free(s.selected);
    cli_list_free(&s.metric_names);
    kvb_limits_free(&s.limits);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_validate = {
    "validate",
    "validate RUN.h5 --metric M [-o PICTURE.svg] | validate --certificate TABLE RUN.h5",
    "compare greedy's budgets with the true optimum; check a table's bounds",
    "For each of the 99 ratios it solves every question's problem twice: greedily, as solve does, and exactly, at\n"
    "the resolution of single tokens. It prints, averaged over the questions:\n"
    "  greedy, optimum, bound   losses, as shares of all importance that can be lost\n"
    "  greedy-optimum           how much more greedy loses, as a share of the optimum\n"
    "  optimum-bound            how far the proved bound is below the optimum, as a share of it\n"
    "  nested cost              what `solve --exact --monotone` loses more than the optimum\n"
    "  choices left             tokens counts of heads that greedy's gap cannot rule out\n"
    "  nested                   whether no head keeps more in the optimum than in that of the row before\n"
    "\n"
    "With --certificate it checks a table against the record that it was made from, by code that shares nothing\n"
    "with the solver's hulls and sweeps: for every row that some multiplier proves the stored bound, that the\n"
    "bound is not above the loss, and that the table itself loses what it says. Exit status 1 if anything fails.\n"
    "\n"
    "Examples:\n"
    "  kvbudget validate run.h5 --metric keydiff -o keydiff.svg\n"
    "  kvbudget validate run.h5 --metric all --scope layer --json\n"
    "  kvbudget validate --certificate keydiff.safetensors run.h5\n",
    run_validate,
};
