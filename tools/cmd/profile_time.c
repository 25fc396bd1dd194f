// How long a profile would take on this machine: measured on one layer of each kind with made-up weights
// (profiler/rehearsal.h), by the very code that will run, and multiplied.
//
// What grows with a model's width is measured over a few rows, what grows with the context on a narrow model:
//
//     layer(T)       = wide T + a T + b T^2        a, b from the narrow model at two lengths
//     row of layer   = wide + narrow at T          once for many rows, once for as many as a step decodes
#include "profiler/forward.h"
#include "profiler/meter.h"
#include "profiler/rehearsal.h"
#include "runtime/fail.h"
#include "tools/cmd/profile_command.h"
#include <stdlib.h>
#include <string.h>

enum { NARROW_TOKENS = 4096, BULK_ROWS = BACKEND_CHUNK_ROWS - 64, MOST_KINDS = 8, PASSES = 3, LONG = 2 };

// Seconds that a layer takes, of one model.
typedef struct layer_pace {
    double context, ending; // for all tokens of the context; of a last layer, which stops at its keys and scores
    double bulk, step;      // for `bulk_rows` rows at a time, for those of a step
    double logits;          // for the rows of a step, with the rehearsal's vocabulary
} layer_pace;

// One rehearsal at work.
typedef struct stage {
    rehearsal r;
    forward *f;
    const profile_command *p;
    uint32_t n_tokens, questions, bulk_rows;
    int32_t *ids; // zeros
    decode_row *rows;
    float **scores;
    uint32_t *listed;
    draw_key *keys;
    int32_t *drawn;
} stage;

static kvb_status score(void *context, const layer_view *view, kvb_error *err)
{
    stage *s = context;
    if (view->window) return KVB_OK;
    for (size_t i = 0; i < s->p->options.n_metrics; i++) {
        kvb_status status = metric_score(&s->p->options.metrics[i], view, s->scores[i], err);
        if (status != KVB_OK) return status;
    }
    return KVB_OK;
}

static void stage_close(stage *s)
{
    forward_close(s->f);
    rehearsal_close(&s->r);
    for (size_t i = 0; s->scores && i < s->p->options.n_metrics; i++) free(s->scores[i]);
    free(s->scores), free(s->ids), free(s->rows), free(s->listed), free(s->keys), free(s->drawn);
    *s = (stage){.n_tokens = 0};
}

static kvb_status stage_open(stage *s, const profile_command *p, uint32_t layer, uint32_t n_tokens, bool narrow,
                             kvb_error *err)
{
    const model_config *c = &p->m->config;
    uint32_t batch = p->job.max_questions ? p->job.max_questions : 1;
    uint64_t bulk = (uint64_t)batch * p->job.max_tail;
    *s = (stage){.p = p, .n_tokens = n_tokens, .questions = batch < BULK_ROWS ? batch : BULK_ROWS};
    s->bulk_rows = (uint32_t)(bulk < BULK_ROWS ? bulk : BULK_ROWS);
    if (s->bulk_rows < s->questions) s->bulk_rows = s->questions;
    size_t most = s->bulk_rows > n_tokens ? s->bulk_rows : n_tokens;
    s->ids = calloc(most, sizeof *s->ids);
    s->rows = calloc(s->bulk_rows, sizeof *s->rows);
    s->listed = calloc(s->questions, sizeof *s->listed);
    s->keys = calloc(s->questions, sizeof *s->keys);
    s->drawn = calloc(s->questions, sizeof *s->drawn);
    s->scores = calloc(p->options.n_metrics + 1, sizeof *s->scores);
    bool ok = s->ids && s->rows && s->listed && s->keys && s->drawn && s->scores;
    for (size_t i = 0; ok && i < p->options.n_metrics; i++)
        ok = (s->scores[i] = malloc((size_t)c->n_kv_heads * n_tokens * sizeof(float)));
    kvb_status status = ok ? rehearsal_open(&s->r, p->m, layer, narrow, err)
                           : kvb_fail(err, KVB_MEMORY, "no memory to measure the speed at %u tokens", n_tokens);
    const forward_plan plan = {n_tokens, s->questions, s->bulk_rows / s->questions + 2, true, false};
    if (status == KVB_OK) status = forward_open(&s->f, &s->r.m, &plan, err);
    if (status != KVB_OK) stage_close(s);
    return status;
}

