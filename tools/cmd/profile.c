// kvbudget profile: calibration texts and a model in, a record out.
#include "profiler/profile.h"
#include "formats/need.h"
#include "formats/record.h"
#include "profiler/metric/learned.h"
#include "profiler/profile_losses.h"
#include "profiler/weights/weights.h"
#include "runtime/fail.h"
#include "study/record_metric.h"
#include "tools/cli.h"
#include "tools/device.h"
#include "tools/memory.h"
#include "tools/ranks.h"
#include "tools/report/words.h"
#include <inttypes.h>
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// The command line as given, and what is opened from it.
typedef struct profile_command {
    const cli_command *self;
    cli_list metric_names;
    const char *output, *backend_name, *compute, *bos, *pre, *shard, *memory, *oracle;
    uint64_t curve_queries, gain_rows, sink, window; // UINT64_MAX: the metrics' own
    bool curves, refit;
    uint64_t new_tokens, seed, max_tokens, max_questions, batch, threads, layers, held;
    double temperature;
    bool beyond_trained, chat, special;
    bool greedy, ignore_eos, ignore_answers, include_first, resume, force, add, plan, quiet;
    uint64_t memory_bytes;          // --memory: of the whole process; 0: not given
    uint64_t opened;                // memory of this program with the model opened and no weights loaded
    uint64_t writing;               // memory for the record's index while it is put together
    uint32_t shard_index, n_shards; // 0-based; n_shards 0: not a shard
    profile_options options;
    record *base; // --add: the finished record; else NULL
    const backend *device;
    metric *metrics;
    learned_list learned; // rankings that are among the metrics
    calib_file *files;
    size_t n_files;
    model *m;
    model_text text;
    profile_job job;
    ranks ranks;
    bool peer_failed; // another rank has failed, and says why itself
    progress bar;
} profile_command;

// ---- The command line ----

static bool is_listed(const profile_command *p, const char *spec)
{
    for (size_t i = 0; i < p->options.n_metrics; i++)
        if (strcmp(p->metrics[i].spec, spec) == 0) return true;
    return false;
}

static int read_metric(profile_command *p, const char *name)
{
    kvb_error err = {0};
    metric *m = &p->metrics[p->options.n_metrics];
    if (learned_parse(m, name, &p->learned, &err) != KVB_OK || metric_check_nested(m, &err) != KVB_OK)
        return cli_usage_error(p->self, "%s", err.message);
    bool held = p->base && record_context(p->base, 0) && record_has_metric(record_context(p->base, 0), m->spec);
    if (is_listed(p, m->spec) && !held) return cli_usage_error(p->self, "metric %s is asked for twice", m->spec);
    bool own = p->sink != UINT64_MAX || p->window != UINT64_MAX;
    if (own) {
        uint32_t sink = p->sink == UINT64_MAX ? metric_protect_sink(m) : (uint32_t)p->sink,
                 window = p->window == UINT64_MAX ? metric_protect_window(m) : (uint32_t)p->window;
        m->protects = true, m->sink = sink, m->window = window;
    }
    p->options.n_metrics += !is_listed(p, m->spec);
    return EXIT_DONE;
}

// Takes over a metric of the record, with the sinks and window that it has there.
static int take_held(profile_command *p, const char *name)
{
    kvb_error err = {0};
    record_metric about;
    metric *m = &p->metrics[p->options.n_metrics];
    if (metric_parse(m, name, NULL) != KVB_OK) return EXIT_DONE;
    if (record_metric_read(&about, p->base, name, &err) != KVB_OK) return cli_failed(p->self, &err);
    m->protects = about.sink != metric_protect_sink(m) || about.window != metric_protect_window(m);
    m->sink = about.sink, m->window = about.window;
    record_metric_free(&about);
    p->options.n_metrics++;
    return EXIT_DONE;
}

// With --add the record's metrics come first, except learned rankings, since the record has only their names.
static int read_metrics(profile_command *p)
{
    const record_context_info *held = p->base ? record_context(p->base, 0) : NULL;
    size_t n_held = held ? held->n_metrics : 0, n = p->metric_names.count;
    bool by_default = !n && !p->base;
    int code = EXIT_DONE;
    p->metrics = need(n_held + n + scorer_count, sizeof *p->metrics, "metrics");
    p->options.metrics = p->metrics;
    for (size_t i = 0; i < n_held && code == EXIT_DONE; i++) code = take_held(p, held->metrics[i]);
    for (size_t i = 0; i < n && code == EXIT_DONE; i++) code = read_metric(p, p->metric_names.items[i]);
    for (size_t i = 0; by_default && metric_usual(&p->metrics[i], i); i++) p->options.n_metrics++;
    return code;
}

