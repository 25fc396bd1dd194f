#include "tools/report/page.h"
#include "formats/atomic_file.h"
#include "formats/file_io.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "formats/table_export.h"
#include "runtime/fail.h"
#include "study/interval.h"
#include "tools/report/heatmap.h"
#include "tools/report/html.h"
#include "tools/report/results_chart.h"
#include "tools/report/words.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double HEADLINE = 0.8, RATIOS[] = {0.5, 0.8, 0.9};
enum { N_RATIOS = sizeof RATIOS / sizeof *RATIOS };

// ---- What the page is about: opened, and matched with each other ----------------------------------------------------

static bool is_known(const kvb_table *table, const char *tensor)
{
    const char *unknown = kvb_table_metadata(table, "unknown");
    return !unknown || !strstr(unknown, tensor);
}

static kvb_status open_table(page_table *t, const char *path, kvb_error *err)
{
    *t = (page_table){.path = path};
    kvb_status status = kvb_table_open(&t->file, path, NULL, err);
    if (status == KVB_OK) status = table_metadata_read(&t->metadata, path, err);
    if (status == KVB_OK) status = sha256_file_hex(path, t->sha256, err);
    if (status != KVB_OK) return status;
    t->knows_losses = is_known(t->file, "table_loss");
    // One question has no deviation.
    t->knows_deviation = is_known(t->file, "std") && kvb_table_info(t->file)->n_questions > 1;
    return KVB_OK;
}

static kvb_status open_record(page_record *r, const char *path, kvb_error *err)
{
    *r = (page_record){.path = path};
    kvb_status status = record_open(&r->file, path, err);
    return status == KVB_OK ? record_file_sha256(r->file, r->sha256, err) : status;
}

// Links a record to the tables that were made from it. Fails with KVB_MISMATCH if there are none.
static kvb_status match_record(page *p, const page_record *r, kvb_error *err)
{
    size_t n = 0;
    for (size_t i = 0; i < p->n_tables; i++) {
        if (strcmp(kvb_table_info(p->tables[i].file)->record_sha256, r->sha256) != 0) continue;
        p->tables[i].from = r;
        n++;
    }
    if (n > 0) return KVB_OK;
    return kvb_fail(err, KVB_MISMATCH,
                    "%s: no table of the report was made from this record: its SHA-256 is %.16s..., %s names %.16s...; "
                    "give the record that was solved, or leave --record out",
                    r->path, r->sha256, p->tables[0].path, kvb_table_info(p->tables[0].file)->record_sha256);
}

kvb_status page_open(page *p, const page_paths *paths, kvb_error *err)
{
    *p = (page){0};
    if (paths->n_tables == 0 || paths->n_tables > PAGE_TABLES_MAX || paths->n_records > PAGE_RECORDS_MAX ||
        paths->n_results > PAGE_RESULTS_MAX)
        return kvb_fail(err, KVB_ARGUMENT,
                        "a report takes 1 to %d tables, %d records and %d results, found %zu, %zu and %zu; make "
                        "several reports",
                        PAGE_TABLES_MAX, PAGE_RECORDS_MAX, PAGE_RESULTS_MAX, paths->n_tables, paths->n_records,
                        paths->n_results);
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < paths->n_tables && status == KVB_OK; i++) {
        p->n_tables++; // counted first, so that page_free() closes what a failure leaves open
        status = open_table(&p->tables[i], paths->tables[i], err);
    }
    for (size_t i = 0; i < paths->n_records && status == KVB_OK; i++) {
        p->n_records++;
        status = open_record(&p->records[i], paths->records[i], err);
        if (status == KVB_OK) status = match_record(p, &p->records[i], err);
    }
    for (size_t i = 0; i < paths->n_results && status == KVB_OK; i++) {
        p->n_results++;
        status = results_open(&p->results[i], paths->results[i], err);
    }
    return status;
}

void page_free(page *p)
{
    for (size_t i = 0; i < p->n_tables; i++) {
        kvb_table_close(p->tables[i].file);
        cJSON_Delete(p->tables[i].metadata);
    }
    for (size_t i = 0; i < p->n_records; i++) record_close(p->records[i].file);
    for (size_t i = 0; i < p->n_results; i++) results_close(&p->results[i]);
    *p = (page){0};
}

// ---- Looking things up ----------------------------------------------------------------------------------------------

typedef struct page_writer {
    const page *p;
    FILE *out;
} page_writer;

// Returns the row of a table nearest to a ratio.
static kvb_row row_near(const kvb_table *t, double ratio)
{
    kvb_row best = {0}, row;
    for (uint32_t r = 0; r < kvb_table_info(t)->n_rows; r++)
        if (kvb_table_row(t, r, &row, NULL) == KVB_OK &&
            (!best.prune_ratio || fabs(row.ratio - ratio) < fabs(best.ratio - ratio)))
            best = row;
    return best;
}

