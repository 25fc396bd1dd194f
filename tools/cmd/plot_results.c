// Pictures of results: KL, agreement, scores or held-out losses against the ratio, a line per allocator.
#include "formats/atomic_file.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "tools/cmd/plot_command.h"
#include "tools/report/results_grid.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DOCUMENTS_MAX = 16, PANELS_MAX = 64, TITLE_SIZE = 320 };

// What a chart is of: rows of one document, method and task, and a column of them.
typedef struct panel {
    grid_rows from;
    const char *column;
} panel;

typedef struct sheet {
    results_document documents[DOCUMENTS_MAX];
    size_t n_documents;
    panel panels[PANELS_MAX];
    size_t n_panels;
} sheet;

static const struct {
    const char *column, *title;
    svg_unit unit;
    bool logarithmic;
} KNOWN[] = {{"kl", "KL to the full cache, nats per token", SVG_NUMBERS, true},
             {"top1", "likeliest token as with the full cache", SVG_SHARES, false},
             {"nll", "NLL of the text, nats per token", SVG_NUMBERS, false},
             {"score", "share solved", SVG_SHARES, false},
             {"loss", "loss", SVG_SHARES, false},
             {"table_loss", "loss of the table", SVG_SHARES, false}};
enum { N_KNOWN = sizeof KNOWN / sizeof *KNOWN };

static size_t known(const char *column)
{
    size_t i = 0;
    while (i < N_KNOWN && strcmp(KNOWN[i].column, column) != 0) i++;
    return i;
}

static void add_panel(sheet *s, const cJSON *rows, const cJSON *row, const char *column)
{
    const char *task = results_text(row, "task");
    const panel p = {{.rows = rows, .method = results_method(row), .task = *task ? task : NULL}, column};
    for (size_t i = 0; i < s->n_panels; i++) {
        const grid_rows *o = &s->panels[i].from;
        if (o->rows == rows && strcmp(o->method, p.from.method) == 0 && strcmp(o->task ? o->task : "", task) == 0 &&
            strcmp(s->panels[i].column, column) == 0)
            return;
    }
    if (s->n_panels < PANELS_MAX && grid_has_row(&p.from, row)) s->panels[s->n_panels++] = p;
}

// A chart of every wanted column for every method and task of every document.
static kvb_status find_panels(const plot_command *c, sheet *s, kvb_error *err)
{
    static const char *const usual[] = {"kl", "top1", "score", "change"};
    size_t n = c->columns.count ? c->columns.count : sizeof usual / sizeof *usual;
    for (size_t d = 0; d < s->n_documents; d++) {
        const cJSON *row;
        cJSON_ArrayForEach(row, s->documents[d].rows)
        {
            // Rows of the full cache belong to no allocator.
            for (size_t k = 0; k < n && *results_text(row, "allocator"); k++) {
                const char *column = c->columns.count ? c->columns.items[k] : usual[k];
                if (isnan(results_number(row, column))) continue;
                // Held-out losses are known by their change against the published table.
                bool held_out = !c->columns.count && strcmp(column, "change") == 0;
                add_panel(s, s->documents[d].rows, row, held_out ? "loss" : column);
            }
        }
    }
    if (s->n_panels > 0) return KVB_OK;
    return kvb_fail(
        err, KVB_ARGUMENT,
        "%s: no row of an allocator has a column %s; give what eval, task or solve --holdout wrote as JSON, "
        "and --column NAME of docs/output.md",
        c->paths[0], c->columns.count ? c->columns.items[0] : "kl, top1 or score");
}

// Divided by uniform's: KL has a column of its own for that, with intervals that know that both are of the same texts.
static results_grid *make_grid(const plot_command *c, const panel *p)
{
    bool relative = c->axis == AXIS_RELATIVE;
    bool is_kl = strcmp(p->column, "kl") == 0;
    results_grid *g = results_grid_make(&p->from, relative && is_kl ? "kl_to_uniform" : p->column);
    if (!relative || is_kl) return g;
    size_t base = grid_find_name(g, "uniform");
    g->has_intervals = false;
    for (size_t k = 0; k < g->n_ratios; k++) {
        double by = base < g->n_names ? g->value[base][k] : NAN;
        for (size_t i = 0; i < g->n_names; i++) g->value[i][k] /= by;
    }
    return g;
}

