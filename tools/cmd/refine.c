// kvbudget refine: improves budgets by the damage that they are measured to do.
#include "evaluator/refine_bench.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "runtime/fail.h"
#include "study/interval.h"
#include "study/measured.h"
#include "tools/cmd/eval_command.h"
#include "tools/device.h"
#include "tools/memory.h"
#include "tools/report/results.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct refine_command {
    eval_command e;
    cli_list select, test, candidates;
    uint64_t evaluations;
    char **operands; // model, table and the texts of all sets
    size_t n_operands, n_calibration, n_select;
    char table_sha256[65];
    refine_table table;
    refine_bench bench;
    refine_task task;
    double *starts;   // the task's starts, owned
    uint32_t n_start; // texts that the search's start was measured on
    refine_result best;
    double *kl[SET_COUNT]; // of each set (refine_bench_judge); NULL: not measured
} refine_command;

static bool go_on(void *context, double done, double total)
{
    (void)context, (void)done, (void)total;
    return !cli_stop_requested;
}

static void show_heads(const refine_bench *b, uint32_t n_levels, uint32_t done, uint32_t n_texts, double seconds)
{
    double left = (double)(n_texts - done) * n_levels * b->m->config.n_layers * b->m->config.n_kv_heads;
    fprintf(stderr, "refine: heads alone at %u budgets each, text %u of %u", n_levels, done, n_texts);
    // Cuts that were in the log took no time, so the time left is estimated from the cuts of this run alone.
    if (b->n_alone) fprintf(stderr, ", %.0f s left\n", seconds / (double)b->n_alone * left);
    else fprintf(stderr, ", known from an earlier run\n");
}

// ---- Opening ----

// Deals the texts into the sets that the command line names; without --select, refine_bench_deal() chooses.
static kvb_status deal_texts(refine_command *c, kvb_error *err)
{
    size_t n = c->e.in.n_texts;
    if (!c->n_select) return refine_bench_deal(&c->bench, NULL, err);
    refine_set *asked = need(n, sizeof *asked, "texts");
    for (size_t t = 0; t < n; t++) {
        size_t text = c->e.in.origin[t] - 2; // behind the model and the table
        asked[t] = text < c->n_calibration                 ? SET_CALIBRATION
                   : text < c->n_calibration + c->n_select ? SET_SELECTION
                                                           : SET_TEST;
    }
    kvb_status status = refine_bench_deal(&c->bench, asked, err);
    free(asked);
    return status;
}

static kvb_status check_memory(const refine_bench *b, kvb_error *err)
{
    uint64_t bytes = refine_bench_bytes(b), most = memory_free();
    if (!most || bytes < most) return KVB_OK;
    return kvb_fail(err, KVB_MEMORY,
                    "a search on %u texts takes %.0f MiB, and %.0f MiB are free; use fewer texts or a "
                    "smaller --tokens",
                    b->n_members[SET_CALIBRATION] + b->n_members[SET_SELECTION], (double)bytes / 0x1p20,
                    (double)most / 0x1p20);
}

static kvb_status refuse_formats(const kvb_table *table, const char *name, kvb_error *err)
{
    if (!kvb_table_has_formats(table)) return KVB_OK;
    return kvb_fail(err, KVB_UNSUPPORTED,
                    "%s: has formats, and only tokens are searched here; refine a table that was solved without "
                    "--formats, or use this one as it is",
                    name);
}

static kvb_status open_bench(refine_command *c, kvb_error *err)
{
    static const forward_progress STOP = {go_on, NULL};
    const eval_inputs *in = &c->e.in;
    const method_column *column = &c->e.with.columns[0];
    const method *by = &c->e.with.items[column->method];
    c->bench = (refine_bench){.m = in->m,
                              .table = &c->table,
                              .strict = column->how->strict,
                              .knots = c->e.with.ratios,
                              .n_knots = (uint32_t)c->e.with.n_ratios,
                              .texts = in->texts,
                              .n_texts = (uint32_t)in->n_texts,
                              .plan = {.n_tokens = (uint32_t)in->n_tokens,
                                       .n_next = (uint32_t)in->n_next,
                                       .batch = (uint32_t)c->e.batch,
                                       .by = &by->m,
                                       .sink = by->sink,
                                       .window = by->window,
                                       .refit = methods_refit(&c->e.with)},
                              .stop = &STOP,
                              .heads_told = c->e.out.quiet ? NULL : show_heads};
    char *log = need_text("%s.cells", c->e.out.name);
    kvb_status status = deal_texts(c, err);
    if (status == KVB_OK) status = check_memory(&c->bench, err);
    if (status == KVB_OK) status = sha256_file_hex(column->how->path, c->table_sha256, err);
    if (status == KVB_OK) status = refuse_formats(column->how->table, column->how->path, err);
    if (status == KVB_OK) status = refine_table_open(&c->table, column->how->table, column->how->path, err);
    if (status == KVB_OK) status = refine_bench_open(&c->bench, log, err);
    free(log);
    return status;
}

