#include "solver/checker.h"
#include <math.h>

double checker_dual(const loss_curves *c, uint32_t first, uint32_t n, double lambda, uint64_t budget, uint64_t *kept)
{
    uint32_t protect = shape_protected(&c->shape), middle = shape_middle(&c->shape), begin = c->floor - protect;
    double sum = 0;
    uint64_t tokens = 0;
    for (uint32_t h = first; h < first + n; h++) {
        const double *loss = c->loss + (size_t)h * (middle + 1);
        // Counted from the floor, so that the products stay small.
        double best = loss[begin];
        uint32_t at = begin;
        for (uint32_t i = begin + 1; i <= middle; i++) {
            double value = loss[i] + lambda * (i - begin);
            if (value < best) {
                best = value;
                at = i;
            }
        }
        sum += best;
        tokens += at + protect;
    }
    if (kept) *kept = tokens;
    return sum - lambda * ((double)budget - (double)n * c->floor);
}

// A point of the dual function.
typedef struct point {
    double lambda, value, slope;
} point;

static point evaluate(const loss_curves *c, uint32_t first, uint32_t n, double lambda, uint64_t budget)
{
    uint64_t kept;
    point p = {.lambda = lambda};
    p.value = checker_dual(c, first, n, lambda, budget, &kept);
    p.slope = (double)kept - (double)budget;
    return p;
}

// Closes in from `near` by factors of 4 on two points that keep too many and not too many tokens; without `near` the ends
// of the axis are these points.
static void bracket(const loss_curves *c, uint32_t first, uint32_t n, uint64_t budget, double near, point *low,
                    point *high)
{
    double next = near;
    bool up = false, down = false;
    for (int step = 0; step < 64 && next > low->lambda && next < high->lambda && !(up && down); step++) {
        point p = evaluate(c, first, n, next, budget);
        if (p.slope > 0) {
            *low = p;
            up = true;
            next = p.lambda * 4;
        } else {
            *high = p;
            down = true;
            next = p.lambda / 4;
        }
    }
}

double checker_best(const loss_curves *c, uint32_t first, uint32_t n, uint64_t budget, double near, double *lambda)
{
    double most = 1e-300, tolerance = 0;
    for (uint32_t h = first; h < first + n; h++) {
        double loss = loss_at(c, h, c->floor);
        most = fmax(most, 2 * loss);
        tolerance += 1e-13 * loss;
    }
    // At a price above the largest loss everybody is at the floor.
    point low = evaluate(c, first, n, 0, budget), high = evaluate(c, first, n, most, budget), best = low;
    if (low.slope > 0) {
        bracket(c, first, n, budget, near, &low, &high);
        best = low.value > high.value ? low : high;
        for (int step = 0; step < 500; step++) {
            double far = high.lambda - low.lambda;
            double right = (high.value - low.value - high.slope * far) / (low.slope - high.slope);
            if (!(right > 0 && right < far) || low.value + low.slope * right - best.value <= tolerance) break;
            point p = evaluate(c, first, n, low.lambda + right, budget);
            if (p.value > best.value) best = p;
            if (p.slope > 0) low = p;
            else high = p;
            if (p.slope == 0) break; // the minimisers meet the budget: p is the optimum, and the maximum
        }
    }
    if (lambda) *lambda = best.lambda;
    return best.value;
}

uint64_t checker_budget(const loss_curves *c, uint32_t n_layers, double ratio)
{
    const cache_shape *s = &c->shape;
    uint64_t heads = (uint64_t)n_layers * s->n_kv_heads;
    // Multiplied in this order, as tables are defined: half a token is common, and rounding decides it.
    uint64_t left = heads * s->n_tokens - (uint64_t)rint(ratio * n_layers * s->n_kv_heads * s->n_tokens);
    return left > heads * c->floor ? left : heads * c->floor;
}

void checker_rows(const loss_curves *c, bool layers, uint32_t n_rows, const double *ratios, const double *lambda,
                  double *bound)
{
    uint32_t groups = layers ? c->shape.n_layers : 1, n = shape_heads(&c->shape) / groups;
#pragma omp parallel for schedule(dynamic)
    for (uint32_t r = 0; r < n_rows; r++) {
        uint64_t budget = checker_budget(c, c->shape.n_layers / groups, ratios[r]);
        bound[r] = 0;
        for (uint32_t g = 0; g < groups; g++)
            bound[r] += checker_best(c, g * n, n, budget, lambda ? lambda[r] : 0, NULL);
    }
}
