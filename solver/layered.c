#include "solver/layered.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- Levels ---------------------------------------------------------------------------------------------------------

void level_part_free(level_part *p)
{
    free_all(p->begin, p->point);
    *p = (level_part){0};
}

// The lower hull of curve[0 .. count - 1], whose element i is the loss with keep = low + i; returns its corners.
static size_t add_hull(level_point *out, const double *curve, uint32_t low, uint32_t count)
{
    size_t top = 0;
    for (uint32_t i = 0; i < count; i++) {
        level_point c = {low + i, curve[i]};
        while (top > 1) {
            const level_point *a = &out[top - 2], *b = &out[top - 1];
            if ((b->loss - a->loss) * (c.keep - a->keep) < (c.loss - a->loss) * (b->keep - a->keep)) break;
            top--;
        }
        out[top++] = c;
    }
    return top;
}

// The range of budgets that all heads of a set allow; false: there is none.
static bool common_range(const level_part *p, uint32_t set, uint32_t *low, uint32_t *high)
{
    *low = 0;
    *high = UINT32_MAX;
    for (uint32_t i = 0; i < p->n; i++) {
        if (!(set >> i & 1)) continue;
        uint32_t least = p->x->least[p->first + i], most = p->x->most[p->first + i];
        *low = least > *low ? least : *low;
        *high = most < *high ? most : *high;
    }
    return *low <= *high;
}

static void make_hulls(level_part *p, double *curve, level_point *hull)
{
    size_t room = 0, count = 0;
    for (uint32_t set = 1; set < 1u << p->n; set++) {
        uint32_t low, high;
        p->begin[set] = count;
        if (!common_range(p, set, &low, &high)) continue;
        for (uint32_t b = low; b <= high; b++) curve[b - low] = 0;
        for (uint32_t i = 0; i < p->n; i++) {
            const double *loss = instance_curve(p->x, p->first + i);
            for (uint32_t b = low; (set >> i & 1) && b <= high; b++) curve[b - low] += loss[b];
        }
        size_t corners = add_hull(hull, curve, low, high - low + 1);
        if (count + corners > room) {
            room = 2 * (count + corners) + 64;
            p->point = need_more(p->point, room, sizeof *p->point, "corners of hulls");
        }
        memcpy(p->point + count, hull, corners * sizeof *hull);
        count += corners;
    }
    p->begin[1u << p->n] = count;
}

kvb_status level_part_make(level_part *p, const constrained_instance *x, uint32_t part, kvb_error *err)
{
    *p = (level_part){.x = x, .first = part * x->own, .n = x->own};
    p->levels = x->limits->levels < x->own ? x->limits->levels : x->own;
    if (p->n > LEVELS_MAX_HEADS)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "constraints: a number of budgets per layer is solved for at most %d KV heads, found %u: all "
                        "ways to split the heads are looked at",
                        LEVELS_MAX_HEADS, p->n);
    size_t units = x->curves.shape.n_tokens;
    p->begin = need((1u << p->n) + 1, sizeof *p->begin, "sets of heads");
    double *curve = need(units + 1, sizeof *curve, "pages");
    level_point *hull = need(units + 1, sizeof *hull, "pages");
    make_hulls(p, curve, hull);
    free_all(curve, hull);
    level_answer a;
    level_part_price(p, 0, &a);
    if (a.value < INFINITY) return KVB_OK;
    kvb_fail(err, KVB_ARGUMENT, "constraints: layer %u: floors and ceilings of its heads need more than %u budgets",
             x->origin[p->first] / x->limits->n_kv_heads, p->levels);
    level_part_free(p);
    return KVB_ARGUMENT;
}

// The corner with the least loss + price keep per head, the first of equal ones.
static const level_point *best_corner(const level_part *p, uint32_t set, double price)
{
    const level_point *at = p->point + p->begin[set], *end = p->point + p->begin[set + 1];
    if (at == end) return NULL;
    double weight = price * __builtin_popcount(set);
    size_t low = 0, high = (size_t)(end - at) - 1; // a later corner is worth it while its gain per unit is above weight
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        bool gains = at[middle].loss - at[middle + 1].loss > weight * (at[middle + 1].keep - at[middle].keep);
        if (gains) low = middle + 1;
        else high = middle;
    }
    return at + low;
}

