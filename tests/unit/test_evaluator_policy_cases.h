// A KV head under a policy, without a run: for the tests of policies.
#pragma once
#include "evaluator/policy_parts.h"
#include "test_profiler_cases.h"

enum { ROOM = 512, D = 8 };

// A head with the state that a run would give it.
typedef struct rig {
    policy p;
    policy_head h;
    uint32_t keep[32768], n;
} rig;

static inline rig *open_rig(const char *spec, uint32_t capacity, uint32_t n_context, uint32_t room, uint32_t group,
                            uint32_t d)
{
    rig *r = calloc(1, sizeof *r);
    help_ok(policy_parse(&r->p, spec, err));
    r->h = (policy_head){
        .p = &r->p, .group = group, .head_dim = d, .capacity = capacity, .n_context = n_context, .room = room};
    r->h.memory = case_alloc(r->p.kind->floats ? r->p.kind->floats(&r->h) : 1, sizeof(float));
    r->h.marks = case_alloc(room, sizeof(uint32_t));
    return r;
}

static inline void close_rig(rig *r)
{
    free(r->h.memory);
    free(r->h.marks);
    free(r);
}

static inline layer_view view_of(const float *q, const float *k, const float *v, uint32_t T, uint32_t n_queries,
                                 uint32_t group, uint32_t d)
{
    return (layer_view){.n_tokens = T,
                        .n_heads = group,
                        .n_kv_heads = 1,
                        .head_dim = d,
                        .q = q,
                        .k = k,
                        .v = v,
                        .n_queries = n_queries};
}

static inline void prefill(rig *r, const layer_view *view)
{
    help_ok(r->p.kind->prefill(&r->h, view, NULL, r->keep, &r->n, err));
}

static inline void evict(rig *r, uint32_t count)
{
    help_ok(r->p.kind->evict(&r->h, (kv_span){.count = count}, r->keep, &r->n, err));
}
