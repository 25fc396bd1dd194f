// The one seam between the profiler and the hardware: opaque device memory, the operations that make a forward pass,
// and sums that some scorers need.
//
// `ref` (backend_ref.c) is plain C with double sums and judges the others op by op; `cpu` (backend_cpu.c) is oneDNN and
// OpenMP. A backend is a constant table of functions. A pass opens a device from it, which has scratch memory for the
// pass's shapes and remembers its first error; any number of devices may be open. All visible data are float32; a
// backend's `compute` says how operands of products are rounded internally. Shapes are row-major; a row is one token.
// Letters as in model.h: D width, H query heads, G KV heads, q = H/G heads per group (query head h reads KV head h/q),
// d head size, T context tokens.
#pragma once
#include "profiler/backend/sampler.h"
#include "profiler/weights/stored_matrix.h"
#include "runtime/kvbudget.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// The largest head_dim; backends keep one head's row on the stack.
enum { BACKEND_MAX_HEAD_DIM = 512 };

// Device memory. Never dereferenced outside backend_*.c; dev_at() steps inside one allocation.
typedef struct dev {
    float *address;
} dev;

static inline dev dev_at(dev base, size_t offset)
{
    dev at = {base.address + offset};
    return at;
}

// A weight matrix in the backend's preferred layout. y = x W^T for W [out, in] as model files store it.
typedef struct dev_matrix {
    float *address; // float32 rows; may be NULL if `packed` is not, and rows were not asked for or can be read from
                    // `packed`
    uint32_t out, in;
    void *packed; // the backend's own form for products, NULL if it needs none
} dev_matrix;

// Flags that say how matrix_load holds a matrix; 0: in the backend's own form, without rows. Backends ignore flags that
// they have no use for.
typedef enum matrix_hold {
    HOLD_ROWS = 1,    // its rows can be read: for `gather` and `output_norms`
    HOLD_MAPPED = 2,  // the data outlives the matrix, so rows need no copy
    HOLD_IN_PLACE = 4 // products read the data there: this takes no memory, but every product converts it again
} matrix_hold;

// One of several products of the same rows: y [n,out] = x W^T.
typedef struct projection {
    dev y;
    dev_matrix w;
} projection;

// Keys (after RoPE) and values of the context for one layer, shared by all questions.
typedef struct prefix_kv {
    dev k, v;          // [G, T, d]
    uint32_t n_tokens; // T
    dev packed;        // what pack_prefix made of them; {NULL} if packed_floats is 0
} prefix_kv;

// Keys and values of the tokens after the context, one block per question, for one layer.
typedef struct tail_kv {
    dev k, v;          // [questions, G, capacity, d]
    uint32_t capacity; // rows per question and head
} tail_kv;

// One decoded row: the token at position T + tail of its question. Rows of a question are consecutive and in order.
typedef struct decode_row {
    uint32_t question; // slot in the batch
    uint32_t tail;     // 0-based place after the context; the row sees the whole context and tail rows 0..tail
    bool observed;     // its attention enters the oracle
} decode_row;

// What attend_rows needs for the oracle (methods.md 2.1); weights.address is NULL when nothing is observed.
typedef struct oracle_view {
    dev weights;        // w [H, T]: ||v W_O|| normalised over the layer
    dev best;           // I [questions, G, T] of this layer so far: the maximum, or the sum
    size_t best_stride; // floats from one question to the next
    bool sum;           // the sum over rows and the group's heads; only if the backend has sums_importance
} oracle_view;

// The activation function of a feed-forward's gate. SWIGLU_CLAMPED is gpt-oss's: gate at most 7, up within 7, and gate
// * sigmoid(1.702 gate) * (up + 1).
typedef enum activation { SILU, GELU_TANH, SWIGLU_CLAMPED } activation;

// How a layer attends. The fields after the sizes are 0 or {NULL} in most layers.
typedef struct attention_shape {
    uint32_t n_heads, n_kv_heads, head_dim;
    uint32_t window; // a row sees this many positions, up to its own; 0: all up to its own
    float softcap;   // a score s = q . k / sqrt(d) becomes softcap * tanh(s / softcap); 0: unchanged
    dev sinks;       // [H] an extra score per query head that enters the softmax but belongs to no position; {NULL}:
                     // none
} attention_shape;

