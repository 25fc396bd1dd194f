// What kvbudget solve writes and prints.
#include "formats/atomic_file.h"
#include "formats/npy.h"
#include "formats/sha256.h"
#include "formats/table_export.h"
#include "formats/table_weights.h"
#include "formats/table_write.h"
#include "runtime/fail.h"
#include "solver/stats.h"
#include "tools/solve_job.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static bool add_number(cJSON *to, const char *key, uint64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    return cJSON_AddStringToObject(to, key, text) != NULL;
}

static bool add_real(cJSON *to, const char *key, double value)
{
    char text[32];
    snprintf(text, sizeof text, "%.17g", value);
    return cJSON_AddStringToObject(to, key, text) != NULL;
}

static bool add_weights(cJSON *to, const metric_job *job)
{
    char *text = table_weights_print(job->text_weights, ROWS, (uint32_t)job->n_texts);
    bool ok = text && cJSON_AddStringToObject(to, "text_weights", text);
    cJSON_free(text);
    return ok;
}

// Lengths of the contexts in use, commas between.
static char *token_list(const solve_command *s)
{
    size_t size = 12 * s->n_selected + 1, used = 0;
    char *text = calloc(1, size);
    for (size_t k = 0; text && k < s->n_selected; k++) {
        const record_context_info *c = record_context(s->r, s->selected[k]);
        bool any = false;
        for (uint32_t q = 0; q < c->n_questions; q++) any |= is_selected(s, &c->questions[q], q);
        if (any) used += (size_t)snprintf(text + used, size - used, "%s%u", used ? "," : "", c->n_tokens);
    }
    return text;
}

static bool every_per_cent(const solve_command *s)
{
    return !wishes_ratios(&s->wishes) && s->n_rows == ROWS;
}

// What makes a table differ from one with a row for every per cent and no constraints.
static bool add_wishes(cJSON *m, const solve_command *s)
{
    bool ok = every_per_cent(s) || add_number(m, "n_rows", s->n_rows);
    if (!s->options.limits) return ok;
    char *text = limits_text(s->options.limits);
    ok = ok && text && cJSON_AddStringToObject(m, "constraints", text);
    cJSON_free(text);
    return ok;
}

static cJSON *table_metadata(const solve_command *s, const metric_job *job, const char *record_sha256)
{
    static const char *const copied[] = {"architecture", "model_id", "model_sha256", "tokenizer_sha256",
                                         "calibration_sha256"};
    record_shape shape = record_get_shape(s->r);
    char queries[32], *tokens = token_list(s);
    snprintf(queries, sizeof queries, "%u,%u", job->fewest_queries, job->most_queries);
    cJSON *m = cJSON_CreateObject();
    bool ok = m && tokens && cJSON_AddStringToObject(m, "format", "kvbudget-table") &&
              cJSON_AddStringToObject(m, "format_version", "1") &&
              cJSON_AddStringToObject(m, "tool_version", KVBUDGET_VERSION);
    for (size_t i = 0; ok && i < sizeof copied / sizeof *copied; i++)
        ok = cJSON_AddStringToObject(m, copied[i], attribute_text(s->r, copied[i]));
    ok = ok && add_number(m, "n_layers", shape.n_layers) && add_number(m, "n_heads", shape.n_heads) &&
         add_number(m, "n_kv_heads", shape.n_kv_heads) && add_number(m, "head_dim", shape.head_dim) &&
         cJSON_AddStringToObject(m, "metric", job->metric) &&
         cJSON_AddStringToObject(m, "metric_parameters", job->parameters) && add_number(m, "sink", job->sink) &&
         add_number(m, "window", job->window) && cJSON_AddStringToObject(m, "scope", s->scope_name) &&
         cJSON_AddStringToObject(m, "aggregate", s->aggregate_name) && add_real(m, "shrink", s->shrink) &&
         add_real(m, "min_keep", s->min_keep) && cJSON_AddStringToObject(m, "hull", s->hull_name) &&
         cJSON_AddStringToObject(m, "max_prune", "0.99") && cJSON_AddStringToObject(m, "calibration_tokens", tokens) &&
         add_number(m, "n_contexts", job->n_contexts) && add_number(m, "n_questions", job->n_pairs) &&
         cJSON_AddStringToObject(m, "n_queries", queries) &&
         cJSON_AddStringToObject(m, "record_sha256", record_sha256) &&
         (!s->exact || cJSON_AddStringToObject(m, "solver", s->monotone ? "exact_nested" : "exact")) &&
         (!s->oracle_order || cJSON_AddStringToObject(m, "order", s->order_name)) &&
         (s->aggregate != AGGREGATE_TAIL || add_weights(m, job)) && add_wishes(m, s);
    free(tokens);
    if (ok) return m;
    cJSON_Delete(m);
    return NULL;
}

