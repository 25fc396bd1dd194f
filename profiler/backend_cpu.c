// The CPU backend: oneDNN for matrix products, OpenMP over heads and rows, loops that the compiler vectorises per CPU.
//
// Results have the same bits for any number of threads and any batch of questions: work is cut into tasks by shape alone, each
// task is computed by one thread in a fixed order, and no product has fewer than GEMM_MIN_ROWS rows (see linalg.h).
#include "profiler/backend_host.h"
#include "profiler/linalg.h"
#include "profiler/model.h"
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum {
    QUERY_TILE = 256, // context rows per attention task
    KEY_TILE = 512,   // keys per step of the online softmax: tile of scores 512 KiB, inside the L2 cache
    ROW_TILE = 16,    // decoded rows per attention task, times the heads of a group
    VALUE_TILE = 512, // context rows per step of value_weights
};

// Scratch of one thread; sized by cpu_reserve.
typedef struct scratch {
    float *scores;            // the largest of [rows*group, T + tail], [QUERY_TILE, KEY_TILE] and [VALUE_TILE, d]
    float *queries;           // [rows*group, d]
    float *outputs;           // [max(QUERY_TILE, rows*group), d]
    float *row_max, *row_sum; // [max(QUERY_TILE, rows*group)]
} scratch;

static struct {
    scratch *threads;
    int n_threads;
    float *pad_in, *pad_out; // [GEMM_MIN_ROWS, matrix_dim]
    void *block;
} pool;

// Weights stand as [in, out]: with few rows oneDNN is a third faster than on [out, in], and as fast with many. The embedding keeps
// its rows, for `gather`, and its product is bound by memory either way.
static dev_matrix cpu_matrix_upload(const float *w, uint32_t out, uint32_t in, bool keep_rows)
{
    dev_matrix m = {host_alloc((size_t)out * in).address, out, in, !keep_rows};
    if (!m.address) return m;
    if (keep_rows) {
        memcpy(m.address, w, (size_t)out * in * sizeof(float));
        return m;
    }
    enum { BLOCK = 32 };
#pragma omp parallel for schedule(static)
    for (uint32_t i0 = 0; i0 < in; i0 += BLOCK)
        for (uint32_t o0 = 0; o0 < out; o0 += BLOCK)
            for (uint32_t i = i0; i < in && i < i0 + BLOCK; i++)
                for (uint32_t o = o0; o < out && o < o0 + BLOCK; o++)
                    m.address[(size_t)i * out + o] = w[(size_t)o * in + i];
    return m;
}

static size_t max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

// How cpu_reserve cuts its block; in floats.
typedef struct scratch_sizes {
    size_t rows, lines, scores; // of the arrays in struct scratch
    size_t each, pads;          // of one thread; of both pads
} scratch_sizes;

static scratch_sizes sizes_of(const backend_limits *limits)
{
    size_t group = limits->shape.n_heads / limits->shape.n_kv_heads, d = limits->shape.head_dim;
    scratch_sizes s = {.rows = max_size(ROW_TILE * group, GEMM_MIN_ROWS)};
    s.lines = max_size(QUERY_TILE, s.rows);
    s.scores = max_size(s.rows * ((size_t)limits->tokens + limits->tail), (size_t)QUERY_TILE * KEY_TILE);
    s.scores = max_size(s.scores, VALUE_TILE * d);
    s.each = s.scores + s.rows * d + s.lines * d + 2 * s.lines + 64;
    s.pads = 2 * (size_t)GEMM_MIN_ROWS * limits->matrix_dim;
    return s;
}

static uint64_t cpu_scratch_bytes(const backend_limits *limits)
{
    scratch_sizes s = sizes_of(limits);
    return (s.each * (size_t)omp_get_max_threads() + s.pads) * sizeof(float);
}

