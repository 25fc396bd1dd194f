#include "evaluator/task_study.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROWS = 1024,  // that the decoder runs at once: questions of some dozen cells
    TURNS = 256,  // that are answered together, if their caches fit: a step reads the weights once for all of them
    SAMPLES = 16, // that they are of
    SPARE = 32    // tokens by which a session is longer than the sample that it was opened for
};
static const size_t BYTES = 1u << 30; // of caches that are open together; one is always allowed

// A cell that is being measured on one sample. If it evicts once, all questions share a cache; a policy makes one for
// each question.
typedef struct bench_cell {
    task_cell *cell;
    struct sample_bench *of;
    policy_run *run;
    kv_cache *context;
} bench_cell;

// A question that is answered over one cache.
typedef struct task_turn {
    bench_cell *owner;
    uint32_t index; // of the question in its sample
    const task_question *question;
    kv_cache *cache; // of the context, with room for the question and the answer, which are appended
    int32_t *ids;    // question, then answer
    size_t n_question, n;
    size_t fed; // tokens that the model has seen
    bool done;
    double score; // of the answer so far, 0 to 1
} task_turn;

typedef struct sample_bench {
    task_sample sample;
    char hash[65];
    uint32_t index, n_tokens, extra, rows; // rows: of the longest question
    bench_cell *cells;                     // [n] of the cells that are missing
    size_t n;
    bool asked; // all its questions are among the turns, or answered
} sample_bench;

struct task_bench {
    session *session; // NULL: none yet
    session_plan plan;
    metric *metrics;
    sample_bench *samples[SAMPLES]; // the last one is in the session
    size_t n_samples;
    task_turn *turns; // [TURNS] questions that are answered together
    size_t n_turns, bytes;
};

// ---- Answers of the model ----

