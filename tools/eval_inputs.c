// kvbudget eval, first half: tables, metrics, allocators, ratios and texts.
#include "formats/calib.h"
#include "formats/file_read.h"
#include "formats/npy.h"
#include "formats/sha256.h"
#include "runtime/fail.h"
#include "tools/eval_job.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const DEFAULT_METRICS[] = {"snapkv:kvpress", "keydiff", "ea:kvpress"};
static const char *const DEFAULT_ALLOCATORS[] = {"uniform", "pyramid", "ada"};
static const double DEFAULT_RATIOS[] = {0.5, 0.8, 0.9, 0.95};

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

// ---- Ratios ----

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int read_ratios(eval_command *e)
{
    size_t room = sizeof DEFAULT_RATIOS / sizeof *DEFAULT_RATIOS;
    for (size_t i = 0; i < e->ratio_names.count; i++) room += strlen(e->ratio_names.items[i]);
    e->ratios = calloc(room, sizeof *e->ratios);
    if (!e->ratios) return cli_failed(e->self, &(kvb_error){KVB_MEMORY, "no memory for the ratios"});
    for (size_t i = 0; i < e->ratio_names.count; i++)
        for (const char *p = e->ratio_names.items[i]; *p; p += *p == ',') {
            char *end;
            double ratio = strtod(p, &end);
            if (end == p || (*end && *end != ',') || !(ratio >= 0 && ratio < 1))
                return cli_usage_error(e->self, "--ratio: expected pruned shares from 0 to below 1, found '%s'", p);
            e->ratios[e->n_ratios++] = ratio;
            p = end;
        }
    if (!e->n_ratios) {
        memcpy(e->ratios, DEFAULT_RATIOS, sizeof DEFAULT_RATIOS);
        e->n_ratios = sizeof DEFAULT_RATIOS / sizeof *DEFAULT_RATIOS;
    }
    qsort(e->ratios, e->n_ratios, sizeof *e->ratios, compare_doubles);
    for (size_t i = 1; i < e->n_ratios; i++)
        if (e->ratios[i] == e->ratios[i - 1])
            return cli_usage_error(e->self, "--ratio: %g is given twice", e->ratios[i]);
    return EXIT_DONE;
}

// ---- Allocators, metrics and which belong together ----

static bool is_table(const char *operand)
{
    return ends_with(operand, ".safetensors");
}

static kvb_status check_table(const eval_command *e, const allocator *a, const char *operand, kvb_error *err)
{
    const model_config *c = &e->m->config;
    kvb_expectation expected = {c->n_layers, c->n_heads, c->n_kv_heads, c->head_dim, e->m->sha256, NULL, 0, 0, 0};
    kvb_error inner = {0};
    kvb_status status = kvb_table_check(a->table, &expected, &inner);
    if (status == KVB_OK) return KVB_OK;
    return kvb_fail(err, status, "%s: not a table of this model: %s", operand, inner.message);
}

static kvb_status open_allocators(eval_command *e, char **operands, size_t n, kvb_error *err)
{
    size_t n_default = sizeof DEFAULT_ALLOCATORS / sizeof *DEFAULT_ALLOCATORS,
           n_named = e->allocator_names.count ? e->allocator_names.count : n_default;
    const model_config *c = &e->m->config;
    const allocator_shape shape = {c->n_layers, c->n_heads, c->n_kv_heads};
    e->allocators = calloc(n_named + n, sizeof *e->allocators);
    if (!e->allocators) return kvb_fail(err, KVB_MEMORY, "no memory for the allocators");
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < n_named && status == KVB_OK; i++) {
        const char *text = e->allocator_names.count ? e->allocator_names.items[i] : DEFAULT_ALLOCATORS[i];
        if (strcmp(text, "none") == 0) continue;
        status = allocator_parse(&e->allocators[e->n_allocators++], text, &shape, err);
    }
    for (size_t i = 0; i < n && status == KVB_OK; i++) {
        if (!is_table(operands[i])) continue;
        allocator *a = &e->allocators[e->n_allocators++];
        status = allocator_open_table(a, operands[i], err);
        if (status == KVB_OK) status = check_table(e, a, operands[i], err);
    }
    return status;
}

