#include "formats/curves_file.h"
#include "formats/file_read.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "formats/npy.h"
#include "runtime/fail.h"
#include "runtime/safetensors.h"
#include "runtime/text.h"
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

// Loads a tensor's numbers, which the caller frees; dims [4] is its shape after leading ones.
static kvb_status load_numbers(double **out, uint64_t *dims, const kvb_safetensors *file, const char *tensor,
                               const char *shape, kvb_error *err)
{
    static const char *const dtypes[] = {"F32", "F64", "I32", "I64"}; // in the order of npy_type
    const kvb_tensor *t = kvb_safetensors_find(file, tensor);
    npy_array a = {.type = NPY_F32};
    while (t && a.type <= NPY_I64 && strcmp(t->dtype, dtypes[a.type]) != 0) a.type++;
    if (!t || a.type > NPY_I64 || t->n_dims > 4)
        return kvb_fail(err, KVB_FORMAT, "%s: expected a tensor \"%s\" %s of F32, F64, I32 or I64, found %s",
                        file->name, tensor, shape, t ? "others" : "none");
    for (uint32_t d = 0; d < 4; d++) dims[d] = d + t->n_dims < 4 ? 1 : t->shape[d + t->n_dims - 4];
    a.count = t->size / npy_type_size(a.type);
    a.data = t->data;
    *out = need(a.count, sizeof **out, "numbers of a tensor"); // no more than the file holds
    return npy_to_f64(&a, *out, file->name, err);
}

static kvb_status read_about(curves_file *c, const kvb_safetensors *file, kvb_error *err)
{
    const char *method = kvb_safetensors_metadata(file->header, "method");
    const char *const keys[] = {"n_tokens", "sink", "window"};
    uint32_t *const counts[] = {&c->n_tokens, &c->sink, &c->window};
    if (!method || !metric_name_valid(method))
        return kvb_fail(err, KVB_FORMAT, "%s: metadata \"method\": expected a name, " METRIC_NAME_RULE, file->name);
    snprintf(c->method, sizeof c->method, "%s", method);
    for (int i = 0; i < 3; i++) {
        const char *text = kvb_safetensors_metadata(file->header, keys[i]);
        uint64_t value = 0;
        if (text ? !kvb_read_digits(&text, 1U << 30, &value) || *text : i == 0)
            return kvb_fail(err, KVB_FORMAT, "%s: metadata \"%s\": expected a whole number", file->name, keys[i]);
        *counts[i] = (uint32_t)value;
    }
    if (c->sink + c->window < c->n_tokens) return KVB_OK;
    return kvb_fail(err, KVB_FORMAT, "%s: sink %u and window %u leave nothing of %u tokens to choose", file->name,
                    c->sink, c->window, c->n_tokens);
}

static kvb_status check_budgets(const curves_file *c, const char *name, kvb_error *err)
{
    double least = fmax(rint((1.0 - 0.99) * c->n_tokens), c->sink + c->window), last = -1; // the solver's floor
    for (uint32_t b = 0; b < c->n_budgets; last = c->kept[b++])
        if (!(c->kept[b] > last && c->kept[b] <= (b ? c->n_tokens : least)) || c->kept[b] != floor(c->kept[b]))
            return kvb_fail(err, KVB_FORMAT,
                            "%s: kept: expected ascending tokens up to %u, of which the first is at most %g (1 %%, or "
                            "sink + window: the fewest that a head gets), found %g as number %u",
                            name, c->n_tokens, least, c->kept[b], b);
    return KVB_OK;
}

static kvb_status check_losses(const curves_file *c, const char *name, kvb_error *err)
{
    size_t heads = (size_t)c->n_layers * c->n_kv_heads, B = c->n_budgets;
    for (size_t i = 0; i < c->n_contexts * heads * B; i++) {
        bool last = i % B + 1 == B;
        double loss = c->loss[i], kept = c->kept[i % B], next = last ? 0 : c->loss[i + 1];
        if (loss >= next && loss <= (double)FLT_MAX && (loss == 0 || kept < c->n_tokens)) continue;
        return kvb_fail(err, KVB_NUMERIC,
                        "%s: loss of context %zu, layer %zu, KV head %zu: %g with %g tokens and %g with %g; expected "
                        "finite losses that never rise (numpy.minimum.accumulate(loss, -1)), 0 with all tokens",
                        name, i / B / heads, i / B / c->n_kv_heads % c->n_layers, i / B % c->n_kv_heads, loss, kept,
                        next, last ? c->n_tokens : c->kept[i % B + 1]);
    }
    return KVB_OK;
}

