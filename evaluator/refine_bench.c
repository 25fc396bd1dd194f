#include "evaluator/refine_bench.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "profiler/backend/meter.h"
#include "runtime/fail.h"
#include "study/measured.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t bench_heads(const refine_bench *b)
{
    return (size_t)b->m->config.n_layers * b->m->config.n_kv_heads;
}

// ---- Sets of texts ----

kvb_status refine_bench_deal(refine_bench *b, const refine_set *asked, kvb_error *err)
{
    static const refine_set DEAL[4] = {SET_CALIBRATION, SET_TEST, SET_SELECTION, SET_TEST};
    for (int s = 0; s < SET_COUNT; s++) b->members[s] = need(b->n_texts, sizeof *b->members[s], "texts");
    for (uint32_t t = 0; t < b->n_texts; t++) {
        refine_set set = asked ? asked[t] : DEAL[t % 4];
        b->members[set][b->n_members[set]++] = t;
    }
    if (!b->n_members[SET_CALIBRATION] && b->n_members[SET_SELECTION])
        b->members[SET_CALIBRATION][b->n_members[SET_CALIBRATION]++] = b->members[SET_SELECTION][0];
    if (b->n_members[SET_CALIBRATION] && b->n_members[SET_SELECTION]) return KVB_OK;
    return kvb_fail(err, KVB_ARGUMENT,
                    "%u texts to search on and %u to select by, expected some of both: give at least 3 texts, or "
                    "--select",
                    b->n_members[SET_CALIBRATION], b->n_members[SET_SELECTION]);
}

uint64_t refine_bench_bytes(const refine_bench *b)
{
    return (b->n_members[SET_CALIBRATION] + b->n_members[SET_SELECTION] + 2) * damage_text_bytes(b->m, &b->plan);
}

// ---- Opening ----

kvb_status refine_bench_open(refine_bench *b, const char *log, kvb_error *err)
{
    char text[1024];
    int n = snprintf(text, sizeof text, "kvbudget-refine 1\n%s\n%s %s\n%u %u\n%s\n%u %u", b->m->sha256,
                     b->m->device->b->name, b->m->device->b->compute, b->plan.n_tokens, b->plan.n_next,
                     b->plan.by->spec, b->plan.sink, b->plan.window);
    if (b->plan.refit) n += snprintf(text + n, sizeof text - (size_t)n, "\nrefit 3 %u", b->plan.refit);
    b->open = need(b->n_texts, sizeof *b->open, "texts");
    sha256_hex(text, (size_t)n, b->origin);
    kvb_status status = log_open(&b->log, log, err);
    return status == KVB_OK ? damage_open(&b->d, b->m, &b->plan, err) : status;
}

kvb_status refine_bench_free(refine_bench *b, kvb_status status, kvb_error *err)
{
    for (uint32_t t = 0; b->open && t < b->n_texts; t++) damage_text_close(&b->open[t]);
    free(b->open);
    damage_close(b->d);
    for (int s = 0; s < SET_COUNT; s++) free(b->members[s]);
    return log_close(b->log, status, err);
}

// ---- One text ----

static kvb_status check_stop(const refine_bench *b, kvb_error *err)
{
    if (!b->stop || b->stop->step(b->stop->context, 0, 1)) return KVB_OK;
    return kvb_fail(err, KVB_INTERRUPTED, "stopped");
}

static kvb_status fill_text(refine_bench *b, uint32_t text, kvb_error *err)
{
    const sweep_text *from = &b->texts[text];
    damage_text *t = &b->open[text];
    kvb_error inner = {0};
    if (t->full.next) return KVB_OK;
    double start = meter_now();
    *t = damage_text_open(b->d);
    kvb_status status = damage_text_fill(b->d, t, from->ids, b->stop, &inner);
    b->prefill_seconds += meter_now() - start;
    b->n_prefills++;
    if (status == KVB_OK) return KVB_OK;
    damage_text_close(t);
    return kvb_fail(err, status, "%s: %s", from->name, inner.message);
}

static void name_cut(const refine_bench *b, uint32_t text, const uint32_t *keep, char *key)
{
    size_t n = bench_heads(b), prefix = 2 * 64;
    unsigned char *bytes = need(prefix + n * sizeof *keep, 1, "bytes of a cut's name");
    memcpy(bytes, b->origin, 64);
    memcpy(bytes + 64, b->texts[text].sha256, 64);
    memcpy(bytes + prefix, keep, n * sizeof *keep);
    sha256_hex(bytes, prefix + n * sizeof *keep, key);
    free(bytes);
}

