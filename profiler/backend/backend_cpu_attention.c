// Attention of the CPU backend, and what the oracle and some scorers need besides it.
//
// Attention runs over tiles of rows and keys. Keys and values are read from tiles that pack_prefix made once per layer.
// Softmax, importance, and each decoded row's own tail are float32 in all precisions.
//
// A line is a row of one query head. A block of few lines is multiplied with a tile of keys at a time: its scores and
// weights go from one product through the softmax into the other while they are in the first-level cache, or near it.
#include "profiler/backend/cpu_device.h"
#include "profiler/backend/linalg.h"
#include "profiler/backend/packed_tiles.h"
#include <math.h>
#include <omp.h>
#include <string.h>

bool cpu_fits(backend_device *on, uint32_t n_tokens, attention_shape s)
{
    const backend_limits *most = &cpu_of(on)->limits;
    const attention_shape *shape = &most->shape;
    if (n_tokens <= most->tokens && s.n_heads == shape->n_heads && s.n_kv_heads == shape->n_kv_heads &&
        s.head_dim == shape->head_dim)
        return true;
    backend_fail(on, KVB_ARGUMENT,
                 "backend cpu: attention over %u tokens of %u:%u heads of %u, opened for up to %u of %u:%u heads of %u",
                 n_tokens, s.n_heads, s.n_kv_heads, s.head_dim, most->tokens, shape->n_heads, shape->n_kv_heads,
                 shape->head_dim);
    return false;
}

// ---- Tiles of packed keys and values, blocks of lines that meet them, and the softmax ----

// The packed keys and values of one head: tile after tile, K [d, keys] then V [keys, d].
typedef struct tile_plan {
    uint32_t n_tiles, last_keys; // last_keys is padded
    size_t k_bytes, tile_bytes, last_k_bytes, head_bytes;
} tile_plan;

// A tile of packed keys and values, as blocks of lines are multiplied with it.
typedef struct key_tile {
    const char *keys, *values;
    uint32_t number, width; // width: its keys with their padding
    bool is_split;          // an earlier block has left the parts in scratch
} key_tile;

// What blocks of lines have in common.
typedef struct block_plan {
    precision p;
    attention_shape shape;
    uint32_t d, lines; // of a block
    bool gather;       // values are added to what the outputs hold
    tile_plan tiles;
    const product *scores, *last_scores, *values, *last_values; // oneDNN's
} block_plan;

static inline uint32_t cpu_round_up(uint32_t n, uint32_t step)
{
    return (n + step - 1) / step * step;
}

size_t cpu_weight_bytes(precision p, uint32_t lines)
{
    size_t most = 0;
    for (uint32_t keys = KEY_ALIGN; keys <= KEY_TILE; keys += KEY_ALIGN)
        most = larger(most, operand_bytes(p, lines, keys));
    return most;
}

static tile_plan cpu_plan_tiles(precision p, uint32_t n_tokens, uint32_t d)
{
    tile_plan plan = {.n_tiles = (n_tokens + KEY_TILE - 1) / KEY_TILE};
    uint32_t rest = n_tokens - (plan.n_tiles - 1) * KEY_TILE;
    plan.last_keys = (rest + KEY_ALIGN - 1) / KEY_ALIGN * KEY_ALIGN;
    plan.last_k_bytes = packed_bytes(p, d, plan.last_keys);
    size_t last = plan.last_k_bytes + packed_bytes(p, plan.last_keys, d);
    if (plan.n_tiles > 1) {
        plan.k_bytes = packed_bytes(p, d, KEY_TILE);
        plan.tile_bytes = plan.k_bytes + packed_bytes(p, KEY_TILE, d);
    }
    plan.head_bytes = (plan.n_tiles - 1) * plan.tile_bytes + last;
    return plan;
}

size_t cpu_packed_floats(backend_device *on, uint32_t n_tokens, attention_shape s)
{
    return n_tokens ? s.n_kv_heads * cpu_plan_tiles(cpu_of(on)->p, n_tokens, s.head_dim).head_bytes / sizeof(float) : 0;
}

static uint32_t tile_keys(const tile_plan *plan, uint32_t tile)
{
    return tile + 1 < plan->n_tiles ? KEY_TILE : plan->last_keys;
}

