// Every operation on many shapes: all groups of query heads that models have, all head sizes, and lengths around every
// edge of a tile; and on random shapes. KVB_SEED draws other shapes, KVB_DRAWS says how many.
#include "judge.h"

// The most multiplications of a case, and one in how many cases is judged: the reference and the emulators are slow,
// and a sanitiser, which looks at memory and not at numbers, makes both three times as slow. KVB_JUDGE=all judges more
// of them (tests/cli/long_judge.sh). Groups of 7 are never left out.
#if defined(EMULATED)
enum { SAMPLE_MOST = 60000, SAMPLE_EVERY = 40, ALL_MOST = 150000, ALL_EVERY = 5, DRAWS = 2 };
#elif defined(EMULATED_TILES)
#if defined(__SANITIZE_ADDRESS__)
enum { SAMPLE_MOST = 60000, SAMPLE_EVERY = 40, ALL_MOST = 1000000, ALL_EVERY = 1, DRAWS = 2 };
#else
enum { SAMPLE_MOST = 400000, SAMPLE_EVERY = 12, ALL_MOST = 1000000, ALL_EVERY = 1, DRAWS = 4 };
#endif
#elif defined(__SANITIZE_ADDRESS__)
enum { SAMPLE_MOST = 400000, SAMPLE_EVERY = 12, ALL_MOST = 6000000, ALL_EVERY = 1, DRAWS = 4 };
#else
enum { SAMPLE_MOST = 2000000, SAMPLE_EVERY = 4, ALL_MOST = 6000000, ALL_EVERY = 1, DRAWS = 8 };
#endif
// Slow builds judge one in LAST_EVERY shapes of the last tiles; the seed decides which.
#if defined(EMULATED) || defined(EMULATED_TILES) || defined(__SANITIZE_ADDRESS__)
enum { LAST_EVERY = 5 };
#else
enum { LAST_EVERY = 1 };
#endif
#define MOST (judges_all() ? ALL_MOST : SAMPLE_MOST)
#define EVERY (judges_all() ? (uint32_t)ALL_EVERY : (uint32_t)SAMPLE_EVERY)

static bool judges_all(void)
{
    const char *wish = getenv("KVB_JUDGE");
    return wish && strcmp(wish, "all") == 0;
}

static const uint32_t GROUPS[] = {1, 2, 3, 4, 5, 6, 7, 8, 14, 28}, DIMS[] = {16, 24, 40, 64, 80, 96, 112, 128, 256};
// Around 16, 24, 30 and 32 rows, around tiles of 64 to 512 keys or rows and multiples of them, and around 1024.
static const uint32_t LENGTHS[] = {1,   2,   15,  16,  17,  23,  24,  25,  29,  30,   31,   32,  33,  63,
                                   64,  65,  127, 128, 129, 223, 224, 225, 255, 256,  257,  383, 384, 385,
                                   511, 512, 513, 767, 768, 769, 895, 896, 897, 1023, 1024, 1025};
enum {
    N_GROUPS = sizeof GROUPS / sizeof *GROUPS,
    N_DIMS = sizeof DIMS / sizeof *DIMS,
    N_LENGTHS = sizeof LENGTHS / sizeof *LENGTHS
};

static double cost_of(attention_shape s, uint32_t T)
{
    return (double)s.n_heads * s.head_dim * T * (T / 2 + 60);
}

static float *absolute(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] = fabsf(x[i]);
    return x;
}

