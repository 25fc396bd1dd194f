// Rotary frequencies of every kind against those of transformers 5.2 (modeling_rope_utils.py), and the table of angles'
// cosines and sines.
#include "profiler/model/rope.h"
#include "test_profiler_cases.h"

enum { DIM = 16, PAIRS = DIM / 2 };

typedef struct expected {
    const char *what;
    rope_rule rule;
    uint64_t n_tokens;
    float frequencies[PAIRS];
} expected;

// LlamaConfig(head_dim=16, max_position_embeddings=1024, rope_theta=10000) with the settings given here.
static const expected EXPECTED[] = {
    {"default",
     {.kind = ROPE_DEFAULT, .theta = 10000, .factor = 1},
     0,
     {1, 0.316227764f, 0.1f, 0.0316227749f, 0.01f, 0.00316227763f, 0.001f, 0.000316227757f}},
    {"linear",
     {.kind = ROPE_LINEAR, .theta = 10000, .factor = 4},
     0,
     {0.25f, 0.079056941f, 0.025f, 0.00790569466f, 0.0025f, 0.000790569466f, 0.00025f, 7.90569466e-05f}},
    {"llama3",
     {.kind = ROPE_LLAMA3, .theta = 10000, .factor = 8, .low = 1, .high = 4, .original = 64},
     0,
     {1, 0.244384587f, 0.0130422562f, 0.00395284733f, 0.00125f, 0.000395284733f, 0.000125f, 3.95284733e-05f}},
    {"yarn",
     {.kind = ROPE_YARN, .theta = 10000, .factor = 8, .original = 64, .fast = 32, .slow = 1, .truncate = true},
     0,
     {1, 0.223994657f, 0.0416666642f, 0.00395284733f, 0.00125f, 0.000395284733f, 0.000125f, 3.95284733e-05f}},
    {"yarn, not truncated",
     {.kind = ROPE_YARN, .theta = 10000, .factor = 8, .original = 64, .fast = 16, .slow = 2},
     0,
     {1, 0.120533988f, 0.0125f, 0.00395284733f, 0.00125f, 0.000395284733f, 0.000125f, 3.95284733e-05f}},
    {"dynamic, 3000 tokens",
     {.kind = ROPE_DYNAMIC, .theta = 10000, .factor = 4, .original = 1024},
     3000,
     {1, 0.232086256f, 0.0538640246f, 0.0125010991f, 0.00290133292f, 0.000673359493f, 0.000156277471f, 3.6269852e-05f}},
    {"dynamic, short",
     {.kind = ROPE_DYNAMIC, .theta = 10000, .factor = 4, .original = 1024},
     100,
     {1, 0.316227764f, 0.1f, 0.0316227749f, 0.01f, 0.00316227763f, 0.001f, 0.000316227757f}},
};

UNIT_TEST(test_frequencies_are_those_of_transformers)
{
    for (size_t i = 0; i < sizeof EXPECTED / sizeof *EXPECTED; i++) {
        float got[PAIRS];
        rope_frequencies(got, &EXPECTED[i].rule, DIM, EXPECTED[i].n_tokens);
        for (int p = 0; p < PAIRS; p++)
            ck_assert_msg(fabs(got[p] / EXPECTED[i].frequencies[p] - 1) < 2e-6, "%s, pair %d: %.9g, expected %.9g",
                          EXPECTED[i].what, p, (double)got[p], (double)EXPECTED[i].frequencies[p]);
    }
}

UNIT_TEST(test_factors_and_lengths)
{
    rope_rule r = {.kind = ROPE_LONG, .theta = 10000, .factor = 1, .original = 50, .has_factors = true};
    float plain[PAIRS], got[PAIRS];
    for (int p = 0; p < PAIRS; p++) r.short_factors[p] = 1 + (float)p, r.long_factors[p] = 7 + (float)p;
    rope_frequencies(plain, &EXPECTED[0].rule, DIM, 0);
    for (uint64_t n = 50; n <= 51; n++) { // long factors apply only beyond the original length
        rope_frequencies(got, &r, DIM, n);
        for (int p = 0; p < PAIRS; p++) ck_assert(got[p] == plain[p] / (float)((n > 50 ? 7 : 1) + p));
    }
    ck_assert(rope_depends_on_length(&r) && !rope_depends_on_length(&EXPECTED[0].rule));
    r.kind = ROPE_DEFAULT; // rope_freqs.weight of Llama 3.1's GGUF files
    rope_frequencies(got, &r, DIM, 1000);
    for (int p = 0; p < PAIRS; p++) ck_assert(got[p] == plain[p] / (float)(1 + p));
}

UNIT_TEST(test_table)
{
    enum { POSITIONS = 30 };
    backend_device *on;
    float frequency[PAIRS];
    help_ok(backend_ref.open(&on, &backend_ref, NULL, err));
    rope_frequencies(frequency, &EXPECTED[0].rule, DIM, 0);
    dev table = rope_table(on, frequency, DIM, POSITIONS, (rope_size){.attention = 1.5});
    const float *t = backend_ref.host_view(on, table);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < POSITIONS; i++)
            for (int p = 0; p < PAIRS; p++) {
                float angle = (float)i * frequency[p];
                ck_assert(t[(i * PAIRS + p) * 2] == (float)(cos(angle) * (round ? 1 : 1.5)));
                ck_assert(t[(i * PAIRS + p) * 2 + 1] == (float)(sin(angle) * (round ? 1 : 1.5)));
            }
        rope_fill(on, table, frequency, DIM, POSITIONS, (rope_size){.attention = 1});
    }
    backend_ref.release(on, table);
    backend_ref.close(on);
}

// Ministral 3: transformers' _get_llama_4_attn_scale, 1 + beta ln(1 + floor(position / original)).
UNIT_TEST(test_queries_grow)
{
    enum { POSITIONS = 40, ORIGINAL = 8 };
    backend_device *on;
    float frequency[PAIRS];
    help_ok(backend_ref.open(&on, &backend_ref, NULL, err));
    rope_frequencies(frequency, &EXPECTED[0].rule, DIM, 0);
    dev grown = rope_table(on, frequency, DIM, POSITIONS, (rope_size){1.5, 0.1, ORIGINAL}),
        plain = rope_table(on, frequency, DIM, POSITIONS, (rope_size){.attention = 1});
    const float *g = backend_ref.host_view(on, grown), *t = backend_ref.host_view(on, plain);
    for (int i = 0; i < POSITIONS; i++)
        for (int p = 0; p < DIM; p++) {
            double by = 1.5 * (1 + 0.1 * log(1 + i / ORIGINAL)); // integer division rounds down
            ck_assert(fabs(g[i * DIM + p] - by * t[i * DIM + p]) < 1e-6);
        }
    backend_ref.release(on, grown), backend_ref.release(on, plain);
    backend_ref.close(on);
}

UNIT_MAIN("profiler rope")
