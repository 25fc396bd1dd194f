// kvbudget task: makes tasks with known answers, and finds out which of them the model solves with its full cache.
#include "evaluator/task_cells.h"
#include "formats/atomic_file.h"
#include "formats/file_read.h"
#include "runtime/fail.h"
#include "tools/cli.h"
#include "tools/device.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

typedef struct task_command {
    cli_list tasks, metric_names, allocator_names, policy_names, ratio_names;
    const char *output, *results_path, *haystack_path, *texts_path, *backend_name, *compute;
    uint64_t tokens, count, seed;
    bool answer, verbose, quiet;
    const backend *device;
    model *m;
    char *haystack;
    calib_file texts;
    metric *metrics;
    allocator *allocators;
    policy *policies;
    double *ratios;
    size_t n_allocators;
    task_cell *cells;
    size_t n_cells;
    FILE *results; // CSV
} task_command;

static kvb_status read_haystack(task_command *c, kvb_error *err)
{
    file_view view;
    if (!c->haystack_path) return KVB_OK;
    kvb_status status = file_map(&view, c->haystack_path, err);
    if (status != KVB_OK) return status;
    if (memchr(view.data, '\0', view.size))
        status = kvb_fail(err, KVB_FORMAT, "%s: holds NUL bytes, expected text", c->haystack_path);
    else if (!(c->haystack = strndup((const char *)view.data, view.size)))
        status = kvb_fail(err, KVB_MEMORY, "%s: no memory for its %zu bytes", c->haystack_path, view.size);
    file_unmap(&view);
    return status;
}

// ---- Cells: full cache first, then metrics x allocators x ratios, then policies x allocators x ratios ----

static bool is_adaptive(const allocator *a)
{
    return a->kind == ALLOCATOR_ADA || a->kind == ALLOCATOR_ADA_ORIGINAL || a->kind == ALLOCATOR_ADA_GLOBAL;
}

// Tables serve their own metric; policies take any table, but no allocator that needs scores.
static bool goes_with(const allocator *a, const metric *m)
{
    metric own;
    if (!m) return !is_adaptive(a);
    return a->kind != ALLOCATOR_TABLE ||
           (metric_parse(&own, kvb_table_info(a->table)->metric, NULL) == KVB_OK && strcmp(own.spec, m->spec) == 0);
}

static kvb_status open_methods(task_command *c, char **tables, size_t n_tables, kvb_error *err)
{
    const allocator_shape shape = {c->m->config.n_layers, c->m->config.n_heads, c->m->config.n_kv_heads};
    size_t n_named = c->allocator_names.count ? c->allocator_names.count : 1;
    c->metrics = calloc(c->metric_names.count + 1, sizeof *c->metrics);
    c->policies = calloc(c->policy_names.count + 1, sizeof *c->policies);
    c->allocators = calloc(n_named + n_tables, sizeof *c->allocators);
    if (!c->metrics || !c->policies || !c->allocators) return kvb_fail(err, KVB_MEMORY, "no memory for the methods");
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < c->metric_names.count && status == KVB_OK; i++)
        status = metric_parse(&c->metrics[i], c->metric_names.items[i], err);
    for (size_t i = 0; i < c->policy_names.count && status == KVB_OK; i++)
        status = policy_parse(&c->policies[i], c->policy_names.items[i], err);
    for (size_t i = 0; i < n_named && status == KVB_OK; i++)
        status = allocator_parse(&c->allocators[c->n_allocators++],
                                 c->allocator_names.count ? c->allocator_names.items[i] : "uniform", &shape, err);
    for (size_t i = 0; i < n_tables && status == KVB_OK; i++) {
        allocator *a = &c->allocators[c->n_allocators++];
        status = allocator_open_table(a, tables[i], err);
        const kvb_expectation expected = {.n_layers = shape.n_layers,
                                          .n_heads = shape.n_heads,
                                          .n_kv_heads = shape.n_kv_heads,
                                          .head_dim = c->m->config.head_dim,
                                          .model_sha256 = c->m->sha256};
        if (status == KVB_OK) status = kvb_table_check(a->table, &expected, err);
    }
    return status;
}

