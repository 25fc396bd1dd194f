// Reads a table file: the container is checked by safetensors.c, its meaning here. The format is formats/README.md.
#include "table.h"
#include "fail.h"
#include "safetensors.h"
#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t default_max_bytes = 64u << 20;

// ---- metadata ----

// Fetches a required entry; NULL after having made the error.
static const char *metadata_text(const kvb_table *t, const char *key, kvb_error *err)
{
    const char *text = kvb_safetensors_metadata(t->header, key);
    if (!text) {
        kvb_fail(err, KVB_FORMAT, "%s: metadata \"%s\" is missing; not a table of this version, solve it again",
                 t->name, key);
    }
    return text;
}

// Reads decimal digits from *text on; false without a digit or above `max`. Not strtoul: it takes signs and spaces.
static bool read_digits(const char **text, uint64_t max, uint64_t *out)
{
    const char *s = *text;
    uint64_t value = 0;
    for (; *s >= '0' && *s <= '9'; s++) {
        unsigned digit = (unsigned)(*s - '0');
        if (value > (max - digit) / 10) return false;
        value = value * 10 + digit;
    }
    if (s == *text) return false;
    *text = s;
    *out = value;
    return true;
}

static kvb_status metadata_count(const kvb_table *t, const char *key, uint32_t least, uint32_t *out, kvb_error *err)
{
    const char *text = metadata_text(t, key, err), *end = text;
    uint64_t value = 0;
    if (!text) return KVB_FORMAT;
    if (!read_digits(&end, UINT32_MAX, &value) || *end || value < least) {
        return kvb_fail(err, KVB_FORMAT, "%s: metadata \"%s\": expected a whole number of at least %u, found \"%.40s\"",
                        t->name, key, (unsigned)least, text);
    }
    *out = (uint32_t)value;
    return KVB_OK;
}

// A share such as 0.99. Not strtod: it obeys the host program's locale, where the point may be a comma.
static kvb_status metadata_share(const kvb_table *t, const char *key, double *out, kvb_error *err)
{
    const char *text = metadata_text(t, key, err), *end = text, *fraction;
    uint64_t whole = 0, digits = 0;
    double scale = 1;
    bool ok;
    if (!text) return KVB_FORMAT;
    ok = read_digits(&end, 1, &whole);
    if (ok && *end == '.') {
        fraction = ++end;
        ok = read_digits(&end, UINT64_MAX / 2, &digits);
        for (; fraction < end; fraction++) scale *= 10;
    }
    *out = (double)whole + (double)digits / scale;
    if (!ok || *end || *out > 1) {
        return kvb_fail(err, KVB_FORMAT, "%s: metadata \"%s\": expected a decimal number from 0 to 1, found \"%.40s\"",
                        t->name, key, text);
    }
    return KVB_OK;
}

// A comma-separated list of counts of at least `least`. `out` has room for every comma of the text plus one.
static kvb_status parse_list(const kvb_table *t, const char *key, const char *text, uint32_t least, uint32_t *out,
                             uint32_t *n, kvb_error *err)
{
    const char *end = text;
    uint64_t value;
    *n = 0;
    do {
        end += *n > 0 && *end == ',';
        if (!read_digits(&end, UINT32_MAX, &value) || (*end && *end != ',') || value < least) {
            return kvb_fail(
                err, KVB_FORMAT,
                "%s: metadata \"%s\": expected whole numbers of at least %u, commas between, found \"%.40s\"", t->name,
                key, (unsigned)least, text);
        }
        out[(*n)++] = (uint32_t)value;
    } while (*end);
    return KVB_OK;
}

static kvb_status read_calibration_tokens(kvb_table *t, kvb_error *err)
{
    static const char key[] = "calibration_tokens";
    const char *text = metadata_text(t, key, err);
    size_t count = 1;
    if (!text) return KVB_FORMAT;
    for (const char *s = text; *s; s++) count += *s == ',';
    t->calibration_tokens = calloc(count, sizeof *t->calibration_tokens);
    if (!t->calibration_tokens) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for the metadata", t->name);
    t->info.calibration_tokens = t->calibration_tokens;
    return parse_list(t, key, text, 1, t->calibration_tokens, &t->info.n_calibration_tokens, err);
}

