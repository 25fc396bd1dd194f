// Numbers with their nouns.
#pragma once
#include "runtime/kvbudget.h"
#include <stdint.h>
#include <stdio.h>

enum { WORDS_SIZE = 80 };

static inline const char *plural(uint64_t n, const char *one, const char *many)
{
    return n == 1 ? one : many;
}

// Writes "59 questions on 4 contexts" to `out`, where `what` is "context", the singular. Returns out.
static inline const char *questions_on(char out[WORDS_SIZE], uint32_t questions, uint32_t n, const char *what)
{
    snprintf(out, WORDS_SIZE, "%u %s on %u %.30s%s", questions, plural(questions, "question", "questions"), n, what,
             n == 1 ? "" : "s");
    return out;
}

// Widens a range by the lengths of the texts that a table was calibrated on.
static inline void widen_lengths(const kvb_info *info, uint32_t *least, uint32_t *most)
{
    for (uint32_t i = 0; i < info->n_calibration_tokens; i++) {
        uint32_t n = info->calibration_tokens[i];
        if (n < *least) *least = n;
        if (n > *most) *most = n;
    }
}
