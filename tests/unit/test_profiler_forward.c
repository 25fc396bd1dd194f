// The forward pass on the tiny model: backends against each other, decoding over a shared context against the prefill
// of the joined text, the oracle against dense attention in double; and model files that must be refused.
#include "formats/need.h"
#include "profiler/weights/gguf.h"
#include "test_profiler_cases.h"
#include <omp.h>

enum { VOCABULARY = 300, MAX_ROWS = 1300 };

static int32_t *random_ids(size_t n)
{
    int32_t *ids = case_alloc(n, sizeof *ids);
    for (size_t i = 0; i < n; i++) ids[i] = (int32_t)((case_uniform() + 1) * 0.5 * VOCABULARY);
    return ids;
}

static forward *open_forward(const model *m, uint32_t tokens, uint32_t questions, uint32_t tail)
{
    forward *f;
    help_ok(forward_open(&f, m, &(forward_plan){tokens, questions, tail, true, false, 2}, err));
    return f;
}

static float *prefill_logits(const model *m, const int32_t *ids, uint32_t n)
{
    forward *f = open_forward(m, n, 1, 1);
    float *logits = case_alloc((size_t)n * m->config.vocabulary, sizeof *logits);
    help_ok(forward_prefill(f, ids, n, NULL, NULL, logits, err));
    forward_close(f);
    return logits;
}

// ---- a batch of questions ----

typedef struct batch {
    uint32_t T, n_questions, n_rows;
    uint32_t suffix[64], length[64],
        start[64]; // rows of each question: suffix, then answer; all but the suffix observed
    int32_t *context;
    decode_row rows[MAX_ROWS];
    int32_t ids[MAX_ROWS];
} batch;

static batch batch_make(uint32_t T, uint32_t n_questions, uint32_t answer)
{
    batch b = {.T = T, .n_questions = n_questions, .context = random_ids(T)};
    int32_t *ids = random_ids(MAX_ROWS);
    for (uint32_t q = 0; q < n_questions; q++) {
        b.suffix[q] = 1 + q * 5 % 23, b.length[q] = b.suffix[q] + answer, b.start[q] = b.n_rows;
        for (uint32_t i = 0; i < b.length[q]; i++) {
            b.rows[b.n_rows] = (decode_row){q, i, i >= b.suffix[q]};
            b.ids[b.n_rows] = ids[b.n_rows];
            b.n_rows++;
        }
    }
    free(ids);
    return b;
}

// What a run of a batch gives: logits of all rows, importance of all questions.
typedef struct result {
    float *logits, *importance;
    size_t row, heads; // floats of one row's logits, of one question's importance
} result;

// The context is in the second place, after another one.
static forward *begin(const model *m, const batch *b)
{
    forward *f = open_forward(m, b->T, b->n_questions, 64);
    help_ok(forward_prefill(f, b->context + b->T / 2, b->T - b->T / 2, NULL, NULL, NULL, err));
    forward_set_place(f, 1);
    help_ok(forward_prefill(f, b->context, b->T, NULL, NULL, NULL, err));
    forward_begin_questions(f, NULL, b->n_questions);
    return f;
}

static result result_make(const model *m, const batch *b)
{
    result r = {.row = m->config.vocabulary, .heads = (size_t)m->config.n_layers * m->config.n_kv_heads * b->T};
    r.logits = case_alloc(b->n_rows * r.row, sizeof *r.logits);
    r.importance = case_alloc(b->n_questions * r.heads, sizeof *r.importance);
    return r;
}

static void result_free(result *r)
{
    free_all(r->logits, r->importance);
}

static result run_at_once(const model *m, const batch *b)
{
    forward *f = begin(m, b);
    result r = result_make(m, b);
    uint32_t all[MAX_ROWS];
    for (uint32_t i = 0; i < b->n_rows; i++) all[i] = i;
    help_ok(forward_rows(f, b->rows, b->ids, b->n_rows, all, b->n_rows, r.logits, err));
    for (uint32_t q = 0; q < b->n_questions; q++) help_ok(forward_importance(f, q, r.importance + q * r.heads, err));
    forward_close(f);
    return r;
}

