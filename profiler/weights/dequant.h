// Quantised weights to float32, exactly as ggml defines the formats (ggml-common.h, ggml-quants.c) and gguf-py
// computes them.
#pragma once
#include "profiler/weights/gguf.h"
#include "runtime/kvbudget.h"
#include <stddef.h>
#include <stdint.h>

// Expands n_values values of a tensor of `type` from src (packed blocks, any alignment) to dst[n_values]. n_values
// must be a multiple of the type's block (1, 32 or 256), as every row of a tensor that gguf_parse accepted is.
// NaN and infinity are passed on: the model's reader rejects them. Errors: KVB_UNSUPPORTED for a type that cannot be
// read, KVB_ARGUMENT for a broken block.
kvb_status dequant_rows(uint32_t type, const void *src, size_t n_values, float *dst, kvb_error *err);

// Several formats store whole numbers with one step and one base for every 32 values: value = step * whole + base, with
// exactly the bits that dequant_rows gives, except for the sign of zeros. Returns the bits of the whole numbers, 4 (0
// to 15) or 8 (-128 to 127); 6 (-32 to 31) if there is no base but a step for every 16 values; 0 for other formats.
enum { DEQUANT_STEP_VALUES = 32 };
unsigned dequant_step_bits(uint32_t type);

// Reads n_values values of such a format: wholes [n_values], steps and bases [n_values / 32]; with 6 bits `bases` gets
// the steps of the second halves of 32 values. n_values must be a multiple of the type's block.
void dequant_steps(uint32_t type, const void *src, size_t n_values, int8_t *wholes, float *steps, float *bases);

float half_to_float(uint16_t half); // IEEE binary16, denormals and NaN payloads kept
