#include "profiler/forward.h"
#include "profiler/layer_device.h"
#include "profiler/query_statistics.h"
#include "runtime/fail.h"
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

// Rows that go through a layer at a time, at most: backends may take a context in smaller pieces (context_rows). Decoded ones are fewer than a
// chunk, so that their bits do not depend on how many there are.
enum { CHUNK_ROWS = BACKEND_CHUNK_ROWS, DECODE_ROWS = CHUNK_ROWS - 64, CHUNK_LOGITS = 64, N_VIEWS = 6 };

struct forward {
    const model *m;
    const backend *b;
    forward_plan plan;
    uint32_t n_tokens; // T of the prefilled context
    // Context, packed for the present T.
    dev k, v;    // [L, G, T, d]; [G, T, d] of the layer that is prefilled where `packed` is there
    dev packed;  // [L] of what the backend made of them; {NULL} where it needs nothing of the kind
    dev weights; // oracle's w [L, H, T]
    // Questions.
    dev tail_k, tail_v; // [L, max_questions, G, max_tail, d]
    dev best;           // I [questions, L, G, T], packed for the present T
    // Activations.
    dev x;               // [max(T, CHUNK_ROWS), D] residual stream
    dev q_raw, q;        // [max(T, CHUNK_ROWS), H*d]
    dev h;               // [CHUNK_ROWS, max(D, H*d)] normed input, then attention output
    dev gate, up;        // [CHUNK_ROWS, max(F, G*d)]
    dev picked;          // [CHUNK_ROWS, D] rows whose logits are wanted
    dev logits;          // [CHUNK_LOGITS, vocabulary]
    dev cos_sin;         // [max_tokens + max_tail, rope_dim/2, 2]
    uint32_t *positions; // [max(T, CHUNK_ROWS)] host
    // For observers that need them, taken the first time.
    dev column_sums, row_log; // [H, T]
    dev output_norms;         // [H, T]
    float *views[N_VIEWS];    // host copies, where the device does not share its memory
    device_scratch reduced;   // of what observers ask the device for then
};

static uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

// What is taken, in floats, beside its place: one table for the plan's estimate and for the allocation itself.
typedef struct piece {
    size_t offset; // of a dev in struct forward
    uint64_t floats;
} piece;

enum { N_PIECES = 14 };

static uint64_t packed_floats(const model *m, const forward_plan *plan)
{
    const model_config *c = &m->config;
    return (uint64_t)c->n_layers *
           m->device->packed_floats(plan->max_tokens, (attention_shape){c->n_heads, c->n_kv_heads, c->head_dim});
}

// Layers whose keys and values are kept as they are: one, for as long as the layer is prefilled, where attention reads packed ones.
static uint32_t plain_layers(const model *m, const forward_plan *plan)
{
    return packed_floats(m, plan) ? 1 : m->config.n_layers;
}

static void list_pieces(piece out[N_PIECES], const model *m, const forward_plan *p)
{
    const model_config *c = &m->config;
    uint64_t L = c->n_layers, G = c->n_kv_heads, H = c->n_heads, d = c->head_dim,
             rows = larger(p->max_tokens, CHUNK_ROWS);
    uint64_t tails = L * p->max_questions * G * p->max_tail * d, context = plain_layers(m, p) * G * p->max_tokens * d;
    const piece all[N_PIECES] = {
        {offsetof(forward, k), context},
        {offsetof(forward, v), context},
        {offsetof(forward, weights), p->oracle ? L * H * p->max_tokens : 0},
        {offsetof(forward, tail_k), tails},
        {offsetof(forward, tail_v), tails},
        {offsetof(forward, best), p->oracle ? p->max_questions * L * G * p->max_tokens : 0},
        {offsetof(forward, x), rows * c->width},
        {offsetof(forward, q_raw), rows * H * d},
        {offsetof(forward, q), rows * H * d},
        {offsetof(forward, h), (uint64_t)CHUNK_ROWS * larger(c->width, c->n_heads * c->head_dim)},
        {offsetof(forward, gate), (uint64_t)CHUNK_ROWS * larger(c->ffn_width, c->n_kv_heads * c->head_dim)},
        {offsetof(forward, up), (uint64_t)CHUNK_ROWS * larger(c->ffn_width, c->n_kv_heads * c->head_dim)},
        {offsetof(forward, picked), (uint64_t)CHUNK_ROWS * c->width},
        {offsetof(forward, logits), (uint64_t)CHUNK_LOGITS * c->vocabulary},
    };
    memcpy(out, all, sizeof all);
}