// Runs one row of every question at a time, like sampling; on one thread, as threads would only wait for each other.
static result run_stepwise(const model *m, const batch *b)
{
    int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    forward *f = begin(m, b);
    result r = result_make(m, b);
    float *logits = case_alloc(b->n_questions * r.row, sizeof *logits);
    for (uint32_t step = 0; step < 64; step++) {
        decode_row rows[64];
        int32_t ids[64];
        uint32_t from[64], wanted[64], n = 0;
        for (uint32_t q = 0; q < b->n_questions; q++) {
            if (step >= b->length[q]) continue;
            from[n] = b->start[q] + step;
            rows[n] = b->rows[from[n]];
            ids[n] = b->ids[from[n]];
            wanted[n] = n;
            n++;
        }
        help_ok(forward_rows(f, rows, ids, n, wanted, n, logits, err));
        for (uint32_t i = 0; i < n; i++) memcpy(r.logits + from[i] * r.row, logits + i * r.row, r.row * sizeof *logits);
    }
    for (uint32_t q = 0; q < b->n_questions; q++) help_ok(forward_importance(f, q, r.importance + q * r.heads, err));
    free(logits);
    forward_close(f);
    omp_set_num_threads(threads);
    return r;
}

// ---- logits ----

UNIT_TEST(test_backends_agree)
{
    static const char *const options[][5] = {
        {"--type", "f32"}, {"--type", "f16", "--tied", "no"}, {"--type", "q8_0", "--seed", "9"}};
    static const uint32_t lengths[] = {1, 2, 17, 300, 1100};
    for (int i = 0; i < 3; i++) {
        case_tiny_model(help_path("other.gguf"), options[i]);
        model *ref = case_open(help_path("other.gguf"), &backend_ref),
              *cpu = case_open(help_path("other.gguf"), &backend_cpu);
        unit_numbers(cpu->config.vocabulary, VOCABULARY, cpu->head_is_tied, i != 1);
        for (int t = 0; t < (i ? 3 : 5); t++) { // the longest has rows for two chunks
            int32_t *ids = random_ids(lengths[t]);
            float *want = prefill_logits(ref, ids, lengths[t]), *got = prefill_logits(cpu, ids, lengths[t]);
            case_near("logits", got, want, (size_t)lengths[t] * VOCABULARY, 1e-4);
            free_all(ids, want, got);
        }
        model_free(ref);
        model_free(cpu);
    }
}

UNIT_TEST(test_decoding_is_prefill_of_the_joined_text)
{
    const backend *const both[] = {&backend_ref, &backend_cpu};
    for (int i = 0; i < 2; i++) {
        model *m = case_open(help_path("tiny.gguf"), both[i]);
        batch b = batch_make(150, 5, 9);
        result r = run_at_once(m, &b);
        for (uint32_t q = 0; q < b.n_questions; q++) {
            int32_t joined[256];
            memcpy(joined, b.context, b.T * sizeof *joined);
            memcpy(joined + b.T, b.ids + b.start[q], b.length[q] * sizeof *joined);
            float *want = prefill_logits(m, joined, b.T + b.length[q]);
            case_near("logits", r.logits + b.start[q] * r.row, want + b.T * r.row, b.length[q] * r.row, 1e-4);
            free(want);
        }
        result_free(&r);
        free(b.context);
        model_free(m);
    }
}

UNIT_TEST(test_one_pass_is_stepwise)
{
    const backend *const both[] = {&backend_ref, &backend_cpu};
    for (int i = 0; i < 2; i++) {
        model *m = case_open(help_path("tiny.gguf"), both[i]);
        for (uint32_t n = 1; n <= 21; n += 10) {
            batch b = batch_make(60 + n, n, 6);
            result one = run_at_once(m, &b), steps = run_stepwise(m, &b);
            case_same("logits", one.logits, steps.logits, b.n_rows * one.row);
            case_same("importance", one.importance, steps.importance, n * one.heads);
            result_free(&one);
            result_free(&steps);
            free(b.context);
        }
        model_free(m);
    }
}