static char *tile_at(const tile_plan *plan, const prefix_kv *kv, uint32_t g, uint32_t tile)
{
    return (char *)kv->packed.address + g * plan->head_bytes + tile * plan->tile_bytes;
}

static uint32_t cpu_padded_tokens(uint32_t n_tokens)
{
    return cpu_round_up(n_tokens, KEY_ALIGN);
}

void cpu_pack_prefix(backend_device *on, const prefix_kv *kv, attention_shape s)
{
    precision p = cpu_of(on)->p;
    if (!cpu_fits(on, kv->n_tokens, s)) return;
    uint32_t d = s.head_dim;
    tile_plan plan = cpu_plan_tiles(p, kv->n_tokens, d);
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(cpu_of(on)->n_threads)
    for (uint32_t g = 0; g < s.n_kv_heads; g++)
        for (uint32_t t = 0; t < plan.n_tiles; t++) {
            uint32_t keys = tile_keys(&plan, t), first = t * KEY_TILE,
                     given = kv->n_tokens - first < keys ? kv->n_tokens - first : keys;
            scratch *mine = &cpu_of(on)->threads[omp_get_thread_num()];
            float *padded = mine->scores;
            char *to = tile_at(&plan, kv, g, t);
            const float *from[2] = {kv->k.address, kv->v.address};
            for (int i = 0; i < 2; i++) {
                const float *rows = from[i] + ((size_t)g * kv->n_tokens + first) * d;
                if (given < keys) {
                    memcpy(padded, rows, (size_t)given * d * sizeof *rows);
                    memset(padded + (size_t)given * d, 0, (size_t)(keys - given) * d * sizeof *rows);
                    rows = padded;
                }
                size_t offset = i == 0 ? 0 : t + 1 < plan.n_tiles ? plan.k_bytes : plan.last_k_bytes;
                if (i == 0) packed_store(p, to, rows, d, true, d, keys);
                else packed_store(p, to + offset, rows, d, false, keys, d);
            }
        }
}

static const float LOG2_E = 1.44269504f, HIDDEN = -1e30f; // HIDDEN: the score of a key that a row does not see

// Returns the factor of queries in a product with keys. Scores are logarithms to base 2 of the softmax's exponentials.
static float cpu_score_scale(uint32_t d)
{
    return LOG2_E / sqrtf((float)d);
}

// Applies a layer's softcap and window to a line's n scores of the keys from `key` on: keys before the window of the
// row at `position` get the score HIDDEN, whose weight is 0 once a key is seen. A line always sees a key in its last
// tile.
static void cpu_bend_scores(attention_shape s, float *line, uint32_t n, uint64_t position, uint32_t key)
{
    if (s.softcap > 0) loop_softcap(line, n, s.softcap * LOG2_E);
    if (!s.window || position < (uint64_t)key + s.window) return;
    uint64_t hidden = position + 1 - s.window - key;
    for (uint32_t j = 0; j < n && j < hidden; j++) line[j] = HIDDEN;
}

// Returns 1 / the sum of a line's exponentials relative to `top`, the sink of head h included.
static float cpu_inverse_sum(attention_shape s, uint32_t h, float top, float sum)
{
    if (!s.sinks.address) return 1.0f / sum;
    float sink = s.sinks.address[h] * LOG2_E, most = fmaxf(top, sink), scale = softmax_exp2(top - most);
    return scale / (sum * scale + softmax_exp2(sink - most));
}

uint32_t cpu_most_block_lines(uint32_t lines)
{
    return tiles_available() ? BLOCK_LINES : lines;
}

uint32_t cpu_block_lines(uint32_t lines)
{
    enum { FEW = 48 }; // lines that oneDNN reaches its rate with
    if (tiles_available()) return BLOCK_LINES;
    // With AVX2 a row's place among the lines matters (cpu_row_group()), and halves of a group keep it.
    uint32_t parts = product_rows() % 16 ? MOST_BLOCKS / 2 : MOST_BLOCKS;
    while (parts > 1 && lines / parts < FEW) parts /= 2;
    return lines / parts;
}

// The i-th tile of KV head g.
static key_tile cpu_find_tile(const tile_plan *plan, const prefix_kv *kv, uint32_t g, uint32_t i)
{
    const char *keys = tile_at(plan, kv, g, i);
    return (key_tile){keys, keys + (i + 1 < plan->n_tiles ? plan->k_bytes : plan->last_k_bytes), i, tile_keys(plan, i),
                      false};
}

