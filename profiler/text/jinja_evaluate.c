// What expressions of Jinja come to.
#include "profiler/text/jinja_parts.h"
#include <string.h>

static const jinja_value *look_up(jinja *j, const char *name)
{
    // transformers knows these, we do not: undefined would be a guess.
    static const char *const unknown[] = {"unk_token", "pad_token",  "sep_token",
                                          "cls_token", "mask_token", "additional_special_tokens"};
    for (const scope *s = j->scope; s; s = s->outer) {
        const jinja_value *v = jinja_dict_get(s->names, name);
        if (v) return v;
    }
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        if (strcmp(name, unknown[i]) == 0) jinja_fail(j, "%s is not known here", name);
    return jinja_undefined(j, name);
}

const jinja_value *jinja_attribute(jinja *j, const jinja_value *of, const char *name)
{
    if (of->kind == VALUE_UNDEFINED) jinja_fail(j, "%s is undefined, and asked for its %s", of->missing_name, name);
    if (of->kind == VALUE_DICT || of->kind == VALUE_NAMESPACE) {
        const jinja_value *found = jinja_dict_get(of->kind == VALUE_DICT ? of : of->fields, name);
        if (found && !jinja_is_method(of, name)) return found;
    }
    if (jinja_is_method(of, name)) jinja_fail(j, "a method that is not called: %s", name);
    return jinja_undefined(j, name);
}

static const jinja_value *item(jinja *j, const jinja_value *of, const jinja_value *key)
{
    if (key->kind == VALUE_STRING) return jinja_attribute(j, of, key->text);
    if (key->kind == VALUE_INTEGER && (of->kind == VALUE_LIST || of->kind == VALUE_STRING)) {
        const jinja_value *list = jinja_as_list(j, of);
        int64_t i = key->number < 0 ? key->number + (int64_t)list->size : key->number;
        return i >= 0 && i < (int64_t)list->size ? list->items[i] : jinja_undefined(j, "an item");
    }
    jinja_fail(j, "item %s of %s", jinja_kind_name(key), jinja_kind_name(of));
    return of;
}

// A bound of a slice as Python counts: from the end if negative, and cut to what there is.
static int64_t bound(jinja *j, const jinja_node *n, int64_t left_out, int64_t size, int64_t step)
{
    if (!n) return left_out;
    const jinja_value *v = jinja_evaluate(j, n);
    if (v->kind == VALUE_NONE) return left_out;
    if (v->kind != VALUE_INTEGER) jinja_fail(j, "a slice's bound is %s", jinja_kind_name(v));
    int64_t i = v->number < 0 ? v->number + size : v->number, least = step < 0 ? -1 : 0;
    int64_t most = step < 0 ? size - 1 : size;
    return i < least ? least : i > most ? most : i;
}

static const jinja_value *slice(jinja *j, const jinja_node *n)
{
    const jinja_value *of = jinja_evaluate(j, n->a), *list = jinja_as_list(j, of);
    const jinja_value *by = n->d ? jinja_evaluate(j, n->d) : NULL;
    if (by && (by->kind != VALUE_INTEGER || by->number == 0)) jinja_fail(j, "a slice's step is not a number");
    if (of->kind != VALUE_LIST && of->kind != VALUE_STRING) jinja_fail(j, "a slice of %s", jinja_kind_name(of));
    int64_t size = (int64_t)list->size, step = by ? by->number : 1;
    int64_t begin = bound(j, n->b, step < 0 ? size - 1 : 0, size, step);
    int64_t end = bound(j, n->c, step < 0 ? -1 : size, size, step);
    jinja_value *found = jinja_new(j, VALUE_LIST);
    for (int64_t i = begin; jinja_ok(j) && (step < 0 ? i > end : i < end); i += step)
        jinja_list_add(j, found, list->items[i]);
    if (of->kind == VALUE_LIST) return found;
    jinja_text text = {0};
    for (size_t i = 0; i < found->size; i++) jinja_append(j, &text, found->items[i]->text, found->items[i]->size);
    return jinja_string(j, text.data, text.size);
}

// ---- Operators ----

static const jinja_value *concat(jinja *j, const jinja_value *x, const jinja_value *y)
{
    jinja_text text = {0};
    jinja_append(j, &text, x->text, x->size);
    jinja_append(j, &text, y->text, y->size);
    return jinja_string(j, text.data, text.size);
}

