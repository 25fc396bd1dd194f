// Attention of decoded rows over their context and their own tails.
//
// A task is a tile of keys of one KV head: it meets all rows of a group at once, so that keys and values are read from
// memory once per group. It leaves exponentials relative to the tile's own maximum, their sum, and their sum of values;
// then each line's tiles and its own tail are put together, in order; then the exponentials, which are still there,
// enter the oracle. So many heads are at hand at a time that a thread finds the exponentials of its tiles in its
// second-level cache; what else is read after a softmax is asked for before.
#include "profiler/backend/backend_cpu_attention.h"
#include "profiler/backend/linalg.h"
#include "profiler/backend/meter.h"
#include "profiler/backend/packed_tiles.h"
#include <math.h>
#include <omp.h>
#include <string.h>

static void ask_for(const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += 16) __builtin_prefetch(x + i);
}

// Memory that will be read soon.
typedef struct stretch {
    const char *from;
    size_t bytes;
} stretch;

// The `piece`-th of `pieces`, into the second-level cache.
static void ask_for_piece(stretch s, uint32_t piece, uint32_t pieces)
{
    enum { LINE = 64 };
    size_t lines = s.bytes / LINE, end = lines * (piece + 1) / pieces;
    for (size_t i = lines * piece / pieces; i < end; i++) __builtin_prefetch(s.from + i * LINE, 0, 2);
}

typedef struct rows_job {
    cpu_device *on;
    precision p;
    dev o, q;
    const prefix_kv *kv;
    const tail_kv *tails;
    const decode_row *rows;
    const oracle_view *oracle;
    attention_shape shape;
    block_plan blocks;
    uint32_t first, n;    // rows of the group
    uint32_t head, heads; // KV heads at hand
    uint32_t max_lines;   // lines of every product that cannot have fewer
} rows_job;

static uint32_t group_of(const rows_job *job)
{
    return job->shape.n_heads / job->shape.n_kv_heads;
}

static uint32_t n_tiles(const rows_job *job)
{
    return (job->kv->n_tokens + KEY_TILE - 1) / KEY_TILE;
}

// Keys of tile i, and the same with its padding.
static uint32_t tile_count(const rows_job *job, uint32_t i)
{
    uint32_t rest = job->kv->n_tokens - i * KEY_TILE;
    return rest < KEY_TILE ? rest : KEY_TILE;
}

static uint32_t tile_width(const rows_job *job, uint32_t i)
{
    uint32_t rest = cpu_padded_tokens(job->p, job->kv->n_tokens) - i * KEY_TILE;
    return rest < KEY_TILE ? rest : KEY_TILE;
}

// Exponentials of line r against tile i.
static float *line_of(const rows_job *job, uint32_t g, uint32_t i, uint32_t r)
{
    size_t head = (size_t)job->max_lines * cpu_padded_tokens(job->p, job->kv->n_tokens);
    return job->on->exponentials + (g - job->head) * head + (size_t)i * KEY_TILE * job->max_lines +
           (size_t)r * tile_width(job, i);
}

// Place of line r of tile i in part_scale and part_sum, and, times d, in part_values.
static size_t part_of(const rows_job *job, uint32_t g, uint32_t i, uint32_t r)
{
    return ((size_t)g * n_tiles(job) + i) * job->max_lines + r;
}

static const float *query_of(const rows_job *job, uint32_t g, uint32_t r)
{
    uint32_t group = group_of(job), H = job->shape.n_heads;
    return job->q.address +
           ((size_t)(job->first + r / group) * H + (size_t)g * group + r % group) * job->shape.head_dim;
}

// Of line r's row.
static uint64_t position_of(const rows_job *job, uint32_t r)
{
    return (uint64_t)job->kv->n_tokens + job->rows[job->first + r / group_of(job)].tail;
}