// More rows than one chunk of the forward pass holds. Every question alone gives the same bits.
UNIT_TEST(test_batch_changes_nothing)
{
    model *m = case_open(help_path("tiny.gguf"), &backend_cpu);
    batch b = batch_make(90, 40, 20), one = {.T = b.T, .n_questions = 1, .context = b.context};
    ck_assert_uint_gt(b.n_rows, 1024);
    result all = run_at_once(m, &b);
    for (uint32_t q = 0; q < b.n_questions; q++) {
        one.n_rows = one.length[0] = b.length[q];
        memcpy(one.rows, b.rows + b.start[q], one.n_rows * sizeof *one.rows);
        memcpy(one.ids, b.ids + b.start[q], one.n_rows * sizeof *one.ids);
        for (uint32_t i = 0; i < one.n_rows; i++) one.rows[i].question = 0;
        result alone = run_at_once(m, &one);
        case_same("logits", alone.logits, all.logits + b.start[q] * all.row, one.n_rows * all.row);
        case_same("importance", alone.importance, all.importance + q * all.heads, all.heads);
        result_free(&alone);
    }
    result_free(&all);
    free(b.context);
    model_free(m);
}

// A forward pass can be used for contexts of all lengths, one after the other.
UNIT_TEST(test_contexts_leave_no_trace)
{
    static const uint32_t lengths[] = {200, 31, 1, 200, 77};
    model *m = case_open(help_path("tiny.gguf"), &backend_cpu);
    forward *f = open_forward(m, 200, 3, 64);
    for (int i = 0; i < 5; i++) {
        batch b = batch_make(lengths[i], 3, 8);
        result fresh = run_at_once(m, &b), again = result_make(m, &b);
        uint32_t all[MAX_ROWS];
        for (uint32_t r = 0; r < b.n_rows; r++) all[r] = r;
        for (int repeat = 0; repeat < 2; repeat++) {
            help_ok(forward_prefill(f, b.context, b.T, NULL, NULL, NULL, err));
            forward_begin_questions(f, NULL, 3);
            help_ok(forward_rows(f, b.rows, b.ids, b.n_rows, all, b.n_rows, again.logits, err));
            for (uint32_t q = 0; q < 3; q++) help_ok(forward_importance(f, q, again.importance + q * again.heads, err));
            case_same("logits", again.logits, fresh.logits, b.n_rows * fresh.row);
            case_same("importance", again.importance, fresh.importance, 3 * fresh.heads);
        }
        result_free(&fresh);
        result_free(&again);
        free(b.context);
    }
    forward_close(f), model_free(m);
}

// ---- oracle ----

enum { ALL_ACTIVATIONS = VIEW_Q_RAW | VIEW_Q | VIEW_K | VIEW_V };

// Copies of what the observer sees, per layer; NULL: not requested.
typedef struct seen {
    float *q_raw[2], *q[2], *k[2], *v[2], *column_sums[2], *norms[2];
} seen;

static void seen_free(seen *s)
{
    for (int layer = 0; layer < 2; layer++) {
        free_all(s->q[layer], s->k[layer], s->v[layer], s->q_raw[layer], s->column_sums[layer], s->norms[layer]);
    }
}

static kvb_status keep_layer(void *context, const layer_view *v, kvb_error *err)
{
    (void)err;
    seen *s = context;
    ck_assert_uint_eq(v->n_queries, v->n_tokens);
    size_t heads = (size_t)v->n_tokens * v->n_heads, keys = (size_t)v->n_tokens * v->n_kv_heads * v->head_dim;
    const struct {
        const float *from;
        float **to;
        size_t n;
    } all[] = {{v->q_raw, s->q_raw, heads * v->head_dim},
               {v->q, s->q, heads * v->head_dim},
               {v->k, s->k, keys},
               {v->v, s->v, keys},
               {v->column_sums, s->column_sums, heads},
               {v->output_norms, s->norms, heads}};
    for (int i = 0; i < 6; i++) {
        if (!all[i].from) continue;
        all[i].to[v->layer] = case_alloc(all[i].n, sizeof(float));
        memcpy(all[i].to[v->layer], all[i].from, all[i].n * sizeof(float));
    }
    // q_raw holds the queries that rotary positions turn into q.
    double worst = 0;
    uint32_t half = v->head_dim / 2;
    for (size_t row = 0; v->q_raw && row < heads; row++)
        for (uint32_t i = 0; i < half; i++) {
            double angle = (double)(row / v->n_heads) * v->rope_frequency[i];
            const float *raw = v->q_raw + row * v->head_dim, *q = v->q + row * v->head_dim;
            worst = fmax(worst, fabs(q[i] - (raw[i] * cos(angle) - raw[i + half] * sin(angle))));
            worst = fmax(worst, fabs(q[i + half] - (raw[i + half] * cos(angle) + raw[i] * sin(angle))));
        }
    ck_assert_double_lt(worst, 1e-4);
    return KVB_OK;
}

