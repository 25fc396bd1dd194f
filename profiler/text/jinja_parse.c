// Parses a Jinja template: cuts it into texts and the tokens of its tags, then makes a tree of them by recursive
// descent. Before that comes what running it needs too: failures, limits on steps, memory, and plain values.
#include "formats/need.h"
#include "profiler/text/jinja.h"
#include "profiler/text/utf8.h"
#include "runtime/fail.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The longest templates that are published need less than a hundredth of these.
#define MAX_BYTES ((size_t)64 << 20)
#define MAX_STEPS 1000000
#define MAX_DEPTH 200

// ---- Failures, costs and memory ----

_Noreturn void jinja_fail(jinja *j, const char *format, ...)
{
    char what[300];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    (void)kvb_fail(j->err, KVB_UNSUPPORTED,
                   "%s: chat template, line %d: %s; wrap the texts yourself and give --special in the place of --chat",
                   j->name, j->line, what);
    longjmp(j->stop, 1);
}

void jinja_spend(jinja *j, size_t bytes)
{
    j->spent += bytes;
    j->steps += j->spent / STEP_BYTES;
    j->spent %= STEP_BYTES;
    if (j->steps > MAX_STEPS) jinja_fail(j, "more than %d steps", MAX_STEPS);
}

void jinja_enter(jinja *j)
{
    j->depth++;
    if (j->depth > MAX_DEPTH) jinja_fail(j, "more than %d nested levels", MAX_DEPTH);
    jinja_spend(j, STEP_BYTES);
}

typedef struct arena_piece {
    struct arena_piece *before;
    size_t size, used;
    _Alignas(max_align_t) char bytes[];
} arena_piece;

void *jinja_alloc(jinja *j, size_t size)
{
    enum { PIECE = 1 << 16 };
    arena_piece *p = j->pieces;
    if (size > MAX_BYTES) jinja_fail(j, "more than %zu bytes of memory", MAX_BYTES);
    size = (size + sizeof(max_align_t) - 1) / sizeof(max_align_t) * sizeof(max_align_t);
    if (!p || size > p->size - p->used) {
        size_t room = size > PIECE ? size : PIECE;
        if (j->used + room > MAX_BYTES) jinja_fail(j, "more than %zu bytes of memory", MAX_BYTES);
        p = need(1, sizeof *p + room, "pieces of a chat template's values");
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
    char *copy = jinja_alloc(j, size + 1);
    if (size) memcpy(copy, text, size);
    return copy;
}

void jinja_append(jinja *j, jinja_text *to, const char *text, size_t size)
{
    if (size > to->room - to->size) {
        size_t room = 2 * (to->size + size) + 64;
        char *data = jinja_alloc(j, room);
        if (to->size) memcpy(data, to->data, to->size);
        to->data = data;
        to->room = room;
    }
    if (size) memcpy(to->data + to->size, text, size);
    to->size += size;
}

// ---- Plain values ----

const jinja_value jinja_none = {.kind = VALUE_NONE, .text = ""};
static const jinja_value yes_value = {.kind = VALUE_BOOL, .number = 1, .text = ""};
static const jinja_value no_value = {.kind = VALUE_BOOL, .text = ""};

jinja_value *jinja_new(jinja *j, value_kind kind)
{
    jinja_value *v = jinja_alloc(j, sizeof *v);
    v->kind = kind;
    v->text = "";
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
    v->size = size;
    return v;
}

// ---- Tokens ----
//
// Which spaces around tags are written is decided here, as Jinja2's lexer does with trim_blocks and lstrip_blocks,
// which transformers sets.

typedef struct lexer {
    jinja *j;
    const char *p, *end;
    size_t room;
    bool line_begins; // the last tag removed the line end behind it, or there was no tag yet
} lexer;

static bool is_space(char c)
{
    return c && strchr(" \t\n\v\f\r", c);
}

static bool is_name(char c, bool first)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (!first && c >= '0' && c <= '9');
}

static bool starts(const lexer *l, const char *with)
{
    size_t n = strlen(with);
    return (size_t)(l->end - l->p) >= n && memcmp(l->p, with, n) == 0;
}

