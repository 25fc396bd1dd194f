// The one parser of metrics, policies, allocators and tasks: what it reads and writes, and bad text from a generator.
#include "profiler/metric/spec.h"
#include "test_profiler_cases.h"
#include <float.h>

typedef enum test_shade { RED, GREEN, BLUE } test_shade;

typedef struct test_settings {
    bool on;
    uint32_t count;
    uint64_t large;
    double share;
    test_shade shade;
    uint32_t untouched;
} test_settings;

#define PARAMETERS                                                                                              \
    {                                                                                                           \
        SPEC_ON_OFF(test_settings, on, 0, "a switch"), SPEC(test_settings, count, 7, 1, UINT32_MAX, "a count"), \
            SPEC(test_settings, large, 0, 0, 9007199254740991.0, "a large count"),                              \
            SPEC(test_settings, share, 0.5, -DBL_MAX, DBL_MAX, "any number"),                                   \
            SPEC_CHOICE(test_settings, shade, RED, 2, "red|green|blue", "a shade")                              \
    }

static const spec_row ROWS[] = {{.name = "plain", .parameters = PARAMETERS},
                                {"two", "first", PARAMETERS, NULL},
                                {"two", "usual", {{NULL}}, NULL},
                                {.name = "both"},
                                {"both", "more", {{NULL}}, NULL},
                                {"pl", NULL, {{NULL}}, "=FILE"}};

static const spec_row *row_of(size_t i)
{
    return i < sizeof ROWS / sizeof *ROWS ? &ROWS[i] : NULL;
}

static const spec_list LIST = {"thing", row_of, "usual"};

static kvb_status read_text(const char *text, size_t *row, test_settings *out, kvb_error *err)
{
    *out = (test_settings){.untouched = 12345};
    kvb_status status = spec_read(&LIST, text, 0, strlen(text), row, out, err);
    ck_assert_uint_eq(out->untouched, 12345);
    return status;
}

