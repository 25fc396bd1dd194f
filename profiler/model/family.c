// The table of families, and a model's numbers, which are read and checked by its family. docs/models.md lists the
// families, whose switches are transformers' modeling files read line by line. Adding one that the switches cover is
// adding a row; CONTRIBUTING.md says what else it takes.
#include "profiler/model/family.h"
#include "profiler/model/model.h"
#include "profiler/weights/dequant.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

// ---- Families ----

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

// ---- Numbers ----

// Limits that keep every later product of sizes inside 64 bits; far above any model that exists.
enum { MAX_HEADS = 4096, MAX_WIDTH = 1 << 20, MAX_VOCABULARY = 1 << 24, MAX_EXPERTS = 4096 };

static kvb_status read_number(const weights *w, weight_key key, double missing, double *out, kvb_error *err)
{
    bool found;
    kvb_status status = weights_number(w, key, out, &found, err);
    if (status == KVB_OK && !found) *out = missing;
    return status;
}

// A whole number from 1 to `high`; `missing` 0: it must be there.
static kvb_status read_size(const weights *w, weight_key key, uint32_t missing, uint32_t high, uint32_t *out,
                            kvb_error *err)
{
    char name[96];
    double x;
    bool found;
    kvb_status status = weights_number(w, key, &x, &found, err);
    if (status != KVB_OK) return status;
    weights_key_name(w, key, name);
    if (!found && !missing)
        return kvb_fail(err, KVB_FORMAT, "%s: the metadata lacks %s, which this model needs", weights_name(w), name);
    if (!found) x = missing;
    if (x != floor(x) || x < 1 || x > high)
        return kvb_fail(err, KVB_FORMAT, "%s: %s is %.10g, expected 1 to %u", weights_name(w), name, x, high);
    *out = (uint32_t)x;
    return KVB_OK;
}

static kvb_status read_heads(model_config *c, const weights *w, const family *f, kvb_error *err)
{
    double kv_heads, head_dim, value_dim, rope_dim, share;
    kvb_status status = read_number(w, WEIGHT_KV_HEADS, c->n_heads, &kv_heads, err);
    if (status == KVB_OK) status = read_number(w, WEIGHT_HEAD_DIM, c->width / c->n_heads, &head_dim, err);
    if (status == KVB_OK) status = read_number(w, WEIGHT_VALUE_DIM, head_dim, &value_dim, err);
    if (status == KVB_OK) status = read_number(w, WEIGHT_ROPE_SHARE, 1, &share, err);
    if (status == KVB_OK) status = read_number(w, WEIGHT_ROPE_DIM, floor(head_dim * share), &rope_dim, err);
    if (status != KVB_OK) return status;
    if (!(kv_heads >= 1) || kv_heads > c->n_heads || fmod(c->n_heads, kv_heads) != 0)
        return kvb_fail(err, KVB_FORMAT, "%s: %u query heads cannot share %.10g KV heads, expected a divisor",
                        weights_name(w), c->n_heads, kv_heads);
    if (!(head_dim >= 2) || fmod(head_dim, 2) != 0 || head_dim > BACKEND_MAX_HEAD_DIM)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: head size %.10g, expected an even number up to %d", weights_name(w),
                        head_dim, BACKEND_MAX_HEAD_DIM);
    // GGUF's pairs reach over whole heads; those that transformers turns itself may be of a head's first part.
    bool whole = weights_is_gguf(w) && f->gguf_pairs && !f->hf_pairs;
    if (value_dim != head_dim || !(rope_dim >= 2) || fmod(rope_dim, 2) != 0 || rope_dim > head_dim ||
        (whole && rope_dim != head_dim))
        return kvb_fail(
            err, KVB_UNSUPPORTED,
            "%s: head size %.10g, value size %.10g, rotary size %.10g; expected all equal, or a smaller even "
            "rotary size",
            weights_name(w), head_dim, value_dim, rope_dim);
    c->n_kv_heads = (uint32_t)kv_heads;
    c->head_dim = (uint32_t)head_dim;
    c->rope_dim = (uint32_t)rope_dim;
    return KVB_OK;
}

