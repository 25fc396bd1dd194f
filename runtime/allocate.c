#include "allocate.h"
#include <math.h>
#include <string.h>

static uint32_t count_heads(const allocate_shape *s)
{
    return s->n_layers * s->n_kv_heads;
}

static uint32_t clamp_tokens(double x, uint32_t least, uint32_t most)
{
    return !(x > least) ? least : x < most ? (uint32_t)x : most;
}

uint32_t allocate_mean(const allocate_shape *s, double ratio)
{
    return clamp_tokens(s->n_tokens * (1 - ratio), 0, s->n_tokens);
}

uint64_t allocate_uniform(const allocate_shape *s, double ratio, uint32_t *keep)
{
    uint32_t n = count_heads(s), mean = allocate_mean(s, ratio);
    for (uint32_t h = 0; h < n; h++) keep[h] = mean;
    return (uint64_t)n * mean;
}

void allocate_level(const allocate_shape *s, uint64_t total, uint32_t floor, uint32_t *keep)
{
    uint32_t n = count_heads(s), most = s->n_tokens, least = floor < most ? floor : most;
    uint64_t now = 0;
    for (uint32_t h = 0; h < n; h++) {
        keep[h] = keep[h] < least ? least : keep[h] > most ? most : keep[h];
        now += keep[h];
    }
    total = total < (uint64_t)n * least ? (uint64_t)n * least : total > (uint64_t)n * most ? (uint64_t)n * most : total;
    while (now < total)
        for (uint32_t h = 0; h < n && now < total; h++)
            if (keep[h] < most) {
                keep[h]++;
                now++;
            }
    while (now > total)
        for (uint32_t h = n; h-- > 0 && now > total;)
            if (keep[h] > least) {
                keep[h]--;
                now--;
            }
}

bool allocate_pyramid(const allocate_shape *s, double ratio, double beta, uint32_t window, uint32_t *keep)
{
    double mean = s->n_tokens * (1 - ratio), lo = mean / beta, hi = 2 * mean - lo, most = (double)s->n_tokens - window;
    if (hi >= most) {
        hi = most;
        lo = 2 * mean - hi;
    }
    bool pyramid = s->n_layers > 1 && s->n_tokens >= hi && hi >= lo && lo >= window;
    for (uint32_t l = 0; l < s->n_layers; l++) {
        double of_layer = pyramid ? rint(hi - l * (hi - lo) / (s->n_layers - 1)) : rint(mean);
        for (uint32_t g = 0; g < s->n_kv_heads; g++)
            keep[(size_t)l * s->n_kv_heads + g] = clamp_tokens(of_layer, 0, s->n_tokens);
    }
    return pyramid;
}

// Unsigned keys in the order of the floats; -0 equals +0.
static uint32_t key_of(float score)
{
    float plus_zero = score + 0.0f;
    uint32_t bits;
    memcpy(&bits, &plus_zero, sizeof bits);
    return bits ^ (0x80000000u | (0u - (bits >> 31)));
}

// The heads that compete with each other, and what each of them has without competing.
typedef struct contest {
    const float *scores; // [n_heads, n_tokens]; those in begin .. end - 1 compete
    uint32_t n_heads, n_tokens, begin, end;
    uint32_t safe; // of every head, the best so many that compete are kept in any case
} contest;

// Counts the competing tokens of head h whose key is at least `key`, but no fewer than the safe ones.
static uint32_t count_winners(const contest *c, uint32_t h, uint64_t key)
{
    const float *score = c->scores + (size_t)h * c->n_tokens;
    uint32_t count = 0;
    for (uint32_t t = c->begin; t < c->end; t++) count += key_of(score[t]) >= key;
    return count > c->safe ? count : c->safe;
}

static uint64_t count_all_winners(const contest *c, uint64_t key)
{
    uint64_t sum = 0;
    for (uint32_t h = 0; h < c->n_heads; h++) sum += count_winners(c, h, key);
    return sum;
}

