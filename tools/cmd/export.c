// kvbudget export: tables and records in other programs' formats. A format is a row of `formats` and a function.
#include "formats/budget_export.h"
#include "formats/lukv_steps.h"
#include "formats/need.h"
#include "formats/table_export.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include "tools/cli.h"
#include "tools/report/table_npy.h"
#include <stdlib.h>
#include <string.h>

typedef struct export_command {
    const char *input, *output, *format, *ratio_text;
    double ratio;
    uint64_t n_tokens, block;
    bool strict;
} export_command;

// Opens a table, and refuses one with formats: other programs budget tokens only. The caller closes *table.
static kvb_status open_plain(kvb_table **table, const char *path, kvb_error *err)
{
    kvb_status status = kvb_table_open(table, path, NULL, err);
    if (status == KVB_OK && kvb_table_has_formats(*table))
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s: has formats, in which its budgets are more tokens than the same bytes of bf16; solve "
                        "without --formats",
                        path);
    return status;
}

static kvb_status export_npy(const export_command *x, kvb_error *err)
{
    kvb_table *table = NULL;
    cJSON *metadata = NULL;
    kvb_status status = open_plain(&table, x->input, err);
    if (status == KVB_OK) status = table_metadata_read(&metadata, x->input, err);
    if (status == KVB_OK) {
        rank_content ranking;
        const table_content content = table_content_of(table, metadata, &ranking);
        status = write_table_npy(x->output, &content, err);
    }
    cJSON_Delete(metadata);
    kvb_table_close(table);
    return status;
}

static kvb_status export_steps(const export_command *x, kvb_error *err)
{
    record *r = NULL;
    kvb_status status = record_open(&r, x->input, err);
    if (status == KVB_OK) status = lukv_steps_export(r, x->output, err);
    record_close(r);
    return status;
}

typedef kvb_status budget_writer(const budget_export *b, const char *path, kvb_error *err);

static kvb_status with_budgets(const export_command *x, budget_writer *write, kvb_error *err)
{
    kvb_table *table = NULL;
    const kvb_budget_options options = {.strict = x->strict, .block = (uint32_t)x->block};
    kvb_status status = open_plain(&table, x->input, err);
    if (status != KVB_OK) {
        kvb_table_close(table);
        return status;
    }
    size_t n = (size_t)kvb_table_info(table)->n_layers * kvb_table_info(table)->n_kv_heads;
    uint32_t *keep = need(n, sizeof *keep, "heads");
    const budget_export b = {table, x->input, x->ratio, (uint32_t)x->n_tokens, (uint32_t)x->block, keep};
    status = kvb_budgets(table, x->ratio, b.n_tokens, &options, keep, n, err);
    if (status == KVB_OK) status = write(&b, x->output, err);
    free(keep);
    kvb_table_close(table);
    return status;
}

static const struct {
    const char *name, *ending; // ending: of outputs whose name tells the format; NULL: none
    kvb_status (*run)(const export_command *x, kvb_error *err);
    budget_writer *write; // used in place of `run` for formats that take budgets of one ratio and length
    file_kind kind;       // FILE_ANY: a folder, which must be new
} formats[] = {
    {"npy", ".npy", export_npy, NULL, FILE_TABLE_ARRAY}, {"lukv-steps", NULL, export_steps, NULL, FILE_ANY},
    {"varlen", NULL, NULL, export_varlen, FILE_ANY},     {"per-layer", NULL, NULL, export_per_layer, FILE_LENGTHS},
    {"duo", NULL, NULL, export_duo, FILE_ANY},           {"shares", NULL, NULL, export_shares, FILE_SHARES},
};
enum { N_FORMATS = sizeof formats / sizeof formats[0] };
#define FORMAT_NAMES "npy|lukv-steps|varlen|per-layer|duo|shares"

// Returns the row that is asked for, by name or by the output's ending; N_FORMATS if there is none.
static int find_format(const export_command *x)
{
    int i = 0;
    while (i < N_FORMATS && !(x->format ? strcmp(formats[i].name, x->format) == 0
                                        : formats[i].ending && kvb_ends_with(x->output, formats[i].ending)))
        i++;
    return i;
}

static int check_export_options(const cli_command *self, export_command *x, bool budgets, const char *format)
{
    if (!budgets && (x->ratio_text || x->n_tokens || x->block || x->strict))
        return cli_usage_error(self, "--ratio, --tokens, --block and --strict have no meaning with --format %s",
                               format);
    if (!budgets) return EXIT_DONE;
    if (!x->ratio_text || x->n_tokens == 0)
        return cli_usage_error(self, "--format %s: expected --ratio R and --tokens T: it holds one set of budgets",
                               format);
    if (!cli_ratio(&x->ratio, x->ratio_text))
        return cli_usage_error(self, "--ratio: expected a share such as 0.8 or 80%%, below 1; found %s", x->ratio_text);
    return EXIT_DONE;
}

