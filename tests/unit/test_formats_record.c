// Records and their parts: what is written is read back, the bytes depend on content alone, and a run that is killed,
// runs out of space or is repeated leaves nothing wrong.
#include "formats_record_help.h"
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

static void assert_small_attributes(const record *r)
{
    cJSON *expected = small_attributes(), *item;
    cJSON_ArrayForEach(item, expected) // HDF5 lists by name, so compare one by one
    {
        const cJSON *found = cJSON_GetObjectItemCaseSensitive(record_attributes(r), item->string);
        ck_assert_msg(cJSON_Compare(item, found, 1), "%s", item->string);
    }
    ck_assert_int_eq(cJSON_GetArraySize(expected), cJSON_GetArraySize(record_attributes(r)));
    cJSON_Delete(expected);
}

static void assert_small_question(record *r, size_t c, size_t q)
{
    static float array[SMALL_MAX];
    int32_t ids[64];
    size_t count = (size_t)SMALL_L * SMALL_G * small_tokens(c);
    const record_question_info *one = &record_context(r, c)->questions[q];
    unit_numbers(one->number, small_number(q), one->n_suffix, 4);
    help_ok(record_read_suffix(r, c, q, ids, err));
    ck_assert_int_eq(ids[3], (int32_t)c);
    help_ok(record_read_answer(r, c, q, ids, err));
    if (q == 1) {
        ck_assert_uint_eq(one->n_queries + one->n_answer, 0);
        help_fails(record_read_oracle(r, c, q, array, err), KVB_ARGUMENT, "skipped");
        return;
    }
    unit_numbers(one->n_queries, 63, ids[1], (int32_t)q);
    help_ok(record_read_oracle(r, c, q, array, err));
    for (size_t i = 0; i < count; i++) ck_assert(array[i] == small_oracle(c, q, i));
}

static void assert_small(const char *path)
{
    static float array[SMALL_MAX];
    int32_t ids[64];
    record *r;
    help_ok(record_open(&r, path, err));
    record_shape s = record_get_shape(r);
    ck_assert(s.n_layers == SMALL_L && s.n_heads == 9 && s.n_kv_heads == SMALL_G && s.head_dim == 64);
    assert_small_attributes(r);
    ck_assert_uint_eq(record_context_count(r), SMALL_CONTEXTS);
    ck_assert_ptr_null(record_context(r, SMALL_CONTEXTS));
    for (size_t c = 0; c < SMALL_CONTEXTS; c++) {
        const record_context_info *info = record_context(r, c);
        size_t count = (size_t)SMALL_L * SMALL_G * small_tokens(c);
        ck_assert_str_eq(info->id, small_ids[c]);
        unit_numbers(info->n_tokens, small_tokens(c), info->n_metrics, 2);
        unit_strings(info->metrics[0], "keydiff", info->metrics[1], "snapkv:lukv");
        help_ok(record_read_tokens(r, c, ids, err));
        for (uint32_t t = 0; t < info->n_tokens; t++) ck_assert_int_eq(ids[t], (int32_t)(100 * c + t));
        for (size_t m = 0; m < 2; m++) {
            help_ok(record_read_scores(r, c, small_metrics[m], array, err));
            for (size_t i = 0; i < count; i++) ck_assert(array[i] == small_score(c, m, i));
        }
        help_fails(record_read_scores(r, c, "ea:lukv", array, err), KVB_MISMATCH, "ea:lukv");
        ck_assert_uint_eq(info->n_questions, SMALL_QUESTIONS);
        for (size_t q = 0; q < SMALL_QUESTIONS; q++) assert_small_question(r, c, q);
        help_fails(record_read_oracle(r, c, SMALL_QUESTIONS, array, err), KVB_ARGUMENT, "question 3 of 3");
    }
    help_fails(record_read_tokens(r, SMALL_CONTEXTS, ids, err), KVB_ARGUMENT, "context 3 of 3");
    record_close(r);
}

