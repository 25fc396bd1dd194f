#include "profiler/stored_matrix.h"
#include "profiler/dequant.h"
#include "profiler/linalg.h"
#include <math.h>
#include <string.h>

stored_matrix stored_floats(const float *w, uint32_t out, uint32_t in)
{
    return (stored_matrix){.type = GGUF_TENSOR_F32, .data = w, .out = out, .in = in};
}

// Where the file has row `row`.
static const uint8_t *row_data(const stored_matrix *w, uint32_t row)
{
    uint32_t values = 1, bytes = 0;
    gguf_tensor_type_block(w->type, &values, &bytes);
    if (w->paired) {
        uint32_t half = w->turned / 2, place = row % w->paired;
        if (place < w->turned) row += (place < half ? 2 * place : 2 * (place - half) + 1) - place;
    }
    return (const uint8_t *)w->data + (size_t)row * (w->in / values) * bytes;
}

static bool all_finite(const float *x, size_t n)
{
    bool finite = true;
    for (size_t i = 0; i < n; i++) finite &= isfinite(x[i]) != 0;
    return finite;
}

bool stored_rows(const stored_matrix *w, uint32_t first, uint32_t n, float *to)
{
    bool finite = true;
    kvb_error err;
    for (uint32_t i = 0; i < n; i++, to += w->in)
        finite &= dequant_rows(w->type, row_data(w, first + i), w->in, to, &err) == KVB_OK && all_finite(to, w->in);
    return finite;
}

bool stored_slice(const stored_matrix *w, uint32_t row, uint32_t first, uint32_t n, float *to)
{
    enum { MOST = 1024, LARGEST_BLOCK = 256 };
    float blocks[MOST + 2 * LARGEST_BLOCK];
    uint32_t values = 1, bytes = 0;
    kvb_error err;
    gguf_tensor_type_block(w->type, &values, &bytes);
    if (first == 0 && n == w->in) return stored_rows(w, row, 1, to);
    uint32_t begin = first / values * values, end = (first + n + values - 1) / values * values;
    const uint8_t *from = row_data(w, row) + (size_t)(begin / values) * bytes;
    bool ok = dequant_rows(w->type, from, end - begin, blocks, &err) == KVB_OK && all_finite(blocks, end - begin);
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
