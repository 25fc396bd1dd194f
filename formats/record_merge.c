// One record out of several files: the shards of a run that was shared out among processes which could not see each
// other, or whole records of one model.
#include "formats/need.h"
#include "formats/record_growth.h"
#include "formats/record_internal.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- Whole records ----

// Texts of different calibration files must not share a name, which would then mean two things.
static kvb_status check_apart(const record *a, const record *b, kvb_error *err)
{
    for (size_t i = 0; i < b->n; i++)
        if (record_find_context(a, b->contexts[i].id))
            return kvb_fail(err, KVB_MISMATCH,
                            "%s and %s both have context %s, and none of their calibration files is the same; give "
                            "one of the texts another sample_id",
                            a->path, b->path, b->contexts[i].id);
    return KVB_OK;
}

// Joins the next record's attributes to *attributes, those of the first `n_before` records.
static kvb_status join_next(cJSON **attributes, const record *const *inputs, size_t n_before, kvb_error *err)
{
    const record *first = inputs[0], *next = inputs[n_before];
    root_difference d;
    record_relation relation;
    if (record_root_differs(&d, &first->shape, NULL, &next->shape, NULL))
        return kvb_fail(err, KVB_MISMATCH, "%s and %s cannot be joined: %s is %s in the first, %s in the second",
                        first->path, next->path, d.name, d.held, d.given);
    cJSON *joined = NULL;
    kvb_status status = record_relate(&relation, first->path, *attributes, next->path, next->attributes, err);
    for (size_t i = 0; relation == RECORD_NEW_TEXTS && status == KVB_OK && i < n_before; i++)
        status = check_apart(inputs[i], next, err);
    if (status == KVB_OK)
        status = record_join_attributes(&joined, first->path, *attributes, next->path, next->attributes, relation, err);
    if (status != KVB_OK) return status;
    cJSON_Delete(*attributes);
    *attributes = joined;
    return KVB_OK;
}

// Joins the attributes of whole records of one model; the caller frees *attributes. Fails with KVB_MISMATCH if they
// have different models or options, or texts of one name from different calibration files.
static kvb_status join_records(cJSON **attributes, const record *const *inputs, size_t n, kvb_error *err)
{
    *attributes = cJSON_Duplicate(inputs[0]->attributes, true);
    kvb_status status = KVB_OK;
    for (size_t i = 1; i < n && status == KVB_OK; i++) status = join_next(attributes, inputs, i, err);
    if (status == KVB_OK) return KVB_OK;
    cJSON_Delete(*attributes);
    *attributes = NULL;
    return status;
}

// ---- Metrics ----

// Whether any of the records has scores of `metric` for context `id`.
static bool is_scored(const record *const *inputs, size_t n, const char *id, const char *metric)
{
    for (size_t i = 0; i < n; i++) {
        const record_context_info *c = record_find_context(inputs[i], id);
        if (c && record_has_metric(c, metric)) return true;
    }
    return false;
}

// Lists every metric that any context has, once. The caller frees the list; its names belong to the records.
static const char **list_metrics(size_t *n_list, const record *const *inputs, size_t n)
{
    const char **list = NULL;
    *n_list = 0;
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < inputs[i]->n; k++) {
            const record_context_info *c = &inputs[i]->contexts[k].info;
            for (uint32_t m = 0; m < c->n_metrics; m++) {
                size_t seen = 0;
                while (seen < *n_list && strcmp(list[seen], c->metrics[m]) != 0) seen++;
                if (seen < *n_list) continue;
                list = need_more(list, *n_list + 1, sizeof *list, "names of metrics");
                list[(*n_list)++] = c->metrics[m];
            }
        }
    return list;
}

