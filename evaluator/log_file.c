#include "evaluator/log_file.h"
#include "formats/file_read.h"
#include "runtime/fail.h"
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
};

// ---- Reading ----

kvb_status log_parse(const char *text, size_t size, const char *path, const log_reader *reader, kvb_error *err)
{
    uint32_t number = 1;
    for (size_t at = 0; at < size; number++) {
        const char *newline = memchr(text + at, '\n', size - at);
        if (!newline) break; // cut short by a kill
        size_t n = (size_t)(newline - text) - at;
        cJSON *line = cJSON_ParseWithLength(text + at, n);
        kvb_status status = reader->take(reader->context, line, path, number, err);
        cJSON_Delete(line);
        if (status != KVB_OK) return status;
        at += n + 1;
    }
    return KVB_OK;
}

kvb_status log_read(const char *path, const log_reader *reader, kvb_error *err)
{
    struct stat st;
    if (stat(path, &st) != 0 && errno == ENOENT) return KVB_OK;
    if (S_ISREG(st.st_mode) && st.st_size == 0) return KVB_OK;
    file_view view;
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    status = log_parse((const char *)view.data, view.size, path, reader, err);
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
        if (got != (ssize_t)n) return -1;
        for (size_t i = n; i > 0; i--)
            if (block[i - 1] == '\n') return size - (off_t)(n - i);
        size -= (off_t)n;
    }
    return 0;
}

kvb_status log_open(log_file **out, const char *path, kvb_error *err)
{
    *out = NULL;
    log_file *log = calloc(1, sizeof *log);
    if (!log || !(log->path = strdup(path))) {
        free(log);
        return kvb_fail(err, KVB_MEMORY, "%s: no memory", path);
    }
    log->file = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    struct stat st;
    off_t whole = -1;
    if (log->file >= 0 && fstat(log->file, &st) == 0 && S_ISREG(st.st_mode)) whole = whole_lines(log->file, st.st_size);
    if (whole < 0 || (whole < st.st_size && ftruncate(log->file, whole) != 0)) {
        kvb_status status = kvb_fail(err, KVB_IO, "%s: cannot be written: %s", path, strerror(errno));
        log_close(log);
        return status;
    }
    *out = log;
    return KVB_OK;
}

void log_close(log_file *log)
{
    if (!log) return;
    if (log->file >= 0) close(log->file);
    free(log->path);
    free(log);
}

bool log_put_numbers(cJSON *line, const char *name, const double *x, uint32_t n)
{
    cJSON *list = cJSON_CreateDoubleArray(x, (int)n); // prints NaN as null
    if (list && cJSON_AddItemToObject(line, name, list)) return true;
    cJSON_Delete(list);
    return false;
}

kvb_status log_add(log_file *log, const cJSON *line, kvb_error *err)
{
    char *text = line ? cJSON_PrintUnformatted(line) : NULL;
    size_t length = text ? strlen(text) : 0;
    kvb_status status = text ? KVB_OK : kvb_fail(err, KVB_MEMORY, "%s: no memory for a line", log->path);
    if (text) text[length] = '\n'; // in place of the end: one write, so that a line is whole or cut at its end
    if (text && (write(log->file, text, length + 1) != (ssize_t)(length + 1) || fdatasync(log->file) != 0))
        status = kvb_fail(err, KVB_IO, "%s: cannot be written: %s", log->path, strerror(errno));
    cJSON_free(text);
    return status;
}