// Encodes a sample's context, BOS first if texts begin with it. The caller frees *ids.
static kvb_status sample_context_ids(int32_t **ids, uint32_t *n, const model *m, const model_text *text,
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

static kvb_status encode_question(task_turn *k, const task_study *s, kvb_error *err)
{
    const task_question *q = k->question;
    kvb_status status = model_text_encode_question(s->text, q->text, q->prefix, &k->ids, &k->n_question, err);
    if (status != KVB_OK) return status;
    if (k->n_question == 0) return kvb_fail(err, KVB_ARGUMENT, "task %s: a question without tokens", s->t->spec);
    k->ids = need_more(k->ids, k->n_question + s->t->kind->new_tokens, sizeof *k->ids, "token ids");
    k->n = k->n_question;
    return KVB_OK;
}

// Counts how many positions after the context the longest question and its answer can take.
static kvb_status count_positions(sample_bench *x, const task_study *s, kvb_error *err)
{
    size_t most = 0;
    kvb_status status = KVB_OK;
    for (size_t i = 0; status == KVB_OK && i < x->sample.n_questions; i++) {
        task_turn k = {.question = &x->sample.questions[i]};
        status = encode_question(&k, s, err);
        most = k.n_question > most ? k.n_question : most;
        free(k.ids);
    }
    x->rows = (uint32_t)most;
    x->extra = x->rows + s->t->kind->new_tokens;
    return status;
}

// Picks the token with the largest logit; ties go to the lower id. Fails with KVB_NUMERIC if a logit is NaN.
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

static kvb_status take_token(task_turn *k, const task_study *s, const float *logits, kvb_error *err)
{
    const task_question *q = k->question;
    task_rule rule = s->t->kind->rule;
    int32_t id = -1;
    kvb_status status = pick_token(&id, logits, s->text->vocabulary, err);
    if (status != KVB_OK) return status;
    k->done = model_text_ends_answer(s->text, id);
    if (!k->done) k->ids[k->n++] = id;
    char *answer = model_text_decode(s->text, k->ids + k->n_question, k->n - k->n_question, NULL);
    k->score = task_score(rule, answer, q->gold, q->n_gold);
    if (k->n == k->n_question + s->t->kind->new_tokens || task_score_is_final(rule, answer, q->gold, q->n_gold))
        k->done = true;
    free(answer);
    return KVB_OK;
}

// What the decoder gets in one step: arrays of [turns], ids of [rows].
typedef struct decode_step {
    task_turn **active;
    kv_cache **caches;
    uint32_t *rows;
    decode_hooks *hooks;
    int32_t *ids;
    float *logits; // [turns, vocabulary]
    uint32_t n;
} decode_step;

static decode_step step_open(const task_bench *b, uint32_t vocabulary)
{
    size_t n = b->n_turns;
    return (decode_step){.active = need(n, sizeof(task_turn *), "questions"),
                         .caches = need(n, sizeof(kv_cache *), "questions"),
                         .rows = need(n, sizeof(uint32_t), "questions"),
                         .hooks = need(n, sizeof(decode_hooks), "questions"),
                         .ids = need(b->plan.max_rows, sizeof(int32_t), "token ids"),
                         .logits = need(n * vocabulary, sizeof(float), "logits")};
}

// Collects the tokens that the model gets next: of questions that it has not seen, as many as fit into max_rows, or, if
// there are none, one of every question that is not answered. Returns false if all are.
static bool step_gather(decode_step *s, const task_bench *b)
{
    task_turn *end = b->turns + b->n_turns;
    bool reading = false;
    for (task_turn *k = b->turns; k < end; k++) reading = reading || (!k->fed && !k->owner->run);
    size_t at = 0;
    s->n = 0;
    for (task_turn *k = b->turns; k < end; k++) {
        policy_run *run = k->owner->run;
        uint32_t rows = reading ? (uint32_t)k->n_question : 1;
        if (k->done || (reading && (run || k->fed || at + rows > b->plan.max_rows))) continue;
        memcpy(s->ids + at, k->ids + k->fed, rows * sizeof *s->ids);
        at += rows;
        s->active[s->n] = k;
        s->caches[s->n] = k->cache;
        s->rows[s->n] = rows;
        s->hooks[s->n++] = run ? policy_run_hooks(run) : (decode_hooks){0};
    }
    return s->n > 0;
}

static kvb_status step_take(decode_step *step, const task_study *s, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; i < step->n && status == KVB_OK; i++) {
        task_turn *k = step->active[i];
        policy_run *run = k->owner->run;
        k->fed += step->rows[i];
        if (run && k->fed == k->n_question) status = policy_run_turn(run, k->cache, err);
        if (status == KVB_OK && k->fed >= k->n_question)
            status = take_token(k, s, step->logits + (size_t)i * s->text->vocabulary, err);
    }
    return status;
}

// Answers all turns together, greedily (ties: lower id). A question goes through the model at once, or token by token
// under a policy, for which a new turn begins after it. An answer ends at an end token, after the task's number of new
// tokens, or when nothing that followed could change its score.
static kvb_status answer_turns(task_study *s, kvb_error *err)
{
    task_bench *b = s->bench;
    decode_step step = step_open(b, s->text->vocabulary);
    kvb_status status = KVB_OK;
    while (status == KVB_OK && step_gather(&step, b)) {
        status = decoder_run(b->session->decode, step.caches, step.n, step.rows, step.ids, step.hooks, LOGITS_LAST,
                             step.logits, err);
        if (status == KVB_OK) status = step_take(&step, s, err);
    }
    free_all(step.active, step.caches, step.rows, step.hooks, step.ids, step.logits);
    return status;
}

// ---- Cells and their names ----

static void list_cells(task_study *s, const double *ratios, size_t n_ratios)
{
    s->n_cells = 1 + s->methods.n_columns * n_ratios;
    s->cells = need(s->n_cells, sizeof *s->cells, "cells");
    for (size_t i = 0; i < s->n_cells; i++) {
        s->cells[i].samples = need(s->n_samples, sizeof(task_result), "samples");
        if (i == 0) continue; // the full cache
        s->cells[i].column = &s->methods.columns[(i - 1) / n_ratios];
        s->cells[i].ratio = ratios[(i - 1) % n_ratios];
    }
}

kvb_status task_study_open(task_study *s, const double *ratios, size_t n_ratios, kvb_error *err)
{
    list_cells(s, ratios, n_ratios);
    return s->log ? log_open(&s->known, s->log, err) : KVB_OK;
}

