// The reader of calibration lines: what each key means, and that a line which breaks a rule is refused with its number.
#include "formats/calib.h"
#include "formats_help.h"

static kvb_status parse(calib_file *out, const char *text, kvb_error *err)
{
    size_t size = strlen(text);
    char *copy = malloc(size ? size : 1); // without a NUL after it, so that ASan sees a read too far
    memcpy(copy, text, size);
    kvb_status status = calib_parse(out, copy, size, "dir/my text.jsonl", err);
    free(copy);
    return status;
}

UNIT_TEST(text_lines)
{
    calib_file f;
    help_ok(parse(
        &f,
        "\xef\xbb\xbf{\"sample_id\":\"a.b-c_1\",\"context\":\"caf\\u00e9 \\ud83d\\ude00\",\"questions\":[\"q1\",\"\"],"
        "\"answers\":[\"x\",\"y\"],\"answer_prefix\":\"\",\"task\":[{\"any\":1}]}\r\n"
        "\n  \t\r\n"
        "{\"context\":\"back\\\\u0000slash\",\"questions\":[\"q\"]}  ",
        err));
    ck_assert_uint_eq(f.count, 2);
    const calib_context *c = &f.contexts[0];
    unit_strings(c->sample_id, "a.b-c_1", c->context, "caf\xc3\xa9 \xf0\x9f\x98\x80");
    ck_assert_uint_eq(c->n_questions, 2);
    unit_strings(c->questions[1].text, "", c->questions[1].answer, "y", c->answer_prefix, "");
    ck_assert(!c->context_ids && !c->questions[0].ids);
    c = &f.contexts[1];
    ck_assert_str_eq(c->sample_id, "my_text-4");
    ck_assert_str_eq(c->context, "back\\u0000slash"); // an escaped backslash, no NUL
    ck_assert_str_eq(c->answer_prefix, "\nAnswer:");
    ck_assert_ptr_null(c->questions[0].answer);
    unit_numbers(c->line, 4, strlen(f.sha256), 64);
    calib_free(&f);
    ck_assert_ptr_null(f.contexts);
}

UNIT_TEST(id_lines)
{
    calib_file f;
    help_ok(parse(
        &f, "{\"sample_id\":7,\"context_ids\":[1,2,2147483647],\"question_ids\":[[3],[4,0]],\"answer_ids\":[[5],[6]]}",
        err));
    const calib_context *c = &f.contexts[0];
    ck_assert_str_eq(c->sample_id, "7");
    ck_assert(c->n_context_ids == 3 && c->context_ids[2] == 2147483647);
    ck_assert(c->questions[1].n_ids == 2 && c->questions[1].ids[0] == 4);
    ck_assert(c->questions[1].n_answer_ids == 1 && c->questions[1].answer_ids[0] == 6);
    calib_free(&f);
}

UNIT_TEST(some_answers)
{
    calib_file f;
    help_ok(parse(&f,
                  "{\"context\":\"a\",\"questions\":[\"q\",\"r\"],\"answers\":[null,\"x\"]}\n"
                  "{\"context_ids\":[1],\"question_ids\":[[3],[4]],\"answer_ids\":[[5],null]}",
                  err));
    ck_assert_ptr_null(f.contexts[0].questions[0].answer);
    ck_assert_str_eq(f.contexts[0].questions[1].answer, "x");
    ck_assert_int_eq(f.contexts[1].questions[0].answer_ids[0], 5);
    ck_assert_ptr_null(f.contexts[1].questions[1].answer_ids);
    calib_free(&f);
}