static sweep_metric *find_metric(eval_command *e, const char *spec)
{
    for (size_t i = 0; i < e->n_metrics; i++)
        if (strcmp(e->metrics[i].m.spec, spec) == 0) return &e->metrics[i];
    return NULL;
}

static kvb_status add_metric(eval_command *e, const char *text, kvb_error *err)
{
    metric m;
    kvb_status status = metric_parse(&m, text, err);
    if (status != KVB_OK || find_metric(e, m.spec)) return status;
    sweep_metric *to = &e->metrics[e->n_metrics++];
    *to = (sweep_metric){m, metric_protect_sink(&m), metric_protect_window(&m)};
    if (e->sink != UINT64_MAX) to->sink = (uint32_t)e->sink;
    if (e->window != UINT64_MAX) to->window = (uint32_t)e->window;
    return KVB_OK;
}

// A table of critical:share=0+METRIC has the budgets for both stages as well.
static bool table_serves(const metric *table, const sweep_metric *to)
{
    metric profiled;
    return metric_profiled_as(&to->m, &profiled) && strcmp(profiled.spec, table->spec) == 0;
}

// One metric takes over what a table for it protects.
static kvb_status protect_as(const eval_command *e, const kvb_info *info, sweep_metric *to, bool *seen, kvb_error *err)
{
    uint32_t sink = e->sink != UINT64_MAX ? (uint32_t)e->sink : info->sink,
             window = e->window != UINT64_MAX ? (uint32_t)e->window : info->window;
    if (*seen && (to->sink != sink || to->window != window))
        return kvb_fail(err, KVB_MISMATCH,
                        "tables for %s protect %u + %u and %u + %u tokens; all allocators are compared with the same: "
                        "give --sink and --window",
                        to->m.spec, to->sink, to->window, sink, window);
    *seen = true;
    to->sink = sink;
    to->window = window;
    return KVB_OK;
}

// A table says which metric it is for and what it protects; all allocators of that metric follow it.
static kvb_status follow_table(eval_command *e, const allocator *a, bool *seen, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(a->table);
    metric m;
    kvb_error inner = {0};
    if (metric_parse(&m, info->metric, &inner) != KVB_OK)
        return kvb_fail(err, KVB_MISMATCH, "table %s: %s", a->label, inner.message);
    kvb_status status = e->metric_names.count ? KVB_OK : add_metric(e, info->metric, err);
    size_t served = 0;
    for (size_t i = 0; i < e->n_metrics && status == KVB_OK; i++) {
        if (!table_serves(&m, &e->metrics[i])) continue;
        status = protect_as(e, info, &e->metrics[i], &seen[i], err);
        served++;
    }
    if (status == KVB_OK && served == 0)
        status = kvb_fail(err, KVB_MISMATCH,
                          "table %s is for metric %s, which --metric leaves out; add it, or leave out the table",
                          a->label, info->metric);
    return status;
}

static kvb_status choose_metrics(eval_command *e, kvb_error *err)
{
    size_t n_default = sizeof DEFAULT_METRICS / sizeof *DEFAULT_METRICS,
           room = e->metric_names.count + e->n_allocators + n_default;
    bool *seen = calloc(room, sizeof *seen), tables = false;
    e->metrics = calloc(room, sizeof *e->metrics);
    kvb_status status = seen && e->metrics ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for the metrics");
    for (size_t i = 0; i < e->metric_names.count && status == KVB_OK; i++)
        status = add_metric(e, e->metric_names.items[i], err);
    for (size_t i = 0; i < e->n_allocators && status == KVB_OK; i++) {
        if (e->allocators[i].kind != ALLOCATOR_TABLE) continue;
        tables = true;
        status = follow_table(e, &e->allocators[i], seen, err);
    }
    for (size_t i = 0; i < n_default && !e->metric_names.count && !tables && status == KVB_OK; i++)
        status = add_metric(e, DEFAULT_METRICS[i], err);
    free(seen);
    return status;
}

