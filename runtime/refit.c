// Refitting: what the kept slots of a head should hold once the others are gone. kvbudget.h has the contract and
// docs/refit.md the derivation. All heavy work is matrix products and row operations, in loops that vectorise.
#include "fail.h"
#include "vector.h"
#include <math.h>
#include <string.h>

enum {
    TILE_ROWS = 6,
    TILE_COLUMNS = 16,
    TILE_TERMS = 512,
    SCORE_ROWS = 96,
    PIVOTS = 8,
    LANES = 16,
    WEIGHT_STEPS = 120,
    POWER_STEPS = 20
};
static const double LAMBDAS[] = {0.01, 0.1, 1, 10};
static const uint32_t KEPT = UINT32_MAX;
static const float LEAST_SHARE = 1e-9F, LEAST_MASS = 1e-20F; // so that tokens without attention count, too

// A matrix with strides of its own, so that a transpose costs nothing.
typedef struct strided {
    const float *at;
    size_t row, column;
} strided;

// Working memory of one call, carved out of the caller's. Of n queries the first n_fit are fitted to, and the others
// are left out to judge by; t tokens are kept; s slots hold summaries; d = head_dim; m = min(t, n_fit).
typedef struct refit_work {
    const kvb_refit_head *h;
    uint32_t n, n_fit, t, s, d, m;
    float *queries;    // [n, d] those that are fitted to come first
    float *outputs;    // [n, d] of the full cache
    float *top;        // [n] the largest score over all tokens
    float *mass;       // [n] sum over all tokens of exp(score - top)
    float *mean;       // [T] mean share of the attention that a token has from the queries that are fitted to
    float *most;       // [T] the largest such share
    float *keys;       // [t, d] kept, some of them with a summary's in place of their own
    float *weights;    // [n, t] exp of the scores of `keys`, relative to the largest of the row
    float *whole;      // [n] the factor that makes a row of `weights` shares of the full cache's attention
    float *turn;       // [n] q.u, or 1 for an explicit bias
    float *shares;     // [n, t] attention of the present candidate over the kept tokens
    float *missing;    // [n, d] full output minus the present candidate's
    float *scores;     // [SCORE_ROWS, T]
    float *panel;      // [TILE_TERMS, TILE_COLUMNS]
    float *places;     // [T, d] keys, turned so that their distances are the differences of their scores
    float *apart;      // [T] squared distance from the nearest centre
    uint32_t *belongs; // [T] the summary that stands for a token; KEPT for one that stays
    uint32_t *slots;   // [s] the slot of each summary
    float *gram;       // [m, m]
    float *values;     // [t, d] those of `keys`
    float *change;     // [t, d] of the values
    float *best;       // [t, d] values of the best so far
    float *trial;      // [t, d]
    float *direction;  // [d] u
    float *bias;       // [t]
    float *steps;      // [4, max(t, n)] for fit_bias()
    double *factor;    // [max(m, d), max(m, d)]
    double *right;     // [m, d], or [d, s]
} refit_work;

// ---- Products ----

VECTOR_CLONES static void pack_panel(float *panel, strided b, size_t terms, size_t n)
{
    for (size_t k = 0; k < terms; k++)
        if (b.column == 1 && n == TILE_COLUMNS)
            memcpy(panel + k * TILE_COLUMNS, b.at + k * b.row, TILE_COLUMNS * sizeof *panel);
        else
            for (size_t j = 0; j < TILE_COLUMNS; j++)
                panel[k * TILE_COLUMNS + j] = j < n ? b.at[k * b.row + j * b.column] : 0;
}

// sums = A panel for TILE_ROWS rows of A; all sums stay in registers.
VECTOR_CLONES static void multiply_tile(float sums[TILE_ROWS][TILE_COLUMNS], strided a, const float *panel,
                                        size_t terms)
{
    vector s[TILE_ROWS][2] = {{{0}}};
    for (size_t k = 0; k < terms; k++) {
        vector low, high;
        memcpy(&low, panel + k * TILE_COLUMNS, sizeof low);
        memcpy(&high, panel + k * TILE_COLUMNS + 8, sizeof high);
#pragma GCC unroll 6
        for (int i = 0; i < TILE_ROWS; i++) {
            float x = a.at[(size_t)i * a.row + k * a.column];
            s[i][0] += x * low;
            s[i][1] += x * high;
        }
    }
    memcpy(sums, s, sizeof s);
}

VECTOR_CLONES static void add_tile(float *c, size_t ldc, float sums[TILE_ROWS][TILE_COLUMNS], size_t rows,
                                   size_t columns, int first)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < columns; j++) c[i * ldc + j] = first ? sums[i][j] : c[i * ldc + j] + sums[i][j];
}

