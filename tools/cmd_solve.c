// kvbudget solve: a record in, a table of budgets out. Reads the record pair by pair and hands the arrays to solver/.
#include "runtime/fail.h"
#include "tools/solve_job.h"
#include "tools/solve_lengths.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- Solving --------------------------------------------------------------------------------------------------------

// The optimum in place of greedy's budgets, in p and in the sums of the job: `weight` times losses that are shares of
// the problem's total.
static kvb_status improve(const solve_command *s, metric_job *job, problem *p, const loss_curves *curves, double weight,
                          kvb_error *err)
{
    if (s->options.limits) return improve_limited(s, job, p, curves, weight, err);
    allocation *a = &p->allocation;
    exact_result x;
    kvb_status status = exact_init(&x, &curves->shape, s->options.scope, ROWS, err);
    if (status != KVB_OK) return status;
    status = exact_solve(&x, curves, a, NULL, err);
    if (status == KVB_OK && s->monotone) status = exact_nest(&x, curves, a, NULL, err);
    double scale = curves->total > 0 ? 1 / curves->total : 0;
    for (int r = 0; status == KVB_OK && r < ROWS; r++) {
        job->greedy[r] += weight * scale * x.greedy[r];
        job->optimum[r] += weight * scale * x.optimum[r];
        job->unproved[r] |= !x.proved[r];
        p->loss[r] = scale * x.loss[r];
        p->bound[r] = scale * x.bound[r];
    }
    if (status == KVB_OK) memcpy(a->keep, x.keep, sizeof *a->keep * ROWS * a->n_heads);
    exact_free(&x);
    return status;
}

static kvb_status solve_pair(solve_command *s, metric_job *job, problem *p, kvb_error *err)
{
    double start = seconds_now();
    kvb_status status = s->oracle_order ? loss_curves_fill_perfect(&p->curves, job->oracle, err) : KVB_OK;
    if (status == KVB_OK && s->aggregate == AGGREGATE_MEAN_RATIO) status = require_wishes(s, &p->curves, err);
    if (status != KVB_OK) return status;
    // The pair's own curves go into the average; they are pulled together there.
    if (s->aggregate != AGGREGATE_MEAN_RATIO) status = merge_pair(s, job, &p->curves, err);
    else loss_curves_shrink(&p->curves, s->shrink);
    if (status == KVB_OK) status = problem_solve(p, err);
    if (status == KVB_OK && s->exact && !s->mean_loss) status = improve(s, job, p, &p->curves, 1.0 / job->n_pairs, err);
    if (status != KVB_OK) return status;
    job->solve_seconds += seconds_now() - start;
    const allocation *a = &p->allocation;
    size_t cells = (size_t)ROWS * a->n_heads;
    for (size_t i = 0; job->pair_budgets && i < cells; i++)
        job->pair_budgets[job->spread.count * cells + i] = (int32_t)a->keep[i];
    ratio_mean_add(&job->spread, a, p->curves.shape.n_tokens);
    for (int r = 0; s->aggregate == AGGREGATE_MEAN_RATIO && r < ROWS; r++) {
        job->loss[r] += p->loss[r] / job->n_pairs;
        job->bound[r] += p->bound[r] / job->n_pairs;
        job->lambda[r] += p->lambda[r] / job->n_pairs;
        job->saturated[r] |= a->saturated[r];
    }
    return KVB_OK;
}

static kvb_status evaluate_pair(solve_command *s, metric_job *job, problem *p, kvb_error *err)
{
    kvb_status status = judge_table(job->table_loss, &p->curves, s->options.limits, ROWS, job->prune_ratio, err);
    if (status == KVB_OK) status = judge_table(job->uniform_loss, &p->curves, NULL, ROWS, job->uniform, err);
    return status;
}

// The table from the average problem.
static kvb_status solve_merged(solve_command *s, metric_job *job, kvb_error *err)
{
    problem p = {0};
    const loss_curves *curves = &job->merged.curves;
    kvb_status status = require_wishes(s, curves, err);
    if (status == KVB_OK) status = problem_init(&p, &curves->shape, &s->options, err);
    double start = seconds_now();
    if (status == KVB_OK) status = problem_solve_curves(&p, curves, err);
    if (status == KVB_OK && s->exact) status = improve(s, job, &p, curves, curves->total, err);
    job->solve_seconds += seconds_now() - start;
    for (int r = 0; status == KVB_OK && r < ROWS; r++) {
        // The average of shares has a total of 1, or less when there are pairs that cannot lose anything.
        job->loss[r] = p.loss[r] * curves->total;
        job->bound[r] = p.bound[r] * curves->total;
        job->lambda[r] = p.lambda[r] * curves->total;
        job->saturated[r] = p.allocation.saturated[r];
        for (uint32_t h = 0; h < p.allocation.n_heads; h++) {
            size_t i = (size_t)r * p.allocation.n_heads + h;
            job->prune_ratio[i] = 1.0 - (double)p.allocation.keep[i] / curves->shape.n_tokens;
        }
    }
    problem_free(&p);
    return status;
}

