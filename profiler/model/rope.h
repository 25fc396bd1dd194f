// Rotary positions: the only place where frequencies and angles are computed, following transformers'
// modeling_rope_utils.py. docs/models.md lists the kinds of scaling.
// Angles are float32, position times frequency, as in training and in transformers.
#pragma once
#include "profiler/backend/backend.h"

typedef enum rope_kind { ROPE_DEFAULT, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN, ROPE_LONG, ROPE_DYNAMIC } rope_kind;

enum { ROPE_MAX_PAIRS = 256 };

typedef struct rope_rule {
    rope_kind kind;
    float theta;
    double factor;     // of positions: linear, llama3, yarn, dynamic; 1: none
    double original;   // positions trained for before scaling: llama3, yarn, longrope, dynamic
    double low, high;  // llama3: factors of wavelengths
    double fast, slow; // yarn: beta_fast, beta_slow
    bool truncate;     // yarn: low and high are whole numbers
    double attention;  // cosines and sines are multiplied by it; 1: no effect
    double growth;     // queries times 1 + growth ln(1 + floor(position / original)): Ministral 3; 0: nothing
    bool has_factors;  // `short_factors` are set; for ROPE_LONG `long_factors` too
    float short_factors[ROPE_MAX_PAIRS], long_factors[ROPE_MAX_PAIRS]; // frequencies are divided by them
} rope_rule;

// Computes radians per position [dim/2] for contexts of n_tokens tokens. Only longrope and dynamic depend on the
// length, which is the context's alone: cached keys must stay valid while answers grow.
void rope_frequencies(float *out, const rope_rule *rule, uint32_t dim, uint64_t n_tokens);
bool rope_depends_on_length(const rope_rule *rule);

// The factor for cosines and sines at a position: attention * (1 + growth ln(1 + floor(position / original))).
typedef struct rope_size {
    double attention, growth, original; // as in rope_rule; growth 0: the same at all positions
} rope_size;

// Rotates one head's vector x to a position, in place: pairs (i, i + dim/2) of its first dim numbers, by the same
// angles as rope_table's. With dim 0 it does nothing.
void rope_turn(float *x, const float *frequency, uint32_t dim, uint32_t position, rope_size size);

// The table [positions, dim/2, 2] of cosines and sines on a device, for backend.rope; the caller releases it.
dev rope_table(backend_device *on, const float *frequency, uint32_t dim, uint32_t positions, rope_size size);
// Recomputes such a table.
void rope_fill(backend_device *on, dev table, const float *frequency, uint32_t dim, uint32_t positions, rope_size size);
