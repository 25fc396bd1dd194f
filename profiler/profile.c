// The profiling run, second half: prefill, scorers, decoding, record.
#include "formats/need.h"
#include "profiler/backend/meter.h"
#include "profiler/model/forward.h"
#include "profiler/profile_losses.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// One question while its batch is decoded.
typedef struct question_run {
    const profile_context *c;
    uint32_t number; // in its context
    const profile_question *q;
    int32_t *answer; // given, or drawn so far
    uint32_t n_answer, n_queries, tail;
    bool ended;
} question_run;

typedef struct profile_run {
    const model *m;
    const profile_job *job;
    const profile_options *o;
    record_writer *record;
    const profile_watch *watch;
    profile_times *times;
    forward *f;
    const profile_context *c; // the one that is prefilled
    double done, total;       // profile_work(), for the progress
    // Buffers for the largest context and batch.
    float **scores;       // [n_metrics] of [B, G, T], of the layers that are budgeted (model_budgeted)
    float *importance;    // [B, G, T]
    draw_key *keys;       // [batch] of the tokens that are drawn
    int32_t *drawn;       // [batch]
    decode_row *rows;     // [batch * tail]
    int32_t *ids;         // [batch * tail]
    uint32_t *logit_rows; // [batch]
    int32_t *answers;     // [batch, new_tokens]
    question_run *batch;  // [batch] waiting, n_batch of n_places contexts
    uint32_t *places;     // [batch] of their contexts (forward.h)
    uint32_t n_batch, n_places;
    profile_losses losses;
} profile_run;

static bool advance(profile_run *r, double work)
{
    r->done += work;
    return !r->watch || r->watch->progress(r->watch->context, r->done, r->total);
}

static kvb_status open_buffers(profile_run *r, kvb_error *err)
{
    const model_config *c = &r->m->config;
    size_t heads = (size_t)model_budgeted(c, c->n_layers) * c->n_kv_heads, T = r->job->max_tokens,
           batch = r->job->max_questions, rows = batch * r->job->max_tail;
    r->scores = need(r->o->n_metrics, sizeof *r->scores, "metrics");
    for (size_t i = 0; i < r->o->n_metrics; i++) r->scores[i] = need(heads * T, sizeof(float), "scores");
    r->importance = need(heads * T, sizeof(float), "shares of importance");
    r->keys = need(batch, sizeof *r->keys, "random draws");
    r->drawn = need(batch, sizeof *r->drawn, "token ids");
    r->rows = need(rows, sizeof *r->rows, "rows");
    r->ids = need(rows, sizeof *r->ids, "token ids");
    r->logit_rows = need(batch, sizeof *r->logit_rows, "rows");
    r->answers = need(batch * r->o->new_tokens, sizeof *r->answers, "token ids");
    r->batch = need(batch, sizeof *r->batch, "questions");
    r->places = need(batch, sizeof *r->places, "questions");
    forward_plan plan = {r->job->max_tokens,  r->job->max_questions,         r->job->max_tail,
                         r->job->n_pairs > 0, r->o->oracle == ORACLE_OUTPUT, r->job->max_contexts};
    kvb_status status = forward_open(&r->f, r->m, &plan, err);
    if (status == KVB_OK) profile_losses_open(&r->losses, r->m, r->job, r->o, r->f, r->times);
    return status;
}

static void close_buffers(profile_run *r)
{
    profile_losses_close(&r->losses);
    forward_close(r->f);
    for (size_t i = 0; r->scores && i < r->o->n_metrics; i++) free(r->scores[i]);
    free_all(r->scores, r->importance, r->keys, r->drawn, r->rows, r->ids, r->logit_rows, r->answers, r->batch,
             r->places);
}

// For layer_observer: computes every metric's scores of one layer.
static kvb_status score_layer(void *context, const layer_view *view, kvb_error *err)
{
    profile_run *r = context;
    if (view->window) return KVB_OK; // not budgeted
    size_t at = (size_t)model_budgeted(&r->m->config, view->layer) * view->n_kv_heads * view->n_tokens;
    r->times->extras += view->extra_seconds;
    profile_losses_see(&r->losses, view);
    for (size_t i = 0; i < r->o->n_metrics; i++) {
        if (!profile_scores_metric(r->job, r->c, i)) continue;
        double start = meter_now();
        kvb_status status = metric_score(&r->o->metrics[i], view, r->scores[i] + at, err);
        if (status == KVB_OK) status = profile_losses_score(&r->losses, i, view, at, err);
        if (status != KVB_OK) return status;
        r->times->scorers += meter_now() - start;
        r->times->each[i] += meter_now() - start;
    }
    return KVB_OK;
}