kvb_status output_path(char out[PATH_SIZE], const char *pattern, const char *metric, const char *extension,
                       bool several, kvb_error *err)
{
    static const char MARK[] = "{metric}";
    char name[160];
    size_t n = 0, length = strlen(pattern);
    for (; metric[n] && n + 1 < sizeof name; n++) name[n] = strchr(":=", metric[n]) ? '_' : metric[n];
    name[n] = '\0';
    struct stat info;
    const char *mark = strstr(pattern, MARK);
    bool folder = stat(pattern, &info) == 0 && S_ISDIR(info.st_mode);
    if (several && !mark && !folder)
        return kvb_fail(err, KVB_ARGUMENT,
                        "%s: with several metrics, expected an existing folder or a name with {metric} in it", pattern);
    int used =
        mark     ? snprintf(out, PATH_SIZE, "%.*s%s%s", (int)(mark - pattern), pattern, name, mark + sizeof MARK - 1)
        : folder ? snprintf(out, PATH_SIZE, "%s%s%s%s", pattern, pattern[length - 1] == '/' ? "" : "/", name, extension)
                 : snprintf(out, PATH_SIZE, "%s", pattern);
    return used < PATH_SIZE ? KVB_OK : kvb_fail(err, KVB_ARGUMENT, "%s: the path is too long", pattern);
}

kvb_status write_picture(const solve_command *s, const char *pattern, const char *metric, picture_drawer *draw,
                         const void *what, kvb_error *err)
{
    char path[PATH_SIZE];
    atomic_file file;
    kvb_status status = output_path(path, pattern, metric, ".svg", s->n_metrics > 1, err);
    if (status == KVB_OK) status = atomic_file_begin(&file, path, err);
    if (status != KVB_OK) return status;
    draw(s, what, file.stream);
    status = atomic_file_commit(&file, err);
    if (status == KVB_OK && !s->quiet) fprintf(stderr, "wrote %s\n", path);
    return status;
}

kvb_status write_results(const solve_command *s, const metric_job *job, kvb_error *err)
{
    record_shape shape = record_get_shape(s->r);
    bool several = s->n_metrics > 1;
    char sha256[65] = "", path[PATH_SIZE];
    kvb_status status = s->output || s->npy ? sha256_file_hex(s->path, sha256, err) : KVB_OK;
    if (status != KVB_OK) return status;
    cJSON *metadata = table_metadata(s, job, sha256);
    if (!metadata) return kvb_fail(err, KVB_MEMORY, "no memory for the table's metadata");
    const table_content table = {.n_rows = s->n_rows,
                                 .n_layers = shape.n_layers,
                                 .n_kv_heads = shape.n_kv_heads,
                                 .prune_ratio = job->prune_ratio,
                                 .ratio = s->ratios,
                                 .std = job->std,
                                 .loss = job->loss,
                                 .lower_bound = job->bound,
                                 .lambda = job->lambda,
                                 .table_loss = job->table_loss,
                                 .effective_ratio = job->effective,
                                 .saturated = job->saturated,
                                 .metadata = metadata};
    if (s->output) {
        status = output_path(path, s->output, job->metric, ".safetensors", several, err);
        if (status == KVB_OK) status = table_write(path, &table, err);
        if (status == KVB_OK && !s->quiet) fprintf(stderr, "wrote %s\n", path);
    }
    if (status == KVB_OK && s->npy) {
        status = output_path(path, s->npy, job->metric, ".npy", several, err);
        if (status == KVB_OK)
            status = table_export_npy(path, ROWS, shape.n_layers, shape.n_kv_heads, job->prune_ratio, metadata, err);
        if (status == KVB_OK && !s->quiet) fprintf(stderr, "wrote %s and its side-car\n", path);
    }
    if (status == KVB_OK && s->budgets) {
        const uint64_t dims[4] = {job->n_pairs, ROWS, shape.n_layers, shape.n_kv_heads};
        status = output_path(path, s->budgets, job->metric, ".npy", several, err);
        if (status == KVB_OK) status = npy_write(path, NPY_I32, 4, dims, job->pair_budgets, err);
        if (status == KVB_OK && !s->quiet) fprintf(stderr, "wrote %s\n", path);
    }
    cJSON_Delete(metadata);
    return status;
}

