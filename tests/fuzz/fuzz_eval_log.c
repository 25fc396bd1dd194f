// The log of a sweep, as a stop or a slip of the hand may leave it.
#include "evaluator/sweep_log.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CELLS = 3, ROWS = 4, LAYERS = 2 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    model m = {.config = {.n_layers = LAYERS}};
    sweep_cell cells[CELLS] = {{.key = "first"}, {.key = "second"}, {.key = "third"}};
    sweep s = {.m = &m, .o = {.n_next = ROWS}, .cells = cells, .n_cells = CELLS};
    kvb_error err;
    sweep_log_parse(&s, (const char *)data, size, "fuzz.cells", &err);
    for (int i = 0; i < CELLS; i++) {
        const fidelity_cell *c = &cells[i].result;
        if (cells[i].done != (c->kl != NULL)) abort();
        for (int r = 0; cells[i].done && r < ROWS; r++)
            if (!isfinite(c->kl[r]) || (r + 1 < ROWS && !isfinite(c->nll[r]))) abort();
        fidelity_cell_free(&cells[i].result);
    }
    return 0;
}
