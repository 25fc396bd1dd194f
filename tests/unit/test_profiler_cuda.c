// The cuda backend as a whole: the model and its metrics against the reference. On the emulated device (tests/cuda,
// -DEMULATED) also lack of memory, errors that stick, and no device. The single operations are judged by
// test_profiler_backend.c.
#include "test_profiler_cases.h"

#ifdef EMULATED
#include "tests/cuda/emulator.h"
extern const backend backend_cuda_emulated, backend_cuda_bf16_emulated;
#define CUDA backend_cuda_emulated
#define CUDA_BF16 backend_cuda_bf16_emulated
#else // a real device does not count its memory
#define CUDA backend_cuda
#define CUDA_BF16 backend_cuda_bf16
static size_t emulator_memory_taken(void)
{
    return 0;
}
#endif

enum { TOKENS = 150, QUESTIONS = 3, STEPS = 4, ROWS = QUESTIONS * STEPS };

// What a model gives for a context and a few questions, row by row as sampling does it.
typedef struct outcome {
    float *logits, *importance; // [STEPS, QUESTIONS, vocabulary], [QUESTIONS, L, G, TOKENS]
    size_t n_logits, n_importance;
} outcome;

static outcome run_model(const char *path, const backend *b)
{
    model *m = case_open(path, b);
    forward *f = NULL;
    forward_plan plan = {TOKENS, QUESTIONS, STEPS, true, false, 1};
    help_ok(forward_open(&f, m, &plan, err));
    const model_config *c = &m->config;
    int32_t context[TOKENS];
    for (int i = 0; i < TOKENS; i++) context[i] = (int32_t)((unsigned)i * 37 % c->vocabulary);
    outcome r = {.n_logits = (size_t)ROWS * c->vocabulary,
                 .n_importance = (size_t)QUESTIONS * c->n_layers * c->n_kv_heads * TOKENS};
    r.logits = case_alloc(r.n_logits, sizeof(float));
    r.importance = case_alloc(r.n_importance, sizeof(float));
    help_ok(forward_prefill(f, context, TOKENS, NULL, NULL, NULL, err));
    forward_begin_questions(f, NULL, QUESTIONS);
    for (uint32_t step = 0; step < STEPS; step++) {
        decode_row rows[QUESTIONS];
        int32_t ids[QUESTIONS];
        uint32_t wanted[QUESTIONS];
        for (uint32_t q = 0; q < QUESTIONS; q++) {
            rows[q] = (decode_row){q, step, step > 0};
            ids[q] = (int32_t)((q * 11 + step * 5) % c->vocabulary);
            wanted[q] = q;
        }
        help_ok(forward_rows(f, rows, ids, QUESTIONS, wanted, QUESTIONS,
                             r.logits + (size_t)step * QUESTIONS * c->vocabulary, err));
    }
    for (uint32_t q = 0; q < QUESTIONS; q++)
        help_ok(forward_importance(f, q, r.importance + q * (r.n_importance / QUESTIONS), err));
    forward_close(f), model_free(m);
    return r;
}

static void outcome_free(outcome *r)
{
    free(r->logits);
    free(r->importance);
}

UNIT_TEST(test_model_agrees_with_the_reference)
{
    static const char *const options[][14] = {{"--type", "f32"}, {"--type", "f16", "--tied", "no"}};
    backend_device *on = case_device(&CUDA, NULL);
    size_t before = emulator_memory_taken();
    for (int i = 0; i < 2; i++) {
        case_tiny_model(help_path("tiny.gguf"), options[i]);
        outcome want = run_model(help_path("tiny.gguf"), &backend_ref), got = run_model(help_path("tiny.gguf"), &CUDA);
        case_near("logits", got.logits, want.logits, want.n_logits, 1e-4);
        double error = case_row_error(got.importance, want.importance, want.n_importance / TOKENS, TOKENS);
        ck_assert_msg(error < 1e-4, "importance differs by %g of the largest", error);
        // Rounded operands: at most twice the error of the cpu backend in bf16.
        outcome rounded = run_model(help_path("tiny.gguf"), &CUDA_BF16),
                allowed = run_model(help_path("tiny.gguf"), &backend_cpu_bf16);
        size_t vocabulary = want.n_logits / ROWS;
        double logits[2] = {case_row_error(rounded.logits, want.logits, ROWS, vocabulary),
                            case_row_error(allowed.logits, want.logits, ROWS, vocabulary)},
               importance[2] = {
                   case_row_error(rounded.importance, want.importance, want.n_importance / TOKENS, TOKENS),
                   case_row_error(allowed.importance, want.importance, want.n_importance / TOKENS, TOKENS)};
        ck_assert_msg(logits[0] < 2 * logits[1] && importance[0] < 2 * importance[1],
                      "in bf16: logits differ by %g (cpu: %g) and importance by %g (%g) of the largest", logits[0],
                      logits[1], importance[0], importance[1]);
        outcome_free(&want);
        outcome_free(&got);
        outcome_free(&rounded);
        outcome_free(&allowed);
    }
    ck_assert_uint_eq(emulator_memory_taken(), before); // all memory is given back
    CUDA.close(on);
}

