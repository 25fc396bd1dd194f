// Products of packed.h against sums in double: each precision's error over awkward shapes, and that a row's bits do not
// depend on other rows.
#include "formats/need.h"
#include "profiler/backend/bf16_round.h"
#include "profiler/backend/linalg.h"
#include "profiler/backend/packed.h"
#include "profiler/backend/packed_steps.h"
#include "profiler/backend/packed_tiles.h"
#include "profiler/weights/stored_matrix.h"
#include "unit.h"

static uint64_t state = 20261122;

static float uniform(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(state >> 40) * 0x1p-23f - 1.0f;
}

static void *memory(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 64) / 64 * 64);
    ck_assert_ptr_nonnull(p);
    memset(p, 0, (bytes + 64) / 64 * 64);
    return p;
}

typedef struct packed_case {
    precision p;
    uint32_t m, n, k;
    bool transposed, accumulate;
    float *a, *b, *c;        // [m,k], [k,n] or [n,k], [m,n]
    float *before;           // what c held
    void *operand, *weights; // of a and b
} packed_case;

static packed_case case_make(precision p, uint32_t m, uint32_t n, uint32_t k, bool transposed, bool accumulate)
{
    packed_case t = {.p = p, .m = m, .n = n, .k = k, .transposed = transposed, .accumulate = accumulate};
    t.a = memory((size_t)m * k * sizeof(float)), t.b = memory((size_t)k * n * sizeof(float));
    t.c = memory((size_t)m * n * sizeof(float)), t.before = memory((size_t)m * n * sizeof(float));
    t.operand = memory(operand_bytes(p, m, k)), t.weights = memory(packed_bytes(p, k, n));
    for (size_t i = 0; i < (size_t)m * k; i++) t.a[i] = uniform();
    for (size_t i = 0; i < (size_t)k * n; i++) t.b[i] = uniform();
    for (size_t i = 0; i < (size_t)m * n; i++) t.c[i] = t.before[i] = uniform();
    packed_store(p, t.weights, t.b, transposed ? k : n, transposed, k, n);
    operand_split(p, t.operand, t.a, k, 0, m, k, 1.0f);
    return t;
}

static void case_free(packed_case *t)
{
    free_all(t->a, t->b, t->c, t->before, t->operand, t->weights);
}

// Returns the largest error relative to the sum of the terms' magnitudes.
static double worst_error(const packed_case *t)
{
    double worst = 0;
    for (uint32_t i = 0; i < t->m; i++)
        for (uint32_t j = 0; j < t->n; j++) {
            double sum = t->accumulate ? t->before[(size_t)i * t->n + j] : 0, size = fabs(sum);
            for (uint32_t l = 0; l < t->k; l++) {
                double term = (double)t->a[(size_t)i * t->k + l] *
                              t->b[t->transposed ? (size_t)j * t->k + l : (size_t)l * t->n + j];
                sum += term, size += fabs(term);
            }
            worst = fmax(worst, fabs(t->c[(size_t)i * t->n + j] - sum) / size);
        }
    return worst;
}

static const uint32_t SHAPES[][3] = {{32, 64, 64},  {32, 128, 576}, {64, 48, 200},  {96, 72, 33},
                                     {32, 130, 96}, {256, 64, 512}, {32, 64, 1536}, {32, 33, 1000}};
enum { N_SHAPES = sizeof SHAPES / sizeof *SHAPES };

UNIT_TEST(test_errors)
{
    // What a sum of k float32 terms may lose, and what rounding of the operands adds to it.
    static const double rounding[] = {0, 0x1p-15, 0x1p-7};
    for (precision p = PRECISION_F32; p <= PRECISION_BF16; p++)
        for (int i = 0; i < N_SHAPES * 4; i++) {
            const uint32_t *s = SHAPES[i / 4];
            packed_case t = case_make(p, s[0], s[1], s[2], i & 1, i & 2);
            const product *made = product_find(p, s[0], s[1], s[2], t.accumulate);
            ck_assert_ptr_nonnull(made);
            product_prepare(1 + i % 9);
            bool rounds = !operand_is_plain(p); // else the operands are float32
            ck_assert_int_eq(precision_named(precision_name(p)), p);
            ck_assert(p == PRECISION_F32 ||
                      rounds == (tiles_available() || (p == PRECISION_BF16 && packed_is_native())));
            product_run(made, operand_is_plain(p) ? (const void *)t.a : t.operand, t.weights, t.c);
            double worst = worst_error(&t), allowed = (rounds ? rounding[p] : 0) + 0x1p-24 * (4 + sqrt(s[2]));
            ck_assert_msg(worst <= allowed, "%s, %u x %u x %u: error %.3g, allowed %.3g", precision_name(p), s[0], s[1],
                          s[2], worst, allowed);
            if (p == PRECISION_BF16) ck_assert(rounds == (worst > 0x1p-16)); // it does round
            case_free(&t);
        }
}

