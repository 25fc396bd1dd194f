// One Check program per tests/unit/test_*.c: its tests are UNIT_TEST(name) { ... }, and it ends with UNIT_MAIN. The
// standard headers that most tests need come with it.
#pragma once
#include "runtime/kvbudget.h"
#include <check.h>
#include <fcntl.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// Check reports every check that holds to its parent process, through a file: in a loop over thousands of numbers, that
// costs more than the tested code. So each line of a file reports once, and the place of a crash is still known.
static inline void unit_passed(const char *file, int line)
{
    enum { LINES = 1024 };
    static bool told[LINES];
    if (line < LINES && told[line]) return;
    if (line < LINES) told[line] = true;
    _mark_point(file, line);
}
#define _mark_point(file, line) unit_passed(file, line)

// unit_numbers(n, 3, keep[0], 17): whole numbers in pairs, the actual and the expected one; all 64 bits count.
#define unit_numbers(...)                                                                   \
    unit_same_numbers(__FILE__, __LINE__, #__VA_ARGS__, (const long double[]){__VA_ARGS__}, \
                      sizeof((const long double[]){__VA_ARGS__}) / sizeof(long double))
// unit_strings(name, "keydiff"): the same for strings.
#define unit_strings(...)                                                                   \
    unit_same_strings(__FILE__, __LINE__, #__VA_ARGS__, (const char *const[]){__VA_ARGS__}, \
                      sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))
// ck_assert for calls with a kvb_error: prints the message.
#define help_ok(call)                                                                      \
    do {                                                                                   \
        kvb_error e_ = {0};                                                                \
        kvb_error *err = &e_;                                                              \
        kvb_status s_ = (call);                                                            \
        ck_assert_msg(s_ == KVB_OK, "%s: %s: %s", #call, kvb_status_name(s_), e_.message); \
    } while (0)

// The call must fail with this status and a message that contains this text.
#define help_fails(call, status_, text)                                                                     \
    do {                                                                                                    \
        kvb_error e_ = {0};                                                                                 \
        kvb_error *err = &e_;                                                                               \
        kvb_status s_ = (call);                                                                             \
        ck_assert_msg(s_ == status_ && e_.status == status_, "%s: %s (%s): %s", #call, kvb_status_name(s_), \
                      kvb_status_name(e_.status), e_.message);                                              \
        ck_assert_msg(strstr(e_.message, text) != NULL, "no \"%s\" in: %s", text, e_.message);              \
    } while (0)

// The same for a test that has its own `err` and may look at the message itself.
#define unit_refuses(call, status, text)                                                         \
    do {                                                                                         \
        ck_assert_int_eq(call, status);                                                          \
        ck_assert_msg(strstr(err.message, text) != NULL, "no \"%s\" in: %s", text, err.message); \
    } while (0)

static inline void unit_same_numbers(const char *file, int line, const char *what, const long double *pairs, size_t n)
{
    unit_passed(file, line);
    for (size_t i = 0; i < n; i += 2)
        if (pairs[i] != pairs[i + 1])
            ck_abort_msg("%s:%d: number %zu of (%s) is %.0Lf, expected %.0Lf", file, line, i / 2, what, pairs[i],
                         pairs[i + 1]);
}

static inline void unit_same_strings(const char *file, int line, const char *what, const char *const *pairs, size_t n)
{
    unit_passed(file, line);
    for (size_t i = 0; i < n; i += 2)
        if (!pairs[i] || !pairs[i + 1] || strcmp(pairs[i], pairs[i + 1]) != 0)
            ck_abort_msg("%s:%d: string %zu of (%s) is \"%s\", expected \"%s\"", file, line, i / 2, what,
                         pairs[i] ? pairs[i] : "(none)", pairs[i + 1] ? pairs[i + 1] : "(none)");
}

// Returns the tests of this file. The time limit of one is no shorter than what tests/run.sh gives a program: next to
// other work a test takes many times as long.
static inline TCase *unit_case(void)
{
    static TCase *tests;
    if (!tests) tcase_set_timeout(tests = tcase_create("tests"), 1800);
    return tests;
}

// A test, UNIT_TEST(name) { ... }, adds itself to the tests of its file, in their order.
// UNIT_ROUNDS(name, n) runs n times, with _i from 0 on.
#define UNIT_TEST(name) UNIT_ROUNDS(name, 1)
#define UNIT_ROUNDS(name, rounds)                                 \
    static void name##_body(int _i);                              \
    START_TEST(name)                                              \
    {                                                             \
        name##_body(_i);                                          \
    }                                                             \
    END_TEST                                                      \
    __attribute__((constructor)) static void name##_joins(void)   \
    {                                                             \
        tcase_add_loop_test(unit_case(), name, 0, (int)(rounds)); \
    }                                                             \
    static void name##_body(int _i __attribute__((unused)))

// Runs cases up to a NULL. The closing line ("100%: Checks: ...") is summed up by tests/run.sh.
static inline int unit_run(const char *name, TCase *const *cases)
{
    Suite *suite = suite_create(name);
    for (; *cases; cases++) suite_add_tcase(suite, *cases);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

#define UNIT_CASES(...) ((TCase *const[]){__VA_ARGS__, NULL})
// The end of a file. EACH: `begin` and `end` run around each test, in its own process; ONCE: around all of them.
#define UNIT_MAIN(name) UNIT_MAIN_WITH(name, (void)0)
#define UNIT_MAIN_EACH(name, begin, end) UNIT_MAIN_WITH(name, tcase_add_checked_fixture(unit_case(), begin, end))
#define UNIT_MAIN_ONCE(name, begin, end) UNIT_MAIN_WITH(name, tcase_add_unchecked_fixture(unit_case(), begin, end))
#define UNIT_MAIN_WITH(name, fixture)                   \
    int main(void)                                      \
    {                                                   \
        fixture;                                        \
        return unit_run(name, UNIT_CASES(unit_case())); \
    }
