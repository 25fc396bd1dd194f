#include "profiler/model.h"
#include "formats/sha256.h"
#include "profiler/dequant.h"
#include "profiler/oracle.h"
#include "profiler/query_statistics.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Limits that keep every later product of sizes inside 64 bits; far above any model that exists.
enum { MAX_LAYERS = 4096, MAX_HEADS = 4096, MAX_WIDTH = 1 << 20, MAX_VOCABULARY = 1 << 24 };

static const char *const layer_tensors[] = {"attn_norm.weight", "ffn_norm.weight", "attn_q.weight",
                                            "attn_k.weight",    "attn_v.weight",   "attn_output.weight",
                                            "ffn_gate.weight",  "ffn_up.weight",   "ffn_down.weight"};
static const char *const model_tensors[] = {"token_embd.weight", "output_norm.weight", "output.weight",
                                            "rope_freqs.weight"};

typedef struct bounded_key {
    const char *key;
    uint32_t *out;
    uint32_t high;
} bounded_key;

static kvb_status read_sizes(model_config *c, const gguf_file *f, kvb_error *err)
{
    const bounded_key keys[] = {
        {"llama.block_count", &c->n_layers, MAX_LAYERS},
        {"llama.attention.head_count", &c->n_heads, MAX_HEADS},
        {"llama.embedding_length", &c->width, MAX_WIDTH},
        {"llama.feed_forward_length", &c->ffn_width, MAX_WIDTH},
        {"llama.context_length", &c->context_length, UINT32_MAX},
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        kvb_status status = gguf_get_u32(f, keys[i].key, keys[i].out, err);
        if (status != KVB_OK) return status;
        if (*keys[i].out == 0 || *keys[i].out > keys[i].high)
            return kvb_fail(err, KVB_FORMAT, "%s: %s is %u, expected 1 to %u", f->name, keys[i].key, *keys[i].out,
                            keys[i].high);
    }
    kvb_status status = gguf_get_u32_or(f, "llama.attention.head_count_kv", c->n_heads, &c->n_kv_heads, err);
    if (status == KVB_OK)
        status = gguf_get_u32_or(f, "llama.attention.key_length", c->width / c->n_heads, &c->head_dim, err);
    if (status == KVB_OK) status = gguf_get_u32_or(f, "llama.rope.dimension_count", c->head_dim, &c->rope_dim, err);
    uint32_t value_dim = 0;
    if (status == KVB_OK) status = gguf_get_u32_or(f, "llama.attention.value_length", c->head_dim, &value_dim, err);
    if (status != KVB_OK) return status;
    if (c->n_kv_heads == 0 || c->n_kv_heads > c->n_heads || c->n_heads % c->n_kv_heads)
        return kvb_fail(err, KVB_FORMAT, "%s: %u query heads cannot share %u KV heads, expected a divisor", f->name,
                        c->n_heads, c->n_kv_heads);
    if (c->head_dim == 0 || c->head_dim % 2 || c->head_dim > MODEL_MAX_HEAD_DIM)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: head size %u, expected an even number up to %d", f->name,
                        c->head_dim, MODEL_MAX_HEAD_DIM);
    if (value_dim != c->head_dim || c->rope_dim != c->head_dim)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: head size %u, value size %u, rotary size %u; expected all equal",
                        f->name, c->head_dim, value_dim, c->rope_dim);
    return KVB_OK;
}

// Features that would change the numbers and are not computed here.
static kvb_status refuse_features(model_config *c, const gguf_file *f, kvb_error *err)
{
    static const char *const counts[] = {"llama.expert_count", "llama.attention.sliding_window"};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        uint32_t n;
        kvb_status status = gguf_get_u32_or(f, counts[i], 0, &n, err);
        if (status != KVB_OK) return status;
        if (n)
            return kvb_fail(err, KVB_UNSUPPORTED, "%s: %s is %u; experts and sliding windows are not supported",
                            f->name, counts[i], n);
    }
    c->rope_scale = 1;
    if (!gguf_find(f, "llama.rope.scaling.type")) return KVB_OK;
    gguf_string type;
    kvb_status status = gguf_get_string(f, "llama.rope.scaling.type", &type, err);
    if (status != KVB_OK || gguf_string_is(type, "none")) return status;
    if (!gguf_string_is(type, "linear"))
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: llama.rope.scaling.type is '%.*s', expected none or linear", f->name,
                        (int)(type.size < 64 ? type.size : 64), type.data);
    status = gguf_get_f32(f, "llama.rope.scaling.factor", &c->rope_scale, err);
    if (status == KVB_OK && !(c->rope_scale > 0))
        status = kvb_fail(err, KVB_FORMAT, "%s: llama.rope.scaling.factor is %g, expected a positive number", f->name,
                          c->rope_scale);
    return status;
}

