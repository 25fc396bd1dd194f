// kvbudget import: records and tables out of the formats of others.
#include "formats/file_read.h"
#include "formats/lukv_steps.h"
#include "formats/need.h"
#include "formats/npy.h"
#include "formats/sha256.h"
#include "formats/table_export.h"
#include "formats/table_write.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include "tools/cli.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { TABLE_ROWS = 99 };

typedef struct settings {
    const char *input, *output, *format, *metadata;
    uint64_t heads, head_dim, queries;
    cli_list attributes; // NAME=VALUE
    bool resume, force;
} settings;

// ---- lukv-steps: a folder becomes a record ----

// NAME=VALUE; a value that is a JSON number, true or false becomes one, everything else is text.
static kvb_status parse_attribute(cJSON *into, const char *text, kvb_error *err)
{
    const char *equals = strchr(text, '=');
    if (!equals || equals == text)
        return kvb_fail(err, KVB_ARGUMENT, "--attribute: expected NAME=VALUE, found '%s'", text);
    char *name = strndup(text, (size_t)(equals - text));
    const char *end = equals + 1;
    bool no_memory;
    cJSON *value = kvb_json_parse(end, strlen(end), &end, &no_memory);
    if (!no_memory && (*end || (!cJSON_IsNumber(value) && !cJSON_IsBool(value)))) {
        cJSON_Delete(value);
        value = cJSON_CreateString(equals + 1);
    }
    kvb_status status = KVB_OK;
    if (!name || !value || !cJSON_AddItemToObject(into, name, value)) {
        cJSON_Delete(value);
        status = kvb_fail(err, KVB_MEMORY, "not enough memory for the attributes");
    }
    free(name);
    return status;
}

static kvb_status import_steps(const settings *s, kvb_error *err)
{
    cJSON *attributes = cJSON_CreateObject();
    kvb_status status = attributes ? KVB_OK : kvb_fail(err, KVB_MEMORY, "not enough memory for the attributes");
    for (size_t i = 0; i < s->attributes.count && status == KVB_OK; i++)
        status = parse_attribute(attributes, s->attributes.items[i], err);
    lukv_steps_options options = {
        .n_heads = (uint32_t)s->heads,
        .head_dim = (uint32_t)s->head_dim,
        .n_queries = (uint32_t)s->queries,
        .attributes = attributes,
        .start = s->resume  ? RECORD_RESUME
                 : s->force ? RECORD_REPLACE
                            : RECORD_NEW,
    };
    if (status == KVB_OK) status = lukv_steps_import(s->input, s->output, &options, err);
    cJSON_Delete(attributes);
    return status;
}

// ---- npy: an array of prune ratios becomes a table ----

