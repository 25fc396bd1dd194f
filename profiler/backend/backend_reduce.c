// The reductions of backend.h as plain loops with double sums: the judge's form. Backends in host memory list it too,
// but a scorer that has the tensors at hand reads them itself.
#include "profiler/backend/backend_host.h"
#include <math.h>

static double square_sum(const float *x, uint32_t n)
{
    double sum = 0;
    for (uint32_t c = 0; c < n; c++) sum += (double)x[c] * x[c];
    return sum;
}

void host_norms(backend_device *on, dev out, dev x, size_t n, uint32_t width)
{
    (void)on;
    for (size_t i = 0; i < n; i++) out.address[i] = (float)sqrt(square_sum(x.address + i * width, width));
}

// One head: rows at x + i * step.
static void head_covariance(float *out, const float *x, size_t step, const double *mean, uint32_t n, uint32_t d)
{
    for (uint32_t a = 0; a < d; a++)
        for (uint32_t b = 0; b < d; b++) {
            double sum = 0;
            for (uint32_t i = 0; i < n; i++) sum += (x[i * step + a] - mean[a]) * (x[i * step + b] - mean[b]);
            out[(size_t)a * d + b] = (float)(sum / n);
        }
}

void host_moments(backend_device *on, dev mean, dev covariance, dev x, dev norms, uint32_t n, uint32_t heads,
                  uint32_t d, bool by_head)
{
    (void)on;
    size_t step = by_head ? d : (size_t)heads * d, head = by_head ? (size_t)n * d : d;
    for (uint32_t h = 0; h < heads; h++) {
        double sums[BACKEND_MAX_HEAD_DIM] = {0};
        const float *rows = x.address + h * head;
        for (uint32_t i = 0; i < n; i++) {
            double share = norms.address ? 1.0 / fmax(norms.address[(size_t)h * n + i], 1e-12) : 1.0;
            for (uint32_t c = 0; c < d; c++) sums[c] += rows[i * step + c] * share;
        }
        for (uint32_t c = 0; c < d; c++) mean.address[(size_t)h * d + c] = (float)(sums[c] /= n);
        if (covariance.address) head_covariance(covariance.address + (size_t)h * d * d, rows, step, sums, n, d);
    }
}

void host_quadratic(backend_device *on, dev out, const prefix_kv *kv, dev linear, dev square, attention_shape s)
{
    (void)on;
    uint32_t d = s.head_dim, group = s.n_heads / s.n_kv_heads, T = kv->n_tokens;
    for (uint32_t h = 0; h < s.n_heads; h++)
        for (uint32_t j = 0; j < T; j++) {
            const float *k = kv->k.address + ((size_t)(h / group) * T + j) * d;
            double sum = 0;
            for (uint32_t r = 0; r < d; r++) {
                double weight = linear.address[(size_t)h * d + r];
                for (uint32_t c = 0; square.address && c < d; c++)
                    weight += (double)square.address[((size_t)h * d + r) * d + c] * k[c];
                sum += weight * k[r];
            }
            out.address[(size_t)h * T + j] = (float)sum;
        }
}

void host_spreads(backend_device *on, dev out, dev z, uint32_t n_tokens, uint32_t n_kv_heads, uint32_t d,
                  partition_row row)
{
    (void)on;
    for (uint32_t g = 0; g < n_kv_heads; g++)
        for (uint32_t j = row.first; j < row.first + row.count * row.size; j++) {
            const float *head = z.address + (size_t)g * n_tokens * d;
            uint32_t from = row.first + ((j - row.first) / row.size + (row.own ? 0 : 1)) * row.size;
            double sum = 0, values[BACKEND_MAX_HEAD_DIM], square = 0;
            for (uint32_t c = 0; c < d; c++) {
                float low = head[(size_t)from * d + c], high = low;
                for (uint32_t i = from; i < from + row.size; i++) {
                    low = fminf(low, head[(size_t)i * d + c]);
                    high = fmaxf(high, head[(size_t)i * d + c]);
                }
                values[c] = high > low ? ((double)head[(size_t)j * d + c] - low) / ((double)high - low) : 0;
                sum += values[c];
            }
            for (uint32_t c = 0; c < d; c++) square += (values[c] - sum / d) * (values[c] - sum / d);
            out.address[(size_t)g * n_tokens + j] = (float)sqrt(square / (d > 1 ? d - 1 : 1));
        }
}
