// What refine.c and refine_model.c share: a centre in the space of groups, candidates around it, and what they lose.
#pragma once
#include "study/refine.h"
#include <gsl/gsl_rng.h>
#include <stddef.h>

typedef struct refine_state {
    const refine_task *task;
    uint32_t n_knots, n_groups; // K, D
    const uint32_t *group;      // [n_heads] the group that a head moves with
    const double *origin;       // [K, n_heads] shifts from which the groups move
    const double *scale;        // [K] loss of the table on the calibration set
    double *centre;             // [K, D] where the search stands
    double *value;              // [K] its loss on the calibration set, in units of scale
    double spent;               // evaluations
    uint32_t round;
    gsl_rng *rng;
} refine_state;

// The search itself (refine_model.c): a round moves centre and value, and spends evaluations.
typedef struct gradient_model gradient_model;
gradient_model *gradient_model_open(const refine_state *s);
kvb_status gradient_model_round(gradient_model *m, refine_state *s, kvb_error *err);
void gradient_model_close(gradient_model *m); // NULL is allowed

// Points [n, K, D] on the listed calibration texts (NULL: all): loss [n, K] over them, in units of scale.
kvb_status refine_points(refine_state *s, const double *points, uint32_t n, const uint32_t *texts, uint32_t n_texts,
                         double *loss, kvb_error *err);
