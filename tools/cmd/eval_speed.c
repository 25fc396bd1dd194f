// kvbudget eval --speed: what a compacted cache weighs in memory, and how fast it decodes, against the full one.
#include "formats/need.h"
#include "runtime/fail.h"
#include "tools/cmd/eval_command.h"
#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ROUNDS = 3 }; // full and compacted caches take turns, so that a busy moment of the machine meets both

typedef struct speed_run {
    const eval_command *e;
    session *s;
    uint32_t n_sequences, n_steps;
    const int32_t *ids; // what is decoded, [n_steps]
    float *logits;      // [n_sequences, vocabulary]
} speed_run;

typedef struct speed_row {
    const char *label;
    kv_cache **caches; // [n_sequences], equal
    uint64_t entries, allocated, resident;
    double seconds; // per step, the least of all rounds
} speed_row;

// Bytes of this process that are in memory.
static uint64_t resident_bytes(void)
{
    unsigned long long pages = 0, resident = 0;
    malloc_trim(0);
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f) return 0;
    if (fscanf(f, "%llu %llu", &pages, &resident) != 2) resident = 0;
    (void)fclose(f); // only read
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

// n_sequences copies of a cache; the memory that the first one took is measured on the way.
static kvb_status take_caches(speed_run *r, speed_row *row, const kept_set *kept, kvb_error *err)
{
    row->caches = need(r->n_sequences, sizeof(kv_cache *), "sequences");
    uint64_t before = resident_bytes();
    kvb_status status = session_cache(r->s, kept, 0, &row->caches[0], err);
    if (status != KVB_OK) return status;
    uint64_t after = resident_bytes();
    row->resident = after > before ? after - before : 0;
    row->entries = kv_cache_entries(row->caches[0]);
    row->allocated = kv_cache_allocated(row->caches[0]);
    kv_cache_compact(row->caches[0], r->n_steps); // room to decode
    for (uint32_t i = 1; i < r->n_sequences; i++) row->caches[i] = kv_cache_fork(row->caches[0], r->n_steps);
    return KVB_OK;
}

static void free_row(const speed_run *r, speed_row *row)
{
    for (uint32_t i = 0; row->caches && i < r->n_sequences; i++) kv_cache_close(row->caches[i]);
    free(row->caches);
}

// n_steps tokens, one at a time, on every sequence; the caches are afterwards as before.
static kvb_status time_row(speed_run *r, speed_row *row, kvb_error *err)
{
    uint32_t *ones = need(r->n_sequences, sizeof *ones, "sequences");
    int32_t *ids = need(r->n_sequences, sizeof *ids, "sequences");
    kvb_status status = KVB_OK;
    double start = seconds_now();
    for (uint32_t step = 0; step < r->n_steps && status == KVB_OK; step++) {
        for (uint32_t i = 0; i < r->n_sequences; i++) {
            ones[i] = 1;
            ids[i] = r->ids[step];
        }
        status = decoder_run(r->s->decode, row->caches, r->n_sequences, ones, ids, NULL, LOGITS_LAST, r->logits, err);
        if (status == KVB_OK && cli_stop_requested) status = kvb_fail(err, KVB_INTERRUPTED, "stopped");
    }
    double took = (seconds_now() - start) / r->n_steps;
    row->seconds = row->seconds > 0 ? fmin(row->seconds, took) : took;
    for (uint32_t i = 0; i < r->n_sequences && status == KVB_OK; i++) {
        for (uint32_t l = 0; l < row->caches[i]->n_layers; l++) kv_cache_drop_last(row->caches[i], l, r->n_steps);
        row->caches[i]->next_position -= r->n_steps;
    }
    free(ones);
    free(ids);
    return status;
}

