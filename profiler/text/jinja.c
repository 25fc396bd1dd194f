// Runs the statements of a Jinja template, and makes what they see: one message of a user.
#include "profiler/text/jinja_parts.h"
#include "runtime/fail.h"
#include <string.h>

// ---- Scopes ----

static void open_scope(jinja *j, scope *inner, scope *outer)
{
    *inner = (scope){jinja_new(j, VALUE_DICT), outer};
    j->scope = inner;
}

// ---- Statements ----

static void run_output(jinja *j, const jinja_node *n)
{
    const jinja_value *v = jinja_evaluate(j, n->a);
    const jinja_value *text = jinja_ok(j) ? jinja_as_string(j, v) : v;
    if (jinja_ok(j)) jinja_append(j, j->out, text->text, text->size);
}

// What statements write, as a text.
static const jinja_value *capture(jinja *j, const jinja_node *body)
{
    jinja_text text = {0}, *outer = j->out;
    j->out = &text;
    jinja_run(j, body);
    j->out = outer;
    return jinja_string(j, text.data, text.size);
}

static void run_set(jinja *j, const jinja_node *n)
{
    const jinja_value *v;
    if (n->a) {
        v = jinja_evaluate(j, n->a);
    } else { // names that its body sets are its own
        scope inner, *outer = j->scope;
        open_scope(j, &inner, outer);
        v = capture(j, n->b);
        j->scope = outer;
    }
    if (!n->d) {
        jinja_dict_set(j, j->scope->names, n->text, v);
        return;
    }
    const jinja_value *space = NULL;
    for (const scope *s = j->scope; s && !space; s = s->outer) space = jinja_dict_get(s->names, n->text);
    if (space && space->kind == VALUE_NAMESPACE) jinja_dict_set(j, space->fields, n->d->text, v);
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
                  {"previtem", i ? list->items[i - 1] : jinja_undefined(j, "previtem")},
                  {"nextitem", i + 1 < list->size ? list->items[i + 1] : jinja_undefined(j, "nextitem")}};
    for (size_t k = 0; k < sizeof fields / sizeof *fields; k++)
        jinja_dict_set(j, loop, fields[k].name, fields[k].value);
    return loop;
}

// The loop's names for one item: one, or two that share a pair.
static void bind_item(jinja *j, const jinja_node *n, const jinja_value *one)
{
    if (!n->d) {
        jinja_dict_set(j, j->scope->names, n->text, one);
        return;
    }
    if (one->kind != VALUE_LIST || one->size != 2) {
        jinja_fail(j, "expected a pair for %s and %s, found %s", n->text, n->d->text, jinja_kind_name(one));
        return;
    }
    jinja_dict_set(j, j->scope->names, n->text, one->items[0]);
    jinja_dict_set(j, j->scope->names, n->d->text, one->items[1]);
}

// The items that the loop goes over: with "if", those that pass.
static const jinja_value *loop_items(jinja *j, const jinja_node *n)
{
    const jinja_value *all = jinja_as_list(j, jinja_evaluate(j, n->a));
    if (!n->e) return all;
    jinja_value *some = jinja_new(j, VALUE_LIST);
    scope inner, *outer = j->scope;
    for (size_t i = 0; i < all->size && jinja_ok(j); i++) {
        open_scope(j, &inner, outer);
        bind_item(j, n, all->items[i]);
        if (jinja_truth(jinja_evaluate(j, n->e))) jinja_list_add(j, some, all->items[i]);
        j->scope = outer;
    }
    return some;
}

static void run_for(jinja *j, const jinja_node *n)
{
    const jinja_value *list = loop_items(j, n);
    scope inner, *outer = j->scope;
    for (size_t i = 0; i < list->size && jinja_ok(j); i++) {
        open_scope(j, &inner, outer);
        jinja_dict_set(j, inner.names, "loop", loop_state(j, list, i));
        bind_item(j, n, list->items[i]);
        jinja_run(j, n->b);
        j->scope = outer;
        bool ends = j->leaving == NODE_BREAK;
        j->leaving = NODE_TEXT;
        if (ends) break;
    }
    if (list->size == 0) jinja_run(j, n->c);
}

static void run_macro(jinja *j, const jinja_node *n)
{
    jinja_value *macro = jinja_new(j, VALUE_MACRO);
    macro->node = n;
    macro->text = n->text;
    if (j->scope != j->root) jinja_fail(j, "a macro inside of a loop or macro");
    jinja_dict_set(j, j->scope->names, n->text, macro);
}

const jinja_value *jinja_call_macro(jinja *j, const jinja_value *macro, const jinja_arguments *args)
{
    scope inner, *outer = j->scope;
    size_t given = 0, named = 0;
    open_scope(j, &inner, j->root);
    for (const jinja_node *p = macro->node->a; p; p = p->next) {
        const jinja_value *by_name = jinja_dict_get(args->named, p->text), *v = by_name;
        named += by_name != NULL;
        if (given < args->n && !by_name) v = args->given[given++];
        if (!v) v = p->a ? jinja_evaluate(j, p->a) : jinja_undefined(j, p->text);
        jinja_dict_set(j, inner.names, p->text, v);
    }
    if (given < args->n || named < args->named->size) jinja_fail(j, "macro %s with more arguments", macro->text);
    const jinja_value *text = capture(j, macro->node->b);
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
        jinja_run(j, jinja_truth(jinja_evaluate(j, n->a)) ? n->b : n->c);
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

void jinja_run(jinja *j, const jinja_node *statements)
{
    bool go_on = jinja_enter(j);
    for (const jinja_node *n = statements; n && go_on; n = n->next) {
        j->line = n->line;
        run_one(j, n);
        go_on = jinja_ok(j) && j->leaving == NODE_TEXT;
        j->steps++;
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
        jinja_dict_set(j, names, functions[i], f);
    }
    jinja_dict_set(j, message, "role", jinja_string(j, "user", 4));
    jinja_dict_set(j, message, "content", jinja_string(j, in->message, strlen(in->message)));
    jinja_list_add(j, messages, message);
    jinja_dict_set(j, names, "messages", messages);
    jinja_dict_set(j, names, "add_generation_prompt", jinja_bool(true));
    jinja_dict_set(j, names, "tools", &jinja_none);
    jinja_dict_set(j, names, "documents", &jinja_none);
    if (in->bos) jinja_dict_set(j, names, "bos_token", jinja_string(j, in->bos, strlen(in->bos)));
    if (in->eos) jinja_dict_set(j, names, "eos_token", jinja_string(j, in->eos, strlen(in->eos)));
}

kvb_status jinja_render(char **out, const char *source, const jinja_input *in, const char *name, kvb_error *err)
{
    scope root = {0};
    jinja_text text = {0};
    jinja j = {.name = name, .err = err, .root = &root, .out = &text, .leaving = NODE_TEXT};
    *out = NULL;
    open_scope(&j, &root, NULL);
    set_globals(&j, in);
    jinja_read_tokens(&j, source);
    jinja_node *statements = jinja_parse(&j);
    jinja_run(&j, statements);
    if (j.status == KVB_OK && j.leaving != NODE_TEXT) jinja_fail(&j, "break or continue outside of a loop");
    if (j.status == KVB_OK) {
        *out = strndup(text.size ? text.data : "", text.size);
        if (!*out) j.status = kvb_fail(err, KVB_MEMORY, "%s: no memory for a chat template", name);
    }
    jinja_free(&j);
    return j.status;
}
