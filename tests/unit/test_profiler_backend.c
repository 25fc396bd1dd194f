// Every operation of a backend against the plain-C reference, with absolute and relative tolerance, over shapes with MHA, GQA, MQA and
// awkward sizes; and the promise that bits depend neither on threads nor on who else is in a batch. The backend is cpu; the Makefile
// compiles this file again for its other precisions, and with JUDGED=backend_cuda and JUDGED=backend_cuda_emulated (tests/cuda).
#include "profiler/backend.h"
#include "profiler/gguf.h"
#include "profiler/linalg.h"
#include "unit.h"
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <string.h>

#ifdef JUDGED
#ifdef EMULATED
#include "tests/cuda/emulator.h"
#endif
extern const backend JUDGED;
#else
#define JUDGED backend_cpu
#endif

enum { QUESTIONS = 5, TAIL = 9 };
static const attention_shape SHAPES[] = {{9, 3, 64},  {4, 4, 16},  {8, 1, 32}, {1, 1, 8},
                                         {6, 2, 128}, {2, 1, 200}, {1, 1, 320}};
enum { N_SHAPES = sizeof SHAPES / sizeof *SHAPES };
#ifdef EMULATED // slowly
enum { LONG = 290, LONGER = 300, LONGEST_SHAPE = 1, ROWS_STEP = 6 };
#else
enum { LONG = 530, LONGER = 700, LONGEST_SHAPE = 0, ROWS_STEP = 3 };
#endif
static const uint32_t TOKENS[] = {1, 15, 17, LONG};
enum { N_TOKENS = sizeof TOKENS / sizeof *TOKENS };

// How far products may be off beside what float32 is allowed, relative to the sum of their terms' magnitudes.
static float product_error(const backend *b)
{
    return strcmp(b->compute, "bf16") == 0 ? 4e-3f : strcmp(b->compute, "bf16x3") == 0 ? 1.5e-5f : 0;
}

static uint64_t state = 20261121;

static float uniform(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(state >> 40) * 0x1p-23f - 1.0f;
}

static float *random_floats(size_t n, float scale)
{
    float *p = malloc((n + 1) * sizeof *p);
    ck_assert_ptr_nonnull(p);
    for (size_t i = 0; i < n; i++) p[i] = uniform() * scale;
    return p;
}

static dev on(const backend *b, const float *values, size_t n)
{
    dev d = b->alloc(n);
    ck_assert_ptr_nonnull(d.address);
    b->upload(d, values, n);
    return d;
}

// n floats of the judged backend's memory, to be freed.
static float *fetch(dev from, size_t n)
{
    float *values = malloc((n + 1) * sizeof *values);
    ck_assert_ptr_nonnull(values);
    JUDGED.download(values, from, n);
    return values;
}

static float *take(dev from, size_t n)
{
    float *values = fetch(from, n);
    JUDGED.release(from);
    return values;
}

static void reserve(const backend *b, uint32_t tokens, attention_shape s)
{
    ck_assert(b->reserve(&(backend_limits){tokens, TAIL, 1024, 2048, s}));
}

static void close_to(const char *what, const float *got, const float *want, size_t n, float absolute, float relative)
{
    size_t i = 0; // one check behind the loop: each is a message to Check's parent process
    while (i < n && fabsf(got[i] - want[i]) <= absolute + relative * fabsf(want[i])) i++;
    ck_assert_msg(i == n, "%s: element %zu of %zu is %.9g, expected %.9g", what, i, n, i < n ? (double)got[i] : 0,
                  i < n ? (double)want[i] : 0);
}

// Runs `...` on both backends with the same inputs and compares n floats of y. `terms` is how large a sum of products' terms may get:
// what their precision is relative to.
#define BOTH(what, y, n, absolute, relative, terms, ...)                                                    \
    do {                                                                                                    \
        float *results[2];                                                                                  \
        const backend *const pair[2] = {&backend_ref, &JUDGED};                                             \
        for (int which = 0; which < 2; which++) {                                                           \
            const backend *b = pair[which];                                                                 \
            __VA_ARGS__;                                                                                    \
            results[which] = malloc((n) * sizeof(float));                                                   \
            b->download(results[which], y, n);                                                              \
            b->release(y);                                                                                  \
        }                                                                                                   \
        close_to(what, results[1], results[0], n, (absolute) + product_error(&JUDGED) * (terms), relative); \
        free(results[0]), free(results[1]);                                                                 \
    } while (0)

// The keys and values of a context on a device, packed where the backend wants that.
static prefix_kv context_on(const backend *b, const float *k, const float *v, uint32_t T, attention_shape s)
{
    size_t n = (size_t)s.n_kv_heads * T * s.head_dim, packed = b->packed_floats(T, s);
    prefix_kv kv = {on(b, k, n), on(b, v, n), T, {NULL}};
    if (!packed) return kv;
    kv.packed = b->alloc(packed);
    ck_assert_ptr_nonnull(kv.packed.address);
    b->pack_prefix(&kv, s);
    return kv;
}

static void context_release(const backend *b, prefix_kv *kv)
{
    b->release(kv->k), b->release(kv->v), b->release(kv->packed);
}

