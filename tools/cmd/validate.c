// kvbudget validate: how far greedy, or a table, is from the true optimum, and whether a table's bounds hold.
#include "formats/need.h"
#include "runtime/fail.h"
#include "tools/cmd/solve_line.h"
#include "tools/report/study_report.h"
#include "tools/report/words.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- Against the optimum --------------------------------------------------------------------------------------------

static kvb_status run_metric(validation *v, bool quiet, kvb_error *err)
{
    progress bar;
    study_progress told = progress_on(&bar);
    progress_begin(&bar, v->pairs.metric, quiet);
    kvb_status status = validation_run(v, &told, err);
    if (status != KVB_OK) progress_end(&bar, status == KVB_INTERRUPTED ? "stopped" : "failed");
    else if (v->options.limits)
        progress_end(&bar, "%u %s, %u %s each: greedy and exact %.2f s", v->n_problems,
                     plural(v->n_problems, "problem", "problems"), v->options.n_rows,
                     plural(v->options.n_rows, "ratio", "ratios"), v->exact_seconds);
    else
        progress_end(&bar, "%u %s, %u %s each: greedy %.2f s, exact %.2f s", v->n_problems,
                     plural(v->n_problems, "problem", "problems"), v->options.n_rows,
                     plural(v->options.n_rows, "ratio", "ratios"), v->greedy_seconds, v->exact_seconds);
    return status;
}

static kvb_status validate_metric(const solve_line *l, const selection *from, const char *metric,
                                  const kvb_table *table, results *to, kvb_error *err)
{
    validation *v = need(1, sizeof *v, "a validation");
    const double *prune_ratio = table ? kvb_table_budgeted_ratios(table) : NULL;
    kvb_status status = validation_open(v, from, metric, &l->options, prune_ratio, err);
    if (status == KVB_OK) status = run_metric(v, l->outputs.quiet, err);
    if (status == KVB_OK) add_validation(to, v);
    if (status == KVB_OK && !l->outputs.json) print_validation(v);
    validation_free(v);
    free(v);
    return status;
}

// Opens a table to compare: however it was made, its mean loss is compared with the best that its limits allow.
static kvb_status open_for_comparison(solve_line *l, kvb_table **table, selection *from, const char *path,
                                      const char *table_path, kvb_error *err)
{
    study_options *o = &l->options;
    kvb_status status = open_table_and_record(table, o, &l->limits, from, table_path, path, &l->wanted, err);
    o->shrink = 0;
    o->oracle_order = false;
    if (status == KVB_OK && o->n_packings)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s: has formats, and the comparison is of tokens alone; --certificate checks its bounds",
                        table_path);
    return status == KVB_OK ? study_options_aggregate(o, "mean_loss", err) : status;
}

// table_path: NULL, or the table that was compared.
static kvb_status give_validate_results(const solve_line *l, const selection *from, const char *table_path,
                                        results *found, kvb_error *err)
{
    if (!l->outputs.json && !l->outputs.csv) return KVB_OK;
    kvb_status status = results_record(found, from, err);
    if (status == KVB_OK && table_path) status = results_file(found, "table", table_path, err);
    return status == KVB_OK ? results_give(found, l->outputs.json, l->outputs.csv, err) : status;
}

// table_path: NULL, or the table to compare.
static kvb_status validate_all(solve_line *l, const char *path, const char *table_path, kvb_error *err)
{
    kvb_table *table = NULL;
    selection from = {0};
    results found = results_begin("validate");
    kvb_status status = table_path ? open_for_comparison(l, &table, &from, path, table_path, err)
                                   : solve_line_open(l, &from, path, err);
    for (size_t i = 0; i < from.n_metrics && status == KVB_OK; i++)
        status = validate_metric(l, &from, from.metrics[i], table, &found, err);
    if (status == KVB_OK) status = give_validate_results(l, &from, table_path, &found, err);
    results_free(&found);
    selection_close(&from);
    kvb_table_close(table);
    return status;
}

// ---- A table's bounds -----------------------------------------------------------------------------------------------

static kvb_status run_check(table_check *k, bool quiet, kvb_error *err)
{
    progress bar;
    study_progress told = progress_on(&bar);
    progress_begin(&bar, k->pairs.metric, quiet);
    kvb_status status = table_check_run(k, &told, err);
    progress_end(&bar, status == KVB_OK ? "checked" : "failed");
    return status == KVB_OK ? table_check_limits(k, err) : status;
}

// Checks a table's bounds. Fails with KVB_MISMATCH if those of a row do not hold.
static kvb_status check_certificate(const solve_line *l, const char *table, const char *path, kvb_error *err)
{
    uint32_t faults = 0;
    results found = results_begin("validate");
    bool wanted = l->outputs.json || l->outputs.csv;
    table_check *k = need(1, sizeof *k, "a table's check");
    kvb_status status = table_check_open(k, table, path, &l->wanted, err);
    if (status == KVB_OK) status = run_check(k, l->outputs.quiet, err);
    if (status == KVB_OK) status = report_table_check(k, wanted ? &found : NULL, &faults, err);
    if (status == KVB_OK) status = give_validate_results(l, &k->from, table, &found, err);
    results_free(&found);
    if (status == KVB_OK && faults)
        status = kvb_fail(err, KVB_MISMATCH, "%s: the certificate does not hold; solve the record again", table);
    table_check_free(k);
    free(k);
    return status;
}

