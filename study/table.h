// A table of budgets from the pairs of a record.
#pragma once
#include "study/formats.h"
#include "study/gather.h"
#include "study/layer_map.h"
#include <cjson/cJSON.h>

// R = ROWS ratios, of which options.n_rows count; N heads. Losses are shares of what a pair can lose, means over the
// pairs or, with AGGREGATE_TAIL, over the texts that lose most.
typedef struct study_table {
    study_options options;
    pair_set pairs;
    layer_map layers; // of the model; the heads below are those of budgeted layers
    uint32_t n_heads;
    double *prune_ratio, *std; // [R, N] the table; the standard deviation of the pairs' own optima
    double loss[ROWS], bound[ROWS], lambda[ROWS];
    double table_loss[ROWS], uniform_loss[ROWS]; // in whole tokens: of the table, and of uniform budgets
    double table_bound[ROWS]; // no budgets shared by the pairs lose less on average; NaN if not known: with
                              // AGGREGATE_TAIL, and with AGGREGATE_MEAN_RATIO if curves were shrunk
    double effective[ROWS];   // the prune ratio actually reached
    uint8_t saturated[ROWS];  // 1: the floor was reached
    // With `exact`: greedy's loss, the optimum, and rows where the solver gave up on a problem.
    double greedy[ROWS], optimum[ROWS];
    uint8_t unproved[ROWS];
    int32_t *pair_budgets; // [P, R, N] tokens kept by each pair's own optimum; NULL: not wanted
    uint8_t *formats;      // [R, N, 2] kvb_packing of keys and values; NULL: tokens alone. `ratio` is then the share of
                           // a bfloat16 cache's bytes that is saved
    double *packing_loss;  // [N, RECORD_PACKINGS] of output_packings_read(); NULL likewise
    double *text_weights;  // [R, n_texts] with AGGREGATE_TAIL: the multipliers of robust.h
    size_t n_texts;
    double solve_seconds; // hulls, sweep and certificate of all pairs
} study_table;

// Finds the pairs and allocates the table; the options' limits, the selection and the metric must outlive it. Errors:
// those of pairs_open(); KVB_MEMORY; KVB_UNSUPPORTED (too many budgets of pairs). The caller frees, also after a
// failure.
kvb_status study_table_open(study_table *t, const selection *from, const char *metric, const study_options *o,
                            bool pair_budgets, kvb_error *err);
// Reads the pairs, makes curves, aggregates and allocates; then reads all pairs again to measure the table's loss.
// progress may be NULL.
kvb_status study_table_solve(study_table *t, study_progress *progress, kvb_error *err);
// Measures the table's loss again, after its rows were changed.
kvb_status study_table_judge(study_table *t, study_progress *progress, kvb_error *err);
void study_table_free(study_table *t);

// Refuses ratios chosen by the user that limits do not allow.
kvb_status require_ratios(const study_options *o, const loss_curves *c, kvb_error *err);

// Makes the metadata of a solved table's file (formats/README.md), a flat object of strings; the caller frees it with
// cJSON_Delete. Fails with KVB_IO if the record was changed since it was opened.
kvb_status study_table_describe(const study_table *t, cJSON **metadata, kvb_error *err);
// Write, atomically, the table, and the pairs' own budgets if the table was opened with pair_budgets.
kvb_status study_table_write(const study_table *t, const cJSON *metadata, const char *path, kvb_error *err);
kvb_status study_table_write_budgets(const study_table *t, const char *path, kvb_error *err);

// Prints the JSON object for a table's metadata "constraints", as runtime/limits.h reads it. The caller frees it with
// cJSON_free; NULL if there is no memory.
char *limits_text(const kvb_limits *limits);
