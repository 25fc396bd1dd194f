// The plan that divides a profile among processes: everything is done exactly once, evenly, and every process finds the
// same plan. And the memory that a run takes: linear in T, and never more questions at a time than fit.
#include "profiler/profile.h"
#include "test_profiler_cases.h"

enum { MAX_CONTEXTS = 40, MAX_QUESTIONS = 30 };

// A job without texts: the plan looks only at numbers of tokens.
typedef struct made_job {
    model m;
    profile_job job;
    profile_context contexts[MAX_CONTEXTS];
    profile_question questions[MAX_CONTEXTS][MAX_QUESTIONS];
} made_job;

static uint32_t next_random(uint32_t *state, uint32_t below)
{
    *state = *state * 1664525u + 1013904223u;
    return (*state >> 8) % below;
}

static made_job *job_make(uint32_t seed, uint32_t n_contexts, uint32_t n_questions, uint32_t n_tokens)
{
    made_job *j = case_alloc(1, sizeof *j);
    memset(j, 0, sizeof *j);
    j->m.device = case_device(&backend_cpu, NULL);
    j->m.config = (model_config){.n_layers = 30,
                                 .n_heads = 9,
                                 .n_kv_heads = 3,
                                 .head_dim = 64,
                                 .width = 576,
                                 .ffn_width = 1536,
                                 .vocabulary = 49152,
                                 .rope_dim = 64};
    j->job = (profile_job){.contexts = j->contexts, .n_contexts = n_contexts};
    for (uint32_t i = 0; i < n_contexts; i++) {
        profile_context *c = &j->contexts[i];
        c->n_tokens = n_tokens / 2 + next_random(&seed, n_tokens);
        c->n_questions = 1 + next_random(&seed, n_questions), c->questions = j->questions[i];
        for (uint32_t q = 0; q < c->n_questions; q++)
            j->questions[i][q] = (profile_question){.n_suffix = 10, .tail = 40 + next_random(&seed, 60)};
        j->job.n_pairs += c->n_questions;
        j->job.max_tokens = c->n_tokens > j->job.max_tokens ? c->n_tokens : j->job.max_tokens;
    }
    j->job.max_questions = n_questions, j->job.max_tail = 100, j->job.max_contexts = 1;
    return j;
}

static void job_free(made_job *j)
{
    backend_cpu.close(j->m.device);
    free(j);
}

// Takes all shares and checks that they cover what `state` leaves exactly once. Returns the balance: heaviest / (total
// / n).
static double check_cover(const made_job *j, const uint8_t *state, uint32_t n)
{
    size_t size = profile_state_size(&j->job);
    uint8_t *done = case_alloc(size, 1);
    double cost = 0, heaviest = 0, total = 0;
    memset(done, 0, size);
    for (uint32_t s = 0; s < n; s++) {
        profile_share share, again;
        help_ok(profile_share_out(&share, &j->m, &j->job, state, n, s, err));
        help_ok(profile_share_out(&again, &j->m, &j->job, state, n, s, err));
        ck_assert(share.n == again.n && memcmp(share.pieces, again.pieces, share.n * sizeof *share.pieces) == 0);
        for (size_t i = 0; i < share.n; i++) {
            const profile_piece *p = &share.pieces[i];
            ck_assert_uint_lt(p->context, j->job.n_contexts);
            ck_assert_uint_le(p->first + p->count, j->contexts[p->context].n_questions);
            size_t pair = j->job.n_contexts + p->first;
            for (uint32_t c = 0; c < p->context; c++) pair += j->contexts[c].n_questions;
            done[p->context] = 1;
            for (uint32_t q = 0; q < p->count; q++) done[pair + q]++;
        }
        cost += share.cost;
        heaviest = share.heaviest;
        total = share.total;
        ck_assert_double_le(share.cost, heaviest);
        profile_share_free(&share);
        profile_share_free(&again);
    }
    for (size_t i = j->job.n_contexts; i < size; i++)
        ck_assert_msg(state && state[i] ? done[i] <= 1 : done[i] == 1, "%u shares: pair %zu is done %u times", n, i,
                      done[i]);
    for (size_t i = 0; i < j->job.n_contexts; i++) ck_assert((state && state[i]) || done[i]);
    ck_assert_double_eq_tol(cost, total, 1e-9 * total);
    free(done);
    return heaviest / (total / n);
}

