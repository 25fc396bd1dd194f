// What a fitted ranking says of itself, and its file.
#include "study/layer_map.h"
#include "study/learn_parts.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void add_features(cJSON *about, const learned *l)
{
    cJSON *list = cJSON_AddArrayToObject(about, "features");
    for (uint32_t f = 0; f < l->n_features; f++) {
        cJSON *one = cJSON_CreateObject();
        cJSON_AddItemToArray(list, one);
        cJSON_AddStringToObject(one, "metric", l->from->metrics[l->feature[f]]);
        cJSON_AddBoolToObject(one, "log", l->logarithm[l->feature[f]]);
    }
}

// Not a context that was recorded before under another name.
static bool first_of_text(const learned *l, size_t k)
{
    size_t first = 0;
    while (strcmp(l->contexts[first], l->contexts[k]) != 0) first++;
    return first == k;
}

// Which texts each fold has left out; a text is named once, however often it was recorded.
static void add_folds(cJSON *about, const learned *l)
{
    cJSON *list = cJSON_AddArrayToObject(about, "folds");
    for (uint32_t fold = 0; fold < l->n_folds; fold++) {
        cJSON *one = cJSON_CreateArray();
        cJSON_AddItemToArray(list, one);
        for (size_t k = 0; k < l->from->n_contexts; k++)
            if (l->fold[k] == fold && first_of_text(l, k))
                cJSON_AddItemToArray(one, cJSON_CreateString(l->contexts[k]));
    }
}

static void add_fit(cJSON *about, const learned *l)
{
    const learn_trial *t = &l->trials[l->chosen];
    cJSON *losses = cJSON_AddObjectToObject(about, "held_out_loss");
    cJSON_AddNumberToObject(about, "sink", l->options.sink);
    cJSON_AddBoolToObject(about, "layer_mean", l->options.layer_mean);
    cJSON_AddStringToObject(about, "target", l->options.target == TARGET_MAX ? "max" : "mean");
    cJSON_AddNumberToObject(about, "lambda", t->lambda);
    cJSON_AddNumberToObject(about, "exponent", t->exponent);
    for (int r = 0; r < LEARN_RATIOS; r++) {
        char key[16];
        snprintf(key, sizeof key, "%g", LEARN_RATIO[r]);
        cJSON_AddNumberToObject(losses, key, t->loss[r]);
    }
}

static void add_origin(cJSON *m, const learned *l, const char *record_sha256)
{
    static const char *const copied[] = {"architecture", "model_id", "model_sha256", "tokenizer_sha256",
                                         "calibration_sha256"};
    cJSON_AddStringToObject(m, "tool_version", KVBUDGET_VERSION);
    cJSON_AddStringToObject(m, "record_sha256", record_sha256);
    for (size_t i = 0; i < sizeof copied / sizeof *copied; i++)
        cJSON_AddStringToObject(m, copied[i], record_text(l->from->r, copied[i]));
}

static kvb_status write_named(const char *path, rank_content *content, cJSON *about, const cJSON *origin, char name[24],
                              kvb_error *err)
{
    char *text = cJSON_PrintUnformatted(about);
    content->about = text;
    char *named = rank_name(name, content);
    content->about = named;
    kvb_status status = rank_write(path, content, origin, err);
    cJSON_free(text);
    free(named);
    return status;
}

// Weights of all of the model's layers: of those that the record leaves out they are 0, since nothing is ranked there.
static kvb_status write_spread(const learned *l, const char *path, cJSON *about, const cJSON *origin, char name[24],
                               kvb_error *err)
{
    layer_map layers;
    double *weights = NULL;
    uint32_t heads = record_get_shape(l->from->r).n_kv_heads,
             columns = learn_columns(l->n_features, l->options.layer_mean);
    kvb_status status = layer_map_read(&layers, l->from->r, err);
    if (status == KVB_OK) weights = layer_map_spread(&layers, l->weights, 1 + l->n_folds, (size_t)heads * columns);
    rank_content content = {l->n_folds, layers.n_layers, heads, columns, weights, NULL};
    if (status == KVB_OK) status = write_named(path, &content, about, origin, name, err);
    free(weights);
    layer_map_free(&layers);
    return status;
}

kvb_status learn_write(const learned *l, const char *path, char name[24], kvb_error *err)
{
    char sha256[65];
    cJSON *about = cJSON_CreateObject(), *origin = cJSON_CreateObject();
    kvb_status status = record_file_sha256(l->from->r, sha256, err);
    if (status == KVB_OK) {
        add_features(about, l);
        add_folds(about, l);
        add_fit(about, l);
        add_origin(origin, l, sha256);
        status = write_spread(l, path, about, origin, name, err);
    }
    cJSON_Delete(about);
    cJSON_Delete(origin);
    return status;
}
