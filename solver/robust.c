#include "solver/robust.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdbool.h>
#include <string.h>

void robust_free(robust_result *r)
{
    free_all(r->prune_ratio, r->loss, r->bound, r->weight, r->lambda, r->saturated);
    *r = (robust_result){0};
}

static double weight_cap(uint32_t n, double tail)
{
    return tail * n > 1 ? 1 / (tail * n) : 1;
}

double tail_mean(const double *loss, uint32_t n, double tail, double *weight)
{
    double cap = weight_cap(n, tail), left = 1, sum = 0;
    for (uint32_t k = 0; weight && k < n; k++) weight[k] = 0;
    // The next largest after the one before; among equal ones the first.
    double last = INFINITY;
    uint32_t last_k = 0;
    while (left > 1e-15) {
        uint32_t best = n;
        for (uint32_t k = 0; k < n; k++) {
            bool later = loss[k] < last || (loss[k] == last && k > last_k);
            if (later && (best == n || loss[k] > loss[best])) best = k;
        }
        if (best == n) break;
        double share = fmin(cap, left);
        if (weight) weight[best] = share;
        sum += share * loss[best];
        left -= share;
        last = loss[best];
        last_k = best;
    }
    return sum;
}

// Scales w to the sum 1 with no weight above the cap: what is cut off is shared out in proportion to the others.
static void project_weights(double *w, uint32_t n, double cap)
{
    for (uint32_t round = 0; round < n; round++) {
        double free_sum = 0, fixed = 0;
        for (uint32_t k = 0; k < n; k++) {
            if (w[k] >= cap) fixed += cap;
            else free_sum += w[k];
        }
        double scale = free_sum > 0 ? (1 - fixed) / free_sum : 0;
        bool again = false;
        for (uint32_t k = 0; k < n; k++) {
            w[k] = w[k] >= cap ? cap : w[k] * scale;
            again |= w[k] > cap * (1 + 1e-12);
        }
        if (!again) return;
    }
}

static void move_weights(double *w, const double *loss, uint32_t n, double cap, double rate)
{
    double most = 0, sum = 0;
    for (uint32_t k = 0; k < n; k++) most = fmax(most, loss[k]);
    if (!(most > 0)) return;
    for (uint32_t k = 0; k < n; k++) {
        // No text is given up for good: its weight would never come back.
        w[k] = fmax(w[k], 1e-6 / n) * exp(rate * (loss[k] / most - 1));
        sum += w[k];
    }
    for (uint32_t k = 0; k < n; k++) w[k] /= sum;
    project_weights(w, n, cap);
}

typedef struct search {
    const loss_mean *texts;
    uint32_t n_texts, n_heads;
    double tail, cap;
    problem problem; // of the weighted sum, one ratio
    double *share;   // [N] kept, of the budgets being judged
    double *sum;     // [N] of the shares on the way
    double *loss;    // [K]
    double *weight;  // [K]
} search;

static search make_search(const loss_mean *texts, uint32_t n_texts, double tail, const solve_options *options)
{
    const cache_shape *shape = &texts[0].curves.shape;
    search s = {.texts = texts, .n_texts = n_texts, .n_heads = shape_heads(shape), .tail = tail};
    solve_options one = *options;
    one.n_rows = 1;
    s.cap = weight_cap(n_texts, tail);
    problem_init(&s.problem, shape, &one);
    s.share = need(s.n_heads, sizeof *s.share, "heads");
    s.sum = need(s.n_heads, sizeof *s.sum, "heads");
    s.loss = need(n_texts, sizeof *s.loss, "texts");
    s.weight = need(n_texts, sizeof *s.weight, "texts");
    for (uint32_t k = 0; k < n_texts; k++) s.weight[k] = 1.0 / n_texts;
    return s;
}

