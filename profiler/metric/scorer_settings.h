// What each eviction metric can be told; the rows of parameters stand with the scorers, which say what a field means.
#pragma once
#include <stdbool.h>
#include <stdint.h>

typedef enum key_anchor { ANCHOR_MEAN, ANCHOR_RAW, ANCHOR_MEDIAN } key_anchor;
typedef enum key_similarity { SIMILARITY_COS, SIMILARITY_DOT, SIMILARITY_EUCLID } key_similarity;
typedef enum lag_mode { LAG_NEXT, LAG_LOCAL, LAG_L2NORM } lag_mode;
typedef enum row_fusion { FUSION_SUM, FUSION_MAX } row_fusion;
typedef enum tova_scope { SCOPE_OF_LAYER, SCOPE_OF_GROUP } tova_scope;

typedef struct snapkv_settings {
    uint32_t window, kernel;
    bool max_pool, group_first, group_max;
} snapkv_settings;

typedef struct rocketkv_settings {
    uint32_t window, kernel;
} rocketkv_settings;

typedef struct keydiff_settings {
    key_anchor anchor;
    key_similarity similarity;
} keydiff_settings;

typedef struct ea_settings {
    uint32_t future, sinks;
    double epsilon;
    bool covariance, value_norm, sinks_in_softmax, stored;
} ea_settings;

typedef struct lagkv_settings {
    uint32_t sink, lag;
    lag_mode mode;
    bool cross;
    double lambda;
} lagkv_settings;

typedef struct morphkv_settings {
    uint32_t window;
    row_fusion fusion;
} morphkv_settings;

typedef struct h2o_settings {
    uint32_t window;
} h2o_settings;

typedef struct tova_settings {
    tova_scope scope;
} tova_settings;

typedef struct streaming_settings {
    uint32_t sinks;
} streaming_settings;

typedef struct random_settings {
    uint64_t seed;
} random_settings;

typedef struct critical_settings {
    double share, epsilon;
} critical_settings;

// Not a parameter: the ranking that the metric is (learned.h).
typedef struct learned_settings {
    const struct learned_ranking *ranking;
    uint32_t fold; // whose weights; 0: those that are fitted on all texts
} learned_settings;

// Those of one metric; which member is meant, its scorer knows.
typedef union scorer_settings {
    snapkv_settings snapkv;
    rocketkv_settings rocketkv;
    keydiff_settings keydiff;
    ea_settings ea;
    lagkv_settings lagkv;
    morphkv_settings morphkv;
    h2o_settings h2o;
    tova_settings tova;
    streaming_settings streaming;
    random_settings random;
    critical_settings critical;
    learned_settings learned;
} scorer_settings;
