#include "study/table_check.h"
#include "formats/need.h"
#include "formats/table_write.h"
#include "runtime/fail.h"
#include "runtime/table.h"
#include "solver/checker.h"
#include "solver/constrained.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- Opening --------------------------------------------------------------------------------------------------------

kvb_status open_table_and_record(kvb_table **table, study_options *o, kvb_limits *limits, selection *from,
                                 const char *table_path, const char *record_path, const selection_request *wanted,
                                 kvb_error *err)
{
    kvb_status status = kvb_table_open(table, table_path, NULL, err);
    if (status == KVB_OK) status = study_options_from_table(o, limits, *table, table_path, err);
    if (status != KVB_OK) return status;
    const kvb_info *info = kvb_table_info(*table);
    const char *metric = info->metric;
    const selection_request one = {&metric, 1, wanted->contexts, wanted->max_questions, kvb_table_ranking(*table)};
    status = selection_open(from, record_path, &one, err);
    if (status != KVB_OK) return status;
    record_shape shape = record_get_shape(from->r);
    if (info->n_budgeted != shape.n_layers || info->n_kv_heads != shape.n_kv_heads)
        return kvb_fail(err, KVB_MISMATCH, "%s: expected %u layers x %u KV heads as in %s, found %u x %u", table_path,
                        shape.n_layers, shape.n_kv_heads, record_path, info->n_budgeted, info->n_kv_heads);
    const char *bounded = kvb_table_metadata(*table, "bounded_layers");
    if (strcmp(bounded ? bounded : "", record_text(from->r, "bounded_layers")) != 0)
        return kvb_fail(err, KVB_MISMATCH, "%s: expected the bounded layers '%.60s' as in %s, found '%.60s'",
                        table_path, record_text(from->r, "bounded_layers"), record_path, bounded ? bounded : "");
    return selection_require_model(from, info->model_sha256, table_path, err);
}

// Checks that the table was made from this record, and that its hull is known.
static kvb_status match_record(const table_check *k, kvb_error *err)
{
    char sha256[65];
    const kvb_info *info = kvb_table_info(k->table);
    kvb_status status = record_file_sha256(k->from.r, sha256, err);
    if (status != KVB_OK) return status;
    if (*info->record_sha256 && strcmp(info->record_sha256, sha256) != 0)
        return kvb_fail(err, KVB_MISMATCH, "%s: was made from another record (SHA-256 %.16s...) than %s (%.16s...)",
                        k->path, info->record_sha256, k->from.path, sha256);
    if (strcmp(info->hull, "feasible") != 0 && strcmp(info->hull, "full") != 0)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: unknown hull '%s'", k->path, info->hull);
    return KVB_OK;
}

static kvb_status match_pairs(const table_check *k, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(k->table);
    if (k->pairs.n_pairs == info->n_questions && k->pairs.n_contexts == info->n_contexts) return KVB_OK;
    return kvb_fail(err, KVB_MISMATCH,
                    "%s: was made from %u questions on %u contexts, but %u on %u are selected; give the --contexts and "
                    "--questions that it was solved with",
                    k->path, info->n_questions, info->n_contexts, k->pairs.n_pairs, k->pairs.n_contexts);
}

kvb_status table_check_open(table_check *k, const char *table_path, const char *record_path,
                            const selection_request *wanted, kvb_error *err)
{
    *k = (table_check){.path = table_path};
    kvb_status status =
        open_table_and_record(&k->table, &k->options, &k->limits, &k->from, table_path, record_path, wanted, err);
    if (status != KVB_OK) return status;
    const char *unknown = kvb_table_metadata(k->table, "unknown");
    if (unknown && strstr(unknown, "lower_bound"))
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: an imported table without bounds; there is nothing to check",
                        table_path);
    status = match_record(k, err);
    for (uint32_t r = 0; r < k->options.n_rows && status == KVB_OK; r++) {
        kvb_row row;
        status = kvb_table_row(k->table, r, &row, err);
        if (status == KVB_OK) k->lambda[r] = row.lambda;
    }
    if (status == KVB_OK) status = pairs_open(&k->pairs, &k->from, k->from.metrics[0], &k->options, err);
    if (status == KVB_OK && k->options.n_packings) {
        k->packing_loss = need((size_t)shape_heads(&k->pairs.longest) * RECORD_PACKINGS, sizeof(double), "losses");
        status = output_packings_read(k->packing_loss, &k->from, k->pairs.gain, err);
    }
    return status == KVB_OK ? match_pairs(k, err) : status;
}

