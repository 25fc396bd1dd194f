// The cuda backend's operations one by one, at the size of Llama 3.1 8B: what the unit tests' small shapes cannot show.
// Each is timed, and attention, importance and column sums are judged against double on the host for a few rows.
//
//     bench_cuda_ops [COMPUTE [TOKENS]]     default: bf16, 32768 tokens
//
// CSV on stdout: operation, rows, milliseconds (the best of three), TFLOP/s of its products or TB/s of what it must
// read and write.
#include "profiler/backend/backend.h"
#include "profiler/backend/meter.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { H = 32, G = 8, GROUP = H / G, D = 128, WIDTH = H * D, FFN = 14336, QUESTIONS = 8, TAIL = 4, CHUNK = 1024 };
static const attention_shape SHAPE = {H, G, D};

static backend_device *on;
static uint32_t T;
static int failures;

// What the operations work on; host copies for the judge.
static float *q_host, *k_host, *v_host, *w_host, *tail_host;
static dev q, o, tail, weights, best, sums, row_log;
static prefix_kv kv;

static float *random_floats(size_t n, float scale)
{
    static uint64_t state = 20261121;
    float *p = malloc(n * sizeof *p);
    for (size_t i = 0; p && i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        p[i] = ((float)(state >> 40) * 0x1p-23f - 1.0f) * scale;
    }
    return p;
}

static dev on_device(const float *values, size_t n)
{
    dev memory = on->b->alloc(on, n);
    if (memory.address && values) on->b->upload(on, memory, values, n);
    return memory;
}

static bool make_inputs(void)
{
    size_t queries = (size_t)T * WIDTH, keys = (size_t)G * T * D, lines = (size_t)H * T,
           tails = (size_t)QUESTIONS * G * TAIL * D;
    q_host = random_floats(queries, 2), k_host = random_floats(keys, 2), v_host = random_floats(keys, 1);
    w_host = random_floats(lines, 1), tail_host = random_floats(tails, 1);
    if (!q_host || !k_host || !v_host || !w_host || !tail_host) return false;
    for (size_t i = 0; i < lines; i++) w_host[i] = fabsf(w_host[i]);
    q = on_device(q_host, queries), tail = on_device(tail_host, tails), weights = on_device(w_host, lines);
    kv = (prefix_kv){on_device(k_host, keys), on_device(v_host, keys), T, {NULL}};
    o = on_device(NULL, (size_t)CHUNK * WIDTH), best = on_device(NULL, (size_t)QUESTIONS * G * T);
    sums = on_device(NULL, lines), row_log = on_device(NULL, lines);
    size_t packed = on->b->packed_floats(on, T, SHAPE);
    if (packed) kv.packed = on->b->alloc(on, packed);
    return q.address && tail.address && weights.address && kv.k.address && kv.v.address && o.address && best.address &&
           sums.address && row_log.address && (!packed || kv.packed.address);
}

// Runs `...` four times, the first to warm up. tera: 1e12 operations or bytes.
#define TIMED(name, rows, tera, unit, ...)                                                         \
    do {                                                                                           \
        double least = INFINITY;                                                                   \
        for (int run = 0; run < 4; run++) {                                                        \
            double start = meter_now();                                                            \
            __VA_ARGS__;                                                                           \
            failures += on->b->check(on, NULL) != KVB_OK;                                          \
            if (run) least = fmin(least, meter_now() - start);                                     \
        }                                                                                          \
        printf("%s,%u,%.3f,%.2f %s\n", name, (unsigned)(rows), 1e3 * least, (tera) / least, unit); \
        fflush(stdout);                                                                            \
    } while (0)

static void judge(const char *what, double got, double want, double scale)
{
    double tolerance = strcmp(on->b->compute, "bf16") == 0 ? 2e-2 : 1e-4;
    if (fabs(got - want) <= tolerance * scale) return;
    printf("%s: %.9g, expected %.9g within %g\n", what, got, want, tolerance * scale);
    failures++;
}

