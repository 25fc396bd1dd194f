// kvbudget task: results as a table, JSON, CSV and curves.
#include "tools/report/task_report.h"
#include "formats/atomic_file.h"
#include "formats/json_file.h"
#include "runtime/fail.h"
#include "tools/report/curves.h"
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
    printf(sign ? "  %+7.2f  %+7.2f..%+-7.2f" : "  %7.2f  %7.2f..%-7.2f", 100 * x.value, 100 * x.low, 100 * x.high);
}

static void print_task(const task_report *r, const task_study *s, double tokens, size_t n_questions)
{
    printf("%s, %.0f tokens, %zu questions (seed %" PRIu64 ")\n", s->t->spec, tokens, n_questions, r->seed);
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

static bool add_interval(cJSON *to, const char *name, interval x)
{
    cJSON *o = cJSON_AddObjectToObject(to, name);
    return o && cJSON_AddNumberToObject(o, "value", x.value) && cJSON_AddNumberToObject(o, "low", x.low) &&
           cJSON_AddNumberToObject(o, "high", x.high);
}

static bool add_cell(const task_report *r, cJSON *list, const task_study *s, const task_cell *cell,
                     const task_outcome *o)
{
    cJSON *row = cJSON_CreateObject(), *samples;
    bool good = row && cJSON_AddItemToArray(list, row) && cJSON_AddStringToObject(row, "method", method_of(r, cell)) &&
                cJSON_AddStringToObject(row, "allocator", cell->column ? cell->column->how->label : "") &&
                cJSON_AddNumberToObject(row, "ratio", cell->ratio) && cJSON_AddNumberToObject(row, "kept", o->kept) &&
                cJSON_AddNumberToObject(row, "looked", o->looked) && add_interval(row, "score", o->score) &&
                add_interval(row, "minus_uniform", o->to_uniform) && (samples = cJSON_AddArrayToObject(row, "samples"));
    for (uint32_t i = 0; good && i < s->n_samples; i++) {
        cJSON *scores = cJSON_CreateDoubleArray(cell->samples[i].scores, (int)cell->samples[i].n_questions);
        good = scores && cJSON_AddItemToArray(samples, scores);
    }
    return good;
}

static cJSON *begin_task(task_report *r, const task_study *s, double tokens, size_t n_questions)
{
    cJSON *tasks = cJSON_GetObjectItemCaseSensitive(r->document, "tasks"), *o = cJSON_CreateObject();
    bool good = o && cJSON_AddItemToArray(tasks, o) && cJSON_AddStringToObject(o, "task", s->t->spec) &&
                cJSON_AddNumberToObject(o, "n_tokens", tokens) && cJSON_AddNumberToObject(o, "samples", s->n_samples) &&
                cJSON_AddNumberToObject(o, "questions", (double)n_questions);
    return good ? cJSON_AddArrayToObject(o, "results") : NULL;
}

static cJSON *begin_report(const task_report *r)
{
    cJSON *root = cJSON_CreateObject(), *about;
    bool good = root && cJSON_AddStringToObject(root, "format", "kvbudget-task") &&
                cJSON_AddNumberToObject(root, "format_version", 1) &&
                cJSON_AddStringToObject(root, "tool_version", kvb_version()) &&
                cJSON_AddStringToObject(root, "backend", r->device->name) &&
                cJSON_AddStringToObject(root, "compute", r->device->compute) &&
                cJSON_AddNumberToObject(root, "seed", (double)r->seed) &&
                cJSON_AddNumberToObject(root, "resamples", INTERVAL_RESAMPLES) &&
                (about = cJSON_AddObjectToObject(root, "model")) &&
                cJSON_AddStringToObject(about, "name", r->m->config.name) &&
                cJSON_AddStringToObject(about, "sha256", r->m->sha256) && add_allocators(root, &r->with);
    if (good && cJSON_AddArrayToObject(root, "tasks")) return root;
    cJSON_Delete(root);
    return NULL;
}

kvb_status task_report_add(task_report *r, const task_study *s, double tokens, kvb_error *err)
{
    task_outcome full;
    kvb_status status = task_summarize(s, 0, r->seed, &full, err);
    if (status != KVB_OK) return status;
    if (!r->document) r->document = begin_report(r);
    cJSON *list = r->document ? begin_task(r, s, tokens, full.n_questions) : NULL;
    if (!list) return kvb_fail(err, KVB_MEMORY, "no memory for the results of %s", s->t->spec);
    if (r->print) print_task(r, s, tokens, full.n_questions);
    for (size_t i = 0; i < s->n_cells && status == KVB_OK; i++) {
        task_outcome o;
        status = task_summarize(s, i, r->seed, &o, err);
        if (status != KVB_OK) break;
        if (r->print) print_cell(r, &s->cells[i], &o);
        if (!add_cell(r, list, s, &s->cells[i], &o))
            status = kvb_fail(err, KVB_MEMORY, "no memory for the results of %s", s->t->spec);
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

static double number_in(const cJSON *row, const char *object, const char *name)
{
    const cJSON *from = object ? cJSON_GetObjectItemCaseSensitive(row, object) : row,
                *item = cJSON_GetObjectItemCaseSensitive(from, name);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

static const char *text_in(const cJSON *row, const char *name)
{
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(row, name));
    return text ? text : "";
}

static void put_row(FILE *out, const task_report *r, const cJSON *one, const cJSON *row)
{
    const double values[] = {number_in(row, NULL, "kept"),           number_in(row, NULL, "looked"),
                             number_in(row, "score", "value"),       number_in(row, "score", "low"),
                             number_in(row, "score", "high"),        number_in(row, "minus_uniform", "value"),
                             number_in(row, "minus_uniform", "low"), number_in(row, "minus_uniform", "high")};
    fprintf(out, "\"%s\",%.0f,%" PRIu64 ",%.0f,%.0f,\"%s\",%s,%g", text_in(one, "task"),
            number_in(one, NULL, "n_tokens"), r->seed, number_in(one, NULL, "samples"),
            number_in(one, NULL, "questions"), text_in(row, "method"), text_in(row, "allocator"),
            number_in(row, NULL, "ratio"));
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        if (isnan(values[i])) fprintf(out, ",");
        else fprintf(out, ",%.6f", values[i]);
    fprintf(out, "\n");
}

static kvb_status write_csv(const task_report *r, const char *path, kvb_error *err)
{
    atomic_file file;
    const cJSON *one, *row;
    kvb_status status = atomic_file_begin(&file, path, err);
    if (status != KVB_OK) return status;
    fprintf(file.stream,
            "task,tokens,seed,samples,questions,method,allocator,ratio,kept,looked,score,score_low,score_high,"
            "minus_uniform,minus_uniform_low,minus_uniform_high\n");
    cJSON_ArrayForEach(one, cJSON_GetObjectItemCaseSensitive(r->document, "tasks"))
    {
        cJSON_ArrayForEach(row, cJSON_GetObjectItemCaseSensitive(one, "results"))
        {
            put_row(file.stream, r, one, row);
        }
    }
    return atomic_file_commit(&file, err);
}

// A column's score at a ratio, of one task.
static interval score_of(const task_report *r, const cJSON *from, uint32_t column, double ratio)
{
    const cJSON *row;
    const method_column *wanted = &r->with.methods.columns[column];
    cJSON_ArrayForEach(row, cJSON_GetObjectItemCaseSensitive(from, "results"))
    {
        if (strcmp(text_in(row, "method"), method_name(&r->with.methods.methods[wanted->method])) == 0 &&
            strcmp(text_in(row, "allocator"), wanted->how->label) == 0 && number_in(row, NULL, "ratio") == ratio)
            return (interval){number_in(row, "score", "value"), number_in(row, "score", "low"),
                              number_in(row, "score", "high")};
    }
    return (interval){NAN, NAN, NAN};
}

static kvb_status write_curves(const task_report *r, const char *path, kvb_error *err)
{
    const cJSON *tasks = cJSON_GetObjectItemCaseSensitive(r->document, "tasks"), *one;
    size_t n = (size_t)cJSON_GetArraySize(tasks), i = 0;
    curve_kind *kinds = calloc(n + 1, sizeof *kinds);
    interval *values = calloc(n * r->with.methods.n_columns * r->with.n_ratios + 1, sizeof *values);
    cJSON_ArrayForEach(one, tasks)
    {
        if (!kinds || !values) break;
        for (uint32_t c = 0; c < r->with.methods.n_columns; c++)
            for (size_t k = 0; k < r->with.n_ratios; k++)
                values[curve_place(&r->with, i, c, k)] = score_of(r, one, c, r->with.ratios[k]);
        kinds[i++] = (curve_kind){text_in(one, "task"), false, SVG_SHARES};
    }
    char subtitle[256];
    snprintf(subtitle, sizeof subtitle,
             "%.80s, %llu tokens asked for; bands: 95 %% by bootstrap over samples and questions", r->m->config.name,
             (unsigned long long)r->tokens);
    const curve_view view = {.with = &r->with,
                             .title = "Right answers after evicting, by who splits the cache over the heads",
                             .subtitle = subtitle,
                             .kinds = kinds,
                             .n_kinds = n,
                             .values = values};
    kvb_status status = kinds && values ? curves_write(path, &view, err)
                                        : kvb_fail(err, KVB_MEMORY, "%s: no memory for %zu tasks", path, n);
    free(kinds);
    free(values);
    return status;
}

kvb_status task_report_write(const task_report *r, const char *name, kvb_error *err)
{
    size_t room = strlen(name) + 8;
    char *path = malloc(room);
    if (!path) return kvb_fail(err, KVB_MEMORY, "%s: no memory", name);
    snprintf(path, room, "%s.json", name);
    kvb_status status = json_write(path, r->document, err);
    snprintf(path, room, "%s.csv", name);
    if (status == KVB_OK) status = write_csv(r, path, err);
    snprintf(path, room, "%s.svg", name);
    if (status == KVB_OK && r->with.methods.n_columns) status = write_curves(r, path, err);
    free(path);
    return status;
}
