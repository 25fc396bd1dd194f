// Curves of output errors and gains of layers: the fast path against plain loops in double, on made-up heads and on the
// tiny model, for which a prefill of the joined text gives the reference's queries, keys and values.
#include "formats/need.h"
#include "profiler/model/loss_pass.h"
#include "test_profiler_cases.h"

enum { T = 150, TAIL = 12, VOCABULARY = 300, LEVELS = OUTPUT_LEVELS };

// ---- The reference: what the output of one query of a group loses if some tokens are not kept ----

typedef struct plain_head {
    const float *k, *v, *tail_k, *tail_v, *sinks; // [T, d], [.., d], [group]
    uint32_t n_tokens, group, d;
    double softcap;
} plain_head;

static double plain_score(const plain_head *h, const float *q, const float *k)
{
    double s = 0;
    for (uint32_t i = 0; i < h->d; i++) s += (double)q[i] * (double)k[i];
    s /= sqrt(h->d);
    return h->softcap > 0 ? h->softcap * tanh(s / h->softcap) : s;
}

// Computes the output o [d] of head j of the group over the kept tokens of the context and the tail's first n_tail.
static void plain_output(double *o, const plain_head *h, uint32_t j, const float *q, const bool *kept, uint32_t n_tail)
{
    double mass = h->sinks ? exp((double)h->sinks[j]) : 0;
    for (uint32_t i = 0; i < h->d; i++) o[i] = 0;
    for (uint32_t t = 0; t < h->n_tokens + n_tail; t++) {
        bool after = t >= h->n_tokens;
        if (!after && !kept[t]) continue;
        const float *k = after ? h->tail_k + (size_t)(t - h->n_tokens) * h->d : h->k + (size_t)t * h->d,
                    *v = after ? h->tail_v + (size_t)(t - h->n_tokens) * h->d : h->v + (size_t)t * h->d;
        double e = exp(plain_score(h, q, k));
        mass += e;
        for (uint32_t i = 0; i < h->d; i++) o[i] += e * (double)v[i];
    }
    for (uint32_t i = 0; i < h->d; i++) o[i] /= mass;
}

// Computes r [group d] = o(kept) - o(all).
static void plain_difference(double *r, const plain_head *h, const float *q, const bool *kept, uint32_t n_tail)
{
    bool all[T];
    double whole[512];
    memset(all, true, sizeof all);
    for (uint32_t j = 0; j < h->group; j++) {
        plain_output(r + (size_t)j * h->d, h, j, q + (size_t)j * h->d, kept, n_tail);
        plain_output(whole, h, j, q + (size_t)j * h->d, all, n_tail);
        for (uint32_t i = 0; i < h->d; i++) r[(size_t)j * h->d + i] -= whole[i];
    }
}

// Returns |W r|^2. w is [width, columns], and the group's columns begin at `column`.
static double plain_square(const double *r, uint32_t n, const float *w, uint32_t width, size_t columns, size_t column)
{
    double sum = 0;
    for (uint32_t row = 0; row < width; row++) {
        double y = 0;
        for (uint32_t i = 0; i < n; i++) y += (double)w[row * columns + column + i] * r[i];
        sum += y * y;
    }
    return sum;
}

static void keep_best(bool *kept, const output_order *order, uint32_t n)
{
    memset(kept, 0, T * sizeof *kept);
    for (uint32_t i = 0; i < n; i++) kept[order->position[i]] = true;
}

static void near_share(const char *what, double got, double want, double tolerance)
{
    ck_assert_msg(fabs(got - want) <= tolerance * fabs(want) + 1e-12, "%s: %.9g, expected %.9g", what, got, want);
}

// ---- Made-up heads ----

static float *packed_and_unpacked(const float *rows, kvb_packing p, kvb_side side, uint32_t d)
{
    void *packed = case_alloc(kvb_packed_bytes(p, side, T, d), 1);
    float *out = case_alloc(T * d, sizeof *out);
    help_ok(kvb_pack(p, side, rows, T, d, packed, err));
    help_ok(kvb_unpack(p, side, packed, T, d, out, err));
    free(packed);
    return out;
}

