// Scores of attention heads, for the allocators that want them given (HeadKV, DuoAttention): read from a file, or
// measured as how much each query head looks at what an answer repeats, the mark of a retrieval head (Wu et al., arXiv
// 2404.15574; HeadKV, 2410.19258, sums attention over a needle in the same way).
#pragma once
#include "evaluator/task_study.h"

// Reads L lines of H or G numbers (.tsv, as DuoAttention publishes them). Writes [L, H] when query_heads, else [L, G]:
// groups are averaged or repeated. Scores must be finite and not negative. Errors name the file and the place.
kvb_status head_scores_read(const char *path, uint32_t n_layers, uint32_t n_heads, uint32_t n_kv_heads,
                            bool query_heads, float *out, kvb_error *err);
// The same from bytes; `path` stands in messages.
kvb_status head_scores_parse(const void *data, size_t size, const char *path, uint32_t n_layers, uint32_t n_heads,
                             uint32_t n_kv_heads, bool query_heads, float *out, kvb_error *err);

typedef struct retrieval {
    const model *m;
    const model_text *text;
    double *sums; // [L, H]
    size_t n;     // questions in them
} retrieval;

retrieval retrieval_open(const model *m, const model_text *text);
void retrieval_close(retrieval *r);

// Adds every question of a sample: the gold strings are teacher-forced behind the question over the full cache, and a
// head's score is the mean, over the queries that predict them, of its attention to the tokens of the context in which
// they stand. KVB_ARGUMENT for a sample whose gold strings do not stand in its context.
kvb_status retrieval_add(retrieval *r, const task_sample *sample, kvb_error *err);

// Means over the questions, one line per layer and a number per query head (head_scores_read).
kvb_status retrieval_write(const retrieval *r, const char *path, kvb_error *err);
