#include "evaluator/predictions.h"
#include "formats/need.h"
#include "profiler/backend/linalg.h"
#include <math.h>

predictions predictions_open(uint32_t n, uint32_t vocabulary)
{
    size_t logits = (size_t)n * vocabulary;
    return (predictions){.n = n,
                         .vocabulary = vocabulary,
                         .next = need(n, sizeof(int32_t), "token ids"),
                         .logits = need(logits, sizeof(float), "logits"),
                         .p = need(logits, sizeof(float), "probabilities"),
                         .log_sum = need(n, sizeof(double), "rows"),
                         .nll = need(n, sizeof(double), "rows"),
                         .likeliest = need(n, sizeof(uint32_t), "rows")};
}

void predictions_close(predictions *a)
{
    free_all(a->next, a->logits, a->p, a->log_sum, a->nll, a->likeliest);
    *a = (predictions){0};
}

// exp(x) for x <= 0 or NaN, with a relative error of 1e-15; 0 below -700. Inline, so that the loop around it
// vectorises, which a call of libm's exp prevents; in double, since a KL is a small difference of these sums.
static inline double exp_below(double x)
{
    const double shifter = 6755399441055744.0; // 1.5 * 2^52: adding it rounds to an integer in the low mantissa bits
    static const double inverse_factorials[] = {
        1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
        1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1,           1};
    double clamped = x < -700 ? -700 : x;
    union {
        double f;
        uint64_t u;
    } n = {clamped * 1.4426950408889634 + shifter}, power;
    double whole = n.f - shifter,
           r = (clamped - whole * 0.693145751953125) - whole * 1.4286068203094173e-06, // ln 2, first part exact
        p = 1.0 / 6227020800;
    for (int i = 0; i < 13; i++) p = p * r + inverse_factorials[i];
    power.u = (n.u + 1023) << 52 & -(uint64_t) !(x < -700); // 2^whole; a mask, since a branch would not vectorise
    return p * power.f;
}

SIMD_CLONES static float largest(const float *x, size_t n)
{
    float top = x[0];
#pragma omp simd reduction(max : top)
    for (size_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

// Returns the index of the first element that equals `value`.
static uint32_t place_of(const float *x, uint32_t n, float value)
{
    uint32_t i = 0;
    while (i + 1 < n && x[i] != value) i++;
    return i;
}

// log of the sum of exp(x), in double; `top` is the largest of x.
SIMD_CLONES static double log_sum_exp(const float *x, size_t n, float top)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) sum += exp_below((double)x[i] - top);
    return top + log(fmax(sum, 1)); // the largest adds 1
}

// Returns the sum of p (full - got + shift).
SIMD_CLONES static double divergence(const float *p, const float *full, const float *got, size_t n, double shift)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) sum += p[i] * ((double)full[i] - got[i] + shift);
    return sum;
}

void predictions_finish(predictions *a)
{
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < a->n; i++) {
        const float *row = a->logits + (size_t)i * a->vocabulary;
        float top = largest(row, a->vocabulary);
        a->likeliest[i] = place_of(row, a->vocabulary, top);
        a->log_sum[i] = log_sum_exp(row, a->vocabulary, top);
        for (size_t t = 0; t < a->vocabulary; t++)
            a->p[(size_t)i * a->vocabulary + t] = (float)exp(row[t] - a->log_sum[i]);
        if (i + 1 < a->n) a->nll[i] = a->log_sum[i] - row[a->next[i + 1]];
    }
}

row_damage predictions_row(const predictions *a, uint32_t i, const float *got)
{
    uint32_t vocabulary = a->vocabulary;
    const float *full = a->logits + (size_t)i * vocabulary, *p = a->p + (size_t)i * vocabulary;
    float top = largest(got, vocabulary);
    double log_sum = log_sum_exp(got, vocabulary, top);
    return (row_damage){.kl = divergence(p, full, got, vocabulary, log_sum - a->log_sum[i]),
                        .nll = i + 1 < a->n ? log_sum - got[a->next[i + 1]] : NAN,
                        .agree = place_of(got, vocabulary, top) == a->likeliest[i]};
}