// Returns a set's error with other keys and values: plain outputs over them, compared with those over the exact ones.
static double plain_error(const output_head *head, const output_queries *set, const plain_head *other,
                          const plain_head *exact, const float *wo, uint32_t width)
{
    uint32_t d = head->head_dim, w = head->group * d;
    double sum = 0, r[512], o[512];
    bool all[T];
    memset(all, true, sizeof all);
    for (uint32_t i = 0; i < set->n; i++) {
        const float *q = set->q + (size_t)i * w;
        for (uint32_t j = 0; j < head->group; j++) {
            plain_output(r + j * d, other, j, q + j * d, all, set->tail[i] + 1);
            plain_output(o + j * d, exact, j, q + j * d, all, set->tail[i] + 1);
        }
        for (uint32_t x = 0; x < w; x++) r[x] -= o[x];
        sum += plain_square(r, w, wo, width, w, 0) / set->n;
    }
    return sum;
}

static void judge_packings(const output_head *head, const output_queries *sets, const plain_head *exact,
                           const float *wo, uint32_t width)
{
    float errors[3 * RECORD_PACKINGS];
    for (int s = 0; s < 3; s++) output_packing_errors(errors + s * RECORD_PACKINGS, head, &sets[s]);
    for (int column = 0; column < RECORD_PACKINGS; column++) {
        kvb_packing p = KVB_PACK_INT8 + column % 3;
        kvb_side side = column < 3 ? KVB_KEYS : KVB_VALUES;
        float *rows = packed_and_unpacked(column < 3 ? head->k : head->v, p, side, head->head_dim);
        plain_head packed = *exact;
        *(column < 3 ? &packed.k : &packed.v) = rows;
        for (int s = 0; s < 3; s++) {
            double want = plain_error(head, &sets[s], &packed, exact, wo, width);
            float got = errors[s * RECORD_PACKINGS + column];
            ck_assert_msg(fabs((double)got - want) <= 2e-3 * want + 1e-10, "set %d, column %d: %.9g, expected %.9g", s,
                          column, (double)got, want);
        }
        free(rows);
    }
}

// Checks errors of refitted cuts: plain outputs over what kvb_refit() makes of each level's tokens.
static void judge_refits(output_head head, const output_queries *sets, const output_order *order,
                         const plain_head *exact, const float *wo, uint32_t width)
{
    enum { REFERENCES = 48 };
    uint32_t d = head.head_dim, positions[T];
    float errors[3 * LEVELS], cut_errors[3 * LEVELS], *k = case_alloc(T * d, sizeof *k),
                                                      *v = case_alloc(T * d, sizeof *v),
                                                      *asked = case_floats(REFERENCES * d, 1, 0);
    kvb_refit_head refit = {T, d, T, REFERENCES, head.k, head.v, positions, asked};
    size_t bytes, n_changed = 0;
    help_ok(kvb_refit_bytes(&refit, &bytes, err));
    void *work = case_alloc(bytes, 1);
    help_ok(output_errors(cut_errors, &head, sets, 3, order, 1, err));
    head.refit = &refit;
    help_ok(output_errors(errors, &head, sets, 3, order, 1, err));
    float alone[LEVELS]; // other sets change no bit
    help_ok(output_errors(alone, &head, &sets[2], 1, order, 1, err));
    ck_assert_mem_eq(alone, errors + 2 * (size_t)LEVELS, sizeof alone);
    for (uint32_t level = 2; level < LEVELS - 3; level += 2) { // between two that are refitted
        const float *e = errors + level, *was = cut_errors + level;
        near_share("between", (double)*e, (double)*was * sqrt((double)(e[-1] / was[-1] * e[1] / was[1])), 1e-5);
    }
    for (uint32_t level = 1; level < LEVELS; level += 2) {
        bool kept[T];
        kvb_refit_result done;
        refit.n_kept = record_curve_tokens(level, T, order->protect);
        keep_best(kept, order, refit.n_kept);
        for (uint32_t t = 0, n = 0; t < T; t++)
            if (kept[t]) positions[n++] = t;
        help_ok(kvb_refit(&refit, work, bytes, k, v, NULL, &done, err));
        n_changed += done.changed != 0;
        plain_head cut = *exact;
        cut.k = k, cut.v = v, cut.n_tokens = refit.n_kept;
        for (uint32_t s = 0; s < 3; s++)
            near_share("refitted", (double)errors[s * LEVELS + level],
                       plain_error(&head, &sets[s], &cut, exact, wo, width), 1e-4);
    }
    ck_assert_uint_ge(n_changed, 3);
    free_all(k, v, asked, work);
}

