// Any bytes as a record, parsed by HDF5 first: if it opens, every number is read, and it is merged as a shard, alone
// and with a copy of itself.
#include "formats/record.h"
#include "tests/fuzz/fuzz.h"
#include <unistd.h>

// HDF5 1.10 leaks a buffer at every wrong checksum, and most inputs have one.
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "detect_leaks=0";
}

static void write_file(const char *path, const uint8_t *data, size_t size)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f) != 0) abort();
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
        float *packings = malloc((size_t)s.n_layers * s.n_kv_heads * RECORD_PACKINGS * sizeof *packings);
        for (uint32_t q = 0; packings && q < c->n_questions; q++) record_read_packings(r, i, q, packings, &err);
        free(packings);
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
    static char folder[] = "/tmp/kvb-fuzz-record-XXXXXX", paths[3][64];
    kvb_error err;
    if (!mkdtemp(folder)) abort();
    for (int i = 0; i < 3; i++) snprintf(paths[i], sizeof paths[i], "%s/%d.h5", folder, i);
    write_file(paths[0], data, size);
    write_file(paths[1], data, size);
    record *given;
    if (record_open(&given, paths[0], &err) == KVB_OK)
        for (size_t i = 0; i < record_context_count(given); i++) read_context(given, i);
    else if (given) abort();
    record_close(given);
    const char *inputs[] = {paths[0], paths[1]};
    for (size_t n = 1; n <= 2; n++) {
        if (record_merge(paths[2], inputs, n, true, &err) != KVB_OK) continue;
        record *r; // the result of a merge must open
        if (record_open(&r, paths[2], &err) != KVB_OK || record_shard(r)) abort();
        record_close(r);
    }
    for (int i = 0; i < 3; i++) unlink(paths[i]);
    if (rmdir(folder) != 0) abort(); // nothing half-written may be left
    snprintf(folder, sizeof folder, "/tmp/kvb-fuzz-record-XXXXXX");
    return 0;
}
