// kvbudget tables: lists the ready tables in a folder, finds the one for a model, or adds one.
#include "formats/json_file.h"
#include "formats/need.h"
#include "formats/table_export.h"
#include "profiler/model/model.h"
#include "profiler/weights/weights.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include "tools/cli.h"
#include "tools/device.h"
#include "tools/report/results.h"
#include <ctype.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH_SIZE = 4096, FORMATS = 1, REFITTED = 2, KINDS = 4 };

typedef struct tables_command {
    const cli_command *self;
    const char *add, *names, *measured; // of --add
    bool formats, refitted;             // of --packed, --refit
    char *folders[KINDS];               // for tables by FORMATS and REFITTED; the first one is around the others
} tables_command;

// ---- Listing, finding ----

static kvb_status print_table(const char *path, kvb_error *err)
{
    kvb_table *t;
    kvb_status status = kvb_table_open(&t, path, NULL, err);
    if (status != KVB_OK) return status;
    const kvb_info *info = kvb_table_info(t);
    const char *names = kvb_table_metadata(t, "model_names"), *worth = kvb_table_metadata(t, "worth");
    printf("%s\n  for   %s: %u layers, %u KV heads of %u numbers\n  worth %s\n  made  of %u questions after %u tokens, "
           "%u ratios, by kvbudget %s%s%s%s\n",
           path, names ? names : info->model_id, info->n_layers, info->n_kv_heads, info->head_dim,
           worth ? worth : "not told", info->n_questions, info->calibration_tokens[0], info->n_rows, info->tool_version,
           kvb_table_metadata(t, "refined") ? "; refined by evicting" : "",
           kvb_table_has_formats(t) ? "; tokens and formats, ratios of bytes" : "",
           kvb_table_metadata(t, "refit") ? "; for caches that are refitted" : "");
    kvb_table_close(t);
    return KVB_OK;
}

static int is_table_name(const struct dirent *d)
{
    return kvb_ends_with(d->d_name, ".safetensors");
}

static kvb_status list_folder(const char *folder, kvb_error *err)
{
    struct dirent **files;
    int n = scandir(folder, &files, is_table_name, alphasort);
    kvb_status status = n < 0 ? kvb_fail(err, KVB_IO, "%s: cannot be listed", folder) : KVB_OK;
    for (int i = 0; i < n; i++) {
        char *path = need_text("%s/%s", folder, files[i]->d_name);
        if (status == KVB_OK) status = print_table(path, err);
        free_all(path, files[i]);
    }
    if (n >= 0) free(files);
    return status;
}

static kvb_status list_tables(const tables_command *c, kvb_error *err)
{
    kvb_status status = list_folder(c->folders[0], err);
    for (int i = 1; i < KINDS && status == KVB_OK; i++)
        if (access(c->folders[i], F_OK) == 0) status = list_folder(c->folders[i], err);
    return status;
}

// Prints the path of the table for a model.
static kvb_status find_table(const tables_command *c, const char *model_path, kvb_error *err)
{
    const model_options wishes = {.without_weights = true, .for_plan = true};
    char found[PATH_SIZE], *whole = realpath(model_path, NULL), *slash = whole ? strrchr(whole, '/') : NULL;
    model *m = NULL;
    kvb_status status = model_open(&m, model_path, device_find(c->self, "cpu", "f32"), &wishes, err);
    if (status == KVB_OK && m->source->n_names > 0) status = model_identify(m, NULL, err);
    if (status == KVB_OK) {
        const char *repository = m->source->origin.hf_id;
        const kvb_weights mine = {.hf_id = *repository ? repository : slash ? slash + 1 : model_path};
        const kvb_expectation shape = {.n_layers = m->config.n_layers,
                                       .n_heads = m->config.n_heads,
                                       .n_kv_heads = m->config.n_kv_heads,
                                       .head_dim = m->config.head_dim,
                                       .model_sha256 = m->sha256};
        status = kvb_table_find(found, sizeof found, c->folders[c->formats * FORMATS + c->refitted * REFITTED], &shape,
                                &mine, err);
    }
    if (status == KVB_OK) printf("%s\n", found);
    model_free(m);
    free(whole);
    return status;
}

