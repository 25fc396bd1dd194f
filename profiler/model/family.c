// The table of families, and the reading and checking of a model's numbers by its family. docs/models.md lists the
// families; their switches follow transformers' modeling files, read line by line. A family that the switches cover
// takes one more row; CONTRIBUTING.md says what else it takes.
#include "profiler/model/family.h"
#include "profiler/model/model.h"
#include "profiler/weights/dequant.h"
#include "profiler/weights/first_error.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

// ---- Reading ----

// A config that is being read. The first error is kept; everything read after it gets the default of a missing value.
struct config_reader {
    model_config *c;
    const family *f;
    weights *w;
    kvb_error *err;
    kvb_status status;
};
typedef struct config_reader config_reader;

static double read_number(config_reader *r, weight_key key, double missing)
{
    double x;
    bool found = false;
    if (r->status == KVB_OK) r->status = weights_number(r->w, key, &x, &found, r->err);
    return found ? x : missing;
}

static double read_positive(config_reader *r, weight_key key, double missing)
{
    char name[96];
    double x = read_number(r, key, missing);
    if (x > 0) return x;
    KEEP_ERROR(r, KVB_FORMAT, "%s: %s is %g, expected a positive number", r->w->name, weights_key_name(r->w, key, name),
               x);
    return missing;
}

// Reads a whole number from 1 to `high`; `missing` 0: it must be there.
static uint32_t read_size(config_reader *r, weight_key key, uint32_t missing, uint32_t high)
{
    char name[96];
    double x = read_number(r, key, missing ? (double)missing : (double)NAN);
    weights_key_name(r->w, key, name);
    if (isnan(x)) KEEP_ERROR(r, KVB_FORMAT, "%s: the metadata lacks %s, which this model needs", r->w->name, name);
    if (x == floor(x) && x >= 1 && x <= high) return (uint32_t)x;
    KEEP_ERROR(r, KVB_FORMAT, "%s: %s is %.10g, expected 1 to %u", r->w->name, name, x, high);
    return 1;
}

// Reads a list of one number for each layer. Returns how many there are, 0 if there is no list.
static size_t read_layers(config_reader *r, weight_key key, double out[MODEL_MAX_LAYERS])
{
    char name[96];
    size_t n = 0;
    if (r->status == KVB_OK) r->status = weights_list(r->w, key, out, MODEL_MAX_LAYERS, &n, r->err);
    if (n && n != r->c->n_layers)
        KEEP_ERROR(r, KVB_FORMAT, "%s: %s has %zu entries, expected one for each of %u layers", r->w->name,
                   weights_key_name(r->w, key, name), n, r->c->n_layers);
    return r->status == KVB_OK ? n : 0;
}

// GGUF has no keys for optional parts of layers: its tensors show which there are.
static bool has_tensor(const config_reader *r, const char *gguf_name)
{
    weight_tensor t;
    return r->w->is_gguf && weights_find(r->w, gguf_name, &t);
}

// ---- Families ----

// Llama's, Mistral's, Granite's and others' config.json say whether linear layers have biases.
static void read_biases(config_reader *r)
{
    model_config *c = r->c;
    if (has_tensor(r, "blk.0.attn_q.bias")) c->switches |= QKV_BIAS;
    if (has_tensor(r, "blk.0.attn_output.bias")) c->switches |= O_BIAS;
    if (has_tensor(r, "blk.0.ffn_gate.bias")) c->switches |= MLP_BIAS;
    if (read_number(r, WEIGHT_ATTENTION_BIAS, 0) != 0) c->switches |= QKV_BIAS | O_BIAS;
    if (read_number(r, WEIGHT_MLP_BIAS, 0) != 0) c->switches |= MLP_BIAS;
}

// Every fourth layer or so goes without rotary positions.
static void read_smollm3(config_reader *r)
{
    double rotates[MODEL_MAX_LAYERS];
    size_t n = read_layers(r, WEIGHT_NO_ROPE_LAYERS, rotates);
    for (uint32_t l = 0; l < r->c->n_layers; l++) // GGUF does not say it: every fourth
        if (n ? rotates[l] == 0 : l % 4 == 3) layer_set_add(&r->c->unrotated, l);
    read_biases(r);
}

