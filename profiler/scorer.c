#include "profiler/scorer.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROTECT_WINDOW_PARAMETER UINT32_MAX

#define SNAPKV_PARAMETERS(window, kernel, max_pool)                                                     \
    {                                                                                                   \
        {"window", window, 1, 65536, true, "last context queries that vote"},                           \
            {"kernel", kernel, 1, 255, true, "width of the pooling over positions, odd"},               \
            {"max_pool", max_pool, 0, 1, true, "1 = max pooling, 0 = average, zeros beyond the edges"}, \
    }

#define EA_PARAMETERS(sinks_in_softmax)                                                                           \
    {                                                                                                             \
        {"future", 512, 1, 1e6, true, "positions after the context over which RoPE is averaged"},                 \
            {"sinks", 4, 0, 4096, true, "first rows left out of the query statistics"},                           \
            {"epsilon", 0.02, 0, 1e6, false, "added to the attention before it is multiplied by the value norm"}, \
            {"covariance", 1, 0, 1, true, "1 = use the covariance of the queries, 0 = their mean only"},          \
            {"value_norm", 1, 0, 1, true, "1 = multiply by the norm of the value"},                               \
            {"sinks_in_softmax", sinks_in_softmax, 0, 1, true, "1 = the softmax runs over the sinks too"},        \
    }

const scorer scorer_list[] = {
    {"snapkv", "kvpress", "attention of the last 64 queries, average pooling, as kvpress deploys it", VIEW_Q | VIEW_K,
     4, PROTECT_WINDOW_PARAMETER, SNAPKV_PARAMETERS(64, 5, 0), score_snapkv},
    {"snapkv", "lukv", "attention of the last 32 queries, max pooling, as LU-KV published it", VIEW_Q | VIEW_K, 4,
     PROTECT_WINDOW_PARAMETER, SNAPKV_PARAMETERS(32, 7, 1), score_snapkv},
    {"keydiff", "", "distance of a key's direction from the mean direction", VIEW_K, 4, 1, {{0}}, score_keydiff},
    {"ea", "kvpress", "expected attention of future queries, sinks outside the softmax, as kvpress deploys it",
     VIEW_Q_RAW | VIEW_K | VIEW_V, 4, 1, EA_PARAMETERS(0), score_expected_attention},
    {"ea", "lukv", "expected attention of future queries, sinks inside the softmax, as LU-KV published it",
     VIEW_Q_RAW | VIEW_K | VIEW_V, 4, 1, EA_PARAMETERS(1), score_expected_attention},
};
const size_t scorer_count = sizeof scorer_list / sizeof scorer_list[0];

static int parameter_index(const scorer *kind, const char *name, size_t length)
{
    for (int i = 0; i < SCORER_MAX_PARAMETERS && kind->parameters[i].name; i++)
        if (strlen(kind->parameters[i].name) == length && memcmp(kind->parameters[i].name, name, length) == 0) return i;
    return -1;
}

static void known_metrics(char *text, size_t size)
{
    size_t used = 0;
    for (size_t i = 0; i < scorer_count && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s%s%s", i ? ", " : "", scorer_list[i].name,
                                 *scorer_list[i].variant ? ":" : "", scorer_list[i].variant);
}

// The scorer named by the first one or two parts of text; *rest is what follows them.
static const scorer *find_scorer(const char *text, const char **rest)
{
    size_t name = strcspn(text, ":"), variant = text[name] ? strcspn(text + name + 1, ":") : 0;
    bool has_variant = variant && !memchr(text + name + 1, '=', variant);
    const char *wanted = has_variant ? text + name + 1 : "kvpress";
    size_t length = has_variant ? variant : strlen(wanted);
    for (size_t i = 0; i < scorer_count; i++) {
        const scorer *s = &scorer_list[i];
        bool bare = !*s->variant && !has_variant;
        if (strlen(s->name) != name || memcmp(s->name, text, name) != 0) continue;
        if (!bare && (strlen(s->variant) != length || memcmp(s->variant, wanted, length) != 0)) continue;
        *rest = text + name + (has_variant ? 1 + variant : 0);
        return s;
    }
    return NULL;
}

static kvb_status parse_parameter(metric *m, const char *text, size_t length, kvb_error *err)
{
    const char *equals = memchr(text, '=', length);
    int i = equals ? parameter_index(m->kind, text, (size_t)(equals - text)) : -1;
    if (i < 0) {
        char names[256] = "none";
        size_t used = 0;
        for (int p = 0; p < SCORER_MAX_PARAMETERS && m->kind->parameters[p].name && used < sizeof names; p++)
            used +=
                (size_t)snprintf(names + used, sizeof names - used, "%s%s", p ? ", " : "", m->kind->parameters[p].name);
        return kvb_fail(err, KVB_ARGUMENT, "metric %s: '%.*s' is not parameter=value; parameters: %s", m->kind->name,
                        (int)length, text, names);
    }
    const scorer_parameter *p = &m->kind->parameters[i];
    char *end;
    double value = strtod(equals + 1, &end);
    if (end != text + length || end == equals + 1 || !(value >= p->low && value <= p->high) ||
        (p->integer && value != floor(value)))
        return kvb_fail(err, KVB_ARGUMENT, "metric %s: %s expects %s from %g to %g (%s), found '%.*s'", m->kind->name,
                        p->name, p->integer ? "an integer" : "a number", p->low, p->high, p->meaning,
                        (int)(text + length - equals - 1), equals + 1);
    m->values[i] = value;
    return KVB_OK;
}

