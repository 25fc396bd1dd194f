// A linear model of the loss around the centre, and steps against its gradient. Damage is measured exactly, so what a
// candidate says of one group is blurred by the other groups only: pairs that differ in the sign of every move cancel
// all that is even, and a ridge shares the rest out. A pair costs one text, and texts take turns.
#include "runtime/fail.h"
#include "study/refine_parts.h"
#include <gsl/gsl_linalg.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE_COUNT = 3, PROPOSALS = 2 * SIZE_COUNT, PAIRS_MIN = 8, PAIRS_MAX = 48 };
static const double MOVE = 0.3;                      // of every group in a pair
static const double FORGET = 0.6;                    // weight of a pair after each round
static const double FIRST_RADIUS = 0.25;             // root mean square of a step's moves
static const double LONGEST = 3;                     // a group's move, in radii
static const double SIZES[SIZE_COUNT] = {0.5, 1, 2}; // of proposals, in radii

typedef struct gradient_model {
    uint32_t pairs;          // of a round
    gsl_matrix *products;    // [D, D] weighted sums of z z', z the signs of a pair
    double *slopes;          // [K, D] weighted sums of z times the slope along it, per knot
    double *direction;       // [K, D] against the gradient, root mean square 1; shared part in [K]
    double *radius;          // [K]
    double weight;           // of all pairs
    double *signs;           // [pairs, D]
    double *points, *loss;   // [2 pairs or PROPOSALS, K, D], and [.., K]
    uint32_t *texts, *order; // [n_texts]; [PROPOSALS, K]
} gradient_model;

static void close_model(void *memory)
{
    gradient_model *m = memory;
    if (!m) return;
    if (m->products) gsl_matrix_free(m->products);
    free(m->slopes);
    free(m->texts);
    free(m);
}

static kvb_status open_model(void **memory, const refine_state *s, kvb_error *err)
{
    size_t K = s->n_knots, D = s->n_groups;
    uint32_t wanted = s->n_groups / 2 > s->task->n_texts ? s->n_groups / 2 : s->task->n_texts, // every text has a say
        pairs = wanted < PAIRS_MIN   ? PAIRS_MIN
                : wanted > PAIRS_MAX ? PAIRS_MAX
                                     : wanted;
    gradient_model *m = calloc(1, sizeof *m);
    *memory = m;
    if (!m) return kvb_fail(err, KVB_MEMORY, "no memory for %u pairs", pairs);
    m->pairs = pairs;
    m->products = gsl_matrix_calloc(D, D);
    m->slopes = calloc(K * D + (K + 1) * D + K + pairs * D + 2 * pairs * K * (D + 1), sizeof(double));
    m->texts = calloc(s->task->n_texts + PROPOSALS * K, sizeof *m->texts);
    if (!m->products || !m->slopes || !m->texts) return kvb_fail(err, KVB_MEMORY, "no memory for %u pairs", pairs);
    m->direction = m->slopes + K * D;
    m->radius = m->direction + (K + 1) * D;
    m->signs = m->radius + K;
    m->points = m->signs + pairs * D;
    m->loss = m->points + 2 * pairs * K * D;
    m->order = m->texts + s->task->n_texts;
    for (size_t k = 0; k < K; k++) m->radius[k] = FIRST_RADIUS;
    return KVB_OK;
}

// ---- Pairs ----

static void add_pair(gradient_model *m, const double *z, const double *up, const double *down, uint32_t K, uint32_t D)
{
    m->weight++;
    for (uint32_t i = 0; i < D; i++)
        for (uint32_t j = 0; j < D; j++) *gsl_matrix_ptr(m->products, i, j) += z[i] * z[j];
    for (uint32_t k = 0; k < K; k++)
        for (uint32_t i = 0; i < D; i++) m->slopes[(size_t)k * D + i] += z[i] * (up[k] - down[k]) / (2 * MOVE);
}

