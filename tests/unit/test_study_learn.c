// Rankings fitted to records whose importance is a known function of a metric: which metric is found, what its weights
// are, and which texts they have not seen.
#include "study/learn.h"
#include "study/learned_scores.h"
#include "study/table_check.h"
#include "study_help.h"

enum { TEXTS = 3, TOKENS = 60, NUMBERS = CASE_HEADS * TOKENS };

static const char *const METRICS[] = {"keydiff", "knorm", "random"};
static bool together;       // both heads need the mean of keydiff over the two
static bool same_tokens;    // the last two contexts are one text
static const char *bounded; // layers of the model that the record leaves out; NULL: none

// Returns noise in [-1, 1] for a text, a metric and a place.
static float noise(uint32_t text, uint32_t metric, uint32_t i)
{
    uint32_t x = (text * 31 + metric) * 7919 + i;
    x = (x ^ x >> 16) * 0x45d9f3bu;
    x = (x ^ x >> 16) * 0x45d9f3bu;
    return (float)((x ^ x >> 16) % 20001) / 10000 - 1;
}

// Head 0 needs what keydiff says, and head 1 what knorm says; random is noise that is never negative.
static void make_record(const char *path, uint32_t texts)
{
    record_writer *w;
    const record_shape shape = {1, 4, CASE_HEADS, 8};
    const char *ids[TEXTS] = {"a", "b", "c"};
    cJSON *attributes = case_attributes(NULL);
    if (bounded) cJSON_AddStringToObject(attributes, "bounded_layers", bounded);
    help_ok(record_begin(&w, path, &shape, attributes, RECORD_NEW, err));
    for (uint32_t k = 0; k < texts; k++) {
        float scores[3][NUMBERS], oracle[NUMBERS];
        const float *all[3] = {scores[0], scores[1], scores[2]};
        int32_t tokens[TOKENS];
        const int32_t one[1] = {1};
        uint32_t text = same_tokens && k == TEXTS - 1 ? k - 1 : k;
        for (int j = 0; j < TOKENS; j++) tokens[j] = 100 * (int32_t)text + j;
        for (uint32_t i = 0; i < NUMBERS; i++) {
            for (uint32_t m = 0; m < 3; m++) scores[m][i] = noise(k, m, i);
            scores[2][i] += 1.001f;
            oracle[i] = expf(2 * scores[i / TOKENS][i]);
        }
        for (uint32_t i = 0; together && i < NUMBERS; i++)
            oracle[i] = expf(2 * (scores[0][i % TOKENS] + scores[0][TOKENS + i % TOKENS]));
        help_ok(record_put_context(w, ids[k], tokens, TOKENS, METRICS, all, 3, err));
        const record_question put = {oracle, one, 1, one, 1, 5, NULL};
        help_ok(record_put_question(w, ids[k], 0, &put, err));
    }
    help_ok(record_finish(w, ids, texts, err));
    record_writer_free(w);
    cJSON_Delete(attributes);
}

static const char *open_all(uint32_t texts)
{
    static const char *const all[] = {"all"};
    const char *path = help_path("learn.h5");
    const selection_request wanted = {all, 1, NULL, UINT64_MAX, NULL};
    remove(path); // of an earlier call
    make_record(path, texts);
    help_ok(selection_open(&from, path, &wanted, err));
    return path;
}

static learned fitted, *const l = &fitted;

static void teardown(void)
{
    learn_free(l);
    together = same_tokens = false;
    bounded = NULL;
    case_teardown();
}

static const learn_options CHOOSE = {TARGET_MAX, NAN, NAN, false, 2, false};

// Fits a ranking and returns it as its file says; the next one has the same file.
static kvb_ranking *fit(const learn_options *o)
{
    char name[24];
    kvb_ranking *r;
    help_ok(learn_fit(l, &from, o, NULL, err));
    help_ok(learn_write(l, help_path("rank.safetensors"), name, err));
    help_ok(kvb_ranking_open(&r, help_path("rank.safetensors"), err));
    ck_assert_str_eq(kvb_ranking_about(r)->name, name);
    return r;
}

