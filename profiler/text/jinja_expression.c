// Expressions of Jinja as a tree, by recursive descent; the order of the functions is Jinja2's precedence.
#include "profiler/text/jinja_parts.h"
#include <stdlib.h>
#include <string.h>

// ---- Tokens ----

const token *jinja_peek(const jinja *j)
{
    static const token end = {.kind = TOKEN_END, .text = ""};
    return jinja_ok(j) ? &j->tokens[j->at] : &end;
}

bool jinja_at(const jinja *j, token_kind kind, const char *text)
{
    const token *t = jinja_peek(j);
    return t->kind == kind && (!text || strcmp(t->text, text) == 0);
}

bool jinja_take(jinja *j, token_kind kind, const char *text)
{
    if (!jinja_at(j, kind, text)) return false;
    j->line = j->tokens[j->at].line;
    if (kind != TOKEN_END) j->at++;
    return true;
}

const char *jinja_expect(jinja *j, token_kind kind, const char *text, const char *what)
{
    const token *t = jinja_peek(j);
    if (jinja_take(j, kind, text)) return t->text;
    if (jinja_ok(j)) j->line = t->line;
    jinja_fail(j, "expected %s, found \"%.40s\"", what, t->text);
    return "";
}

jinja_node *jinja_new_node(jinja *j, node_kind kind)
{
    jinja_node *n = jinja_alloc(j, sizeof *n);
    if (!n) n = &j->spare;
    *n = (jinja_node){.kind = kind, .line = j->line, .text = ""};
    return n;
}

static bool take_operator(jinja *j, const char *text)
{
    return jinja_take(j, TOKEN_OPERATOR, text);
}

static bool at_word(const jinja *j, const char *text)
{
    return jinja_at(j, TOKEN_NAME, text);
}

static jinja_node *join(jinja *j, node_kind kind, const char *text, jinja_node *a, jinja_node *b)
{
    jinja_node *n = jinja_new_node(j, kind);
    n->text = text;
    n->a = a;
    n->b = b;
    return n;
}

// ---- Atoms ----

// Items up to `close`, with commas between.
static jinja_node *parse_items(jinja *j, const char *close, bool pairs)
{
    jinja_node *first = NULL, **last = &first;
    while (jinja_ok(j) && !take_operator(j, close)) {
        jinja_node *item = jinja_parse_expression(j, true);
        *last = join(j, NODE_ARGUMENT, "", item, NULL);
        if (pairs) {
            jinja_expect(j, TOKEN_OPERATOR, ":", "\":\"");
            (*last)->b = jinja_parse_expression(j, true);
        }
        last = &(*last)->next;
        if (!jinja_at(j, TOKEN_OPERATOR, close)) jinja_expect(j, TOKEN_OPERATOR, ",", "\",\"");
    }
    return first;
}

// Behind "(": an expression, or a tuple, which is a list here.
static jinja_node *parse_brackets(jinja *j)
{
    if (take_operator(j, ")")) return jinja_new_node(j, NODE_LIST);
    jinja_node *inner = jinja_parse_expression(j, true);
    if (take_operator(j, ")")) return inner;
    jinja_expect(j, TOKEN_OPERATOR, ",", "\")\"");
    jinja_node *list = jinja_new_node(j, NODE_LIST);
    list->a = join(j, NODE_ARGUMENT, "", inner, NULL);
    list->a->next = parse_items(j, ")", false);
    return list;
}

static jinja_node *parse_name(jinja *j)
{
    static const struct {
        const char *name;
        int value; // -1: none
    } words[] = {{"true", 1}, {"True", 1}, {"false", 0}, {"False", 0}, {"none", -1}, {"None", -1}};
    const char *name = jinja_expect(j, TOKEN_NAME, NULL, "a name");
    jinja_node *n = jinja_new_node(j, NODE_NAME);
    n->text = name;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(name, words[i].name) == 0) {
            n->kind = NODE_LITERAL;
            n->value = words[i].value < 0 ? &jinja_none : jinja_bool(words[i].value);
        }
    return n;
}

// Texts side by side are one.
static jinja_node *parse_string(jinja *j)
{
    jinja_text text = {0};
    while (jinja_at(j, TOKEN_STRING, NULL)) {
        const token *t = jinja_peek(j);
        jinja_append(j, &text, t->text, t->size);
        jinja_take(j, TOKEN_STRING, NULL);
    }
    jinja_node *n = jinja_new_node(j, NODE_LITERAL);
    n->value = jinja_string(j, text.data, text.size);
    return n;
}