static void add_token(lexer *l, token_kind kind, const char *text, size_t size)
{
    jinja *j = l->j;
    if (j->n_tokens == l->room) {
        size_t room = 2 * l->room + 256;
        token *more = jinja_alloc(j, room * sizeof *more);
        if (j->n_tokens) memcpy(more, j->tokens, j->n_tokens * sizeof *more);
        j->tokens = more;
        l->room = room;
    }
    j->tokens[j->n_tokens++] = (token){kind, j->line, jinja_copy(j, text, size), size};
}

// Moves to `to`, counting lines.
static void skip_to(lexer *l, const char *to)
{
    for (; l->p < to; l->p++) l->j->line += *l->p == '\n';
}

// Skips the spaces behind a tag that it removes: all of them, or only a line end.
static void skip_behind(lexer *l, bool all, bool line_end)
{
    const char *p = l->p;
    if (all) p += utf8_spaces_before(p, (size_t)(l->end - p));
    else if (line_end && p < l->end && *p == '\n') p++;
    l->line_begins = p > l->p && p[-1] == '\n';
    skip_to(l, p);
}

// Adds the text in front of a tag (or of the template's end), without the spaces that the tag removes.
static void add_text_token(lexer *l, const char *to)
{
    const char *begin = l->p, *end = to;
    if (to < l->end) {
        char kind = to[1], sign = to + 2 < l->end ? to[2] : ' ';
        if (sign == '-') {
            end -= utf8_spaces_behind(begin, (size_t)(end - begin));
        } else if (sign != '+' && kind != '{') {
            const char *line = end;
            while (line > begin && line[-1] != '\n') line--;
            bool blank = utf8_spaces_before(line, (size_t)(end - line)) == (size_t)(end - line);
            if (blank && (line > begin || l->line_begins)) end = line;
        }
    }
    if (end > begin) add_token(l, TOKEN_TEXT, begin, (size_t)(end - begin));
    skip_to(l, to);
}

static void read_comment(lexer *l)
{
    const char *close = memmem(l->p, (size_t)(l->end - l->p), "#}", 2);
    if (!close) jinja_fail(l->j, "a comment without end");
    char sign = close[-1];
    skip_to(l, close + 2);
    skip_behind(l, sign == '-', sign != '+');
}

// ---- Tokens inside tags ----

// Returns the character that an escape with the letter `c` stands for; -1 if it is not supported.
static int unescape(char c)
{
    static const char letters[] = "nrt\\'\"", stand_for[] = "\n\r\t\\'\"";
    const char *found = c ? strchr(letters, c) : NULL;
    return found ? stand_for[found - letters] : -1;
}

static void read_string(lexer *l)
{
    jinja_text text = {0};
    const char *p = l->p + 1;
    for (; p < l->end && *p != *l->p; p++) {
        int c = (unsigned char)*p;
        if (c == '\\') {
            p++;
            c = p < l->end ? unescape(*p) : -1;
        }
        if (c < 0) jinja_fail(l->j, "a text holds an escape that is not supported");
        char byte = (char)c;
        jinja_append(l->j, &text, &byte, 1);
    }
    if (p >= l->end) jinja_fail(l->j, "a text without its closing quote");
    add_token(l, TOKEN_STRING, text.data, text.size);
    skip_to(l, p + 1);
}

static void read_number(lexer *l)
{
    const char *p = l->p;
    while (p < l->end && *p >= '0' && *p <= '9') p++;
    bool whole = p == l->end || !(is_name(*p, true) || (*p == '.' && p + 1 < l->end && p[1] >= '0' && p[1] <= '9'));
    if (!whole || p - l->p > 9) jinja_fail(l->j, "a number that is not read here; expected a whole one below 1e9");
    add_token(l, TOKEN_INTEGER, l->p, (size_t)(p - l->p));
    l->p = p;
}

