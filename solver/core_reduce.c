// Which choices of an exact problem are left, and the hulls of them (core_work.h).
#include "runtime/fail.h"
#include "solver/core_work.h"
#include <math.h>
#include <stdlib.h>

bool core_grow(void *array, size_t *capacity, size_t count, size_t size)
{
    void **at = array;
    size_t wanted, bytes;
    if (*at && count <= *capacity) return true;
    if (__builtin_add_overflow(count, count / 2 + 16, &wanted) || __builtin_mul_overflow(wanted, size, &bytes))
        return false;
    void *fresh = realloc(*at, bytes);
    if (!fresh) return false;
    *at = fresh;
    *capacity = wanted;
    return true;
}

// The curve of a head as if it began at 0 tokens: element b is the loss with b >= |P| tokens.
static const double *curve_of(const core_problem *p, uint32_t h)
{
    const cache_shape *s = &p->curves->shape;
    return p->curves->loss + (size_t)(p->first + h) * (shape_middle(s) + 1);
}

static double reduced_cost(const double *loss, uint32_t protect, uint32_t b, uint32_t base, double lambda)
{
    double cost = loss[b - protect] - loss[base - protect] + lambda * ((double)b - base);
    return cost > 0 ? cost : 0; // below 0 by rounding only
}

// ---- Reduction ------------------------------------------------------------------------------------------------------

double core_minimise(core_work *w, const core_problem *p, double lambda)
{
    uint32_t protect = shape_protected(&p->curves->shape);
    double gap = 0;
    for (uint32_t h = 0; h < p->n; h++) {
        const double *loss = curve_of(p, h);
        uint32_t cap = core_cap(p, h), base = core_least(p, h);
        double best = loss[base - protect] + lambda * base;
        for (uint32_t b = base + 1; b <= cap; b++) {
            double value = loss[b - protect] + lambda * b;
            if (value < best) {
                best = value;
                base = b;
            }
        }
        w->base[h] = base;
        gap += reduced_cost(loss, protect, p->start[h], base, lambda);
    }
    return gap;
}

double core_margin(const core_problem *p, double lambda, double gap)
{
    double size = 0;
    for (uint32_t h = 0; h < p->n; h++) size += curve_of(p, h)[p->curves->floor - shape_protected(&p->curves->shape)];
    return 0x1p-50 * (size + lambda * p->n * p->curves->shape.n_tokens + p->n * gap);
}

kvb_status core_reduce(core_work *w, const core_problem *p, double lambda, double theta, kvb_error *err)
{
    uint32_t protect = shape_protected(&p->curves->shape);
    choices *out = &w->all;
    size_t count = 0;
    for (uint32_t h = 0; h < p->n; h++) {
        const double *loss = curve_of(p, h);
        uint32_t least = core_least(p, h), cap = core_cap(p, h), base = w->base[h];
        if (!core_grow(&out->at, &out->capacity, count + cap - least + 1, sizeof *out->at))
            return kvb_fail(err, KVB_MEMORY, "exact solution: not enough memory for the choices of %u heads", p->n);
        out->first[h] = count;
        for (uint32_t b = least; b <= cap; b++) {
            double cost = reduced_cost(loss, protect, b, base, lambda);
            if (cost > theta || (b > least && b != base && loss[b - protect] == loss[b - 1 - protect])) continue;
            out->at[count++] = (choice){cost, b};
        }
    }
    out->first[p->n] = count;
    return KVB_OK;
}

kvb_status core_narrow(core_work *w, uint32_t n, double theta, kvb_error *err)
{
    choices *out = &w->active;
    size_t count = 0;
    if (!core_grow(&out->at, &out->capacity, w->all.first[n], sizeof *out->at))
        return kvb_fail(err, KVB_MEMORY, "exact solution: not enough memory for %zu choices", w->all.first[n]);
    for (uint32_t h = 0; h < n; h++) {
        out->first[h] = count;
        for (size_t i = w->all.first[h]; i < w->all.first[h + 1]; i++)
            if (w->all.at[i].cost <= theta) out->at[count++] = w->all.at[i];
    }
    out->first[n] = count;
    return KVB_OK;
}

