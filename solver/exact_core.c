#include "solver/exact_core.h"
#include "runtime/fail.h"
#include "solver/core_work.h"
#include "solver/wide.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

core_work *core_work_new(void)
{
    return calloc(1, sizeof(core_work));
}

void core_work_free(core_work *w)
{
    if (!w) return;
    void *const all[] = {w->all.at,  w->all.first, w->active.at, w->active.first, w->base,   w->order, w->stack,
                         w->more.at, w->fewer.at,  w->scratch,   w->layers,       w->values, w->price};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(w);
}

static bool grow_heads(core_work *w, size_t n)
{
    if (n <= w->heads) return true;
    void **const arrays[] = {(void **)&w->all.first, (void **)&w->active.first, (void **)&w->base, (void **)&w->order,
                             (void **)&w->layers};
    const size_t sizes[] = {sizeof *w->all.first, sizeof *w->active.first, sizeof *w->base, sizeof *w->order,
                            sizeof *w->layers};
    for (size_t i = 0; i < 5; i++) {
        void *fresh = realloc(*arrays[i], (n + 1) * sizes[i]);
        if (!fresh) return false;
        *arrays[i] = fresh;
    }
    w->heads = n;
    return true;
}

// ---- The dynamic program --------------------------------------------------------------------------------------------

// Heads that have a choice, those with most choices at both ends: there few states meet many choices.
static uint32_t order_heads(core_work *w, uint32_t n)
{
    uint32_t count = 0, *order = w->order;
    keyed *items = w->scratch; // as many as there are choices, at least
    for (uint32_t h = 0; h < n; h++) {
        size_t left = w->active.first[h + 1] - w->active.first[h];
        if (left > 1) items[count++] = (keyed){~(uint64_t)left, h, 0};
    }
    for (uint32_t i = 1; i < count; i++) { // few; stable
        keyed x = items[i];
        uint32_t j = i;
        for (; j > 0 && items[j - 1].key > x.key; j--) items[j] = items[j - 1];
        items[j] = x;
    }
    for (uint32_t i = 0; i < count; i++) order[i % 2 ? count - 1 - i / 2 : i / 2] = items[i].a;
    return count;
}

WIDE void core_relax(double *restrict to, const double *restrict from, size_t n, double cost)
{
    for (size_t i = 0; i < n; i++) {
        double value = from[i] + cost;
        to[i] = value < to[i] ? value : to[i];
    }
}

// Where the next layer may lie: what the choices reach, and what the other heads can make up for.
static bool place_layer(const core_work *w, const layer *from, layer *to, int64_t target, double theta, double lambda)
{
    const choice *at = w->active.at + w->active.first[to->head], *end = w->active.at + w->active.first[to->head + 1];
    int64_t base = w->base[to->head], low = from->low + (int64_t)at->keep - base;
    int64_t high = from->low + (int64_t)from->count - 1 + (int64_t)end[-1].keep - base;
    int64_t least = target - core_reach(&w->more, theta, lambda),
            most = target + core_reach(&w->fewer, theta, INFINITY);
    if (low < least) low = least;
    if (high > most) high = most;
    to->low = low;
    to->count = high < low ? 0 : (size_t)(high - low + 1);
    to->offset = from->offset + from->count;
    return high >= low;
}

static uint64_t relax_layer(core_work *w, const layer *from, const layer *to)
{
    double *values = w->values + to->offset;
    uint64_t work = 0;
    for (size_t i = 0; i < to->count; i++) values[i] = INFINITY;
    for (size_t j = w->active.first[to->head]; j < w->active.first[to->head + 1]; j++) {
        int64_t shift = from->low + (int64_t)w->active.at[j].keep - w->base[to->head] - to->low;
        int64_t begin = shift > 0 ? shift : 0, end = shift + (int64_t)from->count;
        if (end > (int64_t)to->count) end = (int64_t)to->count;
        if (begin >= end) continue;
        core_relax(values + begin, w->values + from->offset + (begin - shift), (size_t)(end - begin),
                   w->active.at[j].cost);
        work += (uint64_t)(end - begin);
    }
    return work;
}

