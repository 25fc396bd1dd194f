#include "profiler/sampler.h"
#include "profiler/linalg.h"
#include <float.h>
#include <math.h>

void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

double sampler_uniform(uint64_t seed, uint64_t context, uint32_t question, uint32_t step)
{
    uint32_t counter[4] = {step, question, (uint32_t)context, (uint32_t)(context >> 32)},
             key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)}, word[4];
    philox4x32(counter, key, word);
    uint64_t bits = ((uint64_t)word[1] << 32 | word[0]) >> 11;
    return (double)bits * 0x1p-53;
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
    for (size_t i = 0; i < n; i++) weights[i] = softmax_exp((logits[i] - top) * scale);
}

int32_t sampler_draw(const sampler *s, const float *logits, float *weights, size_t n, uint64_t context,
                     uint32_t question, uint32_t step)
{
    size_t top = top_logit(logits, n);
    if (top == n) return -1;
    if (s->greedy) return (int32_t)top;
    // Kept within float: 0 or infinity times a logit's distance from the top need not be a number.
    double scale = fmin(fmax(1.0 / s->temperature, FLT_MIN), FLT_MAX);
    softmax_weights(weights, logits, n, logits[top], (float)scale);
    double total = 0;
    for (size_t i = 0; i < n; i++) total += weights[i];
    double rest = sampler_uniform(s->seed, context, question, step) * total;
    for (size_t i = 0; i < n; i++) {
        rest -= weights[i];
        if (rest < 0) return (int32_t)i;
    }
    return (int32_t)top; // rounding left a sliver of the total unclaimed
}