UNIT_TEST(test_errors_against_plain_loops)
{
    static const struct {
        uint32_t group, d, width;
        float softcap;
        bool sinks;
    } cases[] = {{1, 16, 40, 0, false}, {3, 8, 30, 0, false}, {2, 16, 64, 3, false}, {4, 8, 20, 0, true}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        uint32_t g = cases[c].group, d = cases[c].d, D = cases[c].width, w = g * d;
        float *k = case_floats(T * d, 2, 0), *v = case_floats(T * d, 1, 0.5), *tk = case_floats(TAIL * d, 2, 0),
              *tv = case_floats(TAIL * d, 1, 0), *wo = case_floats((size_t)D * w, 1, 0), *q = case_floats(5 * w, 2, 0),
              *scores = case_floats(T, 1, 0), *sinks = case_floats(g, 1, 1),
              *gram = case_alloc((size_t)w * w, sizeof *gram);
        for (uint32_t a = 0; a < w; a++)
            for (uint32_t b = 0; b < w; b++) {
                double sum = 0;
                for (uint32_t r = 0; r < D; r++) sum += (double)wo[r * w + a] * (double)wo[r * w + b];
                gram[a * w + b] = (float)sum;
            }
        const uint32_t tails[5] = {0, 3, 7, 8, 11};
        uint32_t position[T];
        output_order order = {.position = position};
        output_order_make(&order, scores, T, 2, 3);
        output_head head = {k, v, T, g, d, cases[c].softcap, cases[c].sinks ? sinks : NULL, gram, NULL};
        output_queries sets[3] = {{q, w, tails, tk, tv, 3}, {.n = 0}, {q + 3 * w, w, tails + 3, tk, tv, 2}};
        float errors[3 * LEVELS], *moved = case_alloc(3 * w, sizeof *moved);
        help_ok(output_errors(errors, &head, sets, 3, &order, 1, err));
        const plain_head plain = {k, v, tk, tv, head.sinks, T, g, d, (double)cases[c].softcap};
        for (uint32_t level = 0; level < LEVELS; level++) {
            bool kept[T];
            double want[3] = {0}, r[512];
            keep_best(kept, &order, record_curve_tokens(level, T, 5));
            for (uint32_t i = 0; i < 5; i++) {
                plain_difference(r, &plain, q + (size_t)i * w, kept, tails[i] + 1);
                want[i < 3 ? 0 : 2] += plain_square(r, w, wo, D, w, 0) / (i < 3 ? 3 : 2);
            }
            for (uint32_t s = 0; s < 3; s++) near_share("error", (double)errors[s * LEVELS + level], want[s], 1e-4);
            const uint32_t levels[3] = {level, level, level};
            output_difference(moved, &head, &sets[0], &order, levels);
            plain_difference(r, &plain, q + 2 * (size_t)w, kept, tails[2] + 1);
            for (uint32_t i = 0; i < w; i++) ck_assert_double_eq_tol((double)moved[2 * w + i], r[i], 1e-5);
        }
        judge_packings(&head, sets, &plain, wo, D);
        if (c < 2) judge_refits(head, sets, &order, &plain, wo, D); // whose attention is plain
        float *all[] = {k, v, tk, tv, wo, q, scores, sinks, gram, moved};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    }
}

