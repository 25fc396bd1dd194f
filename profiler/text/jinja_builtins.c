// Filters, tests and functions of Jinja, as far as templates use them on one message without tools.
#include "profiler/text/jinja_parts.h"
#include <string.h>

// ---- Filters ----

static const jinja_value *argument(const jinja_arguments *args, size_t i, const char *name)
{
    const jinja_value *v = jinja_dict_get(args->named, name);
    return v ? v : i < args->n ? args->given[i] : NULL;
}

static const jinja_value *trim(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    if (args->n || args->named->size) jinja_fail(j, "trim of other letters than spaces");
    return jinja_strip(j, jinja_as_string(j, v), NULL, true, true);
}

static const jinja_value *length(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    (void)args;
    bool counted = v->kind == VALUE_STRING || v->kind == VALUE_LIST || v->kind == VALUE_DICT;
    if (!counted && v->kind != VALUE_UNDEFINED) jinja_fail(j, "the length of %s", jinja_kind_name(v));
    return jinja_integer(j, (int64_t)jinja_as_list(j, v)->size);
}

static const jinja_value *default_to(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    const jinja_value *other = argument(args, 0, "default_value"), *falsy = argument(args, 1, "boolean");
    bool replaced = v->kind == VALUE_UNDEFINED || (falsy && jinja_truth(falsy) && !jinja_truth(v));
    return !replaced ? v : other ? other : jinja_string(j, "", 0);
}

static const jinja_value *join(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    const jinja_value *list = jinja_as_list(j, v), *between = argument(args, 0, "d");
    jinja_text text = {0};
    if (argument(args, 1, "attribute")) jinja_fail(j, "join of an attribute");
    for (size_t i = 0; i < list->size && jinja_ok(j); i++) {
        const jinja_value *one = jinja_as_string(j, list->items[i]);
        if (i && between) jinja_append(j, &text, between->text, between->kind == VALUE_STRING ? between->size : 0);
        jinja_append(j, &text, one->text, one->size);
    }
    return jinja_string(j, text.data, text.size);
}

static const jinja_value *first(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    (void)args;
    const jinja_value *list = jinja_as_list(j, v);
    return list->size ? list->items[0] : jinja_undefined(j, "the first of nothing");
}

static const jinja_value *last(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    (void)args;
    const jinja_value *list = jinja_as_list(j, v);
    return list->size ? list->items[list->size - 1] : jinja_undefined(j, "the last of nothing");
}

static const jinja_value *to_list(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    (void)args;
    return jinja_as_list(j, v);
}

static const jinja_value *to_string(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    (void)args;
    return jinja_as_string(j, v);
}

static const jinja_value *reverse(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    (void)args;
    if (v->kind != VALUE_LIST) jinja_fail(j, "reverse of %s", jinja_kind_name(v));
    jinja_value *list = jinja_new(j, VALUE_LIST);
    for (size_t i = v->size; i-- > 0 && jinja_ok(j);) jinja_list_add(j, list, v->items[i]);
    return list;
}

// Filters that are a text's method as well.
static const jinja_value *as_method(jinja *j, const char *name, const jinja_value *v, const jinja_arguments *args)
{
    const jinja_value *text = jinja_as_string(j, v);
    return jinja_ok(j) ? jinja_method(j, text, name, args) : text;
}

// map(attribute=...), or map(filter).
static const jinja_value *map(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    const jinja_value *list = jinja_as_list(j, v), *name = jinja_dict_get(args->named, "attribute");
    const jinja_value *by = name ? name : args->n == 1 ? args->given[0] : NULL;
    jinja_arguments none = {.named = jinja_new(j, VALUE_DICT)};
    jinja_value *found = jinja_new(j, VALUE_LIST);
    if (!by || by->kind != VALUE_STRING || args->named->size != (name != NULL)) jinja_fail(j, "map of other forms");
    for (size_t i = 0; i < list->size && jinja_ok(j); i++)
        jinja_list_add(j, found,
                       name ? jinja_attribute(j, list->items[i], by->text)
                            : jinja_filter(j, by->text, list->items[i], &none));
    return found;
}