START_TEST(test_row_operations)
{
    static const uint32_t rows[] = {1, 3, 16, 31, 70}, widths[] = {8, 64, 576, 1000};
    dev y;
    for (size_t r = 0; r < 5; r++)
        for (size_t w = 0; w < 4; w++) {
            uint32_t n = rows[r], width = widths[w];
            float *x = random_floats((size_t)n * width, 3), *weight = random_floats(width, 2),
                  *other = random_floats((size_t)n * width, 30);
            BOTH("rms_norm", y, (size_t)n * width, 1e-6f, 1e-5f, 0, {
                y = b->alloc((size_t)n * width);
                dev dx = on(b, x, (size_t)n * width), dw = on(b, weight, width);
                b->rms_norm(y, dx, dw, n, width, 1e-5f);
                b->release(dx), b->release(dw);
            });
            BOTH("swiglu", y, (size_t)n * width, 1e-6f, 1e-5f, 0, {
                y = on(b, other, (size_t)n * width);
                dev up = on(b, x, (size_t)n * width);
                b->swiglu(y, up, (size_t)n * width);
                b->release(up);
            });
            free(x), free(weight), free(other);
        }
}
END_TEST

START_TEST(test_swiglu_extremes)
{
    const float gate[] = {0, -0.0f, 88, -88, 1000, -1000, 1e30f, -1e30f}, up[] = {1, 1, 1, 1, 2, 2, 1, 1};
    dev g = on(&JUDGED, gate, 8), u = on(&JUDGED, up, 8);
    JUDGED.swiglu(g, u, 8);
    const float want[] = {0, 0, 88, 0, 2000, 0, 1e30f, 0};
    float *got = fetch(g, 8);
    close_to("swiglu", got, want, 8, 1e-30f, 1e-6f);
    free(got);
    JUDGED.release(g), JUDGED.release(u);
}
END_TEST

START_TEST(test_matmul)
{
    static const uint32_t rows[] = {1, 2, 15, 16, 30, 100};
    dev y;
    for (size_t r = 0; r < 6; r++)
        for (int keep = 0; keep < 2; keep++)
            for (int accumulate = 0; accumulate < 2; accumulate++) {
                uint32_t n = rows[r], in = 200, out = 333;
                float *x = random_floats((size_t)n * in, 1), *w = random_floats((size_t)out * in, 1),
                      *before = random_floats((size_t)n * out, 1);
                reserve(&JUDGED, 8, SHAPES[0]);
                BOTH("matmul", y, (size_t)n * out, 2e-5f, 2e-5f, 16, { // the root of `in` terms below one
                    y = on(b, before, (size_t)n * out);
                    dev dx = on(b, x, (size_t)n * in);
                    dev_matrix m = b->matrix_upload(w, out, in, keep);
                    b->matmul(y, dx, m, n, accumulate);
                    b->release(dx), b->matrix_release(&m);
                });
                free(x), free(w), free(before);
            }
    JUDGED.reserve(&(backend_limits){0});
}
END_TEST

// Several products of one input are bit by bit what they are one by one.
START_TEST(test_project)
{
    enum { IN = 200 };
    static const uint32_t rows[] = {1, 30, 100}, outs[BACKEND_PROJECTIONS] = {333, 64, 130};
    const backend *b = &JUDGED;
    reserve(b, 8, SHAPES[0]);
    for (size_t r = 0; r < 3; r++) {
        uint32_t n = rows[r];
        float *x = random_floats((size_t)n * IN, 1);
        dev dx = on(b, x, (size_t)n * IN);
        projection to[BACKEND_PROJECTIONS];
        for (int i = 0; i < BACKEND_PROJECTIONS; i++) {
            float *w = random_floats((size_t)outs[i] * IN, 1);
            to[i] = (projection){b->alloc((size_t)n * outs[i]), b->matrix_upload(w, outs[i], IN, i == 1)};
            free(w);
        }
        b->project(to, BACKEND_PROJECTIONS, dx, n);
        for (int i = 0; i < BACKEND_PROJECTIONS; i++) {
            size_t size = (size_t)n * outs[i];
            dev alone = b->alloc(size);
            b->matmul(alone, dx, to[i].w, n, false);
            float *want = take(alone, size), *got = take(to[i].y, size);
            ck_assert_mem_eq(got, want, size * sizeof *want);
            free(want), free(got), b->matrix_release(&to[i].w);
        }
        b->release(dx), free(x);
    }
    b->reserve(&(backend_limits){0});
}
END_TEST

