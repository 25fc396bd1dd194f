// Means and covariances of the queries before RoPE over separate texts, which Expected Attention can use instead of the
// context's queries (methods.md 3.3, "stored statistics"; kvpress's ExpectedAttentionStatsPress). The file is the
// safetensors one that kvpress writes: query_mean [L,H,d] and query_cov [L,H,d,d], F32.
#pragma once
#include "profiler/model/model.h"
#include "profiler/model/observe.h"

typedef struct query_statistics {
    uint32_t n_layers, n_heads, head_dim; // L, H, d
    float *mean;                          // [L,H,d]
    float *covariance;                    // [L,H,d,d], divisor n - 1
    char sha256[65];                      // of the file that it was read from
    char model_sha256[65];                // of the model whose queries they are; "" if the file does not say
} query_statistics;

// Reads a file for this model; if path is NULL, *out is NULL. On failure *out is NULL. Errors: KVB_IO, KVB_FORMAT,
// KVB_MISMATCH (another shape, or the file names another model; if a hash is missing the model is not checked),
// KVB_NUMERIC.
kvb_status query_statistics_open(query_statistics **out, const char *path, const model *m, kvb_error *err);
// The same from bytes for a model of this shape, without a hash.
kvb_status query_statistics_parse(query_statistics **out, const void *data, size_t size, const char *name,
                                  uint32_t n_layers, uint32_t n_heads, uint32_t head_dim, kvb_error *err);
// Makes them available in an observer's views; with `s` NULL, none are.
void query_statistics_show(const query_statistics *s, layer_observer *observer);
void query_statistics_free(query_statistics *s); // NULL is allowed
// Writes a file atomically; equal numbers give equal bytes. The metadata hold `texts`, `queries` and, if known, the
// model's hash.
kvb_status query_statistics_write(const query_statistics *s, const char *path, uint64_t texts, uint64_t queries,
                                  kvb_error *err);

// Accumulates them over prefills, one text after another, in double.
typedef struct query_gather query_gather;

// The first `skip` queries of every text are left out (the sinks; 4 in kvpress).
query_gather *query_gather_open(uint32_t n_layers, uint32_t n_heads, uint32_t head_dim, uint32_t skip);
void query_gather_close(query_gather *g);
layer_observer query_gather_observer(query_gather *g);
uint64_t query_gather_count(const query_gather *g); // queries of every head so far
// Fails with KVB_ARGUMENT if there were fewer than two queries. The caller frees *out; on failure it is NULL.
kvb_status query_gather_finish(const query_gather *g, query_statistics **out, kvb_error *err);
