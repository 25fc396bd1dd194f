// kvbudget plot: tables as head maps, results as lines.
#include "formats/atomic_file.h"
#include "formats/file_io.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include "tools/cli.h"
#include "tools/report/heatmap.h"
#include "tools/report/output.h"
#include "tools/report/results_chart.h"
#include "tools/report/words.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { RATIOS_MAX = 99, TABLES_MAX = 64, DOCUMENTS_MAX = 16, NAME_SIZE = 160 };

typedef struct plot {
    const cli_command *self;
    char **paths; // of tables, or of documents of results
    size_t n_paths;
    const char *output;
    double ratios[RATIOS_MAX];
    size_t n_ratios;
    kvb_table *tables[TABLES_MAX];
    char names[TABLES_MAX][NAME_SIZE];
    size_t n_tables;
    double *kept; // [n_tables, n_ratios, n_layers, n_heads]
} plot;

// ---- Tables ---------------------------------------------------------------------------------------------------------

static bool has_every_per_cent(const kvb_table *table)
{
    return !kvb_table_metadata(table, "n_rows");
}

// Without a wish: what most tables are looked at for; or all rows of the first table that was solved for few ratios.
static kvb_status choose_ratios(plot *p, kvb_error *err)
{
    static const double usual[] = {0.5, 0.8, 0.9};
    size_t own = 0;
    while (own < p->n_tables && has_every_per_cent(p->tables[own])) own++;
    p->n_ratios = own < p->n_tables ? kvb_table_info(p->tables[own])->n_rows : sizeof usual / sizeof *usual;
    for (size_t r = 0; r < p->n_ratios; r++) {
        kvb_row row = {.ratio = usual[r % 3]};
        kvb_status status = own < p->n_tables ? kvb_table_row(p->tables[own], (uint32_t)r, &row, err) : KVB_OK;
        if (status != KVB_OK) return status;
        p->ratios[r] = row.ratio;
    }
    return KVB_OK;
}

// The row of a ratio, to the six digits of a per cent that messages show.
static kvb_status find_row(const kvb_table *table, const char *path, double ratio, kvb_row *out, kvb_error *err)
{
    enum { LISTED = 12 };
    uint32_t n = kvb_table_info(table)->n_rows;
    char list[16 * LISTED + 8] = "";
    size_t used = 0;
    for (uint32_t r = 0; r < n; r++) {
        kvb_status status = kvb_table_row(table, r, out, err);
        if (status != KVB_OK || fabs(out->ratio - ratio) <= 1e-6) return status;
        if (r < LISTED)
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%.6g", r ? ", " : "", 100 * out->ratio);
    }
    if (has_every_per_cent(table))
        return kvb_fail(err, KVB_ARGUMENT, "%s: no row for %.6g %% pruned; it has whole per cents from 1 to 99", path,
                        100 * ratio);
    return kvb_fail(err, KVB_ARGUMENT, "%s: no row for %.6g %% pruned; it was solved for %s%s %%", path, 100 * ratio,
                    list, n > LISTED ? ", ..." : "");
}

static kvb_status open_tables(plot *p, kvb_error *err)
{
    char **paths = p->paths;
    for (; p->n_tables < p->n_paths; p->n_tables++) {
        const char *path = paths[p->n_tables];
        kvb_status status = kvb_table_open(&p->tables[p->n_tables], path, NULL, err);
        if (status != KVB_OK) return status;
        const kvb_info *first = kvb_table_info(p->tables[0]), *info = kvb_table_info(p->tables[p->n_tables]);
        if (info->n_layers == first->n_layers && info->n_kv_heads == first->n_kv_heads) continue;
        kvb_table_close(p->tables[p->n_tables]);
        return kvb_fail(
            err, KVB_MISMATCH,
            "%s: expected %u layers x %u KV heads as in %s, found %u x %u; plot tables of different models separately",
            path, first->n_layers, first->n_kv_heads, paths[0], info->n_layers, info->n_kv_heads);
    }
    return KVB_OK;
}

// A table is called by its metric; the file's name joins when that is not enough to tell two tables apart.
static void name_tables(plot *p)
{
    for (size_t i = 0; i < p->n_tables; i++) {
        const kvb_info *info = kvb_table_info(p->tables[i]);
        bool shared = false;
        for (size_t j = 0; j < p->n_tables; j++)
            if (j != i && strcmp(info->metric, kvb_table_info(p->tables[j])->metric) == 0) shared = true;
        snprintf(p->names[i], NAME_SIZE, shared ? "%.70s (%.80s)" : "%.70s", info->metric, file_base(p->paths[i]));
    }
}

