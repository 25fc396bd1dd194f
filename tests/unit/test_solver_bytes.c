// Tokens and formats under a budget of bytes, against a plain dynamic program over bytes.
#include "solver/bytes.h"
#include "solver/checker.h"
#include "test_solver_cases.h"

enum { MOST_FORMATS = 5, ROWS = 7 };

typedef struct bytes_case {
    loss_curves curves;
    double *added;
    uint64_t *cost, budget[ROWS];
    bytes_problem p;
} bytes_case;

// Makes random curves. Formats cost half a byte to three bytes a token, with a jump at every group; fewer lose more.
static void make_case(bytes_case *c, case_kind kind, bool rises)
{
    cache_shape shape = {1 + case_below(3), 1 + case_below(2), 7 + case_below(16), case_below(3), 1 + case_below(3)};
    uint32_t N = shape_heads(&shape), T = shape.n_tokens, J = 1 + case_below(MOST_FORMATS), m = shape_middle(&shape);
    *c = (bytes_case){.curves = loss_curves_make(&shape)};
    for (size_t i = 0; i < (size_t)N * m; i++) c->curves.gain[i] = case_importance(kind);
    loss_curves_sum(&c->curves);
    for (uint32_t n = 0; rises && n < N; n++)
        for (uint32_t i = 0; i < m; i++) {
            double *at = c->curves.loss + (size_t)n * (m + 1) + i;
            *at *= 0.7 + 0.6 * case_uniform();
            if (i) c->curves.gain[(size_t)n * m + i - 1] = at[-1] - *at;
            if (i + 1 == m) c->curves.gain[(size_t)n * m + i] = *at;
        }
    loss_curves_sum(&c->curves);
    c->added = calloc((size_t)N * J, sizeof *c->added);
    c->cost = calloc((size_t)J * (T + 1), sizeof *c->cost);
    for (uint32_t j = 0; j < J; j++) {
        uint32_t each = 1 + case_below(6), group = 3 + case_below(6), shared = case_below(4);
        for (uint32_t b = 0; b <= T; b++)
            c->cost[j * (T + 1) + b] = (uint64_t)(each * b / 2 + shared * ((b + group - 1) / group));
        for (uint32_t n = 0; n < N; n++) c->added[n * J + j] = case_below(3) ? case_uniform() * 3 / each : 0;
    }
    uint64_t most = 0;
    for (uint32_t j = 0; j < J; j++) most = c->cost[j * (T + 1) + T] > most ? c->cost[j * (T + 1) + T] : most;
    for (uint32_t r = 0; r < ROWS; r++) c->budget[r] = most * N * (ROWS - r) / ROWS + (r ? 0 : case_below(3));
    c->p = (bytes_problem){&c->curves, J, c->added, c->cost};
}

static void free_case(bytes_case *c)
{
    loss_curves_free(&c->curves);
    free(c->added);
    free(c->cost);
}

// Returns the least loss within B bytes, or infinity: best[x] is the least with exactly x bytes so far.
static double optimum(const bytes_problem *p, uint64_t B)
{
    uint32_t N = shape_heads(&p->curves->shape), T = p->curves->shape.n_tokens;
    double *best = calloc(B + 1, sizeof *best), *next = calloc(B + 1, sizeof *next), least = INFINITY;
    for (uint64_t x = 1; x <= B; x++) best[x] = INFINITY;
    for (uint32_t n = 0; n < N; n++) {
        for (uint64_t x = 0; x <= B; x++) next[x] = INFINITY;
        for (uint32_t j = 0; j < p->n_formats; j++)
            for (uint32_t b = p->curves->floor; b <= T; b++) {
                double loss = loss_at(p->curves, n, b) + p->added[n * p->n_formats + j];
                for (uint64_t x = p->cost[j * (T + 1) + b]; x <= B; x++)
                    next[x] = fmin(next[x], best[x - p->cost[j * (T + 1) + b]] + loss);
            }
        double *swap = best;
        best = next;
        next = swap;
    }
    for (uint64_t x = 0; x <= B; x++) least = fmin(least, best[x]);
    free(best);
    free(next);
    return least;
}

