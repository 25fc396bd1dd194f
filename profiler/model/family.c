// The table of families: docs/models.md lists them, and the switches are transformers' modeling files read line by
// line. Adding a family that the switches cover is adding a row; CONTRIBUTING.md says what else it takes.
#include "profiler/model/family.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

// GGUF has no key for what a layer may have or not: its tensors say it.
static bool has_tensor(weights *w, const char *gguf_name)
{
    weight_tensor t;
    return weights_is_gguf(w) && weights_find(w, gguf_name, &t);
}

// Llama's, Mistral's, Granite's and others' config.json say whether linear layers have biases.
static kvb_status read_biases(model_config *c, weights *w, kvb_error *err)
{
    double attention = 0, mlp = 0;
    bool found;
    if (has_tensor(w, "blk.0.attn_q.bias")) c->switches |= QKV_BIAS;
    if (has_tensor(w, "blk.0.attn_output.bias")) c->switches |= O_BIAS;
    if (has_tensor(w, "blk.0.ffn_gate.bias")) c->switches |= MLP_BIAS;
    kvb_status status = weights_number(w, WEIGHT_ATTENTION_BIAS, &attention, &found, err);
    if (status == KVB_OK) status = weights_number(w, WEIGHT_MLP_BIAS, &mlp, &found, err);
    if (attention != 0) c->switches |= QKV_BIAS | O_BIAS;
    if (mlp != 0) c->switches |= MLP_BIAS;
    return status;
}

// Every fourth layer or so goes without rotary positions.
static kvb_status read_smollm3(model_config *c, weights *w, kvb_error *err)
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
static kvb_status read_granite(model_config *c, weights *w, kvb_error *err)
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

static kvb_status read_optional(double *out, const weights *w, weight_key key, double missing, kvb_error *err)
{
    bool found;
    *out = missing;
    return weights_number(w, key, out, &found, err);
}

// Gemma's scaled embeddings, own scale of queries, capped scores and logits, and another rotary base in windows. GGUF
// does not say the scale: the largest of either kind goes by the width, the others by the head.
static kvb_status read_gemma(model_config *c, weights *w, kvb_error *err)
{
    bool two = strncmp(c->architecture, "gemma2", 6) == 0, large = c->n_layers == (two ? 46 : 62);
    double scalar = large ? (double)c->width / c->n_heads : c->head_dim, caps[2] = {0}, base = 10000;
    kvb_status status = read_optional(&scalar, w, WEIGHT_QUERY_SCALAR, scalar, err);
    if (status == KVB_OK) status = read_optional(&caps[0], w, WEIGHT_SCORE_CAP, 0, err);
    if (status == KVB_OK) status = read_optional(&caps[1], w, WEIGHT_LOGIT_CAP, 0, err);
    if (status == KVB_OK) status = read_optional(&base, w, WEIGHT_LOCAL_ROPE_BASE, base, err);
    if (status == KVB_OK) status = read_optional(&base, w, WEIGHT_SLIDING_ROPE_BASE, base, err);
    if (status == KVB_OK && (!(scalar > 0) || !(caps[0] >= 0) || !(caps[1] >= 0) || !(base > 0)))
        status = kvb_fail(err, KVB_FORMAT,
                          "%s: query scalar %g, caps %g and %g, rotary base of windows %g; expected positive numbers",
                          weights_name(w), scalar, caps[0], caps[1], base);
    c->embedding_scale = sqrtf((float)c->width);
    c->query_scale = (float)sqrt(c->head_dim / scalar);
    c->score_cap = (float)caps[0];
    c->logit_cap = (float)caps[1];
    if (!two) c->local_theta = (float)base;
    return status == KVB_OK ? read_biases(c, w, err) : status;
}

// GLM-4's and Seed-OSS's attention_bias is that of queries, keys and values.
static kvb_status read_qkv_biases(model_config *c, weights *w, kvb_error *err)
{
    double bias;
    kvb_status status = read_optional(&bias, w, WEIGHT_ATTENTION_BIAS, 0, err);
    if (bias != 0 || has_tensor(w, "blk.0.attn_q.bias")) c->switches |= QKV_BIAS;
    return status;
}

