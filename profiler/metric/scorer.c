#include "formats/json_file.h"
#include "profiler/metric/scorer_parts.h"
#include "runtime/fail.h"
#include <math.h>
#include <string.h>

#define LIST_SCORER(name) &scorer_##name,
const scorer *const scorer_list[] = {SCORERS(LIST_SCORER)};
const size_t scorer_count = sizeof scorer_list / sizeof scorer_list[0];

static const spec_row *metric_row(size_t i)
{
    return i < scorer_count ? &scorer_list[i]->spec : NULL;
}

static const spec_list METRICS = {"metric", metric_row, "kvpress"};

// Returns the place of the plus sign before a wrapped metric, or the text's length. A plus sign before a digit is part
// of a number.
static size_t wrapped_at(const char *text)
{
    size_t at = strcspn(text, "+");
    while (text[at] && text[at + 1] >= '0' && text[at + 1] <= '9') at += 1 + strcspn(text + at + 1, "+");
    return at;
}

static kvb_status parse_base(metric *out, const char *text, size_t own, kvb_error *err)
{
    size_t row;
    const char *name = out->kind->spec.name;
    if (!out->kind->wraps && text[own])
        return kvb_fail(err, KVB_ARGUMENT, "metric '%.200s': %s wraps no other metric; only critical+METRIC does", text,
                        name);
    if (!out->kind->wraps) return KVB_OK;
    if (!text[own] || !text[own + 1])
        return kvb_fail(err, KVB_ARGUMENT, "metric '%.200s': write %s+METRIC, for example %s+snapkv:kvpress", text,
                        name, name);
    kvb_status status = spec_read(&METRICS, text, own + 1, strlen(text), &row, out->base_set.bytes, err);
    metric base;
    if (status != KVB_OK) return status;
    out->base = scorer_list[row];
    metric_base(out, &base);
    if (out->base->wraps || metric_check_nested(&base, NULL) != KVB_OK)
        return kvb_fail(err, KVB_ARGUMENT, "metric '%.200s': %s cannot be wrapped; its order depends on the budget",
                        text, out->base->spec.name);
    return out->base->check ? out->base->check(&base, err) : KVB_OK;
}

// Writes the canonical text, the key in records and logs. Fails if it does not fit: no two metrics may share one.
static kvb_status write_spec(metric *m, kvb_error *err)
{
    size_t size = sizeof m->spec, used = spec_write(m->spec, size, &m->kind->spec, m->set.bytes);
    if (m->base && used + 1 < size) m->spec[used] = '+';
    if (m->base) used++;
    if (m->base)
        used += spec_write(used < size ? m->spec + used : NULL, used < size ? size - used : 0, &m->base->spec,
                           m->base_set.bytes);
    if (used < size) return KVB_OK;
    return kvb_fail(err, KVB_ARGUMENT, "metric '%.100s...': its name would have %zu characters, at most %zu fit",
                    m->spec, used, size - 1);
}

kvb_status metric_parse(metric *out, const char *text, kvb_error *err)
{
    size_t own = wrapped_at(text), row;
    memset(out, 0, sizeof *out); // settings can be compared as bytes
    kvb_status status = spec_read(&METRICS, text, 0, own, &row, out->set.bytes, err);
    if (status != KVB_OK) return status;
    out->kind = scorer_list[row];
    status = parse_base(out, text, own, err);
    if (status == KVB_OK) status = write_spec(out, err);
    return status == KVB_OK && out->kind->check ? out->kind->check(out, err) : status;
}

bool metric_usual(metric *out, size_t i)
{
    for (size_t k = 0; k < scorer_count; k++) {
        const spec_row *row = &scorer_list[k]->spec;
        if (!scorer_list[k]->usual || i-- > 0) continue;
        *out = (metric){.kind = scorer_list[k]};
        spec_set_defaults(row, out->set.bytes);
        spec_write(out->spec, sizeof out->spec, row, out->set.bytes);
        return true;
    }
    return false;
}

const void *metric_settings(const metric *m)
{
    return m->set.bytes;
}

static const spec_parameter *find_parameter(const metric *m, const char *name)
{
    const spec_parameter *p = m->kind->spec.parameters;
    while (p->name && strcmp(p->name, name) != 0) p++;
    return p->name ? p : NULL;
}

