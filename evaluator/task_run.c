#include "evaluator/task_run.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

kvb_status task_context_ids(int32_t **ids, uint32_t *n, const model *m, const task_sample *sample, kvb_error *err)
{
    int32_t *text = NULL;
    size_t n_text = 0, bos = tokenizer_add_bos(m->tokens) && tokenizer_bos(m->tokens) >= 0;
    *ids = NULL;
    kvb_status status =
        tokenizer_encode(m->tokens, sample->context, strlen(sample->context), false, &text, &n_text, err);
    if (status == KVB_OK && n_text + bos > m->config.context_length)
        status = kvb_fail(err, KVB_ARGUMENT, "sample %s: %zu tokens, the model was trained for %u", sample->id,
                          n_text + bos, m->config.context_length);
    if (status == KVB_OK && !(*ids = malloc((n_text + 2) * sizeof **ids)))
        status = kvb_fail(err, KVB_MEMORY, "sample %s: no memory for %zu ids", sample->id, n_text);
    if (status == KVB_OK) {
        if (bos) (*ids)[0] = tokenizer_bos(m->tokens);
        memcpy(*ids + bos, text, n_text * sizeof **ids);
        *n = (uint32_t)(n_text + bos);
    }
    free(text);
    return status;
}

// One question on its way.
typedef struct talk {
    kv_cache *cache;
    int32_t *ids; // question, then answer
    size_t n_question, n;
    bool done;
} talk;

static kvb_status encode_question(talk *k, const model *m, const task *t, const task_question *q, kvb_error *err)
{
    kvb_status status = tokenizer_encode(m->tokens, q->text, strlen(q->text), false, &k->ids, &k->n_question, err);
    if (status != KVB_OK) return status;
    if (k->n_question == 0) return kvb_fail(err, KVB_ARGUMENT, "task %s: a question without tokens", t->spec);
    int32_t *longer = realloc(k->ids, (k->n_question + task_new_tokens(t->kind)) * sizeof *longer);
    if (!longer) return kvb_fail(err, KVB_MEMORY, "task %s: no memory for an answer", t->spec);
    k->ids = longer;
    k->n = k->n_question;
    return KVB_OK;
}

static void close_talks(talk *talks, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        kv_cache_close(talks[i].cache);
        free(talks[i].ids);
    }
}

kvb_status task_positions(uint32_t *out, const model *m, const task *t, const task_sample *sample, kvb_error *err)
{
    size_t most = 0;
    kvb_status status = KVB_OK;
    for (size_t i = 0; status == KVB_OK && i < sample->n_questions; i++) {
        talk k = {0};
        status = encode_question(&k, m, t, &sample->questions[i], err);
        most = k.n_question > most ? k.n_question : most;
        close_talks(&k, 1);
    }
    *out = (uint32_t)most + task_new_tokens(t->kind);
    return status;
}

static bool ends_answer(const tokenizer *tokens, int32_t id)
{
    return id == tokenizer_eos(tokens) || (id >= 0 && id == tokenizer_eot(tokens));
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

static kvb_status take_token(talk *k, const model *m, const float *logits, kvb_error *err)
{
    int32_t id = -1;
    kvb_status status = pick_token(&id, logits, m->config.vocabulary, err);
    k->done = ends_answer(m->tokens, id);
    if (!k->done) k->ids[k->n++] = id;
    return status;
}

// One pass of all talks that are not done: with the whole question, or with the last token.
static kvb_status step_talks(talk *talks, size_t n, bool whole, decoder *d, const model *m, float *logits,
                             kvb_error *err)
{
    kv_cache *caches[TASK_MAX_QUESTIONS];
    uint32_t rows[TASK_MAX_QUESTIONS], n_active = 0;
    size_t total = 0;
    talk *active[TASK_MAX_QUESTIONS];
    for (size_t i = 0; i < n; i++) {
        if (talks[i].done) continue;
        active[n_active] = &talks[i];
        caches[n_active] = talks[i].cache;
        rows[n_active] = whole ? (uint32_t)talks[i].n_question : 1;
        total += rows[n_active++];
    }
    int32_t *ids = malloc(total * sizeof *ids), *at = ids;
    if (!ids) return kvb_fail(err, KVB_MEMORY, "decoding: no memory for %zu ids", total);
    for (uint32_t i = 0; i < n_active; at += rows[i++])
        memcpy(at, active[i]->ids + active[i]->n - rows[i], rows[i] * sizeof *at);
    kvb_status status = decoder_run(d, caches, n_active, rows, ids, NULL, LOGITS_LAST, logits, err);
    for (uint32_t i = 0; status == KVB_OK && i < n_active; i++)
        status = take_token(active[i], m, logits + (size_t)i * m->config.vocabulary, err);
    free(ids);
    return status;
}

static bool all_done(const talk *talks, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!talks[i].done) return false;
    return true;
}

