#include "evaluator/decoder.h"
#include "evaluator/attend.h"
#include "formats/need.h"
#include "profiler/backend/linalg.h"
#include "profiler/model/layer.h"
#include "runtime/fail.h"
#include <omp.h>
#include <stdlib.h>

struct decoder {
    const model *m;
    const backend *b;
    uint32_t max_rows, max_positions;
    dev x, picked;                        // [max_rows, D] residual stream; rows of it whose logits are wanted
    dev q_raw, q;                         // [max_rows, H*d]
    layer_pass pass;                      // for max_rows rows at positions below max_positions
    float *sinks;                         // [L, H] on the host; NULL: the model has none
    uint32_t *positions;                  // [max_rows]
    float *host_q, *host_o;               // [max_rows, H*d]
    float *host_k, *host_v;               // [max_rows, G*d]
    const float *queries, *keys, *values; // of the present layer: host_q, ..., or device memory that the host can read
    uint32_t *chosen;                     // [threads, entries] of the choose hook
    size_t chosen_entries;
    attend_scratch *scratch; // [n_threads]
    int n_threads;
};

// One call of decoder_run.
typedef struct decode_batch {
    kv_cache *const *caches;
    uint32_t n_sequences;
    const uint32_t *n_rows;
    uint32_t total_rows;
    const decode_hooks *hooks; // [n_sequences], or NULL
} decode_batch;

// Returns a sequence's hooks, or NULL if the batch has none.
static const decode_hooks *hooks_of(const decode_batch *batch, uint32_t sequence)
{
    return batch->hooks ? &batch->hooks[sequence] : NULL;
}

// Copies the attention sinks to the host, where attention runs.
static void take_sinks(decoder *d)
{
    const model_config *c = &d->m->config;
    if (!(c->switches & SINKS)) return;
    d->sinks = need((size_t)c->n_layers * c->n_heads, sizeof *d->sinks, "sinks");
    for (uint32_t l = 0; l < c->n_layers; l++)
        d->b->download(d->m->device, d->sinks + (size_t)l * c->n_heads, d->m->layers[l].sinks, c->n_heads);
}

kvb_status decoder_open(decoder **out, const model *m, uint32_t max_rows, uint32_t max_positions, kvb_error *err)
{
    const model_config *c = &m->config;
    size_t rows = max_rows, heads = (size_t)c->n_heads * c->head_dim, kv = (size_t)c->n_kv_heads * c->head_dim;
    decoder *d = need(1, sizeof *d, "decoders");
    *out = NULL;
    *d = (decoder){.m = m, .b = m->device->b, .max_rows = max_rows, .max_positions = max_positions};
    d->n_threads = omp_get_max_threads();
    d->scratch = need((size_t)d->n_threads, sizeof *d->scratch, "threads");
    d->positions = need(rows, sizeof *d->positions, "positions");
    d->host_q = need(rows * heads, sizeof(float), "numbers of queries");
    d->host_o = need(rows * heads, sizeof(float), "numbers of outputs");
    d->host_k = need(rows * kv, sizeof(float), "numbers of keys");
    d->host_v = need(rows * kv, sizeof(float), "numbers of values");
    dev *const places[] = {&d->x, &d->picked, &d->q_raw, &d->q};
    for (int i = 0; i < 4; i++) *places[i] = backend_memory(m->device, rows * (i < 2 ? c->width : heads), "rows");
    take_sinks(d);
    backend_limits limits = layer_limits(m, 1, 1, max_rows); // attention does not run on the device
    kvb_status status = layer_pass_open(&d->pass, m, &limits, max_positions, err);
    if (status != KVB_OK) {
        decoder_close(d);
        return status;
    }
    *out = d;
    return KVB_OK;
}

void decoder_close(decoder *d)
{
    if (!d) return;
    const dev places[] = {d->x, d->picked, d->q_raw, d->q};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) d->b->release(d->m->device, places[i]);
    layer_pass_close(&d->pass);
    for (int t = 0; d->scratch && t < d->n_threads; t++) attend_release(&d->scratch[t]);
    free_all(d->scratch, d->chosen, d->sinks, d->positions, d->host_q, d->host_o, d->host_k, d->host_v, d);
}

void decoder_begin_context(decoder *d, uint32_t n_tokens)
{
    layer_begin_context(&d->pass, n_tokens);
}

