// The profiling run: calibration texts in, record out. Every context is prefilled once; its questions are decoded in
// batches over the shared keys and values (methods.md 2.2), those of several contexts together if answers are drawn: a
// step then reads the weights once for all.
#pragma once
#include "formats/calib.h"
#include "formats/record_growth.h"
#include "profiler/backend/sampler.h"
#include "profiler/metric/scorer.h"
#include "profiler/model/model.h"
#include "profiler/text/model_text.h"

enum { PROFILE_MAX_METRICS = 64 };     // in one pass
enum { PROFILE_MAX_TOKENS = 1 << 24 }; // positions that float32 angles can still distinguish

typedef enum bos_rule { BOS_AS_MODEL, BOS_YES, BOS_NO } bos_rule;

// What a token is worth to a question. ORACLE_LUKV: the maximum over queries and the group's heads of attention times
// ||v W_O|| (methods.md 2.1). ORACLE_OUTPUT: the mean of attention times ||(v - c) W_O||, where c is the head's mean
// output for the context's last 64 tokens: an evicted token's attention goes to the others, so outputs move by the
// token's distance from what the head outputs anyway. It is the better target for fitting a ranking (docs/ranking.md),
// but not for solving.
typedef enum oracle_kind { ORACLE_LUKV, ORACLE_OUTPUT } oracle_kind;

typedef struct profile_options {
    const metric *metrics; // any subset, all in one pass; at most PROFILE_MAX_METRICS
    size_t n_metrics;
    sampler draw;
    uint32_t new_tokens; // generated per question, >= 2: the first comes out of the prefill, so new_tokens - 1 queries
                         // are recorded
    bool ignore_eos;     // continue after an end token
    bool ignore_answers; // sample even if the calibration data gives answers
    bool include_first;  // also record the query of the last prompt token, which emits the first token
    oracle_kind oracle;  // ORACLE_OUTPUT only if the backend has sums_importance
    bos_rule bos;
    uint32_t max_tokens;    // contexts are cut to their first max_tokens tokens; 0 = not cut
    uint32_t max_questions; // only the first questions of every context; 0 = all
    uint32_t batch;         // questions decoded together; 0 = by memory
    uint64_t memory;        // bytes that the run may take in addition to the model; 0 = unknown, nothing is refused
    bool memory_is_asked;   // the user set `memory`: then a batch uses all of it, otherwise 2 GB at most
    bool beyond_trained;    // contexts longer than the model was trained for are allowed
    uint32_t loss_queries;  // queries per question for curves of output errors; 0: no curves
    uint32_t refit;         // reference queries per KV head with which cuts are refitted for these; 0: they stay as cut
    uint32_t gain_rows;     // rows of a context's first question for measuring the layers' gains; 0: no gains
    record *grows;          // a finished record that the run adds to (the caller's), or NULL
} profile_options;

typedef struct profile_question {
    int32_t *suffix; // question and answer prefix; with --chat also what the template puts between them
    uint32_t n_suffix;
    int32_t *answer; // teacher-forced on these when given; n_answer >= 1
    uint32_t n_answer;
    bool was_short; // the given answer has too few tokens to record a query; it is sampled instead
    uint32_t tail;  // the most rows after the context that decoding needs
} profile_question;

typedef struct profile_context {
    char id[65];
    uint64_t
        key; // of the sampler: the first bytes of the id's SHA-256, so that it does not depend on what else is profiled
    int32_t *ids;
    uint32_t n_tokens, n_questions, n_given; // n_given: questions with answers
    bool recorded;                           // the record that grows already has it,
    uint32_t n_recorded;                     // and the first n_recorded of its questions
    uint32_t n_again;                        // rows of those, if the curves of new metrics need them decoded again
    profile_question *questions;
} profile_context;

// How a job adds to a finished record. The job's contexts are then only those with work left to do.
typedef struct profile_growth {
    const char **ids; // [n_ids] ids of all contexts of the larger record, in order; owned by the record or by `own`
    size_t n_ids;
    char (*own)[65];          // [n_own] ids of new contexts
    record_relation relation; // of what is added to the record
    uint64_t recorded;        // bit i: the record has the options' metric i
    size_t witness;           // the recorded metric that is computed again and compared; n_metrics: none can be
    profile_context check;    // the record's shortest context, for a run that prefills no other context of the record
} profile_growth;

// Everything tokenised and counted before the model runs.
typedef struct profile_job {
    const model_text *text; // what tokenised it; must outlive the job
    profile_context *contexts;
    size_t n_contexts;
    uint32_t max_tokens, max_questions, max_tail; // over all contexts; max_questions is what one batch holds
    uint32_t max_contexts;                        // whose questions are in one batch
    uint64_t n_pairs, n_rows, n_context_tokens;   // questions; decoded rows at most; tokens prefilled
    uint32_t n_beyond;                            // contexts that, with their longest tail, exceed the trained length
    uint64_t n_given;                             // questions with answers
    uint64_t n_short;                             // questions whose answers have too few tokens (profile_question)
    profile_growth growth;                        // all zero if no record grows
    char *calibration_files;                      // SHA-256 of each, in order, commas between (record_growth.h)
} profile_job;

// Tokenises the calibration files. Errors name file, line and sample: an empty context, T over the model's context
// length (KVB_ARGUMENT, cut with max_tokens or allowed by beyond_trained), ids outside the vocabulary, the same
// sample_id twice. If the model was opened for a plan and has no tokenizer, texts count as one token per four bytes.
kvb_status profile_prepare(profile_job *out, const model *m, const model_text *text, const calib_file *files,
                           size_t n_files, const profile_options *o, kvb_error *err);