uint64_t forward_bytes(const model *m, const forward_plan *plan)
{
    piece pieces[N_PIECES];
    uint64_t floats = ((uint64_t)plan->max_tokens + plan->max_tail) * m->config.rope_dim + packed_floats(m, plan);
    list_pieces(pieces, m, plan);
    for (int i = 0; i < N_PIECES; i++) floats += pieces[i].floats;
    return floats * sizeof(float);
}

uint64_t forward_cache_bytes(const model *m, const forward_plan *plan)
{
    const model_config *c = &m->config;
    uint64_t layer = 2ull * c->n_kv_heads * plan->max_tokens * c->head_dim;
    return (plain_layers(m, plan) * layer + packed_floats(m, plan)) * sizeof(float);
}

// Angles in float32, position times frequency, as the models were trained and as transformers computes them.
static kvb_status fill_cos_sin(forward *f, uint32_t positions, kvb_error *err)
{
    uint32_t half = f->m->config.rope_dim / 2;
    float *table = malloc((size_t)positions * half * 2 * sizeof(float) + 1);
    f->cos_sin = f->b->alloc((size_t)positions * half * 2);
    if (!table || !f->cos_sin.address) {
        free(table);
        return kvb_fail(err, KVB_MEMORY, "rotary table: no memory for %u positions", positions);
    }
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < positions; i++)
        for (uint32_t p = 0; p < half; p++) {
            float angle = (float)i * f->m->rope_frequency[p];
            table[((size_t)i * half + p) * 2] = (float)cos(angle);
            table[((size_t)i * half + p) * 2 + 1] = (float)sin(angle);
        }
    f->b->upload(f->cos_sin, table, (size_t)positions * half * 2);
    free(table);
    return KVB_OK;
}

static backend_limits limits_of(const model *m, const forward_plan *plan)
{
    const model_config *c = &m->config;
    return (backend_limits){plan->max_tokens,
                            plan->max_tail,
                            CHUNK_ROWS,
                            larger(c->vocabulary, larger(c->ffn_width, larger(c->width, c->n_heads * c->head_dim))),
                            {c->n_heads, c->n_kv_heads, c->head_dim}};
}

uint64_t forward_scratch_bytes(const model *m, const forward_plan *plan)
{
    backend_limits limits = limits_of(m, plan);
    return m->device->scratch_bytes(&limits);
}

kvb_status forward_open(forward **out, const model *m, const forward_plan *plan, kvb_error *err)
{
    *out = NULL;
    forward *f = calloc(1, sizeof *f);
    if (!f) return kvb_fail(err, KVB_MEMORY, "forward pass: no memory");
    f->m = m;
    f->b = m->device;
    f->plan = *plan;
    piece pieces[N_PIECES];
    list_pieces(pieces, m, plan);
    kvb_status status = fill_cos_sin(f, plan->max_tokens + plan->max_tail, err);
    for (int i = 0; status == KVB_OK && i < N_PIECES; i++) {
        dev *at = (dev *)((char *)f + pieces[i].offset);
        *at = f->b->alloc(pieces[i].floats);
        if (!at->address)
            status = kvb_fail(err, KVB_MEMORY,
                              "forward pass: no memory for %llu MiB at once (%llu MiB in all); use fewer questions at "
                              "a time or shorter contexts",
                              (unsigned long long)(pieces[i].floats >> 18),
                              (unsigned long long)(forward_bytes(m, plan) >> 20));
    }
    uint64_t packed = packed_floats(m, plan);
    if (status == KVB_OK && packed && !(f->packed = f->b->alloc(packed)).address)
        status = kvb_fail(err, KVB_MEMORY, "forward pass: no memory for %llu MiB of packed keys and values",
                          (unsigned long long)(packed >> 18));
    backend_limits limits = limits_of(m, plan);
    f->positions = malloc(larger(plan->max_tokens, CHUNK_ROWS) * sizeof *f->positions);
    if (status == KVB_OK && (!f->positions || !f->b->reserve(&limits)))
        status = kvb_fail(err, KVB_MEMORY, "backend %s: no memory for its scratch at %u tokens", f->b->name,
                          plan->max_tokens);
    if (status != KVB_OK) {
        forward_close(f);
        return status;
    }
    *out = f;
    return KVB_OK;
}

