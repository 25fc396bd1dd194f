// CriticalKV (arXiv 2502.03805; methods.md 3.7): wraps another metric p and weighs it with what a value can do to the
// layer's output.
//
//     first stage:  the floor(share * b) best tokens by p are kept
//     second stage: the others by (p + epsilon) * mean over h in g of ||v_j W_O^(h)||_1
//
// The first stage depends on the budget; with share=0 the ranking is nested and can be profiled, and the runtime may
// still take two stages with the budgets of that table.
#include "profiler/metric/scorer_parts.h"
#include "runtime/fail.h"
#include <float.h>
#include <stdlib.h>

typedef struct critical_settings {
    double share, epsilon;
} critical_settings;

static kvb_status score_critical(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    uint32_t T = view->n_tokens, group = view->n_heads / view->n_kv_heads;
    const critical_settings *set = metric_settings(m);
    float epsilon = (float)set->epsilon;
    metric base;
    metric_base(m, &base);
    kvb_status status = metric_score(&base, view, s, err);
    for (uint32_t g = 0; status == KVB_OK && g < view->n_kv_heads; g++)
        for (uint32_t j = 0; j < T; j++) {
            float norm = 0;
            for (uint32_t h = g * group; h < (g + 1) * group; h++) norm += view->output_norms[(size_t)h * T + j];
            s[(size_t)g * T + j] = (s[(size_t)g * T + j] + epsilon) * (norm / (float)group);
        }
    return status;
}

static kvb_status rank_critical(const metric *m, const float *first, float *s, uint32_t T, uint32_t budget,
                                kvb_error *err)
{
    const critical_settings *set = metric_settings(m);
    uint32_t n = (uint32_t)((budget < T ? budget : T) * set->share);
    if (set->share > 0 && n == 0 && budget > 0) n = 1; // as in kvpress, a first stage keeps at least one token
    uint32_t *best = need(n, sizeof *best, "tokens of a ranking");
    kvb_status status = kvb_select(first, T, n, 0, 0, best, n, err);
    for (uint32_t i = 0; status == KVB_OK && i < n; i++) s[best[i]] = FLT_MAX;
    free(best);
    return status;
}

static bool has_one_stage(const metric *m)
{
    return ((const critical_settings *)metric_settings(m))->share == 0;
}

static bool leave_out_first_stage(metric *m)
{
    metric_set_value(m, "share", 0);
    return true;
}

// Refuses a wrapped metric that is weighted with the values' norms already: they would count twice.
static kvb_status check_base(const metric *m, kvb_error *err)
{
    metric base;
    metric_base(m, &base);
    if (metric_value(&base, "value_norm", 0) != 0)
        return kvb_fail(err, KVB_ARGUMENT,
                        "metric %s: expected attention is already multiplied by the norm of the value; add "
                        ":value_norm=0 to it",
                        m->spec);
    return KVB_OK;
}

const scorer scorer_critical = {
    .spec = {.name = "critical",
             .parameters = {SPEC(critical_settings, share, 0.5, 0, 1,
                                 "of the budget that is kept by the wrapped metric alone"),
                            SPEC(critical_settings, epsilon, 1e-4, 0, 1e6, "added to the wrapped metric's score")},
             .behind = "+METRIC"},
    .summary = "CriticalKV: another metric, weighted with the norm of v W_O; written critical+METRIC",
    .source = "CriticalKV, arXiv 2502.03805; as kvpress's CriticalKVPress",
    .formula =
        "s[g,j] = (p[g,j] + epsilon) * mean over h in g of ||v_j W_O^(h)||_1, p the metric after the plus sign;\n"
        "the floor(share * b) best tokens by p go first",
    .needs = VIEW_OUTPUT_NORMS,
    .protect_sink = 4,
    .protect_window = 1,
    .score = score_critical,
    .check = check_base,
    .why_not_nested =
        "its first stage keeps a share of the budget; profile critical:share=0+METRIC, evaluate with both "
        "stages",
    .is_nested = has_one_stage,
    .rank = rank_critical,
    .make_nested = leave_out_first_stage,
    .wraps = true,
};
