// kvbudget recommend: the highest ratio of a table whose damage can be promised to stay below a limit.
#include "evaluator/damage.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "study/promise.h"
#include "tools/cmd/eval_command.h"
#include "tools/device.h"
#include "tools/report/promise_report.h"
#include "tools/report/words.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct recommend_command {
    eval_command e;
    double limits[PROMISE_LIMITS]; // NAN: not asked for
    double cap, confidence;
    uint64_t length;
    // Measured:
    promise_criterion criteria[PROMISE_LIMITS];
    double *values; // [PROMISE_LIMITS, n_ratios, n_texts]
    promise_task task;
} recommend_command;

// ---- Measuring ----

typedef struct step_watch {
    progress bar;
    double done, total; // texts; a prefill counts as half a text
} step_watch;

static bool show_prefill(void *context, double done, double total)
{
    step_watch *w = context;
    progress_update(&w->bar, w->done + 0.5 * done / total, w->total, "texts");
    return !cli_stop_requested;
}

// Fills the budgets of every ratio, [n_ratios, heads], and formats [n_ratios, heads, 2].
static kvb_status list_budgets(const recommend_command *c, uint32_t *keep, uint8_t *formats, size_t heads,
                               kvb_error *err)
{
    const allocator *table = c->e.with.columns[0].how;
    kvb_status status = KVB_OK;
    for (size_t r = 0; r < c->e.with.n_ratios && status == KVB_OK; r++) {
        status = kvb_budgets(table->table, c->e.with.ratios[r], (uint32_t)c->e.in.n_tokens,
                             &(kvb_budget_options){.strict = table->strict, .lookup = KVB_LOOKUP_LINEAR},
                             keep + r * heads, heads, err);
        if (status == KVB_OK)
            status = kvb_formats(table->table, c->e.with.ratios[r], formats + 2 * r * heads, 2 * heads, err);
    }
    return status;
}

static kvb_status measure_text(recommend_command *c, damage *d, damage_text *text, size_t t, const uint32_t *keep,
                               const uint8_t *formats, damage_value *found, step_watch *w, kvb_error *err)
{
    size_t n = c->e.with.n_ratios, n_texts = c->e.in.n_texts, cells = n * n_texts;
    const forward_progress prefill = {show_prefill, w};
    kvb_status status = damage_text_fill(d, text, c->e.in.texts[t].ids, &prefill, err);
    if (status == KVB_OK) status = damage_measure(d, text, keep, formats, n, found, err);
    for (size_t r = 0; r < n && status == KVB_OK; r++) {
        c->values[PROMISE_KL * cells + r * n_texts + t] = found[r].kl;
        c->values[PROMISE_FLIPS * cells + r * n_texts + t] = found[r].flips;
        c->values[PROMISE_NLL * cells + r * n_texts + t] = found[r].nll;
    }
    w->done++;
    if (status == KVB_OK && !show_prefill(w, 0, 1))
        status = kvb_fail(err, KVB_INTERRUPTED, "stopped after %zu of %zu texts", t + 1, n_texts);
    return status;
}

static kvb_status measure(recommend_command *c, kvb_error *err)
{
    const model *m = c->e.in.m;
    const method *by = &c->e.with.items[c->e.with.columns[0].method];
    size_t heads = (size_t)m->config.n_layers * m->config.n_kv_heads, n = c->e.with.n_ratios;
    const damage_plan plan = {
        (uint32_t)c->e.in.n_tokens, (uint32_t)c->e.in.n_next, (uint32_t)c->e.batch, &by->m, by->sink, by->window,
        methods_refit(&c->e.with)};
    damage *d = NULL;
    damage_text text = {0};
    uint32_t *keep = need(n * heads, sizeof *keep, "budgets");
    uint8_t *formats = need(2 * n * heads, sizeof *formats, "formats");
    bool packed = kvb_table_has_formats(c->e.with.columns[0].how->table);
    damage_value *found = need(n, sizeof *found, "results");
    step_watch w = {.total = (double)c->e.in.n_texts};
    kvb_status status = list_budgets(c, keep, formats, heads, err);
    if (status == KVB_OK) status = damage_open(&d, m, &plan, err);
    if (status == KVB_OK) text = damage_text_open(d);
    progress_begin(&w.bar, "recommend", c->e.out.quiet);
    for (size_t t = 0; t < c->e.in.n_texts && status == KVB_OK; t++)
        status = measure_text(c, d, &text, t, keep, packed ? formats : NULL, found, &w, err);
    progress_end(&w.bar, "%.0f texts, %zu %s", w.done, n, plural(n, "ratio", "ratios"));
    damage_text_close(&text);
    damage_close(d);
    free_all(keep, formats, found);
    return status;
}

// ---- The command ----

