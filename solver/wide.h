// WIDE marks functions whose loops the compiler vectorises: they are built for several vector widths, and the widest
// one that the processor has is chosen at run time. None of them fuses or reorders sums, so all widths give the same
// bits.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif
