// kvbudget budgets: what an engine would get from a table, as text or JSON.
#include "formats/json_file.h"
#include "formats/need.h"
#include "runtime/limits.h"
#include "tools/cli.h"
#include "tools/report/results.h"
#include "tools/report/words.h"
#include <stdarg.h>
#include <stdio.h>

enum { MAX_WARNINGS = 5, WARNING_SIZE = 240 };

typedef struct budgets_command {
    const cli_command *self;
    const char *ratio_text, *csv;
    uint64_t tokens, block;
    bool strict, json;

    double ratio;
    uint32_t n_tokens;
    kvb_budget_options options;
    const char *path;
    kvb_table *table;
    uint32_t page;    // tokens that are granted together: the table's pages, else --block, else 1
    uint32_t *keep;   // [n_layers, n_kv_heads]
    uint8_t *formats; // [n_layers, n_kv_heads, 2] of a table that has them; else NULL
    size_t n_heads;   // all KV heads of the model
    kvb_budget_summary sum;
    char warnings[MAX_WARNINGS][WARNING_SIZE];
    size_t n_warnings;
} budgets_command;

static int check_budgets_options(budgets_command *b, int n_operands)
{
    if (n_operands != 1)
        return cli_usage_error(b->self, "expected one table, found %d: kvbudget %s", n_operands, b->self->synopsis);
    if (!b->ratio_text || b->tokens == 0)
        return cli_usage_error(b->self, "--ratio and --tokens are needed: kvbudget %s", b->self->synopsis);
    if (!cli_ratio(&b->ratio, b->ratio_text))
        return cli_usage_error(b->self, "--ratio: expected the share to prune, 0.8 or 80%%, below 1; found %s",
                               b->ratio_text);
    b->n_tokens = (uint32_t)b->tokens;
    b->options = (kvb_budget_options){.strict = b->strict, .block = (uint32_t)b->block};
    return EXIT_DONE;
}

// ---- work ----

// Returns the ratio of row i, counted from 1 on, in per cent; row 0 prunes nothing.
static double percent_of(const budgets_command *b, uint32_t i)
{
    kvb_row row;
    kvb_error err;
    return i && kvb_table_row(b->table, i - 1, &row, &err) == KVB_OK ? 100 * row.ratio : 0;
}

static void __attribute__((format(printf, 2, 3))) warn(budgets_command *b, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(b->warnings[b->n_warnings++], WARNING_SIZE, format, args);
    va_end(args);
}

static void word_warnings(budgets_command *b)
{
    const kvb_info *info = kvb_table_info(b->table);
    if (b->sum.warnings & KVB_WARN_PROTECTED)
        warn(
            b,
            "%u of %zu heads keep fewer than the %u protected tokens (sink %u, window %u) and lose the newest of them; "
            "--strict keeps them",
            b->sum.heads_below_protected, b->n_heads, info->sink + info->window, info->sink, info->window);
    if (b->sum.warnings & KVB_WARN_SATURATED)
        warn(b, "row %g %% is saturated: heads stopped at the solver's floor, so less is pruned than asked for",
             percent_of(b, b->sum.row_above));
    if (b->sum.warnings & KVB_WARN_LENGTH) {
        uint32_t shortest = UINT32_MAX, longest = 0;
        widen_lengths(info, &shortest, &longest);
        warn(b, "%u tokens are far from the table's calibration, %u to %u tokens", b->n_tokens, shortest, longest);
    }
    if (b->sum.warnings & KVB_WARN_CLAMPED)
        warn(b, "ratio %g is outside the table's rows, %g to %g %%; row %g %% was used", b->ratio, percent_of(b, 1),
             percent_of(b, info->n_rows), percent_of(b, b->sum.row_above));
    if (b->sum.warnings & KVB_WARN_EFFECTIVE)
        warn(b, "these counts prune %.4f, not the %g that was asked for", b->sum.effective_ratio, b->ratio);
}

// Finds the page size: the table's own, or else --block. kvb_budgets() has refused a --block that does not divide it.
static kvb_status find_page(budgets_command *b, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(b->table);
    const char *constraints = kvb_table_metadata(b->table, "constraints");
    kvb_limits limits = {.block = 1};
    kvb_status status = KVB_OK;
    if (constraints) status = kvb_limits_parse(&limits, constraints, info->n_layers, info->n_kv_heads, b->path, err);
    b->page = limits.block > 1 ? limits.block : b->options.block > 1 ? b->options.block : 1;
    if (constraints) kvb_limits_free(&limits);
    return status;
}

