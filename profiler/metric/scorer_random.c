// A random order, the floor under every metric (methods.md 3.7): reproducible, the same for any number of threads and
// any batch.
//
//     s[g,j] = Philox4x32-10 of counter (position of j, head, layer) and key seed, as a fraction
#include "profiler/backend/sampler.h"
#include "profiler/metric/scorer_parts.h"

typedef struct random_settings {
    uint64_t seed;
} random_settings;

static kvb_status score_random(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    const random_settings *set = metric_settings(m);
    const uint32_t key[2] = {(uint32_t)set->seed, (uint32_t)(set->seed >> 32)};
    uint32_t T = view->n_tokens;
#pragma omp parallel for collapse(2) schedule(static)
    for (uint32_t g = 0; g < view->n_kv_heads; g++)
        for (uint32_t j = 0; j < T; j++) {
            const uint32_t counter[4] = {key_position(view, g, j), view->first_kv_head + g, view->layer, 0x6b76u};
            uint32_t word[4];
            philox4x32(counter, key, word);
            s[(size_t)g * T + j] = (float)(word[0] >> 8) * 0x1p-24f;
        }
    return KVB_OK;
}

const scorer scorer_random = {
    .spec = {.name = "random", .parameters = {SPEC(random_settings, seed, 1, 0, 9007199254740991.0, "of the order")}},
    .summary = "a random order, for comparison",
    .source = "expected recall b/T",
    .formula = "s[g,j] = a uniform number in [0,1) that depends on seed, layer, head and position alone",
    .protect_sink = 4,
    .protect_window = 1,
    .score = score_random,
    .press = "RandomPress",
    .press_warning = "another random order than the one that was calibrated",
};
