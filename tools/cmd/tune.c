// kvbudget tune: a model in, its best table and a report out. Every step is another command of this program, with the
// options that served best; their results lie in NAME.tune/ and are not made twice.
#include "formats/atomic_file.h"
#include "formats/file_read.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "profiler/model/model.h"
#include "profiler/text/model_text.h"
#include "profiler/weights/weights.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include "tools/child.h"
#include "tools/cli.h"
#include "tools/cmd/tune_texts.h"
#include "tools/device.h"
#include "tools/report/results.h"
#include "tools/report/words.h"
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// A table is judged on the NEXT tokens after a context. Calibration reads CONTINUED, each of them a query of the
// curves: more, because later ones need other tokens of the context than those that follow at once. GAIN_ROWS of them
// measure the layers' gains. Of contexts up to SHORT_TOKENS a third of these are taken, and a quarter of NEXT.
enum { NEXT = 64, CONTINUED = 128, GAIN_ROWS = 24, FIRST_TEXTS = 2, SEARCH_TEXTS = 3, STEPS = 11 };
// Each context is also asked for this many of its lines: questions need single tokens that a mere continuation hardly
// needs. The packed table is for both. A table of tokens alone has no room for both: --for says what it is for.
enum { LINES = 4 };
// What a context of each purpose costs: two passes over one that calibrates, choosing by one, judging one. The unit is
// the first of the passes; models of 135 million and 1.5 billion parameters differ by a tenth. With --refit, where no
// text chooses, by a third; without --time it reads as many texts all the same.
static const double COSTS[2][PART_COUNT] = {{2.4, 2.15, 1.5}, {6, 0, 6}};
// How much is read if the user does not say, by the multiplications and additions of a prefill of USUAL_TOKENS. Beyond
// HALF_LENGTH contexts have half as many tokens (docs/tune.md has what that gains and costs), and beyond
// QUARTER_LENGTH a quarter. All that the command does may take as long as prefills of USUAL_WORK at full length: a
// model of half a billion parameters gets all texts of the program, one of 1.5 billion about a third.
enum { USUAL_TOKENS = 2048, SHORT_TOKENS = 512 };
static const uint64_t BY_SIZE = UINT64_MAX; // of the model: no --tokens
static const double HALF_LENGTH = 3e12, QUARTER_LENGTH = 1.5e13, USUAL_WORK = 9.5e13;

// The metrics that the ranking is fitted on. None needs the attention of queries, so any engine can rank by it.
static const char *const FEATURES[] = {"keydiff", "ea:kvpress", "ea:kvpress:epsilon=0", "knorm"};

#define LEARNED "learned=$F/ranking.safetensors"
#define WINDOW "--window 16"
#define TABLE_END ".safetensors"
#define PACKED_END "-packed.safetensors"

typedef struct word_list {
    char **items;
    size_t count;
} word_list;

typedef struct tune_command {
    const cli_command *self;
    const char *model, *output, *time, *use;
    uint64_t n_tokens, threads;
    bool refit, plan, quiet;
    double seconds; // of --time; 0: none
    char *const *own;
    size_t n_own;
    // Opened:
    char *folder, *log; // NAME.tune, and what its steps printed
    tokenizer *tokens;
    char model_sha256[65];
    tune_texts texts;
    double prefill_flops; // of one context, or of USUAL_TOKENS if it is shorter
    double left;          // of --time, in first passes, when all texts are read, chosen by and judged
    unsigned step, n_steps;
    double spent; // seconds of all steps, of earlier runs too
} tune_command;

// ---- Words of a command ----

static void __attribute__((format(printf, 2, 3))) add_word(word_list *w, const char *format, ...)
{
    va_list arguments;
    char *text = NULL;
    va_start(arguments, format);
    int n = vasprintf(&text, format, arguments);
    va_end(arguments);
    w->items = need_more(w->items, w->count + 2, sizeof *w->items, "words");
    w->items[w->count++] = needed(n < 0 ? NULL : text, "words");
    w->items[w->count] = NULL;
}