static kvb_status load_metadata(cJSON **out, const settings *s, const file_view *npy, kvb_error *err)
{
    char sha256[65], *beside = table_beside(s->input, TABLE_SIDECAR);
    const char *path = s->metadata ? s->metadata : beside;
    file_view view = {0};
    kvb_status status = sha256_hex(npy->data, npy->size, sha256, err);
    if (status == KVB_OK) status = file_map(&view, path, err);
    if (status == KVB_OK) status = table_sidecar_parse(out, view.data, view.size, path, sha256, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    file_unmap(&view);
    free(beside);
    return status;
}

// The shape in the metadata is checked by the table's writer, which reads back what it writes.
static kvb_status check_shape(const npy_array *a, const char *path, kvb_error *err)
{
    if (a->n_dims == 3 && a->shape[0] == TABLE_ROWS && a->shape[1] > 0 && a->shape[1] <= UINT32_MAX &&
        a->shape[2] > 0 && a->shape[2] <= UINT32_MAX)
        return KVB_OK;
    return kvb_fail(err, KVB_FORMAT,
                    "%s: expected the shape [%d, layers, KV heads], found %u dimensions, the first %llu", path,
                    TABLE_ROWS, a->n_dims, (unsigned long long)(a->n_dims ? a->shape[0] : 0));
}

// A table with a learned ranking has its weights in a file beside the array. *out: NULL for any other table.
static kvb_status load_ranking(kvb_ranking **out, const settings *s, const cJSON *metadata, kvb_error *err)
{
    *out = NULL;
    if (!cJSON_GetObjectItemCaseSensitive(metadata, "ranking")) return KVB_OK;
    char *path = table_beside(s->input, TABLE_RANKING);
    kvb_status status = kvb_ranking_open(out, path, err);
    free(path);
    return status;
}

// What an array of ratios does not know is zero, and the metadata name it.
static kvb_status write_table(const settings *s, const npy_array *a, const double *prune_ratio, cJSON *metadata,
                              const kvb_ranking *ranking, kvb_error *err)
{
    size_t per_row = a->count / TABLE_ROWS;
    double *std = need(a->count, sizeof *std, "deviations");
    const rank_content carried = ranking ? rank_content_of(ranking) : (rank_content){0};
    double ratio[TABLE_ROWS], effective[TABLE_ROWS], unknown[TABLE_ROWS] = {0};
    uint8_t saturated[TABLE_ROWS] = {0};
    for (size_t i = 0; i < TABLE_ROWS; i++) {
        ratio[i] = (double)(i + 1) / 100;
        effective[i] = 0;
        for (size_t h = 0; h < per_row; h++) effective[i] += prune_ratio[i * per_row + h];
        effective[i] /= (double)per_row;
    }
    cJSON_DeleteItemFromObjectCaseSensitive(metadata, "unknown");
    cJSON_AddStringToObject(metadata, "unknown", "std,loss,lower_bound,lambda,table_loss,saturated");
    table_content content = {TABLE_ROWS,
                             (uint32_t)a->shape[1],
                             (uint32_t)a->shape[2],
                             prune_ratio,
                             ratio,
                             std,
                             unknown,
                             unknown,
                             unknown,
                             unknown,
                             effective,
                             saturated,
                             ranking ? &carried : NULL,
                             metadata};
    kvb_status status = table_write(s->output, &content, err);
    free(std);
    return status;
}

static kvb_status import_npy(const settings *s, kvb_error *err)
{
    file_view view;
    npy_array a = {0};
    cJSON *metadata = NULL;
    kvb_ranking *ranking = NULL;
    double *prune_ratio = NULL;
    kvb_status status = file_map(&view, s->input, err);
    if (status == KVB_OK) status = npy_parse(&a, view.data, view.size, s->input, err);
    if (status == KVB_OK) status = check_shape(&a, s->input, err);
    if (status == KVB_OK) status = load_metadata(&metadata, s, &view, err);
    if (status == KVB_OK) status = load_ranking(&ranking, s, metadata, err);
    if (status == KVB_OK) {
        prune_ratio = need(a.count, sizeof *prune_ratio, "prune ratios"); // whose bytes are in the file
        status = npy_to_f64(&a, prune_ratio, s->input, err);
    }
    if (status == KVB_OK) status = file_check(&view, s->input, err);
    if (status == KVB_OK) status = write_table(s, &a, prune_ratio, metadata, ranking, err);
    kvb_ranking_close(ranking);
    free(prune_ratio);
    cJSON_Delete(metadata);
    file_unmap(&view);
    return status;
}

// ---- The command ----

static const char *guess_format(const char *input)
{
    struct stat st;
    return stat(input, &st) == 0 && S_ISDIR(st.st_mode) ? "lukv-steps" : "npy";
}

static int import(const cli_command *self, const settings *s)
{
    bool steps = strcmp(s->format, "lukv-steps") == 0;
    if (!steps && strcmp(s->format, "npy") != 0)
        return cli_usage_error(self, "--format: expected lukv-steps or npy, found '%s'", s->format);
    if (s->heads > UINT32_MAX || s->head_dim > UINT32_MAX || s->queries > UINT32_MAX)
        return cli_usage_error(self, "--model-heads, --head-dim, --queries: expected numbers below 2^32");
    if (s->resume && s->force) return cli_usage_error(self, "--resume and --force exclude each other");
    if (!steps && (s->resume || s->attributes.count > 0))
        return cli_usage_error(self, "--resume and --attribute are for lukv-steps");
    kvb_error err;
    kvb_status status = named_output(s->output, "--output", steps ? FILE_RECORD : FILE_TABLE, &err);
    if (status == KVB_OK) status = steps ? import_steps(s, &err) : import_npy(s, &err);
    return status == KVB_OK ? EXIT_DONE : cli_failed(self, &err);
}

static int run(const cli_command *self, int argc, char **argv)
{
    settings s = {0};
    const cli_option options[] = {
        {"format", 'f', CLI_TEXT, &s.format, "lukv-steps|npy",
         "what INPUT is (default: lukv-steps for a folder, npy for a file)"},
        {"output", 'o', CLI_WRITES(FILE_ANY), &s.output, "OUT",
         "the record (.h5) or the table (.safetensors) to write"},
        {"model-heads", 0, CLI_COUNT, &s.heads, "N", "query heads of the model, which the arrays do not say"},
        {"head-dim", 0, CLI_COUNT, &s.head_dim, "N", "head size of the model"},
        {"queries", 0, CLI_COUNT, &s.queries, "N",
         "decoded queries of a question without answer_ids_<i>.npy (63, the most in the\npublished protocol)"},
        {"attribute", 0, CLI_LIST, &s.attributes, "NAME=VALUE", "write this into the record, such as model_id=NAME"},
        {"metadata", 0, CLI_INPUT, &s.metadata, "FILE",
         "the side-car of a .npy (default: INPUT with .json instead of .npy)"},
        {"resume", 0, CLI_FLAG, &s.resume, NULL, "continue an import that was interrupted"},
        {"force", 0, CLI_FLAG, &s.force, NULL, "replace a record that exists"},
        {0}};
    int first = 0;
    int code = cli_parse(self, options, argc, argv, &first);
    if (code != EXIT_DONE) {
        cli_list_free(&s.attributes);
        return code < 0 ? EXIT_DONE : code;
    }
    if (argc - first != 1) {
        code = cli_usage_error(self, "expected one folder or .npy file");
    } else if (!s.output) {
        code = cli_usage_error(self, "expected -o OUT");
    } else {
        s.input = argv[first];
        if (!s.format) s.format = guess_format(s.input);
        code = import(self, &s);
    }
    cli_list_free(&s.attributes);
    return code;
}

const cli_command cmd_import = {
    .name = "import",
    .synopsis = "import INPUT [--format lukv-steps|npy] -o OUT",
    .summary = "make a record or a table from files of other programs",
    .details =
        "lukv-steps  A folder of the published LU-KV pipeline, context_<id>/{<metric>,question_<i>}.npy, becomes a\n"
        "            record that `kvbudget solve` takes. snapkv.npy and ea.npy become the metrics snapkv:lukv and\n"
        "            ea:lukv. What `kvbudget export` wrote comes back without loss.\n"
        "npy         A curve for kvpress, [99, layers, KV heads] prune ratios, becomes a table. The metadata come from "
        "the\n"
        "            side-car that `kvbudget export` writes, or from a JSON object of the table's metadata\n"
        "            (formats/README.md). Losses, bounds and deviations are unknown, hence 0; the metadata say so.\n"
        "\n"
        "Examples:\n"
        "  kvbudget import steps -o run.h5 --model-heads 9 --head-dim 64 --attribute model_id=SmolLM2\n"
        "  kvbudget import curve.npy --metadata curve.json -o table.safetensors\n",
    .run = run,
};
