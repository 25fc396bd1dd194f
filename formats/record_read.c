#include "formats/need.h"
#include "names.h"
#include "record_internal.h"
#include "runtime/fail.h"
#include "sha256.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- The root: shape and attributes ----

static const char *const shape_names[] = {"n_layers", "n_heads", "n_kv_heads", "head_dim"};
enum { SHAPE_FIELDS = 4 };

static void shape_to_array(uint32_t out[SHAPE_FIELDS], const record_shape *s)
{
    memcpy(out, (uint32_t[SHAPE_FIELDS]){s->n_layers, s->n_heads, s->n_kv_heads, s->head_dim},
           SHAPE_FIELDS * sizeof *out);
}

// Far above any model, and small enough that no product of them with a 32-bit token count overflows 64 bits.
enum { MAX_LAYERS = 4096, MAX_HEADS = 65536, MAX_HEAD_DIM = 65536 };

kvb_status record_shape_check(const record_shape *s, const char *name, kvb_error *err)
{
    if (s->n_layers < 1 || s->n_layers > MAX_LAYERS || s->n_kv_heads < 1 || s->n_kv_heads > MAX_HEADS ||
        s->n_heads > MAX_HEADS || s->head_dim > MAX_HEAD_DIM)
        return kvb_fail(err, KVB_FORMAT, "%s: impossible shape: %u layers, %u heads, %u KV heads, head size %u", name,
                        s->n_layers, s->n_heads, s->n_kv_heads, s->head_dim);
    if (s->n_heads % s->n_kv_heads != 0)
        return kvb_fail(err, KVB_FORMAT, "%s: %u heads are no multiple of %u KV heads", name, s->n_heads,
                        s->n_kv_heads);
    return KVB_OK;
}

kvb_status record_tokens_check(const record_shape *s, uint64_t n_tokens, const char *name, kvb_error *err)
{
    if (n_tokens == 0) return kvb_fail(err, KVB_FORMAT, "%s: the context has no tokens", name);
    if (n_tokens > UINT32_MAX / sizeof(float) / s->n_kv_heads)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: %llu tokens of %u KV heads are 4 GiB or more per layer", name,
                        (unsigned long long)n_tokens, s->n_kv_heads);
    return KVB_OK;
}

static bool is_reserved(const char *name)
{
    for (int i = 0; i < SHAPE_FIELDS; i++) {
        if (strcmp(name, shape_names[i]) == 0) return true;
    }
    return strcmp(name, "format") == 0 || strcmp(name, "format_version") == 0;
}

kvb_status record_attributes_check(const cJSON *attributes, const char *name, kvb_error *err)
{
    if (!attributes) return KVB_OK;
    if (!cJSON_IsObject(attributes))
        return kvb_fail(err, KVB_ARGUMENT, "%s: the attributes are not a JSON object", name);
    const cJSON *a;
    cJSON_ArrayForEach(a, attributes)
    {
        if (!context_id_valid(a->string) || is_reserved(a->string))
            return kvb_fail(err, KVB_ARGUMENT,
                            "%s: attribute \"%.80s\": expected a name of " CONTEXT_ID_RULE
                            " that the format does not use itself",
                            name, a->string);
        if (cJSON_IsNumber(a) ? !isfinite(a->valuedouble) : !cJSON_IsString(a) && !cJSON_IsBool(a))
            return kvb_fail(err, KVB_ARGUMENT, "%s: attribute %s: expected a string, a finite number or a boolean",
                            name, a->string);
        if (cJSON_GetObjectItemCaseSensitive(attributes, a->string) != a)
            return kvb_fail(err, KVB_ARGUMENT, "%s: attribute %s: is given twice", name, a->string);
        if (cJSON_IsString(a) && strlen(a->valuestring) >= MAX_TEXT_ATTRIBUTE)
            return kvb_fail(err, KVB_ARGUMENT, "%s: attribute %s: text of 1 MiB or more", name, a->string);
    }
    return KVB_OK;
}

