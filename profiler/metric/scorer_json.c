// What a scorer's row says of a metric, as records and tables keep it.
#include "profiler/metric/scorer.h"

// A choice as its name, a number with the digits of the canonical text: cJSON would write fewer.
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
    cJSON_AddNumberToObject(o, "protect_sink", metric_protect_sink(m));
    cJSON_AddNumberToObject(o, "protect_window", metric_protect_window(m));
    cJSON_AddNumberToObject(o, "cost", metric_cost(m));
    cJSON_AddStringToObject(o, "kin", metric_kin(m));
    cJSON_AddItemToObject(o, "kvpress", metric_press(m));
    return o;
}

// The value of the parameter at this offset: Python's True and False for a switch.
static void add_argument(cJSON *to, const metric *m, const press_argument *a)
{
    const spec_parameter *p = m->kind->spec.parameters;
    while (p->name && p->offset != a->offset) p++;
    if (p->name && p->type == SPEC_SWITCH) cJSON_AddBoolToObject(to, a->name, spec_value(p, metric_settings(m)) != 0);
    else if (p->name) add_value(to, a->name, p, m);
}

cJSON *metric_press(const metric *m)
{
    const char *warning = NULL;
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
