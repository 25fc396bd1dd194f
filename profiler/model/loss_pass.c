#include "profiler/model/loss_pass.h"
#include "formats/need.h"
#include "profiler/backend/linalg.h"
#include "profiler/model/forward_parts.h"
#include "profiler/weights/simd.h"
#include "runtime/fail.h"
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

// The level of the curves that says how many tokens each head keeps when a layer is cut.
static const uint32_t CUT_LEVEL[GAIN_KINDS] = {[GAIN_CUT_80] = 10, [GAIN_CUT_96] = 6};

static uint32_t budgeted_layers(const model *m)
{
    return model_budgeted(&m->config, m->config.n_layers);
}

static size_t gram_width(const model_config *c)
{
    return (size_t)c->n_heads / c->n_kv_heads * c->head_dim;
}

uint64_t forward_loss_bytes(const model *m, const forward_plan *plan, uint32_t per_question, uint32_t n_references)
{
    const model_config *c = &m->config;
    uint64_t B = budgeted_layers(m), G = c->n_kv_heads, w = gram_width(c), H = (uint64_t)c->n_heads * c->head_dim,
             T = plan->max_tokens, kept = (uint64_t)plan->max_questions * per_question, sequences = 1 + B,
             rows = plan->max_tail, at_once = (uint64_t)omp_get_max_threads();
    uint64_t lines = OUTPUT_BLOCK_QUERIES * (uint64_t)(c->n_heads / G),
             threads = T * (lines + 4 * c->head_dim) + lines * (512 + 50 * c->head_dim);
    if (n_references) {
        size_t work = 0;
        kvb_refit_head half = {.n_tokens = plan->max_tokens,
                               .head_dim = c->head_dim,
                               .n_kept = plan->max_tokens / 2,
                               .n_queries = n_references};
        (void)kvb_refit_bytes(&half, &work, NULL);
        threads += work / sizeof(float) + T * (lines + 2 * c->head_dim) + (kept + 3 * OUTPUT_BLOCK_QUERIES) * w;
    }
    bool packed = m->device->b->packed_floats(m->device, plan->max_tokens,
                                              attention_heads(c->n_heads, c->n_kv_heads, c->head_dim)) > 0;
    return (B * kept * H + B * G * w * w + (uint64_t)c->n_layers * G * n_references * c->head_dim +
            threads * (B * G < at_once ? B * G : at_once) + (packed ? 2 * B * G * T * c->head_dim : 0) +
            sequences * rows * (2 * G * c->head_dim) + sequences * rows * c->width + 2 * 64ull * c->vocabulary) *
           sizeof(float);
}

// ---- Memory of the device as the host sees it ----------------------------------------------------------------------

// Returns n floats of device memory. The caller frees *own: a copy if the host cannot see the memory itself, else NULL.
static const float *bring(const forward *f, dev from, size_t n, float **own)
{
    const float *seen = f->b->host_view(f->pass.on, from);
    *own = NULL;
    if (seen) return seen;
    *own = need(n, sizeof(float), "numbers of the device");
    f->b->download(f->pass.on, *own, from, n);
    return *own;
}

// The data of one budgeted layer with which its heads are judged.
enum { LAYER_ARRAYS = 5 };
typedef struct layer_arrays {
    const float *k, *v, *q, *tail_k, *tail_v;
    float *own[LAYER_ARRAYS], *sinks;
    attention_shape shape;
} layer_arrays;

static void open_layer(layer_arrays *a, const forward *f, uint32_t layer, uint32_t n_questions)
{
    const kept_queries *l = f->kept;
    const model_config *c = &f->m->config;
    prefix_kv kv = forward_prefix(f, layer);
    tail_kv tails = forward_tails(f, layer);
    size_t G = c->n_kv_heads, d = c->head_dim, b = model_budgeted(c, layer), context = G * f->n_tokens * d,
           H = c->n_heads * d, tail = n_questions * G * tails.capacity * d;
    if (l->k.address) kv.k = dev_at(l->k, b * context), kv.v = dev_at(l->v, b * context);
    *a = (layer_arrays){.shape = model_attention(f->m, layer)};
    a->k = bring(f, kv.k, context, &a->own[0]);
    a->v = bring(f, kv.v, context, &a->own[1]);
    a->q = bring(f, dev_at(l->queries, b * l->max_kept * H), l->n_kept * H, &a->own[2]);
    a->tail_k = bring(f, tails.k, tail, &a->own[3]);
    a->tail_v = bring(f, tails.v, tail, &a->own[4]);
    if (!a->shape.sinks.address) return;
    a->sinks = need(c->n_heads, sizeof(float), "attention sinks");
    f->b->download(f->pass.on, a->sinks, a->shape.sinks, c->n_heads);
}

