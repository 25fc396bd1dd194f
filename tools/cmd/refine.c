// kvbudget refine: budgets improved on measured damage.
#include "formats/sha256.h"
#include "runtime/fail.h"
#include "study/measured.h"
#include "tools/cmd/refine_command.h"
#include "tools/device.h"
#include "tools/memory.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- Sets of texts ----

// Numbers the contexts, since questions about one are in one set: context_of [n_texts].
static void number_contexts(const sweep_text *texts, size_t n_texts, size_t *context_of)
{
    size_t n = 0;
    for (size_t t = 0, first; t < n_texts; t++) {
        const sweep_text *x = &texts[t];
        for (first = 0; first < t; first++)
            if (texts[first].n_tokens == x->n_tokens &&
                memcmp(texts[first].ids, x->ids, x->n_tokens * sizeof *x->ids) == 0)
                break;
        context_of[t] = first < t ? context_of[first] : n++;
    }
}

static refine_set set_of(const refine_command *c, size_t text, size_t context)
{
    static const refine_set DEAL[4] = {SET_CALIBRATION, SET_TEST, SET_SELECTION, SET_TEST};
    size_t operand = c->e.in.origin[text];
    if (!c->n_select) return DEAL[context % 4];
    if (operand < 2 + c->n_calibration) return SET_CALIBRATION;
    return operand < 2 + c->n_calibration + c->n_select ? SET_SELECTION : SET_TEST;
}

// No context stands in two sets.
static kvb_status check_contexts(const refine_command *c, const size_t *context_of, kvb_error *err)
{
    const sweep_text *texts = c->e.in.texts;
    for (size_t t = 0; t < c->e.in.n_texts; t++)
        for (size_t k = 0; k < t; k++)
            if (context_of[k] == context_of[t] && set_of(c, k, context_of[k]) != set_of(c, t, context_of[t]))
                return kvb_fail(err, KVB_ARGUMENT, "%s and %s have one context and stand in two sets: keep it in one",
                                texts[k].name, texts[t].name);
    return KVB_OK;
}

static kvb_status deal_texts(refine_command *c, kvb_error *err)
{
    refine_bench *b = &c->bench;
    size_t n = c->e.in.n_texts, *context_of = malloc((n + 1) * sizeof *context_of);
    kvb_status status = context_of ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for %zu texts", n);
    for (int s = 0; s < SET_COUNT && status == KVB_OK; s++)
        if (!(b->members[s] = calloc(n + 1, sizeof *b->members[s])))
            status = kvb_fail(err, KVB_MEMORY, "no memory for %zu texts", n);
    if (status == KVB_OK) number_contexts(c->e.in.texts, n, context_of);
    if (status == KVB_OK) status = check_contexts(c, context_of, err);
    for (size_t t = 0; t < n && status == KVB_OK; t++) {
        refine_set s = set_of(c, t, context_of[t]);
        b->members[s][b->n_members[s]++] = (uint32_t)t;
    }
    free(context_of);
    if (status != KVB_OK || (b->n_members[SET_CALIBRATION] && b->n_members[SET_SELECTION])) return status;
    return kvb_fail(err, KVB_ARGUMENT,
                    "%u texts to search on and %u to select by, expected some of both: give at least 3 %s, or "
                    "--select",
                    b->n_members[SET_CALIBRATION], b->n_members[SET_SELECTION],
                    c->e.in.questions ? "contexts" : "texts");
}

static kvb_status check_memory(const refine_bench *b, kvb_error *err)
{
    uint64_t one = damage_text_bytes(b->m, &b->plan), n = b->n_members[SET_CALIBRATION] + b->n_members[SET_SELECTION],
             most = memory_free();
    if (!most || (n + 2) * one < most) return KVB_OK; // one test text, and the session's own
    return kvb_fail(err, KVB_MEMORY,
                    "%llu texts of %.0f MiB each do not fit into %.0f MiB; use fewer texts or a smaller --tokens",
                    (unsigned long long)n, (double)one / 0x1p20, (double)most / 0x1p20);
}