static void read_operator(lexer *l, int *open)
{
    static const char *const long_ones[] = {"==", "!=", "<=", ">=", "//", "**"};
    static const char short_ones[] = "+-*/%~|.,:()[]{}=<>";
    size_t size = 0;
    for (size_t i = 0; i < sizeof long_ones / sizeof *long_ones; i++)
        if (starts(l, long_ones[i])) size = 2;
    if (!size && *l->p && strchr(short_ones, *l->p)) size = 1;
    if (!size) jinja_fail(l->j, "character %d in a tag", (unsigned char)*l->p);
    if (strchr("([{", *l->p)) ++*open;
    if (strchr(")]}", *l->p)) --*open;
    add_token(l, TOKEN_OPERATOR, l->p, size);
    l->p += size;
}

// Whether the tag ends here. *sign receives the '-' or '+' in front of its end, or a space.
static bool at_tag_end(const lexer *l, char kind, char *sign)
{
    const char *p = l->p;
    *sign = ' ';
    if (*p == '-' || (*p == '+' && kind == '%')) *sign = *p++;
    return l->end - p >= 2 && p[0] == (kind == '%' ? '%' : '}') && p[1] == '}';
}

static void read_tag(lexer *l, char kind)
{
    int open = 0;
    char sign = ' ';
    add_token(l, kind == '%' ? TOKEN_BLOCK : TOKEN_OUTPUT, "", 0);
    for (;;) {
        while (l->p < l->end && is_space(*l->p)) skip_to(l, l->p + 1);
        if (l->p == l->end) jinja_fail(l->j, "a tag without end");
        if (!open && at_tag_end(l, kind, &sign)) break;
        if (*l->p == '\'' || *l->p == '"') {
            read_string(l);
        } else if (*l->p >= '0' && *l->p <= '9') {
            read_number(l);
        } else if (is_name(*l->p, true)) {
            const char *begin = l->p;
            while (l->p < l->end && is_name(*l->p, false)) l->p++;
            add_token(l, TOKEN_NAME, begin, (size_t)(l->p - begin));
        } else {
            read_operator(l, &open);
        }
    }
    add_token(l, kind == '%' ? TOKEN_BLOCK_END : TOKEN_OUTPUT_END, "", 0);
    l->p += sign == ' ' ? 2 : 3;
    skip_behind(l, sign == '-', kind == '%' && sign != '+');
}

// Returns the first tag from p on, or the end.
static const char *find_tag(const char *p, const char *end)
{
    for (; end - p >= 2; p++)
        if (p[0] == '{' && (p[1] == '{' || p[1] == '%' || p[1] == '#')) return p;
    return end;
}

// Returns the source with line ends of one byte, and without the last one, as Jinja2 reads it.
static const char *with_line_ends(jinja *j, const char *source, size_t *size)
{
    char *text = jinja_copy(j, source, strlen(source));
    size_t n = 0;
    for (const char *p = source; *p; p++) {
        if (*p == '\r' && p[1] == '\n') continue;
        text[n++] = *p == '\r' ? '\n' : *p;
    }
    if (n && text[n - 1] == '\n') n--;
    *size = n;
    return text;
}

static void read_template_tokens(jinja *j, const char *source)
{
    size_t size;
    const char *text = with_line_ends(j, source, &size);
    lexer l = {.j = j, .p = text, .end = text + size, .line_begins = true};
    j->line = 1;
    while (l.p < l.end) {
        const char *tag = find_tag(l.p, l.end);
        add_text_token(&l, tag);
        if (tag == l.end) break;
        char kind = tag[1], sign = tag + 2 < l.end ? tag[2] : ' ';
        l.p += 2;
        if (kind == '#') {
            read_comment(&l);
            continue;
        }
        if (sign == '-' || sign == '+') l.p++;
        read_tag(&l, kind);
    }
    add_token(&l, TOKEN_END, "", 0);
}

// ---- Taking tokens ----

static const token *peek(const jinja *j)
{
    return &j->tokens[j->at];
}

static bool at(const jinja *j, token_kind kind, const char *text)
{
    const token *t = peek(j);
    return t->kind == kind && (!text || strcmp(t->text, text) == 0);
}

static bool take(jinja *j, token_kind kind, const char *text)
{
    if (!at(j, kind, text)) return false;
    j->line = j->tokens[j->at].line;
    if (kind != TOKEN_END) j->at++;
    return true;
}