// Returns n floats of the device as host memory: the device's own if the host can read it, else a copy in `host`.
static const float *bring(const decoder *d, float *host, dev from, size_t n)
{
    const float *shared = d->b->host_view(d->pass.on, from);
    if (!shared) d->b->download(d->pass.on, host, from, n);
    return shared ? shared : host;
}

// ---- Attention ----

// Makes room for the longest head of the batch in every thread's scratch.
static void reserve_scratch(decoder *d, const decode_batch *batch)
{
    uint32_t longest = 1;
    bool choose = false;
    for (uint32_t s = 0; s < batch->n_sequences; s++) {
        const kv_cache *c = batch->caches[s];
        choose = choose || (hooks_of(batch, s) && hooks_of(batch, s)->choose);
        for (size_t h = 0; h < (size_t)c->n_layers * c->n_kv_heads; h++) {
            uint32_t count = c->counts[h] + (c->base ? c->base->counts[h] : 0);
            longest = count > longest ? count : longest;
        }
    }
    longest += batch->total_rows;
    for (int t = 0; t < d->n_threads; t++) attend_reserve(&d->scratch[t], longest, d->m->config.head_dim);
    if (!choose || longest <= d->chosen_entries) return;
    free(d->chosen);
    d->chosen_entries = (size_t)longest + 256;
    d->chosen = need((size_t)d->n_threads * d->chosen_entries, sizeof *d->chosen, "chosen entries");
}

// Runs attention of one KV head of one sequence; `first` is the sequence's first row in the batch.
static void attend_sequence(decoder *d, const decode_batch *batch, const decode_view *view, uint32_t first, uint32_t g)
{
    const model_config *c = &d->m->config;
    const decode_hooks *hooks = hooks_of(batch, view->sequence);
    uint32_t group = view->group, per_tile = ATTEND_LINES / group, n = view->n_rows;
    attend_scratch *scratch = &d->scratch[omp_get_thread_num()];
    kv_span span = kv_cache_span(view->cache, view->layer, g),
            before = attend_before(scratch, view->cache, view->layer, g);
    size_t step = (size_t)c->n_heads * c->head_dim;
    const uint32_t *chosen = NULL;
    uint32_t n_chosen = 0;
    attention_shape shape = model_attention(d->m, view->layer);
    attend_rule rule = {.window = shape.window, .softcap = shape.softcap};
    if (d->sinks) rule.sinks = d->sinks + (size_t)view->layer * c->n_heads + (size_t)g * group;
    if (hooks && hooks->choose && n == 1) {
        uint32_t *indices = d->chosen + (size_t)omp_get_thread_num() * d->chosen_entries;
        const float *q = d->queries + first * step + (size_t)g * group * c->head_dim;
        n_chosen = hooks->choose(hooks->context, view, g, span, q, indices);
        if (n_chosen != UINT32_MAX) chosen = indices;
    }
    for (uint32_t row = 0; row < n; row += per_tile) {
        uint32_t rows = n - row < per_tile ? n - row : per_tile;
        size_t at = (first + row) * step + (size_t)g * group * c->head_dim;
        kv_span seen = span;
        seen.count = span.count - (n - row - rows);
        rule.position = span.positions[span.count - n + row];
        attend_head(scratch, d->host_o + at, d->queries + at, step, rows, group, before, seen, c->head_dim, chosen,
                    n_chosen, &rule);
        if (hooks && hooks->attended) {
            decode_view part = *view;
            part.n_rows = rows;
            part.q = d->queries + (first + row) * step;
            hooks->attended(hooks->context, &part, g, seen, scratch->scores);
        }
    }
}

static decode_view view_of(const decoder *d, const decode_batch *batch, uint32_t sequence, uint32_t layer,
                           uint32_t first)
{
    const model_config *c = &d->m->config;
    size_t at = (size_t)first * c->n_heads * c->head_dim;
    return (decode_view){
        sequence, layer, batch->n_rows[sequence], c->n_heads / c->n_kv_heads, d->queries + at, batch->caches[sequence]};
}

static void append_rows(decoder *d, const decode_batch *batch, uint32_t layer)
{
    const model_config *c = &d->m->config;
    size_t row = 0, dim = c->head_dim;
    for (uint32_t s = 0; s < batch->n_sequences; s++)
        for (uint32_t i = 0; i < batch->n_rows[s]; i++, row++)
            for (uint32_t g = 0; g < c->n_kv_heads; g++) {
                size_t at = (row * c->n_kv_heads + g) * dim;
                kv_cache_append(batch->caches[s], layer, g, d->keys + at, d->values + at, d->positions[row]);
            }
}