// C [m,n] = A [m,k] B [k,n]; with `upper` only tiles that reach the diagonal or lie above it.
__attribute__((noinline)) static void multiply(float *c, size_t ldc, strided a, strided b, size_t m, size_t n, size_t k,
                                               int upper, float *panel)
{
    for (size_t at = 0; at < k; at += TILE_TERMS) {
        size_t terms = k - at < TILE_TERMS ? k - at : TILE_TERMS;
        for (size_t j = 0; j < n; j += TILE_COLUMNS) {
            size_t columns = n - j < TILE_COLUMNS ? n - j : TILE_COLUMNS;
            strided from = {b.at + at * b.row + j * b.column, b.row, b.column};
            pack_panel(panel, from, terms, columns);
            for (size_t i = 0; i < m && !(upper && i >= j + TILE_COLUMNS); i += TILE_ROWS) {
                float sums[TILE_ROWS][TILE_COLUMNS];
                // The last tile begins earlier and overlaps the one before it, so that no row beyond the end is read.
                size_t first = i + TILE_ROWS <= m ? i : m < TILE_ROWS ? 0 : m - TILE_ROWS;
                strided rows = {a.at + first * a.row + at * a.column, m < TILE_ROWS ? 0 : a.row, a.column};
                if (m < TILE_ROWS) {
                    for (size_t r = 0; r < m; r++) {
                        rows.at = a.at + r * a.row + at * a.column;
                        multiply_tile(sums, rows, panel, terms);
                        add_tile(c + r * ldc + j, ldc, sums, 1, columns, at == 0);
                    }
                    continue;
                }
                multiply_tile(sums, rows, panel, terms);
                add_tile(c + i * ldc + j, ldc, sums + (i - first), first + TILE_ROWS - i, columns, at == 0);
            }
        }
    }
}

VECTOR_CLONES static void add_scaled(float *y, const float *x, float factor, size_t n)
{
    for (size_t i = 0; i < n; i++) y[i] += factor * x[i];
}

VECTOR_CLONES static float dot(const float *a, const float *b, size_t n)
{
    float lanes[LANES] = {0}, sum = 0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t j = 0; j < LANES; j++) lanes[j] += a[i + j] * b[i + j];
    for (; i < n; i++) sum += a[i] * b[i];
    for (size_t j = 0; j < LANES; j++) sum += lanes[j];
    return sum;
}

// Divides a row by its sum, which is computed in lanes of doubles, and returns the sum.
VECTOR_CLONES static double share_row(float *x, size_t n)
{
    double lanes[LANES] = {0}, sum = 0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t j = 0; j < LANES; j++) lanes[j] += x[i + j];
    for (; i < n; i++) sum += x[i];
    for (size_t j = 0; j < LANES; j++) sum += lanes[j];
    float by = (float)(1 / sum);
    for (i = 0; i < n; i++) x[i] *= by;
    return sum;
}

VECTOR_CLONES static float largest_of(const float *x, size_t n)
{
    float lanes[LANES], top = -INFINITY;
    size_t i = 0;
    for (size_t j = 0; j < LANES; j++) lanes[j] = -INFINITY;
    for (; i + LANES <= n; i += LANES)
        for (size_t j = 0; j < LANES; j++) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    for (size_t j = 0; j < LANES; j++) top = lanes[j] > top ? lanes[j] : top;
    return top;
}

// x * 0 is NaN if x is infinite or NaN, and 0 otherwise.
VECTOR_CLONES static int all_finite(const float *x, size_t n)
{
    float lanes[LANES] = {0}, sum = 0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t j = 0; j < LANES; j++) lanes[j] += x[i + j] * 0;
    for (; i < n; i++) sum += x[i] * 0;
    for (size_t j = 0; j < LANES; j++) sum += lanes[j];
    return sum == 0;
}

// x = exp(x + off)
VECTOR_CLONES static void exp_row(float *x, float off, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] = vector_exp(x[i] + off);
}

// ---- Positive definite systems, in double ----

// Subtracts PIVOTS rows, each times its own number, from `row`.
VECTOR_CLONES static void take_rows(double *row, const double *rows, size_t ld, const double *by, size_t n)
{
    for (size_t j = 0; j < n; j++) {
        double sum = 0;
#pragma GCC unroll 8
        for (int p = 0; p < PIVOTS; p++) sum += by[p] * rows[(size_t)p * ld + j];
        row[j] -= sum;
    }
}

VECTOR_CLONES static void take_row(double *row, const double *other, double by, size_t n)
{
    for (size_t j = 0; j < n; j++) row[j] -= by * other[j];
}

// Cholesky of the upper triangle in place, A = U'U, PIVOTS rows at a time. Returns 0 if A is not positive definite.
static int factorise(double *a, size_t n)
{
    for (size_t k = 0; k < n; k += PIVOTS) {
        size_t end = k + PIVOTS < n ? k + PIVOTS : n;
        for (size_t p = k; p < end; p++) {
            double *row = a + p * n;
            for (size_t q = k; q < p; q++) take_row(row + p, a + q * n + p, a[q * n + p], n - p);
            if (!(row[p] > 0) || !isfinite(row[p])) return 0;
            double by = 1 / sqrt(row[p]);
            for (size_t j = p; j < n; j++) row[j] *= by;
        }
        for (size_t i = end; i < n; i++) {
            double by[PIVOTS];
            for (size_t p = 0; p < PIVOTS; p++) by[p] = a[(k + p) * n + i];
            take_rows(a + i * n + i, a + k * n + i, n, by, n - i);
        }
    }
    return 1;
}

