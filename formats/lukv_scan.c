// Which files a lukv-steps directory holds, and what its side file says about them.
#include "lukv_scan.h"
#include "file_read.h"
#include "lukv_layout.h"
#include "names.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

kvb_status lukv_no_memory(const importer *in, kvb_error *err)
{
    return kvb_fail(err, KVB_MEMORY, "%s: not enough memory", in->dir);
}

// A growing array: room for one more element behind `n`. False when memory is short.
static bool grow(void *array, size_t n, size_t element_size)
{
    if (n & (n - 1)) return true; // full at powers of two only
    void *larger, *old;
    memcpy(&old, array, sizeof old);
    larger = reallocarray(old, n ? 2 * n : 1, element_size);
    if (larger) memcpy(array, &larger, sizeof larger);
    return larger != NULL;
}

// ---- Names ----

static step_question *find_question(step_context *c, uint32_t number)
{
    for (size_t i = 0; i < c->n_questions; i++) {
        if (c->questions[i].number == number) return &c->questions[i];
    }
    if (!grow(&c->questions, c->n_questions, sizeof *c->questions)) return NULL;
    step_question *q = &c->questions[c->n_questions++];
    *q = (step_question){.number = number};
    return q;
}

static bool add_file(step_context *c, const char *file)
{
    uint32_t number = 0;
    lukv_kind kind = lukv_classify(file, &number);
    if (kind == LUKV_METRIC) {
        if (!grow(&c->metric_files, c->n_metrics, sizeof *c->metric_files)) return false;
        c->metric_files[c->n_metrics] = strdup(file);
        return c->metric_files[c->n_metrics++] != NULL;
    }
    if (kind == LUKV_OTHER || kind == LUKV_TOKENS) return true;
    step_question *q = find_question(c, number);
    if (!q) return false;
    q->has_oracle |= kind == LUKV_ORACLE;
    q->has_suffix |= kind == LUKV_SUFFIX;
    q->has_answer |= kind == LUKV_ANSWER;
    return true;
}

static kvb_status scan_context(importer *in, step_context *c, kvb_error *err)
{
    char *path = lukv_path(in->dir, c->id, "%s", "");
    DIR *dir = path ? opendir(path) : NULL;
    kvb_status status = KVB_OK;
    if (!dir)
        status = kvb_fail(err, KVB_IO, "%s/context_%s: cannot read the folder: %s", in->dir, c->id, strerror(errno));
    for (struct dirent *e; dir && status == KVB_OK && (e = readdir(dir));) {
        if (!add_file(c, e->d_name)) status = lukv_no_memory(in, err);
    }
    if (dir) (void)closedir(dir); // only read
    free(path);
    return status;
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
        } else if (grow(&in->contexts, in->n, sizeof *in->contexts)) {
            step_context *c = &in->contexts[in->n++];
            *c = (step_context){.id = strdup(e->d_name + 8)};
            status = c->id ? scan_context(in, c, err) : lukv_no_memory(in, err);
        } else {
            status = lukv_no_memory(in, err);
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

// ---- The side file ----

static kvb_status bad_side_file(const importer *in, const char *what, kvb_error *err)
{
    return kvb_fail(err, KVB_FORMAT, "%s/" LUKV_SIDE_FILE ": %s; remove the file to import the arrays alone", in->dir,
                    what);
}

const cJSON *lukv_side_entry(const cJSON *list, const char *key, const char *text, double number)
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

kvb_status lukv_find_optional(bool *found, const char *path, kvb_error *err)
{
    *found = access(path, F_OK) == 0;
    if (*found || errno == ENOENT) return KVB_OK;
    return kvb_fail(err, KVB_IO, "%s: cannot open: %s", path, strerror(errno));
}

static kvb_status load_side_file(importer *in, kvb_error *err)
{
    char *path = NULL;
    if (asprintf(&path, "%s/" LUKV_SIDE_FILE, in->dir) < 0) return lukv_no_memory(in, err);
    file_view view = {0};
    bool found, no_memory;
    kvb_status status = lukv_find_optional(&found, path, err);
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
            if (!find_question(&in->contexts[placed], (uint32_t)number->valuedouble)) return lukv_no_memory(in, err);
        }
        step_context *c_placed = &in->contexts[placed++];
        if (c_placed->n_questions)
            qsort(c_placed->questions, c_placed->n_questions, sizeof *c_placed->questions, compare_questions);
    }
    if (placed < in->n) return bad_side_file(in, "does not name every context that has a folder", err);
    return KVB_OK;
}

kvb_status lukv_scan(importer *in, kvb_error *err)
{
    kvb_status status = scan_folder(in, err);
    if (status == KVB_OK) status = load_side_file(in, err);
    return status == KVB_OK && in->side ? apply_side_file(in, err) : status;
}

void lukv_scan_free(importer *in)
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
