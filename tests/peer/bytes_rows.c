// Solves a problem of tokens and formats (solver/bytes.h) that bytes_milp.py writes to standard input, and prints for
// each budget: bytes, loss, bound, saturated, and then for every head how many tokens it keeps, in which format.
//
//   bytes_rows < PROBLEM     heads formats tokens floor rows, then loss [heads, tokens + 1], added [heads, formats],
//                            cost [formats, tokens + 1], budget [rows]
#include "formats/need.h"
#include "solver/bytes.h"
#include <stdio.h>
#include <stdlib.h>

static double number(void)
{
    double x;
    if (scanf("%lf", &x) != 1) exit(2);
    return x;
}

int main(void)
{
    uint32_t N = (uint32_t)number(), J = (uint32_t)number(), T = (uint32_t)number(), floor = (uint32_t)number(),
             R = (uint32_t)number();
    const cache_shape shape = {1, N, T, 0, 0};
    loss_curves c = loss_curves_make(&shape);
    c.floor = floor;
    for (size_t i = 0; i < (size_t)N * (T + 1); i++) c.loss[i] = number();
    bytes_problem p = {&c, J, need((size_t)N * J, sizeof(double), "losses"),
                       need((size_t)J * (T + 1), sizeof(uint64_t), "bytes")};
    uint64_t *budget = need(R, sizeof *budget, "budgets");
    for (size_t i = 0; i < (size_t)N * J; i++) p.added[i] = number();
    for (size_t i = 0; i < (size_t)J * (T + 1); i++) p.cost[i] = (uint64_t)number();
    for (uint32_t r = 0; r < R; r++) budget[r] = (uint64_t)number();
    solved_rows x;
    kvb_error err;
    if (bytes_solve(&x, &p, budget, R, &err) != KVB_OK) {
        fprintf(stderr, "bytes_rows: %s\n", err.message);
        return 1;
    }
    for (uint32_t r = 0; r < R; r++) {
        printf("%llu %.17g %.17g %d", (unsigned long long)x.bytes[r], x.loss[r], x.bound[r], x.saturated[r]);
        for (uint32_t n = 0; n < N; n++) printf(" %u %u", x.keep[r * N + n], x.format[r * N + n]);
        printf("\n");
    }
    return 0; // the system frees
}
