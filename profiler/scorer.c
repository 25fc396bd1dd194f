#include "profiler/scorer_parts.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const scorer *const scorer_list[] = {
    &scorer_snapkv_kvpress,
    &scorer_snapkv_lukv,
    &scorer_snapkv_adakv,
    &scorer_snapkv_factory,
    &scorer_snapkv_keydiff,
    &scorer_keydiff,
    &scorer_ea_kvpress,
    &scorer_ea_lukv,
    &scorer_lagkv_kvpress,
    &scorer_lagkv_paper,
    &scorer_morphkv,
    &scorer_rocketkv,
    &scorer_h2o,
    &scorer_h2o_kvpress,
    &scorer_h2o_half,
    &scorer_tova,
    &scorer_knorm,
    &scorer_streaming,
    &scorer_streaming_kvpress,
    &scorer_random,
    &scorer_critical,
};
const size_t scorer_count = sizeof scorer_list / sizeof scorer_list[0];

static int parameter_index(const scorer *kind, const char *name, size_t length)
{
    for (int i = 0; kind->parameters[i].name; i++)
        if (strlen(kind->parameters[i].name) == length && memcmp(kind->parameters[i].name, name, length) == 0) return i;
    return -1;
}

static void known_metrics(char *text, size_t size)
{
    size_t used = 0;
    for (size_t i = 0; i < scorer_count && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s%s%s%s", i ? ", " : "", scorer_list[i]->name,
                                 *scorer_list[i]->variant ? ":" : "", scorer_list[i]->variant,
                                 scorer_list[i]->wraps ? "+METRIC" : "");
}

// The scorer named by the first one or two parts of text; *rest is what follows them. A plain form comes before its variants in the list.
static const scorer *find_scorer(const char *text, const char **rest)
{
    size_t name = strcspn(text, ":"), variant = text[name] ? strcspn(text + name + 1, ":") : 0;
    bool has_variant = variant && !memchr(text + name + 1, '=', variant);
    const char *wanted = has_variant ? text + name + 1 : "kvpress";
    size_t length = has_variant ? variant : strlen(wanted);
    for (size_t i = 0; i < scorer_count; i++) {
        const scorer *s = scorer_list[i];
        bool bare = !*s->variant && !has_variant;
        if (strlen(s->name) != name || memcmp(s->name, text, name) != 0) continue;
        if (!bare && (strlen(s->variant) != length || memcmp(s->variant, wanted, length) != 0)) continue;
        *rest = text + name + (has_variant ? 1 + variant : 0);
        return s;
    }
    return NULL;
}

// The value that `choices` ("a|b|c") calls so, or NaN.
static double choice_value(const char *choices, const char *text, size_t length)
{
    for (int i = 0; *choices; i++) {
        size_t n = strcspn(choices, "|");
        if (n == length && memcmp(choices, text, n) == 0) return i;
        choices += n + (choices[n] == '|');
    }
    return NAN;
}

static void choice_name(char *out, size_t size, const char *choices, int value)
{
    while (value--) choices += strcspn(choices, "|") + 1;
    snprintf(out, size, "%.*s", (int)strcspn(choices, "|"), choices);
}

static kvb_status parse_value(double *out, const scorer *kind, const scorer_parameter *p, const char *text,
                              size_t length, kvb_error *err)
{
    if (p->choices) {
        *out = choice_value(p->choices, text, length);
        return isfinite(*out) ? KVB_OK
                              : kvb_fail(err, KVB_ARGUMENT, "metric %s: %s expects one of %s (%s), found '%.*s'",
                                         kind->name, p->name, p->choices, p->meaning, (int)length, text);
    }
    char *end;
    *out = strtod(text, &end);
    if (end != text + length || length == 0 || !(*out >= p->low && *out <= p->high) ||
        (p->integer && *out != floor(*out)))
        return kvb_fail(err, KVB_ARGUMENT, "metric %s: %s expects %s from %g to %g (%s), found '%.*s'", kind->name,
                        p->name, p->integer ? "an integer" : "a number", p->low, p->high, p->meaning, (int)length,
                        text);
    return KVB_OK;
}

static kvb_status parse_parameter(const scorer *kind, double *values, const char *text, size_t length, kvb_error *err)
{
    const char *equals = memchr(text, '=', length);
    int i = equals ? parameter_index(kind, text, (size_t)(equals - text)) : -1;
    if (i >= 0)
        return parse_value(&values[i], kind, &kind->parameters[i], equals + 1, (size_t)(text + length - equals - 1),
                           err);
    char names[256] = "none";
    size_t used = 0;
    for (int p = 0; kind->parameters[p].name && used < sizeof names; p++)
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", p ? ", " : "", kind->parameters[p].name);
    return kvb_fail(err, KVB_ARGUMENT, "metric %s: '%.*s' is not parameter=value; parameters: %s", kind->name,
                    (int)length, text, names);
}

