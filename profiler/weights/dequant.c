// Quantised weights to float32: one function for each block format, in ggml's layouts (ggml-common.h), makes whole
// numbers, steps and bases. Products and sums are single float operations in ggml's order, so results are equal to the
// last bit (this file must not be built with fused multiply-add).
#include "profiler/weights/dequant.h"
#include "profiler/weights/float_bits.h"
#include "profiler/weights/simd.h"
#include "profiler/weights/stored_matrix.h"
#include "runtime/fail.h"
#include <math.h>
#include <string.h>

// ---- Bits and numbers ----

// Moves the exponent with a product, which is right for denormals as well.
static inline float widen_half(uint32_t half)
{
    uint32_t magnitude = bits_of_float(float_of_bits((half & 0x7fff) << 13) * 0x1p112f);
    return float_of_bits(magnitude | ((half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0) | (half & 0x8000) << 16);
}

float half_to_float(uint16_t half)
{
    return widen_half(half);
}

// ---- Fields of blocks ----

enum { SMALL = 32, SUPER = 256 }; // values per block of the simple and of the K formats

static uint16_t load_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static float load_half(const uint8_t *p)
{
    return half_to_float(load_u16(p));
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
static const int8_t nonlinear_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t e2m1_doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Returns half of 2^(e - 127), for doubled values. NaN, which the model's reader refuses, for 255, NaN in the standard
// (OCP MX 1.0, 5.4.1), and for 254: no weight is a multiple of 2^126, and most of its values are beyond float32.
static float e8m0_half(uint8_t e)
{
    return float_of_bits(e >= 254 ? 0x7fc00000u : e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}

// ---- Blocks to whole numbers, with a step and a base for every few of them ----

// A value is step * (whole - offset), or step * whole + base if blocks have bases.
typedef struct block_format block_format;
struct block_format {
    uint32_t type;
    unsigned share; // values that share a step
    unsigned bits;  // dequant_step_bits
    int offset;
    bool has_bases;
    void (*read)(const block_format *f, const uint8_t *block, int8_t *wholes, float *steps, float *bases);
};

// Q4_0 to Q5_1: d, m (Q4_1 and Q5_1), 32 fifth bits (Q5_0 and Q5_1; bit i belongs to value i), 16 bytes of nibbles: low
// ones are values 0..15, high ones 16..31.
static void read_small(const block_format *f, const uint8_t *b, int8_t *wholes, float *step, float *base)
{
    const uint8_t *high = b + (f->has_bases ? 4 : 2), *q = high + (f->bits > 4 ? 4 : 0);
    *step = load_half(b);
    if (f->has_bases) *base = load_half(b + 2);
    for (int i = 0; i < SMALL; i++) {
        wholes[i] = q[i % 16] >> i / 16 * 4 & 15;
        if (f->bits > 4) wholes[i] = (int8_t)(wholes[i] | (high[i / 8] >> i % 8 & 1) << 4);
    }
}

// d, 32 signed bytes.
static void read_q8_0(const block_format *f, const uint8_t *b, int8_t *wholes, float *step, float *base)
{
    *step = load_half(b);
    memcpy(wholes, b + 2, SMALL);
}

// The bit pairs of Q2_K and Q3_K: each half of 128 values takes 32 bytes of them, run r of 32 values the bits 2r and
// 2r + 1.
static int bit_pair(const uint8_t *pairs, int i)
{
    return pairs[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
}

// 16 bytes of scales (low nibble) and minima (high), 64 bytes of bit pairs, d, dmin.
static void read_q2_k(const block_format *f, const uint8_t *b, int8_t *wholes, float *steps, float *bases)
{
    float d = load_half(b + 80), dmin = load_half(b + 82);
    for (int sub = 0; sub < SUPER / 16; sub++) {
        steps[sub] = d * (float)(b[sub] & 15);
        bases[sub] = -(dmin * (float)(b[sub] >> 4));
    }
    for (int i = 0; i < SUPER; i++) wholes[i] = (int8_t)bit_pair(b + 16, i);
}

// 32 bytes of third bits (an unset bit subtracts 4), 64 bytes of bit pairs, 12 bytes of scales, d. The 6-bit
// scale of 16 values, sub-block i < 16: nibbles in bytes 0..7, upper bit pairs in 8..11.
static void read_q3_k(const block_format *f, const uint8_t *b, int8_t *wholes, float *steps, float *bases)
{
    const uint8_t *s = b + 96;
    for (int i = 0; i < SUPER / 16; i++) {
        int scale = ((s[i % 8] >> i / 8 * 4 & 15) | (s[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32;
        steps[i] = load_half(b + 108) * (float)scale;
    }
    for (int i = 0; i < SUPER; i++) wholes[i] = (int8_t)(bit_pair(b + 32, i) - (b[i % 32] >> i / 32 & 1 ? 0 : 4));
}

// Q4_K and Q5_K: d, dmin, 12 bytes of scales, in Q5_K 32 bytes of fifth bits (bit `sub` of byte i belongs to value i of
// sub-block `sub`), 128 bytes of nibbles: each run of 32 bytes holds 32 low, then 32 high nibbles.
static void read_super(const block_format *f, const uint8_t *b, int8_t *wholes, float *steps, float *bases)
{
    float d = load_half(b), dmin = load_half(b + 2);
    for (int sub = 0; sub < SUPER / 32; sub++) {
        const uint8_t *high = b + 16, *q = high + (f->bits > 4 ? 32 : 0) + sub / 2 * 32;
        int scale, min;
        scale_and_min(b + 4, sub, &scale, &min);
        steps[sub] = d * (float)scale;
        bases[sub] = -(dmin * (float)min);
        for (int i = 0; i < 32; i++) {
            int fifth = f->bits > 4 ? (high[i] >> sub & 1) << 4 : 0;
            wholes[32 * sub + i] = (int8_t)((q[i] >> sub % 2 * 4 & 15) | fifth);
        }
    }
}

// 128 bytes of nibbles, 64 bytes of upper bit pairs, 16 signed scales (one per 16 values), d. Each half of 128 values
// takes 64 bytes of nibbles (two runs of 32 low ones, then two of 32 high ones) and 32 bytes of pairs.
static void read_q6_k(const block_format *f, const uint8_t *b, int8_t *wholes, float *steps, float *bases)
{
    for (int i = 0; i < SUPER / 16; i++) steps[i] = load_half(b + 208) * (float)(int8_t)b[192 + i];
    for (int i = 0; i < SUPER; i++) {
        int half = i / 128, run = i % 128 / 32, at = i % 32;
        int nibble = b[half * 64 + run % 2 * 32 + at] >> run / 2 * 4 & 15,
            pair = b[128 + half * 32 + at] >> run * 2 & 3;
        wholes[i] = (int8_t)(nibble | pair << 4);
    }
}

// d, nibbles that choose one of 16 values.
static void read_iq4_nl(const block_format *f, const uint8_t *b, int8_t *wholes, float *step, float *base)
{
    *step = load_half(b);
    for (int i = 0; i < SMALL; i++) wholes[i] = nonlinear_values[b[2 + i % 16] >> i / 16 * 4 & 15];
}

// d, upper bit pairs of the scales of 32 values, 4 bytes of their lower nibbles, nibbles as in IQ4_NL.
static void read_iq4_xs(const block_format *f, const uint8_t *b, int8_t *wholes, float *steps, float *bases)
{
    for (int i = 0; i < SUPER / 32; i++) {
        int scale = (b[4 + i / 2] >> i % 2 * 4 & 15) | (load_u16(b + 2) >> 2 * i & 3) << 4;
        steps[i] = load_half(b) * (float)(scale - 32);
    }
    for (int i = 0; i < SUPER; i++) wholes[i] = nonlinear_values[b[8 + i / 32 * 16 + i % 16] >> i % 32 / 16 * 4 & 15];
}

// One exponent for all values, nibbles of e2m1.
static void read_mxfp4(const block_format *f, const uint8_t *b, int8_t *wholes, float *step, float *base)
{
    *step = e8m0_half(b[0]);
    for (int i = 0; i < SMALL; i++) wholes[i] = e2m1_doubled[b[1 + i % 16] >> i / 16 * 4 & 15];
}

static const block_format *find_format(uint32_t type)
{
    static const block_format all[] = {
        {GGUF_TENSOR_Q4_0, 32, 4, 8, false, read_small},    {GGUF_TENSOR_Q4_1, 32, 4, 0, true, read_small},
        {GGUF_TENSOR_Q5_0, 32, 8, 16, false, read_small},   {GGUF_TENSOR_Q5_1, 32, 8, 0, true, read_small},
        {GGUF_TENSOR_Q8_0, 32, 8, 0, false, read_q8_0},     {GGUF_TENSOR_Q2_K, 16, 0, 0, true, read_q2_k},
        {GGUF_TENSOR_Q3_K, 16, 0, 0, false, read_q3_k},     {GGUF_TENSOR_Q4_K, 32, 4, 0, true, read_super},
        {GGUF_TENSOR_Q5_K, 32, 8, 0, true, read_super},     {GGUF_TENSOR_Q6_K, 16, 6, 32, false, read_q6_k},
        {GGUF_TENSOR_IQ4_NL, 32, 8, 0, false, read_iq4_nl}, {GGUF_TENSOR_IQ4_XS, 32, 8, 0, false, read_iq4_xs},
        {GGUF_TENSOR_MXFP4, 32, 8, 0, false, read_mxfp4}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].type == type) return &all[i];
    return NULL;
}

// ---- Rows ----

// Converts n halves, several at a time if the processor can.
SIMD_CLONES static void widen_halves(float *to, const uint8_t *from, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) to[i] = widen_half(from[2 * i] | (uint32_t)from[2 * i + 1] << 8);
}

// Converts n bfloat16 numbers: each is the upper half of a float32.
SIMD_CLONES static void widen_bf16(float *to, const uint8_t *from, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) to[i] = float_of_bits((uint32_t)from[2 * i] << 16 | (uint32_t)from[2 * i + 1] << 24);
}

#define TYPE_NAME(name, number, values, bytes) " " #name

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "F32 tensors are copied as they are stored: little-endian");

static void expand_blocks(const block_format *f, const uint8_t *from, size_t n, size_t block, size_t bytes, float *to)
{
    int8_t wholes[SUPER];
    float steps[SUPER / 16], bases[SUPER / 16];
    for (; n; n -= block, from += bytes) {
        f->read(f, from, wholes, steps, bases);
        for (size_t first = 0, k = 0; first < block; first += f->share, k++, to += f->share) {
            for (unsigned i = 0; i < f->share; i++) to[i] = steps[k] * (float)(wholes[first + i] - f->offset);
            for (unsigned i = 0; f->has_bases && i < f->share; i++) to[i] += bases[k];
        }
    }
}

kvb_status dequant_rows(uint32_t type, const void *src, size_t n_values, float *dst, kvb_error *err)
{
    uint32_t values = 1, bytes = 0;
    if (!gguf_tensor_type_block(type, &values, &bytes))
        return kvb_fail(
            err, KVB_UNSUPPORTED,
            "expected a tensor type out of" GGUF_TENSOR_LIST(TYPE_NAME) ", found %s (number %u); get the model "
                                                                        "in one of these",
            gguf_tensor_type_name(type), type);
    if (n_values % values)
        return kvb_fail(err, KVB_ARGUMENT, "expected a multiple of %u values for type %s, found %zu", values,
                        gguf_tensor_type_name(type), n_values);
    if (type == GGUF_TENSOR_F32 && n_values) memcpy(dst, src, n_values * sizeof *dst);
    else if (type == GGUF_TENSOR_F16) widen_halves(dst, src, n_values);
    else if (type == GGUF_TENSOR_BF16) widen_bf16(dst, src, n_values);
    else if (type != GGUF_TENSOR_F32) expand_blocks(find_format(type), src, n_values, values, bytes, dst);
    return KVB_OK;
}

unsigned dequant_step_bits(uint32_t type)
{
    const block_format *f = find_format(type);
    return f ? f->bits : 0;
}

void dequant_steps(uint32_t type, const void *src, size_t n_values, int8_t *wholes, float *steps, float *bases)
{
    const block_format *f = find_format(type);
    uint32_t values = 1, bytes = 0;
    gguf_tensor_type_block(type, &values, &bytes);
    const uint8_t *block = src;
    for (size_t i = 0; i < n_values; i += values, block += bytes) {
        float all[2 * SUPER / DEQUANT_STEP_VALUES], *to = steps + i / DEQUANT_STEP_VALUES;
        bool halves = f->share < DEQUANT_STEP_VALUES;
        f->read(f, block, wholes + i, halves ? all : to, bases + i / DEQUANT_STEP_VALUES);
        for (size_t k = 0; halves && k < values / DEQUANT_STEP_VALUES; k++)
            to[k] = all[2 * k], bases[i / DEQUANT_STEP_VALUES + k] = all[2 * k + 1];
        for (size_t k = 0; halves && k < values; k++) wholes[i + k] = (int8_t)(wholes[i + k] - f->offset);
    }
    for (size_t i = 0; !f->has_bases && f->share == DEQUANT_STEP_VALUES && i < n_values / DEQUANT_STEP_VALUES; i++)
        bases[i] = f->offset ? steps[i] * -(float)f->offset : 0;
}

// ---- Matrices as files store them (stored_matrix.h) ----

stored_matrix stored_floats(const float *w, uint32_t out, uint32_t in)
{
    return (stored_matrix){.type = GGUF_TENSOR_F32, .data = w, .out = out, .in = in};
}

// Returns the file's row that holds row `row` (stored_matrix.paired).
static uint32_t row_in_file(const stored_matrix *w, uint32_t row)
{
    if (!w->paired) return row;
    uint32_t half = w->turned / 2, place = row % w->paired;
    if (place < w->turned) row += (place < half ? 2 * place : 2 * (place - half) + 1) - place;
    return row;
}

static const uint8_t *row_data(const stored_matrix *w, uint32_t row)
{
    uint32_t values = 1, bytes = 0;
    gguf_tensor_type_block(w->type, &values, &bytes);
    return (const uint8_t *)w->data + (size_t)row_in_file(w, row) * (w->in / values) * bytes;
}

static bool all_finite(const float *x, size_t n)
{
    bool finite = true;
    for (size_t i = 0; i < n; i++) finite &= isfinite(x[i]) != 0;
    return finite;
}

// Reads columns first .. first+n-1 of a row, whole blocks. Returns false if a value is not finite.
static bool read_values(const stored_matrix *w, uint32_t row, uint32_t first, uint32_t n, float *to)
{
    uint32_t values = 1, bytes = 0;
    kvb_error err;
    gguf_tensor_type_block(w->type, &values, &bytes);
    const uint8_t *from = row_data(w, row) + (size_t)(first / values) * bytes;
    return dequant_rows(w->type, from, n, to, &err) == KVB_OK && all_finite(to, n);
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
    uint32_t values = 1, bytes = 0;
    gguf_tensor_type_block(w->type, &values, &bytes);
    if (first == 0 && n == w->in) return stored_rows(w, row, 1, to);
    uint32_t begin = first / values * values, end = (first + n + values - 1) / values * values;
    bool ok = read_values(w, row, begin, end - begin, blocks);
    memcpy(to, blocks + (first - begin), n * sizeof *to);
    return ok;
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
