// Device memory that is host memory: what backends on the CPU share. backend.h says what each function promises.
#pragma once
#include "profiler/backend.h"

kvb_status host_open(kvb_error *err);  // nothing to start
kvb_status host_check(kvb_error *err); // nothing goes wrong
uint64_t host_free_bytes(void);        // 0: the host's memory is judged elsewhere
dev host_alloc(size_t n_floats);       // on a cache line
void host_release(dev memory);
void host_upload(dev to, const float *from, size_t n);
void host_download(float *to, dev from, size_t n);
void host_copy(dev to, dev from, size_t n);
void host_clear(dev memory, size_t n);
const float *host_view(dev from);
void host_sample(int32_t *ids, dev logits, uint32_t n, uint32_t vocabulary, const sampler *s, const draw_key *keys);
void host_matrix_release(dev_matrix *w);
// matrix_load of backends that take their matrices in float32, through their matrix_upload.
dev_matrix host_matrix_load(const stored_matrix *w, bool keep_rows,
                            dev_matrix (*upload)(const float *w, uint32_t out, uint32_t in, bool keep_rows));
// backend_reduce.c
void host_norms(dev out, dev x, size_t n, uint32_t width);
void host_moments(dev mean, dev covariance, dev x, dev norms, uint32_t n, uint32_t heads, uint32_t d, bool by_head);
void host_quadratic(dev out, const prefix_kv *kv, dev linear, dev square, attention_shape s);
void host_spreads(dev out, dev z, uint32_t n_tokens, uint32_t n_kv_heads, uint32_t d, partition_row row);
// For backends that read keys and values as they are.
size_t host_packed_floats(uint32_t n_tokens, attention_shape s);
void host_pack_prefix(const prefix_kv *kv, attention_shape s);
