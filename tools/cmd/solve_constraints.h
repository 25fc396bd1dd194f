// What solve's options demand of budgets beyond their sum, and the ratios that it solves for: solve_constraints.c.
#pragma once
#include "formats/record.h"
#include "study/layer_map.h"
#include "study/options.h"
#include "tools/cli.h"

// As given on the command line; counts are 0 and texts NULL when not given.
typedef struct constraint_wishes {
    uint64_t block, levels, ranks, tokens, keep_tokens;
    cli_list caps, floors, ceilings, pins;
    const char *ratios, *bytes, *dtype;
} constraint_wishes;

// Entries of a table of options. Help texts of one line each; details are in `kvbudget help solve`.
#define CONSTRAINT_OPTIONS(w)                                                                                          \
    {"ratios",    0,      CLI_TEXT,                                                                                    \
     &(w).ratios, "LIST", "solve for these prune ratios only: 0.3,0.5,0.8, or FIRST:LAST:STEP such as\n0.5:0.9:0.05"}, \
        {"bytes",    0,      CLI_TEXT,                                                                                 \
         &(w).bytes, "SIZE", "solve for a cache of at most SIZE, e.g. 2GiB or 900MB, with --dtype and --tokens"},      \
        {"dtype",    0,      CLI_TEXT,                                                                                 \
         &(w).dtype, "TYPE", "with --bytes: what the cache holds: f32, f16, bf16, fp8, q8_0, q4_0 (f16)"},             \
        {"keep-tokens",    0,   CLI_POSITIVE,                                                                          \
         &(w).keep_tokens, "N", "solve for a cache of at most N tokens, summed over all KV heads, with --tokens"},     \
        {"tokens", 0, CLI_POSITIVE, &(w).tokens, "T", "with --bytes or --keep-tokens: length of the context"},         \
        {"block", 0, CLI_COUNT, &(w).block, "N", "make budgets whole pages of N tokens"},                              \
        {"levels", 0, CLI_COUNT, &(w).levels, "K", "at most K different budgets within a layer"},                      \
        {"ranks",    0,   CLI_COUNT,                                                                                   \
         &(w).ranks, "P", "equal totals for P tensor-parallel ranks, which divide every layer's heads"},               \
        {"layer-cap",     0,                                                                                           \
         CLI_LIST,        &(w).caps,                                                                                   \
         "SHARE[@LAYER]", "a layer keeps at most this share of its tokens; repeatable"},                               \
        {"floor",                                                                                                      \
         0,                                                                                                            \
         CLI_LIST,                                                                                                     \
         &(w).floors,                                                                                                  \
         "SHARE[@LAYER[.HEAD]]",                                                                                       \
         "heads keep at least this share of their tokens; repeatable"},                                                \
        {"ceiling", 0, CLI_LIST, &(w).ceilings, "SHARE[@LAYER[.HEAD]]", "heads keep at most this share; repeatable"},  \
    {                                                                                                                  \
        "pin", 0, CLI_LIST, &(w).pins, "LAYER[.HEAD]", "these heads keep everything; repeatable"                       \
    }

// Whether anything but ratios was given.
bool wishes_limit(const constraint_wishes *w);
// Whether ratios were chosen, in whichever way: the table then need not have a row for every per cent.
bool wishes_ratios(const constraint_wishes *w);
void wishes_free(constraint_wishes *w);

// What the wishes mean for a record and the layers that it has of its model: fills ratios, n_rows, own_ratios and,
// where anything but ratios is wished for, limits of the options, which then point to *limits (to be freed by the
// caller, also after a failure). o->scope is set. Errors: KVB_ARGUMENT, naming the option.
kvb_status wishes_apply(const constraint_wishes *w, const record_shape *shape, const layer_map *layers,
                        study_options *o, kvb_limits *limits, kvb_error *err);
// Tells where a table for every per cent ends before 99 %.
void warn_of_rows(const study_options *o);
