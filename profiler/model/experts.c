#include "profiler/model/experts.h"
#include "formats/need.h"
#include <math.h>
#include <stdlib.h>

struct experts_pass {
    dev scores;        // [rows, E] of the router
    dev taken, made;   // [rows, D] rows of one expert, and what it makes of them
    float *logits;     // [rows, E] host
    uint32_t *numbers; // [rows, used] experts of each row
    float *shares;     // [rows, used] their weights
    uint32_t *rows;    // [rows] of one expert
    float *weights;    // [rows] of these
};

uint64_t experts_pass_bytes(const model_config *c, uint32_t max_rows)
{
    return c->n_experts ? (uint64_t)max_rows * (c->n_experts + 2ull * c->width) * sizeof(float) : 0;
}

bool experts_pass_open(experts_pass **out, const model *m, uint32_t max_rows)
{
    const model_config *c = &m->config;
    const backend *b = m->device->b;
    size_t rows = max_rows;
    experts_pass *e = *out = need(1, sizeof *e, "passes");
    e->scores = b->alloc(m->device, rows * c->n_experts);
    e->taken = b->alloc(m->device, rows * c->width);
    e->made = b->alloc(m->device, rows * c->width);
    e->logits = need_more(NULL, rows * c->n_experts, sizeof *e->logits, "scores of experts");
    e->numbers = need_more(NULL, rows * c->n_used, sizeof *e->numbers, "experts of rows");
    e->shares = need_more(NULL, rows * c->n_used, sizeof *e->shares, "experts of rows");
    e->rows = need_more(NULL, rows, sizeof *e->rows, "rows of an expert");
    e->weights = need_more(NULL, rows, sizeof *e->weights, "rows of an expert");
    if (e->scores.address && e->taken.address && e->made.address) return true;
    experts_pass_close(e, m);
    *out = NULL;
    return false;
}

void experts_pass_close(experts_pass *e, const model *m)
{
    if (!e) return;
    const dev all[] = {e->scores, e->taken, e->made};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) m->device->b->release(m->device, all[i]);
    free(e->logits);
    free(e->numbers);
    free(e->shares);
    free(e->rows);
    free(e->weights);
    free(e);
}

static bool is_among(const uint32_t *numbers, uint32_t n, uint32_t number)
{
    for (uint32_t i = 0; i < n; i++)
        if (numbers[i] == number) return true;
    return false;
}

void experts_choose(const float *logits, uint32_t n, uint32_t used, bool normed, uint32_t *numbers, float *weights)
{
    double top = -INFINITY, all = 0, chosen = 0;
    for (uint32_t i = 0; i < n; i++) top = logits[i] > top ? logits[i] : top;
    for (uint32_t i = 0; i < n; i++) all += exp(logits[i] - top);
    for (uint32_t u = 0; u < used; u++) {
        uint32_t best = UINT32_MAX; // what is no number is never better, and each expert is taken once all the same
        for (uint32_t i = 0; i < n; i++)
            if (!is_among(numbers, u, i) && (best == UINT32_MAX || logits[i] > logits[best])) best = i;
        numbers[u] = best;
        weights[u] = (float)exp(logits[best] - top);
        chosen += weights[u];
    }
    for (uint32_t u = 0; u < used; u++) weights[u] = (float)(weights[u] / (normed ? chosen : all));
}

// Rows [n] that go through expert `number`, and with which weights.
static uint32_t rows_of(experts_pass *e, const model_config *c, uint32_t number, uint32_t n)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < n * c->n_used; i++)
        if (e->numbers[i] == number) {
            e->rows[count] = i / c->n_used;
            e->weights[count++] = e->shares[i];
        }
    return count;
}

// What one expert makes of the n rows that were taken.
static void run_expert(const layer_pass *p, const model_layer *w, uint32_t number, uint32_t n)
{
    const backend *b = p->b;
    const model_config *c = &p->m->config;
    const experts_pass *e = p->experts;
    const dev_matrix *own = w->experts + 3 * (size_t)number;
    uint32_t F = c->expert_width;
    const projection to[] = {{p->gate, own[0]}, {p->up, own[1]}};
    dev bias = {NULL};
    if (w->expert_bias.address) bias = dev_at(w->expert_bias, number * (2 * (size_t)F + c->width));
    b->project(p->on, to, 2, e->taken, n);
    if (bias.address) {
        b->add_row(p->on, p->gate, bias, n, F);
        b->add_row(p->on, p->up, dev_at(bias, F), n, F);
    }
    b->glu(p->on, p->gate, p->up, c->act, (size_t)n * F);
    b->matmul(p->on, e->made, p->gate, own[2], n, false);
    if (bias.address) b->add_row(p->on, e->made, dev_at(bias, 2 * (size_t)F), n, c->width);
}

void experts_apply(const layer_pass *p, const model_layer *w, dev y, dev x, uint32_t n)
{
    const backend *b = p->b;
    const model_config *c = &p->m->config;
    experts_pass *e = p->experts;
    b->matmul(p->on, e->scores, x, w->router, n, false);
    if (w->router_bias.address) b->add_row(p->on, e->scores, w->router_bias, n, c->n_experts);
    b->download(p->on, e->logits, e->scores, (size_t)n * c->n_experts);
    for (uint32_t i = 0; i < n; i++)
        experts_choose(e->logits + (size_t)i * c->n_experts, c->n_experts, c->n_used, c->experts_normed,
                       e->numbers + (size_t)i * c->n_used, e->shares + (size_t)i * c->n_used);
    b->clear(p->on, y, (size_t)n * c->width);
    for (uint32_t number = 0; number < c->n_experts; number++) {
        uint32_t count = rows_of(e, c, number, n);
        if (!count) continue;
        b->take_rows(p->on, e->taken, x, e->rows, count, c->width);
        run_expert(p, w, number, count);
        b->add_rows(p->on, y, e->made, e->rows, e->weights, count, c->width);
    }
}
