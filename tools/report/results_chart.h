// Charts of results: for every method and task of documents, one chart per column that people look at, with a line per
// allocator. NAME.svg of eval and task and the page draw the same ones.
#pragma once
#include "tools/report/results.h"
#include "tools/report/svg.h"

enum { CHARTS_MAX = 64, CHART_TITLE_SIZE = 320 };

// What a chart shows: a column of the rows of one document, method and task.
typedef struct chart_rows {
    grid_rows from;
    const char *column; // "kl", "top1", "score" or "loss"
} chart_rows;

typedef struct chart_list {
    chart_rows items[CHARTS_MAX];
    size_t n;
} chart_list;

// Adds the charts of rows, which must outlive the list. What does not fit is left out.
void charts_add(chart_list *to, const cJSON *rows);

// A chart with its numbers; `chart` points into the other members, so the struct must not be copied.
typedef struct filled_chart {
    results_grid grid;
    svg_series series[GRID_NAMES_MAX];
    char title[CHART_TITLE_SIZE];
    svg_chart chart;
} filled_chart;
void chart_fill(filled_chart *out, const chart_rows *of);

// Draws all charts, two side by side, and writes the SVG atomically. `about` says where the rows come from. Errors:
// KVB_ARGUMENT if there are no charts, and those of atomic_file.h.
kvb_status charts_write(const chart_list *all, const char *path, const char *about, kvb_error *err);
