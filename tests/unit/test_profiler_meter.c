// The meter's sums over threads, and the scale of draws.
#include "profiler/backend/meter.h"
#include "profiler/backend/sampler.h"
#include "unit.h"
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <string.h>

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
    tcase_add_test(tc, meter_adds_up);
    tcase_add_test(tc, scale_of_draws);
}

UNIT_MAIN("profiler meter", fill)
