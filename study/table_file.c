#include "study/table_file.h"
#include "formats/need.h"
#include "formats/npy.h"
#include "formats/table_weights.h"
#include "formats/table_write.h"
#include <stdio.h>
#include <stdlib.h>

// ---- Metadata -------------------------------------------------------------------------------------------------------

static void add_text(cJSON *to, const char *key, const char *text)
{
    cJSON_AddStringToObject(to, key, text);
}

static void add_number(cJSON *to, const char *key, uint64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    add_text(to, key, text);
}

static void add_real(cJSON *to, const char *key, double value)
{
    char text[32];
    snprintf(text, sizeof text, "%.17g", value);
    add_text(to, key, text);
}

// Takes the text, which cJSON has made.
static void add_made(cJSON *to, const char *key, char *text)
{
    add_text(to, key, needed(text, "characters"));
    cJSON_free(text);
}

char *limits_text(const kvb_limits *m)
{
    size_t n = (size_t)m->n_layers * m->n_kv_heads;
    bool caps = false, least = false, most = false;
    cJSON *all = cJSON_CreateObject();
    for (uint32_t l = 0; l < m->n_layers; l++) caps |= m->cap[l] < 1;
    for (size_t h = 0; h < n; h++) {
        least |= m->least[h] > 0;
        most |= m->most[h] < 1;
    }
    cJSON_AddNumberToObject(all, "block", m->block);
    cJSON_AddNumberToObject(all, "levels", m->levels);
    cJSON_AddNumberToObject(all, "ranks", m->ranks);
    cJSON_AddBoolToObject(all, "by_layer", m->by_layer);
    if (caps) cJSON_AddItemToObject(all, "layer_cap", cJSON_CreateDoubleArray(m->cap, (int)m->n_layers));
    if (least) cJSON_AddItemToObject(all, "least", cJSON_CreateDoubleArray(m->least, (int)n));
    if (most) cJSON_AddItemToObject(all, "most", cJSON_CreateDoubleArray(m->most, (int)n));
    char *text = cJSON_PrintUnformatted(all);
    cJSON_Delete(all);
    return text;
}

// Lengths of the contexts in use, commas between.
static char *token_list(const selection *s)
{
    size_t size = 12 * s->n_contexts + 1, used = 0;
    char *text = need(1, size, "bytes of a list");
    for (size_t k = 0; k < s->n_contexts; k++)
        if (selection_count(s, k))
            used +=
                (size_t)snprintf(text + used, size - used, "%s%u", used ? "," : "", selection_context(s, k)->n_tokens);
    return text;
}

// Of which model, and of which texts.
static void add_origin(cJSON *m, const study_table *t)
{
    static const char *const copied[] = {"architecture", "model_id", "model_sha256", "tokenizer_sha256",
                                         "calibration_sha256"};
    static const char *const where_known[] = {"bounded_layers", "model_container", "model_files",
                                              "model_shape",    "hf_id",           "hf_revision",
                                              "chat",           "chat_sha256",     "special"};
    const record *r = t->pairs.from->r;
    record_shape shape = record_get_shape(r);
    add_text(m, "format", "kvbudget-table");
    add_text(m, "format_version", "1");
    add_text(m, "tool_version", KVBUDGET_VERSION);
    for (size_t i = 0; i < sizeof copied / sizeof *copied; i++) add_text(m, copied[i], record_text(r, copied[i]));
    for (size_t i = 0; i < sizeof where_known / sizeof *where_known; i++) {
        const char *text = record_text(r, where_known[i]);
        if (*text) add_text(m, where_known[i], text);
    }
    add_number(m, "n_layers", t->layers.n_layers);
    add_number(m, "n_heads", shape.n_heads);
    add_number(m, "n_kv_heads", shape.n_kv_heads);
    add_number(m, "head_dim", shape.head_dim);
}

static void add_pairs(cJSON *m, const pair_set *p, const char *record_sha256)
{
    char queries[32], *tokens = token_list(p->from);
    snprintf(queries, sizeof queries, "%u,%u", p->fewest_queries, p->most_queries);
    add_text(m, "calibration_tokens", tokens);
    add_number(m, "n_contexts", p->n_contexts);
    add_number(m, "n_questions", p->n_pairs);
    add_text(m, "n_queries", queries);
    add_text(m, "record_sha256", record_sha256);
    free(tokens);
}

