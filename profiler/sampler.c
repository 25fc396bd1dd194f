#include "profiler/sampler.h"
#include "profiler/sampler_core.h"
#include <float.h>
#include <math.h>

void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    philox_words(counter, key, out);
}

double sampler_uniform(uint64_t seed, uint64_t context, uint32_t question, uint32_t step)
{
    return philox_uniform(seed, context, question, step);
}

// The place of the largest logit; n when a logit is NaN or +infinity or none is finite.
static size_t top_logit(const float *logits, size_t n)
{
    size_t top = n;
    for (size_t i = 0; i < n; i++) {
        if (isnan(logits[i]) || logits[i] == INFINITY) return n;
        if (isfinite(logits[i]) && (top == n || logits[i] > logits[top])) top = i;
    }
    return top;
}

SIMD_CLONES static void softmax_weights(float *weights, const float *logits, size_t n, float top, float scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) weights[i] = sampler_weight(logits[i], top, scale);
}

// Sum of one part, in the order of ids.
static double part_sum(const float *logits, size_t n, float top, float scale)
{
    enum { CHUNK = 256 };
    float weights[CHUNK];
    double sum = 0;
    for (size_t at = 0; at < n; at += CHUNK) {
        size_t count = n - at < CHUNK ? n - at : CHUNK;
        softmax_weights(weights, logits + at, count, top, scale);
        for (size_t i = 0; i < count; i++) sum += weights[i];
    }
    return sum;
}

float sampler_scale(const sampler *s)
{
    // Kept within float: 0 or infinity times a logit's distance from the top need not be a number.
    return (float)fmin(fmax(1.0 / s->temperature, FLT_MIN), FLT_MAX);
}

int32_t sampler_draw(const sampler *s, const float *logits, size_t n, const draw_key *key)
{
    size_t top = top_logit(logits, n), size = sampler_part_size(n);
    double sums[SAMPLER_PARTS];
    if (top == n) return -1;
    if (s->greedy) return (int32_t)top;
    float scale = sampler_scale(s);
    for (size_t p = 0; p < SAMPLER_PARTS; p++) {
        size_t from = p * size < n ? p * size : n, to = n - from < size ? n : from + size;
        sums[p] = part_sum(logits + from, to - from, logits[top], scale);
    }
    return sampler_walk(sums, logits, n, top, scale, sampler_uniform(s->seed, key->context, key->question, key->step));
}
