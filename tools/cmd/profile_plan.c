// kvbudget profile --plan: what a run would take.
#include "profiler/backend/peaks.h"
#include "profiler/profile_losses.h"
#include "runtime/fail.h"
#include "tools/cmd/profile_command.h"
#include "tools/report/words.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

// What the machine makes of the model's own shapes now, beside what one large product reaches.
static kvb_status print_time(const profile_command *p, double record_bytes, kvb_error *err)
{
    profile_times times;
    double start = seconds_now();
    kvb_status status = profile_estimate_time(&times, p->m, &p->job, &p->options, record_bytes, err);
    if (status != KVB_OK) return status;
    double measured = seconds_now() - start, flops = profile_flops(p->m, &p->job),
           seconds = times.prefill + times.decode + times.writing;
    printf(
        "time       about %.*f s on backend %s: prefill %.1f, decoding %.1f, writing %.1f, as some layers with made-up "
        "weights took now\n           (measured in %.1f s), beside reading the model's files; %.2f TFLOP in %s, "
        "%.0f GFLOP/s",
        seconds < 20 ? 1 : 0, seconds, p->device->name, times.prefill, times.decode, times.writing, measured,
        flops / 1e12, p->device->compute, flops / seconds / 1e9);
    bool cpu = strcmp(p->device->name, "cpu") == 0;
    if (cpu) printf("; a large product: %.0f GFLOP/s", peak_products(precision_named(p->device->compute)) / 1e9);
    printf("\n");
    return KVB_OK;
}

// HDF5 keeps what describes a group or a dataset, about 5 KiB, in a cache that grows to 32 MiB, and 4 more (measured
// with 10 to 1,000 contexts).
uint64_t profile_writing_memory(const profile_command *p)
{
    const uint64_t most = 36u << 20;
    uint64_t objects = 0;
    for (size_t f = 0; f < p->n_files; f++) {
        for (size_t i = 0; i < p->files[f].count; i++) {
            uint64_t questions = p->files[f].contexts[i].n_questions;
            if (p->max_questions && p->max_questions < questions) questions = p->max_questions;
            objects += 4 + p->options.n_metrics + 3 * questions;
        }
    }
    for (size_t i = 0; p->base && i < record_context_count(p->base); i++)
        objects += 4 + p->options.n_metrics + 3 * record_context(p->base, i)->n_questions;
    return objects < most / 5120 ? objects * 5120 : most;
}

uint64_t profile_expected_peak(const profile_command *p)
{
    profile_memory run = profile_memory_of(p->m, &p->job, &p->options, p->job.max_questions);
    return p->opened + model_weight_bytes(p->m, p->m->n_held) + p->writing + profile_memory_total(&run);
}

static void print_memory(const profile_command *p)
{
    profile_memory run = profile_memory_of(p->m, &p->job, &p->options, p->job.max_questions);
    uint32_t all = p->m->config.n_layers + 1, held = p->m->n_held;
    printf("memory     %.3f GiB at its peak: this program %.3f (measured), weights %.3f, keys and values %.3f, "
           "questions %.3f,\n           activations %.3f, scratch %.3f, scores and logits %.3f, the record's index "
           "%.3f\n",
           (double)profile_expected_peak(p) / 0x1p30, (double)p->opened / 0x1p30,
           (double)model_weight_bytes(p->m, held) / 0x1p30, (double)run.cache / 0x1p30, (double)run.questions / 0x1p30,
           (double)run.activations / 0x1p30, (double)run.scratch / 0x1p30, (double)run.host / 0x1p30,
           (double)p->writing / 0x1p30);
    if (held < all)
        printf("weights    of %u of %u layers stay in the file, %.3f GiB, and are read there each time; all would take "
               "%.3f GiB of memory\n",
               p->m->config.n_layers - (held ? held - 1 : 0), p->m->config.n_layers,
               (double)model_mapped_bytes(p->m, held) / 0x1p30, (double)model_weight_bytes(p->m, all) / 0x1p30);
}

// How evenly the work divides, and what the prefills cost that several processes make of one context.
static kvb_status print_shares(const profile_command *p, kvb_error *err)
{
    uint32_t n = p->n_shards ? p->n_shards : (uint32_t)p->ranks.size;
    profile_share share;
    kvb_status status = profile_share_out(&share, p->m, &p->job, NULL, n, p->n_shards ? p->shard_index : 0, err);
    if (status != KVB_OK) return status;
    double whole = profile_flops(p->m, &p->job);
    printf("shards     %u: this one %.2f TFLOP in %zu pieces, the largest %.2f, all %.2f (repeated prefills %.1f %%); "
           "speed-up %.1f at most\n",
           n, share.cost / 1e12, share.n, share.heaviest / 1e12, share.total / 1e12,
           100 * (share.total - whole) / whole, share.heaviest > 0 ? whole / share.heaviest : 1);
    profile_share_free(&share);
    return KVB_OK;
}

kvb_status profile_print_plan(const profile_command *p, kvb_error *err)
{
    const model_config *c = &p->m->config;
    const profile_job *job = &p->job;
    double heads = (double)model_budgeted(c, c->n_layers) * c->n_kv_heads; // of the record
    double record_bytes = 0;
    for (size_t i = 0; i < job->n_contexts; i++) {
        const profile_context *one = &job->contexts[i];
        size_t arrays = one->n_questions - one->n_recorded;
        for (size_t k = 0; k < p->options.n_metrics; k++) arrays += !(one->recorded && job->growth.recorded >> k & 1);
        record_bytes += heads * one->n_tokens * arrays * sizeof(float);
    }
    printf("model      %s: %u layers, %u query heads, %u KV heads, head size %u\n", c->name, c->n_layers, c->n_heads,
           c->n_kv_heads, c->head_dim);
    printf("work       %zu %s, %llu tokens (longest %u), %llu %s, at most %llu decoded rows\n", job->n_contexts,
           plural(job->n_contexts, "context", "contexts"), (unsigned long long)job->n_context_tokens, job->max_tokens,
           (unsigned long long)job->n_pairs, plural(job->n_pairs, "question", "questions"),
           (unsigned long long)job->n_rows);
    kvb_status status = p->n_shards || p->ranks.size > 1 ? print_shares(p, err) : KVB_OK;
    if (status != KVB_OK) return status;
    printf("batch      %u %s at a time\n", job->max_questions, plural(job->max_questions, "question", "questions"));
    print_memory(p);
    double curves = profile_losses_bytes(p->m, job, &p->options), more = profile_losses_flops(p->m, job, &p->options);
    record_bytes += curves;
    printf("record     %.1f MB%s\n", record_bytes / 1e6, p->add ? " more" : "");
    if (curves > 0)
        printf(
            "losses     curves and gains: %.2f MB of these, %.2f TFLOP, %.0f %% of the other work, which is not in the "
            "time below\n",
            curves / 1e6, more / 1e12, 100 * more / fmax(profile_flops(p->m, job), 1));
    return print_time(p, record_bytes, err);
}
