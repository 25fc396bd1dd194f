#include "evaluator/task_log.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

typedef struct task_known {
    char key[65];
    task_result result;
} task_known;

static kvb_status take_line(void *context, const cJSON *line, const char *path, uint32_t number, kvb_error *err)
{
    task_log *log = context;
    const cJSON *key = cJSON_GetObjectItemCaseSensitive(line, "key"),
                *scores = cJSON_GetObjectItemCaseSensitive(line, "scores"),
                *looked = cJSON_GetObjectItemCaseSensitive(line, "looked");
    int n = cJSON_IsArray(scores) ? cJSON_GetArraySize(scores) : 0;
    task_result r = {.done = true,
                     .n_questions = (uint32_t)n,
                     .kept = log_number(line, "kept"),
                     .looked = log_number(line, "looked")};
    bool good = cJSON_IsString(key) && strlen(key->valuestring) == 64 && n > 0 && n <= TASK_MAX_QUESTIONS &&
                r.kept >= 0 && (cJSON_IsNull(looked) || r.looked >= 0);
    r.scores = good ? calloc((size_t)n, sizeof *r.scores) : NULL;
    if (good && !r.scores) return kvb_fail(err, KVB_MEMORY, "%s: no memory for its results", path);
    good = good && log_numbers(r.scores, (uint32_t)n, line, "scores", false);
    task_known *more = good ? realloc(log->known, (log->n_known + 1) * sizeof *more) : NULL;
    if (!more) {
        free(r.scores);
        if (good) return kvb_fail(err, KVB_MEMORY, "%s: no memory for its results", path);
        return kvb_fail(err, KVB_FORMAT, "%s: line %u is not a result of kvbudget task; name another file", path,
                        number);
    }
    log->known = more;
    memcpy(more[log->n_known].key, key->valuestring, 65);
    more[log->n_known++].result = r;
    return KVB_OK;
}

static int compare_keys(const void *a, const void *b)
{
    return strcmp(((const task_known *)a)->key, ((const task_known *)b)->key);
}

static void sort_known(task_log *log)
{
    if (log->n_known) qsort(log->known, log->n_known, sizeof *log->known, compare_keys);
}

kvb_status task_log_parse(task_log *log, const char *text, size_t size, const char *path, kvb_error *err)
{
    const log_reader reader = {take_line, log};
    kvb_status status = log_parse(text, size, path, &reader, err);
    sort_known(log);
    return status;
}

kvb_status task_log_open(task_log *log, const char *path, kvb_error *err)
{
    const log_reader reader = {take_line, log};
    *log = (task_log){.path = path};
    if (!path) return KVB_OK;
    kvb_status status = log_read(path, &reader, err);
    sort_known(log);
    return status == KVB_OK ? log_open(&log->file, path, err) : status;
}

void task_log_close(task_log *log)
{
    for (size_t i = 0; i < log->n_known; i++) free(log->known[i].result.scores);
    free(log->known);
    (void)log_close(log->file, KVB_OK, NULL); // every line was synced when it was added
    *log = (task_log){0};
}

bool task_log_take(task_log *log, const char *key, task_result *out)
{
    task_known wanted = {0};
    memcpy(wanted.key, key, sizeof wanted.key);
    task_known *found = log->n_known ? bsearch(&wanted, log->known, log->n_known, sizeof wanted, compare_keys) : NULL;
    if (!found || !found->result.scores) return false;
    *out = found->result;
    found->result.scores = NULL;
    return true;
}

kvb_status task_log_add(task_log *log, const char *key, const task_result *r, cJSON *about, kvb_error *err)
{
    if (!log->file) return KVB_OK;
    if (cJSON_AddStringToObject(about, "key", key) && log_put_number(about, "kept", r->kept) &&
        log_put_number(about, "looked", r->looked) && // NaN becomes null
        log_put_numbers(about, "scores", r->scores, r->n_questions))
        return log_add(log->file, about, err);
    return kvb_fail(err, KVB_MEMORY, "%s: no memory for a line", log->path);
}
