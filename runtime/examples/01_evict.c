// Really evicts: computes budgets, then positions, then makes the K/V cache as small as they say.
//     cc 01_evict.c $(pkg-config --cflags --libs kvbudget) -o 01_evict
//     ./01_evict snapkv.safetensors 0.8 4096
//
// The cache here is made up: key and value of token j hold the number j, which shows the tokens that were kept. Scores
// are random; a real engine takes those of the table's metric (kvb_table_info(table)->metric) after the prefill.
#include <kvbudget.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A prefilled cache is [heads, tokens, head_dim]; afterwards head h owns rows offsets[h] .. offsets[h + 1] - 1 of
// [kept, head_dim], as varlen attention kernels want it. Positions ascend and heads come in order, so a row never moves
// to the right: this works in place.
static void compact(float *cache, size_t n_heads, size_t n_tokens, size_t head_dim, const size_t *offsets,
                    const uint32_t *positions)
{
    for (size_t h = 0; h < n_heads; h++) {
        const float *head = cache + h * n_tokens * head_dim;
        for (size_t row = offsets[h]; row < offsets[h + 1]; row++)
            memmove(cache + row * head_dim, head + positions[row] * head_dim, head_dim * sizeof *cache);
    }
}

static void fill(float *keys, float *values, float *scores, size_t n_heads, size_t n_tokens, size_t head_dim)
{
    for (size_t i = 0; i < n_heads * n_tokens; i++) {
        scores[i] = (float)rand() / (float)RAND_MAX;
        for (size_t d = 0; d < head_dim; d++) keys[i * head_dim + d] = values[i * head_dim + d] = (float)(i % n_tokens);
    }
}

int main(int argc, char **argv)
{
    kvb_table *table = NULL;
    kvb_error err;
    float *keys = NULL, *values = NULL, *scores = NULL, *smaller;
    uint32_t *keep = NULL, *positions = NULL;
    size_t *offsets = NULL;
    int code = EXIT_FAILURE;

    if (argc != 4) {
        fprintf(stderr, "usage: %s TABLE RATIO TOKENS\n", argv[0]);
        return 2;
    }
    double ratio = strtod(argv[2], NULL);
    uint32_t n_tokens = (uint32_t)strtoul(argv[3], NULL, 10);
    // Everything in the file is checked here; below, the table is known to be intact.
    if (kvb_table_open(&table, argv[1], NULL, &err) != KVB_OK) goto failed;

    // An engine would also give its model's shape and hash, so that it never runs with another model's table.
    const kvb_info *info = kvb_table_info(table);
    kvb_expectation expected = {0};
    expected.metric = info->metric;
    if (kvb_table_check(table, &expected, &err) != KVB_OK) goto failed;
    size_t n_heads = (size_t)info->n_layers * info->n_kv_heads, head_dim = info->head_dim;
    size_t n_rows = n_heads * n_tokens, row_bytes = head_dim * sizeof *keys;
    keys = malloc(n_rows * row_bytes);
    values = malloc(n_rows * row_bytes);
    scores = malloc(n_rows * sizeof *scores);
    keep = malloc(n_heads * sizeof *keep);
    positions = malloc(n_rows * sizeof *positions); // enough for every ratio; sum.total elements would do
    offsets = malloc((n_heads + 1) * sizeof *offsets);
    if (!keys || !values || !scores || !keep || !positions || !offsets) {
        fprintf(stderr, "not enough memory\n");
        goto done;
    }
    fill(keys, values, scores, n_heads, n_tokens, head_dim);

    // strict: every head keeps the sinks and the window of the calibration.
    kvb_budget_options opt = {0};
    opt.strict = 1;
    if (kvb_budgets(table, ratio, n_tokens, &opt, keep, n_heads, &err) != KVB_OK) goto failed;
    if (kvb_select_all(scores, n_heads, n_tokens, keep, info->sink, info->window, offsets, positions, n_rows, &err) !=
        KVB_OK)
        goto failed;
    compact(keys, n_heads, n_tokens, head_dim, offsets, positions);
    compact(values, n_heads, n_tokens, head_dim, offsets, positions);

    // Give the memory back. If realloc fails, the old, larger block is still valid.
    size_t kept = offsets[n_heads];
    if ((smaller = realloc(keys, kept * row_bytes))) keys = smaller;
    if ((smaller = realloc(values, kept * row_bytes))) values = smaller;

    // Each kept key must be that of its position. (It keeps its rotary embedding: nothing is rotated again.)
    for (size_t row = 0; row < kept; row++) {
        if (keys[row * head_dim] != (float)positions[row] || values[row * head_dim] != (float)positions[row]) {
            fprintf(stderr, "row %lu holds another token\n", (unsigned long)row);
            goto done;
        }
    }
    printf("%lu of %lu tokens kept; K and V take %.1f MB instead of %.1f MB\n", (unsigned long)kept,
           (unsigned long)n_rows, 2e-6 * (double)(kept * row_bytes), 2e-6 * (double)(n_rows * row_bytes));
    code = EXIT_SUCCESS;
    goto done;
failed:
    fprintf(stderr, "%s: %s\n", kvb_status_name(err.status), err.message);
done:
    free(keys);
    free(values);
    free(scores);
    free(keep);
    free(positions);
    free(offsets);
    kvb_table_close(table);
    return code;
}