// Computes each text's loss at s->share, by straight lines between grid points. Returns the mean of the worst.
static double judge(search *s)
{
    const cache_shape *shape = &s->problem.curves.shape;
    uint32_t p = shape_protected(shape), m = shape_middle(shape);
    for (uint32_t k = 0; k < s->n_texts; k++) {
        s->loss[k] = 0;
        for (uint32_t h = 0; h < s->n_heads; h++) {
            const double *loss = s->texts[k].curves.loss + (size_t)h * (m + 1);
            double x = fmax(0, s->share[h] * shape->n_tokens - p);
            uint32_t c = x < m ? (uint32_t)x : m - 1;
            s->loss[k] += loss[c] + fmin(1, x - c) * (loss[c + 1] - loss[c]);
        }
    }
    return tail_mean(s->loss, s->n_texts, s->tail, NULL);
}

static void keep_better(robust_result *out, uint32_t row, const search *s, double loss)
{
    if (!(loss < out->loss[row])) return;
    out->loss[row] = loss;
    for (uint32_t h = 0; h < s->n_heads; h++) out->prune_ratio[(size_t)row * s->n_heads + h] = 1 - s->share[h];
}

static kvb_status search_row(search *s, robust_result *out, uint32_t row, const double *ratio, kvb_error *err)
{
    problem *p = &s->problem;
    const uint32_t grid = p->curves.shape.n_tokens;
    out->loss[row] = INFINITY;
    out->bound[row] = -1;
    p->options.ratios = ratio;
    for (uint32_t h = 0; h < s->n_heads; h++) s->sum[h] = 0;
    for (uint32_t i = 0; i < ROBUST_ITERATIONS; i++) {
        loss_mean_weigh(&p->curves, s->texts, s->n_texts, s->weight);
        kvb_status status = problem_solve(p, err);
        if (status != KVB_OK) return status;
        out->saturated[row] = p->allocation.saturated[0];
        double bound = p->bound[0] * p->curves.total;
        if (bound > out->bound[row]) {
            out->bound[row] = bound;
            out->lambda[row] = p->lambda[0] * p->curves.total;
            memcpy(out->weight + (size_t)row * s->n_texts, s->weight, s->n_texts * sizeof *s->weight);
        }
        for (uint32_t h = 0; h < s->n_heads; h++) {
            s->sum[h] += (double)p->allocation.keep[h] / grid;
            s->share[h] = s->sum[h] / (i + 1);
        }
        keep_better(out, row, s, judge(s));
        for (uint32_t h = 0; h < s->n_heads; h++) s->share[h] = (double)p->allocation.keep[h] / grid;
        keep_better(out, row, s, judge(s)); // leaves the losses of these budgets in s->loss
        if (out->loss[row] - out->bound[row] <= ROBUST_GAP * out->loss[row]) break;
        move_weights(s->weight, s->loss, s->n_texts, s->cap, 4 / sqrt(i + 1.0));
    }
    out->bound[row] = fmin(out->bound[row], out->loss[row]);
    // The next ratio starts from where the bound was best.
    memcpy(s->weight, out->weight + (size_t)row * s->n_texts, s->n_texts * sizeof *s->weight);
    return KVB_OK;
}

kvb_status robust_solve(robust_result *out, const loss_mean *texts, uint32_t n_texts, double tail,
                        const solve_options *options, kvb_error *err)
{
    *out = (robust_result){0};
    if (n_texts == 0 || !(tail >= 0 && tail <= 1))
        return kvb_fail(err, KVB_ARGUMENT, "solver: worst case over %u texts, share %g", n_texts, tail);
    search s = make_search(texts, n_texts, tail, options);
    kvb_status status = KVB_OK;
    size_t rows = options->n_rows;
    *out = (robust_result){options->n_rows,
                           s.n_heads,
                           n_texts,
                           need(rows * s.n_heads, sizeof(double), "ratios"),
                           need(rows, sizeof(double), "losses"),
                           need(rows, sizeof(double), "losses"),
                           need(rows * n_texts, sizeof(double), "weights of texts"),
                           need(rows, sizeof(double), "multipliers"),
                           need(rows, 1, "ratios")};
    for (uint32_t r = 0; r < options->n_rows && status == KVB_OK; r++)
        status = search_row(&s, out, r, &options->ratios[r], err);
    problem_free(&s.problem);
    free_all(s.share, s.sum, s.loss, s.weight);
    if (status != KVB_OK) robust_free(out);
    return status;
}
