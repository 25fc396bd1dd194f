// Rows of any readable type to float32, and the conversion of halves.
#include "profiler/weights/dequant_blocks.h"
#include "profiler/weights/simd.h"
#include "runtime/fail.h"

float half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 0x1f, mantissa = half & 0x3ff;
    uint32_t bits;
    if (exponent == 0x1f) bits = sign | 0x7f800000 | mantissa << 13;
    else if (exponent != 0) bits = sign | (exponent + 112) << 23 | mantissa << 13;
    else { // zero or denormal: mantissa * 2^-24 is exact in float
        float magnitude = (float)mantissa * 0x1p-24f;
        memcpy(&bits, &magnitude, sizeof bits);
        bits |= sign;
    }
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Rows of halves, 16 at a time where the processor can: the very bits of half_to_float, and of a bfloat16 with zeros
// behind it.
SIMD_CLONES static void widen_halves(float *to, const uint8_t *from, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        uint32_t half = from[2 * i] | (uint32_t)from[2 * i + 1] << 8, bits = (half & 0x7fff) << 13;
        union {
            uint32_t u;
            float f;
        } v = {bits};
        v.f *= 0x1p112f; // denormals as well
        to[i] = (union {
                    uint32_t u;
                    float f;
                }){v.u | ((half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0) | (half & 0x8000) << 16}
                    .f;
    }
}

SIMD_CLONES static void widen_bf16(float *to, const uint8_t *from, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++)
        to[i] = (union {
                    uint32_t u;
                    float f;
                }){(uint32_t)from[2 * i] << 16 | (uint32_t)from[2 * i + 1] << 24}
                    .f;
}

SIMD_CLONES static void widen_e4m3(float *to, const uint8_t *from, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        uint32_t magnitude = from[i] & 0x7f;
        union {
            uint32_t u;
            float f;
        } v = {magnitude << 20};
        v.f *= 0x1p120f; // denormals as well
        to[i] = (union {
                    uint32_t u;
                    float f;
                }){v.u | (magnitude == 0x7f ? 0x7fc00000u : 0) | (uint32_t)(from[i] & 0x80) << 24}
                    .f;
    }
}

void dequant_e4m3(const void *src, size_t n, float *dst)
{
    widen_e4m3(dst, src, n);
}

#define TYPE_NAME(name, number, values, bytes) " " #name

kvb_status dequant_rows(uint32_t type, const void *src, size_t n_values, float *dst, kvb_error *err)
{
    block_reader *expand = dequant_block_reader(type);
    uint32_t values = 1, bytes = 0;
    if (!expand || !gguf_tensor_type_block(type, &values, &bytes))
        return kvb_fail(
            err, KVB_UNSUPPORTED,
            "expected a tensor type out of" GGUF_TENSOR_LIST(TYPE_NAME) ", found %s (number %u); get the model "
                                                                        "in one of these",
            gguf_tensor_type_name(type), type);
    if (n_values % values)
        return kvb_fail(err, KVB_ARGUMENT, "expected a multiple of %u values for type %s, found %zu", values,
                        gguf_tensor_type_name(type), n_values);
    const uint8_t *block = src;
    if (type == GGUF_TENSOR_F32 && n_values) memcpy(dst, src, n_values * sizeof *dst);
    else if (type == GGUF_TENSOR_F16) widen_halves(dst, src, n_values);
    else if (type == GGUF_TENSOR_BF16) widen_bf16(dst, src, n_values);
    else
        for (size_t i = 0; i < n_values; i += values, block += bytes) expand(block, dst + i);
    return KVB_OK;
}

kvb_status dequant_tensor(const gguf_tensor *t, float *dst, kvb_error *err)
{
    kvb_error inner;
    // A tensor of a readable type has data; the type is judged before the pointer is touched.
    kvb_status status = dequant_rows(t->type, t->data, (size_t)t->n_values, dst, &inner);
    if (status == KVB_OK) return status;
    return kvb_fail(err, status, "tensor %.*s: %s", (int)t->name.size, t->name.data, inner.message);
}
