#include "profiler/model/layer_views.h"
#include "formats/need.h"
#include <math.h>
#include <omp.h>
#include <stdlib.h>

double view_scale(const layer_view *v)
{
    return v->scale > 0 ? v->scale : 1.0 / sqrt((double)v->head_dim);
}

void layer_views_close(layer_views *v)
{
    if (!v->on) return;
    const dev all[] = {v->column_sums, v->row_log, v->output_norms};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) v->on->b->release(v->on, all[i]);
    for (int i = 0; i < LAYER_VIEWS; i++) free(v->host[i]);
    free(v->sinks);
    *v = (layer_views){0};
}

// Computes what an observer may ask for in addition to the activations, if it does.
static void make_extras(layer_views *v, uint32_t layer, const prefix_kv *kv, dev q, unsigned needs)
{
    const backend *b = v->on->b;
    attention_shape s = model_attention(v->m, layer);
    dev *const buffers[3] = {&v->column_sums, &v->row_log, &v->output_norms};
    const bool wanted[3] = {needs & VIEW_COLUMN_SUMS, needs & VIEW_COLUMN_SUMS, needs & VIEW_OUTPUT_NORMS};
    for (int i = 0; i < 3; i++)
        if (wanted[i] && !buffers[i]->address)
            *buffers[i] = backend_memory(v->on, (size_t)v->m->config.n_heads * v->max_tokens, "sums over a layer");
    if (needs & VIEW_COLUMN_SUMS) b->column_sums(v->on, v->column_sums, v->row_log, q, kv, 0, s);
    if (needs & VIEW_OUTPUT_NORMS) b->output_norms(v->on, v->output_norms, kv, v->m->layers[layer].wo, s);
}

// Points the view's items to host memory.
static void bring_items(layer_views *v, layer_view *view, const prefix_kv *kv, dev q_raw, dev q, unsigned needs)
{
    const backend *b = v->on->b;
    size_t queries = (size_t)view->n_heads * view->head_dim, keys = (size_t)view->n_kv_heads * view->head_dim;
    const struct {
        view_item item;
        dev from;
        size_t floats; // per token
        const float **to;
    } items[LAYER_VIEWS] = {{VIEW_Q_RAW, q_raw, queries, &view->q_raw},
                            {VIEW_Q, q, queries, &view->q},
                            {VIEW_K, kv->k, keys, &view->k},
                            {VIEW_V, kv->v, keys, &view->v},
                            {VIEW_COLUMN_SUMS, v->column_sums, view->n_heads, &view->column_sums},
                            {VIEW_OUTPUT_NORMS, v->output_norms, view->n_heads, &view->output_norms}};
    for (int i = 0; i < LAYER_VIEWS; i++) {
        if (!(needs & items[i].item)) continue;
        *items[i].to = b->host_view(v->on, items[i].from);
        if (*items[i].to) continue;
        if (!v->host[i])
            v->host[i] = need_more(NULL, v->max_tokens, items[i].floats * sizeof(float), "tokens of a layer");
        b->download(v->on, v->host[i], items[i].from, view->n_tokens * items[i].floats);
        *items[i].to = v->host[i];
    }
}

// Adds what the model does to scores before its softmax, for scorers that compute attention on the host.
static void bring_score_rules(layer_views *v, layer_view *view, attention_shape s)
{
    view->softcap = s.softcap;
    if (!s.sinks.address) return;
    if (!v->sinks) v->sinks = need_more(NULL, s.n_heads, sizeof *v->sinks, "sinks");
    v->on->b->download(v->on, v->sinks, s.sinks, s.n_heads);
    view->sinks = v->sinks;
}

kvb_status layer_views_show(layer_views *v, uint32_t layer, const prefix_kv *kv, dev q_raw, dev q,
                            const float *rope_frequency, const layer_observer *observer, kvb_error *err)
{
    const model_config *c = &v->m->config;
    layer_view view = {.layer = layer,
                       .n_tokens = kv->n_tokens,
                       .n_heads = c->n_heads,
                       .n_kv_heads = c->n_kv_heads,
                       .head_dim = c->head_dim,
                       .rope_dim = model_layer_rotates(c, layer) ? c->rope_dim : 0,
                       .rope_frequency = rope_frequency,
                       .rope_attention = (float)c->rope.attention,
                       .window = model_attention(v->m, layer).window,
                       .n_queries = kv->n_tokens};
    unsigned needs = view.window ? observer->needs & ~(unsigned)VIEW_COLUMN_SUMS : observer->needs;
    kvb_status status = v->on->b->check(v->on, err); // so that pending work is not timed as the scorers'
    if (status != KVB_OK) return status;
    double start = omp_get_wtime();
    make_extras(v, layer, kv, q, needs);
    bring_items(v, &view, kv, q_raw, q, needs);
    bring_score_rules(v, &view, model_attention(v->m, layer));
    view.extra_seconds = omp_get_wtime() - start;
    return observer->see(observer->context, &view, err);
}
