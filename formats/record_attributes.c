// A record's root: its shape and attributes, checked, written, read and compared; and the attributes of two records of
// one model that become one.
#include "formats/names.h"
#include "formats/need.h"
#include "formats/record_growth.h"
#include "formats/record_internal.h"
#include "formats/sha256.h"
#include "runtime/fail.h"
#include "runtime/json.h"
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

// Quotes two texts from a little before they part, as long ones may differ only beyond what a message can hold.
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

// cJSON_Compare will not do: it calls numbers equal that differ in their last bits.
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

// ---- Joining: names of attributes of which two records of one model may differ ----

static const char metrics_name[] = "metrics", calibration_name[] = "calibration_sha256",
                  files_name[] = "calibration_files", given_name[] = "given_answers", limit_name[] = "max_questions";
// One of two records may lack it, if only token ids were given.
static const char tokenizer_name[] = "tokenizer_sha256";

// Returns "" if the attribute is not there.
static const char *text_of(const cJSON *attributes, const char *name)
{
    const cJSON *a = cJSON_GetObjectItemCaseSensitive(attributes, name);
    return cJSON_IsString(a) ? a->valuestring : "";
}

static double number_of(const cJSON *attributes, const char *name)
{
    const cJSON *a = cJSON_GetObjectItemCaseSensitive(attributes, name);
    return cJSON_IsNumber(a) ? a->valuedouble : 0;
}

// Takes ownership of `value`.
static void set(cJSON *to, const char *name, cJSON *value)
{
    cJSON_DeleteItemFromObjectCaseSensitive(to, name);
    cJSON_AddItemToObject(to, name, value);
}

static void set_text(cJSON *to, const char *name, const char *text)
{
    set(to, name, cJSON_CreateString(text));
}

// ---- Which texts ----

void record_set_calibration(cJSON *to, const char *files)
{
    size_t n = strlen(files), used = 0;
    char *digits = need(n + 1, 1, "characters"), hash[65];
    for (size_t i = 0; i < n; i++)
        if (files[i] != ',') digits[used++] = files[i];
    if (used == n) snprintf(hash, sizeof hash, "%s", files);
    else sha256_hex(digits, used, hash);
    free(digits);
    cJSON_DeleteItemFromObjectCaseSensitive(to, files_name);
    set_text(to, calibration_name, hash);
    if (used < n && n < MAX_TEXT_ATTRIBUTE) set_text(to, files_name, files);
}

// Returns the list of a record's files or, if it does not say, the one hash that it has for all of them together.
static const char *files_of(const cJSON *attributes)
{
    const char *list = text_of(attributes, files_name);
    return *list ? list : text_of(attributes, calibration_name);
}

// The first record's files, then those that only the second one has.
static void join_files(cJSON *to, const char *first, const char *second)
{
    enum { DIGITS = 64 };
    size_t size = strlen(first) + strlen(second) + 2;
    char *joined = need(size, 1, "characters");
    memcpy(joined, first, strlen(first) + 1);
    for (const char *at = second; *at; at += *at == ',') {
        char one[DIGITS + 1];
        size_t n = strcspn(at, ",");
        snprintf(one, sizeof one, "%.*s", (int)(n < DIGITS ? n : DIGITS), at);
        size_t used = strlen(joined);
        if (!strstr(joined, one)) snprintf(joined + used, size - used, "%s%s", used ? "," : "", one);
        at += n;
    }
    record_set_calibration(to, joined);
    free(joined);
}

// How many files of `list` are in `among`; *n receives how many there are.
static size_t count_shared(size_t *n, const char *list, const char *among)
{
    size_t shared = 0;
    *n = 0;
    for (const char *at = list; *at; at += *at == ',') {
        size_t length = strcspn(at, ",");
        shared += memmem(among, strlen(among), at, length) != NULL;
        *n += 1;
        at += length;
    }
    return shared;
}

