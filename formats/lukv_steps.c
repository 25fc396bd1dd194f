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

// "snapkv:lukv" -> "snapkv.npy"; the name must be a valid metric name.
static void metric_file(char *out, size_t size, const char *metric)
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

// "snapkv.npy" -> "snapkv:lukv"; what metric_file() changes beyond the two published names cannot be undone.
static void metric_name(char *out, size_t size, const char *file)
{
    size_t n = strlen(file);
    snprintf(out, size, "%.*s", (int)(n > 4 ? n - 4 : 0), file);
    for (int i = 0; i < N_PUBLISHED; i++) {
        if (strcmp(out, published[i].file) == 0) snprintf(out, size, "%s", published[i].metric);
    }
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

typedef enum file_role { ROLE_NONE, ROLE_METRIC, ROLE_TOKENS, ROLE_ORACLE, ROLE_SUFFIX, ROLE_ANSWER } file_role;

// Tells by its name what a file in a context's folder is. For the last three roles *question receives the number.
static file_role role_of(const char *file, uint32_t *question)
{
    size_t n = strlen(file);
    if (n <= 4 || strcmp(file + n - 4, ".npy") != 0) return ROLE_NONE;
    if (strcmp(file, "context_ids.npy") == 0) return ROLE_TOKENS;
    if (numbered(file, "question_", question)) return ROLE_ORACLE;
    if (numbered(file, "suffix_ids_", question)) return ROLE_SUFFIX;
    if (numbered(file, "answer_ids_", question)) return ROLE_ANSWER;
    return ROLE_METRIC;
}

// DIR/context_<id>/<file>, formatted as printf does.
static char *path_of(const char *dir, const char *id, const char *format, ...) __attribute__((format(printf, 3, 4)));
static char *path_of(const char *dir, const char *id, const char *format, ...)
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

// Writes an array or a list, and frees the path. An empty list leaves no file.
static kvb_status write_and_free(char *path, npy_type type, uint32_t n_dims, const uint64_t *shape, const void *data,
                                 kvb_error *err)
{
    kvb_status status = shape[0] > 0 ? npy_write(path, type, n_dims, shape, data, err) : KVB_OK;
    free(path);
    return status;
}

static kvb_status export_array(const exporter *e, char *path, uint32_t n_tokens, kvb_error *err)
{
    return write_and_free(path, NPY_F32, 3, (uint64_t[]){e->dims[0], e->dims[1], n_tokens}, e->array, err);
}

static kvb_status export_ids(const exporter *e, char *path, uint32_t n, kvb_error *err)
{
    return write_and_free(path, NPY_I32, 1, (uint64_t[]){n}, e->ids, err);
}

static kvb_status export_scores(exporter *e, size_t i, const record_context_info *c, cJSON *files, kvb_error *err)
{
    for (uint32_t m = 0; m < c->n_metrics; m++) {
        char file[METRIC_NAME_MAX + 8];
        uint32_t ignored;
        metric_file(file, sizeof file, c->metrics[m]);
        if (role_of(file, &ignored) != ROLE_METRIC || cJSON_GetObjectItemCaseSensitive(files, file))
            return kvb_fail(err, KVB_UNSUPPORTED, "%s: metric %s cannot be exported: %s is taken by something else",
                            e->dir, c->metrics[m], file);
        kvb_status status = record_read_scores(e->r, i, c->metrics[m], e->array, err);
        if (status == KVB_OK) status = export_array(e, path_of(e->dir, c->id, "%s", file), c->n_tokens, err);
        if (status != KVB_OK) return status;
        cJSON_AddStringToObject(files, file, c->metrics[m]);
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
            status = export_array(e, path_of(e->dir, c->id, "question_%u.npy", q->number), c->n_tokens, err);
    }
    if (status == KVB_OK) status = record_read_suffix(e->r, i, index, e->ids, err);
    if (status == KVB_OK)
        status = export_ids(e, path_of(e->dir, c->id, "suffix_ids_%u.npy", q->number), q->n_suffix, err);
    if (status == KVB_OK) status = record_read_answer(e->r, i, index, e->ids, err);
    if (status == KVB_OK)
        status = export_ids(e, path_of(e->dir, c->id, "answer_ids_%u.npy", q->number), q->n_answer, err);
    if (status != KVB_OK) return status;
    cJSON *entry = cJSON_CreateObject();
    cJSON_AddItemToArray(list, entry);
    json_put(entry, "number %u n_queries %u", q->number, q->n_queries);
    return KVB_OK;
}

static kvb_status export_context(exporter *e, size_t i, kvb_error *err)
{
    const record_context_info *c = record_context(e->r, i);
    char *folder = path_of(e->dir, c->id, "%s", "");
    kvb_status status = KVB_OK;
    if (mkdir(folder, 0777) != 0)
        status = kvb_fail(err, KVB_IO, "%s/context_%s: cannot make the folder: %s", e->dir, c->id, strerror(errno));
    free(folder);
    cJSON *entry = cJSON_CreateObject();
    cJSON_AddItemToArray(e->contexts, entry);
    cJSON_AddStringToObject(entry, "id", c->id);
    cJSON *files = cJSON_AddObjectToObject(entry, "metrics"), *questions = cJSON_AddArrayToObject(entry, "questions");
    if (status == KVB_OK) status = record_read_tokens(e->r, i, e->ids, err);
    if (status == KVB_OK) status = export_ids(e, path_of(e->dir, c->id, "context_ids.npy"), c->n_tokens, err);
    if (status == KVB_OK) status = export_scores(e, i, c, files, err);
    for (uint32_t q = 0; q < c->n_questions && status == KVB_OK; q++)
        status = export_question(e, i, c, q, questions, err);
    return status;
}

static kvb_status write_side_file(exporter *e, kvb_error *err)
{
    record_shape s = record_get_shape(e->r);
    cJSON *side = cJSON_CreateObject();
    json_put(side, "format %s format_version %u n_heads %u head_dim %u", LUKV_SIDE_FORMAT, 1, s.n_heads, s.head_dim);
    cJSON *attributes = cJSON_AddObjectToObject(side, "attributes");
    const cJSON *a;
    cJSON_ArrayForEach(a, record_attributes(e->r))
    {
        // cJSON rounds numbers to 15 digits when it thinks that this does not matter; here it does.
        cJSON_AddItemToObject(attributes, a->string,
                              cJSON_IsNumber(a) ? json_exact(a->valuedouble) : cJSON_Duplicate(a, 1));
    }
    cJSON_AddItemReferenceToObject(side, "contexts", e->contexts);
    char *path = need_text("%s/" LUKV_SIDE_FILE, e->dir);
    kvb_status status = json_write(path, side, err);
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
    free_all(e.ids, e.array);
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
    bool has_ids;
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

// Makes room for one more element after n; grows at powers of two.
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
    file_role role = role_of(file, &number);
    c->has_ids |= role == ROLE_TOKENS;
    if (role == ROLE_METRIC) {
        c->metric_files = grown(c->metric_files, c->n_metrics, sizeof *c->metric_files);
        c->metric_files[c->n_metrics++] = need_text("%s", file);
    }
    if (role < ROLE_ORACLE) return;
    step_question *q = find_question(c, number);
    q->has_oracle |= role == ROLE_ORACLE;
    q->has_suffix |= role == ROLE_SUFFIX;
    q->has_answer |= role == ROLE_ANSWER;
}

static int compare_questions(const void *a, const void *b)
{
    const step_question *x = a, *y = b;
    return (x->number > y->number) - (x->number < y->number);
}

static kvb_status scan_context(importer *in, const char *id, kvb_error *err)
{
    if (!context_id_valid(id))
        return kvb_fail(err, KVB_FORMAT, "%s/context_%.100s: expected an id of " CONTEXT_ID_RULE, in->dir, id);
    in->contexts = grown(in->contexts, in->n, sizeof *in->contexts);
    step_context *c = &in->contexts[in->n++];
    *c = (step_context){.id = need_text("%s", id)};
    char *path = path_of(in->dir, id, "%s", "");
    struct dirent **files = NULL;
    int n = scandir(path, &files, NULL, alphasort), why = errno;
    free(path);
    if (n < 0) return kvb_fail(err, KVB_IO, "%s/context_%s: cannot read the folder: %s", in->dir, id, strerror(why));
    for (int i = 0; i < n; i++) {
        add_file(c, files[i]->d_name);
        free(files[i]);
    }
    free(files);
    if (c->n_questions) qsort(c->questions, c->n_questions, sizeof *c->questions, compare_questions);
    return KVB_OK;
}

static int is_context(const struct dirent *e)
{
    return strncmp(e->d_name, "context_", 8) == 0;
}

static kvb_status scan_folder(importer *in, kvb_error *err)
{
    struct dirent **folders = NULL;
    int n = scandir(in->dir, &folders, is_context, versionsort); // context_2 before context_10
    if (n < 0) return kvb_fail(err, KVB_IO, "%s: cannot read the folder: %s", in->dir, strerror(errno));
    kvb_status status = KVB_OK;
    for (int i = 0; i < n; i++) {
        if (status == KVB_OK) status = scan_context(in, folders[i]->d_name + 8, err);
        free(folders[i]);
    }
    free(folders);
    if (n > 0) return status;
    return kvb_fail(err, KVB_FORMAT, "%s: holds no folder context_<id>; expected the lukv-steps layout", in->dir);
}

// ---- Reading: the side file ----

static kvb_status bad_side_file(const importer *in, const char *what, kvb_error *err)
{
    return kvb_fail(err, KVB_FORMAT, "%s/" LUKV_SIDE_FILE ": %s; remove the file to import the arrays alone", in->dir,
                    what);
}

static const cJSON *side_question(const cJSON *list, uint32_t number)
{
    const cJSON *entry;
    cJSON_ArrayForEach(entry, list)
    {
        const cJSON *value = cJSON_GetObjectItemCaseSensitive(entry, "number");
        if (cJSON_IsNumber(value) && value->valuedouble == number) return entry;
    }
    return NULL;
}

static kvb_status load_side_file(importer *in, kvb_error *err)
{
    char *path = need_text("%s/" LUKV_SIDE_FILE, in->dir);
    file_view view = {0};
    bool found = access(path, F_OK) == 0 || errno != ENOENT;
    kvb_status status = found ? file_map(&view, path, err) : KVB_OK;
    if (status == KVB_OK && found) {
        in->side = kvb_json_parse((const char *)view.data, view.size, NULL, NULL);
        status = file_check(&view, path, err);
        file_unmap(&view);
    }
    free(path);
    if (!found || status != KVB_OK) return status;
    const cJSON *format = cJSON_GetObjectItemCaseSensitive(in->side, "format");
    const cJSON *version = cJSON_GetObjectItemCaseSensitive(in->side, "format_version");
    if (!cJSON_IsString(format) || strcmp(format->valuestring, LUKV_SIDE_FORMAT) != 0)
        return bad_side_file(in, "expected JSON with format = \"" LUKV_SIDE_FORMAT "\"", err);
    if (!cJSON_IsNumber(version) || version->valuedouble != 1)
        return kvb_fail(err, KVB_VERSION, "%s/" LUKV_SIDE_FILE ": expected format_version 1; use a newer kvbudget",
                        in->dir);
    return KVB_OK;
}

// Puts contexts into the order of the side file, and adds the questions that have no file of their own.
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

static void scan_free(importer *in)
{
    for (size_t i = 0; i < in->n; i++) {
        for (size_t m = 0; m < in->contexts[i].n_metrics; m++) free(in->contexts[i].metric_files[m]);
        free_all(in->contexts[i].metric_files, in->contexts[i].questions, in->contexts[i].id);
    }
    free(in->contexts);
    cJSON_Delete(in->side);
}

// What the published protocol records at most: 64 new tokens, the first of which comes out of the prefill (methods.md
// 2.2).
enum { PUBLISHED_QUERIES = 63 };

// ---- Arrays ----

// Loads a whole array, as floats or as 32-bit integers. The caller frees *values, even after a failure.
static kvb_status load_npy(void **values, npy_array *a, const char *path, npy_type type, kvb_error *err)
{
    file_view view;
    *a = (npy_array){0};
    *values = NULL;
    kvb_status status = file_map(&view, path, err);
    if (status == KVB_OK) status = npy_parse(a, view.data, view.size, path, err);
    if (status == KVB_OK) {
        *values = need(a->count, npy_type_size(type), "elements of an array"); // they lie in the file
        status = type == NPY_F32 ? npy_to_f32(a, *values, path, err) : npy_to_i32(a, *values, path, err);
    }
    if (status == KVB_OK) status = file_check(&view, path, err);
    file_unmap(&view);
    return status;
}

// Reads a float array [L,G,T] and frees the path. The first array of all sets L and G, the first of a context sets T (0
// until then).
static kvb_status load_array(importer *in, float **out, char *path, uint32_t *n_tokens, kvb_error *err)
{
    npy_array a;
    void *values;
    kvb_status status = load_npy(&values, &a, path, NPY_F32, err);
    const uint64_t *s = a.shape;
    *out = values;
    if (status == KVB_OK && (a.n_dims != 3 || s[0] == 0 || s[1] == 0 || s[2] == 0 || s[0] > UINT32_MAX ||
                             s[1] > UINT32_MAX || s[2] > UINT32_MAX))
        status = kvb_fail(err, KVB_FORMAT, "%s: expected an array [layers, KV heads, tokens]", path);
    if (status == KVB_OK && in->shape.n_layers == 0) {
        in->shape.n_layers = (uint32_t)s[0];
        in->shape.n_kv_heads = (uint32_t)s[1];
    }
    if (status == KVB_OK && *n_tokens == 0) *n_tokens = (uint32_t)s[2];
    if (status == KVB_OK && (s[0] != in->shape.n_layers || s[1] != in->shape.n_kv_heads || s[2] != *n_tokens))
        status = kvb_fail(err, KVB_MISMATCH, "%s: expected shape [%u,%u,%u] as before, found [%llu,%llu,%llu]", path,
                          in->shape.n_layers, in->shape.n_kv_heads, *n_tokens, (unsigned long long)s[0],
                          (unsigned long long)s[1], (unsigned long long)s[2]);
    free(path);
    return status;
}

// Reads token ids, if the file exists; frees the path.
static kvb_status load_ids(int32_t **out, uint32_t *n, bool there, char *path, kvb_error *err)
{
    npy_array a = {0};
    void *values = NULL;
    kvb_status status = there ? load_npy(&values, &a, path, NPY_I32, err) : KVB_OK;
    if (status == KVB_OK && there && (a.n_dims != 1 || a.count > UINT32_MAX))
        status = kvb_fail(err, KVB_FORMAT, "%s: expected one dimension of token ids", path);
    *out = values;
    *n = (uint32_t)a.count;
    free(path);
    return status;
}

// ---- One context ----

// Names and arrays as record_put_context takes them.
static kvb_status put_scores(importer *in, record_writer *w, const step_context *c, const int32_t *ids,
                             uint32_t *n_tokens, kvb_error *err)
{
    size_t n = c->n_metrics;
    float **scores = need(n, sizeof *scores, "arrays");
    char(*names)[METRIC_NAME_MAX + 1] = need(n, sizeof *names, "names of metrics");
    const char **list = need(n, sizeof *list, "names of metrics");
    kvb_status status = KVB_OK;
    const cJSON *known = cJSON_GetObjectItemCaseSensitive(c->side, "metrics");
    for (size_t m = 0; m < n && status == KVB_OK; m++) {
        const cJSON *name = cJSON_GetObjectItemCaseSensitive(known, c->metric_files[m]);
        if (cJSON_IsString(name)) snprintf(names[m], sizeof names[m], "%s", name->valuestring);
        else metric_name(names[m], sizeof names[m], c->metric_files[m]);
        list[m] = names[m];
        status = load_array(in, &scores[m], path_of(in->dir, c->id, "%s", c->metric_files[m]), n_tokens, err);
    }
    int32_t *unknown = need(*n_tokens, sizeof *unknown, "token ids");
    for (uint32_t t = 0; t < *n_tokens; t++) unknown[t] = -1;
    if (status == KVB_OK)
        status =
            record_put_context(w, c->id, ids ? ids : unknown, *n_tokens, list, (const float *const *)scores, n, err);
    for (size_t m = 0; m < n; m++) free(scores[m]);
    free_all(unknown, list, names, scores);
    return status;
}

// The queries: from the side file, the answer's length (its first token comes out of the prefill), or the options.
static uint32_t count_queries(const importer *in, const step_context *c, const step_question *q, uint32_t n_answer)
{
    const cJSON *entry = side_question(cJSON_GetObjectItemCaseSensitive(c->side, "questions"), q->number);
    const cJSON *n = cJSON_GetObjectItemCaseSensitive(entry, "n_queries");
    if (cJSON_IsNumber(n) && n->valuedouble >= 0 && n->valuedouble <= UINT32_MAX) return (uint32_t)n->valuedouble;
    if (!q->has_oracle) return 0;
    if (q->has_answer) return n_answer > 1 ? n_answer - 1 : 1;
    return in->options->n_queries ? in->options->n_queries : PUBLISHED_QUERIES;
}

static kvb_status put_question(importer *in, record_writer *w, const step_context *c, const step_question *q,
                               uint32_t *n_tokens, kvb_error *err)
{
    float *oracle = NULL;
    int32_t *suffix = NULL, *answer = NULL;
    record_question one = {0};
    kvb_status status =
        load_ids(&suffix, &one.n_suffix, q->has_suffix, path_of(in->dir, c->id, "suffix_ids_%u.npy", q->number), err);
    if (status == KVB_OK)
        status = load_ids(&answer, &one.n_answer, q->has_answer,
                          path_of(in->dir, c->id, "answer_ids_%u.npy", q->number), err);
    if (status == KVB_OK && q->has_oracle)
        status = load_array(in, &oracle, path_of(in->dir, c->id, "question_%u.npy", q->number), n_tokens, err);
    if (status == KVB_OK) {
        one.oracle = oracle;
        one.suffix_ids = suffix;
        one.answer_ids = answer;
        one.n_queries = count_queries(in, c, q, one.n_answer);
        status = record_put_question(w, c->id, q->number, &one, err);
    }
    free_all(oracle, suffix, answer);
    return status;
}

static kvb_status put_context(importer *in, record_writer *w, const step_context *c, kvb_error *err)
{
    int32_t *ids;
    uint32_t n_tokens;
    kvb_status status = load_ids(&ids, &n_tokens, c->has_ids, path_of(in->dir, c->id, "context_ids.npy"), err);
    if (status == KVB_OK) status = put_scores(in, w, c, ids, &n_tokens, err);
    for (size_t i = 0; i < c->n_questions && status == KVB_OK; i++)
        status = put_question(in, w, c, &c->questions[i], &n_tokens, err);
    free(ids);
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
        float *values;
        char *path = NULL;
        if (c->n_metrics) path = path_of(in->dir, c->id, "%s", c->metric_files[0]);
        else if (c->n_questions) path = path_of(in->dir, c->id, "question_%u.npy", c->questions[0].number);
        if (!path) continue;
        kvb_status status = load_array(in, &values, path, &n_tokens, err);
        free(values);
        if (status != KVB_OK) return status;
    }
    if (in->shape.n_layers == 0) return kvb_fail(err, KVB_FORMAT, "%s: holds no array", in->dir);
    in->shape.n_heads = cJSON_IsNumber(n_heads) && n_heads->valueint > 0 ? (uint32_t)n_heads->valueint : 0;
    in->shape.head_dim = cJSON_IsNumber(head_dim) && head_dim->valueint > 0 ? (uint32_t)head_dim->valueint : 0;
    if (o->n_heads) in->shape.n_heads = o->n_heads;
    if (o->head_dim) in->shape.head_dim = o->head_dim;
    return KVB_OK;
}

