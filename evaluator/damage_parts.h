// What the files of damage.h share.
#pragma once
#include "evaluator/damage.h"

struct damage {
    damage_plan plan;
    session *s;
    float *logits;     // [batch, n_next, vocabulary]
    kv_cache **caches; // [batch]
    uint32_t *n_rows;  // [batch]
    int32_t *ids;      // [batch, n_next]
    row_damage *rows;  // [batch, n_next]
};

// The mean over the rows [full->n] of a cut.
damage_value damage_mean(const predictions *full, const row_damage *rows);