// X = A^-1 X for X [n, d], with the factor of A. Rows are subtracted PIVOTS at a time.
static void solve_factored(const double *u, size_t n, double *x, size_t d)
{
    double by[PIVOTS];
    for (size_t i = 0; i < n; i++) {
        size_t k = 0;
        for (; k + PIVOTS <= i; k += PIVOTS) {
            for (size_t p = 0; p < PIVOTS; p++) by[p] = u[(k + p) * n + i];
            take_rows(x + i * d, x + k * d, d, by, d);
        }
        for (; k < i; k++) take_row(x + i * d, x + k * d, u[k * n + i], d);
        for (size_t c = 0; c < d; c++) x[i * d + c] /= u[i * n + i];
    }
    for (size_t i = n; i-- > 0;) {
        size_t k = i + 1;
        for (; k + PIVOTS <= n; k += PIVOTS) take_rows(x + i * d, x + k * d, d, u + i * n + k, d);
        for (; k < n; k++) take_row(x + i * d, x + k * d, u[i * n + k], d);
        for (size_t c = 0; c < d; c++) x[i * d + c] /= u[i * n + i];
    }
}

// ---- The full cache ----

static void order_queries(refit_work *w)
{
    uint32_t fit = 0, out = w->n_fit;
    for (uint32_t i = 0; i < w->n; i++) {
        uint32_t to = i % 4 == 3 ? out++ : fit++;
        memcpy(w->queries + (size_t)to * w->d, w->h->queries + (size_t)i * w->d, w->d * sizeof(float));
    }
}

// Turns query i's row of scores into the full cache's attention.
static void share_scores(refit_work *w, float *row, uint32_t i)
{
    uint32_t T = w->h->n_tokens;
    w->top[i] = largest_of(row, T);
    exp_row(row, -w->top[i], T);
    w->mass[i] = (float)share_row(row, T);
    if (i >= w->n_fit) return;
    add_scaled(w->mean, row, 1 / (float)w->n_fit, T);
    for (uint32_t j = 0; j < T; j++) w->most[j] = row[j] > w->most[j] ? row[j] : w->most[j];
}

static void score_rows(refit_work *w, uint32_t first, uint32_t rows)
{
    strided keys = {w->h->k, 1, w->d}, queries = {w->queries + (size_t)first * w->d, w->d, 1};
    multiply(w->scores, w->h->n_tokens, queries, keys, rows, w->h->n_tokens, w->d, 0, w->panel);
}

static void attend_fully(refit_work *w)
{
    size_t T = w->h->n_tokens, d = w->d;
    strided values = {w->h->v, d, 1}, scores = {w->scores, T, 1};
    memset(w->mean, 0, T * sizeof *w->mean);
    memset(w->most, 0, T * sizeof *w->most);
    for (uint32_t i = 0; i < w->n; i += SCORE_ROWS) {
        uint32_t rows = w->n - i < SCORE_ROWS ? w->n - i : SCORE_ROWS;
        score_rows(w, i, rows);
        for (uint32_t r = 0; r < rows; r++) share_scores(w, w->scores + r * T, i + r);
        multiply(w->outputs + i * d, d, scores, values, rows, d, T, 0, w->panel);
    }
}

// Mean square of the outputs around their mean, the unit of errors.
static double outputs_variance(const refit_work *w)
{
    double total = 0, size = 0;
    for (uint32_t c = 0; c < w->d; c++) {
        double sum = 0, square = 0;
        for (uint32_t i = 0; i < w->n; i++) sum += w->outputs[(size_t)i * w->d + c];
        for (uint32_t i = 0; i < w->n; i++) {
            double x = w->outputs[(size_t)i * w->d + c], off = x - sum / w->n;
            square += off * off;
            size += x * x;
        }
        total += square;
    }
    return (total + 1e-12 * size) / ((double)w->n * w->d) + 1e-30;
}

// ---- Candidates ----

// Computes the weights of the present keys.
static void weigh_keys(refit_work *w)
{
    strided queries = {w->queries, w->d, 1}, keys = {w->keys, 1, w->d};
    multiply(w->weights, w->t, queries, keys, w->n, w->t, w->d, 0, w->panel);
    for (uint32_t i = 0; i < w->n; i++) {
        float *row = w->weights + (size_t)i * w->t, top = largest_of(row, w->t);
        exp_row(row, -top, w->t);
        w->whole[i] = expf(top - w->top[i]) / w->mass[i];
    }
}

// Computes the attention over the kept tokens with this bias (NULL: none), and what its output with their values lacks.
static void attend_kept(refit_work *w, const float *bias)
{
    for (uint32_t i = 0; i < w->n; i++) {
        float *row = w->shares + (size_t)i * w->t;
        const float *weights = w->weights + (size_t)i * w->t;
        for (uint32_t j = 0; j < w->t; j++) row[j] = bias ? bias[j] * w->turn[i] : 0;
        if (bias) exp_row(row, 0, w->t);
        for (uint32_t j = 0; j < w->t; j++) row[j] = bias ? row[j] * weights[j] : weights[j];
        (void)share_row(row, w->t);
    }
    strided shares = {w->shares, w->t, 1}, values = {w->values, w->d, 1};
    multiply(w->missing, w->d, shares, values, w->n, w->d, w->t, 0, w->panel);
    for (size_t i = 0; i < (size_t)w->n * w->d; i++) w->missing[i] = w->outputs[i] - w->missing[i];
}

