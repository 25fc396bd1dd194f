// Selection against a naive stable sort, and that nothing allocates once a table is open.
#include "test_runtime_cases.h"

#if defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN 1
#endif
#endif

// ---- counting allocations ----
static size_t allocations;

#ifdef WITH_ASAN // the sanitizer owns malloc, but reports to a hook
int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void *, size_t),
                                              void (*on_free)(const volatile void *));
static void on_malloc(const volatile void *pointer, size_t size)
{
    (void)pointer;
    (void)size;
    ++allocations;
}
static void on_free(const volatile void *pointer)
{
    (void)pointer;
}
static void count_allocations(void)
{
    ck_assert(__sanitizer_install_malloc_and_free_hooks(on_malloc, on_free));
}
#else // the C library calls these instead of its own
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *pointer, size_t size);
void *malloc(size_t size)
{
    ++allocations;
    return __libc_malloc(size);
}
void *calloc(size_t count, size_t size)
{
    ++allocations;
    return __libc_calloc(count, size);
}
void *realloc(void *pointer, size_t size)
{
    ++allocations;
    return __libc_realloc(pointer, size);
}
static void count_allocations(void) {}
#endif

// ---- the slow judge ----

typedef struct ranked {
    int is_protected;
    float score;
    uint32_t position;
} ranked;

static int by_preference(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->is_protected != y->is_protected) return y->is_protected - x->is_protected;
    if (!x->is_protected && x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->position < y->position ? -1 : 1;
}

static int by_position(const void *a, const void *b)
{
    const uint32_t *x = a, *y = b;
    return *x < *y ? -1 : 1;
}

static void slow_select(const float *scores, uint32_t n_tokens, uint32_t keep, uint32_t sink, uint32_t window,
                        uint32_t *positions)
{
    ranked *order = calloc((size_t)n_tokens + 1, sizeof *order);
    for (uint32_t i = 0; i < n_tokens; ++i) {
        int is_protected = i < sink || (uint64_t)i + window >= n_tokens;
        order[i] = (ranked){is_protected, is_protected ? 0 : scores[i], i};
    }
    qsort(order, n_tokens, sizeof *order, by_preference);
    for (uint32_t i = 0; i < keep && i < n_tokens; ++i) positions[i] = order[i].position;
    qsort(positions, keep < n_tokens ? keep : n_tokens, sizeof *positions, by_position);
    free(order);
}

static void expect(const float *scores, uint32_t n_tokens, uint32_t keep, uint32_t sink, uint32_t window,
                   const uint32_t *expected)
{
    uint32_t positions[32], n = keep < n_tokens ? keep : n_tokens;
    ck_assert_int_eq(kvb_select(scores, n_tokens, keep, sink, window, positions, 32, NULL), KVB_OK);
    for (uint32_t i = 0; i < n; ++i) {
        ck_assert_msg(positions[i] == expected[i], "keep %u: position %u is %u, expected %u", keep, i, positions[i],
                      expected[i]);
    }
}

UNIT_TEST(test_examples)
{
    const float scores[20] = {0, 0, 0, 0, 9, 1, 8, 2, 7, 3, 6, 4, 5, 5, 5, 5, 5, 5, 0, 0};
    static const uint32_t all[20] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19};
    // Protection is a priority: what does not fit is lost, the newest first (run with kvpress 0.5.5).
    expect(scores, 20, 3, 4, 1, (const uint32_t[]){0, 1, 2});
    expect(scores, 20, 6, 4, 4, (const uint32_t[]){0, 1, 2, 3, 16, 17});
    expect(scores, 20, 8, 4, 4, (const uint32_t[]){0, 1, 2, 3, 16, 17, 18, 19});
    expect(scores, 20, 9, 4, 4, (const uint32_t[]){0, 1, 2, 3, 4, 16, 17, 18, 19});
    expect(scores, 20, 5, 0, 0, (const uint32_t[]){4, 6, 8, 10, 12}); // the first of six fives
    expect(scores, 20, 0, 4, 4, all);
    expect(scores, 3, 2, 4, 4, all);
    expect(scores, 5, 5, 4, 4, all);
    expect(scores, 5, 4, 2, 8, all); // the window would overlap the sinks
    expect(scores, 5, 9, 0, 0, all);
    expect(scores, 1, 1, 0, 0, all);
    expect(scores, 0, 7, 1, 1, all);
    expect(scores, 20, 20, UINT32_MAX, UINT32_MAX, all);
    expect(scores, 20, 2, UINT32_MAX, UINT32_MAX, all);

    const float signs[6] = {-0.0f, 0.0f, -1, 1e-45f, -INFINITY, INFINITY};
    expect(signs, 6, 1, 0, 0, (const uint32_t[]){5});
    expect(signs, 6, 2, 0, 0, (const uint32_t[]){3, 5});
    expect(signs, 6, 3, 0, 0, (const uint32_t[]){0, 3, 5}); // -0 equals +0: the lower position
    expect(signs, 6, 5, 0, 0, (const uint32_t[]){0, 1, 2, 3, 5});
}