UNIT_TEST(test_every_question_once)
{
    static const uint32_t counts[] = {1, 2, 3, 4, 7, 16, 100};
    for (uint32_t seed = 1; seed <= 12; seed++) {
        made_job *j = job_make(seed, 1 + seed % MAX_CONTEXTS, 1 + seed * 5 % MAX_QUESTIONS, 500 * seed);
        uint8_t *state = case_alloc(profile_state_size(&j->job), 1);
        uint32_t random = seed;
        for (size_t i = 0; i < profile_state_size(&j->job); i++) state[i] = next_random(&random, 3) == 0;
        for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
            check_cover(j, NULL, counts[k]);
            check_cover(j, state, counts[k]);
        }
        memset(state, 1, profile_state_size(&j->job)); // all done
        profile_share share;
        help_ok(profile_share_out(&share, &j->m, &j->job, state, 3, 1, err));
        ck_assert_uint_eq(share.n, 0);
        profile_share_free(&share);
        free(state);
        job_free(j);
    }
}

UNIT_TEST(test_one_process_follows_the_calibration)
{
    made_job *j = job_make(5, 9, 6, 900);
    profile_share share;
    help_ok(profile_share_out(&share, &j->m, &j->job, NULL, 1, 0, err));
    ck_assert_uint_eq(share.n, 9);
    for (uint32_t i = 0; i < 9; i++) {
        unit_numbers(share.pieces[i].context, i, share.pieces[i].first, 0, share.pieces[i].count,
                     j->contexts[i].n_questions);
    }
    ck_assert_double_eq_tol(share.cost, profile_flops(&j->m, &j->job), 1e-9 * share.cost);
    // Progress counts the operations of questions twice, and also those of attention in a prefill.
    double prefills = 0, questions = 0, attention = 0, heads = (double)j->m.config.n_heads * j->m.config.head_dim;
    for (uint32_t i = 0; i < 9; i++) {
        const profile_context *c = &j->contexts[i];
        prefills += profile_work(&j->m, c, NULL);
        attention += 2.0 * j->m.config.n_layers * heads * c->n_tokens * c->n_tokens;
        for (uint32_t q = 0; q < c->n_questions; q++) questions += profile_work(&j->m, c, &c->questions[q]);
    }
    ck_assert(prefills > 0 && questions > 0);
    ck_assert_double_eq_tol(prefills - attention + questions / 2, share.cost, 1e-9 * share.cost);
    profile_share_free(&share);
    help_fails(profile_share_out(&share, &j->m, &j->job, NULL, 4, 4, err), KVB_ARGUMENT, "share 5 of 4");
    help_fails(profile_share_out(&share, &j->m, &j->job, NULL, 0, 0, err), KVB_ARGUMENT, "share");
    job_free(j);
    j = job_make(4, 1, 1, 4000); // one question cannot be divided: the first share does all of it
    help_ok(profile_share_out(&share, &j->m, &j->job, NULL, 5, 0, err));
    ck_assert_uint_eq(share.n, 1);
    ck_assert_double_eq_tol(share.total, profile_flops(&j->m, &j->job), 1e-9 * share.total);
    profile_share_free(&share);
    job_free(j);
}

// With many contexts, no share is much heavier than the mean. One long context with many questions is cut, and the
// repeated prefill costs no more than the shorter decoding saves: it is never slower than one process.
UNIT_TEST(test_shares_are_even)
{
    made_job *j = job_make(3, MAX_CONTEXTS, 10, 4000);
    ck_assert_double_lt(check_cover(j, NULL, 2), 1.02);
    ck_assert_double_lt(check_cover(j, NULL, 4), 1.05);
    ck_assert_double_lt(check_cover(j, NULL, 8), 1.15);
    job_free(j);
    j = job_make(4, 1, 1, 4000);
    j->contexts[0].n_questions = 30, j->job.n_pairs = 30;
    for (int q = 0; q < 30; q++) j->questions[0][q] = (profile_question){.n_suffix = 10, .tail = 1000};
    double whole = profile_flops(&j->m, &j->job);
    for (uint32_t n = 2; n <= 8; n++) {
        profile_share share;
        help_ok(profile_share_out(&share, &j->m, &j->job, NULL, n, 0, err));
        ck_assert_double_lt(share.heaviest, whole * (1.0 / n + 0.15));
        profile_share_free(&share);
    }
    job_free(j);
}

