#include "evaluator/predictions.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>

kvb_status predictions_open(predictions *out, uint32_t n, uint32_t vocabulary, kvb_error *err)
{
    size_t logits = (size_t)n * vocabulary;
    *out = (predictions){.n = n,
                         .vocabulary = vocabulary,
                         .next = calloc(n, sizeof *out->next),
                         .logits = malloc(logits * sizeof(float) + 1),
                         .p = malloc(logits * sizeof(float) + 1),
                         .log_sum = calloc(n, sizeof(double)),
                         .nll = calloc(n, sizeof(double))};
    if (out->next && out->logits && out->p && out->log_sum && out->nll) return KVB_OK;
    return kvb_fail(err, KVB_MEMORY, "evaluation: no memory for %u rows of %u logits", n, vocabulary);
}

void predictions_close(predictions *a)
{
    free(a->next);
    free(a->logits);
    free(a->p);
    free(a->log_sum);
    free(a->nll);
    *a = (predictions){0};
}

// log of the sum of exp(x), in double.
static double log_sum_exp(const float *x, size_t n)
{
    float top = x[0];
    for (size_t i = 1; i < n; i++) top = x[i] > top ? x[i] : top;
    double sum = exp((double)x[0] - top);
    for (size_t i = 1; i < n; i++) sum += exp((double)x[i] - top);
    return top + log(sum);
}

static size_t largest(const float *x, size_t n)
{
    size_t best = 0;
    for (size_t i = 1; i < n; i++) best = x[i] > x[best] ? i : best;
    return best;
}

void predictions_finish(predictions *a)
{
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < a->n; i++) {
        const float *row = a->logits + (size_t)i * a->vocabulary;
        a->log_sum[i] = log_sum_exp(row, a->vocabulary);
        for (size_t t = 0; t < a->vocabulary; t++)
            a->p[(size_t)i * a->vocabulary + t] = (float)exp(row[t] - a->log_sum[i]);
        if (i + 1 < a->n) a->nll[i] = a->log_sum[i] - row[a->next[i + 1]];
    }
}

row_damage predictions_row(const predictions *a, uint32_t i, const float *got)
{
    size_t vocabulary = a->vocabulary;
    const float *full = a->logits + i * vocabulary, *p = a->p + i * vocabulary;
    double log_sum = log_sum_exp(got, vocabulary), shift = log_sum - a->log_sum[i], kl = 0;
    for (size_t t = 0; t < vocabulary; t++) kl += p[t] * ((double)full[t] - got[t] + shift);
    return (row_damage){.kl = kl,
                        .nll = i + 1 < a->n ? log_sum - got[a->next[i + 1]] : NAN,
                        .agree = largest(got, vocabulary) == largest(full, vocabulary)};
}
