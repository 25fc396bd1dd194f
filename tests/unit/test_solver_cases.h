// Problems for the solver's tests: small, of every awkward kind, and repeatable from a printed seed.
#pragma once
#include "solver/problem.h"
#include "unit.h"

// splitmix64: good enough, and the same on every machine.
static uint64_t case_state;

static inline uint64_t case_next(void)
{
    uint64_t z = case_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline double case_uniform(void)
{
    return (double)(case_next() >> 11) * 0x1p-53;
} // [0, 1)
static inline uint32_t case_below(uint32_t n)
{
    return (uint32_t)(case_next() % n);
}

// Seeds a test, which begins with it, and prints the seed. TEST_SEED in the environment repeats a failure.
static inline void case_seed(void)
{
    const char *text = getenv("TEST_SEED");
    case_state = text ? strtoull(text, NULL, 10) : 20260807;
    printf("seed %llu\n", (unsigned long long)case_state);
    fflush(stdout);
}

typedef enum case_kind {
    CASE_RANDOM,
    CASE_HEAVY,
    CASE_TIED,
    CASE_ZERO,
    CASE_SPARSE,
    CASE_PERFECT,
    CASE_CONSTANT,
    CASE_KINDS
} case_kind;

static inline double case_importance(case_kind kind)
{
    switch (kind) {
    case CASE_HEAVY:
        return pow(case_uniform() + 1e-9, -1.5) * 1e-6; // a few tokens hold nearly all
    case CASE_TIED:
        return case_below(4) * 0.25;
    case CASE_ZERO:
        return 0;
    case CASE_SPARSE:
        return case_below(10) == 0 ? case_uniform() : 0;
    case CASE_CONSTANT:
        return 0.5;
    default:
        return case_uniform();
    }
}

// Draws importances and a noisy metric, the importance times e^noise, so that curves are neither convex nor without
// shape. Tied cases have tied scores too.
static inline void case_arrays(case_kind kind, const cache_shape *s, float *scores, float *oracle)
{
    for (size_t i = 0, n = (size_t)shape_heads(s) * s->n_tokens; i < n; i++) {
        oracle[i] = (float)case_importance(kind);
        double noise = kind == CASE_PERFECT ? 0 : 2 * (case_uniform() + case_uniform() - 1);
        scores[i] = kind == CASE_TIED ? (float)case_below(3) : (float)(oracle[i] * exp(noise));
    }
}

static inline cache_shape case_shape(void)
{
    cache_shape s = {1 + case_below(4), 1 + case_below(3), 0, case_below(5), case_below(9)};
    uint32_t pick = case_below(8);
    // One shape in eight has a single free token; others are short enough for judges that take quadratic time.
    s.n_tokens = shape_protected(&s) + 1 + (pick == 0 ? 0 : case_below(pick == 1 ? 400 : 90));
    return s;
}

static inline void must(kvb_status status, const kvb_error *err)
{
    ck_assert_msg(status == KVB_OK, "%s: %s", kvb_status_name(status), err->message);
}

static inline void case_curves(loss_curves *c, case_kind kind, const cache_shape *shape)
{
    size_t n = (size_t)shape_heads(shape) * shape->n_tokens;
    float *scores = malloc(n * sizeof *scores), *oracle = malloc(n * sizeof *oracle);
    metric_order order;
    ck_assert(scores && oracle);
    case_arrays(kind, shape, scores, oracle);
    help_ok(metric_order_make(&order, shape, scores, err));
    *c = loss_curves_make(shape);
    help_ok(loss_curves_fill(c, &order, oracle, err));
    metric_order_free(&order);
    free(scores);
    free(oracle);
}

// Makes curves from gains [N, M] written by hand, with nothing protected.
static inline void case_by_hand(loss_curves *c, uint32_t layers, uint32_t heads, uint32_t tokens, const double *gains)
{
    *c = loss_curves_make(&(cache_shape){layers, heads, tokens, 0, 0});
    memcpy(c->gain, gains, (size_t)layers * heads * tokens * sizeof *gains);
    loss_curves_sum(c);
}

// Makes a random problem at every per cent, and solves it greedily.
static inline void case_solved(problem *p, case_kind kind, const cache_shape *shape, solve_scope scope, hull_range hull)
{
    static double ratios[TABLE_ROWS];
    table_ratios(ratios);
    problem_init(p, shape, &(solve_options){hull, scope, ratios, TABLE_ROWS, NULL});
    loss_curves_free(&p->curves);
    case_curves(&p->curves, kind, shape);
    help_ok(problem_solve(p, err));
}

static inline uint64_t case_total(const uint32_t *keep, uint32_t n)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += keep[i];
    return sum;
}

// Returns the pace at which heads, each of which keeps 1 / (1 + pace * slow[h]), together keep 1 - ratio of the cache.
static inline double case_pace(const double *slow, int n, double ratio)
{
    double low = 0, high = 1e6;
    for (int i = 0; i < 200; i++) {
        double middle = (low + high) / 2, sum = 0;
        for (int h = 0; h < n; h++) sum += 1 / (1 + middle * slow[h]);
        if (sum > n * (1 - ratio)) low = middle;
        else high = middle;
    }
    return low;
}
