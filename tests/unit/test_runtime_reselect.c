// Choosing again in grown heads against a naive choice among the remaining tokens; where sequences begin and end.
#include "test_runtime_cases.h"

enum { MOST = 400 };

// The judge chooses by preference, one token after the other, with positions in the text instead of rows.
static uint32_t slow_reselect(const float *scores, const uint32_t *places, uint32_t n_rows, uint32_t n_tokens,
                              uint32_t keep, uint32_t sink, uint32_t window, uint32_t *rows)
{
    int taken[MOST] = {0};
    uint32_t n = 0;
    for (; n < keep && n < n_rows; n++) {
        uint32_t best = UINT32_MAX;
        int best_protected = 0;
        for (uint32_t i = 0; i < n_rows; i++) {
            if (taken[i]) continue;
            int is_protected = places[i] < sink || (uint64_t)places[i] + window >= n_tokens;
            if (best == UINT32_MAX || is_protected > best_protected ||
                (is_protected == best_protected && !is_protected && scores[i] > scores[best])) {
                best = i;
                best_protected = is_protected;
            }
        }
        taken[best] = 1;
    }
    n = 0;
    for (uint32_t i = 0; i < n_rows; i++)
        if (taken[i]) rows[n++] = i;
    return n;
}

// Makes a head that was cut and has grown: some of the tokens below `n_tokens`, ascending. Returns their number.
static uint32_t random_places(uint64_t *random, uint32_t n_tokens, uint32_t *places)
{
    uint32_t n = 0, share = 1 + (uint32_t)(case_random(random) % 4);
    for (uint32_t i = 0; i < n_tokens; i++)
        if (case_random(random) % share == 0) places[n++] = i;
    return n;
}

UNIT_TEST(test_against_naive)
{
    uint64_t random = case_seed("test_against_naive");
    float scores[MOST];
    uint32_t places[MOST], fast[MOST], slow[MOST];
    for (int round = 0; round < 3000; round++) {
        uint32_t n_tokens = (uint32_t)(case_random(&random) % (round % 20 ? 50 : MOST));
        uint32_t n_rows = random_places(&random, n_tokens, places), keep = (uint32_t)(case_random(&random) % MOST);
        uint32_t sink = (uint32_t)(case_random(&random) % 9), window = (uint32_t)(case_random(&random) % 40);
        keep %= n_rows + 3;
        for (uint32_t i = 0; i < n_rows; i++) scores[i] = (float)(case_random(&random) % 7);
        uint32_t expected = slow_reselect(scores, places, n_rows, n_tokens, keep, sink, window, slow);
        ck_assert_int_eq(kvb_reselect(scores, places, n_rows, n_tokens, keep, sink, window, fast, MOST, NULL), KVB_OK);
        ck_assert_msg(memcmp(fast, slow, expected * sizeof *fast) == 0, "round %d: %u of %u rows, sink %u, window %u",
                      round, keep, n_rows, sink, window);
    }
}

UNIT_TEST(test_uncut_head_is_select)
{
    uint64_t random = case_seed("test_uncut_head_is_select");
    float scores[MOST];
    uint32_t places[MOST], again[MOST], once[MOST];
    for (uint32_t i = 0; i < MOST; i++) {
        places[i] = i;
        scores[i] = (float)case_uniform(&random);
    }
    ck_assert_int_eq(kvb_reselect(scores, places, MOST, MOST, 100, 4, 32, again, MOST, NULL), KVB_OK);
    ck_assert_int_eq(kvb_select(scores, MOST, 100, 4, 32, once, MOST, NULL), KVB_OK);
    ck_assert_mem_eq(again, once, 100 * sizeof *once);
}