// Adds the words between blanks; $M in one of them is the model, $F the folder of the steps, $O the output's name.
static void add_words(word_list *w, const tune_command *c, const char *words)
{
    char *all = need_text("%s", words), *rest = all, *word;
    while ((word = strsep(&rest, " "))) {
        char *mark = strchr(word, '$');
        const char *value = !mark ? "" : mark[1] == 'M' ? c->model : mark[1] == 'F' ? c->folder : c->output;
        add_word(w, "%.*s%s%s", (int)strcspn(word, "$"), word, value, mark ? mark + 2 : "");
    }
    free(all);
}

static void free_words(word_list *w)
{
    for (size_t i = 0; i < w->count; i++) free(w->items[i]);
    free(w->items);
    *w = (word_list){0};
}

// ---- Steps ----

// Returns the seconds that a step took, as its mark says, or a number below 0 if it was not done.
static double read_mark(const tune_command *c, const char *name)
{
    char *path = need_text("%s/%s.done", c->folder, name);
    FILE *from = fopen(path, "re");
    double seconds = -1;
    if (from && fscanf(from, "%lf", &seconds) != 1) seconds = 0;
    if (from) (void)fclose(from);
    free(path);
    return seconds;
}

static kvb_status write_mark(const tune_command *c, const char *name, double seconds, kvb_error *err)
{
    char *path = need_text("%s/%s.done", c->folder, name), *text = need_text("%.3f\n", seconds);
    kvb_status status = atomic_write(path, text, strlen(text), err);
    free_all(path, text);
    return status;
}

static void say_step(tune_command *c, const char *what, bool done)
{
    c->step++;
    if (!c->quiet) fprintf(stderr, "tune %u of %u: %s%s\n", c->step, c->n_steps, what, done ? " (done before)" : "");
}

// Runs one command, unless its mark is there, and frees its words.
static kvb_status run_step(tune_command *c, const char *mark, const char *what, word_list *w, kvb_error *err)
{
    double before = read_mark(c, mark), start = seconds_now();
    kvb_status status = KVB_OK;
    say_step(c, what, before >= 0);
    if (c->quiet) add_word(w, "--quiet");
    if (before < 0) status = child_run(w->items, c->log, err);
    if (before < 0 && status == KVB_OK) status = write_mark(c, mark, before = seconds_now() - start, err);
    c->spent += before;
    free_words(w);
    // A step that was nearly done when the signal came may have ended well.
    if (status == KVB_OK && cli_stop_requested) status = kvb_fail(err, KVB_INTERRUPTED, "stopped");
    return status;
}

// Adds the words of a command that runs the model.
static void add_model_words(word_list *w, const tune_command *c, const char *words)
{
    add_words(w, c, words);
    if (c->threads) add_word(w, "--threads=%" PRIu64, c->threads);
}

static void add_features(word_list *w, const char *option)
{
    for (size_t i = 0; i < sizeof FEATURES / sizeof *FEATURES; i++) add_word(w, "%s=%s", option, FEATURES[i]);
}

static void add_texts(word_list *w, const tune_command *c, tune_part part, const char *option)
{
    for (size_t i = 0; i < c->texts.count; i++) {
        if (c->texts.items[i].part != part) continue;
        if (option) add_word(w, "%s", option);
        add_word(w, "%s", c->texts.items[i].path);
    }
}

// ---- Profile and ranking ----

// Leaves a command the texts' continuations alone, unless lines are what the tables are for.
static void add_continuations(word_list *w, const tune_command *c)
{
    if (strcmp(c->use, "lookup") != 0) add_word(w, "--questions=1");
}

static kvb_status profile_texts(tune_command *c, const char *mark, const char *what, size_t first, size_t last,
                                kvb_error *err)
{
    char *lines = need_text("%s/%s.jsonl", c->folder, mark);
    word_list w = {0};
    uint32_t T = (uint32_t)c->n_tokens;
    kvb_status status = KVB_OK;
    if (access(lines, F_OK) != 0)
        status = tune_texts_write(&c->texts, first, last, c->tokens, T, CONTINUED, LINES, lines, err);
    add_model_words(&w, c, "profile $M -o $F/run.h5");
    add_word(&w, "%s", lines);
    if (first == 0) add_features(&w, "--metric");
    add_words(&w, c, first > 0 ? "--add" : "--metric snapkv:kvpress --resume");
    if (c->plan) add_words(&w, c, "--plan");
    if (status == KVB_OK && c->plan) status = child_run(w.items, NULL, err);
    if (c->plan) (void)remove(lines);
    free(lines);
    if (status == KVB_OK && !c->plan) return run_step(c, mark, what, &w, err);
    free_words(&w);
    return status;
}

