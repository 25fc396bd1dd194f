// Looking things up for the page.
#include "tools/report/page_sections.h"
#include "tools/report/results_grid.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

kvb_row page_row_near(const kvb_table *t, double ratio)
{
    kvb_row best = {0}, row;
    for (uint32_t r = 0; r < kvb_table_info(t)->n_rows; r++)
        if (kvb_table_row(t, r, &row, NULL) == KVB_OK &&
            (!best.prune_ratio || fabs(row.ratio - ratio) < fabs(best.ratio - ratio)))
            best = row;
    return best;
}

// What the results call the table: their list of allocators names each with its identity, "table SHA-256".
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

static interval cell(const results_grid *g, size_t name, size_t ratio)
{
    if (!g || name >= g->n_names || ratio >= g->n_ratios) return (interval){NAN, NAN, NAN};
    return (interval){g->value[name][ratio], g->low[name][ratio], g->high[name][ratio]};
}

static size_t add_worth(const results_document *r, const char *label, const grid_rows *from, worth *out, size_t room)
{
    size_t n = 0;
    results_grid *kl = results_grid_make(from, "kl"), *change = results_grid_make(from, "kl_to_uniform"),
                 *agree = results_grid_make(from, "top1");
    for (size_t k = 0; kl && change && agree && k < kl->n_ratios && n < room; k++) {
        double ratio = kl->ratios[k];
        size_t own = grid_find_name(kl, label), other = grid_find_name(kl, "uniform");
        size_t at = grid_find_ratio(agree, ratio);
        if (isnan(cell(kl, own, k).value)) continue;
        out[n++] = (worth){.ratio = ratio,
                           .kl = cell(kl, own, k),
                           .to_uniform = cell(change, grid_find_name(change, label), grid_find_ratio(change, ratio)),
                           .agree = cell(agree, grid_find_name(agree, label), at),
                           .uniform_kl = cell(kl, other, k),
                           .uniform_agree = cell(agree, grid_find_name(agree, "uniform"), at),
                           .texts = count_texts(r)};
    }
    free(kl);
    free(change);
    free(agree);
    return n;
}

static int by_ratio(const void *a, const void *b)
{
    double x = ((const worth *)a)->ratio, y = ((const worth *)b)->ratio;
    return (x > y) - (x < y);
}

size_t page_find_worth(const page *p, const page_table *t, worth *out, size_t room)
{
    const kvb_info *info = kvb_table_info(t->file);
    size_t n = 0;
    for (size_t i = 0; i < p->n_results; i++) {
        const char *label = label_of(&p->results[i], t);
        const grid_rows from = {
            .rows = p->results[i].rows, .method = info->metric, .bare = info->sink + info->window == 0};
        if (label) n += add_worth(&p->results[i], label, &from, out + n, room - n);
    }
    qsort(out, n, sizeof *out, by_ratio);
    return n;
}

double page_find_uniform_loss(const page *p, const page_table *t, double ratio)
{
    const char *metric = kvb_table_info(t->file)->metric;
    for (size_t i = 0; i < p->n_results; i++) {
        const cJSON *row;
        cJSON_ArrayForEach(row, p->results[i].rows)
        {
            if (strcmp(results_text(row, "metric"), metric) != 0 || fabs(results_number(row, "ratio") - ratio) > 1e-9)
                continue;
            double loss = results_number(row, "uniform_loss");
            if (!isnan(loss)) return loss;
        }
    }
    return NAN;
}