START_TEST(test_gather_rope_store)
{
    enum { N = 21, HEADS = 3, D = 16, POSITIONS = 40, WIDTH = HEADS * D };
    int32_t ids[N];
    uint32_t positions[N];
    decode_row rows[N];
    for (uint32_t i = 0; i < N; i++) {
        ids[i] = (int32_t)(i * 7 % 29);
        positions[i] = i * 3 % POSITIONS;
        rows[i] = (decode_row){i / 5, i % 5, false};
    }
    float *table = random_floats(29 * WIDTH, 1), *angles = random_floats(POSITIONS * D, 1),
          *x = random_floats(N * WIDTH, 1);
    dev y;
    BOTH("gather", y, N * WIDTH, 0, 0, 0, {
        y = b->alloc(N * WIDTH);
        dev_matrix m = b->matrix_upload(table, 29, WIDTH, true);
        b->gather(y, m, ids, N);
        b->matrix_release(&m);
    });
    BOTH("rope", y, N * WIDTH, 1e-6f, 1e-6f, 0, {
        y = b->alloc(N * WIDTH);
        dev dx = on(b, x, N * WIDTH), cs = on(b, angles, POSITIONS * D);
        b->rope(y, dx, cs, positions, N, HEADS, D, D);
        b->release(dx), b->release(cs);
    });
    BOTH("rope in place", y, N * WIDTH, 1e-6f, 1e-6f, 0, {
        y = on(b, x, N * WIDTH);
        dev cs = on(b, angles, POSITIONS * D);
        b->rope(y, y, cs, positions, N, HEADS, D, D);
        b->release(cs);
    });
    BOTH("store_prefix", y, 2 * N * WIDTH, 0, 0, 0, {
        y = b->alloc(2 * N * WIDTH);
        dev dx = on(b, x, N * WIDTH);
        b->store_prefix(y, 2 * N, 5, dx, N, HEADS, D);
        b->release(dx);
    });
    BOTH("store_tail", y, QUESTIONS * TAIL * WIDTH, 0, 0, 0, {
        y = b->alloc(QUESTIONS * TAIL * WIDTH);
        dev dx = on(b, x, N * WIDTH);
        b->store_tail(y, TAIL, rows, dx, N, HEADS, D);
        b->release(dx);
    });
    free(table), free(angles), free(x);
}
END_TEST

START_TEST(test_attend_prefix)
{
    dev y;
    for (int i = 0; i < N_SHAPES; i++)
        for (int t = 0; t < N_TOKENS; t++) {
            attention_shape s = SHAPES[i];
            uint32_t T = TOKENS[t], first = T / 3, n = T - first;
            size_t kv_size = (size_t)s.n_kv_heads * T * s.head_dim, q_size = (size_t)n * s.n_heads * s.head_dim;
            float *k = random_floats(kv_size, 2), *v = random_floats(kv_size, 1), *q = random_floats(q_size, 2);
            reserve(&JUDGED, T, s);
            BOTH("attend_prefix", y, q_size, 2e-6f, 2e-5f, 4, {
                y = b->alloc(q_size);
                dev dq = on(b, q, q_size);
                prefix_kv kv = context_on(b, k, v, T, s);
                b->attend_prefix(y, dq, &kv, first, n, s);
                b->release(dq), context_release(b, &kv);
            });
            free(k), free(v), free(q);
        }
    JUDGED.reserve(&(backend_limits){0});
}
END_TEST

// Rows of several questions at several tail positions, some observed; inputs shared by the tests below.
typedef struct decode_case {
    attention_shape s;
    uint32_t T, n_rows;
    decode_row rows[QUESTIONS * TAIL];
    float *k, *v, *tail_k, *tail_v, *q, *weights, *best;
    size_t kv_size, tail_size, q_size, weights_size, best_size;
} decode_case;

static decode_case decode_case_make(attention_shape s, uint32_t T, uint32_t rows_each)
{
    decode_case c = {.s = s, .T = T};
    for (uint32_t q = 0; q < QUESTIONS; q++)
        for (uint32_t r = 0; r < rows_each; r++) c.rows[c.n_rows++] = (decode_row){q, q % 3 + r, (q + r) % 4 != 0};
    c.kv_size = (size_t)s.n_kv_heads * T * s.head_dim;
    c.tail_size = (size_t)QUESTIONS * s.n_kv_heads * TAIL * s.head_dim;
    c.q_size = (size_t)c.n_rows * s.n_heads * s.head_dim;
    c.weights_size = (size_t)s.n_heads * T;
    c.best_size = (size_t)QUESTIONS * s.n_kv_heads * T;
    c.k = random_floats(c.kv_size, 2), c.v = random_floats(c.kv_size, 1);
    c.tail_k = random_floats(c.tail_size, 2), c.tail_v = random_floats(c.tail_size, 1);
    c.q = random_floats(c.q_size, 2);
    c.weights = random_floats(c.weights_size, 1);
    for (size_t i = 0; i < c.weights_size; i++) c.weights[i] = fabsf(c.weights[i]);
    c.best = calloc(c.best_size, sizeof(float));
    return c;
}

static void decode_case_free(decode_case *c)
{
    free(c->k), free(c->v), free(c->tail_k), free(c->tail_v), free(c->q), free(c->weights), free(c->best);
}

// Output of rows [first, first + n) and, behind it, the importance of all questions.
static dev run_rows(const backend *b, const decode_case *c, uint32_t first, uint32_t n)
{
    size_t row = (size_t)c->s.n_heads * c->s.head_dim;
    dev y = b->alloc(n * row + c->best_size), q = on(b, c->q + first * row, n * row);
    prefix_kv kv = context_on(b, c->k, c->v, c->T, c->s);
    tail_kv tails = {on(b, c->tail_k, c->tail_size), on(b, c->tail_v, c->tail_size), TAIL};
    oracle_view oracle = {on(b, c->weights, c->weights_size), dev_at(y, n * row), (size_t)c->s.n_kv_heads * c->T};
    b->attend_rows(y, q, &kv, &tails, c->rows + first, n, c->s, &oracle);
    b->release(q), context_release(b, &kv), b->release(tails.k), b->release(tails.v), b->release(oracle.weights);
    return y;
}