static void set_attribute(cJSON *into, const char *name, cJSON *value)
{
    cJSON_DeleteItemFromObjectCaseSensitive(into, name);
    cJSON_AddItemToObject(into, name, value);
}

// Adds which tokens each metric protects, which the arrays do not say: the attribute `metrics`, as a profile writes it,
// is the text
// {"snapkv:lukv": {"protect_sink": 4, "protect_window": 32}, ...}.
static void add_protected(cJSON *into, const importer *in)
{
    char metric[METRIC_NAME_MAX + 1];
    cJSON *all = cJSON_CreateObject();
    for (size_t i = 0; i < in->n; i++) {
        for (size_t m = 0; m < in->contexts[i].n_metrics; m++) {
            uint32_t sink = 4, window = 1;
            metric_name(metric, sizeof metric, in->contexts[i].metric_files[m]);
            if (cJSON_HasObjectItem(all, metric)) continue;
            if (in->options->protect) in->options->protect(metric, &sink, &window);
            cJSON *one = cJSON_AddObjectToObject(all, metric);
            json_put(one, "protect_sink %u protect_window %u", sink, window);
        }
    }
    char *text = cJSON_PrintUnformatted(all);
    set_attribute(into, "metrics", cJSON_CreateString(text));
    cJSON_free(text);
    cJSON_Delete(all);
}