// What results of `eval` say about a table at one ratio, and about the even split beside it.
typedef struct worth {
    double ratio;
    interval kl, to_uniform, agree; // nats per token; of uniform's KL; share of equal next tokens
    double uniform_kl, uniform_agree;
    double texts; // how many; NaN: unknown
} worth;

// Returns what the results call the table, or NULL: their list of allocators has identities, "table SHA-256".
static const char *label_of(const results_document *r, const page_table *t)
{
    char identity[80];
    const cJSON *item;
    snprintf(identity, sizeof identity, "table %s", t->sha256);
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(r->settings, "allocators"))
    {
        if (strcmp(results_text(item, "identity"), identity) == 0) return results_text(item, "label");
    }
    return NULL;
}

static double count_texts(const results_document *r)
{
    const cJSON *input;
    double n = 0;
    cJSON_ArrayForEach(input, r->inputs) n += strcmp(results_text(input, "kind"), "text") == 0;
    return n > 0 ? n : NAN;
}

static void add_worth(worth *out, const results_document *r, const grid_rows *from, const cJSON *row)
{
    const cJSON *other;
    *out = (worth){.ratio = results_number(row, "ratio"),
                   .kl = results_interval_at(row, "kl"),
                   .to_uniform = results_interval_at(row, "kl_to_uniform"),
                   .agree = results_interval_at(row, "top1"),
                   .uniform_kl = NAN,
                   .uniform_agree = NAN,
                   .texts = count_texts(r)};
    cJSON_ArrayForEach(other, from->rows)
    {
        if (!grid_has_row(from, other) || strcmp(results_text(other, "allocator"), "uniform") != 0 ||
            fabs(results_number(other, "ratio") - out->ratio) > 1e-9)
            continue;
        out->uniform_kl = results_number(other, "kl");
        out->uniform_agree = results_number(other, "top1");
    }
}

static int by_ratio(const void *a, const void *b)
{
    double x = ((const worth *)a)->ratio, y = ((const worth *)b)->ratio;
    return (x > y) - (x < y);
}

// Finds the rows of all results about a table, in order of ratio. Returns how many there are, at most `room`.
static size_t find_worth(const page *p, const page_table *t, worth *out, size_t room)
{
    const kvb_info *info = kvb_table_info(t->file);
    size_t n = 0;
    for (size_t i = 0; i < p->n_results; i++) {
        const cJSON *row;
        const char *label = label_of(&p->results[i], t);
        const grid_rows from = {
            .rows = p->results[i].rows, .method = info->metric, .bare = info->sink + info->window == 0};
        cJSON_ArrayForEach(row, from.rows)
        {
            if (label && n < room && grid_has_row(&from, row) && strcmp(results_text(row, "allocator"), label) == 0 &&
                !isnan(results_number(row, "kl")))
                add_worth(&out[n++], &p->results[i], &from, row);
        }
    }
    qsort(out, n, sizeof *out, by_ratio);
    return n;
}

// Writes "snapkv:kvpress", followed by the file's name if two tables are for one metric.
static void put_name(const page_writer *w, const page_table *t)
{
    const char *metric = kvb_table_info(t->file)->metric;
    size_t same = 0;
    for (size_t i = 0; i < w->p->n_tables; i++)
        same += strcmp(kvb_table_info(w->p->tables[i].file)->metric, metric) == 0;
    html_put(w->out, metric);
    if (same > 1) html_fill(w->out, " (%s)", file_base(t->path));
}

// Writes the heading of a table's own part.
static void put_table_heading(const page_writer *w, const page_table *t)
{
    fputs("<h3>", w->out);
    put_name(w, t);
    fputs("</h3>\n", w->out);
}

// ---- The verdict on each table: is it worth anything, how much can go, what is not known ----------------------------

enum { WORTH_MAX = 100, FEW_TEXTS = 5 };

static const double SAME_ENOUGH = 0.95;

typedef enum verdict { BETTER, OPEN, WORSE, N_VERDICTS } verdict;

// Compares a table with uniform: it is better or worse if the whole interval lies on one side.
static verdict judge(const worth *x)
{
    if (x->to_uniform.high < 1) return BETTER;
    return x->to_uniform.low > 1 ? WORSE : OPEN;
}

// Writes the ratios of the rows with this verdict: "50, 80 and 90 %".
static void put_ratios(FILE *out, const worth *x, size_t n, verdict which)
{
    size_t left = 0;
    for (size_t i = 0; i < n; i++) left += judge(&x[i]) == which;
    for (size_t i = 0, put = 0; i < n; i++) {
        if (judge(&x[i]) != which) continue;
        fprintf(out, "%s%.4g", put == 0 ? "" : left == 1 ? " and " : ", ", 100 * x[i].ratio);
        put++;
        left--;
    }
    fputs("&nbsp;%", out);
}

