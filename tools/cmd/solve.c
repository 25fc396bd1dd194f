// kvbudget solve: a record in, a table of budgets out; or what study/ measures on the record.
#include "runtime/fail.h"
#include "study/table_file.h"
#include "study/versus.h"
#include "tools/cmd/solve_line.h"
#include "tools/cmd/solve_studies.h"
#include "tools/report/output.h"
#include "tools/report/study_report.h"
#include "tools/report/table_npy.h"
#include "tools/report/words.h"
#include <stdlib.h>

// ---- Writing --------------------------------------------------------------------------------------------------------

static void say_written(const solve_outputs *out, const char *path, const char *more)
{
    if (!out->quiet) fprintf(stderr, "wrote %s%s\n", path, more);
}

static kvb_status write_tables(const study_table *t, const solve_outputs *out, kvb_error *err)
{
    cJSON *about = NULL;
    char path[PATH_SIZE];
    const char *metric = t->pairs.metric;
    bool several = t->pairs.from->n_metrics > 1;
    kvb_status status = study_table_describe(t, &about, err);
    if (status == KVB_OK && out->table) {
        status = output_path(path, out->table, metric, ".safetensors", several, err);
        if (status == KVB_OK) status = study_table_write(t, about, path, err);
        if (status == KVB_OK) say_written(out, path, "");
    }
    if (status == KVB_OK && out->npy) {
        double *prune_ratio = layer_map_spread(&t->layers, t->prune_ratio, ROWS, t->pairs.longest.n_kv_heads);
        const kvb_ranking *ranking = selection_ranking(t->pairs.from, metric);
        const rank_content carried = ranking ? rank_content_of(ranking) : (rank_content){0};
        table_content content = {.n_rows = ROWS,
                                 .n_layers = t->layers.n_layers,
                                 .n_kv_heads = t->pairs.longest.n_kv_heads,
                                 .ratio = t->options.ratios,
                                 .prune_ratio = prune_ratio,
                                 .effective_ratio = t->effective,
                                 .saturated = t->saturated,
                                 .ranking = ranking ? &carried : NULL,
                                 .metadata = about};
        status = output_path(path, out->npy, metric, ".npy", several, err);
        if (status == KVB_OK) status = write_table_npy(path, &content, err);
        free(prune_ratio);
        if (status == KVB_OK) say_written(out, path, " and its side-car");
    }
    cJSON_Delete(about);
    return status;
}

