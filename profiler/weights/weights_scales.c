// FP8 weights of folders: what config.json says of them (quantization_config), and the scales beside each tensor. Two
// forms are published: quant_method fp8 (Qwen3, DeepSeek: blocks; Ministral 3: one scale per tensor) and
// compressed-tensors' float-quantized (one per tensor, row or block). Both mean weight = stored value * scale, also
// where the scale's name ends in _inv. Activations and caches, which an engine may quantise as well, are not.
#include "profiler/weights/dequant.h"
#include "profiler/weights/weights_internal.h"
#include "runtime/fail.h"
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MOST_BLOCK = 1 << 20 };

// ---- The config ----

static const cJSON *member(const cJSON *object, const char *name)
{
    return cJSON_GetObjectItemCaseSensitive(object, name);
}

static const char *text_of(const cJSON *object, const char *name)
{
    const cJSON *item = member(object, name);
    return cJSON_IsString(item) ? item->valuestring : "missing";
}

// The two sizes of a block, or null: none.
static kvb_status read_block(weights *w, const cJSON *block, const char *name, const char *folder, kvb_error *err)
{
    uint32_t sizes[2] = {0, 0};
    bool ok = cJSON_IsArray(block) && cJSON_GetArraySize(block) == 2;
    if (!block || cJSON_IsNull(block)) return KVB_OK;
    for (int i = 0; ok && i < 2; i++) {
        double size = cJSON_GetNumberValue(cJSON_GetArrayItem(block, i));
        ok = size >= 1 && size <= MOST_BLOCK && size == floor(size);
        if (ok) sizes[i] = (uint32_t)size;
    }
    if (ok && w->block[0] && memcmp(sizes, w->block, sizeof sizes) != 0) ok = false;
    if (!ok)
        return kvb_fail(
            err, KVB_FORMAT,
            "%s/config.json: quantization_config: %s: expected rows and columns of a block, the same for all", folder,
            name);
    memcpy(w->block, sizes, sizeof sizes);
    return KVB_OK;
}

// Groups of compressed-tensors: each says how its layers' weights are stored.
static kvb_status read_groups(weights *w, const cJSON *q, const char *folder, kvb_error *err)
{
    const cJSON *groups = member(q, "config_groups"), *group;
    kvb_status status = KVB_OK;
    if (strcmp(text_of(q, "format"), "float-quantized") != 0)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s/config.json: quantization_config: format is '%s', expected float-quantized; get the model "
                        "unquantised or as GGUF",
                        folder, text_of(q, "format"));
    cJSON_ArrayForEach(group, groups)
    {
        const cJSON *of = member(group, "weights");
        if (status != KVB_OK) break;
        if (cJSON_GetNumberValue(member(of, "num_bits")) != 8 || strcmp(text_of(of, "type"), "float") != 0)
            status = kvb_fail(err, KVB_UNSUPPORTED,
                              "%s/config.json: quantization_config: %s: expected weights of type float and 8 bits; get "
                              "the model unquantised or as GGUF",
                              folder, group->string ? group->string : "config_groups");
        else status = read_block(w, member(of, "block_structure"), "block_structure", folder, err);
    }
    return status;
}

kvb_status weights_read_quantisation(weights *w, const cJSON *config, const char *folder, kvb_error *err)
{
    const cJSON *q = member(config, "quantization_config");
    if (!q || cJSON_IsNull(q)) return KVB_OK;
    const char *method = text_of(q, "quant_method");
    w->is_mxfp4 = strcmp(method, "mxfp4") == 0; // gpt-oss
    w->is_fp8 = !w->is_mxfp4;
    if (w->is_mxfp4) return KVB_OK;
    if (strcmp(method, "fp8") == 0)
        return read_block(w, member(q, "weight_block_size"), "weight_block_size", folder, err);
    if (strcmp(method, "compressed-tensors") == 0) return read_groups(w, q, folder, err);
    return kvb_fail(err, KVB_UNSUPPORTED,
                    "%s/config.json: quantization_config: quant_method is '%s', expected fp8, compressed-tensors or "
                    "mxfp4; get the model unquantised or as GGUF",
                    folder, method);
}

// ---- The scales ----

// How much of the tensor shares a scale: what the config says; else all of it, or a row, by how many there are.
static kvb_status find_block(const weights *w, weight_tensor *t, const weight_tensor *s, kvb_error *err)
{
    uint64_t n = s->rows * s->columns;
    bool blocks = w->block[0] != 0;
    t->scales.rows = blocks ? w->block[0] : n == 1 ? (uint32_t)t->rows : 1;
    t->scales.columns = blocks ? w->block[1] : (uint32_t)t->columns;
    uint64_t down = (t->rows + t->scales.rows - 1) / t->scales.rows,
             across = (t->columns + t->scales.columns - 1) / t->scales.columns;
    bool in_line = across == 1 && s->n_dims <= 1 && n == down; // [rows] is as good as [rows, 1]
    if (s->n_dims <= 2 && (in_line || (s->rows == down && s->columns == across))) return KVB_OK;
    return kvb_fail(err, KVB_FORMAT, "%s: tensor %s has shape [%llu, %llu], expected [%llu, %llu]%s", s->file, s->name,
                    (unsigned long long)s->rows, (unsigned long long)s->columns, (unsigned long long)down,
                    (unsigned long long)across, blocks ? "" : " or one value");
}

static kvb_status check_values(const weight_tensor *s, size_t each, kvb_error *err)
{
    uint64_t n = s->rows * s->columns;
    for (uint64_t i = 0; i < n; i++) {
        float scale = NAN;
        kvb_status status = dequant_rows(s->type, s->data + i * each, 1, &scale, err);
        if (status != KVB_OK) return status;
        if (!isfinite(scale))
            return kvb_fail(err, KVB_NUMERIC, "%s: tensor %s: scale %llu of %llu is not finite; the file is damaged",
                            s->file, s->name, (unsigned long long)i, (unsigned long long)n);
    }
    return KVB_OK;
}

kvb_status weights_find_scales(weights *w, weight_tensor *t, kvb_error *err)
{
    static const char *const endings[] = {"_scale_inv", "_scale"};
    weight_tensor s = {.n_dims = 0};
    bool found = false;
    for (int i = 0; i < 2 && !found; i++) {
        char name[160];
        snprintf(name, sizeof name, "%s%s", t->name, endings[i]);
        found = weights_find(w, name, &s);
    }
    if (!found)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: tensor %s is FP8 and has no scales, expected a tensor %s_scale_inv or %s_scale", t->file,
                        t->name, t->name, t->name);
    if (s.type != GGUF_TENSOR_F32 && s.type != GGUF_TENSOR_F16 && s.type != GGUF_TENSOR_BF16)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: tensor %s: scales of type %s, expected F32, F16 or BF16", s.file,
                        s.name, s.type_name);
    uint32_t values, bytes;
    stored_type_block(s.type, &values, &bytes);
    kvb_status status = find_block(w, t, &s, err);
    if (status == KVB_OK) status = check_values(&s, bytes, err);
    t->scales.type = s.type;
    t->scales.data = s.data;
    return status;
}
