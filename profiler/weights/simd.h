// SIMD_CLONES marks functions to be compiled for three vector widths; the loader picks one for the processor. Empty
// under the address sanitiser, which cannot run the code that picks.
#pragma once
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define SIMD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SIMD_CLONES
#endif
