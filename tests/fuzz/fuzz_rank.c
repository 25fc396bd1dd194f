// Any bytes as a learned ranking, or as a table that carries one; what opens must also rank, or say why it cannot.
#include "runtime/rank.h"
#include <math.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    enum { T = 9 };
    static const float scores[T] = {0, 1, 2, 3, 1e30f, -1e30f, 1e-30f, 5, 5};
    const float *features[KVB_RANK_FEATURES_MAX];
    float out[T];
    kvb_ranking *r;
    kvb_error err = {0};
    for (int f = 0; f < KVB_RANK_FEATURES_MAX; f++) features[f] = scores;
    if (kvb_ranking_open_memory(&r, data, size, "fuzz", &err) != KVB_OK) {
        if (r || err.status == KVB_OK || err.message[0] == 0) abort();
        return 0;
    }
    const kvb_ranking_info *info = kvb_ranking_about(r);
    uint32_t fold = kvb_ranking_fold(r, "0000000000000000000000000000000000000000000000000000000000000000");
    if (fold > r->n_folds || info->n_columns != 2 * info->n_features + 2) abort();
    size_t last = (size_t)info->n_layers * info->n_kv_heads - 1;
    if (kvb_rank_fold(r, fold, last, features, T, out, &err) != KVB_OK) abort(); // the scores are finite
    kvb_ranking_close(r);
    return 0;
}
