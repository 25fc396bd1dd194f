// Head scores in their three formats; the first byte picks one.
#include "evaluator/head_scores.h"
#include <math.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const names[] = {"fuzz.npy", "fuzz.tsv", "fuzz.json"};
    float scores[3 * 4];
    kvb_error err;
    if (size < 1) return 0;
    for (int queries = 0; queries < 2; queries++) {
        if (head_scores_parse(data + 1, size - 1, names[data[0] % 3], 3, 4, 2, queries, scores, &err) != KVB_OK)
            continue;
        for (int i = 0; i < (queries ? 12 : 6); i++)
            if (!isfinite(scores[i]) || scores[i] < 0) abort();
    }
    return 0;
}
