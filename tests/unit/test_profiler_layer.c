// The layer piece by piece: its functions, called by hand for one token, give what the forward pass gives; the failure
// of a device is reported at the end.
#include "profiler/model/layer.h"
#include "runtime/fail.h"
#include "test_profiler_cases.h"

enum { VOCABULARY = 300, H = 4, G = 2, D = 16 };

static layer_pass open_pass(const model *m, uint32_t rows)
{
    layer_pass p;
    const backend_limits limits = layer_limits(m, 8, 1, rows);
    ck_assert(limits.rows == rows && limits.matrix_dim == VOCABULARY);
    help_ok(layer_pass_open(&p, m, &limits, 8, err));
    ck_assert_uint_gt(layer_pass_bytes(m, rows, 8), layer_pass_bytes(m, 1, 1));
    return p;
}

// Attention for a single token: every query head gets its KV head's value.
static void attend_to_itself(const layer_pass *p)
{
    float values[G * D], attended[H * D];
    p->b->download(p->on, values, p->values, G * D);
    for (int h = 0; h < H; h++) memcpy(attended + h * D, values + h / (H / G) * D, D * sizeof *attended);
    p->b->upload(p->on, p->attended, attended, H * D);
}

UNIT_TEST(test_one_token_by_hand)
{
    const int32_t id = 123;
    const uint32_t position = 0;
    float want[VOCABULARY], got[VOCABULARY];
    model *m = case_open(help_path("tiny.gguf"), &backend_cpu);
    forward *f;
    help_ok(forward_open(&f, m, &(forward_plan){1, 1, 1, false, false, 1}, err));
    help_ok(forward_prefill(f, &id, 1, NULL, NULL, want, err));
    forward_close(f);
    layer_pass p = open_pass(m, 1);
    dev x = p.b->alloc(p.on, m->config.width), q_raw = p.b->alloc(p.on, H * D), q = p.b->alloc(p.on, H * D);
    help_ok(layer_check_ids(&p, &id, 1, err));
    layer_begin_context(&p, 1);
    layer_embed(&p, x, &id, 1);
    for (uint32_t layer = 0; layer < m->config.n_layers; layer++) {
        layer_project(&p, layer, q_raw, q, x, &position, 1);
        attend_to_itself(&p);
        layer_finish(&p, layer, x, 1, layer ? 1 : 0);
    }
    layer_logits(&p, x, 1, &(logit_use){.logits = got}, 0);
    help_ok(layer_end(&p, err));
    case_same("logits", got, want, VOCABULARY);
    float a[H * D], b[H * D]; // position 0 is not rotated
    p.b->download(p.on, a, q_raw, H * D);
    p.b->download(p.on, b, q, H * D);
    case_same("queries", a, b, H * D);
    p.b->release(p.on, x), p.b->release(p.on, q_raw), p.b->release(p.on, q);
    layer_pass_close(&p);
    layer_pass_close(&p); // closing it again is allowed
    model_free(m);
}

UNIT_TEST(test_output_projection_alone)
{
    model *m = case_open(help_path("tiny.gguf"), &backend_ref);
    layer_pass p = open_pass(m, 2);
    uint32_t width = m->config.width;
    float *o = case_floats(2 * H * D, 1, 0), *y = case_alloc(2 * width, sizeof *y);
    dev out = p.b->alloc(p.on, 2 * width);
    p.b->upload(p.on, p.attended, o, 2 * H * D);
    layer_project_output(&p, 1, out, 2);
    p.b->download(p.on, y, out, 2 * width);
    const float *w = m->layers[1].wo.address; // [D, H*d]
    for (uint32_t i = 0; i < 2; i++)
        for (uint32_t c = 0; c < width; c++) {
            double sum = 0;
            for (int k = 0; k < H * D; k++) sum += (double)o[i * H * D + k] * w[c * H * D + k];
            ck_assert(fabs(y[i * width + c] - sum) < 1e-5);
        }
    p.b->release(p.on, out);
    free(o);
    free(y);
    layer_pass_close(&p);
    model_free(m);
}

UNIT_TEST(test_what_goes_wrong)
{
    model *m = case_open(help_path("tiny.gguf"), &backend_cpu);
    layer_pass p = open_pass(m, 1);
    const int32_t ids[] = {0, VOCABULARY, -1};
    help_fails(layer_check_ids(&p, ids, 2, err), KVB_ARGUMENT, "token 1: id 300, expected 0 to 299");
    help_fails(layer_check_ids(&p, ids + 2, 1, err), KVB_ARGUMENT, "token 0: id -1");
    p.on->failed = kvb_fail(&p.on->error, KVB_IO, "gone");
    help_fails(layer_end(&p, err), KVB_IO, "gone");
    layer_pass_close(&p);
    model_free(m);
}

UNIT_TEST(test_scale_of_a_view)
{
    layer_view v = {.head_dim = 64};
    ck_assert(view_scale(&v) == 0.125);
    v.scale = 0.25f;
    ck_assert(view_scale(&v) == 0.25);
}

// ---- Which experts a router chooses for a row, and with which weights ----

UNIT_TEST(the_largest_and_their_shares)
{
    const float logits[] = {0, 2, -1, 2, 1};
    uint32_t numbers[3];
    float weights[3];
    double all = exp(0) + 2 * exp(2) + exp(-1) + exp(1);
    experts_choose(logits, 5, 3, false, numbers, weights);
    ck_assert(numbers[0] == 1 && numbers[1] == 3 && numbers[2] == 4); // ties by number
    ck_assert_double_eq_tol(weights[0], exp(2) / all, 1e-6);
    ck_assert_double_eq_tol(weights[2], exp(1) / all, 1e-6);
    experts_choose(logits, 5, 3, true, numbers, weights);
    ck_assert_double_eq_tol(weights[0] + weights[1] + weights[2], 1, 1e-6);
    ck_assert_double_eq_tol(weights[1] / weights[2], exp(1), 1e-5);
}

// Large logits do not overflow, and with NaNs every chosen expert is still a different one.
UNIT_TEST(odd_logits)
{
    const float large[] = {-1000, 1000, 999}, none[] = {NAN, NAN, NAN, NAN};
    uint32_t numbers[3];
    float weights[3];
    experts_choose(large, 3, 2, true, numbers, weights);
    ck_assert(numbers[0] == 1 && numbers[1] == 2 && weights[0] > 0.7f && weights[0] < 0.74f);
    experts_choose(none, 4, 3, true, numbers, weights);
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < i; k++) ck_assert(numbers[i] < 4 && numbers[i] != numbers[k]);
}

UNIT_MAIN_ONCE("profiler layer", case_tiny_setup, help_teardown)