// Hashes the sample's own words, so that other texts, haystacks and lengths are other samples.
static void hash_sample(const task_sample *sample, char out[65])
{
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    needed(to, "samples");
    fprintf(to, "%s\n%s\n", sample->id, sample->context);
    for (size_t i = 0; i < sample->n_questions; i++) {
        fprintf(to, "%s%s\n", sample->questions[i].text, sample->questions[i].prefix);
        for (size_t k = 0; k < sample->questions[i].n_gold; k++) fprintf(to, "%s\n", sample->questions[i].gold[k]);
    }
    needed(fclose(to) == 0 ? text : NULL, "samples");
    sha256_hex(text, size, out);
    free(text);
}

// Hashes everything that a result depends on into the key that names the result in the log.
static void name_result(const task_study *s, const task_cell *c, const char *sample, char key[LOG_KEY])
{
    const method_column *column = c->column;
    const method *m = column ? &s->methods.methods[column->method] : NULL;
    char text[1024];
    int n = snprintf(text, sizeof text, "kvbudget-task 2\n%s\n%s %s\n%s\n%s\n%s\n%s\n%.17g\n%u %u", s->m->sha256,
                     s->m->device->b->name, s->m->device->b->compute, s->t->spec, sample, m ? method_name(m) : "full",
                     column ? column->how->identity : "", c->ratio, m ? m->sink : 0, m ? m->window : 0);
    if (column && s->refit) n += snprintf(text + n, sizeof text - (size_t)n, "\nrefit 3 %u", s->refit);
    sha256_hex(text, (size_t)n, key);
}

kvb_status task_result_read(task_result *out, const log_file *log, const char *key, kvb_error *err)
{
    const cJSON *line = log_find(log, key), *scores = cJSON_GetObjectItemCaseSensitive(line, "scores");
    int n = cJSON_IsArray(scores) ? cJSON_GetArraySize(scores) : 0;
    *out = (task_result){.kept = log_number(line, "kept"), .looked = log_number(line, "looked")};
    if (!line) return KVB_OK;
    if (n < 1 || n > TASK_MAX_QUESTIONS || !(out->kept >= 0) || out->looked < 0) return log_refuse(log, key, err);
    out->n_questions = (uint32_t)n;
    out->scores = need((size_t)n, sizeof *out->scores, "questions");
    out->done = log_numbers(out->scores, out->n_questions, line, "scores");
    if (out->done) return KVB_OK;
    free(out->scores);
    out->scores = NULL;
    return log_refuse(log, key, err);
}

static kvb_status recall(task_study *s, task_cell *c, uint32_t index, const char *sample, kvb_error *err)
{
    char key[LOG_KEY];
    name_result(s, c, sample, key);
    kvb_status status = task_result_read(&c->samples[index], s->known, key, err);
    s->n_resumed += c->samples[index].done;
    return status;
}

static kvb_status remember(task_study *s, const task_cell *c, uint32_t index, const char *sample, kvb_error *err)
{
    char key[LOG_KEY];
    const task_result *r = &c->samples[index];
    if (!s->known) return KVB_OK;
    name_result(s, c, sample, key);
    cJSON *about = cJSON_CreateObject();
    const char *how = c->column ? method_name(&s->methods.methods[c->column->method]) : "full";
    json_put(about, "task %s method %s allocator %s ratio %g key %s", s->t->spec, how,
             c->column ? c->column->how->label : "", c->ratio, key);
    if (c->column && s->refit) json_put(about, "refit %u", s->refit);
    log_put_number(about, "kept", r->kept);
    log_put_number(about, "looked", r->looked); // NaN becomes null
    log_put_numbers(about, "scores", r->scores, r->n_questions);
    return log_add(s->known, &about, 1, err);
}

// ---- Samples that are answered together ----

static task_bench *bench_open(const task_study *s)
{
    task_bench *b = need(1, sizeof *b, "studies");
    b->turns = need(TURNS, sizeof *b->turns, "questions");
    b->plan = (session_plan){.attention = method_needs_attention(&s->methods), .refit = s->refit};
    b->plan.metrics = b->metrics = method_metrics(&b->plan.n_metrics, &s->methods);
    return b;
}