void forward_close(forward *f)
{
    if (!f) return;
    piece pieces[N_PIECES];
    list_pieces(pieces, f->m, &f->plan);
    for (int i = 0; i < N_PIECES; i++) f->b->release(*(dev *)((char *)f + pieces[i].offset));
    f->b->release(f->cos_sin);
    f->b->release(f->packed);
    f->b->reserve(&(backend_limits){0});
    free(f->positions);
    f->b->release(f->column_sums);
    f->b->release(f->row_log);
    f->b->release(f->output_norms);
    f->b->release(f->reduced.memory);
    for (int i = 0; i < N_VIEWS; i++) free(f->views[i]);
    free(f);
}

static attention_shape shape_of(const forward *f)
{
    return (attention_shape){f->m->config.n_heads, f->m->config.n_kv_heads, f->m->config.head_dim};
}

static prefix_kv prefix_of(const forward *f, uint32_t layer)
{
    size_t at = f->packed.address ? 0 : (size_t)layer * f->m->config.n_kv_heads * f->n_tokens * f->m->config.head_dim;
    prefix_kv kv = {dev_at(f->k, at), dev_at(f->v, at), f->n_tokens, {NULL}};
    if (f->packed.address) kv.packed = dev_at(f->packed, layer * f->b->packed_floats(f->n_tokens, shape_of(f)));
    return kv;
}

static tail_kv tails_of(const forward *f, uint32_t layer)
{
    size_t at =
        (size_t)layer * f->plan.max_questions * f->m->config.n_kv_heads * f->plan.max_tail * f->m->config.head_dim;
    return (tail_kv){dev_at(f->tail_k, at), dev_at(f->tail_v, at), f->plan.max_tail};
}

// Queries of n normed rows; their keys go to `gate`, their values to `up`.
static void project_attention(forward *f, const model_layer *w, dev queries, uint32_t n)
{
    f->b->project((const projection[]){{queries, w->wq}, {f->gate, w->wk}, {f->up, w->wv}}, 3, f->h, n);
}

// x += SwiGLU(norm(x)), for at most CHUNK_ROWS rows.
static void feed_forward(forward *f, const model_layer *w, dev x, uint32_t n)
{
    const model_config *c = &f->m->config;
    f->b->rms_norm(f->h, x, w->ffn_norm, n, c->width, c->norm_eps);
    f->b->project((const projection[]){{f->gate, w->gate}, {f->up, w->up}}, 2, f->h, n);
    f->b->swiglu(f->gate, f->up, (size_t)n * c->ffn_width);
    f->b->matmul(x, f->gate, w->down, n, true);
}

// What an observer may ask for beside the activations: made only then, in memory that is taken the first time.
static kvb_status make_extras(forward *f, uint32_t layer, unsigned needs, kvb_error *err)
{
    prefix_kv kv = prefix_of(f, layer);
    dev *const buffers[3] = {&f->column_sums, &f->row_log, &f->output_norms};
    const bool wanted[3] = {needs & VIEW_COLUMN_SUMS, needs & VIEW_COLUMN_SUMS, needs & VIEW_OUTPUT_NORMS};
    for (int i = 0; i < 3; i++)
        if (wanted[i] && !buffers[i]->address) {
            *buffers[i] = f->b->alloc((size_t)f->m->config.n_heads * f->plan.max_tokens);
            if (!buffers[i]->address)
                return kvb_fail(err, KVB_MEMORY, "observer: no memory for the column sums of %u tokens",
                                f->plan.max_tokens);
        }
    if (needs & VIEW_COLUMN_SUMS) f->b->column_sums(f->column_sums, f->row_log, f->q, &kv, 0, shape_of(f));
    if (needs & VIEW_OUTPUT_NORMS) f->b->output_norms(f->output_norms, &kv, f->m->layers[layer].wo, shape_of(f));
    return KVB_OK;
}

