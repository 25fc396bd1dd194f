// Assembling a record from its parts, and from the finished record that is extended.
#include "formats/need.h"
#include "record_internal.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
    part *larger = *all = need_more(*all, *n_files + n_base, sizeof *larger, "parts");
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
        if (!record_writer_has_context(w, ids[i]))
            return kvb_fail(err, KVB_MISMATCH, "%s: context %s has no scores of the metrics that are added", w->path,
                            ids[i]);
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

// Copies one part; the first part of a context is the context itself.
static kvb_status copy_part(record_output *out, const record_writer *w, const part *p, kvb_error *err)
{
    char *path = NULL;
    h5_file opened = {.id = -1};
    const h5_file *from[2] = {&opened};
    size_t n = 1;
    kvb_status status = KVB_OK;
    if (p->in_base) {
        from[0] = &w->base->file;
    } else {
        // Metrics that were added stand in a part of their own.
        if (w->adds && record_find_context(w->base, p->id)) from[n++] = &w->base->file;
        path = part_path(w->folder, p->id, p->is_question, p->question);
        status = h5_open(&opened, path, err);
    }
    if (status == KVB_OK)
        status = p->is_question ? record_output_question(out, p->id, p->question, from[0], err)
                                : record_output_context(out, p->id, from, n, err);
    h5_close(&opened);
    free(path);
    return status;
}

// Those that were put now, and those of the finished record.
static kvb_status copy_losses(record_output *out, const record_writer *w, const part *p, kvb_error *err)
{
    h5_file put = {.id = -1};
    const h5_file *from[2];
    size_t n = 0;
    char *path = part_losses_path(w->folder, p->id, p->question);
    kvb_status status = KVB_OK;
    if (status == KVB_OK && path_exists(path)) {
        status = h5_open(&put, path, err);
        from[n++] = &put;
    }
    const record_context_info *c = w->base ? record_find_context(w->base, p->id) : NULL;
    for (uint32_t q = 0; c && q < c->n_questions; q++)
        if (c->questions[q].number == p->question) from[n++] = &w->base->file;
    if (status == KVB_OK) status = record_output_losses(out, p->id, p->question, from, n, err);
    h5_close(&put);
    free(path);
    return status;
}

static kvb_status assemble(const record_writer *w, const part *all, size_t n, uint64_t bytes, const char *const *ids,
                           size_t n_ids, kvb_error *err)
{
    record_output out;
    kvb_status status = record_output_begin(&out, w->path, &w->shape, w->attributes, w->deflate, bytes, err);
    for (size_t i = 0; i < n_ids && status == KVB_OK; i++) {
        size_t first, count;
        find_context_parts(all, n, ids[i], &first, &count);
        for (size_t k = 0; k < count && status == KVB_OK; k++) {
            status = copy_part(&out, w, &all[first + k], err);
            if (status == KVB_OK && all[first + k].is_question) status = copy_losses(&out, w, &all[first + k], err);
        }
    }
    return record_output_end(&out, status, err);
}

static bool base_is_complete(const record_writer *w, size_t n_files, const char *const *ids, size_t n_ids)
{
    root_difference ignored;
    if (!w->base || n_files > 0 || w->base->n != n_ids) return false;
    if (record_root_differs(&ignored, &w->shape, w->base->attributes, &w->shape, w->attributes)) return false;
    for (size_t i = 0; i < n_ids; i++) {
        if (strcmp(w->base->contexts[i].id, ids[i]) != 0) return false;
    }
    return true;
}

kvb_status record_finish(record_writer *w, const char *const *context_ids_in_order, size_t n, kvb_error *err)
{
    if (w->joined) return kvb_fail(err, KVB_ARGUMENT, "%s: only the process that began the run can finish it", w->path);
    h5_error_printing before = h5_quiet();
    part *all = NULL;
    size_t n_parts = 0, n_files = 0;
    uint64_t bytes = 0;
    kvb_status status = collect(&all, &n_parts, &n_files, &bytes, w, err);
    if (status == KVB_OK) status = check_list(w, all, n_parts, context_ids_in_order, n, err);
    if (status == KVB_OK && !base_is_complete(w, n_files, context_ids_in_order, n))
        status = assemble(w, all, n_parts, bytes, context_ids_in_order, n, err);
    // The new record is in place, and was read back: only now are the parts worth nothing.
    if (status == KVB_OK) status = parts_remove(w->folder, err);
    free(all);
    h5_loud(before);
    return status;
}
