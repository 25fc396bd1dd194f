// The profiling run on the tiny model: how calibration lines become jobs, and that the record's bytes depend on nothing
// but the job.
#include "formats/need.h"
#include "profiler/profile_losses.h"
#include "test_profiler_run.h"
#include "tests/tiny_vocab.h"
#include <omp.h>

// One question of a record.
typedef struct taken {
    record_question_info info;
    int32_t suffix[256], answer[256];
    float *oracle;
    size_t n;
} taken;

static taken take(const char *path, size_t context, size_t question)
{
    record *r;
    taken t;
    help_ok(record_open(&r, path, err));
    const record_context_info *c = record_context(r, context);
    t.info = c->questions[question], t.n = (size_t)4 * c->n_tokens;
    t.oracle = case_alloc(t.n, sizeof *t.oracle);
    help_ok(record_read_suffix(r, context, question, t.suffix, err));
    help_ok(record_read_answer(r, context, question, t.answer, err));
    if (t.info.n_queries) help_ok(record_read_oracle(r, context, question, t.oracle, err));
    record_close(r);
    return t;
}

// ---- the first half: jobs ----

static void check_ids(const model_text *t, const char *what, const int32_t *ids, uint32_t n, const char *text)
{
    int32_t *want;
    size_t n_want;
    help_ok(tokenizer_encode(t->tokens, text, strlen(text), false, &want, &n_want, err));
    ck_assert_msg(n == n_want && memcmp(ids, want, n * sizeof *ids) == 0, "%s: other tokens than those of '%s'", what,
                  text);
    free(want);
}

UNIT_TEST(test_job_of_texts_and_ids)
{
    static const int32_t a1[] = {100, 101, 102};
    profile_case c = case_make("tiny.gguf", LINE_A "\n" LINE_B);
    prepare(&c);
    const profile_context *a = &c.job.contexts[0], *b = &c.job.contexts[1];
    ck_assert_uint_eq(c.job.n_contexts, 2);
    ck_assert_str_eq(a->id, "a");
    check_ids(&c.text, "context", a->ids, a->n_tokens, TEXT_A TEXT_A "again.");
    check_ids(&c.text, "question 2", a->questions[1].suffix, a->questions[1].n_suffix, "Where to?\nAnswer:");
    unit_numbers(b->n_tokens, 21, b->ids[9], 250);
    ck_assert_mem_eq(b->questions[0].suffix, a1, sizeof a1); // ids are taken as they are: no answer prefix
    unit_numbers(b->questions[0].n_suffix, 3, b->questions[0].tail, 3 + 6 - 1);
    ck_assert_ptr_null(b->questions[0].answer);
    uint64_t rows = 0;
    for (int i = 0; i < 3; i++) rows += a->questions[i].n_suffix + 5;
    unit_numbers(c.job.n_rows, rows + 8 + 6, c.job.n_pairs, 5, c.job.n_context_tokens, a->n_tokens + 21,
                 c.job.max_tokens, a->n_tokens, c.job.max_questions, 2 * 3, c.job.max_tail, a->questions[2].tail);
    ck_assert_uint_ne(a->key, b->key);
    ck_assert_str_eq(c.job.calibration_files, c.file.sha256);
    ck_assert(profile_flops(c.m, &c.job) > 0);
    case_free(&c);
}

UNIT_TEST(test_job_limits)
{
    profile_case c = case_make("tiny.gguf", LINE_A LINE_B);
    c.o.max_tokens = 30, c.o.max_questions = 2, c.o.batch = 1;
    prepare(&c);
    unit_numbers(c.job.contexts[0].n_tokens, 30, c.job.contexts[1].n_tokens, 21, c.job.contexts[0].n_questions, 2,
                 c.job.n_pairs, 4, c.job.max_questions, 1);
    c.o.batch = 1000; // both contexts together
    prepare(&c);
    unit_numbers(c.job.max_questions, 4, c.job.max_contexts, 2);
    case_free(&c);
}

