// oneDNN's objects for packed.c: primitives (products, and reorders that pack) by shape, made once and kept as long as
// the process lives, and the scratch memory of the threads that run them. Every primitive is made as if the machine had
// one thread and runs on its caller's alone.
#pragma once
#include <dnnl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// What a primitive is for; a reorder has m = 0. Compared as bytes: no padding between members.
typedef struct primitive_key {
    uint32_t type, m, n, k; // type: dnnl_data_type_t
    uint64_t ld;            // of a reorder's source, n for a product; 0 for a layout alone
    uint32_t accumulate, transposed;
} primitive_key;

typedef struct primitive primitive;

// A key's place in tables of this many lists.
enum { PRIMITIVE_BUCKETS = 1024 };
uint32_t primitive_bucket(const primitive_key *key);

// Does oneDNN have kernels for bfloat16 operands here? False where it cannot be started too.
bool primitive_bf16_is_native(void);

// Found, or made for the threads that there are; NULL when oneDNN has no memory or no such primitive. On one thread at
// a time.
const primitive *primitive_find(const primitive_key *key);
// The layout of b [k,n]: one for all m, so that any number of rows can meet it. NULL as above.
const primitive *primitive_find_layout(dnnl_data_type_t type, uint32_t k, uint32_t n);
// Bytes of b as the primitive has it, and of the scratch memory that it wants.
size_t primitive_b_bytes(const primitive *p);
size_t primitive_scratch_bytes(const primitive *p);

// Outside of parallel regions: makes room for so many threads in all primitives, and for `bytes` of scratch memory on
// each thread. False: no memory.
bool primitives_serve(int threads);
bool primitives_take_scratch(size_t bytes, int threads);

// Runs a primitive on the caller's thread: c (+)= a b, or b = a rearranged for a reorder, which takes no c. False when
// oneDNN fails: what was written is worth nothing then.
bool primitive_run(const primitive *p, const void *a, const void *b, float *c);
