// Broken UTF-8, replaced as in Python, byte by byte; what is text at all; steps over characters.
#include "profiler/text/utf8.h"
#include "unit.h"

#define BAD "\xef\xbf\xbd" // U+FFFD

// bytes.decode("utf-8", "replace") of CPython 3.11, printed as UTF-8.
static const char *const replaced[][2] = {
    {"plain", "plain"},
    {"\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80", "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80"},
    {"\xff", BAD},
    {"a\xc3", "a" BAD},
    {"\xe2\x82", BAD}, // one for an incomplete character
    {"\xe2\x82(", BAD "("},
    {"\xf0\x9f\x98 x", BAD " x"},
    {"\xc0\xaf", BAD BAD},                 // overlong
    {"\xed\xa0\x80", BAD BAD BAD},         // a surrogate
    {"\xf4\x90\x80\x80", BAD BAD BAD BAD}, // beyond U+10FFFF
    {"\xf4\x8f\xbf\xbf", "\xf4\x8f\xbf\xbf"},
    {"\x80\x80z", BAD BAD "z"},
};

UNIT_TEST(repairs_as_python)
{
    for (size_t i = 0; i < sizeof replaced / sizeof *replaced; i++) {
        const char *text = replaced[i][0], *want = replaced[i][1], *out;
        size_t size;
        char *owned;
        utf8_repair(text, strlen(text), &out, &size, &owned);
        ck_assert_msg(size == strlen(want) && memcmp(out, want, size) == 0, "case %zu: %.*s", i, (int)size, out);
        ck_assert_msg(strcmp(text, want) == 0 ? out == text && !owned : out == owned, "case %zu: ownership", i);
        free(owned);
    }
}

UNIT_TEST(tells_text_from_other_files)
{
    kvb_error err;
    ck_assert_int_eq(utf8_check_text("f", "a\xe2\x82\xac\n", 5, &err), KVB_OK);
    ck_assert_int_eq(utf8_check_text("f", "a\0b", 3, &err), KVB_FORMAT);
    ck_assert_str_eq(err.message, "f: byte 1 is 0x00, expected UTF-8 text without NUL; iconv converts other encodings");
    ck_assert_int_eq(utf8_check_text("f",
                                     "\xff\xfe"
                                     "a",
                                     3, &err),
                     KVB_FORMAT); // UTF-16
}

UNIT_TEST(steps_over_characters)
{
    bool valid = true;
    ck_assert(utf8_step((const unsigned char *)"\xe2\x82\xac!", 4, &valid) == 3 && valid);
    ck_assert(utf8_step((const unsigned char *)"\0x", 2, &valid) == 1 && valid); // NUL is a character
    ck_assert(utf8_step((const unsigned char *)"\xe2\x82\xac", 2, &valid) == 2 && !valid);
    valid = true;
    ck_assert(utf8_step((const unsigned char *)"\xf8\x88\x80\x80\x80", 5, &valid) == 1 && !valid);
}

UNIT_MAIN("profiler utf8")
