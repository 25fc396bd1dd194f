// Sums that scorers need: column sums of attention, norms, moments, quadratic forms, spreads.
#include "judge.h"

START_TEST(test_column_sums)
{
    dev y;
    static const uint32_t lengths[] = {1, 15, 257, LONG, 1100}; // less than, at and over one tile of rows and of keys
    for (int i = 0; i < N_SHAPES; i++)
        for (int t = 0; t < 5; t++) {
            attention_shape s = SHAPES[i];
            uint32_t T = lengths[t];
            if ((T == 1100 && i != LONGEST_SHAPE) || (T == LONG && i % JUDGE_SLOW)) continue; // the judge is slow
            size_t kv_size = (size_t)s.n_kv_heads * T * s.head_dim, q_size = (size_t)T * s.n_heads * s.head_dim,
                   size = (size_t)s.n_heads * T;
            float *k = random_floats(kv_size, 2), *q = random_floats(q_size, 2), *sums = malloc(size * sizeof *sums);
            reserve(T, s);
            // All rows; the last 300 or 40, or those of a window that is no whole tile; the last one.
            const uint32_t firsts[] = {0, T > 300 ? T - 300 : 0, T > 40 ? T - 40 : T / 2, T - 1};
            for (int f = 0; f < 4; f += i == LONGEST_SHAPE ? 1 : 2) { // one shape has them all
                // As importance: what is off in a score is off in proportion.
                BOTH("column_sums", y, size, 1e-6f, 3e-5f + product_error(&JUDGED) * 8, 0, {
                    y = on->b->alloc(on, size);
                    dev dq = put(on, q, q_size), rows = on->b->alloc(on, size);
                    prefix_kv kv = context_on(on, k, k, T, s);
                    on->b->column_sums(on, y, rows, dq, &kv, firsts[f], s);
                    on->b->download(on, sums, y, size);
                    on->b->release(on, dq), on->b->release(on, rows), context_release(on, &kv);
                });
                for (uint32_t h = 0; h < s.n_heads; h++) { // every row of attention sums to one
                    double sum = 0;
                    for (uint32_t j = 0; j < T; j++) sum += sums[(size_t)h * T + j];
                    ck_assert_double_eq_tol(sum / (T - firsts[f]), 1.0, 2e-5);
                }
            }
            free(k), free(q), free(sums);
        }
    check_judged();
}
END_TEST

START_TEST(test_output_norms)
{
    dev y;
    static const uint32_t widths[] = {8, JUDGE_SLOW > 1 ? 200 : 600};
    for (int i = 0; i < N_SHAPES; i++)
        for (int t = 0; t < N_TOKENS; t++)
            for (int w = 0; w < 2; w++) {
                attention_shape s = SHAPES[i];
                uint32_t T = TOKENS[t], in = s.n_heads * s.head_dim;
                size_t size = (size_t)s.n_kv_heads * T * s.head_dim;
                float *v = random_floats(size, 1), *wo = random_floats((size_t)widths[w] * in, 1);
                reserve(T, s);
                BOTH("output_norms", y, (size_t)s.n_heads * T, 1e-5f, 2e-5f, 0, {
                    y = on->b->alloc(on, (size_t)s.n_heads * T);
                    dev_matrix m = backend_matrix(on, wo, widths[w], in, true);
                    prefix_kv kv = {{NULL}, put(on, v, size), T, {NULL}};
                    on->b->output_norms(on, y, &kv, m, s);
                    on->b->release(on, kv.v), on->b->matrix_release(on, &m);
                });
                free(v), free(wo);
            }
    check_judged();
}
END_TEST

START_TEST(test_norms_and_moments)
{
    static const uint32_t lengths[] = {1, 17, LONG, 1100};
    dev y;
    for (int i = 0; i < N_SHAPES; i++)
        for (int t = 0; t < 4; t++) {
            uint32_t n = lengths[t], H = SHAPES[i].n_heads, d = SHAPES[i].head_dim;
            if ((n == 1100 && i != LONGEST_SHAPE) || (n == LONG && i % JUDGE_SLOW)) continue; // the judge is slow
            size_t size = (size_t)n * H * d, means = (size_t)H * d;
            reserve(8, SHAPES[i]);
            float *x = random_floats(size, 2);
            for (uint32_t c = 0; c < d; c++) x[c] += 5; // a mean that is not near zero
            BOTH("norms", y, (size_t)n * H, 1e-7f, 1e-6f, 0, {
                y = on->b->alloc(on, (size_t)n * H);
                dev dx = put(on, x, size);
                on->b->norms(on, y, dx, (size_t)n * H, d);
                on->b->release(on, dx);
            });
            for (int by_head = 0; by_head < 2; by_head++) {
                BOTH("mean and covariance", y, means * (1 + d), 2e-5f, 1e-5f, 0, {
                    y = on->b->alloc(on, means * (1 + d));
                    dev dx = put(on, x, size);
                    on->b->moments(on, y, dev_at(y, means), dx, (dev){NULL}, n, H, d, by_head);
                    on->b->release(on, dx);
                });
                BOTH("mean of directions", y, means, 1e-7f, 1e-5f, 0, {
                    y = on->b->alloc(on, means);
                    dev dx = put(on, x, size), norms = on->b->alloc(on, (size_t)n * H);
                    on->b->norms(on, norms, dx, (size_t)n * H, d);
                    on->b->moments(on, y, (dev){NULL}, dx, norms, n, H, d, by_head);
                    on->b->release(on, dx), on->b->release(on, norms);
                });
            }
            free(x);
        }
    check_judged();
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
                    y = on->b->alloc(on, (size_t)s.n_heads * T);
                    dev dl = put(on, linear, lines), ds = put(on, square, lines * d);
                    prefix_kv kv = {put(on, k, keys), {NULL}, T, {NULL}};
                    on->b->quadratic(on, y, &kv, dl, squares ? ds : (dev){NULL}, s);
                    on->b->release(on, dl), on->b->release(on, ds), on->b->release(on, kv.k);
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
                y = on->b->alloc(on, (size_t)G * T);
                dev dz = put(on, z, (size_t)G * T * d);
                on->b->spreads(on, y, dz, T, G, d, rows[r]);
                on->b->release(on, dz);
            });
            free(z);
        }
}
END_TEST

void judge_sums(TCase *tc)
{
    tcase_add_test(tc, test_output_norms);
    tcase_add_test(tc, test_norms_and_moments);
    tcase_add_test(tc, test_quadratic);
    tcase_add_test(tc, test_spreads);
#ifdef EMULATED // slowly; with two parts the rest is the same code as with f32
    if (strcmp(JUDGED.compute, "bf16x3") == 0) return;
#endif
    tcase_add_test(tc, test_column_sums);
}
