// A table's metadata: every entry that this version knows, checked. The format is formats/README.md.
#include "fail.h"
#include "json.h"
#include "safetensors.h"
#include "table.h"
#include "text.h"
#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

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

// The name goes to terminals and into file names.
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
    if (strcmp(version, "1") != 0) {
        return kvb_fail(err, KVB_VERSION,
                        "%s: metadata \"format_version\": expected \"1\", found \"%.40s\"; use a newer kvbudget",
                        t->name, version);
    }
    return KVB_OK;
}

kvb_status kvb_table_read_metadata(kvb_table *t, kvb_error *err)
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

// Prune ratios of the other layers, side by side.
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

kvb_status kvb_table_read_bounded(kvb_table *t, kvb_error *err)
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

kvb_status kvb_table_read_constraints(kvb_table *t, kvb_error *err)
{
    const char *constraints = kvb_safetensors_metadata(t->header, "constraints");
    const kvb_info *info = &t->info;
    t->limited = constraints != NULL;
    return t->limited ? kvb_limits_parse(&t->limits, constraints, info->n_budgeted, info->n_kv_heads, t->name, err)
                      : KVB_OK;
}
