// The Jinja reader: it makes of a message what Jinja2 makes of it, in every construct that it reads
// (tests/golden/jinja.json). What it does not read, and what Jinja2 refuses, fails and names the line. Hostile
// templates are stopped.
#include "folder_help.h"
#include "profiler/text/jinja.h"
#include <time.h>

static const jinja_input input = {" Who was\n\nit? \xC3\xA9 ", "<s>", "</s>"}; // as make_jinja.py has it

// Jinja2 reads these, but this reader does not: they fail, and nothing is guessed.
static const char *const not_read[] = {"{{ 1 == 1.0 }}",         "{{ 1 < 2 < 3 }}", "{{ 'a  b'.split()|last }}",
                                       "{{ '\xC3\xA9'|upper }}", "{{ 1 / 2 }}",     "{{ 2 ** 3 }}",
                                       "{{ 'a' * 2 }}",          "{{ [1, 2] }}",    "{{ '%s' % 1 }}",
                                       "{{ {1: 2}|length }}",    "{{ '\\u00e9' }}", "{{ 3 is divisibleby 3 }}",
                                       "{{ namespace(a=1).a }}x"};

static bool is_not_read(const char *template)
{
    for (size_t i = 0; i < sizeof not_read / sizeof *not_read; i++)
        if (strcmp(template, not_read[i]) == 0) return true;
    return false;
}

UNIT_TEST(test_golden)
{
    kvb_error err;
    size_t n = 0, unread = 0;
    cJSON *cases = help_json("tests/golden/jinja.json"), *one;
    cJSON_ArrayForEach(one, cases)
    {
        const char *template = cJSON_GetStringValue(cJSON_GetObjectItem(one, "template"));
        const char *expected = cJSON_GetStringValue(cJSON_GetObjectItem(one, "text"));
        char *text = NULL;
        kvb_status status = jinja_render(&text, template, &input, "model", &err);
        if (!expected || is_not_read(template)) {
            ck_assert_msg(status == KVB_UNSUPPORTED && !text, "not refused: %s", template);
            ck_assert_msg(strstr(err.message, "model: chat template, line 1: "), "%s: %s", template, err.message);
            unread += expected != NULL;
        } else {
            ck_assert_msg(status == KVB_OK, "%s: %s", template, err.message);
            ck_assert_msg(strcmp(text, expected) == 0, "%s: \"%s\" instead of \"%s\"", template, text, expected);
        }
        free(text);
        n++;
    }
    ck_assert_uint_gt(n, 180);
    ck_assert_uint_lt(unread, 14);
    cJSON_Delete(cases);
}

