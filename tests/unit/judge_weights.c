// Products with weight matrices, from floats and as model files store them.
#include "judge.h"
#include "profiler/backend/packed.h"
#include "profiler/weights/gguf.h"

UNIT_TEST(test_matmul)
{
    static const uint32_t rows[] = {1, 2, 15, 16, 30, 100};
    dev y;
    for (size_t r = 0; r < 6; r++)
        for (int keep = 0; keep < 2; keep++)
            for (int accumulate = 0; accumulate < 2; accumulate++) {
                uint32_t n = rows[r], in = 200, out = 333;
                float *x = random_floats((size_t)n * in, 1), *w = random_floats((size_t)out * in, 1),
                      *before = random_floats((size_t)n * out, 1);
                reserve(8, SHAPES[0]);
                BOTH("matmul", y, (size_t)n * out, 2e-5f, 2e-5f, 16, { // about sqrt(in), for terms below 1
                    y = put(on, before, (size_t)n * out);
                    dev dx = put(on, x, (size_t)n * in);
                    dev_matrix m = backend_matrix(on, w, out, in, keep);
                    on->b->matmul(on, y, dx, m, n, accumulate);
                    on->b->release(on, dx), on->b->matrix_release(on, &m);
                });
                free(x);
                free(w);
                free(before);
            }
    check_judged();
}

// Several products of one input have the bits that each has alone.
UNIT_TEST(test_project)
{
    enum { IN = 200 };
    static const uint32_t rows[] = {1, 30, 100}, outs[BACKEND_PROJECTIONS] = {333, 64, 130};
    reserve(8, SHAPES[0]);
    backend_device *on = judged;
    for (size_t r = 0; r < 3; r++) {
        uint32_t n = rows[r];
        float *x = random_floats((size_t)n * IN, 1);
        dev dx = put(on, x, (size_t)n * IN);
        projection to[BACKEND_PROJECTIONS];
        for (int i = 0; i < BACKEND_PROJECTIONS; i++) {
            float *w = random_floats((size_t)outs[i] * IN, 1);
            to[i] = (projection){on->b->alloc(on, (size_t)n * outs[i]), backend_matrix(on, w, outs[i], IN, i == 1)};
            free(w);
        }
        on->b->project(on, to, BACKEND_PROJECTIONS, dx, n);
        for (int i = 0; i < BACKEND_PROJECTIONS; i++) {
            size_t size = (size_t)n * outs[i];
            dev alone = on->b->alloc(on, size);
            on->b->matmul(on, alone, dx, to[i].w, n, false);
            float *want = take(alone, size), *got = take(to[i].y, size);
            ck_assert_mem_eq(got, want, size * sizeof *want);
            free(want), free(got), on->b->matrix_release(on, &to[i].w);
        }
        on->b->release(on, dx), free(x);
    }
    check_judged();
}

// Returns a matrix of random bytes in a model file's format. The half floats in it are small, and have few digits if
// `coarse`.
static stored_matrix random_stored(uint32_t type, uint32_t out, uint32_t in, bool coarse)
{
    static const struct {
        uint32_t type, halves, first; // the number of halves in a block, and the offset of the first
    } scales[] = {{GGUF_TENSOR_F16, 1, 0},   {GGUF_TENSOR_Q4_0, 1, 0},   {GGUF_TENSOR_Q4_1, 2, 0},
                  {GGUF_TENSOR_Q5_0, 1, 0},  {GGUF_TENSOR_Q5_1, 2, 0},   {GGUF_TENSOR_Q8_0, 1, 0},
                  {GGUF_TENSOR_Q4_K, 2, 0},  {GGUF_TENSOR_Q5_K, 2, 0},   {GGUF_TENSOR_Q6_K, 1, 208},
                  {GGUF_TENSOR_Q2_K, 2, 80}, {GGUF_TENSOR_Q3_K, 1, 108}, {GGUF_TENSOR_IQ4_NL, 1, 0},
                  {GGUF_TENSOR_IQ4_XS, 1, 0}};
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
        if (type == GGUF_TENSOR_MXFP4) b[0] = (uint8_t)(118 + (coarse ? 0 : block % 5)); // the exponent of a block
    }
    return (stored_matrix){.type = type, .data = data, .out = out, .in = in, .paired = 16, .turned = 16};
}

