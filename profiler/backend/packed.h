// Matrix products whose right-hand side is kept in the blocked layout that is fastest for oneDNN on this machine, in
// float32 or in bfloat16; or, if the machine has a tile unit, in that of packed_tiles.h, which then serves all
// precisions. Every product runs on the caller's thread only: callers divide their work by shape, so that no sum
// depends on the number of threads.
//
//     PRECISION_F32     c = a b                float32 operands
//     PRECISION_BF16    c = hi(a) hi(b)        operands rounded to bfloat16 (8 bits)
//     PRECISION_BF16X3  c = (hi(a) + lo(a)) (hi(b) + lo(b))    operands in two bfloat16 parts (16 bits)
//
// with hi(x) = bf16(x), lo(x) = bf16(x - hi(x)). Sums are float32 throughout. BF16X3 is what other libraries call
// matrix products of "high" precision: about 2^-16 relative error per term.
//
// A precision says how much the operands keep at least. Fewer bits are taken only where that is faster: BF16X3 with a
// tile unit, BF16 with that or bfloat16 instructions. Elsewhere they are float32.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum precision { PRECISION_F32, PRECISION_BF16X3, PRECISION_BF16 } precision;

// "f32", "bf16x3", "bf16".
const char *precision_name(precision p);
// The precision of a valid name, such as a backend's `compute`.
precision precision_named(const char *name);

// Whether oneDNN has kernels for bfloat16 operands on this machine.
bool packed_is_native(void);

// Whether products of this precision take rows of float32 directly. If not, call operand_split first.
bool operand_is_plain(precision p);

// The number of parts in which the tile unit takes the operands of a product of k terms.
unsigned packed_parts(precision p, uint32_t k);

// Bytes of b [k,n] once packed, and of a [m,k] once split. Multiples of 64.
size_t packed_bytes(precision p, uint32_t k, uint32_t n);
size_t operand_bytes(precision p, uint32_t m, uint32_t k);

// Packs b [k,n], b[i][j] at b[i*ld + j], or at b[j*ld + i] if `transposed`. May run on any thread.
void packed_store(precision p, void *to, const float *b, size_t ld, bool transposed, uint32_t k, uint32_t n);

// Returns how many columns lie side by side in a packed b: b[i][j] is at (j / side * k + i) * side + j % side. 0 if b
// is not float32, or is laid out in another way.
uint32_t packed_side(precision p, uint32_t k, uint32_t n);

// Writes rows first .. first+rows-1 of an operand of k terms, scale * x, in the form that product_run takes; row
// first+i comes from x + i*ld. Rows that are never written may hold anything: they only affect their own rows of c.
void operand_split(precision p, void *to, const float *x, size_t ld, uint32_t first, uint32_t rows, uint32_t k,
                   float scale);

// Returns a number of rows, at most PRODUCT_ROWS_MAX, with which a row of a product has the same bits at any place in
// it: a multiple of the rows that the kernels of this machine take at a time (measured: any with AVX-512 or more, 6
// with AVX2). Few, since batches are padded to a multiple; more are no faster.
enum { PRODUCT_ROWS_MAX = 32 };
uint32_t product_rows(void);

// c [m,n] (+)= a b. c is dense: oneDNN leaves its fast kernels for any other step between rows. A row's bits may depend
// on m (oneDNN picks its kernel by it), never on the other rows: callers whose results must not depend on a batch use
// one m for all and pad. Call product_find outside parallel regions; products are kept until the process ends.
typedef struct product product;
const product *product_find(precision p, uint32_t m, uint32_t n, uint32_t k, bool accumulate);
// Prepares products found earlier for `threads` threads (product_find prepares them for the current number). Call
// before the parallel region that runs them.
void product_prepare(int threads);
// May run on any thread of the region that follows.
void product_run(const product *p, const void *a, const void *b, float *c);
// Like product_run() for any number of rows, with rows of c that are ldc floats apart; may be called only if
// product_takes_any_rows(). A row's bits depend on no other row and not on their number. Operands that were split for a
// few rows each and lie one behind the other count as one operand with all the rows. `add`: the product is summed first
// and then added to what c holds, which is more exact than starting the sum with that.
bool product_takes_any_rows(void);
void product_run_rows(const product *p, uint32_t rows, const void *a, const void *b, float *c, size_t ldc, bool add);
// The same for a matrix b that steps_pack() packed (packed_steps.h). `bits` is as given there; `parts` is the number of
// bfloat16 parts that float32 results need, 2 or 3 (steps_fit_two_parts()). packed_step_bytes() returns the size of
// such a b [k,n].
size_t packed_step_bytes(unsigned bits, uint32_t k, uint32_t n);
void product_run_steps(const product *p, uint32_t rows, const void *a, const void *b, unsigned bits, unsigned parts,
                       float *c, size_t ldc, bool add);
