#include "evaluator/attend.h"
#include "formats/need.h"
#include "profiler/backend/linalg.h"
#include <math.h>
#include <string.h>

void attend_reserve(attend_scratch *s, size_t entries, uint32_t head_dim)
{
    if (s->scores && entries <= s->entries) return;
    attend_release(s);
    s->entries = (entries + 255) / 256 * 256; // decoding grows a cache by a token at a time
    s->scores = need(ATTEND_LINES * s->entries, sizeof(float), "attention scores");
    s->queries = need((size_t)ATTEND_LINES * head_dim, sizeof(float), "numbers of queries");
    s->outputs = need((size_t)ATTEND_LINES * head_dim, sizeof(float), "numbers of outputs");
}

void attend_release(attend_scratch *s)
{
    free_all(s->scores, s->queries, s->outputs, s->rows);
    *s = (attend_scratch){0};
}

kv_span attend_before(attend_scratch *s, const kv_cache *cache, uint32_t layer, uint32_t kv_head)
{
    kv_span span = kv_cache_base_span(cache, layer, kv_head);
    if (!cache->base || !cache->base->packed) return span;
    size_t floats = (size_t)2 * span.count * cache->head_dim;
    if (floats > s->unpacked) {
        s->rows = need_more(s->rows, floats, sizeof *s->rows, "numbers of keys and values");
        s->unpacked = floats;
    }
    return kv_cache_unpack(cache->base, layer, kv_head, s->rows);
}

SIMD_CLONES static float dot(const float *a, const float *b, size_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

SIMD_CLONES static void add_scaled(float *o, const float *v, float factor, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) o[i] += factor * v[i];
}

// x = softmax(x) with one more score, *sink, in the denominator, which belongs to no entry; NULL: none
SIMD_CLONES static void softmax(float *x, size_t n, const float *sink)
{
    float top = sink ? *sink : -INFINITY, sum = 0;
#pragma omp simd reduction(max : top)
    for (size_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    if (sink) sum = softmax_exp(*sink - top);
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) {
        float e = softmax_exp(x[i] - top);
        x[i] = e;
        sum += e;
    }
    float scale = 1.0f / sum;
#pragma omp simd
    for (size_t i = 0; i < n; i++) x[i] *= scale;
}

// For few lines: reads keys and values, on which a decode step spends its time, once for the whole group.
SIMD_CLONES static void scores_few(float *scores, size_t ld, const float *q, uint32_t lines, const float *k, size_t n,
                                   uint32_t d, float scale)
{
    for (size_t j = 0; j < n; j++)
        for (uint32_t r = 0; r < lines; r++) {
            const float *query = q + (size_t)r * d, *key = k + j * d;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (uint32_t c = 0; c < d; c++) sum += query[c] * key[c];
            scores[r * ld + j] = sum * scale;
        }
}

SIMD_CLONES static void mix_few(float *o, const float *p, size_t ld, uint32_t lines, const float *v, size_t n,
                                uint32_t d)
{
    for (size_t j = 0; j < n; j++)
        for (uint32_t r = 0; r < lines; r++) {
            float weight = p[r * ld + j], *out = o + (size_t)r * d;
            const float *value = v + j * d;
#pragma omp simd
            for (uint32_t c = 0; c < d; c++) out[c] += weight * value[c];
        }
}

static void cap_scores(float *line, size_t n, float cap)
{
    for (size_t i = 0; cap > 0 && i < n; i++) line[i] = cap * tanhf(line[i] / cap);
}

// Counts the entries of `before`, then `span`, whose positions are less than `first`.
static size_t entries_before(kv_span before, kv_span span, uint32_t first)
{
    size_t n = 0;
    while (n < before.count && before.positions[n] < first) n++;
    if (n < before.count) return n;
    while (n - before.count < span.count && span.positions[n - before.count] < first) n++;
    return n;
}

