#include "profiler/profile_losses.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "profiler/backend/meter.h"
#include "profiler/metric/learned.h"
#include "runtime/rank.h"
#include <endian.h>
#include <stdlib.h>

static size_t budgeted_heads(const model *m)
{
    return (size_t)model_budgeted(&m->config, m->config.n_layers) * m->config.n_kv_heads;
}

void profile_losses_open(profile_losses *l, const model *m, const profile_job *job, const profile_options *o,
                         forward *f, profile_times *times)
{
    *l = (profile_losses){.m = m, .job = job, .o = o, .times = times};
    size_t n = o->n_metrics, batch = job->max_questions, layers = model_budgeted(&m->config, m->config.n_layers);
    if (!o->loss_queries || job->max_tail < 2 || n == 0) return;
    l->fold_scores = need(n, sizeof *l->fold_scores, "rankings");
    l->rankings = need(n, sizeof *l->rankings, "rankings");
    l->names = need(n, sizeof *l->names, "rankings");
    l->curves = need(n, sizeof *l->curves, "curves");
    l->errors = need(batch * n * budgeted_heads(m) * OUTPUT_LEVELS, sizeof(float), "output errors");
    l->packings = need(budgeted_heads(m) * RECORD_PACKINGS, sizeof(float), "errors of formats");
    l->gains = need(layers * GAIN_KINDS * 2, sizeof(float), "gains");
    l->rows = need(batch * job->max_tail, sizeof *l->rows, "rows");
    l->f = f;
    if (o->refit) l->refit = references_open(m, job->max_tokens, o->refit);
    forward_keep_queries(f, o->loss_queries);
}

void profile_losses_close(profile_losses *l)
{
    for (size_t i = 0; l->fold_scores && i < l->o->n_metrics; i++) free(l->fold_scores[i]);
    free_all(l->fold_scores, l->rankings, l->names, l->curves, l->errors, l->gains, l->packings, l->rows);
    references_free(&l->refit);
    *l = (profile_losses){0};
}

void profile_losses_see_row(profile_losses *l, uint32_t row, uint32_t step, uint32_t planned)
{
    uint64_t wanted = l->o->loss_queries;
    if (!l->f || (wanted < planned && (step + 1) * wanted / planned == step * wanted / planned)) return;
    l->rows[l->n_rows++] = row;
}

void profile_losses_begin_rows(profile_losses *l)
{
    if (!l->f) return;
    forward_keep_rows(l->f, l->rows, l->n_rows);
    l->n_rows = 0;
}

// ---- Rankings that were fitted on the context ----

static uint32_t fold_of(const kvb_ranking *r, const profile_context *c)
{
    char sha256[65];
    int32_t *ids = need_copy(c->ids, c->n_tokens, sizeof *ids, "token ids");
    for (uint32_t i = 0; i < c->n_tokens; i++) ids[i] = (int32_t)htole32((uint32_t)ids[i]);
    sha256_hex(ids, c->n_tokens * sizeof *ids, sha256);
    free(ids);
    return kvb_ranking_fold(r, sha256);
}

void profile_losses_enter(profile_losses *l, const profile_context *c)
{
    for (size_t i = 0; l->f && i < l->o->n_metrics; i++) {
        const kvb_ranking *r = learned_ranking_of(&l->o->metrics[i]);
        bool other = r && profile_scores_metric(l->job, c, i) && fold_of(r, c) != 0;
        free(l->fold_scores[i]);
        l->fold_scores[i] = other ? need(budgeted_heads(l->m) * c->n_tokens, sizeof(float), "scores") : NULL;
        if (other) l->rankings[i].sink = fold_of(r, c); // kept there until rankings are listed
    }
}

void profile_losses_see(profile_losses *l, const layer_view *view)
{
    if (l->refit.m) references_see(&l->refit, view);
}

