// Losses in a profiling run: which queries are kept while questions are decoded, and what is recorded about them
// (profiler/model/loss_pass.h). Internal to the profiling run.
#pragma once
#include "profiler/model/loss_pass.h"
#include "profiler/profile.h"

// A decoded question; its slot is its place in the batch.
typedef struct decoded_question {
    uint32_t number; // in its context
    int32_t *suffix, *answer;
    uint32_t n_suffix, n_answer, n_queries;
} decoded_question;

typedef struct profile_losses {
    const model *m;
    const profile_job *job;
    const profile_options *o;
    forward *f;
    profile_times *times;
    float **fold_scores; // [n_metrics] of [B,G,T], used instead of the run's own: for rankings that were fitted on the
                         // context, and for metrics that the finished record has; NULL: not needed
    loss_ranking *rankings; // [n_metrics] of the metrics recorded in this run,
    const char **names;     // and their names
    size_t n_rankings;      // of the questions that were judged last; 0: they have no losses
    const float **curves;   // of the question that was taken last
    uint32_t packed;        // the slot whose packing errors are in `packings`
    float *errors, *gains, *packings;
    references refit; // of the context that was prefilled last; zero unless curves are of refitted cuts
    uint32_t *rows;   // [batch * tail] rows whose queries are kept
    uint32_t n_rows;
} profile_losses;

// If the options ask for no losses, or nothing is decoded, it opens nothing and the other functions do nothing.
void profile_losses_open(profile_losses *l, const model *m, const profile_job *job, const profile_options *o,
                         forward *f, profile_times *times);
void profile_losses_close(profile_losses *l);
static inline bool profile_losses_wanted(const profile_losses *l)
{
    return l->f != NULL;
}

// Announces that row number `row` of the next pass is the query of the answer's token `step`, of at most `planned`.
// Evenly spaced queries are kept.
void profile_losses_see_row(profile_losses *l, uint32_t row, uint32_t step, uint32_t planned);
// Call before the pass runs.
void profile_losses_begin_rows(profile_losses *l);

// Call before a context is prefilled: rankings that were fitted on it switch to the weights fitted without it.
void profile_losses_enter(profile_losses *l, const profile_context *c);
// Takes a layer's reference queries while it is prefilled, if curves are of refitted cuts; then it needs VIEW_Q_RAW.
void profile_losses_see(profile_losses *l, const layer_view *view);
// Computes one layer's scores of metric i, if losses use other scores than the recorded ones.
kvb_status profile_losses_score(const profile_losses *l, size_t i, const layer_view *view, size_t at, kvb_error *err);

// Computes the curves of n decoded questions in the slots 0 .. n-1.
kvb_status profile_losses_judge(profile_losses *l, const profile_context *c, const decoded_question *q, uint32_t n,
                                float *const *scores, kvb_error *err);
// Sets *out to the losses of a judged question, with gains if it is the context's first one; n is 0 if it has none. The
// memory is lent until the next call.
kvb_status profile_losses_take(record_losses *out, profile_losses *l, const profile_context *c,
                               const decoded_question *q, uint32_t slot, kvb_error *err);

// Questions of a context in the finished record, which the run decodes again for the curves of new metrics. The caller
// frees them with profile_recorded_free.
typedef struct recorded_questions {
    decoded_question *each;
    uint32_t n, n_tail; // the longest one's rows
} recorded_questions;
kvb_status profile_recorded_read(recorded_questions *out, const profile_options *o, const profile_context *c,
                                 kvb_error *err);
void profile_recorded_free(recorded_questions *q);
// Returns the operations that a job's curves and gains take, and the bytes that they add to the record.
double profile_losses_flops(const model *m, const profile_job *job, const profile_options *o);
double profile_losses_bytes(const model *m, const profile_job *job, const profile_options *o);
