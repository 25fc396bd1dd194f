// The results of `recommend`: every ratio's damage, the promise, the memory that it saves, and what more texts would
// allow.
#pragma once
#include "study/promise.h"
#include "tools/report/results.h"

typedef struct promise_report {
    const promise_task *task;
    const double *ratios; // [n_ratios]
    double confidence;
    const kvb_table *table;
    bool strict;
    uint32_t n_tokens, n_next, length; // context and continuation of the texts; the length for which memory is shown
    promise_row *rows;                 // [n_criteria, n_ratios]
    uint32_t n_passed;
} promise_report;

kvb_status promise_report_print(const promise_report *r, kvb_error *err);
// Adds settings, rows and details to a document that the caller has begun.
kvb_status promise_report_fill(const promise_report *r, results *to, kvb_error *err);
// Returns KVB_UNSUPPORTED with a message that says why nothing can be promised.
kvb_status promise_report_refusal(const promise_report *r, kvb_error *err);
