#include "profiler/model/forward.h"
#include "formats/need.h"
#include "profiler/model/forward_parts.h"
#include "runtime/fail.h"
#include <string.h>

static uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

// An array of the forward pass, and its size. One table of these serves the plan's estimate and the allocation.
typedef struct forward_array {
    size_t offset; // of a dev in struct forward
    uint64_t floats;
} forward_array;

enum { N_ARRAYS = 12, CENTRE_ROWS = 64 };

static uint32_t budgeted(const model *m)
{
    return model_budgeted(&m->config, m->config.n_layers);
}

// Of one context.
static uint64_t packed_floats(const model *m, const forward_plan *plan)
{
    const model_config *c = &m->config;
    return (uint64_t)c->n_layers * m->device->b->packed_floats(m->device, plan->max_tokens,
                                                               attention_heads(c->n_heads, c->n_kv_heads, c->head_dim));
}

// Returns how many layers' keys and values are kept unpacked: all, or, if attention reads packed ones, the one that is
// being prefilled.
static uint32_t plain_layers(const model *m, const forward_plan *plan)
{
    return packed_floats(m, plan) ? 1 : m->config.n_layers * plan->places;
}

static void list_arrays(forward_array out[N_ARRAYS], const model *m, const forward_plan *p)
{
    const model_config *c = &m->config;
    uint64_t L = c->n_layers, B = budgeted(m), G = c->n_kv_heads, H = c->n_heads, d = c->head_dim,
             rows = larger(p->max_tokens, CHUNK_ROWS);
    uint64_t tails = L * p->max_questions * G * p->max_tail * d, context = plain_layers(m, p) * G * p->max_tokens * d;
    const forward_array all[N_ARRAYS] = {
        {offsetof(forward, k), context},
        {offsetof(forward, v), context},
        {offsetof(forward, packed), p->places * packed_floats(m, p)},
        {offsetof(forward, weights), p->oracle ? p->places * B * H * p->max_tokens : 0},
        {offsetof(forward, centre), p->oracle && p->output ? H * d : 0},
        {offsetof(forward, tail_k), tails},
        {offsetof(forward, tail_v), tails},
        {offsetof(forward, best), p->oracle ? p->max_questions * B * G * p->max_tokens : 0},
        {offsetof(forward, x), rows * c->width},
        {offsetof(forward, q_raw), rows * H * d},
        {offsetof(forward, q), rows * H * d},
        {offsetof(forward, picked), (uint64_t)CHUNK_ROWS * c->width},
    };
    memcpy(out, all, sizeof all);
}

uint64_t forward_bytes(const model *m, const forward_plan *plan)
{
    forward_array arrays[N_ARRAYS];
    uint64_t floats = 0;
    list_arrays(arrays, m, plan);
    for (int i = 0; i < N_ARRAYS; i++) floats += arrays[i].floats;
    return floats * sizeof(float) + layer_pass_bytes(m, CHUNK_ROWS, plan->max_tokens + plan->max_tail);
}

uint64_t forward_cache_bytes(const model *m, const forward_plan *plan)
{
    const model_config *c = &m->config;
    uint64_t layer = 2ull * c->n_kv_heads * plan->max_tokens * c->head_dim;
    return (plain_layers(m, plan) * layer + plan->places * packed_floats(m, plan)) * sizeof(float);
}

static backend_limits limits_of(const model *m, const forward_plan *plan)
{
    return layer_limits(m, plan->max_tokens, plan->max_tail, CHUNK_ROWS);
}

uint64_t forward_scratch_bytes(const model *m, const forward_plan *plan)
{
    backend_limits limits = limits_of(m, plan);
    return m->device->b->scratch_bytes(m->device, &limits);
}

kvb_status forward_open(forward **out, const model *m, const forward_plan *plan, kvb_error *err)
{
    *out = NULL;
    forward *f = need(1, sizeof *f, "passes");
    f->m = m;
    f->b = m->device->b;
    f->plan = *plan;
    forward_array arrays[N_ARRAYS];
    list_arrays(arrays, m, plan);
    for (int i = 0; i < N_ARRAYS; i++)
        if (arrays[i].floats)
            *(dev *)((char *)f + arrays[i].offset) = backend_memory(m->device, arrays[i].floats, "a pass");
    backend_limits limits = limits_of(m, plan);
    f->positions = need(larger(plan->max_tokens, CHUNK_ROWS), sizeof *f->positions, "positions");
    f->held = need(plan->places, sizeof *f->held, "contexts");
    f->place_of = need(plan->max_questions, sizeof *f->place_of, "questions");
    kvb_status status = layer_pass_open(&f->pass, m, &limits, plan->max_tokens + plan->max_tail, err);
    f->views = (layer_views){.m = m, .on = f->pass.on, .max_tokens = plan->max_tokens};
    if (status != KVB_OK) {
        forward_close(f);
        return status;
    }
    *out = f;
    return KVB_OK;
}

