// What a context and a question hold, in one table, and what is done with all of it alike: writing, looking at,
// reading, copying into another record, comparing.
#include "formats/need.h"
#include "formats/record_internal.h"
#include "runtime/fail.h"
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const record_piece record_pieces[RECORD_PIECES] = {
    [PIECE_TOKENS] = {.name = "token_ids", .form = PIECE_IDS},
    [PIECE_SCORES] = {.name = "scores", .form = PIECE_BY_METRIC},
    [PIECE_SUFFIX] = {.name = "suffix_ids", .form = PIECE_IDS},
    [PIECE_ANSWER] = {.name = "answer_ids", .form = PIECE_IDS},
    [PIECE_ORACLE] = {.name = "oracle", .form = PIECE_ARRAY, .positive = true},
    [PIECE_CURVES] = {"curves", PIECE_BY_METRIC, true, true, 0, RECORD_CURVE_LEVELS},
    [PIECE_GAINS] = {"gains", PIECE_BY_METRIC, true, true, RECORD_GAIN_KINDS, 2},
    [PIECE_PACKINGS] = {"packings", PIECE_BY_METRIC, true, true, 0, RECORD_PACKINGS},
};

// Shares of T that the levels of curves keep, ascending: dense where budgets are small, since curves bend there.
static const double SHARES[RECORD_CURVE_LEVELS] = {0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.04, 0.06,
                                                   0.09,  0.13,  0.2,    0.3,  0.45,  0.65,  0.85};

uint32_t record_curve_tokens(uint32_t level, uint32_t n_tokens, uint32_t protect)
{
    uint32_t share = (uint32_t)rint(SHARES[level] * n_tokens), least = protect > 1 ? protect : 1;
    if (least > n_tokens) least = n_tokens;
    return share < least ? least : share;
}

// Sets dims to the [layers, rows, columns] of an array of this piece.
static void dims_of(uint32_t dims[3], const record_shape *s, piece_kind kind, uint32_t n_tokens)
{
    dims[0] = s->n_layers;
    dims[1] = record_pieces[kind].rows ? record_pieces[kind].rows : s->n_kv_heads;
    dims[2] = record_pieces[kind].columns ? record_pieces[kind].columns : n_tokens;
}

static size_t layer_floats(const uint32_t dims[3])
{
    return (size_t)dims[1] * dims[2];
}

// Returns the index of the first number that the piece must not have, or n if all are right.
static size_t find_wrong(piece_kind kind, const float *values, size_t n)
{
    size_t i = 0;
    if (record_pieces[kind].positive)
        while (i < n && values[i] >= 0 && values[i] <= FLT_MAX) i++;
    else
        while (i < n && !isnan(values[i])) i++;
    return i;
}

// What is wrong with values[i], for messages.
static char *describe_wrong(piece_kind kind, const uint32_t dims[3], const float *values, size_t i)
{
    const record_piece *p = &record_pieces[kind];
    bool heads = !p->rows && !p->columns;
    return need_text("layer %zu, %s %zu, %s %zu: found %g, expected %s", i / layer_floats(dims),
                     heads ? "KV head" : "row", i / dims[2] % dims[1], heads ? "token" : "column", i % dims[2],
                     (double)values[i], p->positive ? "a finite number >= 0" : "a number");
}

// ---- Writing ----

kvb_status piece_check(const record_shape *s, piece_kind kind, uint32_t n_tokens, const float *values,
                       const char *where, kvb_error *err)
{
    uint32_t dims[3];
    dims_of(dims, s, kind, n_tokens);
    size_t n = dims[0] * layer_floats(dims), i = find_wrong(kind, values, n);
    if (i == n) return KVB_OK;
    char *wrong = describe_wrong(kind, dims, values, i);
    kvb_status status = kvb_fail(err, KVB_NUMERIC, "%s: %s", where, wrong);
    free(wrong);
    return status;
}

kvb_status piece_write(const h5_file *f, const record_shape *s, hid_t group, const char *name, piece_kind kind,
                       uint32_t n_tokens, const float *values, kvb_error *err)
{
    uint32_t dims[3];
    h5_set array;
    dims_of(dims, s, kind, n_tokens);
    kvb_status status = h5_make_array(&array, f, group, name, dims, false, err);
    for (uint32_t l = 0; l < dims[0] && status == KVB_OK; l++)
        status = h5_write_layer(f, &array, values + l * layer_floats(dims), err);
    return h5_end_array(f, &array, NULL, status, err);
}

