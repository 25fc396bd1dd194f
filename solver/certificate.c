#include "solver/certificate.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdlib.h>

double certificate_loss(const loss_curves *c, uint32_t first, uint32_t n, const uint32_t *keep)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += loss_at(c, first + i, keep[i]);
    return sum;
}

// One head's part of all rows' bounds.
typedef struct head_scan {
    const double *loss;   // [M + 1] of this head
    uint32_t protect;     // |P|: b tokens are b - |P| of the middle region
    const double *lambda; // of row r at lambda[r * stride]
    size_t stride;
    double *best; // [R]
} head_scan;

// Scans rows first .. last - 1, whose best b are known to lie in low .. high. If b* is best for a row, then for a
// larger lambda nothing above b* can be better, and for a smaller one nothing below.
static void scan_rows(const head_scan *s, uint32_t first, uint32_t last, uint32_t low, uint32_t high)
{
    if (first >= last) return;
    uint32_t row = first + (last - first) / 2, at = low;
    double lambda = s->lambda[row * s->stride], best = s->loss[low - s->protect] + lambda * low;
    for (uint32_t b = low + 1; b <= high; b++) {
        double value = s->loss[b - s->protect] + lambda * b;
        if (value < best) {
            best = value;
            at = b;
        }
    }
    s->best[row] = best;
    scan_rows(s, first, row, at, high);
    scan_rows(s, row + 1, last, low, at);
}

static kvb_status check_certificate_rows(const loss_curves *c, uint32_t n_rows, uint32_t n_groups, const double *lambda,
                                         kvb_error *err)
{
    uint32_t n = shape_heads(&c->shape);
    if (n_groups == 0 || n % n_groups)
        return kvb_fail(err, KVB_ARGUMENT, "certificate: %u heads do not split into %u equal groups", n, n_groups);
    if (c->floor < shape_protected(&c->shape) || c->floor > c->shape.n_tokens)
        return kvb_fail(err, KVB_ARGUMENT, "certificate: expected a floor of %u..%u tokens, found %u",
                        shape_protected(&c->shape), c->shape.n_tokens, c->floor);
    for (size_t i = 0; i < (size_t)n_rows * n_groups; i++)
        if (!(lambda[i] >= 0) || (i >= n_groups && lambda[i] < lambda[i - n_groups]))
            return kvb_fail(err, KVB_ARGUMENT,
                            "certificate: row %zu: expected multipliers of 0 or more that ascend, found %g",
                            i / n_groups, lambda[i]);
    return KVB_OK;
}

// Loss and bound of one row from the heads' minima.
static kvb_status close_row(const loss_curves *c, uint32_t row, uint32_t n_groups, const uint32_t *keep,
                            const double *lambda, const double *best, size_t stride, double *loss, double *bound,
                            kvb_error *err)
{
    uint32_t n = shape_heads(&c->shape);
    double sum = 0, slack = 1e-9 * c->total;
    for (uint32_t h = 0; h < n; h++) {
        double multiplier = lambda[h / (n / n_groups)];
        sum += best[h * stride] - multiplier * keep[h];
        slack += 1e-12 * multiplier * c->shape.n_tokens;
    }
    *loss = certificate_loss(c, 0, n, keep);
    if (!(sum <= *loss + slack))
        return kvb_fail(err, KVB_NUMERIC,
                        "certificate: row %u: bound %g above loss %g; the kept counts are below the floor of %u or "
                        "the curves do not fall",
                        row, sum, *loss, c->floor);
    // Losses are never negative and the allocation attains its own, so clipping removes rounding only.
    *bound = sum < 0 ? 0 : sum > *loss ? *loss : sum;
    return KVB_OK;
}

kvb_status certificate_rows(const loss_curves *c, uint32_t n_rows, uint32_t n_groups, const uint32_t *keep,
                            const double *lambda, double *loss, double *bound, kvb_error *err)
{
    kvb_status status = check_certificate_rows(c, n_rows, n_groups, lambda, err);
    if (status) return status;
    uint32_t n = shape_heads(&c->shape), m = shape_middle(&c->shape), p = shape_protected(&c->shape);
    // [N,R]: summed in head order below, whatever the threads did
    double *best = need_more(NULL, (size_t)n * n_rows, sizeof *best, "bounds");
#pragma omp parallel for schedule(static) if ((size_t)n * m > PARALLEL_CELLS)
    for (uint32_t h = 0; h < n; h++) {
        head_scan scan = {c->loss + (size_t)h * (m + 1), p, lambda + h / (n / n_groups), n_groups,
                          best + (size_t)h * n_rows};
        scan_rows(&scan, 0, n_rows, c->floor, c->shape.n_tokens);
    }
    for (uint32_t r = 0; r < n_rows && status == KVB_OK; r++)
        status = close_row(c, r, n_groups, keep + (size_t)r * n, lambda + (size_t)r * n_groups, best + r, n_rows,
                           &loss[r], &bound[r], err);
    free(best);
    return status;
}
