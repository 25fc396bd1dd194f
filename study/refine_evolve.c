// Separable CMA-ES (Ros and Hansen, "A simple modification in CMA-ES achieving linear time and space complexity", PPSN
// 2008), with the usual constants: one for each knot, whose candidates are measured together.
#include "runtime/fail.h"
#include "study/refine_parts.h"
#include <gsl/gsl_randist.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double FIRST_STEP = 0.3;

typedef struct evolution {
    uint32_t population, parents;
    double weights_square; // 1 / sum of squared weights, "mu_eff"
    double *weights;       // [parents], sum 1
    double *sigma;         // [K]
    double *variance;      // [K, D]
    double *path, *step;   // [K, D] evolution paths of the variances and of sigma
    double *points, *loss; // [population, K, D], [population, K]
    uint32_t *order;       // [population]
} evolution;

static void close_evolution(void *memory)
{
    evolution *e = memory;
    if (!e) return;
    free(e->weights);
    free(e->order);
    free(e);
}

static kvb_status open_evolution(void **memory, const refine_state *s, kvb_error *err)
{
    size_t K = s->n_knots, D = s->n_groups;
    uint32_t population = 4 + (uint32_t)floor(3 * log((double)D)), parents = population / 2;
    evolution *e = calloc(1, sizeof *e);
    *memory = e;
    if (!e) return kvb_fail(err, KVB_MEMORY, "no memory for a population of %u", population);
    e->population = population;
    e->parents = parents;
    e->order = calloc(population, sizeof *e->order);
    e->weights = calloc(parents + K + 3 * K * D + population * K * (D + 1), sizeof(double));
    if (!e->order || !e->weights) return kvb_fail(err, KVB_MEMORY, "no memory for a population of %u", population);
    e->sigma = e->weights + parents;
    e->variance = e->sigma + K;
    e->path = e->variance + K * D;
    e->step = e->path + K * D;
    e->points = e->step + K * D;
    e->loss = e->points + population * K * D;
    double sum = 0, squares = 0;
    for (uint32_t i = 0; i < parents; i++) sum += e->weights[i] = log(parents + 0.5) - log(i + 1.0);
    for (uint32_t i = 0; i < parents; i++) squares += pow(e->weights[i] /= sum, 2);
    e->weights_square = 1 / squares;
    for (size_t k = 0; k < K; k++) e->sigma[k] = FIRST_STEP;
    for (size_t i = 0; i < K * D; i++) e->variance[i] = 1;
    return KVB_OK;
}

static void draw_population(evolution *e, refine_state *s)
{
    uint32_t K = s->n_knots, D = s->n_groups;
    for (uint32_t i = 0; i < e->population; i++)
        for (uint32_t k = 0; k < K; k++)
            for (uint32_t d = 0; d < D; d++)
                e->points[((size_t)i * K + k) * D + d] =
                    s->centre[(size_t)k * D + d] +
                    e->sigma[k] * sqrt(e->variance[(size_t)k * D + d]) * gsl_ran_gaussian(s->rng, 1);
}

// The population by rising loss at knot k; equal losses in the order in which they were drawn.
static void sort_population(evolution *e, uint32_t K, uint32_t k)
{
    for (uint32_t i = 0; i < e->population; i++) {
        uint32_t at = i;
        for (; at > 0 && e->loss[e->order[at - 1] * K + k] > e->loss[i * K + k]; at--) e->order[at] = e->order[at - 1];
        e->order[at] = i;
    }
}

// Mean, paths, variances and step size of knot k.
static void learn(evolution *e, refine_state *s, uint32_t k)
{
    uint32_t K = s->n_knots, D = s->n_groups;
    double mu = e->weights_square, n = D, c_sigma = (mu + 2) / (n + mu + 5),
           damping = 1 + 2 * fmax(0, sqrt((mu - 1) / (n + 1)) - 1) + c_sigma, c_c = (4 + mu / n) / (n + 4 + 2 * mu / n),
           faster = (n + 2) / 3, // the separable form may learn so much faster
        c_1 = faster * 2 / (pow(n + 1.3, 2) + mu),
           c_mu = fmin(1 - c_1, faster * 2 * (mu - 2 + 1 / mu) / (pow(n + 2, 2) + mu)),
           expected = sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n * n)), norm = 0;
    double *centre = s->centre + (size_t)k * D, *variance = e->variance + (size_t)k * D,
           *path = e->path + (size_t)k * D, *step = e->step + (size_t)k * D;
    c_1 = fmin(c_1, 1);
    for (uint32_t d = 0; d < D; d++) {
        double moved = 0, spread = 0;
        for (uint32_t i = 0; i < e->parents; i++) {
            double y = (e->points[((size_t)e->order[i] * K + k) * D + d] - centre[d]) / e->sigma[k];
            moved += e->weights[i] * y;
            spread += e->weights[i] * y * y;
        }
        step[d] = (1 - c_sigma) * step[d] + sqrt(c_sigma * (2 - c_sigma) * mu) * moved / sqrt(variance[d]);
        path[d] = (1 - c_c) * path[d] + sqrt(c_c * (2 - c_c) * mu) * moved;
        variance[d] = (1 - c_1 - c_mu) * variance[d] + c_1 * path[d] * path[d] + c_mu * spread;
        centre[d] += e->sigma[k] * moved;
        norm += step[d] * step[d];
    }
    e->sigma[k] *= exp(c_sigma / damping * (sqrt(norm) / expected - 1));
}

static kvb_status round_of_evolution(void *memory, refine_state *s, kvb_error *err)
{
    evolution *e = memory;
    draw_population(e, s);
    kvb_status status = refine_points(s, e->points, e->population, NULL, 0, e->loss, err);
    for (uint32_t k = 0; k < s->n_knots && status == KVB_OK; k++) {
        sort_population(e, s->n_knots, k);
        learn(e, s, k);
    }
    return status == KVB_OK ? refine_value(s, err) : status;
}

const refine_method refine_by_evolution = {"evolve", open_evolution, round_of_evolution, close_evolution};
