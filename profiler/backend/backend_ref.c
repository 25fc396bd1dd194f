// The judge: every operation as plain loops with double sums, in the order of the formula. Slow and obviously right.
#include "formats/need.h"
#include "profiler/backend/backend_host.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static dev_matrix ref_matrix_load(backend_device *on, const stored_matrix *w, unsigned hold)
{
    return (dev_matrix){host_matrix_values(w), w->out, w->in, NULL};
}

static uint64_t ref_matrix_bytes(backend_device *on, const stored_matrix *w, unsigned hold)
{
    return (uint64_t)w->out * w->in * sizeof(float);
}

static void ref_matrix_release(backend_device *on, dev_matrix *w)
{
    free(w->address);
    w->address = NULL;
}

static uint64_t ref_scratch_bytes(backend_device *on, const backend_limits *limits)
{
    return 0;
}

static void ref_gather(backend_device *on, dev y, dev_matrix table, const int32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        memcpy(y.address + (size_t)i * table.in, table.address + (size_t)ids[i] * table.in, table.in * sizeof(float));
}

static void ref_rms_norm(backend_device *on, dev y, dev x, dev weight, uint32_t n, uint32_t width, float eps)
{
    for (uint32_t i = 0; i < n; i++) {
        const float *xi = x.address + (size_t)i * width;
        double sum = 0;
        for (uint32_t c = 0; c < width; c++) sum += (double)xi[c] * xi[c];
        double scale = 1.0 / sqrt(sum / width + eps);
        for (uint32_t c = 0; c < width; c++)
            y.address[(size_t)i * width + c] = (float)(xi[c] * scale * weight.address[c]);
    }
}

static void ref_matmul(backend_device *on, dev y, dev x, dev_matrix w, uint32_t n, bool accumulate)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t o = 0; o < w.out; o++) {
            double sum = accumulate ? y.address[(size_t)i * w.out + o] : 0.0;
            for (uint32_t c = 0; c < w.in; c++)
                sum += (double)x.address[(size_t)i * w.in + c] * w.address[(size_t)o * w.in + c];
            y.address[(size_t)i * w.out + o] = (float)sum;
        }
}

static void ref_project(backend_device *on, const projection *to, uint32_t count, dev x, uint32_t n)
{
    for (uint32_t i = 0; i < count; i++) ref_matmul(on, to[i].y, x, to[i].w, n, false);
}

static void ref_layer_norm(backend_device *on, dev y, dev x, dev weight, uint32_t n, uint32_t width, uint32_t n_weights,
                           float eps)
{
    for (uint32_t i = 0; i < n; i++) {
        const float *xi = x.address + (size_t)i * width, *wi = weight.address + (size_t)(i % n_weights) * width;
        double mean = 0, square = 0;
        for (uint32_t c = 0; c < width; c++) mean += xi[c];
        mean /= width;
        for (uint32_t c = 0; c < width; c++) square += (xi[c] - mean) * (xi[c] - mean);
        double scale = 1.0 / sqrt(square / width + eps);
        for (uint32_t c = 0; c < width; c++) y.address[(size_t)i * width + c] = (float)((xi[c] - mean) * scale * wi[c]);
    }
}

static double gated(activation act, double g, double up)
{
    if (act == SILU) return g / (1.0 + exp(-g)) * up;
    if (act == GELU_TANH) return 0.5 * g * (1 + tanh(sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * up;
    double gate = fmin(g, 7);
    return gate / (1 + exp(-1.702 * gate)) * (fmin(fmax(up, -7), 7) + 1);
}

static void ref_glu(backend_device *on, dev gate, dev up, activation act, size_t n_floats)
{
    for (size_t i = 0; i < n_floats; i++) gate.address[i] = (float)gated(act, gate.address[i], up.address[i]);
}

static void ref_softcap(backend_device *on, dev y, float cap, size_t n_floats)
{
    for (size_t i = 0; i < n_floats; i++) y.address[i] = (float)(cap * tanh((double)y.address[i] / cap));
}

static void ref_clip(backend_device *on, dev y, float most, size_t n_floats)
{
    for (size_t i = 0; i < n_floats; i++) y.address[i] = fminf(fmaxf(y.address[i], -most), most);
}

static void ref_add_rows(backend_device *on, dev y, dev x, const uint32_t *rows, const float *weights, uint32_t n,
                         uint32_t width)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t c = 0; c < width; c++) {
            float *to = y.address + (size_t)rows[i] * width + c;
            *to = (float)(*to + (double)weights[i] * x.address[(size_t)i * width + c]);
        }
}

static void ref_add_scaled(backend_device *on, dev y, dev x, float by, size_t n_floats)
{
    for (size_t i = 0; i < n_floats; i++) y.address[i] = (float)(y.address[i] + (double)by * x.address[i]);
}

