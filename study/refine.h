// Searches for better budgets by measured damage. Nothing here runs a model: the caller measures what candidates lose.
//
// A candidate is a shift for every head (shift.h). Each refined ratio, a knot, takes what is best for it, but all knots
// of a candidate are one table, so rows between them stay nested. The caller's starts, such as the budgets of another
// table, are tried first, half of the way, three quarters and all of it. Then come rounds that balance layers around
// the best so far:
//
//     D_l   how much smaller the loss gets when layer l alone keeps everything and all others stay cut
//     q_l   = (D_l / n_l) / (sum of D / sum of n), n_l the tokens that the layer keeps
//     n_l'  = n_l sqrt(q_l), then a common shift restores the total
//
// If a layer's loss fell as 1 / n_l, this would be the optimum at once: there no layer gains by taking a token from
// another. Unlike gains that are measured with the rest of the cache intact, D_l knows what the other layers' cuts do to
// a layer's errors, which differs by a factor of ten between layers (docs/objective.md).
//
// After every candidate a second set of texts decides what is kept, and a round that gains nothing there is the last.
#pragma once
#include "study/shift.h"

// Measures n candidates, shift [n, n_knots, n_heads], on all texts of the calibration or the selection set: loss
// [n, n_knots], means over the texts. Equal candidates must get equal losses. Any failure ends the search.
typedef kvb_status refine_measure(void *context, bool selection, const double *shift, uint32_t n, double *loss,
                                  kvb_error *err);
// Measures a candidate [n_knots, n_heads] on the calibration set as it is, and for every layer with that layer alone
// keeping everything: loss [n_knots, 1 + n_layers]. kept [n_knots, n_heads] receives the tokens that its heads keep.
typedef kvb_status refine_restore(void *context, const double *shift, double *loss, double *kept, kvb_error *err);

typedef struct refine_progress {
    uint32_t tried, rounds;                // candidates and rounds of balancing so far
    const double *calibration, *selection; // [n_knots] loss of the last candidate
    const double *calibration_before, *selection_before; // [n_knots] loss of the table
} refine_progress;

typedef struct refine_task {
    const shift_base *base; // the table
    const double *knots;    // [n_knots] ratios that are refined, ascending
    uint32_t n_knots;
    uint32_t n_tokens; // of the contexts
    uint32_t rounds;   // of balancing, at most
    uint32_t n_starts;
    const double *starts; // [n_starts, n_knots, n_heads] shifts to try first
    refine_measure *measure;
    refine_restore *restore;
    void (*report)(void *context, const refine_progress *p); // NULL: none
    void *context;                                           // of all three
} refine_task;

typedef struct refine_result {
    double *shift;                            // [n_knots, n_heads] the best on the selection set; 0: the table itself
    double *calibration_before, *calibration; // [n_knots] losses of the table and of the result
    double *selection_before, *selection;     // [n_knots]
    uint32_t tried, rounds;
} refine_result;

// The same losses give the same result. On failure *out is zero. Errors: KVB_ARGUMENT, and those of the callbacks.
kvb_status refine_run(refine_result *out, const refine_task *task, kvb_error *err);
void refine_free(refine_result *r); // a zero struct is allowed

// Computes the shift [n_knots, heads] that moves every head of `base` to what it keeps at the knots in `to` (same
// heads, rows at the knots at least).
void shifts_to_table(const shift_base *base, const shift_base *to, const double *knots, uint32_t n_knots,
                     double *shift);