// The table of the texts that lose most.
static kvb_status solve_tail(solve_command *s, metric_job *job, kvb_error *err)
{
    robust_result x;
    double start = seconds_now();
    kvb_status status = robust_solve(&x, job->texts, (uint32_t)job->n_texts, s->tail, &s->options, 0, err);
    if (status != KVB_OK) return status;
    job->solve_seconds += seconds_now() - start;
    memcpy(job->prune_ratio, x.prune_ratio, (size_t)ROWS * x.n_heads * sizeof *x.prune_ratio);
    memcpy(job->text_weights, x.weight, (size_t)ROWS * x.n_texts * sizeof *x.weight);
    memcpy(job->loss, x.loss, sizeof job->loss);
    memcpy(job->bound, x.bound, sizeof job->bound);
    memcpy(job->lambda, x.lambda, sizeof job->lambda);
    memcpy(job->saturated, x.saturated, sizeof job->saturated);
    robust_free(&x);
    return KVB_OK;
}

static kvb_status job_begin(solve_command *s, metric_job *job, kvb_error *err)
{
    cache_shape shape;
    kvb_status status = prepare_pairs(s, job, &shape, err);
    if (status != KVB_OK) return status;
    job->n_visits = 2; // to solve, and to judge the table
    size_t heads = shape_heads(&shape), cells = ROWS * heads, bytes = 0;
    if (__builtin_mul_overflow(cells, (size_t)job->n_pairs, &bytes) ||
        __builtin_mul_overflow(bytes, sizeof *job->pair_budgets, &bytes))
        return kvb_fail(err, KVB_UNSUPPORTED, "%u problems of %zu heads are too many", job->n_pairs, heads);
    job->prune_ratio = malloc(cells * sizeof *job->prune_ratio);
    job->std = malloc(cells * sizeof *job->std);
    job->uniform = malloc(cells * sizeof *job->uniform);
    job->pair_budgets = s->budgets ? malloc(bytes) : NULL;
    if (!job->prune_ratio || !job->std || !job->uniform || (s->budgets && !job->pair_budgets))
        return kvb_fail(err, KVB_MEMORY, "no memory for tables of %zu heads", heads);
    for (size_t i = 0; i < cells; i++) job->uniform[i] = s->ratios[i / heads];
    return ratio_mean_init(&job->spread, ROWS, (uint32_t)heads, err);
}

static kvb_status job_solve(solve_command *s, metric_job *job, kvb_error *err)
{
    uint32_t done = 0, heads = job->spread.n_heads;
    progress_begin(&s->bar, job->metric, s->quiet);
    kvb_status status = walk_pairs(s, job, solve_pair, &done, err);
    ratio_mean_get(&job->spread, job->prune_ratio, job->std);
    if (status == KVB_OK) merge_finish(s, job);
    if (status == KVB_OK && s->mean_loss) status = solve_merged(s, job, err);
    if (status == KVB_OK && s->aggregate == AGGREGATE_TAIL) status = solve_tail(s, job, err);
    if (status == KVB_OK && s->aggregate == AGGREGATE_MEAN_RATIO && s->options.limits)
        status = project_table(s, job, err);
    if (status == KVB_OK) status = walk_pairs(s, job, evaluate_pair, &done, err);
    if (status != KVB_OK) {
        progress_end(&s->bar, status == KVB_INTERRUPTED ? "stopped" : "failed");
        return status;
    }
    for (int r = 0; r < ROWS; r++) {
        job->table_loss[r] /= job->n_pairs;
        job->uniform_loss[r] /= job->n_pairs;
        for (uint32_t h = 0; h < heads; h++) job->effective[r] += job->prune_ratio[(size_t)r * heads + h] / heads;
    }
    progress_end(&s->bar, "%u problems solved for %u ratios and certified, %.2f ms each", job->n_pairs, s->n_rows,
                 1e3 * job->solve_seconds / job->n_pairs);
    return KVB_OK;
}

static void job_free(metric_job *job)
{
    release_pairs(job);
    ratio_mean_free(&job->spread);
    free(job->pair_budgets);
    free(job->prune_ratio);
    free(job->std);
    free(job->uniform);
}

