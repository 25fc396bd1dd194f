#include "tools/report/page_chart.h"
#include "tools/report/html.h"
#include "tools/report/results_grid.h"
#include "tools/report/series_style.h"
#include <math.h>
#include <stdlib.h>

// ---- For the script -------------------------------------------------------------------------------------------------

// Five digits are more than a picture shows. Memory that runs out shows when the whole document is printed.
static cJSON *rounded_list(const double *values, size_t n)
{
    cJSON *list = cJSON_CreateArray();
    for (size_t i = 0; i < n; i++) {
        char text[32];
        snprintf(text, sizeof text, "%.5g", values[i]);
        cJSON_AddItemToArray(list, isfinite(values[i]) ? cJSON_CreateRaw(text) : cJSON_CreateNull());
    }
    return list;
}

static cJSON *series_data(const svg_series *s, size_t n, series_style style)
{
    char colour[16];
    snprintf(colour, sizeof colour, "#%06x", style.colour);
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "name", s->name);
    cJSON_AddStringToObject(o, "colour", colour);
    cJSON_AddStringToObject(o, "mark", series_mark_names[style.mark]);
    cJSON_AddNumberToObject(o, "dash", style.dash);
    cJSON_AddItemToObject(o, "y", rounded_list(s->y, n));
    if (s->low && s->high) {
        cJSON_AddItemToObject(o, "low", rounded_list(s->low, n));
        cJSON_AddItemToObject(o, "high", rounded_list(s->high, n));
    }
    return o;
}

static void add_data(cJSON *charts, const svg_chart *c)
{
    cJSON *o = cJSON_CreateObject();
    cJSON_AddItemToArray(charts, o);
    cJSON_AddStringToObject(o, "title", c->title);
    cJSON_AddStringToObject(o, "x_label", c->x_label);
    cJSON_AddBoolToObject(o, "shares", c->y_unit == SVG_SHARES);
    cJSON_AddBoolToObject(o, "logarithmic", c->logarithmic);
    cJSON_AddItemToObject(o, "x", rounded_list(c->x, c->n));
    cJSON *series = cJSON_AddArrayToObject(o, "series");
    const char *names[GRID_NAMES_MAX];
    series_style styles[GRID_NAMES_MAX];
    size_t n = c->n_series < GRID_NAMES_MAX ? c->n_series : GRID_NAMES_MAX;
    for (size_t s = 0; s < n; s++) names[s] = c->series[s].name;
    series_styles(names, n, styles);
    for (size_t s = 0; s < n; s++) cJSON_AddItemToArray(series, series_data(&c->series[s], c->n, styles[s]));
}

// ---- For everybody --------------------------------------------------------------------------------------------------

static void put_value(FILE *out, const svg_chart *c, double y)
{
    if (isnan(y)) fputs("–", out);
    else if (c->y_unit == SVG_SHARES) fprintf(out, "%.3g&nbsp;%%", 100 * y);
    else fprintf(out, "%.3g", y);
}

static void put_cell(FILE *out, const svg_chart *c, const svg_series *s, size_t i)
{
    fputs("<td>", out);
    put_value(out, c, s->y[i]);
    if (s->low && s->high && !isnan(s->low[i]) && !isnan(s->high[i])) {
        fputs(" <small>", out);
        put_value(out, c, s->low[i]);
        fputs(" to ", out);
        put_value(out, c, s->high[i]);
        fputs("</small>", out);
    }
    fputs("</td>", out);
}

// With a point for every per cent a table of all would hide what matters.
static bool is_shown(const svg_chart *c, size_t i)
{
    enum { FEW = 20 };
    return c->n <= FEW || lround(100 * c->x[i]) % 10 == 0 || i + 1 == c->n;
}

static void put_numbers(FILE *out, const svg_chart *c)
{
    fputs("<details><summary>The numbers</summary><div class=\"wide\"><table><thead><tr><th>", out);
    html_put(out, c->x_label);
    fputs("</th>", out);
    for (size_t s = 0; s < c->n_series; s++) {
        fputs("<th>", out);
        html_put(out, c->series[s].name);
        fputs("</th>", out);
    }
    fputs("</tr></thead><tbody>\n", out);
    for (size_t i = 0; i < c->n; i++) {
        if (!is_shown(c, i)) continue;
        fprintf(out, "<tr><th>%.4g</th>", 100 * c->x[i]);
        for (size_t s = 0; s < c->n_series; s++) put_cell(out, c, &c->series[s], i);
        fputs("</tr>\n", out);
    }
    fputs("</tbody></table></div></details>", out);
}

void page_put_chart(page_writer *w, const svg_chart *chart, const char *note)
{
    fprintf(w->out, "<figure class=\"chart\"><figcaption>");
    html_put(w->out, chart->title);
    fputs("</figcaption>\n", w->out);
    if (note) {
        fputs("<p class=\"note\">", w->out);
        html_put(w->out, note);
        fputs("</p>\n", w->out);
    }
    fprintf(w->out, "<div class=\"plot\" data-chart=\"%d\"></div>\n", cJSON_GetArraySize(w->charts));
    put_numbers(w->out, chart);
    fputs("</figure>\n", w->out);
    add_data(w->charts, chart);
}
