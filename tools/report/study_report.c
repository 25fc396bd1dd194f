// What solve and validate print of tables and studies, as text, and add to their results.
#include "tools/report/study_report.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "study/interval.h"
#include "tools/report/words.h"
#include <math.h>
#include <stdlib.h>

// ---- Tables ---------------------------------------------------------------------------------------------------------

const char *scope_words(solve_scope scope)
{
    return scope == SCOPE_LAYER ? "layer by layer" : "over all layers";
}

void warn_of_pairs(const pair_set *p)
{
    if (p->n_skipped)
        fprintf(stderr, "warning: %u %s without recorded queries %s left out (decoding ended at once)\n", p->n_skipped,
                plural(p->n_skipped, "question", "questions"), plural(p->n_skipped, "is", "are"));
    if (p->fewest_queries != p->most_queries)
        fprintf(stderr,
                "warning: questions with %u to %u recorded queries are mixed; importance is a maximum over queries, so "
                "longer answers look more demanding (profile --ignore-eos makes them equal)\n",
                p->fewest_queries, p->most_queries);
}

// Prints how much less the optimum loses than greedy, on average and at most.
static void print_exact(const study_table *t)
{
    const study_options *o = &t->options;
    uint32_t saved = 0, unproved = 0;
    double most_saved = 0, sum_saved = 0;
    for (uint32_t r = 0; r < o->n_rows; r++) {
        double save = t->greedy[r] > 0 ? 100 * (1 - t->optimum[r] / t->greedy[r]) : 0;
        sum_saved += save / o->n_rows;
        unproved += t->unproved[r];
        if (save > most_saved) saved = r;
        most_saved = fmax(most_saved, save);
    }
    printf("  Exact: the optimum loses %.4f %% less than greedy on average over the ratios, %.4f %% at the most (%g %% "
           "pruned).\n",
           sum_saved, most_saved, 100 * o->ratios[saved]);
    if (unproved)
        printf(
            "  %u of %u rows are not proved to be optimal: a problem was too large, and greedy's budgets were kept.\n",
            unproved, o->n_rows);
}

// Counts the heads on whose budgets the questions disagree by more than the head keeps; flags may be NULL.
static uint32_t count_unsure(const study_table *t, int row, uint8_t *flags)
{
    uint32_t n = t->n_heads;
    return flag_heads(t->prune_ratio + (size_t)row * n, t->std + (size_t)row * n, n, flags);
}

static void print_unsure(const study_table *t)
{
    enum { ROW = 79, SHOWN = 12 };
    uint32_t n = t->n_heads, heads = record_get_shape(t->pairs.from->r).n_kv_heads, shown = 0;
    if (!every_per_cent(&t->options) || n == 0) return;
    uint8_t *flags = need(n, sizeof *flags, "heads");
    uint32_t count = count_unsure(t, ROW, flags);
    if (count) {
        printf(
            "  Not to be trusted at 80 %%, since the questions disagree by more than the head keeps: %u of %u heads,",
            count, n);
        for (uint32_t h = 0; h < n && shown < SHOWN; h++)
            if (flags[h]) printf("%s %u.%u", shown++ ? "," : "", h / heads, h % heads);
        printf("%s (layer.head)\n", count > SHOWN ? " ..." : "");
    }
    free(flags);
}

static void print_loss_row(const study_table *t, size_t r)
{
    double table = t->table_loss[r], bound = t->table_bound[r];
    printf("  %4.4g %%  %8.4f", 100 * t->options.ratios[r], 100 * table);
    if (isnan(bound)) printf("  %8s  %8s", "-", "-");
    else printf("  %8.4f  %8.4f", 100 * bound, table > bound ? 100 * (1 - bound / table) : 0);
    printf("   %8.4f      %8.4f%s\n", 100 * t->uniform_loss[r], 100 * t->loss[r], t->saturated[r] ? "  saturated" : "");
}

