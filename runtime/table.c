// Reads a table file: safetensors.c checks the container, table_metadata.c what it says, and here come the numbers.
#include "table.h"
#include "fail.h"
#include "safetensors.h"
#include "text.h"
#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t default_max_bytes = 64u << 20;

// Finds a tensor of the given dtype and of shape [R] or [R, L, G].
static kvb_status find_tensor(const kvb_table *t, const kvb_safetensors *file, const char *name, const char *dtype,
                              uint32_t n_dims, const kvb_tensor **out, kvb_error *err)
{
    const uint64_t shape[3] = {t->info.n_rows, t->info.n_layers, t->info.n_kv_heads};
    const kvb_tensor *x = kvb_safetensors_find(file, name);
    if (!x) {
        return kvb_fail(err, KVB_FORMAT, "%s: tensor \"%s\" is missing; not a table of this version, solve it again",
                        t->name, name);
    }
    if (strcmp(x->dtype, dtype) != 0) {
        return kvb_fail(err, KVB_FORMAT, "%s: tensor \"%s\": expected dtype %s, found %s", t->name, name, dtype,
                        x->dtype);
    }
    if (x->n_dims != n_dims) {
        return kvb_fail(err, KVB_FORMAT, "%s: tensor \"%s\": expected %u dimensions, found %u", t->name, name,
                        (unsigned)n_dims, (unsigned)x->n_dims);
    }
    for (uint32_t i = 0; i < n_dims; i++) {
        if (x->shape[i] != shape[i]) {
            return kvb_fail(err, KVB_FORMAT,
                            "%s: tensor \"%s\": dimension %u: expected %llu as the metadata says, found %llu", t->name,
                            name, (unsigned)i, (unsigned long long)shape[i], (unsigned long long)x->shape[i]);
        }
    }
    *out = x;
    return KVB_OK;
}

static double load_f64(const unsigned char *p)
{
    uint64_t bits = 0;
    double value;
    for (int i = 7; i >= 0; --i) bits = bits << 8 | p[i];
    memcpy(&value, &bits, sizeof value);
    return value;
}

static kvb_status copy_f64(const kvb_table *t, const char *name, const kvb_tensor *x, double lowest, double highest,
                           double *out, kvb_error *err)
{
    for (size_t i = 0; i < x->size / 8; i++) {
        out[i] = load_f64(x->data + 8 * i);
        if (!isfinite(out[i])) {
            return kvb_fail(err, KVB_NUMERIC, "%s: tensor \"%s\": element %zu: expected a finite number, found %g",
                            t->name, name, i, out[i]);
        }
        if (out[i] < lowest || out[i] > highest) {
            return kvb_fail(err, KVB_FORMAT, "%s: tensor \"%s\": element %zu: expected %g to %g, found %.17g", t->name,
                            name, i, lowest, highest, out[i]);
        }
    }
    return KVB_OK;
}

static kvb_status read_saturated(kvb_table *t, const kvb_safetensors *file, kvb_error *err)
{
    const kvb_tensor *x = NULL;
    kvb_status status = find_tensor(t, file, "saturated", "U8", 1, &x, err);
    for (size_t i = 0; !status && i < t->info.n_rows; i++) {
        t->saturated[i] = x->data[i];
        if (x->data[i] > 1) {
            status = kvb_fail(err, KVB_FORMAT, "%s: tensor \"saturated\": element %zu: expected 0 or 1, found %u",
                              t->name, i, (unsigned)x->data[i]);
        }
    }
    return status;
}

// Per cents, or, when the metadata give the number of rows, any ascending ratios.
static kvb_status check_ratios(const kvb_table *t, kvb_error *err)
{
    for (size_t i = 0; i < t->info.n_rows; i++) {
        double expected = (double)(i + 1) / 100, before = i > 0 ? t->ratio[i - 1] : 0;
        if (t->per_cent && fabs(t->ratio[i] - expected) > 1e-9) {
            return kvb_fail(err, KVB_FORMAT, "%s: tensor \"ratio\": element %zu: expected %g, found %.17g", t->name, i,
                            expected, t->ratio[i]);
        }
        if (!(t->ratio[i] > before && t->ratio[i] < 1)) {
            return kvb_fail(err, KVB_FORMAT,
                            "%s: tensor \"ratio\": element %zu: expected more than %g and less than 1, found %.17g",
                            t->name, i, before, t->ratio[i]);
        }
    }
    return KVB_OK;
}

