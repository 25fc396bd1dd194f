// Imported loss curves: those that are accepted give importances that are valid in a record.
#include "formats/curves_file.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    curves_file c;
    kvb_error err;
    if (curves_parse(&c, data, size, "fuzz.safetensors", &err) != KVB_OK) {
        if (c.loss || c.kept) abort();
        return 0;
    }
    uint64_t heads = (uint64_t)c.n_layers * c.n_kv_heads;
    if (!c.n_contexts || heads * c.n_budgets > size || c.sink + c.window >= c.n_tokens) abort();
    if (heads * c.n_tokens < 1 << 20) {
        float *oracle = malloc(heads * c.n_tokens * sizeof *oracle);
        if (!oracle) return 0;
        curves_importance(&c, c.n_contexts - 1, oracle);
        for (size_t i = 0; i < heads * c.n_tokens; i++)
            if (!(oracle[i] >= 0) || isinf(oracle[i])) abort();
        free(oracle);
    }
    curves_free(&c);
    return 0;
}