START_TEST(test_attend_rows)
{
    dev y;
    for (int i = 0; i < N_SHAPES; i++)
        for (int t = 0; t < N_TOKENS; t++)
            for (uint32_t each = 1; each <= 7; each += ROWS_STEP) {
                decode_case c = decode_case_make(SHAPES[i], TOKENS[t], each);
                reserve(&JUDGED, c.T, c.s);
                BOTH("attend_rows", y, c.q_size, 2e-6f, 3e-5f, 4, { y = run_rows(b, &c, 0, c.n_rows); });
                // Importance is a product of probabilities: what is off in a score is off in proportion.
                BOTH("importance", y, c.best_size, 2e-6f, 3e-5f + product_error(&JUDGED) * 8, 0, {
                    dev all = run_rows(b, &c, 0, c.n_rows);
                    y = b->alloc(c.best_size);
                    b->copy(y, dev_at(all, c.q_size), c.best_size);
                    b->release(all);
                });
                decode_case_free(&c);
            }
    JUDGED.reserve(&(backend_limits){0});
}
END_TEST

START_TEST(test_value_weights)
{
    dev y;
    for (int i = 0; i < N_SHAPES; i++)
        for (int t = 0; t < N_TOKENS; t++) {
            attention_shape s = SHAPES[i];
            uint32_t T = TOKENS[t];
            size_t size = (size_t)s.n_kv_heads * T * s.head_dim, roots = (size_t)s.n_heads * s.head_dim * s.head_dim;
            float *v = random_floats(size, 1), *root = random_floats(roots, 1);
            reserve(&JUDGED, T, s);
            BOTH("value_weights", y, (size_t)s.n_heads * T, 1e-9f, 2e-5f, 0, {
                y = b->alloc((size_t)s.n_heads * T);
                dev dr = on(b, root, roots);
                prefix_kv kv = {dr, on(b, v, size), T, {NULL}};
                b->value_weights(y, &kv, dr, s);
                b->release(dr), b->release(kv.v);
            });
            reserve(&JUDGED, T, s); // the weights of a layer sum to one
            dev w = JUDGED.alloc((size_t)s.n_heads * T), dr = on(&JUDGED, root, roots);
            prefix_kv kv = {dr, on(&JUDGED, v, size), T, {NULL}};
            JUDGED.value_weights(w, &kv, dr, s);
            double sum = 0;
            float *weights = fetch(w, (size_t)s.n_heads * T);
            for (size_t j = 0; j < (size_t)s.n_heads * T; j++) sum += weights[j];
            free(weights);
            ck_assert_double_eq_tol(sum, 1.0, 1e-5);
            JUDGED.release(w), JUDGED.release(dr), JUDGED.release(kv.v);
            free(v), free(root);
        }
    JUDGED.reserve(&(backend_limits){0});
}
END_TEST

START_TEST(test_column_sums)
{
    dev y;
    static const uint32_t lengths[] = {1, 15, 257, LONG, 1100}; // less than, at and over one tile of rows and of keys
    for (int i = 0; i < N_SHAPES; i++)
        for (int t = 0; t < 5; t++) {
            attention_shape s = SHAPES[i];
            uint32_t T = lengths[t];
            if (T == 1100 && i != LONGEST_SHAPE) continue; // the judge is slow
            size_t kv_size = (size_t)s.n_kv_heads * T * s.head_dim, q_size = (size_t)T * s.n_heads * s.head_dim,
                   size = (size_t)s.n_heads * T;
            float *k = random_floats(kv_size, 2), *q = random_floats(q_size, 2), *sums = malloc(size * sizeof *sums);
            reserve(&JUDGED, T, s);
            // All rows; the last 300 or 40, or those of a window that is no whole tile; the last one.
            const uint32_t firsts[] = {0, T > 300 ? T - 300 : 0, T > 40 ? T - 40 : T / 2, T - 1};
            for (int f = 0; f < 4; f += i == LONGEST_SHAPE ? 1 : 2) { // one shape has them all
                // As importance: what is off in a score is off in proportion.
                BOTH("column_sums", y, size, 1e-6f, 3e-5f + product_error(&JUDGED) * 8, 0, {
                    y = b->alloc(size);
                    dev dq = on(b, q, q_size), rows = b->alloc(size);
                    prefix_kv kv = context_on(b, k, k, T, s);
                    b->column_sums(y, rows, dq, &kv, firsts[f], s);
                    b->download(sums, y, size);
                    b->release(dq), b->release(rows), context_release(b, &kv);
                });
                for (uint32_t h = 0; h < s.n_heads; h++) { // every row of attention sums to one
                    double sum = 0;
                    for (uint32_t j = 0; j < T; j++) sum += sums[(size_t)h * T + j];
                    ck_assert_double_eq_tol(sum / (T - firsts[f]), 1.0, 2e-5);
                }
            }
            free(k), free(q), free(sums);
        }
    JUDGED.reserve(&(backend_limits){0});
}
END_TEST