// ---- Queries that are kept for output errors ----

void forward_keep_queries(forward *f, uint32_t per_question)
{
    const model_config *c = &f->m->config;
    size_t B = budgeted(f->m), H = (size_t)c->n_heads * c->head_dim,
           kept = (size_t)f->plan.max_questions * per_question;
    kept_queries *l = f->kept = need(1, sizeof *l, "kept queries");
    *l = (kept_queries){.per_question = per_question, .max_kept = (uint32_t)kept};
    l->slot = need(kept, sizeof *l->slot, "kept queries");
    l->tail = need(kept, sizeof *l->tail, "kept queries");
    l->local = need(kept, sizeof *l->local, "kept queries");
    l->queries = backend_memory(f->m->device, B * kept * H, "kept queries");
    if (!f->packed.address) return;
    size_t floats = B * c->n_kv_heads * f->plan.max_tokens * c->head_dim;
    l->k = backend_memory(f->m->device, floats, "kept keys");
    l->v = backend_memory(f->m->device, floats, "kept values");
}

static void close_kept(forward *f)
{
    kept_queries *l = f->kept;
    if (!l) return;
    f->b->release(f->m->device, l->queries);
    f->b->release(f->m->device, l->k);
    f->b->release(f->m->device, l->v);
    free_all(l->slot, l->tail, l->rows, l->local, l->grams, l);
}

void forward_keep_rows(forward *f, const uint32_t *rows, uint32_t n)
{
    kept_queries *l = f->kept;
    if (n > l->room) l->rows = need_more(l->rows, l->room = n, sizeof *l->rows, "rows");
    if (n) memcpy(l->rows, rows, n * sizeof *rows);
    l->n_rows = n;
}

// Notes which of a call's kept rows are in a chunk, whose rows go through the layers together.
static void keep_chunk(kept_queries *l, const decode_row *rows, uint32_t first, uint32_t n)
{
    if (!l) return;
    l->n_local = 0;
    l->base = l->n_kept;
    for (uint32_t i = 0; i < l->n_rows && l->n_kept < l->max_kept; i++) {
        if (l->rows[i] < first || l->rows[i] >= first + n) continue;
        const decode_row *row = &rows[l->rows[i]];
        l->local[l->n_local++] = l->rows[i] - first;
        l->slot[l->n_kept] = row->question;
        l->tail[l->n_kept++] = row->tail;
    }
}

// Keeps a layer's queries of that chunk.
static void keep_layer_queries(forward *f, uint32_t layer)
{
    const kept_queries *l = f->kept;
    const model_config *c = &f->m->config;
    if (!l || model_layer_bounded(c, layer)) return;
    size_t H = (size_t)c->n_heads * c->head_dim, at = (size_t)model_budgeted(c, layer) * l->max_kept + l->base;
    for (uint32_t i = 0; i < l->n_local; i++)
        f->b->copy(f->pass.on, dev_at(l->queries, (at + i) * H), dev_at(f->q, l->local[i] * H), H);
}

static void keep_layer_context(forward *f, uint32_t layer, const prefix_kv *kv)
{
    const kept_queries *l = f->kept;
    const model_config *c = &f->m->config;
    if (!l || !l->k.address || model_layer_bounded(c, layer)) return;
    size_t n = (size_t)c->n_kv_heads * f->n_tokens * c->head_dim, at = model_budgeted(c, layer) * n;
    f->b->copy(f->pass.on, dev_at(l->k, at), kv->k, n);
    f->b->copy(f->pass.on, dev_at(l->v, at), kv->v, n);
}

// ---- The pass ----

void forward_close(forward *f)
{
    if (!f) return;
    close_kept(f);
    forward_array arrays[N_ARRAYS];
    list_arrays(arrays, f->m, &f->plan);
    for (int i = 0; i < N_ARRAYS; i++) f->b->release(f->m->device, *(dev *)((char *)f + arrays[i].offset));
    layer_views_close(&f->views);
    layer_pass_close(&f->pass);
    free_all(f->positions, f->held, f->place_of, f);
}