static void add_settings(cJSON *m, const study_table *t)
{
    const study_options *o = &t->options;
    const record_metric *about = &t->pairs.about;
    add_text(m, "metric", t->pairs.metric);
    add_text(m, "metric_parameters", about->parameters);
    add_number(m, "sink", about->sink);
    add_number(m, "window", about->window);
    add_text(m, "scope", scope_name(o->scope));
    add_text(m, "aggregate", o->aggregate_name);
    add_real(m, "shrink", o->shrink);
    add_real(m, "min_keep", o->min_keep);
    add_text(m, "hull", hull_name(o->hull));
    add_text(m, "max_prune", "0.99");
    if (t->pairs.loss == LOSS_IMPORTANCE) return;
    add_text(m, "loss", "output");
    add_text(m, "gains", gain_choice_name(o->gains));
}

// What makes a table differ from greedy's with a row for every per cent and no constraints.
static void add_special(cJSON *m, const study_table *t)
{
    const study_options *o = &t->options;
    const kvb_ranking *ranking = selection_ranking(t->pairs.from, t->pairs.metric);
    if (o->exact) add_text(m, "solver", "exact");
    if (o->oracle_order) add_text(m, "order", order_name(true));
    if (o->aggregate == AGGREGATE_TAIL)
        add_made(m, "text_weights", table_weights_print(t->text_weights, ROWS, (uint32_t)t->n_texts));
    if (!every_per_cent(o)) add_number(m, "n_rows", o->n_rows);
    if (o->limits) add_made(m, "constraints", limits_text(o->limits));
    if (ranking) add_text(m, "ranking", kvb_ranking_about(ranking)->about);
}

kvb_status study_table_describe(const study_table *t, cJSON **metadata, kvb_error *err)
{
    char sha256[65];
    *metadata = NULL;
    kvb_status status = record_file_sha256(t->pairs.from->r, sha256, err);
    if (status != KVB_OK) return status;
    cJSON *m = *metadata = cJSON_CreateObject();
    add_origin(m, t);
    add_settings(m, t);
    add_pairs(m, &t->pairs, sha256);
    add_special(m, t);
    return KVB_OK;
}

// ---- Files ----------------------------------------------------------------------------------------------------------

kvb_status study_table_write(const study_table *t, const cJSON *metadata, const char *path, kvb_error *err)
{
    uint32_t heads = record_get_shape(t->pairs.from->r).n_kv_heads, rows = t->options.n_rows;
    double *prune_ratio = layer_map_spread(&t->layers, t->prune_ratio, rows, heads),
           *std = layer_map_spread(&t->layers, t->std, rows, heads);
    const kvb_ranking *ranking = selection_ranking(t->pairs.from, t->pairs.metric);
    const rank_content carried = ranking ? rank_content_of(ranking) : (rank_content){0};
    const table_content content = {.n_rows = rows,
                                   .n_layers = t->layers.n_layers,
                                   .n_kv_heads = heads,
                                   .prune_ratio = prune_ratio,
                                   .ratio = t->options.ratios,
                                   .std = std,
                                   .loss = t->loss,
                                   .lower_bound = t->bound,
                                   .lambda = t->lambda,
                                   .table_loss = t->table_loss,
                                   .effective_ratio = t->effective,
                                   .saturated = t->saturated,
                                   .ranking = ranking ? &carried : NULL,
                                   .metadata = metadata};
    kvb_status status = table_write(path, &content, err);
    free(prune_ratio);
    free(std);
    return status;
}

kvb_status study_table_write_budgets(const study_table *t, const char *path, kvb_error *err)
{
    record_shape shape = record_get_shape(t->pairs.from->r);
    const uint64_t dims[4] = {t->pairs.n_pairs, ROWS, shape.n_layers, shape.n_kv_heads};
    return npy_write(path, NPY_I32, 4, dims, t->pair_budgets, err);
}
