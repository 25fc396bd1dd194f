#include "tools/report/heatmap.h"
#include "tools/cli.h"
#include "tools/report/svg.h"
#include "tools/report/viridis.h"
#include "tools/terminal.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// Where the colour bar is labelled.
static const double TICKS[] = {0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 1};
enum { N_TICKS = sizeof TICKS / sizeof *TICKS };

// Place of a kept share on the colour bar. The square root spreads the small shares: at 90 % pruned nearly all heads
// keep less than a third, and whether one keeps 1 % or 5 % is what matters.
static double scale(double kept)
{
    return sqrt(fmin(1, fmax(0, kept)));
}

static const double *panel_at(const heatmap *map, size_t table, size_t ratio)
{
    return map->kept + (table * map->n_ratios + ratio) * map->n_layers * map->n_heads;
}

typedef struct range {
    double least, mean, most;
} range;

static range panel_range(const heatmap *map, const double *kept)
{
    size_t n = (size_t)map->n_layers * map->n_heads;
    range r = {1, 0, 0};
    for (size_t i = 0; i < n; i++) {
        r.least = fmin(r.least, kept[i]);
        r.most = fmax(r.most, kept[i]);
        r.mean += kept[i] / (double)n;
    }
    return r;
}

// A share as a percentage of at most three characters: ".4", "7", "42", "100". Fewer than one in a thousand is 0.
static const char *percent(char out[8], double share)
{
    double value = 100 * share;
    if (value > 0.05 && value < 0.95) snprintf(out, 8, ".%d", (int)lround(10 * value));
    else snprintf(out, 8, "%.0f", value);
    return out;
}

// ---- Terminal
// ----------------------------------------------------------------------------------------------------------------

static bool locale_is_utf8(void)
{
    const char *names[] = {"LC_ALL", "LC_CTYPE", "LANG"}; // the first one that is set decides
    for (int i = 0; i < 3; i++) {
        const char *value = getenv(names[i]);
        if (value && *value)
            return strstr(value, "UTF-8") || strstr(value, "utf8") || strstr(value, "UTF8") || strstr(value, "utf-8");
    }
    return false;
}

heatmap_terminal heatmap_detect(int fd)
{
    heatmap_terminal t = {HEATMAP_PLAIN, locale_is_utf8(), cli_terminal_width(fd, 100)};
    if (!cli_colour_wanted(fd)) return t;
    const char *colorterm = getenv("COLORTERM");
    bool truecolour = colorterm && (strcmp(colorterm, "truecolor") == 0 || strcmp(colorterm, "24bit") == 0);
    t.colours = truecolour ? HEATMAP_TRUECOLOUR : HEATMAP_256;
    return t;
}

// The 256 colours of xterm hold no viridis; these come closest among those that get steadily lighter.
static const int XTERM[VIRIDIS_LAST + 1] = {53, 54, 24, 31, 36, 71, 77, 113, 149, 190, 226};

// Prints the escape sequence for the foreground (38) or background (48) colour of a share.
static void put_colour(FILE *out, const heatmap_terminal *t, int layer, double kept)
{
    double position = scale(kept);
    viridis_rgb c = viridis_at(position);
    if (t->colours == HEATMAP_TRUECOLOUR) terminal_sequence(out, "\033[%d;2;%d;%d;%dm", layer, c.r, c.g, c.b);
    else terminal_sequence(out, "\033[%d;5;%dm", layer, XTERM[lround(position * VIRIDIS_LAST)]);
}

typedef struct terminal_layout {
    int cell_width, layers_per_line, panel_width, panels_per_line;
} terminal_layout;

enum { LABEL_WIDTH = 4, PANEL_GAP = 2, PANEL_MIN = 10 };

