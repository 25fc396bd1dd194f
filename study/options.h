// The options that say how a table is solved.
#pragma once
#include "solver/aggregate.h"
#include "solver/problem.h"
#include "study/output_loss.h"

// How pairs become one table: solver/aggregate.h and solver/robust.h.
typedef enum aggregation {
    AGGREGATE_MEAN_RATIO, // every pair solved by itself, prune ratios averaged: the paper
    AGGREGATE_MEAN_LOSS,  // one problem: the average of the pairs' curves
    AGGREGATE_TAIL        // the mean over the texts that lose most
} aggregation;

// Default of AGGREGATE_MEAN_LOSS, chosen by cross-validation (solver/README.md).
#define DEFAULT_SHRINK 0.1
#define AS_RECORDED UINT64_MAX

// AGGREGATE_TAIL and the studies hold the curves of many texts at once, resampled to a grid of at most this many steps.
enum { STUDY_GRID = 1024, ROWS = TABLE_ROWS };

// What tables minimise: the importance that is evicted (the paper), or what eviction does to the model's output
// (output_loss.h).
typedef enum study_loss {
    LOSS_IMPORTANCE,
    LOSS_OUTPUT,
    LOSS_BEST // LOSS_OUTPUT if the record has the curves, else LOSS_IMPORTANCE
} study_loss;

typedef struct study_options {
    const char *aggregate_name; // mean_ratio, mean_loss, worst or cvar:A
    aggregation aggregate;      // what the name stands for
    double tail;                // with AGGREGATE_TAIL: share of the texts, 0 for the worst one
    double shrink;              // 0 to 1: loss_curves_shrink()
    double min_keep;            // no head keeps less than this share of its tokens, 0 to less than 1
    hull_range hull;
    solve_scope scope;
    bool oracle_order;     // solve as if the metric ranked as the oracle does
    bool exact;            // the optimum instead of greedy's budgets
    uint64_t sink, window; // protected tokens; AS_RECORDED: those that the record names for the metric
    double ratios[ROWS];   // the first n_rows are used, the others repeat the last one
    uint32_t n_rows;
    bool own_ratios;          // the user chose the ratios, and they are refused if limits do not allow them
    const kvb_limits *limits; // NULL: only the sum of the budgets is limited
    study_loss loss;
    uint32_t n_packings; // formats that keys, and values, may be stored in; 0: tables of tokens alone
    kvb_packing packings[KVB_PACKINGS];
} study_options;

// Returns the defaults: mean_loss over all layers for 1 % to 99 % pruned.
study_options study_options_make(void);
// Sets n_packings and packings from names with commas between: "bf16,int8,int4". Fails with KVB_ARGUMENT for an unknown
// name, or one that is given twice.
kvb_status study_options_packings(study_options *o, const char *names, kvb_error *err);
// Sets aggregate_name, aggregate and tail. Fails with KVB_ARGUMENT for an unknown name.
kvb_status study_options_aggregate(study_options *o, const char *name, kvb_error *err);
// Restores the options a table was solved with: aggregation, scope, order, shrink, min_keep, protection, ratios,
// constraints. The constraints go to `limits`, which the caller frees, also after a failure. The table must outlive the
// options. Errors name `path`: KVB_UNSUPPORTED for settings that only a newer kvbudget knows, and those of
// kvb_limits_parse().
kvb_status study_options_from_table(study_options *o, kvb_limits *limits, const kvb_table *table, const char *path,
                                    kvb_error *err);

// Returns the solver's options, with all ROWS ratios. They point into *o.
solve_options study_solve_options(const study_options *o);
// Tells whether the table has a row for every per cent from 1 to 99.
bool every_per_cent(const study_options *o);
const char *scope_name(solve_scope scope);
const char *hull_name(hull_range hull);
const char *order_name(bool oracle_order);
