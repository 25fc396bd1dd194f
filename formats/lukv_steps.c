#include "formats/lukv_steps.h"
#include "formats/atomic_file.h"
#include "formats/file_read.h"
#include "formats/json_file.h"
#include "formats/names.h"
#include "formats/need.h"
#include "formats/npy.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LUKV_SIDE_FILE "kvbudget.json"
#define LUKV_SIDE_FORMAT "kvbudget-lukv-steps"

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
    char file[NAME_MAX + 1];
    va_list args;
    va_start(args, format);
    vsnprintf(file, sizeof file, format, args);
    va_end(args);
    return need_text("%s/context_%s%s%s", dir, id, *file ? "/" : "", file);
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
    if (mkdir(folder, 0777) != 0)
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
    char *path = need_text("%s/" LUKV_SIDE_FILE, e->dir);
    kvb_status status = ok ? json_write(path, side, err) : kvb_fail(err, KVB_MEMORY, "lukv-steps: not enough memory");
    free(path);
    cJSON_Delete(side);
    return status;
}

static void allocate_buffers(exporter *e)
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
    e->array = need((size_t)e->dims[0] * e->dims[1] * most_tokens, sizeof *e->array, "values of an array"); // checked
    e->ids = need(most_ids, sizeof *e->ids, "token ids");
    e->contexts = cJSON_CreateArray();
}

kvb_status lukv_steps_export(record *r, const char *dir, kvb_error *err)
{
    record_shape s = record_get_shape(r);
    atomic_folder folder;
    kvb_status status = atomic_folder_begin(&folder, dir, err);
    exporter e = {r, folder.temp_path, {s.n_layers, s.n_kv_heads}, NULL, NULL, NULL};
    if (status == KVB_OK) allocate_buffers(&e);
    for (size_t i = 0; i < record_context_count(r) && status == KVB_OK; i++) status = export_context(&e, i, err);
    if (status == KVB_OK) status = write_side_file(&e, err);
    status = atomic_folder_end(&folder, status, err);
    cJSON_Delete(e.contexts);
    free(e.ids);
    free(e.array);
    return status;
}

// ---- Reading ----

typedef struct step_question {
    uint32_t number;
    bool has_oracle, has_suffix, has_answer;
} step_question;

typedef struct step_context {
    char *id;
    char **metric_files; // [n_metrics]
    size_t n_metrics;
    step_question *questions; // [n_questions]
    size_t n_questions;
    const cJSON *side; // its entry in the side file, or NULL
} step_context;

// An import under way.
typedef struct importer {
    const char *dir;
    const lukv_steps_options *options;
    cJSON *side; // the side file, or NULL
    step_context *contexts;
    size_t n;
    record_shape shape;
} importer;

// Room for one more element behind `n`, at powers of two.
static void *grown(void *array, size_t n, size_t element_size)
{
    return n & (n - 1) ? array : need_more(array, n ? 2 * n : 1, element_size, "names in a folder");
}

// ---- Reading: which files there are ----

static step_question *find_question(step_context *c, uint32_t number)
{
    for (size_t i = 0; i < c->n_questions; i++) {
        if (c->questions[i].number == number) return &c->questions[i];
    }
    c->questions = grown(c->questions, c->n_questions, sizeof *c->questions);
    step_question *q = &c->questions[c->n_questions++];
    *q = (step_question){.number = number};
    return q;
}

static void add_file(step_context *c, const char *file)
{
    uint32_t number = 0;
    lukv_kind kind = lukv_classify(file, &number);
    if (kind == LUKV_METRIC) {
        c->metric_files = grown(c->metric_files, c->n_metrics, sizeof *c->metric_files);
        c->metric_files[c->n_metrics++] = need_text("%s", file);
    }
    if (kind == LUKV_METRIC || kind == LUKV_OTHER || kind == LUKV_TOKENS) return;
    step_question *q = find_question(c, number);
    q->has_oracle |= kind == LUKV_ORACLE;
    q->has_suffix |= kind == LUKV_SUFFIX;
    q->has_answer |= kind == LUKV_ANSWER;
}

