// The ragged cache by itself, and decoding over it on the tiny model: compared with the profiler's forward pass, with
// other steps and batches, and, if entries were evicted, with a full cache in which only the kept ones are looked at.
#include "evaluator/attend.h"
#include "evaluator/session.h"
#include "formats/need.h"
#include "test_profiler_cases.h"

enum { L = 2, G = 2, D = 16, VOCABULARY = 300, T = 90, N = 24 };

// ---- the cache ----

// Head h holds rooms[h] - 1 entries at positions 3, 6, 9, ...; every number of an entry says where it belongs.
static kv_cache *filled_cache(const uint32_t rooms[L * G])
{
    kv_cache *c = kv_cache_open(L, G, D, rooms);
    for (uint32_t l = 0; l < L; l++)
        for (uint32_t g = 0; g < G; g++)
            for (uint32_t i = 0; i + 1 < rooms[l * G + g]; i++) {
                float k[D], v[D];
                for (int x = 0; x < D; x++) k[x] = (float)(l * 1000 + g * 100 + i) + (float)x / 32, v[x] = -k[x];
                kv_cache_append(c, l, g, k, v, 3 * (i + 1));
            }
    return c;
}

// Checks that the head holds exactly the entries of filled_cache with these indices.
static void expect_entries(const kv_cache *c, uint32_t l, uint32_t g, const uint32_t *indices, uint32_t n)
{
    kv_span s = kv_cache_span(c, l, g);
    ck_assert_uint_eq(s.count, n);
    for (uint32_t i = 0; i < n; i++) {
        ck_assert_uint_eq(s.positions[i], 3 * (indices[i] + 1));
        for (int x = 0; x < D; x++) {
            float want = (float)(l * 1000 + g * 100 + indices[i]) + (float)x / 32;
            ck_assert(s.k[i * D + (uint32_t)x] == want && s.v[i * D + (uint32_t)x] == -want);
        }
    }
}

UNIT_TEST(cache_evicts_and_shrinks)
{
    const uint32_t rooms[L * G] = {5, 9, 1, 3};
    kv_cache *c = filled_cache(rooms);
    unit_numbers(kv_cache_entries(c), 4 + 8 + 0 + 2, kv_cache_room(c), 1, kv_cache_bytes(c),
                 (uint64_t)14 * 2 * D * sizeof(float));
    kv_cache_keep(c, 0, 0, (const uint32_t[]){0, 2}, 2);
    kv_cache_keep(c, 1, 1, (const uint32_t[]){1}, 1);
    kv_cache_keep(c, 0, 1, (const uint32_t[]){0, 3, 4, 7}, 4);
    uint64_t before = kv_cache_allocated(c);
    for (int pass = 0; pass < 2; pass++) { // before and after compacting
        expect_entries(c, 0, 0, (const uint32_t[]){0, 2}, 2);
        expect_entries(c, 0, 1, (const uint32_t[]){0, 3, 4, 7}, 4);
        expect_entries(c, 1, 0, NULL, 0);
        expect_entries(c, 1, 1, (const uint32_t[]){1}, 1);
        if (pass == 0) kv_cache_compact(c, 2);
    }
    unit_numbers(kv_cache_room(c), 2, c->offsets[L * G], 7 + 2 * L * G);
    ck_assert_uint_lt(kv_cache_allocated(c), before + 1);
    kv_cache *copy = kv_cache_fork(c, 0);
    kv_cache_keep(c, 0, 1, (const uint32_t[]){1, 2, 3}, 3);
    expect_entries(copy, 0, 1, (const uint32_t[]){0, 3, 4, 7}, 4);
    ck_assert_uint_eq(kv_cache_room(copy), 0);
    kv_cache_close(copy);
    kv_cache_close(c);
}

static void expect_same(const kv_cache *a, const kv_cache *b)
{
    unit_numbers(a->next_position, b->next_position, kv_cache_room(a), kv_cache_room(b));
    for (uint32_t h = 0; h < L * G; h++) {
        kv_span s = kv_cache_span(a, h / G, h % G), t = kv_cache_span(b, h / G, h % G);
        ck_assert_uint_eq(s.count, t.count);
        ck_assert_mem_eq(s.positions, t.positions, s.count * sizeof *s.positions);
        ck_assert_mem_eq(s.k, t.k, s.count * D * sizeof *s.k);
        ck_assert_mem_eq(s.v, t.v, s.count * D * sizeof *s.v);
    }
}