static void add_cells(task_command *c, const metric *m, const policy *p)
{
    for (size_t a = 0; a < c->n_allocators; a++)
        for (size_t r = 0; r < c->ratio_names.count && goes_with(&c->allocators[a], m); r++)
            c->cells[c->n_cells++] = (task_cell){
                .p = p, .metric = m ? (uint32_t)(m - c->metrics) : 0, .how = &c->allocators[a], .ratio = c->ratios[r]};
}

static kvb_status list_cells(task_command *c, kvb_error *err)
{
    size_t n = (c->metric_names.count + c->policy_names.count) * c->n_allocators * c->ratio_names.count + 1;
    c->cells = calloc(n, sizeof *c->cells);
    if (!c->cells) return kvb_fail(err, KVB_MEMORY, "no memory for %zu cells", n);
    c->n_cells = 1; // the full cache
    for (size_t i = 0; i < c->metric_names.count; i++) add_cells(c, &c->metrics[i], NULL);
    for (size_t i = 0; i < c->policy_names.count; i++) add_cells(c, NULL, &c->policies[i]);
    return KVB_OK;
}

static const char *method_name(const task_command *c, const task_cell *cell)
{
    return cell->p ? cell->p->spec : cell->how ? c->metrics[cell->metric].spec : "full";
}

static void show_answers(void *context, const task_cell *cell, const task_sample *s, const task_answers *a)
{
    const task_command *c = context;
    for (size_t i = 0; i < a->n && c->verbose; i++) {
        printf("  %s question %zu, %s", s->id, i + 1, method_name(c, cell));
        if (cell->how) printf(" %s %g", cell->how->label, cell->ratio);
        printf(": score %.2f, expected", a->score[i]);
        for (size_t k = 0; k < s->questions[i].n_gold; k++) printf("%s \"%s\"", k ? "," : "", s->questions[i].gold[k]);
        printf(", found \"");
        for (const char *p = a->text[i]; *p; p++) putchar(*p == '\n' ? ' ' : *p);
        printf("\"\n");
    }
}

// A share in per cent, or nothing where there is none.
static void print_share(double sum, size_t n)
{
    if (sum > 0 && n) printf(" %8.2f", 100 * sum / (double)n);
    else printf("%9s", "");
}

static void print_cells(task_command *c, const task *t, double tokens)
{
    printf("%s, %.0f tokens, %zu questions (seed %" PRIu64 ")\n", t->spec, tokens, c->cells[0].n_questions, c->seed);
    if (c->n_cells > 1)
        printf("  %-30s %-14s %6s %8s %8s %7s\n", "metric or policy", "allocator", "ratio", "kept %", "looked %",
               "score");
    for (size_t i = 0; i < c->n_cells; i++) {
        const task_cell *cell = &c->cells[i];
        double score = cell->n_questions ? 100 * cell->score / (double)cell->n_questions : 0;
        printf("  %-30s %-14s %6g", method_name(c, cell), cell->how ? cell->how->label : "", cell->ratio);
        print_share(cell->kept, cell->n_samples);
        print_share(cell->looked, cell->n_samples);
        printf(" %7.2f\n", score);
        if (c->results)
            fprintf(c->results, "\"%s\",%.0f,%" PRIu64 ",%zu,\"%s\",%s,%g,%.6f,%.6f,%.4f\n", t->spec, tokens, c->seed,
                    cell->n_questions, method_name(c, cell), cell->how ? cell->how->label : "", cell->ratio,
                    cell->n_samples ? cell->kept / (double)cell->n_samples : 0,
                    cell->n_samples ? cell->looked / (double)cell->n_samples : 0, score);
    }
    fflush(stdout);
}

