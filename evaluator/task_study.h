// What eviction costs on a task: the full cache, every metric with every allocator and ratio, and every policy, from
// one prefill per sample. The questions of all cells and of several samples are decoded together; those of one cell and
// sample share a cache.
#pragma once
#include "evaluator/log_file.h"
#include "evaluator/method.h"
#include "evaluator/policy_run.h"
#include "evaluator/task.h"
#include "profiler/text/model_text.h"
#include "study/interval.h"

// What one cell did on one sample.
typedef struct task_result {
    bool done;
    uint32_t n_questions;
    double *scores; // [n_questions], 0 to 1
    double kept;    // share of the context's entries in the cache before the question
    double looked;  // share of them that a policy attends to per step; NaN without one
} task_result;

typedef struct task_cell {
    const method_column *column; // NULL: nothing is evicted
    double ratio;                // pruned share: of the cache, or of what a policy fetches per step
    task_result *samples;        // [n_samples]
} task_cell;

typedef struct task_bench task_bench; // the samples that are answered together

typedef struct task_study {
    const model *m;
    const model_text *text;
    const task *t;
    uint64_t seed; // of the samples
    uint32_t n_samples;
    method_list methods;
    const char *log;  // results so far; NULL: none
    uint32_t refit;   // reference queries per KV head for refitting cut caches, not a policy's; 0: no refitting
    task_cell *cells; // the full cache first; owned
    size_t n_cells;
    size_t n_answered, n_resumed; // cells of all samples: measured by this run; taken from the log
    size_t n_done;                // samples with all cells
    log_file *known;              // NULL: no log; owned
    task_bench *bench;            // owned
} task_study;

// Lists the cells and reads the log. Everything passed in must outlive the study. The caller closes it, also after a
// failure. Errors: KVB_FORMAT if the log is not one.
kvb_status task_study_open(task_study *s, const double *ratios, size_t n_ratios, kvb_error *err);
void task_study_close(task_study *s);

// Reads the result under that key and sets out->done, if the log has it; the caller then frees its scores. Fails with
// KVB_FORMAT if a number is missing.
kvb_status task_result_read(task_result *out, const log_file *log, const char *key, kvb_error *err);

// Takes over a sample, leaving *sample zero, and asks its questions in every cell that the log does not have. They are
// answered at once, or with those of the next samples.
kvb_status task_study_add(task_study *s, uint32_t index, task_sample *sample, kvb_error *err);
// Answers the questions that wait. Cells of a sample have no results before that.
kvb_status task_study_answer(task_study *s, kvb_error *err);

typedef struct task_outcome {
    interval score;      // mean over questions, 0 to 1
    interval to_uniform; // minus the uniform allocator's with the same method and ratio; NaN without one
    double kept, looked; // means over samples
    size_t n_questions;
} task_outcome;

// Summarizes one cell over all samples. Fails with KVB_ARGUMENT if a sample has not been answered.
kvb_status task_summarize(const task_study *s, size_t cell, task_outcome *out, kvb_error *err);