static kvb_status read_sizes(model_config *c, const weights *w, kvb_error *err)
{
    const struct {
        weight_key key;
        uint32_t *out, high;
    } sizes[] = {{WEIGHT_LAYERS, &c->n_layers, MODEL_MAX_LAYERS},
                 {WEIGHT_HEADS, &c->n_heads, MAX_HEADS},
                 {WEIGHT_WIDTH, &c->width, MAX_WIDTH},
                 {WEIGHT_FFN_WIDTH, &c->ffn_width, MAX_WIDTH},
                 {WEIGHT_CONTEXT, &c->context_length, UINT32_MAX}};
    kvb_status status = KVB_OK;
    for (size_t i = 0; status == KVB_OK && i < sizeof sizes / sizeof *sizes; i++)
        status = read_size(w, sizes[i].key, 0, sizes[i].high, sizes[i].out, err);
    return status;
}

// ---- Rotary positions ----

static const struct {
    const char *name;
    rope_kind kind;
} rope_kinds[] = {{"default", ROPE_DEFAULT}, {"none", ROPE_DEFAULT},   {"linear", ROPE_LINEAR},
                  {"llama3", ROPE_LLAMA3},   {"yarn", ROPE_YARN},      {"longrope", ROPE_LONG},
                  {"su", ROPE_LONG},         {"dynamic", ROPE_DYNAMIC}};

static kvb_status read_rope_kind(rope_rule *r, const weights *w, kvb_error *err)
{
    char type[32];
    kvb_status status = weights_text(w, WEIGHT_ROPE_TYPE, type, sizeof type, err);
    if (status == KVB_OK && !type[0]) status = weights_text(w, WEIGHT_ROPE_OLD_TYPE, type, sizeof type, err);
    if (status != KVB_OK) return status;
    r->kind = ROPE_DEFAULT;
    for (size_t i = 0; i < sizeof rope_kinds / sizeof *rope_kinds; i++)
        if (!type[0] || strcmp(type, rope_kinds[i].name) == 0) {
            r->kind = type[0] ? rope_kinds[i].kind : ROPE_DEFAULT;
            return KVB_OK;
        }
    return kvb_fail(err, KVB_UNSUPPORTED,
                    "%s: the rotary scaling is '%s', expected default, linear, dynamic, yarn, longrope or llama3",
                    weights_name(w), type);
}

// Numbers that the kind needs, positive all of them.
static kvb_status read_rope_numbers(rope_rule *r, const model_config *c, const weights *w, kvb_error *err)
{
    double truncate = 1, theta;
    const struct {
        weight_key key;
        double *out, missing;
    } numbers[] = {{WEIGHT_ROPE_BASE, &theta, 10000},
                   {WEIGHT_ROPE_FACTOR, &r->factor, 1},
                   {WEIGHT_ROPE_ORIGINAL, &r->original, c->context_length},
                   {WEIGHT_ROPE_LOW, &r->low, 1},
                   {WEIGHT_ROPE_HIGH, &r->high, 4},
                   {WEIGHT_ROPE_FAST, &r->fast, 32},
                   {WEIGHT_ROPE_SLOW, &r->slow, 1}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        char name[96];
        kvb_status status = read_number(w, numbers[i].key, numbers[i].missing, numbers[i].out, err);
        if (status != KVB_OK) return status;
        if (*numbers[i].out > 0) continue;
        if (numbers[i].key == WEIGHT_ROPE_BASE) break; // said below
        return kvb_fail(err, KVB_FORMAT, "%s: %s is %g, expected a positive number", weights_name(w),
                        weights_key_name(w, numbers[i].key, name), *numbers[i].out);
    }
    r->theta = (float)theta;
    kvb_status status = read_number(w, WEIGHT_ROPE_TRUNCATE, 1, &truncate, err);
    r->truncate = truncate != 0;
    return status;
}