double metric_value(const metric *m, const char *parameter, double otherwise)
{
    const spec_parameter *p = find_parameter(m, parameter);
    return p ? spec_value(p, m->set.bytes) : otherwise;
}

void metric_set_value(metric *m, const char *parameter, double value)
{
    const spec_parameter *p = find_parameter(m, parameter);
    if (p) spec_set_value(p, m->set.bytes, value);
}

bool metric_base(const metric *m, metric *base)
{
    if (!m->base) return false;
    *base = (metric){.kind = m->base, .set = m->base_set};
    spec_write(base->spec, sizeof base->spec, &base->kind->spec, base->set.bytes);
    return true;
}

unsigned metric_needs(const metric *m)
{
    unsigned own = m->kind->needs_of ? m->kind->needs_of(m) : m->kind->needs;
    return own | (m->base ? m->base->needs : 0);
}

const char *metric_kin(const metric *m)
{
    const scorer *kind = m->base ? m->base : m->kind;
    return kind->kin ? kind->kin : kind->spec.name;
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
    unsigned needs = metric_needs(m);
    for (size_t i = 0; i < sizeof items / sizeof *items; i++)
        if ((needs & items[i].item) && !items[i].values)
            return kvb_fail(
                err, KVB_ARGUMENT,
                "metric %s, layer %u: needs %s, which the view lacks; ask for metric_needs() in the observer", m->spec,
                v->layer, items[i].name);
    if (v->n_queries > v->n_tokens || ((needs & (VIEW_Q | VIEW_Q_RAW)) && v->n_queries == 0))
        return kvb_fail(err, KVB_ARGUMENT, "metric %s, layer %u: the view has %u queries, expected 1 to %u", m->spec,
                        v->layer, v->n_queries, v->n_tokens);
    return KVB_OK;
}

kvb_status metric_score(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    size_t T = view->n_tokens, n = view->n_kv_heads * T;
    kvb_status status = check_view(m, view, err);
    if (status == KVB_OK) status = metric_check_tokens(m, T, err);
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
    if (!m->kind->why_not_nested || (m->kind->is_nested && m->kind->is_nested(m))) return KVB_OK;
    return kvb_fail(err, KVB_ARGUMENT, "metric %s cannot be profiled, its order of tokens depends on the budget: %s",
                    m->spec, m->kind->why_not_nested);
}

bool metric_profiled_as(const metric *m, metric *profiled)
{
    *profiled = *m;
    if (metric_check_nested(m, NULL) == KVB_OK) return true;
    return m->kind->make_nested && m->kind->make_nested(profiled) && write_spec(profiled, NULL) == KVB_OK;
}

kvb_status metric_rank(const metric *m, const float *first, const float *s, uint32_t n_kv_heads, uint32_t n_tokens,
                       const uint32_t *budget, float *out, kvb_error *err)
{
    size_t T = n_tokens;
    if (out != s) memcpy(out, s, n_kv_heads * T * sizeof *out);
    if (metric_check_nested(m, NULL) == KVB_OK) return KVB_OK;
    if (m->base && !first)
        return kvb_fail(err, KVB_ARGUMENT, "metric %s: ranking needs the scores of %s, the metric it wraps", m->spec,
                        m->base->spec.name);
    for (uint32_t g = 0; g < n_kv_heads; g++) {
        kvb_status status = m->kind->rank(m, first ? first + g * T : NULL, out + g * T, n_tokens, budget[g], err);
        if (status != KVB_OK) return status;
    }
    return KVB_OK;
}

uint32_t metric_window(const metric *m)
{
    metric base;
    return metric_base(m, &base) ? metric_window(&base) : (uint32_t)metric_value(m, "window", 0);
}

uint32_t metric_least_tokens(const metric *m)
{
    metric base;
    uint32_t votes = m->kind->needs & VIEW_Q ? metric_window(m) : 0;
    uint32_t own = m->kind->least_tokens ? m->kind->least_tokens(m) : votes + 1;
    uint32_t wrapped = metric_base(m, &base) ? metric_least_tokens(&base) : 1;
    return own > wrapped ? own : wrapped;
}

