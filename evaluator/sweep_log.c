#include "evaluator/sweep_log.h"
#include "formats/file_read.h"
#include "runtime/fail.h"
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct sweep_log {
    char *path;
    int file;
};

// ---- Reading ----

static bool read_numbers(double *out, uint32_t n, const cJSON *list)
{
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != (int)n) return false;
    const cJSON *item;
    uint32_t i = 0;
    cJSON_ArrayForEach(item, list)
    {
        if (!cJSON_IsNumber(item) || !isfinite(item->valuedouble)) return false;
        out[i++] = item->valuedouble;
    }
    return true;
}

static double number_of(const cJSON *line, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, name);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

static kvb_status read_result(const sweep *s, fidelity_cell *c, const cJSON *line, const char *path, uint32_t number,
                              kvb_error *err)
{
    uint32_t n = s->o.n_next, L = s->m->config.n_layers;
    double *agree = calloc(n, sizeof *agree);
    c->kl = calloc(n, sizeof(double));
    c->nll = calloc(n, sizeof(double));
    c->agree = calloc(n, 1);
    c->output_error = calloc(L, sizeof(double));
    kvb_status status = KVB_OK;
    if (!agree || !c->kl || !c->nll || !c->agree || !c->output_error)
        status = kvb_fail(err, KVB_MEMORY, "%s: no memory for the results", path);
    const char *const names[] = {"kept", "bytes", "allocated", "effective_ratio", "loss", "seconds", "full_nll"};
    enum { VALUES = sizeof names / sizeof *names };
    double values[VALUES] = {0};
    bool good = status == KVB_OK;
    for (int i = 0; i < VALUES; i++) {
        values[i] = number_of(line, names[i]);
        good = good && isfinite(values[i]) && values[i] >= 0 && values[i] < 0x1p53;
    }
    good = good && read_numbers(c->kl, n, cJSON_GetObjectItemCaseSensitive(line, "kl")) &&
           read_numbers(c->nll, n - 1, cJSON_GetObjectItemCaseSensitive(line, "nll")) &&
           read_numbers(agree, n, cJSON_GetObjectItemCaseSensitive(line, "agree")) &&
           read_numbers(c->output_error, L, cJSON_GetObjectItemCaseSensitive(line, "output_error"));
    if (status == KVB_OK && !good)
        status = kvb_fail(err, KVB_FORMAT, "%s: line %u: a result without all its numbers; remove the line or the file",
                          path, number);
    if (status == KVB_OK) {
        for (uint32_t i = 0; i < n; i++) c->agree[i] = agree[i] != 0;
        c->kept = (uint64_t)values[0];
        c->bytes = (uint64_t)values[1];
        c->allocated = (uint64_t)values[2];
        c->ratio = values[3];
        c->loss = values[4];
        c->seconds = values[5];
        c->full_nll = values[6];
    } else {
        fidelity_cell_free(c);
    }
    free(agree);
    return status;
}

static kvb_status take_line(sweep *s, const cJSON *line, const char *path, uint32_t number, kvb_error *err)
{
    const cJSON *key = cJSON_GetObjectItemCaseSensitive(line, "key");
    if (!cJSON_IsString(key))
        return kvb_fail(err, KVB_FORMAT, "%s: line %u is not a result of kvbudget eval; name another file", path,
                        number);
    for (size_t i = 0; i < s->n_cells; i++) {
        sweep_cell *c = &s->cells[i];
        if (c->done || strcmp(c->key, key->valuestring) != 0) continue;
        kvb_status status = read_result(s, &c->result, line, path, number, err);
        if (status != KVB_OK) return status;
        c->done = c->resumed = true;
    }
    return KVB_OK;
}

kvb_status sweep_log_parse(sweep *s, const char *text, size_t size, const char *path, kvb_error *err)
{
    uint32_t number = 1;
    for (size_t at = 0; at < size; number++) {
        const char *newline = memchr(text + at, '\n', size - at);
        if (!newline) break; // cut short by a kill
        size_t n = (size_t)(newline - text) - at;
        cJSON *line = cJSON_ParseWithLength(text + at, n);
        kvb_status status = take_line(s, line, path, number, err);
        cJSON_Delete(line);
        if (status != KVB_OK) return status;
        at += n + 1;
    }
    return KVB_OK;
}

kvb_status sweep_log_read(sweep *s, kvb_error *err)
{
    struct stat st;
    if (stat(s->o.log, &st) != 0 && errno == ENOENT) return KVB_OK;
    if (S_ISREG(st.st_mode) && st.st_size == 0) return KVB_OK;
    file_view view;
    kvb_status status = file_map(&view, s->o.log, err);
    if (status != KVB_OK) return status;
    status = sweep_log_parse(s, (const char *)view.data, view.size, s->o.log, err);
    file_unmap(&view);
    return status;
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

kvb_status sweep_log_open(sweep_log **out, const char *path, kvb_error *err)
{
    *out = NULL;
    sweep_log *log = calloc(1, sizeof *log);
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
        sweep_log_close(log);
        return status;
    }
    *out = log;
    return KVB_OK;
}

