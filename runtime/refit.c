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
    TURNED_ROWS = 8,
    BLOCK = 16,
    WEIGHT_STEPS = 120,
    POWER_STEPS = 20
};
static const double RIDGE = 0.03; // of the values, times the mean diagonal of their equations
static const uint32_t KEPT = UINT32_MAX;
static const float LEAST_SHARE = 1e-9F, LEAST_MASS = 1e-20F; // so that tokens without attention count, too

// A matrix with strides of its own, so that a transpose costs nothing.
typedef struct strided {
    const float *at;
    size_t row, column;
} strided;

// Working memory of one call, carved out of the caller's. Of n queries the first n_fit are fitted to, and the others
// are left out to judge by; t tokens are kept; d = head_dim; m = min(t, n_fit).
typedef struct refit_work {
    const kvb_refit_head *h;
    uint32_t n, n_fit, t, d, m;
    float *queries;    // [n, d] those that are fitted to come first
    float *outputs;    // [n, d] of the full cache
    float *top;        // [n] the largest score over all tokens
    float *mass;       // [n] sum over all tokens of exp(score - top)
    float *attention;  // [T, n_fit] the full cache's, of the queries that are fitted to
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
    float *places;     // [T / LANES, d, LANES] keys, turned so that their distances are those of their scores
    float *apart;      // [T] squared distance from the nearest centre
    uint32_t *belongs; // [T] the summary that stands for a token; KEPT for one that stays
    uint32_t *slots;   // [t] the slot of each summary
    float *gram;       // [m, m]
    float *values;     // [t, d] those of `keys`
    float *change;     // [t, d] of the values, and before, the keys of the best start so far
    float *best;       // [t, d] the best values so far
    float *trial;      // [t, d]
    float *direction;  // [d] u
    float *bias;       // [t]
    float *steps;      // [max(2 t, n)] for fit_bias() and summaries
    double *factor;    // [max(m, d), max(m, d)]
    double *right;     // [m, d], or [d, t]
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

static size_t room_for(size_t n)
{
    return (n + LANES - 1) / LANES * LANES;
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

// Blocks are left out, because neighbouring queries are too much alike to judge each other's fit.
static uint32_t block_of(uint32_t n)
{
    return n < 8 ? 1 : n < 4 * BLOCK ? n / 4 : BLOCK;
}

static uint32_t count_fitted(uint32_t n)
{
    uint32_t three = 3 * block_of(n), rest = n % (4 * block_of(n));
    return (n - rest) / 4 * 3 + (rest < three ? rest : three);
}

static void order_queries(refit_work *w)
{
    uint32_t fit = 0, out = w->n_fit;
    for (uint32_t i = 0; i < w->n; i++) {
        uint32_t to = i / block_of(w->n) % 4 == 3 ? out++ : fit++;
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

// Writes rows of length n as columns of `to`, some at a time, so that the lines that are read stay in the cache.
VECTOR_CLONES static void turn_rows(float *to, size_t ldt, const float *rows, size_t count, size_t n)
{
    for (size_t i = 0; i < count; i += TURNED_ROWS)
        for (size_t j = 0; j < n; j++)
            for (size_t r = i; r < count && r < i + TURNED_ROWS; r++) to[j * ldt + r] = rows[r * n + j];
}

static void attend_fully(refit_work *w)
{
    size_t T = w->h->n_tokens, d = w->d;
    strided keys = {w->h->k, 1, d}, values = {w->h->v, d, 1}, scores = {w->scores, T, 1};
    memset(w->mean, 0, T * sizeof *w->mean);
    memset(w->most, 0, T * sizeof *w->most);
    for (uint32_t i = 0; i < w->n; i += SCORE_ROWS) {
        uint32_t rows = w->n - i < SCORE_ROWS ? w->n - i : SCORE_ROWS;
        strided queries = {w->queries + i * d, d, 1};
        multiply(w->scores, T, queries, keys, rows, T, d, 0, w->panel);
        for (uint32_t r = 0; r < rows; r++) share_scores(w, w->scores + r * T, i + r);
        if (i < w->n_fit)
            turn_rows(w->attention + i, w->n_fit, w->scores, w->n_fit - i < rows ? w->n_fit - i : rows, T);
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

static void give_bare(const kvb_refit_head *h, float *k, float *v, float *bias)
{
    size_t d = h->head_dim;
    for (uint32_t j = 0; j < h->n_kept; j++) {
        memcpy(k + j * d, h->k + h->positions[j] * d, d * sizeof *k);
        memcpy(v + j * d, h->v + h->positions[j] * d, d * sizeof *v);
        if (bias) bias[j] = 0;
    }
}

// Computes the weights of the present keys for the queries from `first` on.
static void weigh_keys(refit_work *w, size_t first)
{
    strided queries = {w->queries + first * w->d, w->d, 1}, keys = {w->keys, 1, w->d};
    multiply(w->weights + first * w->t, w->t, queries, keys, w->n - first, w->t, w->d, 0, w->panel);
    for (size_t i = first; i < w->n; i++) {
        float *row = w->weights + i * w->t, top = largest_of(row, w->t);
        exp_row(row, -top, w->t);
        w->whole[i] = expf(top - w->top[i]) / w->mass[i];
    }
}

// Computes, for the queries from `first` on, the attention over the kept tokens with this bias (NULL: none), and what
// its output with their values lacks.
static void attend_kept(refit_work *w, const float *bias, size_t first)
{
    for (size_t i = first; i < w->n; i++) {
        float *row = w->shares + i * w->t;
        const float *weights = w->weights + i * w->t;
        for (uint32_t j = 0; j < w->t; j++) row[j] = bias ? bias[j] * w->turn[i] : 0;
        if (bias) exp_row(row, 0, w->t);
        for (uint32_t j = 0; j < w->t; j++) row[j] = bias ? row[j] * weights[j] : weights[j];
        (void)share_row(row, w->t);
    }
    strided shares = {w->shares + first * w->t, w->t, 1}, values = {w->values, w->d, 1};
    multiply(w->missing + first * w->d, w->d, shares, values, w->n - first, w->d, w->t, 0, w->panel);
    for (size_t i = first * w->d; i < (size_t)w->n * w->d; i++) w->missing[i] = w->outputs[i] - w->missing[i];
}

// Returns whether the present keys, values and bias are better than all before, on the queries that are left out, and
// then notes their error and `changed`. Needs the weights of the keys.
static int helps(refit_work *w, const float *bias, int changed, kvb_refit_result *out)
{
    attend_kept(w, bias, w->n_fit);
    size_t first = (size_t)w->n_fit * w->d, end = (size_t)w->n * w->d;
    double sum = 0;
    for (size_t i = first; i < end; i++) sum += w->missing[i] * w->missing[i];
    double error = sum / (double)(end - first);
    if (!(error < out->error_after)) return 0;
    out->error_after = error;
    out->changed = changed;
    return 1;
}

// g = A'(A z - y), with A in `shares`.
static void weight_gradient(refit_work *w, float *g, const float *z, float y)
{
    memset(g, 0, w->t * sizeof *g);
    for (uint32_t i = 0; i < w->n_fit; i++) {
        const float *row = w->shares + (size_t)i * w->t;
        add_scaled(g, row, dot(row, z, w->t) - y, w->t);
    }
}

// bias = log w, w >= 0 that minimises |A w - 1|^2, A the kept tokens' shares of the full mass: accelerated projected
// gradient (Nesterov; Beck and Teboulle 2009) from w = 1.
static int fit_bias(refit_work *w)
{
    size_t t = w->t;
    float *z = w->steps, *g = z + t, *x = w->bias;
    for (uint32_t i = 0; i < w->n_fit; i++)
        for (size_t j = 0; j < t; j++) w->shares[i * t + j] = w->weights[i * t + j] * w->whole[i];
    for (size_t j = 0; j < t; j++) x[j] = 1;
    double largest = 0; // eigenvalue of A'A, by power iteration: A has no negative number
    for (int k = 0; k < POWER_STEPS; k++) {
        weight_gradient(w, g, x, 0);
        largest = sqrt(dot(g, g, t) / (double)dot(x, x, t));
        if (!(largest > 0) || !isfinite(largest)) return 0;
        float by = (float)(1 / sqrt(dot(g, g, t)));
        for (size_t j = 0; j < t; j++) x[j] = g[j] * by;
    }
    for (size_t j = 0; j < t; j++) x[j] = z[j] = 1;
    double momentum = 1;
    float rate = (float)(1 / (1.02 * largest));
    for (int k = 0; k < WEIGHT_STEPS; k++) {
        double next = (1 + sqrt(1 + 4 * momentum * momentum)) / 2;
        float keep = (float)((momentum - 1) / next);
        weight_gradient(w, g, z, 1);
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

// Moves LANES tokens to the centre if it is nearer than theirs. Tokens that are kept have a distance of 0 and stay.
VECTOR_CLONES static void move_nearer(const float *places, const float *centre, size_t d, float *apart,
                                      uint32_t *belongs, uint32_t s)
{
    float distance[LANES] = {0};
    for (size_t c = 0; c < d; c++)
        for (size_t j = 0; j < LANES; j++) {
            float off = places[c * LANES + j] - centre[c];
            distance[j] += off * off;
        }
    for (size_t j = 0; j < LANES; j++) {
        belongs[j] = distance[j] < apart[j] ? s : belongs[j];
        apart[j] = distance[j] < apart[j] ? distance[j] : apart[j];
    }
}

// Computes `places`, LANES tokens at a time.
static void place_keys(refit_work *w)
{
    size_t T = w->h->n_tokens, d = w->d;
    float *upper = w->scores;
    for (size_t i = 0; i < d; i++)
        for (size_t c = 0; c < d; c++) upper[i * d + c] = c >= i ? (float)w->factor[i * d + c] : 0;
    memset(w->places, 0, room_for(T) * d * sizeof *w->places);
    for (size_t j = 0; j < T; j += LANES) {
        strided rows = {upper, d, 1}, keys = {w->h->k + j * d, 1, d};
        multiply(w->places + j * d, LANES, rows, keys, d, T - j < LANES ? T - j : LANES, d, 0, w->panel);
    }
}

// Divides the tokens that are not kept among n centres: each next one is the token whose distance from the nearest
// centre, times its attention, is largest. Returns 0 if there are fewer different tokens.
static int divide_tokens(refit_work *w, uint32_t n)
{
    size_t T = w->h->n_tokens, d = w->d;
    for (size_t j = 0; j < room_for(T); j++) w->apart[j] = j >= T || w->belongs[j] == KEPT ? 0 : INFINITY;
    for (uint32_t s = 0; s < n; s++) {
        size_t centre = 0;
        float largest = 0;
        for (size_t j = 0; j < T; j++) {
            float by = (w->mean[j] + LEAST_SHARE) * (w->apart[j] < INFINITY ? w->apart[j] : 1);
            if (w->apart[j] > 0 && by > largest) largest = by, centre = j;
        }
        if (!(largest > 0)) return 0;
        for (size_t c = 0; c < d; c++) w->trial[c] = w->places[(centre / LANES * d + c) * LANES + centre % LANES];
        for (size_t j = 0; j < T; j += LANES)
            move_nearer(w->places + j * d, w->trial, d, w->apart + j, w->belongs + j, s);
    }
    return 1;
}

// Computes keys [n, d] of the summaries, the means of their tokens', and puts the means of the values into their slots,
// both weighted by the tokens' attention.
static void average_tokens(refit_work *w, uint32_t n, float *keys)
{
    size_t d = w->d;
    float *sums = w->steps;
    memset(sums, 0, n * sizeof *sums);
    memset(keys, 0, n * d * sizeof *keys);
    for (uint32_t j = 0; j < w->h->n_tokens; j++)
        if (w->belongs[j] != KEPT) sums[w->belongs[j]] += w->mean[j] + LEAST_SHARE;
    for (uint32_t s = 0; s < n; s++) memset(w->values + w->slots[s] * d, 0, d * sizeof *w->values);
    for (uint32_t j = 0; j < w->h->n_tokens; j++) {
        uint32_t s = w->belongs[j];
        if (s == KEPT) continue;
        float part = (w->mean[j] + LEAST_SHARE) / sums[s];
        add_scaled(keys + s * d, w->h->k + j * d, part, d);
        add_scaled(w->values + w->slots[s] * d, w->h->v + j * d, part, d);
    }
}

// Computes missing [n, n_fit]: what the score of each summary's key lacks from the logarithm of its tokens' mass.
static void miss_masses(refit_work *w, uint32_t n, const float *keys, float *missing, float *scores)
{
    size_t fit = w->n_fit;
    strided rows = {keys, w->d, 1}, queries = {w->queries, 1, w->d};
    multiply(scores, fit, rows, queries, n, fit, w->d, 0, w->panel);
    for (size_t x = 0; x < n * fit; x++) missing[x] = LEAST_MASS;
    for (size_t j = 0; j < w->h->n_tokens; j++)
        if (w->belongs[j] != KEPT) add_scaled(missing + w->belongs[j] * fit, w->attention + j * fit, 1, fit);
    for (size_t i = 0; i < fit; i++) w->steps[i] = logf(w->mass[i]) + w->top[i];
    for (size_t x = 0; x < n * fit; x++) missing[x] = logf(missing[x]) + w->steps[x % fit] - scores[x];
}

// Puts summaries of the tokens that are not kept into the n slots with the least attention: the means of their values,
// and the keys whose scores come nearest to the logarithms of their mass. Returns 0 if there are fewer such tokens.
static int summarise(refit_work *w, uint32_t n)
{
    size_t d = w->d;
    float *keys = w->trial, *missing = w->shares;
    give_up_slots(w, n);
    if (!divide_tokens(w, n)) return 0;
    average_tokens(w, n, keys);
    miss_masses(w, n, keys, missing, w->weights);
    for (uint32_t s = 0; s < n; s++) memcpy(w->keys + w->slots[s] * d, keys + s * d, d * sizeof *keys);
    float *sums = w->trial; // the keys are in their slots now
    strided turned = {w->queries, 1, d}, by = {missing, 1, w->n_fit};
    multiply(sums, n, turned, by, d, n, w->n_fit, 0, w->panel);
    for (size_t i = 0; i < d * n; i++) w->right[i] = sums[i];
    solve_factored(w->factor, d, w->right, n);
    for (uint32_t s = 0; s < n; s++)
        for (size_t c = 0; c < d; c++) w->keys[w->slots[s] * d + c] += (float)w->right[c * n + s];
    return 1;
}

static void keep_start(refit_work *w)
{
    memcpy(w->change, w->keys, (size_t)w->t * w->d * sizeof *w->keys);
    memcpy(w->best, w->values, (size_t)w->t * w->d * sizeof *w->values);
}

// Puts the best start into w->keys and values: the kept tokens alone, or summaries in three quarters, three eighths or
// three sixteenths of the slots.
static void try_summaries(refit_work *w, kvb_refit_result *out)
{
    uint32_t n = (uint32_t)((uint64_t)w->t * 3 / 4);
    keep_start(w);
    place_keys(w);
    for (int tried = 0; tried < 3 && n > 0; tried++, n /= 2) {
        give_bare(w->h, w->keys, w->values, NULL);
        if (!summarise(w, n)) continue;
        weigh_keys(w, w->n_fit);
        if (helps(w, NULL, KVB_REFIT_SUMMARIES, out)) keep_start(w);
    }
    memcpy(w->keys, w->change, (size_t)w->t * w->d * sizeof *w->keys);
    memcpy(w->values, w->best, (size_t)w->t * w->d * sizeof *w->values);
}

// change = (P'P + RIDGE mean I)^-1 P' missing = P' (P P' + RIDGE mean I)^-1 missing, by the smaller matrix; both have
// the same trace, and the mean is that of P'P.
static int fit_values(refit_work *w)
{
    size_t m = w->m, d = w->d;
    double trace = 0;
    strided rows = {w->shares, w->t, 1}, columns = {w->shares, 1, w->t}, missing = {w->missing, d, 1};
    int few = w->t <= w->n_fit;
    multiply(w->gram, m, few ? columns : rows, few ? rows : columns, m, m, few ? w->n_fit : w->t, 1, w->panel);
    for (size_t i = 0; i < m; i++) trace += w->gram[i * m + i];
    for (size_t i = 0; i < m * m; i++) w->factor[i] = w->gram[i];
    for (size_t i = 0; i < m; i++) w->factor[i * m + i] += RIDGE * trace / w->t;
    if (!(trace > 0) || !factorise(w->factor, m)) return 0;
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

// Tries refitted values with the present attention, which has this bias (NULL: none).
static void try_values(refit_work *w, const float *bias, kvb_refit_result *out)
{
    size_t count = (size_t)w->t * w->d;
    attend_kept(w, bias, 0);
    if (!fit_values(w)) return;
    limit_changes(w);
    memcpy(w->best, w->values, count * sizeof *w->best);
    add_scaled(w->values, w->change, 1, count);
    if (!helps(w, bias, out->changed | KVB_REFIT_VALUES, out)) memcpy(w->values, w->best, count * sizeof *w->best);
}

// ---- The call ----

// Places all arrays from `base` on, or just counts if it is NULL. Returns the bytes; 0 if a size_t cannot hold them.
static size_t carve(refit_work *w, unsigned char *base)
{
    uint64_t n = w->n, t = w->t, d = w->d, T = w->h->n_tokens, m = w->m, side = m > d ? m : d;
    uint64_t scratch = SCORE_ROWS * T, wide = n * d > d * d ? n * d : d * d;
    struct {
        void *at;
        uint64_t count, each, size;
    } parts[] = {{&w->factor, side, side, 8},
                 {&w->right, side > t ? side : t, d, 8},
                 {&w->queries, n, d, 4},
                 {&w->outputs, n, d, 4},
                 {&w->top, n, 1, 4},
                 {&w->mass, n, 1, 4},
                 {&w->attention, T, w->n_fit, 4},
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
                 {&w->places, room_for(T), d, 4},
                 {&w->apart, room_for(T), 1, 4},
                 {&w->belongs, room_for(T), 1, 4},
                 {&w->slots, t, 1, 4},
                 {&w->gram, m, m, 4},
                 {&w->values, t, d, 4},
                 {&w->change, t, d, 4},
                 {&w->best, t, d, 4},
                 {&w->trial, t, d, 4},
                 {&w->direction, d, 1, 4},
                 {&w->bias, t, 1, 4},
                 {&w->steps, 2 * t > n ? 2 * t : n, 1, 4}};
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
    w.n_fit = count_fitted(h->n_queries);
    w.t = h->n_kept;
    w.d = h->head_dim;
    w.m = w.t < w.n_fit ? w.t : w.n_fit;
    return w;
}

static kvb_status check_head(const kvb_refit_head *h, kvb_error *err)
{
    if (!h) return kvb_fail(err, KVB_ARGUMENT, "kvb_refit: the head must not be NULL");
    if (h->n_tokens == 0 || h->head_dim == 0 || h->n_kept == 0 || h->n_kept > h->n_tokens || h->head_dim > 65536 ||
        h->n_queries > 16777216)
        return kvb_fail(err, KVB_ARGUMENT,
                        "kvb_refit: %u tokens of %u numbers, %u kept, %u queries: expected 1 or more tokens, 1 to "
                        "65536 numbers, 1 to all tokens kept and at most 16777216 queries",
                        (unsigned)h->n_tokens, (unsigned)h->head_dim, (unsigned)h->n_kept, (unsigned)h->n_queries);
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

// Copies the best candidate. Returns 0 if it is beyond float32.
static int give(const refit_work *w, int changed, float *k, float *v, float *bias)
{
    size_t d = w->d;
    if (changed) memcpy(k, w->keys, w->t * d * sizeof *k);
    if (changed) memcpy(v, w->values, w->t * d * sizeof *v);
    for (uint32_t j = 0; changed & KVB_REFIT_KEYS && j < w->t; j++) {
        if (bias) bias[j] = w->bias[j];
        else add_scaled(k + j * d, w->direction, w->bias[j], d);
    }
    return all_finite(k, w->t * d) && all_finite(v, w->t * d);
}

// Tries all candidates; the best is in *out and w. Returns 0 if the head's numbers are beyond float32.
static int try_all(refit_work *w, int explicit_bias, kvb_refit_result *out)
{
    int shifted = 0;
    give_bare(w->h, w->keys, w->values, NULL);
    order_queries(w);
    attend_fully(w);
    weigh_keys(w, w->n_fit);
    out->error_after = INFINITY;
    double scale = outputs_variance(w);
    if (!helps(w, NULL, 0, out) || !isfinite(scale)) return 0;
    out->error_before = out->error_after / scale;
    int factored = factor_queries(w);
    if (factored) fit_direction(w);
    if (factored) try_summaries(w, out);
    weigh_keys(w, 0);
    for (uint32_t i = 0; explicit_bias && i < w->n; i++) w->turn[i] = 1;
    if (w->t > 1 && (explicit_bias || factored) && fit_bias(w))
        shifted = helps(w, w->bias, out->changed | KVB_REFIT_KEYS, out);
    try_values(w, shifted ? w->bias : NULL, out);
    out->judged = 1;
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
    if (try_all(&w, bias != NULL, out) && give(&w, out->changed, k, v, bias)) return KVB_OK;
    memset(out, 0, sizeof *out);
    give_bare(h, k, v, bias);
    return KVB_OK;
}
