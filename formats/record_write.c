#include "atomic_file.h"
#include "file_read.h"
#include "formats/need.h"
#include "names.h"
#include "record_internal.h"
#include "runtime/fail.h"
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Room for the HDF5 structures of one part, beside its arrays.
enum { PART_OVERHEAD = 1 << 16 };

// ---- Beginning ----

static kvb_status refuse_existing(const record_writer *w, kvb_error *err)
{
    if (parts_have_head(w->folder))
        return kvb_fail(err, KVB_MISMATCH,
                        "%s: holds a run that is not finished; go on with --resume, or start again with --force",
                        w->folder);
    if (path_exists(w->path))
        return kvb_fail(err, KVB_MISMATCH, "%s: exists; add to it with --resume, or replace it with --force", w->path);
    return KVB_OK;
}

static kvb_status write_head(const record_writer *w, const char *path, kvb_error *err)
{
    atomic_file out;
    h5_file f;
    kvb_status status = atomic_file_begin_own(&out, path, err);
    if (status != KVB_OK) return status;
    uint64_t bytes = PART_OVERHEAD;
    const cJSON *a;
    cJSON_ArrayForEach(a, w->attributes) bytes += 512 + (cJSON_IsString(a) ? strlen(a->valuestring) : 0);
    status = h5_create(&f, out.temp_path, path, bytes, err);
    if (status == KVB_OK) status = record_root_write(&f, &w->shape, w->attributes, err);
    status = h5_finish(&f, out.temp_path, status, err);
    if (status == KVB_OK) return atomic_file_commit(&out, err);
    atomic_file_abandon(&out);
    return status;
}

static kvb_status compare_head(const record_writer *w, const char *path, kvb_error *err)
{
    h5_file f;
    record_shape shape;
    cJSON *attributes = NULL;
    kvb_status status = h5_open(&f, path, err);
    if (status == KVB_OK) status = record_root_read(&f, &shape, &attributes, err);
    root_difference d;
    if (status == KVB_OK && w->adds && record_root_differs(&d, &shape, attributes, &w->shape, w->attributes))
        status =
            kvb_fail(err, KVB_MISMATCH,
                     "%s: holds an addition that was stopped, with %s = %s, now %s; give the command that began it, "
                     "or throw away what it has made with --add --force",
                     w->folder, d.name, d.held, d.given);
    else if (status == KVB_OK)
        status = record_root_compare(&shape, attributes, &w->shape, w->attributes, w->folder, err);
    cJSON_Delete(attributes);
    h5_close(&f);
    return status;
}

static kvb_status open_base(record_writer *w, kvb_error *err)
{
    if (!w->adds && !path_exists(w->path)) return KVB_OK;
    kvb_status status = record_open(&w->base, w->path, err);
    if (status == KVB_OK && w->adds) status = record_check_base(&w->metrics, w->base, w->attributes, err);
    if (status != KVB_OK || w->adds) return status;
    return record_root_compare(&w->base->shape, w->base->attributes, &w->shape, w->attributes, w->path, err);
}

// The process that holds the folder has made it, cleaned it, and decided whether it extends a finished record.
static kvb_status join(record_writer *w, kvb_error *err)
{
    char *head = parts_head_path(w->folder);
    kvb_status status = KVB_OK;
    if (!path_exists(head))
        status = kvb_fail(err, KVB_IO,
                          "%s: this process does not see the folder of the run; all processes need one file "
                          "system, or --shard and kvbudget merge",
                          w->folder);
    if (status == KVB_OK) status = compare_head(w, head, err);
    if (status == KVB_OK && !parts_replace(w->folder)) status = open_base(w, err);
    free(head);
    return status;
}

static kvb_status begin(record_writer *w, record_start start, kvb_error *err)
{
    if (w->joined) return join(w, err);
    // Looked at before the folder is made, so that a refusal leaves nothing behind, and again when no one else can
    // write.
    kvb_status status = atomic_file_check(w->path, err);
    if (status == KVB_OK && start == RECORD_NEW) status = refuse_existing(w, err);
    if (status == KVB_OK) status = parts_lock(&w->lock, w->folder, err);
    if (status == KVB_OK && start == RECORD_NEW) status = refuse_existing(w, err);
    if (status == KVB_OK && start == RECORD_ADD_ANEW) status = parts_clear(w->folder, err);
    if (status == KVB_OK && w->adds && parts_replace(w->folder))
        status = kvb_fail(err, KVB_MISMATCH,
                          "%s: holds a run that replaces the record; end that first, with --resume, or throw away what "
                          "it has made with --add --force",
                          w->folder);
    if (status == KVB_OK) atomic_file_remove_stale(w->path);
    if (status == KVB_OK && start == RECORD_REPLACE) {
        status = parts_clear(w->folder, err);
        if (status == KVB_OK) status = parts_mark_replace(w->folder, err);
    }
    if (status == KVB_OK && !parts_replace(w->folder)) status = open_base(w, err);
    char *head = parts_head_path(w->folder);
    if (status == KVB_OK) status = path_exists(head) ? compare_head(w, head, err) : write_head(w, head, err);
    if (w->lock >= 0 && status != KVB_OK && !parts_have_head(w->folder))
        (void)parts_remove(w->folder, NULL); // nothing was there
    free(head);
    return status;
}