static bool parse_shard(profile_command *p)
{
    char rest;
    if (sscanf(p->shard, "%7" SCNu32 "/%7" SCNu32 "%c", &p->shard_index, &p->n_shards, &rest) != 2) return false;
    return p->shard_index-- >= 1 && p->shard_index < p->n_shards && p->n_shards <= 1000000;
}

// Sets the number of threads. Ranks of one machine share its cores, unless the launcher gave each its own.
static int share_cores(const profile_command *p)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN) / p->ranks.local_size, mine = omp_get_num_procs();
    bool shares = !p->threads && p->ranks.local_size > 1 && !getenv("OMP_NUM_THREADS");
    int code = device_take_threads(p->self, shares ? (uint64_t)(cores < 1      ? 1
                                                                : cores < mine ? cores
                                                                               : mine)
                                                   : p->threads);
    bool all = ranks_agree(&p->ranks, code == EXIT_DONE ? KVB_OK : KVB_MEMORY, NULL) == KVB_OK;
    return code == EXIT_DONE && !all ? EXIT_FAILED : code;
}

static int check_profile_options(profile_command *p)
{
    profile_options *o = &p->options;
    if (!p->output && !p->plan) return cli_usage_error(p->self, "-o RUN.h5 is missing: where should the record go?");
    if (p->new_tokens + p->include_first < 2 || p->new_tokens > 1 << 20)
        return cli_usage_error(p->self,
                               "--new-tokens: expected 2 to 1048576 (the first token comes out of the prefill and is "
                               "no query), found %llu",
                               (unsigned long long)p->new_tokens);
    if (!p->greedy && !(p->temperature > 0))
        return cli_usage_error(p->self, "--temperature: expected a number above 0, or --greedy");
    if (p->batch > 65536) return cli_usage_error(p->self, "--batch: expected at most 65536");
    if (cli_check_protected(p->self, p->sink, p->window) != EXIT_DONE) return EXIT_USAGE;
    if (p->memory && !memory_parse(p->memory, &p->memory_bytes))
        return cli_usage_error(p->self, "--memory: expected a size such as 4GiB or 800MB, found '%s'", p->memory);
    p->device = device_find(p->self, p->backend_name, p->compute);
    if (!p->device) return EXIT_USAGE;
    if (strcmp(p->oracle, "output") == 0 && !p->device->sums_importance)
        return cli_usage_error(p->self, "--oracle output: the backend %s does not sum importance; use -b cpu",
                               p->backend_name);
    if (p->shard && !parse_shard(p))
        return cli_usage_error(p->self, "--shard: expected I/N, 1 <= I <= N <= 1000000, such as 3/8; found '%s'",
                               p->shard);
    o->draw = (sampler){p->greedy, p->temperature, p->seed};
    o->new_tokens = (uint32_t)p->new_tokens;
    o->ignore_eos = p->ignore_eos;
    o->ignore_answers = p->ignore_answers;
    o->include_first = p->include_first;
    o->oracle = strcmp(p->oracle, "output") == 0 ? ORACLE_OUTPUT : ORACLE_LUKV;
    o->bos = strcmp(p->bos, "yes") == 0 ? BOS_YES : strcmp(p->bos, "no") == 0 ? BOS_NO : BOS_AS_MODEL;
    o->max_tokens = (uint32_t)p->max_tokens;
    o->max_questions = (uint32_t)p->max_questions;
    o->batch = (uint32_t)p->batch;
    o->beyond_trained = p->beyond_trained;
    o->grows = p->base;
    o->loss_queries = p->curves ? (uint32_t)p->curve_queries : 0;
    o->gain_rows = (uint32_t)p->gain_rows;
    if (p->refit && !p->curves)
        return cli_usage_error(p->self, "--refit: curves are of refitted caches; give --curves, too");
    return read_metrics(p);
}

// ---- --add: what is added takes the settings of the finished record unless the command line says otherwise; another
// setting is then refused, when the record's attributes are compared ----

static void take_text(const char **out, const cJSON *attributes, const char *name)
{
    const cJSON *a = cJSON_GetObjectItemCaseSensitive(attributes, name);
    if (cJSON_IsString(a)) *out = a->valuestring;
}

static void take_count(uint64_t *out, const cJSON *attributes, const char *name)
{
    const cJSON *a = cJSON_GetObjectItemCaseSensitive(attributes, name);
    if (cJSON_IsNumber(a) && a->valuedouble >= 0 && a->valuedouble <= UINT32_MAX) *out = (uint64_t)a->valuedouble;
}

static void take_flag(bool *out, const cJSON *attributes, const char *name)
{
    *out = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(attributes, name));
}

