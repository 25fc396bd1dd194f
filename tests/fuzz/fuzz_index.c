// model.safetensors.index.json: any bytes are refused, or every tensor is in one of the files, and no file is outside
// the folder.
#include "profiler/weights/weights_internal.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    weights_index x;
    kvb_error err;
    if (weights_index_parse(&x, data, size, "input", &err) != KVB_OK) return 0;
    const cJSON *tensor;
    cJSON_ArrayForEach(tensor, x.map)
    {
        bool found = false;
        for (size_t i = 0; i < x.n_files; i++) found |= strcmp(x.files[i], tensor->valuestring) == 0;
        if (!found) abort();
    }
    for (size_t i = 0; i < x.n_files; i++)
        if (strchr(x.files[i], '/') || x.files[i][0] == '.') abort();
    weights_index_free(&x);
    return 0;
}
