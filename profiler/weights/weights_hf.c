// Weights from a folder as Hugging Face writes it: config.json and safetensors, one file or several with an index.
#include "formats/need.h"
#include "profiler/weights/gguf.h"
#include "profiler/weights/weights_internal.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include "runtime/safetensors.h"
#include "runtime/text.h"
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// ---- The index ----

// Accepts only plain names of files in the folder: an index must not lead anywhere else.
static bool plain_name(const char *name)
{
    return name[0] && name[0] != '.' && strlen(name) < 256 && !strchr(name, '/');
}

static bool index_has_file(const weights_index *x, const char *file)
{
    for (size_t i = x->n_files; i > 0; i--) // mostly the last one
        if (strcmp(x->files[i - 1], file) == 0) return true;
    return false;
}

static kvb_status index_add_file(weights_index *x, const cJSON *tensor, const char *name, kvb_error *err)
{
    if (!cJSON_IsString(tensor))
        return kvb_fail(err, KVB_FORMAT, "%s: tensor %.80s: expected a file's name", name, tensor->string);
    const char *file = tensor->valuestring;
    if (!plain_name(file))
        return kvb_fail(err, KVB_FORMAT, "%s: tensor %.80s: names the file '%.80s', expected a file of the folder",
                        name, tensor->string, file);
    if (index_has_file(x, file)) return KVB_OK;
    x->files = need_more(x->files, x->n_files + 1, sizeof *x->files, "files of weights");
    x->files[x->n_files++] = file;
    return KVB_OK;
}

kvb_status weights_index_parse(weights_index *out, const void *data, size_t size, const char *name, kvb_error *err)
{
    *out = (weights_index){0};
    kvb_status status = kvb_json_object(&out->all, data, size, name, "the index", err);
    out->map = cJSON_GetObjectItemCaseSensitive(out->all, "weight_map");
    if (status == KVB_OK && (!cJSON_IsObject(out->map) || !out->map->child))
        status = kvb_fail(err, KVB_FORMAT, "%s: expected an object weight_map with tensors", name);
    const cJSON *tensor;
    cJSON_ArrayForEach(tensor, out->map) if (status == KVB_OK) status = index_add_file(out, tensor, name, err);
    if (status != KVB_OK) weights_index_free(out);
    return status;
}

void weights_index_free(weights_index *x)
{
    free(x->files);
    cJSON_Delete(x->all);
    *x = (weights_index){0};
}

// ---- The folder ----

typedef struct shard {
    char *name; // in the folder
    char *path; // for messages too
    file_view map;
    kvb_safetensors tensors;
} shard;

typedef struct folder {
    char *path;
    cJSON *config;      // of the whole file
    const cJSON *model; // its text_config if there is one, else the whole config
    cJSON *generation;  // generation_config.json; NULL: there is none
    shard *shards;
    size_t n_shards;
} folder;

static const folder *folder_of(const weights *w)
{
    return w->source;
}

static char *join_path(const char *path, const char *name)
{
    return need_text("%s/%s", path, name);
}

// Returns a member, or NULL if it is missing or null.
static const cJSON *member(const cJSON *object, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsNull(item) ? NULL : item;
}

// Reads quantization_config of the object `config`, if it has one; gpt-oss's MXFP4 is the only kind that is supported.
// `path` is for messages.
static kvb_status read_quantisation(weights *w, const cJSON *config, const char *path, kvb_error *err)
{
    const cJSON *q = member(config, "quantization_config"), *method = member(q, "quant_method");
    const char *name = cJSON_IsString(method) ? method->valuestring : "missing";
    if (!q) return KVB_OK;
    w->is_mxfp4 = strcmp(name, "mxfp4") == 0;
    if (w->is_mxfp4) return KVB_OK;
    return kvb_fail(err, KVB_UNSUPPORTED,
                    "%s/config.json: quantization_config: quant_method is '%s', expected mxfp4; get the model "
                    "unquantised or as GGUF",
                    path, name);
}

// ---- Opening ----