static bool cpu_reserve(const backend_limits *limits)
{
    free(pool.threads);
    free(pool.block);
    memset(&pool, 0, sizeof pool);
    if (!limits->tokens) return true;
    size_t d = limits->shape.head_dim;
    scratch_sizes sizes = sizes_of(limits);
    pool.n_threads = omp_get_max_threads();
    pool.threads = calloc((size_t)pool.n_threads, sizeof *pool.threads);
    pool.block = host_alloc(sizes.each * (size_t)pool.n_threads + sizes.pads).address;
    if (!pool.threads || !pool.block) return false;
    float *p = pool.block;
    pool.pad_in = p;
    pool.pad_out = p + sizes.pads / 2;
    p += sizes.pads;
    for (int t = 0; t < pool.n_threads; t++, p += sizes.each) {
        scratch *s = &pool.threads[t];
        s->scores = p;
        s->queries = s->scores + sizes.scores;
        s->outputs = s->queries + sizes.rows * d;
        s->row_max = s->outputs + sizes.lines * d;
        s->row_sum = s->row_max + sizes.lines;
    }
    return true;
}

static void cpu_gather(dev y, dev_matrix table, const int32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        memcpy(y.address + (size_t)i * table.in, table.address + (size_t)ids[i] * table.in, table.in * sizeof(float));
}

SIMD_CLONES static void rms_norm_row(float *y, const float *x, const float *weight, uint32_t width, float eps)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (uint32_t c = 0; c < width; c++) sum += x[c] * x[c];
    float scale = 1.0f / sqrtf(sum / (float)width + eps);
#pragma omp simd
    for (uint32_t c = 0; c < width; c++) y[c] = x[c] * scale * weight[c];
}

static void cpu_rms_norm(dev y, dev x, dev weight, uint32_t n, uint32_t width, float eps)
{
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        rms_norm_row(y.address + (size_t)i * width, x.address + (size_t)i * width, weight.address, width, eps);
}

static void matmul_rows(float *y, const float *x, dev_matrix w, uint32_t n, bool accumulate)
{
    gemm(false, !w.transposed, n, w.out, w.in, 1.0f, x, w.in, w.address, w.transposed ? w.out : w.in,
         accumulate ? 1.0f : 0.0f, y, w.out);
}

static void cpu_matmul(dev y, dev x, dev_matrix w, uint32_t n, bool accumulate)
{
    if (n >= GEMM_MIN_ROWS) {
        matmul_rows(y.address, x.address, w, n, accumulate);
        return;
    }
    size_t in = (size_t)n * w.in, out = (size_t)n * w.out;
    memcpy(pool.pad_in, x.address, in * sizeof(float));
    memset(pool.pad_in + in, 0, ((size_t)GEMM_MIN_ROWS * w.in - in) * sizeof(float));
    if (accumulate) {
        memcpy(pool.pad_out, y.address, out * sizeof(float));
        memset(pool.pad_out + out, 0, ((size_t)GEMM_MIN_ROWS * w.out - out) * sizeof(float));
    }
    matmul_rows(pool.pad_out, pool.pad_in, w, GEMM_MIN_ROWS, accumulate);
    memcpy(y.address, pool.pad_out, out * sizeof(float));
}

// silu(g) = g / (1 + exp(-g)), with the exponential of a negative number only, so that it cannot overflow.
SIMD_CLONES static void swiglu_range(float *gate, const float *up, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float g = gate[i], e = softmax_exp(-fabsf(g));
        gate[i] = g * (g >= 0 ? 1.0f : e) / (1.0f + e) * up[i];
    }
}

static void cpu_swiglu(dev gate, dev up, size_t n_floats)
{
    enum { CHUNK = 16384 };
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n_floats; i += CHUNK)
        swiglu_range(gate.address + i, up.address + i, n_floats - i < CHUNK ? n_floats - i : CHUNK);
}