// ---- The search ----

// Prints the losses at all ratios, and each as a share of the table's.
static void show_losses(const char *set, const double *now, const double *before, uint32_t n)
{
    fputs(set, stderr);
    for (uint32_t k = 0; k < n; k++) fprintf(stderr, " %.4f (%.3f)", now[k], before[k] != 0 ? now[k] / before[k] : 1);
}

static void show_round(void *context, const refine_progress *p)
{
    refine_bench *b = context;
    fprintf(stderr, "refine: round %u, %.0f evaluations", p->round, p->evaluations);
    if (p->wanted > p->evaluations) fprintf(stderr, " of %.0f", p->wanted); // trying candidates may take more
    show_losses("; KL on calibration", p->calibration, p->calibration_before, b->n_knots);
    show_losses(", on selection", p->selection, p->selection_before, b->n_knots);
    fprintf(stderr, "\n");
}

// Computes the shift that turns the table's budgets into those of another table for the same model and metric.
static kvb_status start_from_table(const refine_command *c, const char *path, double *shift, kvb_error *err)
{
    kvb_table *other = NULL;
    kvb_status status = kvb_table_open(&other, path, NULL, err);
    if (status == KVB_OK) status = refuse_formats(other, path, err);
    if (status != KVB_OK) {
        kvb_table_close(other);
        return status;
    }
    const kvb_info *mine = kvb_table_info(c->e.with.columns[0].how->table);
    const kvb_expectation alike = {.n_layers = mine->n_layers,
                                   .n_kv_heads = mine->n_kv_heads,
                                   .model_sha256 = mine->model_sha256,
                                   .metric = mine->metric};
    status = kvb_table_check(other, &alike, err);
    if (status == KVB_OK) {
        table_content its = table_content_of(other, NULL, &(rank_content){0});
        shift_base to = {its.n_rows, its.n_layers, its.n_kv_heads, its.ratio, its.prune_ratio, NULL, false};
        shifts_to_table(&c->table.base, &to, c->bench.knots, c->bench.n_knots, shift);
    }
    kvb_table_close(other);
    return status;
}

static kvb_status find_starts(refine_command *c, kvb_error *err)
{
    size_t n = (size_t)c->task.n_knots * c->task.n_heads;
    kvb_status status = KVB_OK;
    c->task.starts = c->starts = need((c->candidates.count + 1) * n, sizeof *c->starts, "shifts");
    for (size_t i = 0; i < c->candidates.count && status == KVB_OK; i++)
        status = start_from_table(c, c->candidates.items[i], c->starts + c->task.n_starts++ * n, err);
    if (status == KVB_OK)
        status = refine_bench_start(&c->bench, &c->task, c->starts + c->task.n_starts * n, &c->n_start, err);
    c->task.n_starts += c->n_start > 0;
    return status;
}

static kvb_status search(refine_command *c, kvb_error *err)
{
    const refine_bench *b = &c->bench;
    const model_config *m = &c->e.in.m->config;
    c->task = (refine_task){.n_layers = m->n_layers,
                            .n_heads = m->n_layers * m->n_kv_heads,
                            .n_knots = b->n_knots,
                            .n_texts = b->n_members[SET_CALIBRATION],
                            .n_selection = b->n_members[SET_SELECTION],
                            .heads = !(c->table.options.limits && c->table.limits.levels), // which tie layers
                            .evaluations = (uint32_t)c->evaluations,
                            .measure = refine_bench_losses,
                            .report = c->e.out.quiet ? NULL : show_round,
                            .context = &c->bench};
    kvb_status status = find_starts(c, err);
    return status == KVB_OK ? refine_run(&c->best, &c->task, err) : status;
}

// ---- The result ----

static const char *const SET_NAMES[SET_COUNT] = {"calibration", "selection", "test"};

// Returns the mean KL at each ratio, before or after the search.
static const double *mean_kl(const refine_command *c, refine_set set, bool after)
{
    return c->kl[set] + (after ? c->bench.n_knots : 0);
}

