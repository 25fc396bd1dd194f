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
    if (version->valuedouble != 1 && version->valuedouble != RECORD_FORMAT_VERSION)
        return kvb_fail(err, KVB_VERSION, "%s: record format %g, this program reads 1 and %d; use a newer kvbudget",
                        f->name, version->valuedouble, RECORD_FORMAT_VERSION);
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

// ---- Where things are ----

kvb_status record_open_context(hid_t *out, const h5_file *f, const char *id, kvb_error *err)
{
    hid_t contexts;
    *out = -1;
    kvb_status status = h5_open_group(&contexts, f, f->id, "contexts", err);
    if (status == KVB_OK) status = h5_open_group(out, f, contexts, id, err);
    h5_release(contexts);
    return status;
}

kvb_status record_open_question(hid_t *out, const h5_file *f, hid_t context, uint32_t number, kvb_error *err)
{
    char name[16];
    snprintf(name, sizeof name, "%u", number);
    hid_t questions;
    *out = -1;
    kvb_status status = h5_open_group(&questions, f, context, "questions", err);
    if (status == KVB_OK) status = h5_open_group(out, f, questions, name, err);
    h5_release(questions);
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

kvb_status record_root_compare(const record_shape *held_shape, const cJSON *held, const record_shape *given_shape,
                               const cJSON *given, const char *name, kvb_error *err)
{
    root_difference d;
    if (!record_root_differs(&d, held_shape, held, given_shape, given)) return KVB_OK;
    return kvb_fail(err, KVB_MISMATCH,
                    "%s: begun with %s = %s, now %s; give the same model and options or another name", name, d.name,
                    d.held, d.given);
}

// ---- Reading ----

// ---- Opening: the whole structure is checked, no array is read ----

static void dims_of(uint32_t dims[3], const record *r, const context_entry *c)
{
    dims[0] = r->shape.n_layers;
    dims[1] = r->shape.n_kv_heads;
    dims[2] = c->info.n_tokens;
}

static kvb_status scan_metrics(record *r, context_entry *c, hid_t context, kvb_error *err)
{
    uint32_t dims[3];
    dims_of(dims, r, c);
    hid_t scores;
    h5_set array;
    size_t n = 0;
    kvb_status status = h5_open_group(&scores, &r->file, context, "scores", err);
    if (status == KVB_OK) status = h5_list(&c->metrics, &n, &r->file, scores, err);
    for (size_t i = 0; i < n && status == KVB_OK; i++) {
        if (!metric_name_valid(c->metrics[i])) {
            status = h5_fail(err, KVB_FORMAT, r->path, scores, NULL,
                             "expected metric names of " METRIC_NAME_RULE ", found another");
            break;
        }
        status = h5_open_array(&array, &r->file, scores, c->metrics[i], dims, err);
        h5_close_set(&array);
    }
    h5_release(scores);
    c->info.metrics = (const char *const *)c->metrics;
    c->info.n_metrics = (uint32_t)n;
    return status;
}

static kvb_status scan_question(record *r, context_entry *c, hid_t questions, const char *name, kvb_error *err)
{
    char *end;
    unsigned long long number = name[0] >= '0' && name[0] <= '9' ? strtoull(name, &end, 10) : UINT64_MAX;
    if (number > UINT32_MAX || *end || (name[0] == '0' && name[1]))
        return h5_fail(err, KVB_FORMAT, r->path, questions, NULL, "expected numbers as names, found \"%.40s\"", name);
    record_question_info *q = &c->questions[c->info.n_questions++];
    uint32_t dims[3];
    dims_of(dims, r, c);
    hid_t group;
    h5_set set;
    q->number = (uint32_t)number;
    kvb_status status = h5_open_group(&group, &r->file, questions, name, err);
    if (status != KVB_OK) return status;
    status = h5_get_u32(&q->n_queries, &r->file, group, "n_queries", err);
    if (status == KVB_OK) {
        status = h5_open_ids(&set, &q->n_suffix, &r->file, group, "suffix_ids", err);
        h5_close_set(&set);
    }
    if (status == KVB_OK) {
        status = h5_open_ids(&set, &q->n_answer, &r->file, group, "answer_ids", err);
        h5_close_set(&set);
    }
    if (status == KVB_OK && q->n_queries > 0) {
        status = h5_open_array(&set, &r->file, group, "oracle", dims, err);
        h5_close_set(&set);
    } else if (status == KVB_OK && h5_has_link(group, "oracle")) {
        status = h5_fail(err, KVB_FORMAT, r->path, group, "oracle", "is there though n_queries is 0");
    }
    if (status == KVB_OK) status = record_scan_losses(r, group, err);
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
    if (status == KVB_OK) {
        c->questions = need(n, sizeof *c->questions, "questions");
    }
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
    h5_set tokens;
    c->id = need_text("%s", id);
    c->info.id = c->id;
    kvb_status status = h5_open_group(&context, &r->file, contexts, id, err);
    if (status != KVB_OK) return status;
    status = h5_get_u32(&c->order, &r->file, context, "order", err);
    if (status == KVB_OK) {
        status = h5_open_ids(&tokens, &c->info.n_tokens, &r->file, context, "token_ids", err);
        h5_close_set(&tokens);
    }
    if (status == KVB_OK) status = record_tokens_check(&r->shape, c->info.n_tokens, r->path, err);
    if (status == KVB_OK) status = scan_metrics(r, c, context, err);
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
    if (status == KVB_OK) {
        r->contexts = need(n, sizeof *r->contexts, "contexts");
    }
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
                          "%s: the run that writes it is not finished (what there is lies in %s); "
                          "go on with the same command and --resume",
                          path, folder);
    free(folder);
    return status;
}

