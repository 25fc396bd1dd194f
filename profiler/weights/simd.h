// SIMD_CLONES in front of a function whose loops are worth it: it is compiled once for each of three vector widths, and
// the loader picks by the processor. Sanitisers cannot run the code that picks.
#pragma once
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define SIMD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SIMD_CLONES
#endif
