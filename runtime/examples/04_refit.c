// Refits one head that has lost four fifths of its tokens, and prints the error of its output before and after.
//     cc 04_refit.c $(pkg-config --cflags --libs kvbudget) -o 04_refit
//     ./04_refit 1024 256
//
// Keys, values and queries are made up; a real engine takes those of a prefill: queries of every few positions, as they
// are before rotation, then rotated to positions behind the context.
#include <kvbudget.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEAD_DIM = 32 };

static float *random_rows(size_t n, float mean, float size)
{
    float *rows = malloc(n * HEAD_DIM * sizeof *rows);
    for (size_t i = 0; rows && i < n * HEAD_DIM; i++)
        rows[i] = size * ((float)rand() / (float)RAND_MAX - 0.5f) + (i % HEAD_DIM == 0 ? mean : 0);
    return rows;
}

int main(int argc, char **argv)
{
    kvb_refit_head head = {0};
    kvb_refit_result done;
    kvb_error err;
    size_t bytes;
    if (argc != 3) {
        fprintf(stderr, "usage: %s TOKENS QUERIES\n", argv[0]);
        return 2;
    }
    head.n_tokens = (uint32_t)strtoul(argv[1], NULL, 10);
    head.n_queries = (uint32_t)strtoul(argv[2], NULL, 10);
    head.n_kept = head.n_tokens / 5;
    head.head_dim = HEAD_DIM;
    if (kvb_refit_bytes(&head, &bytes, &err) != KVB_OK) {
        fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    float *k = random_rows(head.n_tokens, 0.5f, 3), *v = random_rows(head.n_tokens, 1, 2),
          *q = random_rows(head.n_queries, 0.5f, 1), *new_k = random_rows(head.n_kept, 0, 0),
          *new_v = random_rows(head.n_kept, 0, 0);
    uint32_t *positions = malloc(head.n_kept * sizeof *positions);
    void *work = malloc(bytes);
    int code = 1;
    if (k && v && q && new_k && new_v && positions && work) {
        for (uint32_t j = 0; j < head.n_kept; j++) positions[j] = j * 5; // an engine takes those of kvb_select()
        head.k = k, head.v = v, head.queries = q, head.positions = positions;
        code = kvb_refit(&head, work, bytes, new_k, new_v, NULL, &done, &err) != KVB_OK;
        if (code) fprintf(stderr, "%s\n", err.message);
        else
            printf("%u of %u tokens kept; keys %s, values %s; error %.3f -> %.3f of the outputs' variance\n",
                   (unsigned)head.n_kept, (unsigned)head.n_tokens, done.changed & KVB_REFIT_KEYS ? "shifted" : "kept",
                   done.changed & KVB_REFIT_VALUES ? "refitted" : "kept", done.error_before, done.error_after);
    }
    free(k), free(v), free(q), free(new_k), free(new_v), free(positions), free(work);
    return code;
}
