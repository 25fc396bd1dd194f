// kvbudget refine, the second part: what is written and printed.
#include "formats/need.h"
#include "study/interval.h"
#include "tools/cmd/refine_command.h"
#include "tools/report/results.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const char *const SET_NAMES[SET_COUNT] = {"calibration", "selection", "test"};

// Mean KL at each ratio; NULL: not measured.
static const double *mean_kl(const refine_command *c, refine_set set, bool after)
{
    return c->kl[set] ? c->kl[set] + (after ? c->bench.n_knots : 0) : NULL;
}

// What is left of the KL at one ratio, and how sure that is over the texts of the set.
static interval share_left(const refine_command *c, refine_set set, uint32_t knot)
{
    size_t n = c->bench.n_members[set], K = c->bench.n_knots;
    const double *before = c->kl[set] + 2 * K + knot * n, *after = before + K * n;
    const double **rows = need(2 * n, sizeof *rows, "texts");
    uint32_t *counts = need(n, sizeof *counts, "texts");
    interval found = {NAN, NAN, NAN};
    for (size_t t = 0; t < n; t++) {
        rows[t] = after + t;
        rows[n + t] = before + t;
        counts[t] = 1;
    }
    if (n) found = interval_ratio(&(value_groups){rows, counts, (uint32_t)n}, rows + n);
    free(rows);
    free(counts);
    return found;
}

static void add_numbers(cJSON *to, const char *name, const double *values, uint32_t n)
{
    if (values) cJSON_AddItemToObject(to, name, cJSON_CreateDoubleArray(values, (int)n));
}

// Its texts, what the search saw of it (losses by the objective), and mean KL before and after.
static void describe_set(const refine_command *c, refine_set set, cJSON *to)
{
    const refine_bench *b = &c->bench;
    cJSON *one = cJSON_AddObjectToObject(to, SET_NAMES[set]), *texts = cJSON_AddArrayToObject(one, "texts");
    for (uint32_t t = 0; t < b->n_members[set]; t++)
        cJSON_AddItemToArray(texts, cJSON_CreateString(b->texts[b->members[set][t]].sha256));
    const double *const losses[SET_COUNT][2] = {{c->best.calibration_before, c->best.calibration},
                                                {c->best.selection_before, c->best.selection}};
    add_numbers(one, "loss_before", losses[set][0], b->n_knots);
    add_numbers(one, "loss", losses[set][1], b->n_knots);
    add_numbers(one, "kl_before", mean_kl(c, set, false), b->n_knots);
    add_numbers(one, "kl", mean_kl(c, set, true), b->n_knots);
}

static cJSON *describe(const refine_command *c, bool stopped)
{
    const refine_bench *b = &c->bench;
    cJSON *all = cJSON_CreateObject();
    cJSON_AddStringToObject(all, "from", c->table_sha256);
    cJSON_AddStringToObject(all, "search", c->search);
    cJSON_AddNumberToObject(all, "start_texts", c->n_start);
    cJSON_AddStringToObject(all, "objective", c->objective);
    cJSON_AddBoolToObject(all, "worst", c->worst);
    cJSON_AddNumberToObject(all, "seed", (double)c->e.seed);
    cJSON_AddNumberToObject(all, "evaluations", c->best.evaluations);
    cJSON_AddNumberToObject(all, "rounds", c->best.rounds);
    cJSON_AddBoolToObject(all, "stopped", stopped);
    cJSON_AddBoolToObject(all, "questions", c->e.in.questions);
    cJSON_AddNumberToObject(all, "n_tokens", b->plan.n_tokens);
    cJSON_AddNumberToObject(all, "n_next", b->plan.n_next);
    cJSON_AddStringToObject(all, "compute", b->m->device->b->compute);
    add_numbers(all, "ratios", b->knots, b->n_knots);
    for (int s = 0; s < SET_COUNT; s++) describe_set(c, (refine_set)s, all);
    return all;
}

static void print_result(const refine_command *c)
{
    if (!c->kl[SET_TEST]) return; // stopped before it was judged
    printf("mean KL to the full cache\n%8s", "");
    for (int s = 0; s < SET_COUNT; s++)
        if (c->bench.n_members[s]) printf("  %-26s", SET_NAMES[s]);
    printf("\npruned  ");
    for (int s = 0; s < SET_COUNT; s++)
        if (c->bench.n_members[s]) printf("  before    after     ratio ");
    printf("\n");
    for (uint32_t k = 0; k < c->bench.n_knots; k++) {
        printf("%6.4g %%", 100 * c->bench.knots[k]);
        for (int s = 0; s < SET_COUNT; s++)
            if (c->bench.n_members[s])
                printf("  %-8.4f  %-8.4f  %-6.3f", mean_kl(c, s, false)[k], mean_kl(c, s, true)[k],
                       share_left(c, s, k).value);
        interval left = share_left(c, SET_TEST, k);
        if (isfinite(left.low)) printf("  %.3f .. %.3f", left.low, left.high);
        printf("\n");
    }
    if (isfinite(share_left(c, SET_TEST, 0).low))
        printf("behind the last ratio: its 95 %% interval over the %u test texts\n", c->bench.n_members[SET_TEST]);
}

