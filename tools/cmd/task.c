// kvbudget task: makes tasks with known answers, and scores the model on them with its full cache and with less.
#include "evaluator/task_study.h"
#include "formats/atomic_file.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "tools/cmd/methods.h"
#include "tools/cmd/opened_model.h"
#include "tools/device.h"
#include "tools/report/compare_report.h"
#include <string.h>

// The command line in three parts, and what was opened from it.
typedef struct task_command {
    // What is asked, and who answers:
    cli_list tasks;
    methods with;
    const char *haystack_path, *texts_path, *backend_name, *compute;
    uint64_t tokens, count, seed;
    // How:
    uint64_t threads;
    bool answer, chat, special;
    // What to write:
    struct {
        const char *samples, *results, *csv;
        bool quiet, json;
    } out;
    // Opened:
    const backend *device;
    opened_model opened;
    char *haystack;
    calib_file texts;
    task_report report;
    char *log_path; // NULL: none
} task_command;

// ---- Samples ----

// Makes, writes and answers every sample of a task; `tokens` receives their mean length.
static kvb_status run_samples(task_command *c, const task *t, task_study *study, FILE *to, double *tokens,
                              kvb_error *err)
{
    const task_source source = {c->opened.text.tokens, c->seed, c->haystack,
                                t->kind->whole_text && c->texts_path ? &c->texts : NULL};
    kvb_status status = KVB_OK;
    progress bar;
    progress_begin(&bar, t->spec, c->out.quiet || !c->answer);
    for (uint32_t i = 0; status == KVB_OK && i < study->n_samples; i++) {
        task_sample s;
        status = task_make(&s, t, &source, c->tokens, i, err);
        if (status != KVB_OK) break;
        *tokens += (double)s.n_tokens / study->n_samples;
        if (to) status = task_write_jsonl(to, t, &s, c->seed, err);
        if (status == KVB_OK && c->answer) status = task_study_add(study, i, &s, err);
        task_sample_free(&s);
        if (status == KVB_OK && i + 1 == study->n_samples) status = task_study_answer(study, err);
        // A sample that was only prefilled counts as half done.
        progress_update(&bar, c->answer ? ((double)(i + 1) + (double)study->n_done) / 2 : i + 1, study->n_samples,
                        "samples");
        if (status == KVB_OK && cli_stop_requested && i + 1 < study->n_samples)
            status = kvb_fail(err, KVB_INTERRUPTED, "stopped after %zu samples%s", study->n_done,
                              study->log ? "; the same command continues" : "");
    }
    if (status != KVB_OK) progress_end(&bar, "%s", status == KVB_INTERRUPTED ? "stopped" : "failed");
    else if (study->n_resumed)
        progress_end(&bar, "%zu answered, %zu more from %s", study->n_answered, study->n_resumed, study->log);
    else progress_end(&bar, "%u samples", study->n_samples);
    return status;
}

static kvb_status run_task(task_command *c, const char *spec, FILE *to, kvb_error *err)
{
    task t;
    kvb_status status = task_parse(&t, spec, err);
    if (status != KVB_OK) return status;
    bool texts = t.kind->whole_text && c->texts_path;
    uint64_t count = texts && c->texts.count < c->count ? c->texts.count : c->count;
    task_study study = {.m = c->opened.m,
                        .text = &c->opened.text,
                        .t = &t,
                        .seed = c->seed,
                        .n_samples = (uint32_t)count,
                        .methods = methods_list(&c->with),
                        .log = c->log_path,
                        .refit = methods_refit(&c->with)};
    double tokens = 0;
    status = task_study_open(&study, c->with.ratios, c->with.n_ratios, err);
    if (status == KVB_OK) status = run_samples(c, &t, &study, to, &tokens, err);
    if (status == KVB_OK && c->answer) status = task_report_add(&c->report, &study, tokens, err);
    task_study_close(&study);
    return status;
}

static void close_command(task_command *c)
{
    results_free(&c->report.found);
    cli_list_free(&c->tasks);
    methods_free(&c->with);
    calib_free(&c->texts);
    free_all(c->haystack, c->log_path);
    opened_model_close(&c->opened);
}

static kvb_status refuse_oracle(const task_command *c, kvb_error *err)
{
    for (size_t i = 0; i < c->with.n_allocators; i++)
        if (c->with.allocators[i].kind == ALLOCATOR_ORACLE)
            return kvb_fail(err, KVB_ARGUMENT,
                            "allocator oracle needs the importance of what follows, which a task does not record; "
                            "compare with it in kvbudget eval");
    return KVB_OK;
}

