// The .npy reader, and every conversion of the arrays that it accepts.
#include "formats/npy.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    npy_array a;
    kvb_error err;
    if (npy_parse(&a, data, size, "fuzz.npy", &err) != KVB_OK) return 0;
    if (a.count > size) abort(); // an element has at least one byte
    void *out = malloc(a.count * sizeof(double) + 1);
    if (!out) return 0;
    npy_to_f64(&a, out, "fuzz.npy", &err);
    npy_to_f32(&a, out, "fuzz.npy", &err);
    npy_to_i32(&a, out, "fuzz.npy", &err);
    free(out);
    return 0;
}
