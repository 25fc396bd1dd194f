// Damage of many cuts of the same texts: it is what a text's fidelity says, in any order and batch, and nothing for a
// whole cache; for single heads it is what the whole pass finds; and the log keeps what was measured.
#include "evaluator/fidelity.h"
#include "evaluator/refine_bench.h"
#include "formats/need.h"
#include "test_profiler_cases.h"

enum { L = 2, G = 2, VOCABULARY = 300, T = 90, N = 16, TEXTS = 2, HEADS = L * G, CUTS = 5 };

static const uint32_t CUT[CUTS][HEADS] = {
    {30, 15, 30, 30}, {T, T, T, T}, {12, 12, 12, 12}, {60, 20, 7, 33}, {1, 90, 45, 2}};

static const uint8_t FORMATS[CUTS][2 * HEADS] = {
    {2, 1, 0, 3, 1, 0, 3, 2}, {2, 2, 2, 2, 2, 2, 2, 2}, {3, 3, 3, 3, 3, 3, 3, 3}};

static model *m;
static metric by;
static int32_t ids[TEXTS][T + N];

static void setup(void)
{
    case_tiny_setup();
    m = case_open(help_path("tiny.gguf"), backend_find("cpu")), by = case_metric("keydiff");
    for (int i = 0; i < TEXTS * (T + N); i++)
        ids[i / (T + N)][i % (T + N)] = (int32_t)((case_uniform() + 1) * 0.5 * VOCABULARY);
}

static void teardown(void)
{
    model_free(m);
    help_teardown();
}

// Returns the mean of each loss that fidelity.h gives per row.
static damage_value mean_of(const fidelity_cell *c, uint32_t n)
{
    damage_value mean = {0};
    for (uint32_t i = 0; i < n; i++) {
        mean.kl += c->kl[i] / n;
        mean.flips += !c->agree[i] / (double)n;
        if (i + 1 < n) mean.nll += c->nll[i] / (n - 1);
    }
    mean.nll -= c->full_nll;
    return mean;
}

static void judge(const int32_t *text, const uint8_t (*formats)[2 * HEADS], damage_value *out)
{
    session *s;
    fidelity *f;
    session_plan plan = {T, N, CUTS * N, &by, 1, true, false, 0};
    help_ok(session_open(&s, m, &plan, err));
    help_ok(fidelity_open(&f, s, N, CUTS, err));
    help_ok(fidelity_begin(f, text, T, NULL, NULL, err));
    for (int i = 0; i < CUTS; i++) {
        kept_set kept;
        fidelity_cell cell;
        help_ok(session_select(s, s->now.scores[0], CUT[i], 4, 1, &kept, err));
        if (formats) kept.formats = need_copy(formats[i], 2 * HEADS, 1, "formats");
        help_ok(fidelity_measure(f, &kept, 1, &cell, err));
        out[i] = mean_of(&cell, N);
        fidelity_cell_free(&cell);
        kept_set_free(&kept);
    }
    fidelity_close(f);
    session_close(s);
}

UNIT_TEST(damage_is_what_fidelity_measures)
{
    damage_value want[TEXTS][CUTS], one[TEXTS][CUTS], both[TEXTS][CUTS], got[CUTS], alone;
    for (int t = 0; t < TEXTS; t++) judge(ids[t], NULL, want[t]);
    damage *d;
    damage_text texts[TEXTS];
    damage_plan plan = {T, N, 3, &by, 4, 1, 0};
    help_ok(damage_open(&d, m, &plan, err));
    for (int t = 0; t < TEXTS; t++) texts[t] = damage_text_open(d);
    for (int t = 0; t < TEXTS; t++) help_ok(damage_text_fill(d, &texts[t], ids[t], NULL, err));
    for (int round = 0; round < 2; round++) // the second time with another text in between
        for (int t = 0; t < TEXTS; t++) {
            help_ok(damage_measure(d, &texts[t], CUT[0], NULL, CUTS, got, err));
            for (int i = 0; i < CUTS; i++) {
                ck_assert_msg(fabs(got[i].kl - want[t][i].kl) < 1e-12, "text %d, cut %d: KL %.9g, expected %.9g", t, i,
                              got[i].kl, want[t][i].kl);
                ck_assert(fabs(got[i].flips - want[t][i].flips) < 1e-12 && fabs(got[i].nll - want[t][i].nll) < 1e-9);
                ck_assert(i == 1 ? got[i].kl == 0 && got[i].flips == 0 : got[i].kl > 0);
            }
            help_ok(damage_measure(d, &texts[t], CUT[3], NULL, 1, &alone, err));
            ck_assert(memcmp(&alone, &got[3], sizeof alone) == 0);
            for (int i = 0; i < CUTS; i++) one[t][i] = got[i];
        }
    damage_cut mixed[TEXTS * CUTS];
    for (int i = 0; i < TEXTS * CUTS; i++) // texts in turn, so that every batch has cuts of both
        mixed[i] = (damage_cut){&texts[i % TEXTS], CUT[i / TEXTS], &both[i % TEXTS][i / TEXTS], NULL};
    help_ok(damage_measure_cuts(d, mixed, TEXTS * CUTS, err));
    ck_assert(memcmp(both, one, sizeof one) == 0);
    help_ok(damage_text_fill(d, &texts[0], ids[1], NULL, err)); // a text may be filled again
    help_ok(damage_measure(d, &texts[0], CUT[0], NULL, 1, &alone, err));
    ck_assert(fabs(alone.kl - want[1][0].kl) < 1e-12);
    ck_assert_uint_gt(damage_text_bytes(m, &plan), 2 * HEADS * T * 16 * sizeof(float));
    for (int t = 0; t < TEXTS; t++) damage_text_close(&texts[t]);
    damage_close(d);
}