static void cpu_rope(dev y, dev x, dev cos_sin, const uint32_t *positions, uint32_t n, uint32_t heads, uint32_t d,
                     uint32_t rope_dim)
{
    uint32_t half = rope_dim / 2;
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++) {
        const float *angle = cos_sin.address + (size_t)positions[i] * rope_dim;
        for (uint32_t h = 0; h < heads; h++) {
            const float *in = x.address + ((size_t)i * heads + h) * d;
            float *out = y.address + ((size_t)i * heads + h) * d;
            for (uint32_t p = 0; p < half; p++) {
                float a = in[p], b = in[p + half], c = angle[2 * p], s = angle[2 * p + 1];
                out[p] = a * c - b * s;
                out[p + half] = b * c + a * s;
            }
            for (uint32_t c = rope_dim; c < d; c++) out[c] = in[c];
        }
    }
}

static void cpu_store_prefix(dev cache, uint32_t n_tokens, uint32_t first, dev values, uint32_t n, uint32_t n_kv_heads,
                             uint32_t d)
{
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t g = 0; g < n_kv_heads; g++)
            memcpy(cache.address + ((size_t)g * n_tokens + first + i) * d,
                   values.address + ((size_t)i * n_kv_heads + g) * d, d * sizeof(float));
}

static void cpu_store_tail(dev cache, uint32_t capacity, const decode_row *rows, dev values, uint32_t n,
                           uint32_t n_kv_heads, uint32_t d)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t g = 0; g < n_kv_heads; g++)
            memcpy(cache.address + (((size_t)rows[i].question * n_kv_heads + g) * capacity + rows[i].tail) * d,
                   values.address + ((size_t)i * n_kv_heads + g) * d, d * sizeof(float));
}

SIMD_CLONES static float max_of(const float *x, size_t n)
{
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (size_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

// x = exp(x - top); returns the sum.
SIMD_CLONES static float exp_minus(float *x, size_t n, float top)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) {
        float e = softmax_exp(x[i] - top);
        x[i] = e;
        sum += e;
    }
    return sum;
}

SIMD_CLONES static float dot(const float *a, const float *b, size_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

SIMD_CLONES static void scale_row(float *x, size_t n, float factor)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) x[i] *= factor;
}

// One step of the online softmax: turns a tile of scores into exponentials relative to each row's running maximum, and rescales what
// the rows have gathered so far. Row r of the tile is context row `row + r` and sees the first row + r + 1 - key of the tile's keys.
static void softmax_tile(scratch *s, uint32_t rows, uint32_t keys, uint32_t row, uint32_t key, uint32_t d)
{
    for (uint32_t r = 0; r < rows; r++) {
        float *line = s->scores + (size_t)r * keys;
        uint32_t seen = row + r + 1 > key ? row + r + 1 - key : 0;
        seen = seen < keys ? seen : keys;
        memset(line + seen, 0, (keys - seen) * sizeof(float));
        if (!seen) continue;
        float top = max_of(line, seen);
        if (top > s->row_max[r]) {
            float shrink = softmax_exp(s->row_max[r] - top);
            scale_row(s->outputs + (size_t)r * d, d, shrink);
            s->row_sum[r] *= shrink;
            s->row_max[r] = top;
        }
        s->row_sum[r] += exp_minus(line, seen, s->row_max[r]);
    }
}

// Context rows [row, row + rows) of one query head, the queries at q and the outputs at o with a step of ld floats.
static void attend_tile(scratch *s, float *o, const float *q, size_t ld, const float *k, const float *v, uint32_t row,
                        uint32_t rows, uint32_t d)
{
    uint32_t padded = rows < GEMM_MIN_ROWS ? GEMM_MIN_ROWS : rows;
    const float *queries = q;
    size_t ld_queries = ld;
    if (padded > rows) {
        memset(s->queries, 0, (size_t)padded * d * sizeof(float));
        for (uint32_t r = 0; r < rows; r++) memcpy(s->queries + (size_t)r * d, q + r * ld, d * sizeof(float));
        queries = s->queries;
        ld_queries = d;
    }
    memset(s->outputs, 0, (size_t)padded * d * sizeof(float));
    for (uint32_t r = 0; r < padded; r++) s->row_max[r] = -INFINITY, s->row_sum[r] = 0;
    uint32_t end = row + rows;
    for (uint32_t key = 0; key < end; key += KEY_TILE) {
        uint32_t keys = end - key < KEY_TILE ? end - key : KEY_TILE;
        gemm(false, true, padded, keys, d, 1.0f / sqrtf((float)d), queries, ld_queries, k + (size_t)key * d, d, 0.0f,
             s->scores, keys);
        softmax_tile(s, rows, keys, row, key, d);
        gemm(false, false, padded, d, keys, 1.0f, s->scores, keys, v + (size_t)key * d, d, 1.0f, s->outputs, d);
    }
    for (uint32_t r = 0; r < rows; r++) {
        float inverse = 1.0f / s->row_sum[r];
        for (uint32_t c = 0; c < d; c++) o[r * ld + c] = s->outputs[(size_t)r * d + c] * inverse;
    }
}

