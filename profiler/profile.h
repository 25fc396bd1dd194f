// The profiling run: calibration texts in, record out. Every context is prefilled once; its questions are decoded in
// batches over the shared keys and values (methods.md 2.2).
#pragma once
#include "formats/calib.h"
#include "formats/record_growth.h"
#include "profiler/backend/sampler.h"
#include "profiler/metric/scorer.h"
#include "profiler/model/model.h"
#include "profiler/text/model_text.h"

enum { PROFILE_MAX_METRICS = 64 };     // in one pass
enum { PROFILE_MAX_TOKENS = 1 << 24 }; // positions that float32 angles can still tell apart

typedef enum bos_rule { BOS_AS_MODEL, BOS_YES, BOS_NO } bos_rule;

// What a token is worth to a question. ORACLE_LUKV: the maximum over queries and the group's heads of attention times
// ||v W_O|| (methods.md 2.1). ORACLE_OUTPUT: the mean of attention times ||(v - c) W_O||, c the head's mean output for
// the context's last 64 tokens: what is evicted leaves its attention to the rest, so outputs move by its distance from
// what the head gives anyway. That is the better target to fit a ranking to (docs/ranking.md), not to solve for.
typedef enum oracle_kind { ORACLE_LUKV, ORACLE_OUTPUT } oracle_kind;

typedef struct profile_options {
    const metric *metrics; // any subset, all in one pass; at most PROFILE_MAX_METRICS
    size_t n_metrics;
    const struct query_statistics *statistics; // for metrics that use stored ones; NULL: none
    sampler draw;
    uint32_t new_tokens; // generated per question, >= 2: the first comes out of the prefill, so new_tokens - 1 queries
                         // are recorded
    bool ignore_eos;     // go on after an end token
    bool ignore_answers; // sample even where the calibration data gives answers
    bool include_first;  // also record the query of the last prompt token, which emits the first token
    oracle_kind oracle;  // ORACLE_OUTPUT only where the backend has sums_importance
    bos_rule bos;
    uint32_t max_tokens;    // contexts are cut to their first max_tokens tokens; 0 = not cut
    uint32_t max_questions; // only the first questions of every context; 0 = all
    uint32_t batch;         // questions decoded together; 0 = by memory
    uint64_t memory;        // bytes that the run may take beside the model; 0 = not known, and then nothing is refused
    bool memory_is_asked;   // by the user: then a batch takes all of it, otherwise 2 GB at most
    bool beyond_trained;    // contexts longer than the model was trained for are allowed
    uint32_t loss_queries;  // queries of every question that curves of output errors are recorded for; 0: no curves
    uint32_t gain_rows;     // of a context's shortest question, that the layers' gains are measured on; 0: no gains
    record *grows;          // a finished record that the run adds to (the caller's), or NULL
} profile_options;

typedef struct profile_question {
    int32_t *suffix; // question and answer prefix, with --chat what the template puts between them
    uint32_t n_suffix;
    int32_t *answer; // teacher-forced on these when given; n_answer >= 1
    uint32_t n_answer;
    bool was_short; // an answer was given, of too few tokens to record a query; it is sampled instead
    uint32_t tail;  // rows after the context that decoding takes at most
} profile_question;

typedef struct profile_context {
    char id[65];
    uint64_t
        key; // of the sampler: the first bytes of the id's SHA-256, so that it does not depend on what else is profiled
    int32_t *ids;
    uint32_t n_tokens, n_questions, n_given; // n_given: questions with answers
    bool recorded;                           // the record that grows has it,
    uint32_t n_recorded;                     // and the first n_recorded of its questions
    profile_question *questions;
} profile_context;

// How a job adds to a finished record. Its contexts are then only those that still have work.
typedef struct profile_growth {
    const char **ids; // [n_ids] of all contexts of the larger record, in order; they belong to the record or `own`
    size_t n_ids;
    char (*own)[65];          // [n_own] ids of new contexts
    record_relation relation; // of what is added to the record
    uint64_t recorded;        // which of the options' metrics the record has, a bit each
    size_t witness;           // of these, the one that is computed again and compared; n_metrics: none can be
    profile_context check;    // the record's shortest context, for a run that prefills no other one of it
} profile_growth;

// Everything tokenised and counted before the model runs.
typedef struct profile_job {
    const model_text *text; // that tokenised it; lives as long as the job
    profile_context *contexts;
    size_t n_contexts;
    uint32_t max_tokens, max_questions, max_tail; // over all contexts; max_questions is what one batch holds
    uint64_t n_pairs, n_rows, n_context_tokens;   // questions; decoded rows at most; tokens prefilled
    uint32_t n_beyond;                            // contexts that, with their longest tail, exceed the trained length
    uint64_t n_given;                             // questions with answers
    uint64_t n_short;                             // questions whose answers have too few tokens (profile_question)
    profile_growth growth;                        // all zero where nothing grows
    char *calibration_files;                      // SHA-256 of each, in order, commas between (record_growth.h)
} profile_job;

// Tokenises the calibration files. Errors name file, line and sample: an empty context, T over the model's context
// length (KVB_ARGUMENT, cut with max_tokens or allowed by beyond_trained), ids outside the vocabulary, the same
// sample_id twice. Of a model that was opened for a plan and has no tokenizer texts are counted, four bytes a token.
kvb_status profile_prepare(profile_job *out, const model *m, const model_text *text, const calib_file *files,
                           size_t n_files, const profile_options *o, kvb_error *err);
