#include "tools/report/svg.h"
#include "tools/report/viridis.h"
#include <math.h>

// Control characters are not allowed in XML at all.
void svg_escape(FILE *out, const char *text)
{
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        if (*p == '&') fputs("&amp;", out);
        else if (*p == '<') fputs("&lt;", out);
        else if (*p == '>') fputs("&gt;", out);
        else if (*p < 0x20 || *p == 0x7f) fputc('?', out);
        else fputc(*p, out);
    }
}

void svg_text(FILE *out, double x, double y, const char *class, const char *text)
{
    fprintf(out, "<text x=\"%g\" y=\"%g\" class=\"%s\">", x, y, class);
    svg_escape(out, text);
    fputs("</text>\n", out);
}

void svg_begin(FILE *out, int width, int height, const char *title, const char *subtitle)
{
    fprintf(out,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" "
            "role=\"img\">\n<title>",
            width, height, width, height);
    svg_escape(out, title);
    // The picture brings its own background, so it can be read on any page; pages in dark mode get a dark one.
    fputs("</title>\n<style>\n"
          "text{font-family:'DejaVu Sans',Verdana,Arial,sans-serif;font-size:11px;fill:#222}\n"
          ".paper{fill:#fff}.title{font-size:17px;font-weight:bold}.sub{font-size:12px;fill:#555}.name{font-size:13px;"
          "font-weight:bold}\n"
          ".r{text-anchor:end}.m{text-anchor:middle}.f{fill:none;stroke:#888;stroke-width:1}\n"
          ".g{fill:none;stroke:#888;stroke-opacity:0.3}.l{fill:none;stroke-width:1.6}\n"
          ".n{font-size:9px;text-anchor:middle;fill:#fff}.d{fill:#000}\n"
          "@media "
          "(prefers-color-scheme:dark){text{fill:#ddd}.sub{fill:#aaa}.paper{fill:#16181c}.n{fill:#fff}.d{fill:#000}}\n"
          "</style>\n<rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n",
          out);
    svg_text(out, SVG_MARGIN, SVG_MARGIN + 14, "title", title);
    if (subtitle) svg_text(out, SVG_MARGIN, SVG_MARGIN + 34, "sub", subtitle);
}

void svg_end(FILE *out)
{
    fputs("</svg>\n", out);
}

// ---- Charts ---------------------------------------------------------------------------------------------------------

enum { LABELS = 62, TITLE = 24, FOOT = 40, LEGEND = 132 };

// Okabe and Ito's colours, and two more: they differ for colour-blind readers too, on white and on black.
static const char *const COLOURS[SVG_SERIES_MAX] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                                    "#E69F00", "#56B4E9", "#882255", "#888888"};

typedef struct axes {
    double left, top, width, height;         // of the plotted area, pixels
    double x_least, x_most, y_least, y_most; // logarithms of y when logarithmic
    bool logarithmic;
    svg_unit x_unit, y_unit;
} axes;

static double place_x(const axes *a, double x)
{
    return a->left + a->width * (a->x_most > a->x_least ? (x - a->x_least) / (a->x_most - a->x_least) : 0.5);
}

static double place_y(const axes *a, double y)
{
    return a->top + a->height * (1 - (y - a->y_least) / (a->y_most - a->y_least));
}

// Least positive and largest of n numbers; NaN counts as none of them.
static void widen(double *least, double *most, const double *y, size_t n)
{
    for (size_t i = 0; y && i < n; i++) {
        *most = fmax(*most, y[i]);
        if (y[i] > 0) *least = fmin(*least, y[i]);
    }
}