START_TEST(test_output_norms)
{
    dev y;
    static const uint32_t widths[] = {8, 600};
    for (int i = 0; i < N_SHAPES; i++)
        for (int t = 0; t < N_TOKENS; t++)
            for (int w = 0; w < 2; w++) {
                attention_shape s = SHAPES[i];
                uint32_t T = TOKENS[t], in = s.n_heads * s.head_dim;
                size_t size = (size_t)s.n_kv_heads * T * s.head_dim;
                float *v = random_floats(size, 1), *wo = random_floats((size_t)widths[w] * in, 1);
                reserve(&JUDGED, T, s);
                BOTH("output_norms", y, (size_t)s.n_heads * T, 1e-5f, 2e-5f, 0, {
                    y = b->alloc((size_t)s.n_heads * T);
                    dev_matrix m = b->matrix_upload(wo, widths[w], in, true);
                    prefix_kv kv = {{NULL}, on(b, v, size), T, {NULL}};
                    b->output_norms(y, &kv, m, s);
                    b->release(kv.v), b->matrix_release(&m);
                });
                free(v), free(wo);
            }
    JUDGED.reserve(&(backend_limits){0});
}
END_TEST

// A matrix of random bytes as a model file would store it; the halves among them are small numbers, with few digits where `coarse`.
static stored_matrix random_stored(uint32_t type, uint32_t out, uint32_t in, bool coarse)
{
    static const struct {
        uint32_t type, halves, first; // of a block, and where they begin
    } scales[] = {{GGUF_TENSOR_F16, 1, 0},  {GGUF_TENSOR_Q4_0, 1, 0}, {GGUF_TENSOR_Q4_1, 2, 0},
                  {GGUF_TENSOR_Q5_0, 1, 0}, {GGUF_TENSOR_Q5_1, 2, 0}, {GGUF_TENSOR_Q8_0, 1, 0},
                  {GGUF_TENSOR_Q4_K, 2, 0}, {GGUF_TENSOR_Q5_K, 2, 0}, {GGUF_TENSOR_Q6_K, 1, 208}};
    uint32_t values, bytes;
    ck_assert(gguf_tensor_type_block(type, &values, &bytes));
    uint8_t *data = malloc((size_t)out * in / values * bytes);
    ck_assert_ptr_nonnull(data);
    for (size_t block = 0; block < (size_t)out * in / values; block++) {
        uint8_t *b = data + block * bytes;
        for (uint32_t i = 0; i < bytes; i++) b[i] = (uint8_t)(128 + 127 * uniform());
        for (size_t k = 0; k < sizeof scales / sizeof *scales; k++)
            for (uint32_t h = 0; scales[k].type == type && h < scales[k].halves; h++) {
                uint16_t half = (uint16_t)(0x1c00 + 256 * uniform()) & (coarse ? 0xfc00 : 0xffff);
                memcpy(b + scales[k].first + 2 * h, &half, sizeof half);
            }
        float value = uniform();
        if (type == GGUF_TENSOR_F32) memcpy(b, &value, sizeof value);
        if (type == GGUF_TENSOR_BF16) memcpy(b, (char *)&value + 2, 2);
    }
    return (stored_matrix){type, data, out, in, 16};
}

// Matrices as model files store them: every type, rows in RoPE pairs, as weights and as rows to be read.
START_TEST(test_matrix_load)
{
    enum { IN = 256, OUT = 336, T = 17 };
    static const uint32_t rows[] = {1, 30, 100};
#define GGUF_TENSOR_NUMBER(name, number, values, bytes) number,
    static const uint32_t types[] = {GGUF_TENSOR_LIST(GGUF_TENSOR_NUMBER)};
    const attention_shape shape = {4, 4, IN / 4};
    dev y;
    reserve(&JUDGED, T, shape);
    for (size_t i = 0; i < 2 * sizeof types / sizeof *types; i++) {
        stored_matrix w = random_stored(types[i / 2], OUT, IN, i % 2);
        float *values = random_floats(OUT * IN, 0), largest = 0;
        ck_assert(stored_rows(&w, 0, OUT, values));
        for (size_t k = 0; k < OUT * IN; k++) largest = fmaxf(largest, fabsf(values[k]));
        free(values);
        int32_t ids[OUT];
        for (int32_t r = 0; r < OUT; r++) ids[r] = OUT - 1 - r;
        BOTH("gather of stored rows", y, OUT * IN, 0, 0, 0, {
            y = b->alloc(OUT * IN);
            dev_matrix m = b->matrix_load(&w, true);
            b->gather(y, m, ids, OUT);
            b->matrix_release(&m);
        });
        float *v = random_floats(IN * T, 1);
        BOTH("output_norms of stored rows", y, 4 * T, 1e-5f, 2e-5f, 0, {
            y = b->alloc(4 * T);
            dev_matrix m = b->matrix_load(&w, true);
            prefix_kv kv = {{NULL}, on(b, v, IN * T), T, {NULL}};
            b->output_norms(y, &kv, m, shape);
            b->release(kv.v), b->matrix_release(&m);
        });
        for (size_t r = 0; r < 3; r++) {
            float *x = random_floats((size_t)rows[r] * IN, 1);
            BOTH("matmul of a stored matrix", y, rows[r] * OUT, 2e-5f * (1 + largest), 2e-5f, 24 * largest, {
                y = b->alloc((size_t)rows[r] * OUT);
                dev dx = on(b, x, (size_t)rows[r] * IN);
                dev_matrix m = b->matrix_load(&w, false);
                b->matmul(y, dx, m, rows[r], false);
                b->release(dx), b->matrix_release(&m);
            });
            free(x);
        }
        uint16_t infinite = 0x7c00;
        memcpy((char *)(uintptr_t)w.data + (w.type == GGUF_TENSOR_Q6_K  ? 208
                                            : w.type == GGUF_TENSOR_F32 ? 2
                                                                        : 0),
               w.type == GGUF_TENSOR_F32 || w.type == GGUF_TENSOR_BF16 ? &(uint16_t){0x7f80} : &infinite, 2);
        dev_matrix none = JUDGED.matrix_load(&w, true);
        ck_assert(!none.address && !none.packed);
        free(v), free((void *)(uintptr_t)w.data);
    }
    JUDGED.reserve(&(backend_limits){0});
}
END_TEST