// A packed cache holds what kvb_pack makes of each head and counts its bytes; an extension of it reads those values.
UNIT_TEST(a_packed_cache_holds_bytes)
{
    const uint32_t rooms[L * G] = {41, 9, 1, 34};
    const uint8_t formats[L * G * 2] = {KVB_PACK_INT4, KVB_PACK_INT2, KVB_PACK_BF16, KVB_PACK_INT8,
                                        KVB_PACK_INT4, KVB_PACK_INT4, KVB_PACK_INT8, KVB_PACK_BF16};
    kv_cache *plain = filled_cache(rooms), *c = filled_cache(rooms);
    attend_scratch scratch = {0};
    uint64_t bytes = 0;
    help_ok(kv_cache_pack(c, formats, err));
    kv_cache *more = kv_cache_extend(c, 3), *first = kv_cache_extend(plain, 3);
    for (uint32_t h = 0; h < L * G; h++) {
        kv_span want = kv_cache_span(plain, h / G, h % G), got = attend_before(&scratch, more, h / G, h % G);
        float rows[40 * D], alone[2 * 40 * D];
        unsigned char packed[4096];
        kv_span again = kv_cache_unpack(c, h / G, h % G, alone);
        ck_assert_uint_eq(got.count, want.count);
        ck_assert_mem_eq(got.positions, want.positions, want.count * sizeof *want.positions);
        for (int side = 0; side < 2; side++) {
            kvb_packing p = formats[2 * h + (uint32_t)side];
            bytes += kvb_packed_bytes(p, (kvb_side)side, want.count, D);
            help_ok(kvb_pack(p, (kvb_side)side, side ? want.v : want.k, want.count, D, packed, err));
            help_ok(kvb_unpack(p, (kvb_side)side, packed, want.count, D, rows, err));
            ck_assert_mem_eq(side ? got.v : got.k, rows, want.count * D * sizeof *rows);
            ck_assert_mem_eq(side ? again.v : again.k, rows, want.count * D * sizeof *rows);
        }
        kv_span before = attend_before(&scratch, first, h / G, h % G); // not packed: the base's own memory
        ck_assert(before.k == want.k && before.v == want.v);
    }
    ck_assert_uint_eq(kv_cache_bytes(c), bytes);
    ck_assert_uint_gt(kv_cache_allocated(c), bytes);
    ck_assert_uint_lt(kv_cache_allocated(c), kv_cache_allocated(plain));
    attend_release(&scratch);
    kv_cache_close(more);
    kv_cache_close(first);
    kv_cache_close(c);
    kv_cache_span(plain, 0, 1).v[3] = NAN;
    help_fails(kv_cache_pack(plain, formats, err), KVB_NUMERIC, "layer 0, KV head 1: kvb_pack: values: token 0");
    kv_cache_close(plain);
}

UNIT_TEST(a_refilled_cache_is_a_new_one)
{
    enum { TOKENS = 6, EXTRA = 2 };
    float k[L * G * TOKENS * D], v[L * G * TOKENS * D];
    size_t many[L * G + 1] = {0, 3, 4, 9, 12}, few[L * G + 1] = {0, 1, 2, 2, 5};
    uint32_t positions[] = {0, 2, 5, 1, 0, 1, 2, 3, 5, 2, 3, 4};
    const kept_set kept[] = {
        {L * G, few, positions, NULL}, {L * G, many, positions, NULL}, {L * G, few, positions, NULL}};
    kv_cache *again = NULL, *fresh;
    for (size_t i = 0; i < sizeof k / sizeof *k; i++) k[i] = (float)i, v[i] = -(float)i;
    for (int i = 0; i < 4; i++) { // a little, more, a little in the memory of more, everything
        const kept_set *what = i < 3 ? &kept[i] : NULL;
        const float *memory = again ? again->k : NULL;
        fresh = kv_cache_gather(L, G, D, k, v, TOKENS, what, EXTRA);
        if (again) kv_cache_refill(again, k, v, TOKENS, what, EXTRA);
        else again = kv_cache_gather(L, G, D, k, v, TOKENS, what, EXTRA);
        expect_same(again, fresh);
        ck_assert(i != 2 || again->k == memory);
        kv_cache_append(again, 0, 0, k, v, TOKENS); // the next refill must drop this entry
        kv_cache_close(fresh);
    }
    kv_cache_close(again);
}

