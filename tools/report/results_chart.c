#include "tools/report/results_chart.h"
#include "formats/atomic_file.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PANEL_WIDTH = 560, PANEL_ALONE = 772, PANEL_HEIGHT = 300, HEADER = 72 };

static const struct {
    const char *column, *title;
    svg_unit unit;
    bool logarithmic;
} KNOWN[] = {{"kl", "KL to the full cache, nats per token (less is better)", SVG_NUMBERS, true},
             {"top1", "likeliest next token as with the full cache", SVG_SHARES, false},
             {"score", "share solved (more is better)", SVG_SHARES, false},
             {"loss", "loss, share of all importance that can be lost", SVG_SHARES, false}};
enum { N_KNOWN = sizeof KNOWN / sizeof *KNOWN };

// Tells whether the list has a chart of these rows already, with or without protected tokens.
static bool has_chart(const chart_list *all, const chart_rows *one)
{
    for (size_t i = 0; i < all->n; i++) {
        const chart_rows *o = &all->items[i];
        if (o->from.rows == one->from.rows && o->from.steps == one->from.steps &&
            strcmp(o->from.method, one->from.method) == 0 &&
            strcmp(o->from.task ? o->from.task : "", one->from.task ? one->from.task : "") == 0 &&
            strcmp(o->column, one->column) == 0)
            return true;
    }
    return false;
}

// Adds the charts of a row's method and task. Rows of the full cache, which belong to no allocator, have none.
static void add_row_charts(chart_list *to, const cJSON *rows, const cJSON *row, bool bare)
{
    const char *task = results_text(row, "task");
    chart_rows one = {{.rows = rows,
                       .method = results_method(row),
                       .task = *task ? task : NULL,
                       .bare = bare,
                       .steps = strcmp(results_text(row, "acts"), "every step") == 0},
                      NULL};
    if (!*results_text(row, "allocator") || !grid_has_row(&one.from, row)) return;
    bool evicted = !isnan(results_number(row, "kl")); // its "loss" is importance lost on the text itself: no chart
    for (size_t i = 0; i < N_KNOWN && to->n < CHARTS_MAX; i++) {
        one.column = KNOWN[i].column;
        if (isnan(results_number(row, one.column)) || (evicted && strcmp(one.column, "loss") == 0)) continue;
        if (!has_chart(to, &one)) to->items[to->n++] = one;
    }
}

void charts_add(chart_list *to, const cJSON *rows)
{
    for (int bare = 0; bare < 2; bare++) { // bare rows only for methods that have no others
        const cJSON *row;
        cJSON_ArrayForEach(row, rows) add_row_charts(to, rows, row, bare);
    }
}

// Returns the share solved with the full cache, from the task's row without an allocator; NaN if there is none.
static double full_score(const grid_rows *from)
{
    const cJSON *row;
    cJSON_ArrayForEach(row, from->rows)
    {
        if (from->task && strcmp(results_text(row, "task"), from->task) == 0 && !*results_text(row, "allocator"))
            return results_number(row, "score");
    }
    return NAN;
}

void chart_fill(filled_chart *out, const chart_rows *of)
{
    size_t k = 0, used;
    results_grid *g = &out->grid;
    double full = full_score(&of->from);
    while (strcmp(KNOWN[k].column, of->column) != 0) k++;
    results_grid_fill(g, &of->from, of->column);
    for (size_t i = 0; i < g->n_names; i++)
        out->series[i] = (svg_series){.name = g->names[i],
                                      .y = g->value[i],
                                      .low = g->has_intervals ? g->low[i] : NULL,
                                      .high = g->has_intervals ? g->high[i] : NULL};
    used = (size_t)snprintf(out->title, sizeof out->title, "%.60s%s%.80s%s%s: %s", of->from.task ? of->from.task : "",
                            of->from.task ? ", " : "", of->from.method, of->from.steps ? " at every step" : "",
                            of->from.bare ? ", nothing protected" : "", KNOWN[k].title);
    if (!isnan(full)) snprintf(out->title + used, sizeof out->title - used, "; full cache: %.3g %%", 100 * full);
    out->chart = (svg_chart){.title = out->title,
                             .x = g->ratios,
                             .n = g->n_ratios,
                             .n_series = g->n_names,
                             .series = out->series,
                             .logarithmic = KNOWN[k].logarithmic,
                             .y_unit = KNOWN[k].unit};
}

kvb_status charts_write(const chart_list *all, const char *path, const char *about, kvb_error *err)
{
    atomic_file out;
    if (all->n == 0)
        return kvb_fail(
            err, KVB_ARGUMENT,
            "%s: no row of an allocator has a column kl, top1, score or loss; give what eval, task or solve "
            "--holdout wrote as JSON",
            about);
    kvb_status status = atomic_file_begin(&out, path, err);
    if (status != KVB_OK) return status;
    int wide = all->n > 1 ? 2 : 1, high = ((int)all->n + wide - 1) / wide, left, top,
        width = wide == 1 ? PANEL_ALONE : PANEL_WIDTH;
    bool cut = false;
    filled_chart *f = need(all->n, sizeof *f, "charts");
    for (size_t i = 0; i < all->n; i++) {
        chart_fill(&f[i], &all->items[i]);
        cut = cut || f[i].chart.n_series > SVG_SERIES_MAX;
    }
    svg_begin(out.stream, SVG_MARGIN + wide * (width + SVG_MARGIN), HEADER + high * (PANEL_HEIGHT + SVG_MARGIN),
              "What evicting costs, by who splits the cache over the heads",
              cut ? "bands: 95 % intervals; only the first eight allocators" : "bands: 95 % intervals");
    for (size_t i = 0; i < all->n; i++) {
        left = SVG_MARGIN + (int)i % wide * (width + SVG_MARGIN);
        top = HEADER + (int)i / wide * (PANEL_HEIGHT + SVG_MARGIN);
        svg_chart_put(out.stream, &f[i].chart, left, top, width, PANEL_HEIGHT);
    }
    svg_end(out.stream);
    free(f);
    return atomic_file_commit(&out, err);
}