// Fails with KVB_MISMATCH and names a context that no record scores by a metric which another context has.
static kvb_status check_metrics(const record *const *inputs, size_t n, kvb_error *err)
{
    size_t n_list;
    const char **list = list_metrics(&n_list, inputs, n);
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < n && status == KVB_OK; i++)
        for (size_t k = 0; k < inputs[i]->n && status == KVB_OK; k++) {
            const record_context_info *c = &inputs[i]->contexts[k].info;
            size_t m = 0;
            while (m < n_list && (record_has_metric(c, list[m]) || is_scored(inputs, n, c->id, list[m]))) m++;
            if (m < n_list)
                status = kvb_fail(err, KVB_MISMATCH,
                                  "%s: context %s has no scores of metric %s, which other contexts have; `kvbudget "
                                  "profile --add` adds them",
                                  inputs[i]->path, c->id, list[m]);
        }
    free(list);
    return status;
}

// ---- Shards ----

// Attributes that only shards have, and that tell what the whole is: `shard` is "3/8", `shard_of` a JSON text
// [["context id", questions], ...] of all contexts in calibration order, questions being 0 .. questions - 1.
static const char shard_name[] = "shard", shard_of_name[] = "shard_of";

kvb_status record_mark_shard(cJSON *attributes, uint32_t shard, uint32_t n_shards, const record_whole *all, size_t n,
                             kvb_error *err)
{
    char name[32];
    snprintf(name, sizeof name, "%u/%u", shard, n_shards);
    cJSON *list = cJSON_CreateArray();
    for (size_t i = 0; i < n; i++) {
        cJSON *pair = cJSON_CreateArray();
        cJSON_AddItemToArray(list, pair);
        cJSON_AddItemToArray(pair, cJSON_CreateString(all[i].id));
        cJSON_AddItemToArray(pair, cJSON_CreateNumber(all[i].n_questions));
    }
    char *text = cJSON_PrintUnformatted(list);
    bool fits = strlen(text) < MAX_TEXT_ATTRIBUTE;
    if (fits) {
        cJSON_AddStringToObject(attributes, shard_name, name);
        cJSON_AddStringToObject(attributes, shard_of_name, text);
    }
    cJSON_free(text);
    cJSON_Delete(list);
    return fits ? KVB_OK
                : kvb_fail(err, KVB_UNSUPPORTED,
                           "the list of %zu contexts does not fit into a shard (1 MiB); split the calibration data", n);
}

const char *record_shard(const record *r)
{
    const cJSON *shard = cJSON_GetObjectItemCaseSensitive(r->attributes, shard_name);
    return cJSON_IsString(shard) ? shard->valuestring : NULL;
}

// ---- What is there, and what must be ----

// A question of the context under way, and the input that has it.
typedef struct found {
    uint32_t number;
    size_t input;
} found;

typedef struct merge {
    const char *path;
    record **inputs; // [n]
    size_t n;
    cJSON *attributes;   // of the whole
    record_whole *whole; // [n_whole]; ids point into the inputs or into `list`
    size_t n_whole;
    cJSON *list;      // parsed `shard_of`, NULL when no input is a shard
    found *questions; // of one context, ascending
} merge;

static cJSON *without_shard(const cJSON *attributes)
{
    cJSON *copy = cJSON_Duplicate(attributes, 1);
    cJSON_DeleteItemFromObjectCaseSensitive(copy, shard_name);
    cJSON_DeleteItemFromObjectCaseSensitive(copy, shard_of_name);
    return copy;
}

// All inputs must come from one run: the same attributes, those of shards aside, and the same whole.
static kvb_status check_shards(merge *m, const char **whole_text, kvb_error *err)
{
    const record *first = m->inputs[0], *named = NULL;
    *whole_text = NULL;
    m->attributes = without_shard(first->attributes);
    for (size_t i = 0; i < m->n; i++) {
        const record *r = m->inputs[i];
        root_difference d;
        cJSON *own = without_shard(r->attributes);
        bool differs = record_root_differs(&d, &first->shape, m->attributes, &r->shape, own);
        cJSON_Delete(own);
        if (differs)
            return kvb_fail(err, KVB_MISMATCH, "%s and %s are not of one run: %s is %s in the first, %s in the second",
                            first->path, r->path, d.name, d.held, d.given);
        const cJSON *list = cJSON_GetObjectItemCaseSensitive(r->attributes, shard_of_name);
        if (!list) continue;
        if (!cJSON_IsString(list))
            return kvb_fail(err, KVB_FORMAT, "%s: attribute %s: expected a text", r->path, shard_of_name);
        if (named && strcmp(*whole_text, list->valuestring) != 0)
            return kvb_fail(err, KVB_MISMATCH,
                            "%s and %s are shards of different wholes: their lists of contexts (attribute %s) differ",
                            named->path, r->path, shard_of_name);
        *whole_text = list->valuestring;
        named = r;
    }
    return KVB_OK;
}

