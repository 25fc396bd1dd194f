// The log of a study of tasks, as a stop or a slip of the hand may leave it.
#include "evaluator/task_log.h"
#include <math.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char KEY[] = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    task_log log = {0};
    task_result r;
    kvb_error err;
    task_log_parse(&log, (const char *)data, size, "fuzz.cells", &err);
    if (task_log_take(&log, KEY, &r)) {
        if (!r.done || r.n_questions < 1 || r.n_questions > TASK_MAX_QUESTIONS || !(r.kept >= 0)) abort();
        for (uint32_t i = 0; i < r.n_questions; i++)
            if (!isfinite(r.scores[i])) abort();
        free(r.scores);
    }
    task_log_close(&log);
    return 0;
}
