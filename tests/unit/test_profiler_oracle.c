// The factor of W_O W_O^T against the norm ||v W_O|| computed straight from the weights, and the weights w of
// methods.md 2.1 that follow from it.
#include "profiler/model/oracle.h"
#include "test_profiler_cases.h"

typedef struct root_case {
    uint32_t width, n_heads, head_dim;
} root_case;

// Returns ||v W_O^(h)||. The output projection [width, H*d] maps head h's part of the joined heads to the stream.
static double naive_norm(const float *wo, const root_case *c, uint32_t h, const float *v)
{
    double square = 0;
    for (uint32_t row = 0; row < c->width; row++) {
        const float *w = wo + (size_t)row * c->n_heads * c->head_dim + (size_t)h * c->head_dim;
        double y = 0;
        for (uint32_t i = 0; i < c->head_dim; i++) y += (double)w[i] * v[i];
        square += y * y;
    }
    return sqrt(square);
}

static double root_norm(const float *root, uint32_t d, const float *v)
{
    double square = 0;
    for (uint32_t r = 0; r < d; r++) {
        double y = 0;
        for (uint32_t i = 0; i < d; i++) y += (double)root[(size_t)r * d + i] * v[i];
        square += y * y;
    }
    return sqrt(square);
}

// Returns an upper bound of ||v W|| over unit vectors, as a scale for vectors that W maps to nearly nothing.
static double frobenius(const float *wo, const root_case *c, uint32_t h)
{
    double square = 0;
    for (uint32_t row = 0; row < c->width; row++)
        for (uint32_t i = 0; i < c->head_dim; i++) {
            double w = wo[(size_t)row * c->n_heads * c->head_dim + (size_t)h * c->head_dim + i];
            square += w * w;
        }
    return sqrt(square);
}

// Checks random vectors and all unit vectors. `slack` (times ||W|| ||v||) is for vectors near the null space, where the
// factor's float precision ends.
static void check_root(const char *what, const float *wo, root_case c, double relative, double slack)
{
    enum { VECTORS = 30 };
    uint32_t d = c.head_dim;
    float *root = case_alloc((size_t)c.n_heads * d * d, sizeof *root);
    oracle_value_root(root, wo, c.width, c.n_heads, d);
    for (uint32_t h = 0; h < c.n_heads; h++)
        for (uint32_t i = 0; i < VECTORS + d; i++) {
            float *v = case_floats(d, 1, 0);
            for (uint32_t k = 0; i >= VECTORS && k < d; k++) v[k] = k == i - VECTORS;
            double want = naive_norm(wo, &c, h, v), got = root_norm(root + (size_t)h * d * d, d, v), length = 0;
            for (uint32_t k = 0; k < d; k++) length += (double)v[k] * v[k];
            double allowed = relative * want + slack * frobenius(wo, &c, h) * sqrt(length);
            ck_assert_msg(fabs(got - want) <= allowed, "%s: %u x %u x %u, head %u, vector %u: %.9g, expected %.9g",
                          what, c.width, c.n_heads, d, h, i, got, want);
            free(v);
        }
    free(root);
}

