// SVG pictures: what they have in common, line charts, and tables of coloured cells.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

// Head of the document with title, subtitle (NULL: none) and style; its background follows the reader's dark mode.
void svg_begin(FILE *out, int width, int height, const char *title, const char *subtitle);
// The same, shown in another size: all of it grows or shrinks, letters too.
void svg_begin_sized(FILE *out, int width, int height, int shown_width, int shown_height, const char *title,
                     const char *subtitle);
void svg_end(FILE *out);

enum { SVG_MARGIN = 24 }; // left of the title

// Text from a file, escaped. Classes: title, sub, name, r (right aligned), m (centred), n (in a cell), n d (in a light
// cell).
void svg_escape(FILE *out, const char *text);
void svg_text(FILE *out, double x, double y, const char *class, const char *text);

typedef struct svg_series {
    const char *name;
    const double *y;          // [n]; NaN leaves a gap
    const double *low, *high; // [n] each: a band around the line; NULL: none
} svg_series;

typedef enum svg_unit { SVG_SHARES, SVG_NUMBERS } svg_unit; // SVG_SHARES: labelled in per cents

// Lines over a common x, each in the style of its name (series_style.h), with marks at the points, or at twenty of
// many. Up to twelve shares on the x axis have a tick each. On a logarithmic axis values of 0 leave a gap, and so do
// those more than eight decades below the largest. Name the fields: what is left out is zero, and zero is the usual
// thing.
typedef struct svg_chart {
    const char *title, *x_label;
    const double *x; // [n], ascending
    size_t n, n_series;
    const svg_series *series;
    bool logarithmic; // the y axis
    svg_unit x_unit, y_unit;
    bool from_low; // the linear y axis begins at the least value, not at 0
    bool bare;     // without title and names of the lines, which the caller puts beside it (svg_chart_key)
} svg_chart;

enum { SVG_SERIES_MAX = 8 }; // lines that can be told apart; more are not drawn

// The chart with its labels in a box of this size.
void svg_chart_put(FILE *out, const svg_chart *chart, int left, int top, int width, int height);
// What tells a line from the others: a stroke of 24 pixels from (x, y) on with a mark in its middle.
void svg_chart_key(FILE *out, const svg_chart *chart, size_t series, double x, double y);

// A table of numbers as coloured cells.
typedef struct svg_matrix {
    const char *title;
    size_t n_rows, n_columns;
    const char *const *row_names, *const *column_names; // NULL: numbered from 0
    const double *values;                               // [n_rows, n_columns]
    double most;                                        // value of the lightest colour; 0 has the darkest
    int decimals;                                       // of the number in a cell; negative: cells without numbers
} svg_matrix;

// In a box of this size, names of rows included in it.
void svg_matrix_put(FILE *out, const svg_matrix *m, int left, int top, int width, int height);
