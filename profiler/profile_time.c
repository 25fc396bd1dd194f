// How long a profile would take on this machine: measured on a few layers of each kind with made-up weights
// (profiler/model/rehearsal.h), by the very code that will run, and multiplied.
//
// A token of the prefill, a row and a step take seconds that grow linearly with the context, by what attends to it:
//
//     layer(T) = T (fixed + each T)        each: from two lengths, fixed: from the longer one
//
// Where layers are so wide that the longer one would take too long, `each` is measured on narrow layers.
#include "formats/need.h"
#include "profiler/backend/meter.h"
#include "profiler/metric/query_statistics.h"
#include "profiler/model/forward.h"
#include "profiler/model/rehearsal.h"
#include "profiler/profile.h"
#include <stdlib.h>
#include <string.h>

// A rehearsal goes on for LONG seconds or PASSES times, and takes place at full length and width where that should take
// AFFORDABLE seconds at most.
enum { NARROW_TOKENS = 4096, MOST_KINDS = 8, PASSES = 3, LONG = 2, AFFORDABLE = 4 };

// Seconds that one layer takes.
typedef struct layer_pace {
    double tokens;       // of the context that this was measured on
    double token;        // of the context, each
    double ending;       // each, of a last layer, which stops at its keys and scores
    double row, step;    // one of `bulk_rows` rows at a time; those of a step
    double logits;       // for the rows of a step, all layers together
    uint32_t vocabulary; // of these logits
} layer_pace;

// The run whose time is asked for.
typedef struct timed_run {
    const model *m;
    const profile_job *job;
    const profile_options *o;
} timed_run;

// One rehearsal at work.
typedef struct stage {
    rehearsal r;
    forward *f;
    const timed_run *p;
    uint32_t n_tokens, questions, bulk_rows; // rows: whole ones of each question
    int32_t *ids;
    decode_row *rows;
    float **scores;
    uint32_t *listed;
    draw_key *keys;
    int32_t *drawn;
    double scored[REHEARSAL_MOST_LAYERS]; // when each layer's scores were there
    uint32_t n_scored;
} stage;

static kvb_status score(void *context, const layer_view *view, kvb_error *err)
{
    stage *s = context;
    kvb_status status = KVB_OK;
    for (size_t i = 0; status == KVB_OK && !view->window && i < s->p->o->n_metrics; i++)
        status = metric_score(&s->p->o->metrics[i], view, s->scores[i], err);
    s->scored[s->n_scored++] = meter_now();
    return status;
}

static void stage_close(stage *s)
{
    forward_close(s->f);
    rehearsal_close(&s->r);
    for (size_t i = 0; s->scores && i < s->p->o->n_metrics; i++) free(s->scores[i]);
    free(s->scores), free(s->ids), free(s->rows), free(s->listed), free(s->keys), free(s->drawn);
    *s = (stage){.n_tokens = 0};
}

// Rows of one question that go through in one pass, before the first step.
static uint32_t rows_given(const profile_question *q)
{
    return q->answer ? q->tail : q->n_suffix;
}

// Rows of all questions of a batch in that pass, as many as go through products at a time at most.
static void size_rows(stage *s)
{
    const profile_job *job = s->p->job;
    uint32_t most = model_context_rows(s->p->m), given = 1;
    s->questions = job->max_questions ? job->max_questions : 1;
    for (size_t i = 0; i < job->n_contexts; i++)
        for (uint32_t q = 0; q < job->contexts[i].n_questions; q++) {
            uint32_t rows = rows_given(&job->contexts[i].questions[q]);
            if (rows > given) given = rows;
        }
    if (s->questions > most) s->questions = most;
    if (given > most / s->questions) given = most / s->questions;
    s->bulk_rows = s->questions * given;
}

static kvb_status stage_open(stage *s, const timed_run *p, uint32_t layer, uint32_t n_tokens, bool narrow,
                             kvb_error *err)
{
    const model_config *c = &p->m->config;
    *s = (stage){.p = p, .n_tokens = n_tokens};
    size_rows(s);
    size_t most = s->bulk_rows > n_tokens ? s->bulk_rows : n_tokens;
    s->ids = need(most, sizeof *s->ids, "token ids");
    s->rows = need(s->bulk_rows, sizeof *s->rows, "rows");
    s->listed = need(s->questions, sizeof *s->listed, "rows");
    s->keys = need(s->questions, sizeof *s->keys, "random draws");
    s->drawn = need(s->questions, sizeof *s->drawn, "token ids");
    s->scores = need(p->o->n_metrics, sizeof *s->scores, "metrics");
    for (size_t i = 0; i < p->o->n_metrics; i++)
        s->scores[i] = need((size_t)c->n_kv_heads * n_tokens, sizeof(float), "scores");
    kvb_status status = rehearsal_open(&s->r, p->m, layer, narrow, err);
    const forward_plan plan = {n_tokens, s->questions, s->bulk_rows / s->questions + 1, true, false};
    if (status == KVB_OK) status = forward_open(&s->f, &s->r.m, &plan, err);
    for (size_t i = 0; status == KVB_OK && i < most; i++) s->ids[i] = (int32_t)(i * 7919 % s->r.m.config.vocabulary);
    if (status != KVB_OK) stage_close(s);
    return status;
}