// ---- The command ----------------------------------------------------------------------------------------------------

static kvb_status solve_metric(solve_command *s, const char *metric, cJSON *list, kvb_error *err)
{
    if (s->holdout_name) return solve_holdout(s, metric, list, err);
    if (s->ablation) return solve_ablation(s, metric, list, err);
    if (s->lengths) return solve_lengths(s, metric, list, err);
    metric_job *job = calloc(1, sizeof *job);
    if (!job) return kvb_fail(err, KVB_MEMORY, "no memory for metric %s", metric);
    job->metric = metric;
    kvb_status status = job_begin(s, job, err);
    if (status == KVB_OK && metric == s->metrics[0]) warn_of_pairs(job);
    if (status == KVB_OK) status = job_solve(s, job, err);
    if (status == KVB_OK) status = write_results(s, job, err);
    if (status == KVB_OK && list) status = add_results_json(list, s, job, err);
    if (status == KVB_OK && !list) print_results(s, job);
    job_free(job);
    free(job);
    return status;
}

// Whether it measures instead of writing a table.
static bool is_study(const solve_command *s)
{
    return s->holdout_name || s->ablation || s->lengths;
}

// Everything that can be refused before any work is done.
static kvb_status prepare(solve_command *s, kvb_error *err)
{
    kvb_status status = select_from_record(s, err);
    if (status == KVB_OK) status = apply_wishes(s, err);
    if (status != KVB_OK) return status;
    record_shape shape = record_get_shape(s->r);
    if (s->output && (shape.n_heads == 0 || shape.head_dim == 0))
        return kvb_fail(err, KVB_MISMATCH,
                        "%s: the record does not say how many query heads of what size the model has, which a table "
                        "must; import it again with --model-heads and --head-dim, or write --npy only",
                        s->path);
    char path[PATH_SIZE];
    const char *const patterns[] = {s->output, s->npy, s->budgets, s->picture};
    for (int i = 0; i < 4 && status == KVB_OK; i++)
        if (patterns[i]) status = output_path(path, patterns[i], s->metrics[0], "", s->n_metrics > 1, err);
    return status;
}

static kvb_status solve_all(solve_command *s, kvb_error *err)
{
    cJSON *list = s->json ? cJSON_CreateArray() : NULL;
    kvb_status status = s->json && !list ? kvb_fail(err, KVB_MEMORY, "no memory for the JSON text") : KVB_OK;
    if (status == KVB_OK) status = prepare(s, err);
    for (size_t i = 0; i < s->n_metrics && status == KVB_OK; i++) status = solve_metric(s, s->metrics[i], list, err);
    if (status == KVB_OK && list) {
        char *text = cJSON_Print(list);
        if (text) puts(text);
        else status = kvb_fail(err, KVB_MEMORY, "no memory for the JSON text");
        cJSON_free(text);
    }
    cJSON_Delete(list);
    if (status == KVB_OK && !s->output && !s->npy && !s->budgets && !is_study(s) && !s->quiet)
        fprintf(stderr, "no file was written; -o FILE.safetensors writes the table\n");
    return status;
}

// What --holdout, --ablation and --lengths go together with. An exit code.
static int check_study(const solve_command *s)
{
    bool study = is_study(s);
    if (s->holdout_name && strcmp(s->holdout_name, "text") != 0 && strcmp(s->holdout_name, "question") != 0)
        return cli_usage_error(s->self, "--holdout: expected text or question, found '%s'", s->holdout_name);
    if ((s->holdout_name != NULL) + s->ablation + s->lengths > 1)
        return cli_usage_error(s->self,
                               "--holdout, --ablation and --lengths are three studies; run them one after the other");
    if (study && (s->output || s->npy || s->budgets))
        return cli_usage_error(s->self, "%s writes no table: leave out --output, --npy and --budgets",
                               s->lengths    ? "--lengths"
                               : s->ablation ? "--ablation"
                                             : "--holdout");
    if (study && (wishes_limit(&s->wishes) || wishes_ratios(&s->wishes)))
        return cli_usage_error(s->self, "studies know neither constraints nor ratios of the user's; leave them out");
    if (study && s->oracle_order)
        return cli_usage_error(s->self, "--ablation compares both orders by itself, and other studies know only "
                                        "the metric's; leave out --order");
    if (study && s->exact) return cli_usage_error(s->self, "studies solve greedily; leave out --exact");
    if (s->picture && !study)
        return cli_usage_error(s->self,
                               "--picture draws --holdout, --ablation or --lengths; `kvbudget plot` draws tables");
    if (s->picture && !*s->picture) return cli_usage_error(s->self, "a file name is empty");
    return EXIT_DONE;
}

