#include "tools/report/inspect_files.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "runtime/json.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Counts what moves a head's scores: the features, with layer_mean their means over the layer's heads, and recency.
static uint32_t count_effects(const kvb_ranking_info *r)
{
    return (r->layer_mean ? 2 : 1) * r->n_features + 1;
}

// Returns effect i of a head, l * G + g: of a feature |w + w'|, what one standard deviation upwards does; of a mean
// |u|; of recency |w_r|, since log(T - j) has a standard deviation of about 1 for any T.
static double effect_of(const kvb_ranking_info *r, size_t head, uint32_t i)
{
    const double *w = r->weights + head * r->n_columns;
    if (i < r->n_features) return fabs(w[2 * i] + w[2 * i + 1]);
    return fabs(i + 1 < count_effects(r) ? w[r->n_features + i] : w[r->n_columns - 2]);
}

// Adds the mean of every effect over the heads that are ranked: those of layers with a window have weights of 0.
static void add_effects(cJSON *doc, const kvb_ranking_info *r)
{
    size_t heads = (size_t)r->n_layers * r->n_kv_heads, ranked = 0;
    uint32_t n = count_effects(r), F = r->n_features;
    double *sum = need(n, sizeof *sum, "effects");
    for (size_t h = 0; h < heads; h++) {
        bool any = false;
        for (uint32_t i = 0; i < n; i++) {
            sum[i] += effect_of(r, h, i);
            any |= effect_of(r, h, i) > 0;
        }
        ranked += any;
    }
    cJSON *effects = cJSON_AddObjectToObject(doc, "mean_effect");
    for (uint32_t i = 0; i < n; i++) {
        char name[96];
        bool of_layer = i >= F && i + 1 < n;
        snprintf(name, sizeof name, "%s%s", of_layer ? "layer's " : "",
                 i < F      ? r->metrics[i]
                 : of_layer ? r->metrics[i - F]
                            : "recency");
        cJSON_AddNumberToObject(effects, name, ranked ? sum[i] / (double)ranked : 0);
    }
    free(sum);
}

kvb_status inspect_ranking(cJSON *doc, const char *path, kvb_error *err)
{
    kvb_ranking *ranking;
    cJSON *about = NULL;
    kvb_status status = kvb_ranking_open(&ranking, path, err);
    if (status != KVB_OK) return status;
    const kvb_ranking_info *r = kvb_ranking_about(ranking);
    json_put(doc, "name %s model_sha256 %s n_layers %u n_kv_heads %u", r->name, r->model_sha256, r->n_layers,
             r->n_kv_heads);
    add_effects(doc, r);
    status = kvb_json_object(&about, r->about, strlen(r->about), path, "metadata \"ranking\"", err);
    cJSON_AddItemToObject(doc, "ranking", about);
    kvb_ranking_close(ranking);
    return status;
}