// Softmax of one query over the first n keys of head g and, where own is given, n_own keys more; p [n + n_own].
static void probabilities(double *p, const float *query, uint32_t g, uint32_t n, const float *own, uint32_t n_own)
{
    double top = -INFINITY, sum = 0;
    for (uint32_t j = 0; j < n + n_own; j++) {
        const float *key = j < n ? k_host + ((size_t)g * T + j) * D : own + (size_t)(j - n) * D;
        p[j] = 0;
        for (uint32_t c = 0; c < D; c++) p[j] += (double)query[c] * key[c] / sqrt(D);
        top = fmax(top, p[j]);
    }
    for (uint32_t j = 0; j < n + n_own; j++) sum += p[j] = exp(p[j] - top);
    for (uint32_t j = 0; j < n + n_own; j++) p[j] /= sum;
}

static void judge_prefix(double *p)
{
    static const uint32_t rows[] = {0, 511, CHUNK - 1}, heads[] = {0, 17, H - 1};
    float *got = malloc((size_t)CHUNK * WIDTH * sizeof *got);
    if (got) on->b->download(on, got, o, (size_t)CHUNK * WIDTH);
    for (int i = 0; got && i < 9; i++) {
        uint32_t row = rows[i / 3], h = heads[i % 3], n = T - CHUNK + row + 1;
        probabilities(p, q_host + (size_t)(T - CHUNK + row) * WIDTH + h * D, h / GROUP, n, NULL, 0);
        for (uint32_t c = 0; c < D; c += 37) {
            double want = 0;
            for (uint32_t j = 0; j < n; j++) want += p[j] * v_host[((size_t)(h / GROUP) * T + j) * D + c];
            judge("attend_prefix", got[(size_t)row * WIDTH + h * D + c], want, 1);
        }
    }
    free(got);
}

// Importance of question 3's only row, for one KV head.
static void judge_importance(double *p)
{
    enum { QUESTION = 3, HEAD = 5 };
    float *got = malloc((size_t)T * sizeof *got);
    double *want = calloc(T, sizeof *want);
    const float *own = tail_host + ((size_t)QUESTION * G + HEAD) * TAIL * D;
    if (got) on->b->download(on, got, dev_at(best, ((size_t)QUESTION * G + HEAD) * T), T);
    for (uint32_t h = HEAD * GROUP; got && want && h < (HEAD + 1) * GROUP; h++) {
        probabilities(p, q_host + (size_t)QUESTION * WIDTH + h * D, HEAD, T, own, TAIL);
        for (uint32_t j = 0; j < T; j++) want[j] = fmax(want[j], p[j] * w_host[(size_t)h * T + j]);
    }
    for (uint32_t j = 0; got && want && j < T; j += 61) judge("importance", got[j], want[j], 2 * want[j] + 1e-9);
    free(got);
    free(want);
}

static void judge_sums(void)
{
    float *got = malloc((size_t)H * T * sizeof *got);
    if (got) on->b->download(on, got, sums, (size_t)H * T);
    for (uint32_t h = 0; got && h < H; h++) {
        double sum = 0;
        for (uint32_t j = 0; j < T; j++) sum += got[(size_t)h * T + j];
        judge("column sums of all rows, over T", sum / T, 1, 1);
    }
    free(got);
}

static void time_attention(double *p)
{
    double keys = (double)G * T * D, element = kv.packed.address ? 2 : 4, tflop = 2.0 * T * WIDTH / 1e12;
    decode_row rows[QUESTIONS];
    tail_kv tails = {tail, tail, TAIL};
    oracle_view oracle = {weights, best, (size_t)G * T, false};
    for (uint32_t i = 0; i < QUESTIONS; i++) rows[i] = (decode_row){i, TAIL - 1, true};
    if (kv.packed.address) TIMED("pack_prefix", T, keys * (8 + 4) / 1e12, "TB/s", on->b->pack_prefix(on, &kv, SHAPE));
    TIMED("attend_prefix", CHUNK, 2 * CHUNK * tflop, "TFLOP/s",
          on->b->attend_prefix(on, o, dev_at(q, (size_t)(T - CHUNK) * WIDTH), &kv, T - CHUNK, CHUNK, SHAPE));
    judge_prefix(p);
    TIMED("attend_rows", QUESTIONS, 3 * keys * element / 1e12, "TB/s",
          on->b->attend_rows(on, o, q, &kv, &tails, rows, QUESTIONS, SHAPE, &oracle));
    judge_importance(p);
    TIMED("column_sums", T, T * tflop, "TFLOP/s", on->b->column_sums(on, sums, row_log, q, &kv, 0, SHAPE));
    judge_sums();
    TIMED("column_sums of a window", 64, 128 * tflop, "TFLOP/s",
          on->b->column_sums(on, sums, row_log, q, &kv, T - 64, SHAPE));
}