void profile_job_free(profile_job *job);

// The record's attributes: everything that must be equal for two runs to be one (model, tokenizer, text, metrics,
// sampler, backend, version). The caller owns the object.
cJSON *profile_attributes(const model *m, const profile_job *job, const profile_options *o);

// The attributes, for RECORD_ADD, of the record that o->grows becomes; the caller frees *out. Fails with KVB_MISMATCH
// if an option or the model differs from the record's; the message names it.
kvb_status profile_grown_attributes(cJSON **out, const model *m, const profile_job *job, const profile_options *o,
                                    kvb_error *err);

// The memory of a run in addition to the model (profile_memory.c), in bytes.
typedef struct profile_memory {
    uint64_t cache;       // keys and values of the longest context
    uint64_t questions;   // importance, keys and values of the questions of one batch
    uint64_t activations; // of the forward pass: [T, ...] for one layer, and chunks
    uint64_t scratch;     // of the backend and of the metrics
    uint64_t host;        // scores and importance of one context, logits
} profile_memory;

profile_memory profile_memory_of(const model *m, const profile_job *job, const profile_options *o, uint32_t batch);
uint64_t profile_memory_total(const profile_memory *memory);
// Sets job->max_questions, on entry the most questions of any context, and job->max_contexts to what options and memory
// allow. Fails with KVB_MEMORY if not even one question fits, or the requested batch does not. The record's numbers do
// not depend on it.
kvb_status profile_fit_batch(profile_job *job, const model *m, const profile_options *o, kvb_error *err);

double profile_flops(const model *m, const profile_job *job); // of matrix products and attention, causal half only
// The work of a context's prefill (q NULL) or of one of its questions, as the equivalent number of operations of a
// large product; for progress and plans.
double profile_work(const model *m, const profile_context *c, const profile_question *q);
// The same for the recorded questions that are decoded again.
double profile_work_again(const model *m, const profile_context *c);

typedef struct profile_times {
    double prefill, scorers, decode, writing; // seconds
    double extras;                            // column sums and output norms, which several scorers share (observe.h)
    double each[PROFILE_MAX_METRICS];         // of every metric
    double curves, gains;                     // of the losses; not included in decode and prefill
    uint64_t queries, skipped;                // recorded queries; questions that ended before a query was recorded
} profile_times;

// Estimates how long the run would take on this machine: prefill and decode, at the rate that a product of the model's
// shape reaches now (profile_work), and the writing of a record of record_bytes bytes. Takes a second. Errors: those of
// opening a device, KVB_MEMORY.
kvb_status profile_estimate_time(profile_times *out, const model *m, const profile_job *job, double record_bytes,
                                 kvb_error *err);

// Callbacks of a run. progress returns false to stop (KVB_INTERRUPTED); done and total are the job's rows of work.
typedef struct profile_watch {
    bool (*progress)(void *context, double done, double total);
    void (*message)(void *context, const char *text); // a warning worth a line
    void *context;
} profile_watch;

// ---- Dividing a job among processes (profile_share.c) ----

// A range of one context's questions, run after one prefill. Questions that are already done are skipped.
typedef struct profile_piece {
    uint32_t context, first, count; // questions [first, first + count); count 0: the context's scores alone
} profile_piece;

// The work of one process, in calibration order.
typedef struct profile_share {
    profile_piece *pieces;
    size_t n;
    double cost, heaviest, total; // floating-point operations: of this share, of the largest one, of all
} profile_share;

// The state of a record: a byte per context, then one per question (in the job's order), nonzero if recorded.
size_t profile_state_size(const profile_job *job);
void profile_read_state(uint8_t *state, const profile_job *job, const record_writer *writer);

// Computes share number `share` (0 .. n_shares - 1) of the work that `state` leaves to do (NULL: all of it). The result
// depends only on model, job, state and n_shares, so processes need not communicate. The caller frees it with
// profile_share_free.
kvb_status profile_share_out(profile_share *out, const model *m, const profile_job *job, const uint8_t *state,
                             uint32_t n_shares, uint32_t share, kvb_error *err);
void profile_share_free(profile_share *share);

// ---- Running ----

// Runs what is in the share and not yet in the record.
kvb_status profile_run_share(const model *m, const profile_job *job, const profile_options *o,
                             const profile_share *share, record_writer *writer, const profile_watch *watch,
                             profile_times *times, kvb_error *err);
// Assembles the record from all contexts, or, if `share` is not NULL, from those of the share. Fails with KVB_MISMATCH
// if a question is missing.
kvb_status profile_finish(const profile_job *job, const profile_share *share, record_writer *writer, kvb_error *err);

// ---- Between the files of the profiling run ----

// Whether metric `i` scores context `c`. A recorded context is only scored by metrics that the record lacks and by the
// witness.
bool profile_scores_metric(const profile_job *job, const profile_context *c, size_t i);

// Call after the prefill of a context that o->grows has. Fails with KVB_MISMATCH unless the witness's scores [B,G,T] of
// this run equal the record's bit by bit: otherwise this machine or program would add numbers that do not fit. `buffer`
// [B,G,T] is scratch.
kvb_status profile_check_witness(const profile_job *job, const profile_options *o, const profile_context *c,
                                 const float *scores, float *buffer, kvb_error *err);