static void draw_panel(const plot_command *c, const plot_sheet *layout, const sheet *s, size_t i, const results_grid *g,
                       FILE *out)
{
    const panel *p = &s->panels[i];
    svg_series series[SVG_SERIES_MAX];
    size_t used = 0, k = known(p->column);
    bool relative = c->axis == AXIS_RELATIVE;
    char title[TITLE_SIZE];
    for (size_t n = 0; n < g->n_names && used < SVG_SERIES_MAX; n++)
        if (plot_wants(c, g->names[n]))
            series[used++] = (svg_series){.name = g->names[n],
                                          .y = g->value[n],
                                          .low = g->has_intervals ? g->low[n] : NULL,
                                          .high = g->has_intervals ? g->high[n] : NULL};
    snprintf(title, sizeof title, "%.60s%s%.80s: %.80s%s", p->from.task ? p->from.task : "", p->from.task ? ", " : "",
             p->from.method, k < N_KNOWN ? KNOWN[k].title : p->column, relative ? ", of the even split's" : "");
    const svg_chart chart = {.title = title,
                             .x_label = "per cent pruned",
                             .x = g->ratios,
                             .n = g->n_ratios,
                             .n_series = used,
                             .series = series,
                             .logarithmic =
                                 c->axis == AXIS_LOG || (c->axis == AXIS_OWN && k < N_KNOWN && KNOWN[k].logarithmic),
                             .from_low = k < N_KNOWN && KNOWN[k].unit == SVG_NUMBERS && strcmp(p->column, "nll") == 0,
                             .y_unit = relative || k == N_KNOWN ? SVG_NUMBERS : KNOWN[k].unit};
    plot_panel(out, layout, i, &chart);
}

static kvb_status draw(const plot_command *c, const sheet *s, kvb_error *err)
{
    atomic_file out;
    kvb_status status = atomic_file_begin(&out, c->output, err);
    if (status != KVB_OK) return status;
    size_t wide = s->n_panels > 1 ? 2 : 1;
    plot_sheet layout = plot_layout(c, wide, (s->n_panels + wide - 1) / wide);
    svg_begin(out.stream, layout.width, layout.height, c->title ? c->title : "What evicting costs",
              "bands: 95 % intervals");
    for (size_t i = 0; i < s->n_panels && status == KVB_OK; i++) {
        results_grid *g = make_grid(c, &s->panels[i]);
        if (g->n_ratios == 0)
            status = kvb_fail(err, KVB_ARGUMENT, "%s: column %s has no values beside the even split's", c->paths[0],
                              s->panels[i].column);
        else draw_panel(c, &layout, s, i, g, out.stream);
        free(g);
    }
    svg_end(out.stream);
    if (status == KVB_OK) return atomic_file_commit(&out, err);
    atomic_file_abandon(&out);
    return status;
}

kvb_status plot_results(const plot_command *c, kvb_error *err)
{
    if (c->n_paths > DOCUMENTS_MAX)
        return kvb_fail(err, KVB_ARGUMENT, "expected at most %d documents, found %zu", DOCUMENTS_MAX, c->n_paths);
    sheet *s = need(1, sizeof *s, "pictures");
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < c->n_paths && status == KVB_OK; i++) {
        status = results_open(&s->documents[i], c->paths[i], err);
        if (status == KVB_OK) s->n_documents++;
    }
    if (status == KVB_OK) status = find_panels(c, s, err);
    if (status == KVB_OK) status = draw(c, s, err);
    for (size_t i = 0; i < s->n_documents; i++) results_close(&s->documents[i]);
    free(s);
    return status;
}
