// What solve --holdout prints, as text and as JSON, and draws.
#include "study/interval.h"
#include "tools/report/study_report.h"
#include "tools/report/svg.h"
#include "tools/report/words.h"
#include <math.h>

// ---- Text -----------------------------------------------------------------------------------------------------------

static void print_change(const holdout *h, int percent, int method)
{
    const interval *x = &h->ratio[holdout_row(h, percent)][method];
    printf(" at %d %%: %+.2f %%", percent, 100 * x->value);
    if (!isnan(x->low)) printf(" (%+.2f .. %+.2f)", 100 * x->low, 100 * x->high);
    printf(",");
}

static void print_losses(const holdout *h)
{
    static const int shown[] = {30, 50, 70, 80, 90, 95};
    enum { N_SHOWN = sizeof shown / sizeof *shown };
    printf("  Loss %%, and against mean_ratio, the published form");
    if (h->n_texts < INTERVAL_GROUPS)
        printf("; %u %s: too few for intervals, which take %d:\n", h->n_texts, plural(h->n_texts, "text", "texts"),
               INTERVAL_GROUPS);
    else printf(", with the 95 %% interval of %u texts, compared text by text:\n", h->n_texts);
    printf("  %-22s", "pruned");
    for (int i = 0; i < N_SHOWN; i++) printf("%9d %%", shown[i]);
    printf("\n");
    for (int m = 0; m < N_METHODS; m++) {
        printf("  %-22s", holdout_methods[m]);
        for (int i = 0; i < N_SHOWN; i++) printf("%11.4f", 100 * h->mean[holdout_row(h, shown[i])][m].value);
        printf("\n");
    }
    for (int m = 0; m < N_METHODS; m++) {
        int at = 0;
        if (m == METHOD_PAPER) continue;
        double worst = holdout_worst_change(h, m, &at);
        printf("  %-22s", holdout_methods[m]);
        print_change(h, 50, m);
        print_change(h, 80, m);
        printf(" at worst %+.2f %% (%d)\n", 100 * worst, at);
    }
}

static void print_curve(const holdout *h, const learning_curve *c, const char *what)
{
    if (c->n_levels == 0) return;
    printf("  Held-out loss %% with tables from so many %s (mean_ratio, mean_loss with shrink %g):\n", what,
           DEFAULT_SHRINK);
    for (uint32_t l = 0; l < c->n_levels; l++) {
        int half = holdout_row(h, 50), fifth = holdout_row(h, 80);
        printf("  %6u   at 50 %%: %8.4f %8.4f   at 80 %%: %8.4f %8.4f\n", c->level[l], 100 * c->loss[l][0][half],
               100 * c->loss[l][1][half], 100 * c->loss[l][0][fifth], 100 * c->loss[l][1][fifth]);
    }
}

static void print_transfer(const holdout *h)
{
    if (!h->transfer) return;
    int row = holdout_row(h, 80);
    printf("  Regret %% at 80 %% pruned: what the table of one text loses more on another than the other's own.\n");
    printf("  %-22s", "table of \\ used on");
    for (uint32_t t = 0; t < h->n_texts; t++) printf(" %7.7s", holdout_text(h, t)->id);
    printf("\n");
    for (uint32_t from = 0; from < h->n_texts; from++) {
        printf("  %-14.14s %6u ", holdout_text(h, from)->id, holdout_text(h, from)->n_tokens);
        for (uint32_t to = 0; to < h->n_texts; to++) printf(" %7.2f", 100 * holdout_regret(h, row, from, to));
        printf("\n");
    }
}

void print_holdout(const holdout *h)
{
    char pairs[WORDS_SIZE];
    printf("%s: %s, each %s held out, sink %u, window %u, %s\n", h->pairs.metric,
           questions_on(pairs, h->n_pairs, h->n_texts, "text"), h->by_question ? "question" : "text",
           h->pairs.about.sink, h->pairs.about.window, scope_words(h->options.scope));
    print_losses(h);
    print_curve(h, &h->questions, "questions of each text");
    print_curve(h, &h->texts, "texts");
    print_transfer(h);
}

// ---- JSON -----------------------------------------------------------------------------------------------------------

static void add_interval(cJSON *row, const char *name, const interval *i)
{
    results_interval(row, name, i->value, i->low, i->high);
}

