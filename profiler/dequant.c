// One function per block format, each expanding one block. The layouts are ggml's block structs (ggml-common.h);
// products and sums are single float operations in ggml's order, so results are equal to the last bit (this file must
// not be built with fused multiply-add).
#include "profiler/dequant.h"
#include "runtime/fail.h"
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "F32 tensors are copied as they are stored: little-endian");

enum { SMALL = 32, SUPER = 256 }; // values per block of the simple and of the K formats

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

static uint16_t load_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static float load_half(const uint8_t *p)
{
    return half_to_float(load_u16(p));
}

static void expand_f32(const uint8_t *b, float *y)
{
    memcpy(y, b, sizeof *y);
}

static void expand_f16(const uint8_t *b, float *y)
{
    *y = load_half(b);
}

static void expand_bf16(const uint8_t *b, float *y)
{
    uint32_t bits = (uint32_t)load_u16(b) << 16;
    memcpy(y, &bits, sizeof *y);
}

// d, 16 bytes of nibbles: low nibbles are values 0..15, high nibbles 16..31.
static void expand_q4_0(const uint8_t *b, float *y)
{
    float d = load_half(b);
    for (int i = 0; i < SMALL / 2; i++) {
        y[i] = d * (float)((b[2 + i] & 15) - 8);
        y[i + SMALL / 2] = d * (float)((b[2 + i] >> 4) - 8);
    }
}

// d, m, nibbles.
static void expand_q4_1(const uint8_t *b, float *y)
{
    float d = load_half(b), m = load_half(b + 2);
    for (int i = 0; i < SMALL / 2; i++) {
        y[i] = d * (float)(b[4 + i] & 15) + m;
        y[i + SMALL / 2] = d * (float)(b[4 + i] >> 4) + m;
    }
}

// The fifth bits of a Q5_0 or Q5_1 block: bit i belongs to value i.
static int fifth_bit(const uint8_t *high, int i)
{
    return (high[i / 8] >> i % 8 & 1) << 4;
}

// d, 32 fifth bits, nibbles.
static void expand_q5_0(const uint8_t *b, float *y)
{
    float d = load_half(b);
    for (int i = 0; i < SMALL / 2; i++) {
        y[i] = d * (float)(((b[6 + i] & 15) | fifth_bit(b + 2, i)) - 16);
        y[i + SMALL / 2] = d * (float)(((b[6 + i] >> 4) | fifth_bit(b + 2, i + SMALL / 2)) - 16);
    }
}

// d, m, 32 fifth bits, nibbles.
static void expand_q5_1(const uint8_t *b, float *y)
{
    float d = load_half(b), m = load_half(b + 2);
    for (int i = 0; i < SMALL / 2; i++) {
        y[i] = d * (float)((b[8 + i] & 15) | fifth_bit(b + 4, i)) + m;
        y[i + SMALL / 2] = d * (float)((b[8 + i] >> 4) | fifth_bit(b + 4, i + SMALL / 2)) + m;
    }
}

// d, 32 signed bytes.
static void expand_q8_0(const uint8_t *b, float *y)
{
    float d = load_half(b);
    for (int i = 0; i < SMALL; i++) y[i] = (float)(int8_t)b[2 + i] * d;
}

// The 6-bit scale and minimum of sub-block i < 8 of a Q4_K or Q5_K block, from 12 bytes: sub-blocks 0..3 lie in the
// low six bits of bytes 0..3 and 4..7; those of 4..7 in the nibbles of bytes 8..11, their upper two bits on top of
// the former.
static void scale_and_min(const uint8_t *s, int i, int *scale, int *min)
{
    if (i < 4) {
        *scale = s[i] & 63;
        *min = s[i + 4] & 63;
    } else {
        *scale = (s[i + 4] & 15) | (s[i - 4] >> 6) << 4;
        *min = s[i + 4] >> 4 | (s[i] >> 6) << 4;
    }
}