static void close_sample(sample_bench *x)
{
    for (size_t i = 0; i < x->n; i++) {
        policy_run_close(x->cells[i].run);
        kv_cache_close(x->cells[i].context); // still open if refitting failed
    }
    task_sample_free(&x->sample);
    free_all(x->cells, x);
}

static void close_turns(task_bench *b)
{
    for (size_t i = 0; i < b->n_turns; i++) {
        kv_cache_close(b->turns[i].cache);
        free(b->turns[i].ids);
    }
    for (size_t i = 0; i < b->n_turns; i++) { // once all of their turns are closed
        kv_cache_close(b->turns[i].owner->context);
        b->turns[i].owner->context = NULL;
    }
    b->n_turns = b->bytes = 0;
}

static void bench_close(task_bench *b)
{
    if (!b) return;
    close_turns(b);
    for (size_t i = 0; i < b->n_samples; i++) close_sample(b->samples[i]);
    session_close(b->session);
    free_all(b->turns, b->metrics, b);
}

void task_study_close(task_study *s)
{
    for (size_t i = 0; s->cells && i < s->n_cells; i++) {
        for (uint32_t k = 0; k < s->n_samples; k++) free(s->cells[i].samples[k].scores);
        free(s->cells[i].samples);
    }
    free(s->cells);
    s->cells = NULL;
    bench_close(s->bench);
    s->bench = NULL;
    (void)log_close(s->known, KVB_OK, NULL); // every line was synced when it was added
    s->known = NULL;
}

static kvb_status finish_sample(task_study *s, const sample_bench *x, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < x->n && status == KVB_OK; i++) {
        task_result *r = &x->cells[i].cell->samples[x->index];
        if (x->cells[i].run) r->looked = policy_run_looked(x->cells[i].run) / x->n_tokens;
        r->done = true;
        s->n_answered++;
        status = remember(s, x->cells[i].cell, x->index, x->hash, err);
    }
    s->n_done += status == KVB_OK;
    return status;
}

// Answers the turns, and finishes the samples whose last questions were among them.
static kvb_status answer_bench(task_study *s, kvb_error *err)
{
    task_bench *b = s->bench;
    kvb_status status = b->n_turns ? answer_turns(s, err) : KVB_OK;
    for (const task_turn *k = b->turns; status == KVB_OK && k < b->turns + b->n_turns; k++)
        k->owner->cell->samples[k->owner->of->index].scores[k->index] = k->score;
    close_turns(b);
    size_t n = b->n_samples;
    b->n_samples = 0;
    for (size_t i = 0; i < n; i++) {
        sample_bench *x = b->samples[i];
        if (status == KVB_OK && x->asked) status = finish_sample(s, x, err);
        if (x->asked) close_sample(x);
        else b->samples[b->n_samples++] = x;
    }
    return status;
}

// ---- One sample ----

static kvb_status open_policies(const task_study *s, sample_bench *x, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < x->n && status == KVB_OK; i++) {
        const task_cell *c = x->cells[i].cell;
        if (!c->column || !s->methods.methods[c->column->method].p.kind) continue;
        status = method_policy(&x->cells[i].run, s->m, &s->methods, c->column, c->ratio, x->n_tokens, x->extra, err);
    }
    return status;
}

static kvb_status prefill(task_study *s, sample_bench *x, const int32_t *ids, kvb_error *err)
{
    policy_run **open = need(x->n, sizeof *open, "cells");
    size_t n = 0;
    for (size_t i = 0; i < x->n; i++)
        if (x->cells[i].run) open[n++] = x->cells[i].run;
    policy_watch watch = {open, n};
    layer_observer observer = policy_observer(&watch);
    kvb_status status = session_prefill(s->bench->session, ids, x->n_tokens, n ? &observer : NULL, NULL, err);
    free(open);
    return status;
}

static void note_kept(const task_study *s, const bench_cell *c, const kv_cache *cache)
{
    c->cell->samples[c->of->index].kept = model_kept_share(&s->m->config, kv_cache_entries(cache), c->of->n_tokens);
}