// ---- The log ----

kvb_status damage_value_read(damage_value *out, const log_file *log, const char *key, kvb_error *err)
{
    const cJSON *line = log_find(log, key);
    *out = (damage_value){log_number(line, "kl"), log_number(line, "flips"), log_number(line, "nll")};
    return isfinite(out->kl) && isfinite(out->flips) && isfinite(out->nll) ? KVB_OK : log_refuse(log, key, err);
}

static kvb_status add_damage(refine_bench *b, char (*keys)[LOG_KEY], const damage_value *values, uint32_t n,
                             kvb_error *err)
{
    for (uint32_t i = 0; i < n; i++)
        if (!isfinite(values[i].kl) || !isfinite(values[i].nll))
            return kvb_fail(err, KVB_NUMERIC, "a cut cache gave logits that are not numbers");
    cJSON **lines = need(n, sizeof *lines, "results");
    for (uint32_t i = 0; i < n; i++) {
        lines[i] = cJSON_CreateObject();
        cJSON_AddStringToObject(lines[i], "key", keys[i]);
        log_put_number(lines[i], "kl", values[i].kl);
        log_put_number(lines[i], "flips", values[i].flips);
        log_put_number(lines[i], "nll", values[i].nll);
    }
    kvb_status status = log_add(b->log, lines, n, err);
    free(lines);
    return status;
}

// ---- Cuts ----

// Cuts that the log does not have yet, from any of the texts.
typedef struct new_cuts {
    damage_cut *cuts;      // [n]
    char (*keys)[LOG_KEY]; // [n]
    damage_value *found;   // [n]
    uint32_t n;
} new_cuts;

// Adds the cuts of one text that have to be measured. Different shifts may give equal cuts: those are measured once.
static kvb_status find_new(refine_bench *b, uint32_t text, const uint32_t *keep, uint32_t n, new_cuts *w,
                           kvb_error *err)
{
    size_t heads = bench_heads(b);
    uint32_t first = w->n;
    for (uint32_t i = 0; i < n; i++) {
        bool known = false;
        name_cut(b, text, keep + i * heads, w->keys[w->n]);
        for (uint32_t j = first; j < w->n && !known; j++) known = strcmp(w->keys[j], w->keys[w->n]) == 0;
        if (known || log_find(b->log, w->keys[w->n])) continue;
        w->cuts[w->n] = (damage_cut){&b->open[text], keep + i * heads, &w->found[w->n], NULL};
        w->n++;
    }
    b->n_known += n - (w->n - first);
    return w->n > first ? fill_text(b, text, err) : KVB_OK;
}

// Measures the new cuts a batch at a time, and logs each batch before the next begins.
static kvb_status measure_new(refine_bench *b, const new_cuts *w, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (uint32_t i = 0, some; i < w->n && status == KVB_OK; i += some) {
        some = w->n - i < b->plan.batch ? w->n - i : b->plan.batch;
        status = damage_measure_cuts(b->d, w->cuts + i, some, err);
        if (status == KVB_OK) status = add_damage(b, w->keys + i, w->found + i, some, err);
        if (status == KVB_OK) b->n_measured += some;
        if (status == KVB_OK) status = check_stop(b, err);
    }
    return status;
}

// Reads the results of n cuts of one text from the log into out[i * step].
static kvb_status take_known(const refine_bench *b, uint32_t text, const uint32_t *keep, uint32_t n, damage_value *out,
                             size_t step, kvb_error *err)
{
    char key[LOG_KEY];
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; i < n && status == KVB_OK; i++) {
        name_cut(b, text, keep + i * bench_heads(b), key);
        status = damage_value_read(&out[i * step], b->log, key, err);
    }
    return status;
}

// Measures n cuts of every listed text: keep [n, heads], out [n, n_texts].
static kvb_status measure_texts(refine_bench *b, const uint32_t *members, const uint32_t *texts, uint32_t n_texts,
                                const uint32_t *keep, uint32_t n, damage_value *out, kvb_error *err)
{
    size_t most = (size_t)n * n_texts;
    new_cuts w = {need(most, sizeof *w.cuts, "cuts"), need(most + 1, sizeof *w.keys, "cuts"),
                  need(most, sizeof *w.found, "cuts"), 0};
    kvb_status status = KVB_OK;
    for (uint32_t t = 0; t < n_texts && status == KVB_OK; t++)
        status = find_new(b, members[texts[t]], keep, n, &w, err);
    if (status == KVB_OK) status = measure_new(b, &w, err);
    for (uint32_t t = 0; t < n_texts && status == KVB_OK; t++)
        status = take_known(b, members[texts[t]], keep, n, out + t, n_texts, err);
    free_all(w.cuts, w.keys, w.found);
    return status == KVB_OK ? check_stop(b, err) : status;
}

