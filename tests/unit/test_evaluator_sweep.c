// Measurements of a compacted cache on the tiny model: compared with plain sums over the logits, at ratio 0, and in
// batches; the log of a sweep that is stopped and resumed; and the intervals.
#include "evaluator/sweep.h"
#include "runtime/fail.h"
#include "test_profiler_cases.h"
#include <limits.h>

enum { L = 2, G = 2, VOCABULARY = 300, T = 90, N = 16, TEXTS = 2, HEADS = L * G };

typedef struct bed {
    model *m;
    session *s;
    fidelity *f;
    int32_t ids[T + N];
    metric keydiff;
} bed;

static void bed_open(bed *b)
{
    b->m = case_open(help_path("tiny.gguf"), backend_find("cpu"));
    help_ok(metric_parse(&b->keydiff, "keydiff", err));
    session_plan plan = {T, N, 3 * N, &b->keydiff, 1, true, false, 0};
    help_ok(session_open(&b->s, b->m, &plan, err));
    help_ok(fidelity_open(&b->f, b->s, N, 3, err));
    for (int i = 0; i < T + N; i++) b->ids[i] = (int32_t)((case_uniform() + 1) * 0.5 * VOCABULARY);
    help_ok(fidelity_begin(b->f, b->ids, T, NULL, NULL, err));
}

static void bed_close(bed *b)
{
    fidelity_close(b->f);
    session_close(b->s);
    model_free(b->m);
}

static void select_some(bed *b, uint32_t keep, kept_set *kept)
{
    const uint32_t each[HEADS] = {keep, keep < T ? keep / 2 : T, keep, keep};
    help_ok(session_select(b->s, b->s->now.scores[0], each, 4, 1, kept, err));
}

// ---- fidelity ----

static double log_probability(const float *row, int32_t id)
{
    double sum = 0;
    for (int t = 0; t < VOCABULARY; t++) sum += exp((double)row[t]);
    return row[id] - log(sum);
}

UNIT_TEST(measures_are_their_definitions)
{
    bed b;
    bed_open(&b);
    kept_set kept;
    fidelity_cell cell;
    select_some(&b, 30, &kept);
    help_ok(fidelity_measure(b.f, &kept, 1, &cell, err));
    // The same by hand: full cache and cut cache through the decoder, sums in double.
    float *logits[2];
    uint32_t n = N;
    for (int cut = 0; cut < 2; cut++) {
        logits[cut] = case_alloc((size_t)N * VOCABULARY, sizeof(float));
        kv_cache *c = session_cache(b.s, cut ? &kept : NULL, N);
        help_ok(decoder_run(b.s->decode, &c, 1, &n, b.ids + T, NULL, LOGITS_ALL, logits[cut], err));
        kv_cache_close(c);
    }
    double full_nll = 0;
    for (int i = 0; i < N; i++) {
        const float *p = logits[0] + i * VOCABULARY, *q = logits[1] + i * VOCABULARY;
        double kl = 0;
        int best[2] = {0, 0};
        for (int32_t t = 0; t < VOCABULARY; t++) {
            double a = log_probability(p, t);
            kl += exp(a) * (a - log_probability(q, t));
            best[0] = p[t] > p[best[0]] ? t : best[0];
            best[1] = q[t] > q[best[1]] ? t : best[1];
        }
        ck_assert_msg(fabs(kl - cell.kl[i]) < 1e-6, "row %d: KL %g, expected %g", i, cell.kl[i], kl);
        ck_assert_int_eq(cell.agree[i], best[0] == best[1]);
        if (i + 1 == N) break;
        ck_assert(fabs(cell.nll[i] + log_probability(q, b.ids[T + i + 1])) < 1e-6);
        full_nll -= log_probability(p, b.ids[T + i + 1]) / (N - 1);
    }
    ck_assert(fabs(full_nll - cell.full_nll) < 1e-6);
    double all = 0, gone = 0;
    for (uint32_t h = 0; h < HEADS; h++)
        for (uint32_t j = 0, i = (uint32_t)kept.offsets[h]; j < T; j++) {
            double mass = b.f->importance[h * T + j];
            bool stays = i < kept.offsets[h + 1] && kept.positions[i] == j;
            i += stays;
            all += mass;
            gone += stays ? 0 : mass;
        }
    ck_assert(gone > 0 && fabs(cell.loss - gone / all) < 1e-9);
    ck_assert_uint_eq(cell.kept, 30 + 15 + 30 + 30);
    ck_assert(fabs(cell.ratio - (1 - 105.0 / (HEADS * T))) < 1e-12);
    ck_assert_uint_eq(cell.bytes, 105u * 2 * 16 * sizeof(float));
    free(logits[0]);
    free(logits[1]);
    fidelity_cell_free(&cell);
    kept_set_free(&kept);
    bed_close(&b);
}