static void cpu_attend_prefix(dev o, dev q, const prefix_kv *kv, uint32_t first, uint32_t n, attention_shape s)
{
    uint32_t d = s.head_dim, group = s.n_heads / s.n_kv_heads, tiles = (n + QUERY_TILE - 1) / QUERY_TILE;
    size_t ld = (size_t)s.n_heads * d;
    // The last tiles see the most keys: they go first, so that no thread is left with a long one at the end.
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (uint32_t t = 0; t < tiles; t++)
        for (uint32_t h = 0; h < s.n_heads; h++) {
            uint32_t at = (tiles - 1 - t) * QUERY_TILE, rows = n - at < QUERY_TILE ? n - at : QUERY_TILE;
            size_t head = (size_t)(h / group) * kv->n_tokens * d, offset = at * ld + (size_t)h * d;
            attend_tile(&pool.threads[omp_get_thread_num()], o.address + offset, q.address + offset, ld,
                        kv->k.address + head, kv->v.address + head, first + at, rows, d);
        }
}

// best[j] = max(best[j], max over the group's heads of e_h[j] * inverse_h * w_h[j])
SIMD_CLONES static void raise_importance(float *best, const float *e, size_t ld, const float *inverse, const float *w,
                                         uint32_t group, uint32_t T)
{
    for (uint32_t h = 0; h < group; h++) {
        const float *line = e + h * ld, *weight = w + (size_t)h * T;
        float scale = inverse[h];
#pragma omp simd
        for (uint32_t j = 0; j < T; j++) {
            float importance = line[j] * scale * weight[j];
            best[j] = importance > best[j] ? importance : best[j];
        }
    }
}

typedef struct rows_job {
    dev o, q;
    const prefix_kv *kv;
    const tail_kv *tails;
    const decode_row *rows;
    const oracle_view *oracle;
    attention_shape shape;
} rows_job;

// Scores against the tail, softmax over context and tail together. Line r of the tile is query head r % group of row r / group;
// its first T scores are there already. Leaves exponentials in place and 1 / sum in row_sum.
static void softmax_rows(scratch *s, const rows_job *job, uint32_t first, uint32_t lines, uint32_t g, size_t ld)
{
    uint32_t d = job->shape.head_dim, group = job->shape.n_heads / job->shape.n_kv_heads, T = job->kv->n_tokens;
    float scale = 1.0f / sqrtf((float)d);
    for (uint32_t r = 0; r < lines; r++) {
        const decode_row *row = &job->rows[first + r / group];
        const float *k =
            job->tails->k.address + ((size_t)row->question * job->shape.n_kv_heads + g) * job->tails->capacity * d;
        float *line = s->scores + r * ld, *tail = line + T;
        for (uint32_t t = 0; t <= row->tail; t++)
            tail[t] = dot(s->queries + (size_t)r * d, k + (size_t)t * d, d) * scale;
        float top = fmaxf(max_of(line, T), max_of(tail, row->tail + 1));
        float sum = exp_minus(line, T, top);
        sum += exp_minus(tail, row->tail + 1, top);
        s->row_sum[r] = 1.0f / sum;
    }
}