static void close_layer(layer_arrays *a)
{
    for (int i = 0; i < LAYER_ARRAYS; i++) free(a->own[i]);
    free(a->sinks);
}

static output_head head_of(const forward *f, const layer_arrays *a, uint32_t layer, uint32_t g)
{
    const model_config *c = &f->m->config;
    uint32_t group = c->n_heads / c->n_kv_heads;
    size_t context = (size_t)g * f->n_tokens * c->head_dim, w = gram_width(c),
           at = (size_t)model_budgeted(c, layer) * c->n_kv_heads + g;
    return (output_head){.k = a->k + context,
                         .v = a->v + context,
                         .n_tokens = f->n_tokens,
                         .group = group,
                         .head_dim = c->head_dim,
                         .softcap = a->shape.softcap,
                         .sinks = a->sinks ? a->sinks + (size_t)g * group : NULL,
                         .gram = f->kept->grams + at * w * w};
}

static output_order order_of(const forward *f, const loss_ranking *r, uint32_t layer, uint32_t g)
{
    const model_config *c = &f->m->config;
    size_t at = (size_t)model_budgeted(c, layer) * c->n_kv_heads + g;
    output_order order = {.position = need(f->n_tokens, sizeof *order.position, "ranked tokens")};
    output_order_make(&order, r->scores + at * f->n_tokens, f->n_tokens, r->sink, r->window);
    return order;
}

// Scores keys for the cuts of the gains: minus the cosine to the sum of all directions, times that sum's length, so
// that keys that point elsewhere come first. `mean` [d] is scratch that holds zeros.
SIMD_CLONES static void score_keys(float *scores, double *mean, const float *keys, uint32_t T, uint32_t d)
{
    for (uint32_t t = 0; t < T; t++) {
        const float *k = keys + (size_t)t * d;
        double square = 0;
#pragma omp simd reduction(+ : square)
        for (uint32_t i = 0; i < d; i++) square += (double)k[i] * (double)k[i];
        double share = 1 / fmax(sqrt(square), 1e-12);
        for (uint32_t i = 0; i < d; i++) mean[i] += (double)k[i] * share;
        scores[t] = (float)share;
    }
    for (uint32_t t = 0; t < T; t++) {
        const float *k = keys + (size_t)t * d;
        double cosine = 0;
#pragma omp simd reduction(+ : cosine)
        for (uint32_t i = 0; i < d; i++) cosine += (double)k[i] * mean[i];
        scores[t] *= (float)-cosine;
    }
}

static output_order order_by_keys(const output_head *h)
{
    enum { SINK = 4, WINDOW = 1 };
    output_order order = {.position = need(h->n_tokens, sizeof *order.position, "ranked tokens")};
    float *scores = need(h->n_tokens, sizeof *scores, "scores");
    double *mean = need(h->head_dim, sizeof *mean, "directions");
    score_keys(scores, mean, h->k, h->n_tokens, h->head_dim);
    output_order_make(&order, scores, h->n_tokens, SINK, WINDOW);
    free_all(scores, mean);
    return order;
}

// Computes W_O^T W_O of every group, once for all contexts.
static kvb_status make_grams(forward *f, kvb_error *err)
{
    const model_config *c = &f->m->config;
    size_t w = gram_width(c), H = (size_t)c->n_heads * c->head_dim;
    if (f->kept->grams) return KVB_OK;
    float *wo = need((size_t)c->width * H, sizeof *wo, "weights");
    int32_t *ids = need(CHUNK_ROWS, sizeof *ids, "rows");
    f->kept->grams = need((size_t)budgeted_layers(f->m) * c->n_kv_heads * w * w, sizeof(float), "Gram matrices");
    float *to = f->kept->grams;
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        if (model_layer_bounded(c, layer)) continue;
        for (uint32_t first = 0; first < c->width; first += CHUNK_ROWS) {
            uint32_t n = c->width - first < CHUNK_ROWS ? c->width - first : CHUNK_ROWS;
            for (uint32_t i = 0; i < n; i++) ids[i] = (int32_t)(first + i);
            f->b->gather(f->pass.on, f->q_raw, f->m->layers[layer].wo, ids, n);
            f->b->download(f->pass.on, wo + first * H, f->q_raw, n * H);
        }
        for (uint32_t g = 0; g < c->n_kv_heads; g++, to += w * w)
            gemm(true, false, w, w, c->width, 1, wo + g * w, H, wo + g * w, H, 0, to, w);
    }
    free_all(ids, wo);
    return layer_end(&f->pass, err);
}

