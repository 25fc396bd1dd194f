// The names of the layout, and writing it.
#include "lukv_steps.h"
#include "formats/atomic_file.h"
#include "json_file.h"
#include "lukv_layout.h"
#include "names.h"
#include "npy.h"
#include "runtime/fail.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

// ---- Names ----

static const struct {
    const char *file, *metric;
} published[] = {{"snapkv", "snapkv:lukv"}, {"ea", "ea:lukv"}};
enum { N_PUBLISHED = sizeof published / sizeof published[0] };

void lukv_metric_file(char *out, size_t size, const char *metric)
{
    const char *stem = metric;
    for (int i = 0; i < N_PUBLISHED; i++) {
        if (strcmp(metric, published[i].metric) == 0) stem = published[i].file;
    }
    snprintf(out, size, "%s.npy", stem);
    for (char *p = out; *p; p++) {
        if (*p == ':' || *p == '=') *p = '_';
    }
}

void lukv_metric_name(char *out, size_t size, const char *file)
{
    size_t n = strlen(file);
    snprintf(out, size, "%.*s", (int)(n > 4 ? n - 4 : 0), file);
    for (int i = 0; i < N_PUBLISHED; i++) {
        if (strcmp(out, published[i].file) == 0) snprintf(out, size, "%s", published[i].metric);
    }
}

void lukv_metric_protected(const char *metric, uint32_t *sink, uint32_t *window)
{
    *sink = 4;
    *window = strncmp(metric, "snapkv", 6) == 0 ? 32 : 1;
}

static bool numbered(const char *file, const char *prefix, uint32_t *number)
{
    size_t n = strlen(prefix), digits;
    if (strncmp(file, prefix, n) != 0) return false;
    digits = strspn(file + n, "0123456789");
    if (digits < 1 || digits > 10 || strcmp(file + n + digits, ".npy") != 0) return false;
    unsigned long long x = strtoull(file + n, NULL, 10);
    *number = (uint32_t)x;
    return x <= UINT32_MAX;
}

lukv_kind lukv_classify(const char *file, uint32_t *question)
{
    size_t n = strlen(file);
    if (n <= 4 || strcmp(file + n - 4, ".npy") != 0) return LUKV_OTHER;
    if (strcmp(file, "context_ids.npy") == 0) return LUKV_TOKENS;
    if (numbered(file, "question_", question)) return LUKV_ORACLE;
    if (numbered(file, "suffix_ids_", question)) return LUKV_SUFFIX;
    if (numbered(file, "answer_ids_", question)) return LUKV_ANSWER;
    return LUKV_METRIC;
}

char *lukv_path(const char *dir, const char *id, const char *format, ...)
{
    char *file = NULL, *path = NULL;
    va_list args;
    va_start(args, format);
    int n = vasprintf(&file, format, args);
    va_end(args);
    if (n < 0) return NULL;
    if (asprintf(&path, "%s/context_%s%s%s", dir, id, *file ? "/" : "", file) < 0) path = NULL;
    free(file);
    return path;
}

// ---- Writing ----

typedef struct exporter {
    record *r;
    const char *dir;
    uint32_t dims[2]; // L, G
    float *array;     // buffer [L,G,T] of the longest context
    int32_t *ids;     // buffer of the longest list
    cJSON *contexts;  // for the side file
} exporter;

// Writes an array or a list and gives the name back.
static kvb_status write_and_free(char *path, npy_type type, uint32_t n_dims, const uint64_t *shape, const void *data,
                                 kvb_error *err)
{
    if (!path) return kvb_fail(err, KVB_MEMORY, "lukv-steps: not enough memory");
    kvb_status status = npy_write(path, type, n_dims, shape, data, err);
    free(path);
    return status;
}

static kvb_status export_array(const exporter *e, char *path, uint32_t n_tokens, kvb_error *err)
{
    const uint64_t shape[3] = {e->dims[0], e->dims[1], n_tokens};
    return write_and_free(path, NPY_F32, 3, shape, e->array, err);
}