// Units and value of one way to do it: fewer units win ties of value.
typedef struct level_split {
    double value;
    uint64_t total;
} level_split;

void level_part_price(const level_part *p, double price, level_answer *a)
{
    uint32_t all = (1u << p->n) - 1;
    level_split set[1 << LEVELS_MAX_HEADS], best[1 << LEVELS_MAX_HEADS][LEVELS_MAX_HEADS];
    uint8_t cluster[1 << LEVELS_MAX_HEADS][LEVELS_MAX_HEADS]; // the set with the lowest head of the best partition
    uint32_t level[1 << LEVELS_MAX_HEADS];
    for (uint32_t s = 1; s <= all; s++) {
        const level_point *corner = best_corner(p, s, price);
        set[s] = (level_split){INFINITY, UINT64_MAX / 4};
        if (corner) {
            uint32_t heads = (uint32_t)__builtin_popcount(s);
            level[s] = corner->keep;
            set[s] = (level_split){corner->loss + price * heads * corner->keep, (uint64_t)heads * corner->keep};
        }
        a->set[s] = set[s].value;
    }
    for (uint32_t k = 0; k < p->levels; k++) {
        best[0][k] = (level_split){0, 0};
        a->best[0][k] = 0;
        for (uint32_t s = 1; s <= all; s++) {
            best[s][k] = set[s];
            cluster[s][k] = (uint8_t)s;
            uint32_t lowest = s & -s, others = s ^ lowest;
            for (uint32_t t = others; k > 0 && t > 0; t = (t - 1) & others) { // t: what the first cluster leaves
                uint32_t own = s ^ t;
                level_split w = {set[own].value + best[t][k - 1].value, set[own].total + best[t][k - 1].total};
                level_split held = best[s][k];
                if (w.value > held.value || (w.value == held.value && w.total >= held.total)) continue;
                best[s][k] = w;
                cluster[s][k] = (uint8_t)own;
            }
            a->best[s][k] = best[s][k].value;
        }
    }
    a->value = best[all][p->levels - 1].value;
    a->total = best[all][p->levels - 1].total;
    if (a->value == INFINITY) return;
    for (uint32_t left = all, k = p->levels; left > 0; k--) {
        uint32_t own = cluster[left][k - 1];
        for (uint32_t i = 0; i < p->n; i++)
            if (own >> i & 1) a->keep[i] = level[own];
        left ^= own;
    }
}

// ---- Costs of sums of units, in a range that moves and grows --------------------------------------------------------

// Costs of the sums low .. low + count - 1; INFINITY: none, or beyond theta.
typedef struct window {
    int64_t low;
    size_t count, room;
    double *at;
} window;

// Limits that all windows of one solution share.
typedef struct window_limits {
    double theta; // dearer sums are left out
    uint64_t max_work, max_bytes;
    uint64_t work; // relaxations
    size_t bytes;  // of all windows
    bool given_up; // more work or bytes than allowed
} window_limits;

static void window_close(window_limits *l, window *x)
{
    l->bytes -= x->room * sizeof *x->at;
    free(x->at);
    *x = (window){0};
}

static void windows_free(window_limits *l, window *at, size_t n)
{
    for (size_t i = 0; at && i < n; i++) window_close(l, &at[i]);
    free(at);
}

// Makes a window of `count` sums from `low` on that holds nothing yet; its memory is used again. False: given up.
static bool window_open(window_limits *l, window *x, int64_t low, size_t count)
{
    if (count > x->room || !x->at) {
        size_t room = count + count / 2 + 16, bytes = l->bytes + (room - x->room) * sizeof *x->at;
        if (bytes > l->max_bytes) return !(l->given_up = true);
        x->at = need_more(x->at, room, sizeof *x->at, "sums of an exact problem");
        l->bytes = bytes;
        x->room = room;
    }
    x->low = low;
    x->count = count;
    for (size_t i = 0; i < count; i++) x->at[i] = INFINITY;
    return true;
}