#ifdef EMULATED
UNIT_TEST(test_out_of_memory)
{
    backend_device *on = case_device(&CUDA, NULL);
    size_t taken = emulator_memory_taken();
    emulator_set_memory(taken + 1000);
    ck_assert(!CUDA.alloc(on, 1001).address && !CUDA.alloc(on, SIZE_MAX / 2).address);
    float w[300] = {0};
    dev_matrix m = backend_matrix(on, w, 30, 10, false);
    ck_assert_ptr_null(m.address);
    CUDA.matrix_release(on, &m);
    dev small = CUDA.alloc(on, 100); // what fits still works
    ck_assert_ptr_nonnull(small.address);
    float zeros[100] = {1};
    CUDA.download(on, zeros, small, 100);
    ck_assert_float_eq(zeros[0], 0);
    CUDA.release(on, small);
    help_ok(CUDA.check(on, err));
    case_tiny_model(help_path("tiny.gguf"), NULL);
    model *opened = NULL;
    help_fails(model_open(&opened, help_path("tiny.gguf"), &CUDA, NULL, err), KVB_MEMORY, "no memory for");
    emulator_set_memory(SIZE_MAX);
    ck_assert_uint_eq(emulator_memory_taken(), taken);
    CUDA.close(on);
}

// Each test has a process of its own, as a failure sticks until the program ends.
UNIT_TEST(test_a_failure_sticks)
{
    backend_device *on = case_device(&CUDA, NULL);
    float in[8] = {1, 2, 3, 4, 5, 6, 7, 8}, out[8];
    dev x = CUDA.alloc(on, 8), y = CUDA.alloc(on, 8);
    CUDA.upload(on, x, in, 8);
    emulator_fail_launch(1);
    CUDA.glu(on, x, x, SILU, 8);
    CUDA.rms_norm(on, y, x, x, 1, 8, 1e-5f); // fails
    CUDA.glu(on, y, x, SILU, 8);
    for (int i = 0; i < 2; i++) help_fails(CUDA.check(on, err), KVB_UNSUPPORTED, "rms_norm failed: ");
    CUDA.download(on, out, x, 8);
    for (int i = 0; i < 8; i++) ck_assert_float_eq(out[i], 0);
    ck_assert_ptr_null(CUDA.alloc(on, 8).address);
    CUDA.release(on, x), CUDA.release(on, y); // memory is given back even then
    CUDA.close(on);
}

