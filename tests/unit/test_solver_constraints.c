// Constrained budgets against brute force, the limits themselves, and the checker.
#include "solver/checker.h"
#include "solver/constrained.h"
#include "test_solver_cases.h"

static kvb_limits random_limits(const cache_shape *s)
{
    kvb_limits m;
    help_ok(kvb_limits_init(&m, s->n_layers, s->n_kv_heads, err));
    m.by_layer = case_below(3) == 0;
    if (case_below(3) == 0) m.block = 2 + case_below(3);
    if (case_below(3) == 0) m.levels = 1 + case_below(3);
    else if (s->n_kv_heads % 2 == 0 && case_below(2)) m.ranks = 2;
    for (uint32_t h = 0; h < s->n_layers * s->n_kv_heads; h++) {
        if (case_below(4) == 0) m.least[h] = 0.4 * case_uniform();
        if (case_below(4) == 0) m.most[h] = 0.6 + 0.4 * case_uniform();
        if (case_below(12) == 0) m.least[h] = m.most[h] = 1;
    }
    if (case_below(3) == 0)
        for (uint32_t l = 0; l < s->n_layers; l++) m.cap[l] = 0.5 + 0.5 * case_uniform();
    return m;
}

// One group by brute force: the least loss of each sum of pages up to the greatest, over all allowed budgets.
typedef struct brute {
    const kvb_limits *m;
    const loss_curves *c;
    uint32_t first_layer, layers, rank, own; // the group
    uint32_t keep[12];                       // pages of its heads
    double *best;                            // [pages + 1]
} brute;

static uint32_t brute_head(const brute *b, uint32_t i)
{
    return (b->first_layer + i / b->own) * b->m->n_kv_heads + b->rank * b->own + i % b->own;
}

static bool layer_allowed(const brute *b, uint32_t layer, uint64_t *pages)
{
    const uint32_t *keep = b->keep + layer * b->own;
    uint32_t different = 0;
    double share = b->m->cap[b->first_layer + layer], tokens = b->c->shape.n_tokens;
    *pages = 0;
    for (uint32_t g = 0; g < b->own; g++) {
        bool seen = false;
        for (uint32_t k = 0; k < g; k++) seen |= keep[k] == keep[g];
        different += !seen;
        *pages += keep[g];
    }
    if (b->m->levels && different > b->m->levels) return false;
    return share >= 1 || (double)*pages * b->m->block <= share * b->own * tokens + 1e-6;
}

static void brute_from(brute *b, uint32_t i, uint64_t pages, double loss)
{
    uint32_t tokens = b->c->shape.n_tokens, block = b->m->block;
    if (i > 0 && i % b->own == 0) {
        uint64_t own;
        if (!layer_allowed(b, i / b->own - 1, &own)) return;
    }
    if (i == b->layers * b->own) {
        if (loss < b->best[pages]) b->best[pages] = loss;
        return;
    }
    uint32_t h = brute_head(b, i);
    uint32_t low = (b->c->floor + block - 1) / block; // a head keeps at least one token
    for (uint32_t k = low > 0 ? low : 1; k <= (tokens + block - 1) / block; k++) {
        uint32_t kept = k * block < tokens ? k * block : tokens;
        // Limits count a page in full.
        if ((double)k * block < b->m->least[h] * tokens - 1e-6 && kept < tokens) continue;
        if (b->m->most[h] < 1 && (double)k * block > b->m->most[h] * tokens + 1e-6) continue;
        b->keep[i] = k;
        brute_from(b, i + 1, pages + k, loss + loss_at(b->c, h, kept));
    }
}

typedef struct judged {
    uint64_t least, most; // pages
    double *best;         // [most + 1]: the least loss of up to that many pages
} judged;

static judged judge_group(const kvb_limits *m, const loss_curves *c, uint32_t group)
{
    brute b = {.m = m, .c = c, .rank = group % m->ranks, .own = m->n_kv_heads / m->ranks};
    b.first_layer = m->by_layer ? group / m->ranks : 0, b.layers = m->by_layer ? 1 : m->n_layers;
    uint32_t pages = (c->shape.n_tokens + m->block - 1) / m->block * b.layers * b.own;
    judged j = {UINT64_MAX, 0, malloc((pages + 1) * sizeof *j.best)};
    ck_assert_ptr_nonnull(j.best);
    for (uint32_t i = 0; i <= pages; i++) j.best[i] = INFINITY;
    b.best = j.best;
    brute_from(&b, 0, 0, 0);
    for (uint32_t i = 0; i <= pages; i++) {
        if (j.best[i] < INFINITY && j.least == UINT64_MAX) j.least = i;
        if (j.best[i] < INFINITY) j.most = i;
        if (i > 0 && j.best[i - 1] < j.best[i]) j.best[i] = j.best[i - 1];
    }
    return j;
}

enum { RATIOS = 9 };

static uint64_t group_pages(const kvb_limits *m, const uint32_t *keep, uint32_t group)
{
    uint64_t pages = 0;
    uint32_t own = m->n_kv_heads / m->ranks;
    for (uint32_t h = 0; h < m->n_layers * m->n_kv_heads; h++) {
        uint32_t layer = h / m->n_kv_heads, rank = h % m->n_kv_heads / own;
        if (group == (m->by_layer ? layer * m->ranks + rank : rank)) pages += (keep[h] + m->block - 1) / m->block;
    }
    return pages;
}

static int loose; // rows with a stored bound that is not the best

