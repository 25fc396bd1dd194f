#include "profiler/metric/query_statistics.h"
#include "formats/atomic_file.h"
#include "formats/file_read.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "profiler/backend/linalg.h"
#include "runtime/fail.h"
#include "runtime/safetensors.h"
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static query_statistics *statistics_new(uint32_t L, uint32_t H, uint32_t d)
{
    size_t means = (size_t)L * H * d;
    query_statistics *s = need(1, sizeof *s, "query statistics");
    *s = (query_statistics){.n_layers = L, .n_heads = H, .head_dim = d};
    s->mean = need(means, sizeof *s->mean, "means of queries");
    s->covariance = need(means * d, sizeof *s->covariance, "covariances of queries");
    return s;
}

void query_statistics_show(const query_statistics *s, layer_observer *observer)
{
    observer->stored_mean = s ? s->mean : NULL;
    observer->stored_covariance = s ? s->covariance : NULL;
}

void query_statistics_free(query_statistics *s)
{
    if (!s) return;
    free(s->mean);
    free(s->covariance);
    free(s);
}

// ---- Reading ----

static kvb_status read_tensor(float *to, const kvb_safetensors *file, const char *tensor, uint32_t n_dims,
                              const uint64_t *shape, kvb_error *err)
{
    const kvb_tensor *t = kvb_safetensors_find(file, tensor);
    if (!t) return kvb_fail(err, KVB_FORMAT, "%s: tensor %s is missing; expected query statistics", file->name, tensor);
    if (strcmp(t->dtype, "F32") != 0)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: %s has type %s, expected F32", file->name, tensor, t->dtype);
    bool same = t->n_dims == n_dims;
    for (uint32_t i = 0; same && i < n_dims; i++) same = t->shape[i] == shape[i];
    if (!same)
        return kvb_fail(err, KVB_MISMATCH,
                        "%s: %s has another shape than this model's %llu layers, %llu heads of size %llu", file->name,
                        tensor, (unsigned long long)shape[0], (unsigned long long)shape[1],
                        (unsigned long long)shape[2]);
    memcpy(to, t->data, t->size); // little-endian, as the machine
    for (size_t i = 0; i < t->size / sizeof *to; i++)
        if (!isfinite(to[i]))
            return kvb_fail(err, KVB_NUMERIC, "%s: %s: element %zu is not a number", file->name, tensor, i);
    return KVB_OK;
}

kvb_status query_statistics_parse(query_statistics **out, const void *data, size_t size, const char *name,
                                  uint32_t n_layers, uint32_t n_heads, uint32_t head_dim, kvb_error *err)
{
    kvb_safetensors file = {0};
    const uint64_t shape[] = {n_layers, n_heads, head_dim, head_dim};
    *out = NULL;
    kvb_status status = kvb_safetensors_parse(&file, data, size, name, err);
    if (status == KVB_OK) *out = statistics_new(n_layers, n_heads, head_dim);
    if (status == KVB_OK) status = read_tensor((*out)->mean, &file, "query_mean", 3, shape, err);
    if (status == KVB_OK) status = read_tensor((*out)->covariance, &file, "query_cov", 4, shape, err);
    const char *sha256 = status == KVB_OK ? kvb_safetensors_metadata(file.header, "model_sha256") : NULL;
    if (sha256) snprintf((*out)->model_sha256, sizeof(*out)->model_sha256, "%s", sha256);
    kvb_safetensors_free(&file);
    if (status == KVB_OK) return KVB_OK;
    query_statistics_free(*out);
    *out = NULL;
    return status;
}

// Files of kvpress do not say whose queries they hold; another model of the same shape would give wrong numbers.
static kvb_status check_model(const query_statistics *s, const char *path, const model *m, kvb_error *err)
{
    if (!s->model_sha256[0] || !m->sha256[0] || strcmp(s->model_sha256, m->sha256) == 0) return KVB_OK;
    return kvb_fail(err, KVB_MISMATCH,
                    "%s: query statistics of another model (SHA-256 %.16s..., this one's is %.16s...); gather them "
                    "again with kvbudget statistics",
                    path, s->model_sha256, m->sha256);
}

