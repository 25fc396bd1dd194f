#include "solver/bytes.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// A choice of a head.
typedef struct point {
    uint64_t cost;
    double loss;
    uint32_t keep;
    uint8_t format;
} point;

// From one corner of a head's hull to the next.
typedef struct hull_piece {
    double slope; // saved per byte
    uint32_t head, to;
} hull_piece;

typedef struct hull_set {
    point *corner; // head n's: first[n] .. first[n + 1] - 1, cheapest first
    size_t *first; // [N + 1]
    size_t room;
} hull_set;

static double loss_of(const bytes_problem *p, uint32_t head, uint32_t format, uint32_t keep)
{
    return loss_at(p->curves, head, keep) + p->added[(size_t)head * p->n_formats + format];
}

static uint64_t cost_of(const bytes_problem *p, uint32_t format, uint32_t keep)
{
    return p->cost[(size_t)format * (p->curves->shape.n_tokens + 1) + keep];
}

// ---- Hulls ----

// Returns what is saved per byte between two points, of which the second costs more.
static double slope_between(const point *a, const point *b)
{
    return (a->loss - b->loss) / (double)(b->cost - a->cost);
}

// Adds a point that costs no less than those before it to a lower hull of n points; returns how many it has then.
static size_t push(point *hull, size_t n, const point *x)
{
    if (n && x->loss >= hull[n - 1].loss) return n; // costs more and saves nothing
    while (n && hull[n - 1].cost == x->cost) n--;
    while (n > 1 && slope_between(&hull[n - 2], &hull[n - 1]) <= slope_between(&hull[n - 1], x)) n--;
    hull[n] = *x;
    return n + 1;
}

static int compare_points(const void *a, const void *b)
{
    const point *x = a, *y = b;
    if (x->cost != y->cost) return x->cost < y->cost ? -1 : 1;
    if (x->loss != y->loss) return x->loss < y->loss ? -1 : 1;
    return (x->format > y->format) - (x->format < y->format);
}

// One head's hull from those of its formats, into `hull`; `all` [J (T + 1)] is scratch. Returns its corners.
static size_t hull_of(point *hull, const bytes_problem *p, uint32_t head, point *all)
{
    size_t n = 0, corners = 0;
    for (uint32_t j = 0; j < p->n_formats; j++) {
        size_t own = 0;
        for (uint32_t b = p->curves->floor; b <= p->curves->shape.n_tokens; b++)
            own = push(all + n, own, &(point){cost_of(p, j, b), loss_of(p, head, j, b), b, (uint8_t)j});
        n += own;
    }
    qsort(all, n, sizeof *all, compare_points);
    for (size_t i = 0; i < n; i++) corners = push(hull, corners, &all[i]);
    return corners;
}

static hull_set make_hulls(const bytes_problem *p)
{
    uint32_t N = shape_heads(&p->curves->shape);
    size_t most = (size_t)p->n_formats * (p->curves->shape.n_tokens + 1);
    point *all = need(most, sizeof *all, "choices"), *hull = need(most, sizeof *hull, "choices");
    hull_set h = {.first = need((size_t)N + 1, sizeof(size_t), "heads")};
    for (uint32_t n = 0; n < N; n++) {
        size_t corners = hull_of(hull, p, n, all), end = h.first[n] + corners;
        if (end > h.room) h.corner = need_more(h.corner, h.room = 2 * end, sizeof *h.corner, "corners of hulls");
        memcpy(h.corner + h.first[n], hull, corners * sizeof *hull);
        h.first[n + 1] = end;
    }
    free_all(all, hull);
    return h;
}

// ---- Pieces, in the order of what a byte saves ----

static int compare_pieces(const void *a, const void *b)
{
    const hull_piece *x = a, *y = b;
    if (x->slope != y->slope) return x->slope > y->slope ? -1 : 1;
    if (x->head != y->head) return x->head < y->head ? -1 : 1;
    return (x->to > y->to) - (x->to < y->to);
}

static hull_piece *list_pieces(size_t *count, const hull_set *h, uint32_t N)
{
    hull_piece *list = need(h->first[N], sizeof *list, "pieces of hulls");
    *count = 0;
    for (uint32_t n = 0; n < N; n++)
        for (size_t i = h->first[n] + 1; i < h->first[n + 1]; i++)
            list[(*count)++] =
                (hull_piece){slope_between(&h->corner[i - 1], &h->corner[i]), n, (uint32_t)(i - h->first[n])};
    qsort(list, *count, sizeof *list, compare_pieces);
    return list;
}

// Returns the head's point of least loss within `most` bytes, or `held` if none is better.
static point best_within(const bytes_problem *p, uint32_t head, uint64_t most, point held)
{
    for (uint32_t j = 0; j < p->n_formats; j++)
        for (uint32_t b = p->curves->floor; b <= p->curves->shape.n_tokens && cost_of(p, j, b) <= most; b++)
            if (loss_of(p, head, j, b) < held.loss)
                held = (point){cost_of(p, j, b), loss_of(p, head, j, b), b, (uint8_t)j};
    return held;
}

