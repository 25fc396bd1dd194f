// A picture of a table, for a page that has the style (page.css): how much of the cache each KV head keeps, a panel per
// ratio. In a panel, layers go down and KV heads go right.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct heatmap {
    uint32_t n_layers, n_heads; // of every panel
    size_t n_ratios;
    const char *title;
    const double *ratios; // [n_ratios], the prune ratio asked for, 0 to 1
    const double *kept;   // [n_ratios, n_layers, n_heads], share of its tokens that a head keeps, 0 to 1
} heatmap;

// Writes the picture as SVG. The caller checks ferror(out).
void heatmap_svg(const heatmap *map, FILE *out);
