#include "study/output_loss.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool has_gains(const selection *s)
{
    for (size_t k = 0; k < s->n_contexts; k++)
        for (uint32_t q = 0; q < selection_context(s, k)->n_questions; q++)
            if (record_has_gains(s->r, s->contexts[k], q)) return true;
    return false;
}

bool output_loss_is_there(const selection *s, const char *metric)
{
    for (size_t k = 0; k < s->n_contexts; k++) {
        const record_context_info *c = selection_context(s, k);
        for (uint32_t q = 0; q < c->n_questions; q++)
            if (selection_has(s, &c->questions[q], q) && !record_has_curves(s->r, s->contexts[k], q, metric))
                return false;
    }
    return has_gains(s);
}

// Sums up KL and squares [L, RECORD_GAIN_KINDS, 2] over the questions that have gains: one KL of few tokens is too
// rough for a mean of ratios.
static kvb_status sum_gains(double *sum, const selection *s, uint32_t n_layers, kvb_error *err)
{
    size_t n = (size_t)n_layers * RECORD_GAIN_KINDS * 2;
    float *gains = need(n, sizeof *gains, "gains");
    kvb_status status = KVB_OK;
    for (size_t k = 0; k < s->n_contexts; k++)
        for (uint32_t q = 0; q < selection_context(s, k)->n_questions && status == KVB_OK; q++) {
            if (!record_has_gains(s->r, s->contexts[k], q)) continue;
            status = record_read_gains(s->r, s->contexts[k], q, gains, err);
            for (size_t i = 0; i < n && status == KVB_OK; i++) sum[i] += (double)gains[i];
        }
    free(gains);
    return status;
}

kvb_status output_gains_read(double *gain, const selection *s, kvb_error *err)
{
    uint32_t L = record_get_shape(s->r).n_layers;
    double *sum = need((size_t)L * RECORD_GAIN_KINDS * 2, sizeof *sum, "gains");
    kvb_status status = sum_gains(sum, s, L, err);
    for (uint32_t l = 0; l < L && status == KVB_OK; l++) {
        uint32_t kinds = 0;
        gain[l] = 0; // a sum of logarithms first
        for (uint32_t k = 0; k < RECORD_GAIN_KINDS; k++) {
            const double *one = sum + ((size_t)l * RECORD_GAIN_KINDS + k) * 2;
            if (!(one[0] > 0) || !(one[1] > 0)) continue;
            gain[l] += log(one[0] / one[1]);
            kinds++;
        }
        if (kinds == 0)
            status = kvb_fail(err, KVB_MISMATCH, "%s: no question has a gain of layer %u; profile with --curves",
                              s->path, l);
        else gain[l] = exp(gain[l] / kinds);
    }
    free(sum);
    return status;
}

kvb_status output_packings_read(double *loss, const selection *s, const double *gain, kvb_error *err)
{
    record_shape shape = record_get_shape(s->r);
    size_t layer = (size_t)shape.n_kv_heads * RECORD_PACKINGS, n = shape.n_layers * layer, found = 0;
    float *errors = need(n, sizeof *errors, "errors of formats");
    kvb_status status = KVB_OK;
    memset(loss, 0, n * sizeof *loss);
    for (size_t k = 0; k < s->n_contexts; k++) {
        const record_context_info *c = selection_context(s, k);
        for (uint32_t q = 0; q < c->n_questions && status == KVB_OK; q++) {
            if (!selection_has(s, &c->questions[q], q) || !record_has_packings(s->r, s->contexts[k], q)) continue;
            status = record_read_packings(s->r, s->contexts[k], q, errors, err);
            for (size_t i = 0; i < n && status == KVB_OK; i++) loss[i] += gain[i / layer] * (double)errors[i];
            found++;
        }
    }
    free(errors);
    for (size_t i = 0; i < n && found; i++) loss[i] /= (double)found;
    if (status != KVB_OK || found) return status;
    return kvb_fail(
        err, KVB_MISMATCH,
        "%s: does not say of any of these questions what formats do to the output; profile with --curves, or "
        "add a text or a metric to it with --curves (kvbudget profile --add)",
        s->path);
}

// Fills one head's gains per token from its errors at the levels.
static void fill_head(double *out, const cache_shape *s, const float *errors, double gain)
{
    uint32_t p = shape_protected(s), m = shape_middle(s), level = 0;
    double last = 0;
    for (uint32_t c = 0; c <= m; c++) {
        uint32_t b = p + c;
        while (level < RECORD_CURVE_LEVELS && record_curve_tokens(level, s->n_tokens, p) <= b) level++;
        uint32_t from = level ? record_curve_tokens(level - 1, s->n_tokens, p) : b,
                 to = level < RECORD_CURVE_LEVELS ? record_curve_tokens(level, s->n_tokens, p) : s->n_tokens;
        double right = level < RECORD_CURVE_LEVELS ? (double)errors[level] : 0,
               left = level ? (double)errors[level - 1] : right, value = left;
        if (level && to > from) value += (right - left) * (b - from) / (to - from);
        if (c > 0) out[c - 1] = gain * (last - value);
        last = value;
    }
}

kvb_status output_curves_fill(loss_curves *c, const selection *s, size_t context, uint32_t question, const char *metric,
                              const double *gain, float *buffer, kvb_error *err)
{
    const cache_shape *shape = &c->shape;
    size_t m = shape_middle(shape), heads = shape_heads(shape);
    kvb_status status = record_read_curves(s->r, s->contexts[context], question, metric, buffer, err);
    for (size_t h = 0; h < heads && status == KVB_OK; h++)
        fill_head(c->gain + h * m, shape, buffer + h * RECORD_CURVE_LEVELS, gain[h / shape->n_kv_heads]);
    if (status != KVB_OK) return status;
    loss_curves_sum(c);
    c->rises = true;
    c->total = 1;
    return KVB_OK;
}