// Drops the states that the other heads cannot complete within theta, and shortens the layer to the others.
static void prune_layer(core_work *w, layer *to, int64_t target, double theta, double lambda)
{
    double *values = w->values + to->offset, *price = w->price;
    int64_t low = to->low, high = to->low + (int64_t)to->count - 1, begin, end;
    if (low <= target) { // tokens are missing
        int64_t top = high < target ? high : target;
        core_price_tokens(&w->more, lambda, target - top, price + (top - low), top - low + 1, -1);
    }
    if (high > target) {
        int64_t bottom = low > target ? low : target + 1;
        core_price_tokens(&w->fewer, INFINITY, bottom - target, price + (bottom - low), high - bottom + 1, 1);
    }
    for (size_t i = 0; i < to->count; i++)
        if (!(values[i] + price[i] <= theta)) values[i] = INFINITY;
    for (begin = 0; begin <= high - low && values[begin] == INFINITY;) begin++;
    for (end = high - low; end > begin && values[end] == INFINITY;) end--;
    if (begin > high - low) {
        to->count = 0;
        return;
    }
    // Values stay where they are: the layer begins further up.
    to->low = low + begin;
    to->offset += (size_t)begin;
    to->count = (size_t)(end - begin + 1);
}

// From the best end back to the choice of every head: the sum that was stored is found again, bit for bit.
static void trace(const core_work *w, uint32_t n, uint32_t n_layers, int64_t at, uint32_t *keep)
{
    memcpy(keep, w->base, n * sizeof *keep);
    for (uint32_t k = n_layers; k-- > 0;) {
        const layer *from = &w->layers[k], *to = &w->layers[k + 1];
        double value = w->values[to->offset + (size_t)(at - to->low)];
        for (size_t j = w->active.first[to->head]; j < w->active.first[to->head + 1]; j++) {
            int64_t before = at - ((int64_t)w->active.at[j].keep - w->base[to->head]) - from->low;
            if (before < 0 || before >= (int64_t)from->count) continue;
            if (w->values[from->offset + (size_t)before] + w->active.at[j].cost != value) continue;
            keep[to->head] = w->active.at[j].keep;
            at = before + from->low;
            break;
        }
    }
}

// Tokens that stay unspent go to heads that keep fewer than in start, then to any, in order.
static void spend(const core_problem *p, uint32_t *keep)
{
    int64_t left = 0;
    for (uint32_t h = 0; h < p->n; h++) left += (int64_t)p->start[h] - keep[h];
    for (int round = 0; round < 2; round++)
        for (uint32_t h = 0; h < p->n && left > 0; h++) {
            int64_t room = (int64_t)(round == 0 ? p->start[h] : core_cap(p, h)) - keep[h];
            int64_t take = room < left ? room : left;
            if (take <= 0) continue;
            keep[h] += (uint32_t)take;
            left -= take;
        }
}

typedef enum dp_end { DP_FOUND, DP_NOTHING, DP_TOO_LARGE, DP_NO_MEMORY } dp_end;

// The best budgets whose reduced costs sum to at most theta.
static dp_end run_dp(core_work *w, const core_problem *p, int64_t target, double theta, double lambda, uint32_t *keep,
                     uint64_t *work)
{
    uint32_t n = order_heads(w, p->n);
    if (target < -core_reach(&w->fewer, theta, INFINITY) || target > core_reach(&w->more, theta, lambda))
        return DP_NOTHING;
    if (!core_grow(&w->values, &w->values_capacity, 1, sizeof *w->values)) return DP_NO_MEMORY;
    w->values[0] = 0;
    w->layers[0] = (layer){0, 0, 1, 0};
    for (uint32_t k = 0; k < n; k++) {
        layer *from = &w->layers[k], *to = from + 1;
        to->head = w->order[k];
        core_drop_head(&w->more, to->head);
        core_drop_head(&w->fewer, to->head);
        if (!place_layer(w, from, to, target, theta, lambda)) return DP_NOTHING;
        size_t left = w->active.first[to->head + 1] - w->active.first[to->head];
        if ((to->offset + to->count) > p->max_bytes / sizeof *w->values ||
            *work + (double)left * (double)(from->count < to->count ? from->count : to->count) > (double)p->max_work)
            return DP_TOO_LARGE;
        if (!core_grow(&w->values, &w->values_capacity, to->offset + to->count, sizeof *w->values) ||
            !core_grow(&w->price, &w->price_capacity, to->count, sizeof *w->price))
            return DP_NO_MEMORY;
        *work += relax_layer(w, from, to);
        prune_layer(w, to, target, theta, lambda);
        if (to->count == 0) return DP_NOTHING;
    }
    const layer *end = &w->layers[n];
    int64_t at = INT64_MAX;
    double best = theta;
    for (size_t i = end->count; i-- > 0;) {
        int64_t x = end->low + (int64_t)i;
        double value =
            x > target ? INFINITY : w->values[end->offset + i] + (target > x ? lambda * (double)(target - x) : 0);
        if (value < best || (value == best && at == INT64_MAX)) {
            best = value;
            at = x;
        }
    }
    if (at == INT64_MAX) return DP_NOTHING;
    trace(w, p->n, n, at, keep);
    spend(p, keep);
    return DP_FOUND;
}