UNIT_TEST(mistakes)
{
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"", "holds no context"},
        {"\n\n", "holds no context"},
        {"{\"context\":\"a\",\"questions\":[\"q\"]}\n{", "line 2"},
        {"[]", "expected a JSON object"},
        {"\n{\"context\":\"a\",\"questions\":[\"q\"]} x", "line 2: byte 35: unexpected text"},
        {"{\"context\":\"a\",}", "line 1: byte"},
        {"{\"questions\":[\"q\"]}", "neither \"context\" nor \"context_ids\""},
        {"{\"context\":\"a\",\"context_ids\":[1],\"questions\":[\"q\"]}", "both"},
        {"{\"context\":\"\",\"questions\":[\"q\"]}", "is empty"},
        {"{\"context\":1,\"questions\":[\"q\"]}", "context: expected a string"},
        {"{\"context\":\"a\"}", "neither \"questions\""},
        {"{\"context\":\"a\",\"questions\":[]}", "at least one"},
        {"{\"context\":\"a\",\"questions\":\"q\"}", "expected a list"},
        {"{\"context\":\"a\",\"questions\":{\"a\":\"q\"}}", "expected a list"},
        {"{\"context\":\"a\",\"questions\":[\"q\",null]}", "questions: element 1"},
        {"{\"context\":\"a\",\"questions\":[\"q\"],\"question_ids\":[[1]]}", "both"},
        {"{\"context\":\"a\",\"questions\":[\"q\"],\"answers\":[]}", "one answer per question, found 0"},
        {"{\"context\":\"a\",\"questions\":[\"q\"],\"answers\":[\"a\",\"b\"]}", "found 2"},
        {"{\"context\":\"a\",\"questions\":[\"q\"],\"answers\":[1]}", "answers: element 0"},
        {"{\"context\":\"a\",\"questions\":[\"q\"],\"answers\":[\"a\"],\"answer_ids\":[[1]]}", "both"},
        {"{\"context_ids\":[],\"questions\":[\"q\"]}", "at least one"},
        {"{\"context_ids\":[1,-1],\"questions\":[\"q\"]}", "context_ids: element 1"},
        {"{\"context_ids\":[1.5],\"questions\":[\"q\"]}", "whole number"},
        {"{\"context_ids\":[2147483648],\"questions\":[\"q\"]}", "0 to 2147483647"},
        {"{\"context_ids\":[1e999],\"questions\":[\"q\"]}", "element 0"},
        {"{\"context_ids\":[\"1\"],\"questions\":[\"q\"]}", "element 0"},
        {"{\"context\":\"a\",\"question_ids\":[[]]}", "question_ids: element 0"},
        {"{\"context\":\"a\",\"questions\":[\"q\"],\"answer_prefix\":null}", "answer_prefix"},
        {"{\"sample_id\":\"a/b\",\"context\":\"a\",\"questions\":[\"q\"]}", "sample_id"},
        {"{\"sample_id\":\"..\",\"context\":\"a\",\"questions\":[\"q\"]}", "sample_id"},
        {"{\"sample_id\":\"\",\"context\":\"a\",\"questions\":[\"q\"]}", "sample_id"},
        {"{\"sample_id\":[],\"context\":\"a\",\"questions\":[\"q\"]}", "sample_id"},
        {"{\"context\":\"a\\u0000b\",\"questions\":[\"q\"]}", "NUL"},
        {"{\"context\":\"a\\\\\\u0000b\",\"questions\":[\"q\"]}", "NUL"},
        {"{\"sample_id\":\"x\",\"context\":\"a\",\"questions\":[\"q\"]}\n\n{\"sample_id\":\"x\",\"context\":\"a\","
         "\"questions\":[\"q\"]}",
         "line 3: sample_id \"x\" was used in line 1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        calib_file f;
        help_fails(parse(&f, cases[i].text, err), KVB_FORMAT, cases[i].message);
        help_fails(parse(&f, cases[i].text, err), KVB_FORMAT, "dir/my text.jsonl: ");
        ck_assert(f.contexts == NULL && f.count == 0);
    }
    calib_file f;
    help_fails(calib_parse(&f, "{\"a\":\"b\0c\"}", 11, "x", err), KVB_FORMAT, "NUL");
}

UNIT_TEST(deep_nesting)
{
    enum { DEPTH = 100000 };
    char *text = malloc(DEPTH + 1);
    memset(text, '[', DEPTH);
    text[DEPTH] = '\0';
    calib_file f;
    help_fails(parse(&f, text, err), KVB_FORMAT, "not JSON");
    free(text);
}

UNIT_TEST(long_line)
{
    size_t size = CALIB_MAX_LINE + 1;
    char *text = malloc(size);
    memset(text, 'x', size);
    calib_file f;
    help_fails(calib_parse(&f, text, size, "long", err), KVB_FORMAT, "split the context");
    free(text);
}

// Every prefix and every flipped bit of a small file gives an error or a success, and no report of a sanitizer.
UNIT_TEST(damage)
{
    static const char good[] =
        "{\"sample_id\":\"a\",\"context\":\"b\\u00e9\\n\",\"questions\":[\"c\"],\"answers\":[\"d\"]}\n"
        "{\"context_ids\":[1,20],\"question_ids\":[[3]],\"answer_ids\":[[4]]}\n";
    size_t size = sizeof good - 1, refused = 0;
    for (size_t i = 0; i < size + 8 * size; i++) {
        size_t length = i < size ? i : size;
        char *copy = malloc(length ? length : 1);
        memcpy(copy, good, length);
        if (i >= size) copy[(i - size) / 8] ^= (char)(1 << (i - size) % 8);
        calib_file f;
        kvb_error e;
        kvb_status status = calib_parse(&f, copy, length, "small.jsonl", &e);
        if (status != KVB_OK) {
            refused++;
            ck_assert(strstr(e.message, "small.jsonl") &&
                      (strstr(e.message, "line ") || strstr(e.message, "no context")));
        }
        calib_free(&f);
        free(copy);
    }
    ck_assert_uint_gt(refused, size);
}

UNIT_TEST(own_data)
{
    static const char *const names[] = {"narrative-en", "narrative-zh", "technical-en", "code-c"};
    for (size_t i = 0; i < 4; i++) {
        char path[64];
        snprintf(path, sizeof path, "calib-data/%s.jsonl", names[i]);
        if (!help_exists(path)) continue; // not run from the root of the repository
        calib_file f;
        help_ok(calib_load(&f, path, err));
        ck_assert_uint_ge(f.contexts[0].n_questions, 15);
        calib_free(&f);
    }
    calib_file f;
    help_fails(calib_load(&f, help_path("none"), err), KVB_IO, "none");
}

UNIT_TEST(test_is_there_any_text)
{
    static const struct {
        const char *line;
        bool text;
    } cases[] = {{"{\"context_ids\":[1],\"question_ids\":[[2]]}", false},
                 {"{\"context_ids\":[1],\"question_ids\":[[2]],\"answer_ids\":[[3,4]]}", false},
                 {"{\"context\":\"a\",\"question_ids\":[[2]]}", true},
                 {"{\"context_ids\":[1],\"questions\":[\"b\"]}", true},
                 {"{\"context_ids\":[1],\"question_ids\":[[2]],\"answers\":[\"c\"]}", true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        calib_file f;
        help_ok(calib_parse(&f, cases[i].line, strlen(cases[i].line), "ids.jsonl", err));
        ck_assert_int_eq(calib_has_text(&f), cases[i].text);
        calib_free(&f);
    }
}

UNIT_MAIN_EACH("formats_calib", help_setup, help_teardown)
