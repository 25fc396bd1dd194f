// Blocks as whole numbers with one step and one base per 32 of them, for the formats that are such.
#include "profiler/weights/dequant_blocks.h"

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