static kvb_status read_kept(plot *p, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(p->tables[0]);
    size_t heads = (size_t)info->n_layers * info->n_kv_heads, i = 0;
    // The runtime has bounded the heads of a table by the size of its file, and both other factors are below 100.
    p->kept = need(p->n_tables * p->n_ratios * heads, sizeof *p->kept, "shares");
    for (size_t t = 0; t < p->n_tables; t++) {
        for (size_t r = 0; r < p->n_ratios; r++) {
            kvb_row row;
            kvb_status status = find_row(p->tables[t], p->paths[t], p->ratios[r], &row, err);
            if (status != KVB_OK) return status;
            for (size_t h = 0; h < heads; h++) p->kept[i++] = 1 - row.prune_ratio[h];
        }
    }
    return KVB_OK;
}

static void describe(const plot *p, char title[NAME_SIZE], char subtitle[NAME_SIZE])
{
    const kvb_info *first = kvb_table_info(p->tables[0]);
    bool same_model = true;
    for (size_t i = 1; i < p->n_tables; i++)
        if (strcmp(first->model_id, kvb_table_info(p->tables[i])->model_id) != 0) same_model = false;
    snprintf(title, NAME_SIZE, "KV-cache budgets: %.120s",
             !same_model        ? "several models"
             : *first->model_id ? first->model_id
                                : "unnamed model");
    uint32_t least = UINT32_MAX, most = 0;
    for (size_t i = 0; i < p->n_tables; i++) widen_lengths(kvb_table_info(p->tables[i]), &least, &most);
    char tokens[32];
    snprintf(tokens, sizeof tokens, least == most ? "%u" : "%u to %u", least, most);
    snprintf(subtitle, NAME_SIZE, "%u layers x %u KV heads; calibrated on contexts of %s tokens", first->n_layers,
             first->n_kv_heads, tokens);
}

static kvb_status draw_maps(plot *p, FILE *out, kvb_error *err)
{
    char title[NAME_SIZE], subtitle[NAME_SIZE];
    const char *names[TABLES_MAX];
    const kvb_info *info = kvb_table_info(p->tables[0]);
    kvb_status status = read_kept(p, err);
    if (status != KVB_OK) return status;
    describe(p, title, subtitle);
    for (size_t i = 0; i < p->n_tables; i++) names[i] = p->names[i];
    const heatmap map = {.n_layers = info->n_layers,
                         .n_heads = info->n_kv_heads,
                         .n_tables = p->n_tables,
                         .n_ratios = p->n_ratios,
                         .title = title,
                         .subtitle = subtitle,
                         .table_names = names,
                         .ratios = p->ratios,
                         .kept = p->kept};
    heatmap_svg(&map, out);
    return KVB_OK;
}

static kvb_status plot_tables(plot *p, kvb_error *err)
{
    atomic_file out = {0};
    kvb_status status = open_tables(p, err);
    if (status == KVB_OK) name_tables(p);
    if (status == KVB_OK && p->n_ratios == 0) status = choose_ratios(p, err);
    if (status == KVB_OK) status = atomic_file_begin(&out, p->output, err);
    if (status == KVB_OK) status = draw_maps(p, out.stream, err);
    if (status == KVB_OK) status = atomic_file_commit(&out, err);
    atomic_file_abandon(&out);
    for (size_t i = 0; i < p->n_tables; i++) kvb_table_close(p->tables[i]);
    free(p->kept);
    return status;
}

// ---- Results --------------------------------------------------------------------------------------------------------

static kvb_status plot_results(const plot *p, kvb_error *err)
{
    results_document documents[DOCUMENTS_MAX];
    chart_list all = {.n = 0};
    kvb_status status = KVB_OK;
    size_t n = 0;
    for (; n < p->n_paths && status == KVB_OK; n += status == KVB_OK) {
        status = results_open(&documents[n], p->paths[n], err);
        if (status == KVB_OK) charts_add(&all, documents[n].rows);
    }
    if (status == KVB_OK) status = charts_write(&all, p->output, p->paths[0], err);
    for (size_t i = 0; i < n; i++) results_close(&documents[i]);
    return status;
}

