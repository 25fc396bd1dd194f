#include "profiler/model/rope.h"
#include "formats/need.h"
#include <math.h>
#include <stdlib.h>

// Frequencies of long wavelengths are divided by the factor, those of short ones are not, and those between get a
// mixture (Llama 3.1).
static double scale_llama3(const rope_rule *r, double f)
{
    double wave = 2 * M_PI / f;
    if (wave < r->original / r->high) return f;
    if (wave > r->original / r->low) return f / r->factor;
    double smooth = (r->original / wave - r->low) / (r->high - r->low);
    return (1 - smooth) * f / r->factor + smooth * f;
}

// Returns the dimension whose frequency makes `turns` turns over the original length.
static double yarn_dimension(const rope_rule *r, uint32_t dim, double turns)
{
    return dim * log(r->original / (turns * 2 * M_PI)) / (2 * log(r->theta));
}

// YaRN: a ramp over the dimensions from unchanged frequencies to divided ones.
static double scale_yarn(const rope_rule *r, uint32_t dim, uint32_t p, double f)
{
    double low = yarn_dimension(r, dim, r->fast), high = yarn_dimension(r, dim, r->slow);
    if (r->truncate) low = floor(low), high = ceil(high);
    low = fmax(low, 0);
    high = fmin(high, dim - 1.0);
    if (low == high) high += 0.001; // as transformers does
    double ramp = fmin(fmax((p - low) / (high - low), 0), 1);
    return f / r->factor * ramp + f * (1 - ramp);
}

// NTK scaling raises the base with the length of the text.
static double dynamic_theta(const rope_rule *r, uint32_t dim, uint64_t n_tokens)
{
    double n = (double)n_tokens > r->original ? (double)n_tokens : r->original;
    return r->theta * pow(r->factor * n / r->original - (r->factor - 1), dim / (dim - 2.0));
}

bool rope_depends_on_length(const rope_rule *rule)
{
    return rule->kind == ROPE_LONG || rule->kind == ROPE_DYNAMIC;
}

void rope_frequencies(float *out, const rope_rule *rule, uint32_t dim, uint64_t n_tokens)
{
    double theta = rule->kind == ROPE_DYNAMIC ? dynamic_theta(rule, dim, n_tokens) : rule->theta;
    bool is_long = rule->kind == ROPE_LONG && (double)n_tokens > rule->original;
    const float *factors = is_long ? rule->long_factors : rule->short_factors;
    for (uint32_t p = 0; p < dim / 2; p++) {
        float f = (float)(1.0 / pow(theta, 2.0 * p / dim));
        if (rule->kind == ROPE_LINEAR) f /= (float)rule->factor;
        if (rule->kind == ROPE_LLAMA3) f = (float)scale_llama3(rule, f);
        if (rule->kind == ROPE_YARN) f = (float)scale_yarn(rule, dim, p, f);
        if (rule->has_factors) f /= factors[p];
        out[p] = f;
    }
}

static double size_at(rope_size size, uint32_t position)
{
    return size.growth > 0 ? size.attention * (1 + size.growth * log1p(floor(position / size.original)))
                           : size.attention;
}

void rope_turn(float *x, const float *frequency, uint32_t dim, uint32_t position, rope_size size)
{
    double by = size_at(size, position);
    for (uint32_t p = 0; p < dim / 2; p++) {
        float angle = (float)position * frequency[p], a = x[p], b = x[p + dim / 2];
        float c = (float)(cos(angle) * by), s = (float)(sin(angle) * by);
        x[p] = a * c - b * s;
        x[p + dim / 2] = a * s + b * c;
    }
}

void rope_fill(backend_device *on, dev table, const float *frequency, uint32_t dim, uint32_t positions, rope_size size)
{
    uint32_t half = dim / 2;
    float *angles = need_more(NULL, (size_t)positions * dim, sizeof(float), "rotary angles");
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < positions; i++) {
        double by = size_at(size, i);
        for (uint32_t p = 0; p < half; p++) {
            float angle = (float)i * frequency[p];
            angles[((size_t)i * half + p) * 2] = (float)(cos(angle) * by);
            angles[((size_t)i * half + p) * 2 + 1] = (float)(sin(angle) * by);
        }
    }
    on->b->upload(on, table, angles, (size_t)positions * dim);
    free(angles);
}

dev rope_table(backend_device *on, const float *frequency, uint32_t dim, uint32_t positions, rope_size size)
{
    dev out = backend_memory(on, (size_t)positions * dim, "rotary angles");
    rope_fill(on, out, frequency, dim, positions, size);
    return out;
}
