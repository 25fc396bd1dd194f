// Methods that Python's texts and dicts have, as far as templates call them. Texts are UTF-8; what changes letters
// takes ASCII only.
#include "profiler/text/jinja_parts.h"
#include "profiler/text/utf8.h"
#include <stdio.h>
#include <string.h>

static const char *const text_methods[] = {"strip",      "lstrip", "rstrip", "split", "startswith", "endswith",
                                           "replace",    "upper",  "lower",  "title", "capitalize", "join",
                                           "splitlines", "format", "find",   "count", "index",      NULL};
static const char *const dict_methods[] = {"items", "keys", "values", "get", "pop", "update", "copy", NULL};

bool jinja_is_method(const jinja_value *of, const char *name)
{
    const char *const *names = of->kind == VALUE_STRING ? text_methods : of->kind == VALUE_DICT ? dict_methods : NULL;
    for (; names && *names; names++)
        if (strcmp(*names, name) == 0) return true;
    return of->kind == VALUE_LIST && strcmp(name, "append") == 0;
}

// The argument as a text, `otherwise` where there is none.
static const jinja_value *text_argument(jinja *j, const jinja_arguments *args, size_t i, const jinja_value *otherwise)
{
    const jinja_value *v = args->n > i ? args->given[i] : otherwise;
    if (v && v->kind == VALUE_STRING) return v;
    if (v || !otherwise) jinja_fail(j, "expected a text as argument, found %s", v ? jinja_kind_name(v) : "none");
    return jinja_string(j, "", 0);
}

const jinja_value *jinja_strip(jinja *j, const jinja_value *v, const char *set, bool left, bool right)
{
    size_t begin = 0, end = v->size;
    if (!set && left) begin = utf8_spaces_before(v->text, v->size);
    if (!set && right) end -= utf8_spaces_behind(v->text + begin, end - begin);
    while (set && left && begin < end && strchr(set, v->text[begin])) begin++;
    while (set && right && end > begin && strchr(set, v->text[end - 1])) end--;
    return jinja_string(j, v->text + begin, end - begin);
}

static const jinja_value *strip(jinja *j, const jinja_value *v, const char *name, const jinja_arguments *args)
{
    const char *set = args->n ? text_argument(j, args, 0, NULL)->text : NULL;
    for (const char *p = set; p && *p; p++)
        if (*p & 0x80) jinja_fail(j, "%s of letters beyond ASCII", name);
    return jinja_strip(j, v, set, name[0] != 'r', name[0] != 'l');
}

// At every `by`, `most` times (-1: all).
static const jinja_value *split(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    const jinja_value *by = text_argument(j, args, 0, NULL);
    int64_t most = args->n > 1 && args->given[1]->kind == VALUE_INTEGER ? args->given[1]->number : -1;
    jinja_value *list = jinja_new(j, VALUE_LIST);
    const char *p = v->text;
    if (!by->size) jinja_fail(j, "split without a text to split at");
    for (const char *at; jinja_ok(j) && most != 0 && (at = strstr(p, by->text)); most--) {
        jinja_list_add(j, list, jinja_string(j, p, (size_t)(at - p)));
        p = at + by->size;
    }
    jinja_list_add(j, list, jinja_string(j, p, strlen(p)));
    return list;
}

static const jinja_value *replace(jinja *j, const jinja_value *v, const jinja_arguments *args)
{
    const jinja_value *old = text_argument(j, args, 0, NULL), *with = text_argument(j, args, 1, NULL);
    if (!old->size || args->n > 2) jinja_fail(j, "replace of nothing, or some times only");
    jinja_text text = {0};
    const char *p = v->text;
    for (const char *at; jinja_ok(j) && (at = strstr(p, old->text)); p = at + old->size) {
        jinja_append(j, &text, p, (size_t)(at - p));
        jinja_append(j, &text, with->text, with->size);
    }
    jinja_append(j, &text, p, strlen(p));
    return jinja_string(j, text.data, text.size);
}