// ---- Adding one ----

// Puts the results of eval for this table, which are found by its hash, into words. Returns NULL on failure.
static char *describe_worth(const tables_command *c, const results_document *d, kvb_error *err)
{
    results table = results_begin("tables");
    const char *label = NULL, *hash = "";
    char *words = NULL;
    bool refitted = false;
    const cJSON *one;
    if (results_file(&table, "table", c->add, err) == KVB_OK) hash = results_text(table.inputs->child, "sha256");
    cJSON_ArrayForEach(one, d->inputs) if (*hash && strcmp(results_text(one, "sha256"), hash) == 0) label =
        results_text(one, "name");
    cJSON_ArrayForEach(one, d->rows)
    {
        if (!label || strcmp(results_text(one, "allocator"), label) != 0) continue;
        refitted = results_number(one, "refit") > 0;
        char *more = need_text("%s%s%.4g at %g %%", words ? words : "KL to the full cache ", words ? ", " : "",
                               results_number(one, "kl"), 100 * results_number(one, "ratio"));
        free(words);
        words = more;
    }
    if (*hash && !words)
        kvb_fail(err, KVB_MISMATCH,
                 "%s: nothing there was measured with %s; run kvbudget eval MODEL %s TEXT... -o NAME", c->measured,
                 c->add, c->add);
    if (words) {
        char *more = need_text("%s pruned%s; mean over %g texts, %g tokens after %g", words,
                               refitted ? ", refitted" : "", results_number(d->settings, "n_texts"),
                               results_number(d->settings, "n_next"), results_number(d->settings, "n_tokens"));
        free(words);
        words = more;
    }
    results_free(&table);
    return words;
}

static kvb_status add_table(const tables_command *c, kvb_error *err)
{
    static const char *const own[] = {"model_names", "worth"};
    const char *name = strchr(c->names, '/') + 1;
    results_document d = {0};
    kvb_table *t = NULL;
    cJSON *metadata = NULL;
    kvb_status status = kvb_table_open(&t, c->add, NULL, err);
    if (status != KVB_OK) return status;
    const char *folder =
        c->folders[!!kvb_table_has_formats(t) * FORMATS + (kvb_table_metadata(t, "refit") != NULL) * REFITTED];
    char *to = need_text("%s/%.*s.safetensors", folder, (int)strcspn(name, ","), name), *worth = NULL;
    for (char *s = to + strlen(folder); *s; s++) *s = (char)tolower((unsigned char)*s);
    status = table_metadata_read(&metadata, c->add, err);
    if (status == KVB_OK) status = results_open(&d, c->measured, err);
    if (status == KVB_OK && !(worth = describe_worth(c, &d, err))) status = err->status;
    if (status == KVB_OK) status = cli_make_folder(folder, err);
    if (status == KVB_OK) status = named_output(to, "--add", FILE_TABLE, err);
    if (status == KVB_OK) {
        rank_content ranking;
        for (int i = 0; i < 2; i++) cJSON_DeleteItemFromObjectCaseSensitive(metadata, own[i]);
        json_put(metadata, "model_names %s worth %s", c->names, worth);
        const table_content content = table_content_of(t, metadata, &ranking);
        status = table_write(to, &content, err);
    }
    if (status == KVB_OK) status = print_table(to, err);
    cJSON_Delete(metadata);
    results_close(&d);
    kvb_table_close(t);
    free_all(worth, to);
    return status;
}

// ---- Command line ----

