// Ranks tokens by a learned ranking: a table that was solved with --metric learned=RANK.safetensors says which scores
// the engine has to compute, and turns them into one order per head.
//     cc 05_rank.c $(pkg-config --cflags --libs kvbudget) -lm -o 05_rank
//     ./05_rank learned.safetensors 0.8 4096
//
// The scores here are made up; a real engine computes those metrics of a layer after its prefill.
#include <kvbudget.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

// The first layer, of which the first head's tokens are selected: features [n_features][n_kv_heads][n_tokens], one
// block; scores [n_kv_heads][n_tokens].
static int rank_and_select(const kvb_table *table, double ratio, uint32_t n_tokens, float *features, float *scores,
                           uint32_t *keep, uint32_t *positions, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(table);
    const kvb_ranking_info *r = kvb_ranking_about(kvb_table_ranking(table));
    const float *of_layer[KVB_RANK_FEATURES_MAX];
    size_t n_heads = (size_t)info->n_layers * info->n_kv_heads, numbers = (size_t)info->n_kv_heads * n_tokens, i;
    uint32_t f, j, n, recent = 0;
    for (f = 0; f < r->n_features; f++) {
        of_layer[f] = features + f * numbers;
        for (i = 0; i < numbers; i++) features[f * numbers + i] = 1.0f + sinf((float)(i * (f + 1)));
    }
    if (kvb_rank_layer(table, 0, of_layer, n_tokens, scores, err) != KVB_OK ||
        kvb_budgets(table, ratio, n_tokens, NULL, keep, n_heads, err) != KVB_OK ||
        kvb_select(scores, n_tokens, keep[0], info->sink, info->window, positions, n_tokens, err) != KVB_OK)
        return 0;
    n = keep[0] < n_tokens ? keep[0] : n_tokens;
    for (j = 0; j < n; j++) recent += positions[j] >= n_tokens / 2;
    printf("layer 0, head 0 keeps %u of %u tokens, %u of them from the second half\n", (unsigned)n, (unsigned)n_tokens,
           (unsigned)recent);
    return 1;
}

int main(int argc, char **argv)
{
    kvb_table *table = NULL;
    kvb_error err;
    float *features = NULL, *scores = NULL;
    uint32_t *keep = NULL, *positions = NULL;
    int code = EXIT_FAILURE;
    if (argc != 4) {
        fprintf(stderr, "usage: %s TABLE RATIO TOKENS\n", argv[0]);
        return 2;
    }
    double ratio = strtod(argv[2], NULL);
    uint32_t n_tokens = (uint32_t)strtoul(argv[3], NULL, 10), f;
    if (kvb_table_open(&table, argv[1], NULL, &err) != KVB_OK) goto failed;
    const kvb_ranking_info *r = kvb_ranking_about(kvb_table_ranking(table));
    if (!r) {
        fprintf(stderr, "%s is for the metric %s; kvb_rank_layer() is for tables of a learned ranking\n", argv[1],
                kvb_table_info(table)->metric);
        goto done;
    }
    printf("%s takes the scores of\n", r->name);
    for (f = 0; f < r->n_features; f++) printf("  %s\n", r->metrics[f]);
    features = malloc((size_t)r->n_features * r->n_kv_heads * n_tokens * sizeof *features);
    scores = malloc((size_t)r->n_kv_heads * n_tokens * sizeof *scores);
    keep = malloc((size_t)r->n_layers * r->n_kv_heads * sizeof *keep);
    positions = malloc(n_tokens * sizeof *positions);
    if (!features || !scores || !keep || !positions) {
        fprintf(stderr, "not enough memory\n");
        goto done;
    }
    if (!rank_and_select(table, ratio, n_tokens, features, scores, keep, positions, &err)) goto failed;
    code = EXIT_SUCCESS;
    goto done;
failed:
    fprintf(stderr, "%s: %s\n", kvb_status_name(err.status), err.message);
done:
    free(features);
    free(scores);
    free(keep);
    free(positions);
    kvb_table_close(table);
    return code;
}