static kvb_status read_tensors(kvb_table *t, const kvb_safetensors *file, kvb_error *err)
{
    const double huge = HUGE_VAL;
    const struct {
        const char *name;
        uint32_t n_dims;
        double lowest, highest;
        const double **value;
    } parts[] = {{"prune_ratio", 3, 0, 1, &t->prune_ratio},
                 {"std", 3, 0, huge, &t->std},
                 {"ratio", 1, 0, 1, &t->ratio},
                 {"loss", 1, -huge, huge, &t->loss},
                 {"lower_bound", 1, -huge, huge, &t->lower_bound},
                 {"lambda", 1, -huge, huge, &t->lambda},
                 {"table_loss", 1, -huge, huge, &t->table_loss},
                 {"effective_ratio", 1, 0, 1, &t->effective}};
    enum { n_parts = sizeof parts / sizeof parts[0] };
    const kvb_tensor *found[n_parts] = {NULL};
    size_t bytes = 0; // cannot wrap: the tensors lie side by side in one buffer
    double *next;
    kvb_status status;

    for (size_t i = 0; i < n_parts; i++) {
        status = find_tensor(t, file, parts[i].name, "F64", parts[i].n_dims, &found[i], err);
        if (status) return status;
        bytes += found[i]->size;
    }
    next = t->numbers = malloc(bytes);
    if (!next) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for %zu bytes", t->name, bytes);
    for (size_t i = 0; i < n_parts; i++) {
        status = copy_f64(t, parts[i].name, found[i], parts[i].lowest, parts[i].highest, next, err);
        if (status) return status;
        *parts[i].value = next;
        next += found[i]->size / 8;
    }
    status = check_ratios(t, err);
    return status ? status : read_saturated(t, file, err);
}

// A table that was made with a learned ranking carries it.
static kvb_status read_ranking(kvb_table *t, const kvb_safetensors *file, kvb_error *err)
{
    kvb_status status = kvb_ranking_read(&t->ranking, file, err);
    if (status) return status;
    const kvb_ranking_info *r = kvb_ranking_about(t->ranking);
    if (r->n_layers != t->info.n_layers || r->n_kv_heads != t->info.n_kv_heads ||
        strcmp(r->name, t->info.metric) != 0) {
        return kvb_fail(err, KVB_FORMAT,
                        "%s: the ranking %s of %u x %u heads is not that of the table, %s of %u x %u; solve it again",
                        t->name, r->name, (unsigned)r->n_layers, (unsigned)r->n_kv_heads, t->info.metric,
                        (unsigned)t->info.n_layers, (unsigned)t->info.n_kv_heads);
    }
    return KVB_OK;
}

// ---- opening ----

static kvb_status open_bytes(kvb_table **out, const void *data, size_t size, const char *name, kvb_error *err)
{
    kvb_safetensors file;
    kvb_table *t;
    kvb_status status = kvb_safetensors_parse(&file, data, size, name, err);
    if (status) return status;
    t = calloc(1, sizeof *t);
    if (!t) {
        kvb_safetensors_free(&file);
        return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for a table", name);
    }
    memcpy(t->name, file.name, strlen(file.name)); // at most 160 characters; calloc has put the NUL
    t->header = file.header;
    status = kvb_table_read_metadata(t, err);
    if (!status) status = read_tensors(t, &file, err);
    // Only now are numbers of layers and heads known to be as large as what the file holds.
    if (!status) status = kvb_table_read_bounded(t, err);
    if (!status) status = kvb_table_read_constraints(t, err);
    if (!status) status = kvb_table_read_files(t, err);
    if (!status && kvb_safetensors_metadata(t->header, "ranking")) status = read_ranking(t, &file, err);
    file.header = NULL; // the table's now
    kvb_safetensors_free(&file);
    if (status) kvb_table_close(t);
    else *out = t;
    return status;
}

