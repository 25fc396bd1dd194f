// The simplest search: one group up, another down, and what is better stays. What the others are measured against.
#include "runtime/fail.h"
#include "study/refine_parts.h"
#include <gsl/gsl_randist.h>
#include <stdlib.h>
#include <string.h>

enum { CANDIDATES = 8 }; // of a round, all from the same centre
static const double STEP = 0.5;

static kvb_status open_swaps(void **memory, const refine_state *s, kvb_error *err)
{
    *memory = malloc(CANDIDATES * ((size_t)s->n_knots * s->n_groups + s->n_knots) * sizeof(double));
    return *memory ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for %d candidates", CANDIDATES);
}

static kvb_status round_of_swaps(void *memory, refine_state *s, kvb_error *err)
{
    uint32_t K = s->n_knots, D = s->n_groups;
    double *points = memory, *loss = points + (size_t)CANDIDATES * K * D;
    for (int i = 0; i < CANDIDATES; i++)
        for (uint32_t k = 0; k < K; k++) {
            double *point = points + ((size_t)i * K + k) * D, step = gsl_ran_gaussian(s->rng, STEP);
            memcpy(point, s->centre + (size_t)k * D, D * sizeof *point);
            point[gsl_rng_uniform_int(s->rng, D)] += step;
            point[gsl_rng_uniform_int(s->rng, D)] -= step;
        }
    kvb_status status = refine_points(s, points, CANDIDATES, NULL, 0, loss, err);
    for (int i = 0; i < CANDIDATES && status == KVB_OK; i++)
        for (uint32_t k = 0; k < K; k++) {
            if (!(loss[i * K + k] < s->value[k])) continue;
            s->value[k] = loss[i * K + k];
            memcpy(s->centre + (size_t)k * D, points + ((size_t)i * K + k) * D, D * sizeof *points);
        }
    return status;
}

const refine_method refine_by_swaps = {"swap", open_swaps, round_of_swaps, free};
