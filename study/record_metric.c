#include "study/record_metric.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include "study/selection.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Finds the metric's object in the root attribute `metrics`. *out is the caller's, or NULL if there is none.
static kvb_status find_parameters(cJSON **out, const record *r, const char *metric, kvb_error *err)
{
    const char *text = record_text(r, "metrics");
    cJSON *all;
    *out = NULL;
    if (!*text) return KVB_OK;
    kvb_status status = kvb_json_object(&all, text, strlen(text), "record", "metrics", err);
    if (status == KVB_OK) *out = cJSON_DetachItemFromObjectCaseSensitive(all, metric);
    cJSON_Delete(all);
    return status;
}

// Reads a whole number. Leaves *out as it is if there is no such parameter.
static kvb_status read_count(const cJSON *parameters, const char *metric, const char *key, uint32_t *out,
                             kvb_error *err)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(parameters, key);
    if (!item) return KVB_OK;
    double value = cJSON_IsNumber(item) ? item->valuedouble : -1;
    if (!(value >= 0 && value <= UINT32_MAX / 4) || value != (double)(uint32_t)value)
        return kvb_fail(err, KVB_FORMAT, "record: metric %s: %s: expected a whole number", metric, key);
    *out = (uint32_t)value;
    return KVB_OK;
}

// Sets the name that variants of one idea share: "snapkv" for "snapkv:kvpress".
static void take_kin(record_metric *out, const cJSON *parameters, const char *metric)
{
    const char *kin = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(parameters, "kin"));
    if (!kin) kin = metric;
    snprintf(out->kin, sizeof out->kin, "%.*s", (int)strcspn(kin, ":+"), kin);
}

kvb_status record_metric_read(record_metric *out, const record *r, const char *metric, kvb_error *err)
{
    cJSON *parameters;
    *out = (record_metric){.sink = 4, .window = 1};
    kvb_status status = find_parameters(&parameters, r, metric, err);
    take_kin(out, parameters, metric);
    if (strcmp(out->kin, "snapkv") == 0) out->window = 32; // its observation window is protected
    if (status == KVB_OK && out->window > 1) status = read_count(parameters, metric, "window", &out->window, err);
    if (status == KVB_OK) status = read_count(parameters, metric, "protect_sink", &out->sink, err);
    if (status == KVB_OK) status = read_count(parameters, metric, "protect_window", &out->window, err);
    if (status == KVB_OK) status = read_count(parameters, metric, "refit", &out->refit, err);
    if (status == KVB_OK)
        out->parameters = cJSON_IsObject(parameters) ? cJSON_PrintUnformatted(parameters) : need_text("{}");
    cJSON_Delete(parameters);
    if (status != KVB_OK) *out = (record_metric){0};
    return status;
}

void record_metric_learned(record_metric *out, const kvb_ranking *ranking)
{
    const kvb_ranking_info *r = kvb_ranking_about(ranking);
    cJSON *o = cJSON_CreateObject(), *features = cJSON_AddArrayToObject(o, "features");
    json_put(o, "protect_sink %u protect_window %u", r->sink, 1);
    for (uint32_t f = 0; f < r->n_features; f++) cJSON_AddItemToArray(features, cJSON_CreateString(r->metrics[f]));
    *out = (record_metric){.sink = r->sink, .window = 1, .kin = "learned", .parameters = cJSON_PrintUnformatted(o)};
    cJSON_Delete(o);
}

void record_metric_free(record_metric *m)
{
    free(m->parameters);
    *m = (record_metric){0};
}
