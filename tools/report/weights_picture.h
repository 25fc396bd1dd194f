// A picture of a learned ranking: which head uses which feature.
#pragma once
#include "runtime/kvbudget.h"
#include <stdio.h>

// One panel for each feature and for recency: layers go down, KV heads go right, the colour is the feature's share of
// what moves the head's scores. The effect of a feature is |w + w'|, what one deviation upwards does; that of recency
// |w_r|, since log(T - j) has a deviation of 1 whatever T. Leaves it to the caller to look at ferror(out). KVB_MEMORY.
kvb_status weights_svg(const kvb_ranking *ranking, FILE *out, kvb_error *err);
