// kvbudget report: one HTML page about tables, with their records and results.
#include "tools/cli.h"
#include "tools/report/page.h"
#include <stdio.h>

static int run_report(const cli_command *self, int argc, char **argv)
{
    cli_list records = {0}, found = {0};
    const char *output = NULL;
    bool quiet = false;
    const cli_option options[] = {
        {"output", 'o', CLI_WRITES(FILE_PAGE), &output, "FILE.html", "the page to write"},
        {"record", 'R', CLI_INPUTS, &records, "RUN.h5",
         "the record that a table was made from, repeatable: its settings"},
        {"results", 'r', CLI_INPUTS, &found, "FILE.json",
         "what eval, task or solve --holdout found (their --json, or the NAME.json of eval\nand task), "
         "repeatable"},
        {"quiet", 'q', CLI_FLAG, &quiet, NULL, "do not say what was written"},
        {0}};
    int first, code = cli_parse(self, options, argc, argv, &first);
    if (code != EXIT_DONE || first == argc || !output) {
        cli_list_free(&records);
        cli_list_free(&found);
        if (code != EXIT_DONE) return code < 0 ? EXIT_DONE : code;
        return cli_usage_error(self, first == argc ? "expected a table (written by 'kvbudget solve')"
                                                   : "--output is needed: kvbudget report TABLE... -o FILE.html");
    }
    page p;
    kvb_error err = {0};
    const page_paths paths = {.tables = (const char *const *)(argv + first),
                              .n_tables = (size_t)(argc - first),
                              .records = records.items,
                              .n_records = records.count,
                              .results = found.items,
                              .n_results = found.count};
    kvb_status status = page_open(&p, &paths, &err);
    if (status == KVB_OK) status = page_write(&p, output, &err);
    page_free(&p);
    cli_list_free(&records);
    cli_list_free(&found);
    if (status != KVB_OK) return cli_failed(self, &err);
    if (!quiet) fprintf(stderr, "wrote %s\n", output);
    return EXIT_DONE;
}

const cli_command cmd_report = {
    "report", "report TABLE... [--record RUN.h5]... [--results FILE.json]... -o FILE.html",
    "make a page of tables and results, to read, print and pass on",
    "Writes one HTML file that needs no network and stays below 2 MB: whether the table helps, in words; KL,\n"
    "agreement and tasks next to other ways to split the cache, with intervals; head maps at 50, 80 and 90 %;\n"
    "losses with their bound; uncertain heads and what to do about them; what the table was made from; and\n"
    "how to make it again.\n"
    "\n"
    "A table alone also gives a page, which says what was not measured. Results belong to a table if they are\nof its "
    "metric and, for eval and task, of this exact file.\n"
    "\n"
    "Examples:\n"
    "  kvbudget report keydiff.safetensors -o keydiff.html\n"
    "  kvbudget eval model.gguf keydiff.safetensors texts/*.txt -o worth\n"
    "  kvbudget report keydiff.safetensors --record run.h5 --results worth.json -o keydiff.html\n",
    run_report};
