// A linear model of the loss around the centre, and steps against its gradient. Damage is measured exactly, so what a
// candidate says of one group is blurred by the other groups and by its text only: pairs that differ in the sign of
// every move cancel all that is even, each text counts by what share of its loss a pair changes, so that none rules,
// and a ridge, chosen by what it predicts of texts left out, shares the rest out. A pair costs one text, and texts take
// turns.
#include "formats/need.h"
#include "study/refine_parts.h"
#include <gsl/gsl_linalg.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE_COUNT = 3, PROPOSALS = 2 * SIZE_COUNT, PAIRS_MIN = 8, PER_TEXT_MAX = 4, ROUNDS_KEPT = 4, FOLDS = 4 };
static const double MOVE = 0.3;        // of every group in a pair
static const double FORGET = 0.7;      // weight of a pair after each round
static const double ROUND_SHARE = 0.1; // of a stage's evaluations, that the pairs of a round may take
static const double SMALL = 0.1;       // of the table's loss: a text that loses less hardly counts
static const double RIDGES[] = {0.25, 0.5, 1, 2, 4, 8, 16}; // in units of all groups' moves together
static const double FIRST_RADIUS = 0.16;                    // root mean square of a step's moves
static const double LONGEST = 3;                            // a group's move, in radii
static const double SIZES[SIZE_COUNT] = {0.5, 1.25, 3};     // of proposals, in radii

struct gradient_model {
    uint32_t pairs, n_rows; // of a round; of the rounds that are kept
    double *signs;          // [ROUNDS_KEPT * pairs, D] of the moves; the newest round first
    double *change;         // [.., K] what half a pair changes, as a share of its text's loss
    uint32_t *fold;         // [..] texts that are left out together
    gsl_matrix *products;   // [D, D] sums of z z', z the signs of a pair
    double *slopes;         // [K + 1, D] sums of z times the change; of all knots together in [K]
    double *direction;      // [K + 1, D] against the gradient, root mean square 1; shared part in [K]
    double *radius;         // [K]
    double *points, *loss;  // [2 pairs or PROPOSALS, K, D], and [.., K]
    uint32_t *texts;        // [n_texts]
};

void gradient_model_close(gradient_model *m)
{
    if (!m) return;
    gsl_matrix_free(m->products);
    free(m->signs);
    free(m->texts);
    free(m);
}

gradient_model *gradient_model_open(const refine_state *s)
{
    const refine_task *t = s->task;
    size_t K = s->n_knots, D = s->n_groups;
    double stage = t->heads ? t->evaluations / 2.0 : t->evaluations,
           per_text = fmin(PER_TEXT_MAX, fmax(1, floor(ROUND_SHARE * stage)));
    uint32_t pairs = (uint32_t)per_text * t->n_texts;
    if (pairs < PAIRS_MIN) pairs = PAIRS_MIN;
    size_t rows = (size_t)ROUNDS_KEPT * pairs, points = 2 * pairs > PROPOSALS ? 2 * pairs : PROPOSALS;
    gradient_model *m = need(1, sizeof *m, "models of losses");
    m->pairs = pairs;
    m->products = needed(gsl_matrix_calloc(D, D), "matrices over groups of heads");
    m->signs = need(rows * (D + K) + 2 * (K + 1) * D + K + points * K * (D + 1), sizeof(double), "moves of pairs");
    m->texts = need(t->n_texts + rows, sizeof *m->texts, "texts");
    m->fold = m->texts + t->n_texts;
    m->change = m->signs + rows * D;
    m->slopes = m->change + rows * K;
    m->direction = m->slopes + (K + 1) * D;
    m->radius = m->direction + (K + 1) * D;
    m->points = m->radius + K;
    m->loss = m->points + points * K * D;
    for (size_t k = 0; k < K; k++) m->radius[k] = FIRST_RADIUS;
    return m;
}

// ---- Pairs ----

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
    for (uint32_t p = first, i = 0; p < m->pairs; p += n_texts, i += 2) {
        m->fold[p] = (n_texts < FOLDS ? p / n_texts : text) % FOLDS;
        for (uint32_t k = 0; k < K; k++) {
            double up = m->loss[(size_t)i * K + k], down = m->loss[(size_t)(i + 1) * K + k];
            m->change[p * K + k] = (up - down) / (fabs(up) + fabs(down) + SMALL) / MOVE;
        }
    }
    return KVB_OK;
}

static kvb_status observe(gradient_model *m, refine_state *s, kvb_error *err)
{
    size_t K = s->n_knots, D = s->n_groups, old = (size_t)(ROUNDS_KEPT - 1) * m->pairs;
    memmove(m->signs + m->pairs * D, m->signs, old * D * sizeof *m->signs);
    memmove(m->change + m->pairs * K, m->change, old * K * sizeof *m->change);
    memmove(m->fold + m->pairs, m->fold, old * sizeof *m->fold);
    if (m->n_rows < ROUNDS_KEPT * m->pairs) m->n_rows += m->pairs;
    for (size_t i = 0; i < m->pairs * D; i++) m->signs[i] = gsl_rng_uniform_int(s->rng, 2) ? 1 : -1;
    kvb_status status = KVB_OK;
    for (uint32_t t = 0; t < s->task->n_texts && status == KVB_OK; t++) status = measure_pairs(m, s, t, err);
    return status;
}