static int export_main(const cli_command *self, int argc, char **argv)
{
    export_command x = {0};
    const cli_option options[] = {
        {"format", 'f', CLI_TEXT, &x.format, FORMAT_NAMES,
         "what to write, see below; may be left out when OUT ends with .npy"},
        {"output", 'o', CLI_WRITES(FILE_ANY), &x.output, "OUT", "the file or new folder to write"},
        {"ratio", 'r', CLI_TEXT, &x.ratio_text, "RATIO", "share of all cached tokens to prune: 0.8 or 80%"},
        {"tokens", 't', CLI_POSITIVE, &x.n_tokens, "N", "length of the context, sinks and window included"},
        {"block", 0, CLI_COUNT, &x.block, "N", "whole pages of N tokens"},
        {"strict", 0, CLI_FLAG, &x.strict, NULL,
         "no head keeps fewer than the protected tokens; the total stays the same"},
        {0}};
    int first = 0;
    int code = cli_parse(self, options, argc, argv, &first);
    if (code != EXIT_DONE) return code < 0 ? EXIT_DONE : code;
    if (argc - first != 1) return cli_usage_error(self, "expected one table or record");
    if (!x.output) return cli_usage_error(self, "expected -o OUT");
    x.input = argv[first];
    int i = find_format(&x);
    if (i == N_FORMATS)
        return cli_usage_error(self, "--format: expected one of " FORMAT_NAMES ", found '%s'",
                               x.format ? x.format : "");
    code = check_export_options(self, &x, formats[i].write, formats[i].name);
    if (code != EXIT_DONE) return code;
    kvb_error err;
    kvb_status status = named_output(x.output, "--output", formats[i].kind, &err);
    if (status != KVB_OK) return cli_failed(self, &err);
    status = formats[i].write ? with_budgets(&x, formats[i].write, &err) : formats[i].run(&x, &err);
    return status == KVB_OK ? EXIT_DONE : cli_failed(self, &err);
}

const cli_command cmd_export = {
    .name = "export",
    .synopsis = "export FILE [--format FORMAT] -o OUT [OPTION]...",
    .summary = "write a table or a record in the format of another program",
    .details =
        "Of a table, all ratios:\n"
        "npy           For kvpress: OUT.npy holds the prune ratios, float64 [99, layers, KV heads], and OUT.json\n"
        "              everything that the array cannot hold, including the Python lines that load it.\n"
        "\n"
        "Of a table, one --ratio and --tokens (with --block: pages):\n"
        "varlen        For kernels of flash-attn, FlashInfer and PyTorch, and paged engines: a folder of int32 "
        "arrays,\n"
        "              lengths.npy [layers, KV heads], cu_seqlens.npy [layers, KV heads + 1] and, with --block,\n"
        "              page_indptr.npy and block_table.npy [layers, KV heads, pages], -1 after a head's last page.\n"
        "per-layer     For kvpress's PerLayerCompressionPress (\"compression_ratios\") and mlx-lm (\"tokens\":\n"
        "              [RotatingKVCache(max_size=n, keep=sink) for n in tokens]): JSON, a layer's heads averaged.\n"
        "duo           For DuoAttention and kvpress's DuoAttentionPress: a folder with full_attention_heads.tsv, the\n"
        "              shares that heads keep, and config.json with sink_size, recent_size and the ratio of heads "
        "that\n"
        "              stream. Heads then keep all or little, so this is the table's order of heads rather than its "
        "budgets.\n"
        "shares        For Attention Matching (--precomputed-budget-path): JSON, {\"L0H0\": the head's share of all "
        "kept\n"
        "              tokens, ...}, for any ratio; docs/add-a-metric.md makes a table of such a file.\n"
        "\n"
        "Of a record:\n"
        "lukv-steps    For the published LU-KV pipeline: a folder of .npy files, context_<id>/<metric>.npy and\n"
        "              question_<i>.npy, each float32 [layers, KV heads, tokens]. `kvbudget import` reads it back.\n"
        "\n"
        "Examples:\n"
        "  kvbudget export keydiff.safetensors -o keydiff.npy\n"
        "  kvbudget export keydiff.safetensors --format varlen --ratio 80% --tokens 4096 --block 16 -o arrays\n"
        "  kvbudget export run.h5 --format lukv-steps -o steps\n",
    .run = export_main,
};
