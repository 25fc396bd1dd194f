// Charts of the page: losses of the tables, what eval and task measured, held-out losses.
#include "tools/report/html.h"
#include "tools/report/page_chart.h"
#include "tools/report/page_sections.h"
#include "tools/report/results_grid.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { METHODS_MAX = 64, TITLE_SIZE = 320 };

// ---- Losses of a table ----------------------------------------------------------------------------------------------

typedef struct losses {
    double ratio[99], table[99], solved[99], bound[99], optimum[99], uniform[99];
    size_t n;
    bool has_optimum, has_uniform, bound_above; // bound_above: it lies above the table's own loss somewhere
    const char *optimum_of;                     // how the problems of the optimum were put together
} losses;

// Takes a column of the results about the table's metric: of the first document that has it.
static bool take_column(const page_writer *w, const page_table *t, const char *needs, const char *column, losses *x,
                        double *out, const char **aggregate)
{
    const char *metric = kvb_table_info(t->file)->metric;
    for (size_t i = 0; i < w->p->n_results; i++) {
        const cJSON *row, *detail;
        bool found = false;
        cJSON_ArrayForEach(row, w->p->results[i].rows)
        {
            if (strcmp(results_text(row, "metric"), metric) != 0 || isnan(results_number(row, needs))) continue;
            for (size_t k = 0; k < x->n; k++)
                if (fabs(x->ratio[k] - results_number(row, "ratio")) < 1e-9) {
                    out[k] = results_number(row, column);
                    found = true;
                }
        }
        if (!found) continue;
        cJSON_ArrayForEach(detail, w->p->results[i].details)
        {
            if (strcmp(results_text(detail, "metric"), metric) == 0) *aggregate = results_text(detail, "aggregate");
        }
        return true;
    }
    return false;
}

static void fill_losses(const page_writer *w, const page_table *t, losses *x)
{
    const char *ignored = "";
    *x = (losses){.n = kvb_table_info(t->file)->n_rows, .optimum_of = ""};
    for (size_t r = 0; r < x->n; r++) {
        kvb_row row = {0};
        (void)kvb_table_row(t->file, (uint32_t)r, &row, NULL); // r is in range
        x->ratio[r] = row.ratio;
        x->table[r] = row.table_loss;
        x->solved[r] = row.loss;
        x->bound[r] = row.lower_bound;
        x->optimum[r] = x->uniform[r] = NAN;
        x->bound_above = x->bound_above || row.lower_bound > row.table_loss + 1e-9;
    }
    x->has_optimum = take_column(w, t, "optimum", "optimum", x, x->optimum, &x->optimum_of);
    x->has_uniform = take_column(w, t, "uniform_loss", "uniform_loss", x, x->uniform, &ignored);
}

static void put_losses(page_writer *w, const page_table *t)
{
    losses x;
    char title[TITLE_SIZE], note[300];
    fill_losses(w, t, &x);
    svg_series series[5] = {{.name = "this table", .y = x.table},
                            {.name = "as solved", .y = x.solved},
                            {.name = "lower bound", .y = x.bound}};
    size_t n = 3;
    if (x.has_optimum) series[n++] = (svg_series){.name = "optimum", .y = x.optimum};
    if (x.has_uniform) series[n++] = (svg_series){.name = "even split", .y = x.uniform};
    snprintf(title, sizeof title, "%.150s: what is lost", kvb_table_info(t->file)->metric);
    snprintf(note, sizeof note, "%s%s",
             x.bound_above ? "Bound and loss as solved hold for the objective with --shrink; the table's own loss is "
                             "without, and may lie below. "
                           : "",
             !x.has_optimum                            ? ""
             : strcmp(x.optimum_of, "mean_ratio") == 0 ? "The optimum is each question's own; no one table reaches it."
                                                       : "The optimum is that of the averaged losses.");
    const svg_chart chart = {.title = title,
                             .x_label = "per cent pruned",
                             .x = x.ratio,
                             .n = x.n,
                             .n_series = n,
                             .series = series,
                             .y_unit = SVG_SHARES};
    page_put_chart(w, &chart, *note ? note : NULL);
}