UNIT_TEST(test_random_weights)
{
    static const root_case cases[] = {{64, 4, 16}, {576, 9, 64}, {256, 2, 128}, {33, 3, 10}, {8, 1, 8}, {5, 2, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int scale = -12; scale <= 12; scale += 12) { // powers of two: far from 1 the digits must be as good
            root_case c = cases[i];
            float *wo = case_floats((size_t)c.width * c.n_heads * c.head_dim, ldexp(1, scale), 0);
            check_root("random", wo, c, 1e-5, 0);
            free(wo);
        }
}

UNIT_TEST(test_width_below_head) // rank at most the width: the Gram matrix is singular
{
    static const root_case cases[] = {{8, 2, 32}, {1, 3, 16}, {63, 1, 64}, {16, 4, 128}, {100, 2, 256}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int repeat = 0; repeat < 5; repeat++) {
            root_case c = cases[i];
            float *wo = case_floats((size_t)c.width * c.n_heads * c.head_dim, 1, 0);
            check_root("D < d", wo, c, 1e-5, 1e-7);
            free(wo);
        }
}

UNIT_TEST(test_dependent_weights)
{
    root_case c = {48, 5, 24};
    size_t ld = (size_t)c.n_heads * c.head_dim;
    float *wo = case_floats(c.width * ld, 1, 0);
    for (uint32_t row = 0; row < c.width; row++) {
        float *line = wo + row * ld;
        for (uint32_t i = 0; i < c.head_dim; i++) {
            line[i] = 0;                                                                             // head 0: nothing
            line[c.head_dim + i] = line[c.head_dim + i % 3];                                         // 1: three columns
            line[2 * c.head_dim + i] = i == 7 ? 2.5f : 0;                                            // 2: one column
            line[3 * c.head_dim + i] = wo[row % 2 * ld + 3 * c.head_dim + i];                        // 3: two rows
            line[4 * c.head_dim + i] = i == 5 ? line[4 * c.head_dim] * 3 : line[4 * c.head_dim + i]; // 4: a multiple
        }
    }
    check_root("dependent", wo, c, 1e-5, 1e-6);
    float *root = case_alloc((size_t)c.n_heads * c.head_dim * c.head_dim, sizeof *root);
    oracle_value_root(root, wo, c.width, c.n_heads, c.head_dim);
    float *zeros = case_alloc(c.head_dim * c.head_dim, sizeof *zeros);
    case_same("the root of zeros", root, zeros, c.head_dim * c.head_dim);
    free(zeros);
    free(root);
    free(wo);
}

// Columns of very different size: the small ones keep their digits next to the large.
UNIT_TEST(test_uneven_weights)
{
    root_case c = {96, 3, 32};
    size_t ld = (size_t)c.n_heads * c.head_dim;
    float *wo = case_floats(c.width * ld, 1, 0);
    for (size_t i = 0; i < c.width * ld; i++) wo[i] *= powf(10, -(float)(i % ld % 6));
    check_root("uneven", wo, c, 1e-5, 0);
    free(wo);
}

// w[h,j] = ||v_j W_O^(h)|| / sum over the layer, through the reference backend, as the forward pass takes it.
UNIT_TEST(test_weights_of_a_layer)
{
    enum { T = 50 };
    root_case c = {40, 6, 8};
    attention_shape s = attention_heads(c.n_heads, 2, c.head_dim);
    size_t ld = (size_t)c.n_heads * c.head_dim, kv = (size_t)s.n_kv_heads * T * c.head_dim;
    float *wo = case_floats(c.width * ld, 1, 0), *v = case_floats(kv, 1, 0), got[6 * T], want[6 * T];
    float *root = case_alloc(ld * c.head_dim, sizeof *root);
    double sum = 0, norms[6 * T];
    memset(v + 3 * c.head_dim, 0, c.head_dim * sizeof *v); // a value of zero weighs nothing
    oracle_value_root(root, wo, c.width, c.n_heads, c.head_dim);
    for (uint32_t h = 0; h < c.n_heads; h++)
        for (uint32_t j = 0; j < T; j++)
            sum += norms[h * T + j] = naive_norm(wo, &c, h, v + ((size_t)h / 3 * T + j) * c.head_dim);
    for (uint32_t i = 0; i < c.n_heads * T; i++) want[i] = (float)(norms[i] / (sum + 1e-9));
    const backend *b = &backend_ref;
    backend_device *on = case_device(b, &(backend_limits){T, 1, 16, 64, s, 0, 64});
    dev w = b->alloc(on, (size_t)c.n_heads * T), dr = b->alloc(on, ld * c.head_dim), dv = b->alloc(on, kv);
    b->upload(on, dr, root, ld * c.head_dim);
    b->upload(on, dv, v, kv);
    b->value_weights(on, w, &(prefix_kv){.k = dv, .v = dv, .n_tokens = T}, dr, (dev){NULL}, s);
    b->download(on, got, w, (size_t)c.n_heads * T);
    case_near("w", got, want, (size_t)c.n_heads * T, 1e-5 / (c.n_heads * T));
    ck_assert_float_eq(got[3], 0);
    b->release(on, w), b->release(on, dr), b->release(on, dv);
    b->close(on);
    free(wo);
    free(v);
    free(root);
}

UNIT_MAIN("profiler oracle")