// ---- The command ----------------------------------------------------------------------------------------------------

// "50,80,90" or "0.5,0.8,0.9": a number below 1 is a share, others are per cents.
static bool parse_ratios(plot *p, const char *text)
{
    while (p->n_ratios < RATIOS_MAX) {
        char *end;
        if (text[strspn(text, "0123456789.,")]) return false; // no signs, spaces, "nan"
        double value = strtod(text, &end);
        if (end == text || (*end && *end != ',')) return false;
        double ratio = value < 1 ? value : value / 100;
        if (!(ratio > 0 && ratio < 1)) return false;
        p->ratios[p->n_ratios++] = ratio;
        if (!*end) return true;
        text = end + 1;
    }
    return false;
}

// What the words of the command line say together. Returns an exit code.
static int check_words(plot *p, const char *ratios, size_t documents)
{
    size_t most = documents ? DOCUMENTS_MAX : TABLES_MAX;
    if (p->n_paths == 0)
        return cli_usage_error(p->self, "expected a table (written by 'kvbudget solve') or results (.json)");
    if (p->n_paths > most)
        return cli_usage_error(p->self, "expected at most %zu tables or %d results, found %zu", (size_t)TABLES_MAX,
                               DOCUMENTS_MAX, p->n_paths);
    if (documents > 0 && documents < p->n_paths)
        return cli_usage_error(p->self, "tables and results cannot share one picture; plot them separately");
    if (!p->output) return cli_usage_error(p->self, "--output is needed: kvbudget %s", p->self->synopsis);
    if (documents > 0 && ratios) return cli_usage_error(p->self, "--ratios is for tables; lines go over all ratios");
    if (ratios && !parse_ratios(p, ratios))
        return cli_usage_error(p->self,
                               "--ratios: expected at most %d per cents or shares such as 50,80,90 or 0.5,0.8,0.9, "
                               "found '%s'",
                               RATIOS_MAX, ratios);
    return EXIT_DONE;
}

static int run_plot(const cli_command *self, int argc, char **argv)
{
    plot p = {.self = self};
    const char *ratios = NULL;
    const cli_option options[] = {
        {"output", 'o', CLI_WRITES(FILE_PICTURE), &p.output, "FILE.svg",
         "the picture to write; rsvg-convert makes PDF and PNG of it"},
        {"ratios", 'r', CLI_TEXT, &ratios, "LIST",
         "prune ratios, one panel each; per cents or shares (default: 50,80,90, or all of a\ntable that was solved for "
         "few ratios)"},
        {0}};
    int first, code = cli_parse(self, options, argc, argv, &first);
    if (code != EXIT_DONE) return code < 0 ? EXIT_DONE : code; // -1: the manual was printed
    size_t documents = 0;
    p.paths = argv + first;
    p.n_paths = (size_t)(argc - first);
    for (size_t i = 0; i < p.n_paths; i++) documents += kvb_ends_with(p.paths[i], ".json");
    code = check_words(&p, ratios, documents);
    if (code != EXIT_DONE) return code;
    kvb_error err = {0};
    kvb_status status = picture_check(p.output, &err);
    if (status == KVB_OK) status = documents ? plot_results(&p, &err) : plot_tables(&p, &err);
    return status == KVB_OK ? EXIT_DONE : cli_failed(self, &err);
}

const cli_command cmd_plot = {
    "plot", "plot TABLE...|RESULTS.json... -o FILE.svg [--ratios LIST]", "draw budgets and results, for a paper",
    "Head maps have one panel per table and ratio: rows are layers, columns are KV heads, and the colour is the "
    "share\nof its tokens that a head keeps (on a square-root scale, to tell small shares apart). `budgets` prints "
    "counts.\n"
    "\n"
    "Results are what eval, task, solve --holdout and solve --ablation write as JSON. Lines have one colour, mark and\n"
    "dash per allocator, the same in every picture, and can be distinguished in grey. For a PDF:\n"
    "rsvg-convert -f pdf x.svg -o x.pdf\n"
    "\n"
    "Examples:\n"
    "  kvbudget plot snapkv.safetensors -o snapkv.svg\n"
    "  kvbudget plot snapkv.safetensors keydiff.safetensors -o both.svg --ratios 20,50,80,95\n"
    "  kvbudget plot worth.json -o worth.svg\n",
    run_plot};