// Matrices of every stored type, with rows in RoPE pairs, as weights and as rows; infinite values are refused.
UNIT_TEST(test_matrix_load)
{
    enum { IN = 256, OUT = STORED_ROWS, T = 17 };
    static const uint32_t rows[] = {1, 30, 100};
#define GGUF_TENSOR_NUMBER(name, number, values, bytes) number,
    static const uint32_t types[] = {GGUF_TENSOR_LIST(GGUF_TENSOR_NUMBER)};
    const attention_shape shape = attention_heads(4, 4, IN / 4);
    dev y;
    reserve(T, shape);
    for (size_t i = 0; i < 2 * sizeof types / sizeof *types; i++) {
        stored_matrix w = random_stored(types[i / 2], OUT, IN, i % 2);
        float *values = random_floats(OUT * IN, 0), largest = 0;
        ck_assert(stored_rows(&w, 0, OUT, values));
        for (size_t k = 0; k < OUT * IN; k++) largest = fmaxf(largest, fabsf(values[k]));
        free(values);
        int32_t ids[OUT];
        for (int32_t r = 0; r < OUT; r++) ids[r] = OUT - 1 - r;
        BOTH("gather of stored rows", y, OUT * IN, 0, 0, 0, {
            y = on->b->alloc(on, OUT * IN);
            dev_matrix m = on->b->matrix_load(on, &w, true);
            on->b->gather(on, y, m, ids, OUT);
            on->b->matrix_release(on, &m);
        });
        float *v = random_floats(IN * T, 1);
        BOTH("output_norms of stored rows", y, 4 * T, 1e-5f, 2e-5f, 0, {
            y = on->b->alloc(on, 4 * T);
            dev_matrix m = on->b->matrix_load(on, &w, true);
            prefix_kv kv = {{NULL}, put(on, v, IN * T), T, {NULL}};
            on->b->output_norms(on, y, &kv, m, shape);
            on->b->release(on, kv.v), on->b->matrix_release(on, &m);
        });
        for (size_t r = 0; r < 3; r++) {
            float *x = random_floats((size_t)rows[r] * IN, 1);
            BOTH("matmul of a stored matrix", y, rows[r] * OUT, 2e-5f * (1 + largest), 2e-5f, 24 * largest, {
                y = on->b->alloc(on, (size_t)rows[r] * OUT);
                dev dx = put(on, x, (size_t)rows[r] * IN);
                dev_matrix m = on->b->matrix_load(on, &w, false);
                on->b->matmul(on, y, dx, m, rows[r], false);
                on->b->release(on, dx), on->b->matrix_release(on, &m);
            });
            free(x);
        }
        uint32_t type = types[i / 2], scale = type == GGUF_TENSOR_Q6_K   ? 208
                                              : type == GGUF_TENSOR_Q2_K ? 80
                                              : type == GGUF_TENSOR_Q3_K ? 108
                                              : type == GGUF_TENSOR_F32  ? 2
                                                                         : 0;
        uint16_t infinite = type == GGUF_TENSOR_F32 || type == GGUF_TENSOR_BF16 ? 0x7f80 : 0x7c00;
        if (type == GGUF_TENSOR_MXFP4) *(unsigned char *)(uintptr_t)w.data = 255; // an exponent that is not a number
        else memcpy((char *)(uintptr_t)w.data + scale, &infinite, 2);
        dev_matrix none = JUDGED.matrix_load(judged, &w, true);
        ck_assert(!none.address && !none.packed);
        free(v);
        free((void *)(uintptr_t)w.data);
    }
    check_judged();
}

// Returns y = x W^T for `rows` rows of x and a matrix that is held as `hold` says. The caller frees it.
static float *product_of(const stored_matrix *w, unsigned hold, const float *x, uint32_t rows)
{
    backend_device *on = judged;
    dev y = on->b->alloc(on, (size_t)rows * w->out), dx = put(on, x, (size_t)rows * w->in);
    dev_matrix m = on->b->matrix_load(on, w, hold);
    ck_assert(m.address || m.packed);
    on->b->matmul(on, y, dx, m, rows, false);
    on->b->release(on, dx), on->b->matrix_release(on, &m);
    return take(y, (size_t)rows * w->out);
}

