// What the full cache predicts for the continuation of a text, and how far the predictions of a cut cache are from it.
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>

// n >= 2 teacher-forced rows of the full cache.
typedef struct predictions {
    uint32_t n, vocabulary;
    int32_t *next;       // [n] the continuation's tokens; row i predicts the token after token i
    float *logits;       // [n, vocabulary]
    float *p;            // [n, vocabulary] probabilities
    double *log_sum;     // [n] log of the sum of exp(logits)
    double *nll;         // [n - 1] -log p(true next token)
    uint32_t *likeliest; // [n] the token with the largest logit, the first of equal ones
} predictions;

// Allocates memory for n rows. The caller frees it with predictions_close.
predictions predictions_open(uint32_t n, uint32_t vocabulary);
void predictions_close(predictions *a); // a zero struct is allowed

// Computes all other fields from next and logits.
void predictions_finish(predictions *a);

// How a cut cache's logits compare with a row of the full cache's.
typedef struct row_damage {
    double kl;  // sum p log(p / q), p from the full cache, nats, in double
    double nll; // -log q(true next token); NaN in the last row, whose next token is not known
    bool agree; // the likeliest token is the same
} row_damage;

// Compares `got` [vocabulary], the logits of row i over a cut cache, with the full cache's row i.
row_damage predictions_row(const predictions *a, uint32_t i, const float *got);
