#include "study/refine.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <gsl/gsl_errno.h>
#include <gsl/gsl_linalg.h>
#include <gsl/gsl_rng.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

// The state of the search: a centre in the space of groups.
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

// A loss that is nearly nothing: smaller ones are not told apart.
static const double LEAST_SCALE = 1e-6;

// ---- Candidates ----

// Shifts of heads [K, n_heads] of one point [K, D].
static void expand_point(const refine_state *s, const double *point, double *shift)
{
    size_t n = s->task->n_heads;
    for (uint32_t k = 0; k < s->n_knots; k++)
        for (size_t h = 0; h < n; h++)
            shift[k * n + h] = s->origin[k * n + h] + point[(size_t)k * s->n_groups + s->group[h]];
}

static double mean_over_texts(const double *loss, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += loss[i] / n;
    return sum;
}

// Candidates [n, K, heads] on some texts of a set (NULL: all), as one loss per knot, [n, K].
static kvb_status measure_shifts(const refine_task *t, bool selection, const double *shift, uint32_t n,
                                 const uint32_t *texts, uint32_t n_texts, double *loss, kvb_error *err)
{
    uint32_t *all = NULL;
    if (!texts) {
        n_texts = selection ? t->n_selection : t->n_texts;
        texts = all = need(n_texts, sizeof *all, "texts");
        for (uint32_t i = 0; i < n_texts; i++) all[i] = i;
    }
    double *each = need((size_t)n * t->n_knots * n_texts, sizeof *each, "losses");
    kvb_status status = t->measure(t->context, selection, shift, n, texts, n_texts, each, err);
    for (size_t i = 0; i < (size_t)n * t->n_knots && status == KVB_OK; i++)
        loss[i] = mean_over_texts(each + i * n_texts, n_texts);
    free_all(each, all);
    return status;
}

// Points [n, K, D] on the listed calibration texts (NULL: all): loss [n, K] over them, in units of scale.
static kvb_status measure_points(refine_state *s, const double *points, uint32_t n, const uint32_t *texts,
                                 uint32_t n_texts, double *loss, kvb_error *err)
{
    size_t heads = (size_t)s->n_knots * s->task->n_heads, groups = (size_t)s->n_knots * s->n_groups;
    double *shift = need(n * heads, sizeof *shift, "shifts");
    for (uint32_t i = 0; i < n; i++) expand_point(s, points + i * groups, shift + i * heads);
    kvb_status status = measure_shifts(s->task, false, shift, n, texts, n_texts, loss, err);
    for (size_t i = 0; i < (size_t)n * s->n_knots && status == KVB_OK; i++) loss[i] /= s->scale[i % s->n_knots];
    s->spent += texts ? (double)n * n_texts / s->task->n_texts : n;
    free(shift);
    return status;
}

// ---- The model of the loss ----
//
// A linear model of the loss around the centre, and steps against its gradient. Damage is measured exactly, so what a
// candidate says of one group is blurred by the other groups and by its text only: pairs that differ in the sign of
// every move cancel all that is even, each text counts by what share of its loss a pair changes, so that none rules,
// and a ridge, chosen by what it predicts of texts left out, shares the rest out. A pair costs one text, and texts take
// turns.

enum { SIZE_COUNT = 3, PROPOSALS = 2 * SIZE_COUNT, PAIRS_MIN = 8, PER_TEXT_MAX = 4, ROUNDS_KEPT = 4, FOLDS = 4 };
static const double MOVE = 0.3;        // of every group in a pair
static const double FORGET = 0.7;      // weight of a pair after each round
static const double ROUND_SHARE = 0.1; // of a stage's evaluations, that the pairs of a round may take
static const double SMALL = 0.1;       // of the table's loss: a text that loses less hardly counts
static const double RIDGES[] = {0.25, 0.5, 1, 2, 4, 8, 16}; // in units of all groups' moves together
static const double FIRST_RADIUS = 0.16;                    // root mean square of a step's moves
static const double LONGEST = 3;                            // a group's move, in radii
static const double SIZES[SIZE_COUNT] = {0.5, 1.25, 3};     // of proposals, in radii

typedef struct gradient_model {
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
} gradient_model;

static void gradient_model_close(gradient_model *m)
{
    if (!m) return;
    gsl_matrix_free(m->products);
    free_all(m->signs, m->texts, m);
}

static gradient_model *gradient_model_open(const refine_state *s)
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
    kvb_status status = measure_points(s, m->points, n, &text, 1, m->loss, err);
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

// The mean squared error, over all knots, of the gradient x on the pairs of one fold.
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
        status = measure_points(s, m->points, left, m->texts, count, m->loss, err);
        s->spent -= (double)left * before / n;
        before = count;
        if (status == KVB_OK && left > 1) keep_half(m, s->n_knots, s->n_groups, left, left / 2);
        left = left > 1 ? left / 2 : 1;
    }
    return status;
}

static kvb_status gradient_model_round(gradient_model *m, refine_state *s, kvb_error *err)
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