// ---- Curves --------------------------------------------------------------------------------------------------------

typedef struct curve_job {
    forward *f;
    uint32_t n_questions, n_rankings;
    const loss_ranking *rankings;
    const references *refit;
    float *errors, *packings;
    uint32_t packed; // the question whose packing errors are wanted
} curve_job;

// Gathers the kept queries of each question, in the order of the questions, in `queries` and `tails` [n_kept].
static void gather_sets(output_queries *sets, const curve_job *j, const layer_arrays *a, uint32_t g, float *queries,
                        uint32_t *tails)
{
    const kept_queries *l = j->f->kept;
    const model_config *c = &j->f->m->config;
    size_t w = gram_width(c), H = (size_t)c->n_heads * c->head_dim, tail = (size_t)j->f->plan.max_tail * c->head_dim;
    uint32_t n = 0;
    for (uint32_t q = 0; q < j->n_questions; q++) {
        size_t at = ((size_t)q * c->n_kv_heads + g) * tail;
        sets[q] = (output_queries){
            .q = queries + n * w, .stride = w, .tail = tails + n, .k = a->tail_k + at, .v = a->tail_v + at};
        for (uint32_t i = 0; i < l->n_kept; i++) {
            if (l->slot[i] != q) continue;
            memcpy(queries + n * w, a->q + i * H + g * w, w * sizeof *queries);
            tails[n++] = l->tail[i];
            sets[q].n++;
        }
    }
}

static kvb_status judge_head(const curve_job *j, const layer_arrays *a, uint32_t layer, uint32_t g, kvb_error *err)
{
    const kept_queries *l = j->f->kept;
    const model_config *c = &j->f->m->config;
    output_head head = head_of(j->f, a, layer, g);
    kvb_refit_head refit;
    if (j->refit && j->refit->plain[layer]) {
        refit = references_head(j->refit, head.k, head.v, head.n_tokens, layer, g);
        head.refit = &refit;
    }
    output_queries *sets = need(j->n_questions, sizeof *sets, "questions");
    output_order *orders = need(j->n_rankings, sizeof *orders, "rankings");
    float *queries = need(l->n_kept * gram_width(c), sizeof *queries, "queries"),
          *errors = need((size_t)j->n_rankings * j->n_questions * OUTPUT_LEVELS, sizeof *errors, "errors");
    uint32_t *tails = need(l->n_kept, sizeof *tails, "queries");
    gather_sets(sets, j, a, g, queries, tails);
    for (uint32_t r = 0; r < j->n_rankings; r++) orders[r] = order_of(j->f, &j->rankings[r], layer, g);
    kvb_status status = output_errors(errors, &head, sets, j->n_questions, orders, j->n_rankings, err);
    size_t heads = (size_t)budgeted_layers(j->f->m) * c->n_kv_heads,
           at = (size_t)model_budgeted(c, layer) * c->n_kv_heads + g;
    for (uint32_t r = 0; r < j->n_rankings; r++) {
        for (uint32_t q = 0; q < j->n_questions; q++)
            memcpy(j->errors + (((size_t)q * j->n_rankings + r) * heads + at) * OUTPUT_LEVELS,
                   errors + ((size_t)r * j->n_questions + q) * OUTPUT_LEVELS, OUTPUT_LEVELS * sizeof *errors);
        free(orders[r].position);
    }
    if (j->packings) output_packing_errors(j->packings + at * RECORD_PACKINGS, &head, sets + j->packed);
    free_all(tails, errors, queries, orders, sets);
    return status;
}

