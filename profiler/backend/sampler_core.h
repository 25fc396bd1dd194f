// The arithmetic of a draw: one source for the host and for devices, so that both draw the same token from the same
// logits. Compiled without fused multiply-add on both.
//
// The ids are cut into SAMPLER_PARTS parts of equal length. Weights exp((logit - top) / temperature) are summed in
// double within each part in the order of ids, then over the parts in their order; a draw walks down the same sums.
#pragma once
#include "profiler/backend/linalg.h"
#include <stdint.h>

enum { SAMPLER_PARTS = 256 };

// The ids of part p are [p * size, (p + 1) * size), as far as there are any.
HOST_DEVICE static inline size_t sampler_part_size(size_t n)
{
    return (n + SAMPLER_PARTS - 1) / SAMPLER_PARTS;
}

HOST_DEVICE static inline float sampler_weight(float logit, float top, float scale)
{
    return softmax_exp((logit - top) * scale);
}

// Philox4x32-10: see sampler.h.
HOST_DEVICE static inline void philox_words(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
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

HOST_DEVICE static inline double philox_uniform(uint64_t seed, uint64_t context, uint32_t question, uint32_t step)
{
    uint32_t counter[4] = {step, question, (uint32_t)context, (uint32_t)(context >> 32)},
             key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)}, word[4];
    philox_words(counter, key, word);
    uint64_t bits = ((uint64_t)word[1] << 32 | word[0]) >> 11;
    return (double)bits * 0x1p-53;
}

// The id that a uniform number in [0, 1) draws, from the sums of the parts. `top` is the index of the largest logit.
HOST_DEVICE static inline int32_t sampler_walk(const double sums[SAMPLER_PARTS], const float *logits, size_t n,
                                               size_t top, float scale, double uniform)
{
    double total = 0;
    for (int p = 0; p < SAMPLER_PARTS; p++) total += sums[p];
    double rest = uniform * total;
    size_t size = sampler_part_size(n), p = 0;
    while (p < SAMPLER_PARTS && rest - sums[p] >= 0) rest -= sums[p++];
    for (size_t i = p * size; p < SAMPLER_PARTS && i < (p + 1) * size && i < n; i++) {
        rest -= (double)sampler_weight(logits[i], logits[top], scale);
        if (rest < 0) return (int32_t)i;
    }
    return (int32_t)top; // rounding left a sliver of the total unclaimed
}
