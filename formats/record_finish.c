// Assembling a record from its parts, and from the finished record that is extended.
#include "atomic_file.h"
#include "record_internal.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Room for the HDF5 structures of the whole; those of the parts are larger than what becomes of them.
enum { RECORD_OVERHEAD = 1 << 20 };

// By id, the context before its questions, questions by number, and a part before what it replaces in the base.
static int compare_parts(const void *a, const void *b)
{
    const part *x = a, *y = b;
    int order = strcmp(x->id, y->id);
    if (order == 0) order = x->is_question - y->is_question;
    if (order == 0) order = (x->question > y->question) - (x->question < y->question);
    return order ? order : x->in_base - y->in_base;
}

static bool same_part(const part *x, const part *y)
{
    return strcmp(x->id, y->id) == 0 && x->is_question == y->is_question && x->question == y->question;
}

static part *add_base_parts(part *out, const record *base)
{
    for (size_t i = 0; base && i < base->n; i++) {
        const record_context_info *c = &base->contexts[i].info;
        for (uint32_t q = 0; q <= c->n_questions; q++) { // the last one stands for the context itself
            part one = {.is_question = q < c->n_questions, .in_base = true};
            snprintf(one.id, sizeof one.id, "%s", c->id);
            if (one.is_question) one.question = c->questions[q].number;
            *out++ = one;
        }
    }
    return out;
}

// Everything that goes into the record, sorted, each once. *n_files receives how many parts are files.
static kvb_status collect(part **all, size_t *n, size_t *n_files, uint64_t *bytes, const record_writer *w,
                          kvb_error *err)
{
    kvb_status status = parts_scan(all, n_files, bytes, w->folder, err);
    if (status != KVB_OK) return status;
    size_t n_base = 0;
    for (size_t i = 0; w->base && i < w->base->n; i++) n_base += 1 + w->base->contexts[i].info.n_questions;
    part *larger = reallocarray(*all, *n_files + n_base + 1, sizeof *larger);
    if (!larger) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory", w->path);
    *all = larger;
    part *end = add_base_parts(larger + *n_files, w->base);
    if (w->base) *bytes += w->base->file.size;
    size_t total = (size_t)(end - larger), kept = 0;
    qsort(larger, total, sizeof *larger, compare_parts);
    for (size_t i = 0; i < total; i++) {
        if (kept == 0 || !same_part(&larger[kept - 1], &larger[i])) larger[kept++] = larger[i];
    }
    *n = kept;
    return KVB_OK;
}

// The parts of one context: [*first, *first + *count), the context itself first.
static bool find_context_parts(const part *all, size_t n, const char *id, size_t *first, size_t *count)
{
    size_t i = 0;
    while (i < n && strcmp(all[i].id, id) != 0) i++;
    *first = i;
    while (i < n && strcmp(all[i].id, id) == 0) i++;
    *count = i - *first;
    return *count > 0 && !all[*first].is_question;
}

static kvb_status check_list(const record_writer *w, const part *all, size_t n, const char *const *ids, size_t n_ids,
                             kvb_error *err)
{
    size_t used = 0;
    for (size_t i = 0; i < n_ids; i++) {
        size_t first, count;
        if (!find_context_parts(all, n, ids[i], &first, &count))
            return kvb_fail(err, KVB_ARGUMENT, "%s: context \"%.64s\" was not put yet", w->path, ids[i]);
        for (size_t k = 0; k < i; k++) {
            if (strcmp(ids[k], ids[i]) == 0)
                return kvb_fail(err, KVB_ARGUMENT, "%s: context %s is listed twice", w->path, ids[i]);
        }
        used += count;
    }
    for (size_t p = 0; p < n && used < n; p++) {
        size_t i = 0;
        while (i < n_ids && strcmp(ids[i], all[p].id) != 0) i++;
        if (i == n_ids)
            return kvb_fail(err, KVB_MISMATCH,
                            "%s: holds context %s, which is not in the list of this run; give all "
                            "calibration files, or remove its parts",
                            w->folder, all[p].id);
    }
    return KVB_OK;
}

// ---- Copying ----

typedef struct assembly {
    const record_writer *w;
    h5_file out;
    float *layer; // buffer [G,T]
} assembly;

