// A subset of Jinja, the language of chat templates: renders a template for one user message. No C library reads Jinja.
// Statements: if, for, set, macro, break, continue, generation; expressions: all but floats and powers; of filters,
// tests, methods and functions those that jinja.c lists. Spaces around tags follow transformers' settings (trim_blocks,
// lstrip_blocks). Nothing is guessed: an unknown construct fails when execution reaches it, and otherwise does not
// matter. Tested against Jinja2 itself (tests/golden/jinja.json).
#pragma once
#include "runtime/kvbudget.h"
#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct jinja_input {
    const char *message;   // messages is [{role: user, content: message}], add_generation_prompt is true
    const char *bos, *eos; // bos_token and eos_token; NULL: not defined
} jinja_input;

// Renders a template; `source` may be any bytes. The caller frees *out. The date is fixed to 26 July 2024 (model_text.h
// says why). `name` is the model, for messages. Fails with KVB_UNSUPPORTED, naming the line, if the template is broken,
// raises an exception, uses an unsupported construct, or takes too many steps or too much memory. On failure *out is
// NULL.
kvb_status jinja_render(char **out, const char *source, const jinja_input *in, const char *name, kvb_error *err);

typedef enum token_kind { // from here on: for jinja_parse.c, which makes the tree, and jinja.c above it, which runs it
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
    int64_t number;            // of a bool: 0 or 1; of a dict: 1 if it left out items whose keys are not texts
    const char *text;          // of a string; of a function or macro its name; ends with NUL
    const jinja_value **items; // of a list; of a dict: the values
    const char **keys;
    size_t size, room;        // of items; of a string: bytes
    const jinja_node *node;   // of a macro
    jinja_value *fields;      // of a namespace: a dict
    const char *missing_name; // of an undefined value: what is undefined
};

typedef struct jinja_text {
    char *data;
    size_t size, room;
} jinja_text;

typedef struct jinja {
    const char *name;
    kvb_error *err;
    jmp_buf stop;               // where jinja_fail jumps to
    struct arena_piece *pieces; // all allocations, freed at the end
    size_t used;                // bytes of all pieces
    size_t steps, spent;        // steps so far, and bytes not yet counted as a step
    int depth, line;
    token *tokens;
    size_t n_tokens, at;
    struct scope *root, *scope;
    jinja_text *out;
    node_kind leaving; // NODE_BREAK or NODE_CONTINUE while a loop is left, else NODE_TEXT
} jinja;

// Ends rendering with an error that names the template's line. Does not return.
_Noreturn void jinja_fail(jinja *j, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Counts one more level and one more step, and fails if that is too many. The caller must do j->depth-- afterwards.
void jinja_enter(jinja *j);
// Counts work in proportion to the size of values, so that the limit on steps bounds the time. STEP_BYTES are a step.
enum { STEP_BYTES = 256 };
void jinja_spend(jinja *j, size_t bytes);
void *jinja_alloc(jinja *j, size_t size); // zeros
void jinja_free(jinja *j);                // all of it
char *jinja_copy(jinja *j, const char *text, size_t size);
void jinja_append(jinja *j, jinja_text *to, const char *text, size_t size);

extern const jinja_value jinja_none;
jinja_value *jinja_new(jinja *j, value_kind kind);
const jinja_value *jinja_bool(bool yes);
const jinja_value *jinja_integer(jinja *j, int64_t number);
const jinja_value *jinja_string(jinja *j, const char *text, size_t size); // copies

jinja_node *jinja_parse(jinja *j, const char *source); // jinja_parse.c: the whole template's statements