static kvb_status refuse_tensors(const gguf_file *f, uint32_t n_layers, kvb_error *err)
{
    for (size_t i = 0; i < f->n_tensors; i++) {
        gguf_string name = f->tensors[i].name;
        bool known = false;
        for (size_t k = 0; k < sizeof model_tensors / sizeof model_tensors[0]; k++)
            known |= gguf_string_is(name, model_tensors[k]);
        unsigned layer = 0;
        int digits = 0;
        char text[64] = {0};
        memcpy(text, name.data, name.size < sizeof text - 1 ? name.size : sizeof text - 1);
        if (!known && sscanf(text, "blk.%9u.%n", &layer, &digits) == 1 && digits && layer < n_layers)
            for (size_t k = 0; k < sizeof layer_tensors / sizeof layer_tensors[0]; k++)
                known |= strcmp(text + digits, layer_tensors[k]) == 0;
        if (!known)
            return kvb_fail(err, KVB_UNSUPPORTED,
                            "%s: tensor '%s' is not part of the llama architecture with %u layers; leaving it out "
                            "would change the numbers",
                            f->name, text, n_layers);
    }
    return KVB_OK;
}

kvb_status model_read_config(model_config *c, const gguf_file *f, kvb_error *err)
{
    memset(c, 0, sizeof *c);
    gguf_string architecture;
    kvb_status status = gguf_get_string(f, "general.architecture", &architecture, err);
    if (status != KVB_OK) return status;
    if (!gguf_string_is(architecture, "llama"))
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: general.architecture is '%.*s', expected llama", f->name,
                        (int)(architecture.size < 64 ? architecture.size : 64), architecture.data);
    strcpy(c->architecture, "llama");
    status = read_sizes(c, f, err);
    if (status == KVB_OK) status = gguf_get_f32(f, "llama.attention.layer_norm_rms_epsilon", &c->norm_eps, err);
    if (status == KVB_OK) status = gguf_get_f32_or(f, "llama.rope.freq_base", 10000.0f, &c->rope_base, err);
    if (status == KVB_OK && (!(c->norm_eps >= 0) || !(c->rope_base > 0)))
        status = kvb_fail(err, KVB_FORMAT, "%s: norm epsilon %g and rotary base %g, expected positive numbers", f->name,
                          c->norm_eps, c->rope_base);
    if (status == KVB_OK) status = refuse_features(c, f, err);
    if (status == KVB_OK) status = refuse_tensors(f, c->n_layers, err);
    if (status != KVB_OK) return status;
    const gguf_tensor *embedding = gguf_tensor_find(f, "token_embd.weight");
    if (!embedding)
        return kvb_fail(err, KVB_FORMAT, "%s: tensor token_embd.weight is missing, expected [vocabulary, %u]", f->name,
                        c->width);
    if (embedding->dims[0] != c->width || embedding->dims[1] == 0 || embedding->dims[1] > MAX_VOCABULARY)
        return kvb_fail(err, KVB_FORMAT, "%s: tensor token_embd.weight has shape [%llu, %llu], expected [1 to %d, %u]",
                        f->name, (unsigned long long)embedding->dims[1], (unsigned long long)embedding->dims[0],
                        MAX_VOCABULARY, c->width);
    c->vocabulary = (uint32_t)embedding->dims[1];
    gguf_string name = {f->name, strlen(f->name)};
    if (gguf_find(f, "general.name")) status = gguf_get_string(f, "general.name", &name, err);
    snprintf(c->name, sizeof c->name, "%.*s", (int)(name.size < sizeof c->name ? name.size : sizeof c->name - 1),
             name.data);
    return status;
}

