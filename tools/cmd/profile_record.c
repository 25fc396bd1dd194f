// kvbudget profile, the run itself: one process, a shard of several runs, or one rank of several under mpirun.
//
// Ranks share the folder of parts: every rank puts its contexts and questions there as files of their own, atomically,
// and rank 0 assembles them at the end. So nothing has to be sent, a dead rank loses what was in flight, and the next
// run may have any number of ranks. What is done is read by rank 0 alone and sent to the others, because a network file
// system may show every machine another state, and all must plan from the same one.
#include "formats/need.h"
#include "runtime/fail.h"
#include "tools/cmd/profile_command.h"
#include "tools/report/words.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool show_progress(void *context, double done, double total)
{
    profile_command *p = context;
    if (p->ranks.rank == 0) progress_update(&p->bar, done, total, NULL);
    return !cli_stop_requested;
}

static void show_message(void *context, const char *text)
{
    const profile_command *p = context;
    if (p->ranks.size > 1) fprintf(stderr, "warning: rank %d: %s\n", p->ranks.rank, text);
    else fprintf(stderr, "warning: %s\n", text);
}

kvb_status profile_agree(profile_command *p, kvb_status mine, kvb_error *err)
{
    int who;
    kvb_status status = ranks_agree(&p->ranks, mine, &who);
    if (mine != KVB_OK || status == KVB_OK) return mine;
    p->peer_failed = true;
    return kvb_fail(err, status,
                    "rank %d of %d %s; what is finished stays on disk, and --resume goes on with any number of ranks",
                    who, p->ranks.size, status == KVB_INTERRUPTED ? "was stopped" : "failed (its message says why)");
}

static kvb_status make_attributes(cJSON **out, const profile_command *p, kvb_error *err)
{
    if (p->base) return profile_grown_attributes(out, p->m, &p->job, &p->options, err);
    *out = profile_attributes(p->m, &p->job, &p->options);
    if (!p->n_shards) return KVB_OK;
    record_whole *all = need(p->job.n_contexts, sizeof *all, "contexts");
    for (size_t i = 0; i < p->job.n_contexts; i++)
        all[i] = (record_whole){p->job.contexts[i].id, p->job.contexts[i].n_questions};
    kvb_status status = record_mark_shard(*out, p->shard_index + 1, p->n_shards, all, p->job.n_contexts, err);
    free(all);
    return status;
}

// Rank 0 makes the folder, the others join it: their attributes must be equal, so model, texts and options are as well.
static kvb_status begin_record(record_writer **writer, profile_command *p, kvb_error *err)
{
    const model_config *c = &p->m->config;
    record_shape shape = {model_budgeted(c, c->n_layers), c->n_heads, c->n_kv_heads, c->head_dim};
    record_start add = p->force ? RECORD_ADD_ANEW : RECORD_ADD;
    record_start start = p->add ? add : p->resume ? RECORD_RESUME : p->force ? RECORD_REPLACE : RECORD_NEW;
    cJSON *attributes = NULL;
    kvb_status status = make_attributes(&attributes, p, err);
    if (status == KVB_OK && p->ranks.rank == 0)
        status = record_begin(writer, p->output, &shape, attributes, start, err);
    status = profile_agree(p, status, err);
    if (status == KVB_OK && p->ranks.rank > 0)
        status = record_begin(writer, p->output, &shape, attributes, p->add ? RECORD_ADD_JOIN : RECORD_JOIN, err);
    cJSON_Delete(attributes);
    return profile_agree(p, status, err);
}

static kvb_status find_share(profile_share *share, profile_command *p, const record_writer *writer, kvb_error *err)
{
    if (p->n_shards) return profile_share_out(share, p->m, &p->job, NULL, p->n_shards, p->shard_index, err);
    if (p->ranks.size == 1) return profile_share_out(share, p->m, &p->job, NULL, 1, 0, err);
    size_t size = profile_state_size(&p->job);
    uint8_t *state = need(size, 1, "pieces of work");
    if (p->ranks.rank == 0) profile_read_state(state, &p->job, writer);
    ranks_broadcast(&p->ranks, state, size);
    kvb_status status =
        profile_share_out(share, p->m, &p->job, state, (uint32_t)p->ranks.size, (uint32_t)p->ranks.rank, err);
    free(state);
    return status;
}

// Sums and maxima over the ranks.
static void join_times(const ranks *r, profile_times *t)
{
    double counts[] = {(double)t->queries, (double)t->skipped};
    ranks_sum(r, counts, 2);
    t->queries = (uint64_t)counts[0];
    t->skipped = (uint64_t)counts[1];
    double seconds[] = {t->prefill, t->scorers, t->extras, t->decode, t->writing};
    ranks_largest(r, seconds, 5);
    ranks_largest(r, t->each, PROFILE_MAX_METRICS);
    t->prefill = seconds[0], t->scorers = seconds[1], t->extras = seconds[2], t->decode = seconds[3];
    t->writing = seconds[4];
}

static kvb_status run_and_finish(profile_command *p, record_writer *writer, profile_times *times, kvb_error *err)
{
    profile_watch watch = {show_progress, show_message, p};
    profile_share share = {0};
    kvb_status status = profile_agree(p, find_share(&share, p, writer, err), err);
    if (status == KVB_OK) status = profile_run_share(p->m, &p->job, &p->options, &share, writer, &watch, times, err);
    status = profile_agree(p, status, err);
    if (status == KVB_OK) {
        join_times(&p->ranks, times);
        double start = seconds_now();
        if (p->ranks.rank == 0) status = profile_finish(&p->job, p->n_shards ? &share : NULL, writer, err);
        times->writing += seconds_now() - start;
        status = profile_agree(p, status, err);
    }
    profile_share_free(&share);
    return status;
}

static void end_progress(profile_command *p, kvb_status status, const profile_times *times)
{
    const profile_job *job = &p->job;
    unsigned long long tokens = job->n_context_tokens, questions = job->n_pairs, queries = times->queries;
    const char *asked = plural(questions, "question", "questions");
    const char *stopped = p->add ? "stopped; the same command goes on" : "stopped; --resume goes on";
    if (status != KVB_OK) progress_end(&p->bar, "%s", status == KVB_INTERRUPTED ? stopped : "failed");
    else if (p->n_shards)
        progress_end(&p->bar, "%s: shard %u of %u, %llu recorded queries", p->output, p->shard_index + 1, p->n_shards,
                     queries);
    else if (p->add && !job->n_contexts) progress_end(&p->bar, "%s: has all of this already", p->output);
    else if (p->add)
        progress_end(&p->bar, "%s: %zu %s now; prefilled %zu, %llu tokens; added %llu %s", p->output, job->growth.n_ids,
                     plural(job->growth.n_ids, "context", "contexts"), job->n_contexts, tokens, questions, asked);
    else
        progress_end(&p->bar, "%s: %zu %s, %llu tokens, %llu %s, %llu recorded %s", p->output, job->n_contexts,
                     plural(job->n_contexts, "context", "contexts"), tokens, questions, asked, queries,
                     plural(queries, "query", "queries"));
}

kvb_status profile_make_record(profile_command *p, profile_times *times, kvb_error *err)
{
    record_writer *writer = NULL;
    kvb_status status = begin_record(&writer, p, err);
    if (status == KVB_OK) {
        progress_begin(&p->bar, "profile", p->quiet || p->ranks.rank > 0);
        status = run_and_finish(p, writer, times, err);
        end_progress(p, status, times);
    }
    record_writer_free(writer);
    return status;
}