// Plans blocks of `lines` lines. Call outside parallel regions.
static void cpu_plan_blocks(block_plan *b, precision p, uint32_t n_tokens, attention_shape s, uint32_t lines,
                            bool gather)
{
    uint32_t d = s.head_dim;
    *b = (block_plan){
        .p = p, .shape = s, .d = d, .lines = lines, .gather = gather, .tiles = cpu_plan_tiles(p, n_tokens, d)};
    if (tiles_available()) return;
    if (b->tiles.n_tiles > 1) {
        b->scores = product_find(p, lines, KEY_TILE, d, false);
        b->values = product_find(p, lines, d, KEY_TILE, gather);
    }
    b->last_scores = product_find(p, lines, b->tiles.last_keys, d, false);
    b->last_values = product_find(p, lines, d, b->tiles.last_keys, gather);
}

// Returns the query operand of the block that begins with line `line`.
static char *cpu_queries_of(const scratch *s, const block_plan *b, uint32_t line)
{
    return (char *)s->query_operand + line / b->lines * operand_bytes(b->p, b->lines, b->d);
}

// s->scores [lines, width] = queries times keys, for at least the first `seen` keys.
static void cpu_block_scores(const scratch *s, const block_plan *b, const key_tile *t, uint32_t line, uint32_t lines,
                             uint32_t seen)
{
    if (!tiles_available()) {
        product_run(t->number + 1 < b->tiles.n_tiles ? b->scores : b->last_scores, cpu_queries_of(s, b, line), t->keys,
                    s->scores);
        return;
    }
    tiles_multiply(&(tile_product){.parts = packed_parts(b->p, b->d),
                                   .b_parts = packed_parts(b->p, b->d),
                                   .m = cpu_round_up(lines, TILE_ROWS),
                                   .n = cpu_round_up(seen, TILE_TERMS),
                                   .k = b->d,
                                   .a = cpu_queries_of(s, b, line),
                                   .b = t->keys,
                                   .c = s->scores,
                                   .ldc = t->width,
                                   .split = s->split_keys,
                                   .is_split = t->is_split});
}

// outputs [lines, d] (+)= weights times values, for the first `seen` keys; the other weights must be zero. `weights`:
// what cpu_line_weights() left in float32, [lines, width].
static void cpu_block_values(const scratch *s, const block_plan *b, const key_tile *t, uint32_t lines, uint32_t seen,
                             const float *weights, float *outputs)
{
    if (!tiles_available()) {
        product_run(t->number + 1 < b->tiles.n_tiles ? b->values : b->last_values,
                    operand_is_plain(b->p) ? (const void *)weights : s->weight_operand, t->values, outputs);
        return;
    }
    tiles_multiply(&(tile_product){.parts = packed_parts(b->p, t->width),
                                   .b_parts = packed_parts(b->p, t->width),
                                   .m = cpu_round_up(lines, TILE_ROWS),
                                   .n = b->d,
                                   .k = t->width,
                                   .accumulate = b->gather,
                                   .a = s->weight_operand,
                                   .b = t->values,
                                   .c = outputs,
                                   .ldc = b->d,
                                   .terms = seen,
                                   .split = s->split_values,
                                   .is_split = t->is_split});
}

// Returns the largest of x [n].
static float cpu_line_max(const float *x, uint32_t n)
{
    return tiles_available() ? tiles_max(x, n) : loop_max(x, n);
}

// Makes line r of the weights: 2^(x - top) of the first n scores, then zeros, for the product with `seen` keys. They
// also go to `keep`, or, unless the tile unit multiplies, to x if that is NULL; x may be overwritten. Returns their
// sum.
static float cpu_line_weights(const scratch *s, const block_plan *b, const key_tile *t, uint32_t r, float *x,
                              uint32_t n, uint32_t seen, float top, float *keep)
{
    if (tiles_available())
        return tiles_exp2_row(packed_parts(b->p, t->width), s->weight_operand, r, t->width, x, n, seen, top, keep);
    float *e = keep ? keep : x, sum = loop_exp2_minus(e, x, n, top);
    memset(e + n, 0, (t->width - n) * sizeof *e);
    if (!operand_is_plain(b->p)) operand_split(b->p, s->weight_operand, e, t->width, r, 1, t->width, 1.0f);
    return sum;
}

