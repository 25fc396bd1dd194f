// What the tests of formats/ share besides folders: metadata of tables.
#pragma once
#include "folder_help.h"
#include "formats/atomic_file.h"
#include "formats/file_read.h"
#include "formats/record.h"

// Returns metadata of a small model's table, which the caller frees. Members of the JSON object `changes` replace these
// or are added.
static inline cJSON *help_table_metadata(const char *changes)
{
    // clang-format off
    static const char *const pairs[] = {
        "format", "kvbudget-table", "format_version", "1", "tool_version", "0.1.0", "architecture", "llama",
        "model_id", "tiny", "model_sha256", "", "tokenizer_sha256", "", "n_layers", "2", "n_heads", "4",
        "n_kv_heads", "2", "head_dim", "16", "metric", "keydiff", "metric_parameters", "{}", "sink", "4",
        "window", "1", "scope", "global", "aggregate", "mean_loss", "hull", "feasible", "max_prune", "0.99",
        "calibration_tokens", "60", "n_contexts", "1", "n_questions", "1", "n_queries", "1,1",
        "calibration_sha256", "", "record_sha256", ""};
    // clang-format on
    cJSON *m = cJSON_CreateObject(), *other = cJSON_Parse(changes), *item = other->child;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i += 2)
        if (!cJSON_HasObjectItem(other, pairs[i])) cJSON_AddStringToObject(m, pairs[i], pairs[i + 1]);
    for (; item; item = item->next) cJSON_AddStringToObject(m, item->string, item->valuestring);
    cJSON_Delete(other);
    return m;
}