kvb_status record_begin(record_writer **out, const char *path, const record_shape *shape, const cJSON *attributes,
                        record_start start, kvb_error *err)
{
    *out = NULL;
    kvb_status status = record_shape_check(shape, path, err);
    if (status == KVB_OK) status = record_attributes_check(attributes, path, err);
    if (status != KVB_OK) {
        if (err)
            err->status = KVB_ARGUMENT; // the shape's check is shared with the reader, where it is the file's fault
        return KVB_ARGUMENT;
    }
    record_writer *w = need(1, sizeof *w, "writers");
    w->lock = -1;
    w->joined = start == RECORD_JOIN || start == RECORD_ADD_JOIN;
    w->adds = start == RECORD_ADD || start == RECORD_ADD_ANEW || start == RECORD_ADD_JOIN;
    w->shape = *shape;
    w->path = need_text("%s", path);
    w->folder = parts_path(path);
    w->attributes = attributes ? cJSON_Duplicate(attributes, 1) : cJSON_CreateObject();
    h5_error_printing before = h5_quiet();
    status = w->attributes ? begin(w, start, err) : kvb_fail(err, KVB_MEMORY, "%s: not enough memory", path);
    h5_loud(before);
    if (status == KVB_OK) *out = w;
    else record_writer_free(w);
    return status;
}

void record_writer_free(record_writer *w)
{
    if (!w) return;
    record_close(w->base);
    cJSON_Delete(w->metrics);
    if (w->lock >= 0) (void)file_close(w->lock); // unlocks; nothing was written through it
    cJSON_Delete(w->attributes);
    free(w->folder);
    free(w->path);
    free(w);
}

kvb_status record_writer_set_deflate(record_writer *w, int level, kvb_error *err)
{
    if (level < 0 || level > 9) return kvb_fail(err, KVB_ARGUMENT, "deflate level %d, expected 0 to 9", level);
    w->deflate = level;
    return KVB_OK;
}

// ---- What is there ----

static const record_context_info *find_in_base(const record_writer *w, const char *id)
{
    return w->base ? record_find_context(w->base, id) : NULL;
}

static bool has_part(const record_writer *w, const char *id, bool is_question, uint32_t question)
{
    return context_id_valid(id) && part_exists(w->folder, id, is_question, question);
}

bool record_writer_has_context(const record_writer *w, const char *id)
{
    const record_context_info *c = find_in_base(w, id);
    return has_part(w, id, false, 0) || (c && record_has_metrics(c, w->metrics));
}

bool record_writer_has_question(const record_writer *w, const char *id, uint32_t question)
{
    if (has_part(w, id, true, question)) return true;
    const record_context_info *c = find_in_base(w, id);
    for (uint32_t i = 0; c && i < c->n_questions; i++) {
        if (c->questions[i].number == question) return true;
    }
    return false;
}

char *record_writer_kept_path(const record_writer *w, const char *id)
{
    return context_id_valid(id) ? parts_kept_path(w->folder, id) : NULL;
}

// ---- Putting ----

kvb_status part_begin(part_file *p, char *path, const char *id, uint64_t bytes, kvb_error *err)
{
    *p = (part_file){.h5 = {.id = -1}, .contexts = -1, .context = -1, .path = path};
    kvb_status status = atomic_file_begin_own(&p->out, p->path, err);
    if (status == KVB_OK) status = h5_create(&p->h5, p->out.temp_path, p->path, bytes + PART_OVERHEAD, err);
    if (status == KVB_OK) status = h5_put_u32(&p->h5, p->h5.id, "format_version", RECORD_FORMAT_VERSION, err);
    if (status == KVB_OK) status = h5_make_group(&p->contexts, &p->h5, p->h5.id, "contexts", err);
    if (status == KVB_OK) status = h5_make_group(&p->context, &p->h5, p->contexts, id, err);
    return status;
}