typedef struct prefill_watch {
    profile_run *r;
    double work; // of all layers
} prefill_watch;

static bool prefill_step(void *context, double done, double total)
{
    prefill_watch *w = context;
    (void)done;
    return advance(w->r, w->work / total);
}

static kvb_status prefill(profile_run *r, const profile_context *c, kvb_error *err)
{
    layer_observer observer = {score_layer, r, r->losses.refit.m ? VIEW_Q_RAW : 0};
    r->c = c;
    profile_losses_enter(&r->losses, c);
    for (size_t i = 0; i < r->o->n_metrics; i++)
        if (profile_scores_metric(r->job, c, i)) observer.needs |= metric_needs(&r->o->metrics[i]);
    double start = meter_now(), others = r->times->scorers + r->times->extras;
    prefill_watch watch = {r, profile_work(r->m, c, NULL)};
    forward_progress progress = {prefill_step, &watch};
    kvb_error inner = {0};
    kvb_status status = forward_prefill(r->f, c->ids, c->n_tokens, &observer, &progress, NULL, &inner);
    r->times->prefill += meter_now() - start - (r->times->scorers + r->times->extras - others);
    if (status != KVB_OK) return kvb_fail(err, status, "sample %s: %s", c->id, inner.message);
    size_t witness = r->job->growth.witness;
    if (!c->recorded || witness == r->o->n_metrics) return KVB_OK;
    return profile_check_witness(r->job, r->o, c, r->scores[witness], r->importance, err);
}

// Adds one row for the question's next token.
static void add_row(profile_run *r, uint32_t *n, question_run *a, uint32_t slot, int32_t id, bool observed)
{
    uint32_t planned = (a->q->answer ? a->q->n_answer : r->o->new_tokens) - 1;
    if (a->tail >= a->q->n_suffix) profile_losses_see_row(&r->losses, *n, a->tail - a->q->n_suffix, planned);
    r->rows[*n] = (decode_row){slot, a->tail++, observed};
    r->ids[(*n)++] = id;
    a->n_queries += observed;
}

// Adds the first pass's rows: the suffixes of all questions, and all tokens but the last of answers that are given.
static uint32_t first_rows(profile_run *r, question_run *batch, uint32_t n_batch, uint32_t *n_logits)
{
    uint32_t n = 0;
    *n_logits = 0;
    for (uint32_t i = 0; i < n_batch; i++) {
        question_run *a = &batch[i];
        for (uint32_t s = 0; s < a->q->n_suffix; s++)
            add_row(r, &n, a, i, a->q->suffix[s], r->o->include_first && s + 1 == a->q->n_suffix);
        if (!a->q->answer) {
            r->logit_rows[(*n_logits)++] = n - 1;
            continue;
        }
        for (uint32_t s = 0; s + 1 < a->q->n_answer; s++) add_row(r, &n, a, i, a->q->answer[s], true);
        a->ended = true;
    }
    return n;
}

// Lists the keys of the next draw of every question that goes on: besides the logits it depends on nothing else.
static void list_keys(profile_run *r, const question_run *batch, uint32_t n_batch)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_batch; i++)
        if (!batch[i].ended) r->keys[n++] = (draw_key){batch[i].c->key, batch[i].number, batch[i].n_answer};
}

static kvb_status take_tokens(profile_run *r, question_run *batch, uint32_t n_batch, kvb_error *err)
{
    const profile_context *bad = NULL;
    uint32_t n = 0, failed = 0;
    for (uint32_t i = 0; i < n_batch; i++) {
        question_run *a = &batch[i];
        if (a->ended) continue;
        int32_t id = r->drawn[n++];
        failed += id < 0;
        if (id < 0) bad = a->c;
        a->answer[a->n_answer++] = id;
        a->ended = a->n_answer == r->o->new_tokens || (!r->o->ignore_eos && model_text_ends_answer(r->job->text, id));
    }
    if (failed)
        return kvb_fail(
            err, KVB_NUMERIC,
            "sample %s: the logits of %u questions are not finite; the model's activations overflow on this text",
            bad->id, failed);
    return KVB_OK;
}