UNIT_TEST(test_the_order_is_protected_then_best_first)
{
    const float scores[8] = {9, 1, 5, 5, 7, 2, 0, 0};
    const uint32_t want[8] = {0, 6, 7, 4, 2, 3, 5, 1};
    uint32_t position[8];
    output_order order = {.position = position};
    output_order_make(&order, scores, 8, 1, 2);
    ck_assert_uint_eq(order.protect, 3);
    ck_assert_mem_eq(position, want, sizeof want);
    output_order_make(&order, scores, 8, 4, 60); // all protected
    ck_assert_uint_eq(order.protect, 8);
}

// ---- The tiny model ----

// What a prefill of context and tail shows of every layer.
typedef struct seen_layers {
    float *q[8], *k[8], *v[8];
    uint32_t n;
} seen_layers;

static kvb_status see_layer(void *context, const layer_view *view, kvb_error *err_)
{
    seen_layers *s = context;
    (void)err_;
    size_t q = (size_t)view->n_heads * view->head_dim * view->n_tokens,
           kv = (size_t)view->n_kv_heads * view->head_dim * view->n_tokens;
    s->q[view->layer] = need_copy(view->q, q, sizeof(float), "queries");
    s->k[view->layer] = need_copy(view->k, kv, sizeof(float), "keys");
    s->v[view->layer] = need_copy(view->v, kv, sizeof(float), "values");
    s->n++;
    return KVB_OK;
}

typedef struct tiny {
    model *m;
    int32_t ids[T + TAIL];
    float *scores; // [B, G, T] of a made-up ranking
    seen_layers seen;
} tiny;

static void open_tiny(tiny *t, const backend *b)
{
    forward *f;
    memset(t, 0, sizeof *t);
    help_ok(model_open(&t->m, help_path("tiny.gguf"), b, NULL, err));
    for (int i = 0; i < T + TAIL; i++) t->ids[i] = (i * 7919 + i * i) % VOCABULARY;
    const model_config *c = &t->m->config;
    t->scores = case_floats((size_t)c->n_layers * c->n_kv_heads * T, 1, 0);
    help_ok(forward_open(&f, t->m, &(forward_plan){T + TAIL, 1, 1, false, false, 1}, err));
    layer_observer observer = {.see = see_layer, .context = &t->seen, .needs = VIEW_Q | VIEW_K | VIEW_V};
    help_ok(forward_prefill(f, t->ids, T + TAIL, &observer, NULL, NULL, err));
    forward_close(f);
}

static void close_tiny(tiny *t)
{
    for (uint32_t l = 0; l < t->seen.n; l++) free(t->seen.q[l]), free(t->seen.k[l]), free(t->seen.v[l]);
    free(t->scores);
    model_free(t->m);
}

// Decodes the tail as `n` questions of the same tokens, and keeps the queries of every third row.
static forward *decode(const tiny *t, uint32_t n)
{
    forward *f;
    decode_row rows[2 * TAIL];
    int32_t ids[2 * TAIL];
    uint32_t kept[2 * TAIL], n_kept = 0;
    forward_plan plan = {T, n, TAIL, false, false, 1};
    help_ok(forward_open(&f, t->m, &plan, err));
    ck_assert_uint_gt(forward_loss_bytes(t->m, &plan, 4, 0), 0);
    forward_keep_queries(f, 4);
    help_ok(forward_prefill(f, t->ids, T, NULL, NULL, NULL, err));
    forward_begin_questions(f, NULL, n);
    for (uint32_t i = 0; i < n * TAIL; i++) {
        rows[i] = (decode_row){i / TAIL, i % TAIL, false};
        ids[i] = t->ids[T + i % TAIL];
        if (i % TAIL % 3 == 2) kept[n_kept++] = i;
    }
    forward_keep_rows(f, kept, n_kept);
    help_ok(forward_rows(f, rows, ids, n * TAIL, NULL, 0, NULL, err));
    return f;
}