// Whole numbers as Python's: a remainder has the divisor's sign.
static const jinja_value *arithmetic(jinja *j, const char *sign, const jinja_value *x, const jinja_value *y)
{
    static const int64_t largest = (int64_t)1 << 31;
    bool numbers = x->kind == VALUE_INTEGER && y->kind == VALUE_INTEGER;
    bool small = numbers && x->number < largest && x->number > -largest && y->number < largest && y->number > -largest;
    bool divides = *sign == '/' || *sign == '%';
    if (!small || strcmp(sign, "/") == 0 || strcmp(sign, "**") == 0 || (divides && y->number == 0)) {
        jinja_fail(j, "%s %s %s, which is not read here", jinja_kind_name(x), sign, jinja_kind_name(y));
        return x;
    }
    if (*sign == '+') return jinja_integer(j, x->number + y->number);
    if (*sign == '-') return jinja_integer(j, x->number - y->number);
    if (*sign == '*') return jinja_integer(j, x->number * y->number);
    int64_t rest = x->number % y->number;
    if (rest && (rest < 0) != (y->number < 0)) rest += y->number;
    return jinja_integer(j, *sign == '%' ? rest : (x->number - rest) / y->number);
}

static const jinja_value *add(jinja *j, const jinja_value *x, const jinja_value *y)
{
    if (x->kind == VALUE_STRING && y->kind == VALUE_STRING) return concat(j, x, y);
    if (x->kind != VALUE_LIST || y->kind != VALUE_LIST) return arithmetic(j, "+", x, y);
    jinja_value *list = jinja_new(j, VALUE_LIST);
    for (size_t i = 0; i < x->size; i++) jinja_list_add(j, list, x->items[i]);
    for (size_t i = 0; i < y->size; i++) jinja_list_add(j, list, y->items[i]);
    return list;
}

static const jinja_value *order(jinja *j, const char *sign, const jinja_value *x, const jinja_value *y)
{
    bool numbers =
        (x->kind == VALUE_INTEGER || x->kind == VALUE_BOOL) && (y->kind == VALUE_INTEGER || y->kind == VALUE_BOOL);
    if (!numbers && !(x->kind == VALUE_STRING && y->kind == VALUE_STRING))
        jinja_fail(j, "%s %s %s", jinja_kind_name(x), sign, jinja_kind_name(y));
    if (!jinja_ok(j)) return x;
    int by = numbers ? (x->number > y->number) - (x->number < y->number) : strcmp(x->text, y->text);
    bool equal_too = sign[1] == '=';
    return jinja_bool((by == 0 && equal_too) || (*sign == '<' ? by < 0 : by > 0));
}

static const jinja_value *binary(jinja *j, const jinja_node *n)
{
    const char *sign = n->text;
    const jinja_value *x = jinja_evaluate(j, n->a);
    if (strcmp(sign, "and") == 0) return jinja_truth(x) ? jinja_evaluate(j, n->b) : x;
    if (strcmp(sign, "or") == 0) return jinja_truth(x) ? x : jinja_evaluate(j, n->b);
    const jinja_value *y = jinja_evaluate(j, n->b);
    if (strcmp(sign, "==") == 0) return jinja_bool(jinja_equal(j, x, y));
    if (strcmp(sign, "!=") == 0) return jinja_bool(!jinja_equal(j, x, y));
    if (strcmp(sign, "in") == 0) return jinja_bool(jinja_contains(j, y, x));
    if (strcmp(sign, "~") == 0) return concat(j, jinja_as_string(j, x), jinja_as_string(j, y));
    if (strcmp(sign, "+") == 0) return add(j, x, y);
    return strchr("<>", *sign) ? order(j, sign, x, y) : arithmetic(j, sign, x, y);
}

// ---- Calls ----

static jinja_arguments arguments(jinja *j, const jinja_node *list)
{
    jinja_arguments args = {.named = jinja_new(j, VALUE_DICT)};
    for (const jinja_node *n = list; n && jinja_ok(j); n = n->next) {
        const jinja_value *v = jinja_evaluate(j, n->a);
        if (*n->text) jinja_dict_set(j, args.named, n->text, v);
        else if (args.n == sizeof args.given / sizeof *args.given) jinja_fail(j, "more than %zu arguments", args.n);
        else args.given[args.n++] = v;
    }
    return args;
}

