// Tasks: as long as asked, repeatable, with answers that the context really gives (read back from its text, not from
// the generator), and scored as in RULER.
#include "evaluator/task.h"
#include "test_profiler_cases.h"
#include <cjson/cJSON.h>
#include <ctype.h>

static tokenizer *tokens;

static void setup(void)
{
    help_setup();
    tokens = case_tiny_tokenizer();
}

static void teardown(void)
{
    tokenizer_free(tokens);
    help_teardown();
}

static const char HAY[] =
    "He had a boat. It was old!\n\n Was it sold?  Nobody knew in Oslo, or\nsaid so. And then he went.\n";

static task_sample make(const char *spec, size_t n_tokens, uint64_t seed, uint64_t index)
{
    task t;
    task_sample s;
    task_source source = {tokens, seed, HAY, NULL};
    help_ok(task_parse(&t, spec, err));
    help_ok(task_make(&s, &t, &source, n_tokens, index, err));
    return s;
}

static const char *const ALL[] = {"niah_single_1",
                                  "niah_single_2",
                                  "niah_single_3",
                                  "niah_multikey_1:questions=3",
                                  "niah_multikey_2",
                                  "niah_multikey_3",
                                  "niah_multivalue",
                                  "niah_multiquery",
                                  "vt",
                                  "cwe",
                                  "fwe",
                                  "kv",
                                  "kv:uuid=0"};
enum { NEEDLES = 8 }; // the first ones of ALL

UNIT_TEST(lengths_and_seeds)
{
    for (size_t i = 0; i < sizeof ALL / sizeof *ALL; i++)
        for (size_t n = 3000; n <= 6000; n += 3000) {
            task_sample a = make(ALL[i], n, 7, 2), b = make(ALL[i], n, 7, 2), c = make(ALL[i], n, 8, 2),
                        d = make(ALL[i], n, 7, 3);
            // The longest unit of filler is a needle of UUIDs: under 130 tokens of this vocabulary.
            ck_assert_msg(a.n_tokens < a.length && a.length <= n && a.length + 130 > n,
                          "%s: %zu tokens, expected about %zu", ALL[i], a.length, n);
            unit_strings(a.context, b.context, a.id, b.id);
            ck_assert_uint_eq(a.n_questions, b.n_questions);
            ck_assert_str_eq(a.questions[0].gold[0], b.questions[0].gold[0]);
            ck_assert_str_ne(a.context, c.context);
            ck_assert_str_ne(a.context, d.context);
            ck_assert_str_ne(a.id, d.id);
            task_sample_free(&a);
            task_sample_free(&b);
            task_sample_free(&c);
            task_sample_free(&d);
        }
}

// Counts `word` in the text between characters that are neither lower-case letters nor hyphens.
static size_t count_word(const char *text, const char *word)
{
    size_t n = 0, length = strlen(word);
    for (const char *at = text; (at = strstr(at, word)); at += length) {
        bool left = at == text || !(islower((unsigned char)at[-1]) || at[-1] == '-');
        bool right = !(islower((unsigned char)at[length]) || at[length] == '-');
        n += left && right;
    }
    return n;
}

UNIT_TEST(needles_stand_in_the_hay)
{
    for (int i = 0; i < NEEDLES; i++) {
        task_sample s = make(ALL[i], 3000, 1, (uint64_t)i);
        for (size_t q = 0; q < s.n_questions; q++)
            for (size_t k = 0; k < s.questions[q].n_gold; k++) {
                char needle[200];
                const char *value = s.questions[q].gold[k], *at = strstr(s.context, value);
                ck_assert_msg(at && !strstr(at + 1, value), "%s: \"%s\" does not stand once", ALL[i], value);
                ck_assert_ptr_null(strstr(s.questions[q].text, value));
                // The sentence that holds the value names a key that the question asks for.
                const char *key = at;
                while (key > s.context && strncmp(key, " for ", 5) != 0) key--;
                snprintf(needle, sizeof needle, "%.*s", (int)(strstr(key, " is:") - key - 5), key + 5);
                ck_assert_msg(strstr(s.questions[q].text, needle), "question %zu does not ask for %s", q, needle);
            }
        task_sample_free(&s);
    }
}

