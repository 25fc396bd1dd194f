// Losses in a profiling run: which queries are kept while questions are decoded, and what is recorded of them
// (profiler/model/loss_pass.h). Between the files of the profiling run.
#pragma once
#include "profiler/model/loss_pass.h"
#include "profiler/profile.h"

// A question that was decoded, in the slot of its place in the batch.
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
    float **fold_scores; // [n_metrics] of [B,G,T], in place of the run's own: of rankings that have seen the context,
                         // and of metrics that the finished record has; NULL: not needed
    loss_ranking *rankings; // [n_metrics] of those that are recorded now,
    const char **names;     // and their names
    float *errors, *gains;
    uint32_t *rows; // [batch * tail] whose queries are kept
    uint32_t n_rows;
} profile_losses;

// Opens nothing and does nothing where the options ask for no losses, or nothing is decoded.
kvb_status profile_losses_open(profile_losses *l, const model *m, const profile_job *job, const profile_options *o,
                               forward *f, profile_times *times, kvb_error *err);
void profile_losses_close(profile_losses *l);
static inline bool profile_losses_wanted(const profile_losses *l)
{
    return l->f != NULL;
}

// Row number `row` of the next pass is the query of the answer's token `step`, of `planned` at most: it is one of
// those that are kept, evenly spread, or not.
void profile_losses_see_row(profile_losses *l, uint32_t row, uint32_t step, uint32_t planned);
// Before the pass runs.
void profile_losses_begin_rows(profile_losses *l);

// Before a context is prefilled: rankings that were fitted on it rank by weights that have not seen it.
void profile_losses_enter(profile_losses *l, const profile_context *c);
// One layer's scores of metric i, where they are other ones than those that are recorded.
kvb_status profile_losses_score(const profile_losses *l, size_t i, const layer_view *view, size_t at, kvb_error *err);

// Records curves, and the gains with the context's shortest question, of n questions in the slots 0 .. n-1.
kvb_status profile_losses_put(profile_losses *l, const profile_context *c, const decoded_question *q, uint32_t n,
                              float *const *scores, record_writer *writer, kvb_error *err);

// Questions of a context that the finished record has, and that the run decodes once more for new metrics' curves; the
// caller frees all with profile_recorded_free.
typedef struct recorded_questions {
    decoded_question *each;
    uint32_t n, n_tail; // the longest one's rows
} recorded_questions;
kvb_status profile_recorded_read(recorded_questions *out, const profile_options *o, const profile_context *c,
                                 kvb_error *err);
void profile_recorded_free(recorded_questions *q);
// Operations that curves and gains of a job take, and bytes of the record.
double profile_losses_flops(const model *m, const profile_job *job, const profile_options *o);
double profile_losses_bytes(const model *m, const profile_job *job, const profile_options *o);
// Makes room in the job's batch for these.
void profile_losses_count(profile_job *job, const profile_options *o);