static void add_curve(cJSON *to, const char *name, const holdout *h, const learning_curve *c)
{
    cJSON *list = cJSON_AddArrayToObject(to, name);
    for (uint32_t l = 0; l < c->n_levels; l++) {
        cJSON *item = cJSON_CreateObject();
        cJSON_AddItemToArray(list, item);
        cJSON_AddNumberToObject(item, "level", c->level[l]);
        cJSON_AddItemToObject(item, "mean_ratio", cJSON_CreateDoubleArray(c->loss[l][0], (int)h->n_rows));
        cJSON_AddItemToObject(item, "default", cJSON_CreateDoubleArray(c->loss[l][1], (int)h->n_rows));
    }
}

static void add_transfer(cJSON *to, const holdout *h)
{
    cJSON *texts = cJSON_AddArrayToObject(to, "texts"), *list = cJSON_AddArrayToObject(to, "transfer");
    int cells = (int)(h->n_texts * h->n_texts);
    for (uint32_t t = 0; t < h->n_texts; t++) {
        cJSON *item = cJSON_CreateObject();
        cJSON_AddItemToArray(texts, item);
        cJSON_AddStringToObject(item, "id", holdout_text(h, t)->id);
        cJSON_AddNumberToObject(item, "n_tokens", holdout_text(h, t)->n_tokens);
    }
    for (uint32_t r = 9; r < h->n_rows && h->transfer; r += 10) {
        cJSON *item = cJSON_CreateObject();
        cJSON_AddItemToArray(list, item);
        cJSON_AddNumberToObject(item, "ratio", h->ratios[r]);
        cJSON_AddItemToObject(item, "loss", cJSON_CreateDoubleArray(h->transfer + (size_t)r * (size_t)cells, cells));
    }
}

void add_holdout(results *to, const holdout *h)
{
    cJSON *about = results_detail(to);
    cJSON_AddStringToObject(about, "metric", h->pairs.metric);
    cJSON_AddStringToObject(about, "held_out", h->by_question ? "question" : "text");
    cJSON_AddNumberToObject(about, "n_texts", h->n_texts);
    cJSON_AddNumberToObject(about, "n_questions", h->n_pairs);
    cJSON_AddNumberToObject(about, "seed", (double)h->seed);
    add_curve(about, "learning_questions", h, &h->questions);
    add_curve(about, "learning_texts", h, &h->texts);
    add_transfer(about, h);
    for (int m = 0; m < N_METHODS; m++)
        for (uint32_t r = 0; r < h->n_rows; r++) {
            cJSON *row = results_row(to);
            cJSON_AddStringToObject(row, "metric", h->pairs.metric);
            cJSON_AddStringToObject(row, "allocator", holdout_methods[m]);
            cJSON_AddNumberToObject(row, "ratio", h->ratios[r]);
            add_interval(row, "loss", &h->mean[r][m]);
            add_interval(row, "change", &h->ratio[r][m]);
        }
}

// ---- Picture --------------------------------------------------------------------------------------------------------

enum { WIDTH = 820, HEIGHT = 260, STEP = HEIGHT + 16, TOP = 78 };

static void draw_losses(const holdout *h, int top, FILE *out)
{
    static const int drawn[] = {METHOD_UNIFORM, METHOD_PAPER, METHOD_SHRINK_1, METHOD_OPTIMUM};
    enum { N_DRAWN = sizeof drawn / sizeof *drawn };
    static double values[N_DRAWN][ROWS];
    svg_series series[N_DRAWN];
    for (int i = 0; i < N_DRAWN; i++) {
        for (uint32_t r = 0; r < h->n_rows; r++) values[i][r] = h->mean[r][drawn[i]].value;
        series[i] = (svg_series){holdout_methods[drawn[i]], values[i], NULL, NULL};
    }
    svg_chart chart = {.title = "Held-out loss, share of all importance that can be lost",
                       .x_label = "per cent pruned",
                       .x = h->ratios,
                       .n = h->n_rows,
                       .n_series = N_DRAWN,
                       .series = series,
                       .logarithmic = true};
    svg_chart_put(out, &chart, SVG_MARGIN, top, WIDTH, HEIGHT);
}

