#include "evaluator/task_run.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

kvb_status task_context_ids(int32_t **ids, uint32_t *n, const model *m, const model_text *text,
                            const task_sample *sample, kvb_error *err)
{
    int32_t *own = NULL;
    size_t n_text = 0, bos = model_text_begins_with_bos(text);
    *ids = NULL;
    kvb_status status =
        model_text_encode(text, TEXT_CONTEXT, sample->context, strlen(sample->context), &own, &n_text, err);
    if (status == KVB_OK && n_text + bos > m->config.context_length)
        status = kvb_fail(err, KVB_ARGUMENT, "sample %s: %zu tokens, the model was trained for %u", sample->id,
                          n_text + bos, m->config.context_length);
    if (status == KVB_OK) {
        *ids = need(n_text + bos, sizeof **ids, "token ids");
        if (bos) (*ids)[0] = text->special.bos;
        memcpy(*ids + bos, own, n_text * sizeof **ids);
        *n = (uint32_t)(n_text + bos);
    }
    free(own);
    return status;
}

// One question on its way.
typedef struct talk {
    task_turn *turn;
    int32_t *ids; // question, then answer
    size_t n_question, n;
    size_t fed; // tokens that the model has seen
    bool done;
} talk;

static kvb_status encode_question(talk *k, const model_text *text, const task *t, const task_question *q,
                                  kvb_error *err)
{
    kvb_status status = model_text_encode(text, TEXT_QUESTION, q->text, strlen(q->text), &k->ids, &k->n_question, err);
    if (status != KVB_OK) return status;
    if (k->n_question == 0) return kvb_fail(err, KVB_ARGUMENT, "task %s: a question without tokens", t->spec);
    k->ids = need_more(k->ids, k->n_question + task_new_tokens(t->kind), sizeof *k->ids, "token ids");
    k->n = k->n_question;
    return KVB_OK;
}

kvb_status task_positions(uint32_t *out, const model_text *text, const task *t, const task_sample *sample,
                          kvb_error *err)
{
    size_t most = 0;
    kvb_status status = KVB_OK;
    for (size_t i = 0; status == KVB_OK && i < sample->n_questions; i++) {
        talk k = {0};
        status = encode_question(&k, text, t, &sample->questions[i], err);
        most = k.n_question > most ? k.n_question : most;
        free(k.ids);
    }
    *out = (uint32_t)most + task_new_tokens(t->kind);
    return status;
}

// The largest logit; ties go to the lower id. NaN is an error.
static kvb_status pick_token(int32_t *id, const float *logits, uint32_t n, kvb_error *err)
{
    uint32_t best = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (logits[i] != logits[i])
            return kvb_fail(err, KVB_NUMERIC, "decoding: the logit of token %u is not a number", i);
        if (logits[i] > logits[best]) best = i;
    }
    *id = (int32_t)best;
    return KVB_OK;
}

// The answer so far, as text and score.
static void read_answer(const talk *k, const model_text *text, const task *t)
{
    const task_question *q = k->turn->question;
    free(k->turn->answer);
    k->turn->answer = model_text_decode(text, k->ids + k->n_question, k->n - k->n_question, NULL);
    k->turn->score = task_score(task_rule_of(t->kind), k->turn->answer, q->gold, q->n_gold);
}

static kvb_status take_token(talk *k, const model_text *text, const task *t, const float *logits, kvb_error *err)
{
    const task_question *q = k->turn->question;
    int32_t id = -1;
    kvb_status status = pick_token(&id, logits, text->vocabulary, err);
    if (status != KVB_OK) return status;
    k->done = model_text_ends_answer(text, id);
    if (!k->done) k->ids[k->n++] = id;
    read_answer(k, text, t);
    if (k->n == k->n_question + task_new_tokens(t->kind) ||
        task_score_is_final(task_rule_of(t->kind), k->turn->answer, q->gold, q->n_gold))
        k->done = true;
    return KVB_OK;
}

// What the decoder is given in a step; arrays [talks], ids [rows].
typedef struct step {
    talk **active;
    kv_cache **caches;
    uint32_t *rows;
    decode_hooks *hooks;
    int32_t *ids;
    float *logits; // [talks, vocabulary]
    uint32_t n;
} step;

static step step_open(const talk *talks, size_t n, uint32_t vocabulary)
{
    size_t rows = n;
    for (size_t i = 0; i < n; i++) rows += talks[i].n_question;
    return (step){.active = need(n, sizeof(talk *), "questions"),
                  .caches = need(n, sizeof(kv_cache *), "questions"),
                  .rows = need(n, sizeof(uint32_t), "questions"),
                  .hooks = need(n, sizeof(decode_hooks), "questions"),
                  .ids = need(rows, sizeof(int32_t), "token ids"),
                  .logits = need(n * vocabulary, sizeof(float), "logits")};
}

static void step_close(step *s)
{
    free(s->active);
    free(s->caches);
    free(s->rows);
    free(s->hooks);
    free(s->ids);
    free(s->logits);
}

// Lists the talks that go on and what each feeds to the model.
static void step_gather(step *s, talk *talks, size_t n)
{
    size_t at = 0;
    s->n = 0;
    for (size_t i = 0; i < n; i++) {
        talk *k = &talks[i];
        if (k->done) continue;
        uint32_t rows = k->turn->run || k->fed ? 1 : (uint32_t)k->n_question;
        memcpy(s->ids + at, k->ids + k->fed, rows * sizeof *s->ids);
        at += rows;
        s->active[s->n] = k;
        s->caches[s->n] = k->turn->cache;
        s->rows[s->n] = rows;
        s->hooks[s->n++] = k->turn->run ? policy_run_hooks(k->turn->run) : (decode_hooks){0};
    }
}

static kvb_status step_take(step *s, const model_text *text, const task *t, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; i < s->n && status == KVB_OK; i++) {
        talk *k = s->active[i];
        k->fed += s->rows[i];
        if (k->turn->run && k->fed == k->n_question) status = policy_run_turn(k->turn->run, k->turn->cache, err);
        if (status == KVB_OK && k->fed >= k->n_question)
            status = take_token(k, text, t, s->logits + (size_t)i * text->vocabulary, err);
    }
    return status;
}

kvb_status task_answer(task_turn *turns, size_t n, decoder *d, const model_text *text, const task *t, kvb_error *err)
{
    step s = {0};
    talk *talks = need(n, sizeof *talks, "questions");
    kvb_status status = KVB_OK;
    for (size_t i = 0; status == KVB_OK && i < n; i++) {
        turns[i].answer = NULL;
        talks[i].turn = &turns[i];
        status = encode_question(&talks[i], text, t, turns[i].question, err);
    }
    if (status == KVB_OK) s = step_open(talks, n, text->vocabulary);
    while (status == KVB_OK) {
        step_gather(&s, talks, n);
        if (!s.n) break;
        status = decoder_run(d, s.caches, s.n, s.rows, s.ids, s.hooks, LOGITS_LAST, s.logits, err);
        if (status == KVB_OK) status = step_take(&s, text, t, err);
    }
    for (size_t i = 0; i < n; i++) {
        free(talks[i].ids);
        if (status == KVB_OK || !talks[i].turn) continue;
        free(turns[i].answer);
        turns[i].answer = NULL;
    }
    step_close(&s);
    free(talks);
    return status;
}
