// kvbudget profile --plan: what a run would take.
#include "profiler/linalg.h"
#include "tools/profile_command.h"
#include <stdio.h>
#include <stdlib.h>

// GFLOP/s of a product that is large enough for full speed and small enough to take a moment.
static double measured_speed(void)
{
    enum { N = 768 };
    float *a = calloc(3 * N * N, sizeof *a);
    if (!a) return 1;
    double best = 1e9;
    for (int i = 0; i < 4; i++) { // the first one prepares the kernel
        double start = seconds_now();
        gemm(false, false, N, N, N, 1, a, N, a + N * N, N, 0, a + 2 * N * N, N);
        double took = seconds_now() - start;
        best = took < best ? took : best;
    }
    free(a);
    return 2.0 * N * N * N / best;
}

uint64_t profile_expected_peak(const profile_command *p)
{
    profile_memory run = profile_memory_of(p->m, &p->job, &p->options, p->job.max_questions);
    uint64_t peak = p->loaded + profile_memory_total(&run);
    return peak > p->load_peak ? peak : p->load_peak;
}

static void print_memory(const profile_command *p)
{
    profile_memory run = profile_memory_of(p->m, &p->job, &p->options, p->job.max_questions);
    printf(
        "memory     %.3f GiB at its peak: the model and this program %.3f (measured), keys and values %.3f, questions "
        "%.3f,\n           activations %.3f, scratch %.3f, scores and logits %.3f\n",
        (double)profile_expected_peak(p) / 0x1p30, (double)p->loaded / 0x1p30, (double)run.cache / 0x1p30,
        (double)run.questions / 0x1p30, (double)run.activations / 0x1p30, (double)run.scratch / 0x1p30,
        (double)run.host / 0x1p30);
}

// How evenly the work divides, and what the prefills cost that several processes make of one context.
static void print_shares(const profile_command *p)
{
    uint32_t n = p->n_shards ? p->n_shards : (uint32_t)p->ranks.size;
    profile_share share;
    kvb_error err = {0};
    if (profile_share_out(&share, p->m, &p->job, NULL, n, p->n_shards ? p->shard_index : 0, &err) != KVB_OK) return;
    double whole = profile_flops(p->m, &p->job);
    printf("shards     %u: this one %.2f TFLOP in %zu pieces, the largest %.2f, all %.2f (repeated prefills %.1f %%); "
           "speed-up %.1f at most\n",
           n, share.cost / 1e12, share.n, share.heaviest / 1e12, share.total / 1e12,
           100 * (share.total - whole) / whole, share.heaviest > 0 ? whole / share.heaviest : 1);
    profile_share_free(&share);
}

void profile_print_plan(const profile_command *p)
{
    const model_config *c = &p->m->config;
    const profile_job *job = &p->job;
    double flops = profile_flops(p->m, job);
    double heads = (double)c->n_layers * c->n_kv_heads;
    double record_bytes = 0;
    for (size_t i = 0; i < job->n_contexts; i++)
        record_bytes +=
            heads * job->contexts[i].n_tokens * (p->options.n_metrics + job->contexts[i].n_questions) * sizeof(float);
    printf("model      %s: %u layers, %u query heads, %u KV heads, head size %u\n", c->name, c->n_layers, c->n_heads,
           c->n_kv_heads, c->head_dim);
    printf("work       %zu contexts, %llu tokens (longest %u), %llu questions, at most %llu decoded rows\n",
           job->n_contexts, (unsigned long long)job->n_context_tokens, job->max_tokens,
           (unsigned long long)job->n_pairs, (unsigned long long)job->n_rows);
    if (p->n_shards || p->ranks.size > 1) print_shares(p);
    printf("batch      %u questions at a time\n", job->max_questions);
    print_memory(p);
    printf("record     %.1f MB\n", record_bytes / 1e6);
    double speed = measured_speed();
    printf(
        "time       about %.0f s on backend cpu: %.2f TFLOP at a measured %.0f GFLOP/s, a third added for all else\n",
        flops / speed * 4 / 3, flops / 1e12, speed / 1e9);
}