static bool has_shard(const merge *m)
{
    for (size_t i = 0; i < m->n; i++)
        if (cJSON_GetObjectItemCaseSensitive(m->inputs[i]->attributes, shard_of_name)) return true;
    return false;
}

// Returns the index of a context in the whole, or n_whole if it is not part of it.
static size_t find_in_whole(const merge *m, const char *id)
{
    size_t i = 0;
    while (i < m->n_whole && strcmp(m->whole[i].id, id) != 0) i++;
    return i;
}

// Reads the whole from the text that all shards carry.
static kvb_status read_whole(merge *m, const char *text, kvb_error *err)
{
    m->list = kvb_json_parse(text, strlen(text), NULL, NULL);
    size_t n = cJSON_IsArray(m->list) ? (size_t)cJSON_GetArraySize(m->list) : 0;
    m->whole = need(n, sizeof *m->whole, "contexts");
    bool good = cJSON_IsArray(m->list);
    const cJSON *pair;
    cJSON_ArrayForEach(pair, m->list)
    {
        const cJSON *id = cJSON_IsArray(pair) ? pair->child : NULL, *count = id ? id->next : NULL;
        good = good && cJSON_IsString(id) && context_id_valid(id->valuestring) && cJSON_IsNumber(count) &&
               count->valuedouble >= 0 && count->valuedouble <= UINT32_MAX &&
               count->valuedouble == (double)(uint32_t)count->valuedouble && !count->next;
        if (!good) break;
        if (find_in_whole(m, id->valuestring) < m->n_whole)
            return kvb_fail(err, KVB_FORMAT, "%s: attribute %s lists context %s twice", m->inputs[0]->path,
                            shard_of_name, id->valuestring);
        m->whole[m->n_whole++] = (record_whole){id->valuestring, (uint32_t)count->valuedouble};
    }
    if (good) return KVB_OK;
    return kvb_fail(err, KVB_FORMAT, "%s: attribute %s: expected [[\"context id\", questions], ...], found %.60s",
                    m->inputs[0]->path, shard_of_name, text);
}

// Without shards, the whole is every context of every input, as they come; then a missing one cannot be noticed.
static void join_inputs(merge *m)
{
    size_t n = 0;
    for (size_t i = 0; i < m->n; i++) n += m->inputs[i]->n;
    m->whole = need(n, sizeof *m->whole, "contexts");
    for (size_t i = 0; i < m->n; i++)
        for (size_t k = 0; k < m->inputs[i]->n; k++) {
            const char *id = m->inputs[i]->contexts[k].id;
            if (find_in_whole(m, id) == m->n_whole) m->whole[m->n_whole++] = (record_whole){id, 0};
        }
}

static int compare_found(const void *a, const void *b)
{
    const found *x = a, *y = b;
    if (x->number != y->number) return x->number < y->number ? -1 : 1;
    return (x->input > y->input) - (x->input < y->input);
}

// Fills m->questions with the inputs' questions of a context, by number, then by input. Returns how many they are.
static size_t find_questions(merge *m, const char *id, bool *has_context)
{
    size_t n = 0, n_found = 0;
    *has_context = false;
    for (size_t i = 0; i < m->n; i++) {
        const record_context_info *c = record_find_context(m->inputs[i], id);
        if (c) n += c->n_questions;
        *has_context |= c != NULL;
    }
    free(m->questions);
    m->questions = need(n, sizeof *m->questions, "questions");
    for (size_t i = 0; i < m->n; i++) {
        const record_context_info *c = record_find_context(m->inputs[i], id);
        for (uint32_t q = 0; c && q < c->n_questions; q++) m->questions[n_found++] = (found){c->questions[q].number, i};
    }
    qsort(m->questions, n, sizeof *m->questions, compare_found);
    return n;
}

