#include "tools/report/curves.h"
#include "formats/atomic_file.h"
#include <math.h>
#include <stdio.h>

enum { CHART_WIDTH = 560, CHART_HEIGHT = 300, CHART_TOP = 84, TITLE_WIDTH = 820, MAX_RATIOS = 64 };

size_t curve_place(const compared *with, size_t kind, uint32_t column, size_t ratio)
{
    return (kind * with->methods.n_columns + column) * with->n_ratios + ratio;
}

static void put_chart(FILE *out, const curve_view *v, uint32_t which, size_t kind, int left, int top)
{
    double y[3][SVG_SERIES_MAX][MAX_RATIOS];
    svg_series series[SVG_SERIES_MAX];
    size_t used = 0, points = v->with->n_ratios < MAX_RATIOS ? v->with->n_ratios : MAX_RATIOS;
    for (uint32_t c = 0; c < v->with->methods.n_columns && used < SVG_SERIES_MAX; c++) {
        if (v->with->methods.columns[c].method != which) continue;
        for (size_t k = 0; k < points; k++) {
            interval x = v->values[curve_place(v->with, kind, c, k)];
            y[0][used][k] = x.value;
            y[1][used][k] = x.low;
            y[2][used][k] = x.high;
        }
        series[used] = (svg_series){
            .name = v->with->methods.columns[c].how->label, .y = y[0][used], .low = y[1][used], .high = y[2][used]};
        used++;
    }
    char title[160];
    snprintf(title, sizeof title, "%.100s: %s", method_name(&v->with->methods.methods[which]), v->kinds[kind].title);
    svg_chart chart = {.title = title,
                       .x_label = "per cent pruned",
                       .x = v->with->ratios,
                       .n = points,
                       .n_series = used,
                       .series = series,
                       .logarithmic = v->kinds[kind].logarithmic,
                       .y_unit = v->kinds[kind].unit};
    svg_chart_put(out, &chart, left, top, CHART_WIDTH, CHART_HEIGHT);
}

static bool draws_all(const curve_view *v)
{
    for (size_t m = 0; m < v->with->methods.n; m++) {
        size_t n = 0;
        for (size_t c = 0; c < v->with->methods.n_columns; c++) n += v->with->methods.columns[c].method == m;
        if (n > SVG_SERIES_MAX) return false;
    }
    return true;
}

kvb_status curves_write(const char *path, const curve_view *v, kvb_error *err)
{
    atomic_file file;
    kvb_status status = atomic_file_begin(&file, path, err);
    if (status != KVB_OK) return status;
    int high = (int)v->with->methods.n, wide = (int)v->n_kinds;
    int width = (wide + 1) * SVG_MARGIN + wide * CHART_WIDTH;
    char subtitle[320];
    snprintf(subtitle, sizeof subtitle, "%s%s", v->subtitle, draws_all(v) ? "" : "; only the first eight allocators");
    svg_begin(file.stream, width < TITLE_WIDTH ? TITLE_WIDTH : width,
              CHART_TOP + high * (CHART_HEIGHT + SVG_MARGIN) + SVG_MARGIN, v->title, subtitle);
    for (int m = 0; m < high; m++)
        for (int k = 0; k < wide; k++)
            put_chart(file.stream, v, (uint32_t)m, (size_t)k, SVG_MARGIN + k * (CHART_WIDTH + SVG_MARGIN),
                      CHART_TOP + m * (CHART_HEIGHT + SVG_MARGIN));
    svg_end(file.stream);
    return atomic_file_commit(&file, err);
}