void table_check_free(table_check *k)
{
    pairs_close(&k->pairs);
    free(k->packing_loss);
    selection_close(&k->from);
    kvb_limits_free(&k->limits);
    kvb_table_close(k->table);
    k->table = NULL;
}

// ---- Bounds ---------------------------------------------------------------------------------------------------------

static kvb_status add_bounds(table_check *k, const loss_curves *c, double weight, kvb_error *err)
{
    const study_options *o = &k->options;
    double near[ROWS], bound[ROWS];
    kvb_status status = KVB_OK;
    if (!(c->total > 0)) return KVB_OK; // nothing can be lost: the bound is 0
    for (uint32_t r = 0; r < o->n_rows; r++)
        near[r] = k->lambda[r] * (o->aggregate == AGGREGATE_MEAN_LOSS ? 1 : c->total);
    if (o->limits) status = checker_limited_rows(c, o->limits, o->n_rows, o->ratios, near, bound, err);
    else checker_rows(c, o->scope == SCOPE_LAYER, o->n_rows, o->ratios, near, bound);
    for (uint32_t r = 0; r < o->n_rows && status == KVB_OK; r++) k->bound[r] += weight * fmax(bound[r], 0);
    return status;
}

// For a table with formats: computes the bounds at the stored multipliers, its losses, and whether its rows fit.
static void bound_formats(table_check *k, const loss_curves *c)
{
    const kvb_info *info = kvb_table_info(k->table);
    size_t G = info->n_kv_heads, n = (size_t)k->options.n_rows * info->n_budgeted * G, head = 0;
    checker_formats f = {c, k->packing_loss, info->head_dim, 0};
    checked_row row[ROWS];
    uint32_t *keep = need(n, sizeof *keep, "budgets");
    uint8_t *formats = need(2 * n, sizeof *formats, "formats");
    for (uint32_t i = 0; i < k->options.n_packings; i++) f.choices |= 1u << k->options.packings[i];
    for (size_t i = 0; i < n; i++)
        keep[i] = (uint32_t)rint((1 - kvb_table_budgeted_ratios(k->table)[i]) * c->shape.n_tokens);
    for (size_t i = 0; i < (size_t)k->options.n_rows * info->n_layers * G; i++)
        if (!info->bounded || !info->bounded[i / G % info->n_layers])
            memcpy(formats + 2 * head++, k->table->formats + 2 * i, 2);
    checker_formats_rows(&f, k->options.n_rows, k->options.ratios, k->lambda, keep, formats, row);
    for (uint32_t r = 0; r < k->options.n_rows; r++) {
        k->bound[r] = fmax(0, row[r].bound);
        k->loss[r] = row[r].loss;
        k->table_loss[r] += k->pairs.n_pairs * row[r].added;
        k->too_large[r] = !row[r].fits;
    }
    free_all(keep, formats);
}

// Bounds worst and cvar: whatever the weights, no budgets lose less in the worst case than in the weighted mean.
static kvb_status bound_tail(table_check *k, const gathered *g, kvb_error *err)
{
    const study_options *o = &k->options;
    size_t n = g->n_texts;
    double cap = o->tail * (double)n > 1 ? 1 / (o->tail * (double)n) : 1,
           *weights = need(o->n_rows * n, sizeof *weights, "weights of texts");
    loss_curves c = loss_curves_make(&g->texts[0].curves.shape);
    kvb_status status = table_weights_parse(weights, kvb_table_metadata(k->table, "text_weights"), o->n_rows,
                                            (uint32_t)n, cap, k->path, err);
    for (uint32_t r = 0; r < o->n_rows && status == KVB_OK; r++) {
        loss_mean_weigh(&c, g->texts, n, weights + r * n);
        checker_rows(&c, o->scope == SCOPE_LAYER, 1, &o->ratios[r], &k->lambda[r], &k->bound[r]);
    }
    loss_curves_free(&c);
    free(weights);
    return status;
}