// Files of other kinds, however large, are called by their names: operands are easily swapped.
static kvb_status refuse_others(const unsigned char *data, size_t size, const char *name, kvb_error *err)
{
    kvb_file_kind kind = kvb_kind_of_file(data, size);
    if (kind == KVB_FILE_OTHER || kind == KVB_FILE_SAFETENSORS) return KVB_OK;
    return kvb_fail(err, KVB_FORMAT,
                    "%s: expected a table (.safetensors), found %s; `kvbudget solve` makes tables of records", name,
                    kvb_kind_name(kind));
}

static size_t limit_of(const kvb_table_options *opt)
{
    return opt && opt->max_bytes ? opt->max_bytes : default_max_bytes;
}

static kvb_status fail_too_large(const char *name, size_t limit, kvb_error *err)
{
    return kvb_fail(err, KVB_UNSUPPORTED,
                    "%s: expected a table of at most %zu bytes, found more: a model's weights, or files in another "
                    "order than asked for? A program may raise max_bytes",
                    name, limit);
}

kvb_status kvb_table_open_memory(kvb_table **out, const void *data, size_t size, const char *name,
                                 const kvb_table_options *opt, kvb_error *err)
{
    if (!out || !data) {
        if (out) *out = NULL;
        return kvb_fail(err, KVB_ARGUMENT, "kvb_table_open_memory: out and data must not be NULL");
    }
    *out = NULL;
    name = name ? name : "<memory>";
    kvb_status status = refuse_others(data, size, name, err);
    if (status) return status;
    return size > limit_of(opt) ? fail_too_large(name, limit_of(opt), err) : open_bytes(out, data, size, name, err);
}

// Reads to the end, but never more than limit + 1 bytes: the size of a pipe is not known beforehand.
static kvb_status read_stream(FILE *stream, const char *path, size_t limit, unsigned char **data, size_t *size,
                              kvb_error *err)
{
    size_t cap = 0;
    *data = NULL;
    *size = 0;
    do {
        if (*size == cap) {
            size_t room = cap ? cap * 2 : 1u << 16;
            unsigned char *grown = room > cap ? realloc(*data, room) : NULL;
            if (!grown) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for %zu bytes", path, room);
            *data = grown;
            cap = room;
        }
        errno = 0;
        *size += fread(*data + *size, 1, cap - *size, stream);
        if (ferror(stream)) return kvb_fail(err, KVB_IO, "%s: reading: %s", path, strerror(errno));
        kvb_status status = refuse_others(*data, *size, path, err);
        if (status) return status;
        if (*size > limit) return fail_too_large(path, limit, err);
    } while (!feof(stream));
    return KVB_OK;
}

kvb_status kvb_file_read(unsigned char **data, size_t *size, const char *path, size_t limit, kvb_error *err)
{
    FILE *stream = fopen(path, "rb");
    *data = NULL;
    *size = 0;
    if (!stream) return kvb_fail(err, KVB_IO, "%s: opening: %s", path, strerror(errno));
    kvb_status status = read_stream(stream, path, limit, data, size, err);
    (void)fclose(stream); // only read
    return status;
}

kvb_status kvb_table_open(kvb_table **out, const char *path, const kvb_table_options *opt, kvb_error *err)
{
    unsigned char *data = NULL;
    size_t size = 0;
    kvb_status status;

    if (out) *out = NULL;
    if (!out || !path) return kvb_fail(err, KVB_ARGUMENT, "kvb_table_open: out and path must not be NULL");
    status = kvb_file_read(&data, &size, path, limit_of(opt), err);
    if (!status) status = open_bytes(out, data, size, path, err);
    free(data);
    return status;
}

void kvb_table_close(kvb_table *table)
{
    if (table) {
        cJSON_Delete(table->files);
        cJSON_Delete(table->header);
        free(table->calibration_tokens);
        free(table->budgeted_memory);
        free(table->bounded);
        kvb_limits_free(&table->limits);
        kvb_ranking_close(table->ranking);
        free(table->numbers);
        free(table);
    }
}
