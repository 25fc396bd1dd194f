// kvbudget eval: really evicts tokens, and measures what that costs.
#include "formats/need.h"
#include "tools/cmd/eval_command.h"
#include "tools/device.h"
#include "tools/report/compare_report.h"
#include "tools/report/words.h"
#include <stdio.h>
#include <stdlib.h>

static bool show_progress(void *bar, double done, double total)
{
    progress_update(bar, done, total, "runs");
    return !cli_stop_requested;
}

static int check_eval_options(eval_command *e)
{
    if (eval_check_lengths(e) != EXIT_DONE) return EXIT_USAGE;
    if (e->batch > 64) return cli_usage_error(e->self, "--batch: expected at most 64");
    e->in.device = device_find(e->self, e->in.backend_name, e->in.compute);
    return e->in.device ? EXIT_DONE : EXIT_USAGE;
}

static void print_rate(const sweep *s)
{
    size_t n_resumed = s->n_cells - s->n_measured;
    double seconds = s->prefill_seconds + s->cell_seconds;
    if (!s->n_measured) return;
    fprintf(stderr,
            "%zu %s in %.1f s (%.2f a second, %.3f s each behind the prefill); prefill, scores and full cache %.1f s "
            "for all of them, scorers %.1f s of it",
            s->n_measured, plural(s->n_measured, "run", "runs"), seconds, (double)s->n_measured / seconds,
            s->cell_seconds / (double)s->n_measured, s->prefill_seconds, s->score_seconds);
    if (s->o.refit) fprintf(stderr, "; refitting %.1f s", s->refit_seconds);
    if (n_resumed) fprintf(stderr, "; %zu more from %s", n_resumed, s->o.log);
    fprintf(stderr, "\n");
}

// Prints and writes the results that the command line asks for.
static kvb_status report_results(const eval_command *e, const eval_report *r, kvb_error *err)
{
    const char *name = e->out.name;
    if (!e->out.json) eval_report_print(r);
    if (!e->out.json && !e->out.csv && !name) return KVB_OK;
    results found = eval_report_results(r);
    kvb_status status = results_give(&found, e->out.json, e->out.csv, err);
    if (status == KVB_OK && name) status = compared_write(&found, name, err);
    results_free(&found);
    if (status == KVB_OK && name && !e->out.quiet)
        fprintf(stderr, "%s.json, .csv and .svg are written; %s.cells lets the same command continue\n", name, name);
    return status;
}

static kvb_status measure(const eval_command *e, sweep *s, kvb_error *err)
{
    progress bar;
    sweep_watch watch = {show_progress, &bar};
    kvb_status status = sweep_open(s, e->with.ratios, e->with.n_ratios, err);
    if (status != KVB_OK) return status;
    progress_begin(&bar, "eval", e->out.quiet);
    status = sweep_run(s, &watch, err);
    if (status == KVB_OK)
        progress_end(&bar, "%zu %s: %zu %s, %zu %s with metrics and policies, %zu %s", s->n_cells,
                     plural(s->n_cells, "run", "runs"), e->in.n_texts, plural(e->in.n_texts, "text", "texts"),
                     e->with.n_columns, plural(e->with.n_columns, "allocator", "allocators"), e->with.n_ratios,
                     plural(e->with.n_ratios, "ratio", "ratios"));
    else progress_end(&bar, "%s", status == KVB_INTERRUPTED ? "stopped" : "failed");
    if (status == KVB_OK && !e->out.quiet) print_rate(s);
    return status;
}

static kvb_status run_sweep(const eval_command *e, kvb_error *err)
{
    char *log = e->out.name ? need_text("%s.cells", e->out.name) : NULL;
    sweep s = {.m = e->in.m,
               .o = {(uint32_t)e->in.n_tokens, (uint32_t)e->in.n_next, e->batch ? (uint32_t)e->batch : 4, log,
                     e->out.kept, methods_refit(&e->with)},
               .texts = e->in.texts,
               .n_texts = (uint32_t)e->in.n_texts,
               .methods = methods_list(&e->with)};
    sweep_summary *rows = NULL;
    eval_report r = {.s = &s, .device = e->in.device, .with = methods_compared(&e->with)};
    kvb_status status = measure(e, &s, err);
    if (status == KVB_OK) r.rows = rows = sweep_summarize(&s, &r.n_rows);
    if (status == KVB_OK) status = report_results(e, &r, err);
    free(rows);
    sweep_close(&s);
    free(log);
    return status;
}

