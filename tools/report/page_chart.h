// A chart of the page: a table of its numbers, and the same for the script that draws it.
#pragma once
#include "tools/report/page_sections.h"
#include "tools/report/svg.h"

// Writes a figure with the chart's title, the place where the script draws, and a table that can be opened; with many
// points it has every tenth of the x axis only. note: a sentence below the title, or NULL. The x axis is shares; the
// script draws at most GRID_NAMES_MAX lines.
void page_put_chart(page_writer *w, const svg_chart *chart, const char *note);