// Scratch memory is what `scratch_bytes` says, and is taken by `open`. Work that needs more, or a device that has none,
// is refused, and nothing is written.
UNIT_TEST(test_scratch_is_taken_once)
{
    enum { IN = 64, OUT = 96, FEW = 3, VOCABULARY = 50 };
    const backend_limits limits = {100, 5, 128, OUT, attention_heads(4, 2, 16), 0, IN};
    const backend *const both[] = {&CUDA, &CUDA_BF16};
    for (int i = 0; i < 2; i++) {
        const backend *b = both[i];
        backend_device *none = case_device(b, NULL);
        size_t before = emulator_memory_taken();
        backend_device *on = case_device(b, &limits);
        ck_assert_uint_eq(emulator_memory_taken() - before, b->scratch_bytes(on, &limits));
        float *w = case_floats(OUT * 2 * IN, 1, 0), zeros[FEW * OUT] = {0}, y[FEW * OUT];
        dev_matrix fits = backend_matrix(none, w, OUT, IN, false), wide = backend_matrix(none, w, OUT, 2 * IN, false);
        dev dx = b->alloc(none, FEW * 2 * IN), dy = b->alloc(none, FEW * OUT);
        before = emulator_memory_taken();
        b->matmul(on, dy, dx, fits, FEW, false);
        help_ok(b->check(on, err));
        b->upload(on, dy, zeros, FEW * OUT);
        b->upload(on, dx, w, FEW * 2 * IN);
        b->matmul(on, dy, dx, wide, FEW, false);
        help_fails(b->check(on, err), KVB_ARGUMENT, "bytes of scratch, opened for");
        b->download(on, y, dy, FEW * OUT);
        ck_assert_mem_eq(y, zeros, sizeof y);
        int32_t ids[FEW] = {1, 1, 1};
        sampler s = {true, 1, 1};
        draw_key keys[FEW] = {{0}};
        b->sample(none, ids, dx, 1, VOCABULARY, &s, keys);
        ck_assert_int_eq(ids[0], -1);
        help_fails(b->check(none, err), KVB_ARGUMENT, "opened for 0");
        ck_assert_uint_eq(emulator_memory_taken(), before); // nothing has grown
        b->matrix_release(none, &fits), b->matrix_release(none, &wide);
        b->release(none, dx), b->release(none, dy);
        b->close(on), b->close(none);
        free(w);
    }
}

UNIT_TEST(test_no_device)
{
    kvb_error err = {0};
    backend_device *on, *other;
    emulator_set_devices(0);
    ck_assert_int_eq(CUDA.open(&on, &CUDA, NULL, &err), KVB_UNSUPPORTED);
    ck_assert(!on && strstr(err.message, "no CUDA device: "));
    emulator_set_devices(2);
    on = case_device(&CUDA, NULL);
    other = case_device(&CUDA, NULL); // once more
    size_t taken = emulator_memory_taken();
    CUDA.close(on);
    ck_assert_uint_eq(emulator_memory_taken(), taken);
    CUDA.close(other);
    ck_assert_uint_eq(emulator_memory_taken(), 0);
}

#endif

// A batch of many rows is cut into passes, which may also split a question's rows.
UNIT_TEST(test_more_rows_than_a_pass)
{
    enum { H = 4, G = 2, D = 16, T = 70, Q = 3, EACH = 50, N = Q * EACH };
    attention_shape s = attention_heads(H, G, D);
    decode_row rows[N];
    for (uint32_t i = 0; i < N; i++) rows[i] = (decode_row){i / EACH, i % EACH, i % 7 != 0};
    float *k = case_floats(G * T * D, 2, 0), *v = case_floats(G * T * D, 1, 0), *q = case_floats(N * H * D, 2, 0),
          *tail = case_floats(Q * G * EACH * D, 1, 0), *w = case_floats(H * T, 0.5, 0.5), *got[2];
    const backend *const both[] = {&backend_ref, &CUDA};
    for (int i = 0; i < 2; i++) {
        const backend *b = both[i];
        backend_device *on = case_device(b, &(backend_limits){T, EACH, N, H * D, s, 0, H * D});
        dev o = b->alloc(on, N * H * D + Q * G * T), dq = b->alloc(on, N * H * D), dt = b->alloc(on, Q * G * EACH * D);
        prefix_kv kv = {.k = b->alloc(on, G * T * D), .v = b->alloc(on, G * T * D), .n_tokens = T};
        tail_kv tails = {dt, dt, EACH};
        oracle_view oracle = {b->alloc(on, H * T), dev_at(o, N * H * D), G * T, false};
        b->upload(on, dq, q, N * H * D), b->upload(on, dt, tail, Q * G * EACH * D),
            b->upload(on, oracle.weights, w, H * T);
        b->upload(on, kv.k, k, G * T * D), b->upload(on, kv.v, v, G * T * D);
        b->attend_rows(on, o, dq, &kv, &tails, rows, N, s, &oracle);
        got[i] = case_alloc(N * H * D + Q * G * T, sizeof(float));
        b->download(on, got[i], o, N * H * D + Q * G * T);
        b->release(on, o), b->release(on, dq), b->release(on, dt), b->release(on, kv.k), b->release(on, kv.v),
            b->release(on, oracle.weights);
        b->close(on);
    }
    case_near("attend_rows", got[1], got[0], N * H * D + Q * G * T, 1e-5);
    free(k);
    free(v);
    free(q);
    free(tail);
    free(w);
    free(got[0]);
    free(got[1]);
}