// ---- Opening ----

// TABLE, LABEL=TABLE or TABLE:strict: the path alone.
static char *path_of_table(const char *operand, bool strict)
{
    const char *equals = strchr(operand, '=');
    bool label = equals && strcspn(operand, "/.") > (size_t)(equals - operand);
    const char *path = label ? equals + 1 : operand;
    return strndup(path, strlen(path) - (strict ? strlen(":strict") : 0));
}

static kvb_status open_bench(refine_command *c, kvb_error *err)
{
    const eval_inputs *in = &c->e.in;
    const method_column *column = &c->e.with.columns[0];
    const method *by = &c->e.with.items[column->method];
    refine_bench *b = &c->bench;
    *b = (refine_bench){.m = in->m,
                        .table = &c->table,
                        .strict = column->how->strict,
                        .knots = c->e.with.ratios,
                        .n_knots = (uint32_t)c->e.with.n_ratios,
                        .objective = strcmp(c->objective, "nll") == 0 ? OBJECTIVE_NLL : OBJECTIVE_KL,
                        .texts = in->texts,
                        .n_texts = (uint32_t)in->n_texts,
                        .plan = {.batch = (uint32_t)c->e.batch,
                                 .by = &by->m,
                                 .sink = by->sink,
                                 .window = by->window,
                                 .statistics = in->opened.statistics}};
    char *log = malloc(strlen(c->e.out.name) + 8);
    c->table_path = path_of_table(c->operands[1], b->strict);
    if (!log || !c->table_path) {
        free(log);
        return kvb_fail(err, KVB_MEMORY, "no memory");
    }
    sprintf(log, "%s.cells", c->e.out.name);
    kvb_status status = deal_texts(c, err);
    if (status == KVB_OK) status = refine_bench_take_lengths(b, err);
    if (status == KVB_OK) status = check_memory(b, err);
    if (status == KVB_OK) status = sha256_file_hex(c->table_path, c->table_sha256, err);
    if (status == KVB_OK) status = refine_table_open(&c->table, column->how->table, c->table_path, err);
    if (status == KVB_OK) status = refine_bench_open(b, log, err);
    free(log);
    return status;
}

// ---- The search ----

// Losses at all ratios, and what share of the table's they are.
static void show_losses(const char *set, const double *now, const double *before, uint32_t n)
{
    fputs(set, stderr);
    for (uint32_t k = 0; k < n; k++) fprintf(stderr, " %.4f (%.3f)", now[k], before[k] != 0 ? now[k] / before[k] : 1);
}

static void show_round(void *context, const refine_progress *p)
{
    refine_bench *b = context;
    fprintf(stderr, "refine: round %u, %.0f of %.0f evaluations; %s", p->round, p->evaluations, p->wanted,
            b->objective == OBJECTIVE_NLL ? "NLL" : "KL");
    show_losses(" on calibration", p->calibration, p->calibration_before, b->n_knots);
    show_losses(", on selection", p->selection, p->selection_before, b->n_knots);
    fprintf(stderr, "\n");
}

// Where the search begins: budgets by what each head alone loses, on as many texts as three quarters of the evaluations
// pay for. A head's cuts cost half a continuation each, since only the layers from its own on are run.
static kvb_status find_start(refine_command *c, kvb_error *err)
{
    refine_bench *b = &c->bench;
    refine_task *t = &c->task;
    double levels[MEASURED_LEVELS_MAX];
    uint32_t n_levels = measured_levels(b->knots, b->n_knots, levels);
    double one = 0.5 * n_levels * t->n_heads / b->n_knots / t->n_texts; // text, in evaluations
    uint32_t n_texts = (uint32_t)fmin(t->n_texts, floor(0.75 * t->evaluations / one));
    if (strcmp(c->start, "table") == 0 || n_texts == 0) return KVB_OK;
    double *loss = malloc((size_t)n_levels * t->n_heads * sizeof *loss);
    c->shift = malloc((size_t)b->n_knots * t->n_heads * sizeof *c->shift);
    kvb_status status = loss && c->shift ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for %u heads", t->n_heads);
    if (status == KVB_OK) status = refine_bench_heads(b, levels, n_levels, n_texts, !c->e.out.quiet, loss, err);
    if (status == KVB_OK)
        status = measured_shifts(&c->table.base, levels, n_levels, loss, t->heads, b->knots, b->n_knots, c->shift, err);
    free(loss);
    if (status != KVB_OK) return status;
    t->start = c->shift;
    c->n_start = n_texts;
    t->start_cost = one * n_texts;
    return KVB_OK;
}