// Returns what the first kept[] texts of each purpose cost.
static double texts_cost(const tune_command *c, const size_t kept[PART_COUNT])
{
    size_t seen[PART_COUNT] = {0};
    double sum = 0;
    for (size_t i = 0; i < c->texts.count; i++) {
        const tune_text *t = &c->texts.items[i];
        if (seen[t->part]++ < kept[t->part])
            sum += COSTS[c->refit && c->seconds > 0][t->part] * (double)tune_text_contexts(t, c->n_tokens + CONTINUED);
    }
    return sum;
}

// Leaves texts out until the rest costs no more than `most` first passes over a context: the same share of each
// purpose, down to a few and, without --time, the user's own. What is left over goes to c->left.
static void limit_texts(tune_command *c, double most)
{
    static const size_t least[2][PART_COUNT] = {{2, 2, 1}, {FIRST_TEXTS, 1, 1}};
    size_t own[PART_COUNT] = {0}, kept[PART_COUNT] = {0};
    bool timed = c->seconds > 0;
    for (size_t i = 0; i < c->texts.count; i++) own[c->texts.items[i].part] += c->texts.items[i].own && !timed;
    c->left = -1;
    for (int share = 20; share >= 0 && c->left < 0; share--) {
        for (int p = 0; p < PART_COUNT; p++) {
            size_t all = tune_texts_count(&c->texts, (tune_part)p), few = least[timed][p];
            if (own[p] > few) few = own[p];
            kept[p] = all > few ? few + (all - few) * (size_t)share / 20 : all;
        }
        c->left = most - texts_cost(c, kept);
    }
    for (int p = 0; p < PART_COUNT; p++) tune_texts_limit(&c->texts, (tune_part)p, kept[p]);
}

static kvb_status profile_all(tune_command *c, kvb_error *err)
{
    size_t all = tune_texts_count(&c->texts, PART_CALIBRATE),
           first = c->seconds > 0 && all > FIRST_TEXTS ? FIRST_TEXTS : all;
    kvb_status status = profile_texts(c, "first", "the model reads texts with its full cache", 0, first, err);
    if (status != KVB_OK || c->plan || !(c->seconds > 0)) return status;
    double contexts = texts_cost(c, (size_t[]){first, 0, 0}) / COSTS[c->refit][PART_CALIBRATE];
    limit_texts(c, 0.9 * c->seconds / read_mark(c, "first") * contexts);
    all = tune_texts_count(&c->texts, PART_CALIBRATE);
    if (all > first) return profile_texts(c, "more", "and as many more as the time allows", first, all, err);
    c->step++;
    return KVB_OK;
}

static kvb_status learn_ranking(tune_command *c, kvb_error *err)
{
    word_list w = {0};
    add_words(&w, c, "learn $F/run.h5 --force -o $F/ranking.safetensors --target mean");
    add_features(&w, "--feature");
    add_continuations(&w, c);
    kvb_status status = run_step(c, "ranking", "a ranking of tokens is fitted to what they were worth", &w, err);
    if (status != KVB_OK) return status;
    add_model_words(&w, c, "profile $M --add -o $F/run.h5 --metric " LEARNED " " WINDOW " --curves");
    if (c->refit) add_word(&w, "--refit");
    add_word(&w, "--curve-queries=%d", CONTINUED);
    add_word(&w, "--gain-rows=%d", c->n_tokens > SHORT_TOKENS ? GAIN_ROWS : GAIN_ROWS / 3);
    return run_step(c, "curves", "the texts again, to see what evicting by it does to the output", &w, err);
}

// ---- Budgets ----