static kvb_status compute(budgets_command *b, kvb_error *err)
{
    kvb_status status = kvb_table_open(&b->table, b->path, NULL, err);
    if (status != KVB_OK) return status;
    const kvb_info *info = kvb_table_info(b->table);
    b->n_heads = (size_t)info->n_layers * info->n_kv_heads;
    b->keep = need(b->n_heads, sizeof *b->keep, "counts of tokens");
    status = kvb_budgets(b->table, b->ratio, b->n_tokens, &b->options, b->keep, b->n_heads, err);
    if (status == KVB_OK && kvb_table_has_formats(b->table)) {
        b->formats = need(b->n_heads, 2, "formats");
        status = kvb_formats(b->table, b->ratio, b->formats, 2 * b->n_heads, err);
    }
    if (status == KVB_OK)
        status = kvb_budgets_summarize(b->table, b->ratio, b->n_tokens, &b->options, b->keep, b->n_heads, &b->sum, err);
    if (status == KVB_OK) status = find_page(b, err);
    if (status == KVB_OK) word_warnings(b);
    return status;
}

// ---- output ----

static double row_percent(const budgets_command *b)
{
    double below = percent_of(b, b->sum.row_below), above = percent_of(b, b->sum.row_above);
    return below + b->sum.weight * (above - below);
}

// Names how a head's keys and values are stored: "int4,int2". Returns name.
static const char *format_names(const budgets_command *b, size_t head, char name[16])
{
    snprintf(name, 16, "%s,%s", kvb_packing_name(b->formats[2 * head]), kvb_packing_name(b->formats[2 * head + 1]));
    return name;
}

static void print_text(const budgets_command *b)
{
    const kvb_info *info = kvb_table_info(b->table);
    const uint32_t *keep = b->keep;
    int width = snprintf(NULL, 0, "%u", b->n_tokens);
    width = width < 3 ? 3 : width;
    printf("%s: %s, %u layers x %u KV heads\n", b->path, info->metric, info->n_layers, info->n_kv_heads);
    printf("kept of %u tokens at ratio %g (row %.10g %%%s", b->n_tokens, b->ratio, row_percent(b),
           b->options.strict ? ", strict" : "");
    if (b->page > 1) printf(", pages of %u", b->page);
    printf(")\n\nlayer");
    for (uint32_t g = 0; g < info->n_kv_heads; g++)
        printf("  %*s%u%s", width - snprintf(NULL, 0, "%u", g), "h", g, b->formats ? " K,V      " : "");
    printf("  pruned\n");
    for (uint32_t l = 0; l < info->n_layers; l++) {
        uint64_t total = 0;
        char name[16];
        printf("%5u", l);
        for (uint32_t g = 0; g < info->n_kv_heads; g++, keep++) {
            printf("  %*u", width, *keep);
            if (b->formats) printf(" %-9s", format_names(b, (size_t)(keep - b->keep), name));
            total += *keep;
        }
        printf("  %5.1f%%\n", 100 * (1 - (double)total / ((double)info->n_kv_heads * b->n_tokens)));
    }
    uint64_t all = (uint64_t)info->n_budgeted * info->n_kv_heads * b->n_tokens;
    printf("\nkept        %llu of %llu tokens over all heads%s; %u to %u per head\n", (unsigned long long)b->sum.total,
           (unsigned long long)all, info->bounded ? " of layers without a window" : "", b->sum.keep_min,
           b->sum.keep_max);
    printf("pruned      %.4f; asked for %g\n", b->sum.effective_ratio, b->ratio);
    fflush(stdout);
    for (size_t i = 0; i < b->n_warnings; i++) fprintf(stderr, "warning: %s\n", b->warnings[i]);
}

static void add_heads(results *to, const budgets_command *b)
{
    const kvb_info *info = kvb_table_info(b->table);
    const uint32_t *keep = b->keep;
    cJSON *detail = results_detail(to), *layers = cJSON_AddArrayToObject(detail, "keep"),
          *formats = b->formats ? cJSON_AddArrayToObject(detail, "formats") : NULL;
    for (uint32_t l = 0; l < info->n_layers; l++) {
        cJSON *heads = cJSON_CreateArray(), *names = b->formats ? cJSON_CreateArray() : NULL;
        cJSON_AddItemToArray(layers, heads);
        if (names) cJSON_AddItemToArray(formats, names);
        for (uint32_t g = 0; g < info->n_kv_heads; g++, keep++) {
            cJSON *row = results_row(to);
            json_put(row, "metric %s ratio %g n_tokens %u layer %u kv_head %u kept %u", info->metric, b->ratio,
                     b->n_tokens, l, g, *keep);
            cJSON_AddItemToArray(heads, cJSON_CreateNumber(*keep));
            if (!names) continue;
            char name[16];
            format_names(b, (size_t)(keep - b->keep), name);
            cJSON_AddStringToObject(row, "formats", name);
            cJSON_AddItemToArray(names, cJSON_CreateString(name));
        }
    }
}

