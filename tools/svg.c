#include "tools/svg.h"
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

// Okabe and Ito's colours: they differ for colour-blind readers too, on white and on black.
static const char *const COLOURS[SVG_SERIES_MAX] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"};

typedef struct axes {
    double left, top, width, height;         // of the plotted area, pixels
    double x_least, x_most, y_least, y_most; // logarithms of y when logarithmic
    bool logarithmic;
} axes;

static double place_x(const axes *a, double x)
{
    return a->left + a->width * (a->x_most > a->x_least ? (x - a->x_least) / (a->x_most - a->x_least) : 0.5);
}

static double place_y(const axes *a, double y)
{
    return a->top + a->height * (1 - (y - a->y_least) / (a->y_most - a->y_least));
}

static void find_range(axes *a, const svg_chart *chart)
{
    double least = INFINITY, most = 0;
    for (size_t s = 0; s < chart->n_series; s++)
        for (size_t i = 0; i < chart->n; i++) {
            double y = chart->series[s].y[i];
            most = fmax(most, y);
            if (y > 0) least = fmin(least, y);
        }
    a->x_least = chart->x[0];
    a->x_most = chart->x[chart->n - 1];
    a->logarithmic = chart->logarithmic;
    a->y_least = 0;
    a->y_most = most > 0 ? most * 1.05 : 1;
    if (!chart->logarithmic) return;
    a->y_most = most > 0 ? ceil(log10(most)) : 0;
    a->y_least = most > 0 ? fmax(floor(log10(least)), a->y_most - 8) : -1;
    if (a->y_least >= a->y_most) a->y_least = a->y_most - 1;
}

static void put_y_axis(FILE *out, const axes *a)
{
    // Powers of ten, or steps of 1, 2 or 5 of them, six at the most.
    double span = a->y_most - a->y_least, step = a->logarithmic ? 1 : pow(10, floor(log10(span)));
    if (!a->logarithmic) step *= span / step < 2 ? 0.2 : span / step < 5 ? 0.5 : 1;
    for (double y = ceil(a->y_least / step) * step; y <= a->y_most + 1e-9 * span; y += step) {
        char text[32];
        double at = place_y(a, y);
        snprintf(text, sizeof text, "%.6g %%", 100 * (a->logarithmic ? pow(10, y) : y));
        fprintf(out, "<path class=\"g\" d=\"M%.1f %.1f h%.1f\"/>\n", a->left, at, a->width);
        svg_text(out, a->left - 6, at + 4, "r", text);
    }
}

static void put_x_axis(FILE *out, const axes *a, const char *label)
{
    for (int percent = 0; percent <= 100; percent += 10) {
        char text[16];
        double x = percent / 100.0;
        if (x < a->x_least - 1e-9 || x > a->x_most + 1e-9) continue;
        snprintf(text, sizeof text, "%d", percent);
        fprintf(out, "<path class=\"g\" d=\"M%.1f %.1f v%.1f\"/>\n", place_x(a, x), a->top, a->height);
        svg_text(out, place_x(a, x), a->top + a->height + 15, "m", text);
    }
    svg_text(out, a->left + a->width / 2, a->top + a->height + 31, "m sub", label);
}

static void put_line(FILE *out, const axes *a, const svg_chart *chart, size_t series)
{
    bool down = false;
    fprintf(out, "<path class=\"l\" stroke=\"%s\" d=\"", COLOURS[series % SVG_SERIES_MAX]);
    for (size_t i = 0; i < chart->n; i++) {
        double y = chart->series[series].y[i];
        if (a->logarithmic) y = y > 0 ? log10(y) : -INFINITY;
        if (!(y >= a->y_least)) {
            down = false;
            continue;
        }
        fprintf(out, "%c%.1f %.1f", down ? 'L' : 'M', place_x(a, chart->x[i]), place_y(a, y));
        // A single point between two gaps would be invisible.
        if (!down) fputs("h0.5", out);
        down = true;
    }
    fputs("\"><title>", out);
    svg_escape(out, chart->series[series].name);
    fputs("</title></path>\n", out);
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
    for (size_t s = 0; s < chart->n_series; s++) {
        double x = a.left + a.width + 10, y = a.top + 12 + 18 * (double)s;
        put_line(out, &a, chart, s);
        fprintf(out, "<path class=\"l\" stroke=\"%s\" d=\"M%.1f %.1f h16\"/>\n", COLOURS[s % SVG_SERIES_MAX], x, y - 4);
        svg_text(out, x + 21, y, "t", chart->series[s].name);
    }
}
