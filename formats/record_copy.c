// Writing one record out of pieces of other HDF5 files: parts, finished records, shards.
#include "formats/need.h"
#include "record_internal.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Room for the HDF5 structures of the whole; those of the pieces are larger than what becomes of them.
enum { RECORD_OVERHEAD = 1 << 20 };

kvb_status record_output_begin(record_output *out, const char *path, const record_shape *shape, const cJSON *attributes,
                               int deflate, uint64_t bytes, kvb_error *err)
{
    *out = (record_output){.h5 = {.id = -1}, .shape = *shape, .deflate = deflate};
    out->contexts = out->context = out->questions = -1;
    kvb_status status = atomic_file_begin(&out->file, path, err);
    if (status != KVB_OK) return status;
    status = h5_create(&out->h5, out->file.temp_path, path, bytes + RECORD_OVERHEAD, err);
    if (status == KVB_OK) status = record_root_write(&out->h5, shape, attributes, err);
    if (status == KVB_OK) status = h5_make_group(&out->contexts, &out->h5, out->h5.id, "contexts", err);
    return status;
}

static kvb_status close_context(record_output *out, kvb_status status, kvb_error *err)
{
    status = h5_end(&out->h5, out->questions, status, err);
    status = h5_end(&out->h5, out->context, status, err);
    out->questions = out->context = -1;
    return status;
}

kvb_status record_output_end(record_output *out, kvb_status status, kvb_error *err)
{
    status = close_context(out, status, err);
    status = h5_end(&out->h5, out->contexts, status, err);
    if (out->h5.tally) status = h5_finish(&out->h5, out->file.temp_path, status, err);
    if (status == KVB_OK) status = atomic_file_commit(&out->file, err);
    else atomic_file_abandon(&out->file);
    free(out->layer);
    out->layer = NULL;
    return status;
}

static kvb_status copy_ids(uint32_t *n, const record_output *out, hid_t to, const h5_file *from_file, hid_t from,
                           const char *name, kvb_error *err)
{
    h5_set ids;
    int32_t *values = NULL;
    kvb_status status = h5_open_ids(&ids, n, from_file, from, name, err);
    if (status == KVB_OK && *n > 0) {
        values = need(*n, sizeof *values, "token ids");
        status = h5_read_ids(from_file, &ids, values, err);
    }
    if (status == KVB_OK) status = h5_write_ids(&out->h5, to, name, values, *n, err);
    free(values);
    h5_close_set(&ids);
    return status;
}

static kvb_status copy_array(record_output *out, hid_t to, const h5_file *from_file, hid_t from, const char *name,
                             kvb_error *err)
{
    uint32_t dims[3] = {out->shape.n_layers, out->shape.n_kv_heads, out->n_tokens};
    h5_set source, target = {.id = -1};
    kvb_status status = h5_open_array(&source, from_file, from, name, dims, err);
    if (status == KVB_OK) status = h5_make_array(&target, &out->h5, to, name, dims, out->deflate, true, err);
    for (uint32_t l = 0; l < dims[0] && status == KVB_OK; l++) {
        status = h5_read_layer(from_file, &source, out->layer, err);
        if (status == KVB_OK) status = h5_write_layer(&out->h5, &target, out->layer, err);
    }
    status = h5_end_array(&out->h5, &target, &source, status, err);
    h5_close_set(&source);
    return status;
}

// One of the files that a context comes from, while it is copied.
typedef struct context_source {
    const h5_file *file;
    hid_t context, scores;
    char **metrics; // ascending, NULL-terminated
} context_source;

static kvb_status open_source(context_source *s, const h5_file *file, const char *id, kvb_error *err)
{
    size_t n;
    *s = (context_source){file, -1, -1, NULL};
    kvb_status status = record_open_context(&s->context, file, id, err);
    if (status == KVB_OK) status = h5_open_group(&s->scores, file, s->context, "scores", err);
    return status == KVB_OK ? h5_list(&s->metrics, &n, file, s->scores, err) : status;
}

