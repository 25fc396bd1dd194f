// What a scorer's row says of a metric, as records and tables keep it.
#include "profiler/metric/scorer.h"

// A choice as its name, a number with the digits of the canonical text: cJSON would write fewer.
static bool add_value(cJSON *to, const char *name, const spec_parameter *p, const scorer_settings *set)
{
    char text[SPEC_NUMBER_MAX];
    spec_value_text(text, sizeof text, p, set);
    return (p->choices ? cJSON_AddStringToObject : cJSON_AddRawToObject)(to, name, text) != NULL;
}

static bool add_parameters(cJSON *to, const metric *m)
{
    bool ok = true;
    for (const spec_parameter *p = m->kind->spec.parameters; ok && p->name; p++)
        ok = add_value(to, p->name, p, &m->set);
    return ok;
}

cJSON *metric_to_json(const metric *m)
{
    metric base;
    cJSON *o = cJSON_CreateObject(), *press = metric_press(m);
    bool ok = o && press && add_parameters(o, m);
    if (ok && metric_base(m, &base)) {
        ok = cJSON_AddStringToObject(o, "wraps", base.spec) != NULL;
        cJSON *inner = cJSON_AddObjectToObject(o, "parameters");
        ok = ok && inner && add_parameters(inner, &base);
    }
    ok = ok && cJSON_AddNumberToObject(o, "protect_sink", metric_protect_sink(m)) &&
         cJSON_AddNumberToObject(o, "protect_window", metric_protect_window(m));
    if (ok && cJSON_AddItemToObject(o, "kvpress", press)) return o;
    cJSON_Delete(press);
    cJSON_Delete(o);
    return NULL;
}

// The value of the parameter at this offset: Python's True and False for a switch.
static bool add_argument(cJSON *to, const metric *m, const press_argument *a)
{
    const spec_parameter *p = m->kind->spec.parameters;
    while (p->name && p->offset != a->offset) p++;
    if (!p->name) return false;
    if (p->type == SPEC_SWITCH) return cJSON_AddBoolToObject(to, a->name, spec_value(p, &m->set) != 0) != NULL;
    return add_value(to, a->name, p, &m->set);
}

cJSON *metric_press(const metric *m)
{
    const char *warning = NULL;
    cJSON *o = cJSON_CreateObject();
    if (!o || !m->kind->press || (m->kind->press_fits && !m->kind->press_fits(m, &warning))) return o;
    cJSON *arguments =
        cJSON_AddStringToObject(o, "press", m->kind->press) ? cJSON_AddObjectToObject(o, "arguments") : NULL;
    bool ok = arguments != NULL;
    for (const press_argument *a = m->kind->press_arguments; ok && a->name; a++) ok = add_argument(arguments, m, a);
    if (ok && (!warning || cJSON_AddStringToObject(o, "warning", warning))) return o;
    cJSON_Delete(o);
    return NULL;
}

// ---- What records and tables say ----

cJSON *metric_press_of(const char *name, const cJSON *parameters)
{
    metric m;
    const cJSON *said = cJSON_GetObjectItemCaseSensitive(parameters, "kvpress");
    if (cJSON_IsObject(said)) return cJSON_Duplicate(said, 1);
    kvb_status status = metric_parse(&m, name, NULL);
    if (status == KVB_MEMORY) return NULL;
    return status == KVB_OK ? metric_press(&m) : cJSON_CreateObject();
}
