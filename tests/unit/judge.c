// Helpers of the judge of backends (judge.h).
#include "judge.h"
#include "formats/need.h"

backend_device *judged, *reference;

#define SHAPE(H, G, D)                               \
    {                                                \
        .n_heads = H, .n_kv_heads = G, .head_dim = D \
    }
const attention_shape SHAPES[N_SHAPES] = {SHAPE(9, 3, 64),  SHAPE(4, 4, 16),  SHAPE(8, 1, 32), SHAPE(1, 1, 8),
                                          SHAPE(6, 2, 128), SHAPE(2, 1, 200), SHAPE(1, 1, 320)};
const uint32_t TOKENS[N_TOKENS] = {1, 15, 17, LONG};

float product_error(const backend *b)
{
    return strcmp(b->compute, "bf16") == 0 ? 4e-3f : strcmp(b->compute, "bf16x3") == 0 ? 1.5e-5f : 0;
}

static uint64_t state = 20261121;

void seed_uniform(uint64_t seed)
{
    state = seed;
}

float uniform(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(state >> 40) * 0x1p-23f - 1.0f;
}

float *random_floats(size_t n, float scale)
{
    float *p = malloc((n + 1) * sizeof *p);
    ck_assert_ptr_nonnull(p);
    for (size_t i = 0; i < n; i++) p[i] = uniform() * scale;
    return p;
}

static backend_device *opened(const backend *b, const backend_limits *limits)
{
    backend_device *on = NULL;
    help_ok(b->open(&on, b, limits, err));
    return on;
}

dev put(backend_device *on, const float *values, size_t n)
{
    dev d = backend_memory(on, n, "an array of the judge");
    ck_assert_ptr_nonnull(d.address);
    on->b->upload(on, d, values, n);
    return d;
}

// Returns n floats of the judged backend's memory, which the caller frees.
float *fetch(dev from, size_t n)
{
    float *values = malloc((n + 1) * sizeof *values);
    ck_assert_ptr_nonnull(values);
    JUDGED.download(judged, values, from, n);
    return values;
}

float *take(dev from, size_t n)
{
    float *values = fetch(from, n);
    JUDGED.release(judged, from);
    return values;
}

void reserve(uint32_t tokens, attention_shape s)
{
    uint32_t widest = s.n_heads * s.head_dim > 2048 ? s.n_heads * s.head_dim : 2048;
    backend_device *before = judged; // closed last, so that a device that starts slowly keeps running
    judged = opened(&JUDGED, &(backend_limits){tokens, TAIL, 1024, widest, s, 2048, widest});
    JUDGED.close(before);
}

// Fails if an operation has failed.
void check_judged(void)
{
    help_ok(JUDGED.check(judged, err));
}

void close_to(const char *what, const float *got, const float *want, size_t n, float absolute, float relative)
{
    size_t i = 0; // one check after the loop: each is a message to Check's parent process
    while (i < n && fabsf(got[i] - want[i]) <= absolute + relative * fabsf(want[i])) i++;
    ck_assert_msg(i == n, "%s: element %zu of %zu is %.9g, expected %.9g", what, i, n, i < n ? (double)got[i] : 0,
                  i < n ? (double)want[i] : 0);
}

// Puts the keys and values of a context on a device, packed if the backend wants that.
prefix_kv context_on(backend_device *on, const float *k, const float *v, uint32_t T, attention_shape s)
{
    size_t n = (size_t)s.n_kv_heads * T * s.head_dim, packed = on->b->packed_floats(on, T, s);
    prefix_kv kv = {put(on, k, n), put(on, v, n), T, {NULL}};
    if (!packed) return kv;
    kv.packed = on->b->alloc(on, packed);
    ck_assert_ptr_nonnull(kv.packed.address);
    on->b->pack_prefix(on, &kv, s);
    return kv;
}

void context_release(backend_device *on, prefix_kv *kv)
{
    on->b->release(on, kv->k), on->b->release(on, kv->v), on->b->release(on, kv->packed);
}

void same_bits(const char *what, const float *a, const float *b, size_t n)
{
    size_t i = 0;
    while (i < n && memcmp(&a[i], &b[i], sizeof *a) == 0) i++;
    ck_assert_msg(i == n, "%s: element %zu is %.9g in one run and %.9g in the other", what, i, i < n ? (double)a[i] : 0,
                  i < n ? (double)b[i] : 0);
}

decode_case decode_case_make(attention_shape s, uint32_t T, uint32_t rows_each)
{
    decode_case c = {.s = s, .T = T};
    for (uint32_t q = 0; q < QUESTIONS; q++)
        for (uint32_t r = 0; r < rows_each; r++) c.rows[c.n_rows++] = (decode_row){q, q % 3 + r, (q + r) % 4 != 0};
    c.kv_size = (size_t)s.n_kv_heads * T * s.head_dim;
    c.tail_size = (size_t)QUESTIONS * s.n_kv_heads * TAIL * s.head_dim;
    c.q_size = (size_t)c.n_rows * s.n_heads * s.head_dim, c.weights_size = (size_t)s.n_heads * T;
    c.best_size = (size_t)QUESTIONS * s.n_kv_heads * T;
    c.k = random_floats(c.kv_size, 2), c.v = random_floats(c.kv_size, 1);
    c.tail_k = random_floats(c.tail_size, 2), c.tail_v = random_floats(c.tail_size, 1);
    c.q = random_floats(c.q_size, 2), c.weights = random_floats(c.weights_size, 1);
    for (size_t i = 0; i < c.weights_size; i++) c.weights[i] = fabsf(c.weights[i]);
    c.best = calloc(c.best_size, sizeof(float));
    return c;
}

void decode_case_free(decode_case *c)
{
    free_all(c->k, c->v, c->tail_k, c->tail_v, c->q, c->weights, c->best);
}

// Runs rows [first, first + n). Returns their output, followed by the importance of all questions.
dev run_rows(backend_device *on, const decode_case *c, uint32_t first, uint32_t n)
{
    size_t row = (size_t)c->s.n_heads * c->s.head_dim;
    dev y = on->b->alloc(on, n * row + c->best_size), q = put(on, c->q + first * row, n * row);
    prefix_kv kv = context_on(on, c->k, c->v, c->T, c->s);
    tail_kv tails = {put(on, c->tail_k, c->tail_size), put(on, c->tail_v, c->tail_size), TAIL};
    oracle_view oracle = {put(on, c->weights, c->weights_size), dev_at(y, n * row), (size_t)c->s.n_kv_heads * c->T,
                          c->sum};
    on->b->attend_rows(on, y, q, &kv, &tails, c->rows + first, n, c->s, &oracle);
    on->b->release(on, q), context_release(on, &kv), on->b->release(on, tails.k), on->b->release(on, tails.v),
        on->b->release(on, oracle.weights);
    return y;
}

dev run_importance(backend_device *on, const decode_case *c)
{
    dev all = run_rows(on, c, 0, c->n_rows), importance = on->b->alloc(on, c->best_size);
    on->b->copy(on, importance, dev_at(all, c->q_size), c->best_size);
    on->b->release(on, all);
    return importance;
}
