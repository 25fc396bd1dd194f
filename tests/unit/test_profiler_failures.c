// What becomes of a product that fails inside of oneDNN: its functions are replaced here by some that fail once, as
// they do without memory, or do what they did. Every operation of a device, metric and statistic then says so; none
// leaves numbers that look like results.
#include "profiler/backend/backend.h"
#include "profiler/backend/linalg.h"
#include "test_profiler_cases.h"
#include <dlfcn.h>
#include <dnnl.h>
#include <stdatomic.h>

static atomic_long calls, failing = -1; // the call that fails; negative: none

static bool fails_now(void)
{
    return atomic_fetch_add(&calls, 1) == atomic_load(&failing);
}

static void *original(const char *name)
{
    return dlsym(RTLD_NEXT, name);
}

dnnl_status_t DNNL_API dnnl_sgemm(char transa, char transb, dnnl_dim_t M, dnnl_dim_t N, dnnl_dim_t K, float alpha,
                                  const float *A, dnnl_dim_t lda, const float *B, dnnl_dim_t ldb, float beta, float *C,
                                  dnnl_dim_t ldc)
{
    typedef dnnl_status_t function(char, char, dnnl_dim_t, dnnl_dim_t, dnnl_dim_t, float, const float *, dnnl_dim_t,
                                   const float *, dnnl_dim_t, float, float *, dnnl_dim_t);
    static function *real;
    void *found = original("dnnl_sgemm");
    memcpy(&real, &found, sizeof real);
    if (fails_now()) return dnnl_out_of_memory;
    return real(transa, transb, M, N, K, alpha, A, lda, B, ldb, beta, C, ldc);
}

dnnl_status_t DNNL_API dnnl_primitive_execute(const_dnnl_primitive_t primitive, dnnl_stream_t stream, int nargs,
                                              const dnnl_exec_arg_t *args)
{
    typedef dnnl_status_t function(const_dnnl_primitive_t, dnnl_stream_t, int, const dnnl_exec_arg_t *);
    static function *real;
    void *found = original("dnnl_primitive_execute");
    memcpy(&real, &found, sizeof real);
    return fails_now() ? dnnl_out_of_memory : real(primitive, stream, nargs, args);
}

enum { T = 40, QUESTIONS = 2 };

static kvb_status score_layer(void *context, const layer_view *view, kvb_error *err)
{
    static const char *const metrics[] = {"snapkv:kvpress:window=8", "morphkv:fusion=max", "ea:kvpress", "h2o", "tova"};
    float scores[4 * T];
    (void)context;
    for (size_t i = 0; i < sizeof metrics / sizeof *metrics; i++) {
        metric m;
        kvb_status status = metric_parse(&m, metrics[i], err);
        if (status == KVB_OK) status = metric_score(&m, view, scores, err);
        if (status != KVB_OK) return status;
    }
    return KVB_OK;
}

// A prefill whose layers are scored, and rows of two questions. `importance` [QUESTIONS, n].
static kvb_status run_pass(model *m, float *importance, size_t n, kvb_error *err)
{
    forward *f = NULL;
    forward_plan plan = {T, QUESTIONS, 4, true, false};
    int32_t ids[T];
    for (int i = 0; i < T; i++) ids[i] = i * 7 % 300;
    decode_row rows[QUESTIONS] = {{0, 0, true}, {1, 0, true}};
    layer_observer observer = {score_layer, NULL, ~0u};
    kvb_status status = forward_open(&f, m, &plan, err);
    if (status == KVB_OK) status = forward_prefill(f, ids, T, &observer, NULL, NULL, err);
    if (status == KVB_OK) {
        forward_begin_questions(f, QUESTIONS);
        status = forward_rows(f, rows, ids, QUESTIONS, NULL, 0, NULL, err);
    }
    for (uint32_t q = 0; status == KVB_OK && q < QUESTIONS; q++)
        status = forward_importance(f, q, importance + q * n, err);
    forward_close(f);
    return status;
}

static void try_failures(const backend *b)
{
    case_tiny_model(help_path("tiny.gguf"), NULL);
    model *m = case_open(help_path("tiny.gguf"), b);
    size_t n = (size_t)m->config.n_layers * m->config.n_kv_heads * T;
    float *want = case_alloc(QUESTIONS * n, sizeof *want), *got = case_alloc(QUESTIONS * n, sizeof *got);
    help_ok(run_pass(m, want, n, err));
    atomic_store(&calls, 0);
    help_ok(run_pass(m, want, n, err));
    long all = atomic_load(&calls), tried = 0;
    ck_assert_int_gt(all, 10);
    for (long at = 0; at < all; at += all / 40 + 1, tried++) {
        kvb_error failure = {0};
        atomic_store(&calls, 0);
        atomic_store(&failing, at);
        kvb_status status = run_pass(m, got, n, &failure);
        atomic_store(&failing, -1);
        ck_assert_msg(status == KVB_MEMORY && strstr(failure.message, "oneDNN had no memory"),
                      "product %ld of %ld fails, and the pass says: %s %s", at, all, kvb_status_name(status),
                      failure.message);
        help_ok(run_pass(m, got, n, err)); // and nothing of it is left
        case_same("importance", got, want, QUESTIONS * n);
    }
    printf("%s: %ld of %ld products failed in turn\n", b->compute, tried, all);
    model_free(m), free(want), free(got);
}

static const backend *const cpus[] = {&backend_cpu, &backend_cpu_bf16x3, &backend_cpu_bf16};

UNIT_ROUNDS(test_failures_are_told, sizeof cpus / sizeof *cpus)
{
    try_failures(cpus[_i]);
}

// Products that fail are counted, and others are not.
UNIT_TEST(test_failures_are_counted)
{
    float a[4] = {1, 2, 3, 4}, c[4];
    uint64_t before = gemm_failures();
    ck_assert(gemm(false, false, 2, 2, 2, 1, a, 2, a, 2, 0, c, 2) && c[0] == 7 && c[3] == 22);
    ck_assert(gemm_failures() == before);
    atomic_store(&calls, 0);
    atomic_store(&failing, 0);
    ck_assert(!gemm(false, false, 2, 2, 2, 1, a, 2, a, 2, 0, c, 2));
    atomic_store(&failing, -1);
    ck_assert(gemm_failures() == before + 1);
}

UNIT_MAIN_EACH("profiler failures", help_setup, help_teardown)