kvb_status record_relate(record_relation *out, const char *first_name, const cJSON *first, const char *second_name,
                         const cJSON *second, kvb_error *err)
{
    size_t n_first, n_second, of_second = count_shared(&n_second, files_of(second), files_of(first)),
                              of_first = count_shared(&n_first, files_of(first), files_of(second));
    *out = of_second == 0 && n_second ? RECORD_NEW_TEXTS : RECORD_SAME_TEXTS;
    if (of_second == 0 || of_second == n_second || of_first == n_first) return KVB_OK;
    return kvb_fail(err, KVB_MISMATCH,
                    "%s and %s cannot be joined: %zu of %zu calibration files of the second are among the %zu of the "
                    "first; join records of the same texts or of different ones",
                    first_name, second_name, of_second, n_second, n_first);
}

static void join_texts(cJSON *to, const cJSON *first, const cJSON *second, record_relation relation)
{
    double given[2] = {number_of(first, given_name), number_of(second, given_name)},
           limit[2] = {number_of(first, limit_name), number_of(second, limit_name)};
    double both = limit[0] == 0 || limit[1] == 0 ? 0 : limit[0] > limit[1] ? limit[0] : limit[1];
    if (relation == RECORD_ALL_TEXTS) given[0] = given[1], both = limit[1];
    else if (relation == RECORD_NEW_TEXTS) given[0] += given[1];
    else if (given[1] > given[0]) given[0] = given[1];
    const cJSON *has_given = cJSON_GetObjectItemCaseSensitive(first, given_name),
                *has_limit = cJSON_GetObjectItemCaseSensitive(first, limit_name);
    if (has_given) set(to, given_name, cJSON_CreateNumber(given[0]));
    if (has_limit) set(to, limit_name, cJSON_CreateNumber(both));
    if (!*files_of(first) || !*files_of(second)) return;
    if (relation == RECORD_ALL_TEXTS) record_set_calibration(to, files_of(second));
    else join_files(to, files_of(first), files_of(second));
}

// ---- Which metrics ----

static kvb_status parse_metrics(cJSON **out, const char *name, const cJSON *attributes, kvb_error *err)
{
    const char *text = text_of(attributes, metrics_name);
    if (*text) return kvb_json_object(out, text, strlen(text), name, "attribute metrics", err);
    *out = cJSON_CreateObject();
    return KVB_OK;
}

// The settings as text, without what follows from the metric's name: records of some versions lack it. Text, because
// cJSON_Compare calls numbers equal that differ in their last digits.
static char *settings_text(const cJSON *settings)
{
    cJSON *copy = cJSON_Duplicate(settings, true);
    cJSON_DeleteItemFromObjectCaseSensitive(copy, "cost");
    cJSON_DeleteItemFromObjectCaseSensitive(copy, "kin");
    char *text = cJSON_PrintUnformatted(copy);
    cJSON_Delete(copy);
    return text;
}

static bool same_settings(const cJSON *a, const cJSON *b)
{
    char *x = settings_text(a), *y = settings_text(b);
    bool same = strcmp(x, y) == 0;
    cJSON_free(y);
    cJSON_free(x);
    return same;
}

// Adds to `all`, the metrics of the first record, those that only the second has.
static kvb_status add_metrics(cJSON *all, const char *first_name, const cJSON *more, const char *second_name,
                              kvb_error *err)
{
    const cJSON *one;
    cJSON_ArrayForEach(one, more)
    {
        const cJSON *held = cJSON_GetObjectItemCaseSensitive(all, one->string);
        if (!held) set(all, one->string, cJSON_Duplicate(one, true));
        else if (!same_settings(held, one))
            return kvb_fail(err, KVB_MISMATCH,
                            "%s and %s cannot be joined: metric %s has different settings in the two", first_name,
                            second_name, one->string);
    }
    return KVB_OK;
}

