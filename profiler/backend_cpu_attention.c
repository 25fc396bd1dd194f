// Attention over tiles of rows and keys. In float32 the keys and values are read where they stand; in the other precisions from tiles
// that pack_prefix made once per layer. Softmax, importance, and each decoded row's own tail are float32 in all of them.
#include "profiler/backend_cpu.h"
#include "profiler/linalg.h"
#include "profiler/meter.h"
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
    if (p == PRECISION_F32 || !n_tokens) return 0;
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
    return p == PRECISION_F32 ? n_tokens : (n_tokens + KEY_ALIGN - 1) / KEY_ALIGN * KEY_ALIGN;
}

void cpu_pack_prefix(precision p, const prefix_kv *kv, attention_shape s)
{
    if (p == PRECISION_F32) return;
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

static tile_products find_products(precision p, const tile_plan *plan, uint32_t lines, uint32_t d)
{
    tile_products t = {0};
    if (plan->n_tiles > 1) {
        t.scores = product_find(p, lines, KEY_TILE, d, false);
        t.values = product_find(p, lines, d, KEY_TILE, true);
    }
    t.last_scores = product_find(p, lines, plan->last_keys, d, false);
    t.last_values = product_find(p, lines, d, plan->last_keys, true);
    return t;
}

static bool has_all(const tile_products *t, const tile_plan *plan)
{
    return t->last_scores && t->last_values && (plan->n_tiles == 1 || (t->scores && t->values));
}

// scores [lines, keys of the tile] = query operand times K.
static void tile_scores(const tile_products *t, const tile_plan *plan, const scratch *s, const char *tile, uint32_t i,
                        float *scores)
{
    product_run(i + 1 < plan->n_tiles ? t->scores : t->last_scores, s->query_operand, tile, scores);
}

// outputs += weight operand times V.
static void tile_values(const tile_products *t, const tile_plan *plan, const scratch *s, const char *tile, uint32_t i)
{
    bool last = i + 1 == plan->n_tiles;
    product_run(last ? t->last_values : t->values, s->weight_operand,
                tile + (last ? plan->last_k_bytes : plan->k_bytes), s->outputs);
}

void cpu_softmax_tile(scratch *s, uint32_t rows, uint32_t keys, uint32_t width, uint32_t row, uint32_t key, uint32_t d)
{
    for (uint32_t r = 0; r < rows; r++) {
        float *line = s->scores + (size_t)r * width;
        uint32_t seen = row + r + 1 > key ? row + r + 1 - key : 0;
        seen = seen < keys ? seen : keys;
        memset(line + seen, 0, (width - seen) * sizeof(float));
        if (!seen) continue;
        float top = loop_max(line, seen);
        if (top > s->row_max[r]) {
            float shrink = softmax_exp(s->row_max[r] - top);
            loop_scale(s->outputs + (size_t)r * d, d, shrink);
            s->row_sum[r] *= shrink;
            s->row_max[r] = top;
        }
        s->row_sum[r] += loop_exp_minus(line, seen, s->row_max[r]);
    }
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
    uint32_t least = p == PRECISION_F32 ? GEMM_MIN_ROWS : PRODUCT_ROWS_MAX;
    if (p == PRECISION_F32) return rows < least ? least : rows;
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
        cpu_softmax_tile(s, rows, keys, keys, row, key, d);
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
        tile_scores(products, &job->plan, s, tile, i, s->scores);
        meter_add(METER_ATTENTION, start, 2.0 * rows * keys * d, 0);
        start = meter_now();
        cpu_softmax_tile(s, rows, keys, width, row, key, d);
        operand_split(p, s->weight_operand, s->scores, width, padded, 0, rows, width, 1.0f);
        meter_add(METER_SOFTMAX, start, 0, 4.0 * rows * keys);
        start = meter_now();
        tile_values(products, &job->plan, s, tile, i);
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
    if (job->p == PRECISION_F32) prefix_tile_f32(s, job, job->q.address + offset, job->first + at, rows, g);
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
    if (p != PRECISION_F32) {
        job.plan = plan_tiles(p, kv->n_tokens, d);
        job.full = find_products(p, &job.plan, QUERY_TILE, d);
        job.last = find_products(p, &job.plan, padded_rows(p, n - (tiles - 1) * QUERY_TILE), d);
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
    uint32_t lines; // of every product: ROW_TILE times the group
} rows_job;

// Scores of decoded lines stand tile after tile, [lines, width] each: where the tile begins, and how many of its keys there are.
static uint32_t n_tiles(const rows_job *job)
{
    return (job->kv->n_tokens + KEY_TILE - 1) / KEY_TILE;
}

static uint32_t tile_width(const rows_job *job, uint32_t i)
{
    uint32_t rest = cpu_padded_tokens(job->p, job->kv->n_tokens) - i * KEY_TILE;
    return rest < KEY_TILE ? rest : KEY_TILE;
}

static uint32_t tile_count(const rows_job *job, uint32_t i)
{
    uint32_t rest = job->kv->n_tokens - i * KEY_TILE;
    return rest < KEY_TILE ? rest : KEY_TILE;
}

static float *line_of(const scratch *s, const rows_job *job, uint32_t i, uint32_t r)
{
    return s->scores + (size_t)i * KEY_TILE * job->lines + (size_t)r * tile_width(job, i);
}

// Scores of all lines against the whole context.
static void context_scores(scratch *s, const rows_job *job, uint32_t lines, uint32_t g)
{
    uint32_t d = job->shape.head_dim, T = job->kv->n_tokens;
    float scale = 1.0f / sqrtf((float)d);
    const float *k = job->kv->k.address + (size_t)g * T * d;
    if (job->p == PRECISION_F32)
        memset(s->queries + (size_t)lines * d, 0, (size_t)(job->lines - lines) * d * sizeof(float));
    else operand_split(job->p, s->query_operand, s->queries, d, job->lines, 0, lines, d, scale);
    for (uint32_t i = 0; i < n_tiles(job); i++) {
        float *scores = line_of(s, job, i, 0);
        if (job->p != PRECISION_F32)
            tile_scores(&job->products, &job->plan, s, tile_at(&job->plan, job->kv, g, i), i, scores);
        else
            gemm(false, true, job->lines, tile_count(job, i), d, scale, s->queries, d, k + (size_t)i * KEY_TILE * d, d,
                 0.0f, scores, tile_count(job, i));
    }
}

// outputs [lines, d] = exponentials times the context's values.
static void context_values(scratch *s, const rows_job *job, uint32_t lines, uint32_t g)
{
    uint32_t d = job->shape.head_dim, T = job->kv->n_tokens;
    const float *v = job->kv->v.address + (size_t)g * T * d;
    memset(s->outputs, 0, (size_t)job->lines * d * sizeof(float));
    for (uint32_t i = 0; i < n_tiles(job); i++) {
        uint32_t width = tile_width(job, i), count = tile_count(job, i);
        if (job->p == PRECISION_F32) {
            gemm(false, false, job->lines, d, count, 1.0f, line_of(s, job, i, 0), count, v + (size_t)i * KEY_TILE * d,
                 d, 1.0f, s->outputs, d);
            continue;
        }
        for (uint32_t r = 0; r < lines && count < width; r++)
            memset(line_of(s, job, i, r) + count, 0, (width - count) * sizeof(float));
        operand_split(job->p, s->weight_operand, line_of(s, job, i, 0), width, job->lines, 0, lines, width, 1.0f);
        tile_values(&job->products, &job->plan, s, tile_at(&job->plan, job->kv, g, i), i);
    }
}

static const float *tail_of(const rows_job *job, dev cache, uint32_t row, uint32_t g)
{
    return cache.address +
           ((size_t)job->rows[row].question * job->shape.n_kv_heads + g) * job->tails->capacity * job->shape.head_dim;
}

// Scores against the tail, softmax over context and tail together. Line r is query head r % group of row r / group; its scores of the
// context are there already. Leaves exponentials in place and 1 / sum in row_sum.
static void softmax_rows(scratch *s, const rows_job *job, uint32_t first, uint32_t lines, uint32_t g)
{
    uint32_t d = job->shape.head_dim, group = job->shape.n_heads / job->shape.n_kv_heads, tiles = n_tiles(job);
    float scale = 1.0f / sqrtf((float)d);
    for (uint32_t r = 0; r < lines; r++) {
        uint32_t row = first + r / group, n = job->rows[row].tail + 1;
        float *tail = s->tails + (size_t)r * job->tails->capacity;
        loop_tail_scores(tail, s->queries + (size_t)r * d, tail_of(job, job->tails->k, row, g), n, d, scale);
        float top = loop_max(tail, n);
        for (uint32_t i = 0; i < tiles; i++) top = fmaxf(top, loop_max(line_of(s, job, i, r), tile_count(job, i)));
        float sum = loop_exp_minus(tail, n, top);
        for (uint32_t i = 0; i < tiles; i++) sum += loop_exp_minus(line_of(s, job, i, r), tile_count(job, i), top);
        s->row_sum[r] = 1.0f / sum;
    }
}

static void raise_importance(const scratch *s, const rows_job *job, uint32_t first, uint32_t n, uint32_t g)
{
    uint32_t group = job->shape.n_heads / job->shape.n_kv_heads, T = job->kv->n_tokens;
    const oracle_view *oracle = job->oracle;
    if (!oracle->weights.address) return;
    for (uint32_t i = 0; i < n_tiles(job); i++)
        for (uint32_t r = 0; r < n; r++) {
            const decode_row *row = &job->rows[first + r];
            size_t key = (size_t)i * KEY_TILE;
            if (row->observed)
                loop_raise_importance(oracle->best.address + row->question * oracle->best_stride + (size_t)g * T + key,
                                      line_of(s, job, i, r * group), tile_width(job, i), s->row_sum + r * group,
                                      oracle->weights.address + (size_t)g * group * T + key, T, group,
                                      tile_count(job, i));
        }
}

// Rows [first, first + n), n <= ROW_TILE, of KV head g.
static void attend_row_tile(scratch *s, const rows_job *job, uint32_t first, uint32_t n, uint32_t g)
{
    uint32_t d = job->shape.head_dim, H = job->shape.n_heads, group = H / job->shape.n_kv_heads, lines = n * group,
             T = job->kv->n_tokens;
    for (uint32_t r = 0; r < n; r++)
        memcpy(s->queries + (size_t)r * group * d, job->q.address + ((size_t)(first + r) * H + (size_t)g * group) * d,
               (size_t)group * d * sizeof(float));
    double start = meter_now();
    context_scores(s, job, lines, g);
    meter_add(METER_ATTENTION, start, 2.0 * lines * T * d, 4.0 * T * d);
    start = meter_now();
    softmax_rows(s, job, first, lines, g);
    meter_add(METER_SOFTMAX, start, 0, 4.0 * lines * T);
    start = meter_now();
    raise_importance(s, job, first, n, g);
    meter_add(METER_ORACLE, start, 0, 4.0 * T * (2.0 * n + lines));
    start = meter_now();
    context_values(s, job, lines, g);
    for (uint32_t r = 0; r < lines; r++) {
        uint32_t row = first + r / group;
        float *out = s->outputs + (size_t)r * d;
        loop_tail_values(out, s->tails + (size_t)r * job->tails->capacity, tail_of(job, job->tails->v, row, g),
                         job->rows[row].tail + 1, d);
        float *o = job->o.address + ((size_t)row * H + (size_t)g * group + r % group) * d;
        for (uint32_t c = 0; c < d; c++) o[c] = out[c] * s->row_sum[r];
    }
    meter_add(METER_ATTENTION, start, 2.0 * lines * T * d, 4.0 * T * d);
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

void cpu_attend_rows(precision p, dev o, dev q, const prefix_kv *kv, const tail_kv *tails, const decode_row *rows,
                     uint32_t n, attention_shape s, const oracle_view *oracle)
{
    rows_job job = {.p = p, .o = o, .q = q, .kv = kv, .tails = tails, .rows = rows, .oracle = oracle, .shape = s};
    job.lines = ROW_TILE * (s.n_heads / s.n_kv_heads); // at least GEMM_MIN_ROWS, and one number for all
    if (p != PRECISION_F32) {
        job.plan = plan_tiles(p, kv->n_tokens, s.head_dim);
        job.products = find_products(p, &job.plan, job.lines, s.head_dim);
        if (!has_all(&job.products, &job.plan)) {
            product_spoil(o.address, (size_t)n * s.n_heads * s.head_dim);
            return;
        }
    }
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