static void take_settings(profile_command *p, const cJSON *from)
{
    const char *sampling = "", *seed = NULL, *oracle = "";
    const cJSON *temperature = cJSON_GetObjectItemCaseSensitive(from, "temperature");
    take_text(&p->backend_name, from, "backend");
    take_text(&p->compute, from, "compute");
    take_text(&p->bos, from, "bos");
    take_text(&sampling, from, "sampling");
    take_text(&seed, from, "seed");
    take_count(&p->new_tokens, from, "new_tokens");
    take_count(&p->max_tokens, from, "max_tokens");
    take_count(&p->max_questions, from, "max_questions");
    take_flag(&p->ignore_eos, from, "ignore_eos");
    take_flag(&p->ignore_answers, from, "ignore_answers");
    take_flag(&p->include_first, from, "include_first");
    take_text(&oracle, from, "oracle");
    p->greedy = strcmp(sampling, "greedy") == 0;
    p->oracle = strncmp(oracle, "mean", 4) == 0 ? "output" : "lukv";
    p->chat = cJSON_GetObjectItemCaseSensitive(from, "chat") != NULL;
    p->special = cJSON_GetObjectItemCaseSensitive(from, "special") != NULL;
    if (seed) p->seed = strtoull(seed, NULL, 10);
    if (cJSON_IsNumber(temperature) && !p->greedy) p->temperature = temperature->valuedouble;
}

static int open_base(profile_command *p)
{
    kvb_error err = {0};
    if (!p->output) return cli_usage_error(p->self, "--add: -o RUN.h5 is missing: which record should be added to?");
    if (p->shard)
        return cli_usage_error(p->self,
                               "--add and --shard exclude each other: profile what is new with --shard into another "
                               "record, then join both with `kvbudget merge`");
    if (record_open(&p->base, p->output, &err) != KVB_OK) return cli_failed(p->self, &err);
    const cJSON *a = record_attributes(p->base);
    if (record_shard(p->base)) {
        kvb_fail(&err, KVB_MISMATCH, "%s: is shard %s of a run; merge its shards first", p->output,
                 record_shard(p->base));
        return cli_failed(p->self, &err);
    }
    if (!cJSON_GetObjectItemCaseSensitive(a, "model_sha256") || !cJSON_GetObjectItemCaseSensitive(a, "seed")) {
        kvb_fail(&err, KVB_MISMATCH,
                 "%s: does not say which model made it with which options (it was not written by "
                 "`kvbudget profile`), so nothing can be added",
                 p->output);
        return cli_failed(p->self, &err);
    }
    take_settings(p, a);
    return EXIT_DONE;
}

static int check_base(const profile_command *p)
{
    if (!p->curves && !p->quiet && record_context(p->base, 0) && record_has_curves(p->base, 0, 0, NULL))
        fprintf(stderr,
                "warning: %s has curves, and what is added gets none: give --curves too, or solve --loss output will "
                "refuse its metrics (they get curves later only together with a new metric)\n",
                p->output);
    return EXIT_DONE;
}

// ---- Before the run: the texts, the model, and how memory is divided ----

static uint64_t questions_of(const profile_command *p, const calib_context *c)
{
    return p->max_questions && p->max_questions < c->n_questions ? p->max_questions : c->n_questions;
}

// Returns how many queries of each question curves are measured on by default: 4, and with more than 8 questions so few
// that a context has 32 in all. Time grows with queries, what they tell grows with texts and questions.
static uint32_t usual_curve_queries(const profile_command *p)
{
    uint64_t most = 8;
    for (size_t f = 0; f < p->n_files; f++)
        for (size_t i = 0; i < p->files[f].count; i++)
            if (questions_of(p, &p->files[f].contexts[i]) > most) most = questions_of(p, &p->files[f].contexts[i]);
    for (size_t i = 0; p->base && i < record_context_count(p->base); i++)
        if (record_context(p->base, i)->n_questions > most) most = record_context(p->base, i)->n_questions;
    return most < 32 ? 32 / (uint32_t)most : 1;
}

// Returns what HDF5 takes for its descriptions of groups and datasets: about 5 KiB each, in a cache that grows to
// 32 MiB, and 4 MiB more (measured with 10 to 1,000 contexts).
static uint64_t writing_memory(const profile_command *p)
{
    const uint64_t most = 36u << 20;
    uint64_t objects = 0;
    for (size_t f = 0; f < p->n_files; f++)
        for (size_t i = 0; i < p->files[f].count; i++)
            objects += 4 + p->options.n_metrics + 3 * questions_of(p, &p->files[f].contexts[i]);
    for (size_t i = 0; p->base && i < record_context_count(p->base); i++)
        objects += 4 + p->options.n_metrics + 3 * record_context(p->base, i)->n_questions;
    return objects < most / 5120 ? objects * 5120 : most;
}

static uint64_t expected_peak(const profile_command *p)
{
    profile_memory run = profile_memory_of(p->m, &p->job, &p->options, p->job.max_questions);
    return p->opened + model_weight_bytes(p->m, p->m->n_held) + p->writing + profile_memory_total(&run);
}