// ---- Candidates ----

// Reads the budgets that an engine would get from a table at n ratios: keep [n, heads].
static kvb_status read_budgets(const refine_bench *b, const kvb_table *table, const double *ratios, uint32_t n,
                               uint32_t *keep, kvb_error *err)
{
    size_t heads = bench_heads(b);
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; i < n && status == KVB_OK; i++)
        status = kvb_budgets(table, ratios[i], b->plan.n_tokens,
                             &(kvb_budget_options){.strict = b->strict, .lookup = KVB_LOOKUP_LINEAR}, keep + i * heads,
                             heads, err);
    return status;
}

// Computes the budgets of one candidate at the knots: keep [n_knots, heads].
static kvb_status find_budgets(const refine_bench *b, const double *shift, uint32_t *keep, kvb_error *err)
{
    kvb_table *table;
    kvb_status status = refine_table_apply(b->table, b->knots, b->n_knots, shift, &table, err);
    if (status == KVB_OK) status = read_budgets(b, table, b->knots, b->n_knots, keep, err);
    kvb_table_close(table);
    return status;
}

// Computes the budgets of n candidates: keep [n, n_knots, heads].
static kvb_status list_budgets(const refine_bench *b, const double *shift, uint32_t n, uint32_t *keep, kvb_error *err)
{
    size_t each = b->n_knots * bench_heads(b);
    kvb_status status = KVB_OK;
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t i = 0; i < n; i++) {
        kvb_error own = {0};
        kvb_status one = find_budgets(b, shift + i * each, keep + i * each, &own);
        if (one == KVB_OK) continue;
#pragma omp critical(refine_budgets)
        {
            status = one;
            if (err) *err = own;
        }
    }
    return status;
}

// Measures n candidates, given by shift [n, n_knots, heads], on texts of a set, given by their numbers in it: out
// [n, n_knots, n_texts].
static kvb_status measure_shifts(refine_bench *b, refine_set set, const double *shift, uint32_t n,
                                 const uint32_t *texts, uint32_t n_texts, damage_value *out, kvb_error *err)
{
    uint32_t cuts = n * b->n_knots;
    double start = meter_now();
    uint32_t *keep = need(cuts * bench_heads(b), sizeof *keep, "budgets");
    kvb_status status = list_budgets(b, shift, n, keep, err);
    if (status == KVB_OK) status = measure_texts(b, b->members[set], texts, n_texts, keep, cuts, out, err);
    b->seconds += meter_now() - start;
    free(keep);
    return status;
}

kvb_status refine_bench_losses(void *context, bool selecting, const double *shift, double *loss, kvb_error *err)
{
    refine_bench *b = context;
    refine_set set = selecting ? SET_SELECTION : SET_CALIBRATION;
    uint32_t n = (uint32_t)b->n_members[set], *texts = need(n, sizeof *texts, "texts");
    size_t cells = (size_t)b->n_knots * n;
    damage_value *out = need(cells, sizeof *out, "results");
    for (uint32_t i = 0; i < n; i++) texts[i] = i;
    kvb_status status = measure_shifts(b, set, shift, 1, texts, n, out, err);
    for (size_t i = 0; i < cells && status == KVB_OK; i++) loss[i] = out[i].kl;
    free_all(out, texts);
    return status;
}

kvb_status refine_bench_judge(refine_bench *b, refine_set set, const double *shift, double **out, kvb_error *err)
{
    size_t K = b->n_knots, heads = bench_heads(b), n = b->n_members[set];
    double *both = need(2 * K * heads, sizeof *both, "shifts"), *kl = need(2 * K * (n + 1), sizeof *kl, "losses");
    damage_value *found = need(2 * K, sizeof *found, "results");
    kvb_status status = KVB_OK;
    memcpy(both + K * heads, shift, K * heads * sizeof *shift);
    for (uint32_t t = 0; t < n && status == KVB_OK; t++) {
        status = measure_shifts(b, set, both, 2, &t, 1, found, err);
        for (size_t i = 0; i < 2 * K && status == KVB_OK; i++) {
            kl[i] += found[i].kl / (double)n;
            kl[2 * K + i * n + t] = found[i].kl;
        }
        if (set == SET_TEST) damage_text_close(&b->open[b->members[set][t]]); // each text is measured once
    }
    free_all(both, found);
    *out = status == KVB_OK ? kl : NULL;
    if (status != KVB_OK) free(kl);
    return status;
}

