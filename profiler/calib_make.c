#include "profiler/calib_make.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "profiler/backend/sampler.h"
#include "profiler/text/text_lines.h"
#include "profiler/text/utf8.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

enum { LEAST_ANSWER = 2 }; // tokens; a profile records a query for each token of an answer but the last

// The state of making a context.
typedef struct maker {
    const calib_recipe *r;
    const tokenizer *t;
    const char *name;
    calib_context *c;    // being made
    const int32_t *text; // its tokens behind BOS
    size_t n, n_behind;  // how many of them are the context, and how many more the text has
    kvb_error *err;
} maker;

// ---- One question ----

// Adds a question, with copies of its ids. Without an answer (NULL) the profile samples one.
static void add_question(const maker *m, const int32_t *asked, size_t n_asked, const int32_t *answer, size_t n_answer)
{
    calib_context *c = m->c;
    c->questions = need_more(c->questions, c->n_questions + 1, sizeof *c->questions, "questions");
    calib_question *q = &c->questions[c->n_questions++];
    *q = (calib_question){.ids = need_copy(asked, n_asked, sizeof *asked, "token ids"), .n_ids = n_asked};
    if (!answer) return;
    q->answer_ids = need_copy(answer, n_answer, sizeof *answer, "token ids");
    q->n_answer_ids = n_answer;
}

static kvb_status encode(const maker *m, const char *text, size_t size, int32_t **ids, size_t *n)
{
    return tokenizer_encode(m->t, text, size, false, ids, n, m->err);
}

// ---- Questions that a context has already ----

static kvb_status check_ids(const maker *m, const char *what, const int32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((size_t)ids[i] >= tokenizer_size(m->t))
            return kvb_fail(m->err, KVB_ARGUMENT,
                            "%s: sample '%s': %s: id %d, expected 0 to %zu; was it made with another model's "
                            "tokenizer?",
                            m->name, m->c->sample_id, what, ids[i], tokenizer_size(m->t) - 1);
    return KVB_OK;
}

// Question and answer prefix are encoded as one text, as a profile does it.
static kvb_status encode_question(const maker *m, const calib_context *from, const calib_question *q, int32_t **ids,
                                  size_t *n)
{
    if (q->ids) {
        *n = q->n_ids;
        *ids = need_copy(q->ids, q->n_ids, sizeof **ids, "token ids");
        return check_ids(m, "question_ids", *ids, *n);
    }
    char *joined = need_text("%s%s", q->text, from->answer_prefix);
    kvb_status status = encode(m, joined, strlen(joined), ids, n);
    free(joined);
    return status;
}

static kvb_status add_own(const maker *m, const calib_context *from, const calib_question *q)
{
    int32_t *asked = NULL, *answer = NULL;
    size_t n_asked = 0, n_answer = q->n_answer_ids;
    bool given = !m->r->ignore_answers && (q->answer || q->answer_ids);
    kvb_status status = encode_question(m, from, q, &asked, &n_asked);
    if (status == KVB_OK && given && q->answer) status = encode(m, q->answer, strlen(q->answer), &answer, &n_answer);
    if (status == KVB_OK && given && q->answer_ids) status = check_ids(m, "answer_ids", q->answer_ids, q->n_answer_ids);
    if (status == KVB_OK && (n_asked == 0 || (given && n_answer == 0)))
        status = kvb_fail(m->err, KVB_ARGUMENT, "%s: sample '%s': a question or its answer has no tokens", m->name,
                          m->c->sample_id);
    const int32_t *said = answer ? answer : q->answer_ids;
    if (status == KVB_OK) add_question(m, asked, n_asked, given ? said : NULL, n_answer);
    free_all(asked, answer);
    return status;
}

// ---- Continuation ----

static kvb_status add_continuations(const maker *m)
{
    size_t step = m->r->n_answer, wanted = m->r->n_continued;
    if (!wanted) return KVB_OK;
    if (m->n_behind < wanted * step + 1)
        return kvb_fail(m->err, KVB_ARGUMENT,
                        "%s: has %zu tokens after the context's %zu, expected %zu (%zu continuations of %zu, and one "
                        "to begin with); take a longer text, or fewer --tokens, --continue or --answer-tokens",
                        m->name, m->n_behind, m->n, wanted * step + 1, wanted, step);
    // The question is the text so far, which is decoded like any question, and not recorded.
    const int32_t *behind = m->text + m->n;
    for (size_t i = 0; i < wanted; i++) add_question(m, behind, 1 + i * step, behind + 1 + i * step, step);
    return KVB_OK;
}

// ---- Lines ----