static double work_per_row(const profile_run *r, const question_run *batch, uint32_t n_batch)
{
    double work = 0, rows = 0;
    for (uint32_t i = 0; i < n_batch; i++) {
        work += profile_work(r->m, batch[i].c, batch[i].q);
        rows += batch[i].q->tail;
    }
    return rows > 0 ? work / rows : 0;
}

// `places` as in forward_begin_questions().
static kvb_status decode_batch(profile_run *r, question_run *batch, const uint32_t *places, uint32_t n_batch,
                               kvb_error *err)
{
    forward_begin_questions(r->f, places, n_batch);
    uint32_t n_logits, n = first_rows(r, batch, n_batch, &n_logits);
    double row_work = work_per_row(r, batch, n_batch);
    while (n) {
        list_keys(r, batch, n_batch);
        profile_losses_begin_rows(&r->losses);
        kvb_status status =
            forward_draw(r->f, r->rows, r->ids, n, r->logit_rows, n_logits, &r->o->draw, r->keys, r->drawn, err);
        if (status == KVB_OK) status = take_tokens(r, batch, n_batch, err);
        if (status != KVB_OK) return status;
        if (!advance(r, n * row_work))
            return kvb_fail(err, KVB_INTERRUPTED, "stopped while sample %s was decoded", batch->c->id);
        n = n_logits = 0;
        for (uint32_t i = 0; i < n_batch; i++)
            if (!batch[i].ended) {
                r->logit_rows[n_logits++] = n;
                add_row(r, &n, &batch[i], i, batch[i].answer[batch[i].n_answer - 1], true);
            }
    }
    return KVB_OK;
}

static decoded_question decoded(const question_run *a)
{
    return (decoded_question){a->number, a->q->suffix, a->answer, a->q->n_suffix, a->n_answer, a->n_queries};
}

static kvb_status judge_losses(profile_run *r, const profile_context *c, const question_run *batch, uint32_t n,
                               kvb_error *err)
{
    decoded_question *q = need(n, sizeof *q, "questions");
    for (uint32_t i = 0; i < n; i++) q[i] = decoded(&batch[i]);
    kvb_status status = profile_losses_judge(&r->losses, c, q, n, r->scores, err);
    free(q);
    return status;
}

static kvb_status write_question(profile_run *r, const question_run *a, uint32_t slot, kvb_error *err)
{
    const model_config *m = &r->m->config;
    const profile_context *c = a->c;
    size_t n = (size_t)model_budgeted(m, m->n_layers) * m->n_kv_heads * c->n_tokens;
    if (a->n_queries == 0) {
        char text[200];
        snprintf(text, sizeof text,
                 "sample %s, question %u: the model ended its answer at once, nothing was recorded; try --ignore-eos",
                 c->id, a->number + 1);
        r->times->skipped++;
        if (r->watch) r->watch->message(r->watch->context, text);
    } else {
        kvb_status status = forward_importance(r->f, slot, r->importance, err);
        if (status != KVB_OK) return status;
        float share = 1.0f / ((float)a->n_queries * (float)(m->n_heads / m->n_kv_heads)); // makes a sum a mean
        for (size_t j = 0; j < n && r->o->oracle == ORACLE_OUTPUT; j++) r->importance[j] *= share;
        for (size_t j = 0; j < n; j++)
            if (!isfinite(r->importance[j]))
                return kvb_fail(err, KVB_NUMERIC, "sample %s, question %u: importance %zu is not finite", c->id,
                                a->number + 1, j);
    }
    record_losses losses;
    const decoded_question one = decoded(a);
    kvb_status status = profile_losses_take(&losses, &r->losses, c, &one, slot, err);
    if (status != KVB_OK) return status;
    record_question q = {.oracle = a->n_queries ? r->importance : NULL,
                         .suffix_ids = a->q->suffix,
                         .n_suffix = a->q->n_suffix,
                         .answer_ids = a->answer,
                         .n_answer = a->n_answer,
                         .n_queries = a->n_queries,
                         .losses = losses.n ? &losses : NULL};
    double start = meter_now();
    r->times->queries += a->n_queries;
    status = record_put_question(r->record, c->id, a->number, &q, err);
    r->times->writing += meter_now() - start;
    return status;
}

