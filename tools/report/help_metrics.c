// kvbudget help metrics: what every eviction metric computes, needs and protects, from the scorers' own tables.
#include "formats/json_file.h"
#include "profiler/metric/scorer.h"
#include "tools/cli.h"
#include "tools/json_print.h"
#include <stdio.h>
#include <string.h>

static const char INTRODUCTION[] =
    "An eviction metric gives every cached token of a KV head a score; the engine keeps the tokens with the highest\n"
    "ones. A budget table is made for one metric: profile and solve with the one that your engine evicts by.\n"
    "\n"
    "A metric is written  name[:variant][:parameter=value]...  as in  snapkv:kvpress:window=32  or  "
    "keydiff:anchor=raw;\n"
    "parameters that are not given have their defaults. A bare name means the plain form, or :kvpress if there is\n"
    "none. CriticalKV wraps another metric, after a plus sign: critical:share=0+snapkv:kvpress. Quote it in a shell.\n"
    "learned=RANK.safetensors is a ranking that `kvbudget learn` has fitted to such metrics, per KV head.\n"
    "\n"
    "Symbols: T tokens; query head h belongs to the group of KV head g; A[h,i,j] softmax attention of query i on key "
    "j;\n"
    "k_j keys after RoPE, v_j values, as cached; W_O^(h) the part of the output projection that reads head h.\n"
    "Protected: this many first tokens (sinks) and last tokens (window) are kept whatever their score, unless\n"
    "`kvbudget solve --sink N --window N` says otherwise.\n";

static const char FOOTER[] = "\n"
                             "All profiled metrics can be recorded in one pass: kvbudget profile ... --metric A "
                             "--metric B; it prints the seconds\n"
                             "of each. Column sums and output norms are computed once for all that need them.\n";

static void print_needs(const scorer *s)
{
    static const struct {
        view_item item;
        const char *name;
    } items[] = {
        {VIEW_Q_RAW, "queries before RoPE"},
        {VIEW_Q, "queries"},
        {VIEW_K, "keys"},
        {VIEW_V, "values"},
        {VIEW_COLUMN_SUMS, "column sums of the attention of all queries (as much work as the attention itself)"},
        {VIEW_OUTPUT_NORMS, "norms of v_j W_O^(h) (T H d D products)"}};
    const char *separator = "";
    printf("    needs      ");
    for (size_t i = 0; i < sizeof items / sizeof *items; i++)
        if (s->needs & items[i].item) {
            printf("%s%s", separator, items[i].name);
            separator = ", ";
        }
    printf("%s%s\n", s->needs ? "" : "nothing", s->wraps ? ", and what the wrapped metric needs" : "");
}

static void print_parameter(const spec_parameter *p)
{
    if (p->choices)
        printf("    %-16s %-8.*s %s: %s\n", p->name, (int)strcspn(p->choices, "|"), p->choices, p->choices, p->meaning);
    else printf("    %-16s %-8g %g to %g: %s\n", p->name, p->value, p->low, p->high, p->meaning);
}

// Prints a text behind its label, with each further line indented as the first one is.
static void print_indented(const char *label, const char *text)
{
    printf("    %-10s ", label);
    for (; *text; text++) {
        putchar(*text);
        if (*text == '\n') printf("    %-10s ", "");
    }
    putchar('\n');
}

static void print_scorer(const scorer *s)
{
    char name[METRIC_MAX];
    metric defaults = {.kind = s};
    spec_set_defaults(&s->spec, &defaults.set);
    spec_name(name, sizeof name, &s->spec);
    printf("\n%s%s\n", name, s->spec.behind ? s->spec.behind : "");
    print_indented("", s->summary);
    print_indented("score", s->formula);
    print_indented("source", s->source);
    print_needs(s);
    if (s->wraps) print_indented("protected", "as the wrapped metric");
    else if (metric_window(&defaults)) printf("    %-10s %u sinks, the window\n", "protected", s->protect_sink);
    else printf("    %-10s %u sinks, the last %u\n", "protected", s->protect_sink, s->protect_window);
    if (s->why_not_nested) print_indented("profile", "no, its order of tokens depends on the budget:");
    if (s->why_not_nested) print_indented("", s->why_not_nested);
    for (int i = 0; s->spec.parameters[i].name; i++) print_parameter(&s->spec.parameters[i]);
}

// Adds a parameter's default and choices, and its name to the list `real` if it need not be a whole number.
static void add_parameter(cJSON *values, cJSON *choices, cJSON *real, const spec_parameter *p, const metric *m)
{
    char text[SPEC_NUMBER_MAX];
    spec_value_text(text, sizeof text, p, metric_settings(m));
    (p->choices ? cJSON_AddStringToObject : cJSON_AddRawToObject)(values, p->name, text);
    if (p->choices) cJSON_AddStringToObject(choices, p->name, p->choices);
    if (p->type == SPEC_DOUBLE) cJSON_AddItemToArray(real, cJSON_CreateString(p->name));
}

static void add_scorer(cJSON *all, const scorer *s)
{
    char name[METRIC_MAX];
    metric m = {.kind = s};
    cJSON *o = cJSON_CreateObject(), *values = cJSON_AddObjectToObject(o, "parameters"),
          *choices = cJSON_AddObjectToObject(o, "choices"), *real = cJSON_AddArrayToObject(o, "real"),
          *arguments = cJSON_AddObjectToObject(o, "press_arguments");
    spec_set_defaults(&s->spec, &m.set);
    spec_name(name, sizeof name, &s->spec);
    for (const spec_parameter *p = s->spec.parameters; p->name; p++) {
        add_parameter(values, choices, real, p, &m);
        for (const press_argument *a = s->press_arguments; a->name; a++)
            if (a->offset == p->offset) cJSON_AddStringToObject(arguments, a->name, p->name);
    }
    json_put(o, "press %s protect_sink %u protect_window %u window_protected %d constant %g", s->press ? s->press : "",
             s->protect_sink, s->protect_window, metric_window(&m) > 0, s->constant);
    cJSON_AddItemToObject(all, name, o);
}

void print_metrics_json(void)
{
    cJSON *all = cJSON_CreateObject();
    for (size_t i = 0; i < scorer_count; i++)
        if (!scorer_list[i]->wraps && !scorer_list[i]->spec.behind) add_scorer(all, scorer_list[i]);
    json_print(all);
    cJSON_Delete(all);
}

void print_metrics_help(void)
{
    printf("%s", INTRODUCTION);
    for (size_t i = 0; i < scorer_count; i++) print_scorer(scorer_list[i]);
    printf("%s", FOOTER);
}