kvb_status profile_losses_score(const profile_losses *l, size_t i, const layer_view *view, size_t at, kvb_error *err)
{
    if (!l->f || !l->fold_scores[i]) return KVB_OK;
    metric fold = learned_fold(&l->o->metrics[i], l->rankings[i].sink);
    return metric_score(&fold, view, l->fold_scores[i] + at, err);
}

// ---- What is recorded ----

// Whether a question lacks gains, or packing errors. A context's first one gets them, if the record lacks them.
static bool lacks(const profile_losses *l, const profile_context *c, const decoded_question *q,
                  bool has(record *r, size_t context, size_t question))
{
    record *r = l->o->grows;
    return q->number == 0 && q->n_queries > 0 && (!c->recorded || !has(r, record_find(r, c->id), 0));
}

static kvb_status find_gains(bool *found, profile_losses *l, const decoded_question *q, uint32_t slot, kvb_error *err)
{
    uint32_t n = q->n_answer - 1 < l->o->gain_rows ? q->n_answer - 1 : l->o->gain_rows;
    *found = false;
    if (n == 0) return KVB_OK;
    double start = meter_now();
    kvb_status status = forward_gains(l->f, slot, q->answer, q->n_suffix, n, l->gains, err);
    l->times->gains += meter_now() - start;
    *found = status == KVB_OK;
    return status;
}

// Lists the metrics whose curves are recorded: all, or with `again` those that a recorded question lacks. Scores that
// the record has are read from it.
static kvb_status list_rankings(size_t *n, profile_losses *l, const profile_context *c, bool again,
                                float *const *scores, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < l->o->n_metrics && status == KVB_OK; i++) {
        const metric *m = &l->o->metrics[i];
        bool held = c->recorded && l->job->growth.recorded >> i & 1;
        if (held && again) continue;
        if (held && !l->fold_scores[i]) {
            l->fold_scores[i] = need(budgeted_heads(l->m) * c->n_tokens, sizeof(float), "scores");
            status = record_read_scores(l->o->grows, record_find(l->o->grows, c->id), m->spec, l->fold_scores[i], err);
        }
        l->names[*n] = m->spec;
        l->rankings[(*n)++] = (loss_ranking){l->fold_scores[i] ? l->fold_scores[i] : scores[i], metric_protect_sink(m),
                                             metric_protect_window(m)};
    }
    return status;
}

kvb_status profile_losses_judge(profile_losses *l, const profile_context *c, const decoded_question *q, uint32_t n,
                                float *const *scores, kvb_error *err)
{
    l->n_rankings = 0;
    if (!l->f || n == 0) return KVB_OK;
    kvb_status status = list_rankings(&l->n_rankings, l, c, q[0].number < c->n_recorded, scores, err);
    if (status != KVB_OK || l->n_rankings == 0) return status;
    double start = meter_now();
    for (l->packed = 0; l->packed < n && !lacks(l, c, &q[l->packed], record_has_packings);) l->packed++;
    status = forward_output_errors(l->f, n, l->rankings, (uint32_t)l->n_rankings, l->refit.m ? &l->refit : NULL,
                                   l->errors, l->packed, l->packed < n ? l->packings : NULL, err);
    l->times->curves += meter_now() - start;
    return status;
}

kvb_status profile_losses_take(record_losses *out, profile_losses *l, const profile_context *c,
                               const decoded_question *q, uint32_t slot, kvb_error *err)
{
    size_t floats = budgeted_heads(l->m) * OUTPUT_LEVELS;
    bool gains = false;
    kvb_status status = KVB_OK;
    *out = (record_losses){0};
    if (!l->f || l->n_rankings == 0 || q->n_queries == 0) return KVB_OK;
    for (size_t r = 0; r < l->n_rankings; r++) l->curves[r] = l->errors + (slot * l->n_rankings + r) * floats;
    if (l->o->gain_rows && lacks(l, c, q, record_has_gains)) status = find_gains(&gains, l, q, slot, err);
    *out = (record_losses){l->names, l->curves, l->n_rankings, gains ? l->gains : NULL,
                           slot == l->packed ? l->packings : NULL};
    return status;
}

