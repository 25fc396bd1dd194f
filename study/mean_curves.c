#include "study/mean_curves.h"
#include "formats/need.h"
#include "formats/npy.h"
#include "runtime/fail.h"
#include "study/gather.h"
#include <stdlib.h>

static kvb_status write_curves(const loss_curves *c, const char *path, kvb_error *err)
{
    size_t heads = shape_heads(&c->shape), points = (size_t)c->shape.n_tokens + 1, bytes;
    if (__builtin_mul_overflow(heads * sizeof(double), points, &bytes))
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: %zu curves of %zu points are too many", path, heads, points);
    double *loss = need(1, bytes, "bytes of curves");
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t b = 0; b < points; b++) loss[h * points + b] = loss_at(c, h, b);
    const uint64_t shape[3] = {c->shape.n_layers, c->shape.n_kv_heads, points};
    kvb_status status = npy_write(path, NPY_F64, 3, shape, loss, err);
    free(loss);
    return status;
}

static kvb_status gather_pairs(gathered *g, const pair_set *pairs, const study_options *o, study_progress *progress,
                               kvb_error *err)
{
    pair_walk w = {0};
    solve_options solve = study_solve_options(o);
    study_progress_begin(progress, pairs->n_pairs);
    kvb_status status = gather_init(g, pairs, AGGREGATE_MEAN_LOSS, err);
    pair_walk_open(&w, pairs, &solve, o->min_keep, progress);
    while (status == KVB_OK && (status = pair_walk_next(&w, err)) == KVB_OK && !w.ended)
        status = pair_walk_name(&w, gather_add(g, w.context, &w.problem.curves, err), err);
    pair_walk_close(&w);
    return status;
}

kvb_status mean_curves_write(const selection *from, const char *metric, const study_options *o, const char *path,
                             study_progress *progress, kvb_error *err)
{
    pair_set pairs;
    gathered g = {0};
    kvb_status status = pairs_open(&pairs, from, metric, o, err);
    if (status == KVB_OK) status = gather_pairs(&g, &pairs, o, progress, err);
    if (status == KVB_OK) {
        gather_finish(&g, 0);
        status = write_curves(&g.all.curves, path, err);
    }
    gather_free(&g);
    pairs_close(&pairs);
    return status;
}
