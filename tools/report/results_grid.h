// Rows of results as lines over the ratio: what charts and tables of a comparison are made of.
#pragma once
#include "tools/report/results_read.h"
#include <stdbool.h>

enum { GRID_NAMES_MAX = 24, GRID_RATIOS_MAX = 100 };

// One value per name and ratio, with its interval; NaN where there is none.
typedef struct results_grid {
    size_t n_names, n_ratios;
    const char *names[GRID_NAMES_MAX]; // in the order of the rows; they point into the document
    double ratios[GRID_RATIOS_MAX];    // ascending
    double value[GRID_NAMES_MAX][GRID_RATIOS_MAX], low[GRID_NAMES_MAX][GRID_RATIOS_MAX],
        high[GRID_NAMES_MAX][GRID_RATIOS_MAX];
    bool has_intervals, is_cut; // is_cut: there were more names or ratios than fit
} results_grid;

// Which rows count.
typedef struct grid_rows {
    const cJSON *rows;
    const char *method; // "keydiff": what results_method() gives; NULL: all
    const char *task;   // NULL: rows without one
    bool bare;          // of rows with sinks and window, or of those where nothing was protected
} grid_rows;

// What a row ranks tokens or evicts by: its metric, policy or method; "" where it has none.
const char *results_method(const cJSON *row);
// Whether a row is one of them.
bool grid_has_row(const grid_rows *from, const cJSON *row);
// The values of a column, by the row's allocator. The caller frees it with free().
results_grid *results_grid_make(const grid_rows *from, const char *column);
// Place of a name or a ratio (to 1e-9), or n_names, n_ratios.
size_t grid_find_name(const results_grid *g, const char *name);
size_t grid_find_ratio(const results_grid *g, double ratio);
