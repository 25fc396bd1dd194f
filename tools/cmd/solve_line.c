#include "tools/cmd/solve_line.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

solve_line solve_line_make(const cli_command *self)
{
    solve_line l = {.self = self, .wanted = {.max_questions = UINT64_MAX}, .options = study_options_make()};
    l.options.shrink = l.options.min_keep = NAN;
    return l;
}

void solve_line_free(solve_line *l)
{
    cli_list_free(&l->metrics);
    wishes_free(&l->wishes);
    kvb_limits_free(&l->limits);
}

// Whether `word` is the second of two words, or *unknown. NULL is the first.
static bool is_second(const char *word, const char *first, const char *second, bool *unknown)
{
    bool is = word && strcmp(word, second) == 0;
    *unknown = word && !is && strcmp(word, first) != 0;
    return is;
}

static int check_loss(solve_line *l)
{
    kvb_error err = {0};
    study_options *o = &l->options;
    const char *loss = l->words.loss;
    o->loss = loss && strcmp(loss, "output") == 0 ? LOSS_OUTPUT : LOSS_IMPORTANCE;
    if (loss && o->loss == LOSS_IMPORTANCE && strcmp(loss, "importance") != 0)
        return cli_usage_error(l->self, "--loss: expected output or importance, found '%s'", loss);
    if (l->words.paper && o->loss == LOSS_OUTPUT)
        return cli_usage_error(l->self, "--paper minimises importance; leave out --loss output");
    if (l->words.gains && gain_choice_parse(&o->gains, l->words.gains, &err) != KVB_OK)
        return cli_usage_error(l->self, "--gains: %s", err.message);
    return EXIT_DONE;
}

static int check_words(solve_line *l)
{
    bool scope, hull, order;
    study_options *o = &l->options;
    const option_words *w = &l->words;
    o->scope = is_second(w->scope, "global", "layer", &scope) ? SCOPE_LAYER : SCOPE_GLOBAL;
    o->hull = is_second(w->hull, "feasible", "full", &hull) ? HULL_FULL : HULL_FEASIBLE;
    o->oracle_order = is_second(w->order, "metric", "oracle", &order);
    if (scope) return cli_usage_error(l->self, "--scope: expected global or layer, found '%s'", w->scope);
    if (hull) return cli_usage_error(l->self, "--hull: expected feasible or full, found '%s'", w->hull);
    if (order) return cli_usage_error(l->self, "--order: expected metric or oracle, found '%s'", w->order);
    return EXIT_DONE;
}

// What --aggregate, --paper, --shrink and --min-keep make together. An exit code.
static int check_aggregation(solve_line *l, const char *otherwise)
{
    kvb_error err = {0};
    study_options *o = &l->options;
    const char *given = l->words.aggregate;
    if (l->words.paper && given) return cli_usage_error(l->self, "--paper is --aggregate mean_ratio; give one of them");
    if (l->words.paper && (!isnan(o->shrink) || !isnan(o->min_keep)))
        return cli_usage_error(l->self, "--paper takes neither --shrink nor --min-keep: the paper has none");
    if (study_options_aggregate(o, given ? given : l->words.paper ? "mean_ratio" : otherwise, &err) != KVB_OK)
        return cli_usage_error(l->self, "--aggregate: %s", err.message);
    l->words.shrink = !isnan(o->shrink);
    if (isnan(o->shrink)) o->shrink = o->aggregate == AGGREGATE_MEAN_LOSS ? DEFAULT_SHRINK : 0;
    if (isnan(o->min_keep)) o->min_keep = 0;
    if (!(o->shrink >= 0 && o->shrink <= 1)) return cli_usage_error(l->self, "--shrink: expected 0 to 1");
    if (!(o->min_keep >= 0 && o->min_keep < 1))
        return cli_usage_error(l->self, "--min-keep: expected 0 to less than 1");
    if (o->aggregate == AGGREGATE_TAIL && o->exact)
        return cli_usage_error(l->self, "--exact solves one problem; %s is found by solving many greedily",
                               o->aggregate_name);
    return EXIT_DONE;
}

static int check_selection(solve_line *l)
{
    const study_options *o = &l->options;
    if (l->metrics.count == 0)
        return cli_usage_error(l->self, "--metric M is missing: for which eviction metric (or all)?");
    if (o->sink != AS_RECORDED && o->sink > UINT32_MAX / 4) return cli_usage_error(l->self, "--sink is out of range");
    if (o->window != AS_RECORDED && o->window > UINT32_MAX / 4)
        return cli_usage_error(l->self, "--window is out of range");
    if (l->wanted.max_questions == 0) l->wanted.max_questions = UINT64_MAX;
    l->wanted.metrics = l->metrics.items;
    l->wanted.n_metrics = l->metrics.count;
    return EXIT_DONE;
}

// What constraints do not go together with.
static int check_limits(const solve_line *l)
{
    const study_options *o = &l->options;
    bool limited = wishes_limit(&l->wishes);
    if (limited && o->aggregate == AGGREGATE_TAIL)
        return cli_usage_error(l->self,
                               "%s mixes the budgets of several problems, which breaks constraints; use "
                               "mean_loss or mean_ratio",
                               o->aggregate_name);
    if (limited && o->hull == HULL_FULL)
        return cli_usage_error(l->self, "--hull full is the published form of greedy, which knows no constraints");
    if (l->outputs.npy && (limited || l->wishes.ratios))
        return cli_usage_error(l->self, "--npy: kvpress expects 99 rows, and keeps to no constraints");
    return EXIT_DONE;
}

int solve_line_check(solve_line *l, const char *aggregate)
{
    const study_options *o = &l->options;
    int code = check_words(l);
    if (code == EXIT_DONE) code = check_loss(l);
    if (code == EXIT_DONE) code = check_aggregation(l, aggregate);
    if (code == EXIT_DONE && o->exact && o->hull == HULL_FULL)
        code = cli_usage_error(l->self, "--hull full is a form of greedy; the exact solution uses no hulls");
    if (code == EXIT_DONE) code = check_selection(l);
    const char *const paths[] = {l->outputs.table, l->outputs.npy, l->outputs.budgets, l->outputs.csv};
    for (int i = 0; i < 4 && code == EXIT_DONE; i++)
        if (paths[i] && !*paths[i]) code = cli_usage_error(l->self, "a file name is empty");
    return code == EXIT_DONE ? check_limits(l) : code;
}

static bool show(void *to, double done, double total)
{
    progress_update(to, done, total, "problems");
    return !cli_stop_requested;
}

study_progress progress_on(progress *bar)
{
    return (study_progress){.update = show, .to = bar};
}
