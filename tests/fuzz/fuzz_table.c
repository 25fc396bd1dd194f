// Any bytes as a table: if it opens, its budgets must be valid and meet its constraints.
#include "formats/table_write.h"
#include "runtime/limits.h"
#include "solver/constraints.h"
#include "tests/fuzz/fuzz.h"

// Checks the budgets at one ratio. limits: NULL, or the table's constraints.
static void try_budgets(const kvb_table *table, const kvb_limits *limits, double ratio, uint32_t n_tokens,
                        const kvb_budget_options *opt, uint32_t *keep, size_t n)
{
    kvb_budget_summary sum;
    kvb_error err = {0};
    if (limits && kvb_budgets(table, ratio, n_tokens, opt, keep, n, &err) != KVB_OK) {
        if (err.message[0] == 0) abort();
        return; // pages may be too coarse for so few tokens, or opt may ask for another page size
    }
    if (limits && ratio > 0 && constrained_check(limits, n_tokens, keep, &err) != KVB_OK) abort();
    if (kvb_budgets(table, ratio, n_tokens, opt, keep, n, NULL) != KVB_OK ||
        kvb_budgets_summarize(table, ratio, n_tokens, opt, keep, n, &sum, NULL) != KVB_OK)
        abort(); // a table that opens must work at every ratio
    if (sum.keep_min < 1 || sum.keep_max > n_tokens || sum.total > (uint64_t)n * n_tokens) abort();
    if (opt && opt->strict && !limits) {
        uint64_t floor_count = (uint64_t)kvb_table_info(table)->sink + kvb_table_info(table)->window;
        if (sum.keep_min < floor_count && sum.keep_min < n_tokens) abort();
    }
}

// Checks that formats are known ones, and bf16 if nothing is packed.
static void try_formats(const kvb_table *table, double ratio, size_t n)
{
    uint8_t *formats = malloc(2 * n);
    if (formats && kvb_formats(table, ratio, formats, 2 * n, NULL) != KVB_OK) abort();
    for (size_t i = 0; formats && i < 2 * n; i++)
        if (formats[i] >= (kvb_table_has_formats(table) && ratio > 0 ? KVB_PACKINGS : 1)) abort();
    free(formats);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const double ratios[] = {0, 0.004, 0.5, 0.805, 0.999};
    static const uint32_t lengths[] = {1, 13, 4099, UINT32_MAX};
    kvb_table *table;
    kvb_error err;
    if (kvb_table_open_memory(&table, data, size, "fuzz", NULL, &err) != KVB_OK) {
        if (table || err.status == KVB_OK || err.message[0] == 0) abort();
        return 0;
    }
    size_t n = (size_t)kvb_table_info(table)->n_layers * kvb_table_info(table)->n_kv_heads;
    uint32_t *keep = malloc(n * sizeof *keep);
    kvb_limits own, *limits = NULL;
    const kvb_info *info = kvb_table_info(table);
    const char *constraints = kvb_table_metadata(table, "constraints");
    if (constraints) {
        if (kvb_limits_parse(&own, constraints, info->n_layers, info->n_kv_heads, "fuzz", &err) != KVB_OK)
            abort(); // it opened
        limits = &own;
    }
    double weight[99 * 2];
    table_weights_parse(weight, kvb_table_metadata(table, "text_weights"), info->n_rows, 2, 1, "fuzz", &err);
    for (size_t i = 0; keep && i < sizeof ratios / sizeof ratios[0]; ++i) {
        try_formats(table, ratios[i], n);
        for (size_t j = 0; j < sizeof lengths / sizeof lengths[0]; ++j) {
            try_budgets(table, limits, ratios[i], lengths[j], NULL, keep, n);
            for (unsigned k = 0; k < 24; ++k) {
                kvb_budget_options opt = {(kvb_rounding)(k % 3), (kvb_lookup)(k / 3 % 2), (int)(k / 6 % 2),
                                          k / 12 * 32};
                try_budgets(table, limits, ratios[i], lengths[j], &opt, keep, n);
            }
        }
    }
    free(keep);
    if (limits) kvb_limits_free(limits);
    kvb_table_close(table);
    return 0;
}
