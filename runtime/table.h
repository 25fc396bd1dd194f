// A table in memory. Written once by kvb_table_open*, read by everything else; not part of the public API.
#pragma once
#include "kvbudget.h"
#include "limits.h"
#include "rank.h"

#define KVB_TABLE_ROWS 99 // rows of a table with one for every per cent, and the most that any table has

struct kvb_table {
    kvb_info info;
    const double *prune_ratio, *std;                                            // [R, L, G], inside `numbers`
    const double *ratio, *loss, *lower_bound, *lambda, *table_loss, *effective; // [R], inside `numbers`
    unsigned char saturated[KVB_TABLE_ROWS];                                    // 0 or 1
    uint8_t *formats;             // [R, L, G, 2] kvb_packing of keys and values; NULL in version 1
    double *numbers;              // all f64 tensors, one allocation
    uint32_t *calibration_tokens; // info.calibration_tokens
    const double *budgeted;  // [R, B, G] prune ratios of the layers that are budgeted; prune_ratio itself if all are
    double *budgeted_memory; // owns `budgeted`; NULL if all are
    double *costs;           // [R, B, G] what a token costs in a head's formats, as a share of bfloat16; NULL without
    uint8_t *bounded;        // info.bounded
    kvb_limits limits;       // what the metadata "constraints" demand of the layers that are budgeted
    bool limited;            // whether there are any
    kvb_ranking *ranking;    // NULL: the metric is a plain one
    bool per_cent;           // row i is ratio (i + 1) / 100
    struct cJSON *files;     // metadata "model_files", hashes by name; NULL: there is none
    struct cJSON *header;    // owns every string of info
    char name[168];          // the file, for messages
};

// Whether two hashes in hexadecimal are equal, ignoring case. Unlike strcasecmp it ignores the locale.
bool kvb_same_hash(const char *a, const char *b);
