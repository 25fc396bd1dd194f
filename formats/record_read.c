// Reading a record: the whole structure is checked when it is opened, the numbers when they are read.
#include "formats/need.h"
#include "formats/record_internal.h"
#include "formats/sha256.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- Opening ----

static kvb_status scan_question(record *r, context_entry *c, hid_t questions, const char *name, kvb_error *err)
{
    char *end;
    unsigned long long number = name[0] >= '0' && name[0] <= '9' ? strtoull(name, &end, 10) : UINT64_MAX;
    if (number > UINT32_MAX || *end || (name[0] == '0' && name[1]))
        return h5_fail(err, KVB_FORMAT, r->path, questions, NULL, "expected numbers as names, found \"%.40s\"", name);
    record_question_info *q = &c->questions[c->info.n_questions++];
    hid_t group;
    q->number = (uint32_t)number;
    kvb_status status = h5_open_group(&group, &r->file, questions, name, err);
    if (status != KVB_OK) return status;
    status = h5_get_u32(&q->n_queries, &r->file, group, "n_queries", err);
    if (status == KVB_OK && q->n_queries == 0 && h5_has_link(group, "oracle"))
        status = h5_fail(err, KVB_FORMAT, r->path, group, "oracle", "exists although n_queries is 0");
    for (piece_kind kind = PIECE_SUFFIX; kind <= PIECE_PACKINGS && status == KVB_OK; kind++) {
        uint32_t *count = kind == PIECE_SUFFIX ? &q->n_suffix : kind == PIECE_ANSWER ? &q->n_answer : NULL;
        if (kind != PIECE_ORACLE || q->n_queries > 0)
            status = piece_scan(r, group, kind, c->info.n_tokens, count, NULL, err);
    }
    h5_release(group);
    return status;
}

static int compare_questions(const void *a, const void *b)
{
    const record_question_info *x = a, *y = b;
    return (x->number > y->number) - (x->number < y->number);
}

static kvb_status scan_questions(record *r, context_entry *c, hid_t context, kvb_error *err)
{
    hid_t questions;
    char **names = NULL;
    size_t n = 0;
    kvb_status status = h5_open_group(&questions, &r->file, context, "questions", err);
    if (status == KVB_OK) status = h5_list(&names, &n, &r->file, questions, err);
    c->questions = need(n, sizeof *c->questions, "questions");
    for (size_t i = 0; i < n && status == KVB_OK; i++) status = scan_question(r, c, questions, names[i], err);
    if (status == KVB_OK) qsort(c->questions, c->info.n_questions, sizeof *c->questions, compare_questions);
    c->info.questions = c->questions;
    h5_free_names(names);
    h5_release(questions);
    return status;
}

static kvb_status scan_context(record *r, hid_t contexts, const char *id, kvb_error *err)
{
    if (!context_id_valid(id))
        return h5_fail(err, KVB_FORMAT, r->path, contexts, NULL, "expected ids of " CONTEXT_ID_RULE ", found \"%.80s\"",
                       id);
    context_entry *c = &r->contexts[r->n++];
    hid_t context;
    c->id = need_text("%s", id);
    c->info.id = c->id;
    kvb_status status = h5_open_group(&context, &r->file, contexts, id, err);
    if (status != KVB_OK) return status;
    status = h5_get_u32(&c->order, &r->file, context, "order", err);
    if (status == KVB_OK) status = piece_scan(r, context, PIECE_TOKENS, 0, &c->info.n_tokens, NULL, err);
    if (status == KVB_OK) status = record_tokens_check(&r->shape, c->info.n_tokens, r->path, err);
    if (status == KVB_OK)
        status = piece_scan(r, context, PIECE_SCORES, c->info.n_tokens, &c->info.n_metrics, &c->metrics, err);
    c->info.metrics = (const char *const *)c->metrics;
    if (status == KVB_OK) status = scan_questions(r, c, context, err);
    h5_release(context);
    return status;
}

static int compare_order(const void *a, const void *b)
{
    const context_entry *x = a, *y = b;
    return (x->order > y->order) - (x->order < y->order);
}

static kvb_status scan_contexts(record *r, kvb_error *err)
{
    hid_t contexts;
    char **names = NULL;
    size_t n = 0;
    kvb_status status = h5_open_group(&contexts, &r->file, r->file.id, "contexts", err);
    if (status == KVB_OK) status = h5_list(&names, &n, &r->file, contexts, err);
    r->contexts = need(n, sizeof *r->contexts, "contexts");
    for (size_t i = 0; i < n && status == KVB_OK; i++) status = scan_context(r, contexts, names[i], err);
    if (status == KVB_OK) qsort(r->contexts, r->n, sizeof *r->contexts, compare_order);
    for (size_t i = 0; i < n && status == KVB_OK; i++) {
        if (r->contexts[i].order != i)
            status = h5_fail(err, KVB_FORMAT, r->path, contexts, r->contexts[i].id,
                             "attribute order: expected each of 0 to %zu once, found %u", n - 1, r->contexts[i].order);
    }
    h5_free_names(names);
    h5_release(contexts);
    return status;
}