// Mean square of what the left-out queries still lack if the values change by `change` (NULL: not at all).
static double left_out_error(refit_work *w, const float *change)
{
    size_t first = w->n_fit, rows = w->n - w->n_fit, d = w->d;
    const float *missing = w->missing + first * d;
    double sum = 0;
    if (change) {
        strided shares = {w->shares + first * w->t, w->t, 1}, by = {change, d, 1};
        multiply(w->scores, d, shares, by, rows, d, w->t, 0, w->panel);
    }
    for (size_t i = 0; i < rows * d; i++) {
        double x = missing[i] - (change ? w->scores[i] : 0);
        sum += x * x;
    }
    return sum / ((double)rows * (double)d);
}

// g = A'A z - A'1, with A'A in `gram`, or, where that would be larger than A, from A itself, which is in `shares`.
static void weight_gradient(refit_work *w, float *g, const float *z, const float *ones, float *sums)
{
    for (uint32_t j = 0; j < w->t; j++) g[j] = -ones[j];
    if (w->t <= w->n_fit) {
        for (uint32_t j = 0; j < w->t; j++) add_scaled(g, w->gram + (size_t)j * w->t, z[j], w->t);
        return;
    }
    for (uint32_t i = 0; i < w->n_fit; i++) sums[i] = dot(w->shares + (size_t)i * w->t, z, w->t);
    for (uint32_t i = 0; i < w->n_fit; i++) add_scaled(g, w->shares + (size_t)i * w->t, sums[i], w->t);
}

static void mirror_gram(float *gram, size_t n)
{
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < i; j++) gram[i * n + j] = gram[j * n + i];
}

// bias = log w, w >= 0 that minimises |A w - 1|^2, A the kept tokens' shares of the full mass: accelerated projected
// gradient (Nesterov; Beck and Teboulle 2009) from w = 1.
static int fit_bias(refit_work *w)
{
    size_t t = w->t, longest = t > w->n ? t : w->n;
    float *z = w->steps, *g = z + longest, *ones = g + longest, *sums = ones + longest, *x = w->bias;
    for (uint32_t i = 0; i < w->n_fit; i++)
        for (size_t j = 0; j < t; j++) w->shares[i * t + j] = w->weights[i * t + j] * w->whole[i];
    strided a = {w->shares, 1, t}, b = {w->shares, t, 1};
    if (t <= w->n_fit) {
        multiply(w->gram, t, a, b, t, t, w->n_fit, 1, w->panel);
        mirror_gram(w->gram, t);
    }
    memset(ones, 0, t * sizeof *ones);
    for (size_t j = 0; j < t; j++) x[j] = 1;
    double largest = 0; // eigenvalue of A'A, by power iteration: A has no negative number
    for (int k = 0; k < POWER_STEPS; k++) {
        weight_gradient(w, g, x, ones, sums);
        largest = sqrt(dot(g, g, t) / (double)dot(x, x, t));
        if (!(largest > 0) || !isfinite(largest)) return 0;
        float by = (float)(1 / sqrt(dot(g, g, t)));
        for (size_t j = 0; j < t; j++) x[j] = g[j] * by;
    }
    for (uint32_t i = 0; i < w->n_fit; i++) add_scaled(ones, w->shares + i * t, 1, t);
    for (size_t j = 0; j < t; j++) x[j] = z[j] = 1;
    double momentum = 1;
    float rate = (float)(1 / (1.02 * largest));
    for (int k = 0; k < WEIGHT_STEPS; k++) {
        double next = (1 + sqrt(1 + 4 * momentum * momentum)) / 2;
        float keep = (float)((momentum - 1) / next);
        weight_gradient(w, g, z, ones, sums);
        for (size_t j = 0; j < t; j++) {
            float to = z[j] - rate * g[j];
            to = to > 1e-6f ? to : 1e-6f;
            z[j] = to + keep * (to - x[j]);
            x[j] = to;
        }
        momentum = next;
    }
    for (size_t j = 0; j < t; j++) {
        float log_weight = logf(x[j]);
        x[j] = log_weight > 3 ? 3 : log_weight < -3 ? -3 : log_weight;
        if (!isfinite(x[j])) return 0;
    }
    return 1;
}

// Factorises Q'Q + 0.01 mean I over the queries that are fitted to.
static int factor_queries(refit_work *w)
{
    size_t d = w->d;
    double trace = 0;
    strided q = {w->queries, d, 1}, turned = {w->queries, 1, d};
    multiply(w->scores, d, turned, q, d, d, w->n_fit, 1, w->panel);
    for (size_t i = 0; i < d; i++) trace += w->scores[i * d + i];
    for (size_t i = 0; i < d * d; i++) w->factor[i] = w->scores[i];
    for (size_t i = 0; i < d; i++) w->factor[i * d + i] += 1e-2 * trace / (double)d;
    return factorise(w->factor, d);
}