// One row per set and ratio, and the KLs of single texts.
static void add_rows(const refine_command *c, results *to)
{
    for (int s = 0; s < SET_COUNT; s++)
        for (uint32_t k = 0; k < c->bench.n_knots; k++) {
            const double *before = mean_kl(c, s, false), *after = mean_kl(c, s, true);
            interval left = c->kl[s] ? share_left(c, s, k) : (interval){NAN, NAN, NAN};
            cJSON *o = results_row(to);
            cJSON_AddStringToObject(o, "set", SET_NAMES[s]);
            cJSON_AddNumberToObject(o, "ratio", c->bench.knots[k]);
            cJSON_AddNumberToObject(o, "kl_before", before ? before[k] : NAN); // NaN becomes null: not measured
            cJSON_AddNumberToObject(o, "kl", after ? after[k] : NAN);
            results_interval(o, "kl_left", left);
            if (!c->kl[s]) continue;
            size_t n = c->bench.n_members[s], K = c->bench.n_knots;
            const double *texts = c->kl[s] + 2 * K + k * n;
            cJSON *d = results_detail(to);
            cJSON_AddStringToObject(d, "set", SET_NAMES[s]);
            cJSON_AddNumberToObject(d, "ratio", c->bench.knots[k]);
            cJSON_AddItemToObject(d, "kl_before", cJSON_CreateDoubleArray(texts, (int)n));
            cJSON_AddItemToObject(d, "kl", cJSON_CreateDoubleArray(texts + K * n, (int)n));
        }
}

static kvb_status give_results(const refine_command *c, const cJSON *about, kvb_error *err)
{
    results found = results_begin("refine");
    const eval_inputs *in = &c->e.in;
    results_input(&found, "model", in->m->config.name, in->m->sha256);
    results_input(&found, "table", c->e.with.columns[0].how->path, c->table_sha256);
    for (size_t i = 0; i < in->n_texts; i++) results_input(&found, "text", in->texts[i].name, in->texts[i].sha256);
    cJSON_AddItemToObject(found.settings, "refined", cJSON_Duplicate(about, true));
    add_rows(c, &found);
    kvb_status status = results_give(&found, c->e.out.json, c->e.out.csv, err);
    results_free(&found);
    return status;
}

// What was spent. A long search measures as many a second as the second rate says, a short one as the first.
static void say_work(const refine_command *c, bool stopped)
{
    const refine_bench *b = &c->bench;
    double n = (double)b->n_measured, cutting = b->seconds - b->prefill_seconds;
    fprintf(stderr,
            "wrote %s after %.0f evaluations (%s); %.0f cuts measured, %.2f a second, %.2f without the prefills of %u "
            "texts; %llu known from %s.cells\n",
            c->e.out.name, c->best.evaluations,
            stopped           ? "stopped"
            : c->best.settled ? "the selection texts gained nothing more"
                              : "all that were wanted",
            n, b->seconds > 0 ? n / b->seconds : 0, cutting > 0 ? n / cutting : 0, b->n_prefills,
            (unsigned long long)b->n_known, c->e.out.name);
    if (b->n_alone)
        fprintf(stderr, "and %llu cuts of heads alone, %.2f a second\n", (unsigned long long)b->n_alone,
                (double)b->n_alone / b->alone_seconds);
}

kvb_status refine_write_result(const refine_command *c, bool stopped, bool *written, kvb_error *err)
{
    const refine_bench *b = &c->bench;
    cJSON *about = describe(c, stopped);
    kvb_status status = KVB_OK;
    *written = !stopped || refine_table_may_replace(c->e.out.name, about);
    if (*written) {
        status = refine_table_write(&c->table, b->knots, b->n_knots, c->best.shift, about, c->e.out.name, err);
        if (status == KVB_OK) status = give_results(c, about, err);
        if (status == KVB_OK && !c->e.out.json) print_result(c);
        if (status == KVB_OK && !c->e.out.quiet) say_work(c, stopped);
    }
    cJSON_Delete(about);
    return status;
}