// One question under a policy: the first n_question steps read the question, the others write the answer.
static kvb_status follow_policy(talk *k, decoder *d, const model *m, uint32_t new_tokens, policy_run *run,
                                float *logits, kvb_error *err)
{
    const uint32_t one = 1;
    const decode_hooks hooks = policy_run_hooks(run);
    kvb_status status = KVB_OK;
    policy_run_restart(run);
    for (size_t i = 0; i + 1 < k->n_question + new_tokens && !k->done && status == KVB_OK; i++) {
        bool last = i + 1 >= k->n_question;
        status = decoder_run(d, &k->cache, 1, &one, &k->ids[i], &hooks, LOGITS_LAST, last ? logits : NULL, err);
        if (status == KVB_OK && i + 1 == k->n_question) status = policy_run_turn(run, k->cache, err);
        if (status == KVB_OK && last) status = take_token(k, m, logits, err);
    }
    return status;
}

static kvb_status answer_batch(talk *talks, size_t n, decoder *d, const model *m, const kv_cache *context,
                               const task *t, const task_question *questions, policy_run *run, kvb_error *err)
{
    uint32_t new_tokens = task_new_tokens(t->kind);
    float *logits = malloc(n * m->config.vocabulary * sizeof *logits);
    kvb_status status = logits ? KVB_OK : kvb_fail(err, KVB_MEMORY, "task %s: no memory for logits", t->spec);
    for (size_t i = 0; status == KVB_OK && i < n; i++) {
        status = encode_question(&talks[i], m, t, &questions[i], err);
        if (status == KVB_OK)
            status = kv_cache_fork(&talks[i].cache, context, (uint32_t)talks[i].n_question + new_tokens, err);
    }
    if (status == KVB_OK && run) status = follow_policy(talks, d, m, new_tokens, run, logits, err);
    for (uint32_t step = 0; !run && status == KVB_OK && step < new_tokens && !all_done(talks, n); step++)
        status = step_talks(talks, n, step == 0, d, m, logits, err);
    free(logits);
    return status;
}

static kvb_status read_answer(task_answers *out, const talk *k, const model *m, const task *t, const task_question *q,
                              kvb_error *err)
{
    size_t size = tokenizer_decode(m->tokens, k->ids + k->n_question, k->n - k->n_question, NULL, 0);
    char *text = malloc(size + 1);
    if (!text) return kvb_fail(err, KVB_MEMORY, "task %s: no memory for an answer", t->spec);
    tokenizer_decode(m->tokens, k->ids + k->n_question, k->n - k->n_question, text, size);
    text[size] = '\0';
    out->text[out->n] = text;
    out->score[out->n++] = task_score(task_rule_of(t->kind), text, q->gold, q->n_gold);
    return KVB_OK;
}

kvb_status task_answer(task_answers *out, decoder *d, const model *m, const kv_cache *context, const task *t,
                       const task_sample *sample, policy_run *run, uint32_t together, kvb_error *err)
{
    kvb_status status = KVB_OK;
    memset(out, 0, sizeof *out);
    if (together == 0 || run) together = 1;
    if (together > TASK_MAX_QUESTIONS) together = TASK_MAX_QUESTIONS;
    for (size_t first = 0; status == KVB_OK && first < sample->n_questions; first += together) {
        talk talks[TASK_MAX_QUESTIONS] = {0};
        size_t n = sample->n_questions - first < together ? sample->n_questions - first : together;
        status = answer_batch(talks, n, d, m, context, t, sample->questions + first, run, err);
        for (size_t i = 0; status == KVB_OK && i < n; i++)
            status = read_answer(out, &talks[i], m, t, &sample->questions[first + i], err);
        close_talks(talks, n);
    }
    for (size_t i = 0; i < out->n; i++) out->mean += out->score[i] / (double)out->n;
    if (status != KVB_OK) task_answers_free(out);
    return status;
}

void task_answers_free(task_answers *answers)
{
    for (size_t i = 0; i < answers->n; i++) free(answers->text[i]);
    memset(answers, 0, sizeof *answers);
}