static void forget_scores(task_command *c)
{
    for (size_t i = 0; i < c->n_cells; i++) {
        task_cell *cell = &c->cells[i];
        *cell = (task_cell){.p = cell->p, .metric = cell->metric, .how = cell->how, .ratio = cell->ratio};
    }
}

// ---- Samples ----

static kvb_status run_task(task_command *c, const char *spec, FILE *to, kvb_error *err)
{
    task t;
    kvb_status status = task_parse(&t, spec, err);
    if (status != KVB_OK) return status;
    bool texts = task_needs_texts(t.kind) && c->texts_path;
    task_source source = {c->m->tokens, c->seed, c->haystack, texts ? &c->texts : NULL};
    uint64_t count = texts && c->texts.count < c->count ? c->texts.count : c->count;
    const task_listener listener = {show_answers, c};
    double tokens = 0;
    progress bar;
    progress_begin(&bar, t.spec, c->quiet || !c->answer);
    forget_scores(c);
    for (uint64_t i = 0; status == KVB_OK && i < count; i++) {
        task_sample s;
        status = task_make(&s, &t, &source, c->tokens, i, err);
        if (status != KVB_OK) break;
        tokens += (double)s.n_tokens / (double)count;
        if (to) status = task_write_jsonl(to, &t, &s, c->seed, err);
        if (status == KVB_OK && c->answer)
            status =
                task_cells_run(c->m, c->metrics, c->metric_names.count, c->cells, c->n_cells, &t, &s, &listener, err);
        task_sample_free(&s);
        progress_update(&bar, (double)(i + 1), (double)count, "samples");
        if (status == KVB_OK && cli_stop_requested)
            status = kvb_fail(err, KVB_INTERRUPTED, "stopped after %" PRIu64 " samples", i + 1);
    }
    progress_end(&bar, "%s", "");
    if (status == KVB_OK && c->answer) print_cells(c, &t, tokens);
    return status;
}

static kvb_status open_results(task_command *c, atomic_file *file, kvb_error *err)
{
    if (!c->results_path) return KVB_OK;
    kvb_status status = atomic_file_begin(file, c->results_path, err);
    if (status != KVB_OK) return status;
    c->results = file->stream;
    fprintf(c->results, "task,tokens,seed,questions,method,allocator,ratio,kept,looked,score\n");
    return KVB_OK;
}

// Puts a file in place after success, removes what there is of it after a failure.
static kvb_status close_file(atomic_file *file, bool open, kvb_status status, kvb_error *err)
{
    if (open && status == KVB_OK) return atomic_file_commit(file, err);
    if (open) atomic_file_abandon(file);
    return status;
}

static void close_command(task_command *c)
{
    for (size_t i = 0; i < c->n_allocators; i++) allocator_free(&c->allocators[i]);
    free(c->allocators);
    free(c->metrics);
    free(c->policies);
    free(c->cells);
    calib_free(&c->texts);
    free(c->haystack);
    model_free(c->m);
}

static kvb_status run_tasks(task_command *c, char **operands, size_t n, kvb_error *err)
{
    atomic_file samples = {0}, results = {0};
    kvb_status status = model_open(&c->m, operands[0], c->device, err);
    if (status == KVB_OK) status = read_haystack(c, err);
    if (status == KVB_OK && c->texts_path) status = calib_load(&c->texts, c->texts_path, err);
    if (status == KVB_OK) status = open_methods(c, operands + 1, n - 1, err);
    if (status == KVB_OK) status = list_cells(c, err);
    if (status == KVB_OK) status = open_results(c, &results, err);
    if (status == KVB_OK && c->output) status = atomic_file_begin(&samples, c->output, err);
    bool writing = status == KVB_OK && c->output;
    for (size_t i = 0; status == KVB_OK && i < c->tasks.count; i++)
        status = run_task(c, c->tasks.items[i], writing ? samples.stream : NULL, err);
    status = close_file(&samples, writing, status, err);
    status = close_file(&results, c->results != NULL, status, err);
    close_command(c);
    return status;
}

