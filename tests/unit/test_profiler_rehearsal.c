// A rehearsal has the shapes and the kind of one layer, however weights are held, and runs; the model itself stays as
// it was.
#include "profiler/model/forward.h"
#include "profiler/model/rehearsal.h"
#include "test_profiler_cases.h"

static void setup(void)
{
    help_setup();
    case_tiny_model(help_path("tiny.gguf"), NULL);
}

static model *opened(const char *path)
{
    model *m = NULL;
    const model_options o = {.without_weights = true, .for_plan = true};
    help_ok(model_open(&m, path, &backend_cpu, &o, err));
    return m;
}

// A prefill and a decoded row through all layers; the logits are numbers.
static void runs(const rehearsal *r)
{
    enum { T = 40 };
    const model_config *c = &r->m.config;
    forward *f = NULL;
    const int32_t ids[T] = {1, 2, 3};
    const decode_row row = {0, 0, true};
    const uint32_t listed = 0;
    float *logits = case_alloc(c->vocabulary, sizeof *logits);
    help_ok(forward_open(&f, &r->m, &(forward_plan){T, 1, 2, true, false}, err));
    help_ok(forward_prefill(f, ids, T, NULL, NULL, NULL, err));
    forward_begin_questions(f, 1);
    help_ok(forward_rows(f, &row, ids, 1, &listed, 1, logits, err));
    for (uint32_t i = 0; i < c->vocabulary; i++) ck_assert(isfinite(logits[i]));
    forward_close(f);
    free(logits);
}

START_TEST(test_shapes)
{
    model *m = opened(help_path("tiny.gguf"));
    const model_config before = m->config;
    rehearsal r;
    for (int narrow = 0; narrow < 2; narrow++)
        for (uint32_t held = 0; held <= m->config.n_layers + 1; held++) {
            m->n_held = held;
            help_ok(rehearsal_open(&r, m, 1, narrow, err));
            const model_config *c = &r.m.config;
            ck_assert_uint_eq(c->n_layers, narrow ? REHEARSAL_LAYERS : REHEARSAL_MOST_LAYERS);
            ck_assert_uint_eq(r.distinct, narrow ? 1 : REHEARSAL_MOST_LAYERS); // small ones do not share weights
            ck_assert(c->n_heads == before.n_heads && c->head_dim == before.head_dim);
            ck_assert_uint_eq(c->width, narrow ? REHEARSAL_WIDTH : before.width);
            ck_assert_uint_eq(c->ffn_width, narrow ? REHEARSAL_WIDTH : before.ffn_width);
            ck_assert_int_eq(r.m.n_held > c->n_layers, held > 2); // layer 1's weights are the third group
            runs(&r);
            rehearsal_close(&r);
            ck_assert(!r.bytes && !r.m.device);
        }
    ck_assert_int_eq(memcmp(&m->config, &before, sizeof before), 0);
    model_free(m);
}
END_TEST

// A layer with a window is rehearsed with one, the others without.
START_TEST(test_kinds)
{
    model *m = opened(help_path("tiny.gguf"));
    rehearsal r;
    m->config.window = 8;
    layer_set_add(&m->config.bounded, 1);
    layer_set_add(&m->config.unrotated, 0);
    for (uint32_t layer = 0; layer < 2; layer++) {
        help_ok(rehearsal_open(&r, m, layer, true, err));
        for (uint32_t l = 0; l < r.m.config.n_layers; l++) {
            ck_assert_int_eq(model_layer_bounded(&r.m.config, l), layer == 1);
            ck_assert_int_eq(model_layer_rotates(&r.m.config, l), layer == 1);
        }
        runs(&r);
        rehearsal_close(&r);
    }
    rehearsal_close(&r); // a zero one
    model_free(m);
}
END_TEST

// Experts share matrices where there are many of them, and a narrow layer has none.
START_TEST(test_experts)
{
    static const char config[] = "{\"model_type\":\"qwen3_moe\",\"num_hidden_layers\":3,\"num_attention_heads\":4,"
                                 "\"num_key_value_heads\":2,\"head_dim\":16,\"hidden_size\":64,\"vocab_size\":9000,"
                                 "\"intermediate_size\":96,\"moe_intermediate_size\":32,\"num_experts\":40,"
                                 "\"num_experts_per_tok\":4,\"max_position_embeddings\":512,\"rms_norm_eps\":1e-6}";
    rehearsal r;
    help_spew(help_path("config.json"), config, sizeof config - 1);
    model *m = opened(help_path("config.json"));
    for (int narrow = 0; narrow < 2; narrow++) {
        help_ok(rehearsal_open(&r, m, 2, narrow, err));
        ck_assert_uint_eq(r.m.config.n_experts, narrow ? 0 : 40);
        ck_assert_uint_eq(r.m.config.vocabulary, narrow ? 4096 : 9000); // 9,000 rows of 64 are no large matrix
        ck_assert_int_eq(layer_set_has(&r.m.config.sparse, r.m.config.n_layers - 1), !narrow);
        ck_assert(r.distinct == 1 && r.m.config.n_layers == REHEARSAL_LAYERS);
        runs(&r);
        rehearsal_close(&r);
    }
    model_free(m);
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_unchecked_fixture(tc, setup, help_teardown);
    tcase_add_test(tc, test_shapes);
    tcase_add_test(tc, test_kinds);
    tcase_add_test(tc, test_experts);
}

UNIT_MAIN("profiler rehearsal", fill)
