// The prefill's attention: tiles of rows of the context meet the keys that they see, tile by tile.
#include "profiler/backend/backend_cpu_attention.h"
#include "profiler/backend/linalg.h"
#include "profiler/backend/meter.h"
#include "profiler/backend/packed_tiles.h"
#include <math.h>
#include <omp.h>
#include <string.h>

// The first key that a row at `position` sees.
static uint32_t first_key(attention_shape s, uint32_t position)
{
    return s.window && position >= s.window ? position + 1 - s.window : 0;
}

// How many of a tile's keys context row `row` sees; the tile begins with key `key`.
static uint32_t keys_seen(uint32_t row, uint32_t key, uint32_t keys)
{
    uint32_t seen = row + 1 > key ? row + 1 - key : 0;
    return seen < keys ? seen : keys;
}

typedef struct prefix_job {
    cpu_device *on;
    precision p;
    dev o, q;
    const prefix_kv *kv;
    uint32_t first; // context row of the first query
    attention_shape shape;
    block_plan full, last; // for whole tasks, and for those of the last rows
} prefix_job;

// Queries [at, at + rows) of `heads` heads from `head` on, which share keys and values. Head by head they are `padded`
// lines.
typedef struct row_tile {
    uint32_t at, rows, padded, head, heads;
} row_tile;

static uint32_t task_heads(attention_shape s)
{
    return tiles_available() ? s.n_heads / s.n_kv_heads : 1;
}

static uint32_t task_rows(attention_shape s)
{
    if (!tiles_available()) return QUERY_TILE;
    uint32_t rows = TASK_LINES / task_heads(s) / BLOCK_LINES * BLOCK_LINES;
    return rows ? rows : BLOCK_LINES;
}

uint32_t cpu_max_lines(attention_shape s)
{
    uint32_t prefill = task_rows(s) * task_heads(s), decoding = cpu_row_group() * (s.n_heads / s.n_kv_heads);
    uint32_t attention = prefill > decoding ? prefill : decoding;
    return attention > QUERY_TILE ? attention : QUERY_TILE;
}

static uint32_t padded_rows(precision p, uint32_t rows)
{
    if (operand_is_plain(p)) return rows < GEMM_MIN_ROWS ? GEMM_MIN_ROWS : rows;
    return cpu_round_up(rows, PRODUCT_ROWS_MAX);
}

static void prefix_tile_f32(scratch *s, const prefix_job *job, const float *q, uint32_t row, uint32_t rows, uint32_t g)
{
    uint32_t d = job->shape.head_dim, padded = padded_rows(PRECISION_F32, rows), end = row + rows;
    const float *k = job->kv->k.address + (size_t)g * job->kv->n_tokens * d,
                *v = job->kv->v.address + (size_t)g * job->kv->n_tokens * d;
    size_t ld = (size_t)job->shape.n_heads * d;
    if (padded > rows) {
        memset(s->queries, 0, (size_t)padded * d * sizeof(float));
        for (uint32_t r = 0; r < rows; r++) memcpy(s->queries + (size_t)r * d, q + r * ld, d * sizeof(float));
        q = s->queries;
        ld = d;
    }
    for (uint32_t key = first_key(job->shape, row) / KEY_TILE * KEY_TILE; key < end; key += KEY_TILE) {
        uint32_t keys = end - key < KEY_TILE ? end - key : KEY_TILE;
        double start = meter_now();
        cpu_gemm(s, false, true, padded, keys, d, cpu_score_scale(d), q, ld, k + (size_t)key * d, d, 0.0f, s->scores,
                 keys);
        meter_add(METER_ATTENTION, start, 2.0 * rows * keys * d, 4.0 * keys * d);
        start = meter_now();
        for (uint32_t r = 0; r < rows; r++) {
            uint32_t seen = keys_seen(row + r, key, keys);
            float *line = s->scores + (size_t)r * keys;
            cpu_bend_scores(job->shape, line, seen, row + r, key);
            cpu_softmax_line(s, line, r, seen, d);
            memset(line + seen, 0, (keys - seen) * sizeof *line);
        }
        meter_add(METER_SOFTMAX, start, 0, 4.0 * rows * keys);
        start = meter_now();
        cpu_gemm(s, false, false, padded, d, keys, 1.0f, s->scores, keys, v + (size_t)key * d, d, 1.0f, s->outputs, d);
        meter_add(METER_ATTENTION, start, 2.0 * rows * keys * d, 4.0 * keys * d);
    }
}

