// SVG pictures: what heat maps and charts have in common, and line charts.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

// Head of the document with title, subtitle (NULL: none) and style; its background follows the reader's dark mode.
void svg_begin(FILE *out, int width, int height, const char *title, const char *subtitle);
void svg_end(FILE *out);

enum { SVG_MARGIN = 24 }; // left of the title

// Text from a file, escaped. Classes: title, sub, name, r (right aligned), m (centred), n (in a cell), n d (in a light cell).
void svg_escape(FILE *out, const char *text);
void svg_text(FILE *out, double x, double y, const char *class, const char *text);

typedef struct svg_series {
    const char *name;
    const double *y; // [n]
} svg_series;

// Lines over a common x. On a logarithmic axis values of 0 leave a gap, and so do those more than eight decades below
// the largest.
typedef struct svg_chart {
    const char *title, *x_label;
    const double *x; // [n], ascending
    size_t n, n_series;
    const svg_series *series;
    bool logarithmic; // the y axis
} svg_chart;

enum { SVG_SERIES_MAX = 6 }; // colours that can be told apart

// The chart with its labels in a box of this size. y values are shares and labelled in per cents.
void svg_chart_put(FILE *out, const svg_chart *chart, int left, int top, int width, int height);
