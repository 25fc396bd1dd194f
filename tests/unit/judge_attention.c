// The oracle's importance as a sum, and its weights.
#include "formats/need.h"
#include "judge.h"

// Importance as a sum, for backends that compute it.
UNIT_TEST(test_summed_importance)
{
    dev y;
    for (int i = 0; i < N_SHAPES && JUDGED.sums_importance; i++)
        for (uint32_t each = 1; each <= 7; each += ROWS_STEP) {
            decode_case c = decode_case_make(SHAPES[i], TOKENS[N_TOKENS - 1], each);
            c.sum = true;
            reserve(c.T, c.s);
            BOTH("summed importance", y, c.best_size, 1e-5f, 3e-5f + product_error(&JUDGED) * 8, 0,
                 { y = run_importance(on, &c); });
            decode_case_free(&c);
        }
    check_judged();
}

// Weights around a centre are those of values from which the centre was subtracted.
UNIT_TEST(test_weights_around_a_centre)
{
    for (int i = 0; i < N_SHAPES && JUDGED.sums_importance; i++) {
        attention_shape s = SHAPES[i];
        uint32_t T = TOKENS[N_TOKENS - 1], H = s.n_heads, d = s.head_dim;
        size_t size = (size_t)s.n_kv_heads * T * d, roots = (size_t)H * d * d;
        float *v = random_floats(size, 1), *root = random_floats(roots, 1), *centre = random_floats((size_t)H * d, 1);
        for (uint32_t h = 1; h < H; h++) memcpy(centre + (size_t)h * d, centre, d * sizeof *centre);
        float *moved = random_floats(size, 1);
        for (size_t j = 0; j < size; j++) moved[j] = v[j] - centre[j % d];
        reserve(T, s);
        dev dr = put(judged, root, roots), dc = put(judged, centre, (size_t)H * d);
        dev around = JUDGED.alloc(judged, (size_t)H * T), plain = JUDGED.alloc(judged, (size_t)H * T);
        prefix_kv kv = {dr, put(judged, v, size), T, {NULL}}, kv_moved = {dr, put(judged, moved, size), T, {NULL}};
        JUDGED.value_weights(judged, around, &kv, dr, dc, s);
        JUDGED.value_weights(judged, plain, &kv_moved, dr, (dev){NULL}, s);
        float *got = fetch(around, (size_t)H * T), *want = fetch(plain, (size_t)H * T);
        close_to("weights around a centre", got, want, (size_t)H * T, 1e-8f, 1e-4f);
        JUDGED.release(judged, dr), JUDGED.release(judged, dc), JUDGED.release(judged, around);
        JUDGED.release(judged, plain), JUDGED.release(judged, kv.v), JUDGED.release(judged, kv_moved.v);
        free_all(got, want, v, root, centre, moved);
    }
    check_judged();
}

// The weights of a layer sum to one.
UNIT_TEST(test_value_weights)
{
    for (int i = 0; i < N_SHAPES; i++)
        for (int t = 0; t < N_TOKENS; t++) {
            attention_shape s = SHAPES[i];
            uint32_t T = TOKENS[t];
            size_t size = (size_t)s.n_kv_heads * T * s.head_dim, roots = (size_t)s.n_heads * s.head_dim * s.head_dim;
            float *v = random_floats(size, 1), *root = random_floats(roots, 1);
            reserve(T, s);
            dev w = JUDGED.alloc(judged, (size_t)s.n_heads * T), dr = put(judged, root, roots);
            prefix_kv kv = {dr, put(judged, v, size), T, {NULL}};
            JUDGED.value_weights(judged, w, &kv, dr, (dev){NULL}, s);
            double sum = 0;
            float *weights = fetch(w, (size_t)s.n_heads * T);
            for (size_t j = 0; j < (size_t)s.n_heads * T; j++) sum += weights[j];
            free(weights);
            ck_assert_double_eq_tol(sum, 1.0, 1e-5);
            JUDGED.release(judged, w), JUDGED.release(judged, dr), JUDGED.release(judged, kv.v);
            free_all(v, root);
        }
    check_judged();
}

JUDGE_PART(judge_attention)
