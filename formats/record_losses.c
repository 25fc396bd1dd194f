// Losses of questions in records: curves and gains, small arrays by metric in two groups of a question.
#include "formats/need.h"
#include "names.h"
#include "record_internal.h"
#include "runtime/fail.h"
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Shares of T that the levels keep, ascending: dense where budgets are small, since curves bend there.
static const double SHARES[RECORD_CURVE_LEVELS] = {0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.04, 0.06,
                                                   0.09,  0.13,  0.2,    0.3,  0.45,  0.65,  0.85};

uint32_t record_curve_tokens(uint32_t level, uint32_t n_tokens, uint32_t protect)
{
    uint32_t share = (uint32_t)rint(SHARES[level] * n_tokens), least = protect > 1 ? protect : 1;
    if (least > n_tokens) least = n_tokens;
    return share < least ? least : share;
}

typedef enum loss_kind { CURVES, GAINS, LOSS_KINDS } loss_kind;
#define GAIN_ORDER "keydiff" // which ranking the layers were cut by: the same one in all records
static const char *const group_names[LOSS_KINDS] = {"curves", "gains"};

static void dims_of(uint32_t dims[3], const record_shape *s, loss_kind kind)
{
    dims[0] = s->n_layers;
    dims[1] = kind == CURVES ? s->n_kv_heads : RECORD_GAIN_KINDS;
    dims[2] = kind == CURVES ? RECORD_CURVE_LEVELS : 2;
}

static size_t layer_floats(const uint32_t dims[3])
{
    return (size_t)dims[1] * dims[2];
}

// ---- Writing ----

static kvb_status write_group(const record_writer *w, const h5_file *f, hid_t question, loss_kind kind,
                              const char *const *metrics, const float *const *arrays, size_t n, kvb_error *err)
{
    uint32_t dims[3];
    hid_t group;
    dims_of(dims, &w->shape, kind);
    kvb_status status = h5_make_group(&group, f, question, group_names[kind], err);
    for (size_t i = 0; i < n && status == KVB_OK; i++) {
        h5_set array;
        status = h5_make_array(&array, f, group, metrics[i], dims, 0, false, err);
        for (uint32_t l = 0; l < dims[0] && status == KVB_OK; l++)
            status = h5_write_layer(f, &array, arrays[i] + l * layer_floats(dims), err);
        status = h5_end_array(f, &array, NULL, status, err);
    }
    return h5_end(f, group, status, err);
}

static kvb_status check_losses(const record_writer *w, const char *id, uint32_t question, loss_kind kind,
                               const char *metric, const float *values, kvb_error *err)
{
    uint32_t dims[3];
    dims_of(dims, &w->shape, kind);
    if (!context_id_valid(id) || !metric_name_valid(metric))
        return kvb_fail(err, KVB_ARGUMENT,
                        "%s: context \"%.80s\", metric \"%.130s\": expected ids of " CONTEXT_ID_RULE
                        " and names of " METRIC_NAME_RULE,
                        w->path, id, metric);
    for (size_t i = 0; i < dims[0] * layer_floats(dims); i++)
        if (!(values[i] >= 0 && values[i] <= FLT_MAX))
            return kvb_fail(err, KVB_NUMERIC,
                            "%s: context %s: question %u: %s of %s: layer %zu: found %g, expected a "
                            "finite number >= 0",
                            w->path, id, question + 1, group_names[kind], metric, i / layer_floats(dims),
                            (double)values[i]);
    return KVB_OK;
}

