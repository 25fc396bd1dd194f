// What a record says of one of its metrics: which tokens stay whatever their score, and its parameters. The one place
// where tables learn of them.
#pragma once
#include "formats/record.h"

typedef struct record_metric {
    uint32_t sink, window; // protected tokens: the first and the last ones
    double cost;           // what an engine pays for the scores (metric_cost in profiler/metric/scorer.h)
    char *parameters;      // text of a JSON object; owned
} record_metric;

// Parameters: the record's object for the metric, {} where it has none. Protected tokens: `protect_sink` and
// `protect_window` of that object; else methods.md 2.8: 4 sinks, and the last token or SnapKV's observation window.
// Cost: `cost` of that object; 1 where the record does not say it, so that such metrics cost the same.
// Errors: KVB_MEMORY; then *out is zero.
kvb_status record_metric_read(record_metric *out, const record *r, const char *metric, kvb_error *err);
// The same for a learned ranking: its features, its sinks, and the last token. KVB_MEMORY; then *out is zero.
kvb_status record_metric_learned(record_metric *out, const kvb_ranking *ranking, kvb_error *err);
void record_metric_free(record_metric *m);