// One row that looks at chosen entries only; all others get probability 0.
static void attend_chosen(attend_scratch *s, uint32_t group, kv_span span, uint32_t d, const uint32_t *chosen,
                          uint32_t n_chosen, const attend_rule *rule)
{
    float scale = 1.0f / sqrtf((float)d);
    for (uint32_t r = 0; r < group; r++) {
        float *line = s->scores + (size_t)r * span.count, *out = s->outputs + (size_t)r * d;
        for (uint32_t i = 0; i < n_chosen; i++)
            line[i] = dot(s->queries + (size_t)r * d, span.k + (size_t)chosen[i] * d, d) * scale;
        cap_scores(line, n_chosen, rule->softcap);
        softmax(line, n_chosen, rule->sinks ? rule->sinks + r : NULL);
        memset(out, 0, d * sizeof(float));
        for (uint32_t i = 0; i < n_chosen; i++) add_scaled(out, span.v + (size_t)chosen[i] * d, line[i], d);
        uint32_t i = n_chosen; // spread the probabilities out, from the back, since chosen[i] >= i
        for (uint32_t j = span.count; j-- > 0;) {
            bool here = i > 0 && chosen[i - 1] == j;
            float p = here ? line[i - 1] : 0;
            if (here) i--;
            line[j] = p;
        }
    }
}

// Computes scores of all lines against a part of the head's entries; lines of `scores` are `ld` apart.
static void score_part(float *scores, size_t ld, const float *q, uint32_t lines, kv_span part, uint32_t d)
{
    float scale = 1.0f / sqrtf((float)d);
    if (lines < GEMM_MIN_ROWS) scores_few(scores, ld, q, lines, part.k, part.count, d, scale);
    else gemm(false, true, lines, part.count, d, scale, q, d, part.k, d, 0.0f, scores, ld);
}

// Adds to the outputs what a part contributes.
static void mix_part(float *o, const float *p, size_t ld, uint32_t lines, kv_span part, uint32_t d)
{
    if (lines < GEMM_MIN_ROWS) mix_few(o, p, ld, lines, part.v, part.count, d);
    else gemm(false, false, lines, d, part.count, 1.0f, p, ld, part.v, d, 1.0f, o, d);
}

static void attend_all(attend_scratch *s, uint32_t n, uint32_t group, kv_span before, kv_span span, uint32_t d,
                       const attend_rule *rule)
{
    uint32_t lines = n * group;
    size_t ld = (size_t)before.count + span.count;
    if (before.count) score_part(s->scores, ld, s->queries, lines, before, d);
    score_part(s->scores + before.count, ld, s->queries, lines, span, d);
    for (uint32_t r = 0; r < lines; r++) {
        float *line = s->scores + r * ld;
        uint32_t position = rule->position + r / group, window = rule->window;
        size_t seen = ld - (n - 1 - r / group),
               from = window && position >= window ? entries_before(before, span, position + 1 - window) : 0;
        memset(line, 0, from * sizeof(float));
        cap_scores(line + from, seen - from, rule->softcap);
        softmax(line + from, seen - from, rule->sinks ? rule->sinks + r % group : NULL);
        memset(line + seen, 0, (ld - seen) * sizeof(float));
    }
    memset(s->outputs, 0, (size_t)lines * d * sizeof(float));
    if (before.count) mix_part(s->outputs, s->scores, ld, lines, before, d);
    mix_part(s->outputs, s->scores + before.count, ld, lines, span, d);
}

void attend_head(attend_scratch *s, float *o, const float *q, size_t q_step, uint32_t n, uint32_t group, kv_span before,
                 kv_span span, uint32_t head_dim, const uint32_t *chosen, uint32_t n_chosen, const attend_rule *rule)
{
    static const attend_rule plain = {0};
    if (!rule) rule = &plain;
    size_t row = (size_t)group * head_dim;
    for (uint32_t i = 0; i < n; i++) memcpy(s->queries + i * row, q + i * q_step, row * sizeof(float));
    if (chosen) attend_chosen(s, group, span, head_dim, chosen, n_chosen, rule);
    else attend_all(s, n, group, before, span, head_dim, rule);
    for (uint32_t i = 0; i < n; i++) memcpy(o + i * q_step, s->outputs + i * row, row * sizeof(float));
}
