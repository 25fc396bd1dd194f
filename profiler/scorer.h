// Eviction metrics: one file scorer_<name>.c each, declared in the table of scorer.c.
//
// A scorer turns one layer's activations into s [G,T], higher = keep. Rankings must not depend on a budget (nested), so that one
// recording serves every compression ratio. A metric is written `name:variant[:parameter=value...]`, e.g. `snapkv:kvpress:window=32`.
#pragma once
#include "profiler/observe.h"
#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>

enum { SCORER_MAX_PARAMETERS = 8, METRIC_MAX = 96 };

typedef struct scorer_parameter {
    const char *name;
    double value, low, high;
    bool integer;
    const char *meaning;
} scorer_parameter;

typedef struct metric metric;

typedef struct scorer {
    const char *name;    // "snapkv"
    const char *variant; // "lukv", "kvpress", or "" for the only one
    const char *summary;
    unsigned needs; // view_items that score() reads
    uint32_t protect_sink,
        protect_window; // defaults of the protected set P (methods.md 2.8); UINT32_MAX: the parameter `window`
    scorer_parameter parameters[SCORER_MAX_PARAMETERS]; // ended by a NULL name
    // Writes s [G,T]; s holds only finite numbers afterwards or the status says why not. Needs T > the window or the sinks it asks for.
    kvb_status (*score)(const metric *m, const layer_view *view, float *s, kvb_error *err);
} scorer;

// A scorer with its parameters set.
struct metric {
    const scorer *kind;
    char spec[METRIC_MAX]; // canonical text: name[:variant] and the parameters that differ from the variant's defaults
    double values[SCORER_MAX_PARAMETERS];
};

extern const scorer scorer_list[];
extern const size_t scorer_count;

// Reads `name[:variant][:parameter=value...]`. A bare name of a scorer with variants means `:kvpress`, the first runtime that tables go to.
kvb_status metric_parse(metric *out, const char *text, kvb_error *err);
double metric_value(const metric *m, const char *parameter); // the parameter must exist
unsigned metric_needs(const metric *m);                      // view_items, for layer_observer.needs
// One layer's scores s [G,T]: checks that the view has what the metric needs (KVB_ARGUMENT) and that every score is finite
// (KVB_NUMERIC); errors name the metric, the layer and the place.
kvb_status metric_score(const metric *m, const layer_view *view, float *s, kvb_error *err);
uint32_t metric_protect_sink(const metric *m);
uint32_t metric_protect_window(const metric *m);
// {"window": 64, ..., "protect_sink": 4, "protect_window": 64}; the caller owns it; NULL when memory is short.
cJSON *metric_to_json(const metric *m);

kvb_status score_snapkv(const metric *m, const layer_view *view, float *s, kvb_error *err);
kvb_status score_keydiff(const metric *m, const layer_view *view, float *s, kvb_error *err);
kvb_status score_expected_attention(const metric *m, const layer_view *view, float *s, kvb_error *err);