START_TEST(test_norms_and_moments)
{
    static const uint32_t lengths[] = {1, 17, LONG, 1100};
    dev y;
    for (int i = 0; i < N_SHAPES; i++)
        for (int t = 0; t < 4; t++) {
            uint32_t n = lengths[t], H = SHAPES[i].n_heads, d = SHAPES[i].head_dim;
            if (n == 1100 && i != LONGEST_SHAPE) continue; // the judge is slow
            size_t size = (size_t)n * H * d, means = (size_t)H * d;
            float *x = random_floats(size, 2);
            for (uint32_t c = 0; c < d; c++) x[c] += 5; // a mean that is not near zero
            BOTH("norms", y, (size_t)n * H, 1e-7f, 1e-6f, 0, {
                y = b->alloc((size_t)n * H);
                dev dx = on(b, x, size);
                b->norms(y, dx, (size_t)n * H, d);
                b->release(dx);
            });
            for (int by_head = 0; by_head < 2; by_head++) {
                BOTH("mean and covariance", y, means * (1 + d), 2e-5f, 1e-5f, 0, {
                    y = b->alloc(means * (1 + d));
                    dev dx = on(b, x, size);
                    b->moments(y, dev_at(y, means), dx, (dev){NULL}, n, H, d, by_head);
                    b->release(dx);
                });
                BOTH("mean of directions", y, means, 1e-7f, 1e-5f, 0, {
                    y = b->alloc(means);
                    dev dx = on(b, x, size), norms = b->alloc((size_t)n * H);
                    b->norms(norms, dx, (size_t)n * H, d);
                    b->moments(y, (dev){NULL}, dx, norms, n, H, d, by_head);
                    b->release(dx), b->release(norms);
                });
            }
            free(x);
        }
    JUDGED.reserve(&(backend_limits){0});
}
END_TEST

START_TEST(test_quadratic)
{
    dev y;
    for (int i = 0; i < N_SHAPES; i++)
        for (int t = 0; t < N_TOKENS; t++)
            for (int squares = 0; squares < 2; squares++) {
                attention_shape s = SHAPES[i];
                uint32_t T = TOKENS[t], d = s.head_dim;
                size_t keys = (size_t)s.n_kv_heads * T * d, lines = (size_t)s.n_heads * d;
                float *k = random_floats(keys, 2), *linear = random_floats(lines, 1),
                      *square = random_floats(lines * d, 0.3f);
                BOTH("quadratic", y, (size_t)s.n_heads * T, 3e-7f * (float)(d * d), 1e-5f, 0, { // d * d terms below 1.2
                    y = b->alloc((size_t)s.n_heads * T);
                    dev dl = on(b, linear, lines), ds = on(b, square, lines * d);
                    prefix_kv kv = {on(b, k, keys), {NULL}, T, {NULL}};
                    b->quadratic(y, &kv, dl, squares ? ds : (dev){NULL}, s);
                    b->release(dl), b->release(ds), b->release(kv.k);
                });
                free(k), free(linear), free(square);
            }
}
END_TEST

START_TEST(test_spreads)
{
    static const partition_row rows[] = {{0, 1, 7, false}, {4, 16, 10, false}, {4, 16, 11, true}, {3, 100, 1, false}};
    enum { T = 230 };
    dev y;
    for (int i = 0; i < N_SHAPES; i++)
        for (int r = 0; r < 4; r++) {
            uint32_t G = SHAPES[i].n_kv_heads, d = SHAPES[i].head_dim;
            float *z = random_floats((size_t)G * T * d, 2);
            for (uint32_t j = 0; j < T; j++) z[(size_t)j * d] = 0.5f; // a constant channel
            BOTH("spreads", y, (size_t)G * T, 1e-6f, 1e-5f, 0, {
                y = b->alloc((size_t)G * T);
                dev dz = on(b, z, (size_t)G * T * d);
                b->spreads(y, dz, T, G, d, rows[r]);
                b->release(dz);
            });
            free(z);
        }
}
END_TEST