// ---- What the heads not handled yet can do at the least -------------------------------------------------------------

// The lower hull of one head's choices from its minimiser at `from` outwards to `to`, in steps of `step`.
static void add_hull(core_work *w, moves *out, uint32_t head, const choice *at, int64_t from, int64_t to, int step)
{
    uint32_t *stack = w->stack;
    size_t top = 0;
    for (int64_t i = from; i != to + step; i += step) {
        while (top > 1) {
            const choice *a = &at[stack[top - 2]], *b = &at[stack[top - 1]], *c = &at[i];
            double ab = fabs((double)b->keep - a->keep), ac = fabs((double)c->keep - a->keep);
            if ((b->cost - a->cost) * ac < (c->cost - a->cost) * ab) break;
            top--;
        }
        stack[top++] = (uint32_t)i;
    }
    double last = 0;
    for (size_t k = 0; k + 1 < top; k++) {
        const choice *a = &at[stack[k]], *b = &at[stack[k + 1]];
        uint32_t length = b->keep > a->keep ? b->keep - a->keep : a->keep - b->keep;
        double slope = (b->cost - a->cost) / length;
        last = slope > last ? slope : last; // rounding must not undo the order within a head
        out->at[out->count++] = (keyed){key_from_double(last), head, length};
    }
}

kvb_status core_make_moves(core_work *w, uint32_t n, kvb_error *err)
{
    size_t count = w->active.first[n];
    if (count > w->moves_capacity || !w->stack) {
        size_t room = count + count / 2 + 16;
        void **const arrays[] = {(void **)&w->more.at, (void **)&w->fewer.at, (void **)&w->scratch, (void **)&w->stack};
        const size_t sizes[] = {sizeof(keyed), sizeof(keyed), sizeof(keyed), sizeof *w->stack};
        for (size_t i = 0; i < 4; i++) {
            void *fresh = realloc(*arrays[i], room * sizes[i]);
            if (!fresh) return kvb_fail(err, KVB_MEMORY, "exact solution: not enough memory for %zu choices", count);
            *arrays[i] = fresh;
        }
        w->moves_capacity = room;
    }
    w->more.count = w->fewer.count = 0;
    for (uint32_t h = 0; h < n; h++) {
        const choice *at = w->active.at + w->active.first[h];
        int64_t last = (int64_t)(w->active.first[h + 1] - w->active.first[h]) - 1, base = 0;
        while (at[base].keep != w->base[h]) base++;
        add_hull(w, &w->more, h, at, base, last, 1);
        add_hull(w, &w->fewer, h, at, base, 0, -1);
    }
    radix_sort(w->more.at, w->scratch, w->more.count, 64);
    radix_sort(w->fewer.at, w->scratch, w->fewer.count, 64);
    return KVB_OK;
}

void core_drop_head(moves *m, uint32_t head)
{
    size_t count = 0;
    for (size_t i = 0; i < m->count; i++)
        if (m->at[i].a != head) m->at[count++] = m->at[i];
    m->count = count;
}

int64_t core_reach(const moves *m, double theta, double spare)
{
    static const double FAR = 1e15;
    int64_t tokens = 0;
    double left = theta;
    for (size_t i = 0; i < m->count; i++) {
        double cost = double_from_key(m->at[i].key);
        if (cost * m->at[i].b > left) return tokens + (int64_t)(left / cost) + 1;
        left -= cost * m->at[i].b;
        tokens += m->at[i].b;
    }
    if (spare == INFINITY) return tokens;
    double rest = spare > 0 ? left / spare + 1 : FAR;
    return tokens + (int64_t)(rest < FAR ? rest : FAR);
}

void core_price_tokens(const moves *m, double spare, int64_t skip, double *price, int64_t count, int step)
{
    double sum = 0;
    size_t i = 0;
    uint32_t used = 0;
    for (int64_t k = 0; k < skip + count; k++) {
        if (k >= skip) price[(k - skip) * step] = sum;
        while (i < m->count && used == m->at[i].b) {
            i++;
            used = 0;
        }
        sum += i < m->count ? double_from_key(m->at[i].key) : spare;
        used++;
    }
}