static void print_what_is_proved(const study_options *o)
{
    if (o->aggregate == AGGREGATE_MEAN_LOSS)
        printf("  Proved: no budgets that all questions share lose less than the bound. Solved for: the mean loss%s.\n",
               o->shrink > 0 ? ", each head's curve pulled towards the average head's (--shrink)" : "");
    else if (o->aggregate == AGGREGATE_MEAN_RATIO && o->shrink == 0)
        printf("  Proved: every question by itself loses at least the bound; a bound for a shared table is not "
               "known.\n  Solved for: every question's own best budgets.\n");
    else
        printf("  Solved for: %s%s; a bound on the table's mean loss is not known, that of what was solved is in "
               "--json.\n",
               o->aggregate == AGGREGATE_TAIL ? "the texts that lose most" : "every question's own best budgets",
               o->shrink > 0 ? ", curves pulled together" : "");
}

void print_versus(const versus *v, const study_table *t)
{
    static const uint32_t shown[] = {50, 80, 90, 95};
    if (!v->compared) {
        printf("  One text alone: nothing says whether uniform or published budgets lose less on others.\n");
        return;
    }
    printf("  On left-out texts, predicted KL of own / uniform / published (--paper) budgets:");
    for (size_t i = 0; i < sizeof shown / sizeof *shown && !t->options.own_ratios; i++) {
        uint32_t r = shown[i] - 1;
        printf("%s %u %% %.4f / %.4f / %.4f", i ? "," : "", shown[i], v->loss[RIVAL_NONE][r], v->loss[RIVAL_UNIFORM][r],
               v->loss[RIVAL_PUBLISHED][r]);
    }
    uint32_t taken[N_RIVALS] = {0};
    for (uint32_t r = 0; r < t->options.n_rows; r++) taken[v->best[r]]++;
    printf("\n  Taken: own budgets at %u ratios, uniform at %u, published at %u.\n", taken[RIVAL_NONE],
           taken[RIVAL_UNIFORM], taken[RIVAL_PUBLISHED]);
}

void warn_of_table(const study_table *t)
{
    const study_options *o = &t->options;
    uint32_t n = 0, first = 0, last = 0;
    for (uint32_t r = 0; r < o->n_rows; r++) {
        if (!(t->table_loss[r] > t->uniform_loss[r] * (1 + 1e-9))) continue;
        if (n++ == 0) first = r;
        last = r;
    }
    if (n == 0) return;
    fprintf(stderr, "warning: %s: at %u of %u ratios, %g to %g %%, this table loses more than uniform budgets%s\n",
            t->pairs.metric, n, o->n_rows, 100 * o->ratios[first], 100 * o->ratios[last],
            o->limits ? ", because of its constraints: what they pin or raise, other heads must give"
                      : "; take uniform budgets there, or calibrate on longer contexts");
}

void print_table(const study_table *t)
{
    const study_options *o = &t->options;
    static const uint32_t shown[] = {10, 30, 50, 70, 80, 90, 95};
    size_t all = sizeof shown / sizeof *shown, n_shown = o->n_rows;
    if (!o->own_ratios) // the usual ones that there are, and the last one
        for (n_shown = 0; n_shown < all && shown[n_shown] < o->n_rows;) n_shown++;
    bool last = !o->own_ratios && o->n_rows < ROWS;
    char pairs[WORDS_SIZE];
    printf("%s: %s, sink %u, window %u, %s, %s", t->pairs.metric,
           questions_on(pairs, t->pairs.n_pairs, t->pairs.n_contexts, "context"), t->pairs.about.sink,
           t->pairs.about.window, scope_words(o->scope), o->aggregate_name);
    printf("%s\n", o->oracle_order ? "; solved and bound as if the metric ranked perfectly" : "");
    if (t->pairs.loss == LOSS_OUTPUT)
        printf("  pruned     table     bound     gap %%   uniform   solved for   in 0.01 nats: the predicted KL\n");
    else printf("  pruned   table %%   bound %%     gap %%  uniform %%  solved for %%\n");
    for (size_t i = 0; i < n_shown + last; i++) {
        size_t r = i == n_shown ? o->n_rows - 1 : o->own_ratios ? i : shown[i] - 1;
        print_loss_row(t, r);
    }
    print_what_is_proved(o);
    if (t->pairs.n_continued)
        printf("  For caches that are cut while the model writes: %u of the %u pairs go on where the context ends.\n",
               t->pairs.n_continued, t->pairs.n_pairs);
    if (o->exact) print_exact(t);
    print_unsure(t);
    uint32_t first = o->n_rows;
    while (first > 0 && t->saturated[first - 1]) first--;
    if (first < o->n_rows)
        printf("  From %g %% on, heads are at their floor: the table prunes %.2f %% at the most.\n",
               100 * o->ratios[first], 100 * t->effective[o->n_rows - 1]);
}