kvb_status forward_output_errors(forward *f, uint32_t n_questions, const loss_ranking *rankings, uint32_t n_rankings,
                                 const references *refit, float *errors, uint32_t packed, float *packings,
                                 kvb_error *err)
{
    const model_config *c = &f->m->config;
    const curve_job job = {f, n_questions, n_rankings, rankings, refit, errors, packings, packed};
    kvb_status status = make_grams(f, err);
    bool shared = f->b->host_view(f->pass.on, f->x) != NULL; // else one layer's copies at a time
    uint32_t at_once = shared ? c->n_layers : 1;
    layer_arrays *arrays = need(at_once, sizeof *arrays, "layers");
    for (uint32_t first = 0; first < c->n_layers && status == KVB_OK; first += at_once) {
        uint32_t n = c->n_layers - first < at_once ? c->n_layers - first : at_once;
        for (uint32_t i = 0; i < n; i++)
            if (!model_layer_bounded(c, first + i)) open_layer(&arrays[i], f, first + i, n_questions);
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t g = 0; g < c->n_kv_heads; g++) {
                kvb_error mine = {KVB_OK, ""};
                if (model_layer_bounded(c, first + i) || judge_head(&job, &arrays[i], first + i, g, &mine) == KVB_OK)
                    continue;
#pragma omp critical
                status = kvb_fail(err, mine.status, "layer %u, KV head %u: %s", first + i, g, mine.message);
            }
        for (uint32_t i = 0; i < n; i++)
            if (!model_layer_bounded(c, first + i)) close_layer(&arrays[i]);
    }
    free(arrays);
    return status == KVB_OK ? layer_end(&f->pass, err) : status;
}

// ---- Gains ---------------------------------------------------------------------------------------------------------

static gain_kind kind_of(uint32_t row)
{
    return row % 2 ? GAIN_CUT_96 : GAIN_CUT_80;
}

// Sequence 0 is the answer as it is; every budgeted layer adds one.
typedef struct gain_run {
    forward *f;
    uint32_t question, first, n; // the rows first .. first + n - 1 after the context
    uint32_t sequences, layers;  // how many there will be; layers that have added theirs
    dev x;                       // [sequences, n, D]
    tail_kv tails;               // [sequences, G, first + n, d] of the layer at hand
    uint32_t *tail, *level;      // [n] first, first + 1, ..; what each row keeps
    decode_row *rows;            // [DECODE_ROWS]
    float *q, *o;                // [n, H*d] of sequence 0: its queries and its heads' outputs
    float *moved;                // [n, H*d] how the outputs move
    float *branch;               // [n, D] the same times W_O
    float *gains;
} gain_run;

static size_t head_floats(const gain_run *r)
{
    return (size_t)r->n * r->f->m->config.n_heads * r->f->m->config.head_dim;
}

static void open_gains(gain_run *r)
{
    const model_config *c = &r->f->m->config;
    uint32_t capacity = r->first + r->n;
    size_t n = r->n, H = head_floats(r), tails = (size_t)r->sequences * c->n_kv_heads * capacity * c->head_dim;
    backend_device *on = r->f->m->device;
    r->x = backend_memory(on, r->sequences * n * c->width, "sequences");
    r->tails = (tail_kv){backend_memory(on, tails, "keys"), backend_memory(on, tails, "values"), capacity};
    r->tail = need(n, sizeof *r->tail, "rows");
    r->level = need(n, sizeof *r->level, "rows");
    r->rows = need(DECODE_ROWS, sizeof *r->rows, "rows");
    r->q = need(H, sizeof(float), "queries");
    r->o = need(H, sizeof(float), "outputs");
    r->moved = need(H, sizeof(float), "outputs");
    r->branch = need(n * c->width, sizeof(float), "outputs");
    for (uint32_t i = 0; i < n; i++) {
        r->tail[i] = r->first + i;
        r->level[i] = CUT_LEVEL[kind_of(i)];
    }
}

static void close_gains(gain_run *r)
{
    backend_device *on = r->f->m->device;
    r->f->b->release(on, r->x);
    r->f->b->release(on, r->tails.k);
    r->f->b->release(on, r->tails.v);
    free_all(r->tail, r->level, r->rows, r->q, r->o, r->moved, r->branch);
}

static dev sequence_at(const gain_run *r, uint32_t sequence)
{
    return dev_at(r->x, (size_t)sequence * r->n * r->f->m->config.width);
}

// Copies the keys and values before the rows, for the first `active` sequences.
static void copy_question(gain_run *r, uint32_t layer, uint32_t active)
{
    forward *f = r->f;
    tail_kv from = forward_tails(f, layer);
    size_t d = f->m->config.head_dim, G = f->m->config.n_kv_heads, n = r->first * d;
    for (size_t i = 0; i < active * G; i++) {
        size_t to = i * r->tails.capacity * d, at = (r->question * G + i % G) * from.capacity * d;
        f->b->copy(f->pass.on, dev_at(r->tails.k, to), dev_at(from.k, at), n);
        f->b->copy(f->pass.on, dev_at(r->tails.v, to), dev_at(from.v, at), n);
    }
}