static kvb_status join_metrics(cJSON *to, const char *first_name, const cJSON *first, const char *second_name,
                               const cJSON *second, kvb_error *err)
{
    if (!*text_of(first, metrics_name) && !*text_of(second, metrics_name)) return KVB_OK;
    cJSON *all = NULL, *more = NULL;
    kvb_status status = parse_metrics(&all, first_name, first, err);
    if (status == KVB_OK) status = parse_metrics(&more, second_name, second, err);
    if (status == KVB_OK) status = add_metrics(all, first_name, more, second_name, err);
    if (status == KVB_OK) {
        char *text = cJSON_PrintUnformatted(all);
        set_text(to, metrics_name, text);
        cJSON_free(text);
    }
    cJSON_Delete(more);
    cJSON_Delete(all);
    return status;
}

// ---- Everything else ----

// A copy without what may differ. Weight files may have other names: model_sha256 says whether they are the same.
static cJSON *fixed_part(const cJSON *attributes)
{
    static const char *const growing[] = {metrics_name, calibration_name, files_name,
                                          given_name,   limit_name,       "model_files"};
    cJSON *copy = cJSON_Duplicate(attributes, true);
    for (size_t i = 0; i < sizeof growing / sizeof *growing; i++)
        cJSON_DeleteItemFromObjectCaseSensitive(copy, growing[i]);
    if (!*text_of(copy, tokenizer_name)) cJSON_DeleteItemFromObjectCaseSensitive(copy, tokenizer_name);
    return copy;
}

static kvb_status check_rest(const char *first_name, const cJSON *first, const char *second_name, const cJSON *second,
                             kvb_error *err)
{
    cJSON *a = fixed_part(first), *b = fixed_part(second);
    static const record_shape any = {0};
    root_difference d;
    kvb_status status = KVB_OK;
    if (!*text_of(a, tokenizer_name) || !*text_of(b, tokenizer_name)) {
        cJSON_DeleteItemFromObjectCaseSensitive(a, tokenizer_name);
        cJSON_DeleteItemFromObjectCaseSensitive(b, tokenizer_name);
    }
    if (record_root_differs(&d, &any, a, &any, b))
        status = kvb_fail(err, KVB_MISMATCH,
                          "%s and %s cannot be joined: %s is %s in the first, %s in the second; a record has one model "
                          "and one set of options",
                          first_name, second_name, d.name, d.held, d.given);
    cJSON_Delete(b);
    cJSON_Delete(a);
    return status;
}

kvb_status record_join_attributes(cJSON **out, const char *first_name, const cJSON *first, const char *second_name,
                                  const cJSON *second, record_relation relation, kvb_error *err)
{
    *out = NULL;
    kvb_status status = check_rest(first_name, first, second_name, second, err);
    if (status != KVB_OK) return status;
    cJSON *to = cJSON_Duplicate(first, true);
    if (*text_of(second, tokenizer_name) && !*text_of(to, tokenizer_name))
        set_text(to, tokenizer_name, text_of(second, tokenizer_name));
    join_texts(to, first, second, relation);
    status = join_metrics(to, first_name, first, second_name, second, err);
    if (status == KVB_OK) *out = to;
    else cJSON_Delete(to);
    return status;
}

// ---- Adding to a finished record ----

kvb_status record_check_base(cJSON **metrics, const record *base, const cJSON *attributes, kvb_error *err)
{
    cJSON *joined = NULL;
    *metrics = NULL;
    kvb_status status = record_join_attributes(&joined, base->path, base->attributes, "what is added", attributes,
                                               RECORD_SAME_TEXTS, err);
    if (status == KVB_OK && strcmp(text_of(joined, metrics_name), text_of(attributes, metrics_name)) != 0)
        status = kvb_fail(err, KVB_MISMATCH, "%s: has other metrics than when this run was begun; begin it again",
                          base->path);
    cJSON_Delete(joined);
    return status == KVB_OK ? parse_metrics(metrics, base->path, attributes, err) : status;
}
