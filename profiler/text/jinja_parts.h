// What the files of the Jinja reader share: tokens, the tree of a template, values. All of it lies in one arena that is
// freed at the end. A failure is kept in `jinja.status`, the first one counts; until somebody looks at it, functions
// hand on harmless values (undefined, an unused node), so that expressions need no check after each step.
#pragma once
#include "profiler/text/jinja.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// ---- Tokens and the tree ----

typedef enum token_kind {
    TOKEN_END,
    TOKEN_TEXT, // between tags
    TOKEN_OUTPUT,
    TOKEN_OUTPUT_END,
    TOKEN_BLOCK,
    TOKEN_BLOCK_END,
    TOKEN_NAME,
    TOKEN_STRING, // escapes undone
    TOKEN_INTEGER,
    TOKEN_OPERATOR
} token_kind;

typedef struct token {
    token_kind kind;
    int line;
    const char *text; // ends with NUL
    size_t size;
} token;

typedef enum node_kind {
    NODE_LITERAL, // value
    NODE_NAME,
    NODE_LIST,      // a: items
    NODE_DICT,      // a: keys, each with its value in b
    NODE_ATTRIBUTE, // a.text
    NODE_ITEM,      // a[b]
    NODE_SLICE,     // a[b:c:d], each may be NULL
    NODE_CALL,      // a(b), b: arguments; a named one has its name in `text`, its value in a
    NODE_ARGUMENT,
    NODE_FILTER, // a | text(b)
    NODE_TEST,   // a is text(b)
    NODE_NOT,
    NODE_MINUS,
    NODE_BINARY,    // a text b
    NODE_CONDITION, // a if b else c
    NODE_TEXT,      // of statements: the text itself
    NODE_OUTPUT,    // a
    NODE_IF,        // if a: b, else: c
    NODE_FOR,       // for text (, d->text) in a if e: b, else: c
    NODE_SET,       // text (.d->text) = a, or the text that b makes
    NODE_MACRO,     // text(a): b; parameters are arguments, their value a default
    NODE_BREAK,
    NODE_CONTINUE
} node_kind;

typedef struct jinja_value jinja_value;
typedef struct jinja_node jinja_node;
struct jinja_node {
    node_kind kind;
    int line;
    const char *text;
    jinja_node *a, *b, *c, *d, *e;
    jinja_node *next; // in a list of items, arguments or statements
    const jinja_value *value;
};

// ---- Values ----

typedef enum value_kind {
    VALUE_UNDEFINED,
    VALUE_NONE,
    VALUE_BOOL,
    VALUE_INTEGER,
    VALUE_STRING,
    VALUE_LIST,
    VALUE_DICT,
    VALUE_NAMESPACE, // what `set` may change
    VALUE_FUNCTION,
    VALUE_MACRO
} value_kind;

struct jinja_value {
    value_kind kind;
    int64_t number;            // of a bool: 0 or 1; of a dict: 1 if it left out items whose keys are no texts
    const char *text;          // of a string; of a function or macro its name; ends with NUL
    const jinja_value **items; // of a list; of a dict: the values
    const char **keys;
    size_t size, room;        // of items; of a string: bytes
    const jinja_node *node;   // of a macro
    jinja_value *fields;      // of a namespace: a dict
    const char *missing_name; // of what is undefined
};

typedef struct jinja_text {
    char *data;
    size_t size, room;
} jinja_text;

typedef struct scope {
    jinja_value *names; // a dict
    struct scope *outer;
} scope;

typedef struct jinja {
    const char *name;
    kvb_error *err;
    kvb_status status;
    struct arena_piece *pieces;
    size_t used, steps; // bytes of all pieces, and what was evaluated
    int depth, line;
    jinja_node spare; // what there is no memory for
    token *tokens;
    size_t n_tokens, at;
    scope *root, *scope;
    jinja_text *out;
    node_kind leaving; // NODE_BREAK or NODE_CONTINUE while a loop is left, else NODE_TEXT
} jinja;