// Runs sequences [s, s + count) through the attention of a layer; its output is in pass.attended.
static void attend_sequences(gain_run *r, uint32_t layer, uint32_t s, uint32_t count)
{
    forward *f = r->f;
    const model_config *c = &f->m->config;
    prefix_kv kv = forward_prefix(f, layer);
    const oracle_view none = {{NULL}, {NULL}, 0, false};
    uint32_t rows = count * r->n;
    for (uint32_t i = 0; i < rows; i++) {
        r->rows[i] = (decode_row){s + i / r->n, r->first + i % r->n, false};
        f->positions[i] = f->n_tokens + r->first + i % r->n;
    }
    layer_project(&f->pass, layer, f->q_raw, f->q, sequence_at(r, s), f->positions, rows);
    f->b->store_tail(f->pass.on, r->tails.k, r->tails.capacity, r->rows, f->pass.keys, rows, c->n_kv_heads,
                     c->head_dim);
    f->b->store_tail(f->pass.on, r->tails.v, r->tails.capacity, r->rows, f->pass.values, rows, c->n_kv_heads,
                     c->head_dim);
    f->b->attend_rows(f->pass.on, f->pass.attended, f->q, &kv, &r->tails, r->rows, rows, model_attention(f->m, layer),
                      &none);
}

// Computes how the outputs of a layer's heads move, r->moved, if each row keeps only the tokens of its level.
static void cut_layer(gain_run *r, uint32_t layer)
{
    forward *f = r->f;
    const model_config *c = &f->m->config;
    size_t w = gram_width(c), H = (size_t)c->n_heads * c->head_dim, d = c->head_dim, capacity = r->tails.capacity;
    layer_arrays a;
    float *own_k, *own_v;
    open_layer(&a, f, layer, 0);
    const float *k = bring(f, r->tails.k, c->n_kv_heads * capacity * d, &own_k),
                *v = bring(f, r->tails.v, c->n_kv_heads * capacity * d, &own_v);
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t g = 0; g < c->n_kv_heads; g++) {
        output_head head = head_of(f, &a, layer, g);
        output_order order = order_by_keys(&head);
        output_queries set = {r->q + g * w, H, r->tail, k + g * capacity * d, v + g * capacity * d, r->n};
        float *moved = need(r->n * w, sizeof *moved, "outputs");
        output_difference(moved, &head, &set, &order, r->level);
        for (uint32_t i = 0; i < r->n; i++) memcpy(r->moved + i * H + g * w, moved + i * w, w * sizeof *moved);
        free_all(moved, order.position);
    }
    free_all(own_k, own_v);
    close_layer(&a);
}

// Writes the mean over each kind's rows to out [GAIN_KINDS, 2], at `pair`; 0 if it is not positive.
static void put_means(float *out, int pair, const double *of_row, uint32_t n)
{
    double sum[GAIN_KINDS] = {0};
    uint32_t count[GAIN_KINDS] = {0};
    for (uint32_t i = 0; i < n; i++) {
        sum[kind_of(i)] += of_row[i];
        count[kind_of(i)]++;
    }
    for (int kind = 0; kind < GAIN_KINDS; kind++)
        out[2 * kind + pair] = sum[kind] > 0 ? (float)(sum[kind] / count[kind]) : 0;
}

// Computes a layer's movement, r->moved, from the queries of sequence 0; its mean squares after W_O go into r->gains.
static void move_layer(gain_run *r, uint32_t layer)
{
    forward *f = r->f;
    size_t D = f->m->config.width;
    double *squares = need(r->n, sizeof *squares, "squares");
    cut_layer(r, layer);
    f->b->upload(f->pass.on, f->pass.attended, r->moved, head_floats(r));
    layer_project_output(&f->pass, layer, f->picked, r->n);
    f->b->download(f->pass.on, r->branch, f->picked, r->n * D);
    for (size_t i = 0; i < r->n * D; i++) squares[i / D] += (double)r->branch[i] * (double)r->branch[i];
    put_means(r->gains + (size_t)model_budgeted(&f->m->config, layer) * GAIN_KINDS * 2, 1, squares, r->n);
    free(squares);
}

// Adds a layer's sequence: sequence 0 with its attention moved, run through the rest of the layer.
static void add_sequence(gain_run *r, uint32_t layer)
{
    forward *f = r->f;
    size_t n = head_floats(r);
    move_layer(r, layer);
    for (size_t i = 0; i < n; i++) r->moved[i] += r->o[i];
    f->b->upload(f->pass.on, f->pass.attended, r->moved, n);
    layer_finish(&f->pass, layer, sequence_at(r, ++r->layers), r->n, 0);
}

