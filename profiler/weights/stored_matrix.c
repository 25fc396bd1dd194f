#include "profiler/weights/stored_matrix.h"
#include "profiler/weights/dequant.h"
#include "profiler/weights/simd.h"
#include <math.h>
#include <string.h>

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
