// How far a KV head's output moves when tokens of its cache are evicted: the curves that tables minimise
// (docs/objective.md).
//
// KV head h with its g query heads j, and a query q that comes after the context. With e_i = exp(score of token i), and
// u, w the sums of e and of e v over the tokens after the context that q sees, which are always kept:
//
//     o_j(q; kept) = (sum over kept i of e_i v_i + w) / (sum over kept i of e_i + u)
//     e_h(n)       = mean over q of | sum over j of W_O,j (o_j(q; the ranking's first n) - o_j(q; all)) |^2
//
// The ranking's first n are the sinks, the window, and then the best of the rest. Tokens are grouped into buckets
// between consecutive levels n, in the ranking's order, so one product with the values gives the output at every level.
// The difference is computed from the dropped tokens, o(kept) - o(all) = (sum over dropped i of e_i (o(kept) - v_i)) /
// all mass, which stays accurate if few are dropped. With `refit`, the first n are refitted first (docs/refit.md), at
// every other level; at those between, errors lessen as at their neighbours.
#pragma once
#include "formats/record.h"
#include "runtime/kvbudget.h"
#include <stddef.h>
#include <stdint.h>

enum {
    OUTPUT_LEVELS = RECORD_CURVE_LEVELS, // record_curve_tokens() says what they keep
    OUTPUT_BLOCK_QUERIES = 32            // queries judged at a time; each takes T floats for each of the group's heads
};

// One KV head's context.
typedef struct output_head {
    const float *k, *v; // [T, d]
    uint32_t n_tokens, group, head_dim;
    float softcap;               // as attention_shape's
    const float *sinks;          // [group] as attention_shape's; NULL: none
    const float *gram;           // [group d, group d]: W_O^T W_O of the group's columns
    const kvb_refit_head *refit; // what levels of up to half of the tokens are refitted to; NULL: they stay as cut
} output_head;

// Queries of one question, and the tokens after the context that they see.
typedef struct output_queries {
    const float *q; // query i: [group, d] at q + i * stride
    size_t stride;
    const uint32_t *tail; // [n] query i sees the tokens 0 .. tail[i] after the context
    const float *k, *v;   // [.., d] of these
    uint32_t n;
} output_queries;

// A ranking's order of all T tokens, protected ones first, then best first.
typedef struct output_order {
    uint32_t *position; // [T]
    uint32_t protect;   // how many of them are protected
} output_order;

// Sorts one head's scores [T], of equal ones the lower position first, into position [T].
void output_order_make(output_order *out, const float *scores, uint32_t n_tokens, uint32_t sink, uint32_t window);

// Computes errors [n_orders, n_sets, OUTPUT_LEVELS], the mean over the queries of each set; 0 for a set without
// queries. A set's numbers do not depend on the other sets. Fails with KVB_NUMERIC if a number of a head that is
// refitted is not finite.
kvb_status output_errors(float *errors, const output_head *head, const output_queries *sets, uint32_t n_sets,
                         const output_order *orders, uint32_t n_orders, kvb_error *err);
// Computes the errors if all tokens are kept, but keys, or values, are stored in fewer bits as kvb_pack() does: of keys
// in int8, int4 and int2, then of values, on some of the set's queries, evenly chosen; 0 without queries. Errors of
// keys and of values add up if both are small. INFINITY if a number cannot be packed.
enum { OUTPUT_PACKING_QUERIES = 4 };
void output_packing_errors(float errors[RECORD_PACKINGS], const output_head *head, const output_queries *set);
// Computes the differences themselves, o(kept) - o(all) [n, group d], of query i at level[i].
void output_difference(float *difference, const output_head *head, const output_queries *set, const output_order *order,
                       const uint32_t *level);
