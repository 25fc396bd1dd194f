#include "study/table.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "formats/npy.h"
#include "formats/table_write.h"
#include "runtime/fail.h"
#include "solver/constrained.h"
#include "solver/exact.h"
#include "solver/robust.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

kvb_status study_table_open(study_table *t, const selection *from, const char *metric, const study_options *o,
                            bool pair_budgets, kvb_error *err)
{
    *t = (study_table){.options = *o};
    kvb_status status = pairs_open(&t->pairs, from, metric, o, err);
    if (status == KVB_OK) status = layer_map_read(&t->layers, from->r, err);
    if (status != KVB_OK) return status;
    size_t heads = shape_heads(&t->pairs.longest), cells = ROWS * heads, bytes = 0;
    if (__builtin_mul_overflow(cells, (size_t)t->pairs.n_pairs, &bytes) ||
        __builtin_mul_overflow(bytes, sizeof *t->pair_budgets, &bytes))
        return kvb_fail(err, KVB_UNSUPPORTED, "%u problems of %zu heads are too many", t->pairs.n_pairs, heads);
    t->n_heads = (uint32_t)heads;
    t->prune_ratio = need(cells, sizeof *t->prune_ratio, "ratios");
    t->std = need(cells, sizeof *t->std, "ratios");
    t->pair_budgets = pair_budgets ? need(1, bytes, "bytes of budgets") : NULL;
    t->text_weights = need(ROWS * from->n_contexts, sizeof *t->text_weights, "weights of texts");
    if (!o->n_packings) return KVB_OK;
    if (record_get_shape(from->r).head_dim == 0)
        return kvb_fail(err, KVB_MISMATCH, "%s: does not say how large a head is, which bytes depend on", from->path);
    t->formats = need(cells, 2, "formats");
    t->packing_loss = need(heads * RECORD_PACKINGS, sizeof *t->packing_loss, "losses");
    return output_packings_read(t->packing_loss, from, t->pairs.gain, err);
}

void study_table_free(study_table *t)
{
    pairs_close(&t->pairs);
    layer_map_free(&t->layers);
    free_all(t->prune_ratio, t->std, t->pair_budgets, t->formats, t->packing_loss, t->text_weights);
    *t = (study_table){.n_heads = 0};
}

kvb_status require_ratios(const study_options *o, const loss_curves *c, kvb_error *err)
{
    if (!o->limits || !o->own_ratios) return KVB_OK;
    return constrained_require(c, o->limits, o->ratios, o->n_rows, err);
}

// ---- The optimum in place of greedy's budgets -----------------------------------------------------------------------

static kvb_status improve(study_table *t, problem *p, const loss_curves *c, double weight, kvb_error *err)
{
    allocation *a = &p->allocation;
    const study_options *o = &t->options;
    solved_rows x;
    kvb_status status =
        o->limits ? constrained_solve(&x, c, o->limits, o->ratios, ROWS, true, err) : exact_solve(&x, c, a, err);
    if (status != KVB_OK) return status;
    double scale = c->total > 0 ? 1 / c->total : 0; // losses count as shares of the problem's total, times `weight`
    for (int r = 0; r < ROWS; r++) {
        t->greedy[r] += weight * scale * x.greedy[r];
        t->optimum[r] += weight * scale * x.loss[r];
        t->unproved[r] |= !x.proved[r];
        p->loss[r] = scale * x.loss[r];
        p->bound[r] = scale * x.bound[r];
    }
    memcpy(a->keep, x.keep, sizeof *a->keep * ROWS * a->n_heads);
    solved_rows_free(&x);
    return KVB_OK;
}

// ---- One pair -------------------------------------------------------------------------------------------------------

static void keep_budgets(study_table *t, size_t pair, const allocation *a)
{
    size_t cells = (size_t)ROWS * a->n_heads;
    for (size_t i = 0; t->pair_budgets && i < cells; i++) t->pair_budgets[pair * cells + i] = (int32_t)a->keep[i];
}

// Solves a pair by itself, in p, and adds it to the spread and, with AGGREGATE_MEAN_RATIO, to the table's sums.
static kvb_status allocate_pair(study_table *t, ratio_mean *spread, problem *p, kvb_error *err)
{
    bool own = t->options.aggregate == AGGREGATE_MEAN_RATIO;
    if (own) loss_curves_shrink(&p->curves, t->options.shrink);
    kvb_status status = problem_solve(p, err);
    if (status == KVB_OK && t->options.exact && t->options.aggregate != AGGREGATE_MEAN_LOSS)
        status = improve(t, p, &p->curves, 1.0 / t->pairs.n_pairs, err);
    if (status != KVB_OK) return status;
    const allocation *a = &p->allocation;
    keep_budgets(t, spread->count, a);
    ratio_mean_add(spread, a, p->curves.shape.n_tokens);
    for (int r = 0; own && r < ROWS; r++) {
        t->loss[r] += p->loss[r] / t->pairs.n_pairs;
        t->bound[r] += p->bound[r] / t->pairs.n_pairs;
        t->lambda[r] += p->lambda[r] / t->pairs.n_pairs;
        t->saturated[r] |= a->saturated[r];
    }
    return KVB_OK;
}

