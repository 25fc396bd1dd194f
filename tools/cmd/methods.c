#include "tools/cmd/methods.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include <stdlib.h>
#include <string.h>

static const char *const DEFAULT_ALLOCATORS[] = {"uniform", "pyramid", "ada"};
static const double DEFAULT_RATIOS[] = {0.5, 0.8, 0.9, 0.95};

// ---- Ratios ----

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int methods_read_ratios(methods *e)
{
    size_t room = sizeof DEFAULT_RATIOS / sizeof *DEFAULT_RATIOS;
    if (cli_check_protected(e->self, e->sink, e->window) != EXIT_DONE) return EXIT_USAGE;
    if (e->refit && e->policy_names.count)
        return cli_usage_error(e->self, "--refit: policies evict at every step and leave no time to refit; run them "
                                        "without it");
    for (size_t i = 0; i < e->ratio_names.count; i++) room += strlen(e->ratio_names.items[i]);
    e->ratios = need(room, sizeof *e->ratios, "ratios");
    for (size_t i = 0; i < e->ratio_names.count; i++)
        for (const char *p = e->ratio_names.items[i]; *p; p += *p == ',') {
            char *end;
            double ratio = strtod(p, &end);
            if (end > p && *end == '%') {
                ratio /= 100;
                end++;
            }
            if (end == p || (*end && *end != ',') || !(ratio >= 0 && ratio < 1))
                return cli_usage_error(
                    e->self, "--ratio: expected pruned shares from 0 to below 1, such as 0.8 or 80%%, found '%s'", p);
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

bool methods_is_table(const char *operand)
{
    return kvb_ends_with(operand, ".safetensors") || kvb_ends_with(operand, ".safetensors:strict");
}

static kvb_status check_table(const methods *e, const allocator *a, kvb_error *err)
{
    const model_config *c = &e->m->config;
    kvb_expectation expected = {c->n_layers, c->n_heads, c->n_kv_heads, c->head_dim, e->m->sha256, NULL, 0, 0, 0};
    kvb_error inner = {0};
    kvb_status status = kvb_table_check(a->table, &expected, &inner);
    if (status == KVB_OK) return KVB_OK;
    return kvb_fail(err, status, "not a table of this model: %s", inner.message);
}

static kvb_status open_allocators(methods *e, char **operands, size_t n, kvb_error *err)
{
    size_t n_default = sizeof DEFAULT_ALLOCATORS / sizeof *DEFAULT_ALLOCATORS,
           n_named = e->allocator_names.count ? e->allocator_names.count : n_default;
    e->allocators = need(n_named + n, sizeof *e->allocators, "allocators");
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < n_named && status == KVB_OK; i++) {
        const char *text = e->allocator_names.count ? e->allocator_names.items[i] : DEFAULT_ALLOCATORS[i];
        if (strcmp(text, "none") == 0) continue;
        status = allocator_parse(&e->allocators[e->n_allocators++], text, err);
    }
    for (size_t i = 0; i < n && status == KVB_OK; i++) {
        if (!methods_is_table(operands[i])) continue;
        allocator *a = &e->allocators[e->n_allocators++];
        status = allocator_open_table(a, operands[i], err);
        if (status == KVB_OK) status = check_table(e, a, err);
    }
    return status;
}

// Sets *out if the tables were calibrated with this option. They must agree, unless *out is set already.
static kvb_status agreed(const methods *e, const char *key, const char *option, bool *out, kvb_error *err)
{
    const allocator *first = NULL;
    bool all = false;
    for (size_t i = 0; i < e->n_allocators && !*out; i++) {
        const allocator *a = &e->allocators[i];
        if (!a->table) continue;
        bool has = kvb_table_metadata(a->table, key) != NULL;
        if (first && has != all)
            return kvb_fail(err, KVB_MISMATCH,
                            "one of the tables %s and %s was calibrated with %s, the other was not; give %s to use it "
                            "for all texts",
                            first->label, a->label, option, option);
        first = a;
        all = has;
    }
    *out |= all;
    return KVB_OK;
}

kvb_status methods_set_texts(const methods *e, model_text *t, bool chat, bool special, kvb_error *err)
{
    kvb_status status = agreed(e, "chat", "--chat", &chat, err);
    if (status == KVB_OK) status = agreed(e, "special", "--special", &special, err);
    if (status != KVB_OK) return status;
    t->parse_special = special;
    return chat ? model_text_use_chat(t, err) : KVB_OK;
}

static method *find_metric(methods *e, const char *spec)
{
    for (size_t i = 0; i < e->n_items; i++)
        if (strcmp(e->items[i].m.spec, spec) == 0) return &e->items[i];
    return NULL;
}

static void add_metric(methods *e, const metric *m)
{
    if (find_metric(e, m->spec)) return;
    method *to = &e->items[e->n_items++];
    *to = (method){.m = *m, .sink = metric_protect_sink(m), .window = metric_protect_window(m)};
    if (e->sink != UINT64_MAX) to->sink = (uint32_t)e->sink;
    if (e->window != UINT64_MAX) to->window = (uint32_t)e->window;
}

static kvb_status add_named(methods *e, const char *text, kvb_error *err)
{
    metric m;
    const model_config *c = &e->m->config;
    kvb_status status = learned_parse(&m, text, &e->learned, err);
    if (status == KVB_OK) status = learned_check_model(&m, c->n_layers, c->n_kv_heads, e->m->sha256, err);
    if (status == KVB_OK) add_metric(e, &m);
    return status;
}

// Tells whether a metric's table has budgets for `to`: that of critical:share=0+METRIC has those for both stages too.
static bool table_serves(const metric *table, const method *to)
{
    metric profiled;
    return to->m.kind && metric_profiled_as(&to->m, &profiled) && strcmp(profiled.spec, table->spec) == 0;
}

// Makes a metric protect the tokens that a table for it protects.
static kvb_status protect_as(const methods *e, const kvb_info *info, method *to, bool *seen, kvb_error *err)
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

// Makes metrics follow a table, which says which metric it is for and what it protects: all allocators of that metric
// protect the same. Policies take any table.
static kvb_status follow_table(methods *e, const allocator *a, bool *seen, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(a->table);
    metric m;
    kvb_error inner = {0};
    kvb_status status = KVB_OK;
    if (learned_of_table(&m, a->table, &e->learned, &inner) != KVB_OK)
        return kvb_fail(err, KVB_MISMATCH, "table %s: %s", a->label, inner.message);
    if (!e->metric_names.count) add_metric(e, &m);
    size_t served = e->policy_names.count;
    for (size_t i = 0; i < e->n_items && status == KVB_OK; i++) {
        if (!table_serves(&m, &e->items[i])) continue;
        status = protect_as(e, info, &e->items[i], &seen[i], err);
        served++;
    }
    if (status == KVB_OK && served == 0)
        status = kvb_fail(err, KVB_MISMATCH,
                          "table %s is for metric %s, which --metric leaves out; add it, or leave out the table",
                          a->label, info->metric);
    return status;
}

static kvb_status choose_metrics(methods *e, bool bare, kvb_error *err)
{
    metric usual;
    size_t room = e->metric_names.count + e->policy_names.count + e->n_allocators + scorer_count + 1;
    bool *seen = need(room, sizeof *seen, "metrics"), tables = false,
         none = e->metric_names.count == 1 && strcmp(e->metric_names.items[0], "none") == 0;
    e->items = need(room, sizeof *e->items, "metrics");
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < e->metric_names.count && !none && status == KVB_OK; i++)
        status = add_named(e, e->metric_names.items[i], err);
    for (size_t i = 0; i < e->n_allocators && status == KVB_OK; i++) {
        if (e->allocators[i].kind != ALLOCATOR_TABLE) continue;
        tables = true;
        status = follow_table(e, &e->allocators[i], seen, err);
    }
    bool by_default = !bare && !e->metric_names.count && !e->policy_names.count && !tables;
    for (size_t i = 0; by_default && status == KVB_OK && metric_usual(&usual, i); i++)
        status = add_named(e, usual.spec, err);
    for (size_t i = 0; i < e->policy_names.count && status == KVB_OK; i++)
        status = policy_parse(&e->items[e->n_items++].p, e->policy_names.items[i], err);
    free(seen);
    return status;
}