// transformers' rules for what cosines and sines are multiplied with.
static kvb_status read_rope_attention(rope_rule *r, const model_config *c, const weights *w, kvb_error *err)
{
    double given = 0, mscale = 0, mscale_all = 0, log_factor = r->factor > 1 ? log(r->factor) : 0;
    kvb_status status = read_number(w, WEIGHT_ROPE_ATTENTION, 0, &given, err);
    // GGUF has the second alone, and takes the first to be 1.
    if (status == KVB_OK) status = read_number(w, WEIGHT_ROPE_MSCALE, weights_is_gguf(w), &mscale, err);
    if (status == KVB_OK) status = read_number(w, WEIGHT_ROPE_MSCALE_ALL, 0, &mscale_all, err);
    r->attention = 1;
    if (r->kind == ROPE_YARN && mscale > 0 && mscale_all > 0)
        r->attention = (0.1 * mscale * log_factor + 1) / (0.1 * mscale_all * log_factor + 1);
    else if (r->kind == ROPE_YARN) r->attention = 0.1 * log_factor + 1;
    double stretch = c->context_length / r->original;
    if (r->kind == ROPE_LONG && stretch > 1) r->attention = sqrt(1 + log(stretch) / log(r->original));
    if ((r->kind == ROPE_YARN || r->kind == ROPE_LONG) && given > 0 && !weights_is_gguf(w)) r->attention = given;
    return status;
}

static kvb_status read_factor_list(float *out, const weights *w, weight_key key, uint32_t n, kvb_error *err)
{
    char name[96];
    double list[ROPE_MAX_PAIRS];
    size_t found;
    kvb_status status = weights_list(w, key, list, ROPE_MAX_PAIRS, &found, err);
    for (size_t i = 0; status == KVB_OK && i < found; i++) {
        out[i] = (float)list[i];
        if (!(out[i] > 0)) found = 0;
    }
    if (status == KVB_OK && found != n)
        status = kvb_fail(err, KVB_FORMAT, "%s: %s: expected %u positive numbers", weights_name(w),
                          weights_key_name(w, key, name), n);
    return status;
}

// Factors that GGUF keeps as a tensor; *found is false where it has none.
static kvb_status read_factor_tensor(float *out, weights *w, const char *name, uint32_t n, bool *found, kvb_error *err)
{
    weight_tensor t;
    *found = weights_find(w, name, &t);
    if (!*found) return KVB_OK;
    if (t.rows != 1 || t.columns != n || t.type != GGUF_TENSOR_F32)
        return kvb_fail(err, KVB_FORMAT, "%s: tensor %s has shape [%llu, %llu] of %s, expected [1, %u] of F32", t.file,
                        name, (unsigned long long)t.rows, (unsigned long long)t.columns, t.type_name, n);
    memcpy(out, t.data, n * sizeof *out);
    for (uint32_t i = 0; i < n; i++)
        if (!(out[i] > 0) || !isfinite(out[i]))
            return kvb_fail(err, KVB_FORMAT, "%s: tensor %s: factor %u is %g, expected a positive number", t.file, name,
                            i, out[i]);
    return KVB_OK;
}

static kvb_status read_rope_factors(rope_rule *r, uint32_t pairs, weights *w, kvb_error *err)
{
    bool found = false;
    kvb_status status = KVB_OK;
    if (r->kind == ROPE_LONG && !weights_is_gguf(w)) {
        r->has_factors = true;
        status = read_factor_list(r->short_factors, w, WEIGHT_ROPE_SHORT, pairs, err);
        return status == KVB_OK ? read_factor_list(r->long_factors, w, WEIGHT_ROPE_LONG, pairs, err) : status;
    }
    if (!weights_is_gguf(w)) return KVB_OK;
    status = read_factor_tensor(r->short_factors, w, "rope_freqs.weight", pairs, &r->has_factors, err);
    if (status == KVB_OK)
        status = read_factor_tensor(r->long_factors, w, "rope_factors_long.weight", pairs, &found, err);
    if (status != KVB_OK || !found) return status;
    r->kind = ROPE_LONG;
    return read_factor_tensor(r->short_factors, w, "rope_factors_short.weight", pairs, &r->has_factors, err);
}

static kvb_status read_rope(model_config *c, weights *w, kvb_error *err)
{
    rope_rule *r = &c->rope;
    kvb_status status = read_rope_kind(r, w, err);
    if (status == KVB_OK) status = read_rope_numbers(r, c, w, err);
    if (status != KVB_OK || !(r->theta > 0)) return status;
    status = read_rope_factors(r, c->rope_dim / 2, w, err);
    // Dynamic scaling begins where the first training ended: this is how far it is meant to reach.
    double reach = r->original * r->factor;
    if (r->kind == ROPE_DYNAMIC && reach > c->context_length) c->context_length = (uint32_t)fmin(reach, UINT32_MAX);
    return status == KVB_OK ? read_rope_attention(r, c, w, err) : status;
}