static void ref_rope(backend_device *on, dev y, dev x, dev cos_sin, const uint32_t *positions, uint32_t n,
                     uint32_t heads, uint32_t d, uint32_t rope_dim)
{
    uint32_t half = rope_dim / 2;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t h = 0; h < heads; h++) {
            const float *in = x.address + ((size_t)i * heads + h) * d;
            float *out = y.address + ((size_t)i * heads + h) * d;
            const float *angle = cos_sin.address + (size_t)positions[i] * rope_dim;
            for (uint32_t p = 0; p < half; p++) {
                double a = in[p], b = in[p + half], c = angle[2 * p], s = angle[2 * p + 1];
                out[p] = (float)(a * c - b * s);
                out[p + half] = (float)(b * c + a * s);
            }
            for (uint32_t c = rope_dim; c < d; c++) out[c] = in[c];
        }
}

static double dot(const float *a, const float *b, uint32_t n)
{
    double sum = 0;
    for (uint32_t c = 0; c < n; c++) sum += (double)a[c] * b[c];
    return sum;
}

// One stretch of keys and values that a query sees; a decoded row sees two: the context and its own tail.
typedef struct stretch {
    const float *k, *v;
    uint32_t n;
} stretch;

static double score(attention_shape s, const float *q, const float *k)
{
    double x = dot(q, k, s.head_dim) / sqrt((double)s.head_dim);
    return s.softcap > 0 ? s.softcap * tanh(x / s.softcap) : x;
}

// Returns the first position that a row at `position` sees.
static uint32_t first_seen(attention_shape s, uint32_t position)
{
    return s.window && position >= s.window ? position + 1 - s.window : 0;
}

// Returns the stretch without its first n rows, or without all if it has fewer.
static stretch without(stretch all, uint32_t n, uint32_t d)
{
    if (n > all.n) n = all.n;
    return (stretch){all.k + (size_t)n * d, all.v + (size_t)n * d, all.n - n};
}

// Computes the softmax attention of one query of head h over the stretches. *max and *sum receive what a later pass
// needs for probabilities.
static void attend_one(float *o, const float *q, const stretch *seen, int n_seen, attention_shape shape, uint32_t h,
                       double *max, double *sum)
{
    uint32_t d = shape.head_dim;
    double top = shape.sinks.address ? shape.sinks.address[h] : -INFINITY, acc[BACKEND_MAX_HEAD_DIM] = {0};
    for (int s = 0; s < n_seen; s++)
        for (uint32_t j = 0; j < seen[s].n; j++) top = fmax(top, score(shape, q, seen[s].k + (size_t)j * d));
    double total = shape.sinks.address ? exp(shape.sinks.address[h] - top) : 0;
    for (int s = 0; s < n_seen; s++)
        for (uint32_t j = 0; j < seen[s].n; j++) {
            double e = exp(score(shape, q, seen[s].k + (size_t)j * d) - top);
            total += e;
            for (uint32_t c = 0; c < d; c++) acc[c] += e * seen[s].v[(size_t)j * d + c];
        }
    for (uint32_t c = 0; c < d; c++) o[c] = (float)(acc[c] / total);
    *max = top;
    *sum = total;
}

static void ref_attend_prefix(backend_device *on, dev o, dev q, const prefix_kv *kv, uint32_t first, uint32_t n,
                              attention_shape s)
{
    uint32_t group = s.n_heads / s.n_kv_heads;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t h = 0; h < s.n_heads; h++) {
            size_t head = (size_t)(h / group) * kv->n_tokens * s.head_dim,
                   at = ((size_t)i * s.n_heads + h) * s.head_dim;
            stretch all = {kv->k.address + head, kv->v.address + head, first + i + 1},
                    seen = without(all, first_seen(s, first + i), s.head_dim);
            double max, sum;
            attend_one(o.address + at, q.address + at, &seen, 1, s, h, &max, &sum);
        }
}