static void close_quietly(record *r)
{
    for (size_t i = 0; i < r->n; i++) {
        free_all(r->contexts[i].id, r->contexts[i].questions);
        h5_free_names(r->contexts[i].metrics);
    }
    h5_close(&r->file);
    free(r->contexts);
    cJSON_Delete(r->attributes);
    free_all(r->path, r);
}

char *parts_path(const char *record_path)
{
    return need_text("%s.parts", record_path);
}

bool parts_have_head(const char *folder)
{
    char *head = need_text("%s/" RECORD_HEAD, folder);
    bool there = path_exists(head);
    free(head);
    return there;
}

static kvb_status explain_unfinished(const char *path, kvb_error *err)
{
    char *folder = parts_path(path);
    kvb_status status = KVB_OK;
    if (folder && !path_exists(path) && parts_have_head(folder))
        status = kvb_fail(err, KVB_IO,
                          "%s: the run that writes it is not finished (its parts are in %s); "
                          "continue with the same command and --resume",
                          path, folder);
    free(folder);
    return status;
}

kvb_status record_open(record **out, const char *path, kvb_error *err)
{
    *out = NULL;
    kvb_status status = explain_unfinished(path, err);
    if (status != KVB_OK) return status;
    record *r = need(1, sizeof *r, "records");
    r->path = need_text("%s", path);
    h5_error_printing before = h5_quiet();
    status = h5_open(&r->file, r->path, err);
    if (status == KVB_OK) status = record_root_read(&r->file, &r->shape, &r->attributes, err);
    if (status == KVB_OK) status = scan_contexts(r, err);
    if (status != KVB_OK) close_quietly(r);
    else *out = r;
    h5_loud(before);
    return status;
}

void record_close(record *r)
{
    if (!r) return;
    h5_error_printing before = h5_quiet();
    close_quietly(r);
    h5_loud(before);
}

// ---- What is in it ----

const char *record_path(const record *r)
{
    return r->path;
}

record_shape record_get_shape(const record *r)
{
    return r->shape;
}

const cJSON *record_attributes(const record *r)
{
    return r->attributes;
}

const char *record_text(const record *r, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(record_attributes(r), name);
    return cJSON_IsString(item) ? item->valuestring : "";
}

kvb_status record_file_sha256(const record *r, char out[65], kvb_error *err)
{
    kvb_status status = sha256_descriptor_hex(r->file.descriptor, r->path, out, err);
    return status == KVB_OK ? h5_unchanged(&r->file, err) : status;
}

size_t record_context_count(const record *r)
{
    return r->n;
}

const record_context_info *record_context(const record *r, size_t i)
{
    return i < r->n ? &r->contexts[i].info : NULL;
}

size_t record_find(const record *r, const char *id)
{
    size_t i = 0;
    while (i < r->n && strcmp(r->contexts[i].id, id) != 0) i++;
    return i;
}

const record_context_info *record_find_context(const record *r, const char *id)
{
    return record_context(r, record_find(r, id));
}

bool record_has_metric(const record_context_info *c, const char *metric)
{
    for (uint32_t i = 0; i < c->n_metrics; i++)
        if (strcmp(c->metrics[i], metric) == 0) return true;
    return false;
}

bool record_has_metrics(const record_context_info *c, const cJSON *metrics)
{
    const cJSON *one;
    cJSON_ArrayForEach(one, metrics)
    {
        if (!record_has_metric(c, one->string)) return false;
    }
    return true;
}

// Whether a question of a file has losses of this kind; NULL as `metric` stands for any metric.
static bool has_losses(const h5_file *f, const char *id, uint32_t number, piece_kind kind, const char *metric)
{
    h5_error_printing before = h5_quiet();
    hid_t question, group = -1;
    char **names = NULL;
    size_t n = 0;
    bool found = record_open_group(&question, f, id, &number, NULL) == KVB_OK &&
                 h5_has_link(question, record_pieces[kind].name) &&
                 h5_open_group(&group, f, question, record_pieces[kind].name, NULL) == KVB_OK;
    if (found && metric) found = metric_name_valid(metric) && h5_has_link(group, metric);
    else if (found) found = h5_list(&names, &n, f, group, NULL) == KVB_OK && n > 0;
    h5_free_names(names);
    h5_release(group);
    h5_release(question);
    h5_loud(before);
    return found;
}

static bool question_has(record *r, size_t i, size_t index, piece_kind kind, const char *metric)
{
    const record_context_info *c = record_context(r, i);
    return c && index < c->n_questions && has_losses(&r->file, c->id, c->questions[index].number, kind, metric);
}

bool record_has_curves(record *r, size_t i, size_t question_index, const char *metric)
{
    return question_has(r, i, question_index, PIECE_CURVES, metric);
}

bool record_has_gains(record *r, size_t i, size_t question_index)
{
    return question_has(r, i, question_index, PIECE_GAINS, RECORD_GAIN_ORDER);
}