static kvb_status open_record(record **out, const char *path, const void *data, size_t size, kvb_error *err)
{
    *out = NULL;
    record *r = need(1, sizeof *r, "records");
    r->path = need_text("%s", path);
    h5_error_printing before = h5_quiet();
    kvb_status status = data ? h5_open_memory(&r->file, data, size, r->path, err) : h5_open(&r->file, r->path, err);
    if (status == KVB_OK) status = load(r, err);
    if (status != KVB_OK) close_quietly(r);
    else *out = r;
    h5_loud(before);
    return status;
}

kvb_status record_open(record **out, const char *path, kvb_error *err)
{
    *out = NULL;
    kvb_status status = explain_unfinished(path, err);
    return status == KVB_OK ? open_record(out, path, NULL, 0, err) : status;
}

kvb_status record_open_memory(record **out, const void *data, size_t size, const char *name, kvb_error *err)
{
    *out = NULL;
    if (!data) return kvb_fail(err, KVB_ARGUMENT, "%s: no data", name);
    return open_record(out, name, data, size, err);
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

bool record_has_sums(const record *r)
{
    return r->file.sums;
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

// ---- Arrays ----

typedef enum array_kind { SCORES, ORACLE } array_kind;

// NULL, or what is wrong with x.
static const char *number_fault(array_kind kind, float x)
{
    if (isnan(x)) return "NaN";
    if (kind == ORACLE && isinf(x)) return "infinity";
    return kind == ORACLE && x < 0 ? "a negative oracle" : NULL;
}

static kvb_status read_array(const record *r, const context_entry *c, hid_t group, const char *name, array_kind kind,
                             float *out, kvb_error *err)
{
    uint32_t dims[3];
    dims_of(dims, r, c);
    size_t layer_size = (size_t)dims[1] * dims[2];
    h5_set array;
    kvb_status status = h5_open_array(&array, &r->file, group, name, dims, err);
    for (uint32_t l = 0; l < dims[0] && status == KVB_OK; l++) {
        float *layer = out + l * layer_size;
        status = h5_read_layer(&r->file, &array, layer, err);
        for (size_t i = 0; i < layer_size && status == KVB_OK; i++) {
            const char *fault = number_fault(kind, layer[i]);
            if (fault)
                status = h5_fail(err, KVB_NUMERIC, r->path, array.id, NULL, "layer %u, KV head %zu, token %zu: %s", l,
                                 i / dims[2], i % dims[2], fault);
        }
    }
    h5_close_set(&array);
    return status;
}

static kvb_status read_ids(const record *r, hid_t group, const char *name, uint32_t n, int32_t *out, kvb_error *err)
{
    h5_set ids;
    uint32_t found;
    kvb_status status = h5_open_ids(&ids, &found, &r->file, group, name, err);
    if (status == KVB_OK && found != n)
        status = h5_fail(err, KVB_FORMAT, r->path, group, name, "has changed while it was read");
    if (status == KVB_OK && n > 0) status = h5_read_ids(&r->file, &ids, out, err);
    h5_close_set(&ids);
    return status;
}

static kvb_status context_at(const context_entry **out, const record *r, size_t i, kvb_error *err)
{
    *out = i < r->n ? &r->contexts[i] : NULL;
    return *out ? KVB_OK : kvb_fail(err, KVB_ARGUMENT, "%s: context %zu of %zu", r->path, i, r->n);
}

kvb_status record_read_tokens(record *r, size_t i, int32_t *out, kvb_error *err)
{
    const context_entry *c;
    kvb_status status = context_at(&c, r, i, err);
    if (status != KVB_OK) return status;
    h5_error_printing before = h5_quiet();
    hid_t context;
    status = record_open_context(&context, &r->file, c->id, err);
    if (status == KVB_OK) status = read_ids(r, context, "token_ids", c->info.n_tokens, out, err);
    h5_release(context);
    h5_loud(before);
    return status;
}

kvb_status record_read_scores(record *r, size_t i, const char *metric, float *out, kvb_error *err)
{
    const context_entry *c;
    kvb_status status = context_at(&c, r, i, err);
    if (status != KVB_OK) return status;
    h5_error_printing before = h5_quiet();
    hid_t context, scores = -1;
    status = record_open_context(&context, &r->file, c->id, err);
    if (status == KVB_OK) status = h5_open_group(&scores, &r->file, context, "scores", err);
    if (status == KVB_OK && !(metric_name_valid(metric) && h5_has_link(scores, metric)))
        status = kvb_fail(err, KVB_MISMATCH, "%s: context %s has no scores of metric %.128s; it was not profiled",
                          r->path, c->id, metric);
    if (status == KVB_OK) status = read_array(r, c, scores, metric, SCORES, out, err);
    h5_release(scores);
    h5_release(context);
    h5_loud(before);
    return status;
}

typedef enum question_part { READ_ORACLE, READ_SUFFIX, READ_ANSWER } question_part;

static kvb_status read_question(record *r, size_t i, size_t index, question_part what, void *out, kvb_error *err)
{
    const context_entry *c;
    kvb_status status = context_at(&c, r, i, err);
    if (status != KVB_OK) return status;
    if (index >= c->info.n_questions)
        return kvb_fail(err, KVB_ARGUMENT, "%s: context %s: question %zu of %u", r->path, c->id, index,
                        c->info.n_questions);
    const record_question_info *q = &c->questions[index];
    if (what == READ_ORACLE && q->n_queries == 0)
        return kvb_fail(err, KVB_ARGUMENT, "%s: context %s: question %u was skipped and has no oracle", r->path, c->id,
                        q->number);
    h5_error_printing before = h5_quiet();
    hid_t context, group = -1;
    status = record_open_context(&context, &r->file, c->id, err);
    if (status == KVB_OK) status = record_open_question(&group, &r->file, context, q->number, err);
    if (status == KVB_OK) {
        if (what == READ_ORACLE) status = read_array(r, c, group, "oracle", ORACLE, out, err);
        else if (what == READ_SUFFIX) status = read_ids(r, group, "suffix_ids", q->n_suffix, out, err);
        else status = read_ids(r, group, "answer_ids", q->n_answer, out, err);
    }
    h5_release(group);
    h5_release(context);
    h5_loud(before);
    return status;
}

kvb_status record_read_oracle(record *r, size_t i, size_t question_index, float *out, kvb_error *err)
{
    return read_question(r, i, question_index, READ_ORACLE, out, err);
}

kvb_status record_read_suffix(record *r, size_t i, size_t question_index, int32_t *out, kvb_error *err)
{
    return read_question(r, i, question_index, READ_SUFFIX, out, err);
}

kvb_status record_read_answer(record *r, size_t i, size_t question_index, int32_t *out, kvb_error *err)
{
    return read_question(r, i, question_index, READ_ANSWER, out, err);
}