// Checks both solvers against brute force at every ratio. Returns in how many rows greedy is not optimal.
static int check_case(const loss_curves *c, const kvb_limits *m, const double *ratios, int round)
{
    kvb_error err = {0};
    solved_rows greedy, exact;
    uint32_t groups = m->ranks * (m->by_layer ? m->n_layers : 1), layers = m->by_layer ? 1 : m->n_layers, better = 0;
    judged j[8];
    for (uint32_t g = 0; g < groups; g++) j[g] = judge_group(m, c, g);
    kvb_status status = constrained_solve(&greedy, c, m, ratios, RATIOS, false, &err);
    bool possible = true;
    for (uint32_t g = 0; g < groups; g++)
        for (uint32_t k = 0; k < groups; k++)
            possible &= j[g].least != UINT64_MAX && (g / m->ranks != k / m->ranks || j[g].least <= j[k].most);
    ck_assert_msg(possible == (status == KVB_OK), "round %d: %s", round,
                  status ? err.message : "solved the impossible");
    for (uint32_t g = 0; !possible && g < groups; g++) free(j[g].best);
    if (!possible) return 0;
    must(constrained_solve(&exact, c, m, ratios, RATIOS, true, &err), &err);
    double proved[RATIOS];
    must(checker_limited_rows(c, m, RATIOS, ratios, round % 2 ? greedy.lambda : NULL, proved, &err), &err);
    double tolerance = 1e-11 * (c->total + 1e-300);
    for (int r = 0; r < RATIOS; r++) {
        const uint32_t *keep = exact.keep + (size_t)r * exact.n_heads;
        uint64_t tokens = (uint64_t)layers * c->shape.n_kv_heads * c->shape.n_tokens;
        double optimum = 0;
        tokens = (uint64_t)((1 - ratios[r]) * (double)tokens + 1e-6);
        for (uint32_t g = 0; g < groups; g++) {
            uint64_t budget = tokens / m->block / m->ranks, low = 0, high = UINT64_MAX;
            for (uint32_t k = g / m->ranks * m->ranks; k < (g / m->ranks + 1) * m->ranks; k++) {
                low = j[k].least > low ? j[k].least : low;
                high = j[k].most < high ? j[k].most : high;
            }
            ck_assert_uint_eq(exact.saturated[r] >= (budget < low), true);
            budget = budget < low ? low : budget > high ? high : budget;
            optimum += j[g].best[budget];
            ck_assert_uint_le(group_pages(m, keep, g), budget);
            if (!m->levels) ck_assert_uint_eq(group_pages(m, greedy.keep + (size_t)r * exact.n_heads, g), budget);
        }
        must(constrained_check(m, c->shape.n_tokens, keep, &err), &err);
        must(constrained_check(m, c->shape.n_tokens, greedy.keep + (size_t)r * exact.n_heads, &err), &err);
        ck_assert_uint_eq(exact.proved[r], 1);
        ck_assert_msg(fabs(exact.loss[r] - optimum) <= tolerance,
                      "round %d row %d: %.17g, brute force %.17g, greedy %.17g", round, r, exact.loss[r], optimum,
                      greedy.loss[r]);
        ck_assert_msg(greedy.bound[r] <= optimum + tolerance && optimum <= greedy.loss[r] + tolerance,
                      "round %d row %d: bound %.17g, optimum %.17g, greedy %.17g", round, r, greedy.bound[r], optimum,
                      greedy.loss[r]);
        // The checker's best multiplier proves no less than the solver's, and nothing that is false.
        ck_assert_msg(proved[r] <= optimum + tolerance && greedy.bound[r] <= fmax(proved[r], 0) + tolerance,
                      "round %d row %d: stored bound %.17g, proved %.17g, optimum %.17g", round, r, greedy.bound[r],
                      proved[r], optimum);
        loose += proved[r] > greedy.bound[r] + tolerance && greedy.bound[r] < optimum;
        ck_assert(greedy.loss[r] == exact.greedy[r]);
        better += optimum < greedy.loss[r] - tolerance;
    }
    solved_rows_free(&greedy);
    solved_rows_free(&exact);
    for (uint32_t g = 0; g < groups; g++) free(j[g].best);
    return (int)better;
}

UNIT_TEST(equals_brute_force)
{
    static const uint32_t shapes[][3] = {{1, 2, 14}, {2, 2, 9}, {1, 4, 7}, {3, 1, 11},
                                         {1, 3, 12}, {3, 2, 5}, {2, 3, 5}};
    double ratios[RATIOS] = {0.02, 0.15, 0.3, 0.4, 0.5, 0.62, 0.75, 0.88, 0.97};
    int better = 0;
    for (int round = 0; round < 1500; round++) {
        const uint32_t *dims = shapes[case_below(7)];
        cache_shape shape = {dims[0], dims[1], dims[2], case_below(2), case_below(2)};
        loss_curves c;
        case_curves(&c, (case_kind)(round % CASE_KINDS), &shape);
        kvb_limits m = random_limits(&shape);
        kvb_error err = {0};
        if (kvb_limits_check(&m, &err) == KVB_OK) better += check_case(&c, &m, ratios, round);
        kvb_limits_free(&m);
        loss_curves_free(&c);
    }
    printf("rows where greedy is not optimal: %d\n", better);
    printf("rows with a bound that is not the best: %d\n", loose);
    ck_assert_int_gt(better, 100);
}

UNIT_MAIN_EACH("constraints of the solver", case_seed, NULL)
