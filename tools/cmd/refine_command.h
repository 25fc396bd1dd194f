// kvbudget refine in three parts: the command line, what a candidate of the search loses, and the result.
#pragma once
#include "evaluator/damage_log.h"
#include "study/refine.h"
#include "study/refine_table.h"
#include "tools/cmd/eval_command.h"

typedef enum refine_set { SET_CALIBRATION, SET_SELECTION, SET_TEST, SET_COUNT } refine_set;
typedef enum refine_objective { OBJECTIVE_KL, OBJECTIVE_NLL } refine_objective;

// Measures candidates on texts, each text prefilled when it is first needed.
typedef struct refine_bench {
    const model *m;
    const refine_table *table;
    bool strict;
    const double *knots; // [n_knots]
    uint32_t n_knots;
    refine_objective objective;
    const sweep_text *texts;
    uint32_t n_texts, *members[SET_COUNT], n_members[SET_COUNT]; // texts of each set, by number
    damage_plan plan;                                            // whose lengths are the longest ones
    uint32_t *lengths, n_lengths; // [n_lengths] of contexts, tokens: budgets are counted in them
    uint32_t *length_of;          // [n_texts] which of these
    // Opened:
    damage *d;
    damage_text *open; // [n_texts]; a zero struct: not prefilled yet
    damage_log *log;
    char origin[65];              // SHA-256 of what all keys share: model, precision, metric, lengths
    uint64_t n_measured, n_known; // cuts
    double seconds;               // spent in measuring, from shifts to damage, prefills included
    double prefill_seconds;       // of these
    uint32_t n_prefills;
    uint64_t n_alone; // cuts of heads alone
    double alone_seconds;
} refine_bench;

// How long the texts are, into plan, lengths and length_of. KVB_MEMORY.
kvb_status refine_bench_take_lengths(refine_bench *b, kvb_error *err);
// `log` (NULL: none) is where results go and come from. The caller frees, also after a failure.
kvb_status refine_bench_open(refine_bench *b, const char *log, kvb_error *err);
// Returns `status`, or what closing the log gave.
kvb_status refine_bench_free(refine_bench *b, kvb_status status, kvb_error *err);
// All damage of candidates, shift [n, n_knots, heads], on texts of a set by their number in it (NULL: all of them): out
// [n, n_knots, n_texts]. KVB_INTERRUPTED: a signal came.
kvb_status refine_bench_measure(refine_bench *b, refine_set set, const double *shift, uint32_t n, const uint32_t *texts,
                                uint32_t n_texts, damage_value *out, kvb_error *err);
// The same for a search (refine_measure): `context` is the bench, and losses are what the objective says.
kvb_status refine_bench_losses(void *context, bool selecting, const double *shift, uint32_t n, const uint32_t *texts,
                               uint32_t n_texts, double *loss, kvb_error *err);
// What the table loses when one head alone is cut: loss [n_levels, heads], the mean over the first n_texts texts of the
// search, in KL. Each text is told of when `shown`.
kvb_status refine_bench_heads(refine_bench *b, const double *levels, uint32_t n_levels, uint32_t n_texts, bool shown,
                              double *loss, kvb_error *err);
// Gives back the memory of a set's texts.
void refine_bench_close_set(refine_bench *b, refine_set set);

typedef struct refine_command {
    eval_command e;
    cli_list select, test;
    const char *objective, *search, *start;
    bool worst, layers;
    uint64_t evaluations, patience;
    char **operands; // model, table and the texts of all sets
    size_t n_operands, n_calibration, n_select;
    char *table_path;
    char table_sha256[65];
    refine_table table;
    refine_bench bench;
    refine_task task;
    double *shift;    // [n_knots, heads] the search's start; NULL: the table
    uint32_t n_start; // texts that it was measured on
    refine_result best;
    double *kl[SET_COUNT]; // mean KL of each set, [2, n_knots], before and after, then of its texts, [2, n_knots, n];
                           // NULL: not measured
} refine_command;

// Writes the best table so far with an account of how it was found, and prints what it gains.
kvb_status refine_write_result(const refine_command *c, bool stopped, kvb_error *err);