static jinja_node *parse_atom(jinja *j)
{
    const token *t = jinja_peek(j);
    if (t->kind == TOKEN_STRING) return parse_string(j);
    if (jinja_take(j, TOKEN_INTEGER, NULL)) {
        jinja_node *n = jinja_new_node(j, NODE_LITERAL);
        n->value = jinja_integer(j, strtoll(t->text, NULL, 10));
        return n;
    }
    if (take_operator(j, "(")) return parse_brackets(j);
    bool list = jinja_at(j, TOKEN_OPERATOR, "[");
    if (!list && !jinja_at(j, TOKEN_OPERATOR, "{")) return parse_name(j);
    jinja_take(j, TOKEN_OPERATOR, NULL);
    jinja_node *n = jinja_new_node(j, list ? NODE_LIST : NODE_DICT);
    n->a = parse_items(j, list ? "]" : "}", !list);
    return n;
}

// ---- What stands behind an atom ----

jinja_node *jinja_parse_arguments(jinja *j)
{
    jinja_node *first = NULL, **last = &first;
    while (jinja_ok(j) && !take_operator(j, ")")) {
        jinja_node *n = jinja_new_node(j, NODE_ARGUMENT);
        const token *t = jinja_peek(j);
        if (t->kind == TOKEN_NAME && t[1].kind == TOKEN_OPERATOR && strcmp(t[1].text, "=") == 0) {
            n->text = t->text;
            j->at += 2;
        }
        n->a = jinja_parse_expression(j, true);
        *last = n;
        last = &n->next;
        if (!jinja_at(j, TOKEN_OPERATOR, ")")) jinja_expect(j, TOKEN_OPERATOR, ",", "\",\"");
    }
    return first;
}

// A part of a slice, NULL where it is left out.
static jinja_node *parse_bound(jinja *j)
{
    bool none = jinja_at(j, TOKEN_OPERATOR, ":") || jinja_at(j, TOKEN_OPERATOR, "]");
    return none ? NULL : jinja_parse_expression(j, true);
}

// Behind "[".
static jinja_node *parse_subscript(jinja *j, jinja_node *of)
{
    jinja_node *first = parse_bound(j), *n = join(j, NODE_ITEM, "", of, first);
    if (take_operator(j, ":")) {
        n->kind = NODE_SLICE;
        n->c = parse_bound(j);
        if (take_operator(j, ":")) n->d = parse_bound(j);
    } else if (!first) {
        jinja_fail(j, "expected a subscript");
    }
    jinja_expect(j, TOKEN_OPERATOR, "]", "\"]\"");
    return n;
}

static jinja_node *parse_postfix(jinja *j, jinja_node *n)
{
    while (jinja_ok(j)) {
        if (take_operator(j, ".")) n = join(j, NODE_ATTRIBUTE, jinja_expect(j, TOKEN_NAME, NULL, "a name"), n, NULL);
        else if (take_operator(j, "[")) n = parse_subscript(j, n);
        else if (take_operator(j, "(")) n = join(j, NODE_CALL, "", n, jinja_parse_arguments(j));
        else break;
    }
    return n;
}

// Does an argument without brackets follow a test's name ("is divisibleby 3")?
static bool argument_follows(const jinja *j)
{
    const token *t = jinja_peek(j);
    bool word = t->kind == TOKEN_NAME && strcmp(t->text, "else") != 0 && strcmp(t->text, "or") != 0 &&
                strcmp(t->text, "and") != 0 && strcmp(t->text, "is") != 0 && strcmp(t->text, "if") != 0 &&
                strcmp(t->text, "in") != 0 && strcmp(t->text, "not") != 0;
    return word || t->kind == TOKEN_STRING || t->kind == TOKEN_INTEGER ||
           (t->kind == TOKEN_OPERATOR && (*t->text == '[' || *t->text == '{'));
}

static jinja_node *parse_test(jinja *j, jinja_node *of)
{
    bool negated = jinja_take(j, TOKEN_NAME, "not");
    jinja_node *n = join(j, NODE_TEST, jinja_expect(j, TOKEN_NAME, NULL, "a test's name"), of, NULL);
    if (take_operator(j, "(")) {
        n->b = jinja_parse_arguments(j);
    } else if (argument_follows(j)) {
        n->b = jinja_new_node(j, NODE_ARGUMENT);
        n->b->a = parse_postfix(j, parse_atom(j));
    }
    return negated ? join(j, NODE_NOT, "", n, NULL) : n;
}