// ---- One problem ----------------------------------------------------------------------------------------------------

// The multiplier at which the hulls of the choices that are left use up the budget: the slope of the move that meets
// the target. When meeting it costs no more than rounding, lambda is that multiplier.
static double better_lambda(const core_work *w, int64_t target, double lambda, double margin)
{
    const moves *m = target > 0 ? &w->more : &w->fewer;
    int64_t left = target > 0 ? target : -target;
    double cost = 0, sum = 0;
    for (size_t i = 0; i < m->count && left > 0; i++) {
        cost = double_from_key(m->at[i].key);
        sum += cost * (double)(left < m->at[i].b ? left : m->at[i].b);
        left -= m->at[i].b;
    }
    double better = target > 0 ? lambda - cost : lambda + cost;
    return sum <= margin ? lambda : better > 0 ? better : 0;
}

static int64_t target_of(const core_work *w, const core_problem *p)
{
    int64_t target = 0;
    for (uint32_t h = 0; h < p->n; h++) target += (int64_t)p->start[h] - w->base[h];
    return target;
}

// The reduction by start's gap, with the best multiplier: greedy's own when greedy's hulls are those of the problem,
// so that nothing is to be improved; after a cap, or a hull over another range, a step or two away.
static kvb_status reduce_best(core_work *w, const core_problem *p, core_answer *a, kvb_error *err)
{
    double lambda = p->lambda;
    a->gap = INFINITY;
    for (int step = 0; step < 6; step++) {
        double gap = core_minimise(w, p, lambda);
        if (gap < a->gap) {
            a->gap = gap;
            a->lambda = lambda;
        } else if (step > 0) {
            break;
        }
        a->margin = core_margin(p, lambda, gap);
        if (gap <= a->margin) return KVB_OK;
        kvb_status status = core_reduce(w, p, lambda, gap + a->margin, err);
        if (status == KVB_OK) status = core_narrow(w, p->n, gap + a->margin, err);
        if (status == KVB_OK) status = core_make_moves(w, p->n, err);
        if (status != KVB_OK) return status;
        double next = better_lambda(w, target_of(w, p), lambda, a->margin);
        if (next == lambda) return KVB_OK;
        lambda = next;
    }
    if (lambda == a->lambda) return KVB_OK;
    double gap = core_minimise(w, p, a->lambda); // the last step was no better: go back
    a->margin = core_margin(p, a->lambda, gap);
    return core_reduce(w, p, a->lambda, gap + a->margin, err);
}

static double loss_of(const core_problem *p, const uint32_t *keep)
{
    double sum = 0;
    for (uint32_t h = 0; h < p->n; h++) sum += loss_at(p->curves, p->first + h, keep[h]);
    return sum;
}

kvb_status core_solve(core_work *w, const core_problem *p, uint32_t *keep, core_answer *a, kvb_error *err)
{
    *a = (core_answer){.lambda = p->lambda, .proved = true};
    memcpy(keep, p->start, p->n * sizeof *keep);
    if (!grow_heads(w, p->n)) return kvb_fail(err, KVB_MEMORY, "exact solution: not enough memory for %u heads", p->n);
    kvb_status status = reduce_best(w, p, a, err);
    if (status != KVB_OK || a->gap <= a->margin) return status;
    double all = 0;
    for (uint32_t h = 0; h < p->n; h++) all += core_cap(p, h) - core_least(p, h) + 1;
    a->surviving = (double)w->all.first[p->n] / all;
    int64_t target = target_of(w, p);
    dp_end end = DP_NOTHING;
    for (double theta = a->gap / 1024; end == DP_NOTHING; theta *= 4) {
        double limit = (theta < a->gap ? theta : a->gap) + a->margin;
        status = core_narrow(w, p->n, limit, err);
        if (status == KVB_OK) status = core_make_moves(w, p->n, err);
        if (status != KVB_OK) return status;
        end = run_dp(w, p, target, limit, a->lambda, keep, &a->work);
        if (end == DP_NOTHING && theta >= a->gap) break; // start itself is within the gap, so this is never reached
    }
    if (end == DP_NO_MEMORY) return kvb_fail(err, KVB_MEMORY, "exact solution: not enough memory for the states");
    a->proved = end == DP_FOUND;
    if (!a->proved || loss_of(p, p->start) <= loss_of(p, keep) + a->margin) memcpy(keep, p->start, p->n * sizeof *keep);
    return KVB_OK;
}