// ---- policies ----

// A policy that evicts nothing equals the full cache, and one that evicts changes what is predicted. Stepping policies
// together or alone gives the same.
UNIT_TEST(policies_against_the_full_cache)
{
    static bed b;
    static const char *const specs[] = {"full", "morphkv:window=8", "topk", "keydiff:block=16"};
    enum { P = sizeof specs / sizeof *specs };
    policy p[P];
    policy_run *runs[P];
    fidelity_cell together[P], alone;
    uint32_t capacity[L * G];
    for (int h = 0; h < L * G; h++) capacity[h] = 30;
    bed_open(&b);
    for (int i = 0; i < P; i++) {
        help_ok(policy_parse(&p[i], specs[i], err));
        help_ok(policy_run_open(&runs[i], &p[i], b.m, capacity, 0.6, T, N, err));
    }
    policy_watch watch = {runs, P};
    layer_observer observer = policy_observer(&watch);
    help_ok(fidelity_begin(b.f, b.ids, T, &observer, NULL, err));
    help_ok(fidelity_follow(b.f, runs, P, together, err));
    for (int i = 0; i < P; i++) {
        double kl = 0;
        for (int row = 0; row < N; row++) kl += together[i].kl[row] / N;
        ck_assert_msg(i == 0 ? fabs(kl) < 1e-9 : kl > 1e-5, "%s: KL %g", specs[i], kl);
        bool evicts = i == 1 || i == 3;
        ck_assert_uint_eq(together[i].kept, L * G * (evicts ? 30 : T));
        ck_assert((together[i].loss > 0) == evicts && (i != 2 || together[i].looked < 0.5));
        help_ok(fidelity_follow(b.f, &runs[i], 1, &alone, err));
        for (int row = 0; row < N; row++) ck_assert(alone.kl[row] == together[i].kl[row]);
        fidelity_cell_free(&alone);
        fidelity_cell_free(&together[i]);
        policy_run_close(runs[i]);
    }
    bed_close(&b);
}

// ---- the sweep and its log ----

enum { N_COLUMNS = 8, PER_TEXT = N_COLUMNS * 2 };

typedef struct field {
    model *m;
    sweep_text texts[TEXTS];
    method methods[3];
    allocator allocators[4];
    method_column columns[N_COLUMNS];
    sweep s;
} field;

static void field_open(field *f, const char *log)
{
    memset(f, 0, sizeof *f);
    f->m = case_open(help_path("tiny.gguf"), backend_find("cpu"));
    for (int t = 0; t < TEXTS; t++) {
        snprintf(f->texts[t].name, sizeof f->texts[t].name, "text %d", t);
        memset(f->texts[t].sha256, '0' + t, 64);
        f->texts[t].n_ids = T + N, f->texts[t].ids = case_alloc(T + N, sizeof(int32_t));
        for (int i = 0; i < T + N; i++) f->texts[t].ids[i] = (i * 37 + t * 11) % VOCABULARY;
    }
    const char *const metrics[] = {"keydiff", "snapkv:kvpress:window=8"};
    const char *const names[] = {"uniform", "ada:alpha=0.3", "oracle"};
    for (int i = 0; i < 2; i++) {
        help_ok(metric_parse(&f->methods[i].m, metrics[i], err));
        f->methods[i].sink = 4, f->methods[i].window = 8;
    }
    help_ok(policy_parse(&f->methods[2].p, "morphkv:window=8", err));
    for (int i = 0; i < 3; i++) help_ok(allocator_parse(&f->allocators[i], names[i], err));
    help_ok(allocator_parse(&f->allocators[3], "pyramid:window=4", err));
    for (uint32_t i = 0; i < 6; i++) f->columns[i] = (method_column){i / 3, &f->allocators[i % 3]};
    f->columns[6] = (method_column){2, &f->allocators[0]};
    f->columns[7] = (method_column){2, &f->allocators[3]};
    f->s = (sweep){.m = f->m,
                   .o = {T, N, 3, log, NULL, 0},
                   .texts = f->texts,
                   .n_texts = TEXTS,
                   .methods = {f->methods, 3, f->columns, N_COLUMNS}};
    help_ok(sweep_open(&f->s, (const double[]){0.3, 0.7}, 2, err));
    ck_assert_uint_eq(f->s.n_cells, TEXTS * PER_TEXT);
}

