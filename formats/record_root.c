#include "names.h"
#include "record_internal.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

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
