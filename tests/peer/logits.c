// Computes next-token logits of every position, to compare with other code (tests/peer/compare_logits.py, families.py).
//
// usage: logits MODEL IDS.npy LOGITS.npy [BACKEND [COMPUTE]]
// Reads token ids, and writes [tokens, vocabulary] in float32.
#include "formats/file_read.h"
#include "formats/need.h"
#include "formats/npy.h"
#include "profiler/model/forward.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>

static kvb_status read_ids(int32_t **ids, size_t *n, const char *path, kvb_error *err)
{
    file_view view;
    npy_array array = {0};
    kvb_status status = file_map(&view, path, err);
    if (status == KVB_OK) status = npy_parse(&array, view.data, view.size, path, err);
    *ids = need(array.count, sizeof **ids, "token ids");
    *n = array.count;
    if (status == KVB_OK) status = npy_to_i32(&array, *ids, path, err);
    file_unmap(&view);
    return status;
}

static kvb_status write_logits(const model *m, const int32_t *ids, size_t n, const char *path, kvb_error *err)
{
    forward *f = NULL;
    const forward_plan plan = {(uint32_t)n, 1, 1, false, false, 1};
    if (n == 0 || n > m->config.context_length)
        return kvb_fail(err, KVB_ARGUMENT, "%zu tokens, expected 1 to %u", n, m->config.context_length);
    float *logits = need(n * m->config.vocabulary, sizeof *logits, "logits");
    kvb_status status = forward_open(&f, m, &plan, err);
    if (status == KVB_OK) status = forward_prefill(f, ids, (uint32_t)n, NULL, NULL, logits, err);
    if (status == KVB_OK)
        status = npy_write(path, NPY_F32, 2, (const uint64_t[]){n, m->config.vocabulary}, logits, err);
    forward_close(f);
    free(logits);
    return status;
}

int main(int argc, char **argv)
{
    if (argc < 4 || argc > 6) {
        fprintf(stderr, "usage: logits MODEL IDS.npy LOGITS.npy [BACKEND [COMPUTE]]\n");
        return 2;
    }
    kvb_error err = {0};
    model *m = NULL;
    int32_t *ids = NULL;
    size_t n = 0;
    const backend *b = backend_find_compute(argc > 4 ? argv[4] : "cpu", argc > 5 ? argv[5] : "f32");
    kvb_status status = b ? KVB_OK : kvb_fail(&err, KVB_ARGUMENT, "there is no such backend");
    if (status == KVB_OK) status = read_ids(&ids, &n, argv[2], &err);
    if (status == KVB_OK) status = model_open(&m, argv[1], b, &(model_options){0}, &err);
    if (status == KVB_OK) status = write_logits(m, ids, n, argv[3], &err);
    model_free(m);
    free(ids);
    if (status != KVB_OK) fprintf(stderr, "logits: %s\n", err.message);
    return status != KVB_OK;
}
