// Cuts a template into texts and the tokens of its tags. Which spaces around tags are written is decided here, as
// Jinja2's lexer does with trim_blocks and lstrip_blocks, which transformers sets.
#include "profiler/text/jinja_parts.h"
#include "profiler/text/utf8.h"
#include <string.h>

typedef struct lexer {
    jinja *j;
    const char *p, *end;
    size_t room;
    bool line_begins; // the last tag took a line end with it, or there was none yet
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

static void add(lexer *l, token_kind kind, const char *text, size_t size)
{
    jinja *j = l->j;
    if (!jinja_ok(j)) return;
    if (j->n_tokens == l->room) {
        size_t room = 2 * l->room + 256;
        token *more = jinja_alloc(j, room * sizeof *more);
        if (!more) return;
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

// The spaces behind a tag that it takes with it: all with '-', the line end behind a block or comment.
static void skip_behind(lexer *l, bool all, bool line_end)
{
    const char *p = l->p;
    if (all) p += utf8_spaces_before(p, (size_t)(l->end - p));
    else if (line_end && p < l->end && *p == '\n') p++;
    l->line_begins = p > l->p && p[-1] == '\n';
    skip_to(l, p);
}

// The text in front of a tag (or of the template's end), without the spaces that the tag takes with it.
static void add_text(lexer *l, const char *to)
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
    if (end > begin) add(l, TOKEN_TEXT, begin, (size_t)(end - begin));
    skip_to(l, to);
}

static void read_comment(lexer *l)
{
    const char *close = memmem(l->p, (size_t)(l->end - l->p), "#}", 2);
    if (!close) {
        jinja_fail(l->j, "a comment without end");
        return;
    }
    char sign = close[-1];
    skip_to(l, close + 2);
    skip_behind(l, sign == '-', sign != '+');
}

// ---- Inside tags ----

// The character of an escape whose letter is at *p, which is moved to its last byte; -1: none that is read here.
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
        if (c < 0) {
            jinja_fail(l->j, "a text holds an escape that is not read here");
            return;
        }
        char byte = (char)c;
        jinja_append(l->j, &text, &byte, 1);
    }
    if (p >= l->end) {
        jinja_fail(l->j, "a text without its closing quote");
        return;
    }
    add(l, TOKEN_STRING, text.data, text.size);
    skip_to(l, p + 1);
}

static void read_number(lexer *l)
{
    const char *p = l->p;
    while (p < l->end && *p >= '0' && *p <= '9') p++;
    bool whole = p == l->end || !(is_name(*p, true) || (*p == '.' && p + 1 < l->end && p[1] >= '0' && p[1] <= '9'));
    if (!whole || p - l->p > 9) jinja_fail(l->j, "a number that is not read here; expected a whole one below 1e9");
    add(l, TOKEN_INTEGER, l->p, (size_t)(p - l->p));
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
    add(l, TOKEN_OPERATOR, l->p, size);
    l->p += size;
}

// Is the end of a tag here? *sign: the character in front of it, if any.
static bool at_end(const lexer *l, char kind, char *sign)
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
    add(l, kind == '%' ? TOKEN_BLOCK : TOKEN_OUTPUT, "", 0);
    while (jinja_ok(l->j)) {
        while (l->p < l->end && is_space(*l->p)) skip_to(l, l->p + 1);
        if (l->p == l->end) jinja_fail(l->j, "a tag without end");
        if (l->p == l->end || (!open && at_end(l, kind, &sign))) break;
        if (*l->p == '\'' || *l->p == '"') {
            read_string(l);
        } else if (*l->p >= '0' && *l->p <= '9') {
            read_number(l);
        } else if (is_name(*l->p, true)) {
            const char *begin = l->p;
            while (l->p < l->end && is_name(*l->p, false)) l->p++;
            add(l, TOKEN_NAME, begin, (size_t)(l->p - begin));
        } else {
            read_operator(l, &open);
        }
    }
    if (!jinja_ok(l->j)) return;
    add(l, kind == '%' ? TOKEN_BLOCK_END : TOKEN_OUTPUT_END, "", 0);
    l->p += sign == ' ' ? 2 : 3;
    skip_behind(l, sign == '-', kind == '%' && sign != '+');
}

// The first tag behind p, or the end.
static const char *find_tag(const char *p, const char *end)
{
    for (; end - p >= 2; p++)
        if (p[0] == '{' && (p[1] == '{' || p[1] == '%' || p[1] == '#')) return p;
    return end;
}

// The source with line ends of one byte, and without the last one, as Jinja2 takes it.
static const char *with_line_ends(jinja *j, const char *source, size_t *size)
{
    char *text = jinja_copy(j, source, strlen(source));
    size_t n = 0;
    for (const char *p = source; jinja_ok(j) && *p; p++) {
        if (*p == '\r' && p[1] == '\n') continue;
        text[n++] = *p == '\r' ? '\n' : *p;
    }
    if (n && text[n - 1] == '\n') n--;
    *size = n;
    return text;
}

void jinja_read_tokens(jinja *j, const char *source)
{
    size_t size;
    const char *text = with_line_ends(j, source, &size);
    lexer l = {.j = j, .p = text, .end = text + size, .line_begins = true};
    j->line = 1;
    while (l.p < l.end && jinja_ok(j)) {
        const char *tag = find_tag(l.p, l.end);
        add_text(&l, tag);
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
    add(&l, TOKEN_END, "", 0);
}