void sweep_log_close(sweep_log *log)
{
    if (!log) return;
    if (log->file >= 0) close(log->file);
    free(log->path);
    free(log);
}

static bool add_numbers(cJSON *to, const char *name, const double *x, uint32_t n)
{
    cJSON *list = cJSON_CreateDoubleArray(x, (int)n);
    if (list && cJSON_AddItemToObject(to, name, list)) return true;
    cJSON_Delete(list);
    return false;
}

static cJSON *describe_cell(const sweep *s, const sweep_cell *c)
{
    const sweep_column *column = &s->columns[c->column];
    const sweep_metric *m = &s->metrics[column->metric];
    cJSON *line = cJSON_CreateObject();
    bool good = line && cJSON_AddStringToObject(line, "key", c->key) &&
                cJSON_AddStringToObject(line, "text", s->texts[c->text].name) &&
                cJSON_AddStringToObject(line, "metric", m->m.spec) &&
                cJSON_AddStringToObject(line, "allocator", column->how->label) &&
                cJSON_AddNumberToObject(line, "ratio", c->ratio) &&
                cJSON_AddNumberToObject(line, "sink", c->protect ? m->sink : 0) &&
                cJSON_AddNumberToObject(line, "window", c->protect ? m->window : 0);
    if (good) return line;
    cJSON_Delete(line);
    return NULL;
}

kvb_status sweep_log_add(sweep_log *log, const sweep *s, const sweep_cell *cell, kvb_error *err)
{
    const fidelity_cell *r = &cell->result;
    uint32_t n = s->o.n_next;
    cJSON *line = describe_cell(s, cell);
    double *agree = calloc(n, sizeof *agree);
    for (uint32_t i = 0; agree && i < n; i++) agree[i] = r->agree[i];
    bool good = line && agree && add_numbers(line, "agree", agree, n) &&
                cJSON_AddNumberToObject(line, "kept", (double)r->kept) &&
                cJSON_AddNumberToObject(line, "bytes", (double)r->bytes) &&
                cJSON_AddNumberToObject(line, "allocated", (double)r->allocated) &&
                cJSON_AddNumberToObject(line, "effective_ratio", r->ratio) &&
                cJSON_AddNumberToObject(line, "loss", r->loss) &&
                cJSON_AddNumberToObject(line, "seconds", r->seconds) &&
                cJSON_AddNumberToObject(line, "full_nll", r->full_nll) && add_numbers(line, "kl", r->kl, n) &&
                add_numbers(line, "nll", r->nll, n - 1) &&
                add_numbers(line, "output_error", r->output_error, s->m->config.n_layers);
    char *text = good ? cJSON_PrintUnformatted(line) : NULL;
    size_t length = text ? strlen(text) : 0;
    kvb_status status = text ? KVB_OK : kvb_fail(err, KVB_MEMORY, "%s: no memory for a line", log->path);
    if (text) text[length] = '\n'; // in place of the end: one write, so that a line is whole or cut at its end
    if (text && (write(log->file, text, length + 1) != (ssize_t)(length + 1) || fdatasync(log->file) != 0))
        status = kvb_fail(err, KVB_IO, "%s: cannot be written: %s", log->path, strerror(errno));
    cJSON_free(text);
    cJSON_Delete(line);
    free(agree);
    return status;
}

kvb_status sweep_write_kept(FILE *out, const sweep *s, const sweep_cell *cell, const kept_set *kept, kvb_error *err)
{
    cJSON *line = describe_cell(s, cell);
    char *text = line ? cJSON_PrintUnformatted(line) : NULL;
    cJSON_Delete(line);
    if (!text) return kvb_fail(err, KVB_MEMORY, "no memory for a line of kept positions");
    double kl = 0;
    for (uint32_t i = 0; i < s->o.n_next; i++) kl += cell->result.kl[i] / s->o.n_next;
    fprintf(out, "%.*s,\"kl\":%.9g,\"n_tokens\":%u,\"n_next\":%u,\"ids\":[", (int)strlen(text) - 1, text, kl,
            s->o.n_tokens, s->o.n_next);
    cJSON_free(text);
    const int32_t *ids = s->texts[cell->text].ids;
    for (uint32_t i = 0; i < s->o.n_tokens + s->o.n_next; i++) fprintf(out, i ? ",%d" : "%d", ids[i]);
    fprintf(out, "],\"kept\":[");
    for (uint32_t h = 0; h < kept->n_heads; h++) {
        fprintf(out, h ? ",[" : "[");
        for (size_t i = kept->offsets[h]; i < kept->offsets[h + 1]; i++)
            fprintf(out, i > kept->offsets[h] ? ",%u" : "%u", kept->positions[i]);
        fprintf(out, "]");
    }
    fprintf(out, "]}\n");
    return ferror(out) ? kvb_fail(err, KVB_IO, "kept positions cannot be written: %s", strerror(errno)) : KVB_OK;
}