static void find_range(axes *a, const svg_chart *chart)
{
    double least = INFINITY, most = 0;
    for (size_t s = 0; s < chart->n_series; s++) {
        widen(&least, &most, chart->series[s].y, chart->n);
        widen(&least, &most, chart->series[s].low, chart->n);
        widen(&least, &most, chart->series[s].high, chart->n);
    }
    a->x_least = chart->x[0];
    a->x_most = chart->x[chart->n - 1];
    a->x_unit = chart->x_unit;
    a->y_unit = chart->y_unit;
    a->logarithmic = chart->logarithmic;
    a->y_least = chart->from_low && most > 0 ? fmax(0, least - 0.05 * (most - least)) : 0;
    a->y_most = most > a->y_least ? most + 0.05 * (most - a->y_least) : 1;
    if (!chart->logarithmic) return;
    a->y_most = most > 0 ? ceil(log10(most)) : 0;
    a->y_least = most > 0 ? fmax(floor(log10(least)), a->y_most - 8) : -1;
    if (a->y_least >= a->y_most) a->y_least = a->y_most - 1;
}

// 1, 2 or 5 times a power of ten, so that a span has five to ten steps.
static double nice_step(double span)
{
    double step = pow(10, floor(log10(span)));
    return step * (span / step < 2 ? 0.2 : span / step < 5 ? 0.5 : 1);
}

static void put_y_axis(FILE *out, const axes *a)
{
    double span = a->y_most - a->y_least, step = a->logarithmic ? 1 : nice_step(span);
    for (double y = ceil(a->y_least / step) * step; y <= a->y_most + 1e-9 * span; y += step) {
        char text[32];
        double at = place_y(a, y), value = a->logarithmic ? pow(10, y) : y;
        if (a->y_unit == SVG_SHARES) snprintf(text, sizeof text, "%.6g %%", 100 * value);
        else snprintf(text, sizeof text, "%.6g", value);
        fprintf(out, "<path class=\"g\" d=\"M%.1f %.1f h%.1f\"/>\n", a->left, at, a->width);
        svg_text(out, a->left - 6, at + 4, "r", text);
    }
}

static void put_x_axis(FILE *out, const axes *a, const char *label)
{
    double span = a->x_most - a->x_least, step = a->x_unit == SVG_SHARES ? 0.1 : span > 0 ? nice_step(span) : 1;
    if (a->x_unit == SVG_NUMBERS && a->x_most >= 5) step = fmax(step, 1);
    for (double x = ceil(a->x_least / step - 1e-9) * step; x <= a->x_most + 1e-9 * step; x += step) {
        char text[16];
        snprintf(text, sizeof text, "%.6g", (a->x_unit == SVG_SHARES ? rint(100 * x) : x) + 0.0); // -0 is 0
        fprintf(out, "<path class=\"g\" d=\"M%.1f %.1f v%.1f\"/>\n", place_x(a, x), a->top, a->height);
        svg_text(out, place_x(a, x), a->top + a->height + 15, "m", text);
    }
    svg_text(out, a->left + a->width / 2, a->top + a->height + 31, "m sub", label);
}

// Height of a value in the picture; NaN where it has none.
static double height_of(const axes *a, double y)
{
    if (a->logarithmic) y = y > 0 ? log10(y) : -INFINITY;
    return y >= a->y_least ? place_y(a, y) : NAN;
}

static void put_band(FILE *out, const axes *a, const svg_chart *chart, size_t series)
{
    const svg_series *s = &chart->series[series];
    if (!s->low || !s->high) return;
    // Each stretch without gaps is a shape of its own: along the upper end, and back along the lower one.
    for (size_t first = 0, last; first < chart->n; first = last + 1) {
        for (last = first; last < chart->n && s->high[last] >= s->low[last]; last++) {
        }
        if (last == first) continue;
        fprintf(out, "<path fill=\"%s\" fill-opacity=\"0.15\" d=\"", COLOURS[series % SVG_SERIES_MAX]);
        for (size_t i = first; i < 2 * last - first; i++) {
            size_t at = i < last ? i : 2 * last - 1 - i;
            double y = height_of(a, i < last ? s->high[at] : s->low[at]);
            fprintf(out, "%c%.1f %.1f", i == first ? 'M' : 'L', place_x(a, chart->x[at]),
                    isnan(y) ? a->top + a->height : y);
        }
        fputs("Z\"/>\n", out);
    }
}

