// The table of families (families.md 2; the switches are transformers' modeling files read line by line). Adding one
// that the switches cover is adding a row; docs/models.md says how.
#include "profiler/family.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

// Llama's, Mistral's, Granite's and others' config.json say whether linear layers have biases.
static kvb_status read_biases(model_config *c, const weights *w, kvb_error *err)
{
    double attention = 0, mlp = 0;
    bool found;
    kvb_status status = weights_number(w, WEIGHT_ATTENTION_BIAS, &attention, &found, err);
    if (status == KVB_OK) status = weights_number(w, WEIGHT_MLP_BIAS, &mlp, &found, err);
    if (attention != 0) c->switches |= QKV_BIAS | O_BIAS;
    if (mlp != 0) c->switches |= MLP_BIAS;
    return status;
}

// Every fourth layer or so goes without rotary positions.
static kvb_status read_smollm3(model_config *c, const weights *w, kvb_error *err)
{
    double rotates[MODEL_MAX_LAYERS];
    size_t n = 0;
    kvb_status status = weights_list(w, WEIGHT_NO_ROPE_LAYERS, rotates, MODEL_MAX_LAYERS, &n, err);
    if (status != KVB_OK) return status;
    if (n && n != c->n_layers)
        return kvb_fail(err, KVB_FORMAT, "%s: no_rope_layers has %zu numbers, expected one for each of %u layers",
                        weights_name(w), n, c->n_layers);
    for (uint32_t l = 0; l < c->n_layers; l++) // GGUF does not say it: every fourth
        if (n ? rotates[l] == 0 : l % 4 == 3) layer_set_add(&c->unrotated, l);
    return read_biases(c, w, err);
}

static kvb_status read_factor(float *out, const weights *w, weight_key key, kvb_error *err)
{
    double x = *out;
    bool found;
    char name[96];
    kvb_status status = weights_number(w, key, &x, &found, err);
    if (status == KVB_OK && !(x > 0))
        return kvb_fail(err, KVB_FORMAT, "%s: %s is %g, expected a positive number", weights_name(w),
                        weights_key_name(w, key, name), x);
    *out = (float)x;
    return status;
}

// Granite's four factors. Logits are divided by the last one.
static kvb_status read_granite(model_config *c, const weights *w, kvb_error *err)
{
    float attention = 1 / sqrtf((float)c->head_dim), logits = 1;
    kvb_status status = read_factor(&c->embedding_scale, w, WEIGHT_EMBEDDING_SCALE, err);
    if (status == KVB_OK) status = read_factor(&c->residual_scale, w, WEIGHT_RESIDUAL_SCALE, err);
    if (status == KVB_OK) status = read_factor(&attention, w, WEIGHT_ATTENTION_SCALE, err);
    if (status == KVB_OK) status = read_factor(&logits, w, WEIGHT_LOGIT_SCALE, err);
    c->query_scale = (float)(attention * sqrt(c->head_dim));
    c->logit_scale = 1 / logits;
    return status == KVB_OK ? read_biases(c, w, err) : status;
}

static const family families[] = {
    {"llama", "llama", 0, SILU, .gguf_pairs = true, .read = read_biases},
    {NULL, "mistral", 0, SILU, .has_window = true, .read = read_biases}, // its GGUF files are llama's
    {"qwen2", "qwen2", QKV_BIAS, SILU, .has_window = true},
    {"qwen3", "qwen3", QK_NORM, SILU, .has_window = true, .read = read_biases},
    {"phi3", "phi3", FUSED_QKV | FUSED_GATE_UP, SILU, .has_window = true},
    {"granite", "granite", 0, SILU, .gguf_pairs = true, .read = read_granite},
    {"smollm3", "smollm3", 0, SILU, .gguf_pairs = true, .read = read_smollm3},
    {"olmo2", "olmo2", QK_ROW_NORM | POST_NORMS | NO_PRE_NORMS, SILU, .read = read_biases},
};

enum { N_FAMILIES = sizeof families / sizeof *families };

kvb_status family_find(const family **out, const weights *w, kvb_error *err)
{
    char known[512] = "";
    const char *wanted = weights_architecture(w);
    size_t size = 0;
    for (size_t i = 0; i < N_FAMILIES; i++) {
        const char *name = weights_is_gguf(w) ? families[i].gguf : families[i].model_type;
        *out = &families[i];
        if (!name) continue;
        if (strcmp(name, wanted) == 0) return KVB_OK;
        size += (size_t)snprintf(known + size, sizeof known - size, "%s%s", size ? ", " : "", name);
    }
    return kvb_fail(err, KVB_UNSUPPORTED, "%s: %s is '%.60s', expected %s", weights_name(w),
                    weights_is_gguf(w) ? "general.architecture" : "model_type", wanted, known);
}

static const char *const names[N_TENSOR_ROLES][2] = {
#define TENSOR_NAMES(role, gguf, hf) [TENSOR_##role] = {gguf, hf},
#define MATRIX_NAMES(role, field, gguf, hf, ...) TENSOR_NAMES(role, gguf, hf)
#define FUSED_NAMES(role, gguf, hf, ...) TENSOR_NAMES(role, gguf, hf)
    LAYER_MATRICES(MATRIX_NAMES) LAYER_FUSED(FUSED_NAMES) LAYER_VECTORS(MATRIX_NAMES)
#undef MATRIX_NAMES
#undef FUSED_NAMES
#undef TENSOR_NAMES
};

void family_tensor_name(const family *f, tensor_role role, bool gguf, uint32_t layer, char out[128])
{
    const char *name = names[role][gguf ? 0 : 1];
    for (size_t i = 0; i < FAMILY_NAMES; i++) {
        const char *other = gguf ? f->names[i].gguf : f->names[i].hf;
        if (f->names[i].role == role && other) name = other;
    }
    snprintf(out, 128, gguf ? "blk.%u.%s" : "model.layers.%u.%s", layer, name);
}
