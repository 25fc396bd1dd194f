// kvbudget plot: tables as head maps and lines, results as lines, in the terminal and as SVG, PDF and PNG.
#include "formats/atomic_file.h"
#include "tools/cmd/plot_command.h"
#include "tools/report/output.h"
#include "tools/report/weights_picture.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TABLES_MAX = 64, SIZE_LEAST = 200, SIZE_MOST = 10000 };

// "50,80,90" or "0.5,0.8,0.9": a number below 1 is a share, others are per cents.
static bool parse_ratios(plot_command *c, const char *text)
{
    while (c->n_ratios < PLOT_RATIOS_MAX) {
        char *end;
        if (text[strspn(text, "0123456789.,")]) return false; // no signs, spaces, "nan"
        double value = strtod(text, &end);
        if (end == text || (*end && *end != ',')) return false;
        double ratio = value < 1 ? value : value / 100;
        if (!(ratio > 0 && ratio < 1)) return false;
        c->ratios[c->n_ratios++] = ratio;
        if (!*end) return true;
        text = end + 1;
    }
    return false;
}

// "800x500"
static bool parse_size(plot_command *c, const char *text)
{
    char *end;
    if (!*text || text[strspn(text, "0123456789x")] || *text == 'x') return false;
    long width = strtol(text, &end, 10);
    long height = *end == 'x' && end[1] ? strtol(end + 1, &end, 10) : 0;
    if (*end || width < SIZE_LEAST || height < SIZE_LEAST || width > SIZE_MOST || height > SIZE_MOST) return false;
    c->width = (int)width;
    c->height = (int)height;
    return true;
}

static bool parse_axis(plot_command *c, const char *text)
{
    static const char *const names[] = {[AXIS_LINEAR] = "linear", [AXIS_LOG] = "log", [AXIS_RELATIVE] = "relative"};
    for (int i = AXIS_LINEAR; i <= AXIS_RELATIVE; i++)
        if (strcmp(text, names[i]) == 0) c->axis = (plot_axis)i;
    return c->axis != AXIS_OWN;
}

static bool is_document(const char *path)
{
    size_t n = strlen(path);
    return n > 5 && strcmp(path + n - 5, ".json") == 0;
}

// Of tables and rankings.
static bool is_kind(const char *word)
{
    static const char *const kinds[] = {"maps", "heads", "losses", "weights"};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strcmp(word, kinds[i]) == 0) return true;
    return false;
}

// Which head uses which feature of a learned ranking.
static kvb_status plot_weights(const plot_command *c, kvb_error *err)
{
    kvb_ranking *ranking = NULL;
    atomic_file p = {0};
    kvb_status status = kvb_ranking_open(&ranking, c->paths[0], err);
    if (status == KVB_OK) status = atomic_file_begin(&p, c->output, err);
    if (status == KVB_OK) weights_svg(ranking, p.stream);
    if (status == KVB_OK) status = atomic_file_commit(&p, err);
    atomic_file_abandon(&p);
    kvb_ranking_close(ranking);
    return status;
}

// What the words of the command line say together. Returns an exit code.
static int check(plot_command *c, const char *ratios, const char *axis, const char *size)
{
    size_t documents = 0;
    for (size_t i = 0; i < c->n_paths; i++) documents += is_document(c->paths[i]);
    if (c->n_paths == 0)
        return cli_usage_error(c->self, "expected a table (written by 'kvbudget solve') or results (.json)");
    if (c->n_paths > TABLES_MAX)
        return cli_usage_error(c->self, "expected at most %d tables, found %zu", TABLES_MAX, c->n_paths);
    if (documents > 0 && documents < c->n_paths)
        return cli_usage_error(c->self, "tables and results do not fit into one picture; plot them one by one");
    if (documents > 0) c->kind = "results";
    else if (!is_kind(c->kind))
        return cli_usage_error(c->self, "--kind: expected maps, heads, losses or weights, found '%s'", c->kind);
    if (strcmp(c->kind, "weights") == 0 && (c->n_paths > 1 || ratios))
        return cli_usage_error(c->self, "--kind weights draws one ranking, or one table that carries it");
    if (strcmp(c->kind, "maps") != 0 && !c->output)
        return cli_usage_error(c->self, "--output is needed: only head maps are drawn in the terminal");
    if (strcmp(c->kind, "maps") != 0 && c->terminal) return cli_usage_error(c->self, "--terminal shows head maps only");
    if (ratios && (documents > 0 || strcmp(c->kind, "losses") == 0))
        return cli_usage_error(c->self, "--ratios is for --kind maps and heads; lines go over all ratios");
    if (axis && strcmp(c->kind, "losses") != 0 && documents == 0)
        return cli_usage_error(c->self, "--axis is for losses and results");
    if (c->columns.count > 0 && documents == 0) return cli_usage_error(c->self, "--column is for results (.json)");
    if (axis && !parse_axis(c, axis))
        return cli_usage_error(c->self, "--axis: expected linear, log or relative, found '%s'", axis);
    if (size && !parse_size(c, size))
        return cli_usage_error(c->self, "--size: expected WIDTHxHEIGHT in pixels, %d to %d, found '%s'", SIZE_LEAST,
                               SIZE_MOST, size);
    if (ratios && !parse_ratios(c, ratios))
        return cli_usage_error(c->self,
                               "--ratios: expected at most %d per cents or shares such as 50,80,90 or 0.5,0.8,0.9, "
                               "found '%s'",
                               PLOT_RATIOS_MAX, ratios);
    return EXIT_DONE;
}

