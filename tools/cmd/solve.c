// kvbudget solve: makes a table of budgets from a record, or runs one of the studies of study/ on it.
#include "formats/need.h"
#include "runtime/fail.h"
#include "study/table.h"
#include "study/versus.h"
#include "tools/cmd/solve_line.h"
#include "tools/report/output.h"
#include "tools/report/study_report.h"
#include "tools/report/words.h"
#include <stdlib.h>
#include <string.h>

// The studies that are run instead of making a table.
typedef struct study_words {
    bool holdout, ablation;
} study_words;

// ---- Writing --------------------------------------------------------------------------------------------------------

static void say_written(const solve_outputs *out, const char *path)
{
    if (!out->quiet) fprintf(stderr, "wrote %s\n", path);
}

// Writes all files that the command line asks for.
static kvb_status write_outputs(const study_table *t, const solve_outputs *out, kvb_error *err)
{
    char path[PATH_SIZE];
    cJSON *about = NULL;
    const char *metric = t->pairs.metric;
    bool several = t->pairs.from->n_metrics > 1;
    kvb_status status = KVB_OK;
    if (out->table) {
        status = output_path(path, out->table, metric, ".safetensors", several, err);
        if (status == KVB_OK) status = study_table_describe(t, &about, err);
        if (status == KVB_OK) status = study_table_write(t, about, path, err);
        if (status == KVB_OK) say_written(out, path);
        cJSON_Delete(about);
    }
    if (status != KVB_OK || !out->budgets) return status;
    status = output_path(path, out->budgets, metric, ".npy", several, err);
    if (status == KVB_OK) status = study_table_write_budgets(t, path, err);
    if (status == KVB_OK) say_written(out, path);
    return status;
}

// ---- Solving --------------------------------------------------------------------------------------------------------

static kvb_status solve_table(study_table *t, bool quiet, kvb_error *err)
{
    progress bar;
    study_progress told = progress_on(&bar);
    progress_begin(&bar, t->pairs.metric, quiet);
    kvb_status status = study_table_solve(t, &told, err);
    if (status == KVB_OK)
        progress_end(&bar, "%u %s solved for %u %s and certified, %.2f ms each", t->pairs.n_pairs,
                     plural(t->pairs.n_pairs, "problem", "problems"), t->options.n_rows,
                     plural(t->options.n_rows, "ratio", "ratios"), 1e3 * t->solve_seconds / t->pairs.n_pairs);
    else progress_end(&bar, status == KVB_INTERRUPTED ? "stopped" : "failed");
    return status;
}

static kvb_status take_best(study_table *t, const solve_outputs *out, kvb_error *err)
{
    progress bar;
    versus v;
    study_progress told = progress_on(&bar);
    progress_begin(&bar, "left-out texts", out->quiet);
    kvb_status status = versus_choose(&v, t, &told, err);
    progress_end(&bar, status == KVB_OK ? "compared with uniform and published budgets" : "failed");
    if (status == KVB_OK && !out->json) print_versus(&v, t);
    return status;
}

// Prints why importance is minimised although nobody asked for it.
static void note_loss(const pair_set *p, const study_options *o)
{
    if (p->loss == LOSS_OUTPUT || o->loss != LOSS_BEST ||
        strcmp(record_text(p->from->r, "imported_from"), "curves") == 0)
        return;
    fputs("note: the table minimises the evicted importance; ", stderr);
    if (!output_loss_is_there(p->from, p->metric))
        fputs("the record has no curves (profile --curves) of what eviction does to the output\n", stderr);
    else if (o->oracle_order) fputs("the record's curves are of the metric's order, not of the oracle's\n", stderr);
    else
        fprintf(stderr,
                "the record's curves keep %u sinks and a window of %u tokens, not %u and %u (profile --sink, "
                "--window)\n",
                p->recorded_sink, p->recorded_window, p->about.sink, p->about.window);
}

static kvb_status solve_metric(const solve_line *l, const selection *from, const char *metric, results *to,
                               kvb_error *err)
{
    const solve_outputs *out = &l->outputs;
    const study_options *o = &l->options;
    study_table *t = need(1, sizeof *t, "a table");
    kvb_status status = study_table_open(t, from, metric, o, out->budgets != NULL, err);
    if (status == KVB_OK && metric == from->metrics[0]) {
        warn_of_pairs(&t->pairs);
        if (!out->quiet) note_loss(&t->pairs, o);
    }
    if (status == KVB_OK) status = solve_table(t, out->quiet, err);
    if (status == KVB_OK && t->pairs.loss == LOSS_OUTPUT && !o->limits && !o->exact && !o->n_packings &&
        !l->words.alone)
        status = take_best(t, out, err);
    if (status == KVB_OK) status = write_outputs(t, out, err);
    if (status == KVB_OK) warn_of_table(t);
    if (status == KVB_OK) add_table(to, t);
    if (status == KVB_OK && !out->json) print_table(t);
    study_table_free(t);
    free(t);
    return status;
}

