// Eviction metrics: one file scorer_<name>.c each, listed in scorer.c.
//
// A scorer turns one layer's activations into s [G,T], higher = keep. A ranking that does not depend on a budget is nested: one
// recording serves every compression ratio. The few metrics whose ranking does depend on it can be evaluated, not profiled.
//
// A metric is written `name[:variant][:parameter=value]...`, e.g. `snapkv:kvpress:window=32`. CriticalKV wraps another metric, which stands
// behind a plus sign: `critical:share=0+snapkv:lukv`.
#pragma once
#include "profiler/observe.h"
#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>

enum { SCORER_MAX_PARAMETERS = 8, METRIC_MAX = 128 };

typedef struct scorer_parameter {
    const char *name;
    double value, low, high;
    bool integer;
    const char *meaning;
    const char *choices; // "mean|raw|median": what the values 0, 1, 2 are called; NULL: a number
} scorer_parameter;

typedef struct metric metric;

typedef struct scorer {
    const char *name;    // "snapkv"
    const char *variant; // "lukv", "kvpress", or "" for the only or plain one
    const char *summary;
    const char *source;  // the paper, and where this form of it comes from
    const char *formula; // s[g,j] = ..., for the help; '\n' starts another line
    unsigned needs;      // view_items that score() reads
    // Those that it reads even where the view has a device; NULL: all of them.
    unsigned (*needs_on_device)(const metric *m);
    uint32_t protect_sink,
        protect_window; // defaults of the protected set P (methods.md 2.8); PROTECT_WINDOW_PARAMETER: the parameter `window`
    scorer_parameter parameters[SCORER_MAX_PARAMETERS + 1]; // ended by a NULL name
    // Writes s [G,T]. Needs T > the window or the sinks it asks for.
    kvb_status (*score)(const metric *m, const layer_view *view, float *s, kvb_error *err);
    // NULL: every value within its limits is fine.
    kvb_status (*check)(const metric *m, kvb_error *err);
    // Why this metric's ranking depends on the budget, or NULL where it does not. NULL: it never does.
    const char *(*why_not_nested)(const metric *m);
    // See metric_rank; one head. NULL: budgets change nothing.
    kvb_status (*rank)(const metric *m, const float *first, float *s, uint32_t T, uint32_t budget, kvb_error *err);
    bool wraps; // another metric
} scorer;

#define PROTECT_WINDOW_PARAMETER UINT32_MAX

// A scorer with its parameters set.
struct metric {
    const scorer *kind;
    char spec[METRIC_MAX]; // canonical text: name[:variant] and the parameters that differ from the variant's defaults
    double values[SCORER_MAX_PARAMETERS];
    const scorer *base; // what is wrapped, or NULL
    double base_values[SCORER_MAX_PARAMETERS];
};

extern const scorer *const scorer_list[];
extern const size_t scorer_count;

// Reads a metric's name. A bare name of a scorer that has no plain form means `:kvpress`, the first runtime that tables go to.
// KVB_ARGUMENT says what is known, or which value a parameter expects.
kvb_status metric_parse(metric *out, const char *text, kvb_error *err);
double metric_value(const metric *m, const char *parameter); // NaN when it has no such parameter
unsigned metric_needs(const metric *m);                      // view_items, for layer_observer.needs
unsigned metric_needs_on_device(const metric *m); // those of them that an observer of this metric does not spare
uint32_t metric_protect_sink(const metric *m);
uint32_t metric_protect_window(const metric *m);
// {"window": 64, ..., "protect_sink": 4, "protect_window": 64}; the caller owns it; NULL when memory is short.
cJSON *metric_to_json(const metric *m);

// One layer's scores s [G,T]: checks that the view has what the metric needs (KVB_ARGUMENT) and that every score is finite
// (KVB_NUMERIC); errors name the metric, the layer and the place. Safe to call from several threads at once.
kvb_status metric_score(const metric *m, const layer_view *view, float *s, kvb_error *err);

// KVB_ARGUMENT, with the reason and what to ask for instead, when the ranking depends on the budget: LU-KV's loss curves need one order
// of tokens for all budgets (methods.md 6.38), so such a metric cannot be profiled.
kvb_status metric_check_nested(const metric *m, kvb_error *err);

// The metric that m wraps; false when it wraps none.
bool metric_base(const metric *m, metric *base);

// The nested metric whose table has the budgets for m: m itself, or CriticalKV without its first stage. False when there is none.
bool metric_profiled_as(const metric *m, metric *profiled);

// For metrics that are not nested: turns scores into ones whose best budget[g] tokens are what head g keeps. s [G,T] comes from
// metric_score(m), `first` [G,T] from metric_score(base) (NULL where there is no base); both live long after the view. out may be s. For
// nested metrics out is s. A pure function: no view, no state.
kvb_status metric_rank(const metric *m, const float *first, const float *s, uint32_t n_kv_heads, uint32_t n_tokens,
                       const uint32_t *budget, float *out, kvb_error *err);
