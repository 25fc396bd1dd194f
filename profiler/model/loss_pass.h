// What evicting tokens does to the model's output, measured while questions are decoded (docs/objective.md): curves of
// the heads' output errors (output_error.h), and the layers' gains that turn squared errors into nats.
//
//     gain_l = KL(logits; logits with layer l's attention output moved) / mean |W_O (o' - o)|^2
//
// For each layer some of the answer's tokens are run again over the same caches, once for every kind of movement: with
// the layer's heads cut to the same share of their tokens (o' is what they give then), and with white noise. Which
// tokens stay is the same whatever rankings a run records: 4 sinks, the last token, and the keys that are least like
// the head's mean key (KeyDiff). Nothing before the layer changes, so all these runs are one pass that grows by some
// sequences at each layer.
#pragma once
#include "profiler/model/forward.h"
#include "profiler/model/output_error.h"

// Kinds of movement. Noise: +1 or -1 times a common size in every number of the heads' outputs, a hundredth of the
// squared size of what the layer's attention adds.
typedef enum gain_kind { GAIN_NOISE, GAIN_CUT_80, GAIN_CUT_96, GAIN_KINDS } gain_kind;

// +1 or -1 for number `channel` of row `row` of a layer, from the hash of the three.
float gain_noise(uint32_t layer, uint32_t row, uint32_t channel);

// A ranking's scores of the budgeted layers, and how many first and last tokens it always keeps.
typedef struct loss_ranking {
    const float *scores; // [B, G, T]
    uint32_t sink, window;
} loss_ranking;

// Keeps the queries of up to `per_question` rows of each question from here on, until forward_close.
kvb_status forward_keep_queries(forward *f, uint32_t per_question, kvb_error *err);
// Bytes of memory that this takes, with what the functions below take while they run.
uint64_t forward_loss_bytes(const model *m, const forward_plan *plan, uint32_t per_question);

// Which rows of the next forward_rows or forward_draw to keep queries of: their indices there, ascending.
// forward_begin_questions forgets them all.
void forward_keep_rows(forward *f, const uint32_t *rows, uint32_t n);

// errors [n_questions, n_rankings, B, G, OUTPUT_LEVELS] under the kept queries of the slots 0 .. n_questions - 1.
// Depends on the tokens of a question and on nothing else of its batch. Fails with what the device has failed with.
kvb_status forward_output_errors(forward *f, uint32_t n_questions, const loss_ranking *rankings, uint32_t n_rankings,
                                 float *errors, kvb_error *err);

// gains [B, GAIN_KINDS, 2]: the mean KL and the mean squared movement of the n tokens `ids` that stand at the places
// first .. first + n - 1 after the context; what is before them is the question's in that slot, which was decoded.
// Leaves the question as it is.
kvb_status forward_gains(forward *f, uint32_t question, const int32_t *ids, uint32_t first, uint32_t n, float *gains,
                         kvb_error *err);