// Makes the document of --json and --csv, and gives what is asked for.
static kvb_status give_recommend_results(const recommend_command *c, const promise_report *r, kvb_error *err)
{
    results found = results_begin("recommend");
    const eval_inputs *in = &c->e.in;
    results_input(&found, "model", in->m->config.name, in->m->sha256);
    for (size_t i = 0; i < in->n_texts; i++) results_input(&found, "text", in->texts[i].name, in->texts[i].sha256);
    json_put(found.settings, "table %s backend %s compute %s refit %u", c->e.with.columns[0].how->identity,
             in->device->name, in->device->compute, methods_refit(&c->e.with));
    kvb_status status = promise_report_fill(r, &found, err);
    if (status == KVB_OK) status = results_give(&found, c->e.out.json, c->e.out.csv, err);
    results_free(&found);
    return status;
}

static kvb_status recommend(recommend_command *c, kvb_error *err)
{
    promise_report r = {.task = &c->task,
                        .ratios = c->e.with.ratios,
                        .confidence = c->confidence,
                        .table = c->e.with.columns[0].how->table,
                        .strict = c->e.with.columns[0].how->strict,
                        .n_tokens = (uint32_t)c->e.in.n_tokens,
                        .n_next = (uint32_t)c->e.in.n_next,
                        .length = c->length ? (uint32_t)c->length : (uint32_t)c->e.in.n_tokens};
    c->task = (promise_task){
        .n_ratios = (uint32_t)c->e.with.n_ratios, .n_texts = (uint32_t)c->e.in.n_texts, .error = 1 - c->confidence};
    c->values = need((size_t)PROMISE_LIMITS * c->task.n_ratios * c->task.n_texts, sizeof *c->values, "results");
    kvb_status status = promise_ask(&c->task, c->criteria, c->limits, c->cap, c->values, err);
    if (status == KVB_OK) status = measure(c, err);
    r.rows = need((size_t)PROMISE_LIMITS * c->task.n_ratios, sizeof *r.rows, "results");
    if (status == KVB_OK) status = promise_find(&c->task, r.rows, &r.n_passed, err);
    if (status == KVB_OK) status = give_recommend_results(c, &r, err);
    if (status == KVB_OK && !c->e.out.json) status = promise_report_print(&r, err);
    if (status == KVB_OK && r.n_passed == 0) status = promise_report_refusal(&r, err);
    free(r.rows);
    return status;
}

static int check_recommend_options(recommend_command *c)
{
    const cli_command *self = c->e.self;
    eval_inputs *in = &c->e.in;
    double *limits = c->limits;
    if (isnan(limits[PROMISE_KL]) && isnan(limits[PROMISE_FLIPS]) && isnan(limits[PROMISE_NLL]))
        limits[PROMISE_KL] = 0.05;
    for (int i = 0; i < PROMISE_LIMITS; i++) {
        double most = i == PROMISE_FLIPS ? 1 : c->cap > 0 ? c->cap : INFINITY;
        if (!isnan(limits[i]) && !(limits[i] > 0 && limits[i] < most))
            return cli_usage_error(self, "a limit of %g: expected above 0 and below the cap (%g)", limits[i], most);
    }
    if (!(c->confidence > 0 && c->confidence < 1) || c->cap < 0)
        return cli_usage_error(self, "--confidence: expected between 0 and 1, such as 0.95; --cap: above 0");
    if (eval_check_lengths(&c->e) != EXIT_DONE) return EXIT_USAGE;
    if (c->e.batch < 1 || c->e.batch > 64) return cli_usage_error(self, "--batch: expected 1 to 64");
    in->device = device_find(self, in->backend_name, in->compute);
    return in->device ? EXIT_DONE : EXIT_USAGE;
}

// A table that was solved for the output predicts its KL: the prediction is a third to all of the measured KL. So the
// answer lies between the ratios at which a tenth of the limit and the limit itself are predicted. All ratios there are
// tried, or every second one and so on, 16 at most, and three below, in case the prediction fails. They are chosen
// before any text is measured, so the promise still holds.
static void take_ratios_near_limit(const recommend_command *c, methods *with)
{
    const kvb_table *table = with->columns[0].how->table;
    const char *loss = kvb_table_metadata(table, "loss"), *unknown = kvb_table_metadata(table, "unknown");
    const double limit = c->limits[PROMISE_KL];
    double near[99], step;
    size_t n = 0, kept = 0;
    kvb_row row;
    if (!loss || strcmp(loss, "output") != 0 || (unknown && strstr(unknown, "table_loss")) || isnan(limit)) return;
    for (uint32_t r = 0; r < kvb_table_info(table)->n_rows && kvb_table_row(table, r, &row, NULL) == KVB_OK; r++)
        if (row.table_loss >= limit / 10 && row.table_loss <= limit) near[n++] = row.ratio;
    if (n == 0) return;
    const size_t every = (n + 15) / 16;
    step = rint(100 * near[0] / 4) / 100;
    for (int i = 1; i < 4 && step > 0 && i * step < near[0]; i++) with->ratios[kept++] = i * step;
    for (size_t i = (n - 1) % every; i < n; i += every) with->ratios[kept++] = near[i];
    with->n_ratios = kept;
}