// As short as reads back as the same value: a record keeps scores by name, so no two metrics may share one.
static size_t write_parameter(char *out, size_t size, const scorer_parameter *p, double value)
{
    char number[32];
    if (p->choices) {
        choice_name(number, sizeof number, p->choices, (int)value);
    } else {
        snprintf(number, sizeof number, "%.15g", value);
        if (strtod(number, NULL) != value) snprintf(number, sizeof number, "%.17g", value);
    }
    return (size_t)snprintf(out, size, ":%s=%s", p->name, number);
}

// Appends the canonical name; returns the length that it has, also where it does not fit.
static size_t write_name(char *out, size_t size, const scorer *kind, const double *values)
{
    size_t used = (size_t)snprintf(out, size, "%s%s%s", kind->name, *kind->variant ? ":" : "", kind->variant);
    for (int i = 0; kind->parameters[i].name; i++)
        if (values[i] != kind->parameters[i].value)
            used += write_parameter(used < size ? out + used : NULL, used < size ? size - used : 0,
                                    &kind->parameters[i], values[i]);
    return used;
}

// One name without a plus sign, [text, text + length).
static kvb_status parse_part(const scorer **kind, double *values, const char *text, size_t length, kvb_error *err)
{
    char part[256], known[512];
    const char *rest = part;
    *kind = NULL;
    if (length < sizeof part) {
        memcpy(part, text, length);
        part[length] = 0;
        *kind = find_scorer(part, &rest);
    }
    if (!*kind) {
        known_metrics(known, sizeof known);
        return kvb_fail(err, KVB_ARGUMENT,
                        "metric '%.*s' is unknown; expected one of %s, with :parameter=value after it if wanted",
                        length < 200 ? (int)length : 200, text, known);
    }
    for (int i = 0; (*kind)->parameters[i].name; i++) values[i] = (*kind)->parameters[i].value;
    while (*rest == ':') {
        size_t n = strcspn(++rest, ":");
        kvb_status status = parse_parameter(*kind, values, rest, n, err);
        if (status != KVB_OK) return status;
        rest += n;
    }
    return KVB_OK;
}

static kvb_status parse_base(metric *out, const char *text, size_t own, kvb_error *err)
{
    if (!out->kind->wraps && text[own])
        return kvb_fail(err, KVB_ARGUMENT, "metric '%s': %s wraps no other metric; only critical+METRIC does", text,
                        out->kind->name);
    if (!out->kind->wraps) return KVB_OK;
    if (!text[own] || !text[own + 1])
        return kvb_fail(err, KVB_ARGUMENT, "metric '%s': write %s+METRIC, for example %s+snapkv:kvpress", text,
                        out->kind->name, out->kind->name);
    kvb_status status = parse_part(&out->base, out->base_values, text + own + 1, strlen(text + own + 1), err);
    metric base;
    if (status != KVB_OK || !metric_base(out, &base)) return status;
    if (out->base->wraps || metric_check_nested(&base, NULL) != KVB_OK)
        return kvb_fail(err, KVB_ARGUMENT, "metric '%s': %s cannot be wrapped; its order depends on the budget", text,
                        out->base->name);
    return out->base->check ? out->base->check(&base, err) : KVB_OK;
}

kvb_status metric_parse(metric *out, const char *text, kvb_error *err)
{
    size_t own = strcspn(text, "+");
    *out = (metric){0};
    kvb_status status = parse_part(&out->kind, out->values, text, own, err);
    if (status == KVB_OK) {
        size_t used = write_name(out->spec, sizeof out->spec, out->kind, out->values);
        status = parse_base(out, text, own, err);
        if (status == KVB_OK && out->base && used + 1 < sizeof out->spec) {
            out->spec[used++] = '+';
            used += write_name(out->spec + used, sizeof out->spec - used, out->base, out->base_values);
        }
        if (status == KVB_OK && used >= sizeof out->spec)
            status = kvb_fail(err, KVB_ARGUMENT, "metric '%.200s': its name would have %zu characters, at most %d fit",
                              text, used, METRIC_MAX - 1);
    }
    return status == KVB_OK && out->kind->check ? out->kind->check(out, err) : status;
}

bool metric_base(const metric *m, metric *base)
{
    if (!m->base) return false;
    *base = (metric){.kind = m->base};
    memcpy(base->values, m->base_values, sizeof base->values);
    write_name(base->spec, sizeof base->spec, base->kind, base->values);
    return true;
}

