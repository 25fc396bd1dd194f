// Any bytes as a learned ranking, or as a table with one: refused with a message, or able to rank finite features.
#include "runtime/rank.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    enum { T = 9, MOST = KVB_MAX_KV_HEADS * T };
    static const float some[T] = {0, 1, 2, 3, 1e30f, -1e30f, 1e-30f, 5, 5};
    static float scores[MOST], out[MOST];
    const float *features[KVB_RANK_FEATURES_MAX];
    kvb_ranking *r;
    kvb_error err = {0};
    for (int i = 0; i < MOST; i++) scores[i] = some[i % T];
    for (int f = 0; f < KVB_RANK_FEATURES_MAX; f++) features[f] = scores;
    if (kvb_ranking_open_memory(&r, data, size, "fuzz", &err) != KVB_OK) {
        if (r || err.status == KVB_OK || err.message[0] == 0) abort();
        return 0;
    }
    const kvb_ranking_info *info = kvb_ranking_about(r);
    uint32_t fold = kvb_ranking_fold(r, "0000000000000000000000000000000000000000000000000000000000000000");
    if (fold > r->n_folds || info->n_columns != (2 + info->layer_mean + 2 * info->frozen) * info->n_features + 2)
        abort();
    if (kvb_rank_heads(r, fold, (info->n_layers - 1) * (size_t)info->n_kv_heads, info->n_kv_heads, features, T, out,
                       &err) != KVB_OK)
        abort(); // all are finite
    kvb_ranking_close(r);
    return 0;
}
