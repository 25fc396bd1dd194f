// tokenizer.json: any bytes are refused, or give a tokenizer with ids that are in range and can be decoded. It encodes
// the input itself.
#include "profiler/text/tokenizer.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_text text = {(const char *)data, size};
    tokenizer *t;
    kvb_error err;
    if (tokenizer_from_json(&t, "input", text, text, text, &err) != KVB_OK) return 0;
    int32_t *ids;
    size_t n;
    if (tokenizer_encode(t, text.data, size, true, &ids, &n, &err) == KVB_OK) {
        for (size_t i = 0; i < n; i++)
            if (ids[i] < 0 || (size_t)ids[i] >= tokenizer_size(t)) abort();
        size_t bytes = tokenizer_decode(t, ids, n, NULL, 0);
        char *back = malloc(bytes + 1);
        if (!back || tokenizer_decode(t, ids, n, back, bytes) != bytes) abort();
        free(back);
    }
    free(ids);
    tokenizer_free(t);
    return 0;
}