// u = (Q'Q + 0.01 mean I)^-1 Q'1, so that q.u is near 1 for the head's queries; and q.u of each.
static void fit_direction(refit_work *w)
{
    size_t d = w->d;
    memset(w->right, 0, d * sizeof *w->right);
    for (uint32_t i = 0; i < w->n_fit; i++)
        for (size_t c = 0; c < d; c++) w->right[c] += w->queries[i * d + c];
    solve_factored(w->factor, d, w->right, 1);
    for (size_t c = 0; c < d; c++) w->direction[c] = (float)w->right[c];
    for (uint32_t i = 0; i < w->n; i++) w->turn[i] = dot(w->queries + i * d, w->direction, d);
}

// ---- Summaries ----

// Gives up the slots whose tokens have the least attention: these tokens and the evicted ones are to be summarised.
static void give_up_slots(refit_work *w, uint32_t n)
{
    const uint32_t *kept = w->h->positions;
    memset(w->belongs, 0, w->h->n_tokens * sizeof *w->belongs);
    for (uint32_t j = 0; j < w->t; j++) w->belongs[kept[j]] = KEPT;
    for (uint32_t s = 0; s < n; s++) {
        uint32_t least = 0;
        while (w->belongs[kept[least]] != KEPT) least++;
        for (uint32_t j = least + 1; j < w->t; j++)
            if (w->belongs[kept[j]] == KEPT && w->most[kept[j]] < w->most[kept[least]]) least = j;
        w->belongs[kept[least]] = 0;
        w->slots[s] = least;
    }
}

// Divides the tokens that are not kept among n centres: each next one is the token whose distance from the nearest
// centre, times its attention, is largest. Returns 0 if there are fewer different tokens.
static int divide_tokens(refit_work *w, uint32_t n)
{
    size_t T = w->h->n_tokens, d = w->d;
    float *upper = w->scores;
    for (size_t i = 0; i < d; i++)
        for (size_t c = 0; c < d; c++) upper[i * d + c] = c >= i ? (float)w->factor[i * d + c] : 0;
    strided keys = {w->h->k, d, 1}, turned = {upper, 1, d};
    multiply(w->places, d, keys, turned, T, d, d, 0, w->panel);
    for (size_t j = 0; j < T; j++) w->apart[j] = w->belongs[j] == KEPT ? 0 : INFINITY;
    for (uint32_t s = 0; s < n; s++) {
        size_t centre = 0;
        float largest = 0;
        for (size_t j = 0; j < T; j++) {
            float by = (w->mean[j] + LEAST_SHARE) * (w->apart[j] < INFINITY ? w->apart[j] : 1);
            if (w->apart[j] > 0 && by > largest) largest = by, centre = j;
        }
        if (!(largest > 0)) return 0;
        for (size_t j = 0; j < T; j++) {
            if (!(w->apart[j] > 0)) continue;
            memcpy(w->trial, w->places + j * d, d * sizeof *w->trial);
            add_scaled(w->trial, w->places + centre * d, -1, d);
            float distance = dot(w->trial, w->trial, d);
            if (distance < w->apart[j]) w->apart[j] = distance, w->belongs[j] = s;
        }
    }
    return 1;
}

// Puts into each slot that was given up the means of its tokens' keys and values, weighted by their attention.
static void average_tokens(refit_work *w, uint32_t n)
{
    size_t d = w->d;
    float *sums = w->steps;
    memset(sums, 0, n * sizeof *sums);
    for (uint32_t j = 0; j < w->h->n_tokens; j++)
        if (w->belongs[j] != KEPT) sums[w->belongs[j]] += w->mean[j] + LEAST_SHARE;
    for (uint32_t s = 0; s < n; s++) {
        memset(w->keys + w->slots[s] * d, 0, d * sizeof *w->keys);
        memset(w->values + w->slots[s] * d, 0, d * sizeof *w->values);
    }
    for (uint32_t j = 0; j < w->h->n_tokens; j++) {
        if (w->belongs[j] == KEPT) continue;
        size_t slot = w->slots[w->belongs[j]];
        float part = (w->mean[j] + LEAST_SHARE) / sums[w->belongs[j]];
        add_scaled(w->keys + slot * d, w->h->k + j * d, part, d);
        add_scaled(w->values + slot * d, w->h->v + j * d, part, d);
    }
}

