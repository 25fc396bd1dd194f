// Runs a template: values, methods, tests, filters, functions, expressions and statements, in that order. All values
// lie in one arena that is freed at the end. A failure ends the run (jinja_fail), so no function returns one.
#include "profiler/text/jinja.h"
#include "formats/need.h"
#include "profiler/text/utf8.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The longest templates that are published need less than a hundredth of these.
#define MAX_KEYS 1000
#define MAX_KEY_BYTES 1000

enum { ITEM_BYTES = STEP_BYTES, KEY_BYTES = 16 }; // what an item of a list, and a key of a dict, cost

typedef struct scope {
    jinja_value *names; // a dict
    struct scope *outer;
} scope;

typedef struct jinja_arguments {
    const jinja_value *given[8]; // by position
    size_t n;
    jinja_value *named; // a dict
} jinja_arguments;

// ---- Making values ----

static const jinja_value *undefined(jinja *j, const char *name)
{
    jinja_value *v = jinja_new(j, VALUE_UNDEFINED);
    v->missing_name = name;
    return v;
}

// Makes room for one more item.
static void grow(jinja *j, jinja_value *v)
{
    if (v->size < v->room) return;
    size_t room = 2 * v->room + 4;
    const jinja_value **items = jinja_alloc(j, room * sizeof *items);
    const char **keys = jinja_alloc(j, room * sizeof *keys);
    if (v->size) memcpy(items, v->items, v->size * sizeof *items);
    if (v->size && v->keys) memcpy(keys, v->keys, v->size * sizeof *keys);
    v->items = items;
    v->keys = keys;
    v->room = room;
}

static void list_add(jinja *j, jinja_value *list, const jinja_value *item)
{
    grow(j, list);
    list->items[list->size++] = item;
}

// Returns the place of the key's value in the dict, or NULL if the dict does not have the key.
static const jinja_value **find_key(jinja *j, const jinja_value *dict, const char *key)
{
    jinja_spend(j, KEY_BYTES * dict->size);
    for (size_t i = 0; i < dict->size; i++)
        if (strcmp(dict->keys[i], key) == 0) return &dict->items[i];
    return NULL;
}

static void dict_set(jinja *j, jinja_value *dict, const char *key, const jinja_value *value)
{
    const jinja_value **place = find_key(j, dict, key);
    if (place) {
        *place = value;
        return;
    }
    if (strlen(key) > MAX_KEY_BYTES) jinja_fail(j, "a dict key of more than %d bytes", MAX_KEY_BYTES);
    if (dict->size == MAX_KEYS) jinja_fail(j, "a dict of more than %d keys", MAX_KEYS);
    grow(j, dict);
    dict->keys[dict->size] = key;
    dict->items[dict->size++] = value;
}

// Returns the key's value, or NULL if there is none.
static const jinja_value *dict_get(jinja *j, const jinja_value *dict, const char *key)
{
    const jinja_value **place = find_key(j, dict, key);
    return place ? *place : NULL;
}

// ---- What values are ----

static const char *kind_name(const jinja_value *v)
{
    static const char *const names[] = {"undefined", "none",   "a boolean",   "a number",   "a text",
                                        "a list",    "a dict", "a namespace", "a function", "a macro"};
    return names[v->kind];
}

static bool is_true(const jinja_value *v)
{
    switch (v->kind) {
    case VALUE_UNDEFINED:
    case VALUE_NONE:
        return false;
    case VALUE_BOOL:
    case VALUE_INTEGER:
        return v->number != 0;
    case VALUE_STRING:
    case VALUE_LIST:
    case VALUE_DICT:
        return v->size != 0;
    default:
        return true;
    }
}

static bool is_number(const jinja_value *v)
{
    return v->kind == VALUE_BOOL || v->kind == VALUE_INTEGER;
}

static bool are_equal(jinja *j, const jinja_value *x, const jinja_value *y)
{
    jinja_spend(j, x->size + y->size);
    if (x == y) return true;
    if (is_number(x) && is_number(y)) return x->number == y->number;
    if (x->kind != y->kind) return false;
    if (x->kind == VALUE_UNDEFINED || x->kind == VALUE_NONE) return true;
    if (x->kind == VALUE_STRING) return x->size == y->size && memcmp(x->text, y->text, x->size) == 0;
    if ((x->kind != VALUE_LIST && x->kind != VALUE_DICT) || x->size != y->size) return false;
    bool same = true;
    jinja_enter(j);
    for (size_t i = 0; same && i < x->size; i++) {
        const jinja_value *other = x->kind == VALUE_LIST ? y->items[i] : dict_get(j, y, x->keys[i]);
        same = other && are_equal(j, x->items[i], other);
    }
    j->depth--;
    return same;
}

static const jinja_value *as_string(jinja *j, const jinja_value *v)
{
    char number[24];
    switch (v->kind) {
    case VALUE_STRING:
        return v;
    case VALUE_UNDEFINED:
        return jinja_string(j, "", 0);
    case VALUE_NONE:
        return jinja_string(j, "None", 4);
    case VALUE_BOOL:
        return v->number ? jinja_string(j, "True", 4) : jinja_string(j, "False", 5);
    case VALUE_INTEGER:
        return jinja_string(j, number, (size_t)snprintf(number, sizeof number, "%" PRId64, v->number));
    default:
        jinja_fail(j, "%s is written as text, which is not supported", kind_name(v));
    }
}