static void add_table_row(results *to, const study_table *t, uint32_t r)
{
    const study_options *o = &t->options;
    cJSON *row = results_row(to);
    json_put(row, "metric %s ratio %g loss %g lower_bound %g lambda %g table_loss %g table_bound %g", t->pairs.metric,
             o->ratios[r], t->loss[r], t->bound[r], t->lambda[r], t->table_loss[r],
             t->table_bound[r]); // NaN becomes null
    json_put(row, "uniform_loss %g effective_ratio %g unsure_heads %u saturated %d", t->uniform_loss[r],
             t->effective[r], count_unsure(t, r, NULL), t->saturated[r]);
    if (!o->exact) return;
    json_put(row, "greedy %g optimum %g proved %d", t->greedy[r], t->optimum[r], !t->unproved[r]);
}

void add_table(results *to, const study_table *t)
{
    const study_options *o = &t->options;
    cJSON *about = results_detail(to);
    json_put(about, "metric %s sink %u window %u scope %s aggregate %s shrink %g min_keep %g", t->pairs.metric,
             t->pairs.about.sink, t->pairs.about.window, scope_name(o->scope), o->aggregate_name, o->shrink,
             o->min_keep);
    json_put(about, "hull %s order %s", hull_name(o->hull), order_name(o->oracle_order));
    if (o->exact) cJSON_AddStringToObject(about, "solver", "exact");
    json_put(about, "n_contexts %u n_questions %u n_skipped %u solve_seconds %g", t->pairs.n_contexts, t->pairs.n_pairs,
             t->pairs.n_skipped, t->solve_seconds);
    for (uint32_t r = 0; r < o->n_rows; r++) add_table_row(to, t, r);
}

// ---- Texts held out -------------------------------------------------------------------------------------------------

static void print_change(const holdout *h, int percent, int method)
{
    const interval *x = &h->ratio[percent - 1][method];
    printf(" at %d %%: %+.2f %%", percent, 100 * x->value);
    if (!isnan(x->low)) printf(" (%+.2f .. %+.2f)", 100 * x->low, 100 * x->high);
    printf(",");
}

static void print_holdout_losses(const holdout *h)
{
    static const int shown[] = {30, 50, 70, 80, 90, 95};
    enum { N_SHOWN = sizeof shown / sizeof *shown };
    printf("  Loss %%, and against mean_ratio, the published form");
    if (h->n_texts < INTERVAL_GROUPS)
        printf("; %u %s: too few for intervals, which take %d:\n", h->n_texts, plural(h->n_texts, "text", "texts"),
               INTERVAL_GROUPS);
    else printf(", with the 95 %% interval of %u texts, compared text by text:\n", h->n_texts);
    printf("  %-22s", "pruned");
    for (int i = 0; i < N_SHOWN; i++) printf("%9d %%", shown[i]);
    printf("\n");
    for (int m = 0; m < N_METHODS; m++) {
        printf("  %-22s", holdout_methods[m]);
        for (int i = 0; i < N_SHOWN; i++) printf("%11.4f", 100 * h->mean[shown[i] - 1][m].value);
        printf("\n");
    }
    for (int m = 0; m < N_METHODS; m++) {
        int at = 0;
        if (m == METHOD_PAPER) continue;
        double worst = holdout_worst_change(h, m, &at);
        printf("  %-22s", holdout_methods[m]);
        print_change(h, 50, m);
        print_change(h, 80, m);
        printf(" at worst %+.2f %% (%d)\n", 100 * worst, at);
    }
}

void print_holdout(const holdout *h)
{
    char pairs[WORDS_SIZE];
    printf("%s: %s, each text held out, sink %u, window %u, %s\n", h->pairs.metric,
           questions_on(pairs, h->n_pairs, h->n_texts, "text"), h->pairs.about.sink, h->pairs.about.window,
           scope_words(h->options.scope));
    print_holdout_losses(h);
}

