#include "calib.h"
#include "file_read.h"
#include "need.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include "runtime/text.h"
#include "sha256.h"
#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char default_answer_prefix[] = "\nAnswer:";

// Where we are, for messages.
typedef struct line_place {
    const char *file;
    size_t line;
    kvb_error *err;
} line_place;

// ---- Values ----

static kvb_status copy_text(char **out, const cJSON *value, const char *key, const line_place *at)
{
    if (!cJSON_IsString(value))
        return kvb_fail(at->err, KVB_FORMAT, "%s: line %zu: %s: expected a string", at->file, at->line, key);
    *out = need_text("%s", value->valuestring);
    return KVB_OK;
}

static kvb_status copy_ids(int32_t **out, size_t *n_out, const cJSON *value, const char *key, const line_place *at)
{
    if (!cJSON_IsArray(value) || !value->child)
        return kvb_fail(at->err, KVB_FORMAT, "%s: line %zu: %s: expected a list of token ids, at least one", at->file,
                        at->line, key);
    size_t n = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, value) n++;
    int32_t *ids = need(n, sizeof *ids, "token ids"); // n JSON nodes are in memory already: no overflow
    size_t i = 0;
    cJSON_ArrayForEach(item, value)
    {
        double x = cJSON_IsNumber(item) ? item->valuedouble : -1;
        if (!(x >= 0 && x <= INT32_MAX) || x != (double)(int32_t)x) {
            free(ids);
            return kvb_fail(at->err, KVB_FORMAT, "%s: line %zu: %s: element %zu: expected a whole number, 0 to %d",
                            at->file, at->line, key, i, INT32_MAX);
        }
        ids[i++] = (int32_t)x;
    }
    *out = ids;
    *n_out = n;
    return KVB_OK;
}

// A value that is given as text under one key or as token ids under another, never both; NULL if it is under neither.
typedef struct text_or_ids {
    const cJSON *value;
    const char *key;
    bool is_text;
} text_or_ids;

static kvb_status find_text_or_ids(text_or_ids *out, const cJSON *line, const char *text_key, const char *ids_key,
                                   bool required, const line_place *at)
{
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(line, text_key),
                *ids = cJSON_GetObjectItemCaseSensitive(line, ids_key);
    *out = text ? (text_or_ids){text, text_key, true} : (text_or_ids){ids, ids_key, false};
    if (text && ids)
        return kvb_fail(at->err, KVB_FORMAT, "%s: line %zu: has both \"%s\" and \"%s\"; leave one out", at->file,
                        at->line, text_key, ids_key);
    if (required && !out->value)
        return kvb_fail(at->err, KVB_FORMAT, "%s: line %zu: has neither \"%s\" nor \"%s\"", at->file, at->line,
                        text_key, ids_key);
    return KVB_OK;
}

// Copies one value, or one element of a list, as text or as ids.
static kvb_status take_text_or_ids(char **text, int32_t **ids, size_t *n, const text_or_ids *from, const cJSON *item,
                                   const char *where, const line_place *at)
{
    return from->is_text ? copy_text(text, item, where, at) : copy_ids(ids, n, item, where, at);
}

// ---- One line ----

static kvb_status parse_question_list(calib_context *c, const text_or_ids *value, const line_place *at)
{
    const cJSON *list = value->value;
    const char *key = value->key;
    if (!cJSON_IsArray(list) || !list->child)
        return kvb_fail(at->err, KVB_FORMAT, "%s: line %zu: %s: expected a list with at least one question", at->file,
                        at->line, key);
    size_t n = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, list) n++;
    c->questions = need(n, sizeof *c->questions, "questions");
    cJSON_ArrayForEach(item, list)
    {
        calib_question *q = &c->questions[c->n_questions++];
        char where[48];
        snprintf(where, sizeof where, "%s: element %zu", key, c->n_questions - 1);
        kvb_status status = take_text_or_ids(&q->text, &q->ids, &q->n_ids, value, item, where, at);
        if (status != KVB_OK) return status;
    }
    return KVB_OK;
}

