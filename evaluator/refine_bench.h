// Measures candidates of the search for better budgets (study/refine.h): shifts give a table, the table gives budgets,
// budgets give cuts, and cuts give damage. Each text is prefilled when first needed, and no cut is measured twice.
#pragma once
#include "evaluator/damage.h"
#include "evaluator/sweep.h"
#include "study/refine.h"
#include "study/refine_table.h"

// The search uses the calibration texts, the selection texts decide among what it finds, and the test texts only judge.
typedef enum refine_set { SET_CALIBRATION, SET_SELECTION, SET_TEST, SET_COUNT } refine_set;

typedef struct refine_bench {
    // Given:
    const model *m;
    const refine_table *table;
    bool strict;         // budgets never cut into sinks and window (kvb_budget_options)
    const double *knots; // [n_knots] ratios that are refined, ascending
    uint32_t n_knots;
    const sweep_text *texts;
    uint32_t n_texts;
    damage_plan plan;
    const forward_progress *stop; // called after each batch and in prefills, may stop the run; NULL: none
    // Called after every text whose heads were cut one at a time; NULL: none.
    void (*heads_told)(const struct refine_bench *b, uint32_t n_levels, uint32_t done, uint32_t n_texts,
                       double seconds);
    // Opened:
    uint32_t *members[SET_COUNT], n_members[SET_COUNT]; // texts of each set, by number
    damage *d;
    damage_text *open; // [n_texts]; a zero struct: not prefilled yet
    log_file *log;
    char origin[65];              // SHA-256 of what all keys share: model, precision, metric, lengths
    uint64_t n_measured, n_known; // cuts
    double seconds;               // spent in measuring, from shifts to damage, prefills included
    double prefill_seconds;       // of these, spent in prefills
    uint32_t n_prefills;
    uint64_t n_alone; // cuts of one head alone
    double alone_seconds;
} refine_bench;

// Divides the texts into sets. asked [n_texts] gives the set of each; if it is NULL they are dealt in turn:
// calibration, test, selection, test. If none is for calibration, the first of selection serves both: its cuts are
// measured anyway. Fails with KVB_ARGUMENT if selection would be empty.
kvb_status refine_bench_deal(refine_bench *b, const refine_set *asked, kvb_error *err);
// Returns the bytes that the search needs for texts: calibration and selection, one test text, the session's own.
uint64_t refine_bench_bytes(const refine_bench *b);
// Opens the bench. `log` (NULL: none) is the file from which results are read and to which they are written.
kvb_status refine_bench_open(refine_bench *b, const char *log, kvb_error *err);
// Frees what was opened, also after a failure. Returns `status`, or the failure of closing the log.
kvb_status refine_bench_free(refine_bench *b, kvb_status status, kvb_error *err);

// Reads the result under a key that the log has. Fails with KVB_FORMAT if a number is missing.
kvb_status damage_value_read(damage_value *out, const log_file *log, const char *key, kvb_error *err);

// Finds where the search of a task begins: budgets by what each head alone loses (study/measured.h), on as many
// calibration texts as three quarters of the task's evaluations pay for. A head's cuts cost half a continuation each,
// since only the layers from its own on are run. Writes shift [n_knots, heads] and adds the cost to the task's
// start_cost. *n_texts is the number of texts measured; if it is 0, not even one could be paid for and nothing is
// written. Fails with KVB_INTERRUPTED if it is stopped.
kvb_status refine_bench_start(refine_bench *b, refine_task *t, double *shift, uint32_t *n_texts, kvb_error *err);
// Measures what a candidate loses, as a refine_measure; `context` is the bench. Fails with KVB_INTERRUPTED if stopped.
kvb_status refine_bench_losses(void *context, bool selecting, const double *shift, double *loss, kvb_error *err);
// Measures the KL on a set of texts, under the table itself and under the table with the shifts [n_knots, heads]. *kl,
// which the caller frees, receives the means [2, n_knots] and then each text's [2, n_knots, n]. The memory of test
// texts is released. Fails with KVB_INTERRUPTED if it is stopped.
kvb_status refine_bench_judge(refine_bench *b, refine_set set, const double *shift, double **kl, kvb_error *err);
