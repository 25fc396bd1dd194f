// Pictures of results against the ratio: for every method a row of charts, in each a line with its band per allocator.
#pragma once
#include "study/interval.h"
#include "tools/report/compared.h"
#include "tools/report/svg.h"

// One column of charts.
typedef struct curve_kind {
    const char *title; // behind the method's name
    bool logarithmic;
    svg_unit unit;
} curve_kind;

typedef struct curve_view {
    const compared *with;
    const char *title, *subtitle;
    const curve_kind *kinds;
    size_t n_kinds;
    const interval *values; // [n_kinds, columns, ratios]; NaN where there is none
} curve_view;

// Place of a value in the array.
size_t curve_place(const compared *with, size_t kind, uint32_t column, size_t ratio);

// Writes the SVG, whole or not at all. At most SVG_SERIES_MAX allocators and 64 ratios are drawn.
kvb_status curves_write(const char *path, const curve_view *view, kvb_error *err);
