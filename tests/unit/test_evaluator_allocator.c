// Names of allocators, and the budgets that they give.
#include "evaluator/allocator.h"
#include "formats_help.h"

enum { L = 3, H = 4, G = 2, T = 200, HEADS = L * G };
static const allocator_shape SHAPE = {.n_layers = L, .n_kv_heads = G};

static uint32_t keep[HEADS];

static double entropies[L] = {0.9, 0.5, 0.7}, shifts[L] = {2, 9, 1};
static window_attention seen = {.n_layers = L, .entropy = entropies, .dispersion = entropies, .shift = shifts};

// Puts the named allocator's budgets at this ratio in `keep` and returns their sum.
static uint64_t allocate(const char *name, double ratio, const float *scores)
{
    allocator a;
    uint64_t total = 0;
    help_ok(allocator_parse(&a, name, err));
    help_ok(allocator_budgets(&a, &SHAPE, ratio, T, scores, &seen, 4, 8, keep, err));
    allocator_free(&a);
    for (int h = 0; h < HEADS; h++) {
        ck_assert(keep[h] >= 1 && keep[h] <= T);
        total += keep[h];
    }
    return total;
}

static float *some_scores(void)
{
    static float scores[HEADS * T];
    seen.score = scores;
    for (int i = 0; i < HEADS * T; i++) scores[i] = (float)((i * 7919 % 1009) * (1 + i / T));
    return scores;
}

UNIT_TEST(totals)
{
    const char *const names[] = {
        "uniform", "pyramid", "pyramid:beta=5:window=2", "ada", "ada:alpha=0.5", "ada-original", "ada-global", "oracle",
        "lava",    "cake",    "cake:tau1=1.6:tau2=0.4"};
    const double ratios[] = {0.1, 0.5, 0.8, 0.9};
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        ck_assert_uint_eq(allocate(names[n], 0, some_scores()), HEADS * T); // ratio 0 evicts nothing
        for (int r = 0; r < 4; r++) {
            uint64_t total = allocate(names[n], ratios[r], some_scores());
            ck_assert_msg(total == (uint64_t)rint((1 - ratios[r]) * HEADS * T), "%s at %g: %llu", names[n], ratios[r],
                          (unsigned long long)total);
        }
    }
}

UNIT_TEST(who_gets_more)
{
    allocate("uniform", 0.5, some_scores());
    for (int h = 0; h < HEADS; h++) ck_assert_uint_eq(keep[h], T / 2);
    allocate("pyramid", 0.5, some_scores());
    ck_assert(keep[0] > keep[G] && keep[G] > keep[2 * G] && keep[0] == keep[1]);
    allocate("ada", 0.5, some_scores()); // head 2l + 1 has higher scores than head 2l
    for (int l = 0; l < L; l++) {
        ck_assert(keep[2 * l + 1] > keep[2 * l]);
        ck_assert_uint_eq(keep[2 * l] + keep[2 * l + 1], T);
    }
    allocate("oracle", 0.5, some_scores());
    ck_assert(keep[5] > keep[0] && keep[4] > keep[1]);
}

UNIT_TEST(names_and_errors)
{
    allocator a;
    const char *const wrong[] = {"unifrom",
                                 "ada:beta=3",
                                 "ada:alpha=2",
                                 "ada:alpha=x",
                                 "pyramid:window=1.5",
                                 "uniform:alpha=0.1",
                                 "headkv",
                                 "duo",
                                 "uniform=file",
                                 "",
                                 NULL};
    for (int i = 0; wrong[i]; i++) {
        help_fails(allocator_parse(&a, wrong[i], err), KVB_ARGUMENT, "allocator");
        allocator_free(&a);
    }
    help_ok(allocator_parse(&a, "pyramid:beta=10", err));
    ck_assert_str_eq(a.label, "pyramid:beta=10");
    ck_assert_str_eq(a.identity, "pyramid beta=10 alpha=0.2 window=8 "); // earlier logs have this identity
    // Alphas that differ in the last digit are two allocators.
    allocator near;
    help_ok(allocator_parse(&a, "ada:alpha=0.3", err));
    help_ok(allocator_parse(&near, "ada:alpha=0.30000000000000004", err));
    ck_assert_str_ne(a.identity, near.identity);
    ck_assert_str_ne(a.label, near.label);
    help_fails(allocator_budgets(&a, &SHAPE, 1.0, T, NULL, NULL, 4, 8, keep, err), KVB_ARGUMENT, "below 1");
    help_fails(allocator_budgets(&a, &SHAPE, NAN, T, NULL, NULL, 4, 8, keep, err), KVB_ARGUMENT, "below 1");
    allocator_free(&a);
    help_fails(allocator_open_table(&a, help_path("none.safetensors"), err), KVB_IO, "none.safetensors");
    allocator_free(&a);
}