// Computes the reference's difference for one query of a layer's KV head, at a level.
static void tiny_difference(double *r, const tiny *t, uint32_t l, uint32_t g, uint32_t row, const output_order *order,
                            uint32_t level)
{
    const model_config *c = &t->m->config;
    uint32_t d = c->head_dim, group = c->n_heads / c->n_kv_heads;
    const float *k = t->seen.k[l] + (size_t)g * (T + TAIL) * d, *v = t->seen.v[l] + (size_t)g * (T + TAIL) * d;
    const plain_head h = {k, v, k + (size_t)T * d, v + (size_t)T * d, NULL, T, group, d, 0};
    bool kept[T];
    keep_best(kept, order, record_curve_tokens(level, T, order->protect));
    plain_difference(r, &h, t->seen.q[l] + ((size_t)(T + row) * c->n_heads + g * group) * d, kept, row + 1);
}

UNIT_TEST(test_curves_of_the_tiny_model)
{
    tiny t;
    open_tiny(&t, &backend_ref);
    const model_config *c = &t.m->config;
    uint32_t L = c->n_layers, G = c->n_kv_heads, w = c->n_heads / G * c->head_dim;
    const loss_ranking ranking = {t.scores, 4, 2};
    size_t n = (size_t)L * G * LEVELS;
    float *one = case_alloc(n, sizeof *one), *two = case_alloc(4 * n, sizeof *two);
    forward *f = decode(&t, 1);
    help_ok(forward_output_errors(f, 1, &ranking, 1, NULL, one, 0, NULL, err));
    forward_close(f);
    for (uint32_t h = 0; h < L * G; h++) {
        uint32_t position[T];
        output_order order = {.position = position};
        const float *wo = t.m->layers[h / G].wo.address;
        output_order_make(&order, t.scores + (size_t)h * T, T, 4, 2);
        ck_assert_ptr_nonnull(wo);
        for (uint32_t level = 0; level < LEVELS; level++) {
            double want = 0, r[512];
            for (uint32_t row = 2; row < TAIL; row += 3) {
                tiny_difference(r, &t, h / G, h % G, row, &order, level);
                want += plain_square(r, w, wo, c->width, (size_t)G * w, (size_t)(h % G) * w) / 4;
            }
            near_share("curve", (double)one[h * LEVELS + level], want, 1e-4);
        }
    }
    // Another question in the batch, and another ranking, change no bit.
    const loss_ranking both[2] = {{t.scores, 0, 9}, ranking};
    f = decode(&t, 2);
    help_ok(forward_output_errors(f, 2, both, 2, NULL, two, 0, NULL, err));
    forward_close(f);
    case_same("the first question", two + n, one, n);
    case_same("the second question", two + 3 * n, one, n);
    size_t m = (size_t)L * G * RECORD_PACKINGS;
    float *alone = case_alloc(m, sizeof *alone), *beside = case_alloc(2 * m, sizeof *beside);
    f = decode(&t, 2);
    for (uint32_t i = 0; i < 2; i++) help_ok(forward_output_errors(f, 2, both, 2, NULL, two, i, beside + i * m, err));
    forward_close(f);
    f = decode(&t, 1);
    help_ok(forward_output_errors(f, 1, &ranking, 1, NULL, one, 0, alone, err));
    forward_close(f);
    case_same("errors of formats", beside, alone, m);
    case_same("those of the second question", beside + m, alone, m);
    for (size_t i = 0; i < m; i++) ck_assert(alone[i] > 0 && (i % 3 == 0 || alone[i] > 3 * alone[i - 1]));
    free_all(alone, beside, one, two);
    close_tiny(&t);
}

// Scores each key by minus the sum of its cosines with all keys.
static void keydiff(float *scores, const float *k, uint32_t d)
{
    for (int t = 0; t < T; t++) {
        double sum = 0;
        for (int j = 0; j < T; j++) {
            double ab = 0, aa = 0, bb = 0;
            for (uint32_t i = 0; i < d; i++) {
                double a = (double)k[(uint32_t)t * d + i], b = (double)k[(uint32_t)j * d + i];
                ab += a * b, aa += a * a, bb += b * b;
            }
            sum += ab / sqrt(aa * bb);
        }
        scores[t] = (float)-sum;
    }
}