// Computes the attention a [0 .. row] of the query `row` of head h over `keys` keys.
static void dense_row(double *a, const seen *s, uint32_t layer, const model_config *c, uint32_t keys, uint32_t row,
                      uint32_t h)
{
    uint32_t d = c->head_dim, H = c->n_heads, g = h / (H / c->n_kv_heads);
    double top = -INFINITY, sum = 0;
    for (uint32_t j = 0; j <= row; j++) {
        a[j] = 0;
        for (uint32_t i = 0; i < d; i++)
            a[j] += (double)s->q[layer][((size_t)row * H + h) * d + i] * s->k[layer][((size_t)g * keys + j) * d + i] /
                    sqrt(d);
        top = fmax(top, a[j]);
    }
    for (uint32_t j = 0; j <= row; j++) sum += a[j] = exp(a[j] - top);
    for (uint32_t j = 0; j <= row; j++) a[j] /= sum;
}

// Returns the 1-norm if `one`, else the 2-norm, of v_j W_O^(h), straight from the model file.
static double dense_norm(const seen *s, uint32_t layer, const model_config *c, uint32_t keys, uint32_t j, uint32_t h,
                         const float *wo, bool one)
{
    uint32_t d = c->head_dim, H = c->n_heads;
    const float *v = s->v[layer] + ((size_t)(h / (H / c->n_kv_heads)) * keys + j) * d;
    double sum = 0;
    for (uint32_t row = 0; row < c->width; row++) {
        double y = 0;
        for (uint32_t i = 0; i < d; i++) y += (double)wo[(size_t)row * H * d + h * d + i] * v[i];
        sum += one ? fabs(y) : y * y;
    }
    return one ? sum : sqrt(sum);
}

// Computes I [G, T] from the joined text's queries of rows [first, joined).
static void dense_importance(float *out, const seen *s, uint32_t layer, const model_config *c, uint32_t T,
                             uint32_t first, uint32_t joined, const float *wo)
{
    uint32_t H = c->n_heads, group = H / c->n_kv_heads;
    double *a = case_alloc(joined, sizeof *a), *w = case_alloc((size_t)H * T, sizeof *w), total = 0;
    for (uint32_t i = 0; i < H * T; i++) total += w[i] = dense_norm(s, layer, c, joined, i % T, i / T, wo, false);
    memset(out, 0, (size_t)c->n_kv_heads * T * sizeof *out);
    for (uint32_t row = first; row < joined; row++)
        for (uint32_t h = 0; h < H; h++) {
            dense_row(a, s, layer, c, joined, row, h);
            float *best = out + (size_t)(h / group) * T;
            for (uint32_t j = 0; j < T; j++) best[j] = fmaxf(best[j], (float)(a[j] * w[h * T + j] / (total + 1e-9)));
        }
    free_all(a, w);
}

