#include "profiler/model/layer.h"
#include "formats/need.h"
#include "profiler/model/rope.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LOGIT_ROWS = 64, N_BUFFERS = 11 };

// One table for the estimate, the allocation and the release.
typedef struct buffer {
    dev *at;
    uint64_t floats;
} buffer;

// Whether what a layer adds to the stream is made in p->branch first: it is normed, scaled, has a bias, or has experts.
static bool has_branch(const model_config *c)
{
    return c->switches & (POST_NORMS | O_BIAS | MLP_BIAS | EXPERTS) || c->residual_scale != 1;
}

static void list_buffers(buffer out[N_BUFFERS], layer_pass *p, const model_config *c, uint64_t rows)
{
    uint64_t queries = (uint64_t)c->n_heads * c->head_dim, keys = (uint64_t)c->n_kv_heads * c->head_dim,
             ffn = c->ffn_width > c->expert_width ? c->ffn_width : c->expert_width,
             chosen = c->n_experts ? rows * c->width : 0;
    const buffer all[N_BUFFERS] = {{&p->normed, rows * c->width},
                                   {&p->keys, rows * keys},
                                   {&p->values, rows * keys},
                                   {&p->attended, rows * queries},
                                   {&p->gate, rows * ffn},
                                   {&p->up, rows * ffn},
                                   {&p->branch, has_branch(c) ? rows * c->width : 1},
                                   {&p->router_scores, rows * c->n_experts},
                                   {&p->taken, chosen},
                                   {&p->made, chosen},
                                   {&p->logits, (uint64_t)LOGIT_ROWS * c->vocabulary}};
    memcpy(out, all, sizeof all);
}

uint64_t layer_pass_bytes(const model *m, uint32_t max_rows, uint32_t positions)
{
    layer_pass none;
    buffer buffers[N_BUFFERS];
    uint64_t floats =
        (uint64_t)positions * m->config.rope_dim * (1 + (m->config.local_theta > 0) + (m->config.rope.growth > 0));
    list_buffers(buffers, &none, &m->config, max_rows);
    for (int i = 0; i < N_BUFFERS; i++) floats += buffers[i].floats;
    return floats * sizeof(float);
}

backend_limits layer_limits(const model *m, uint32_t tokens, uint32_t tail, uint32_t max_rows)
{
    const model_config *c = &m->config;
    const uint32_t terms[] = {c->ffn_width, c->width, c->n_heads * c->head_dim, c->expert_width};
    uint32_t most = 0, largest = c->vocabulary > c->n_experts ? c->vocabulary : c->n_experts;
    for (size_t i = 0; i < sizeof terms / sizeof *terms; i++) most = terms[i] > most ? terms[i] : most;
    return (backend_limits){.tokens = tokens,
                            .tail = tail,
                            .rows = max_rows,
                            .matrix_dim = most > largest ? most : largest,
                            .shape = attention_heads(c->n_heads, c->n_kv_heads, c->head_dim),
                            .made_terms = model_made_terms(m),
                            .matrix_terms = most};
}

kvb_status layer_pass_open(layer_pass *p, const model *m, const backend_limits *limits, uint32_t positions,
                           kvb_error *err)
{
    const model_config *c = &m->config;
    buffer buffers[N_BUFFERS];
    *p = (layer_pass){.m = m, .b = m->device->b, .positions = positions};
    rope_frequencies(p->frequency, &c->rope, c->rope_dim, 0);
    list_buffers(buffers, p, c, limits->rows);
    for (int i = 0; i < N_BUFFERS; i++)
        if (buffers[i].floats) *buffers[i].at = backend_memory(m->device, buffers[i].floats, "activations");
    p->cos_sin =
        rope_table(m->device, p->frequency, c->rope_dim, positions, (rope_size){.attention = c->rope.attention});
    if (c->rope.growth > 0)
        p->query_cos_sin = rope_table(m->device, p->frequency, c->rope_dim, positions,
                                      (rope_size){c->rope.attention, c->rope.growth, c->rope.original});
    if (c->local_theta > 0) { // of bounded layers
        const rope_rule rule = {.kind = ROPE_DEFAULT, .theta = c->local_theta};
        float frequency[ROPE_MAX_PAIRS];
        rope_frequencies(frequency, &rule, c->rope_dim, 0);
        p->local_cos_sin = rope_table(m->device, frequency, c->rope_dim, positions, (rope_size){.attention = 1});
    }
    kvb_status status = p->b->open(&p->on, p->b, limits, err);
    if (status != KVB_OK) layer_pass_close(p);
    return status;
}

