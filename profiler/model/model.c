#include "profiler/model/model.h"
#include "profiler/metric/query_statistics.h"
#include "profiler/model/model_tensors.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static kvb_status read_id(int32_t *out, const weights *w, weight_key key, uint32_t vocabulary, kvb_error *err)
{
    double id = -1;
    bool found;
    char name[96];
    kvb_status status = weights_number(w, key, &id, &found, err);
    if (status == KVB_OK && found && !(id >= 0 && id < vocabulary))
        return kvb_fail(err, KVB_FORMAT, "%s: %s: expected a token id below %u, found %.10g; the file is damaged",
                        weights_name(w), weights_key_name(w, key, name), vocabulary, id);
    *out = (int32_t)id;
    return status;
}

// Without a tokenizer its file's word is all there is; with one it also knows what its kind does by default.
static kvb_status read_special_ids(model *m, const weights *w, kvb_error *err)
{
    uint32_t vocabulary = m->config.vocabulary;
    double add_bos = 0;
    bool found;
    kvb_status status = read_id(&m->special.bos, w, WEIGHT_BOS, vocabulary, err);
    if (status == KVB_OK) status = read_id(&m->special.eos, w, WEIGHT_EOS, vocabulary, err);
    if (status == KVB_OK) status = read_id(&m->special.eot, w, WEIGHT_EOT, vocabulary, err);
    if (status == KVB_OK) status = weights_number(w, WEIGHT_ADD_BOS, &add_bos, &found, err);
    m->special.add_bos = add_bos != 0;
    return status;
}

// A token without a row is never decoded, and cannot be put in front of a text.
static int32_t id_with_row(int32_t id, uint32_t vocabulary)
{
    return id >= 0 && (uint32_t)id < vocabulary ? id : -1;
}

static kvb_status open_tokenizer(model *m, const weights *w, const model_options *o, kvb_error *err)
{
    uint32_t vocabulary = m->config.vocabulary;
    kvb_error unread;
    if (o->without_tokenizer) return read_special_ids(m, w, err);
    kvb_status status = weights_tokenizer(&m->tokens, w, o->pre, &unread);
    if (status != KVB_OK && o->for_plan && !o->pre && status != KVB_MEMORY) return KVB_OK;
    if (status != KVB_OK) return kvb_fail(err, status, "%s", unread.message);
    int32_t bos = tokenizer_bos(m->tokens);
    m->special = (special_ids){id_with_row(bos, vocabulary), id_with_row(tokenizer_eos(m->tokens), vocabulary),
                               id_with_row(tokenizer_eot(m->tokens), vocabulary), tokenizer_add_bos(m->tokens)};
    if (m->special.add_bos && m->special.bos < 0)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: texts begin with token %d (BOS), but the embedding has %u rows; expected a tokenizer "
                        "of this model",
                        weights_name(w), bos, vocabulary);
    return KVB_OK;
}

// Files of kvpress do not say whose queries they hold; another model of the same shape would give wrong numbers.
static kvb_status check_statistics(const model *m, const char *path, kvb_error *err)
{
    const char *said = m->statistics->model_sha256;
    if (!said[0] || strcmp(said, m->sha256) == 0) return KVB_OK;
    return kvb_fail(
        err, KVB_MISMATCH,
        "%s: query statistics of another model (SHA-256 %.16s..., this one's is %.16s...); gather them again "
        "with kvbudget statistics",
        path, said, m->sha256);
}

attention_shape model_attention(const model *m, uint32_t layer)
{
    const model_config *c = &m->config;
    attention_shape s = attention_heads(c->n_heads, c->n_kv_heads, c->head_dim);
    if (model_layer_bounded(c, layer)) s.window = c->window;
    s.softcap = c->score_cap;
    if (c->switches & SINKS) s.sinks = m->layers[layer].sinks;
    return s;
}

// A folder's name for people: its repository's, else what config.json says, else its own.
static void name_folder(model *m, const weights *w)
{
    char *name = m->config.name;
    if (m->origin.hf_id[0]) snprintf(name, sizeof m->config.name, "%.127s", m->origin.hf_id);
    if (strncmp(name, weights_name(w), sizeof m->config.name - 1) != 0) return;
    char *whole = realpath(name, NULL);
    char *end = whole ? strrchr(whole, '/') : NULL;
    if (end && strcmp(end, "/config.json") == 0) *end = '\0', end = strrchr(whole, '/');
    if (end && end[1]) snprintf(name, sizeof m->config.name, "%.127s", end + 1);
    free(whole);
}

// What can be said of a model without its weights; what is cheap to refuse comes first.
static kvb_status read_model(model *m, const model_options *o, kvb_error *err)
{
    weights *w = m->source;
    kvb_status status = model_read_config(&m->config, &m->family, w, err);
    m->form = o->form;
    if (status == KVB_OK) status = model_claim_tensors(m, w, err);
    if (status == KVB_OK && o->n_layers > m->config.n_layers)
        return kvb_fail(err, KVB_ARGUMENT, "%s: has %u layers, %u were asked for", weights_name(w), m->config.n_layers,
                        o->n_layers);
    if (o->n_layers) m->config.n_layers = o->n_layers;
    m->n_held = m->config.n_layers + 1;
    if (status == KVB_OK) status = open_tokenizer(m, w, o, err);
    if (status == KVB_OK && o->statistics)
        status = query_statistics_open(&m->statistics, o->statistics, m->config.n_layers, m->config.n_heads,
                                       m->config.head_dim, err);
    if (status == KVB_OK && !o->for_plan) status = weights_identify(w, o->watch, m->sha256, &m->origin, err);
    if (status == KVB_OK && !weights_is_gguf(w)) name_folder(m, w);
    return status == KVB_OK && m->statistics && !o->for_plan ? check_statistics(m, o->statistics, err) : status;
}

// Zeros in the place of what was cut off may look like any other fault: the cause comes first.
static kvb_status blame_damage(const model *m, kvb_status status, kvb_error *err)
{
    kvb_error damage;
    return m->source && weights_check(m->source, &damage) != KVB_OK ? kvb_fail(err, damage.status, "%s", damage.message)
                                                                    : status;
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
    model *m = calloc(1, sizeof *m);
    if (!m) return kvb_fail(err, KVB_MEMORY, "%s: no memory", path);
    kvb_status status = b->open(&m->device, b, NULL, err);
    if (status == KVB_OK)
        status = o->for_plan ? weights_open_config(&m->source, path, err) : weights_open(&m->source, path, err);
    if (status == KVB_OK) status = read_model(m, o, err);
    if (status == KVB_OK && !o->without_weights) status = model_load(m, m->config.n_layers + 1, err);
    else status = blame_damage(m, status, err);
    if (status != KVB_OK) model_free(m);
    else *out = m;
    return status;
}

bool model_ends_answer(const model *m, int32_t id)
{
    bool listed = m->tokens && tokenizer_is_end(m->tokens, id); // generation_config.json may name several
    return id >= 0 && (listed || id == m->special.eos || id == m->special.eot);
}

void model_free(model *m)
{
    if (!m) return;
    if (m->device) {
        model_free_tensors(m);
        m->device->b->close(m->device);
    }
    weights_close(m->source);
    free(m->rooms);
    tokenizer_free(m->tokens);
    origin_free(&m->origin);
    chat_frame_free(&m->chat);
    query_statistics_free(m->statistics);
    free(m);
}