// Cuts what holds nothing off both ends.
static void window_trim(window *x)
{
    size_t begin = 0;
    while (x->count > 0 && x->at[x->count - 1] == INFINITY) x->count--;
    while (begin < x->count && x->at[begin] == INFINITY) begin++;
    if (begin == 0) return;
    memmove(x->at, x->at + begin, (x->count - begin) * sizeof *x->at);
    x->low += (int64_t)begin;
    x->count -= begin;
}

// Opens `out` with all sums of one element of a and one of b, up to theta and up to `most` units. False: given up.
static bool window_join(window_limits *l, window *out, const window *a, const window *b, int64_t most)
{
    int64_t low = a->low + b->low, high = low + (int64_t)a->count + (int64_t)b->count - 2;
    if (high > most) high = most;
    if (a->count == 0 || b->count == 0 || high < low) return window_open(l, out, low, 0);
    if (!window_open(l, out, low, (size_t)(high - low + 1))) return false;
    for (size_t j = 0; j < b->count; j++) {
        if (b->at[j] == INFINITY || j >= out->count) continue;
        size_t n = a->count < out->count - j ? a->count : out->count - j;
        core_relax(out->at + j, a->at, n, b->at[j]);
        l->work += n;
    }
    if (l->work > l->max_work) return !(l->given_up = true);
    for (size_t i = 0; i < out->count; i++)
        if (out->at[i] > l->theta) out->at[i] = INFINITY;
    window_trim(out);
    return true;
}

