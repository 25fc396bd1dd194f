// Checks the bounds of a table against the record that it was made from, with code that shares nothing with the solver
// that made it but the loss curves: solver/checker.h.
#include "formats/sha256.h"
#include "formats/table_weights.h"
#include "runtime/fail.h"
#include "solver/checker.h"
#include "solver/constrained.h"
#include "tools/validate.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct certificate_check {
    metric_job job; // first: actions get its address
    kvb_table *table;
    const kvb_info *info;
    double lambda[ROWS], bound[ROWS]; // stored multipliers; our own bounds, mean over the problems
} certificate_check;

// Stored numbers are those of one record.
static kvb_status match_record(const solve_command *s, const kvb_info *info, const char *path, kvb_error *err)
{
    char sha256[65];
    kvb_status status = sha256_file_hex(s->path, sha256, err);
    if (status != KVB_OK) return status;
    if (*info->record_sha256 && strcmp(info->record_sha256, sha256) != 0)
        return kvb_fail(err, KVB_MISMATCH, "%s: was made from another record (SHA-256 %.16s...) than %s (%.16s...)",
                        path, info->record_sha256, s->path, sha256);
    if (strcmp(info->hull, "feasible") != 0 && strcmp(info->hull, "full") != 0)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: unknown hull '%s'", path, info->hull);
    return KVB_OK;
}

static kvb_status match_pairs(const certificate_check *k, const char *path, kvb_error *err)
{
    const metric_job *job = &k->job;
    if (job->n_pairs == k->info->n_questions && job->n_contexts == k->info->n_contexts) return KVB_OK;
    return kvb_fail(err, KVB_MISMATCH,
                    "%s: was made from %u questions on %u contexts, but %u on %u are selected; give the --contexts and "
                    "--questions that it was solved with",
                    path, k->info->n_questions, k->info->n_contexts, job->n_pairs, job->n_contexts);
}

static kvb_status add_bounds(solve_command *s, certificate_check *k, const loss_curves *c, double weight,
                             kvb_error *err)
{
    double near[ROWS], bound[ROWS];
    kvb_status status = KVB_OK;
    if (!(c->total > 0)) return KVB_OK; // nothing can be lost: the bound is 0
    for (uint32_t r = 0; r < s->n_rows; r++) near[r] = k->lambda[r] * (s->mean_loss ? 1 : c->total);
    if (s->options.limits) status = checker_limited_rows(c, s->options.limits, s->n_rows, s->ratios, near, bound, err);
    else checker_rows(c, s->options.scope == SCOPE_LAYER, s->n_rows, s->ratios, near, bound);
    for (uint32_t r = 0; r < s->n_rows && status == KVB_OK; r++) k->bound[r] += weight * fmax(bound[r], 0);
    return status;
}

// Whether the table keeps to its constraints at the length that it was solved for.
static kvb_status check_limits(const solve_command *s, const certificate_check *k, const char *path, kvb_error *err)
{
    size_t n = (size_t)k->info->n_layers * k->info->n_kv_heads;
    uint32_t *keep = malloc(n * sizeof *keep);
    kvb_status status = keep ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for %zu heads", n);
    for (uint32_t r = 0; r < s->n_rows && status == KVB_OK && s->options.limits; r++) {
        kvb_error inner;
        const double *prune = kvb_table_prune_ratios(k->table) + r * n;
        for (size_t h = 0; h < n; h++) keep[h] = (uint32_t)rint((1 - prune[h]) * k->job.longest);
        status = constrained_check(s->options.limits, k->job.longest, keep, &inner);
        if (status != KVB_OK) kvb_fail(err, status, "%s: row %u: %s", path, r + 1, inner.message);
    }
    free(keep);
    return status;
}

static kvb_status check_pair(solve_command *s, metric_job *job, problem *p, kvb_error *err)
{
    certificate_check *k = (certificate_check *)job;
    kvb_status status =
        judge_table(job->table_loss, &p->curves, s->options.limits, s->n_rows, kvb_table_prune_ratios(k->table), err);
    if (status == KVB_OK && s->oracle_order) status = loss_curves_fill_perfect(&p->curves, job->oracle, err);
    if (status != KVB_OK) return status;
    if (s->aggregate != AGGREGATE_MEAN_RATIO) return merge_pair(s, job, &p->curves, err);
    loss_curves_shrink(&p->curves, s->shrink);
    return add_bounds(s, k, &p->curves, 1 / (p->curves.total * job->n_pairs), err);
}

