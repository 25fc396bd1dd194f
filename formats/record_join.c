// Whether whole records can be one: the same model and options, different texts or different metrics of the same ones.
#include "formats/record_growth.h"
#include "record_internal.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

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
    if (!*attributes) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory", inputs[0]->path);
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

// Every metric that any context has, each once; *list is the caller's, its names belong to the records.
static kvb_status list_metrics(const char ***list, size_t *n_list, const record *const *inputs, size_t n,
                               kvb_error *err)
{
    *n_list = 0;
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < inputs[i]->n; k++) {
            const record_context_info *c = &inputs[i]->contexts[k].info;
            for (uint32_t m = 0; m < c->n_metrics; m++) {
                size_t seen = 0;
                while (seen < *n_list && strcmp((*list)[seen], c->metrics[m]) != 0) seen++;
                if (seen < *n_list) continue;
                const char **larger = reallocarray(*list, *n_list + 1, sizeof *larger);
                if (!larger) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for the metrics", inputs[i]->path);
                *list = larger;
                larger[(*n_list)++] = c->metrics[m];
            }
        }
    return KVB_OK;
}

kvb_status record_check_metrics(const record *const *inputs, size_t n, kvb_error *err)
{
    const char **list = NULL;
    size_t n_list;
    kvb_status status = list_metrics(&list, &n_list, inputs, n, err);
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
