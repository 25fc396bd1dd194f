// What solve --lengths prints, as text and as JSON, and draws.
#include "tools/report/study_report.h"
#include "tools/report/svg.h"
#include "tools/report/words.h"
#include <math.h>

void print_lengths(const lengths *x)
{
    static const uint32_t shown[] = {50, 80, 90};
    const pair_set *p = &x->cuts[0].pairs;
    char pairs[WORDS_SIZE];
    printf("%s: %s at %u %s, each text held out, sink %u, window %u, %s\n", p->metric,
           questions_on(pairs, x->n_pairs, x->n_texts, "text"), x->n_cuts, plural(x->n_cuts, "length", "lengths"),
           p->about.sink, p->about.window, scope_words(x->options.scope));
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++) {
        uint32_t row = shown[i] - 1;
        printf("  %u %% pruned: loss %% with tables from the same length, and how many per cent more with others:\n",
               shown[i]);
        printf("  %-22s", "table from \\ used on");
        for (uint32_t on = 0; on < x->n_cuts; on++) printf(" %9s", x->cuts[on].name);
        printf("\n  %-22s", "the same length");
        for (uint32_t on = 0; on < x->n_cuts; on++) printf(" %9.4f", 100 * x->loss[on][on][row]);
        printf("\n");
        for (uint32_t from = 0; from < x->n_cuts + 2; from++) {
            printf("  %-22s", lengths_source(x, from));
            for (uint32_t on = 0; on < x->n_cuts; on++) printf(" %+9.2f", 100 * lengths_change(x, from, on, row));
            printf("\n");
        }
    }
}

static void add_length_rows(results *to, const lengths *x, uint32_t from, uint32_t on)
{
    for (uint32_t r = 0; r < ROWS; r++) {
        cJSON *row = results_row(to);
        cJSON_AddStringToObject(row, "metric", x->cuts[0].pairs.metric);
        cJSON_AddStringToObject(row, "table_from", lengths_source(x, from));
        cJSON_AddNumberToObject(row, "n_tokens", x->cuts[on].tokens);
        cJSON_AddNumberToObject(row, "ratio", (r + 1) / 100.0);
        cJSON_AddNumberToObject(row, "loss", x->loss[from][on][r]);
    }
}

void add_lengths(results *to, const lengths *x)
{
    uint32_t side = x->n_cuts * x->n_texts;
    cJSON *about = results_detail(to), *tokens, *names, *transfer;
    cJSON_AddStringToObject(about, "metric", x->cuts[0].pairs.metric);
    cJSON_AddNumberToObject(about, "n_texts", x->n_texts);
    cJSON_AddNumberToObject(about, "n_questions", x->n_pairs);
    tokens = cJSON_AddArrayToObject(about, "lengths");
    names = cJSON_AddArrayToObject(about, "cuts");
    transfer = cJSON_AddArrayToObject(about, "transfer");
    for (uint32_t k = 0; k < x->n_cuts; k++) cJSON_AddItemToArray(tokens, cJSON_CreateNumber(x->cuts[k].tokens));
    for (uint32_t i = 0; i < side; i++) cJSON_AddItemToArray(names, cJSON_CreateString(x->names[i]));
    for (uint32_t from = 0; from < x->n_cuts + 2; from++)
        for (uint32_t on = 0; on < x->n_cuts; on++) add_length_rows(to, x, from, on);
    for (uint32_t row = 9; row < ROWS; row += 10) {
        const double *loss = x->transfer + (size_t)row * side * side;
        cJSON *one = cJSON_CreateObject();
        cJSON_AddItemToArray(transfer, one);
        cJSON_AddNumberToObject(one, "ratio", (row + 1) / 100.0);
        cJSON_AddItemToObject(one, "loss", cJSON_CreateDoubleArray(loss, (int)(side * side)));
    }
}

static int draw_changes(const lengths *x, uint32_t row, int top, FILE *out)
{
    enum { WIDTH = 820 };
    double values[(LENGTHS_MAX + 2) * LENGTHS_MAX], most = 1;
    const char *rows[LENGTHS_MAX + 2], *columns[LENGTHS_MAX];
    char title[120];
    int height = 40 + 24 * (int)(x->n_cuts + 2);
    for (uint32_t from = 0; from < x->n_cuts + 2; from++) {
        rows[from] = lengths_source(x, from);
        for (uint32_t on = 0; on < x->n_cuts; on++) {
            columns[on] = x->cuts[on].name;
            most = fmax(most, values[from * x->n_cuts + on] = 100 * lengths_change(x, from, on, row));
        }
    }
    snprintf(title, sizeof title,
             "Held-out loss at %u %% pruned: per cent more than with tables from the column's own length", row + 1);
    svg_matrix_put(out,
                   &(svg_matrix){.title = title,
                                 .n_rows = x->n_cuts + 2,
                                 .n_columns = x->n_cuts,
                                 .row_names = rows,
                                 .column_names = columns,
                                 .values = values,
                                 .most = most,
                                 .decimals = 1},
                   SVG_MARGIN, top, WIDTH, height);
    return top + height + 30;
}

void draw_lengths(const lengths *x, FILE *out)
{
    enum { WIDTH = 820, TOP = 78 };
    uint32_t side = x->n_cuts * x->n_texts;
    int top = TOP, blocks = 40 + 24 * (int)(x->n_cuts + 2) + 30, last = 40 + 20 * (int)side;
    char title[160], subtitle[160], pairs[WORDS_SIZE];
    static double values[CUTS_MAX * CUTS_MAX];
    const char *names[CUTS_MAX];
    double most = 1;
    snprintf(title, sizeof title, "Tables at other lengths: %.110s", x->cuts[0].pairs.metric);
    snprintf(subtitle, sizeof subtitle, "%s at %u %s; each text left out in turn",
             questions_on(pairs, x->n_pairs, x->n_texts, "text"), x->n_cuts, plural(x->n_cuts, "length", "lengths"));
    svg_begin(out, 2 * SVG_MARGIN + WIDTH, TOP + 2 * blocks + last + SVG_MARGIN, title, subtitle);
    top = draw_changes(x, 49, top, out);
    top = draw_changes(x, 79, top, out);
    for (uint32_t from = 0; from < side; from++) {
        names[from] = x->names[from];
        for (uint32_t to = 0; to < side; to++)
            most = fmax(most, values[from * side + to] = 100 * lengths_regret(x, from, to, 79));
    }
    svg_matrix_put(out,
                   &(svg_matrix){.title = "Regret in per cent at 80 % pruned: the table of a row's text and length, "
                                          "used on a column's (same order)",
                                 .n_rows = side,
                                 .n_columns = side,
                                 .row_names = names,
                                 .values = values,
                                 .most = most,
                                 .decimals = side <= 16 ? 0 : -1},
                   SVG_MARGIN, top, WIDTH, last);
    svg_end(out);
}