void add_holdout(results *to, const holdout *h)
{
    cJSON *about = results_detail(to);
    json_put(about, "metric %s n_texts %u n_questions %u", h->pairs.metric, h->n_texts, h->n_pairs);
    for (int m = 0; m < N_METHODS; m++)
        for (uint32_t r = 0; r < ROWS; r++) {
            cJSON *row = results_row(to);
            json_put(row, "metric %s allocator %s ratio %g", h->pairs.metric, holdout_methods[m], h->options.ratios[r]);
            results_interval(row, "loss", h->mean[r][m]);
            results_interval(row, "change", h->ratio[r][m]);
        }
}

// ---- Ablation -------------------------------------------------------------------------------------------------------

void print_ablation(const ablation *x)
{
    char pairs[WORDS_SIZE];
    printf("%s: %s, sink %u, window %u, %s\n", x->pairs.metric,
           questions_on(pairs, x->pairs.n_pairs, x->pairs.n_contexts, "context"), x->pairs.about.sink,
           x->pairs.about.window, scope_words(x->options.scope));
    printf("  Loss %% of each question's own budgets, equally many tokens kept:\n  pruned");
    for (int w = 0; w < N_WAYS; w++) printf(" %18s", ablation_ways[w]);
    printf("   optimum / AdaKV\n");
    for (int r = 0; r < ABLATION_RATIOS; r++) {
        printf("  %4.0f %%", 100 * x->ratios[r]);
        for (int w = 0; w < N_WAYS; w++) printf(" %18.4f", 100 * x->loss[w][r]);
        printf("   %.3f\n", x->loss[WAY_ADA][r] > 0 ? x->loss[WAY_OPTIMUM][r] / x->loss[WAY_ADA][r] : 1);
    }
}

void add_ablation(results *to, const ablation *x)
{
    cJSON *about = results_detail(to), *ways;
    json_put(about, "metric %s n_questions %u", x->pairs.metric, x->pairs.n_pairs);
    cJSON_AddItemToObject(about, "ratios", cJSON_CreateDoubleArray(x->ratios, ABLATION_RATIOS));
    ways = cJSON_AddObjectToObject(about, "head_loss"); // per allocator [ratio][layer * KV heads + head]
    for (int w = 0; w < N_WAYS; w++) {
        cJSON *heads = cJSON_AddArrayToObject(ways, ablation_ways[w]);
        for (size_t r = 0; r < ABLATION_RATIOS; r++) {
            const double *loss = x->head_loss[w] + r * x->n_heads;
            cJSON *row = results_row(to);
            json_put(row, "metric %s allocator %s ratio %g loss %g", x->pairs.metric, ablation_ways[w], x->ratios[r],
                     x->loss[w][r]);
            cJSON_AddItemToArray(heads, cJSON_CreateDoubleArray(loss, (int)x->n_heads));
        }
    }
}

// ---- Validation -----------------------------------------------------------------------------------------------------

static double relative_excess(double more, double base)
{
    return base > 0 ? more / base - 1 : 0;
}

void print_validation(const validation *v)
{
    int unproved = 0;
    char pairs[WORDS_SIZE];
    printf("%s: %s, sink %u, window %u, %s, %s%s\n", v->pairs.metric,
           questions_on(pairs, v->pairs.n_pairs, v->pairs.n_contexts, "context"), v->pairs.about.sink,
           v->pairs.about.window, scope_words(v->options.scope), v->options.aggregate_name,
           v->options.limits ? ", under constraints" : "");
    printf("   pruned   greedy %%  optimum %%    bound %%  greedy-optimum  optimum-bound%s\n",
           v->table ? "    table %  table-optimum" : "");
    for (uint32_t r = 0; r < v->options.n_rows; r++) {
        printf("  %5.4g %%  %9.5f  %9.5f  %9.5f      %9.2e %%    %9.2e %%", 100 * v->options.ratios[r],
               100 * v->greedy[r], 100 * v->optimum[r], 100 * v->bound[r],
               100 * relative_excess(v->greedy[r], v->optimum[r]),
               100 * (1 - (v->optimum[r] > 0 ? v->bound[r] / v->optimum[r] : 1)));
        if (v->table)
            printf("  %9.5f  %9.2e %%", 100 * v->table_loss[r], 100 * relative_excess(v->table_loss[r], v->optimum[r]));
        printf("%s\n", v->unproved[r] ? "  NOT PROVED" : "");
        unproved += v->unproved[r] > 0;
    }
    printf("  Losses are shares of all importance that can be lost; gaps and costs are shares of the optimum.\n");
    if (v->table)
        printf("  The optimum is of mean curves, the table of whole tokens at every length: it can be slightly lower "
               "where "
               "heads are at their floor.\n");
    if (unproved)
        printf("  %d rows are not proved: a problem was too large, and greedy's loss is shown as the optimum.\n",
               unproved);
}

