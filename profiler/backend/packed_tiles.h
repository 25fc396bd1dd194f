// The products of packed.h on the tile unit that newer x86 processors have (AMX): bfloat16 operands in one to three
// parts, float32 sums.
//
//     1 part     c = a1 b1                                        8 bits of each operand
//     2 parts    c = a2 b1 + a2 b2 + a1 b2 + a1 b1                16 bits
//     3 parts    c = a3 b1 + a2 b2 + a1 b3 + a2 b1 + a1 b2 + a1 b1    24 bits: all that a float32 has
//
// a1 = bf16(a), a2 = bf16(a - a1), a3 = bf16(a - a1 - a2). With two parts a2 b2 is as large as what a2 itself leaves
// out: without it a profile's error is two to four times as large, and it is only 3 % faster. With three parts what is
// left out is below 2^-26 of a term, so that the error is that of summing in float32 (compared with SGEMM in
// test_profiler_packed), and the unit is still faster than the float32 units. All parts are multiplied while they are
// in the tile registers: a library that multiplies one pair of matrices at a time would read and write c six times.
//
// Every element of c is summed in the same order, whatever its place and the shape of c.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TILE_ROWS = 16, TILE_TERMS = 32 }; // operands are padded to a multiple of this many rows, and of terms

// Whether the processor has such a unit, and the system and oneDNN (DNNL_MAX_CPU_ISA) allow its use.
bool tiles_available(void);

// Bytes of b [k,n] and of a [m,k].
size_t tiles_b_bytes(unsigned parts, uint32_t k, uint32_t n);
size_t tiles_a_bytes(unsigned parts, uint32_t m, uint32_t k);

// Packs b [k,n], b[i][j] at b[i*ld + j], or at b[j*ld + i] if `transposed`.
void tiles_pack_b(unsigned parts, void *to, const float *b, size_t ld, bool transposed, uint32_t k, uint32_t n);

// Packs row `row` of a: scale * x [k].
void tiles_pack_row(unsigned parts, void *to, const float *x, uint32_t row, uint32_t k, float scale);

// Returns the largest of x [n].
float tiles_max(const float *x, uint32_t n);

// Packs the first `terms` terms, rounded up to 32, of row `row` of a [m,k]: 2^(x - top) of the first n, then zeros. x
// is read that far. `keep`, unless NULL, receives the same numbers in float32. Returns their sum.
float tiles_exp2_row(unsigned parts, void *to, uint32_t row, uint32_t k, const float *x, uint32_t n, uint32_t terms,
                     float top, float *keep);

// c [m,n] (+)= a [m,k] b [k,n], lines of c apart by ldc floats. Rows of a that were never packed only affect their own
// rows of c.
typedef struct tile_product {
    unsigned parts;
    uint32_t m, n, k;
    bool accumulate; // sums begin with what c holds
    bool add;        // or sums are added to c at the end, which is more exact if c is large
    const void *a, *b;
    float *c;
    size_t ldc;
    unsigned bits;    // not 0: b was packed by steps_pack (packed_steps.h)
    unsigned b_parts; // `parts`, or 2 if `parts` is 3 and b's third part is zero
    uint32_t terms;   // of the k that a and b are packed for, those that are multiplied, rounded up to 32; 0: all
    // Three parts of b are made during the product. If later products use the same b: tiles_split_bytes of memory that
    // keeps the parts, and whether they are there already, for these terms and columns at least.
    void *split;
    bool is_split;
} tile_product;
void tiles_multiply(const tile_product *p);
size_t tiles_split_bytes(unsigned parts, uint32_t k, uint32_t n);

// Between these calls the thread's unit keeps the last product's configuration, which saves a third of a small
// product's time.
void tiles_hold(void);
void tiles_let_go(void);
