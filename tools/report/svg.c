// Pictures: what they have in common, the colours of cells, the styles of lines, and line charts.
#include "tools/report/svg.h"
#include "tools/report/html.h"
#include <math.h>
#include <stdint.h>
#include <string.h>

void svg_text(FILE *out, double x, double y, const char *class, const char *text)
{
    fprintf(out, "<text x=\"%g\" y=\"%g\" class=\"%s\">", x, y, class);
    html_put(out, text);
    fputs("</text>\n", out);
}

void svg_begin(FILE *out, int width, int height, const char *title, const char *subtitle)
{
    fprintf(out,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" "
            "role=\"img\">\n<title>",
            width, height, width, height);
    html_put(out, title);
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

// ---- Colours of cells -----------------------------------------------------------------------------------------------

// Eleven even steps. Straight lines between them differ from the scale by less than the eye can tell.
static const viridis_rgb STEPS[VIRIDIS_LAST + 1] = {{68, 1, 84},    {72, 36, 117},  {65, 68, 135},  {53, 95, 141},
                                                    {42, 120, 142}, {33, 145, 140}, {34, 168, 132}, {68, 191, 112},
                                                    {122, 209, 81}, {189, 223, 38}, {253, 231, 37}};

viridis_rgb viridis_at(double position)
{
    double x = fmin(1, fmax(0, position)) * VIRIDIS_LAST;
    int i = (int)fmin(VIRIDIS_LAST - 1, floor(x));
    double t = x - i;
    viridis_rgb a = STEPS[i], b = STEPS[i + 1];
    return (viridis_rgb){(int)lround(a.r + t * (b.r - a.r)), (int)lround(a.g + t * (b.g - a.g)),
                         (int)lround(a.b + t * (b.b - a.b))};
}

bool viridis_is_light(viridis_rgb c)
{
    return 299 * c.r + 587 * c.g + 114 * c.b > 1000 * 128;
}

// ---- Styles of lines ------------------------------------------------------------------------------------------------

// One colour and one mark per allocator, the same in every picture and page. They differ for colour-blind readers
// (Okabe and Ito's colours), and without any colour by mark and dashes.
typedef enum series_mark { MARK_DOT, MARK_SQUARE, MARK_DIAMOND, MARK_UP, MARK_DOWN, MARK_CROSS, MARK_RING } series_mark;
enum { N_MARKS = MARK_RING + 1 };

typedef struct series_style {
    unsigned colour; // 0xRRGGBB, legible on white and on black
    series_mark mark;
    unsigned dash; // length of a dash and of the gap behind it, pixels; 0: a solid line
} series_style;

enum {
    BLUE = 0x0072B2,
    VERMILION = 0xD55E00,
    GREEN = 0x009E73,
    PURPLE = 0xCC79A7,
    ORANGE = 0xE69F00,
    SKY = 0x56B4E9,
    WINE = 0xAA4499,
    GREY = 0x888888
};

static const struct {
    const char *name;
    series_style style;
} KNOWN[] = {
    // What eval, task and the studies compare.
    {"kvbudget", {BLUE, MARK_DOT, 0}},
    {"uniform", {VERMILION, MARK_SQUARE, 0}},
    {"pyramid", {GREEN, MARK_UP, 4}},
    {"ada", {PURPLE, MARK_DIAMOND, 4}},
    {"ada-original", {PURPLE, MARK_DIAMOND, 2}},
    {"ada-global", {PURPLE, MARK_DIAMOND, 8}},
    {"lava", {ORANGE, MARK_UP, 2}},
    {"cake", {WINE, MARK_RING, 6}},
    {"lukv", {SKY, MARK_RING, 6}},
    {"oracle", {GREY, MARK_CROSS, 2}},
    // Losses of one table.
    {"this table", {BLUE, MARK_DOT, 0}},
    {"even split", {VERMILION, MARK_SQUARE, 0}},
    {"lower bound", {GREY, MARK_CROSS, 2}},
};
enum { N_KNOWN = sizeof KNOWN / sizeof *KNOWN };

// FNV-1a: the same letters get the same style in every run.
static uint32_t letters(const char *name)
{
    uint32_t h = 2166136261u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 16777619u;
    return h;
}

// Returns the style of a known name. A name that begins with a known one has its colour ("kvbudget-exact" looks like no
// other, but is as blue as "kvbudget"); all else in a style comes from the name's letters.
static series_style series_style_of(const char *name)
{
    static const unsigned others[] = {ORANGE, WINE, SKY, GREEN};
    static const series_mark marks[] = {MARK_DOWN, MARK_RING, MARK_CROSS, MARK_UP, MARK_SQUARE};
    size_t best = N_KNOWN, length = 0;
    for (size_t i = 0; i < N_KNOWN; i++) {
        size_t n = strlen(KNOWN[i].name);
        if (strcmp(name, KNOWN[i].name) == 0) return KNOWN[i].style;
        // "kvbudget-strict", "kvbudget:strict": the family's colour
        if (n > length && strncmp(name, KNOWN[i].name, n) == 0 && strchr("-:_, ", name[n])) {
            best = i;
            length = n;
        }
    }
    uint32_t h = letters(name);
    series_style style = {others[h % 4], marks[(h >> 8) % 5], 2 + 2 * ((h >> 16) % 4)};
    if (best < N_KNOWN) style.colour = KNOWN[best].style.colour;
    return style;
}

static bool is_taken(const series_style *styles, size_t n, series_style s)
{
    for (size_t i = 0; i < n; i++)
        if (styles[i].mark == s.mark && styles[i].dash == s.dash) return true;
    return false;
}

// ---- Charts ---------------------------------------------------------------------------------------------------------

enum { LABELS = 62, TITLE = 24, FOOT = 40, LEGEND = 140, KEY = 24, TICKS_MAX = 24 };

typedef struct axes {
    double left, top, width, height;         // of the plotted area, pixels
    double x_least, x_most, y_least, y_most; // logarithms of y when logarithmic
    bool logarithmic;
    svg_unit y_unit;
} axes;

static double place_x(const axes *a, double x)
{
    return a->left + a->width * (a->x_most > a->x_least ? (x - a->x_least) / (a->x_most - a->x_least) : 0.5);
}

static double place_y(const axes *a, double y)
{
    return a->top + a->height * (1 - (y - a->y_least) / (a->y_most - a->y_least));
}

// Widens a range by the least positive and the largest of n numbers. NaN and infinity do not count.
static void widen(double *least, double *most, const double *y, size_t n)
{
    for (size_t i = 0; y && i < n; i++) {
        if (isfinite(y[i])) *most = fmax(*most, y[i]);
        if (isfinite(y[i]) && y[i] > 0) *least = fmin(*least, y[i]);
    }
}

// Rounds x, a logarithm, up or down to the logarithm of 1, 2 or 5 times a power of ten.
static double snap(double x, bool up)
{
    static const double steps[] = {0, 0.30102999566398120, 0.69897000433601880, 1}; // log10 of 1, 2, 5, 10
    double whole = floor(x), rest = x - whole;
    int i = up ? 3 : 0;
    if (up)
        while (i > 0 && steps[i - 1] >= rest - 1e-9) i--;
    else
        while (i < 3 && steps[i + 1] <= rest + 1e-9) i++;
    return whole + steps[i];
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
    a->y_unit = chart->y_unit;
    a->logarithmic = chart->logarithmic;
    a->y_least = 0;
    a->y_most = most > 0 ? 1.05 * most : 1;
    if (!chart->logarithmic) return;
    a->y_most = most > 0 ? snap(log10(most), true) : 0;
    a->y_least = most > 0 ? fmax(snap(log10(least), false), a->y_most - 8) : -1;
    if (a->y_least >= a->y_most) a->y_least = a->y_most - 1;
}

// Returns 1, 2 or 5 times a power of ten, so that a span has four to ten steps.
static double nice_step(double span)
{
    double step = pow(10, floor(log10(span)));
    return step * (span / step < 2 ? 0.2 : span / step < 5 ? 0.5 : 1);
}

// Lists the multiples of a step from `least` to `most`, at most TICKS_MAX, and returns how many. Each is a product,
// since adding a step to a large number may not change it.
static int list_ticks(double ticks[TICKS_MAX], double least, double most, double step)
{
    double first = ceil(least / step - 1e-9);
    int n = 0;
    while (n < TICKS_MAX && (first + n) * step <= most + 1e-9 * step) {
        ticks[n] = (first + n) * step;
        n++;
    }
    return n;
}

static void put_y_tick(FILE *out, const axes *a, double y, double value)
{
    char text[32];
    double at = place_y(a, y);
    if (a->y_unit == SVG_SHARES) snprintf(text, sizeof text, "%.6g %%", 100 * value);
    else snprintf(text, sizeof text, "%.6g", value);
    fprintf(out, "<path class=\"g\" d=\"M%.1f %.1f h%.1f\"/>\n", a->left, at, a->width);
    svg_text(out, a->left - 6, at + 4, "r", text);
}

// Draws ticks at powers of ten, and if these are few also at 2 and 5 times them.
static void put_log_axis(FILE *out, const axes *a)
{
    static const double times[] = {1, 2, 5};
    int n = a->y_most - a->y_least < 2.5 ? 3 : 1;
    for (double power = floor(a->y_least); power <= a->y_most; power++)
        for (int i = 0; i < n; i++) {
            double y = power + log10(times[i]);
            if (y >= a->y_least - 1e-9 && y <= a->y_most + 1e-9) put_y_tick(out, a, y, times[i] * pow(10, power));
        }
}

static void put_y_axis(FILE *out, const axes *a)
{
    if (a->logarithmic) {
        put_log_axis(out, a);
        return;
    }
    double ticks[TICKS_MAX];
    int n = list_ticks(ticks, a->y_least, a->y_most, nice_step(a->y_most - a->y_least));
    for (int i = 0; i < n; i++) put_y_tick(out, a, ticks[i], ticks[i]);
}

static void put_x_tick(FILE *out, const axes *a, double x, bool labelled)
{
    char text[16];
    snprintf(text, sizeof text, "%.6g", rint(1e4 * x) / 100 + 0.0); // -0 is 0
    fprintf(out, "<path class=\"g\" d=\"M%.1f %.1f v%.1f\"/>\n", place_x(a, x), a->top, a->height);
    if (labelled) svg_text(out, place_x(a, x), a->top + a->height + 15, "m", text);
}

// Few points have a tick each, so that what was measured can be read off; many have ticks at round numbers.
static void put_x_axis(FILE *out, const axes *a, const svg_chart *chart)
{
    enum { FEW = 12, ROOM = 26 }; // ROOM: pixels between labels that do not touch
    double last = -INFINITY;
    for (size_t i = 0; chart->n <= FEW && i < chart->n; i++) {
        bool labelled = place_x(a, chart->x[i]) - last >= ROOM;
        put_x_tick(out, a, chart->x[i], labelled);
        if (labelled) last = place_x(a, chart->x[i]);
    }
    double ticks[TICKS_MAX];
    int n = chart->n > FEW ? list_ticks(ticks, a->x_least, a->x_most, 0.1) : 0;
    for (int i = 0; i < n; i++) put_x_tick(out, a, ticks[i], true);
    svg_text(out, a->left + a->width / 2, a->top + a->height + 31, "m sub", "per cent pruned");
}

// Returns the height of a value in the picture, or NaN if it has none.
static double height_of(const axes *a, double y)
{
    if (a->logarithmic) y = y > 0 ? log10(y) : -INFINITY;
    return y >= a->y_least ? place_y(a, y) : NAN;
}

static void put_band(FILE *out, const axes *a, const svg_chart *chart, size_t series, series_style style)
{
    const svg_series *s = &chart->series[series];
    if (!s->low || !s->high) return;
    // Each stretch without gaps is a shape of its own: along the upper end, and back along the lower one.
    for (size_t first = 0, last; first < chart->n; first = last + 1) {
        for (last = first; last < chart->n && s->high[last] >= s->low[last]; last++) {
        }
        if (last == first) continue;
        fprintf(out, "<path fill=\"#%06x\" fill-opacity=\"0.15\" d=\"", style.colour);
        for (size_t i = first; i < 2 * last - first; i++) {
            size_t at = i < last ? i : 2 * last - 1 - i;
            double y = height_of(a, i < last ? s->high[at] : s->low[at]);
            fprintf(out, "%c%.1f %.1f", i == first ? 'M' : 'L', place_x(a, chart->x[at]),
                    isnan(y) ? a->top + a->height : y);
        }
        fputs("Z\"/>\n", out);
    }
}

// Begins a line's path, which its coordinates and \"/> end.
static void begin_line(FILE *out, series_style style)
{
    fprintf(out, "<path class=\"l\" stroke=\"#%06x\"", style.colour);
    if (style.dash) fprintf(out, " stroke-dasharray=\"%u %u\"", style.dash, style.dash);
    fputs(" d=\"", out);
}

static void put_mark(FILE *out, series_style style, double x, double y)
{
    static const char *const shapes[N_MARKS] = {
        [MARK_SQUARE] = "m-3 -3h6v6h-6Z",      [MARK_DIAMOND] = "m0 -4.4l4.4 4.4l-4.4 4.4l-4.4 -4.4Z",
        [MARK_UP] = "m0 -4.2l4.2 7.2h-8.4Z",   [MARK_DOWN] = "m0 4.2l4.2 -7.2h-8.4Z",
        [MARK_CROSS] = "m-3 -3l6 6m0 -6l-6 6",
    };
    bool filled = style.mark != MARK_CROSS && style.mark != MARK_RING;
    if (shapes[style.mark]) fprintf(out, "<path d=\"M%.1f %.1f%s\"", x, y, shapes[style.mark]);
    else fprintf(out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\"", x, y);
    if (filled) fprintf(out, " fill=\"#%06x\"/>\n", style.colour);
    else fprintf(out, " fill=\"none\" stroke=\"#%06x\" stroke-width=\"1.5\"/>\n", style.colour);
}

static void put_line(FILE *out, const axes *a, const svg_chart *chart, size_t series, series_style style)
{
    enum { MARKS_MAX = 20 }; // more would hide the line
    size_t every = (chart->n + MARKS_MAX - 1) / MARKS_MAX;
    bool down = false;
    begin_line(out, style);
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
    html_put(out, chart->series[series].name);
    fputs("</title></path>\n", out);
    // Lines of many points are marked at different places, so that marks of lines that run together stay apart.
    for (size_t i = every == 1 ? 0 : (every * (2 * series + 1) / (2 * chart->n_series)) % every; i < chart->n;
         i += every) {
        double y = height_of(a, chart->series[series].y[i]);
        if (!isnan(y)) put_mark(out, style, place_x(a, chart->x[i]), y);
    }
}

// Chooses the styles of the lines that are drawn, and returns how many. A style with the mark and dashes of an earlier
// line gets another mark.
static size_t choose_styles(const svg_chart *chart, series_style styles[SVG_SERIES_MAX])
{
    size_t n = chart->n_series < SVG_SERIES_MAX ? chart->n_series : SVG_SERIES_MAX;
    for (size_t i = 0; i < n; i++) {
        styles[i] = series_style_of(chart->series[i].name);
        for (int tries = 0; tries < N_MARKS && is_taken(styles, i, styles[i]); tries++)
            styles[i].mark = (series_mark)((styles[i].mark + 1) % N_MARKS);
    }
    return n;
}

static void put_key(FILE *out, series_style style, double x, double y)
{
    begin_line(out, style);
    fprintf(out, "M%.1f %.1f h%d\"/>\n", x, y, KEY);
    put_mark(out, style, x + KEY / 2.0, y);
}

void svg_chart_key(FILE *out, const svg_chart *chart, size_t series, double x, double y)
{
    series_style styles[SVG_SERIES_MAX];
    if (series < choose_styles(chart, styles)) put_key(out, styles[series], x, y);
}

void svg_chart_put(FILE *out, const svg_chart *chart, int left, int top, int width, int height)
{
    series_style styles[SVG_SERIES_MAX];
    size_t n = choose_styles(chart, styles);
    int above = chart->bare ? TITLE / 3 : TITLE, beside = chart->bare ? TITLE : LEGEND;
    axes a = {
        .left = left + LABELS, .top = top + above, .width = width - LABELS - beside, .height = height - above - FOOT};
    find_range(&a, chart);
    if (!chart->bare) svg_text(out, left, top + 12, "name", chart->title);
    put_y_axis(out, &a);
    put_x_axis(out, &a, chart);
    fprintf(out, "<rect class=\"f\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"/>\n", a.left, a.top, a.width,
            a.height);
    for (size_t s = 0; s < n; s++) put_band(out, &a, chart, s, styles[s]);
    for (size_t s = 0; s < n; s++) {
        double x = a.left + a.width + 10, y = a.top + 12 + 18 * (double)s;
        put_line(out, &a, chart, s, styles[s]);
        if (chart->bare) continue;
        put_key(out, styles[s], x, y - 4);
        svg_text(out, x + KEY + 5, y, "t", chart->series[s].name);
    }
}