// A tensor whose shape is what the config promises, and whose type can be read.
static kvb_status find_tensor(const gguf_tensor **out, const gguf_file *f, const char *name, uint32_t rows,
                              uint32_t columns, kvb_error *err)
{
    const gguf_tensor *t = gguf_tensor_find(f, name);
    if (!t)
        return kvb_fail(err, KVB_FORMAT, "%s: tensor %s is missing, expected [%u, %u]", f->name, name, rows, columns);
    if (t->dims[0] != columns || t->dims[1] != rows || t->dims[2] != 1 || t->dims[3] != 1)
        return kvb_fail(err, KVB_FORMAT, "%s: tensor %s has shape [%llu, %llu], expected [%u, %u]", f->name, name,
                        (unsigned long long)t->dims[1], (unsigned long long)t->dims[0], rows, columns);
    kvb_error inner = {0};
    kvb_status status = dequant_rows(t->type, t->data, 0, NULL, &inner);
    if (status != KVB_OK) return kvb_fail(err, status, "%s: tensor %s: %s", f->name, name, inner.message);
    *out = t;
    return KVB_OK;
}

static kvb_status check_finite(const float *x, size_t n, size_t before, const gguf_file *f, const gguf_tensor *t,
                               kvb_error *err)
{
    for (size_t i = 0; i < n; i++)
        if (!isfinite(x[i]))
            return kvb_fail(
                err, KVB_NUMERIC,
                "%s: tensor %.*s: value %zu of %zu is not finite; the file is damaged or overflowed when it was made",
                f->name, (int)t->name.size, t->name.data, before + i, (size_t)t->n_values);
    return KVB_OK;
}

// A tensor's values, checked against NaN and infinity.
static kvb_status read_tensor(float *out, const gguf_file *f, const char *name, uint32_t rows, uint32_t columns,
                              kvb_error *err)
{
    const gguf_tensor *t = NULL;
    kvb_error inner = {0};
    kvb_status found = find_tensor(&t, f, name, rows, columns, err);
    if (found != KVB_OK) return found;
    kvb_status status = dequant_tensor(t, out, &inner);
    if (status != KVB_OK) return kvb_fail(err, status, "%s: %s", f->name, inner.message);
    return check_finite(out, (size_t)rows * columns, 0, f, t, err);
}

// What loading needs beside the model: the file and host buffers for what is computed from weights.
typedef struct loader {
    gguf_file file;
    model *m;
    float *values, *roots;
} loader;

// GGUF stores the rows of Q and K so that RoPE pairs are neighbours (2i, 2i+1); here pairs are (i, i + d/2), as in transformers.
static kvb_status load_matrix(dev_matrix *out, loader *in, const char *name, uint32_t rows, uint32_t columns,
                              bool row_pairs, bool keep_rows, kvb_error *err)
{
    const backend *device = in->m->device;
    const gguf_tensor *t = NULL;
    kvb_status status = find_tensor(&t, &in->file, name, rows, columns, err);
    if (status != KVB_OK) return status;
    stored_matrix w = {t->type, t->data, rows, columns, row_pairs ? in->m->config.head_dim : 0};
    *out = device->matrix_load(&w, keep_rows);
    if (out->address || out->packed) return KVB_OK;
    w.paired = 0; // values are counted as the file has them
    for (uint32_t r = 0; status == KVB_OK && r < rows; r++)
        if (!stored_rows(&w, r, 1, in->values))
            status = check_finite(in->values, columns, (size_t)r * columns, &in->file, t, err);
    return status != KVB_OK ? status
                            : kvb_fail(err, KVB_MEMORY, "%s: no memory for tensor %s on backend %s", in->file.name,
                                       name, device->name);
}

static kvb_status upload(dev *out, loader *in, const float *values, size_t n, const char *name, kvb_error *err)
{
    *out = in->m->device->alloc(n);
    if (!out->address)
        return kvb_fail(err, KVB_MEMORY, "%s: no memory for %s on backend %s", in->file.name, name,
                        in->m->device->name);
    in->m->device->upload(*out, values, n);
    return KVB_OK;
}

static kvb_status load_vector(dev *out, loader *in, const char *name, uint32_t n, kvb_error *err)
{
    kvb_status status = read_tensor(in->values, &in->file, name, 1, n, err);
    return status == KVB_OK ? upload(out, in, in->values, n, name, err) : status;
}

