// Seeded sampling: a draw depends only on (seed, context, question, step), not on threads, batches or earlier draws.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct sampler {
    bool greedy;        // the largest logit; ties go to the lower token id
    double temperature; // > 0 when not greedy
    uint64_t seed;
} sampler;

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): four words from a counter and a
// key.
void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

// A uniform number in [0, 1) with 53 random bits, for one draw.
double sampler_uniform(uint64_t seed, uint64_t context, uint32_t question, uint32_t step);

// What a draw depends on besides the logits and the sampler.
typedef struct draw_key {
    uint64_t context;
    uint32_t question, step;
} draw_key;

// 1 / temperature, as draws use it.
float sampler_scale(const sampler *s);

// Draws a token id from softmax(logits / temperature), logits [n], by inverting the cumulative distribution in the
// order of ids; the sums are in double (sampler_core.h). Returns -1 if a logit is NaN or +infinity, or none is finite.
int32_t sampler_draw(const sampler *s, const float *logits, size_t n, const draw_key *key);