static kvb_status parse_answers(calib_context *c, const text_or_ids *value, const line_place *at)
{
    const cJSON *list = value->value;
    const char *key = value->key;
    if (!list) return KVB_OK;
    size_t n = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, list) n++;
    if (!cJSON_IsArray(list) || n != c->n_questions)
        return kvb_fail(at->err, KVB_FORMAT,
                        "%s: line %zu: %s: expected a list of %zu, one answer per question, found %zu", at->file,
                        at->line, key, c->n_questions, cJSON_IsArray(list) ? n : 0);
    n = 0;
    cJSON_ArrayForEach(item, list)
    {
        calib_question *q = &c->questions[n];
        char where[48];
        snprintf(where, sizeof where, "%s: element %zu", key, n++);
        if (cJSON_IsNull(item)) continue; // this one is sampled
        kvb_status status = take_text_or_ids(&q->answer, &q->answer_ids, &q->n_answer_ids, value, item, where, at);
        if (status != KVB_OK) return status;
    }
    return KVB_OK;
}

void calib_default_id(char out[CONTEXT_ID_MAX + 1], const char *path, size_t number)
{
    const char *slash = strrchr(path, '/');
    char stem[40];
    snprintf(stem, sizeof stem, "%s", slash ? slash + 1 : path);
    char *dot = strrchr(stem, '.');
    if (dot && dot != stem) *dot = '\0';
    for (char *p = stem; *p; p++) {
        char one[2] = {*p, '\0'};
        if (*p != '.' && !context_id_valid(one)) *p = '_';
    }
    if (number) snprintf(out, CONTEXT_ID_MAX + 1, "%s-%zu", stem, number);
    else snprintf(out, CONTEXT_ID_MAX + 1, "%s", stem);
}

static kvb_status parse_id(calib_context *c, const cJSON *line, const line_place *at)
{
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(line, "sample_id");
    if (cJSON_IsString(value)) {
        c->sample_id = need_text("%s", value->valuestring);
    } else if (cJSON_IsNumber(value)) {
        char text[32];
        snprintf(text, sizeof text, "%.17g", value->valuedouble);
        c->sample_id = need_text("%s", text);
    } else if (!value) {
        char id[CONTEXT_ID_MAX + 1];
        calib_default_id(id, at->file, at->line);
        c->sample_id = need_text("%s", id);
    } else {
        return kvb_fail(at->err, KVB_FORMAT, "%s: line %zu: sample_id: expected a string", at->file, at->line);
    }
    if (!context_id_valid(c->sample_id))
        return kvb_fail(at->err, KVB_FORMAT, "%s: line %zu: sample_id: expected " CONTEXT_ID_RULE ", found \"%.80s\"",
                        at->file, at->line, c->sample_id);
    return KVB_OK;
}

static kvb_status parse_context(calib_context *c, const cJSON *line, const line_place *at)
{
    if (!cJSON_IsObject(line))
        return kvb_fail(at->err, KVB_FORMAT, "%s: line %zu: expected a JSON object", at->file, at->line);
    c->line = at->line;
    text_or_ids context, questions, answers;
    kvb_status status = parse_id(c, line, at);
    if (status == KVB_OK) status = find_text_or_ids(&context, line, "context", "context_ids", true, at);
    if (status == KVB_OK)
        status =
            take_text_or_ids(&c->context, &c->context_ids, &c->n_context_ids, &context, context.value, context.key, at);
    if (status == KVB_OK && c->context && !c->context[0])
        status = kvb_fail(at->err, KVB_FORMAT, "%s: line %zu: context: is empty", at->file, at->line);
    if (status == KVB_OK) status = find_text_or_ids(&questions, line, "questions", "question_ids", true, at);
    if (status == KVB_OK) status = parse_question_list(c, &questions, at);
    if (status == KVB_OK) status = find_text_or_ids(&answers, line, "answers", "answer_ids", false, at);
    if (status == KVB_OK) status = parse_answers(c, &answers, at);
    if (status != KVB_OK) return status;
    const cJSON *prefix = cJSON_GetObjectItemCaseSensitive(line, "answer_prefix");
    c->has_answer_prefix = prefix != NULL;
    if (prefix) return copy_text(&c->answer_prefix, prefix, "answer_prefix", at);
    c->answer_prefix = need_text("%s", default_answer_prefix);
    return KVB_OK;
}