double metric_value(const metric *m, const char *parameter)
{
    int i = parameter_index(m->kind, parameter, strlen(parameter));
    return i < 0 ? NAN : m->values[i];
}

unsigned metric_needs(const metric *m)
{
    return m->kind->needs | (m->base ? m->base->needs : 0);
}

unsigned metric_needs_on_device(const metric *m)
{
    metric base;
    unsigned needs = m->kind->needs_on_device ? m->kind->needs_on_device(m) : m->kind->needs;
    return needs | (metric_base(m, &base) ? metric_needs_on_device(&base) : 0);
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
    unsigned needs = v->device ? metric_needs_on_device(m) : metric_needs(m);
    for (size_t i = 0; i < sizeof items / sizeof *items; i++)
        if ((needs & items[i].item) && !items[i].values)
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

kvb_status metric_check_nested(const metric *m, kvb_error *err)
{
    const char *why = m->kind->why_not_nested ? m->kind->why_not_nested(m) : NULL;
    return why ? kvb_fail(err, KVB_ARGUMENT,
                          "metric %s cannot be profiled, its order of tokens depends on the budget: %s", m->spec, why)
               : KVB_OK;
}

bool metric_profiled_as(const metric *m, metric *profiled)
{
    *profiled = *m;
    if (metric_check_nested(m, NULL) == KVB_OK) return true;
    metric base;
    if (!metric_base(m, &base)) return false;
    profiled->values[parameter_index(m->kind, "share", 5)] = 0;
    size_t used = write_name(profiled->spec, sizeof profiled->spec, profiled->kind, profiled->values);
    if (used < sizeof profiled->spec)
        used += (size_t)snprintf(profiled->spec + used, sizeof profiled->spec - used, "+%s", base.spec);
    return used < sizeof profiled->spec;
}

kvb_status metric_rank(const metric *m, const float *first, const float *s, uint32_t n_kv_heads, uint32_t n_tokens,
                       const uint32_t *budget, float *out, kvb_error *err)
{
    size_t T = n_tokens;
    if (out != s) memcpy(out, s, n_kv_heads * T * sizeof *out);
    if (metric_check_nested(m, NULL) == KVB_OK) return KVB_OK;
    if (m->base && !first)
        return kvb_fail(err, KVB_ARGUMENT, "metric %s: ranking needs the scores of %s, the metric it wraps", m->spec,
                        m->base->name);
    for (uint32_t g = 0; g < n_kv_heads; g++) {
        kvb_status status = m->kind->rank(m, first ? first + g * T : NULL, out + g * T, n_tokens, budget[g], err);
        if (status != KVB_OK) return status;
    }
    return KVB_OK;
}

// The wrapped metric is what the engine protects tokens for.
static uint32_t protect_window_of(const scorer *kind, const double *values)
{
    return kind->protect_window == PROTECT_WINDOW_PARAMETER ? (uint32_t)values[parameter_index(kind, "window", 6)]
                                                            : kind->protect_window;
}

uint32_t metric_protect_sink(const metric *m)
{
    return m->base ? m->base->protect_sink : m->kind->protect_sink;
}

uint32_t metric_protect_window(const metric *m)
{
    return m->base ? protect_window_of(m->base, m->base_values) : protect_window_of(m->kind, m->values);
}

// A choice as its name, a number as it is.
static bool add_parameters(cJSON *to, const scorer *kind, const double *values)
{
    bool ok = true;
    for (int i = 0; ok && kind->parameters[i].name; i++) {
        char name[32];
        if (kind->parameters[i].choices) choice_name(name, sizeof name, kind->parameters[i].choices, (int)values[i]);
        ok = kind->parameters[i].choices ? cJSON_AddStringToObject(to, kind->parameters[i].name, name) != NULL
                                         : cJSON_AddNumberToObject(to, kind->parameters[i].name, values[i]) != NULL;
    }
    return ok;
}

cJSON *metric_to_json(const metric *m)
{
    metric base;
    cJSON *o = cJSON_CreateObject();
    bool ok = o && add_parameters(o, m->kind, m->values);
    if (ok && metric_base(m, &base)) {
        ok = cJSON_AddStringToObject(o, "wraps", base.spec) != NULL;
        cJSON *inner = cJSON_AddObjectToObject(o, "parameters");
        ok = ok && inner && add_parameters(inner, base.kind, base.values);
    }
    ok = ok && cJSON_AddNumberToObject(o, "protect_sink", metric_protect_sink(m)) &&
         cJSON_AddNumberToObject(o, "protect_window", metric_protect_window(m));
    if (!ok) {
        cJSON_Delete(o);
        return NULL;
    }
    return o;
}