// ---- The start ----

static const double START_PARTS[] = {0.5, 0.75, 1};
enum { START_ROUNDS = sizeof START_PARTS / sizeof *START_PARTS };

// From the table towards each start in turn, whatever that loses: the selection set chooses where to stay.
static kvb_status go_towards_start(refine_state *s, uint32_t i, kvb_error *err)
{
    size_t n = (size_t)s->n_knots * s->n_groups;
    const double *start = s->task->starts + i / START_ROUNDS * n;
    for (size_t k = 0; k < n; k++) s->centre[k] = START_PARTS[i % START_ROUNDS] * start[k];
    return measure_points(s, s->centre, 1, NULL, 0, s->value, err);
}

// ---- Depth ----

// How far the last layer's shift is above the first one's. What an error costs while all layers are cut follows depth
// more than anything else, and in which direction is a matter of the model; so few texts tell.
static const double TILTS[] = {-0.5, 0.5, -1, 1};
enum { TILT_ROUNDS = sizeof TILTS / sizeof *TILTS };

// The groups are layers.
static kvb_status tilt(refine_state *s, uint32_t i, kvb_error *err)
{
    uint32_t L = s->n_groups;
    for (uint32_t k = 0; k < s->n_knots; k++)
        for (uint32_t l = 0; l < L; l++)
            s->centre[(size_t)k * L + l] = L > 1 ? TILTS[i] * ((double)l / (L - 1) - 0.5) : 0;
    return measure_points(s, s->centre, 1, NULL, 0, s->value, err);
}

// ---- One search ----

typedef struct refine_job {
    const refine_task *task;
    refine_result *best;
    double *scale;       // [K] the table's losses, at least LEAST_SCALE
    double *shift;       // [K, n_heads] the centre's
    double *calibration; // [K] its losses, for the report
    double *selection;   // [K] its losses there
} refine_job;

static void report_round(const refine_job *j, const refine_state *s)
{
    const refine_task *t = j->task;
    if (!t->report) return;
    for (uint32_t k = 0; k < t->n_knots; k++) j->calibration[k] = s->value[k] * j->scale[k];
    t->report(t->context, &(refine_progress){s->spent, t->evaluations, s->round, j->calibration, j->selection,
                                             j->best->calibration_before, j->best->selection_before});
}

// Measures the centre on the selection set and takes over what is better there. Whether anything is.
static kvb_status judge_centre(refine_job *j, refine_state *s, bool *better, kvb_error *err)
{
    const refine_task *t = j->task;
    size_t n = t->n_heads;
    expand_point(s, s->centre, j->shift);
    kvb_status status = measure_shifts(t, true, j->shift, 1, NULL, 0, j->selection, err);
    if (status != KVB_OK) return status;
    s->spent += (double)t->n_selection / t->n_texts;
    *better = false;
    for (uint32_t k = 0; k < t->n_knots; k++) {
        if (!(j->selection[k] < j->best->selection[k])) continue;
        *better = true;
        j->best->selection[k] = j->selection[k];
        j->best->calibration[k] = s->value[k] * j->scale[k];
        memcpy(j->best->shift + k * n, j->shift + k * n, n * sizeof *j->shift);
    }
    j->best->evaluations = s->spent;
    j->best->rounds = s->round;
    report_round(j, s);
    return KVB_OK;
}

// A stage of the search: what it moves, and when it ends.
typedef struct refine_stage {
    kvb_status (*step)(refine_state *s, uint32_t round, kvb_error *err); // NULL: a search
    bool heads;                                                          // single heads move, else layers together
    double until;
    uint32_t patience, rounds; // most of both
} refine_stage;

// Rounds until the evaluations are spent or the selection set has gained nothing for so long.
static kvb_status run_stage(refine_job *j, refine_state *s, const refine_stage *stage, kvb_error *err)
{
    gradient_model *m = stage->step ? NULL : gradient_model_open(s);
    uint32_t idle = 0;
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; status == KVB_OK && i < stage->rounds; i++) {
        bool better = false;
        if (s->spent >= stage->until || idle >= stage->patience) break;
        s->round++;
        status = m ? gradient_model_round(m, s, err) : stage->step(s, i, err);
        if (status == KVB_OK) status = judge_centre(j, s, &better, err);
        idle = better ? 0 : idle + 1;
    }
    j->best->settled = idle >= stage->patience;
    gradient_model_close(m);
    return status;
}

// From the best so far.
static kvb_status search_groups(refine_job *j, refine_state *s, const refine_stage *stage, kvb_error *err)
{
    const refine_task *t = j->task;
    size_t n = (size_t)t->n_knots * t->n_heads;
    uint32_t per_layer = t->n_heads / t->n_layers, *group = need(t->n_heads, sizeof *group, "heads");
    double *origin = need_copy(j->best->shift, n, sizeof *origin, "shifts");
    s->n_groups = stage->heads ? t->n_heads : t->n_layers;
    s->centre = need((size_t)t->n_knots * s->n_groups, sizeof *s->centre, "shifts");
    for (uint32_t h = 0; h < t->n_heads; h++) group[h] = stage->heads ? h : h / per_layer;
    for (uint32_t k = 0; k < t->n_knots; k++) s->value[k] = j->best->calibration[k] / j->scale[k];
    s->group = group;
    s->origin = origin;
    kvb_status status = run_stage(j, s, stage, err);
    free_all(group, origin, s->centre);
    s->centre = NULL;
    return status;
}