kvb_status record_put_losses(record_writer *w, const char *id, uint32_t question, const record_losses *l,
                             kvb_error *err)
{
    char name[16];
    snprintf(name, sizeof name, "%u", question);
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < l->n && status == KVB_OK; i++)
        status = check_losses(w, id, question, CURVES, l->metrics[i], l->curves[i], err);
    if (status == KVB_OK && l->gains) status = check_losses(w, id, question, GAINS, GAIN_ORDER, l->gains, err);
    if (status != KVB_OK) return status;
    h5_error_printing before = h5_quiet();
    part_file p;
    hid_t questions = -1, group = -1;
    uint64_t each =
        ((uint64_t)w->shape.n_kv_heads * RECORD_CURVE_LEVELS * sizeof(float) + 64) * w->shape.n_layers + 8192;
    status = part_begin(&p, part_losses_path(w->folder, id, question), id, (l->n + 1) * each, err);
    if (status == KVB_OK) status = h5_make_group(&questions, &p.h5, p.context, "questions", err);
    if (status == KVB_OK) status = h5_make_group(&group, &p.h5, questions, name, err);
    if (status == KVB_OK) status = write_group(w, &p.h5, group, CURVES, l->metrics, l->curves, l->n, err);
    const char *order = GAIN_ORDER;
    if (status == KVB_OK && l->gains) status = write_group(w, &p.h5, group, GAINS, &order, &l->gains, 1, err);
    status = h5_end(&p.h5, group, status, err);
    status = h5_end(&p.h5, questions, status, err);
    status = part_end(&p, status, err);
    h5_loud(before);
    return status;
}

// ---- Finding ----

// The group of a kind in a question of a file; *out <= 0 where there is none.
static kvb_status open_group(hid_t *out, const h5_file *f, const char *id, uint32_t number, loss_kind kind,
                             kvb_error *err)
{
    hid_t context, question = -1;
    *out = -1;
    kvb_status status = record_open_context(&context, f, id, err);
    if (status == KVB_OK) status = record_open_question(&question, f, context, number, err);
    if (status == KVB_OK && h5_has_link(question, group_names[kind]))
        status = h5_open_group(out, f, question, group_names[kind], err);
    h5_release(question);
    h5_release(context);
    return status;
}

static bool has_losses(const h5_file *f, const char *id, uint32_t number, loss_kind kind, const char *metric)
{
    h5_error_printing before = h5_quiet();
    hid_t group;
    char **names = NULL;
    size_t n = 0;
    bool found = open_group(&group, f, id, number, kind, NULL) == KVB_OK && group > 0;
    if (found && metric) found = metric_name_valid(metric) && h5_has_link(group, metric);
    else if (found) found = h5_list(&names, &n, f, group, NULL) == KVB_OK && n > 0;
    h5_free_names(names);
    h5_release(group);
    h5_loud(before);
    return found;
}

bool record_writer_has_losses(const record_writer *w, const char *id, uint32_t question, const char *metric)
{
    h5_file f = {.id = -1};
    char *path = part_losses_path(w->folder, id, question);
    bool found = false;
    h5_error_printing before = h5_quiet();
    if (path && path_exists(path) && h5_open(&f, path, NULL) == KVB_OK)
        found = has_losses(&f, id, question, CURVES, metric);
    h5_close(&f);
    h5_loud(before);
    free(path);
    const record_context_info *c = w->base ? record_find_context(w->base, id) : NULL;
    for (uint32_t q = 0; c && q < c->n_questions && !found; q++)
        found = c->questions[q].number == question && has_losses(&w->base->file, id, question, CURVES, metric);
    return found;
}

// ---- Reading ----

kvb_status record_scan_losses(const record *r, hid_t question, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (loss_kind kind = CURVES; kind < LOSS_KINDS && status == KVB_OK; kind++) {
        uint32_t dims[3];
        hid_t group = -1;
        char **names = NULL;
        size_t n = 0;
        if (!h5_has_link(question, group_names[kind])) continue;
        dims_of(dims, &r->shape, kind);
        status = h5_open_group(&group, &r->file, question, group_names[kind], err);
        if (status == KVB_OK) status = h5_list(&names, &n, &r->file, group, err);
        for (size_t i = 0; i < n && status == KVB_OK; i++) {
            h5_set array;
            if (!metric_name_valid(names[i])) {
                status = h5_fail(err, KVB_FORMAT, r->path, group, NULL, "expected metric names of " METRIC_NAME_RULE);
                break;
            }
            status = h5_open_array(&array, &r->file, group, names[i], dims, err);
            h5_close_set(&array);
        }
        h5_free_names(names);
        h5_release(group);
    }
    return status;
}

