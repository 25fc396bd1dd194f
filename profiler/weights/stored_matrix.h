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
    uint32_t paired; // rows per head if the file stores the two rows of a rotary pair side by side, (2i, 2i+1), which
                     // are (i, i + turned/2) here; 0: rows are in the file's order
    uint32_t turned; // with `paired`: the first `turned` rows of each head rotate
} stored_matrix;

stored_matrix stored_floats(const float *w, uint32_t out, uint32_t in);

// Reads rows first .. first+n-1 as float32, to [n, in]. Returns false if a value is not finite.
bool stored_rows(const stored_matrix *w, uint32_t first, uint32_t n, float *to);

// Reads n columns of a row from `first` on, up to 1024 or all. Returns false if a value in their blocks is not finite.
bool stored_slice(const stored_matrix *w, uint32_t row, uint32_t first, uint32_t n, float *to);

// Returns the bits of the whole numbers, 4 (0 to 15) or 8 (-128 to 127), if the file stores them with one step and one
// base per 32 values of a row, value = step * whole + base; 6 (-32 to 31) if with a step per 16 values; 0 if it stores
// something else.
unsigned stored_bits(const stored_matrix *w);

// Reads one row in that form: wholes [in], steps and bases [in / 32] (dequant_steps). Returns false if a step or base
// is not finite.
bool stored_steps(const stored_matrix *w, uint32_t row, int8_t *wholes, float *steps, float *bases);