// Formats of fewer bits, in the places that damage.h names, lose what fidelity finds of a packed cache.
UNIT_TEST(formats_lose_what_fidelity_measures)
{
    damage_value want[CUTS], bare[CUTS], got[CUTS];
    damage *d;
    damage_plan plan = {T, N, 3, &by, 4, 1, 0};
    judge(ids[0], FORMATS, want);
    judge(ids[0], NULL, bare);
    help_ok(damage_open(&d, m, &plan, err));
    damage_text text = damage_text_open(d);
    help_ok(damage_text_fill(d, &text, ids[0], NULL, err));
    help_ok(damage_measure(d, &text, CUT[0], FORMATS[0], CUTS, got, err));
    for (int i = 0; i < CUTS; i++) {
        ck_assert_double_eq_tol(got[i].kl, want[i].kl, 1e-9 + 1e-5 * want[i].kl);
        ck_assert(got[i].kl != bare[i].kl);
    }
    damage_text_close(&text);
    damage_close(d);
}

// Cuts of single heads, run from their own layer on, lose what the whole pass finds, in any batch.
UNIT_TEST(a_head_alone_is_one_cut)
{
    enum { LEVELS = 3 };
    static const uint32_t KEEP[LEVELS][HEADS] = {{60, 70, 50, 40}, {30, T, 22, 35}, {9, 14, 5, T}};
    damage_value one[LEVELS][HEADS], again[LEVELS][HEADS], want;
    for (uint32_t batch = 1; batch <= 4; batch += 3) {
        damage *d;
        damage_plan plan = {T, N, batch, &by, 4, 1, 0};
        help_ok(damage_open(&d, m, &plan, err));
        damage_text text = damage_text_open(d);
        help_ok(damage_text_fill(d, &text, ids[0], NULL, err));
        help_ok(damage_measure_heads(d, &text, KEEP[0], LEVELS, batch == 1 ? one[0] : again[0], NULL, err));
        for (int i = 0; i < LEVELS; i++)
            for (int h = 0; h < HEADS; h++) {
                uint32_t keep[HEADS] = {T, T, T, T};
                keep[h] = KEEP[i][h];
                help_ok(damage_measure(d, &text, keep, NULL, 1, &want, err));
                ck_assert_msg(fabs(one[i][h].kl - want.kl) <= 1e-9 + 1e-4 * want.kl,
                              "head %d, %u tokens: KL %.9g, expected %.9g", h, keep[h], one[i][h].kl, want.kl);
                ck_assert(fabs(one[i][h].nll - want.nll) < 1e-6 && fabs(one[i][h].flips - want.flips) < 1e-12);
                ck_assert(keep[h] < T ? one[i][h].kl > 0 : one[i][h].kl == 0);
            }
        damage_text_close(&text);
        damage_close(d);
    }
    ck_assert(memcmp(one, again, sizeof one) == 0);
}

static bool stop_at_once(void *context, double done, double total)
{
    (*(int *)context)++;
    return done < total / 2;
}

UNIT_TEST(heads_alone_can_be_stopped)
{
    int asked = 0;
    const forward_progress watch = {stop_at_once, &asked};
    const uint32_t keep[HEADS] = {20, 20, 20, 20};
    damage_value out[HEADS], whole;
    damage *d;
    damage_text text;
    damage_plan plan = {T, N, 2, &by, 4, 1, 0};
    help_ok(damage_open(&d, m, &plan, err));
    text = damage_text_open(d);
    help_ok(damage_text_fill(d, &text, ids[0], NULL, err));
    ck_assert(damage_measure_heads(d, &text, keep, 1, out, &watch, NULL) == KVB_INTERRUPTED && asked == L / 2);
    help_ok(damage_measure(d, &text, keep, NULL, 1, &whole, err)); // the text can still be used
    ck_assert(whole.kl > 0);
    damage_text_close(&text);
    damage_close(d);
}