uint64_t piece_bytes(const record_shape *s, piece_kind kind, uint64_t n_tokens)
{
    uint32_t dims[3];
    dims_of(dims, s, kind, (uint32_t)n_tokens);
    return (layer_floats(dims) * sizeof(float) + 64) * s->n_layers + 8192;
}

// ---- Finding and looking at ----

kvb_status record_open_group(hid_t *out, const h5_file *f, const char *id, const uint32_t *number, kvb_error *err)
{
    char name[16] = "";
    if (number) snprintf(name, sizeof name, "%u", *number);
    const char *const path[] = {"contexts", id, "questions", name};
    hid_t at = f->id, next;
    kvb_status status = KVB_OK;
    for (int i = 0; i < (number ? 4 : 2) && status == KVB_OK; i++) {
        status = h5_open_group(&next, f, at, path[i], err);
        if (i > 0) h5_release(at);
        at = next;
    }
    *out = at;
    return status;
}

static kvb_status check_array(const record *r, hid_t group, const char *name, piece_kind kind, uint32_t n_tokens,
                              kvb_error *err)
{
    uint32_t dims[3];
    h5_set array;
    dims_of(dims, &r->shape, kind, n_tokens);
    kvb_status status = h5_open_array(&array, &r->file, group, name, dims, err);
    h5_close_set(&array);
    return status;
}

// Scans the arrays by metric; *names receives their names.
static kvb_status scan_metrics(const record *r, hid_t group, piece_kind kind, uint32_t n_tokens, size_t *n,
                               char ***names, kvb_error *err)
{
    hid_t arrays;
    kvb_status status = h5_open_group(&arrays, &r->file, group, record_pieces[kind].name, err);
    if (status == KVB_OK) status = h5_list(names, n, &r->file, arrays, err);
    for (size_t i = 0; i < *n && status == KVB_OK; i++)
        status = metric_name_valid((*names)[i])
                     ? check_array(r, arrays, (*names)[i], kind, n_tokens, err)
                     : h5_fail(err, KVB_FORMAT, r->path, arrays, NULL,
                               "expected metric names of " METRIC_NAME_RULE ", found another");
    h5_release(arrays);
    return status;
}

kvb_status piece_scan(const record *r, hid_t group, piece_kind kind, uint32_t n_tokens, uint32_t *count, char ***names,
                      kvb_error *err)
{
    const record_piece *p = &record_pieces[kind];
    char **own = NULL;
    size_t n = 0;
    h5_set ids;
    if (p->optional && !h5_has_link(group, p->name)) return KVB_OK;
    if (p->form == PIECE_ARRAY) return check_array(r, group, p->name, kind, n_tokens, err);
    if (p->form == PIECE_IDS) {
        kvb_status status = h5_open_ids(&ids, count, &r->file, group, p->name, err);
        h5_close_set(&ids);
        return status;
    }
    kvb_status status = scan_metrics(r, group, kind, n_tokens, &n, names ? names : &own, err);
    if (count) *count = (uint32_t)n;
    h5_free_names(own);
    return status;
}

// ---- Reading ----

kvb_status piece_read_array(const record *r, hid_t group, const char *name, piece_kind kind, uint32_t n_tokens,
                            float *out, kvb_error *err)
{
    uint32_t dims[3];
    h5_set array;
    dims_of(dims, &r->shape, kind, n_tokens);
    kvb_status status = h5_open_array(&array, &r->file, group, name, dims, err);
    for (uint32_t l = 0; l < dims[0] && status == KVB_OK; l++)
        status = h5_read_layer(&r->file, &array, out + l * layer_floats(dims), err);
    size_t n = dims[0] * layer_floats(dims), i = status == KVB_OK ? find_wrong(kind, out, n) : n;
    if (i < n) {
        char *wrong = describe_wrong(kind, dims, out, i);
        status = h5_fail(err, KVB_NUMERIC, r->path, array.id, NULL, "%s", wrong);
        free(wrong);
    }
    h5_close_set(&array);
    return status;
}

