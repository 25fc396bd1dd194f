#include "evaluator/head_scores.h"
#include "formats/atomic_file.h"
#include "formats/file_read.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- Reading ----

// What was read: one number per layer and head, before groups are averaged or repeated.
typedef struct score_grid {
    float *values; // [n_layers, columns]
    uint32_t columns;
} score_grid;

// Numbers in lines; every line as many.
static kvb_status parse_tsv(score_grid *g, const char *text, const char *path, uint32_t n_layers, uint32_t most,
                            kvb_error *err)
{
    g->values = need((size_t)n_layers * most, sizeof *g->values, "head scores");
    uint32_t layer = 0;
    for (const char *line = text; *line; layer++) {
        uint32_t n = 0;
        const char *end = line + strcspn(line, "\n");
        while (line < end) {
            char *after;
            double value = strtod(line, &after);
            if (after == line || after > end || n == most || layer == n_layers)
                return kvb_fail(err, KVB_FORMAT, "%s: line %u: expected %u lines of at most %u numbers, found '%.*s'",
                                path, layer + 1, n_layers, most, (int)(end - line < 24 ? end - line : 24), line);
            if (layer == 0) g->columns = n + 1;
            if (n < g->columns) g->values[(size_t)layer * g->columns + n] = (float)value;
            n++;
            line = after + strspn(after, " \t\r");
        }
        if (n != g->columns || n == 0)
            return kvb_fail(err, KVB_FORMAT, "%s: line %u has %u numbers, expected %u", path, layer + 1, n, g->columns);
        line = *end ? end + 1 : end;
    }
    if (layer != n_layers)
        return kvb_fail(err, KVB_MISMATCH, "%s: %u lines, expected one for each of %u layers", path, layer, n_layers);
    return KVB_OK;
}

// Groups of query heads are averaged, or KV heads repeated, to what is wanted.
static kvb_status fit_groups(const score_grid *g, const char *path, uint32_t n_layers, uint32_t n_heads,
                             uint32_t n_kv_heads, bool query_heads, float *out, kvb_error *err)
{
    uint32_t group = n_heads / n_kv_heads, wanted = query_heads ? n_heads : n_kv_heads;
    if (g->columns != n_heads && g->columns != n_kv_heads)
        return kvb_fail(err, KVB_MISMATCH, "%s: %u heads in a layer, expected %u query or %u KV heads", path,
                        g->columns, n_heads, n_kv_heads);
    for (size_t i = 0; i < (size_t)n_layers * g->columns; i++)
        if (!isfinite(g->values[i]) || g->values[i] < 0)
            return kvb_fail(err, KVB_NUMERIC, "%s: layer %zu, head %zu: expected a score of 0 or more, found %g", path,
                            i / g->columns, i % g->columns, (double)g->values[i]);
    for (uint32_t l = 0; l < n_layers; l++)
        for (uint32_t h = 0; h < wanted; h++) {
            const float *row = g->values + (size_t)l * g->columns;
            double sum = 0;
            uint32_t first = g->columns == wanted ? h : query_heads ? h / group : h * group;
            uint32_t n = g->columns > wanted ? group : 1;
            for (uint32_t i = 0; i < n; i++) sum += row[first + i];
            out[(size_t)l * wanted + h] = (float)(sum / n);
        }
    return KVB_OK;
}

kvb_status head_scores_parse(const void *data, size_t size, const char *path, uint32_t n_layers, uint32_t n_heads,
                             uint32_t n_kv_heads, bool query_heads, float *out, kvb_error *err)
{
    score_grid g = {0};
    char *text = need(size + 1, 1, "characters"); // strtod needs an end
    memcpy(text, data, size);
    kvb_status status = parse_tsv(&g, text, path, n_layers, n_heads, err);
    free(text);
    if (status == KVB_OK) status = fit_groups(&g, path, n_layers, n_heads, n_kv_heads, query_heads, out, err);
    free(g.values);
    return status;
}