static void ref_attend_rows(backend_device *on, dev o, dev q, const prefix_kv *kv, const tail_kv *tails,
                            const decode_row *rows, uint32_t n, attention_shape s, const oracle_view *oracle)
{
    uint32_t d = s.head_dim, group = s.n_heads / s.n_kv_heads, T = kv->n_tokens;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t h = 0; h < s.n_heads; h++) {
            uint32_t g = h / group, hidden = first_seen(s, T + rows[i].tail);
            size_t head = (size_t)g * kv->n_tokens * d, at = ((size_t)i * s.n_heads + h) * d;
            size_t tail = ((size_t)rows[i].question * s.n_kv_heads + g) * tails->capacity * d;
            stretch context = {kv->k.address + head, kv->v.address + head, T},
                    own = {tails->k.address + tail, tails->v.address + tail, rows[i].tail + 1};
            stretch seen[2] = {without(context, hidden, d), without(own, hidden > T ? hidden - T : 0, d)};
            double max, sum;
            attend_one(o.address + at, q.address + at, seen, 2, s, h, &max, &sum);
            if (!rows[i].observed || !oracle->weights.address) continue;
            float *best = oracle->best.address + rows[i].question * oracle->best_stride + (size_t)g * T;
            for (uint32_t j = 0; j < T; j++) {
                double a = exp(score(s, q.address + at, context.k + (size_t)j * d) - max) / sum;
                float importance = (float)(a * oracle->weights.address[(size_t)h * T + j]);
                if (oracle->sum) best[j] += importance;
                else if (importance > best[j]) best[j] = importance;
            }
        }
}

static void ref_value_weights(backend_device *on, dev w, const prefix_kv *kv, dev root, dev centre, attention_shape s)
{
    uint32_t d = s.head_dim, group = s.n_heads / s.n_kv_heads, T = kv->n_tokens;
    double total = 0;
    for (uint32_t h = 0; h < s.n_heads; h++)
        for (uint32_t j = 0; j < T; j++) {
            const float *v = kv->v.address + ((size_t)(h / group) * kv->n_tokens + j) * d;
            double square = 0;
            for (uint32_t r = 0; r < d; r++) {
                const float *row = root.address + ((size_t)h * d + r) * d;
                double y = dot(row, v, d) - (centre.address ? dot(row, centre.address + (size_t)h * d, d) : 0);
                square += y * y;
            }
            w.address[(size_t)h * T + j] = (float)sqrt(square);
            total += sqrt(square);
        }
    for (size_t i = 0; i < (size_t)s.n_heads * T; i++) w.address[i] = (float)(w.address[i] / (total + 1e-9));
}

static void ref_column_sums(backend_device *on, dev sums, dev row_log, dev q, const prefix_kv *kv, uint32_t first,
                            attention_shape s)
{
    uint32_t d = s.head_dim, group = s.n_heads / s.n_kv_heads, T = kv->n_tokens;
    for (uint32_t h = 0; h < s.n_heads; h++) {
        const float *k = kv->k.address + (size_t)(h / group) * T * d;
        for (uint32_t i = first; i < T; i++) {
            const float *query = q.address + ((size_t)i * s.n_heads + h) * d;
            double top = s.sinks.address ? s.sinks.address[h] : -INFINITY;
            for (uint32_t j = 0; j <= i; j++) top = fmax(top, score(s, query, k + (size_t)j * d));
            double total = s.sinks.address ? exp(s.sinks.address[h] - top) : 0;
            for (uint32_t j = 0; j <= i; j++) total += exp(score(s, query, k + (size_t)j * d) - top);
            row_log.address[(size_t)h * T + i] = (float)(top + log(total));
        }
        for (uint32_t j = 0; j < T; j++) {
            double sum = 0;
            for (uint32_t i = j > first ? j : first; i < T; i++)
                sum += exp(score(s, q.address + ((size_t)i * s.n_heads + h) * d, k + (size_t)j * d) -
                           row_log.address[(size_t)h * T + i]);
            sums.address[(size_t)h * T + j] = (float)sum;
        }
    }
}

static void ref_output_norms(backend_device *on, dev norms, const prefix_kv *kv, dev_matrix wo, attention_shape s)
{
    uint32_t d = s.head_dim, group = s.n_heads / s.n_kv_heads, T = kv->n_tokens;
    for (uint32_t h = 0; h < s.n_heads; h++)
        for (uint32_t j = 0; j < T; j++) {
            const float *v = kv->v.address + ((size_t)(h / group) * T + j) * d;
            double sum = 0;
            for (uint32_t row = 0; row < wo.out; row++)
                sum += fabs(dot(wo.address + (size_t)row * wo.in + (size_t)h * d, v, d));
            norms.address[(size_t)h * T + j] = (float)sum;
        }
}

static kvb_status ref_open(backend_device **out, const backend *b, const backend_limits *limits, kvb_error *err)
{
    *out = need(1, sizeof **out, "devices");
    (*out)->b = b;
    return KVB_OK;
}

static void ref_close(backend_device *on)
{
    free(on);
}

const backend backend_ref = {
    .name = "ref",
    .compute = "f32",
    .summary = "plain C with double sums: the judge of the others, slow",
    .context_rows = BACKEND_CHUNK_ROWS,
    .sums_importance = true,
    BACKEND_OPERATIONS(ref, host, host),
};