static kvb_status read_json(cJSON **out, const folder *f, const char *name, kvb_error *err)
{
    file_view view;
    char *path = join_path(f->path, name);
    *out = NULL;
    kvb_status status = file_map(&view, path, err);
    if (status == KVB_OK) {
        status = kvb_json_object(out, (const char *)view.data, view.size, f->path, name, err);
        if (status == KVB_OK) status = file_check(&view, path, err);
        file_unmap(&view);
    }
    free(path);
    return status;
}

static kvb_status add_shard(folder *f, const char *name, kvb_error *err)
{
    f->shards = need_more(f->shards, f->n_shards + 1, sizeof *f->shards, "files of weights");
    shard *s = &f->shards[f->n_shards++];
    *s = (shard){.name = need_text("%s", name), .path = join_path(f->path, name)};
    kvb_status status = file_map(&s->map, s->path, err);
    return status == KVB_OK ? kvb_safetensors_parse(&s->tensors, s->map.data, s->map.size, s->path, err) : status;
}

static bool has_file(const folder *f, const char *name)
{
    char *path = join_path(f->path, name);
    bool has = access(path, F_OK) == 0;
    free(path);
    return has;
}

// Checks that every tensor of the index is in its file. Further tensors of the files are left to weights_unclaimed.
static kvb_status check_index(const folder *f, const weights_index *x, const char *path, kvb_error *err)
{
    const cJSON *tensor;
    cJSON_ArrayForEach(tensor, x->map)
    {
        size_t i = 0;
        while (strcmp(f->shards[i].name, tensor->valuestring) != 0) i++;
        if (!kvb_safetensors_find(&f->shards[i].tensors, tensor->string))
            return kvb_fail(err, KVB_FORMAT, "%s: has no tensor %.80s, which %s expects there", f->shards[i].path,
                            tensor->string, path);
    }
    return KVB_OK;
}