UNIT_TEST(test_all_heads)
{
    // Ten tokens were seen; 5 and 6 are new, sinks are 0 and 1, the window is 8 and 9.
    const uint32_t places[] = {0, 1, 5, 6, 8, 9, /**/ 0, 9, /**/ 2, 3, 4, 5, 6, 7, 8, 9};
    const float scores[] = {0, 0, 2, 1, 0, 0, /**/ 0, 0, /**/ 5, 4, 3, 2, 1, 0, 9, 9};
    const size_t old[] = {0, 6, 8, 16};
    const uint32_t keep[] = {5, 4, 3}, expected[] = {0, 1, 2, 4, 5, /**/ 0, 1, /**/ 0, 6, 7};
    size_t offsets[4];
    uint32_t rows[10];
    kvb_error err;
    ck_assert_int_eq(kvb_reselect_all(scores, places, 3, old, 10, keep, 2, 2, offsets, rows, 10, &err), KVB_OK);
    ck_assert_mem_eq(offsets, ((size_t[]){0, 5, 7, 10}), sizeof offsets);
    ck_assert_mem_eq(rows, expected, sizeof expected);
    unit_refuses(kvb_reselect_all(scores, places, 3, old, 10, keep, 2, 2, offsets, rows, 9, &err), KVB_CAPACITY,
                 "head 2");
    const size_t falling[] = {0, 6, 5, 16};
    ck_assert_int_eq(kvb_reselect_all(scores, places, 3, falling, 10, keep, 2, 2, offsets, rows, 10, &err),
                     KVB_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(err.message, "old_offsets[2]"));
    ck_assert_int_eq(kvb_reselect_all(scores, places, 3, NULL, 10, keep, 2, 2, offsets, rows, 10, &err), KVB_ARGUMENT);
}

UNIT_TEST(test_errors)
{
    const float scores[] = {1, NAN, 3, 4};
    uint32_t rows[4] = {7, 7, 7, 7};
    help_fails(kvb_reselect(scores, (uint32_t[]){0, 2, 2, 3}, 4, 9, 2, 0, 0, rows, 4, err), KVB_ARGUMENT, "places[2]");
    help_fails(kvb_reselect(scores, (uint32_t[]){0, 2, 4, 9}, 4, 9, 2, 0, 0, rows, 4, err), KVB_ARGUMENT, "below 9");
    help_fails(kvb_reselect(scores, (uint32_t[]){0, 2, 4, 8}, 4, 9, 2, 0, 0, rows, 4, err), KVB_NUMERIC, "");
    help_fails(kvb_reselect(scores, (uint32_t[]){0, 2, 4, 8}, 4, 9, 2, 0, 0, rows, 1, err), KVB_CAPACITY, "");
    help_fails(kvb_reselect(scores, NULL, 4, 9, 2, 0, 0, rows, 4, err), KVB_ARGUMENT, "");
    ck_assert_uint_eq(rows[0], 7); // untouched
}

UNIT_TEST(test_cu_seqlens)
{
    const uint32_t lengths[] = {3, 0, 16, 17};
    int32_t cu[5];
    help_ok(kvb_cu_seqlens(lengths, 4, 0, 0, cu, 5, err));
    ck_assert_mem_eq(cu, ((int32_t[]){0, 3, 3, 19, 36}), sizeof cu);
    help_ok(kvb_cu_seqlens(lengths, 4, 2, 1, cu, 5, err));
    ck_assert_mem_eq(cu, ((int32_t[]){0, 5, 7, 25, 44}), sizeof cu);
    help_ok(kvb_cu_seqlens(lengths, 4, 0, 16, cu, 5, err));
    ck_assert_mem_eq(cu, ((int32_t[]){0, 1, 1, 2, 4}), sizeof cu);
    help_ok(kvb_cu_seqlens(lengths, 4, 1, 16, cu, 5, err));
    ck_assert_mem_eq(cu, ((int32_t[]){0, 1, 2, 4, 6}), sizeof cu);
    help_ok(kvb_cu_seqlens(lengths, 0, 0, 0, cu, 1, err));
    ck_assert_int_eq(cu[0], 0);
}

UNIT_TEST(test_cu_seqlens_errors)
{
    const uint32_t lengths[] = {INT32_MAX, UINT32_MAX};
    int32_t cu[3];
    help_ok(kvb_cu_seqlens(lengths, 1, 0, 0, cu, 2, err));
    ck_assert_int_eq(cu[1], INT32_MAX);
    help_fails(kvb_cu_seqlens(lengths, 1, 1, 0, cu, 2, err), KVB_UNSUPPORTED, "");
    help_fails(kvb_cu_seqlens(lengths + 1, 1, UINT32_MAX, 0, cu, 2, err), KVB_UNSUPPORTED, "batch smaller");
    help_fails(kvb_cu_seqlens(lengths, 2, 0, 64, cu, 2, err), KVB_CAPACITY, "");
    help_ok(kvb_cu_seqlens(lengths, 2, 0, 64, cu, 3, err));
    help_fails(kvb_cu_seqlens(NULL, 2, 0, 0, cu, 3, err), KVB_ARGUMENT, "");
}

UNIT_MAIN("runtime_reselect")