static void put_headline(FILE *out, const worth *x, size_t n)
{
    static const char *const words[N_VERDICTS] = {"better than an even split at ", "not certain at ",
                                                  "worse than an even split at "};
    bool first = true;
    fputs("<p class=\"badge\">", out);
    for (verdict v = BETTER; v < N_VERDICTS; v++) {
        size_t count = 0;
        for (size_t i = 0; i < n; i++) count += judge(&x[i]) == v;
        if (count == 0) continue;
        fprintf(out, "%s%s", first ? "" : "; ", words[v]);
        put_ratios(out, x, n, v);
        first = false;
    }
    fputs(" pruned</p>\n", out);
}

static void put_numbers(FILE *out, const worth *x)
{
    fprintf(out, "<p>With %.4g&nbsp;%% of the cache thrown away,", 100 * x->ratio);
    if (!isnan(x->agree.value))
        fprintf(out, " the model's likeliest next token is still the same at <b>%.0f of 100</b> places",
                100 * x->agree.value);
    if (!isnan(x->agree.value) && !isnan(x->uniform_agree))
        fprintf(out, " (with an even split at %.0f)", 100 * x->uniform_agree);
    fprintf(out, "%s its predictions move by <b>%.3g</b> nats per token (KL divergence; less is better)",
            isnan(x->agree.value) ? "" : ", and", x->kl.value);
    if (!isnan(x->uniform_kl)) fprintf(out, ", with an even split by %.3g", x->uniform_kl);
    if (!isnan(x->to_uniform.low))
        fprintf(out, ": %.2f times as far, 95&nbsp;%% interval %.2f to %.2f", x->to_uniform.value, x->to_uniform.low,
                x->to_uniform.high);
    fputs(".", out);
    if (isfinite(x->texts)) fprintf(out, " Measured on %.0f text%s.", x->texts, x->texts == 1 ? "" : "s");
    if (x->texts < FEW_TEXTS) fprintf(out, " <b>So few texts say little about others: take %d or more.</b>", FEW_TEXTS);
    fputs("</p>\n", out);
}

static void put_how_much(FILE *out, const worth *x, size_t n)
{
    double most = -1;
    for (size_t i = 0; i < n; i++)
        if (x[i].agree.value >= SAME_ENOUGH) most = fmax(most, x[i].ratio);
    if (most >= 0)
        fprintf(out, "<p>Up to %.4g&nbsp;%% can go while at least %.0f of 100 next tokens stay the same.</p>\n",
                100 * most, 100 * SAME_ENOUGH);
    else
        fprintf(out, "<p>At every ratio that was tried more than %.0f of 100 next tokens change.</p>\n",
                100 - 100 * SAME_ENOUGH);
}

static void put_advice(FILE *out)
{
    fputs("<p>Where it is worse or not certain, do not use it yet. What helps most, in this order: calibrate on texts "
          "like those that you serve, and as long; keep sinks and window in every head "
          "(<code>budgets --strict</code>, <code>TABLE.safetensors:strict</code> in <code>eval</code>); prune "
          "less.</p>\n",
          out);
}

// Tells whether the table's losses are in nats (docs/objective.md).
static bool in_nats(const page_table *t)
{
    const char *loss = kvb_table_metadata(t->file, "loss");
    return loss && strcmp(loss, "output") == 0;
}

static void put_untried(page_writer *w, const page_table *t)
{
    kvb_row row = row_near(t->file, HEADLINE);
    fputs("<p class=\"badge\">not tried yet</p>\n", w->out);
    if (t->knows_losses && in_nats(t)) {
        fprintf(w->out,
                "<p>From the texts that it was made from, it predicts a KL of <b>%.3g</b> nats at %.4g&nbsp;%% pruned. "
                "Nobody has measured it.</p>\n",
                row.table_loss, 100 * row.ratio);
    } else if (t->knows_losses) {
        fprintf(w->out,
                "<p>On the texts that it was made from, %.4g&nbsp;%% pruned loses <b>%.3g&nbsp;%%</b> of what later "
                "tokens looked at. What that means for the model's answers was not measured.</p>\n",
                100 * row.ratio, 100 * row.table_loss);
    } else fputs("<p>Its losses are not known, and what it does was not measured.</p>\n", w->out);
    fputs(
        "<p>To see what it is worth on texts that it has not seen, and then again this report:</p>\n<pre>kvbudget eval "
        "MODEL ",
        w->out);
    html_shell_word(w->out, t->path);
    fputs(" TEXT... -o worth\nkvbudget report ", w->out);
    html_shell_word(w->out, t->path);
    fputs(" --results worth.json -o report.html</pre>\n", w->out);
}