void forward_set_place(forward *f, uint32_t place)
{
    f->place = place;
    f->n_tokens = f->held[place];
}

prefix_kv forward_prefix(const forward *f, uint32_t layer)
{
    const model_config *c = &f->m->config;
    size_t token = (size_t)c->n_kv_heads * c->head_dim, before = (size_t)f->place * c->n_layers * f->plan.max_tokens;
    size_t at = f->packed.address ? 0 : (before + (size_t)layer * f->n_tokens) * token;
    prefix_kv kv = {dev_at(f->k, at), dev_at(f->v, at), f->n_tokens, {NULL}};
    if (f->packed.address)
        kv.packed =
            dev_at(f->packed, f->place * packed_floats(f->m, &f->plan) +
                                  layer * f->b->packed_floats(f->pass.on, f->n_tokens, model_attention(f->m, layer)));
    return kv;
}

tail_kv forward_tails(const forward *f, uint32_t layer)
{
    size_t at =
        (size_t)layer * f->plan.max_questions * f->m->config.n_kv_heads * f->plan.max_tail * f->m->config.head_dim;
    return (tail_kv){dev_at(f->tail_k, at), dev_at(f->tail_v, at), f->plan.max_tail};
}

// Computes queries, keys and values of the whole context for one layer.
static void project_context(forward *f, uint32_t layer)
{
    const model_config *c = &f->m->config;
    prefix_kv kv = forward_prefix(f, layer);
    uint32_t rows = model_context_rows(f->m);
    for (uint32_t first = 0; first < f->n_tokens; first += rows) {
        uint32_t n = f->n_tokens - first < rows ? f->n_tokens - first : rows;
        size_t queries = (size_t)first * c->n_heads * c->head_dim;
        layer_project(&f->pass, layer, dev_at(f->q_raw, queries), dev_at(f->q, queries),
                      dev_at(f->x, (size_t)first * c->width), f->positions + first, n);
        f->b->store_prefix(f->pass.on, kv.k, f->n_tokens, first, f->pass.keys, n, c->n_kv_heads, c->head_dim);
        f->b->store_prefix(f->pass.on, kv.v, f->n_tokens, first, f->pass.values, n, c->n_kv_heads, c->head_dim);
    }
    if (f->packed.address) f->b->pack_prefix(f->pass.on, &kv, model_attention(f->m, layer));
}

// Computes attention and feed-forward of the whole context for one layer.
static void mix_context(forward *f, uint32_t layer)
{
    const model_config *c = &f->m->config;
    prefix_kv kv = forward_prefix(f, layer);
    for (uint32_t first = 0; first < f->n_tokens; first += CHUNK_ROWS) {
        uint32_t n = f->n_tokens - first < CHUNK_ROWS ? f->n_tokens - first : CHUNK_ROWS;
        f->b->attend_prefix(f->pass.on, f->pass.attended, dev_at(f->q, (size_t)first * c->n_heads * c->head_dim), &kv,
                            first, n, model_attention(f->m, layer));
        layer_finish(&f->pass, layer, dev_at(f->x, (size_t)first * c->width), n, model_context_rows(f->m));
    }
}

// Floats from one question's importance to the next one's.
static size_t best_stride(const forward *f)
{
    return (size_t)budgeted(f->m) * f->m->config.n_kv_heads * f->plan.max_tokens;
}

// Returns a layer's part of the oracle; a bounded layer has none.
static oracle_view oracle_of(const forward *f, uint32_t layer)
{
    const model_config *c = &f->m->config;
    size_t per_layer = (size_t)c->n_kv_heads * f->n_tokens, at = model_budgeted(c, layer);
    size_t before = (size_t)f->place * budgeted(f->m) * c->n_heads * f->plan.max_tokens;
    oracle_view oracle = {{NULL}, {NULL}, best_stride(f), f->plan.output};
    if (!f->plan.oracle || model_layer_bounded(c, layer)) return oracle;
    oracle.weights = dev_at(f->weights, before + at * c->n_heads * f->n_tokens);
    oracle.best = dev_at(f->best, at * per_layer);
    return oracle;
}