// The same tokens from the same logits, greedily and drawn, at every size of a part; -1 where a row is no numbers.
START_TEST(test_sample)
{
    enum { ROWS = 7 };
    static const uint32_t sizes[] = {1, 2, 255, 256, 257, 1000, 5003};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int greedy = 0; greedy < 2; greedy++) {
            uint32_t n = sizes[i];
            float *logits = random_floats((size_t)ROWS * n, 6);
            sampler s = {greedy, 0.7 + (double)i, 99 + i};
            draw_key keys[ROWS];
            int32_t want[ROWS], got[ROWS];
            logits[2 * (size_t)n + n / 2] = NAN;
            logits[3 * (size_t)n + n - 1] = INFINITY;
            for (uint32_t c = 0; c < n; c++) logits[4 * (size_t)n + c] = -INFINITY;
            for (uint32_t c = 0; c < n; c++) logits[5 * (size_t)n + c] = (float)(c % 3); // ties
            for (uint32_t r = 0; r < ROWS; r++) keys[r] = (draw_key){r, 3 * r, 5 + r};
            for (int which = 0; which < 2; which++) {
                const backend *b = which ? &JUDGED : &backend_ref;
                dev d = on(b, logits, (size_t)ROWS * n);
                b->sample(which ? got : want, d, ROWS, n, &s, keys);
                b->release(d);
            }
            for (int r = 0; r < ROWS; r++)
                ck_assert_msg(got[r] == want[r] && (r >= 2 && r <= 4 ? want[r] == -1 : want[r] >= 0),
                              "row %d of %u logits: token %d, expected %d", r, n, got[r], want[r]);
            free(logits);
        }
}
END_TEST

static void same_bits(const char *what, const float *a, const float *b, size_t n)
{
    size_t i = 0;
    while (i < n && memcmp(&a[i], &b[i], sizeof *a) == 0) i++;
    ck_assert_msg(i == n, "%s: element %zu is %.9g in one run and %.9g in the other", what, i, i < n ? (double)a[i] : 0,
                  i < n ? (double)b[i] : 0);
}

// One run of every operation that shares work out among threads: `results` are its outputs, to be freed.
enum { N_RESULTS = 4 };
static void run_all(const decode_case *c, const float *q, const float *root, float *results[N_RESULTS])
{
    attention_shape s = c->s;
    size_t prefix_size = (size_t)c->T * s.n_heads * s.head_dim, roots = (size_t)s.n_heads * s.head_dim * s.head_dim;
    reserve(&JUDGED, c->T, s);
    dev rows = run_rows(&JUDGED, c, 0, c->n_rows), prefix = JUDGED.alloc(prefix_size), dq = on(&JUDGED, q, prefix_size),
        weights = JUDGED.alloc(c->weights_size), dr = on(&JUDGED, root, roots), sums = JUDGED.alloc(c->weights_size),
        row_log = JUDGED.alloc(c->weights_size);
    prefix_kv kv = context_on(&JUDGED, c->k, c->v, c->T, s);
    JUDGED.attend_prefix(prefix, dq, &kv, 0, c->T, s);
    JUDGED.value_weights(weights, &kv, dr, s);
    JUDGED.column_sums(sums, row_log, dq, &kv, 0, s);
    JUDGED.release(row_log), JUDGED.release(dq), JUDGED.release(dr), context_release(&JUDGED, &kv);
    results[0] = take(rows, c->q_size + c->best_size);
    results[1] = take(prefix, prefix_size);
    results[2] = take(weights, c->weights_size);
    results[3] = take(sums, c->weights_size);
}

// On the emulated device: also over the order of a block's threads, and over what runs late.
static void set_threads(int i)
{
    static const int threads[] = {1, 2, 3, 8};
    omp_set_num_threads(threads[i]);
#ifdef EMULATED
    emulator_set_order((emulator_order)(i % 3));
    emulator_set_lazy((emulator_lazy)(i % 3));
#endif
}

START_TEST(test_bits_over_threads)
{
    static const char *const names[N_RESULTS] = {"attend_rows", "attend_prefix", "value_weights", "column_sums"};
    attention_shape s = SHAPES[0];
    decode_case c = decode_case_make(s, LONGER, 7);
    size_t prefix_size = (size_t)c.T * s.n_heads * s.head_dim,
           sizes[N_RESULTS] = {c.q_size + c.best_size, prefix_size, c.weights_size, c.weights_size};
    float *q = random_floats(prefix_size, 2), *root = random_floats((size_t)s.n_heads * s.head_dim * s.head_dim, 1);
    float *first[N_RESULTS], *now[N_RESULTS];
    for (int i = 0; i < 4; i++) {
        set_threads(i);
        run_all(&c, q, root, i ? now : first);
        for (int r = 0; i && r < N_RESULTS; r++) {
            same_bits(names[r], now[r], first[r], sizes[r]);
            free(now[r]);
        }
    }
    set_threads(0);
    for (int r = 0; r < N_RESULTS; r++) free(first[r]);
    free(q), free(root);
    decode_case_free(&c);
    JUDGED.reserve(&(backend_limits){0});
}
END_TEST