static kvb_status solve_tables(tune_command *c, kvb_error *err)
{
    static const struct {
        const char *name, *what, *words;
        bool tokens; // alone, of the learned ranking
    } tables[] = {{"importance", "budgets that lose the least importance",
                   "--metric " LEARNED " --loss importance " WINDOW, true},
                  {"output", "budgets that change the output least", "--metric " LEARNED " --loss output", true},
                  {"packed", "the same with formats of 16, 8, 4 and 2 bits",
                   "--metric " LEARNED " --loss output --formats bf16,int8,int4,int2", false},
                  {"published", "SnapKV as published, to compare", "--metric snapkv:kvpress --paper -q 1", false}};
    kvb_status status = KVB_OK;
    for (size_t i = c->refit; i < sizeof tables / sizeof *tables && status == KVB_OK; i++) {
        word_list w = {0};
        add_words(&w, c, "solve $F/run.h5 --force");
        add_words(&w, c, tables[i].words);
        if (tables[i].tokens) add_continuations(&w, c);
        add_word(&w, "--output=%s/%s.safetensors", c->folder, tables[i].name);
        status = run_step(c, tables[i].name, tables[i].what, &w, err);
    }
    return status;
}

static kvb_status choose_budgets(tune_command *c, kvb_error *err)
{
    word_list w = {0};
    uint64_t next = c->n_tokens > SHORT_TOKENS ? NEXT : NEXT / 4;
    // Heads are cut alone as often as what is left of the time allows: at five ratios of each text that is searched.
    double left = c->left - SEARCH_TEXTS * COSTS[0][PART_SELECT], cuts = left * (double)c->n_tokens / (double)next;
    uint64_t evaluations = c->seconds > 0 && left > 0 ? (uint64_t)(cuts / (5 * SEARCH_TEXTS)) + 1 : 1;
    size_t searched = evaluations > 1 ? SEARCH_TEXTS : 0;
    add_model_words(&w, c, "refine $M $F/importance.safetensors --candidate $F/output.safetensors --force");
    add_words(&w, c, "--output $F/tuned.safetensors");
    for (size_t i = 0; i < c->texts.count && searched; i++) {
        if (c->texts.items[i].part != PART_CALIBRATE || strstr(c->texts.items[i].path, ".jsonl")) continue;
        add_word(&w, "%s", c->texts.items[i].path);
        searched--;
    }
    add_texts(&w, c, PART_SELECT, "--select");
    add_word(&w, "--tokens=%" PRIu64, c->n_tokens);
    add_word(&w, "--next=%" PRIu64, next);
    add_word(&w, "--evaluations=%" PRIu64, evaluations);
    return run_step(c, "tuned", "both, and what lies between, are measured: each ratio takes the best", &w, err);
}

// ---- Judging ----

static kvb_status judge_table(tune_command *c, kvb_error *err)
{
    word_list w = {0};
    add_model_words(&w, c,
                    "eval $M tuned=$O.safetensors packed=$O-packed.safetensors published=$F/published.safetensors");
    add_texts(&w, c, PART_JUDGE, NULL);
    add_words(&w, c, "--allocator uniform --ratio 0.5,0.8,0.9,0.95");
    add_word(&w, "--tokens=%" PRIu64, c->n_tokens);
    if (c->refit) add_word(&w, "--refit");
    add_words(&w, c, "--output $F/worth");
    kvb_status status =
        run_step(c, "worth", "tokens are evicted for real, on texts that nothing was fitted to", &w, err);
    if (status != KVB_OK) return status;
    add_words(&w, c, "report $O.safetensors --force --record $F/run.h5 -o $O.html --results $F/worth.json");
    return run_step(c, "report", "the report", &w, err);
}

// Copies a step's table to NAME.safetensors, or with another end of the name.
static kvb_status take_table(const tune_command *c, const char *name, const char *end, kvb_error *err)
{
    char *from = need_text("%s/%s.safetensors", c->folder, name), *to = need_text("%s%s", c->output, end);
    file_view view;
    kvb_status status = file_map(&view, from, err);
    if (status == KVB_OK) {
        status = atomic_write(to, view.data, view.size, err);
        if (status == KVB_OK) status = file_check(&view, from, err);
        file_unmap(&view);
    }
    free_all(from, to);
    return status;
}

