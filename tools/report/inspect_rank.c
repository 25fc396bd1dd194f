#include "tools/report/inspect_rank.h"
#include "runtime/json.h"
#include "tools/report/weights_picture.h"
#include <math.h>
#include <string.h>

// Heads of layers with a window have weights of 0.
static bool is_ranked(const kvb_ranking_info *r, size_t head)
{
    bool ranked = false;
    for (uint32_t f = 0; f < weights_effects(r); f++) ranked |= weights_effect(r, head, f) > 0;
    return ranked;
}

// Mean over the heads of |w + w'| of every feature, and of |w_r|: what one deviation does; with layer_mean also of the
// features' means over a layer.
static void add_effects(cJSON *doc, const kvb_ranking_info *r)
{
    size_t heads = (size_t)r->n_layers * r->n_kv_heads, ranked = 0;
    for (size_t h = 0; h < heads; h++) ranked += is_ranked(r, h);
    cJSON *effects = cJSON_AddObjectToObject(doc, "mean_effect");
    for (uint32_t f = 0; f < weights_effects(r); f++) {
        char name[96];
        double sum = 0;
        for (size_t h = 0; h < heads; h++) sum += weights_effect(r, h, f);
        weights_effect_name(r, f, name, sizeof name);
        cJSON_AddNumberToObject(effects, name, ranked ? sum / (double)ranked : 0);
    }
}

kvb_status inspect_ranking(cJSON *doc, const char *path, kvb_error *err)
{
    kvb_ranking *ranking;
    cJSON *about = NULL;
    kvb_status status = kvb_ranking_open(&ranking, path, err);
    if (status != KVB_OK) return status;
    const kvb_ranking_info *r = kvb_ranking_about(ranking);
    cJSON_AddStringToObject(doc, "name", r->name);
    cJSON_AddStringToObject(doc, "model_sha256", r->model_sha256);
    cJSON_AddNumberToObject(doc, "n_layers", r->n_layers);
    cJSON_AddNumberToObject(doc, "n_kv_heads", r->n_kv_heads);
    add_effects(doc, r);
    status = kvb_json_object(&about, r->about, strlen(r->about), path, "metadata \"ranking\"", err);
    cJSON_AddItemToObject(doc, "ranking", about);
    kvb_ranking_close(ranking);
    return status;
}