// Where nothing is packed: all lines at once.
static void attend_context_tile_f32(scratch *s, const rows_job *job, uint32_t g, uint32_t i)
{
    uint32_t d = job->shape.head_dim, group = group_of(job), lines = job->n * group, count = tile_count(job, i);
    size_t key = (size_t)g * job->kv->n_tokens + (size_t)i * KEY_TILE, part = part_of(job, g, i, 0);
    double flops = 2.0 * lines * count * d, start = meter_now();
    for (uint32_t r = 0; r < lines; r += group) // the heads of a row stand side by side
        memcpy(s->queries + (size_t)r * d, query_of(job, g, r), (size_t)group * d * sizeof(float));
    memset(s->queries + (size_t)lines * d, 0, (size_t)(job->max_lines - lines) * d * sizeof(float));
    cpu_gemm(s, false, true, job->max_lines, count, d, cpu_score_scale(d), s->queries, d, job->kv->k.address + key * d,
             d, 0.0f, line_of(job, g, i, 0), count);
    start = meter_add(METER_ATTENTION, start, flops, 0);
    for (uint32_t r = 0; r < lines; r++) { // line by line, while it is in the first-level cache
        float *line = line_of(job, g, i, r);
        cpu_bend_scores(job->shape, line, count, position_of(job, r), i * KEY_TILE);
        float top = loop_max(line, count);
        job->on->part_scale[part + r] = top;
        job->on->part_sum[part + r] = loop_exp2_minus(line, line, count, top);
    }
    start = meter_add(METER_SOFTMAX, start, 0, 4.0 * lines * count);
    cpu_gemm(s, false, false, job->max_lines, d, count, 1.0f, line_of(job, g, i, 0), count,
             job->kv->v.address + key * d, d, 0.0f, job->on->part_values + part * d, d);
    meter_add(METER_ATTENTION, start, flops, 0);
}

// The queries of all lines as operands.
static void split_queries(const scratch *s, const rows_job *job, uint32_t g)
{
    const block_plan *b = &job->blocks;
    uint32_t lines = job->n * group_of(job);
    for (uint32_t r = 0; r < lines; r++)
        operand_split(b->p, cpu_queries_of(s, b, r), query_of(job, g, r), b->d, b->lines, r % b->lines, 1, b->d,
                      cpu_score_scale(b->d));
}

// A block of lines meets a tile of keys. What comes after it is asked for during its softmax.
static void context_block(scratch *s, const rows_job *job, const key_tile *t, uint32_t g, uint32_t line, uint32_t lines,
                          stretch ask)
{
    const block_plan *b = &job->blocks;
    uint32_t count = tile_count(job, t->number);
    size_t part = part_of(job, g, t->number, line);
    double flops = 2.0 * lines * count * b->d, start = meter_now();
    cpu_block_scores(s, b, t, line, lines, count);
    start = meter_add(METER_ATTENTION, start, flops, 0);
    for (uint32_t r = 0; r < lines; r++) { // line by line, while it is in the first-level cache
        float *scores = s->scores + (size_t)r * t->width;
        cpu_bend_scores(job->shape, scores, count, position_of(job, line + r), t->number * KEY_TILE);
        float top = cpu_line_max(scores, count);
        ask_for_piece(ask, r, lines);
        job->on->part_scale[part + r] = top;
        job->on->part_sum[part + r] =
            cpu_line_weights(s, b, t, r, scores, count, count, top, line_of(job, g, t->number, line + r));
    }
    start = meter_add(METER_SOFTMAX, start, 0, 4.0 * lines * count);
    cpu_block_values(s, b, t, lines, count, job->on->part_values + part * b->d);
    meter_add(METER_ATTENTION, start, flops, 0);
}

// The first block asks for the tile's values, the last one for what is behind them: the next tile, its keys first.
static void attend_context_tile(scratch *s, const rows_job *job, uint32_t g, uint32_t i)
{
    const block_plan *b = &job->blocks;
    uint32_t lines = job->n * group_of(job);
    key_tile t = cpu_find_tile(&b->tiles, job->kv, g, i);
    size_t keys = (size_t)(t.values - t.keys), values = i + 1 < b->tiles.n_tiles ? b->tiles.tile_bytes - keys : keys;
    for (uint32_t line = 0; line < lines; line += b->lines, t.is_split = true) {
        bool begins = line == 0, ends = line + b->lines >= lines;
        stretch ask = {begins ? t.values : t.values + values, (begins ? values : 0) + (ends ? keys : 0)};
        context_block(s, job, &t, g, line, ends ? lines - line : b->lines, ask);
    }
}

static const float *tail_of(const rows_job *job, dev cache, uint32_t row, uint32_t g)
{
    return cache.address +
           ((size_t)job->rows[row].question * job->shape.n_kv_heads + g) * job->tails->capacity * job->shape.head_dim;
}