static const jinja_value *as_list(jinja *j, const jinja_value *v)
{
    if (v->kind == VALUE_LIST) return v;
    jinja_value *list = jinja_new(j, VALUE_LIST);
    if (v->kind == VALUE_DICT && v->number) jinja_fail(j, "the keys of a dict that has keys other than texts");
    if (v->kind == VALUE_DICT) {
        for (size_t i = 0; i < v->size; i++) list_add(j, list, jinja_string(j, v->keys[i], strlen(v->keys[i])));
    } else if (v->kind == VALUE_STRING) {
        for (size_t i = 0, n; i < v->size; i += n) {
            for (n = 1; i + n < v->size && ((unsigned char)v->text[i + n] & 0xC0) == 0x80;) n++;
            list_add(j, list, jinja_string(j, v->text + i, n));
        }
    } else if (v->kind != VALUE_UNDEFINED) {
        jinja_fail(j, "expected a list, found %s", kind_name(v));
    }
    return list;
}

static bool contains(jinja *j, const jinja_value *container, const jinja_value *v)
{
    jinja_spend(j, container->size + v->size);
    if (container->kind == VALUE_STRING && v->kind == VALUE_STRING)
        return memmem(container->text, container->size, v->text, v->size) != NULL;
    if (container->kind == VALUE_DICT && v->kind == VALUE_STRING) return dict_get(j, container, v->text) != NULL;
    if (container->kind == VALUE_LIST)
        for (size_t i = 0; i < container->size; i++)
            if (are_equal(j, container->items[i], v)) return true;
    if (container->kind != VALUE_LIST && container->kind != VALUE_DICT && container->kind != VALUE_UNDEFINED)
        jinja_fail(j, "'in' of %s and %s", kind_name(v), kind_name(container));
    return false;
}

static const jinja_value *evaluate(jinja *j, const jinja_node *n);
static void run_statements(jinja *j, const jinja_node *statements);

// ---- Methods of texts and dicts: those of Python that templates call ----
//
// Texts are UTF-8; methods that change letters take ASCII only.

static const char *const text_methods[] = {"strip",      "lstrip", "rstrip", "split", "startswith", "endswith",
                                           "replace",    "upper",  "lower",  "title", "capitalize", "join",
                                           "splitlines", "format", "find",   "count", "index",      NULL};
static const char *const dict_methods[] = {"items", "keys", "values", "get", "pop", "update", "copy", NULL};

static bool is_method(const jinja_value *of, const char *name)
{
    const char *const *names = of->kind == VALUE_STRING ? text_methods : of->kind == VALUE_DICT ? dict_methods : NULL;
    for (; names && *names; names++)
        if (strcmp(*names, name) == 0) return true;
    return of->kind == VALUE_LIST && strcmp(name, "append") == 0;
}

// Returns argument i, which must be a text; `otherwise`, unless NULL, if there is none.
static const jinja_value *text_argument(jinja *j, const jinja_arguments *args, size_t i, const jinja_value *otherwise)
{
    const jinja_value *v = args->n > i ? args->given[i] : otherwise;
    if (v && v->kind == VALUE_STRING) return v;
    if (v || !otherwise) jinja_fail(j, "expected a text as the argument, found %s", v ? kind_name(v) : "none");
    return jinja_string(j, "", 0);
}

static const jinja_value *strip_ends(jinja *j, const jinja_value *v, const char *set, bool left, bool right)
{
    size_t begin = 0, end = v->size;
    jinja_spend(j, v->size);
    if (!set && left) begin = utf8_spaces_before(v->text, v->size);
    if (!set && right) end -= utf8_spaces_behind(v->text + begin, end - begin);
    while (set && left && begin < end && strchr(set, v->text[begin])) begin++;
    while (set && right && end > begin && strchr(set, v->text[end - 1])) end--;
    return jinja_string(j, v->text + begin, end - begin);
}

static const jinja_value *text_strip(jinja *j, const jinja_value *v, const char *name, const jinja_arguments *args)
{
    const char *set = args->n ? text_argument(j, args, 0, NULL)->text : NULL;
    for (const char *p = set; p && *p; p++)
        if (*p & 0x80) jinja_fail(j, "%s of letters that are not ASCII", name);
    return strip_ends(j, v, set, name[0] != 'r', name[0] != 'l');
}

// Splits at every `by`, at most `most` times (-1: no limit).
static const jinja_value *text_split(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    const jinja_value *by = text_argument(j, args, 0, NULL);
    int64_t most = args->n > 1 && args->given[1]->kind == VALUE_INTEGER ? args->given[1]->number : -1;
    jinja_value *list = jinja_new(j, VALUE_LIST);
    const char *p = v->text;
    jinja_spend(j, v->size + by->size);
    if (!by->size) jinja_fail(j, "split by an empty text");
    for (const char *at; most != 0 && (at = strstr(p, by->text)); most--) {
        list_add(j, list, jinja_string(j, p, (size_t)(at - p)));
        p = at + by->size;
    }
    list_add(j, list, jinja_string(j, p, strlen(p)));
    return list;
}

static const jinja_value *text_replace(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    const jinja_value *old = text_argument(j, args, 0, NULL), *with = text_argument(j, args, 1, NULL);
    if (!old->size || args->n > 2) jinja_fail(j, "replace of an empty text, or with a count");
    jinja_text text = {0};
    const char *p = v->text;
    jinja_spend(j, v->size + old->size);
    for (const char *at; (at = strstr(p, old->text)); p = at + old->size) {
        jinja_append(j, &text, p, (size_t)(at - p));
        jinja_append(j, &text, with->text, with->size);
    }
    jinja_append(j, &text, p, strlen(p));
    return jinja_string(j, text.data, text.size);
}

// Whether v starts (or ends) with a text, or with any text of a list.
static bool starts_or_ends(jinja *j, const jinja_value *v, const jinja_value *with, bool at_end)
{
    jinja_spend(j, ITEM_BYTES + with->size);
    if (with->kind == VALUE_LIST) {
        for (size_t i = 0; i < with->size; i++)
            if (with->items[i]->kind == VALUE_STRING && starts_or_ends(j, v, with->items[i], at_end)) return true;
        return false;
    }
    if (with->kind != VALUE_STRING) jinja_fail(j, "expected a text as the argument, found %s", kind_name(with));
    return with->size <= v->size && memcmp(v->text + (at_end ? v->size - with->size : 0), with->text, with->size) == 0;
}