// The pairs whose turn it is on one text: numbers first, first + n_texts, ...
static kvb_status measure_pairs(gradient_model *m, refine_state *s, uint32_t first, kvb_error *err)
{
    uint32_t K = s->n_knots, D = s->n_groups, n_texts = s->task->n_texts, n = 0, text = (first + s->round) % n_texts;
    for (uint32_t p = first; p < m->pairs; p += n_texts)
        for (int side = 0; side < 2; side++, n++)
            for (size_t i = 0; i < (size_t)K * D; i++)
                m->points[(size_t)n * K * D + i] = s->centre[i] + (side ? -MOVE : MOVE) * m->signs[p * D + i % D];
    if (n == 0) return KVB_OK;
    kvb_status status = refine_points(s, m->points, n, &text, 1, m->loss, err);
    if (status != KVB_OK) return status;
    for (uint32_t p = first, i = 0; p < m->pairs; p += n_texts, i += 2)
        add_pair(m, m->signs + (size_t)p * D, m->loss + (size_t)i * K, m->loss + (size_t)(i + 1) * K, K, D);
    return KVB_OK;
}

static kvb_status observe(gradient_model *m, refine_state *s, kvb_error *err)
{
    gsl_matrix_scale(m->products, FORGET);
    for (size_t i = 0; i < (size_t)s->n_knots * s->n_groups; i++) m->slopes[i] *= FORGET;
    m->weight *= FORGET;
    for (size_t i = 0; i < (size_t)m->pairs * s->n_groups; i++) m->signs[i] = gsl_rng_uniform_int(s->rng, 2) ? 1 : -1;
    kvb_status status = KVB_OK;
    for (uint32_t t = 0; t < s->task->n_texts && status == KVB_OK; t++) status = measure_pairs(m, s, t, err);
    return status;
}

// ---- The gradient ----

// x = (products + ridge I)^-1 b; b and x may be the same.
static kvb_status solve_ridge(const gradient_model *m, double ridge, const double *b, double *x, size_t D,
                              kvb_error *err)
{
    gsl_matrix *a = gsl_matrix_alloc(D, D);
    if (!a) return kvb_fail(err, KVB_MEMORY, "no memory for %zu groups", D);
    gsl_matrix_memcpy(a, m->products);
    for (size_t i = 0; i < D; i++) *gsl_matrix_ptr(a, i, i) += ridge;
    if (x != b) memcpy(x, b, D * sizeof *x);
    gsl_vector_view v = gsl_vector_view_array(x, D);
    gsl_linalg_cholesky_decomp1(a); // positive definite: the ridge is above 0
    gsl_linalg_cholesky_svx(a, &v.vector);
    gsl_matrix_free(a);
    return KVB_OK;
}

// A direction for the moves: against the gradient, no common shift, root mean square 1, no group far ahead.
static void normalise(double *x, uint32_t D)
{
    double mean = 0, square = 0;
    for (uint32_t d = 0; d < D; d++) mean += x[d] / D;
    for (uint32_t d = 0; d < D; d++) square += pow(x[d] - mean, 2) / D;
    double size = sqrt(square) + 1e-300;
    for (uint32_t d = 0; d < D; d++) x[d] = -fmin(LONGEST, fmax(-LONGEST, (x[d] - mean) / size));
}

// The knots' common gradient first, and what each has of its own beyond that under a stronger ridge. In units of the
// pairs' weight, a ridge of D is as much as all groups' moves together blur.
static kvb_status find_directions(gradient_model *m, const refine_state *s, kvb_error *err)
{
    uint32_t K = s->n_knots, D = s->n_groups;
    double *common = m->direction + (size_t)K * D, *b = m->points, ridge = 0.25 * D;
    memset(b, 0, D * sizeof *b);
    for (size_t i = 0; i < (size_t)K * D; i++) b[i % D] += m->slopes[i] / K;
    kvb_status status = solve_ridge(m, ridge, b, common, D, err);
    for (uint32_t k = 0; k < K && status == KVB_OK; k++) {
        double *own = m->direction + (size_t)k * D;
        for (uint32_t d = 0; d < D; d++) {
            b[d] = m->slopes[(size_t)k * D + d];
            for (uint32_t j = 0; j < D; j++) b[d] -= gsl_matrix_get(m->products, d, j) * common[j];
        }
        status = solve_ridge(m, 2 * ridge, b, own, D, err);
        for (uint32_t d = 0; d < D; d++) own[d] += common[d];
        normalise(own, D);
    }
    normalise(common, D);
    return status;
}