// ---- Studies --------------------------------------------------------------------------------------------------------

static bool study_given(const study_words *w)
{
    return w->holdout || w->ablation;
}

// Refuses options that do not go together with the studies. Returns an exit code.
static int study_check(const solve_line *l, const study_words *w)
{
    const solve_outputs *out = &l->outputs;
    bool study = study_given(w);
    const refusal refusals[] = {
        {w->holdout && w->ablation, "--holdout and --ablation are two studies; run them one after the other"},
        {study && (out->table || out->budgets), "a study writes no table: leave out --output and --budgets"},
        {study && (wishes_limit(&l->wishes) || wishes_ratios(&l->wishes)),
         "studies know neither constraints nor ratios of the user's; leave them out"},
        {study && l->options.oracle_order, "--ablation compares both orders by itself, and --holdout knows only the "
                                           "metric's; leave out --order"},
        {w->ablation && l->options.loss == LOSS_OUTPUT,
         "--ablation compares orders of importance; leave out --loss output"},
        {study && l->options.exact, "studies solve greedily; leave out --exact"}};
    return refuse_first(l->self, refusals, sizeof refusals / sizeof *refusals);
}

static kvb_status run_holdout(const solve_line *l, const selection *from, const char *metric, results *to,
                              kvb_error *err)
{
    progress bar;
    study_progress told = progress_on(&bar);
    holdout *h = need(1, sizeof *h, "held-out losses");
    kvb_status status = holdout_open(h, from, metric, &l->options, err);
    if (status == KVB_OK && metric == from->metrics[0]) {
        warn_of_pairs(&h->pairs);
        if (!l->outputs.quiet) note_loss(&h->pairs, &l->options);
    }
    if (status == KVB_OK) {
        progress_begin(&bar, metric, l->outputs.quiet);
        status = holdout_run(h, &told, err);
        progress_end(&bar, "%s", status == KVB_OK ? "held out and judged" : "stopped");
    }
    if (status == KVB_OK) add_holdout(to, h);
    if (status == KVB_OK && !l->outputs.json) print_holdout(h);
    holdout_free(h);
    free(h);
    return status;
}

static kvb_status run_ablation(const solve_line *l, const selection *from, const char *metric, results *to,
                               kvb_error *err)
{
    ablation x;
    progress bar;
    study_progress told = progress_on(&bar);
    kvb_status status = ablation_open(&x, from, metric, &l->options, err);
    if (status == KVB_OK) {
        progress_begin(&bar, metric, l->outputs.quiet);
        status = ablation_run(&x, &told, err);
        progress_end(&bar, "%s", status == KVB_OK ? "compared" : "stopped");
    }
    if (status == KVB_OK) add_ablation(to, &x);
    if (status == KVB_OK && !l->outputs.json) print_ablation(&x);
    ablation_free(&x);
    return status;
}

// ---- The command ----------------------------------------------------------------------------------------------------

// Opens the record and checks everything that can be refused before any work is done.
static kvb_status prepare(solve_line *l, selection *from, const char *path, kvb_error *err)
{
    kvb_status status = solve_line_open(l, from, path, err);
    if (status != KVB_OK) return status;
    record_shape shape = record_get_shape(from->r);
    if (l->outputs.table && (shape.n_heads == 0 || shape.head_dim == 0))
        return kvb_fail(err, KVB_MISMATCH,
                        "%s: the record does not say how many query heads of what size the model has, which a table "
                        "must; import it again with --model-heads and --head-dim",
                        path);
    const solve_outputs *out = &l->outputs;
    const char *const patterns[] = {out->table, out->budgets};
    const output_form forms[] = {{"--output", FILE_TABLE, ".safetensors"}, {"--budgets", FILE_ARRAY, ".npy"}};
    for (int i = 0; i < 2 && status == KVB_OK; i++)
        if (patterns[i]) status = output_check(patterns[i], &forms[i], from->metrics, from->n_metrics, err);
    return status;
}

static kvb_status give_solve_results(const solve_line *l, const study_words *study, const selection *from,
                                     results *found, kvb_error *err)
{
    if (!l->outputs.json && !l->outputs.csv) return KVB_OK;
    if (study_given(study)) cJSON_AddStringToObject(found->settings, "study", study->holdout ? "holdout" : "ablation");
    kvb_status status = results_record(found, from, err);
    return status == KVB_OK ? results_give(found, l->outputs.json, l->outputs.csv, err) : status;
}

