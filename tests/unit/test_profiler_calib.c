// Calibration data from texts: answers are the text's own tokens and lines (read back from the text, not from the
// maker), a seed gives the same data again, and a refusal says how much is missing.
#include "profiler/calib_make.h"
#include "profiler/text/text_lines.h"
#include "test_profiler_cases.h"

static tokenizer *tokens;
static char story[8192];

static void setup(void)
{
    help_setup();
    tokens = case_tiny_tokenizer();
    char *to = story;
    for (int i = 0; i < 60; i++) to += sprintf(to, "%d keys of house %d hang on the wall beside it\n", i * 7 % 61, i);
}

static void teardown(void)
{
    tokenizer_free(tokens);
    help_teardown();
}

static calib_recipe recipe(void)
{
    return (calib_recipe){.n_tokens = 300, .n_contexts = 1, .n_own = SIZE_MAX, .n_answer = 8, .seed = 1};
}

// Returns the text of ids, in one of two buffers.
static const char *text_of(const int32_t *ids, size_t n)
{
    static char texts[2][8192];
    static int next;
    char *text = texts[next++ % 2];
    size_t size = tokenizer_decode(tokens, ids, n, text, sizeof texts[0] - 1);
    ck_assert_uint_lt(size, sizeof texts[0]);
    text[size] = '\0';
    return text;
}

// ---- Lines ----

static size_t lines_of(const char *text, text_line *first)
{
    size_t n;
    text_line *lines = text_lines_find(&n, text, strlen(text));
    *first = n ? lines[0] : (text_line){0};
    free(lines);
    return n;
}

UNIT_TEST(which_lines)
{
    text_line l;
    static const char one[] = "short\n  The clerk weighed the cart with care twice.\nthe end";
    ck_assert_uint_eq(lines_of(one, &l), 1);
    ck_assert_int_eq(strncmp(one + l.begin, "The clerk weighed", l.head - l.begin), 0);
    ck_assert_uint_eq(l.head - l.begin, strlen("The clerk weighed"));
    ck_assert_uint_eq(l.end, strlen("short\n  The clerk weighed the cart with care twice."));
    // What ends with the text may have been cut off, so only what comes before it counts.
    ck_assert_uint_eq(lines_of("The clerk weighed the cart with care twice.", &l), 0);
    ck_assert_uint_eq(lines_of("The clerk weighed the cart with care twice. \n ", &l), 0);
    // Two lines with the same beginning: neither can be asked for.
    ck_assert_uint_eq(lines_of("The clerk weighed the cart with care.\nThe clerk weighed the other cart too.\nx", &l),
                      0);
    // If the rest is a single word, it is cut, since there must be something to answer.
    static const char word[] = "abcdefghijklmnopqrstuvwxyzabcdefghijk\nx";
    ck_assert_uint_eq(lines_of(word, &l), 1);
    ck_assert_uint_eq(l.head, TEXT_LINE_HEAD);
    ck_assert_uint_eq(lines_of("", &l), 0);
}

UNIT_TEST(long_lines_are_sentences)
{
    char text[512] = "";
    text_line l;
    while (strlen(text) <= TEXT_LINE_MAX) strcat(text, "No. ");
    strcat(text, "A sentence of middling length stands here. Is it the last one?\nx");
    ck_assert_uint_eq(lines_of(text, &l), 1);
    ck_assert_int_eq(strncmp(text + l.begin, "A sentence of", strlen("A sentence of")), 0);
    ck_assert_int_eq(strncmp(text + l.end - 5, "here. Is", 8), 0);
    text[0] = '\0';
    while (strlen(text) <= TEXT_LINE_MAX) strcat(text, "是。");
    strcat(text, "她到所里才四个月师傅老罗说手脚。\nx");
    ck_assert_uint_eq(lines_of(text, &l), 1);
    ck_assert_uint_eq(l.head - l.begin, 5 * strlen("她"));
    ck_assert(text_line_is_han(text + l.begin, l.end - l.begin));
    ck_assert(!text_line_is_han("the sign 水 of water", strlen("the sign 水 of water")));
}