static kvb_status scan_context(importer *in, step_context *c, kvb_error *err)
{
    char *path = lukv_path(in->dir, c->id, "%s", "");
    DIR *dir = opendir(path);
    int why = errno;
    free(path);
    if (!dir) return kvb_fail(err, KVB_IO, "%s/context_%s: cannot read the folder: %s", in->dir, c->id, strerror(why));
    for (struct dirent *e; (e = readdir(dir));) add_file(c, e->d_name);
    (void)closedir(dir); // only read
    return KVB_OK;
}

static int compare_questions(const void *a, const void *b)
{
    const step_question *x = a, *y = b;
    return (x->number > y->number) - (x->number < y->number);
}

static int compare_files(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

// context_2 before context_10.
static int compare_contexts(const void *a, const void *b)
{
    const step_context *x = a, *y = b;
    return strverscmp(x->id, y->id);
}

static kvb_status scan_folder(importer *in, kvb_error *err)
{
    DIR *dir = opendir(in->dir);
    if (!dir) return kvb_fail(err, KVB_IO, "%s: cannot read the folder: %s", in->dir, strerror(errno));
    kvb_status status = KVB_OK;
    for (struct dirent *e; status == KVB_OK && (e = readdir(dir));) {
        if (strncmp(e->d_name, "context_", 8) != 0) continue;
        if (!context_id_valid(e->d_name + 8)) {
            status = kvb_fail(err, KVB_FORMAT, "%s/%.100s: expected an id of " CONTEXT_ID_RULE " after context_",
                              in->dir, e->d_name);
        } else {
            in->contexts = grown(in->contexts, in->n, sizeof *in->contexts);
            step_context *c = &in->contexts[in->n++];
            *c = (step_context){.id = need_text("%s", e->d_name + 8)};
            status = scan_context(in, c, err);
        }
    }
    (void)closedir(dir); // only read
    if (status == KVB_OK && in->n == 0)
        status = kvb_fail(err, KVB_FORMAT, "%s: holds no folder context_<id>; expected the lukv-steps layout", in->dir);
    if (status == KVB_OK) qsort(in->contexts, in->n, sizeof *in->contexts, compare_contexts);
    for (size_t i = 0; i < in->n && status == KVB_OK; i++) { // readdir's order is no order
        step_context *c = &in->contexts[i];
        if (c->n_questions) qsort(c->questions, c->n_questions, sizeof *c->questions, compare_questions);
        if (c->n_metrics) qsort(c->metric_files, c->n_metrics, sizeof *c->metric_files, compare_files);
    }
    return status;
}

// ---- Reading: the side file ----

static kvb_status bad_side_file(const importer *in, const char *what, kvb_error *err)
{
    return kvb_fail(err, KVB_FORMAT, "%s/" LUKV_SIDE_FILE ": %s; remove the file to import the arrays alone", in->dir,
                    what);
}

static const cJSON *side_entry(const cJSON *list, const char *key, const char *text, double number)
{
    const cJSON *entry;
    cJSON_ArrayForEach(entry, list)
    {
        const cJSON *value = cJSON_GetObjectItemCaseSensitive(entry, key);
        if (text ? cJSON_IsString(value) && strcmp(value->valuestring, text) == 0
                 : cJSON_IsNumber(value) && value->valuedouble == number)
            return entry;
    }
    return NULL;
}

static kvb_status find_optional(bool *found, const char *path, kvb_error *err)
{
    *found = access(path, F_OK) == 0;
    if (*found || errno == ENOENT) return KVB_OK;
    return kvb_fail(err, KVB_IO, "%s: cannot open: %s", path, strerror(errno));
}

static kvb_status load_side_file(importer *in, kvb_error *err)
{
    char *path = need_text("%s/" LUKV_SIDE_FILE, in->dir);
    file_view view = {0};
    bool found, no_memory;
    kvb_status status = find_optional(&found, path, err);
    if (status == KVB_OK && found) status = file_map(&view, path, err);
    if (status == KVB_OK && found) {
        in->side = kvb_json_parse((const char *)view.data, view.size, NULL, &no_memory);
        status = file_check(&view, path, err);
        file_unmap(&view);
    }
    free(path);
    if (!found || status != KVB_OK) return status;
    if (no_memory) return kvb_fail(err, KVB_MEMORY, "%s/" LUKV_SIDE_FILE ": not enough memory", in->dir);
    const cJSON *format = cJSON_GetObjectItemCaseSensitive(in->side, "format");
    const cJSON *version = cJSON_GetObjectItemCaseSensitive(in->side, "format_version");
    if (!cJSON_IsString(format) || strcmp(format->valuestring, LUKV_SIDE_FORMAT) != 0)
        return bad_side_file(in, "expected JSON with format = \"" LUKV_SIDE_FORMAT "\"", err);
    if (!cJSON_IsNumber(version) || version->valuedouble != 1)
        return kvb_fail(err, KVB_VERSION, "%s/" LUKV_SIDE_FILE ": expected format_version 1; use a newer kvbudget",
                        in->dir);
    return KVB_OK;
}

// Contexts in the order of the side file, and the questions that it knows of and that have left no file.
static kvb_status apply_side_file(importer *in, kvb_error *err)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(in->side, "contexts"), *entry, *question;
    size_t placed = 0;
    cJSON_ArrayForEach(entry, list)
    {
        const cJSON *id = cJSON_GetObjectItemCaseSensitive(entry, "id");
        size_t i = placed;
        while (i < in->n && !(cJSON_IsString(id) && strcmp(in->contexts[i].id, id->valuestring) == 0)) i++;
        if (i == in->n) return bad_side_file(in, "names a context that has no folder", err);
        step_context c = in->contexts[i];
        memmove(&in->contexts[placed + 1], &in->contexts[placed], (i - placed) * sizeof c);
        c.side = entry;
        in->contexts[placed] = c;
        cJSON_ArrayForEach(question, cJSON_GetObjectItemCaseSensitive(entry, "questions"))
        {
            const cJSON *number = cJSON_GetObjectItemCaseSensitive(question, "number");
            if (!cJSON_IsNumber(number) || !(number->valuedouble >= 0 && number->valuedouble <= UINT32_MAX))
                return bad_side_file(in, "a question has no number", err);
            (void)find_question(&in->contexts[placed], (uint32_t)number->valuedouble);
        }
        step_context *c_placed = &in->contexts[placed++];
        if (c_placed->n_questions)
            qsort(c_placed->questions, c_placed->n_questions, sizeof *c_placed->questions, compare_questions);
    }
    if (placed < in->n) return bad_side_file(in, "does not name every context that has a folder", err);
    return KVB_OK;
}

