// Head scores: lines of numbers.
#include "evaluator/head_scores.h"
#include <math.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    float scores[3 * 4];
    kvb_error err;
    for (int queries = 0; queries < 2; queries++) {
        if (head_scores_parse(data, size, "fuzz.tsv", 3, 4, 2, queries, scores, &err) != KVB_OK) continue;
        for (int i = 0; i < (queries ? 12 : 6); i++)
            if (!isfinite(scores[i]) || scores[i] < 0) abort();
    }
    return 0;
}
