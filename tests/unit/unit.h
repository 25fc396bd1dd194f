// One Check program per tests/unit/test_*.c: its tests are UNIT_TEST(name) { ... }, and it ends with UNIT_MAIN.
#pragma once
#include <check.h>
#include <stdbool.h>
#include <stdlib.h>

// Check tells its parent process of every check that holds, through a file: in a loop over thousands of numbers that
// costs more than what is tested. Each line of a file says so once, so that a crash still has a place.
static inline void unit_passed(const char *file, int line)
{
    enum { LINES = 1024 };
    static bool told[LINES];
    if (line < LINES && told[line]) return;
    if (line < LINES) told[line] = true;
    _mark_point(file, line);
}
#define _mark_point(file, line) unit_passed(file, line)

// The tests of this file.
static inline TCase *unit_case(void)
{
    static TCase *tests;
    if (!tests) tcase_set_timeout(tests = tcase_create("tests"), 600);
    return tests;
}

// A test, UNIT_TEST(name) { ... }, joins the tests of its file by itself, in their order.
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
// The end of a file. EACH: with what each test begins and ends with, in its own process; ONCE: all of them together.
#define UNIT_MAIN(name) UNIT_MAIN_WITH(name, (void)0)
#define UNIT_MAIN_EACH(name, begin, end) UNIT_MAIN_WITH(name, tcase_add_checked_fixture(unit_case(), begin, end))
#define UNIT_MAIN_ONCE(name, begin, end) UNIT_MAIN_WITH(name, tcase_add_unchecked_fixture(unit_case(), begin, end))
#define UNIT_MAIN_WITH(name, fixture)                   \
    int main(void)                                      \
    {                                                   \
        fixture;                                        \
        return unit_run(name, UNIT_CASES(unit_case())); \
    }
