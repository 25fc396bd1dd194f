#include "evaluator/allocator.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "profiler/metric/spec.h"
#include "runtime/allocate.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct allocator_row {
    spec_row spec; // parameters are fields of the allocator itself
    allocator_kind kind;
} allocator_row;

#define BETA SPEC(allocator, beta, 20, 1, 1e6, "first layer's budget against the last one's")
#define WINDOW SPEC(allocator, window, 8, 0, 65536, "tokens that every head keeps")
#define ALPHA                                                                               \
    {                                                                                       \
        SPEC(allocator, alpha, 0.2, 0, 1, "share that every head keeps of its even budget") \
    }

#define BITS(which) SPEC(allocator, which, 4, 2, 16, "bits of a number: 16, 8, 4 or 2")

#define TAU(which) SPEC(allocator, which, 1, 0.05, 100, "the exponent is 1 divided by this")

static const allocator_row ROWS[] = {
    {{.name = "uniform"}, ALLOCATOR_UNIFORM},
    {{.name = "pyramid", .parameters = {BETA, WINDOW}}, ALLOCATOR_PYRAMID},
    {{.name = "ada", .parameters = ALPHA}, ALLOCATOR_ADA},
    {{.name = "ada-original", .parameters = ALPHA}, ALLOCATOR_ADA_ORIGINAL},
    {{.name = "ada-global", .parameters = ALPHA}, ALLOCATOR_ADA_GLOBAL},
    {{.name = "lava"}, ALLOCATOR_LAVA},
    {{.name = "cake", .parameters = {TAU(tau1), TAU(tau2)}}, ALLOCATOR_CAKE},
    {{.name = "packed", .parameters = {BITS(keys), BITS(values)}}, ALLOCATOR_PACKED},
    {{.name = "oracle"}, ALLOCATOR_ORACLE},
};

static const spec_row *allocator_spec(size_t i)
{
    return i < sizeof ROWS / sizeof *ROWS ? &ROWS[i].spec : NULL;
}

static const spec_list ALLOCATORS = {"allocator", allocator_spec, NULL};

// Writes the kind and all its parameters, by which logs tell results apart.
static void write_identity(allocator *a, const char *name)
{
    char beta[SPEC_NUMBER_MAX], alpha[SPEC_NUMBER_MAX];
    spec_number(beta, sizeof beta, a->beta);
    spec_number(alpha, sizeof alpha, a->alpha);
    snprintf(a->identity, sizeof a->identity, "%s beta=%s alpha=%s window=%u ", name, beta, alpha, a->window);
    if (a->kind == ALLOCATOR_PACKED)
        snprintf(a->identity, sizeof a->identity, "%s keys=%u values=%u", name, a->keys, a->values);
    if (a->kind != ALLOCATOR_CAKE) return;
    spec_number(beta, sizeof beta, a->tau1);
    spec_number(alpha, sizeof alpha, a->tau2);
    snprintf(a->identity, sizeof a->identity, "%s tau1=%s tau2=%s", name, beta, alpha);
}

// Returns the packing of so many bits per number, or KVB_PACKINGS if there is none.
static kvb_packing packing_of(uint32_t bits)
{
    kvb_packing p = KVB_PACK_BF16;
    while (p < KVB_PACKINGS && 16u >> p != bits) p++;
    return p;
}

kvb_status allocator_parse(allocator *out, const char *text, kvb_error *err)
{
    size_t row;
    *out = (allocator){.beta = 20, .alpha = 0.2, .window = 8}; // for every kind: identities name all three
    kvb_status status = spec_read(&ALLOCATORS, text, 0, strlen(text), &row, out, err);
    if (status != KVB_OK) return status;
    out->kind = ROWS[row].kind;
    if (out->kind == ALLOCATOR_PACKED &&
        (packing_of(out->keys) == KVB_PACKINGS || packing_of(out->values) == KVB_PACKINGS))
        return kvb_fail(err, KVB_ARGUMENT, "allocator '%.200s': expected keys and values of 16, 8, 4 or 2 bits", text);
    write_identity(out, ROWS[row].spec.name);
    return spec_write_all(out->label, sizeof out->label, &ALLOCATORS, &ROWS[row].spec, out, err);
}