static bool serves(methods *e, const allocator *a, const method *to)
{
    metric m;
    if (to->p.kind) return !allocator_needs_scores(a);
    if (a->kind != ALLOCATOR_TABLE) return true;
    return learned_of_table(&m, a->table, &e->learned, NULL) == KVB_OK && table_serves(&m, to);
}

static kvb_status join_columns(methods *e, kvb_error *err)
{
    e->columns = need(e->n_items * e->n_allocators, sizeof *e->columns, "columns");
    for (size_t m = 0; m < e->n_items; m++)
        for (size_t a = 0; a < e->n_allocators; a++) {
            if (!serves(e, &e->allocators[a], &e->items[m])) continue;
            for (size_t i = 0; i < e->n_columns; i++)
                if (e->columns[i].method == m && strcmp(e->columns[i].how->label, e->allocators[a].label) == 0)
                    return kvb_fail(err, KVB_ARGUMENT,
                                    "two allocators have the name %s; give tables names: NAME=FILE.safetensors",
                                    e->allocators[a].label);
            e->columns[e->n_columns++] = (method_column){(uint32_t)m, &e->allocators[a]};
        }
    return KVB_OK;
}

kvb_status methods_open(methods *e, const model *m, char **operands, size_t n, bool bare, kvb_error *err)
{
    e->m = m;
    kvb_status status = open_allocators(e, operands, n, err);
    if (status == KVB_OK) status = choose_metrics(e, bare, err);
    return status == KVB_OK ? join_columns(e, err) : status;
}

method_list methods_list(const methods *e)
{
    return (method_list){e->items, (uint32_t)e->n_items, e->columns, (uint32_t)e->n_columns};
}

uint32_t methods_refit(const methods *e)
{
    return e->refit ? REFERENCES_PER_HEAD * (e->m->config.n_heads / e->m->config.n_kv_heads) : 0;
}

compared methods_compared(const methods *e)
{
    return (compared){methods_list(e), e->allocators, e->n_allocators, e->ratios, e->n_ratios};
}

void methods_free(methods *e)
{
    for (size_t i = 0; i < e->n_allocators; i++) allocator_free(&e->allocators[i]);
    cli_list *const lists[] = {&e->metric_names, &e->policy_names, &e->allocator_names, &e->ratio_names};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) cli_list_free(lists[i]);
    free_all(e->allocators, e->items);
    learned_list_close(&e->learned);
    free_all(e->columns, e->ratios);
}
