// What evicting tokens does to the model's output, measured while questions are decoded (docs/objective.md): curves of
// the heads' output errors (output_error.h), and the layers' gains, which convert squared errors into nats.
//
//     gain_l = KL(logits; logits with layer l's attention output moved) / mean |W_O (o' - o)|^2
//
// For each layer some of the answer's tokens are run again over the same caches with the layer's heads cut (o' is their
// output then): every other token with 20 % of the context kept, those between with 4 %. What is kept does not depend
// on the rankings that a run records: 4 sinks, the last token, and the keys least similar to the head's mean key
// (KeyDiff). Nothing before the layer changes, so all these runs are one pass to which each layer adds a sequence.
#pragma once
#include "profiler/model/forward.h"
#include "profiler/model/output_error.h"
#include "profiler/model/references.h"

// Kinds of movement: of the first, third, .. token, and of the others. Older records have white noise as well.
typedef enum gain_kind { GAIN_NOISE, GAIN_CUT_80, GAIN_CUT_96, GAIN_KINDS } gain_kind;

// A ranking's scores in the budgeted layers, and how many first and last tokens it always keeps.
typedef struct loss_ranking {
    const float *scores; // [B, G, T]
    uint32_t sink, window;
} loss_ranking;

// Bytes of memory that forward_keep_queries() takes, including what the functions below need while they run, and, if
// n_references per KV head are not 0, these.
uint64_t forward_loss_bytes(const model *m, const forward_plan *plan, uint32_t per_question, uint32_t n_references);

// Computes errors [n_questions, n_rankings, B, G, OUTPUT_LEVELS] under the kept queries of slots 0 .. n_questions - 1;
// of cuts that are refitted to the context's references, if `refit` is not NULL.
// A question's errors depend on its own tokens only, not on the rest of the batch. packings [B, G, RECORD_PACKINGS]
// receives the output_packing_errors() of the question in slot `packed`; NULL: not wanted. Returns the device's error
// if an operation has failed.
kvb_status forward_output_errors(forward *f, uint32_t n_questions, const loss_ranking *rankings, uint32_t n_rankings,
                                 const references *refit, float *errors, uint32_t packed, float *packings,
                                 kvb_error *err);

// Computes gains [B, GAIN_KINDS, 2]: the mean KL and the mean squared movement of each kind's tokens among the n tokens
// `ids` at places first .. first + n - 1 after the context, 0 for a kind without tokens. The tokens before them are
// those of the decoded question in slot `question`, which does not change.
kvb_status forward_gains(forward *f, uint32_t question, const int32_t *ids, uint32_t first, uint32_t n, float *gains,
                         kvb_error *err);