static kvb_status run_tasks(task_command *c, char **operands, size_t n, kvb_error *err)
{
    // Only the full cache answers, unless the command line asks for more.
    bool bare = !c->with.allocator_names.count && !c->with.ratio_names.count;
    atomic_file samples = {0};
    kvb_status status = opened_model_open(&c->opened, operands[0], c->device, NULL, err);
    if (status == KVB_OK && c->haystack_path) status = cli_read_text(&c->haystack, NULL, c->haystack_path, err);
    if (status == KVB_OK && c->texts_path) status = calib_load(&c->texts, c->texts_path, err);
    if (status == KVB_OK) status = methods_open(&c->with, c->opened.m, operands + 1, n - 1, bare, err);
    if (status == KVB_OK) status = methods_set_texts(&c->with, &c->opened.text, c->chat, c->special, err);
    if (status == KVB_OK) status = refuse_oracle(c, err);
    c->report = (task_report){.m = c->opened.m,
                              .device = c->device,
                              .with = methods_compared(&c->with),
                              .seed = c->seed,
                              .print = !c->out.json,
                              .quiet = c->out.quiet};
    if (status == KVB_OK) task_report_open(&c->report);
    if (c->out.results) c->log_path = need_text("%s.cells", c->out.results);
    if (status == KVB_OK && c->out.samples) status = atomic_file_begin(&samples, c->out.samples, err);
    for (size_t i = 0; status == KVB_OK && i < c->tasks.count; i++)
        status = run_task(c, c->tasks.items[i], samples.stream, err);
    if (status == KVB_OK && samples.stream) status = atomic_file_commit(&samples, err);
    atomic_file_abandon(&samples);
    if (status == KVB_OK) status = results_give(&c->report.found, c->out.json, c->out.csv, err);
    if (status == KVB_OK && c->out.results) status = compared_write(&c->report.found, c->out.results, err);
    if (status == KVB_OK && c->out.results && !c->out.quiet)
        fprintf(stderr, "%s.json, .csv%s are written; %s.cells lets the same command continue\n", c->out.results,
                c->with.n_columns ? " and .svg" : "", c->out.results);
    return status;
}

static void list_kind(const spec_row *row, const char *summary)
{
    printf("%-16s %s\n", row->name, summary);
    for (const spec_parameter *p = row->parameters; p->name; p++)
        printf("  :%s=%g (%g to %g%s%s) %s\n", p->name, p->value, p->low, p->high, p->choices ? ", or " : "",
               p->choices ? p->choices : "", p->meaning);
}

static void list_kinds(void)
{
    for (size_t i = 0; i < task_kind_count; i++) list_kind(&task_kinds[i].spec, task_kinds[i].summary);
    printf("\nPolicies:\n");
    for (size_t i = 0; i < policy_kind_count; i++) list_kind(&policy_kinds[i]->spec, policy_kinds[i]->summary);
}

static int check_usage(const cli_command *self, task_command *c, char **operands, int n_operands)
{
    const methods *w = &c->with;
    bool compares = n_operands > 1 || w->metric_names.count || w->policy_names.count || w->allocator_names.count ||
                    w->ratio_names.count;
    if (n_operands < 1) return cli_usage_error(self, "a model is needed: kvbudget %s", self->synopsis);
    for (int i = 1; i < n_operands; i++)
        if (!methods_is_table(operands[i]))
            return cli_usage_error(self, "'%s' is no table (.safetensors); tasks are named by --task", operands[i]);
    if (c->tasks.count == 0)
        return cli_usage_error(self, "no task is given: --task TASK; `kvbudget task --list` shows them");
    if (c->count == 0 || c->count > 1 << 20) return cli_usage_error(self, "--count: expected 1 to 1048576 samples");
    if (c->tokens > 1 << 24) return cli_usage_error(self, "--tokens: expected at most 16777216");
    if (compares || c->out.results || c->out.json || c->out.csv || !c->out.samples) c->answer = true;
    c->device = device_find(self, c->backend_name, c->compute);
    return c->device ? EXIT_DONE : EXIT_USAGE;
}