UNIT_TEST(contexts_are_put_aside_and_taken_back)
{
    session *s;
    session_context aside;
    metric two_stages = case_metric("critical+snapkv");
    session_plan plan = {T, N, N, &by, 1, false, false, 0};
    help_ok(session_open(&s, m, &plan, err));
    aside = session_context_open(s);
    help_ok(session_prefill(s, ids[0], T, NULL, NULL, err));
    float *keys = s->now.k, *first = s->now.scores[0], score = first[T / 2];
    session_exchange(s, &aside);
    ck_assert(aside.k == keys && aside.scores[0] == first && aside.n_tokens == T && s->now.n_tokens == 0);
    help_ok(session_prefill(s, ids[1], T, NULL, NULL, err)); // into the other memory
    session_exchange(s, &aside);
    ck_assert(s->now.k == keys && s->now.scores[0][T / 2] == score && aside.k != keys && aside.n_tokens == T);
    ck_assert_uint_eq(session_context_bytes(m, &plan), HEADS * T * (2 * 16 + 1) * sizeof(float));
    plan.metrics = &two_stages;
    ck_assert_uint_eq(session_context_bytes(m, &plan), HEADS * T * (2 * 16 + 2) * sizeof(float));
    session_context_free(&aside);
    session_close(s);
}

UNIT_TEST(rows_are_judged_by_the_definition)
{
    const float logits[2][3] = {{0, 1, 2}, {3, 0, 0}}, other[3] = {2, 1, 0};
    predictions full = predictions_open(2, 3);
    memcpy(full.logits, logits, sizeof logits);
    full.next[1] = 2;
    predictions_finish(&full);
    double sum = exp(0) + exp(1) + exp(2), kl = 0;
    for (int t = 0; t < 3; t++) kl += exp(logits[0][t]) / sum * (logits[0][t] - other[t]);
    row_damage row = predictions_row(&full, 0, other), same = predictions_row(&full, 1, logits[1]);
    ck_assert(fabs(row.kl - kl) < 1e-6 && !row.agree && fabs(row.nll - (log(sum) - 0)) < 1e-6);
    ck_assert(fabs(full.nll[0] - (log(sum) - 2)) < 1e-6 && same.kl == 0 && same.agree && isnan(same.nll));
    predictions_close(&full);
}

UNIT_TEST(what_was_measured_is_remembered)
{
    log_file *log;
    kvb_error err = {0};
    char keys[3][LOG_KEY], line[400];
    const double kl[2] = {0.1, 1.0 / 3};
    const char *path = help_path("damage.cells");
    damage_value found;
    cJSON *lines[2];
    for (int i = 0; i < 3; i++) memset(keys[i], '0' + i, LOG_KEY - 1), keys[i][LOG_KEY - 1] = '\0';
    for (int i = 0; i < 2; i++) {
        lines[i] = cJSON_CreateObject();
        cJSON_AddStringToObject(lines[i], "key", keys[i]);
        log_put_number(lines[i], "kl", kl[i]);
        log_put_number(lines[i], "flips", 0.25);
        log_put_number(lines[i], "nll", -kl[i]);
    }
    ck_assert(log_open(&log, path, &err) == KVB_OK && !log_find(log, keys[0]));
    ck_assert(log_add(log, lines, 2, &err) == KVB_OK);
    for (int round = 0; round < 2; round++) { // from this run, then from disk: the same bits
        for (int i = 0; i < 2; i++) {
            ck_assert(damage_value_read(&found, log, keys[i], &err) == KVB_OK);
            ck_assert(found.kl == kl[i] && found.flips == 0.25 && found.nll == -kl[i]);
        }
        ck_assert(!log_find(log, keys[2]) && log_close(log, KVB_OK, &err) == KVB_OK);
        ck_assert(log_open(&log, path, &err) == KVB_OK);
    }
    snprintf(line, sizeof line, "{\"key\":\"%s\",\"kl\":1,\"flips\":1,\"nll\":null}\n", keys[2]);
    ck_assert(log_parse(log, line, strlen(line), "lines", &err) == KVB_OK);
    ck_assert(damage_value_read(&found, log, keys[2], &err) == KVB_FORMAT);
    const char *const wrong[] = {"hello\n", "[1, 2]\n", "{\"k\": 1}\n", "{\"key\":1}\n", "{\"key\":\"0123\"}\n"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ck_assert(log_parse(log, wrong[i], strlen(wrong[i]), "lines", &err) == KVB_FORMAT);
        ck_assert_str_eq(err.message, "lines: line 1 is not a result of this program; name another file");
    }
    ck_assert(log_close(log, KVB_NUMERIC, &err) == KVB_NUMERIC);
}

UNIT_TEST(impossible_plans_are_refused)
{
    damage *d;
    const damage_plan plans[] = {{T, 1, 3, &by, 4, 1, 0},
                                 {0, N, 3, &by, 4, 1, 0},
                                 {T, N, 0, &by, 4, 1, 0},
                                 {m->config.context_length, N, 3, &by, 4, 1, 0}};
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) {
        help_fails(damage_open(&d, m, &plans[i], err), KVB_ARGUMENT, "");
        ck_assert_ptr_null(d);
    }
}

UNIT_MAIN_EACH("evaluator/damage", setup, teardown)