static kvb_status add_line_question(const maker *m, const char *text, const text_line *line)
{
    int head = (int)(line->head - line->begin);
    const char *begin = text + line->begin;
    int32_t *asked = NULL, *answer = NULL;
    size_t n_asked, n_answer;
    bool han = text_line_is_han(begin, line->end - line->begin);
    char *question =
        han ? need_text("\n\n原文中以“%.*s”开头的句子：%.*s", head, begin, head, begin)
            : need_text("\n\nThe line of the text above that begins with \"%.*s\" is: %.*s", head, begin, head, begin);
    kvb_status status = encode(m, question, strlen(question), &asked, &n_asked);
    if (status == KVB_OK) status = encode(m, text + line->head, line->end - line->head, &answer, &n_answer);
    if (status == KVB_OK && n_answer > m->r->n_answer) n_answer = m->r->n_answer;
    if (status == KVB_OK) add_question(m, asked, n_asked, answer, n_answer);
    free_all(question, asked, answer);
    return status;
}

// Keeps the lines whose rest is long enough in tokens too, as a row of dashes is not.
static kvb_status keep_answers(const maker *m, const char *text, text_line *lines, size_t *n)
{
    size_t kept = 0, n_ids;
    int32_t *ids = NULL;
    kvb_status status = KVB_OK;
    for (size_t i = 0; status == KVB_OK && i < *n; i++) {
        status = encode(m, text + lines[i].head, lines[i].end - lines[i].head, &ids, &n_ids);
        if (status == KVB_OK && n_ids >= LEAST_ANSWER) lines[kept++] = lines[i];
        free(ids);
    }
    *n = kept;
    return status;
}

// Divides the lines into as many equal parts as are wanted and draws one of each, to ask about the whole context.
static kvb_status draw_lines(const maker *m, const char *text, const text_line *lines, size_t n)
{
    size_t wanted = m->r->n_lines;
    char hash[65];
    if (n < wanted)
        return kvb_fail(m->err, KVB_ARGUMENT,
                        "%s: sample '%s': %zu lines of its context have %d to %d letters and begin like no other, "
                        "expected %zu; give --lines %zu, or more --tokens",
                        m->name, m->c->sample_id, n, TEXT_LINE_MIN, TEXT_LINE_MAX, wanted, n);
    kvb_status status = KVB_OK;
    sha256_hex(m->c->sample_id, strlen(m->c->sample_id), hash);
    hash[16] = '\0';
    uint64_t key = strtoull(hash, NULL, 16);
    for (size_t i = 0; status == KVB_OK && i < wanted; i++) {
        size_t begin = i * n / wanted, end = (i + 1) * n / wanted;
        double place = sampler_uniform(m->r->seed, key, 0, (uint32_t)i);
        status = add_line_question(m, text, &lines[begin + (size_t)(place * (double)(end - begin))]);
    }
    return status;
}

// Adds questions for lines of what the model reads: the context's tokens, decoded.
static kvb_status add_lines(const maker *m)
{
    if (!m->r->n_lines) return KVB_OK;
    size_t size = tokenizer_decode(m->t, m->text, m->n, NULL, 0), n;
    char *text = need(size + 1, 1, "characters");
    tokenizer_decode(m->t, m->text, m->n, text, size);
    text_line *lines = text_lines_find(&n, text, size);
    kvb_status status = keep_answers(m, text, lines, &n);
    if (status == KVB_OK) status = draw_lines(m, text, lines, n);
    free_all(lines, text);
    return status;
}

// ---- One context ----

static kvb_status check_id(const calib_file *out, const maker *m)
{
    const char *id = m->c->sample_id;
    if (!context_id_valid(id))
        return kvb_fail(m->err, KVB_ARGUMENT,
                        "%s: its name makes the sample_id \"%s\", expected " CONTEXT_ID_RULE "; rename the file",
                        m->name, id);
    for (size_t i = 0; i + 1 < out->count; i++)
        if (strcmp(out->contexts[i].sample_id, id) == 0)
            return kvb_fail(m->err, KVB_ARGUMENT,
                            "%s: there is a context \"%s\" already; rename one of the files, or its sample_id", m->name,
                            id);
    return KVB_OK;
}

static kvb_status begin_context(calib_file *out, maker *m, const char *id)
{
    out->contexts = need_more(out->contexts, out->count + 1, sizeof *out->contexts, "contexts");
    m->c = &out->contexts[out->count++];
    *m->c = (calib_context){.sample_id = need_text("%s", id), .answer_prefix = need_text("%s", "")};
    return check_id(out, m);
}