// Below 20 % hardly anything is lost, and shares of it say nothing.
static void draw_changes(const holdout *h, int top, FILE *out)
{
    static const int drawn[] = {METHOD_MEAN_LOSS, METHOD_SHRINK_1, METHOD_SHRINK_2, METHOD_WORST, METHOD_CVAR};
    enum { N_DRAWN = sizeof drawn / sizeof *drawn };
    static double values[N_DRAWN][3][ROWS];
    svg_series series[N_DRAWN];
    uint32_t first = (uint32_t)holdout_row(h, 20);
    for (int i = 0; i < N_DRAWN; i++) {
        for (uint32_t r = first; r < h->n_rows; r++) {
            const interval *change = &h->ratio[r][drawn[i]];
            values[i][0][r] = 1 + change->value;
            values[i][1][r] = 1 + change->low;
            values[i][2][r] = 1 + change->high;
        }
        bool band = drawn[i] == METHOD_SHRINK_1;
        series[i] = (svg_series){holdout_methods[drawn[i]], values[i][0] + first, band ? values[i][1] + first : NULL,
                                 band ? values[i][2] + first : NULL};
    }
    svg_chart chart = {.title = "The same as a share of mean_ratio's, with 95 % intervals of the default",
                       .x_label = "per cent pruned",
                       .x = h->ratios + first,
                       .n = h->n_rows - first,
                       .n_series = N_DRAWN,
                       .series = series,
                       .from_low = true};
    svg_chart_put(out, &chart, SVG_MARGIN, top, WIDTH, HEIGHT);
}

static const char LEARNING[] = "Loss on the text left out, as a share of mean_ratio's with all there is";

static void draw_learning(const holdout *h, const learning_curve *c, const char *title, const char *label, int top,
                          FILE *out)
{
    static const char *const names[4] = {"mean_ratio, 50 %", "default, 50 %", "mean_ratio, 80 %", "default, 80 %"};
    double x[LEVELS_MAX], y[4][LEVELS_MAX];
    svg_series series[4];
    for (uint32_t l = 0; l < c->n_levels; l++) {
        x[l] = c->level[l];
        for (int i = 0; i < 4; i++) {
            int row = holdout_row(h, i < 2 ? 50 : 80);
            double all = c->loss[c->n_levels - 1][0][row];
            y[i][l] = all > 0 ? c->loss[l][i % 2][row] / all : 1;
        }
    }
    for (int i = 0; i < 4; i++) series[i] = (svg_series){names[i], y[i], NULL, NULL};
    svg_chart chart = {.title = title,
                       .x_label = label,
                       .x = x,
                       .n = c->n_levels,
                       .n_series = 4,
                       .series = series,
                       .x_unit = SVG_NUMBERS,
                       .from_low = true};
    svg_chart_put(out, &chart, SVG_MARGIN, top, WIDTH, HEIGHT);
}

static void draw_transfer(const holdout *h, int top, FILE *out)
{
    static double values[TRANSFER_MAX * TRANSFER_MAX];
    const char *names[TRANSFER_MAX];
    double most = 1;
    for (uint32_t from = 0; from < h->n_texts; from++) {
        names[from] = holdout_text(h, from)->id;
        for (uint32_t to = 0; to < h->n_texts; to++) {
            double more = 100 * holdout_regret(h, holdout_row(h, 80), from, to);
            values[from * h->n_texts + to] = more;
            most = fmax(most, more);
        }
    }
    svg_matrix m = {.title = "Regret in per cent at 80 % pruned: the table of a row's text, used on a column's",
                    .n_rows = h->n_texts,
                    .n_columns = h->n_texts,
                    .row_names = names,
                    .column_names = h->n_texts <= 8 ? names : NULL,
                    .values = values,
                    .most = most,
                    .decimals = 1};
    svg_matrix_put(out, &m, SVG_MARGIN, top, WIDTH, 40 + 24 * (int)h->n_texts);
}

void draw_holdout(const holdout *h, FILE *out)
{
    char title[160], subtitle[160], pairs[WORDS_SIZE];
    int height = h->transfer ? TOP + 4 * STEP + 60 + 24 * (int)h->n_texts : TOP + 2 * STEP;
    snprintf(title, sizeof title, "Tables on what they have not seen: %.110s", h->pairs.metric);
    snprintf(subtitle, sizeof subtitle, "%s; each %s left out in turn",
             questions_on(pairs, h->n_pairs, h->n_texts, "text"), h->by_question ? "question" : "text");
    svg_begin(out, 2 * SVG_MARGIN + WIDTH, height + SVG_MARGIN, title, subtitle);
    draw_losses(h, TOP, out);
    draw_changes(h, TOP + STEP, out);
    if (h->transfer) {
        draw_learning(h, &h->questions, LEARNING, "questions of each calibration text", TOP + 2 * STEP, out);
        draw_learning(h, &h->texts, LEARNING, "calibration texts", TOP + 3 * STEP, out);
        draw_transfer(h, TOP + 4 * STEP, out);
    }
    svg_end(out);
}