// ---- Rows, from the smallest budget to the largest ----

static void put_row(solved_rows *x, uint32_t r, const point *at, const bytes_problem *p, uint64_t budget)
{
    for (uint32_t n = 0; n < x->n_heads; n++) {
        x->keep[(size_t)r * x->n_heads + n] = at[n].keep;
        x->format[(size_t)r * x->n_heads + n] = at[n].format;
        x->bytes[r] += at[n].cost;
        x->loss[r] += at[n].loss;
    }
    double bound = bytes_bound(p, budget, x->lambda[r]); // may exceed a saturated row's loss, which has no rival
    x->bound[r] = bound < 0 ? 0 : bound > x->loss[r] ? x->loss[r] : bound;
}

static void sweep(solved_rows *x, const bytes_problem *p, const hull_set *h, const uint64_t *budget)
{
    size_t count, next = 0;
    hull_piece *list = list_pieces(&count, h, x->n_heads);
    point *at = need(x->n_heads, sizeof *at, "heads");
    uint64_t used = 0;
    for (uint32_t n = 0; n < x->n_heads; n++) used += (at[n] = h->corner[h->first[n]]).cost;
    for (uint32_t r = x->n_rows; r-- > 0;) {
        for (; next < count && used <= budget[r]; next++) {
            const point *to = &h->corner[h->first[list[next].head] + list[next].to];
            uint64_t more = to->cost - at[list[next].head].cost;
            if (more > budget[r] - used) break;
            used += more;
            at[list[next].head] = *to;
        }
        x->saturated[r] = used > budget[r];
        x->lambda[r] = next < count ? list[next].slope : 0;
        if (next == count || x->saturated[r]) {
            put_row(x, r, at, p, budget[r]);
            continue;
        }
        uint32_t head = list[next].head;
        point held = at[head];
        at[head] = best_within(p, head, held.cost + (budget[r] - used), held);
        put_row(x, r, at, p, budget[r]);
        at[head] = held;
    }
    free_all(at, list);
}

double bytes_bound(const bytes_problem *p, uint64_t budget, double lambda)
{
    uint32_t N = shape_heads(&p->curves->shape);
    double *least = need(N, sizeof *least, "heads"), sum = -lambda * (double)budget;
#pragma omp parallel for schedule(static)
    for (uint32_t n = 0; n < N; n++) {
        least[n] = INFINITY;
        for (uint32_t j = 0; j < p->n_formats; j++)
            for (uint32_t b = p->curves->floor; b <= p->curves->shape.n_tokens; b++)
                least[n] = fmin(least[n], loss_of(p, n, j, b) + lambda * (double)cost_of(p, j, b));
    }
    for (uint32_t n = 0; n < N; n++) sum += least[n];
    free(least);
    return sum;
}

static kvb_status check_problem(const bytes_problem *p, const uint64_t *budget, uint32_t n_rows, kvb_error *err)
{
    const cache_shape *s = &p->curves->shape;
    for (uint32_t r = 1; r < n_rows; r++)
        if (budget[r] > budget[r - 1])
            return kvb_fail(err, KVB_ARGUMENT, "budgets of bytes: row %u: expected no more than the row before", r);
    for (size_t i = 0; i < (size_t)shape_heads(s) * p->n_formats; i++)
        if (!(p->added[i] >= 0 && p->added[i] < INFINITY))
            return kvb_fail(err, KVB_ARGUMENT, "formats: head %zu, format %zu: expected a finite loss >= 0, found %g",
                            i / p->n_formats, i % p->n_formats, p->added[i]);
    for (uint32_t j = 0; j < p->n_formats; j++)
        for (uint32_t b = 1; b <= s->n_tokens; b++)
            if (cost_of(p, j, b) < cost_of(p, j, b - 1) || cost_of(p, j, b) > UINT64_MAX / 2 / shape_heads(s))
                return kvb_fail(err, KVB_ARGUMENT, "formats: format %u: the bytes of %u tokens are too few or too many",
                                j, b);
    return KVB_OK;
}

kvb_status bytes_solve(solved_rows *out, const bytes_problem *p, const uint64_t *budget, uint32_t n_rows,
                       kvb_error *err)
{
    *out = (solved_rows){0};
    kvb_status status = check_problem(p, budget, n_rows, err);
    if (status != KVB_OK) return status;
    uint32_t N = shape_heads(&p->curves->shape);
    *out = solved_rows_make(n_rows, N);
    out->format = need((size_t)n_rows * N, sizeof *out->format, "formats");
    out->bytes = need(n_rows, sizeof *out->bytes, "rows");
    hull_set set = make_hulls(p);
    sweep(out, p, &set, budget);
    free_all(set.corner, set.first);
    return KVB_OK;
}