static kvb_status search(refine_command *c, kvb_error *err)
{
    const refine_bench *b = &c->bench;
    const model_config *m = &c->e.in.m->config;
    c->task =
        (refine_task){.n_layers = m->n_layers,
                      .n_heads = m->n_layers * m->n_kv_heads,
                      .n_knots = b->n_knots,
                      .n_texts = b->n_members[SET_CALIBRATION],
                      .n_selection = b->n_members[SET_SELECTION],
                      .heads = !c->layers && !(c->table.options.limits && c->table.limits.levels), // which tie layers
                      .worst = c->worst,
                      .search = c->task.search,
                      .evaluations = (uint32_t)c->evaluations,
                      .patience = (uint32_t)c->patience,
                      .seed = c->e.seed,
                      .measure = refine_bench_losses,
                      .report = c->e.out.quiet ? NULL : show_round,
                      .context = &c->bench};
    kvb_status status = find_start(c, err);
    if (status != KVB_OK && status != KVB_INTERRUPTED) return status;
    return refine_run(&c->best, &c->task, err); // which a stop ends at once, with the table as the best so far
}

// KL of a set, of the table and of the refined one: of each text, and the mean.
static kvb_status judge_set(refine_command *c, refine_set set, kvb_error *err)
{
    refine_bench *b = &c->bench;
    size_t K = b->n_knots, heads = c->task.n_heads, n = b->n_members[set];
    double *shift = calloc(2 * K * heads, sizeof *shift), *kl = calloc(2 * K * (n + 1), sizeof *kl);
    damage_value *found = malloc(2 * K * sizeof *found);
    kvb_status status = shift && kl && found ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory to judge");
    if (status == KVB_OK) memcpy(shift + K * heads, c->best.shift, K * heads * sizeof *shift);
    for (uint32_t t = 0; t < n && status == KVB_OK; t++) {
        status = refine_bench_measure(b, set, shift, 2, &t, 1, found, err);
        for (size_t i = 0; i < 2 * K && status == KVB_OK; i++) {
            kl[i] += found[i].kl / (double)n;
            kl[2 * K + i * n + t] = found[i].kl;
        }
        if (set == SET_TEST) refine_bench_close_set(b, set); // one at a time: each is asked once
    }
    if (status == KVB_OK) c->kl[set] = kl;
    else free(kl);
    free(shift);
    free(found);
    return status;
}

static kvb_status refine(refine_command *c, kvb_error *err)
{
    kvb_status status = open_bench(c, err);
    if (status != KVB_OK) return status;
    status = search(c, err);
    for (int s = 0; s < SET_COUNT && status == KVB_OK; s++) status = judge_set(c, (refine_set)s, err);
    bool stopped = status == KVB_INTERRUPTED; // what was found until then is written
    if (status != KVB_OK && !stopped) return status;
    status = refine_write_result(c, stopped, err);
    if (status != KVB_OK || !stopped) return status;
    return kvb_fail(err, KVB_INTERRUPTED, "stopped; %s is the best so far, and the same command goes on",
                    c->e.out.name);
}

// ---- The command line ----

