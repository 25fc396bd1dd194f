// Which weights a table was made with: the files' hashes, and their name at Hugging Face.
#include "fail.h"
#include "json.h"
#include "safetensors.h"
#include "table.h"
#include <cjson/cJSON.h>
#include <string.h>

static const char files_key[] = "model_files";

kvb_status kvb_table_read_files(kvb_table *t, kvb_error *err)
{
    const char *text = kvb_safetensors_metadata(t->header, files_key);
    const cJSON *file;
    kvb_status status;
    if (!text) return KVB_OK;
    status = kvb_json_object(&t->files, text, strlen(text), t->name, "metadata \"model_files\"", err);
    if (status) return status;
    cJSON_ArrayForEach(file, t->files)
    {
        const char *hash = cJSON_IsString(file) ? file->valuestring : "";
        if (strlen(hash) != 64 || strspn(hash, "0123456789abcdefABCDEF") != 64) {
            return kvb_fail(err, KVB_FORMAT,
                            "%s: metadata \"%s\": file \"%.80s\": expected 64 hexadecimal digits, found \"%.70s\"",
                            t->name, files_key, file->string, hash);
        }
    }
    return KVB_OK;
}

static kvb_status check_text(const kvb_table *t, const char *key, const char *expected, kvb_error *err)
{
    const char *found = kvb_safetensors_metadata(t->header, key);
    if (!expected || (*expected && found && strcmp(expected, found) == 0)) return KVB_OK;
    return kvb_fail(err, KVB_MISMATCH, "%s: %s: expected %.100s, the table says %.100s; it was made for other weights",
                    t->name, key, *expected ? expected : "a name, got none", found && *found ? found : "nothing");
}

static uint32_t count_in_table(const kvb_table *t, const char *sha256)
{
    const cJSON *file;
    uint32_t n = 0;
    cJSON_ArrayForEach(file, t->files) n += kvb_same_hash(file->valuestring, sha256);
    return n;
}

static kvb_status check_files(const kvb_table *t, const kvb_weights *mine, kvb_error *err)
{
    const char *container = kvb_safetensors_metadata(t->header, "model_container");
    uint32_t n_files = 0;
    const cJSON *file;
    cJSON_ArrayForEach(file, t->files) n_files++;
    if (n_files != mine->n_files) {
        return kvb_fail(err, KVB_MISMATCH,
                        "%s: %s: expected the hashes of %u files, the table has %u (container: %.20s); hash every file "
                        "that holds weights, and compare names (hf_id) where the container is another",
                        t->name, files_key, (unsigned)mine->n_files, (unsigned)n_files,
                        container ? container : "not known");
    }
    // Every hash as often as in the table: {a, a} are not the files {a, b}.
    for (uint32_t i = 0; i < mine->n_files; i++) {
        const char *hash = mine->file_sha256[i];
        uint32_t here = 0, there = hash ? count_in_table(t, hash) : 0;
        if (!hash) return kvb_fail(err, KVB_ARGUMENT, "kvb_table_check_weights: file %u: no hash", (unsigned)i);
        for (uint32_t j = 0; j <= i; j++) here += kvb_same_hash(mine->file_sha256[j], hash);
        if (here <= there) continue;
        return kvb_fail(err, KVB_MISMATCH,
                        "%s: %s: file %u has SHA-256 %.64s, as %u of those given have, and %u of the table's %u "
                        "(container: %.20s); it was made for other weights",
                        t->name, files_key, (unsigned)i, hash, (unsigned)here, (unsigned)there, (unsigned)n_files,
                        container ? container : "not known");
    }
    return KVB_OK;
}

kvb_status kvb_table_check_weights(const kvb_table *table, const kvb_weights *mine, kvb_error *err)
{
    kvb_status status;
    if (!table || !mine || (mine->n_files && !mine->file_sha256)) {
        return kvb_fail(err, KVB_ARGUMENT,
                        "kvb_table_check_weights: table, mine and its list of hashes must not be NULL");
    }
    status = mine->n_files ? check_files(table, mine, err) : KVB_OK;
    if (!status) status = check_text(table, "hf_id", mine->hf_id, err);
    return status ? status : check_text(table, "hf_revision", mine->hf_revision, err);
}
