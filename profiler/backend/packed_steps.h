// Weights that model files store as small whole numbers, kept in that form: decoding is limited by memory bandwidth,
// and they take a fifth to a third of float32. The tile unit (packed_tiles.h) converts them to bfloat16 parts when the
// first rows are multiplied; without one, a panel is converted to float32 for each product.
//
//     b[i][j] = step * whole[i][j] + base, one step and one base for 32 terms of a column
//
// A block has 32 terms of 32 columns: for each half of 16 columns the steps and the bases, then lines of 16 columns, as
// tiles have them. A line holds two terms of each column: with 4 bits both in one byte, with 8 bits the first terms of
// all columns, then the second ones.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { STEP_TERMS = 32, STEP_COLUMNS = 32 };

// `bits` is 4 (whole numbers 0 to 15), 8 (-128 to 127) or 6 (-32 to 31): there the second half of the 32 terms has a
// step of its own, which lies where the base would, and no term has a base.
size_t steps_block_bytes(unsigned bits);

// Packs column `column` of b [k, columns]; k is a multiple of 32. Columns that were never packed hold anything.
void steps_pack(unsigned bits, void *to, uint32_t column, uint32_t k, const int8_t *wholes, const float *steps,
                const float *bases);

// Whether two cut parts represent these weights, not of 6 bits, exactly. True for most 4-bit weights with float16
// steps.
bool steps_fit_two_parts(const int8_t *wholes, const float *steps, const float *bases, uint32_t k);

// Reads terms first .. first+n-1 of a column, with exactly the bits that products take.
void steps_unpack(unsigned bits, float *to, const void *from, uint32_t column, uint32_t k, uint32_t first, uint32_t n);

// Writes b [k,n] as packed_store() does if it lays `side` columns, a multiple of 16, side by side (packed_side() of
// packed.h). Only where steps_can_widen(): on a processor with AVX2.
bool steps_can_widen(void);
void steps_widen(unsigned bits, float *to, const void *from, uint32_t k, uint32_t n, uint32_t side);

// Makes bfloat16 parts of lines [first, end) of the 32 of a block, as packed_tiles.c keeps them.
//     PARTS_NEAREST  one or two parts, each rounded to nearest
//     PARTS_CUT      two or three parts, cut 8 bits at a time, which takes fewer instructions
typedef enum step_parts { PARTS_NEAREST_1, PARTS_NEAREST_2, PARTS_CUT_2, PARTS_CUT_3 } step_parts;
void steps_unfold(unsigned bits, step_parts parts, char *to, const char *block, size_t first, size_t end);
