// Attention of decoded rows over one head of a ragged cache, on the host.
#pragma once
#include "evaluator/cache.h"

// The most lines (rows times query heads of a group) that are computed at once; scratch is sized for it.
enum { ATTEND_LINES = 192 };

typedef struct attend_scratch {
    float *scores;  // [ATTEND_LINES, entries]
    float *queries; // [ATTEND_LINES, d]
    float *outputs; // [ATTEND_LINES, d]
    size_t entries; // that a line of `scores` has room for
    float *rows;    // [unpacked] keys and values of a packed cache's head, as floats
    size_t unpacked;
} attend_scratch;

// Makes room for heads of `entries` entries. The old contents are lost.
void attend_reserve(attend_scratch *s, size_t entries, uint32_t head_dim);
void attend_release(attend_scratch *s);

// Returns a head's entries in the cache's base, none without a base. Packed ones are unpacked into the scratch, where
// the next call overwrites them.
kv_span attend_before(attend_scratch *s, const kv_cache *cache, uint32_t layer, uint32_t kv_head);

// What a layer does beyond plain attention (attention_shape in profiler/backend/backend.h), for one KV head.
typedef struct attend_rule {
    uint32_t window;    // 0: none
    uint32_t position;  // of row 0, which the window needs
    float softcap;      // 0: none
    const float *sinks; // [group]; NULL: none
} attend_rule;

// n rows times `group` query heads attend to a head's entries: all of `before` (count 0: none), and of `span` row i to
// the first span.count - (n - 1 - i), since the last n entries are those of the rows themselves. n * group <=
// ATTEND_LINES.
//   q       row i's queries [group, d] at q + i * q_step; o likewise
//   chosen  NULL, or the n_chosen entries of `span` (ascending indices) that row 0 attends to; then n must be 1 and
//   `before` must be empty, and the layer has no window
//   rule    NULL: plain attention
// Afterwards s->scores holds the probabilities [n * group, before.count + span.count], 0 where a row does not see.
void attend_head(attend_scratch *s, float *o, const float *q, size_t q_step, uint32_t n, uint32_t group, kv_span before,
                 kv_span span, uint32_t head_dim, const uint32_t *chosen, uint32_t n_chosen, const attend_rule *rule);