UNIT_TEST(test_messages)
{
    static const char *const cases[][2] = {
        {"\n\n{{ x.y }}", "line 3: x is undefined and has no y"},
        {"{{ raise_exception('only with tools') }}", "it refuses a single user message: \"only with tools\""},
        {"{{ 'a'|tojson }}", "filter tojson, which is not supported"},
        {"{% include 'x' %}", "expected a statement that is read here (if, for, set, macro), found \"include\""},
        {"{% for x in messages %}", "expected {% endfor %}"},
        {"{{ pad_token }}", "pad_token is not known"},
        {"{{ 1 + }}", "expected a name, found \"\""},
        {"{{ 'open }}", "a text without its closing quote"},
        {"{{ strftime_now('%H') }}", "strftime_now of \"%H\""},
        {"{% break %}", "break or continue outside of a loop"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvb_error err;
        char *text;
        unit_refuses(jinja_render(&text, cases[i][0], &input, "model", &err), KVB_UNSUPPORTED, cases[i][1]);
    }
}

// Loops within loops, texts that double, deep brackets and endless macros are each stopped.
UNIT_TEST(test_hostile)
{
    static const char *const cases[][2] = {
        {"{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", "bytes of memory"},
        {"{% set n = namespace(x='aaaaaaaaaaaaaaaa') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
         "bytes of memory"},
        {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested levels"},
        {"{% set n = namespace(x=[], y=[]) %}{% for a in range(999) %}{% set n.x = [n.x] %}{% set n.y = [n.y] %}"
         "{% endfor %}{{ n.x == n.y }}",
         "nested levels"},
    };
    char *text, deep[20001];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        help_fails(jinja_render(&text, cases[i][0], &input, "model", err), KVB_UNSUPPORTED, cases[i][1]);
    size_t n = (size_t)snprintf(deep, sizeof deep, "{%% for a in range(9999) %%}{{ 1");
    for (int i = 0; i < 60; i++) n += (size_t)snprintf(deep + n, sizeof deep - n, " == 1 and 1");
    snprintf(deep + n, sizeof deep - n, " }}{%% endfor %%}");
    help_fails(jinja_render(&text, deep, &input, "model", err), KVB_UNSUPPORTED, "more than 1000000 steps");
    static const char *const nested[] = {"(", "[", "not ", "-", "{'a':", "a(", "a[", "1 if "};
    for (size_t i = 0; i < sizeof nested / sizeof *nested; i++) {
        n = (size_t)snprintf(deep, sizeof deep, "{{ ");
        while (n + 10 < sizeof deep) n += (size_t)snprintf(deep + n, sizeof deep - n, "%s", nested[i]);
        help_fails(jinja_render(&text, deep, &input, "model", err), KVB_UNSUPPORTED, "");
    }
    n = 0;
    while (n + 10 < sizeof deep) n += (size_t)snprintf(deep + n, sizeof deep - n, "{%% if 1 %%}");
    help_fails(jinja_render(&text, deep, &input, "model", err), KVB_UNSUPPORTED, "");
}

// A single step may handle a lot: comparing, searching or stripping megabytes of text, or looking things up in long
// lists, counts as many steps, so that time is limited as well.
UNIT_TEST(test_costly_steps)
{
    static const char long_texts[] = "{% set n = namespace(x='aaaaaaaaaaaaaaaa', y='aaaaaaaaaaaaaaaa') %}"
                                     "{% for a in range(16) %}{% set n.x = n.x + n.x %}{% set n.y = n.y + n.y %}"
                                     "{% endfor %}{% set x = n.x %}{% set y = n.y %}{% set l = range(50000) | list %}";
    static const char *const steps[] = {
        "x == y",          "x < y",           "y in x",    "(x + 'b') in y",     "x in [1, y]",
        "l == l[1:]",      "7.5 in l",        "-1 in l",   "x.strip('a')",       "(x | trim)[:0]",
        "x.split('b')[1]", "x.startswith(y)", "x is eq y", "l | join",           "l | select('undefined') | list",
        "x is in [y]",     "x ~ y",           "x[5:]",     "x.replace('b', '')", "l | reject('integer') | list",
        "{x: 1}"};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        char *text, template[1000];
        kvb_error err;
        snprintf(template, sizeof template,
                 "%s{%% for a in range(9999) %%}{%% for b in range(9999) %%}{%% if %s %%}{%% endif %%}{%% endfor %%}"
                 "{%% endfor %%}",
                 long_texts, steps[i]);
        clock_t began = clock();
        ck_assert_int_eq(jinja_render(&text, template, &input, "model", &err), KVB_UNSUPPORTED);
        double took = (double)(clock() - began) / CLOCKS_PER_SEC;
        ck_assert_msg(took < 5, "%s: %.1f s, %s", steps[i], took, err.message);
    }
}

UNIT_TEST(test_undefined_tokens)
{
    const jinja_input without = {"x", NULL, NULL};
    char *text;
    help_ok(jinja_render(&text, "{{ bos_token }}{{ eos_token is defined }}", &without, "m", err));
    ck_assert_str_eq(text, "False");
    free(text);
}

UNIT_MAIN("profiler jinja")
