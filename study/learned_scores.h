// Scores of a context by a learned ranking, from the metrics that the record has.
#pragma once
#include "runtime/rank.h"
#include "study/selection.h"

// SHA-256 of the k-th selected context's token ids, little-endian int32: which text it is, whatever it is called.
kvb_status context_sha256(const selection *s, size_t k, char out[65], kvb_error *err);

// out [L,G,T] of the k-th context. A text that the ranking was fitted on gets the weights that were fitted without it.
// Where the record has the ranking's own scores, and the text is none of those, it is they. Errors: those of reading;
// KVB_NUMERIC.
kvb_status learned_scores_read(const selection *s, size_t k, const kvb_ranking *r, float *out, kvb_error *err);

// KVB_MISMATCH unless the record has, in every selected context, the metrics that the ranking takes, and is of its
// model.
kvb_status learned_scores_check(const selection *s, const kvb_ranking *r, kvb_error *err);