// ---- All pairs ------------------------------------------------------------------------------------------------------

// Solves the average problem and makes the table from it.
static kvb_status allocate_merged(study_table *t, const loss_curves *c, kvb_error *err)
{
    problem p;
    solve_options solve = study_solve_options(&t->options);
    kvb_status status = require_ratios(&t->options, c, err);
    problem_init(&p, &c->shape, &solve);
    double start = study_seconds();
    if (status == KVB_OK) status = problem_solve_curves(&p, c, err);
    if (status == KVB_OK && t->options.exact) status = improve(t, &p, c, c->total, err);
    t->solve_seconds += study_seconds() - start;
    for (int r = 0; status == KVB_OK && r < ROWS; r++) {
        // The average of shares has a total of 1, or less when there are pairs that cannot lose anything.
        t->loss[r] = p.loss[r] * c->total;
        t->bound[r] = p.bound[r] * c->total;
        t->lambda[r] = p.lambda[r] * c->total;
        t->saturated[r] = p.allocation.saturated[r];
        for (uint32_t h = 0; h < t->n_heads; h++) {
            size_t i = (size_t)r * t->n_heads + h;
            t->prune_ratio[i] = 1.0 - (double)p.allocation.keep[i] / c->shape.n_tokens;
        }
    }
    problem_free(&p);
    return status;
}

// With AGGREGATE_MEAN_LOSS, fills table_bound with a lower bound on the mean loss of budgets that all pairs share. The
// averages must not be shrunk yet.
static kvb_status bound_table(study_table *t, const gathered *g, kvb_error *err)
{
    if (g->how != AGGREGATE_MEAN_LOSS) return KVB_OK;
    problem p;
    const loss_curves *c = &g->all.curves;
    solve_options solve = study_solve_options(&t->options);
    kvb_status status = require_ratios(&t->options, c, err);
    problem_init(&p, &c->shape, &solve);
    if (status == KVB_OK) status = problem_solve_curves(&p, c, err);
    for (int r = 0; status == KVB_OK && r < ROWS; r++) t->table_bound[r] = p.bound[r] * c->total;
    problem_free(&p);
    return status;
}

// ---- Tokens and formats ---------------------------------------------------------------------------------------------

// Solves the average problem for tokens and formats, with budgets in bytes, and makes the table from it.
static kvb_status allocate_bytes(study_table *t, const loss_curves *c, kvb_error *err)
{
    uint64_t budget[ROWS];
    solved_rows x;
    uint32_t head_dim = record_get_shape(t->pairs.from->r).head_dim;
    bytes_problem p = formats_problem(&t->options, t->packing_loss, c, head_dim, budget);
    double start = study_seconds();
    kvb_status status = bytes_solve(&x, &p, budget, ROWS, err);
    for (int r = 0; status == KVB_OK && r < ROWS; r++) {
        t->loss[r] = x.loss[r];
        t->bound[r] = t->table_bound[r] = x.bound[r];
        t->lambda[r] = x.lambda[r];
        t->saturated[r] = x.saturated[r];
        for (size_t i = (size_t)r * t->n_heads; i < (size_t)(r + 1) * t->n_heads; i++) {
            t->prune_ratio[i] = 1.0 - (double)x.keep[i] / c->shape.n_tokens;
            formats_of(&t->options, x.format[i], t->formats + 2 * i);
        }
    }
    t->solve_seconds += study_seconds() - start;
    solved_rows_free(&x);
    formats_problem_free(&p);
    return status;
}

// Adds what all heads lose by their formats to the table's loss. Sets std to 0, since it is unknown.
static void judge_formats(study_table *t)
{
    for (size_t i = 0; t->formats && i < (size_t)ROWS * t->n_heads; i++) {
        t->table_loss[i / t->n_heads] += formats_loss(t->packing_loss, i % t->n_heads, t->formats + 2 * i);
        t->std[i] = 0;
    }
}