static kvb_status scan_all(importer *in, kvb_error *err)
{
    kvb_status status = scan_folder(in, err);
    if (status == KVB_OK) status = load_side_file(in, err);
    return status == KVB_OK && in->side ? apply_side_file(in, err) : status;
}

static void scan_free(importer *in)
{
    for (size_t i = 0; i < in->n; i++) {
        for (size_t m = 0; m < in->contexts[i].n_metrics; m++) free(in->contexts[i].metric_files[m]);
        free(in->contexts[i].metric_files);
        free(in->contexts[i].questions);
        free(in->contexts[i].id);
    }
    free(in->contexts);
    cJSON_Delete(in->side);
}

// What the published protocol records at most: 64 new tokens, the first of which comes out of the prefill
// (methods.md 2.2).
enum { PUBLISHED_QUERIES = 63 };

// ---- Arrays ----

// A file of the directory, mapped; `values` points into it where that is possible, else to a converted copy.
typedef struct step_array {
    file_view view;
    npy_array npy;
    const void *values;
    void *copy;
} step_array;

static void release_array(step_array *a)
{
    free(a->copy);
    file_unmap(&a->view);
}

static kvb_status load_npy(step_array *a, const char *path, npy_type type, kvb_error *err)
{
    memset(a, 0, sizeof *a);
    kvb_status status = file_map(&a->view, path, err);
    if (status == KVB_OK) status = npy_parse(&a->npy, a->view.data, a->view.size, path, err);
    if (status != KVB_OK) return status;
    a->values = a->npy.data;
    if (a->npy.type == type && (uintptr_t)a->npy.data % npy_type_size(type) == 0) return KVB_OK;
    a->copy = need(a->npy.count, npy_type_size(type), "elements of an array"); // they lie in the file
    a->values = a->copy;
    return type == NPY_F32 ? npy_to_f32(&a->npy, a->copy, path, err) : npy_to_i32(&a->npy, a->copy, path, err);
}