// Returns the mean output of each head over the context's last rows, or {NULL} if plan.output is not set.
static dev find_centre(forward *f, uint32_t layer, const prefix_kv *kv)
{
    const model_config *c = &f->m->config;
    uint32_t n = f->n_tokens < CENTRE_ROWS ? f->n_tokens : CENTRE_ROWS, first = f->n_tokens - n;
    if (!f->plan.output) return (dev){NULL};
    f->b->attend_prefix(f->pass.on, f->pass.attended, dev_at(f->q, (size_t)first * c->n_heads * c->head_dim), kv, first,
                        n, model_attention(f->m, layer));
    const float *rows = f->b->host_view(f->pass.on, f->pass.attended); // backends that sum importance share host memory
    for (size_t i = 0, width = (size_t)c->n_heads * c->head_dim; i < width; i++) {
        double sum = 0;
        for (uint32_t r = 0; r < n; r++) sum += rows[r * width + i];
        f->centre.address[i] = (float)(sum / n);
    }
    return f->centre;
}

static kvb_status prefill_layer(forward *f, uint32_t layer, const layer_observer *observer, bool mix, kvb_error *err)
{
    prefix_kv kv = forward_prefix(f, layer);
    oracle_view oracle = oracle_of(f, layer);
    project_context(f, layer);
    keep_layer_context(f, layer, &kv);
    kvb_status status =
        observer ? layer_views_show(&f->views, layer, &kv, f->q_raw, f->q, f->pass.frequency, observer, err) : KVB_OK;
    if (status != KVB_OK) return status;
    if (oracle.weights.address)
        f->b->value_weights(f->pass.on, oracle.weights, &kv, f->m->layers[layer].value_root, find_centre(f, layer, &kv),
                            model_attention(f->m, layer));
    if (mix) mix_context(f, layer);
    return KVB_OK;
}

static kvb_status begin_context(forward *f, const int32_t *ids, uint32_t n_tokens, kvb_error *err)
{
    if (n_tokens == 0 || n_tokens > f->plan.max_tokens)
        return kvb_fail(err, KVB_ARGUMENT, "context: %u tokens, expected 1 to %u", n_tokens, f->plan.max_tokens);
    kvb_status status = layer_check_ids(&f->pass, ids, n_tokens, err);
    if (status != KVB_OK) return status;
    layer_begin_context(&f->pass, n_tokens);
    f->n_tokens = f->held[f->place] = n_tokens;
    for (uint32_t i = 0; i < n_tokens; i++) f->positions[i] = i;
    layer_embed(&f->pass, f->x, ids, n_tokens);
    return KVB_OK;
}

kvb_status forward_prefill(forward *f, const int32_t *ids, uint32_t n_tokens, const layer_observer *observer,
                           const forward_progress *progress, float *logits, kvb_error *err)
{
    uint32_t L = f->m->config.n_layers;
    kvb_status status = begin_context(f, ids, n_tokens, err);
    for (uint32_t layer = 0; status == KVB_OK && layer < L; layer++) {
        bool mix = layer + 1 < L || logits; // nobody reads what the last layer adds to the stream
        status = prefill_layer(f, layer, observer, mix, err);
        if (status == KVB_OK && progress && !progress->step(progress->context, layer + 1, L))
            return kvb_fail(err, KVB_INTERRUPTED, "stopped in the prefill, after layer %u of %u", layer + 1, L);
    }
    if (status != KVB_OK) return status;
    if (logits) layer_logits(&f->pass, f->x, n_tokens, &(logit_use){.logits = logits}, 0);
    return layer_end(&f->pass, err);
}

void forward_begin_questions(forward *f, const uint32_t *places, uint32_t n_questions)
{
    size_t n = n_questions * best_stride(f);
    if (f->kept) f->kept->n_kept = f->kept->n_rows = 0;
    if (f->plan.oracle && n > 0) f->b->clear(f->pass.on, f->best, n);
    for (uint32_t i = 0; i < n_questions; i++) f->place_of[i] = places ? places[i] : f->place;
}

// Rows attend to their contexts: of neighbouring rows with the same one, all together.
static void attend_contexts(forward *f, uint32_t layer, const tail_kv *tails, const decode_row *rows, uint32_t n)
{
    size_t H = (size_t)f->m->config.n_heads * f->m->config.head_dim;
    for (uint32_t first = 0, next = 0; first < n; first = next) {
        while (next < n && f->place_of[rows[next].question] == f->place_of[rows[first].question]) next++;
        forward_set_place(f, f->place_of[rows[first].question]);
        prefix_kv kv = forward_prefix(f, layer);
        oracle_view oracle = oracle_of(f, layer);
        f->b->attend_rows(f->pass.on, dev_at(f->pass.attended, first * H), dev_at(f->q, first * H), &kv, tails,
                          rows + first, next - first, model_attention(f->m, layer), &oracle);
    }
}