// upper, lower, title or capitalize.
static const jinja_value *change_case(jinja *j, const jinja_value *v, const char *name)
{
    char *text = jinja_copy(j, v->text, v->size);
    bool word = false; // inside one
    for (size_t i = 0; i < v->size; i++) {
        char c = text[i];
        bool small = c >= 'a' && c <= 'z', large = c >= 'A' && c <= 'Z';
        bool up = *name == 'u' || (*name == 't' && !word) || (*name == 'c' && i == 0);
        if (c & 0x80) jinja_fail(j, "%s of letters that are not ASCII", name);
        if (small && up) text[i] = (char)(c - 'a' + 'A');
        if (large && !up) text[i] = (char)(c - 'A' + 'a');
        word = small || large;
    }
    return jinja_string(j, text, v->size);
}

static const jinja_value *text_method(jinja *j, const jinja_value *of, const char *name, const jinja_arguments *args)
{
    if (strcmp(name, "strip") == 0 || strcmp(name, "lstrip") == 0 || strcmp(name, "rstrip") == 0)
        return text_strip(j, of, name, args);
    if (strcmp(name, "split") == 0) return text_split(j, of, args);
    if (strcmp(name, "replace") == 0) return text_replace(j, of, args);
    bool at_end = strcmp(name, "endswith") == 0;
    if ((at_end || strcmp(name, "startswith") == 0) && args->n)
        return jinja_bool(starts_or_ends(j, of, args->given[0], at_end));
    if (strcmp(name, "upper") == 0 || strcmp(name, "lower") == 0 || strcmp(name, "title") == 0 ||
        strcmp(name, "capitalize") == 0)
        return change_case(j, of, name);
    jinja_fail(j, "a text's method %s, which is not supported", name);
}

// Returns the pairs of key and value, as lists.
static const jinja_value *dict_items(jinja *j, const jinja_value *of)
{
    jinja_value *list = jinja_new(j, VALUE_LIST);
    for (size_t i = 0; i < of->size; i++) {
        jinja_value *pair = jinja_new(j, VALUE_LIST);
        list_add(j, pair, jinja_string(j, of->keys[i], strlen(of->keys[i])));
        list_add(j, pair, of->items[i]);
        list_add(j, list, pair);
    }
    return list;
}

static const jinja_value *dict_method(jinja *j, const jinja_value *of, const char *name, const jinja_arguments *args)
{
    const jinja_value *keys = as_list(j, of);
    if (strcmp(name, "items") == 0) return dict_items(j, of);
    if (strcmp(name, "keys") == 0) return keys;
    if (strcmp(name, "get") == 0) {
        const jinja_value *found = dict_get(j, of, text_argument(j, args, 0, NULL)->text);
        return found ? found : args->n > 1 ? args->given[1] : &jinja_none;
    }
    if (strcmp(name, "values") == 0) {
        jinja_value *list = jinja_new(j, VALUE_LIST);
        for (size_t i = 0; i < of->size; i++) list_add(j, list, of->items[i]);
        return list;
    }
    jinja_fail(j, "a dict's method %s, which is not supported", name);
}

static const jinja_value *call_method(jinja *j, const jinja_value *of, const char *name, const jinja_arguments *args)
{
    if (args->named->size) jinja_fail(j, "%s with a named argument", name);
    if (of->kind == VALUE_STRING) return text_method(j, of, name, args);
    if (of->kind == VALUE_DICT) return dict_method(j, of, name, args);
    jinja_fail(j, "a list's method %s, which is not supported", name);
}

static const jinja_value *look_up(jinja *j, const char *name)
{
    // transformers knows these, we do not: undefined would be a guess.
    static const char *const unknown[] = {"unk_token", "pad_token",  "sep_token",
                                          "cls_token", "mask_token", "additional_special_tokens"};
    for (const scope *s = j->scope; s; s = s->outer) {
        const jinja_value *v = dict_get(j, s->names, name);
        if (v) return v;
    }
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        if (strcmp(name, unknown[i]) == 0) jinja_fail(j, "%s is not known", name);
    return undefined(j, name);
}

static const jinja_value *attribute_of(jinja *j, const jinja_value *of, const char *name)
{
    if (of->kind == VALUE_UNDEFINED) jinja_fail(j, "%s is undefined and has no %s", of->missing_name, name);
    if (of->kind == VALUE_DICT || of->kind == VALUE_NAMESPACE) {
        const jinja_value *found = dict_get(j, of->kind == VALUE_DICT ? of : of->fields, name);
        if (found && !is_method(of, name)) return found;
    }
    if (is_method(of, name)) jinja_fail(j, "a method that is not called: %s", name);
    return undefined(j, name);
}

// ---- Tests ----

// Tests that only look at a value's kind; *found receives whether `name` is one of them.
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

static bool passes_test(jinja *j, const char *name, const jinja_value *v, const jinja_value *argument)
{
    static const char *const equal[] = {"equalto", "eq", "==", NULL}, *const unequal[] = {"ne", "!=", NULL};
    bool found, yes = test_kind(name, v, &found);
    if (found) return yes;
    if (strcmp(name, "true") == 0) return v->kind == VALUE_BOOL && v->number;
    if (strcmp(name, "false") == 0) return v->kind == VALUE_BOOL && !v->number;
    if (v->kind == VALUE_INTEGER && strcmp(name, "odd") == 0) return v->number % 2 != 0;
    if (v->kind == VALUE_INTEGER && strcmp(name, "even") == 0) return v->number % 2 == 0;
    if (argument && is_one_of(name, equal)) return are_equal(j, v, argument);
    if (argument && is_one_of(name, unequal)) return !are_equal(j, v, argument);
    if (argument && strcmp(name, "in") == 0) return contains(j, argument, v);
    jinja_fail(j, "test %s of %s, which is not supported", name, kind_name(v));
}

