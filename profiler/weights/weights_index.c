#include "profiler/weights/weights_index.h"
#include "formats/file_read.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

// Plain names of files in the folder only: an index must not lead anywhere else.
static bool plain_name(const char *name)
{
    return name[0] && name[0] != '.' && strlen(name) < 256 && !strchr(name, '/');
}

static bool has_file(const weights_index *x, const char *file)
{
    for (size_t i = x->n_files; i > 0; i--) // the last one mostly
        if (strcmp(x->files[i - 1], file) == 0) return true;
    return false;
}

static kvb_status add_file(weights_index *x, const cJSON *tensor, const char *name, kvb_error *err)
{
    if (!cJSON_IsString(tensor))
        return kvb_fail(err, KVB_FORMAT, "%s: tensor %.80s: expected a file's name", name, tensor->string);
    const char *file = tensor->valuestring;
    if (!plain_name(file))
        return kvb_fail(err, KVB_FORMAT, "%s: tensor %.80s: names the file '%.80s', expected a file of the folder",
                        name, tensor->string, file);
    if (has_file(x, file)) return KVB_OK;
    const char **grown = realloc(x->files, (x->n_files + 1) * sizeof *grown);
    if (!grown) return kvb_fail(err, KVB_MEMORY, "%s: no memory for %zu files", name, x->n_files + 1);
    x->files = grown;
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
    cJSON_ArrayForEach(tensor, out->map) if (status == KVB_OK) status = add_file(out, tensor, name, err);
    if (status != KVB_OK) weights_index_free(out);
    return status;
}

kvb_status weights_index_read(weights_index *out, const char *path, kvb_error *err)
{
    file_view view;
    *out = (weights_index){0};
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    status = weights_index_parse(out, view.data, view.size, path, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    if (status != KVB_OK) weights_index_free(out);
    file_unmap(&view);
    return status;
}

void weights_index_free(weights_index *x)
{
    free(x->files);
    cJSON_Delete(x->all);
    *x = (weights_index){0};
}
