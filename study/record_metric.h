// What a record says of one of its metrics: which tokens stay whatever their score, and its parameters. The one place
// where tables learn of them.
#pragma once
#include "formats/record.h"

typedef struct record_metric {
    uint32_t sink, window; // protected tokens: the first and the last ones
    double cost;           // what an engine pays for its scores (formats/README.md)
    char kin[32];          // the name that forms of one idea share: "snapkv"
    char *parameters;      // text of a JSON object; owned
} record_metric;

// Of metrics whose cost a record does not tell, as records of before do not, so that all of these cost the same.
#define RECORD_COST_UNKNOWN 1

// Parameters: the record's object for the metric, {} where it has none. Protected tokens: `protect_sink` and
// `protect_window` of that object; else methods.md 2.8: 4 sinks, and the last token or SnapKV's observation window.
// `kin`: as the record says; of records of before the name up to its first ':' or '+'. Errors: KVB_FORMAT; then *out is
// zero.
kvb_status record_metric_read(record_metric *out, const record *r, const char *metric, kvb_error *err);
// The same for a learned ranking: its features, its sinks, and the last token.
void record_metric_learned(record_metric *out, const kvb_ranking *ranking);
void record_metric_free(record_metric *m);