void profile_job_free(profile_job *job);

// The record's attributes: everything that must be equal for two runs to be one (model, tokenizer, text, metrics,
// sampler, backend, version). The caller owns the object.
cJSON *profile_attributes(const model *m, const profile_job *job, const profile_options *o);

// The attributes of the record that o->grows becomes by the job, for RECORD_ADD; *out is the caller's. KVB_MISMATCH
// names an option or the model when they are not the record's.
kvb_status profile_grown_attributes(cJSON **out, const model *m, const profile_job *job, const profile_options *o,
                                    kvb_error *err);

// What a run keeps in memory beside the model (profile_memory.c); bytes.
typedef struct profile_memory {
    uint64_t cache;       // keys and values of the longest context
    uint64_t questions;   // importance, keys and values of the questions of one batch
    uint64_t activations; // of the forward pass: [T, ...] for one layer, and chunks
    uint64_t scratch;     // of the backend and of the metrics
    uint64_t host;        // scores and importance of one context, logits
} profile_memory;

profile_memory profile_memory_of(const model *m, const profile_job *job, const profile_options *o, uint32_t batch);
uint64_t profile_memory_total(const profile_memory *memory);
// Sets job->max_questions, on entry the most questions of any context, to what options and memory allow. KVB_MEMORY
// when not even one question fits, or not the batch that was asked for. Changes no number of the record.
kvb_status profile_fit_batch(profile_job *job, const model *m, const profile_options *o, kvb_error *err);

double profile_flops(const model *m, const profile_job *job); // of matrix products and attention, causal half only
// What a context's prefill (q NULL) or one of its questions takes, in operations of a large product: for progress and
// plans.
double profile_work(const model *m, const profile_context *c, const profile_question *q);

typedef struct profile_times {
    double prefill, scorers, decode, writing; // seconds
    double extras;                            // what several scorers share: column sums, output norms (observe.h)
    double each[PROFILE_MAX_METRICS];         // of every metric
    double curves, gains;                     // of the losses; decode and prefill are without them
    uint64_t queries, skipped;                // recorded queries; questions that ended before a query was recorded
} profile_times;

// How long the run would take on this machine, about: prefill and decode at the rate that a product of the model's
// shape reaches now (profile_work), and the writing of a record of so many bytes. Takes a second. Errors: those of
// opening a device, KVB_MEMORY.
kvb_status profile_estimate_time(profile_times *out, const model *m, const profile_job *job, double record_bytes,
                                 kvb_error *err);

// Told of all that happens; returns false to stop (KVB_INTERRUPTED). done and total are rows of work over the whole
// job.
typedef struct profile_watch {
    bool (*progress)(void *context, double done, double total);
    void (*message)(void *context, const char *text); // a warning worth a line
    void *context;
} profile_watch;

// ---- Sharing out (profile_share.c) ----

// A stretch of one context's questions, run after one prefill. Questions in it that are done already are left out.
typedef struct profile_piece {
    uint32_t context, first, count; // questions [first, first + count); count 0: the context's scores alone
} profile_piece;

// What one process does, in calibration order.
typedef struct profile_share {
    profile_piece *pieces;
    size_t n;
    double cost, heaviest, total; // floating-point operations: of this share, of the largest one, of all
} profile_share;

// Which contexts, then which questions (in the order of the job), are in the record already: one byte each.
size_t profile_state_size(const profile_job *job);
void profile_read_state(uint8_t *state, const profile_job *job, const record_writer *writer);

// Share `share` (0 .. n_shares - 1) of the plan for what `state` leaves to do (NULL: everything). Depends on model,
// job, state and n_shares alone, so that every process finds its share without asking. profile_share_free gives it
// back.
kvb_status profile_share_out(profile_share *out, const model *m, const profile_job *job, const uint8_t *state,
                             uint32_t n_shares, uint32_t share, kvb_error *err);
void profile_share_free(profile_share *share);

// ---- Running ----

// Runs what the share has and the record has not.
kvb_status profile_run_share(const model *m, const profile_job *job, const profile_options *o,
                             const profile_share *share, record_writer *writer, const profile_watch *watch,
                             profile_times *times, kvb_error *err);
// Assembles the record: of all contexts, or (share) of those that a share has pieces of. KVB_MISMATCH when a question
// is missing.
kvb_status profile_finish(const profile_job *job, const profile_share *share, record_writer *writer, kvb_error *err);

// Runs everything that the record does not have yet and finishes it.
kvb_status profile_run(const model *m, const profile_job *job, const profile_options *o, record_writer *writer,
                       const profile_watch *watch, profile_times *times, kvb_error *err);

// ---- Between the files of the profiling run ----

// Whether context `c` is scored by metric `i`: a recorded one by what the record lacks, and by the witness.
bool profile_scores_metric(const profile_job *job, const profile_context *c, size_t i);

// After a prefill of a context that o->grows has: the witness's scores [B,G,T], which this run has computed, must be
// the record's bit by bit, else this machine or program would add numbers of another kind (KVB_MISMATCH). `buffer`
// [B,G,T].
kvb_status profile_check_witness(const profile_job *job, const profile_options *o, const profile_context *c,
                                 const float *scores, float *buffer, kvb_error *err);