static void append_label(allocator *a, const char *prefix, const char *text)
{
    size_t used = strlen(a->label);
    snprintf(a->label + used, sizeof a->label - used, "%s%s", prefix, text);
}

// Labels a table "lukv" for the published way to solve, "kvbudget" for `solve`'s default, and adds what differs.
static void name_table(allocator *a)
{
    const kvb_info *info = kvb_table_info(a->table);
    const char *solver = kvb_table_metadata(a->table, "solver"), *order = kvb_table_metadata(a->table, "order"),
               *shrink = kvb_table_metadata(a->table, "shrink"), *loss = kvb_table_metadata(a->table, "loss");
    double pulled = shrink ? strtod(shrink, NULL) : 0;
    bool output = loss && strcmp(loss, "output") == 0,
         usual = strcmp(info->aggregate, "mean_loss") == 0 &&
                 (fabs(pulled - 0.1) < 1e-9 || (output && pulled == 0)); // 0: with formats
    append_label(a, "", usual ? "kvbudget" : "lukv");
    if (output) append_label(a, "-", "output");
    if (strcmp(info->scope, "global") != 0) append_label(a, "-", info->scope);
    if (!usual && strcmp(info->aggregate, "mean_ratio") != 0) append_label(a, "-", info->aggregate);
    if (!usual && pulled != 0) {
        char text[24];
        snprintf(text, sizeof text, "%g", pulled);
        append_label(a, "-shrink", text);
    }
    if (strcmp(info->hull, "feasible") != 0) append_label(a, "-", info->hull);
    if (solver) append_label(a, "-", solver);
    if (order && strcmp(order, "metric") != 0) append_label(a, "-", "no_gap");
    if (kvb_table_metadata(a->table, "refined")) append_label(a, "-", "refined");
}

// Returns the path in `LABEL=FILE:strict`, which the caller frees; *label is the length of the label, 0 for none. The
// '=' belongs to the path if a '/' or '.' comes before it, or if a file of the whole name exists.
static char *table_path(const char *text, size_t *label, bool *strict)
{
    static const char STRICT[] = ":strict";
    size_t length = strlen(text), end = sizeof STRICT - 1;
    *strict = length > end && strcmp(text + length - end, STRICT) == 0;
    char *path = need_text("%.*s", (int)(length - (*strict ? end : 0)), text), *equals = strchr(path, '=');
    *label = equals && strcspn(path, "/.") > (size_t)(equals - path) ? (size_t)(equals - path) : 0;
    if (*label >= sizeof((allocator *)0)->label || access(path, F_OK) == 0) *label = 0;
    if (*label) memmove(path, equals + 1, strlen(equals));
    return path;
}

kvb_status allocator_open_table(allocator *out, const char *text, kvb_error *err)
{
    size_t label;
    char hash[65] = "";
    *out = (allocator){.kind = ALLOCATOR_TABLE};
    out->path = table_path(text, &label, &out->strict);
    kvb_status status = kvb_table_open(&out->table, out->path, NULL, err);
    if (status == KVB_OK) status = sha256_file_hex(out->path, hash, err);
    if (status != KVB_OK) return status;
    if (label) snprintf(out->label, sizeof out->label, "%.*s", (int)label, text);
    else name_table(out);
    if (!label && out->strict) append_label(out, "-", "strict");
    snprintf(out->identity, sizeof out->identity, "table %s%s", hash, out->strict ? " strict" : "");
    return KVB_OK;
}

void allocator_free(allocator *a)
{
    kvb_table_close(a->table);
    free(a->path);
    *a = (allocator){0};
}