static const jinja_value *call(jinja *j, const jinja_node *n)
{
    const jinja_value *callee = NULL;
    if (n->a->kind == NODE_ATTRIBUTE) {
        const jinja_value *of = jinja_evaluate(j, n->a->a);
        if (jinja_is_method(of, n->a->text)) {
            jinja_arguments args = arguments(j, n->b);
            return jinja_ok(j) ? jinja_method(j, of, n->a->text, &args) : of;
        }
        callee = jinja_attribute(j, of, n->a->text);
    } else {
        callee = jinja_evaluate(j, n->a);
    }
    jinja_arguments args = arguments(j, n->b);
    if (!jinja_ok(j)) return callee;
    if (callee->kind == VALUE_MACRO) return jinja_call_macro(j, callee, &args);
    if (callee->kind == VALUE_FUNCTION) return jinja_function(j, callee->text, &args);
    jinja_fail(j, "a call of %s", jinja_kind_name(callee));
    return callee;
}

static const jinja_value *test(jinja *j, const jinja_node *n)
{
    const jinja_value *v = jinja_evaluate(j, n->a), *argument = n->b ? jinja_evaluate(j, n->b->a) : NULL;
    if (n->b && n->b->next) jinja_fail(j, "test %s with two arguments", n->text);
    return jinja_ok(j) ? jinja_bool(jinja_test(j, n->text, v, argument)) : v;
}

static const jinja_value *collect(jinja *j, const jinja_node *n)
{
    jinja_value *found = jinja_new(j, n->kind == NODE_LIST ? VALUE_LIST : VALUE_DICT);
    for (const jinja_node *one = n->a; one && jinja_ok(j); one = one->next) {
        const jinja_value *v = jinja_evaluate(j, one->a);
        if (n->kind == NODE_LIST) {
            jinja_list_add(j, found, v);
        } else {
            const jinja_value *of_key = jinja_evaluate(j, one->b);
            if (v->kind == VALUE_STRING) jinja_dict_set(j, found, v->text, of_key);
            else found->number = 1;
        }
    }
    return found;
}

static const jinja_value *filter(jinja *j, const jinja_node *n)
{
    const jinja_value *v = jinja_evaluate(j, n->a);
    jinja_arguments args = arguments(j, n->b);
    return jinja_ok(j) ? jinja_filter(j, n->text, v, &args) : v;
}

static const jinja_value *minus(jinja *j, const jinja_value *v)
{
    if (v->kind != VALUE_INTEGER) jinja_fail(j, "- of %s", jinja_kind_name(v));
    return jinja_integer(j, -v->number);
}

static const jinja_value *evaluate(jinja *j, const jinja_node *n)
{
    switch (n->kind) {
    case NODE_LITERAL:
        return n->value;
    case NODE_NAME:
        return look_up(j, n->text);
    case NODE_LIST:
    case NODE_DICT:
        return collect(j, n);
    case NODE_ATTRIBUTE:
        return jinja_attribute(j, jinja_evaluate(j, n->a), n->text);
    case NODE_ITEM: {
        const jinja_value *of = jinja_evaluate(j, n->a);
        return item(j, of, jinja_evaluate(j, n->b));
    }
    case NODE_SLICE:
        return slice(j, n);
    case NODE_CALL:
        return call(j, n);
    case NODE_FILTER:
        return filter(j, n);
    case NODE_TEST:
        return test(j, n);
    case NODE_NOT:
        return jinja_bool(!jinja_truth(jinja_evaluate(j, n->a)));
    case NODE_MINUS:
        return minus(j, jinja_evaluate(j, n->a));
    case NODE_BINARY:
        return binary(j, n);
    case NODE_CONDITION:
        if (jinja_truth(jinja_evaluate(j, n->b))) return jinja_evaluate(j, n->a);
        return n->c ? jinja_evaluate(j, n->c) : jinja_undefined(j, "a condition without else");
    default:
        jinja_fail(j, "not an expression");
        return &jinja_none;
    }
}

const jinja_value *jinja_evaluate(jinja *j, const jinja_node *n)
{
    if (!jinja_ok(j)) return &jinja_none;
    j->line = n->line;
    const jinja_value *v = jinja_enter(j) ? evaluate(j, n) : &jinja_none;
    j->depth--;
    return v;
}