// Solves for the texts that lose most and makes the table from the result.
static kvb_status allocate_tail(study_table *t, const gathered *g, kvb_error *err)
{
    robust_result x;
    double start = study_seconds();
    solve_options solve = study_solve_options(&t->options);
    kvb_status status = robust_solve(&x, g->texts, (uint32_t)g->n_texts, t->options.tail, &solve, err);
    if (status != KVB_OK) return status;
    t->solve_seconds += study_seconds() - start;
    t->n_texts = g->n_texts;
    memcpy(t->prune_ratio, x.prune_ratio, (size_t)ROWS * x.n_heads * sizeof *x.prune_ratio);
    memcpy(t->text_weights, x.weight, (size_t)ROWS * x.n_texts * sizeof *x.weight);
    memcpy(t->loss, x.loss, sizeof t->loss);
    memcpy(t->bound, x.bound, sizeof t->bound);
    memcpy(t->lambda, x.lambda, sizeof t->lambda);
    memcpy(t->saturated, x.saturated, sizeof t->saturated);
    robust_free(&x);
    return KVB_OK;
}

// Brings the average of many tables back to whole pages and few levels.
static kvb_status project(study_table *t, kvb_error *err)
{
    const study_options *o = &t->options;
    const cache_shape *shape = &t->pairs.longest;
    uint32_t least = shape_floor(shape), given = (uint32_t)ceil(o->min_keep * shape->n_tokens);
    return constrained_project(o->limits, shape, given > least ? given : least, o->ratios, o->n_rows, t->prune_ratio,
                               t->saturated, err);
}

// Makes the table from what was gathered: prune_ratio, loss, bound, lambda, saturated (mean_ratio's are there already).
static kvb_status allocate_table(study_table *t, const gathered *g, kvb_error *err)
{
    if (g->how == AGGREGATE_MEAN_LOSS) return allocate_merged(t, &g->all.curves, err);
    if (g->how == AGGREGATE_TAIL) return allocate_tail(t, g, err);
    return t->options.limits ? project(t, err) : KVB_OK;
}

// ---- First reading: every pair's own optimum, and what the aggregation needs of it ----------------------------------

static kvb_status take_pair(study_table *t, gathered *g, ratio_mean *spread, pair_walk *w, kvb_error *err)
{
    problem *p = &w->problem;
    double start = study_seconds();
    kvb_status status = t->options.oracle_order ? loss_curves_fill_perfect(&p->curves, w->oracle, err) : KVB_OK;
    if (status == KVB_OK && g->how == AGGREGATE_MEAN_RATIO) status = require_ratios(&t->options, &p->curves, err);
    if (status == KVB_OK) status = gather_add(g, w->context, &p->curves, err);
    if (status == KVB_OK) status = allocate_pair(t, spread, p, err);
    t->solve_seconds += study_seconds() - start;
    return status;
}

// ---- Second reading: what the table loses ---------------------------------------------------------------------------

kvb_status study_table_judge(study_table *t, study_progress *progress, kvb_error *err)
{
    size_t cells = (size_t)ROWS * t->n_heads;
    double *uniform = need(cells, sizeof *uniform, "ratios");
    memset(t->table_loss, 0, sizeof t->table_loss);
    memset(t->uniform_loss, 0, sizeof t->uniform_loss);
    memset(t->effective, 0, sizeof t->effective);
    for (size_t i = 0; i < cells; i++) uniform[i] = t->options.ratios[i / t->n_heads];
    pair_walk w = pair_walk_open(&t->pairs, study_solve_options(&t->options), t->options.min_keep, progress);
    while (pair_walk_next(&w, err)) {
        const loss_curves *c = &w.problem.curves;
        w.status = judge_table(t->table_loss, c, t->options.limits, ROWS, t->prune_ratio, err);
        if (w.status == KVB_OK) w.status = judge_table(t->uniform_loss, c, NULL, ROWS, uniform, err);
    }
    kvb_status status = pair_walk_close(&w);
    free(uniform);
    for (int r = 0; r < ROWS && status == KVB_OK; r++) {
        t->table_loss[r] /= t->pairs.n_pairs;
        t->uniform_loss[r] /= t->pairs.n_pairs;
        for (uint32_t h = 0; h < t->n_heads; h++)
            t->effective[r] += t->prune_ratio[(size_t)r * t->n_heads + h] / t->n_heads;
    }
    if (status == KVB_OK) judge_formats(t);
    return status;
}

// ---- The whole ------------------------------------------------------------------------------------------------------