// Lets the observer see what it needs of one layer as host memory.
static kvb_status observe_layer(forward *f, uint32_t layer, const layer_observer *observer, kvb_error *err)
{
    const model_config *c = &f->m->config;
    prefix_kv kv = prefix_of(f, layer);
    size_t queries = (size_t)c->n_heads * c->head_dim, keys = (size_t)c->n_kv_heads * c->head_dim;
    layer_view view = {.layer = layer,
                       .n_tokens = f->n_tokens,
                       .n_heads = c->n_heads,
                       .n_kv_heads = c->n_kv_heads,
                       .head_dim = c->head_dim,
                       .rope_dim = c->rope_dim,
                       .rope_frequency = f->m->rope_frequency,
                       .n_queries = f->n_tokens};
    const query_statistics *stored = f->m->statistics;
    if (stored) {
        view.query_mean = stored->mean + layer * queries;
        view.query_covariance = stored->covariance + layer * queries * c->head_dim;
    }
    const layer_device device = {f->b, shape_of(f), kv, f->q_raw, f->q, &f->reduced};
    unsigned needs = observer->needs;
    if (!f->b->host_view(kv.k)) {
        view.device = &device;
        needs &= ~observer->spared;
    }
    double start = omp_get_wtime();
    kvb_status status = make_extras(f, layer, needs, err);
    if (status != KVB_OK) return status;
    const struct {
        view_item item;
        dev from;
        size_t floats; // per token
        const float **to;
    } items[N_VIEWS] = {{VIEW_Q_RAW, f->q_raw, queries, &view.q_raw},
                        {VIEW_Q, f->q, queries, &view.q},
                        {VIEW_K, kv.k, keys, &view.k},
                        {VIEW_V, kv.v, keys, &view.v},
                        {VIEW_COLUMN_SUMS, f->column_sums, c->n_heads, &view.column_sums},
                        {VIEW_OUTPUT_NORMS, f->output_norms, c->n_heads, &view.output_norms}};
    for (int i = 0; i < N_VIEWS; i++) {
        if (!(needs & items[i].item)) continue;
        *items[i].to = f->b->host_view(items[i].from);
        if (*items[i].to) continue;
        if (!f->views[i] && !(f->views[i] = malloc(f->plan.max_tokens * items[i].floats * sizeof(float))))
            return kvb_fail(err, KVB_MEMORY, "observer: no memory for a host copy of layer %u", layer);
        f->b->download(f->views[i], items[i].from, f->n_tokens * items[i].floats);
        *items[i].to = f->views[i];
    }
    view.extra_seconds = omp_get_wtime() - start;
    return observer->see(observer->context, &view, err);
}

// Queries, keys and values of the whole context for one layer.
static void project_context(forward *f, uint32_t layer)
{
    const model_config *c = &f->m->config;
    const model_layer *w = &f->m->layers[layer];
    prefix_kv kv = prefix_of(f, layer);
    for (uint32_t first = 0; first < f->n_tokens; first += f->b->context_rows) {
        uint32_t n = f->n_tokens - first < f->b->context_rows ? f->n_tokens - first : f->b->context_rows;
        size_t queries = (size_t)first * c->n_heads * c->head_dim;
        f->b->rms_norm(f->h, dev_at(f->x, (size_t)first * c->width), w->attn_norm, n, c->width, c->norm_eps);
        project_attention(f, w, dev_at(f->q_raw, queries), n);
        f->b->rope(dev_at(f->q, queries), dev_at(f->q_raw, queries), f->cos_sin, f->positions + first, n, c->n_heads,
                   c->head_dim, c->rope_dim);
        f->b->rope(f->gate, f->gate, f->cos_sin, f->positions + first, n, c->n_kv_heads, c->head_dim, c->rope_dim);
        f->b->store_prefix(kv.k, f->n_tokens, first, f->gate, n, c->n_kv_heads, c->head_dim);
        f->b->store_prefix(kv.v, f->n_tokens, first, f->up, n, c->n_kv_heads, c->head_dim);
    }
    if (f->packed.address) f->b->pack_prefix(&kv, shape_of(f));
}

