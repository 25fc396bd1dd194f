// SVG pictures: what they have in common, the colours of cells, and line charts.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

// Writes the head of a document with title, subtitle (NULL: none) and style; its background follows the dark mode.
void svg_begin(FILE *out, int width, int height, const char *title, const char *subtitle);
void svg_end(FILE *out);

enum { SVG_MARGIN = 24 }; // left of the title

// Escapes the text. Classes: title, sub, name, r (right aligned), m (centred), n (in a cell), n d (in a light cell).
void svg_text(FILE *out, double x, double y, const char *class, const char *text);

typedef struct svg_series {
    const char *name;
    const double *y;          // [n]; NaN leaves a gap
    const double *low, *high; // [n] each: a band around the line; NULL: none
} svg_series;

typedef enum svg_unit { SVG_SHARES, SVG_NUMBERS } svg_unit; // SVG_SHARES: labelled in per cents

// Lines over the pruned share, each in the style of its name, with marks at the points, or at twenty of
// many. Up to twelve shares have a tick each. On a logarithmic axis values of 0 leave a gap, and so do those more than
// eight decades below the largest. Use designated initialisers: zero is the usual value of what is left out.
typedef struct svg_chart {
    const char *title;
    const double *x; // [n], ascending
    size_t n, n_series;
    const svg_series *series;
    bool logarithmic; // the y axis
    svg_unit y_unit;
    bool bare; // without title and names of the lines: the caller puts these beside it (svg_chart_key)
} svg_chart;

enum { SVG_SERIES_MAX = 8 }; // lines that can be told apart; more are not drawn

// Draws the chart with its labels in a box of this size.
void svg_chart_put(FILE *out, const svg_chart *chart, int left, int top, int width, int height);
// Draws a line's key for a legend: a stroke of 24 pixels from (x, y) on with a mark in its middle.
void svg_chart_key(FILE *out, const svg_chart *chart, size_t series, double x, double y);

// The colour scale of all heat maps: viridis (van der Walt and Smith, public domain). Equal steps look equally large,
// also to colour-blind readers and in grey.
typedef struct viridis_rgb {
    int r, g, b; // 0 .. 255
} viridis_rgb;

enum { VIRIDIS_LAST = 10 }; // steps between which the scale is a straight line

viridis_rgb viridis_at(double position); // 0 (dark) .. 1 (light); beyond: the ends
bool viridis_is_light(viridis_rgb c);    // whether dark text can be read on it