// The table itself on both sets.
static kvb_status measure_table(refine_job *j, refine_state *s, kvb_error *err)
{
    const refine_task *t = j->task;
    refine_result *best = j->best;
    size_t knots = t->n_knots * sizeof(double);
    kvb_status status = measure_shifts(t, false, best->shift, 1, NULL, 0, best->calibration_before, err);
    if (status == KVB_OK) status = measure_shifts(t, true, best->shift, 1, NULL, 0, best->selection_before, err);
    if (status != KVB_OK) return status;
    memcpy(best->calibration, best->calibration_before, knots);
    memcpy(best->selection, best->selection_before, knots);
    memcpy(j->selection, best->selection_before, knots);
    for (uint32_t k = 0; k < t->n_knots; k++) {
        j->scale[k] = fmax(fabs(best->calibration_before[k]), LEAST_SCALE);
        s->value[k] = best->calibration[k] / j->scale[k];
    }
    s->spent = t->start_cost + 1 + (double)t->n_selection / t->n_texts;
    best->evaluations = s->spent;
    report_round(j, s);
    return KVB_OK;
}

// The starts and tilts, then layers, and heads, which share what these leave.
static kvb_status run_stages(refine_job *j, refine_state *s, kvb_error *err)
{
    const refine_task *t = j->task;
    const uint32_t rounds = START_ROUNDS * t->n_starts;
    const refine_stage start = {go_towards_start, true, INFINITY, rounds, rounds},
                       tilts = {tilt, false, INFINITY, TILT_ROUNDS, TILT_ROUNDS};
    kvb_status status = t->n_starts ? search_groups(j, s, &start, err) : KVB_OK;
    if (status == KVB_OK && t->n_starts) status = search_groups(j, s, &tilts, err);
    double left = fmax(0, t->evaluations - s->spent);
    const refine_stage stages[] = {
        {NULL, false, t->evaluations - (t->heads ? left / 2 : 0), REFINE_PATIENCE, UINT32_MAX},
        {NULL, true, t->evaluations, REFINE_PATIENCE, UINT32_MAX}};
    for (int i = 0; i < (t->heads ? 2 : 1) && status == KVB_OK; i++) status = search_groups(j, s, &stages[i], err);
    return status;
}

static kvb_status check_task(const refine_task *t, kvb_error *err)
{
    if (t->n_layers && t->n_heads && t->n_heads % t->n_layers == 0 && t->n_knots && t->n_texts && t->n_selection &&
        t->evaluations && t->measure)
        return KVB_OK;
    return kvb_fail(err, KVB_ARGUMENT,
                    "refine: %u heads in %u layers, %u ratios, %u and %u texts, %u evaluations: expected some of each",
                    t->n_heads, t->n_layers, t->n_knots, t->n_texts, t->n_selection, t->evaluations);
}

kvb_status refine_run(refine_result *out, const refine_task *task, kvb_error *err)
{
    *out = (refine_result){0};
    kvb_status status = check_task(task, err);
    if (status != KVB_OK) return status;
    size_t K = task->n_knots;
    *out = (refine_result){.shift = need(K * task->n_heads, sizeof(double), "shifts"),
                           .calibration_before = need(K, sizeof(double), "losses"),
                           .calibration = need(K, sizeof(double), "losses"),
                           .selection_before = need(K, sizeof(double), "losses"),
                           .selection = need(K, sizeof(double), "losses")};
    double *memory = need(4 * K + K * task->n_heads, sizeof *memory, "shifts"); // four lists over knots, the centre's
    gsl_error_handler_t *before = gsl_set_error_handler_off(); // GSL's failures here are a lack of memory
    gsl_rng *rng = needed(gsl_rng_alloc(gsl_rng_mt19937), "random generators");
    refine_job j = {task, out, memory, memory + 4 * K, memory + K, memory + 2 * K};
    refine_state s = {.task = task, .n_knots = task->n_knots, .scale = memory, .value = memory + 3 * K, .rng = rng};
    gsl_rng_set(rng, (unsigned long)task->seed);
    status = measure_table(&j, &s, err);
    if (status == KVB_OK) status = run_stages(&j, &s, err);
    gsl_rng_free(rng);
    gsl_set_error_handler(before);
    free(memory);
    if (status != KVB_OK) refine_free(out);
    return status;
}

void refine_free(refine_result *r)
{
    free_all(r->shift, r->calibration_before, r->calibration, r->selection_before, r->selection);
    *r = (refine_result){0};
}
