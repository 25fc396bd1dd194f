// The sorts in linear time against qsort, stable and for any number of key bits; keys that order as the numbers do.
#include "solver/radix.h"
#include "unit.h"
#include <float.h>
#include <math.h>
#include <string.h>

enum { MOST = 5000 };

static uint64_t state = 88172645463325252u;

static uint64_t random_bits(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

// By key, then by where the item stood: what a stable sort must give.
static int stable_order(const void *x, const void *y)
{
    const keyed *a = x, *b = y;
    if (a->key != b->key) return a->key < b->key ? -1 : 1;
    return a->a < b->a ? -1 : a->a > b->a;
}

START_TEST(sorts_stably)
{
    static keyed items[MOST], want[MOST], scratch[MOST];
    const size_t sizes[] = {0, 1, 2, 47, 48, 49, 1000, MOST}; // around the size from which on digits are counted
    for (unsigned bits = 1; bits <= 64; bits += 9) {
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            size_t n = sizes[s];
            for (size_t i = 0; i < n; i++)
                items[i] = (keyed){random_bits() >> (64 - bits), (uint32_t)i, 7 * (uint32_t)i};
            memcpy(want, items, n * sizeof *items);
            qsort(want, n, sizeof *want, stable_order);
            radix_sort(items, scratch, n, bits);
            for (size_t i = 0; i < n; i++)
                ck_assert_msg(items[i].key == want[i].key && items[i].a == want[i].a && items[i].b == want[i].b,
                              "%u bits, %zu items: item %zu", bits, n, i);
        }
    }
}
END_TEST

START_TEST(sorts_words)
{
    static uint64_t items[MOST], scratch[MOST];
    static keyed want[MOST];
    for (int few = 0; few < 2; few++) {
        for (uint32_t i = 0; i < MOST; i++) {
            uint64_t key = few ? random_bits() % 3 : random_bits() >> 32;
            items[i] = key << 32 | i;
            want[i] = (keyed){key, i, 0};
        }
        qsort(want, MOST, sizeof *want, stable_order);
        radix_sort_words(items, scratch, MOST);
        for (uint32_t i = 0; i < MOST; i++) ck_assert_uint_eq(items[i], want[i].key << 32 | want[i].a);
    }
    radix_sort_words(items, scratch, 0); // nothing to sort is allowed
}
END_TEST

START_TEST(keys_order_as_numbers)
{
    const double ascending[] = {-INFINITY, -DBL_MAX, -1, -FLT_MIN, -5e-324, 0,
                                5e-324,    FLT_MIN,  1,  1.5,      DBL_MAX, INFINITY};
    size_t n = sizeof ascending / sizeof *ascending;
    for (size_t i = 1; i < n; i++) {
        ck_assert_uint_lt(key_from_double(ascending[i - 1]), key_from_double(ascending[i]));
        float a = (float)ascending[i - 1], b = (float)ascending[i];
        if (a < b) ck_assert_uint_lt(key_from_float(a), key_from_float(b));
    }
    ck_assert_uint_eq(key_from_double(-0.0), key_from_double(0.0));
    ck_assert_uint_eq(key_from_float(-0.0f), key_from_float(0.0f));
    for (size_t i = 0; i < n; i++)
        if (ascending[i] >= 0) ck_assert(double_from_key(key_from_double(ascending[i])) == ascending[i]);
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, sorts_stably);
    tcase_add_test(tc, sorts_words);
    tcase_add_test(tc, keys_order_as_numbers);
}

UNIT_MAIN("solver_radix", fill)