static kvb_status read_losses(record *r, size_t i, size_t index, loss_kind kind, const char *metric, float *out,
                              kvb_error *err)
{
    const record_context_info *c = record_context(r, i);
    if (!c || index >= c->n_questions)
        return kvb_fail(err, KVB_ARGUMENT, "%s: question %zu of context %zu", r->path, index, i);
    uint32_t dims[3], number = c->questions[index].number;
    h5_error_printing before = h5_quiet();
    hid_t group;
    h5_set array = {.id = -1};
    dims_of(dims, &r->shape, kind);
    kvb_status status = open_group(&group, &r->file, c->id, number, kind, err);
    if (status == KVB_OK && !(group > 0 && metric_name_valid(metric) && h5_has_link(group, metric)))
        status = kvb_fail(err, KVB_MISMATCH, "%s: context %s, question %u has no %s of metric %.128s", r->path, c->id,
                          number, group_names[kind], metric);
    if (status == KVB_OK) status = h5_open_array(&array, &r->file, group, metric, dims, err);
    for (uint32_t l = 0; l < dims[0] && status == KVB_OK; l++) {
        float *layer = out + l * layer_floats(dims);
        status = h5_read_layer(&r->file, &array, layer, err);
        for (size_t k = 0; k < layer_floats(dims) && status == KVB_OK; k++)
            if (!(layer[k] >= 0 && layer[k] <= FLT_MAX))
                status = h5_fail(err, KVB_NUMERIC, r->path, array.id, NULL,
                                 "layer %u: found %g, expected a finite number >= 0", l, (double)layer[k]);
    }
    h5_close_set(&array);
    h5_release(group);
    h5_loud(before);
    return status;
}

static bool question_has(record *r, size_t i, size_t index, loss_kind kind, const char *metric)
{
    const record_context_info *c = record_context(r, i);
    return c && index < c->n_questions && has_losses(&r->file, c->id, c->questions[index].number, kind, metric);
}

bool record_has_curves(record *r, size_t i, size_t question_index, const char *metric)
{
    return question_has(r, i, question_index, CURVES, metric);
}

bool record_has_gains(record *r, size_t i, size_t question_index)
{
    return question_has(r, i, question_index, GAINS, GAIN_ORDER);
}

kvb_status record_read_curves(record *r, size_t i, size_t question_index, const char *metric, float *out,
                              kvb_error *err)
{
    return read_losses(r, i, question_index, CURVES, metric, out, err);
}

kvb_status record_read_gains(record *r, size_t i, size_t question_index, float *out, kvb_error *err)
{
    return read_losses(r, i, question_index, GAINS, GAIN_ORDER, out, err);
}

// ---- Putting files together ----

// All layers of one array.
static kvb_status read_array(float *out, const h5_file *f, hid_t group, const char *metric, const uint32_t dims[3],
                             h5_set *array, kvb_error *err)
{
    kvb_status status = h5_open_array(array, f, group, metric, dims, err);
    for (uint32_t l = 0; l < dims[0] && status == KVB_OK; l++)
        status = h5_read_layer(f, array, out + l * layer_floats(dims), err);
    return status;
}

static kvb_status copy_array(record_output *out, hid_t to, const h5_file *f, hid_t from, const char *metric,
                             const uint32_t dims[3], kvb_error *err)
{
    h5_set source = {.id = -1}, target = {.id = -1};
    float *values = need(dims[0] * layer_floats(dims), sizeof *values, "losses");
    kvb_status status = read_array(values, f, from, metric, dims, &source, err);
    if (status == KVB_OK) status = h5_make_array(&target, &out->h5, to, metric, dims, out->deflate, true, err);
    for (uint32_t l = 0; l < dims[0] && status == KVB_OK; l++)
        status = h5_write_layer(&out->h5, &target, values + l * layer_floats(dims), err);
    status = h5_end_array(&out->h5, &target, &source, status, err);
    h5_close_set(&source);
    free(values);
    return status;
}

// What one file has of a kind.
typedef struct loss_source {
    const h5_file *file;
    hid_t group;  // <= 0: nothing
    char **names; // ascending, NULL-terminated; NULL where there is no group
} loss_source;