// Lists the heads for which the questions' own best budgets differ by more than the head is given.
static void put_unsure(page_writer *w, const kvb_info *info, const kvb_row *row)
{
    enum { LISTED = 16 };
    uint32_t heads = info->n_layers * info->n_kv_heads, listed = 0;
    uint8_t *flags = need(heads, sizeof *flags, "heads");
    uint32_t n = flag_heads(row->prune_ratio, row->std, heads, flags);
    if (n)
        fprintf(w->out,
                "<li>%u of %u heads are not certain at %.4g&nbsp;%%: from question to question they need more or less "
                "by more than they get. Profile more texts and questions of the kind that you serve; until then "
                "<code>solve --shrink 0.3</code> or <code>--min-keep</code> guards such heads. As layer.head: ",
                n, heads, 100 * row->ratio);
    for (uint32_t h = 0; h < heads && listed < LISTED; h++)
        if (flags[h]) fprintf(w->out, "%s%u.%u", listed++ ? ", " : "", h / info->n_kv_heads, h % info->n_kv_heads);
    if (n) fprintf(w->out, "%s</li>\n", n > LISTED ? ", ..." : "");
    free(flags);
}

static void put_warnings(page_writer *w, const page_table *t)
{
    const kvb_info *info = kvb_table_info(t->file);
    kvb_row row = row_near(t->file, HEADLINE);
    fputs("<ul>\n", w->out);
    if (info->n_contexts > 0 && info->n_contexts < 4)
        fprintf(w->out, "<li>Made from %u text%s only: heads that none of them needed may be cut too far.</li>\n",
                info->n_contexts, info->n_contexts == 1 ? "" : "s");
    if (t->knows_deviation) put_unsure(w, info, &row);
    else
        fputs("<li>Nothing is known about how certain its heads are: one question, or an imported table.</li>\n",
              w->out);
    fputs("</ul>\n", w->out);
}

// Writes a table's verdict. Returns that of its worst ratio, or BETTER if nothing was measured.
static verdict put_verdict(page_writer *w, const page_table *t)
{
    static const char *const classes[N_VERDICTS] = {"good", "open", "bad"};
    worth all[WORTH_MAX];
    size_t n = find_worth(w->p, t, all, WORTH_MAX), near = 0;
    verdict worst = n ? BETTER : OPEN;
    for (size_t i = 0; i < n; i++) {
        if (judge(&all[i]) > worst) worst = judge(&all[i]);
        if (fabs(all[i].ratio - HEADLINE) < fabs(all[near].ratio - HEADLINE)) near = i;
    }
    html_fill(w->out, "<article class=\"card %s\">", classes[worst]);
    put_table_heading(w, t);
    if (n == 0) put_untried(w, t);
    else {
        put_headline(w->out, all, n);
        put_numbers(w->out, &all[near]);
        put_how_much(w->out, all, n);
    }
    put_warnings(w, t);
    fputs("</article>\n", w->out);
    return n ? worst : BETTER;
}

static void put_verdicts(page_writer *w)
{
    fputs("<section id=\"verdict\"><h2>In short</h2>\n"
          "<p>A language model keeps keys and values of every token that it has read, in every attention head: the KV "
          "cache. Throwing a part of it away saves memory and time. A <em>metric</em> says which tokens a head should "
          "keep; a <em>table</em> says how many, head by head, since heads differ in what they need. The measure of a "
          "table is whether it does less harm than an even split, where every head keeps equally many.</p>\n"
          "<div class=\"cards\">\n",
          w->out);
    verdict worst = BETTER;
    for (size_t i = 0; i < w->p->n_tables; i++) {
        verdict one = put_verdict(w, &w->p->tables[i]);
        if (one > worst) worst = one;
    }
    fputs("</div>\n", w->out);
    if (worst != BETTER) put_advice(w->out);
    fputs("</section>\n", w->out);
}

// ---- Charts ---------------------------------------------------------------------------------------------------------

static void put_value(FILE *out, const svg_chart *c, double y)
{
    if (isnan(y)) fputs("–", out);
    else if (c->y_unit == SVG_SHARES) fprintf(out, "%.3g&nbsp;%%", 100 * y);
    else fprintf(out, "%.3g", y);
}

static void put_number(FILE *out, const svg_chart *c, const svg_series *s, size_t i)
{
    fputs("<td>", out);
    put_value(out, c, s->y[i]);
    if (s->low && s->high && !isnan(s->low[i]) && !isnan(s->high[i])) {
        fputs(" <small>", out);
        put_value(out, c, s->low[i]);
        fputs(" to ", out);
        put_value(out, c, s->high[i]);
        fputs("</small>", out);
    }
    fputs("</td>", out);
}

// Tells whether the table of numbers shows a point: all of a few, else those at every ten per cent and the last one.
static bool is_shown(const svg_chart *c, size_t i)
{
    enum { FEW = 20 };
    return c->n <= FEW || lround(100 * c->x[i]) % 10 == 0 || i + 1 == c->n;
}