void page_put_losses(page_writer *w)
{
    bool any = false;
    for (size_t i = 0; i < w->p->n_tables; i++) any = any || w->p->tables[i].knows_losses;
    if (!any) return;
    fputs(
        "<section id=\"losses\"><h2>Loss, and how near it is to the best</h2>\n"
        "<p>How much of what later tokens looked at is thrown away, as a share of all that can be lost, on the texts "
        "that the table was made from. Nothing of this size can lose less than the lower bound, whoever finds it: the "
        "distance to it is all that a better solver could still gain. The even split comes from <code>solve "
        "--json</code>, the true optimum from <code>validate --json</code>.</p>\n<div class=\"charts\">\n",
        w->out);
    for (size_t i = 0; i < w->p->n_tables; i++)
        if (w->p->tables[i].knows_losses) put_losses(w, &w->p->tables[i]);
    fputs("</div></section>\n", w->out);
}

// ---- Comparisons ----------------------------------------------------------------------------------------------------

typedef struct picture_kind {
    const char *column, *title; // behind the method's name
    svg_unit unit;
    bool logarithmic;
} picture_kind;

// One chart of a column, a line per allocator. False: no row has it.
static bool put_comparison(page_writer *w, const grid_rows *from, const picture_kind *kind, const char *title,
                           const char *note)
{
    results_grid *g = results_grid_make(from, kind->column);
    svg_series series[GRID_NAMES_MAX];
    bool any = g && g->n_names > 0 && g->n_ratios > 0;
    for (size_t i = 0; any && i < g->n_names; i++)
        series[i] = (svg_series){.name = *g->names[i] ? g->names[i] : "full cache",
                                 .y = g->value[i],
                                 .low = g->has_intervals ? g->low[i] : NULL,
                                 .high = g->has_intervals ? g->high[i] : NULL};
    if (any) {
        const svg_chart chart = {.title = title,
                                 .x_label = "per cent pruned",
                                 .x = g->ratios,
                                 .n = g->n_ratios,
                                 .n_series = g->n_names,
                                 .series = series,
                                 .logarithmic = kind->logarithmic,
                                 .y_unit = kind->unit};
        page_put_chart(w, &chart, note);
    }
    free(g);
    return any;
}

// What rows are about, each once: pairs of a task ("" for eval) and a method.
typedef struct subject {
    const char *task, *method;
} subject;

static size_t find_subjects(const results_document *r, const char *column, subject out[METHODS_MAX])
{
    const cJSON *row;
    size_t n = 0;
    cJSON_ArrayForEach(row, r->rows)
    {
        subject s = {results_text(row, "task"), results_method(row)};
        size_t i = 0;
        // Rows of the full cache belong to no method.
        if (isnan(results_number(row, column)) || !*s.method || !*results_text(row, "allocator")) continue;
        while (i < n && (strcmp(out[i].task, s.task) != 0 || strcmp(out[i].method, s.method) != 0)) i++;
        if (i == n && n < METHODS_MAX) out[n++] = s;
    }
    return n;
}

static void put_source(page_writer *w, const results_document *r)
{
    fputs("<p class=\"note\">from <code>", w->out);
    html_put(w->out, r->name);
    fputs("</code></p>\n", w->out);
}

