// Pictures of tables: head maps, pruned shares of all heads as lines, and losses.
#include "formats/atomic_file.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "tools/cmd/plot_command.h"
#include "tools/report/heatmap.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TABLES_MAX = 64, NAME_SIZE = 160 };

typedef struct plot {
    plot_command *c;
    kvb_table *tables[TABLES_MAX];
    char names[TABLES_MAX][NAME_SIZE];
    size_t n_tables;
    double *kept; // [n_tables, n_ratios, n_layers, n_heads]
} plot;

static bool has_every_per_cent(const kvb_table *table)
{
    return !kvb_table_metadata(table, "n_rows");
}

// Without a wish: what most tables are looked at for; or all rows of the first table that was solved for few ratios.
static kvb_status choose_ratios(plot *p, kvb_error *err)
{
    static const double usual[] = {0.5, 0.8, 0.9};
    size_t own = 0;
    while (own < p->n_tables && has_every_per_cent(p->tables[own])) own++;
    p->c->n_ratios = own < p->n_tables ? kvb_table_info(p->tables[own])->n_rows : sizeof usual / sizeof *usual;
    for (size_t r = 0; r < p->c->n_ratios; r++) {
        kvb_row row = {.ratio = usual[r % 3]};
        kvb_status status = own < p->n_tables ? kvb_table_row(p->tables[own], (uint32_t)r, &row, err) : KVB_OK;
        if (status != KVB_OK) return status;
        p->c->ratios[r] = row.ratio;
    }
    return KVB_OK;
}