// ---- Filters ----

static const jinja_value *apply_filter(jinja *j, const char *name, const jinja_value *v, const jinja_arguments *args);

static const jinja_value *named_argument(jinja *j, const jinja_arguments *args, size_t i, const char *name)
{
    const jinja_value *v = dict_get(j, args->named, name);
    return v ? v : i < args->n ? args->given[i] : NULL;
}

static const jinja_value *filter_length(jinja *j, const jinja_value *v)
{
    bool counted = v->kind == VALUE_STRING || v->kind == VALUE_LIST || v->kind == VALUE_DICT;
    if (!counted && v->kind != VALUE_UNDEFINED) jinja_fail(j, "the length of %s", kind_name(v));
    return jinja_integer(j, (int64_t)as_list(j, v)->size);
}

static const jinja_value *filter_default(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    const jinja_value *other = named_argument(j, args, 0, "default_value"),
                      *falsy = named_argument(j, args, 1, "boolean");
    bool replaced = v->kind == VALUE_UNDEFINED || (falsy && is_true(falsy) && !is_true(v));
    return !replaced ? v : other ? other : jinja_string(j, "", 0);
}

static const jinja_value *filter_join(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    const jinja_value *list = as_list(j, v), *between = named_argument(j, args, 0, "d");
    jinja_text text = {0};
    if (named_argument(j, args, 1, "attribute")) jinja_fail(j, "join of an attribute");
    jinja_spend(j, list->size);
    for (size_t i = 0; i < list->size; i++) {
        const jinja_value *one = as_string(j, list->items[i]);
        if (i && between) jinja_append(j, &text, between->text, between->kind == VALUE_STRING ? between->size : 0);
        jinja_append(j, &text, one->text, one->size);
    }
    return jinja_string(j, text.data, text.size);
}

// map(attribute=...), or map(filter).
static const jinja_value *filter_map(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    const jinja_value *list = as_list(j, v), *name = dict_get(j, args->named, "attribute");
    const jinja_value *by = name ? name : args->n == 1 ? args->given[0] : NULL;
    jinja_arguments none = {.named = jinja_new(j, VALUE_DICT)};
    jinja_value *found = jinja_new(j, VALUE_LIST);
    if (!by || by->kind != VALUE_STRING || args->named->size != (name != NULL))
        jinja_fail(j, "map with arguments that are not supported");
    for (size_t i = 0; i < list->size; i++)
        list_add(j, found,
                 name ? attribute_of(j, list->items[i], by->text) : apply_filter(j, by->text, list->items[i], &none));
    return found;
}

// select, reject, selectattr and rejectattr: the items that pass a test, or do not.
static const jinja_value *filter_choose(jinja *j, const char *name, const jinja_value *v, const jinja_arguments *args)
{
    bool keep = *name == 's', attribute = strstr(name, "attr") != NULL;
    const jinja_value *list = as_list(j, v), *of = attribute && args->n ? args->given[0] : NULL;
    size_t at = attribute; // index of the test's name
    const jinja_value *how = args->n > at ? args->given[at] : NULL,
                      *with = args->n > at + 1 ? args->given[at + 1] : NULL;
    if ((attribute && (!of || of->kind != VALUE_STRING)) || (how && how->kind != VALUE_STRING) || args->n > at + 2)
        jinja_fail(j, "%s with arguments that are not supported", name);
    jinja_value *found = jinja_new(j, VALUE_LIST);
    jinja_spend(j, ITEM_BYTES * list->size);
    for (size_t i = 0; i < list->size; i++) {
        const jinja_value *one = of ? attribute_of(j, list->items[i], of->text) : list->items[i];
        bool yes = how ? passes_test(j, how->text, one, with) : is_true(one);
        if (yes == keep) list_add(j, found, list->items[i]);
    }
    return found;
}

static const jinja_value *filter_ends(jinja *j, const jinja_value *v, bool last)
{
    const jinja_value *list = as_list(j, v);
    if (!list->size) return undefined(j, last ? "the last of nothing" : "the first of nothing");
    return list->items[last ? list->size - 1 : 0];
}

static const jinja_value *filter_reverse(jinja *j, const jinja_value *v)
{
    if (v->kind != VALUE_LIST) jinja_fail(j, "reverse of %s", kind_name(v));
    jinja_value *list = jinja_new(j, VALUE_LIST);
    for (size_t i = v->size; i-- > 0;) list_add(j, list, v->items[i]);
    return list;
}

static const jinja_value *apply_filter(jinja *j, const char *name, const jinja_value *v, const jinja_arguments *args)
{
    static const char *const methods[] = {"upper", "lower", "title", "capitalize", "replace", NULL};
    static const char *const choices[] = {"select", "reject", "selectattr", "rejectattr", NULL};
    if (strcmp(name, "safe") == 0) return v;
    if (strcmp(name, "string") == 0) return as_string(j, v);
    if (strcmp(name, "list") == 0) return as_list(j, v);
    if (strcmp(name, "length") == 0 || strcmp(name, "count") == 0) return filter_length(j, v);
    if (strcmp(name, "first") == 0 || strcmp(name, "last") == 0) return filter_ends(j, v, *name == 'l');
    if (strcmp(name, "reverse") == 0) return filter_reverse(j, v);
    if (strcmp(name, "default") == 0 || strcmp(name, "d") == 0) return filter_default(j, v, args);
    if (strcmp(name, "join") == 0) return filter_join(j, v, args);
    if (strcmp(name, "map") == 0) return filter_map(j, v, args);
    if (is_one_of(name, choices)) return filter_choose(j, name, v, args);
    if (is_one_of(name, methods)) return call_method(j, as_string(j, v), name, args); // of a text as well
    if (strcmp(name, "trim") != 0) jinja_fail(j, "filter %s, which is not supported", name);
    if (args->n || args->named->size) jinja_fail(j, "trim with arguments");
    return strip_ends(j, as_string(j, v), NULL, true, true);
}

