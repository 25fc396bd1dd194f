// What solve and validate share: the pairs of a record (solve_record.c); and solve's results (solve_results.c).
#pragma once
#include "formats/record.h"
#include "solver/aggregate.h"
#include "solver/exact.h"
#include "solver/problem.h"
#include "solver/robust.h"
#include "tools/cli.h"
#include "tools/solve_constraints.h"
#include <cjson/cJSON.h>
#include <stdio.h>

enum { ROWS = TABLE_ROWS, METRICS_MAX = 64, PATH_SIZE = 4096 };
#define NOT_GIVEN UINT64_MAX

// How pairs become one table: solver/aggregate.h and solver/robust.h.
typedef enum aggregation {
    AGGREGATE_MEAN_RATIO, // every pair solved by itself, prune ratios averaged: the paper
    AGGREGATE_MEAN_LOSS,  // one problem: the average of the pairs' curves
    AGGREGATE_TAIL        // the mean over the texts that lose most
} aggregation;

// Texts are brought to a common grid of at most this many steps where many of their curves are held at a time: by
// AGGREGATE_TAIL and --holdout.
enum { STUDY_GRID = 1024 };

// Of AGGREGATE_MEAN_LOSS, chosen by cross-validation (solver/README.md).
#define DEFAULT_SHRINK 0.1

// The command line as given, and what it selects in the record.
typedef struct solve_command {
    const cli_command *self;
    cli_list metric_names;
    const char *output, *npy, *budgets, *contexts, *aggregate_name, *scope_name, *hull_name, *order_name;
    const char *holdout_name, *picture; // NULL: not given
    uint64_t seed;                      // of draws of texts and questions
    uint64_t sink, window, max_questions;
    double shrink, min_keep; // NaN: not given
    bool json, quiet, paper, ablation, lengths, mean_loss, exact, monotone;
    bool oracle_order;     // budgets are made as if the metric ranked as the oracle does
    aggregation aggregate; // mean_loss: whether it is that
    double tail;           // with AGGREGATE_TAIL: share of the texts, 0 for the worst one
    solve_options options;
    double ratios[ROWS]; // the first n_rows count, the others repeat the last one
    uint32_t n_rows;
    constraint_wishes wishes;
    kvb_limits limits; // used when options.limits points here
    const char *path;
    char *const *records; // [n_records] as given; path is the first one, and the only one but with `lengths`
    size_t n_records;
    record *r;
    size_t *selected; // [n_selected] indices of contexts
    size_t n_selected;
    const char *metrics[METRICS_MAX]; // belong to the record
    size_t n_metrics;
    progress bar;
} solve_command;

// One metric: everything that is summed over its pairs, and the table that comes out.
typedef struct metric_job {
    const char *metric;
    uint32_t sink, window, longest; // longest: tokens of the longest context in use
    char *parameters;               // JSON object text
    uint32_t n_visits;              // how often every pair is read, for the progress bar
    uint32_t n_pairs, n_skipped, n_contexts, fewest_queries, most_queries;
    ratio_mean spread; // of the pairs' own optima
    loss_mean merged;  // used with mean_loss only
    loss_mean *texts;  // [n_texts] used with AGGREGATE_TAIL only, in the order of s->selected
    size_t n_texts;
    double *text_weights; // [R, n_texts] the multipliers of robust.h
    size_t context;       // of the pair that walk_pairs() is at: index in s->selected
    uint32_t question;    // and index in the context
    int32_t *pair_budgets;
    float *scores, *oracle;
    double loss[ROWS], bound[ROWS], lambda[ROWS], table_loss[ROWS], uniform_loss[ROWS], effective[ROWS];
    uint8_t saturated[ROWS];
    // With --exact: greedy's loss, the optimum, and rows that met a limit, in any problem.
    double greedy[ROWS], optimum[ROWS];
    uint8_t unproved[ROWS];
    double *prune_ratio, *std, *uniform; // [R,L,G]
    double solve_seconds;                // hulls, sweep and certificate of all pairs
} metric_job;

// What holds before the command line is read; and the end of it.
solve_command solve_command_make(const cli_command *self);
void solve_command_free(solve_command *s);

// Whether a question of the record takes part; `index` counts within its context.
static inline bool is_selected(const solve_command *s, const record_question_info *q, uint32_t index)
{
    return q->n_queries > 0 && index < s->max_questions;
}