UNIT_TEST(rows_and_variants)
{
    static const struct {
        const char *text;
        size_t row;
    } cases[] = {{"plain", 0}, {"two:first", 1}, {"two", 2},        {"two:usual", 2},
                 {"both", 3},  {"both:more", 4}, {"plain:on=1", 0}, {"two:first:count=3", 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t row = 99;
        test_settings s;
        kvb_error err;
        ck_assert_msg(read_text(cases[i].text, &row, &s, &err) == KVB_OK, "%s: %s", cases[i].text, err.message);
        ck_assert_uint_eq(row, cases[i].row);
    }
    size_t row, rest;
    help_ok(spec_find(&LIST, "xx+pl=a file:b", 3, 14, &row, &rest, err)); // a part of a text
    ck_assert(row == 5 && rest == 5);
}

UNIT_TEST(fields_are_filled)
{
    size_t row;
    test_settings s;
    help_ok(read_text("plain", &row, &s, err));
    ck_assert(!s.on && s.count == 7 && s.large == 0 && s.share == 0.5 && s.shade == RED);
    help_ok(read_text("plain:shade=blue:share=-1e-3:large=9007199254740991:count=4294967295:on=1", &row, &s, err));
    ck_assert(s.on && s.count == UINT32_MAX && s.large == 9007199254740991 && s.share == -1e-3 && s.shade == BLUE);
    char text[128];
    size_t n = spec_write(text, sizeof text, &ROWS[row], &s);
    ck_assert_str_eq(text, "plain:on=1:count=4294967295:large=9007199254740991:share=-0.001:shade=blue");
    ck_assert_uint_eq(n, strlen(text));
    // If the room is too small, the same length is returned, and nothing is written after the room.
    char small[8] = "xxxxxxx";
    ck_assert_uint_eq(spec_write(small, 6, &ROWS[row], &s), n);
    ck_assert(strcmp(small, "plain") == 0 && small[6] == 'x');
    help_fails(spec_write_all(small, sizeof small, &LIST, &ROWS[row], &s, err), KVB_ARGUMENT, "at most 7 fit");
}

UNIT_TEST(errors_say_what_is_known_and_where)
{
    static const char *const cases[][2] = {
        {"", "thing '' is unknown; expected one of plain, two:first, two:usual, both, both:more, pl=FILE, with"},
        {"plai", "thing 'plai' is unknown"},
        {"plainly", "'plainly' is unknown"},
        {"two:third", "'two:third' is unknown"},
        {":on=1", "'' is unknown"},
        {"plain:", "character 7: '' is not parameter=value; parameters of plain: on, count, large, share, shade"},
        {"plain=3", "'=3' is not parameter=value"},
        {"plain:on", "'on' is not parameter=value"},
        {"plain:=1", "'=1' is not parameter=value"},
        {"plain:onn=1", "character 7: 'onn=1' is not"},
        {"plain:o=1", "'o=1' is not"},
        {"plain:on=1:", "character 12: ''"},
        {"plain::on=1", "character 7: ''"},
        {"two:usual:on=1", "parameters of two:usual: none"},
        {"plain:on=2", "character 10: on expects an integer from 0 to 1 (a switch), found '2'"},
        {"plain:on=", "found ''"},
        {"plain:on=1:on=1", "character 12: on is given twice"},
        {"plain:count=0", "count expects an integer from 1 to 4294967295"},
        {"plain:count=4294967296", "found '4294967296'"},
        {"plain:count=1.5", "found '1.5'"},
        {"plain:count=--1", "found '--1'"},
        {"plain:large=9007199254740992", "from 0 to 9007199254740991"},
        {"plain:share=nan", "share expects a number"},
        {"plain:share=inf", "found 'inf'"},
        {"plain:share=1e400", "found '1e400'"},
        {"plain:share=0x1p3", "found '0x1p3'"},
        {"plain:share= 1", "found ' 1'"},
        {"plain:share=1 ", "found '1 '"},
        {"plain:share=1=2", "found '1=2'"},
        {"plain:share=.", "found '.'"},
        {"plain:share=1,5", "found '1,5'"},
        {"plain:shade=0", "shade expects one of red|green|blue (a shade), found '0'"},
        {"plain:shade=gree", "found 'gree'"},
        {"plain:shade=red|green", "found 'red|green'"},
        {"plain:shade=", "found ''"},
        {"pl\x1b[2J\n\xff", "'pl?[2J?"
                            "?' is unknown"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t row;
        test_settings s;
        help_fails(read_text(cases[i][0], &row, &s, err), KVB_ARGUMENT, cases[i][1]);
    }
}

static uint32_t draw(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) ^ (uint32_t)(*state >> 60);
}

// Random bytes cause no crash, and a message of one line of printable characters.
UNIT_TEST(bad_text_by_program)
{
    enum { ROUNDS = 20000, LONG = 70000 };
    static const char whole[] = "plain:on=1:count=12:large=3:share=0.25:shade=green";
    uint64_t state = 20261122;
    char text[sizeof whole + 1];
    for (int i = 0; i < ROUNDS; i++) {
        size_t n = draw(&state) % sizeof whole, row;
        memcpy(text, whole, sizeof whole);
        text[n] = '\0'; // truncated, then up to three bytes changed
        for (uint32_t k = draw(&state) % 4; k-- && n;) text[draw(&state) % n] = (char)(1 + draw(&state) % 255);
        test_settings s;
        kvb_error err = {0};
        if (read_text(text, &row, &s, &err) == KVB_OK) {
            ck_assert(row != 0 || (s.shade <= BLUE && s.count >= 1 && isfinite(s.share)));
            continue;
        }
        ck_assert_int_eq(err.status, KVB_ARGUMENT);
        for (const char *c = err.message; *c; c++) ck_assert(*c >= ' ' && *c <= '~');
    }
    char *endless = case_alloc(LONG + 1, 1);
    for (const char *start = "p:= 9+"; *start; start++) {
        size_t row;
        test_settings s;
        memset(endless, *start, LONG);
        help_fails(read_text(endless, &row, &s, err), KVB_ARGUMENT, "thing");
        memcpy(endless, "plain:share=", 12);
        help_fails(read_text(endless, &row, &s, err), KVB_ARGUMENT, "found");
    }
    free(endless);
}

// Any setting has one text, and reading the text gives the same bits.
UNIT_TEST(random_round_trips)
{
    enum { ROUNDS = 20000 };
    uint64_t state = 7;
    for (int i = 0; i < ROUNDS; i++) {
        test_settings s = {.untouched = 12345}, back;
        uint64_t bits = (uint64_t)draw(&state) << 32 | draw(&state);
        s.on = draw(&state) % 2, s.count = draw(&state) | 1, s.large = bits % 9007199254740992;
        memcpy(&s.share, &bits, sizeof bits);
        if (i % 2) s.share = draw(&state) % 1000 / 1000.0; // what people write
        if (!isfinite(s.share)) s.share = DBL_MIN;
        s.share += 0.0; // no -0
        s.shade = draw(&state) % 3;
        char text[160], again[160];
        size_t row;
        ck_assert(spec_write(text, sizeof text, &ROWS[0], &s) < sizeof text);
        help_ok(read_text(text, &row, &back, err));
        ck_assert(row == 0 && back.on == s.on && back.count == s.count && back.large == s.large &&
                  back.share == s.share && back.shade == s.shade);
        spec_write(again, sizeof again, &ROWS[0], &back);
        ck_assert_str_eq(again, text);
        // The next number has another text.
        test_settings near = s;
        near.share = nextafter(s.share, INFINITY);
        spec_write(again, sizeof again, &ROWS[0], &near);
        ck_assert_str_ne(again, text);
    }
    test_settings zero;
    size_t row;
    char text[64];
    help_ok(read_text("plain:share=-0", &row, &zero, err));
    spec_write(text, sizeof text, &ROWS[0], &zero);
    ck_assert_str_eq(text, "plain:share=0");
}

UNIT_MAIN("profiler spec")
