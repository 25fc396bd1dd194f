#include "profiler/model/model.h"
#include "formats/need.h"
#include "profiler/model/model_tensors.h"
#include "profiler/weights/weights.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

attention_shape model_attention(const model *m, uint32_t layer)
{
    const model_config *c = &m->config;
    attention_shape s = attention_heads(c->n_heads, c->n_kv_heads, c->head_dim);
    if (model_layer_bounded(c, layer)) s.window = c->window;
    s.softcap = c->score_cap;
    if (c->switches & SINKS) s.sinks = m->layers[layer].sinks;
    return s;
}

// Sets the name of a folder's model: its repository's, else what config.json says, else the folder's own.
static void name_folder(model *m, const weights *w)
{
    char *name = m->config.name;
    const char *id = w->origin.hf_id;
    if (id[0]) snprintf(name, sizeof m->config.name, "%.127s", id);
    if (strncmp(name, w->name, sizeof m->config.name - 1) != 0) return;
    char *whole = realpath(name, NULL);
    char *end = whole ? strrchr(whole, '/') : NULL;
    if (end && strcmp(end, "/config.json") == 0) *end = '\0', end = strrchr(whole, '/');
    if (end && end[1]) snprintf(name, sizeof m->config.name, "%.127s", end + 1);
    free(whole);
}

// Reads everything but the weights; cheap checks come first.
static kvb_status read_model(model *m, const model_options *o, kvb_error *err)
{
    weights *w = m->source;
    kvb_status status = model_read_config(&m->config, &m->family, w, err);
    if (status == KVB_OK) status = model_claim_tensors(m, w, err);
    if (status == KVB_OK && o->n_layers > m->config.n_layers)
        return kvb_fail(err, KVB_ARGUMENT, "%s: has %u layers, %u were asked for", w->name, m->config.n_layers,
                        o->n_layers);
    if (o->n_layers) m->config.n_layers = o->n_layers;
    m->n_held = m->config.n_layers + 1;
    if (status == KVB_OK && !w->is_gguf) name_folder(m, w);
    return status;
}

// Returns the error of damaged files, if any, else `status`: zeros in place of a cut-off part may look like any fault.
static kvb_status blame_damage(const model *m, kvb_status status, kvb_error *err)
{
    kvb_error damage;
    return m->source && weights_check(m->source, &damage) != KVB_OK ? kvb_fail(err, damage.status, "%s", damage.message)
                                                                    : status;
}

kvb_status model_identify(model *m, const weights_watch *watch, kvb_error *err)
{
    kvb_status status = weights_identify(m->source, watch, m->sha256, err);
    if (status == KVB_OK && !m->source->is_gguf) name_folder(m, m->source);
    return blame_damage(m, status, err);
}

kvb_status model_load(model *m, uint32_t n_held, kvb_error *err)
{
    m->n_held = n_held;
    kvb_status status = model_load_tensors(m, err);
    status = blame_damage(m, status, err);
    return status == KVB_OK ? m->device->b->check(m->device, err) : status;
}

kvb_status model_check(const model *m, kvb_error *err)
{
    return m->source ? weights_check(m->source, err) : KVB_OK;
}

kvb_status model_open(model **out, const char *path, const backend *b, const model_options *options, kvb_error *err)
{
    *out = NULL;
    const model_options none = {0}, *o = options ? options : &none;
    model *m = need(1, sizeof *m, "models");
    kvb_status status = b->open(&m->device, b, NULL, err);
    if (status == KVB_OK) status = weights_open(&m->source, path, o->for_plan, err);
    if (status == KVB_OK) status = read_model(m, o, err);
    status = blame_damage(m, status, err);
    if (status == KVB_OK && !o->without_weights) status = model_identify(m, o->watch, err);
    if (status == KVB_OK && !o->without_weights) status = model_load(m, m->config.n_layers + 1, err);
    if (status != KVB_OK) model_free(m);
    else *out = m;
    return status;
}

void model_free(model *m)
{
    if (!m) return;
    if (m->device) {
        model_free_tensors(m);
        m->device->b->close(m->device);
    }
    weights_close(m->source);
    free_all(m->rooms, m);
}
