// Weights from a GGUF file, or from the parts of one.
#include "formats/need.h"
#include "profiler/weights/gguf.h"
#include "profiler/weights/weights_internal.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const weights_kind weights_gguf;

static const gguf_set *set_of(const weights *w)
{
    return w->source;
}

// The file that has the metadata.
static const gguf_file *file_of(const weights *w)
{
    return &set_of(w)->files[0];
}

static const gguf_value *value_of(const weights *w, weight_key key, char name[96])
{
    return gguf_find(file_of(w), weights_key_name(w, key, name));
}

static void add_names(weights *w, size_t file)
{
    const gguf_file *f = &set_of(w)->files[file];
    for (size_t i = 0; i < f->n_tensors; i++) {
        char name[128];
        snprintf(name, sizeof name, "%.*s", (int)f->tensors[i].name.size, f->tensors[i].name.data);
        weights_add_name(w, name, file);
    }
}

kvb_status weights_open_gguf(weights *w, const char *path, kvb_error *err)
{
    gguf_string architecture;
    gguf_set *set = need(1, sizeof *set, "models");
    w->source = set;
    w->kind = &weights_gguf;
    w->is_gguf = true;
    kvb_status status = gguf_set_open(set, path, err);
    if (status == KVB_OK) status = gguf_get_string(file_of(w), "general.architecture", &architecture, err);
    if (status == KVB_OK)
        snprintf(w->architecture, sizeof w->architecture, "%.*s",
                 (int)(architecture.size < 60 ? architecture.size : 60), architecture.data);
    for (size_t i = 0; status == KVB_OK && i < set->n; i++) {
        add_names(w, i);
        weights_add_file(w, set->paths[i], &set->files[i].map);
    }
    return status == KVB_OK ? weights_sort_names(w, err) : status;
}

static void close_gguf(weights *w)
{
    gguf_set_close(w->source);
    free(w->source);
}

static kvb_status number_gguf(const weights *w, weight_key key, double *out, bool *found, kvb_error *err)
{
    char name[96];
    kvb_status status = gguf_get_number(file_of(w), weights_key_name(w, key, name), out, err);
    *found = status == KVB_OK && value_of(w, key, name);
    return status;
}

static kvb_status text_gguf(const weights *w, weight_key key, char *out, size_t size, kvb_error *err)
{
    char name[96];
    gguf_string text;
    if (!value_of(w, key, name)) return KVB_OK;
    kvb_status status = gguf_get_string(file_of(w), name, &text, err);
    if (status == KVB_OK) snprintf(out, size, "%.*s", (int)(text.size < size ? text.size : size - 1), text.data);
    return status;
}

static kvb_status list_gguf(const weights *w, weight_key key, double *out, size_t max, size_t *n, kvb_error *err)
{
    char name[96];
    const gguf_value *v = value_of(w, key, name);
    if (!v || (key == WEIGHT_LAYER_TYPES && v->type != GGUF_VALUE_ARRAY)) return KVB_OK; // a window period
    if (v->type != GGUF_VALUE_ARRAY || v->count > max)
        return kvb_fail(err, KVB_FORMAT, "%s: %s: expected a list of at most %zu numbers", w->name, name, max);
    const gguf_array list = {v->element, v->count, v->data, v->size};
    for (*n = 0; *n < v->count; ++*n)
        out[*n] = v->element == GGUF_VALUE_BOOL ? v->data[*n] != 0 : (double)gguf_array_int(&list, *n);
    return KVB_OK;
}

static bool tensor_gguf(const weights *w, const weight_name *name, weight_tensor *out)
{
    const gguf_tensor *t = gguf_tensor_find(&set_of(w)->files[name->file], name->name);
    uint32_t values = 1, bytes = 0;
    if (!t) return false;
    gguf_tensor_type_block(t->type, &values, &bytes);
    out->file = set_of(w)->paths[name->file];
    out->type = t->type;
    snprintf(out->type_name, sizeof out->type_name, "%s", gguf_tensor_type_name(t->type));
    out->n_dims = t->n_dims;
    out->columns = t->dims[0];
    out->rows = t->n_values / t->dims[0];
    out->data = t->data;
    out->row_bytes = (size_t)(t->dims[0] / values * bytes);
    return true;
}

// Reads where the weights came from, which converters write as a name or an address.
static void read_source(const weights *w, char id[200])
{
    static const char *const keys[] = {"general.source.huggingface.repository", "general.source.repo_url",
                                       "general.source.url"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys && !id[0]; i++) {
        gguf_string text;
        char value[200];
        if (!gguf_find(file_of(w), keys[i]) || gguf_get_string(file_of(w), keys[i], &text, NULL) != KVB_OK) continue;
        snprintf(value, sizeof value, "%.*s", (int)(text.size < sizeof value ? text.size : sizeof value - 1),
                 text.data);
        if (origin_is_id(value)) memcpy(id, value, sizeof value);
        else origin_from_url(id, value);
    }
}

static char *describe_gguf(const weights *w, weights_origin *origin)
{
    char folder[sizeof w->name];
    const char *first = set_of(w)->paths[0], *slash = strrchr(first, '/');
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - first) + 1 : 1, slash ? first : ".");
    origin->container = "gguf";
    origin_of_folder(origin, folder, slash ? slash + 1 : first);
    read_source(w, origin->hf_id);
    return NULL;
}

const gguf_file *weights_gguf_file(const weights *w)
{
    return w->is_gguf ? file_of(w) : NULL;
}

static const weights_kind weights_gguf = {close_gguf,  number_gguf, text_gguf,    list_gguf,
                                          tensor_gguf, NULL,        describe_gguf};
