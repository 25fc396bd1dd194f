// What acts on a cache while tokens are generated: policies that evict at every step, and policies that look at a part of the cache.
//
// A policy is written `name[:parameter=value...]`. What a policy may keep
// (or fetch, where it evicts nothing) is one number per KV head, its capacity: the same for all heads as published, or a table's.
#pragma once
#include "profiler/scorer.h"

enum { POLICY_MAX_PARAMETERS = 6, POLICY_SPEC_MAX = 192 };

typedef struct policy_kind policy_kind;

typedef struct policy {
    const policy_kind *kind;
    char spec[POLICY_SPEC_MAX]; // canonical text
    double values[POLICY_MAX_PARAMETERS];
    metric scores; // that rank the context's tokens after the prefill; kind NULL where the policy has its own way
} policy;

extern const policy_kind *const policy_kinds[];
extern const size_t policy_kind_count;
const char *policy_name(const policy_kind *kind);
const char *policy_summary(const policy_kind *kind);
const scorer_parameter *policy_parameters(const policy_kind *kind); // ended by a NULL name

// Reads a policy; the message of KVB_ARGUMENT lists what there is.
kvb_status policy_parse(policy *out, const char *text, kvb_error *err);
double policy_value(const policy *p, const char *parameter); // NaN when it has no such parameter

// Whether the prompt itself goes through the model in blocks, over what was kept of those before, so that later tokens never see what was
// evicted; otherwise it is prefilled with full attention. And the most tokens of a block, 0 without blocks.
bool policy_reads_blocks(const policy *p);
uint32_t policy_largest_block(const policy *p);

// The pruned ratio at which capacities are to be computed, when `ratio` of a context's cache traffic is to be saved: ratio itself, but for RocketKV,
// whose first stage evicts less, by the split rule of methods.md 3.6, and whose second stage saves the rest.
double policy_capacity_ratio(const policy *p, double ratio);