// Returns the row of an allocator at a ratio, or NULL.
static const cJSON *find_row(const results_document *d, bool learned, const char *allocator, double ratio)
{
    const cJSON *row;
    cJSON_ArrayForEach(row, d->rows)
    {
        bool its = strncmp(results_text(row, "metric"), "learned:", 8) == 0;
        if (its == learned && strcmp(results_text(row, "allocator"), allocator) == 0 &&
            fabs(results_number(row, "ratio") - ratio) < 1e-9)
            return row;
    }
    return NULL;
}

static void print_worth(const tune_command *c, const results_document *d)
{
    static const double ratios[] = {0.5, 0.8, 0.9, 0.95};
    double gentle = 0, better[2] = {0};
    size_t n = tune_texts_count(&c->texts, PART_JUDGE);
    printf("KL to the full cache over the next %d tokens, mean over %zu %s that nothing was fitted to\n", NEXT, n,
           plural(n, "text", "texts"));
    printf("  pruned   this table    packed   same ranking, equal budgets   SnapKV as published   same next token\n");
    for (int i = 0; i < 4; i++) {
        const cJSON *mine = find_row(d, true, "tuned", ratios[i]);
        double kl = results_number(mine, "kl"),
               others[] = {results_number(find_row(d, true, "uniform", ratios[i]), "kl"),
                           results_number(find_row(d, false, "published", ratios[i]), "kl")};
        printf("  %4.0f %%     %8.4f   %7.5f   %27.4f   %19.4f   %13.1f %%\n", 100 * ratios[i], kl,
               results_number(find_row(d, true, "packed", ratios[i]), "kl"), others[0], others[1],
               100 * results_number(mine, "top1"));
        if (kl <= 0.05) gentle = ratios[i];
        for (int o = 0; o < 2; o++) better[o] += kl < others[o];
    }
    if (gentle > 0)
        printf("Up to %.0f %% pruned, the model's output hardly changes (KL at most 0.05).\n", 100 * gentle);
    else printf("Even at 50 %% pruned the KL is above 0.05: prune less, or give texts like those that you serve.\n");
    if (better[0] == 4 && better[1] == 4) printf("It is better than both at every ratio.\n");
    else
        printf("Better than equal budgets at %.0f ratios of 4, than SnapKV as published at %.0f.\n", better[0],
               better[1]);
}

static kvb_status print_verdict(const tune_command *c, kvb_error *err)
{
    results_document found;
    char *path = need_text("%s/worth.json", c->folder);
    kvb_status status = results_open(&found, path, err);
    if (status == KVB_OK) {
        print_worth(c, &found);
        results_close(&found);
        printf("\n%s.safetensors is the table, %s.html its report. In Python, with transformers:\n"
               "  with kvbudget.compress(model, \"%s-packed.safetensors\", 0.9, refit=True): model.generate(...)\n"
               "%s-packed.safetensors takes the same bytes, for a cache that holds heads in 8, 4 or 2 bits, as this "
               "one does; refit=True also corrects what is kept.\n"
               "To share them (docs/ready-tables.md):\n"
               "  kvbudget tables --add %s.safetensors --name ORGANISATION/MODEL --results %s/worth.json\n"
               "%.0f s, %zu texts. ",
               c->output, c->output, c->output, c->output, c->output, c->folder, c->spent, c->texts.count);
        if (c->n_tokens < USUAL_TOKENS)
            printf("Contexts had %" PRIu64 " tokens; --tokens %d takes longer and is better for long prompts. ",
                   c->n_tokens, USUAL_TOKENS);
        puts(c->refit         ? "Texts of your own, after MODEL, make it yours."
             : c->seconds > 0 ? "With a longer --time more texts are read and more budgets tried."
                              : "--time 30min also cuts heads alone; texts of your own, after MODEL, make it yours.");
    }
    free(path);
    return status;
}

// ---- The run ----

