#include "tools/report/compare_report.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "tools/report/results_chart.h"
#include "tools/report/words.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

void add_allocators(results *to, const compared *with)
{
    cJSON *list = cJSON_AddArrayToObject(to->settings, "allocators");
    for (size_t i = 0; i < with->n_allocators; i++) {
        const allocator *a = &with->allocators[i];
        char sha256[65] = "";
        if (a->kind == ALLOCATOR_TABLE && sscanf(a->identity, "table %64s", sha256) == 1)
            results_input(to, "table", a->label, sha256);
        cJSON *o = cJSON_CreateObject();
        cJSON_AddItemToArray(list, o);
        json_put(o, "label %s identity %s", a->label, a->identity);
    }
}

kvb_status compared_write(const results *found, const char *name, kvb_error *err)
{
    char *path = need_text("%s.svg", name);
    chart_list *all = need(1, sizeof *all, "charts");
    charts_add(all, found->rows);
    kvb_status status = results_write_pair(found, name, err);
    if (status == KVB_OK && all->n > 0) status = charts_write(all, path, name, err);
    free_all(all, path);
    return status;
}

// ---- eval: terminal -------------------------------------------------------------------------------------------------

static const char *number(char out[16], int decimals, double value)
{
    if (isnan(value)) snprintf(out, 16, "-");
    else snprintf(out, 16, "%.*f", decimals, value);
    return out;
}

static void print_eval_row(const eval_report *e, const sweep_summary *r)
{
    char text[7][16];
    printf("  %4.0f %%  %-18s %7.4f  %7s..%-7s  %6s  %6s..%-6s  %5.1f  %6.3f  %6s  %6s  %7.2f  %6.2f\n", 100 * r->ratio,
           e->with.methods.columns[r->column].how->label, r->kl.value, number(text[0], 4, r->kl.low),
           number(text[1], 4, r->kl.high), number(text[2], 2, r->to_uniform.value),
           number(text[3], 2, r->to_uniform.low), number(text[4], 2, r->to_uniform.high), 100 * r->agree.value,
           r->nll.value, number(text[6], 2, 100 * r->loss), number(text[5], 2, 100 * r->looked), r->allocated / 0x1p20,
           100 * r->effective);
}

static void print_head(const method *m, double full_nll)
{
    if (m->p.kind) printf("%s, at every step; full cache: NLL %.3f\n", m->p.spec, full_nll);
    else
        printf("%s, %u sinks and %u last tokens stay; full cache: NLL %.3f\n", m->m.spec, m->sink, m->window, full_nll);
    printf("  pruned  allocator               KL  95 %% interval     to uniform  95 %%      top-1 %%     NLL  lost %%  "
           "looks %%      MiB  really %%\n");
}

static bool in_block(const eval_report *e, const sweep_summary *r, size_t which)
{
    return e->with.methods.columns[r->column].method == which;
}

static void print_ratio(const char *of, interval x)
{
    if (isnan(x.value)) return;
    printf(", %.2f", x.value);
    if (!isnan(x.low)) printf(" (%.2f .. %.2f)", x.low, x.high);
    printf(" of %s", of);
}

// Prints what a table is worth at a ratio, and what to do if it is worth nothing. The interval tells how sure that is.
static void print_verdict(const eval_report *e, const sweep_summary *r)
{
    const allocator *a = e->with.methods.columns[r->column].how;
    if (a->kind != ALLOCATOR_TABLE || isnan(r->to_uniform.value) || r->ratio == 0) return;
    printf("  %s at %g %%: KL", a->label, 100 * r->ratio);
    print_ratio("uniform's", r->to_uniform);
    print_ratio("AdaKV's", r->to_ada);
    print_ratio("the published table's", r->to_published);
    printf("\n");
    if (r->to_uniform.value < 1) return;
    printf("    It does not beat uniform budgets on these texts%s. %sProfile texts of this kind and length and solve "
           "again, or prune less.\n",
           r->to_uniform.low > 1 ? "" : ", or too few were judged to tell",
           a->strict ? "" : "Heads may have lost their window: try TABLE.safetensors:strict. ");
}

