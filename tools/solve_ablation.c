// kvbudget solve --ablation: within every question, the solver's budgets against those of other methods, and against
// budgets that take the metric's ranking for perfect ("without the optimality gap", LU-KV section 5.4; methods.md 2.9).
// All keep equally many tokens, protect the same ones, and evict by the same metric.
#include "runtime/allocate.h"
#include "runtime/fail.h"
#include "tools/solve_job.h"
#include "tools/svg.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { UNIFORM, PYRAMID, ADA, ADA_POOLED, NO_GAP, OPTIMUM, N_WAYS, RATIOS = 19, FIXED = NO_GAP };
static const char *const WAYS[N_WAYS] = {"uniform",           "PyramidKV",   "AdaKV",
                                         "AdaKV, all layers", "without gap", "optimum"};
static const double PYRAMID_BETA = 20, ADA_ALPHA = 0.2; // published values
enum { PYRAMID_WINDOW = 8 };

typedef struct ablation {
    metric_job job; // first: actions get its address
    double ratios[RATIOS];
    uint32_t n_heads;
    size_t context;         // that fixed is made for
    uint32_t *fixed[FIXED]; // [RATIOS, N] budgets that do not depend on the question
    double loss[N_WAYS][RATIOS];
    double *head_loss[N_WAYS]; // [RATIOS, N] mean over the questions of shares of the question's mass
} ablation;

// Tokens in all of a ratio: as greedy keeps them.
static uint64_t total_of(const allocation *a, uint32_t row)
{
    uint64_t sum = 0;
    for (uint32_t h = 0; h < a->n_heads; h++) sum += a->keep[(size_t)row * a->n_heads + h];
    return sum;
}

static void fill_fixed(ablation *x, const problem *p)
{
    const cache_shape *c = &p->curves.shape;
    allocate_shape shape = {c->n_layers, c->n_kv_heads, c->n_tokens};
    for (uint32_t r = 0; r < RATIOS; r++) {
        size_t at = (size_t)r * x->n_heads;
        allocate_uniform(&shape, x->ratios[r], x->fixed[UNIFORM] + at);
        allocate_pyramid(&shape, x->ratios[r], PYRAMID_BETA, PYRAMID_WINDOW, x->fixed[PYRAMID] + at);
        allocate_ada(&shape, x->ratios[r], ADA_ALPHA, x->job.scores, c->sink, c->window, ADA_KVPRESS,
                     x->fixed[ADA] + at);
        allocate_ada(&shape, x->ratios[r], ADA_ALPHA, x->job.scores, c->sink, c->window, ADA_GLOBAL,
                     x->fixed[ADA_POOLED] + at);
        for (int w = 0; w < FIXED; w++)
            allocate_level(&shape, total_of(&p->allocation, r), shape_protected(c), x->fixed[w] + at);
    }
}

static void add_losses(ablation *x, const loss_curves *c, int way, const uint32_t *keep)
{
    double scale = c->total > 0 ? 1 / (c->total * x->job.n_pairs) : 0;
    for (uint32_t r = 0; r < RATIOS; r++)
        for (uint32_t h = 0; h < x->n_heads; h++) {
            double loss = scale * loss_at(c, h, keep[(size_t)r * x->n_heads + h]);
            x->head_loss[way][(size_t)r * x->n_heads + h] += loss;
            x->loss[way][r] += loss;
        }
}

// Budgets from curves in the oracle's own order: what would be best if the metric ranked perfectly.
static kvb_status solve_without_gap(const solve_command *s, ablation *x, const problem *p, kvb_error *err)
{
    problem perfect = {.loss = NULL};
    kvb_status status = problem_init(&perfect, &p->curves.shape, &s->options, err);
    if (status == KVB_OK) status = loss_curves_fill_perfect(&perfect.curves, x->job.oracle, err);
    if (status == KVB_OK) status = problem_solve(&perfect, err);
    if (status == KVB_OK) add_losses(x, &p->curves, NO_GAP, perfect.allocation.keep);
    problem_free(&perfect);
    return status;
}