void layer_pass_close(layer_pass *p)
{
    buffer buffers[N_BUFFERS];
    const model *m = p->m;
    if (!m) return;
    list_buffers(buffers, p, &m->config, 0);
    for (int i = 0; i < N_BUFFERS; i++) p->b->release(m->device, *buffers[i].at);
    p->b->release(m->device, p->cos_sin);
    p->b->release(m->device, p->query_cos_sin);
    p->b->release(m->device, p->local_cos_sin);
    p->b->close(p->on);
    *p = (layer_pass){0};
}

void layer_begin_context(layer_pass *p, uint32_t n_tokens)
{
    const model_config *c = &p->m->config;
    float frequency[ROPE_MAX_PAIRS];
    if (!rope_depends_on_length(&c->rope)) return;
    rope_frequencies(frequency, &c->rope, c->rope_dim, n_tokens);
    if (memcmp(frequency, p->frequency, c->rope_dim / 2 * sizeof *frequency) == 0) return;
    memcpy(p->frequency, frequency, c->rope_dim / 2 * sizeof *frequency);
    rope_fill(p->on, p->cos_sin, frequency, c->rope_dim, p->positions, (rope_size){.attention = c->rope.attention});
}

kvb_status layer_check_ids(const layer_pass *p, const int32_t *ids, uint32_t n, kvb_error *err)
{
    uint32_t vocabulary = p->m->config.vocabulary;
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= vocabulary)
            return kvb_fail(err, KVB_ARGUMENT,
                            "token %u: id %d, expected 0 to %u; were the ids made with another model's tokenizer?", i,
                            ids[i], vocabulary - 1);
    return KVB_OK;
}

void layer_embed(const layer_pass *p, dev x, const int32_t *ids, uint32_t n)
{
    const model_config *c = &p->m->config;
    p->b->gather(p->on, x, p->m->embedding, ids, n);
    if (c->embedding_scale != 1) p->b->scale(p->on, x, c->embedding_scale, (size_t)n * c->width);
}

// y [n, D] = the model's norm of x.
static void norm_rows(const layer_pass *p, dev y, dev x, dev weight, uint32_t n)
{
    const model_config *c = &p->m->config;
    if (c->switches & LAYER_NORM) p->b->layer_norm(p->on, y, x, weight, n, c->width, 1, c->norm_eps);
    else p->b->rms_norm(p->on, y, x, weight, n, c->width, c->norm_eps);
}

// Biases, norms and clipping, before queries and keys are rotated.
static void prepare_queries_and_keys(const layer_pass *p, const model_layer *w, dev q_raw, uint32_t n)
{
    const backend *b = p->b;
    const model_config *c = &p->m->config;
    uint32_t queries = c->n_heads * c->head_dim, keys = c->n_kv_heads * c->head_dim;
    if (c->switches & QKV_BIAS) {
        b->add_row(p->on, q_raw, w->q_bias, n, queries);
        b->add_row(p->on, p->keys, w->k_bias, n, keys);
        b->add_row(p->on, p->values, w->v_bias, n, keys);
    }
    if (c->switches & QK_NORM) {
        b->rms_norm(p->on, q_raw, q_raw, w->q_norm, n * c->n_heads, c->head_dim, c->norm_eps);
        b->rms_norm(p->on, p->keys, p->keys, w->k_norm, n * c->n_kv_heads, c->head_dim, c->norm_eps);
    }
    if (c->switches & QK_ROW_NORM) {
        b->rms_norm(p->on, q_raw, q_raw, w->q_row_norm, n, queries, c->norm_eps);
        b->rms_norm(p->on, p->keys, p->keys, w->k_row_norm, n, keys, c->norm_eps);
    }
    if (c->switches & QK_HEAD_NORM) {
        b->layer_norm(p->on, q_raw, q_raw, w->q_head_norm, n * c->n_heads, c->head_dim, c->n_heads, c->norm_eps);
        b->layer_norm(p->on, p->keys, p->keys, w->k_head_norm, n * c->n_kv_heads, c->head_dim, c->n_kv_heads,
                      c->norm_eps);
    }
    if (c->qkv_clip > 0) {
        b->clip(p->on, q_raw, c->qkv_clip, (size_t)n * queries);
        b->clip(p->on, p->keys, c->qkv_clip, (size_t)n * keys);
        b->clip(p->on, p->values, c->qkv_clip, (size_t)n * keys);
    }
    if (c->query_scale != 1) b->scale(p->on, q_raw, c->query_scale, (size_t)n * queries);
}