// d, dmin, 12 bytes of scales, 128 bytes of nibbles: each run of 32 bytes holds 32 low, then 32 high nibbles.
static void expand_q4_k(const uint8_t *b, float *y)
{
    float d = load_half(b), dmin = load_half(b + 2);
    for (int sub = 0; sub < SUPER / 32; sub++) {
        int scale, min;
        scale_and_min(b + 4, sub, &scale, &min);
        float step = d * (float)scale, base = dmin * (float)min;
        const uint8_t *q = b + 16 + sub / 2 * 32;
        for (int i = 0; i < 32; i++) *y++ = step * (float)(q[i] >> sub % 2 * 4 & 15) - base;
    }
}

// d, dmin, 12 bytes of scales, 32 bytes of fifth bits (bit `sub` of byte i belongs to value i of sub-block `sub`),
// 128 bytes of nibbles.
static void expand_q5_k(const uint8_t *b, float *y)
{
    float d = load_half(b), dmin = load_half(b + 2);
    for (int sub = 0; sub < SUPER / 32; sub++) {
        int scale, min;
        scale_and_min(b + 4, sub, &scale, &min);
        float step = d * (float)scale, base = dmin * (float)min;
        const uint8_t *high = b + 16, *q = b + 48 + sub / 2 * 32;
        for (int i = 0; i < 32; i++) {
            int value = (q[i] >> sub % 2 * 4 & 15) | (high[i] >> sub & 1) << 4;
            *y++ = step * (float)value - base;
        }
    }
}

// 128 bytes of nibbles, 64 bytes of upper bit pairs, 16 signed scales (one per 16 values), d. Each half of 128 values
// takes 64 bytes of nibbles (two runs of 32 low ones, then two of 32 high ones) and 32 bytes of pairs.
static void expand_q6_k(const uint8_t *b, float *y)
{
    const uint8_t *low = b, *high = b + 128, *scales = b + 192;
    float d = load_half(b + 208);
    for (int i = 0; i < SUPER; i++) {
        int half = i / 128, run = i % 128 / 32, at = i % 32;
        int nibble = low[half * 64 + run % 2 * 32 + at] >> run / 2 * 4 & 15;
        int pair = high[half * 32 + at] >> run * 2 & 3;
        float step = d * (float)(int8_t)scales[i / 16];
        y[i] = step * (float)((nibble | pair << 4) - 32);
    }
}

// --- the same blocks as whole numbers: one step and one base per 32 of them ---

static void low_and_high_nibbles(int8_t *wholes, const uint8_t *q)
{
    for (int i = 0; i < SMALL / 2; i++) {
        wholes[i] = q[i] & 15;
        wholes[i + SMALL / 2] = q[i] >> 4;
    }
}

static void add_fifth_bits(int8_t *wholes, const uint8_t *high)
{
    for (int i = 0; i < SMALL; i++) wholes[i] = (int8_t)(wholes[i] | fifth_bit(high, i));
}

static void steps_q4_0(const uint8_t *b, int8_t *wholes, float *step, float *base)
{
    *step = load_half(b);
    *base = *step * -8.0f;
    low_and_high_nibbles(wholes, b + 2);
}

static void steps_q4_1(const uint8_t *b, int8_t *wholes, float *step, float *base)
{
    *step = load_half(b);
    *base = load_half(b + 2);
    low_and_high_nibbles(wholes, b + 4);
}

static void steps_q5_0(const uint8_t *b, int8_t *wholes, float *step, float *base)
{
    *step = load_half(b);
    *base = *step * -16.0f;
    low_and_high_nibbles(wholes, b + 6);
    add_fifth_bits(wholes, b + 2);
}

static void steps_q5_1(const uint8_t *b, int8_t *wholes, float *step, float *base)
{
    *step = load_half(b);
    *base = load_half(b + 2);
    low_and_high_nibbles(wholes, b + 8);
    add_fifth_bits(wholes, b + 4);
}

static void steps_q8_0(const uint8_t *b, int8_t *wholes, float *step, float *base)
{
    *step = load_half(b);
    *base = 0;
    memcpy(wholes, b + 2, SMALL);
}