// ---- Functions ----

static const jinja_value *make_range(jinja *j, const jinja_arguments *args)
{
    enum { MOST = 100000 }; // as in Jinja2's sandbox
    int64_t numbers[3] = {0, 0, 1};
    for (size_t i = 0; i < args->n && i < 3; i++) {
        if (args->given[i]->kind != VALUE_INTEGER) jinja_fail(j, "range of %s", kind_name(args->given[i]));
        numbers[i] = args->given[i]->number;
    }
    if (args->n == 1) numbers[1] = numbers[0], numbers[0] = 0;
    if (args->n < 1 || args->n > 3 || numbers[2] != 1 || numbers[1] - numbers[0] > MOST)
        jinja_fail(j, "range with more than three arguments, or of more than %d numbers", MOST);
    jinja_value *list = jinja_new(j, VALUE_LIST);
    for (int64_t i = numbers[0]; i < numbers[1]; i++) list_add(j, list, jinja_integer(j, i));
    return list;
}

// Writes Friday, 26 July 2024, as strftime does; the time of day is not supported.
static const jinja_value *today(jinja *j, const jinja_arguments *args)
{
    static const struct {
        const char *code, *text;
    } parts[] = {{"%Y", "2024"}, {"%y", "24"},     {"%m", "07"},   {"%-m", "7"},  {"%d", "26"},
                 {"%-d", "26"},  {"%e", "26"},     {"%B", "July"}, {"%b", "Jul"}, {"%a", "Fri"},
                 {"%j", "208"},  {"%A", "Friday"}, {"%%", "%"}};
    const jinja_value *form = args->n ? args->given[0] : &jinja_none;
    jinja_text text = {0};
    if (form->kind != VALUE_STRING) jinja_fail(j, "strftime_now of %s", kind_name(form));
    for (const char *p = form->text; *p;) {
        size_t i = 0, n = sizeof parts / sizeof *parts;
        while (i < n && strncmp(p, parts[i].code, strlen(parts[i].code)) != 0) i++;
        if (i == n && *p == '%')
            jinja_fail(j, "strftime_now of \"%.4s\", which is not a part of a date that is supported", p);
        jinja_append(j, &text, i < n ? parts[i].text : p, i < n ? strlen(parts[i].text) : 1);
        p += i < n ? strlen(parts[i].code) : 1;
    }
    return jinja_string(j, text.data, text.size);
}

static const jinja_value *call_function(jinja *j, const char *name, const jinja_arguments *args)
{
    if (strcmp(name, "namespace") == 0 || strcmp(name, "dict") == 0) {
        if (args->n) jinja_fail(j, "%s with an argument that has no name", name);
        if (*name == 'd') return args->named;
        jinja_value *made = jinja_new(j, VALUE_NAMESPACE);
        made->fields = args->named; // made for this call
        return made;
    }
    if (strcmp(name, "range") == 0) return make_range(j, args);
    if (strcmp(name, "strftime_now") == 0) return today(j, args);
    const jinja_value *why = args->n ? args->given[0] : &jinja_none; // raise_exception
    jinja_fail(j, "it refuses a single user message: \"%.200s\"", why->kind == VALUE_STRING ? why->text : "");
}

// ---- Expressions ----

static const jinja_value *call_macro(jinja *j, const jinja_value *macro, const jinja_arguments *args);

static const jinja_value *eval_item(jinja *j, const jinja_value *of, const jinja_value *key)
{
    if (key->kind == VALUE_STRING) return attribute_of(j, of, key->text);
    if (key->kind == VALUE_INTEGER && (of->kind == VALUE_LIST || of->kind == VALUE_STRING)) {
        const jinja_value *list = as_list(j, of);
        int64_t i = key->number < 0 ? key->number + (int64_t)list->size : key->number;
        return i >= 0 && i < (int64_t)list->size ? list->items[i] : undefined(j, "an item");
    }
    jinja_fail(j, "item %s of %s", kind_name(key), kind_name(of));
}

// Returns a bound of a slice as Python does: counted from the end if negative, and cut to the list's bounds.
static int64_t slice_bound(jinja *j, const jinja_node *n, int64_t left_out, int64_t size, int64_t step)
{
    if (!n) return left_out;
    const jinja_value *v = evaluate(j, n);
    if (v->kind == VALUE_NONE) return left_out;
    if (v->kind != VALUE_INTEGER) jinja_fail(j, "a slice's bound is %s", kind_name(v));
    int64_t i = v->number < 0 ? v->number + size : v->number, least = step < 0 ? -1 : 0;
    int64_t most = step < 0 ? size - 1 : size;
    return i < least ? least : i > most ? most : i;
}

static const jinja_value *eval_slice(jinja *j, const jinja_node *n)
{
    const jinja_value *of = evaluate(j, n->a), *list = as_list(j, of);
    const jinja_value *by = n->d ? evaluate(j, n->d) : NULL;
    if (by && (by->kind != VALUE_INTEGER || by->number == 0)) jinja_fail(j, "a slice's step is not a number");
    if (of->kind != VALUE_LIST && of->kind != VALUE_STRING) jinja_fail(j, "a slice of %s", kind_name(of));
    int64_t size = (int64_t)list->size, step = by ? by->number : 1;
    int64_t begin = slice_bound(j, n->b, step < 0 ? size - 1 : 0, size, step);
    int64_t end = slice_bound(j, n->c, step < 0 ? -1 : size, size, step);
    jinja_value *found = jinja_new(j, VALUE_LIST);
    for (int64_t i = begin; (step < 0 ? i > end : i < end); i += step) list_add(j, found, list->items[i]);
    if (of->kind == VALUE_LIST) return found;
    jinja_text text = {0};
    for (size_t i = 0; i < found->size; i++) jinja_append(j, &text, found->items[i]->text, found->items[i]->size);
    return jinja_string(j, text.data, text.size);
}

