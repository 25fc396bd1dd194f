// A weight matrix as a model file stores it. Backends convert it to their own form row by row, on all threads, without
// a float32 copy of the matrix.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct stored_matrix {
    uint32_t type;    // a gguf_tensor_type that dequant_rows can read
    const void *data; // rows back to back, whole blocks each
    uint32_t out, in;
    uint32_t paired; // rows of a head that RoPE turns in pairs: neighbours in the file, half as many as turn apart
                     // here; 0: rows stand as they are
    uint32_t turned; // of these, how many turn: the first ones
} stored_matrix;

stored_matrix stored_floats(const float *w, uint32_t out, uint32_t in);

// Rows first .. first+n-1 in float32. False when a value is not finite.
bool stored_rows(const stored_matrix *w, uint32_t first, uint32_t n, float *to);

// Columns first .. first+n-1 of a row, n up to 1024. False when a value in the blocks that contain them is not finite.
bool stored_slice(const stored_matrix *w, uint32_t row, uint32_t first, uint32_t n, float *to);

// The nearest bfloat16 of each value, ties to even; what is not finite stays so.
void stored_round(float *x, size_t n);

// Bits of the whole numbers that the file stores with one step and one base per 32 values of a row, value = step *
// whole + base: 4 (0 to 15) or 8 (-128 to 127); 0 where it stores something else.
unsigned stored_bits(const stored_matrix *w);

// Reads one row in that form: wholes [in], steps and bases [in / 32]. False when a step or a base is not finite.
bool stored_steps(const stored_matrix *w, uint32_t row, int8_t *wholes, float *steps, float *bases);