UNIT_TEST(finds_the_metrics_that_count)
{
    open_all(TEXTS);
    help_ok(learn_fit(l, &from, &CHOOSE, NULL, err));
    unit_numbers(l->n_folds, TEXTS, l->n_trials, 3 + 12);
    ck_assert(l->logarithm[0] == 0 && l->logarithm[1] == 0 && l->logarithm[2] == 1);
    const learn_trial *chosen = &l->trials[l->chosen];
    for (int m = 0; m < 3; m++) // better than each metric's own order, at every ratio
        for (int r = 0; r < LEARN_RATIOS; r++) ck_assert_double_lt(chosen->loss[r], l->trials[m].loss[r]);
    // The importance is exp(2 x): log I grows by 2 times the deviation of x, 0.58, per z; ridge shares that between z
    // and z |z|, which are alike, so the sum is judged.
    ck_assert_double_eq_tol(l->weights[0] + l->weights[1], 1.15, 0.25);
    ck_assert_double_lt(fabs(l->weights[2] + l->weights[3]), 0.2);              // head 0 does not look at knorm
    ck_assert_double_eq_tol(l->weights[8 + 2] + l->weights[8 + 3], 1.15, 0.25); // head 1 does
    ck_assert_double_lt(fabs(l->weights[8 + 0] + l->weights[8 + 1]), 0.2);
    for (int h = 0; h < 2; h++) // random says nothing
        ck_assert_double_lt(fabs(l->weights[8 * h + 4] + l->weights[8 * h + 5]), 0.2);
}

UNIT_TEST(settings_that_are_given_stay)
{
    learn_options o = {TARGET_MEAN, 0.5, 0.3, false, 2, false};
    open_all(TEXTS);
    help_ok(learn_fit(l, &from, &o, NULL, err));
    for (const double *w = l->weights; w < l->weights + 8 * CASE_HEADS; w += 8) // of z and z |z|: no curve turns back
        for (int f = 0; f < 3; f++) // but for the 0.05 that keep what stands out to KeyDiff
            ck_assert_double_ge(w[2 * f] * (w[2 * f + 1] - (f == 0 ? 0.05 : 0)), 0);
    ck_assert_uint_eq(l->n_trials, 3 + 1); // plain metrics, the fit
    ck_assert(l->options.lambda == 0.5 && l->options.exponent == 0.3);
}

// If both heads need the mean of what they say, layer_mean loses less on texts left out, and the file says so.
UNIT_TEST(the_mean_of_a_layer)
{
    learn_options o = {TARGET_MEAN, 0.001, 0, false, 2, false};
    float scores[NUMBERS], recorded[3][NUMBERS], expected[NUMBERS];
    together = true;
    open_all(TEXTS);
    help_ok(learn_fit(l, &from, &o, NULL, err));
    const learn_trial own = l->trials[l->chosen];
    learn_free(l);
    o.layer_mean = true;
    kvb_ranking *r = fit(&o);
    for (int i = 0; i < LEARN_RATIOS; i++) ck_assert_double_lt(l->trials[l->chosen].loss[i], 0.8 * own.loss[i]);
    ck_assert(kvb_ranking_about(r)->layer_mean && kvb_ranking_about(r)->n_columns == 3 * 3 + 2);
    const float *features[] = {recorded[0], recorded[1], recorded[2]};
    help_ok(learned_scores_read(&from, 1, r, scores, err));
    for (uint32_t m = 0; m < 3; m++) help_ok(record_read_scores(from.r, 1, METRICS[m], recorded[m], err));
    help_ok(kvb_rank_heads(r, 2, 0, CASE_HEADS, features, TOKENS, expected, err));
    ck_assert(memcmp(scores, expected, sizeof expected) == 0);
    kvb_ranking_close(r);
}

