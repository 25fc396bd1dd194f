// Studies of a task on the tiny model: answering together gives what answering alone gives, a stopped study can be
// resumed, and its numbers add up.
#include "evaluator/task_study.h"
#include "test_profiler_cases.h"

enum { SAMPLES = 3, QUESTIONS = 2, TOKENS = 360, COLUMNS = 4, RATIOS = 2, CELLS = 1 + COLUMNS * RATIOS };

typedef struct bed {
    model *m;
    model_text text;
    task t;
    method methods[3];
    allocator allocators[2];
    method_column columns[COLUMNS];
    task_study s;
} bed;

static const double ratios[RATIOS] = {0.4, 0.9};

static void bed_open(bed *b, uint32_t n_columns, const char *log)
{
    memset(b, 0, sizeof *b);
    b->m = case_open(help_path("tiny.gguf"), backend_find("cpu")), b->text = case_text(b->m);
    help_ok(task_parse(&b->t, "kv:questions=2:uuid=0", err));
    help_ok(metric_parse(&b->methods[0].m, "keydiff", err));
    help_ok(policy_parse(&b->methods[1].p, "morphkv:window=8", err));
    help_ok(policy_parse(&b->methods[2].p, "quest", err));
    b->methods[0].sink = 4;
    help_ok(allocator_parse(&b->allocators[0], "uniform", err));
    help_ok(allocator_parse(&b->allocators[1], "ada", err));
    const method_column columns[COLUMNS] = {
        {0, &b->allocators[0]}, {0, &b->allocators[1]}, {1, &b->allocators[0]}, {2, &b->allocators[0]}};
    memcpy(b->columns, columns, sizeof columns);
    b->s = (task_study){.m = b->m,
                        .text = &b->text,
                        .t = &b->t,
                        .seed = 3,
                        .n_samples = SAMPLES,
                        .methods = {b->methods, 3, b->columns, n_columns},
                        .log = log};
    help_ok(task_study_open(&b->s, ratios, RATIOS, err));
}

static void bed_close(bed *b)
{
    task_study_close(&b->s);
    allocator_free(&b->allocators[0]);
    allocator_free(&b->allocators[1]);
    model_text_close(&b->text);
    model_free(b->m);
}

// Samples after the first need a longer session.
static void answer(bed *b, uint32_t first, uint32_t end)
{
    const task_source source = {b->text.tokens, 3, NULL, NULL};
    for (uint32_t i = first; i < end; i++) {
        task_sample sample;
        help_ok(task_make(&sample, &b->t, &source, i ? TOKENS : TOKENS - 80, i, err));
        help_ok(task_study_add(&b->s, i, &sample, err));
    }
    help_ok(task_study_answer(&b->s, err));
}

static void same_cells(const task_cell *a, const task_cell *b)
{
    for (uint32_t i = 0; i < SAMPLES; i++) {
        const task_result *x = &a->samples[i], *y = &b->samples[i];
        ck_assert(x->done && y->done && x->n_questions == QUESTIONS && y->n_questions == QUESTIONS);
        ck_assert(fabs(x->kept - y->kept) < 1e-12 &&
                  (isnan(x->looked) ? isnan(y->looked) : fabs(x->looked - y->looked) < 1e-12));
        for (int q = 0; q < QUESTIONS; q++) ck_assert(x->scores[q] == y->scores[q]);
    }
}

UNIT_TEST(together_is_alone)
{
    static bed all, one;
    bed_open(&all, COLUMNS, NULL);
    answer(&all, 0, SAMPLES);
    ck_assert_uint_eq(all.s.n_answered, (size_t)CELLS * SAMPLES);
    for (size_t i = 1; i < CELLS; i++) {
        const task_cell *c = &all.s.cells[i];
        bool evicts = c->column->method<2, acts = c->column->method> 0;
        for (uint32_t k = 0; k < SAMPLES; k++) {
            ck_assert(fabs(c->samples[k].kept - (evicts ? 1 - c->ratio : 1)) < 0.01);
            ck_assert(isnan(c->samples[k].looked) == !acts);
        }
    }
    bed_open(&one, 1, NULL);
    for (uint32_t i = 0; i < SAMPLES; i++) answer(&one, i, i + 1);
    for (size_t i = 0; i < 1 + RATIOS; i++) same_cells(&one.s.cells[i], &all.s.cells[i]);
    bed_close(&one);
    bed_close(&all);
}

