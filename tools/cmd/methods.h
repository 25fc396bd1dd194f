// What `eval` and `task` share of a command line: metrics, policies, allocators, tables and ratios, and which of them
// go together.
#pragma once
#include "evaluator/method.h"
#include "profiler/metric/learned.h"
#include "profiler/text/model_text.h"
#include "tools/cli.h"
#include "tools/report/compare_report.h"

typedef struct methods {
    const cli_command *self;
    // As the options say:
    cli_list metric_names, policy_names, allocator_names, ratio_names;
    uint64_t sink, window; // UINT64_MAX: as the table or the metric says
    bool refit;
    // Opened:
    const model *m;
    allocator *allocators;
    size_t n_allocators;
    learned_list learned; // rankings that metrics are, of files and of tables
    method *items;        // metrics before policies
    size_t n_items;
    method_column *columns;
    size_t n_columns;
    double *ratios; // ascending
    size_t n_ratios;
} methods;

// Their options, for a command's list.
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
     "ada-global, lava, cake, headkv=FILE, duo=FILE, and in eval oracle; parameters\nfollow as :name=value; " \
     "none: only the tables"}, \
    {"sink", 0, CLI_COUNT, &(e).sink, "N", \
     "first tokens that are always kept (default: as the table or the metric says)"}, \
    {"window", 0, CLI_COUNT, &(e).window, "N", \
     "last tokens that are always kept (default: as the table or the metric says)"}

#define REFIT_OPTION(e) \
    {"refit", 0, CLI_FLAG, &(e).refit, NULL, \
     "after each cut, change keys and values of what is kept so that outputs come near the\nfull " \
     "cache's; not with policies (docs/refit.md)"}
// clang-format on

bool methods_is_table(const char *operand); // by its name

// Reads the ratios, and refuses to refit under policies. What is wrong with the command line is printed, and EXIT_USAGE
// returned.
int methods_read_ratios(methods *e);
// Opens everything for a model; tables are those of the n operands that are called so. Without tables, --metric and
// --policy there are the three metrics that `profile` records, or none at all when `bare`.
kvb_status methods_open(methods *e, const model *m, char **operands, size_t n, bool bare, kvb_error *err);
// How texts are to become ids, chat template and control tokens: as the tables were calibrated (metadata chat,
// special), or as options say that are true already. KVB_MISMATCH where tables differ and no option decides. Sets t
// accordingly.
kvb_status methods_set_texts(const methods *e, model_text *t, bool chat, bool special, kvb_error *err);
method_list methods_list(const methods *e);
uint32_t methods_refit(const methods *e); // reference queries a KV head; 0: caches stay as they are cut
compared methods_compared(const methods *e);
void methods_free(methods *e);