static layer_observer observer_of(stage *s)
{
    layer_observer observer = {score, s, 0, 0};
    unsigned on_device = 0;
    for (size_t i = 0; i < s->p->options.n_metrics; i++) {
        observer.needs |= metric_needs(&s->p->options.metrics[i]);
        on_device |= metric_needs_on_device(&s->p->options.metrics[i]);
    }
    observer.spared = ~on_device;
    return observer;
}

// n rows, questions in turn, from tail row `first` of each on; their logits are drawn from where `draws`.
static kvb_status decode(stage *s, uint32_t n, uint32_t first, bool draws, kvb_error *err)
{
    uint32_t each = n / s->questions ? n / s->questions : 1, n_drawn = draws ? s->questions : 0;
    n = each * s->questions;
    for (uint32_t i = 0; i < n; i++) s->rows[i] = (decode_row){i / each, first + i % each, true};
    for (uint32_t i = 0; i < n_drawn; i++) s->listed[i] = i * each + each - 1;
    return forward_draw(s->f, s->rows, s->ids, n, s->listed, n_drawn, &s->p->options.draw, s->keys, s->drawn, err);
}

// Seconds of what a profile does with 1 or 2 layers, the best of some passes, since others may use the machine; fewer
// where they take long.
static kvb_status time_layers(stage *s, uint32_t n_layers, double best[4], kvb_error *err)
{
    layer_observer observer = observer_of(s);
    kvb_status status = KVB_OK;
    double began = meter_now();
    s->r.m.config.n_layers = n_layers;
    for (int pass = 0; status == KVB_OK && (pass == 0 || (pass < PASSES && meter_now() - began < LONG)); pass++) {
        double at[5] = {meter_now()};
        status = forward_prefill(s->f, s->ids, s->n_tokens, &observer, NULL, NULL, err);
        at[1] = meter_now();
        forward_begin_questions(s->f, s->questions);
        if (status == KVB_OK) status = decode(s, s->bulk_rows, 0, false, err);
        at[2] = meter_now();
        uint32_t next = s->bulk_rows / s->questions;
        if (status == KVB_OK) status = decode(s, s->questions, next, false, err);
        at[3] = meter_now();
        if (status == KVB_OK) status = decode(s, s->questions, next + 1, true, err);
        at[4] = meter_now();
        for (int i = 0; i < 4; i++)
            if (pass == 0 || at[i + 1] - at[i] < best[i]) best[i] = at[i + 1] - at[i];
    }
    s->r.m.config.n_layers = 2;
    return status;
}

static double positive(double x)
{
    return x > 0 ? x : 0;
}

static kvb_status measure(layer_pace *out, const profile_command *p, uint32_t layer, uint32_t n_tokens, bool narrow,
                          stage *s, kvb_error *err)
{
    double one[4], two[4];
    kvb_status status = stage_open(s, p, layer, n_tokens, narrow, err);
    if (status == KVB_OK) status = time_layers(s, 2, two, err);
    if (status == KVB_OK) status = time_layers(s, 1, one, err);
    if (status == KVB_OK)
        *out = (layer_pace){.context = positive(two[0] - one[0]),
                            .ending = one[0],
                            .bulk = positive(two[1] - one[1]),
                            .step = positive(two[2] - one[2]),
                            .logits = positive(one[3] - one[2])};
    return status;
}

// All that is known of one kind of layer.
typedef struct kind {
    uint32_t layer, count; // the first of them, and how many
    uint32_t wide_tokens, narrow_tokens, rows, questions;
    layer_pace wide, narrow;
    double linear, square; // seconds for a token and for its square, of the narrow one
} kind;

// The least number of tokens from `wanted` on, doubled, that all metrics take; the longest context at most.
static uint32_t least_tokens(const profile_command *p, uint32_t wanted)
{
    uint32_t most = p->job.max_tokens, tokens = wanted && wanted < most ? wanted : most;
    kvb_error refused;
    for (size_t i = 0; i < p->options.n_metrics; i++)
        while (tokens < most && metric_check_tokens(&p->options.metrics[i], tokens, &refused) != KVB_OK)
            tokens = tokens < most / 2 ? 2 * tokens : most;
    return tokens;
}

