// The exact judge: a dynamic program over the multiple-choice knapsack problem (LU-KV section 4.3; methods.md 2.6).
//
//     F_0(0) = 0,   F_n(x) = min over choices j <= x of F_{n-1}(x - j) + cost_n(j)
//
// All choices weigh whole units and every head has the same ones, so one run answers every budget. Of equal costs the
// smallest choice wins, in the last head first. Time and memory grow with the square of heads times tokens: this is for
// checks, not for models.
#pragma once
#include "solver/curve.h"

typedef struct mckp_limits {
    uint64_t max_work;  // relaxations, about (heads * choices)^2 / 2; 0 = MCKP_MAX_WORK
    uint64_t max_bytes; // values and back-pointers together; 0 = MCKP_MAX_BYTES
} mckp_limits;

#define MCKP_MAX_WORK 5000000000ull // seconds: 100,000 heads * tokens
#define MCKP_MAX_BYTES (1ull << 30)

// A solved instance. Choice j of a head means that it keeps base + j * step tokens.
typedef struct mckp {
    uint32_t n_classes, n_choices; // N, J + 1: choices 0 .. J
    uint32_t base, step;
    uint64_t n_states; // N * J + 1: totals x = 0 .. N * J
    double *value;     // [n_states] F_N(x)
    uint16_t *choice;  // [N, n_states] the choice of head n in F_n(x)
} mckp;

// The plain instance: cost [n_classes, n_choices], finite. base = 0, step = 1.
// Over the limits: KVB_UNSUPPORTED, with the sizes in the message. On failure *out is zero.
kvb_status mckp_solve(mckp *out, const double *cost, uint32_t n_classes, uint32_t n_choices, const mckp_limits *limits,
                      kvb_error *err);

// Token level: every b in floor .. T may be chosen. Exact.
kvb_status mckp_tokens(mckp *out, const loss_curves *c, const mckp_limits *limits, kvb_error *err);

// The paper's grid: b = floor + i * step with step = max(1, T / 100), which leaves about 100 choices. A coarser
// problem: its optimum may lose to greedy at token level.
kvb_status mckp_grid(mckp *out, const loss_curves *c, const mckp_limits *limits, kvb_error *err);

// The optimum for at most `budget` tokens: fills keep [N] and *loss (either may be NULL). With step > 1 up to step - 1
// tokens stay unspent. KVB_ARGUMENT when the budget is below N * base.
kvb_status mckp_budgets(const mckp *m, uint64_t budget, uint32_t *keep, double *loss, kvb_error *err);
void mckp_free(mckp *m);