// Raises the maximum of line r to `top`, if that is larger, and rescales what the line has gathered.
static void cpu_raise_max(scratch *s, uint32_t r, float top, uint32_t d)
{
    if (top <= s->row_max[r]) return;
    float shrink = softmax_exp2(s->row_max[r] - top);
    loop_scale(s->outputs + (size_t)r * d, d, shrink);
    s->row_sum[r] *= shrink;
    s->row_max[r] = top;
}

// Turns row r's scores [seen] of one more tile into exponentials relative to the row's running maximum, and rescales
// what the row has gathered so far: row_sum and its outputs [d].
static void cpu_softmax_line(scratch *s, float *line, uint32_t r, uint32_t seen, uint32_t d)
{
    if (!seen) return;
    cpu_raise_max(s, r, loop_max(line, seen), d);
    s->row_sum[r] += loop_exp2_minus(line, line, seen, s->row_max[r]);
}

// ---- The prefill: tiles of rows of the context meet the keys that they see, tile by tile ----

static uint32_t first_key(attention_shape s, uint32_t position)
{
    return s.window && position >= s.window ? position + 1 - s.window : 0;
}

// Returns how many of a tile's keys context row `row` sees; the tile begins with key `key`.
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

// Queries [at, at + rows) of `heads` heads from `head` on, which share keys and values. Every head takes `padded`
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

// Attends a block of `rows` lines from `line` on, the first of which is context row `row`, to a tile of `keys` keys
// (without padding).
static void prefix_block(scratch *s, const block_plan *b, const key_tile *t, uint32_t line, uint32_t row, uint32_t rows,
                         uint32_t keys)
{
    uint32_t d = b->d, key = t->number * KEY_TILE, most = keys_seen(row + rows - 1, key, keys);
    cpu_block_scores(s, b, t, line, rows, most);
    for (uint32_t r = 0; r < rows; r++) { // line by line, while it is in the first-level cache
        uint32_t seen = keys_seen(row + r, key, keys), to = line + r;
        float *scores = s->scores + (size_t)r * t->width;
        cpu_bend_scores(b->shape, scores, seen, row + r, key);
        if (seen) cpu_raise_max(s, to, cpu_line_max(scores, seen), d);
        s->row_sum[to] += cpu_line_weights(s, b, t, r, scores, seen, most, s->row_max[to], NULL);
    }
    cpu_block_values(s, b, t, rows, most, s->scores, s->outputs + (size_t)line * d);
}

static void prefix_tile(scratch *s, const prefix_job *job, const row_tile *tile)
{
    const block_plan *b = tile->rows == task_rows(job->shape) ? &job->full : &job->last;
    uint32_t d = b->d, row = job->first + tile->at, end = row + tile->rows, T = job->kv->n_tokens;
    size_t ld = (size_t)job->shape.n_heads * d;
    for (uint32_t h = 0; h < tile->heads; h++)
        for (uint32_t r = 0; r < tile->rows; r += b->lines)
            operand_split(b->p, cpu_queries_of(s, b, h * tile->padded + r),
                          job->q.address + (tile->at + r) * ld + (size_t)(tile->head + h) * d, ld, 0,
                          tile->rows - r < b->lines ? tile->rows - r : b->lines, d, cpu_score_scale(d));
    tiles_hold();
    for (uint32_t i = first_key(job->shape, row) / KEY_TILE; i * KEY_TILE < end; i++) {
        key_tile t = cpu_find_tile(&b->tiles, job->kv, tile->head / (job->shape.n_heads / job->shape.n_kv_heads), i);
        uint32_t key = i * KEY_TILE, keys = T - key < t.width ? T - key : t.width;
        // The last rows go first: they leave the parts of the keys that they see, and no later block sees more.
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
    prefix_tile(s, job, tile);
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
    uint32_t last = cpu_round_up(n - (tiles - 1) * each, PRODUCT_ROWS_MAX);
    cpu_plan_blocks(&job.full, p, kv->n_tokens, s, cpu_most_block_lines(each), true);
    cpu_plan_blocks(&job.last, p, kv->n_tokens, s, cpu_most_block_lines(last), true);
    // The last tiles see the most keys: they go first, so that no thread is left with a long one at the end.
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(job.on->n_threads)
    for (uint32_t t = 0; t < tiles; t++)
        for (uint32_t h = 0; h < s.n_heads; h += heads) {
            uint32_t at = (tiles - 1 - t) * each, rows = n - at < each ? n - at : each;
            attend_tile(&job.on->threads[omp_get_thread_num()], &job,
                        &(row_tile){at, rows, cpu_round_up(rows, PRODUCT_ROWS_MAX), h, heads});
        }
}

// ---- Decoded rows over their context and their own tails ----
//
// A task is a tile of keys of one KV head with all rows of a group, so that keys and values are read from memory once
// per group. It leaves exponentials relative to the tile's own maximum, their sum, and their weighted sum of values;
// then each line's tiles and its own tail are combined, in order; then the exponentials, which are still there, update
// the oracle. Only so many heads are computed at a time that a thread still finds the exponentials of its tiles in its
// second-level cache; other memory that is read after a softmax is prefetched before it.

static void ask_for(const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += 16) __builtin_prefetch(x + i);
}