static int check_options(refine_command *c)
{
    const cli_command *self = c->e.self;
    eval_inputs *in = &c->e.in;
    if (!c->e.out.name) return cli_usage_error(self, "-o is needed: where the refined table goes");
    if (strcmp(c->objective, "kl") != 0 && strcmp(c->objective, "nll") != 0)
        return cli_usage_error(self, "--objective: expected kl or nll, found '%s'", c->objective);
    if (strcmp(c->start, "heads") != 0 && strcmp(c->start, "table") != 0)
        return cli_usage_error(self, "--start: expected heads or table, found '%s'", c->start);
    if (!refine_search_parse(&c->task.search, c->search))
        return cli_usage_error(self, "--search: expected model, evolve, swap or none, found '%s'", c->search);
    if (c->test.count && !c->select.count)
        return cli_usage_error(self, "--test needs --select: texts that choose among what the search finds");
    if (eval_check_lengths(&c->e) != EXIT_DONE) return EXIT_USAGE;
    if (c->e.batch < 1 || c->e.batch > 64 || c->evaluations < 1 || c->evaluations > 1000000 || c->patience < 1 ||
        c->patience > 1000000)
        return cli_usage_error(self, "--batch: expected 1 to 64; --evaluations, --patience: 1 to 1000000");
    in->device = device_find(self, in->backend_name, in->compute);
    return in->device ? EXIT_DONE : EXIT_USAGE;
}

// All texts in one list, so that one reading sees whether any stands in two sets.
static int gather_operands(refine_command *c, char **operands, size_t n)
{
    c->operands = calloc(n + c->select.count + c->test.count, sizeof *c->operands);
    if (!c->operands) return cli_failed(c->e.self, &(kvb_error){KVB_MEMORY, "no memory for the operands"});
    if (methods_is_table(operands[0]) || !methods_is_table(operands[1]))
        return cli_usage_error(c->e.self, "expected a model, then a table (.safetensors), then texts");
    for (size_t i = 0; i < n; i++) c->operands[c->n_operands++] = operands[i];
    for (size_t i = 0; i < c->select.count; i++) c->operands[c->n_operands++] = (char *)(uintptr_t)c->select.items[i];
    for (size_t i = 0; i < c->test.count; i++) c->operands[c->n_operands++] = (char *)(uintptr_t)c->test.items[i];
    c->n_calibration = n - 2;
    c->n_select = c->select.count;
    if (c->e.with.ratio_names.count) return EXIT_DONE;
    const char **one = malloc(sizeof *one);
    if (!one) return cli_failed(c->e.self, &(kvb_error){KVB_MEMORY, "no memory"});
    *one = "50%,70%,80%,90%,95%";
    c->e.with.ratio_names = (cli_list){one, 1};
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
    free(c->shift);
    free(c->operands);
    free(c->table_path);
}

