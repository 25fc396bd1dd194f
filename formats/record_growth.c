// Attributes of records of one model that become one.
#include "formats/record_growth.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "record_internal.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char metrics_name[] = "metrics", calibration_name[] = "calibration_sha256",
                  files_name[] = "calibration_files", given_name[] = "given_answers", limit_name[] = "max_questions";
// What one of two records may lack: a tokenizer where only ids were given, statistics where no metric needed any.
static const char *const may_lack[] = {"tokenizer_sha256", "query_statistics_sha256"};
enum { N_MAY_LACK = sizeof may_lack / sizeof *may_lack };

// "" where the attribute is not there.
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

// Takes `value`.
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

kvb_status record_set_calibration(cJSON *to, const char *files, kvb_error *err)
{
    size_t n = strlen(files), used = 0;
    char *digits = need(n + 1, 1, "characters"), hash[65];
    for (size_t i = 0; i < n; i++)
        if (files[i] != ',') digits[used++] = files[i];
    kvb_status status = KVB_OK;
    if (used == n) snprintf(hash, sizeof hash, "%s", files);
    else status = sha256_hex(digits, used, hash, err);
    free(digits);
    if (status != KVB_OK) return status;
    cJSON_DeleteItemFromObjectCaseSensitive(to, files_name);
    set_text(to, calibration_name, hash);
    if (used < n && n < MAX_TEXT_ATTRIBUTE) set_text(to, files_name, files);
    return KVB_OK;
}

// The list of a record's files; of one that does not say, what it says of all of them together.
static const char *files_of(const cJSON *attributes)
{
    const char *list = text_of(attributes, files_name);
    return *list ? list : text_of(attributes, calibration_name);
}

// Those of the second record that the first does not have come behind.
static kvb_status join_files(cJSON *to, const char *first, const char *second, kvb_error *err)
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
    kvb_status status = record_set_calibration(to, joined, err);
    free(joined);
    return status;
}

// How many files of `list` stand in `among`; *n receives how many there are.
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

static kvb_status join_texts(cJSON *to, const cJSON *first, const cJSON *second, record_relation relation,
                             kvb_error *err)
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
    if (!*files_of(first) || !*files_of(second)) return KVB_OK;
    if (relation == RECORD_ALL_TEXTS) return record_set_calibration(to, files_of(second), err);
    return join_files(to, files_of(first), files_of(second), err);
}

// ---- Which metrics ----

static kvb_status parse_metrics(cJSON **out, const char *name, const cJSON *attributes, kvb_error *err)
{
    const char *text = text_of(attributes, metrics_name);
    if (*text) return kvb_json_object(out, text, strlen(text), name, "attribute metrics", err);
    *out = cJSON_CreateObject();
    return KVB_OK;
}

// The settings as text, without what follows from the metric's name and what records of before therefore lack. Text,
// because cJSON_Compare calls numbers equal that differ in their last digits.
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
                            "%s and %s cannot be joined: metric %s has other settings in the one than in the other",
                            first_name, second_name, one->string);
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
    for (size_t i = 0; i < N_MAY_LACK; i++)
        if (!*text_of(copy, may_lack[i])) cJSON_DeleteItemFromObjectCaseSensitive(copy, may_lack[i]);
    return copy;
}