// Pages of this program and its libraries that are first touched when it computes: 2 to 3 MiB, as measured.
enum { TOUCHED_BYTES = 3 << 20 };

// Returns how many groups of weights to hold in memory: --held, or as many as fit into `left` bytes beside a batch. The
// batch gets at most a quarter of these bytes, but room for one question at least: each pass over weights in the file
// serves a whole batch. Sets m->n_held on the way, because the memory of a run depends on it.
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

// Decides how much memory weights and run may take: --memory, or else this process's part of what is free. Weights that
// are read in place do not count, since the system can take those pages back.
static kvb_status allot_memory(profile_command *p, kvb_error *err)
{
    const backend *b = p->m->device->b;
    p->opened = memory_resident() + TOUCHED_BYTES;
    p->writing = writing_memory(p);
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

// Hashing files larger than memory takes minutes, so it shows its progress.
static kvb_status identify_model(profile_command *p, kvb_error *err)
{
    progress_begin(&p->bar, "hash of the model", p->quiet || p->ranks.rank > 0);
    kvb_status status = model_identify(p->m, &(weights_watch){progress_hashed, &p->bar}, err);
    progress_clear(&p->bar);
    return status;
}

// Opens the model without its weights, and its tokenizer. Hashing takes long and a plan does without it: it comes last.
static kvb_status open_model(profile_command *p, const char *path, bool ids_alone, kvb_error *err)
{
    const model_options wishes = {.n_layers = (uint32_t)p->layers, .without_weights = true, .for_plan = p->plan};
    const model_text_options texts = {.without_tokenizer = ids_alone, .pre = p->pre, .for_plan = p->plan};
    kvb_status status = model_open(&p->m, path, p->device, &wishes, err);
    if (status == KVB_OK) status = model_text_open(&p->text, p->m->source, p->m->config.vocabulary, &texts, err);
    if (status == KVB_OK && p->chat && (p->text.tokens || !p->plan)) status = model_text_use_chat(&p->text, err);
    p->text.parse_special = p->special;
    if (status == KVB_OK && !p->plan) status = identify_model(p, err);
    return status;
}

// Makes the cheap checks first: the texts, the model's numbers, whether all of it fits. The weights come last.
static kvb_status open_inputs(profile_command *p, char **operands, size_t n, kvb_error *err)
{
    // Texts that are added as ids have the record's tokenizer, if it names one.
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
    if (p->curves && !p->curve_queries) p->options.loss_queries = usual_curve_queries(p);
    if (p->refit && status == KVB_OK)
        p->options.refit = REFERENCES_PER_HEAD * (p->m->config.n_heads / p->m->config.n_kv_heads);
    if (status == KVB_OK) status = profile_prepare(&p->job, p->m, &p->text, p->files, p->n_files, &p->options, err);
    if (status == KVB_OK) status = allot_memory(p, err);
    if (status == KVB_OK) status = profile_fit_batch(&p->job, p->m, &p->options, err);
    if (status == KVB_OK && !p->plan) status = model_load(p->m, p->m->n_held, err);
    // A device with memory of its own only knows what is left once the weights are loaded.
    if (status == KVB_OK && !p->plan) status = profile_fit_batch(&p->job, p->m, &p->options, err);
    return status;
}

// ---- --plan: what a run would take ----

static kvb_status print_time(const profile_command *p, double record_bytes, kvb_error *err)
{
    profile_times times;
    kvb_status status = profile_estimate_time(&times, p->m, &p->job, record_bytes, err);
    if (status != KVB_OK) return status;
    double seconds = times.prefill + times.decode + times.writing;
    printf(
        "time       about %.*f s on backend %s: prefill %.1f, decoding %.1f, writing %.1f, at the rate that a product "
        "of\n           this model's shape reaches now, besides reading the model's files; %.2f TFLOP in %s\n",
        seconds < 20 ? 1 : 0, seconds, p->device->name, times.prefill, times.decode, times.writing,
        profile_flops(p->m, &p->job) / 1e12, p->device->compute);
    return KVB_OK;
}

static void print_memory(const profile_command *p)
{
    profile_memory run = profile_memory_of(p->m, &p->job, &p->options, p->job.max_questions);
    uint32_t all = p->m->config.n_layers + 1, held = p->m->n_held;
    printf("memory     %.3f GiB at its peak: this program %.3f (measured), weights %.3f, keys and values %.3f, "
           "questions %.3f,\n           activations %.3f, scratch %.3f, scores and logits %.3f, the record's index "
           "%.3f\n",
           (double)expected_peak(p) / 0x1p30, (double)p->opened / 0x1p30,
           (double)model_weight_bytes(p->m, held) / 0x1p30, (double)run.cache / 0x1p30, (double)run.questions / 0x1p30,
           (double)run.activations / 0x1p30, (double)run.scratch / 0x1p30, (double)run.host / 0x1p30,
           (double)p->writing / 0x1p30);
    if (held < all)
        printf("weights    of %u of %u layers stay in the file, %.3f GiB, and are read there each time; all would take "
               "%.3f GiB of memory\n",
               p->m->config.n_layers - (held ? held - 1 : 0), p->m->config.n_layers,
               (double)model_mapped_bytes(p->m, held) / 0x1p30, (double)model_weight_bytes(p->m, all) / 0x1p30);
}

// Prints how evenly the work divides, and what is lost because several processes prefill the same context.
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

static kvb_status print_plan(const profile_command *p, kvb_error *err)
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

// ---- The run: one process, a shard of several runs, or one rank of several under mpirun ----
//
// Ranks share the folder of parts: every rank puts its contexts and questions there as files of their own, atomically,
// and rank 0 assembles them at the end. So nothing has to be sent, a dead rank loses what was in flight, and the next
// run may have any number of ranks. What is done is read by rank 0 alone and sent to the others, because a network file
// system may show each machine a different state, and all must plan from the same one.

// Waits until all ranks have ended a step. If one failed, all fail, and the others' `err` says which one it was.
static kvb_status agree(profile_command *p, kvb_status mine, kvb_error *err)
{
    int who;
    kvb_status status = ranks_agree(&p->ranks, mine, &who);
    if (mine != KVB_OK || status == KVB_OK) return mine;
    p->peer_failed = true;
    return kvb_fail(err, status,
                    "rank %d of %d %s; finished parts stay on disk, and --resume continues with any number of ranks",
                    who, p->ranks.size, status == KVB_INTERRUPTED ? "was stopped" : "failed (its message says why)");
}

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
    status = agree(p, status, err);
    if (status == KVB_OK && p->ranks.rank > 0)
        status = record_begin(writer, p->output, &shape, attributes, p->add ? RECORD_ADD_JOIN : RECORD_JOIN, err);
    cJSON_Delete(attributes);
    return agree(p, status, err);
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

// Takes the sums of the counts and the maxima of the times over the ranks.
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
    kvb_status status = agree(p, find_share(&share, p, writer, err), err);
    if (status == KVB_OK) status = profile_run_share(p->m, &p->job, &p->options, &share, writer, &watch, times, err);
    status = agree(p, status, err);
    if (status == KVB_OK) {
        join_times(&p->ranks, times);
        double start = seconds_now();
        if (p->ranks.rank == 0) status = profile_finish(&p->job, p->n_shards ? &share : NULL, writer, err);
        times->writing += seconds_now() - start;
        status = agree(p, status, err);
    }
    profile_share_free(&share);
    return status;
}