// ---- The gradient ----

// The sums over all pairs but those of one fold (FOLDS: over all).
static void add_up(gradient_model *m, uint32_t K, uint32_t D, uint32_t without)
{
    gsl_matrix_set_zero(m->products);
    memset(m->slopes, 0, (size_t)(K + 1) * D * sizeof *m->slopes);
    for (uint32_t p = 0; p < m->n_rows; p++) {
        const double *z = m->signs + (size_t)p * D, *y = m->change + (size_t)p * K;
        double weight = pow(FORGET, p / m->pairs);
        if (m->fold[p] == without) continue;
        for (uint32_t i = 0; i < D; i++)
            for (uint32_t j = 0; j < D; j++) *gsl_matrix_ptr(m->products, i, j) += weight * z[i] * z[j];
        for (uint32_t k = 0; k < K; k++)
            for (uint32_t i = 0; i < D; i++) {
                m->slopes[(size_t)k * D + i] += weight * z[i] * y[k];
                m->slopes[(size_t)K * D + i] += weight * z[i] * y[k] / K;
            }
    }
}

// x = (products + ridge I)^-1 b; b and x may be the same.
static void solve_ridge(const gradient_model *m, double ridge, const double *b, double *x, size_t D)
{
    gsl_matrix *a = needed(gsl_matrix_alloc(D, D), "matrices over groups of heads");
    gsl_matrix_memcpy(a, m->products);
    for (size_t i = 0; i < D; i++) *gsl_matrix_ptr(a, i, i) += ridge;
    if (x != b) memcpy(x, b, D * sizeof *x);
    gsl_vector_view v = gsl_vector_view_array(x, D);
    gsl_linalg_cholesky_decomp1(a); // positive definite: the ridge is above 0
    gsl_linalg_cholesky_svx(a, &v.vector);
    gsl_matrix_free(a);
}

// What the gradient x does not explain of the pairs of one fold, squared, all knots' mean.
static double miss(const gradient_model *m, const double *x, uint32_t K, uint32_t D, uint32_t fold)
{
    double sum = 0;
    for (uint32_t p = 0; p < m->n_rows; p++) {
        double y = 0;
        if (m->fold[p] != fold) continue;
        for (uint32_t k = 0; k < K; k++) y += m->change[(size_t)p * K + k] / K;
        for (uint32_t d = 0; d < D; d++) y -= m->signs[(size_t)p * D + d] * x[d];
        sum += pow(FORGET, p / m->pairs) * y * y;
    }
    return sum;
}

// The ridge under which the texts of each fold are best told from the others.
static double choose_ridge(gradient_model *m, const refine_state *s)
{
    enum { COUNT = sizeof RIDGES / sizeof *RIDGES };
    uint32_t K = s->n_knots, D = s->n_groups;
    double *x = m->points, missed[COUNT] = {0};
    for (uint32_t fold = 0; fold < FOLDS; fold++) {
        add_up(m, K, D, fold);
        for (int i = 0; i < COUNT; i++) {
            solve_ridge(m, RIDGES[i] * D, m->slopes + (size_t)K * D, x, D);
            missed[i] += miss(m, x, K, D, fold);
        }
    }
    int best = 0;
    for (int i = 1; i < COUNT; i++)
        if (missed[i] < missed[best]) best = i;
    return RIDGES[best] * D;
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

// The knots' common gradient first, and what each has of its own beyond that under a stronger ridge.
static void find_directions(gradient_model *m, const refine_state *s)
{
    uint32_t K = s->n_knots, D = s->n_groups;
    double *common = m->direction + (size_t)K * D, *b = m->points, ridge = choose_ridge(m, s);
    add_up(m, K, D, FOLDS);
    solve_ridge(m, ridge, m->slopes + (size_t)K * D, common, D);
    for (uint32_t k = 0; k < K; k++) {
        double *own = m->direction + (size_t)k * D;
        for (uint32_t d = 0; d < D; d++) {
            b[d] = m->slopes[(size_t)k * D + d];
            for (uint32_t j = 0; j < D; j++) b[d] -= gsl_matrix_get(m->products, d, j) * common[j];
        }
        solve_ridge(m, 2 * ridge, b, own, D);
        for (uint32_t d = 0; d < D; d++) own[d] += common[d];
        normalise(own, D);
    }
    normalise(common, D);
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

kvb_status gradient_model_round(gradient_model *m, refine_state *s, kvb_error *err)
{
    uint32_t K = s->n_knots, D = s->n_groups;
    kvb_status status = observe(m, s, err);
    if (status != KVB_OK) return status;
    find_directions(m, s);
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