kvb_status curves_parse(curves_file *out, const void *data, size_t size, const char *name, kvb_error *err)
{
    kvb_safetensors file;
    uint64_t n[4], budgets[4];
    *out = (curves_file){0};
    kvb_status status = kvb_safetensors_parse(&file, data, size, name, err);
    if (status != KVB_OK) return status;
    status = read_about(out, &file, err);
    if (status == KVB_OK)
        status = load_numbers(&out->loss, n, &file, "loss", "[contexts, layers, KV heads, budgets]", err);
    if (status == KVB_OK) status = load_numbers(&out->kept, budgets, &file, "kept", "[budgets]", err);
    for (int d = 0; d < 4 && status == KVB_OK; d++)
        if (n[d] == 0 || n[d] >> 30 || budgets[d] != (d < 3 ? 1 : n[3]) || n[2] * out->n_tokens >> 30)
            status = kvb_fail(err, KVB_FORMAT,
                              "%s: expected loss [contexts, layers, KV heads, budgets] and kept [budgets], each below "
                              "2^30, and KV heads x n_tokens too",
                              name);
    if (status == KVB_OK) {
        out->n_contexts = (uint32_t)n[0];
        out->n_layers = (uint32_t)n[1];
        out->n_kv_heads = (uint32_t)n[2];
        out->n_budgets = (uint32_t)n[3];
        status = check_budgets(out, name, err);
    }
    if (status == KVB_OK) status = check_losses(out, name, err);
    kvb_safetensors_free(&file);
    if (status != KVB_OK) curves_free(out);
    return status;
}

void curves_free(curves_file *c)
{
    free_all(c->kept, c->loss);
    *c = (curves_file){0};
}

void curves_importance(const curves_file *c, uint32_t context, float *out)
{
    size_t heads = (size_t)c->n_layers * c->n_kv_heads, T = c->n_tokens, B = c->n_budgets;
    memset(out, 0, heads * T * sizeof *out);
    for (size_t i = 0; i < heads * B; i++) {
        const double *loss = c->loss + context * heads * B + i, *kept = c->kept + i % B;
        bool last = i % B + 1 == B;
        size_t n = (size_t)fmax(kept[0], c->sink + c->window), end = last ? T : (size_t)kept[1];
        // The protected tokens come first, so a head keeps the token at position `sink` as number sink + window.
        for (; n < end; n++)
            out[i / B * T + n - c->window] = (float)((loss[0] - (last ? 0 : loss[1])) / ((double)end - kept[0]));
    }
}

static kvb_status put_contexts(const curves_file *c, record_writer *w, kvb_error *err)
{
    size_t T = c->n_tokens, n = (size_t)c->n_layers * c->n_kv_heads * T;
    float *scores = need(n, sizeof *scores, "scores"), *oracle = need(n, sizeof *oracle, "importances");
    const char *method = c->method, **ids = need(c->n_contexts, sizeof *ids, "contexts");
    char(*names)[12] = need(c->n_contexts, sizeof *names, "names of contexts");
    int32_t *unknown = need(T, sizeof *unknown, "token ids");
    kvb_status status = KVB_OK;
    memset(unknown, -1, T * sizeof *unknown);
    for (size_t i = 0; i < n; i++) scores[i] = -(float)(i % T);
    for (uint32_t k = 0; k < c->n_contexts && status == KVB_OK; k++) {
        const record_question q = {.oracle = oracle, .n_queries = 1};
        snprintf(names[k], sizeof *names, "%u", k);
        ids[k] = names[k];
        curves_importance(c, k, oracle);
        status = record_put_context(w, ids[k], unknown, c->n_tokens, &method, (const float *[]){scores}, 1, err);
        if (status == KVB_OK) status = record_put_question(w, ids[k], 0, &q, err);
    }
    if (status == KVB_OK) status = record_finish(w, ids, c->n_contexts, err);
    free_all(names, ids, unknown, oracle, scores);
    return status;
}

kvb_status curves_import(const char *path, const char *record_path, const lukv_steps_options *options, kvb_error *err)
{
    file_view view;
    curves_file c = {0};
    record_writer *w = NULL;
    kvb_status status = file_map(&view, path, err);
    if (status == KVB_OK) status = curves_parse(&c, view.data, view.size, path, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    file_unmap(&view);
    if (status == KVB_OK) {
        const record_shape shape = {c.n_layers, options->n_heads, c.n_kv_heads, options->head_dim};
        cJSON *metrics = cJSON_CreateObject(),
              *attributes = options->attributes ? cJSON_Duplicate(options->attributes, true) : cJSON_CreateObject();
        json_put(cJSON_AddObjectToObject(metrics, c.method), "protect_sink %u protect_window %u", c.sink, c.window);
        char *text = cJSON_PrintUnformatted(metrics);
        json_put(attributes, "imported_from %s metrics %s", "curves", text);
        status = record_begin(&w, record_path, &shape, attributes, options->start, err);
        if (status == KVB_OK) status = put_contexts(&c, w, err);
        cJSON_free(text);
        cJSON_Delete(metrics);
        cJSON_Delete(attributes);
    }
    record_writer_free(w);
    curves_free(&c);
    return status;
}
