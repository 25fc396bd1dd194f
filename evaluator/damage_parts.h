// What the files of damage.h share.
#pragma once
#include "evaluator/damage.h"

struct damage {
    damage_plan plan;
    session *s;
    float *logits;     // [batch, n_next, vocabulary]
    kv_cache **caches; // [batch] of the last cuts, whose memory the next ones take
    uint32_t *n_rows;  // [batch]
    int32_t *ids;      // [batch, n_next]
    row_damage *rows;  // [batch, n_next]
    damage_cut *cuts;  // [batch] that are gathered, where the caller has no such list
};

// From d->logits of the n cuts' continuations to what they cost.
void damage_judge(damage *d, const damage_cut *cuts, uint32_t n);