// Copies tiny.gguf to `to` with one metadata value overwritten.
static void patch_model(const char *to, const char *key, const void *value, size_t size)
{
    size_t n;
    unsigned char *data = help_slurp(help_path("tiny.gguf"), &n);
    gguf_file f;
    help_ok(gguf_parse(&f, data, n, "tiny", err));
    const gguf_value *v = gguf_find(&f, key);
    ck_assert_msg(v && v->size >= size, "%s", key);
    memcpy(data + (v->data - data), value, size);
    gguf_close(&f);
    help_spew(help_path("%s", to), data, n);
    free(data);
}

UNIT_TEST(test_job_bos)
{
    static const bool expected[2][3] = {{false, true, false}, {true, true, false}}; // auto, yes, no
    patch_model("bos.gguf", "tokenizer.ggml.add_bos_token", "\1", 1);
    for (int file = 0; file < 2; file++) {
        profile_case c = case_make(file ? "bos.gguf" : "tiny.gguf", LINE_A LINE_B);
        for (int rule = BOS_AS_MODEL; rule <= BOS_NO; rule++) {
            c.o.bos = (bos_rule)rule;
            prepare(&c);
            const profile_context *a = &c.job.contexts[0];
            bool bos = expected[file][rule];
            ck_assert_int_eq(a->ids[0] == TINY_IM_START, bos);
            check_ids(&c.text, "context", a->ids + bos, a->n_tokens - bos, TEXT_A TEXT_A "again.");
            check_ids(&c.text, "question", a->questions[0].suffix, a->questions[0].n_suffix, "Who went?\nAnswer:");
            ck_assert_int_eq(c.job.contexts[1].ids[0], 9); // given ids never get one
        }
        case_free(&c);
    }
}

UNIT_TEST(test_job_answers)
{
    static const char lines[] =
        "{\"sample_id\": \"x\", \"context\": \"" TEXT_A "\", \"questions\": [\"Who\", \"Why\"], "
        "\"answers\": [\" the king\", \" in the and\"], \"answer_prefix\": \" A:\"}\n";
    profile_case c = case_make("tiny.gguf", lines);
    prepare(&c);
    const profile_question *q = &c.job.contexts[0].questions[1];
    check_ids(&c.text, "suffix", q->suffix, q->n_suffix, "Why A:");
    check_ids(&c.text, "answer", q->answer, q->n_answer, " in the and");
    unit_numbers(q->tail, q->n_suffix + q->n_answer - 1, c.job.contexts[0].n_given, 2);
    c.o.ignore_answers = true;
    prepare(&c);
    ck_assert_ptr_null(c.job.contexts[0].questions[1].answer);
    ck_assert_uint_eq(c.job.contexts[0].n_given, 0);
    case_free(&c);
}

// An answer of a single token leaves no query to record: the question is sampled, and counted for a note.
UNIT_TEST(test_job_short_answers)
{
    profile_case c =
        case_make("tiny.gguf", "{\"sample_id\": \"x\", \"context\": \"" TEXT_A
                               "\", \"question_ids\": [[1], [2], [3]], \"answer_ids\": [[5, 6], [7], [8]]}\n");
    prepare(&c);
    unit_numbers(c.job.n_given, 1, c.job.n_short, 2);
    const profile_question *q = c.job.contexts[0].questions;
    ck_assert(q[0].answer && !q[0].was_short && !q[1].answer && q[1].was_short && q[2].was_short);
    ck_assert_uint_eq(q[1].tail, 1 + c.o.new_tokens - 1);
    c.o.include_first = true; // then the answer's first token is a query
    prepare(&c);
    unit_numbers(c.job.n_given, 3, c.job.n_short, 0);
    case_free(&c);
}

