#include "profiler/weights/gguf_set.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// What a part says of itself and of all parts.
typedef struct part {
    uint32_t no, count, n_tensors;
} part;

// count is 1 for a whole model; gguf-split leaves 0 in what it has merged.
static kvb_status read_part(part *out, const gguf_file *f, kvb_error *err)
{
    *out = (part){0, 1, 0};
    kvb_status status = gguf_get_u32_or(f, "split.count", 1, &out->count, err);
    if (status != KVB_OK || out->count <= 1) {
        out->count = 1;
        return status;
    }
    status = gguf_get_u32(f, "split.no", &out->no, err);
    if (status == KVB_OK) status = gguf_get_u32(f, "split.tensors.count", &out->n_tensors, err);
    if (status == KVB_OK && (out->no >= out->count || out->count > UINT16_MAX))
        return kvb_fail(err, KVB_FORMAT, "%s: split.no %u of split.count %u is no possible part; the file is damaged",
                        f->name, out->no, out->count);
    return status;
}

// The end of a part's name, and its length.
static size_t name_end(char out[40], uint32_t no, uint32_t count)
{
    return (size_t)snprintf(out, 40, "-%05u-of-%05u.gguf", no + 1, count);
}

// Names of all parts, from that of one of them.
static kvb_status name_parts(gguf_set *s, const char *path, const part *own, kvb_error *err)
{
    char end[40];
    size_t size = strlen(path), n_end = name_end(end, own->no, own->count);
    if (size < n_end || strcmp(path + size - n_end, end) != 0)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: is part %u of %u of a model, expected a name that ends with %s: the others are found by "
                        "it; give the parts the names that they had",
                        path, own->no + 1, own->count, end);
    s->files = need(own->count, sizeof *s->files, "parts of a model");
    s->paths = need(own->count, sizeof *s->paths, "parts of a model");
    for (; s->n < own->count; s->n++) {
        name_end(end, (uint32_t)s->n, own->count);
        s->paths[s->n] = need_text("%.*s%s", (int)(size - n_end), path, end);
    }
    return KVB_OK;
}

static kvb_status open_part(gguf_file *out, const char *path, uint32_t no, const part *own, kvb_error *err)
{
    part found;
    kvb_error inner = {0};
    kvb_status status = gguf_open(out, path, &inner);
    if (status != KVB_OK)
        return kvb_fail(err, status, "%.400s (part %u of %u of the model)", inner.message, no + 1, own->count);
    status = read_part(&found, out, err);
    if (status != KVB_OK) return status;
    if (found.no != no || found.count != own->count)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: expected part %u of %u, found part %u of %u; it is of another model, or has another "
                        "part's name: get it again",
                        path, no + 1, own->count, found.no + 1, found.count);
    if (found.n_tensors != own->n_tensors)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: split.tensors.count: expected %u tensors in all parts, as the part that was opened says, "
                        "found %u; it is of another model: get it again",
                        path, own->n_tensors, found.n_tensors);
    return KVB_OK;
}

static kvb_status open_parts(gguf_set *s, const char *path, const part *own, kvb_error *err)
{
    size_t n_tensors = 0;
    kvb_status status = name_parts(s, path, own, err);
    for (uint32_t i = 0; status == KVB_OK && i < own->count; i++) {
        status = open_part(&s->files[i], s->paths[i], i, own, err);
        n_tensors += s->files[i].n_tensors;
    }
    if (status == KVB_OK && n_tensors != own->n_tensors)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: split.tensors.count: expected %u tensors in all %u parts, found %zu; get the parts again",
                        s->paths[0], own->n_tensors, own->count, n_tensors);
    return status;
}

static kvb_status keep_one(gguf_set *s, const char *path, gguf_file *file)
{
    *s = (gguf_set){need_copy(file, 1, sizeof *file, "models"), need(1, sizeof *s->paths, "models"), 1};
    s->paths[0] = need_text("%s", path);
    *file = (gguf_file){0};
    return KVB_OK;
}

kvb_status gguf_set_open(gguf_set *out, const char *path, kvb_error *err)
{
    part own;
    gguf_file file;
    *out = (gguf_set){0};
    kvb_status status = gguf_open(&file, path, err);
    if (status == KVB_OK) status = read_part(&own, &file, err);
    if (status == KVB_OK) status = own.count > 1 ? open_parts(out, path, &own, err) : keep_one(out, path, &file);
    gguf_close(&file);
    if (status != KVB_OK) gguf_set_close(out);
    return status;
}

kvb_status gguf_set_check(const gguf_set *s, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; status == KVB_OK && i < s->n; i++) status = file_check(&s->files[i].map, s->paths[i], err);
    return status;
}

void gguf_set_close(gguf_set *s)
{
    for (size_t i = 0; i < s->n; i++) {
        gguf_close(&s->files[i]);
        free(s->paths[i]);
    }
    free(s->files);
    free(s->paths);
    *s = (gguf_set){0};
}
