// Candidates of the search for better budgets (study/refine.h), measured: shifts become a table, the table budgets,
// budgets cuts, and cuts damage. Each text is prefilled when it is first needed, and no cut is measured twice.
#pragma once
#include "evaluator/damage.h"
#include "evaluator/sweep.h"
#include "study/refine.h"
#include "study/refine_table.h"

// The search sees the calibration texts, the selection texts choose among what it finds, the test texts only judge.
typedef enum refine_set { SET_CALIBRATION, SET_SELECTION, SET_TEST, SET_COUNT } refine_set;

typedef struct refine_bench {
    // Given:
    const model *m;
    const refine_table *table;
    bool strict;         // budgets never cut into sinks and window (kvb_budget_options)
    const double *knots; // [n_knots] ratios that count, ascending
    uint32_t n_knots;
    const sweep_text *texts;
    uint32_t n_texts;
    damage_plan plan;
    const forward_progress *stop; // asked now and then whether to go on; NULL: nobody
    // Told after every text whose heads were cut alone; NULL: nobody.
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
    double prefill_seconds;       // of these
    uint32_t n_prefills;
    uint64_t n_alone; // cuts of heads alone
    double alone_seconds;
} refine_bench;

// Deals the texts into sets. asked [n_texts]: the set that each is meant for; NULL: they are dealt in turn,
// calibration, test, selection, test. KVB_ARGUMENT where calibration or selection would be empty.
kvb_status refine_bench_deal(refine_bench *b, const refine_set *asked, kvb_error *err);
// Bytes that the texts of the search take while it runs: calibration and selection, one test text, and the session's
// own.
uint64_t refine_bench_bytes(const refine_bench *b);
// `log` (NULL: none) is where results go and come from.
kvb_status refine_bench_open(refine_bench *b, const char *log, kvb_error *err);
// Also after a failure. Returns `status`, or what closing the log gave.
kvb_status refine_bench_free(refine_bench *b, kvb_status status, kvb_error *err);

// What the log has under that name, which is there. KVB_FORMAT: a line without all its numbers.
kvb_status damage_value_read(damage_value *out, const log_file *log, const char *key, kvb_error *err);

// Where the search of a task begins: budgets by what each head alone loses (study/measured.h), on as many of the
// calibration texts as three quarters of the task's evaluations pay for. A head's cuts cost half a continuation each,
// since only the layers from its own on are run. Adds what it cost to the task's start_cost; shift [n_knots, heads].
// *n_texts: how many were measured; 0, and nothing is written, where not even one can be paid for. KVB_INTERRUPTED.
kvb_status refine_bench_start(refine_bench *b, refine_task *t, double *shift, uint32_t *n_texts, kvb_error *err);
// What candidates lose, for a search (refine_measure): `context` is the bench. KVB_INTERRUPTED.
kvb_status refine_bench_losses(void *context, bool selecting, const double *shift, uint32_t n, const uint32_t *texts,
                               uint32_t n_texts, double *loss, kvb_error *err);
// KL of a set under the table itself and under the table with the shifts [n_knots, heads]: *kl, malloc'd, has the means
// [2, n_knots] and then each text's [2, n_knots, n]. The memory of test texts is given back. KVB_INTERRUPTED.
kvb_status refine_bench_judge(refine_bench *b, refine_set set, const double *shift, double **kl, kvb_error *err);
