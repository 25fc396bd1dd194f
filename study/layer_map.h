// Which layers of the model a record's arrays hold. Layers whose cache does not grow with the text, such as those with
// a sliding window, are left out of records and of everything that is solved; tables include every layer again.
#pragma once
#include "formats/record.h"

typedef struct layer_map {
    uint32_t n_layers;   // L of the model
    uint32_t n_budgeted; // layers of the record
    bool *bounded;       // [L] true: left out; NULL: none is
} layer_map;

// Reads the attribute "bounded_layers" of a record: ascending layers, separated by commas. KVB_FORMAT. The caller frees
// it, also after a failure.
kvb_status layer_map_read(layer_map *out, const record *r, kvb_error *err);
void layer_map_free(layer_map *m);

// Returns the index in the record of the model's layer `layer` < L, or UINT32_MAX if it is left out.
uint32_t layer_map_place(const layer_map *m, uint32_t layer);

// Expands values [rows, n_budgeted, heads] to [rows, L, heads], with 0 in the layers that are left out. The caller
// frees the result.
double *layer_map_spread(const layer_map *m, const double *values, size_t rows, size_t heads);
