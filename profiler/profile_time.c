// Estimates how long a profile would take on this machine: its operations at the rate that a product of the model's own
// shape, with made-up weights, reaches now.
#include "formats/need.h"
#include "profiler/backend/meter.h"
#include "profiler/profile.h"
#include "runtime/fail.h"
#include <stdlib.h>

// Returns the best rate of a few products y = x w^T, in operations per second: others may be using the machine.
static double best_rate(backend_device *on, dev y, dev x, dev_matrix w, uint32_t n)
{
    enum { PASSES = 5, LONG = 1 }; // the most passes, and seconds after which none begins
    double best = 0, began = meter_now();
    for (int i = 0; i < PASSES && (i < 2 || meter_now() - began < LONG); i++) { // the first warms up
        double start = meter_now();
        on->b->matmul(on, y, x, w, n, false);
        if (on->b->check(on, NULL) != KVB_OK) return 0;
        double rate = 2.0 * n * w.in * w.out / (meter_now() - start);
        best = rate > best ? rate : best;
    }
    return best;
}

static kvb_status measure_rate(double *rate, const model *m, kvb_error *err)
{
    enum { MOST_ROWS = 256, MOST_OUTPUTS = 4096 };
    const model_config *c = &m->config;
    const backend *b = m->device->b;
    uint32_t rows = model_context_rows(m), in = c->width, out = c->ffn_width > in ? c->ffn_width : in;
    if (rows > MOST_ROWS) rows = MOST_ROWS;
    if (out > MOST_OUTPUTS) out = MOST_OUTPUTS;
    const backend_limits limits = {.tokens = 1,
                                   .tail = 1,
                                   .rows = rows,
                                   .matrix_dim = in > out ? in : out,
                                   .matrix_terms = in,
                                   .shape = attention_heads(1, 1, c->head_dim)};
    backend_device *on;
    kvb_status status = b->open(&on, b, &limits, err);
    if (status != KVB_OK) return status;
    float *values = need((size_t)out * in, sizeof *values, "made-up weights");
    for (size_t i = 0; i < (size_t)out * in; i++) values[i] = (float)(i % 7) - 3;
    dev x = backend_memory(on, (size_t)rows * in, "rows"), y = backend_memory(on, (size_t)rows * out, "rows");
    dev_matrix w = backend_matrix(on, values, out, in, false);
    *rate = w.packed || w.address ? best_rate(on, y, x, w, rows) : 0;
    b->matrix_release(on, &w);
    b->release(on, x);
    b->release(on, y);
    b->close(on);
    free(values);
    return *rate > 0 ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory to measure the speed with a product of the model");
}

kvb_status profile_estimate_time(profile_times *out, const model *m, const profile_job *job, double record_bytes,
                                 kvb_error *err)
{
    enum { WRITING_RATE = 400000000 }; // bytes of a record per second, measured; to end it takes 0.05 seconds more
    double rate = 0;
    *out = (profile_times){.writing = 0.05 + record_bytes / WRITING_RATE};
    kvb_status status = job->n_contexts ? measure_rate(&rate, m, err) : KVB_OK; // --add may find nothing to do
    for (size_t i = 0; status == KVB_OK && i < job->n_contexts; i++) {
        const profile_context *c = &job->contexts[i];
        out->prefill += profile_work(m, c, NULL) / rate;
        out->decode += profile_work_again(m, c) / rate;
        for (uint32_t q = c->n_recorded; q < c->n_questions; q++)
            out->decode += profile_work(m, c, &c->questions[q]) / rate;
    }
    return status;
}
