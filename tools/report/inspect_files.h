// What `kvbudget inspect` says of a learned ranking: it is added to a JSON document.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>

// Shape, what the ranking says of itself, and how much its heads weigh each feature on average. Errors: those of
// kvb_ranking_open().
kvb_status inspect_ranking(cJSON *doc, const char *path, kvb_error *err);