// ---- The rest ----

uint32_t model_budgeted(const model_config *c, uint32_t end)
{
    uint32_t n = 0;
    for (uint32_t l = 0; l < end; l++) n += !model_layer_bounded(c, l);
    return n;
}

double model_kept_share(const model_config *c, uint64_t entries, uint32_t n_tokens)
{
    double budgeted = model_budgeted(c, c->n_layers), each = (double)c->n_kv_heads * n_tokens;
    return ((double)entries - (c->n_layers - budgeted) * each) / (budgeted * each);
}

// Which layers have the window: those that the list names, else all but the last of every `period` (0: all), from
// `first` on.
static kvb_status read_bounded_layers(model_config *c, const weights *w, const family *f, kvb_error *err)
{
    double types[MODEL_MAX_LAYERS], first, period;
    size_t n = 0;
    char name[96];
    kvb_status status = weights_list(w, WEIGHT_LAYER_TYPES, types, MODEL_MAX_LAYERS, &n, err);
    if (status == KVB_OK) status = read_number(w, WEIGHT_MAX_WINDOW_LAYERS, 0, &first, err);
    if (status == KVB_OK && !n) status = read_number(w, WEIGHT_WINDOW_PERIOD, f->window_period, &period, err);
    if (status != KVB_OK) return status;
    if (n && n != c->n_layers)
        return kvb_fail(err, KVB_FORMAT, "%s: %s has %zu entries, expected one for each of %u layers", weights_name(w),
                        weights_key_name(w, WEIGHT_LAYER_TYPES, name), n, c->n_layers);
    for (uint32_t l = 0; l < c->n_layers; l++)
        if (n ? types[l] != 0 : l >= first && !(period >= 1 && fmod(l + 1, period) == 0)) layer_set_add(&c->bounded, l);
    return KVB_OK;
}

// A window as long as all that the model was trained for hides nothing.
static kvb_status read_window(model_config *c, const weights *w, const family *f, kvb_error *err)
{
    double window = 0, use = 1;
    char name[96];
    kvb_status status = read_number(w, WEIGHT_WINDOW, 0, &window, err);
    if (status == KVB_OK) status = read_number(w, WEIGHT_USE_WINDOW, 1, &use, err);
    if (status != KVB_OK || use == 0 || window == 0) return status;
    if (window >= c->context_length && !f->rotates_in_windows) return KVB_OK;
    if (!(window >= 1) || window != floor(window))
        return kvb_fail(err, KVB_FORMAT, "%s: %s is %.10g, expected a whole number of positions", weights_name(w),
                        weights_key_name(w, WEIGHT_WINDOW, name), window);
    if (!f->has_window)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s: a sliding window of %.10g positions, which models of the %s family do "
                        "not have",
                        weights_name(w), window, c->architecture);
    c->window = window < UINT32_MAX ? (uint32_t)window : UINT32_MAX;
    status = read_bounded_layers(c, w, f, err);
    for (uint32_t l = 0; f->rotates_in_windows && l < c->n_layers; l++)
        if (!model_layer_bounded(c, l)) layer_set_add(&c->unrotated, l);
    return status;
}

// Which layers have experts: all but those that are listed, and of every `step` the last one.
static kvb_status read_sparse_layers(model_config *c, const weights *w, kvb_error *err)
{
    double dense[MODEL_MAX_LAYERS], step;
    size_t n = 0;
    kvb_status status = weights_list(w, WEIGHT_DENSE_LAYERS, dense, MODEL_MAX_LAYERS, &n, err);
    if (status == KVB_OK) status = read_number(w, WEIGHT_EXPERT_STEP, 1, &step, err);
    for (uint32_t l = 0; status == KVB_OK && l < c->n_layers; l++) {
        bool listed = false;
        for (size_t i = 0; i < n; i++) listed = listed || dense[i] == l;
        if (!listed && fmod(l + 1, step) == 0) layer_set_add(&c->sparse, l);
    }
    return status;
}