static void put_eval(page_writer *w, const results_document *r)
{
    static const picture_kind kinds[] = {
        {"kl", "KL to the full cache, nats per token (less is better)", SVG_NUMBERS, true},
        {"top1", "likeliest next token as with the full cache", SVG_SHARES, false},
        {"nll", "NLL of the text's own next token, nats (less is better)", SVG_NUMBERS, false}};
    subject all[METHODS_MAX];
    size_t n = find_subjects(r, "kl", all);
    if (n == 0) return;
    put_source(w, r);
    fputs("<div class=\"charts\">\n", w->out);
    for (size_t i = 0; i < n; i++)
        for (int bare = 0; bare < 2; bare++)
            for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
                const grid_rows from = {.rows = r->rows, .method = all[i].method, .bare = bare};
                char title[TITLE_SIZE];
                snprintf(title, sizeof title, "%.100s%s: %s", all[i].method, bare ? ", nothing protected" : "",
                         kinds[k].title);
                put_comparison(w, &from, &kinds[k], title, NULL);
            }
    fputs("</div>\n", w->out);
}

static void put_tasks(page_writer *w, const results_document *r)
{
    static const picture_kind score = {"score", "share solved", SVG_SHARES, false};
    subject all[METHODS_MAX];
    size_t n = find_subjects(r, "score", all);
    if (n == 0) return;
    put_source(w, r);
    fputs("<div class=\"charts\">\n", w->out);
    for (size_t i = 0; i < n; i++) {
        const cJSON *row;
        double full = NAN;
        cJSON_ArrayForEach(row, r->rows)
        {
            if (strcmp(results_text(row, "task"), all[i].task) == 0 && !*results_text(row, "allocator"))
                full = results_number(row, "score");
        }
        char title[TITLE_SIZE], note[120] = "";
        snprintf(title, sizeof title, "%.80s, %.100s: share solved (more is better)", all[i].task, all[i].method);
        if (!isnan(full)) snprintf(note, sizeof note, "With the full cache: %.3g %%.", 100 * full);
        const grid_rows from = {.rows = r->rows, .method = all[i].method, .task = all[i].task};
        put_comparison(w, &from, &score, title, *note ? note : NULL);
    }
    fputs("</div>\n", w->out);
}

// Whether any document has rows with this column.
static bool has_column(const page *p, const char *column)
{
    subject all[METHODS_MAX];
    for (size_t i = 0; i < p->n_results; i++)
        if (find_subjects(&p->results[i], column, all) > 0) return true;
    return false;
}

void page_put_worth(page_writer *w)
{
    if (!has_column(w->p, "kl") && !has_column(w->p, "score")) return;
    fputs(
        "<section id=\"worth\"><h2>What it is worth</h2>\n"
        "<p>Measured by really evicting, on texts and tasks. A line per way to share the cache out: "
        "<em>uniform</em> is the even split, <em>pyramid</em> gives lower layers more, <em>ada</em> lets the heads of "
        "a layer compete by score. Shaded: 95&nbsp;% intervals.</p>\n",
        w->out);
    for (size_t i = 0; i < w->p->n_results; i++) {
        put_eval(w, &w->p->results[i]);
        put_tasks(w, &w->p->results[i]);
    }
    fputs("</section>\n", w->out);
}

void page_put_holdout(page_writer *w)
{
    static const picture_kind loss = {"loss", "held-out loss", SVG_SHARES, false};
    if (!has_column(w->p, "change")) return;
    fputs("<section id=\"holdout\"><h2>On calibration texts that were left out</h2>\n"
          "<p>Each text (or question) in turn was left out, the table made from the others, and judged on it.</p>\n"
          "<div class=\"charts\">\n",
          w->out);
    for (size_t i = 0; i < w->p->n_results; i++) {
        subject all[METHODS_MAX];
        size_t n = find_subjects(&w->p->results[i], "change", all);
        for (size_t k = 0; k < n; k++) {
            const grid_rows from = {.rows = w->p->results[i].rows, .method = all[k].method};
            char title[TITLE_SIZE];
            snprintf(title, sizeof title, "%.100s: loss on what was left out", all[k].method);
            put_comparison(w, &from, &loss, title, NULL);
        }
    }
    fputs("</div></section>\n", w->out);
}