// Granite's four factors. Logits are divided by the last one.
static void read_granite(config_reader *r)
{
    model_config *c = r->c;
    c->embedding_scale = (float)read_positive(r, WEIGHT_EMBEDDING_SCALE, 1);
    c->residual_scale = (float)read_positive(r, WEIGHT_RESIDUAL_SCALE, 1);
    float attention = (float)read_positive(r, WEIGHT_ATTENTION_SCALE, 1 / sqrtf((float)c->head_dim));
    c->query_scale = (float)(attention * sqrt(c->head_dim));
    c->logit_scale = 1 / (float)read_positive(r, WEIGHT_LOGIT_SCALE, 1);
    read_biases(r);
}

// Gemma's scaled embeddings, own scale of queries, capped scores and logits, and another rotary base in windows. GGUF
// does not state the scale: the largest model of either generation scales by the width, the others by the head size.
static void read_gemma(config_reader *r)
{
    model_config *c = r->c;
    bool two = strncmp(c->architecture, "gemma2", 6) == 0, large = c->n_layers == (two ? 46 : 62);
    double scalar = read_number(r, WEIGHT_QUERY_SCALAR, large ? (double)c->width / c->n_heads : c->head_dim);
    double score_cap = read_number(r, WEIGHT_SCORE_CAP, 0), logit_cap = read_number(r, WEIGHT_LOGIT_CAP, 0);
    double base = read_number(r, WEIGHT_SLIDING_ROPE_BASE, read_number(r, WEIGHT_LOCAL_ROPE_BASE, 10000));
    if (!(scalar > 0) || !(score_cap >= 0) || !(logit_cap >= 0) || !(base > 0))
        KEEP_ERROR(r, KVB_FORMAT,
                   "%s: query scalar %g, caps %g and %g, rotary base of windows %g; expected positive numbers",
                   r->w->name, scalar, score_cap, logit_cap, base);
    c->embedding_scale = sqrtf((float)c->width);
    c->query_scale = (float)sqrt(c->head_dim / scalar);
    c->score_cap = (float)score_cap;
    c->logit_cap = (float)logit_cap;
    if (!two) c->local_theta = (float)base;
    read_biases(r);
}

// GLM-4's and Seed-OSS's attention_bias stands for biases of queries, keys and values only.
static void read_qkv_biases(config_reader *r)
{
    if (read_number(r, WEIGHT_ATTENTION_BIAS, 0) != 0 || has_tensor(r, "blk.0.attn_q.bias")) r->c->switches |= QKV_BIAS;
}

static void read_cohere(config_reader *r)
{
    if (read_number(r, WEIGHT_QK_LAYER_NORM, 0) != 0 || has_tensor(r, "blk.0.attn_q_norm.weight"))
        r->c->switches |= QK_HEAD_NORM;
    r->c->logit_scale = (float)read_positive(r, WEIGHT_LOGIT_FACTOR, 1);
    read_biases(r);
}

static void read_olmoe(config_reader *r)
{
    double clip = read_number(r, WEIGHT_CLIP_QKV, 0);
    if (!(clip >= 0))
        KEEP_ERROR(r, KVB_FORMAT, "%s: clips queries, keys and values at %g, expected a positive number", r->w->name,
                   clip);
    r->c->qkv_clip = (float)clip;
    read_biases(r);
}

// Queries grow with the logarithm of their position.
static void read_ministral3(config_reader *r)
{
    double growth = r->c->rope.growth = read_number(r, WEIGHT_ROPE_GROWTH, 0);
    if (!(growth >= 0) || rope_depends_on_length(&r->c->rope))
        KEEP_ERROR(r, KVB_UNSUPPORTED,
                   "%s: queries grow by %g and rotary scaling depends on the length; expected 0 or more, and yarn",
                   r->w->name, growth);
    read_biases(r);
}

