#include "tools/report/weights_picture.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "tools/report/svg.h"
#include <math.h>
#include <stdlib.h>

enum { CELL_HEIGHT = 14, CELL_WIDTH = 34, LABELS = 46, TITLE = 40, SPACE = 26, HEADER = 74, WIDTH_LEAST = 640 };

uint32_t weights_effects(const kvb_ranking_info *r)
{
    return (r->layer_mean ? 2 : 1) * r->n_features + 1;
}

double weights_effect(const kvb_ranking_info *r, size_t head, uint32_t i)
{
    const double *w = r->weights + head * r->n_columns;
    return i < r->n_features ? fabs(w[2 * i] + w[2 * i + 1]) : fabs(w[r->n_features + i]);
}

void weights_effect_name(const kvb_ranking_info *r, uint32_t i, char *out, size_t size)
{
    uint32_t F = r->n_features;
    bool of_layer = i >= F && i + 1 < weights_effects(r);
    const char *name = i < F ? r->metrics[i] : of_layer ? r->metrics[i - F] : "recency";
    snprintf(out, size, "%s%s", of_layer ? "layer's " : "", name);
}

// shares [E, L, G] of all effects; returns the largest.
static double fill_shares(double *shares, const kvb_ranking_info *r)
{
    size_t heads = (size_t)r->n_layers * r->n_kv_heads;
    uint32_t E = weights_effects(r);
    double most = 0;
    for (size_t h = 0; h < heads; h++) {
        double total = 0;
        for (uint32_t i = 0; i < E; i++) total += weights_effect(r, h, i);
        for (uint32_t i = 0; i < E; i++) {
            shares[i * heads + h] = total > 0 ? weights_effect(r, h, i) / total : 0;
            most = fmax(most, shares[i * heads + h]);
        }
    }
    return most;
}

void weights_svg(const kvb_ranking *ranking, FILE *out)
{
    const kvb_ranking_info *r = kvb_ranking_about(ranking);
    size_t heads = (size_t)r->n_layers * r->n_kv_heads;
    uint32_t E = weights_effects(r);
    double *shares = need(E * heads, sizeof *shares, "shares");
    double most = fill_shares(shares, r);
    int panel = LABELS + CELL_WIDTH * (int)r->n_kv_heads, height = TITLE + CELL_HEIGHT * (int)r->n_layers;
    panel = panel < 150 ? 150 : panel; // room for a metric's name
    int width = 2 * SVG_MARGIN + (panel + SPACE) * (int)E;
    svg_begin(out, width < WIDTH_LEAST ? WIDTH_LEAST : width, HEADER + height + 2 * SVG_MARGIN, r->name,
              "Which head uses which feature: per cent of what one deviation of each moves the head's scores");
    for (uint32_t i = 0; i < E; i++) {
        char title[96];
        weights_effect_name(r, i, title, sizeof title);
        const svg_matrix m = {.title = title,
                              .n_rows = r->n_layers,
                              .n_columns = r->n_kv_heads,
                              .values = shares + i * heads,
                              .most = most,
                              .decimals = 2};
        svg_matrix_put(out, &m, SVG_MARGIN + (int)i * (panel + SPACE), HEADER, panel, height);
    }
    svg_end(out);
    free(shares);
}
