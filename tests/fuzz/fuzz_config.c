// config.json: any bytes are refused, or give numbers that the forward pass can rely on.
#include "profiler/model/model.h"
#include "profiler/weights/weights.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    weights *w;
    kvb_error err;
    if (weights_from_config(&w, "input", data, size, &err) != KVB_OK) return 0;
    model_config c;
    const struct family *f;
    if (model_read_config(&c, &f, w, &err) == KVB_OK) {
        bool sizes = c.n_layers && c.n_layers <= MODEL_MAX_LAYERS && c.n_kv_heads && c.n_heads % c.n_kv_heads == 0 &&
                     c.head_dim && c.head_dim <= BACKEND_MAX_HEAD_DIM && c.width && c.ffn_width && c.vocabulary;
        bool numbers = c.rope_dim <= c.head_dim && c.norm_eps >= 0 && c.rope.theta > 0 && isfinite(c.query_scale) &&
                       c.n_used <= c.n_experts;
        if (!sizes || !numbers || model_budgeted(&c, c.n_layers) > c.n_layers) abort();
    }
    weights_close(w);
    return 0;
}