static kvb_status read_cohere(model_config *c, weights *w, kvb_error *err)
{
    double norms;
    kvb_status status = read_optional(&norms, w, WEIGHT_QK_LAYER_NORM, 0, err);
    if (norms != 0 || has_tensor(w, "blk.0.attn_q_norm.weight")) c->switches |= QK_HEAD_NORM;
    if (status == KVB_OK) status = read_factor(&c->logit_scale, w, WEIGHT_LOGIT_FACTOR, err);
    return status == KVB_OK ? read_biases(c, w, err) : status;
}

static kvb_status read_olmoe(model_config *c, weights *w, kvb_error *err)
{
    double clip;
    kvb_status status = read_optional(&clip, w, WEIGHT_CLIP_QKV, 0, err);
    if (status == KVB_OK && !(clip >= 0))
        return kvb_fail(err, KVB_FORMAT, "%s: clips queries, keys and values at %g, expected a positive number",
                        weights_name(w), clip);
    c->qkv_clip = (float)clip;
    return status == KVB_OK ? read_biases(c, w, err) : status;
}

// Queries grow with the logarithm of their position.
static kvb_status read_ministral3(model_config *c, weights *w, kvb_error *err)
{
    kvb_status status = read_optional(&c->rope.growth, w, WEIGHT_ROPE_GROWTH, 0, err);
    if (status == KVB_OK && (!(c->rope.growth >= 0) || rope_depends_on_length(&c->rope)))
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s: queries grow by %g and rotary scaling depends on the length; expected 0 or more, and yarn",
                        weights_name(w), c->rope.growth);
    return status == KVB_OK ? read_biases(c, w, err) : status;
}

// A GGUF file has no key for it, and llama.cpp cuts the ends of yarn's ramp to whole numbers; the model was trained
// without.
static kvb_status read_gpt_oss(model_config *c, weights *w, kvb_error *err)
{
    (void)err;
    if (weights_is_gguf(w)) c->rope.truncate = false;
    return KVB_OK;
}

#define PLAIN_EXPERTS .expert_names = {"gate_proj.weight", "up_proj.weight", "down_proj.weight", "mlp.experts"}
#define FOUR_NORMS .names = {{TENSOR_FFN_NORM, NULL, "pre_feedforward_layernorm.weight"}}