static void put_line(FILE *out, const axes *a, const svg_chart *chart, size_t series)
{
    const char *colour = COLOURS[series % SVG_SERIES_MAX];
    bool down = false;
    fprintf(out, "<path class=\"l\" stroke=\"%s\" d=\"", colour);
    for (size_t i = 0; i < chart->n; i++) {
        double y = height_of(a, chart->series[series].y[i]);
        if (isnan(y)) {
            down = false;
            continue;
        }
        fprintf(out, "%c%.1f %.1f", down ? 'L' : 'M', place_x(a, chart->x[i]), y);
        // A single point between two gaps would be invisible.
        if (!down) fputs("h0.5", out);
        down = true;
    }
    fputs("\"><title>", out);
    svg_escape(out, chart->series[series].name);
    fputs("</title></path>\n", out);
    for (size_t i = 0; chart->marks && i < chart->n; i++) {
        double y = height_of(a, chart->series[series].y[i]);
        if (!isnan(y))
            fprintf(out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.5\" fill=\"%s\"/>\n", place_x(a, chart->x[i]), y,
                    colour);
    }
}

void svg_chart_put(FILE *out, const svg_chart *chart, int left, int top, int width, int height)
{
    axes a = {
        .left = left + LABELS, .top = top + TITLE, .width = width - LABELS - LEGEND, .height = height - TITLE - FOOT};
    find_range(&a, chart);
    svg_text(out, left, top + 12, "name", chart->title);
    put_y_axis(out, &a);
    put_x_axis(out, &a, chart->x_label);
    fprintf(out, "<rect class=\"f\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"/>\n", a.left, a.top, a.width,
            a.height);
    for (size_t s = 0; s < chart->n_series; s++) put_band(out, &a, chart, s);
    for (size_t s = 0; s < chart->n_series; s++) {
        double x = a.left + a.width + 10, y = a.top + 12 + 18 * (double)s;
        put_line(out, &a, chart, s);
        fprintf(out, "<path class=\"l\" stroke=\"%s\" d=\"M%.1f %.1f h16\"/>\n", COLOURS[s % SVG_SERIES_MAX], x, y - 4);
        svg_text(out, x + 21, y, "t", chart->series[s].name);
    }
}

// ---- Coloured tables ------------------------------------------------------------------------------------------------

// A name out of a list, or the number of its place.
static void put_name(FILE *out, double x, double y, const char *class, const char *const *names, size_t i)
{
    char number[24];
    snprintf(number, sizeof number, "%zu", i);
    svg_text(out, x, y, class, names ? names[i] : number);
}

void svg_matrix_put(FILE *out, const svg_matrix *m, int left, int top, int width, int height)
{
    double names = m->row_names ? 120 : 24, x0 = left + names, y0 = top + TITLE + 14;
    double w = (width - names) / (double)m->n_columns, h = (height - TITLE - 14) / (double)m->n_rows;
    svg_text(out, left, top + 12, "name", m->title);
    for (size_t c = 0; c < m->n_columns; c++)
        put_name(out, x0 + w * ((double)c + 0.5), y0 - 5, "m", m->column_names, c);
    // Without names, every fifth row's number is enough.
    for (size_t r = 0; r < m->n_rows; r++)
        if (m->row_names || r % 5 == 0) put_name(out, x0 - 5, y0 + h * ((double)r + 0.5) + 4, "r", m->row_names, r);
    for (size_t i = 0; i < m->n_rows * m->n_columns; i++) {
        double x = x0 + w * (double)(i % m->n_columns), y = y0 + h * (double)(i / m->n_columns);
        viridis_rgb c = viridis_at(m->most > 0 ? m->values[i] / m->most : 0);
        fprintf(out, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"#%02x%02x%02x\"/>\n", x, y, w,
                h, (unsigned)c.r, (unsigned)c.g, (unsigned)c.b);
        if (m->decimals < 0) continue;
        char text[32];
        snprintf(text, sizeof text, "%.*f", m->decimals, m->values[i]);
        svg_text(out, x + w / 2, y + h / 2 + 3, viridis_is_light(c) ? "n d" : "n", text);
    }
}
