#include "profiler/model/output_error.h"
#include "formats/need.h"
#include "profiler/backend/linalg.h"
#include "profiler/weights/simd.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = OUTPUT_LEVELS + 1 }; // the last one has the tokens that every level drops

// ---- The order ----

typedef struct ranked {
    float score;
    uint32_t position;
} ranked;

static int compare_ranked(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return (x->position > y->position) - (x->position < y->position);
}

static int compare_positions(const void *a, const void *b)
{
    const uint32_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

void output_order_make(output_order *out, const float *scores, uint32_t n_tokens, uint32_t sink, uint32_t window)
{
    uint32_t n = 0, first = sink < n_tokens ? sink : n_tokens,
             end = window < n_tokens - first ? n_tokens - window : first;
    ranked *middle = need(n_tokens, sizeof *middle, "ranked tokens");
    for (uint32_t i = 0; i < first; i++) out->position[n++] = i;
    for (uint32_t i = end; i < n_tokens; i++) out->position[n++] = i;
    out->protect = n;
    for (uint32_t i = first; i < end; i++) middle[i - first] = (ranked){scores[i], i};
    qsort(middle, end - first, sizeof *middle, compare_ranked);
    for (uint32_t i = 0; i < end - first; i++) out->position[n++] = middle[i].position;
    free(middle);
}

// ---- Attention over the whole context ----

// Queries are judged in blocks of one size, padded with zeros, since a product's kernel, and with it the order of its
// sums, may depend on the number of rows: so a query's bits do not depend on which others are judged.
typedef struct query {
    const output_queries *set;
    uint32_t i;
} query;

// A line is one of the group's heads for one query of a block; a query's lines are side by side.
typedef struct attention {
    uint32_t n, most, lines; // queries at hand; queries and lines of a block
    query *at;               // [queries of a block]
    float *queries;          // [lines, d], scaled
    float *weights;          // [T, lines] exp(score - the line's largest)
    float *top;              // [lines] the largest
    float *tail;             // [lines, d] the sum of e v over the tokens after the context
    float *mass;             // [lines] the sum of e over these, and over an attention sink
} attention;

static void attention_open(attention *a, const output_head *h, uint32_t queries)
{
    size_t lines = (size_t)queries * h->group;
    a->n = 0;
    a->most = queries;
    a->lines = (uint32_t)lines;
    a->at = need(queries, sizeof *a->at, "queries");
    a->queries = need(lines * h->head_dim, sizeof(float), "queries");
    a->weights = need(lines * h->n_tokens, sizeof(float), "attention weights");
    a->top = need(lines, sizeof(float), "scores");
    a->tail = need(lines * h->head_dim, sizeof(float), "values");
    a->mass = need(lines, sizeof(float), "sums");
}

static void attention_close(attention *a)
{
    free_all(a->at, a->queries, a->weights, a->top, a->tail, a->mass);
}

static float bend(const output_head *h, float score)
{
    return h->softcap > 0 ? h->softcap * tanhf(score / h->softcap) : score;
}

static float dot(const float *a, const float *b, uint32_t n)
{
    float sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

SIMD_CLONES static void find_tops(attention *a, const output_head *h)
{
    for (uint32_t line = 0; line < a->lines; line++) a->top[line] = h->sinks ? h->sinks[line % h->group] : -INFINITY;
    for (uint32_t i = 0; i < h->n_tokens; i++) {
        float *e = a->weights + (size_t)i * a->lines;
        for (uint32_t line = 0; h->softcap > 0 && line < a->lines; line++) e[line] = bend(h, e[line]);
        for (uint32_t line = 0; line < a->lines; line++) a->top[line] = e[line] > a->top[line] ? e[line] : a->top[line];
    }
}

// Sums up the tokens after the context that one line's query sees; `scores` is scratch.
SIMD_CLONES static void weigh_tail(attention *a, const output_head *h, uint32_t line, float *scores)
{
    const query *at = &a->at[line / h->group];
    const output_queries *s = at->set;
    uint32_t d = h->head_dim, n = s->tail[at->i] + 1;
    float *tail = a->tail + (size_t)line * d, top = a->top[line], sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        scores[i] = bend(h, dot(a->queries + (size_t)line * d, s->k + (size_t)i * d, d));
        top = scores[i] > top ? scores[i] : top;
    }
    if (h->sinks) sum += expf(h->sinks[line % h->group] - top);
    memset(tail, 0, d * sizeof *tail);
    for (uint32_t i = 0; i < n; i++) {
        float weight = softmax_exp(scores[i] - top);
        sum += weight;
        for (uint32_t c = 0; c < d; c++) tail[c] += weight * s->v[(size_t)i * d + c];
    }
    a->top[line] = top;
    a->mass[line] = sum;
}

SIMD_CLONES static void weigh_context(attention *a, uint32_t n_tokens)
{
    for (uint32_t i = 0; i < n_tokens; i++) {
        float *e = a->weights + (size_t)i * a->lines;
        for (uint32_t line = 0; line < a->lines; line++) e[line] = softmax_exp(e[line] - a->top[line]);
    }
}

// Computes the attention of the queries a->at [a->n].
static void attend(attention *a, const output_head *h)
{
    uint32_t d = h->head_dim, lines = a->n * h->group, most = 0;
    float scale = 1 / sqrtf((float)d);
    for (uint32_t i = 0; i < a->n; i++) {
        const output_queries *s = a->at[i].set;
        for (uint32_t c = 0; c < h->group * d; c++)
            a->queries[(size_t)i * h->group * d + c] = s->q[a->at[i].i * s->stride + c] * scale;
        most = s->tail[a->at[i].i] > most ? s->tail[a->at[i].i] : most;
    }
    memset(a->queries + (size_t)lines * d, 0, (size_t)(a->lines - lines) * d * sizeof *a->queries);
    gemm(false, true, h->n_tokens, a->lines, d, 1, h->k, d, a->queries, d, 0, a->weights, a->lines);
    find_tops(a, h);
    float *scores = need((size_t)most + 1, sizeof *scores, "scores");
    for (uint32_t line = 0; line < lines; line++) weigh_tail(a, h, line, scores);
    free(scores);
    weigh_context(a, h->n_tokens);
}

// ---- What is left when the context is cut ----

enum { STRETCH = 512 }; // tokens that are gathered at a time

typedef struct cut {
    const output_order *order;
    uint32_t start[BUCKETS + 1]; // of the buckets, in the order
    float *weights, *values;     // [STRETCH, lines], [STRETCH, d] in the order
    float *sums, *mass;          // [BUCKETS, lines, d], [BUCKETS, lines] of each bucket
    float *rest;                 // [d] scratch
    float *difference, *moved;   // [OUTPUT_LEVELS, lines, d]: o(kept) - o(all), and the same times gram
    float *squares;              // [OUTPUT_LEVELS, queries]
} cut;

static void cut_open(cut *c, const output_head *h, size_t lines)
{
    size_t d = h->head_dim;
    c->weights = need(STRETCH * lines, sizeof(float), "attention weights");
    c->values = need(STRETCH * d, sizeof(float), "values");
    c->sums = need(BUCKETS * lines * d, sizeof(float), "sums");
    c->mass = need(BUCKETS * lines, sizeof(float), "sums");
    c->rest = need(d, sizeof(float), "sums");
    c->difference = need(OUTPUT_LEVELS * lines * d, sizeof(float), "differences");
    c->moved = need(OUTPUT_LEVELS * lines * d, sizeof(float), "differences");
    c->squares = need(OUTPUT_LEVELS * lines / h->group, sizeof(float), "squares");
}

static void cut_close(cut *c)
{
    free_all(c->weights, c->values, c->sums, c->mass, c->rest, c->difference, c->moved, c->squares);
}

static void cut_by(cut *c, const output_order *order, uint32_t n_tokens)
{
    c->order = order;
    c->start[0] = 0;
    for (uint32_t i = 0; i < OUTPUT_LEVELS; i++) c->start[i + 1] = record_curve_tokens(i, n_tokens, order->protect);
    c->start[BUCKETS] = n_tokens;
}

// Gathers the values and the weights of n tokens, and adds the weights to mass [lines].
SIMD_CLONES static void gather(cut *c, float *mass, const output_head *h, const attention *a, const uint32_t *position,
                               uint32_t n)
{
    size_t d = h->head_dim, lines = a->lines;
    for (uint32_t i = 0; i < n; i++) {
        const float *from = a->weights + position[i] * lines;
        float *to = c->weights + i * lines;
        for (size_t line = 0; line < lines; line++) mass[line] += to[line] = from[line];
        memcpy(c->values + i * d, h->v + position[i] * d, d * sizeof(float));
    }
}

// Computes the sums of e and e v in each bucket.
static void sum_buckets(cut *c, const output_head *h, const attention *a)
{
    uint32_t d = h->head_dim, lines = a->lines;
    memset(c->mass, 0, (size_t)BUCKETS * lines * sizeof *c->mass);
    memset(c->sums, 0, (size_t)BUCKETS * lines * d * sizeof *c->sums);
    for (uint32_t b = 0; b < BUCKETS; b++) {
        float *sums = c->sums + (size_t)b * lines * d, *mass = c->mass + (size_t)b * lines;
        for (uint32_t at = c->start[b]; at < c->start[b + 1]; at += STRETCH) {
            uint32_t n = c->start[b + 1] - at < STRETCH ? c->start[b + 1] - at : STRETCH;
            gather(c, mass, h, a, c->order->position + at, n);
            gemm(true, false, lines, d, n, 1, c->weights, lines, c->values, d, at > c->start[b], sums, d);
        }
    }
}

// Computes one line's differences at all levels. What is kept is summed from the fewest tokens to the most; then `rest`
// and `dropped` sum what is evicted, from the other end.
SIMD_CLONES static void line_differences(cut *c, const output_head *h, const attention *a, uint32_t line)
{
    uint32_t d = h->head_dim;
    size_t step = (size_t)a->lines * d;
    float *at = c->difference + (size_t)line * d, dropped = 0, kept = a->mass[line], mass[OUTPUT_LEVELS];
    const float *sums = c->sums + (size_t)line * d;
    for (uint32_t i = 0; i < OUTPUT_LEVELS; i++) { // `at` holds the sums of what is kept, later the differences
        const float *before = i ? at + (i - 1) * step : a->tail + (size_t)line * d;
        for (uint32_t x = 0; x < d; x++) at[i * step + x] = before[x] + sums[i * step + x];
        mass[i] = kept += c->mass[i * a->lines + line];
    }
    float all = kept + c->mass[OUTPUT_LEVELS * a->lines + line];
    memset(c->rest, 0, d * sizeof *c->rest);
    for (uint32_t i = OUTPUT_LEVELS; i-- > 0;) {
        dropped += c->mass[(i + 1) * a->lines + line];
        float share = mass[i] > 0 ? dropped / mass[i] : 0, scale = all > 0 ? 1 / all : 0;
        for (uint32_t x = 0; x < d; x++) {
            c->rest[x] += sums[(i + 1) * step + x];
            at[i * step + x] = (share * at[i * step + x] - c->rest[x]) * scale;
        }
    }
}

static void find_differences(cut *c, const output_head *h, const attention *a)
{
    sum_buckets(c, h, a);
    for (uint32_t line = 0; line < a->n * h->group; line++) line_differences(c, h, a, line);
}

// Computes |W_O x|^2 of n rows x of all heads of the group; `moved` is scratch of their size.
static void square(float *out, const float *rows, float *moved, const output_head *h, size_t n)
{
    uint32_t width = h->group * h->head_dim;
    gemm(false, false, n, width, width, 1, rows, width, h->gram, width, 0, moved, width);
    for (size_t i = 0; i < n; i++) out[i] = dot(rows + i * width, moved + i * width, width);
}

// Adds the squares of a block's queries to those of their sets: sums [n_sets, OUTPUT_LEVELS].
static void add_squares(double *sums, cut *c, const output_head *h, const attention *a, const output_queries *sets)
{
    uint32_t n = a->lines / h->group;
    find_differences(c, h, a);
    square(c->squares, c->difference, c->moved, h, (size_t)OUTPUT_LEVELS * n);
    for (uint32_t i = 0; i < OUTPUT_LEVELS; i++)
        for (uint32_t q = 0; q < a->n; q++)
            sums[(a->at[q].set - sets) * OUTPUT_LEVELS + i] += (double)c->squares[(size_t)i * n + q];
}

// Takes the next queries of the sets before `end`, as many as a block holds. Returns false if there are none.
static bool next_block(attention *a, query *next, const output_queries *end)
{
    for (a->n = 0; next->set < end && a->n < a->most;) {
        if (next->i < next->set->n) a->at[a->n++] = (query){next->set, next->i++};
        else *next = (query){next->set + 1, 0};
    }
    return a->n > 0;
}

static void cut_errors(float *errors, const output_head *head, const output_queries *sets, uint32_t n_sets,
                       const output_order *orders, uint32_t n_orders)
{
    attention a;
    cut c;
    size_t n = (size_t)n_sets * OUTPUT_LEVELS;
    double *sums = need(n_orders * n, sizeof *sums, "squares");
    attention_open(&a, head, OUTPUT_BLOCK_QUERIES);
    cut_open(&c, head, a.lines);
    for (query next = {sets, 0}; next_block(&a, &next, sets + n_sets);) {
        attend(&a, head);
        for (uint32_t o = 0; o < n_orders; o++) {
            cut_by(&c, &orders[o], head->n_tokens);
            add_squares(sums + o * n, &c, head, &a, sets);
        }
    }
    for (size_t i = 0; i < n_orders * n; i++) {
        uint32_t queries = sets[i % n / OUTPUT_LEVELS].n;
        errors[i] = sums[i] > 0 ? (float)(sums[i] / queries) : 0;
    }
    cut_close(&c);
    attention_close(&a);
    free(sums);
}

void output_difference(float *difference, const output_head *head, const output_queries *set, const output_order *order,
                       const uint32_t *level)
{
    attention a;
    cut c;
    attention_open(&a, head, set->n);
    cut_open(&c, head, a.lines);
    cut_by(&c, order, head->n_tokens);
    (void)next_block(&a, &(query){set, 0}, set + 1);
    attend(&a, head);
    find_differences(&c, head, &a);
    size_t width = (size_t)head->group * head->head_dim, n = (size_t)a.lines * head->head_dim;
    for (uint32_t i = 0; i < set->n; i++)
        memcpy(difference + i * width, c.difference + level[i] * n + i * width, width * sizeof *difference);
    cut_close(&c);
    attention_close(&a);
}

// ---- What is left when keys and values are others ----

// A head's outputs over all of its tokens, and how they differ over others.
typedef struct comparison {
    const output_head *head;
    const output_queries *sets;
    uint32_t n_sets;
    attention a;
    float *output;        // [queries of all sets and a block, group d]
    float *other, *moved; // [queries of a block, group d]
    float *squares;       // [queries of a block]
    double *sums;         // [n_sets]
    float *k, *v;         // [T, d] the other keys and values
} comparison;

// out [lines, d]: a block's outputs.
static void outputs_of(float *out, const attention *a, const output_head *h)
{
    uint32_t d = h->head_dim;
    gemm(true, false, a->lines, d, h->n_tokens, 1, a->weights, a->lines, h->v, d, 0, out, d);
    for (uint32_t line = 0; line < a->n * h->group; line++) {
        float *row = out + (size_t)line * d, all = a->mass[line];
        for (uint32_t i = 0; i < h->n_tokens; i++) all += a->weights[(size_t)i * a->lines + line];
        for (uint32_t x = 0; x < d; x++) row[x] = all > 0 ? (row[x] + a->tail[(size_t)line * d + x]) / all : 0;
    }
}

static comparison comparison_open(const output_head *h, const output_queries *sets, uint32_t n_sets, uint32_t block)
{
    comparison c = {.head = h, .sets = sets, .n_sets = n_sets};
    size_t queries = block, width = (size_t)h->group * h->head_dim, rows = (size_t)h->n_tokens * h->head_dim;
    for (uint32_t s = 0; s < n_sets; s++) queries += sets[s].n;
    attention_open(&c.a, h, block);
    c.output = need(queries * width, sizeof(float), "outputs");
    c.other = need(block * width, sizeof(float), "outputs");
    c.moved = need(block * width, sizeof(float), "differences");
    c.squares = need(block, sizeof(float), "squares");
    c.sums = need(n_sets, sizeof *c.sums, "sums");
    c.k = need(rows, sizeof(float), "keys");
    c.v = need(rows, sizeof(float), "values");
    float *out = c.output;
    for (query next = {sets, 0}; next_block(&c.a, &next, sets + n_sets); out += c.a.n * width) {
        attend(&c.a, h);
        outputs_of(out, &c.a, h);
    }
    return c;
}

static void comparison_close(comparison *c)
{
    attention_close(&c->a);
    free_all(c->output, c->other, c->moved, c->squares, c->sums, c->k, c->v);
}

// Computes each set's error, `stride` numbers apart, with the keys and values of `other`; leaves those without queries.
static void compare(float *errors, size_t stride, comparison *c, const output_head *other)
{
    size_t width = (size_t)other->group * other->head_dim;
    const float *exact = c->output;
    memset(c->sums, 0, c->n_sets * sizeof *c->sums);
    for (query next = {c->sets, 0}; next_block(&c->a, &next, c->sets + c->n_sets); exact += c->a.n * width) {
        attend(&c->a, other);
        outputs_of(c->other, &c->a, other);
        for (size_t i = 0; i < c->a.n * width; i++) c->other[i] -= exact[i];
        square(c->squares, c->other, c->moved, c->head, c->a.most);
        for (uint32_t q = 0; q < c->a.n; q++) c->sums[c->a.at[q].set - c->sets] += (double)c->squares[q];
    }
    for (uint32_t s = 0; s < c->n_sets; s++)
        if (c->sets[s].n) errors[s * stride] = (float)(c->sums[s] / c->sets[s].n);
}

void output_packing_errors(float errors[RECORD_PACKINGS], const output_head *head, const output_queries *set)
{
    enum { INTEGERS = RECORD_PACKINGS / 2 };
    uint32_t step = set->n > OUTPUT_PACKING_QUERIES ? set->n / OUTPUT_PACKING_QUERIES : 1, T = head->n_tokens,
             d = head->head_dim, tails[OUTPUT_PACKING_QUERIES];
    output_queries some = *set;
    memset(errors, 0, RECORD_PACKINGS * sizeof *errors);
    if (some.n == 0) return;
    if (some.n > OUTPUT_PACKING_QUERIES) some.n = OUTPUT_PACKING_QUERIES;
    some.stride *= step;
    for (uint32_t q = 0; q < some.n; q++) tails[q] = set->tail[q * step];
    some.tail = tails;
    comparison c = comparison_open(head, &some, 1, OUTPUT_PACKING_QUERIES);
    void *packed = need((size_t)T * d, 2 * sizeof(float), "bytes of packed keys or values");
    for (int i = 0; i < RECORD_PACKINGS; i++) {
        kvb_packing p = KVB_PACK_INT8 + i % INTEGERS;
        kvb_side side = i < INTEGERS ? KVB_KEYS : KVB_VALUES;
        output_head other = *head;
        *(side == KVB_KEYS ? &other.k : &other.v) = c.k;
        errors[i] = INFINITY;
        if (kvb_pack(p, side, side == KVB_KEYS ? head->k : head->v, T, d, packed, NULL) == KVB_OK &&
            kvb_unpack(p, side, packed, T, d, c.k, NULL) == KVB_OK)
            compare(&errors[i], 1, &c, &other);
    }
    free(packed);
    comparison_close(&c);
}

// Replaces the errors of one level, OUTPUT_LEVELS numbers apart, if refitting changes what it keeps, `head->n_kept`
// tokens. `positions` [T] is scratch.
static kvb_status judge_refit(float *errors, comparison *c, const output_order *order, kvb_refit_head *head,
                              uint32_t *positions, void *work, size_t bytes, kvb_error *err)
{
    kvb_refit_result done;
    memcpy(positions, order->position, head->n_kept * sizeof *positions);
    qsort(positions, head->n_kept, sizeof *positions, compare_positions);
    head->positions = positions;
    kvb_status status = kvb_refit(head, work, bytes, c->k, c->v, NULL, &done, err);
    if (status != KVB_OK || !done.changed) return status;
    output_head other = *c->head;
    other.k = c->k;
    other.v = c->v;
    other.n_tokens = head->n_kept;
    compare(errors, OUTPUT_LEVELS, c, &other);
    return KVB_OK;
}

// Whether a level is refitted: every other one of those that keep up to half of the tokens.
static bool refits_level(uint32_t level, uint32_t n_tokens, const output_order *order)
{
    return level % 2 == 1 && level < OUTPUT_LEVELS &&
           record_curve_tokens(level, n_tokens, order->protect) <= n_tokens / 2;
}

// Lessens the errors of the levels between: by as much as those of their neighbours were, by the geometric mean.
static void lessen_between(float *errors, const float *as_cut, uint32_t n_tokens, const output_order *order)
{
    for (uint32_t i = 0; i < OUTPUT_LEVELS && record_curve_tokens(i, n_tokens, order->protect) <= n_tokens / 2;
         i += 2) {
        bool below = i > 0, above = refits_level(i + 1, n_tokens, order);
        double part = (below && as_cut[i - 1] > 0 ? (double)errors[i - 1] / (double)as_cut[i - 1] : 1) *
                      (above && as_cut[i + 1] > 0 ? (double)errors[i + 1] / (double)as_cut[i + 1] : 1);
        errors[i] *= (float)(below && above ? sqrt(part) : part);
    }
}

kvb_status output_errors(float *errors, const output_head *head, const output_queries *sets, uint32_t n_sets,
                         const output_order *orders, uint32_t n_orders, kvb_error *err)
{
    uint32_t T = head->n_tokens;
    size_t bytes = 0;
    cut_errors(errors, head, sets, n_sets, orders, n_orders);
    if (!head->refit || T < 2) return KVB_OK;
    kvb_refit_head refit = *head->refit;
    refit.n_kept = T / 2;
    kvb_status status = kvb_refit_bytes(&refit, &bytes, err);
    if (status != KVB_OK) return status;
    comparison c = comparison_open(head, sets, n_sets, OUTPUT_BLOCK_QUERIES);
    float *as_cut = need_copy(errors, (size_t)n_orders * n_sets * OUTPUT_LEVELS, sizeof *errors, "errors");
    uint32_t *positions = need(T, sizeof *positions, "positions");
    void *work = need(bytes, 1, "working memory for refitting");
    for (uint32_t o = 0; o < n_orders && status == KVB_OK; o++) {
        size_t at = (size_t)o * n_sets * OUTPUT_LEVELS;
        for (uint32_t i = 0; i < OUTPUT_LEVELS && status == KVB_OK; i++) {
            refit.n_kept = record_curve_tokens(i, T, orders[o].protect);
            if (refits_level(i, T, &orders[o]))
                status = judge_refit(errors + at + i, &c, &orders[o], &refit, positions, work, bytes, err);
        }
        for (uint32_t s = 0; s < n_sets; s++, at += OUTPUT_LEVELS)
            lessen_between(errors + at, as_cut + at, T, &orders[o]);
    }
    free_all(as_cut, positions, work);
    comparison_close(&c);
    return status;
}