// A GGUF file has no key for rope_rule.truncate, and llama.cpp rounds the ends of yarn's ramp to whole numbers; the
// model was trained without that.
static void read_gpt_oss(config_reader *r)
{
    if (r->w->is_gguf) r->c->rope.truncate = false;
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

// Common architectures that cannot be loaded, and why.
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
    const char *wanted = w->architecture, *reason = reason_against(wanted);
    if (reason)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: %s is '%.60s': %s", w->name,
                        w->is_gguf ? "general.architecture" : "model_type", wanted, reason);
    size_t size = 0;
    for (size_t i = 0; i < N_FAMILIES; i++) {
        const char *name = w->is_gguf ? families[i].gguf : families[i].model_type;
        *out = &families[i];
        if (!name) continue;
        if (strcmp(name, wanted) == 0) return KVB_OK;
        size += (size_t)snprintf(known + size, sizeof known - size, "%s%s", size ? ", " : "", name);
    }
    return kvb_fail(err, KVB_UNSUPPORTED, "%s: %s is '%.60s', expected %s", w->name,
                    w->is_gguf ? "general.architecture" : "model_type", wanted, known);
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

// ---- Sizes ----

// Limits that keep every later product of sizes inside 64 bits; far above any model that exists.
enum { MAX_HEADS = 4096, MAX_WIDTH = 1 << 20, MAX_VOCABULARY = 1 << 24, MAX_EXPERTS = 4096 };

static void read_heads(config_reader *r)
{
    model_config *c = r->c;
    double kv_heads = read_number(r, WEIGHT_KV_HEADS, c->n_heads);
    double head_dim = read_number(r, WEIGHT_HEAD_DIM, c->width / c->n_heads);
    double value_dim = read_number(r, WEIGHT_VALUE_DIM, head_dim), share = read_number(r, WEIGHT_ROPE_SHARE, 1);
    double rope_dim = read_number(r, WEIGHT_ROPE_DIM, floor(head_dim * share));
    if (!(kv_heads >= 1) || kv_heads > c->n_heads || fmod(c->n_heads, kv_heads) != 0)
        KEEP_ERROR(r, KVB_FORMAT, "%s: %u query heads cannot share %.10g KV heads, expected a divisor", r->w->name,
                   c->n_heads, kv_heads);
    if (!(head_dim >= 2) || fmod(head_dim, 2) != 0 || head_dim > BACKEND_MAX_HEAD_DIM)
        KEEP_ERROR(r, KVB_UNSUPPORTED, "%s: head size %.10g, expected an even number up to %d", r->w->name, head_dim,
                   BACKEND_MAX_HEAD_DIM);
    // GGUF's pairs cover whole heads; those that transformers itself rotates may cover only a head's first part.
    bool whole = r->w->is_gguf && r->f->gguf_pairs && !r->f->hf_pairs;
    if (value_dim != head_dim || !(rope_dim >= 2) || fmod(rope_dim, 2) != 0 || rope_dim > head_dim ||
        (whole && rope_dim != head_dim))
        KEEP_ERROR(r, KVB_UNSUPPORTED,
                   "%s: head size %.10g, value size %.10g, rotary size %.10g; expected all equal, or a smaller even "
                   "rotary size",
                   r->w->name, head_dim, value_dim, rope_dim);
    if (r->status != KVB_OK) return;
    c->n_kv_heads = (uint32_t)kv_heads;
    c->head_dim = (uint32_t)head_dim;
    c->rope_dim = (uint32_t)rope_dim;
}

static void read_sizes(config_reader *r)
{
    model_config *c = r->c;
    c->n_layers = read_size(r, WEIGHT_LAYERS, 0, MODEL_MAX_LAYERS);
    c->n_heads = read_size(r, WEIGHT_HEADS, 0, MAX_HEADS);
    c->width = read_size(r, WEIGHT_WIDTH, 0, MAX_WIDTH);
    c->ffn_width = read_size(r, WEIGHT_FFN_WIDTH, 0, MAX_WIDTH);
    c->context_length = read_size(r, WEIGHT_CONTEXT, 0, UINT32_MAX);
    read_heads(r);
    c->norm_eps = (float)read_number(r, r->f->switches & LAYER_NORM ? WEIGHT_LAYER_NORM_EPS : WEIGHT_NORM_EPS, -1);
}

// ---- Rotary positions ----