// The papers' formulas in double: one layer's attention of the last W queries, a[h][w][j].
typedef struct plain_layer {
    double entropy, dispersion, shift, score[2][120];
} plain_layer;

static void plain_head(plain_layer *out, const layer_view *v, uint32_t h, uint32_t W, const double *largest)
{
    uint32_t tokens = v->n_tokens, d = v->head_dim, group = v->n_heads / v->n_kv_heads, g = h / group;
    double a[32][120] = {{0}}, mean[120] = {0};
    for (uint32_t w = 0; w < W; w++) {
        uint32_t row = tokens - W + w;
        double sum = 0;
        for (uint32_t j = 0; j <= row; j++) {
            double dot = 0;
            for (uint32_t i = 0; i < d; i++)
                dot += (double)v->q[((size_t)row * v->n_heads + h) * d + i] * v->k[((size_t)g * tokens + j) * d + i];
            sum += a[w][j] = exp(dot / sqrt(d));
        }
        for (uint32_t j = 0; j <= row; j++) a[w][j] /= sum;
    }
    for (uint32_t j = 0; j < tokens - W; j++) {
        double squares = 0;
        for (uint32_t w = 0; w < W; w++) mean[j] += a[w][j] / W, out->dispersion -= a[w][j] * log(a[w][j]);
        for (uint32_t w = 0; w < W; w++) squares += (a[w][j] - mean[j]) * (a[w][j] - mean[j]);
        out->shift += squares / (W - 1);
    }
    for (int j = 0; j < (int)(tokens - W); j++)
        for (int i = j - 3; i <= j + 3; i++)
            if (i >= 0 && i < (int)(tokens - W)) out->score[g][j] = fmax(out->score[g][j], largest[g] * mean[i]);
}

static plain_layer plain_attention(const layer_view *v, uint32_t W)
{
    plain_layer out = {0};
    double largest[2] = {0}, sum = 0;
    uint32_t old = v->n_tokens - W;
    for (uint32_t g = 0; g < 2; g++)
        for (uint32_t j = 0; j < old; j++) {
            double norm = 0;
            for (uint32_t i = 0; i < v->head_dim; i++)
                norm += fabs((double)v->v[((size_t)g * v->n_tokens + j) * v->head_dim + i]);
            largest[g] = fmax(largest[g], norm);
        }
    for (uint32_t h = 0; h < v->n_heads; h++) plain_head(&out, v, h, W, largest);
    for (uint32_t i = 0; i < 2 * old; i++) sum += out.score[i / old][i % old];
    for (uint32_t i = 0; i < 2 * old; i++) {
        double p = out.score[i / old][i % old] / sum;
        out.entropy -= p * log(p) / log(2.0 * old);
    }
    return out;
}

#define ck_near(found, expected) ck_assert_double_le(fabs((found) - (expected)), 2e-5 * fabs(expected))
UNIT_TEST(attention_of_the_last_queries)
{
    enum { TOKENS = 120, D = 8 };
    static float q[TOKENS * H * D], k[G * TOKENS * D], v[G * TOKENS * D];
    static const uint32_t lengths[] = {TOKENS, 70, 20}; // the last one is shorter than the window
    uint32_t seed = 3;
    window_attention found = window_attention_open(3, G, TOKENS);
    for (uint32_t l = 0; l < 3; l++) {
        uint32_t tokens = lengths[l], W = tokens > 32 ? 32 : tokens - 1;
        float *const arrays[] = {q, k, v};
        const size_t sizes[] = {(size_t)tokens * H * D, (size_t)G * tokens * D, (size_t)G * tokens * D};
        for (int n = 0; n < 3; n++)
            for (size_t i = 0; i < sizes[n]; i++) {
                seed = seed * 1664525u + 1013904223u;
                arrays[n][i] = (float)(seed >> 8) * 2e-7f - 1.6f;
            }
        layer_view view = {.n_tokens = tokens, .n_heads = H, .n_kv_heads = G, .head_dim = D, .q = q, .k = k, .v = v};
        view.n_queries = tokens;
        plain_layer plain = plain_attention(&view, W);
        found.n_layers = 0;
        window_attention_see(&found, &view);
        ck_near(found.dispersion[0], plain.dispersion);
        ck_near(found.shift[0], plain.shift);
        ck_near(found.entropy[0], plain.entropy);
        for (uint32_t g = 0; g < G; g++)
            for (uint32_t j = 0; j < tokens - W; j++) ck_near((double)found.score[g * tokens + j], plain.score[g][j]);
    }
    window_attention_free(&found);
}