kvb_status query_statistics_open(query_statistics **out, const char *path, const model *m, kvb_error *err)
{
    const model_config *c = &m->config;
    file_view view;
    *out = NULL;
    if (!path) return KVB_OK;
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    status = query_statistics_parse(out, view.data, view.size, path, c->n_layers, c->n_heads, c->head_dim, err);
    if (status == KVB_OK) status = check_model(*out, path, m, err);
    if (status == KVB_OK) status = sha256_hex(view.data, view.size, (*out)->sha256, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    if (status != KVB_OK) query_statistics_free(*out), *out = NULL;
    file_unmap(&view);
    return status;
}

// ---- Writing ----

static void describe_tensor(cJSON *header, const char *name, const uint32_t *shape, int n_dims, size_t begin,
                            size_t end)
{
    const double offsets[] = {(double)begin, (double)end};
    double dims[4];
    for (int i = 0; i < n_dims; i++) dims[i] = shape[i];
    cJSON *o = cJSON_AddObjectToObject(header, name);
    cJSON_AddStringToObject(o, "dtype", "F32");
    cJSON_AddItemToObject(o, "shape", cJSON_CreateDoubleArray(dims, n_dims));
    cJSON_AddItemToObject(o, "data_offsets", cJSON_CreateDoubleArray(offsets, 2));
}

// The header's text, padded with blanks to a multiple of 8 bytes; the caller's.
static char *make_header(const query_statistics *s, uint64_t texts, uint64_t queries)
{
    const uint32_t shape[] = {s->n_layers, s->n_heads, s->head_dim, s->head_dim};
    size_t means = (size_t)s->n_layers * s->n_heads * s->head_dim * sizeof(float);
    char numbers[2][24];
    snprintf(numbers[0], sizeof numbers[0], "%llu", (unsigned long long)texts);
    snprintf(numbers[1], sizeof numbers[1], "%llu", (unsigned long long)queries);
    cJSON *header = cJSON_CreateObject(), *about = cJSON_AddObjectToObject(header, "__metadata__");
    json_put(about, "format %s texts %s queries %s", "kvbudget-query-statistics", numbers[0], numbers[1]);
    if (s->model_sha256[0]) cJSON_AddStringToObject(about, "model_sha256", s->model_sha256);
    describe_tensor(header, "query_mean", shape, 3, 0, means);
    describe_tensor(header, "query_cov", shape, 4, means, means + means * s->head_dim);
    char *text = cJSON_PrintUnformatted(header);
    char *padded = need_text("%s%*s", text, (int)((8 - strlen(text) % 8) % 8), "");
    cJSON_free(text);
    cJSON_Delete(header);
    return padded;
}

kvb_status query_statistics_write(const query_statistics *s, const char *path, uint64_t texts, uint64_t queries,
                                  kvb_error *err)
{
    atomic_file file;
    size_t means = (size_t)s->n_layers * s->n_heads * s->head_dim;
    char *header = make_header(s, texts, queries);
    kvb_status status = atomic_file_begin(&file, path, err);
    if (status == KVB_OK) {
        uint64_t length = strlen(header);
        unsigned char bytes[8];
        for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)(length >> (8 * i));
        fwrite(bytes, 1, sizeof bytes, file.stream);
        fputs(header, file.stream);
        fwrite(s->mean, sizeof *s->mean, means, file.stream);
        fwrite(s->covariance, sizeof *s->covariance, means * s->head_dim, file.stream);
        status = atomic_file_commit(&file, err); // finds what went wrong with the stream
    }
    free(header);
    return status;
}

// ---- Gathering ----

struct query_gather {
    uint32_t n_layers, n_heads, head_dim, skip;
    uint64_t n;       // queries of every head
    double *sums;     // [L,H,d] of q - shift
    double *products; // [L,H,d,d] of (q - shift) (q - shift)^T
    float *shift;     // [L,H,d], the first text's mean: float products of small numbers lose nothing
    float *rows;      // [rows_room, d]
    float *product;   // [d,d]
    size_t rows_room;
};

