// Memory, failures and values of the Jinja reader.
#include "profiler/text/jinja_parts.h"
#include "runtime/fail.h"
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The longest templates that are published need less than a hundredth of these.
#define MAX_BYTES ((size_t)64 << 20)
#define MAX_STEPS 1000000
#define MAX_DEPTH 200
#define MAX_KEYS 1000

// ---- Failures and memory ----

void jinja_fail(jinja *j, const char *format, ...)
{
    char what[300];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    if (j->status != KVB_OK) return;
    j->status = kvb_fail(j->err, KVB_UNSUPPORTED,
                         "%s: chat template, line %d: %s; wrap the texts yourself and give --special in the place of "
                         "--chat",
                         j->name, j->line, what);
}

bool jinja_ok(const jinja *j)
{
    return j->status == KVB_OK;
}

bool jinja_enter(jinja *j)
{
    j->depth++;
    if (j->depth > MAX_DEPTH) jinja_fail(j, "more than %d levels within each other", MAX_DEPTH);
    if (++j->steps > MAX_STEPS) jinja_fail(j, "more than %d steps", MAX_STEPS);
    return jinja_ok(j);
}

typedef struct arena_piece {
    struct arena_piece *before;
    size_t size, used;
    _Alignas(max_align_t) char bytes[];
} arena_piece;

void *jinja_alloc(jinja *j, size_t size)
{
    enum { PIECE = 1 << 16 };
    if (size > MAX_BYTES) {
        jinja_fail(j, "more than %zu bytes of memory", MAX_BYTES);
        return NULL;
    }
    size = (size + sizeof(max_align_t) - 1) / sizeof(max_align_t) * sizeof(max_align_t);
    arena_piece *p = j->pieces;
    if (!p || size > p->size - p->used) {
        size_t room = size > PIECE ? size : PIECE;
        if (j->used + room > MAX_BYTES) jinja_fail(j, "more than %zu bytes of memory", MAX_BYTES);
        if (!jinja_ok(j)) return NULL;
        p = calloc(1, sizeof *p + room);
        if (!p) {
            j->status = kvb_fail(j->err, KVB_MEMORY, "%s: no memory for a chat template", j->name);
            return NULL;
        }
        *p = (arena_piece){.before = j->pieces, .size = room};
        j->pieces = p;
        j->used += room;
    }
    void *found = p->bytes + p->used;
    p->used += size;
    return found;
}

void jinja_free(jinja *j)
{
    while (j->pieces) {
        arena_piece *p = j->pieces;
        j->pieces = p->before;
        free(p);
    }
}

char *jinja_copy(jinja *j, const char *text, size_t size)
{
    static char nothing[1];
    char *copy = jinja_alloc(j, size + 1);
    if (!copy) return nothing;
    if (size) memcpy(copy, text, size);
    copy[size] = '\0';
    return copy;
}

void jinja_append(jinja *j, jinja_text *to, const char *text, size_t size)
{
    if (size > to->room - to->size) {
        size_t room = 2 * (to->size + size) + 64;
        char *data = jinja_alloc(j, room);
        if (!data) return;
        if (to->size) memcpy(data, to->data, to->size);
        to->data = data;
        to->room = room;
    }
    if (size) memcpy(to->data + to->size, text, size);
    to->size += size;
}

// ---- Making values ----

const jinja_value jinja_none = {.kind = VALUE_NONE, .text = ""};
static const jinja_value yes_value = {.kind = VALUE_BOOL, .number = 1, .text = ""};
static const jinja_value no_value = {.kind = VALUE_BOOL, .text = ""};

// Where there is no memory a value is made of j's own: nobody looks at it, since that is a failure.
jinja_value *jinja_new(jinja *j, value_kind kind)
{
    static _Thread_local jinja_value unused;
    jinja_value *v = jinja_alloc(j, sizeof *v);
    if (!v) {
        unused = (jinja_value){.text = ""};
        return &unused;
    }
    v->kind = kind;
    v->text = "";
    return v;
}

const jinja_value *jinja_undefined(jinja *j, const char *name)
{
    jinja_value *v = jinja_new(j, VALUE_UNDEFINED);
    v->missing_name = name;
    return v;
}

const jinja_value *jinja_bool(bool yes)
{
    return yes ? &yes_value : &no_value;
}

const jinja_value *jinja_integer(jinja *j, int64_t number)
{
    jinja_value *v = jinja_new(j, VALUE_INTEGER);
    v->number = number;
    return v;
}

const jinja_value *jinja_string(jinja *j, const char *text, size_t size)
{
    jinja_value *v = jinja_new(j, VALUE_STRING);
    v->text = jinja_copy(j, text, size);
    v->size = jinja_ok(j) ? size : 0;
    return v;
}

