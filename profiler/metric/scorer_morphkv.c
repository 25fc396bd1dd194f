// MorphKV's static form (arXiv 2503.00979; methods.md 3.5): the correlation of older tokens with the last R queries,
// each row of it summed over the query heads of the group.
//
//     S_r[g,j] = sum over h in g of A[h,r,j], r = the last R queries
//     s[g,j]   = sum over r of S_r[g,j]   (fusion=sum)      or  max over r of S_r[g,j]   (fusion=max)
//
// In decode the policy keeps these rows and shifts them by one per step; here they are the prompt's last R, as in its
// first step.
#include "profiler/metric/scorer_parts.h"

typedef struct morphkv_settings {
    uint32_t window;
    row_fusion fusion;
} morphkv_settings;

static kvb_status score_morphkv(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    const morphkv_settings *set = metric_settings(m);
    kvb_status status = check_window(m, view, set->window, err);
    if (status != KVB_OK) return status;
    layer_group_votes(view, set->window, set->fusion == FUSION_MAX, s);
    fill_tail(s, view, set->window, 1);
    return KVB_OK;
}

const scorer scorer_morphkv = {
    .spec = {.name = "morphkv",
             .parameters = {SPEC(morphkv_settings, window, 32, 1, 65536, "last context queries that vote"),
                            SPEC_CHOICE(morphkv_settings, fusion, FUSION_SUM, 1, "sum|max",
                                        "how the rows of the window are joined")}},
    .summary = "attention of the last 32 queries, summed over the group, fused over the queries by sum or maximum",
    .source = "MorphKV, arXiv 2503.00979; its static form, no pooling. Its experiments use window 30, 32 and 200",
    .formula = "s[g,j] = sum, or maximum, over the last W queries r of the sum over h in g of A[h,r,j]",
    .needs = VIEW_Q | VIEW_K,
    .protect_sink = 4,
    .score = score_morphkv,
};
