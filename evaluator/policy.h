// What acts on a cache while tokens are generated: policies that evict at every step, and policies that look at a part
// of the cache.
//
// A policy is written `name[:parameter=value...]`. What a policy may keep
// (or fetch, where it evicts nothing) is one number per KV head, its capacity: the same for all heads as published, or
// a table's.
#pragma once
#include "profiler/metric/scorer.h"

enum { POLICY_SPEC_MAX = 192 };

typedef struct policy_kind policy_kind;

// What each policy can be told; the rows of parameters stand with the policies, which say what a field means.
typedef enum policy_reading { READS_WHOLE, READS_BLOCKS } policy_reading;

typedef union policy_settings {
    struct policy_morphkv_settings {
        uint32_t window;
        uint32_t fusion; // a row_fusion (scorer_parts.h)
    } morphkv;
    struct policy_h2o_settings {
        double recent;
    } h2o;
    struct policy_streaming_settings {
        uint32_t sinks;
    } streaming;
    struct policy_keydiff_settings {
        uint32_t block;
        double window;
        policy_reading prefill;
    } keydiff;
    struct policy_lagkv_settings {
        uint32_t lag, sink;
        double keep, lambda;
        policy_reading prefill;
    } lagkv;
    struct policy_quest_settings {
        uint32_t page;
    } quest;
    struct policy_sparq_settings {
        uint32_t channels;
    } sparq;
    struct policy_rocketkv_mt_settings {
        uint32_t window;
    } rocketkv_mt;
} policy_settings;

typedef struct policy {
    const policy_kind *kind;
    char spec[POLICY_SPEC_MAX]; // canonical text
    policy_settings set;
    metric scores; // that rank tokens, after the prefill or at every step; kind NULL where the policy has its own way
} policy;

extern const policy_kind *const policy_kinds[];
extern const size_t policy_kind_count;
const spec_row *policy_spec(const policy_kind *kind); // name and parameters
const char *policy_summary(const policy_kind *kind);

// Reads a policy; the message of KVB_ARGUMENT lists what there is.
kvb_status policy_parse(policy *out, const char *text, kvb_error *err);

// Whether the prompt itself goes through the model in blocks, over what was kept of those before, so that later tokens
// never see what was evicted; otherwise it is prefilled with full attention. And the most tokens of a block, 0 without
// blocks.
bool policy_reads_blocks(const policy *p);
uint32_t policy_largest_block(const policy *p);

// The pruned ratio at which capacities are to be computed, when `ratio` of a context's cache traffic is to be saved:
// ratio itself, but for RocketKV, whose first stage evicts less, by the split rule of methods.md 3.6, and whose second
// stage saves the rest.
double policy_capacity_ratio(const policy *p, double ratio);
