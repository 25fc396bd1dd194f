#include "evaluator/policy_parts.h"
#include "profiler/metric/scorer_parts.h"
#include "runtime/fail.h"
#include <string.h>

const policy_kind *const policy_kinds[] = {&policy_full,      &policy_morphkv, &policy_tova,     &policy_h2o,
                                           &policy_streaming, &policy_keydiff, &policy_lagkv,    &policy_topk,
                                           &policy_quest,     &policy_sparq,   &policy_rocketkv, &policy_rocketkv_mt};
const size_t policy_kind_count = sizeof policy_kinds / sizeof *policy_kinds;

const spec_row *policy_spec(const policy_kind *kind)
{
    return &kind->spec;
}

const char *policy_summary(const policy_kind *kind)
{
    return kind->summary;
}

static const spec_row *policy_row(size_t i)
{
    return i < policy_kind_count ? &policy_kinds[i]->spec : NULL;
}

static const spec_list POLICIES = {"policy", policy_row, NULL};

kvb_status policy_parse(policy *out, const char *text, kvb_error *err)
{
    size_t row;
    *out = (policy){0};
    kvb_status status = spec_read(&POLICIES, text, 0, strlen(text), &row, &out->set, err);
    if (status != KVB_OK) return status;
    out->kind = policy_kinds[row];
    if (out->kind->metric) status = metric_parse(&out->scores, out->kind->metric, err);
    return status == KVB_OK ? spec_write_all(out->spec, sizeof out->spec, &POLICIES, &out->kind->spec, &out->set, err)
                            : status;
}

bool policy_reads_blocks(const policy *p)
{
    return p->kind->reads_blocks && p->kind->reads_blocks(p);
}

uint32_t policy_largest_block(const policy *p)
{
    if (!policy_reads_blocks(p)) return 0;
    uint32_t first = p->kind->block(p, 0), next = p->kind->block(p, first);
    return first > next ? first : next;
}

uint32_t policy_best(const float *scores, uint32_t n, uint32_t keep, uint32_t sinks, uint32_t recent, uint32_t *out)
{
    kvb_select(scores, n, keep, sinks, recent, out, n, NULL);
    return keep < n ? keep : n;
}

void policy_group_rows(float *out, float *scratch, const layer_view *view, uint32_t g, uint32_t first, uint32_t n)
{
    uint32_t group = view->n_heads / view->n_kv_heads;
    attention_rows(out, view, g * group, first, n);
    for (uint32_t h = 1; h < group; h++) {
        attention_rows(scratch, view, g * group + h, first, n);
        for (size_t i = 0; i < (size_t)n * view->n_tokens; i++) out[i] += scratch[i];
    }
}

kvb_status policy_new_turn(policy_head *h, kv_span span, kvb_error *err)
{
    return h->p->kind->turn ? h->p->kind->turn(h, span, err) : KVB_OK;
}

// ---- Nothing evicted ----

static kvb_status keep_all(policy_head *h, const layer_view *view, const float *scores, uint32_t *keep,
                           uint32_t *n_keep, kvb_error *err)
{
    (void)h, (void)scores, (void)err;
    for (uint32_t i = 0; i < view->n_tokens; i++) keep[i] = i;
    *n_keep = view->n_tokens;
    return KVB_OK;
}

const policy_kind policy_full = {.spec = {.name = "full"}, .summary = "the whole cache", .prefill = keep_all};