static const struct {
    const char *name;
    rope_kind kind;
} rope_kinds[] = {{"", ROPE_DEFAULT},      {"default", ROPE_DEFAULT}, {"none", ROPE_DEFAULT},
                  {"linear", ROPE_LINEAR}, {"llama3", ROPE_LLAMA3},   {"yarn", ROPE_YARN},
                  {"longrope", ROPE_LONG}, {"su", ROPE_LONG},         {"dynamic", ROPE_DYNAMIC}};

static void read_rope_kind(config_reader *r)
{
    char type[32];
    r->status = weights_text(r->w, WEIGHT_ROPE_TYPE, type, sizeof type, r->err);
    if (r->status == KVB_OK && !type[0])
        r->status = weights_text(r->w, WEIGHT_ROPE_OLD_TYPE, type, sizeof type, r->err);
    for (size_t i = 0; i < sizeof rope_kinds / sizeof *rope_kinds; i++)
        if (strcmp(type, rope_kinds[i].name) == 0) {
            r->c->rope.kind = rope_kinds[i].kind;
            return;
        }
    KEEP_ERROR(r, KVB_UNSUPPORTED,
               "%s: the rotary scaling is '%s', expected default, linear, dynamic, yarn, longrope or llama3",
               r->w->name, type);
}

static void read_rope_numbers(config_reader *r)
{
    rope_rule *rule = &r->c->rope;
    rule->theta = (float)read_number(r, WEIGHT_ROPE_BASE, 10000);
    rule->factor = read_positive(r, WEIGHT_ROPE_FACTOR, 1);
    rule->original = read_positive(r, WEIGHT_ROPE_ORIGINAL, r->c->context_length);
    rule->low = read_positive(r, WEIGHT_ROPE_LOW, 1);
    rule->high = read_positive(r, WEIGHT_ROPE_HIGH, 4);
    rule->fast = read_positive(r, WEIGHT_ROPE_FAST, 32);
    rule->slow = read_positive(r, WEIGHT_ROPE_SLOW, 1);
    rule->truncate = read_number(r, WEIGHT_ROPE_TRUNCATE, 1) != 0;
    if (!(r->c->norm_eps >= 0) || !(rule->theta > 0))
        KEEP_ERROR(r, KVB_FORMAT, "%s: norm epsilon %g and rotary base %g, expected positive numbers", r->w->name,
                   r->c->norm_eps, rule->theta);
}

// Sets what cosines and sines are multiplied by, by transformers' rules.
static void read_rope_attention(config_reader *r)
{
    rope_rule *rule = &r->c->rope;
    bool gguf = r->w->is_gguf, yarn = rule->kind == ROPE_YARN;
    double log_factor = rule->factor > 1 ? log(rule->factor) : 0, stretch = r->c->context_length / rule->original;
    double given = read_number(r, WEIGHT_ROPE_ATTENTION, 0);
    // GGUF has only the second, and takes the first to be 1.
    double mscale = read_number(r, WEIGHT_ROPE_MSCALE, gguf), mscale_all = read_number(r, WEIGHT_ROPE_MSCALE_ALL, 0);
    rule->attention = 1;
    if (yarn && mscale > 0 && mscale_all > 0)
        rule->attention = (0.1 * mscale * log_factor + 1) / (0.1 * mscale_all * log_factor + 1);
    else if (yarn) rule->attention = 0.1 * log_factor + 1;
    if (rule->kind == ROPE_LONG && stretch > 1) rule->attention = sqrt(1 + log(stretch) / log(rule->original));
    if ((yarn || rule->kind == ROPE_LONG) && given > 0 && !gguf) rule->attention = given;
}

static void read_factor_list(config_reader *r, float *out, weight_key key)
{
    char name[96];
    double list[ROPE_MAX_PAIRS];
    size_t found = 0, n = r->c->rope_dim / 2;
    if (r->status == KVB_OK) r->status = weights_list(r->w, key, list, ROPE_MAX_PAIRS, &found, r->err);
    for (size_t i = 0; r->status == KVB_OK && i < found; i++) {
        out[i] = (float)list[i];
        if (!(out[i] > 0)) found = 0;
    }
    if (found != n)
        KEEP_ERROR(r, KVB_FORMAT, "%s: %s: expected %zu positive numbers", r->w->name,
                   weights_key_name(r->w, key, name), n);
}