static void put_chart_numbers(FILE *out, const svg_chart *c)
{
    fputs("<details><summary>The numbers</summary><div class=\"wide\"><table><thead><tr><th>per cent pruned</th>", out);
    for (size_t s = 0; s < c->n_series; s++) html_fill(out, "<th>%s</th>", c->series[s].name);
    fputs("</tr></thead><tbody>\n", out);
    for (size_t i = 0; i < c->n; i++) {
        if (!is_shown(c, i)) continue;
        fprintf(out, "<tr><th>%.4g</th>", 100 * c->x[i]);
        for (size_t s = 0; s < c->n_series; s++) put_number(out, c, &c->series[s], i);
        fputs("</tr>\n", out);
    }
    fputs("</tbody></table></div></details>", out);
}

// Writes the names beside their strokes, as text of the page, so that long ones find room.
static void put_keys(FILE *out, const svg_chart *c)
{
    fputs("<div class=\"keys\">", out);
    for (size_t s = 0; s < c->n_series && s < SVG_SERIES_MAX; s++) {
        fputs("<span><svg viewBox=\"0 0 28 12\">", out);
        svg_chart_key(out, c, s, 2, 6);
        html_fill(out, "</svg>%s</span>", c->series[s].name);
    }
    if (c->n_series > SVG_SERIES_MAX) fputs("<span>the others: in the table</span>", out);
    fputs("</div>\n", out);
}

// Writes a figure with the chart's title, its picture, the names of its lines, and a table of its numbers that can be
// opened; with many points the table has only those at every ten per cent. At most SVG_SERIES_MAX lines are drawn, but
// the table has all.
static void put_chart(page_writer *w, const svg_chart *chart)
{
    enum { WIDTH = 440, HEIGHT = 260 };
    svg_chart bare = *chart;
    bare.bare = true;
    html_fill(w->out, "<figure class=\"chart\"><figcaption>%s</figcaption>\n", chart->title);
    fprintf(w->out, "<div class=\"plot\"><svg viewBox=\"0 0 %d %d\" role=\"img\">\n", WIDTH, HEIGHT);
    html_fill(w->out, "<title>%s</title>\n", chart->title);
    svg_chart_put(w->out, &bare, 0, 0, WIDTH, HEIGHT);
    fputs("</svg></div>\n", w->out);
    put_keys(w->out, &bare);
    put_chart_numbers(w->out, chart);
    fputs("</figure>\n", w->out);
}

static void put_losses_of(page_writer *w, const page_table *t)
{
    double ratio[99], table[99], bound[99];
    char title[CHART_TITLE_SIZE];
    size_t n = kvb_table_info(t->file)->n_rows;
    for (size_t r = 0; r < n; r++) {
        kvb_row row = {0};
        (void)kvb_table_row(t->file, (uint32_t)r, &row, NULL); // r is in range
        ratio[r] = row.ratio;
        table[r] = row.table_loss;
        bound[r] = row.lower_bound;
    }
    const svg_series series[] = {{.name = "this table", .y = table}, {.name = "lower bound", .y = bound}};
    snprintf(title, sizeof title, "%.150s: what is lost%s", kvb_table_info(t->file)->metric,
             in_nats(t) ? ", nats as predicted" : "");
    put_chart(w, &(svg_chart){.title = title,
                              .x = ratio,
                              .n = n,
                              .n_series = 2,
                              .series = series,
                              .logarithmic = in_nats(t),
                              .y_unit = in_nats(t) ? SVG_NUMBERS : SVG_SHARES});
}

// Draws the KL that each table predicts, and the KL that was measured on texts that it has not seen.
static void put_predicted(page_writer *w)
{
    bool any = false;
    for (size_t i = 0; i < w->p->n_tables; i++) {
        const page_table *t = &w->p->tables[i];
        worth all[WORTH_MAX];
        double ratio[WORTH_MAX], predicted[WORTH_MAX], kl[WORTH_MAX], low[WORTH_MAX], high[WORTH_MAX];
        char title[CHART_TITLE_SIZE];
        size_t found = in_nats(t) ? find_worth(w->p, t, all, WORTH_MAX) : 0, n = 0;
        for (size_t k = 0; k < found; k++) {
            kvb_row row = row_near(t->file, all[k].ratio);
            if (fabs(row.ratio - all[k].ratio) > 1e-9) continue;
            ratio[n] = row.ratio, predicted[n] = row.table_loss;
            kl[n] = all[k].kl.value, low[n] = all[k].kl.low, high[n++] = all[k].kl.high;
        }
        if (n == 0) continue;
        if (!any)
            fputs("<section id=\"predicted\"><h2>Predicted and measured</h2>\n<p>KL to the full cache, nats per token: "
                  "what the table predicts from the texts that it was made from, and what evicting did to texts that "
                  "it has not seen.</p>\n<div class=\"charts\">\n",
                  w->out);
        any = true;
        const svg_series series[] = {{.name = "predicted", .y = predicted},
                                     {.name = "measured", .y = kl, .low = low, .high = high}};
        snprintf(title, sizeof title, "%.150s: KL, predicted and measured", kvb_table_info(t->file)->metric);
        put_chart(w, &(svg_chart){.title = title,
                                  .x = ratio,
                                  .n = n,
                                  .n_series = 2,
                                  .series = series,
                                  .logarithmic = true,
                                  .y_unit = SVG_NUMBERS});
    }
    if (any) fputs("</div></section>\n", w->out);
}