// Passes of different shapes, models and precisions, open at the same time and working in turn, have the bits that each
// has alone.
UNIT_TEST(test_passes_open_at_once)
{
    enum { PASSES = 4 };
    static const char *const other[] = {"--type", "f16", "--tied", "no", NULL};
    case_tiny_model(help_path("other.gguf"), other);
    model *const models[PASSES] = {
        case_open(help_path("tiny.gguf"), &backend_cpu), case_open(help_path("other.gguf"), &backend_cpu_bf16),
        case_open(help_path("tiny.gguf"), &backend_ref), case_open(help_path("tiny.gguf"), &backend_cpu)};
    batch b[PASSES] = {batch_make(300, 3, 8), batch_make(20, 5, 3), batch_make(17, 1, 2), batch_make(31, 2, 40)};
    result alone[PASSES], together[PASSES];
    forward *f[PASSES];
    for (int i = 0; i < PASSES; i++) {
        alone[i] = run_at_once(models[i], &b[i]);
        together[i] = result_make(models[i], &b[i]);
    }
    for (int i = 0; i < PASSES; i++) f[i] = begin(models[i], &b[i]);
    for (uint32_t row = 0; row < MAX_ROWS; row += 7) // in pieces, turn by turn
        for (int i = 0; i < PASSES; i++) {
            uint32_t n = b[i].n_rows > row ? b[i].n_rows - row : 0, wanted[7] = {0, 1, 2, 3, 4, 5, 6};
            if (n > 7) n = 7;
            help_ok(forward_rows(f[i], b[i].rows + row, b[i].ids + row, n, wanted, n,
                                 together[i].logits + row * together[i].row, err));
        }
    for (int i = 0; i < PASSES; i++) {
        for (uint32_t q = 0; q < b[i].n_questions; q++)
            help_ok(forward_importance(f[i], q, together[i].importance + q * together[i].heads, err));
        case_same("logits", together[i].logits, alone[i].logits, b[i].n_rows * alone[i].row);
        case_same("importance", together[i].importance, alone[i].importance, b[i].n_questions * alone[i].heads);
        forward_close(f[i]), result_free(&alone[i]), result_free(&together[i]), free(b[i].context);
    }
    for (int i = 0; i < PASSES; i++) model_free(models[i]);
}

// What is made only for observers that request it, against attention from keys and queries, and the file's weights.
UNIT_TEST(test_extras_for_observers)
{
    enum { T = 70 };
    model *m = case_open(help_path("tiny.gguf"), &backend_cpu);
    const model_config *c = &m->config;
    forward *f = open_forward(m, 2 * T, 1, 1); // room for more tokens than there are
    int32_t *ids = random_ids(T);
    gguf_file file;
    seen s = {.q = {NULL}};
    help_ok(gguf_open(&file, help_path("tiny.gguf"), err));
    unsigned needs = VIEW_Q | VIEW_K | VIEW_V | VIEW_COLUMN_SUMS | VIEW_OUTPUT_NORMS;
    help_ok(forward_prefill(f, ids, T, &(layer_observer){keep_layer, &s, needs}, NULL, NULL, err));
    ck_assert_ptr_null(s.q_raw[0]);
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.attn_output.weight", layer);
        const float *wo = gguf_tensor_find(&file, name)->data;
        for (uint32_t h = 0; h < c->n_heads; h++) {
            double want[T] = {0}, row[T];
            for (uint32_t i = 0; i < T; i++) {
                dense_row(row, &s, layer, c, T, i, h);
                for (uint32_t j = 0; j <= i; j++) want[j] += row[j];
            }
            for (uint32_t j = 0; j < T; j++) {
                double norm = dense_norm(&s, layer, c, T, j, h, wo, true);
                ck_assert_double_eq_tol(s.column_sums[layer][h * T + j], want[j], 1e-5 * (1 + want[j]));
                ck_assert_double_eq_tol(s.norms[layer][h * T + j], norm, 1e-5 * (1 + norm));
            }
        }
    }
    seen_free(&s);
    gguf_close(&file);
    forward_close(f);
    free(ids);
    model_free(m);
}

