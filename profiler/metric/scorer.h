// Eviction metrics: one file scorer_<name>.c each, listed in scorer.c.
//
// A scorer turns one layer's activations into s [G,T], higher = keep. A ranking that does not depend on the budget is
// nested: one recording serves every compression ratio. The few metrics whose ranking depends on the budget can be
// evaluated, but not profiled.
//
// A metric is written `name[:variant][:parameter=value]...`, e.g. `snapkv:kvpress:window=32`. CriticalKV wraps another
// metric, which follows a plus sign: `critical:share=0+snapkv:lukv`.
#pragma once
#include "profiler/metric/spec.h"
#include "profiler/model/observe.h"
#include <cjson/cJSON.h>

enum { METRIC_MAX = 128, PRESS_MAX_ARGUMENTS = 6, METRIC_SETTINGS_BYTES = 64 };

typedef struct metric metric;

// An argument of a kvpress press, and the offset of its value in the settings.
typedef struct press_argument {
    const char *name;
    size_t offset;
} press_argument;

#define PRESS_ARGUMENT(name, settings, field) \
    {                                         \
        name, offsetof(settings, field)       \
    }

typedef struct scorer {
    spec_row spec; // name, variant and parameters, whose values are in metric.set
    const char *summary;
    const char *source;  // the paper, and where this form of it comes from
    const char *formula; // s[g,j] = ..., for the help; '\n' starts another line
    unsigned needs;      // view_items that score() reads
    // What score() reads if that depends on the metric's parameters; NULL: `needs`.
    unsigned (*needs_of)(const metric *m);
    // Defaults of the protected set P (methods.md 2.8). A metric with a parameter `window` looks at that many of the
    // last tokens, or keeps them in any case, and protects them instead of protect_window.
    uint32_t protect_sink, protect_window;
    // The shortest context, in tokens; NULL: one more than the window if queries are used, else 1.
    uint32_t (*least_tokens)(const metric *m);
    // Writes s [G,T].
    kvb_status (*score)(const metric *m, const layer_view *view, float *s, kvb_error *err);
    // Memory in bytes that score() needs for a view of that shape, besides one or two rows of T doubles per KV head and
    // those of its window. NULL: none.
    uint64_t (*bytes)(const layer_view *shape);
    // Checks the parameters' values; NULL: every value within its limits is valid.
    kvb_status (*check)(const metric *m, kvb_error *err);
    // Why this metric's ranking depends on the budget; NULL: it does not. is_nested returns true for parameters with
    // which it does not either; NULL: there are none.
    const char *why_not_nested;
    bool (*is_nested)(const metric *m);
    // metric_rank() for one head. NULL: the ranking does not depend on the budget.
    kvb_status (*rank)(const metric *m, const float *first, float *s, uint32_t T, uint32_t budget, kvb_error *err);
    // Turns a metric whose ranking depends on the budget into the nested one that is profiled for it; returns false if
    // there is none. NULL: there never is.
    bool (*make_nested)(metric *m);
    bool wraps;      // another metric
    double constant; // distinguishes variants of a formula besides their parameters; see the scorer's file
    bool usual;      // commands use it if no metric is named
    const char *kin; // the metric of which this is a variant with a different name; NULL: its own name
    // The class of kvpress 0.5.5 that ranks tokens as this metric does, and its arguments, ended by a NULL name. NULL:
    // there is none.
    const char *press;
    press_argument press_arguments[PRESS_MAX_ARGUMENTS + 1];
    const char *press_warning; // a difference that always applies; NULL: there is none
    // False if the press cannot rank as this metric does; *warning may receive a difference. NULL: no difference.
    bool (*press_fits)(const metric *m, const char **warning);
} scorer;

// The parameters' values: a struct that the scorer's own file declares and reads with metric_settings(). All other
// bytes, padding included, are zero, so settings can be compared as bytes.
typedef struct metric_values {
    _Alignas(8) unsigned char bytes[METRIC_SETTINGS_BYTES];
} metric_values;

// A scorer with its parameters set.
struct metric {
    const scorer *kind;
    char spec[METRIC_MAX]; // canonical text: name[:variant] and the parameters that differ from the variant's defaults
    metric_values set;
    const scorer *base; // what is wrapped, or NULL
    metric_values base_set;
    bool protects; // sink and window below replace the scorer's
    uint32_t sink, window;
    uint32_t fold; // of a learned ranking: the fold whose weights to use; 0: those fitted on all texts
};