static const char *expect(jinja *j, token_kind kind, const char *text, const char *what)
{
    const token *t = peek(j);
    if (take(j, kind, text)) return t->text;
    j->line = t->line;
    jinja_fail(j, "expected %s, found \"%.40s\"", what, t->text);
}

static jinja_node *new_node(jinja *j, node_kind kind)
{
    jinja_node *n = jinja_alloc(j, sizeof *n);
    *n = (jinja_node){.kind = kind, .line = j->line, .text = ""};
    return n;
}

static bool take_operator(jinja *j, const char *text)
{
    return take(j, TOKEN_OPERATOR, text);
}

static jinja_node *join_nodes(jinja *j, node_kind kind, const char *text, jinja_node *a, jinja_node *b)
{
    jinja_node *n = new_node(j, kind);
    n->text = text;
    n->a = a;
    n->b = b;
    return n;
}

static jinja_node *parse_expression(jinja *j, bool with_condition);

// ---- Expressions: atoms. The order of the functions is Jinja2's precedence ----

typedef enum item_form { ITEMS_PLAIN, ITEMS_PAIRS, ITEMS_NAMED } item_form; // of lists, dicts and calls

// Parses items up to `close`, with commas between them.
static jinja_node *parse_items(jinja *j, const char *close, item_form form)
{
    jinja_node *first = NULL, **last = &first;
    while (!take_operator(j, close)) {
        jinja_node *n = *last = new_node(j, NODE_ARGUMENT);
        const token *t = peek(j);
        if (form == ITEMS_NAMED && t->kind == TOKEN_NAME && t[1].kind == TOKEN_OPERATOR &&
            strcmp(t[1].text, "=") == 0) {
            n->text = t->text;
            j->at += 2;
        }
        n->a = parse_expression(j, true);
        if (form == ITEMS_PAIRS) {
            expect(j, TOKEN_OPERATOR, ":", "\":\"");
            n->b = parse_expression(j, true);
        }
        last = &n->next;
        if (!at(j, TOKEN_OPERATOR, close)) expect(j, TOKEN_OPERATOR, ",", "\",\"");
    }
    return first;
}

// Parses what follows "(": an expression, or a tuple, which becomes a list.
static jinja_node *parse_brackets(jinja *j)
{
    if (take_operator(j, ")")) return new_node(j, NODE_LIST);
    jinja_node *inner = parse_expression(j, true);
    if (take_operator(j, ")")) return inner;
    expect(j, TOKEN_OPERATOR, ",", "\")\"");
    jinja_node *list = new_node(j, NODE_LIST);
    list->a = join_nodes(j, NODE_ARGUMENT, "", inner, NULL);
    list->a->next = parse_items(j, ")", ITEMS_PLAIN);
    return list;
}

static jinja_node *parse_name(jinja *j)
{
    static const struct {
        const char *name;
        int value; // -1: none
    } words[] = {{"true", 1}, {"True", 1}, {"false", 0}, {"False", 0}, {"none", -1}, {"None", -1}};
    const char *name = expect(j, TOKEN_NAME, NULL, "a name");
    jinja_node *n = new_node(j, NODE_NAME);
    n->text = name;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(name, words[i].name) == 0) {
            n->kind = NODE_LITERAL;
            n->value = words[i].value < 0 ? &jinja_none : jinja_bool(words[i].value);
        }
    return n;
}

// Texts next to each other are joined.
static jinja_node *parse_string(jinja *j)
{
    jinja_text text = {0};
    while (at(j, TOKEN_STRING, NULL)) {
        const token *t = peek(j);
        jinja_append(j, &text, t->text, t->size);
        take(j, TOKEN_STRING, NULL);
    }
    jinja_node *n = new_node(j, NODE_LITERAL);
    n->value = jinja_string(j, text.data, text.size);
    return n;
}