static kvb_status compare_pair(solve_command *s, metric_job *job, problem *p, kvb_error *err)
{
    ablation *x = (ablation *)job;
    kvb_status status = problem_solve(p, err);
    if (status != KVB_OK) return status;
    if (x->context != job->context) fill_fixed(x, p);
    x->context = job->context;
    for (int w = 0; w < FIXED; w++) add_losses(x, &p->curves, w, x->fixed[w]);
    add_losses(x, &p->curves, OPTIMUM, p->allocation.keep);
    return solve_without_gap(s, x, p, err);
}

// ---- What comes out -------------------------------------------------------------------------------------------------

static void print_ablation(const solve_command *s, const ablation *x)
{
    printf("%s: %u questions on %u contexts, sink %u, window %u, %s\n", x->job.metric, x->job.n_pairs,
           x->job.n_contexts, x->job.sink, x->job.window,
           s->options.scope == SCOPE_LAYER ? "layer by layer" : "over all layers");
    printf("  Loss %% of each question's own budgets, equally many tokens kept:\n  pruned");
    for (int w = 0; w < N_WAYS; w++) printf(" %18s", WAYS[w]);
    printf("   optimum / AdaKV\n");
    for (int r = 0; r < RATIOS; r++) {
        printf("  %4.0f %%", 100 * x->ratios[r]);
        for (int w = 0; w < N_WAYS; w++) printf(" %18.4f", 100 * x->loss[w][r]);
        printf("   %.3f\n", x->loss[ADA][r] > 0 ? x->loss[OPTIMUM][r] / x->loss[ADA][r] : 1);
    }
}

static bool add_json(cJSON *list, const ablation *x)
{
    cJSON *item = cJSON_CreateObject(), *ways = NULL;
    bool ok = item && cJSON_AddItemToArray(list, item) && cJSON_AddStringToObject(item, "metric", x->job.metric) &&
              cJSON_AddNumberToObject(item, "n_questions", x->job.n_pairs) &&
              cJSON_AddItemToObject(item, "ratios", cJSON_CreateDoubleArray(x->ratios, RATIOS)) &&
              (ways = cJSON_AddArrayToObject(item, "methods"));
    for (int w = 0; w < N_WAYS && ok; w++) {
        cJSON *way = cJSON_CreateObject(), *heads = NULL;
        ok = way && cJSON_AddItemToArray(ways, way) && cJSON_AddStringToObject(way, "name", WAYS[w]) &&
             cJSON_AddItemToObject(way, "loss", cJSON_CreateDoubleArray(x->loss[w], RATIOS)) &&
             (heads = cJSON_AddArrayToObject(way, "head_loss"));
        for (size_t r = 0; r < RATIOS && ok; r++) {
            cJSON *row = cJSON_CreateDoubleArray(x->head_loss[w] + r * x->n_heads, (int)x->n_heads);
            ok = row && cJSON_AddItemToArray(heads, row);
        }
    }
    return ok;
}

enum { WIDTH = 820, HEIGHT = 270, STEP = HEIGHT + 16, TOP = 78, AT = 15 }; // AT: row of 80 % pruned