static int run_eval(const cli_command *self, int argc, char **argv)
{
    eval_command e = {
        .self = self, .with = {.self = self, .sink = UINT64_MAX, .window = UINT64_MAX}, .in = EVAL_INPUTS};
    const cli_option options[] = {
        {"output", 'o', CLI_WRITES(FILE_RESULTS_SET), &e.out.name, "NAME",
         "write NAME.json, NAME.csv and NAME.svg; NAME.cells keeps results so far, and the same\ncommand continues "
         "where it was stopped"},
        METHODS_OPTIONS(e.with),
        EVAL_INPUT_OPTIONS(e.in),
        {"pre", 0, CLI_TEXT, &e.in.pre, "NAME", "split words as this pre-tokenizer does instead of the file's"},
        REFIT_OPTION(e.with),
        {"dump-kept", 0, CLI_WRITES(FILE_LINES), &e.out.kept, "FILE",
         "write the kept positions of every run, as JSON lines; measures all runs again"},
        {"batch", 0, CLI_COUNT, &e.batch, "N", "runs decoded together (4)"},
        {"threads", 0, CLI_COUNT, &e.threads, "N", "OpenMP threads (default: all cores)"},
        RESULTS_OPTIONS(e.out),
        {"quiet", 'q', CLI_FLAG, &e.out.quiet, NULL, "no progress and no names of files"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first);
    if (code == EXIT_DONE && argc - first < 2)
        code = cli_usage_error(self, "a model and at least one text are needed: kvbudget %s", self->synopsis);
    if (code == EXIT_DONE) code = check_eval_options(&e);
    if (code == EXIT_DONE) cli_catch_signals();
    if (code == EXIT_DONE) code = device_take_threads(self, e.threads);
    if (code == EXIT_DONE) code = eval_open_inputs(&e, argv + first, (size_t)(argc - first));
    if (code == EXIT_DONE) {
        kvb_error err = {0};
        if (run_sweep(&e, &err) != KVB_OK) code = cli_failed(self, &err);
    }
    eval_free_inputs(&e);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_eval = {
    "eval",
    "eval MODEL [[NAME=]TABLE.safetensors]... TEXT... [-o NAME] [OPTION]...",
    "really evict, and measure how much each way to split the cache changes predictions",
    "Every text is prefilled once with full attention. Then, for every metric, allocator and ratio, the\n"
    "allocator says how many tokens each KV head keeps, the metric picks them, all others are thrown away, the\n"
    "cache is compacted, and the next tokens of the text are teacher-forced over the rest. As in kvpress, the\n"
    "choice does not depend on what follows the context.\n"
    "\n"
    "It prints, over all texts and positions:\n"
    "  KL          divergence of the next-token distributions from those of the full cache, nats\n"
    "  to uniform  that KL divided by the uniform allocator's, position by position\n"
    "  top-1       share of positions where the likeliest token is still the same\n"
    "  NLL         of the text's true next token\n"
    "  lost        share of the oracle importance, measured on these same tokens, that was evicted\n"
    "  looks       share of the context that a policy attends to per step\n"
    "  MiB         what the compacted cache takes, as the allocator counts it\n"
    "A text is one observation; intervals need five. Tables are compared text by text with uniform,\n"
    "AdaKV and published budgets, if these are run.\n"
    "\n"
    "A table is used with the metric that it was solved for, and refused for another model. All allocators of a\n"
    "metric keep the same sinks and window. With few tokens a table may give a head less than these, as kvpress\n"
    "does, and the newest are lost; TABLE.safetensors:strict takes the missing tokens from other heads. Texts:\n"
    "any text file, .jsonl with contexts, or .npy with token ids; use texts that were not used for any table.\n"
    "\n"
    "Examples:\n"
    "  kvbudget eval model.gguf snapkv.safetensors keydiff.safetensors paper.txt manual.txt -o worth\n"
    "  kvbudget eval model.gguf lukv=greedy.safetensors exact.safetensors book.txt --ratio 0.8,0.9\n",
    run_eval,
};