// select, reject, selectattr and rejectattr: the items that pass a test, or do not.
static const jinja_value *choose(jinja *j, const char *name, const jinja_value *v, const jinja_arguments *args)
{
    bool keep = *name == 's', attribute = strstr(name, "attr") != NULL;
    const jinja_value *list = jinja_as_list(j, v), *of = attribute && args->n ? args->given[0] : NULL;
    size_t at = attribute; // of the test's name
    const jinja_value *how = args->n > at ? args->given[at] : NULL,
                      *with = args->n > at + 1 ? args->given[at + 1] : NULL;
    if ((attribute && (!of || of->kind != VALUE_STRING)) || (how && how->kind != VALUE_STRING) || args->n > at + 2)
        jinja_fail(j, "%s of other forms", name);
    jinja_value *found = jinja_new(j, VALUE_LIST);
    for (size_t i = 0; i < list->size && jinja_ok(j); i++) {
        const jinja_value *one = of ? jinja_attribute(j, list->items[i], of->text) : list->items[i];
        bool yes = how ? jinja_test(j, how->text, one, with) : jinja_truth(one);
        if (yes == keep) jinja_list_add(j, found, list->items[i]);
    }
    return found;
}

static const jinja_value *unchanged(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    (void)j;
    (void)args;
    return v;
}

const jinja_value *jinja_filter(jinja *j, const char *name, const jinja_value *v, const jinja_arguments *args)
{
    static const struct {
        const char *name;
        const jinja_value *(*apply)(jinja *, const jinja_value *, const jinja_arguments *);
    } filters[] = {{"trim", trim},      {"length", length}, {"count", length},     {"default", default_to},
                   {"d", default_to},   {"join", join},     {"first", first},      {"last", last},
                   {"list", to_list},   {"map", map},       {"string", to_string}, {"safe", unchanged},
                   {"reverse", reverse}};
    static const char *const methods[] = {"upper", "lower", "title", "capitalize", "replace"};
    static const char *const choices[] = {"select", "reject", "selectattr", "rejectattr"};
    for (size_t i = 0; i < sizeof filters / sizeof *filters; i++)
        if (strcmp(name, filters[i].name) == 0) return filters[i].apply(j, v, args);
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        if (strcmp(name, methods[i]) == 0) return as_method(j, name, v, args);
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++)
        if (strcmp(name, choices[i]) == 0) return choose(j, name, v, args);
    jinja_fail(j, "filter %s, which is not read here", name);
    return v;
}

// ---- Tests ----

// Tests of what a value is, by the kinds that pass.
static bool test_kind(const char *name, const jinja_value *v, bool *found)
{
    enum { TEXT = 1 << VALUE_STRING, LIST = 1 << VALUE_LIST, DICT = 1 << VALUE_DICT, BOOL = 1 << VALUE_BOOL };
    enum { INTEGER = 1 << VALUE_INTEGER, CALLED = 1 << VALUE_FUNCTION | 1 << VALUE_MACRO };
    static const struct {
        const char *name;
        int kinds;
    } tests[] = {{"undefined", 1 << VALUE_UNDEFINED},
                 {"none", 1 << VALUE_NONE},
                 {"string", TEXT},
                 {"mapping", DICT},
                 {"boolean", BOOL},
                 {"integer", INTEGER},
                 {"number", INTEGER | BOOL},
                 {"callable", CALLED},
                 {"iterable", TEXT | LIST | DICT | 1 << VALUE_UNDEFINED},
                 {"sequence", TEXT | LIST | DICT | 1 << VALUE_UNDEFINED}};
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        if (strcmp(name, tests[i].name) == 0) {
            *found = true;
            return tests[i].kinds >> v->kind & 1;
        }
    *found = strcmp(name, "defined") == 0;
    return v->kind != VALUE_UNDEFINED;
}

static bool is_one_of(const char *name, const char *const *names)
{
    for (; *names; names++)
        if (strcmp(name, *names) == 0) return true;
    return false;
}