UNIT_TEST(test_memory_is_linear)
{
    profile_options o = {.new_tokens = 64};
    uint64_t bytes[4];
    for (int i = 0; i < 4; i++) {
        made_job *j = job_make(1, 1, 1, 1);
        j->job.max_tokens = 8192u << i;
        profile_memory m = profile_memory_of(&j->m, &j->job, &o, 1);
        bytes[i] = profile_memory_total(&m);
        // Keys and values of 30 layers, kept once; if attention reads packed ones, one layer more while it is
        // prefilled.
        uint64_t layer = 2ull * 3 * 64 * 4 * j->job.max_tokens;
        ck_assert_uint_ge(m.cache, 30 * layer);
        ck_assert_uint_le(m.cache, 31 * layer);
        job_free(j);
    }
    // Doubling T adds twice as much as the doubling before: f(4T) - f(2T) = 2 (f(2T) - f(T)).
    for (int i = 0; i < 2; i++)
        ck_assert_double_eq_tol((double)(bytes[i + 2] - bytes[i + 1]), 2.0 * (double)(bytes[i + 1] - bytes[i]),
                                0.001 * (double)bytes[i]);
    ck_assert_uint_lt(bytes[3], 8ull << 30);
}

// Expected Attention's sums are counted: [H,T] and [G,T] doubles, and a covariance per query head. Metrics are scored
// one after the other, so only the largest counts; a metric that wraps another has both.
UNIT_TEST(test_metrics_are_counted)
{
    metric m[3];
    help_ok(metric_parse(&m[0], "knorm", err));
    help_ok(metric_parse(&m[1], "ea:kvpress", err));
    help_ok(metric_parse(&m[2], "critical+ea:kvpress:value_norm=0", err));
    made_job *j = job_make(1, 1, 1, 4000);
    const model_config *c = &j->m.config;
    uint64_t T = j->job.max_tokens, H = c->n_heads, G = c->n_kv_heads, d = c->head_dim;
    profile_options none = {.new_tokens = 64}, one = {.new_tokens = 64, .metrics = m, .n_metrics = 1};
    profile_options ea = {.new_tokens = 64, .metrics = m + 1, .n_metrics = 1};
    profile_options both = {.new_tokens = 64, .metrics = m, .n_metrics = 2};
    uint64_t without = profile_memory_of(&j->m, &j->job, &none, 1).scratch,
             knorm = profile_memory_of(&j->m, &j->job, &one, 1).scratch - without,
             own = profile_memory_of(&j->m, &j->job, &ea, 1).scratch - without;
    ck_assert_uint_ge(own, knorm + ((H + G) * T + H * d * d) * sizeof(double));
    ck_assert_uint_le(own, knorm + ((H + G) * T + H * (d * d + d) + c->rope_dim) * sizeof(double));
    ck_assert_uint_eq(profile_memory_of(&j->m, &j->job, &both, 1).scratch - without, own);
    layer_view shape = {.n_tokens = 4000, .n_heads = (uint32_t)H, .n_kv_heads = (uint32_t)G, .head_dim = (uint32_t)d};
    ck_assert_uint_gt(metric_score_bytes(&m[2], &shape, 1), metric_score_bytes(&m[1], &shape, 1));
    ck_assert_uint_gt(metric_score_bytes(&m[0], &shape, 2), metric_score_bytes(&m[0], &shape, 1));
    job_free(j);
}

UNIT_TEST(test_batches_fit_into_memory)
{
    made_job *j = job_make(1, 3, 1, 3000);
    profile_options o = {.new_tokens = 64};
    j->job.max_questions = 1000;
    help_ok(profile_fit_batch(&j->job, &j->m, &o, err)); // no limit: 2 GB of importance and tails
    uint32_t free_choice = j->job.max_questions;
    ck_assert_uint_gt(free_choice, 1);
    ck_assert_uint_lt(free_choice, 1000);
    profile_memory five = profile_memory_of(&j->m, &j->job, &o, 5), one = profile_memory_of(&j->m, &j->job, &o, 1);
    for (int more = -1; more <= 1; more++) {
        o.memory = profile_memory_total(&five) + (uint64_t)(int64_t)more;
        j->job.max_questions = 1000;
        help_ok(profile_fit_batch(&j->job, &j->m, &o, err));
        ck_assert_uint_eq(j->job.max_questions, more < 0 ? 4 : 5);
    }
    o.memory = 100ull << 30, o.memory_is_asked = true;
    j->job.max_questions = 1000;
    help_ok(profile_fit_batch(&j->job, &j->m, &o, err));
    ck_assert_uint_eq(j->job.max_questions, 1000);
    o.memory = profile_memory_total(&one) - 1;
    help_fails(profile_fit_batch(&j->job, &j->m, &o, err), KVB_MEMORY, "--max-tokens");
    o.memory = profile_memory_total(&five) - 1, o.batch = 5;
    help_fails(profile_fit_batch(&j->job, &j->m, &o, err), KVB_MEMORY, "5 questions at a time");
    o.batch = 4;
    help_ok(profile_fit_batch(&j->job, &j->m, &o, err));
    ck_assert_uint_eq(j->job.max_questions, 4);
    job_free(j);
}

UNIT_MAIN("profiler share")