void layer_project(const layer_pass *p, uint32_t layer, dev q_raw, dev q, dev x, const uint32_t *positions, uint32_t n)
{
    const backend *b = p->b;
    const model_config *c = &p->m->config;
    const model_layer *w = &p->m->layers[layer];
    const projection to[] = {{q_raw, w->wq}, {p->keys, w->wk}, {p->values, w->wv}};
    bool normed = !(c->switches & NO_PRE_NORMS);
    if (normed) norm_rows(p, p->normed, x, w->attn_norm, n);
    b->project(p->on, to, 3, normed ? p->normed : x, n);
    prepare_queries_and_keys(p, w, q_raw, n);
    if (!model_layer_rotates(c, layer)) {
        b->copy(p->on, q, q_raw, (size_t)n * c->n_heads * c->head_dim);
        return;
    }
    dev angles = p->local_cos_sin.address && model_layer_bounded(c, layer) ? p->local_cos_sin : p->cos_sin;
    b->rope(p->on, q, q_raw, p->query_cos_sin.address ? p->query_cos_sin : angles, positions, n, c->n_heads,
            c->head_dim, c->rope_dim);
    b->rope(p->on, p->keys, p->keys, angles, positions, n, c->n_kv_heads, c->head_dim, c->rope_dim);
}

// x += norm(branch) * residual_scale.
static void finish_branch(const layer_pass *p, dev x, dev norm, uint32_t n)
{
    const model_config *c = &p->m->config;
    if (norm.address) norm_rows(p, p->branch, p->branch, norm, n);
    p->b->add_scaled(p->on, x, p->branch, c->residual_scale, (size_t)n * c->width);
}

// x += from W^T, or, if the family says so, x += norm(from W^T + bias) * residual_scale.
static void add_branch(const layer_pass *p, dev x, dev from, dev_matrix w, dev bias, dev norm, uint32_t n)
{
    const backend *b = p->b;
    const model_config *c = &p->m->config;
    if (!has_branch(c)) {
        b->matmul(p->on, x, from, w, n, true);
        return;
    }
    b->matmul(p->on, p->branch, from, w, n, false);
    if (bias.address) b->add_row(p->on, p->branch, bias, n, c->width);
    finish_branch(p, x, norm, n);
}

// ---- Experts: a router chooses a few of them for every row, and the row gets what they make of it ----

static bool is_among(const uint32_t *numbers, uint32_t n, uint32_t number)
{
    for (uint32_t i = 0; i < n; i++)
        if (numbers[i] == number) return true;
    return false;
}

void experts_choose(const float *logits, uint32_t n, uint32_t used, bool normed, uint32_t *numbers, float *weights)
{
    double top = -INFINITY, all = 0, chosen = 0;
    for (uint32_t i = 0; i < n; i++) top = logits[i] > top ? logits[i] : top;
    for (uint32_t i = 0; i < n; i++) all += exp(logits[i] - top);
    for (uint32_t u = 0; u < used; u++) {
        uint32_t best = UINT32_MAX; // a NaN is never better, and each expert is taken only once even so
        for (uint32_t i = 0; i < n; i++)
            if (!is_among(numbers, u, i) && (best == UINT32_MAX || logits[i] > logits[best])) best = i;
        numbers[u] = best;
        weights[u] = (float)exp(logits[best] - top);
        chosen += weights[u];
    }
    for (uint32_t u = 0; u < used; u++) weights[u] = (float)(weights[u] / (normed ? chosen : all));
}

// Runs one expert on the n rows in p->taken; its output goes to p->made.
static void run_expert(const layer_pass *p, const model_layer *w, uint32_t number, uint32_t n)
{
    const backend *b = p->b;
    const model_config *c = &p->m->config;
    const dev_matrix *own = w->experts + 3 * (size_t)number;
    uint32_t F = c->expert_width;
    const projection to[] = {{p->gate, own[0]}, {p->up, own[1]}};
    dev bias = {NULL};
    if (w->expert_bias.address) bias = dev_at(w->expert_bias, number * (2 * (size_t)F + c->width));
    b->project(p->on, to, 2, p->taken, n);
    if (bias.address) {
        b->add_row(p->on, p->gate, bias, n, F);
        b->add_row(p->on, p->up, dev_at(bias, F), n, F);
    }
    b->glu(p->on, p->gate, p->up, c->act, (size_t)n * F);
    b->matmul(p->on, p->made, p->gate, own[2], n, false);
    if (bias.address) b->add_row(p->on, p->made, dev_at(bias, 2 * (size_t)F), n, c->width);
}