static kvb_status add_shards(folder *f, bool none_suffice, kvb_error *err)
{
    static const char index_name[] = "model.safetensors.index.json", only_name[] = "model.safetensors";
    if (!has_file(f, index_name))
        return none_suffice && !has_file(f, only_name) ? KVB_OK : add_shard(f, only_name, err);
    weights_index x = {0};
    file_view view;
    char *path = join_path(f->path, index_name);
    kvb_status status = file_map(&view, path, err);
    if (status == KVB_OK) status = weights_index_parse(&x, view.data, view.size, path, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    file_unmap(&view);
    for (size_t i = 0; i < x.n_files && status == KVB_OK; i++) status = add_shard(f, x.files[i], err);
    if (status == KVB_OK) status = check_index(f, &x, path, err);
    weights_index_free(&x);
    free(path);
    return status;
}

// Models of text and pictures put the text model's tensors under another name.
static const char *const prefixes[][2] = {{"language_model.model.", "model."},
                                          {"model.language_model.", "model."},
                                          {"language_model.lm_head.", "lm_head."},
                                          {"", ""}};

static kvb_status add_names(weights *w, const folder *f, kvb_error *err)
{
    for (size_t s = 0; s < f->n_shards; s++) {
        weights_add_file(w, f->shards[s].path, &f->shards[s].map);
        for (size_t i = 0; i < f->shards[s].tensors.n_tensors; i++) {
            const char *name = f->shards[s].tensors.tensors[i].name;
            char plain[256];
            size_t p = 0;
            while (strncmp(name, prefixes[p][0], strlen(prefixes[p][0])) != 0) p++;
            snprintf(plain, sizeof plain, "%s%.200s", prefixes[p][1], name + strlen(prefixes[p][0]));
            weights_add_name(w, plain, s);
        }
    }
    return weights_sort_names(w, err);
}

static const weights_kind weights_folder;

static folder *open_folder(weights *w, const char *path)
{
    folder *f = w->source = need(1, sizeof *f, "folders");
    w->kind = &weights_folder;
    f->path = need_text("%s", path);
    return f;
}

// Finds the text model's part of config.json, and its family, model_type.
static kvb_status find_model(weights *w, folder *f, kvb_error *err)
{
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(f->config, "text_config");
    f->model = cJSON_IsObject(text) ? text : f->config;
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(f->model, "model_type");
    if (!cJSON_IsString(type))
        return kvb_fail(err, KVB_FORMAT, "%s/config.json: model_type is missing, expected the name of a family",
                        f->path);
    snprintf(w->architecture, sizeof w->architecture, "%s", type->valuestring);
    kvb_status status = read_quantisation(w, f->config, f->path, err);
    return status == KVB_OK && f->model != f->config ? read_quantisation(w, f->model, f->path, err) : status;
}

kvb_status weights_open_folder(weights *w, const char *path, bool config_suffices, kvb_error *err)
{
    folder *f = open_folder(w, path);
    kvb_status status = read_json(&f->config, f, "config.json", err);
    if (status == KVB_OK) status = find_model(w, f, err);
    if (status == KVB_OK && has_file(f, "generation_config.json"))
        status = read_json(&f->generation, f, "generation_config.json", err);
    if (status == KVB_OK) status = add_shards(f, config_suffices, err);
    return status == KVB_OK ? add_names(w, f, err) : status;
}

kvb_status weights_from_config(weights **out, const char *name, const void *config, size_t size, kvb_error *err)
{
    weights *w = *out = need(1, sizeof *w, "models");
    snprintf(w->name, sizeof w->name, "%s", name);
    folder *f = open_folder(w, name);
    kvb_status status = kvb_json_object(&f->config, config, size, name, "config.json", err);
    if (status == KVB_OK) status = find_model(w, f, err);
    if (status == KVB_OK) return KVB_OK;
    weights_close(w);
    *out = NULL;
    return status;
}

static void close_folder(weights *w)
{
    folder *f = w->source;
    for (size_t i = 0; i < f->n_shards; i++) {
        kvb_safetensors_free(&f->shards[i].tensors);
        file_unmap(&f->shards[i].map);
        free_all(f->shards[i].name, f->shards[i].path);
    }
    free(f->shards);
    cJSON_Delete(f->config);
    cJSON_Delete(f->generation);
    free_all(f->path, f);
}

// ---- Numbers ----

// Finds a rotary setting: in rope_parameters (transformers 5), else in rope_scaling, else at the top level.
static const cJSON *rope_member(const cJSON *model, const char *name)
{
    const cJSON *all = member(model, "rope_parameters"), *full = member(all, "full_attention");
    const cJSON *item = member(full ? full : all, name);
    if (!item) item = member(member(model, "rope_scaling"), name);
    return item ? item : member(model, name);
}

static const cJSON *item_of(const weights *w, weight_key key)
{
    const folder *f = folder_of(w);
    const char *name = weight_names[key][1];
    if (name[0] == '@') return rope_member(f->model, name + 1);
    if (name[0] == '~') return member(member(member(f->model, "rope_parameters"), "sliding_attention"), name + 1);
    bool special = key == WEIGHT_BOS || key == WEIGHT_EOS;
    const cJSON *item = special ? member(f->generation, name) : NULL;
    if (!item) item = member(f->model, name);
    return item ? item : special ? member(f->config, name) : NULL;
}

static kvb_status wrong_type(const weights *w, weight_key key, const char *expected, kvb_error *err)
{
    char name[96];
    return kvb_fail(err, KVB_FORMAT, "%s/config.json: %s: expected %s", folder_of(w)->path,
                    weights_key_name(w, key, name), expected);
}

static bool number_of(const cJSON *item, double *out)
{
    if (!cJSON_IsNumber(item) && !cJSON_IsBool(item)) return false;
    *out = cJSON_IsNumber(item) ? item->valuedouble : cJSON_IsTrue(item);
    return isfinite(*out);
}

// If the value is a list, its first element. The end of a turn (EOT) is the second element of the list of EOS tokens.
static kvb_status number_folder(const weights *w, weight_key key, double *out, bool *found, kvb_error *err)
{
    const cJSON *item = item_of(w, key == WEIGHT_EOT ? WEIGHT_EOS : key);
    if (key == WEIGHT_EOT && !cJSON_IsArray(item)) return KVB_OK;
    if (cJSON_IsArray(item)) item = item->child;
    if (item && key == WEIGHT_EOT) item = item->next;
    if (!item) return KVB_OK;
    if (!number_of(item, out)) return wrong_type(w, key, "a number", err);
    *found = true;
    return KVB_OK;
}

static kvb_status text_folder(const weights *w, weight_key key, char *out, size_t size, kvb_error *err)
{
    const cJSON *item = item_of(w, key);
    if (!item) return KVB_OK;
    if (!cJSON_IsString(item)) return wrong_type(w, key, "a text", err);
    snprintf(out, size, "%s", item->valuestring);
    return KVB_OK;
}

static kvb_status list_folder(const weights *w, weight_key key, double *out, size_t max, size_t *n, kvb_error *err)
{
    const cJSON *all = item_of(w, key), *item;
    if (!all) return KVB_OK;
    if (!cJSON_IsArray(all)) return wrong_type(w, key, "a list", err);
    cJSON_ArrayForEach(item, all)
    {
        if (*n == max) return wrong_type(w, key, "a shorter list", err);
        if (cJSON_IsString(item)) out[*n] = strncmp(item->valuestring, "sliding", 7) == 0;
        else if (!number_of(item, &out[*n])) return wrong_type(w, key, "a list of numbers or texts", err);
        ++*n;
    }
    return KVB_OK;
}

// ---- Tensors ----

static uint32_t type_of(const char *dtype)
{
    static const struct {
        const char *name;
        uint32_t type;
    } types[] = {{"F32", GGUF_TENSOR_F32}, {"F16", GGUF_TENSOR_F16}, {"BF16", GGUF_TENSOR_BF16}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(types[i].name, dtype) == 0) return types[i].type;
    return UINT32_MAX;
}

static const kvb_tensor *tensor_of(const shard *s, const char *plain)
{
    for (size_t p = 0; p < sizeof prefixes / sizeof *prefixes; p++) {
        char name[512];
        size_t n = strlen(prefixes[p][1]);
        if (strncmp(plain, prefixes[p][1], n) != 0) continue;
        snprintf(name, sizeof name, "%s%s", prefixes[p][0], plain + n);
        const kvb_tensor *t = kvb_safetensors_find(&s->tensors, name);
        if (t) return t;
    }
    return NULL;
}

static bool tensor_folder(const weights *w, const weight_name *name, weight_tensor *out)
{
    const shard *s = &folder_of(w)->shards[name->file];
    const kvb_tensor *t = tensor_of(s, name->name);
    if (!t) return false;
    out->file = s->path;
    out->type = type_of(t->dtype);
    snprintf(out->type_name, sizeof out->type_name, "%s", t->dtype);
    out->n_dims = t->n_dims;
    out->columns = t->n_dims ? t->shape[t->n_dims - 1] : 1;
    out->rows = 1;
    for (uint32_t i = 0; i + 1 < t->n_dims; i++) out->rows *= t->shape[i];
    out->data = t->data;
    out->row_bytes = out->rows ? t->size / out->rows : 0;
    return true;
}

// Tensors that a text model does not need: those for pictures and sounds, tables that can be computed, and scales with
// which engines quantise caches.
static bool left_folder(const char *name)
{
    static const char *const others[] = {"vision_tower.",          "model.vision_tower.",          "visual.",
                                         "multi_modal_projector.", "model.multi_modal_projector.", "audio_tower."};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strncmp(name, others[i], strlen(others[i])) == 0) return true;
    return strstr(name, "rotary_emb.inv_freq") || kvb_ends_with(name, ".k_scale") || kvb_ends_with(name, ".v_scale");
}

// ---- The files ----

static char *describe_folder(const weights *w, weights_origin *origin)
{
    const folder *f = folder_of(w);
    const cJSON *named = member(f->config, "_name_or_path");
    origin->container = "safetensors";
    origin_of_folder(origin, f->path, "config.json");
    if (!origin->hf_id[0] && cJSON_IsString(named) && origin_is_id(named->valuestring))
        snprintf(origin->hf_id, sizeof origin->hf_id, "%s", named->valuestring);
    return cJSON_PrintUnformatted(f->config);
}

const char *weights_folder_path(const weights *w)
{
    return w->is_gguf ? NULL : folder_of(w)->path;
}

static const weights_kind weights_folder = {close_folder,  number_folder, text_folder,    list_folder,
                                            tensor_folder, left_folder,   describe_folder};
