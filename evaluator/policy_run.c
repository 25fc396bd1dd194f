#include "evaluator/policy_run.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <string.h>

// Everything that changes while a policy runs, so that a run can be set back to an earlier copy.
typedef struct policy_state {
    policy_head *heads; // [n_heads]
    float *memory;      // of all heads; head i's begins at memory_at[i]
    uint32_t *marks;    // [n_heads, T + extra]
} policy_state;

struct policy_run {
    const policy *p;
    const model *m;
    uint32_t n_tokens, extra, max_room;
    size_t n_heads;
    policy_state now, after; // the present state; a copy of that after the prefill
    size_t *memory_at;       // [n_heads + 1] where a head's floats begin
    uint32_t *keep;          // [max_room] scratch of evict_layer
    float *scores;           // [G, T] of the policy's metric
    kept_set kept;           // positions; filled layer by layer
    size_t n_kept;
    const kvb_table *table; // NULL: capacities do not change
    kvb_growth growth;      // when a cache is cut; with a table also to how many rows
    uint32_t cut_at;        // tokens that had been seen at the last cut
    uint32_t *budgets;      // [n_heads] scratch
};

static void copy_state(const policy_run *r, policy_state *to, const policy_state *from)
{
    memcpy(to->heads, from->heads, r->n_heads * sizeof *to->heads);
    memcpy(to->memory, from->memory, r->memory_at[r->n_heads] * sizeof *to->memory);
    memcpy(to->marks, from->marks, r->n_heads * r->max_room * sizeof *to->marks);
}

static void free_state(policy_state *s)
{
    free_all(s->heads, s->memory, s->marks);
}

// Sets up every head and its memory. The room is the whole text's: in decode, a policy that evicts at every step needs
// one entry more than its capacity, but the prefill shows it the whole context.
static kvb_status open_heads(policy_run *r, const uint32_t *capacity, double ratio, kvb_error *err)
{
    const model_config *c = &r->m->config;
    size_t floats = 0;
    for (size_t i = 0; i < r->n_heads; i++) {
        policy_head *h = &r->now.heads[i];
        *h = (policy_head){.p = r->p,
                           .layer = (uint32_t)(i / c->n_kv_heads),
                           .kv_head = (uint32_t)(i % c->n_kv_heads),
                           .group = c->n_heads / c->n_kv_heads,
                           .head_dim = c->head_dim,
                           .capacity = capacity[i],
                           .n_context = r->n_tokens,
                           .room = r->max_room,
                           .split = ratio};
        if (capacity[i] == 0) return kvb_fail(err, KVB_ARGUMENT, "policy %s: head %zu has no capacity", r->p->spec, i);
        r->memory_at[i] = floats;
        floats += r->p->kind->floats ? r->p->kind->floats(h) : 0;
    }
    r->memory_at[r->n_heads] = floats;
    r->now.memory = need(floats, sizeof(float), "numbers of a policy's state");
    r->after.memory = need(floats, sizeof(float), "numbers of a policy's state");
    for (size_t i = 0; i < r->n_heads; i++) {
        r->now.heads[i].memory = r->now.memory + r->memory_at[i];
        r->now.heads[i].marks = r->now.marks + i * r->max_room;
    }
    copy_state(r, &r->after, &r->now);
    return KVB_OK;
}

