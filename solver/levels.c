#include "solver/levels.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

void level_part_free(level_part *p)
{
    free(p->begin);
    free(p->point);
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
    free(curve);
    free(hull);
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
typedef struct way {
    double value;
    uint64_t total;
} way;

static bool is_better(way a, way b)
{
    return a.value < b.value || (a.value == b.value && a.total < b.total);
}

void level_part_price(const level_part *p, double price, level_answer *a)
{
    uint32_t all = (1u << p->n) - 1;
    way set[1 << LEVELS_MAX_HEADS], best[1 << LEVELS_MAX_HEADS][LEVELS_MAX_HEADS];
    uint8_t cluster[1 << LEVELS_MAX_HEADS][LEVELS_MAX_HEADS]; // the set with the lowest head of the best partition
    uint32_t level[1 << LEVELS_MAX_HEADS];
    for (uint32_t s = 1; s <= all; s++) {
        const level_point *corner = best_corner(p, s, price);
        set[s] = (way){INFINITY, UINT64_MAX / 4};
        if (corner) {
            uint32_t heads = (uint32_t)__builtin_popcount(s);
            level[s] = corner->keep;
            set[s] = (way){corner->loss + price * heads * corner->keep, (uint64_t)heads * corner->keep};
        }
        a->set[s] = set[s].value;
    }
    for (uint32_t k = 0; k < p->levels; k++) {
        best[0][k] = (way){0, 0};
        a->best[0][k] = 0;
        for (uint32_t s = 1; s <= all; s++) {
            best[s][k] = set[s];
            cluster[s][k] = (uint8_t)s;
            uint32_t lowest = s & -s, others = s ^ lowest;
            for (uint32_t t = others; k > 0 && t > 0; t = (t - 1) & others) { // t: what the first cluster leaves
                uint32_t own = s ^ t;
                way w = {set[own].value + best[t][k - 1].value, set[own].total + best[t][k - 1].total};
                if (!is_better(w, best[s][k])) continue;
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
