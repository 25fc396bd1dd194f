// What solve --holdout prints, as text and as JSON, and draws.
#include "study/interval.h"
#include "tools/report/study_report.h"
#include "tools/report/svg.h"
#include "tools/report/words.h"
#include <math.h>

// ---- Text -----------------------------------------------------------------------------------------------------------

static void print_change(const holdout *h, int percent, int method)
{
    const interval *x = &h->ratio[percent - 1][method];
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
        for (int i = 0; i < N_SHOWN; i++) printf("%11.4f", 100 * h->mean[shown[i] - 1][m].value);
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

void print_holdout(const holdout *h)
{
    char pairs[WORDS_SIZE];
    printf("%s: %s, each text held out, sink %u, window %u, %s\n", h->pairs.metric,
           questions_on(pairs, h->n_pairs, h->n_texts, "text"), h->pairs.about.sink, h->pairs.about.window,
           scope_words(h->options.scope));
    print_losses(h);
}

// ---- JSON -----------------------------------------------------------------------------------------------------------

static void add_interval(cJSON *row, const char *name, const interval *i)
{
    results_interval(row, name, i->value, i->low, i->high);
}

void add_holdout(results *to, const holdout *h)
{
    cJSON *about = results_detail(to);
    cJSON_AddStringToObject(about, "metric", h->pairs.metric);
    cJSON_AddNumberToObject(about, "n_texts", h->n_texts);
    cJSON_AddNumberToObject(about, "n_questions", h->n_pairs);
    for (int m = 0; m < N_METHODS; m++)
        for (uint32_t r = 0; r < ROWS; r++) {
            cJSON *row = results_row(to);
            cJSON_AddStringToObject(row, "metric", h->pairs.metric);
            cJSON_AddStringToObject(row, "allocator", holdout_methods[m]);
            cJSON_AddNumberToObject(row, "ratio", h->options.ratios[r]);
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
        for (uint32_t r = 0; r < ROWS; r++) values[i][r] = h->mean[r][drawn[i]].value;
        series[i] = (svg_series){holdout_methods[drawn[i]], values[i], NULL, NULL};
    }
    svg_chart chart = {.title = "Held-out loss, share of all importance that can be lost",
                       .x_label = "per cent pruned",
                       .x = h->options.ratios,
                       .n = ROWS,
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
    uint32_t first = 20 - 1;
    for (int i = 0; i < N_DRAWN; i++) {
        for (uint32_t r = first; r < ROWS; r++) {
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
                       .x = h->options.ratios + first,
                       .n = ROWS - first,
                       .n_series = N_DRAWN,
                       .series = series,
                       .from_low = true};
    svg_chart_put(out, &chart, SVG_MARGIN, top, WIDTH, HEIGHT);
}

void draw_holdout(const holdout *h, FILE *out)
{
    char title[160], subtitle[160], pairs[WORDS_SIZE];
    snprintf(title, sizeof title, "Tables on what they have not seen: %.110s", h->pairs.metric);
    snprintf(subtitle, sizeof subtitle, "%s; each text left out in turn",
             questions_on(pairs, h->n_pairs, h->n_texts, "text"));
    svg_begin(out, 2 * SVG_MARGIN + WIDTH, TOP + 2 * STEP + SVG_MARGIN, title, subtitle);
    draw_losses(h, TOP, out);
    draw_changes(h, TOP + STEP, out);
    svg_end(out);
}
