#include "evaluator/task_study.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 1024 };                 // of the decoder: the questions of some dozen cells at once
static const size_t BYTES = 1u << 30; // of caches that are open together; one is always allowed

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
    return task_log_open(&s->known, s->log, err);
}

void task_study_close(task_study *s)
{
    for (size_t i = 0; s->cells && i < s->n_cells; i++) {
        for (uint32_t k = 0; k < s->n_samples; k++) free(s->cells[i].samples[k].scores);
        free(s->cells[i].samples);
    }
    free(s->cells);
    s->cells = NULL;
    task_log_close(&s->known);
}

// Hash of the sample's own words, so that other texts, haystacks and lengths are other samples.
static kvb_status hash_sample(const task_sample *sample, char out[65], kvb_error *err)
{
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    needed(to, "samples");
    fprintf(to, "%s\n%s\n", sample->id, sample->context);
    for (size_t i = 0; i < sample->n_questions; i++) {
        fprintf(to, "%s\n", sample->questions[i].text);
        for (size_t k = 0; k < sample->questions[i].n_gold; k++) fprintf(to, "%s\n", sample->questions[i].gold[k]);
    }
    needed(fclose(to) == 0 ? text : NULL, "samples");
    kvb_status status = sha256_hex(text, size, out, err);
    free(text);
    return status;
}

// Everything that a result depends on; its hash names the result in the log.
static kvb_status name_result(const task_study *s, const task_cell *c, const char *sample, char key[65], kvb_error *err)
{
    const method_column *column = c->column;
    const method *m = column ? &s->methods.methods[column->method] : NULL;
    char text[1024];
    int n = snprintf(text, sizeof text, "kvbudget-task 1\n%s\n%s %s\n%s\n%s\n%s\n%s\n%.17g\n%u %u%s", s->m->sha256,
                     s->m->device->b->name, s->m->device->b->compute, s->t->spec, sample, m ? method_name(m) : "full",
                     column ? column->how->identity : "", c->ratio, m ? m->sink : 0, m ? m->window : 0,
                     s->statistics ? s->statistics->sha256 : "");
    return sha256_hex(text, (size_t)n, key, err);
}

static kvb_status recall(task_study *s, task_cell *c, uint32_t index, const char *sample, kvb_error *err)
{
    char key[65];
    kvb_status status = name_result(s, c, sample, key, err);
    if (status == KVB_OK && task_log_take(&s->known, key, &c->samples[index])) s->n_resumed++;
    return status;
}

static kvb_status remember(task_study *s, const task_cell *c, uint32_t index, const char *sample, kvb_error *err)
{
    char key[65];
    kvb_status status = name_result(s, c, sample, key, err);
    if (status != KVB_OK) return status;
    cJSON *about = cJSON_CreateObject();
    const char *how = c->column ? method_name(&s->methods.methods[c->column->method]) : "full";
    cJSON_AddStringToObject(about, "task", s->t->spec);
    cJSON_AddStringToObject(about, "method", how);
    cJSON_AddStringToObject(about, "allocator", c->column ? c->column->how->label : "");
    cJSON_AddNumberToObject(about, "ratio", c->ratio);
    status = task_log_add(&s->known, key, &c->samples[index], about, err);
    cJSON_Delete(about);
    return status;
}

// ---- One sample ----

// A cell at work. Those that evict once have one cache for all questions; a policy makes its own for each.
typedef struct bench_cell {
    task_cell *cell;
    policy_run *run;
    kv_cache *context;
} bench_cell;

typedef struct bench {
    task_study *s;
    const task_sample *sample;
    const task_listener *listener;
    uint32_t index, n_tokens, extra, rows; // rows: of the longest question
    session *session;
    bench_cell *cells; // [n] of the cells that are missing
    size_t n;
    // Questions that are answered together:
    task_turn *turns;    // [ROWS]
    bench_cell **owners; // [ROWS]
    uint32_t *questions; // [ROWS]
    size_t n_turns, bytes;
} bench;

static kvb_status open_policies(bench *b, kvb_error *err)
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

static kvb_status prefill(bench *b, const int32_t *ids, kvb_error *err)
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

static double kept_share(const bench *b, const kv_cache *cache)
{
    const model_config *c = &b->s->m->config;
    return model_kept_share(c, kv_cache_entries(cache), b->n_tokens);
}

// The cache that all questions of a cell share.
static kvb_status open_context(bench *b, bench_cell *c, kvb_error *err)
{
    const method_column *column = c->cell->column;
    kept_set kept = {0};
    kvb_status status = KVB_OK;
    if (column) status = method_select(b->session, &b->s->methods, column, c->cell->ratio, NULL, &kept, err);
    if (status != KVB_OK) return status;
    c->context = session_cache(b->session, column ? &kept : NULL, 0);
    kept_set_free(&kept);
    b->bytes += kv_cache_allocated(c->context);
    c->cell->samples[b->index].kept = kept_share(b, c->context);
    return KVB_OK;
}