bool record_has_packings(record *r, size_t i, size_t question_index)
{
    return question_has(r, i, question_index, PIECE_PACKINGS, RECORD_PACKING_KIND);
}

// ---- Arrays ----

static kvb_status no_metric(const record *r, const char *id, const uint32_t *number, piece_kind kind,
                            const char *metric, kvb_error *err)
{
    char question[32] = "";
    if (number) snprintf(question, sizeof question, ", question %u", *number);
    return kvb_fail(err, KVB_MISMATCH, "%s: context %s%s has no %s of metric %.128s; it was not profiled", r->path, id,
                    question, record_pieces[kind].name, metric);
}

// Reads from the group of a context or, with a number, of a question. Only pieces by metric need `metric`.
static kvb_status read_piece(const record *r, const record_context_info *c, const uint32_t *number, piece_kind kind,
                             const char *metric, uint32_t n_ids, void *out, kvb_error *err)
{
    const record_piece *p = &record_pieces[kind];
    h5_error_printing before = h5_quiet();
    hid_t group, arrays = -1;
    kvb_status status = record_open_group(&group, &r->file, c->id, number, err);
    if (status == KVB_OK && p->form == PIECE_IDS) {
        status = piece_read_ids(&r->file, group, p->name, n_ids, out, err);
    } else if (status == KVB_OK && p->form == PIECE_ARRAY) {
        status = piece_read_array(r, group, p->name, kind, c->n_tokens, out, err);
    } else if (status == KVB_OK) {
        if (h5_has_link(group, p->name)) status = h5_open_group(&arrays, &r->file, group, p->name, err);
        if (status == KVB_OK && !(arrays > 0 && metric_name_valid(metric) && h5_has_link(arrays, metric)))
            status = no_metric(r, c->id, number, kind, metric, err);
        if (status == KVB_OK) status = piece_read_array(r, arrays, metric, kind, c->n_tokens, out, err);
    }
    h5_release(arrays);
    h5_release(group);
    h5_loud(before);
    return status;
}

static kvb_status read_of_context(const record *r, size_t i, piece_kind kind, const char *metric, void *out,
                                  kvb_error *err)
{
    const record_context_info *c = record_context(r, i);
    if (!c) return kvb_fail(err, KVB_ARGUMENT, "%s: context %zu of %zu", r->path, i, r->n);
    return read_piece(r, c, NULL, kind, metric, c->n_tokens, out, err);
}

static kvb_status read_of_question(const record *r, size_t i, size_t index, piece_kind kind, const char *metric,
                                   void *out, kvb_error *err)
{
    const record_context_info *c = record_context(r, i);
    if (!c || index >= c->n_questions)
        return kvb_fail(err, KVB_ARGUMENT, "%s: context %zu of %zu: question %zu of %u", r->path, i, r->n, index,
                        c ? c->n_questions : 0);
    const record_question_info *q = &c->questions[index];
    if (kind == PIECE_ORACLE && q->n_queries == 0)
        return kvb_fail(err, KVB_ARGUMENT, "%s: context %s: question %u was skipped and has no oracle", r->path, c->id,
                        q->number);
    return read_piece(r, c, &q->number, kind, metric, kind == PIECE_SUFFIX ? q->n_suffix : q->n_answer, out, err);
}

kvb_status record_read_tokens(record *r, size_t i, int32_t *out, kvb_error *err)
{
    return read_of_context(r, i, PIECE_TOKENS, "", out, err);
}

kvb_status record_read_scores(record *r, size_t i, const char *metric, float *out, kvb_error *err)
{
    return read_of_context(r, i, PIECE_SCORES, metric, out, err);
}

kvb_status record_read_oracle(record *r, size_t i, size_t question_index, float *out, kvb_error *err)
{
    return read_of_question(r, i, question_index, PIECE_ORACLE, "", out, err);
}

kvb_status record_read_suffix(record *r, size_t i, size_t question_index, int32_t *out, kvb_error *err)
{
    return read_of_question(r, i, question_index, PIECE_SUFFIX, "", out, err);
}

kvb_status record_read_answer(record *r, size_t i, size_t question_index, int32_t *out, kvb_error *err)
{
    return read_of_question(r, i, question_index, PIECE_ANSWER, "", out, err);
}

kvb_status record_read_curves(record *r, size_t i, size_t question_index, const char *metric, float *out,
                              kvb_error *err)
{
    return read_of_question(r, i, question_index, PIECE_CURVES, metric, out, err);
}

kvb_status record_read_gains(record *r, size_t i, size_t question_index, float *out, kvb_error *err)
{
    return read_of_question(r, i, question_index, PIECE_GAINS, RECORD_GAIN_ORDER, out, err);
}

kvb_status record_read_packings(record *r, size_t i, size_t question_index, float *out, kvb_error *err)
{
    return read_of_question(r, i, question_index, PIECE_PACKINGS, RECORD_PACKING_KIND, out, err);
}