static void add_settings(cJSON *to, const budgets_command *b)
{
    const kvb_info *info = kvb_table_info(b->table);
    cJSON *warnings = cJSON_AddArrayToObject(to, "warnings");
    json_put(to, "metric %s n_layers %u n_kv_heads %u sink %u window %u ratio %g row %g n_tokens %u", info->metric,
             info->n_layers, info->n_kv_heads, info->sink, info->window, b->ratio, row_percent(b), b->n_tokens);
    json_put(to, "strict %d block %u budgets_version %u keep_min %u keep_max %u total %g", b->options.strict, b->page,
             kvb_budgets_version(), b->sum.keep_min, b->sum.keep_max, (double)b->sum.total);
    cJSON_AddNumberToObject(to, "effective_ratio", b->sum.effective_ratio);
    for (size_t i = 0; i < b->n_warnings; i++) cJSON_AddItemToArray(warnings, cJSON_CreateString(b->warnings[i]));
}

static kvb_status report_budgets(const budgets_command *b, kvb_error *err)
{
    if (!b->json) print_text(b);
    if (!b->json && !b->csv) return KVB_OK;
    results found = results_begin("budgets");
    kvb_status status = results_file(&found, "table", b->path, err);
    if (status == KVB_OK) {
        add_settings(found.settings, b);
        add_heads(&found, b);
        status = results_give(&found, b->json, b->csv, err);
    }
    results_free(&found);
    return status;
}

static int run_budgets(const cli_command *self, int argc, char **argv)
{
    budgets_command b = {.self = self};
    const cli_option options[] = {
        {"ratio", 'r', CLI_TEXT, &b.ratio_text, "RATIO", "share of all cached tokens to prune: 0.8 or 80%"},
        {"tokens", 't', CLI_POSITIVE, &b.tokens, "N", "length of the context, sinks and window included"},
        {"strict", 0, CLI_FLAG, &b.strict, NULL,
         "no head keeps fewer than the protected tokens; the total stays the same"},
        {"block", 0, CLI_COUNT, &b.block, "N", "whole blocks of N tokens, for paged caches"},
        RESULTS_OPTIONS(b),
        {0},
    };
    kvb_error err = {0};
    int first, code = cli_parse(self, options, argc, argv, &first);
    if (code != EXIT_DONE) return code < 0 ? EXIT_DONE : code;
    code = check_budgets_options(&b, argc - first);
    if (code == EXIT_DONE) {
        b.path = argv[first];
        if (compute(&b, &err) != KVB_OK || report_budgets(&b, &err) != KVB_OK) code = cli_failed(self, &err);
    }
    free_all(b.keep, b.formats);
    kvb_table_close(b.table);
    return code;
}

const cli_command cmd_budgets = {
    "budgets",
    "budgets TABLE --ratio R --tokens T [OPTION]...",
    "show how many tokens each head keeps of a context, as an engine would get it",
    "Prints a layers x heads grid of token counts, totals, and what is really pruned. Warnings go to stderr:\n"
    "protected tokens (sink + window) that do not fit, a saturated row, a context much shorter or longer than in\n"
    "the calibration, a ratio outside the table, a total that misses the ratio by more than one per cent.\n"
    "\n"
    "--json and --csv print one row per head: layer, kv_head, kept. The JSON also has the counts as\n"
    "details[0].keep [layer][head], and the requested and the effective ratio in `settings`.\n"
    "\n"
    "Examples:\n"
    "  kvbudget budgets snapkv.safetensors --ratio 80% --tokens 4096\n"
    "  kvbudget budgets snapkv.safetensors --ratio 0.8 --tokens 4096 --block 16 --strict --json\n"
    "\n"
    "Counts are rounded exactly as kvpress rounds them; kvb_budgets() also has other rules.\n",
    run_budgets,
};
