// Seconds of prefill and decoding on the cuda backend for a model of the shape of Llama 3.1 8B with random weights,
// made on the device:
//
//     bench_cuda [COMPUTE [TOKENS QUESTIONS STEPS [LAYERS]]]     default: bf16; 4096 30 64, then 32768 8 64
//
// One line of CSV each, with the shares of what this device reaches itself in one large product and in one large copy,
// measured in the same run.
#include "profiler/backend/backend_cuda.h"
#include "profiler/backend/meter.h"
#include "profiler/model/forward.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static backend_device *on;

static const model_config LLAMA = {.architecture = "llama",
                                   .name = "Llama 3.1 8B, random weights",
                                   .n_layers = 32,
                                   .n_heads = 32,
                                   .n_kv_heads = 8,
                                   .head_dim = 128,
                                   .width = 4096,
                                   .ffn_width = 14336,
                                   .vocabulary = 128256,
                                   .context_length = 131072,
                                   .rope_dim = 128,
                                   .rope = {.theta = 500000.0f, .factor = 1, .attention = 1},
                                   .embedding_scale = 1,
                                   .residual_scale = 1,
                                   .logit_scale = 1,
                                   .query_scale = 1,
                                   .norm_eps = 1e-5f};

static dev ones(uint32_t n)
{
    dev d = on->b->alloc(on, n);
    float *values = malloc(n * sizeof *values);
    for (uint32_t i = 0; values && i < n; i++) values[i] = 1.0f;
    if (values && d.address) on->b->upload(on, d, values, n);
    free(values);
    return d;
}

// Rows of uniform numbers of variance 1 / in: what goes in with size 1 comes out with size 1.
static dev_matrix matrix(uint32_t out, uint32_t in, uint64_t *seed)
{
    return backend_cuda_random_matrix(on, out, in, sqrtf(3.0f / (float)in), ++*seed);
}

static bool has_values(const dev_matrix *m)
{
    return m->address || m->packed;
}

static bool make_model(model *m, uint32_t n_layers)
{
    uint64_t seed = 0;
    *m = (model){.config = LLAMA, .device = on, .head_is_tied = false};
    model_config *c = &m->config;
    c->n_layers = n_layers;
    uint32_t D = c->width, F = c->ffn_width, heads = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
    size_t roots = (size_t)heads * c->head_dim;
    m->layers = calloc(n_layers, sizeof *m->layers);
    float *root = malloc(roots * sizeof *root);
    if (!m->layers || !root) return false;
    for (size_t i = 0; i < roots; i++) root[i] = (float)(i % 13) / 13.0f - 0.4f;
    // Rows are read from the embedding, whatever the precision of products.
    m->embedding = backend_cuda_random_matrix(on, c->vocabulary, D, 1.0f, ++seed);
    m->head = matrix(c->vocabulary, D, &seed);
    m->final_norm = ones(D);
    bool ok = has_values(&m->embedding) && has_values(&m->head) && m->final_norm.address;
    for (uint32_t l = 0; ok && l < n_layers; l++) {
        model_layer *w = &m->layers[l];
        *w = (model_layer){.attn_norm = ones(D), .ffn_norm = ones(D), .value_root = on->b->alloc(on, roots)};
        w->wq = matrix(heads, D, &seed), w->wk = matrix(kv, D, &seed), w->wv = matrix(kv, D, &seed);
        w->wo = matrix(D, heads, &seed), w->gate = matrix(F, D, &seed), w->up = matrix(F, D, &seed);
        w->down = matrix(D, F, &seed);
        ok = w->attn_norm.address && w->ffn_norm.address && w->value_root.address && has_values(&w->down);
        if (ok) on->b->upload(on, w->value_root, root, roots);
    }
    free(root);
    return ok;
}

// TFLOP/s of one product of 8192 rows, and TB/s of one copy of 1 GiB (read and written).
static bool measure_device(double *flops, double *bandwidth)
{
    enum { N = 8192 };
    size_t n = (size_t)N * N, half = (size_t)1 << 27;
    dev x = on->b->alloc(on, n), y = on->b->alloc(on, n), from = on->b->alloc(on, half), to = on->b->alloc(on, half);
    dev_matrix w = backend_cuda_random_matrix(on, N, N, 0.01f, 99);
    bool ok =
        x.address && y.address && from.address && to.address && has_values(&w) && on->b->check(on, NULL) == KVB_OK;
    double product = 1e9, copy = 1e9;
    for (int i = 0; ok && i < 5; i++) { // the first one warms up
        double start = meter_now();
        on->b->matmul(on, y, x, w, N, false);
        ok = on->b->check(on, NULL) == KVB_OK;
        product = i ? fmin(product, meter_now() - start) : product;
        start = meter_now();
        on->b->copy(on, to, from, half);
        ok = ok && on->b->check(on, NULL) == KVB_OK;
        copy = i ? fmin(copy, meter_now() - start) : copy;
    }
    *flops = 2.0 * N * N * N / product / 1e12;
    *bandwidth = 2.0 * (double)half * sizeof(float) / copy / 1e12;
    on->b->release(on, x), on->b->release(on, y), on->b->release(on, from), on->b->release(on, to),
        on->b->matrix_release(on, &w);
    return ok;
}

typedef struct shape {
    uint32_t tokens, questions, steps, layers;
} shape;

