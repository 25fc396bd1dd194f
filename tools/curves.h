// Pictures of results against the ratio: for every method a row of charts, in each a line with its band per allocator.
#pragma once
#include "evaluator/interval.h"
#include "tools/methods.h"
#include "tools/svg.h"

// One column of charts.
typedef struct curve_kind {
    const char *title; // behind the method's name
    bool logarithmic;
    svg_unit unit;
} curve_kind;

typedef struct curve_view {
    const methods *with;
    const char *title, *subtitle;
    const curve_kind *kinds;
    size_t n_kinds;
    // The value of a column of `with` at its ratio number `ratio`; NaN where there is none.
    interval (*at)(const void *context, uint32_t column, size_t ratio, size_t kind);
    const void *context;
} curve_view;

// Writes the SVG, whole or not at all. At most SVG_SERIES_MAX allocators and 64 ratios are drawn.
kvb_status curves_write(const char *path, const curve_view *view, kvb_error *err);