// Attention and feed-forward of the whole context for one layer.
static void mix_context(forward *f, uint32_t layer)
{
    const model_config *c = &f->m->config;
    const model_layer *w = &f->m->layers[layer];
    prefix_kv kv = prefix_of(f, layer);
    for (uint32_t first = 0; first < f->n_tokens; first += CHUNK_ROWS) {
        uint32_t n = f->n_tokens - first < CHUNK_ROWS ? f->n_tokens - first : CHUNK_ROWS;
        dev x = dev_at(f->x, (size_t)first * c->width);
        f->b->attend_prefix(f->h, dev_at(f->q, (size_t)first * c->n_heads * c->head_dim), &kv, first, n, shape_of(f));
        f->b->matmul(x, f->h, w->wo, n, true);
        for (uint32_t at = 0; at < n; at += f->b->context_rows)
            feed_forward(f, w, dev_at(x, (size_t)at * c->width),
                         n - at < f->b->context_rows ? n - at : f->b->context_rows);
    }
}

// What becomes of logits: they go to the host, or tokens are drawn from them where they are.
typedef struct logit_use {
    float *logits; // [rows, vocabulary]; NULL: draw
    const sampler *s;
    const draw_key *keys;
    int32_t *drawn; // [rows]
} logit_use;

// Logits of n rows of x, which are the use's rows from `at` on.
static void project_logits(forward *f, dev x, uint32_t n, const logit_use *use, size_t at)
{
    const model_config *c = &f->m->config;
    for (uint32_t first = 0; first < n; first += CHUNK_LOGITS) {
        uint32_t rows = n - first < CHUNK_LOGITS ? n - first : CHUNK_LOGITS;
        f->b->rms_norm(f->h, dev_at(x, (size_t)first * c->width), f->m->final_norm, rows, c->width, c->norm_eps);
        f->b->matmul(f->logits, f->h, f->m->head, rows, false);
        if (use->logits)
            f->b->download(use->logits + (at + first) * c->vocabulary, f->logits, (size_t)rows * c->vocabulary);
        else f->b->sample(use->drawn + at + first, f->logits, rows, c->vocabulary, use->s, use->keys + at + first);
    }
}

static kvb_status check_ids(const forward *f, const int32_t *ids, uint32_t n, kvb_error *err)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= f->m->config.vocabulary)
            return kvb_fail(err, KVB_ARGUMENT,
                            "token %u: id %d, expected 0 to %u; were the ids made with another model's tokenizer?", i,
                            ids[i], f->m->config.vocabulary - 1);
    return KVB_OK;
}

kvb_status forward_prefill(forward *f, const int32_t *ids, uint32_t n_tokens, const layer_observer *observer,
                           const forward_progress *progress, float *logits, kvb_error *err)
{
    const model_config *c = &f->m->config;
    if (n_tokens == 0 || n_tokens > f->plan.max_tokens)
        return kvb_fail(err, KVB_ARGUMENT, "context: %u tokens, expected 1 to %u", n_tokens, f->plan.max_tokens);
    kvb_status status = check_ids(f, ids, n_tokens, err);
    if (status != KVB_OK) return status;
    f->n_tokens = n_tokens;
    for (uint32_t i = 0; i < n_tokens; i++) f->positions[i] = i;
    f->b->gather(f->x, f->m->embedding, ids, n_tokens);
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        project_context(f, layer);
        if (observer && (status = observe_layer(f, layer, observer, err)) != KVB_OK) return status;
        if (f->plan.oracle) {
            prefix_kv kv = prefix_of(f, layer);
            f->b->value_weights(dev_at(f->weights, (size_t)layer * c->n_heads * n_tokens), &kv,
                                f->m->layers[layer].value_root, shape_of(f));
        }
        if (layer + 1 < c->n_layers || logits) // nobody reads what the last layer adds to the stream
            mix_context(f, layer);
        if (progress && !progress->step(progress->context, layer + 1, c->n_layers))
            return kvb_fail(err, KVB_INTERRUPTED, "stopped in the prefill, after layer %u of %u", layer + 1,
                            c->n_layers);
    }
    if (logits) project_logits(f, f->x, n_tokens, &(logit_use){.logits = logits}, 0);
    return f->b->check(err);
}

