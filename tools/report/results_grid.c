#include "tools/report/results_grid.h"
#include "formats/need.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *results_method(const cJSON *row)
{
    static const char *const columns[] = {"metric", "policy", "method"};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) {
        const char *text = results_text(row, columns[i]);
        if (*text) return text;
    }
    return "";
}

bool grid_has_row(const grid_rows *from, const cJSON *row)
{
    if (from->method && strcmp(results_method(row), from->method) != 0) return false;
    if (strcmp(results_text(row, "task"), from->task ? from->task : "") != 0) return false;
    double kept = results_number(row, "sink") + results_number(row, "window"); // NaN: not told, so as usual
    return (kept == 0) == from->bare;
}

size_t grid_find_name(const results_grid *g, const char *name)
{
    size_t i = 0;
    while (i < g->n_names && strcmp(g->names[i], name) != 0) i++;
    return i;
}

size_t grid_find_ratio(const results_grid *g, double ratio)
{
    size_t i = 0;
    while (i < g->n_ratios && fabs(g->ratios[i] - ratio) > 1e-9) i++;
    return i;
}

// Keeps the ratios ascending.
static void add_ratio(results_grid *g, double ratio)
{
    if (grid_find_ratio(g, ratio) < g->n_ratios) return;
    if (g->n_ratios == GRID_RATIOS_MAX) {
        g->is_cut = true;
        return;
    }
    size_t i = g->n_ratios++;
    for (; i > 0 && g->ratios[i - 1] > ratio; i--) g->ratios[i] = g->ratios[i - 1];
    g->ratios[i] = ratio;
}

static void add_name(results_grid *g, const char *name)
{
    if (grid_find_name(g, name) < g->n_names) return;
    if (g->n_names == GRID_NAMES_MAX) g->is_cut = true;
    else g->names[g->n_names++] = name;
}

results_grid *results_grid_make(const grid_rows *from, const char *column)
{
    const cJSON *row;
    results_grid *g = need(1, sizeof *g, "grids of results");
    cJSON_ArrayForEach(row, from->rows)
    {
        double ratio = results_number(row, "ratio");
        if (!grid_has_row(from, row) || isnan(ratio) || isnan(results_number(row, column))) continue;
        add_name(g, results_text(row, "allocator"));
        add_ratio(g, ratio);
    }
    for (size_t i = 0; i < GRID_NAMES_MAX; i++)
        for (size_t k = 0; k < GRID_RATIOS_MAX; k++) g->value[i][k] = g->low[i][k] = g->high[i][k] = NAN;
    cJSON_ArrayForEach(row, from->rows)
    {
        if (!grid_has_row(from, row)) continue;
        size_t i = grid_find_name(g, results_text(row, "allocator")),
               k = grid_find_ratio(g, results_number(row, "ratio"));
        if (i == g->n_names || k == g->n_ratios) continue;
        interval x = results_interval_at(row, column);
        if (isnan(x.value)) continue;
        g->value[i][k] = x.value;
        g->low[i][k] = x.low;
        g->high[i][k] = x.high;
        g->has_intervals = g->has_intervals || !isnan(x.low);
    }
    return g;
}