uint64_t metric_score_bytes(const metric *m, const layer_view *shape, uint32_t n_threads)
{
    enum { LINES = 4 }; // the least rows of T floats for a head that a thread works on; a window may take more
    metric base;
    uint64_t window = metric_window(m), lines = window + 1 > LINES ? window + 1 : LINES;
    uint64_t heads = n_threads < shape->n_kv_heads ? n_threads : shape->n_kv_heads;
    uint64_t line = shape->n_tokens * sizeof(float), all = 4ull * shape->n_kv_heads + shape->n_heads;
    uint64_t own = m->kind->bytes ? m->kind->bytes(shape) : 0;
    uint64_t wrapped = metric_base(m, &base) ? metric_score_bytes(&base, shape, n_threads) : 0;
    return (heads * lines + all) * line + own + wrapped;
}

kvb_status metric_check_tokens(const metric *m, uint64_t n_tokens, kvb_error *err)
{
    uint32_t least = metric_least_tokens(m);
    if (n_tokens >= least) return KVB_OK;
    return kvb_fail(
        err, KVB_ARGUMENT,
        "metric %s: the context has %llu tokens, expected at least %u (its window, sinks or partitions); use "
        "a longer context, or another value of the parameter",
        m->spec, (unsigned long long)n_tokens, least);
}

uint32_t metric_protect_sink(const metric *m)
{
    if (m->protects) return m->sink;
    return m->base ? m->base->protect_sink : m->kind->protect_sink;
}

uint32_t metric_protect_window(const metric *m)
{
    if (m->protects) return m->window;
    uint32_t window = metric_window(m);
    return window ? window : m->base ? m->base->protect_window : m->kind->protect_window;
}

// ---- What a row says of a metric, as records and tables keep it ----

// Adds a choice as its name, or a number with the digits of the canonical text: cJSON would write fewer.
static void add_value(cJSON *to, const char *name, const spec_parameter *p, const metric *m)
{
    char text[SPEC_NUMBER_MAX];
    spec_value_text(text, sizeof text, p, metric_settings(m));
    (p->choices ? cJSON_AddStringToObject : cJSON_AddRawToObject)(to, name, text);
}

static void add_parameters(cJSON *to, const metric *m)
{
    for (const spec_parameter *p = m->kind->spec.parameters; p->name; p++) add_value(to, p->name, p, m);
}

cJSON *metric_to_json(const metric *m)
{
    metric base;
    cJSON *o = cJSON_CreateObject();
    add_parameters(o, m);
    if (metric_base(m, &base)) {
        cJSON_AddStringToObject(o, "wraps", base.spec);
        add_parameters(cJSON_AddObjectToObject(o, "parameters"), &base);
    }
    json_put(o, "protect_sink %u protect_window %u kin %s", metric_protect_sink(m), metric_protect_window(m),
             metric_kin(m));
    cJSON_AddItemToObject(o, "kvpress", metric_press(m));
    return o;
}

// Adds the value of the parameter at the argument's offset; a switch is a boolean, Python's True or False.
static void add_argument(cJSON *to, const metric *m, const press_argument *a)
{
    const spec_parameter *p = m->kind->spec.parameters;
    while (p->name && p->offset != a->offset) p++;
    if (p->name && p->type == SPEC_SWITCH) cJSON_AddBoolToObject(to, a->name, spec_value(p, metric_settings(m)) != 0);
    else if (p->name) add_value(to, a->name, p, m);
}

cJSON *metric_press(const metric *m)
{
    const char *warning = m->kind->press_warning;
    cJSON *o = cJSON_CreateObject();
    if (!m->kind->press || (m->kind->press_fits && !m->kind->press_fits(m, &warning))) return o;
    cJSON_AddStringToObject(o, "press", m->kind->press);
    cJSON *arguments = cJSON_AddObjectToObject(o, "arguments");
    for (const press_argument *a = m->kind->press_arguments; a->name; a++) add_argument(arguments, m, a);
    if (warning) cJSON_AddStringToObject(o, "warning", warning);
    return o;
}

// ---- What records and tables say ----

cJSON *metric_press_of(const char *name, const cJSON *parameters)
{
    metric m;
    const cJSON *said = cJSON_GetObjectItemCaseSensitive(parameters, "kvpress");
    if (cJSON_IsObject(said)) return cJSON_Duplicate(said, 1);
    return metric_parse(&m, name, NULL) == KVB_OK ? metric_press(&m) : cJSON_CreateObject();
}