void forward_begin_questions(forward *f, uint32_t n_questions)
{
    const model_config *c = &f->m->config;
    size_t n = (size_t)n_questions * c->n_layers * c->n_kv_heads * f->n_tokens;
    if (f->plan.oracle) f->b->clear(f->best, n);
}

// One chunk of rows through all layers; leaves the residual stream in x.
static void run_rows(forward *f, const decode_row *rows, const int32_t *ids, uint32_t n)
{
    const model_config *c = &f->m->config;
    size_t per_layer = (size_t)c->n_kv_heads * f->n_tokens, heads = (size_t)c->n_heads * f->n_tokens;
    for (uint32_t i = 0; i < n; i++) f->positions[i] = f->n_tokens + rows[i].tail;
    f->b->gather(f->x, f->m->embedding, ids, n);
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        const model_layer *w = &f->m->layers[layer];
        prefix_kv kv = prefix_of(f, layer);
        tail_kv tails = tails_of(f, layer);
        oracle_view oracle = {{NULL}, {NULL}, c->n_layers * per_layer};
        if (f->plan.oracle) {
            oracle.weights = dev_at(f->weights, layer * heads);
            oracle.best = dev_at(f->best, layer * per_layer);
        }
        f->b->rms_norm(f->h, f->x, w->attn_norm, n, c->width, c->norm_eps);
        project_attention(f, w, f->q_raw, n);
        f->b->rope(f->q, f->q_raw, f->cos_sin, f->positions, n, c->n_heads, c->head_dim, c->rope_dim);
        f->b->rope(f->gate, f->gate, f->cos_sin, f->positions, n, c->n_kv_heads, c->head_dim, c->rope_dim);
        f->b->store_tail(tails.k, tails.capacity, rows, f->gate, n, c->n_kv_heads, c->head_dim);
        f->b->store_tail(tails.v, tails.capacity, rows, f->up, n, c->n_kv_heads, c->head_dim);
        f->b->attend_rows(f->h, f->q, &kv, &tails, rows, n, shape_of(f), &oracle);
        f->b->matmul(f->x, f->h, w->wo, n, true);
        feed_forward(f, w, f->x, n);
    }
}

static kvb_status check_rows(const forward *f, const decode_row *rows, uint32_t n, kvb_error *err)
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
    kvb_status status = check_rows(f, rows, n_rows, err);
    if (status == KVB_OK) status = check_ids(f, ids, n_rows, err);
    if (status != KVB_OK) return status;
    uint32_t done = 0; // of logit_rows, which ascend
    for (uint32_t first = 0; first < n_rows; first += DECODE_ROWS) {
        uint32_t n = n_rows - first < DECODE_ROWS ? n_rows - first : DECODE_ROWS, from = done;
        run_rows(f, rows + first, ids + first, n);
        // The rows that are asked for move to the front of the stream: one product with the output matrix for all of them.
        for (; done < n_logits && logit_rows[done] < first + n; done++)
            f->b->copy(dev_at(f->picked, (size_t)(done - from) * c->width),
                       dev_at(f->x, (size_t)(logit_rows[done] - first) * c->width), c->width);
        project_logits(f, f->picked, done - from, use, from);
    }
    return f->b->check(err);
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

void forward_importance(const forward *f, uint32_t question, float *out)
{
    size_t n = (size_t)f->m->config.n_layers * f->m->config.n_kv_heads * f->n_tokens;
    f->b->download(out, dev_at(f->best, question * n), n);
}
