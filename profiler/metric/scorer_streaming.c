// StreamingLLM (arXiv 2309.17453; methods.md 3.7): the first tokens and the most recent ones.
//
//     s[g,j] = 2 for the first n_s positions, else position / text length
//
// kvpress writes 0 over the tokens it prunes and 1 over the others, which depends on the budget; the kept set is the
// same.
#include "profiler/metric/scorer_parts.h"

typedef struct streaming_settings {
    uint32_t sinks;
} streaming_settings;

static kvb_status score_streaming(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    const streaming_settings *set = metric_settings(m);
    uint32_t T = view->n_tokens;
    for (uint32_t g = 0; g < view->n_kv_heads; g++) {
        float end = (float)(key_position(view, g, T - 1) + 1);
        for (uint32_t j = 0; j < T; j++) {
            uint32_t at = key_position(view, g, j);
            s[(size_t)g * T + j] = at < set->sinks ? 2.0f : (float)at / end;
        }
    }
    return KVB_OK;
}

// Scores 1, and 0 for the pruned tokens, which follow the sinks.
static kvb_status rank_kvpress(const metric *m, const float *first, float *s, uint32_t T, uint32_t budget,
                               kvb_error *err)
{
    const streaming_settings *set = metric_settings(m);
    uint32_t sinks = set->sinks, pruned = T - (budget < T ? budget : T);
    for (uint32_t j = 0; j < T; j++) s[j] = j >= sinks && j - sinks < pruned ? 0 : 1;
    return KVB_OK;
}

#define SINKS                                                                                      \
    {                                                                                              \
        SPEC(streaming_settings, sinks, 4, 0, 4096, "first positions, which are kept in any case") \
    }

const scorer scorer_streaming = {
    .spec = {"streaming", NULL, SINKS, NULL},
    .summary = "the first tokens, then the most recent ones",
    .source = "StreamingLLM, arXiv 2309.17453; keys keep their positions",
    .formula = "s[g,j] = 2 for j < n_s, else j / T",
    .protect_sink = 4,
    .protect_window = 1,
    .score = score_streaming,
};

const scorer scorer_streaming_kvpress = {
    .spec = {"streaming", "kvpress", SINKS, NULL},
    .summary = "the first tokens, then the most recent ones, as zeros and ones; not for profiling",
    .source = "StreamingLLM, arXiv 2309.17453; as kvpress's StreamingLLMPress",
    .formula = "s[g,j] = 0 for n_s <= j < n_s + T - b, else 1",
    .protect_sink = 0,
    .protect_window = 0,
    .score = score_streaming,
    .why_not_nested = "its scores are 0 and 1 by the budget; streaming keeps the same tokens with one ranking",
    .rank = rank_kvpress,
};