// Memory that will be read soon.
typedef struct stretch {
    const char *from;
    size_t bytes;
} stretch;

// Prefetches the `piece`-th of `pieces` parts into the second-level cache.
static void ask_for_piece(stretch s, uint32_t piece, uint32_t pieces)
{
    enum { LINE = 64 };
    size_t lines = s.bytes / LINE, end = lines * (piece + 1) / pieces;
    for (size_t i = lines * piece / pieces; i < end; i++) __builtin_prefetch(s.from + i * LINE, 0, 2);
}

typedef struct rows_job {
    cpu_device *on;
    dev o, q;
    const prefix_kv *kv;
    const tail_kv *tails;
    const decode_row *rows;
    const oracle_view *oracle;
    attention_shape shape;
    block_plan blocks;
    uint32_t first, n;    // rows of the group
    uint32_t head, heads; // KV heads at hand
    uint32_t max_lines;   // lines of a full group, and of products whose number of lines is fixed
} rows_job;

static uint32_t group_of(const rows_job *job)
{
    return job->shape.n_heads / job->shape.n_kv_heads;
}

static uint32_t n_tiles(const rows_job *job)
{
    return (job->kv->n_tokens + KEY_TILE - 1) / KEY_TILE;
}

// Keys of tile i; tile_width() is the same with padding.
static uint32_t tile_count(const rows_job *job, uint32_t i)
{
    uint32_t rest = job->kv->n_tokens - i * KEY_TILE;
    return rest < KEY_TILE ? rest : KEY_TILE;
}

static uint32_t tile_width(const rows_job *job, uint32_t i)
{
    uint32_t rest = cpu_padded_tokens(job->kv->n_tokens) - i * KEY_TILE;
    return rest < KEY_TILE ? rest : KEY_TILE;
}

// Returns the exponentials of line r for tile i.
static float *line_of(const rows_job *job, uint32_t g, uint32_t i, uint32_t r)
{
    size_t head = (size_t)job->max_lines * cpu_padded_tokens(job->kv->n_tokens);
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

// Returns the position of line r's row.
static uint64_t position_of(const rows_job *job, uint32_t r)
{
    return (uint64_t)job->kv->n_tokens + job->rows[job->first + r / group_of(job)].tail;
}

// Makes operands of the queries of all lines.
static void split_queries(const scratch *s, const rows_job *job, uint32_t g)
{
    const block_plan *b = &job->blocks;
    uint32_t lines = job->n * group_of(job);
    for (uint32_t r = 0; r < lines; r++)
        operand_split(b->p, cpu_queries_of(s, b, r), query_of(job, g, r), b->d, r % b->lines, 1, b->d,
                      cpu_score_scale(b->d));
}

// Attends a block of lines to a tile of keys. `ask` is prefetched during its softmax.
static void context_block(scratch *s, const rows_job *job, const key_tile *t, uint32_t g, uint32_t line, uint32_t lines,
                          stretch ask)
{
    const block_plan *b = &job->blocks;
    uint32_t count = tile_count(job, t->number);
    size_t part = part_of(job, g, t->number, line);
    cpu_block_scores(s, b, t, line, lines, count);
    for (uint32_t r = 0; r < lines; r++) { // line by line, while it is in the first-level cache
        float *scores = s->scores + (size_t)r * t->width;
        cpu_bend_scores(job->shape, scores, count, position_of(job, line + r), t->number * KEY_TILE);
        float top = cpu_line_max(scores, count);
        ask_for_piece(ask, r, lines);
        job->on->part_scale[part + r] = top;
        job->on->part_sum[part + r] =
            cpu_line_weights(s, b, t, r, scores, count, count, top, line_of(job, g, t->number, line + r));
    }
    cpu_block_values(s, b, t, lines, count, line_of(job, g, t->number, line), job->on->part_values + part * b->d);
}

// Attends all lines to a tile. The first block prefetches the tile's values, the last one the next tile's keys.
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

// Prefetches the keys or values of a row's tail, if the group has that row.
static void ask_for_tail(const rows_job *job, dev cache, uint32_t row, uint32_t g)
{
    if (row < job->first + job->n)
        ask_for(tail_of(job, cache, row, g), (size_t)(job->rows[row].tail + 1) * job->shape.head_dim);
}

// Combines the tiles of line r and its tail into its output. Leaves in part_scale the factor that turns a tile's
// exponentials into probabilities.
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
    for (uint32_t r = 0; r < job->n; r++) {
        const decode_row *row = &job->rows[job->first + r];
        if (r + 1 < job->n) ask_for(best_of(job, r + 1) + (size_t)g * T + key, tile_count(job, i));
        if (!row->observed) continue;
        update(best_of(job, r) + (size_t)g * T + key, line_of(job, g, i, r * group), tile_width(job, i),
               job->on->part_scale + part_of(job, g, i, r * group),
               oracle->weights.address + (size_t)g * group * T + key, T, group, tile_count(job, i));
    }
}

