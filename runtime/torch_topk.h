// The two places where kvpress's counts depend on details of PyTorch's CPU kernels: the order in which torch.sum adds
// floats, and which of several equal values torch.topk takes. Not part of the public API.
#pragma once
#include <stddef.h>
#include <stdint.h>

// One element of the list that is searched.
typedef struct kvb_topk_item {
    float value;
    uint32_t index;
} kvb_topk_item;

// torch.sum of a contiguous 1-D float32 CPU tensor, to the bit.
float kvb_torch_sum(const float *values, size_t n);

// torch.topk(values, k).indices as a set, largest first: reorders items[0 .. n - 1] so that items[0 .. k - 1] are the
// ones that torch takes. 0 <= k <= n; no NaN.
void kvb_torch_topk(kvb_topk_item *items, size_t n, size_t k);