static void add_validation_row(results *to, const validation *v, uint32_t r)
{
    cJSON *row = results_row(to);
    json_put(row, "metric %s ratio %g greedy %g optimum %g lower_bound %g greedy_gap %g", v->pairs.metric,
             v->options.ratios[r], v->greedy[r], v->optimum[r], v->bound[r], v->greedy[r] - v->optimum[r]);
    json_put(row, "bound_gap %g proved %d", v->optimum[r] - v->bound[r], v->unproved[r] == 0);
    if (v->table) cJSON_AddNumberToObject(row, "table_loss", v->table_loss[r]);
}

void add_validation(results *to, const validation *v)
{
    cJSON *about = results_detail(to);
    json_put(about, "metric %s sink %u window %u scope %s aggregate %s n_contexts %u", v->pairs.metric,
             v->pairs.about.sink, v->pairs.about.window, scope_name(v->options.scope), v->options.aggregate_name,
             v->pairs.n_contexts);
    json_put(about, "n_questions %u n_problems %u greedy_seconds %g exact_seconds %g relaxations %g", v->pairs.n_pairs,
             v->n_problems, v->greedy_seconds, v->exact_seconds, (double)v->work);
    cJSON_AddBoolToObject(about, "constrained", v->options.limits != NULL);
    for (uint32_t r = 0; r < v->options.n_rows; r++) add_validation_row(to, v, r);
}

// ---- Certificates ---------------------------------------------------------------------------------------------------

static void add_check_row(results *to, const table_check *k, const kvb_row *row, uint32_t r, const char *fault)
{
    cJSON *item = results_row(to);
    json_put(item, "metric %s ratio %g lower_bound %g proved_bound %g loss %g table_loss %g", k->pairs.metric,
             row->ratio, row->lower_bound, k->bound[r], row->loss, k->table_loss[r]);
    if (fault) cJSON_AddStringToObject(item, "fault", fault);
    else cJSON_AddNullToObject(item, "fault");
}

kvb_status report_table_check(const table_check *k, results *to, uint32_t *faults, kvb_error *err)
{
    double slack = 0; // how far stored bounds are from recomputed ones
    *faults = 0;
    for (uint32_t r = 0; r < k->options.n_rows; r++) {
        kvb_row row;
        kvb_status status = kvb_table_row(k->table, r, &row, err);
        if (status != KVB_OK) return status;
        const char *fault = table_check_fault(k, &row, r);
        *faults += fault != NULL;
        slack = fmax(slack, fabs(k->bound[r] - row.lower_bound));
        if (to) add_check_row(to, k, &row, r, fault);
        else if (fault)
            printf(
                "  %g %%: %s: stored loss %.12g, bound %.12g, table %.12g; from the record: bound %.12g, table %.12g\n",
                100 * row.ratio, fault, row.loss, row.lower_bound, row.table_loss, k->bound[r], k->table_loss[r]);
    }
    if (!to)
        printf("%s: %u of %u rows hold against %s (%u %s, %s); bounds differ from our own by %.2g of the mass "
               "at the most\n",
               k->path, k->options.n_rows - *faults, k->options.n_rows, k->from.path, k->pairs.n_pairs,
               plural(k->pairs.n_pairs, "question", "questions"), k->pairs.metric, slack);
    return KVB_OK;
}
