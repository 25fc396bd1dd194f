// Attention over tiles of rows and keys. In float32 the keys and values are read where they stand; in the other precisions from tiles
// that pack_prefix made once per layer. Softmax, importance, and each decoded row's own tail are float32 in all of them.
#include "profiler/backend_cpu.h"
#include "profiler/linalg.h"
#include "profiler/meter.h"
#include "profiler/packed_tiles.h"
#include <math.h>
#include <omp.h>
#include <string.h>

enum { KEY_ALIGN = 64 }; // keys of the last tile are padded to a multiple of this

// The packed keys and values of one head: tile after tile, K [d, keys] then V [keys, d].
typedef struct tile_plan {
    uint32_t n_tiles, last_keys; // last_keys is padded
    size_t k_bytes, tile_bytes, last_k_bytes, head_bytes;
} tile_plan;

static tile_plan plan_tiles(precision p, uint32_t n_tokens, uint32_t d)
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

size_t cpu_packed_floats(precision p, uint32_t n_tokens, attention_shape s)
{
    if (operand_is_plain(p) || !n_tokens) return 0;
    return s.n_kv_heads * plan_tiles(p, n_tokens, s.head_dim).head_bytes / sizeof(float);
}

static uint32_t tile_keys(const tile_plan *plan, uint32_t tile)
{
    return tile + 1 < plan->n_tiles ? KEY_TILE : plan->last_keys;
}

static char *tile_at(const tile_plan *plan, const prefix_kv *kv, uint32_t g, uint32_t tile)
{
    return (char *)kv->packed.address + g * plan->head_bytes + tile * plan->tile_bytes;
}

uint32_t cpu_padded_tokens(precision p, uint32_t n_tokens)
{
    return operand_is_plain(p) ? n_tokens : (n_tokens + KEY_ALIGN - 1) / KEY_ALIGN * KEY_ALIGN;
}

void cpu_pack_prefix(precision p, const prefix_kv *kv, attention_shape s)
{
    if (operand_is_plain(p)) return;
    uint32_t d = s.head_dim;
    tile_plan plan = plan_tiles(p, kv->n_tokens, d);
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (uint32_t g = 0; g < s.n_kv_heads; g++)
        for (uint32_t t = 0; t < plan.n_tiles; t++) {
            uint32_t keys = tile_keys(&plan, t), first = t * KEY_TILE,
                     given = kv->n_tokens - first < keys ? kv->n_tokens - first : keys;
            scratch *mine = &pool.threads[omp_get_thread_num()];
            float *temp = mine->scores, *padded = temp + packed_temp_floats(d, KEY_TILE);
            char *to = tile_at(&plan, kv, g, t);
            const float *from[2] = {kv->k.address, kv->v.address};
            bool ok = true;
            for (int i = 0; i < 2; i++) {
                const float *rows = from[i] + ((size_t)g * kv->n_tokens + first) * d;
                if (given < keys) {
                    memcpy(padded, rows, (size_t)given * d * sizeof *rows);
                    memset(padded + (size_t)given * d, 0, (size_t)(keys - given) * d * sizeof *rows);
                    rows = padded;
                }
                size_t offset = i == 0 ? 0 : t + 1 < plan.n_tiles ? plan.k_bytes : plan.last_k_bytes;
                ok = ok && (i == 0 ? packed_store(p, to, rows, d, true, d, keys, temp)
                                   : packed_store(p, to + offset, rows, d, false, keys, d, temp));
            }
            if (!ok)
                memset(to, 0xff, t + 1 < plan.n_tiles ? plan.k_bytes : plan.last_k_bytes); // NaN: seen by all callers
        }
}

// The products of a tile of `rows` lines with a tile of keys and with a tile of values.
typedef struct tile_products {
    const product *scores, *last_scores, *values, *last_values;
} tile_products;

// `gather`: values are added to what the outputs hold.
static tile_products find_products(precision p, const tile_plan *plan, uint32_t lines, uint32_t d, bool gather)
{
    tile_products t = {0};
    if (plan->n_tiles > 1) {
        t.scores = product_find(p, lines, KEY_TILE, d, false);
        t.values = product_find(p, lines, d, KEY_TILE, gather);
    }
    t.last_scores = product_find(p, lines, plan->last_keys, d, false);
    t.last_values = product_find(p, lines, d, plan->last_keys, gather);
    return t;
}