// What was read is what the file holds: asked after the last use of an array, with the name that it has in its context.
static kvb_status check_array(const importer *in, const step_array *a, const step_context *c, const char *file,
                              kvb_error *err)
{
    char *path = lukv_path(in->dir, c->id, "%s", file);
    kvb_status status = file_check(&a->view, path, err);
    free(path);
    return status;
}

static kvb_status check_numbered(const importer *in, const step_array *a, const step_context *c, const char *what,
                                 uint32_t number, kvb_error *err)
{
    char file[64];
    snprintf(file, sizeof file, "%s_%u.npy", what, number);
    return check_array(in, a, c, file, err);
}

// A float array [L,G,T]. The first of all fixes L and G, the first of a context T (given as 0).
static kvb_status load_array(importer *in, step_array *a, const char *path, uint32_t *n_tokens, kvb_error *err)
{
    kvb_status status = load_npy(a, path, NPY_F32, err);
    if (status != KVB_OK) return status;
    const uint64_t *s = a->npy.shape;
    if (a->npy.n_dims != 3 || s[0] == 0 || s[1] == 0 || s[2] == 0 || s[0] > UINT32_MAX || s[1] > UINT32_MAX ||
        s[2] > UINT32_MAX)
        return kvb_fail(err, KVB_FORMAT, "%s: expected an array [layers, KV heads, tokens]", path);
    if (in->shape.n_layers == 0) {
        in->shape.n_layers = (uint32_t)s[0];
        in->shape.n_kv_heads = (uint32_t)s[1];
    }
    if (*n_tokens == 0) *n_tokens = (uint32_t)s[2];
    if (s[0] != in->shape.n_layers || s[1] != in->shape.n_kv_heads || s[2] != *n_tokens)
        return kvb_fail(err, KVB_MISMATCH, "%s: expected shape [%u,%u,%u] as before, found [%llu,%llu,%llu]", path,
                        in->shape.n_layers, in->shape.n_kv_heads, *n_tokens, (unsigned long long)s[0],
                        (unsigned long long)s[1], (unsigned long long)s[2]);
    return KVB_OK;
}

static kvb_status load_ids(step_array *a, const char *path, kvb_error *err)
{
    kvb_status status = load_npy(a, path, NPY_I32, err);
    if (status == KVB_OK && (a->npy.n_dims != 1 || a->npy.count > UINT32_MAX))
        status = kvb_fail(err, KVB_FORMAT, "%s: expected one dimension of token ids", path);
    return status;
}

// ---- One context ----

// The arrays of a context's metrics, mapped; names and pointers as record_put_context takes them. Each [c->n_metrics].
typedef struct step_scores {
    step_array *arrays;
    const float **scores;
    char (*names)[METRIC_NAME_MAX + 1];
    const char **name_list;
} step_scores;

static void release_scores(step_scores *s, size_t n)
{
    for (size_t m = 0; m < n; m++) release_array(&s->arrays[m]);
    free(s->name_list);
    free(s->names);
    free(s->scores);
    free(s->arrays);
}

