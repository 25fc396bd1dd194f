#include "solver/curve.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "solver/radix.h"
#include "solver/wide.h"
#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdbool.h>
#include <stdlib.h>

kvb_status cache_shape_check(const cache_shape *s, kvb_error *err)
{
    if (s->n_layers == 0 || s->n_kv_heads == 0 || s->n_tokens == 0)
        return kvb_fail(err, KVB_ARGUMENT, "solver: expected at least one layer, KV head and token, found %u, %u, %u",
                        s->n_layers, s->n_kv_heads, s->n_tokens);
    if ((uint64_t)s->sink + s->window >= s->n_tokens)
        return kvb_fail(
            err, KVB_ARGUMENT,
            "solver: %u sink + %u window tokens protect all %u tokens of the context, so there is nothing to choose; "
            "calibrate on longer contexts or lower --sink and --window",
            s->sink, s->window, s->n_tokens);
    // 64 bytes per head and token is more than any array of the solver takes. Radix counters are 32 bits wide.
    size_t bytes;
    uint32_t heads;
    if (__builtin_mul_overflow(s->n_layers, s->n_kv_heads, &heads) ||
        __builtin_mul_overflow((size_t)heads, (size_t)s->n_tokens + 1, &bytes) || bytes > UINT32_MAX ||
        __builtin_mul_overflow(bytes, (size_t)64, &bytes))
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "solver: %u layers x %u KV heads x %u tokens: expected fewer than 2^32 in all", s->n_layers,
                        s->n_kv_heads, s->n_tokens);
    return KVB_OK;
}

uint32_t shape_floor(const cache_shape *s)
{
    double share = rint((1.0 - 0.99) * (double)s->n_tokens);
    uint32_t protect = shape_protected(s);
    return share > (double)protect ? (uint32_t)share : protect;
}

// Where element i of [L,G,T] lies, for messages.
static kvb_status fail_at(const cache_shape *s, const char *what, size_t i, double found, const char *expected,
                          kvb_error *err)
{
    size_t head = i / s->n_tokens;
    return kvb_fail(err, KVB_NUMERIC,
                    "%s: layer %zu, KV head %zu, token %zu: expected %s, found %g; profile this context again", what,
                    head / s->n_kv_heads, head % s->n_kv_heads, i % s->n_tokens, expected, found);
}

kvb_status metric_order_make(metric_order *out, const cache_shape *shape, const float *scores, kvb_error *err)
{
    *out = (metric_order){0};
    kvb_status status = cache_shape_check(shape, err);
    if (status) return status;
    size_t n = shape_heads(shape), t = shape->n_tokens, m = shape_middle(shape);
    for (size_t i = 0; i < n * t; i++)
        if (isnan(scores[i])) return fail_at(shape, "scores", i, (double)scores[i], "a number", err);

    size_t threads = (size_t)omp_get_max_threads();
    uint32_t *position = need_more(NULL, n * m, sizeof *position, "positions");
    keyed *work = need_more(NULL, threads * 2 * m, sizeof *work, "scores");
#pragma omp parallel for schedule(static) if (n * m > PARALLEL_CELLS)
    for (size_t h = 0; h < n; h++) {
        keyed *items = work + (size_t)omp_get_thread_num() * 2 * m;
        const float *row = scores + h * t + shape->sink;
        // Complemented keys: ascending keys are descending scores, and a stable sort leaves equal ones by position.
        for (size_t i = 0; i < m; i++)
            items[i] = (keyed){(uint32_t)~key_from_float(row[i]), (uint32_t)i + shape->sink, 0};
        radix_sort(items, items + m, m, 32);
        for (size_t i = 0; i < m; i++) position[h * m + i] = items[i].a;
    }
    free(work);
    *out = (metric_order){*shape, position};
    return KVB_OK;
}

void metric_order_free(metric_order *order)
{
    free(order->position);
    *order = (metric_order){0};
}