// Opens the cache that all questions of a cell share.
static kvb_status open_context(task_study *s, bench_cell *c, kvb_error *err)
{
    session *from = s->bench->session;
    const method_column *column = c->cell->column;
    kept_set kept = {0};
    kvb_status status = KVB_OK;
    if (column) status = method_select(from, &s->methods, column, c->cell->ratio, NULL, &kept, err);
    if (status != KVB_OK) return status;
    c->context = session_cache(from, column ? &kept : NULL, 0);
    status = session_refit(from, column ? &kept : NULL, c->context, err);
    if (status == KVB_OK && kept.formats) status = kv_cache_pack(c->context, kept.formats, err);
    kept_set_free(&kept);
    s->bench->bytes += kv_cache_allocated(c->context);
    note_kept(s, c, c->context);
    return status;
}

static kvb_status add_turn(task_study *s, bench_cell *c, uint32_t question, kvb_error *err)
{
    task_bench *b = s->bench;
    task_turn *k = &b->turns[b->n_turns++];
    *k = (task_turn){.owner = c, .index = question, .question = &c->of->sample.questions[question]};
    kvb_status status = encode_question(k, s, err);
    if (status == KVB_OK && !c->run && !c->context) status = open_context(s, c, err);
    if (status != KVB_OK) return status;
    k->cache = c->run ? policy_run_cache(c->run, b->session, c->of->extra) : kv_cache_extend(c->context, c->of->extra);
    if (c->run) note_kept(s, c, k->cache);
    b->bytes += kv_cache_allocated(k->cache);
    return KVB_OK;
}

// Whether there is room for another question, and no policy would have to answer two at once.
static bool has_place(const task_bench *b, const bench_cell *c)
{
    for (size_t i = 0; c->run && i < b->n_turns; i++)
        if (b->turns[i].owner == c) return false;
    return b->n_turns < TURNS && b->bytes < BYTES;
}

static kvb_status take_turn(task_study *s, bench_cell *c, uint32_t question, kvb_error *err)
{
    kvb_status status = s->bench->n_turns == 0 || has_place(s->bench, c) ? KVB_OK : answer_bench(s, err);
    return status == KVB_OK ? add_turn(s, c, question, err) : status;
}

static kvb_status ask_all(task_study *s, sample_bench *x, kvb_error *err)
{
    uint32_t n_questions = (uint32_t)x->sample.n_questions;
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < x->n && status == KVB_OK; i++) // cell by cell, so that a shared cache is closed early
        for (uint32_t q = 0; q < n_questions && !x->cells[i].run && status == KVB_OK; q++)
            status = take_turn(s, &x->cells[i], q, err);
    for (uint32_t q = 0; q < n_questions && status == KVB_OK; q++)
        for (size_t i = 0; i < x->n && status == KVB_OK; i++)
            if (x->cells[i].run) status = take_turn(s, &x->cells[i], q, err);
    x->asked = status == KVB_OK;
    return status;
}

// Lists the cells that the log does not have, and makes room for their results.
static kvb_status list_missing(task_study *s, sample_bench *x, kvb_error *err)
{
    x->cells = need(s->n_cells, sizeof *x->cells, "cells");
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < s->n_cells && status == KVB_OK; i++) {
        task_result *r = &s->cells[i].samples[x->index];
        status = recall(s, &s->cells[i], x->index, x->hash, err);
        if (status != KVB_OK || r->done) continue;
        *r = (task_result){.n_questions = (uint32_t)x->sample.n_questions, .looked = NAN};
        r->scores = need(r->n_questions, sizeof *r->scores, "questions");
        x->cells[x->n++] = (bench_cell){.cell = &s->cells[i], .of = x};
    }
    return status;
}