// A list of what is missing. Once it gets long, items are no longer written out, but still counted.
typedef struct missing_list {
    char text[300];
    size_t used, n;
} missing_list;

static void add_missing(missing_list *l, const char *id, uint32_t first, uint32_t last, bool whole)
{
    if (l->n++ >= 5) return;
    char *at = l->text + l->used;
    size_t left = sizeof l->text - l->used;
    const char *comma = l->used ? ", " : "";
    int written = whole           ? snprintf(at, left, "%scontext %s", comma, id)
                  : first == last ? snprintf(at, left, "%squestion %u of %s", comma, first + 1, id)
                                  : snprintf(at, left, "%squestions %u to %u of %s", comma, first + 1, last + 1, id);
    if (written > 0 && (size_t)written < left) l->used += (size_t)written;
    else *at = '\0';
}

// Walks through the questions that are there of one context, and lists those of its n_questions that are not.
static void list_gaps(missing_list *l, const merge *m, const record_whole *c, size_t n_found)
{
    uint32_t next = 0; // the number that comes next when nothing is missing
    for (size_t k = 0; k < n_found && next < c->n_questions; k++) {
        uint32_t number = m->questions[k].number;
        if (number > next) add_missing(l, c->id, next, (number < c->n_questions ? number : c->n_questions) - 1, false);
        if (number >= next) next = number + 1 > number ? number + 1 : UINT32_MAX;
    }
    if (next < c->n_questions) add_missing(l, c->id, next, c->n_questions - 1, false);
}

// "; shard 2/4 is not among the files": only if all inputs come from one division of the run.
static void name_missing_shards(char *out, size_t size, const merge *m)
{
    unsigned shards = 0;
    char rest;
    size_t used = 0;
    out[0] = '\0';
    for (size_t i = 0; i < m->n; i++) {
        unsigned shard, of;
        const char *text = record_shard(m->inputs[i]);
        if (!text || sscanf(text, "%9u/%9u%c", &shard, &of, &rest) != 2 || (shards && of != shards)) return;
        shards = of;
    }
    for (unsigned s = 1, named = 0; s <= shards && named < 4; s++) {
        bool given = false;
        for (size_t i = 0; i < m->n && !given; i++)
            given = (unsigned)strtoul(record_shard(m->inputs[i]), NULL, 10) == s;
        if (given || used >= size) continue;
        used += (size_t)snprintf(out + used, size - used, "; shard %u/%u is not among the files", s, shards);
        named++;
    }
}

static kvb_status check_complete(merge *m, kvb_error *err)
{
    missing_list missing = {{0}, 0, 0};
    for (size_t i = 0; i < m->n_whole; i++) {
        bool has_context;
        size_t n_found = find_questions(m, m->whole[i].id, &has_context);
        if (!has_context) add_missing(&missing, m->whole[i].id, 0, 0, true);
        else list_gaps(&missing, m, &m->whole[i], n_found);
        if (m->list && n_found && m->questions[n_found - 1].number >= m->whole[i].n_questions)
            return kvb_fail(err, KVB_MISMATCH, "%s: context %s has question %u, but the run has only %u",
                            m->inputs[m->questions[n_found - 1].input]->path, m->whole[i].id,
                            m->questions[n_found - 1].number + 1, m->whole[i].n_questions);
    }
    if (!missing.n) return KVB_OK;
    char shards[160], more[40] = "";
    name_missing_shards(shards, sizeof shards, m);
    if (missing.n > 5) snprintf(more, sizeof more, " and %zu more", missing.n - 5);
    return kvb_fail(err, KVB_MISMATCH, "%s: cannot be merged, missing: %s%s%s", m->path, missing.text, more, shards);
}

// Every context of every input must be one of the whole.
static kvb_status check_known(const merge *m, kvb_error *err)
{
    for (size_t i = 0; i < m->n; i++)
        for (size_t k = 0; k < m->inputs[i]->n; k++) {
            const char *id = m->inputs[i]->contexts[k].id;
            if (find_in_whole(m, id) == m->n_whole)
                return kvb_fail(err, KVB_MISMATCH, "%s: context %s is not in the list of this run (attribute %s)",
                                m->inputs[i]->path, id, shard_of_name);
        }
    return KVB_OK;
}