static bool serves(const allocator *a, const sweep_metric *to)
{
    metric m;
    if (a->kind != ALLOCATOR_TABLE) return true;
    return metric_parse(&m, kvb_table_info(a->table)->metric, NULL) == KVB_OK && table_serves(&m, to);
}

static kvb_status join_columns(eval_command *e, kvb_error *err)
{
    e->columns = calloc(e->n_metrics * e->n_allocators + 1, sizeof *e->columns);
    if (!e->columns) return kvb_fail(err, KVB_MEMORY, "no memory for the columns");
    for (size_t m = 0; m < e->n_metrics; m++)
        for (size_t a = 0; a < e->n_allocators; a++) {
            if (!serves(&e->allocators[a], &e->metrics[m])) continue;
            for (size_t i = 0; i < e->n_columns; i++)
                if (e->columns[i].metric == m && strcmp(e->columns[i].how->label, e->allocators[a].label) == 0)
                    return kvb_fail(err, KVB_ARGUMENT,
                                    "two allocators are called %s; give tables names: NAME=FILE.safetensors",
                                    e->allocators[a].label);
            e->columns[e->n_columns++] = (sweep_column){(uint32_t)m, &e->allocators[a]};
        }
    if (e->n_columns) return KVB_OK;
    return kvb_fail(err, KVB_ARGUMENT, "there is nothing to compare: give a table, or --allocator");
}

// ---- Texts ----

static kvb_status take_ids(eval_command *e, const char *name, int32_t *ids, size_t n, kvb_error *err)
{
    bool bos = strcmp(e->bos, "yes") == 0 || (strcmp(e->bos, "auto") == 0 && tokenizer_add_bos(e->m->tokens));
    size_t most = e->n_tokens + e->n_next, shift = bos && tokenizer_bos(e->m->tokens) >= 0;
    sweep_text *all = realloc(e->texts, (e->n_texts + 1) * sizeof *all);
    if (!all) return kvb_fail(err, KVB_MEMORY, "no memory for text %s", name);
    e->texts = all;
    sweep_text *t = &e->texts[e->n_texts];
    *t = (sweep_text){.n_ids = (uint32_t)(n + shift < most ? n + shift : most)};
    snprintf(t->name, sizeof t->name, "%s", name);
    t->ids = malloc((t->n_ids + 1) * sizeof *t->ids);
    if (!t->ids) return kvb_fail(err, KVB_MEMORY, "no memory for text %s", name);
    e->n_texts++;
    if (shift) t->ids[0] = tokenizer_bos(e->m->tokens);
    if (t->n_ids > shift) memcpy(t->ids + shift, ids, (t->n_ids - shift) * sizeof *ids);
    return sha256_hex(t->ids, t->n_ids * sizeof *t->ids, t->sha256, err);
}

static kvb_status encode_text(eval_command *e, const char *name, const char *text, size_t size, kvb_error *err)
{
    int32_t *ids = NULL;
    size_t n = 0;
    kvb_status status = tokenizer_encode(e->m->tokens, text, size, false, &ids, &n, err);
    if (status == KVB_OK) status = take_ids(e, name, ids, n, err);
    free(ids);
    return status;
}

static kvb_status read_npy_ids(eval_command *e, const char *path, const file_view *view, kvb_error *err)
{
    npy_array a;
    kvb_status status = npy_parse(&a, view->data, view->size, path, err);
    int32_t *ids = status == KVB_OK ? malloc((a.count + 1) * sizeof *ids) : NULL;
    if (status == KVB_OK && !ids) status = kvb_fail(err, KVB_MEMORY, "%s: no memory for %zu ids", path, a.count);
    if (status == KVB_OK) status = npy_to_i32(&a, ids, path, err);
    if (status == KVB_OK) status = take_ids(e, path, ids, a.count, err);
    free(ids);
    return status;
}