// Reads factors that GGUF keeps as a tensor. Returns false if there is none.
static bool read_factor_tensor(config_reader *r, float *out, const char *name)
{
    weight_tensor t;
    uint32_t n = r->c->rope_dim / 2;
    if (!weights_find(r->w, name, &t)) return false;
    if (t.rows != 1 || t.columns != n || t.type != GGUF_TENSOR_F32) {
        KEEP_ERROR(r, KVB_FORMAT, "%s: tensor %s has shape [%llu, %llu] of %s, expected [1, %u] of F32", t.file, name,
                   (unsigned long long)t.rows, (unsigned long long)t.columns, t.type_name, n);
        return true;
    }
    memcpy(out, t.data, n * sizeof *out);
    for (uint32_t i = 0; i < n; i++)
        if (!(out[i] > 0) || !isfinite(out[i]))
            KEEP_ERROR(r, KVB_FORMAT, "%s: tensor %s: factor %u is %g, expected a positive number", t.file, name, i,
                       out[i]);
    return true;
}

static void read_rope_factors(config_reader *r)
{
    rope_rule *rule = &r->c->rope;
    if (r->w->is_gguf) {
        rule->has_factors = read_factor_tensor(r, rule->short_factors, "rope_freqs.weight");
        if (!read_factor_tensor(r, rule->long_factors, "rope_factors_long.weight")) return;
        rule->kind = ROPE_LONG;
        rule->has_factors = read_factor_tensor(r, rule->short_factors, "rope_factors_short.weight");
    } else if (rule->kind == ROPE_LONG) {
        rule->has_factors = true;
        read_factor_list(r, rule->short_factors, WEIGHT_ROPE_SHORT);
        read_factor_list(r, rule->long_factors, WEIGHT_ROPE_LONG);
    }
}

