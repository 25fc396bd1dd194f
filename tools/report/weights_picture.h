// A picture of a learned ranking: which head uses which feature.
#pragma once
#include "runtime/kvbudget.h"
#include <stdio.h>

// What moves a head's scores: the features, with layer_mean their means over the layer's heads, and recency. The effect
// of a feature is |w + w'|, what one deviation upwards does; that of a mean |u|, that of recency |w_r|, since log(T -
// j) has a deviation of 1 whatever T. `i` counts from 0, `head` is l * G + g.
uint32_t weights_effects(const kvb_ranking_info *r);
double weights_effect(const kvb_ranking_info *r, size_t head, uint32_t i);
void weights_effect_name(const kvb_ranking_info *r, uint32_t i, char *out, size_t size);

// One panel for each of them: layers go down, KV heads go right, the colour is its share of what moves the head's
// scores. Leaves it to the caller to look at ferror(out).
void weights_svg(const kvb_ranking *ranking, FILE *out);
