#include "profiler/metric/spec.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { QUOTED_MAX = 80, LIST_MAX = 320 };

// ---- Messages ----

// Copies what a user wrote for a message: cut, and without characters that a terminal would obey.
static const char *quoted(char out[QUOTED_MAX], const char *text, size_t n)
{
    size_t shown = n < QUOTED_MAX ? n : QUOTED_MAX - 4;
    for (size_t i = 0; i < shown; i++) out[i] = (char)(text[i] >= ' ' && text[i] <= '~' ? text[i] : '?');
    snprintf(out + shown, 4, "%s", shown < n ? "..." : "");
    return out;
}

// Fails with "metric 'snapkv:windw=3', character 8: ...", counted from 1.
static kvb_status fail_at(const spec_list *list, const char *text, size_t at, kvb_error *err, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
static kvb_status fail_at(const spec_list *list, const char *text, size_t at, kvb_error *err, const char *format, ...)
{
    char what[sizeof err->message], all[QUOTED_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    return kvb_fail(err, KVB_ARGUMENT, "%s '%s', character %zu: %s", list->what, quoted(all, text, strlen(text)),
                    at + 1, what);
}

static kvb_status unknown_name(const spec_list *list, const char *text, size_t from, size_t n, kvb_error *err)
{
    char known[LIST_MAX] = "", wrong[QUOTED_MAX], place[32] = "";
    size_t used = 0;
    const spec_row *row;
    for (size_t i = 0; (row = list->row(i)) && used < sizeof known; i++) {
        used += (size_t)snprintf(known + used, sizeof known - used, "%s", i ? ", " : "");
        if (used < sizeof known) used += spec_name(known + used, sizeof known - used, row);
        if (row->behind && used < sizeof known)
            used += (size_t)snprintf(known + used, sizeof known - used, "%s", row->behind);
    }
    if (from) snprintf(place, sizeof place, ", character %zu,", from + 1);
    return kvb_fail(err, KVB_ARGUMENT,
                    "%s '%s'%s is unknown; expected one of %s, with :parameter=value after it if "
                    "wanted",
                    list->what, quoted(wrong, text + from, n), place, known);
}

static kvb_status unknown_parameter(const spec_list *list, const spec_row *row, const char *text, size_t at, size_t n,
                                    kvb_error *err)
{
    char known[LIST_MAX] = "none", wrong[QUOTED_MAX], name[QUOTED_MAX];
    size_t used = 0;
    for (const spec_parameter *p = row->parameters; p->name && used < sizeof known; p++)
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "", p->name);
    spec_name(name, sizeof name, row);
    return fail_at(list, text, at, err, "'%s' is not parameter=value; parameters of %s: %s",
                   quoted(wrong, text + at, n), name, known);
}

// ---- Values ----

double spec_value(const spec_parameter *p, const void *settings)
{
    const char *at = (const char *)settings + p->offset;
    bool on = false;
    uint32_t small = 0;
    uint64_t large = 0;
    double number = 0;
    switch (p->type) {
    case SPEC_SWITCH:
        memcpy(&on, at, sizeof on);
        return on;
    case SPEC_UINT32:
        memcpy(&small, at, sizeof small);
        return small;
    case SPEC_UINT64:
        memcpy(&large, at, sizeof large);
        return (double)large;
    case SPEC_DOUBLE:
        memcpy(&number, at, sizeof number);
    }
    return number;
}

// The value must be within the parameter's limits, which the field's type can hold.
void spec_set_value(const spec_parameter *p, void *settings, double value)
{
    char *at = (char *)settings + p->offset;
    bool on = value != 0;
    uint32_t small = p->type == SPEC_UINT32 ? (uint32_t)value : 0;
    uint64_t large = p->type == SPEC_UINT64 ? (uint64_t)value : 0;
    switch (p->type) {
    case SPEC_SWITCH:
        memcpy(at, &on, sizeof on);
        break;
    case SPEC_UINT32:
        memcpy(at, &small, sizeof small);
        break;
    case SPEC_UINT64:
        memcpy(at, &large, sizeof large);
        break;
    case SPEC_DOUBLE:
        memcpy(at, &value, sizeof value);
    }
}

void spec_set_defaults(const spec_row *row, void *settings)
{
    for (const spec_parameter *p = row->parameters; p->name; p++) spec_set_value(p, settings, p->value);
}

// Returns the value of the choice ("a|b|c") with this name, or NaN.
static double choice_value(const char *choices, const char *text, size_t length)
{
    for (int i = 0; *choices; i++) {
        size_t n = strcspn(choices, "|");
        if (n == length && memcmp(choices, text, n) == 0) return i;
        choices += n + (choices[n] == '|');
    }
    return NAN;
}

// Returns the decimal number that fills the text, or NaN: blanks, hexadecimals and words are not accepted.
static double decimal_value(const char *text, size_t length)
{
    char number[64], *end;
    if (length == 0 || length >= sizeof number) return NAN;
    memcpy(number, text, length);
    number[length] = '\0';
    if (strspn(number, "0123456789+-.eE") != length) return NAN;
    double value = strtod(number, &end);
    return *end ? NAN : value + 0.0; // -0 and 0 are one value, and so one text
}

static kvb_status read_value(const spec_list *list, const spec_parameter *p, const char *text, size_t at, size_t n,
                             void *settings, kvb_error *err)
{
    char wrong[QUOTED_MAX];
    double value = p->choices ? choice_value(p->choices, text + at, n) : decimal_value(text + at, n);
    bool whole = p->type == SPEC_DOUBLE || value == floor(value);
    if (value >= p->low && value <= p->high && whole) {
        spec_set_value(p, settings, value);
        return KVB_OK;
    }
    quoted(wrong, text + at, n);
    if (p->choices)
        return fail_at(list, text, at, err, "%s expects one of %s (%s), found '%s'", p->name, p->choices, p->meaning,
                       wrong);
    return fail_at(list, text, at, err, "%s expects %s from %.16g to %.16g (%s), found '%s'", p->name,
                   p->type == SPEC_DOUBLE ? "a number" : "an integer", p->low, p->high, p->meaning, wrong);
}

size_t spec_number(char *out, size_t size, double value)
{
    char number[SPEC_NUMBER_MAX];
    snprintf(number, sizeof number, "%.15g", value);
    if (strtod(number, NULL) != value) snprintf(number, sizeof number, "%.17g", value);
    return (size_t)snprintf(out, size, "%s", number);
}

size_t spec_value_text(char *out, size_t size, const spec_parameter *p, const void *settings)
{
    double value = spec_value(p, settings);
    if (!p->choices) return spec_number(out, size, value);
    const char *choice = p->choices;
    for (double i = 0; i < value; i++) choice += strcspn(choice, "|") + 1;
    return (size_t)snprintf(out, size, "%.*s", (int)strcspn(choice, "|"), choice);
}

// ---- Reading ----

static bool is_text(const char *known, const char *text, size_t n)
{
    return strlen(known) == n && memcmp(known, text, n) == 0;
}

// Finds the row of this name and variant; a NULL variant is the plain form. *has_variants: rows of the name have one.
static const spec_row *find_row(const spec_list *list, const char *name, size_t n, const char *variant, size_t m,
                                size_t *index, bool *has_variants)
{
    const spec_row *row;
    for (size_t i = 0; (row = list->row(i)); i++) {
        if (!is_text(row->name, name, n)) continue;
        *has_variants |= row->variant != NULL;
        *index = i;
        if (variant ? row->variant && is_text(row->variant, variant, m) : !row->variant) return row;
    }
    return NULL;
}

// Returns the length of the part that begins at `from`: up to a colon or an equals sign.
static size_t part_length(const char *text, size_t from, size_t to)
{
    size_t n = 0;
    while (from + n < to && text[from + n] != ':' && text[from + n] != '=') n++;
    return n;
}

kvb_status spec_find(const spec_list *list, const char *text, size_t from, size_t to, size_t *row, size_t *rest,
                     kvb_error *err)
{
    size_t n = part_length(text, from, to), second = from + n + 1, m = 0;
    bool has_variants = false;
    if (second <= to && text[second - 1] == ':') m = part_length(text, second, to);
    bool named = m > 0 && !(second + m < to && text[second + m] == '=');
    *rest = second + m;
    if (named && find_row(list, text + from, n, text + second, m, row, &has_variants)) return KVB_OK;
    // If a name has no variants, what follows it can only be meant as a parameter.
    if (named && has_variants) return unknown_name(list, text, from, n + 1 + m, err);
    *rest = from + n;
    if (find_row(list, text + from, n, NULL, 0, row, &has_variants)) return KVB_OK;
    if (list->usual && find_row(list, text + from, n, list->usual, strlen(list->usual), row, &has_variants))
        return KVB_OK;
    return unknown_name(list, text, from, n, err);
}

// Reads one `parameter=value`; `given` has a bit for each parameter that came before.
static kvb_status read_parameter(const spec_list *list, const spec_row *row, const char *text, size_t at, size_t n,
                                 void *settings, unsigned *given, kvb_error *err)
{
    const char *equals = memchr(text + at, '=', n);
    size_t name = equals ? (size_t)(equals - text) - at : 0;
    for (size_t i = 0; equals && row->parameters[i].name; i++) {
        const spec_parameter *p = &row->parameters[i];
        if (!is_text(p->name, text + at, name)) continue;
        if (*given & 1u << i) return fail_at(list, text, at, err, "%s is given twice", p->name);
        *given |= 1u << i;
        return read_value(list, p, text, at + name + 1, n - name - 1, settings, err);
    }
    return unknown_parameter(list, row, text, at, n, err);
}

kvb_status spec_read(const spec_list *list, const char *text, size_t from, size_t to, size_t *row, void *settings,
                     kvb_error *err)
{
    size_t at;
    unsigned given = 0;
    kvb_status status = spec_find(list, text, from, to, row, &at, err);
    if (status != KVB_OK) return status;
    const spec_row *found = list->row(*row);
    spec_set_defaults(found, settings);
    if (at < to && text[at] != ':') return unknown_parameter(list, found, text, at, to - at, err);
    while (at < to && status == KVB_OK) {
        size_t n = 0;
        at++;
        while (at + n < to && text[at + n] != ':') n++;
        status = read_parameter(list, found, text, at, n, settings, &given, err);
        at += n;
    }
    return status;
}

// ---- Writing ----

size_t spec_name(char *out, size_t size, const spec_row *row)
{
    return (size_t)snprintf(out, size, "%s%s%s", row->name, row->variant ? ":" : "", row->variant ? row->variant : "");
}

size_t spec_write(char *out, size_t size, const spec_row *row, const void *settings)
{
    char value[64];
    size_t used = spec_name(out, size, row);
    for (const spec_parameter *p = row->parameters; p->name; p++) {
        if (spec_value(p, settings) == p->value) continue;
        spec_value_text(value, sizeof value, p, settings);
        used +=
            (size_t)snprintf(used < size ? out + used : NULL, used < size ? size - used : 0, ":%s=%s", p->name, value);
    }
    return used;
}

kvb_status spec_write_all(char *out, size_t size, const spec_list *list, const spec_row *row, const void *settings,
                          kvb_error *err)
{
    size_t length = spec_write(out, size, row, settings);
    if (length < size) return KVB_OK;
    return kvb_fail(err, KVB_ARGUMENT, "%s '%s...': its name would have %zu characters, at most %zu fit", list->what,
                    out, length, size - 1);
}