// The attributes of the side file, or else a note on where the numbers come from; then those that the caller adds.
static cJSON *make_attributes(const importer *in)
{
    const cJSON *held = cJSON_GetObjectItemCaseSensitive(in->side, "attributes"), *a;
    cJSON *made = cJSON_IsObject(held) ? cJSON_Duplicate(held, 1) : cJSON_CreateObject();
    bool assumed = false;
    for (size_t i = 0; i < in->n; i++)
        for (size_t q = 0; q < in->contexts[i].n_questions; q++)
            assumed |= in->contexts[i].questions[q].has_oracle && !in->contexts[i].questions[q].has_answer;
    if (!in->side) {
        set_attribute(made, "imported_from", cJSON_CreateString("lukv-steps"));
        set_attribute(made, "n_queries_assumed", cJSON_CreateBool(assumed));
        add_protected(made, in);
    }
    cJSON_ArrayForEach(a, in->options->attributes)
    {
        set_attribute(made, a->string, cJSON_Duplicate(a, 1));
    }
    return made;
}

static kvb_status write_record(importer *in, const char *record_path, kvb_error *err)
{
    record_writer *w = NULL;
    cJSON *attributes = make_attributes(in);
    const char **ids = need(in->n, sizeof *ids, "names of contexts");
    kvb_status status = record_begin(&w, record_path, &in->shape, attributes, in->options->start, err);
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
    kvb_status status = scan_folder(&in, err);
    if (status == KVB_OK) status = load_side_file(&in, err);
    if (status == KVB_OK && in.side) status = apply_side_file(&in, err);
    if (status == KVB_OK) status = find_shape(&in, err);
    if (status == KVB_OK) status = write_record(&in, record_path, err);
    scan_free(&in);
    return status;
}