static void draw_layers(const solve_command *s, const ablation *x, FILE *out)
{
    record_shape shape = record_get_shape(s->r);
    double *values = calloc((size_t)(N_WAYS + 1) * shape.n_layers, sizeof *values);
    if (!values) return;
    svg_series series[N_WAYS];
    double *layer = values + (size_t)N_WAYS * shape.n_layers;
    for (uint32_t l = 0; l < shape.n_layers; l++) layer[l] = l;
    for (int w = 0; w < N_WAYS; w++) {
        double *y = values + (size_t)w * shape.n_layers;
        for (uint32_t h = 0; h < x->n_heads; h++)
            y[h / shape.n_kv_heads] += x->head_loss[w][(size_t)AT * x->n_heads + h];
        series[w] = (svg_series){WAYS[w], y, NULL, NULL};
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

static void draw_heads(const solve_command *s, const ablation *x, FILE *out)
{
    static const int drawn[] = {UNIFORM, PYRAMID, ADA, NO_GAP, OPTIMUM};
    enum { N_DRAWN = sizeof drawn / sizeof *drawn };
    record_shape shape = record_get_shape(s->r);
    double most = 0;
    for (int i = 0; i < N_DRAWN; i++)
        for (uint32_t h = 0; h < x->n_heads; h++)
            most = fmax(most, x->head_loss[drawn[i]][(size_t)AT * x->n_heads + h]);
    for (int i = 0; i < N_DRAWN; i++) {
        svg_matrix m = {.title = WAYS[drawn[i]],
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

static void draw_ablation(const solve_command *s, const void *what, FILE *out)
{
    const ablation *x = what;
    char title[160], subtitle[160];
    svg_series series[N_WAYS];
    snprintf(title, sizeof title, "Budgets of one question, by different methods: %.100s", x->job.metric);
    snprintf(subtitle, sizeof subtitle,
             "%u questions on %u contexts; equally many tokens kept, the same ones protected", x->job.n_pairs,
             x->job.n_contexts);
    svg_begin(out, 2 * SVG_MARGIN + WIDTH,
              TOP + 2 * STEP + 20 + 38 + 11 * (int)record_get_shape(s->r).n_layers + 2 * SVG_MARGIN, title, subtitle);
    for (int w = 0; w < N_WAYS; w++) series[w] = (svg_series){WAYS[w], x->loss[w], NULL, NULL};
    svg_chart chart = {.title = "Loss, share of all importance that can be lost",
                       .x_label = "per cent pruned",
                       .x = x->ratios,
                       .n = RATIOS,
                       .n_series = N_WAYS,
                       .series = series,
                       .logarithmic = true};
    svg_chart_put(out, &chart, SVG_MARGIN, TOP, WIDTH, HEIGHT);
    draw_layers(s, x, out);
    draw_heads(s, x, out);
    svg_end(out);
}

// ---- The whole ------------------------------------------------------------------------------------------------------

static kvb_status ablation_begin(solve_command *s, ablation *x, kvb_error *err)
{
    cache_shape longest;
    for (int r = 0; r < RATIOS; r++) x->ratios[r] = 5 * (r + 1) / 100.0;
    s->options.ratios = x->ratios;
    s->options.n_rows = RATIOS;
    kvb_status status = prepare_pairs(s, &x->job, &longest, err);
    if (status != KVB_OK) return status;
    x->n_heads = shape_heads(&longest);
    x->context = s->n_selected;
    x->job.n_visits = 1;
    bool ok = true;
    for (int w = 0; w < FIXED; w++)
        ok = (x->fixed[w] = malloc((size_t)RATIOS * x->n_heads * sizeof *x->fixed[w])) && ok;
    for (int w = 0; w < N_WAYS; w++)
        ok = (x->head_loss[w] = calloc((size_t)RATIOS * x->n_heads, sizeof *x->head_loss[w])) && ok;
    return ok ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for %u heads", x->n_heads);
}

kvb_status solve_ablation(solve_command *s, const char *metric, cJSON *list, kvb_error *err)
{
    ablation *x = calloc(1, sizeof *x);
    if (!x) return kvb_fail(err, KVB_MEMORY, "no memory for metric %s", metric);
    x->job.metric = metric;
    s->aggregate = AGGREGATE_MEAN_RATIO; // nothing is brought together
    s->mean_loss = false;
    uint32_t done = 0;
    kvb_status status = ablation_begin(s, x, err);
    if (status == KVB_OK) {
        progress_begin(&s->bar, metric, s->quiet);
        status = walk_pairs(s, &x->job, compare_pair, &done, err);
        progress_end(&s->bar, "%s", status == KVB_OK ? "compared" : "stopped");
    }
    if (status == KVB_OK && s->picture) status = write_picture(s, s->picture, metric, draw_ablation, x, err);
    if (status == KVB_OK && list && !add_json(list, x))
        status = kvb_fail(err, KVB_MEMORY, "no memory for the JSON text");
    if (status == KVB_OK && !list) print_ablation(s, x);
    for (int w = 0; w < FIXED; w++) free(x->fixed[w]);
    for (int w = 0; w < N_WAYS; w++) free(x->head_loss[w]);
    release_pairs(&x->job);
    free(x);
    return status;
}