// A frozen ranking is standardised by mean and deviation over all texts, which the file has for every head and feature.
UNIT_TEST(means_of_all_texts)
{
    learn_options o = {TARGET_MEAN, 0.001, 0, false, 2, true};
    double sum[2] = {0};
    open_all(TEXTS);
    kvb_ranking *r = fit(&o);
    const kvb_ranking_info *info = kvb_ranking_about(r);
    ck_assert(info->frozen && !info->layer_mean && info->n_columns == 4 * 3 + 2);
    for (uint32_t k = 0; k < TEXTS; k++)
        for (uint32_t j = 2; j < TOKENS; j++) {
            double x = noise(k, 1, TOKENS + j); // knorm of head 1
            sum[0] += x / (TEXTS * (TOKENS - 2)), sum[1] += x * x / (TEXTS * (TOKENS - 2));
        }
    const double *knorm = info->weights + info->n_columns + 3 * 2 + 2;
    ck_assert_double_eq_tol(knorm[0], sum[0], 1e-6);
    ck_assert_double_eq_tol(knorm[1], 1 / sqrt(sum[1] - sum[0] * sum[0]), 1e-6);
    kvb_ranking_close(r);
}

// The same text under two names, each with its own questions, is left out as one.
UNIT_TEST(a_text_that_was_recorded_twice)
{
    char sha256[65];
    same_tokens = true; // of the last two contexts
    open_all(TEXTS);
    kvb_ranking *r = fit(&CHOOSE);
    ck_assert_uint_eq(l->n_folds, TEXTS - 1);
    ck_assert(l->fold[0] == 0 && l->fold[1] == 1 && l->fold[2] == 1);
    help_ok(context_sha256(&from, 2, sha256, err));
    ck_assert_uint_eq(kvb_ranking_fold(r, sha256), 2);
    kvb_ranking_close(r);
}

// In the file, layers with a window have weights of 0, and the other layer has its own; scores do not change.
UNIT_TEST(layers_that_are_not_budgeted)
{
    float with[NUMBERS], without[NUMBERS];
    learn_options o = {TARGET_MAX, 0.01, 0.25, true, 2, false};
    open_all(TEXTS);
    kvb_ranking *whole = fit(&o);
    help_ok(learned_scores_read(&from, 1, whole, without, err));
    learn_free(l);
    selection_close(&from);
    help_remove(help_path("learn.h5"));
    bounded = "0,2";
    open_all(TEXTS);
    help_fails(selection_check_ranking(&from, whole, err), KVB_MISMATCH, "1 layers x 2 KV heads, is of another");
    kvb_ranking *r = fit(&o);
    ck_assert_uint_eq(kvb_ranking_about(r)->n_layers, 3);
    size_t layer = (size_t)CASE_HEADS * kvb_ranking_about(r)->n_columns;
    for (uint32_t fold = 0; fold <= l->n_folds; fold++) {
        const double *weights = r->weights + fold * 3 * layer;
        for (size_t i = 0; i < layer; i++) ck_assert(weights[i] == 0 && weights[2 * layer + i] == 0);
        ck_assert(memcmp(weights + layer, l->weights + fold * layer, layer * sizeof *weights) == 0);
    }
    help_ok(selection_check_ranking(&from, r, err));
    help_ok(learned_scores_read(&from, 1, r, with, err));
    ck_assert(memcmp(with, without, sizeof with) == 0);
    kvb_ranking_close(r);
    kvb_ranking_close(whole);
}

UNIT_TEST(one_text_is_too_few)
{
    open_all(1);
    help_fails(learn_fit(l, &from, &CHOOSE, NULL, err), KVB_ARGUMENT, "at least two");
}

UNIT_TEST(more_metrics_than_a_ranking_takes)
{
    size_t n;
    open_all(TEXTS);
    n = from.n_metrics;
    from.n_metrics = KVB_RANK_FEATURES_MAX + 1;
    help_fails(learn_fit(l, &from, &CHOOSE, NULL, err), KVB_ARGUMENT, "17 metrics: a ranking takes at most 16");
    from.n_metrics = n;
}