kvb_status policy_run_open(policy_run **out, const policy *p, const model *m, const uint32_t *capacity, double ratio,
                           uint32_t n_tokens, uint32_t extra, kvb_error *err)
{
    size_t n_heads = (size_t)m->config.n_layers * m->config.n_kv_heads, room = (size_t)n_tokens + extra;
    *out = NULL;
    if (room > UINT32_MAX) return kvb_fail(err, KVB_ARGUMENT, "policy %s: %zu tokens are too many", p->spec, room);
    if (model_budgeted(&m->config, m->config.n_layers) < m->config.n_layers)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "policy %s: %s has layers whose cache is bounded by a window of %u positions; policies that "
                        "evict during decoding do not know them, metrics do",
                        p->spec, m->config.name, m->config.window);
    policy_run *r = need(1, sizeof *r, "policies");
    *r = (policy_run){
        .p = p, .m = m, .n_tokens = n_tokens, .extra = extra, .max_room = (uint32_t)room, .n_heads = n_heads};
    policy_state *const states[] = {&r->now, &r->after};
    for (int i = 0; i < 2; i++) {
        states[i]->heads = need(n_heads, sizeof(policy_head), "heads");
        states[i]->marks = need(n_heads * room, sizeof(uint32_t), "marked entries");
    }
    r->memory_at = need(n_heads + 1, sizeof *r->memory_at, "heads");
    r->keep = need(room, sizeof *r->keep, "entries");
    r->scores = need((size_t)m->config.n_kv_heads * n_tokens, sizeof *r->scores, "scores");
    r->budgets = need(n_heads, sizeof *r->budgets, "heads");
    r->growth.interval = p->interval;
    r->kept = kept_set_open((uint32_t)n_heads, n_heads * n_tokens);
    kvb_status status = open_heads(r, capacity, ratio, err);
    if (status == KVB_OK) *out = r;
    else policy_run_close(r);
    return status;
}

void policy_run_close(policy_run *r)
{
    if (!r) return;
    kept_set_free(&r->kept);
    free_state(&r->now);
    free_state(&r->after);
    free_all(r->memory_at, r->keep, r->scores, r->budgets, r);
}

// Sets the heads' capacities to the budgets that the table grants once n_tokens tokens have been seen.
static kvb_status grant(policy_run *r, uint32_t n_tokens, kvb_error *err)
{
    kvb_status status =
        kvb_growth_budgets(r->table, &r->growth, n_tokens, r->cut_at, r->budgets, r->n_heads, NULL, err);
    for (size_t i = 0; i < r->n_heads && status == KVB_OK; i++) {
        r->now.heads[i].capacity = r->budgets[i];
        r->now.heads[i].sink = r->growth.sink;
    }
    return status;
}

kvb_status policy_run_grow(policy_run *r, const kvb_table *table, uint32_t target, kvb_error *err)
{
    kvb_growth growth = {.target_size = target, .interval = r->p->interval};
    kvb_status status = kvb_growth_check(table, &growth, err);
    if (status != KVB_OK) return status;
    r->table = table;
    r->growth = growth;
    return grant(r, r->n_tokens, err);
}

// ---- Prefill ----

static kvb_status see_layer(policy_run *r, const layer_view *view, kvb_error *err)
{
    uint32_t T = view->n_tokens;
    kvb_status status = KVB_OK;
    if (T != r->n_tokens)
        return kvb_fail(err, KVB_ARGUMENT, "policy %s: %u tokens, expected %u", r->p->spec, T, r->n_tokens);
    if (view->layer == 0) r->n_kept = 0;
    if (r->p->kind->ranks) status = metric_score(&r->p->scores, view, r->scores, err);
    for (uint32_t g = 0; g < view->n_kv_heads && status == KVB_OK; g++) {
        size_t i = (size_t)view->layer * view->n_kv_heads + g;
        uint32_t *keep = r->kept.positions + r->n_kept, n = 0;
        status = policy_prefill(&r->now.heads[i], view, r->scores + (size_t)g * T, keep, &n, err);
        r->kept.offsets[i] = r->n_kept;
        r->kept.offsets[i + 1] = r->n_kept += n;
    }
    return status;
}

static kvb_status see_all(void *context, const layer_view *view, kvb_error *err)
{
    const policy_watch *watch = context;
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < watch->n && status == KVB_OK; i++) {
        policy_run *r = watch->runs[i];
        status = see_layer(r, view, err);
        if (status == KVB_OK && view->layer + 1 == r->m->config.n_layers) copy_state(r, &r->after, &r->now);
    }
    return status;
}

