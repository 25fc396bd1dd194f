// What happens when a product fails inside oneDNN: its functions are replaced here by ones that fail once, as they do
// without memory, and otherwise call the original. The program then ends and says so, as whenever memory is lacking;
// nothing that looks like results is left.
#include "profiler/backend/backend.h"
#include "profiler/model/forward.h"
#include "test_profiler_cases.h"
#include <dlfcn.h>
#include <dnnl.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

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

// Runs a prefill with scored layers, then rows of two questions. `importance` is [QUESTIONS, n].
static kvb_status run_pass(model *m, float *importance, size_t n, kvb_error *err)
{
    forward *f = NULL;
    forward_plan plan = {T, QUESTIONS, 4, true, false, 1};
    int32_t ids[T];
    for (int i = 0; i < T; i++) ids[i] = i * 7 % 300;
    decode_row rows[QUESTIONS] = {{0, 0, true}, {1, 0, true}};
    layer_observer observer = {score_layer, NULL, ~0u};
    kvb_status status = forward_open(&f, m, &plan, err);
    if (status == KVB_OK) status = forward_prefill(f, ids, T, &observer, NULL, NULL, err);
    if (status == KVB_OK) {
        forward_begin_questions(f, NULL, QUESTIONS);
        status = forward_rows(f, rows, ids, QUESTIONS, NULL, 0, NULL, err);
    }
    for (uint32_t q = 0; status == KVB_OK && q < QUESTIONS; q++)
        status = forward_importance(f, q, importance + q * n, err);
    forward_close(f);
    return status;
}

enum { DIED, PASSED };

// Runs one pass in a child process in which product number `at` fails. Returns PASSED or DIED; *n receives the number
// of products if none failed. OpenMP's threads do not survive a fork, so only children compute.
static int run_child(const backend *b, long at, long *n)
{
    int said[2], counted[2], code;
    ck_assert(pipe(said) == 0 && pipe(counted) == 0);
    pid_t child = fork();
    ck_assert_int_ge(child, 0);
    if (child == 0) {
        kvb_error why = {0};
        dup2(said[1], STDERR_FILENO);
        model *m = case_open(help_path("tiny.gguf"), b);
        size_t floats = (size_t)m->config.n_layers * m->config.n_kv_heads * T;
        float *importance = case_alloc(QUESTIONS * floats, sizeof *importance);
        atomic_store(&calls, 0);
        atomic_store(&failing, at);
        kvb_status status = run_pass(m, importance, floats, &why);
        long all = atomic_load(&calls);
        if (write(counted[1], &all, sizeof all) != (ssize_t)sizeof all || status != KVB_OK) _exit(3);
        _exit(0);
    }
    close(said[1]);
    close(counted[1]);
    char message[500] = "";
    ck_assert(waitpid(child, &code, 0) == child && WIFEXITED(code));
    ck_assert_int_ge(read(said[0], message, sizeof message - 1), 0);
    if (read(counted[0], n, sizeof *n) != (ssize_t)sizeof *n) *n = 0;
    close(said[0]);
    close(counted[0]);
    if (WEXITSTATUS(code) == 0) return PASSED;
    ck_assert_msg(WEXITSTATUS(code) == 1 && strstr(message, "no memory for matrix products"),
                  "product %ld fails, and the program ends with %d: %s", at, WEXITSTATUS(code), message);
    return DIED;
}

static void try_failures(const backend *b)
{
    long all = 0, none, tried = 0;
    case_tiny_model(help_path("tiny.gguf"), NULL);
    ck_assert_int_eq(run_child(b, -1, &all), PASSED);
    ck_assert_int_gt(all, 10);
    for (long at = 0; at < all; at += all / 12 + 1, tried++) ck_assert_int_eq(run_child(b, at, &none), DIED);
    printf("%s: %ld of %ld products failed in turn\n", b->compute, tried, all);
}

static const backend *const cpus[] = {&backend_cpu, &backend_cpu_bf16x3, &backend_cpu_bf16};

UNIT_ROUNDS(test_failures_are_told, sizeof cpus / sizeof *cpus)
{
    try_failures(cpus[_i]);
}

UNIT_MAIN_EACH("profiler failures", help_setup, help_teardown)