UNIT_TEST(chains_can_be_followed)
{
    task_sample s = make("vt:hops=3", 3000, 5, 0);
    task_question *q = &s.questions[0];
    char value[16], name[16];
    ck_assert_int_eq(sscanf(strstr(q->text, "value ") + 6, "%15[0-9]", value), 1);
    ck_assert_uint_eq(q->n_gold, 4);
    for (size_t found = 0; found < 4; found++) {
        char end[40];
        snprintf(end, sizeof end, found ? " = VAR %s \n" : " = %s\n", found ? name : value);
        const char *at = strstr(s.context, end);
        ck_assert_ptr_nonnull(at);
        snprintf(name, sizeof name, "%.5s", at - 5);
        ck_assert_str_eq(name, q->gold[found]);
    }
    task_sample_free(&s);
}

// Returns the text after the last occurrence of `front`.
static const char *behind(const char *text, const char *front)
{
    const char *found = NULL;
    for (const char *at = text; (at = strstr(at, front));) found = at += strlen(front);
    ck_assert_ptr_nonnull(found);
    return found;
}

UNIT_TEST(counts_are_true)
{
    static const struct {
        size_t n_tokens, often, rarely;
    } lists[] = {{3000, 6, 1}, {9000, 30, 3}};
    char word[48];
    int length;
    for (size_t i = 0; i < 2; i++) {
        task_sample c = make("cwe", lists[i].n_tokens, 3, 1);
        ck_assert_uint_eq(c.questions[0].n_gold, 10);
        const char *list = behind(c.context, "most often.\n");
        for (size_t k = 0; k < 10; k++) ck_assert_uint_eq(count_word(list, c.questions[0].gold[k]), lists[i].often);
        size_t others = 0;
        for (const char *at = list; sscanf(at, "%*u. %47s%n", word, &length) == 1; at += length) {
            size_t n = count_word(list, word);
            ck_assert(n == lists[i].rarely || n == lists[i].often);
            others += n == lists[i].rarely;
        }
        ck_assert_uint_gt(others, 40);
        task_sample_free(&c);
    }
    // Only two of the coded words are more frequent than the third.
    task_sample f = make("fwe", 3000, 3, 1);
    const char *list = behind(f.context, "coded words. ");
    size_t counts[3], above = 0;
    for (int k = 0; k < 3; k++) counts[k] = count_word(list, f.questions[0].gold[k]);
    ck_assert(counts[0] > counts[1] && counts[1] > counts[2] && counts[2] > 10);
    for (const char *at = list; sscanf(at, "%47s%n", word, &length) == 1; at += length)
        above += strcmp(word, "...") != 0 && count_word(list, word) > counts[2];
    ck_assert_uint_eq(above, counts[0] + counts[1]);
    task_sample_free(&f);
}

UNIT_TEST(pairs_are_json)
{
    task_sample s = make("kv:questions=3", 3000, 2, 0);
    cJSON *object = cJSON_Parse(strchr(s.context, '{'));
    ck_assert_ptr_nonnull(object);
    for (size_t q = 0; q < 3; q++) {
        char key[40];
        ck_assert_int_eq(sscanf(s.questions[q].text, "\nKey: \"%39[^\"]", key), 1);
        ck_assert_str_eq(cJSON_GetStringValue(cJSON_GetObjectItem(object, key)), s.questions[q].gold[0]);
    }
    cJSON_Delete(object);
    task_sample_free(&s);
}

UNIT_TEST(texts_keep_questions_that_they_answer)
{
    static const char line[] =
        "{\"sample_id\": \"x\", \"context\": \"Anna lives in Oslo. She sells red boats to tourists there. Later she "
        "moved "
        "to Bergen.\", \"questions\": [\"Where?\", \"What does Anna sell?\", \"Then?\"], \"answers\": [\" Oslo.\", "
        "\" Red boats.\", \" Bergen.\"]}";
    calib_file texts;
    task t;
    task_sample s;
    help_ok(calib_parse(&texts, line, strlen(line), "x.jsonl", err));
    task_source source = {tokens, 1, NULL, &texts};
    help_ok(task_parse(&t, "qa", err));
    help_ok(task_make(&s, &t, &source, 0, 0, err));
    ck_assert_uint_eq(s.n_questions, 3);
    task_sample_free(&s);
    help_ok(task_make(&s, &t, &source, 55, 0, err)); // a token is a byte or slightly more
    ck_assert_uint_eq(s.n_questions, 2);
    ck_assert(!strstr(s.context, "Bergen") && strstr(s.questions[1].text, "What does Anna sell?\nAnswer:"));
    task_sample_free(&s);
    help_fails(task_make(&s, &t, &source, 2, 0, err), KVB_ARGUMENT, "no question");
    help_fails(task_make(&s, &t, &source, 0, 1, err), KVB_ARGUMENT, "has 1 texts");
    source.texts = NULL;
    help_fails(task_make(&s, &t, &source, 0, 0, err), KVB_ARGUMENT, "--texts");
    calib_free(&texts);
}