static kvb_status measure_kind(kind *k, const profile_command *p, kvb_error *err)
{
    stage s = {.n_tokens = 0};
    layer_pace half;
    k->wide_tokens = least_tokens(p, model_context_rows(p->m));
    k->narrow_tokens = least_tokens(p, NARROW_TOKENS);
    kvb_status status = measure(&k->wide, p, k->layer, k->wide_tokens, false, &s, err);
    k->rows = s.bulk_rows, k->questions = s.questions;
    stage_close(&s);
    uint32_t shorter = least_tokens(p, k->narrow_tokens / 2);
    if (status == KVB_OK) status = measure(&k->narrow, p, k->layer, k->narrow_tokens, true, &s, err);
    stage_close(&s);
    if (status == KVB_OK) status = measure(&half, p, k->layer, shorter, true, &s, err);
    stage_close(&s);
    if (status != KVB_OK) return status;
    double t = k->narrow_tokens, u = shorter, own = k->narrow.context / t;
    k->square = t > u ? positive((own - half.context / u) / (t - u)) : 0;
    k->linear = positive(own - k->square * t);
    return KVB_OK;
}

// Seconds of one layer's prefill of T tokens.
static double context_seconds(const kind *k, double T, bool last)
{
    double t = k->wide_tokens, wide = last ? k->wide.ending : k->wide.context,
           narrow = last ? k->narrow.ending * T / k->narrow_tokens : k->linear * T + k->square * T * T,
           inside = last ? k->narrow.ending * t / k->narrow_tokens : k->linear * t + k->square * t * t;
    return positive(wide - inside) * T / t + narrow;
}

// Seconds of one layer for n rows over a context of T tokens.
static double rows_seconds(const kind *k, double T, double n, bool step)
{
    double share = step ? n / k->questions : n / k->rows, over = T / k->narrow_tokens;
    // The wide one's products take whole blocks: a step's time hardly depends on how many rows it has.
    if (step) return k->wide.step + k->narrow.step * share * over;
    return share * (k->wide.bulk + k->narrow.bulk * over);
}

// Seconds of one batch: all that is given in one pass, then a step for each token.
static double batch_seconds(const profile_command *p, const kind *kinds, int n_kinds, const profile_context *c,
                            uint32_t first, uint32_t n)
{
    double given = 0, seconds = 0, drawing = 0;
    uint32_t steps = 0;
    for (uint32_t q = first; q < first + n; q++) {
        const profile_question *one = &c->questions[q];
        given += one->answer ? one->tail : one->n_suffix;
        drawing += !one->answer;
        if (!one->answer && one->tail - one->n_suffix > steps) steps = one->tail - one->n_suffix;
    }
    for (int i = 0; i < n_kinds; i++)
        seconds += kinds[i].count * (rows_seconds(&kinds[i], c->n_tokens, given, false) +
                                     steps * rows_seconds(&kinds[i], c->n_tokens, drawing, true));
    double vocabulary = p->m->config.vocabulary,
           rehearsed = vocabulary < REHEARSAL_VOCABULARY ? vocabulary : REHEARSAL_VOCABULARY;
    return seconds + (steps + (drawing > 0)) * kinds[0].wide.logits * vocabulary / rehearsed;
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

kvb_status profile_estimate_time(const profile_command *p, double record_bytes, double *seconds, kvb_error *err)
{
    enum { WRITING_RATE = 400000000 }; // bytes of a record in a second, measured; and a twentieth of one to end it
    kind kinds[MOST_KINDS];
    int n = list_kinds(kinds, p->m);
    uint32_t batch = p->job.max_questions ? p->job.max_questions : 1;
    *seconds = 0.05 + record_bytes / WRITING_RATE;
    for (int i = 0; i < n; i++) {
        kvb_status status = measure_kind(&kinds[i], p, err);
        if (status != KVB_OK) return status;
    }
    for (size_t i = 0; i < p->job.n_contexts; i++) {
        const profile_context *c = &p->job.contexts[i];
        for (int k = 0; k < n; k++) *seconds += kinds[k].count * context_seconds(&kinds[k], c->n_tokens, false);
        *seconds +=
            context_seconds(&kinds[n - 1], c->n_tokens, true) - context_seconds(&kinds[n - 1], c->n_tokens, false);
        for (uint32_t q = c->n_recorded; q < c->n_questions; q += batch)
            *seconds += batch_seconds(p, kinds, n, c, q, c->n_questions - q < batch ? c->n_questions - q : batch);
    }
    return KVB_OK;
}