static void end_progress(profile_command *p, kvb_status status, const profile_times *times)
{
    const profile_job *job = &p->job;
    unsigned long long tokens = job->n_context_tokens, questions = job->n_pairs, queries = times->queries;
    const char *asked = plural(questions, "question", "questions");
    const char *stopped = p->add ? "stopped; the same command continues" : "stopped; --resume continues";
    if (status != KVB_OK) progress_end(&p->bar, "%s", status == KVB_INTERRUPTED ? stopped : "failed");
    else if (p->n_shards)
        progress_end(&p->bar, "%s: shard %u of %u, %llu recorded queries", p->output, p->shard_index + 1, p->n_shards,
                     queries);
    else if (p->add && !job->n_contexts) progress_end(&p->bar, "%s: already holds all of this", p->output);
    else if (p->add)
        progress_end(&p->bar, "%s: %zu %s now; prefilled %zu, %llu tokens; added %llu %s", p->output, job->growth.n_ids,
                     plural(job->growth.n_ids, "context", "contexts"), job->n_contexts, tokens, questions, asked);
    else
        progress_end(&p->bar, "%s: %zu %s, %llu tokens, %llu %s, %llu recorded %s", p->output, job->n_contexts,
                     plural(job->n_contexts, "context", "contexts"), tokens, questions, asked, queries,
                     plural(queries, "query", "queries"));
}

static kvb_status make_record(profile_command *p, profile_times *times, kvb_error *err)
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