static jinja_node *parse_atom(jinja *j)
{
    const token *t = peek(j);
    if (t->kind == TOKEN_STRING) return parse_string(j);
    if (take(j, TOKEN_INTEGER, NULL)) {
        jinja_node *n = new_node(j, NODE_LITERAL);
        n->value = jinja_integer(j, strtoll(t->text, NULL, 10));
        return n;
    }
    if (take_operator(j, "(")) return parse_brackets(j);
    bool list = at(j, TOKEN_OPERATOR, "[");
    if (!list && !at(j, TOKEN_OPERATOR, "{")) return parse_name(j);
    take(j, TOKEN_OPERATOR, NULL);
    jinja_node *n = new_node(j, list ? NODE_LIST : NODE_DICT);
    n->a = parse_items(j, list ? "]" : "}", list ? ITEMS_PLAIN : ITEMS_PAIRS);
    return n;
}

// ---- What follows an atom ----

// Parses a part of a slice. Returns NULL if it is left out.
static jinja_node *parse_bound(jinja *j)
{
    bool none = at(j, TOKEN_OPERATOR, ":") || at(j, TOKEN_OPERATOR, "]");
    return none ? NULL : parse_expression(j, true);
}

// Parses what follows "[".
static jinja_node *parse_subscript(jinja *j, jinja_node *of)
{
    jinja_node *first = parse_bound(j), *n = join_nodes(j, NODE_ITEM, "", of, first);
    if (take_operator(j, ":")) {
        n->kind = NODE_SLICE;
        n->c = parse_bound(j);
        if (take_operator(j, ":")) n->d = parse_bound(j);
    } else if (!first) {
        jinja_fail(j, "expected a subscript");
    }
    expect(j, TOKEN_OPERATOR, "]", "\"]\"");
    return n;
}

static jinja_node *parse_postfix(jinja *j, jinja_node *n)
{
    for (;;) {
        if (take_operator(j, ".")) n = join_nodes(j, NODE_ATTRIBUTE, expect(j, TOKEN_NAME, NULL, "a name"), n, NULL);
        else if (take_operator(j, "[")) n = parse_subscript(j, n);
        else if (take_operator(j, "(")) n = join_nodes(j, NODE_CALL, "", n, parse_items(j, ")", ITEMS_NAMED));
        else break;
    }
    return n;
}

// Whether an argument without brackets follows a test's name ("is divisibleby 3").
static bool argument_follows(const jinja *j)
{
    const token *t = peek(j);
    bool word = t->kind == TOKEN_NAME && strcmp(t->text, "else") != 0 && strcmp(t->text, "or") != 0 &&
                strcmp(t->text, "and") != 0 && strcmp(t->text, "is") != 0 && strcmp(t->text, "if") != 0 &&
                strcmp(t->text, "in") != 0 && strcmp(t->text, "not") != 0;
    return word || t->kind == TOKEN_STRING || t->kind == TOKEN_INTEGER ||
           (t->kind == TOKEN_OPERATOR && (*t->text == '[' || *t->text == '{'));
}

static jinja_node *parse_test(jinja *j, jinja_node *of)
{
    bool negated = take(j, TOKEN_NAME, "not");
    jinja_node *n = join_nodes(j, NODE_TEST, expect(j, TOKEN_NAME, NULL, "a test's name"), of, NULL);
    if (take_operator(j, "(")) {
        n->b = parse_items(j, ")", ITEMS_NAMED);
    } else if (argument_follows(j)) {
        n->b = new_node(j, NODE_ARGUMENT);
        n->b->a = parse_postfix(j, parse_atom(j));
    }
    return negated ? join_nodes(j, NODE_NOT, "", n, NULL) : n;
}

static jinja_node *parse_filters(jinja *j, jinja_node *n)
{
    for (;;) {
        if (take_operator(j, "|")) {
            n = join_nodes(j, NODE_FILTER, expect(j, TOKEN_NAME, NULL, "a filter's name"), n, NULL);
            if (take_operator(j, "(")) n->b = parse_items(j, ")", ITEMS_NAMED);
        } else if (take(j, TOKEN_NAME, "is")) {
            n = parse_test(j, n);
        } else if (take_operator(j, "(")) { // calls what a filter or test returned
            n = join_nodes(j, NODE_CALL, "", n, parse_items(j, ")", ITEMS_NAMED));
        } else {
            break;
        }
    }
    return n;
}