// What exactness brought, and what nesting took, where it was most.
static void print_exact(const solve_command *s, const metric_job *job)
{
    uint32_t saved = 0, cost = 0, unproved = 0;
    double most_saved = 0, most_cost = 0, sum_saved = 0, sum_cost = 0;
    for (uint32_t r = 0; r < s->n_rows; r++) {
        double save = job->greedy[r] > 0 ? 100 * (1 - job->optimum[r] / job->greedy[r]) : 0;
        double more = job->optimum[r] > 0 ? 100 * (job->loss[r] / job->optimum[r] - 1) : 0;
        sum_saved += save / s->n_rows;
        sum_cost += more / s->n_rows;
        unproved += job->unproved[r];
        if (save > most_saved) saved = r;
        if (more > most_cost) cost = r;
        most_saved = fmax(most_saved, save);
        most_cost = fmax(most_cost, more);
    }
    printf("  Exact: the optimum loses %.4f %% less than greedy on average over the ratios, %.4f %% at the most (%g %% "
           "pruned).\n",
           sum_saved, most_saved, 100 * s->ratios[saved]);
    if (s->monotone)
        printf("  Nested: these budgets lose %.4f %% more than the optimum on average, %.4f %% at the most (%g %% "
               "pruned).\n",
               sum_cost, most_cost, 100 * s->ratios[cost]);
    if (unproved)
        printf(
            "  %u of %u rows are not proved to be optimal: a problem was too large, and greedy's budgets were kept.\n",
            unproved, s->n_rows);
}

// Heads on whose budgets the questions disagree by more than the head keeps.
static uint32_t count_unsure(const metric_job *job, int row, uint8_t *flags)
{
    uint32_t n = job->spread.n_heads;
    return flag_heads(job->prune_ratio + (size_t)row * n, job->std + (size_t)row * n, n, flags);
}