// ---- Questions ----

UNIT_TEST(continuations_are_the_texts_own_tokens)
{
    calib_file made = {0};
    calib_recipe r = recipe();
    int32_t *ids;
    size_t n;
    r.n_continued = 3;
    help_ok(calib_make_of_text(&made, &r, tokens, "a/my story.txt", story, strlen(story), err));
    help_ok(tokenizer_encode(tokens, story, strlen(story), false, &ids, &n, err));
    const calib_context *c = made.contexts;
    ck_assert_uint_eq(made.count, 1);
    ck_assert_str_eq(c->sample_id, "my_story");
    ck_assert_uint_eq(c->n_context_ids, 300);
    ck_assert_mem_eq(c->context_ids, ids, 300 * sizeof *ids);
    ck_assert_uint_eq(c->n_questions, 3);
    for (size_t i = 0; i < 3; i++) {
        const calib_question *q = &c->questions[i];
        ck_assert_uint_eq(q->n_ids, 1 + 8 * i);
        ck_assert_mem_eq(q->ids, ids + 300, q->n_ids * sizeof *ids);
        ck_assert_uint_eq(q->n_answer_ids, 8);
        ck_assert_mem_eq(q->answer_ids, ids + 300 + q->n_ids, 8 * sizeof *ids);
    }
    free(ids);
    calib_free(&made);
}

UNIT_TEST(contexts_share_no_tokens)
{
    calib_file made = {0};
    calib_recipe r = recipe();
    int32_t *ids;
    size_t n;
    r.n_continued = 2, r.n_contexts = 0;
    help_ok(calib_make_of_text(&made, &r, tokens, "story", story, strlen(story), err));
    help_ok(tokenizer_encode(tokens, story, strlen(story), false, &ids, &n, err));
    ck_assert_uint_eq(made.count, n / 317);
    ck_assert_uint_gt(made.count, 2);
    for (size_t i = 0; i < made.count; i++)
        ck_assert_mem_eq(made.contexts[i].context_ids, ids + 317 * i, 300 * sizeof *ids);
    unit_strings(made.contexts[0].sample_id, "story", made.contexts[2].sample_id, "story-3");
    free(ids);
    calib_free(&made);
}

// Each question repeats the beginning of a line, and question and answer together end with that line of the story.
UNIT_TEST(lines_stand_in_the_context)
{
    static const char front[] = "\n\nThe line of the text above that begins with \"";
    const size_t behind = sizeof front - 1;
    calib_file made = {0};
    calib_recipe r = recipe();
    r.n_tokens = 1000, r.n_lines = 5, r.n_answer = 64;
    help_ok(calib_make_of_text(&made, &r, tokens, "story", story, strlen(story), err));
    const calib_context *c = made.contexts;
    char *context = strdup(text_of(c->context_ids, c->n_context_ids));
    const char *last = NULL;
    ck_assert_ptr_nonnull(context);
    ck_assert_uint_eq(c->n_questions, 5);
    for (size_t i = 0; i < 5; i++) {
        const calib_question *q = &c->questions[i];
        const char *asked = text_of(q->ids, q->n_ids), *is = strstr(asked, " is: ");
        char line[256];
        ck_assert_int_eq(strncmp(asked, front, behind), 0);
        ck_assert_ptr_nonnull(is);
        ck_assert_int_eq(strncmp(asked + behind, is + 5, strlen(is + 5)), 0);
        snprintf(line, sizeof line, "%s%s\n", is + 5, text_of(q->answer_ids, q->n_answer_ids));
        const char *at = strstr(context, line);
        ck_assert_msg(at && (at == context || at[-1] == '\n'), "question %zu: no line '%s'", i, line);
        ck_assert_msg(!last || at > last, "question %zu: in the order of the text", i);
        last = at;
    }
    free(context);
    calib_free(&made);
}