static kvb_status solve_all(solve_line *l, const study_words *study, const char *path, kvb_error *err)
{
    selection from = {0};
    const solve_outputs *out = &l->outputs;
    results found = results_begin("solve");
    kvb_status status = prepare(l, &from, path, err);
    for (size_t i = 0; i < from.n_metrics && status == KVB_OK; i++)
        status = study->holdout    ? run_holdout(l, &from, from.metrics[i], &found, err)
                 : study->ablation ? run_ablation(l, &from, from.metrics[i], &found, err)
                                   : solve_metric(l, &from, from.metrics[i], &found, err);
    if (status == KVB_OK) status = give_solve_results(l, study, &from, &found, err);
    results_free(&found);
    selection_close(&from);
    if (status == KVB_OK && !out->table && !out->budgets && !study_given(study) && !out->quiet)
        fprintf(stderr, "no file was written; -o FILE.safetensors writes the table\n");
    return status;
}

// Returns an exit code, or -1 if the manual was printed.
static int parse(solve_line *line, study_words *w, int argc, char **argv, int *first)
{
    const cli_option options[] = {
        {"metric", 'm', CLI_LIST, &line->metrics, "M",
         "eviction metric that the table is for, repeatable; 'all' takes every metric of the\nrecord; 'snapkv' is "
         "enough when only one begins with it"},
        {"output", 'o', CLI_WRITES(FILE_TABLE | FILE_PER_METRIC), &line->outputs.table, "FILE",
         "the table to write (.safetensors); for several metrics a folder, or a name\nwith {metric} in it"},
        {"loss", 0, CLI_CHOICE, &line->words.loss, "importance|output",
         "what is minimised: output, what eviction does to the model's output, in nats (default for a\nrecord with "
         "--curves), or importance, the evicted importance as the paper has it (else)"},
        {"alone", 0, CLI_FLAG, &line->words.alone, NULL,
         "do not compare with uniform and published budgets on left-out texts, ratio by ratio"},
        {"aggregate", 'a', CLI_TEXT, &line->words.aggregate, "HOW",
         "mean_loss (default): budgets with the least average loss; mean_ratio: the average of\neach question's best "
         "budgets; worst: least loss of the text that loses most; cvar:0.2:\nleast loss of the fifth of the texts that "
         "lose most"},
        {"paper", 0, CLI_FLAG, &line->words.paper, NULL, "as the paper does: --aggregate mean_ratio --shrink 0"},
        {"shrink", 0, CLI_REAL, &line->options.shrink, "A",
         "pull budgets towards uniform: each head's curve becomes 1 - A of its own plus A of the\naverage head's (0 to "
         "1; default: 0.1 with mean_loss, else 0)"},
        {"min-keep", 0, CLI_REAL, &line->options.min_keep, "F",
         "no head keeps less than this share of its tokens (default: 1 %, or sinks and\nwindow where that is more)"},
        {"scope", 0, CLI_CHOICE, &line->words.scope, "global|layer",
         "global (default): layers share one budget; layer: each meets the ratio"},
        {"hull", 0, CLI_CHOICE, &line->words.hull, "feasible|full",
         "feasible (default); full: as in the published code, to compare"},
        {"order", 0, CLI_CHOICE, &line->words.order, "metric|oracle",
         "which tokens go first when budgets are solved: those of the lowest metric (default),\nor, to compare, "
         "oracle: as if the metric ranked perfectly"},
        {"formats", 0, CLI_TEXT, &line->words.formats, "LIST",
         "choose for each head how keys and values are stored, too: bf16,int8,int4,int2 or some of\nthem. Ratios are "
         "then shares of a bf16 cache's bytes; with --loss output"},
        {"exact", 0, CLI_FLAG, &line->options.exact, NULL,
         "the true optimum, token by token, instead of greedy's budgets"},
        SELECTION_OPTIONS(*line),
        {"budgets", 0, CLI_WRITES(FILE_ARRAY | FILE_PER_METRIC), &line->outputs.budgets, "FILE",
         "also write each question's own best budgets: tokens kept, an int32 .npy [questions,\n99, layers, KV heads]"},
        CONSTRAINT_OPTIONS(line->wishes),
        {"holdout", 0, CLI_FLAG, &w->holdout, NULL,
         "write no table; measure every --aggregate on texts that are left out in turn"},
        {"ablation", 0, CLI_FLAG, &w->ablation, NULL,
         "write no table; compare each question's best budgets with uniform, PyramidKV and\nAdaKV, and with budgets "
         "that ignore how well the metric ranks"},
        RESULTS_OPTIONS(line->outputs),
        {"quiet", 0, CLI_FLAG, &line->outputs.quiet, NULL, "no progress and no names of files"},
        {0},
    };
    return cli_parse(line->self, options, argc, argv, first);
}