// All files that the command line asks for.
static kvb_status write_outputs(const study_table *t, const solve_outputs *out, kvb_error *err)
{
    char path[PATH_SIZE];
    kvb_status status = out->table || out->npy ? write_tables(t, out, err) : KVB_OK;
    if (status != KVB_OK || !out->budgets) return status;
    status = output_path(path, out->budgets, t->pairs.metric, ".npy", t->pairs.from->n_metrics > 1, err);
    if (status == KVB_OK) status = study_table_write_budgets(t, path, err);
    if (status == KVB_OK) say_written(out, path, "");
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

// --window auto: fills o->sink and o->window.
static kvb_status find_window(const solve_line *l, const selection *from, const char *metric, study_options *o,
                              kvb_error *err)
{
    progress bar;
    window_choice found;
    study_progress told = progress_on(&bar);
    progress_begin(&bar, "windows", l->outputs.quiet);
    kvb_status status = window_choose(&found, from, metric, o, &told, err);
    progress_end(&bar, status == KVB_OK ? "%u sinks and windows compared" : "failed", found.n);
    if (status != KVB_OK) return status;
    o->sink = found.each[found.chosen].sink;
    o->window = found.each[found.chosen].window;
    if (!l->outputs.json) print_windows(&found, metric);
    return KVB_OK;
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

static kvb_status solve_metric(const solve_line *l, const selection *from, const char *metric, results *to,
                               kvb_error *err)
{
    const solve_outputs *out = &l->outputs;
    study_options options = l->options;
    study_table *t = calloc(1, sizeof *t);
    if (!t) return kvb_fail(err, KVB_MEMORY, "no memory for metric %s", metric);
    kvb_status status = l->choose_window ? find_window(l, from, metric, &options, err) : KVB_OK;
    if (status == KVB_OK) status = study_table_open(t, from, metric, &options, out->budgets != NULL, err);
    if (status == KVB_OK && t->pairs.loss == LOSS_OUTPUT && !l->words.shrink) t->options.shrink = 0;
    if (status == KVB_OK && metric == from->metrics[0]) warn_of_pairs(&t->pairs);
    if (status == KVB_OK) status = solve_table(t, out->quiet, err);
    if (status == KVB_OK && t->pairs.loss == LOSS_OUTPUT && !options.limits && !options.exact && !l->words.alone)
        status = take_best(t, out, err);
    if (status == KVB_OK) status = write_outputs(t, out, err);
    if (status == KVB_OK) warn_of_table(t);
    if (status == KVB_OK) add_table(to, t);
    if (status == KVB_OK && !out->json) print_table(t);
    study_table_free(t);
    free(t);
    return status;
}

// ---- The command ----------------------------------------------------------------------------------------------------

// Everything that can be refused before any work is done.
static kvb_status prepare(solve_line *l, selection *from, const char *path, kvb_error *err)
{
    kvb_status status = selection_open(from, path, &l->wanted, err);
    if (status != KVB_OK) return status;
    if (!record_has_sums(from->r) && !l->outputs.quiet)
        fprintf(stderr, "note: %s is of format version 1, without checksums: wrong numbers in it are not noticed\n",
                path);
    record_shape shape = record_get_shape(from->r);
    layer_map layers;
    status = layer_map_read(&layers, from->r, err);
    if (status == KVB_OK) status = wishes_apply(&l->wishes, &shape, &layers, &l->options, &l->limits, err);
    layer_map_free(&layers);
    if (status != KVB_OK) return status;
    warn_of_rows(&l->options);
    if (l->outputs.table && (shape.n_heads == 0 || shape.head_dim == 0))
        return kvb_fail(err, KVB_MISMATCH,
                        "%s: the record does not say how many query heads of what size the model has, which a table "
                        "must; import it again with --model-heads and --head-dim, or write --npy only",
                        path);
    const solve_outputs *out = &l->outputs;
    const char *const patterns[] = {out->table, out->npy, out->budgets};
    const output_form forms[] = {{"--output", FILE_TABLE, ".safetensors"},
                                 {"--npy", FILE_TABLE_ARRAY, ".npy"},
                                 {"--budgets", FILE_ARRAY, ".npy"}};
    for (int i = 0; i < 3 && status == KVB_OK; i++)
        if (patterns[i]) status = output_check(patterns[i], &forms[i], from->metrics, from->n_metrics, err);
    return status;
}

// The record that is open has its hash from what was read; the others of --lengths from their files.
static kvb_status give_results(const solve_line *l, const study_words *study, const selection *from, results *found,
                               kvb_error *err)
{
    static const char *const studies[] = {"", "holdout", "ablation", "lengths"};
    const char *study_name = studies[study->holdout ? 1 : study->ablation ? 2 : study->lengths ? 3 : 0];
    if (!l->outputs.json && !l->outputs.csv) return KVB_OK;
    if (*study_name) cJSON_AddStringToObject(found->settings, "study", study_name);
    kvb_status status = results_record(found, from, err);
    for (size_t i = 1; i < study->n_records && status == KVB_OK; i++)
        status = results_file(found, "record", study->records[i], err);
    return status == KVB_OK ? results_give(found, l->outputs.json, l->outputs.csv, err) : status;
}

static kvb_status solve_all(solve_line *l, const study_words *study, kvb_error *err)
{
    selection from = {0};
    const solve_outputs *out = &l->outputs;
    results found = results_begin("solve");
    kvb_status status = prepare(l, &from, study->records[0], err);
    for (size_t i = 0; i < from.n_metrics && status == KVB_OK; i++)
        status = study_given(study) ? run_study(l, study, &from, from.metrics[i], &found, err)
                                    : solve_metric(l, &from, from.metrics[i], &found, err);
    if (status == KVB_OK) status = give_results(l, study, &from, &found, err);
    results_free(&found);
    selection_close(&from);
    if (status == KVB_OK && !out->table && !out->npy && !out->budgets && !study_given(study) && !out->quiet)
        fprintf(stderr, "no file was written; -o FILE.safetensors writes the table\n");
    return status;
}

// An exit code, or -1 when the manual was printed.
static int parse(solve_line *line, study_words *w, int argc, char **argv, int *first)
{
    const cli_option options[] = {
        {"metric", 'm', CLI_LIST, &line->metrics, "M",
         "eviction metric that the table is for, repeatable; 'all' takes every metric of the\nrecord; 'snapkv' is "
         "enough when only one begins with it"},
        {"output", 'o', CLI_WRITES(FILE_TABLE | FILE_PER_METRIC), &line->outputs.table, "FILE",
         "the table to write (.safetensors); for several metrics a folder, or a name\nwith {metric} in it"},
        {"npy", 0, CLI_WRITES(FILE_TABLE_ARRAY | FILE_PER_METRIC), &line->outputs.npy, "FILE",
         "also write the prune ratios for kvpress, with a JSON side-car"},
        {"loss", 0, CLI_TEXT, &line->words.loss, "LOSS",
         "what is minimised: importance (default), the evicted importance as the paper has it, or\noutput, what "
         "eviction "
         "does to the model's output, in nats (of a record with --curves)"},
        {"gains", 0, CLI_TEXT, &line->words.gains, "WHICH",
         "with --loss output, the layers' gains that count: noise, cut, deep, or all\n(default: their geometric mean)"},
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
        {"scope", 0, CLI_TEXT, &line->words.scope, "SCOPE",
         "global (default): layers share one budget; layer: each meets the ratio"},
        {"hull", 0, CLI_TEXT, &line->words.hull, "RANGE",
         "feasible (default); full: as in the published code, to compare"},
        {"order", 0, CLI_TEXT, &line->words.order, "ORDER",
         "which tokens go first when budgets are solved: those of the lowest metric (default),\nor, to compare, "
         "oracle: as if the metric ranked perfectly"},
        {"exact", 0, CLI_FLAG, &line->options.exact, NULL,
         "the true optimum, token by token, instead of greedy's budgets"},
        {"monotone", 0, CLI_FLAG, &line->options.monotone, NULL,
         "with --exact: no head may keep more when more is pruned; prints what that costs"},
        SELECTION_OPTIONS(*line),
        {"budgets", 0, CLI_WRITES(FILE_ARRAY | FILE_PER_METRIC), &line->outputs.budgets, "FILE",
         "also write each question's own best budgets: tokens kept, an int32 .npy [questions,\n99, layers, KV heads]"},
        CONSTRAINT_OPTIONS(line->wishes),
        {"holdout", 0, CLI_TEXT, &w->holdout, "WHAT",
         "write no table; measure every --aggregate on texts (or questions) that are left out in\nturn: text, "
         "question"},
        {"ablation", 0, CLI_FLAG, &w->ablation, NULL,
         "write no table; compare each question's best budgets with uniform, PyramidKV and\nAdaKV, and with budgets "
         "that ignore how well the metric ranks"},
        {"lengths", 0, CLI_FLAG, &w->lengths, NULL,
         "write no table; compare tables from several records of the same contexts, cut to\ndifferent lengths (profile "
         "--max-tokens), on each other's contexts"},
        {"seed", 0, CLI_COUNT, &w->seed, "N", "with --holdout: seed of the draws behind its intervals (1)"},
        RESULTS_OPTIONS(line->outputs),
        {"quiet", 0, CLI_FLAG, &line->outputs.quiet, NULL, "no progress and no names of files"},
        {0},
    };
    return cli_parse(line->self, options, argc, argv, first);
}

static int run_solve(const cli_command *self, int argc, char **argv)
{
    solve_line l = solve_line_make(self);
    study_words study = {.seed = 1};
    int first, code = parse(&l, &study, argc, argv, &first);
    if (code == EXIT_DONE && (argc == first || (argc - first != 1 && !study.lengths)))
        code = cli_usage_error(self, "expected one record (several with --lengths), found %d operands: kvbudget %s",
                               argc - first, self->synopsis);
    if (code == EXIT_DONE) code = solve_line_check(&l, "mean_loss");
    if (code == EXIT_DONE) code = study_check(&l, &study);
    if (code == EXIT_DONE) {
        kvb_error err = {0};
        study.records = argv + first;
        study.n_records = (size_t)(argc - first);
        cli_catch_signals();
        if (solve_all(&l, &study, &err) != KVB_OK) code = cli_failed(self, &err);
    }
    solve_line_free(&l);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_solve = {
    "solve",
    "solve RUN.h5 --metric M -o M.safetensors [OPTION]...",
    "turn a record into a table: the best split of the cache over all heads",
    "For every question and every ratio from 1 % to 99 % pruned it finds how many tokens each KV head should\n"
    "keep so that, with this metric choosing which, the least oracle importance is lost, on average over the\n"
    "questions, each loss taken as a share of what that question could lose.\n"
    "\n"
    "It prints, each as a share of all importance that can be lost, averaged over the questions:\n"
    "  table       loss of the table itself, rounded to whole tokens, on these questions\n"
    "  bound       no budgets that all questions share can lose less (mean_loss), or no question's own can\n"
    "              (mean_ratio): proved by multipliers\n"
    "  gap         how much of the table's loss the best possible budgets could save at most\n"
    "  uniform     the loss when all heads keep equally many\n"
    "  solved for  what was minimised: the mean loss, after --shrink; that of every question's own best budgets\n"
    "              (mean_ratio); the mean of the texts that lose most (worst, cvar)\n"
    "Rows at which all heads have reached their floor, 1 % or sinks and window, are saturated: they prune less\n"
    "than they say.\n"
    "\n"
    "--window auto compares windows of 1 to 256 last tokens, and the metric's own, then 0 to 16 sinks (unless --sink\n"
    "says how many), by what is lost at 50, 80 and 90 % of all importance, protected tokens included, so at equal\n"
    "memory; each text is judged under budgets of the others.\n"
    "\n"
    "Budgets come from a greedy sweep, which is optimal for the convex hulls of the loss curves; its budgets are\n"
    "nested: no head gets more when more is pruned. --exact finds the optimum for the curves themselves (of every\n"
    "question with mean_ratio, of the average with mean_loss), which need not be nested. With --monotone rows are\n"
    "solved one after the other from several starting rows, each within its neighbour; the best set is taken and\n"
    "improved row by row. It never loses more than greedy, summed over the rows as a share of the optimum.\n"
    "\n"
    "--holdout says what tables are worth: their loss on texts (or questions) that they were not made from, with\n"
    "intervals; and by text also learning curves, and what every text's table loses on the others. --ablation\n"
    "compares within each question, as figures 2 to 4 of the paper do.\n"
    "\n"
    "--lengths takes several records of the same contexts and says what tables from one length, from all, and from\n"
    "all others lose on each length, the text that is judged being held out; --json also has the\n"
    "transfer matrix between single texts at single lengths.\n"
    "\n"
    "--order oracle makes LU-KV's table \"without the optimality gap\": budgets that would be best if the metric\n"
    "ranked tokens as the oracle does. `solved for` and `bound` are of that order, `table` is what the table loses "
    "when the\n"
    "metric ranks.\n"
    "\n"
    "Constraints hold in the table and in what the runtime makes of it, at any length: whole pages (--block),\n"
    "few budgets per layer (--levels), equal totals of tensor-parallel ranks (--ranks), caps of layers, floors\n"
    "and ceilings of heads, heads that keep everything (--pin). All can be combined except --levels with\n"
    "--ranks. Constraints that contradict each other, and ratios from --ratios or --bytes that they do not\n"
    "allow, are refused with the numbers; a table for every per cent ends at the last one that floors and pins\n"
    "allow.\n"
    "\n"
    "Examples:\n"
    "  kvbudget solve run.h5 --metric snapkv:kvpress -o snapkv.safetensors\n"
    "  kvbudget solve run.h5 --metric all -o 'tables/{metric}.safetensors' --npy tables\n"
    "  kvbudget solve run.h5 --metric keydiff --window auto -o keydiff.safetensors\n"
    "  kvbudget solve run.h5 --metric keydiff --paper --json\n"
    "  kvbudget solve run.h5 --metric keydiff --holdout text\n"
    "  kvbudget solve r1000.h5 r4000.h5 --metric keydiff --lengths\n"
    "  kvbudget solve run.h5 --metric keydiff --exact --monotone -o exact.safetensors\n"
    "  kvbudget solve run.h5 --metric keydiff --paper --order oracle -o no-gap.safetensors\n"
    "  kvbudget solve run.h5 --metric keydiff --block 16 --ranks 3 --pin 0 -o paged.safetensors\n"
    "  kvbudget solve run.h5 --metric keydiff --bytes 256MiB --dtype f16 --tokens 32768 -o 256m.safetensors\n",
    run_solve,
};
