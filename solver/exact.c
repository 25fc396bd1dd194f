#include "solver/exact.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "solver/certificate.h"
#include "solver/radix.h"
#include "solver/wide.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// A choice that is left: its reduced cost and the tokens that it keeps.
typedef struct choice {
    double cost;
    uint32_t keep;
} choice;

// Choices by head: those of head h are at[first[h]] .. at[first[h + 1] - 1], fewest tokens first.
typedef struct choices {
    choice *at;
    size_t *first;
    size_t capacity;
} choices;

// Ways of the heads not handled yet to take more or fewer tokens than their minimisers, cheapest token first: key holds
// the cost of one token, a the head, b the number of tokens.
typedef struct moves {
    keyed *at;
    size_t count;
} moves;

// The states after one head: sums low .. low + count - 1 of tokens beyond the minimisers.
typedef struct layer {
    uint32_t head;
    int64_t low;
    size_t count, offset; // values[offset + x - low]
} layer;

struct core_work {
    choices all, active; // after the reduction by the gap, and by theta
    uint32_t *base;      // [n] minimisers of L_n(b) + lambda b
    uint32_t *order, *stack;
    moves more, fewer;
    keyed *scratch;
    layer *layers; // [n + 1]
    double *values, *price;
    size_t heads, moves_capacity, values_capacity, price_capacity;
};

// Fewest and most tokens that head h of the problem may keep.
static uint32_t core_least(const core_problem *p, uint32_t h)
{
    return p->least ? p->least[h] : p->curves->floor;
}

static uint32_t core_cap(const core_problem *p, uint32_t h)
{
    return p->cap ? p->cap[h] : p->curves->shape.n_tokens;
}

core_work *core_work_new(void)
{
    return need(1, sizeof(core_work), "exact problems");
}

void core_work_free(core_work *w)
{
    if (!w) return;
    free_all(w->all.at, w->all.first, w->active.at, w->active.first, w->base, w->order, w->stack, w->more.at,
             w->fewer.at, w->scratch, w->layers, w->values, w->price, w);
}

// Returns the array with room for `count` elements; it grows by half more than is asked, so that growing is rare.
static void *grown(void *array, size_t *capacity, size_t count, size_t size)
{
    if (array && count <= *capacity) return array;
    *capacity = count + count / 2 + 16;
    return need_more(array, *capacity, size, "choices or states of an exact problem");
}

