#include "profiler/metric/layer_sums.h"
#include "profiler/metric/layer_host.h"
#include "profiler/model/layer_device.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

static kvb_status no_memory(const layer_view *view, kvb_error *err)
{
    return kvb_fail(err, KVB_MEMORY, "layer %u: no memory for the sums of %u tokens that a metric needs", view->layer,
                    view->n_tokens);
}

static void widen(double *out, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) out[i] = x[i];
}

// Ends what a device was asked for with `status`: its n numbers go to out if it has made them; frees `made`.
static kvb_status widened(double *out, float *made, size_t n, kvb_status status)
{
    if (status == KVB_OK) widen(out, made, n);
    free(made);
    return status;
}

static void narrow(float *out, const double *x, size_t n, double factor)
{
    for (size_t i = 0; i < n; i++) out[i] = (float)(x[i] * factor);
}

kvb_status layer_window_votes(const layer_view *view, uint32_t window, float factor, float *votes, kvb_error *err)
{
    if (!view->device) return layer_host_window_votes(view, window, factor, votes, err);
    kvb_status status = device_window_votes(view->device, window, votes, err);
    for (size_t i = 0; status == KVB_OK && i < (size_t)view->n_heads * view->n_tokens; i++) votes[i] *= factor;
    return status;
}

kvb_status layer_group_votes(const layer_view *view, uint32_t window, bool maximum, float *votes, kvb_error *err)
{
    uint32_t T = view->n_tokens, H = view->n_heads, group = H / view->n_kv_heads;
    if (!view->device || maximum) return layer_host_group_votes(view, window, maximum, votes, err);
    float *each = malloc((size_t)H * T * sizeof *each);
    kvb_status status = each ? device_window_votes(view->device, window, each, err) : no_memory(view, err);
    if (status == KVB_OK) memset(votes, 0, (size_t)view->n_kv_heads * T * sizeof *votes);
    for (uint32_t h = 0; status == KVB_OK && h < H; h++)
        for (uint32_t j = 0; j < T; j++) votes[(size_t)(h / group) * T + j] += each[(size_t)h * T + j];
    free(each);
    return status;
}

kvb_status layer_norms(const layer_view *view, view_item item, double *norms, kvb_error *err)
{
    size_t n = (size_t)view->n_kv_heads * view->n_tokens;
    if (!view->device) {
        layer_host_norms(view, item, norms);
        return KVB_OK;
    }
    float *made = malloc(n * sizeof *made + 1);
    return widened(norms, made, n, made ? device_norms(view->device, item, made, err) : no_memory(view, err));
}

kvb_status layer_query_moments(const layer_view *view, uint32_t from, double *mean, double *covariance, kvb_error *err)
{
    size_t means = (size_t)view->n_heads * view->head_dim, squares = covariance ? means * view->head_dim : 0;
    if (!view->device) return layer_host_query_moments(view, from, mean, covariance, err);
    // cppcheck-suppress uninitdata ; the device fills it
    float *made = malloc((means + squares) * sizeof *made + 1), *matrices = covariance ? made + means : NULL;
    kvb_status status = made ? device_query_moments(view->device, from, made, matrices, err) : no_memory(view, err);
    if (status == KVB_OK) widen(mean, made, means);
    if (status == KVB_OK && covariance) widen(covariance, matrices, squares);
    free(made);
    return status;
}

kvb_status layer_key_means(const layer_view *view, bool normalised, double *mean, kvb_error *err)
{
    size_t n = (size_t)view->n_kv_heads * view->head_dim;
    if (!view->device) {
        layer_host_key_means(view, normalised, mean);
        return KVB_OK;
    }
    float *made = malloc(n * sizeof *made + 1);
    return widened(mean, made, n, made ? device_key_mean(view->device, normalised, made, err) : no_memory(view, err));
}

kvb_status layer_key_forms(const layer_view *view, const key_form *form, double *z, kvb_error *err)
{
    size_t n = (size_t)form->n_heads * view->n_tokens, lines = (size_t)form->n_heads * view->head_dim,
           squares = form->square ? lines * view->head_dim : 0;
    if (!view->device) return layer_host_key_forms(view, form, z, err);
    float *linear = malloc((lines + squares + n) * sizeof *linear + 1);
    if (!linear) return no_memory(view, err);
    float *square = form->square ? linear + lines : NULL, *made = linear + lines + squares;
    narrow(linear, form->linear, lines, form->a);
    if (square) narrow(square, form->square, squares, form->b);
    kvb_status status = device_quadratic(view->device, form->n_heads, linear, square, made, err);
    if (status == KVB_OK) widen(z, made, n);
    free(linear);
    return status;
}

kvb_status layer_spreads(const layer_view *view, view_item item, partition_row row, float *out, kvb_error *err)
{
    return view->device ? device_spreads(view->device, item, row, out, err)
                        : layer_host_spreads(view, item, row, out, err);
}
