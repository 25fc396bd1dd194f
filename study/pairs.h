// The pairs of a selection under one metric, and reading them one by one: scores and oracle in, loss curves out.
#pragma once
#include "study/options.h"
#include "study/progress.h"
#include "study/record_metric.h"
#include "study/selection.h"

typedef struct pair_set {
    const selection *from;
    const char *metric;
    record_metric about;          // with the options' sink and window if they are given
    cache_shape longest;          // shape of the longest context in use
    uint32_t n_pairs, n_contexts; // in use
    uint32_t n_continued;         // pairs whose answer continues the context, without a question in between
    uint32_t n_skipped;           // questions without recorded queries
    study_loss loss;              // LOSS_IMPORTANCE or LOSS_OUTPUT
    uint32_t recorded_sink, recorded_window;
    double *gain; // [L] of LOSS_OUTPUT; else NULL
    uint32_t fewest_queries, most_queries;
} pair_set;

// Counts the pairs, and checks that each has unprotected tokens. `from` and `metric`, one of its metrics, must outlive
// the set. Errors: KVB_ARGUMENT if there is no pair, or all of a context is protected (the message names it); those of
// cache_shape_check(). The caller closes it, also after a failure.
kvb_status pairs_open(pair_set *p, const selection *from, const char *metric, const study_options *o, kvb_error *err);
void pairs_close(pair_set *p);

// One walk over all pairs, context by context. Between two calls of pair_walk_next() the fields describe a pair.
typedef struct pair_walk {
    const pair_set *pairs;
    size_t context;         // index in the selection
    uint32_t question;      // index in the context
    float *scores, *oracle; // [L,G,T] of this context, of this pair
    problem problem;        // made for this context; problem.curves is the pair's
    uint32_t pair;          // number of pairs before it
    kvb_status status;      // KVB_OK: the walk goes on; the caller stores the status of its work on the pair here
    // Internal:
    solve_options solve;
    double min_keep;
    study_progress *progress;
    metric_order order;
    bool begun;
} pair_walk;

// Begins a walk, which the caller closes. solve: options of the problem; min_keep: as in study_options; progress: NULL,
// or called after every pair (the caller sets its done and total).
pair_walk pair_walk_open(const pair_set *pairs, solve_options solve, double min_keep, study_progress *progress);
// Reads the next pair and fills the curves. Returns false if no pair is left, or with a w->status other than KVB_OK:
// the caller's work on the last pair failed (its message is then prefixed with record, context and question), reading
// failed, or progress stopped the walk (KVB_INTERRUPTED).
bool pair_walk_next(pair_walk *w, kvb_error *err);
// Ends the walk, at any point, and frees what it holds. Returns its status.
kvb_status pair_walk_close(pair_walk *w);

// Adds to sum [n_rows] what a table of prune ratios [n_rows, L, G] loses on a pair, rounded to whole tokens as the
// runtime does. `limits` are the table's constraints, or NULL.
kvb_status judge_table(double *sum, const loss_curves *c, const kvb_limits *limits, uint32_t n_rows,
                       const double *prune_ratio, kvb_error *err);