// The tail's keys are there for the last lines of a row; those of the next row are asked for while its values are used.
static void ask_for_tail(const rows_job *job, dev cache, uint32_t row, uint32_t g)
{
    if (row < job->first + job->n)
        ask_for(tail_of(job, cache, row, g), (size_t)(job->rows[row].tail + 1) * job->shape.head_dim);
}

// Puts the tiles of line r and its tail together. Leaves in part_scale what turns a tile's exponentials into
// probabilities.
static void finish_line(scratch *s, const rows_job *job, uint32_t g, uint32_t r)
{
    uint32_t d = job->shape.head_dim, group = group_of(job), row = job->first + r / group, n = job->rows[row].tail + 1,
             tiles = n_tiles(job);
    float *tail = s->tails, *out = s->outputs;
    bool begins = r % group == 0;
    if (begins) ask_for_tail(job, job->tails->v, row, g);
    loop_tail_scores(tail, query_of(job, g, r), tail_of(job, job->tails->k, row, g), n, d, cpu_score_scale(d));
    cpu_bend_scores(job->shape, tail, n, position_of(job, r), job->kv->n_tokens);
    float top = loop_max(tail, n);
    for (uint32_t i = 0; i < tiles; i++) top = fmaxf(top, job->on->part_scale[part_of(job, g, i, r)]);
    float sum = loop_exp2_minus(tail, tail, n, top);
    memset(out, 0, d * sizeof *out);
    if (begins) ask_for_tail(job, job->tails->k, row + 1, g);
    loop_weighted_sum(out, tail, 1, tail_of(job, job->tails->v, row, g), d, n, d);
    for (uint32_t i = 0; i < tiles; i++) {
        size_t part = part_of(job, g, i, r);
        float *scale = &job->on->part_scale[part];
        *scale = softmax_exp2(*scale - top);
        sum += *scale * job->on->part_sum[part];
    }
    size_t first = part_of(job, g, 0, r);
    loop_weighted_sum(out, job->on->part_scale + first, job->max_lines, job->on->part_values + first * d,
                      (size_t)job->max_lines * d, tiles, d);
    float inverse = cpu_inverse_sum(job->shape, g * group + r % group, top, sum),
          *o = job->o.address + (query_of(job, g, r) - job->q.address);
    for (uint32_t i = 0; i < tiles; i++) job->on->part_scale[part_of(job, g, i, r)] *= inverse;
    for (uint32_t c = 0; c < d; c++) o[c] = out[c] * inverse;
}

static float *best_of(const rows_job *job, uint32_t r)
{
    return job->oracle->best.address + job->rows[job->first + r].question * job->oracle->best_stride;
}

static void update_importance(const rows_job *job, uint32_t g, uint32_t i)
{
    uint32_t group = group_of(job), T = job->kv->n_tokens;
    size_t key = (size_t)i * KEY_TILE;
    const oracle_view *oracle = job->oracle;
    importance_loop *update = oracle->sum ? loop_add_importance : loop_raise_importance;
    double start = meter_now();
    for (uint32_t r = 0; r < job->n; r++) {
        const decode_row *row = &job->rows[job->first + r];
        if (r + 1 < job->n) ask_for(best_of(job, r + 1) + (size_t)g * T + key, tile_count(job, i));
        if (!row->observed) continue;
        update(best_of(job, r) + (size_t)g * T + key, line_of(job, g, i, r * group), tile_width(job, i),
               job->on->part_scale + part_of(job, g, i, r * group),
               oracle->weights.address + (size_t)g * group * T + key, T, group, tile_count(job, i));
    }
    meter_add(METER_ORACLE, start, 0, 4.0 * tile_count(job, i) * job->n * (2.0 + group));
}

// Threads have stretches of the keys of all heads at hand: the tiles that begin there, for attention and for the oracle
// alike.
static bool has_tile(const rows_job *job, uint32_t g, uint32_t i)
{
    uint64_t tokens = cpu_padded_tokens(job->p, job->kv->n_tokens),
             place = (g - job->head) * tokens + i * KEY_TILE + tile_width(job, i) / 2;
    return place * (uint64_t)omp_get_num_threads() / (tokens * job->heads) == (uint64_t)omp_get_thread_num();
}

