// kvbudget refine, the measuring half: shifts become a table, the table budgets, budgets cuts, and cuts damage.
#include "formats/sha256.h"
#include "runtime/fail.h"
#include "tools/cmd/refine_command.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t heads_of(const refine_bench *b)
{
    return (size_t)b->m->config.n_layers * b->m->config.n_kv_heads;
}

kvb_status refine_bench_take_lengths(refine_bench *b, kvb_error *err)
{
    b->lengths = malloc((b->n_texts + 1) * sizeof *b->lengths);
    b->length_of = malloc((b->n_texts + 1) * sizeof *b->length_of);
    if (!b->lengths || !b->length_of) return kvb_fail(err, KVB_MEMORY, "no memory for %u texts", b->n_texts);
    for (uint32_t t = 0, at; t < b->n_texts; t++) {
        const sweep_text *text = &b->texts[t];
        for (at = 0; at < b->n_lengths && b->lengths[at] != text->n_tokens;) at++;
        if (at == b->n_lengths) b->lengths[b->n_lengths++] = text->n_tokens;
        b->length_of[t] = at;
        uint32_t next = text->n_ids - text->n_tokens;
        if (text->n_tokens > b->plan.n_tokens) b->plan.n_tokens = text->n_tokens;
        if (next > b->plan.n_next) b->plan.n_next = next;
    }
    return KVB_OK;
}

kvb_status refine_bench_open(refine_bench *b, const char *log, kvb_error *err)
{
    char text[1024];
    const char *statistics = b->plan.statistics ? b->plan.statistics->sha256 : "";
    int n = snprintf(text, sizeof text, "kvbudget-refine 1\n%s\n%s %s\n%u %u\n%s\n%u %u%s", b->m->sha256,
                     b->m->device->b->name, b->m->device->b->compute, b->plan.n_tokens, b->plan.n_next,
                     b->plan.by->spec, b->plan.sink, b->plan.window, statistics);
    b->open = calloc(b->n_texts + 1, sizeof *b->open);
    if (!b->open) return kvb_fail(err, KVB_MEMORY, "no memory for %u texts", b->n_texts);
    kvb_status status = sha256_hex(text, (size_t)n, b->origin, err);
    if (status == KVB_OK) status = damage_log_open(&b->log, log, err);
    return status == KVB_OK ? damage_open(&b->d, b->m, &b->plan, err) : status;
}

kvb_status refine_bench_free(refine_bench *b, kvb_status status, kvb_error *err)
{
    for (uint32_t t = 0; b->open && t < b->n_texts; t++) damage_text_close(&b->open[t]);
    free(b->open);
    free(b->lengths);
    free(b->length_of);
    damage_close(b->d);
    for (int s = 0; s < SET_COUNT; s++) free(b->members[s]);
    return damage_log_close(b->log, status, err);
}

void refine_bench_close_set(refine_bench *b, refine_set set)
{
    for (uint32_t i = 0; i < b->n_members[set]; i++) {
        damage_text *t = &b->open[b->members[set][i]];
        damage_text_close(t);
        *t = (damage_text){0};
    }
}

// ---- One text ----

static bool go_on(void *context, double done, double total)
{
    (void)context, (void)done, (void)total;
    return !cli_stop_requested;
}

static kvb_status fill_text(refine_bench *b, uint32_t text, kvb_error *err)
{
    const forward_progress watch = {go_on, NULL};
    const sweep_text *from = &b->texts[text];
    const damage_input in = {from->ids, from->n_tokens, from->n_ids - from->n_tokens};
    damage_text *t = &b->open[text];
    kvb_error inner = {0};
    if (t->full.next) return KVB_OK;
    double start = seconds_now();
    kvb_status status = damage_text_open(b->d, t, &inner);
    if (status == KVB_OK) status = damage_text_fill(b->d, t, &in, &watch, &inner);
    b->prefill_seconds += seconds_now() - start;
    b->n_prefills++;
    if (status == KVB_OK) return KVB_OK;
    damage_text_close(t);
    *t = (damage_text){0};
    return kvb_fail(err, status, "%s: %s", from->name, inner.message);
}