static void judge_prefix(const char *what, attention_shape s, uint32_t T, uint32_t first)
{
    uint32_t n = T - first;
    size_t keys = (size_t)s.n_kv_heads * T * s.head_dim, row = (size_t)s.n_heads * s.head_dim,
           lines = (size_t)s.n_heads * T;
    float *k = random_floats(keys, 2), *v = random_floats(keys, 1), *q = random_floats(T * row, 2);
    dev y;
    BOTH(what, y, n * row, 2e-6f, 2e-5f, 4, {
        y = on->b->alloc(on, n * row);
        dev dq = put(on, q + first * row, n * row);
        prefix_kv kv = context_on(on, k, v, T, s);
        on->b->attend_prefix(on, y, dq, &kv, first, n, s);
        on->b->release(on, dq), context_release(on, &kv);
    });
    // Column sums add up probabilities, which an error in a score changes in proportion.
    BOTH(what, y, lines, 1e-6f, 3e-5f + product_error(&JUDGED) * 8, 0, {
        y = on->b->alloc(on, lines);
        dev dq = put(on, q, T * row), row_log = on->b->alloc(on, lines);
        prefix_kv kv = context_on(on, k, v, T, s);
        on->b->column_sums(on, y, row_log, dq, &kv, first, s);
        on->b->release(on, dq), on->b->release(on, row_log), context_release(on, &kv);
    });
    free(k);
    free(v);
    free(q);
}

static void judge_decoding(const char *what, attention_shape s, uint32_t T, uint32_t rows_each)
{
    decode_case c = decode_case_make(s, T, rows_each);
    dev y;
    BOTH(what, y, c.q_size, 2e-6f, 3e-5f, 4, { y = run_rows(on, &c, 0, c.n_rows); });
    BOTH(what, y, c.best_size, 2e-6f, 3e-5f + product_error(&JUDGED) * 8, 0, {
        dev all = run_rows(on, &c, 0, c.n_rows);
        y = on->b->alloc(on, c.best_size);
        on->b->copy(on, y, dev_at(all, c.q_size), c.best_size);
        on->b->release(on, all);
    });
    decode_case_free(&c);
}

static void judge_values(const char *what, attention_shape s, uint32_t T, uint32_t width)
{
    size_t size = (size_t)s.n_kv_heads * T * s.head_dim, row = (size_t)s.n_heads * s.head_dim, roots = row * s.head_dim,
           lines = (size_t)s.n_heads * T;
    float *v = random_floats(size, 1), *root = absolute(random_floats(roots, 1), roots),
          *wo = random_floats(width * row, 1);
    dev y;
    BOTH(what, y, lines, 1e-9f, 2e-5f, 0, {
        y = on->b->alloc(on, lines);
        dev dr = put(on, root, roots);
        prefix_kv kv = {dr, put(on, v, size), T, {NULL}};
        on->b->value_weights(on, y, &kv, dr, (dev){NULL}, s);
        on->b->release(on, dr), on->b->release(on, kv.v);
    });
    BOTH(what, y, lines, 1e-5f, 2e-5f, 0, {
        y = on->b->alloc(on, lines);
        dev_matrix m = backend_matrix(on, wo, width, (uint32_t)row, true);
        prefix_kv kv = {{NULL}, put(on, v, size), T, {NULL}};
        on->b->output_norms(on, y, &kv, m, s);
        on->b->release(on, kv.v), on->b->matrix_release(on, &m);
    });
    free(v);
    free(root);
    free(wo);
}

static void judge_product(const char *what, uint32_t n, uint32_t in, uint32_t out)
{
    float *x = random_floats((size_t)n * in, 1), *w = random_floats((size_t)out * in, 1);
    dev y;
    BOTH(what, y, (size_t)n * out, 1.5e-6f * sqrtf((float)in), 2e-5f, 1.2f * sqrtf((float)in), {
        y = on->b->alloc(on, (size_t)n * out);
        dev dx = put(on, x, (size_t)n * in);
        dev_matrix m = backend_matrix(on, w, out, in, false);
        on->b->matmul(on, y, dx, m, n, false);
        on->b->release(on, dx), on->b->matrix_release(on, &m);
    });
    free(x);
    free(w);
}

// Judges everything that depends on the shape of heads; `salt` varies the rest.
static void judge_shape(attention_shape s, uint32_t T, uint32_t salt)
{
    char what[128];
    snprintf(what, sizeof what, "%u:%u heads of %u, %u tokens (salt %u)", s.n_heads, s.n_kv_heads, s.head_dim, T, salt);
    reserve(T, s);
    judge_prefix(what, s, T, salt % 3 == 0 ? 0 : salt * 7 % T);
    judge_decoding(what, s, T, 1 + salt % 7);
    judge_values(what, s, T, 8 + salt * 37 % 290);
    judge_product(what, 1 + salt * 11 % 70, s.n_heads * s.head_dim, 8 + salt * 13 % 200);
    check_judged();
}