static void put_losses(page_writer *w)
{
    bool any = false;
    for (size_t i = 0; i < w->p->n_tables; i++) any = any || w->p->tables[i].knows_losses;
    if (!any) return;
    fputs("<section id=\"losses\"><h2>Loss, and how near it is to the best</h2>\n"
          "<p>How much of what later tokens looked at is thrown away, as a share of all that can be lost, on the texts "
          "that the table was made from. No budgets lose less than the lower bound of what was solved, which with "
          "<code>--shrink</code> may lie above the table's own loss.</p>\n<div class=\"charts\">\n",
          w->out);
    for (size_t i = 0; i < w->p->n_tables; i++)
        if (w->p->tables[i].knows_losses) put_losses_of(w, &w->p->tables[i]);
    fputs("</div></section>\n", w->out);
}

// Draws the charts of all results: held-out losses, or what was measured by evicting.
static void put_results(page_writer *w, const char *heading, bool held_out)
{
    bool any = false;
    for (size_t i = 0; i < w->p->n_results; i++) {
        chart_list all = {.n = 0};
        charts_add(&all, w->p->results[i].rows);
        for (size_t k = 0; k < all.n; k++) {
            if ((strcmp(all.items[k].column, "loss") == 0) != held_out) continue;
            filled_chart *f = need(1, sizeof *f, "charts");
            chart_fill(f, &all.items[k]);
            if (!any) fputs(heading, w->out);
            any = true;
            put_chart(w, &f->chart);
            free(f);
        }
    }
    if (any) fputs("</div></section>\n", w->out);
}

// ---- Head maps ------------------------------------------------------------------------------------------------------

enum { MAPS_MAX = 1000000, BYTES_OF_A_CELL = 140 };

// Draws a table's maps at the usual ratios; with many heads only the map at HEADLINE.
static void put_map(page_writer *w, const page_table *t, size_t n_cells)
{
    const kvb_info *info = kvb_table_info(t->file);
    size_t heads = (size_t)info->n_layers * info->n_kv_heads, n = 0;
    double ratios[N_RATIOS], *kept = need(N_RATIOS * heads, sizeof *kept, "shares");
    bool few = n_cells * N_RATIOS * BYTES_OF_A_CELL <= MAPS_MAX;
    for (size_t r = 0; r < N_RATIOS; r++) {
        kvb_row row = row_near(t->file, RATIOS[r]);
        if ((!few && RATIOS[r] != HEADLINE) || (n > 0 && ratios[n - 1] == row.ratio)) continue;
        for (size_t h = 0; h < heads; h++) kept[n * heads + h] = 1 - row.prune_ratio[h];
        ratios[n++] = row.ratio;
    }
    const heatmap map = {.n_layers = info->n_layers,
                         .n_heads = info->n_kv_heads,
                         .n_ratios = n,
                         .title = info->metric,
                         .ratios = ratios,
                         .kept = kept};
    fputs("<figure class=\"chart\"><figcaption>", w->out);
    put_name(w, t);
    fputs("</figcaption>\n<div class=\"plot\">", w->out);
    heatmap_svg(&map, w->out);
    fputs("</div></figure>\n", w->out);
    free(kept);
}

static void put_maps(page_writer *w)
{
    size_t n_cells = 0;
    for (size_t i = 0; i < w->p->n_tables; i++) {
        const kvb_info *info = kvb_table_info(w->p->tables[i].file);
        n_cells += (size_t)info->n_layers * info->n_kv_heads;
    }
    fputs("<section id=\"maps\"><h2>Who keeps how much</h2>\n"
          "<p>Each cell is one KV head: layers go down, heads go right. The number is the per cent of its tokens that "
          "the head keeps; where all cells look alike, an even split would do as well.</p>\n<div class=\"maps\">\n",
          w->out);
    for (size_t i = 0; i < w->p->n_tables; i++) put_map(w, &w->p->tables[i], n_cells);
    fputs("</div></section>\n", w->out);
}

// ---- What each table is for and what it was made from ---------------------------------------------------------------

static void put_fact(FILE *out, const char *name, const char *value)
{
    if (value && *value) html_fill(out, "<dt>%s</dt><dd>%s</dd>\n", name, value);
}