// Runs attention of all sequences and heads, from d->queries to d->host_o.
static void attend_heads(decoder *d, const decode_batch *batch, uint32_t layer)
{
    const model_config *c = &d->m->config;
    uint32_t n_tasks = batch->n_sequences * c->n_kv_heads;
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t task = 0; task < n_tasks; task++) {
        uint32_t sequence = task / c->n_kv_heads, first = 0;
        for (uint32_t s = 0; s < sequence; s++) first += batch->n_rows[s];
        decode_view view = view_of(d, batch, sequence, layer, first);
        if (view.n_rows) attend_sequence(d, batch, &view, first, task % c->n_kv_heads);
    }
}

static kvb_status attend_layer(decoder *d, const decode_batch *batch, uint32_t layer, kvb_error *err)
{
    const model_config *c = &d->m->config;
    uint32_t n = batch->total_rows;
    d->queries = bring(d, d->host_q, d->q, (size_t)n * c->n_heads * c->head_dim);
    append_rows(d, batch, layer);
    attend_heads(d, batch, layer);
    d->b->upload(d->pass.on, d->pass.attended, d->host_o, (size_t)n * c->n_heads * c->head_dim);
    for (uint32_t s = 0, first = 0; s < batch->n_sequences; first += batch->n_rows[s++]) {
        const decode_hooks *hooks = hooks_of(batch, s);
        if (!hooks || !hooks->layer_done || !batch->n_rows[s]) continue;
        decode_view view = view_of(d, batch, s, layer, first);
        kvb_status status = hooks->layer_done(hooks->context, &view, err);
        if (status != KVB_OK) return status;
    }
    return KVB_OK;
}

// ---- The pass ----

static kvb_status run_layer(decoder *d, const decode_batch *batch, uint32_t layer, kvb_error *err)
{
    const model_config *c = &d->m->config;
    uint32_t n = batch->total_rows;
    size_t keys = (size_t)n * c->n_kv_heads * c->head_dim;
    layer_project(&d->pass, layer, d->q_raw, d->q, d->x, d->positions, n);
    d->keys = bring(d, d->host_k, d->pass.keys, keys);
    d->values = bring(d, d->host_v, d->pass.values, keys);
    kvb_status status = attend_layer(d, batch, layer, err);
    if (status == KVB_OK) layer_finish(&d->pass, layer, d->x, n, 0);
    return status;
}

static void write_logits(decoder *d, const decode_batch *batch, decode_logits which, float *logits)
{
    const model_config *c = &d->m->config;
    dev from = d->x;
    uint32_t n = batch->total_rows;
    if (which == LOGITS_LAST) {
        from = d->picked;
        n = 0;
        for (uint32_t s = 0, row = 0; s < batch->n_sequences; s++) {
            row += batch->n_rows[s];
            d->b->copy(d->pass.on, dev_at(d->picked, (size_t)n++ * c->width),
                       dev_at(d->x, (size_t)(row - 1) * c->width), c->width);
        }
    }
    layer_logits(&d->pass, from, n, &(logit_use){.logits = logits}, 0);
}

static kvb_status check_batch(const decoder *d, const decode_batch *batch, decode_logits which, kvb_error *err)
{
    const model_config *c = &d->m->config;
    for (uint32_t s = 0; s < batch->n_sequences; s++) {
        const kv_cache *cache = batch->caches[s];
        if (cache->n_layers != c->n_layers || cache->n_kv_heads != c->n_kv_heads || cache->head_dim != c->head_dim)
            return kvb_fail(err, KVB_MISMATCH, "decoder: sequence %u's cache is not of this model", s);
        if (kv_cache_room(cache) < batch->n_rows[s])
            return kvb_fail(err, KVB_CAPACITY, "decoder: sequence %u has room for %u tokens, expected %u", s,
                            kv_cache_room(cache), batch->n_rows[s]);
        if (batch->n_rows[s] > d->max_positions || cache->next_position > d->max_positions - batch->n_rows[s])
            return kvb_fail(err, KVB_ARGUMENT, "decoder: sequence %u would reach position %llu, expected at most %u", s,
                            (unsigned long long)cache->next_position + batch->n_rows[s], d->max_positions);
        const decode_hooks *hooks = hooks_of(batch, s);
        if (cache->base && hooks && (hooks->choose || hooks->attended || hooks->layer_done))
            return kvb_fail(err, KVB_ARGUMENT, "decoder: sequence %u has hooks and a cache with a base", s);
        if (which == LOGITS_LAST && batch->n_rows[s] == 0)
            return kvb_fail(err, KVB_ARGUMENT, "decoder: sequence %u has no row, so it has no logits", s);
    }
    return KVB_OK;
}