// ---- Reading --------------------------------------------------------------------------------------------------------

static kvb_status take_pair(table_check *k, gathered *g, pair_walk *w, kvb_error *err)
{
    const study_options *o = &k->options;
    loss_curves *c = &w->problem.curves;
    kvb_status status = judge_table(k->table_loss, c, o->limits, o->n_rows, kvb_table_budgeted_ratios(k->table), err);
    if (status == KVB_OK && o->oracle_order) status = loss_curves_fill_perfect(c, w->oracle, err);
    if (status != KVB_OK) return status;
    if (g->how != AGGREGATE_MEAN_RATIO) return gather_add(g, w->context, c, err);
    loss_curves_shrink(c, o->shrink);
    return add_bounds(k, c, 1 / (c->total * k->pairs.n_pairs), err);
}

kvb_status table_check_run(table_check *k, study_progress *progress, kvb_error *err)
{
    gathered g;
    study_progress_begin(progress, k->pairs.n_pairs);
    gather_init(&g, &k->pairs, k->options.aggregate);
    pair_walk w = pair_walk_open(&k->pairs, study_solve_options(&k->options), k->options.min_keep, progress);
    while (pair_walk_next(&w, err)) w.status = take_pair(k, &g, &w, err);
    kvb_status status = pair_walk_close(&w);
    if (status == KVB_OK) gather_finish(&g, k->options.shrink);
    if (status == KVB_OK && k->options.n_packings) bound_formats(k, &g.all.curves);
    else if (status == KVB_OK && g.how == AGGREGATE_MEAN_LOSS) status = add_bounds(k, &g.all.curves, 1, err);
    if (status == KVB_OK && g.how == AGGREGATE_TAIL) status = bound_tail(k, &g, err);
    for (int r = 0; r < ROWS; r++) k->table_loss[r] /= k->pairs.n_pairs;
    gather_free(&g);
    return status;
}

// ---- Judging --------------------------------------------------------------------------------------------------------

kvb_status table_check_limits(const table_check *k, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(k->table);
    size_t n = (size_t)info->n_budgeted * info->n_kv_heads;
    uint32_t *keep = need(n, sizeof *keep, "heads"), n_tokens = k->pairs.longest.n_tokens;
    kvb_status status = KVB_OK;
    for (uint32_t r = 0; r < k->options.n_rows && status == KVB_OK && k->options.limits; r++) {
        kvb_error inner;
        const double *prune = kvb_table_budgeted_ratios(k->table) + r * n;
        for (size_t h = 0; h < n; h++) keep[h] = (uint32_t)rint((1 - prune[h]) * n_tokens);
        status = constrained_check(k->options.limits, n_tokens, keep, &inner);
        if (status != KVB_OK) kvb_fail(err, status, "%s: row %u: %s", k->path, r + 1, inner.message);
    }
    free(keep);
    return status;
}

// The tolerance allows for rounding: losses are sums over many heads in f64.
const char *table_check_fault(const table_check *k, const kvb_row *row, uint32_t r)
{
    static const double TOLERANCE = 1e-9;
    if (k->too_large[r]) return "takes more bytes than its ratio leaves, or a format that was no choice";
    if (!(row->lower_bound <= k->bound[r] + TOLERANCE)) return "no multiplier proves the bound";
    if (!(row->lower_bound <= row->loss + TOLERANCE)) return "the bound is above the loss";
    if (k->options.n_packings && !(fabs(row->loss - k->loss[r]) <= TOLERANCE)) return "the loss is another";
    const char *unknown = kvb_table_metadata(k->table, "unknown"); // refined: other budgets under the same bounds
    if (unknown && strstr(unknown, "table_loss")) return NULL;
    if (!(fabs(row->table_loss - k->table_loss[r]) <= TOLERANCE)) return "the table's own loss is another";
    return NULL;
}
