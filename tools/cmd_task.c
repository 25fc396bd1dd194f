// kvbudget task: makes tasks with known answers, and finds out which of them the model solves with its full cache.
#include "evaluator/task_run.h"
#include "formats/atomic_file.h"
#include "formats/file_read.h"
#include "runtime/fail.h"
#include "tools/cli.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

typedef struct task_command {
    cli_list tasks;
    const char *output, *haystack_path, *texts_path, *backend_name;
    uint64_t tokens, count, seed;
    bool answer, verbose, quiet;
    model *m;
    char *haystack;
    calib_file texts;
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

static void show_answers(const task_sample *s, const task_answers *a)
{
    for (size_t i = 0; i < a->n; i++) {
        printf("  %s question %zu: score %.2f, expected", s->id, i + 1, a->score[i]);
        for (size_t k = 0; k < s->questions[i].n_gold; k++) printf("%s \"%s\"", k ? "," : "", s->questions[i].gold[k]);
        printf(", found \"");
        for (const char *p = a->text[i]; *p; p++) putchar(*p == '\n' ? ' ' : *p);
        printf("\"\n");
    }
}

// The model's answers over the full cache.
static kvb_status answer_sample(const task_command *c, const task *t, const task_sample *s, double *sum, size_t *n,
                                kvb_error *err)
{
    enum { ROWS = 512 };
    int32_t *ids = NULL;
    uint32_t n_ids = 0, extra = 0;
    session *run = NULL;
    kv_cache *cache = NULL;
    task_answers answers = {0};
    kvb_status status = task_context_ids(&ids, &n_ids, c->m, s, err);
    if (status == KVB_OK) status = task_positions(&extra, c->m, t, s, err);
    session_plan plan = {.max_tokens = n_ids, .max_new = extra, .max_rows = extra > ROWS ? extra : ROWS};
    if (status == KVB_OK) status = session_open(&run, c->m, &plan, err);
    if (status == KVB_OK) status = session_prefill(run, ids, n_ids, NULL, NULL, err);
    if (status == KVB_OK) status = session_cache(run, NULL, 0, &cache, err);
    if (status == KVB_OK)
        status = task_answer(&answers, run->decode, c->m, cache, t, s, NULL, plan.max_rows / extra, err);
    for (size_t i = 0; i < answers.n; i++) *sum += answers.score[i];
    *n += answers.n;
    if (c->verbose) show_answers(s, &answers);
    task_answers_free(&answers);
    kv_cache_close(cache);
    session_close(run);
    free(ids);
    return status;
}

static kvb_status run_task(task_command *c, const char *spec, FILE *to, kvb_error *err)
{
    task t;
    kvb_status status = task_parse(&t, spec, err);
    if (status != KVB_OK) return status;
    bool texts = task_needs_texts(t.kind);
    task_source source = {c->m->tokens, c->seed, c->haystack, texts && c->texts_path ? &c->texts : NULL};
    uint64_t count = source.texts && c->texts.count < c->count ? c->texts.count : c->count;
    double sum = 0, tokens = 0;
    size_t n = 0;
    progress bar;
    progress_begin(&bar, t.spec, c->quiet || !c->answer);
    for (uint64_t i = 0; status == KVB_OK && i < count; i++) {
        task_sample s;
        status = task_make(&s, &t, &source, c->tokens, i, err);
        if (status != KVB_OK) break;
        tokens += (double)s.n_tokens / (double)count;
        if (to) status = task_write_jsonl(to, &t, &s, c->seed, err);
        if (status == KVB_OK && c->answer) status = answer_sample(c, &t, &s, &sum, &n, err);
        task_sample_free(&s);
        progress_update(&bar, (double)(i + 1), (double)count, "samples");
        if (cli_stop_requested) status = kvb_fail(err, KVB_INTERRUPTED, "stopped after %" PRIu64 " samples", i + 1);
    }
    progress_end(&bar, "%s", "");
    if (status == KVB_OK && c->answer)
        printf("%-28s %6.0f tokens  %4zu questions  score %6.2f\n", t.spec, tokens, n, n ? 100 * sum / (double)n : 0);
    return status;
}

static kvb_status run_tasks(task_command *c, const char *model_path, kvb_error *err)
{
    atomic_file file = {0};
    kvb_status status = model_open(&c->m, model_path, backend_find(c->backend_name), err);
    if (status == KVB_OK) status = read_haystack(c, err);
    if (status == KVB_OK && c->texts_path) status = calib_load(&c->texts, c->texts_path, err);
    if (status == KVB_OK && c->output) status = atomic_file_begin(&file, c->output, err);
    bool writing = status == KVB_OK && c->output;
    for (size_t i = 0; status == KVB_OK && i < c->tasks.count; i++)
        status = run_task(c, c->tasks.items[i], writing ? file.stream : NULL, err);
    if (writing && status == KVB_OK) status = atomic_file_commit(&file, err);
    else if (writing) atomic_file_abandon(&file);
    calib_free(&c->texts);
    free(c->haystack);
    model_free(c->m);
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

static int run(const cli_command *self, int argc, char **argv)
{
    task_command c = {.backend_name = "cpu", .count = 20, .seed = 1};
    bool list = false;
    const cli_option options[] = {
        {"task", 't', CLI_LIST, &c.tasks, "TASK",
         "a task, name[:parameter=value...]; may be repeated. --list shows all"},
        {"tokens", 'n', CLI_COUNT, &c.tokens, "N", "length of the contexts; for qa, 0 (the default) takes whole texts"},
        {"count", 'c', CLI_COUNT, &c.count, "N", "samples of each task, default 20"},
        {"seed", 's', CLI_COUNT, &c.seed, "N", "of all draws, default 1"},
        {"output", 'o', CLI_TEXT, &c.output, "FILE", "write the samples as calibration data (.jsonl)"},
        {"answer", 'a', CLI_FLAG, &c.answer, NULL, "let the model answer with its full cache, and print the scores"},
        {"verbose", 'v', CLI_FLAG, &c.verbose, NULL, "with --answer: print every answer"},
        {"haystack", 0, CLI_TEXT, &c.haystack_path, "FILE", "hide needles in this text instead of noise sentences"},
        {"texts", 0, CLI_TEXT, &c.texts_path, "FILE", "calibration data with answers, for the task qa"},
        {"backend", 'b', CLI_TEXT, &c.backend_name, "NAME", "cpu, or ref (plain C, slow, the judge)"},
        {"quiet", 'q', CLI_FLAG, &c.quiet, NULL, "no progress"},
        {"list", 'l', CLI_FLAG, &list, NULL, "list the tasks and their parameters"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first);
    if (code != EXIT_DONE) {
        cli_list_free(&c.tasks);
        return code < 0 ? EXIT_DONE : code;
    }
    kvb_error err = {0};
    if (list) list_tasks();
    else if (argc - first != 1 || c.tasks.count == 0)
        code = cli_usage_error(self, "expected: kvbudget %s", self->synopsis);
    else if (!c.output && !c.answer)
        code = cli_usage_error(self, "nothing to do: give -o FILE.jsonl, --answer, or both");
    else if (c.count == 0) code = cli_usage_error(self, "--count: expected at least 1");
    else if (!backend_find(c.backend_name)) code = cli_usage_error(self, "--backend: there is no '%s'", c.backend_name);
    else {
        cli_catch_signals();
        if (run_tasks(&c, argv[first], &err) != KVB_OK) code = cli_failed(self, &err);
    }
    cli_list_free(&c.tasks);
    return code;
}

const cli_command cmd_task = {
    .name = "task",
    .synopsis = "task MODEL.gguf --task TASK --tokens N [-o FILE.jsonl] [--answer] [OPTION]...",
    .summary = "make tasks with known answers: needles, variable tracing, word counts, key-value pairs",
    .details =
        "Makes contexts, questions and right answers in the manner of RULER (arXiv 2404.06654), at any length, from a\n"
        "seed: the same seed gives the same bytes. Written with -o, they are calibration data that `profile` takes;\n"
        "with --answer the model answers them with its full cache, greedily, and the score (0 to 100, as RULER\n"
        "scores) says whether a task is worth measuring eviction with.\n"
        "\n"
        "Examples:\n"
        "  kvbudget task --list\n"
        "  kvbudget task model.gguf --task niah_single --task vt --tokens 2000 --count 20 --answer\n"
        "  kvbudget task model.gguf --task niah_multikey:keys=8:questions=4 --tokens 4000 -o needles.jsonl\n"
        "  kvbudget task model.gguf --task qa --texts calib-data/narrative-en.jsonl --answer --verbose\n",
    .run = run,
};