// ---- Heads alone ----

// Writes the keys [n, heads] of cuts in which one head alone is cut: in keys[i] head i % heads keeps keep[i] tokens.
static void name_heads(const refine_bench *b, uint32_t text, const uint32_t *keep, uint32_t n, char (*keys)[LOG_KEY])
{
    size_t heads = bench_heads(b);
    uint32_t *cut = need(heads, sizeof *cut, "heads");
    for (size_t i = 0; i < n * heads; i++) {
        for (size_t h = 0; h < heads; h++) cut[h] = h == i % heads ? keep[i] : b->plan.n_tokens;
        name_cut(b, text, cut, keys[i]);
    }
    free(cut);
}

// Measures n cuts of every head alone on one text, out [n, heads], or reads them from the log if it has all of them.
static kvb_status measure_heads(refine_bench *b, uint32_t text, const uint32_t *keep, uint32_t n, damage_value *out,
                                kvb_error *err)
{
    size_t cuts = n * bench_heads(b), known = 0;
    char(*keys)[LOG_KEY] = need(cuts, sizeof *keys, "cuts");
    kvb_status status = KVB_OK;
    name_heads(b, text, keep, n, keys);
    for (; status == KVB_OK && known < cuts && log_find(b->log, keys[known]); known++)
        status = damage_value_read(&out[known], b->log, keys[known], err);
    if (status == KVB_OK && known < cuts) {
        double begin = meter_now();
        status = fill_text(b, text, err);
        double filled = meter_now();
        if (status == KVB_OK) status = damage_measure_heads(b->d, &b->open[text], keep, n, out, b->stop, err);
        if (status == KVB_OK) status = add_damage(b, keys, out, (uint32_t)cuts, err);
        b->seconds += filled - begin;
        b->alone_seconds += meter_now() - filled;
        b->n_alone += cuts;
    }
    free(keys);
    return status;
}

// Measures the KL when only one head is cut: loss [n_levels, heads], the mean over the first n_texts calibration texts.
static kvb_status measure_alone(refine_bench *b, const double *levels, uint32_t n_levels, uint32_t n_texts,
                                double *loss, kvb_error *err)
{
    size_t heads = bench_heads(b), cuts = n_levels * heads;
    uint32_t *keep = need(cuts, sizeof *keep, "budgets");
    damage_value *found = need(cuts, sizeof *found, "results");
    double *none = need(heads, sizeof *none, "shifts"), begin = meter_now();
    kvb_table *table = NULL;
    kvb_status status = refine_table_apply(b->table, b->knots, 1, none, &table, err);
    if (status == KVB_OK) status = read_budgets(b, table, levels, n_levels, keep, err);
    for (uint32_t t = 0; t < n_texts && status == KVB_OK; t++) {
        status = measure_heads(b, b->members[SET_CALIBRATION][t], keep, n_levels, found, err);
        for (size_t i = 0; i < cuts && status == KVB_OK; i++) loss[i] += found[i].kl / n_texts;
        if (status == KVB_OK && b->heads_told) b->heads_told(b, n_levels, t + 1, n_texts, meter_now() - begin);
    }
    kvb_table_close(table);
    free_all(none, keep, found);
    return status;
}

kvb_status refine_bench_start(refine_bench *b, refine_task *t, double *shift, uint32_t *n_texts, kvb_error *err)
{
    double levels[MEASURED_LEVELS_MAX];
    uint32_t n_levels = measured_levels(b->knots, b->n_knots, levels);
    double one = 0.5 * n_levels * t->n_heads / b->n_knots / t->n_texts; // text's cost, in evaluations
    *n_texts = (uint32_t)fmin(t->n_texts, floor(0.75 * t->evaluations / one));
    if (*n_texts == 0) return KVB_OK;
    double *loss = need((size_t)n_levels * t->n_heads, sizeof *loss, "losses");
    kvb_status status = measure_alone(b, levels, n_levels, *n_texts, loss, err);
    if (status == KVB_OK)
        status = measured_shifts(&b->table->base, levels, n_levels, loss, t->heads, b->knots, b->n_knots, shift, err);
    free(loss);
    t->start_cost += one * *n_texts;
    return status;
}