static const family families[] = {
    {"llama", "llama", 0, SILU, .gguf_pairs = true, .experts_normed = true, .read = read_biases},
    {NULL, "mistral", 0, SILU, .has_window = true, .read = read_biases}, // its GGUF files are llama's
    {"mistral3", "ministral3", 0, SILU, .gguf_pairs = true, .has_window = true, .read = read_ministral3},
    {"qwen2", "qwen2", QKV_BIAS, SILU, .has_window = true},
    {"qwen3", "qwen3", QK_NORM, SILU, .has_window = true, .read = read_biases},
    {"phi3", "phi3", FUSED_QKV | FUSED_GATE_UP, SILU, .has_window = true},
    {"granite", "granite", 0, SILU, .gguf_pairs = true, .read = read_granite},
    {"smollm3", "smollm3", 0, SILU, .gguf_pairs = true, .ties = true, .read = read_smollm3},
    {"olmo2", "olmo2", QK_ROW_NORM | POST_NORMS | NO_PRE_NORMS, SILU, .has_window = true, .window_period = 4,
     .read = read_biases},
    {NULL, "olmo3", QK_ROW_NORM | POST_NORMS | NO_PRE_NORMS, SILU, .has_window = true, .window_period = 4,
     .read = read_biases}, // its GGUF files are olmo2's
    {"gemma2", "gemma2", POST_NORMS, GELU_TANH, .hf_norm_adds_one = true, .ties = true, FOUR_NORMS, .has_window = true,
     .window_period = 2, .read = read_gemma},
    {"gemma3", "gemma3_text", POST_NORMS | QK_NORM, GELU_TANH, .hf_norm_adds_one = true, .ties = true, FOUR_NORMS,
     .has_window = true, .window_period = 6, .read = read_gemma},
    {"exaone4", "exaone4", QK_NORM | POST_NORMS | NO_PRE_NORMS, SILU, .has_window = true, .window_period = 4,
     .rotates_in_windows = true},
    {"glm4", "glm4", FUSED_GATE_UP | POST_NORMS, SILU, .gguf_pairs = true, .hf_pairs = true,
     .names = {{TENSOR_ATTN_POST, NULL, "post_self_attn_layernorm.weight"},
               {TENSOR_FFN_POST, NULL, "post_mlp_layernorm.weight"}},
     .read = read_qkv_biases},
    {"seed_oss", "seed_oss", 0, SILU, .names = {{TENSOR_FFN_NORM, "post_attention_norm.weight", NULL}},
     .read = read_qkv_biases},
    {"command-r", "cohere", LAYER_NORM | PARALLEL, SILU, .ties = true, .gguf_pairs = true, .hf_pairs = true,
     .read = read_cohere},
    {"cohere2", "cohere2", LAYER_NORM | PARALLEL, SILU, .ties = true, .gguf_pairs = true, .hf_pairs = true,
     .has_window = true, .window_period = 4, .rotates_in_windows = true, .read = read_cohere},
    {"qwen3moe", "qwen3_moe", QK_NORM | EXPERTS, SILU, PLAIN_EXPERTS, .experts_normed = true, .has_window = true,
     .read = read_biases},
    {"olmoe", "olmoe", QK_ROW_NORM | EXPERTS, SILU, PLAIN_EXPERTS, .read = read_olmoe},
    {NULL, "mixtral", EXPERTS, SILU, .experts_normed = true, .has_window = true, // its GGUF files are llama's
     .expert_names = {"w1.weight", "w3.weight", "w2.weight", "block_sparse_moe.experts"},
     .names = {{TENSOR_ROUTER, NULL, "block_sparse_moe.gate.weight"}}},
    {"gpt-oss", "gpt_oss", QKV_BIAS | O_BIAS | SINKS | EXPERTS | EXPERT_BIAS, SWIGLU_CLAMPED, .experts_normed = true,
     .experts = EXPERTS_TRANSPOSED, .has_window = true, .window_period = 2, .read = read_gpt_oss,
     .names = {{TENSOR_ROUTER, NULL, "mlp.router.weight"}, {TENSOR_FFN_NORM, "post_attention_norm.weight", NULL}}},
};

// Architectures that people have and that cannot be loaded for a reason.
static const struct {
    const char *names[5]; // in either container
    const char *reason;
} refused[] = {
    {{"deepseek_v2", "deepseek_v3", "deepseek2", "kimi_k2", "glm_moe_dsa"},
     "its cache is one compressed vector per token for all heads (MLA): there is no budget per head"},
    {{"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3next", "qwen35"},
     "most of its layers keep a state of fixed size in the place of a cache (linear attention), which is not "
     "supported"},
    {{"falcon_h1", "falcon-h1", "lfm2", "granitemoehybrid", "jamba"},
     "its layers of convolutions or state spaces keep a state in the place of a cache, which is not supported"},
    {{"mamba", "mamba2", "rwkv", "rwkv6", "rwkv7"}, "it has no cache of keys and values: there is nothing to budget"},
};

static const char *reason_against(const char *name)
{
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        for (size_t k = 0; k < 5; k++)
            if (strcmp(refused[i].names[k], name) == 0) return refused[i].reason;
    return NULL;
}

enum { N_FAMILIES = sizeof families / sizeof *families };

kvb_status family_find(const family **out, const weights *w, kvb_error *err)
{
    char known[512] = "";
    const char *wanted = weights_architecture(w), *reason = reason_against(wanted);
    if (reason)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: %s is '%.60s': %s", weights_name(w),
                        weights_is_gguf(w) ? "general.architecture" : "model_type", wanted, reason);
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