// Operands of bfloat16 take half the room if the library multiplies bfloat16.
UNIT_TEST(test_room_of_operands)
{
    size_t half = operand_bytes(PRECISION_BF16, 32, 64), whole = operand_bytes(PRECISION_F32, 32, 64);
    ck_assert_msg(packed_is_native() ? 2 * half <= whole : half == whole, "%zu and %zu", half, whole);
}

// Float32 from parts must be as good as float32 itself, within a factor of 1.5.
UNIT_TEST(test_float32_is_as_good_as_sgemm)
{
    enum { M = 32, N = 128, K = 1536 };
    packed_case t = case_make(PRECISION_F32, M, N, K, true, false);
    product_run(product_find(PRECISION_F32, M, N, K, false), t.operand, t.weights, t.c);
    double ours = worst_error(&t);
    gemm(false, true, M, N, K, 1.0f, t.a, K, t.b, K, 0.0f, t.c, N);
    double sgemm = worst_error(&t);
    ck_assert_msg(ours <= 1.5 * sgemm, "largest error %.3g, of sgemm %.3g", ours, sgemm);
    case_free(&t);
}

// If products take any number of rows, a row's bits do not depend on that number, and lines of c may be apart.
UNIT_TEST(test_any_rows)
{
    enum { M = 80, N = 96, K = 100, APART = 111 };
    if (!product_takes_any_rows())
        return; // other kernels promise this for product_rows() rows only: test_profiler_backend
    for (precision p = PRECISION_F32; p <= PRECISION_BF16; p++) {
        packed_case t = case_make(p, M, N, K, true, false);
        const product *made = product_find(p, M, N, K, false);
        product_run(made, t.operand, t.weights, t.c);
        for (uint32_t rows = 1; rows <= M; rows++) {
            float *apart = memory((size_t)(M + 1) * APART * sizeof(float));
            product_run_rows(made, rows, t.operand, t.weights, apart, APART, false);
            for (uint32_t i = 0; i < rows; i++)
                ck_assert_msg(memcmp(apart + (size_t)i * APART, t.c + (size_t)i * N, N * sizeof(float)) == 0,
                              "%s: row %u of %u has other bits", precision_name(p), i, rows);
            for (size_t i = 0; i < (size_t)(M + 1) * APART; i++) // nothing is written elsewhere
                if (i / APART >= rows || i % APART >= N) ck_assert_float_eq(apart[i], 0);
            free(apart);
        }
        case_free(&t);
    }
}

// If products take any number of rows, one can be added to what c holds, within its rows and columns. With many terms,
// parts of the sum are added in turn.
UNIT_TEST(test_added)
{
    enum { M = 40, N = 72, APART = 80 };
    static const uint32_t terms[] = {96, 1000};
    for (int i = 0; product_takes_any_rows() && i < 6; i++) {
        precision p = (precision)(i / 2);
        packed_case t = case_make(p, M, N, terms[i % 2], true, false);
        const product *made = product_find(p, M, N, terms[i % 2], false);
        float *sum = memory((size_t)M * APART * sizeof(float)), *before = memory((size_t)M * APART * sizeof(float));
        for (size_t j = 0; j < (size_t)M * APART; j++) sum[j] = before[j] = uniform();
        product_run(made, t.operand, t.weights, t.c);
        product_run_rows(made, M - 3, t.operand, t.weights, sum, APART, true);
        for (uint32_t r = 0; r < M; r++)
            for (uint32_t j = 0; j < APART; j++) {
                float was = before[r * APART + j], want = r < M - 3 && j < N ? was + t.c[r * N + j] : was;
                ck_assert_float_le(fabsf(sum[r * APART + j] - want),
                                   i % 2 ? 0x1p-15f : 0); // sums of up to 100: their rounding
            }
        free_all(sum, before);
        case_free(&t);
    }
}