static void grow_heads(core_work *w, size_t n)
{
    if (n <= w->heads) return;
    w->all.first = need_more(w->all.first, n + 1, sizeof *w->all.first, "heads");
    w->active.first = need_more(w->active.first, n + 1, sizeof *w->active.first, "heads");
    w->base = need_more(w->base, n + 1, sizeof *w->base, "heads");
    w->order = need_more(w->order, n + 1, sizeof *w->order, "heads");
    w->layers = need_more(w->layers, n + 1, sizeof *w->layers, "heads");
    w->heads = n;
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

// Finds every head's minimiser, the fewest tokens of equal ones; returns the loss of start - D(lambda). Summed from
// reduced costs, it is exact to its own size, not to that of the losses.
static double find_minimisers(core_work *w, const core_problem *p, double lambda)
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

// By how much the limits are widened so that rounding loses nothing; see exact.h.
static double rounding_margin(const core_problem *p, double lambda, double gap)
{
    double size = 0;
    for (uint32_t h = 0; h < p->n; h++) size += curve_of(p, h)[p->curves->floor - shape_protected(&p->curves->shape)];
    return 0x1p-50 * (size + lambda * p->n * p->curves->shape.n_tokens + p->n * gap);
}

// Makes w->all: the choices with a reduced cost of at most `theta` that no choice of fewer tokens equals in loss.
static void reduce_choices(core_work *w, const core_problem *p, double lambda, double theta)
{
    uint32_t protect = shape_protected(&p->curves->shape);
    choices *out = &w->all;
    size_t count = 0;
    for (uint32_t h = 0; h < p->n; h++) {
        const double *loss = curve_of(p, h);
        uint32_t least = core_least(p, h), cap = core_cap(p, h), base = w->base[h];
        out->at = grown(out->at, &out->capacity, count + cap - least + 1, sizeof *out->at);
        out->first[h] = count;
        for (uint32_t b = least; b <= cap; b++) {
            double cost = reduced_cost(loss, protect, b, base, lambda);
            if (cost > theta || (b > least && b != base && loss[b - protect] == loss[b - 1 - protect])) continue;
            out->at[count++] = (choice){cost, b};
        }
    }
    out->first[p->n] = count;
}

// Fills w->active with those choices of w->all, of n heads, that are within a smaller theta.
static void narrow_choices(core_work *w, uint32_t n, double theta)
{
    choices *out = &w->active;
    size_t count = 0;
    out->at = grown(out->at, &out->capacity, w->all.first[n], sizeof *out->at);
    for (uint32_t h = 0; h < n; h++) {
        out->first[h] = count;
        for (size_t i = w->all.first[h]; i < w->all.first[h + 1]; i++)
            if (w->all.at[i].cost <= theta) out->at[count++] = w->all.at[i];
    }
    out->first[n] = count;
}

// ---- What the heads not handled yet cost at the least ---------------------------------------------------------------

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

// Makes w->more and w->fewer from the active choices: their hulls, merged by slope.
static void make_moves(core_work *w, uint32_t n)
{
    size_t count = w->active.first[n];
    if (count > w->moves_capacity || !w->stack) {
        size_t room = w->moves_capacity = count + count / 2 + 16;
        w->more.at = need_more(w->more.at, room, sizeof *w->more.at, "choices");
        w->fewer.at = need_more(w->fewer.at, room, sizeof *w->fewer.at, "choices");
        w->scratch = need_more(w->scratch, room, sizeof *w->scratch, "choices");
        w->stack = need_more(w->stack, room, sizeof *w->stack, "choices");
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
}

// Removes the moves of a head that is being handled.
static void drop_head(moves *m, uint32_t head)
{
    size_t count = 0;
    for (size_t i = 0; i < m->count; i++)
        if (m->at[i].a != head) m->at[count++] = m->at[i];
    m->count = count;
}

// The most tokens that the moves, and beyond them tokens at `spare` each, can make up for within theta.
static int64_t most_tokens(const moves *m, double theta, double spare)
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

// Least cost of making up for 0, 1, .. count - 1 tokens, each `step` further in price[].
static void price_tokens(const moves *m, double spare, int64_t skip, double *price, int64_t count, int step)
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

// ---- The dynamic program --------------------------------------------------------------------------------------------

// Orders the heads that have a choice: those with the most go to both ends, where there are few states to combine with.
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

// Finds where the next layer may lie: what the choices reach, and what the other heads can make up for.
static bool place_layer(const core_work *w, const layer *from, layer *to, int64_t target, double theta, double lambda)
{
    const choice *at = w->active.at + w->active.first[to->head], *end = w->active.at + w->active.first[to->head + 1];
    int64_t base = w->base[to->head], low = from->low + (int64_t)at->keep - base;
    int64_t high = from->low + (int64_t)from->count - 1 + (int64_t)end[-1].keep - base;
    int64_t least = target - most_tokens(&w->more, theta, lambda),
            most = target + most_tokens(&w->fewer, theta, INFINITY);
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
        price_tokens(&w->more, lambda, target - top, price + (top - low), top - low + 1, -1);
    }
    if (high > target) {
        int64_t bottom = low > target ? low : target + 1;
        price_tokens(&w->fewer, INFINITY, bottom - target, price + (bottom - low), high - bottom + 1, 1);
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

// Walks from the best end back to every head's choice: finds the sum that was stored again, bit for bit.
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

typedef enum dp_end { DP_FOUND, DP_NOTHING, DP_TOO_LARGE } dp_end;

// Finds the best budgets whose reduced costs sum to at most theta.
static dp_end run_dp(core_work *w, const core_problem *p, int64_t target, double theta, double lambda, uint32_t *keep,
                     uint64_t *work)
{
    uint32_t n = order_heads(w, p->n);
    if (target < -most_tokens(&w->fewer, theta, INFINITY) || target > most_tokens(&w->more, theta, lambda))
        return DP_NOTHING;
    w->values = grown(w->values, &w->values_capacity, 1, sizeof *w->values);
    w->values[0] = 0;
    w->layers[0] = (layer){0, 0, 1, 0};
    for (uint32_t k = 0; k < n; k++) {
        layer *from = &w->layers[k], *to = from + 1;
        to->head = w->order[k];
        drop_head(&w->more, to->head);
        drop_head(&w->fewer, to->head);
        if (!place_layer(w, from, to, target, theta, lambda)) return DP_NOTHING;
        size_t left = w->active.first[to->head + 1] - w->active.first[to->head];
        if ((to->offset + to->count) > p->max_bytes / sizeof *w->values ||
            *work + (double)left * (double)(from->count < to->count ? from->count : to->count) > (double)p->max_work)
            return DP_TOO_LARGE;
        w->values = grown(w->values, &w->values_capacity, to->offset + to->count, sizeof *w->values);
        w->price = grown(w->price, &w->price_capacity, to->count, sizeof *w->price);
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

// The reduction by start's gap, with the best multiplier. If greedy's hulls are those of the problem, greedy's own is
// the best; after a cap, or with a hull over another range, it is a step or two away.
static void reduce_best(core_work *w, const core_problem *p, core_answer *a)
{
    double lambda = p->lambda;
    a->gap = INFINITY;
    for (int step = 0; step < 6; step++) {
        double gap = find_minimisers(w, p, lambda);
        if (gap < a->gap) {
            a->gap = gap;
            a->lambda = lambda;
        } else if (step > 0) {
            break;
        }
        a->margin = rounding_margin(p, lambda, gap);
        if (gap <= a->margin) return;
        reduce_choices(w, p, lambda, gap + a->margin);
        narrow_choices(w, p->n, gap + a->margin);
        make_moves(w, p->n);
        double next = better_lambda(w, target_of(w, p), lambda, a->margin);
        if (next == lambda) return;
        lambda = next;
    }
    if (lambda == a->lambda) return;
    double gap = find_minimisers(w, p, a->lambda); // the last step was no better: go back
    a->margin = rounding_margin(p, a->lambda, gap);
    reduce_choices(w, p, a->lambda, gap + a->margin);
}

void core_solve(core_work *w, const core_problem *p, uint32_t *keep, core_answer *a)
{
    *a = (core_answer){.lambda = p->lambda, .proved = true};
    memcpy(keep, p->start, p->n * sizeof *keep);
    grow_heads(w, p->n);
    reduce_best(w, p, a);
    if (a->gap <= a->margin) return;
    int64_t target = target_of(w, p);
    dp_end end = DP_NOTHING;
    for (double theta = a->gap / 1024; end == DP_NOTHING; theta *= 4) {
        double limit = (theta < a->gap ? theta : a->gap) + a->margin;
        narrow_choices(w, p->n, limit);
        make_moves(w, p->n);
        end = run_dp(w, p, target, limit, a->lambda, keep, &a->work);
        if (end == DP_NOTHING && theta >= a->gap) break; // start itself is within the gap, so this is never reached
    }
    a->proved = end == DP_FOUND;
    if (!a->proved || certificate_loss(p->curves, p->first, p->n, p->start) <=
                          certificate_loss(p->curves, p->first, p->n, keep) + a->margin)
        memcpy(keep, p->start, p->n * sizeof *keep);
}

// ---- All rows of a table --------------------------------------------------------------------------------------------

solved_rows solved_rows_make(uint32_t n_rows, uint32_t n_heads)
{
    return (solved_rows){.n_rows = n_rows,
                         .n_heads = n_heads,
                         .keep = need((size_t)n_rows * n_heads, sizeof(uint32_t), "budgets"),
                         .greedy = need(n_rows, sizeof(double), "losses"),
                         .loss = need(n_rows, sizeof(double), "losses"),
                         .bound = need(n_rows, sizeof(double), "losses"),
                         .lambda = need(n_rows, sizeof(double), "multipliers"),
                         .saturated = need(n_rows, 1, "ratios"),
                         .proved = need(n_rows, 1, "ratios")};
}

void solved_rows_free(solved_rows *x)
{
    free_all(x->keep, x->greedy, x->loss, x->bound, x->lambda, x->saturated, x->proved, x->format, x->bytes);
    *x = (solved_rows){0};
}

// Losses of keep and of greedy's budgets, and bounds. Heads are summed in order, whatever the threads did.
static void close_rows(solved_rows *x, const loss_curves *c, const allocation *greedy, const core_answer *answers)
{
    for (uint32_t r = 0; r < x->n_rows; r++) {
        const core_answer *a = answers + (size_t)r * greedy->n_groups;
        double gap = 0;
        x->proved[r] = 1;
        for (uint32_t g = 0; g < greedy->n_groups; g++) {
            gap += a[g].gap;
            x->proved[r] &= a[g].proved;
            x->work += a[g].work;
        }
        x->greedy[r] = certificate_loss(c, 0, x->n_heads, greedy->keep + (size_t)r * x->n_heads);
        x->loss[r] = certificate_loss(c, 0, x->n_heads, x->keep + (size_t)r * x->n_heads);
        double bound = x->greedy[r] - gap;
        // Losses are never negative and the optimum is above any bound, so clipping removes rounding only.
        x->bound[r] = bound < 0 ? 0 : bound > x->loss[r] ? x->loss[r] : bound;
    }
}

kvb_status exact_solve(solved_rows *x, const loss_curves *c, const allocation *greedy, kvb_error *err)
{
    *x = (solved_rows){0};
    if (greedy->n_heads != shape_heads(&c->shape))
        return kvb_fail(err, KVB_ARGUMENT, "exact solution: curves and greedy's budgets are of different shapes");
    for (size_t i = 0; i < (size_t)greedy->n_rows * greedy->n_heads; i++)
        if (greedy->keep[i] < c->floor || greedy->keep[i] > c->shape.n_tokens)
            return kvb_fail(err, KVB_ARGUMENT, "exact solution: greedy's row %zu: expected budgets of %u..%u, found %u",
                            i / greedy->n_heads, c->floor, c->shape.n_tokens, greedy->keep[i]);
    *x = solved_rows_make(greedy->n_rows, greedy->n_heads);
    uint32_t jobs = x->n_rows * greedy->n_groups, n = x->n_heads / greedy->n_groups;
    core_answer *answers = need(jobs, sizeof *answers, "rows");
#pragma omp parallel if (jobs > 1 && (size_t)x->n_heads * shape_middle(&c->shape) > PARALLEL_CELLS / 8)
    {
        core_work *w = core_work_new();
#pragma omp for schedule(dynamic)
        for (uint32_t i = 0; i < jobs; i++) {
            const core_problem p = {.curves = c,
                                    .first = i % greedy->n_groups * n,
                                    .n = n,
                                    .start = greedy->keep + (size_t)i * n,
                                    .lambda = greedy->lambda[i],
                                    .max_work = EXACT_MAX_WORK,
                                    .max_bytes = EXACT_MAX_BYTES};
            core_solve(w, &p, x->keep + (size_t)i * n, &answers[i]);
        }
        core_work_free(w);
    }
    close_rows(x, c, greedy, answers);
    free(answers);
    return KVB_OK;
}
