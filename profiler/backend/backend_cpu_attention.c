// What the prefill (backend_cpu_prefix.c) and decoding (backend_cpu_rows.c) have in common: tiles of packed keys and
// values, blocks of lines that meet them, and the softmax.
#include "profiler/backend/backend_cpu_attention.h"
#include "profiler/backend/linalg.h"
#include "profiler/backend/packed_tiles.h"
#include <math.h>
#include <omp.h>
#include <string.h>

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
    precision p = cpu_of(on)->p;
    if (operand_is_plain(p) || !n_tokens) return 0;
    return s.n_kv_heads * cpu_plan_tiles(p, n_tokens, s.head_dim).head_bytes / sizeof(float);
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

void cpu_pack_prefix(backend_device *on, const prefix_kv *kv, attention_shape s)
{
    precision p = cpu_of(on)->p;
    if (operand_is_plain(p) || !cpu_fits(on, kv->n_tokens, s)) return;
    uint32_t d = s.head_dim;
    tile_plan plan = cpu_plan_tiles(p, kv->n_tokens, d);
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(cpu_of(on)->n_threads)
    for (uint32_t g = 0; g < s.n_kv_heads; g++)
        for (uint32_t t = 0; t < plan.n_tiles; t++) {
            uint32_t keys = tile_keys(&plan, t), first = t * KEY_TILE,
                     given = kv->n_tokens - first < keys ? kv->n_tokens - first : keys;
            scratch *mine = &cpu_of(on)->threads[omp_get_thread_num()];
            float *temp = mine->scores, *padded = temp + cpu_pack_floats(d);
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
            if (!ok) cpu_product_failed(cpu_of(on));
        }
}

static const float LOG2_E = 1.44269504f, HIDDEN = -1e30f; // the latter: of keys that a row does not see

float cpu_score_scale(uint32_t d)
{
    return LOG2_E / sqrtf((float)d);
}

void cpu_bend_scores(attention_shape s, float *line, uint32_t n, uint64_t position, uint32_t key)
{
    if (s.softcap > 0) loop_softcap(line, n, s.softcap * LOG2_E);
    if (!s.window || position < (uint64_t)key + s.window) return;
    uint64_t hidden = position + 1 - s.window - key;
    for (uint32_t j = 0; j < n && j < hidden; j++) line[j] = HIDDEN;
}

float cpu_inverse_sum(attention_shape s, uint32_t h, float top, float sum)
{
    if (!s.sinks.address) return 1.0f / sum;
    float sink = s.sinks.address[h] * LOG2_E, most = fmaxf(top, sink), scale = softmax_exp2(top - most);
    return scale / (sum * scale + softmax_exp2(sink - most));
}

uint32_t cpu_block_lines(uint32_t lines)
{
    return tiles_available() ? BLOCK_LINES : lines;
}

key_tile cpu_find_tile(const tile_plan *plan, const prefix_kv *kv, uint32_t g, uint32_t i)
{
    const char *keys = tile_at(plan, kv, g, i);
    return (key_tile){keys, keys + (i + 1 < plan->n_tiles ? plan->k_bytes : plan->last_k_bytes), i, tile_keys(plan, i),
                      false};
}

bool cpu_plan_blocks(block_plan *b, precision p, uint32_t n_tokens, attention_shape s, uint32_t lines, bool gather)
{
    uint32_t d = s.head_dim;
    *b = (block_plan){.p = p,
                      .shape = s,
                      .d = d,
                      .lines = cpu_block_lines(lines),
                      .gather = gather,
                      .tiles = cpu_plan_tiles(p, n_tokens, d)};
    if (tiles_available()) return true;
    if (b->tiles.n_tiles > 1) {
        b->scores = product_find(p, lines, KEY_TILE, d, false);
        b->values = product_find(p, lines, d, KEY_TILE, gather);
    }
    b->last_scores = product_find(p, lines, b->tiles.last_keys, d, false);
    b->last_values = product_find(p, lines, d, b->tiles.last_keys, gather);
    return b->last_scores && b->last_values && (b->tiles.n_tiles == 1 || (b->scores && b->values));
}

char *cpu_queries_of(const scratch *s, const block_plan *b, uint32_t line)
{
    return (char *)s->query_operand + line / b->lines * operand_bytes(b->p, b->lines, b->d);
}

void cpu_block_scores(const scratch *s, const block_plan *b, const key_tile *t, uint32_t line, uint32_t lines,
                      uint32_t seen)
{
    if (!tiles_available()) {
        if (!product_run(t->number + 1 < b->tiles.n_tiles ? b->scores : b->last_scores, cpu_queries_of(s, b, line),
                         t->keys, s->scores))
            cpu_product_failed(s->on);
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

void cpu_block_values(const scratch *s, const block_plan *b, const key_tile *t, uint32_t lines, uint32_t seen,
                      float *outputs)
{
    if (!tiles_available()) {
        if (!product_run(t->number + 1 < b->tiles.n_tiles ? b->values : b->last_values, s->weight_operand, t->values,
                         outputs))
            cpu_product_failed(s->on);
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

float cpu_line_max(const float *x, uint32_t n)
{
    return tiles_available() ? tiles_max(x, n) : loop_max(x, n);
}

float cpu_line_weights(const scratch *s, const block_plan *b, const key_tile *t, uint32_t r, float *x, uint32_t n,
                       uint32_t seen, float top, float *keep)
{
    if (tiles_available())
        return tiles_exp2_row(packed_parts(b->p, t->width), s->weight_operand, r, t->width, x, n, seen, top, keep);
    float *e = keep ? keep : x, sum = loop_exp2_minus(e, x, n, top);
    memset(e + n, 0, (t->width - n) * sizeof *e);
    operand_split(b->p, s->weight_operand, e, t->width, b->lines, r, 1, t->width, 1.0f);
    return sum;
}

void cpu_raise_max(scratch *s, uint32_t r, float top, uint32_t d)
{
    if (top <= s->row_max[r]) return;
    float shrink = softmax_exp2(s->row_max[r] - top);
    loop_scale(s->outputs + (size_t)r * d, d, shrink);
    s->row_sum[r] *= shrink;
    s->row_max[r] = top;
}

void cpu_softmax_line(scratch *s, float *line, uint32_t r, uint32_t seen, uint32_t d)
{
    if (!seen) return;
    cpu_raise_max(s, r, loop_max(line, seen), d);
    s->row_sum[r] += loop_exp2_minus(line, line, seen, s->row_max[r]);
}