// As short as reads back as the same number: a record keeps scores by name, so no two metrics may share one.
static int write_parameter(char *out, size_t size, const char *name, double value)
{
    char number[32];
    snprintf(number, sizeof number, "%.15g", value);
    if (strtod(number, NULL) != value) snprintf(number, sizeof number, "%.17g", value);
    return snprintf(out, size, ":%s=%s", name, number);
}

kvb_status metric_parse(metric *out, const char *text, kvb_error *err)
{
    const char *rest = text;
    *out = (metric){.kind = find_scorer(text, &rest)};
    if (!out->kind) {
        char known[256];
        known_metrics(known, sizeof known);
        return kvb_fail(err, KVB_ARGUMENT,
                        "metric '%s' is unknown; expected one of %s, with :parameter=value after it if wanted", text,
                        known);
    }
    for (int i = 0; i < SCORER_MAX_PARAMETERS && out->kind->parameters[i].name; i++)
        out->values[i] = out->kind->parameters[i].value;
    while (*rest == ':') {
        size_t length = strcspn(++rest, ":");
        kvb_status status = parse_parameter(out, rest, length, err);
        if (status != KVB_OK) return status;
        rest += length;
    }
    if (strcmp(out->kind->name, "snapkv") == 0 && (int)metric_value(out, "kernel") % 2 == 0)
        return kvb_fail(err, KVB_ARGUMENT,
                        "metric '%s': kernel must be odd, so that a position stands in the middle of its pool", text);
    int used = snprintf(out->spec, sizeof out->spec, "%s%s%s", out->kind->name, *out->kind->variant ? ":" : "",
                        out->kind->variant);
    for (int i = 0; i < SCORER_MAX_PARAMETERS && out->kind->parameters[i].name; i++)
        if (out->values[i] != out->kind->parameters[i].value && used < (int)sizeof out->spec)
            used += write_parameter(out->spec + used, sizeof out->spec - (size_t)used, out->kind->parameters[i].name,
                                    out->values[i]);
    if (used >= (int)sizeof out->spec)
        return kvb_fail(err, KVB_ARGUMENT, "metric '%s': its name would have %d characters, at most %d fit", text, used,
                        METRIC_MAX - 1);
    return KVB_OK;
}

double metric_value(const metric *m, const char *parameter)
{
    int i = parameter_index(m->kind, parameter, strlen(parameter));
    return i < 0 ? NAN : m->values[i];
}

unsigned metric_needs(const metric *m)
{
    return m->kind->needs;
}

static kvb_status check_view(const metric *m, const layer_view *v, kvb_error *err)
{
    const struct {
        view_item item;
        const float *values;
        const char *name;
    } items[] = {{VIEW_Q_RAW, v->q_raw, "q_raw"},
                 {VIEW_Q, v->q, "q"},
                 {VIEW_K, v->k, "k"},
                 {VIEW_V, v->v, "v"},
                 {VIEW_COLUMN_SUMS, v->column_sums, "column_sums"},
                 {VIEW_OUTPUT_NORMS, v->output_norms, "output_norms"}};
    for (size_t i = 0; i < sizeof items / sizeof *items; i++)
        if ((metric_needs(m) & items[i].item) && !items[i].values)
            return kvb_fail(
                err, KVB_ARGUMENT,
                "metric %s, layer %u: needs %s, which the view lacks; ask for metric_needs() in the observer", m->spec,
                v->layer, items[i].name);
    if (v->n_queries > v->n_tokens || ((metric_needs(m) & (VIEW_Q | VIEW_Q_RAW)) && v->n_queries == 0))
        return kvb_fail(err, KVB_ARGUMENT, "metric %s, layer %u: the view has %u queries, expected 1 to %u", m->spec,
                        v->layer, v->n_queries, v->n_tokens);
    return KVB_OK;
}

kvb_status metric_score(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    size_t T = view->n_tokens, n = view->n_kv_heads * T;
    kvb_status status = check_view(m, view, err);
    if (status == KVB_OK) status = m->kind->score(m, view, s, err);
    for (size_t j = 0; status == KVB_OK && j < n; j++)
        if (!isfinite(s[j]))
            status = kvb_fail(err, KVB_NUMERIC,
                              "metric %s: layer %u, KV head %zu, position %zu is not finite; the model's activations "
                              "overflow on this text",
                              m->spec, view->layer, view->first_kv_head + j / T, j % T);
    return status;
}

uint32_t metric_protect_sink(const metric *m)
{
    return m->kind->protect_sink;
}

uint32_t metric_protect_window(const metric *m)
{
    return m->kind->protect_window == PROTECT_WINDOW_PARAMETER ? (uint32_t)metric_value(m, "window")
                                                               : m->kind->protect_window;
}

cJSON *metric_to_json(const metric *m)
{
    cJSON *o = cJSON_CreateObject();
    bool ok = o != NULL;
    for (int i = 0; ok && i < SCORER_MAX_PARAMETERS && m->kind->parameters[i].name; i++)
        ok = cJSON_AddNumberToObject(o, m->kind->parameters[i].name, m->values[i]) != NULL;
    ok = ok && cJSON_AddNumberToObject(o, "protect_sink", metric_protect_sink(m)) &&
         cJSON_AddNumberToObject(o, "protect_window", metric_protect_window(m));
    if (!ok) {
        cJSON_Delete(o);
        return NULL;
    }
    return o;
}
