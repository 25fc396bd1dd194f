// A long answer: the cache grows by a token per step, and every 128 steps it is cut again.
//     cc 02_grow.c $(pkg-config --cflags --libs kvbudget) -o 02_grow
//     ./02_grow keydiff.safetensors 0.8 1000 512           # prunes 80 % of all tokens seen so far
//     ./02_grow keydiff.safetensors 200 1000 512           # 200 rows per head on average: the cache does not grow
//
// This cache holds only the positions of rows, and scores are made up; 01_evict.c shows how keys and values move.
#include <kvbudget.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct cache {
    size_t n_heads, room; // rows that `places` has room for
    uint32_t n_tokens;    // seen so far, evicted ones included
    uint32_t cut_at;      // tokens seen when it was last cut
    size_t *offsets;      // [n_heads + 1]
    uint32_t *places;     // positions of the rows, head by head
    float *scores;        // of the rows; an engine computes them from keys, values and queries when it cuts
    uint32_t *keep, *rows;
} cache;

static int make(cache *c, size_t n_heads, uint32_t most_tokens)
{
    memset(c, 0, sizeof *c);
    c->n_heads = n_heads;
    c->room = n_heads * most_tokens;
    c->offsets = calloc(2 * (n_heads + 1), sizeof *c->offsets); // and behind them the new offsets
    c->keep = malloc(n_heads * sizeof *c->keep);
    c->places = malloc(c->room * sizeof *c->places);
    c->scores = malloc(c->room * sizeof *c->scores);
    c->rows = malloc(c->room * sizeof *c->rows);
    return c->offsets && c->keep && c->places && c->scores && c->rows;
}

static void destroy(cache *c)
{
    free(c->offsets);
    free(c->keep);
    free(c->places);
    free(c->scores);
    free(c->rows);
}

// Appends n tokens to every head: heads move to the right, the last one first.
static void append(cache *c, uint32_t n)
{
    for (size_t h = c->n_heads; h-- > 0;) {
        size_t from = c->offsets[h], length = c->offsets[h + 1] - from, to = from + h * n;
        memmove(c->places + to, c->places + from, length * sizeof *c->places);
        for (uint32_t i = 0; i < n; i++) c->places[to + length + i] = c->n_tokens + i;
    }
    for (size_t h = 0; h <= c->n_heads; h++) c->offsets[h] += h * n;
    c->n_tokens += n;
}

// Cuts every head to the rule's budget. The first cut, after the prefill, is the same call.
static kvb_status cut(cache *c, const kvb_table *table, const kvb_growth *rule, kvb_error *err)
{
    size_t *new_offsets = c->offsets + c->n_heads + 1;
    for (size_t i = 0; i < c->offsets[c->n_heads]; i++) c->scores[i] = (float)rand() / (float)RAND_MAX;
    kvb_status status = kvb_growth_budgets(table, rule, c->n_tokens, c->cut_at, c->keep, c->n_heads, NULL, err);
    if (status != KVB_OK) return status;
    status = kvb_reselect_all(c->scores, c->places, c->n_heads, c->offsets, c->n_tokens, c->keep, rule->sink,
                              rule->window, new_offsets, c->rows, c->room, err);
    if (status != KVB_OK) return status;
    for (size_t h = 0; h < c->n_heads; h++) // rows ascend, so none moves to the right: in place, like keys and values
        for (size_t i = new_offsets[h]; i < new_offsets[h + 1]; i++)
            c->places[i] = c->places[c->offsets[h] + c->rows[i]];
    memcpy(c->offsets, new_offsets, (c->n_heads + 1) * sizeof *c->offsets);
    c->cut_at = c->n_tokens;
    return KVB_OK;
}

int main(int argc, char **argv)
{
    kvb_table *table = NULL;
    kvb_error err;
    kvb_growth rule = {0};
    cache c = {0};
    int code = EXIT_FAILURE;
    if (argc != 5) {
        fprintf(stderr, "usage: %s TABLE RATIO|TARGET_SIZE TOKENS NEW_TOKENS\n", argv[0]);
        return 2;
    }
    double wanted = strtod(argv[2], NULL);
    if (wanted < 1) rule.ratio = wanted;
    else rule.target_size = (uint32_t)wanted;
    rule.interval = 128;
    uint32_t prompt = (uint32_t)strtoul(argv[3], NULL, 10), more = (uint32_t)strtoul(argv[4], NULL, 10);
    if (kvb_table_open(&table, argv[1], NULL, &err) != KVB_OK) goto failed;
    if (kvb_growth_check(table, &rule, &err) != KVB_OK) goto failed;
    const kvb_info *info = kvb_table_info(table);
    if (!make(&c, (size_t)info->n_layers * info->n_kv_heads, prompt + more)) {
        fprintf(stderr, "not enough memory\n");
        goto done;
    }
    append(&c, prompt);
    for (uint32_t done = 0; done <= more; done++) {
        if (done) append(&c, 1);
        if (!kvb_growth_due(&rule, c.n_tokens, c.cut_at, 0)) continue;
        size_t before = c.offsets[c.n_heads];
        if (cut(&c, table, &rule, &err) != KVB_OK) goto failed;
        printf("%5u tokens seen: %7lu rows, after the cut %7lu\n", (unsigned)c.n_tokens, (unsigned long)before,
               (unsigned long)c.offsets[c.n_heads]);
    }
    code = EXIT_SUCCESS;
    goto done;
failed:
    fprintf(stderr, "%s: %s\n", kvb_status_name(err.status), err.message);
done:
    destroy(&c);
    kvb_table_close(table);
    return code;
}