static inline attention_shape attention_heads(uint32_t n_heads, uint32_t n_kv_heads, uint32_t head_dim)
{
    return (attention_shape){n_heads, n_kv_heads, head_dim, 0, 0, {NULL}};
}

// The largest shapes that the operations will be called with, so that scratch memory is taken once.
typedef struct backend_limits {
    uint32_t tokens;     // T
    uint32_t tail;       // rows after the context per question
    uint32_t rows;       // decoded rows in one call
    uint32_t matrix_dim; // the larger side of any weight matrix
    attention_shape shape;
    // The most terms of a product whose operand may be converted each time, because its matrix is BF16 or quantised, or
    // was loaded with HOLD_IN_PLACE. 0: there is none.
    uint32_t made_terms;
    uint32_t matrix_terms; // the most terms of any product, i.e. inputs of any weight matrix
} backend_limits;

// An open device. Backends append their scratch memory to this struct. Only one thread may use a device at a time.
typedef struct backend_device {
    const struct backend *b; // what it was opened from: on->b->matmul(on, ...)
    kvb_status failed;       // status of the first operation that failed, for check; KVB_OK: none failed
    kvb_error error;
} backend_device;

// The most rows of a context in one call of an operation; there are always fewer decoded rows (matmul says why).
enum { BACKEND_CHUNK_ROWS = 1024, BACKEND_PROJECTIONS = 3 };

