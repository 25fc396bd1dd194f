// kvbudget task: results as a table, JSON, CSV and curves.
#include "formats/atomic_file.h"
#include "formats/json_file.h"
#include "runtime/fail.h"
#include "tools/curves.h"
#include "tools/task_job.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *method_of(const task_command *c, const task_cell *cell)
{
    return cell->column ? method_name(&c->with.items[cell->column->method]) : "full";
}

void task_report_answer(const task_command *c, const task_cell *cell, const task_sample *s, size_t question,
                        const task_turn *turn)
{
    printf("  %s question %zu, %s", s->id, question + 1, method_of(c, cell));
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

static void print_task(const task_command *c, const task_study *s, double tokens, size_t n_questions)
{
    printf("%s, %.0f tokens, %zu questions (seed %" PRIu64 ")\n", s->t->spec, tokens, n_questions, c->seed);
    printf("  %-30s %-14s %6s %8s %8s  %7s  %-16s", "metric or policy", "allocator", "ratio", "kept %", "looked %",
           "score", "95 % interval");
    printf(s->n_cells > 1 ? "  to uniform  95 %% interval\n" : "\n");
}

static void print_cell(const task_command *c, const task_cell *cell, const task_outcome *o)
{
    printf("  %-30s %-14s %6g", method_of(c, cell), cell->column ? cell->column->how->label : "", cell->ratio);
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

static bool add_cell(const task_command *c, cJSON *list, const task_study *s, const task_cell *cell,
                     const task_outcome *o)
{
    cJSON *row = cJSON_CreateObject(), *samples;
    bool good = row && cJSON_AddItemToArray(list, row) && cJSON_AddStringToObject(row, "method", method_of(c, cell)) &&
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

static cJSON *begin_task(task_command *c, const task_study *s, double tokens, size_t n_questions)
{
    cJSON *tasks = cJSON_GetObjectItemCaseSensitive(c->report, "tasks"), *o = cJSON_CreateObject();
    bool good = o && cJSON_AddItemToArray(tasks, o) && cJSON_AddStringToObject(o, "task", s->t->spec) &&
                cJSON_AddNumberToObject(o, "n_tokens", tokens) && cJSON_AddNumberToObject(o, "samples", s->n_samples) &&
                cJSON_AddNumberToObject(o, "questions", (double)n_questions);
    return good ? cJSON_AddArrayToObject(o, "results") : NULL;
}

static cJSON *begin_report(const task_command *c)
{
    cJSON *root = cJSON_CreateObject(), *about, *allocators = NULL;
    bool good = root && cJSON_AddStringToObject(root, "format", "kvbudget-task") &&
                cJSON_AddNumberToObject(root, "format_version", 1) &&
                cJSON_AddStringToObject(root, "tool_version", kvb_version()) &&
                cJSON_AddStringToObject(root, "backend", c->device->name) &&
                cJSON_AddStringToObject(root, "compute", c->device->compute) &&
                cJSON_AddNumberToObject(root, "seed", (double)c->seed) &&
                cJSON_AddNumberToObject(root, "resamples", INTERVAL_RESAMPLES) &&
                (about = cJSON_AddObjectToObject(root, "model")) &&
                cJSON_AddStringToObject(about, "name", c->m->config.name) &&
                cJSON_AddStringToObject(about, "sha256", c->m->sha256) &&
                (allocators = cJSON_AddArrayToObject(root, "allocators"));
    for (size_t i = 0; good && i < c->with.n_allocators; i++) {
        cJSON *o = cJSON_CreateObject();
        good = o && cJSON_AddItemToArray(allocators, o) &&
               cJSON_AddStringToObject(o, "label", c->with.allocators[i].label) &&
               cJSON_AddStringToObject(o, "identity", c->with.allocators[i].identity);
    }
    if (good && cJSON_AddArrayToObject(root, "tasks")) return root;
    cJSON_Delete(root);
    return NULL;
}

kvb_status task_report_add(task_command *c, const task_study *s, double tokens, kvb_error *err)
{
    task_outcome full;
    kvb_status status = task_summarize(s, 0, c->seed, &full, err);
    if (status != KVB_OK) return status;
    if (!c->report) c->report = begin_report(c);
    cJSON *list = c->report ? begin_task(c, s, tokens, full.n_questions) : NULL;
    if (!list) return kvb_fail(err, KVB_MEMORY, "no memory for the results of %s", s->t->spec);
    if (!c->json) print_task(c, s, tokens, full.n_questions);
    for (size_t i = 0; i < s->n_cells && status == KVB_OK; i++) {
        task_outcome o;
        status = task_summarize(s, i, c->seed, &o, err);
        if (status != KVB_OK) break;
        if (!c->json) print_cell(c, &s->cells[i], &o);
        if (!add_cell(c, list, s, &s->cells[i], &o))
            status = kvb_fail(err, KVB_MEMORY, "no memory for the results of %s", s->t->spec);
    }
    fflush(stdout);
    if (status == KVB_OK && s->n_cells > 1 && full.score.value < 0.5 && !c->quiet)
        fprintf(
            stderr,
            "%s: %.0f of 100 with the full cache; what evicting costs shows only on what the model solves: an easier "
            "form or a shorter --tokens\n",
            s->t->spec, 100 * full.score.value);
    return status;
}

kvb_status task_report_print_json(const task_command *c, kvb_error *err)
{
    char *text = cJSON_Print(c->report);
    if (!text) return kvb_fail(err, KVB_MEMORY, "no memory for the JSON text");
    puts(text);
    cJSON_free(text);
    return KVB_OK;
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

static void put_row(FILE *out, const task_command *c, const cJSON *one, const cJSON *row)
{
    const double values[] = {number_in(row, NULL, "kept"),           number_in(row, NULL, "looked"),
                             number_in(row, "score", "value"),       number_in(row, "score", "low"),
                             number_in(row, "score", "high"),        number_in(row, "minus_uniform", "value"),
                             number_in(row, "minus_uniform", "low"), number_in(row, "minus_uniform", "high")};
    fprintf(out, "\"%s\",%.0f,%" PRIu64 ",%.0f,%.0f,\"%s\",%s,%g", text_in(one, "task"),
            number_in(one, NULL, "n_tokens"), c->seed, number_in(one, NULL, "samples"),
            number_in(one, NULL, "questions"), text_in(row, "method"), text_in(row, "allocator"),
            number_in(row, NULL, "ratio"));
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        if (isnan(values[i])) fprintf(out, ",");
        else fprintf(out, ",%.6f", values[i]);
    fprintf(out, "\n");
}

static kvb_status write_csv(const task_command *c, const char *path, kvb_error *err)
{
    atomic_file file;
    const cJSON *one, *row;
    kvb_status status = atomic_file_begin(&file, path, err);
    if (status != KVB_OK) return status;
    fprintf(file.stream,
            "task,tokens,seed,samples,questions,method,allocator,ratio,kept,looked,score,score_low,score_high,"
            "minus_uniform,minus_uniform_low,minus_uniform_high\n");
    cJSON_ArrayForEach(one, cJSON_GetObjectItemCaseSensitive(c->report, "tasks"))
    {
        cJSON_ArrayForEach(row, cJSON_GetObjectItemCaseSensitive(one, "results"))
        {
            put_row(file.stream, c, one, row);
        }
    }
    return atomic_file_commit(&file, err);
}

// A column's score at a ratio, one task per kind.
static interval curve_at(const void *context, uint32_t column, size_t ratio, size_t kind)
{
    const task_command *c = context;
    const method_column *wanted = &c->with.columns[column];
    const cJSON *row, *one = cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(c->report, "tasks"), (int)kind);
    cJSON_ArrayForEach(row, cJSON_GetObjectItemCaseSensitive(one, "results"))
    {
        if (strcmp(text_in(row, "method"), method_name(&c->with.items[wanted->method])) == 0 &&
            strcmp(text_in(row, "allocator"), wanted->how->label) == 0 &&
            number_in(row, NULL, "ratio") == c->with.ratios[ratio])
            return (interval){number_in(row, "score", "value"), number_in(row, "score", "low"),
                              number_in(row, "score", "high")};
    }
    return (interval){NAN, NAN, NAN};
}

static kvb_status write_curves(const task_command *c, const char *path, kvb_error *err)
{
    const cJSON *tasks = cJSON_GetObjectItemCaseSensitive(c->report, "tasks"), *one;
    size_t n = (size_t)cJSON_GetArraySize(tasks), i = 0;
    curve_kind *kinds = calloc(n + 1, sizeof *kinds);
    if (!kinds) return kvb_fail(err, KVB_MEMORY, "%s: no memory for %zu tasks", path, n);
    cJSON_ArrayForEach(one, tasks)
    {
        kinds[i++] = (curve_kind){text_in(one, "task"), false, SVG_SHARES};
    }
    char subtitle[256];
    snprintf(subtitle, sizeof subtitle,
             "%.80s, %llu tokens asked for; bands: 95 %% by bootstrap over samples and questions", c->m->config.name,
             (unsigned long long)c->tokens);
    const curve_view view = {.with = &c->with,
                             .title = "Right answers after evicting, by who splits the cache over the heads",
                             .subtitle = subtitle,
                             .kinds = kinds,
                             .n_kinds = n,
                             .at = curve_at,
                             .context = c};
    kvb_status status = curves_write(path, &view, err);
    free(kinds);
    return status;
}

kvb_status task_report_write(const task_command *c, kvb_error *err)
{
    size_t room = strlen(c->results) + 8;
    char *path = malloc(room);
    if (!path) return kvb_fail(err, KVB_MEMORY, "%s: no memory", c->results);
    snprintf(path, room, "%s.json", c->results);
    kvb_status status = json_write(path, c->report, err);
    snprintf(path, room, "%s.csv", c->results);
    if (status == KVB_OK) status = write_csv(c, path, err);
    snprintf(path, room, "%s.svg", c->results);
    if (status == KVB_OK && c->with.n_columns) status = write_curves(c, path, err);
    free(path);
    return status;
}
