// The directory layout of the published LU-KV pipeline, one .npy per array, to and from a record:
//   DIR/context_<id>/<metric>.npy, question_<i>.npy         [L,G,T] float32
//   DIR/context_<id>/context_ids.npy, answer_ids_<i>.npy, suffix_ids_<i>.npy   integers; optional when read
//   DIR/kvbudget.json                                       what the arrays do not tell; optional when read
// Metric files: snapkv.npy is `snapkv:lukv`, ea.npy is `ea:lukv`, keydiff.npy is `keydiff`; any other name stands for
// itself.
#pragma once
#include "formats/record.h"

// Makes `dir`, which must not exist or be empty. One array is in memory at a time.
kvb_status lukv_steps_export(record *r, const char *dir, kvb_error *err);

typedef struct lukv_steps_options {
    uint32_t n_heads, head_dim; // 0: from kvbudget.json, else unknown
    uint32_t n_queries;      // of questions with neither kvbudget.json nor answer_ids_<i>.npy; 0: 63, what is published
    const cJSON *attributes; // flat object; added to those in kvbudget.json, replacing equal names; may be NULL
    record_start start;      // what to do about a record that is there
} lukv_steps_options;

// Writes the record `record_path` from a directory. Contexts in the order of kvbudget.json, else by name (numbers as
// numbers).
kvb_status lukv_steps_import(const char *dir, const char *record_path, const lukv_steps_options *options,
                             kvb_error *err);

// ---- Names of the files ----

// "snapkv:lukv" -> "snapkv.npy"; the name must be a valid metric name.
void lukv_metric_file(char *out, size_t size, const char *metric);
// "snapkv.npy" -> "snapkv:lukv"; what lukv_metric_file changes beyond the two published names cannot be undone.
void lukv_metric_name(char *out, size_t size, const char *file);

// The tokens that the published solver keeps whatever their score: 4 sinks, and for SnapKV the 32 queries that vote.
void lukv_metric_protected(const char *metric, uint32_t *sink, uint32_t *window);

typedef enum lukv_kind { LUKV_OTHER, LUKV_METRIC, LUKV_TOKENS, LUKV_ORACLE, LUKV_SUFFIX, LUKV_ANSWER } lukv_kind;

// What a file of a context's folder is, by its name; *question receives the number of the last three kinds.
lukv_kind lukv_classify(const char *file, uint32_t *question);

// DIR/context_<id>/<file>, formatted as printf does; malloc'd.
char *lukv_path(const char *dir, const char *id, const char *format, ...) __attribute__((format(printf, 3, 4)));
