// Pictures of budgets: how much of the cache each KV head keeps, as a grid of panels. One row of panels per table, one
// column per ratio; in a panel, layers go down and KV heads go right.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct heatmap {
    uint32_t n_layers, n_heads; // of every panel
    size_t n_tables, n_ratios;
    const char *title, *subtitle;
    const char *const *table_names; // [n_tables]
    const double *ratios;           // [n_ratios], the prune ratio asked for, 0 to 1
    const double *kept; // [n_tables, n_ratios, n_layers, n_heads], share of its tokens that a head keeps, 0 to 1
    bool bare;          // the SVG without heading and style, for a page that has them
} heatmap;

// Leaves it to the caller to look at ferror(out).
void heatmap_svg(const heatmap *map, FILE *out);