static void run_layer(gain_run *r, uint32_t layer)
{
    forward *f = r->f;
    const model_config *c = &f->m->config;
    bool adds = !model_layer_bounded(c, layer);
    uint32_t active = 1 + r->layers, at_once = DECODE_ROWS / r->n;
    copy_question(r, layer, active);
    for (uint32_t s = 0; s < active; s += at_once) {
        uint32_t count = active - s < at_once ? active - s : at_once;
        attend_sequences(r, layer, s, count);
        if (s == 0 && adds) {
            f->b->download(f->pass.on, r->q, f->q, head_floats(r));
            f->b->download(f->pass.on, r->o, f->pass.attended, head_floats(r));
            f->b->copy(f->pass.on, sequence_at(r, active), r->x, (size_t)r->n * c->width);
        }
        layer_finish(&f->pass, layer, sequence_at(r, s), count * r->n, 0);
    }
    if (adds) add_sequence(r, layer);
}

// KL(p; q) of two rows of n > 0 logits: exponentials in float32, which vectorise, and sums in double.
SIMD_CLONES static double divergence(const float *p, const float *q, uint32_t n)
{
    float top_p = p[0], top_q = q[0];
    double sum_p = 0, sum_q = 0, kl = 0;
#pragma omp simd reduction(max : top_p, top_q)
    for (uint32_t i = 0; i < n; i++) {
        top_p = p[i] > top_p ? p[i] : top_p;
        top_q = q[i] > top_q ? q[i] : top_q;
    }
#pragma omp simd reduction(+ : sum_p, sum_q, kl)
    for (uint32_t i = 0; i < n; i++) {
        double e = (double)softmax_exp(p[i] - top_p);
        sum_p += e;
        sum_q += (double)softmax_exp(q[i] - top_q);
        kl += e * ((double)p[i] - (double)q[i]);
    }
    // cppcheck-suppress invalidFunctionArg ; n > 0, so each sum has the 1 of its largest logit
    return kl / sum_p - ((double)top_p + log(sum_p)) + (double)top_q + log(sum_q);
}

// Computes the KL of every sequence, several at a time.
static kvb_status judge_sequences(gain_run *r, kvb_error *err)
{
    forward *f = r->f;
    size_t V = f->m->config.vocabulary;
    uint32_t n = r->n, at_once = n < 64 ? 64 / n : 1;
    float *base = need(n * V, sizeof *base, "logits"),
          *logits = need((size_t)at_once * n * V, sizeof *logits, "logits");
    layer_logits(&f->pass, r->x, n, &(logit_use){.logits = base}, 0);
    for (uint32_t s = 1; s < r->sequences; s += at_once) {
        uint32_t count = r->sequences - s < at_once ? r->sequences - s : at_once;
        layer_logits(&f->pass, sequence_at(r, s), count * n, &(logit_use){.logits = logits}, 0);
#pragma omp parallel for schedule(dynamic, 1)
        for (uint32_t i = 0; i < count; i++) {
            double kl[DECODE_ROWS];
            for (uint32_t j = 0; j < n; j++)
                kl[j] = divergence(base + j * V, logits + ((size_t)i * n + j) * V, (uint32_t)V);
            put_means(r->gains + (s + i - 1) * GAIN_KINDS * 2, 0, kl, n);
        }
    }
    free_all(base, logits);
    return layer_end(&f->pass, err);
}

kvb_status forward_gains(forward *f, uint32_t question, const int32_t *ids, uint32_t first, uint32_t n, float *gains,
                         kvb_error *err)
{
    gain_run r = {
        .f = f, .question = question, .first = first, .n = n, .sequences = 1 + budgeted_layers(f->m), .gains = gains};
    if (n == 0 || n > DECODE_ROWS || first + n > f->plan.max_tail)
        return kvb_fail(err, KVB_ARGUMENT, "gains: rows %u to %u after the context, expected 1 to %d below %u", first,
                        first + n, DECODE_ROWS, f->plan.max_tail);
    kvb_status status = layer_check_ids(&f->pass, ids, n, err);
    if (status == KVB_OK) status = make_grams(f, err);
    if (status != KVB_OK) return status;
    open_gains(&r);
    layer_embed(&f->pass, r.x, ids, n);
    for (uint32_t layer = 0; layer < f->m->config.n_layers; layer++) run_layer(&r, layer);
    status = judge_sequences(&r, err);
    close_gains(&r);
    return status;
}