// ---- Operators ----

static const jinja_value *join_texts(jinja *j, const jinja_value *x, const jinja_value *y)
{
    jinja_text text = {0};
    jinja_append(j, &text, x->text, x->size);
    jinja_append(j, &text, y->text, y->size);
    return jinja_string(j, text.data, text.size);
}

// Computes with whole numbers as Python does: a remainder has the divisor's sign.
static const jinja_value *arithmetic(jinja *j, const char *sign, const jinja_value *x, const jinja_value *y)
{
    static const int64_t largest = (int64_t)1 << 31;
    bool numbers = x->kind == VALUE_INTEGER && y->kind == VALUE_INTEGER;
    bool small = numbers && x->number < largest && x->number > -largest && y->number < largest && y->number > -largest;
    bool divides = *sign == '/' || *sign == '%';
    if (!small || strcmp(sign, "/") == 0 || strcmp(sign, "**") == 0 || (divides && y->number == 0))
        jinja_fail(j, "%s %s %s, which is not supported", kind_name(x), sign, kind_name(y));
    if (*sign == '+') return jinja_integer(j, x->number + y->number);
    if (*sign == '-') return jinja_integer(j, x->number - y->number);
    if (*sign == '*') return jinja_integer(j, x->number * y->number);
    int64_t rest = x->number % y->number;
    if (rest && (rest < 0) != (y->number < 0)) rest += y->number;
    return jinja_integer(j, *sign == '%' ? rest : (x->number - rest) / y->number);
}

static const jinja_value *add_values(jinja *j, const jinja_value *x, const jinja_value *y)
{
    if (x->kind == VALUE_STRING && y->kind == VALUE_STRING) return join_texts(j, x, y);
    if (x->kind != VALUE_LIST || y->kind != VALUE_LIST) return arithmetic(j, "+", x, y);
    jinja_value *list = jinja_new(j, VALUE_LIST);
    for (size_t i = 0; i < x->size; i++) list_add(j, list, x->items[i]);
    for (size_t i = 0; i < y->size; i++) list_add(j, list, y->items[i]);
    return list;
}

static const jinja_value *compare_order(jinja *j, const char *sign, const jinja_value *x, const jinja_value *y)
{
    bool numbers =
        (x->kind == VALUE_INTEGER || x->kind == VALUE_BOOL) && (y->kind == VALUE_INTEGER || y->kind == VALUE_BOOL);
    if (!numbers && !(x->kind == VALUE_STRING && y->kind == VALUE_STRING))
        jinja_fail(j, "%s %s %s", kind_name(x), sign, kind_name(y));
    jinja_spend(j, numbers ? 0 : x->size + y->size);
    int by = numbers ? (x->number > y->number) - (x->number < y->number) : strcmp(x->text, y->text);
    bool equal_too = sign[1] == '=';
    return jinja_bool((by == 0 && equal_too) || (*sign == '<' ? by < 0 : by > 0));
}

static const jinja_value *eval_binary(jinja *j, const jinja_node *n)
{
    const char *sign = n->text;
    const jinja_value *x = evaluate(j, n->a);
    if (strcmp(sign, "and") == 0) return is_true(x) ? evaluate(j, n->b) : x;
    if (strcmp(sign, "or") == 0) return is_true(x) ? x : evaluate(j, n->b);
    const jinja_value *y = evaluate(j, n->b);
    if (strcmp(sign, "==") == 0) return jinja_bool(are_equal(j, x, y));
    if (strcmp(sign, "!=") == 0) return jinja_bool(!are_equal(j, x, y));
    if (strcmp(sign, "in") == 0) return jinja_bool(contains(j, y, x));
    if (strcmp(sign, "~") == 0) return join_texts(j, as_string(j, x), as_string(j, y));
    if (strcmp(sign, "+") == 0) return add_values(j, x, y);
    return strchr("<>", *sign) ? compare_order(j, sign, x, y) : arithmetic(j, sign, x, y);
}

// ---- Calls ----

static jinja_arguments eval_arguments(jinja *j, const jinja_node *list)
{
    jinja_arguments args = {.named = jinja_new(j, VALUE_DICT)};
    for (const jinja_node *n = list; n; n = n->next) {
        const jinja_value *v = evaluate(j, n->a);
        if (*n->text) dict_set(j, args.named, n->text, v);
        else if (args.n == sizeof args.given / sizeof *args.given) jinja_fail(j, "more than %zu arguments", args.n);
        else args.given[args.n++] = v;
    }
    return args;
}

static const jinja_value *eval_call(jinja *j, const jinja_node *n)
{
    const jinja_value *callee = NULL;
    if (n->a->kind == NODE_ATTRIBUTE) {
        const jinja_value *of = evaluate(j, n->a->a);
        if (is_method(of, n->a->text)) {
            jinja_arguments args = eval_arguments(j, n->b);
            return call_method(j, of, n->a->text, &args);
        }
        callee = attribute_of(j, of, n->a->text);
    } else {
        callee = evaluate(j, n->a);
    }
    jinja_arguments args = eval_arguments(j, n->b);
    if (callee->kind == VALUE_MACRO) return call_macro(j, callee, &args);
    if (callee->kind == VALUE_FUNCTION) return call_function(j, callee->text, &args);
    jinja_fail(j, "a call of %s", kind_name(callee));
}

