// What the oracle and some scorers need beside attention itself: norms of projected values, column sums of attention.
// In float32 whatever the precision of the products: they are computed once per context.
#include "profiler/backend/backend_cpu.h"
#include "profiler/backend/linalg.h"
#include <math.h>
#include <omp.h>
#include <string.h>

// ||y - point|| of [d], point NULL: zeros.
static float distance_from(const float *y, const float *point, uint32_t d)
{
    float square = 0;
    if (!point) return sqrtf(loop_dot(y, y, d));
    for (uint32_t c = 0; c < d; c++) square += (y[c] - point[c]) * (y[c] - point[c]);
    return sqrtf(square);
}

void cpu_value_weights(backend_device *on, dev w, const prefix_kv *kv, dev root, dev centre, attention_shape s)
{
    uint32_t d = s.head_dim, group = s.n_heads / s.n_kv_heads, T = kv->n_tokens;
    double total = 0;
    if (!cpu_fits(on, T, s)) return;
#pragma omp parallel for schedule(dynamic, 1) num_threads(cpu_of(on)->n_threads)
    for (uint32_t h = 0; h < s.n_heads; h++) {
        scratch *mine = &cpu_of(on)->threads[omp_get_thread_num()];
        const float *v = kv->v.address + (size_t)(h / group) * kv->n_tokens * d, *point = NULL;
        if (centre.address) {
            point = mine->outputs;
            for (uint32_t r = 0; r < d; r++)
                mine->outputs[r] = loop_dot(root.address + ((size_t)h * d + r) * d, centre.address + (size_t)h * d, d);
        }
        for (uint32_t at = 0; at < T; at += VALUE_TILE) {
            uint32_t rows = T - at < VALUE_TILE ? T - at : VALUE_TILE;
            cpu_gemm(mine, false, true, rows, d, d, 1.0f, v + (size_t)at * d, d, root.address + (size_t)h * d * d, d,
                     0.0f, mine->scores, d);
            for (uint32_t r = 0; r < rows; r++) {
                const float *y = mine->scores + (size_t)r * d;
                w.address[(size_t)h * T + at + r] = distance_from(y, point, d);
            }
        }
    }
    for (size_t i = 0; i < (size_t)s.n_heads * T; i++) // one order whatever the threads
        total += w.address[i];
    float scale = (float)(1.0 / (total + 1e-9));
#pragma omp parallel for schedule(static)
    for (uint32_t h = 0; h < s.n_heads; h++) loop_scale(w.address + (size_t)h * T, T, scale);
}

// The softmax denominators of context rows [row, row + rows) of one query head, as logarithms to base 2.
static void row_log_tile(scratch *s, attention_shape shape, uint32_t h, float *row_log, const float *q, const float *k,
                         uint32_t row, uint32_t rows)
{
    uint32_t d = shape.head_dim;
    size_t ld = (size_t)shape.n_heads * d;
    for (uint32_t r = 0; r < rows; r++) s->row_max[r] = -INFINITY, s->row_sum[r] = 0;
    uint32_t end = row + rows;
    for (uint32_t key = 0; key < end; key += KEY_TILE) {
        uint32_t keys = end - key < KEY_TILE ? end - key : KEY_TILE;
        cpu_gemm(s, false, true, rows, keys, d, cpu_score_scale(d), q, ld, k + (size_t)key * d, d, 0.0f, s->scores,
                 keys);
        for (uint32_t r = 0; r < rows; r++) { // no outputs to rescale
            uint32_t below = row + r + 1 > key ? row + r + 1 - key : 0, seen = below < keys ? below : keys;
            float *line = s->scores + (size_t)r * keys;
            cpu_bend_scores(shape, line, seen, row + r, key);
            cpu_softmax_line(s, line, r, seen, 0);
        }
    }
    for (uint32_t r = 0; r < rows; r++)
        row_log[row + r] = shape.sinks.address
                               ? s->row_max[r] - log2f(cpu_inverse_sum(shape, h, s->row_max[r], s->row_sum[r]))
                               : s->row_max[r] + log2f(s->row_sum[r]);
}

