#include "study/layer_losses.h"
#include "formats/need.h"
#include "study/layer_map.h"
#include <math.h>
#include <stdlib.h>

void layer_losses_free(layer_losses *l)
{
    free_all(l->layer, l->gain, l->loss);
    *l = (layer_losses){0};
}

// Adds one question's losses, multiplied by `share`, its part of the mean.
static void add_pair(layer_losses *out, const loss_curves *c, double share, double ratio)
{
    uint32_t G = c->shape.n_kv_heads, kept = (uint32_t)rint((1 - ratio) * c->shape.n_tokens);
    for (uint32_t l = 0; l < out->n_layers; l++)
        for (uint32_t g = 0; g < G; g++) out->loss[l] += share * loss_at(c, l * G + g, kept);
}

static kvb_status read_pairs(layer_losses *out, const pair_set *pairs, const study_options *o, const layer_map *layers,
                             double ratio, kvb_error *err)
{
    out->n_layers = pairs->longest.n_layers;
    out->layer = need(out->n_layers, sizeof *out->layer, "layers");
    out->gain = need(out->n_layers, sizeof *out->gain, "layers");
    out->loss = need(out->n_layers, sizeof *out->loss, "losses of layers");
    for (uint32_t l = 0; l < layers->n_layers; l++) {
        uint32_t place = layer_map_place(layers, l);
        if (place != UINT32_MAX) out->layer[place] = l;
    }
    for (uint32_t l = 0; l < out->n_layers; l++) out->gain[l] = pairs->gain[l];
    pair_walk w = pair_walk_open(pairs, study_solve_options(o), 0, NULL);
    while (pair_walk_next(&w, err)) add_pair(out, &w.problem.curves, 1.0 / pairs->n_pairs, ratio);
    return pair_walk_close(&w);
}

kvb_status layer_losses_read(layer_losses *out, const char *path, const char *metric, double ratio, kvb_error *err)
{
    selection from = {0};
    pair_set pairs = {0};
    layer_map layers = {0};
    study_options o = study_options_make();
    const selection_request wanted = {.metrics = &metric, .n_metrics = 1, .max_questions = UINT64_MAX};
    *out = (layer_losses){0};
    o.loss = LOSS_OUTPUT;
    kvb_status status = selection_open(&from, path, &wanted, err);
    if (status == KVB_OK) status = pairs_open(&pairs, &from, from.metrics[0], &o, err);
    if (status == KVB_OK) status = layer_map_read(&layers, from.r, err);
    if (status == KVB_OK) status = read_pairs(out, &pairs, &o, &layers, ratio, err);
    layer_map_free(&layers);
    pairs_close(&pairs);
    selection_close(&from);
    return status;
}