static kvb_status copy_ids(uint32_t *n, assembly *a, hid_t to, const h5_file *from_file, hid_t from, const char *name,
                           kvb_error *err)
{
    hid_t ids;
    int32_t *values = NULL;
    kvb_status status = h5_open_ids(&ids, n, from_file, from, name, err);
    if (status == KVB_OK && *n > 0) {
        values = malloc(*n * sizeof *values);
        status = values ? h5_read_ids(from_file, ids, values, err)
                        : kvb_fail(err, KVB_MEMORY, "%s: not enough memory for %u ids", from_file->name, *n);
    }
    if (status == KVB_OK) status = h5_write_ids(&a->out, to, name, values, *n, err);
    free(values);
    h5_release(ids);
    return status;
}

static kvb_status copy_array(assembly *a, hid_t to, const h5_file *from_file, hid_t from, const char *name,
                             uint32_t n_tokens, kvb_error *err)
{
    uint32_t dims[3] = {a->w->shape.n_layers, a->w->shape.n_kv_heads, n_tokens};
    hid_t source, target = -1;
    kvb_status status = h5_open_array(&source, from_file, from, name, dims, err);
    if (status == KVB_OK) status = h5_make_array(&target, &a->out, to, name, dims, a->w->deflate, err);
    for (uint32_t l = 0; l < dims[0] && status == KVB_OK; l++) {
        status = h5_read_layer(from_file, source, l, a->layer, err);
        if (status == KVB_OK) status = h5_write_layer(&a->out, target, l, a->layer, err);
    }
    h5_release(target);
    h5_release(source);
    return status;
}

static kvb_status copy_context(assembly *a, hid_t to, const h5_file *from_file, hid_t from, uint32_t *n_tokens,
                               kvb_error *err)
{
    hid_t scores = -1, target = -1;
    char **metrics = NULL;
    size_t n = 0;
    kvb_status status = copy_ids(n_tokens, a, to, from_file, from, "token_ids", err);
    if (status == KVB_OK) status = record_tokens_check(&a->w->shape, *n_tokens, from_file->name, err);
    if (status == KVB_OK) {
        free(a->layer);
        a->layer = malloc((size_t)a->w->shape.n_kv_heads * *n_tokens * sizeof *a->layer);
        if (!a->layer) status = kvb_fail(err, KVB_MEMORY, "%s: not enough memory for a layer", from_file->name);
    }
    if (status == KVB_OK) status = h5_open_group(&scores, from_file, from, "scores", err);
    if (status == KVB_OK) status = h5_list(&metrics, &n, from_file, scores, err);
    if (status == KVB_OK) status = h5_make_group(&target, &a->out, to, "scores", err);
    for (size_t i = 0; i < n && status == KVB_OK; i++)
        status = copy_array(a, target, from_file, scores, metrics[i], *n_tokens, err);
    h5_free_names(metrics);
    h5_release(target);
    h5_release(scores);
    return status;
}

static kvb_status copy_question(assembly *a, hid_t to, const h5_file *from_file, hid_t from, uint32_t number,
                                uint32_t n_tokens, kvb_error *err)
{
    char name[16];
    snprintf(name, sizeof name, "%u", number);
    hid_t source, target = -1;
    uint32_t n_queries = 0, ignored;
    kvb_status status = record_open_question(&source, from_file, from, number, err);
    if (status == KVB_OK) status = h5_make_group(&target, &a->out, to, name, err);
    if (status == KVB_OK) status = h5_get_u32(&n_queries, from_file, source, "n_queries", err);
    if (status == KVB_OK) status = h5_put_u32(&a->out, target, "n_queries", n_queries, err);
    if (status == KVB_OK) status = copy_ids(&ignored, a, target, from_file, source, "suffix_ids", err);
    if (status == KVB_OK) status = copy_ids(&ignored, a, target, from_file, source, "answer_ids", err);
    if (status == KVB_OK && n_queries > 0) status = copy_array(a, target, from_file, source, "oracle", n_tokens, err);
    h5_release(target);
    h5_release(source);
    return status;
}

