#include "tools/cmd/solve_studies.h"
#include "runtime/fail.h"
#include "tools/report/study_report.h"
#include <stdlib.h>
#include <string.h>

bool study_given(const study_words *w)
{
    return w->holdout || w->ablation || w->lengths;
}

int study_check(const solve_line *l, const study_words *w)
{
    const solve_outputs *out = &l->outputs;
    bool study = study_given(w);
    if (w->holdout && strcmp(w->holdout, "text") != 0 && strcmp(w->holdout, "question") != 0)
        return cli_usage_error(l->self, "--holdout: expected text or question, found '%s'", w->holdout);
    if ((w->holdout != NULL) + w->ablation + w->lengths > 1)
        return cli_usage_error(l->self,
                               "--holdout, --ablation and --lengths are three studies; run them one after the other");
    if (study && (out->table || out->npy || out->budgets))
        return cli_usage_error(l->self, "%s writes no table: leave out --output, --npy and --budgets",
                               w->lengths    ? "--lengths"
                               : w->ablation ? "--ablation"
                                             : "--holdout");
    if (study && (wishes_limit(&l->wishes) || wishes_ratios(&l->wishes)))
        return cli_usage_error(l->self, "studies know neither constraints nor ratios of the user's; leave them out");
    if (study && l->options.oracle_order)
        return cli_usage_error(l->self, "--ablation compares both orders by itself, and other studies know only "
                                        "the metric's; leave out --order");
    if (study && l->choose_window)
        return cli_usage_error(l->self, "studies take one window; find it with solve --window auto first");
    if (w->ablation && l->options.loss == LOSS_OUTPUT)
        return cli_usage_error(l->self, "--ablation compares orders of importance; leave out --loss output");
    if (study && l->options.exact) return cli_usage_error(l->self, "studies solve greedily; leave out --exact");
    return EXIT_DONE;
}

// ---- The three ------------------------------------------------------------------------------------------------------

static kvb_status run_holdout(const solve_line *l, const study_words *w, const selection *from, const char *metric,
                              results *to, kvb_error *err)
{
    holdout *h = calloc(1, sizeof *h);
    if (!h) return kvb_fail(err, KVB_MEMORY, "no memory for metric %s", metric);
    progress bar;
    study_progress told = progress_on(&bar);
    kvb_status status = holdout_open(h, from, metric, &l->options, strcmp(w->holdout, "question") == 0, w->seed, err);
    if (status == KVB_OK && metric == from->metrics[0]) warn_of_pairs(&h->pairs);
    if (status == KVB_OK) {
        progress_begin(&bar, metric, l->outputs.quiet);
        status = holdout_run(h, &told, err);
        progress_end(&bar, "%s", status == KVB_OK ? "held out and judged" : "stopped");
    }
    if (status == KVB_OK) add_holdout(to, h);
    if (status == KVB_OK && !l->outputs.json) print_holdout(h);
    holdout_free(h);
    free(h);
    return status;
}

static kvb_status run_ablation(const solve_line *l, const selection *from, const char *metric, results *to,
                               kvb_error *err)
{
    ablation x;
    progress bar;
    study_progress told = progress_on(&bar);
    kvb_status status = ablation_open(&x, from, metric, &l->options, err);
    if (status == KVB_OK) {
        progress_begin(&bar, metric, l->outputs.quiet);
        status = ablation_run(&x, &told, err);
        progress_end(&bar, "%s", status == KVB_OK ? "compared" : "stopped");
    }
    if (status == KVB_OK) add_ablation(to, &x);
    if (status == KVB_OK && !l->outputs.json) print_ablation(&x);
    ablation_free(&x);
    return status;
}

// Both walks over all records, each with a bar of its own.
static kvb_status walk_lengths(lengths *x, bool quiet, kvb_error *err)
{
    progress bar;
    study_progress told = progress_on(&bar);
    kvb_status status = KVB_OK;
    for (uint32_t k = 0; k < x->n_cuts && status == KVB_OK; k++) {
        progress_begin(&bar, x->cuts[k].name, quiet);
        status = lengths_read(x, k, &told, err);
        progress_end(&bar, status == KVB_OK ? "read" : "stopped");
    }
    if (status == KVB_OK) status = lengths_fit(x, err);
    for (uint32_t k = 0; k < x->n_cuts && status == KVB_OK; k++) {
        progress_begin(&bar, x->cuts[k].name, quiet);
        status = lengths_judge(x, k, &told, err);
        progress_end(&bar, status == KVB_OK ? "judged" : "stopped");
    }
    return status;
}

static kvb_status run_lengths(const solve_line *l, const study_words *w, const char *metric, results *to,
                              kvb_error *err)
{
    lengths *x = calloc(1, sizeof *x);
    if (!x) return kvb_fail(err, KVB_MEMORY, "no memory for metric %s", metric);
    const selection_request wanted = {&metric, 1, l->wanted.contexts, l->wanted.max_questions, NULL};
    kvb_status status = lengths_open(x, w->records, w->n_records, &wanted, &l->options, err);
    if (status == KVB_OK) status = walk_lengths(x, l->outputs.quiet, err);
    if (status == KVB_OK) add_lengths(to, x);
    if (status == KVB_OK && !l->outputs.json) print_lengths(x);
    lengths_free(x);
    free(x);
    return status;
}

kvb_status run_study(const solve_line *l, const study_words *w, const selection *from, const char *metric, results *to,
                     kvb_error *err)
{
    if (w->holdout) return run_holdout(l, w, from, metric, to, err);
    if (w->ablation) return run_ablation(l, from, metric, to, err);
    return run_lengths(l, w, metric, to, err);
}
