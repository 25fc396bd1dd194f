// The reader of records, HDF5's part included: opens the bytes as a file and reads every number of what opens.
#include "formats/record.h"
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// HDF5 1.10 loses a buffer at every wrong checksum, which is what most inputs have.
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "detect_leaks=0";
}

static void read_context(record *r, size_t i)
{
    record_shape s = record_get_shape(r);
    const record_context_info *c = record_context(r, i);
    kvb_error err;
    float *array = malloc((size_t)s.n_layers * s.n_kv_heads * c->n_tokens * sizeof *array);
    int32_t *tokens = malloc((size_t)c->n_tokens * sizeof *tokens);
    if (array && tokens) {
        record_read_tokens(r, i, tokens, &err);
        for (uint32_t m = 0; m < c->n_metrics; m++) record_read_scores(r, i, c->metrics[m], array, &err);
        for (uint32_t q = 0; q < c->n_questions; q++) record_read_oracle(r, i, q, array, &err);
    }
    for (uint32_t q = 0; q < c->n_questions; q++) {
        int32_t *suffix = malloc((size_t)c->questions[q].n_suffix * sizeof *suffix + 1);
        int32_t *answer = malloc((size_t)c->questions[q].n_answer * sizeof *answer + 1);
        if (suffix) record_read_suffix(r, i, q, suffix, &err);
        if (answer) record_read_answer(r, i, q, answer, &err);
        free(answer);
        free(suffix);
    }
    free(tokens);
    free(array);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    record *r;
    kvb_error err;
    if (record_open_memory(&r, data, size, "fuzz.h5", &err) != KVB_OK) {
        if (r) abort();
        return 0;
    }
    for (size_t i = 0; i < record_context_count(r); i++) read_context(r, i);
    record_close(r);
    return 0;
}
