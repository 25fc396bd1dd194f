// kvbudget plot: budgets as a heat map, in the terminal and as SVG.
#include "formats/atomic_file.h"
#include "runtime/fail.h"
#include "tools/cli.h"
#include "tools/report/heatmap.h"
#include "tools/report/weights_picture.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_RATIOS = 99, MAX_TABLES = 64, NAME_SIZE = 160 };

typedef struct plot {
    kvb_table *tables[MAX_TABLES];
    char names[MAX_TABLES][NAME_SIZE];
    size_t n_tables;
    double ratios[MAX_RATIOS];
    size_t n_ratios;
    double *kept; // [n_tables, n_ratios, n_layers, n_heads]
} plot;

// "50,80,90" or "0.5,0.8,0.9": a number below 1 is a share, others are per cents.
static bool parse_ratios(plot *p, const char *text)
{
    while (p->n_ratios < MAX_RATIOS) {
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
        return kvb_fail(err, KVB_ARGUMENT, "%s: no row is for %.6g %% pruned; it has whole per cents from 1 to 99",
                        path, 100 * ratio);
    return kvb_fail(err, KVB_ARGUMENT, "%s: no row is for %.6g %% pruned; it was solved for %s%s %%", path, 100 * ratio,
                    list, n > LISTED ? ", ..." : "");
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static kvb_status open_tables(plot *p, char **paths, size_t count, kvb_error *err)
{
    for (; p->n_tables < count; p->n_tables++) {
        const char *path = paths[p->n_tables];
        kvb_status status = kvb_table_open(&p->tables[p->n_tables], path, NULL, err);
        if (status != KVB_OK) return status;
        const kvb_info *first = kvb_table_info(p->tables[0]), *info = kvb_table_info(p->tables[p->n_tables]);
        if (info->n_layers == first->n_layers && info->n_kv_heads == first->n_kv_heads) continue;
        kvb_table_close(p->tables[p->n_tables]);
        return kvb_fail(
            err, KVB_MISMATCH,
            "%s: expected %u layers x %u KV heads as in %s, found %u x %u; plot tables of different models one by one",
            path, first->n_layers, first->n_kv_heads, paths[0], info->n_layers, info->n_kv_heads);
    }
    return KVB_OK;
}

// A table is called by its metric; the file's name joins when that is not enough to tell two tables apart.
static void name_tables(plot *p, char **paths)
{
    for (size_t i = 0; i < p->n_tables; i++) {
        const kvb_info *info = kvb_table_info(p->tables[i]);
        bool shared = false;
        for (size_t j = 0; j < p->n_tables; j++)
            if (j != i && strcmp(info->metric, kvb_table_info(p->tables[j])->metric) == 0) shared = true;
        snprintf(p->names[i], NAME_SIZE, shared ? "%.70s (%.80s)" : "%.70s", info->metric, base_name(paths[i]));
    }
}

static kvb_status read_kept(plot *p, char **paths, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(p->tables[0]);
    size_t heads = (size_t)info->n_layers * info->n_kv_heads, i = 0;
    // The runtime has bounded the heads of a table by the size of its file, and both other factors are below 100.
    p->kept = malloc(p->n_tables * p->n_ratios * heads * sizeof *p->kept);
    if (!p->kept)
        return kvb_fail(err, KVB_MEMORY, "no memory for %zu panels of %zu heads", p->n_tables * p->n_ratios, heads);
    for (size_t t = 0; t < p->n_tables; t++) {
        for (size_t r = 0; r < p->n_ratios; r++) {
            kvb_row row;
            kvb_status status = find_row(p->tables[t], paths[t], p->ratios[r], &row, err);
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
    for (size_t i = 0; i < p->n_tables; i++) {
        const kvb_info *info = kvb_table_info(p->tables[i]);
        for (uint32_t j = 0; j < info->n_calibration_tokens; j++) {
            uint32_t tokens = info->calibration_tokens[j];
            if (tokens < least) least = tokens;
            if (tokens > most) most = tokens;
        }
    }
    char tokens[32];
    snprintf(tokens, sizeof tokens, least == most ? "%u" : "%u to %u", least, most);
    snprintf(subtitle, NAME_SIZE, "%u layers x %u KV heads; calibrated on contexts of %s tokens", first->n_layers,
             first->n_kv_heads, tokens);
}

static kvb_status write_svg(const heatmap *map, const char *path, kvb_error *err)
{
    atomic_file file;
    kvb_status status = atomic_file_begin(&file, path, err);
    if (status != KVB_OK) return status;
    heatmap_svg(map, file.stream);
    return atomic_file_commit(&file, err);
}

// --weights: of a ranking's file, or of the table that carries one.
static kvb_status draw_weights(const char *path, const char *output, kvb_error *err)
{
    kvb_ranking *ranking = NULL;
    atomic_file file;
    kvb_status status = kvb_ranking_open(&ranking, path, err);
    if (status == KVB_OK) status = atomic_file_begin(&file, output, err);
    if (status == KVB_OK && (status = weights_svg(ranking, file.stream, err)) != KVB_OK) atomic_file_abandon(&file);
    else if (status == KVB_OK) status = atomic_file_commit(&file, err);
    kvb_ranking_close(ranking);
    return status;
}

static kvb_status draw(plot *p, char **paths, size_t count, const char *output, bool terminal, kvb_error *err)
{
    kvb_status status = open_tables(p, paths, count, err);
    if (status != KVB_OK) return status;
    name_tables(p, paths);
    if (p->n_ratios == 0) status = choose_ratios(p, err);
    if (status == KVB_OK) status = read_kept(p, paths, err);
    if (status != KVB_OK) return status;

    char title[NAME_SIZE], subtitle[NAME_SIZE];
    describe(p, title, subtitle);
    const char *names[MAX_TABLES];
    for (size_t i = 0; i < p->n_tables; i++) names[i] = p->names[i];
    const kvb_info *info = kvb_table_info(p->tables[0]);
    heatmap map = {info->n_layers, info->n_kv_heads, p->n_tables, p->n_ratios, title, subtitle,
                   names,          p->ratios,        p->kept};
    if (output) status = write_svg(&map, output, err);
    if (status != KVB_OK) return status;
    if (terminal) {
        heatmap_terminal t = heatmap_detect(STDOUT_FILENO);
        heatmap_print(&map, &t, stdout);
    }
    return KVB_OK;
}

static int run(const cli_command *self, int argc, char **argv)
{
    const char *output = NULL, *ratios = NULL;
    bool terminal = false, weights = false;
    const cli_option options[] = {
        {"output", 'o', CLI_TEXT, &output, "FILE.svg", "write an SVG picture"},
        {"ratios", 'r', CLI_TEXT, &ratios, "LIST",
         "prune ratios, one panel each; per cents or shares (default: 50,80,90, or all of a\ntable that was solved for "
         "few "
         "ratios)"},
        {"terminal", 't', CLI_FLAG, &terminal, NULL, "print the picture (the default without --output)"},
        {"weights", 'w', CLI_FLAG, &weights, NULL,
         "draw which head uses which feature of a learned ranking: of the file that 'learn'\nwrote, or of a table made "
         "with it"},
        {0}};
    int first, code = cli_parse(self, options, argc, argv, &first);
    if (code != EXIT_DONE) return code < 0 ? EXIT_DONE : code;
    size_t count = (size_t)(argc - first);
    if (count == 0) return cli_usage_error(self, "expected a table (written by 'kvbudget solve')");
    if (count > MAX_TABLES) return cli_usage_error(self, "expected at most %d tables, found %zu", MAX_TABLES, count);
    if (weights && (count != 1 || !output || ratios || terminal))
        return cli_usage_error(self, "--weights draws one ranking to --output FILE.svg, and takes no other option");
    plot p = {0};
    if (ratios && !parse_ratios(&p, ratios))
        return cli_usage_error(self,
                               "--ratios: expected at most %d per cents or shares such as 50,80,90 or "
                               "0.5,0.8,0.9, found '%s'",
                               MAX_RATIOS, ratios);

    kvb_error err = {0};
    kvb_status status = weights ? draw_weights(argv[first], output, &err)
                                : draw(&p, argv + first, count, output, terminal || !output, &err);
    for (size_t i = 0; i < p.n_tables; i++) kvb_table_close(p.tables[i]);
    free(p.kept);
    return status == KVB_OK ? EXIT_DONE : cli_failed(self, &err);
}

const cli_command cmd_plot = {
    "plot", "plot TABLE... [-o FILE.svg] [--ratios LIST] [--terminal] [--weights]",
    "draw budgets as a heat map, in the terminal or as SVG",
    "One panel per table and ratio: rows are layers, columns are KV heads, the colour is the share of its tokens that "
    "the\n"
    "head keeps (on a square-root scale, so that small shares can be told apart). Without colours the terminal picture "
    "is\n"
    "made of percentages; .4 means 0.4 %. Colours need a terminal; NO_COLOR switches them off, COLORTERM=truecolor "
    "makes\n"
    "them finer, and a UTF-8 locale halves the height.\n"
    "\n"
    "Examples:\n"
    "  kvbudget plot snapkv.safetensors\n"
    "  kvbudget plot snapkv.safetensors keydiff.safetensors -o both.svg --ratios 20,50,80,95\n"
    "  kvbudget plot rank.safetensors --weights -o weights.svg\n",
    run};