static kvb_status open_model(tune_command *c, kvb_error *err)
{
    const model_options wishes = {.without_weights = true, .for_plan = c->plan};
    model *m = NULL;
    kvb_status status = model_open(&m, c->model, device_find(c->self, "cpu", "f32"), &wishes, err);
    if (status == KVB_OK) status = tokenizer_open(&c->tokens, m->source, NULL, err);
    progress bar;
    progress_begin(&bar, "hash of the model", c->quiet);
    if (status == KVB_OK && m->source->n_names > 0)
        status = model_identify(m, &(weights_watch){progress_hashed, &bar}, err);
    progress_clear(&bar);
    if (status == KVB_OK) {
        memcpy(c->model_sha256, m->sha256, sizeof c->model_sha256);
        const model_config *n = &m->config;
        double attention = 2.0 * n->width * n->head_dim * (n->n_heads + n->n_kv_heads),
               wide = n->n_experts ? (double)n->n_used * n->expert_width : n->ffn_width;
        double flops = 2.0 * USUAL_TOKENS * n->n_layers * (attention + 3 * n->width * wide);
        if (c->n_tokens == BY_SIZE) c->n_tokens = USUAL_TOKENS >> (flops > HALF_LENGTH) >> (flops > QUARTER_LENGTH);
        c->prefill_flops = c->n_tokens > USUAL_TOKENS ? flops / USUAL_TOKENS * (double)c->n_tokens : flops;
    }
    model_free(m);
    return status;
}

// Records which model, texts and settings the folder's steps are for. Steps of others are not continued: KVB_MISMATCH.
static kvb_status claim_folder(const tune_command *c, kvb_error *err)
{
    cJSON *about = cJSON_CreateObject(), *texts = cJSON_AddArrayToObject(about, "texts");
    json_put(about, "program %s model %s model_sha256 %s for %s refit %d tokens %g limited %d", KVBUDGET_VERSION,
             c->model, c->model_sha256, c->use, c->refit, (double)c->n_tokens, c->seconds > 0);
    for (size_t i = 0; i < c->texts.count; i++) {
        cJSON *one = cJSON_CreateObject();
        json_put(one, "name %s part %u sha256 %s", c->texts.items[i].path, (unsigned)c->texts.items[i].part,
                 c->texts.items[i].sha256);
        cJSON_AddItemToArray(texts, one);
    }
    char *path = need_text("%s/settings.json", c->folder), *text = needed(cJSON_Print(about), "settings"), *held = NULL;
    kvb_status status = cli_make_folder(c->folder, err);
    if (status == KVB_OK && access(path, F_OK) != 0) status = json_write(path, about, err);
    if (status == KVB_OK) status = cli_read_text(&held, NULL, path, err);
    if (status == KVB_OK && strncmp(held, text, strlen(text)) != 0)
        status = kvb_fail(err, KVB_MISMATCH,
                          "%s: is of another model, other texts or settings; remove %s, or give another -o", path,
                          c->folder);
    cJSON_free(text);
    cJSON_Delete(about);
    free_all(path, held);
    return status;
}

static kvb_status open_tune(tune_command *c, kvb_error *err)
{
    const char *temporary = getenv("TMPDIR");
    c->folder = c->plan ? need_text("%s/kvbudget-plan-XXXXXX", temporary && *temporary ? temporary : "/tmp")
                        : need_text("%s.tune", c->output);
    if (c->plan && !mkdtemp(c->folder)) return kvb_fail(err, KVB_IO, "%s: %s", c->folder, strerror(errno));
    c->log = need_text("%s/log.txt", c->folder);
    kvb_status status = open_model(c, err);
    if (status == KVB_OK)
        status = tune_texts_open(&c->texts, c->own, c->n_own, c->tokens, (uint32_t)c->n_tokens, NEXT, err);
    if (status != KVB_OK) return status;
    if (c->refit) tune_texts_limit(&c->texts, PART_SELECT, 0);
    if (!(c->seconds > 0)) limit_texts(c, USUAL_WORK / c->prefill_flops);
    if (!c->quiet)
        fprintf(stderr, "tune: %zu texts to calibrate on, %zu to choose by, %zu to judge%s%s\n",
                tune_texts_count(&c->texts, PART_CALIBRATE), tune_texts_count(&c->texts, PART_SELECT),
                tune_texts_count(&c->texts, PART_JUDGE), c->plan ? "" : "; steps and their log in ",
                c->plan ? "" : c->folder);
    if (!c->quiet && c->texts.too_short)
        fprintf(stderr, "tune: %zu texts have fewer than %" PRIu64 " tokens and are left out\n", c->texts.too_short,
                c->n_tokens + NEXT);
    return c->plan ? KVB_OK : claim_folder(c, err);
}