// Runs one chunk of rows through all layers; leaves the residual stream in x.
static void run_rows(forward *f, const decode_row *rows, const int32_t *ids, uint32_t n)
{
    const model_config *c = &f->m->config;
    for (uint32_t i = 0; i < n; i++) f->positions[i] = f->held[f->place_of[rows[i].question]] + rows[i].tail;
    layer_embed(&f->pass, f->x, ids, n);
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        tail_kv tails = forward_tails(f, layer);
        layer_project(&f->pass, layer, f->q_raw, f->q, f->x, f->positions, n);
        keep_layer_queries(f, layer);
        f->b->store_tail(f->pass.on, tails.k, tails.capacity, rows, f->pass.keys, n, c->n_kv_heads, c->head_dim);
        f->b->store_tail(f->pass.on, tails.v, tails.capacity, rows, f->pass.values, n, c->n_kv_heads, c->head_dim);
        attend_contexts(f, layer, &tails, rows, n);
        layer_finish(&f->pass, layer, f->x, n, 0);
    }
}

static kvb_status check_decode_rows(const forward *f, const decode_row *rows, uint32_t n, kvb_error *err)
{
    for (uint32_t i = 0; i < n; i++)
        if (rows[i].question >= f->plan.max_questions || rows[i].tail >= f->plan.max_tail)
            return kvb_fail(err, KVB_ARGUMENT, "row %u: question %u, tail %u; expected below %u and %u", i,
                            rows[i].question, rows[i].tail, f->plan.max_questions, f->plan.max_tail);
    return KVB_OK;
}

static kvb_status decode_rows(forward *f, const decode_row *rows, const int32_t *ids, uint32_t n_rows,
                              const uint32_t *logit_rows, uint32_t n_logits, const logit_use *use, kvb_error *err)
{
    const model_config *c = &f->m->config;
    kvb_status status = check_decode_rows(f, rows, n_rows, err);
    if (status == KVB_OK) status = layer_check_ids(&f->pass, ids, n_rows, err);
    if (status != KVB_OK) return status;
    uint32_t done = 0; // of logit_rows, which ascend
    for (uint32_t first = 0; first < n_rows; first += DECODE_ROWS) {
        uint32_t n = n_rows - first < DECODE_ROWS ? n_rows - first : DECODE_ROWS, from = done;
        keep_chunk(f->kept, rows, first, n);
        run_rows(f, rows + first, ids + first, n);
        // The rows that are asked for are gathered, so that one product with the output matrix serves all of them.
        for (; done < n_logits && logit_rows[done] < first + n; done++)
            f->b->copy(f->pass.on, dev_at(f->picked, (size_t)(done - from) * c->width),
                       dev_at(f->x, (size_t)(logit_rows[done] - first) * c->width), c->width);
        layer_logits(&f->pass, f->picked, done - from, use, from);
    }
    return layer_end(&f->pass, err);
}

kvb_status forward_rows(forward *f, const decode_row *rows, const int32_t *ids, uint32_t n_rows,
                        const uint32_t *logit_rows, uint32_t n_logits, float *logits, kvb_error *err)
{
    return decode_rows(f, rows, ids, n_rows, logit_rows, n_logits, &(logit_use){.logits = logits}, err);
}

kvb_status forward_draw(forward *f, const decode_row *rows, const int32_t *ids, uint32_t n_rows,
                        const uint32_t *logit_rows, uint32_t n_drawn, const sampler *s, const draw_key *keys,
                        int32_t *drawn, kvb_error *err)
{
    return decode_rows(f, rows, ids, n_rows, logit_rows, n_drawn, &(logit_use){NULL, s, keys, drawn}, err);
}

kvb_status forward_importance(const forward *f, uint32_t question, float *out, kvb_error *err)
{
    size_t n = (size_t)budgeted(f->m) * f->m->config.n_kv_heads * f->held[f->place_of[question]];
    f->b->download(f->pass.on, out, dev_at(f->best, question * best_stride(f)), n);
    return layer_end(&f->pass, err);
}
