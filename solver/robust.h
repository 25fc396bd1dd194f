// Tables for the worst case: they minimise the loss of the texts that lose most.
//
// L_k(b) is the mean relative loss of text k (aggregate.h), k = 1 .. K. cvar:A is the mean over the worst share A of
// the texts (with a fraction of a text where A K is not whole), worst is the largest of them, A <= 1 / K:
//
//     min over b  of  max over w >= 0, sum w = 1, w_k <= min(1, 1 / (A K))  of  sum_k w_k L_k(b)
// For given w the sum is one more set of loss curves, which greedy solves; its certificate bounds from below what any
// budgets can reach in the worst case, whatever w is. So w is moved towards the texts that lose most (multiplicative
// weights: Freund and Schapire 1999), each ratio starting from the weights of the one before; the mean of the budgets
// on the way converges to the optimum over shares. The best budgets and the best bound found are returned. Rows are
// only nested if their weights agree. The unit is a text, not a question: a table cannot suit every question, but
// should not fail a kind of text.
#pragma once
#include "solver/aggregate.h"
#include "solver/problem.h"

typedef struct robust_result {
    uint32_t n_rows, n_heads, n_texts;
    double *prune_ratio; // [R, N]
    double *loss;        // [R] mean loss of the worst texts
    double *bound;       // [R] no table has a smaller loss
    double *weight;      // [R, K] the multipliers w behind bound
    double *lambda;      // [R] the multiplier of the budget
    uint8_t *saturated;  // [R]
} robust_result;

// texts [K]: finished means (loss_mean_finish) on one grid; ratios [R], ascending; tail: A, 0 for worst. One budget
// over all layers, or one for each. On failure *out is zero.
kvb_status robust_solve(robust_result *out, const loss_mean *texts, uint32_t n_texts, double tail,
                        const solve_options *options, kvb_error *err);
void robust_free(robust_result *r);

enum { ROBUST_ITERATIONS = 40 }; // at most, for each ratio
#define ROBUST_GAP 1e-3          // a row is done when loss and bound are this close, as a share of the loss

// Returns the mean of the worst share `tail` of n losses, or the largest loss if tail is 0. weight [n] (may be NULL)
// receives their weights in the mean.
double tail_mean(const double *loss, uint32_t n, double tail, double *weight);