static void warn_of_inputs(const profile_command *p)
{
    if (p->job.n_short && p->ranks.rank == 0)
        fprintf(stderr,
                "note: %llu of %llu given answers have fewer than two tokens with this model's tokenizer, too few to "
                "record a query; the model answers these questions itself\n",
                (unsigned long long)p->job.n_short, (unsigned long long)(p->job.n_given + p->job.n_short));
    if (p->job.n_beyond && p->ranks.rank == 0)
        fprintf(
            stderr,
            "warning: %u of %zu contexts reach beyond the %u positions that the model was trained for, with what is "
            "decoded after them; what is recorded there is not what the model can do\n",
            p->job.n_beyond, p->job.n_contexts, p->m->config.context_length);
    if (p->layers && p->ranks.rank == 0)
        fprintf(stderr, "warning: --layers %llu: what these layers record is good for measuring time and memory only\n",
                (unsigned long long)p->layers);
    if (p->m->n_held <= p->m->config.n_layers && p->ranks.rank == 0 && !p->plan)
        fprintf(stderr,
                "note: the weights of %u of %u layers are not held in memory: %.2f GiB are read from the file each "
                "time, which changes no number\n",
                p->m->config.n_layers - (p->m->n_held ? p->m->n_held - 1 : 0), p->m->config.n_layers,
                (double)model_mapped_bytes(p->m, p->m->n_held) / 0x1p30);
}

// A rank that failed says why. Of the others, only rank 0 reports that one has failed.
static int report_failure(const profile_command *p, const kvb_error *err)
{
    if (p->peer_failed && p->ranks.rank > 0) return EXIT_FAILED;
    if (p->ranks.size == 1 || p->peer_failed) return cli_failed(p->self, err);
    kvb_error named = {.status = err->status};
    snprintf(named.message, sizeof named.message, "rank %d: %.480s", p->ranks.rank, err->message);
    return cli_failed(p->self, &named);
}

static int run_command(profile_command *p, char **operands, size_t n)
{
    kvb_error err = {0};
    profile_times times = {0};
    kvb_status status = agree(p, open_inputs(p, operands, n, &err), &err);
    if (status == KVB_OK) warn_of_inputs(p);
    if (status == KVB_OK && p->plan) {
        if (p->ranks.rank == 0) status = print_plan(p, &err);
        return status == KVB_OK ? EXIT_DONE : report_failure(p, &err);
    }
    double start = seconds_now();
    if (status == KVB_OK) status = make_record(p, &times, &err);
    if (status != KVB_OK) return report_failure(p, &err);
    double peak = (double)memory_peak();
    ranks_largest(&p->ranks, &peak, 1);
    double wall = seconds_now() - start;
    if (!p->quiet && p->ranks.rank == 0) {
        fprintf(stderr,
                "%.2f s: prefill %.2f, scorers %.2f, decoding %.2f, curves %.2f, gains %.2f, writing %.2f; peak memory "
                "%.3f GiB (planned %.3f%s)\n",
                wall, times.prefill, times.scorers + times.extras, times.decode, times.curves, times.gains,
                times.writing, peak / 0x1p30, (double)expected_peak(p) / 0x1p30,
                p->m->device->b->own_memory ? " on host and device together" : "");
        for (size_t i = 0; i < p->options.n_metrics; i++)
            fprintf(stderr, "%s %s %.2f s", i ? "," : "scorers:", p->metrics[i].spec, times.each[i]);
        fprintf(stderr, ", shared %.2f s\n", times.extras); // for H2O and CriticalKV
    }
    return EXIT_DONE;
}

#define HELD_HELP                                                                                                     \
    "hold the weights of N layers in memory and read the others' from the file each time\n(default: as many as fit; " \
    "0: not even the embedding); changes no number"

