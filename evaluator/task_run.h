// Answers of the model to a sample's questions, over the full context or over what an eviction left of it.
#pragma once
#include "evaluator/policy_run.h"
#include "evaluator/task.h"

typedef struct task_answers {
    char *text[TASK_MAX_QUESTIONS]; // one per question, decoded
    double score[TASK_MAX_QUESTIONS];
    size_t n;
    double mean; // of the scores
} task_answers;

// Token ids of a sample's context, with BOS in front where the model wants it. malloc'd.
kvb_status task_context_ids(int32_t **ids, uint32_t *n, const model *m, const task_sample *sample, kvb_error *err);
// The most positions after the context that a question and its answer take.
kvb_status task_positions(uint32_t *out, const model *m, const task *t, const task_sample *sample, kvb_error *err);

// Answers every question by greedy decoding (ties: lower id) over its own copy of `context`, a cache of the context that stays as it is. Without a
// policy, `together` questions are decoded at a time (the decoder must take that many questions' rows at once). With one, each question goes by
// itself and token by token, from the state that the policy had after the prefill, and a new turn begins behind the question. Decoding stops at an
// end token, or after the task's number of new tokens.
kvb_status task_answer(task_answers *out, decoder *d, const model *m, const kv_cache *context, const task *t,
                       const task_sample *sample, policy_run *run, uint32_t together, kvb_error *err);
void task_answers_free(task_answers *answers); // leaves it zero