static bool is_blank(const char *text, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        if (text[i] != ' ' && text[i] != '\t' && text[i] != '\r') return false;
    }
    return true;
}

// cJSON silently ends a string at an escaped NUL, so such an escape must be found in the JSON text itself.
static bool has_nul(const char *text, size_t size)
{
    if (memchr(text, '\0', size)) return true;
    for (const char *p = text, *end = text + size; (p = memchr(p, '\\', (size_t)(end - p))); p += 2) {
        if (end - p >= 6 && memcmp(p, "\\u0000", 6) == 0) return true;
        if (end - p < 2) break;
    }
    return false;
}

static kvb_status parse_line(calib_context *c, const char *text, size_t size, const line_place *at)
{
    if (size > CALIB_MAX_LINE)
        return kvb_fail(at->err, KVB_FORMAT, "%s: line %zu: has %zu bytes, at most %zu are read; split the context",
                        at->file, at->line, size, CALIB_MAX_LINE);
    if (has_nul(text, size))
        return kvb_fail(at->err, KVB_FORMAT, "%s: line %zu: holds a NUL character, which no text may have", at->file,
                        at->line);
    const char *end = text;
    cJSON *line = kvb_json_parse(text, size, &end, NULL);
    size_t used = (size_t)(end - text);
    while (line && used < size && is_blank(text + used, 1)) used++;
    kvb_status status;
    if (!line) status = kvb_fail(at->err, KVB_FORMAT, "%s: line %zu: byte %zu: not JSON", at->file, at->line, used + 1);
    else if (used < size)
        status = kvb_fail(at->err, KVB_FORMAT, "%s: line %zu: byte %zu: unexpected text after the JSON object",
                          at->file, at->line, used + 1);
    else status = parse_context(c, line, at);
    cJSON_Delete(line);
    return status;
}

// ---- The file ----

static void context_free(calib_context *c)
{
    for (size_t i = 0; i < c->n_questions; i++)
        free_all(c->questions[i].text, c->questions[i].ids, c->questions[i].answer, c->questions[i].answer_ids);
    free_all(c->questions, c->sample_id, c->context, c->context_ids, c->answer_prefix);
}

bool calib_has_text(const calib_file *file)
{
    for (size_t i = 0; i < file->count; i++) {
        const calib_context *c = &file->contexts[i];
        if (c->context) return true;
        for (size_t q = 0; q < c->n_questions; q++)
            if (c->questions[q].text || c->questions[q].answer) return true;
    }
    return false;
}

void calib_free(calib_file *file)
{
    for (size_t i = 0; i < file->count; i++) context_free(&file->contexts[i]);
    free_all(file->contexts, file->name);
    memset(file, 0, sizeof *file);
}

static int compare_ids(const void *a, const void *b)
{
    const calib_context *x = *(const calib_context *const *)a, *y = *(const calib_context *const *)b;
    int order = strcmp(x->sample_id, y->sample_id);
    return order ? order : (x->line > y->line) - (x->line < y->line);
}

static kvb_status check_ids_unique(const calib_file *file, const char *name, kvb_error *err)
{
    const calib_context **sorted = need(file->count, sizeof *sorted, "contexts");
    for (size_t i = 0; i < file->count; i++) sorted[i] = &file->contexts[i];
    qsort(sorted, file->count, sizeof *sorted, compare_ids);
    kvb_status status = KVB_OK;
    for (size_t i = 1; i < file->count && status == KVB_OK; i++) {
        if (strcmp(sorted[i - 1]->sample_id, sorted[i]->sample_id) == 0)
            status = kvb_fail(err, KVB_FORMAT, "%s: line %zu: sample_id \"%s\" was used in line %zu already", name,
                              sorted[i]->line, sorted[i]->sample_id, sorted[i - 1]->line);
    }
    free(sorted);
    return status;
}

