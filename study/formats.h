// Tables that choose tokens and formats: what the formats of a record's heads lose, as a problem of bytes.
#pragma once
#include "solver/bytes.h"
#include "study/options.h"

// Choice j of 0 .. n_packings^2 - 1 is the j-th combination of the options' packings: those of keys and values.
void formats_of(const study_options *o, uint32_t j, uint8_t formats[2]);

// What a head loses in these formats besides what eviction takes; loss [N, RECORD_PACKINGS], in nats; bf16 loses
// nothing.
double formats_loss(const double *loss, size_t head, const uint8_t formats[2]);

// The problem for the curves c and all combinations, and the bytes of each of the options' ratios, which are shares of
// what all heads take in bf16. The caller frees it with formats_problem_free(); c must outlive it.
bytes_problem formats_problem(const study_options *o, const double *loss, const loss_curves *c, uint32_t head_dim,
                              uint64_t budget[ROWS]);
void formats_problem_free(bytes_problem *p);