kvb_status record_root_write(const h5_file *f, const record_shape *shape, const cJSON *attributes, kvb_error *err)
{
    uint32_t fields[SHAPE_FIELDS];
    shape_to_array(fields, shape);
    kvb_status status = h5_put_text(f, f->id, "format", RECORD_FORMAT, err);
    if (status == KVB_OK) status = h5_put_u32(f, f->id, "format_version", RECORD_FORMAT_VERSION, err);
    for (int i = 0; i < SHAPE_FIELDS && status == KVB_OK; i++)
        status = h5_put_u32(f, f->id, shape_names[i], fields[i], err);
    // By name, so that the order in which a caller builds the object leaves no trace in the bytes.
    const cJSON *last = NULL;
    for (;;) {
        const cJSON *next = NULL, *a;
        cJSON_ArrayForEach(a, attributes)
        {
            if ((!last || strcmp(a->string, last->string) > 0) && (!next || strcmp(a->string, next->string) < 0))
                next = a;
        }
        if (!next || status != KVB_OK) return status;
        status = h5_put_json(f, f->id, next, err);
        last = next;
    }
}

static kvb_status check_format(const h5_file *f, const cJSON *attributes, kvb_error *err)
{
    const cJSON *format = cJSON_GetObjectItemCaseSensitive(attributes, "format");
    const cJSON *version = cJSON_GetObjectItemCaseSensitive(attributes, "format_version");
    if (!cJSON_IsString(format) || strcmp(format->valuestring, RECORD_FORMAT) != 0)
        return kvb_fail(err, KVB_FORMAT, "%s: attribute format: expected \"%s\", found %s%.60s", f->name, RECORD_FORMAT,
                        cJSON_IsString(format) ? "" : "none",
                        cJSON_IsString(format) ? format->valuestring : ": some other HDF5 file?");
    if (!cJSON_IsNumber(version) || version->valuedouble < 1)
        return kvb_fail(err, KVB_FORMAT, "%s: attribute format_version: expected %d", f->name, RECORD_FORMAT_VERSION);
    if (version->valuedouble != RECORD_FORMAT_VERSION)
        return kvb_fail(err, KVB_VERSION, "%s: record format %g, this program reads %d; %s", f->name,
                        version->valuedouble, RECORD_FORMAT_VERSION,
                        version->valuedouble < RECORD_FORMAT_VERSION ? "profile again" : "use a newer kvbudget");
    return KVB_OK;
}

kvb_status record_root_read(const h5_file *f, record_shape *shape, cJSON **attributes, kvb_error *err)
{
    uint32_t fields[SHAPE_FIELDS] = {0};
    kvb_status status = h5_get_json(attributes, f, f->id, err);
    if (status != KVB_OK) return status;
    status = check_format(f, *attributes, err);
    for (int i = 0; i < SHAPE_FIELDS && status == KVB_OK; i++) {
        status = h5_get_u32(&fields[i], f, f->id, shape_names[i], err);
        cJSON_DeleteItemFromObjectCaseSensitive(*attributes, shape_names[i]);
    }
    *shape = (record_shape){fields[0], fields[1], fields[2], fields[3]};
    if (status == KVB_OK) status = record_shape_check(shape, f->name, err);
    cJSON_DeleteItemFromObjectCaseSensitive(*attributes, "format");
    cJSON_DeleteItemFromObjectCaseSensitive(*attributes, "format_version");
    if (status == KVB_OK) return KVB_OK;
    cJSON_Delete(*attributes);
    *attributes = NULL;
    return status;
}

// ---- Comparing ----

static void describe(char *out, size_t size, const cJSON *value)
{
    if (!value) snprintf(out, size, "nothing");
    else if (cJSON_IsString(value)) snprintf(out, size, "\"%.70s\"", value->valuestring);
    else if (cJSON_IsNumber(value)) snprintf(out, size, "%.17g", value->valuedouble);
    else snprintf(out, size, "%s", cJSON_IsTrue(value) ? "true" : "false");
}

// Two texts from a little before where they part, since long ones may differ only behind what a message can hold.
static void describe_texts(root_difference *out, const char *held, const char *given)
{
    enum { BEFORE = 24 };
    size_t same = 0;
    while (held[same] && held[same] == given[same]) same++;
    size_t from = same > BEFORE ? same - BEFORE : 0;
    const char *dots = from ? "..." : "";
    snprintf(out->held, sizeof out->held, "\"%s%.70s\"", dots, held + from);
    snprintf(out->given, sizeof out->given, "\"%s%.70s\"", dots, given + from);
}