kvb_status head_scores_read(const char *path, uint32_t n_layers, uint32_t n_heads, uint32_t n_kv_heads,
                            bool query_heads, float *out, kvb_error *err)
{
    file_view view;
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    status = head_scores_parse(view.data, view.size, path, n_layers, n_heads, n_kv_heads, query_heads, out, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    file_unmap(&view);
    return status;
}

// ---- Measuring ----

retrieval retrieval_open(const model *m, const model_text *text)
{
    return (retrieval){.m = m,
                       .text = text,
                       .sums = need((size_t)m->config.n_layers * m->config.n_heads, sizeof(double), "query heads")};
}

void retrieval_close(retrieval *r)
{
    free(r->sums);
    *r = (retrieval){0};
}

// ---- Where the answer stands ----

// Marks the tokens that overlap an occurrence of `gold` in the text of ids; returns how many were marked.
static size_t mark_text(bool *marks, const char *text, const uint32_t *starts, uint32_t n, const char *gold)
{
    size_t length = strlen(gold), marked = 0;
    for (const char *at = text; length && (at = strstr(at, gold)); at += length)
        for (uint32_t i = 0; i < n; i++) {
            size_t first = (size_t)(at - text), end = first + length;
            if (starts[i + 1] <= first || starts[i] >= end) continue;
            marked += !marks[i];
            marks[i] = true;
        }
    return marked;
}

// Byte-level tokens: the text of ids is that of each, one behind the other: token i's begins at byte starts[i] of
// starts [n + 1].
static void find_starts(uint32_t *starts, const model_text *t, const int32_t *ids, uint32_t n)
{
    starts[0] = 0;
    for (uint32_t i = 0; i < n; i++)
        starts[i + 1] = starts[i] + (uint32_t)tokenizer_decode(t->tokens, &ids[i], 1, NULL, 0);
}

// ---- One question ----

typedef struct needle_watch {
    retrieval *r;
    const bool *marks; // [n_tokens] of the context
    uint32_t n_tokens, n_question, n_answer;
} needle_watch;

// Row i is the query that predicts token i + 1 of question and answer.
static void add_attention(void *context, const decode_view *view, uint32_t kv_head, kv_span span, const float *weights)
{
    needle_watch *w = context;
    for (uint32_t i = 0; i < view->n_rows * view->group; i++) {
        uint32_t row = span.count - w->n_tokens - view->n_rows + i / view->group;
        if (row + 1 < w->n_question || row + 1 >= w->n_question + w->n_answer) continue;
        double sum = 0;
        for (uint32_t j = 0; j < w->n_tokens; j++) sum += w->marks[j] ? weights[(size_t)i * span.count + j] : 0;
        size_t head = (size_t)kv_head * view->group + i % view->group;
        w->r->sums[(size_t)view->layer * w->r->m->config.n_heads + head] += sum / w->n_answer;
    }
}

// Ids of the question and of its gold strings, joined by ", " behind a blank. *ids is malloc'd.
static kvb_status encode_answer(int32_t **ids, uint32_t *n_question, uint32_t *n_answer, const model_text *t,
                                const task_question *q, kvb_error *err)
{
    int32_t *question = NULL, *answer = NULL;
    size_t nq = 0, na = 0;
    char *text = task_answer_text(q);
    *ids = NULL;
    kvb_status status = model_text_encode(t, TEXT_QUESTION, q->text, strlen(q->text), &question, &nq, err);
    if (status == KVB_OK) status = model_text_encode(t, TEXT_ALONE, text, strlen(text), &answer, &na, err);
    if (status == KVB_OK) {
        *ids = need(nq + na, sizeof **ids, "token ids");
        memcpy(*ids, question, nq * sizeof **ids);
        memcpy(*ids + nq, answer, na * sizeof **ids);
    }
    *n_question = (uint32_t)nq;
    *n_answer = (uint32_t)na;
    free(question);
    free(answer);
    free(text);
    return status;
}

static kvb_status mark_answer(bool *marks, const char *text, const uint32_t *starts, uint32_t n_tokens,
                              const task_sample *sample, const task_question *q, kvb_error *err)
{
    memset(marks, 0, n_tokens);
    for (size_t i = 0; i < q->n_gold; i++)
        if (!mark_text(marks, text, starts, n_tokens, q->gold[i]))
            return kvb_fail(err, KVB_ARGUMENT,
                            "head scores: sample %s: the answer \"%s\" does not stand in its context; use a task of "
                            "needles or pairs",
                            sample->id, q->gold[i]);
    return KVB_OK;
}

static kvb_status add_question(retrieval *r, session *s, const bool *marks, const task_question *q, kvb_error *err)
{
    needle_watch w = {.r = r, .marks = marks, .n_tokens = s->n_tokens};
    int32_t *ids = NULL;
    kv_cache *cache = NULL;
    kvb_status status = encode_answer(&ids, &w.n_question, &w.n_answer, r->text, q, err);
    const uint32_t rows = w.n_question + w.n_answer;
    const decode_hooks hooks = {.context = &w, .attended = add_attention};
    if (status == KVB_OK) cache = session_cache(s, NULL, rows);
    if (status == KVB_OK) status = decoder_run(s->decode, &cache, 1, &rows, ids, &hooks, LOGITS_LAST, NULL, err);
    if (status == KVB_OK) r->n++;
    kv_cache_close(cache);
    free(ids);
    return status;
}

// The most rows of a question and its answer.
static kvb_status count_rows(uint32_t *out, const model_text *t, const task_sample *sample, kvb_error *err)
{
    kvb_status status = KVB_OK;
    *out = 0;
    for (size_t i = 0; i < sample->n_questions && status == KVB_OK; i++) {
        int32_t *ids = NULL;
        uint32_t question, answer;
        status = encode_answer(&ids, &question, &answer, t, &sample->questions[i], err);
        if (question + answer > *out) *out = question + answer;
        free(ids);
    }
    return status;
}

kvb_status retrieval_add(retrieval *r, const task_sample *sample, kvb_error *err)
{
    int32_t *ids = NULL;
    uint32_t n = 0, rows = 0, *starts = NULL;
    bool *marks = NULL;
    char *text = NULL;
    session *s = NULL;
    kvb_status status = task_context_ids(&ids, &n, r->m, r->text, sample, err);
    if (status == KVB_OK) status = count_rows(&rows, r->text, sample, err);
    if (status == KVB_OK) {
        starts = need((size_t)n + 1, sizeof *starts, "tokens");
        marks = need(n, sizeof *marks, "tokens");
        text = model_text_decode(r->text, ids, n, NULL);
        find_starts(starts, r->text, ids, n);
    }
    const session_plan plan = {.max_tokens = n, .max_new = rows, .max_rows = rows};
    if (status == KVB_OK) status = session_open(&s, r->m, &plan, err);
    if (status == KVB_OK) status = session_prefill(s, ids, n, NULL, NULL, err);
    for (size_t i = 0; i < sample->n_questions && status == KVB_OK; i++) {
        const task_question *q = &sample->questions[i];
        status = mark_answer(marks, text, starts, n, sample, q, err);
        if (status == KVB_OK) status = add_question(r, s, marks, q, err);
    }
    session_close(s);
    free(ids);
    free(starts);
    free(marks);
    free(text);
    return status;
}

kvb_status retrieval_write(const retrieval *r, const char *path, kvb_error *err)
{
    atomic_file file;
    uint32_t H = r->m->config.n_heads;
    kvb_status status = atomic_file_begin(&file, path, err);
    if (status != KVB_OK) return status;
    for (size_t i = 0; i < (size_t)r->m->config.n_layers * H; i++)
        fprintf(file.stream, "%.9g%c", r->n ? r->sums[i] / (double)r->n : 0, i % H + 1 == H ? '\n' : '\t');
    return atomic_file_commit(&file, err);
}