UNIT_TEST(draws_depend_on_seed_and_name)
{
    calib_file made = {0};
    calib_recipe r = recipe();
    static const char *const names[] = {"a", "b", "c", "d"}; // a; the same text under another name; with seed 2; a
    r.n_tokens = 1000, r.n_lines = 6;
    for (size_t i = 0; i < 3; i++) {
        r.seed = i == 2 ? 2 : 1;
        help_ok(calib_make_of_text(&made, &r, tokens, names[i], story, strlen(story), err));
    }
    calib_file again = {0};
    r.seed = 1;
    help_ok(calib_make_of_text(&again, &r, tokens, "a", story, strlen(story), err));
    size_t other[3] = {0};
    for (size_t i = 0; i < 3; i++)
        for (size_t q = 0; q < 6; q++) {
            const calib_question *x = &again.contexts[0].questions[q], *y = &made.contexts[i].questions[q];
            other[i] += x->n_ids != y->n_ids || memcmp(x->ids, y->ids, x->n_ids * sizeof *x->ids) != 0;
        }
    ck_assert_uint_eq(other[0], 0);
    ck_assert_uint_gt(other[1], 0);
    ck_assert_uint_gt(other[2], 0);
    calib_free(&made);
    calib_free(&again);
}

// ---- Calibration data ----

static calib_file parsed(const char *text)
{
    calib_file file;
    help_ok(calib_parse(&file, text, strlen(text), "in.jsonl", err));
    return file;
}

UNIT_TEST(own_questions_come_first)
{
    calib_file in = parsed("{\"sample_id\": \"s\", \"context\": \"the keys of the house and the keys of the wall\", "
                           "\"questions\": [\"the key\", \"and\", \"to\"], \"answers\": [\" of it\", null, \" x y\"]}");
    calib_recipe r = recipe();
    r.n_own = 2;
    for (int ignore = 0; ignore < 2; ignore++) {
        calib_file made = {0};
        r.ignore_answers = ignore;
        help_ok(calib_make_of_context(&made, &r, tokens, "in.jsonl", &in.contexts[0], err));
        const calib_context *c = made.contexts;
        ck_assert_str_eq(c->sample_id, "s");
        ck_assert_uint_eq(c->n_questions, 2);
        ck_assert_str_eq(text_of(c->questions[0].ids, c->questions[0].n_ids), "the key\nAnswer:");
        ck_assert_ptr_null(c->questions[1].answer_ids);
        if (ignore) ck_assert_ptr_null(c->questions[0].answer_ids);
        else ck_assert_str_eq(text_of(c->questions[0].answer_ids, c->questions[0].n_answer_ids), " of it");
        calib_free(&made);
    }
    calib_free(&in);
}

