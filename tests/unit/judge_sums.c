// Sums that scorers need: column sums of attention.
#include "judge.h"

UNIT_TEST(test_column_sums)
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
            // All rows; the last 300; the last 40, or half of a short context; the last one.
            const uint32_t firsts[] = {0, T > 300 ? T - 300 : 0, T > 40 ? T - 40 : T / 2, T - 1};
            for (int f = 0; f < 4; f += i == LONGEST_SHAPE ? 1 : 2) { // only one shape is judged with all of them
                // As for importance, the tolerance is relative: an error in a score scales a probability.
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
            free(k);
            free(q);
            free(sums);
        }
    check_judged();
}

JUDGE_PART(judge_sums)