static void steps_of_super_block(const uint8_t *b, float *steps, float *bases)
{
    float d = load_half(b), dmin = load_half(b + 2);
    for (int sub = 0; sub < SUPER / 32; sub++) {
        int scale, min;
        scale_and_min(b + 4, sub, &scale, &min);
        steps[sub] = d * (float)scale;
        bases[sub] = -(dmin * (float)min);
    }
}

static void steps_q4_k(const uint8_t *b, int8_t *wholes, float *steps, float *bases)
{
    steps_of_super_block(b, steps, bases);
    for (int i = 0; i < SUPER; i++) wholes[i] = b[16 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
}

static void steps_q5_k(const uint8_t *b, int8_t *wholes, float *steps, float *bases)
{
    steps_of_super_block(b, steps, bases);
    for (int i = 0; i < SUPER; i++)
        wholes[i] =
            (int8_t)((b[48 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15) | (b[16 + i % 32] >> i / 32 & 1) << 4);
}

typedef struct step_format {
    uint32_t type;
    unsigned bits;
    void (*read)(const uint8_t *b, int8_t *wholes, float *steps, float *bases);
} step_format;

static const step_format *find_steps(uint32_t type)
{
    static const step_format all[] = {{GGUF_TENSOR_Q4_0, 4, steps_q4_0}, {GGUF_TENSOR_Q4_1, 4, steps_q4_1},
                                      {GGUF_TENSOR_Q5_0, 8, steps_q5_0}, {GGUF_TENSOR_Q5_1, 8, steps_q5_1},
                                      {GGUF_TENSOR_Q8_0, 8, steps_q8_0}, {GGUF_TENSOR_Q4_K, 4, steps_q4_k},
                                      {GGUF_TENSOR_Q5_K, 8, steps_q5_k}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].type == type) return &all[i];
    return NULL;
}

unsigned dequant_step_bits(uint32_t type)
{
    const step_format *f = find_steps(type);
    return f ? f->bits : 0;
}

void dequant_steps(uint32_t type, const void *src, size_t n_values, int8_t *wholes, float *steps, float *bases)
{
    const step_format *f = find_steps(type);
    uint32_t values = 1, bytes = 0;
    gguf_tensor_type_block(type, &values, &bytes);
    const uint8_t *block = src;
    for (size_t i = 0; i < n_values; i += values, block += bytes)
        f->read(block, wholes + i, steps + i / DEQUANT_STEP_VALUES, bases + i / DEQUANT_STEP_VALUES);
}

static void (*find_expand(uint32_t type))(const uint8_t *, float *)
{
    switch (type) {
    case GGUF_TENSOR_F32:
        return expand_f32;
    case GGUF_TENSOR_F16:
        return expand_f16;
    case GGUF_TENSOR_BF16:
        return expand_bf16;
    case GGUF_TENSOR_Q4_0:
        return expand_q4_0;
    case GGUF_TENSOR_Q4_1:
        return expand_q4_1;
    case GGUF_TENSOR_Q5_0:
        return expand_q5_0;
    case GGUF_TENSOR_Q5_1:
        return expand_q5_1;
    case GGUF_TENSOR_Q8_0:
        return expand_q8_0;
    case GGUF_TENSOR_Q4_K:
        return expand_q4_k;
    case GGUF_TENSOR_Q5_K:
        return expand_q5_k;
    case GGUF_TENSOR_Q6_K:
        return expand_q6_k;
    default:
        return NULL;
    }
}

kvb_status dequant_rows(uint32_t type, const void *src, size_t n_values, float *dst, kvb_error *err)
{
    void (*expand)(const uint8_t *, float *) = find_expand(type);
    uint32_t values = 1, bytes = 0;
    if (!expand || !gguf_tensor_type_block(type, &values, &bytes))
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "expected a tensor type out of F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, "
                        "found %s (number %u); get the model in one of these",
                        gguf_tensor_type_name(type), type);
    if (n_values % values)
        return kvb_fail(err, KVB_ARGUMENT, "expected a multiple of %u values for type %s, found %zu", values,
                        gguf_tensor_type_name(type), n_values);
    const uint8_t *block = src;
    if (type == GGUF_TENSOR_F32 && n_values) memcpy(dst, src, n_values * sizeof *dst);
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