// Computes missing [n_fit, n]: what each summary's score lacks from the logarithm of its tokens' mass.
static void miss_masses(refit_work *w, uint32_t n, float *missing)
{
    size_t T = w->h->n_tokens, d = w->d;
    for (uint32_t i = 0; i < w->n_fit; i += SCORE_ROWS) {
        uint32_t rows = w->n_fit - i < SCORE_ROWS ? w->n_fit - i : SCORE_ROWS;
        score_rows(w, i, rows);
        for (uint32_t r = 0; r < rows; r++) {
            float *row = w->scores + r * T, *to = missing + (size_t)(i + r) * n;
            exp_row(row, -w->top[i + r], T);
            for (uint32_t s = 0; s < n; s++) to[s] = LEAST_MASS * w->mass[i + r];
            for (size_t j = 0; j < T; j++)
                if (w->belongs[j] != KEPT) to[w->belongs[j]] += row[j];
            for (uint32_t s = 0; s < n; s++)
                to[s] = logf(to[s]) + w->top[i + r] - dot(w->queries + (i + r) * d, w->keys + w->slots[s] * d, d);
        }
    }
}

// Puts summaries of the tokens that are not kept into the slots with the least attention: the means of their values,
// and the keys whose scores come nearest to the logarithms of their mass. Needs the factor of the queries. Returns 0,
// and changes nothing, if there are no such slots or tokens.
static int summarise(refit_work *w)
{
    uint32_t n = w->s;
    size_t d = w->d;
    if (n == 0) return 0;
    give_up_slots(w, n);
    if (!divide_tokens(w, n)) return 0;
    average_tokens(w, n);
    float *missing = w->shares, *sums = w->trial;
    miss_masses(w, n, missing);
    strided turned = {w->queries, 1, d}, by = {missing, n, 1};
    multiply(sums, n, turned, by, d, n, w->n_fit, 0, w->panel);
    for (size_t i = 0; i < d * n; i++) w->right[i] = sums[i];
    solve_factored(w->factor, d, w->right, n);
    for (uint32_t s = 0; s < n; s++)
        for (size_t c = 0; c < d; c++) w->keys[w->slots[s] * d + c] += (float)w->right[c * n + s];
    return 1;
}

// Computes the matrix of the values' equations: P'P [t,t], or P P' [n_fit,n_fit] if that is smaller. Returns the mean
// diagonal of P'P.
static double make_gram(refit_work *w)
{
    strided rows = {w->shares, w->t, 1}, columns = {w->shares, 1, w->t};
    int few = w->t <= w->n_fit;
    multiply(w->gram, w->m, few ? columns : rows, few ? rows : columns, w->m, w->m, few ? w->n_fit : w->t, 1, w->panel);
    double trace = 0;
    for (uint32_t i = 0; i < w->m; i++) trace += w->gram[(size_t)i * w->m + i];
    return trace / w->t; // both have the same trace; the mean is that of P'P
}

// change = (P'P + lambda I)^-1 P' missing = P' (P P' + lambda I)^-1 missing.
static int fit_values(refit_work *w, double lambda)
{
    size_t m = w->m, d = w->d;
    strided columns = {w->shares, 1, w->t}, missing = {w->missing, d, 1};
    int few = w->t <= w->n_fit;
    for (size_t i = 0; i < m * m; i++) w->factor[i] = w->gram[i];
    for (size_t i = 0; i < m; i++) w->factor[i * m + i] += lambda;
    if (!factorise(w->factor, m)) return 0;
    if (few) multiply(w->trial, d, columns, missing, m, d, w->n_fit, 0, w->panel);
    for (size_t i = 0; i < m * d; i++) w->right[i] = few ? w->trial[i] : w->missing[i];
    solve_factored(w->factor, m, w->right, d);
    float *to = few ? w->change : w->scores;
    for (size_t i = 0; i < m * d; i++) to[i] = (float)w->right[i];
    if (few) return 1;
    strided solved = {w->scores, d, 1};
    multiply(w->change, d, columns, solved, w->t, d, w->n_fit, 0, w->panel);
    return 1;
}

// No value moves by more than half of its length. What the references alone would move further costs them little, and
// answers to questions unlike them a lot (docs/refit.md).
static void limit_changes(refit_work *w)
{
    for (size_t j = 0, d = w->d; j < w->t; j++) {
        float *change = w->change + j * d, most = 0.25F * dot(w->values + j * d, w->values + j * d, d),
              square = dot(change, change, d), part = square > most ? sqrtf(most / square) : 1;
        for (size_t c = 0; c < d; c++) change[c] *= part;
    }
}

static void take_better(kvb_refit_result *out, double error, int changed, double lambda)
{
    out->error_after = error;
    out->changed = changed;
    out->lambda = lambda;
}

// Tries refitted values with the present attention; `keys` says what its keys are (KVB_REFIT_*). The least lambda is
// nearly always the best, so once one has helped, larger ones are tried only for as long as they help more.
static void try_values(refit_work *w, int keys, kvb_refit_result *out)
{
    double mean = make_gram(w);
    for (size_t l = 0; l < sizeof LAMBDAS / sizeof *LAMBDAS && mean > 0; l++) {
        if (!fit_values(w, LAMBDAS[l] * mean)) continue;
        limit_changes(w);
        double error = left_out_error(w, w->change);
        if (error < out->error_after) {
            take_better(out, error, keys | KVB_REFIT_VALUES, LAMBDAS[l]);
            for (size_t i = 0; i < (size_t)w->t * w->d; i++) w->best[i] = w->values[i] + w->change[i];
        } else if (out->lambda > 0) {
            break;
        }
    }
}