// Makes the session large enough for a sample, with something to spare for the next ones.
static kvb_status fit_session(task_study *s, const sample_bench *x, kvb_error *err)
{
    task_bench *b = s->bench;
    session_plan *p = &b->plan;
    if (b->session && x->n_tokens <= p->max_tokens && x->extra <= p->max_new && x->rows <= p->max_rows) return KVB_OK;
    kvb_status status = answer_bench(s, err); // by the present decoder
    if (status != KVB_OK) return status;
    session_close(b->session);
    if (p->max_tokens < x->n_tokens + SPARE) p->max_tokens = x->n_tokens + SPARE;
    if (p->max_new < x->extra + SPARE) p->max_new = x->extra + SPARE;
    p->max_rows = x->rows > ROWS ? x->rows : ROWS;
    if ((uint64_t)p->max_tokens + p->max_new > s->m->config.context_length) {
        p->max_tokens = x->n_tokens;
        p->max_new = x->extra;
    }
    return session_open(&b->session, s->m, p, err);
}

// Prefills a sample and asks its questions in every cell that the log does not have.
static kvb_status ask_sample(task_study *s, sample_bench *x, kvb_error *err)
{
    int32_t *ids = NULL;
    kvb_status status = sample_context_ids(&ids, &x->n_tokens, s->m, s->text, &x->sample, err);
    if (status == KVB_OK) status = count_positions(x, s, err);
    if (status == KVB_OK) status = fit_session(s, x, err);
    if (status == KVB_OK) status = open_policies(s, x, err);
    if (status == KVB_OK) status = prefill(s, x, ids, err);
    s->bench->samples[s->bench->n_samples++] = x;
    if (status == KVB_OK) status = ask_all(s, x, err);
    free(ids);
    return status;
}

kvb_status task_study_add(task_study *s, uint32_t index, task_sample *sample, kvb_error *err)
{
    sample_bench *x = need(1, sizeof *x, "samples");
    x->sample = *sample;
    x->index = index;
    *sample = (task_sample){0};
    hash_sample(&x->sample, x->hash);
    kvb_status status = list_missing(s, x, err);
    if (status != KVB_OK || !x->n) {
        s->n_done += status == KVB_OK;
        close_sample(x);
        return status;
    }
    if (!s->bench) s->bench = bench_open(s);
    status = ask_sample(s, x, err);
    // Caches that wait need the rotary positions of their own length, which some models change with it.
    bool full = s->bench->n_samples == SAMPLES || rope_depends_on_length(&s->m->config.rope);
    return status == KVB_OK && full ? answer_bench(s, err) : status;
}

kvb_status task_study_answer(task_study *s, kvb_error *err)
{
    return s->bench ? answer_bench(s, err) : KVB_OK;
}

// ---- Over all samples ----

// Returns the uniform allocator's cell with the same method and ratio, or NULL.
static const task_cell *uniform_beside(const task_study *s, const task_cell *c)
{
    for (size_t i = 1; c->column && i < s->n_cells; i++)
        if (s->cells[i].column->how->kind == ALLOCATOR_UNIFORM && s->cells[i].column->method == c->column->method &&
            s->cells[i].ratio == c->ratio)
            return &s->cells[i];
    return NULL;
}

kvb_status task_summarize(const task_study *s, size_t cell, task_outcome *out, kvb_error *err)
{
    const task_cell *c = &s->cells[cell], *uniform = uniform_beside(s, c);
    const double **scores = need((size_t)s->n_samples * 2, sizeof *scores, "samples"), **others = scores + s->n_samples;
    uint32_t *counts = need(s->n_samples, sizeof *counts, "samples");
    *out = (task_outcome){.to_uniform = {NAN, NAN, NAN}};
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; status == KVB_OK && i < s->n_samples; i++) {
        const task_result *r = &c->samples[i];
        if (!r->done) {
            status = kvb_fail(err, KVB_ARGUMENT, "task %s: sample %u was not answered", s->t->spec, i);
            break;
        }
        scores[i] = r->scores;
        others[i] = uniform ? uniform->samples[i].scores : NULL;
        counts[i] = r->n_questions;
        out->n_questions += r->n_questions;
        out->kept += r->kept / s->n_samples;
        out->looked += r->looked / s->n_samples;
    }
    if (status == KVB_OK) {
        const value_groups groups = {scores, counts, s->n_samples};
        out->score = interval_share(&groups);
        if (uniform) out->to_uniform = interval_share_difference(&groups, others);
    }
    free_all(scores, counts);
    return status;
}
