// From many (context, question) pairs to one table.
//
// mean_ratio (the paper, eq. 11): solve every pair by itself and average the prune ratios r = 1 - b/T per ratio and
// head. Every pair counts the same. The average of optima is not the optimum of any problem, but it is robust: a head
// that only one question needs still keeps some tokens.
//
// mean_loss: minimise the mean over pairs of loss / total, each pair's loss divided by its own total mass. Chosen over
// plain sums because importance scales with 1/T and with how peaked a question's attention is: without the division a
// few short contexts and sharp questions would decide alone, and the objective would not be the `loss` that the table
// reports. Questions of one context share the metric's order, so averaging their gains is exact, and the sum of losses
// is still one sum over heads: one solve. Contexts of different T are averaged over the kept share b/T, which is what a
// table stores: each curve, a polygon over b/T, is sampled at the multiples of 1/T' of the longest context T'. If all T
// are equal nothing is interpolated. The floor is the mean of the pairs' floors, as in mean_ratio: the largest would
// make long contexts keep as large a share as the sinks of a short one. Below its own floor a context's curve is flat,
// so the average includes what a lower floor costs it.
// worst and cvar:A are for users who must not fail on any text: robust.h.
// loss_curves_shrink() protects heads that the calibration texts did not need but other texts do: it mixes the average
// head's curve into every head's. With a = 1 all heads are equal and the table is uniform; in between the table is
// still the optimum of one problem, with nested rows and a certificate.
#pragma once
#include "solver/greedy.h"
#include <stdbool.h>

// Running mean and deviation of prune ratios.
typedef struct ratio_mean {
    uint32_t n_rows, n_heads;
    uint64_t count;
    double *sum;    // [R, N]
    double *square; // [R, N] sum of squared deviations from the mean so far (Welford)
} ratio_mean;

void ratio_mean_init(ratio_mean *r, uint32_t n_rows, uint32_t n_heads);
void ratio_mean_free(ratio_mean *r);
void ratio_mean_add(ratio_mean *r, const allocation *a, uint32_t n_tokens);
// mean and std [R,N] (either may be NULL); std is the population's (divisor: count), 0 for one pair. count = 0: zeros.
void ratio_mean_get(const ratio_mean *r, double *mean, double *std);

// Replaces every head's gains by (1 - a) times its own plus a times the average head's at the same rank, and sums the
// losses again. 0 <= a <= 1. The total does not change. In effect a prior with weight a.
void loss_curves_shrink(loss_curves *c, double a);

// Running mean of relative loss curves over the kept share.
typedef struct loss_mean {
    loss_curves curves; // on the grid of the longest context; gain holds sums until loss_mean_finish
    uint64_t count;
    double floors; // sum of the pairs' floors as shares
    bool coarse;   // made by loss_mean_init_coarse
} loss_mean;

// grid: shape of the longest context that will be added.
void loss_mean_init(loss_mean *m, const cache_shape *grid);
// For studies that hold many means at once: shares are multiples of 1 / steps, or of 1 / T of the longest context if T
// is smaller. Contexts of any length can be added; protected tokens count only through the floor.
void loss_mean_init_coarse(loss_mean *m, const cache_shape *longest, uint32_t steps);
void loss_mean_free(loss_mean *m);
// Adds one pair. A pair whose total is 0 cannot lose anything: it is counted in the mean and adds nothing to the sum.
// KVB_MISMATCH when layers, heads or protection differ from the grid's; KVB_ARGUMENT when T is larger than a grid that
// is not coarse.
kvb_status loss_mean_add(loss_mean *m, const loss_curves *c, kvb_error *err);
// Adds to *m all pairs of another mean that is not finished and has the same grid.
void loss_mean_join(loss_mean *m, const loss_mean *other);
// Divides by the count and fills curves.loss, curves.total and curves.floor. Nothing may be added afterwards.
void loss_mean_finish(loss_mean *m);

// Fills curves of the means' shape with their sums weighted by weight [n], and the largest floor.
void loss_mean_weigh(loss_curves *out, const loss_mean *means, size_t n, const double *weight);

// Rounds one row of prune ratios [L,G] to whole tokens for T = n_tokens: the layer's total is rint of the sum of its
// ideals (1 - r) T, every head gets the floor of its ideal, and the remaining tokens go to the largest fractions, lower
// head first; every count is from 1 to T. This is the runtime's layer_lr rule in f64 (kvpress's f32 sums may differ by
// one token in long contexts).
void round_layers(const double *prune_ratio, uint32_t n_layers, uint32_t n_kv_heads, uint32_t n_tokens, uint32_t *keep);

// Adds the relative loss of a table on one pair, loss / total with each row rounded by round_layers(), to sum [R].
// prune_ratio [R,L,G]; keep [N] is scratch. A head that keeps fewer tokens than are protected is charged for the whole
// middle region; what it loses of the protected tokens has no curve and is not counted.
void table_loss_add(double *sum, const loss_curves *c, uint32_t n_rows, const double *prune_ratio, uint32_t *keep);