// Whether this thread has tile i of head g, for attention and for the oracle alike. The keys of all heads at hand are
// divided into one stretch per thread, which has the tiles whose middle is in it.
static bool has_tile(const rows_job *job, uint32_t g, uint32_t i)
{
    uint64_t tokens = cpu_padded_tokens(job->kv->n_tokens),
             place = (g - job->head) * tokens + i * KEY_TILE + tile_width(job, i) / 2;
    return place * (uint64_t)omp_get_num_threads() / (tokens * job->heads) == (uint64_t)omp_get_thread_num();
}

// Runs on each thread of a region.
static void attend_heads(const rows_job *job)
{
    uint32_t end = job->head + job->heads, tiles = n_tiles(job), lines = job->n * group_of(job);
    scratch *s = &job->on->threads[omp_get_thread_num()];
    uint32_t ready = end; // the head whose queries this thread has split
    for (uint32_t g = job->head; g < end; g++)
        for (uint32_t i = 0; i < tiles; i++) {
            if (!has_tile(job, g, i)) continue;
            if (ready != g) split_queries(s, job, g);
            ready = g;
            attend_context_tile(s, job, g, i);
        }
#pragma omp barrier
#pragma omp for collapse(2) schedule(static)
    for (uint32_t g = job->head; g < end; g++)
        for (uint32_t r = 0; r < lines; r++) finish_line(s, job, g, r);
    // A question's rows share one maximum or sum: each tile of it belongs to one thread, and groups run one by one.
    for (uint32_t g = job->head; g < end && job->oracle->weights.address; g++)
        for (uint32_t i = 0; i < tiles; i++)
            if (has_tile(job, g, i)) update_importance(job, g, i);
#pragma omp barrier
}

// Returns how many heads to compute at a time: as many as the threads' caches hold exponentials of, [lines, tokens]
// each, evened out over the rounds.
static uint32_t heads_at_hand(int threads, size_t lines, size_t tokens, uint32_t n_kv_heads)
{
    size_t fit = (size_t)threads * CACHED_FLOATS / (lines * tokens);
    if (fit < 1) return 1;
    uint32_t times = (uint32_t)((n_kv_heads + fit - 1) / fit);
    return (n_kv_heads + times - 1) / times;
}

// Enough for shorter contexts too: as many heads as the caches hold, or one.
size_t cpu_exponential_floats(const cpu_device *on, uint32_t n_tokens, attention_shape s)
{
    size_t head = (size_t)cpu_row_group() * (s.n_heads / s.n_kv_heads) * cpu_padded_tokens(n_tokens),
           cached = (size_t)on->n_threads * CACHED_FLOATS;
    if (cached > head * s.n_kv_heads) return head * s.n_kv_heads;
    return cached > head ? cached : head;
}