// Rows [first, first + n), n <= ROW_TILE, of KV head g.
static void attend_row_tile(scratch *s, const rows_job *job, uint32_t first, uint32_t n, uint32_t g)
{
    uint32_t d = job->shape.head_dim, H = job->shape.n_heads, G = job->shape.n_kv_heads, group = H / G,
             T = job->kv->n_tokens;
    uint32_t lines = n * group, padded = lines < GEMM_MIN_ROWS ? GEMM_MIN_ROWS : lines;
    size_t ld = (size_t)T + job->tails->capacity, head = (size_t)g * job->kv->n_tokens * d;
    for (uint32_t r = 0; r < n; r++)
        memcpy(s->queries + (size_t)r * group * d, job->q.address + ((size_t)(first + r) * H + (size_t)g * group) * d,
               (size_t)group * d * sizeof(float));
    memset(s->queries + (size_t)lines * d, 0, (size_t)(padded - lines) * d * sizeof(float));
    gemm(false, true, padded, T, d, 1.0f / sqrtf((float)d), s->queries, d, job->kv->k.address + head, d, 0.0f,
         s->scores, ld);
    softmax_rows(s, job, first, lines, g, ld);
    for (uint32_t r = 0; r < n; r++) {
        const decode_row *row = &job->rows[first + r];
        if (row->observed && job->oracle->weights.address)
            raise_importance(job->oracle->best.address + row->question * job->oracle->best_stride + (size_t)g * T,
                             s->scores + (size_t)r * group * ld, ld, s->row_sum + r * group,
                             job->oracle->weights.address + (size_t)g * group * T, group, T);
    }
    gemm(false, false, padded, d, T, 1.0f, s->scores, ld, job->kv->v.address + head, d, 0.0f, s->outputs, d);
    for (uint32_t r = 0; r < lines; r++) {
        const decode_row *row = &job->rows[first + r / group];
        const float *v = job->tails->v.address + ((size_t)row->question * G + g) * job->tails->capacity * d;
        const float *tail = s->scores + r * ld + T;
        float *out = s->outputs + (size_t)r * d;
        for (uint32_t t = 0; t <= row->tail; t++)
            for (uint32_t c = 0; c < d; c++) out[c] += tail[t] * v[(size_t)t * d + c];
        float *o = job->o.address + ((size_t)(first + r / group) * H + (size_t)g * group + r % group) * d;
        for (uint32_t c = 0; c < d; c++) o[c] = out[c] * s->row_sum[r];
    }
}

// Rows are cut into tasks of about ROW_TILE rows that never split a question, since its rows share one running maximum.
static uint32_t task_end(const decode_row *rows, uint32_t first, uint32_t n)
{
    uint32_t end = first;
    while (end < n) {
        uint32_t next = end + 1;
        while (next < n && rows[next].question == rows[end].question) next++;
        if (end > first && next - first > ROW_TILE) break;
        end = next;
    }
    return end;
}

static void cpu_attend_rows(dev o, dev q, const prefix_kv *kv, const tail_kv *tails, const decode_row *rows, uint32_t n,
                            attention_shape s, const oracle_view *oracle)
{
    rows_job job = {o, q, kv, tails, rows, oracle, s};
#pragma omp parallel
#pragma omp single
    for (uint32_t first = 0, end; first < n; first = end) {
        end = task_end(rows, first, n);
        for (uint32_t g = 0; g < s.n_kv_heads; g++)
#pragma omp task firstprivate(first, end, g) shared(job)
            for (uint32_t at = first; at < end; at += ROW_TILE)
                attend_row_tile(&pool.threads[omp_get_thread_num()], &job, at,
                                end - at < ROW_TILE ? end - at : ROW_TILE, g);
    }
}

