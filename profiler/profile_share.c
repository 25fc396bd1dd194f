// What a profiling run costs, and how it is shared out among processes.
//
// The unit of sharing is a piece: one prefill and a stretch of that context's questions. A context whose questions go
// to k processes is prefilled k times, so contexts are cut no more than the balance needs. Which cut gives the shortest
// run is bin packing; a piece limit ("no piece longer than M") and longest-first placement come within a few per cent
// of the bound, and a sweep over M finds the best trade between balance and repeated prefills.
//
// Every process computes the plan by itself and must get the same one: only additions, multiplications and comparisons
// of doubles here, no libm.
#include "formats/need.h"
#include "profiler/profile.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

// ---- Cost, in floating-point operations ----

static double linear_flops(const model_config *c)
{
    double heads = (double)c->n_heads * c->head_dim, kv = (double)c->n_kv_heads * c->head_dim, inner = 0;
    for (uint32_t l = 0; l < c->n_layers; l++)
        inner += layer_set_has(&c->sparse, l) ? (double)c->n_used * c->expert_width : c->ffn_width;
    return 2.0 * (c->n_layers * (2 * heads * c->width + 2 * kv * c->width) + 3.0 * inner * c->width);
}

// Matrix products and the causal half of attention.
static double prefill_flops(const model_config *c, const profile_context *context)
{
    double heads = (double)c->n_heads * c->head_dim, T = context->n_tokens;
    return T * (linear_flops(c) + 2.0 * c->n_layers * heads * T);
}

static double question_flops(const model_config *c, const profile_context *context, const profile_question *q)
{
    double heads = (double)c->n_heads * c->head_dim, T = context->n_tokens;
    double drawn = q->answer ? 0 : q->tail - q->n_suffix + 1; // rows whose logits are needed
    return q->tail * (linear_flops(c) + 4.0 * c->n_layers * heads * T) + drawn * 2.0 * c->width * c->vocabulary;
}

double profile_flops(const model *m, const profile_job *job)
{
    double flops = 0;
    for (size_t i = 0; i < job->n_contexts; i++) {
        const profile_context *c = &job->contexts[i];
        flops += prefill_flops(&m->config, c) + profile_work_again(m, c) / 2;
        for (uint32_t q = c->n_recorded; q < c->n_questions; q++)
            flops += question_flops(&m->config, c, &c->questions[q]);
    }
    return flops;
}

// A decoded row waits for weights that a batch of few rows reads again, and the softmax of a prefill takes as long as
// the products of its attention: an operation of these takes about twice as long as one of a large product
// (docs/performance.md).
double profile_work(const model *m, const profile_context *c, const profile_question *q)
{
    if (q) return 2 * question_flops(&m->config, c, q);
    return 2 * prefill_flops(&m->config, c) - c->n_tokens * linear_flops(&m->config);
}

double profile_work_again(const model *m, const profile_context *c)
{
    const profile_question all = {.tail = c->n_again, .n_suffix = c->n_again + 1}; // no row's logits are needed
    return profile_work(m, c, &all);
}

// ---- What is done ----

size_t profile_state_size(const profile_job *job)
{
    return job->n_contexts + (size_t)job->n_pairs;
}

void profile_read_state(uint8_t *state, const profile_job *job, const record_writer *writer)
{
    uint8_t *question = state + job->n_contexts;
    for (size_t i = 0; i < job->n_contexts; i++) {
        const profile_context *c = &job->contexts[i];
        state[i] = record_writer_has_context(writer, c->id);
        for (uint32_t q = c->n_recorded; q < c->n_questions; q++)
            *question++ = record_writer_has_question(writer, c->id, q);
    }
}

// ---- The plan ----

// What is left of one context.
typedef struct remainder {
    uint32_t *missing; // [n] question numbers, ascending; points into plan.missing
    uint32_t n;
    double prefill, questions, longest; // cost; longest: of one question
    bool open;                          // anything left at all
} remainder;

typedef struct placed {
    profile_piece piece;
    double cost;
    uint32_t share;
} placed;

typedef struct plan {
    const model_config *c;
    const profile_job *job;
    remainder *left;   // [n_contexts]
    uint32_t *missing; // [n_pairs]
    placed *pieces;    // room for n_contexts + n_pairs
    size_t n;
    double *load; // [n_shares]
    uint32_t n_shares;
} plan;

static void find_missing(plan *p, const uint8_t *state)
{
    const profile_job *job = p->job;
    size_t pairs = (size_t)job->n_pairs, all = job->n_contexts + pairs;
    p->left = need(job->n_contexts, sizeof *p->left, "contexts");
    p->missing = need(pairs, sizeof *p->missing, "questions");
    p->pieces = need(all, sizeof *p->pieces, "pieces of work");
    p->load = need(p->n_shares, sizeof *p->load, "shares");
    uint32_t *next = p->missing;
    size_t pair = 0;
    for (size_t i = 0; i < job->n_contexts; i++) {
        const profile_context *c = &job->contexts[i];
        remainder *r = &p->left[i];
        *r = (remainder){.missing = next, .prefill = prefill_flops(p->c, c), .open = !state || !state[i]};
        for (uint32_t q = c->n_recorded; q < c->n_questions; q++, pair++) {
            if (state && state[job->n_contexts + pair]) continue;
            double cost = question_flops(p->c, c, &c->questions[q]);
            r->questions += cost;
            r->longest = cost > r->longest ? cost : r->longest;
            r->missing[r->n++] = q;
            r->open = true;
        }
        next += r->n;
    }
}