// cJSON_Compare calls numbers equal that differ in their last bits.
static bool same_value(const cJSON *a, const cJSON *b)
{
    if (!a || !b) return a == b;
    if (cJSON_IsString(a)) return cJSON_IsString(b) && strcmp(a->valuestring, b->valuestring) == 0;
    if (cJSON_IsNumber(a)) return cJSON_IsNumber(b) && a->valuedouble == b->valuedouble;
    return cJSON_IsBool(b) && cJSON_IsTrue(a) == cJSON_IsTrue(b);
}

bool record_root_differs(root_difference *out, const record_shape *held_shape, const cJSON *held,
                         const record_shape *given_shape, const cJSON *given)
{
    uint32_t a[SHAPE_FIELDS], b[SHAPE_FIELDS];
    shape_to_array(a, held_shape);
    shape_to_array(b, given_shape);
    for (int i = 0; i < SHAPE_FIELDS; i++) {
        if (a[i] == b[i]) continue;
        snprintf(out->name, sizeof out->name, "%s", shape_names[i]);
        snprintf(out->held, sizeof out->held, "%u", a[i]);
        snprintf(out->given, sizeof out->given, "%u", b[i]);
        return true;
    }
    const cJSON *sides[] = {held, given}, *item;
    for (int side = 0; side < 2; side++) {
        cJSON_ArrayForEach(item, sides[side])
        {
            const cJSON *other = cJSON_GetObjectItemCaseSensitive(sides[1 - side], item->string);
            if (same_value(item, other)) continue;
            snprintf(out->name, sizeof out->name, "%s", item->string);
            describe(out->held, sizeof out->held, side == 0 ? item : other);
            describe(out->given, sizeof out->given, side == 0 ? other : item);
            if (cJSON_IsString(item) && cJSON_IsString(other)) // both sides have it, so it is found on the first
                describe_texts(out, item->valuestring, other->valuestring);
            return true;
        }
    }
    return false;
}

// ---- Opening: the whole structure is checked, no array is read ----

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
    for (piece_kind kind = PIECE_SUFFIX; kind <= PIECE_GAINS && status == KVB_OK; kind++) {
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

static kvb_status load(record *r, kvb_error *err)
{
    kvb_status status = record_root_read(&r->file, &r->shape, &r->attributes, err);
    return status == KVB_OK ? scan_contexts(r, err) : status;
}

static void close_quietly(record *r)
{
    for (size_t i = 0; i < r->n; i++) {
        free(r->contexts[i].id);
        free(r->contexts[i].questions);
        h5_free_names(r->contexts[i].metrics);
    }
    h5_close(&r->file);
    free(r->contexts);
    cJSON_Delete(r->attributes);
    free(r->path);
    free(r);
}

static kvb_status explain_unfinished(const char *path, kvb_error *err)
{
    char *folder = parts_path(path);
    kvb_status status = KVB_OK;
    if (folder && !path_exists(path) && parts_have_head(folder))
        status = kvb_fail(err, KVB_IO,
                          "%s: the run that writes it is not finished (its parts are in %s); "
                          "go on with the same command and --resume",
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
    if (status == KVB_OK) status = load(r, err);
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

record_shape record_get_shape(const record *r)
{
    return r->shape;
}

const cJSON *record_attributes(const record *r)
{
    return r->attributes;
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

const record_context_info *record_find_context(const record *r, const char *id)
{
    for (size_t i = 0; i < r->n; i++) {
        if (strcmp(r->contexts[i].id, id) == 0) return &r->contexts[i].info;
    }
    return NULL;
}

// Whether a question of a file has losses of this kind; `metric` NULL: of any.
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

// ---- Arrays ----

static kvb_status no_metric(const record *r, const char *id, const uint32_t *number, piece_kind kind,
                            const char *metric, kvb_error *err)
{
    char question[32] = "";
    if (number) snprintf(question, sizeof question, ", question %u", *number);
    return kvb_fail(err, KVB_MISMATCH, "%s: context %s%s has no %s of metric %.128s; it was not profiled", r->path, id,
                    question, record_pieces[kind].name, metric);
}

// From the group of a context, or of a question where a number is given; `metric` counts where there is one.
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