// Decodes the questions that the finished record has of a context, for the curves of metrics that are added.
static kvb_status run_recorded(profile_run *r, const profile_context *c, kvb_error *err)
{
    recorded_questions held;
    if (!c->recorded || !profile_losses_wanted(&r->losses) || record_writer_has_context(r->record, c->id))
        return KVB_OK;
    kvb_status status = profile_recorded_read(&held, r->o, c, err);
    profile_question *questions = need(held.n, sizeof *questions, "questions");
    question_run *batch = need(held.n, sizeof *batch, "questions");
    for (uint32_t i = 0; i < held.n; i++) {
        const decoded_question *q = &held.each[i];
        questions[i] = (profile_question){.suffix = q->suffix,
                                          .n_suffix = q->n_suffix,
                                          .answer = q->answer,
                                          .n_answer = q->n_answer,
                                          .tail = q->n_suffix + q->n_answer - 1};
        batch[i] = (question_run){c, q->number, &questions[i], .answer = q->answer, .n_answer = q->n_answer};
    }
    double start = meter_now();
    for (uint32_t first = 0, n; first < held.n && status == KVB_OK; first += n) {
        n = held.n - first < r->job->max_questions ? held.n - first : r->job->max_questions;
        status = decode_batch(r, batch + first, NULL, n, err);
        if (status == KVB_OK) status = judge_losses(r, c, batch + first, n, err);
        for (uint32_t i = 0; i < n && status == KVB_OK; i++) {
            record_losses losses;
            status = profile_losses_take(&losses, &r->losses, c, &held.each[first + i], i, err);
            if (status == KVB_OK && losses.n)
                status = record_put_losses(r->record, c->id, batch[first + i].number, &losses, err);
        }
    }
    r->times->decode += meter_now() - start;
    free_all(batch, questions);
    profile_recorded_free(&held);
    return status;
}

// Decodes and writes the questions that wait.
static kvb_status run_batch(profile_run *r, kvb_error *err)
{
    double start = meter_now(), done = r->done;
    kvb_status status = r->n_batch ? decode_batch(r, r->batch, r->places, r->n_batch, err) : KVB_OK;
    r->times->decode += meter_now() - start;
    if (status == KVB_OK && profile_losses_wanted(&r->losses)) // then all are of one context
        status = judge_losses(r, r->c, r->batch, r->n_batch, err);
    for (uint32_t i = 0; status == KVB_OK && i < r->n_batch; i++) {
        done += profile_work(r->m, r->batch[i].c, r->batch[i].q); // an early end counts as done
        status = write_question(r, &r->batch[i], i, err);
    }
    bool ended = r->n_batch && done > r->done + 1e-9 * r->total;
    if (r->n_batch) r->done = done;
    r->n_batch = 0;
    if (status != KVB_OK || !ended || advance(r, 0)) return status;
    return kvb_fail(err, KVB_INTERRUPTED, "stopped after sample %s", r->c->id);
}

// Adds those of a context's questions to the batch that the record lacks: no number depends on which others are in it.
static kvb_status add_questions(profile_run *r, const profile_context *c, const profile_piece *p, uint32_t place,
                                kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (uint32_t number = p->first; number < p->first + p->count && status == KVB_OK; number++) {
        const profile_question *q = &c->questions[number];
        if (record_writer_has_question(r->record, c->id, number)) {
            r->done += profile_work(r->m, c, q);
            continue;
        }
        if (r->n_batch == r->job->max_questions) status = run_batch(r, err);
        int32_t *drawn = r->answers + (size_t)r->n_batch * r->o->new_tokens;
        r->places[r->n_batch] = place;
        r->batch[r->n_batch++] = (question_run){c, number, q, q->answer ? q->answer : drawn, q->n_answer, 0, 0, false};
    }
    return status;
}

// Writes the context's scores if the record lacks them: another process may have prefilled the same context for other
// questions, but its numbers are the same.
static kvb_status write_context(profile_run *r, const profile_context *c, kvb_error *err)
{
    if (record_writer_has_context(r->record, c->id)) return KVB_OK;
    const char *names[PROFILE_MAX_METRICS];
    const float *scores[PROFILE_MAX_METRICS];
    double start = meter_now();
    size_t n = 0;
    for (size_t i = 0; i < r->o->n_metrics; i++) {
        if (c->recorded && r->job->growth.recorded >> i & 1) continue;
        names[n] = r->o->metrics[i].spec;
        scores[n++] = r->scores[i];
    }
    kvb_status status = record_put_context(r->record, c->id, c->ids, c->n_tokens, names, scores, n, err);
    r->times->writing += meter_now() - start;
    return status;
}