static int run(const cli_command *self, int argc, char **argv)
{
    plot_command c = {.self = self, .kind = "maps"};
    const char *ratios = NULL, *axis = NULL, *size = NULL;
    const cli_option options[] = {
        {"output", 'o', CLI_WRITES(FILE_PICTURE), &c.output, "FILE.svg",
         "the picture to write; rsvg-convert makes PDF and PNG of it"},
        {"kind", 'k', CLI_TEXT, &c.kind, "maps|heads|losses|weights",
         "of tables: what every head keeps, as maps (default); what every head gives\nup, a line per table (the "
         "paper's figure 2b); or loss against the ratio; of a\nlearned ranking or a table with one: what every head "
         "looks at"},
        {"ratios", 'r', CLI_TEXT, &ratios, "LIST",
         "prune ratios, one panel each; per cents or shares (default: 50,80,90, or all of a\ntable that was solved for "
         "few ratios)"},
        {"axis", 'a', CLI_TEXT, &axis, "linear|log|relative",
         "of losses and results; relative: divided by the even split's, losses by their\nlower bound"},
        {"column", 'c', CLI_LIST, &c.columns, "NAME",
         "of results: the column to draw, repeatable (default: kl and top1, score, or held-out\nloss)"},
        {"series", 's', CLI_LIST, &c.series, "NAME", "draw only the lines of this name, repeatable"},
        {"title", 0, CLI_TEXT, &c.title, "TEXT", "title instead of the usual one"},
        {"size", 0, CLI_TEXT, &size, "WxH", "size of the whole picture in pixels"},
        {"terminal", 't', CLI_FLAG, &c.terminal, NULL, "print the maps in the terminal (default without --output)"},
        {0}};
    int first, code = cli_parse(self, options, argc, argv, &first);
    bool parsed = code == EXIT_DONE;
    if (parsed) {
        c.paths = argv + first;
        c.n_paths = (size_t)(argc - first);
        code = check(&c, ratios, axis, size);
    }
    if (parsed && code == EXIT_DONE) {
        kvb_error err = {0};
        kvb_status status = c.output ? picture_check(c.output, &err) : KVB_OK;
        if (status == KVB_OK)
            status = strcmp(c.kind, "results") == 0   ? plot_results(&c, &err)
                     : strcmp(c.kind, "weights") == 0 ? plot_weights(&c, &err)
                                                      : plot_tables(&c, &err);
        if (status != KVB_OK) code = cli_failed(self, &err);
    }
    cli_list_free(&c.columns);
    cli_list_free(&c.series);
    return code < 0 ? EXIT_DONE : code; // -1: the manual was printed
}

const cli_command cmd_plot = {
    "plot", "plot TABLE...|RESULTS.json... [-o FILE.svg] [OPTION]...",
    "draw budgets, losses and results, in the terminal or for a paper",
    "Head maps have one panel per table and ratio: rows are layers, columns are KV heads, the colour is the share of "
    "its\n"
    "tokens that the head keeps (on a square-root scale, so that small shares can be told apart). Without colours the\n"
    "terminal picture is made of percentages; .4 means 0.4 %. Colours need a terminal; NO_COLOR switches them off,\n"
    "COLORTERM=truecolor makes them finer, and a UTF-8 locale halves the height.\n"
    "\n"
    "Lines have one colour, mark and dash per allocator, the same in every picture, and can be told apart in grey "
    "too.\n"
    "Results are what eval, task and solve --holdout write as JSON. For a PDF: rsvg-convert -f pdf x.svg -o x.pdf\n"
    "\n"
    "Examples:\n"
    "  kvbudget plot snapkv.safetensors\n"
    "  kvbudget plot snapkv.safetensors keydiff.safetensors -o both.svg --ratios 20,50,80,95\n"
    "  kvbudget plot story.safetensors code.safetensors -o figure2b.svg --kind heads --ratios 80\n"
    "  kvbudget plot keydiff.safetensors -o loss.svg --kind losses --axis log --size 640x400\n"
    "  kvbudget plot rank.safetensors --kind weights -o weights.svg\n"
    "  kvbudget plot worth.json -o worth.svg --axis relative --series kvbudget --series ada --column kl\n",
    run};