kvb_status piece_read_ids(const h5_file *f, hid_t group, const char *name, uint32_t n, int32_t *out, kvb_error *err)
{
    h5_set ids;
    uint32_t found;
    kvb_status status = h5_open_ids(&ids, &found, f, group, name, err);
    if (status == KVB_OK && found != n)
        status = h5_fail(err, KVB_FORMAT, f->name, group, name, "has changed while it was read");
    if (status == KVB_OK && n > 0) status = h5_read_ids(f, &ids, out, err);
    h5_close_set(&ids);
    return status;
}

// ---- Copying: one record out of pieces of other files, namely parts, finished records, shards ----

// Room for the HDF5 structures of the whole file. Each piece takes less in it than in the file that it comes from.
enum { RECORD_OVERHEAD = 1 << 20 };

kvb_status record_output_begin(record_output *out, const char *path, const record_shape *shape, const cJSON *attributes,
                               uint64_t bytes, kvb_error *err)
{
    *out = (record_output){.h5 = {.id = -1}, .shape = *shape};
    out->contexts = out->context = out->questions = -1;
    kvb_status status = atomic_file_begin(&out->file, path, err);
    if (status != KVB_OK) return status;
    status = h5_create(&out->h5, out->file.temp_path, path, bytes + RECORD_OVERHEAD, err);
    if (status == KVB_OK) status = record_root_write(&out->h5, shape, attributes, err);
    if (status == KVB_OK) status = h5_make_group(&out->contexts, &out->h5, out->h5.id, "contexts", err);
    return status;
}

static kvb_status close_context(record_output *out, kvb_status status, kvb_error *err)
{
    status = h5_end(&out->h5, out->questions, status, err);
    status = h5_end(&out->h5, out->context, status, err);
    out->questions = out->context = -1;
    return status;
}

kvb_status record_output_end(record_output *out, kvb_status status, kvb_error *err)
{
    status = close_context(out, status, err);
    status = h5_end(&out->h5, out->contexts, status, err);
    if (out->h5.tally) status = h5_finish(&out->h5, out->file.temp_path, status, err);
    if (status == KVB_OK) status = atomic_file_commit(&out->file, err);
    else atomic_file_abandon(&out->file);
    return status;
}

// One of the files that a context or a question comes from, while it is copied.
typedef struct piece_source {
    const h5_file *file;
    hid_t group;   // of the context or question
    hid_t metrics; // the arrays by metric that are being copied; <= 0: it has none
    char **names;  // of these, ascending, NULL-terminated
} piece_source;

static piece_source *open_sources(const h5_file *const *from, size_t n, const char *id, const uint32_t *number,
                                  kvb_status *status, kvb_error *err)
{
    piece_source *sources = need(n, sizeof *sources, "files");
    for (size_t i = 0; i < n && *status == KVB_OK; i++) {
        sources[i].file = from[i];
        *status = record_open_group(&sources[i].group, from[i], id, number, err);
    }
    return sources;
}

static void close_sources(piece_source *sources, size_t n)
{
    for (size_t i = 0; i < n; i++) h5_release(sources[i].group);
    free(sources);
}

// Returns the first source that has it, or else the very first, so that reading it reports what is missing.
static const piece_source *source_of(const piece_source *sources, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (h5_has_link(sources[i].group, name)) return &sources[i];
    return sources;
}

static kvb_status copy_ids(uint32_t *n, const record_output *out, hid_t to, const piece_source *from, const char *name,
                           kvb_error *err)
{
    h5_set ids;
    kvb_status status = h5_open_ids(&ids, n, from->file, from->group, name, err);
    int32_t *values = need(status == KVB_OK ? *n : 0, sizeof *values, "token ids");
    if (status == KVB_OK && *n > 0) status = h5_read_ids(from->file, &ids, values, err);
    if (status == KVB_OK) status = h5_write_ids(&out->h5, to, name, values, *n, err);
    free(values);
    h5_close_set(&ids);
    return status;
}

static kvb_status copy_array(const record_output *out, hid_t to, const h5_file *file, hid_t from, const char *name,
                             piece_kind kind, kvb_error *err)
{
    uint32_t dims[3];
    h5_set source, target = {.id = -1};
    dims_of(dims, &out->shape, kind, out->n_tokens);
    float *layer = need(layer_floats(dims), sizeof *layer, "values of a layer");
    kvb_status status = h5_open_array(&source, file, from, name, dims, err);
    if (status == KVB_OK) status = h5_make_array(&target, &out->h5, to, name, dims, true, err);
    for (uint32_t l = 0; l < dims[0] && status == KVB_OK; l++) {
        status = h5_read_layer(file, &source, layer, err);
        if (status == KVB_OK) status = h5_write_layer(&out->h5, &target, layer, err);
    }
    status = h5_end_array(&out->h5, &target, &source, status, err);
    h5_close_set(&source);
    free(layer);
    return status;
}

