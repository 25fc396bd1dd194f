// The profiling run, its end: whether all is there, and the record made of it.
#include "profiler/backend/meter.h"
#include "profiler/profile.h"
#include "runtime/fail.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>

static bool has_piece(const profile_share *share, size_t context)
{
    for (size_t i = 0; i < share->n; i++)
        if (share->pieces[i].context == context) return true;
    return false;
}

// Without a share every question must be there; a share's own pieces are there when its run has ended well.
static kvb_status check_questions(const profile_context *c, const record_writer *writer, kvb_error *err)
{
    for (uint32_t q = 0; q < c->n_questions; q++)
        if (!record_writer_has_question(writer, c->id, q))
            return kvb_fail(err, KVB_MISMATCH, "sample %s: question %u is missing in the record; go on with --resume",
                            c->id, q + 1);
    return KVB_OK;
}

kvb_status profile_finish(const profile_job *job, const profile_share *share, record_writer *writer, kvb_error *err)
{
    const profile_growth *g = &job->growth;
    const char **ids = calloc(job->n_contexts + 1, sizeof *ids);
    if (!ids) return kvb_fail(err, KVB_MEMORY, "no memory for %zu context ids", job->n_contexts);
    kvb_status status = KVB_OK;
    size_t n = 0;
    for (size_t i = 0; i < job->n_contexts && status == KVB_OK; i++) {
        if (share && !has_piece(share, i)) continue;
        if (!share) status = check_questions(&job->contexts[i], writer, err);
        ids[n++] = job->contexts[i].id;
    }
    if (status == KVB_OK) status = record_finish(writer, g->n_ids ? g->ids : ids, g->n_ids ? g->n_ids : n, err);
    free(ids);
    return status;
}

kvb_status profile_run(const model *m, const profile_job *job, const profile_options *o, record_writer *writer,
                       const profile_watch *watch, profile_times *times, kvb_error *err)
{
    profile_share all;
    kvb_status status = profile_share_out(&all, m, job, NULL, 1, 0, err);
    if (status == KVB_OK) status = profile_run_share(m, job, o, &all, writer, watch, times, err);
    profile_share_free(&all);
    double start = meter_now();
    if (status == KVB_OK) status = profile_finish(job, NULL, writer, err);
    times->writing += meter_now() - start;
    meter_add_parallel(METER_WRITING, start, omp_get_max_threads());
    return status;
}
