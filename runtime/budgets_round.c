// The roundings of kvb_budgets(): shares of T tokens to whole numbers of them.
#include "budgets_round.h"
#include "torch_topk.h"
#include <math.h>
#include <stdbool.h>
#include <string.h>

// Products that are floored must be rounded to a double or a float first. Compilers may fuse a product with a later
// sum (GCC does so by default where the machine can), and then two machines would hand out different budgets. A call
// that is not inlined keeps them apart, whatever flags this file is compiled with.
#if defined(__GNUC__)
#define ROUNDED_RESULT __attribute__((noinline))
#else
#define ROUNDED_RESULT
#endif

static double prune_at(const kvb_mix *at, size_t head)
{
    double below = at->below ? at->below[head] : 0;
    if (at->cost) {
        double low = (1 - below) * (at->cost_below ? at->cost_below[head] : 1);
        double high = (1 - at->above[head]) * at->cost_above[head];
        double kept = fma(at->weight, high - low, low) / at->cost[head];
        return kept < 1 ? 1 - kept : 0; // all tokens may take less than these bytes
    }
    // a call of fma rounds once on every machine, where a + w * d may round once or twice
    return at->weight == 0 ? below : fma(at->weight, at->above[head] - below, below);
}

// ---- layer_lr ----

// kvpress's `ideal_keep_counts`: everything in float32.
static ROUNDED_RESULT void ideal_f32(const kvb_mix *at, size_t first_head, uint32_t n, uint32_t n_tokens, float *ideal)
{
    for (uint32_t g = 0; g < n; g++) {
        float rate = 1.0f - (float)prune_at(at, first_head + g);
        rate = rate < 0 ? 0 : rate > 1 ? 1 : rate;
        ideal[g] = rate * (float)n_tokens;
    }
}

void kvb_round_layer(const kvb_mix *at, size_t first_head, uint32_t n, uint32_t n_tokens, uint32_t *keep)
{
    float ideal[KVB_MAX_KV_HEADS];
    kvb_topk_item fraction[KVB_MAX_KV_HEADS];
    int64_t most = (int64_t)n * n_tokens, base = 0, total, left;

    ideal_f32(at, first_head, n, n_tokens, ideal);
    total = (int64_t)rintf(kvb_torch_sum(ideal, n));
    total = total < n ? n : total > most ? most : total;
    for (uint32_t g = 0; g < n; g++) {
        float whole = floorf(ideal[g]);
        fraction[g].value = ideal[g] - whole;
        fraction[g].index = g;
        keep[g] = whole < (float)n_tokens ? (uint32_t)whole : n_tokens;
        base += (int64_t)whole;
    }
    left = total - base;
    if (left > 0) {
        size_t k = left < n ? (size_t)left : n;
        kvb_torch_topk(fraction, n, k);
        for (size_t i = 0; i < k; i++) keep[fraction[i].index] += keep[fraction[i].index] < n_tokens;
    }
    for (uint32_t g = 0; g < n; g++)
        keep[g] = keep[g] ? keep[g] : 1; // after the remainders, so the layer's sum may exceed `total`: as kvpress
}

// ---- selecting the largest remainders of the whole model without room for a sorted copy ----

typedef struct remainders remainders;
struct remainders {
    uint64_t (*key)(const remainders *self, size_t head); // larger = served earlier
    const kvb_mix *at;
    const uint32_t *keep;
    uint32_t n_tokens, block;
};

// The k-th largest key of n, 1 <= k <= n, and how many heads with exactly that key are among the first k. Radix
// select: a histogram of 8 bits at a time narrows the prefix of the wanted key, eight passes in all.
static uint64_t kth_largest(const remainders *r, size_t n, size_t k, size_t *ties)
{
    uint64_t prefix = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        size_t histogram[256] = {0};
        unsigned digit = 255;
        for (size_t h = 0; h < n; h++) {
            uint64_t key = r->key(r, h);
            if (shift == 56 || key >> (shift + 8) == prefix) ++histogram[key >> shift & 255];
        }
        for (; k > histogram[digit]; --digit) k -= histogram[digit];
        prefix = prefix << 8 | digit;
    }
    *ties = k;
    return prefix;
}

// ---- floor and global_lr ----

static ROUNDED_RESULT double ideal_f64(const kvb_mix *at, size_t head, uint32_t n_tokens)
{
    return (1 - prune_at(at, head)) * n_tokens;
}

double kvb_mix_ideal(const void *mix, size_t head, uint32_t n_tokens)
{
    return ideal_f64(mix, head, n_tokens);
}