bool allocator_needs_scores(const allocator *a)
{
    return a->kind == ALLOCATOR_ADA || a->kind == ALLOCATOR_ADA_ORIGINAL || a->kind == ALLOCATOR_ADA_GLOBAL ||
           a->kind == ALLOCATOR_ORACLE || allocator_needs_attention(a);
}

bool allocator_needs_attention(const allocator *a)
{
    return a->kind == ALLOCATOR_LAVA || a->kind == ALLOCATOR_CAKE;
}

bool allocator_has_formats(const allocator *a)
{
    return a->kind == ALLOCATOR_PACKED || (a->kind == ALLOCATOR_TABLE && kvb_table_has_formats(a->table));
}

kvb_status allocator_formats(const allocator *a, const allocator_shape *shape, double ratio, uint8_t **formats,
                             kvb_error *err)
{
    size_t n = (size_t)shape->n_layers * shape->n_kv_heads * 2;
    *formats = allocator_has_formats(a) ? need(n, 1, "formats") : NULL;
    if (*formats && a->kind == ALLOCATOR_TABLE) return kvb_formats(a->table, ratio, *formats, n, err);
    for (size_t i = 0; *formats && i < n; i++)
        if (!layer_set_has(shape->bounded, (uint32_t)(i / 2 / shape->n_kv_heads)))
            (*formats)[i] = (uint8_t)packing_of(i % 2 ? a->values : a->keys);
    return KVB_OK;
}

// CAKE: layers by dispersion and shift, heads of a layer alike. LAVa: layers by entropy, heads by LAVa's own scores.
static void allocate_attended(const allocator *a, const allocate_shape *s, double ratio, const window_attention *seen,
                              uint32_t sink, uint32_t window, uint32_t *keep)
{
    double *weight = need(s->n_layers, sizeof *weight, "layers");
    bool lava = a->kind == ALLOCATOR_LAVA;
    for (uint32_t l = 0; l < s->n_layers; l++)
        weight[l] = lava ? seen->entropy[l] : pow(seen->dispersion[l], 1 / a->tau1) * pow(seen->shift[l], 1 / a->tau2);
    allocate_layers(s, ratio, weight, lava ? seen->score : NULL, sink, window, keep);
    free(weight);
}

// Every head keeps the most tokens (at least one) that pack into the bytes of (1 - ratio) T tokens in bfloat16.
static void allocate_packed(const allocator *a, const allocate_shape *s, double ratio, uint32_t head_dim,
                            uint32_t *keep)
{
    kvb_packing k = packing_of(a->keys), v = packing_of(a->values);
    double most = (1 - ratio) * s->n_tokens * 4 * head_dim;
    uint32_t n = s->n_tokens;
    while (n > 1 &&
           (double)kvb_packed_bytes(k, KVB_KEYS, n, head_dim) + (double)kvb_packed_bytes(v, KVB_VALUES, n, head_dim) >
               most)
        n--;
    for (size_t h = 0; h < (size_t)s->n_layers * s->n_kv_heads; h++) keep[h] = n;
}