static kvb_status name_cut(const refine_bench *b, uint32_t text, const uint32_t *keep, char *key, kvb_error *err)
{
    size_t n = heads_of(b), prefix = 2 * 64;
    unsigned char *bytes = malloc(prefix + n * sizeof *keep);
    if (!bytes) return kvb_fail(err, KVB_MEMORY, "no memory for a name");
    memcpy(bytes, b->origin, 64);
    memcpy(bytes + 64, b->texts[text].sha256, 64);
    memcpy(bytes + prefix, keep, n * sizeof *keep);
    kvb_status status = sha256_hex(bytes, prefix + n * sizeof *keep, key, err);
    free(bytes);
    return status;
}

// Cuts that the log does not know, of any texts.
typedef struct new_cuts {
    damage_cut *cuts;         // [n]
    char (*keys)[DAMAGE_KEY]; // [n]
    damage_value *found;      // [n]
    uint32_t n;
} new_cuts;

static kvb_status open_new(new_cuts *w, size_t most, kvb_error *err)
{
    *w = (new_cuts){.cuts = calloc(most + 1, sizeof *w->cuts),
                    .keys = calloc(most + 1, sizeof *w->keys),
                    .found = calloc(most + 1, sizeof *w->found)};
    return w->cuts && w->keys && w->found ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for %zu cuts", most);
}

static void close_new(new_cuts *w)
{
    free(w->cuts);
    free(w->keys);
    free(w->found);
}

// Those among n cuts of one text. Equal cuts, as different shifts may make, are measured once.
static kvb_status find_new(refine_bench *b, uint32_t text, const uint32_t *keep, uint32_t n, new_cuts *w,
                           kvb_error *err)
{
    size_t heads = heads_of(b);
    uint32_t first = w->n;
    for (uint32_t i = 0; i < n; i++) {
        bool known = false;
        kvb_status status = name_cut(b, text, keep + i * heads, w->keys[w->n], err);
        if (status != KVB_OK) return status;
        for (uint32_t j = first; j < w->n && !known; j++) known = strcmp(w->keys[j], w->keys[w->n]) == 0;
        if (known || damage_log_find(b->log, w->keys[w->n])) continue;
        w->cuts[w->n] = (damage_cut){&b->open[text], keep + i * heads, &w->found[w->n]};
        w->n++;
    }
    b->n_known += n - (w->n - first);
    return w->n > first ? fill_text(b, text, err) : KVB_OK;
}

// A batch at a time, each in the log before the next begins.
static kvb_status measure_new(refine_bench *b, const new_cuts *w, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (uint32_t i = 0, some; i < w->n && status == KVB_OK; i += some) {
        some = w->n - i < b->plan.batch ? w->n - i : b->plan.batch;
        status = damage_measure_cuts(b->d, w->cuts + i, some, err);
        if (status == KVB_OK)
            status = damage_log_add(b->log, (const char(*)[DAMAGE_KEY])(w->keys + i), w->found + i, some, err);
        if (status == KVB_OK) b->n_measured += some;
        if (status == KVB_OK && cli_stop_requested) status = kvb_fail(err, KVB_INTERRUPTED, "stopped");
    }
    return status;
}

// What the log has of n cuts of one text, into out[i * step].
static kvb_status take_known(const refine_bench *b, uint32_t text, const uint32_t *keep, uint32_t n, damage_value *out,
                             size_t step, kvb_error *err)
{
    char key[DAMAGE_KEY];
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; i < n && status == KVB_OK; i++) {
        status = name_cut(b, text, keep + i * heads_of(b), key, err);
        if (status == KVB_OK) out[i * step] = *damage_log_find(b->log, key);
    }
    return status;
}

// n cuts of every listed text, keep [n_lengths, n, heads], out [n, n_texts].
static kvb_status measure_texts(refine_bench *b, const uint32_t *members, const uint32_t *texts, uint32_t n_texts,
                                const uint32_t *keep, uint32_t n, damage_value *out, kvb_error *err)
{
    new_cuts w;
    kvb_status status = open_new(&w, (size_t)n * n_texts, err);
    size_t each = n * heads_of(b);
    for (uint32_t t = 0; t < n_texts && status == KVB_OK; t++) {
        uint32_t text = members[texts ? texts[t] : t];
        status = find_new(b, text, keep + b->length_of[text] * each, n, &w, err);
    }
    if (status == KVB_OK) status = measure_new(b, &w, err);
    for (uint32_t t = 0; t < n_texts && status == KVB_OK; t++) {
        uint32_t text = members[texts ? texts[t] : t];
        status = take_known(b, text, keep + b->length_of[text] * each, n, out + t, n_texts, err);
    }
    close_new(&w);
    if (status == KVB_OK && cli_stop_requested) return kvb_fail(err, KVB_INTERRUPTED, "stopped");
    return status;
}

