// What solve --ablation prints, as text and as JSON, and draws.
#include "tools/report/study_report.h"
#include "tools/report/svg.h"
#include "tools/report/words.h"
#include <math.h>
#include <stdlib.h>

void print_ablation(const ablation *x)
{
    char pairs[WORDS_SIZE];
    printf("%s: %s, sink %u, window %u, %s\n", x->pairs.metric,
           questions_on(pairs, x->pairs.n_pairs, x->pairs.n_contexts, "context"), x->pairs.about.sink,
           x->pairs.about.window, scope_words(x->options.scope));
    printf("  Loss %% of each question's own budgets, equally many tokens kept:\n  pruned");
    for (int w = 0; w < N_WAYS; w++) printf(" %18s", ablation_ways[w]);
    printf("   optimum / AdaKV\n");
    for (int r = 0; r < ABLATION_RATIOS; r++) {
        printf("  %4.0f %%", 100 * x->ratios[r]);
        for (int w = 0; w < N_WAYS; w++) printf(" %18.4f", 100 * x->loss[w][r]);
        printf("   %.3f\n", x->loss[WAY_ADA][r] > 0 ? x->loss[WAY_OPTIMUM][r] / x->loss[WAY_ADA][r] : 1);
    }
}

void add_ablation(results *to, const ablation *x)
{
    cJSON *about = results_detail(to), *ways;
    cJSON_AddStringToObject(about, "metric", x->pairs.metric);
    cJSON_AddNumberToObject(about, "n_questions", x->pairs.n_pairs);
    cJSON_AddItemToObject(about, "ratios", cJSON_CreateDoubleArray(x->ratios, ABLATION_RATIOS));
    ways = cJSON_AddObjectToObject(about, "head_loss"); // per allocator [ratio][layer * KV heads + head]
    for (int w = 0; w < N_WAYS; w++) {
        cJSON *heads = cJSON_AddArrayToObject(ways, ablation_ways[w]);
        for (size_t r = 0; r < ABLATION_RATIOS; r++) {
            const double *loss = x->head_loss[w] + r * x->n_heads;
            cJSON *row = results_row(to);
            cJSON_AddStringToObject(row, "metric", x->pairs.metric);
            cJSON_AddStringToObject(row, "allocator", ablation_ways[w]);
            cJSON_AddNumberToObject(row, "ratio", x->ratios[r]);
            cJSON_AddNumberToObject(row, "loss", x->loss[w][r]);
            cJSON_AddItemToArray(heads, cJSON_CreateDoubleArray(loss, (int)x->n_heads));
        }
    }
}

enum { WIDTH = 820, HEIGHT = 270, STEP = HEIGHT + 16, TOP = 78, AT = 15 }; // AT: row of 80 % pruned

static void draw_layers(const ablation *x, FILE *out)
{
    record_shape shape = record_get_shape(x->pairs.from->r);
    double *values = calloc((size_t)(N_WAYS + 1) * shape.n_layers, sizeof *values);
    if (!values) return;
    svg_series series[N_WAYS];
    double *layer = values + (size_t)N_WAYS * shape.n_layers;
    for (uint32_t l = 0; l < shape.n_layers; l++) layer[l] = l;
    for (int w = 0; w < N_WAYS; w++) {
        double *y = values + (size_t)w * shape.n_layers;
        for (uint32_t h = 0; h < x->n_heads; h++)
            y[h / shape.n_kv_heads] += x->head_loss[w][(size_t)AT * x->n_heads + h];
        series[w] = (svg_series){ablation_ways[w], y, NULL, NULL};
    }
    svg_chart chart = {.title = "Loss of each layer at 80 % pruned, share of the question's mass",
                       .x_label = "layer",
                       .x = layer,
                       .n = shape.n_layers,
                       .n_series = N_WAYS,
                       .series = series,
                       .x_unit = SVG_NUMBERS};
    svg_chart_put(out, &chart, SVG_MARGIN, TOP + STEP, WIDTH, HEIGHT);
    free(values);
}

static void draw_heads(const ablation *x, FILE *out)
{
    static const int drawn[] = {WAY_UNIFORM, WAY_PYRAMID, WAY_ADA, WAY_NO_GAP, WAY_OPTIMUM};
    enum { N_DRAWN = sizeof drawn / sizeof *drawn };
    record_shape shape = record_get_shape(x->pairs.from->r);
    double most = 0;
    for (int i = 0; i < N_DRAWN; i++)
        for (uint32_t h = 0; h < x->n_heads; h++)
            most = fmax(most, x->head_loss[drawn[i]][(size_t)AT * x->n_heads + h]);
    for (int i = 0; i < N_DRAWN; i++) {
        svg_matrix m = {.title = ablation_ways[drawn[i]],
                        .n_rows = shape.n_layers,
                        .n_columns = shape.n_kv_heads,
                        .values = x->head_loss[drawn[i]] + (size_t)AT * x->n_heads,
                        .most = most,
                        .decimals = -1};
        svg_matrix_put(out, &m, SVG_MARGIN + i * (WIDTH / N_DRAWN), TOP + 2 * STEP + 20, WIDTH / N_DRAWN - 16,
                       38 + 11 * (int)shape.n_layers);
    }
    svg_text(out, SVG_MARGIN, TOP + 2 * STEP + 8, "sub",
             "Loss of each head at 80 % pruned: layers go down, KV heads right; "
             "light is much, the same scale for all");
}

void draw_ablation(const ablation *x, FILE *out)
{
    char title[160], subtitle[160], pairs[WORDS_SIZE];
    svg_series series[N_WAYS];
    snprintf(title, sizeof title, "Budgets of one question, by different methods: %.100s", x->pairs.metric);
    snprintf(subtitle, sizeof subtitle, "%s; equally many tokens kept, the same ones protected",
             questions_on(pairs, x->pairs.n_pairs, x->pairs.n_contexts, "context"));
    svg_begin(out, 2 * SVG_MARGIN + WIDTH,
              TOP + 2 * STEP + 20 + 38 + 11 * (int)record_get_shape(x->pairs.from->r).n_layers + 2 * SVG_MARGIN, title,
              subtitle);
    for (int w = 0; w < N_WAYS; w++) series[w] = (svg_series){ablation_ways[w], x->loss[w], NULL, NULL};
    svg_chart chart = {.title = "Loss, share of all importance that can be lost",
                       .x_label = "per cent pruned",
                       .x = x->ratios,
                       .n = ABLATION_RATIOS,
                       .n_series = N_WAYS,
                       .series = series,
                       .logarithmic = true};
    svg_chart_put(out, &chart, SVG_MARGIN, TOP, WIDTH, HEIGHT);
    draw_layers(x, out);
    draw_heads(x, out);
    svg_end(out);
}