// ---- The command ----------------------------------------------------------------------------------------------------

// Checks the settings; a table names its metric itself. Returns an exit code.
static int check_settings(solve_line *l, bool from_table)
{
    const char *any = "all";
    cli_list given = l->metrics;
    if (from_table) l->metrics = (cli_list){&any, 1};
    int code = solve_line_check(l, "mean_ratio");
    l->metrics = given;
    if (from_table) l->wanted.metrics = NULL;
    if (code == EXIT_DONE && l->options.aggregate == AGGREGATE_TAIL)
        code = cli_usage_error(l->self, "--aggregate: expected mean_ratio or mean_loss, found '%s'",
                               l->options.aggregate_name);
    return code;
}

static int run_validate(const cli_command *self, int argc, char **argv)
{
    const char *certificate = NULL;
    solve_line l = solve_line_make(self);
    const cli_option options[] = {
        {"metric", 'm', CLI_LIST, &l.metrics, "M", "as for solve: eviction metric, repeatable, or 'all'"},
        {"certificate", 0, CLI_INPUT, &certificate, "TABLE", "instead, check the lower bounds of this table"},
        {"aggregate", 'a', CLI_TEXT, &l.words.aggregate, "HOW",
         "mean_ratio (default): one problem for each question; mean_loss: one for their average"},
        {"shrink", 0, CLI_REAL, &l.options.shrink, "A", "as for solve"},
        {"min-keep", 0, CLI_REAL, &l.options.min_keep, "F", "as for solve"},
        {"scope", 0, CLI_CHOICE, &l.words.scope, "global|layer", "global (default), or layer"},
        SELECTION_OPTIONS(l),
        CONSTRAINT_OPTIONS(l.wishes),
        RESULTS_OPTIONS(l.outputs),
        {"quiet", 0, CLI_FLAG, &l.outputs.quiet, NULL, "no progress and no names of files"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first), n = argc - first;
    bool own = l.words.aggregate || !isnan(l.options.shrink) || !isnan(l.options.min_keep) ||
               l.options.sink != AS_RECORDED || l.options.window != AS_RECORDED || wishes_limit(&l.wishes) ||
               wishes_ratios(&l.wishes) || (l.words.scope && strcmp(l.words.scope, "global") != 0);
    if (code == EXIT_DONE && (n < 1 || n > (certificate ? 1 : 2)))
        code = cli_usage_error(self, "expected one record%s, found %d operands: kvbudget %s",
                               certificate ? "" : ", and a table or none", n, self->synopsis);
    const char *table = code == EXIT_DONE && n == 2 ? argv[first + 1] : NULL;
    if (code == EXIT_DONE && certificate && (l.metrics.count || own))
        code = cli_usage_error(self, "--certificate takes the metric and all settings from the table");
    if (code == EXIT_DONE && table && (l.metrics.count || own))
        code = cli_usage_error(self, "%s already says which metric, aggregation and constraints it is for", table);
    if (code == EXIT_DONE) code = check_settings(&l, certificate || table);
    if (code == EXIT_DONE) {
        kvb_error err = {0};
        cli_catch_signals();
        kvb_status status = certificate ? check_certificate(&l, certificate, argv[first], &err)
                                        : validate_all(&l, argv[first], table, &err);
        if (status != KVB_OK) code = cli_failed(self, &err);
    }
    solve_line_free(&l);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_validate = {
    "validate",
    "validate RUN.h5 --metric M | validate RUN.h5 TABLE | validate --certificate TABLE RUN.h5",
    "compare greedy's budgets, or a table, with the true optimum; check a table's bounds",
    "For each of the 99 ratios it solves every question's problem twice: greedily, as solve does, and exactly, at\n"
    "the resolution of single tokens. It prints, averaged over the questions:\n"
    "  greedy, optimum, bound   losses, as shares of all importance that can be lost\n"
    "  greedy-optimum           how much more greedy loses, as a share of the optimum\n"
    "  optimum-bound            how far the proved bound is below the optimum, as a share of it\n"
    "Constraints (--block and so on, as for solve) hold for greedy, optimum and bound alike.\n"
    "\n"
    "With a TABLE it solves for the best table on these questions under the table's own constraints, scope,\n"
    "protected tokens and ratios: the least mean loss, whatever the table was solved for. Two columns show what\n"
    "the table's whole tokens lose, and by how much that exceeds the optimum. The record may be another one of the\n"
    "same model: then they show how far the table is from the best there.\n"
    "\n"
    "With --certificate it checks a table against the record that it was made from, with code independent of\n"
    "the solver's hulls and sweeps: for every row that some multiplier proves the stored bound, that the\n"
    "bound is not above the loss, and that the table's own loss is as stored. Exit status 1 if anything fails.\n"
    "\n"
    "Examples:\n"
    "  kvbudget validate run.h5 --metric keydiff\n"
    "  kvbudget validate run.h5 --metric all --scope layer --json\n"
    "  kvbudget validate run.h5 --metric keydiff --block 16 --ranks 3\n"
    "  kvbudget validate run.h5 paged.safetensors\n"
    "  kvbudget validate --certificate keydiff.safetensors run.h5\n",
    run_validate,
};