UNIT_TEST(test_gains_of_the_tiny_model)
{
    enum { FIRST = 3, N = 5 };
    tiny t;
    open_tiny(&t, &backend_ref);
    const model_config *c = &t.m->config;
    uint32_t L = c->n_layers, G = c->n_kv_heads, w = c->n_heads / G * c->head_dim;
    size_t n = (size_t)L * GAIN_KINDS * 2;
    float *gains = case_alloc(n, sizeof *gains), *again = case_alloc(n, sizeof *again);
    forward *f = decode(&t, 2);
    help_ok(forward_gains(f, 1, t.ids + T + FIRST, FIRST, N, gains, err));
    help_ok(forward_gains(f, 0, t.ids + T + FIRST, FIRST, N, again, err));
    help_fails(forward_gains(f, 0, t.ids + T, 0, TAIL + 1, again, err), KVB_ARGUMENT, "gains: rows 0 to 13");
    forward_close(f);
    case_same("the same question in another slot", again, gains, n);
    for (uint32_t l = 0; l < L; l++) { // how much the cut layer's output moves, all heads together
        double want[2] = {0};
        for (uint32_t row = FIRST; row < FIRST + N; row++) {
            uint32_t odd = (row - FIRST) % 2;
            double r[1024];
            for (uint32_t g = 0; g < G; g++) {
                uint32_t position[T];
                output_order order = {.position = position};
                float scores[T];
                keydiff(scores, t.seen.k[l] + (size_t)g * (T + TAIL) * c->head_dim, c->head_dim);
                output_order_make(&order, scores, T, 4, 1);
                tiny_difference(r + (size_t)g * w, &t, l, g, row, &order, odd ? 6 : 10);
            }
            want[odd] +=
                plain_square(r, G * w, t.m->layers[l].wo.address, c->width, (size_t)G * w, 0) / ((N + 1 - odd) / 2);
        }
        const float *of_layer = gains + l * GAIN_KINDS * 2;
        near_share("movement", (double)of_layer[2 * GAIN_CUT_80 + 1], want[0], 1e-4);
        near_share("movement", (double)of_layer[2 * GAIN_CUT_96 + 1], want[1], 1e-4);
        ck_assert(of_layer[2 * GAIN_CUT_80] > 0 && of_layer[2 * GAIN_CUT_96] > 0);
        ck_assert(of_layer[2 * GAIN_NOISE] == 0 && of_layer[2 * GAIN_NOISE + 1] == 0);
    }
    free_all(gains, again);
    close_tiny(&t);
}

UNIT_TEST(test_backends_agree_on_losses)
{
    float *results[2];
    size_t n = 0, n_gains = 0;
    const backend *both[2] = {&backend_ref, &backend_cpu};
    for (int i = 0; i < 2; i++) {
        tiny t;
        open_tiny(&t, both[i]);
        const model_config *c = &t.m->config;
        if (i) memcpy(t.scores, results[0] + n + n_gains, (size_t)c->n_layers * c->n_kv_heads * T * sizeof(float));
        n = (size_t)c->n_layers * c->n_kv_heads * LEVELS;
        n_gains = (size_t)c->n_layers * GAIN_KINDS * 2;
        const loss_ranking ranking = {t.scores, 4, 2};
        results[i] = case_alloc(n + n_gains + (size_t)c->n_layers * c->n_kv_heads * T, sizeof(float));
        forward *f = decode(&t, 1);
        help_ok(forward_output_errors(f, 1, &ranking, 1, NULL, results[i], 0, NULL, err));
        help_ok(forward_gains(f, 0, t.ids + T, 0, 8, results[i] + n, err));
        forward_close(f);
        memcpy(results[i] + n + n_gains, t.scores, (size_t)c->n_layers * c->n_kv_heads * T * sizeof(float));
        close_tiny(&t);
    }
    for (size_t i = 0; i < n; i++) near_share("curve", (double)results[1][i], (double)results[0][i], 1e-3);
    for (size_t i = 0; i < n_gains; i++) near_share("gain", (double)results[1][n + i], (double)results[0][n + i], 1e-2);
    free_all(results[0], results[1]);
}

UNIT_MAIN_ONCE("profiler losses", case_tiny_setup, help_teardown)