static const char FIVES[] = "5%,10%,15%,20%,25%,30%,35%,40%,45%,50%,55%,60%,65%,70%,75%,80%,85%,90%,95%";

static int run_recommend(const cli_command *self, int argc, char **argv)
{
    recommend_command c = {.e = {.self = self,
                                 .with = {.self = self, .sink = UINT64_MAX, .window = UINT64_MAX},
                                 .in = EVAL_INPUTS,
                                 .batch = 4},
                           .limits = {NAN, NAN, NAN},
                           .confidence = 0.95};
    const cli_option options[] = {
        {"max-kl", 0, CLI_REAL, &c.limits[PROMISE_KL], "NATS",
         "limit of the mean KL to the full cache (0.05 if no limit is given)"},
        {"max-flips", 0, CLI_REAL, &c.limits[PROMISE_FLIPS], "SHARE",
         "limit of the mean share of tokens whose likeliest successor changes"},
        {"max-nll", 0, CLI_REAL, &c.limits[PROMISE_NLL], "NATS",
         "limit of the mean rise in NLL of the true next tokens"},
        {"confidence", 0, CLI_REAL, &c.confidence, "P",
         "probability, over the draw of the texts, that the promise holds (0.95)"},
        {"cap", 0, CLI_REAL, &c.cap, "NATS", "a text's KL or NLL counts as at most this (5 times the limit)"},
        {"ratio", 'r', CLI_LIST, &c.e.with.ratio_names, "R,...",
         "ratios to try (those near the limit if the table predicts its KL, else 5%, 10%, ... 95%)"},
        {"length", 0, CLI_COUNT, &c.length, "N", "print the memory saved at N tokens (default: --tokens)"},
        REFIT_OPTION(c.e.with),
        EVAL_INPUT_OPTIONS(c.e.in),
        {"batch", 0, CLI_COUNT, &c.e.batch, "N", "ratios decoded together (4)"},
        {"threads", 0, CLI_COUNT, &c.e.threads, "N", "OpenMP threads (default: all cores)"},
        RESULTS_OPTIONS(c.e.out),
        {"quiet", 'q', CLI_FLAG, &c.e.out.quiet, NULL, "no progress"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first);
    const bool no_ratios = c.e.with.ratio_names.count == 0;
    if (code == EXIT_DONE) code = eval_check_operands(self, argc - first);
    if (code == EXIT_DONE) code = check_recommend_options(&c);
    if (code == EXIT_DONE) code = eval_open_table(&c.e, argv + first, (size_t)(argc - first), FIVES);
    if (code == EXIT_DONE && no_ratios) take_ratios_near_limit(&c, &c.e.with);
    if (code == EXIT_DONE) {
        kvb_error err = {0};
        if (recommend(&c, &err) != KVB_OK) code = cli_failed(self, &err);
    }
    free(c.values);
    eval_free_inputs(&c.e);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_recommend = {
    "recommend",
    "recommend MODEL TABLE.safetensors TEXT... [--max-kl 0.05] [--confidence 0.95] [OPTION]...",
    "find the highest ratio whose damage stays below a limit, with a guarantee",
    "Measures the table's damage on every text at every ratio, as `eval` does, and prints the highest ratio\n"
    "that can be promised: with probability P over the draw of these texts, the mean damage on texts like them\n"
    "is below the limit at that ratio. It assumes nothing about distributions, only that the given texts and\n"
    "future ones are drawn alike (Learn then Test, arXiv 2110.01052: fixed-sequence testing from low to high\n"
    "ratios).\n"
    "\n"
    "KL and NLL are unbounded, so the promise is about a text's damage clipped at --cap. A smaller cap\n"
    "needs fewer texts and promises less. A text counts once, however long it is. Several limits hold at once.\n"
    "If there are too few texts to promise anything, the command says how many are needed and ends with\nstatus 1.\n"
    "\n"
    "Texts: any text file, .jsonl with contexts (each is a text), or .npy with token ids; use texts that were not\n"
    "used for any table.\n"
    "\n"
    "Examples:\n"
    "  kvbudget recommend model.gguf keydiff.safetensors logs.jsonl --max-kl 0.05\n"
    "  kvbudget recommend model.gguf keydiff.safetensors logs.jsonl --max-flips 0.1 --confidence 0.9 --length 32768\n",
    run_recommend,
};