// Returns the KL after the search as a share of that before, at one ratio, with its interval over the set's texts.
static interval share_left(const refine_command *c, refine_set set, uint32_t knot)
{
    size_t n = c->bench.n_members[set], K = c->bench.n_knots;
    const double *before = c->kl[set] + 2 * K + knot * n, *after = before + K * n;
    const double **rows = need(2 * n, sizeof *rows, "texts");
    uint32_t *counts = need(n, sizeof *counts, "texts");
    interval found = {NAN, NAN, NAN};
    for (size_t t = 0; t < n; t++) {
        rows[t] = after + t;
        rows[n + t] = before + t;
        counts[t] = 1;
    }
    if (n) found = interval_ratio(&(value_groups){rows, counts, (uint32_t)n}, rows + n);
    free_all(rows, counts);
    return found;
}

static void add_numbers(cJSON *to, const char *name, const double *values, uint32_t n)
{
    if (values) cJSON_AddItemToObject(to, name, cJSON_CreateDoubleArray(values, (int)n));
}

// Adds what the table says about one set: its texts, and their mean KL before and after.
static void describe_set(const refine_command *c, refine_set set, cJSON *to)
{
    const refine_bench *b = &c->bench;
    cJSON *one = cJSON_AddObjectToObject(to, SET_NAMES[set]), *texts = cJSON_AddArrayToObject(one, "texts");
    for (uint32_t t = 0; t < b->n_members[set]; t++)
        cJSON_AddItemToArray(texts, cJSON_CreateString(b->texts[b->members[set][t]].sha256));
    const double *const losses[SET_COUNT][2] = {{c->best.calibration_before, c->best.calibration},
                                                {c->best.selection_before, c->best.selection}};
    add_numbers(one, "loss_before", losses[set][0], b->n_knots);
    add_numbers(one, "loss", losses[set][1], b->n_knots);
    add_numbers(one, "kl_before", mean_kl(c, set, false), b->n_knots);
    add_numbers(one, "kl", mean_kl(c, set, true), b->n_knots);
}

static cJSON *describe_search(const refine_command *c)
{
    const refine_bench *b = &c->bench;
    cJSON *all = cJSON_CreateObject();
    json_put(all, "from %s start_texts %u evaluations %g rounds %u n_tokens %u n_next %u", c->table_sha256, c->n_start,
             c->best.evaluations, c->best.rounds, b->plan.n_tokens, b->plan.n_next);
    cJSON_AddStringToObject(all, "compute", b->m->device->b->compute);
    if (b->plan.refit) json_put(all, "refit %u", b->plan.refit);
    add_numbers(all, "ratios", b->knots, b->n_knots);
    for (int s = 0; s < SET_COUNT; s++) describe_set(c, (refine_set)s, all);
    return all;
}

static void print_result(const refine_command *c)
{
    printf("mean KL to the full cache\n%8s", "");
    for (int s = 0; s < SET_COUNT; s++)
        if (c->bench.n_members[s]) printf("  %-26s", SET_NAMES[s]);
    printf("\npruned  ");
    for (int s = 0; s < SET_COUNT; s++)
        if (c->bench.n_members[s]) printf("  before    after     ratio ");
    printf("\n");
    for (uint32_t k = 0; k < c->bench.n_knots; k++) {
        printf("%6.4g %%", 100 * c->bench.knots[k]);
        for (int s = 0; s < SET_COUNT; s++)
            if (c->bench.n_members[s])
                printf("  %-8.4f  %-8.4f  %-6.3f", mean_kl(c, s, false)[k], mean_kl(c, s, true)[k],
                       share_left(c, s, k).value);
        interval left = share_left(c, SET_TEST, k);
        if (isfinite(left.low)) printf("  %.3f .. %.3f", left.low, left.high);
        printf("\n");
    }
    if (isfinite(share_left(c, SET_TEST, 0).low))
        printf("after the last ratio: its 95 %% interval over the %u test texts\n", c->bench.n_members[SET_TEST]);
}

// Adds one row per set and ratio, and the KLs of single texts.
static void add_rows(const refine_command *c, results *to)
{
    for (int s = 0; s < SET_COUNT; s++)
        for (uint32_t k = 0; k < c->bench.n_knots; k++) {
            const double *before = mean_kl(c, s, false), *after = mean_kl(c, s, true);
            interval left = share_left(c, s, k);
            cJSON *o = results_row(to);
            json_put(o, "set %s ratio %g kl_before %g kl %g", SET_NAMES[s], c->bench.knots[k], before[k], after[k]);
            results_interval(o, "kl_left", left);
            size_t n = c->bench.n_members[s], K = c->bench.n_knots;
            const double *texts = c->kl[s] + 2 * K + k * n;
            cJSON *d = results_detail(to);
            json_put(d, "set %s ratio %g", SET_NAMES[s], c->bench.knots[k]);
            cJSON_AddItemToObject(d, "kl_before", cJSON_CreateDoubleArray(texts, (int)n));
            cJSON_AddItemToObject(d, "kl", cJSON_CreateDoubleArray(texts + K * n, (int)n));
        }
}