// ---- Candidates ----

// A table's budgets at n ratios, [n, heads], for contexts of so many tokens: those that an engine would get.
static kvb_status read_budgets(const refine_bench *b, const kvb_table *table, const double *ratios, uint32_t n,
                               uint32_t n_tokens, uint32_t *keep, kvb_error *err)
{
    size_t heads = heads_of(b);
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; i < n && status == KVB_OK; i++)
        status = kvb_budgets(table, ratios[i], n_tokens, &(kvb_budget_options){.strict = b->strict}, keep + i * heads,
                             heads, err);
    return status;
}

// Of one candidate at the knots, [n_knots, heads] for each length, `apart` from one to the next.
static kvb_status find_budgets(const refine_bench *b, const double *shift, uint32_t *keep, size_t apart, kvb_error *err)
{
    kvb_table *table;
    kvb_status status = refine_table_apply(b->table, b->knots, b->n_knots, shift, &table, err);
    for (uint32_t i = 0; i < b->n_lengths && status == KVB_OK; i++)
        status = read_budgets(b, table, b->knots, b->n_knots, b->lengths[i], keep + i * apart, err);
    kvb_table_close(table);
    return status;
}

// Of n candidates, [n_lengths, n, n_knots, heads].
static kvb_status list_budgets(const refine_bench *b, const double *shift, uint32_t n, uint32_t *keep, kvb_error *err)
{
    size_t each = b->n_knots * heads_of(b);
    kvb_status status = KVB_OK;
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t i = 0; i < n; i++) {
        kvb_error own = {0};
        kvb_status one = find_budgets(b, shift + i * each, keep + i * each, n * each, &own);
        if (one == KVB_OK) continue;
#pragma omp critical(refine_budgets)
        {
            status = one;
            if (err) *err = own;
        }
    }
    return status;
}

kvb_status refine_bench_measure(refine_bench *b, refine_set set, const double *shift, uint32_t n, const uint32_t *texts,
                                uint32_t n_texts, damage_value *out, kvb_error *err)
{
    uint32_t cuts = n * b->n_knots;
    double start = seconds_now();
    if (!texts) n_texts = b->n_members[set];
    uint32_t *keep = malloc(b->n_lengths * cuts * heads_of(b) * sizeof *keep + 1);
    kvb_status status = keep ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for the budgets of %u candidates", n);
    if (status == KVB_OK) status = list_budgets(b, shift, n, keep, err);
    if (status == KVB_OK) status = measure_texts(b, b->members[set], texts, n_texts, keep, cuts, out, err);
    b->seconds += seconds_now() - start;
    free(keep);
    return status;
}

kvb_status refine_bench_losses(void *context, bool selecting, const double *shift, uint32_t n, const uint32_t *texts,
                               uint32_t n_texts, double *loss, kvb_error *err)
{
    refine_bench *b = context;
    size_t cells = (size_t)n * b->n_knots * n_texts;
    damage_value *out = malloc(cells * sizeof *out + 1);
    if (!out) return kvb_fail(err, KVB_MEMORY, "no memory for %zu results", cells);
    kvb_status status =
        refine_bench_measure(b, selecting ? SET_SELECTION : SET_CALIBRATION, shift, n, texts, n_texts, out, err);
    for (size_t i = 0; i < cells && status == KVB_OK; i++)
        loss[i] = b->objective == OBJECTIVE_NLL ? out[i].nll : out[i].kl;
    free(out);
    return status;
}

// ---- Heads alone ----

// Budgets of the cut in which head h alone is cut, to keep[h].
static void cut_alone(const refine_bench *b, uint32_t text, const uint32_t *keep, size_t h, uint32_t *out)
{
    for (size_t i = 0; i < heads_of(b); i++) out[i] = i == h ? keep[h] : b->texts[text].n_tokens;
}