static terminal_layout layout_terminal(const heatmap *map, const heatmap_terminal *t)
{
    terminal_layout l = {4, 1, 0, 1};
    if (t->colours != HEATMAP_PLAIN) {
        l.cell_width = LABEL_WIDTH + 2 * (int)map->n_heads <= t->columns ? 2 : 1;
        l.layers_per_line = t->blocks ? 2 : 1;
    }
    l.panel_width = l.cell_width * (int)map->n_heads;
    if (l.panel_width < PANEL_MIN) l.panel_width = PANEL_MIN; // room for the heading
    int fit = (t->columns - LABEL_WIDTH + PANEL_GAP) / (l.panel_width + PANEL_GAP);
    if (fit > 1) l.panels_per_line = fit;
    // Tables stay together: whole tables side by side, or one table with its ratios broken over lines.
    int ratios = (int)map->n_ratios;
    if (l.panels_per_line > ratios) l.panels_per_line -= l.panels_per_line % ratios;
    return l;
}

static void print_panel_line(const heatmap *map, const heatmap_terminal *t, const terminal_layout *l,
                             const double *kept, uint32_t layer, FILE *out)
{
    for (uint32_t g = 0; g < map->n_heads; g++) {
        double upper = kept[(size_t)layer * map->n_heads + g];
        if (t->colours == HEATMAP_PLAIN) {
            char text[8];
            fprintf(out, "%*s", l->cell_width, percent(text, upper));
            continue;
        }
        put_colour(out, t, l->layers_per_line == 2 ? 38 : 48, upper);
        if (l->layers_per_line == 1) {
            fprintf(out, "%*s", l->cell_width, "");
            continue;
        }
        bool lower = layer + 1 < map->n_layers;
        if (lower) put_colour(out, t, 48, kept[(size_t)(layer + 1) * map->n_heads + g]);
        else terminal_sequence(out, "\033[49m");
        for (int i = 0; i < l->cell_width; i++) fputs("\u2580", out); // upper half block
    }
    if (t->colours != HEATMAP_PLAIN) terminal_sequence(out, "\033[0m");
}

// The names of the tables over their panels, then what is pruned, then the least and the most that a head keeps.
static void print_headings(const heatmap *map, const terminal_layout *l, size_t first, size_t count, FILE *out)
{
    for (int line = 0; line < 3; line++) {
        fprintf(out, "%*s", LABEL_WIDTH, "");
        for (size_t i = first, span; i < first + count; i += span) {
            char text[64], least[8], most[8];
            size_t table = i / map->n_ratios, ratio = i % map->n_ratios;
            range r = panel_range(map, panel_at(map, table, ratio));
            if (line == 0) snprintf(text, sizeof text, "%s", map->table_names[table]);
            else if (line == 1) snprintf(text, sizeof text, "%.3g%% pruned", 100 * map->ratios[ratio]);
            else snprintf(text, sizeof text, "%s to %s", percent(least, r.least), percent(most, r.most));
            // A table's name may run on over the panels of its other ratios.
            span = line == 0 ? map->n_ratios - ratio : 1;
            if (span > first + count - i) span = first + count - i;
            int room = (int)span * (l->panel_width + PANEL_GAP) - PANEL_GAP;
            bool last = i + span == first + count; // no spaces at the end of a line
            fprintf(out, "%-*.*s%*s", last ? 0 : room, room, text, last ? 0 : PANEL_GAP, "");
        }
        fputc('\n', out);
    }
}

// One line of panels. Panels are numbered through all tables and ratios.
static void print_panels(const heatmap *map, const heatmap_terminal *t, const terminal_layout *l, size_t first,
                         size_t count, FILE *out)
{
    print_headings(map, l, first, count, out);
    for (uint32_t layer = 0; layer < map->n_layers; layer += (uint32_t)l->layers_per_line) {
        fprintf(out, "%*u ", LABEL_WIDTH - 1, layer);
        for (size_t i = first; i < first + count; i++) {
            print_panel_line(map, t, l, panel_at(map, i / map->n_ratios, i % map->n_ratios), layer, out);
            int pad = l->panel_width - l->cell_width * (int)map->n_heads + PANEL_GAP;
            if (i + 1 < first + count) fprintf(out, "%*s", pad, "");
        }
        fputc('\n', out);
    }
}

