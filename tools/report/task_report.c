// kvbudget task: results as a table, JSON, CSV and curves.
#include "tools/report/task_report.h"
#include "formats/need.h"
#include "tools/report/curves.h"
#include "tools/report/words.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *method_of(const task_report *r, const task_cell *cell)
{
    return cell->column ? method_name(&r->with.methods.methods[cell->column->method]) : "full";
}

void task_report_answer(const task_report *r, const task_cell *cell, const task_sample *s, size_t question,
                        const task_turn *turn)
{
    printf("  %s question %zu, %s", s->id, question + 1, method_of(r, cell));
    if (cell->column) printf(" %s %g", cell->column->how->label, cell->ratio);
    printf(": score %.2f, expected", turn->score);
    for (size_t k = 0; k < turn->question->n_gold; k++) printf("%s \"%s\"", k ? "," : "", turn->question->gold[k]);
    printf(", found \"");
    for (const char *p = turn->answer; *p; p++) putchar(*p == '\n' ? ' ' : *p);
    printf("\"\n");
}

// ---- Terminal ----

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

// ---- The report ----

static void add_interval(cJSON *to, const char *name, interval x)
{
    results_interval(to, name, x.value, x.low, x.high);
}

static void add_cell(task_report *r, const task_study *s, double tokens, const task_cell *cell, const task_outcome *o)
{
    cJSON *row = results_row(&r->found), *about = results_detail(&r->found), *samples;
    cJSON_AddStringToObject(row, "task", s->t->spec);
    cJSON_AddNumberToObject(row, "n_tokens", tokens);
    cJSON_AddNumberToObject(row, "samples", s->n_samples);
    cJSON_AddNumberToObject(row, "questions", (double)o->n_questions);
    cJSON_AddStringToObject(row, "metric", method_of(r, cell));
    cJSON_AddStringToObject(row, "allocator", cell->column ? cell->column->how->label : "");
    cJSON_AddNumberToObject(row, "ratio", cell->ratio);
    cJSON_AddNumberToObject(row, "kept", o->kept);
    cJSON_AddNumberToObject(row, "looked", o->looked);
    add_interval(row, "score", o->score);
    add_interval(row, "minus_uniform", o->to_uniform);
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
    cJSON_AddStringToObject(settings, "backend", r->device->name);
    cJSON_AddStringToObject(settings, "compute", r->device->compute);
    cJSON_AddNumberToObject(settings, "seed", (double)r->seed);
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

// ---- Files, from the report ----

static double number_in(const cJSON *row, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(row, name);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

static const char *text_in(const cJSON *row, const char *name)
{
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(row, name));
    return text ? text : "";
}

// A column's score at a ratio, of one task.
static interval score_of(const task_report *r, const char *name, uint32_t column, double ratio)
{
    const cJSON *row;
    const method_column *wanted = &r->with.methods.columns[column];
    cJSON_ArrayForEach(row, r->found.rows)
    {
        if (strcmp(text_in(row, "task"), name) == 0 &&
            strcmp(text_in(row, "metric"), method_name(&r->with.methods.methods[wanted->method])) == 0 &&
            strcmp(text_in(row, "allocator"), wanted->how->label) == 0 && number_in(row, "ratio") == ratio)
            return (interval){number_in(row, "score"), number_in(row, "score_low"), number_in(row, "score_high")};
    }
    return (interval){NAN, NAN, NAN};
}

// One chart per task: each begins with the row of the full cache.
static size_t list_tasks(const task_report *r, curve_kind *kinds)
{
    const cJSON *row;
    size_t n = 0;
    cJSON_ArrayForEach(row, r->found.rows)
    {
        if (*text_in(row, "allocator")) continue;
        if (kinds) kinds[n] = (curve_kind){text_in(row, "task"), false, SVG_SHARES};
        n++;
    }
    return n;
}

static kvb_status write_curves(const task_report *r, const char *path, kvb_error *err)
{
    size_t n = list_tasks(r, NULL);
    curve_kind *kinds = need(n, sizeof *kinds, "tasks");
    interval *values = need(n * r->with.methods.n_columns * r->with.n_ratios, sizeof *values, "scores");
    list_tasks(r, kinds);
    for (size_t i = 0; i < n; i++)
        for (uint32_t c = 0; c < r->with.methods.n_columns; c++)
            for (size_t k = 0; k < r->with.n_ratios; k++)
                values[curve_place(&r->with, i, c, k)] = score_of(r, kinds[i].title, c, r->with.ratios[k]);
    char subtitle[256];
    snprintf(subtitle, sizeof subtitle, "%.80s, %llu tokens asked for; bands: 95 %%, samples as observations",
             r->m->config.name, (unsigned long long)r->tokens);
    const curve_view view = {.with = &r->with,
                             .title = "Right answers after evicting, by who splits the cache over the heads",
                             .subtitle = subtitle,
                             .kinds = kinds,
                             .n_kinds = n,
                             .values = values};
    kvb_status status = curves_write(path, &view, err);
    free(kinds);
    free(values);
    return status;
}

kvb_status task_report_write(const task_report *r, const char *name, kvb_error *err)
{
    char *path = need_text("%s.svg", name);
    kvb_status status = results_write_pair(&r->found, name, err);
    if (status == KVB_OK && r->with.methods.n_columns) status = write_curves(r, path, err);
    free(path);
    return status;
}
