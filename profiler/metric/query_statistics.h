// Means and covariances of the queries before RoPE, taken over texts of their own: what Expected Attention may use in
// place of the context's queries (methods.md 3.3, "stored statistics"; kvpress's ExpectedAttentionStatsPress). The file
// is the safetensors one that kvpress writes: query_mean [L,H,d] and query_cov [L,H,d,d], F32.
#pragma once
#include "profiler/model/model.h"
#include "profiler/model/observe.h"

typedef struct query_statistics {
    uint32_t n_layers, n_heads, head_dim; // L, H, d
    float *mean;                          // [L,H,d]
    float *covariance;                    // [L,H,d,d], divisor n - 1
    char sha256[65];                      // of the file that it was read from
    char model_sha256[65];                // of the model whose queries they are; "" where the file does not say
} query_statistics;

// Reads a file for this model; with path NULL there are none, and *out is NULL. On failure *out is NULL. Errors:
// KVB_IO, KVB_FORMAT, KVB_MISMATCH (another shape, or the file says that another model's queries are in it; a model
// without a hash is taken for the right one), KVB_NUMERIC.
kvb_status query_statistics_open(query_statistics **out, const char *path, const model *m, kvb_error *err);
// The same from bytes for a model of this shape, without a hash.
kvb_status query_statistics_parse(query_statistics **out, const void *data, size_t size, const char *name,
                                  uint32_t n_layers, uint32_t n_heads, uint32_t head_dim, kvb_error *err);
// Lets an observer's views show them; `s` NULL: they show none.
void query_statistics_show(const query_statistics *s, layer_observer *observer);
void query_statistics_free(query_statistics *s); // NULL is allowed
// Atomically; equal numbers give equal bytes. `texts` and `queries` go into the file's metadata, and the model's hash
// when there is one.
kvb_status query_statistics_write(const query_statistics *s, const char *path, uint64_t texts, uint64_t queries,
                                  kvb_error *err);

// Gathers them from prefills, one text after another; sums in double.
typedef struct query_gather query_gather;

// `skip` first queries of every text are left out (the sinks; 4 in kvpress).
query_gather *query_gather_open(uint32_t n_layers, uint32_t n_heads, uint32_t head_dim, uint32_t skip);
void query_gather_close(query_gather *g);
layer_observer query_gather_observer(query_gather *g);
uint64_t query_gather_count(const query_gather *g); // queries of every head so far
// Needs at least two queries (KVB_ARGUMENT). *out is the caller's, NULL on failure.
kvb_status query_gather_finish(const query_gather *g, query_statistics **out, kvb_error *err);