static kvb_status read_experts(model_config *c, const weights *w, const family *f, kvb_error *err)
{
    double experts, local, normed;
    kvb_status status = read_number(w, WEIGHT_EXPERTS, 0, &experts, err);
    if (status == KVB_OK) status = read_number(w, WEIGHT_LOCAL_EXPERTS, 0, &local, err);
    if (status != KVB_OK) return status;
    // GGUF files of Mixtral are llama's.
    if (experts > 0 && weights_is_gguf(w) && strcmp(c->architecture, "llama") == 0) c->switches |= EXPERTS;
    if (!(c->switches & EXPERTS)) {
        if (experts + local == 0) return KVB_OK;
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: has %.10g experts, which models of the %s family do not have",
                        weights_name(w), experts + local, c->architecture);
    }
    status = read_size(w, local > 0 ? WEIGHT_LOCAL_EXPERTS : WEIGHT_EXPERTS, 0, MAX_EXPERTS, &c->n_experts, err);
    if (status == KVB_OK) status = read_size(w, WEIGHT_EXPERTS_USED, 0, c->n_experts, &c->n_used, err);
    if (status == KVB_OK) status = read_size(w, WEIGHT_EXPERT_WIDTH, c->ffn_width, MAX_WIDTH, &c->expert_width, err);
    if (status == KVB_OK) status = read_number(w, WEIGHT_EXPERT_NORM, f->experts_normed, &normed, err);
    c->experts_normed = normed != 0;
    return status == KVB_OK ? read_sparse_layers(c, w, err) : status;
}

static kvb_status read_vocabulary(model_config *c, weights *w, kvb_error *err)
{
    weight_tensor t;
    const char *name = weights_is_gguf(w) ? "token_embd.weight" : "model.embed_tokens.weight";
    if (!weights_has_tensors(w)) return read_size(w, WEIGHT_VOCABULARY, 0, MAX_VOCABULARY, &c->vocabulary, err);
    if (!weights_find(w, name, &t))
        return kvb_fail(err, KVB_FORMAT, "%s: tensor %s is missing, expected [vocabulary, %u]", weights_name(w), name,
                        c->width);
    if (t.columns != c->width || t.rows == 0 || t.rows > MAX_VOCABULARY)
        return kvb_fail(err, KVB_FORMAT, "%s: tensor %s has shape [%llu, %llu], expected [1 to %d, %u]", t.file, name,
                        (unsigned long long)t.rows, (unsigned long long)t.columns, MAX_VOCABULARY, c->width);
    c->vocabulary = (uint32_t)t.rows;
    return KVB_OK;
}

kvb_status model_read_config(model_config *c, const struct family **out, struct weights *w, kvb_error *err)
{
    const family *f;
    double eps;
    memset(c, 0, sizeof *c);
    kvb_status status = family_find(&f, w, err);
    if (status != KVB_OK) return status;
    *out = f;
    snprintf(c->architecture, sizeof c->architecture, "%s", weights_architecture(w));
    c->switches = f->switches;
    c->act = f->act;
    c->embedding_scale = c->residual_scale = c->logit_scale = c->query_scale = 1;
    status = read_sizes(c, w, err);
    if (status == KVB_OK) status = read_heads(c, w, f, err);
    if (status == KVB_OK)
        status = read_number(w, f->switches & LAYER_NORM ? WEIGHT_LAYER_NORM_EPS : WEIGHT_NORM_EPS, -1, &eps, err);
    if (status == KVB_OK) status = read_rope(c, w, err);
    if (status != KVB_OK) return status;
    c->norm_eps = (float)eps;
    if (!(c->norm_eps >= 0) || !(c->rope.theta > 0))
        return kvb_fail(err, KVB_FORMAT, "%s: norm epsilon %g and rotary base %g, expected positive numbers",
                        weights_name(w), c->norm_eps, c->rope.theta);
    status = read_window(c, w, f, err);
    if (status == KVB_OK) status = read_experts(c, w, f, err);
    if (status == KVB_OK) status = read_vocabulary(c, w, err);
    if (status == KVB_OK) status = weights_text(w, WEIGHT_NAME, c->name, sizeof c->name, err);
    if (status == KVB_OK && !c->name[0]) snprintf(c->name, sizeof c->name, "%.127s", weights_name(w));
    if (status == KVB_OK && f->read) status = f->read(c, w, err);
    return status;
}