// Finishes a part whose contents were written with `status`; removes it when that is no success.
kvb_status part_end(part_file *p, kvb_status status, kvb_error *err)
{
    status = h5_end(&p->h5, p->context, status, err);
    status = h5_end(&p->h5, p->contexts, status, err);
    if (p->h5.tally) status = h5_finish(&p->h5, p->out.temp_path, status, err);
    if (status == KVB_OK) status = atomic_file_commit(&p->out, err);
    else atomic_file_abandon(&p->out);
    free(p->path);
    return status;
}

static kvb_status write_array(const record_writer *w, const h5_file *f, hid_t group, const char *name,
                              uint32_t n_tokens, const float *data, kvb_error *err)
{
    uint32_t dims[3] = {w->shape.n_layers, w->shape.n_kv_heads, n_tokens};
    h5_set array;
    kvb_status status = h5_make_array(&array, f, group, name, dims, 0, false, err);
    for (uint32_t l = 0; l < dims[0] && status == KVB_OK; l++)
        status = h5_write_layer(f, &array, data + (size_t)l * dims[1] * dims[2], err);
    return h5_end_array(f, &array, NULL, status, err);
}

// Bytes of one [L,G,T] array and of what HDF5 keeps about it.
static uint64_t array_bytes(const record_writer *w, uint64_t n_tokens)
{
    return (w->shape.n_kv_heads * n_tokens * sizeof(float) + 64) * w->shape.n_layers + 8192;
}

static kvb_status check_ids(const char *path, const char *id, const char *what, const int32_t *ids, uint32_t n,
                            kvb_error *err)
{
    if (n > 0 && !ids) return kvb_fail(err, KVB_ARGUMENT, "%s: context %s: %s is NULL", path, id, what);
    for (uint32_t i = 0; i < n; i++) {
        if (ids[i] < -1)
            return kvb_fail(err, KVB_ARGUMENT, "%s: context %s: %s %u is %d, expected a token id", path, id, what, i,
                            ids[i]);
    }
    return KVB_OK;
}

static kvb_status check_metrics(const record_writer *w, const char *id, uint32_t n_tokens, const char *const *metrics,
                                const float *const *scores, size_t n_metrics, kvb_error *err)
{
    size_t count = (size_t)w->shape.n_layers * w->shape.n_kv_heads * n_tokens;
    for (size_t m = 0; m < n_metrics; m++) {
        if (!metric_name_valid(metrics[m]))
            return kvb_fail(err, KVB_ARGUMENT, "%s: metric \"%.130s\": expected " METRIC_NAME_RULE, w->path,
                            metrics[m]);
        for (size_t k = 0; k < m; k++) {
            if (strcmp(metrics[k], metrics[m]) == 0)
                return kvb_fail(err, KVB_ARGUMENT, "%s: metric %s is given twice", w->path, metrics[m]);
        }
        for (size_t i = 0; i < count; i++) {
            if (isnan(scores[m][i]))
                return kvb_fail(err, KVB_NUMERIC, "%s: context %s: metric %s: layer %zu, KV head %zu, token %zu: NaN",
                                w->path, id, metrics[m], i / n_tokens / w->shape.n_kv_heads,
                                i / n_tokens % w->shape.n_kv_heads, i % n_tokens);
        }
    }
    return KVB_OK;
}

static kvb_status check_id(const record_writer *w, const char *id, kvb_error *err)
{
    if (context_id_valid(id)) return KVB_OK;
    return kvb_fail(err, KVB_ARGUMENT, "%s: context id \"%.80s\": expected " CONTEXT_ID_RULE, w->path, id);
}

kvb_status record_put_context(record_writer *w, const char *id, const int32_t *token_ids, uint32_t n_tokens,
                              const char *const *metrics, const float *const *scores, size_t n_metrics, kvb_error *err)
{
    kvb_status status = check_id(w, id, err);
    if (status == KVB_OK) status = record_tokens_check(&w->shape, n_tokens, w->path, err);
    if (status == KVB_OK) status = check_ids(w->path, id, "token", token_ids, n_tokens, err);
    if (status == KVB_OK) status = check_metrics(w, id, n_tokens, metrics, scores, n_metrics, err);
    if (status != KVB_OK) return status;
    h5_error_printing before = h5_quiet();
    part_file p;
    hid_t group = -1;
    status = part_begin(&p, part_path(w->folder, id, false, 0), id,
                        n_metrics * array_bytes(w, n_tokens) + n_tokens * sizeof(int32_t), err);
    if (status == KVB_OK) status = h5_write_ids(&p.h5, p.context, "token_ids", token_ids, n_tokens, err);
    if (status == KVB_OK) status = h5_make_group(&group, &p.h5, p.context, "scores", err);
    for (size_t m = 0; m < n_metrics && status == KVB_OK; m++)
        status = write_array(w, &p.h5, group, metrics[m], n_tokens, scores[m], err);
    status = h5_end(&p.h5, group, status, err);
    status = part_end(&p, status, err);
    h5_loud(before);
    return status;
}

