// Device memory that is host memory: shared by the CPU backends. The contracts are in backend.h.
#pragma once
#include "profiler/backend/backend.h"

// A device without scratch memory.
kvb_status host_open(backend_device **out, const backend *b, const backend_limits *limits, kvb_error *err);
void host_close(backend_device *on);
kvb_status host_check(backend_device *on, kvb_error *err);
uint64_t host_free_bytes(backend_device *on);        // 0: the host's memory is judged elsewhere
float *host_memory(size_t n_floats);                 // aligned to a cache line, zeroed, freed by the caller; NULL if
                                                     // there is none
dev host_alloc(backend_device *on, size_t n_floats); // on a cache line
void host_release(backend_device *on, dev memory);
void host_upload(backend_device *on, dev to, const float *from, size_t n);
void host_download(backend_device *on, float *to, dev from, size_t n);
void host_copy(backend_device *on, dev to, dev from, size_t n);
void host_clear(backend_device *on, dev memory, size_t n);
const float *host_view(backend_device *on, dev from);
void host_sample(backend_device *on, int32_t *ids, dev logits, uint32_t n, uint32_t vocabulary, const sampler *s,
                 const draw_key *keys);
void host_matrix_release(backend_device *on, dev_matrix *w);
// Returns the values of w in float32, rounded if `hold` says so; the caller frees them. NULL if memory runs out or a
// value is not finite.
float *host_matrix_values(const stored_matrix *w, unsigned hold);
// For backends that read keys and values as they are.
size_t host_packed_floats(backend_device *on, uint32_t n_tokens, attention_shape s);
void host_pack_prefix(backend_device *on, const prefix_kv *kv, attention_shape s);
