// Adds to a JSON document what `kvbudget inspect` says about a learned ranking.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>

// Adds its name, shape and description, and the mean effect of every feature over its heads. Errors: those of
// kvb_ranking_open().
kvb_status inspect_ranking(cJSON *doc, const char *path, kvb_error *err);