static jinja_node *parse_unary(jinja *j, bool with_filters)
{
    jinja_enter(j);
    jinja_node *n = take_operator(j, "-") ? join_nodes(j, NODE_MINUS, "", parse_unary(j, false), NULL)
                                          : parse_postfix(j, parse_atom(j));
    j->depth--;
    return with_filters ? parse_filters(j, n) : n;
}

// ---- Operators ----

// From the loosest to the tightest; "not" stands before its only operand.
enum { LEVEL_NOT = 2, LEVEL_COMPARISON, N_LEVELS = 7 };
static const char *const levels[N_LEVELS][8] = {
    {"or"}, {"and"}, {"not"}, {"==", "!=", "<=", ">=", "<", ">", "in"}, {"+", "-"}, {"~"}, {"*", "//", "%", "/", "**"}};

// Takes an operator of the level, if one comes next. Returns it, or NULL.
static const char *take_of(jinja *j, int level)
{
    for (const char *const *text = levels[level]; *text; text++)
        if (take(j, is_name(**text, true) ? TOKEN_NAME : TOKEN_OPERATOR, *text)) return *text;
    return NULL;
}

static jinja_node *parse_level(jinja *j, int level)
{
    if (level == N_LEVELS) return parse_unary(j, true);
    if (level == LEVEL_NOT && take_of(j, level)) {
        jinja_enter(j);
        jinja_node *of = parse_level(j, level);
        j->depth--;
        return join_nodes(j, NODE_NOT, "", of, NULL);
    }
    jinja_node *n = parse_level(j, level + 1);
    for (int found = 0; level != LEVEL_NOT; found++) {
        bool outside = level == LEVEL_COMPARISON && at(j, TOKEN_NAME, "not") && peek(j)[1].kind == TOKEN_NAME &&
                       strcmp(peek(j)[1].text, "in") == 0;
        if (outside) j->at++;
        const char *text = take_of(j, level);
        if (!text) break;
        // Comparisons in a row are refused: hardly anybody writes them in a template.
        if (found && level == LEVEL_COMPARISON) jinja_fail(j, "comparisons in a row");
        n = join_nodes(j, NODE_BINARY, text, n, parse_level(j, level + 1));
        if (outside) n = join_nodes(j, NODE_NOT, "", n, NULL);
    }
    return n;
}

static jinja_node *parse_expression(jinja *j, bool with_condition)
{
    jinja_enter(j);
    jinja_node *n = parse_level(j, 0);
    if (with_condition && take(j, TOKEN_NAME, "if")) {
        n = join_nodes(j, NODE_CONDITION, "", n, parse_level(j, 0));
        if (take(j, TOKEN_NAME, "else")) n->c = parse_expression(j, true);
    }
    j->depth--;
    return n;
}

// ---- Statements ----

static jinja_node *parse_body(jinja *j, const char *const *ends);

// Takes the end of a tag, "%}".
static void close_tag(jinja *j)
{
    expect(j, TOKEN_BLOCK_END, NULL, "the end of the tag");
}

// Whether "{% name" comes next, with one of the names. Takes nothing.
static bool at_end_of_body(const jinja *j, const char *const *ends)
{
    if (!at(j, TOKEN_BLOCK, NULL)) return false;
    for (; *ends; ends++)
        if (peek(j)[1].kind == TOKEN_NAME && strcmp(peek(j)[1].text, *ends) == 0) return true;
    return false;
}