// The sum of b such that it and one of a give, bit for bit, what window_join() has put at x.
static int64_t window_trace(const window *out, const window *a, const window *b, int64_t x)
{
    double value = out->at[x - out->low];
    for (size_t j = 0; j < b->count; j++) {
        int64_t before = x - (b->low + (int64_t)j) - a->low;
        if (b->at[j] == INFINITY || before < 0 || before >= (int64_t)a->count) continue;
        if (a->at[before] + b->at[j] == value) return b->low + (int64_t)j;
    }
    return b->low; // not reached: the sum came from somewhere
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

struct layered_work {
    window *stage; // sums after 0, 1, .. of the things that are joined at the moment: heads of a part, or its clusters
    window own;    // choices of the one that is being joined
    window *part;  // [parts] costs of every part, and ..
    window *joint; // [parts + 1] .. of their sums
    uint32_t n_stages, n_parts;
    const layered_problem *p;
    window_limits limits;
};

layered_work *layered_work_new(void)
{
    return need(1, sizeof(layered_work), "exact problems");
}

void layered_work_free(layered_work *w)
{
    if (!w) return;
    windows_free(&w->limits, w->stage, w->n_stages);
    windows_free(&w->limits, w->part, w->n_parts);
    windows_free(&w->limits, w->joint, w->n_parts + 1);
    window_close(&w->limits, &w->own);
    free(w);
}

static void make_room(layered_work *w, const layered_problem *p)
{
    uint32_t stages = p->x->own + 1, parts = p->x->parts;
    if (w->n_stages < stages) {
        windows_free(&w->limits, w->stage, w->n_stages);
        w->stage = need(stages, sizeof *w->stage, "heads");
        w->n_stages = stages;
    }
    if (w->n_parts < parts) {
        windows_free(&w->limits, w->part, w->n_parts);
        windows_free(&w->limits, w->joint, w->n_parts + 1);
        w->part = need(parts, sizeof *w->part, "parts");
        w->joint = need(parts + 1, sizeof *w->joint, "parts");
        w->n_parts = parts;
    }
}

// ---- One part -------------------------------------------------------------------------------------------------------

static double price_of(const layered_problem *p, uint32_t part)
{
    return p->price[part] > p->lambda ? p->price[part] : p->lambda;
}

// The least loss + price b of a head.
static double head_minimum(const constrained_instance *x, uint32_t h, double price)
{
    const double *loss = instance_curve(x, h);
    double best = INFINITY;
    for (uint32_t b = x->least[h]; b <= x->most[h]; b++) {
        double value = loss[b] + price * b;
        best = value < best ? value : best;
    }
    return best;
}

double layered_part_dual(const constrained_instance *x, const level_part *levels, uint32_t part, double price,
                         double lambda)
{
    double sum = 0;
    if (price < lambda) price = lambda;
    if (levels) {
        level_answer a;
        level_part_price(&levels[part], price, &a);
        sum = a.value;
    } else {
        for (uint32_t h = part * x->own; h < (part + 1) * x->own; h++) sum += head_minimum(x, h, price);
    }
    return sum - (price - lambda) * (double)x->cap[part];
}

// Reduced costs of heads that keep the same (`heads` counts them, set tells which, from head `first` on) into w->own.
static bool cluster_window(layered_work *w, uint32_t first, uint32_t set, double price, double minimum)
{
    const constrained_instance *x = w->p->x;
    uint32_t low = 0, high = UINT32_MAX, heads = 0;
    for (uint32_t i = 0; set >> i; i++) {
        if (!(set >> i & 1)) continue;
        heads++;
        low = x->least[first + i] > low ? x->least[first + i] : low;
        high = x->most[first + i] < high ? x->most[first + i] : high;
    }
    if (!window_open(&w->limits, &w->own, (int64_t)low * heads, (size_t)(high - low) * heads + 1)) return false;
    for (uint32_t b = low; b <= high; b++) {
        double loss = 0;
        for (uint32_t i = 0; set >> i; i++)
            if (set >> i & 1) loss += instance_curve(x, first + i)[b];
        double cost = loss + price * heads * b - minimum;
        cost = cost > 0 ? cost : 0; // below 0 by rounding only
        if (cost <= w->limits.theta) w->own.at[(size_t)(b - low) * heads] = cost;
    }
    window_trim(&w->own);
    return true;
}

// A search through a part's partitions: for all sums, or for the budgets of one of them.
typedef struct partition_search {
    const level_part *part;
    const level_answer *answer;
    double price;
    window *out;    // all costs go here, or ..
    int64_t wanted; // .. this sum, of this cost, is looked for
    double cost;
    uint32_t *keep; // [own] receives its budgets
    bool found;
} partition_search;

// Splits `left` into clusters in every way; w->stage[depth] has the costs of what is clustered already.
static bool search_partitions(layered_work *w, partition_search *s, uint32_t left, uint32_t depth, double excess)
{
    const window *before = &w->stage[depth];
    if (left == 0) {
        if (s->out) {
            for (size_t i = 0; i < before->count; i++) {
                double *to = &s->out->at[before->low + (int64_t)i - s->out->low];
                if (before->at[i] + excess < *to) *to = before->at[i] + excess;
            }
        } else {
            int64_t i = s->wanted - before->low;
            s->found = i >= 0 && i < (int64_t)before->count && before->at[i] + excess == s->cost;
        }
        return true;
    }
    uint32_t lowest = left & -left, others = left ^ lowest, room = s->part->levels - depth - 1;
    for (uint32_t t = others;; t = (t - 1) & others) {
        uint32_t own = left ^ t;
        double rest = t == 0 ? 0 : room > 0 ? s->answer->best[t][room - 1] : INFINITY;
        double now = s->answer->set[own] + rest - s->answer->best[left][room]; // how much worse than the best way
        now = now > 0 ? now : 0;
        if (excess + now <= w->limits.theta) {
            if (!cluster_window(w, s->part->first, own, s->price, s->answer->set[own]) ||
                !window_join(&w->limits, &w->stage[depth + 1], before, &w->own, INT64_MAX))
                return false;
            if (!search_partitions(w, s, t, depth + 1, excess + now)) return false;
            if (s->found) { // on the way back every cluster learns its budget
                if (!cluster_window(w, s->part->first, own, s->price, s->answer->set[own])) return false;
                int64_t units = window_trace(&w->stage[depth + 1], before, &w->own, s->wanted);
                for (uint32_t i = 0; own >> i; i++)
                    if (own >> i & 1) s->keep[i] = (uint32_t)(units / __builtin_popcount(own));
                s->wanted -= units;
                return true;
            }
        }
        if (t == 0) break;
    }
    return true;
}

static bool begin_stages(layered_work *w)
{
    if (!window_open(&w->limits, &w->stage[0], 0, 1)) return false;
    w->stage[0].at[0] = 0;
    return true;
}

// Computes the costs of a part without levels, whose heads are free.
static bool free_window(layered_work *w, uint32_t part, double price, window *out)
{
    const constrained_instance *x = w->p->x;
    uint32_t first = part * x->own;
    if (!begin_stages(w)) return false;
    for (uint32_t i = 0; i < x->own; i++)
        if (!cluster_window(w, first + i, 1, price, head_minimum(x, first + i, price)) ||
            !window_join(&w->limits, &w->stage[i + 1], &w->stage[i], &w->own, INT64_MAX))
            return false;
    const window *end = &w->stage[x->own];
    if (!window_open(&w->limits, out, end->low, end->count)) return false;
    memcpy(out->at, end->at, end->count * sizeof *out->at);
    return true;
}

static bool level_window(layered_work *w, uint32_t part, double price, window *out)
{
    const constrained_instance *x = w->p->x;
    level_answer a;
    level_part_price(&w->p->levels[part], price, &a);
    partition_search s = {.part = &w->p->levels[part], .answer = &a, .price = price, .out = out};
    return window_open(&w->limits, out, 0, (size_t)x->own * x->curves.shape.n_tokens + 1) && begin_stages(w) &&
           search_partitions(w, &s, (1u << x->own) - 1, 0, 0);
}

// Fills w->part[i] with the costs of part i of the group up to theta, including the price of its cap.
static bool make_part(layered_work *w, uint32_t i)
{
    const layered_problem *p = w->p;
    uint32_t part = p->group * p->x->parts + i;
    double price = price_of(p, i), spare = price - p->lambda;
    window *out = &w->part[i];
    if (!(p->levels ? level_window(w, part, price, out) : free_window(w, part, price, out))) return false;
    for (size_t k = 0; k < out->count; k++) {
        int64_t units = out->low + (int64_t)k;
        if (out->at[k] == INFINITY) continue;
        double cost = out->at[k] + spare * ((double)p->x->cap[part] - (double)units);
        out->at[k] = units <= (int64_t)p->x->cap[part] && cost <= w->limits.theta ? cost : INFINITY;
    }
    window_trim(out);
    return true;
}

// Finds the budgets of part i that keep x units at the cost that make_part() found.
static bool trace_part(layered_work *w, uint32_t i, int64_t x, uint32_t *keep)
{
    const layered_problem *p = w->p;
    uint32_t part = p->group * p->x->parts + i, own = p->x->own;
    double price = price_of(p, i);
    window scratch = {0};
    bool ok;
    if (p->levels) {
        level_answer a;
        level_part_price(&p->levels[part], price, &a);
        partition_search s = {.part = &p->levels[part], .answer = &a, .price = price, .wanted = x, .keep = keep};
        ok = level_window(w, part, price, &scratch) && begin_stages(w);
        if (ok) {
            s.cost = scratch.at[x - scratch.low];
            ok = search_partitions(w, &s, (1u << own) - 1, 0, 0);
        }
    } else {
        ok = free_window(w, part, price, &scratch); // leaves the stages behind
        for (uint32_t h = own; ok && h-- > 0;) {
            uint32_t head = part * own + h;
            ok = cluster_window(w, head, 1, price, head_minimum(p->x, head, price));
            if (!ok) break;
            int64_t units = window_trace(&w->stage[h + 1], &w->stage[h], &w->own, x);
            keep[h] = (uint32_t)units;
            x -= units;
        }
    }
    window_close(&w->limits, &scratch);
    return ok;
}

// ---- One group ------------------------------------------------------------------------------------------------------

// Returns whether there is a solution within theta; if so, keep receives it.
static bool try_theta(layered_work *w, uint32_t *keep)
{
    const layered_problem *p = w->p;
    uint32_t parts = p->x->parts;
    if (!window_open(&w->limits, &w->joint[0], 0, 1)) return false;
    w->joint[0].at[0] = 0;
    for (uint32_t i = 0; i < parts; i++)
        if (!make_part(w, i) ||
            !window_join(&w->limits, &w->joint[i + 1], &w->joint[i], &w->part[i], (int64_t)p->budget))
            return false;
    const window *end = &w->joint[parts];
    double best = w->limits.theta;
    int64_t at = -1;
    for (size_t i = end->count; i-- > 0;) {
        int64_t x = end->low + (int64_t)i;
        double value = end->at[i] + p->lambda * (double)((int64_t)p->budget - x);
        if (value > best || (value == best && at >= 0)) continue;
        best = value;
        at = x;
    }
    if (at < 0) return false;
    for (uint32_t i = parts; i-- > 0;) {
        int64_t units = window_trace(&w->joint[i + 1], &w->joint[i], &w->part[i], at);
        if (!trace_part(w, i, units, keep + (size_t)i * p->x->own)) return false;
        at -= units;
    }
    return true;
}

// Units that stay unspent go to the first heads that may have them: ranks must meet their common total, and curves
// never rise. Clusters of levels stay as they are.
static void spend(const layered_problem *p, uint32_t *keep)
{
    const constrained_instance *x = p->x;
    uint64_t left = p->budget;
    for (uint32_t i = 0; i < x->parts * x->own; i++) left -= keep[i];
    for (uint32_t part = 0; !p->levels && part < x->parts; part++) {
        uint32_t *own = keep + (size_t)part * x->own, first = (p->group * x->parts + part) * x->own;
        uint64_t room = x->cap[p->group * x->parts + part];
        for (uint32_t i = 0; i < x->own; i++) room -= own[i];
        for (uint32_t i = 0; i < x->own; i++) {
            uint64_t more = x->most[first + i] - own[i];
            if (more > room) more = room;
            if (more > left) more = left;
            own[i] += (uint32_t)more;
            room -= more;
            left -= more;
        }
    }
}

void layered_solve(layered_work *w, const layered_problem *p, uint32_t *keep, core_answer *a)
{
    uint32_t n = p->x->parts * p->x->own, units = p->x->curves.shape.n_tokens;
    *a = (core_answer){.lambda = p->lambda, .proved = true};
    memcpy(keep, p->start, n * sizeof *keep);
    w->p = p;
    w->limits = (window_limits){.max_work = p->max_work, .max_bytes = p->max_bytes, .bytes = w->limits.bytes};
    make_room(w, p);
    double dual = -p->lambda * (double)p->budget, size = 0, start = instance_loss(p->x, p->group * n, n, p->start);
    for (uint32_t i = 0; i < p->x->parts; i++) {
        dual += layered_part_dual(p->x, p->levels, p->group * p->x->parts + i, p->price[i], p->lambda);
        size += price_of(p, i) * p->x->own * units;
    }
    for (uint32_t h = p->group * n; h < (p->group + 1) * n; h++) size += instance_curve(p->x, h)[0];
    a->gap = start - dual > 0 ? start - dual : 0;
    a->margin = 0x1p-50 * (size + n * a->gap); // as in exact.h
    if (a->gap <= a->margin) return;
    uint32_t *found = need(n, sizeof *found, "heads");
    bool ok = false;
    for (double theta = a->gap / 1024; !ok && !w->limits.given_up; theta *= 4) {
        w->limits.theta = (theta < a->gap ? theta : a->gap) + a->margin;
        ok = try_theta(w, found);
        if (theta >= a->gap) break;
    }
    a->work = w->limits.work;
    a->proved = ok;
    if (ok) spend(p, found);
    if (ok && instance_loss(p->x, p->group * n, n, found) < start - a->margin) memcpy(keep, found, n * sizeof *keep);
    free(found);
}
