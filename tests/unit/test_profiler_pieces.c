// Broken UTF-8 as Python replaces it, byte by byte; the meter's sums over threads; the scale of draws.
#include "profiler/backend/meter.h"
#include "profiler/backend/sampler.h"
#include "profiler/text/utf8.h"
#include "unit.h"
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <string.h>

#define BAD "\xef\xbf\xbd" // U+FFFD

// bytes.decode("utf-8", "replace") of CPython 3.11, printed as UTF-8.
static const char *const replaced[][2] = {
    {"plain", "plain"},
    {"\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80", "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80"},
    {"\xff", BAD},
    {"a\xc3", "a" BAD},
    {"\xe2\x82", BAD}, // one for the part that could have begun a character
    {"\xe2\x82(", BAD "("},
    {"\xf0\x9f\x98 x", BAD " x"},
    {"\xc0\xaf", BAD BAD},                 // overlong
    {"\xed\xa0\x80", BAD BAD BAD},         // a surrogate
    {"\xf4\x90\x80\x80", BAD BAD BAD BAD}, // beyond U+10FFFF
    {"\xf4\x8f\xbf\xbf", "\xf4\x8f\xbf\xbf"},
    {"\x80\x80z", BAD BAD "z"},
};

START_TEST(repairs_as_python)
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
END_TEST

START_TEST(tells_text_from_other_files)
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
END_TEST

START_TEST(steps_over_characters)
{
    bool valid = true;
    ck_assert(utf8_step((const unsigned char *)"\xe2\x82\xac!", 4, &valid) == 3 && valid);
    ck_assert(utf8_step((const unsigned char *)"\0x", 2, &valid) == 1 && valid); // NUL is a character
    ck_assert(utf8_step((const unsigned char *)"\xe2\x82\xac", 2, &valid) == 2 && !valid);
    valid = true;
    ck_assert(utf8_step((const unsigned char *)"\xf8\x88\x80\x80\x80", 5, &valid) == 1 && !valid);
}
END_TEST

START_TEST(meter_adds_up)
{
    meter_sum before[METER_PHASES], after[METER_PHASES];
    meter_read(before);
    enum { THREADS = 4, ENTRIES = 1000 };
#pragma omp parallel num_threads(THREADS)
    for (int i = 0; i < ENTRIES; i++) {
        double start = meter_now(), end = meter_add(METER_ORACLE, start, 3, 5);
        if (end < start) abort();
    }
    double start = meter_now() - 2; // as if it had begun two seconds ago
    meter_add_parallel(METER_WRITING, start, 3);
    meter_read(after);
    ck_assert(after[METER_ORACLE].flops - before[METER_ORACLE].flops == 3.0 * THREADS * ENTRIES);
    ck_assert(after[METER_ORACLE].bytes - before[METER_ORACLE].bytes == 5.0 * THREADS * ENTRIES);
    ck_assert(after[METER_ORACLE].seconds >= before[METER_ORACLE].seconds);
    double busy = after[METER_WRITING].seconds - before[METER_WRITING].seconds;
    ck_assert_msg(busy >= 6 && busy < 60, "three threads for two seconds: %g", busy);
    ck_assert(after[METER_LINEAR].flops == before[METER_LINEAR].flops); // the other phases are untouched
    for (int p = 0; p < METER_PHASES; p++) ck_assert(meter_names[p] && *meter_names[p]);
}
END_TEST

START_TEST(scale_of_draws)
{
    sampler s = {false, 0.7, 1};
    ck_assert(sampler_scale(&s) == (float)(1 / 0.7));
    s.temperature = 1;
    ck_assert(sampler_scale(&s) == 1);
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, repairs_as_python);
    tcase_add_test(tc, tells_text_from_other_files);
    tcase_add_test(tc, steps_over_characters);
    tcase_add_test(tc, meter_adds_up);
    tcase_add_test(tc, scale_of_draws);
}

UNIT_MAIN("profiler_pieces", fill)
