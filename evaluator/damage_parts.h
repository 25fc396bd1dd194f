// What the files of damage.h share.
#pragma once
#include "evaluator/damage.h"

struct damage {
    damage_plan plan;
    session *s;
    float *logits;     // of the last batch, cut after cut, a row for every token that follows: [rows, vocabulary]
    kv_cache **caches; // [batch] of the last cuts, whose memory the next ones take
    uint32_t *n_rows;  // [batch]
    size_t *begin;     // [batch] where each cut's rows begin
    int32_t *ids;      // [rows]
    row_damage *rows;  // [rows]
    damage_cut *cuts;  // [batch] that are gathered, where the caller has no such list
};

// From d->logits of the n cuts' continuations to what they cost.
void damage_judge(damage *d, const damage_cut *cuts, uint32_t n);
