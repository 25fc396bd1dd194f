// Statements of Jinja as a tree.
#include "profiler/text/jinja_parts.h"
#include <string.h>

static jinja_node *parse_body(jinja *j, const char *const *ends);

// Behind "{%" and its name: the end of the tag.
static void close_tag(jinja *j)
{
    jinja_expect(j, TOKEN_BLOCK_END, NULL, "the end of the tag");
}

// Is "{% name" here, with one of the names? Nothing is taken.
static bool at_end_of_body(const jinja *j, const char *const *ends)
{
    if (!jinja_at(j, TOKEN_BLOCK, NULL)) return false;
    for (; *ends; ends++)
        if (jinja_peek(j)[1].kind == TOKEN_NAME && strcmp(jinja_peek(j)[1].text, *ends) == 0) return true;
    return false;
}

// "{% name", where a body has ended.
static bool take_end(jinja *j, const char *name)
{
    const char *const ends[] = {name, NULL};
    if (!at_end_of_body(j, ends)) return false;
    jinja_take(j, TOKEN_BLOCK, NULL);
    return jinja_take(j, TOKEN_NAME, name);
}

static void expect_end(jinja *j, const char *name)
{
    if (take_end(j, name)) close_tag(j);
    else jinja_fail(j, "expected {%% %s %%}", name);
}

static jinja_node *parse_if(jinja *j)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    jinja_node *first = NULL, **place = &first;
    do { // one for if and each elif; the next one is the else of the one before
        jinja_node *n = *place = jinja_new_node(j, NODE_IF);
        n->a = jinja_parse_expression(j, true);
        close_tag(j);
        n->b = parse_body(j, ends);
        place = &n->c;
    } while (jinja_ok(j) && take_end(j, "elif"));
    if (take_end(j, "else")) {
        static const char *const end[] = {"endif", NULL};
        close_tag(j);
        *place = parse_body(j, end);
    }
    expect_end(j, "endif");
    return first;
}

static jinja_node *parse_for(jinja *j)
{
    static const char *const ends[] = {"else", "endfor", NULL}, *const end[] = {"endfor", NULL};
    jinja_node *n = jinja_new_node(j, NODE_FOR);
    n->text = jinja_expect(j, TOKEN_NAME, NULL, "a name");
    if (jinja_take(j, TOKEN_OPERATOR, ",")) {
        n->d = jinja_new_node(j, NODE_NAME);
        n->d->text = jinja_expect(j, TOKEN_NAME, NULL, "a name");
    }
    jinja_expect(j, TOKEN_NAME, "in", "\"in\"");
    n->a = jinja_parse_expression(j, false);
    if (jinja_take(j, TOKEN_NAME, "if")) n->e = jinja_parse_expression(j, true);
    close_tag(j);
    n->b = parse_body(j, ends);
    if (take_end(j, "else")) {
        close_tag(j);
        n->c = parse_body(j, end);
    }
    expect_end(j, "endfor");
    return n;
}

static jinja_node *parse_set(jinja *j)
{
    static const char *const ends[] = {"endset", NULL};
    jinja_node *n = jinja_new_node(j, NODE_SET);
    n->text = jinja_expect(j, TOKEN_NAME, NULL, "a name");
    if (jinja_take(j, TOKEN_OPERATOR, ".")) {
        n->d = jinja_new_node(j, NODE_NAME);
        n->d->text = jinja_expect(j, TOKEN_NAME, NULL, "a name");
    }
    if (jinja_take(j, TOKEN_OPERATOR, "=")) {
        n->a = jinja_parse_expression(j, true);
        close_tag(j);
        return n;
    }
    close_tag(j);
    n->b = parse_body(j, ends);
    expect_end(j, "endset");
    return n;
}

static jinja_node *parse_macro(jinja *j)
{
    static const char *const ends[] = {"endmacro", NULL};
    jinja_node *n = jinja_new_node(j, NODE_MACRO), **last = &n->a;
    n->text = jinja_expect(j, TOKEN_NAME, NULL, "a name");
    jinja_expect(j, TOKEN_OPERATOR, "(", "\"(\"");
    while (jinja_ok(j) && !jinja_take(j, TOKEN_OPERATOR, ")")) {
        jinja_node *parameter = jinja_new_node(j, NODE_ARGUMENT);
        parameter->text = jinja_expect(j, TOKEN_NAME, NULL, "a parameter's name");
        if (jinja_take(j, TOKEN_OPERATOR, "=")) parameter->a = jinja_parse_expression(j, true);
        *last = parameter;
        last = &parameter->next;
        if (!jinja_at(j, TOKEN_OPERATOR, ")")) jinja_expect(j, TOKEN_OPERATOR, ",", "\",\"");
    }
    close_tag(j);
    n->b = parse_body(j, ends);
    expect_end(j, "endmacro");
    return n;
}

static jinja_node *parse_leave(jinja *j, node_kind kind)
{
    jinja_node *n = jinja_new_node(j, kind);
    close_tag(j);
    return n;
}

// transformers marks what the assistant says with it; it writes its body.
static jinja_node *parse_generation(jinja *j)
{
    static const char *const ends[] = {"endgeneration", NULL};
    jinja_node *n = jinja_new_node(j, NODE_IF);
    close_tag(j);
    jinja_node *yes = jinja_new_node(j, NODE_LITERAL);
    yes->value = jinja_bool(true);
    n->a = yes;
    n->b = parse_body(j, ends);
    expect_end(j, "endgeneration");
    return n;
}

static jinja_node *parse_statement(jinja *j)
{
    if (jinja_take(j, TOKEN_NAME, "if")) return parse_if(j);
    if (jinja_take(j, TOKEN_NAME, "for")) return parse_for(j);
    if (jinja_take(j, TOKEN_NAME, "set")) return parse_set(j);
    if (jinja_take(j, TOKEN_NAME, "macro")) return parse_macro(j);
    if (jinja_take(j, TOKEN_NAME, "generation")) return parse_generation(j);
    if (jinja_take(j, TOKEN_NAME, "break")) return parse_leave(j, NODE_BREAK);
    if (jinja_take(j, TOKEN_NAME, "continue")) return parse_leave(j, NODE_CONTINUE);
    jinja_expect(j, TOKEN_NAME, "if", "a statement that is read here (if, for, set, macro)");
    return jinja_new_node(j, NODE_TEXT);
}

static jinja_node *parse_one(jinja *j)
{
    const token *t = jinja_peek(j);
    if (jinja_take(j, TOKEN_TEXT, NULL)) {
        jinja_node *n = jinja_new_node(j, NODE_TEXT);
        n->text = t->text;
        return n;
    }
    if (jinja_take(j, TOKEN_OUTPUT, NULL)) {
        jinja_node *n = jinja_new_node(j, NODE_OUTPUT);
        n->a = jinja_parse_expression(j, true);
        jinja_expect(j, TOKEN_OUTPUT_END, NULL, "\"}}\"");
        return n;
    }
    jinja_take(j, TOKEN_BLOCK, NULL);
    return parse_statement(j);
}

// Statements up to a tag with one of the names, or the template's end.
static jinja_node *parse_body(jinja *j, const char *const *ends)
{
    jinja_node *first = NULL, **last = &first;
    bool go_on = jinja_enter(j);
    while (go_on && jinja_ok(j) && !jinja_at(j, TOKEN_END, NULL) && !at_end_of_body(j, ends)) {
        *last = parse_one(j);
        last = &(*last)->next;
    }
    j->depth--;
    return first;
}

jinja_node *jinja_parse(jinja *j)
{
    static const char *const none[] = {NULL};
    return parse_body(j, none);
}