static kvb_status run_steps(tune_command *c, kvb_error *err)
{
    c->n_steps = STEPS - !(c->seconds > 0) - 2 * c->refit;
    kvb_status status = profile_all(c, err);
    if (status != KVB_OK || c->plan) return status;
    status = learn_ranking(c, err);
    if (status == KVB_OK) status = solve_tables(c, err);
    if (status == KVB_OK && !c->refit) status = choose_budgets(c, err);
    if (status == KVB_OK) status = take_table(c, c->refit ? "output" : "tuned", TABLE_END, err);
    if (status == KVB_OK) status = take_table(c, "packed", PACKED_END, err);
    if (status == KVB_OK) status = judge_table(c, err);
    return status == KVB_OK ? print_verdict(c, err) : status;
}

// After a stop, takes the best table that there is. One that is not measured does not replace an earlier table.
static kvb_status leave_best(const tune_command *c, kvb_error *err)
{
    const char *const order[] = {"tuned", c->refit ? "output" : "importance"};
    char *path = need_text("%s.safetensors", c->output);
    bool there = access(path, F_OK) == 0;
    free(path);
    for (int i = 0; i < 2 - there; i++) {
        if (read_mark(c, order[i]) < 0 || take_table(c, order[i], TABLE_END, err) != KVB_OK) continue;
        bool packed = read_mark(c, "packed") >= 0 && take_table(c, "packed", PACKED_END, err) == KVB_OK;
        return kvb_fail(err, KVB_INTERRUPTED,
                        "stopped; %s.safetensors is the best table so far%s%s; the same command continues", c->output,
                        packed ? ", beside it the packed one" : "", i == 0 ? "" : ", not yet measured");
    }
    return kvb_fail(err, KVB_INTERRUPTED, "stopped before there was a %stable; the same command continues",
                    there ? "better " : "");
}

// ---- Command line ----

// Parses "90", "90s", "10min" or "1.5h". Returns seconds, or 0 for anything else.
static double parse_time(const char *text)
{
    static const struct {
        const char *unit;
        double seconds;
    } units[] = {{"", 1}, {"s", 1}, {"min", 60}, {"m", 60}, {"h", 3600}};
    char *end;
    double value = strtod(text, &end);
    for (size_t i = 0; end != text && i < sizeof units / sizeof *units; i++)
        if (strcmp(end, units[i].unit) == 0 && value > 0 && value <= 1e6) return value * units[i].seconds;
    return 0;
}

static int check(tune_command *c, char **operands, int n_operands)
{
    for (int i = 1; i < n_operands; i++)
        if (kvb_ends_with(operands[i], ".safetensors"))
            return cli_usage_error(c->self, "%s: expected texts behind the model, found a table; tune makes its own",
                                   operands[i]);
    if (n_operands < 1 || (!c->plan && (!c->output || !*c->output || kvb_ends_with(c->output, "/"))))
        return cli_usage_error(c->self, "expected a model and -o NAME: kvbudget %s", c->self->synopsis);
    if (c->n_tokens != BY_SIZE && (c->n_tokens < 64 || c->n_tokens > 1 << 20))
        return cli_usage_error(c->self, "--tokens: expected 64 to 1048576, found %" PRIu64, c->n_tokens);
    c->seconds = c->time ? parse_time(c->time) : 0;
    if (c->time && !(c->seconds > 0))
        return cli_usage_error(c->self, "--time: expected seconds, or 10min or 2h, found '%s'", c->time);
    return EXIT_DONE;
}

static int tell_outputs(const tune_command *c)
{
    char *table = need_text("%s" TABLE_END, c->output), *packed = need_text("%s" PACKED_END, c->output),
         *page = need_text("%s.html", c->output);
    kvb_error err = {0};
    kvb_status status = named_output(table, "--output", FILE_TABLE, &err);
    if (status == KVB_OK) status = named_output(packed, "--output", FILE_TABLE, &err);
    if (status == KVB_OK) status = named_output(page, "--output", FILE_PAGE, &err);
    free_all(table, packed, page);
    return status == KVB_OK ? EXIT_DONE : cli_failed(c->self, &err);
}

