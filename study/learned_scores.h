// Computes a learned ranking's scores of a context from the metrics in the record.
#pragma once
#include "runtime/rank.h"
#include "study/selection.h"

// Computes the SHA-256 of the k-th selected context's token ids, as little-endian int32. It identifies the text,
// whatever its name.
kvb_status context_sha256(const selection *s, size_t k, char out[65], kvb_error *err);

// Fills out [L,G,T] for the k-th context. A text that the ranking was fitted on is scored by the weights that were
// fitted without it. For any other text, if the record holds the ranking's own scores, these are used. Errors: those of
// reading; KVB_NUMERIC.
kvb_status learned_scores_read(const selection *s, size_t k, const kvb_ranking *r, float *out, kvb_error *err);