// ---- Putting together ----

// Checks that inputs[0 .. n) hold the same of a context, or of one of its questions if a number is given.
static kvb_status compare_all(const merge *m, const size_t *inputs, size_t n, const char *id, const uint32_t *number,
                              kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t k = 1; k < n; k++)
        for (size_t j = 0; j < k && status == KVB_OK; j++)
            status = record_compare(m->inputs[inputs[j]], m->inputs[inputs[k]], id,
                                    record_find_context(m->inputs[inputs[j]], id)->n_tokens, number, err);
    return status;
}

static kvb_status merge_context(merge *m, record_output *out, const char *id, kvb_error *err)
{
    const h5_file **files = need(m->n, sizeof *files, "files");
    size_t *inputs = need(m->n, sizeof *inputs, "files"), n = 0;
    for (size_t i = 0; i < m->n; i++)
        if (record_find_context(m->inputs[i], id)) inputs[n++] = i;
    for (size_t k = 0; k < n; k++) files[k] = &m->inputs[inputs[k]]->file;
    kvb_status status = compare_all(m, inputs, n, id, NULL, err);
    if (status == KVB_OK) status = record_output_context(out, id, files, n, err);
    bool has_context;
    size_t n_found = find_questions(m, id, &has_context);
    for (size_t k = 0; k < n_found && status == KVB_OK; k += n) {
        const uint32_t number = m->questions[k].number;
        for (n = 0; k + n < n_found && m->questions[k + n].number == number; n++) {
            inputs[n] = m->questions[k + n].input;
            files[n] = &m->inputs[inputs[n]]->file;
        }
        status = compare_all(m, inputs, n, id, &number, err);
        if (status == KVB_OK) status = record_output_question(out, id, number, files, n, err);
    }
    free_all(inputs, files);
    return status;
}

static kvb_status merge_all(merge *m, kvb_error *err)
{
    const char *text = NULL;
    kvb_status status = has_shard(m) ? check_shards(m, &text, err)
                                     : join_records(&m->attributes, (const record *const *)m->inputs, m->n, err);
    if (status == KVB_OK && text) status = read_whole(m, text, err);
    else if (status == KVB_OK) join_inputs(m);
    if (status == KVB_OK) status = check_known(m, err);
    if (status == KVB_OK) status = check_metrics((const record *const *)m->inputs, m->n, err);
    if (status == KVB_OK) status = check_complete(m, err);
    if (status != KVB_OK) return status;
    uint64_t bytes = 0;
    for (size_t i = 0; i < m->n; i++) bytes += m->inputs[i]->file.size;
    record_output out;
    status = record_output_begin(&out, m->path, &m->inputs[0]->shape, m->attributes, bytes, err);
    for (size_t i = 0; i < m->n_whole && status == KVB_OK; i++) status = merge_context(m, &out, m->whole[i].id, err);
    return record_output_end(&out, status, err);
}

kvb_status record_merge(const char *path, const char *const *inputs, size_t n, bool replace, kvb_error *err)
{
    if (n == 0) return kvb_fail(err, KVB_ARGUMENT, "%s: no records were given", path);
    if (!replace && path_exists(path)) return kvb_fail(err, KVB_MISMATCH, "%s: exists; replace it with --force", path);
    merge m = {.path = path};
    m.inputs = need(n, sizeof *m.inputs, "records");
    kvb_status status = KVB_OK;
    for (; status == KVB_OK && m.n < n; m.n += status == KVB_OK) status = record_open(&m.inputs[m.n], inputs[m.n], err);
    h5_error_printing before = h5_quiet();
    if (status == KVB_OK) status = merge_all(&m, err);
    h5_loud(before);
    for (size_t i = 0; i < m.n; i++) record_close(m.inputs[i]);
    cJSON_Delete(m.attributes);
    cJSON_Delete(m.list);
    free_all(m.whole, m.questions, m.inputs);
    return status;
}
