#include "tools/cmd/plot_command.h"
#include <string.h>

enum { PANEL_WIDTH = 560, PANEL_ALONE = 760, PANEL_HEIGHT = 300, HEADER = 72 };

plot_sheet plot_layout(const plot_command *c, size_t n_wide, size_t n_high)
{
    int wide = (int)n_wide, high = (int)n_high;
    plot_sheet s = {n_wide, n_high, c->width, c->height, n_wide == 1 ? PANEL_ALONE : PANEL_WIDTH, PANEL_HEIGHT};
    if (s.width) s.panel_width = (s.width - SVG_MARGIN) / wide - SVG_MARGIN;
    else s.width = SVG_MARGIN + wide * (s.panel_width + SVG_MARGIN);
    if (s.height) s.panel_height = (s.height - HEADER) / high - SVG_MARGIN;
    else s.height = HEADER + high * (s.panel_height + SVG_MARGIN);
    return s;
}

void plot_panel(FILE *out, const plot_sheet *s, size_t i, const svg_chart *chart)
{
    svg_chart_put(out, chart, SVG_MARGIN + (int)(i % s->n_wide) * (s->panel_width + SVG_MARGIN),
                  HEADER + (int)(i / s->n_wide) * (s->panel_height + SVG_MARGIN), s->panel_width, s->panel_height);
}

bool plot_wants(const plot_command *c, const char *name)
{
    for (size_t i = 0; i < c->series.count; i++)
        if (strcmp(c->series.items[i], name) == 0) return true;
    return c->series.count == 0;
}