query_gather *query_gather_open(uint32_t n_layers, uint32_t n_heads, uint32_t head_dim, uint32_t skip)
{
    size_t means = (size_t)n_layers * n_heads * head_dim;
    query_gather *g = need(1, sizeof *g, "query statistics");
    *g = (query_gather){.n_layers = n_layers, .n_heads = n_heads, .head_dim = head_dim, .skip = skip};
    g->sums = need(means, sizeof *g->sums, "sums of queries");
    g->products = need(means * head_dim, sizeof *g->products, "products of queries");
    g->shift = need(means, sizeof *g->shift, "means of queries");
    g->product = need((size_t)head_dim * head_dim, sizeof *g->product, "products of queries");
    return g;
}

void query_gather_close(query_gather *g)
{
    if (!g) return;
    free(g->sums);
    free(g->products);
    free(g->shift);
    free(g->product);
    free(g->rows);
    free(g);
}

// One head's queries of a text; q has rows of `ld` floats.
static void gather_head(query_gather *g, size_t head, const float *q, size_t ld, uint32_t n)
{
    size_t d = g->head_dim;
    float *shift = g->shift + head * d;
    double *sums = g->sums + head * d, *products = g->products + head * d * d;
    for (uint32_t i = 0; g->n == 0 && i < n; i++)
        for (size_t c = 0; c < d; c++) shift[c] += q[i * ld + c] / (float)n;
    for (uint32_t i = 0; i < n; i++)
        for (size_t c = 0; c < d; c++) {
            g->rows[i * d + c] = q[i * ld + c] - shift[c];
            sums[c] += g->rows[i * d + c];
        }
    gemm(true, false, d, d, n, 1.0f, g->rows, d, g->rows, d, 0.0f, g->product, d);
    for (size_t i = 0; i < d * d; i++) products[i] += g->product[i];
}

static kvb_status see_queries(void *context, const layer_view *view, kvb_error *err)
{
    query_gather *g = context;
    uint32_t T = view->n_tokens, n = T > g->skip ? T - g->skip : 0;
    size_t d = g->head_dim, ld = (size_t)g->n_heads * d;
    if (n > g->rows_room) {
        g->rows = need_more(g->rows, n * d, sizeof *g->rows, "queries");
        g->rows_room = n;
    }
    uint64_t failures = gemm_failures();
    for (uint32_t h = 0; n && h < g->n_heads; h++)
        gather_head(g, (size_t)view->layer * g->n_heads + h, view->q_raw + g->skip * ld + h * d, ld, n);
    if (gemm_failures() != failures)
        return kvb_fail(err, KVB_MEMORY, "query statistics: oneDNN had no memory for products of %u queries", n);
    if (view->layer + 1 == g->n_layers) g->n += n;
    return KVB_OK;
}

layer_observer query_gather_observer(query_gather *g)
{
    return (layer_observer){.see = see_queries, .context = g, .needs = VIEW_Q_RAW};
}

uint64_t query_gather_count(const query_gather *g)
{
    return g->n;
}

kvb_status query_gather_finish(const query_gather *g, query_statistics **out, kvb_error *err)
{
    size_t d = g->head_dim, heads = (size_t)g->n_layers * g->n_heads;
    *out = NULL;
    if (g->n < 2)
        return kvb_fail(err, KVB_ARGUMENT, "query statistics: %llu queries, expected at least two; use longer texts",
                        (unsigned long long)g->n);
    *out = statistics_new(g->n_layers, g->n_heads, g->head_dim);
    double n = (double)g->n;
    for (size_t h = 0; h < heads; h++) {
        const double *sums = g->sums + h * d, *products = g->products + h * d * d;
        for (size_t a = 0; a < d; a++) {
            (*out)->mean[h * d + a] = (float)(g->shift[h * d + a] + sums[a] / n);
            for (size_t b = 0; b < d; b++)
                (*out)->covariance[(h * d + a) * d + b] =
                    (float)((products[a * d + b] - sums[a] * sums[b] / n) / (n - 1));
        }
    }
    return KVB_OK;
}
