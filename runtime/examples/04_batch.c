// A batch of requests of different lengths: what varlen and paged attention kernels want to know of one layer.
//     cc 04_batch.c $(pkg-config --cflags --libs kvbudget) -o 04_batch
//     ./04_batch keydiff.safetensors 0.8 4096 1000 250
#include <kvbudget.h>
#include <stdio.h>
#include <stdlib.h>

enum { PAGE = 16, SLACK = 8, LAYER = 0 };

// Rows of the layer's heads, request by request: lengths [n_requests, G]. A budget depends on the request's length.
static kvb_status fill_lengths(const kvb_table *table, double ratio, char **tokens, size_t n_requests,
                               uint32_t *lengths, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(table);
    size_t n = (size_t)info->n_layers * info->n_kv_heads;
    uint32_t *keep = malloc(n * sizeof *keep);
    kvb_status status = keep ? KVB_OK : KVB_MEMORY;
    for (size_t r = 0; r < n_requests && status == KVB_OK; r++) {
        status = kvb_budgets(table, ratio, (uint32_t)strtoul(tokens[r], NULL, 10), NULL, keep, n, err);
        for (uint32_t g = 0; g < info->n_kv_heads && status == KVB_OK; g++)
            lengths[r * info->n_kv_heads + g] = keep[LAYER * info->n_kv_heads + g];
    }
    free(keep);
    return status;
}

static void print_counts(const char *name, const int32_t *x, size_t n)
{
    printf("%-26s", name);
    for (size_t i = 0; i < n; i++) printf(" %ld", (long)x[i]);
    printf("\n");
}

int main(int argc, char **argv)
{
    kvb_table *table = NULL;
    kvb_error err = {KVB_MEMORY, "not enough memory"};
    uint32_t *lengths = NULL;
    int32_t *cu = NULL;
    int code = EXIT_FAILURE;
    if (argc < 4) {
        fprintf(stderr, "usage: %s TABLE RATIO TOKENS...\n", argv[0]);
        return 2;
    }
    if (kvb_table_open(&table, argv[1], NULL, &err) != KVB_OK) goto failed;
    size_t n_requests = (size_t)argc - 3, n = n_requests * kvb_table_info(table)->n_kv_heads;
    lengths = malloc(n * sizeof *lengths);
    cu = malloc((n + 1) * sizeof *cu);
    if (!lengths || !cu) goto failed;
    if (fill_lengths(table, strtod(argv[2], NULL), argv + 3, n_requests, lengths, &err) != KVB_OK) goto failed;

    // Flat tensors [rows, d]: every head of every request is a sequence with one KV head.
    if (kvb_cu_seqlens(lengths, n, 0, 0, cu, n + 1, &err) != KVB_OK) goto failed;
    print_counts("cu_seqlens", cu, n + 1);
    // The same with free rows: 8 tokens are decoded before anything has to move. The kernel gets `lengths` beside it.
    if (kvb_cu_seqlens(lengths, n, SLACK, 0, cu, n + 1, &err) != KVB_OK) goto failed;
    print_counts("cu_seqlens, 8 rows free", cu, n + 1);
    // Pages of 16 rows: sequence i owns pages cu[i] .. cu[i + 1] - 1 of the pool (FlashInfer's indptr).
    if (kvb_cu_seqlens(lengths, n, SLACK, PAGE, cu, n + 1, &err) != KVB_OK) goto failed;
    print_counts("pages of 16, 8 rows free", cu, n + 1);
    code = EXIT_SUCCESS;
    goto done;
failed:
    fprintf(stderr, "%s: %s\n", kvb_status_name(err.status), err.message);
done:
    free(lengths);
    free(cu);
    kvb_table_close(table);
    return code;
}