static kvb_status read_queries(kvb_table *t, kvb_error *err)
{
    static const char key[] = "n_queries";
    const char *text = metadata_text(t, key, err), *comma;
    uint32_t range[2] = {0, 0}, n = 0;
    if (!text) return KVB_FORMAT;
    comma = strchr(text, ',');
    if (!comma || strchr(comma + 1, ',') || parse_list(t, key, text, 0, range, &n, NULL) || range[0] > range[1]) {
        return kvb_fail(err, KVB_FORMAT, "%s: metadata \"%s\": expected \"fewest,most\", found \"%.40s\"", t->name, key,
                        text);
    }
    t->info.n_queries_min = range[0];
    t->info.n_queries_max = range[1];
    return KVB_OK;
}

static kvb_status check_hash(const kvb_table *t, const char *key, const char *text, kvb_error *err)
{
    size_t size = strlen(text);
    if (size != 0 && (size != 64 || strspn(text, "0123456789abcdefABCDEF") != 64)) {
        return kvb_fail(err, KVB_FORMAT, "%s: metadata \"%s\": expected 64 hexadecimal digits, found \"%.70s\"",
                        t->name, key, text);
    }
    return KVB_OK;
}

static kvb_status read_texts(kvb_table *t, kvb_error *err)
{
    kvb_info *info = &t->info;
    const struct {
        const char *key;
        const char **value;
        bool hash, required; // required: must not be empty
    } texts[] = {{"metric", &info->metric, false, true},
                 {"metric_parameters", &info->metric_parameters, false, true},
                 {"architecture", &info->architecture, false, false},
                 {"model_id", &info->model_id, false, false},
                 {"model_sha256", &info->model_sha256, true, false},
                 {"tokenizer_sha256", &info->tokenizer_sha256, true, false},
                 {"scope", &info->scope, false, true},
                 {"aggregate", &info->aggregate, false, true},
                 {"hull", &info->hull, false, true},
                 {"calibration_sha256", &info->calibration_sha256, true, false},
                 {"record_sha256", &info->record_sha256, true, false},
                 {"tool_version", &info->tool_version, false, false}};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        const char *key = texts[i].key, *text = metadata_text(t, key, err);
        if (!text) return KVB_FORMAT;
        if (texts[i].required && !*text)
            return kvb_fail(err, KVB_FORMAT, "%s: metadata \"%s\": expected a text, found \"\"", t->name, key);
        if (texts[i].hash && check_hash(t, key, text, err)) return KVB_FORMAT;
        *texts[i].value = text;
    }
    cJSON *parameters = cJSON_Parse(info->metric_parameters);
    bool is_object = cJSON_IsObject(parameters);
    cJSON_Delete(parameters);
    return is_object ? KVB_OK
                     : kvb_fail(err, KVB_FORMAT,
                                "%s: metadata \"metric_parameters\": expected a JSON object as text, found \"%.40s\"",
                                t->name, info->metric_parameters);
}

static kvb_status check_format(const kvb_table *t, kvb_error *err)
{
    const char *format = kvb_safetensors_metadata(t->header, "format");
    const char *version;
    if (!format || strcmp(format, "kvbudget-table") != 0) {
        return kvb_fail(err, KVB_FORMAT,
                        "%s: metadata \"format\": expected \"kvbudget-table\", found %s%.40s%s; make a table with "
                        "`kvbudget solve`",
                        t->name, format ? "\"" : "", format ? format : "nothing", format ? "\"" : "");
    }
    version = metadata_text(t, "format_version", err);
    if (!version) return KVB_FORMAT;
    if (strcmp(version, "1") != 0) {
        return kvb_fail(err, KVB_VERSION,
                        "%s: metadata \"format_version\": expected \"1\", found \"%.40s\"; use a newer kvbudget",
                        t->name, version);
    }
    return KVB_OK;
}