static void print_legend(const heatmap_terminal *t, FILE *out)
{
    fprintf(out, "%*s", LABEL_WIDTH, "");
    if (t->colours == HEATMAP_PLAIN) {
        fputs("each number: percent of its tokens that a KV head keeps; a row is a layer, a column a KV head\n", out);
        return;
    }
    fputs("share of its tokens that a KV head keeps: ", out);
    for (int i = 0; i < N_TICKS; i++) {
        put_colour(out, t, 48, TICKS[i]);
        fputs("   ", out);
        terminal_sequence(out, "\033[0m");
        fprintf(out, " %.0f%%  ", 100 * TICKS[i]);
    }
    fprintf(out,
            "\n%*sa row is a layer%s, a column a KV head; in the headings: what is pruned, percent kept at least and "
            "at most\n",
            LABEL_WIDTH, "", t->blocks ? " (two to a line)" : "");
}

void heatmap_print(const heatmap *map, const heatmap_terminal *terminal, FILE *out)
{
    terminal_layout l = layout_terminal(map, terminal);
    fprintf(out, "%s\n%s\n\n", map->title, map->subtitle);
    size_t panels = map->n_tables * map->n_ratios;
    for (size_t first = 0; first < panels;) {
        size_t count = (size_t)l.panels_per_line;
        // A line that cannot hold two tables ends with its table.
        if (count < map->n_ratios && count > map->n_ratios - first % map->n_ratios)
            count = map->n_ratios - first % map->n_ratios;
        if (count > panels - first) count = panels - first;
        print_panels(map, terminal, &l, first, count, out);
        fputc('\n', out);
        first += count;
    }
    print_legend(terminal, out);
}

// ---- SVG
// ---------------------------------------------------------------------------------------------------------------------

enum {
    MARGIN = SVG_MARGIN,
    HEADER = 74,
    PANEL_TITLE = 40,
    PANEL_FOOT = 46,
    LAYER_LABELS = 46,
    PANEL_SPACE = 26,
    BAR_SPACE = 96,
    BAR_WIDTH = 16
};

typedef struct svg_layout {
    int cell_width, cell_height, panel_width, panel_height, column_step, row_step, width, height;
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
    l.row_step = PANEL_TITLE + l.panel_height + PANEL_FOOT;
    l.width = 2 * MARGIN + l.column_step * (int)map->n_ratios + BAR_SPACE;
    if (l.width < 640) l.width = 640; // room for the title
    l.height = MARGIN + HEADER + l.row_step * (int)map->n_tables;
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
            fprintf(out,
                    "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"#%02x%02x%02x\"><title>layer %u, KV "
                    "head %u: %.2f %%</title></rect>\n",
                    cx, cy, l->cell_width, l->cell_height, (unsigned)c.r, (unsigned)c.g, (unsigned)c.b, layer, g,
                    100 * share);
            char text[8];
            if (numbers)
                svg_text(out, cx + l->cell_width / 2.0, cy + l->cell_height / 2.0 + 3.2,
                         viridis_is_light(c) ? "n d" : "n", percent(text, share));
        }
    }
    fprintf(out, "<rect class=\"f\" x=\"%g\" y=\"%g\" width=\"%d\" height=\"%d\"/>\n", x - 0.5, y - 0.5,
            l->cell_width * (int)map->n_heads + 1, l->panel_height + 1);
}

static void put_panel(const heatmap *map, const svg_layout *l, size_t table, size_t ratio, FILE *out)
{
    const double *kept = panel_at(map, table, ratio);
    int left = MARGIN + (int)ratio * l->column_step, x = left + LAYER_LABELS,
        y = MARGIN + HEADER + (int)table * l->row_step + PANEL_TITLE;
    char text[96], least[8], most[8];
    range r = panel_range(map, kept);
    if (ratio == 0) svg_text(out, left, y - 26, "name", map->table_names[table]);
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
    int x = MARGIN + l->column_step * (int)map->n_ratios + 10, y = MARGIN + HEADER + PANEL_TITLE;
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
    svg_begin_sized(out, l.width, l.height, map->shown_width ? map->shown_width : l.width,
                    map->shown_height ? map->shown_height : l.height, map->title, map->subtitle);
    svg_text(out, MARGIN, MARGIN + 51, "sub", "Colour and number: percent of its tokens that a KV head keeps.");
    for (size_t table = 0; table < map->n_tables; table++)
        for (size_t ratio = 0; ratio < map->n_ratios; ratio++) put_panel(map, &l, table, ratio, out);
    put_colour_bar(map, &l, out);
    svg_end(out);
}
