// What a record says about one of its metrics: its protected tokens and its parameters. Tables get them from here only.
#pragma once
#include "formats/record.h"

typedef struct record_metric {
    uint32_t sink, window; // protected tokens: the first and the last ones
    char kin[32];          // the name that variants of one idea share: "snapkv"
    char *parameters;      // text of a JSON object; owned
    uint32_t refit;        // reference queries of a KV head if its curves are of refitted cuts, else 0
} record_metric;

// Reads a metric. Parameters: the record's object for the metric, or {}. Protected tokens: `protect_sink` and
// `protect_window` of that object, or by methods.md 2.8: 4 sinks, and the last token or SnapKV's observation window.
// `kin`: as the record says, or, in older records, the name up to its first ':' or '+'. Fails with KVB_FORMAT; *out is
// then zero.
kvb_status record_metric_read(record_metric *out, const record *r, const char *metric, kvb_error *err);
// The same for a learned ranking: its parameters are its features; its sinks and the last token are protected.
void record_metric_learned(record_metric *out, const kvb_ranking *ranking);
void record_metric_free(record_metric *m);
