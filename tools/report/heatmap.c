#include "tools/report/heatmap.h"
#include "tools/report/html.h"
#include "tools/report/svg.h"
#include <math.h>

// Where the colour bar is labelled.
static const double TICKS[] = {0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 1};
enum { N_TICKS = sizeof TICKS / sizeof *TICKS };

// Returns the place of a kept share on the colour bar. The square root spreads the small shares: at 90 % pruned nearly
// all heads keep less than a third, and whether one keeps 1 % or 5 % is what matters.
static double scale(double kept)
{
    return sqrt(fmin(1, fmax(0, kept)));
}

typedef struct range {
    double least, most;
} range;

static range panel_range(const heatmap *map, const double *kept)
{
    size_t n = (size_t)map->n_layers * map->n_heads;
    range r = {1, 0};
    for (size_t i = 0; i < n; i++) {
        r.least = fmin(r.least, kept[i]);
        r.most = fmax(r.most, kept[i]);
    }
    return r;
}

// Prints a share as a percentage of at most three characters: ".4", "7", "42", "100". At most 0.05 % is "0".
static const char *percent(char out[8], double share)
{
    double value = 100 * share;
    if (value > 0.05 && value < 0.95) snprintf(out, 8, ".%d", (int)lround(10 * value));
    else snprintf(out, 8, "%.0f", value);
    return out;
}

enum {
    MARGIN = SVG_MARGIN,
    PANEL_TITLE = 40,
    PANEL_FOOT = 46,
    LAYER_LABELS = 46,
    PANEL_SPACE = 26,
    BAR_SPACE = 96,
    BAR_WIDTH = 16
};

typedef struct svg_layout {
    int cell_width, cell_height, panel_width, panel_height, column_step, width, height;
} svg_layout;

static int clamp(int value, int low, int high)
{
    return value < low ? low : value > high ? high : value;
}

static svg_layout layout_svg(const heatmap *map)
{
    svg_layout l;
    int heads = (int)map->n_heads, layers = (int)map->n_layers;
    l.cell_width = clamp(240 / heads, 8, 40);
    l.cell_height = clamp(640 / layers, 8, 16);
    l.panel_width = clamp(l.cell_width * heads, 152, 1 << 20); // room for the heading
    l.panel_height = l.cell_height * layers;
    l.column_step = LAYER_LABELS + l.panel_width + PANEL_SPACE;
    l.width = 2 * MARGIN + l.column_step * (int)map->n_ratios + BAR_SPACE;
    l.height = MARGIN + PANEL_TITLE + l.panel_height + PANEL_FOOT;
    if (l.height < 200 + 2 * MARGIN) l.height = 200 + 2 * MARGIN; // room for the colour bar
    return l;
}

static void put_panel_cells(const heatmap *map, const svg_layout *l, const double *kept, int x, int y, FILE *out)
{
    bool numbers = l->cell_width >= 20 && l->cell_height >= 11;
    for (uint32_t layer = 0; layer < map->n_layers; layer++) {
        for (uint32_t g = 0; g < map->n_heads; g++) {
            double share = kept[(size_t)layer * map->n_heads + g];
            viridis_rgb c = viridis_at(scale(share));
            int cx = x + (int)g * l->cell_width, cy = y + (int)layer * l->cell_height;
            fprintf(out, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"#%02x%02x%02x\"/>\n", cx, cy,
                    l->cell_width, l->cell_height, (unsigned)c.r, (unsigned)c.g, (unsigned)c.b);
            char text[8];
            if (numbers)
                svg_text(out, cx + l->cell_width / 2.0, cy + l->cell_height / 2.0 + 3.2,
                         viridis_is_light(c) ? "n d" : "n", percent(text, share));
        }
    }
    fprintf(out, "<rect class=\"f\" x=\"%g\" y=\"%g\" width=\"%d\" height=\"%d\"/>\n", x - 0.5, y - 0.5,
            l->cell_width * (int)map->n_heads + 1, l->panel_height + 1);
}