// Computes how many competing tokens each head keeps if `total` of them stay in all. The lowest key that still gets in
// is found by bisection of the 32 bits: no memory, 33 passes.
static void run_contest(const contest *c, uint64_t total, uint32_t *keep)
{
    uint64_t in = 0, out = (uint64_t)UINT32_MAX + 1; // key `in` lets at least `total` in, key `out` fewer
    while (out - in > 1) {
        uint64_t middle = in + (out - in) / 2;
        if (count_all_winners(c, middle) >= total) in = middle;
        else out = middle;
    }
    uint64_t left = total;
    for (uint32_t h = 0; h < c->n_heads; h++) {
        keep[h] = count_winners(c, h, out);
        left -= keep[h] < left ? keep[h] : left;
    }
    for (uint32_t h = 0; h < c->n_heads && left; h++) {
        uint64_t tied = count_winners(c, h, in) - keep[h], more = tied < left ? tied : left;
        keep[h] += (uint32_t)more;
        left -= more;
    }
}

void allocate_ada(const allocate_shape *s, double ratio, double alpha, const float *scores, uint32_t sink,
                  uint32_t window, ada_form form, uint32_t *keep)
{
    uint32_t mean = allocate_mean(s, ratio), tokens = s->n_tokens, heads = s->n_kv_heads;
    uint32_t begin = sink < tokens ? sink : tokens, end = window < tokens - begin ? tokens - window : begin;
    uint32_t fixed = tokens - (end - begin);
    if (mean <= fixed || mean == tokens) {
        allocate_uniform(s, ratio, keep);
        return;
    }
    uint32_t competing = mean - fixed;
    if (form == ADA_GLOBAL) heads = count_heads(s);
    for (uint32_t first = 0; first < count_heads(s); first += heads) {
        uint32_t safe = clamp_tokens(alpha * mean, 0, mean); // int(alpha n), including the protected ones
        contest c = {scores + (size_t)first * tokens, heads, tokens, begin, end, safe > fixed ? safe - fixed : 0};
        if (form == ADA_ORIGINAL) c.safe = 0;
        run_contest(&c, (uint64_t)heads * competing, keep + first);
        for (uint32_t h = first; h < first + heads; h++) {
            if (form == ADA_ORIGINAL)
                keep[h] = clamp_tokens(rint((1 - alpha) * keep[h] + floor(alpha * competing)), 0, end - begin);
            keep[h] += fixed;
        }
    }
}

// How many competing tokens each head of a layer gets. If a layer's weight gives it more than it has, the surplus goes
// to the layers that have room, in equal parts.
static double layer_share(const allocate_shape *s, const double *weight, double mean, double most, uint32_t layer)
{
    double sum = 0, own = 0, low = 0, high = most;
    for (uint32_t l = 0; l < s->n_layers; l++) sum += weight[l];
    for (int round = 0; round < 64; round++) { // bisection for the part that each gets on top
        double top = (low + high) / 2, used = 0;
        for (uint32_t l = 0; l < s->n_layers; l++) {
            double share = fmin(most, (sum > 0 ? weight[l] / sum * s->n_layers * mean : mean) + top);
            used += share;
            if (l == layer) own = share;
        }
        if (used > s->n_layers * mean) high = top;
        else low = top;
    }
    return own;
}

void allocate_layers(const allocate_shape *s, double ratio, const double *weight, const float *scores, uint32_t sink,
                     uint32_t window, uint32_t *keep)
{
    uint32_t mean = allocate_mean(s, ratio), tokens = s->n_tokens, heads = s->n_kv_heads;
    uint32_t begin = sink < tokens ? sink : tokens, end = window < tokens - begin ? tokens - window : begin;
    uint32_t fixed = tokens - (end - begin);
    if (mean <= fixed || mean == tokens) {
        allocate_uniform(s, ratio, keep);
        return;
    }
    for (uint32_t l = 0; l < s->n_layers; l++) {
        double share = layer_share(s, weight, mean - fixed, end - begin, l) + 1e-6; // 1e-6: the bisection's error
        uint32_t *own = keep + (size_t)l * heads;
        for (uint32_t g = 0; g < heads; g++) own[g] = clamp_tokens(share, 0, end - begin);
        if (scores) {
            const contest c = {scores + (size_t)l * heads * tokens, heads, tokens, begin, end, 0};
            run_contest(&c, (uint64_t)(share * heads), own);
        }
        for (uint32_t g = 0; g < heads; g++) own[g] += fixed;
    }
}