kvb_status record_n_tokens(uint32_t *out, const record_writer *w, const char *id, kvb_error *err)
{
    const record_context_info *c = find_in_base(w, id);
    char *path = part_path(w->folder, id, false, 0);
    kvb_status status = KVB_OK;
    if (path_exists(path)) {
        h5_file f;
        hid_t context = -1;
        h5_set ids = {.id = -1};
        status = h5_open(&f, path, err);
        if (status == KVB_OK) status = record_open_context(&context, &f, id, err);
        if (status == KVB_OK) status = h5_open_ids(&ids, out, &f, context, "token_ids", err);
        h5_close_set(&ids);
        h5_release(context);
        h5_close(&f);
    } else if (c) {
        *out = c->n_tokens;
    } else {
        status = kvb_fail(err, KVB_ARGUMENT, "%s: context %s must be put before its questions", w->path, id);
    }
    free(path);
    return status;
}

static kvb_status check_question(const record_writer *w, const char *id, uint32_t question, const record_question *q,
                                 uint32_t n_tokens, kvb_error *err)
{
    if ((q->n_queries == 0) != (q->oracle == NULL))
        return kvb_fail(err, KVB_ARGUMENT, "%s: context %s: question %u: %u queries %s oracle", w->path, id, question,
                        q->n_queries, q->oracle ? "and an" : "but no");
    size_t count = q->oracle ? (size_t)w->shape.n_layers * w->shape.n_kv_heads * n_tokens : 0;
    for (size_t i = 0; i < count; i++) {
        if (!(q->oracle[i] >= 0 && q->oracle[i] <= 3.4028234663852886e38F))
            return kvb_fail(err, KVB_NUMERIC,
                            "%s: context %s: question %u: layer %zu, KV head %zu, token %zu: oracle is %g, expected a "
                            "finite number >= 0",
                            w->path, id, question, i / n_tokens / w->shape.n_kv_heads,
                            i / n_tokens % w->shape.n_kv_heads, i % n_tokens, (double)q->oracle[i]);
    }
    kvb_status status = check_ids(w->path, id, "suffix token", q->suffix_ids, q->n_suffix, err);
    return status == KVB_OK ? check_ids(w->path, id, "answer token", q->answer_ids, q->n_answer, err) : status;
}

static kvb_status write_question(const record_writer *w, const part_file *p, uint32_t question,
                                 const record_question *q, uint32_t n_tokens, kvb_error *err)
{
    char name[16];
    snprintf(name, sizeof name, "%u", question);
    hid_t questions, group = -1;
    kvb_status status = h5_make_group(&questions, &p->h5, p->context, "questions", err);
    if (status == KVB_OK) status = h5_make_group(&group, &p->h5, questions, name, err);
    if (status == KVB_OK) status = h5_put_u32(&p->h5, group, "n_queries", q->n_queries, err);
    if (status == KVB_OK) status = h5_write_ids(&p->h5, group, "suffix_ids", q->suffix_ids, q->n_suffix, err);
    if (status == KVB_OK) status = h5_write_ids(&p->h5, group, "answer_ids", q->answer_ids, q->n_answer, err);
    if (status == KVB_OK && q->oracle) status = write_array(w, &p->h5, group, "oracle", n_tokens, q->oracle, err);
    status = h5_end(&p->h5, group, status, err);
    return h5_end(&p->h5, questions, status, err);
}

kvb_status record_put_question(record_writer *w, const char *id, uint32_t question, const record_question *q,
                               kvb_error *err)
{
    kvb_status status = check_id(w, id, err);
    if (status != KVB_OK) return status;
    h5_error_printing before = h5_quiet();
    uint32_t n_tokens = 0;
    status = record_n_tokens(&n_tokens, w, id, err);
    if (status == KVB_OK) status = check_question(w, id, question, q, n_tokens, err);
    if (status == KVB_OK) {
        part_file p;
        uint64_t ids = ((uint64_t)q->n_suffix + q->n_answer) * sizeof(int32_t);
        status = part_begin(&p, part_path(w->folder, id, true, question), id,
                            (q->oracle ? array_bytes(w, n_tokens) : 0) + ids, err);
        if (status == KVB_OK) status = write_question(w, &p, question, q, n_tokens, err);
        status = part_end(&p, status, err);
    }
    h5_loud(before);
    return status;
}