static double score(task_rule rule, const char *answer, const char *gold0, const char *gold1)
{
    char *gold[2] = {strdup(gold0), gold1 ? strdup(gold1) : NULL};
    double s = task_score(rule, answer, gold, gold1 ? 2 : 1);
    free(gold[0]);
    free(gold[1]);
    return s;
}

UNIT_TEST(scores)
{
    ck_assert(score(TASK_ALL, " 12, 34.", "12", "34") == 1 && score(TASK_ALL, " 12, 43.", "12", "34") == 0.5);
    ck_assert(score(TASK_ALL, "it was OS\nLO, I think", "oslo", NULL) == 1); // control characters are left out
    ck_assert(score(TASK_ALL, "Os lo", "Oslo", "Oslo.") == 0);
    ck_assert(score(TASK_F1, " The red boats\nand more", " A red boat", NULL) == 0.5); // {red, boats} and {red, boat}
    ck_assert(score(TASK_F1, "red red", "red boat", NULL) == 0.5); // a word counts as often as both have it
    ck_assert(score(TASK_F1, "", "red", NULL) == 0);
}

UNIT_TEST(final_scores)
{
    char first[] = "12", second[] = "34", *gold[] = {first, second};
    ck_assert(!task_score_is_final(TASK_ALL, " 12", gold, 2) && task_score_is_final(TASK_ALL, " 12, 34", gold, 2));
    ck_assert(!task_score_is_final(TASK_F1, "\n 12 34", gold, 2) && task_score_is_final(TASK_F1, "\n 12\n", gold, 2));
}

UNIT_TEST(specs)
{
    task t;
    help_ok(task_parse(&t, "niah_multikey_1:keys=8:values=1", err));
    ck_assert_str_eq(t.spec, "niah_multikey_1:keys=8");
    help_fails(task_parse(&t, "niah", err), KVB_ARGUMENT, "expected one of niah_single_1");
    help_fails(task_parse(&t, "vt:hops", err), KVB_ARGUMENT, "'hops' is not parameter=value");
    help_fails(task_parse(&t, "vt:leaps=1", err), KVB_ARGUMENT, "parameters of vt: hops");
    help_fails(task_parse(&t, "vt:hops=0", err), KVB_ARGUMENT, "1 to 10");
    help_fails(task_parse(&t, "vt:hops=1x", err), KVB_ARGUMENT, "1 to 10");
    help_fails(task_parse(&t, "vt:hops=-1", err), KVB_ARGUMENT, "1 to 10");
    task_source source = {tokens, 1, NULL, NULL};
    task_sample s;
    help_ok(task_parse(&t, "kv:questions=9", err));
    help_fails(task_make(&s, &t, &source, 200, 0, err), KVB_ARGUMENT, "does not fit into 200 tokens");
    help_fails(task_make(&s, &t, &source, 0, 0, err), KVB_ARGUMENT, "--tokens");
    help_ok(task_parse(&t, "niah_multikey_1:keys=41", err));
    help_fails(task_make(&s, &t, &source, 4000, 0, err), KVB_ARGUMENT, "--haystack");
    source.haystack = HAY;
    help_fails(task_make(&s, &t, &source, 4000, 0, err), KVB_ARGUMENT, "41 needles, but a text has places for 40");
}

UNIT_TEST(lines_are_calibration_data)
{
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    task t;
    help_ok(task_parse(&t, "niah_multivalue", err));
    task_sample s = make("niah_multivalue", 2000, 4, 0);
    help_ok(task_write_jsonl(to, &t, &s, 4, err));
    fclose(to);
    calib_file file;
    help_ok(calib_parse(&file, text, size, "tasks.jsonl", err));
    ck_assert_uint_eq(file.count, 1);
    unit_strings(file.contexts[0].context, s.context, file.contexts[0].sample_id, s.id, file.contexts[0].answer_prefix,
                 s.questions[0].prefix, file.contexts[0].questions[0].text, s.questions[0].text);
    ck_assert(task_score(TASK_ALL, file.contexts[0].questions[0].answer, s.questions[0].gold, s.questions[0].n_gold) ==
              1);
    calib_free(&file);
    task_sample_free(&s);
    free(text);
}

UNIT_MAIN_EACH("tasks", setup, teardown)