// Tells whether the names are ORGANISATION/NAME,... of letters, digits, dots, dashes and underscores.
static bool are_public_names(const char *names)
{
    for (size_t n; *names; names += n + (names[n] == ',' && names[n + 1])) {
        const char *slash = strchr(names, '/');
        n = strcspn(names, ",");
        if (!slash || slash == names || slash + 1 >= names + n || slash + 1 + strcspn(slash + 1, "/,") != names + n)
            return false;
        for (size_t i = 0; i < n; i++)
            if (!isalnum((unsigned char)names[i]) && !strchr("._-/", names[i])) return false;
    }
    return true;
}

static int run_tables(const cli_command *self, int argc, char **argv)
{
    tables_command c = {.self = self};
    const cli_option options[] = {
        {"add", 0, CLI_INPUT, &c.add, "TABLE", "put a copy of this table into the folder"},
        {"name", 0, CLI_TEXT, &c.names, "ORG/NAME,...", "with --add: the names under which the weights are published"},
        {"results", 0, CLI_INPUT, &c.measured, "FILE.json", "with --add: what eval measured, as tune leaves it"},
        {"packed", 0, CLI_FLAG, &c.formats, NULL, "with a model: its table of tokens and formats"},
        {"refit", 0, CLI_FLAG, &c.refitted, NULL, "with a model: its table for caches that are refitted"},
        {0},
    };
    kvb_error err = {0};
    int first, code = cli_parse(self, options, argc, argv, &first);
    if (code != EXIT_DONE) return code < 0 ? EXIT_DONE : code;
    if (argc - first > !c.add || !c.add != !c.names || !c.add != !c.measured)
        return cli_usage_error(self, "expected at most one model, or --add, --name and --results");
    if ((c.formats || c.refitted) && (c.add || first == argc))
        return cli_usage_error(self, "--packed, --refit: expected a model");
    if (c.names && (!*c.names || !are_public_names(c.names)))
        return cli_usage_error(self, "--name: expected ORGANISATION/NAME, more after commas; found '%s'", c.names);
    kvb_status status = cli_program_folder(&c.folders[0], "KVBUDGET_TABLES", "tables", "tables", &err);
    if (status == KVB_OK) {
        for (int i = 1; i < KINDS; i++)
            c.folders[i] = need_text("%s/%s%s%s", c.folders[0], i & REFITTED ? "refit" : "", i == 3 ? "-" : "",
                                     i & FORMATS ? "packed" : "");
        status = c.add ? add_table(&c, &err) : first < argc ? find_table(&c, argv[first], &err) : list_tables(&c, &err);
    }
    for (int i = 0; i < KINDS; i++) free(c.folders[i]);
    return status == KVB_OK ? EXIT_DONE : cli_failed(self, &err);
}

const cli_command cmd_tables = {
    .name = "tables",
    .synopsis = "tables [MODEL [--packed] [--refit] | --add TABLE --name ORG/NAME,... --results FILE.json]",
    .summary = "list ready tables, find the one for a model, or add one",
    .details =
        "Without an operand, lists the tables that come with the program. With a model, prints the path of its table:\n"
        "the one that was made from these very weights, by their SHA-256, or else from weights of this shape and "
        "name.\n"
        "The name is that of the folder or GGUF file (SmolLM2-135M-Instruct-Q8_0.gguf is SmolLM2-135M-Instruct), or "
        "the\n"
        "repository, where the folder says which. Without such a table it names the nearest and ends with status 1.\n"
        "--packed asks for the table that also says which heads to store in 8, 4 or 2 bits, --refit for one whose\n"
        "budgets are for refitted caches. These are in packed/, refit/ and refit-packed/.\n"
        "--add copies a table into the folder, with what it is worth, for everybody who uses the folder.\n"
        "\n"
        "The folder is KVBUDGET_TABLES, or else tables/ beside the program's folder, or share/kvbudget/tables.\n"
        "\n"
        "Examples:\n"
        "  kvbudget tables\n"
        "  kvbudget eval model.gguf \"$(kvbudget tables model.gguf)\" text.txt\n"
        "  kvbudget tables --add tuned.safetensors --name Qwen/Qwen2.5-7B-Instruct --results tuned.tune/worth.json\n",
    .run = run_tables,
};