static const jinja_value *eval_test(jinja *j, const jinja_node *n)
{
    const jinja_value *v = evaluate(j, n->a), *argument = n->b ? evaluate(j, n->b->a) : NULL;
    if (n->b && n->b->next) jinja_fail(j, "test %s with two arguments", n->text);
    return jinja_bool(passes_test(j, n->text, v, argument));
}

static const jinja_value *eval_collection(jinja *j, const jinja_node *n)
{
    jinja_value *found = jinja_new(j, n->kind == NODE_LIST ? VALUE_LIST : VALUE_DICT);
    for (const jinja_node *one = n->a; one; one = one->next) {
        const jinja_value *v = evaluate(j, one->a);
        if (n->kind == NODE_LIST) {
            list_add(j, found, v);
        } else {
            const jinja_value *of_key = evaluate(j, one->b);
            if (v->kind == VALUE_STRING) dict_set(j, found, v->text, of_key);
            else found->number = 1;
        }
    }
    return found;
}

static const jinja_value *eval_filter(jinja *j, const jinja_node *n)
{
    const jinja_value *v = evaluate(j, n->a);
    jinja_arguments args = eval_arguments(j, n->b);
    return apply_filter(j, n->text, v, &args);
}

static const jinja_value *eval_minus(jinja *j, const jinja_value *v)
{
    if (v->kind != VALUE_INTEGER) jinja_fail(j, "- of %s", kind_name(v));
    return jinja_integer(j, -v->number);
}

static const jinja_value *evaluate_kind(jinja *j, const jinja_node *n)
{
    switch (n->kind) {
    case NODE_LITERAL:
        return n->value;
    case NODE_NAME:
        return look_up(j, n->text);
    case NODE_LIST:
    case NODE_DICT:
        return eval_collection(j, n);
    case NODE_ATTRIBUTE:
        return attribute_of(j, evaluate(j, n->a), n->text);
    case NODE_ITEM: {
        const jinja_value *of = evaluate(j, n->a);
        return eval_item(j, of, evaluate(j, n->b));
    }
    case NODE_SLICE:
        return eval_slice(j, n);
    case NODE_CALL:
        return eval_call(j, n);
    case NODE_FILTER:
        return eval_filter(j, n);
    case NODE_TEST:
        return eval_test(j, n);
    case NODE_NOT:
        return jinja_bool(!is_true(evaluate(j, n->a)));
    case NODE_MINUS:
        return eval_minus(j, evaluate(j, n->a));
    case NODE_BINARY:
        return eval_binary(j, n);
    case NODE_CONDITION:
        if (is_true(evaluate(j, n->b))) return evaluate(j, n->a);
        return n->c ? evaluate(j, n->c) : undefined(j, "a condition without else");
    default:
        jinja_fail(j, "not an expression");
    }
}

static const jinja_value *evaluate(jinja *j, const jinja_node *n)
{
    j->line = n->line;
    jinja_enter(j);
    const jinja_value *v = evaluate_kind(j, n);
    j->depth--;
    return v;
}

// ---- Scopes ----

static void open_scope(jinja *j, scope *inner, scope *outer)
{
    *inner = (scope){jinja_new(j, VALUE_DICT), outer};
    j->scope = inner;
}

// ---- Statements ----

static void run_output(jinja *j, const jinja_node *n)
{
    const jinja_value *v = evaluate(j, n->a);
    const jinja_value *text = as_string(j, v);
    jinja_append(j, j->out, text->text, text->size);
}

// Returns what the statements write, as a text.
static const jinja_value *run_captured(jinja *j, const jinja_node *body)
{
    jinja_text text = {0}, *outer = j->out;
    j->out = &text;
    run_statements(j, body);
    j->out = outer;
    return jinja_string(j, text.data, text.size);
}

static void run_set(jinja *j, const jinja_node *n)
{
    const jinja_value *v;
    if (n->a) {
        v = evaluate(j, n->a);
    } else { // names that the body sets are local to it
        scope inner, *outer = j->scope;
        open_scope(j, &inner, outer);
        v = run_captured(j, n->b);
        j->scope = outer;
    }
    if (!n->d) {
        dict_set(j, j->scope->names, n->text, v);
        return;
    }
    const jinja_value *space = NULL;
    for (const scope *s = j->scope; s && !space; s = s->outer) space = dict_get(j, s->names, n->text);
    if (space && space->kind == VALUE_NAMESPACE) dict_set(j, space->fields, n->d->text, v);
    else jinja_fail(j, "%s is not a namespace", n->text);
}

// What a loop's body sees as `loop`.
static const jinja_value *loop_state(jinja *j, const jinja_value *list, size_t i)
{
    jinja_value *loop = jinja_new(j, VALUE_DICT);
    const struct {
        const char *name;
        const jinja_value *value;
    } fields[] = {{"index", jinja_integer(j, (int64_t)i + 1)},
                  {"index0", jinja_integer(j, (int64_t)i)},
                  {"revindex", jinja_integer(j, (int64_t)(list->size - i))},
                  {"revindex0", jinja_integer(j, (int64_t)(list->size - i) - 1)},
                  {"first", jinja_bool(i == 0)},
                  {"last", jinja_bool(i + 1 == list->size)},
                  {"length", jinja_integer(j, (int64_t)list->size)},
                  {"previtem", i ? list->items[i - 1] : undefined(j, "previtem")},
                  {"nextitem", i + 1 < list->size ? list->items[i + 1] : undefined(j, "nextitem")}};
    for (size_t k = 0; k < sizeof fields / sizeof *fields; k++) dict_set(j, loop, fields[k].name, fields[k].value);
    return loop;
}

