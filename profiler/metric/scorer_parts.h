// Computations that several scorers and policies share.
#pragma once
#include "formats/need.h"
#include "profiler/backend/linalg.h"
#include "profiler/metric/layer_sums.h"
#include "profiler/metric/scorer.h"

// All metrics, in the order of the help; plain forms come before their variants. row(NAME) is what scorer_NAME.c, or a
// file of several variants, defines as `const scorer scorer_NAME`.
// clang-format off
#define SCORERS(row) \
    row(snapkv_kvpress) \
    row(snapkv_lukv) \
    row(snapkv_adakv) \
    row(snapkv_factory) \
    row(snapkv_keydiff) \
    row(keydiff) \
    row(ea_kvpress) \
    row(ea_lukv) \
    row(lagkv_kvpress) \
    row(lagkv_paper) \
    row(morphkv) \
    row(rocketkv) \
    row(h2o) \
    row(h2o_kvpress) \
    row(h2o_half) \
    row(tova) \
    row(knorm) \
    row(streaming) \
    row(streaming_kvpress) \
    row(random) \
    row(critical)
// clang-format on
#define DECLARE_SCORER(name) extern const scorer scorer_##name;
SCORERS(DECLARE_SCORER)

// How MorphKV joins the rows of its window, as a metric and as a policy.
typedef enum row_fusion { FUSION_SUM, FUSION_MAX } row_fusion;

// Computes the attention of query head h's queries first .. first + n - 1 (of view->n_queries) as the model does, with
// its softcap and sink: out [n,T], zero where a key comes after its query. Query i belongs to key T - n_queries + i.
// Runs on the caller's thread alone inside a parallel region.
void attention_rows(float *out, const layer_view *view, uint32_t h, uint32_t first, uint32_t n);

// The same, summed over the query heads of KV head g; `scratch` [n,T].
void group_attention_rows(float *out, float *scratch, const layer_view *view, uint32_t g, uint32_t first, uint32_t n);

// Fails with KVB_ARGUMENT unless the view has at least `window` queries.
kvb_status check_window(const metric *m, const layer_view *view, uint32_t window, kvb_error *err);

// For scorer.check of the pooled metrics: fails with KVB_ARGUMENT unless the parameter `kernel` is odd.
kvb_status check_kernel(const metric *m, kvb_error *err);

// Gives the last `tail` tokens, which take no part in a ranking, the layer's highest score plus `above`: evicted last.
void fill_tail(float *s, const layer_view *view, uint32_t tail, float above);

// out[j] = maximum, or mean with zeros beyond the edges, of the `kernel` (odd) values around x[j]. `scratch` [n].
void pool_row(float *out, const float *x, float *scratch, uint32_t n, uint32_t kernel, bool max_pool);

// Returns the position in the text of key j of the view's head g.
static inline uint32_t key_position(const layer_view *view, uint32_t g, uint32_t j)
{
    return view->positions ? view->positions[(size_t)g * view->n_tokens + j] : j;
}

// SnapKV's vote (methods.md 3.1), shared with RocketKV's first stage.
typedef struct snapkv_form {
    uint32_t window, kernel;
    bool max_pool;    // else mean
    bool group_first; // reduce over the group, then pool; else pool, then reduce
    bool group_max;   // else mean
    bool sum;         // over window and group instead of means (and then group_max is not set)
    float tail_above; // what the window's own tokens get beyond the layer's maximum
} snapkv_form;

kvb_status snapkv_scores(const metric *m, const layer_view *view, const snapkv_form *form, float *s, kvb_error *err);

// LagKV (methods.md 3.4), one partition of n tokens: out[j] += weight * softmax over j of std over channels of (z_j -
// min) / (max - min), where min and max run over the n_ref rows of `ref`, per channel. z [n,d], ref [n_ref,d]; a
// channel whose reference is constant counts as 0. `scratch` has 3 d + n floats.
void lagkv_partition(float *out, float weight, const float *z, uint32_t n, const float *ref, uint32_t n_ref, uint32_t d,
                     float *scratch);

// Returns the sum of a[i] b[i], in double.
static inline double dot_double(const float *a, const float *b, uint32_t n)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (uint32_t i = 0; i < n; i++) sum += (double)a[i] * b[i];
    return sum;
}
