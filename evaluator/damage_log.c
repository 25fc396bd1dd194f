#include "evaluator/damage_log.h"
#include "evaluator/log_file.h"
#include "runtime/fail.h"
#include <math.h>
#include <search.h>
#include <stdlib.h>
#include <string.h>

enum { LINE_MAX_VALUES = 1 << 20 };

typedef struct damage_entry {
    char key[DAMAGE_KEY];
    damage_value value;
} damage_entry;

struct damage_log {
    void *tree; // of damage_entry, by key (POSIX tsearch)
    log_file *file;
};

static int compare_entries(const void *a, const void *b)
{
    return strcmp(((const damage_entry *)a)->key, ((const damage_entry *)b)->key);
}

static kvb_status remember(damage_log *log, const char *key, const damage_value *value, kvb_error *err)
{
    damage_entry *entry = malloc(sizeof *entry);
    if (!entry) return kvb_fail(err, KVB_MEMORY, "no memory for a result");
    memcpy(entry->key, key, DAMAGE_KEY);
    entry->value = *value;
    void *found = tsearch(entry, &log->tree, compare_entries);
    if (!found || *(damage_entry **)found != entry) free(entry); // known already, and then the same
    return found ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for a result");
}

const damage_value *damage_log_find(const damage_log *log, const char *key)
{
    damage_entry wanted;
    memcpy(wanted.key, key, DAMAGE_KEY);
    void *found = tfind(&wanted, &log->tree, compare_entries);
    return found ? &(*(damage_entry **)found)->value : NULL;
}

// ---- Reading ----

static bool is_key(const cJSON *item)
{
    return cJSON_IsString(item) && strlen(item->valuestring) == DAMAGE_KEY - 1 &&
           strspn(item->valuestring, "0123456789abcdef") == DAMAGE_KEY - 1;
}

static kvb_status take_line(void *context, const cJSON *line, const char *path, uint32_t number, kvb_error *err)
{
    const cJSON *keys = cJSON_GetObjectItemCaseSensitive(line, "keys"), *item = keys ? keys->child : NULL;
    int n = cJSON_IsArray(keys) ? cJSON_GetArraySize(keys) : 0;
    if (n < 1 || n > LINE_MAX_VALUES)
        return kvb_fail(err, KVB_FORMAT, "%s: line %u is not a result of kvbudget refine; name another file", path,
                        number);
    double *values = malloc(3 * (size_t)n * sizeof *values);
    if (!values) return kvb_fail(err, KVB_MEMORY, "%s: no memory for %d results", path, n);
    uint32_t count = (uint32_t)n;
    bool good = log_numbers(values, count, line, "kl", false) && log_numbers(values + n, count, line, "flips", false) &&
                log_numbers(values + 2 * n, count, line, "nll", false);
    kvb_status status = KVB_OK;
    for (int i = 0; i < n && status == KVB_OK && (good = good && is_key(item)); i++, item = item->next) {
        damage_value value = {values[i], values[n + i], values[2 * n + i]};
        status = remember(context, item->valuestring, &value, err);
    }
    free(values);
    if (status == KVB_OK && !good)
        return kvb_fail(err, KVB_FORMAT, "%s: line %u: a result without all its numbers; remove the line or the file",
                        path, number);
    return status;
}

kvb_status damage_log_parse(damage_log *log, const char *text, size_t size, const char *path, kvb_error *err)
{
    const log_reader reader = {take_line, log};
    return log_parse(text, size, path, &reader, err);
}

kvb_status damage_log_open(damage_log **out, const char *path, kvb_error *err)
{
    *out = NULL;
    damage_log *log = calloc(1, sizeof *log);
    if (!log) return kvb_fail(err, KVB_MEMORY, "no memory for results");
    const log_reader reader = {take_line, log};
    kvb_status status = path ? log_read(path, &reader, err) : KVB_OK;
    if (status == KVB_OK && path) status = log_open(&log->file, path, err);
    if (status == KVB_OK) *out = log;
    else damage_log_close(log, status, NULL);
    return status;
}

kvb_status damage_log_close(damage_log *log, kvb_status status, kvb_error *err)
{
    if (!log) return status;
    status = log_close(log->file, status, err);
    tdestroy(log->tree, free);
    free(log);
    return status;
}

// ---- Writing ----

static cJSON *describe(const char (*keys)[DAMAGE_KEY], const damage_value *values, uint32_t n)
{
    cJSON *line = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(line, "keys");
    double *numbers = malloc(3 * (size_t)n * sizeof *numbers);
    bool good = list && numbers;
    for (uint32_t i = 0; i < n && good; i++) {
        good = cJSON_AddItemToArray(list, cJSON_CreateString(keys[i]));
        numbers[i] = values[i].kl;
        numbers[n + i] = values[i].flips;
        numbers[2 * (size_t)n + i] = values[i].nll;
    }
    good = good && log_put_numbers(line, "kl", numbers, n) && log_put_numbers(line, "flips", numbers + n, n) &&
           log_put_numbers(line, "nll", numbers + 2 * (size_t)n, n);
    free(numbers);
    if (good) return line;
    cJSON_Delete(line);
    return NULL;
}

kvb_status damage_log_add(damage_log *log, const char (*keys)[DAMAGE_KEY], const damage_value *values, uint32_t n,
                          kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; i < n && status == KVB_OK; i++) {
        if (!isfinite(values[i].kl) || !isfinite(values[i].nll))
            return kvb_fail(err, KVB_NUMERIC, "a cut cache gave logits that are no numbers");
        status = remember(log, keys[i], &values[i], err);
    }
    if (status != KVB_OK || !log->file || n == 0) return status;
    cJSON *line = describe(keys, values, n);
    status = log_add(log->file, line, err);
    cJSON_Delete(line);
    return status;
}
