// RocketKV's first, permanent stage (arXiv 2502.14051; methods.md 3.6): SnapKV with a pool so wide that neighbourhoods
// survive, from which the second stage fetches a few tokens per step.
//
//     s[g,j] = max over |i - j| <= 31 of  sum over h in g, w of the last W queries, of A[h,w,i]
#include "profiler/metric/scorer_parts.h"

typedef struct rocketkv_settings {
    uint32_t window, kernel;
} rocketkv_settings;

static kvb_status score_rocketkv(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    const rocketkv_settings *set = metric_settings(m);
    const snapkv_form form = {.window = set->window,
                              .kernel = set->kernel,
                              .max_pool = true,
                              .group_first = true,
                              .sum = true,
                              .tail_above = 1};
    return snapkv_scores(m, view, &form, s, err);
}

const scorer scorer_rocketkv = {
    .spec = {.name = "rocketkv",
             .parameters = {SPEC(rocketkv_settings, window, 32, 1, 65536, "last context queries that vote"),
                            SPEC(rocketkv_settings, kernel, 63, 1, 255,
                                 "width of the max pooling over positions, odd")}},
    .summary = "RocketKV's first stage: summed attention of the last 32 queries, max pooling over 63 positions",
    .source = "RocketKV, arXiv 2502.14051; 128 window queries in its multi-turn form",
    .formula = "s[g,j] = max over |i-j| <= kernel/2 of the sum over h in g and the last W queries w of A[h,w,i]",
    .needs = VIEW_Q | VIEW_K,
    .protect_sink = 4,
    .score = score_rocketkv,
    .check = check_kernel,
    .kin = "snapkv",
};