static bool has_all(const tile_products *t, const tile_plan *plan)
{
    return t->last_scores && t->last_values && (plan->n_tiles == 1 || (t->scores && t->values));
}

// All lines of a product, or only those that are wanted where that changes none of their bits: whole blocks of them, for which there is room.
static void run_lines(const product *p, uint32_t lines, const void *a, const void *b, float *c, uint32_t width)
{
    if (product_takes_any_rows()) product_run_rows(p, (lines + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS, a, b, c, width);
    else product_run(p, a, b, c);
}

// scores [lines, keys of the tile] = query operand times K.
static void tile_scores(const tile_products *t, const tile_plan *plan, const scratch *s, const char *tile, uint32_t i,
                        uint32_t lines, float *scores)
{
    run_lines(i + 1 < plan->n_tiles ? t->scores : t->last_scores, lines, s->query_operand, tile, scores,
              tile_keys(plan, i));
}

// outputs [lines, d] (+)= weight operand times V.
static void tile_values(const tile_products *t, const tile_plan *plan, const scratch *s, const char *tile, uint32_t i,
                        uint32_t lines, float *outputs, uint32_t d)
{
    bool last = i + 1 == plan->n_tiles;
    run_lines(last ? t->last_values : t->values, lines, s->weight_operand,
              tile + (last ? plan->last_k_bytes : plan->k_bytes), outputs, d);
}

void cpu_softmax_line(scratch *s, float *line, uint32_t r, uint32_t seen, uint32_t d)
{
    if (!seen) return;
    float top = loop_max(line, seen);
    if (top > s->row_max[r]) {
        float shrink = softmax_exp(s->row_max[r] - top);
        loop_scale(s->outputs + (size_t)r * d, d, shrink);
        s->row_sum[r] *= shrink;
        s->row_max[r] = top;
    }
    s->row_sum[r] += loop_exp_minus(line, seen, s->row_max[r]);
}

// How many of a tile's keys context row `row` sees; the tile begins with key `key`.
static uint32_t keys_seen(uint32_t row, uint32_t key, uint32_t keys)
{
    uint32_t seen = row + 1 > key ? row + 1 - key : 0;
    return seen < keys ? seen : keys;
}

// --- the prefill ---

typedef struct prefix_job {
    precision p;
    dev o, q;
    const prefix_kv *kv;
    uint32_t first; // context row of the first query
    attention_shape shape;
    tile_plan plan;
    tile_products full, last; // for QUERY_TILE rows, and for the lines of the last tile of rows
} prefix_job;

static uint32_t padded_rows(precision p, uint32_t rows)
{
    uint32_t least = operand_is_plain(p) ? GEMM_MIN_ROWS : PRODUCT_ROWS_MAX;
    if (operand_is_plain(p)) return rows < least ? least : rows;
    return (rows + least - 1) / least * least;
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
    for (uint32_t key = 0; key < end; key += KEY_TILE) {
        uint32_t keys = end - key < KEY_TILE ? end - key : KEY_TILE;
        double start = meter_now();
        gemm(false, true, padded, keys, d, 1.0f / sqrtf((float)d), q, ld, k + (size_t)key * d, d, 0.0f, s->scores,
             keys);
        meter_add(METER_ATTENTION, start, 2.0 * rows * keys * d, 4.0 * keys * d);
        start = meter_now();
        for (uint32_t r = 0; r < rows; r++) {
            uint32_t seen = keys_seen(row + r, key, keys);
            float *line = s->scores + (size_t)r * keys;
            cpu_softmax_line(s, line, r, seen, d);
            memset(line + seen, 0, (keys - seen) * sizeof *line);
        }
        meter_add(METER_SOFTMAX, start, 0, 4.0 * rows * keys);
        start = meter_now();
        gemm(false, false, padded, d, keys, 1.0f, s->scores, keys, v + (size_t)key * d, d, 1.0f, s->outputs, d);
        meter_add(METER_ATTENTION, start, 2.0 * rows * keys * d, 4.0 * keys * d);
    }
}

static void prefix_tile_packed(scratch *s, const prefix_job *job, const float *q, uint32_t row, uint32_t rows,
                               uint32_t g)
{
    precision p = job->p;
    uint32_t d = job->shape.head_dim, padded = padded_rows(p, rows), end = row + rows, T = job->kv->n_tokens;
    const tile_products *products = padded == QUERY_TILE ? &job->full : &job->last;
    operand_split(p, s->query_operand, q, (size_t)job->shape.n_heads * d, padded, 0, rows, d, 1.0f / sqrtf((float)d));
    for (uint32_t i = 0; i * KEY_TILE < end; i++) {
        const char *tile = tile_at(&job->plan, job->kv, g, i);
        uint32_t key = i * KEY_TILE, width = tile_keys(&job->plan, i), keys = T - key < width ? T - key : width;
        double start = meter_now();
        tile_scores(products, &job->plan, s, tile, i, rows, s->scores);
        meter_add(METER_ATTENTION, start, 2.0 * rows * keys * d, 0);
        start = meter_now();
        for (uint32_t r = 0; r < rows; r++) { // line by line, while it is in the first-level cache
            uint32_t seen = keys_seen(row + r, key, keys);
            float *line = s->scores + (size_t)r * width;
            cpu_softmax_line(s, line, r, seen, d);
            memset(line + seen, 0, (width - seen) * sizeof *line);
            operand_split(p, s->weight_operand, line, width, padded, r, 1, width, 1.0f);
        }
        meter_add(METER_SOFTMAX, start, 0, 4.0 * rows * keys);
        start = meter_now();
        tile_values(products, &job->plan, s, tile, i, rows, s->outputs, d);
        meter_add(METER_ATTENTION, start, 2.0 * rows * keys * d, 0);
    }
}

// Queries [at, at + rows) of head h.
static void attend_tile(scratch *s, const prefix_job *job, uint32_t at, uint32_t rows, uint32_t h)
{
    uint32_t d = job->shape.head_dim, g = h / (job->shape.n_heads / job->shape.n_kv_heads);
    size_t ld = (size_t)job->shape.n_heads * d, offset = at * ld + (size_t)h * d;
    uint32_t padded = padded_rows(job->p, rows);
    memset(s->outputs, 0, (size_t)padded * d * sizeof(float));
    for (uint32_t r = 0; r < padded; r++) s->row_max[r] = -INFINITY, s->row_sum[r] = 0;
    if (operand_is_plain(job->p)) prefix_tile_f32(s, job, job->q.address + offset, job->first + at, rows, g);
    else prefix_tile_packed(s, job, job->q.address + offset, job->first + at, rows, g);
    for (uint32_t r = 0; r < rows; r++) {
        float inverse = 1.0f / s->row_sum[r], *o = job->o.address + offset + r * ld;
        for (uint32_t c = 0; c < d; c++) o[c] = s->outputs[(size_t)r * d + c] * inverse;
    }
}

void cpu_attend_prefix(precision p, dev o, dev q, const prefix_kv *kv, uint32_t first, uint32_t n, attention_shape s)
{
    uint32_t tiles = (n + QUERY_TILE - 1) / QUERY_TILE, d = s.head_dim;
    prefix_job job = {.p = p, .o = o, .q = q, .kv = kv, .first = first, .shape = s};
    if (!operand_is_plain(p)) {
        job.plan = plan_tiles(p, kv->n_tokens, d);
        job.full = find_products(p, &job.plan, QUERY_TILE, d, true);
        job.last = find_products(p, &job.plan, padded_rows(p, n - (tiles - 1) * QUERY_TILE), d, true);
        if (!has_all(&job.full, &job.plan) || !has_all(&job.last, &job.plan)) {
            product_spoil(o.address, (size_t)n * s.n_heads * d);
            return;
        }
    }
    // The last tiles see the most keys: they go first, so that no thread is left with a long one at the end.
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (uint32_t t = 0; t < tiles; t++)
        for (uint32_t h = 0; h < s.n_heads; h++) {
            uint32_t at = (tiles - 1 - t) * QUERY_TILE, rows = n - at < QUERY_TILE ? n - at : QUERY_TILE;
            attend_tile(&pool.threads[omp_get_thread_num()], &job, at, rows, h);
        }
}

// --- decoding ---
//
// A task is a tile of keys of one KV head: it meets all rows of a group at once, so that keys and values are read from memory once per
// group. It leaves exponentials relative to the tile's own maximum, their sum, and their sum of values; then each line's tiles and its
// own tail are put together, in order; then the exponentials, which are still there, enter the oracle.

typedef struct rows_job {
    precision p;
    dev o, q;
    const prefix_kv *kv;
    const tail_kv *tails;
    const decode_row *rows;
    const oracle_view *oracle;
    attention_shape shape;
    tile_plan plan;
    tile_products products;
    uint32_t first, n;  // rows of the group
    uint32_t max_lines; // lines of every product that cannot have fewer
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
    return pool.exponentials + g * head + (size_t)i * KEY_TILE * job->max_lines + (size_t)r * tile_width(job, i);
}

// Place of line r of tile i in pool.part_scale and pool.part_sum, and, times d, in pool.part_values.
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

static void context_scores(scratch *s, const rows_job *job, uint32_t g, uint32_t i)
{
    uint32_t d = job->shape.head_dim, group = group_of(job), lines = job->n * group;
    float scale = 1.0f / sqrtf((float)d), *scores = line_of(job, g, i, 0);
    bool plain = operand_is_plain(job->p);
    for (uint32_t r = 0; r < lines; r += group) // the heads of a row stand side by side
        if (plain) memcpy(s->queries + (size_t)r * d, query_of(job, g, r), (size_t)group * d * sizeof(float));
        else operand_split(job->p, s->query_operand, query_of(job, g, r), d, job->max_lines, r, group, d, scale);
    if (!plain) {
        tile_scores(&job->products, &job->plan, s, tile_at(&job->plan, job->kv, g, i), i, lines, scores);
        return;
    }
    memset(s->queries + (size_t)lines * d, 0, (size_t)(job->max_lines - lines) * d * sizeof(float));
    gemm(false, true, job->max_lines, tile_count(job, i), d, scale, s->queries, d,
         job->kv->k.address + ((size_t)g * job->kv->n_tokens + (size_t)i * KEY_TILE) * d, d, 0.0f, scores,
         tile_count(job, i));
}

static void context_exponentials(scratch *s, const rows_job *job, uint32_t g, uint32_t i)
{
    uint32_t lines = job->n * group_of(job), count = tile_count(job, i), width = tile_width(job, i);
    for (uint32_t r = 0; r < lines; r++) { // line by line, while it is in the first-level cache
        float *line = line_of(job, g, i, r), top = loop_max(line, count);
        pool.part_scale[part_of(job, g, i, r)] = top;
        pool.part_sum[part_of(job, g, i, r)] = loop_exp_minus(line, count, top);
        memset(line + count, 0, (width - count) * sizeof *line);
        if (!operand_is_plain(job->p))
            operand_split(job->p, s->weight_operand, line, width, job->max_lines, r, 1, width, 1.0f);
    }
}

static void context_values(scratch *s, const rows_job *job, uint32_t g, uint32_t i)
{
    uint32_t d = job->shape.head_dim, count = tile_count(job, i);
    float *values = pool.part_values + part_of(job, g, i, 0) * d;
    if (!operand_is_plain(job->p))
        tile_values(&job->products, &job->plan, s, tile_at(&job->plan, job->kv, g, i), i, job->n * group_of(job),
                    values, d);
    else
        gemm(false, false, job->max_lines, d, count, 1.0f, line_of(job, g, i, 0), count,
             job->kv->v.address + ((size_t)g * job->kv->n_tokens + (size_t)i * KEY_TILE) * d, d, 0.0f, values, d);
}

static void attend_context_tile(scratch *s, const rows_job *job, uint32_t g, uint32_t i)
{
    uint32_t lines = job->n * group_of(job), d = job->shape.head_dim, count = tile_count(job, i);
    double start = meter_now();
    context_scores(s, job, g, i);
    meter_add(METER_ATTENTION, start, 2.0 * lines * count * d, 0);
    start = meter_now();
    context_exponentials(s, job, g, i);
    meter_add(METER_SOFTMAX, start, 0, 4.0 * lines * count);
    start = meter_now();
    context_values(s, job, g, i);
    meter_add(METER_ATTENTION, start, 2.0 * lines * count * d, 0);
}

static const float *tail_of(const rows_job *job, dev cache, uint32_t row, uint32_t g)
{
    return cache.address +
           ((size_t)job->rows[row].question * job->shape.n_kv_heads + g) * job->tails->capacity * job->shape.head_dim;
}

// Puts the tiles of line r and its tail together. Leaves in part_scale what turns a tile's exponentials into probabilities.
static void finish_line(scratch *s, const rows_job *job, uint32_t g, uint32_t r)
{
    uint32_t d = job->shape.head_dim, group = group_of(job), row = job->first + r / group, n = job->rows[row].tail + 1,
             tiles = n_tiles(job);
    float *tail = s->tails, *out = s->outputs;
    loop_tail_scores(tail, query_of(job, g, r), tail_of(job, job->tails->k, row, g), n, d, 1.0f / sqrtf((float)d));
    float top = loop_max(tail, n);
    for (uint32_t i = 0; i < tiles; i++) top = fmaxf(top, pool.part_scale[part_of(job, g, i, r)]);
    float sum = loop_exp_minus(tail, n, top);
    memset(out, 0, d * sizeof *out);
    loop_tail_values(out, tail, tail_of(job, job->tails->v, row, g), n, d);
    for (uint32_t i = 0; i < tiles; i++) {
        size_t part = part_of(job, g, i, r);
        float *scale = &pool.part_scale[part];
        *scale = softmax_exp(*scale - top);
        sum += *scale * pool.part_sum[part];
        loop_tail_values(out, scale, pool.part_values + part * d, 1, d);
    }
    float inverse = 1.0f / sum, *o = job->o.address + (query_of(job, g, r) - job->q.address);
    for (uint32_t i = 0; i < tiles; i++) pool.part_scale[part_of(job, g, i, r)] *= inverse;
    for (uint32_t c = 0; c < d; c++) o[c] = out[c] * inverse;
}

static void raise_importance(const rows_job *job, uint32_t g, uint32_t i)
{
    uint32_t group = group_of(job), T = job->kv->n_tokens;
    size_t key = (size_t)i * KEY_TILE;
    const oracle_view *oracle = job->oracle;
    double start = meter_now();
    for (uint32_t r = 0; r < job->n; r++) {
        const decode_row *row = &job->rows[job->first + r];
        if (!row->observed) continue;
        loop_raise_importance(oracle->best.address + row->question * oracle->best_stride + (size_t)g * T + key,
                              line_of(job, g, i, r * group), tile_width(job, i),
                              pool.part_scale + part_of(job, g, i, r * group),
                              oracle->weights.address + (size_t)g * group * T + key, T, group, tile_count(job, i));
    }
    meter_add(METER_ORACLE, start, 0, 4.0 * tile_count(job, i) * job->n * (2.0 + group));
}

static void attend_group(const rows_job *job)
{
    uint32_t G = job->shape.n_kv_heads, tiles = n_tiles(job), lines = job->n * group_of(job);
#pragma omp parallel
    {
        scratch *s = &pool.threads[omp_get_thread_num()];
#pragma omp for collapse(2) schedule(static)
        for (uint32_t g = 0; g < G; g++)
            for (uint32_t i = 0; i < tiles; i++) attend_context_tile(s, job, g, i);
        double start = meter_now();
#pragma omp for collapse(2) schedule(static)
        for (uint32_t g = 0; g < G; g++)
            for (uint32_t r = 0; r < lines; r++) finish_line(s, job, g, r);
        meter_add(METER_SOFTMAX, start, 0, 0);
        // A question's rows share one running maximum: it is one task's for each tile, and groups follow one another.
#pragma omp for collapse(2) schedule(static)
        for (uint32_t g = 0; g < G; g++)
            for (uint32_t i = 0; i < tiles; i++)
                if (job->oracle->weights.address) raise_importance(job, g, i);
    }
}

uint32_t cpu_row_group(void)
{
    return product_rows() == PRODUCT_ROWS_MAX ? PRODUCT_ROWS_MAX : 24;
}

void cpu_attend_rows(precision p, dev o, dev q, const prefix_kv *kv, const tail_kv *tails, const decode_row *rows,
                     uint32_t n, attention_shape s, const oracle_view *oracle)
{
    rows_job job = {.p = p, .o = o, .q = q, .kv = kv, .tails = tails, .rows = rows, .oracle = oracle, .shape = s};
    job.max_lines = cpu_row_group() * (s.n_heads / s.n_kv_heads);
    if (!operand_is_plain(p)) {
        job.plan = plan_tiles(p, kv->n_tokens, s.head_dim);
        job.products = find_products(p, &job.plan, job.max_lines, s.head_dim, false);
        if (!has_all(&job.products, &job.plan)) {
            product_spoil(o.address, (size_t)n * s.n_heads * s.head_dim);
            return;
        }
    }
    for (; job.first < n; job.first += cpu_row_group()) {
        job.n = n - job.first < cpu_row_group() ? n - job.first : cpu_row_group();
        attend_group(&job);
    }
}