static int tune_main(const cli_command *self, int argc, char **argv)
{
    tune_command c = {.self = self, .use = "text", .n_tokens = BY_SIZE};
    const cli_option options[] = {
        {"output", 'o', CLI_TEXT, &c.output, "NAME",
         "the table NAME.safetensors, NAME-packed.safetensors with formats, and the report NAME.html;\nNAME.tune/ gets "
         "the files of all steps"},
        {"time", 0, CLI_TEXT, &c.time, "TIME",
         "time limit, such as 10min, which decides how many texts are read and how many budgets tried\n(default: a "
         "fixed amount of work, which gives the same table on every run)"},
        {"for", 0, CLI_CHOICE, &c.use, "text|lookup",
         "what the table of tokens alone is for; text (default): change what follows least; lookup: keep\nsingle "
         "tokens that a question may ask for, too; what follows changes 0.9 to 1.4 times as much"},
        {"refit", 0, CLI_FLAG, &c.refit, NULL,
         "tables for caches whose kept entries are refitted (docs/refit.md), measured so; takes longer"},
        {"tokens", 't', CLI_COUNT, &c.n_tokens, "N",
         "tokens of a context (2048; of models beyond about 0.8 billion parameters 1024, beyond 4 billion 512)"},
        {"threads", 0, CLI_COUNT, &c.threads, "N", "OpenMP threads (default: all cores); changes no number"},
        {"plan", 0, CLI_FLAG, &c.plan, NULL,
         "print what the first of two passes over the texts would take; no -o needed"},
        {"quiet", 'q', CLI_FLAG, &c.quiet, NULL, "no progress; only the verdict"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first);
    if (code == EXIT_DONE) code = check(&c, argv + first, argc - first);
    if (code == EXIT_DONE && !c.plan) code = tell_outputs(&c);
    if (code == EXIT_DONE) {
        kvb_error err = {0};
        c.model = argv[first];
        c.own = argv + first + 1;
        c.n_own = (size_t)(argc - first - 1);
        cli_catch_signals();
        kvb_status status = open_tune(&c, &err);
        if (status == KVB_OK) status = run_steps(&c, &err);
        if (status == KVB_INTERRUPTED && !c.plan) status = leave_best(&c, &err);
        if (status != KVB_OK) code = cli_failed(self, &err);
    }
    if (c.plan && c.folder) (void)rmdir(c.folder);
    tune_texts_close(&c.texts);
    tokenizer_free(c.tokens);
    free_all(c.folder, c.log);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_tune = {
    .name = "tune",
    .synopsis = "tune MODEL [TEXT...] -o NAME [OPTION]...",
    .summary = "from a model to its best table and a report, by one command",
    .details =
        "Makes the best table that the other commands can make, with settings that worked best on four models:\n"
        "\n"
        "  profile   the model reads texts with its full cache, goes on and is asked for some of their lines, and "
        "what\n"
        "            every token was worth is recorded\n"
        "  learn     a ranking of tokens is fitted for each head; it needs no queries, so any engine can use it\n"
        "  profile   the model reads the texts again; what evicting by this ranking does to its output is recorded\n"
        "  solve     budgets that lose the least importance, and budgets that change the output least: of tokens for\n"
        "            what follows, and of tokens and formats for that and for lines\n"
        "  refine    both tables of tokens, and budgets between them, are measured on other texts; each ratio takes "
        "the best\n"
        "  eval      tokens are evicted for real, on texts that nothing was fitted to\n"
        "  report    NAME.html\n"
        "\n"
        "The program comes with texts (KVBUDGET_DATA names another folder). Yours are added: of every four,\n"
        "two calibrate, one chooses and one judges. Up to four contexts are taken from a calibration text.\n"
        "Large models read fewer of the program's texts, in shorter contexts. The same model and texts give the same\n"
        "table, with any number of threads, unless --time says how long it may take.\n"
        "\n"
        "Ctrl-C keeps the best table so far, and the same command continues. NAME.tune/ holds the record, all tables\n"
        "and the output of the steps; remove it when you are done.\n"
        "\n"
        "Examples:\n"
        "  kvbudget tune model.gguf -o tuned\n"
        "  kvbudget tune model.gguf logs/*.txt -o tuned --time 1h\n"
        "  kvbudget tune model.gguf -o facts --for lookup\n",
    .run = tune_main,
};
