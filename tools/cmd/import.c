// kvbudget import: a record out of measured loss curves, or of the arrays of the published pipeline.
#include "formats/curves_file.h"
#include "formats/need.h"
#include "profiler/metric/scorer.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include "tools/cli.h"
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct settings {
    const char *input, *output;
    uint64_t heads, head_dim, queries;
    cli_list attributes; // NAME=VALUE
    bool force;
} settings;

// Adds NAME=VALUE to an object. A value that is a JSON number, true or false becomes one; everything else is text.
static kvb_status parse_attribute(cJSON *into, const char *text, kvb_error *err)
{
    const char *equals = strchr(text, '=');
    if (!equals || equals == text)
        return kvb_fail(err, KVB_ARGUMENT, "--attribute: expected NAME=VALUE, found '%s'", text);
    char *name = need_text("%.*s", (int)(equals - text), text);
    const char *end = equals + 1;
    cJSON *value = kvb_json_parse(end, strlen(end), &end, NULL);
    if (*end || (!cJSON_IsNumber(value) && !cJSON_IsBool(value))) {
        cJSON_Delete(value);
        value = cJSON_CreateString(equals + 1);
    }
    cJSON_AddItemToObject(into, name, value);
    free(name);
    return KVB_OK;
}

// The arrays do not say which tokens their solver protects; those of the metric of that name are taken.
static void protect_as_metric(const char *name, uint32_t *sink, uint32_t *window)
{
    metric m;
    if (metric_parse(&m, name, NULL) != KVB_OK) return;
    *sink = metric_protect_sink(&m);
    *window = metric_protect_window(&m);
}

static kvb_status import_record(const settings *s, kvb_error *err)
{
    struct stat st;
    bool file = stat(s->input, &st) == 0 && S_ISREG(st.st_mode);
    cJSON *attributes = cJSON_CreateObject();
    kvb_status status = named_output(s->output, "--output", FILE_RECORD, err);
    for (size_t i = 0; i < s->attributes.count && status == KVB_OK; i++)
        status = parse_attribute(attributes, s->attributes.items[i], err);
    lukv_steps_options options = {
        .n_heads = (uint32_t)s->heads,
        .head_dim = (uint32_t)s->head_dim,
        .n_queries = (uint32_t)s->queries,
        .attributes = attributes,
        .start = s->force ? RECORD_REPLACE : RECORD_NEW,
        .protect = protect_as_metric,
    };
    if (status == KVB_OK) status = (file ? curves_import : lukv_steps_import)(s->input, s->output, &options, err);
    cJSON_Delete(attributes);
    return status;
}

static int import_main(const cli_command *self, int argc, char **argv)
{
    settings s = {0};
    const cli_option options[] = {
        {"output", 'o', CLI_WRITES(FILE_ANY), &s.output, "OUT", "the record to write"},
        {"model-heads", 0, CLI_COUNT, &s.heads, "N", "query heads of the model, which the arrays do not say"},
        {"head-dim", 0, CLI_COUNT, &s.head_dim, "N", "head size of the model"},
        {"queries", 0, CLI_COUNT, &s.queries, "N",
         "decoded queries of a question without answer_ids_<i>.npy (63, the most in the\npublished protocol)"},
        {"attribute", 0, CLI_LIST, &s.attributes, "NAME=VALUE", "write this into the record, such as model_id=NAME"},
        {"force", 0, CLI_FLAG, &s.force, NULL, "replace a record that exists"},
        {0}};
    kvb_error err;
    int first = 0;
    int code = cli_parse(self, options, argc, argv, &first);
    if (code != EXIT_DONE) {
        cli_list_free(&s.attributes);
        return code < 0 ? EXIT_DONE : code;
    }
    if (argc - first != 1) {
        code = cli_usage_error(self, "expected one file or folder");
    } else if (!s.output) {
        code = cli_usage_error(self, "expected -o OUT");
    } else {
        s.input = argv[first];
        if (import_record(&s, &err) != KVB_OK) code = cli_failed(self, &err);
    }
    cli_list_free(&s.attributes);
    return code;
}

const cli_command cmd_import = {
    .name = "import",
    .synopsis = "import CURVES|FOLDER -o OUT",
    .summary = "make a record of measured loss curves, or of the published LU-KV pipeline's arrays",
    .details =
        "CURVES is a safetensors file with any method's loss for every head and budget: loss [contexts,\n"
        "layers, KV heads, budgets], kept [budgets] in tokens, and as metadata method, n_tokens and, if tokens\n"
        "are always kept, sink and window. docs/add-a-metric.md shows how to write one. `kvbudget solve` takes the\n"
        "record with --metric METHOD.\n"
        "\n"
        "From FOLDER, context_<id>/{<metric>,question_<i>}.npy become a record for `kvbudget solve`. snapkv.npy\n"
        "and ea.npy become the metrics snapkv:lukv and ea:lukv. Files that `kvbudget export` wrote are read without\n"
        "loss.\n"
        "\n"
        "Examples:\n"
        "  kvbudget import curves.safetensors -o run.h5 --model-heads 9 --head-dim 64\n"
        "  kvbudget import steps -o run.h5 --model-heads 9 --head-dim 64 --attribute model_id=SmolLM2\n",
    .run = import_main,
};