// An empty list leaves no file.
static kvb_status export_ids(const exporter *e, char *path, uint32_t n, kvb_error *err)
{
    const uint64_t shape[1] = {n};
    if (n > 0) return write_and_free(path, NPY_I32, 1, shape, e->ids, err);
    free(path);
    return KVB_OK;
}

static kvb_status export_scores(exporter *e, size_t i, const record_context_info *c, cJSON *files, kvb_error *err)
{
    for (uint32_t m = 0; m < c->n_metrics; m++) {
        char file[METRIC_NAME_MAX + 8];
        uint32_t ignored;
        lukv_metric_file(file, sizeof file, c->metrics[m]);
        if (lukv_classify(file, &ignored) != LUKV_METRIC || cJSON_GetObjectItemCaseSensitive(files, file))
            return kvb_fail(err, KVB_UNSUPPORTED, "%s: metric %s cannot be exported: %s is taken by something else",
                            e->dir, c->metrics[m], file);
        kvb_status status = record_read_scores(e->r, i, c->metrics[m], e->array, err);
        if (status == KVB_OK) status = export_array(e, lukv_path(e->dir, c->id, "%s", file), c->n_tokens, err);
        if (status == KVB_OK && !cJSON_AddStringToObject(files, file, c->metrics[m]))
            status = kvb_fail(err, KVB_MEMORY, "lukv-steps: not enough memory");
        if (status != KVB_OK) return status;
    }
    return KVB_OK;
}

static kvb_status export_question(exporter *e, size_t i, const record_context_info *c, uint32_t index, cJSON *list,
                                  kvb_error *err)
{
    const record_question_info *q = &c->questions[index];
    kvb_status status = KVB_OK;
    if (q->n_queries > 0) {
        status = record_read_oracle(e->r, i, index, e->array, err);
        if (status == KVB_OK)
            status = export_array(e, lukv_path(e->dir, c->id, "question_%u.npy", q->number), c->n_tokens, err);
    }
    if (status == KVB_OK) status = record_read_suffix(e->r, i, index, e->ids, err);
    if (status == KVB_OK)
        status = export_ids(e, lukv_path(e->dir, c->id, "suffix_ids_%u.npy", q->number), q->n_suffix, err);
    if (status == KVB_OK) status = record_read_answer(e->r, i, index, e->ids, err);
    if (status == KVB_OK)
        status = export_ids(e, lukv_path(e->dir, c->id, "answer_ids_%u.npy", q->number), q->n_answer, err);
    if (status != KVB_OK) return status;
    cJSON *entry = cJSON_CreateObject();
    if (!entry || !cJSON_AddItemToArray(list, entry) || !cJSON_AddNumberToObject(entry, "number", q->number) ||
        !cJSON_AddNumberToObject(entry, "n_queries", q->n_queries))
        return kvb_fail(err, KVB_MEMORY, "lukv-steps: not enough memory");
    return KVB_OK;
}

static kvb_status export_context(exporter *e, size_t i, kvb_error *err)
{
    const record_context_info *c = record_context(e->r, i);
    char *folder = lukv_path(e->dir, c->id, "%s", "");
    kvb_status status = KVB_OK;
    if (!folder) status = kvb_fail(err, KVB_MEMORY, "lukv-steps: not enough memory");
    else if (mkdir(folder, 0777) != 0)
        status = kvb_fail(err, KVB_IO, "%s/context_%s: cannot make the folder: %s", e->dir, c->id, strerror(errno));
    free(folder);
    cJSON *entry = cJSON_CreateObject();
    bool ok = cJSON_AddItemToArray(e->contexts, entry) && cJSON_AddStringToObject(entry, "id", c->id);
    cJSON *files = cJSON_AddObjectToObject(entry, "metrics"), *questions = cJSON_AddArrayToObject(entry, "questions");
    if (status == KVB_OK && !(ok && files && questions))
        status = kvb_fail(err, KVB_MEMORY, "lukv-steps: not enough memory");
    if (status == KVB_OK) status = record_read_tokens(e->r, i, e->ids, err);
    if (status == KVB_OK) status = export_ids(e, lukv_path(e->dir, c->id, "context_ids.npy"), c->n_tokens, err);
    if (status == KVB_OK) status = export_scores(e, i, c, files, err);
    for (uint32_t q = 0; q < c->n_questions && status == KVB_OK; q++)
        status = export_question(e, i, c, q, questions, err);
    return status;
}

