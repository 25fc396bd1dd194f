// Opens a table and prints how many tokens each KV head keeps.
//     cc 01_budgets.c $(pkg-config --cflags --libs kvbudget) -o 01_budgets
//     ./01_budgets snapkv.safetensors 0.8 4096
#include <kvbudget.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    kvb_table *table = NULL;
    kvb_error err;
    uint32_t *keep = NULL;
    int code = EXIT_FAILURE;

    if (argc != 4) {
        fprintf(stderr, "usage: %s TABLE RATIO TOKENS\n", argv[0]);
        return 2;
    }
    double ratio = strtod(argv[2], NULL);
    uint32_t n_tokens = (uint32_t)strtoul(argv[3], NULL, 10);

    // Everything in the file is checked here; nothing below can meet a damaged table.
    if (kvb_table_open(&table, argv[1], NULL, &err) != KVB_OK) goto failed;
    const kvb_info *info = kvb_table_info(table);

    // An engine would also give its model's shape and hash, so that it never runs with another model's table.
    kvb_expectation expected = {0};
    expected.metric = info->metric;
    if (kvb_table_check(table, &expected, &err) != KVB_OK) goto failed;

    // The library writes to memory of ours: one count per KV head, layer by layer.
    size_t n = (size_t)info->n_layers * info->n_kv_heads;
    keep = malloc(n * sizeof *keep);
    if (!keep) goto done;
    if (kvb_budgets(table, ratio, n_tokens, NULL, keep, n, &err) != KVB_OK) goto failed;

    for (uint32_t l = 0; l < info->n_layers; l++) {
        printf("layer %2u:", (unsigned)l);
        for (uint32_t g = 0; g < info->n_kv_heads; g++) printf(" %6u", (unsigned)keep[l * info->n_kv_heads + g]);
        printf("\n");
    }

    kvb_budget_summary sum;
    if (kvb_budgets_summarize(table, ratio, n_tokens, NULL, keep, n, &sum, &err) != KVB_OK) goto failed;
    printf("%s: %llu tokens kept over %u heads, %.2f %% pruned\n", info->metric, (unsigned long long)sum.total,
           (unsigned)n, 100 * sum.effective_ratio);
    if (sum.warnings & KVB_WARN_PROTECTED)
        printf("some heads lose protected tokens; set kvb_budget_options.strict to avoid that\n");
    code = EXIT_SUCCESS;
    goto done;
failed:
    fprintf(stderr, "%s: %s\n", kvb_status_name(err.status), err.message);
done:
    free(keep);
    kvb_table_close(table);
    return code;
}