// Bounds of worst and cvar: whatever the weights, no budgets lose less in the worst case than in the weighted mean.
static kvb_status bound_tail(solve_command *s, certificate_check *k, const char *path, kvb_error *err)
{
    const metric_job *job = &k->job;
    size_t n = job->n_texts;
    double cap = s->tail * (double)n > 1 ? 1 / (s->tail * (double)n) : 1,
           *weights = malloc(s->n_rows * n * sizeof *weights);
    loss_curves c = {0};
    kvb_status status = weights ? loss_curves_init(&c, &job->texts[0].curves.shape, err)
                                : kvb_fail(err, KVB_MEMORY, "no memory for %zu texts", n);
    if (status == KVB_OK)
        status = table_weights_parse(weights, kvb_table_metadata(k->table, "text_weights"), s->n_rows, (uint32_t)n, cap,
                                     path, err);
    size_t cells = (size_t)shape_heads(&c.shape) * shape_middle(&c.shape);
    for (uint32_t r = 0; r < s->n_rows && status == KVB_OK; r++) {
        memset(c.gain, 0, cells * sizeof *c.gain);
        c.floor = 0;
        for (size_t t = 0; t < n; t++) {
            const loss_curves *one = &job->texts[t].curves;
            for (size_t i = 0; i < cells; i++) c.gain[i] += weights[r * n + t] * one->gain[i];
            if (one->floor > c.floor) c.floor = one->floor;
        }
        loss_curves_sum(&c);
        checker_rows(&c, s->options.scope == SCOPE_LAYER, 1, &s->ratios[r], &k->lambda[r], &k->bound[r]);
    }
    loss_curves_free(&c);
    free(weights);
    return status;
}

static kvb_status read_everything(solve_command *s, certificate_check *k, const char *path, kvb_error *err)
{
    metric_job *job = &k->job;
    cache_shape shape;
    kvb_status status = prepare_pairs(s, job, &shape, err);
    if (status == KVB_OK) status = match_pairs(k, path, err);
    if (status != KVB_OK) return status;
    uint32_t done = 0;
    job->n_visits = 1;
    progress_begin(&s->bar, job->metric, s->quiet);
    status = walk_pairs(s, job, check_pair, &done, err);
    if (status == KVB_OK) merge_finish(s, job);
    if (status == KVB_OK && s->mean_loss) status = add_bounds(s, k, &job->merged.curves, 1, err);
    if (status == KVB_OK && s->aggregate == AGGREGATE_TAIL) status = bound_tail(s, k, path, err);
    progress_end(&s->bar, status == KVB_OK ? "checked" : "failed");
    for (int r = 0; r < ROWS; r++) job->table_loss[r] /= job->n_pairs;
    return status;
}

// What is wrong with a row, or NULL. Shares of 1: a table holds sums of many heads in f64.
static const char *find_fault(const certificate_check *k, const kvb_row *row, uint32_t r)
{
    static const double TOLERANCE = 1e-9;
    if (!(row->lower_bound <= k->bound[r] + TOLERANCE)) return "no multiplier proves the bound";
    if (!(row->lower_bound <= row->loss + TOLERANCE)) return "the bound is above the loss";
    if (!(fabs(row->table_loss - k->job.table_loss[r]) <= TOLERANCE)) return "the table's own loss is another";
    return NULL;
}

static kvb_status report(const solve_command *s, const certificate_check *k, const char *path, bool *holds,
                         kvb_error *err)
{
    uint32_t faults = 0;
    double slack = 0;
    cJSON *rows = s->json ? cJSON_CreateArray() : NULL;
    bool ok = !s->json || rows;
    for (uint32_t r = 0; r < s->n_rows && ok; r++) {
        kvb_row row;
        kvb_status status = kvb_table_row(k->table, r, &row, err);
        if (status != KVB_OK) return status;
        const char *fault = find_fault(k, &row, r);
        faults += fault != NULL;
        slack = fmax(slack, fabs(k->bound[r] - row.lower_bound));
        if (rows) {
            cJSON *item = cJSON_CreateObject();
            ok = item && cJSON_AddItemToArray(rows, item) && cJSON_AddNumberToObject(item, "ratio", row.ratio) &&
                 cJSON_AddNumberToObject(item, "lower_bound", row.lower_bound) &&
                 cJSON_AddNumberToObject(item, "proved_bound", k->bound[r]) &&
                 cJSON_AddNumberToObject(item, "loss", row.loss) &&
                 cJSON_AddNumberToObject(item, "table_loss", k->job.table_loss[r]) &&
                 (fault ? cJSON_AddStringToObject(item, "fault", fault) : cJSON_AddNullToObject(item, "fault"));
        } else if (fault) {
            printf(
                "  %g %%: %s: stored loss %.12g, bound %.12g, table %.12g; from the record: bound %.12g, table %.12g\n",
                100 * row.ratio, fault, row.loss, row.lower_bound, row.table_loss, k->bound[r], k->job.table_loss[r]);
        }
    }
    if (rows) {
        char *text = ok ? cJSON_Print(rows) : NULL;
        if (text) puts(text);
        ok = text != NULL;
        cJSON_free(text);
    } else {
        printf(
            "%s: %u of %u rows hold against %s (%u questions, %s); bounds differ from our own by %.2g of the mass at "
            "the most\n",
            path, s->n_rows - faults, s->n_rows, s->path, k->job.n_pairs, k->info->metric, slack);
    }
    cJSON_Delete(rows);
    *holds = faults == 0;
    return ok ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for the JSON text");
}