// ---- decoding ----

typedef struct bed {
    model *m;
    session *s;
    int32_t context[T], next[N];
    metric snapkv;
} bed;

static void bed_open(bed *b)
{
    help_ok(model_open(&b->m, help_path("tiny.gguf"), backend_find("cpu"), NULL, err));
    help_ok(metric_parse(&b->snapkv, "snapkv:kvpress:window=8", err));
    session_plan plan = {T, N, 3 * N, &b->snapkv, 1, true, false, 0};
    help_ok(session_open(&b->s, b->m, &plan, err));
    for (int i = 0; i < T; i++) b->context[i] = (int32_t)((case_uniform() + 1) * 0.5 * VOCABULARY);
    for (int i = 0; i < N; i++) b->next[i] = (int32_t)((case_uniform() + 1) * 0.5 * VOCABULARY);
    help_ok(session_prefill(b->s, b->context, T, NULL, NULL, err));
}

static void bed_close(bed *b)
{
    session_close(b->s);
    model_free(b->m);
}

// Returns the logits of the continuation over a cache of `kept`, in steps of `step` tokens.
static float *decode_all(bed *b, const kept_set *kept, uint32_t step)
{
    float *logits = case_alloc((size_t)N * VOCABULARY, sizeof *logits);
    kv_cache *c = session_cache(b->s, kept, N);
    for (uint32_t at = 0; at < N; at += step)
        help_ok(decoder_run(b->s->decode, &c, 1, &step, b->next + at, NULL, LOGITS_ALL,
                            logits + (size_t)at * VOCABULARY, err));
    ck_assert_uint_eq(c->next_position, T + N);
    kv_cache_close(c);
    return logits;
}

static void select_some(bed *b, kept_set *kept)
{
    const uint32_t keep[L * G] = {20, 41, 9, 90};
    help_ok(session_select(b->s, b->s->now.scores[0], keep, 4, 8, kept, err));
}

UNIT_TEST(full_cache_is_the_forward_pass)
{
    bed b;
    bed_open(&b);
    float *want = case_alloc((size_t)N * VOCABULARY, sizeof *want);
    float *importance = case_alloc((size_t)L * G * T, sizeof *importance);
    help_ok(session_reference(b.s, b.next, N, importance, want, err));
    float *at_once = decode_all(&b, NULL, N), *by_one = decode_all(&b, NULL, 1), *by_six = decode_all(&b, NULL, 6);
    case_near("all rows at once", at_once, want, (size_t)N * VOCABULARY, 2e-5);
    case_near("token by token", by_one, want, (size_t)N * VOCABULARY, 2e-5);
    case_near("six at a time", by_six, want, (size_t)N * VOCABULARY, 2e-5);
    // Selecting everything is the same as selecting nothing, to the bit.
    const uint32_t keep[L * G] = {T, T, T, T};
    kept_set all;
    help_ok(session_select(b.s, b.s->now.scores[0], keep, 4, 8, &all, err));
    float *selected = decode_all(&b, &all, N);
    case_same("nothing evicted", selected, at_once, (size_t)N * VOCABULARY);
    double mass = 0;
    for (size_t i = 0; i < (size_t)L * G * T; i++) mass += importance[i];
    ck_assert(mass > 0);
    free_all(want, importance, at_once, by_one, by_six, selected);
    kept_set_free(&all);
    bed_close(&b);
}

// A hook that lets a row see the kept entries of the context and everything after it.
static uint32_t choose_kept(void *context, const decode_view *view, uint32_t g, kv_span span, const float *q,
                            uint32_t *indices)
{
    const kept_set *kept = context;
    uint32_t h = view->layer * G + g, n = 0;
    (void)q;
    for (size_t i = kept->offsets[h]; i < kept->offsets[h + 1]; i++) indices[n++] = kept->positions[i];
    for (uint32_t j = T; j < span.count; j++) indices[n++] = j;
    return n;
}