// allocator_budgets() when no layer is bounded, and for tables.
static kvb_status allocate_all(const allocator *a, const allocator_shape *shape, double ratio, uint32_t n_tokens,
                               const float *scores, const window_attention *attention, uint32_t sink, uint32_t window,
                               uint32_t *keep, kvb_error *err)
{
    static const ada_form forms[] = {
        [ALLOCATOR_ADA_ORIGINAL] = ADA_ORIGINAL, [ALLOCATOR_ADA_GLOBAL] = ADA_GLOBAL, [ALLOCATOR_ORACLE] = ADA_GLOBAL};
    allocate_shape s = {shape->n_layers, shape->n_kv_heads, n_tokens};
    size_t heads = (size_t)s.n_layers * s.n_kv_heads;
    for (size_t h = 0; h < heads; h++) keep[h] = n_tokens;
    if (!(ratio < 1)) return kvb_fail(err, KVB_ARGUMENT, "ratio %g: expected a pruned share below 1", ratio);
    if (ratio <= 0) return KVB_OK;
    switch (a->kind) {
    case ALLOCATOR_UNIFORM:
        allocate_uniform(&s, ratio, keep);
        break;
    case ALLOCATOR_PYRAMID:
        allocate_pyramid(&s, ratio, a->beta, a->window, keep);
        break;
    case ALLOCATOR_ADA:
    case ALLOCATOR_ADA_ORIGINAL:
    case ALLOCATOR_ADA_GLOBAL:
    case ALLOCATOR_ORACLE: // a token's gain is its importance: the best tokens of all heads are the optimum
        allocate_ada(&s, ratio, a->kind == ALLOCATOR_ORACLE ? 0 : a->alpha, scores, sink, window, forms[a->kind], keep);
        break;
    case ALLOCATOR_LAVA:
    case ALLOCATOR_CAKE:
        allocate_attended(a, &s, ratio, attention, sink, window, keep);
        break;
    case ALLOCATOR_PACKED:
        allocate_packed(a, &s, ratio, shape->head_dim, keep);
        return KVB_OK;
    case ALLOCATOR_TABLE:
        return kvb_budgets(a->table, ratio, n_tokens,
                           &(kvb_budget_options){.strict = a->strict, .lookup = KVB_LOOKUP_LINEAR}, keep, heads, err);
    }
    // Rounding costs the methods up to a token per head, but they are to be compared at the same total.
    allocate_level(&s, (uint64_t)rint((1 - ratio) * (double)heads * n_tokens), 1, keep);
    return KVB_OK;
}

// Copies the layers of values [L, row] that are not bounded, one after the other. The caller frees the copy.
static float *budgeted_layers(const allocator_shape *shape, const float *values, size_t row)
{
    float *out = need(shape->n_layers * row, sizeof *out, "scores"), *to = out;
    for (uint32_t l = 0; l < shape->n_layers; l++) {
        if (layer_set_has(shape->bounded, l)) continue;
        memcpy(to, values + l * row, row * sizeof *to);
        to += row;
    }
    return out;
}

// Moves the budgets of `from` layers from the front of values [L, G] to their places. Bounded layers get `bounded`.
static void spread_layers(const allocator_shape *shape, uint32_t from, uint32_t bounded, uint32_t *values)
{
    size_t heads = shape->n_kv_heads;
    for (uint32_t l = shape->n_layers; l-- > 0;) {
        bool out = layer_set_has(shape->bounded, l);
        if (!out) memmove(values + l * heads, values + --from * heads, heads * sizeof *values);
        for (size_t g = 0; out && g < heads; g++) values[l * heads + g] = bounded;
    }
}

kvb_status allocator_budgets(const allocator *a, const allocator_shape *shape, double ratio, uint32_t n_tokens,
                             const float *scores, const window_attention *attention, uint32_t sink, uint32_t window,
                             uint32_t *keep, kvb_error *err)
{
    allocator_shape part = {.n_kv_heads = shape->n_kv_heads, .head_dim = shape->head_dim};
    for (uint32_t l = 0; shape->bounded && l < shape->n_layers; l++) part.n_layers += !layer_set_has(shape->bounded, l);
    if (!shape->bounded || part.n_layers == shape->n_layers || a->kind == ALLOCATOR_TABLE) // tables know the layers
        return allocate_all(a, shape, ratio, n_tokens, scores, attention, sink, window, keep, err);
    float *some = scores ? budgeted_layers(shape, scores, (size_t)shape->n_kv_heads * n_tokens) : NULL;
    kvb_status status = allocate_all(a, &part, ratio, n_tokens, some, attention, sink, window, keep, err);
    free(some);
    if (status == KVB_OK) spread_layers(shape, part.n_layers, n_tokens, keep);
    return status;
}