static float random_score(uint64_t *random, uint64_t kind)
{
    uint32_t bits = (uint32_t)case_random(random);
    float value;
    if (kind == 0) return (float)(bits % 3) - 1;
    if (kind == 1) return (float)(bits % 50) * 0.125f - 3;
    if (kind == 2) return bits % 2 ? 0.0f : -0.0f;
    if (kind == 3) return 1 + (float)(bits % 7) * 1.1920929e-7f; // differ in the last bits only
    if (kind == 4) return (float)case_uniform(random);
    memcpy(&value, &bits, sizeof value); // any bits but NaN
    return isnan(value) ? INFINITY : value;
}

UNIT_TEST(test_against_sort)
{
    uint64_t random = case_seed("test_against_sort");
    float scores[700];
    uint32_t fast[700], slow[700];
    for (int round = 0; round < 6000; ++round) {
        uint32_t n_tokens = (uint32_t)(case_random(&random) % (round % 10 ? 60 : 700));
        uint32_t keep = (uint32_t)(case_random(&random) % (n_tokens + 3));
        uint32_t sink = (uint32_t)(case_random(&random) % 9), window = (uint32_t)(case_random(&random) % 40);
        uint64_t kind = case_random(&random) % 6;
        for (uint32_t i = 0; i < n_tokens; ++i) scores[i] = random_score(&random, kind);
        memset(fast, 0xff, sizeof fast);
        memset(slow, 0xff, sizeof slow);
        slow_select(scores, n_tokens, keep, sink, window, slow);
        ck_assert_int_eq(kvb_select(scores, n_tokens, keep, sink, window, fast, 700, NULL), KVB_OK);
        ck_assert_msg(memcmp(fast, slow, sizeof fast) == 0, "round %d: %u of %u, sink %u, window %u, kind %u", round,
                      keep, n_tokens, sink, window, (unsigned)kind);
    }
}

UNIT_TEST(test_errors)
{
    float scores[8] = {1, 2, 3, NAN, 5, 6, 7, NAN};
    uint32_t positions[8];
    memset(positions, 0xff, sizeof positions);
    help_fails(kvb_select(scores, 8, 4, 1, 1, positions, 8, err), KVB_NUMERIC, "scores[3]");
    ck_assert_uint_eq(positions[0], UINT32_MAX);                // untouched
    help_ok(kvb_select(scores, 8, 2, 1, 1, positions, 8, err)); // no score is read
    help_ok(kvb_select(scores, 8, 8, 1, 1, positions, 8, err));
    scores[3] = 4;
    help_ok(kvb_select(scores, 8, 4, 1, 1, positions, 8, err)); // a protected NaN does not matter
    help_fails(kvb_select(scores, 8, 4, 1, 1, positions, 3, err), KVB_CAPACITY, "");
    help_fails(kvb_select(NULL, 8, 4, 1, 1, positions, 8, err), KVB_ARGUMENT, "");
    ck_assert_int_eq(kvb_select(scores, 8, 4, 1, 1, NULL, 8, NULL), KVB_ARGUMENT);
}