UNIT_TEST(test_importance_against_dense_attention)
{
    model *m = case_open(help_path("tiny.gguf"), &backend_cpu);
    const model_config *c = &m->config;
    batch b = batch_make(120, 4, 15);
    result r = run_at_once(m, &b);
    gguf_file file;
    help_ok(gguf_open(&file, help_path("tiny.gguf"), err));
    for (uint32_t q = 0; q < b.n_questions; q++) {
        int32_t joined[256];
        uint32_t n = b.T + b.length[q];
        seen s = {.q = {NULL}};
        memcpy(joined, b.context, b.T * sizeof *joined);
        memcpy(joined + b.T, b.ids + b.start[q], b.length[q] * sizeof *joined);
        forward *f = open_forward(m, n, 1, 1);
        help_ok(forward_prefill(f, joined, n, &(layer_observer){keep_layer, &s, ALL_ACTIVATIONS}, NULL, NULL, err));
        ck_assert(!s.column_sums[0] && !s.norms[0]); // not requested
        for (uint32_t layer = 0; layer < c->n_layers; layer++) {
            char name[64];
            float want[2 * 120];
            snprintf(name, sizeof name, "blk.%u.attn_output.weight", layer);
            dense_importance(want, &s, layer, c, b.T, b.T + b.suffix[q], n, gguf_tensor_find(&file, name)->data);
            const float *got = r.importance + q * r.heads + (size_t)layer * c->n_kv_heads * b.T;
            double error = case_row_error(got, want, c->n_kv_heads, b.T);
            ck_assert_msg(error < 1e-5, "question %u, layer %u: relative error %g", q, layer, error);
        }
        seen_free(&s);
        forward_close(f);
    }
    gguf_close(&file);
    result_free(&r);
    free(b.context);
    model_free(m);
}

// ---- errors ----

static bool stop_after_one(void *context, double done, double total)
{
    (void)total;
    *(double *)context = done;
    return false;
}

static kvb_status refuse_layer(void *context, const layer_view *view, kvb_error *err)
{
    (void)context;
    if (view->layer == 0) return KVB_OK;
    if (err) *err = (kvb_error){KVB_NUMERIC, "refused"};
    return KVB_NUMERIC;
}

UNIT_TEST(test_forward_errors)
{
    model *m = case_open(help_path("tiny.gguf"), &backend_cpu);
    forward *f = open_forward(m, 10, 2, 5);
    int32_t good[11] = {0, VOCABULARY - 1}, high[] = {1, 2, VOCABULARY}, negative[] = {-1};
    decode_row rows[] = {{0, 0, true}, {1, 0, true}}, far = {1, 5, true}, other = {2, 0, true};
    double done = 0;
    help_fails(forward_prefill(f, high, 3, NULL, NULL, NULL, err), KVB_ARGUMENT, "token 2: id 300, expected 0 to 299");
    help_fails(forward_prefill(f, negative, 1, NULL, NULL, NULL, err), KVB_ARGUMENT, "token 0: id -1");
    help_fails(forward_prefill(f, good, 11, NULL, NULL, NULL, err), KVB_ARGUMENT, "11 tokens, expected 1 to 10");
    help_fails(forward_prefill(f, good, 0, NULL, NULL, NULL, err), KVB_ARGUMENT, "0 tokens, expected 1 to 10");
    help_fails(forward_prefill(f, good, 10, NULL, &(forward_progress){stop_after_one, &done}, NULL, err),
               KVB_INTERRUPTED, "after layer 1 of 2");
    ck_assert_double_eq(done, 1);
    help_fails(forward_prefill(f, good, 10, &(layer_observer){refuse_layer, NULL, VIEW_K}, NULL, NULL, err),
               KVB_NUMERIC, "refused");
    help_ok(forward_prefill(f, good, 10, NULL, NULL, NULL, err));
    forward_begin_questions(f, NULL, 2);
    help_fails(forward_rows(f, rows, high + 1, 2, NULL, 0, NULL, err), KVB_ARGUMENT, "token 1: id 300");
    help_fails(forward_rows(f, &far, good, 1, NULL, 0, NULL, err), KVB_ARGUMENT, "row 0: question 1, tail 5");
    help_fails(forward_rows(f, &other, good, 1, NULL, 0, NULL, err), KVB_ARGUMENT, "expected below 2 and 5");
    help_ok(forward_rows(f, rows, good, 2, NULL, 0, NULL, err));
    help_ok(forward_rows(f, rows, good, 0, NULL, 0, NULL, err));
    forward_close(f), forward_close(NULL), model_free(m);
}

UNIT_MAIN_ONCE("profiler forward", case_tiny_setup, help_teardown)