static void cpu_value_weights(dev w, const prefix_kv *kv, dev root, attention_shape s)
{
    uint32_t d = s.head_dim, group = s.n_heads / s.n_kv_heads, T = kv->n_tokens;
    double total = 0;
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t h = 0; h < s.n_heads; h++) {
        scratch *mine = &pool.threads[omp_get_thread_num()];
        const float *v = kv->v.address + (size_t)(h / group) * kv->n_tokens * d;
        for (uint32_t at = 0; at < T; at += VALUE_TILE) {
            uint32_t rows = T - at < VALUE_TILE ? T - at : VALUE_TILE;
            gemm(false, true, rows, d, d, 1.0f, v + (size_t)at * d, d, root.address + (size_t)h * d * d, d, 0.0f,
                 mine->scores, d);
            for (uint32_t r = 0; r < rows; r++) {
                const float *y = mine->scores + (size_t)r * d;
                w.address[(size_t)h * T + at + r] = sqrtf(dot(y, y, d));
            }
        }
    }
    for (size_t i = 0; i < (size_t)s.n_heads * T; i++) // one order whatever the threads
        total += w.address[i];
    float scale = (float)(1.0 / (total + 1e-9));
#pragma omp parallel for schedule(static)
    for (uint32_t h = 0; h < s.n_heads; h++) scale_row(w.address + (size_t)h * T, T, scale);
}

// The softmax denominators of context rows [row, row + rows) of one query head, as logarithms.
static void row_log_tile(scratch *s, float *row_log, const float *q, size_t ld, const float *k, uint32_t row,
                         uint32_t rows, uint32_t d)
{
    for (uint32_t r = 0; r < rows; r++) s->row_max[r] = -INFINITY, s->row_sum[r] = 0;
    uint32_t end = row + rows;
    for (uint32_t key = 0; key < end; key += KEY_TILE) {
        uint32_t keys = end - key < KEY_TILE ? end - key : KEY_TILE;
        gemm(false, true, rows, keys, d, 1.0f / sqrtf((float)d), q, ld, k + (size_t)key * d, d, 0.0f, s->scores, keys);
        softmax_tile(s, rows, keys, row, key, 0); // no outputs to rescale
    }
    for (uint32_t r = 0; r < rows; r++) row_log[row + r] = s->row_max[r] + logf(s->row_sum[r]);
}

// columns[j] += exp(x[j] - top)
SIMD_CLONES static void add_exp_minus(float *columns, const float *x, size_t n, float top)
{
#pragma omp simd
    for (size_t j = 0; j < n; j++) columns[j] += softmax_exp(x[j] - top);
}

// Column sums of keys [key, key + keys) of one query head. Each tile of rows is summed on its own first: with 100,000 rows one
// running float would lose digits.
static void column_tile(scratch *s, float *sums, const float *row_log, const float *q, size_t ld, const float *k,
                        uint32_t key, uint32_t keys, uint32_t T, uint32_t d)
{
    float *part = s->outputs; // QUERY_TILE * d floats, KEY_TILE are needed
    memset(sums + key, 0, keys * sizeof(float));
    for (uint32_t row = key / QUERY_TILE * QUERY_TILE; row < T; row += QUERY_TILE) {
        uint32_t rows = T - row < QUERY_TILE ? T - row : QUERY_TILE;
        gemm(false, true, rows, keys, d, 1.0f / sqrtf((float)d), q + row * ld, ld, k + (size_t)key * d, d, 0.0f,
             s->scores, keys);
        memset(part, 0, keys * sizeof(float));
        for (uint32_t r = 0; r < rows; r++) {
            uint32_t seen = row + r + 1 > key ? row + r + 1 - key : 0;
            add_exp_minus(part, s->scores + (size_t)r * keys, seen < keys ? seen : keys, row_log[row + r]);
        }
        for (uint32_t j = 0; j < keys; j++) sums[key + j] += part[j];
    }
}

