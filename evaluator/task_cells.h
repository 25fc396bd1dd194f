// What eviction costs on a task: every metric, allocator and ratio, and every policy that acts in decode, from one prefill per sample.
#pragma once
#include "evaluator/allocator.h"
#include "evaluator/policy.h"
#include "evaluator/task_run.h"

typedef struct task_cell {
    const policy *p;      // acts in decode; NULL: evicted once, by a metric
    uint32_t metric;      // of the metrics given; when p is NULL
    const allocator *how; // NULL: nothing is evicted, and p must be NULL
    double ratio;         // pruned share: of the cache, or of what a policy fetches per step
    // Summed over samples by task_cells_run:
    double score;       // of all questions
    size_t n_questions; // their number
    double kept,
        looked; // share of the context's entries in the cache before the question; and attended to per step of a policy
    size_t n_samples;
} task_cell;

// Answers one sample in every cell. A policy's capacities may come from any allocator that needs no scores (KVB_ARGUMENT else). `answers` (NULL:
// none) is told the answers of every cell.
typedef struct task_listener {
    void (*hear)(void *context, const task_cell *cell, const task_sample *sample, const task_answers *answers);
    void *context;
} task_listener;
kvb_status task_cells_run(const model *m, const metric *metrics, size_t n_metrics, task_cell *cells, size_t n,
                          const task *t, const task_sample *sample, const task_listener *answers, kvb_error *err);
