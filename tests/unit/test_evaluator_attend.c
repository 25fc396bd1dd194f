// Attention over a head's cache with a window, capped scores and sinks, against the formula in double.
#include "evaluator/attend.h"
#include "test_profiler_cases.h"

enum { D = 8, GROUP = 2, ENTRIES = 9, MORE = 4, ROWS = 3 };

// Computes the output of row i, query head h. Entries are at `positions`; the last ROWS are the rows' own.
static void by_hand(double out[D], const float *q, const float *k, const float *v, const uint32_t *positions,
                    uint32_t n, const attend_rule *rule, uint32_t i, uint32_t h)
{
    uint32_t position = rule->position + i;
    double total = rule->sinks ? exp(rule->sinks[h]) : 0;
    memset(out, 0, D * sizeof *out);
    for (uint32_t j = 0; j < n - (ROWS - 1 - i); j++) {
        double score = 0;
        if (rule->window && positions[j] + rule->window <= position) continue;
        for (int c = 0; c < D; c++) score += (double)q[(i * GROUP + h) * D + (uint32_t)c] * k[j * D + (uint32_t)c];
        score /= sqrt(D);
        if (rule->softcap > 0) score = rule->softcap * tanh(score / rule->softcap);
        total += exp(score);
        for (int c = 0; c < D; c++) out[c] += exp(score) * v[j * D + (uint32_t)c];
    }
    for (int c = 0; c < D; c++) out[c] /= total;
}

// The entries are split between a base and the head's own memory; some positions have been evicted.
UNIT_TEST(rules_against_the_formula)
{
    static const float sinks[GROUP] = {0.7f, -1.5f};
    static const attend_rule rules[] = {{0, 40, 0, NULL}, {4, 40, 0, NULL},  {9, 40, 0, NULL},
                                        {0, 40, 2, NULL}, {0, 40, 0, sinks}, {5, 40, 1.5f, sinks}};
    uint32_t positions[ENTRIES + MORE];
    const uint32_t all = ENTRIES + MORE;
    for (uint32_t j = 0; j < all; j++) positions[j] = 42 - 2 * (all - ROWS) + (j < all - ROWS ? 2 * j : 0);
    for (uint32_t i = 0; i < ROWS; i++) positions[all - ROWS + i] = 40 + i;
    float *k = case_floats(all * D, 2, 0), *v = case_floats(all * D, 1, 0), *q = case_floats(ROWS * GROUP * D, 2, 0),
          o[ROWS * GROUP * D];
    attend_scratch s = {0};
    attend_reserve(&s, all, D);
    kv_span base = {k, v, positions, MORE}, own = {k + MORE * D, v + MORE * D, positions + MORE, ENTRIES};
    for (size_t r = 0; r < sizeof rules / sizeof *rules; r++) {
        attend_head(&s, o, q, GROUP * D, ROWS, GROUP, base, own, D, NULL, 0, &rules[r]);
        for (uint32_t i = 0; i < ROWS; i++)
            for (uint32_t h = 0; h < GROUP; h++) {
                double want[D], sum = 0;
                by_hand(want, q, k, v, positions, all, &rules[r], i, h);
                for (uint32_t c = 0; c < D; c++)
                    ck_assert_msg(fabs(o[(i * GROUP + h) * D + c] - want[c]) < 1e-5,
                                  "rule %zu, row %u, head %u: %g, "
                                  "expected %g",
                                  r, i, h, (double)o[(i * GROUP + h) * D + c], want[c]);
                const float *p = s.scores + (i * GROUP + h) * all;
                for (uint32_t j = 0; j < all; j++) {
                    sum += p[j];
                    if (rules[r].window && positions[j] + rules[r].window <= 40 + i) ck_assert(p[j] == 0);
                }
                ck_assert(rules[r].sinks ? sum < 1 - 1e-3 : fabs(sum - 1) < 1e-5); // the sink has taken the rest
            }
    }
    attend_release(&s);
    free(k);
    free(v);
    free(q);
}

UNIT_MAIN_EACH("evaluator attention", help_setup, help_teardown)