static void attend_group(const rows_job *job)
{
    uint32_t G = job->shape.n_kv_heads,
             heads = heads_at_hand(job->on->n_threads, job->max_lines, cpu_padded_tokens(job->kv->n_tokens), G);
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
    return product_rows() % 16 ? 24 : PRODUCT_ROWS_MAX; // a multiple of product_rows()
}

static bool tails_fit(const rows_job *job, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (job->rows[i].tail >= job->on->limits.tail) {
            backend_fail(&job->on->base, KVB_ARGUMENT,
                         "backend cpu: a row %u after its context, opened for fewer than %u", job->rows[i].tail,
                         job->on->limits.tail);
            return false;
        }
    return true;
}

void cpu_attend_rows(backend_device *on, dev o, dev q, const prefix_kv *kv, const tail_kv *tails,
                     const decode_row *rows, uint32_t n, attention_shape s, const oracle_view *oracle)
{
    rows_job job = {
        .on = cpu_of(on), .o = o, .q = q, .kv = kv, .tails = tails, .rows = rows, .oracle = oracle, .shape = s};
    if (!cpu_fits(on, kv->n_tokens, s) || !tails_fit(&job, n)) return;
    job.max_lines = cpu_row_group() * (s.n_heads / s.n_kv_heads);
    cpu_plan_blocks(&job.blocks, job.on->p, kv->n_tokens, s, cpu_block_lines(job.max_lines), false);
    for (; job.first < n; job.first += cpu_row_group()) {
        job.n = n - job.first < cpu_row_group() ? n - job.first : cpu_row_group();
        attend_group(&job);
    }
}

// ---- Norms of projected values, column sums of attention ----
//
// In float32 whatever the precision of the products: they are computed once per context.

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
            gemm(false, true, rows, d, d, 1.0f, v + (size_t)at * d, d, root.address + (size_t)h * d * d, d, 0.0f,
                 mine->scores, d);
            for (uint32_t r = 0; r < rows; r++) {
                const float *y = mine->scores + (size_t)r * d;
                w.address[(size_t)h * T + at + r] = distance_from(y, point, d);
            }
        }
    }
    for (size_t i = 0; i < (size_t)s.n_heads * T; i++) // in one order, whatever the number of threads
        total += w.address[i];
    float scale = (float)(1.0 / (total + 1e-9));
#pragma omp parallel for schedule(static)
    for (uint32_t h = 0; h < s.n_heads; h++) loop_scale(w.address + (size_t)h * T, T, scale);
}

// Computes the softmax denominators of context rows [row, row + rows) of one query head, as logarithms to base 2.
static void row_log_tile(scratch *s, attention_shape shape, uint32_t h, float *row_log, const float *q, const float *k,
                         uint32_t row, uint32_t rows)
{
    uint32_t d = shape.head_dim;
    size_t ld = (size_t)shape.n_heads * d;
    for (uint32_t r = 0; r < rows; r++) s->row_max[r] = -INFINITY, s->row_sum[r] = 0;
    uint32_t end = row + rows;
    for (uint32_t key = 0; key < end; key += KEY_TILE) {
        uint32_t keys = end - key < KEY_TILE ? end - key : KEY_TILE;
        gemm(false, true, rows, keys, d, cpu_score_scale(d), q, ld, k + (size_t)key * d, d, 0.0f, s->scores, keys);
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

// Computes the column sums of keys [key, key + keys) of one query head over the rows from `first` on. Each tile of rows
// is summed by itself first: with 100,000 rows one running float would lose digits.
static void column_tile(scratch *s, attention_shape shape, float *sums, const float *row_log, const float *q,
                        const float *k, uint32_t key, uint32_t keys, uint32_t first, uint32_t T)
{
    uint32_t d = shape.head_dim;
    size_t ld = (size_t)shape.n_heads * d;
    float *part = s->outputs; // KEY_TILE
    memset(sums + key, 0, keys * sizeof(float));
    for (uint32_t row = (key > first ? key : first) / QUERY_TILE * QUERY_TILE; row < T; row += QUERY_TILE) {
        uint32_t rows = T - row < QUERY_TILE ? T - row : QUERY_TILE;
        gemm(false, true, rows, keys, d, cpu_score_scale(d), q + row * ld, ld, k + (size_t)key * d, d, 0.0f, s->scores,
             keys);
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
