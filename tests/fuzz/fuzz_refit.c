// Refitting a head of any numbers and sizes: it is refused, or the result is finite and its error is not larger.
#include "runtime/kvbudget.h"
#include "tests/fuzz/fuzz.h"

enum { MOST_T = 48, MOST_D = 24, MOST_N = 40, SIZES = 5 };

static void check_sizes(kvb_refit_head head, const uint8_t *data)
{
    size_t bytes = 0;
    memcpy(&head, data, 4 * sizeof(uint32_t)); // hostile sizes: only the bytes are computed, nothing is read
    if (kvb_refit_bytes(&head, &bytes, NULL) == KVB_OK && bytes < head.n_kept) abort();
}

// Fills x from the input, repeated as needed; a byte of 255 is followed by the four bytes of any float.
static void fill(float *x, size_t n, const uint8_t *data, size_t size, size_t *at)
{
    for (size_t i = 0; i < n; i++) {
        uint8_t byte = data[(*at)++ % size];
        x[i] = (float)(byte % 64) / 16 - 2;
        for (size_t b = 0; byte == 255 && b < sizeof *x; b++) ((uint8_t *)&x[i])[b] = data[(*at)++ % size];
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    float k[MOST_T * MOST_D], v[MOST_T * MOST_D], q[MOST_N * MOST_D], new_k[MOST_T * MOST_D], new_v[MOST_T * MOST_D],
        bias[MOST_T];
    uint32_t positions[MOST_T];
    kvb_refit_result out = {.changed = 4};
    kvb_error err = {0};
    size_t bytes = 0, at = SIZES;
    if (size < 5 * sizeof(uint32_t)) return 0;
    kvb_refit_head h = {
        .n_tokens = 1 + data[0] % MOST_T, .head_dim = 1 + data[1] % MOST_D, .n_queries = data[2] % MOST_N};
    h.n_kept = 1 + data[3] % h.n_tokens;
    check_sizes(h, data);
    size_t n = (size_t)h.n_kept * h.head_dim;
    fill(k, (size_t)h.n_tokens * h.head_dim, data, size, &at);
    fill(v, (size_t)h.n_tokens * h.head_dim, data, size, &at);
    fill(q, (size_t)h.n_queries * h.head_dim, data, size, &at);
    for (uint32_t j = 0; j < h.n_kept; j++) positions[j] = data[4] & 2 ? data[(5 + j) % size] : j;
    h.k = k, h.v = v, h.queries = q, h.positions = positions;
    if (kvb_refit_bytes(&h, &bytes, &err) != KVB_OK) abort();
    void *work = malloc(bytes); // exactly, so that a sanitiser reports any access beyond
    if (!work) return 0;
    kvb_status status = kvb_refit(&h, work, bytes, new_k, new_v, data[4] & 1 ? bias : NULL, &out, &err);
    free(work);
    if (status != KVB_OK && (status != err.status || err.message[0] == 0)) abort();
    if (status == KVB_NUMERIC && out.changed) abort();
    for (size_t i = 0; status == KVB_OK && out.changed && i < n; i++)
        if (!isfinite(new_k[i]) || !isfinite(new_v[i])) abort();
    if (status == KVB_OK && !(out.error_after <= out.error_before)) abort();
    return 0;
}