layer_observer policy_observer(policy_watch *watch)
{
    unsigned needs = 0;
    for (size_t i = 0; i < watch->n; i++) {
        const policy *p = watch->runs[i]->p;
        needs |= p->kind->needs | (p->kind->ranks ? metric_needs(&p->scores) : 0);
    }
    return (layer_observer){see_all, watch, needs};
}

void policy_run_restart(policy_run *r)
{
    for (size_t i = 0; i < r->n_heads; i++) { // the counts go on
        r->after.heads[i].looked = r->now.heads[i].looked;
        r->after.heads[i].steps = r->now.heads[i].steps;
    }
    copy_state(r, &r->now, &r->after);
    r->cut_at = r->n_tokens;
}

const kept_set *policy_run_kept(const policy_run *r)
{
    return &r->kept;
}

kv_cache *policy_run_cache(policy_run *r, const session *s, uint32_t extra)
{
    policy_run_restart(r);
    return session_cache(s, &r->kept, extra);
}

// ---- Decoding ----

static policy_head *head_of(policy_run *r, const decode_view *view, uint32_t kv_head)
{
    return &r->now.heads[(size_t)view->layer * r->m->config.n_kv_heads + kv_head];
}

static uint32_t choose_entries(void *context, const decode_view *view, uint32_t kv_head, kv_span span, const float *q,
                               uint32_t *indices)
{
    policy_head *h = head_of(context, view, kv_head);
    uint32_t n = h->p->kind->choose(h, span, q, indices);
    h->looked += n == UINT32_MAX ? span.count : n;
    h->steps++;
    return n;
}

static void add_weights(void *context, const decode_view *view, uint32_t kv_head, kv_span span, const float *weights)
{
    policy_head *h = head_of(context, view, kv_head);
    if (h->p->kind->attended) h->p->kind->attended(h, span, weights);
    if (h->p->kind->choose) return;
    h->looked += span.count;
    h->steps++;
}

static kvb_status evict_layer(void *context, const decode_view *view, kvb_error *err)
{
    policy_run *r = context;
    uint32_t G = r->m->config.n_kv_heads, n_tokens = view->cache->next_position + view->n_rows;
    kvb_status status = KVB_OK;
    if (!kvb_growth_due(&r->growth, n_tokens, r->cut_at, 0)) return KVB_OK;
    if (r->table && view->layer == 0) status = grant(r, n_tokens, err);
    if (view->layer + 1 == r->m->config.n_layers) r->cut_at = n_tokens;
    for (uint32_t g = 0; g < G && status == KVB_OK; g++) {
        policy_head *h = head_of(r, view, g);
        kv_span span = kv_cache_span(view->cache, view->layer, g);
        uint32_t n;
        status = policy_evict(h, span, r->keep, &n, err);
        if (status == KVB_OK && n < span.count) kv_cache_keep(view->cache, view->layer, g, r->keep, n);
    }
    return status;
}

decode_hooks policy_run_hooks(policy_run *r)
{
    return (decode_hooks){.context = r,
                          .choose = r->p->kind->choose ? choose_entries : NULL,
                          .attended = add_weights,
                          .layer_done = evict_layer};
}

kvb_status policy_run_turn(policy_run *r, const kv_cache *c, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < r->n_heads && status == KVB_OK; i++)
        status =
            policy_new_turn(&r->now.heads[i], kv_cache_span(c, r->now.heads[i].layer, r->now.heads[i].kv_head), err);
    return status;
}

double policy_run_looked(const policy_run *r)
{
    double sum = 0;
    for (const policy_head *h = r->now.heads; h < r->now.heads + r->n_heads; h++)
        if (h->steps) sum += (double)h->looked / (double)h->steps / (double)r->n_heads;
    return sum;
}
