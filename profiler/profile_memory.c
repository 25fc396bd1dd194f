// What a profiling run keeps in memory, and how many questions at a time fit. Everything is linear in T, in the number
// of questions, and in that of contexts.
#include "profiler/model/loss_pass.h"
#include "profiler/model/rope.h"
#include "profiler/profile.h"
#include "runtime/fail.h"
#include <omp.h>

// The most for importance and tails of one batch, unless the user sets the batch or the memory: more does not make
// products faster, and a batch is what an interrupted run loses.
enum { BATCH_BYTES = 2000000000 };

// Questions whose steps share a pass over the weights, if memory allows: more save little.
enum { BATCH_ROWS = 64 };

// What the product library keeps per thread for packed blocks and kernels, besides stacks: measured, 7 to 10 MiB.
enum { THREAD_BYTES = 9 << 20 };

// Metrics are scored one after the other, so the largest counts, and [H, T] three times for what observers may ask of
// the forward pass.
static uint64_t metric_bytes(const model *m, const profile_job *job, const profile_options *o)
{
    const model_config *c = &m->config;
    layer_view shape = {.n_tokens = job->max_tokens,
                        .n_heads = c->n_heads,
                        .n_kv_heads = c->n_kv_heads,
                        .head_dim = c->head_dim,
                        .rope_dim = c->rope_dim};
    uint64_t needs = 0, most = 0;
    for (size_t i = 0; i < o->n_metrics; i++) {
        uint64_t bytes = metric_score_bytes(&o->metrics[i], &shape, (uint32_t)omp_get_max_threads());
        needs |= metric_needs(&o->metrics[i]);
        if (bytes > most) most = bytes;
    }
    uint64_t extras = needs & (VIEW_COLUMN_SUMS | VIEW_OUTPUT_NORMS) ? 3ull * c->n_heads : 0;
    return most + extras * job->max_tokens * sizeof(float);
}

profile_memory profile_memory_of(const model *m, const profile_job *job, const profile_options *o, uint32_t batch)
{
    const model_config *c = &m->config;
    forward_plan plan = {job->max_tokens, batch, job->max_tail, job->n_pairs > 0, true, job->max_contexts};
    uint64_t layers = c->n_layers, heads = (uint64_t)model_budgeted(c, c->n_layers) * c->n_kv_heads,
             T = job->max_tokens;
    uint64_t rows = (uint64_t)batch * job->max_tail;
    uint64_t losses = o->loss_queries ? forward_loss_bytes(m, &plan, o->loss_queries, o->refit) +
                                            batch * o->n_metrics * heads * OUTPUT_LEVELS * sizeof(float)
                                      : 0;
    profile_memory out = {
        .cache = forward_cache_bytes(m, &plan),
        .questions = batch * (heads * T + 2 * layers * c->n_kv_heads * job->max_tail * c->head_dim) * sizeof(float),
        .scratch =
            forward_scratch_bytes(m, &plan) + metric_bytes(m, job, o) + (uint64_t)omp_get_max_threads() * THREAD_BYTES,
        .host = (o->n_metrics + 1) * heads * T * sizeof(float) +
                batch * (2ull * c->vocabulary + o->new_tokens) * sizeof(float) +
                rows * (sizeof(decode_row) + sizeof(int32_t)) + losses,
    };
    out.activations = forward_bytes(m, &plan) - out.cache - out.questions;
    return out;
}

uint64_t profile_memory_total(const profile_memory *p)
{
    return p->cache + p->questions + p->activations + p->scratch + p->host;
}

static kvb_status too_much(const profile_job *job, uint32_t batch, uint64_t needed, uint64_t left, kvb_error *err)
{
    return kvb_fail(err, KVB_MEMORY,
                    "the run takes %.2f GiB besides the model for %u question%s at a time over %u tokens, but %.2f GiB "
                    "are free; use %s--max-tokens N or a machine with more memory (--memory says how much to use)",
                    (double)needed / 0x1p30, batch, batch == 1 ? "" : "s", job->max_tokens, (double)left / 0x1p30,
                    batch == 1 ? "" : "--batch 1, ");
}

// Adds contexts to the batch while there is memory. Losses are judged context by context, and given answers take one
// pass anyway.
static void add_contexts(profile_job *job, const model *m, const profile_options *o, uint64_t left)
{
    uint32_t each = job->max_questions, rows = o->batch ? o->batch : BATCH_ROWS;
    if (o->loss_queries || job->n_given == job->n_pairs || rope_depends_on_length(&m->config.rope)) return;
    for (uint32_t n = 2; n <= job->n_contexts && n * each <= rows; n++) {
        profile_job more = *job;
        more.max_contexts = n;
        profile_memory memory = profile_memory_of(m, &more, o, n * each);
        if (left && profile_memory_total(&memory) > left) return;
        if (!o->memory_is_asked && memory.questions + memory.cache > BATCH_BYTES) return;
        job->max_contexts = n;
        job->max_questions = n * each;
    }
}

kvb_status profile_fit_batch(profile_job *job, const model *m, const profile_options *o, kvb_error *err)
{
    job->max_questions /= job->max_contexts; // of an earlier call
    job->max_contexts = 1;
    uint32_t most = job->max_questions;
    if (o->batch) most = o->batch < most ? o->batch : most;
    if (most == 0) return KVB_OK; // no contexts
    profile_memory one = profile_memory_of(m, job, o, 1), two = profile_memory_of(m, job, o, 2);
    uint64_t base = profile_memory_total(&one), each = profile_memory_total(&two) - base,
             own = m->device->b->free_bytes(m->device), left = own ? own : o->memory;
    if (left && !o->batch) {
        if (base > left) return too_much(job, 1, base, left, err);
        uint64_t fit = 1 + (left - base) / each;
        most = fit < most ? (uint32_t)fit : most;
    }
    if (left && o->batch && base + (most - 1) * each > left)
        return too_much(job, most, base + (most - 1) * each, left, err);
    if (!o->batch && !o->memory_is_asked) {
        uint64_t fit = BATCH_BYTES / one.questions;
        most = fit < 1 ? 1 : fit < most ? (uint32_t)fit : most;
    }
    bool whole = most == job->max_questions;
    job->max_questions = most;
    if (whole) add_contexts(job, m, o, left);
    return KVB_OK;
}