// One metric over the layers of a prefill, as a profile scores it.
typedef struct scored {
    metric m;
    float *scores; // [L, G, T]
} scored;

static kvb_status score_layer(void *context, const layer_view *view, kvb_error *err)
{
    scored *s = context;
    return metric_score(&s->m, view, s->scores + (size_t)view->layer * view->n_kv_heads * view->n_tokens, err);
}

static void score_metric(scored *s, const char *spec, const char *path, const backend *b, uint32_t T)
{
    help_ok(metric_parse(&s->m, spec, err));
    model *m = case_open(path, b);
    forward *f = NULL;
    forward_plan plan = {T, 1, 1, false, false, 1};
    int32_t *ids = case_alloc(T, sizeof *ids);
    for (uint32_t i = 0; i < T; i++) ids[i] = (int32_t)(i * i % m->config.vocabulary);
    s->scores = case_alloc((size_t)m->config.n_layers * m->config.n_kv_heads * T, sizeof(float));
    help_ok(forward_open(&f, m, &plan, err));
    layer_observer observer = {score_layer, s, metric_needs(&s->m)};
    help_ok(forward_prefill(f, ids, T, &observer, NULL, NULL, err));
    forward_close(f), model_free(m), free(ids);
}

// Each item that a view brings to the host, by a metric that reads it.
UNIT_TEST(test_metrics_of_its_prefill)
{
    enum { T = 150, L = 2, G = 2 };
    static const char *const specs[] = {"snapkv:lukv", "keydiff", "ea:kvpress", "h2o", "critical:share=0+knorm"};
    case_tiny_model(help_path("tiny.gguf"), NULL);
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        scored want, got;
        score_metric(&want, specs[i], help_path("tiny.gguf"), &backend_cpu, T);
        score_metric(&got, specs[i], help_path("tiny.gguf"), &CUDA, T);
        double error = case_row_error(got.scores, want.scores, L * G, T);
        ck_assert_msg(error <= 1e-4, "%s: differs by %g of the largest", specs[i], error);
        free(want.scores);
        free(got.scores);
    }
}

#ifndef EMULATED
// Opens a device in a child process, because a device does not survive a fork.
static bool device_is_there(void)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        kvb_error err = {0};
        backend_device *on;
        bool found = CUDA.open(&on, &CUDA, NULL, &err) == KVB_OK;
        if (!found) printf("skip - the cuda backend as a whole: %s\n", err.message);
        fflush(stdout);
        _exit(found ? 0 : 1);
    }
    int code = 1;
    return child > 0 && waitpid(child, &code, 0) == child && WIFEXITED(code) && WEXITSTATUS(code) == 0;
}

// If there is no device, opening one fails without a crash.
START_TEST(test_no_device_is_no_crash)
{
    kvb_error err = {0};
    backend_device *on;
    ck_assert(CUDA.open(&on, &CUDA, NULL, &err) == KVB_OK || strstr(err.message, "cuda") ||
              strstr(err.message, "CUDA"));
}
END_TEST
#endif

// Runs every test in its own process and with its own device.
int main(void)
{
    setenv("CK_FORK", "yes", 1);
    tcase_add_checked_fixture(unit_case(), help_setup, help_teardown);
#ifndef EMULATED
    if (!device_is_there()) {
        TCase *asked = tcase_create("no device");
        tcase_add_test(asked, test_no_device_is_no_crash);
        return unit_run("cuda backend", UNIT_CASES(asked));
    }
#endif
    return unit_run("cuda backend", UNIT_CASES(unit_case()));
}