static int task_main(const cli_command *self, int argc, char **argv)
{
    task_command c = {.with = {.self = self, .sink = UINT64_MAX, .window = UINT64_MAX},
                      .backend_name = "cpu",
                      .compute = "f32",
                      .count = 20,
                      .seed = 1};
    bool list = false;
    const cli_option options[] = {
        {"task", 'k', CLI_LIST, &c.tasks, "TASK",
         "a task, name[:parameter=value...]; may be repeated. --list shows all"},
        {"tokens", 't', CLI_COUNT, &c.tokens, "N",
         "length with question and answer (RULER's max_seq_length); for qa the length of the\ncontext, and 0 (default) "
         "takes whole texts"},
        {"count", 'c', CLI_COUNT, &c.count, "N", "samples of each task (20)"},
        {"seed", 's', CLI_SEED, &c.seed, "N", "seed of all draws (1)"},
        METHODS_OPTIONS(c.with),
        REFIT_OPTION(c.with),
        {"results", 'o', CLI_WRITES(FILE_RESULTS_SET), &c.out.results, "NAME",
         "write NAME.json, NAME.csv and NAME.svg; NAME.cells keeps results so far, and the same\ncommand continues "
         "where it was stopped"},
        {"output", 0, CLI_WRITES(FILE_LINES), &c.out.samples, "FILE.jsonl",
         "write the samples as calibration data; they are answered only with --answer or when\nthere is something to "
         "compare"},
        {"answer", 0, CLI_FLAG, &c.answer, NULL, "answer the samples even with --output"},
        {"haystack", 0, CLI_INPUT, &c.haystack_path, "FILE",
         "the text that niah_single_2, niah_multikey_1 and others hide needles in"},
        {"texts", 0, CLI_INPUT, &c.texts_path, "FILE", "calibration data with answers, for the task qa"},
        {"chat", 0, CLI_FLAG, &c.chat, NULL,
         "wrap texts in the model's own chat template (default: as the tables were calibrated)"},
        {"special", 0, CLI_FLAG, &c.special, NULL,
         "take \"<|im_start|>\" and the like in texts as the tokens that they name (default: as the\ntables)"},
        {"backend", 'b', CLI_TEXT, &c.backend_name, "NAME", "cpu, or ref (plain C, slow, the reference)"},
        {"compute", 0, CLI_TEXT, &c.compute, "KIND", DEVICE_COMPUTE_HELP},
        {"threads", 0, CLI_COUNT, &c.threads, "N", "OpenMP threads (default: all cores)"},
        RESULTS_OPTIONS(c.out),
        {"quiet", 'q', CLI_FLAG, &c.out.quiet, NULL, "no progress and no names of files"},
        {"list", 'l', CLI_FLAG, &list, NULL, "list the tasks and their parameters"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first);
    kvb_error err = {0};
    if (code == EXIT_DONE && list) {
        list_kinds();
    } else if (code == EXIT_DONE) {
        code = check_usage(self, &c, argv + first, argc - first);
        if (code == EXIT_DONE) code = methods_read_ratios(&c.with);
        if (code == EXIT_DONE) cli_catch_signals();
        if (code == EXIT_DONE) code = device_take_threads(self, c.threads);
        if (code == EXIT_DONE && run_tasks(&c, argv + first, (size_t)(argc - first), &err) != KVB_OK)
            code = cli_failed(self, &err);
    }
    close_command(&c);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_task = {
    .name = "task",
    .synopsis = "task MODEL [[NAME=]TABLE.safetensors]... --task TASK --tokens N [-o NAME] [OPTION]...",
    .summary = "ask for what long contexts hold: needles, variables, word counts, key-value pairs, questions",
    .details =
        "Makes RULER's tasks (arXiv 2404.06654) at any length from a seed, in words and layout as NVIDIA's generator,\n"
        "but with its own draws: the same seed gives the same bytes. The model answers them greedily with\n"
        "its full cache; the score (0 to 100, as kvpress scores) says whether the task can measure eviction at all.\n"
        "--output writes them as calibration data for `profile`.\n"
        "\n"
        "With tables, --metric, --policy, --allocator or --ratio it also answers with less cache: tokens are evicted\n"
        "before any question is seen, by every metric and allocator (tables are for their own metric), or under\n"
        "policies that act at every step, with a capacity per head from an allocator or any table. A policy's\n"
        "questions are processed token by token. From five samples on, scores have 95 % intervals over the samples, "
        "and\nso has the paired difference to the uniform allocator.\n"
        "`kept` is the share of the context's entries in the cache, `looked` what a policy attends to per step.\n"
        "\n"
        "Examples:\n"
        "  kvbudget task --list\n"
        "  kvbudget task model.gguf --task niah_single_1 --task vt:hops=1 --tokens 1000\n"
        "  kvbudget task model.gguf snapkv.safetensors --task niah_single_1 --tokens 1000 --allocator uniform \\\n"
        "    --allocator ada --ratio 0.5,0.8 -o scores\n"
        "  kvbudget task model.gguf --task niah_single_1 --tokens 1000 --metric none --policy morphkv --policy quest "
        "\\\n"
        "    --allocator uniform --ratio 0.8\n"
        "  kvbudget task model.gguf --task niah_multikey_1:keys=8:questions=4 --tokens 4096 \\\n"
        "    --haystack book.txt --output needles.jsonl\n"
        "  kvbudget task model.gguf --task qa --texts calib-data/narrative-en.jsonl\n",
    .run = task_main,
};