// Counts the rows, checks everything but their ids, and assigns their positions.
static kvb_status begin_batch(decoder *d, decode_batch *batch, decode_logits which, kvb_error *err)
{
    uint64_t total = 0;
    for (uint32_t s = 0; s < batch->n_sequences; s++) total += batch->n_rows[s];
    if (total == 0 || total > d->max_rows)
        return kvb_fail(err, KVB_ARGUMENT, "decoder: %llu rows at once, expected 1 to %u", (unsigned long long)total,
                        d->max_rows);
    batch->total_rows = (uint32_t)total;
    kvb_status status = check_batch(d, batch, which, err);
    if (status != KVB_OK) return status;
    reserve_scratch(d, batch);
    for (uint32_t s = 0, row = 0; s < batch->n_sequences; s++)
        for (uint32_t i = 0; i < batch->n_rows[s]; i++) d->positions[row++] = batch->caches[s]->next_position + i;
    return KVB_OK;
}

// Runs the layers from `first` on over d->x. `streams` [L, rows, D], or NULL, receives the input of each.
static kvb_status run_layers(decoder *d, const decode_batch *batch, uint32_t first, float *streams, decode_logits which,
                             float *logits, kvb_error *err)
{
    size_t floats = (size_t)batch->total_rows * d->m->config.width;
    kvb_status status = KVB_OK;
    for (uint32_t layer = first; status == KVB_OK && layer < d->m->config.n_layers; layer++) {
        if (streams) d->b->download(d->pass.on, streams + layer * floats, d->x, floats);
        status = run_layer(d, batch, layer, err);
    }
    if (status != KVB_OK) return status;
    if (logits) write_logits(d, batch, which, logits);
    status = layer_end(&d->pass, err);
    for (uint32_t s = 0; s < batch->n_sequences && status == KVB_OK; s++)
        batch->caches[s]->next_position += batch->n_rows[s];
    return status;
}

static kvb_status run_tokens(decoder *d, decode_batch *batch, const int32_t *ids, float *streams, decode_logits which,
                             float *logits, kvb_error *err)
{
    kvb_status status = begin_batch(d, batch, which, err);
    if (status == KVB_OK) status = layer_check_ids(&d->pass, ids, batch->total_rows, err);
    if (status != KVB_OK) return status;
    layer_embed(&d->pass, d->x, ids, batch->total_rows);
    return run_layers(d, batch, 0, streams, which, logits, err);
}

kvb_status decoder_run(decoder *d, kv_cache *const *caches, uint32_t n_sequences, const uint32_t *n_rows,
                       const int32_t *ids, const decode_hooks *hooks, decode_logits which, float *logits,
                       kvb_error *err)
{
    decode_batch batch = {caches, n_sequences, n_rows, 0, hooks};
    return run_tokens(d, &batch, ids, NULL, which, logits, err);
}

kvb_status decoder_run_streams(decoder *d, kv_cache *const *caches, uint32_t n_sequences, const uint32_t *n_rows,
                               const int32_t *ids, float *streams, kvb_error *err)
{
    decode_batch batch = {caches, n_sequences, n_rows, 0, NULL};
    return run_tokens(d, &batch, ids, streams, LOGITS_ALL, NULL, err);
}

kvb_status decoder_run_from(decoder *d, uint32_t layer, const float *stream, kv_cache *const *caches,
                            uint32_t n_sequences, const uint32_t *n_rows, float *logits, kvb_error *err)
{
    decode_batch batch = {caches, n_sequences, n_rows, 0, NULL};
    if (layer >= d->m->config.n_layers)
        return kvb_fail(err, KVB_ARGUMENT, "decoder: layer %u, expected 0 to %u", layer, d->m->config.n_layers - 1);
    kvb_status status = begin_batch(d, &batch, LOGITS_ALL, err);
    if (status != KVB_OK) return status;
    d->b->upload(d->pass.on, d->x, stream, (size_t)batch.total_rows * d->m->config.width);
    return run_layers(d, &batch, layer, NULL, LOGITS_ALL, logits, err);
}