typedef struct jinja_arguments {
    const jinja_value *given[8]; // by position
    size_t n;
    jinja_value *named; // a dict
} jinja_arguments;

// ---- jinja_values.c ----

// Records a failure with the template's line (the first one only).
void jinja_fail(jinja *j, const char *format, ...) __attribute__((format(printf, 2, 3)));
bool jinja_ok(const jinja *j);
// One level deeper, one step more: false where that is too many, which is a failure. Followed by j->depth--.
bool jinja_enter(jinja *j);
void *jinja_alloc(jinja *j, size_t size); // zeros; NULL: a failure
void jinja_free(jinja *j);                // all pieces
char *jinja_copy(jinja *j, const char *text, size_t size);
void jinja_append(jinja *j, jinja_text *to, const char *text, size_t size);

extern const jinja_value jinja_none;
const jinja_value *jinja_undefined(jinja *j, const char *name);
const jinja_value *jinja_bool(bool yes);
const jinja_value *jinja_integer(jinja *j, int64_t number);
const jinja_value *jinja_string(jinja *j, const char *text, size_t size); // copies
jinja_value *jinja_new(jinja *j, value_kind kind);                        // never NULL
void jinja_list_add(jinja *j, jinja_value *list, const jinja_value *item);
void jinja_dict_set(jinja *j, jinja_value *dict, const char *key, const jinja_value *value);
const jinja_value *jinja_dict_get(const jinja_value *dict, const char *key); // NULL: there is none
bool jinja_truth(const jinja_value *v);
bool jinja_equal(jinja *j, const jinja_value *x, const jinja_value *y);
const jinja_value *jinja_as_string(jinja *j, const jinja_value *v); // as {{ }} writes it
// The list's items, a dict's keys, a string's characters, as a list.
const jinja_value *jinja_as_list(jinja *j, const jinja_value *v);
bool jinja_contains(jinja *j, const jinja_value *container, const jinja_value *v);
const char *jinja_kind_name(const jinja_value *v);

// ---- The other files ----

void jinja_read_tokens(jinja *j, const char *source);              // jinja_lexer.c
jinja_node *jinja_parse(jinja *j);                                 // jinja_parser.c: the whole template
jinja_node *jinja_parse_expression(jinja *j, bool with_condition); // jinja_expression.c
const token *jinja_peek(const jinja *j);                           // jinja_expression.c, as the next four
bool jinja_at(const jinja *j, token_kind kind, const char *text);  // text NULL: any
bool jinja_take(jinja *j, token_kind kind, const char *text);      // moves on if it is there
const char *jinja_expect(jinja *j, token_kind kind, const char *text, const char *what); // its text; else a failure
jinja_node *jinja_new_node(jinja *j, node_kind kind);                                    // never NULL
jinja_node *jinja_parse_arguments(jinja *j);                                             // behind "("
const jinja_value *jinja_evaluate(jinja *j, const jinja_node *node);                     // jinja_evaluate.c
const jinja_value *jinja_attribute(jinja *j, const jinja_value *of, const char *name);
void jinja_run(jinja *j, const jinja_node *statements); // jinja.c
const jinja_value *jinja_call_macro(jinja *j, const jinja_value *macro, const jinja_arguments *args);
// jinja_builtins.c: by name; a name that is not known is a failure.
const jinja_value *jinja_filter(jinja *j, const char *name, const jinja_value *v, const jinja_arguments *args);
bool jinja_test(jinja *j, const char *name, const jinja_value *v, const jinja_value *argument);
const jinja_value *jinja_function(jinja *j, const char *name, const jinja_arguments *args);
// jinja_methods.c
bool jinja_is_method(const jinja_value *of, const char *name);
const jinja_value *jinja_method(jinja *j, const jinja_value *of, const char *name, const jinja_arguments *args);
// Without the bytes of `set` at its ends; NULL: without spaces.
const jinja_value *jinja_strip(jinja *j, const jinja_value *v, const char *set, bool left, bool right);
