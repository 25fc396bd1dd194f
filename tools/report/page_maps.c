// Head maps of the page: what every KV head keeps.
#include "formats/need.h"
#include "tools/report/html.h"
#include "tools/report/page_sections.h"
#include "tools/report/viridis.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DATA_MAX = 900000, BYTES_PER_HEAD = 8 }; // of the maps in the page: a kept share and a deviation, with commas

static const double FIRST_SHOWN = 0.8;

// The square root spreads the small shares, as `plot` does.
static double place(double kept)
{
    return sqrt(fmin(1, fmax(0, kept)));
}

static void put_cell(FILE *out, double kept, bool unsure)
{
    viridis_rgb c = viridis_at(place(kept));
    char text[16];
    if (kept > 0.0005 && kept < 0.0095) snprintf(text, sizeof text, ".%ld", lround(1000 * kept));
    else snprintf(text, sizeof text, "%.0f", 100 * kept);
    fprintf(out, "<td class=\"%s%s\" style=\"background:#%02x%02x%02x\">%s</td>",
            viridis_is_light(c) ? "light" : "dark", unsure ? " unsure" : "", (unsigned)c.r, (unsigned)c.g,
            (unsigned)c.b, text);
}

static void put_map(page_writer *w, size_t index)
{
    const page_table *t = &w->p->tables[index];
    const kvb_info *info = kvb_table_info(t->file);
    kvb_row row = page_row_near(t->file, FIRST_SHOWN);
    fprintf(w->out, "<figure class=\"map\"><figcaption>");
    page_put_name(w, t);
    fprintf(w->out,
            "</figcaption>\n<p class=\"note\"><output data-of=\"%zu\">%.4g&nbsp;%% pruned</output></p>\n<div "
            "class=\"wide\"><table class=\"heat\" data-table=\"%zu\"><thead><tr><th>layer</th>",
            index, 100 * row.ratio, index);
    for (uint32_t g = 0; g < info->n_kv_heads; g++) fprintf(w->out, "<th>%u</th>", g);
    fputs("</tr></thead><tbody>\n", w->out);
    for (uint32_t l = 0; l < info->n_layers; l++) {
        fprintf(w->out, "<tr><th>%u</th>", l);
        for (uint32_t g = 0; g < info->n_kv_heads; g++) {
            size_t h = (size_t)l * info->n_kv_heads + g;
            double kept = 1 - row.prune_ratio[h];
            put_cell(w->out, kept, t->knows_deviation && row.std[h] > kept);
        }
        fputs("</tr>\n", w->out);
    }
    fputs("</tbody></table></div></figure>\n", w->out);
}

static void put_legend(FILE *out)
{
    static const double shares[] = {0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1};
    fputs("<p class=\"legend\">share of its tokens that a KV head keeps: ", out);
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++) {
        viridis_rgb c = viridis_at(place(shares[i]));
        fprintf(out, "<span class=\"%s\" style=\"background:#%02x%02x%02x\">%.0f&nbsp;%%</span>",
                viridis_is_light(c) ? "light" : "dark", (unsigned)c.r, (unsigned)c.g, (unsigned)c.b, 100 * shares[i]);
    }
    fputs(" <span class=\"unsure key\">framed</span> not certain, see below</p>\n", out);
}

void page_put_maps(page_writer *w)
{
    fputs("<section id=\"maps\"><h2>Who keeps how much</h2>\n"
          "<p>Each cell is one KV head: layers go down, heads go right. The number is the per cent of its tokens that "
          "the head keeps; where all cells look alike, an even split would do as well.</p>\n"
          "<p id=\"slider\" hidden><label>pruned: <input type=\"range\" min=\"0\" max=\"0\" value=\"0\"></label> "
          "<output></output></p>\n",
          w->out);
    put_legend(w->out);
    fputs("<div class=\"maps\">\n", w->out);
    for (size_t i = 0; i < w->p->n_tables; i++) put_map(w, i);
    fputs("</div></section>\n", w->out);
}

// ---- The same at all ratios, for the script -------------------------------------------------------------------------

// Every how manieth row goes into the page, so that large models fit: 1, 2, 5, 10, 20 ...
static uint32_t row_step(const page *p)
{
    static const uint32_t steps[] = {1, 2, 5, 10, 20, 50};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        double bytes = 0;
        for (size_t t = 0; t < p->n_tables; t++) {
            const kvb_info *info = kvb_table_info(p->tables[t].file);
            bytes += (double)info->n_layers * info->n_kv_heads * BYTES_PER_HEAD * (info->n_rows / steps[i] + 1);
        }
        if (bytes <= DATA_MAX) return steps[i];
    }
    return KVB_MAX_KV_HEADS; // the row that is shown without the script
}

// Whole thousandths as "[1000,352,...]".
static cJSON *thousandths(const double *values, size_t n, bool from_one)
{
    char *text = need(n * 24 + 3, 1, "characters"), *at = text;
    *at++ = '[';
    for (size_t i = 0; i < n; i++)
        at += sprintf(at, "%s%ld", i ? "," : "", lround(1000 * fmin(9, from_one ? 1 - values[i] : values[i])));
    strcpy(at, "]");
    cJSON *list = cJSON_CreateRaw(text);
    free(text);
    return list;
}

static cJSON *table_data(const page_table *t, uint32_t step)
{
    const kvb_info *info = kvb_table_info(t->file);
    size_t heads = (size_t)info->n_layers * info->n_kv_heads;
    cJSON *o = cJSON_CreateObject(), *ratios = cJSON_AddArrayToObject(o, "ratios"),
          *kept = cJSON_AddArrayToObject(o, "kept"),
          *deviation = t->knows_deviation ? cJSON_AddArrayToObject(o, "deviation") : NULL;
    double shown = page_row_near(t->file, FIRST_SHOWN).ratio;
    cJSON_AddNumberToObject(o, "shown", shown);
    for (uint32_t r = 0; r < info->n_rows; r++) {
        kvb_row row;
        // Whole steps of the per cent, so that 50, 80 and 90 % are among them.
        if (kvb_table_row(t->file, r, &row, NULL) != KVB_OK) continue;
        bool wanted = info->n_rows == 99 ? (r + 1) % step == 0 : r % step == 0;
        if (!wanted && row.ratio != shown) continue;
        cJSON_AddItemToArray(ratios, cJSON_CreateNumber(row.ratio));
        cJSON_AddItemToArray(kept, thousandths(row.prune_ratio, heads, true));
        if (deviation) cJSON_AddItemToArray(deviation, thousandths(row.std, heads, false));
    }
    return o;
}

cJSON *page_map_data(const page *p)
{
    uint32_t step = row_step(p);
    cJSON *data = cJSON_CreateObject(), *tables = cJSON_AddArrayToObject(data, "tables"),
          *colours = cJSON_AddArrayToObject(data, "colours"), *light = cJSON_AddArrayToObject(data, "light");
    for (int i = 0; i <= 100; i++) {
        viridis_rgb c = viridis_at(i / 100.0);
        char text[16];
        snprintf(text, sizeof text, "#%02x%02x%02x", (unsigned)c.r, (unsigned)c.g, (unsigned)c.b);
        cJSON_AddItemToArray(colours, cJSON_CreateString(text));
        cJSON_AddItemToArray(light, cJSON_CreateBool(viridis_is_light(c)));
    }
    for (size_t i = 0; i < p->n_tables; i++) cJSON_AddItemToArray(tables, table_data(&p->tables[i], step));
    return data;
}
