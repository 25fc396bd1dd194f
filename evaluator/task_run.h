// Answers of the model to a sample's questions, over the full context or over what an eviction left of it.
#pragma once
#include "evaluator/policy_run.h"
#include "evaluator/task.h"
#include "profiler/text/model_text.h"

// Token ids of a sample's context, with BOS in front where the model wants it. malloc'd.
kvb_status task_context_ids(int32_t **ids, uint32_t *n, const model *m, const model_text *text,
                            const task_sample *sample, kvb_error *err);
// The most positions after the context that a question and its answer take.
kvb_status task_positions(uint32_t *out, const model_text *text, const task *t, const task_sample *sample,
                          kvb_error *err);

// One question that is answered over one cache.
typedef struct task_turn {
    const task_question *question;
    kv_cache *cache; // of the context, with task_positions of room; it takes the question and the answer
    policy_run *run; // acts on it, in the state behind the prefill, and belongs to no other turn of a call; NULL: none
    char *answer;    // filled: decoded text, malloc'd
    double score;    // filled, 0 to 1
} task_turn;

// Answers n questions together, greedily (ties: lower id). A question goes through the model at once, or token by token
// under a policy, for which a new turn begins behind it. An answer ends at an end token, after the task's number of new
// tokens, or where nothing that followed could change its score. On failure no answer has to be freed.
kvb_status task_answer(task_turn *turns, size_t n, decoder *d, const model_text *text, const task *t, kvb_error *err);