static layer_observer observer_of(stage *s)
{
    layer_observer observer = {score, s, 0, NULL, NULL};
    query_statistics_show(s->p->o->statistics, &observer);
    for (size_t i = 0; i < s->p->o->n_metrics; i++) observer.needs |= metric_needs(&s->p->o->metrics[i]);
    return observer;
}

// `each` rows of every question from tail row `first` on; with `draws` a token is drawn from the last one of each.
static kvb_status decode(stage *s, uint32_t each, uint32_t first, bool draws, double *seconds, kvb_error *err)
{
    uint32_t n = each * s->questions, n_drawn = draws ? s->questions : 0;
    for (uint32_t i = 0; i < n; i++) s->rows[i] = (decode_row){i / each, first + i % each, true};
    for (uint32_t i = 0; i < n_drawn; i++) s->listed[i] = i * each + each - 1;
    double began = meter_now();
    kvb_status status =
        forward_draw(s->f, s->rows, s->ids, n, s->listed, n_drawn, &s->p->o->draw, s->keys, s->drawn, err);
    *seconds = meter_now() - began;
    return status;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, size_t n)
{
    qsort(x, n, sizeof *x, by_size);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

static double positive(double x)
{
    return x > 0 ? x : 0;
}

// What passes took, one after the other.
typedef struct samples {
    double layer[PASSES * (REHEARSAL_MOST_LAYERS - 1)];
    double ending[PASSES], bulk[PASSES], step[PASSES], drawing[PASSES];
} samples;

// One pass of what a profile does. The step that is timed follows one that has drawn, as in a profile: the output
// matrix has taken the layers' place in the caches.
static kvb_status run_pass(stage *s, samples *to, size_t pass, kvb_error *err)
{
    layer_observer observer = observer_of(s);
    uint32_t each = s->bulk_rows / s->questions, layers = s->r.m.config.n_layers;
    double began = meter_now(), unused;
    s->n_scored = 0;
    kvb_status status = forward_prefill(s->f, s->ids, s->n_tokens, &observer, NULL, NULL, err);
    if (status != KVB_OK) return status;
    to->ending[pass] = s->scored[0] - began + meter_now() - s->scored[layers - 1];
    for (size_t l = 1; l < layers; l++) to->layer[pass * (layers - 1) + l - 1] = s->scored[l] - s->scored[l - 1];
    forward_begin_questions(s->f, s->questions);
    status = decode(s, each, 0, false, &to->bulk[pass], err);
    if (status == KVB_OK) status = decode(s, 1, each, true, &unused, err);
    if (status == KVB_OK) status = decode(s, 1, each, true, &to->drawing[pass], err);
    return status == KVB_OK ? decode(s, 1, each, false, &to->step[pass], err) : status;
}

static kvb_status measure(layer_pace *out, const timed_run *p, uint32_t layer, uint32_t n_tokens, bool narrow,
                          kvb_error *err)
{
    stage s;
    samples took;
    size_t n = 0;
    kvb_status status = stage_open(&s, p, layer, n_tokens, narrow, err);
    if (status != KVB_OK) return status;
    for (double began = meter_now(); status == KVB_OK && n < PASSES && (n == 0 || meter_now() - began < LONG); n++)
        status = run_pass(&s, &took, n, err);
    double step = median(took.step, n);
    uint32_t layers = s.r.m.config.n_layers;
    *out = (layer_pace){.tokens = n_tokens,
                        .token = median(took.layer, n * (layers - 1)) / n_tokens,
                        .ending = median(took.ending, n) / n_tokens,
                        .row = median(took.bulk, n) / layers / s.bulk_rows,
                        .step = step / layers,
                        .logits = positive(median(took.drawing, n) - step),
                        .vocabulary = s.r.m.config.vocabulary};
    stage_close(&s);
    return status;
}

// Seconds by the context's length: fixed + each * tokens.
typedef struct line {
    double fixed, each;
} line;

// With the slope from (t, x) to (u, y), never falling, through (v, z).
static line line_through(double t, double x, double u, double y, double v, double z)
{
    double each = u > t ? positive((y - x) / (u - t)) : 0;
    if (each * v > z) each = z / v;
    return (line){z - each * v, each};
}

static double at(line l, double tokens)
{
    return l.fixed + l.each * tokens;
}

// All that is known of one kind of layer; `layer` is the first of them.
typedef struct kind {
    uint32_t layer, count, questions, vocabulary;
    line token, row, step;
    double ending, logits;
} kind;

// The least number of tokens from `wanted` on, doubled, that all metrics take; the longest context at most.
static uint32_t least_tokens(const timed_run *p, uint32_t wanted)
{
    uint32_t most = p->job->max_tokens, tokens = wanted && wanted < most ? wanted : most;
    kvb_error refused;
    for (size_t i = 0; i < p->o->n_metrics; i++)
        while (tokens < most && metric_check_tokens(&p->o->metrics[i], tokens, &refused) != KVB_OK)
            tokens = tokens < most / 2 ? 2 * tokens : most;
    return tokens;
}

// The slopes between two lengths, through what was measured on the model's own width.
static void set_lines(kind *k, const layer_pace *shorter, const layer_pace *longer, const layer_pace *own)
{
    double t = shorter->tokens, u = longer->tokens, v = own->tokens;
    k->token = line_through(t, shorter->token, u, longer->token, v, own->token);
    k->row = line_through(t, shorter->row, u, longer->row, v, own->row);
    k->step = line_through(t, shorter->step, u, longer->step, v, own->step);
    k->ending = own->ending;
    k->logits = own->logits;
    k->vocabulary = own->vocabulary;
}

static kvb_status measure_kind(kind *k, const timed_run *p, kvb_error *err)
{
    layer_pace own, shorter, longer;
    uint32_t most = p->job->max_tokens, few = least_tokens(p, model_context_rows(p->m));
    kvb_status status = measure(&own, p, k->layer, few, false, err);
    bool affordable = status == KVB_OK && own.token * most * REHEARSAL_MOST_LAYERS < AFFORDABLE;
    k->questions = p->job->max_questions ? p->job->max_questions : 1;
    if (status == KVB_OK && affordable) {
        shorter = longer = own;
        if (few < most) status = measure(&longer, p, k->layer, most, false, err);
        own = longer;
    } else if (status == KVB_OK) {
        uint32_t length = least_tokens(p, NARROW_TOKENS);
        status = measure(&longer, p, k->layer, length, true, err);
        if (status == KVB_OK) status = measure(&shorter, p, k->layer, least_tokens(p, length / 2), true, err);
    }
    if (status == KVB_OK) set_lines(k, &shorter, &longer, &own);
    return status;
}

// Seconds of one batch: all that is given in one pass, then a step for each token.
static double batch_seconds(const timed_run *p, const kind *kinds, int n_kinds, const profile_context *c,
                            uint32_t first, uint32_t n)
{
    double given = 0, seconds = 0, drawing = 0;
    uint32_t steps = 0;
    for (uint32_t q = first; q < first + n; q++) {
        const profile_question *one = &c->questions[q];
        given += rows_given(one);
        drawing += !one->answer;
        if (!one->answer && one->tail - one->n_suffix > steps) steps = one->tail - one->n_suffix;
    }
    // Products take whole blocks of rows: what a step takes beside attention hardly depends on how many rows it has.
    for (int i = 0; i < n_kinds; i++) {
        const kind *k = &kinds[i];
        seconds +=
            k->count * (given * at(k->row, c->n_tokens) + steps * at(k->step, c->n_tokens * drawing / k->questions));
    }
    return seconds + (steps + (drawing > 0)) * kinds[0].logits * p->m->config.vocabulary / kinds[0].vocabulary;
}

// Layers that take different times: with a window or without, with experts, held in memory or in the file.
static int list_kinds(kind out[MOST_KINDS], const model *m)
{
    const model_config *c = &m->config;
    int place[MOST_KINDS], n = 0;
    for (uint32_t l = 0; l < c->n_layers; l++) {
        int key = model_layer_bounded(c, l) + 2 * layer_set_has(&c->sparse, l) + 4 * (l + 1 < m->n_held), i = 0;
        while (i < n && place[i] != key) i++;
        if (i == n) out[n] = (kind){.layer = l}, place[n++] = key;
        out[i].count++;
    }
    return n;
}

static double prefill_seconds(const kind *kinds, int n_kinds, double T)
{
    const kind *last = &kinds[n_kinds - 1];
    double seconds = T * (last->ending - at(last->token, T));
    for (int k = 0; k < n_kinds; k++) seconds += kinds[k].count * T * at(kinds[k].token, T);
    return positive(seconds);
}

kvb_status profile_estimate_time(profile_times *out, const model *m, const profile_job *job, const profile_options *o,
                                 double record_bytes, kvb_error *err)
{
    enum { WRITING_RATE = 400000000 }; // bytes of a record in a second, measured; and a twentieth of one to end it
    const timed_run run = {m, job, o}, *p = &run;
    kind kinds[MOST_KINDS];
    int n = p->job->n_contexts ? list_kinds(kinds, p->m) : 0; // --add may find nothing to do
    uint32_t batch = p->job->max_questions ? p->job->max_questions : 1;
    *out = (profile_times){.writing = 0.05 + record_bytes / WRITING_RATE};
    for (int i = 0; i < n; i++) {
        kvb_status status = measure_kind(&kinds[i], p, err);
        if (status != KVB_OK) return status;
    }
    for (size_t i = 0; i < p->job->n_contexts; i++) {
        const profile_context *c = &p->job->contexts[i];
        out->prefill += prefill_seconds(kinds, n, c->n_tokens);
        for (uint32_t q = c->n_recorded; q < c->n_questions; q += batch)
            out->decode += batch_seconds(p, kinds, n, c, q, c->n_questions - q < batch ? c->n_questions - q : batch);
    }
    return KVB_OK;
}
