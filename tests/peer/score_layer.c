// Computes scores of one layer from tensors in files, to compare with other code on the same tensors
// (tests/peer/compare_scorers.py).
//
// usage: score_layer FOLDER [--keep N] METRIC...
// Reads FOLDER/{q_raw,q}.npy [n,H,d], the queries of the last n of T tokens, {k,v}.npy [G,T,d], wo.npy [D,H*d] and
// rope_frequency.npy [d/2]; writes FOLDER/score_<i>.npy [G,T] for the i-th metric. With --keep the scores are
// ranked for N tokens per head (metric_rank), as budget-dependent metrics need it.
#include "formats/file_read.h"
#include "formats/npy.h"
#include "profiler/backend/backend.h"
#include "profiler/metric/scorer.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct tensor {
    float *values;
    uint64_t shape[3];
} tensor;

static kvb_status read_tensor(tensor *out, const char *folder, const char *name, uint32_t n_dims, kvb_error *err)
{
    char path[4096];
    file_view file;
    npy_array a;
    snprintf(path, sizeof path, "%s/%s.npy", folder, name);
    kvb_status status = file_map(&file, path, err);
    if (status != KVB_OK) return status;
    status = npy_parse(&a, file.data, file.size, path, err);
    if (status == KVB_OK && a.n_dims != n_dims)
        status = kvb_fail(err, KVB_FORMAT, "%s: %u dimensions, expected %u", path, a.n_dims, n_dims);
    if (status == KVB_OK && !(out->values = malloc(a.count * sizeof(float) + 1)))
        status = kvb_fail(err, KVB_MEMORY, "%s: no memory for %zu numbers", path, a.count);
    if (status == KVB_OK) status = npy_to_f32(&a, out->values, path, err);
    for (uint32_t i = 0; status == KVB_OK && i < n_dims; i++) out->shape[i] = a.shape[i];
    file_unmap(&file);
    return status;
}

static dev on_device(backend_device *on, const float *values, size_t n)
{
    dev d = backend_cpu.alloc(on, n);
    if (d.address) backend_cpu.upload(on, d, values, n);
    return d;
}

// Adds column sums and output norms, computed as in the forward pass.
static kvb_status make_extras(layer_view *view, const tensor *wo, kvb_error *err)
{
    attention_shape s = attention_heads(view->n_heads, view->n_kv_heads, view->head_dim);
    size_t keys = (size_t)view->n_kv_heads * view->n_tokens * view->head_dim,
           n = (size_t)view->n_heads * view->n_tokens;
    backend_device *on;
    kvb_status status = backend_cpu.open(&on, &backend_cpu,
                                         &(backend_limits){view->n_tokens, 1, 1, s.n_heads * s.head_dim, s, 0, 0}, err);
    if (status != KVB_OK) return status;
    dev sums = backend_cpu.alloc(on, n), row_log = backend_cpu.alloc(on, n), norms = backend_cpu.alloc(on, n),
        q = on_device(on, view->q, n * view->head_dim);
    prefix_kv kv = {on_device(on, view->k, keys), on_device(on, view->v, keys), view->n_tokens, {NULL}};
    dev_matrix w = backend_matrix(on, wo->values, (uint32_t)wo->shape[0], (uint32_t)wo->shape[1], true);
    if (!sums.address || !row_log.address || !norms.address || !q.address || !kv.k.address || !kv.v.address ||
        !w.address)
        return kvb_fail(err, KVB_MEMORY, "no memory for the layer");
    backend_cpu.column_sums(on, sums, row_log, q, &kv, 0, s);
    backend_cpu.output_norms(on, norms, &kv, w, s);
    view->column_sums = sums.address; // not freed, since the program ends soon
    view->output_norms = norms.address;
    return backend_cpu.check(on, err);
}

static kvb_status read_view(layer_view *view, const char *folder, kvb_error *err)
{
    tensor q_raw, q, k, v, wo, frequency;
    kvb_status status = read_tensor(&q_raw, folder, "q_raw", 3, err);
    if (status == KVB_OK) status = read_tensor(&q, folder, "q", 3, err);
    if (status == KVB_OK) status = read_tensor(&k, folder, "k", 3, err);
    if (status == KVB_OK) status = read_tensor(&v, folder, "v", 3, err);
    if (status == KVB_OK) status = read_tensor(&wo, folder, "wo", 2, err);
    if (status == KVB_OK) status = read_tensor(&frequency, folder, "rope_frequency", 1, err);
    if (status != KVB_OK) return status;
    uint64_t n = q.shape[0], T = k.shape[1], H = q.shape[1], d = q.shape[2], G = k.shape[0];
    if (memcmp(q.shape, q_raw.shape, sizeof q.shape) != 0 || memcmp(k.shape, v.shape, sizeof k.shape) != 0 || n > T ||
        n == 0 || k.shape[2] != d || G == 0 || H % G != 0 || wo.shape[1] != H * d || 2 * frequency.shape[0] != d)
        return kvb_fail(err, KVB_FORMAT, "%s: the shapes do not fit together", folder);
    *view = (layer_view){.n_tokens = (uint32_t)T,
                         .n_heads = (uint32_t)H,
                         .n_kv_heads = (uint32_t)G,
                         .head_dim = (uint32_t)d,
                         .rope_dim = (uint32_t)d,
                         .rope_frequency = frequency.values,
                         .q_raw = q_raw.values,
                         .q = q.values,
                         .k = k.values,
                         .v = v.values,
                         .n_queries = (uint32_t)n};
    return n == T ? make_extras(view, &wo, err) : KVB_OK; // column sums need all queries
}

static kvb_status write_scores(const layer_view *view, const char *text, const char *path, uint32_t keep,
                               kvb_error *err)
{
    metric m, base;
    uint32_t G = view->n_kv_heads, budgets[256];
    size_t n = (size_t)G * view->n_tokens;
    float *s = malloc(2 * n * sizeof *s), *first = s + n;
    if (!s || G > 256) return kvb_fail(err, KVB_MEMORY, "no memory for %u heads", G);
    for (uint32_t g = 0; g < G; g++) budgets[g] = keep;
    kvb_status status = metric_parse(&m, text, err);
    if (status == KVB_OK) status = metric_score(&m, view, s, err);
    if (status == KVB_OK && metric_base(&m, &base)) status = metric_score(&base, view, first, err);
    if (status == KVB_OK && keep) status = metric_rank(&m, first, s, G, view->n_tokens, budgets, s, err);
    if (status == KVB_OK) status = npy_write(path, NPY_F32, 2, (uint64_t[]){G, view->n_tokens}, s, err);
    free(s);
    return status;
}

int main(int argc, char **argv)
{
    kvb_error err = {0};
    layer_view view;
    int first = 2;
    uint32_t keep = 0;
    if (argc > 3 && strcmp(argv[2], "--keep") == 0) {
        keep = (uint32_t)strtoul(argv[3], NULL, 10);
        first = 4;
    }
    if (argc <= first) {
        fprintf(stderr, "usage: score_layer FOLDER [--keep N] METRIC...\n");
        return 2;
    }
    kvb_status status = read_view(&view, argv[1], &err);
    for (int i = first; status == KVB_OK && i < argc; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/score_%d.npy", argv[1], i - first);
        status = write_scores(&view, argv[i], path, keep, &err);
    }
    if (status != KVB_OK) fprintf(stderr, "score_layer: %s\n", err.message);
    return status != KVB_OK;
}
