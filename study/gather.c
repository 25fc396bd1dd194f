#include "study/gather.h"
#include "formats/need.h"
#include <stdlib.h>

void gather_init(gathered *g, const pair_set *pairs, aggregation how)
{
    *g = (gathered){.how = how};
    if (how == AGGREGATE_MEAN_LOSS) loss_mean_init(&g->all, &pairs->longest);
    if (how != AGGREGATE_TAIL) return;
    g->n_texts = pairs->from->n_contexts;
    g->texts = need(g->n_texts, sizeof *g->texts, "contexts");
    for (size_t k = 0; k < g->n_texts; k++) loss_mean_init_coarse(&g->texts[k], &pairs->longest, STUDY_GRID);
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
