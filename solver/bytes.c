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

// Points of all heads: head n's are first[n] .. first[n + 1] - 1, cheapest first.
typedef struct point_set {
    point *point;
    size_t *first; // [N + 1]
    size_t room;
} point_set;

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

// Adds a point that costs more and loses less than those before it to a lower hull of n points; returns how many it has
// then.
static size_t push(point *hull, size_t n, const point *x)
{
    while (n > 1 && slope_between(&hull[n - 2], &hull[n - 1]) <= slope_between(&hull[n - 1], x)) n--;
    hull[n] = *x;
    return n + 1;
}

// Lists the points of a head than which none costs less and loses as little: costs ascend, losses fall. `next` [J] is
// scratch. Returns their number.
static size_t list_best(point *list, const bytes_problem *p, uint32_t head, uint32_t *next)
{
    size_t n = 0;
    for (uint32_t j = 0; j < p->n_formats; j++) next[j] = p->curves->floor;
    for (;;) { // formats' points are in the order of their costs: take the cheapest that is left, and of these the best
        point best = {UINT64_MAX, INFINITY, 0, 0};
        for (uint32_t j = 0; j < p->n_formats; j++) {
            if (next[j] > p->curves->shape.n_tokens || cost_of(p, j, next[j]) > best.cost) continue;
            point x = {cost_of(p, j, next[j]), loss_of(p, head, j, next[j]), next[j], (uint8_t)j};
            if (x.cost < best.cost || x.loss < best.loss) best = x;
        }
        if (best.cost == UINT64_MAX) return n;
        next[best.format]++;
        if (n && list[n - 1].loss <= best.loss) continue;
        n -= n && list[n - 1].cost == best.cost;
        list[n++] = best;
    }
}

static void add_points(point_set *s, uint32_t head, const point *x, size_t n)
{
    size_t end = s->first[head] + n;
    if (end > s->room) s->point = need_more(s->point, s->room = 2 * end, sizeof *s->point, "points of heads");
    memcpy(s->point + s->first[head], x, n * sizeof *x);
    s->first[head + 1] = end;
}

// Makes the sets of all points that can be best, and of their lower hulls' corners.
static void make_sets(point_set *all, point_set *corners, const bytes_problem *p)
{
    uint32_t N = shape_heads(&p->curves->shape), *next = need(p->n_formats, sizeof *next, "formats");
    size_t most = (size_t)p->n_formats * (p->curves->shape.n_tokens + 1);
    point *list = need(most, sizeof *list, "choices");
    *all = (point_set){.first = need((size_t)N + 1, sizeof(size_t), "heads")};
    *corners = (point_set){.first = need((size_t)N + 1, sizeof(size_t), "heads")};
    for (uint32_t n = 0; n < N; n++) {
        size_t count = list_best(list, p, n, next), kept = 0;
        add_points(all, n, list, count);
        for (size_t i = 0; i < count; i++) kept = push(list, kept, &all->point[all->first[n] + i]);
        add_points(corners, n, list, kept);
    }
    free_all(list, next);
}

static void free_set(point_set *s)
{
    free_all(s->point, s->first);
}

// ---- Pieces, in the order of what a byte saves ----

static int compare_pieces(const void *a, const void *b)
{
    const hull_piece *x = a, *y = b;
    if (x->slope != y->slope) return x->slope > y->slope ? -1 : 1;
    if (x->head != y->head) return x->head < y->head ? -1 : 1;
    return (x->to > y->to) - (x->to < y->to);
}

