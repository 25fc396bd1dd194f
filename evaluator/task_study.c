#include "evaluator/task_study.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 1024 };                 // that the decoder runs at once: questions of some dozen cells
static const size_t BYTES = 1u << 30; // of caches that are open together; one is always allowed

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

// One question that is being answered.
typedef struct asked_question {
    task_turn *turn;
    int32_t *ids; // question, then answer
    size_t n_question, n;
    size_t fed; // tokens that the model has seen
    bool done;
} asked_question;

static kvb_status encode_question(asked_question *k, const model_text *text, const task *t, const task_question *q,
                                  kvb_error *err)
{
    kvb_status status = model_text_encode_question(text, q->text, q->prefix, &k->ids, &k->n_question, err);
    if (status != KVB_OK) return status;
    if (k->n_question == 0) return kvb_fail(err, KVB_ARGUMENT, "task %s: a question without tokens", t->spec);
    k->ids = need_more(k->ids, k->n_question + t->kind->new_tokens, sizeof *k->ids, "token ids");
    k->n = k->n_question;
    return KVB_OK;
}

// Counts how many positions after the context the longest question and its answer can take.
static kvb_status count_positions(uint32_t *out, const model_text *text, const task *t, const task_sample *sample,
                                  kvb_error *err)
{
    size_t most = 0;
    kvb_status status = KVB_OK;
    for (size_t i = 0; status == KVB_OK && i < sample->n_questions; i++) {
        asked_question k = {0};
        status = encode_question(&k, text, t, &sample->questions[i], err);
        most = k.n_question > most ? k.n_question : most;
        free(k.ids);
    }
    *out = (uint32_t)most + t->kind->new_tokens;
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

// Decodes and scores the answer so far.
static void read_answer(const asked_question *k, const model_text *text, const task *t)
{
    const task_question *q = k->turn->question;
    free(k->turn->answer);
    k->turn->answer = model_text_decode(text, k->ids + k->n_question, k->n - k->n_question, NULL);
    k->turn->score = task_score(t->kind->rule, k->turn->answer, q->gold, q->n_gold);
}

static kvb_status take_token(asked_question *k, const model_text *text, const task *t, const float *logits,
                             kvb_error *err)
{
    const task_question *q = k->turn->question;
    int32_t id = -1;
    kvb_status status = pick_token(&id, logits, text->vocabulary, err);
    if (status != KVB_OK) return status;
    k->done = model_text_ends_answer(text, id);
    if (!k->done) k->ids[k->n++] = id;
    read_answer(k, text, t);
    if (k->n == k->n_question + t->kind->new_tokens ||
        task_score_is_final(t->kind->rule, k->turn->answer, q->gold, q->n_gold))
        k->done = true;
    return KVB_OK;
}

// What the decoder gets in one step: arrays of [talks], ids of [rows].
typedef struct decode_step {
    asked_question **active;
    kv_cache **caches;
    uint32_t *rows;
    decode_hooks *hooks;
    int32_t *ids;
    float *logits; // [talks, vocabulary]
    uint32_t n;
} decode_step;

static decode_step step_open(const asked_question *talks, size_t n, uint32_t vocabulary)
{
    size_t rows = n;
    for (size_t i = 0; i < n; i++) rows += talks[i].n_question;
    return (decode_step){.active = need(n, sizeof(asked_question *), "questions"),
                         .caches = need(n, sizeof(kv_cache *), "questions"),
                         .rows = need(n, sizeof(uint32_t), "questions"),
                         .hooks = need(n, sizeof(decode_hooks), "questions"),
                         .ids = need(rows, sizeof(int32_t), "token ids"),
                         .logits = need(n * vocabulary, sizeof(float), "logits")};
}

// Collects the questions that are not answered yet, and the tokens that each feeds to the model next.
static void step_gather(decode_step *s, asked_question *talks, size_t n)
{
    size_t at = 0;
    s->n = 0;
    for (size_t i = 0; i < n; i++) {
        asked_question *k = &talks[i];
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

static kvb_status step_take(decode_step *s, const model_text *text, const task *t, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; i < s->n && status == KVB_OK; i++) {
        asked_question *k = s->active[i];
        k->fed += s->rows[i];
        if (k->turn->run && k->fed == k->n_question) status = policy_run_turn(k->turn->run, k->turn->cache, err);
        if (status == KVB_OK && k->fed >= k->n_question)
            status = take_token(k, text, t, s->logits + (size_t)i * text->vocabulary, err);
    }
    return status;
}

// Answers n questions together, greedily (ties: lower id). A question goes through the model at once, or token by token
// under a policy, for which a new turn begins after it. An answer ends at an end token, after the task's number of new
// tokens, or when nothing that followed could change its score. On failure no answer has to be freed.
static kvb_status answer_turns(task_turn *turns, size_t n, decoder *d, const model_text *text, const task *t,
                               kvb_error *err)
{
    decode_step s = {0};
    asked_question *talks = need(n, sizeof *talks, "questions");
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
    free_all(s.active, s.caches, s.rows, s.hooks, s.ids, s.logits, talks);
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

void task_study_close(task_study *s)
{
    for (size_t i = 0; s->cells && i < s->n_cells; i++) {
        for (uint32_t k = 0; k < s->n_samples; k++) free(s->cells[i].samples[k].scores);
        free(s->cells[i].samples);
    }
    free(s->cells);
    s->cells = NULL;
    (void)log_close(s->known, KVB_OK, NULL); // every line was synced when it was added
    s->known = NULL;
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
    if (column && s->refit) n += snprintf(text + n, sizeof text - (size_t)n, "\nrefit 2 %u", s->refit);
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

// ---- One sample ----

// A cell that is being measured. If it evicts once, all questions share a cache; a policy makes one for each question.
typedef struct bench_cell {
    task_cell *cell;
    policy_run *run;
    kv_cache *context;
} bench_cell;

typedef struct sample_bench {
    task_study *s;
    const task_sample *sample;
    uint32_t index, n_tokens, extra, rows; // rows: of the longest question
    session *session;
    bench_cell *cells; // [n] of the cells that are missing
    size_t n;
    // Questions that are answered together:
    task_turn *turns;    // [ROWS]
    bench_cell **owners; // [ROWS]
    uint32_t *questions; // [ROWS]
    size_t n_turns, bytes;
} sample_bench;

static kvb_status open_policies(sample_bench *b, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < b->n && status == KVB_OK; i++) {
        const task_cell *c = b->cells[i].cell;
        if (!c->column || !b->s->methods.methods[c->column->method].p.kind) continue;
        status =
            method_policy(&b->cells[i].run, b->s->m, &b->s->methods, c->column, c->ratio, b->n_tokens, b->extra, err);
    }
    return status;
}

static kvb_status prefill(sample_bench *b, const int32_t *ids, kvb_error *err)
{
    policy_run **open = need(b->n, sizeof *open, "cells");
    size_t n = 0;
    for (size_t i = 0; i < b->n; i++)
        if (b->cells[i].run) open[n++] = b->cells[i].run;
    policy_watch watch = {open, n};
    layer_observer observer = policy_observer(&watch);
    kvb_status status = session_prefill(b->session, ids, b->n_tokens, n ? &observer : NULL, NULL, err);
    free(open);
    return status;
}

static double kept_share(const sample_bench *b, const kv_cache *cache)
{
    const model_config *c = &b->s->m->config;
    return model_kept_share(c, kv_cache_entries(cache), b->n_tokens);
}

// Opens the cache that all questions of a cell share.
static kvb_status open_context(sample_bench *b, bench_cell *c, kvb_error *err)
{
    const method_column *column = c->cell->column;
    kept_set kept = {0};
    kvb_status status = KVB_OK;
    if (column) status = method_select(b->session, &b->s->methods, column, c->cell->ratio, NULL, &kept, err);
    if (status != KVB_OK) return status;
    c->context = session_cache(b->session, column ? &kept : NULL, 0);
    status = session_refit(b->session, column ? &kept : NULL, c->context, err);
    if (status == KVB_OK && kept.formats) status = kv_cache_pack(c->context, kept.formats, err);
    kept_set_free(&kept);
    b->bytes += kv_cache_allocated(c->context);
    c->cell->samples[b->index].kept = kept_share(b, c->context);
    return status;
}

static kvb_status add_turn(sample_bench *b, bench_cell *c, uint32_t question, kvb_error *err)
{
    task_turn *turn = &b->turns[b->n_turns];
    *turn = (task_turn){.question = &b->sample->questions[question], .run = c->run};
    kvb_status status = KVB_OK;
    if (c->run) {
        turn->cache = policy_run_cache(c->run, b->session, b->extra);
        c->cell->samples[b->index].kept = kept_share(b, turn->cache);
    } else {
        if (!c->context) status = open_context(b, c, err);
        if (status == KVB_OK) turn->cache = kv_cache_extend(c->context, b->extra);
    }
    if (status != KVB_OK) return status;
    b->bytes += kv_cache_allocated(turn->cache);
    b->questions[b->n_turns] = question;
    b->owners[b->n_turns++] = c;
    return KVB_OK;
}

static void close_turns(sample_bench *b)
{
    for (size_t i = 0; i < b->n_turns; i++) {
        kv_cache_close(b->turns[i].cache);
        free(b->turns[i].answer);
    }
    for (size_t i = 0; i < b->n_turns; i++) { // once all of their turns are closed
        kv_cache_close(b->owners[i]->context);
        b->owners[i]->context = NULL;
    }
    b->n_turns = 0;
    b->bytes = 0;
}

static kvb_status flush_turns(sample_bench *b, kvb_error *err)
{
    if (!b->n_turns) return KVB_OK;
    kvb_status status = answer_turns(b->turns, b->n_turns, b->session->decode, b->s->text, b->s->t, err);
    for (size_t i = 0; status == KVB_OK && i < b->n_turns; i++)
        b->owners[i]->cell->samples[b->index].scores[b->questions[i]] = b->turns[i].score;
    close_turns(b);
    return status;
}

// Whether there is room for another question, and no policy would have to answer two at once.
static bool has_place(const sample_bench *b, const bench_cell *c)
{
    for (size_t i = 0; c->run && i < b->n_turns; i++)
        if (b->owners[i] == c) return false;
    return (b->n_turns + 1) * b->rows <= ROWS && b->bytes < BYTES;
}

static kvb_status take_turn(sample_bench *b, bench_cell *c, uint32_t question, kvb_error *err)
{
    kvb_status status = b->n_turns == 0 || has_place(b, c) ? KVB_OK : flush_turns(b, err);
    return status == KVB_OK ? add_turn(b, c, question, err) : status;
}

static kvb_status answer_all(sample_bench *b, kvb_error *err)
{
    uint32_t n_questions = (uint32_t)b->sample->n_questions;
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < b->n && status == KVB_OK; i++) // cell by cell, so that a shared cache is closed early
        for (uint32_t q = 0; q < n_questions && !b->cells[i].run && status == KVB_OK; q++)
            status = take_turn(b, &b->cells[i], q, err);
    for (uint32_t q = 0; q < n_questions && status == KVB_OK; q++)
        for (size_t i = 0; i < b->n && status == KVB_OK; i++)
            if (b->cells[i].run) status = take_turn(b, &b->cells[i], q, err);
    return status == KVB_OK ? flush_turns(b, err) : status;
}

// Lists the cells that the log does not have, and makes room for their results.
static kvb_status list_missing(sample_bench *b, const char *hash, kvb_error *err)
{
    task_study *s = b->s;
    b->cells = need(s->n_cells, sizeof *b->cells, "cells");
    b->turns = need(ROWS, sizeof *b->turns, "questions");
    b->owners = need(ROWS, sizeof *b->owners, "questions");
    b->questions = need(ROWS, sizeof *b->questions, "questions");
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < s->n_cells && status == KVB_OK; i++) {
        task_result *r = &s->cells[i].samples[b->index];
        status = recall(s, &s->cells[i], b->index, hash, err);
        if (status != KVB_OK || r->done) continue;
        *r = (task_result){.n_questions = (uint32_t)b->sample->n_questions, .looked = NAN};
        r->scores = need(r->n_questions, sizeof *r->scores, "questions");
        b->cells[b->n++].cell = &s->cells[i];
    }
    return status;
}

static kvb_status open_session(sample_bench *b, metric **metrics, kvb_error *err)
{
    session_plan plan = {.max_tokens = b->n_tokens,
                         .max_new = b->extra,
                         .max_rows = ROWS,
                         .attention = method_needs_attention(&b->s->methods),
                         .refit = b->s->refit};
    plan.metrics = *metrics = method_metrics(&plan.n_metrics, &b->s->methods);
    b->rows = b->extra - b->s->t->kind->new_tokens;
    if (b->rows > plan.max_rows) plan.max_rows = b->rows;
    return session_open(&b->session, b->s->m, &plan, err);
}

static kvb_status finish_cells(sample_bench *b, const char *hash, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < b->n && status == KVB_OK; i++) {
        task_result *r = &b->cells[i].cell->samples[b->index];
        if (b->cells[i].run) r->looked = policy_run_looked(b->cells[i].run) / b->n_tokens;
        r->done = true;
        b->s->n_answered++;
        status = remember(b->s, b->cells[i].cell, b->index, hash, err);
    }
    return status;
}

kvb_status task_study_answer(task_study *s, uint32_t index, const task_sample *sample, kvb_error *err)
{
    sample_bench b = {.s = s, .sample = sample, .index = index};
    int32_t *ids = NULL;
    metric *metrics = NULL;
    char hash[65];
    hash_sample(sample, hash);
    kvb_status status = list_missing(&b, hash, err);
    if (status == KVB_OK && b.n) {
        status = sample_context_ids(&ids, &b.n_tokens, s->m, s->text, sample, err);
        if (status == KVB_OK) status = count_positions(&b.extra, s->text, s->t, sample, err);
        if (status == KVB_OK) status = open_session(&b, &metrics, err);
        if (status == KVB_OK) status = open_policies(&b, err);
        if (status == KVB_OK) status = prefill(&b, ids, err);
        if (status == KVB_OK) status = answer_all(&b, err);
        if (status == KVB_OK) status = finish_cells(&b, hash, err);
    }
    close_turns(&b);
    for (size_t i = 0; i < b.n; i++) {
        policy_run_close(b.cells[i].run);
        kv_cache_close(b.cells[i].context); // still open if refitting failed
    }
    session_close(b.session);
    free_all(b.cells, b.turns, b.owners, b.questions, metrics, ids);
    return status;
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