// Column sums of keys [key, key + keys) of one query head over the rows from `first` on. Each tile of rows is summed on
// its own first: with 100,000 rows one running float would lose digits.
static void column_tile(scratch *s, attention_shape shape, float *sums, const float *row_log, const float *q,
                        const float *k, uint32_t key, uint32_t keys, uint32_t first, uint32_t T)
{
    uint32_t d = shape.head_dim;
    size_t ld = (size_t)shape.n_heads * d;
    float *part = s->outputs; // KEY_TILE
    memset(sums + key, 0, keys * sizeof(float));
    for (uint32_t row = (key > first ? key : first) / QUERY_TILE * QUERY_TILE; row < T; row += QUERY_TILE) {
        uint32_t rows = T - row < QUERY_TILE ? T - row : QUERY_TILE;
        cpu_gemm(s, false, true, rows, keys, d, cpu_score_scale(d), q + row * ld, ld, k + (size_t)key * d, d, 0.0f,
                 s->scores, keys);
        memset(part, 0, keys * sizeof(float));
        for (uint32_t r = first > row ? first - row : 0; r < rows; r++) {
            uint32_t below = row + r + 1 > key ? row + r + 1 - key : 0, seen = below < keys ? below : keys;
            float *line = s->scores + (size_t)r * keys;
            cpu_bend_scores(shape, line, seen, row + r, key);
            loop_add_exp2_minus(part, line, seen, row_log[row + r]);
        }
        for (uint32_t j = 0; j < keys; j++) sums[key + j] += part[j];
    }
}

void cpu_column_sums(backend_device *on, dev sums, dev row_log, dev q, const prefix_kv *kv, uint32_t first,
                     attention_shape s)
{
    uint32_t d = s.head_dim, group = s.n_heads / s.n_kv_heads, T = kv->n_tokens;
    uint32_t query_tiles = (T + QUERY_TILE - 1) / QUERY_TILE, key_tiles = (T + KEY_TILE - 1) / KEY_TILE;
    size_t ld = (size_t)s.n_heads * d;
    if (!cpu_fits(on, T, s)) return;
#pragma omp parallel num_threads(cpu_of(on)->n_threads)
    {
        scratch *mine = &cpu_of(on)->threads[omp_get_thread_num()];
        // Long tasks first: the last rows see the most keys, the first keys are seen by the most rows.
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (uint32_t t = 0; t < query_tiles - first / QUERY_TILE; t++)
            for (uint32_t h = 0; h < s.n_heads; h++) {
                uint32_t row = (query_tiles - 1 - t) * QUERY_TILE, rows = T - row < QUERY_TILE ? T - row : QUERY_TILE;
                row_log_tile(mine, s, h, row_log.address + (size_t)h * T, q.address + row * ld + (size_t)h * d,
                             kv->k.address + (size_t)(h / group) * T * d, row, rows);
            }
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (uint32_t t = 0; t < key_tiles; t++)
            for (uint32_t h = 0; h < s.n_heads; h++) {
                uint32_t key = t * KEY_TILE, keys = T - key < KEY_TILE ? T - key : KEY_TILE;
                column_tile(mine, s, sums.address + (size_t)h * T, row_log.address + (size_t)h * T,
                            q.address + (size_t)h * d, kv->k.address + (size_t)(h / group) * T * d, key, keys, first,
                            T);
            }
    }
}

void cpu_output_norms(backend_device *on, dev norms, const prefix_kv *kv, dev_matrix wo, attention_shape s)
{
    uint32_t d = s.head_dim, group = s.n_heads / s.n_kv_heads, T = kv->n_tokens;
    uint32_t tiles = (T + QUERY_TILE - 1) / QUERY_TILE;
    if (!cpu_fits(on, T, s)) return;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(cpu_of(on)->n_threads)
    for (uint32_t h = 0; h < s.n_heads; h++)
        for (uint32_t t = 0; t < tiles; t++) {
            scratch *mine = &cpu_of(on)->threads[omp_get_thread_num()];
            float *part = mine->scores, *weights = mine->queries; // [QUERY_TILE, QUERY_TILE], [QUERY_TILE, d]
            uint32_t row = t * QUERY_TILE, rows = T - row < QUERY_TILE ? T - row : QUERY_TILE;
            const float *v = kv->v.address + ((size_t)(h / group) * T + row) * d;
            float *out = norms.address + (size_t)h * T + row;
            memset(out, 0, rows * sizeof(float));
            for (uint32_t c = 0; c < wo.out; c += QUERY_TILE) {
                uint32_t columns = wo.out - c < QUERY_TILE ? wo.out - c : QUERY_TILE;
                cpu_matrix_rows(weights, &wo, c, columns, h * d, d);
                cpu_gemm(mine, false, true, rows, columns, d, 1.0f, v, d, weights, d, 0.0f, part, columns);
                for (uint32_t r = 0; r < rows; r++) out[r] += loop_absolute_sum(part + (size_t)r * columns, columns);
            }
        }
}