UNIT_TEST(write_and_read)
{
    const char *path = help_path("run.h5");
    help_ok(small_write(path, false, err));
    assert_small(path);
    ck_assert(!help_exists(help_path("run.h5.parts")));
}

UNIT_TEST(bytes_depend_on_content_only)
{
    help_ok(small_write(help_path("a.h5"), false, err));
    sleep(1); // now times would differ, if any were stored
    record_writer *w;
    const char *b = help_path("b.h5");
    help_ok(small_begin(&w, b, false, err)); // another order of writing, attributes in reverse, a context written twice
    for (size_t c = SMALL_CONTEXTS; c-- > 0;) {
        help_ok(small_put_context(w, c, err));
        for (size_t q = SMALL_QUESTIONS; q-- > 0;) help_ok(small_put_question(w, c, q, err));
    }
    help_ok(small_put_context(w, 1, err));
    help_ok(record_finish(w, small_ids, SMALL_CONTEXTS, err));
    record_writer_free(w);
    help_same_file(help_path("a.h5"), b);
}

UNIT_TEST(resume_goes_on)
{
    const char *path = help_path("run.h5");
    record_writer *w;
    record *r;
    help_ok(small_begin(&w, path, false, err));
    ck_assert(!record_writer_has_context(w, "zeta"));
    help_ok(small_put_context(w, 0, err));
    help_ok(small_put_question(w, 0, 2, err));
    record_writer_free(w);
    help_fails(small_begin(&w, path, false, err), KVB_MISMATCH, "--resume");
    ck_assert_ptr_null(w);
    help_fails(record_open(&r, path, err), KVB_IO, "--resume");
    ck_assert_ptr_null(r);
    help_ok(small_begin(&w, path, true, err));
    ck_assert(record_writer_has_context(w, "zeta") && record_writer_has_question(w, "zeta", 12));
    ck_assert(!record_writer_has_context(w, "alpha-2") && !record_writer_has_question(w, "zeta", 0));
    help_fails(record_finish(w, small_ids, SMALL_CONTEXTS, err), KVB_ARGUMENT, "alpha-2");
    help_ok(small_put_missing(w, err));
    help_fails(record_finish(w, small_ids, 2, err), KVB_MISMATCH, "mid.dle_3");
    const char *const twice[3] = {"zeta", "alpha-2", "zeta"};
    help_fails(record_finish(w, twice, 3, err), KVB_ARGUMENT, "twice");
    help_ok(record_finish(w, small_ids, SMALL_CONTEXTS, err));
    record_writer_free(w);
    help_fails(small_begin(&w, path, false, err), KVB_MISMATCH, "exists");
    ck_assert(!help_exists(help_path("run.h5.parts")));
    help_ok(small_write(help_path("whole.h5"), false, err));
    help_same_file(path, help_path("whole.h5"));
    assert_small(path);
}

UNIT_TEST(resume_extends_a_finished_record)
{
    const char *path = help_path("run.h5");
    record_writer *w;
    help_ok(small_begin(&w, path, false, err));
    help_ok(small_put_context(w, 0, err));
    help_ok(small_put_question(w, 0, 1, err));
    help_ok(record_finish(w, small_ids, 1, err));
    record_writer_free(w);
    help_ok(small_begin(&w, path, true, err));
    ck_assert(record_writer_has_context(w, "zeta") && record_writer_has_question(w, "zeta", 1));
    ck_assert(!record_writer_has_question(w, "zeta", 0));
    help_ok(small_put_missing(w, err));
    help_ok(record_finish(w, small_ids, SMALL_CONTEXTS, err));
    record_writer_free(w);
    help_ok(small_write(help_path("whole.h5"), false, err));
    help_same_file(path, help_path("whole.h5"));
    struct stat before, after; // nothing to add: the file is not replaced
    stat(path, &before);
    help_ok(small_write(path, true, err));
    stat(path, &after);
    ck_assert(before.st_ino == after.st_ino && !help_exists(help_path("run.h5.parts")));
}