// Checks a row against the optimum, and its bound.
static void judge_row(const bytes_case *c, const solved_rows *x, uint32_t r)
{
    uint32_t N = x->n_heads, T = c->curves.shape.n_tokens;
    double want = optimum(&c->p, c->budget[r]), loss = 0, slack = 1e-9 * (1 + c->curves.total);
    uint64_t bytes = 0;
    for (uint32_t n = 0; n < N; n++) {
        uint32_t keep = x->keep[r * N + n], j = x->format[r * N + n];
        ck_assert(keep >= c->curves.floor && keep <= T && j < c->p.n_formats);
        loss += loss_at(&c->curves, n, keep) + c->added[n * c->p.n_formats + j];
        bytes += c->cost[j * (T + 1) + keep];
    }
    ck_assert_double_eq_tol(x->loss[r], loss, slack);
    unit_numbers(x->bytes[r], bytes, x->saturated[r], isinf(want));
    if (isinf(want)) return;
    ck_assert_uint_le(bytes, c->budget[r]);
    ck_assert_msg(x->bound[r] <= want + slack && want <= x->loss[r] + slack, "row %u: bound %g, optimum %g, greedy %g",
                  r, x->bound[r], want, x->loss[r]);
    if (N <= 2) ck_assert_double_eq_tol(x->loss[r], want, slack); // bytes move between two heads, as far as they can
    ck_assert_double_eq_tol(x->bound[r], fmax(0, bytes_bound(&c->p, c->budget[r], x->lambda[r])), slack);
    for (double lambda = 0; lambda < 1; lambda += 0.13)
        ck_assert(bytes_bound(&c->p, c->budget[r], lambda) <= want + slack);
}

UNIT_TEST(test_greedy_is_between_bound_and_optimum)
{
    case_seed();
    double worst = 0, sum = 0, all = 0;
    for (int i = 0; i < 140; i++) {
        bytes_case c;
        solved_rows x;
        make_case(&c, (case_kind)(i % CASE_KINDS), i % 3 == 2);
        ck_assert_int_eq(bytes_solve(&x, &c.p, c.budget, ROWS, NULL), KVB_OK);
        for (uint32_t r = 0; r < ROWS; r++) {
            judge_row(&c, &x, r);
            double gap = x.loss[r] - x.bound[r];
            worst = fmax(worst, x.loss[r] > 0 ? gap / x.loss[r] : 0);
            sum += gap;
            all += x.loss[r];
            // No other multiplier gives a better bound.
            for (double f = 0.5; f < 2; f *= 1.1)
                ck_assert(bytes_bound(&c.p, c.budget[r], f * x.lambda[r]) <=
                              bytes_bound(&c.p, c.budget[r], x.lambda[r]) + 1e-9 * (1 + c.curves.total) ||
                          x.saturated[r]);
        }
        solved_rows_free(&x);
        free_case(&c);
    }
    printf("bytes: gap of greedy: %.2f %% of all losses, %.0f %% at most\n", 100 * sum / all, 100 * worst);
    ck_assert(sum < 0.05 * all);
}

// Makes the solver's problem from the checker's input, with real formats.
static bytes_problem problem_of(const checker_formats *f, uint8_t (*pair)[2], uint32_t J)
{
    uint32_t N = shape_heads(&f->curves->shape), T = f->curves->shape.n_tokens;
    bytes_problem p = {f->curves, J, calloc((size_t)N * J, sizeof(double)), calloc(J * (T + 1), sizeof(uint64_t))};
    for (uint32_t j = 0; j < J; j++) {
        uint8_t k = pair[j][0], v = pair[j][1];
        for (uint32_t n = 0; n < N; n++)
            p.added[n * J + j] = (k ? f->loss[6 * n + k - 1] : 0) + (v ? f->loss[6 * n + 3 + v - 1] : 0);
        for (uint32_t b = 0; b <= T; b++)
            p.cost[j * (T + 1) + b] =
                kvb_packed_bytes(k, KVB_KEYS, b, f->head_dim) + kvb_packed_bytes(v, KVB_VALUES, b, f->head_dim);
    }
    return p;
}