// Every answer contains the empty string, so one question of each sample is right in every cell.
UNIT_TEST(every_score_is_of_its_question)
{
    static bed b;
    bed_open(&b, COLUMNS, NULL);
    const task_source source = {b.text.tokens, 3, NULL, NULL};
    for (uint32_t i = 0; i < SAMPLES; i++) {
        task_sample sample;
        help_ok(task_make(&sample, &b.t, &source, TOKENS, i, err));
        task_question *easy = &sample.questions[i % QUESTIONS];
        for (size_t k = 0; k < easy->n_gold; k++) easy->gold[k][0] = '\0';
        help_ok(task_study_add(&b.s, i, &sample, err));
    }
    help_ok(task_study_answer(&b.s, err));
    for (uint32_t i = 0; i < SAMPLES; i++)
        for (size_t c = 0; c < CELLS; c++)
            for (uint32_t q = 0; q < QUESTIONS; q++)
                ck_assert(b.s.cells[c].samples[i].scores[q] == (q == i % QUESTIONS));
    bed_close(&b);
}

UNIT_TEST(a_stopped_study_goes_on)
{
    const char *log = help_path("study.cells");
    static bed whole, stopped, resumed;
    bed_open(&whole, COLUMNS, NULL);
    answer(&whole, 0, SAMPLES);
    bed_open(&stopped, 2, log); // with fewer columns, too
    answer(&stopped, 0, 1);
    bed_close(&stopped);
    FILE *f = fopen(log, "a"); // like a kill in the middle of a line
    ck_assert_ptr_nonnull(f);
    fputs("{\"key\":\"0123", f);
    fclose(f);
    bed_open(&resumed, COLUMNS, log);
    answer(&resumed, 0, SAMPLES);
    unit_numbers(resumed.s.n_resumed, 1 + 2 * RATIOS, resumed.s.n_answered, SAMPLES * CELLS - resumed.s.n_resumed);
    for (size_t i = 0; i < CELLS; i++) same_cells(&whole.s.cells[i], &resumed.s.cells[i]);
    bed_close(&resumed);
    f = fopen(log, "a");
    fputs("{\"key\": 1}\n", f);
    fclose(f);
    task_study bad = {.m = whole.m, .t = &whole.t, .n_samples = 1, .methods = whole.s.methods, .log = log};
    help_fails(task_study_open(&bad, ratios, RATIOS, err), KVB_FORMAT, "damaged line");
    task_study_close(&bad);
    bed_close(&whole);
}

UNIT_TEST(outcomes_add_up)
{
    static bed b;
    task_outcome o;
    bed_open(&b, COLUMNS, NULL);
    help_fails(task_summarize(&b.s, 0, &o, err), KVB_ARGUMENT, "was not answered");
    answer(&b, 0, SAMPLES);
    for (int i = 0; i < SAMPLES * QUESTIONS; i++) { // the tiny model knows nothing, so the scores are made up
        b.s.cells[1].samples[i / QUESTIONS].scores[i % QUESTIONS] = i % 2;
        b.s.cells[3].samples[i / QUESTIONS].scores[i % QUESTIONS] = 1;
    }
    help_ok(task_summarize(&b.s, 1, &o, err));
    ck_assert(o.n_questions == SAMPLES * QUESTIONS && fabs(o.score.value - 0.5) < 1e-12 && isnan(o.score.low));
    ck_assert(o.to_uniform.value == 0 && isnan(o.to_uniform.high));
    help_ok(task_summarize(&b.s, 3, &o, err));
    ck_assert(o.score.value == 1 && fabs(o.to_uniform.value - 0.5) < 1e-12);
    help_ok(task_summarize(&b.s, 0, &o, err));
    ck_assert(isnan(o.to_uniform.value) && o.kept == 1);
    bed_close(&b);
}

UNIT_MAIN_EACH("studies of tasks", case_tiny_setup, help_teardown)