static void print_block(const eval_report *e, size_t which)
{
    bool any = false;
    for (size_t k = 0; k < e->with.n_ratios; k++)
        for (size_t i = 0; i < e->n_rows; i++) {
            const sweep_summary *r = &e->rows[i];
            if (!in_block(e, r, which) || r->ratio != e->with.ratios[k]) continue;
            if (!any) print_head(&e->with.methods.methods[which], r->full_nll);
            any = true;
            print_eval_row(e, r);
        }
    for (size_t i = 0; i < e->n_rows; i++)
        if (in_block(e, &e->rows[i], which)) print_verdict(e, &e->rows[i]);
    if (any) printf("\n");
}

void eval_report_print(const eval_report *e)
{
    for (size_t m = 0; m < e->with.methods.n; m++) print_block(e, m);
    uint32_t n = e->s->n_texts;
    if (n < INTERVAL_GROUPS)
        printf("%u %s: too few for intervals, which take %d; judge nothing by differences of this size.\n", n,
               plural(n, "text", "texts"), INTERVAL_GROUPS);
    else printf("Intervals are of %u texts: how a mean would move with other texts of the same kinds.\n", n);
}

// ---- eval: JSON and CSV ---------------------------------------------------------------------------------------------

// Adds the mean KL, agreement and NLL of every text.
static void add_texts(const eval_report *e, cJSON *to, size_t cell)
{
    const sweep *s = e->s;
    size_t per_text = s->n_cells / s->n_texts;
    cJSON *texts = cJSON_AddArrayToObject(to, "texts");
    for (uint32_t t = 0; t < s->n_texts; t++) {
        const fidelity_cell *c = &s->cells[cell + t * per_text].result;
        double kl = 0, nll = 0, agree = 0;
        for (uint32_t i = 0; i < s->o.n_next; i++) {
            kl += c->kl[i] / s->o.n_next;
            agree += c->agree[i] / s->o.n_next;
            nll += i + 1 < s->o.n_next ? c->nll[i] / (s->o.n_next - 1) : 0;
        }
        cJSON *o = cJSON_CreateObject();
        cJSON_AddItemToArray(texts, o);
        json_put(o, "text %s kl %g top1 %g nll %g full_nll %g loss %g kept %g", s->texts[t].name, kl, agree, nll,
                 c->full_nll, c->loss, (double)c->kept);
    }
}

static void add_eval_row(const eval_report *e, results *to, const sweep_summary *r, size_t cell)
{
    const method_column *column = &e->with.methods.columns[r->column];
    const method *m = &e->with.methods.methods[column->method];
    cJSON *o = results_row(to), *about = results_detail(to);
    json_put(o, "metric %s acts %s allocator %s ratio %g sink %u window %u refit %u effective_ratio %g", method_name(m),
             m->p.kind ? "every step" : "once", column->how->label, r->ratio, m->sink, m->window, e->s->o.refit,
             r->effective);
    results_interval(o, "kl", r->kl);
    results_interval(o, "kl_to_uniform", r->to_uniform);
    results_interval(o, "kl_to_ada", r->to_ada);
    results_interval(o, "kl_to_published", r->to_published);
    results_interval(o, "top1", r->agree);
    results_interval(o, "nll", r->nll);
    json_put(o, "full_nll %g loss %g looked %g cache_bytes %g cache_allocated %g seconds %g", r->full_nll, r->loss,
             r->looked, r->bytes, r->allocated, r->seconds); // NaN becomes null
    cJSON_AddNumberToObject(about, "row", (double)cell);
    add_texts(e, about, cell);
}

results eval_report_results(const eval_report *e)
{
    results made = results_begin("eval"), *to = &made;
    const model *m = e->s->m;
    results_input(to, "model", m->config.name, m->sha256);
    for (size_t i = 0; i < e->s->n_texts; i++) results_input(to, "text", e->s->texts[i].name, e->s->texts[i].sha256);
    add_allocators(to, &e->with);
    json_put(to->settings, "budgets_version %u backend %s compute %s n_tokens %g n_next %g n_texts %u",
             kvb_budgets_version(), e->device->name, e->device->compute, (double)e->s->o.n_tokens,
             (double)e->s->o.n_next, e->s->n_texts);
    for (size_t i = 0; i < e->n_rows; i++) add_eval_row(e, to, &e->rows[i], i);
    return made;
}

// ---- task -----------------------------------------------------------------------------------------------------------
static const char *method_of(const task_report *r, const task_cell *cell)
{
    return cell->column ? method_name(&r->with.methods.methods[cell->column->method]) : "full";
}