// Products have the same bits however a matrix is held: with its rows, or read in place, which takes no more memory.
UNIT_TEST(test_matrix_hold)
{
    enum { IN = 256, OUT = STORED_ROWS, MOST = 100 };
    static const uint32_t types[] = {GGUF_TENSOR_F32,  GGUF_TENSOR_F16,  GGUF_TENSOR_BF16,
                                     GGUF_TENSOR_Q4_0, GGUF_TENSOR_Q8_0, GGUF_TENSOR_Q6_K};
    static const uint32_t rows[] = {1, 32, MOST};
    static const unsigned holds[] = {HOLD_MAPPED, HOLD_MAPPED | HOLD_ROWS, HOLD_MAPPED | HOLD_IN_PLACE,
                                     HOLD_MAPPED | HOLD_IN_PLACE | HOLD_ROWS};
    reserve(8, SHAPES[0]);
    backend_device *on = judged;
    for (size_t t = 0; t < sizeof types / sizeof *types; t++)
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
            stored_matrix w = random_stored(types[t], OUT, IN, false);
            float *x = random_floats((size_t)rows[r] * IN, 1), *plain = product_of(&w, 0, x, rows[r]);
            for (size_t h = 0; h < sizeof holds / sizeof *holds; h++) {
                float *y = product_of(&w, holds[h], x, rows[r]);
                same_bits("a matrix that is held otherwise", y, plain, (size_t)rows[r] * OUT);
                ck_assert(on->b->matrix_bytes(on, &w, holds[h] | HOLD_IN_PLACE) <=
                          on->b->matrix_bytes(on, &w, holds[h] & ~(unsigned)HOLD_IN_PLACE));
                free(y);
            }
            free(plain);
            free(x);
            free((void *)(uintptr_t)w.data);
        }
    check_judged();
}

// On the CPU, a matrix that is read in place takes no memory, and a NaN in it fails the product. Other backends hold it
// and refuse the NaN at once.
UNIT_TEST(test_matrix_in_place)
{
    enum { IN = 64, OUT = 40 };
    float *values = random_floats(OUT * IN, 1), *x = random_floats(IN, 1);
    const stored_matrix w = stored_floats(values, OUT, IN);
    reserve(8, SHAPES[0]);
    backend_device *on = judged;
    bool in_place = on->b->matrix_bytes(on, &w, HOLD_MAPPED | HOLD_IN_PLACE) == 0;
    ck_assert_uint_gt(on->b->matrix_bytes(on, &w, 0), 0);
    ck_assert_int_eq(in_place, strcmp(on->b->name, "cpu") == 0);
    values[7] = NAN;
    dev_matrix m = on->b->matrix_load(on, &w, HOLD_MAPPED | HOLD_IN_PLACE);
    ck_assert_int_eq(m.address || m.packed, in_place);
    if (in_place) {
        dev y = on->b->alloc(on, OUT), dx = put(on, x, IN);
        on->b->matmul(on, y, dx, m, 1, false);
        help_fails(on->b->check(on, err), KVB_NUMERIC, "not finite");
        on->b->release(on, y), on->b->release(on, dx), on->b->matrix_release(on, &m);
        on->failed = KVB_OK; // so that the next test starts without a failure
    }
    free(values);
    free(x);
}

// Part of a row has the values of the whole row, for types with and without blocks.
UNIT_TEST(test_stored_slice)
{
    static const uint32_t types[] = {GGUF_TENSOR_F32, GGUF_TENSOR_BF16, GGUF_TENSOR_Q4_0, GGUF_TENSOR_Q6_K};
    enum { IN = 768 };
    for (size_t t = 0; t < 4; t++) {
        stored_matrix w = random_stored(types[t], 32, IN, false);
        float whole[IN], part[IN];
        for (uint32_t row = 0; row < 32; row += 5)
            for (uint32_t first = 0; first < IN; first += 96) {
                uint32_t n = IN - first < 128 ? IN - first : 128;
                ck_assert(stored_rows(&w, row, 1, whole) && stored_slice(&w, row, first, n, part));
                ck_assert_mem_eq(part, whole + first, n * sizeof *part);
            }
        free((void *)(uintptr_t)w.data);
    }
}

JUDGE_PART(judge_weights)
