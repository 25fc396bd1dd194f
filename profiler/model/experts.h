// The feed-forward of layers with experts: a router chooses a few of them for every row, and the row gets what they
// make of it, weighed by the router's softmax (Qwen3-MoE, Mixtral, OLMoE, gpt-oss in transformers).
#pragma once
#include "profiler/model/layer.h"

typedef struct experts_pass experts_pass;

// Memory for max_rows rows at a time; false: there was none, and *out is NULL.
bool experts_pass_open(experts_pass **out, const model *m, uint32_t max_rows);
void experts_pass_close(experts_pass *e, const model *m); // NULL is fine
// Bytes of device memory that it takes; 0 without experts.
uint64_t experts_pass_bytes(const model_config *c, uint32_t max_rows);

// y [n, D] = what the experts make of the normed rows x [n, D]; gate, up of the pass are used. A row's bits do not
// depend on the other rows.
void experts_apply(const layer_pass *p, const model_layer *w, dev y, dev x, uint32_t n);

// The `used` largest of logits [n], equal ones by number, and their weights: the softmax of all n, or, normed, of these
// alone. used <= n.
void experts_choose(const float *logits, uint32_t n, uint32_t used, bool normed, uint32_t *numbers, float *weights);