// A block of lines meets a tile of keys: `rows` lines from `line` on, the first of which is context row `row`; they see
// `keys` of the tile's.
static void prefix_block(scratch *s, const block_plan *b, const key_tile *t, uint32_t line, uint32_t row, uint32_t rows,
                         uint32_t keys)
{
    uint32_t d = b->d, key = t->number * KEY_TILE, most = keys_seen(row + rows - 1, key, keys);
    double flops = 2.0 * rows * most * d, start = meter_now();
    cpu_block_scores(s, b, t, line, rows, most);
    start = meter_add(METER_ATTENTION, start, flops, 0);
    for (uint32_t r = 0; r < rows; r++) { // line by line, while it is in the first-level cache
        uint32_t seen = keys_seen(row + r, key, keys), to = line + r;
        float *scores = s->scores + (size_t)r * t->width;
        cpu_bend_scores(b->shape, scores, seen, row + r, key);
        if (seen) cpu_raise_max(s, to, cpu_line_max(scores, seen), d);
        s->row_sum[to] += cpu_line_weights(s, b, t, r, scores, seen, most, s->row_max[to], NULL);
    }
    start = meter_add(METER_SOFTMAX, start, 0, 4.0 * rows * most);
    cpu_block_values(s, b, t, rows, most, s->outputs + (size_t)line * d);
    meter_add(METER_ATTENTION, start, flops, 0);
}

static void prefix_tile_packed(scratch *s, const prefix_job *job, const row_tile *tile)
{
    const block_plan *b = tile->rows == task_rows(job->shape) ? &job->full : &job->last;
    uint32_t d = b->d, row = job->first + tile->at, end = row + tile->rows, T = job->kv->n_tokens;
    size_t ld = (size_t)job->shape.n_heads * d;
    for (uint32_t h = 0; h < tile->heads; h++)
        for (uint32_t r = 0; r < tile->rows; r += b->lines)
            operand_split(b->p, cpu_queries_of(s, b, h * tile->padded + r),
                          job->q.address + (tile->at + r) * ld + (size_t)(tile->head + h) * d, ld, b->lines, 0,
                          tile->rows - r < b->lines ? tile->rows - r : b->lines, d, cpu_score_scale(d));
    tiles_hold();
    for (uint32_t i = first_key(job->shape, row) / KEY_TILE; i * KEY_TILE < end; i++) {
        key_tile t = cpu_find_tile(&b->tiles, job->kv, tile->head / (job->shape.n_heads / job->shape.n_kv_heads), i);
        uint32_t key = i * KEY_TILE, keys = T - key < t.width ? T - key : t.width;
        // The last rows go first: no block that follows sees more keys than those whose parts they leave.
        for (uint32_t r = (tile->rows - 1) / b->lines * b->lines; r < tile->rows && row + r + b->lines > key;
             r -= b->lines)
            for (uint32_t h = 0; h < tile->heads; h++, t.is_split = true)
                prefix_block(s, b, &t, h * tile->padded + r, row + r,
                             tile->rows - r < b->lines ? tile->rows - r : b->lines, keys);
    }
    tiles_let_go();
}

static void attend_tile(scratch *s, const prefix_job *job, const row_tile *tile)
{
    uint32_t d = job->shape.head_dim, lines = tile->padded * tile->heads;
    size_t ld = (size_t)job->shape.n_heads * d, offset = tile->at * ld + (size_t)tile->head * d;
    memset(s->outputs, 0, (size_t)lines * d * sizeof(float));
    for (uint32_t r = 0; r < lines; r++) s->row_max[r] = -INFINITY, s->row_sum[r] = 0;
    if (operand_is_plain(job->p))
        prefix_tile_f32(s, job, job->q.address + offset, job->first + tile->at, tile->rows,
                        tile->head / (job->shape.n_heads / job->shape.n_kv_heads));
    else prefix_tile_packed(s, job, tile);
    for (uint32_t h = 0; h < tile->heads; h++)
        for (uint32_t r = 0; r < tile->rows; r++) {
            uint32_t line = h * tile->padded + r;
            float inverse = cpu_inverse_sum(job->shape, tile->head + h, s->row_max[line], s->row_sum[line]),
                  *o = job->o.address + offset + r * ld + (size_t)h * d;
            for (uint32_t c = 0; c < d; c++) o[c] = s->outputs[(size_t)line * d + c] * inverse;
        }
}

void cpu_attend_prefix(backend_device *on, dev o, dev q, const prefix_kv *kv, uint32_t first, uint32_t n,
                       attention_shape s)
{
    precision p = cpu_of(on)->p;
    uint32_t each = task_rows(s), tiles = (n + each - 1) / each, heads = task_heads(s);
    if (!n || !cpu_fits(on, kv->n_tokens, s)) return;
    prefix_job job = {.on = cpu_of(on), .p = p, .o = o, .q = q, .kv = kv, .first = first, .shape = s};
    if (!operand_is_plain(p) &&
        (!cpu_plan_blocks(&job.full, p, kv->n_tokens, s, each, true) ||
         !cpu_plan_blocks(&job.last, p, kv->n_tokens, s, padded_rows(p, n - (tiles - 1) * each), true))) {
        cpu_product_failed(job.on);
        return;
    }
    // The last tiles see the most keys: they go first, so that no thread is left with a long one at the end.
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(job.on->n_threads)
    for (uint32_t t = 0; t < tiles; t++)
        for (uint32_t h = 0; h < s.n_heads; h += heads) {
            uint32_t at = (tiles - 1 - t) * each, rows = n - at < each ? n - at : each;
            attend_tile(&job.on->threads[omp_get_thread_num()], &job,
                        &(row_tile){at, rows, padded_rows(p, rows), h, heads});
        }
}