static void time_reductions(void)
{
    size_t squares = (size_t)H * D * D;
    double keys = (double)G * T * D, tflop = 2.0 * T * (double)squares / 1e12;
    dev matrices = on->b->alloc(on, squares), means = on->b->alloc(on, WIDTH);
    if (!matrices.address || !means.address) {
        failures++;
        return;
    }
    TIMED("value_weights", T, tflop, "TFLOP/s", on->b->value_weights(on, sums, &kv, matrices, (dev){NULL}, SHAPE));
    TIMED("norms", G * T, keys * 4 / 1e12, "TB/s", on->b->norms(on, sums, kv.k, (size_t)G * T, D));
    TIMED("moments", T, tflop, "TFLOP/s", on->b->moments(on, means, matrices, q, (dev){NULL}, T, H, D, false));
    TIMED("quadratic", T, tflop, "TFLOP/s", on->b->quadratic(on, sums, &kv, means, matrices, SHAPE));
    TIMED("spreads", T, keys * 4 / 1e12, "TB/s",
          on->b->spreads(on, sums, kv.k, T, G, D, (partition_row){4, 128, (T - 4) / 128 - 1, false}));
    on->b->release(on, matrices);
    on->b->release(on, means);
}

static void time_products(void)
{
    static const uint32_t shapes[][3] = {
        {CHUNK, WIDTH, WIDTH}, {CHUNK, FFN, WIDTH}, {CHUNK, WIDTH, FFN}, {30, FFN, WIDTH}, {512, FFN, WIDTH}};
    for (int i = 0; i < 5; i++) {
        uint32_t n = shapes[i][0], out = shapes[i][1], in = shapes[i][2];
        float *w = random_floats((size_t)out * in, 0.01f);
        dev y = on->b->alloc(on, (size_t)n * out), x = on->b->alloc(on, (size_t)n * in);
        dev_matrix m = w ? backend_matrix(on, w, out, in, false) : (dev_matrix){0};
        char name[64];
        snprintf(name, sizeof name, "matmul %u -> %u", in, out);
        if (y.address && x.address && (m.address || m.packed))
            TIMED(name, n, 2.0 * n * out * in / 1e12, "TFLOP/s", on->b->matmul(on, y, x, m, n, false));
        else failures++;
        on->b->release(on, y);
        on->b->release(on, x);
        on->b->matrix_release(on, &m);
        free(w);
    }
}

int main(int argc, char **argv)
{
    kvb_error err = {0};
    const char *compute = argc > 1 ? argv[1] : "bf16";
    T = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 32768;
    const backend *b = backend_find_compute("cuda", compute);
    if (!b || T < 2 * CHUNK || T > 1 << 20 || argc > 3) {
        fprintf(stderr, "usage: bench_cuda_ops [f32|bf16x3|bf16 [TOKENS of %d or more]]\n", 2 * CHUNK);
        return 2;
    }
    backend_limits limits = {T, TAIL, CHUNK, FFN, SHAPE, 0};
    if (b->open(&on, b, &limits, &err) != KVB_OK) {
        printf("skip - bench_cuda_ops: %s; nothing is measured\n", err.message);
        return EXIT_SUCCESS;
    }
    double *p = malloc(((size_t)T + TAIL) * sizeof *p);
    if (!p || !make_inputs()) {
        fprintf(stderr, "bench_cuda_ops: no memory for %u tokens\n", T);
        return EXIT_FAILURE;
    }
    printf("%s at %u tokens: operation,rows,milliseconds,rate\n", compute, T);
    time_attention(p);
    time_reductions();
    time_products();
    if (on->b->check(on, &err) != KVB_OK) fprintf(stderr, "bench_cuda_ops: %s\n", err.message);
    free(p);
    printf(failures ? "bench_cuda_ops: %d failures\n" : "bench_cuda_ops: agrees with the host\n", failures);
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
