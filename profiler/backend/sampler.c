#include "profiler/backend/sampler.h"
#include "profiler/backend/sampler_core.h"
#include <float.h>
#include <math.h>
#include <string.h>

void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    philox_words(counter, key, out);
}

double sampler_uniform(uint64_t seed, uint64_t context, uint32_t question, uint32_t step)
{
    return philox_uniform(seed, context, question, step);
}

// Returns the largest logit, or NaN if one is NaN or +infinity.
SIMD_CLONES static float largest(const float *logits, size_t n)
{
    float top = -INFINITY;
    int bad = 0;
#pragma omp simd reduction(max : top) reduction(| : bad)
    for (size_t i = 0; i < n; i++) {
        bad |= !(logits[i] < INFINITY);
        top = logits[i] > top ? logits[i] : top;
    }
    return bad ? NAN : top;
}

// Returns the place of the largest logit, or n if a logit is NaN or +infinity, or none is finite.
static size_t top_logit(const float *logits, size_t n)
{
    float top = largest(logits, n);
    size_t i = 0;
    if (!isfinite(top)) return n;
    while (logits[i] != top) i++;
    return i;
}

SIMD_CLONES static void softmax_weights(float *weights, const float *logits, size_t n, float top, float scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) weights[i] = sampler_weight(logits[i], top, scale);
}

enum { PARTS_AT_ONCE = 8 }; // a divisor of SAMPLER_PARTS; several sums at once, so that none waits for another

// Sums PARTS_AT_ONCE parts from part `first` on, each in the order of ids.
static void part_sums(double *sums, size_t first, const float *logits, size_t n, float top, float scale)
{
    enum { CHUNK = 256 };
    float weights[PARTS_AT_ONCE][CHUNK];
    size_t size = sampler_part_size(n);
    for (int p = 0; p < PARTS_AT_ONCE; p++) sums[first + p] = 0;
    for (size_t at = 0; at < size; at += CHUNK) {
        size_t most = size - at < CHUNK ? size - at : CHUNK;
        for (size_t p = 0; p < PARTS_AT_ONCE; p++) {
            size_t from = (first + p) * size + at, count = from >= n ? 0 : n - from < most ? n - from : most;
            softmax_weights(weights[p], logits + (count ? from : 0), count, top, scale);
            memset(weights[p] + count, 0, (most - count) * sizeof **weights);
        }
        for (size_t i = 0; i < most; i++)
            for (int p = 0; p < PARTS_AT_ONCE; p++) sums[first + p] += weights[p][i];
    }
}

float sampler_scale(const sampler *s)
{
    // Kept within float: 0 or infinity times a logit's distance from the top could be NaN.
    return (float)fmin(fmax(1.0 / s->temperature, FLT_MIN), FLT_MAX);
}

int32_t sampler_draw(const sampler *s, const float *logits, size_t n, const draw_key *key)
{
    size_t top = top_logit(logits, n);
    double sums[SAMPLER_PARTS];
    if (top == n) return -1;
    if (s->greedy) return (int32_t)top;
    float scale = sampler_scale(s);
    for (size_t p = 0; p < SAMPLER_PARTS; p += PARTS_AT_ONCE) part_sums(sums, p, logits, n, logits[top], scale);
    return sampler_walk(sums, logits, n, top, scale, sampler_uniform(s->seed, key->context, key->question, key->step));
}