static kvb_status add_turn(bench *b, bench_cell *c, uint32_t question, kvb_error *err)
{
    task_turn *turn = &b->turns[b->n_turns];
    *turn = (task_turn){.question = &b->sample->questions[question], .run = c->run};
    kvb_status status = KVB_OK;
    if (c->run) {
        status = policy_run_cache(c->run, b->session, b->extra, &turn->cache, err);
        if (status == KVB_OK) c->cell->samples[b->index].kept = kept_share(b, turn->cache);
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

static void close_turns(bench *b)
{
    for (size_t i = 0; i < b->n_turns; i++) {
        kv_cache_close(b->turns[i].cache);
        free(b->turns[i].answer);
    }
    for (size_t i = 0; i < b->n_turns; i++) { // behind all of their turns
        kv_cache_close(b->owners[i]->context);
        b->owners[i]->context = NULL;
    }
    b->n_turns = 0;
    b->bytes = 0;
}

static kvb_status flush_turns(bench *b, kvb_error *err)
{
    if (!b->n_turns) return KVB_OK;
    kvb_status status = task_answer(b->turns, b->n_turns, b->session->decode, b->s->text, b->s->t, err);
    for (size_t i = 0; status == KVB_OK && i < b->n_turns; i++) {
        const bench_cell *c = b->owners[i];
        c->cell->samples[b->index].scores[b->questions[i]] = b->turns[i].score;
        if (b->listener) b->listener->hear(b->listener->context, c->cell, b->sample, b->questions[i], &b->turns[i]);
    }
    close_turns(b);
    return status;
}

// Whether another question has place beside those gathered, and no policy would have to answer two at once.
static bool has_place(const bench *b, const bench_cell *c)
{
    for (size_t i = 0; c->run && i < b->n_turns; i++)
        if (b->owners[i] == c) return false;
    return (b->n_turns + 1) * b->rows <= ROWS && b->bytes < BYTES;
}

static kvb_status take_turn(bench *b, bench_cell *c, uint32_t question, kvb_error *err)
{
    kvb_status status = b->n_turns == 0 || has_place(b, c) ? KVB_OK : flush_turns(b, err);
    return status == KVB_OK ? add_turn(b, c, question, err) : status;
}

static kvb_status answer_all(bench *b, kvb_error *err)
{
    uint32_t n_questions = (uint32_t)b->sample->n_questions;
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < b->n && status == KVB_OK; i++) // cell by cell, so that a shared cache is soon closed
        for (uint32_t q = 0; q < n_questions && !b->cells[i].run && status == KVB_OK; q++)
            status = take_turn(b, &b->cells[i], q, err);
    for (uint32_t q = 0; q < n_questions && status == KVB_OK; q++)
        for (size_t i = 0; i < b->n && status == KVB_OK; i++)
            if (b->cells[i].run) status = take_turn(b, &b->cells[i], q, err);
    return status == KVB_OK ? flush_turns(b, err) : status;
}

// Room for the results of the cells that the log does not have.
static kvb_status list_missing(bench *b, const char *hash, kvb_error *err)
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

static kvb_status open_session(bench *b, metric **metrics, kvb_error *err)
{
    session_plan plan = {
        .max_tokens = b->n_tokens, .max_new = b->extra, .max_rows = ROWS, .statistics = b->s->statistics};
    plan.metrics = *metrics = method_metrics(&plan.n_metrics, &b->s->methods);
    b->rows = b->extra - task_new_tokens(b->s->t->kind);
    if (b->rows > plan.max_rows) plan.max_rows = b->rows;
    for (size_t i = 0; i < b->n; i++) {
        const method_column *column = b->cells[i].cell->column;
        uint32_t block = column && b->s->methods.methods[column->method].p.kind
                             ? policy_largest_block(&b->s->methods.methods[column->method].p)
                             : 0;
        if (block > plan.max_rows) plan.max_rows = block;
    }
    return session_open(&b->session, b->s->m, &plan, err);
}

static kvb_status finish_cells(bench *b, const char *hash, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < b->n && status == KVB_OK; i++) {
        task_result *r = &b->cells[i].cell->samples[b->index];
        if (b->cells[i].run) r->looked = policy_run_stats(b->cells[i].run).looked / b->n_tokens;
        r->done = true;
        b->s->n_answered++;
        status = remember(b->s, b->cells[i].cell, b->index, hash, err);
    }
    return status;
}

kvb_status task_study_answer(task_study *s, uint32_t index, const task_sample *sample, const task_listener *listener,
                             kvb_error *err)
{
    bench b = {.s = s, .sample = sample, .listener = listener, .index = index};
    int32_t *ids = NULL;
    metric *metrics = NULL;
    char hash[65];
    kvb_status status = hash_sample(sample, hash, err);
    if (status == KVB_OK) status = list_missing(&b, hash, err);
    if (status == KVB_OK && b.n) {
        status = task_context_ids(&ids, &b.n_tokens, s->m, s->text, sample, err);
        if (status == KVB_OK) status = task_positions(&b.extra, s->text, s->t, sample, err);
        if (status == KVB_OK) status = open_session(&b, &metrics, err);
        if (status == KVB_OK) status = open_policies(&b, err);
        if (status == KVB_OK) status = prefill(&b, ids, err);
        if (status == KVB_OK) status = answer_all(&b, err);
        if (status == KVB_OK) status = finish_cells(&b, hash, err);
    }
    close_turns(&b);
    for (size_t i = 0; i < b.n; i++) policy_run_close(b.cells[i].run);
    session_close(b.session);
    free(b.cells);
    free(b.turns);
    free(b.owners);
    free(b.questions);
    free(metrics);
    free(ids);
    return status;
}

// ---- Over all samples ----

// The uniform allocator's cell beside this one.
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
    free(scores);
    free(counts);
    return status;
}
