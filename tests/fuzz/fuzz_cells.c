// The log of results so far, possibly damaged by a stop or an editor: sweeps, tasks and refinements must not take
// invalid results from it.
#include "evaluator/refine_bench.h"
#include "evaluator/task_study.h"
#include "tests/fuzz/fuzz.h"

enum { NEXT = 4, LAYERS = 2 };
static const char KEY[LOG_KEY] = "00000000000000000000000000000000000000000000000000000000000000ff";

static void take_cell(log_file *log)
{
    model m = {.config = {.n_layers = LAYERS}};
    sweep_cell cell = {0};
    sweep s = {.m = &m, .o = {.n_next = NEXT}, .cells = &cell, .n_cells = 1, .log = log};
    memcpy(cell.key, KEY, sizeof KEY);
    (void)sweep_take(&s, NULL);
    const fidelity_cell *c = &cell.result;
    if (cell.done != (c->kl != NULL)) abort();
    for (int r = 0; cell.done && r < NEXT; r++)
        if (!isfinite(c->kl[r]) || (r + 1 < NEXT && !isfinite(c->nll[r]))) abort();
    fidelity_cell_free(&cell.result);
}

static void take_result(const log_file *log)
{
    task_result r;
    if (task_result_read(&r, log, KEY, NULL) != KVB_OK || !r.done) return;
    if (r.n_questions < 1 || r.n_questions > TASK_MAX_QUESTIONS || !(r.kept >= 0)) abort();
    for (uint32_t i = 0; i < r.n_questions; i++)
        if (!isfinite(r.scores[i])) abort();
    free(r.scores);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    log_file *log;
    damage_value found;
    if (log_open(&log, NULL, NULL) != KVB_OK) return 0;
    (void)log_parse(log, (const char *)data, size, "fuzz.cells", NULL);
    take_cell(log);
    take_result(log);
    if (log_find(log, KEY) && damage_value_read(&found, log, KEY, NULL) == KVB_OK)
        if (!(isfinite(found.kl) && isfinite(found.flips) && isfinite(found.nll))) abort();
    log_close(log, KVB_OK, NULL);
    return 0;
}