// Of a text, or of any in a list.
static bool starts_or_ends(jinja *j, const jinja_value *v, const jinja_value *with, bool at_end)
{
    if (with->kind == VALUE_LIST) {
        for (size_t i = 0; i < with->size; i++)
            if (with->items[i]->kind == VALUE_STRING && starts_or_ends(j, v, with->items[i], at_end)) return true;
        return false;
    }
    if (with->kind != VALUE_STRING) jinja_fail(j, "expected a text as argument, found %s", jinja_kind_name(with));
    return with->size <= v->size && memcmp(v->text + (at_end ? v->size - with->size : 0), with->text, with->size) == 0;
}

// upper, lower, title or capitalize.
static const jinja_value *change_case(jinja *j, const jinja_value *v, const char *name)
{
    char *text = jinja_copy(j, v->text, v->size);
    bool word = false; // inside one
    for (size_t i = 0; jinja_ok(j) && i < v->size; i++) {
        char c = text[i];
        bool small = c >= 'a' && c <= 'z', large = c >= 'A' && c <= 'Z';
        bool up = *name == 'u' || (*name == 't' && !word) || (*name == 'c' && i == 0);
        if (c & 0x80) jinja_fail(j, "%s of letters beyond ASCII", name);
        if (small && up) text[i] = (char)(c - 'a' + 'A');
        if (large && !up) text[i] = (char)(c - 'A' + 'a');
        word = small || large;
    }
    return jinja_string(j, text, jinja_ok(j) ? v->size : 0);
}

static const jinja_value *text_method(jinja *j, const jinja_value *of, const char *name, const jinja_arguments *args)
{
    if (strcmp(name, "strip") == 0 || strcmp(name, "lstrip") == 0 || strcmp(name, "rstrip") == 0)
        return strip(j, of, name, args);
    if (strcmp(name, "split") == 0) return split(j, of, args);
    if (strcmp(name, "replace") == 0) return replace(j, of, args);
    bool at_end = strcmp(name, "endswith") == 0;
    if ((at_end || strcmp(name, "startswith") == 0) && args->n)
        return jinja_bool(starts_or_ends(j, of, args->given[0], at_end));
    if (strcmp(name, "upper") == 0 || strcmp(name, "lower") == 0 || strcmp(name, "title") == 0 ||
        strcmp(name, "capitalize") == 0)
        return change_case(j, of, name);
    jinja_fail(j, "a text's method %s, which is not read here", name);
    return of;
}

// Pairs of key and value, as lists.
static const jinja_value *items(jinja *j, const jinja_value *of)
{
    jinja_value *list = jinja_new(j, VALUE_LIST);
    for (size_t i = 0; i < of->size && jinja_ok(j); i++) {
        jinja_value *pair = jinja_new(j, VALUE_LIST);
        jinja_list_add(j, pair, jinja_string(j, of->keys[i], strlen(of->keys[i])));
        jinja_list_add(j, pair, of->items[i]);
        jinja_list_add(j, list, pair);
    }
    return list;
}

static const jinja_value *dict_method(jinja *j, const jinja_value *of, const char *name, const jinja_arguments *args)
{
    const jinja_value *keys = jinja_as_list(j, of);
    if (strcmp(name, "items") == 0) return items(j, of);
    if (strcmp(name, "keys") == 0) return keys;
    if (strcmp(name, "get") == 0) {
        const jinja_value *found = jinja_dict_get(of, text_argument(j, args, 0, NULL)->text);
        return found ? found : args->n > 1 ? args->given[1] : &jinja_none;
    }
    if (strcmp(name, "values") == 0) {
        jinja_value *list = jinja_new(j, VALUE_LIST);
        for (size_t i = 0; i < of->size; i++) jinja_list_add(j, list, of->items[i]);
        return list;
    }
    jinja_fail(j, "a dict's method %s, which is not read here", name);
    return of;
}

const jinja_value *jinja_method(jinja *j, const jinja_value *of, const char *name, const jinja_arguments *args)
{
    if (args->named->size) jinja_fail(j, "%s with an argument that has a name", name);
    if (of->kind == VALUE_STRING) return text_method(j, of, name, args);
    if (of->kind == VALUE_DICT) return dict_method(j, of, name, args);
    jinja_fail(j, "a list's method %s, which is not read here", name);
    return of;
}