static kvb_status load_layer(loader *in, uint32_t layer, kvb_error *err)
{
    const model_config *c = &in->m->config;
    model_layer *w = &in->m->layers[layer];
    uint32_t D = c->width, F = c->ffn_width, heads = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
    const struct {
        dev_matrix *out;
        const char *name;
        uint32_t rows, columns;
        bool row_pairs, keep_rows;
    } matrices[] = {{&w->wq, "attn_q", heads, D, true, false},     {&w->wk, "attn_k", kv, D, true, false},
                    {&w->wv, "attn_v", kv, D, false, false},       {&w->gate, "ffn_gate", F, D, false, false},
                    {&w->up, "ffn_up", F, D, false, false},        {&w->down, "ffn_down", D, F, false, false},
                    {&w->wo, "attn_output", D, heads, false, true}};
    char name[64];
    kvb_status status = KVB_OK;
    for (size_t i = 0; status == KVB_OK && i < sizeof matrices / sizeof matrices[0]; i++) {
        snprintf(name, sizeof name, "blk.%u.%s.weight", layer, matrices[i].name);
        status = load_matrix(matrices[i].out, in, name, matrices[i].rows, matrices[i].columns, matrices[i].row_pairs,
                             matrices[i].keep_rows, err);
    }
    if (status == KVB_OK) status = read_tensor(in->values, &in->file, name, D, heads, err); // attn_output came last
    if (status == KVB_OK) status = oracle_value_root(in->roots, in->values, D, c->n_heads, c->head_dim, err);
    if (status == KVB_OK)
        status = upload(&w->value_root, in, in->roots, (size_t)heads * c->head_dim, "value norms", err);
    if (status == KVB_OK) {
        snprintf(name, sizeof name, "blk.%u.attn_norm.weight", layer);
        status = load_vector(&w->attn_norm, in, name, D, err);
    }
    if (status == KVB_OK) {
        snprintf(name, sizeof name, "blk.%u.ffn_norm.weight", layer);
        status = load_vector(&w->ffn_norm, in, name, D, err);
    }
    return status;
}

// theta^(-2p/d) in float, divided by the position scale and by the per-frequency factors of Llama 3.1's rope_freqs.weight.
static kvb_status load_frequencies(loader *in, kvb_error *err)
{
    model *m = in->m;
    uint32_t half = m->config.rope_dim / 2;
    m->rope_frequency = malloc(half * sizeof(float));
    if (!m->rope_frequency)
        return kvb_fail(err, KVB_MEMORY, "%s: no memory for %u rotary frequencies", in->file.name, half);
    bool factors = gguf_tensor_find(&in->file, "rope_freqs.weight") != NULL;
    kvb_status status = factors ? read_tensor(in->values, &in->file, "rope_freqs.weight", 1, half, err) : KVB_OK;
    for (uint32_t p = 0; status == KVB_OK && p < half; p++) {
        m->rope_frequency[p] =
            (float)(1.0 / pow(m->config.rope_base, 2.0 * p / m->config.rope_dim)) / m->config.rope_scale;
        if (factors && !(in->values[p] > 0))
            return kvb_fail(err, KVB_FORMAT,
                            "%s: tensor rope_freqs.weight: factor %u is %g, expected a positive number", in->file.name,
                            p, in->values[p]);
        if (factors) m->rope_frequency[p] /= in->values[p];
    }
    return status;
}

static kvb_status load_all(loader *in, kvb_error *err)
{
    model *m = in->m;
    const model_config *c = &m->config;
    uint32_t heads = c->n_heads * c->head_dim;
    size_t wo = (size_t)heads * c->width; // the only matrix that is read here; beside it single rows
    in->values = malloc((wo > c->ffn_width ? wo : c->ffn_width) * sizeof(float));
    in->roots = malloc((size_t)heads * c->head_dim * sizeof(float));
    m->layers = calloc(c->n_layers, sizeof *m->layers);
    if (!in->values || !in->roots || !m->layers)
        return kvb_fail(err, KVB_MEMORY, "%s: no memory to unpack its tensors", in->file.name);
    kvb_status status = load_matrix(&m->embedding, in, "token_embd.weight", c->vocabulary, c->width, false, true, err);
    m->head_is_tied = !gguf_tensor_find(&in->file, "output.weight");
    if (status == KVB_OK && m->head_is_tied) m->head = m->embedding;
    else if (status == KVB_OK)
        status = load_matrix(&m->head, in, "output.weight", c->vocabulary, c->width, false, false, err);
    if (status == KVB_OK) status = load_vector(&m->final_norm, in, "output_norm.weight", c->width, err);
    if (status == KVB_OK) status = load_frequencies(in, err);
    for (uint32_t layer = 0; status == KVB_OK && layer < c->n_layers; layer++) {
        status = load_layer(in, layer, err);
        file_forget(&in->file.map);
    }
    return status;
}

