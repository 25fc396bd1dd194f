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
    int shown_width, shown_height;  // of the SVG, pixels; 0: as large as it is drawn
    const double *kept; // [n_tables, n_ratios, n_layers, n_heads], share of its tokens that a head keeps, 0 to 1
} heatmap;

// How a terminal is drawn on: what colours it knows, whether it shows block characters, and how many columns it has.
typedef enum heatmap_colours { HEATMAP_PLAIN, HEATMAP_256, HEATMAP_TRUECOLOUR } heatmap_colours;
typedef struct heatmap_terminal {
    heatmap_colours colours; // HEATMAP_PLAIN prints percentages instead of colours
    bool blocks;             // two layers share a line as upper and lower half blocks (needs UTF-8)
    int columns;
} heatmap_terminal;

// What the terminal behind a file descriptor can do, from TERM, COLORTERM, NO_COLOR, and the locale's variables.
heatmap_terminal heatmap_detect(int fd);

// Both write to `out` and leave it to the caller to look at ferror(out).
void heatmap_print(const heatmap *map, const heatmap_terminal *terminal, FILE *out);
void heatmap_svg(const heatmap *map, FILE *out);
