// Makes the views that observers see (observe.h) from the forward pass's memory: host copies if the device does not
// share its memory, and the extra items that observers may ask for.
#pragma once
#include "profiler/model/model.h"
#include "profiler/model/observe.h"

enum { LAYER_VIEWS = 6 }; // of view_item

// Zero it, then set m, on and max_tokens. Memory is allocated on first use; layer_views_close frees it.
typedef struct layer_views {
    const model *m;
    backend_device *on; // the pass's; must stay open as long as this is used
    uint32_t max_tokens;
    dev column_sums, row_log; // [H, T]
    dev output_norms;         // [H, T]
    float *host[LAYER_VIEWS]; // copies
    float *sinks;             // [H] copy
} layer_views;

void layer_views_close(layer_views *v);

// Shows one layer of the prefilled context: queries q_raw and q [T, H*d], keys and values `kv`; rope_frequency
// [rope_dim/2] of the context. Returns KVB_MEMORY, or what the observer returns.
kvb_status layer_views_show(layer_views *v, uint32_t layer, const prefix_kv *kv, dev q_raw, dev q,
                            const float *rope_frequency, const layer_observer *observer, kvb_error *err);