// Lists the options that say what is recorded, and of which texts. Returns their number.
static size_t list_recording(profile_command *p, cli_option *out)
{
    const cli_option all[] = {
        {"output", 'o', CLI_WRITES(FILE_RECORD), &p->output, "FILE", "the record to write (.h5)"},
        {"metric", 'm', CLI_INPUTS, &p->metric_names, "M",
         "eviction metric to record, repeatable: `kvbudget help metrics` lists them;\ndefault snapkv:kvpress, keydiff "
         "and ea:kvpress"},
        {"new-tokens", 'n', CLI_COUNT, &p->new_tokens, "N",
         "tokens to generate per question (64); N - 1 queries are recorded"},
        {"temperature", 't', CLI_REAL, &p->temperature, "T", "temperature of the seeded sampling (0.7)"},
        {"seed", 's', CLI_SEED, &p->seed, "N", "seed of the sampling (1)"},
        {"greedy", 0, CLI_FLAG, &p->greedy, NULL, "take the likeliest token instead of sampling"},
        {"ignore-eos", 0, CLI_FLAG, &p->ignore_eos, NULL,
         "ignore end tokens, so that every question records N - 1 queries"},
        {"ignore-answers", 0, CLI_FLAG, &p->ignore_answers, NULL,
         "generate answers even where the calibration data has some"},
        {"include-first", 0, CLI_FLAG, &p->include_first, NULL,
         "also record the last prompt token's query, which emits the first token"},
        {"curves", 0, CLI_FLAG, &p->curves, NULL,
         "also record what evicting tokens does to the model's output, for solve --loss output"},
        {"curve-queries", 0, CLI_POSITIVE, &p->curve_queries, "N",
         "with --curves, queries of every question that this is measured on (4; with more than 8\nquestions, 32 a "
         "context)"},
        {"refit", 0, CLI_FLAG, &p->refit, NULL,
         "with --curves, refit what is kept first, for tables of caches that are refitted; a context\ntakes three "
         "times as long (docs/refit.md)"},
        {"gain-rows", 0, CLI_POSITIVE, &p->gain_rows, "N",
         "with --curves, tokens of each context's first question that the layers' gains are\nmeasured on (8)"},
        {"sink", 0, CLI_COUNT, &p->sink, "N", "first tokens that are always kept, for the metrics named here"},
        {"window", 0, CLI_COUNT, &p->window, "N",
         "last tokens that are always kept (default of both: each metric's own)"},
        {"oracle", 0, CLI_CHOICE, &p->oracle, "lukv|output",
         "what makes a token important: lukv (default), the most that any query takes from it,\nto solve tables from; "
         "output, how far outputs move without it, to fit rankings to\n(learn)"},
        {"chat", 0, CLI_FLAG, &p->chat, NULL,
         "wrap context and question in the model's own chat template (ChatML, Llama 3, Mistral,\nGemma, Phi, gpt-oss); "
         "an answer_prefix is added only where the line has one"},
        {"special", 0, CLI_FLAG, &p->special, NULL,
         "take \"<|im_start|>\" and the like in the texts as the tokens that they name"},
        {"bos", 0, CLI_CHOICE, &p->bos, "auto|yes|no", "begin contexts with BOS; auto: as the model file says"},
        {"pre", 0, CLI_TEXT, &p->pre, "NAME",
         "split words as this pre-tokenizer does instead of the file's: smollm, llama-bpe,\nqwen2, gpt-2 (as "
         "transformers reads SmolLM2's GGUF)"},
        {"max-tokens", 0, CLI_COUNT, &p->max_tokens, "N", "cut contexts to their first N tokens"},
        {"questions", 'q', CLI_COUNT, &p->max_questions, "N",
         "use only the first N questions of every context; 0: all"},
        {"beyond-trained", 0, CLI_FLAG, &p->beyond_trained, NULL,
         "allow contexts longer than the model was trained for"},
    };
    memcpy(out, all, sizeof all);
    return sizeof all / sizeof *all;
}

// Lists the options that say how it runs. Returns their number.
static size_t list_running(profile_command *p, cli_option *out)
{
    const cli_option all[] = {
        {"batch", 0, CLI_COUNT, &p->batch, "N", "decode N questions at a time (default: by memory); changes no number"},
        {"memory", 0, CLI_TEXT, &p->memory, "SIZE",
         "memory that this process may use, such as 4GiB (default: what is free); changes no\nnumber"},
        {"held", 0, CLI_COUNT, &p->held, "N", HELD_HELP},
        {"layers", 0, CLI_COUNT, &p->layers, "N", "run only the first N layers, to measure time and memory"},
        {"backend", 'b', CLI_TEXT, &p->backend_name, "NAME", "cpu (oneDNN), or ref (plain C, slow, the reference)"},
        {"compute", 0, CLI_TEXT, &p->compute, "KIND", DEVICE_COMPUTE_HELP},
        {"threads", 0, CLI_COUNT, &p->threads, "N", "OpenMP threads (default: all cores); changes no number"},
        {"shard", 0, CLI_TEXT, &p->shard, "I/N",
         "run only the I-th of N shares of the work, as one element of a job array; `kvbudget\nmerge` joins the "
         "shards"},
        {"resume", 0, CLI_FLAG, &p->resume, NULL,
         "continue a run that was stopped; the record has the same bytes as without the stop"},
        {"force", 0, CLI_FLAG, &p->force, NULL,
         "start again although the record exists; the old record stays until the new one is\ncomplete. With --add: "
         "discard what another addition left behind when it was stopped"},
        {"add", 0, CLI_FLAG, &p->add, NULL,
         "add metrics, texts or questions to the finished RUN.h5, with its settings"},
        {"plan", 0, CLI_FLAG, &p->plan, NULL, "print how much work, memory and time it would take, and stop"},
        {"quiet", 0, CLI_FLAG, &p->quiet, NULL, "no progress, no summary"},
    };
    memcpy(out, all, sizeof all);
    return sizeof all / sizeof *all;
}

// Returns an exit code, or -1 if the manual was printed.
static int parse_profile(profile_command *p, int argc, char **argv, int *first)
{
    cli_option options[64] = {{0}};
    list_running(p, options + list_recording(p, options));
    return cli_parse(p->self, options, argc, argv, first);
}