static void print_unsure(const solve_command *s, const metric_job *job)
{
    enum { ROW = 79, SHOWN = 12 };
    uint32_t n = job->spread.n_heads, heads = record_get_shape(s->r).n_kv_heads, shown = 0;
    uint8_t *flags = every_per_cent(s) && n ? calloc(n, 1) : NULL;
    if (!flags) return;
    uint32_t count = count_unsure(job, ROW, flags);
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

void print_results(const solve_command *s, const metric_job *job)
{
    static const uint32_t shown[] = {10, 30, 50, 70, 80, 90, 95};
    size_t all = sizeof shown / sizeof *shown, n_shown = s->n_rows;
    if (!wishes_ratios(&s->wishes)) // those that there are, and the last one
        for (n_shown = 0; n_shown < all && shown[n_shown] < s->n_rows;) n_shown++;
    bool last = !wishes_ratios(&s->wishes) && s->n_rows < ROWS;
    printf("%s: %u questions on %u contexts, sink %u, window %u, %s, %s", job->metric, job->n_pairs, job->n_contexts,
           job->sink, job->window, s->options.scope == SCOPE_LAYER ? "layer by layer" : "over all layers",
           s->aggregate_name);
    if (s->shrink > 0) printf("; loss and bound with --shrink %g, table without", s->shrink);
    printf("%s\n", s->oracle_order ? "; loss and bound as if the metric ranked perfectly" : "");
    printf("  pruned    loss %%   bound %%     gap %%   table %%  uniform %%\n");
    for (size_t i = 0; i < n_shown + last; i++) {
        size_t r = i == n_shown ? s->n_rows - 1 : wishes_ratios(&s->wishes) ? i : shown[i] - 1;
        double gap = job->loss[r] > 0 ? 100 * (1 - job->bound[r] / job->loss[r]) : 0;
        printf("  %4.4g %%  %8.4f  %8.4f  %8.4f  %8.4f   %8.4f%s\n", 100 * s->ratios[r], 100 * job->loss[r],
               100 * job->bound[r], gap, 100 * job->table_loss[r], 100 * job->uniform_loss[r],
               job->saturated[r] ? "  saturated" : "");
    }
    if (s->exact) print_exact(s, job);
    print_unsure(s, job);
    uint32_t first = s->n_rows;
    while (first > 0 && job->saturated[first - 1]) first--;
    if (first < s->n_rows)
        printf("  From %g %% on, heads are at their floor: the table prunes %.2f %% at the most.\n",
               100 * s->ratios[first], 100 * job->effective[s->n_rows - 1]);
}

static bool add_rows(cJSON *to, const solve_command *s, const metric_job *job)
{
    cJSON *rows = cJSON_AddArrayToObject(to, "rows");
    bool ok = rows != NULL;
    for (uint32_t r = 0; ok && r < s->n_rows; r++) {
        cJSON *row = cJSON_CreateObject();
        ok = row && cJSON_AddItemToArray(rows, row) && cJSON_AddNumberToObject(row, "ratio", s->ratios[r]) &&
             cJSON_AddNumberToObject(row, "loss", job->loss[r]) &&
             cJSON_AddNumberToObject(row, "lower_bound", job->bound[r]) &&
             cJSON_AddNumberToObject(row, "lambda", job->lambda[r]) &&
             cJSON_AddNumberToObject(row, "table_loss", job->table_loss[r]) &&
             cJSON_AddNumberToObject(row, "uniform_loss", job->uniform_loss[r]) &&
             cJSON_AddNumberToObject(row, "effective_ratio", job->effective[r]) &&
             cJSON_AddNumberToObject(row, "unsure_heads", count_unsure(job, r, NULL)) &&
             cJSON_AddBoolToObject(row, "saturated", job->saturated[r]) &&
             (!s->exact || (cJSON_AddNumberToObject(row, "greedy", job->greedy[r]) &&
                            cJSON_AddNumberToObject(row, "optimum", job->optimum[r]) &&
                            cJSON_AddBoolToObject(row, "proved", !job->unproved[r])));
    }
    return ok;
}

kvb_status add_results_json(cJSON *list, const solve_command *s, const metric_job *job, kvb_error *err)
{
    cJSON *item = cJSON_CreateObject();
    bool ok =
        item && cJSON_AddItemToArray(list, item) && cJSON_AddStringToObject(item, "metric", job->metric) &&
        cJSON_AddNumberToObject(item, "sink", job->sink) && cJSON_AddNumberToObject(item, "window", job->window) &&
        cJSON_AddStringToObject(item, "scope", s->scope_name) &&
        cJSON_AddStringToObject(item, "aggregate", s->aggregate_name) &&
        cJSON_AddNumberToObject(item, "shrink", s->shrink) && cJSON_AddNumberToObject(item, "min_keep", s->min_keep) &&
        cJSON_AddStringToObject(item, "hull", s->hull_name) && cJSON_AddStringToObject(item, "order", s->order_name) &&
        (!s->exact || cJSON_AddStringToObject(item, "solver", s->monotone ? "exact_nested" : "exact")) &&
        cJSON_AddNumberToObject(item, "n_contexts", job->n_contexts) &&
        cJSON_AddNumberToObject(item, "n_questions", job->n_pairs) &&
        cJSON_AddNumberToObject(item, "n_skipped", job->n_skipped) &&
        cJSON_AddNumberToObject(item, "solve_seconds", job->solve_seconds) && add_rows(item, s, job);
    return ok ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for the JSON text");
}
