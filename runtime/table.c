// Reads a table file, whose container safetensors.c checks: what it says of itself, its numbers, and which weights it
// was made with. The format is formats/README.md. Then everything that only looks at an open table.
#include "table.h"
#include "fail.h"
#include "json.h"
#include "safetensors.h"
#include "text.h"
#include <cjson/cJSON.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#ifndef KVBUDGET_VERSION // the Makefile passes it; a copied folder is built without
#define KVBUDGET_VERSION "0.1.0"
#endif

const char *kvb_version(void)
{
    return KVBUDGET_VERSION;
}

uint32_t kvb_budgets_version(void)
{
    return KVB_BUDGETS_VERSION;
}

static const size_t default_max_bytes = 64u << 20;

// ---- metadata: every entry that this version knows, checked ----

// Fetches a required entry. If it is missing, fills in *err and returns NULL.
static const char *metadata_text(const kvb_table *t, const char *key, kvb_error *err)
{
    const char *text = kvb_safetensors_metadata(t->header, key);
    if (!text) {
        kvb_fail(err, KVB_FORMAT, "%s: metadata \"%s\" is missing; not a table of this version, solve it again",
                 t->name, key);
    }
    return text;
}

static kvb_status metadata_count(const kvb_table *t, const char *key, uint32_t least, uint32_t *out, kvb_error *err)
{
    const char *text = metadata_text(t, key, err), *end = text;
    uint64_t value = 0;
    if (!text) return KVB_FORMAT;
    if (!kvb_read_digits(&end, UINT32_MAX, &value) || *end || value < least) {
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
    ok = kvb_read_digits(&end, 1, &whole);
    if (ok && *end == '.') {
        fraction = ++end;
        ok = kvb_read_digits(&end, UINT64_MAX / 2, &digits);
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
        if (!kvb_read_digits(&end, UINT32_MAX, &value) || (*end && *end != ',') || value < least) {
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

// The name is shown on terminals and becomes part of file names.
static kvb_status check_metric(const kvb_table *t, const char *metric, kvb_error *err)
{
    for (const char *s = metric; *s; s++) {
        if ((unsigned char)*s <= ' ' || (unsigned char)*s > '~') {
            return kvb_fail(err, KVB_FORMAT,
                            "%s: metadata \"metric\": expected printable characters without spaces, found byte 0x%02x",
                            t->name, (unsigned char)*s);
        }
    }
    return KVB_OK;
}

static kvb_status check_parameters(const kvb_table *t, kvb_error *err)
{
    const char *text = t->info.metric_parameters;
    cJSON *parameters;
    kvb_status status =
        kvb_json_object(&parameters, text, strlen(text), t->name, "metadata \"metric_parameters\"", err);
    cJSON_Delete(parameters);
    return status ? status : check_metric(t, t->info.metric, err);
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
    return check_parameters(t, err);
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
    if (strcmp(version, "1") != 0 && strcmp(version, "2") != 0) {
        return kvb_fail(err, KVB_VERSION,
                        "%s: metadata \"format_version\": expected \"1\" or \"2\", found \"%.40s\"; use a newer "
                        "kvbudget",
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
    return KVB_OK;
}

// The list of bounded layers: ascending, below n_layers, not all of them.
static kvb_status read_bounded_list(kvb_table *t, const char *text, kvb_error *err)
{
    const char *end = text;
    uint64_t layer, least = 0;
    do {
        end += end > text && *end == ',';
        if (!kvb_read_digits(&end, UINT32_MAX, &layer) || (*end && *end != ',') || layer < least ||
            layer >= t->info.n_layers) {
            return kvb_fail(
                err, KVB_FORMAT,
                "%s: metadata \"bounded_layers\": expected ascending layers below %u, commas between, found "
                "\"%.40s\"",
                t->name, (unsigned)t->info.n_layers, text);
        }
        t->bounded[layer] = 1;
        t->info.n_budgeted--;
        least = layer + 1;
    } while (*end);
    if (!t->info.n_budgeted) {
        return kvb_fail(err, KVB_FORMAT,
                        "%s: metadata \"bounded_layers\": expected a layer that is not bounded, found "
                        "all %u",
                        t->name, (unsigned)t->info.n_layers);
    }
    return KVB_OK;
}

// Copies the prune ratios of the layers with a budget, side by side.
static kvb_status copy_budgeted(kvb_table *t, kvb_error *err)
{
    size_t heads = t->info.n_kv_heads, rows = t->info.n_rows;
    double *to = t->budgeted_memory = malloc(rows * t->info.n_budgeted * heads * sizeof *to);
    if (!to) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for its budgeted layers", t->name);
    for (size_t l = 0; l < rows * t->info.n_layers; l++) {
        const double *layer = t->prune_ratio + l * heads;
        if (!t->bounded[l % t->info.n_layers]) {
            memcpy(to, layer, heads * sizeof *to);
            to += heads;
            continue;
        }
        for (size_t g = 0; g < heads; g++)
            if (layer[g] != 0) {
                return kvb_fail(err, KVB_FORMAT,
                                "%s: tensor \"prune_ratio\": expected 0 in layer %u, which is bounded, found %g",
                                t->name, (unsigned)(l % t->info.n_layers), layer[g]);
            }
    }
    return KVB_OK;
}

static kvb_status read_bounded(kvb_table *t, kvb_error *err)
{
    const char *text = kvb_safetensors_metadata(t->header, "bounded_layers");
    kvb_status status;
    t->info.n_budgeted = t->info.n_layers;
    t->budgeted = t->prune_ratio;
    if (!text) return KVB_OK;
    t->bounded = calloc(t->info.n_layers, 1);
    if (!t->bounded) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for the metadata", t->name);
    status = read_bounded_list(t, text, err);
    if (!status) status = copy_budgeted(t, err);
    t->budgeted = t->budgeted_memory;
    t->info.bounded = t->bounded;
    return status;
}

static kvb_status read_constraints(kvb_table *t, kvb_error *err)
{
    const char *constraints = kvb_safetensors_metadata(t->header, "constraints");
    const kvb_info *info = &t->info;
    t->limited = constraints != NULL;
    return t->limited ? kvb_limits_parse(&t->limits, constraints, info->n_budgeted, info->n_kv_heads, t->name, err)
                      : KVB_OK;
}

static const char files_key[] = "model_files";

static kvb_status read_files(kvb_table *t, kvb_error *err)
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

// ---- numbers ----

// Finds a tensor of the given dtype and of shape [R], [R, L, G] or [R, L, G, 2].
static kvb_status find_tensor(const kvb_table *t, const kvb_safetensors *file, const char *name, const char *dtype,
                              uint32_t n_dims, const kvb_tensor **out, kvb_error *err)
{
    const uint64_t shape[4] = {t->info.n_rows, t->info.n_layers, t->info.n_kv_heads, 2};
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

static kvb_status copy_f64(const kvb_table *t, const char *name, const kvb_tensor *x, double lowest, double highest,
                           double *out, kvb_error *err)
{
    for (size_t i = 0; i < x->size / 8; i++) {
        out[i] = kvb_load_f64(x->data + 8 * i);
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

// Ratios are the whole per cents or, if the metadata give the number of rows, any that ascend.
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

// Counts bytes over a whole group of tokens.
static kvb_status find_costs(kvb_table *t, kvb_error *err)
{
    size_t heads = t->info.n_kv_heads, layers = (size_t)t->info.n_rows * t->info.n_layers, n = 0;
    t->costs = malloc(layers * heads * sizeof *t->costs);
    if (!t->costs) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for its formats", t->name);
    for (size_t i = 0; i < layers * heads; i++) {
        if (t->bounded && t->bounded[i / heads % t->info.n_layers]) continue;
        size_t bytes[2];
        for (size_t side = 0; side < 2; side++)
            bytes[side] =
                kvb_packed_bytes((kvb_packing)t->formats[2 * i + side], (kvb_side)side, KVB_PACK_GROUP, KVB_PACK_GROUP);
        t->costs[n++] = (double)(bytes[0] + bytes[1]) / (4 * KVB_PACK_GROUP * KVB_PACK_GROUP);
    }
    return KVB_OK;
}

// Tables of version 2 say how each head is stored.
static kvb_status read_formats(kvb_table *t, const kvb_safetensors *file, kvb_error *err)
{
    const char *version = kvb_safetensors_metadata(t->header, "format_version");
    const kvb_tensor *x = NULL;
    kvb_status status;
    if (strcmp(version, "1") == 0) return KVB_OK;
    if (t->limited) return kvb_fail(err, KVB_FORMAT, "%s: has both formats and constraints", t->name);
    status = find_tensor(t, file, "formats", "U8", 4, &x, err);
    if (status) return status;
    for (size_t i = 0; i < x->size; i++) {
        size_t layer = i / 2 / t->info.n_kv_heads % t->info.n_layers;
        if (x->data[i] >= (t->bounded && t->bounded[layer] ? 1 : KVB_PACKINGS)) {
            return kvb_fail(err, KVB_FORMAT,
                            "%s: tensor \"formats\": element %zu: expected a format below %d%s, found %u", t->name, i,
                            KVB_PACKINGS, t->bounded ? ", and 0 in bounded layers" : "", (unsigned)x->data[i]);
        }
    }
    t->formats = malloc(x->size);
    if (!t->formats) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for %zu bytes", t->name, x->size);
    memcpy(t->formats, x->data, x->size);
    return find_costs(t, err);
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
    status = read_metadata(t, err);
    if (!status) status = read_tensors(t, &file, err);
    // Only now is it known that the file holds as many layers and heads as it says.
    if (!status) status = read_bounded(t, err);
    if (!status) status = read_constraints(t, err);
    if (!status) status = read_formats(t, &file, err);
    if (!status) status = read_files(t, err);
    if (!status && kvb_safetensors_metadata(t->header, "ranking")) status = read_ranking(t, &file, err);
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

kvb_status kvb_table_open_memory(kvb_table **out, const void *data, size_t size, const char *name,
                                 const kvb_table_options *opt, kvb_error *err)
{
    if (!out || !data) {
        if (out) *out = NULL;
        return kvb_fail(err, KVB_ARGUMENT, "kvb_table_open_memory: out and data must not be NULL");
    }
    *out = NULL;
    name = name ? name : "<memory>";
    kvb_status status = kvb_file_accept(data, size, name, limit_of(opt), err);
    return status ? status : open_bytes(out, data, size, name, err);
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
        free(table->costs);
        free(table->bounded);
        free(table->formats);
        kvb_limits_free(&table->limits);
        kvb_ranking_close(table->ranking);
        free(table->numbers);
        free(table);
    }
}

// ---- what an open table says ----

const kvb_info *kvb_table_info(const kvb_table *table)
{
    return table ? &table->info : NULL;
}

const char *kvb_table_metadata(const kvb_table *table, const char *key)
{
    return table && key ? kvb_safetensors_metadata(table->header, key) : NULL;
}

const double *kvb_table_prune_ratios(const kvb_table *table)
{
    return table ? table->prune_ratio : NULL;
}

const double *kvb_table_budgeted_ratios(const kvb_table *table)
{
    return table ? table->budgeted : NULL;
}

kvb_status kvb_table_row(const kvb_table *table, uint32_t row, kvb_row *out, kvb_error *err)
{
    if (!table || !out) return kvb_fail(err, KVB_ARGUMENT, "kvb_table_row: table and out must not be NULL");
    if (row >= table->info.n_rows) {
        return kvb_fail(err, KVB_ARGUMENT, "%s: row: expected 0 to %u, found %u", table->name,
                        (unsigned)table->info.n_rows - 1, (unsigned)row);
    }
    size_t n_heads = (size_t)table->info.n_layers * table->info.n_kv_heads;
    out->ratio = table->ratio[row];
    out->effective_ratio = table->effective[row];
    out->loss = table->loss[row];
    out->lower_bound = table->lower_bound[row];
    out->lambda = table->lambda[row];
    out->table_loss = table->table_loss[row];
    out->saturated = table->saturated[row];
    out->prune_ratio = table->prune_ratio + row * n_heads;
    out->std = table->std + row * n_heads;
    return KVB_OK;
}

bool kvb_same_hash(const char *a, const char *b)
{
    for (; *a && *b; ++a, ++b) {
        int x = *a >= 'A' && *a <= 'F' ? *a - 'A' + 'a' : *a;
        int y = *b >= 'A' && *b <= 'F' ? *b - 'A' + 'a' : *b;
        if (x != y) return false;
    }
    return *a == *b;
}

static kvb_status check_numbers(const kvb_table *table, const kvb_expectation *expected, kvb_error *err)
{
    const kvb_info *info = &table->info;
    int protection = expected->has_protection != 0;
    const struct {
        const char *name;
        uint32_t expected, found;
        int wanted;
    } fields[] = {{"n_layers", expected->n_layers, info->n_layers, expected->n_layers != 0},
                  {"n_heads", expected->n_heads, info->n_heads, expected->n_heads != 0},
                  {"n_kv_heads", expected->n_kv_heads, info->n_kv_heads, expected->n_kv_heads != 0},
                  {"head_dim", expected->head_dim, info->head_dim, expected->head_dim != 0},
                  {"sink", expected->sink, info->sink, protection},
                  {"window", expected->window, info->window, protection}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (fields[i].wanted && fields[i].expected != fields[i].found) {
            return kvb_fail(err, KVB_MISMATCH, "%s: %s: expected %u, the table says %u; %s", table->name,
                            fields[i].name, (unsigned)fields[i].expected, (unsigned)fields[i].found,
                            i < 4 ? "use a table that was made for this model"
                                  : "protect what the table was made with, or solve it again");
        }
    }
    return KVB_OK;
}

kvb_status kvb_table_check(const kvb_table *table, const kvb_expectation *expected, kvb_error *err)
{
    if (!table || !expected) return kvb_fail(err, KVB_ARGUMENT, "kvb_table_check: table and expected must not be NULL");
    const kvb_info *info = &table->info;
    kvb_status status = check_numbers(table, expected, err);
    // An empty hash matches no weights, not even those of a table that has no hash.
    const char *hash = expected->model_sha256;
    if (!status && hash && (!*hash || !kvb_same_hash(hash, info->model_sha256))) {
        status = kvb_fail(
            err, KVB_MISMATCH, "%s: model_sha256: expected %.64s, the table says %s; it was made for other weights",
            table->name, *hash ? hash : "a hash, got none", *info->model_sha256 ? info->model_sha256 : "nothing");
    }
    if (!status && expected->metric && strcmp(expected->metric, info->metric) != 0) {
        status =
            kvb_fail(err, KVB_MISMATCH,
                     "%s: metric: expected %.64s, the table says %.64s; rank tokens by the table's metric or use a "
                     "table of yours",
                     table->name, expected->metric, info->metric);
    }
    return status;
}

// ---- which weights: the files' hashes, and their name at Hugging Face ----

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
    // Every hash must occur as often as in the table: {a, a} are not the files {a, b}.
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

// ---- ranking by the table ----

const kvb_ranking *kvb_table_ranking(const kvb_table *table)
{
    return table ? table->ranking : NULL;
}

// Checks the arguments of both public functions; `function` is named in messages.
static kvb_status check_arguments(const char *function, const kvb_table *table, uint32_t layer, uint32_t head,
                                  const float *const *features, const float *out, kvb_error *err)
{
    const kvb_ranking *r = kvb_table_ranking(table);
    if (!table || !features || !out)
        return kvb_fail(err, KVB_ARGUMENT, "%s: table, features and out must not be NULL", function);
    if (!r) {
        return kvb_fail(err, KVB_ARGUMENT,
                        "%s: is for the metric %s, which is computed without the table; %s() "
                        "is for tables of a learned ranking",
                        table->name, table->info.metric, function);
    }
    if (layer >= r->info.n_layers || head >= r->info.n_kv_heads) {
        return kvb_fail(err, KVB_ARGUMENT, "%s: expected layer and head below %u and %u, found %u and %u", table->name,
                        (unsigned)r->info.n_layers, (unsigned)r->info.n_kv_heads, (unsigned)layer, (unsigned)head);
    }
    for (uint32_t f = 0; f < r->info.n_features; f++) {
        if (!features[f])
            return kvb_fail(err, KVB_ARGUMENT, "%s: feature %u, the scores of %s, is NULL", function, (unsigned)f,
                            r->info.metrics[f]);
    }
    return KVB_OK;
}

kvb_status kvb_rank_layer(const kvb_table *table, uint32_t layer, const float *const *features, uint32_t n_tokens,
                          float *out, kvb_error *err)
{
    kvb_status status = check_arguments("kvb_rank_layer", table, layer, 0, features, out, err);
    if (status) return status;
    uint32_t G = table->ranking->info.n_kv_heads;
    return kvb_rank_heads(table->ranking, 0, (size_t)layer * G, G, features, n_tokens, out, err);
}

kvb_status kvb_rank(const kvb_table *table, uint32_t layer, uint32_t head, const float *const *features,
                    uint32_t n_tokens, float *out, kvb_error *err)
{
    kvb_status status = check_arguments("kvb_rank", table, layer, head, features, out, err);
    if (status) return status;
    const kvb_ranking *r = table->ranking;
    if (r->info.layer_mean) {
        return kvb_fail(err, KVB_ARGUMENT,
                        "%s: its ranking also uses the mean over the layer's heads; rank them together, with "
                        "kvb_rank_layer()",
                        table->name);
    }
    return kvb_rank_heads(r, 0, (size_t)layer * r->info.n_kv_heads + head, 1, features, n_tokens, out, err);
}
