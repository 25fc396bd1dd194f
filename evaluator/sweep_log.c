#include "evaluator/sweep_log.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static kvb_status read_result(const sweep *s, fidelity_cell *c, const cJSON *line, const char *path, uint32_t number,
                              kvb_error *err)
{
    uint32_t n = s->o.n_next, L = s->m->config.n_layers;
    double *agree = need(n, sizeof *agree, "rows");
    const char *const names[] = {"kept", "bytes", "allocated", "effective_ratio", "loss", "seconds", "full_nll"};
    enum { VALUES = sizeof names / sizeof *names };
    double values[VALUES] = {0};
    bool good = true;
    *c = fidelity_cell_open(n, L);
    for (int i = 0; i < VALUES; i++) {
        values[i] = log_number(line, names[i]);
        good = good && isfinite(values[i]) && values[i] >= 0 && values[i] < 0x1p53;
    }
    good = good && log_numbers(c->kl, n, line, "kl", false) && log_numbers(c->nll, n - 1, line, "nll", false) &&
           log_numbers(agree, n, line, "agree", false) && log_numbers(c->output_error, L, line, "output_error", true);
    for (uint32_t i = 0; i < n && good; i++) c->agree[i] = agree[i] != 0;
    free(agree);
    if (!good) {
        fidelity_cell_free(c);
        return kvb_fail(err, KVB_FORMAT, "%s: line %u: a result without all its numbers; remove the line or the file",
                        path, number);
    }
    c->kept = (uint64_t)values[0];
    c->bytes = (uint64_t)values[1];
    c->allocated = (uint64_t)values[2];
    c->ratio = values[3];
    c->loss = values[4];
    c->seconds = values[5];
    c->full_nll = values[6];
    c->looked = log_number(line, "looked");
    return KVB_OK;
}

static kvb_status take_line(void *context, const cJSON *line, const char *path, uint32_t number, kvb_error *err)
{
    sweep *s = context;
    const cJSON *key = cJSON_GetObjectItemCaseSensitive(line, "key");
    if (!cJSON_IsString(key))
        return kvb_fail(err, KVB_FORMAT, "%s: line %u is not a result of kvbudget eval; name another file", path,
                        number);
    for (size_t i = 0; i < s->n_cells; i++) {
        sweep_cell *c = &s->cells[i];
        if (c->done || strcmp(c->key, key->valuestring) != 0) continue;
        kvb_status status = read_result(s, &c->result, line, path, number, err);
        if (status != KVB_OK) return status;
        c->done = true;
    }
    return KVB_OK;
}

kvb_status sweep_log_parse(sweep *s, const char *text, size_t size, const char *path, kvb_error *err)
{
    const log_reader reader = {take_line, s};
    return log_parse(text, size, path, &reader, err);
}

kvb_status sweep_log_read(sweep *s, kvb_error *err)
{
    const log_reader reader = {take_line, s};
    return log_read(s->o.log, &reader, err);
}

// ---- Writing ----

static cJSON *describe_cell(const sweep *s, const sweep_cell *c)
{
    const method_column *column = &s->methods.columns[c->column];
    const method *m = &s->methods.methods[column->method];
    cJSON *line = cJSON_CreateObject();
    bool good = line && cJSON_AddStringToObject(line, "key", c->key) &&
                cJSON_AddStringToObject(line, "text", s->texts[c->text].name) &&
                cJSON_AddStringToObject(line, "metric", method_name(m)) &&
                cJSON_AddStringToObject(line, "allocator", column->how->label) &&
                cJSON_AddNumberToObject(line, "ratio", c->ratio) && cJSON_AddNumberToObject(line, "sink", m->sink) &&
                cJSON_AddNumberToObject(line, "window", m->window);
    if (good) return line;
    cJSON_Delete(line);
    return NULL;
}

kvb_status sweep_log_add(log_file *log, const sweep *s, const sweep_cell *cell, kvb_error *err)
{
    const fidelity_cell *r = &cell->result;
    uint32_t n = s->o.n_next;
    cJSON *line = describe_cell(s, cell);
    double *agree = calloc(n, sizeof *agree);
    for (uint32_t i = 0; agree && i < n; i++) agree[i] = r->agree[i];
    bool good = line && agree && log_put_numbers(line, "agree", agree, n) &&
                cJSON_AddNumberToObject(line, "kept", (double)r->kept) &&
                cJSON_AddNumberToObject(line, "bytes", (double)r->bytes) &&
                cJSON_AddNumberToObject(line, "allocated", (double)r->allocated) &&
                log_put_number(line, "effective_ratio", r->ratio) && log_put_number(line, "loss", r->loss) &&
                log_put_number(line, "looked", r->looked) && log_put_number(line, "seconds", r->seconds) &&
                log_put_number(line, "full_nll", r->full_nll) && log_put_numbers(line, "kl", r->kl, n) &&
                log_put_numbers(line, "nll", r->nll, n - 1) &&
                log_put_numbers(line, "output_error", r->output_error, s->m->config.n_layers);
    kvb_status status =
        good ? log_add(log, line, err) : kvb_fail(err, KVB_MEMORY, "%s: no memory for a line", s->o.log);
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