static kvb_status read_metadata(kvb_table *t, kvb_error *err)
{
    kvb_info *info = &t->info;
    const struct {
        const char *key;
        uint32_t least, *value;
    } counts[] = {{"n_layers", 1, &info->n_layers},
                  {"n_heads", 1, &info->n_heads},
                  {"n_kv_heads", 1, &info->n_kv_heads},
                  {"head_dim", 1, &info->head_dim},
                  {"sink", 0, &info->sink},
                  {"window", 0, &info->window},
                  {"n_contexts", 0, &info->n_contexts},
                  {"n_questions", 0, &info->n_questions}};
    kvb_status status = check_format(t, err);

    info->n_rows = KVB_TABLE_ROWS;
    t->per_cent = !kvb_safetensors_metadata(t->header, "n_rows");
    if (!status && !t->per_cent) status = metadata_count(t, "n_rows", 1, &info->n_rows, err);
    if (!status && info->n_rows > KVB_TABLE_ROWS) {
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: metadata \"n_rows\": expected at most %d, found %u", t->name,
                        KVB_TABLE_ROWS, (unsigned)info->n_rows);
    }
    for (size_t i = 0; !status && i < sizeof counts / sizeof counts[0]; i++)
        status = metadata_count(t, counts[i].key, counts[i].least, counts[i].value, err);
    if (status || (status = read_texts(t, err)) || (status = metadata_share(t, "max_prune", &info->max_prune, err)) ||
        (status = read_calibration_tokens(t, err)) || (status = read_queries(t, err)))
        return status;
    if (info->n_heads % info->n_kv_heads != 0) {
        return kvb_fail(err, KVB_FORMAT, "%s: metadata: n_heads: expected a multiple of n_kv_heads = %u, found %u",
                        t->name, (unsigned)info->n_kv_heads, (unsigned)info->n_heads);
    }
    if (info->n_kv_heads > KVB_MAX_KV_HEADS) {
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: metadata: n_kv_heads: expected at most %d, found %u", t->name,
                        KVB_MAX_KV_HEADS, (unsigned)info->n_kv_heads);
    }
    const char *constraints = kvb_safetensors_metadata(t->header, "constraints");
    t->limited = constraints != NULL;
    return t->limited ? kvb_limits_parse(&t->limits, constraints, info->n_layers, info->n_kv_heads, t->name, err)
                      : KVB_OK;
}

// ---- tensors ----

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
        return kvb_fail(err, KVB_MEMORY, "%.160s: not enough memory for a table", name);
    }
    memcpy(t->name, file.name, strlen(file.name)); // at most 160 characters; calloc has put the NUL
    t->header = file.header;
    status = read_metadata(t, err);
    if (!status) status = read_tensors(t, &file, err);
    file.header = NULL; // the table's now
    kvb_safetensors_free(&file);
    if (status) kvb_table_close(t);
    else *out = t;
    return status;
}

static size_t limit_of(const kvb_table_options *opt)
{
    return opt && opt->max_bytes ? opt->max_bytes : default_max_bytes;
}

static kvb_status fail_too_large(const char *name, size_t limit, kvb_error *err)
{
    return kvb_fail(err, KVB_UNSUPPORTED,
                    "%.200s: expected at most %zu bytes, found more; raise max_bytes if it really is a table", name,
                    limit);
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
            if (!grown) return kvb_fail(err, KVB_MEMORY, "%.200s: not enough memory for %zu bytes", path, room);
            *data = grown;
            cap = room;
        }
        errno = 0;
        *size += fread(*data + *size, 1, cap - *size, stream);
        if (ferror(stream)) return kvb_fail(err, KVB_IO, "%.200s: reading: %s", path, strerror(errno));
        if (*size > limit) return fail_too_large(path, limit, err);
    } while (!feof(stream));
    return KVB_OK;
}

kvb_status kvb_table_open(kvb_table **out, const char *path, const kvb_table_options *opt, kvb_error *err)
{
    unsigned char *data = NULL;
    size_t size = 0;
    FILE *stream;
    kvb_status status;

    if (out) *out = NULL;
    if (!out || !path) return kvb_fail(err, KVB_ARGUMENT, "kvb_table_open: out and path must not be NULL");
    stream = fopen(path, "rb");
    if (!stream) return kvb_fail(err, KVB_IO, "%.200s: opening: %s", path, strerror(errno));
    status = read_stream(stream, path, limit_of(opt), &data, &size, err);
    fclose(stream);
    if (!status) status = open_bytes(out, data, size, path, err);
    free(data);
    return status;
}

void kvb_table_close(kvb_table *table)
{
    if (table) {
        cJSON_Delete(table->header);
        free(table->calibration_tokens);
        kvb_limits_free(&table->limits);
        free(table->numbers);
        free(table);
    }
}