// ---- The call ----

// Places all arrays from `base` on, or just counts if it is NULL. Returns the bytes; 0 if a size_t cannot hold them.
static size_t carve(refit_work *w, unsigned char *base)
{
    uint64_t n = w->n, t = w->t, s = w->s, d = w->d, T = w->h->n_tokens, m = w->m, side = m > d ? m : d,
             longest = t > n ? t : n;
    uint64_t scratch = SCORE_ROWS * T, wide = n * d > d * d ? n * d : d * d;
    struct {
        void *at;
        uint64_t count, each, size;
    } parts[] = {{&w->factor, side, side, 8},
                 {&w->right, side > s ? side : s, d, 8},
                 {&w->queries, n, d, 4},
                 {&w->outputs, n, d, 4},
                 {&w->top, n, 1, 4},
                 {&w->mass, n, 1, 4},
                 {&w->mean, T, 1, 4},
                 {&w->most, T, 1, 4},
                 {&w->keys, t, d, 4},
                 {&w->weights, n, t, 4},
                 {&w->whole, n, 1, 4},
                 {&w->turn, n, 1, 4},
                 {&w->shares, n, t, 4},
                 {&w->missing, n, d, 4},
                 {&w->scores, scratch > wide ? scratch : wide, 1, 4},
                 {&w->panel, TILE_TERMS, TILE_COLUMNS, 4},
                 {&w->places, T, d, 4},
                 {&w->apart, T, 1, 4},
                 {&w->belongs, T, 1, 4},
                 {&w->slots, s + 1, 1, 4},
                 {&w->gram, m, m, 4},
                 {&w->values, t, d, 4},
                 {&w->change, t, d, 4},
                 {&w->best, t, d, 4},
                 {&w->trial, t, d, 4},
                 {&w->direction, d, 1, 4},
                 {&w->bias, t, 1, 4},
                 {&w->steps, 4, longest, 4}};
    uint64_t at = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        // Each is rounded up to 64 bytes; counts are products of 32-bit numbers, so only the last steps can overflow.
        if (parts[i].each > (UINT64_MAX / 64) / parts[i].size / (parts[i].count + 1)) return 0;
        uint64_t bytes = (parts[i].count * parts[i].each * parts[i].size + 63) / 64 * 64;
        if (base) {
            void *place = base + at;
            memcpy(parts[i].at, &place, sizeof place);
        }
        if (bytes > SIZE_MAX - 64 - at) return 0;
        at += bytes;
    }
    return (size_t)at + 63; // the caller's memory may begin anywhere
}

static refit_work shape_of(const kvb_refit_head *h)
{
    refit_work w = {.h = h};
    w.n = h->n_queries;
    w.n_fit = h->n_queries - h->n_queries / 4;
    w.t = h->n_kept;
    w.s = h->n_summaries;
    w.d = h->head_dim;
    w.m = w.t < w.n_fit ? w.t : w.n_fit;
    return w;
}

static kvb_status check_head(const kvb_refit_head *h, kvb_error *err)
{
    if (!h) return kvb_fail(err, KVB_ARGUMENT, "kvb_refit: the head must not be NULL");
    if (h->n_tokens == 0 || h->head_dim == 0 || h->n_kept == 0 || h->n_kept > h->n_tokens || h->head_dim > 65536 ||
        h->n_queries > 16777216 || h->n_summaries > h->n_kept)
        return kvb_fail(
            err, KVB_ARGUMENT,
            "kvb_refit: %u tokens of %u numbers, %u kept, %u summaries, %u queries: expected 1 or more tokens, 1 to "
            "65536 numbers, 1 to all tokens kept, no more summaries than these and at most 16777216 queries",
            (unsigned)h->n_tokens, (unsigned)h->head_dim, (unsigned)h->n_kept, (unsigned)h->n_summaries,
            (unsigned)h->n_queries);
    return KVB_OK;
}

kvb_status kvb_refit_bytes(const kvb_refit_head *h, size_t *bytes, kvb_error *err)
{
    kvb_status status = check_head(h, err);
    if (status) return status;
    if (!bytes) return kvb_fail(err, KVB_ARGUMENT, "kvb_refit_bytes: bytes must not be NULL");
    refit_work w = shape_of(h);
    *bytes = carve(&w, NULL);
    if (*bytes) return KVB_OK;
    return kvb_fail(err, KVB_UNSUPPORTED, "kvb_refit: %u tokens, %u kept and %u queries need more memory than there is",
                    (unsigned)h->n_tokens, (unsigned)h->n_kept, (unsigned)h->n_queries);
}

static kvb_status check_numbers(const float *x, size_t rows, size_t d, const char *name, kvb_error *err)
{
    if (all_finite(x, rows * d)) return KVB_OK;
    for (size_t i = 0; i < rows * d; i++)
        if (!isfinite(x[i]))
            return kvb_fail(err, KVB_NUMERIC,
                            "kvb_refit: %s[%zu, %zu]: expected a finite number; the head is left bare", name, i / d,
                            i % d);
    return KVB_OK;
}

