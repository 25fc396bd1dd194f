// A chart of the page, and a table of its numbers.
#pragma once
#include "tools/report/page_sections.h"
#include "tools/report/svg.h"

// Writes a figure with the chart's title, its picture, the names of its lines, and a table that can be opened; with
// many points that has every tenth of the x axis only. note: a sentence below the title, or NULL. The x axis is shares;
// at most SVG_SERIES_MAX lines are drawn, and the table has all.
void page_put_chart(page_writer *w, const svg_chart *chart, const char *note);