static void read_rope(config_reader *r)
{
    model_config *c = r->c;
    read_rope_kind(r);
    read_rope_numbers(r);
    if (r->status != KVB_OK) return;
    read_rope_factors(r);
    // Dynamic scaling begins at the original length: this is how far it is meant to reach.
    double reach = c->rope.original * c->rope.factor;
    if (c->rope.kind == ROPE_DYNAMIC && reach > c->context_length)
        c->context_length = (uint32_t)fmin(reach, UINT32_MAX);
    read_rope_attention(r);
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

// Finds the layers that have the window: those that the list names, else all but the last of every `period` (0: all),
// from `first` on.
static void read_bounded_layers(config_reader *r)
{
    model_config *c = r->c;
    double types[MODEL_MAX_LAYERS];
    size_t n = read_layers(r, WEIGHT_LAYER_TYPES, types);
    double first = read_number(r, WEIGHT_MAX_WINDOW_LAYERS, 0),
           period = n ? 0 : read_number(r, WEIGHT_WINDOW_PERIOD, r->f->window_period);
    for (uint32_t l = 0; l < c->n_layers; l++)
        if (n ? types[l] != 0 : l >= first && !(period >= 1 && fmod(l + 1, period) == 0)) layer_set_add(&c->bounded, l);
}

// A window as long as the trained context hides nothing and is left out, unless it decides which layers rotate.
static void read_window(config_reader *r)
{
    model_config *c = r->c;
    char name[96];
    double window = read_number(r, WEIGHT_WINDOW, 0), use = read_number(r, WEIGHT_USE_WINDOW, 1);
    if (use == 0 || window == 0 || (window >= c->context_length && !r->f->rotates_in_windows)) return;
    if (!(window >= 1) || window != floor(window))
        KEEP_ERROR(r, KVB_FORMAT, "%s: %s is %.10g, expected a whole number of positions", r->w->name,
                   weights_key_name(r->w, WEIGHT_WINDOW, name), window);
    if (!r->f->has_window)
        KEEP_ERROR(r, KVB_UNSUPPORTED,
                   "%s: a sliding window of %.10g positions, which models of the %s family do not have", r->w->name,
                   window, c->architecture);
    if (r->status != KVB_OK) return;
    c->window = window < UINT32_MAX ? (uint32_t)window : UINT32_MAX;
    read_bounded_layers(r);
    for (uint32_t l = 0; r->f->rotates_in_windows && l < c->n_layers; l++)
        if (!model_layer_bounded(c, l)) layer_set_add(&c->unrotated, l);
}

// Finds the layers that have experts: the last of every `step`, unless it is listed as dense.
static void read_sparse_layers(config_reader *r)
{
    double dense[MODEL_MAX_LAYERS], step = read_number(r, WEIGHT_EXPERT_STEP, 1);
    size_t n = 0;
    if (r->status == KVB_OK) r->status = weights_list(r->w, WEIGHT_DENSE_LAYERS, dense, MODEL_MAX_LAYERS, &n, r->err);
    for (uint32_t l = 0; l < r->c->n_layers; l++) {
        bool listed = false;
        for (size_t i = 0; i < n; i++) listed = listed || dense[i] == l;
        if (!listed && fmod(l + 1, step) == 0) layer_set_add(&r->c->sparse, l);
    }
}

static void read_experts(config_reader *r)
{
    model_config *c = r->c;
    double experts = read_number(r, WEIGHT_EXPERTS, 0), local = read_number(r, WEIGHT_LOCAL_EXPERTS, 0);
    // Mixtral's GGUF files say that they are llama's.
    if (experts > 0 && r->w->is_gguf && strcmp(c->architecture, "llama") == 0) c->switches |= EXPERTS;
    if (!(c->switches & EXPERTS)) {
        if (experts + local != 0)
            KEEP_ERROR(r, KVB_UNSUPPORTED, "%s: has %.10g experts, which models of the %s family do not have",
                       r->w->name, experts + local, c->architecture);
        return;
    }
    c->n_experts = read_size(r, local > 0 ? WEIGHT_LOCAL_EXPERTS : WEIGHT_EXPERTS, 0, MAX_EXPERTS);
    c->n_used = read_size(r, WEIGHT_EXPERTS_USED, 0, c->n_experts);
    c->expert_width = read_size(r, WEIGHT_EXPERT_WIDTH, c->ffn_width, MAX_WIDTH);
    c->experts_normed = read_number(r, WEIGHT_EXPERT_NORM, r->f->experts_normed) != 0;
    read_sparse_layers(r);
}

static void read_vocabulary(config_reader *r)
{
    weight_tensor t = {.rows = 0};
    const char *name = r->w->is_gguf ? "token_embd.weight" : "model.embed_tokens.weight";
    if (r->w->n_names == 0) {
        r->c->vocabulary = read_size(r, WEIGHT_VOCABULARY, 0, MAX_VOCABULARY);
        return;
    }
    if (!weights_find(r->w, name, &t))
        KEEP_ERROR(r, KVB_FORMAT, "%s: tensor %s is missing, expected [vocabulary, %u]", r->w->name, name, r->c->width);
    else if (t.columns != r->c->width || t.rows == 0 || t.rows > MAX_VOCABULARY)
        KEEP_ERROR(r, KVB_FORMAT, "%s: tensor %s has shape [%llu, %llu], expected [1 to %d, %u]", t.file, name,
                   (unsigned long long)t.rows, (unsigned long long)t.columns, MAX_VOCABULARY, r->c->width);
    r->c->vocabulary = (uint32_t)t.rows;
}

kvb_status model_read_config(model_config *c, const struct family **out, struct weights *w, kvb_error *err)
{
    config_reader r = {.c = c, .w = w, .err = err};
    memset(c, 0, sizeof *c);
    r.status = family_find(&r.f, w, err);
    if (r.status != KVB_OK) return r.status;
    *out = r.f;
    snprintf(c->architecture, sizeof c->architecture, "%.31s", w->architecture);
    c->switches = r.f->switches;
    c->act = r.f->act;
    c->embedding_scale = c->residual_scale = c->logit_scale = c->query_scale = 1;
    read_sizes(&r);
    if (r.status == KVB_OK) read_rope(&r);
    if (r.status == KVB_OK) read_window(&r);
    if (r.status == KVB_OK) read_experts(&r);
    read_vocabulary(&r);
    if (r.status == KVB_OK) r.status = weights_text(w, WEIGHT_NAME, c->name, sizeof c->name, err);
    if (!c->name[0]) snprintf(c->name, sizeof c->name, "%.127s", w->name);
    if (r.status == KVB_OK && r.f->read) r.f->read(&r);
    return r.status;
}