static kvb_status load_scores(step_scores *s, importer *in, const step_context *c, uint32_t *n_tokens, kvb_error *err)
{
    size_t n = c->n_metrics;
    *s =
        (step_scores){need(n, sizeof *s->arrays, "arrays"), need(n, sizeof *s->scores, "arrays"),
                      need(n, sizeof *s->names, "names of metrics"), need(n, sizeof *s->name_list, "names of metrics")};
    kvb_status status = KVB_OK;
    const cJSON *known = cJSON_GetObjectItemCaseSensitive(c->side, "metrics");
    for (size_t m = 0; m < n && status == KVB_OK; m++) {
        const cJSON *name = cJSON_GetObjectItemCaseSensitive(known, c->metric_files[m]);
        if (cJSON_IsString(name)) snprintf(s->names[m], sizeof s->names[m], "%s", name->valuestring);
        else lukv_metric_name(s->names[m], sizeof s->names[m], c->metric_files[m]);
        s->name_list[m] = s->names[m];
        char *path = lukv_path(in->dir, c->id, "%s", c->metric_files[m]);
        status = load_array(in, &s->arrays[m], path, n_tokens, err);
        s->scores[m] = s->arrays[m].values;
        free(path);
    }
    return status;
}

// What a stopped import has put must be what the folder holds now: nobody says that it was left alone meanwhile.
static kvb_status put_scores(importer *in, record_writer *w, const step_context *c, const int32_t *ids, uint32_t n_ids,
                             uint32_t *n_tokens, kvb_error *err)
{
    step_scores s;
    int32_t *unknown = NULL;
    kvb_status status = load_scores(&s, in, c, n_tokens, err);
    if (status == KVB_OK && ids && n_ids != *n_tokens)
        status = kvb_fail(err, KVB_MISMATCH, "%s/context_%s/context_ids.npy: %u ids for arrays of %u tokens", in->dir,
                          c->id, n_ids, *n_tokens);
    if (status == KVB_OK && !ids) {
        unknown = need(*n_tokens, sizeof *unknown, "token ids");
        for (uint32_t t = 0; t < *n_tokens && unknown; t++) unknown[t] = -1;
        ids = unknown;
    }
    if (status == KVB_OK)
        status = record_writer_has_context(w, c->id)
                     ? record_same_context(w, c->id, ids, *n_tokens, s.name_list, s.scores, c->n_metrics, err)
                     : record_put_context(w, c->id, ids, *n_tokens, s.name_list, s.scores, c->n_metrics, err);
    for (size_t m = 0; m < c->n_metrics && status == KVB_OK; m++)
        status = check_array(in, &s.arrays[m], c, c->metric_files[m], err);
    release_scores(&s, c->n_metrics);
    free(unknown);
    return status;
}

// The side file knows; else the answer tells, whose first token comes out of the prefill; else the options.
static uint32_t count_queries(const importer *in, const step_context *c, const step_question *q, uint32_t n_answer)
{
    const cJSON *entry =
        side_entry(cJSON_GetObjectItemCaseSensitive(c->side, "questions"), "number", NULL, (double)q->number);
    const cJSON *n = cJSON_GetObjectItemCaseSensitive(entry, "n_queries");
    if (cJSON_IsNumber(n) && n->valuedouble >= 0 && n->valuedouble <= UINT32_MAX) return (uint32_t)n->valuedouble;
    if (!q->has_oracle) return 0;
    if (q->has_answer) return n_answer > 1 ? n_answer - 1 : 1;
    return in->options->n_queries ? in->options->n_queries : PUBLISHED_QUERIES;
}

static kvb_status load_numbered(const importer *in, step_array *a, const step_context *c, const char *what,
                                uint32_t number, kvb_error *err)
{
    char *path = lukv_path(in->dir, c->id, "%s_%u.npy", what, number);
    kvb_status status = load_ids(a, path, err);
    free(path);
    return status;
}