static void put_panel(const heatmap *map, const svg_layout *l, size_t ratio, FILE *out)
{
    const double *kept = map->kept + ratio * map->n_layers * map->n_heads;
    int left = MARGIN + (int)ratio * l->column_step, x = left + LAYER_LABELS, y = MARGIN + PANEL_TITLE;
    char text[96], least[8], most[8];
    range r = panel_range(map, kept);
    snprintf(text, sizeof text, "%.3g %% pruned, kept %s to %s %%", 100 * map->ratios[ratio], percent(least, r.least),
             percent(most, r.most));
    svg_text(out, x, y - 8, "t", text);
    put_panel_cells(map, l, kept, x, y, out);

    // Few enough labels that they never touch: one per 24 pixels down, one per 22 across.
    uint32_t step = (uint32_t)clamp((24 + l->cell_height - 1) / l->cell_height, 1, 1000);
    for (uint32_t layer = 0; layer < map->n_layers; layer += step) {
        snprintf(text, sizeof text, "%u", layer);
        svg_text(out, x - 5, y + (layer + 0.5) * l->cell_height + 4, "r", text);
    }
    step = (uint32_t)clamp((22 + l->cell_width - 1) / l->cell_width, 1, 1000);
    for (uint32_t g = 0; g < map->n_heads; g += step) {
        snprintf(text, sizeof text, "%u", g);
        svg_text(out, x + (g + 0.5) * l->cell_width, y + l->panel_height + 14, "m", text);
    }
    svg_text(out, x + l->cell_width * (int)map->n_heads / 2.0, y + l->panel_height + 28, "m sub", "KV head");
    if (ratio > 0) return;
    double middle = y + l->panel_height / 2.0;
    fprintf(out, "<text x=\"%d\" y=\"%g\" class=\"m sub\" transform=\"rotate(-90 %d %g)\">layer</text>\n", left + 12,
            middle, left + 12, middle);
}

static void put_colour_bar(const heatmap *map, const svg_layout *l, FILE *out)
{
    int x = MARGIN + l->column_step * (int)map->n_ratios + 10, y = MARGIN + PANEL_TITLE;
    int height = clamp(l->panel_height, 160, 480);
    fputs("<defs><linearGradient id=\"kept\" x1=\"0\" y1=\"1\" x2=\"0\" y2=\"0\">\n", out);
    for (int i = 0; i <= VIRIDIS_LAST; i++) {
        viridis_rgb c = viridis_at(i / (double)VIRIDIS_LAST);
        fprintf(out, "<stop offset=\"%g\" stop-color=\"#%02x%02x%02x\"/>\n", i / (double)VIRIDIS_LAST, (unsigned)c.r,
                (unsigned)c.g, (unsigned)c.b);
    }
    fprintf(out,
            "</linearGradient></defs>\n<rect class=\"f\" style=\"fill:url(#kept)\" x=\"%d\" y=\"%d\" width=\"%d\" "
            "height=\"%d\"/>\n",
            x, y, BAR_WIDTH, height);
    svg_text(out, x, y - 8, "t", "kept");
    for (int i = 0; i < N_TICKS; i++) {
        char text[16];
        double at = y + height * (1 - scale(TICKS[i]));
        fprintf(out, "<path class=\"f\" d=\"M%d %g h5\"/>\n", x + BAR_WIDTH, at);
        snprintf(text, sizeof text, "%.0f %%", 100 * TICKS[i]);
        svg_text(out, x + BAR_WIDTH + 8, at + 4, "t", text);
    }
}

void heatmap_svg(const heatmap *map, FILE *out)
{
    svg_layout l = layout_svg(map);
    fprintf(out, "<svg viewBox=\"0 0 %d %d\" role=\"img\">\n<title>", l.width, l.height);
    html_put(out, map->title);
    fputs("</title>\n", out);
    for (size_t ratio = 0; ratio < map->n_ratios; ratio++) put_panel(map, &l, ratio, out);
    put_colour_bar(map, &l, out);
    svg_end(out);
}
