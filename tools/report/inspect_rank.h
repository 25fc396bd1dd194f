// What `kvbudget inspect` shows of a learned ranking.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>

// Adds shape, what the ranking says of itself, and how much its heads weigh each feature on average. Errors: those of
// kvb_ranking_open().
kvb_status inspect_ranking(cJSON *doc, const char *path, kvb_error *err);
