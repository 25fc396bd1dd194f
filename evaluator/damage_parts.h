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
};

// d->logits of n cuts' continuations -> out [n].
void damage_judge(damage *d, const damage_text *t, uint32_t n, damage_value *out);