static uint64_t fraction_key(const remainders *r, size_t head)
{
    double ideal = ideal_f64(r->at, head, r->n_tokens);
    double fraction = ideal - floor(ideal); // exact, and not negative: so its bits are ordered like its value
    uint64_t bits;
    memcpy(&bits, &fraction, sizeof bits);
    return bits;
}

void kvb_round_floor(const kvb_mix *at, size_t n_heads, uint32_t n_tokens, uint32_t *keep)
{
    for (size_t h = 0; h < n_heads; h++) {
        double ideal = ideal_f64(at, h, n_tokens), up = ceil(ideal);
        double whole = up - ideal < 1e-6 ? up : floor(ideal);
        keep[h] = whole < 1 ? 1 : (uint32_t)whole;
    }
}

// Raises every count to `floor_count`. What is missing is taken one by one from the count that is highest above the
// floor (tie: lower index). This is done in one go: find the level to which the highest are lowered, then take what is
// still missing by index.
void kvb_raise_to_floor(uint32_t *count, size_t n, uint32_t floor_count)
{
    uint64_t missing = 0, surplus = 0, taken = 0;
    uint32_t low = 0, high = 0; // the level, counted above the floor
    for (size_t h = 0; h < n; h++) {
        if (count[h] < floor_count) {
            missing += floor_count - count[h];
            count[h] = floor_count;
        } else {
            surplus += count[h] - floor_count;
            high = count[h] - floor_count > high ? count[h] - floor_count : high;
        }
    }
    missing = missing < surplus ? missing : surplus; // with too little, all end at the floor and the total grows
    if (missing == 0) return;
    while (low < high) { // smallest level that costs no more than `missing`
        uint32_t level = low + (high - low) / 2;
        uint64_t cost = 0;
        for (size_t h = 0; h < n; h++) {
            uint32_t above = count[h] - floor_count;
            cost += above > level ? above - level : 0;
        }
        if (cost <= missing) {
            high = level;
            taken = cost;
        } else {
            low = level + 1;
        }
    }
    missing -= taken;
    for (size_t h = 0; h < n; h++) {
        if (count[h] - floor_count >= high) {
            count[h] = floor_count + high;
            if (missing > 0 && high > 0) {
                --count[h];
                --missing;
            }
        }
    }
}

void kvb_round_global(const kvb_mix *at, size_t n_heads, uint32_t n_tokens, uint32_t *keep)
{
    remainders r = {fraction_key, at, keep, n_tokens, 0};
    double sum = 0;
    uint64_t base = 0, total, most = (uint64_t)n_heads * n_tokens;
    for (size_t h = 0; h < n_heads; h++) {
        double ideal = ideal_f64(at, h, n_tokens);
        keep[h] = (uint32_t)floor(ideal);
        base += keep[h];
        sum += ideal;
    }
    sum = rint(sum);
    total = sum < (double)n_heads ? n_heads : sum > (double)most ? most : (uint64_t)sum;
    if (total > base) {
        size_t k = total - base < n_heads ? (size_t)(total - base) : n_heads, ties;
        uint64_t threshold = kth_largest(&r, n_heads, k, &ties);
        for (size_t h = 0; h < n_heads; h++) {
            uint64_t key = fraction_key(&r, h);
            bool take = key > threshold || (key == threshold && ties > 0);
            ties -= take && key == threshold;
            keep[h] += take && keep[h] < n_tokens;
        }
    }
    kvb_raise_to_floor(keep, n_heads, 1);
}

// ---- blocks ----

static uint64_t block_key(const remainders *r, size_t head)
{
    return r->keep[head] % r->block;
}

void kvb_round_blocks(uint32_t *keep, size_t n_heads, uint32_t n_tokens, uint32_t block, uint32_t least_blocks)
{
    remainders r = {block_key, NULL, keep, n_tokens, block};
    uint64_t total = 0, whole = 0, wanted, threshold = UINT64_MAX;
    size_t ties = 0;
    for (size_t h = 0; h < n_heads; h++) {
        total += keep[h];
        whole += keep[h] / block;
    }
    wanted = total / block + (total % block >= block - total % block); // half up
    if (wanted > whole) // at most as many as there are heads with a remainder
        threshold = kth_largest(&r, n_heads, (size_t)(wanted - whole), &ties);
    for (size_t h = 0; h < n_heads; h++) {
        uint64_t key = block_key(&r, h);
        bool take = key > threshold || (key == threshold && ties > 0);
        ties -= take && key == threshold;
        keep[h] = keep[h] / block + take;
    }
    kvb_raise_to_floor(keep, n_heads, least_blocks);
    for (size_t h = 0; h < n_heads; h++) {
        uint64_t tokens = (uint64_t)keep[h] * block;
        keep[h] = tokens < n_tokens ? (uint32_t)tokens : n_tokens;
    }
}