// Room for one item more; false: a failure.
static bool grow(jinja *j, jinja_value *v)
{
    if (!jinja_ok(j)) return false;
    if (v->size < v->room) return true;
    size_t room = 2 * v->room + 4;
    const jinja_value **items = jinja_alloc(j, room * sizeof *items);
    const char **keys = jinja_alloc(j, room * sizeof *keys);
    if (!items || !keys) return false;
    if (v->size) memcpy(items, v->items, v->size * sizeof *items);
    if (v->size && v->keys) memcpy(keys, v->keys, v->size * sizeof *keys);
    v->items = items;
    v->keys = keys;
    v->room = room;
    return true;
}

void jinja_list_add(jinja *j, jinja_value *list, const jinja_value *item)
{
    if (grow(j, list)) list->items[list->size++] = item;
}

void jinja_dict_set(jinja *j, jinja_value *dict, const char *key, const jinja_value *value)
{
    for (size_t i = 0; i < dict->size; i++)
        if (strcmp(dict->keys[i], key) == 0) {
            dict->items[i] = value;
            return;
        }
    if (dict->size == MAX_KEYS) jinja_fail(j, "a dict of more than %d keys", MAX_KEYS);
    if (!grow(j, dict)) return;
    dict->keys[dict->size] = key;
    dict->items[dict->size++] = value;
}

const jinja_value *jinja_dict_get(const jinja_value *dict, const char *key)
{
    for (size_t i = 0; i < dict->size; i++)
        if (strcmp(dict->keys[i], key) == 0) return dict->items[i];
    return NULL;
}

// ---- What values are ----

const char *jinja_kind_name(const jinja_value *v)
{
    static const char *const names[] = {"undefined", "none",   "a boolean",   "a number",   "a text",
                                        "a list",    "a dict", "a namespace", "a function", "a macro"};
    return names[v->kind];
}

bool jinja_truth(const jinja_value *v)
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

bool jinja_equal(jinja *j, const jinja_value *x, const jinja_value *y)
{
    if (x == y) return true;
    if (is_number(x) && is_number(y)) return x->number == y->number;
    if (x->kind != y->kind) return false;
    if (x->kind == VALUE_UNDEFINED || x->kind == VALUE_NONE) return true;
    if (x->kind == VALUE_STRING) return x->size == y->size && memcmp(x->text, y->text, x->size) == 0;
    if ((x->kind != VALUE_LIST && x->kind != VALUE_DICT) || x->size != y->size) return false;
    bool same = jinja_enter(j);
    for (size_t i = 0; same && i < x->size; i++) {
        const jinja_value *other = x->kind == VALUE_LIST ? y->items[i] : jinja_dict_get(y, x->keys[i]);
        same = other && jinja_equal(j, x->items[i], other);
    }
    j->depth--;
    return same;
}

const jinja_value *jinja_as_string(jinja *j, const jinja_value *v)
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
        jinja_fail(j, "%s is written as text, which is not read here", jinja_kind_name(v));
        return v;
    }
}

const jinja_value *jinja_as_list(jinja *j, const jinja_value *v)
{
    if (v->kind == VALUE_LIST) return v;
    jinja_value *list = jinja_new(j, VALUE_LIST);
    if (v->kind == VALUE_DICT && v->number) jinja_fail(j, "the keys of a dict, of which some are no texts");
    if (v->kind == VALUE_DICT) {
        for (size_t i = 0; i < v->size && jinja_ok(j); i++)
            jinja_list_add(j, list, jinja_string(j, v->keys[i], strlen(v->keys[i])));
    } else if (v->kind == VALUE_STRING) {
        for (size_t i = 0, n; i < v->size && jinja_ok(j); i += n) {
            for (n = 1; i + n < v->size && ((unsigned char)v->text[i + n] & 0xC0) == 0x80;) n++;
            jinja_list_add(j, list, jinja_string(j, v->text + i, n));
        }
    } else if (v->kind != VALUE_UNDEFINED) {
        jinja_fail(j, "expected a list, found %s", jinja_kind_name(v));
    }
    return list;
}

bool jinja_contains(jinja *j, const jinja_value *container, const jinja_value *v)
{
    if (container->kind == VALUE_STRING && v->kind == VALUE_STRING)
        return memmem(container->text, container->size, v->text, v->size) != NULL;
    if (container->kind == VALUE_DICT && v->kind == VALUE_STRING) return jinja_dict_get(container, v->text) != NULL;
    if (container->kind == VALUE_LIST)
        for (size_t i = 0; i < container->size; i++)
            if (jinja_equal(j, container->items[i], v)) return true;
    if (container->kind != VALUE_LIST && container->kind != VALUE_DICT && container->kind != VALUE_UNDEFINED)
        jinja_fail(j, "'in' of %s and %s", jinja_kind_name(v), jinja_kind_name(container));
    return false;
}
