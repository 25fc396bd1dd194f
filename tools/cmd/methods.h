// The part of a command line that `eval` and `task` share: metrics, policies, allocators, tables and ratios, and which
// of them are combined.
#pragma once
#include "evaluator/method.h"
#include "profiler/metric/learned.h"
#include "profiler/text/model_text.h"
#include "tools/cli.h"
#include "tools/report/compare_report.h"

typedef struct methods {
    const cli_command *self;
    // What the options gave; zero before they are parsed:
    cli_list metric_names, policy_names, allocator_names, ratio_names;
    uint64_t sink, window; // UINT64_MAX: as the table or the metric says
    bool refit;
    // Filled by methods_read_ratios() and methods_open():
    const model *m; // borrowed
    allocator *allocators;
    size_t n_allocators;
    learned_list learned; // the rankings of learned metrics, from files and from tables
    method *items;        // metrics before policies
    size_t n_items;
    method_column *columns;
    size_t n_columns;
    double *ratios; // ascending
    size_t n_ratios;
} methods;

// Entries for a command's list of options.
// clang-format off
#define METHODS_OPTIONS(e) \
    {"ratio", 'r', CLI_LIST, &(e).ratio_names, "R,...", \
     "pruned shares of the cache, such as 0.8 or 80% (0.5,0.8,0.9,0.95)"}, \
    {"metric", 'm', CLI_INPUTS, &(e).metric_names, "M", \
     "eviction metric, repeatable; default: those of the tables, else snapkv:kvpress,\nkeydiff and ea:kvpress; " \
     "none: policies alone"}, \
    {"policy", 'p', CLI_LIST, &(e).policy_names, "P", \
     "policy that acts at every step, repeatable; its capacities per head come from every\nallocator that needs " \
     "no scores and from every table (task --list shows all policies)"}, \
    {"allocator", 'a', CLI_INPUTS, &(e).allocator_names, "A", \
     "allocator to compare with, repeatable: uniform, pyramid, ada (the default three),\nada-original, " \
     "ada-global, lava, cake, and in eval oracle; parameters follow as :name=value; none:\nonly the tables"}, \
    {"sink", 0, CLI_COUNT, &(e).sink, "N", \
     "first tokens that are always kept (default: as the table or the metric says)"}, \
    {"window", 0, CLI_COUNT, &(e).window, "N", \
     "last tokens that are always kept (default: as the table or the metric says)"}

#define REFIT_OPTION(e) \
    {"refit", 0, CLI_FLAG, &(e).refit, NULL, \
     "after each cut, change keys and values of what is kept so that outputs come near the\nfull " \
     "cache's; not with policies (docs/refit.md)"}
// clang-format on

// Tells whether an operand names a table, by its ending .safetensors, with or without `:strict`.
bool methods_is_table(const char *operand);

// Parses the ratios, and checks that --refit is not combined with policies. Returns EXIT_DONE, or EXIT_USAGE after a
// message.
int methods_read_ratios(methods *e);
// Opens metrics, policies, allocators and those of the n operands that are tables, for a model, which must outlive *e.
// Without any table, --metric or --policy, the three metrics that `profile` records are used, or none if `bare`. The
// caller frees with methods_free(), also after a failure.
kvb_status methods_open(methods *e, const model *m, char **operands, size_t n, bool bare, kvb_error *err);
// Sets how *t turns texts into ids (chat template, control tokens): as the tables were calibrated (metadata chat and
// special), unless the option `chat` or `special` is set. Fails with KVB_MISMATCH if the tables differ and no option
// decides.
kvb_status methods_set_texts(const methods *e, model_text *t, bool chat, bool special, kvb_error *err);
// Return what runs and reports need; valid until methods_free().
method_list methods_list(const methods *e);
compared methods_compared(const methods *e);
// Returns the number of reference queries per KV head for refitting; 0 without --refit.
uint32_t methods_refit(const methods *e);
void methods_free(methods *e);