typedef struct backend {
    const char *name;
    const char *compute; // precision of the products' operands: "f32", "bf16x3" (two bfloat16 parts, 16 bits), "bf16";
                         // sums are float32
    const char *summary;
    // Rows of a context in one call of projections and feed-forward: few if that keeps activations in the processor's
    // cache, at most BACKEND_CHUNK_ROWS.
    uint32_t context_rows;
    bool sums_importance; // supports oracle_view.sum and the centre of value_weights
    bool own_memory;      // devices have memory of their own, apart from the host's

    // --- life ---
    // Opens a device, with scratch memory for operations within `limits`; if limits is NULL, it only serves for memory
    // and matrices. On failure the message says what is missing (a driver, memory), and *out is NULL.
    kvb_status (*open)(backend_device **out, const struct backend *b, const backend_limits *limits, kvb_error *err);
    // Closes a device and frees its scratch memory; NULL is allowed. What `alloc` and `matrix_load` return belongs to
    // the backend, not to one device: other devices of the same backend may use it, and it must be released before the
    // last one is closed.
    void (*close)(backend_device *on);
    // Waits for the device and reports the first error. Operations may return before the device is done, and report no
    // errors themselves: once one has failed, all results are invalid, and every call of check returns that error.
    kvb_status (*check)(backend_device *on, kvb_error *err);

    // --- memory. alloc returns zeroed floats, or {NULL} if memory has run out; release accepts {NULL}. ---
    dev (*alloc)(backend_device *on, size_t n_floats);
    void (*release)(backend_device *on, dev memory);
    void (*upload)(backend_device *on, dev to, const float *from, size_t n);
    void (*download)(backend_device *on, float *to, dev from, size_t n);
    void (*copy)(backend_device *on, dev to, dev from, size_t n);
    void (*clear)(backend_device *on, dev memory, size_t n);
    const float *(*host_view)(backend_device *on,
                              dev from); // the memory itself if host and device share it, else NULL
    // Loads a matrix [out, in] as a model file stores it (backend_matrix: from floats), held as `hold` says
    // (matrix_hold). Both pointers of the result are NULL if memory runs out or a value is not finite; if it is read in
    // place, the first product fails instead.
    dev_matrix (*matrix_load)(backend_device *on, const stored_matrix *w, unsigned hold);
    // Bytes that matrix_load would take; does not read w->data.
    uint64_t (*matrix_bytes)(backend_device *on, const stored_matrix *w, unsigned hold);
    void (*matrix_release)(backend_device *on, dev_matrix *w);
    // Bytes of scratch memory that `open` takes for these limits.
    uint64_t (*scratch_bytes)(backend_device *on, const backend_limits *limits);
    // Free bytes on a device with its own memory; 0 if it shares the host's.
    uint64_t (*free_bytes)(backend_device *on);

    // --- a forward pass; n counts rows, outputs never alias inputs unless said ---
    void (*gather)(backend_device *on, dev y, dev_matrix table, const int32_t *ids, uint32_t n); // y[i] = table[ids[i]]
    void (*rms_norm)(backend_device *on, dev y, dev x, dev weight, uint32_t n, uint32_t width,
                     float eps); // y = x / rms(x) * weight; y may be x
    // y [n,out] (+)= x [n,in] W^T. For n < BACKEND_CHUNK_ROWS a row's bits depend neither on n nor on the other rows;
    // from there on they may depend on n.
    void (*matmul)(backend_device *on, dev y, dev x, dev_matrix w, uint32_t n, bool accumulate);
    // Computes all y of `to`, at most BACKEND_PROJECTIONS, as matmul would, reading x once. No y overlaps x or another.
    void (*project)(backend_device *on, const projection *to, uint32_t count, dev x, uint32_t n);
    // y = (x - mean) / deviation * weight; row i takes the row i % n_weights of weight [n_weights, width]; y may be x
    void (*layer_norm)(backend_device *on, dev y, dev x, dev weight, uint32_t n, uint32_t width, uint32_t n_weights,
                       float eps);
    void (*glu)(backend_device *on, dev gate, dev up, activation act, size_t n_floats); // gate = act(gate) * up
    void (*softcap)(backend_device *on, dev y, float cap, size_t n_floats);             // y = cap * tanh(y / cap)
    void (*clip)(backend_device *on, dev y, float most, size_t n_floats);               // y = min(max(y, -most), most)
    void (*scale)(backend_device *on, dev y, float by, size_t n_floats);                // y *= by
    void (*add_row)(backend_device *on, dev y, dev row, uint32_t n, uint32_t width);    // y[i] += row [width]
    void (*add_scaled)(backend_device *on, dev y, dev x, float by, size_t n_floats);    // y += x * by
    // y[i] = x[rows[i]], and y[rows[i]] += weights[i] * x[i], of n rows [width]; `rows`, each once, and `weights` are
    // the host's.
    void (*take_rows)(backend_device *on, dev y, dev x, const uint32_t *rows, uint32_t n, uint32_t width);
    void (*add_rows)(backend_device *on, dev y, dev x, const uint32_t *rows, const float *weights, uint32_t n,
                     uint32_t width);
    // y = RoPE(x), x [n, heads*d], pairs (i, i + rope_dim/2); angles of row i from cos_sin [positions, rope_dim/2, 2]
    // at positions[i]. y may be x.
    void (*rope)(backend_device *on, dev y, dev x, dev cos_sin, const uint32_t *positions, uint32_t n, uint32_t heads,
                 uint32_t d, uint32_t rope_dim);
    // Moves values [n, G*d] of context rows first..first+n-1 into the head-major cache [G, T, d].
    void (*store_prefix)(backend_device *on, dev cache, uint32_t n_tokens, uint32_t first, dev values, uint32_t n,
                         uint32_t n_kv_heads, uint32_t d);
    // Moves values [n, G*d] of decoded rows to their places in [questions, G, capacity, d].
    void (*store_tail)(backend_device *on, dev cache, uint32_t capacity, const decode_row *rows, dev values, uint32_t n,
                       uint32_t n_kv_heads, uint32_t d);
    // Floats that pack_prefix needs for one layer's context of n tokens; 0 for backends that read keys and values as
    // they are. If it is not 0, attend_prefix and attend_rows read only `packed`: k and v may hold another layer's.
    size_t (*packed_floats)(backend_device *on, uint32_t n_tokens, attention_shape s);
    // Fills kv->packed from all rows of kv->k and kv->v. Must be called before attention if packed_floats is not 0.
    void (*pack_prefix)(backend_device *on, const prefix_kv *kv, attention_shape s);
    // Causal attention of context rows first..first+n-1: o, q [n, H*d]. Never holds T x T.
    void (*attend_prefix)(backend_device *on, dev o, dev q, const prefix_kv *kv, uint32_t first, uint32_t n,
                          attention_shape s);
    // Attention of decoded rows over the shared context and their own tails; observed rows update the oracle. In a
    // layer with a window no row is observed.
    void (*attend_rows)(backend_device *on, dev o, dev q, const prefix_kv *kv, const tail_kv *tails,
                        const decode_row *rows, uint32_t n, attention_shape s, const oracle_view *oracle);
    // w[h,j] = ||root_h (v_j - centre_h)|| / (sum over h', j' + 1e-9); root [H,d,d] with root^T root = W_O W_O^T
    // (oracle.h); centre [H,d], or {NULL} for zeros, which is required of callers if the backend has no
    // sums_importance. w [H,T].
    void (*value_weights)(backend_device *on, dev w, const prefix_kv *kv, dev root, dev centre, attention_shape s);

    // ids[i] (host) = sampler_draw(s, row i of logits [n, vocabulary], keys[i]): the same id on every backend for the
    // same logits.
    void (*sample)(backend_device *on, int32_t *ids, dev logits, uint32_t n, uint32_t vocabulary, const sampler *s,
                   const draw_key *keys);

    // --- what some scorers need; called only when one asks (observe.h) ---
    // sums [H,T]: sums[h,j] = sum over i >= max(j, first) of A[h,i,j], A the causal softmax attention of the context
    // rows, q [T, H*d]; first < T. Never holds T x T; the attention is computed anew. `row_log` [H,T] is scratch (log
    // of the softmax denominators). s.window is 0.
    void (*column_sums)(backend_device *on, dev sums, dev row_log, dev q, const prefix_kv *kv, uint32_t first,
                        attention_shape s);
    // norms [H,T]: norms[h,j] = ||v_j W_O^(h)||_1, W_O^(h) the columns h*d..(h+1)*d of wo [D, H*d]
    void (*output_norms)(backend_device *on, dev norms, const prefix_kv *kv, dev_matrix wo, attention_shape s);
} backend;

