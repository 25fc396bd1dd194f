#include "study/gather.h"
#include "formats/need.h"
#include "solver/constrained.h"
#include <stdlib.h>

static kvb_status init_texts(gathered *g, const pair_set *pairs, kvb_error *err)
{
    size_t n = pairs->from->n_contexts;
    kvb_status status = KVB_OK;
    g->texts = need(n, sizeof *g->texts, "contexts");
    for (; g->n_texts < n && status == KVB_OK; g->n_texts++)
        status = loss_mean_init_coarse(&g->texts[g->n_texts], &pairs->longest, STUDY_GRID, err);
    return status;
}

kvb_status gather_init(gathered *g, const pair_set *pairs, aggregation how, kvb_error *err)
{
    *g = (gathered){.how = how};
    if (how == AGGREGATE_TAIL) return init_texts(g, pairs, err);
    return how == AGGREGATE_MEAN_LOSS ? loss_mean_init(&g->all, &pairs->longest, err) : KVB_OK;
}

void gather_free(gathered *g)
{
    loss_mean_free(&g->all);
    for (size_t k = 0; k < g->n_texts; k++) loss_mean_free(&g->texts[k]);
    free(g->texts);
    *g = (gathered){0};
}

kvb_status gather_add(gathered *g, size_t k, const loss_curves *c, kvb_error *err)
{
    if (g->how == AGGREGATE_MEAN_RATIO) return KVB_OK;
    return loss_mean_add(g->how == AGGREGATE_TAIL ? &g->texts[k] : &g->all, c, err);
}

void gather_average(gathered *g)
{
    size_t used = 0;
    if (g->how == AGGREGATE_MEAN_LOSS) loss_mean_finish(&g->all);
    for (size_t k = 0; k < g->n_texts; k++) {
        loss_mean text = g->texts[k];
        g->texts[k] = (loss_mean){0};
        if (text.count == 0) {
            loss_mean_free(&text);
            continue;
        }
        loss_mean_finish(&text);
        g->texts[used++] = text;
    }
    g->n_texts = used;
}

void gather_pull(gathered *g, double shrink)
{
    if (g->how == AGGREGATE_MEAN_LOSS) loss_curves_shrink(&g->all.curves, shrink);
    for (size_t k = 0; k < g->n_texts; k++) loss_curves_shrink(&g->texts[k].curves, shrink);
}

void gather_finish(gathered *g, double shrink)
{
    gather_average(g);
    gather_pull(g, shrink);
}

kvb_status judge_table(double *sum, const loss_curves *c, const kvb_limits *limits, uint32_t n_rows,
                       const double *prune_ratio, kvb_error *err)
{
    uint32_t *keep = need(shape_heads(&c->shape), sizeof *keep, "heads");
    kvb_status status = KVB_OK;
    if (limits) status = constrained_loss_add(sum, c, limits, n_rows, prune_ratio, keep, err);
    else table_loss_add(sum, c, n_rows, prune_ratio, keep);
    free(keep);
    return status;
}
