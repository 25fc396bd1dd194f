// kvbudget eval: results as a table, JSON, CSV and curves.
#include "tools/report/eval_report.h"
#include "formats/need.h"
#include "tools/report/curves.h"
#include "tools/report/words.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- Terminal ----

static const char *number(char out[16], int decimals, double value)
{
    if (isnan(value)) snprintf(out, 16, "-");
    else snprintf(out, 16, "%.*f", decimals, value);
    return out;
}

static void print_row(const eval_report *e, const sweep_summary *r)
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

// What a table is worth at a ratio, and what to do where it is worth nothing. The interval decides how surely.
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
            print_row(e, r);
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

// ---- JSON and CSV ----

static void add_interval(cJSON *to, const char *name, interval x)
{
    results_interval(to, name, x.value, x.low, x.high);
}

// Per text: mean KL, agreement and NLL.
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
            agree += (double)c->agree[i] / s->o.n_next;
            nll += i + 1 < s->o.n_next ? c->nll[i] / (s->o.n_next - 1) : 0;
        }
        cJSON *o = cJSON_CreateObject();
        cJSON_AddItemToArray(texts, o);
        cJSON_AddStringToObject(o, "text", s->texts[t].name);
        cJSON_AddNumberToObject(o, "kl", kl);
        cJSON_AddNumberToObject(o, "top1", agree);
        cJSON_AddNumberToObject(o, "nll", nll);
        cJSON_AddNumberToObject(o, "full_nll", c->full_nll);
        cJSON_AddNumberToObject(o, "loss", c->loss);
        cJSON_AddNumberToObject(o, "kept", (double)c->kept);
    }
}

static void add_row(const eval_report *e, results *to, const sweep_summary *r, size_t cell)
{
    const method_column *column = &e->with.methods.columns[r->column];
    const method *m = &e->with.methods.methods[column->method];
    cJSON *o = results_row(to), *about = results_detail(to);
    cJSON_AddStringToObject(o, "metric", method_name(m));
    cJSON_AddStringToObject(o, "acts", m->p.kind ? "every step" : "once");
    cJSON_AddStringToObject(o, "allocator", column->how->label);
    cJSON_AddNumberToObject(o, "ratio", r->ratio);
    cJSON_AddNumberToObject(o, "sink", m->sink);
    cJSON_AddNumberToObject(o, "window", m->window);
    cJSON_AddNumberToObject(o, "effective_ratio", r->effective);
    add_interval(o, "kl", r->kl);
    add_interval(o, "kl_to_uniform", r->to_uniform);
    add_interval(o, "kl_to_ada", r->to_ada);
    add_interval(o, "kl_to_published", r->to_published);
    add_interval(o, "top1", r->agree);
    add_interval(o, "nll", r->nll);
    cJSON_AddNumberToObject(o, "full_nll", r->full_nll);
    cJSON_AddNumberToObject(o, "loss", r->loss); // NaN becomes null
    cJSON_AddNumberToObject(o, "looked", r->looked);
    cJSON_AddNumberToObject(o, "cache_bytes", r->bytes);
    cJSON_AddNumberToObject(o, "cache_allocated", r->allocated);
    cJSON_AddNumberToObject(o, "seconds", r->seconds);
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
    cJSON_AddNumberToObject(to->settings, "budgets_version", kvb_budgets_version());
    cJSON_AddStringToObject(to->settings, "backend", e->device->name);
    cJSON_AddStringToObject(to->settings, "compute", e->device->compute);
    cJSON_AddNumberToObject(to->settings, "n_tokens", (double)e->s->o.n_tokens);
    cJSON_AddNumberToObject(to->settings, "n_next", (double)e->s->o.n_next);
    cJSON_AddNumberToObject(to->settings, "n_texts", e->s->n_texts);
    for (size_t i = 0; i < e->n_rows; i++) add_row(e, to, &e->rows[i], i);
    return made;
}

// ---- Curves ----

// Values [kinds, columns, ratios] of both charts.
static void fill_values(const eval_report *e, interval *values)
{
    size_t n = 2 * e->with.methods.n_columns * e->with.n_ratios;
    for (size_t i = 0; i < n; i++) values[i] = (interval){NAN, NAN, NAN};
    for (size_t i = 0; i < e->n_rows; i++) {
        const sweep_summary *r = &e->rows[i];
        for (size_t k = 0; k < e->with.n_ratios; k++) {
            if (r->ratio != e->with.ratios[k]) continue;
            values[curve_place(&e->with, 0, r->column, k)] = r->kl;
            values[curve_place(&e->with, 1, r->column, k)] = r->agree;
        }
    }
}

static kvb_status write_curves(const eval_report *e, const char *path, kvb_error *err)
{
    static const curve_kind KINDS[] = {{"KL to the full cache, nats per token", true, SVG_NUMBERS},
                                       {"likeliest token as with the full cache", false, SVG_SHARES}};
    interval *values = need(2 * e->with.methods.n_columns * e->with.n_ratios, sizeof *values, "rows");
    fill_values(e, values);
    char subtitle[256];
    snprintf(subtitle, sizeof subtitle,
             "%.80s, %u %s of %u tokens, the next %u teacher-forced; bands: 95 %%, texts as observations",
             e->s->m->config.name, e->s->n_texts, plural(e->s->n_texts, "text", "texts"), e->s->o.n_tokens,
             e->s->o.n_next);
    const curve_view view = {.with = &e->with,
                             .title = "What evicting costs, by who splits the cache over the heads",
                             .subtitle = subtitle,
                             .kinds = KINDS,
                             .n_kinds = 2,
                             .values = values};
    kvb_status status = curves_write(path, &view, err);
    free(values);
    return status;
}

kvb_status eval_report_write(const eval_report *e, const results *found, const char *name, kvb_error *err)
{
    char *path = need_text("%s.svg", name);
    kvb_status status = results_write_pair(found, name, err);
    if (status == KVB_OK) status = write_curves(e, path, err);
    free(path);
    return status;
}