static void put_lengths(FILE *out, const kvb_info *info)
{
    uint32_t least = UINT32_MAX, most = 0;
    widen_lengths(info, &least, &most);
    fprintf(out, "<dt>calibrated on</dt><dd>%u text%s of ", info->n_contexts, info->n_contexts == 1 ? "" : "s");
    if (least == most) fprintf(out, "%u tokens", most);
    else fprintf(out, "%u to %u tokens", least, most);
    fprintf(out, ", %u question%s", info->n_questions, info->n_questions == 1 ? "" : "s");
    if (info->n_queries_min == info->n_queries_max) fprintf(out, ", %u decoded tokens each", info->n_queries_max);
    else fprintf(out, ", %u to %u decoded tokens each", info->n_queries_min, info->n_queries_max);
    fprintf(out, "; it serves contexts of %u to %u tokens best</dd>\n", least / 2, 2 * most);
}

static void put_origin(page_writer *w, const page_table *t)
{
    const kvb_info *info = kvb_table_info(t->file);
    fputs("<article class=\"card\">", w->out);
    put_table_heading(w, t);
    fputs("<dl>\n", w->out);
    put_fact(w->out, "model", *info->model_id ? info->model_id : "not named");
    put_fact(w->out, "at Hugging Face", kvb_table_metadata(t->file, "hf_id"));
    put_fact(w->out, "commit there", kvb_table_metadata(t->file, "hf_revision"));
    put_fact(w->out, "weights from", kvb_table_metadata(t->file, "model_container"));
    fprintf(w->out, "<dt>shape</dt><dd>%u layers, %u KV heads each for %u query heads, %u numbers per key</dd>\n",
            info->n_layers, info->n_kv_heads, info->n_heads, info->head_dim);
    put_fact(w->out, "metric", info->metric);
    fprintf(w->out,
            "<dt>protected</dt><dd>sink %u, window %u: this many of the first and the last tokens stay in every head "
            "whose budget has room for them</dd>\n",
            info->sink, info->window);
    put_lengths(w->out, info);
    put_fact(w->out, "constraints", kvb_table_metadata(t->file, "constraints"));
    fprintf(w->out, "<dt>ratios</dt><dd>%u, from %.4g to %.4g&nbsp;%% pruned</dd>\n", info->n_rows,
            100 * row_near(t->file, 0).ratio, 100 * row_near(t->file, 1).ratio);
    fputs("</dl>\n", w->out);
    fputs("</article>\n", w->out);
}

static void put_origins(page_writer *w)
{
    fputs("<section id=\"origin\"><h2>What for, and from what</h2>\n"
          "<p>A table is for one model, one metric and its parameters. The loader checks all three; with another model "
          "of the same shape it would do silent harm.</p>\n<div class=\"cards\">\n",
          w->out);
    for (size_t i = 0; i < w->p->n_tables; i++) put_origin(w, &w->p->tables[i]);
    fputs("</div></section>\n", w->out);
}

// ---- How to repeat it -----------------------------------------------------------------------------------------------

static void put_file(FILE *out, const char *kind, const char *path, const char *sha256)
{
    html_fill(out, "<tr><th>%s</th><td class=\"text\">%s</td><td class=\"text\"><code>%s</code></td></tr>\n", kind,
              path, *sha256 ? sha256 : "not known");
}

// Writes a flat object as a table under a heading; nested values are written as JSON.
static void put_object(FILE *out, const char *title, const cJSON *object)
{
    const cJSON *item;
    html_fill(out, "<details><summary>%s</summary><div class=\"wide\"><table>\n", title);
    cJSON_ArrayForEach(item, object)
    {
        char *text = cJSON_IsString(item) ? NULL : cJSON_PrintUnformatted(item);
        html_fill(out, "<tr><th>%s</th><td class=\"text\">%s</td></tr>\n", item->string ? item->string : "",
                  cJSON_IsString(item) ? item->valuestring
                  : text               ? text
                                       : "");
        cJSON_free(text);
    }
    fputs("</table></div></details>\n", out);
}

static void put_files(page_writer *w)
{
    const page *p = w->p;
    fputs("<h3>Files</h3>\n<div class=\"wide\"><table><thead><tr><th>what</th><th class=\"text\">name</th>"
          "<th class=\"text\">SHA-256</th></tr></thead><tbody>\n",
          w->out);
    for (size_t i = 0; i < p->n_tables; i++) {
        const kvb_info *info = kvb_table_info(p->tables[i].file);
        put_file(w->out, "table", p->tables[i].path, p->tables[i].sha256);
        put_file(w->out, "its model", info->model_id, info->model_sha256);
        put_file(w->out, "its calibration texts", "", info->calibration_sha256);
        put_file(w->out, "its record", p->tables[i].from ? p->tables[i].from->path : "", info->record_sha256);
    }
    for (size_t i = 0; i < p->n_results; i++) {
        const cJSON *input;
        cJSON_ArrayForEach(input, p->results[i].inputs)
            put_file(w->out, results_text(input, "kind"), results_text(input, "name"), results_text(input, "sha256"));
    }
    fputs("</tbody></table></div>\n", w->out);
}

