// A server's decode loop on the CPU: the caches of several requests lie in pages, and each KV head is as long as the
// table says. One server per ratio; they take turns, so that all run under the same load of the machine.
//     cc -O2 -fopenmp 03_serve.c $(pkg-config --cflags --libs kvbudget) -o 03_serve     (without -fopenmp: one core)
//     ./03_serve keydiff.safetensors 8192 2 33 0 0.5 0.8 0.9
//
// Keys, values and queries are made up, and a layer's matrices are left out: a step here is only attention.
#define _POSIX_C_SOURCE 199309L
#include <kvbudget.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PAGE = 16, MOST = 8 };

typedef struct server {
    kvb_attend_cache cache; // of all layers: heads [L, requests, G]
    uint32_t *lengths;
    int32_t *begin, *pages;
    uint16_t *rows;        // keys, then values
    double *seconds, read; // [L, steps]; rows read in all steps
} server;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Sets lengths and shuffled pages for requests that have just been cut, with room for `steps` more tokens.
static int open_server(server *s, const kvb_table *table, double ratio, uint32_t tokens, uint32_t requests,
                       uint32_t steps, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(table);
    kvb_attend_cache *c = &s->cache;
    size_t heads = (size_t)info->n_layers * info->n_kv_heads, n = heads * requests, G = info->n_kv_heads, numbers;
    kvb_budget_options opt = {0};
    opt.strict = 1;
    s->seconds = calloc((size_t)info->n_layers * steps, sizeof *s->seconds);
    s->lengths = calloc(n, sizeof *s->lengths);
    s->begin = calloc(n + 1, sizeof *s->begin);
    if (!s->seconds || !s->lengths || !s->begin) return 0;
    if (kvb_budgets(table, ratio, tokens, &opt, s->lengths, n, err) != KVB_OK) return 0;
    for (size_t i = n; i-- > 0;) s->lengths[i] = s->lengths[i / (requests * G) * G + i % G]; // all requests alike
    if (kvb_cu_seqlens(s->lengths, n, steps, PAGE, s->begin, n + 1, err) != KVB_OK) return 0;
    size_t n_pages = (size_t)s->begin[n];
    c->n_heads = (uint32_t)n, c->group = info->n_heads / info->n_kv_heads, c->head_dim = info->head_dim;
    c->n_rows = n_pages * PAGE;
    numbers = 2 * c->n_rows * c->head_dim;
    s->pages = malloc(n_pages * sizeof *s->pages);
    s->rows = malloc(numbers * sizeof *s->rows);
    if (!s->pages || !s->rows) return 0;
    for (size_t i = 0; i < numbers; i++) s->rows[i] = (uint16_t)(0x3e00 + i * 40503 % 0x1ff); // 0.125 to 0.5
    for (size_t i = 0; i < n_pages; i++) {
        size_t j = (size_t)rand() % (i + 1);
        s->pages[i] = s->pages[j];
        s->pages[j] = (int32_t)i;
    }
    c->format = KVB_ROWS_BF16, c->k = s->rows, c->v = s->rows + numbers / 2, c->page_rows = PAGE;
    c->begin = s->begin, c->lengths = s->lengths, c->pages = s->pages;
    return 1;
}

// One step: each head gets one more row (with whatever its page holds), and all layers attend, one after the other.
static kvb_status decode(server *s, uint32_t n_layers, size_t step, size_t steps, const float *q, float *out,
                         kvb_error *err)
{
    int n = (int)(s->cache.n_heads / n_layers), failed = 0;
    for (uint32_t h = 0; h < s->cache.n_heads; h++) s->read += ++s->lengths[h];
    for (int l = 0; l < (int)n_layers; l++) {
        double start = now();
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) reduction(| : failed)
#endif
        for (int h = l * n; h < (l + 1) * n; h++)
            failed |= kvb_attend(&s->cache, q, (uint32_t)h, (uint32_t)h + 1, out, NULL) != KVB_OK;
        s->seconds[(size_t)l * steps + step] = now() - start;
    }
    return failed ? kvb_attend(&s->cache, q, 0, s->cache.n_heads, out, err) : KVB_OK; // again, for the error message
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Returns the sum of all layers' medians: other work of the machine disturbs only single layers of single steps.
static double median_step(server *s, uint32_t n_layers, size_t steps)
{
    double sum = 0;
    for (double *layer = s->seconds; layer < s->seconds + n_layers * steps; layer += steps) {
        qsort(layer, steps, sizeof *layer, by_size);
        sum += layer[steps / 2];
    }
    return sum;
}

int main(int argc, char **argv)
{
    static server s[MOST];
    kvb_table *table = NULL;
    kvb_error err = {KVB_MEMORY, "not enough memory"};
    int n = argc - 5, code = EXIT_FAILURE;
    float *q = NULL, *out = NULL;
    uint32_t steps = argc > 4 ? (uint32_t)strtoul(argv[4], NULL, 10) : 0;
    uint32_t requests = argc > 4 ? (uint32_t)strtoul(argv[3], NULL, 10) : 0;
    if (n < 1 || n > MOST || !steps || !requests) {
        fprintf(stderr, "usage: %s TABLE TOKENS REQUESTS STEPS RATIO... (up to %d)\n", argv[0], MOST);
        return 2;
    }
    if (kvb_table_open(&table, argv[1], NULL, &err) != KVB_OK) goto failed;
    const kvb_info *info = kvb_table_info(table);
    size_t numbers = (size_t)info->n_layers * requests * info->n_heads * info->head_dim;
    q = malloc(numbers * sizeof *q);
    out = malloc(numbers * sizeof *out);
    if (!q || !out) goto failed;
    for (size_t i = 0; i < numbers; i++) q[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    for (int i = 0; i < n; i++)
        if (!open_server(s + i, table, strtod(argv[5 + i], NULL), (uint32_t)strtoul(argv[2], NULL, 10), requests, steps,
                         &err))
            goto failed;
    for (uint32_t step = 0; step < steps; step++)
        for (int i = 0; i < n; i++)
            if (decode(s + i, info->n_layers, step, steps, q, out, &err) != KVB_OK) goto failed;
    printf("%8s %12s %10s %10s %10s %8s\n", "ratio", "rows a step", "MB", "steps/s", "ns a row", "times");
    double first = 0;
    for (int i = 0; i < n; i++) {
        double median = median_step(s + i, info->n_layers, steps), rows = s[i].read / steps;
        if (i == 0) first = median;
        printf("%8s %12.0f %10.1f %10.2f %10.2f %8.2f\n", argv[5 + i], rows, 4e-6 * rows * info->head_dim, 1 / median,
               1e9 * median / rows, first / median);
    }
    code = EXIT_SUCCESS;
    goto done;
failed:
    fprintf(stderr, "%s: %s\n", kvb_status_name(err.status), err.message);
done:
    for (int i = 0; i < n; i++)
        free(s[i].seconds), free(s[i].lengths), free(s[i].begin), free(s[i].pages), free(s[i].rows);
    free(q), free(out), kvb_table_close(table);
    return code;
}
