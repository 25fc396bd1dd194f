#include "evaluator/log_file.h"
#include "formats/file_io.h"
#include "formats/file_read.h"
#include "formats/json_file.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct log_file {
    char *path;
    int file;
    off_t size; // of the lines that are whole
};

// ---- Reading ----

kvb_status log_parse(const char *text, size_t size, const char *path, const log_reader *reader, kvb_error *err)
{
    uint32_t number = 1;
    for (size_t at = 0; at < size; number++) {
        const char *newline = memchr(text + at, '\n', size - at);
        if (!newline) break; // cut short by a kill
        size_t n = (size_t)(newline - text) - at;
        bool no_memory;
        cJSON *line = kvb_json_parse(text + at, n, NULL, &no_memory);
        if (no_memory) return kvb_fail(err, KVB_MEMORY, "%s: line %u: not enough memory", path, number);
        kvb_status status = reader->take(reader->context, line, path, number, err);
        cJSON_Delete(line);
        if (status != KVB_OK) return status;
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
        bool whole;
        status = json_line_holds(&whole, text, n, err);
        if (status == KVB_OK && !whole)
            status = kvb_fail(err, KVB_FORMAT,
                              "%s: line %u: expected a result that ends with its checksum (sha256), found a damaged "
                              "line, or one of another program; remove the line, and it is measured again, or the file",
                              path, number);
        text = newline + 1;
        size -= n + 1;
    }
    return status;
}

kvb_status log_read(const char *path, const log_reader *reader, kvb_error *err)
{
    struct stat st;
    if (stat(path, &st) != 0 && errno == ENOENT) return KVB_OK;
    if (S_ISREG(st.st_mode) && st.st_size == 0) return KVB_OK;
    file_view view;
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    status = check_lines((const char *)view.data, view.size, path, err);
    if (status == KVB_OK) status = log_parse((const char *)view.data, view.size, path, reader, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    file_unmap(&view);
    return status;
}

double log_number(const cJSON *line, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, name);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

bool log_numbers(double *out, uint32_t n, const cJSON *line, const char *name, bool gaps)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(line, name), *item;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != (int)n) return false;
    uint32_t i = 0;
    cJSON_ArrayForEach(item, list)
    {
        bool gap = gaps && cJSON_IsNull(item);
        if (!gap && (!cJSON_IsNumber(item) || !isfinite(item->valuedouble))) return false;
        out[i++] = gap ? NAN : item->valuedouble;
    }
    return true;
}

// ---- Writing ----

// Length of the file up to and with its last line end.
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

// Two runs with one log would measure everything twice, and each count the other's lines as its own.
static kvb_status begin_adding(log_file *log, kvb_error *err)
{
    struct stat st = {0};
    log->file = file_open(log->path, O_RDWR | O_CREAT | O_APPEND, 0666);
    if (log->file >= 0 && !file_lock(log->file, false))
        return kvb_fail(err, KVB_IO, "%s: another process is writing it; wait for it or stop it", log->path);
    bool good = log->file >= 0 && fstat(log->file, &st) == 0;
    if (good && !S_ISREG(st.st_mode)) return kvb_fail(err, KVB_ARGUMENT, "%s: is no file, expected one", log->path);
    log->size = good ? whole_lines(log->file, st.st_size) : -1;
    if (log->size >= 0 && (log->size == st.st_size || file_truncate(log->file, log->size))) return KVB_OK;
    return kvb_fail(err, KVB_IO, "%s: cannot be written: %s", log->path, strerror(errno));
}

kvb_status log_open(log_file **out, const char *path, kvb_error *err)
{
    *out = NULL;
    log_file *log = calloc(1, sizeof *log);
    if (!log || !(log->path = strdup(path))) {
        free(log);
        return kvb_fail(err, KVB_MEMORY, "%s: no memory", path);
    }
    kvb_status status = begin_adding(log, err);
    if (status == KVB_OK) *out = log;
    else (void)log_close(log, status, NULL);
    return status;
}

kvb_status log_close(log_file *log, kvb_status status, kvb_error *err)
{
    if (!log) return status;
    if (log->file >= 0 && !file_close(log->file) && status == KVB_OK)
        status = kvb_fail(err, KVB_IO, "%s: cannot be closed: %s", log->path, strerror(errno));
    free(log->path);
    free(log);
    return status;
}

bool log_put_number(cJSON *line, const char *name, double x)
{
    return json_add_exact(line, name, x);
}

bool log_put_numbers(cJSON *line, const char *name, const double *x, uint32_t n)
{
    cJSON *list = cJSON_AddArrayToObject(line, name);
    bool good = list != NULL;
    for (uint32_t i = 0; good && i < n; i++) good = cJSON_AddItemToArray(list, json_exact(x[i]));
    return good;
}

kvb_status log_add(log_file *log, const cJSON *line, kvb_error *err)
{
    char *text;
    kvb_status status = json_sealed_line(&text, line, err);
    size_t length = text ? strlen(text) : 0;
    if (status == KVB_OK && !(file_write_all(log->file, text, length) && file_sync(log->file))) {
        status = kvb_fail(err, KVB_IO, "%s: cannot be written: %s", log->path, strerror(errno));
        (void)file_truncate(log->file, log->size); // half a line: also dropped on reading
    } else if (status == KVB_OK) {
        log->size += (off_t)length;
    }
    free(text);
    return status;
}