// mean_ratio, mean_loss, worst or cvar:A in s->aggregate_name: fills s->aggregate, s->tail and s->mean_loss. False: none
// of them.
bool read_aggregate(solve_command *s);

// Checks what was given against what there is, and fills s->options, s->ratios, s->aggregate, s->tail, s->mean_loss,
// s->shrink and s->min_keep. An exit code.
int check_solve_options(solve_command *s);

// Adds a pair to what mean_loss or AGGREGATE_TAIL needs of it, and closes that after the last one: pulls the curves
// together as --shrink says.
kvb_status merge_pair(const solve_command *s, metric_job *job, const loss_curves *c, kvb_error *err);
void merge_finish(const solve_command *s, metric_job *job);
// What the wishes mean for this record: fills s->limits, s->options.limits, s->ratios and s->n_rows.
kvb_status apply_wishes(solve_command *s, kvb_error *err);
// The optimum under constraints in place of greedy's budgets, as improve() does it without.
kvb_status improve_limited(const solve_command *s, metric_job *job, problem *p, const loss_curves *curves,
                           double weight, kvb_error *err);
// Brings the table back to whole pages and few levels, after an average of many problems.
kvb_status project_table(const solve_command *s, metric_job *job, kvb_error *err);
// Adds to sum [n_rows] what the prune ratios [n_rows, L, G] lose on a pair, as the runtime rounds them to whole tokens;
// limits: NULL, or what it keeps to.
kvb_status judge_table(double *sum, const loss_curves *c, const kvb_limits *limits, uint32_t n_rows,
                       const double *prune_ratio, kvb_error *err);
// Refuses ratios asked for one by one whose budget is below what the limits demand.
kvb_status require_wishes(const solve_command *s, const loss_curves *c, kvb_error *err);

// Opens the record; finds the contexts and metrics that the command line names.
kvb_status select_from_record(solve_command *s, kvb_error *err);

// A text that the record says about itself; "" where it does not.
const char *attribute_text(const record *r, const char *name);
// Refuses another model than the record's: sha256 is that of the weights of the file `other`. Who does not know the
// weights, "", is not refused.
kvb_status require_model(const solve_command *s, const char *sha256, const char *other, kvb_error *err);

// The metric's protected tokens and parameters, how many pairs of which sizes there are, and memory to read them one by
// one; also for their average, of all or of each text, as the aggregation needs. *longest: shape of the longest context in use.
kvb_status prepare_pairs(const solve_command *s, metric_job *job, cache_shape *longest, kvb_error *err);
// Frees what prepare_pairs() made; also after its failure.
void release_pairs(metric_job *job);

// Tells of questions that are left out or hard to compare.
void warn_of_pairs(const metric_job *job);

// Does one thing with every pair; `p` is made for the context's shape, its curves are filled. job->scores and
// job->oracle hold at least L G longest numbers. Errors name record, context and question.
typedef kvb_status pair_action(solve_command *s, metric_job *job, problem *p, kvb_error *err);
kvb_status walk_pairs(solve_command *s, metric_job *job, pair_action *action, uint32_t *done, kvb_error *err);

// Where a metric's file goes: `pattern` with {metric} replaced, or in the folder `pattern`, or, for one metric, just
// so.
kvb_status output_path(char out[PATH_SIZE], const char *pattern, const char *metric, const char *extension,
                       bool several, kvb_error *err);

// Writes all files that the command line asks for.
kvb_status write_results(const solve_command *s, const metric_job *job, kvb_error *err);
void print_results(const solve_command *s, const metric_job *job);
kvb_status add_results_json(cJSON *list, const solve_command *s, const metric_job *job, kvb_error *err);

// Draws what `draw` makes of `what` to the file that output_path() makes of the pattern.
typedef void picture_drawer(const solve_command *s, const void *what, FILE *out);
kvb_status write_picture(const solve_command *s, const char *pattern, const char *metric, picture_drawer *draw,
                         const void *what, kvb_error *err);

// The studies of solve, in place of a table: solve_holdout.h and solve_ablation.c.
kvb_status solve_holdout(solve_command *s, const char *metric, cJSON *list, kvb_error *err);
kvb_status solve_ablation(solve_command *s, const char *metric, cJSON *list, kvb_error *err);
