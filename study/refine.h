// Searches for better budgets by measured damage: shifts of heads (shift.h) that reduce the loss of cut caches.
// Nothing here runs a model: the caller measures what candidates lose. Each refined ratio is a knot, and candidates for
// all knots are measured together as one table, so that the rows between them stay nested. The caller's starts, such as
// those of measured.h, are tried first, half of the way, three quarters and all of it, and from the best of them four
// slopes along the depth. Each is measured on texts of a second set too, and the best there, knot by knot, is the
// result.
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>

// Measures a candidate, shift [n_knots, n_heads], on all texts of the calibration or the selection set: loss [n_knots,
// texts]. Equal candidates must get equal losses. Any failure ends the search.
typedef kvb_status refine_measure(void *context, bool selection, const double *shift, double *loss, kvb_error *err);

typedef struct refine_progress {
    double evaluations, wanted;            // of candidates, in units of one candidate on all calibration texts
    uint32_t round;                        // 0: before the first
    const double *calibration, *selection; // [n_knots] loss of the candidate
    const double *calibration_before, *selection_before; // [n_knots] loss of the table
} refine_progress;

typedef struct refine_task {
    uint32_t n_layers, n_heads; // heads of the whole model, layer-major
    uint32_t n_knots;
    uint32_t n_texts, n_selection; // of both sets, at least 1
    bool heads;                    // single heads may move; else only whole layers
    uint32_t evaluations;          // as asked for, at least 1, only reported; those on the selection set count too
    uint32_t n_starts;
    const double *starts; // [n_starts, n_knots, n_heads] shifts to try first
    double start_cost;    // evaluations already spent to find the starts
    refine_measure *measure;
    void (*report)(void *context, const refine_progress *p); // NULL: none
    void *context;                                           // of both
} refine_task;

typedef struct refine_result {
    double *shift;                            // [n_knots, n_heads] the best on the selection set; 0: the table itself
    double *calibration_before, *calibration; // [n_knots] losses of the table and of the result
    double *selection_before, *selection;     // [n_knots]
    double evaluations;                       // spent
    uint32_t rounds;
} refine_result;

// Runs the search; the caller frees *out. The same losses give the same result. On failure *out is zero.
kvb_status refine_run(refine_result *out, const refine_task *task, kvb_error *err);
void refine_free(refine_result *r); // a zero struct is allowed