// Makes the context's tokens: BOS (< 0: none) and as many of the n as the recipe wants; m notes how many follow them.
static kvb_status cut_context(maker *m, int32_t bos, const int32_t *ids, size_t n)
{
    size_t front = bos >= 0, room = m->r->n_tokens - front;
    m->text = ids;
    m->n = n < room ? n : room;
    m->n_behind = n - m->n;
    if (m->n + front < CALIB_LEAST_CONTEXT)
        return kvb_fail(m->err, KVB_ARGUMENT, "%s: sample '%s': has %zu tokens, expected %d at least", m->name,
                        m->c->sample_id, m->n + front, CALIB_LEAST_CONTEXT);
    m->c->context_ids = need(m->n + front, sizeof *m->c->context_ids, "token ids");
    if (front) m->c->context_ids[0] = bos;
    memcpy(m->c->context_ids + front, ids, m->n * sizeof *ids);
    m->c->n_context_ids = m->n + front;
    return KVB_OK;
}

// Continuations come first: gains are measured on each context's first question, and an answer to a line is short.
static kvb_status add_made(const maker *m)
{
    kvb_status status = add_continuations(m);
    return status == KVB_OK ? add_lines(m) : status;
}

static int32_t bos_of(const tokenizer *t)
{
    return tokenizer_special(t).add_bos ? tokenizer_special(t).bos : -1;
}

// ---- Texts ----

// Cuts a text into as many contexts as are wanted, one after the other, each followed by its continuation.
static kvb_status make_contexts(calib_file *out, maker *m, const int32_t *ids, size_t n)
{
    int32_t bos = bos_of(m->t);
    size_t one = m->r->n_tokens - (bos >= 0), behind = m->r->n_continued ? m->r->n_continued * m->r->n_answer + 1 : 0;
    size_t whole = n / (one + behind), wanted = m->r->n_contexts ? m->r->n_contexts : whole ? whole : 1;
    if (wanted > 1 && wanted > whole)
        return kvb_fail(m->err, KVB_ARGUMENT, "%s: has %zu tokens, expected %zu x %zu; give --contexts %zu at most",
                        m->name, n, wanted, one + behind, whole);
    kvb_status status = KVB_OK;
    for (size_t i = 0; status == KVB_OK && i < wanted; i++) {
        char id[CONTEXT_ID_MAX + 1];
        calib_default_id(id, m->name, i ? i + 1 : 0);
        status = begin_context(out, m, id);
        if (status == KVB_OK) status = cut_context(m, bos, ids + i * (one + behind), n - i * (one + behind));
        if (status == KVB_OK) status = add_made(m);
    }
    return status;
}

kvb_status calib_make_of_text(calib_file *out, const calib_recipe *recipe, const tokenizer *t, const char *name,
                              const char *text, size_t size, kvb_error *err)
{
    maker m = {.r = recipe, .t = t, .name = name, .err = err};
    int32_t *ids = NULL;
    size_t n = 0;
    kvb_status status = utf8_check_text(name, text, size, err);
    if (status == KVB_OK) status = encode(&m, text, size, &ids, &n);
    if (status == KVB_OK) status = make_contexts(out, &m, ids, n);
    free(ids);
    return status;
}

// Ids that are given keep their BOS, and get none if they have none.
static kvb_status make_of_ids(calib_file *out, maker *m, const calib_context *from, const int32_t *ids, size_t n)
{
    int32_t bos = from->context_ids ? -1 : bos_of(m->t);
    if (from->context_ids && n && ids[0] == tokenizer_special(m->t).bos) {
        bos = *ids++;
        n--;
    }
    kvb_status status = begin_context(out, m, from->sample_id);
    if (status == KVB_OK) status = check_ids(m, "context_ids", ids, n);
    if (status == KVB_OK) status = cut_context(m, bos, ids, n);
    for (size_t i = 0; status == KVB_OK && i < from->n_questions && i < m->r->n_own; i++)
        status = add_own(m, from, &from->questions[i]);
    return status == KVB_OK ? add_made(m) : status;
}

kvb_status calib_make_of_context(calib_file *out, const calib_recipe *recipe, const tokenizer *t, const char *name,
                                 const calib_context *context, kvb_error *err)
{
    maker m = {.r = recipe, .t = t, .name = name, .err = err};
    int32_t *ids = NULL;
    size_t n = context->n_context_ids;
    kvb_status status = context->context ? encode(&m, context->context, strlen(context->context), &ids, &n) : KVB_OK;
    if (status == KVB_OK) status = make_of_ids(out, &m, context, ids ? ids : context->context_ids, n);
    free(ids);
    return status;
}