static jinja_node *parse_filters(jinja *j, jinja_node *n)
{
    while (jinja_ok(j)) {
        if (take_operator(j, "|")) {
            n = join(j, NODE_FILTER, jinja_expect(j, TOKEN_NAME, NULL, "a filter's name"), n, NULL);
            if (take_operator(j, "(")) n->b = jinja_parse_arguments(j);
        } else if (jinja_take(j, TOKEN_NAME, "is")) {
            n = parse_test(j, n);
        } else if (take_operator(j, "(")) { // what a filter or test gave is called
            n = join(j, NODE_CALL, "", n, jinja_parse_arguments(j));
        } else {
            break;
        }
    }
    return n;
}

static jinja_node *parse_unary(jinja *j, bool with_filters)
{
    jinja_node *n;
    if (!jinja_enter(j)) {
        n = jinja_new_node(j, NODE_LIST);
    } else if (take_operator(j, "-")) {
        n = join(j, NODE_MINUS, "", parse_unary(j, false), NULL);
    } else {
        n = parse_postfix(j, parse_atom(j));
    }
    j->depth--;
    return with_filters ? parse_filters(j, n) : n;
}

// ---- Operators, from the tightest to the loosest ----

// The operators of a level that stand here, or NULL; `*text` is what the node is called.
static const char *take_of(jinja *j, const char *const *operators)
{
    for (; *operators; operators++)
        if (take_operator(j, *operators)) return *operators;
    return NULL;
}

static jinja_node *parse_product(jinja *j)
{
    static const char *const operators[] = {"*", "//", "%", "/", "**", NULL};
    jinja_node *n = parse_unary(j, true);
    for (const char *text; jinja_ok(j) && (text = take_of(j, operators));)
        n = join(j, NODE_BINARY, text, n, parse_unary(j, true));
    return n;
}

static jinja_node *parse_concat(jinja *j)
{
    jinja_node *n = parse_product(j);
    while (jinja_ok(j) && take_operator(j, "~")) n = join(j, NODE_BINARY, "~", n, parse_product(j));
    return n;
}

static jinja_node *parse_sum(jinja *j)
{
    static const char *const operators[] = {"+", "-", NULL};
    jinja_node *n = parse_concat(j);
    for (const char *text; jinja_ok(j) && (text = take_of(j, operators));)
        n = join(j, NODE_BINARY, text, n, parse_concat(j));
    return n;
}

// Comparisons in a row are refused: hardly anybody writes them in a template.
static jinja_node *parse_comparison(jinja *j)
{
    static const char *const operators[] = {"==", "!=", "<=", ">=", "<", ">", NULL};
    jinja_node *n = parse_sum(j);
    for (int found = 0; jinja_ok(j); found++) {
        bool outside =
            at_word(j, "not") && jinja_peek(j)[1].kind == TOKEN_NAME && strcmp(jinja_peek(j)[1].text, "in") == 0;
        if (outside) j->at++;
        const char *text = jinja_take(j, TOKEN_NAME, "in") ? "in" : take_of(j, operators);
        if (!text) break;
        if (found) jinja_fail(j, "comparisons in a row");
        n = join(j, NODE_BINARY, text, n, parse_sum(j));
        if (outside) n = join(j, NODE_NOT, "", n, NULL);
    }
    return n;
}

static jinja_node *parse_not(jinja *j)
{
    if (!jinja_take(j, TOKEN_NAME, "not")) return parse_comparison(j);
    jinja_node *n = jinja_enter(j) ? parse_not(j) : NULL;
    j->depth--;
    return join(j, NODE_NOT, "", n, NULL);
}

static jinja_node *parse_and(jinja *j)
{
    jinja_node *n = parse_not(j);
    while (jinja_take(j, TOKEN_NAME, "and")) n = join(j, NODE_BINARY, "and", n, parse_not(j));
    return n;
}

static jinja_node *parse_or(jinja *j)
{
    jinja_node *n = parse_and(j);
    while (jinja_take(j, TOKEN_NAME, "or")) n = join(j, NODE_BINARY, "or", n, parse_and(j));
    return n;
}

jinja_node *jinja_parse_expression(jinja *j, bool with_condition)
{
    jinja_node *n = jinja_enter(j) ? parse_or(j) : jinja_new_node(j, NODE_LIST);
    if (with_condition && jinja_take(j, TOKEN_NAME, "if")) {
        n = join(j, NODE_CONDITION, "", n, parse_or(j));
        if (jinja_take(j, TOKEN_NAME, "else")) n->c = jinja_parse_expression(j, true);
    }
    j->depth--;
    return n;
}
