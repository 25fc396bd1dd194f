// The directory layout of the published LU-KV pipeline, one .npy per array, to and from a record:
//   DIR/context_<id>/<metric>.npy, question_<i>.npy         [L,G,T] float32
//   DIR/context_<id>/context_ids.npy, answer_ids_<i>.npy, suffix_ids_<i>.npy   integers; optional when read
//   DIR/kvbudget.json                                       what the arrays do not hold; optional when read
// Metric files: snapkv.npy is `snapkv:lukv`, ea.npy is `ea:lukv`, keydiff.npy is `keydiff`; other files have the
// metric's name.
#pragma once
#include "formats/record.h"

// Makes `dir`, which must be empty or not exist. One array is in memory at a time.
kvb_status lukv_steps_export(record *r, const char *dir, kvb_error *err);

typedef struct lukv_steps_options {
    uint32_t n_heads, head_dim; // 0: taken from kvbudget.json, or unknown
    uint32_t n_queries;         // of questions with neither kvbudget.json nor answer_ids_<i>.npy; 0: 63, the published
                                // number
    const cJSON *attributes;    // flat object; added to those in kvbudget.json, replacing equal names; may be NULL
    record_start start;         // what to do if the record exists
    // Sets the protected tokens of a metric; for an unknown metric it must leave them as they are, 4 and 1. NULL: every
    // metric is unknown.
    void (*protect)(const char *metric, uint32_t *sink, uint32_t *window);
} lukv_steps_options;

// Writes the record `record_path` from a directory. Contexts are in the order of kvbudget.json, or else by name
// (numbers as numbers).
kvb_status lukv_steps_import(const char *dir, const char *record_path, const lukv_steps_options *options,
                             kvb_error *err);
