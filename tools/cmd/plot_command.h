// What `kvbudget plot` was asked for, and the two kinds of things that it draws.
#pragma once
#include "tools/cli.h"
#include "tools/report/svg.h"

enum { PLOT_RATIOS_MAX = 99 };

typedef enum plot_axis { AXIS_OWN, AXIS_LINEAR, AXIS_LOG, AXIS_RELATIVE } plot_axis; // AXIS_OWN: the usual one

typedef struct plot_command {
    const cli_command *self;
    char **paths; // of tables, or of documents of results
    size_t n_paths;
    const char *output; // NULL: the terminal alone
    const char *title;  // NULL: one that says what is shown
    const char *kind;   // of tables: "maps", "heads" or "losses"
    plot_axis axis;
    int width, height; // of the whole picture, pixels; 0: as large as it needs
    cli_list series, columns;
    double ratios[PLOT_RATIOS_MAX];
    size_t n_ratios;
    bool terminal;
} plot_command;

// Maps, heads or losses of tables; plot_results() lines of what eval, task or solve --holdout found.
// Errors: those of the readers; KVB_ARGUMENT what is asked for is not there; KVB_MISMATCH tables of different shapes;
// those of atomic_file_begin().
kvb_status plot_tables(plot_command *c, kvb_error *err);
kvb_status plot_results(const plot_command *c, kvb_error *err);

// Panels side by side and below each other, as many as fit into the size that was asked for.
typedef struct plot_sheet {
    size_t n_wide, n_high;
    int width, height, panel_width, panel_height;
} plot_sheet;

plot_sheet plot_layout(const plot_command *c, size_t n_wide, size_t n_high);
// Draws panel i, counted row by row.
void plot_panel(FILE *out, const plot_sheet *s, size_t i, const svg_chart *chart);
// Whether lines of this name are wanted.
bool plot_wants(const plot_command *c, const char *name);