// A number from 0 to 1 in the metadata; 0 where there is none, as in tables from before it was invented.
static double metadata_share(const kvb_table *table, const char *key)
{
    const char *text = kvb_table_metadata(table, key);
    double value = text ? strtod(text, NULL) : 0;
    return value > 0 && value <= 1 ? value : 0;
}

// The table, not the command line, says which problem was solved.
static kvb_status take_settings(solve_command *s, const kvb_table *table, const char *path, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(table);
    const char *constraints = kvb_table_metadata(table, "constraints"), *order = kvb_table_metadata(table, "order");
    if (constraints) {
        kvb_status status = kvb_limits_parse(&s->limits, constraints, info->n_layers, info->n_kv_heads, path, err);
        if (status != KVB_OK) return status;
        s->options.limits = &s->limits;
    }
    s->options.scope = strcmp(info->scope, "layer") == 0 ? SCOPE_LAYER : SCOPE_GLOBAL;
    s->scope_name = info->scope;
    s->aggregate_name = info->aggregate;
    if (!read_aggregate(s))
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: unknown aggregation '%s'; a newer kvbudget may know it", path,
                        info->aggregate);
    s->oracle_order = order && strcmp(order, "oracle") == 0;
    if (order && !s->oracle_order && strcmp(order, "metric") != 0)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: unknown order '%s'; a newer kvbudget may know it", path, order);
    s->shrink = metadata_share(table, "shrink");
    s->min_keep = metadata_share(table, "min_keep");
    s->sink = info->sink;
    s->window = info->window;
    s->n_rows = info->n_rows;
    for (uint32_t r = 0; r < ROWS; r++) { // those that a shorter table lacks repeat its last one
        kvb_row row;
        kvb_status status = kvb_table_row(table, r < s->n_rows ? r : s->n_rows - 1, &row, err);
        if (status != KVB_OK) return status;
        s->ratios[r] = row.ratio;
    }
    return KVB_OK;
}

kvb_status open_table_and_record(solve_command *s, kvb_table **table, const char *path, kvb_error *err)
{
    kvb_status status = kvb_table_open(table, path, NULL, err);
    if (status == KVB_OK) status = take_settings(s, *table, path, err);
    if (status != KVB_OK) return status;
    const kvb_info *info = kvb_table_info(*table);
    cli_list given = s->metric_names;
    const char *name = info->metric;
    s->metric_names = (cli_list){&name, 1};
    status = select_from_record(s, err);
    s->metric_names = given;
    if (status != KVB_OK) return status;
    record_shape shape = record_get_shape(s->r);
    if (info->n_layers != shape.n_layers || info->n_kv_heads != shape.n_kv_heads)
        return kvb_fail(err, KVB_MISMATCH, "%s: expected %u layers x %u KV heads as in %s, found %u x %u", path,
                        shape.n_layers, shape.n_kv_heads, s->path, info->n_layers, info->n_kv_heads);
    return require_model(s, info->model_sha256, path, err);
}

static kvb_status check_table(solve_command *s, certificate_check *k, const char *path, bool *holds, kvb_error *err)
{
    kvb_status status = open_table_and_record(s, &k->table, path, err);
    if (status != KVB_OK) return status;
    k->info = kvb_table_info(k->table);
    const char *unknown = kvb_table_metadata(k->table, "unknown");
    if (unknown && strstr(unknown, "lower_bound"))
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: an imported table without bounds; there is nothing to check", path);
    status = match_record(s, k->info, path, err);
    k->job.metric = s->metrics[0];
    for (uint32_t r = 0; r < s->n_rows && status == KVB_OK; r++) {
        kvb_row row;
        status = kvb_table_row(k->table, r, &row, err);
        k->lambda[r] = row.lambda;
    }
    if (status == KVB_OK) status = read_everything(s, k, path, err);
    if (status == KVB_OK) status = check_limits(s, k, path, err);
    return status == KVB_OK ? report(s, k, path, holds, err) : status;
}

kvb_status validate_certificate(solve_command *s, const char *path, bool *holds, kvb_error *err)
{
    certificate_check *k = calloc(1, sizeof *k);
    if (!k) return kvb_fail(err, KVB_MEMORY, "no memory to check a table");
    kvb_status status = check_table(s, k, path, holds, err);
    kvb_table_close(k->table);
    release_pairs(&k->job);
    free(k);
    return status;
}