static void list_tasks(void)
{
    for (size_t i = 0; i < task_kind_count; i++) {
        printf("%-16s %s\n", task_name(task_kinds[i]), task_summary(task_kinds[i]));
        for (const task_parameter *p = task_parameters(task_kinds[i]); p->name; p++)
            printf("  :%s=%u (%u to %u) %s\n", p->name, p->value, p->low, p->high, p->meaning);
    }
}

static void list_policies(void)
{
    printf("\nPolicies:\n");
    for (size_t i = 0; i < policy_kind_count; i++) {
        printf("%-16s %s\n", policy_name(policy_kinds[i]), policy_summary(policy_kinds[i]));
        for (const scorer_parameter *p = policy_parameters(policy_kinds[i]); p->name; p++)
            printf("  :%s=%g (%g to %g%s%s) %s\n", p->name, p->value, p->low, p->high, p->choices ? ", or " : "",
                   p->choices ? p->choices : "", p->meaning);
    }
}

static int read_ratios(const cli_command *self, task_command *c)
{
    c->ratios = calloc(c->ratio_names.count + 1, sizeof *c->ratios);
    if (!c->ratios) return cli_failed(self, &(kvb_error){KVB_MEMORY, "no memory for the ratios"});
    for (size_t i = 0; i < c->ratio_names.count; i++) {
        char *end;
        c->ratios[i] = strtod(c->ratio_names.items[i], &end);
        if (*end || end == c->ratio_names.items[i] || !(c->ratios[i] > 0 && c->ratios[i] < 1))
            return cli_usage_error(self, "--ratio: expected a pruned share between 0 and 1, found '%s'",
                                   c->ratio_names.items[i]);
    }
    return EXIT_DONE;
}

static int check_usage(const cli_command *self, task_command *c, int n_operands)
{
    bool methods = c->metric_names.count || c->policy_names.count;
    if (n_operands < 1 || c->tasks.count == 0) return cli_usage_error(self, "expected: kvbudget %s", self->synopsis);
    if (!c->output && !c->answer) return cli_usage_error(self, "nothing to do: give -o FILE.jsonl, --answer, or both");
    if (c->count == 0) return cli_usage_error(self, "--count: expected at least 1");
    if ((methods || n_operands > 1 || c->allocator_names.count || c->results_path) && !c->answer)
        return cli_usage_error(self, "tables, metrics, allocators, policies and results need --answer");
    if (methods != (c->ratio_names.count > 0))
        return cli_usage_error(self, "--ratio goes with --metric or --policy, and the other way round");
    c->device = device_find(self, c->backend_name, c->compute);
    return c->device ? EXIT_DONE : EXIT_USAGE;
}

