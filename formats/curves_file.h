// Loss curves that somebody has measured, of any method: a safetensors file in, a record out that is solved like any
// other. C = contexts, L = layers, G = KV heads, B = budgets, T = tokens of a context; numbers F32, F64, I32 or I64:
//   loss      [C,L,G,B] or [L,G,B]: what is lost when the head keeps so many tokens, in any unit: finite, >= 0, never
//             more with more tokens, 0 with all T
//   kept      [B] the budgets: whole tokens, ascending, the first not above the fewest that `solve` leaves a head
//   metadata  method, n_tokens (T); sink, window (0): tokens that always stay
#pragma once
#include "formats/lukv_steps.h"
#include "formats/names.h"

typedef struct curves_file {
    char method[METRIC_NAME_MAX + 1];
    uint32_t n_contexts, n_layers, n_kv_heads, n_budgets, n_tokens, sink, window;
    double *kept, *loss; // [B] tokens, [C,L,G,B]
} curves_file;

// `name` is for messages. Fails with KVB_FORMAT if it is not such a file or G x T is 2^30 or more, and with
// KVB_NUMERIC, naming the place, if a loss is not as said above. On failure *out is zero.
kvb_status curves_parse(curves_file *out, const void *data, size_t size, const char *name, kvb_error *err);
void curves_free(curves_file *c);
// Computes the importance [L,G,T] that reproduces a context's loss curves if earlier positions are kept first: straight
// lines between the budgets, and down to 0 at T.
void curves_importance(const curves_file *c, uint32_t context, float *out);

// Writes the record; its contexts are "0", "1", ... Of the options n_heads, head_dim, attributes and start are used.
kvb_status curves_import(const char *path, const char *record_path, const lukv_steps_options *options, kvb_error *err);
