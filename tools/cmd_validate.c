// kvbudget validate: how far greedy, or a table, is from the true optimum, and whether a table's bounds hold.
#include "runtime/fail.h"
#include "solver/constrained.h"
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
    double certificate[ROWS];              // how far greedy can be from the optimum: curves minus hulls at its budgets
    uint32_t nested[ROWS], unproved[ROWS]; // problems
    uint32_t n_problems;
    double greedy_seconds, exact_seconds;
    uint64_t work;
    const double *table; // [R, L, G] prune ratios to compare, or NULL; their losses go to job.table_loss
} validation;

// Under constraints choices are not counted, and rows not nested.
static kvb_status validate_limited(const solve_command *s, validation *v, const loss_curves *c, double weight,
                                   kvb_error *err)
{
    double start = seconds_now();
    constrained_rows x;
    kvb_status status = constrained_solve(&x, c, s->options.limits, s->ratios, s->n_rows, true, err);
    if (status != KVB_OK) return status;
    v->exact_seconds += seconds_now() - start;
    v->work += x.work;
    v->n_problems++;
    for (uint32_t r = 0; r < s->n_rows; r++) {
        v->greedy[r] += weight * x.greedy[r];
        v->optimum[r] += weight * x.loss[r];
        v->bound[r] += weight * x.bound[r];
        v->unproved[r] += !x.proved[r];
    }
    constrained_rows_free(&x);
    return KVB_OK;
}

static kvb_status validate_curves(const solve_command *s, validation *v, problem *p, const loss_curves *c,
                                  double weight, kvb_error *err)
{
    if (s->options.limits) return validate_limited(s, v, c, weight, err);
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
        v->certificate[r] += weight * hulls_gap(&p->hulls, c, p->allocation.keep + (size_t)r * p->allocation.n_heads);
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
    validation *v = (validation *)job;
    kvb_status status =
        v->table ? judge_table(job->table_loss, c, s->options.limits, s->n_rows, v->table, err) : KVB_OK;
    if (status == KVB_OK) status = require_wishes(s, c, err);
    if (status != KVB_OK) return status;
    if (s->mean_loss) return merge_pair(s, job, c, err);
    loss_curves_shrink(&p->curves, s->shrink);
    return validate_curves(s, v, p, c, c->total > 0 ? 1 / (c->total * job->n_pairs) : 0, err);
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
    for (int r = 0; r < ROWS; r++) job->table_loss[r] /= job->n_pairs;
    if (s->options.limits)
        progress_end(&s->bar, "%u problems, %u ratios each: greedy and exact %.2f s", v->n_problems, s->n_rows,
                     v->exact_seconds);
    else
        progress_end(&s->bar, "%u problems, %u ratios each: greedy %.2f s, exact %.2f s", v->n_problems, s->n_rows,
                     v->greedy_seconds, v->exact_seconds);
    return KVB_OK;
}

// ---- What comes out -------------------------------------------------------------------------------------------------

static double relative(double more, double base)
{
    return base > 0 ? more / base - 1 : 0;
}

// The last columns: of a table its loss, else what choices and rows are left to say.
static void print_rest(const solve_command *s, const validation *v, uint32_t r)
{
    char nested[32];
    if (v->table)
        printf("  %9.5f  %9.2e %%", 100 * v->job.table_loss[r], 100 * relative(v->job.table_loss[r], v->optimum[r]));
    if (s->options.limits) return;
    if (v->n_problems == 1) snprintf(nested, sizeof nested, "%s", v->nested[r] ? "yes" : "no");
    else snprintf(nested, sizeof nested, "%u of %u", v->nested[r], v->n_problems);
    printf("  %9.2e %%     %7.3f %%  %s", 100 * relative(v->nested_loss[r], v->optimum[r]),
           100 * v->surviving[r] / v->n_problems, nested);
}