static int run_refine(const cli_command *self, int argc, char **argv)
{
    refine_command c = {.e = {.self = self,
                              .with = {.self = self, .sink = UINT64_MAX, .window = UINT64_MAX},
                              .in = EVAL_INPUTS,
                              .batch = 8,
                              .seed = 1},
                        .objective = "kl",
                        .search = "model",
                        .start = "heads",
                        .evaluations = 200,
                        .patience = 6};
    const cli_option options[] = {
        {"output", 'o', CLI_WRITES(FILE_REFINED_TABLE), &c.e.out.name, "FILE",
         "the refined table; results so far stand in FILE.cells, and the same command goes on"},
        {"select", 0, CLI_INPUTS, &c.select, "TEXT", "text that chooses among what is found, repeatable"},
        {"test", 0, CLI_INPUTS, &c.test, "TEXT",
         "text that only judges the result, repeatable. Without --select the texts are dealt\nin turn: search, test, "
         "select, test"},
        {"ratio", 'r', CLI_LIST, &c.e.with.ratio_names, "R,...", "ratios that count (50%,70%,80%,90%,95%)"},
        {"objective", 0, CLI_TEXT, &c.objective, "KIND", "kl (to the full cache) or nll (of the true next tokens)"},
        {"questions", 0, CLI_FLAG, &c.e.in.questions, NULL,
         "texts are .jsonl whose questions have answers: a context is cut whole, and question and\nanswer are what "
         "follows; --tokens and --next are the longest context and answer"},
        {"worst", 0, CLI_FLAG, &c.worst, NULL, "the text that loses most counts, not the mean"},
        {"layers", 0, CLI_FLAG, &c.layers, NULL, "whole layers move only: for few texts, or few evaluations"},
        {"search", 0, CLI_TEXT, &c.search, "KIND",
         "model (the default: gradients from pairs, halving over texts), evolve (separable\nCMA-ES), swap (two at "
         "random), none (the start alone)"},
        {"start", 0, CLI_TEXT, &c.start, "KIND",
         "where the search begins: heads (the default: budgets by what each head alone loses, for up\nto three "
         "quarters of the evaluations), or table"},
        {"evaluations", 0, CLI_COUNT, &c.evaluations, "N",
         "candidates at most, in units of one on all texts of the search (200)"},
        {"patience", 0, CLI_COUNT, &c.patience, "N", "rounds without a gain on the selection texts that end it (6)"},
        EVAL_INPUT_OPTIONS(c.e.in),
        {"batch", 0, CLI_COUNT, &c.e.batch, "N", "cuts that are decoded together (8)"},
        {"threads", 0, CLI_COUNT, &c.e.threads, "N", "OpenMP threads (default: all cores)"},
        {"seed", 's', CLI_COUNT, &c.e.seed, "N", "of the search (1)"},
        RESULTS_OPTIONS(c.e.out),
        {"quiet", 'q', CLI_FLAG, &c.e.out.quiet, NULL, "no progress"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first);
    if (code == EXIT_DONE && argc - first < 3)
        code = cli_usage_error(self, "a model, a table and texts are needed: kvbudget %s", self->synopsis);
    if (code == EXIT_DONE) code = check_options(&c);
    if (code == EXIT_DONE) code = gather_operands(&c, argv + first, (size_t)(argc - first));
    if (code == EXIT_DONE) cli_catch_signals();
    if (code == EXIT_DONE) code = device_take_threads(self, c.e.threads);
    if (code == EXIT_DONE) code = eval_open_table(&c.e, c.operands, c.n_operands);
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
    "improve a table's budgets on the damage that they really do",
    "Starts from a solved table and moves heads along its columns, up or down, while totals, nesting and all\n"
    "constraints stay. Keys, values, scores and the full cache's predictions of every text are computed once; a\n"
    "candidate then costs one continuation over cut caches, many in a batch. The search begins with budgets by what\n"
    "each head loses when it alone is cut (--start), solved as tables are from importance. Then all heads of a layer\n"
    "move together, then each by itself; every ratio counts relative to what the table loses there.\n"
    "\n"
    "Three sets of texts: the search sees one, the second chooses among what it finds and ends it, and the third\n"
    "only judges. Each line of progress shows the loss at each ratio on the first two, and what share of the table's\n"
    "it is. Ctrl-C leaves the best table so far. The same seed gives the same table, with any number of threads and\n"
    "after any stop.\n"
    "\n"
    "Texts: any text file, .jsonl with contexts, or .npy with token ids; use texts that no table has seen. With\n"
    "--questions every question of a .jsonl that has an answer is one text, and those about one context are in one\n"
    "set.\n"
    "\n"
    "Examples:\n"
    "  kvbudget refine model.gguf keydiff.safetensors texts.jsonl -o refined.safetensors\n"
    "  kvbudget refine model.gguf keydiff.safetensors a.txt b.c --select c.txt --test d.txt -o refined.safetensors\n"
    "  kvbudget refine model.gguf keydiff.safetensors asked.jsonl --questions -o for-questions.safetensors\n"
    "  kvbudget eval model.gguf keydiff.safetensors refined=refined.safetensors other.txt\n",
    run_refine,
};