static kvb_status give_refine_results(const refine_command *c, const cJSON *about, kvb_error *err)
{
    results found = results_begin("refine");
    const eval_inputs *in = &c->e.in;
    results_input(&found, "model", in->m->config.name, in->m->sha256);
    results_input(&found, "table", c->e.with.columns[0].how->path, c->table_sha256);
    for (size_t i = 0; i < in->n_texts; i++) results_input(&found, "text", in->texts[i].name, in->texts[i].sha256);
    cJSON_AddItemToObject(found.settings, "refined", cJSON_Duplicate(about, true));
    add_rows(c, &found);
    kvb_status status = results_give(&found, c->e.out.json, c->e.out.csv, err);
    results_free(&found);
    return status;
}

// Prints what the search cost. The first rate is that of a short search, the second that of a long one.
static void say_work(const refine_command *c)
{
    const refine_bench *b = &c->bench;
    double n = (double)b->n_measured, cutting = b->seconds - b->prefill_seconds;
    fprintf(stderr,
            "wrote %s after %.0f evaluations; %.0f cuts measured, %.2f a second, %.2f without the prefills of %u "
            "texts; %llu known from %s.cells\n",
            c->e.out.name, c->best.evaluations, n, b->seconds > 0 ? n / b->seconds : 0, cutting > 0 ? n / cutting : 0,
            b->n_prefills, (unsigned long long)b->n_known, c->e.out.name);
    if (b->n_alone)
        fprintf(stderr, "and %llu cuts of heads alone, %.2f a second\n", (unsigned long long)b->n_alone,
                (double)b->n_alone / b->alone_seconds);
}

// Writes the table with an account of how it was found, and prints what it gains.
static kvb_status write_result(const refine_command *c, kvb_error *err)
{
    const refine_bench *b = &c->bench;
    cJSON *about = describe_search(c);
    kvb_status status = refine_table_write(&c->table, b->knots, b->n_knots, c->best.shift, about, c->e.out.name, err);
    if (status == KVB_OK) status = give_refine_results(c, about, err);
    if (status == KVB_OK && !c->e.out.json) print_result(c);
    if (status == KVB_OK && !c->e.out.quiet) say_work(c);
    cJSON_Delete(about);
    return status;
}

static kvb_status refine(refine_command *c, kvb_error *err)
{
    kvb_status status = open_bench(c, err);
    if (status == KVB_OK) status = search(c, err);
    for (int s = 0; s < SET_COUNT && status == KVB_OK; s++)
        status = refine_bench_judge(&c->bench, (refine_set)s, c->best.shift, &c->kl[s], err);
    if (status == KVB_OK) return write_result(c, err);
    if (status != KVB_INTERRUPTED) return status;
    return kvb_fail(err, KVB_INTERRUPTED, "stopped; nothing is written, and the same command continues");
}

// ---- The command line ----

static int check_refine_options(refine_command *c)
{
    const cli_command *self = c->e.self;
    eval_inputs *in = &c->e.in;
    if (!c->e.out.name) return cli_usage_error(self, "-o is missing: where should the refined table go?");
    if (c->test.count && !c->select.count)
        return cli_usage_error(self, "--test needs --select: texts that choose among what the search finds");
    if (eval_check_lengths(&c->e) != EXIT_DONE) return EXIT_USAGE;
    if (c->e.batch < 1 || c->e.batch > 64 || c->evaluations < 1 || c->evaluations > 1000000)
        return cli_usage_error(self, "--batch: expected 1 to 64; --evaluations: 1 to 1000000");
    in->device = device_find(self, in->backend_name, in->compute);
    return in->device ? EXIT_DONE : EXIT_USAGE;
}

// Puts all texts into one list, so that one pass finds any that is in two sets.
static int gather_operands(refine_command *c, char **operands, size_t n)
{
    c->operands = need(n + c->select.count + c->test.count, sizeof *c->operands, "operands");
    if (methods_is_table(operands[0]) || !methods_is_table(operands[1]))
        return cli_usage_error(c->e.self, "expected a model, then a table (.safetensors), then texts");
    for (size_t i = 0; i < n; i++) c->operands[c->n_operands++] = operands[i];
    for (size_t i = 0; i < c->select.count; i++) c->operands[c->n_operands++] = (char *)(uintptr_t)c->select.items[i];
    for (size_t i = 0; i < c->test.count; i++) c->operands[c->n_operands++] = (char *)(uintptr_t)c->test.items[i];
    c->n_calibration = n - 2;
    c->n_select = c->select.count;
    return EXIT_DONE;
}