UNIT_TEST(evicting_is_not_looking)
{
    bed b;
    bed_open(&b);
    kept_set kept;
    select_some(&b, &kept);
    float *evicted = decode_all(&b, &kept, N), *full = decode_all(&b, NULL, N);
    float *masked = case_alloc((size_t)N * VOCABULARY, sizeof *masked);
    decode_hooks hooks = {.context = &kept, .choose = choose_kept};
    kv_cache *c = session_cache(b.s, NULL, N);
    for (uint32_t i = 0; i < N; i++)
        help_ok(decoder_run(b.s->decode, &c, 1, &(uint32_t){1}, b.next + i, &hooks, LOGITS_LAST,
                            masked + (size_t)i * VOCABULARY, err));
    case_near("evicted against masked", evicted, masked, (size_t)N * VOCABULARY, 2e-5);
    double difference = 0;
    for (size_t i = 0; i < (size_t)N * VOCABULARY; i++) difference = fmax(difference, fabs(evicted[i] - full[i]));
    ck_assert_msg(difference > 1e-3, "evicting two thirds changed nothing: %g", difference);
    free_all(evicted, full, masked);
    kv_cache_close(c);
    kept_set_free(&kept);
    bed_close(&b);
}

UNIT_TEST(a_batch_is_its_sequences)
{
    bed b;
    bed_open(&b);
    kept_set kept;
    select_some(&b, &kept);
    const uint32_t rows[3] = {N, 5, N - 5};
    kv_cache *c[3];
    int32_t ids[2 * N];
    for (int i = 0; i < 3; i++) c[i] = session_cache(b.s, i == 1 ? NULL : &kept, N);
    memcpy(ids, b.next, sizeof b.next);
    memcpy(ids + N, b.next, 5 * sizeof *ids);
    memcpy(ids + N + 5, b.next, (N - 5) * sizeof *ids);
    float *got = case_alloc((size_t)2 * N * VOCABULARY, sizeof *got);
    help_ok(decoder_run(b.s->decode, c, 3, rows, ids, NULL, LOGITS_ALL, got, err));
    float *evicted = decode_all(&b, &kept, N), *full = decode_all(&b, NULL, N);
    case_same("first sequence", got, evicted, (size_t)N * VOCABULARY);
    case_near("second sequence", got + (size_t)N * VOCABULARY, full, (size_t)5 * VOCABULARY, 2e-5);
    case_near("third sequence", got + (size_t)(N + 5) * VOCABULARY, evicted, (size_t)(N - 5) * VOCABULARY, 2e-5);
    for (int i = 0; i < 3; i++) kv_cache_close(c[i]);
    free_all(got, evicted, full);
    kept_set_free(&kept);
    bed_close(&b);
}

// ---- hooks ----

typedef struct sums {
    double rows[L][G], worst;
    uint32_t calls;
} sums;

static void add_weights(void *context, const decode_view *view, uint32_t g, kv_span span, const float *weights)
{
    sums *s = context;
    for (uint32_t r = 0; r < view->n_rows * view->group; r++) {
        double total = 0;
        for (uint32_t j = 0; j < span.count; j++) total += weights[(size_t)r * span.count + j];
        s->rows[view->layer][g] += total;
    }
}

// Keeps every head at ten entries by dropping the third oldest.
static kvb_status drop_third(void *context, const decode_view *view, kvb_error *err_)
{
    (void)context;
    (void)err_;
    for (uint32_t g = 0; g < G; g++) {
        uint32_t n = kv_cache_span(view->cache, view->layer, g).count, keep[10] = {0, 1};
        for (uint32_t i = 2; i < 10; i++) keep[i] = n - 10 + i;
        if (n > 10) kv_cache_keep(view->cache, view->layer, g, keep, 10);
    }
    return KVB_OK;
}

UNIT_TEST(hooks_see_and_evict)
{
    bed b;
    bed_open(&b);
    sums s = {0};
    decode_hooks hooks = {.context = &s, .attended = add_weights, .layer_done = drop_third};
    float logits[VOCABULARY];
    kv_cache *c = session_cache(b.s, NULL, 1);
    for (uint32_t i = 0; i < N; i++)
        help_ok(decoder_run(b.s->decode, &c, 1, &(uint32_t){1}, b.next + i, &hooks, LOGITS_LAST, logits, err));
    for (uint32_t l = 0; l < L; l++)
        for (uint32_t g = 0; g < G; g++) {
            kv_span span = kv_cache_span(c, l, g);
            ck_assert(fabs(s.rows[l][g] - 2.0 * N) < 1e-4); // two query heads per group, a probability of 1 each
            ck_assert_uint_eq(span.count, 10);
            ck_assert(span.positions[0] == 0 && span.positions[1] == 1 && span.positions[9] == T + N - 1);
            for (uint32_t i = 1; i < 10; i++) ck_assert(span.positions[i] > span.positions[i - 1]);
        }
    kv_cache_close(c);
    bed_close(&b);
}

