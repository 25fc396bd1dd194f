// kvbudget export: tables and records in the formats of others.
#include "formats/atomic_file.h"
#include "formats/lukv_steps.h"
#include "formats/record.h"
#include "formats/table_export.h"
#include "runtime/fail.h"
#include "tools/cli.h"
#include "tools/report/table_npy.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n > m && strcmp(text + n - m, end) == 0;
}

static kvb_status export_npy(const char *path, const char *output, kvb_error *err)
{
    kvb_table *table = NULL;
    cJSON *metadata = NULL;
    kvb_status status = kvb_table_open(&table, path, NULL, err);
    if (status == KVB_OK) status = table_metadata_read(&metadata, path, err);
    if (status == KVB_OK) {
        const kvb_info *info = kvb_table_info(table);
        status = write_table_npy(output, info->n_rows, info->n_layers, info->n_kv_heads, kvb_table_prune_ratios(table),
                                 metadata, err);
    }
    cJSON_Delete(metadata);
    kvb_table_close(table);
    return status;
}

static kvb_status write_csv(const kvb_table *table, const char *output, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(table);
    atomic_file f;
    kvb_status status = atomic_file_begin(&f, output, err);
    if (status != KVB_OK) return status;
    bool written = fprintf(f.stream, "ratio,layer,head,prune_ratio\n") > 0;
    for (uint32_t i = 0; i < info->n_rows && status == KVB_OK && written; i++) {
        kvb_row row;
        status = kvb_table_row(table, i, &row, err);
        for (uint32_t h = 0; h < info->n_layers * info->n_kv_heads && status == KVB_OK && written; h++)
            written = fprintf(f.stream, "%.12g,%u,%u,%.17g\n", row.ratio, h / info->n_kv_heads, h % info->n_kv_heads,
                              row.prune_ratio[h]) > 0;
    }
    if (status == KVB_OK && !written)
        status = kvb_fail(err, KVB_IO, "%s: cannot write: %s; nothing was changed", output, strerror(errno));
    if (status == KVB_OK) return atomic_file_commit(&f, err);
    atomic_file_abandon(&f);
    return status;
}

static kvb_status export_csv(const char *path, const char *output, kvb_error *err)
{
    kvb_table *table = NULL;
    kvb_status status = kvb_table_open(&table, path, NULL, err);
    if (status == KVB_OK) status = write_csv(table, output, err);
    kvb_table_close(table);
    return status;
}

static kvb_status export_steps(const char *path, const char *output, kvb_error *err)
{
    record *r = NULL;
    kvb_status status = record_open(&r, path, err);
    if (status == KVB_OK) status = lukv_steps_export(r, output, err);
    record_close(r);
    return status;
}

static const struct {
    const char *name;
    kvb_status (*run)(const char *path, const char *output, kvb_error *err);
} formats[] = {{"npy", export_npy}, {"lukv-steps", export_steps}, {"csv", export_csv}};
enum { N_FORMATS = sizeof formats / sizeof formats[0] };

static int run(const cli_command *self, int argc, char **argv)
{
    const char *format = NULL, *output = NULL;
    const cli_option options[] = {
        {"format", 'f', CLI_TEXT, &format, "npy|lukv-steps|csv",
         "What to write; may be left out when OUT ends with .npy or .csv."},
        {"output", 'o', CLI_TEXT, &output, "OUT", "The file, or for lukv-steps the new or empty folder, to write."},
        {0}};
    int first = 0;
    int code = cli_parse(self, options, argc, argv, &first);
    if (code != EXIT_DONE) return code < 0 ? EXIT_DONE : code;
    if (argc - first != 1) return cli_usage_error(self, "expected one table or record");
    if (!output) return cli_usage_error(self, "expected -o OUT");
    if (!format) format = ends_with(output, ".npy") ? "npy" : ends_with(output, ".csv") ? "csv" : "";
    for (int i = 0; i < N_FORMATS; i++) {
        if (strcmp(formats[i].name, format) != 0) continue;
        kvb_error err;
        return formats[i].run(argv[first], output, &err) == KVB_OK ? EXIT_DONE : cli_failed(self, &err);
    }
    return cli_usage_error(self, "--format: expected npy, lukv-steps or csv, found '%s'", format);
}

const cli_command cmd_export = {
    .name = "export",
    .synopsis = "export FILE [--format npy|lukv-steps|csv] -o OUT",
    .summary = "write a table or a record in a format that others read",
    .details =
        "npy         A table for kvpress: OUT.npy holds the prune ratios, float64 [99, layers, KV heads], and "
        "OUT.json\n"
        "            beside it everything that the array cannot say, with the lines of Python that load it.\n"
        "csv         A table as text: ratio,layer,head,prune_ratio, one line per number.\n"
        "lukv-steps  A record as the folder of .npy files of the published LU-KV pipeline: context_<id>/<metric>.npy\n"
        "            and question_<i>.npy, each float32 [layers, KV heads, tokens]. `kvbudget import` reads it back.\n"
        "\n"
        "Examples:\n"
        "  kvbudget export keydiff.safetensors -o keydiff.npy\n"
        "  kvbudget export run.h5 --format lukv-steps -o steps\n",
    .run = run,
};