static void put_commands(page_writer *w)
{
    const page *p = w->p;
    if (p->n_results == 0) return;
    html_fill(w->out,
              "<h3>Commands</h3>\n<p>Of kvbudget %s. The same inputs give the same bytes on the same kind of "
              "processor.</p>\n<pre>\n",
              kvb_version());
    for (size_t i = 0; i < p->n_results; i++) {
        const cJSON *word;
        fputs("kvbudget ", w->out);
        html_shell_word(w->out, p->results[i].command);
        cJSON_ArrayForEach(word, p->results[i].arguments)
        {
            fputs(" ", w->out);
            html_shell_word(w->out, cJSON_IsString(word) ? word->valuestring : "");
        }
        html_fill(w->out, "   # gave %s\n", p->results[i].name);
    }
    fputs("</pre>\n", w->out);
}

static void put_repeat(page_writer *w)
{
    const page *p = w->p;
    fputs("<section id=\"repeat\"><h2>How to repeat it</h2>\n<p>Profile and solve with the settings below.</p>\n",
          w->out);
    put_commands(w);
    put_files(w);
    fputs("<h3>Settings</h3>\n", w->out);
    for (size_t i = 0; i < p->n_tables; i++) put_object(w->out, p->tables[i].path, p->tables[i].metadata);
    for (size_t i = 0; i < p->n_records; i++)
        put_object(w->out, p->records[i].path, record_attributes(p->records[i].file));
    for (size_t i = 0; i < p->n_results; i++) put_object(w->out, p->results[i].name, p->results[i].settings);
    fputs("</section>\n", w->out);
}

// ---- The whole page -------------------------------------------------------------------------------------------------

static const char *model_of(const page *p)
{
    const char *first = kvb_table_info(p->tables[0].file)->model_id;
    for (size_t i = 1; i < p->n_tables; i++)
        if (strcmp(kvb_table_info(p->tables[i].file)->model_id, first) != 0) return "several models";
    return *first ? first : "a model without a name";
}

// Nothing may be loaded, whatever a text inside says: the policy allows only what is in the page.
static void put_head(page_writer *w)
{
    html_fill(w->out,
              "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
              "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
              "<meta name=\"color-scheme\" content=\"light dark\">\n"
              "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
              "img-src data:\">\n<title>KV-cache budgets: %s</title>\n<style>\n",
              model_of(w->p));
    for (const char *const *line = page_css; *line; line++) fputs(*line, w->out);
    html_fill(w->out, "</style>\n</head>\n<body>\n<header><h1>KV-cache budgets</h1><p>%s</p></header>\n<main>\n",
              model_of(w->p));
}

static void put_page(const page *p, FILE *out)
{
    page_writer w = {.p = p, .out = out};
    put_head(&w);
    put_verdicts(&w);
    put_results(&w,
                "<section id=\"worth\"><h2>What it is worth</h2>\n"
                "<p>Measured by really evicting, on texts and tasks. A line per way to share the cache out: "
                "<em>uniform</em> is the even split, <em>pyramid</em> gives lower layers more, <em>ada</em> lets the "
                "heads of a layer compete by score. Shaded: 95&nbsp;% intervals.</p>\n<div class=\"charts\">\n",
                false);
    put_predicted(&w);
    put_maps(&w);
    put_losses(&w);
    put_results(&w,
                "<section id=\"holdout\"><h2>On calibration texts that were left out</h2>\n"
                "<p>Each text (or question) in turn was left out, the table made from the others, and judged on "
                "it.</p>\n<div class=\"charts\">\n",
                true);
    put_origins(&w);
    put_repeat(&w);
    html_fill(
        out,
        "</main>\n<footer><p>Made by kvbudget %s report. Methods: LU-KV, arXiv 2602.08585.</p></footer>\n</body>\n"
        "</html>\n",
        kvb_version());
}

kvb_status page_write(const page *p, const char *path, kvb_error *err)
{
    atomic_file file;
    kvb_status status = atomic_file_begin(&file, path, err);
    if (status != KVB_OK) return status;
    put_page(p, file.stream);
    long size = ftell(file.stream);
    if (size > PAGE_BYTES_MAX)
        status =
            kvb_fail(err, KVB_UNSUPPORTED,
                     "%s: the report would take %ld bytes, expected at most %d; make one of fewer tables or results",
                     path, size, PAGE_BYTES_MAX);
    if (status == KVB_OK) return atomic_file_commit(&file, err);
    atomic_file_abandon(&file);
    return status;
}