static kvb_status check_arguments(const kvb_refit_head *h, const void *work, size_t work_bytes, const float *k,
                                  const float *v, const kvb_refit_result *out, kvb_error *err)
{
    size_t bytes = 0;
    kvb_status status = kvb_refit_bytes(h, &bytes, err);
    if (status) return status;
    if (!h->k || !h->v || !h->positions || (h->n_queries && !h->queries) || !work || !k || !v || !out)
        return kvb_fail(err, KVB_ARGUMENT, "kvb_refit: no argument but bias and err may be NULL");
    if (work_bytes < bytes)
        return kvb_fail(err, KVB_CAPACITY, "kvb_refit: work: expected %zu bytes, found %zu", bytes, work_bytes);
    for (uint32_t j = 0; j < h->n_kept; j++)
        if (h->positions[j] >= h->n_tokens || (j && h->positions[j] <= h->positions[j - 1]))
            return kvb_fail(err, KVB_ARGUMENT,
                            "kvb_refit: positions[%u]: expected ascending positions below %u, found %u", (unsigned)j,
                            (unsigned)h->n_tokens, (unsigned)h->positions[j]);
    return KVB_OK;
}

static void give_bare(const kvb_refit_head *h, float *k, float *v, float *bias)
{
    size_t d = h->head_dim;
    for (uint32_t j = 0; j < h->n_kept; j++) {
        memcpy(k + j * d, h->k + h->positions[j] * d, d * sizeof *k);
        memcpy(v + j * d, h->v + h->positions[j] * d, d * sizeof *v);
        if (bias) bias[j] = 0;
    }
}

// Copies the best candidate. Returns 0 if it is beyond float32.
static int give(const refit_work *w, int changed, float *k, float *v, float *bias)
{
    size_t d = w->d;
    if (changed) memcpy(k, w->keys, w->t * d * sizeof *k);
    if (changed) memcpy(v, changed & KVB_REFIT_VALUES ? w->best : w->values, w->t * d * sizeof *v);
    for (uint32_t j = 0; changed & KVB_REFIT_KEYS && j < w->t; j++) {
        if (bias) bias[j] = w->bias[j];
        else add_scaled(k + j * d, w->direction, w->bias[j], d);
    }
    return all_finite(k, w->t * d) && all_finite(v, w->t * d);
}

// Tries all candidates; the best is in *out and w. k, v [t, d] have the kept rows. Returns 0 if the head's numbers are
// beyond float32.
static int try_all(refit_work *w, const float *k, const float *v, int explicit_bias, kvb_refit_result *out)
{
    int start = 0, factored;
    memcpy(w->keys, k, w->t * w->d * sizeof *k);
    memcpy(w->values, v, w->t * w->d * sizeof *v);
    order_queries(w);
    attend_fully(w);
    weigh_keys(w);
    attend_kept(w, NULL);
    double before = left_out_error(w, NULL), scale = outputs_variance(w), error = before;
    if (!isfinite(before) || !isfinite(scale)) return 0;
    out->error_after = before;
    factored = factor_queries(w);
    if (factored) fit_direction(w);
    if (factored && summarise(w)) {
        start = KVB_REFIT_SUMMARIES;
        weigh_keys(w);
        attend_kept(w, NULL);
        error = left_out_error(w, NULL);
        if (error < before) take_better(out, error, start, 0);
    }
    for (uint32_t i = 0; explicit_bias && i < w->n; i++) w->turn[i] = 1;
    if (w->t > 1 && (explicit_bias || factored) && fit_bias(w)) {
        attend_kept(w, w->bias);
        double shifted = left_out_error(w, NULL);
        if (shifted < error) start |= KVB_REFIT_KEYS;
        else attend_kept(w, NULL);
        if (shifted < error && shifted < out->error_after) take_better(out, shifted, start, 0);
    }
    try_values(w, start, out);
    out->judged = 1;
    out->error_before = before / scale;
    out->error_after /= scale;
    return 1;
}

kvb_status kvb_refit(const kvb_refit_head *h, void *work, size_t work_bytes, float *k, float *v, float *bias,
                     kvb_refit_result *out, kvb_error *err)
{
    kvb_status status = check_arguments(h, work, work_bytes, k, v, out, err);
    if (status) return status;
    size_t d = h->head_dim;
    memset(out, 0, sizeof *out);
    give_bare(h, k, v, bias);
    if (h->n_kept > h->n_tokens / 2 || h->n_queries < 4) return KVB_OK;
    status = check_numbers(h->k, h->n_tokens, d, "k", err);
    if (!status) status = check_numbers(h->v, h->n_tokens, d, "v", err);
    if (!status) status = check_numbers(h->queries, h->n_queries, d, "queries", err);
    if (status) return status;

    refit_work w = shape_of(h);
    carve(&w, (unsigned char *)work + (64 - (uintptr_t)work % 64) % 64);
    if (try_all(&w, k, v, bias != NULL, out) && give(&w, out->changed, k, v, bias)) return KVB_OK;
    memset(out, 0, sizeof *out);
    give_bare(h, k, v, bias);
    return KVB_OK;
}