static int fail(const char *what, const kvb_error *err)
{
    fprintf(stderr, "bench_cuda: %s: %s\n", what, err->message);
    return EXIT_FAILURE;
}

// One context and one batch of questions; prints one line of CSV.
static int run_shape(const model *m, const shape *s, double flops, double bandwidth)
{
    const model_config *c = &m->config;
    forward *f = NULL;
    kvb_error err = {0};
    forward_plan plan = {s->tokens, s->questions, s->steps + 1, true, false};
    int32_t *ids = malloc(s->tokens * sizeof *ids);
    float *logits = malloc((size_t)s->questions * c->vocabulary * sizeof *logits);
    if (!ids || !logits) return fail("no memory", &err);
    for (uint32_t i = 0; i < s->tokens; i++) ids[i] = (int32_t)(i * 7919u % c->vocabulary);
    if (forward_open(&f, m, &plan, &err) != KVB_OK) return fail("open", &err);
    double start = 0, prefill = 0;
    for (int run = 0; run < 2; run++) { // the first one loads kernels
        start = meter_now();
        if (forward_prefill(f, ids, s->tokens, NULL, NULL, NULL, &err) != KVB_OK) return fail("prefill", &err);
        prefill = meter_now() - start;
    }
    forward_begin_questions(f, s->questions);
    for (uint32_t step = 0; step <= s->steps; step++) { // likewise
        if (step == 1) start = meter_now();
        decode_row rows[256];
        uint32_t wanted[256];
        for (uint32_t q = 0; q < s->questions; q++) rows[q] = (decode_row){q, step, true}, wanted[q] = q;
        if (forward_rows(f, rows, ids + step % 16, s->questions, wanted, s->questions, logits, &err) != KVB_OK)
            return fail("decoding", &err);
    }
    double decode = (meter_now() - start) / s->steps;
    // The last layer of the prefill stops after its keys and values.
    double T = s->tokens, L = c->n_layers, D = c->width, kv = (double)c->n_kv_heads * c->head_dim,
           mixed = 2 * T * (2 * D * D + 3 * D * (double)c->ffn_width) + 2 * T * T * D,
           work = L * 2 * T * 2 * D * kv + (L - 1) * mixed;
    // Every weight once, every key twice (scores, then importance) and every value once.
    double weights = L * (2 * D * D + 2 * D * kv + 3 * D * (double)c->ffn_width) + D * (double)c->vocabulary,
           bytes = (weights + L * 3 * T * kv) * (strcmp(on->b->compute, "bf16") == 0 ? 2 : 4);
    printf("%s,%u,%u,%u,%u,%.3f,%.1f,%.1f,%.3f,%.4f,%.2f,%.2f,%.3f,%.3f\n", on->b->compute, s->layers, s->tokens,
           s->questions, s->steps, prefill, work / prefill / 1e12, flops, work / prefill / 1e12 / flops, decode,
           bytes / decode / 1e12, bandwidth, bytes / decode / 1e12 / bandwidth, prefill + decode * s->steps);
    fflush(stdout);
    forward_close(f);
    free(ids);
    free(logits);
    return EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
    shape shapes[2] = {{4096, 30, 64, 32}, {32768, 8, 64, 32}};
    int n_shapes = 2, code = EXIT_SUCCESS;
    kvb_error err = {0};
    if (argc > 1) {
        if (argc == 3 || argc == 4 || argc > 6) {
            fprintf(stderr, "usage: bench_cuda [COMPUTE [TOKENS QUESTIONS STEPS [LAYERS]]]\n");
            return 2;
        }
        uint32_t *const fields[] = {&shapes[0].tokens, &shapes[0].questions, &shapes[0].steps, &shapes[0].layers};
        for (int i = 2; i < argc; i++) *fields[i - 2] = (uint32_t)strtoul(argv[i], NULL, 10);
        n_shapes = argc > 2 ? 1 : 2;
    }
    if (!shapes[0].tokens || !shapes[0].questions || shapes[0].questions > 256 || !shapes[0].steps ||
        !shapes[0].layers) {
        fprintf(stderr, "bench_cuda: expected tokens, 1 to 256 questions, steps and layers above 0\n");
        return 2;
    }
    const backend *b = backend_find_compute("cuda", argc > 1 ? argv[1] : "bf16");
    if (!b) {
        fprintf(stderr, "bench_cuda: expected f32, bf16x3 or bf16, found '%s'\n", argc > 1 ? argv[1] : "");
        return 2;
    }
    if (b->open(&on, b, NULL, &err) != KVB_OK) {
        printf("skip - bench_cuda: %s; nothing is measured\n", err.message);
        return EXIT_SUCCESS;
    }
    double flops, bandwidth;
    model m;
    if (!measure_device(&flops, &bandwidth) || !make_model(&m, shapes[0].layers)) {
        on->b->check(on, &err);
        return fail("weights of the model", &err);
    }
    printf("compute,layers,tokens,questions,steps,prefill_s,prefill_tflops,product_tflops,prefill_share,decode_step_s,"
           "decode_tb_s,copy_tb_s,decode_share,total_s\n");
    for (int i = 0; code == EXIT_SUCCESS && i < n_shapes; i++) code = run_shape(&m, &shapes[i], flops, bandwidth);
    return code;
}