static int run_solve(const cli_command *self, int argc, char **argv)
{
    solve_line l = solve_line_make(self);
    study_words study = {.holdout = false};
    int first, code = parse(&l, &study, argc, argv, &first);
    if (code == EXIT_DONE && argc - first != 1)
        code =
            cli_usage_error(self, "expected one record, found %d operands: kvbudget %s", argc - first, self->synopsis);
    if (code == EXIT_DONE) code = solve_line_check(&l, "mean_loss");
    if (code == EXIT_DONE) code = study_check(&l, &study);
    if (code == EXIT_DONE) {
        kvb_error err = {0};
        cli_catch_signals();
        if (solve_all(&l, &study, argv[first], &err) != KVB_OK) code = cli_failed(self, &err);
    }
    solve_line_free(&l);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_solve = {
    "solve",
    "solve RUN.h5 --metric M -o M.safetensors [OPTION]...",
    "turn a record into a table: the best split of the cache over all heads",
    "For every ratio from 1 % to 99 % pruned it finds how many tokens each KV head should keep to lose the "
    "least\noracle importance when this metric chooses the tokens. The loss is the average over the questions, each as "
    "a\nshare of what that question could lose.\n"
    "\n"
    "It prints, each as a share of all importance that can be lost, averaged over the questions:\n"
    "  table       loss of the table itself, rounded to whole tokens, on these questions\n"
    "  bound       no budgets that all questions share can lose less (mean_loss), or no question's own can\n"
    "              (mean_ratio): proved by multipliers\n"
    "  gap         the largest share of the table's loss that better budgets could save\n"
    "  uniform     the loss when all heads keep equally many\n"
    "  solved for  what was minimised: the mean loss, after --shrink; that of every question's own best budgets\n"
    "              (mean_ratio); the mean of the texts that lose most (worst, cvar)\n"
    "Rows in which all heads have reached their floor, 1 % or sinks and window, are saturated: they prune less\n"
    "than their ratio.\n"
    "\n"
    "Budgets come from a greedy sweep, which is optimal for the convex hulls of the loss curves; its budgets are\n"
    "nested: no head gets more when more is pruned. --exact finds the optimum for the curves themselves (of every\n"
    "question with mean_ratio, of the average with mean_loss), which need not be nested.\n"
    "\n"
    "--holdout measures the loss of tables on texts that they were not made from, with intervals.\n"
    "--ablation compares within each question, as figures 2 to 4 of the paper do.\n"
    "\n"
    "--order oracle makes LU-KV's table \"without the optimality gap\": budgets that would be best if the metric\n"
    "ranked tokens as the oracle does. `solved for` and `bound` are of that order, `table` is what the table loses "
    "when the\n"
    "metric ranks.\n"
    "\n"
    "Constraints hold in the table and in the runtime's budgets at any length: whole pages (--block),\n"
    "few budgets per layer (--levels), equal totals of tensor-parallel ranks (--ranks), caps of layers, floors\n"
    "and ceilings of heads, heads that keep everything (--pin). All can be combined except --levels with\n"
    "--ranks. Constraints that contradict each other, and ratios from --ratios or --bytes that they do not\n"
    "allow, are refused with the numbers; a table for every per cent ends at the last ratio that floors and pins\n"
    "allow.\n"
    "\n"
    "Examples:\n"
    "  kvbudget solve run.h5 --metric snapkv:kvpress -o snapkv.safetensors\n"
    "  kvbudget solve run.h5 --metric all -o 'tables/{metric}.safetensors'\n"
    "  kvbudget solve run.h5 --metric keydiff --paper --json\n"
    "  kvbudget solve run.h5 --metric keydiff --holdout\n"
    "  kvbudget solve run.h5 --metric keydiff --exact -o exact.safetensors\n"
    "  kvbudget solve run.h5 --metric keydiff --paper --order oracle -o no-gap.safetensors\n"
    "  kvbudget solve run.h5 --metric keydiff --block 16 --ranks 3 --pin 0 -o paged.safetensors\n"
    "  kvbudget solve run.h5 --metric keydiff --bytes 256MiB --dtype f16 --tokens 32768 -o 256m.safetensors\n",
    run_solve,
};
