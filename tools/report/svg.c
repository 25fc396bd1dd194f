#include "tools/report/svg.h"
#include "tools/report/viridis.h"

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
    svg_begin_sized(out, width, height, width, height, title, subtitle);
}

void svg_begin_sized(FILE *out, int width, int height, int shown_width, int shown_height, const char *title,
                     const char *subtitle)
{
    fprintf(out,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" "
            "role=\"img\">\n<title>",
            width, height, shown_width, shown_height);
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

// ---- Coloured tables ------------------------------------------------------------------------------------------------

enum { TITLE = 24 }; // height of a heading

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