extern const scorer *const scorer_list[];
extern const size_t scorer_count;

// Parses a metric. If a scorer has no plain form, its bare name means the variant `:kvpress`, since kvpress is where
// most tables are used. On KVB_ARGUMENT the message lists the known names, or says which values a parameter takes.
kvb_status metric_parse(metric *out, const char *text, kvb_error *err);
// Sets *out to the i-th of the metrics that commands use if none is named. Returns false after the last one.
bool metric_usual(metric *out, size_t i);

// The scorer's own settings struct.
const void *metric_settings(const metric *m);
// Returns a parameter's value by its name, or `otherwise` if the metric has no such parameter.
double metric_value(const metric *m, const char *parameter, double otherwise);
// Sets an existing parameter to a value within its limits; does not change m->spec.
void metric_set_value(metric *m, const char *parameter, double value);

// The name that variants of one idea share: "snapkv" for its variants and for RocketKV's first stage; for CriticalKV,
// that of what it wraps.
const char *metric_kin(const metric *m);

unsigned metric_needs(const metric *m);        // view_items, for layer_observer.needs
uint32_t metric_window(const metric *m);       // last tokens whose queries it uses, 0 if none; includes the wrapped
                                               // metric's
uint32_t metric_least_tokens(const metric *m); // shortest context that it can score; includes the wrapped metric's
// Memory that metric_score() needs besides its result, for planning. Only the view's shape is used, not its tensors.
uint64_t metric_score_bytes(const metric *m, const layer_view *shape, uint32_t n_threads);
// Fails with KVB_ARGUMENT if a context of n_tokens tokens is too short for this metric.
kvb_status metric_check_tokens(const metric *m, uint64_t n_tokens, kvb_error *err);
// The protected set is what an engine keeps for the metric that ranks: for CriticalKV, the wrapped one.
uint32_t metric_protect_sink(const metric *m);
uint32_t metric_protect_window(const metric *m);

// What records and tables say about a metric: {"window": 64, ..., "protect_sink": 4, "protect_window": 64, "kin":
// "snapkv", "kvpress": metric_press()}. The caller frees it; NULL if memory runs out.
cJSON *metric_to_json(const metric *m);
// The kvpress press that ranks tokens as the metric does: {"press": "SnapKVPress", "arguments": {"window_size": 64,
// ...}}, with "warning" if something differs; empty if there is none. The caller frees it; NULL if memory runs out.
cJSON *metric_press(const metric *m);

// The same from what a record or a table says about the metric `name` (its object of parameters, or NULL). If it says
// nothing, because another program or an older version wrote it, the scorer is asked.
cJSON *metric_press_of(const char *name, const cJSON *parameters);

// Computes one layer's scores s [G,T]. Fails with KVB_ARGUMENT if the view lacks what the metric needs, with
// KVB_NUMERIC if a score is not finite; errors name metric, layer and place. Safe to call from several threads at once.
kvb_status metric_score(const metric *m, const layer_view *view, float *s, kvb_error *err);

// Fails with KVB_ARGUMENT, saying why and what to use instead, if the ranking depends on the budget: LU-KV's loss
// curves need one order of tokens for all budgets (methods.md 6.38), so such a metric cannot be profiled.
kvb_status metric_check_nested(const metric *m, kvb_error *err);

// Sets *base to the metric that m wraps; returns false if it wraps none.
bool metric_base(const metric *m, metric *base);

// Sets *profiled to the nested metric whose table has the budgets for m: m itself, or CriticalKV without its first
// stage. Returns false if there is none.
bool metric_profiled_as(const metric *m, metric *profiled);

// For metrics that are not nested: turns scores into ones whose best budget[g] tokens are what head g keeps. s [G,T]
// comes from metric_score(m), `first` [G,T] from metric_score(base) (NULL if there is no base); both live long after
// the view. out may be s. For nested metrics out is s. A pure function: no view, no state.
kvb_status metric_rank(const metric *m, const float *first, const float *s, uint32_t n_kv_heads, uint32_t n_tokens,
                       const uint32_t *budget, float *out, kvb_error *err);