static kvb_status check_rest(const char *first_name, const cJSON *first, const char *second_name, const cJSON *second,
                             kvb_error *err)
{
    cJSON *a = fixed_part(first), *b = fixed_part(second);
    static const record_shape any = {0};
    root_difference d;
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < N_MAY_LACK; i++)
        if (!*text_of(a, may_lack[i]) || !*text_of(b, may_lack[i])) {
            cJSON_DeleteItemFromObjectCaseSensitive(a, may_lack[i]);
            cJSON_DeleteItemFromObjectCaseSensitive(b, may_lack[i]);
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
    for (size_t i = 0; i < N_MAY_LACK; i++)
        if (*text_of(second, may_lack[i]) && !*text_of(to, may_lack[i]))
            set_text(to, may_lack[i], text_of(second, may_lack[i]));
    status = join_texts(to, first, second, relation, err);
    if (status == KVB_OK) status = join_metrics(to, first_name, first, second_name, second, err);
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

const char *record_path(const record *r)
{
    return r->path;
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

// ---- Whole records ----

// Texts of different calibration files must have names of their own: one name would mean two things.
static kvb_status check_apart(const record *a, const record *b, kvb_error *err)
{
    for (size_t i = 0; i < b->n; i++)
        if (record_find_context(a, b->contexts[i].id))
            return kvb_fail(err, KVB_MISMATCH,
                            "%s and %s both have context %s, and none of their calibration files is the same; give "
                            "one of the texts another sample_id",
                            a->path, b->path, b->contexts[i].id);
    return KVB_OK;
}

// What the first `n_before` records are together stands in *attributes.
static kvb_status join_next(cJSON **attributes, const record *const *inputs, size_t n_before, kvb_error *err)
{
    const record *first = inputs[0], *next = inputs[n_before];
    root_difference d;
    record_relation relation;
    if (record_root_differs(&d, &first->shape, NULL, &next->shape, NULL))
        return kvb_fail(err, KVB_MISMATCH, "%s and %s cannot be joined: %s is %s in the first, %s in the second",
                        first->path, next->path, d.name, d.held, d.given);
    cJSON *joined = NULL;
    kvb_status status = record_relate(&relation, first->path, *attributes, next->path, next->attributes, err);
    for (size_t i = 0; relation == RECORD_NEW_TEXTS && status == KVB_OK && i < n_before; i++)
        status = check_apart(inputs[i], next, err);
    if (status == KVB_OK)
        status = record_join_attributes(&joined, first->path, *attributes, next->path, next->attributes, relation, err);
    if (status != KVB_OK) return status;
    cJSON_Delete(*attributes);
    *attributes = joined;
    return KVB_OK;
}

kvb_status record_join_records(cJSON **attributes, const record *const *inputs, size_t n, kvb_error *err)
{
    *attributes = cJSON_Duplicate(inputs[0]->attributes, true);
    kvb_status status = KVB_OK;
    for (size_t i = 1; i < n && status == KVB_OK; i++) status = join_next(attributes, inputs, i, err);
    if (status == KVB_OK) return KVB_OK;
    cJSON_Delete(*attributes);
    *attributes = NULL;
    return status;
}

// ---- Metrics ----

// Whether any of the records has scores of `metric` for context `id`.
static bool is_scored(const record *const *inputs, size_t n, const char *id, const char *metric)
{
    for (size_t i = 0; i < n; i++) {
        const record_context_info *c = record_find_context(inputs[i], id);
        if (c && record_has_metric(c, metric)) return true;
    }
    return false;
}

// Every metric that any context has, each once; the list is the caller's, its names belong to the records.
static const char **list_metrics(size_t *n_list, const record *const *inputs, size_t n)
{
    const char **list = NULL;
    *n_list = 0;
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < inputs[i]->n; k++) {
            const record_context_info *c = &inputs[i]->contexts[k].info;
            for (uint32_t m = 0; m < c->n_metrics; m++) {
                size_t seen = 0;
                while (seen < *n_list && strcmp(list[seen], c->metrics[m]) != 0) seen++;
                if (seen < *n_list) continue;
                list = need_more(list, *n_list + 1, sizeof *list, "names of metrics");
                list[(*n_list)++] = c->metrics[m];
            }
        }
    return list;
}

kvb_status record_check_metrics(const record *const *inputs, size_t n, kvb_error *err)
{
    size_t n_list;
    const char **list = list_metrics(&n_list, inputs, n);
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < n && status == KVB_OK; i++)
        for (size_t k = 0; k < inputs[i]->n && status == KVB_OK; k++) {
            const record_context_info *c = &inputs[i]->contexts[k].info;
            size_t m = 0;
            while (m < n_list && (record_has_metric(c, list[m]) || is_scored(inputs, n, c->id, list[m]))) m++;
            if (m < n_list)
                status = kvb_fail(err, KVB_MISMATCH,
                                  "%s: context %s has no scores of metric %s, which other contexts have; `kvbudget "
                                  "profile --add` adds them",
                                  inputs[i]->path, c->id, list[m]);
        }
    free(list);
    return status;
}