// y [n, D] = the weighted outputs of each row's experts for the normed rows x [n, D]. The host chooses the experts. A
// row's bits do not depend on the other rows.
static void apply_experts(const layer_pass *p, const model_layer *w, dev y, dev x, uint32_t n)
{
    const backend *b = p->b;
    const model_config *c = &p->m->config;
    size_t E = c->n_experts, used = c->n_used;
    float *logits = need_more(NULL, n * E, sizeof *logits, "scores of experts"),
          *shares = need_more(NULL, n * used, sizeof *shares, "experts of rows"),
          *own = need_more(NULL, n, sizeof *own, "rows of an expert");
    uint32_t *numbers = need_more(NULL, n * used, sizeof *numbers, "experts of rows"),
             *rows = need_more(NULL, n, sizeof *rows, "rows of an expert");
    b->matmul(p->on, p->router_scores, x, w->router, n, false);
    if (w->router_bias.address) b->add_row(p->on, p->router_scores, w->router_bias, n, c->n_experts);
    b->download(p->on, logits, p->router_scores, n * E);
    for (uint32_t i = 0; i < n; i++)
        experts_choose(logits + i * E, c->n_experts, c->n_used, c->experts_normed, numbers + i * used,
                       shares + i * used);
    b->clear(p->on, y, (size_t)n * c->width);
    for (uint32_t number = 0; number < c->n_experts; number++) {
        uint32_t count = 0;
        for (uint32_t i = 0; i < n * c->n_used; i++)
            if (numbers[i] == number) {
                rows[count] = i / c->n_used;
                own[count++] = shares[i];
            }
        if (!count) continue;
        b->take_rows(p->on, p->taken, x, rows, count, c->width);
        run_expert(p, w, number, count);
        b->add_rows(p->on, y, p->made, rows, own, count, c->width);
    }
    free(logits), free(shares), free(own), free(numbers), free(rows);
}

static void feed_forward(const layer_pass *p, const model_layer *w, dev x, uint32_t n)
{
    const backend *b = p->b;
    const model_config *c = &p->m->config;
    const projection to[] = {{p->gate, w->gate}, {p->up, w->up}};
    bool normed = !(c->switches & NO_PRE_NORMS);
    if (normed) norm_rows(p, p->normed, x, c->switches & PARALLEL ? w->attn_norm : w->ffn_norm, n);
    if (w->experts) {
        apply_experts(p, w, p->branch, normed ? p->normed : x, n);
        finish_branch(p, x, w->ffn_post, n);
        return;
    }
    b->project(p->on, to, 2, normed ? p->normed : x, n);
    if (c->switches & MLP_BIAS) {
        b->add_row(p->on, p->gate, w->gate_bias, n, c->ffn_width);
        b->add_row(p->on, p->up, w->up_bias, n, c->ffn_width);
    }
    b->glu(p->on, p->gate, p->up, c->act, (size_t)n * c->ffn_width);
    add_branch(p, x, p->gate, w->down, w->down_bias, w->ffn_post, n);
}

void layer_finish(const layer_pass *p, uint32_t layer, dev x, uint32_t n, uint32_t piece)
{
    const model_layer *w = &p->m->layers[layer];
    bool parallel = p->m->config.switches & PARALLEL; // the feed-forward reads x before attention's share is added
    if (piece == 0) piece = n;
    if (!parallel) add_branch(p, x, p->attended, w->wo, w->o_bias, w->attn_post, n);
    for (uint32_t first = 0; first < n; first += piece)
        feed_forward(p, w, dev_at(x, (size_t)first * p->m->config.width), n - first < piece ? n - first : piece);
    if (parallel) add_branch(p, x, p->attended, w->wo, w->o_bias, w->attn_post, n);
}

void layer_project_output(const layer_pass *p, uint32_t layer, dev y, uint32_t n)
{
    p->b->matmul(p->on, y, p->attended, p->m->layers[layer].wo, n, false);
}

void layer_logits(const layer_pass *p, dev x, uint32_t n, const logit_use *use, size_t at)
{
    const backend *b = p->b;
    const model_config *c = &p->m->config;
    for (uint32_t first = 0; first < n; first += LOGIT_ROWS) {
        uint32_t rows = n - first < LOGIT_ROWS ? n - first : LOGIT_ROWS;
        norm_rows(p, p->normed, dev_at(x, (size_t)first * c->width), p->m->final_norm, rows);
        b->matmul(p->on, p->logits, p->normed, p->m->head, rows, false);
        if (c->logit_scale != 1) b->scale(p->on, p->logits, c->logit_scale, (size_t)rows * c->vocabulary);
        if (c->logit_cap > 0) b->softcap(p->on, p->logits, c->logit_cap, (size_t)rows * c->vocabulary);
        if (use->logits)
            b->download(p->on, use->logits + (at + first) * c->vocabulary, p->logits, (size_t)rows * c->vocabulary);
        else b->sample(p->on, use->drawn + at + first, p->logits, rows, c->vocabulary, use->s, use->keys + at + first);
    }
}

kvb_status layer_end(const layer_pass *p, kvb_error *err)
{
    kvb_status status = model_check(p->m, err); // the pass may have read weights and rows from the file until now
    return status == KVB_OK ? p->b->check(p->on, err) : status;
}