// CAKE: budgets in proportion to the preference; what exceeds a whole layer goes to the others in equal parts. LAVa:
// the layer's best scores over all heads.
UNIT_TEST(layers_by_attention)
{
    const float *scores = some_scores();
    for (int n = 0; n < 4; n++) {
        const double ratio[] = {0.8, 0.5, 0.25, 0.9};
        double weight[L], share[L], sum = 0, mean = floor(T * (1 - ratio[n])) - 12, over = 1;
        for (int l = 0; l < L; l++) sum += weight[l] = entropies[l] * shifts[l];
        for (int l = 0; l < L; l++) share[l] = weight[l] / sum * mean * L;
        while (over > 1e-9) {
            int room = 0;
            over = 0;
            for (int l = 0; l < L; l++) {
                if (share[l] > T - 12) over += share[l] - (T - 12), share[l] = T - 12;
                room += share[l] < T - 12;
            }
            for (int l = 0; l < L; l++)
                if (share[l] < T - 12) share[l] += over / room;
        }
        allocate("cake", ratio[n], scores);
        for (int h = 0; h < HEADS; h++) ck_assert(fabs(keep[h] - (share[h / G] + 12)) <= 1.0 + HEADS / 6.0);
        allocate("lava", ratio[n], scores);
        for (int l = 0; l < L && ratio[n] >= 0.5; l++) {
            double of_layer = entropies[l] / 2.1 * mean * L * G + 12 * G;
            ck_assert(fabs(keep[G * l] + keep[G * l + 1] - of_layer) <= 1.0 + HEADS / 6.0 * G);
            ck_assert(keep[G * l + 1] > keep[G * l]); // its scores are higher
        }
    }
}

// Heads keep as many tokens as fit into the bytes; a layer that is not budgeted keeps all of them, unpacked.
UNIT_TEST(packed_heads)
{
    layer_set middle = {{0}};
    layer_set_add(&middle, 1);
    const allocator_shape shape = {L, G, &middle, 64};
    allocator a;
    help_ok(allocator_parse(&a, "packed:values=2", err));
    ck_assert_str_eq(a.label, "packed:values=2");
    ck_assert(allocator_has_formats(&a));
    for (double ratio = 0; ratio < 1; ratio += 0.11) {
        double most = (1 - ratio) * T * 256, used[2];
        uint8_t *formats;
        help_ok(allocator_budgets(&a, &shape, ratio, T, NULL, NULL, 4, 8, keep, err));
        help_ok(allocator_formats(&a, &shape, ratio, &formats, err));
        for (uint32_t h = 0; h < HEADS; h++) {
            bool free_layer = h / G == 1;
            kvb_packing k = formats[2 * h], v = formats[2 * h + 1];
            ck_assert(k == (free_layer ? KVB_PACK_BF16 : KVB_PACK_INT4));
            ck_assert(v == (free_layer ? KVB_PACK_BF16 : KVB_PACK_INT2));
            if (free_layer) ck_assert_uint_eq(keep[h], T);
            for (uint32_t more = 0; more < 2; more++)
                used[more] = (double)(kvb_packed_bytes(k, KVB_KEYS, keep[h] + more, 64) +
                                      kvb_packed_bytes(v, KVB_VALUES, keep[h] + more, 64));
            ck_assert(free_layer || keep[h] == 1 || used[0] <= most);
            ck_assert(free_layer || keep[h] == T || used[1] > most);
        }
        free(formats);
    }
    allocator_free(&a);
    help_fails(allocator_parse(&a, "packed:keys=5", err), KVB_ARGUMENT, "16, 8, 4 or 2 bits");
    allocator_free(&a);
    help_ok(allocator_parse(&a, "uniform", err));
    ck_assert(!allocator_has_formats(&a));
    allocator_free(&a);
}

// A bounded layer keeps everything, and the others get the budgets of a model without it.
UNIT_TEST(bounded_layers)
{
    static const char *const names[] = {"uniform", "pyramid", "ada", "oracle"};
    layer_set middle = {{0}};
    layer_set_add(&middle, 1);
    const allocator_shape with = {L, G, &middle, 0}, without = {L - 1, G, NULL, 0};
    const float *scores = some_scores();
    float *two = malloc((L - 1) * G * T * sizeof *two);
    memcpy(two, scores, G * T * sizeof *two);
    memcpy(two + G * T, scores + 2 * G * T, G * T * sizeof *two);
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        allocator a;
        uint32_t want[HEADS];
        help_ok(allocator_parse(&a, names[n], err));
        help_ok(allocator_budgets(&a, &with, 0.7, T, scores, &seen, 4, 8, keep, err));
        help_ok(allocator_budgets(&a, &without, 0.7, T, two, &seen, 4, 8, want, err));
        for (int h = 0; h < HEADS; h++) ck_assert_uint_eq(keep[h], h / G == 1 ? T : want[h < G ? h : h - G]);
        allocator_free(&a);
    }
    free(two);
}

UNIT_MAIN_EACH("evaluator: allocators", help_setup, help_teardown)