// Parses the command line, twice with --add: the second time, settings that were not given are the record's.
static int read_command_line(profile_command *p, int argc, char **argv, int *first)
{
    int code = parse_profile(p, argc, argv, first);
    if (code != EXIT_DONE || !p->add) return code;
    code = open_base(p);
    if (code != EXIT_DONE) return code;
    cli_list_free(&p->metric_names);
    p->metric_names = (cli_list){0};
    code = parse_profile(p, argc, argv, first);
    return code == EXIT_DONE ? check_base(p) : code;
}

static int run_profile(const cli_command *self, int argc, char **argv)
{
    profile_command p = {.self = self,
                         .backend_name = "cpu",
                         .compute = "f32",
                         .bos = "auto",
                         .oracle = "lukv",
                         .held = UINT64_MAX,
                         .new_tokens = 64,

                         .gain_rows = 8,
                         .sink = UINT64_MAX,
                         .window = UINT64_MAX,
                         .temperature = 0.7,
                         .seed = 1};
    int first, code = read_command_line(&p, argc, argv, &first);
    kvb_error err = {0};
    // A shard never joins other ranks, whatever started it: srun sets a launcher's variables for elements of a job
    // array too.
    p.ranks = (ranks){0, 1, 0, 1};
    if (code == EXIT_DONE) cli_catch_signals();
    if (code == EXIT_DONE && !p.shard && ranks_begin(&p.ranks, &err) != KVB_OK) code = cli_failed(self, &err);
    if (code == EXIT_DONE && argc - first < 2 - p.add)
        code =
            cli_usage_error(self, "a model and at least one calibration file are needed: kvbudget %s", self->synopsis);
    if (code == EXIT_DONE) code = check_profile_options(&p);
    if (code == EXIT_DONE && p.force && p.resume)
        code = cli_usage_error(self, "--force throws away what --resume would continue; give one of them");
    if (code == EXIT_DONE) code = share_cores(&p);
    if (code == EXIT_DONE) code = run_command(&p, argv + first, (size_t)(argc - first));
    profile_job_free(&p.job);
    model_text_close(&p.text);
    model_free(p.m);
    for (size_t i = 0; i < p.n_files; i++) calib_free(&p.files[i]);
    free_all(p.files, p.metrics);
    learned_list_close(&p.learned);
    cli_list_free(&p.metric_names);
    record_close(p.base);
    ranks_end();
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_profile = {
    "profile",
    "profile MODEL CALIB.jsonl... -o RUN.h5 [OPTION]...",
    "watch the model decode with its full cache; record what every head needed",
    "Prefills each context once and decodes all its questions over the shared keys and values. For every KV\n"
    "head it records each context token's oracle importance (how much any decoded query would lose without it)\n"
    "and each metric's score of it. `kvbudget solve` turns the record into tables.\n"
    "MODEL is a GGUF file or a Hugging Face folder; with --plan its config.json is enough.\n"
    "\n"
    "Calibration files have one JSON object per line:\n"
    "  {\"sample_id\": \"story\", \"context\": \"...\", \"questions\": [\"...\"], \"answers\": [\"...\"], "
    "\"answer_prefix\": \"\\nAnswer:\"}\n"
    "With answers, decoding follows them, all steps in one pass; without, the model's own are sampled.\n"
    "context_ids, question_ids and answer_ids give tokens instead of text.\n"
    "\n"
    "--add adds to a finished record. For a metric, contexts are prefilled again and nothing is decoded. For\n"
    "texts, and for further questions of a text, only these are run. The record then has the bytes of one\n"
    "profile over everything. Model and settings must be the record's, and scores that are computed again must\n"
    "be equal bit by bit. The old record stays until the new one is complete; repeat the command to continue an\n"
    "--add that was stopped.\n"
    "\n"
    "Results are in RUN.h5.parts/ until the end; --resume continues a run that was stopped. Under `mpirun -n N`\n"
    "the ranks divide contexts and questions among themselves and write to one RUN.h5.parts/ on a shared file\n"
    "system; the record has the same bytes as one process would write. Without MPI or a common file system,\n"
    "--shard I/N runs one share, and `kvbudget merge` joins them.\n"
    "\n"
    "Examples:\n"
    "  kvbudget profile model.gguf calib-data/narrative-en.jsonl -o run.h5\n"
    "  kvbudget profile model.gguf logs.jsonl -o run.h5 --metric snapkv:kvpress:window=32 --metric keydiff\n"
    "  kvbudget profile model.gguf long.jsonl -o run.h5 --plan\n"
    "  kvbudget profile model.gguf --add -o run.h5 --metric tova                # another metric\n"
    "  kvbudget profile model.gguf more.jsonl --add -o run.h5                   # more texts\n"
    "  mpirun -n 8 kvbudget profile model.gguf calib.jsonl -o run.h5\n",
    run_profile,
};