static int run(const cli_command *self, int argc, char **argv)
{
    task_command c = {.backend_name = "cpu", .compute = "f32", .count = 20, .seed = 1};
    bool list = false;
    const cli_option options[] = {
        {"task", 't', CLI_LIST, &c.tasks, "TASK",
         "a task, name[:parameter=value...]; may be repeated. --list shows all"},
        {"tokens", 'n', CLI_COUNT, &c.tokens, "N", "length of the contexts; for qa, 0 (the default) takes whole texts"},
        {"count", 'c', CLI_COUNT, &c.count, "N", "samples of each task, default 20"},
        {"seed", 's', CLI_COUNT, &c.seed, "N", "of all draws, default 1"},
        {"output", 'o', CLI_TEXT, &c.output, "FILE", "write the samples as calibration data (.jsonl)"},
        {"answer", 'a', CLI_FLAG, &c.answer, NULL, "let the model answer with its full cache, and print the scores"},
        {"metric", 'm', CLI_LIST, &c.metric_names, "METRIC",
         "answer after evicting by this metric as well; may be repeated"},
        {"policy", 'p', CLI_LIST, &c.policy_names, "POLICY",
         "answer under this policy as well; may be repeated. --list shows all"},
        {"allocator", 0, CLI_LIST, &c.allocator_names, "NAME",
         "tokens per head: uniform (the default), pyramid, ada, ...; as in eval"},
        {"ratio", 'r', CLI_LIST, &c.ratio_names, "RATIO", "pruned share of the context; may be repeated"},
        {"results", 0, CLI_TEXT, &c.results_path, "FILE", "write the scores as CSV"},
        {"verbose", 'v', CLI_FLAG, &c.verbose, NULL, "with --answer: print every answer"},
        {"haystack", 0, CLI_TEXT, &c.haystack_path, "FILE", "hide needles in this text instead of noise sentences"},
        {"texts", 0, CLI_TEXT, &c.texts_path, "FILE", "calibration data with answers, for the task qa"},
        {"backend", 'b', CLI_TEXT, &c.backend_name, "NAME", "cpu, or ref (plain C, slow, the judge)"},
        {"compute", 0, CLI_TEXT, &c.compute, "KIND", DEVICE_COMPUTE_HELP},
        {"quiet", 'q', CLI_FLAG, &c.quiet, NULL, "no progress"},
        {"list", 'l', CLI_FLAG, &list, NULL, "list the tasks and their parameters"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first);
    kvb_error err = {0};
    if (code == EXIT_DONE && list) {
        list_tasks();
        list_policies();
    } else if (code == EXIT_DONE) {
        code = check_usage(self, &c, argc - first);
        if (code == EXIT_DONE) code = read_ratios(self, &c);
        if (code == EXIT_DONE) cli_catch_signals();
        if (code == EXIT_DONE && run_tasks(&c, argv + first, (size_t)(argc - first), &err) != KVB_OK)
            code = cli_failed(self, &err);
    }
    cli_list *const lists[] = {&c.tasks, &c.metric_names, &c.allocator_names, &c.policy_names, &c.ratio_names};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) cli_list_free(lists[i]);
    free(c.ratios);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_task = {
    .name = "task",
    .synopsis = "task MODEL.gguf [TABLE.safetensors]... --task TASK --tokens N [-o FILE.jsonl] [--answer] [OPTION]...",
    .summary = "make tasks with known answers: needles, variable tracing, word counts, key-value pairs",
    .details =
        "Makes contexts, questions and right answers in the manner of RULER (arXiv 2404.06654), at any length, from a\n"
        "seed: the same seed gives the same bytes. Written with -o, they are calibration data that `profile` takes;\n"
        "with --answer the model answers them with its full cache, greedily, and the score (0 to 100, as RULER\n"
        "scores) says whether a task is worth measuring eviction with.\n"
        "\n"
        "With --metric, --policy and --ratio it also answers with less: the context is evicted before any question is\n"
        "seen, by every metric and allocator (tables serve their own metric), or under policies that act at every\n"
        "step, whose capacity per head an allocator or any table gives. A policy's questions go token by token.\n"
        "`kept` is the share of the context's entries in the cache, `looked` what a policy attends to per step.\n"
        "\n"
        "Examples:\n"
        "  kvbudget task --list\n"
        "  kvbudget task model.gguf --task niah_single --task vt --tokens 2000 --count 20 --answer\n"
        "  kvbudget task model.gguf --task niah_multikey:keys=8:questions=4 --tokens 4000 -o needles.jsonl\n"
        "  kvbudget task model.gguf snapkv.safetensors --task niah_single --tokens 1000 --answer --metric "
        "snapkv:kvpress \\\n"
        "    --allocator uniform --allocator ada --policy morphkv --policy quest --ratio 0.5 --ratio 0.8\n"
        "  kvbudget task model.gguf --task qa --texts calib-data/narrative-en.jsonl --answer --verbose\n",
    .run = run,
};