static int run_solve(const cli_command *self, int argc, char **argv)
{
    solve_command s = solve_command_make(self);
    const cli_option options[] = {
        {"metric", 'm', CLI_LIST, &s.metric_names, "M",
         "eviction metric that the table is for, repeatable; 'all': every one of the\nrecord; 'snapkv' is enough when "
         "only one begins like this"},
        {"output", 'o', CLI_TEXT, &s.output, "FILE",
         "the table to write (.safetensors); for several metrics a folder, or a name\nwith {metric} in it"},
        {"npy", 0, CLI_TEXT, &s.npy, "FILE", "also write the prune ratios for kvpress, with a JSON side-car"},
        {"aggregate", 'a', CLI_TEXT, &s.aggregate_name, "HOW",
         "mean_loss (default): the budgets with the least average loss; mean_ratio: the\naverage of every question's "
         "best "
         "budgets; worst: the least loss of the text that\nloses most; cvar:0.2: of the fifth of the texts that lose "
         "most"},
        {"paper", 0, CLI_FLAG, &s.paper, NULL, "as the paper does: --aggregate mean_ratio --shrink 0"},
        {"shrink", 0, CLI_REAL, &s.shrink, "A",
         "pull every row towards uniform, 0 to 1: each head's curve becomes 1 - A of its\nown and A of the average "
         "head's (default: 0.1 with mean_loss, else 0)"},
        {"min-keep", 0, CLI_REAL, &s.min_keep, "F",
         "no head keeps less than this share of its tokens (default: 1 %, or sinks and\nwindow where that is more)"},
        {"scope", 0, CLI_TEXT, &s.scope_name, "SCOPE",
         "global (default): layers share one budget; layer: each meets the ratio"},
        {"hull", 0, CLI_TEXT, &s.hull_name, "RANGE", "feasible (default), or full: as the published code, to compare"},
        {"order", 0, CLI_TEXT, &s.order_name, "ORDER",
         "which token goes first when budgets are made: metric (default), as it will be; or\noracle, as if the metric "
         "ranked perfectly, to compare"},
        {"exact", 0, CLI_FLAG, &s.exact, NULL, "the true optimum at token resolution in place of greedy's budgets"},
        {"monotone", 0, CLI_FLAG, &s.monotone, NULL,
         "with --exact: no head may keep more when more is pruned; says what it costs"},
        {"sink", 0, CLI_COUNT, &s.sink, "N", "first tokens that always stay (default: as recorded with the metric)"},
        {"window", 0, CLI_COUNT, &s.window, "N", "last tokens that always stay (default: as recorded with the metric)"},
        {"contexts", 'c', CLI_TEXT, &s.contexts, "IDS", "use only these contexts, commas between"},
        {"questions", 'q', CLI_COUNT, &s.max_questions, "N", "use only the first N questions of every context"},
        {"budgets", 0, CLI_TEXT, &s.budgets, "FILE",
         "also write every question's own optimum: tokens kept, an int32 .npy\n[questions, 99, layers, KV heads]"},
        CONSTRAINT_OPTIONS(s.wishes),
        {"holdout", 0, CLI_TEXT, &s.holdout_name, "WHAT",
         "write no table, but measure every aggregation on what it has not seen: leave out\neach text, or each "
         "question, in "
         "turn"},
        {"ablation", 0, CLI_FLAG, &s.ablation, NULL,
         "write no table, but compare every question's optimum with uniform, PyramidKV and\nAdaKV budgets, and with "
         "budgets "
         "that ignore how well the metric ranks"},
        {"lengths", 0, CLI_FLAG, &s.lengths, NULL,
         "write no table, but compare tables from several records of the same contexts, cut\nto different lengths "
         "(profile --max-tokens), on each other's"},
        {"picture", 0, CLI_TEXT, &s.picture, "FILE.svg", "with --holdout, --ablation or --lengths: also draw it"},
        {"seed", 0, CLI_COUNT, &s.seed, "N", "with --holdout: of the draws behind its intervals (1)"},
        {"json", 0, CLI_FLAG, &s.json, NULL, "print all 99 rows as JSON instead of the short table"},
        {"quiet", 0, CLI_FLAG, &s.quiet, NULL, "no progress, no file names"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first);
    if (code == EXIT_DONE && (argc == first || (argc - first != 1 && !s.lengths)))
        code = cli_usage_error(self, "expected one record (several with --lengths), found %d operands: kvbudget %s",
                               argc - first, self->synopsis);
    if (code == EXIT_DONE) code = check_solve_options(&s);
    if (code == EXIT_DONE) code = check_study(&s);
    if (code == EXIT_DONE) {
        kvb_error err = {0};
        s.path = argv[first];
        s.records = argv + first;
        s.n_records = (size_t)(argc - first);
        cli_catch_signals();
        if (solve_all(&s, &err) != KVB_OK) code = cli_failed(self, &err);
    }
    solve_command_free(&s);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_solve = {
    "solve",
    "solve RUN.h5 --metric M -o M.safetensors [OPTION]...",
    "turn a record into a table: the best split of the cache over all heads",
    "For every question and every ratio from 1 % to 99 % pruned it finds how many tokens each KV head should\n"
    "keep so that, with this metric choosing which, the least oracle importance is lost, on average over the\n"
    "questions, each loss taken as a share of what that question could lose.\n"
    "\n"
    "It prints, each as a share of all importance that can be lost, averaged over the questions:\n"
    "  loss     of the common budgets (mean_loss), of every question's own best ones (mean_ratio), or the mean\n"
    "           of the texts that lose most (worst, cvar); with --shrink of the curves after pulling\n"
    "  bound    no budgets of this size can lose less there: proved by multipliers\n"
    "  gap      how much of the loss the best possible budgets could save at most\n"
    "  table    loss of the table itself, rounded to whole tokens, on these questions\n"
    "  uniform  the same when all heads keep equally many\n"
    "Rows at which all heads have reached their floor, 1 % or sinks and window, are saturated: they prune less\n"
    "than they say.\n"
    "\n"
    "Budgets come from a greedy sweep, which is optimal for the convex hulls of the loss curves; its budgets are\n"
    "nested: no head gets more when more is pruned. --exact finds the optimum for the curves themselves (of every\n"
    "question with mean_ratio, of the average with mean_loss), which need not be nested. With --monotone rows are\n"
    "solved one after the other from several starting rows, each within its neighbour; the best set is taken and\n"
    "improved row by row. It never loses more than greedy, summed over the rows as a share of the optimum.\n"
    "\n"
    "--holdout says what tables are worth: their loss on texts (or questions) that they were not made from, with\n"
    "intervals; and by text also learning curves, and what every text's table loses on the others. --ablation\n"
    "compares within each question, as figures 2 to 4 of the paper do.\n"
    "\n"
    "--lengths takes several records of the same contexts and says what tables from one length, from all, and from\n"
    "all others lose on each length, the text that is judged being held out; --json and --picture also have the\n"
    "transfer matrix between single texts at single lengths.\n"
    "\n"
    "--order oracle makes LU-KV's table \"without the optimality gap\": budgets that would be best if the metric\n"
    "ranked tokens as the oracle does. `loss` and `bound` are of that order, `table` is what the table loses when the\n"
    "metric ranks.\n"
    "\n"
    "Constraints hold in the table and in what the runtime makes of it, at any length: whole pages (--block),\n"
    "few budgets per layer (--levels), equal totals of tensor-parallel ranks (--ranks), caps of layers, floors and\n"
    "ceilings of heads, heads that keep everything (--pin). They go together, but --levels with --ranks. Wishes\n"
    "that contradict each other, and ratios from --ratios or --bytes that limits do not allow, are refused with the\n"
    "numbers; a table for every per cent ends at the last one that floors and pins allow.\n"
    "\n"
    "Examples:\n"
    "  kvbudget solve run.h5 --metric snapkv:kvpress -o snapkv.safetensors\n"
    "  kvbudget solve run.h5 --metric all -o 'tables/{metric}.safetensors' --npy tables\n"
    "  kvbudget solve run.h5 --metric keydiff --paper --json\n"
    "  kvbudget solve run.h5 --metric keydiff --holdout text --picture holdout.svg\n"
    "  kvbudget solve r1000.h5 r4000.h5 --metric keydiff --lengths\n"
    "  kvbudget solve run.h5 --metric keydiff --exact --monotone -o exact.safetensors\n"
    "  kvbudget solve run.h5 --metric keydiff --paper --order oracle -o no-gap.safetensors\n"
    "  kvbudget solve run.h5 --metric keydiff --block 16 --ranks 3 --pin 0 -o paged.safetensors\n"
    "  kvbudget solve run.h5 --metric keydiff --bytes 256MiB --dtype f16 --tokens 32768 -o 256m.safetensors\n",
    run_solve,
};