// The operations of a backend's table. `own` is the prefix of its functions' names; `memory` that of operations that
// only move numbers, and `packing` that of packed keys and values, which backends may share.
#define BACKEND_OPERATIONS(own, memory, packing)                                                                      \
    .open = own##_open, .close = own##_close, .check = memory##_check, .alloc = memory##_alloc,                       \
    .release = memory##_release, .upload = memory##_upload, .download = memory##_download, .copy = memory##_copy,     \
    .clear = memory##_clear, .host_view = memory##_view, .matrix_load = own##_matrix_load,                            \
    .matrix_bytes = own##_matrix_bytes, .matrix_release = own##_matrix_release, .scratch_bytes = own##_scratch_bytes, \
    .free_bytes = memory##_free_bytes, .gather = own##_gather, .rms_norm = own##_rms_norm, .matmul = own##_matmul,    \
    .project = own##_project, .layer_norm = own##_layer_norm, .glu = own##_glu, .softcap = own##_softcap,             \
    .clip = own##_clip, .scale = memory##_scale, .add_row = memory##_add_row, .add_scaled = own##_add_scaled,         \
    .take_rows = memory##_take_rows, .add_rows = own##_add_rows, .rope = own##_rope,                                  \
    .store_prefix = memory##_store_prefix, .store_tail = memory##_store_tail,                                         \
    .packed_floats = packing##_packed_floats, .pack_prefix = packing##_pack_prefix,                                   \
    .attend_prefix = own##_attend_prefix, .attend_rows = own##_attend_rows, .value_weights = own##_value_weights,     \
    .sample = memory##_sample, .column_sums = own##_column_sums, .output_norms = own##_output_norms

extern const backend backend_ref, backend_cpu, backend_cpu_bf16x3, backend_cpu_bf16, backend_cuda, backend_cuda_bf16x3,
    backend_cuda_bf16; // those of cuda only if it was built

// Returns the backend of that name that computes in float32, or NULL. backend_list lists all, ended by NULL.
const backend *backend_find(const char *name);
// For messages when backend_find returns NULL: why a known backend is not in this program, or an empty text.
const char *backend_absence(const char *name);
// Like backend_find, for any precision of products; `compute` NULL means "f32".
const backend *backend_find_compute(const char *name, const char *compute);
extern const backend *const backend_list[];

// Calls `alloc` for what a pass cannot do without: lack of memory ends the program (formats/need.h). `what` as there.
dev backend_memory(backend_device *on, size_t n_floats, const char *what);

// Loads a matrix of floats w [out, in] with matrix_load.
dev_matrix backend_matrix(backend_device *on, const float *w, uint32_t out, uint32_t in, bool keep_rows);

// For backends: records a failed operation, on any thread. Only the first failure is kept.
void backend_fail(backend_device *on, kvb_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));