// ---- Questions of the finished record ----

kvb_status profile_recorded_read(recorded_questions *out, const profile_options *o, const profile_context *c,
                                 kvb_error *err)
{
    *out = (recorded_questions){0};
    size_t at = o->grows ? record_find(o->grows, c->id) : 0;
    const record_context_info *held = o->grows ? record_context(o->grows, at) : NULL;
    if (!held || !o->loss_queries) return KVB_OK;
    kvb_status status = KVB_OK;
    out->each = need(held->n_questions, sizeof *out->each, "questions");
    for (uint32_t i = 0; i < held->n_questions && status == KVB_OK; i++) {
        const record_question_info *q = &held->questions[i];
        if (q->n_queries == 0 || q->n_answer < 2) continue;
        int32_t *suffix = need(q->n_suffix, sizeof *suffix, "token ids"),
                *answer = need(q->n_answer, sizeof *answer, "token ids");
        out->each[out->n++] = (decoded_question){q->number, suffix, answer, q->n_suffix, q->n_answer, q->n_queries};
        if (q->n_suffix) status = record_read_suffix(o->grows, at, i, suffix, err);
        if (status == KVB_OK) status = record_read_answer(o->grows, at, i, answer, err);
        uint32_t tail = q->n_suffix + q->n_answer - 1;
        if (tail > out->n_tail) out->n_tail = tail;
    }
    return status;
}

void profile_recorded_free(recorded_questions *q)
{
    for (uint32_t i = 0; i < q->n; i++) free_all(q->each[i].suffix, q->each[i].answer);
    free(q->each);
    *q = (recorded_questions){0};
}

double profile_losses_flops(const model *m, const profile_job *job, const profile_options *o)
{
    const model_config *c = &m->config;
    double B = model_budgeted(c, c->n_layers), H = (double)c->n_heads * c->head_dim, w = H / c->n_kv_heads, flops = 0;
    for (size_t i = 0; i < job->n_contexts && o->loss_queries; i++) {
        const profile_context *one = &job->contexts[i];
        double context = 2 * H * one->n_tokens,
               each = context * (1 + o->n_metrics) + 2.0 * OUTPUT_LEVELS * o->n_metrics * H * w,
               question = one->n_questions > one->n_recorded ? profile_work(m, one, &one->questions[0]) : 0,
               row = question > 0 ? question / (2 * one->questions[0].tail) : 0; // decoded rows count twice there
        flops += B * ((one->n_questions - one->n_recorded) * o->loss_queries * each +
                      OUTPUT_PACKING_QUERIES * 2.0 * RECORD_PACKINGS * context);
        flops += o->gain_rows * (row * (1 + B / 2) + 2.0 * B * c->width * c->vocabulary);
    }
    return flops;
}

double profile_losses_bytes(const model *m, const profile_job *job, const profile_options *o)
{
    double curves = 0, first = 0, layers = model_budgeted(&m->config, m->config.n_layers);
    size_t added = 0;
    if (!o->loss_queries) return 0;
    for (size_t i = 0; i < o->n_metrics; i++) added += !(job->growth.recorded >> i & 1);
    for (size_t i = 0; i < job->n_contexts; i++) {
        const profile_context *c = &job->contexts[i];
        curves += (double)(c->n_questions - c->n_recorded) * (double)o->n_metrics;
        if (c->recorded && added)
            curves += (double)record_context(o->grows, record_find(o->grows, c->id))->n_questions * (double)added;
        first += !c->recorded;
    }
    return sizeof(float) * (curves * budgeted_heads(m) * OUTPUT_LEVELS +
                            first * (budgeted_heads(m) * RECORD_PACKINGS + layers * GAIN_KINDS * 2));
}