// What is written is read back: ids, answers and nulls. Making data from that again changes nothing.
UNIT_TEST(round_trip)
{
    calib_file in = parsed("{\"sample_id\": \"s\", \"context\": \"the keys of the house and the keys of the wall\", "
                           "\"questions\": [\"the key\", \"and\"], \"answers\": [\" of it\", null]}\n"
                           "{\"sample_id\": \"t\", \"context\": \"the keys of the house and the wall\", "
                           "\"questions\": [\"the key\"], \"answer_prefix\": \"\"}"),
               made = {0}, again = {0}, read;
    calib_recipe r = recipe();
    for (size_t i = 0; i < 2; i++) help_ok(calib_make_of_context(&made, &r, tokens, "in", &in.contexts[i], err));
    FILE *to = fopen(help_path("out.jsonl"), "wb");
    ck_assert_ptr_nonnull(to);
    for (size_t i = 0; i < 2; i++) calib_write_line(to, &made.contexts[i]);
    for (size_t i = 0; i < 2; i++) { // as text too, under other names
        in.contexts[i].sample_id[0] = (char)('u' + i);
        calib_write_line(to, &in.contexts[i]);
    }
    ck_assert_int_eq(fclose(to), 0);
    help_ok(calib_load(&read, help_path("out.jsonl"), err));
    ck_assert_uint_eq(read.count, 4);
    for (size_t i = 0; i < 2; i++) help_ok(calib_make_of_context(&again, &r, tokens, "out", &read.contexts[i], err));
    for (size_t i = 0; i < 2; i++) {
        const calib_context *a = &made.contexts[i], *b = &again.contexts[i];
        ck_assert_uint_eq(a->n_context_ids, b->n_context_ids);
        ck_assert_mem_eq(a->context_ids, b->context_ids, a->n_context_ids * sizeof(int32_t));
        ck_assert_uint_eq(a->n_questions, b->n_questions);
        for (size_t q = 0; q < a->n_questions; q++) {
            unit_numbers(a->questions[q].n_ids, b->questions[q].n_ids, a->questions[q].n_answer_ids,
                         b->questions[q].n_answer_ids);
            ck_assert(!a->questions[q].answer_ids == !b->questions[q].answer_ids);
        }
    }
    unit_strings(read.contexts[2].context, in.contexts[0].context, read.contexts[2].questions[0].answer, " of it");
    ck_assert_ptr_null(read.contexts[2].questions[1].answer);
    ck_assert_str_eq(read.contexts[3].answer_prefix, "");
    calib_free(&in);
    calib_free(&made);
    calib_free(&again);
    calib_free(&read);
}

// ---- Refusals ----

static void refuses(const calib_recipe *r, const char *name, const char *text, size_t size, kvb_status status,
                    const char *message)
{
    calib_file made = {0};
    help_fails(calib_make_of_text(&made, r, tokens, name, text, size, err), status, message);
    calib_free(&made);
}

UNIT_TEST(mistakes)
{
    calib_recipe r = recipe();
    char id[CONTEXT_ID_MAX + 1];
    r.n_continued = 1;
    refuses(&r, "a.txt", "the \xff", 5, KVB_FORMAT, "a.txt: byte 4 is 0xff, expected UTF-8");
    refuses(&r, "a.txt", "the\0key", 7, KVB_FORMAT, "a.txt: byte 3 is 0x00");
    refuses(&r, "a.txt", "the", 3, KVB_ARGUMENT, "expected 16 at least");
    refuses(&r, "..txt", story, strlen(story), KVB_ARGUMENT, "rename the file");
    refuses(&r, "a.txt", story, 300, KVB_ARGUMENT, "tokens after the context's");
    r.n_contexts = 40;
    refuses(&r, "a.txt", story, strlen(story), KVB_ARGUMENT, "expected 40 x 309; give --contexts");
    r = recipe();
    r.n_lines = 1000;
    refuses(&r, "a.txt", story, strlen(story), KVB_ARGUMENT, "begin like no other, expected 1000; give --lines");

    calib_file made = {0}, in = parsed("{\"context_ids\": [1, 2, 99999], \"question_ids\": [[1]]}");
    r = recipe();
    help_fails(calib_make_of_context(&made, &r, tokens, "in", in.contexts, err), KVB_ARGUMENT, "id 99999, expected 0");
    calib_free(&made);
    calib_free(&in);
    help_ok(calib_make_of_text(&made, &r, tokens, "x/a.txt", story, strlen(story), err));
    help_fails(calib_make_of_text(&made, &r, tokens, "y/a.md", story, strlen(story), err), KVB_ARGUMENT,
               "there is a context \"a\" already");
    calib_free(&made);
    calib_default_id(id, "dir/my text.jsonl", 3);
    ck_assert_str_eq(id, "my_text-3");
}

UNIT_MAIN_EACH("calibration data from texts", setup, teardown)
