// One Check program per tests/unit/test_*.c: each file lists its test functions and calls UNIT_MAIN.
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

// Runs the TCase that `fill` builds. The closing line ("100%: Checks: ...") is summed up by tests/run.sh.
static inline int unit_main(const char *name, void (*fill)(TCase *))
{
    Suite *suite = suite_create(name);
    TCase *tc = tcase_create(name);
    tcase_set_timeout(tc, 600);
    fill(tc);
    suite_add_tcase(suite, tc);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

#define UNIT_MAIN(name, fill)         \
    int main(void)                    \
    {                                 \
        return unit_main(name, fill); \
    }