UNIT_TEST(resume_compares_everything)
{
    const char *path = help_path("run.h5");
    record_writer *w, *same;
    help_ok(small_begin(&w, path, false, err));
    // Like another process, since the lock belongs to the open file.
    help_fails(small_begin(&same, path, true, err), KVB_IO, "another process");
    record_writer_free(w);
    help_ok(small_begin(&w, help_path("second.h5"), false, err));
    record_writer_free(w);
    record_shape other = {SMALL_L, 9, SMALL_G, 128};
    cJSON *a = small_attributes();
    const char *second = help_path("second.h5");
    help_fails(record_begin(&w, second, &other, a, RECORD_RESUME, err), KVB_MISMATCH, "head_dim = 64, now 128");
    cJSON_AddBoolToObject(a, "additional", 1);
    help_fails(record_begin(&w, second, &small_shape, a, RECORD_RESUME, err), KVB_MISMATCH,
               "additional = nothing, now true");
    cJSON_DeleteItemFromObject(a, "additional");
    cJSON_SetNumberValue(cJSON_GetObjectItem(a, "temperature"), 0.70000000000000007);
    help_fails(record_begin(&w, second, &small_shape, a, RECORD_RESUME, err), KVB_MISMATCH, "temperature");
    cJSON_SetNumberValue(cJSON_GetObjectItem(a, "temperature"), 0.7);
    cJSON_SetValuestring(cJSON_GetObjectItem(a, "model_id"), "other");
    help_fails(record_begin(&w, second, &small_shape, a, RECORD_RESUME, err), KVB_MISMATCH, "\"other\"");
    cJSON_Delete(a);
    help_ok(small_begin(&w, second, true, err));
    record_writer_free(w);
}

UNIT_TEST(replace_does_it_again)
{
    record_writer *w;
    record *r;
    const char *path = help_path("run.h5");
    cJSON *other = cJSON_CreateObject(), *same = small_attributes();
    cJSON_AddStringToObject(other, "other", "attributes");
    help_ok(small_write(path, false, err));
    for (int i = 0; i < 2; i++) { // once with the record's attributes, once with others
        const cJSON *given = i ? other : same;
        help_ok(record_begin(&w, path, &small_shape, given, RECORD_REPLACE, err));
        ck_assert(!record_writer_has_context(w, "zeta"));
        help_ok(small_put_context(w, 0, err));
        record_writer_free(w);
        help_ok(record_open(&r, path, err)); // the old one is still there
        ck_assert_uint_eq(record_context_count(r), SMALL_CONTEXTS);
        record_close(r);
        help_ok(record_begin(&w, path, &small_shape, given, RECORD_RESUME, err));
        ck_assert(record_writer_has_context(w, "zeta") && !record_writer_has_question(w, "zeta", 0));
        ck_assert(!record_writer_has_context(w, "alpha-2"));
        if (i) help_ok(record_finish(w, small_ids, 1, err));
        record_writer_free(w);
    }
    help_ok(record_open(&r, path, err));
    ck_assert_uint_eq(record_context_count(r), 1);
    ck_assert_ptr_nonnull(cJSON_GetObjectItem(record_attributes(r), "other"));
    record_close(r);
    ck_assert(!help_exists(help_path("run.h5.parts")));
    cJSON_Delete(other);
    cJSON_Delete(same);
}

