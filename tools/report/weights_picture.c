#include "tools/report/weights_picture.h"
#include "runtime/fail.h"
#include "tools/report/svg.h"
#include <math.h>
#include <stdlib.h>

enum { CELL_HEIGHT = 14, CELL_WIDTH = 34, LABELS = 46, TITLE = 40, SPACE = 26, HEADER = 74, WIDTH_LEAST = 640 };

// shares [F + 1, L, G]: of every feature, then of recency; returns the largest.
static double fill_shares(double *shares, const kvb_ranking_info *r)
{
    size_t heads = (size_t)r->n_layers * r->n_kv_heads, F = r->n_features;
    double most = 0;
    for (size_t h = 0; h < heads; h++) {
        const double *w = r->weights + h * r->n_columns;
        double total = fabs(w[2 * F]);
        for (size_t f = 0; f < F; f++) total += fabs(w[2 * f] + w[2 * f + 1]);
        for (size_t f = 0; f <= F; f++) {
            double effect = f < F ? fabs(w[2 * f] + w[2 * f + 1]) : fabs(w[2 * F]);
            shares[f * heads + h] = total > 0 ? effect / total : 0;
            most = fmax(most, shares[f * heads + h]);
        }
    }
    return most;
}

kvb_status weights_svg(const kvb_ranking *ranking, FILE *out, kvb_error *err)
{
    const kvb_ranking_info *r = kvb_ranking_about(ranking);
    size_t heads = (size_t)r->n_layers * r->n_kv_heads, F = r->n_features;
    double *shares = malloc((F + 1) * heads * sizeof *shares);
    if (!shares) return kvb_fail(err, KVB_MEMORY, "no memory for a picture of %zu heads", heads);
    double most = fill_shares(shares, r);
    int panel = LABELS + CELL_WIDTH * (int)r->n_kv_heads, height = TITLE + CELL_HEIGHT * (int)r->n_layers;
    panel = panel < 150 ? 150 : panel; // room for a metric's name
    int width = 2 * SVG_MARGIN + (panel + SPACE) * (int)(F + 1);
    svg_begin(out, width < WIDTH_LEAST ? WIDTH_LEAST : width, HEADER + height + 2 * SVG_MARGIN, r->name,
              "Which head uses which feature: per cent of what one deviation of each moves the head's scores");
    for (size_t f = 0; f <= F; f++) {
        const svg_matrix m = {.title = f < F ? r->metrics[f] : "recency",
                              .n_rows = r->n_layers,
                              .n_columns = r->n_kv_heads,
                              .values = shares + f * heads,
                              .most = most,
                              .decimals = 2};
        svg_matrix_put(out, &m, SVG_MARGIN + (int)f * (panel + SPACE), HEADER, panel, height);
    }
    svg_end(out);
    free(shares);
    return KVB_OK;
}