bool jinja_test(jinja *j, const char *name, const jinja_value *v, const jinja_value *argument)
{
    static const char *const equal[] = {"equalto", "eq", "==", NULL}, *const unequal[] = {"ne", "!=", NULL};
    bool found, yes = test_kind(name, v, &found);
    if (found) return yes;
    if (strcmp(name, "true") == 0) return v->kind == VALUE_BOOL && v->number;
    if (strcmp(name, "false") == 0) return v->kind == VALUE_BOOL && !v->number;
    if (v->kind == VALUE_INTEGER && strcmp(name, "odd") == 0) return v->number % 2 != 0;
    if (v->kind == VALUE_INTEGER && strcmp(name, "even") == 0) return v->number % 2 == 0;
    if (argument && is_one_of(name, equal)) return jinja_equal(j, v, argument);
    if (argument && is_one_of(name, unequal)) return !jinja_equal(j, v, argument);
    if (argument && strcmp(name, "in") == 0) return jinja_contains(j, argument, v);
    jinja_fail(j, "test %s of %s, which is not read here", name, jinja_kind_name(v));
    return false;
}

// ---- Functions ----

static const jinja_value *range(jinja *j, const jinja_arguments *args)
{
    enum { MOST = 100000 }; // as Jinja2's sandbox
    int64_t numbers[3] = {0, 0, 1};
    for (size_t i = 0; i < args->n && i < 3; i++) {
        if (args->given[i]->kind != VALUE_INTEGER) jinja_fail(j, "range of %s", jinja_kind_name(args->given[i]));
        numbers[i] = args->given[i]->number;
    }
    if (args->n == 1) numbers[1] = numbers[0], numbers[0] = 0;
    if (args->n < 1 || args->n > 3 || numbers[2] != 1 || numbers[1] - numbers[0] > MOST)
        jinja_fail(j, "range of other forms, or of more than %d numbers", MOST);
    jinja_value *list = jinja_new(j, VALUE_LIST);
    for (int64_t i = numbers[0]; i < numbers[1] && jinja_ok(j); i++) jinja_list_add(j, list, jinja_integer(j, i));
    return list;
}

// Friday, 26 July 2024, in the letters of strftime; hours are not known.
static const jinja_value *today(jinja *j, const jinja_arguments *args)
{
    static const struct {
        const char *code, *text;
    } parts[] = {{"%Y", "2024"}, {"%y", "24"},     {"%m", "07"},   {"%-m", "7"},  {"%d", "26"},
                 {"%-d", "26"},  {"%e", "26"},     {"%B", "July"}, {"%b", "Jul"}, {"%a", "Fri"},
                 {"%j", "208"},  {"%A", "Friday"}, {"%%", "%"}};
    const jinja_value *form = args->n ? args->given[0] : &jinja_none;
    jinja_text text = {0};
    if (form->kind != VALUE_STRING) jinja_fail(j, "strftime_now of %s", jinja_kind_name(form));
    for (const char *p = form->text; jinja_ok(j) && *p;) {
        size_t i = 0, n = sizeof parts / sizeof *parts;
        while (i < n && strncmp(p, parts[i].code, strlen(parts[i].code)) != 0) i++;
        if (i == n && *p == '%') jinja_fail(j, "strftime_now of \"%.4s\", which is no part of a day", p);
        jinja_append(j, &text, i < n ? parts[i].text : p, i < n ? strlen(parts[i].text) : 1);
        p += i < n ? strlen(parts[i].code) : 1;
    }
    return jinja_string(j, text.data, text.size);
}

const jinja_value *jinja_function(jinja *j, const char *name, const jinja_arguments *args)
{
    if (strcmp(name, "namespace") == 0 || strcmp(name, "dict") == 0) {
        if (args->n) jinja_fail(j, "%s of an argument without name", name);
        if (*name == 'd') return args->named;
        jinja_value *made = jinja_new(j, VALUE_NAMESPACE);
        made->fields = args->named; // made for this call
        return made;
    }
    if (strcmp(name, "range") == 0) return range(j, args);
    if (strcmp(name, "strftime_now") == 0) return today(j, args);
    const jinja_value *why = args->n ? args->given[0] : &jinja_none; // raise_exception
    jinja_fail(j, "it refuses one message of a user: \"%.200s\"", why->kind == VALUE_STRING ? why->text : "");
    return why;
}
