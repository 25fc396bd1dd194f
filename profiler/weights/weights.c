#include "formats/need.h"
#include "profiler/weights/gguf.h"
#include "profiler/weights/weights_internal.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

const char *const weight_names[N_WEIGHT_KEYS][2] = {
#define WEIGHT_NAMES(name, gguf, hf) [WEIGHT_##name] = {gguf, hf},
    WEIGHT_KEYS(WEIGHT_NAMES) WEIGHT_TEXTS(WEIGHT_NAMES) WEIGHT_LISTS(WEIGHT_NAMES)
#undef WEIGHT_NAMES
};

static bool is_folder(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

// The folder that `path` is, or whose config.json it is; false for anything else.
static bool folder_of(const char *path, char *folder, size_t size)
{
    static const char config[] = "config.json";
    size_t n = strlen(path), m = sizeof config - 1;
    bool named = n >= m && strcmp(path + n - m, config) == 0 && (n == m || path[n - m - 1] == '/');
    if (!named && !is_folder(path)) return false;
    if (named) n = n > m ? n - m - 1 : 0;
    return (size_t)snprintf(folder, size, "%.*s", (int)(n ? n : 1), n ? path : ".") < size;
}

static kvb_status open_source(weights **out, const char *path, bool config_suffices, kvb_error *err)
{
    char folder[4096];
    *out = NULL;
    weights *w = need(1, sizeof *w, "models");
    snprintf(w->name, sizeof w->name, "%s", path);
    kvb_status status = folder_of(path, folder, sizeof folder) ? weights_open_folder(w, folder, config_suffices, err)
                                                               : weights_open_gguf(w, path, err);
    if (status == KVB_OK) *out = w;
    else weights_close(w);
    return status;
}

kvb_status weights_open(weights **out, const char *path, kvb_error *err)
{
    return open_source(out, path, false, err);
}

kvb_status weights_open_config(weights **out, const char *path, kvb_error *err)
{
    return open_source(out, path, true, err);
}

kvb_status weights_from_config(weights **out, const char *name, const void *config, size_t size, kvb_error *err)
{
    *out = NULL;
    weights *w = need(1, sizeof *w, "models");
    snprintf(w->name, sizeof w->name, "%s", name);
    kvb_status status = weights_parse_config(w, name, config, size, err);
    if (status == KVB_OK) *out = w;
    else weights_close(w);
    return status;
}

bool weights_has_tensors(const weights *w)
{
    return w->n_names > 0;
}

uint32_t weights_default_type(const weights *w)
{
    static const weight_key keys[] = {WEIGHT_DTYPE, WEIGHT_OLD_DTYPE};
    for (int i = 0; i < 2; i++) {
        char name[32];
        kvb_error unread;
        if (weights_text(w, keys[i], name, sizeof name, &unread) != KVB_OK || !name[0]) continue;
        return strcmp(name, "float32") == 0   ? GGUF_TENSOR_F32
               : strcmp(name, "float16") == 0 ? GGUF_TENSOR_F16
                                              : GGUF_TENSOR_BF16;
    }
    return GGUF_TENSOR_BF16;
}

uint32_t weights_layer_type(const weights *w)
{
    return w->is_fp8 ? (uint32_t)STORED_F8_E4M3 : weights_default_type(w);
}

bool weights_experts_are_mxfp4(const weights *w)
{
    return w->is_mxfp4;
}

void weights_close(weights *w)
{
    if (!w) return;
    if (w->kind) w->kind->close(w);
    for (size_t i = 0; i < w->n_names; i++) free(w->names[i].name);
    free(w->names);
    origin_free(&w->origin);
    free(w);
}

const weights_origin *weights_origin_of(const weights *w)
{
    return &w->origin;
}

const char *weights_name(const weights *w)
{
    return w->name;
}

bool weights_is_gguf(const weights *w)
{
    return w->kind == &weights_gguf;
}

const char *weights_architecture(const weights *w)
{
    return w->architecture;
}

const char *weights_key_name(const weights *w, weight_key key, char text[96])
{
    const char *name = weight_names[key][weights_is_gguf(w) ? 0 : 1];
    bool prefixed = weights_is_gguf(w) && name[0] != '/';
    snprintf(text, 96, "%s%s%s", prefixed ? w->architecture : "", prefixed ? "." : "",
             name + (name[0] == '/' || name[0] == '@' || name[0] == '~'));
    return text;
}

kvb_status weights_number(const weights *w, weight_key key, double *out, bool *found, kvb_error *err)
{
    *found = false;
    return weight_names[key][weights_is_gguf(w) ? 0 : 1][0] ? w->kind->number(w, key, out, found, err) : KVB_OK;
}

kvb_status weights_text(const weights *w, weight_key key, char *out, size_t size, kvb_error *err)
{
    out[0] = '\0';
    return weight_names[key][weights_is_gguf(w) ? 0 : 1][0] ? w->kind->text(w, key, out, size, err) : KVB_OK;
}

kvb_status weights_list(const weights *w, weight_key key, double *out, size_t max, size_t *n, kvb_error *err)
{
    *n = 0;
    return weight_names[key][weights_is_gguf(w) ? 0 : 1][0] ? w->kind->list(w, key, out, max, n, err) : KVB_OK;
}

static int name_compare(const void *a, const void *b)
{
    return strcmp(((const weight_name *)a)->name, ((const weight_name *)b)->name);
}

void weights_add_name(weights *w, const char *name, size_t file)
{
    if (w->n_names == w->max_names) {
        w->max_names = w->max_names ? 2 * w->max_names : 512;
        w->names = need_more(w->names, w->max_names, sizeof *w->names, "names of tensors");
    }
    w->names[w->n_names++] = (weight_name){need_text("%s", name), file, false};
}

kvb_status weights_sort_names(weights *w, kvb_error *err)
{
    if (w->n_names) qsort(w->names, w->n_names, sizeof *w->names, name_compare);
    for (size_t i = 1; i < w->n_names; i++)
        if (strcmp(w->names[i - 1].name, w->names[i].name) == 0)
            return kvb_fail(err, KVB_FORMAT, "%s: tensor %.100s stands in it twice; the files are damaged", w->name,
                            w->names[i].name);
    return KVB_OK;
}

bool weights_find(weights *w, const char *name, weight_tensor *out)
{
    weight_name wanted = {(char *)(uintptr_t)name, 0, false};
    weight_name *found = w->n_names ? bsearch(&wanted, w->names, w->n_names, sizeof *w->names, name_compare) : NULL;
    if (!found || !name[0]) return false;
    found->claimed = true;
    *out = (weight_tensor){.file = w->name};
    snprintf(out->name, sizeof out->name, "%s", name);
    return w->kind->tensor(w, found, out);
}

const char *weights_unclaimed(const weights *w)
{
    for (size_t i = 0; i < w->n_names; i++)
        if (!w->names[i].claimed && !w->kind->may_be_left(w->names[i].name)) return w->names[i].name;
    return NULL;
}

kvb_status weights_identify(weights *w, const weights_watch *watch, char sha256[65], kvb_error *err)
{
    weights_hashing h = {.origin = &w->origin, .watch = watch};
    origin_free(&w->origin);
    kvb_status status = sha256_begin(&h.all, err);
    if (status == KVB_OK) status = w->kind->identify(w, &h, sha256, err);
    sha256_free(h.all);
    return status;
}

// A file's hash, in pieces, after each of which the watch is told.
static kvb_status hash_pieces(weights_hashing *h, const char *name, const file_view *map, char out[65], kvb_error *err)
{
    const size_t piece = 64 << 20;
    sha256_state *one = NULL;
    kvb_status status = sha256_begin(&one, err);
    for (size_t at = 0; status == KVB_OK && at < map->size; at += piece) {
        size_t n = map->size - at < piece ? map->size - at : piece;
        status = sha256_add(one, map->data + at, n, err);
        h->done += n;
        if (status == KVB_OK && h->watch && !h->watch->hashed(h->watch->context, (double)h->done, (double)h->total))
            status = kvb_fail(err, KVB_INTERRUPTED, "%s: stopped while it was hashed", name);
    }
    if (status == KVB_OK) status = sha256_end(one, out, err);
    sha256_free(one);
    return status;
}

kvb_status weights_hash_file(weights_hashing *h, const char *name, const file_view *map, kvb_error *err)
{
    char one[65];
    kvb_status status = hash_pieces(h, name, map, one, err);
    file_forget(map);
    if (status == KVB_OK) status = sha256_add(h->all, name, strlen(name) + 1, err);
    if (status == KVB_OK) status = sha256_add(h->all, one, 64, err);
    if (status == KVB_OK) origin_add_file(h->origin, name, one);
    return status;
}

kvb_status weights_check(const weights *w, kvb_error *err)
{
    return w->kind->check(w, err);
}

void weights_forget(const weights *w)
{
    w->kind->forget(w);
}