// On each thread of a region.
static void attend_heads(const rows_job *job)
{
    uint32_t end = job->head + job->heads, tiles = n_tiles(job), lines = job->n * group_of(job);
    scratch *s = &job->on->threads[omp_get_thread_num()];
    uint32_t ready = end; // the head whose queries this thread has split
    for (uint32_t g = job->head; g < end; g++)
        for (uint32_t i = 0; i < tiles; i++) {
            if (!has_tile(job, g, i)) continue;
            if (operand_is_plain(job->p)) {
                attend_context_tile_f32(s, job, g, i);
                continue;
            }
            if (ready != g) split_queries(s, job, g);
            ready = g;
            attend_context_tile(s, job, g, i);
        }
#pragma omp barrier
    double start = meter_now();
#pragma omp for collapse(2) schedule(static)
    for (uint32_t g = job->head; g < end; g++)
        for (uint32_t r = 0; r < lines; r++) finish_line(s, job, g, r);
    meter_add(METER_SOFTMAX, start, 0, 0);
    // A question's rows share one maximum or sum: it is one thread's for each tile, and groups follow one another.
    for (uint32_t g = job->head; g < end && job->oracle->weights.address; g++)
        for (uint32_t i = 0; i < tiles; i++)
            if (has_tile(job, g, i)) update_importance(job, g, i);
#pragma omp barrier
}

// Heads whose exponentials, [lines, tokens] each, the threads' caches hold together; each time as many, as near as that
// goes.
static uint32_t heads_at_hand(int threads, size_t lines, size_t tokens, uint32_t n_kv_heads)
{
    size_t fit = (size_t)threads * CACHED_FLOATS / (lines * tokens);
    if (fit < 1) return 1;
    uint32_t times = (uint32_t)((n_kv_heads + fit - 1) / fit);
    return (n_kv_heads + times - 1) / times;
}

// Shorter contexts take no more: as many heads as the caches hold, or one.
size_t cpu_exponential_floats(const cpu_device *on, uint32_t n_tokens, attention_shape s)
{
    size_t head = (size_t)cpu_row_group() * (s.n_heads / s.n_kv_heads) * cpu_padded_tokens(on->p, n_tokens),
           cached = (size_t)on->n_threads * CACHED_FLOATS;
    if (cached > head * s.n_kv_heads) return head * s.n_kv_heads;
    return cached > head ? cached : head;
}

static void attend_group(const rows_job *job)
{
    uint32_t G = job->shape.n_kv_heads,
             heads = heads_at_hand(job->on->n_threads, job->max_lines, cpu_padded_tokens(job->p, job->kv->n_tokens), G);
#pragma omp parallel num_threads(job->on->n_threads)
    {
        rows_job mine = *job;
        tiles_hold();
        for (mine.head = 0; mine.head < G; mine.head += heads) {
            mine.heads = G - mine.head < heads ? G - mine.head : heads;
            attend_heads(&mine);
        }
        tiles_let_go();
    }
}

uint32_t cpu_row_group(void)
{
    return product_rows() == PRODUCT_ROWS_MAX ? PRODUCT_ROWS_MAX : 24;
}

static bool tails_fit(const rows_job *job, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (job->rows[i].tail >= job->on->limits.tail) {
            backend_fail(&job->on->base, KVB_ARGUMENT,
                         "backend cpu: a row at %u behind its context, opened for below %u", job->rows[i].tail,
                         job->on->limits.tail);
            return false;
        }
    return true;
}

void cpu_attend_rows(backend_device *on, dev o, dev q, const prefix_kv *kv, const tail_kv *tails,
                     const decode_row *rows, uint32_t n, attention_shape s, const oracle_view *oracle)
{
    precision p = cpu_of(on)->p;
    rows_job job = {
        .on = cpu_of(on), .p = p, .o = o, .q = q, .kv = kv, .tails = tails, .rows = rows, .oracle = oracle, .shape = s};
    if (!cpu_fits(on, kv->n_tokens, s) || !tails_fit(&job, n)) return;
    job.max_lines = cpu_row_group() * (s.n_heads / s.n_kv_heads);
    if (!operand_is_plain(p) && !cpu_plan_blocks(&job.blocks, p, kv->n_tokens, s, job.max_lines, false)) {
        cpu_product_failed(job.on);
        return;
    }
    for (; job.first < n; job.first += cpu_row_group()) {
        job.n = n - job.first < cpu_row_group() ? n - job.first : cpu_row_group();
        attend_group(&job);
    }
}
