// What the parts of `kvbudget profile` share: the command line, the job, and the processes that run it.
#pragma once
#include "profiler/metric/learned.h"
#include "profiler/metric/query_statistics.h"
#include "profiler/profile.h"
#include "tools/cli.h"
#include "tools/ranks.h"

// The command line as given, and what is opened from it.
typedef struct profile_command {
    const cli_command *self;
    cli_list metric_names;
    const char *output, *backend_name, *compute, *bos, *pre, *shard, *memory, *statistics, *weights, *oracle;
    uint64_t curve_queries, gain_rows, sink, window; // UINT64_MAX: the metrics' own
    bool curves;
    uint64_t new_tokens, seed, max_tokens, max_questions, batch, threads, layers, held;
    double temperature, keep_after;
    bool beyond_trained, chat, special;
    bool greedy, ignore_eos, ignore_answers, include_first, resume, force, add, plan, quiet, roofline;
    weight_form form;               // --weights
    uint64_t memory_bytes;          // --memory: of the whole process; 0: not given
    uint64_t opened;                // memory of this program with the model opened and no weights loaded
    uint64_t writing;               // memory for the record's index while it is put together
    uint32_t shard_index, n_shards; // 0-based; n_shards 0: not a shard
    profile_options options;
    record *base; // --add: the finished record; else NULL
    const backend *device;
    metric *metrics;
    learned_list learned; // rankings that metrics are
    calib_file *files;
    size_t n_files;
    model *m;
    model_text text;
    query_statistics *stored;
    profile_job job;
    ranks ranks;
    bool peer_failed; // another rank has failed, and says why itself
    progress bar;
} profile_command;

// --add (profile_add.c): opens the record p->output and takes its settings for those of the command line, which is then
// read again. Returns an exit code, after a message when it is not EXIT_DONE.
int profile_add_open(profile_command *p);
// What the record needs of a command line that was read.
int profile_add_check(const profile_command *p);

// Prints work, memory, time and, for a shard, how well the work divides (profile_plan.c). KVB_MEMORY.
kvb_status profile_print_plan(const profile_command *p, kvb_error *err);

// Opens texts and model, shares memory out between weights and run, and, unless this is a plan, loads the weights
// (profile_open.c).
kvb_status profile_open_inputs(profile_command *p, char **operands, size_t n, kvb_error *err);

// A step that all ranks have ended: where one failed, all fail, and the others' `err` says which one it was.
kvb_status profile_agree(profile_command *p, kvb_status mine, kvb_error *err);

// Bytes that HDF5 takes for the index of the record of p->files.
uint64_t profile_writing_memory(const profile_command *p);

// Bytes that the process is expected to have at its peak.
uint64_t profile_expected_peak(const profile_command *p);

// Runs the job, alone, as a shard, or as one of several ranks, and finishes the record (profile_record.c). *times are
// those of the slowest rank, its counts those of all. Every rank returns; all fail when one fails.
kvb_status profile_make_record(profile_command *p, profile_times *times, kvb_error *err);
