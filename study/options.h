// How a table is solved, whichever record it is made from.
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

// Of AGGREGATE_MEAN_LOSS, chosen by cross-validation (solver/README.md).
#define DEFAULT_SHRINK 0.1
#define AS_RECORDED UINT64_MAX

// Texts are brought to a common grid of at most this many steps where many of their curves are held at a time: by
// AGGREGATE_TAIL and the studies.
enum { STUDY_GRID = 1024, ROWS = TABLE_ROWS };

// What tables minimise: the importance that is evicted (the paper), or what eviction does to the model's output
// (output_loss.h).
typedef enum study_loss { LOSS_IMPORTANCE, LOSS_OUTPUT } study_loss;

typedef struct study_options {
    const char *aggregate_name; // mean_ratio, mean_loss, worst or cvar:A
    aggregation aggregate;      // what it means
    double tail;                // with AGGREGATE_TAIL: share of the texts, 0 for the worst one
    double shrink;              // 0 to 1: loss_curves_shrink()
    double min_keep;            // no head keeps less than this share of its tokens, 0 to less than 1
    hull_range hull;
    solve_scope scope;
    bool oracle_order;     // budgets are made as if the metric ranked as the oracle does
    bool exact;            // the optimum in place of greedy's budgets
    uint64_t sink, window; // protected tokens; AS_RECORDED: what the record says of the metric
    double ratios[ROWS];   // the first n_rows count, the others repeat the last one
    uint32_t n_rows;
    bool own_ratios;          // chosen one by one, and refused where limits do not allow them
    const kvb_limits *limits; // NULL: budgets are bound by their sum only
    study_loss loss;
} study_options;

// mean_loss over all layers for 1 % to 99 % pruned, without anything else.
study_options study_options_make(void);
// Fills aggregate_name, aggregate and tail. KVB_ARGUMENT: none of the four.
kvb_status study_options_aggregate(study_options *o, const char *name, kvb_error *err);
// What a table was solved for: aggregation, scope, order, shrink, min_keep, protection, ratios, constraints. `limits`
// is where the constraints go; the caller frees it, also after a failure. The table must outlive the options. Errors
// name `path`: KVB_UNSUPPORTED what a newer kvbudget may know, and those of kvb_limits_parse().
kvb_status study_options_from_table(study_options *o, kvb_limits *limits, const kvb_table *table, const char *path,
                                    kvb_error *err);

// For the solver: all ROWS ratios. Points into *o.
solve_options study_solve_options(const study_options *o);
// Whether the table has a row for every per cent from 1 to 99.
bool every_per_cent(const study_options *o);
const char *scope_name(solve_scope scope);
const char *hull_name(hull_range hull);
const char *order_name(bool oracle_order);