// Copies one part into the group of its context; `questions` is that group's.
static kvb_status copy_part(assembly *a, hid_t context, hid_t questions, const part *p, uint32_t *n_tokens,
                            kvb_error *err)
{
    char *path = NULL;
    h5_file opened = {-1, NULL, 0};
    const h5_file *from_file = &opened;
    hid_t from = -1;
    kvb_status status = KVB_OK;
    if (p->in_base) {
        from_file = &a->w->base->file;
    } else {
        path = part_path(a->w->folder, p->id, p->is_question, p->question);
        status = path ? h5_open(&opened, path, err) : kvb_fail(err, KVB_MEMORY, "%s: not enough memory", a->w->path);
    }
    if (status == KVB_OK) status = record_open_context(&from, from_file, p->id, err);
    if (status == KVB_OK && p->is_question)
        status = copy_question(a, questions, from_file, from, p->question, *n_tokens, err);
    else if (status == KVB_OK) status = copy_context(a, context, from_file, from, n_tokens, err);
    h5_release(from);
    h5_close(&opened, NULL);
    free(path);
    return status;
}

static kvb_status copy_context_parts(assembly *a, hid_t contexts, const part *parts, size_t n, uint32_t order,
                                     kvb_error *err)
{
    hid_t context, questions = -1;
    uint32_t n_tokens = 0;
    kvb_status status = h5_make_group(&context, &a->out, contexts, parts[0].id, err);
    if (status == KVB_OK) status = h5_put_u32(&a->out, context, "order", order, err);
    if (status == KVB_OK) status = h5_make_group(&questions, &a->out, context, "questions", err);
    for (size_t i = 0; i < n && status == KVB_OK; i++)
        status = copy_part(a, context, questions, &parts[i], &n_tokens, err);
    h5_release(questions);
    h5_release(context);
    return status;
}

static kvb_status assemble(const record_writer *w, const part *all, size_t n, uint64_t bytes, const char *const *ids,
                           size_t n_ids, kvb_error *err)
{
    assembly a = {w, {-1, NULL, 0}, NULL};
    atomic_file file;
    hid_t contexts = -1;
    kvb_status status = atomic_file_begin(&file, w->path, err);
    if (status != KVB_OK) return status;
    status = h5_create(&a.out, file.temp_path, w->path, bytes + RECORD_OVERHEAD, err);
    if (status == KVB_OK) status = record_root_write(&a.out, &w->shape, w->attributes, err);
    if (status == KVB_OK) status = h5_make_group(&contexts, &a.out, a.out.id, "contexts", err);
    for (size_t i = 0; i < n_ids && status == KVB_OK; i++) {
        size_t first, count;
        find_context_parts(all, n, ids[i], &first, &count);
        status = copy_context_parts(&a, contexts, &all[first], count, (uint32_t)i, err);
    }
    h5_release(contexts);
    kvb_status closed = h5_close(&a.out, status == KVB_OK ? err : NULL);
    if (status == KVB_OK) status = closed;
    if (status == KVB_OK) status = atomic_file_commit(&file, err);
    else atomic_file_abandon(&file);
    free(a.layer);
    return status;
}

static bool base_is_complete(const record_writer *w, size_t n_files, const char *const *ids, size_t n_ids)
{
    if (!w->base || n_files > 0 || w->base->n != n_ids) return false;
    for (size_t i = 0; i < n_ids; i++) {
        if (strcmp(w->base->contexts[i].id, ids[i]) != 0) return false;
    }
    return true;
}

kvb_status record_finish(record_writer *w, const char *const *context_ids_in_order, size_t n, kvb_error *err)
{
    h5_error_printing before = h5_quiet();
    part *all = NULL;
    size_t n_parts = 0, n_files = 0;
    uint64_t bytes = 0;
    kvb_status status = collect(&all, &n_parts, &n_files, &bytes, w, err);
    if (status == KVB_OK) status = check_list(w, all, n_parts, context_ids_in_order, n, err);
    if (status == KVB_OK && !base_is_complete(w, n_files, context_ids_in_order, n))
        status = assemble(w, all, n_parts, bytes, context_ids_in_order, n, err);
    if (status == KVB_OK) parts_remove(w->folder);
    free(all);
    h5_loud(before);
    return status;
}