static void print_comparison(const solve_command *s, const validation *v)
{
    const metric_job *job = &v->job;
    int unproved = 0;
    printf("%s: %u questions on %u contexts, sink %u, window %u, %s, %s%s\n", job->metric, job->n_pairs,
           job->n_contexts, job->sink, job->window,
           s->options.scope == SCOPE_LAYER ? "layer by layer" : "over all layers", s->aggregate_name,
           s->options.limits ? ", under constraints" : "");
    printf("   pruned   greedy %%  optimum %%    bound %%  greedy-optimum  optimum-bound%s%s\n",
           v->table ? "    table %  table-optimum" : "",
           s->options.limits ? "" : "  nested cost  choices left  nested");
    for (uint32_t r = 0; r < s->n_rows; r++) {
        printf("  %5.4g %%  %9.5f  %9.5f  %9.5f      %9.2e %%    %9.2e %%", 100 * s->ratios[r], 100 * v->greedy[r],
               100 * v->optimum[r], 100 * v->bound[r], 100 * relative(v->greedy[r], v->optimum[r]),
               100 * (1 - (v->optimum[r] > 0 ? v->bound[r] / v->optimum[r] : 1)));
        print_rest(s, v, r);
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
              cJSON_AddNumberToObject(item, "relaxations", (double)v->work) &&
              cJSON_AddBoolToObject(item, "constrained", s->options.limits != NULL);
    rows = ok ? cJSON_AddArrayToObject(item, "rows") : NULL;
    ok = rows != NULL;
    for (uint32_t r = 0; ok && r < s->n_rows; r++) {
        cJSON *row = cJSON_CreateObject();
        ok = row && cJSON_AddItemToArray(rows, row) && cJSON_AddNumberToObject(row, "ratio", s->ratios[r]) &&
             cJSON_AddNumberToObject(row, "greedy", v->greedy[r]) &&
             cJSON_AddNumberToObject(row, "optimum", v->optimum[r]) &&
             cJSON_AddNumberToObject(row, "lower_bound", v->bound[r]) &&
             cJSON_AddNumberToObject(row, "greedy_gap", v->greedy[r] - v->optimum[r]) &&
             cJSON_AddNumberToObject(row, "bound_gap", v->optimum[r] - v->bound[r]) &&
             cJSON_AddBoolToObject(row, "proved", v->unproved[r] == 0) &&
             (!v->table || cJSON_AddNumberToObject(row, "table_loss", v->job.table_loss[r])) &&
             (s->options.limits || (cJSON_AddNumberToObject(row, "certificate", v->certificate[r]) &&
                                    cJSON_AddNumberToObject(row, "nested_loss", v->nested_loss[r]) &&
                                    cJSON_AddNumberToObject(row, "surviving", v->surviving[r] / v->n_problems) &&
                                    cJSON_AddNumberToObject(row, "nested", v->nested[r])));
    }
    return ok;
}

static void draw(const solve_command *s, const void *what, FILE *out)
{
    const validation *v = what;
    enum { WIDTH = 760, HEIGHT = 250, TOP = 78 };
    char title[160], subtitle[160];
    double greedy[ROWS], bound[ROWS], nested[ROWS], surviving[ROWS];
    for (uint32_t r = 0; r < s->n_rows; r++) {
        greedy[r] = relative(v->greedy[r], v->optimum[r]);
        bound[r] = v->optimum[r] > 0 ? 1 - v->bound[r] / v->optimum[r] : 0;
        nested[r] = relative(v->nested_loss[r], v->optimum[r]);
        surviving[r] = v->surviving[r] / v->n_problems;
    }
    const svg_series losses[] = {{.name = "greedy", .y = v->greedy},
                                 {.name = "optimum", .y = v->optimum},
                                 {.name = "lower bound", .y = v->bound},
                                 {.name = "the table", .y = v->job.table_loss}};
    const svg_series gaps[] = {
        {.name = "greedy", .y = greedy}, {.name = "lower bound", .y = bound}, {.name = "optimum, nested", .y = nested}};
    const svg_series left[] = {{.name = "by greedy's gap", .y = surviving}};
    static const char *const titles[] = {"Loss, share of all importance that can be lost",
                                         "Distance from the optimum, share of its loss",
                                         "Choices that can be part of an optimum"};
    const svg_series *const series[] = {losses, gaps, left};
    bool limited = s->options.limits != NULL;
    const size_t n_series[] = {v->table ? 4 : 3, limited ? 2 : 3, 1};
    int n_charts = limited ? 2 : 3;
    snprintf(title, sizeof title, "%s against the optimum: %.120s", v->table ? "A table" : "Greedy", v->job.metric);
    snprintf(subtitle, sizeof subtitle, "%u questions on %u contexts, %s, %s%s", v->job.n_pairs, v->job.n_contexts,
             s->options.scope == SCOPE_LAYER ? "layer by layer" : "over all layers", s->aggregate_name,
             limited ? ", under constraints" : "");
    svg_begin(out, 2 * SVG_MARGIN + WIDTH, TOP + n_charts * (HEIGHT + 16) + SVG_MARGIN, title, subtitle);
    for (int i = 0; i < n_charts; i++) {
        svg_chart chart = {.title = titles[i],
                           .x_label = "per cent pruned",
                           .x = s->ratios,
                           .n = s->n_rows,
                           .n_series = n_series[i],
                           .series = series[i],
                           .logarithmic = true};
        svg_chart_put(out, &chart, SVG_MARGIN, TOP + i * (HEIGHT + 16), WIDTH, HEIGHT);
    }
    svg_end(out);
}

static kvb_status validate_metric(solve_command *s, const char *metric, const kvb_table *table, cJSON *list,
                                  kvb_error *err)
{
    validation *v = calloc(1, sizeof *v);
    if (!v) return kvb_fail(err, KVB_MEMORY, "no memory for metric %s", metric);
    v->job.metric = metric;
    v->table = table ? kvb_table_prune_ratios(table) : NULL;
    kvb_status status = run_metric(s, v, err);
    if (status == KVB_OK && s->output) status = write_picture(s, s->output, metric, draw, v, err);
    if (status == KVB_OK && list && !add_json(list, s, v))
        status = kvb_fail(err, KVB_MEMORY, "no memory for the JSON text");
    if (status == KVB_OK && !list) print_comparison(s, v);
    release_pairs(&v->job);
    free(v);
    return status;
}

// However a table was made, what counts is its mean loss, and the best that a table under its limits could have.
static kvb_status open_for_comparison(solve_command *s, kvb_table **table, const char *path, kvb_error *err)
{
    kvb_status status = open_table_and_record(s, table, path, err);
    s->aggregate_name = "mean_loss";
    s->shrink = 0;
    s->oracle_order = false;
    read_aggregate(s);
    return status;
}

// table_path: NULL, or the table to compare.
static kvb_status validate_all(solve_command *s, const char *table_path, kvb_error *err)
{
    kvb_table *table = NULL;
    char path[PATH_SIZE];
    cJSON *list = s->json ? cJSON_CreateArray() : NULL;
    kvb_status status = s->json && !list ? kvb_fail(err, KVB_MEMORY, "no memory for the JSON text") : KVB_OK;
    if (status == KVB_OK && table_path) status = open_for_comparison(s, &table, table_path, err);
    else if (status == KVB_OK) status = select_from_record(s, err);
    if (status == KVB_OK && !table_path) status = apply_wishes(s, err);
    if (status == KVB_OK && s->output) status = output_path(path, s->output, s->metrics[0], "", s->n_metrics > 1, err);
    for (size_t i = 0; i < s->n_metrics && status == KVB_OK; i++)
        status = validate_metric(s, s->metrics[i], table, list, err);
    if (status == KVB_OK && list) {
        char *text = cJSON_Print(list);
        if (text) puts(text);
        else status = kvb_fail(err, KVB_MEMORY, "no memory for the JSON text");
        cJSON_free(text);
    }
    cJSON_Delete(list);
    if (table) s->scope_name = NULL; // it was the table's
    kvb_table_close(table);
    return status;
}

// An exit code. A table names its metric itself.
static int check_settings(solve_command *s, bool from_table)
{
    const char *any = "all";
    cli_list given = s->metric_names;
    if (from_table) s->metric_names = (cli_list){&any, 1};
    if (!s->aggregate_name) s->aggregate_name = "mean_ratio";
    int code = check_solve_options(s);
    s->metric_names = given;
    if (code == EXIT_DONE && s->aggregate == AGGREGATE_TAIL)
        code = cli_usage_error(s->self, "--aggregate: expected mean_ratio or mean_loss, found '%s'", s->aggregate_name);
    return code;
}

static int run_validate(const cli_command *self, int argc, char **argv)
{
    const char *certificate = NULL;
    solve_command s = solve_command_make(self);
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
        CONSTRAINT_OPTIONS(s.wishes),
        {"json", 0, CLI_FLAG, &s.json, NULL, "print JSON"},
        {"quiet", 0, CLI_FLAG, &s.quiet, NULL, "no progress, no file names"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first), n = argc - first;
    bool holds = true, own = s.aggregate_name || !isnan(s.shrink) || !isnan(s.min_keep) || s.sink != NOT_GIVEN ||
                             s.window != NOT_GIVEN || wishes_limit(&s.wishes) || wishes_ratios(&s.wishes) ||
                             strcmp(s.scope_name, "global") != 0;
    if (code == EXIT_DONE && (n < 1 || n > (certificate ? 1 : 2)))
        code = cli_usage_error(self, "expected one record%s, found %d operands: kvbudget %s",
                               certificate ? "" : ", and a table or none", n, self->synopsis);
    const char *table = code == EXIT_DONE && n == 2 ? argv[first + 1] : NULL;
    if (code == EXIT_DONE && certificate && (s.metric_names.count || s.output || own))
        code =
            cli_usage_error(self, "--certificate takes the metric and all settings from the table and draws nothing");
    if (code == EXIT_DONE && table && (s.metric_names.count || own))
        code = cli_usage_error(self, "%s says itself which metric, aggregation and constraints it is for", table);
    if (code == EXIT_DONE) code = check_settings(&s, certificate || table);
    if (code == EXIT_DONE) {
        kvb_error err = {0};
        s.path = argv[first];
        cli_catch_signals();
        kvb_status status =
            certificate ? validate_certificate(&s, certificate, &holds, &err) : validate_all(&s, table, &err);
        if (status == KVB_OK && !holds)
            status =
                kvb_fail(&err, KVB_MISMATCH, "%s: the certificate does not hold; solve the record again", certificate);
        if (status != KVB_OK) code = cli_failed(self, &err);
    }
    solve_command_free(&s);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_validate = {
    "validate",
    "validate RUN.h5 --metric M [-o PICTURE.svg] | validate RUN.h5 TABLE | validate --certificate TABLE RUN.h5",
    "compare greedy's budgets, or a table, with the true optimum; check a table's bounds",
    "For each of the 99 ratios it solves every question's problem twice: greedily, as solve does, and exactly, at\n"
    "the resolution of single tokens. It prints, averaged over the questions:\n"
    "  greedy, optimum, bound   losses, as shares of all importance that can be lost\n"
    "  greedy-optimum           how much more greedy loses, as a share of the optimum\n"
    "  optimum-bound            how far the proved bound is below the optimum, as a share of it\n"
    "  nested cost              what `solve --exact --monotone` loses more than the optimum\n"
    "  choices left             tokens counts of heads that greedy's gap cannot rule out\n"
    "  nested                   whether no head keeps more in the optimum than in that of the row before\n"
    "Constraints (--block and so on, as for solve) hold for greedy, optimum and bound alike.\n"
    "\n"
    "With a TABLE the problem is that of the best table on these questions under the table's own constraints, scope,\n"
    "protected tokens and ratios: the least mean loss, whatever the table was solved for. Two columns tell what\n"
    "the table's whole tokens lose, and how much that is above the optimum. The record may be another one of the\n"
    "same model: then they tell how far the table is from the best there.\n"
    "\n"
    "With --certificate it checks a table against the record that it was made from, by code that shares nothing\n"
    "with the solver's hulls and sweeps: for every row that some multiplier proves the stored bound, that the\n"
    "bound is not above the loss, and that the table itself loses what it says. Exit status 1 if anything fails.\n"
    "\n"
    "Examples:\n"
    "  kvbudget validate run.h5 --metric keydiff -o keydiff.svg\n"
    "  kvbudget validate run.h5 --metric all --scope layer --json\n"
    "  kvbudget validate run.h5 --metric keydiff --block 16 --ranks 3\n"
    "  kvbudget validate run.h5 paged.safetensors\n"
    "  kvbudget validate --certificate keydiff.safetensors run.h5\n",
    run_validate,
};
