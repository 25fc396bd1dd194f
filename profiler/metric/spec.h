// The common syntax of metrics, policies, allocators and tasks: `name[:variant][:parameter=value]...`, such as
// `snapkv:kvpress:window=32` or `keydiff:anchor=raw`.
// Rows declare what can be written: a name, and parameters with type, default, range and the offset of the value in a
// settings struct. Code reads `settings->window`, so a wrong name does not compile; a user's mistyped name is an error
// that lists the known ones.
// Every setting has one canonical text: the parameters that differ from their defaults, in the row's order, with the
// fewest digits that give the same value when read. Records, tables and logs identify results by it.
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>
#include <stddef.h>

enum { SPEC_MAX_PARAMETERS = 8, SPEC_NUMBER_MAX = 32 };

typedef enum spec_type { SPEC_SWITCH, SPEC_UINT32, SPEC_UINT64, SPEC_DOUBLE } spec_type;

typedef struct spec_parameter {
    const char *name;
    spec_type type; // of the field; SPEC_SWITCH is a bool
    size_t offset;  // of the field in the settings
    double value, low, high;
    const char *meaning;
    const char *choices; // "mean|raw|median": what the values 0, 1, 2 are called; NULL: a number
} spec_parameter;

// Compilers that this is built with make an enumeration without negative values an unsigned int; a field of any other
// type does not compile.
#define SPEC_TYPE(settings, field)        \
    _Generic(((settings *)0)->field, bool \
             : SPEC_SWITCH, uint32_t      \
             : SPEC_UINT32, uint64_t      \
             : SPEC_UINT64, double        \
             : SPEC_DOUBLE)
// {SPEC(tova_settings, scope, 0, 0, 1, "what it means")}: the parameter has the field's name.
#define SPEC(settings, field, value, low, high, meaning)                                               \
    {                                                                                                  \
#field, SPEC_TYPE(settings, field), offsetof(settings, field), value, low, high, meaning, NULL \
    }
#define SPEC_ON_OFF(settings, field, value, meaning) SPEC(settings, field, value, 0, 1, meaning)
// `last` is the number of the last choice.
#define SPEC_CHOICE(settings, field, value, last, choices, meaning)                                     \
    {                                                                                                   \
#field, SPEC_TYPE(settings, field), offsetof(settings, field), value, 0, last, meaning, choices \
    }

typedef struct spec_row {
    const char *name;                                   // "snapkv"
    const char *variant;                                // "lukv"; NULL for the only or plain one
    spec_parameter parameters[SPEC_MAX_PARAMETERS + 1]; // ended by a NULL name
    const char *behind; // what to show after the name in lists, such as "=FILE"; NULL: nothing. The caller parses it
} spec_row;

// One list of rows: metrics, policies, ...
typedef struct spec_list {
    const char *what;                 // "metric", for messages
    const spec_row *(*row)(size_t i); // NULL after the last. A plain form comes before its variants
    const char *usual;                // the variant that a bare name means if there is no plain form; NULL: none
} spec_list;

// Reads text [from, to), which is all of `text` or a part of it; settings receive all parameters of the row, as given
// or by default, and nothing else in them changes. On KVB_ARGUMENT the message lists the known names, or says
// what a parameter expects, and gives the character's place in the text; a repeated parameter is an error too. *row may
// be written even on failure.
kvb_status spec_read(const spec_list *list, const char *text, size_t from, size_t to, size_t *row, void *settings,
                     kvb_error *err);

// The first half of spec_read: finds the row that text [from, to) names, and where the rest after the name begins.
kvb_status spec_find(const spec_list *list, const char *text, size_t from, size_t to, size_t *row, size_t *rest,
                     kvb_error *err);

// Sets every parameter to its default.
void spec_set_defaults(const spec_row *row, void *settings);

double spec_value(const spec_parameter *p, const void *settings);
void spec_set_value(const spec_parameter *p, void *settings, double value); // within its limits
// Writes a value as text: a choice's name, or a number. Returns its length.
size_t spec_value_text(char *out, size_t size, const spec_parameter *p, const void *settings);
// Prints a number with the fewest digits, 15 or 17, that give the same number when read. Returns its length.
size_t spec_number(char *out, size_t size, double value);

// Writes "snapkv:lukv", "knorm". Returns the full length, even if it does not fit.
size_t spec_name(char *out, size_t size, const spec_row *row);
// Writes the canonical text. Returns the full length, even if it does not fit.
size_t spec_write(char *out, size_t size, const spec_row *row, const void *settings);
// Writes the canonical text to a field of `size` bytes. Fails with KVB_ARGUMENT if it does not fit.
kvb_status spec_write_all(char *out, size_t size, const spec_list *list, const spec_row *row, const void *settings,
                          kvb_error *err);