// The shapes that the other judges share, with each of their lengths and several numbers of rows at a time.
UNIT_TEST(test_shared_shapes)
{
    for (uint32_t i = 0; i < N_SHAPES; i++)
        for (uint32_t t = 0; t < N_TOKENS; t++) {
            judge_shape(SHAPES[i], TOKENS[t], 3 * i + t + 1);
            for (uint32_t each = 1; each <= 7; each += ROWS_STEP)
                judge_decoding("rows at a time", SHAPES[i], TOKENS[t], each);
        }
    check_judged();
}

// Each group with each head size. Lengths and numbers of KV heads (1, 4, 2) take turns.
UNIT_TEST(test_groups_and_head_sizes)
{
    static const uint32_t kv_heads[] = {1, 4, 2};
    uint32_t at = 0;
    for (int i = 0; i < N_GROUPS; i++)
        for (int j = 0; j < N_DIMS; j++, at++) {
            uint32_t G = kv_heads[at % 3];
            attention_shape s = attention_heads(GROUPS[i] * G, G, DIMS[j]);
            if (at % EVERY != 0 && GROUPS[i] != 7) continue;
            uint32_t length = at * 11 % N_LENGTHS;
            while (length && cost_of(s, LENGTHS[length]) > MOST) length--;
            judge_shape(s, LENGTHS[length], at);
        }
}

// Each length with two groups of small heads.
UNIT_TEST(test_lengths)
{
    for (uint32_t i = 0, at = 0; i < N_LENGTHS; i++)
        for (uint32_t j = 0; j < 2; j++, at++) {
            attention_shape s = attention_heads(GROUPS[(i + 5 * j) % N_GROUPS], 1, 16);
            if (cost_of(s, LENGTHS[i]) > 8.0 * MOST) s.n_heads = 7;
            if (cost_of(s, LENGTHS[i]) <= 8.0 * MOST && at % EVERY == 0) judge_shape(s, LENGTHS[i], at);
        }
}

static uint64_t setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

// The last tile of keys holds 1 to 4 times 64: a product of so few terms may be split otherwise than a whole tile's.
UNIT_TEST(test_last_tiles)
{
    static const uint32_t tokens[] = {50, 100, 190, 250, 356};
    uint32_t every = judges_all() ? 1 : LAST_EVERY, turn = (uint32_t)(setting("KVB_SEED", 20261122) % every);
    for (uint32_t i = 0; i < N_DIMS; i++)
        for (uint32_t j = 0; j < 5; j++) {
            if ((i + j) % every != turn) continue;
            attention_shape s = attention_heads(j == 1 ? 8 : 2, 1, DIMS[i]);
            if (cost_of(s, tokens[j]) <= 4.0 * MOST) judge_shape(s, tokens[j], 10 * i + j);
        }
}

static uint32_t draw(uint32_t least, uint32_t most)
{
    return least + (uint32_t)((uniform() + 1) / 2 * (float)(most - least + 1)) % (most - least + 1);
}

UNIT_TEST(test_random_shapes)
{
    uint64_t seed = setting("KVB_SEED", 20261122), draws = setting("KVB_DRAWS", DRAWS);
    printf("random shapes: KVB_SEED=%llu KVB_DRAWS=%llu\n", (unsigned long long)seed, (unsigned long long)draws);
    fflush(stdout);
    for (uint64_t i = 0; i < draws; i++) {
        seed_uniform(seed + i);
        for (int k = 0; k < 8; k++) uniform(); // skip numbers that are similar for nearby seeds
        attention_shape s = attention_heads(0, draw(1, 5), 8 * draw(1, 40));
        s.n_heads = s.n_kv_heads * draw(1, 30);
        uint32_t T = draw(1, 1100);
        while (T > 1 && cost_of(s, T) > MOST) T = T * 2 / 3;
        judge_shape(s, T, draw(0, 1000));
    }
}

JUDGE_PART(judge_shapes)