// ---- task: terminal -------------------------------------------------------------------------------------------------

static void print_share(double share)
{
    if (isnan(share)) printf(" %8s", "");
    else printf(" %8.2f", 100 * share);
}

static void print_interval(interval x, bool sign)
{
    if (isnan(x.value)) return;
    if (isnan(x.low)) printf(sign ? "  %+7.2f  %16s" : "  %7.2f  %16s", 100 * x.value, "-");
    else
        printf(sign ? "  %+7.2f  %+7.2f..%+-7.2f" : "  %7.2f  %7.2f..%-7.2f", 100 * x.value, 100 * x.low, 100 * x.high);
}

static void print_task(const task_report *r, const task_study *s, double tokens, size_t n_questions)
{
    printf("%s, %.0f tokens, %zu %s (seed %" PRIu64 ")\n", s->t->spec, tokens, n_questions,
           plural(n_questions, "question", "questions"), r->seed);
    printf("  %-30s %-14s %6s %8s %8s  %7s  %-16s", "metric or policy", "allocator", "ratio", "kept %", "looked %",
           "score", "95 % interval");
    printf(s->n_cells > 1 ? "  to uniform  95 %% interval\n" : "\n");
}

static void print_cell(const task_report *r, const task_cell *cell, const task_outcome *o)
{
    printf("  %-30s %-14s %6g", method_of(r, cell), cell->column ? cell->column->how->label : "", cell->ratio);
    print_share(o->kept);
    print_share(o->looked);
    print_interval(o->score, false);
    print_interval(o->to_uniform, true);
    printf("\n");
}

// ---- task: JSON and CSV ---------------------------------------------------------------------------------------------

static void add_cell(task_report *r, const task_study *s, double tokens, const task_cell *cell, const task_outcome *o)
{
    cJSON *row = results_row(&r->found), *about = results_detail(&r->found), *samples;
    json_put(row, "task %s n_tokens %g samples %u questions %g metric %s", s->t->spec, tokens, s->n_samples,
             (double)o->n_questions, method_of(r, cell));
    if (cell->column)
        cJSON_AddStringToObject(row, "acts",
                                r->with.methods.methods[cell->column->method].p.kind ? "every step" : "once");
    json_put(row, "allocator %s ratio %g refit %u kept %g looked %g", cell->column ? cell->column->how->label : "",
             cell->ratio, cell->column ? s->refit : 0, o->kept, o->looked);
    results_interval(row, "score", o->score);
    results_interval(row, "minus_uniform", o->to_uniform);
    cJSON_AddNumberToObject(about, "row", cJSON_GetArraySize(r->found.rows) - 1);
    samples = cJSON_AddArrayToObject(about, "samples");
    for (uint32_t i = 0; i < s->n_samples; i++)
        cJSON_AddItemToArray(samples,
                             cJSON_CreateDoubleArray(cell->samples[i].scores, (int)cell->samples[i].n_questions));
}

void task_report_open(task_report *r)
{
    r->found = results_begin("task");
    cJSON *settings = r->found.settings;
    results_input(&r->found, "model", r->m->config.name, r->m->sha256);
    json_put(settings, "backend %s compute %s seed %g", r->device->name, r->device->compute, (double)r->seed);
    add_allocators(&r->found, &r->with);
}

kvb_status task_report_add(task_report *r, const task_study *s, double tokens, kvb_error *err)
{
    task_outcome full;
    kvb_status status = task_summarize(s, 0, &full, err);
    if (status != KVB_OK) return status;
    if (r->print) print_task(r, s, tokens, full.n_questions);
    for (size_t i = 0; i < s->n_cells && status == KVB_OK; i++) {
        task_outcome o;
        status = task_summarize(s, i, &o, err);
        if (status != KVB_OK) break;
        if (r->print) print_cell(r, &s->cells[i], &o);
        add_cell(r, s, tokens, &s->cells[i], &o);
    }
    fflush(stdout);
    if (status == KVB_OK && s->n_cells > 1 && full.score.value < 0.5 && !r->quiet)
        fprintf(
            stderr,
            "%s: %.0f of 100 with the full cache; what evicting costs shows only on what the model solves: an easier "
            "form or a shorter --tokens\n",
            s->t->spec, 100 * full.score.value);
    return status;
}