// Weights kept as whole numbers: unpacking gives the same values, products are as good as with float32 weights, and the
// third part is left out only if it is zero.
UNIT_TEST(test_steps)
{
    enum { M = 40, N = 72, K = 192, BLOCKS = K / STEP_TERMS };
    for (unsigned i = 0; product_takes_any_rows() && i < 18; i++) {
        precision p = (precision)(i / 6);
        unsigned bits = 4 + i % 3 * 2, parts = i & 1 ? 2 : 3;
        packed_case t = case_make(p, M, N, K, true, false);
        void *b = memory(packed_step_bytes(bits, K, N));
        bool two_parts = true;
        for (uint32_t j = 0; j < N; j++) {
            int8_t wholes[K];
            float steps[BLOCKS], bases[BLOCKS], back[K];
            for (uint32_t l = 0; l < K; l++)
                wholes[l] = (int8_t)(bits == 4 ? 8 + 8 * uniform() : (bits == 6 ? 31 : 127) * uniform());
            for (uint32_t l = 0; l < BLOCKS; l++) {
                steps[l] =
                    parts == 2 ? 0x1p-7f : ldexpf(roundf(ldexpf(1 + uniform(), 10)), -17); // 11 bits, as in float16
                bases[l] = parts == 2 ? -0x1p-5f : uniform();
            }
            two_parts &= steps_fit_two_parts(wholes, steps, bases, K);
            steps_pack(bits, b, j, K, wholes, steps, bases);
            for (uint32_t l = 0, at = 0; l < K; l++, at = l / STEP_TERMS)
                t.b[j * K + l] = bits != 6 ? steps[at] * (float)wholes[l] + bases[at]
                                           : (l % STEP_TERMS < STEP_TERMS / 2 ? steps : bases)[at] * (float)wholes[l];
            steps_unpack(bits, back, b, j, K, 5, K - 5);
            ck_assert_mem_eq(back, t.b + j * K + 5, (K - 5) * sizeof *back);
        }
        if (bits != 6) ck_assert_uint_eq(two_parts ? 2 : 3, parts);
        product_run_steps(product_find(p, M, N, K, false), M, t.operand, b, bits, parts, t.c, N, false);
        static const double rounding[] = {0, 0x1p-15, 0x1p-7};
        double worst = worst_error(&t), allowed = rounding[p] + 0x1p-24 * (4 + sqrt(K));
        ck_assert_msg(worst <= allowed, "%s, %u bits in %u parts: error %.3g, allowed %.3g", precision_name(p), bits,
                      parts, worst, allowed);
        float *one = memory(N * sizeof *one);
        product_run_steps(product_find(p, M, N, K, false), 1, t.operand, b, bits, parts, one, N, false);
        ck_assert_mem_eq(one, t.c, N * sizeof *one); // a row alone has the same bits
        free_all(one, b);
        case_free(&t);
    }
}

// Without a tile unit, whole numbers are widened to what packed_store() makes of their values.
UNIT_TEST(test_steps_widened)
{
    enum { K = 96 };
    for (uint32_t i = 0; i < 18; i++) {
        uint32_t n = 16 * (i / 3 + 1), side = packed_side(PRECISION_F32, K, n);
        unsigned bits = i % 3 == 0 ? 4 : i % 3 == 1 ? 6 : 8;
        if (!steps_can_widen() || side == 0 || side % 16) continue;
        packed_case t = case_make(PRECISION_F32, 1, n, K, true, false);
        float *got = memory(packed_bytes(t.p, K, n));
        void *b = memory(packed_step_bytes(bits, K, n));
        for (uint32_t j = 0; j < n; j++) {
            int8_t wholes[K];
            for (uint32_t l = 0; l < K; l++) wholes[l] = (int8_t)(l % 2 + (bits == 4 ? 7 : 31) * fabsf(uniform()));
            steps_pack(bits, b, j, K, wholes, t.b + j * K, t.b + j * K + 3);
        }
        for (uint32_t j = 0; j < n; j++) steps_unpack(bits, t.b + j * K, b, j, K, 0, K);
        packed_store(t.p, t.weights, t.b, K, true, K, n);
        steps_widen(bits, got, b, K, n, side);
        ck_assert_mem_eq(got, t.weights, (size_t)K * n * sizeof *got);
        free(got), free(b), case_free(&t);
    }
}

// On the tile unit: some columns and terms of a product have the bits of the whole product, also if its parts of b are
// reused.
UNIT_TEST(test_part_of_a_product)
{
    enum { M = 32, N = 160, K = 96 };
    for (precision p = PRECISION_F32; tiles_available() && p <= PRECISION_BF16; p++)
        for (uint32_t terms = 32; terms <= K; terms += 32) {
            packed_case t = case_make(p, M, N, K, true, false);
            for (uint32_t i = 0; i < M; i++) // all other terms are zero
                memset(t.a + i * K + terms, 0, (K - terms) * sizeof(float));
            operand_split(p, t.operand, t.a, K, 0, M, K, 1.0f);
            product_run(product_find(p, M, N, K, false), t.operand, t.weights, t.c);
            void *split = memory(tiles_split_bytes(packed_parts(p, K), K, N));
            tiles_hold();
            for (uint32_t n = N; n; n -= 32) {
                float *some = memory((size_t)M * N * sizeof(float));
                tiles_multiply(&(tile_product){.parts = packed_parts(p, K),
                                               .b_parts = packed_parts(p, K),
                                               .m = M,
                                               .n = n,
                                               .k = K,
                                               .a = t.operand,
                                               .b = t.weights,
                                               .c = some,
                                               .ldc = N,
                                               .terms = terms,
                                               .split = split,
                                               .is_split = n < N});
                for (uint32_t i = 0; i < M; i++)
                    for (uint32_t j = 0; j < N; j++)
                        ck_assert_msg(some[i * N + j] == (j < n ? t.c[i * N + j] : 0),
                                      "%s, %u terms: row %u, column %u of %u", precision_name(p), terms, i, j, n);
                free(some);
            }
            tiles_let_go();
            free(split);
            case_free(&t);
        }
}