START_TEST(test_bits_over_batches)
{
#ifdef EMULATED
    enum { IN = 576, OUT = 96, ROWS = 150 };
#else
    enum { IN = 576, OUT = 1536, ROWS = 150 };
#endif
    float *x = random_floats(ROWS * IN, 1), *w = random_floats(OUT * IN, 1);
    reserve(&JUDGED, LONGER, SHAPES[0]);
    for (int keep = 0; keep < 2; keep++) {
        dev_matrix m = JUDGED.matrix_upload(w, OUT, IN, keep);
        dev y = JUDGED.alloc(ROWS * OUT), dx = on(&JUDGED, x, ROWS * IN);
        JUDGED.matmul(y, dx, m, ROWS, false);
        float *all = fetch(y, ROWS * OUT);
        for (uint32_t n = 1; n <= ROWS; n += n < 20 ? 1 : 13) {
            JUDGED.matmul(y, dev_at(dx, (ROWS - n) * IN), m, n, false);
            float *some = fetch(y, (size_t)n * OUT);
            same_bits("matmul", some, all + (ROWS - n) * OUT, (size_t)n * OUT);
            free(some);
        }
        JUDGED.release(y), JUDGED.release(dx), JUDGED.matrix_release(&m);
        free(all);
    }
    for (int i = 0; i < N_SHAPES; i++) { // one row of every question: each alone gives what all together give
        decode_case c = decode_case_make(SHAPES[i], LONGER, 1);
        size_t row = (size_t)c.s.n_heads * c.s.head_dim, heads = (size_t)c.s.n_kv_heads * c.T;
        reserve(&JUDGED, c.T, c.s);
        float *all = take(run_rows(&JUDGED, &c, 0, c.n_rows), c.q_size + c.best_size);
        for (uint32_t r = 0; r < c.n_rows; r++) {
            float *one = take(run_rows(&JUDGED, &c, r, 1), row + c.best_size);
            same_bits("attend_rows", one, all + r * row, row);
            same_bits("importance", one + row + r * heads, all + c.q_size + r * heads, heads);
            free(one);
        }
        free(all);
        decode_case_free(&c);
    }
    JUDGED.reserve(&(backend_limits){0});
    free(x), free(w);
}
END_TEST

START_TEST(test_softmax_exp)
{
    for (double x = 0; x > -86.9; x -= 0.00137) {
        double want = exp((double)(float)x);
        ck_assert_msg(fabs((double)softmax_exp((float)x) - want) <= 3e-7 * want, "exp(%g) is %g", x,
                      (double)softmax_exp((float)x));
    }
    ck_assert_float_eq(softmax_exp(0), 1.0f);
    ck_assert_float_eq(softmax_exp(-INFINITY), 0.0f);
    ck_assert_float_eq(softmax_exp(-1e30f), 0.0f);
}
END_TEST

START_TEST(test_softmax_exp2)
{
    for (double x = 0; x >= EXP2_LEAST; x -= 0.00137) {
        double want = exp2((double)(float)x), got = (double)softmax_exp2((float)x);
        ck_assert_msg(fabs(got - want) <= 1.5e-7 * want, "2^%g is %g", x, got);
    }
    ck_assert_float_eq(softmax_exp2(0), 1.0f);
    ck_assert_float_eq(softmax_exp2(-INFINITY), 0.0f);
    ck_assert_float_eq(softmax_exp2(-1e30f), 0.0f);
    ck_assert_float_eq(softmax_exp2(nextafterf(EXP2_LEAST, -200)), 0.0f);
}
END_TEST

START_TEST(test_every_operation_is_there)
{
    for (const backend *const *b = backend_list; *b; b++) {
        void *const *members = (void *const *)(const void *)*b;
        for (size_t i = 0; i < sizeof **b / sizeof(void *); i++)
            ck_assert_msg(members[i] != NULL, "backend %s: member %zu is missing", (*b)->name, i);
        ck_assert_ptr_eq(backend_find_compute((*b)->name, (*b)->compute), *b);
        ck_assert_str_eq(backend_find((*b)->name)->compute, "f32");
    }
    void *const *members = (void *const *)(const void *)&JUDGED;
    for (size_t i = 0; i < sizeof JUDGED / sizeof(void *); i++)
        ck_assert_msg(members[i] != NULL, "backend %s: member %zu is missing", JUDGED.name, i);
    ck_assert_ptr_null(backend_find("none"));
    ck_assert_ptr_null(backend_find_compute("ref", "bf16"));
    ck_assert_str_eq(backend_absence("none"), "");
    ck_assert(!backend_find("cuda") == (strlen(backend_absence("cuda")) > 0));
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, test_every_operation_is_there);
    tcase_add_test(tc, test_softmax_exp);
    tcase_add_test(tc, test_softmax_exp2);
    if (strcmp(JUDGED.name, "cpu") != 0) setenv("CK_FORK", "no", 1); // a device does not outlive a fork
    kvb_error err = {0};
    if (JUDGED.open(&err) != KVB_OK) {
        printf("skip - operations of backend %s: %s\n", JUDGED.name, err.message);
        fflush(stdout);
        return;
    }
    tcase_add_test(tc, test_row_operations);
    tcase_add_test(tc, test_swiglu_extremes);
    tcase_add_test(tc, test_matmul);
    tcase_add_test(tc, test_project);
    tcase_add_test(tc, test_matrix_load);
    tcase_add_test(tc, test_gather_rope_store);
    tcase_add_test(tc, test_sample);
    tcase_add_test(tc, test_output_norms);
    tcase_add_test(tc, test_norms_and_moments);
    tcase_add_test(tc, test_quadratic);
    tcase_add_test(tc, test_spreads);
#ifdef EMULATED // slowly; with two parts the rest is the same code as with f32
    if (strcmp(JUDGED.compute, "bf16x3") == 0) return;
#endif
    tcase_add_test(tc, test_attend_prefix);
    tcase_add_test(tc, test_attend_rows);
    tcase_add_test(tc, test_value_weights);
    tcase_add_test(tc, test_column_sums);
    tcase_add_test(tc, test_bits_over_threads);
    tcase_add_test(tc, test_bits_over_batches);
}

UNIT_MAIN("profiler backend", fill)