loss_curves loss_curves_make(const cache_shape *shape)
{
    size_t n = shape_heads(shape), m = shape_middle(shape);
    loss_curves c = {.shape = *shape, .floor = shape_floor(shape)};
    c.gain = need(n * m, sizeof *c.gain, "gains");
    c.loss = need(n * (m + 1), sizeof *c.loss, "losses");
    return c;
}

void loss_curves_free(loss_curves *c)
{
    free_all(c->gain, c->loss);
    *c = (loss_curves){0};
}

// Without a short circuit, which would be a branch for every number.
static inline bool is_wrong(float importance)
{
    return !(importance >= 0) | (importance > FLT_MAX);
}

WIDE static bool any_wrong(const float *row, size_t n)
{
    int wrong = 0;
    for (size_t i = 0; i < n; i++) wrong |= is_wrong(row[i]);
    return wrong;
}

WIDE static void gather_gains(double *out, const float *row, const uint32_t *position, size_t n)
{
    for (size_t i = 0; i < n; i++) out[i] = (double)row[position[i]];
}

kvb_status loss_curves_fill(loss_curves *c, const metric_order *order, const float *oracle, kvb_error *err)
{
    const cache_shape *s = &c->shape, *o = &order->shape;
    if (s->n_layers != o->n_layers || s->n_kv_heads != o->n_kv_heads || s->n_tokens != o->n_tokens ||
        s->sink != o->sink || s->window != o->window)
        return kvb_fail(err, KVB_ARGUMENT, "solver: the curves were made for another shape than the metric's order");
    size_t n = shape_heads(s), t = s->n_tokens, m = shape_middle(s), bad = SIZE_MAX;
#pragma omp parallel for schedule(static) if (n * m > PARALLEL_CELLS) reduction(min : bad)
    for (size_t h = 0; h < n; h++) {
        const float *row = oracle + h * t;
        bool wrong = any_wrong(row, t); // first whether, without branches; then where
        for (size_t i = 0; wrong && i < t; i++)
            if (is_wrong(row[i]) && h * t + i < bad) bad = h * t + i;
        gather_gains(c->gain + h * m, row, order->position + h * m, m);
    }
    if (bad != SIZE_MAX) return fail_at(s, "oracle", bad, (double)oracle[bad], "a finite number of 0 or more", err);
    loss_curves_sum(c);
    return KVB_OK;
}

kvb_status loss_curves_fill_perfect(loss_curves *c, const float *oracle, kvb_error *err)
{
    metric_order order;
    kvb_status status = metric_order_make(&order, &c->shape, oracle, err);
    if (status == KVB_OK) status = loss_curves_fill(c, &order, oracle, err);
    metric_order_free(&order);
    return status;
}

void loss_curves_sum(loss_curves *c)
{
    size_t n = shape_heads(&c->shape), m = shape_middle(&c->shape);
    // A sum waits for the one before it: several heads at once keep the adder busy. The last group may be smaller.
    enum { AT_ONCE = 4 };
#pragma omp parallel for schedule(static) if (n * m > PARALLEL_CELLS)
    for (size_t first = 0; first < n; first += AT_ONCE) {
        size_t heads = n - first < AT_ONCE ? n - first : AT_ONCE;
        double sum[AT_ONCE] = {0};
        for (size_t k = 0; k < heads; k++) c->loss[(first + k) * (m + 1) + m] = 0;
        if (heads < AT_ONCE) {
            for (size_t k = 0; k < heads; k++)
                for (size_t i = m; i-- > 0;)
                    c->loss[(first + k) * (m + 1) + i] = sum[k] += c->gain[(first + k) * m + i];
            continue;
        }
        const double *gain = c->gain + first * m;
        double *loss = c->loss + first * (m + 1);
        for (size_t i = m; i-- > 0;)
            for (size_t k = 0; k < AT_ONCE; k++) loss[k * (m + 1) + i] = sum[k] += gain[k * m + i];
    }
    c->total = 0;
    for (size_t h = 0; h < n; h++) c->total += c->loss[h * (m + 1)]; // in one order, whatever the threads did
}