UNIT_TEST(texts_that_were_fitted_on_are_ranked_by_others)
{
    char sha256[65];
    float scores[NUMBERS], features[3][NUMBERS], expected[TOKENS];
    open_all(TEXTS);
    kvb_ranking *r = fit(&CHOOSE);
    for (size_t k = 0; k < TEXTS; k++) {
        help_ok(context_sha256(&from, k, sha256, err));
        ck_assert_uint_eq(kvb_ranking_fold(r, sha256), k + 1);
        help_ok(learned_scores_read(&from, k, r, scores, err));
        for (int f = 0; f < 3; f++) help_ok(record_read_scores(from.r, k, METRICS[f], features[f], err));
        for (size_t h = 0; h < CASE_HEADS; h++) {
            const float *of_head[] = {features[0] + h * TOKENS, features[1] + h * TOKENS, features[2] + h * TOKENS};
            help_ok(kvb_rank_heads(r, (uint32_t)k + 1, h, 1, of_head, TOKENS, expected, err));
            ck_assert(memcmp(scores + h * TOKENS, expected, sizeof expected) == 0);
        }
    }
    kvb_ranking_close(r);
}

// solve --metric learned=FILE; the table carries the ranking, and its bounds are checked with that alone.
UNIT_TEST(tables_of_a_ranking)
{
    char named[300];
    study_table *t = calloc(1, sizeof *t);
    char source[256], table[256];
    strcpy(source, open_all(TEXTS));
    kvb_ranking *r = fit(&CHOOSE);
    snprintf(named, sizeof named, "learned=%s", help_path("rank.safetensors"));
    selection_close(&from);
    const char *metrics[] = {named, "keydiff"};
    const selection_request wanted = {metrics, 2, NULL, UINT64_MAX, NULL};
    help_ok(selection_open(&from, source, &wanted, err));
    ck_assert_uint_eq(from.n_metrics, 2);
    ck_assert_str_eq(from.metrics[0], kvb_ranking_about(r)->name);
    ck_assert(selection_ranking(&from, from.metrics[0]) && !selection_ranking(&from, from.metrics[1]));
    study_options o = case_options("mean_loss");
    help_ok(study_table_open(t, &from, from.metrics[0], &o, false, err));
    help_ok(study_table_solve(t, NULL, err));
    case_save(t, strcpy(table, help_path("table.safetensors")));
    study_table_free(t);
    free(t);
    table_check *k = calloc(1, sizeof *k);
    const selection_request all = {NULL, 0, NULL, UINT64_MAX, NULL};
    help_ok(table_check_open(k, table, source, &all, err));
    help_ok(table_check_run(k, NULL, err));
    ck_assert_uint_eq(kvb_ranking_about(kvb_table_ranking(k->table))->n_features, 3);
    table_check_free(k);
    free(k);
    record_metric m;
    record_metric_learned(&m, r);
    ck_assert(m.sink == 2 && m.window == 1 && strstr(m.parameters, "\"knorm\""));
    record_metric_free(&m);
    kvb_ranking_close(r);
}

UNIT_TEST(rankings_of_other_records)
{
    char named[300];
    open_all(TEXTS);
    kvb_ranking *r = fit(&CHOOSE);
    snprintf(named, sizeof named, "learned=%s", help_path("rank.safetensors"));
    const case_context other = {.id = "z", .n_tokens = 12, .n_questions = 1, .questions = {{9, {1, 0}, NULL}}};
    const char *metrics[] = {named};
    const selection_request wanted = {metrics, 1, NULL, UINT64_MAX, NULL};
    selection s;
    help_fails(selection_open(&s, case_record("other.h5", &other, 1), &wanted, err), KVB_MISMATCH,
               "no scores of knorm");
    selection_close(&s);
    r->info.n_layers = 7;
    help_fails(selection_check_ranking(&from, r, err), KVB_MISMATCH, "another model");
    r->info.n_layers = 1;
    kvb_ranking_close(r);
}

UNIT_MAIN_EACH("study_learn", help_setup, teardown)
