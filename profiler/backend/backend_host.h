// Device memory that is host memory: shared by the CPU backends. The contracts are in backend.h.
#pragma once
#include "profiler/backend/backend.h"

kvb_status host_check(backend_device *on, kvb_error *err);
uint64_t host_free_bytes(backend_device *on);        // 0: the device shares the host's memory
float *host_memory(size_t n_floats);                 // aligned to a cache line, zeroed, freed by the caller; NULL if
                                                     // memory runs out
dev host_alloc(backend_device *on, size_t n_floats); // on a cache line
void host_release(backend_device *on, dev memory);
void host_upload(backend_device *on, dev to, const float *from, size_t n);
void host_download(backend_device *on, float *to, dev from, size_t n);
void host_copy(backend_device *on, dev to, dev from, size_t n);
void host_clear(backend_device *on, dev memory, size_t n);
const float *host_view(backend_device *on, dev from);
void host_scale(backend_device *on, dev y, float by, size_t n_floats);
void host_add_row(backend_device *on, dev y, dev row, uint32_t n, uint32_t width);
void host_take_rows(backend_device *on, dev y, dev x, const uint32_t *rows, uint32_t n, uint32_t width);
void host_store_prefix(backend_device *on, dev cache, uint32_t n_tokens, uint32_t first, dev values, uint32_t n,
                       uint32_t n_kv_heads, uint32_t d);
void host_store_tail(backend_device *on, dev cache, uint32_t capacity, const decode_row *rows, dev values, uint32_t n,
                     uint32_t n_kv_heads, uint32_t d);
void host_sample(backend_device *on, int32_t *ids, dev logits, uint32_t n, uint32_t vocabulary, const sampler *s,
                 const draw_key *keys);
// Returns the values of w in float32, rounded if `hold` says so; the caller frees them. NULL if memory runs out or a
// value is not finite.
float *host_matrix_values(const stored_matrix *w);
// For backends that read keys and values as they are.
size_t host_packed_floats(backend_device *on, uint32_t n_tokens, attention_shape s);
void host_pack_prefix(backend_device *on, const prefix_kv *kv, attention_shape s);
