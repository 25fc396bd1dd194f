// What the searches of refine.h share: a centre in the space of groups, candidates around it, and what they lose.
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

// A kind of search: a round moves centre and value, and spends evaluations.
typedef struct refine_method {
    const char *name;
    kvb_status (*open)(void **memory, const refine_state *s, kvb_error *err);
    kvb_status (*round)(void *memory, refine_state *s, kvb_error *err);
    void (*close)(void *memory); // NULL is allowed
} refine_method;

extern const refine_method refine_by_model, refine_by_evolution, refine_by_swaps;

// Points [n, K, D] on the listed calibration texts (NULL: all): loss [n, K] over them, in units of scale.
kvb_status refine_points(refine_state *s, const double *points, uint32_t n, const uint32_t *texts, uint32_t n_texts,
                         double *loss, kvb_error *err);
// The centre on all calibration texts, into value.
kvb_status refine_value(refine_state *s, kvb_error *err);
// Shifts of heads [K, n_heads] of one point [K, D].
void refine_expand(const refine_state *s, const double *point, double *shift);
