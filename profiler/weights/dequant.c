// Quantised weights to float32: one function for each block format, in ggml's layouts (ggml-common.h). Products and
// sums are single float operations in ggml's order, so results are equal to the last bit (this file must not be built
// with fused multiply-add).
#include "profiler/weights/dequant.h"
#include "profiler/weights/simd.h"
#include "profiler/weights/stored_matrix.h"
#include "runtime/fail.h"
#include <math.h>
#include <string.h>

// ---- Fields of blocks ----

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

enum { SMALL = 32, SUPER = 256 }; // values per block of the simple and of the K formats

// Expands one block of a format to its values.
typedef void block_reader(const uint8_t *block, float *values);

static uint16_t load_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static float load_half(const uint8_t *p)
{
    return half_to_float(load_u16(p));
}

// The fifth bits of a Q5_0 or Q5_1 block: bit i belongs to value i.
static int fifth_bit(const uint8_t *high, int i)
{
    return (high[i / 8] >> i % 8 & 1) << 4;
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

// The 4-bit values of IQ4_NL and IQ4_XS, and of MXFP4 (e2m1, doubled).
static int nonlinear_value(unsigned nibble)
{
    static const int8_t values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return values[nibble];
}

static int e2m1_doubled(unsigned nibble)
{
    static const int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return values[nibble];
}

// Half of 2^(e - 127), for doubled values. NaN, which the model's reader refuses, for 255, which is NaN in the standard
// (OCP MX 1.0, 5.4.1), and for 254: no weight is a multiple of 2^126, and most of its values are beyond float32.
static float e8m0_half(uint8_t e)
{
    uint32_t bits = e >= 254 ? 0x7fc00000u : e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// The step of 32 values, sub-block i < 8, of an IQ4_XS block: d, upper bit pairs of the scales, 4 bytes of lower
// nibbles.
static float iq4_xs_step(const uint8_t *b, int i)
{
    int scale = (b[4 + i / 2] >> i % 2 * 4 & 15) | (load_u16(b + 2) >> 2 * i & 3) << 4;
    return load_half(b) * (float)(scale - 32);
}

// ---- Blocks to values ----

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "F32 tensors are copied as they are stored: little-endian");

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

// 16 bytes of scales (low nibble) and minima (high), 64 bytes of bit pairs, d, dmin. Each half of 128 values takes 32
// bytes of pairs: run r of 32 values the bits 2r and 2r + 1.
static void expand_q2_k(const uint8_t *b, float *y)
{
    float d = load_half(b + 80), dmin = load_half(b + 82);
    for (int i = 0; i < SUPER; i++) {
        int pair = b[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
        float step = d * (float)(b[i / 16] & 15), base = dmin * (float)(b[i / 16] >> 4);
        y[i] = step * (float)pair - base;
    }
}

// The 6-bit scale of 16 values, sub-block i < 16, of a Q3_K block: nibbles in bytes 0..7, upper bit pairs in 8..11.
static int q3_k_scale(const uint8_t *s, int i)
{
    return ((s[i % 8] >> i / 8 * 4 & 15) | (s[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32;
}

// 32 bytes of third bits (a bit that is not set takes 4 off), 64 bytes of bit pairs as in Q2_K, 12 bytes of scales, d.
static void expand_q3_k(const uint8_t *b, float *y)
{
    float d = load_half(b + 108);
    for (int i = 0; i < SUPER; i++) {
        int pair = b[32 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
        int third = b[i % 32] >> i / 32 & 1;
        y[i] = d * (float)q3_k_scale(b + 96, i / 16) * (float)(pair - (third ? 0 : 4));
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

// d, nibbles that choose one of 16 values.
static void expand_iq4_nl(const uint8_t *b, float *y)
{
    float d = load_half(b);
    for (int i = 0; i < SMALL; i++) y[i] = d * (float)nonlinear_value(b[2 + i % 16] >> i / 16 * 4 & 15);
}

// d, scales (iq4_xs_step), nibbles as in IQ4_NL.
static void expand_iq4_xs(const uint8_t *b, float *y)
{
    for (int i = 0; i < SUPER; i++)
        y[i] = iq4_xs_step(b, i / 32) * (float)nonlinear_value(b[8 + i / 32 * 16 + i % 16] >> i % 32 / 16 * 4 & 15);
}

// An exponent for all, nibbles of e2m1.
static void expand_mxfp4(const uint8_t *b, float *y)
{
    for (int i = 0; i < SMALL; i++) y[i] = e8m0_half(b[0]) * (float)e2m1_doubled(b[1 + i % 16] >> i / 16 * 4 & 15);
}

// NULL for a type that cannot be read.
static block_reader *dequant_block_reader(uint32_t type)
{
    static const struct {
        uint32_t type;
        block_reader *read;
    } all[] = {
        {GGUF_TENSOR_F32, expand_f32},    {GGUF_TENSOR_F16, expand_f16},       {GGUF_TENSOR_BF16, expand_bf16},
        {GGUF_TENSOR_Q4_0, expand_q4_0},  {GGUF_TENSOR_Q4_1, expand_q4_1},     {GGUF_TENSOR_Q5_0, expand_q5_0},
        {GGUF_TENSOR_Q5_1, expand_q5_1},  {GGUF_TENSOR_Q8_0, expand_q8_0},     {GGUF_TENSOR_Q2_K, expand_q2_k},
        {GGUF_TENSOR_Q3_K, expand_q3_k},  {GGUF_TENSOR_Q4_K, expand_q4_k},     {GGUF_TENSOR_Q5_K, expand_q5_k},
        {GGUF_TENSOR_Q6_K, expand_q6_k},  {GGUF_TENSOR_IQ4_NL, expand_iq4_nl}, {GGUF_TENSOR_IQ4_XS, expand_iq4_xs},
        {GGUF_TENSOR_MXFP4, expand_mxfp4}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].type == type) return all[i].read;
    return NULL;
}

// ---- Rows ----

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

// ---- Blocks as whole numbers with one step and one base per 32 of them, for the formats that are such ----

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

static void steps_iq4_nl(const uint8_t *b, int8_t *wholes, float *step, float *base)
{
    *step = load_half(b);
    *base = 0;
    for (int i = 0; i < SMALL; i++) wholes[i] = (int8_t)nonlinear_value(b[2 + i % 16] >> i / 16 * 4 & 15);
}

static void steps_iq4_xs(const uint8_t *b, int8_t *wholes, float *steps, float *bases)
{
    for (int sub = 0; sub < SUPER / 32; sub++) {
        steps[sub] = iq4_xs_step(b, sub);
        bases[sub] = 0;
    }
    for (int i = 0; i < SUPER; i++)
        wholes[i] = (int8_t)nonlinear_value(b[8 + i / 32 * 16 + i % 16] >> i % 32 / 16 * 4 & 15);
}

static void steps_mxfp4(const uint8_t *b, int8_t *wholes, float *step, float *base)
{
    *step = e8m0_half(b[0]);
    *base = 0;
    for (int i = 0; i < SMALL; i++) wholes[i] = (int8_t)e2m1_doubled(b[1 + i % 16] >> i / 16 * 4 & 15);
}

typedef struct step_format {
    uint32_t type;
    unsigned bits;
    void (*read)(const uint8_t *b, int8_t *wholes, float *steps, float *bases);
} step_format;

static const step_format *find_steps(uint32_t type)
{
    static const step_format all[] = {{GGUF_TENSOR_Q4_0, 4, steps_q4_0},     {GGUF_TENSOR_Q4_1, 4, steps_q4_1},
                                      {GGUF_TENSOR_Q5_0, 8, steps_q5_0},     {GGUF_TENSOR_Q5_1, 8, steps_q5_1},
                                      {GGUF_TENSOR_Q8_0, 8, steps_q8_0},     {GGUF_TENSOR_Q4_K, 4, steps_q4_k},
                                      {GGUF_TENSOR_Q5_K, 8, steps_q5_k},     {GGUF_TENSOR_IQ4_NL, 8, steps_iq4_nl},
                                      {GGUF_TENSOR_IQ4_XS, 8, steps_iq4_xs}, {GGUF_TENSOR_MXFP4, 8, steps_mxfp4}};
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

// ---- Matrices as files store them (stored_matrix.h) ----

stored_matrix stored_floats(const float *w, uint32_t out, uint32_t in)
{
    return (stored_matrix){.type = GGUF_TENSOR_F32, .data = w, .out = out, .in = in};
}

void stored_type_block(uint32_t type, uint32_t *values, uint32_t *bytes)
{
    *values = 1, *bytes = 0;
    if (type == STORED_F8_E4M3) *bytes = 1;
    else gguf_tensor_type_block(type, values, bytes);
}

// The row of the file that row `row` is.
static uint32_t row_in_file(const stored_matrix *w, uint32_t row)
{
    if (!w->paired) return row;
    uint32_t half = w->turned / 2, place = row % w->paired;
    if (place < w->turned) row += (place < half ? 2 * place : 2 * (place - half) + 1) - place;
    return row;
}

static const uint8_t *row_data(const stored_matrix *w, uint32_t row)
{
    uint32_t values, bytes;
    stored_type_block(w->type, &values, &bytes);
    return (const uint8_t *)w->data + (size_t)row_in_file(w, row) * (w->in / values) * bytes;
}

static bool all_finite(const float *x, size_t n)
{
    bool finite = true;
    for (size_t i = 0; i < n; i++) finite &= isfinite(x[i]) != 0;
    return finite;
}

// Columns first .. first+n-1 of a row, times its scales.
static bool apply_scales(const stored_matrix *w, uint32_t row, uint32_t first, uint32_t n, float *to)
{
    const stored_scales *s = &w->scales;
    uint32_t values, bytes;
    kvb_error err;
    stored_type_block(s->type, &values, &bytes);
    size_t across = ((size_t)w->in + s->columns - 1) / s->columns,
           begin = (s->first + (size_t)row_in_file(w, row)) / s->rows * across;
    for (size_t i = 0; i < n;) {
        size_t block = (first + i) / s->columns, end = (block + 1) * s->columns - first;
        float scale;
        if (dequant_rows(s->type, s->data + (begin + block) * bytes, 1, &scale, &err) != KVB_OK) return false;
        for (; i < end && i < n; i++) to[i] *= scale;
    }
    return true;
}

// Columns first .. first+n-1 of a row, whole blocks. False when one is not finite.
static bool read_values(const stored_matrix *w, uint32_t row, uint32_t first, uint32_t n, float *to)
{
    uint32_t values, bytes;
    kvb_error err;
    stored_type_block(w->type, &values, &bytes);
    const uint8_t *from = row_data(w, row) + (size_t)(first / values) * bytes;
    bool ok = true;
    if (w->type == STORED_F8_E4M3) {
        dequant_e4m3(from, n, to);
        ok = !w->scales.data || apply_scales(w, row, first, n, to);
    } else ok = dequant_rows(w->type, from, n, to, &err) == KVB_OK;
    return ok && all_finite(to, n);
}

bool stored_rows(const stored_matrix *w, uint32_t first, uint32_t n, float *to)
{
    bool finite = true;
    for (uint32_t i = 0; i < n; i++, to += w->in) finite &= read_values(w, first + i, 0, w->in, to);
    return finite;
}

bool stored_slice(const stored_matrix *w, uint32_t row, uint32_t first, uint32_t n, float *to)
{
    enum { MOST = 1024, LARGEST_BLOCK = 256 };
    float blocks[MOST + 2 * LARGEST_BLOCK];
    uint32_t values, bytes;
    stored_type_block(w->type, &values, &bytes);
    if (first == 0 && n == w->in) return stored_rows(w, row, 1, to);
    uint32_t begin = first / values * values, end = (first + n + values - 1) / values * values;
    bool ok = read_values(w, row, begin, end - begin, blocks);
    memcpy(to, blocks + (first - begin), n * sizeof *to);
    return ok;
}

SIMD_CLONES void stored_round(float *x, size_t n)
{
    uint32_t *bits = (uint32_t *)(void *)x;
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        uint32_t up = bits[i] + 0x7fffu + (bits[i] >> 16 & 1u);
        bits[i] = ((bits[i] & 0x7f800000u) == 0x7f800000u ? bits[i] : up) & 0xffff0000u;
    }
}

unsigned stored_bits(const stored_matrix *w)
{
    return dequant_step_bits(w->type);
}

bool stored_steps(const stored_matrix *w, uint32_t row, int8_t *wholes, float *steps, float *bases)
{
    dequant_steps(w->type, row_data(w, row), w->in, wholes, steps, bases);
    return all_finite(steps, w->in / DEQUANT_STEP_VALUES) && all_finite(bases, w->in / DEQUANT_STEP_VALUES);
}
