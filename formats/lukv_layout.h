// File names and the side file of the lukv-steps directory, shared by its writer and its reader.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LUKV_SIDE_FILE "kvbudget.json"
#define LUKV_SIDE_FORMAT "kvbudget-lukv-steps"

// "snapkv:lukv" -> "snapkv.npy"; the name must be a valid metric name.
void lukv_metric_file(char *out, size_t size, const char *metric);
// "snapkv.npy" -> "snapkv:lukv"; what lukv_metric_file changes beyond the two published names cannot be undone.
void lukv_metric_name(char *out, size_t size, const char *file);

// The tokens that the published solver keeps whatever their score: 4 sinks, and for SnapKV the 32 queries that vote.
void lukv_metric_protected(const char *metric, uint32_t *sink, uint32_t *window);

typedef enum lukv_kind { LUKV_OTHER, LUKV_METRIC, LUKV_TOKENS, LUKV_ORACLE, LUKV_SUFFIX, LUKV_ANSWER } lukv_kind;

// What a file of a context's folder is, by its name; *question receives the number of the last three kinds.
lukv_kind lukv_classify(const char *file, uint32_t *question);

// DIR/context_<id>/<file>, formatted as printf does; malloc'd, NULL when memory is short.
char *lukv_path(const char *dir, const char *id, const char *format, ...) __attribute__((format(printf, 3, 4)));