// The first name, in ASCII order, that comes after `last` (NULL: of all) in any source; *source receives the first that
// has it. NULL at the end.
static const char *next_name(const loss_source **source, const loss_source *all, size_t n, const char *last)
{
    const char *best = NULL;
    for (size_t i = 0; i < n; i++)
        for (char *const *name = all[i].names; name && *name; name++) {
            if ((last && strcmp(*name, last) <= 0) || (best && strcmp(*name, best) >= 0)) continue;
            best = *name;
            *source = &all[i];
        }
    return best;
}

static kvb_status copy_kind(record_output *out, hid_t question, loss_source *all, size_t n, loss_kind kind,
                            kvb_error *err)
{
    uint32_t dims[3];
    hid_t to = -1;
    const loss_source *from = NULL;
    const char *name = next_name(&from, all, n, NULL);
    dims_of(dims, &out->shape, kind);
    kvb_status status = name ? h5_make_group(&to, &out->h5, question, group_names[kind], err) : KVB_OK;
    for (; name && status == KVB_OK; name = next_name(&from, all, n, name))
        status = copy_array(out, to, from->file, from->group, name, dims, err);
    return h5_end(&out->h5, to, status, err);
}

kvb_status record_output_losses(record_output *out, const char *id, uint32_t number, const h5_file *const *from,
                                size_t n, kvb_error *err)
{
    char name[16];
    hid_t question = -1;
    loss_source *all = need(n, sizeof *all, "files");
    snprintf(name, sizeof name, "%u", number);
    kvb_status status = h5_open_group(&question, &out->h5, out->questions, name, err);
    for (loss_kind kind = CURVES; kind < LOSS_KINDS && status == KVB_OK; kind++) {
        size_t opened = 0, ignored;
        for (; opened < n && status == KVB_OK; opened++) {
            all[opened] = (loss_source){from[opened], -1, NULL};
            status = open_group(&all[opened].group, from[opened], id, number, kind, err);
            if (status == KVB_OK && all[opened].group > 0)
                status = h5_list(&all[opened].names, &ignored, from[opened], all[opened].group, err);
        }
        if (status == KVB_OK) status = copy_kind(out, question, all, n, kind, err);
        while (opened > 0) {
            h5_free_names(all[--opened].names);
            h5_release(all[opened].group);
        }
    }
    free(all);
    return h5_end(&out->h5, question, status, err);
}

static kvb_status compare_array(const record *a, const record *b, const char *id, uint32_t number, loss_kind kind,
                                const char *metric, const hid_t in[2], kvb_error *err)
{
    uint32_t dims[3];
    dims_of(dims, &a->shape, kind);
    size_t n = dims[0] * layer_floats(dims);
    float *values = need(2 * n, sizeof *values, "losses");
    h5_set sets[2] = {{.id = -1}, {.id = -1}};
    kvb_status status = read_array(values, &a->file, in[0], metric, dims, &sets[0], err);
    if (status == KVB_OK) status = read_array(values + n, &b->file, in[1], metric, dims, &sets[1], err);
    if (status == KVB_OK && memcmp(values, values + n, n * sizeof *values) != 0)
        status = kvb_fail(err, KVB_MISMATCH,
                          "%s and %s both have %s of %s for question %u of context %s, and they differ: they were not "
                          "made by the same program on the same kind of processor; profile one again",
                          a->path, b->path, group_names[kind], metric, number + 1, id);
    h5_close_set(&sets[0]);
    h5_close_set(&sets[1]);
    free(values);
    return status;
}

kvb_status record_compare_losses(const record *a, const record *b, const char *id, uint32_t number, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (loss_kind kind = CURVES; kind < LOSS_KINDS && status == KVB_OK; kind++) {
        hid_t in[2] = {-1, -1};
        char **names = NULL;
        size_t n = 0;
        status = open_group(&in[0], &a->file, id, number, kind, err);
        if (status == KVB_OK) status = open_group(&in[1], &b->file, id, number, kind, err);
        if (status == KVB_OK && in[0] > 0 && in[1] > 0) status = h5_list(&names, &n, &a->file, in[0], err);
        for (size_t i = 0; i < n && status == KVB_OK; i++)
            if (h5_has_link(in[1], names[i])) status = compare_array(a, b, id, number, kind, names[i], in, err);
        h5_free_names(names);
        h5_release(in[0]);
        h5_release(in[1]);
    }
    return status;
}