kvb_status study_table_solve(study_table *t, study_progress *progress, kvb_error *err)
{
    gathered g;
    ratio_mean spread;
    study_progress_begin(progress, 2.0 * t->pairs.n_pairs); // to solve, and to judge the table
    gather_init(&g, &t->pairs, t->options.aggregate);
    ratio_mean_init(&spread, ROWS, t->n_heads);
    pair_walk w = pair_walk_open(&t->pairs, study_solve_options(&t->options), t->options.min_keep, progress);
    while (pair_walk_next(&w, err)) w.status = take_pair(t, &g, &spread, &w, err);
    kvb_status status = pair_walk_close(&w);
    if (status == KVB_OK) {
        ratio_mean_get(&spread, t->prune_ratio, t->std);
        gather_average(&g);
        if (!t->formats) status = bound_table(t, &g, err);
    }
    if (status == KVB_OK) {
        gather_pull(&g, t->options.shrink);
        status = t->formats ? allocate_bytes(t, &g.all.curves, err) : allocate_table(t, &g, err);
    }
    for (int r = 0; r < ROWS && status == KVB_OK; r++) {
        bool own = t->options.aggregate == AGGREGATE_MEAN_RATIO && t->options.shrink == 0;
        if (t->options.aggregate != AGGREGATE_MEAN_LOSS) t->table_bound[r] = own ? t->bound[r] : NAN;
    }
    if (status == KVB_OK) status = study_table_judge(t, progress, err);
    ratio_mean_free(&spread);
    gather_free(&g);
    return status;
}

// ---- Metadata -------------------------------------------------------------------------------------------------------

// Turns numbers into text with all their digits, since all metadata in safetensors are text.
static void make_texts(cJSON *metadata)
{
    for (cJSON *item = metadata->child, *next; item; item = next) {
        char text[32];
        next = item->next;
        if (!cJSON_IsNumber(item)) continue;
        snprintf(text, sizeof text, "%.17g", item->valuedouble);
        cJSON_ReplaceItemInObjectCaseSensitive(metadata, item->string, cJSON_CreateString(text));
    }
}

// Adds a text that cJSON has allocated, and frees it.
static void add_made(cJSON *to, const char *key, char *text)
{
    cJSON_AddStringToObject(to, key, needed(text, "characters"));
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
    json_put(all, "block %u levels %u ranks %u by_layer %d", m->block, m->levels, m->ranks, m->by_layer);
    if (caps) cJSON_AddItemToObject(all, "layer_cap", cJSON_CreateDoubleArray(m->cap, (int)m->n_layers));
    if (least) cJSON_AddItemToObject(all, "least", cJSON_CreateDoubleArray(m->least, (int)n));
    if (most) cJSON_AddItemToObject(all, "most", cJSON_CreateDoubleArray(m->most, (int)n));
    char *text = cJSON_PrintUnformatted(all);
    cJSON_Delete(all);
    return text;
}

// Lists the lengths of the contexts in use, separated by commas. The caller frees the text.
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

// Adds which model and which texts the table was made from.
static void add_origin(cJSON *m, const study_table *t)
{
    static const char *const copied[] = {"architecture", "model_id", "model_sha256", "tokenizer_sha256",
                                         "calibration_sha256"};
    static const char *const where_known[] = {"bounded_layers", "model_container", "model_files",
                                              "model_shape",    "hf_id",           "hf_revision",
                                              "chat",           "chat_sha256",     "special"};
    const record *r = t->pairs.from->r;
    record_shape shape = record_get_shape(r);
    json_put(m, "format %s format_version %u tool_version %s", "kvbudget-table", t->formats ? 2 : 1, KVBUDGET_VERSION);
    for (size_t i = 0; i < sizeof copied / sizeof *copied; i++)
        cJSON_AddStringToObject(m, copied[i], record_text(r, copied[i]));
    for (size_t i = 0; i < sizeof where_known / sizeof *where_known; i++) {
        const char *text = record_text(r, where_known[i]);
        if (*text) cJSON_AddStringToObject(m, where_known[i], text);
    }
    json_put(m, "n_layers %u n_heads %u n_kv_heads %u head_dim %u", t->layers.n_layers, shape.n_heads, shape.n_kv_heads,
             shape.head_dim);
}

static void add_pairs(cJSON *m, const pair_set *p, const char *record_sha256)
{
    char queries[32], *tokens = token_list(p->from);
    snprintf(queries, sizeof queries, "%u,%u", p->fewest_queries, p->most_queries);
    json_put(m, "calibration_tokens %s n_contexts %u n_questions %u n_continued %u n_queries %s record_sha256 %s",
             tokens, p->n_contexts, p->n_pairs, p->n_continued, queries, record_sha256);
    free(tokens);
}

