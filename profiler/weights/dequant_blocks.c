// One function per block format, each expanding one block. The layouts are ggml's block structs (ggml-common.h);
// products and sums are single float operations in ggml's order, so results are equal to the last bit (this file must
// not be built with fused multiply-add).
#include "profiler/weights/dequant_blocks.h"

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

block_reader *dequant_block_reader(uint32_t type)
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
