// A table of budgets from the pairs of a record.
#pragma once
#include "study/gather.h"
#include "study/layer_map.h"
#include <cjson/cJSON.h>

// R = ROWS ratios, of which options.n_rows count; N heads. Losses are shares of what a pair can lose, means over the
// pairs or, with AGGREGATE_TAIL, over the texts that lose most.
typedef struct study_table {
    study_options options;
    pair_set pairs;
    layer_map layers; // of the model; the heads below are those of layers that are budgeted
    uint32_t n_heads;
    double *prune_ratio, *std; // [R, N] the table; how far the pairs' own optima spread
    double loss[ROWS], bound[ROWS], lambda[ROWS];
    double table_loss[ROWS], uniform_loss[ROWS]; // of whole tokens, the table's and when all heads keep equally many
    double table_bound[ROWS]; // no budgets that the pairs share lose less on average; NaN where that is not known:
                              // with AGGREGATE_TAIL, and with AGGREGATE_MEAN_RATIO where curves were pulled together
    double effective[ROWS];   // prune ratio that is really reached
    uint8_t saturated[ROWS];  // 1: the floor was reached
    // With exact: greedy's loss, the optimum, and rows that met a limit in any problem.
    double greedy[ROWS], optimum[ROWS];
    uint8_t unproved[ROWS];
    int32_t *pair_budgets; // [P, R, N] tokens that each pair's own optimum keeps; NULL: not wanted
    double *text_weights;  // [R, n_texts] with AGGREGATE_TAIL: the multipliers of robust.h
    size_t n_texts;
    double solve_seconds; // hulls, sweep and certificate of all pairs
} study_table;

// Finds the pairs and makes room; the limits of the options, selection and metric must outlive the table. Errors: those
// of pairs_open(); KVB_MEMORY; KVB_UNSUPPORTED more budgets of pairs than fit. The caller frees, also after a failure.
kvb_status study_table_open(study_table *t, const selection *from, const char *metric, const study_options *o,
                            bool pair_budgets, kvb_error *err);
// Read, curves, aggregate, allocate; then a second reading that judges the table on every pair. progress may be NULL.
kvb_status study_table_solve(study_table *t, study_progress *progress, kvb_error *err);
// Judges the table's rows on every pair again, when they were changed.
kvb_status study_table_judge(study_table *t, study_progress *progress, kvb_error *err);
void study_table_free(study_table *t);

// Refuses ratios that were chosen one by one where limits do not allow them.
kvb_status require_ratios(const study_options *o, const loss_curves *c, kvb_error *err);

// The metadata of a solved table's file (formats/README.md), a flat object of strings: the caller's, cJSON_Delete.
// KVB_IO: the record was changed since it was opened.
kvb_status study_table_describe(const study_table *t, cJSON **metadata, kvb_error *err);
// Each writes atomically: the table; every pair's own budgets, which the table
// must have been opened with.
kvb_status study_table_write(const study_table *t, const cJSON *metadata, const char *path, kvb_error *err);
kvb_status study_table_write_budgets(const study_table *t, const char *path, kvb_error *err);

// The JSON object of a table's metadata "constraints", as runtime/limits.h reads it; to be freed with cJSON_free. NULL:
// no memory.
char *limits_text(const kvb_limits *limits);