static void add_settings(cJSON *m, const study_table *t)
{
    const study_options *o = &t->options;
    const record_metric *about = &t->pairs.about;
    json_put(m, "metric %s metric_parameters %s sink %u window %u scope %s aggregate %s shrink %g min_keep %g",
             t->pairs.metric, about->parameters, about->sink, about->window, scope_name(o->scope), o->aggregate_name,
             o->shrink, o->min_keep);
    json_put(m, "hull %s max_prune %s", hull_name(o->hull), "0.99");
    if (t->pairs.loss == LOSS_OUTPUT) json_put(m, "loss %s gains %s", "output", "all");
    if (t->pairs.loss == LOSS_OUTPUT && about->refit) json_put(m, "refit %u", about->refit);
}

// Adds the formats that could be chosen, and that std is unknown.
static void add_packings(cJSON *m, const study_options *o)
{
    char names[KVB_PACKINGS * 8] = "";
    for (uint32_t i = 0; i < o->n_packings; i++) {
        if (i) strcat(names, ",");
        strcat(names, kvb_packing_name(o->packings[i]));
    }
    json_put(m, "packings %s unknown %s", names, "std");
}

// Adds what only some tables have: exact, oracle order, formats, weights of texts, chosen ratios, constraints, ranking.
static void add_special(cJSON *m, const study_table *t)
{
    const study_options *o = &t->options;
    const kvb_ranking *ranking = selection_ranking(t->pairs.from, t->pairs.metric);
    if (o->exact) cJSON_AddStringToObject(m, "solver", "exact");
    if (o->oracle_order) cJSON_AddStringToObject(m, "order", order_name(true));
    if (t->formats) add_packings(m, o);
    if (o->aggregate == AGGREGATE_TAIL)
        add_made(m, "text_weights", table_weights_print(t->text_weights, ROWS, (uint32_t)t->n_texts));
    if (!every_per_cent(o)) json_put(m, "n_rows %u", o->n_rows);
    if (o->limits) add_made(m, "constraints", limits_text(o->limits));
    if (ranking) cJSON_AddStringToObject(m, "ranking", kvb_ranking_about(ranking)->about);
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
    make_texts(m);
    return KVB_OK;
}

// ---- Files ----------------------------------------------------------------------------------------------------------

// Returns the formats of all layers, which the caller frees, or NULL if the table has none. Bounded layers get bf16.
static uint8_t *spread_formats(const study_table *t, uint32_t rows, uint32_t heads)
{
    size_t from = 2 * (size_t)heads, all = t->layers.n_layers * from;
    uint8_t *out = t->formats ? need(rows * all, 1, "formats") : NULL;
    for (uint32_t r = 0; out && r < rows; r++)
        for (uint32_t l = 0; l < t->layers.n_layers; l++) {
            uint32_t place = layer_map_place(&t->layers, l);
            if (place == UINT32_MAX) continue;
            memcpy(out + r * all + l * from, t->formats + 2 * (size_t)r * t->n_heads + place * from, from);
        }
    return out;
}

kvb_status study_table_write(const study_table *t, const cJSON *metadata, const char *path, kvb_error *err)
{
    const kvb_ranking *ranking = selection_ranking(t->pairs.from, t->pairs.metric);
    if (!ranking && strncmp(t->pairs.metric, "learned:", 8) == 0)
        return kvb_fail(err, KVB_ARGUMENT,
                        "%s: a table for %s holds the ranking's weights, which a record does not have; name the "
                        "ranking's file: --metric learned=RANK.safetensors",
                        path, t->pairs.metric);
    uint32_t heads = record_get_shape(t->pairs.from->r).n_kv_heads, rows = t->options.n_rows;
    double *prune_ratio = layer_map_spread(&t->layers, t->prune_ratio, rows, heads),
           *std = layer_map_spread(&t->layers, t->std, rows, heads);
    const rank_content carried = ranking ? rank_content_of(ranking) : (rank_content){0};
    uint8_t *formats = spread_formats(t, rows, heads);
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
                                   .formats = formats,
                                   .ranking = ranking ? &carried : NULL,
                                   .metadata = metadata};
    kvb_status status = table_write(path, &content, err);
    free_all(formats, prune_ratio, std);
    return status;
}

kvb_status study_table_write_budgets(const study_table *t, const char *path, kvb_error *err)
{
    record_shape shape = record_get_shape(t->pairs.from->r);
    const uint64_t dims[4] = {t->pairs.n_pairs, ROWS, shape.n_layers, shape.n_kv_heads};
    return npy_write(path, NPY_I32, 4, dims, t->pair_budgets, err);
}