// Returns the first name, in ASCII order, that comes after `last` (NULL: the first of all) in any source, or NULL at
// the end; *source receives the first source that has it.
static const char *next_name(const piece_source **source, const piece_source *all, size_t n, const char *last)
{
    const char *best = NULL;
    for (size_t i = 0; i < n; i++) {
        char *const *name = all[i].names;
        while (name && *name && last && strcmp(*name, last) <= 0) name++;
        if (!name || !*name || (best && strcmp(*name, best) >= 0)) continue;
        best = *name;
        *source = &all[i];
    }
    return best;
}

// Copies each metric's array from the first file that has it.
static kvb_status copy_metrics(const record_output *out, hid_t to, piece_source *from, size_t n, piece_kind kind,
                               kvb_error *err)
{
    const record_piece *p = &record_pieces[kind];
    kvb_status status = KVB_OK;
    for (size_t i = 0, ignored; i < n && status == KVB_OK; i++) {
        from[i].metrics = -1;
        from[i].names = NULL;
        if (p->optional && !h5_has_link(from[i].group, p->name)) continue;
        status = h5_open_group(&from[i].metrics, from[i].file, from[i].group, p->name, err);
        if (status == KVB_OK) status = h5_list(&from[i].names, &ignored, from[i].file, from[i].metrics, err);
    }
    hid_t arrays = -1;
    const piece_source *source = NULL;
    const char *name = next_name(&source, from, n, NULL);
    if (status == KVB_OK && (name || !p->optional)) status = h5_make_group(&arrays, &out->h5, to, p->name, err);
    for (; name && status == KVB_OK; name = next_name(&source, from, n, name))
        status = copy_array(out, arrays, source->file, source->metrics, name, kind, err);
    for (size_t i = 0; i < n; i++) {
        h5_free_names(from[i].names);
        h5_release(from[i].metrics);
        from[i].names = NULL;
        from[i].metrics = -1;
    }
    return h5_end(&out->h5, arrays, status, err);
}

kvb_status record_output_context(record_output *out, const char *id, const h5_file *const *from, size_t n,
                                 kvb_error *err)
{
    kvb_status status = close_context(out, KVB_OK, err);
    if (status == KVB_OK) status = h5_make_group(&out->context, &out->h5, out->contexts, id, err);
    if (status == KVB_OK) status = h5_put_u32(&out->h5, out->context, "order", out->n_contexts++, err);
    if (status == KVB_OK) status = h5_make_group(&out->questions, &out->h5, out->context, "questions", err);
    piece_source *sources = open_sources(from, n, id, NULL, &status, err);
    if (status == KVB_OK) status = copy_ids(&out->n_tokens, out, out->context, sources, "token_ids", err);
    if (status == KVB_OK) status = record_tokens_check(&out->shape, out->n_tokens, from[0]->name, err);
    if (status == KVB_OK) status = copy_metrics(out, out->context, sources, n, PIECE_SCORES, err);
    close_sources(sources, n);
    return status;
}

kvb_status record_output_question(record_output *out, const char *id, uint32_t number, const h5_file *const *from,
                                  size_t n, kvb_error *err)
{
    char name[16];
    snprintf(name, sizeof name, "%u", number);
    hid_t to = -1;
    uint32_t n_queries = 0, ignored;
    kvb_status status = KVB_OK;
    piece_source *sources = open_sources(from, n, id, &number, &status, err);
    const piece_source *own = status == KVB_OK ? source_of(sources, n, "suffix_ids") : NULL; // others have losses alone
    if (status == KVB_OK) status = h5_make_group(&to, &out->h5, out->questions, name, err);
    if (status == KVB_OK) status = h5_get_u32(&n_queries, own->file, own->group, "n_queries", err);
    if (status == KVB_OK) status = h5_put_u32(&out->h5, to, "n_queries", n_queries, err);
    if (status == KVB_OK) status = copy_ids(&ignored, out, to, own, "suffix_ids", err);
    if (status == KVB_OK) status = copy_ids(&ignored, out, to, own, "answer_ids", err);
    if (status == KVB_OK && n_queries > 0)
        status = copy_array(out, to, own->file, own->group, "oracle", PIECE_ORACLE, err);
    for (piece_kind kind = PIECE_CURVES; kind <= PIECE_PACKINGS && status == KVB_OK; kind++)
        status = copy_metrics(out, to, sources, n, kind, err);
    close_sources(sources, n);
    return h5_end(&out->h5, to, status, err);
}

