// Every operation of a backend against the plain-C reference, with absolute and relative tolerance, over shapes with
// MHA, GQA, MQA and awkward sizes; and the promise that bits depend neither on threads nor on what else is in a batch.
// The operations are in judge_*.c by subject; the backend is cpu, or the one that the Makefile names.
#include "judge.h"
#include "profiler/backend/linalg.h"

#ifndef JUDGE_OF
#define JUDGE_OF backend_cpu
#endif
extern const backend JUDGE_OF;
const backend *const judged_backend = &JUDGE_OF;

UNIT_TEST(test_softmax_exp)
{
    for (double x = 0; x > -86.9; x -= 0.00137) {
        double want = exp((double)(float)x);
        ck_assert_msg(fabs((double)softmax_exp((float)x) - want) <= 3e-7 * want, "exp(%g) is %g", x,
                      (double)softmax_exp((float)x));
    }
    ck_assert_float_eq(softmax_exp(0), 1.0f);
    ck_assert_float_eq(softmax_exp(-INFINITY), 0.0f);
    ck_assert_float_eq(softmax_exp(-1e30f), 0.0f);
}

UNIT_TEST(test_softmax_exp2)
{
    for (double x = 0; x >= EXP2_LEAST; x -= 0.00137) {
        double want = exp2((double)(float)x), got = (double)softmax_exp2((float)x);
        ck_assert_msg(fabs(got - want) <= 1.5e-7 * want, "2^%g is %g", x, got);
    }
    ck_assert_float_eq(softmax_exp2(0), 1.0f);
    ck_assert_float_eq(softmax_exp2(-INFINITY), 0.0f);
    ck_assert_float_eq(softmax_exp2(-1e30f), 0.0f);
    ck_assert_float_eq(softmax_exp2(nextafterf(EXP2_LEAST, -200)), 0.0f);
}

UNIT_TEST(test_every_operation_is_there)
{
    for (const backend *const *b = backend_list; *b; b++) {
        void *const *members = (void *const *)(const void *)*b;
        for (size_t i = 0; i < sizeof **b / sizeof(void *); i++)
            ck_assert_msg(members[i] != NULL, "backend %s: member %zu is missing", (*b)->name, i);
        ck_assert_ptr_eq(backend_find_compute((*b)->name, (*b)->compute), *b);
        ck_assert_str_eq(backend_find((*b)->name)->compute, "f32");
    }
    void *const *members = (void *const *)(const void *)&JUDGED;
    for (size_t i = 0; i < sizeof JUDGED / sizeof(void *); i++)
        ck_assert_msg(members[i] != NULL, "backend %s: member %zu is missing", JUDGED.name, i);
    ck_assert(!backend_find("none") && !backend_find_compute("ref", "bf16"));
    ck_assert_str_eq(backend_absence("none"), "");
    ck_assert(!backend_find("cuda") == (strlen(backend_absence("cuda")) > 0));
}

int main(void)
{
    if (strcmp(JUDGED.name, "cpu") != 0) setenv("CK_FORK", "no", 1); // a device does not survive a fork
    kvb_error err = {0};
    bool open = JUDGED.open(&judged, &JUDGED, NULL, &err) == KVB_OK &&
                backend_ref.open(&reference, &backend_ref, NULL, &err) == KVB_OK;
    if (!open) printf("skip - operations of backend %s: %s\n", JUDGED.name, err.message);
    fflush(stdout);
    if (!open) return unit_run("profiler backend", UNIT_CASES(unit_case()));
#ifdef EMULATED // it is slow, and the rest is the same code as with f32
    if (strcmp(JUDGED.compute, "bf16x3") == 0)
        return unit_run("profiler backend", UNIT_CASES(unit_case(), judge_rows(), judge_weights()));
#endif
    return unit_run("profiler backend", UNIT_CASES(unit_case(), judge_rows(), judge_weights(), judge_sums(),
                                                   judge_attention(), judge_rules(), judge_bits(), judge_shapes()));
}