UNIT_TEST(test_all_heads)
{
    enum { HEADS = 5, TOKENS = 100 };
    uint64_t random = case_seed("test_all_heads");
    float scores[HEADS * TOKENS];
    const uint32_t keep[HEADS] = {10, 200, 0, 1, 99};
    size_t offsets[HEADS + 1];
    uint32_t positions[210], one[TOKENS];
    for (size_t i = 0; i < HEADS * TOKENS; ++i) scores[i] = random_score(&random, 1);
    help_ok(kvb_select_all(scores, HEADS, TOKENS, keep, 4, 1, offsets, positions, 210, err));
    unit_numbers(offsets[0], 0, offsets[HEADS], 210);
    for (size_t h = 0; h < HEADS; ++h) {
        uint32_t n = keep[h] < TOKENS ? keep[h] : TOKENS;
        ck_assert_uint_eq(offsets[h + 1] - offsets[h], n);
        ck_assert_int_eq(kvb_select(scores + h * TOKENS, TOKENS, keep[h], 4, 1, one, TOKENS, NULL), KVB_OK);
        ck_assert(memcmp(one, positions + offsets[h], n * sizeof *one) == 0);
    }
    help_fails(kvb_select_all(scores, HEADS, TOKENS, keep, 4, 1, offsets, positions, 209, err), KVB_CAPACITY, "head 4");
    scores[3 * TOKENS + 50] = NAN;
    help_fails(kvb_select_all(scores, HEADS, TOKENS, keep, 0, 0, offsets, positions, 210, err), KVB_NUMERIC,
               "scores[3, 50]");
    help_fails(kvb_select_all(scores, SIZE_MAX / 8, TOKENS, keep, 0, 0, offsets, positions, 210, err), KVB_ARGUMENT,
               "");
    help_ok(kvb_select_all(scores, 0, TOKENS, keep, 0, 0, offsets, positions, 0, err));
    ck_assert_int_eq(kvb_select_all(scores, 1, TOKENS, NULL, 0, 0, offsets, positions, 210, NULL), KVB_ARGUMENT);
}

// Engines call these between two tokens: nothing but open and close may allocate.
UNIT_TEST(test_no_allocation)
{
    enum { TOKENS = 5000, HEADS = 1024 };
    static float scores[TOKENS];
    static uint32_t keep[2 * HEADS], positions[TOKENS];
    size_t offsets[2];
    uint64_t random = case_seed("test_no_allocation");
    table_case c = case_default();
    c.n_layers = 2, c.n_kv_heads = HEADS;
    double *r = malloc(99 * 2 * HEADS * sizeof *r);
    for (size_t i = 0; i < 99 * 2 * HEADS; ++i) r[i] = case_uniform(&random);
    for (size_t i = 0; i < TOKENS; ++i) scores[i] = random_score(&random, 4);
    c.prune_ratio = r;
    count_allocations();
    size_t before_open = allocations;
    kvb_table *t = case_open(&c);
    ck_assert_uint_gt(allocations, before_open); // else the counter does not count

    kvb_error err;
    kvb_row row;
    kvb_budget_summary sum;
    kvb_expectation expectation = {.n_layers = 2, .metric = "keydiff"};
    int failures = 0; // Check's own assertions allocate, so they wait
    size_t before = allocations;
    for (unsigned i = 0; i < 24; ++i) {
        kvb_budget_options opt = {(kvb_rounding)(i % 3), (kvb_lookup)(i / 3 % 2), (int)(i / 6 % 2), i / 12 ? 16 : 0};
        failures += kvb_budgets(t, 0.803, TOKENS, &opt, keep, 2 * HEADS, &err) != KVB_OK;
        failures += kvb_budgets_summarize(t, 0.803, TOKENS, &opt, keep, 2 * HEADS, &sum, &err) != KVB_OK;
    }
    failures += kvb_budgets(t, 0.8, TOKENS, NULL, keep, 1, &err) != KVB_CAPACITY;
    failures += kvb_select(scores, TOKENS, 1234, 4, 32, positions, TOKENS, &err) != KVB_OK;
    failures += kvb_select_all(scores, 1, TOKENS, keep, 4, 32, offsets, positions, TOKENS, &err) != KVB_OK;
    failures += kvb_table_check(t, &expectation, &err) != KVB_MISMATCH;
    failures += kvb_table_row(t, 3, &row, &err) != KVB_OK;
    failures += kvb_table_metadata(t, "metric") == NULL;
    failures += kvb_table_info(t) == NULL || kvb_table_prune_ratios(t) == NULL;
    size_t after = allocations;
    unit_numbers(failures, 0, after, before);
    kvb_table_close(t);
    free(r);
}

UNIT_MAIN("runtime_select")