static void close_source(context_source *s)
{
    h5_free_names(s->metrics);
    h5_release(s->scores);
    h5_release(s->context);
}

// The first name, in ASCII order, that comes after `last` (NULL: of all) in any source; *source receives the first that
// has it. NULL at the end.
static const char *next_metric(const context_source **source, const context_source *all, size_t n, const char *last)
{
    const char *best = NULL;
    for (size_t i = 0; i < n; i++) {
        char *const *name = all[i].metrics;
        while (*name && last && strcmp(*name, last) <= 0) name++;
        if (!*name || (best && strcmp(*name, best) >= 0)) continue;
        best = *name;
        *source = &all[i];
    }
    return best;
}

// token_ids and scores of the context under way.
static kvb_status copy_context(record_output *out, const context_source *from, size_t n, kvb_error *err)
{
    hid_t target = -1;
    const h5_file *first = from[0].file;
    kvb_status status = copy_ids(&out->n_tokens, out, out->context, first, from[0].context, "token_ids", err);
    if (status == KVB_OK) status = record_tokens_check(&out->shape, out->n_tokens, first->name, err);
    if (status == KVB_OK) {
        free(out->layer);
        out->layer = need((size_t)out->shape.n_kv_heads * out->n_tokens, sizeof *out->layer, "values of a layer");
    }
    if (status == KVB_OK) status = h5_make_group(&target, &out->h5, out->context, "scores", err);
    const context_source *source = NULL;
    const char *metric = NULL;
    while (status == KVB_OK && (metric = next_metric(&source, from, n, metric)))
        status = copy_array(out, target, source->file, source->scores, metric, err);
    return h5_end(&out->h5, target, status, err);
}

kvb_status record_output_context(record_output *out, const char *id, const h5_file *const *from, size_t n,
                                 kvb_error *err)
{
    context_source *sources = need(n, sizeof *sources, "files");
    size_t opened = 0;
    kvb_status status = close_context(out, KVB_OK, err);
    if (status == KVB_OK) status = h5_make_group(&out->context, &out->h5, out->contexts, id, err);
    if (status == KVB_OK) status = h5_put_u32(&out->h5, out->context, "order", out->n_contexts++, err);
    if (status == KVB_OK) status = h5_make_group(&out->questions, &out->h5, out->context, "questions", err);
    for (; status == KVB_OK && opened < n; opened++) status = open_source(&sources[opened], from[opened], id, err);
    if (status == KVB_OK) status = copy_context(out, sources, n, err);
    while (opened > 0) close_source(&sources[--opened]);
    free(sources);
    return status;
}

kvb_status record_output_question(record_output *out, const char *id, uint32_t number, const h5_file *from_file,
                                  kvb_error *err)
{
    char name[16];
    snprintf(name, sizeof name, "%u", number);
    hid_t context, from = -1, to = -1;
    uint32_t n_queries = 0, ignored;
    kvb_status status = record_open_context(&context, from_file, id, err);
    if (status == KVB_OK) status = record_open_question(&from, from_file, context, number, err);
    if (status == KVB_OK) status = h5_make_group(&to, &out->h5, out->questions, name, err);
    if (status == KVB_OK) status = h5_get_u32(&n_queries, from_file, from, "n_queries", err);
    if (status == KVB_OK) status = h5_put_u32(&out->h5, to, "n_queries", n_queries, err);
    if (status == KVB_OK) status = copy_ids(&ignored, out, to, from_file, from, "suffix_ids", err);
    if (status == KVB_OK) status = copy_ids(&ignored, out, to, from_file, from, "answer_ids", err);
    if (status == KVB_OK && n_queries > 0) status = copy_array(out, to, from_file, from, "oracle", err);
    status = h5_end(&out->h5, to, status, err);
    h5_release(from);
    h5_release(context);
    return status;
}