// The row of a ratio, to the six digits of a per cent that messages show.
static kvb_status find_row(const kvb_table *table, const char *path, double ratio, kvb_row *out, kvb_error *err)
{
    enum { LISTED = 12 };
    uint32_t n = kvb_table_info(table)->n_rows;
    char list[16 * LISTED + 8] = "";
    size_t used = 0;
    for (uint32_t r = 0; r < n; r++) {
        kvb_status status = kvb_table_row(table, r, out, err);
        if (status != KVB_OK || fabs(out->ratio - ratio) <= 1e-6) return status;
        if (r < LISTED)
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%.6g", r ? ", " : "", 100 * out->ratio);
    }
    if (has_every_per_cent(table))
        return kvb_fail(err, KVB_ARGUMENT, "%s: no row is for %.6g %% pruned; it has whole per cents from 1 to 99",
                        path, 100 * ratio);
    return kvb_fail(err, KVB_ARGUMENT, "%s: no row is for %.6g %% pruned; it was solved for %s%s %%", path, 100 * ratio,
                    list, n > LISTED ? ", ..." : "");
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static kvb_status open_tables(plot *p, kvb_error *err)
{
    char **paths = p->c->paths;
    for (; p->n_tables < p->c->n_paths; p->n_tables++) {
        const char *path = paths[p->n_tables];
        kvb_status status = kvb_table_open(&p->tables[p->n_tables], path, NULL, err);
        if (status != KVB_OK) return status;
        const kvb_info *first = kvb_table_info(p->tables[0]), *info = kvb_table_info(p->tables[p->n_tables]);
        if (info->n_layers == first->n_layers && info->n_kv_heads == first->n_kv_heads) continue;
        kvb_table_close(p->tables[p->n_tables]);
        return kvb_fail(
            err, KVB_MISMATCH,
            "%s: expected %u layers x %u KV heads as in %s, found %u x %u; plot tables of different models one by one",
            path, first->n_layers, first->n_kv_heads, paths[0], info->n_layers, info->n_kv_heads);
    }
    return KVB_OK;
}

// A table is called by its metric; the file's name joins when that is not enough to tell two tables apart.
static void name_tables(plot *p)
{
    for (size_t i = 0; i < p->n_tables; i++) {
        const kvb_info *info = kvb_table_info(p->tables[i]);
        bool shared = false;
        for (size_t j = 0; j < p->n_tables; j++)
            if (j != i && strcmp(info->metric, kvb_table_info(p->tables[j])->metric) == 0) shared = true;
        snprintf(p->names[i], NAME_SIZE, shared ? "%.70s (%.80s)" : "%.70s", info->metric, base_name(p->c->paths[i]));
    }
}

static kvb_status read_kept(plot *p, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(p->tables[0]);
    size_t heads = (size_t)info->n_layers * info->n_kv_heads, i = 0;
    // The runtime has bounded the heads of a table by the size of its file, and both other factors are below 100.
    p->kept = need(p->n_tables * p->c->n_ratios * heads, sizeof *p->kept, "shares");
    for (size_t t = 0; t < p->n_tables; t++) {
        for (size_t r = 0; r < p->c->n_ratios; r++) {
            kvb_row row;
            kvb_status status = find_row(p->tables[t], p->c->paths[t], p->c->ratios[r], &row, err);
            if (status != KVB_OK) return status;
            for (size_t h = 0; h < heads; h++) p->kept[i++] = 1 - row.prune_ratio[h];
        }
    }
    return KVB_OK;
}

static void describe(const plot *p, char title[NAME_SIZE], char subtitle[NAME_SIZE])
{
    const kvb_info *first = kvb_table_info(p->tables[0]);
    bool same_model = true;
    for (size_t i = 1; i < p->n_tables; i++)
        if (strcmp(first->model_id, kvb_table_info(p->tables[i])->model_id) != 0) same_model = false;
    snprintf(title, NAME_SIZE, p->c->title ? "%.140s" : "KV-cache budgets: %.120s",
             p->c->title        ? p->c->title
             : !same_model      ? "several models"
             : *first->model_id ? first->model_id
                                : "unnamed model");
    uint32_t least = UINT32_MAX, most = 0;
    for (size_t i = 0; i < p->n_tables; i++) {
        const kvb_info *info = kvb_table_info(p->tables[i]);
        for (uint32_t j = 0; j < info->n_calibration_tokens; j++) {
            uint32_t tokens = info->calibration_tokens[j];
            if (tokens < least) least = tokens;
            if (tokens > most) most = tokens;
        }
    }
    char tokens[32];
    snprintf(tokens, sizeof tokens, least == most ? "%u" : "%u to %u", least, most);
    snprintf(subtitle, NAME_SIZE, "%u layers x %u KV heads; calibrated on contexts of %s tokens", first->n_layers,
             first->n_kv_heads, tokens);
}

// ---- Maps -----------------------------------------------------------------------------------------------------------

static kvb_status draw_maps(plot *p, FILE *out, kvb_error *err)
{
    char title[NAME_SIZE], subtitle[NAME_SIZE];
    const char *names[TABLES_MAX];
    const kvb_info *info = kvb_table_info(p->tables[0]);
    kvb_status status = read_kept(p, err);
    if (status != KVB_OK) return status;
    describe(p, title, subtitle);
    for (size_t i = 0; i < p->n_tables; i++) names[i] = p->names[i];
    const heatmap map = {.n_layers = info->n_layers,
                         .n_heads = info->n_kv_heads,
                         .n_tables = p->n_tables,
                         .n_ratios = p->c->n_ratios,
                         .title = title,
                         .subtitle = subtitle,
                         .table_names = names,
                         .ratios = p->c->ratios,
                         .shown_width = p->c->width,
                         .shown_height = p->c->height,
                         .kept = p->kept};
    if (p->c->output) heatmap_svg(&map, out);
    if (!p->c->output || p->c->terminal) {
        heatmap_terminal t = heatmap_detect(STDOUT_FILENO);
        heatmap_print(&map, &t, stdout);
    }
    return KVB_OK;
}

// ---- Pruned shares of all heads, as in the paper's figure 2b --------------------------------------------------------

static kvb_status draw_heads(plot *p, FILE *out, kvb_error *err)
{
    char title[NAME_SIZE], subtitle[NAME_SIZE], heading[64];
    const kvb_info *info = kvb_table_info(p->tables[0]);
    size_t n = (size_t)info->n_layers * info->n_kv_heads;
    kvb_status status = read_kept(p, err);
    if (status != KVB_OK) return status;
    double *head = need(n, sizeof *head, "heads");
    for (size_t h = 0; h < n; h++) head[h] = (double)h;
    for (size_t i = 0; i < p->n_tables * p->c->n_ratios * n; i++) p->kept[i] = 1 - p->kept[i];
    describe(p, title, subtitle);
    plot_sheet sheet = plot_layout(p->c, 1, p->c->n_ratios);
    svg_begin(out, sheet.width, sheet.height, title, subtitle);
    for (size_t r = 0; r < p->c->n_ratios; r++) {
        svg_series series[SVG_SERIES_MAX];
        size_t used = 0;
        for (size_t t = 0; t < p->n_tables && used < SVG_SERIES_MAX; t++)
            if (plot_wants(p->c, p->names[t]))
                series[used++] = (svg_series){.name = p->names[t], .y = p->kept + (t * p->c->n_ratios + r) * n};
        snprintf(heading, sizeof heading, "%.4g %% pruned: what each head gives up", 100 * p->c->ratios[r]);
        const svg_chart chart = {.title = heading,
                                 .x_label = "KV head, layer after layer",
                                 .x = head,
                                 .n = n,
                                 .n_series = used,
                                 .series = series,
                                 .x_unit = SVG_NUMBERS,
                                 .y_unit = SVG_SHARES};
        plot_panel(out, &sheet, r, &chart);
    }
    svg_end(out);
    free(head);
    return KVB_OK;
}

// ---- Losses ---------------------------------------------------------------------------------------------------------

typedef struct loss_line {
    char name[NAME_SIZE];
    double y[PLOT_RATIOS_MAX];
} loss_line;

// What a table's row says: its own loss, or with `of_bound` how many times the least possible one that is.
static double loss_of(const kvb_row *row, bool of_bound)
{
    if (!of_bound) return row->table_loss;
    return row->lower_bound > 0 ? row->table_loss / row->lower_bound : NAN;
}

// Lines of all tables over the ratios of the first one. One table alone has its bound and its loss as solved too.
static size_t fill_losses(const plot *p, bool of_bound, loss_line lines[SVG_SERIES_MAX], double x[PLOT_RATIOS_MAX])
{
    size_t used = 0, n = kvb_table_info(p->tables[0])->n_rows;
    bool alone = p->n_tables == 1 && !of_bound;
    for (size_t t = 0; t < p->n_tables && used < SVG_SERIES_MAX; t++) {
        const char *name = alone ? "this table" : p->names[t];
        if (!plot_wants(p->c, name)) continue;
        loss_line *line = &lines[used++];
        snprintf(line->name, NAME_SIZE, "%s", name);
        for (size_t r = 0; r < n; r++) {
            kvb_row first = {0}, row = {0};
            (void)kvb_table_row(p->tables[0], (uint32_t)r, &first, NULL); // in range
            x[r] = first.ratio;
            bool found = find_row(p->tables[t], "", first.ratio, &row, NULL) == KVB_OK;
            line->y[r] = found ? loss_of(&row, of_bound) : NAN;
        }
    }
    static const char *const more[] = {"as solved", "lower bound"};
    for (size_t k = 0; alone && k < 2; k++) {
        if (!plot_wants(p->c, more[k])) continue;
        loss_line *line = &lines[used++];
        snprintf(line->name, NAME_SIZE, "%s", more[k]);
        for (size_t r = 0; r < n; r++) {
            kvb_row row = {0};
            (void)kvb_table_row(p->tables[0], (uint32_t)r, &row, NULL);
            line->y[r] = k == 0 ? row.loss : row.lower_bound;
        }
    }
    return used;
}

static kvb_status draw_losses(plot *p, FILE *out, kvb_error *err)
{
    char title[NAME_SIZE], subtitle[NAME_SIZE];
    double x[PLOT_RATIOS_MAX];
    svg_series series[SVG_SERIES_MAX];
    bool of_bound = p->c->axis == AXIS_RELATIVE;
    for (size_t t = 0; t < p->n_tables; t++) {
        const char *unknown = kvb_table_metadata(p->tables[t], "unknown");
        if (unknown && strstr(unknown, "table_loss"))
            return kvb_fail(err, KVB_ARGUMENT, "%s: the table does not know its losses", p->c->paths[t]);
    }
    loss_line *lines = need(SVG_SERIES_MAX, sizeof *lines, "lines");
    size_t n = fill_losses(p, of_bound, lines, x);
    for (size_t i = 0; i < n; i++) series[i] = (svg_series){.name = lines[i].name, .y = lines[i].y};
    describe(p, title, subtitle);
    const svg_chart chart = {.title = of_bound ? "Loss, as a multiple of the lower bound"
                                               : "Loss, share of all importance that can be lost",
                             .x_label = "per cent pruned",
                             .x = x,
                             .n = kvb_table_info(p->tables[0])->n_rows,
                             .n_series = n,
                             .series = series,
                             .logarithmic = p->c->axis == AXIS_LOG,
                             .from_low = of_bound,
                             .y_unit = of_bound ? SVG_NUMBERS : SVG_SHARES};
    plot_sheet sheet = plot_layout(p->c, 1, 1);
    svg_begin(out, sheet.width, sheet.height, title, subtitle);
    plot_panel(out, &sheet, 0, &chart);
    svg_end(out);
    free(lines);
    return KVB_OK;
}

kvb_status plot_tables(plot_command *c, kvb_error *err)
{
    static const struct {
        const char *kind;
        kvb_status (*draw)(plot *, FILE *, kvb_error *);
    } kinds[] = {{"maps", draw_maps}, {"heads", draw_heads}, {"losses", draw_losses}};
    plot p = {.c = c};
    atomic_file out = {0};
    kvb_status status = open_tables(&p, err);
    if (status == KVB_OK) name_tables(&p);
    if (status == KVB_OK && c->n_ratios == 0) status = choose_ratios(&p, err);
    if (status == KVB_OK && c->output) status = atomic_file_begin(&out, c->output, err);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds && status == KVB_OK; i++)
        if (strcmp(c->kind, kinds[i].kind) == 0) status = kinds[i].draw(&p, out.stream, err);
    if (status == KVB_OK && c->output) status = atomic_file_commit(&out, err);
    atomic_file_abandon(&out);
    for (size_t i = 0; i < p.n_tables; i++) kvb_table_close(p.tables[i]);
    free(p.kept);
    return status;
}
