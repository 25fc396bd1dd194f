// kvbudget learn: a record in, a ranking of tokens out.
#include "formats/need.h"
#include "tools/cmd/solve_line.h"
#include "tools/json_print.h"
#include "tools/report/learn_report.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct learn_command {
    const cli_command *self;
    cli_list features;
    const char *output, *target;
    selection_request wanted;
    learn_options options;
    uint64_t sink;
    bool own, json, quiet;
} learn_command;

static kvb_status fit_and_write(learn_command *c, const selection *from, kvb_error *err)
{
    progress bar;
    char name[24] = "";
    study_progress told = progress_on(&bar);
    learned *l = need(1, sizeof *l, "rankings");
    progress_begin(&bar, "learn", c->quiet);
    kvb_status status = learn_fit(l, from, &c->options, &told, err);
    if (status == KVB_OK) progress_end(&bar, "%u fits judged on %zu texts left out", l->n_trials, from->n_contexts);
    else progress_end(&bar, status == KVB_INTERRUPTED ? "stopped" : "failed");
    if (status == KVB_OK) status = learn_write(l, c->output, name, err);
    if (status == KVB_OK && !c->quiet) fprintf(stderr, "wrote %s\n", c->output);
    if (status == KVB_OK && c->json) {
        cJSON *o = learned_to_json(l, name);
        json_print(o);
        cJSON_Delete(o);
    } else if (status == KVB_OK) {
        print_learned(l, name);
    }
    learn_free(l);
    free(l);
    return status;
}

static kvb_status run_learn(learn_command *c, const char *path, kvb_error *err)
{
    selection from = {0};
    const char *any = "all";
    c->wanted.metrics = c->features.count ? c->features.items : &any;
    c->wanted.n_metrics = c->features.count ? c->features.count : 1;
    kvb_status status = selection_open(&from, path, &c->wanted, err);
    if (status == KVB_OK) status = fit_and_write(c, &from, err);
    selection_close(&from);
    return status;
}

static int check(learn_command *c, int n_operands)
{
    learn_options *o = &c->options;
    if (n_operands != 1 || !c->output || !*c->output)
        return cli_usage_error(c->self, "expected one record and -o FILE: kvbudget %s", c->self->synopsis);
    if (!isnan(o->lambda) && !(o->lambda > 0 && o->lambda <= 1e6))
        return cli_usage_error(c->self, "--lambda: expected a number above 0");
    if (!isnan(o->exponent) && !(o->exponent >= 0 && o->exponent <= 2))
        return cli_usage_error(c->self, "--exponent: expected 0 to 2");
    if (c->sink > 65536) return cli_usage_error(c->self, "--sink: expected at most 65536");
    if (c->wanted.max_questions == 0) c->wanted.max_questions = UINT64_MAX;
    o->target = strcmp(c->target, "max") == 0 ? TARGET_MAX : TARGET_MEAN;
    o->sink = (uint32_t)c->sink;
    o->layer_mean = !c->own;
    o->frozen = c->own;
    return EXIT_DONE;
}

static int learn_main(const cli_command *self, int argc, char **argv)
{
    learn_command c = {.self = self,
                       .target = "max",
                       .wanted = {.max_questions = UINT64_MAX},
                       .options = {.lambda = NAN, .exponent = NAN},
                       .sink = 4};
    const cli_option options[] = {
        {"output", 'o', CLI_WRITES(FILE_RANKING), &c.output, "FILE", "the ranking to write (.safetensors)"},
        {"feature", 'f', CLI_LIST, &c.features, "M",
         "recorded metric that the ranking uses, repeatable (default: all of the record)"},
        {"own", 0, CLI_FLAG, &c.own, NULL,
         "rank each token by its own scores only: without the mean over the layer's heads, and with the\nmeans and "
         "deviations of the calibration; for caches that are cut again while the model writes"},
        {"target", 0, CLI_CHOICE, &c.target, "max|mean",
         "what a token is worth: max (default), its importance to the question that needs it\nmost; mean, the mean "
         "over the questions"},
        {"lambda", 0, CLI_REAL, &c.options.lambda, "L",
         "strength of the ridge regression (default: chosen by held-out loss)"},
        {"exponent", 0, CLI_REAL, &c.options.exponent, "E",
         "weight of a token: its importance to this power (default: chosen by held-out loss)"},
        {"sink", 0, CLI_COUNT, &c.sink, "N", "first tokens that are always kept and not fitted (4)"},
        {"contexts", 'c', CLI_TEXT, &c.wanted.contexts, "IDS", "use only these contexts, separated by commas"},
        {"questions", 'q', CLI_COUNT, &c.wanted.max_questions, "N",
         "use only the first N questions of every context; 0: all"},
        {"json", 0, CLI_FLAG, &c.json, NULL, "print all trials as JSON instead of the table"},
        {"quiet", 0, CLI_FLAG, &c.quiet, NULL, "no progress and no names of files"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first);
    if (code == EXIT_DONE) code = check(&c, argc - first);
    if (code == EXIT_DONE) {
        kvb_error err = {0};
        cli_catch_signals();
        if (run_learn(&c, argv[first], &err) != KVB_OK) code = cli_failed(self, &err);
    }
    cli_list_free(&c.features);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_learn = {
    .name = "learn",
    .synopsis = "learn RUN.h5 -o RANK.safetensors [OPTION]...",
    .summary = "fit a ranking of tokens to a record, from its metrics, for each head",
    .details =
        "Budgets say how many tokens a head keeps; the metric says which ones, and most of the loss comes from\nthat "
        "choice. For every KV head, learn fits a ridge regression of the oracle importance on the recorded metrics'\n"
        "scores (z and z|z| over the head's tokens, and the mean of z over the layer's KV heads, which\n"
        "finds rare tokens that one head overlooks) and on recency. It takes seconds.\n"
        "\n"
        "lambda and exponent are chosen by what is lost on texts left out in turn. For a ranking that needs no\n"
        "queries, name only metrics that need none with --feature.\n"
        "\n"
        "The ranking is a metric: --metric learned=RANK.safetensors in solve, profile, eval and task. Its budgets\n"
        "are solved from the record that it was fitted to, each text ranked by weights that have not seen it. The\n"
        "table carries the ranking, so an engine needs no other file (kvb_rank). docs/ranking.md has figures.\n"
        "\n"
        "Examples:\n"
        "  kvbudget profile model.gguf calib.jsonl -o run.h5 --metric keydiff --metric ea --metric knorm\n"
        "  kvbudget learn run.h5 -o rank.safetensors\n"
        "  kvbudget solve run.h5 --metric learned=rank.safetensors -o learned.safetensors\n"
        "  kvbudget eval model.gguf learned.safetensors text.txt -o worth\n"
        "  kvbudget inspect rank.safetensors\n",
    .run = learn_main,
};
