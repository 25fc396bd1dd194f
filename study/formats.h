// For tables that choose tokens and formats: what formats lose, and the problem of spending bytes on both.
#pragma once
#include "solver/bytes.h"
#include "study/options.h"

// Sets formats to those of keys and of values in combination j of the options' packings, 0 <= j < n_packings^2.
void formats_of(const study_options *o, uint32_t j, uint8_t formats[2]);

// Returns what a head loses in these formats, in nats, on top of what eviction loses; bf16 loses nothing. loss [N,
// RECORD_PACKINGS] comes from output_packings_read().
double formats_loss(const double *loss, size_t head, const uint8_t formats[2]);

// Makes the problem for the curves c and all combinations of formats. budget receives each row's bytes: the share
// 1 - ratio of what all heads take in bf16. The caller frees it with formats_problem_free(); c must outlive it.
bytes_problem formats_problem(const study_options *o, const double *loss, const loss_curves *c, uint32_t head_dim,
                              uint64_t budget[ROWS]);
void formats_problem_free(bytes_problem *p);
