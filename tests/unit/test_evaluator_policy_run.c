// Policies over the decoder on the tiny model: a budget for everything changes nothing, a constant cache stays
// constant, and a restart forgets what a question did.
#include "evaluator/policy_run.h"
#include "test_profiler_cases.h"

enum { L = 2, G = 2, VOCABULARY = 300, T = 150, N = 24, HEADS = L * G };

typedef struct bed {
    model *m;
    session *s;
    int32_t context[T], next[N];
    float full[N * VOCABULARY];
} bed;

static const char *const ALL[] = {"full",      "morphkv:window=8", "morphkv:window=8:fusion=max", "tova", "h2o",
                                  "streaming", "keydiff:block=16", "lagkv:lag=16:sink=4",         "topk", "quest",
                                  "sparq",     "rocketkv",         "rocketkv-mt:window=8"};
enum { N_ALL = sizeof ALL / sizeof *ALL };

static void decode(bed *b, policy_run *run, const kv_cache *from, float *logits, uint32_t *longest)
{
    kv_cache *c = kv_cache_fork(from, N);
    decode_hooks hooks = run ? policy_run_hooks(run) : (decode_hooks){0};
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t one = 1;
        help_ok(decoder_run(b->s->decode, &c, 1, &one, &b->next[i], run ? &hooks : NULL, LOGITS_LAST,
                            logits + (size_t)i * VOCABULARY, err));
        if (i == N / 2 && run) help_ok(policy_run_turn(run, c, err));
        for (uint32_t h = 0; longest && h < HEADS; h++)
            longest[h] = c->counts[h] > longest[h] ? c->counts[h] : longest[h];
    }
    kv_cache_close(c);
}

static void bed_open(bed *b)
{
    help_ok(model_open(&b->m, help_path("tiny.gguf"), backend_find("cpu"), NULL, err));
    session_plan plan = {.max_tokens = T, .max_new = N, .max_rows = T};
    help_ok(session_open(&b->s, b->m, &plan, err));
    for (int i = 0; i < T; i++) b->context[i] = (int32_t)((case_uniform() + 1) * 0.5 * VOCABULARY);
    for (int i = 0; i < N; i++) b->next[i] = (int32_t)((case_uniform() + 1) * 0.5 * VOCABULARY);
}

// One prefill for all runs; it also computes the full cache's logits.
static void bed_prefill(bed *b, policy_run **runs, size_t n)
{
    kv_cache *c;
    policy_watch watch = {runs, n};
    layer_observer observer = policy_observer(&watch);
    help_ok(session_prefill(b->s, b->context, T, &observer, NULL, err));
    c = session_cache(b->s, NULL, 0);
    decode(b, NULL, c, b->full, NULL);
    kv_cache_close(c);
}

static void bed_close(bed *b)
{
    session_close(b->s);
    model_free(b->m);
}

UNIT_TEST(everything_is_dense)
{
    static bed b;
    static policy p[N_ALL];
    policy_run *runs[N_ALL];
    uint32_t capacity[HEADS];
    for (int h = 0; h < HEADS; h++) capacity[h] = T + N;
    bed_open(&b);
    for (size_t i = 0; i < N_ALL; i++) {
        help_ok(policy_parse(&p[i], ALL[i], err));
        if (i == 7) help_ok(policy_parse(&p[i], "lagkv:lag=16:sink=4:keep=1", err)); // partitions are kept whole
        help_ok(policy_run_open(&runs[i], &p[i], b.m, capacity, 0, T, N, err));
    }
    bed_prefill(&b, runs, N_ALL);
    float *logits = case_alloc((size_t)N * VOCABULARY, sizeof *logits);
    for (size_t i = 0; i < N_ALL; i++) {
        kv_cache *c = policy_run_cache(runs[i], b.s, 0);
        ck_assert_uint_eq(kv_cache_entries(c), HEADS * T);
        decode(&b, runs[i], c, logits, NULL);
        case_near(ALL[i], logits, b.full, (size_t)N * VOCABULARY, 1e-5);
        kv_cache_close(c);
        policy_run_close(runs[i]);
    }
    free(logits);
    bed_close(&b);
}

UNIT_TEST(caches_keep_to_their_capacity)
{
    static bed b;
    static policy p[N_ALL];
    policy_run *runs[N_ALL];
    const uint32_t capacity[HEADS] = {20, 41, 60, 33}; // each head has its own, as in a table
    bed_open(&b);
    for (size_t i = 0; i < N_ALL; i++) {
        help_ok(policy_parse(&p[i], ALL[i], err));
        help_ok(policy_run_open(&runs[i], &p[i], b.m, capacity, 0.75, T, N, err));
    }
    bed_prefill(&b, runs, N_ALL);
    float *logits = case_alloc((size_t)N * VOCABULARY, sizeof *logits),
          *again = case_alloc((size_t)N * VOCABULARY, sizeof *again);
    for (size_t i = 0; i < N_ALL; i++) {
        uint32_t longest[HEADS] = {0};
        bool constant = i >= 1 && i <= 6, looks = i >= 8;
        kv_cache *c = policy_run_cache(runs[i], b.s, 0);
        for (uint32_t h = 0; h < HEADS && constant; h++) ck_assert_uint_eq(c->counts[h], capacity[h]);
        policy_run_restart(runs[i]);
        decode(&b, runs[i], c, logits, longest);
        for (uint32_t h = 0; h < HEADS && constant; h++)
            ck_assert_msg(longest[h] <= capacity[h], "%s: %u", ALL[i], longest[h]);
        double looked = policy_run_looked(runs[i]);
        if (looks) ck_assert_msg(looked < T, "%s looks at %g of %d", ALL[i], looked, T);
        // A restart gives the same bits, whatever was decoded in between.
        policy_run_restart(runs[i]);
        decode(&b, runs[i], c, again, NULL);
        case_same(ALL[i], again, logits, (size_t)N * VOCABULARY);
        double far = 0;
        for (size_t x = 0; x < (size_t)N * VOCABULARY; x++) far = fmax(far, fabs((double)logits[x] - b.full[x]));
        ck_assert_msg(i == 0 ? far < 1e-5 : far > 1e-3, "%s: %g away from the full cache", ALL[i], far);
        kv_cache_close(c);
        policy_run_close(runs[i]);
    }
    free(logits);
    free(again);
    bed_close(&b);
}

UNIT_TEST(a_head_needs_capacity)
{
    static bed b;
    policy p;
    policy_run *run;
    const uint32_t capacity[HEADS] = {40, 40, 0, 40};
    bed_open(&b);
    help_ok(policy_parse(&p, "tova", err));
    help_fails(policy_run_open(&run, &p, b.m, capacity, 0, T, N, err), KVB_ARGUMENT, "no capacity");
    bed_close(&b);
}

UNIT_MAIN_EACH("policies over the decoder", case_tiny_setup, help_teardown)