static void free_command(refine_command *c)
{
    for (int s = 0; s < SET_COUNT; s++) free(c->kl[s]);
    refine_free(&c->best);
    refine_table_free(&c->table);
    eval_free_inputs(&c->e);
    cli_list_free(&c->select);
    cli_list_free(&c->test);
    cli_list_free(&c->candidates);
    free_all(c->starts, c->operands);
}

static int run_refine(const cli_command *self, int argc, char **argv)
{
    refine_command c = {.e = {.self = self,
                              .with = {.self = self, .sink = UINT64_MAX, .window = UINT64_MAX},
                              .in = EVAL_INPUTS,
                              .batch = 8},
                        .evaluations = 200};
    const cli_option options[] = {
        {"output", 'o', CLI_WRITES(FILE_REFINED_TABLE), &c.e.out.name, "FILE",
         "the refined table to write; FILE.cells keeps results so far, and the same command\ncontinues"},
        {"select", 0, CLI_INPUTS, &c.select, "TEXT", "text to choose among the tables found, repeatable"},
        {"test", 0, CLI_INPUTS, &c.test, "TEXT",
         "text that only judges the result, repeatable. Without --select the texts are dealt\nin turn: search, test, "
         "select, test"},
        {"candidate", 0, CLI_INPUTS, &c.candidates, "TABLE",
         "another table for the same model and metric: its budgets, and those between, are tried\nfirst; repeatable"},
        {"ratio", 'r', CLI_LIST, &c.e.with.ratio_names, "R,...", "ratios to improve (50%,70%,80%,90%,95%)"},
        {"evaluations", 0, CLI_COUNT, &c.evaluations, "N",
         "work on heads alone: three quarters of what N candidates take on all texts of the\nsearch (200)"},
        REFIT_OPTION(c.e.with),
        EVAL_INPUT_OPTIONS(c.e.in),
        {"batch", 0, CLI_COUNT, &c.e.batch, "N", "cuts decoded together (8)"},
        {"threads", 0, CLI_COUNT, &c.e.threads, "N", "OpenMP threads (default: all cores)"},
        RESULTS_OPTIONS(c.e.out),
        {"quiet", 'q', CLI_FLAG, &c.e.out.quiet, NULL, "no progress"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first);
    if (code == EXIT_DONE) code = eval_check_operands(self, argc - first + (int)c.select.count);
    if (code == EXIT_DONE) code = check_refine_options(&c);
    if (code == EXIT_DONE) code = gather_operands(&c, argv + first, (size_t)(argc - first));
    if (code == EXIT_DONE) code = eval_open_table(&c.e, c.operands, c.n_operands, "50%,70%,80%,90%,95%");
    if (code == EXIT_DONE) {
        kvb_error err = {0};
        kvb_status status = refine(&c, &err);
        status = refine_bench_free(&c.bench, status, &err);
        if (status != KVB_OK) code = cli_failed(self, &err);
    }
    free_command(&c);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_refine = {
    "refine",
    "refine MODEL TABLE.safetensors TEXT... -o REFINED.safetensors [OPTION]...",
    "improve a table's budgets by the damage that they really do",
    "Starts from a solved table and moves heads up or down along its columns; totals, nesting and all\nconstraints are "
    "kept. Keys, values, scores and the full cache's predictions of every text are computed once,\nso a candidate "
    "costs one continuation over cut caches, many in a batch. First every head is cut alone, and a\ntable is solved "
    "from what each loses. Budgets on the way there, or to a --candidate, are measured, and from the\nbest of them "
    "four that move towards early or late layers.\n"
    "\n"
    "There are three sets of texts: heads alone are measured on the first (if it has none, on the second's first\n"
    "text), the second chooses among what is tried, and the third only judges. Each line of progress shows the loss at "
    "each ratio on the\n"
    "first two, and its share of the table's loss. After Ctrl-C nothing is written, and the same command\n"
    "resumes. The same texts give the same table, with any number of threads and after any stop.\n"
    "\n"
    "Texts: any text file, .jsonl with contexts, or .npy with token ids; use texts that were not used for any table.\n"
    "\n"
    "Examples:\n"
    "  kvbudget refine model.gguf keydiff.safetensors texts.jsonl -o refined.safetensors\n"
    "  kvbudget refine model.gguf keydiff.safetensors a.txt b.c --select c.txt --test d.txt -o refined.safetensors\n"
    "  kvbudget eval model.gguf keydiff.safetensors refined=refined.safetensors other.txt\n",
    run_refine,
};