static hull_piece *list_pieces(size_t *count, const point_set *h, uint32_t N)
{
    hull_piece *list = need(h->first[N], sizeof *list, "pieces of hulls");
    *count = 0;
    for (uint32_t n = 0; n < N; n++)
        for (size_t i = h->first[n] + 1; i < h->first[n + 1]; i++)
            list[(*count)++] =
                (hull_piece){slope_between(&h->point[i - 1], &h->point[i]), n, (uint32_t)(i - h->first[n])};
    qsort(list, *count, sizeof *list, compare_pieces);
    return list;
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

// Sets a and b to the points of heads x and y that lose the least together within `most` bytes, and returns that loss.
static double best_pair(point *a, point *b, const point_set *s, uint32_t x, uint32_t y, uint64_t most)
{
    const point *end = s->point + s->first[x + 1], *begin = s->point + s->first[y], *j = s->point + s->first[y + 1];
    double least = INFINITY;
    for (const point *i = s->point + s->first[x]; i < end; i++) {
        while (j > begin && i->cost + j[-1].cost > most) j--;
        if (j == begin) break;
        if (i->loss + j[-1].loss >= least) continue;
        *a = *i;
        *b = j[-1];
        least = a->loss + b->loss;
    }
    return least;
}

// Spends `left` bytes on head x, whose next piece costs more than that, together with whichever other head gains most
// by giving or taking bytes; then on that head with another one.
static void spend_rest(point *at, const point_set *s, uint32_t N, uint32_t x, uint64_t left)
{
    enum { ROUNDS = 8 }; // what they save falls fast
    const point *best = s->point + s->first[x + 1] - 1;
    while (best->cost > at[x].cost + left) best--;
    left -= best->cost - at[x].cost;
    at[x] = *best;
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t with = x;
        double most = 0;
        point a = at[x], b = at[x];
        for (uint32_t y = 0; y < N; y++) {
            point to = {0}, its = {0};
            double loss = at[x].loss + at[y].loss, saved;
            if (y == x) continue;
            saved = loss - best_pair(&to, &its, s, x, y, at[x].cost + at[y].cost + left);
            if (saved <= most + 1e-12 * loss) continue;
            most = saved;
            with = y;
            a = to;
            b = its;
        }
        if (with == x) return;
        left += at[x].cost + at[with].cost - a.cost - b.cost;
        at[x] = a;
        at[with] = b;
        x = with;
    }
}

// A row before its last bytes are spent.
typedef struct greedy_row {
    point *at;     // [N]
    uint32_t head; // the owner of the first piece that does not fit; N: nothing is left to spend
    uint64_t left;
} greedy_row;

static void take_pieces(greedy_row *row, solved_rows *x, const point_set *corners, const uint64_t *budget)
{
    size_t count, next = 0;
    hull_piece *list = list_pieces(&count, corners, x->n_heads);
    point *at = need(x->n_heads, sizeof *at, "heads");
    uint64_t used = 0;
    for (uint32_t n = 0; n < x->n_heads; n++) used += (at[n] = corners->point[corners->first[n]]).cost;
    for (uint32_t r = x->n_rows; r-- > 0;) {
        for (; next < count && used <= budget[r]; next++) {
            const point *to = &corners->point[corners->first[list[next].head] + list[next].to];
            uint64_t more = to->cost - at[list[next].head].cost;
            if (more > budget[r] - used) break;
            used += more;
            at[list[next].head] = *to;
        }
        x->saturated[r] = used > budget[r];
        x->lambda[r] = next < count ? list[next].slope : 0;
        bool full = next == count || x->saturated[r];
        row[r] = (greedy_row){need_copy(at, x->n_heads, sizeof *at, "heads"), full ? x->n_heads : list[next].head,
                              full ? 0 : budget[r] - used};
    }
    free_all(at, list);
}

static void solve_rows(solved_rows *x, const bytes_problem *p, const uint64_t *budget)
{
    point_set all, corners;
    greedy_row *row = need(x->n_rows, sizeof *row, "rows");
    make_sets(&all, &corners, p);
    take_pieces(row, x, &corners, budget);
#pragma omp parallel for schedule(dynamic)
    for (uint32_t r = 0; r < x->n_rows; r++) {
        if (row[r].head < x->n_heads) spend_rest(row[r].at, &all, x->n_heads, row[r].head, row[r].left);
        put_row(x, r, row[r].at, p, budget[r]);
        free(row[r].at);
    }
    free(row);
    free_set(&all);
    free_set(&corners);
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
    solve_rows(out, p, budget);
    return KVB_OK;
}
