// Refitting cut caches of the tiny model: bits do not depend on threads, outputs get nearer to the full cache's, heads
// that keep most tokens are not changed, and queries are rotated like the model's own.
#include "evaluator/session.h"
#include "test_profiler_cases.h"
#include <omp.h>

enum { L = 2, G = 2, H = 4, D = 16, T = 96, HEADS = L * G };

typedef struct turned {
    const model *m;
    references asked;
    double worst;
} turned;

static kvb_status turn_queries(void *context, const layer_view *view, kvb_error *err)
{
    turned *t = context;
    const rope_rule *rule = &t->m->config.rope;
    (void)err;
    references_see(&t->asked, view);
    for (uint32_t i = 0; i < T * H; i++) {
        float q[D];
        memcpy(q, view->q_raw + (size_t)i * D, sizeof q);
        rope_turn(q, view->rope_frequency, view->rope_dim, i / H,
                  (rope_size){rule->attention, rule->growth, rule->original});
        for (int c = 0; c < D; c++) t->worst = fmax(t->worst, fabs((double)q[c] - view->q[(size_t)i * D + c]));
    }
    return KVB_OK;
}

static kv_cache *cut_and_refit(session *s, const kept_set *kept, int threads)
{
    kv_cache *cache = session_cache(s, kept, 3);
    omp_set_num_threads(threads);
    help_ok(session_refit(s, kept, cache, err));
    return cache;
}

// Returns the logits of the token after the context. The caller frees them.
static float *next_logits(session *s, kv_cache *cache)
{
    float *logits = calloc(s->m->config.vocabulary, sizeof *logits);
    help_ok(decoder_run(s->decode, &cache, 1, &(uint32_t){1}, &(int32_t){7}, NULL, LOGITS_LAST, logits, err));
    return logits;
}

UNIT_TEST(refits_what_was_cut)
{
    static const uint32_t KEEP[HEADS] = {12, 80, 30, 1};
    model *m = case_open(help_path("tiny.gguf"), backend_find("cpu"));
    metric keydiff;
    session *s;
    int32_t ids[T];
    kept_set kept;
    help_ok(metric_parse(&keydiff, "keydiff", err));
    session_plan plan = {T, 8, 16, &keydiff, 1, false, false, 64};
    help_ok(session_open(&s, m, &plan, err));
    for (int i = 0; i < T; i++) ids[i] = 3 + i * i % 250;
    turned t = {m, references_open(m, T, 64), 0};
    layer_observer turning = {turn_queries, &t, VIEW_Q_RAW | VIEW_Q};
    help_ok(session_prefill(s, ids, T, &turning, NULL, err));
    ck_assert_double_le(t.worst, 1e-5);
    kvb_refit_head own = references_head(&s->refit, NULL, NULL, T, 1, 1),
                   seen = references_head(&t.asked, NULL, NULL, T, 1, 1);
    ck_assert(own.n_queries == 64 && own.n_tokens == T && seen.queries == t.asked.queries + (L * G - 1) * 64 * D);
    ck_assert_uint_eq(references_floats(&t.asked), L * G * 64 * D);
    ck_assert_mem_eq(own.queries, seen.queries, 64 * D * sizeof(float));
    references_free(&t.asked);
    help_ok(session_select(s, s->now.scores[0], KEEP, 4, 1, &kept, err));
    kv_cache *bare = session_cache(s, &kept, 3), *one = cut_and_refit(s, &kept, 1), *two = cut_and_refit(s, &kept, 3);
    int n_changed = 0;
    for (uint32_t h = 0; h < HEADS; h++) {
        kv_span a = kv_cache_span(bare, h / G, h % G), b = kv_cache_span(one, h / G, h % G),
                c = kv_cache_span(two, h / G, h % G);
        size_t bytes = (size_t)a.count * D * sizeof(float);
        ck_assert(memcmp(b.k, c.k, bytes) == 0 && memcmp(b.v, c.v, bytes) == 0);
        bool same = memcmp(a.k, b.k, bytes) == 0 && memcmp(a.v, b.v, bytes) == 0;
        if (KEEP[h] > T / 2) ck_assert(same);
        n_changed += !same;
    }
    ck_assert_int_ge(n_changed, 1);
    ck_assert(s->refit_seconds > 0);
    omp_set_num_threads(1); // the decoder was opened for as many threads as there were
    float *before = next_logits(s, bare), *after = next_logits(s, one), *again = next_logits(s, two);
    size_t bytes = m->config.vocabulary * sizeof *before;
    ck_assert(memcmp(after, again, bytes) == 0 && memcmp(after, before, bytes) != 0); // refitting changes the logits
    free(before);
    free(after);
    free(again);
    kv_cache_close(bare);
    kv_cache_close(one);
    kv_cache_close(two);
    kept_set_free(&kept);
    session_close(s);
    model_free(m);
}

UNIT_MAIN_EACH("evaluator: refit", case_tiny_setup, help_teardown)