// cJSON rounds numbers to 15 digits when it thinks that this does not matter; here it does. NULL: no memory.
static cJSON *copy_exactly(const cJSON *attributes)
{
    cJSON *copy = cJSON_CreateObject();
    bool ok = copy != NULL;
    const cJSON *a;
    cJSON_ArrayForEach(a, attributes)
    {
        ok = ok && (cJSON_IsNumber(a) ? json_add_exact(copy, a->string, a->valuedouble)
                                      : cJSON_AddItemToObject(copy, a->string, cJSON_Duplicate(a, 1)));
    }
    if (ok) return copy;
    cJSON_Delete(copy);
    return NULL;
}

static kvb_status write_side_file(exporter *e, kvb_error *err)
{
    record_shape s = record_get_shape(e->r);
    cJSON *side = cJSON_CreateObject();
    bool ok = cJSON_AddStringToObject(side, "format", LUKV_SIDE_FORMAT) &&
              cJSON_AddNumberToObject(side, "format_version", 1) &&
              cJSON_AddNumberToObject(side, "n_heads", s.n_heads) &&
              cJSON_AddNumberToObject(side, "head_dim", s.head_dim) &&
              cJSON_AddItemToObject(side, "attributes", copy_exactly(record_attributes(e->r))) &&
              cJSON_AddItemReferenceToObject(side, "contexts", e->contexts);
    char *path = NULL;
    if (!ok || asprintf(&path, "%s/" LUKV_SIDE_FILE, e->dir) < 0) path = NULL;
    kvb_status status = path ? json_write(path, side, err) : kvb_fail(err, KVB_MEMORY, "lukv-steps: not enough memory");
    free(path);
    cJSON_Delete(side);
    return status;
}

static kvb_status allocate_buffers(exporter *e, kvb_error *err)
{
    size_t most_tokens = 1, most_ids = 1;
    for (size_t i = 0; i < record_context_count(e->r); i++) {
        const record_context_info *c = record_context(e->r, i);
        if (c->n_tokens > most_tokens) most_tokens = c->n_tokens;
        for (uint32_t q = 0; q < c->n_questions; q++) {
            if (c->questions[q].n_suffix > most_ids) most_ids = c->questions[q].n_suffix;
            if (c->questions[q].n_answer > most_ids) most_ids = c->questions[q].n_answer;
        }
    }
    if (most_tokens > most_ids) most_ids = most_tokens;
    e->array =
        calloc((size_t)e->dims[0] * e->dims[1], most_tokens * sizeof *e->array); // checked by the record's reader
    e->ids = calloc(most_ids, sizeof *e->ids);
    e->contexts = cJSON_CreateArray();
    if (e->array && e->ids && e->contexts) return KVB_OK;
    return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for one array of %zu tokens", e->dir, most_tokens);
}

kvb_status lukv_steps_export(record *r, const char *dir, kvb_error *err)
{
    record_shape s = record_get_shape(r);
    atomic_folder folder;
    kvb_status status = atomic_folder_begin(&folder, dir, err);
    exporter e = {r, folder.temp_path, {s.n_layers, s.n_kv_heads}, NULL, NULL, NULL};
    if (status == KVB_OK) status = allocate_buffers(&e, err);
    for (size_t i = 0; i < record_context_count(r) && status == KVB_OK; i++) status = export_context(&e, i, err);
    if (status == KVB_OK) status = write_side_file(&e, err);
    status = atomic_folder_end(&folder, status, err);
    cJSON_Delete(e.contexts);
    free(e.ids);
    free(e.array);
    return status;
}