kvb_status model_open(model **out, const char *path, const backend *device, kvb_error *err)
{
    return model_open_layers(out, path, device, 0, err);
}

kvb_status model_open_layers(model **out, const char *path, const backend *device, uint32_t n_layers, kvb_error *err)
{
    *out = NULL;
    loader in = {0};
    kvb_status status = device->open(err);
    if (status == KVB_OK) status = gguf_open(&in.file, path, err);
    if (status != KVB_OK) return status;
    in.m = calloc(1, sizeof *in.m);
    if (!in.m) status = kvb_fail(err, KVB_MEMORY, "%s: no memory", path);
    else in.m->device = device;
    if (status == KVB_OK) status = model_read_config(&in.m->config, &in.file, err);
    if (status == KVB_OK && n_layers > in.m->config.n_layers)
        status =
            kvb_fail(err, KVB_ARGUMENT, "%s: has %u layers, %u were asked for", path, in.m->config.n_layers, n_layers);
    else if (status == KVB_OK && n_layers) in.m->config.n_layers = n_layers;
    if (status == KVB_OK) status = tokenizer_from_gguf(&in.m->tokens, &in.file, err);
    if (status == KVB_OK && tokenizer_size(in.m->tokens) > in.m->config.vocabulary)
        status = kvb_fail(err, KVB_FORMAT,
                          "%s: the tokenizer has %zu tokens, the embedding %u rows; expected no more tokens than rows",
                          path, tokenizer_size(in.m->tokens), in.m->config.vocabulary);
    if (status == KVB_OK) status = sha256_hex(in.file.map.data, in.file.map.size, in.m->sha256, err);
    file_forget(&in.file.map);
    if (status == KVB_OK) status = load_all(&in, err);
    if (status == KVB_OK) status = device->check(err);
    free(in.values);
    free(in.roots);
    gguf_close(&in.file);
    if (status != KVB_OK) model_free(in.m);
    else *out = in.m;
    return status;
}

kvb_status model_set_pre_tokenizer(model *m, const char *path, const char *pre, kvb_error *err)
{
    gguf_file file;
    tokenizer *tokens = NULL;
    kvb_status status = gguf_open(&file, path, err);
    if (status != KVB_OK) return status;
    status = tokenizer_from_gguf_as(&tokens, &file, pre, err);
    gguf_close(&file);
    if (status != KVB_OK) return status;
    tokenizer_free(m->tokens);
    m->tokens = tokens;
    return KVB_OK;
}

kvb_status model_set_statistics(model *m, const char *path, kvb_error *err)
{
    query_statistics *s = NULL;
    kvb_status status = query_statistics_open(&s, path, m->config.n_layers, m->config.n_heads, m->config.head_dim, err);
    if (status != KVB_OK) return status;
    query_statistics_free(m->statistics);
    m->statistics = s;
    return KVB_OK;
}

void model_free(model *m)
{
    if (!m) return;
    for (uint32_t i = 0; m->layers && i < m->config.n_layers; i++) {
        model_layer *w = &m->layers[i];
        dev_matrix *matrices[] = {&w->wq, &w->wk, &w->wv, &w->wo, &w->gate, &w->up, &w->down};
        for (size_t k = 0; k < sizeof matrices / sizeof matrices[0]; k++) m->device->matrix_release(matrices[k]);
        m->device->release(w->attn_norm);
        m->device->release(w->ffn_norm);
        m->device->release(w->value_root);
    }
    if (!m->head_is_tied) m->device->matrix_release(&m->head);
    m->device->matrix_release(&m->embedding);
    m->device->release(m->final_norm);
    free(m->layers);
    free(m->rope_frequency);
    tokenizer_free(m->tokens);
    query_statistics_free(m->statistics);
    free(m);
}