// On the tile unit: powers of two that are written straight into an operand equal those that are split.
UNIT_TEST(test_powers_as_operand)
{
    enum { K = 160, ROWS = 32 };
    for (unsigned parts = 1; tiles_available() && parts <= 3; parts++)
        for (uint32_t n = 0; n <= K; n += n < 70 ? 1 : 15) {
            float x[K], kept[K];
            uint32_t terms = (n + 31) / 32 * 32, row = n % ROWS;
            size_t bytes = tiles_a_bytes(parts, ROWS, K);
            char *a = memory(bytes), *split = memory(bytes);
            float top = -INFINITY;
            double sum = 0;
            for (uint32_t i = 0; i < K; i++) x[i] = kept[i] = uniform() * 90;
            for (uint32_t i = 0; i < n; i++) top = fmaxf(top, x[i]);
            ck_assert_float_eq(tiles_max(x, n), top);
            if (n == 0) top = 0;
            float got = tiles_exp2_row(parts, a, row, K, x, n, K, top, kept);
            for (uint32_t i = 0; i < K; i++) {
                double want = i < n && x[i] - top >= EXP2_LEAST ? exp2((double)(x[i] - top)) : 0;
                ck_assert_double_le(fabs(kept[i] - want), 1.5e-7 * want);
                sum += want;
            }
            ck_assert_double_le(fabs(got - sum), 1e-6 * sum);
            tiles_pack_row(parts, split, kept, row, K, 1.0f);
            ck_assert_int_eq(memcmp(a, split, bytes), 0);
            memset(a, 0xff, bytes); // only the requested terms are written
            tiles_exp2_row(parts, a, row, K, x, n, terms, top, NULL);
            for (size_t i = 0; i < bytes; i++) {
                uint32_t term = (uint32_t)(i / 1024 / parts % (K / 32) * 32);
                bool own = i % 1024 / 64 == row % 16 && i / (bytes / 2) == row / 16;
                ck_assert_int_eq((unsigned char)a[i], own && term < terms ? (unsigned char)split[i] : 0xff);
            }
            free_all(a, split);
        }
}

// A NaN makes its whole row or column of the product NaN, and nothing else.
UNIT_TEST(test_not_a_number)
{
    for (precision p = PRECISION_F32; p <= PRECISION_BF16; p++)
        for (int in_b = 0; in_b < 2; in_b++) {
            packed_case t = case_make(p, 32, 64, 64, true, false);
            if (in_b) t.b[5 * 64 + 7] = NAN;
            else t.a[5 * 64 + 7] = NAN;
            packed_store(p, t.weights, t.b, 64, true, 64, 64);
            operand_split(p, t.operand, t.a, 64, 0, 32, 64, 1.0f);
            product_run(product_find(p, 32, 64, 64, false), t.operand, t.weights, t.c);
            for (int i = 0; i < 32 * 64; i++) ck_assert(isnan(t.c[i]) == (in_b ? i % 64 == 5 : i / 64 == 5));
            case_free(&t);
        }
}

// Returns the nearest float32 with zeros in its lower 16 bits, found between its two neighbours in double.
static float nearest_bf16(float x)
{
    uint32_t bits;
    float down, up;
    memcpy(&bits, &x, sizeof bits);
    bits &= 0xffff0000u;
    memcpy(&down, &bits, sizeof down);
    bits += 0x10000u;
    memcpy(&up, &bits, sizeof up);
    double below = fabs((double)x - down), above = fabs((double)up - x);
    bool down_is_even = (bits >> 16) % 2 != 0;
    return below < above || (below == above && down_is_even) ? down : up;
}

// Returns the upper 16 bits of a float.
static uint16_t upper_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

UNIT_TEST(test_round)
{
    enum { N = 117 }; // not a multiple of a vector's length
    float x[N];
    uint16_t bits[N];
    for (int i = 0; i < N; i++) x[i] = uniform() * ldexpf(1, i % 60 - 30);
    for (int i = 0; i < 4; i++) x[i] = 1 + (float)(2 * i + 1) * 0x1p-8f; // ties
    for (float scale = 1; scale > 0.25f; scale /= 2) {
        bf16_round(bits, x, N, scale);
        for (int i = 0; i < N; i++) ck_assert_uint_eq(bits[i], upper_bits(nearest_bf16(scale * x[i])));
    }
}

UNIT_MAIN("profiler packed")