static kvb_status name_heads(const refine_bench *b, uint32_t text, const uint32_t *keep, uint32_t n,
                             char (*keys)[DAMAGE_KEY], kvb_error *err)
{
    size_t heads = heads_of(b);
    uint32_t *cut = malloc(heads * sizeof *cut);
    kvb_status status = cut ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for %zu heads", heads);
    for (size_t i = 0; i < n * heads && status == KVB_OK; i++) {
        cut_alone(b, text, keep + i / heads * heads, i % heads, cut);
        status = name_cut(b, text, cut, keys[i], err);
    }
    free(cut);
    return status;
}

// All n cuts of every head on one text, [n, heads], from the log where it has them all.
static kvb_status measure_heads(refine_bench *b, uint32_t text, const uint32_t *keep, uint32_t n, damage_value *out,
                                kvb_error *err)
{
    const forward_progress watch = {go_on, NULL};
    size_t cuts = n * heads_of(b), known = 0;
    char(*keys)[DAMAGE_KEY] = calloc(cuts, sizeof *keys);
    kvb_status status = keys ? name_heads(b, text, keep, n, keys, err) : kvb_fail(err, KVB_MEMORY, "no memory");
    for (; status == KVB_OK && known < cuts && damage_log_find(b->log, keys[known]); known++)
        out[known] = *damage_log_find(b->log, keys[known]);
    if (status == KVB_OK && known < cuts) {
        double begin = seconds_now();
        status = fill_text(b, text, err);
        double filled = seconds_now();
        if (status == KVB_OK) status = damage_measure_heads(b->d, &b->open[text], keep, n, out, &watch, err);
        if (status == KVB_OK)
            status = damage_log_add(b->log, (const char(*)[DAMAGE_KEY])keys, out, (uint32_t)cuts, err);
        b->seconds += filled - begin;
        b->alone_seconds += seconds_now() - filled;
        b->n_alone += cuts;
    }
    free(keys);
    return status;
}

// How far it is. What the log knew took no time, so that only cuts of this run tell how long the others will take.
static void show_heads(const refine_bench *b, uint32_t n_levels, uint32_t done, uint32_t n_texts, double seconds)
{
    double left = (double)(n_texts - done) * n_levels * (double)heads_of(b);
    fprintf(stderr, "refine: heads alone at %u budgets each, text %u of %u", n_levels, done, n_texts);
    if (b->n_alone) fprintf(stderr, ", %.0f s left\n", seconds / (double)b->n_alone * left);
    else fprintf(stderr, ", known from an earlier run\n");
}

kvb_status refine_bench_heads(refine_bench *b, const double *levels, uint32_t n_levels, uint32_t n_texts, bool shown,
                              double *loss, kvb_error *err)
{
    size_t heads = heads_of(b), cuts = n_levels * heads;
    uint32_t *keep = malloc(cuts * sizeof *keep);
    damage_value *found = malloc(cuts * sizeof *found);
    kvb_status status = keep && found ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for %zu cuts", cuts);
    double *none = calloc(heads, sizeof *none);
    kvb_table *table = NULL;
    if (status == KVB_OK && !none) status = kvb_fail(err, KVB_MEMORY, "no memory for %zu heads", heads);
    if (status == KVB_OK) status = refine_table_apply(b->table, b->knots, 1, none, &table, err);
    memset(loss, 0, cuts * sizeof *loss);
    double begin = seconds_now();
    for (uint32_t t = 0; t < n_texts && status == KVB_OK; t++) {
        uint32_t text = b->members[SET_CALIBRATION][t];
        status = read_budgets(b, table, levels, n_levels, b->texts[text].n_tokens, keep, err);
        if (status == KVB_OK) status = measure_heads(b, text, keep, n_levels, found, err);
        for (size_t i = 0; i < cuts && status == KVB_OK; i++) loss[i] += found[i].kl / n_texts;
        if (status == KVB_OK && shown) show_heads(b, n_levels, t + 1, n_texts, seconds_now() - begin);
    }
    kvb_table_close(table);
    free(none);
    free(keep);
    free(found);
    return status;
}
