// Tests the promise that bits depend neither on the number of threads nor on what else is in a batch.
#include "judge.h"

// Runs each operation that splits its work among threads. `results` gets the outputs, which the caller frees.
enum { N_RESULTS = 4 };
static void run_all(const decode_case *c, const float *q, const float *root, float *results[N_RESULTS])
{
    attention_shape s = c->s;
    size_t prefix_size = (size_t)c->T * s.n_heads * s.head_dim, roots = (size_t)s.n_heads * s.head_dim * s.head_dim;
    reserve(c->T, s);
    dev rows = run_rows(judged, c, 0, c->n_rows), prefix = JUDGED.alloc(judged, prefix_size),
        dq = put(judged, q, prefix_size), weights = JUDGED.alloc(judged, c->weights_size),
        dr = put(judged, root, roots), sums = JUDGED.alloc(judged, c->weights_size),
        row_log = JUDGED.alloc(judged, c->weights_size);
    prefix_kv kv = context_on(judged, c->k, c->v, c->T, s);
    JUDGED.attend_prefix(judged, prefix, dq, &kv, 0, c->T, s);
    JUDGED.value_weights(judged, weights, &kv, dr, (dev){NULL}, s);
    JUDGED.column_sums(judged, sums, row_log, dq, &kv, 0, s);
    JUDGED.release(judged, row_log), JUDGED.release(judged, dq), JUDGED.release(judged, dr),
        context_release(judged, &kv);
    results[0] = take(rows, c->q_size + c->best_size);
    results[1] = take(prefix, prefix_size);
    results[2] = take(weights, c->weights_size);
    results[3] = take(sums, c->weights_size);
}

// Sets the number of threads, and on the emulated device the order of a block's threads and what runs late.
static void set_threads(int i)
{
    static const int threads[] = {1, 2, 3, 8};
    omp_set_num_threads(threads[i]);
#ifdef EMULATED
    emulator_set_order((emulator_order)(i % 3));
    emulator_set_lazy(i % 2);
#endif
}

UNIT_TEST(test_bits_over_threads)
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
    free(q);
    free(root);
    decode_case_free(&c);
    check_judged();
}

UNIT_TEST(test_bits_over_batches)
{
#ifdef EMULATED
    enum { IN = 576, OUT = 96, ROWS = 150 };
#else
    enum { IN = 576, OUT = 1536, ROWS = 150 };
#endif
    float *x = random_floats(ROWS * IN, 1), *w = random_floats(OUT * IN, 1);
    reserve(LONGER, SHAPES[0]);
    for (int keep = 0; keep < 2; keep++) {
        dev_matrix m = backend_matrix(judged, w, OUT, IN, keep);
        dev y = JUDGED.alloc(judged, ROWS * OUT), dx = put(judged, x, ROWS * IN);
        JUDGED.matmul(judged, y, dx, m, ROWS, false);
        float *all = fetch(y, ROWS * OUT);
        for (uint32_t n = 1; n <= ROWS; n += n < 20 ? 1 : 13) {
            JUDGED.matmul(judged, y, dev_at(dx, (ROWS - n) * IN), m, n, false);
            float *some = fetch(y, (size_t)n * OUT);
            same_bits("matmul", some, all + (ROWS - n) * OUT, (size_t)n * OUT);
            free(some);
        }
        JUDGED.release(judged, y), JUDGED.release(judged, dx), JUDGED.matrix_release(judged, &m);
        free(all);
    }
    for (int i = 0; i < N_SHAPES; i++) { // rows alone, one of each question, give what all give together
        decode_case c = decode_case_make(SHAPES[i], LONGER, 1);
        size_t row = (size_t)c.s.n_heads * c.s.head_dim, heads = (size_t)c.s.n_kv_heads * c.T;
        reserve(c.T, c.s);
        float *all = take(run_rows(judged, &c, 0, c.n_rows), c.q_size + c.best_size);
        for (uint32_t r = 0; r < c.n_rows; r++) {
            float *one = take(run_rows(judged, &c, r, 1), row + c.best_size);
            same_bits("attend_rows", one, all + r * row, row);
            same_bits("importance", one + row + r * heads, all + c.q_size + r * heads, heads);
            free(one);
        }
        free(all);
        decode_case_free(&c);
    }
    check_judged();
    free(x);
    free(w);
}

JUDGE_PART(judge_bits)
