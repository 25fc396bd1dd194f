#include "evaluator/log_file.h"
#include "formats/file_io.h"
#include "formats/file_read.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct log_entry {
    char key[LOG_KEY];
    uint32_t number; // of the line in the file, from 1; 0: added by this run
    cJSON *line;
} log_entry;

struct log_file {
    char *path; // NULL: in memory only
    int file;
    off_t size; // bytes of all complete lines
    void *tree; // of log_entry, by key (POSIX tsearch)
};

// ---- In memory ----

static int compare_entries(const void *a, const void *b)
{
    return strcmp(((const log_entry *)a)->key, ((const log_entry *)b)->key);
}

static void free_entry(void *entry)
{
    cJSON_Delete(((log_entry *)entry)->line);
    free(entry);
}

// Takes ownership of the line and returns true if it is a result, an object with a key.
static bool remember(log_file *log, cJSON *line, uint32_t number)
{
    const char *key = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(line, "key"));
    if (!key || strlen(key) != LOG_KEY - 1 || strspn(key, "0123456789abcdef") != LOG_KEY - 1) return false;
    log_entry *entry = need(1, sizeof *entry, "results");
    memcpy(entry->key, key, LOG_KEY);
    entry->number = number;
    entry->line = line;
    void *found = needed(tsearch(entry, &log->tree, compare_entries), "results");
    if (*(log_entry **)found != entry) free_entry(entry); // already known: an equal key means an equal result
    return true;
}

static const log_entry *find_entry(const log_file *log, const char *key)
{
    log_entry wanted;
    memcpy(wanted.key, key, LOG_KEY);
    void *found = log ? tfind(&wanted, &log->tree, compare_entries) : NULL;
    return found ? *(log_entry **)found : NULL;
}

const cJSON *log_find(const log_file *log, const char *key)
{
    const log_entry *found = find_entry(log, key);
    return found ? found->line : NULL;
}

kvb_status log_refuse(const log_file *log, const char *key, kvb_error *err)
{
    return kvb_fail(err, KVB_FORMAT, "%s: line %u: a result with numbers missing; remove the line or the file",
                    log->path ? log->path : "results", find_entry(log, key)->number);
}

// ---- Reading ----

kvb_status log_parse(log_file *log, const char *text, size_t size, const char *path, kvb_error *err)
{
    uint32_t number = 1;
    for (size_t at = 0; at < size; number++) {
        const char *newline = memchr(text + at, '\n', size - at);
        if (!newline) break; // cut short by a kill
        size_t n = (size_t)(newline - text) - at;
        bool no_memory;
        cJSON *line = kvb_json_parse(text + at, n, NULL, &no_memory);
        if (no_memory) return kvb_fail(err, KVB_MEMORY, "%s: line %u: not enough memory", path, number);
        if (!remember(log, line, number)) {
            cJSON_Delete(line);
            return kvb_fail(err, KVB_FORMAT, "%s: line %u is not a result of this program; name another file", path,
                            number);
        }
        at += n + 1;
    }
    return KVB_OK;
}

static kvb_status check_lines(const char *text, size_t size, const char *path, kvb_error *err)
{
    const char *newline;
    kvb_status status = KVB_OK;
    for (uint32_t number = 1; status == KVB_OK && size > 0 && (newline = memchr(text, '\n', size)); number++) {
        size_t n = (size_t)(newline - text);
        if (!json_line_holds(text, n))
            status = kvb_fail(err, KVB_FORMAT,
                              "%s: line %u: expected a result that ends with its checksum (sha256), found a damaged "
                              "line, or one of another program; remove the line, and it is measured again, or the file",
                              path, number);
        text = newline + 1;
        size -= n + 1;
    }
    return status;
}

static kvb_status read_log(log_file *log, const char *path, kvb_error *err)
{
    struct stat st;
    if (stat(path, &st) != 0 && errno == ENOENT) return KVB_OK;
    if (S_ISREG(st.st_mode) && st.st_size == 0) return KVB_OK;
    file_view view;
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    status = check_lines((const char *)view.data, view.size, path, err);
    if (status == KVB_OK) status = log_parse(log, (const char *)view.data, view.size, path, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    file_unmap(&view);
    return status;
}

double log_number(const cJSON *line, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, name);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

bool log_numbers(double *out, uint32_t n, const cJSON *line, const char *name)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(line, name), *item;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != (int)n) return false;
    uint32_t i = 0;
    cJSON_ArrayForEach(item, list)
    {
        if (!cJSON_IsNumber(item) || !isfinite(item->valuedouble)) return false;
        out[i++] = item->valuedouble;
    }
    return true;
}