UNIT_TEST(arguments)
{
    const char *path = help_path("run.h5");
    record_writer *w;
    kvb_error e;
    record_shape wrong = {0, 9, 3, 64};
    help_fails(record_begin(&w, path, &wrong, NULL, RECORD_NEW, err), KVB_ARGUMENT, "shape");
    wrong = (record_shape){2, 10, 3, 64};
    help_fails(record_begin(&w, path, &wrong, NULL, RECORD_NEW, err), KVB_ARGUMENT, "multiple");
    static const char *const bad[] = {"{\"n_layers\":3}", "{\"a\":[1]}",       "{\"a b\":1}",  "[]",
                                      "{\"a\":null}",     "{\"a\":1,\"a\":2}", "{\"x\":1e999}"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        cJSON *a = cJSON_Parse(bad[i]);
        ck_assert_ptr_nonnull(a);
        ck_assert_msg(record_begin(&w, path, &small_shape, a, RECORD_NEW, &e) == KVB_ARGUMENT, "%s", bad[i]);
        cJSON_Delete(a);
    }
    ck_assert(!help_exists(help_path("run.h5.parts")));
    help_fails(record_begin(&w, help_path("no/run.h5"), &small_shape, NULL, RECORD_NEW, err), KVB_IO, "no/run.h5");
    help_ok(small_begin(&w, path, false, err));
    const int32_t ids[7] = {0, 1, 2, 3, 4, 5, -1};
    float zero[SMALL_MAX] = {0};
    const float *arrays[2] = {zero, zero};
    const char *const same[2] = {"m", "m"}, *const slash[1] = {"a/b"};
    help_fails(record_put_context(w, "a/b", ids, 7, NULL, NULL, 0, err), KVB_ARGUMENT, "context id");
    help_fails(record_put_context(w, "..", ids, 7, NULL, NULL, 0, err), KVB_ARGUMENT, "context id");
    help_fails(record_put_context(w, "a", ids, 0, NULL, NULL, 0, err), KVB_FORMAT, "no tokens");
    help_fails(record_put_context(w, "a", ids, 7, same, arrays, 2, err), KVB_ARGUMENT, "twice");
    help_fails(record_put_context(w, "a", ids, 7, slash, arrays, 1, err), KVB_ARGUMENT, "a/b");
    help_fails(record_put_context(w, "a", (int32_t[1]){-2}, 1, NULL, NULL, 0, err), KVB_ARGUMENT, "-2");
    zero[7 * SMALL_G + 8] = __builtin_nanf("");
    help_fails(record_put_context(w, "a", ids, 7, same, arrays, 1, err), KVB_NUMERIC, "layer 1, KV head 1, token 1");
    record_question q = {zero, ids, 2, ids, 2, 3, NULL};
    help_fails(record_put_question(w, "a", 0, &q, err), KVB_ARGUMENT, "before its questions");
    help_ok(record_put_context(w, "a", ids, 7, NULL, NULL, 0, err));
    help_fails(record_put_question(w, "a", 0, &q, err), KVB_NUMERIC, "layer 1, KV head 1, token 1");
    zero[7 * SMALL_G + 8] = -1;
    help_fails(record_put_question(w, "a", 0, &q, err), KVB_NUMERIC, "oracle: layer 1, KV head 1, token 1: found -1");
    zero[7 * SMALL_G + 8] = __builtin_inff();
    help_fails(record_put_question(w, "a", 0, &q, err), KVB_NUMERIC, "found inf");
    q.n_queries = 0;
    help_fails(record_put_question(w, "a", 0, &q, err), KVB_ARGUMENT, "0 queries and an oracle");
    record_writer_free(w);
}

// ---- Kills and full disks ----

static void run_child(const char *path)
{
    kvb_error e;
    if (small_write(path, true, &e) == KVB_OK) _exit(0);
    fprintf(stderr, "child: %s\n", e.message);
    _exit(3);
}

