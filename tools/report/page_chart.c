#include "tools/report/page_chart.h"
#include "tools/report/html.h"
#include <math.h>

// ---- The numbers ----------------------------------------------------------------------------------------------------

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

// Names beside their strokes, as text of the page, so that long ones find room.
static void put_keys(FILE *out, const svg_chart *c)
{
    fputs("<div class=\"keys\">", out);
    for (size_t s = 0; s < c->n_series && s < SVG_SERIES_MAX; s++) {
        fputs("<span><svg viewBox=\"0 0 28 12\">", out);
        svg_chart_key(out, c, s, 2, 6);
        fputs("</svg>", out);
        html_put(out, c->series[s].name);
        fputs("</span>", out);
    }
    if (c->n_series > SVG_SERIES_MAX) fputs("<span>the others: in the table</span>", out);
    fputs("</div>\n", out);
}

void page_put_chart(page_writer *w, const svg_chart *chart, const char *note)
{
    enum { WIDTH = 440, HEIGHT = 260 };
    svg_chart bare = *chart;
    bare.bare = true;
    fprintf(w->out, "<figure class=\"chart\"><figcaption>");
    html_put(w->out, chart->title);
    fputs("</figcaption>\n", w->out);
    if (note) {
        fputs("<p class=\"note\">", w->out);
        html_put(w->out, note);
        fputs("</p>\n", w->out);
    }
    fprintf(w->out, "<div class=\"plot\"><svg viewBox=\"0 0 %d %d\" role=\"img\">\n<title>", WIDTH, HEIGHT);
    html_put(w->out, chart->title);
    fputs("</title>\n", w->out);
    svg_chart_put(w->out, &bare, 0, 0, WIDTH, HEIGHT);
    fputs("</svg></div>\n", w->out);
    put_keys(w->out, &bare);
    put_numbers(w->out, chart);
    fputs("</figure>\n", w->out);
}