UNIT_TEST(errors)
{
    bed b;
    bed_open(&b);
    float logits[VOCABULARY];
    kv_cache *c = session_cache(b.s, NULL, 1);
    help_fails(decoder_run(b.s->decode, &c, 1, &(uint32_t){2}, b.next, NULL, LOGITS_LAST, logits, err), KVB_CAPACITY,
               "room for 1");
    int32_t wrong = VOCABULARY;
    help_fails(decoder_run(b.s->decode, &c, 1, &(uint32_t){1}, &wrong, NULL, LOGITS_LAST, logits, err), KVB_ARGUMENT,
               "id 300");
    c->next_position = T + N;
    help_fails(decoder_run(b.s->decode, &c, 1, &(uint32_t){1}, b.next, NULL, LOGITS_LAST, logits, err), KVB_ARGUMENT,
               "position");
    const float *memory = c->k;
    session_cache_again(b.s, NULL, 1, &c);
    ck_assert(c->k == memory && c->next_position == T);
    kv_cache_close(c);
    bed_close(&b);
}

static kvb_status count_layers(void *context, const decode_view *view, kvb_error *err)
{
    (void)context, (void)view, (void)err;
    return KVB_OK;
}

// Questions that share a base get what they get from copies of it (within 1e-5), and do not change it.
UNIT_TEST(a_base_is_shared)
{
    static bed b;
    kept_set kept;
    kv_cache *base, *copy, *tails[2];
    float *want = case_alloc((size_t)N * VOCABULARY, sizeof *want),
          *got = case_alloc((size_t)2 * N * VOCABULARY, sizeof *got);
    int32_t ids[2 * N];
    bed_open(&b);
    select_some(&b, &kept);
    base = session_cache(b.s, &kept, 0);
    copy = kv_cache_fork(base, N);
    for (int i = 0; i < 2; i++) {
        tails[i] = kv_cache_extend(base, N + 1);
        memcpy(ids + i * N, b.next, sizeof b.next);
    }
    for (uint32_t at = 0; at < N; at += N / 4) { // rows one by one, and many at a time
        const uint32_t n = N / 4, both[2] = {n, n}, one = 1;
        int32_t step[N / 2];
        for (uint32_t i = 0; i < 2 * n; i++) step[i] = ids[at + i % n];
        for (uint32_t i = 0; i < n; i++)
            help_ok(decoder_run(b.s->decode, &copy, 1, &one, b.next + at + i, NULL, LOGITS_LAST,
                                want + (size_t)(at + i) * VOCABULARY, err));
        help_ok(decoder_run(b.s->decode, tails, 2, both, step, NULL, LOGITS_ALL, got, err));
        case_near("behind a base", got, want + (size_t)at * VOCABULARY, (size_t)n * VOCABULARY, 1e-5);
        case_same("both tails", got, got + (size_t)n * VOCABULARY, (size_t)n * VOCABULARY);
    }
    unit_numbers(tails[0]->next_position, T + N, kv_cache_entries(tails[0]), L * G * N, kv_cache_entries(base),
                 kept.offsets[L * G]);
    ck_assert_uint_lt(kv_cache_allocated(tails[0]), kv_cache_allocated(copy));
    kv_cache_close(tails[1]);
    tails[1] = kv_cache_extend(base, N);
    decode_hooks hooks[2] = {{.layer_done = NULL}, {.layer_done = count_layers}};
    help_fails(decoder_run(b.s->decode, &tails[1], 1, (const uint32_t[]){1}, ids, &hooks[1], LOGITS_LAST, got, err),
               KVB_ARGUMENT, "a cache with a base");
    help_ok(decoder_run(b.s->decode, &tails[1], 1, (const uint32_t[]){1}, ids, &hooks[0], LOGITS_LAST, got, err));
    kv_cache_close(tails[0]);
    kv_cache_close(tails[1]);
    kv_cache_close(copy);
    kv_cache_close(base);
    kept_set_free(&kept);
    free_all(want, got);
    bed_close(&b);
}

UNIT_MAIN_EACH("evaluator: cache and decoder", case_tiny_setup, help_teardown)