// ---- Writing ----

// Returns the length of the file up to and including its last newline, or -1 if it cannot be read.
static off_t whole_lines(int file, off_t size)
{
    char block[4096];
    while (size > 0) {
        size_t n = size < (off_t)sizeof block ? (size_t)size : sizeof block;
        ssize_t got = pread(file, block, n, size - (off_t)n);
        if (got < 0 && errno == EINTR) continue;
        if (got != (ssize_t)n) return -1; // cut short meanwhile, or damaged
        for (size_t i = n; i > 0; i--)
            if (block[i - 1] == '\n') return size - (off_t)(n - i);
        size -= (off_t)n;
    }
    return 0;
}

// Opens and locks the file: two runs with one log would measure everything twice. Cuts off an incomplete last line.
static kvb_status begin_adding(log_file *log, kvb_error *err)
{
    struct stat st = {0};
    log->file = file_open(log->path, O_RDWR | O_CREAT | O_APPEND, 0666);
    if (log->file >= 0 && !file_lock(log->file, false))
        return kvb_fail(err, KVB_IO, "%s: another process is writing it; wait for it or stop it", log->path);
    bool good = log->file >= 0 && fstat(log->file, &st) == 0;
    if (good && !S_ISREG(st.st_mode)) return kvb_fail(err, KVB_ARGUMENT, "%s: expected a regular file", log->path);
    log->size = good ? whole_lines(log->file, st.st_size) : -1;
    if (log->size >= 0 && (log->size == st.st_size || file_truncate(log->file, log->size))) return KVB_OK;
    return kvb_fail(err, KVB_IO, "%s: cannot be written: %s", log->path, strerror(errno));
}

kvb_status log_open(log_file **out, const char *path, kvb_error *err)
{
    log_file *log = need(1, sizeof *log, "results");
    *out = NULL;
    log->file = -1;
    log->path = path ? need_text("%s", path) : NULL;
    kvb_status status = path ? read_log(log, path, err) : KVB_OK;
    if (status == KVB_OK && path) status = begin_adding(log, err);
    if (status == KVB_OK) *out = log;
    else (void)log_close(log, status, NULL);
    return status;
}

kvb_status log_close(log_file *log, kvb_status status, kvb_error *err)
{
    if (!log) return status;
    if (log->file >= 0 && !file_close(log->file) && status == KVB_OK)
        status = kvb_fail(err, KVB_IO, "%s: cannot be closed: %s", log->path, strerror(errno));
    tdestroy(log->tree, free_entry);
    free_all(log->path, log);
    return status;
}

void log_put_number(cJSON *line, const char *name, double x)
{
    (void)json_add_exact(line, name, x);
}

void log_put_numbers(cJSON *line, const char *name, const double *x, uint32_t n)
{
    cJSON *list = cJSON_AddArrayToObject(line, name);
    for (uint32_t i = 0; i < n; i++) cJSON_AddItemToArray(list, json_exact(x[i]));
}

// Writes a line, and remembers what reading it again would give.
static kvb_status add_log_line(log_file *log, const cJSON *line, off_t *size, kvb_error *err)
{
    bool no_memory;
    char *text = json_sealed_line(line);
    size_t length = strlen(text);
    kvb_status status = KVB_OK;
    cJSON *read = kvb_json_parse(text, length, NULL, &no_memory);
    if (!remember(log, needed(read, "results"), 0)) cJSON_Delete(read);
    if (log->path && !file_write_all(log->file, text, length))
        status = kvb_fail(err, KVB_IO, "%s: cannot be written: %s", log->path, strerror(errno));
    *size += (off_t)length;
    free(text);
    return status;
}

kvb_status log_add(log_file *log, cJSON *const *lines, size_t n, kvb_error *err)
{
    off_t size = log->size;
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < n; i++) {
        if (status == KVB_OK) status = add_log_line(log, lines[i], &size, err);
        cJSON_Delete(lines[i]);
    }
    if (!log->path) return status;
    if (status == KVB_OK && !file_sync(log->file))
        status = kvb_fail(err, KVB_IO, "%s: cannot be written: %s", log->path, strerror(errno));
    if (status == KVB_OK) log->size = size;
    else (void)file_truncate(log->file, log->size); // half a line: also dropped on reading
    return status;
}