static calib_context *add_context(calib_file *file)
{
    if ((file->count & (file->count - 1)) == 0) { // full at each power of two
        size_t capacity = file->count ? 2 * file->count : 1;
        file->contexts = need_more(file->contexts, capacity, sizeof *file->contexts, "contexts");
    }
    calib_context *c = &file->contexts[file->count++];
    memset(c, 0, sizeof *c);
    return c;
}

static kvb_status parse_lines(calib_file *file, const char *text, size_t size, line_place *at)
{
    for (size_t start = 0; start < size;) {
        const char *newline = memchr(text + start, '\n', size - start);
        size_t length = newline ? (size_t)(newline - text) - start : size - start;
        at->line++;
        if (!is_blank(text + start, length)) {
            kvb_status status = parse_line(add_context(file), text + start, length, at);
            if (status != KVB_OK) return status;
        }
        start += length + 1;
    }
    if (file->count == 0)
        return kvb_fail(at->err, KVB_FORMAT, "%s: holds no context; expected one JSON object per line", at->file);
    return KVB_OK;
}

kvb_status calib_parse(calib_file *out, const void *data, size_t size, const char *name, kvb_error *err)
{
    memset(out, 0, sizeof *out);
    kvb_file_kind kind = kvb_kind_of_file(data, size);
    if (kind != KVB_FILE_OTHER)
        return kvb_fail(err, KVB_FORMAT, "%s: expected calibration texts, one JSON object per line, found %s", name,
                        kvb_kind_name(kind));
    line_place at = {name, 0, err};
    out->name = need_text("%s", name);
    kvb_status status = parse_lines(out, data, size, &at);
    if (status == KVB_OK) status = check_ids_unique(out, name, err);
    if (status == KVB_OK) sha256_hex(data, size, out->sha256);
    else calib_free(out);
    return status;
}

kvb_status calib_load(calib_file *out, const char *path, kvb_error *err)
{
    memset(out, 0, sizeof *out);
    file_view view;
    kvb_status status = file_map(&view, path, err);
    if (status == KVB_OK) status = calib_parse(out, view.data, view.size, path, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    if (status != KVB_OK) calib_free(out);
    file_unmap(&view);
    return status;
}

// ---- Writing ----

// Makes one element of a list of questions or answers: text, ids, or null for an answer that was not given.
static cJSON *text_or_ids_json(const char *text, const int32_t *ids, size_t n)
{
    return text ? cJSON_CreateString(text) : ids ? cJSON_CreateIntArray(ids, (int)n) : cJSON_CreateNull();
}

static void add_questions(cJSON *line, const calib_context *c)
{
    bool answered = false, texts = false;
    for (size_t i = 0; i < c->n_questions; i++) {
        answered |= c->questions[i].answer || c->questions[i].answer_ids;
        texts |= c->questions[i].answer != NULL;
    }
    cJSON *asked = cJSON_AddArrayToObject(line, c->questions[0].text ? "questions" : "question_ids");
    cJSON *answers = answered ? cJSON_AddArrayToObject(line, texts ? "answers" : "answer_ids") : NULL;
    for (size_t i = 0; i < c->n_questions; i++) {
        const calib_question *q = &c->questions[i];
        cJSON_AddItemToArray(asked, text_or_ids_json(q->text, q->ids, q->n_ids));
        if (answered) cJSON_AddItemToArray(answers, text_or_ids_json(q->answer, q->answer_ids, q->n_answer_ids));
    }
}

void calib_write_line(FILE *to, const calib_context *c)
{
    cJSON *line = cJSON_CreateObject();
    cJSON_AddStringToObject(line, "sample_id", c->sample_id);
    cJSON_AddItemToObject(line, c->context ? "context" : "context_ids",
                          text_or_ids_json(c->context, c->context_ids, c->n_context_ids));
    add_questions(line, c);
    if (c->has_answer_prefix) cJSON_AddStringToObject(line, "answer_prefix", c->answer_prefix);
    char *text = cJSON_PrintUnformatted(line);
    fprintf(to, "%s\n", text); // errors of the stream show when it is closed
    cJSON_free(text);
    cJSON_Delete(line);
}