static void cpu_column_sums(dev sums, dev row_log, dev q, const prefix_kv *kv, attention_shape s)
{
    uint32_t d = s.head_dim, group = s.n_heads / s.n_kv_heads, T = kv->n_tokens;
    uint32_t query_tiles = (T + QUERY_TILE - 1) / QUERY_TILE, key_tiles = (T + KEY_TILE - 1) / KEY_TILE;
    size_t ld = (size_t)s.n_heads * d;
#pragma omp parallel
    {
        scratch *mine = &pool.threads[omp_get_thread_num()];
        // Long tasks first: the last rows see the most keys, the first keys are seen by the most rows.
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (uint32_t t = 0; t < query_tiles; t++)
            for (uint32_t h = 0; h < s.n_heads; h++) {
                uint32_t row = (query_tiles - 1 - t) * QUERY_TILE, rows = T - row < QUERY_TILE ? T - row : QUERY_TILE;
                row_log_tile(mine, row_log.address + (size_t)h * T, q.address + row * ld + (size_t)h * d, ld,
                             kv->k.address + (size_t)(h / group) * T * d, row, rows, d);
            }
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (uint32_t t = 0; t < key_tiles; t++)
            for (uint32_t h = 0; h < s.n_heads; h++) {
                uint32_t key = t * KEY_TILE, keys = T - key < KEY_TILE ? T - key : KEY_TILE;
                column_tile(mine, sums.address + (size_t)h * T, row_log.address + (size_t)h * T,
                            q.address + (size_t)h * d, ld, kv->k.address + (size_t)(h / group) * T * d, key, keys, T,
                            d);
            }
    }
}

SIMD_CLONES static float absolute_sum(const float *x, size_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) sum += fabsf(x[i]);
    return sum;
}

static void cpu_output_norms(dev norms, const prefix_kv *kv, dev_matrix wo, attention_shape s)
{
    uint32_t d = s.head_dim, group = s.n_heads / s.n_kv_heads, T = kv->n_tokens;
    uint32_t tiles = (T + QUERY_TILE - 1) / QUERY_TILE;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (uint32_t h = 0; h < s.n_heads; h++)
        for (uint32_t t = 0; t < tiles; t++) {
            float *product = pool.threads[omp_get_thread_num()].scores; // [QUERY_TILE, KEY_TILE]
            uint32_t row = t * QUERY_TILE, rows = T - row < QUERY_TILE ? T - row : QUERY_TILE;
            const float *v = kv->v.address + ((size_t)(h / group) * T + row) * d;
            float *out = norms.address + (size_t)h * T + row;
            memset(out, 0, rows * sizeof(float));
            for (uint32_t c = 0; c < wo.out; c += KEY_TILE) {
                uint32_t columns = wo.out - c < KEY_TILE ? wo.out - c : KEY_TILE;
                const float *w = wo.transposed ? wo.address + (size_t)h * d * wo.out + c
                                               : wo.address + (size_t)c * wo.in + (size_t)h * d;
                gemm(false, !wo.transposed, rows, columns, d, 1.0f, v, d, w, wo.transposed ? wo.out : wo.in, 0.0f,
                     product, columns);
                for (uint32_t r = 0; r < rows; r++) out[r] += absolute_sum(product + (size_t)r * columns, columns);
            }
        }
}

const backend backend_cpu = {
    .name = "cpu",
    .summary = "oneDNN and OpenMP, float32",
    .open = host_open,
    .check = host_check,
    .alloc = host_alloc,
    .release = host_release,
    .upload = host_upload,
    .download = host_download,
    .copy = host_copy,
    .clear = host_clear,
    .host_view = host_view,
    .matrix_upload = cpu_matrix_upload,
    .matrix_release = host_matrix_release,
    .reserve = cpu_reserve,
    .scratch_bytes = cpu_scratch_bytes,
    .free_bytes = host_free_bytes,
    .gather = cpu_gather,
    .rms_norm = cpu_rms_norm,
    .matmul = cpu_matmul,
    .swiglu = cpu_swiglu,
    .rope = cpu_rope,
    .store_prefix = cpu_store_prefix,
    .store_tail = cpu_store_tail,
    .attend_prefix = cpu_attend_prefix,
    .attend_rows = cpu_attend_rows,
    .value_weights = cpu_value_weights,
    .column_sums = cpu_column_sums,
    .output_norms = cpu_output_norms,
};
