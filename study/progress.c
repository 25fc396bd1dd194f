#include "study/progress.h"
#include <time.h>

void study_progress_begin(study_progress *p, double total)
{
    if (!p) return;
    p->done = 0;
    p->total = total;
}

bool study_progress_step(study_progress *p)
{
    return !p || !p->update || p->update(p->to, ++p->done, p->total);
}

double study_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