// Calibration lines that profile_prepare refuses, after a line that is fine.
UNIT_TEST(test_job_errors)
{
    static const char *const cases[][2] = {
        {"{\"sample_id\":\"x\",\"context_ids\":[1,300],\"question_ids\":[[1]]}",
         ".jsonl: line 2, sample x: id 300 at place 1, expected 0 to 299"},
        {"{\"sample_id\":\"x\",\"context_ids\":[1,2],\"question_ids\":[[1],[7,999]]}",
         "line 2, sample x: question 2: id 999 at place 1"},
        {"{\"sample_id\":\"x\",\"context_ids\":[1,2],\"question_ids\":[[1]],\"answer_ids\":[[5,6,301]]}",
         "line 2, sample x: question 1: id 301 at place 2"},
        {"{\"sample_id\":\"x\",\"context\":\"the\",\"questions\":[\"\"],\"answer_prefix\":\"\"}",
         "line 2, sample x: question 1: the question has no tokens"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[2000];
        snprintf(text, sizeof text, LINE_B "%s\n", cases[i][0]);
        profile_case c = case_make("tiny.gguf", text);
        help_fails(profile_prepare(&c.job, c.m, &c.text, &c.file, 1, &c.o, err), KVB_ARGUMENT, cases[i][1]);
        ck_assert_ptr_null(c.job.contexts);
        ck_assert_int_eq(profile_prepare(&c.job, c.m, &c.text, &c.file, 1, &c.o, NULL), KVB_ARGUMENT);
        case_free(&c);
    }
}

UNIT_TEST(test_job_errors_of_length_and_names)
{
    size_t used = 0, room = 40000;
    char *text = case_alloc(room, 1);
    used += (size_t)snprintf(text, room, "{\"sample_id\":\"long\",\"question_ids\":[[1]],\"context_ids\":[");
    for (int i = 0; i < 4097; i++) used += (size_t)snprintf(text + used, room - used, "%s%d", i ? "," : "", i % 300);
    snprintf(text + used, room - used, "]}\n");
    profile_case c = case_make("tiny.gguf", text);
    help_fails(profile_prepare(&c.job, c.m, &c.text, &c.file, 1, &c.o, err), KVB_ARGUMENT,
               "line 1, sample long: the context has 4097 tokens, expected 1 to 4096");
    c.o.max_tokens = 4096;
    prepare(&c);
    ck_assert_uint_eq(c.job.max_tokens, 4096);
    case_free(&c), free(text);

    c = case_make("tiny.gguf", LINE_A LINE_B);
    calib_file twice[2] = {c.file};
    help_ok(calib_parse(&twice[1], "\n" LINE_B, strlen("\n" LINE_B), "other.jsonl", err));
    help_fails(profile_prepare(&c.job, c.m, &c.text, twice, 2, &c.o, err), KVB_ARGUMENT,
               "other.jsonl: line 2: sample_id b is in two files");
    calib_free(&twice[1]);
    case_free(&c);

    patch_model("nobos.gguf", "tokenizer.ggml.bos_token_id", "\1", 1);
    size_t n;
    unsigned char *data = help_slurp(help_path("nobos.gguf"), &n),
                  *key = memmem(data, n, "ggml.bos_token_id", strlen("ggml.bos_token_id"));
    memcpy(key, "ggml.box", 8);
    help_spew(help_path("nobos.gguf"), data, n);
    free(data);
    c = case_make("nobos.gguf", LINE_A);
    c.o.bos = BOS_YES;
    help_fails(profile_prepare(&c.job, c.m, &c.text, &c.file, 1, &c.o, err), KVB_ARGUMENT,
               "the model has no BOS token");
    case_free(&c);
}

// ---- the second half: runs ----

UNIT_TEST(test_same_bytes_for_threads_and_batches)
{
    profile_case c = case_make("tiny.gguf", LINE_A LINE_B);
    profile_times times;
    run_whole(&c, help_path("whole.h5"), &times);
    ck_assert_uint_eq(times.queries, 5 * 5);
    for (int threads = 1; threads <= 3; threads++)
        for (uint32_t batch = 1; batch <= 3; batch++) {
            char what[64];
            omp_set_num_threads(threads);
            c.o.batch = batch;
            run_whole(&c, help_path("other.h5"), &times);
            snprintf(what, sizeof what, "%d threads, batches of %u", threads, batch);
            same_file(what, help_path("whole.h5"), help_path("other.h5"));
        }
    case_free(&c);
}

// Stopped at every call of the progress, then resumed with other batches, so that some questions of a batch may be done
// already; and a run that is stopped again and again.
UNIT_TEST(test_same_bytes_after_a_stop)
{
    profile_case c = case_make("tiny.gguf", LINE_A LINE_B);
    profile_times times;
    watched whole = {0};
    c.o.batch = 1, c.o.new_tokens = 4;
    prepare(&c);
    omp_set_num_threads(1); // many small runs
    ck_assert_int_eq(run(&c, help_path("undisturbed.h5"), RECORD_NEW, &whole, &times), KVB_OK);
    ck_assert_int_ge(whole.calls, 2 * 2 + 5 * 4);
    for (int stop = 1; stop <= whole.calls; stop++) {
        char what[64];
        watched first = {.stop_at = stop}, second = {0};
        snprintf(what, sizeof what, "stopped at call %d of %d", stop, whole.calls);
        c.o.batch = 1;
        prepare(&c);
        ck_assert_int_eq(run(&c, help_path("stopped.h5"), RECORD_NEW, &first, &times), KVB_INTERRUPTED);
        ck_assert_msg(!help_exists(help_path("stopped.h5")), "%s: a record is there", what);
        if (stop <= (int)c.m->config.n_layers) // nothing of an unfinished prefill is written
            ck_assert(strstr(first.problem.message, "in the prefill") &&
                      !help_exists(help_path("stopped.h5.parts/context-a.h5")));
        c.o.batch = (uint32_t)stop % 7 + 1; // from 6 on both contexts together
        prepare(&c);
        ck_assert_int_eq(run(&c, help_path("stopped.h5"), RECORD_RESUME, &second, &times), KVB_OK);
        same_file(what, help_path("undisturbed.h5"), help_path("stopped.h5"));
        ck_assert(!help_exists(help_path("stopped.h5.parts")));
        ck_assert_double_eq_tol(second.done, second.total, 1e-9 * second.total);
        help_remove(help_path("stopped.h5"));
    }
    kvb_status status = KVB_INTERRUPTED;
    int lives = 0;
    c.o.batch = 1, prepare(&c);
    for (; status == KVB_INTERRUPTED && lives < 20; lives++) { // long enough for one batch each
        watched w = {.stop_at = 8};
        status = run(&c, help_path("stopped.h5"), lives ? RECORD_RESUME : RECORD_NEW, &w, &times);
    }
    ck_assert_int_eq(status, KVB_OK);
    ck_assert_int_gt(lives, 2);
    same_file("many lives", help_path("undisturbed.h5"), help_path("stopped.h5"));
    watched again = {0}; // a finished record has nothing left to run
    ck_assert_int_eq(run(&c, help_path("stopped.h5"), RECORD_RESUME, &again, &times), KVB_OK);
    ck_assert_uint_eq(times.queries, 0);
    same_file("resumed when finished", help_path("undisturbed.h5"), help_path("stopped.h5"));
    case_free(&c);
}

// Two shares of the work, run one after the other on one record: before and after, it is known what is done. The record
// cannot be finished before both are there, and then has the bytes of a single run.
UNIT_TEST(test_shares_of_one_record)
{
    profile_case c = case_make("tiny.gguf", LINE_A LINE_B);
    profile_times times;
    run_whole(&c, help_path("whole.h5"), &times);
    const model_config *k = &c.m->config;
    cJSON *attributes = profile_attributes(c.m, &c.job, &c.o);
    record_writer *writer;
    help_ok(record_begin(&writer, help_path("shared.h5"),
                         &(record_shape){k->n_layers, k->n_heads, k->n_kv_heads, k->head_dim}, attributes, RECORD_NEW,
                         err));
    size_t size = profile_state_size(&c.job), done[3] = {0};
    ck_assert_uint_eq(size, 2 + 5);
    uint8_t *state = case_alloc(size, 1);
    for (uint32_t i = 0; i < 2; i++) {
        profile_share share;
        help_ok(profile_share_out(&share, c.m, &c.job, NULL, 2, i, err));
        ck_assert_uint_gt(share.n, 0);
        help_ok(profile_run_share(c.m, &c.job, &c.o, &share, writer, NULL, &times, err));
        profile_read_state(state, &c.job, writer);
        for (size_t j = 0; j < size; j++) done[i + 1] += state[j];
        ck_assert_uint_gt(done[i + 1], done[i]);
        if (i == 0) help_fails(profile_finish(&c.job, NULL, writer, err), KVB_MISMATCH, "");
        profile_share_free(&share);
    }
    ck_assert_uint_eq(done[2], size);
    help_ok(profile_finish(&c.job, NULL, writer, err));
    record_writer_free(writer);
    cJSON_Delete(attributes);
    free(state);
    same_file("two shares", help_path("whole.h5"), help_path("shared.h5"));
    case_free(&c);
}

// Writes the record's contexts and sampled answers as calibration lines of ids.
static void lines_of_record(char *out, size_t size, const char *path, const profile_job *job)
{
    size_t used = 0;
    for (size_t i = 0; i < job->n_contexts; i++) {
        const profile_context *c = &job->contexts[i];
        used += (size_t)snprintf(out + used, size - used, "{\"sample_id\":\"%s\",\"context_ids\":[", c->id);
        for (uint32_t t = 0; t < c->n_tokens; t++)
            used += (size_t)snprintf(out + used, size - used, "%s%d", t ? "," : "", c->ids[t]);
        for (int answers = 0; answers < 2; answers++) {
            used += (size_t)snprintf(out + used, size - used, "],\"%s\":[", answers ? "answer_ids" : "question_ids");
            for (uint32_t q = 0; q < c->n_questions; q++) {
                taken t = take(path, i, q);
                uint32_t n = answers ? t.info.n_answer : t.info.n_suffix;
                used += (size_t)snprintf(out + used, size - used, "%s[", q ? "," : "");
                for (uint32_t k = 0; k < n; k++)
                    used += (size_t)snprintf(out + used, size - used, "%s%d", k ? "," : "",
                                             answers ? t.answer[k] : t.suffix[k]);
                used += (size_t)snprintf(out + used, size - used, "]");
                free(t.oracle);
            }
        }
        used += (size_t)snprintf(out + used, size - used, "]}\n");
    }
    ck_assert_uint_lt(used + 1, size);
}

// 64 new tokens are 63 queries. If the same answers are given, one pass replaces 63 steps and has the same bits.
UNIT_TEST(test_given_answers_repeat_a_sampled_run)
{
    profile_case c = case_make("tiny.gguf", LINE_A LINE_B), given;
    profile_times times;
    char *lines = case_alloc(20000, 1);
    for (int greedy = 0; greedy < 2; greedy++) {
        c.o.new_tokens = 64;
        c.o.draw.greedy = greedy;
        run_whole(&c, help_path("sampled.h5"), &times);
        ck_assert_uint_eq(times.queries, 5 * 63);
        lines_of_record(lines, 20000, help_path("sampled.h5"), &c.job);
        given = case_make("tiny.gguf", lines);
        run_whole(&given, help_path("given.h5"), &times);
        ck_assert_uint_eq(times.queries, 5 * 63);
        for (size_t i = 0; i < 5; i++) {
            taken a = take(help_path("sampled.h5"), i / 3, i % 3), b = take(help_path("given.h5"), i / 3, i % 3);
            unit_numbers(a.info.n_queries, 63, a.info.n_answer, 64, b.info.n_queries, 63);
            ck_assert_mem_eq(a.answer, b.answer, 64 * sizeof *a.answer);
            case_same("oracle", b.oracle, a.oracle, a.n);
            free_all(a.oracle, b.oracle);
        }
        case_free(&given);
    }
    free(lines);
    case_free(&c);
}

UNIT_TEST(test_include_first)
{
    static const char lines[] =
        "{\"sample_id\":\"x\",\"context_ids\":[9,8,7,6,5,44,33,22,11,250,260],\"question_ids\":[[100,101],[7]],"
        "\"answer_ids\":[[30,31,32,33,34],[40,41]]}\n";
    for (int sampled = 0; sampled < 2; sampled++) {
        profile_case c = case_make("tiny.gguf", lines);
        profile_times times;
        c.o.ignore_answers = sampled;
        taken without[2], with[2];
        run_whole(&c, help_path("without.h5"), &times);
        for (size_t q = 0; q < 2; q++) without[q] = take(help_path("without.h5"), 0, q);
        c.o.include_first = true;
        run_whole(&c, help_path("with.h5"), &times);
        for (size_t q = 0; q < 2; q++) with[q] = take(help_path("with.h5"), 0, q);
        for (size_t q = 0; q < 2; q++) {
            uint32_t grown = 0;
            ck_assert_uint_eq(without[q].info.n_queries, sampled ? 5 : q ? 1 : 4); // tokens - 1
            ck_assert_uint_eq(with[q].info.n_queries, without[q].info.n_queries + 1);
            for (size_t j = 0; j < with[q].n; j++) {
                if (!(with[q].oracle[j] >= without[q].oracle[j])) ck_abort_msg("importance shrinks");
                grown += with[q].oracle[j] > without[q].oracle[j];
            }
            ck_assert_uint_gt(grown, 0);
            free_all(without[q].oracle, with[q].oracle);
        }
        case_free(&c);
    }
}

// The end token is set to the one that question 2 of context a draws first: that question is skipped with a warning,
// and every other answer ends at the token. Nothing else changes, since a draw depends on its own key alone.
UNIT_TEST(test_end_tokens)
{
    profile_case c = case_make("tiny.gguf", LINE_A LINE_B);
    profile_times times;
    c.o.new_tokens = 12;
    c.o.draw.temperature = 3;
    run_whole(&c, help_path("free.h5"), &times);
    taken second = take(help_path("free.h5"), 0, 1);
    int32_t end = second.answer[0];
    free(second.oracle);
    patch_model("end.gguf", "tokenizer.ggml.eos_token_id", &end, 4);
    for (int ignore = 0; ignore < 2; ignore++) {
        profile_case e = case_make("end.gguf", LINE_A LINE_B);
        watched w = {0};
        uint64_t queries = 0, skipped = 0;
        e.o.new_tokens = 12;
        e.o.draw.temperature = 3;
        e.o.ignore_eos = ignore;
        prepare(&e);
        ck_assert_int_eq(run(&e, help_path("end.h5"), RECORD_REPLACE, &w, &times), KVB_OK);
        ck_assert_double_eq_tol(w.done, w.total, 1e-9 * w.total);
        for (size_t i = 0; i < 5; i++) {
            taken a = take(help_path("free.h5"), i / 3, i % 3), b = take(help_path("end.h5"), i / 3, i % 3);
            uint32_t n = 12;
            for (uint32_t k = 0; !ignore && k < n; k++)
                if (a.answer[k] == end) n = k + 1;
            ck_assert_uint_eq(b.info.n_answer, n); // the end token is part of the answer
            ck_assert_uint_eq(b.info.n_queries, n - 1);
            ck_assert_mem_eq(a.answer, b.answer, n * sizeof *a.answer);
            if (n == 12) case_same("oracle", b.oracle, a.oracle, a.n);
            queries += n - 1, skipped += n == 1;
            free_all(a.oracle, b.oracle);
        }
        unit_numbers(times.queries, queries, times.skipped, skipped, w.messages, (int)skipped, ignore, skipped == 0);
        if (skipped == 1) ck_assert_msg(strstr(w.message, "sample a, question 2") != NULL, "%s", w.message);
        case_free(&e);
    }
    case_free(&c);
}

// A question's numbers do not depend on what else is profiled. Another seed gives other answers, but greedy draws
// ignore the seed.
UNIT_TEST(test_answers_depend_on_their_key_alone)
{
    profile_case both = case_make("tiny.gguf", LINE_A LINE_B), one = case_make("tiny.gguf", LINE_B);
    profile_times times;
    run_whole(&both, help_path("both.h5"), &times);
    run_whole(&one, help_path("one.h5"), &times);
    for (size_t q = 0; q < 2; q++) {
        taken a = take(help_path("both.h5"), 1, q), b = take(help_path("one.h5"), 0, q);
        ck_assert_mem_eq(a.answer, b.answer, 6 * sizeof *a.answer);
        case_same("oracle", b.oracle, a.oracle, a.n);
        free_all(a.oracle, b.oracle);
    }
    static const char twins[] =
        "{\"sample_id\":\"x\",\"context_ids\":[9,8,7,6,5,44,33,22,11],\"question_ids\":[[1],[1]]}\n"
        "{\"sample_id\":\"y\",\"context_ids\":[9,8,7,6,5,44,33,22,11],\"question_ids\":[[1],[1]]}\n";
    profile_case alike = case_make("tiny.gguf", twins); // the same tokens, drawn by other keys
    alike.o.draw.temperature = 3;
    run_whole(&alike, help_path("alike.h5"), &times);
    taken x = take(help_path("alike.h5"), 0, 0);
    for (size_t i = 1; i < 4; i++) {
        taken y = take(help_path("alike.h5"), i / 2, i % 2);
        ck_assert_mem_ne(x.answer, y.answer, 6 * sizeof *x.answer);
        free(y.oracle);
    }
    free(x.oracle);
    case_free(&alike);
    for (int greedy = 0; greedy < 2; greedy++) {
        int same = 0;
        one.o.draw = (sampler){greedy, 3, 1};
        run_whole(&one, help_path("one.h5"), &times);
        one.o.draw.seed = 2;
        run_whole(&one, help_path("two.h5"), &times);
        for (size_t q = 0; q < 2; q++) {
            taken a = take(help_path("one.h5"), 0, q), b = take(help_path("two.h5"), 0, q);
            same += memcmp(a.answer, b.answer, 6 * sizeof *a.answer) == 0;
            free_all(a.oracle, b.oracle);
        }
        ck_assert_int_eq(same, greedy ? 2 : 0);
    }
    case_free(&both), case_free(&one);
}

UNIT_TEST(test_attributes_tell_runs_apart)
{
    profile_case c = case_make("tiny.gguf", LINE_B);
    profile_options changed[8];
    prepare(&c);
    for (int i = 0; i < 8; i++) changed[i] = c.o;
    changed[0].draw.seed = 2, changed[1].draw.temperature = 0.8, changed[2].draw.greedy = true,
    changed[3].new_tokens = 7, changed[4].ignore_eos = false, changed[5].include_first = true, changed[6].n_metrics = 2,
    changed[7].bos = BOS_YES;
    cJSON *base = profile_attributes(c.m, &c.job, &c.o);
    for (int i = 0; i < 8; i++) {
        cJSON *other = profile_attributes(c.m, &c.job, &changed[i]);
        ck_assert_msg(!cJSON_Compare(base, other, true), "change %d", i);
        cJSON_Delete(other);
    }
    c.o.batch = 1; // changes no number, so the record does not hold it
    cJSON *same = profile_attributes(c.m, &c.job, &c.o);
    ck_assert(cJSON_Compare(base, same, true));
    cJSON_Delete(base);
    cJSON_Delete(same);
    case_free(&c);
}

// A context that is too short for a metric is refused before anything is written.
UNIT_TEST(test_metric_needs_more_tokens)
{
    profile_case c = case_make("tiny.gguf", LINE_B);
    c.o.max_tokens = 8, c.o.metrics = c.metrics, c.o.n_metrics = 3;
    help_fails(profile_prepare(&c.job, c.m, &c.text, &c.file, 1, &c.o, err), KVB_ARGUMENT,
               "snapkv:kvpress:window=8: the context has 8 tokens");
    help_fails(profile_prepare(&c.job, c.m, &c.text, &c.file, 1, &c.o, err), KVB_ARGUMENT, "sample b");
    c.o.max_tokens = 9; // one to rank
    prepare(&c);
    case_free(&c);
}

// The estimate depends on this machine, so the test knows only that it is positive for work to do, and else zero.
UNIT_TEST(test_estimated_time)
{
    profile_case c = case_make("tiny.gguf", LINE_A LINE_B);
    c.metrics[2] = c.metrics[1]; // cheap ones
    prepare(&c);
    profile_times times;
    help_ok(profile_estimate_time(&times, c.m, &c.job, 4e8, err));
    ck_assert_double_eq_tol(times.writing, 1.05, 1e-9);
    ck_assert_msg(times.prefill > 0 && times.prefill < 60 && times.decode > 0 && times.decode < 60, "%g, %g s",
                  times.prefill, times.decode);
    ck_assert(profile_losses_bytes(c.m, &c.job, &c.o) == 0 && profile_losses_flops(c.m, &c.job, &c.o) == 0);
    c.o.loss_queries = 4;
    ck_assert(profile_losses_bytes(c.m, &c.job, &c.o) > 0 && profile_losses_flops(c.m, &c.job, &c.o) > 0);
    c.job.n_contexts = 0; // --add may find nothing to do
    help_ok(profile_estimate_time(&times, c.m, &c.job, 0, err));
    ck_assert(times.prefill == 0 && times.decode == 0);
    c.job.n_contexts = 2;
    case_free(&c);
}

UNIT_MAIN_ONCE("profiler profile", setup, help_teardown)