static void print_rows(const speed_run *r, const speed_row *rows, size_t n, double ratio)
{
    const model_config *c = &r->e->in.m->config;
    double all = (double)c->n_layers * c->n_kv_heads * r->s->n_tokens, entry = 2.0 * c->head_dim * sizeof(float);
    printf("%u tokens, %g %% pruned, %u sequence%s, %u steps; the best of %d rounds\n"
           "  cache               pruned  promised MiB  allocated MiB    off  resident MiB  ms per step  tokens/s  "
           "speed\n",
           r->s->n_tokens, 100 * ratio, r->n_sequences, r->n_sequences == 1 ? "" : "s", r->n_steps, ROUNDS);
    for (size_t i = 0; i < n; i++) {
        double promised = (i ? 1 - ratio : 1) * all * entry;
        printf("  %-18s %5.1f %%  %12.2f  %13.2f  %+4.1f %%  %12.2f  %11.2f  %8.1f  %4.2fx\n", rows[i].label,
               100 * (1 - (double)rows[i].entries / all), promised / 0x1p20, (double)rows[i].allocated / 0x1p20,
               100 * ((double)rows[i].allocated / promised - 1), (double)rows[i].resident / 0x1p20,
               1e3 * rows[i].seconds, r->n_sequences / rows[i].seconds, rows[0].seconds / rows[i].seconds);
    }
}

static kvb_status measure_rows(speed_run *r, speed_row *rows, size_t n, double ratio, progress *bar, kvb_error *err)
{
    const eval_command *e = r->e;
    const method_list list = methods_list(&e->with);
    rows[0].label = "full";
    kvb_status status = take_caches(r, &rows[0], NULL, err);
    for (size_t i = 1; i < n && status == KVB_OK; i++) {
        const method_column *column = &e->with.columns[i - 1];
        kept_set kept = {0};
        rows[i].label = column->how->label;
        status = method_select(r->s, &list, column, ratio, true, NULL, &kept, err);
        if (status == KVB_OK) status = take_caches(r, &rows[i], &kept, err);
        kept_set_free(&kept);
    }
    if (status == KVB_OK) session_end_prefill(r->s);
    for (int round = 0; round < ROUNDS; round++)
        for (size_t i = 0; i < n && status == KVB_OK; i++) {
            status = time_row(r, &rows[i], err);
            progress_update(bar, round * (double)n + (double)i + 1, ROUNDS * (double)n, "timings");
        }
    return status;
}

kvb_status eval_measure_speed(const eval_command *e, kvb_error *err)
{
    speed_run r = {.e = e, .n_sequences = e->batch ? (uint32_t)e->batch : 1, .n_steps = (uint32_t)e->in.n_next};
    const method_list list = methods_list(&e->with);
    session_plan plan = {.max_tokens = (uint32_t)e->in.n_tokens,
                         .max_new = r.n_steps,
                         .max_rows = r.n_sequences,
                         .statistics = e->in.opened.statistics};
    metric *metrics = NULL;
    progress bar;
    speed_row *rows = need(e->with.n_columns + 1, sizeof *rows, "caches");
    size_t n = 1;
    double ratio = e->with.ratio_names.count ? e->with.ratios[0] : 0.8;
    // One metric is enough: speed depends on how many tokens stay, not on which.
    while (n <= e->with.n_columns && e->with.columns[n - 1].method == 0 &&
           e->with.columns[n - 1].how->kind != ALLOCATOR_ORACLE)
        n++;
    r.logits = need((size_t)r.n_sequences * e->in.m->config.vocabulary, sizeof *r.logits, "logits");
    kvb_status status = KVB_OK;
    if (!e->with.items[0].m.kind)
        status =
            kvb_fail(err, KVB_ARGUMENT, "--speed measures caches that were evicted once: give a metric or a table");
    if (status == KVB_OK) {
        plan.metrics = metrics = method_metrics(&plan.n_metrics, &list);
        r.ids = e->in.texts[0].ids + e->in.n_tokens;
        progress_begin(&bar, "speed", e->out.quiet);
        status = session_open(&r.s, e->in.m, &plan, err);
    }
    if (status == KVB_OK) status = session_prefill(r.s, e->in.texts[0].ids, (uint32_t)e->in.n_tokens, NULL, NULL, err);
    if (status == KVB_OK) status = measure_rows(&r, rows, n, ratio, &bar, err);
    if (r.s) progress_end(&bar, status == KVB_OK ? "%s" : "failed: %s", e->in.texts[0].name);
    if (status == KVB_OK) print_rows(&r, rows, n, ratio);
    for (size_t i = 0; i < n; i++) free_row(&r, &rows[i]);
    session_close(r.s);
    free(rows);
    free(metrics);
    free(r.logits);
    return status;
}