static double piece_work(const profile_run *r, const profile_context *c, const profile_piece *p)
{
    double work = profile_work(r->m, c, NULL) + profile_work_again(r->m, c);
    for (uint32_t q = p->first; q < p->first + p->count; q++) work += profile_work(r->m, c, &c->questions[q]);
    return work;
}

static kvb_status run_questions(profile_run *r, const profile_context *c, const profile_piece *p, kvb_error *err)
{
    uint32_t places = r->job->max_contexts;
    kvb_status status = KVB_OK;
    if (r->n_places == places || r->n_batch + p->count > r->job->max_questions) {
        status = run_batch(r, err);
        r->n_places = 0;
    }
    uint32_t place = r->n_places++;
    forward_set_place(r->f, place);
    if (status == KVB_OK) status = prefill(r, c, err);
    if (status == KVB_OK) status = run_recorded(r, c, err); // before the context, which marks this as done
    if (status == KVB_OK) status = write_context(r, c, err);
    if (status == KVB_OK) status = add_questions(r, c, p, place, err);
    if (status == KVB_OK && places == 1) status = run_batch(r, err);
    return status;
}

static kvb_status run_piece(profile_run *r, const profile_context *c, const profile_piece *p, kvb_error *err)
{
    bool complete = record_writer_has_context(r->record, c->id);
    uint32_t end = p->first + p->count;
    for (uint32_t q = p->first; q < end; q++) complete = complete && record_writer_has_question(r->record, c->id, q);
    if (complete)
        return advance(r, piece_work(r, c, p)) ? KVB_OK
                                               : kvb_fail(err, KVB_INTERRUPTED, "stopped before sample %s", c->id);
    return run_questions(r, c, p, err);
}

kvb_status profile_run_share(const model *m, const profile_job *job, const profile_options *o,
                             const profile_share *share, record_writer *writer, const profile_watch *watch,
                             profile_times *times, kvb_error *err)
{
    profile_run r = {.m = m, .job = job, .o = o, .record = writer, .watch = watch, .times = times};
    memset(times, 0, sizeof *times);
    if (share->n == 0) return KVB_OK;
    for (size_t i = 0; i < share->n; i++)
        r.total += piece_work(&r, &job->contexts[share->pieces[i].context], &share->pieces[i]);
    const profile_context *check = &job->growth.check;
    kvb_status status = open_buffers(&r, err);
    if (status == KVB_OK && check->n_tokens) {
        r.total += profile_work(m, check, NULL);
        status = prefill(&r, check, err);
    }
    for (size_t i = 0; status == KVB_OK && i < share->n; i++)
        status = run_piece(&r, &job->contexts[share->pieces[i].context], &share->pieces[i], err);
    if (status == KVB_OK) status = run_batch(&r, err);
    close_buffers(&r);
    return status;
}

// ---- The end: whether all is there, and the record made of it ----

static bool has_piece(const profile_share *share, size_t context)
{
    for (size_t i = 0; i < share->n; i++)
        if (share->pieces[i].context == context) return true;
    return false;
}

// Checks that no question is missing. Not needed with a share: its own pieces are there once its run has succeeded.
static kvb_status check_questions(const profile_context *c, const record_writer *writer, kvb_error *err)
{
    for (uint32_t q = 0; q < c->n_questions; q++)
        if (!record_writer_has_question(writer, c->id, q))
            return kvb_fail(err, KVB_MISMATCH,
                            "sample %s: question %u is missing in the record; continue with --resume", c->id, q + 1);
    return KVB_OK;
}

kvb_status profile_finish(const profile_job *job, const profile_share *share, record_writer *writer, kvb_error *err)
{
    const profile_growth *g = &job->growth;
    const char **ids = need(job->n_contexts, sizeof *ids, "context ids");
    kvb_status status = KVB_OK;
    size_t n = 0;
    for (size_t i = 0; i < job->n_contexts && status == KVB_OK; i++) {
        if (share && !has_piece(share, i)) continue;
        if (!share) status = check_questions(&job->contexts[i], writer, err);
        ids[n++] = job->contexts[i].id;
    }
    if (status == KVB_OK) status = record_finish(writer, g->n_ids ? g->ids : ids, g->n_ids ? g->n_ids : n, err);
    free(ids);
    return status;
}