// Takes "{% name" if it comes next. Returns whether it did.
static bool take_end(jinja *j, const char *name)
{
    const char *const ends[] = {name, NULL};
    if (!at_end_of_body(j, ends)) return false;
    take(j, TOKEN_BLOCK, NULL);
    return take(j, TOKEN_NAME, name);
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
        jinja_node *n = *place = new_node(j, NODE_IF);
        n->a = parse_expression(j, true);
        close_tag(j);
        n->b = parse_body(j, ends);
        place = &n->c;
    } while (take_end(j, "elif"));
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
    jinja_node *n = new_node(j, NODE_FOR);
    n->text = expect(j, TOKEN_NAME, NULL, "a name");
    if (take(j, TOKEN_OPERATOR, ",")) {
        n->d = new_node(j, NODE_NAME);
        n->d->text = expect(j, TOKEN_NAME, NULL, "a name");
    }
    expect(j, TOKEN_NAME, "in", "\"in\"");
    n->a = parse_expression(j, false);
    if (take(j, TOKEN_NAME, "if")) n->e = parse_expression(j, true);
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
    jinja_node *n = new_node(j, NODE_SET);
    n->text = expect(j, TOKEN_NAME, NULL, "a name");
    if (take(j, TOKEN_OPERATOR, ".")) {
        n->d = new_node(j, NODE_NAME);
        n->d->text = expect(j, TOKEN_NAME, NULL, "a name");
    }
    if (take(j, TOKEN_OPERATOR, "=")) {
        n->a = parse_expression(j, true);
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
    jinja_node *n = new_node(j, NODE_MACRO), **last = &n->a;
    n->text = expect(j, TOKEN_NAME, NULL, "a name");
    expect(j, TOKEN_OPERATOR, "(", "\"(\"");
    while (!take(j, TOKEN_OPERATOR, ")")) {
        jinja_node *parameter = new_node(j, NODE_ARGUMENT);
        parameter->text = expect(j, TOKEN_NAME, NULL, "a parameter's name");
        if (take(j, TOKEN_OPERATOR, "=")) parameter->a = parse_expression(j, true);
        *last = parameter;
        last = &parameter->next;
        if (!at(j, TOKEN_OPERATOR, ")")) expect(j, TOKEN_OPERATOR, ",", "\",\"");
    }
    close_tag(j);
    n->b = parse_body(j, ends);
    expect_end(j, "endmacro");
    return n;
}

static jinja_node *parse_leave(jinja *j, node_kind kind)
{
    jinja_node *n = new_node(j, kind);
    close_tag(j);
    return n;
}

// Parses the tag with which transformers marks what the assistant says; it only writes its body.
static jinja_node *parse_generation(jinja *j)
{
    static const char *const ends[] = {"endgeneration", NULL};
    jinja_node *n = new_node(j, NODE_IF);
    close_tag(j);
    jinja_node *yes = new_node(j, NODE_LITERAL);
    yes->value = jinja_bool(true);
    n->a = yes;
    n->b = parse_body(j, ends);
    expect_end(j, "endgeneration");
    return n;
}

static jinja_node *parse_statement(jinja *j)
{
    if (take(j, TOKEN_NAME, "if")) return parse_if(j);
    if (take(j, TOKEN_NAME, "for")) return parse_for(j);
    if (take(j, TOKEN_NAME, "set")) return parse_set(j);
    if (take(j, TOKEN_NAME, "macro")) return parse_macro(j);
    if (take(j, TOKEN_NAME, "generation")) return parse_generation(j);
    if (take(j, TOKEN_NAME, "break")) return parse_leave(j, NODE_BREAK);
    if (take(j, TOKEN_NAME, "continue")) return parse_leave(j, NODE_CONTINUE);
    expect(j, TOKEN_NAME, "if", "a statement that is read here (if, for, set, macro)");
    return NULL;
}

static jinja_node *parse_one(jinja *j)
{
    const token *t = peek(j);
    if (take(j, TOKEN_TEXT, NULL)) {
        jinja_node *n = new_node(j, NODE_TEXT);
        n->text = t->text;
        return n;
    }
    if (take(j, TOKEN_OUTPUT, NULL)) {
        jinja_node *n = new_node(j, NODE_OUTPUT);
        n->a = parse_expression(j, true);
        expect(j, TOKEN_OUTPUT_END, NULL, "\"}}\"");
        return n;
    }
    take(j, TOKEN_BLOCK, NULL);
    return parse_statement(j);
}

// Parses statements up to a tag with one of the names, or the template's end.
static jinja_node *parse_body(jinja *j, const char *const *ends)
{
    jinja_node *first = NULL, **last = &first;
    jinja_enter(j);
    while (!at(j, TOKEN_END, NULL) && !at_end_of_body(j, ends)) {
        *last = parse_one(j);
        last = &(*last)->next;
    }
    j->depth--;
    return first;
}

jinja_node *jinja_parse(jinja *j, const char *source)
{
    read_template_tokens(j, source);
    static const char *const none[] = {NULL};
    return parse_body(j, none);
}