// Sets the loop's names for one item: one name, or two for the halves of a pair.
static void bind_item(jinja *j, const jinja_node *n, const jinja_value *one)
{
    if (!n->d) {
        dict_set(j, j->scope->names, n->text, one);
        return;
    }
    if (one->kind != VALUE_LIST || one->size != 2)
        jinja_fail(j, "expected a pair for %s and %s, found %s", n->text, n->d->text, kind_name(one));
    dict_set(j, j->scope->names, n->text, one->items[0]);
    dict_set(j, j->scope->names, n->d->text, one->items[1]);
}

// Returns the items that the loop goes over; with "if", those that pass.
static const jinja_value *loop_items(jinja *j, const jinja_node *n)
{
    const jinja_value *all = as_list(j, evaluate(j, n->a));
    if (!n->e) return all;
    jinja_value *some = jinja_new(j, VALUE_LIST);
    scope inner, *outer = j->scope;
    for (size_t i = 0; i < all->size; i++) {
        open_scope(j, &inner, outer);
        bind_item(j, n, all->items[i]);
        if (is_true(evaluate(j, n->e))) list_add(j, some, all->items[i]);
        j->scope = outer;
    }
    return some;
}

static void run_for(jinja *j, const jinja_node *n)
{
    const jinja_value *list = loop_items(j, n);
    scope inner, *outer = j->scope;
    for (size_t i = 0; i < list->size; i++) {
        open_scope(j, &inner, outer);
        dict_set(j, inner.names, "loop", loop_state(j, list, i));
        bind_item(j, n, list->items[i]);
        run_statements(j, n->b);
        j->scope = outer;
        bool ends = j->leaving == NODE_BREAK;
        j->leaving = NODE_TEXT;
        if (ends) break;
    }
    if (list->size == 0) run_statements(j, n->c);
}

static void run_macro(jinja *j, const jinja_node *n)
{
    jinja_value *macro = jinja_new(j, VALUE_MACRO);
    macro->node = n;
    macro->text = n->text;
    if (j->scope != j->root) jinja_fail(j, "a macro inside of a loop or macro");
    dict_set(j, j->scope->names, n->text, macro);
}

static const jinja_value *call_macro(jinja *j, const jinja_value *macro, const jinja_arguments *args)
{
    scope inner, *outer = j->scope;
    size_t given = 0, named = 0;
    open_scope(j, &inner, j->root);
    for (const jinja_node *p = macro->node->a; p; p = p->next) {
        const jinja_value *by_name = dict_get(j, args->named, p->text), *v = by_name;
        named += by_name != NULL;
        if (given < args->n && !by_name) v = args->given[given++];
        if (!v) v = p->a ? evaluate(j, p->a) : undefined(j, p->text);
        dict_set(j, inner.names, p->text, v);
    }
    if (given < args->n || named < args->named->size) jinja_fail(j, "macro %s with more arguments", macro->text);
    const jinja_value *text = run_captured(j, macro->node->b);
    j->scope = outer;
    return text;
}

static void run_one(jinja *j, const jinja_node *n)
{
    switch (n->kind) {
    case NODE_TEXT:
        jinja_append(j, j->out, n->text, strlen(n->text));
        break;
    case NODE_OUTPUT:
        run_output(j, n);
        break;
    case NODE_IF:
        run_statements(j, is_true(evaluate(j, n->a)) ? n->b : n->c);
        break;
    case NODE_FOR:
        run_for(j, n);
        break;
    case NODE_SET:
        run_set(j, n);
        break;
    case NODE_MACRO:
        run_macro(j, n);
        break;
    default:
        j->leaving = n->kind;
    }
}

static void run_statements(jinja *j, const jinja_node *statements)
{
    jinja_enter(j);
    for (const jinja_node *n = statements; n && j->leaving == NODE_TEXT; n = n->next) {
        j->line = n->line;
        run_one(j, n);
        jinja_spend(j, STEP_BYTES);
    }
    j->depth--;
}

// ---- A template as a whole ----

static void set_globals(jinja *j, const jinja_input *in)
{
    static const char *const functions[] = {"namespace", "dict", "range", "strftime_now", "raise_exception"};
    jinja_value *names = j->root->names, *message = jinja_new(j, VALUE_DICT), *messages = jinja_new(j, VALUE_LIST);
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        jinja_value *f = jinja_new(j, VALUE_FUNCTION);
        f->text = functions[i];
        dict_set(j, names, functions[i], f);
    }
    dict_set(j, message, "role", jinja_string(j, "user", 4));
    dict_set(j, message, "content", jinja_string(j, in->message, strlen(in->message)));
    list_add(j, messages, message);
    dict_set(j, names, "messages", messages);
    dict_set(j, names, "add_generation_prompt", jinja_bool(true));
    dict_set(j, names, "tools", &jinja_none);
    dict_set(j, names, "documents", &jinja_none);
    if (in->bos) dict_set(j, names, "bos_token", jinja_string(j, in->bos, strlen(in->bos)));
    if (in->eos) dict_set(j, names, "eos_token", jinja_string(j, in->eos, strlen(in->eos)));
}

static void render(jinja *j, const char *source, const jinja_input *in)
{
    j->root = jinja_alloc(j, sizeof *j->root);
    open_scope(j, j->root, NULL);
    set_globals(j, in);
    run_statements(j, jinja_parse(j, source));
    if (j->leaving != NODE_TEXT) jinja_fail(j, "break or continue outside of a loop");
}

kvb_status jinja_render(char **out, const char *source, const jinja_input *in, const char *name, kvb_error *err)
{
    jinja_text text = {0};
    jinja *j = need(1, sizeof *j, "templates");
    *j = (jinja){.name = name, .err = err, .out = &text, .leaving = NODE_TEXT};
    bool whole = setjmp(j->stop) == 0;
    if (whole) render(j, source, in);
    *out = whole ? need_text("%.*s", (int)j->out->size, j->out->size ? j->out->data : "") : NULL;
    jinja_free(j);
    free(j);
    return whole ? KVB_OK : KVB_UNSUPPORTED;
}
