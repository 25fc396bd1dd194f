// A solved table as text and as JSON, and the warnings about its pairs.
#include "runtime/fail.h"
#include "study/versus.h"
#include "tools/report/study_report.h"
#include "tools/report/words.h"
#include <math.h>
#include <stdlib.h>

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

// What exactness brought, and where it was most.
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

// Heads on whose budgets the questions disagree by more than the head keeps.
static uint32_t count_unsure(const study_table *t, int row, uint8_t *flags)
{
    uint32_t n = t->n_heads;
    return flag_heads(t->prune_ratio + (size_t)row * n, t->std + (size_t)row * n, n, flags);
}

static void print_unsure(const study_table *t)
{
    enum { ROW = 79, SHOWN = 12 };
    uint32_t n = t->n_heads, heads = record_get_shape(t->pairs.from->r).n_kv_heads, shown = 0;
    uint8_t *flags = every_per_cent(&t->options) && n ? calloc(n, 1) : NULL;
    if (!flags) return;
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
        printf("  Proved: every question by itself loses at least the bound; what a shared table loses at least is not "
               "known.\n  Solved for: every question's own best budgets.\n");
    else
        printf("  Solved for: %s%s; a bound on the table's mean loss is not known, one on what was solved stands in "
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
    if (!o->own_ratios) // those that there are, and the last one
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
    if (o->exact) print_exact(t);
    print_unsure(t);
    uint32_t first = o->n_rows;
    while (first > 0 && t->saturated[first - 1]) first--;
    if (first < o->n_rows)
        printf("  From %g %% on, heads are at their floor: the table prunes %.2f %% at the most.\n",
               100 * o->ratios[first], 100 * t->effective[o->n_rows - 1]);
}

static void add_row(results *to, const study_table *t, uint32_t r)
{
    const study_options *o = &t->options;
    cJSON *row = results_row(to);
    cJSON_AddStringToObject(row, "metric", t->pairs.metric);
    cJSON_AddNumberToObject(row, "ratio", o->ratios[r]);
    cJSON_AddNumberToObject(row, "loss", t->loss[r]);
    cJSON_AddNumberToObject(row, "lower_bound", t->bound[r]);
    cJSON_AddNumberToObject(row, "lambda", t->lambda[r]);
    cJSON_AddNumberToObject(row, "table_loss", t->table_loss[r]);
    cJSON_AddNumberToObject(row, "table_bound", t->table_bound[r]); // NaN becomes null
    cJSON_AddNumberToObject(row, "uniform_loss", t->uniform_loss[r]);
    cJSON_AddNumberToObject(row, "effective_ratio", t->effective[r]);
    cJSON_AddNumberToObject(row, "unsure_heads", count_unsure(t, r, NULL));
    cJSON_AddBoolToObject(row, "saturated", t->saturated[r]);
    if (!o->exact) return;
    cJSON_AddNumberToObject(row, "greedy", t->greedy[r]);
    cJSON_AddNumberToObject(row, "optimum", t->optimum[r]);
    cJSON_AddBoolToObject(row, "proved", !t->unproved[r]);
}

void add_table(results *to, const study_table *t)
{
    const study_options *o = &t->options;
    cJSON *about = results_detail(to);
    cJSON_AddStringToObject(about, "metric", t->pairs.metric);
    cJSON_AddNumberToObject(about, "sink", t->pairs.about.sink);
    cJSON_AddNumberToObject(about, "window", t->pairs.about.window);
    cJSON_AddStringToObject(about, "scope", scope_name(o->scope));
    cJSON_AddStringToObject(about, "aggregate", o->aggregate_name);
    cJSON_AddNumberToObject(about, "shrink", o->shrink);
    cJSON_AddNumberToObject(about, "min_keep", o->min_keep);
    cJSON_AddStringToObject(about, "hull", hull_name(o->hull));
    cJSON_AddStringToObject(about, "order", order_name(o->oracle_order));
    if (o->exact) cJSON_AddStringToObject(about, "solver", "exact");
    cJSON_AddNumberToObject(about, "n_contexts", t->pairs.n_contexts);
    cJSON_AddNumberToObject(about, "n_questions", t->pairs.n_pairs);
    cJSON_AddNumberToObject(about, "n_skipped", t->pairs.n_skipped);
    cJSON_AddNumberToObject(about, "solve_seconds", t->solve_seconds);
    for (uint32_t r = 0; r < o->n_rows; r++) add_row(to, t, r);
}