// ---- Comparing ----

// Two records, and which part of them is compared.
typedef struct comparison {
    const record *r[2];
    hid_t group[2];
    const char *id;
    uint32_t n_tokens;
} comparison;

static kvb_status differ(const comparison *c, const char *what, const char *metric, kvb_error *err)
{
    return kvb_fail(err, KVB_MISMATCH,
                    "%s and %s both have context %s, with different %s%s%s: other texts of one name, or not made by "
                    "the same program on the same kind of processor; rename one, or profile it again",
                    c->r[0]->path, c->r[1]->path, c->id, what, metric ? " of " : "", metric ? metric : "");
}

// Compares checksums alone: what is copied is read anyway, and then checked against its own.
static kvb_status compare_sets(const comparison *c, const hid_t in[2], const char *name, piece_kind kind,
                               kvb_error *err)
{
    const record_piece *p = &record_pieces[kind];
    uint32_t dims[3], ignored;
    h5_set sets[2] = {{.id = -1}, {.id = -1}};
    kvb_status status = KVB_OK;
    dims_of(dims, &c->r[0]->shape, kind, c->n_tokens);
    for (int i = 0; i < 2 && status == KVB_OK; i++)
        status = p->form == PIECE_IDS ? h5_open_ids(&sets[i], &ignored, &c->r[i]->file, in[i], name, err)
                                      : h5_open_array(&sets[i], &c->r[i]->file, in[i], name, dims, err);
    if (status == KVB_OK && strcmp(sets[0].sha256, sets[1].sha256) != 0)
        status = differ(c, p->name, p->form == PIECE_BY_METRIC ? name : NULL, err);
    h5_close_set(&sets[0]);
    h5_close_set(&sets[1]);
    return status;
}

static kvb_status compare_piece(const comparison *c, piece_kind kind, kvb_error *err)
{
    const record_piece *p = &record_pieces[kind];
    hid_t in[2] = {-1, -1};
    char **names = NULL;
    size_t n = 0;
    if (p->form != PIECE_IDS && (!h5_has_link(c->group[0], p->name) || !h5_has_link(c->group[1], p->name)))
        return KVB_OK;
    if (p->form != PIECE_BY_METRIC) return compare_sets(c, c->group, p->name, kind, err);
    kvb_status status = h5_open_group(&in[0], &c->r[0]->file, c->group[0], p->name, err);
    if (status == KVB_OK) status = h5_open_group(&in[1], &c->r[1]->file, c->group[1], p->name, err);
    if (status == KVB_OK) status = h5_list(&names, &n, &c->r[0]->file, in[0], err);
    for (size_t i = 0; i < n && status == KVB_OK; i++)
        if (h5_has_link(in[1], names[i])) status = compare_sets(c, in, names[i], kind, err);
    h5_free_names(names);
    h5_release(in[0]);
    h5_release(in[1]);
    return status;
}

kvb_status record_compare(const record *a, const record *b, const char *id, uint32_t n_tokens, const uint32_t *number,
                          kvb_error *err)
{
    comparison c = {{a, b}, {-1, -1}, id, n_tokens};
    uint32_t n_queries[2] = {0, 0};
    kvb_status status = KVB_OK;
    for (int i = 0; i < 2 && status == KVB_OK; i++) {
        status = record_open_group(&c.group[i], &c.r[i]->file, id, number, err);
        if (status == KVB_OK && number) status = h5_get_u32(&n_queries[i], &c.r[i]->file, c.group[i], "n_queries", err);
    }
    if (status == KVB_OK && n_queries[0] != n_queries[1]) status = differ(&c, "numbers of queries", NULL, err);
    piece_kind first = number ? PIECE_SUFFIX : PIECE_TOKENS, last = number ? PIECE_PACKINGS : PIECE_SCORES;
    for (piece_kind kind = first; kind <= last && status == KVB_OK; kind++) status = compare_piece(&c, kind, err);
    h5_release(c.group[0]);
    h5_release(c.group[1]);
    return status;
}