// One problem of real formats: the checker's bytes, losses and bounds are the solver's, and wrong rows are found.
static void check_formats_case(case_kind kind)
{
    static const double ratios[ROWS] = {0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.99};
    cache_shape shape = {1 + case_below(3), 1 + case_below(2), 40 + case_below(60), case_below(3), 1 + case_below(3)};
    uint32_t N = shape_heads(&shape), J = 0, d = 8 + case_below(70);
    loss_curves curves = loss_curves_make(&shape);
    double loss[6 * 6], lambda[ROWS];
    uint8_t pair[16][2], formats[ROWS * 6 * 2];
    checker_formats f = {&curves, loss, d, 1u << case_below(4) | 1u << case_below(4) | 1u << case_below(4)};
    uint64_t budget[ROWS];
    solved_rows x;
    checked_row row[ROWS];
    for (size_t i = 0; i < (size_t)N * shape_middle(&shape); i++) curves.gain[i] = case_importance(kind);
    loss_curves_sum(&curves);
    for (int i = 0; i < 6 * 6; i++) loss[i] = case_uniform() * curves.total / 4;
    for (uint8_t i = 0; i < 16; i++)
        if (f.choices >> i / 4 & 1 && f.choices >> i % 4 & 1) memcpy(pair[J++], (uint8_t[2]){i / 4, i % 4}, 2);
    bytes_problem p = problem_of(&f, pair, J);
    for (int r = 0; r < ROWS; r++) budget[r] = (uint64_t)((1 - ratios[r]) * 4 * shape.n_tokens * d * N + 1e-6);
    ck_assert_int_eq(bytes_solve(&x, &p, budget, ROWS, NULL), KVB_OK);
    for (uint32_t i = 0; i < ROWS * N; i++) memcpy(formats + 2 * i, pair[x.format[i]], 2);
    for (int r = 0; r < ROWS; r++) lambda[r] = x.lambda[r] * (r % 2 ? 1 : 0.3 + case_uniform());
    checker_formats_rows(&f, ROWS, ratios, lambda, x.keep, formats, row);
    for (uint32_t r = 0; r < ROWS; r++) {
        double tokens = 0;
        for (uint32_t n = 0; n < N; n++) tokens += loss_at(&curves, n, x.keep[r * N + n]);
        ck_assert(row[r].fits);
        ck_assert_double_eq_tol(row[r].loss, x.loss[r], 1e-9 * (1 + curves.total));
        ck_assert_double_eq_tol(tokens + row[r].added, x.loss[r], 1e-9 * (1 + curves.total));
        ck_assert_double_eq_tol(row[r].bound, bytes_bound(&p, budget[r], lambda[r]), 1e-9 * (1 + curves.total));
        x.keep[r * N] = shape.n_tokens;
        for (uint32_t n = 0; n < N && r == 3; n++) formats[2 * (r * N + n) + 1] = 0; // at 80 %, values of 16 bits
    }
    checker_formats_rows(&f, ROWS, ratios, lambda, x.keep, formats, row);
    ck_assert(f.choices & 1 || !row[3].fits);
    if (f.choices == 1) ck_assert(!row[4].fits && !row[5].fits && !row[6].fits);
    solved_rows_free(&x);
    loss_curves_free(&curves);
    free(p.added);
    free(p.cost);
}

UNIT_TEST(test_the_checker_agrees_with_the_solver)
{
    case_seed();
    for (int i = 0; i < 60; i++) check_formats_case((case_kind)(i % CASE_KINDS));
}

UNIT_TEST(test_one_format_is_the_greedy_of_tokens)
{
    case_seed();
    for (int i = 0; i < 60; i++) {
        bytes_case c;
        solved_rows x;
        problem p;
        make_case(&c, CASE_RANDOM, false);
        uint32_t N = shape_heads(&c.curves.shape), T = c.curves.shape.n_tokens;
        double ratios[ROWS];
        c.p.n_formats = 1;
        memset(c.added, 0, N * sizeof *c.added);
        for (uint32_t b = 0; b <= T; b++) c.cost[b] = b;
        for (int r = 0; r < ROWS; r++) {
            ratios[r] = (r + 1.0) / (ROWS + 1);
            c.budget[r] =
                (uint64_t)N * T - prune_target(ratios[r], c.curves.shape.n_layers, c.curves.shape.n_kv_heads, T);
        }
        const solve_options options = {HULL_FEASIBLE, SCOPE_GLOBAL, ratios, ROWS, NULL};
        problem_init(&p, &c.curves.shape, &options);
        ck_assert_int_eq(problem_solve_curves(&p, &c.curves, NULL), KVB_OK);
        ck_assert_int_eq(bytes_solve(&x, &c.p, c.budget, ROWS, NULL), KVB_OK);
        for (int r = 0; r < ROWS; r++) { // here the head that stops inside a piece stops at its best point
            if (x.saturated[r]) continue;
            ck_assert(x.loss[r] <= p.loss[r] * c.curves.total + 1e-9);
            ck_assert_double_eq_tol(x.bound[r], p.bound[r] * c.curves.total, 1e-9);
        }
        problem_free(&p);
        solved_rows_free(&x);
        free_case(&c);
    }
}

UNIT_TEST(test_wrong_problems_are_refused)
{
    case_seed();
    bytes_case c;
    solved_rows x;
    kvb_error e;
    make_case(&c, CASE_RANDOM, false);
    c.budget[1] = c.budget[0] + 1;
    ck_assert_int_eq(bytes_solve(&x, &c.p, c.budget, ROWS, &e), KVB_ARGUMENT);
    c.added[0] = NAN;
    ck_assert_int_eq(bytes_solve(&x, &c.p, c.budget, 1, &e), KVB_ARGUMENT);
    ck_assert_str_eq(e.message, "formats: head 0, format 0: expected a finite loss >= 0, found nan");
    c.added[0] = 0;
    c.cost[3] = c.cost[4] + 1;
    ck_assert_int_eq(bytes_solve(&x, &c.p, c.budget, 1, &e), KVB_ARGUMENT);
    free_case(&c);
}

UNIT_MAIN("solver bytes")