// ---- Steps ----

// Three sizes of each knot's own step, and of the common one where there are several knots. How many.
static uint32_t propose(gradient_model *m, const refine_state *s)
{
    uint32_t K = s->n_knots, D = s->n_groups, n = K > 1 ? PROPOSALS : SIZE_COUNT;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < K; k++) {
            const double *along = m->direction + (size_t)(i < SIZE_COUNT ? k : K) * D;
            for (uint32_t d = 0; d < D; d++)
                m->points[((size_t)i * K + k) * D + d] =
                    s->centre[(size_t)k * D + d] + m->radius[k] * SIZES[i % SIZE_COUNT] * along[d];
        }
    return n;
}

// Each knot's best half of n proposals moves to the front.
static void keep_half(gradient_model *m, uint32_t K, uint32_t D, uint32_t n, uint32_t half)
{
    for (uint32_t k = 0; k < K; k++)
        for (uint32_t i = 0; i < half; i++) {
            uint32_t best = i;
            for (uint32_t j = i + 1; j < n; j++)
                if (m->loss[j * K + k] < m->loss[best * K + k]) best = j;
            double *a = m->points + ((size_t)i * K + k) * D, *b = m->points + ((size_t)best * K + k) * D;
            for (uint32_t d = 0; d < D && best != i; d++) {
                double other = a[d];
                a[d] = b[d];
                b[d] = other;
            }
            double other = m->loss[i * K + k];
            m->loss[i * K + k] = m->loss[best * K + k];
            m->loss[best * K + k] = other;
        }
}

// Successive halving: six on a quarter of the texts, three on half of them, one on all. The texts of a stage are among
// those of the next, so that what was measured is not measured, or counted, again.
static kvb_status halve(gradient_model *m, refine_state *s, uint32_t left, kvb_error *err)
{
    uint32_t n = s->task->n_texts, before = 0;
    kvb_status status = KVB_OK;
    for (uint32_t share = left > SIZE_COUNT ? 4 : 2; share >= 1 && status == KVB_OK; share /= 2) {
        uint32_t count = (n + share - 1) / share;
        for (uint32_t i = 0; i < count; i++) m->texts[i] = (s->round * (n / 2) + i) % n;
        status = refine_points(s, m->points, left, m->texts, count, m->loss, err);
        s->spent -= (double)left * before / n;
        before = count;
        if (status == KVB_OK && left > 1) keep_half(m, s->n_knots, s->n_groups, left, left / 2);
        left = left > 1 ? left / 2 : 1;
    }
    return status;
}

static kvb_status round_of_model(void *memory, refine_state *s, kvb_error *err)
{
    gradient_model *m = memory;
    uint32_t K = s->n_knots, D = s->n_groups;
    kvb_status status = observe(m, s, err);
    if (status == KVB_OK) status = find_directions(m, s, err);
    if (status != KVB_OK) return status;
    status = halve(m, s, propose(m, s), err);
    for (uint32_t k = 0; k < K && status == KVB_OK; k++) {
        double *point = m->points + (size_t)k * D, *centre = s->centre + (size_t)k * D, square = 0;
        for (uint32_t d = 0; d < D; d++) square += pow(point[d] - centre[d], 2) / D;
        bool better = m->loss[k] < s->value[k];
        m->radius[k] = better ? fmin(1, fmax(m->radius[k] / 2, sqrt(square))) : m->radius[k] / 2;
        if (!better) continue;
        memcpy(centre, point, D * sizeof *centre);
        s->value[k] = m->loss[k];
    }
    return status;
}

const refine_method refine_by_model = {"model", open_model, round_of_model, close_model};