// Cuts context `i` into `parts` stretches of about as many missing questions each.
static void cut_context(plan *p, size_t i, uint32_t parts)
{
    const remainder *r = &p->left[i];
    const profile_context *c = &p->job->contexts[i];
    for (uint32_t k = 0; k < parts; k++) {
        uint32_t from = (uint32_t)((uint64_t)r->n * k / parts), to = (uint32_t)((uint64_t)r->n * (k + 1) / parts);
        placed *one = &p->pieces[p->n++];
        *one = (placed){{(uint32_t)i, 0, 0}, r->prefill, 0};
        if (from == to) continue; // only the context itself is missing
        one->piece.first = r->missing[from];
        one->piece.count = r->missing[to - 1] + 1 - r->missing[from];
        for (uint32_t q = from; q < to; q++) one->cost += question_flops(p->c, c, &c->questions[r->missing[q]]);
    }
}

static void cut_all(plan *p, double limit)
{
    p->n = 0;
    for (size_t i = 0; i < p->job->n_contexts; i++) {
        const remainder *r = &p->left[i];
        if (!r->open) continue;
        uint32_t most = r->n ? r->n : 1, parts = most;
        double room = limit - r->prefill;
        if (room > 0 && r->questions / room < most - 1) {
            parts = (uint32_t)(r->questions / room);
            parts += parts * room < r->questions;
        }
        cut_context(p, i, parts ? parts : 1);
    }
}

// The most expensive first; among equals calibration order, so that there is only one plan.
static int compare_cost(const void *a, const void *b)
{
    const placed *x = a, *y = b;
    if (x->cost != y->cost) return x->cost > y->cost ? -1 : 1;
    if (x->piece.context != y->piece.context) return x->piece.context < y->piece.context ? -1 : 1;
    return (x->piece.first > y->piece.first) - (x->piece.first < y->piece.first);
}

// Places every piece on the share that has the least so far. Returns the heaviest load.
static double place_all(plan *p)
{
    qsort(p->pieces, p->n, sizeof *p->pieces, compare_cost);
    memset(p->load, 0, p->n_shares * sizeof *p->load);
    double heaviest = 0;
    for (size_t i = 0; i < p->n; i++) {
        uint32_t least = 0;
        for (uint32_t s = 1; s < p->n_shares; s++) least = p->load[s] < p->load[least] ? s : least;
        p->pieces[i].share = least;
        p->load[least] += p->pieces[i].cost;
        heaviest = p->load[least] > heaviest ? p->load[least] : heaviest;
    }
    return heaviest;
}

// Leaves the best cut in p->pieces.
static void choose_cut(plan *p)
{
    double total = 0, bound = 0;
    for (size_t i = 0; i < p->job->n_contexts; i++) {
        const remainder *r = &p->left[i];
        if (!r->open) continue;
        total += r->prefill + r->questions;
        bound = r->prefill + r->longest > bound ? r->prefill + r->longest : bound;
    }
    bound = total / p->n_shares > bound ? total / p->n_shares : bound;
    double best = total, best_limit = total;
    for (double limit = bound; limit < total; limit *= 1.04) {
        cut_all(p, limit);
        double heaviest = place_all(p);
        if (heaviest > best) continue; // equal: the longer limit cuts less
        best = heaviest;
        best_limit = limit;
    }
    cut_all(p, best_limit);
    place_all(p);
}

static int compare_place(const void *a, const void *b)
{
    const profile_piece *x = a, *y = b;
    if (x->context != y->context) return x->context < y->context ? -1 : 1;
    return (x->first > y->first) - (x->first < y->first);
}

static void take_share(profile_share *out, const plan *p, uint32_t share)
{
    out->pieces = need(p->n, sizeof *out->pieces, "pieces of work");
    for (size_t i = 0; i < p->n; i++) {
        out->total += p->pieces[i].cost;
        if (p->pieces[i].share != share) continue;
        out->pieces[out->n++] = p->pieces[i].piece;
        out->cost += p->pieces[i].cost;
    }
    for (uint32_t s = 0; s < p->n_shares; s++) out->heaviest = p->load[s] > out->heaviest ? p->load[s] : out->heaviest;
    qsort(out->pieces, out->n, sizeof *out->pieces, compare_place);
}

kvb_status profile_share_out(profile_share *out, const model *m, const profile_job *job, const uint8_t *state,
                             uint32_t n_shares, uint32_t share, kvb_error *err)
{
    memset(out, 0, sizeof *out);
    if (n_shares == 0 || share >= n_shares)
        return kvb_fail(err, KVB_ARGUMENT, "share %u of %u, expected one of 1 to %u", share + 1, n_shares, n_shares);
    plan p = {.c = &m->config, .job = job, .n_shares = n_shares};
    find_missing(&p, state);
    choose_cut(&p);
    take_share(out, &p, share);
    free_all(p.left, p.missing, p.pieces, p.load);
    return KVB_OK;
}

void profile_share_free(profile_share *share)
{
    free(share->pieces);
    memset(share, 0, sizeof *share);
}