static void field_close(field *f)
{
    sweep_close(&f->s);
    for (int t = 0; t < TEXTS; t++) free(f->texts[t].ids);
    for (int i = 0; i < 4; i++) allocator_free(&f->allocators[i]);
    model_free(f->m);
}

// Whether the bits are the same: a result that was read from the log must have those of a measured one.
static bool same_number(double a, double b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

static bool stop_after(void *context, double done, double total)
{
    (void)total;
    return done < *(double *)context;
}

UNIT_TEST(a_stopped_sweep_goes_on)
{
    const char *log = help_path("sweep.cells");
    field whole, stopped, resumed;
    field_open(&whole, NULL);
    help_ok(sweep_run(&whole.s, NULL, err));
    double limit = 17;
    sweep_watch watch = {stop_after, &limit};
    field_open(&stopped, log);
    help_fails(sweep_run(&stopped.s, &watch, err), KVB_INTERRUPTED, "same command continues");
    field_close(&stopped);
    FILE *f = fopen(log, "a"); // like a kill in the middle of a line
    ck_assert_ptr_nonnull(f);
    fputs("{\"key\":\"0123", f);
    fclose(f);
    log_file *held, *second;
    help_ok(log_open(&held, log, err));
    help_fails(log_open(&second, log, err), KVB_IO, "another process");
    help_ok(log_close(held, KVB_OK, err));
    field_open(&resumed, log);
    size_t n_resumed = 0;
    for (size_t i = 0; i < resumed.s.n_cells; i++) n_resumed += resumed.s.cells[i].done;
    ck_assert(n_resumed >= 15 && n_resumed < resumed.s.n_cells);
    help_ok(sweep_run(&resumed.s, NULL, err));
    ck_assert_uint_eq(resumed.s.n_measured, resumed.s.n_cells - n_resumed);
    for (size_t i = 0; i < whole.s.n_cells; i++) {
        const fidelity_cell *a = &whole.s.cells[i].result, *b = &resumed.s.cells[i].result;
        ck_assert(whole.s.cells[i].done && resumed.s.cells[i].done && a->kept == b->kept &&
                  same_number(a->loss, b->loss));
        for (int r = 0; r < N; r++) ck_assert(same_number(a->kl[r], b->kl[r]) && a->agree[r] == b->agree[r]);
        bool acts = whole.s.cells[i].column >= 6;
        ck_assert(acts ? same_number(a->looked, b->looked) : isnan(b->looked));
    }
    field_close(&resumed);
    field_open(&resumed, log); // a third time: all lines are whole
    for (size_t i = 0; i < resumed.s.n_cells; i++) ck_assert(resumed.s.cells[i].done);
    field_close(&resumed);
    field_close(&whole);
}

// A device that fails at one of its products and reports it when checked, as backend.h promises for all of them.
static backend failing;
static long products_left;

static void count_products(backend_device *on, const projection *to, uint32_t count, dev x, uint32_t n)
{
    if (--products_left >= 0) backend_find("cpu")->project(on, to, count, x, n);
}

static void download_or_zeros(backend_device *on, float *to, dev from, size_t n)
{
    if (products_left < 0) memset(to, 0, n * sizeof *to);
    else backend_find("cpu")->download(on, to, from, n);
}

static kvb_status check_device(backend_device *on, kvb_error *err)
{
    (void)on;
    return products_left < 0 ? kvb_fail(err, KVB_IO, "the device has fallen off the bus") : KVB_OK;
}

static void field_open_failing(field *f, const char *log, long products)
{
    field_open(f, log);
    failing = *backend_find("cpu");
    failing.project = count_products, failing.download = download_or_zeros;
    failing.check = check_device;
    f->m->device->b = &failing; // passes open their devices with it
    products_left = products;
}

// Checks that the cells of a log equal those of a sweep without failures. Returns how many there are.
static size_t check_log(const char *log, const field *whole)
{
    field f;
    size_t n = 0;
    field_open(&f, log);
    for (size_t i = 0; i < f.s.n_cells; i++) {
        const fidelity_cell *got = &f.s.cells[i].result, *want = &whole->s.cells[i].result;
        if (!f.s.cells[i].done) continue;
        for (int r = 0; r < N; r++) ck_assert(same_number(got->kl[r], want->kl[r]));
        n++;
    }
    field_close(&f);
    return n;
}

UNIT_TEST(a_failed_device_gives_no_results)
{
    char log[512];
    field whole, f;
    snprintf(log, sizeof log, "%s", help_path("failing.cells")); // help_path reuses its memory
    field_open_failing(&whole, NULL, LONG_MAX);
    help_ok(sweep_run(&whole.s, NULL, err));
    long all = LONG_MAX - products_left;
    size_t most = 0;
    for (long at = 0; at < all; at += all / 8) {
        remove(log);
        field_open_failing(&f, log, at);
        help_fails(sweep_run(&f.s, NULL, err), KVB_IO, "fallen off the bus");
        products_left = 0;
        field_close(&f);
        size_t n = check_log(log, &whole);
        ck_assert(n < whole.s.n_cells && n >= most);
        most = n;
    }
    ck_assert_uint_gt(most, 0);
    products_left = 0;
    field_close(&whole);
}

UNIT_TEST(the_summary_adds_up)
{
    field f;
    sweep_summary *rows;
    size_t n;
    field_open(&f, NULL);
    help_ok(sweep_run(&f.s, NULL, err));
    rows = sweep_summarize(&f.s, &n);
    ck_assert_uint_eq(n, PER_TEXT);
    for (size_t i = 0; i < n; i++) {
        double kl = 0;
        const method_column *column = &f.columns[rows[i].column];
        for (int t = 0; t < TEXTS; t++)
            for (int r = 0; r < N; r++) kl += f.s.cells[i + (size_t)t * n].result.kl[r] / (TEXTS * N);
        ck_assert(fabs(rows[i].kl.value - kl) < 1e-12);
        if (kl > 0) ck_assert(isnan(rows[i].kl.low)); // too few texts for an interval
        if (column->how->kind == ALLOCATOR_UNIFORM) ck_assert(rows[i].to_uniform.value == 1 || kl == 0);
        ck_assert(isnan(rows[i].to_published.value)); // there is no such table
        ck_assert(fabs(rows[i].effective - rows[i].ratio) < 0.01);
        for (size_t k = 0; k < n; k++) // the oracle in hindsight loses the least importance
            if (rows[k].ratio == rows[i].ratio && column->how->kind == ALLOCATOR_ORACLE &&
                f.columns[rows[k].column].method == column->method)
                ck_assert(rows[i].loss <= rows[k].loss + 1e-12);
    }
    free(rows);
    field_close(&f);
}

// A line that lacks numbers of its cell is refused, and the message names its place; other sweeps' lines are ignored.
UNIT_TEST(damaged_logs)
{
    field f;
    char line[256];
    field_open(&f, NULL);
    help_ok(log_open(&f.s.log, NULL, err));
    int length = snprintf(line, sizeof line, "{\"key\":\"%s\",\"kept\":3}\n", f.s.cells[5].key);
    help_ok(log_parse(f.s.log, line, (size_t)length, "log", err));
    help_fails(sweep_take(&f.s, err), KVB_FORMAT, "line 1: a result with numbers missing");
    ck_assert(!f.s.cells[5].done);
    field_close(&f);
    field_open(&f, NULL);
    help_ok(log_open(&f.s.log, NULL, err));
    length = snprintf(line, sizeof line, "{\"key\":\"%064d\"}\n{\"cut", 7);
    help_ok(log_parse(f.s.log, line, (size_t)length, "log", err));
    help_ok(sweep_take(&f.s, err));
    for (size_t i = 0; i < f.s.n_cells; i++) ck_assert(!f.s.cells[i].done);
    field_close(&f);
}

UNIT_MAIN_EACH("evaluator: fidelity and sweep", case_tiny_setup, help_teardown)