UNIT_TEST(killed_at_any_moment)
{
    srand(help_seed());
    char *whole = strdup(help_path("whole.h5")), *path = strdup(help_path("run.h5"));
    help_ok(small_write(whole, false, err));
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    help_ok(small_write(help_path("timed.h5"), false, err));
    clock_gettime(CLOCK_MONOTONIC, &end);
    long run_us = (end.tv_sec - start.tv_sec) * 1000000L + (end.tv_nsec - start.tv_nsec) / 1000;
    int rounds = 12, kills = 0;
    for (int round = 0; round < rounds; round++) {
        for (int attempt = 0;; attempt++) {
            pid_t child = fork();
            ck_assert_int_ge(child, 0);
            if (child == 0) run_child(path);
            if (attempt < 40) {
                struct timespec pause = {0, (long)(((double)rand() / RAND_MAX) * (double)run_us * 400)};
                nanosleep(&pause, NULL);
                kill(child, SIGKILL);
            }
            int status;
            ck_assert_int_eq(waitpid(child, &status, 0), child);
            if (WIFSIGNALED(status)) {
                kills++;
                continue;
            }
            ck_assert_int_eq(WEXITSTATUS(status), 0);
            break;
        }
        help_same_file(path, whole);
        ck_assert(!help_exists(help_path("run.h5.parts")));
        remove(path);
    }
    free(whole);
    free(path);
    printf("%d kills in %d runs\n", kills, rounds);
    ck_assert_int_gt(kills, 0);
    char command[256];
    snprintf(command, sizeof command, "test -z \"$(find %s -name '*.partial')\"", help_folder);
    ck_assert_int_eq(system(command), 0);
}

UNIT_TEST(full_disk)
{
    const char *path = help_path("run.h5");
    record_writer *w;
    kvb_error e;
    signal(SIGXFSZ, SIG_IGN);
    help_ok(small_begin(&w, path, false, err));
    help_ok(small_put_missing(w, err));
    struct rlimit old, tight;
    getrlimit(RLIMIT_FSIZE, &old);
    for (rlim_t limit = 0; limit < 100000; limit += 3000) { // now nothing larger than this can be written
        tight = (struct rlimit){limit, old.rlim_max};
        setrlimit(RLIMIT_FSIZE, &tight);
        kvb_status finish = record_finish(w, small_ids, SMALL_CONTEXTS, &e);
        kvb_status put = limit < 60000 ? small_put_context(w, 0, NULL) : KVB_IO;
        setrlimit(RLIMIT_FSIZE, &old);
        ck_assert_msg(finish == KVB_IO && put == KVB_IO, "limit %lu: %s", (unsigned long)limit,
                      kvb_status_name(finish));
        ck_assert_msg(strstr(e.message, "run.h5") != NULL, "%s", e.message);
        ck_assert(!help_exists(path));
    }
    char command[256];
    snprintf(command, sizeof command, "test -z \"$(find %s -name '*.partial')\"", help_folder);
    ck_assert_int_eq(system(command), 0);
    help_ok(record_finish(w, small_ids, SMALL_CONTEXTS, err));
    record_writer_free(w);
    assert_small(path);
}

UNIT_TEST(many_contexts)
{
    enum { N = 200 };
    const char *path = help_path("run.h5");
    static char names[N][16];
    const char *ids[N];
    record_writer *w;
    record_shape one = {1, 1, 1, 1};
    help_ok(record_begin(&w, path, &one, NULL, RECORD_NEW, err));
    const float score[3] = {1, 2, 3};
    const float *const scores[1] = {score};
    const int32_t tokens[3] = {5, 6, 7};
    for (int i = 0; i < N; i++) {
        snprintf(names[i], sizeof names[i], "c%d", N - i);
        ids[i] = names[i];
        help_ok(record_put_context(w, ids[i], tokens, 3, small_metrics, scores, 1, err));
    }
    help_ok(record_finish(w, ids, N, err));
    record_writer_free(w);
    record *r;
    help_ok(record_open(&r, path, err));
    ck_assert_uint_eq(record_context_count(r), N);
    for (int i = 0; i < N; i++) ck_assert_str_eq(record_context(r, (size_t)i)->id, ids[i]);
    help_ok(small_read_all(r, err));
    record_close(r);
}

UNIT_MAIN_EACH("formats_record", help_setup, help_teardown)
