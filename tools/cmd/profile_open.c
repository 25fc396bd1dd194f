// kvbudget profile, before it runs: the texts, the model, and who gets which memory.
#include "formats/need.h"
#include "profiler/weights/weights.h"
#include "runtime/fail.h"
#include "tools/cmd/profile_command.h"
#include "tools/memory.h"
#include <stdlib.h>

// Pages of this program and its libraries that are touched first when it computes: measured, 2 to 3 MiB.
enum { TOUCHED_BYTES = 3 << 20 };

// How many groups of weights are held in memory. They get what `left` bytes leave beside a batch, which may have a
// quarter of it where that is more than one question takes: each pass over weights in the file is for a whole batch.
// Sets m->n_held on the way, since what a run takes depends on it.
static uint32_t groups_held(const profile_command *p, uint64_t left)
{
    model *m = p->m;
    uint32_t all = m->config.n_layers + 1;
    if (p->held < all) return p->held ? (uint32_t)p->held + 1 : 0;
    m->n_held = all;
    profile_memory one = profile_memory_of(m, &p->job, &p->options, 1);
    if (model_weight_bytes(m, all) + profile_memory_total(&one) <= left) return all;
    m->n_held = 0;
    one = profile_memory_of(m, &p->job, &p->options, 1);
    profile_memory batch = profile_memory_of(m, &p->job, &p->options, p->job.max_questions);
    uint64_t least = profile_memory_total(&one), most = profile_memory_total(&batch);
    if (!p->options.batch && most > left / 4) most = left / 4;
    if (most < least) most = least;
    return model_fit_weights(m, left > most ? left - most : 0);
}

// What the weights may take, and what the run beside them: of what was asked for, or of what is free, this process's
// part. What is read from the file takes no memory that the system could not take back.
static kvb_status allot_memory(profile_command *p, kvb_error *err)
{
    const backend *b = p->m->device->b;
    p->opened = memory_resident() + TOUCHED_BYTES;
    p->writing = profile_writing_memory(p);
    p->options.memory_is_asked = p->memory_bytes != 0;
    uint64_t own = p->opened + p->writing, all = memory_free() / (uint64_t)p->ranks.local_size + own;
    if (p->memory_bytes) all = p->memory_bytes;
    p->m->n_held = p->m->config.n_layers + 1;
    if (b->free_bytes(p->m->device)) return KVB_OK;
    if (!p->memory && all == own)
        return kvb_fail(err, KVB_MEMORY,
                        "no memory is free, or how much is cannot be read (/proc/meminfo; how many files may be open, "
                        "ulimit -n?); say with --memory SIZE how much this run may take");
    if (all <= own)
        return kvb_fail(err, KVB_MEMORY, "--memory %s: this program alone takes %.2f GiB, the record's index %.3f",
                        p->memory, (double)p->opened / 0x1p30, (double)p->writing / 0x1p30);
    p->m->n_held = groups_held(p, all - own);
    uint64_t held = model_weight_bytes(p->m, p->m->n_held);
    if (all - own <= held)
        return kvb_fail(err, KVB_MEMORY, "%.2f GiB of memory: the model alone takes %.2f GiB", (double)all / 0x1p30,
                        (double)(own + held) / 0x1p30);
    p->options.memory = all - own - held;
    return KVB_OK;
}

static kvb_status open_texts(profile_command *p, char **paths, size_t n, kvb_error *err)
{
    p->files = need(n, sizeof *p->files, "calibration files");
    for (; p->n_files < n; p->n_files++) {
        kvb_status status = calib_load(&p->files[p->n_files], paths[p->n_files], err);
        if (status != KVB_OK) return status;
    }
    return KVB_OK;
}

// Hashing files larger than memory takes minutes, in which it should be seen to work.
static kvb_status identify_model(profile_command *p, kvb_error *err)
{
    progress_begin(&p->bar, "hash of the model", p->quiet || p->ranks.rank > 0);
    kvb_status status = model_identify(p->m, &(weights_watch){progress_hashed, &p->bar}, err);
    progress_clear(&p->bar);
    return status;
}

// The model's numbers and its text side; what takes long, or a plan does without, comes last.
static kvb_status open_model(profile_command *p, const char *path, bool ids_alone, kvb_error *err)
{
    const model_options wishes = {
        .n_layers = (uint32_t)p->layers, .form = p->form, .without_weights = true, .for_plan = p->plan};
    const model_text_options texts = {.without_tokenizer = ids_alone, .pre = p->pre, .for_plan = p->plan};
    kvb_status status = model_open(&p->m, path, p->device, &wishes, err);
    if (status == KVB_OK) status = model_text_open(&p->text, p->m->source, p->m->config.vocabulary, &texts, err);
    if (status == KVB_OK && p->chat && (p->text.tokens || !p->plan)) status = model_text_use_chat(&p->text, err);
    p->text.parse_special = p->special;
    if (status == KVB_OK && !p->plan) status = identify_model(p, err);
    if (status == KVB_OK) status = query_statistics_open(&p->stored, p->statistics, p->m, err);
    p->options.statistics = p->stored;
    return status;
}

// The cheap checks first: the texts, then the model's numbers, then whether all of it fits, and its weights last.
kvb_status profile_open_inputs(profile_command *p, char **operands, size_t n, kvb_error *err)
{
    // What is added by ids alone has the record's tokenizer, if that has one.
    const cJSON *hash =
        p->base ? cJSON_GetObjectItemCaseSensitive(record_attributes(p->base), "tokenizer_sha256") : NULL;
    bool ids_alone = !cJSON_IsString(hash) || !*hash->valuestring;
    kvb_status status = open_texts(p, operands + 1, n - 1, err);
    for (size_t i = 0; i < p->n_files && status == KVB_OK; i++) ids_alone &= !calib_has_text(&p->files[i]);
    if (status == KVB_OK) status = open_model(p, operands[0], ids_alone, err);
    for (size_t i = 0; i < p->options.n_metrics && status == KVB_OK; i++) {
        const model_config *c = &p->m->config;
        status = learned_check_model(&p->metrics[i], c->n_layers, c->n_kv_heads, p->m->sha256, err);
    }
    if (status == KVB_OK) status = profile_prepare(&p->job, p->m, &p->text, p->files, p->n_files, &p->options, err);
    if (status == KVB_OK) status = allot_memory(p, err);
    if (status == KVB_OK) status = profile_fit_batch(&p->job, p->m, &p->options, err);
    if (status == KVB_OK && !p->plan) status = model_load(p->m, p->m->n_held, err);
    // A device with memory of its own knows what is left of it once the weights are there.
    if (status == KVB_OK && !p->plan) status = profile_fit_batch(&p->job, p->m, &p->options, err);
    return status;
}