static kvb_status read_text(eval_command *e, const char *path, kvb_error *err)
{
    const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    kvb_status status;
    if (ends_with(path, ".jsonl")) {
        calib_file file;
        status = calib_load(&file, path, err);
        for (size_t i = 0; status == KVB_OK && i < file.count; i++) {
            const calib_context *c = &file.contexts[i];
            status = c->context ? encode_text(e, c->sample_id, c->context, strlen(c->context), err)
                                : take_ids(e, c->sample_id, c->context_ids, c->n_context_ids, err);
        }
        calib_free(&file);
        return status;
    }
    file_view view;
    status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    status = ends_with(path, ".npy") ? read_npy_ids(e, path, &view, err)
                                     : encode_text(e, name, (const char *)view.data, view.size, err);
    file_unmap(&view);
    return status;
}

static kvb_status check_texts(const eval_command *e, kvb_error *err)
{
    const sweep_text *t = e->texts;
    for (size_t i = 0; i < e->n_texts; i++) {
        for (size_t k = 0; k < i; k++)
            if (strcmp(t[i].sha256, t[k].sha256) == 0)
                return kvb_fail(err, KVB_ARGUMENT, "%s and %s begin with the same tokens: a text counts once",
                                t[k].name, t[i].name);
        for (uint32_t j = 0; j < t[i].n_ids; j++)
            if (t[i].ids[j] < 0 || (uint32_t)t[i].ids[j] >= e->m->config.vocabulary)
                return kvb_fail(err, KVB_ARGUMENT, "%s: token %u: id %d, expected 0 to %u", t[i].name, j, t[i].ids[j],
                                e->m->config.vocabulary - 1);
        if (t[i].n_ids < e->n_tokens + e->n_next)
            return kvb_fail(err, KVB_ARGUMENT,
                            "%s: %u tokens, expected at least %llu of context and %llu to go on with; use a longer "
                            "text or a smaller --tokens",
                            t[i].name, t[i].n_ids, (unsigned long long)e->n_tokens, (unsigned long long)e->n_next);
    }
    return KVB_OK;
}

int eval_open_inputs(eval_command *e, char **operands, size_t n)
{
    kvb_error err = {0};
    int code = read_ratios(e);
    if (code != EXIT_DONE) return code;
    size_t n_texts = 0;
    for (size_t i = 1; i < n; i++) n_texts += !is_table(operands[i]);
    if (!n_texts) return cli_usage_error(e->self, "no text is given: any text file, or .jsonl with contexts");
    kvb_status status = model_open(&e->m, operands[0], e->device, &err);
    if (status == KVB_OK && e->pre) status = model_set_pre_tokenizer(e->m, operands[0], e->pre, &err);
    if (status == KVB_OK) status = open_allocators(e, operands + 1, n - 1, &err);
    if (status == KVB_OK) status = choose_metrics(e, &err);
    if (status == KVB_OK) status = join_columns(e, &err);
    for (size_t i = 1; i < n && status == KVB_OK; i++)
        if (!is_table(operands[i])) status = read_text(e, operands[i], &err);
    if (status == KVB_OK) status = check_texts(e, &err);
    return status == KVB_OK ? EXIT_DONE : cli_failed(e->self, &err);
}

void eval_free_inputs(eval_command *e)
{
    for (size_t i = 0; i < e->n_allocators; i++) allocator_free(&e->allocators[i]);
    for (size_t i = 0; i < e->n_texts; i++) free(e->texts[i].ids);
    free(e->allocators);
    free(e->texts);
    free(e->metrics);
    free(e->columns);
    free(e->ratios);
    model_free(e->m);
}