static kvb_status put_question(importer *in, record_writer *w, const step_context *c, const step_question *q,
                               uint32_t *n_tokens, kvb_error *err)
{
    step_array oracle = {0}, suffix = {0}, answer = {0};
    kvb_status status = KVB_OK;
    if (q->has_suffix) status = load_numbered(in, &suffix, c, "suffix_ids", q->number, err);
    if (status == KVB_OK && q->has_answer) status = load_numbered(in, &answer, c, "answer_ids", q->number, err);
    if (status == KVB_OK && q->has_oracle) {
        char *path = lukv_path(in->dir, c->id, "question_%u.npy", q->number);
        status = load_array(in, &oracle, path, n_tokens, err);
        free(path);
    }
    if (status == KVB_OK) {
        record_question one = {oracle.values,
                               suffix.values,
                               (uint32_t)suffix.npy.count,
                               answer.values,
                               (uint32_t)answer.npy.count,
                               count_queries(in, c, q, (uint32_t)answer.npy.count)};
        status = record_writer_has_question(w, c->id, q->number) ? record_same_question(w, c->id, q->number, &one, err)
                                                                 : record_put_question(w, c->id, q->number, &one, err);
    }
    if (status == KVB_OK) status = check_numbered(in, &oracle, c, "question", q->number, err);
    if (status == KVB_OK) status = check_numbered(in, &suffix, c, "suffix_ids", q->number, err);
    if (status == KVB_OK) status = check_numbered(in, &answer, c, "answer_ids", q->number, err);
    release_array(&oracle);
    release_array(&suffix);
    release_array(&answer);
    return status;
}

static kvb_status put_context(importer *in, record_writer *w, const step_context *c, kvb_error *err)
{
    uint32_t n_tokens = 0, n_ids = 0;
    step_array ids = {0};
    bool has_ids = false;
    char *path = lukv_path(in->dir, c->id, "context_ids.npy");
    kvb_status status = find_optional(&has_ids, path, err);
    if (status == KVB_OK && has_ids) {
        status = load_ids(&ids, path, err);
        n_ids = (uint32_t)ids.npy.count;
        n_tokens = n_ids;
    }
    free(path);
    if (status == KVB_OK) status = put_scores(in, w, c, ids.values, n_ids, &n_tokens, err);
    for (size_t i = 0; i < c->n_questions && status == KVB_OK; i++)
        status = put_question(in, w, c, &c->questions[i], &n_tokens, err);
    if (status == KVB_OK) status = check_array(in, &ids, c, "context_ids.npy", err);
    release_array(&ids);
    return status;
}

// ---- The whole ----

// L and G come from the first array there is.
static kvb_status find_shape(importer *in, kvb_error *err)
{
    const lukv_steps_options *o = in->options;
    const cJSON *n_heads = cJSON_GetObjectItemCaseSensitive(in->side, "n_heads");
    const cJSON *head_dim = cJSON_GetObjectItemCaseSensitive(in->side, "head_dim");
    for (size_t i = 0; i < in->n && in->shape.n_layers == 0; i++) {
        const step_context *c = &in->contexts[i];
        uint32_t n_tokens = 0;
        step_array a;
        char *path = NULL;
        if (c->n_metrics) path = lukv_path(in->dir, c->id, "%s", c->metric_files[0]);
        else if (c->n_questions) path = lukv_path(in->dir, c->id, "question_%u.npy", c->questions[0].number);
        if (!path) continue;
        kvb_status status = load_array(in, &a, path, &n_tokens, err);
        release_array(&a);
        free(path);
        if (status != KVB_OK) return status;
    }
    if (in->shape.n_layers == 0) return kvb_fail(err, KVB_FORMAT, "%s: holds no array", in->dir);
    in->shape.n_heads = cJSON_IsNumber(n_heads) && n_heads->valueint > 0 ? (uint32_t)n_heads->valueint : 0;
    in->shape.head_dim = cJSON_IsNumber(head_dim) && head_dim->valueint > 0 ? (uint32_t)head_dim->valueint : 0;
    if (o->n_heads) in->shape.n_heads = o->n_heads;
    if (o->head_dim) in->shape.head_dim = o->head_dim;
    return KVB_OK;
}

static bool set_attribute(cJSON *into, const char *name, cJSON *value)
{
    cJSON_DeleteItemFromObjectCaseSensitive(into, name);
    return value && cJSON_AddItemToObject(into, name, value);
}

// What the arrays do not tell: which tokens each metric's solver keeps in any case. The attribute `metrics` as a
// profile writes it, {"snapkv:lukv": {"protect_sink": 4, "protect_window": 32}, ...} as text.
static bool add_protected(cJSON *into, const importer *in)
{
    char metric[METRIC_NAME_MAX + 1];
    uint32_t sink, window;
    cJSON *all = cJSON_CreateObject();
    bool ok = all != NULL;
    for (size_t i = 0; i < in->n && ok; i++) {
        for (size_t m = 0; m < in->contexts[i].n_metrics && ok; m++) {
            lukv_metric_name(metric, sizeof metric, in->contexts[i].metric_files[m]);
            if (cJSON_HasObjectItem(all, metric)) continue;
            cJSON *one = cJSON_AddObjectToObject(all, metric);
            lukv_metric_protected(metric, &sink, &window);
            ok = one && cJSON_AddNumberToObject(one, "protect_sink", sink) &&
                 cJSON_AddNumberToObject(one, "protect_window", window);
        }
    }
    char *text = ok ? cJSON_PrintUnformatted(all) : NULL;
    ok = text && set_attribute(into, "metrics", cJSON_CreateString(text));
    cJSON_free(text);
    cJSON_Delete(all);
    return ok;
}

// Those of the side file, or a word on where the numbers come from; then what the caller adds.
static cJSON *make_attributes(const importer *in)
{
    const cJSON *held = cJSON_GetObjectItemCaseSensitive(in->side, "attributes"), *a;
    cJSON *made = cJSON_IsObject(held) ? cJSON_Duplicate(held, 1) : cJSON_CreateObject();
    bool ok = made != NULL, assumed = false;
    for (size_t i = 0; i < in->n && !in->side; i++) {
        for (size_t q = 0; q < in->contexts[i].n_questions; q++)
            assumed = assumed || (in->contexts[i].questions[q].has_oracle && !in->contexts[i].questions[q].has_answer);
    }
    if (ok && !in->side) ok = set_attribute(made, "imported_from", cJSON_CreateString("lukv-steps"));
    if (ok && !in->side) ok = set_attribute(made, "n_queries_assumed", cJSON_CreateBool(assumed));
    if (ok && !in->side) ok = add_protected(made, in);
    cJSON_ArrayForEach(a, in->options->attributes)
    {
        if (ok) ok = set_attribute(made, a->string, cJSON_Duplicate(a, 1));
    }
    if (ok) return made;
    cJSON_Delete(made);
    return NULL;
}

static kvb_status write_record(importer *in, const char *record_path, kvb_error *err)
{
    record_writer *w = NULL;
    cJSON *attributes = make_attributes(in);
    const char **ids = need(in->n, sizeof *ids, "names of contexts");
    kvb_status status = attributes ? KVB_OK : kvb_fail(err, KVB_MEMORY, "%s: not enough memory", in->dir);
    if (status == KVB_OK) status = record_begin(&w, record_path, &in->shape, attributes, in->options->start, err);
    for (size_t i = 0; i < in->n && status == KVB_OK; i++) {
        ids[i] = in->contexts[i].id;
        status = put_context(in, w, &in->contexts[i], err);
    }
    if (status == KVB_OK) status = record_finish(w, ids, in->n, err);
    record_writer_free(w);
    free(ids);
    cJSON_Delete(attributes);
    return status;
}

kvb_status lukv_steps_import(const char *dir, const char *record_path, const lukv_steps_options *options,
                             kvb_error *err)
{
    const lukv_steps_options none = {0};
    importer in = {.dir = dir, .options = options ? options : &none};
    kvb_status status = scan_all(&in, err);
    if (status == KVB_OK) status = find_shape(&in, err);
    if (status == KVB_OK) status = write_record(&in, record_path, err);
    scan_free(&in);
    return status;
}
