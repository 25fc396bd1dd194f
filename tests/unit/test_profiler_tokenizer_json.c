// Tokenizers of Hugging Face folders: small ones of every kind against the ids of Hugging Face's tokenizers
// (tests/golden/tokenizers.json), what else their files say, and what is refused.
#include "folder_help.h"
#include "tokenizer_help.h"
#include <time.h>

static kvb_error err;

static json_text text_of(const char *text)
{
    return (json_text){text, text ? strlen(text) : 0};
}

static tokenizer *make(const char *tokens, const char *config, const char *generation)
{
    tokenizer *t;
    kvb_status status = tokenizer_from_json(&t, "folder", text_of(tokens), text_of(config), text_of(generation), &err);
    ck_assert_msg(status == KVB_OK, "%s", err.message);
    return t;
}

UNIT_TEST(test_golden)
{
    cJSON *all = help_json("tests/golden/tokenizers.json");
    const cJSON *kind, *c;
    int kinds = 0, cases = 0;
    cJSON_ArrayForEach(kind, all)
    {
        tokenizer *t = make(cJSON_GetObjectItem(kind, "tokenizer")->valuestring, NULL, NULL);
        cJSON_ArrayForEach(c, cJSON_GetObjectItem(kind, "cases"))
        {
            check_case(cJSON_GetObjectItem(kind, "kind")->valuestring, t, c, true);
            cases++;
        }
        tokenizer_free(t);
        kinds++;
    }
    cJSON_Delete(all);
    ck_assert_int_ge(kinds, 12);
    ck_assert_int_gt(cases, 500);
}

// ---- by hand: the tokens a, b, ab, <s>, </s>, <end>, and a pair of bytes ----

#define STEPS(normalizer, pre) "\"normalizer\":" normalizer ",\"pre_tokenizer\":" pre ","
#define ADDED                                                            \
    "\"added_tokens\":[{\"id\":3,\"content\":\"<s>\",\"special\":true}," \
    "{\"id\":4,\"content\":\"</s>\",\"special\":true},{\"id\":9,\"content\":\"<end>\",\"special\":true}],"
#define VOCAB "\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"<s>\":3,\"</s>\":4,\"<0xC3>\":5,\"<0xA9>\":6,\"\\u2581\":7}"
#define MODEL(more) "\"model\":{\"type\":\"BPE\"," more VOCAB ",\"merges\":[\"a b\"]}"
#define WHOLE(steps, more) "{" steps ADDED MODEL(more) "}"
#define PLAIN WHOLE(STEPS("null", "null"), "")

UNIT_TEST(test_bytes_and_unknown)
{
    tokenizer *t = make(PLAIN, NULL, NULL);
    EXPECT_IDS(t, "abxba", true, 2, 1, 0); // x has no token, and there is no unknown one
    tokenizer_free(t);
    t = make(WHOLE(STEPS("null", "null"), "\"unk_token\":\"<s>\",\"byte_fallback\":true,"), NULL, NULL);
    EXPECT_IDS(t, "\xc3\xa9zzab", true, 5, 6, 3, 3, 2); // e with an acute has both bytes; z has none
    tokenizer_free(t);
    t = make(WHOLE(STEPS("null", "null"), "\"unk_token\":\"<s>\",\"fuse_unk\":true,"), NULL, NULL);
    EXPECT_IDS(t, "zzabz", true, 3, 2, 3);
    tokenizer_free(t);
}

UNIT_TEST(test_decode)
{
    tokenizer *t = make(
        WHOLE(STEPS("{\"type\":\"Prepend\",\"prepend\":\"\\u2581\"}", "null"), "\"byte_fallback\":true,"), NULL, NULL);
    const int32_t ids[] = {7, 0, 7, 2, 5, 6, 9};
    char out[32];
    size_t n = tokenizer_decode(t, ids, 7, out, sizeof out);
    ck_assert_uint_eq(n, 11); // the space in front is not part of the text; "a ab", e with an acute, "<end>"
    ck_assert_mem_eq(out, "a ab\xc3\xa9<end>", 11);
    ck_assert_uint_eq(tokenizer_decode(t, ids, 7, NULL, 0), 11);
    tokenizer_free(t);
}

UNIT_TEST(test_special_tokens)
{
    tokenizer *t = make(PLAIN, "{\"bos_token\":{\"content\":\"<s>\"},\"eos_token\":\"</s>\",\"chat_template\":\"T\"}",
                        "{\"eos_token_id\":[4,9]}");
    unit_numbers(tokenizer_special(t).bos, 3, tokenizer_special(t).eos, 4);
    ck_assert(!tokenizer_special(t).add_bos); // no post-processor puts it in front
    ck_assert(tokenizer_is_end(t, 4) && tokenizer_is_end(t, 9) && !tokenizer_is_end(t, 3) && !tokenizer_is_end(t, -1));
    ck_assert_str_eq(tokenizer_chat_template(t), "T");
    ck_assert_uint_eq(tokenizer_size(t), 10);
    tokenizer_free(t);
    t = make("{\"post_processor\":{\"type\":\"Sequence\",\"processors\":[{\"type\":\"TemplateProcessing\",\"single\":["
             "{\"SpecialToken\":{\"id\":\"<s>\"}},{\"Sequence\":{\"id\":\"A\"}}]}]}," ADDED MODEL("") "}",
             "{\"chat_template\":[{\"name\":\"tool\",\"template\":\"X\"},{\"name\":\"default\",\"template\":\"Y\"}]}",
             "{\"eos_token_id\":4}");
    ck_assert(tokenizer_special(t).add_bos && tokenizer_special(t).bos == 3 && tokenizer_is_end(t, 4));
    ck_assert_str_eq(tokenizer_chat_template(t), "Y");
    tokenizer_free(t);
}

static void expect_refused(kvb_status status, const char *part, const char *tokens)
{
    tokenizer *t = (tokenizer *)&err; // anything but NULL
    kvb_status got = tokenizer_from_json(&t, "folder", text_of(tokens), text_of(NULL), text_of(NULL), &err);
    ck_assert_msg(got == status && t == NULL, "'%s': expected %s, got %s: %s", part, kvb_status_name(status),
                  kvb_status_name(got), err.message);
    ck_assert_msg(strstr(err.message, part) && strstr(err.message, "folder"), "'%s' is not in: %s", part, err.message);
}

UNIT_TEST(test_refusals)
{
    expect_refused(KVB_FORMAT, "not JSON", "{\"model\":");
    expect_refused(KVB_FORMAT, "not JSON", "");
    expect_refused(KVB_UNSUPPORTED, "expected BPE, found Unigram", "{\"model\":{\"type\":\"Unigram\"}}");
    expect_refused(KVB_UNSUPPORTED, "found nothing", "[]");
    expect_refused(KVB_UNSUPPORTED, "found Lowercase", WHOLE(STEPS("{\"type\":\"Lowercase\"}", "null"), ""));
    expect_refused(KVB_UNSUPPORTED, "found Whitespace", WHOLE(STEPS("null", "{\"type\":\"Whitespace\"}"), ""));
    expect_refused(
        KVB_UNSUPPORTED, "a behavior of tokenizers",
        WHOLE(STEPS("null", "{\"type\":\"Split\",\"pattern\":{\"String\":\" \"},\"behavior\":\"Odd\"}"), ""));
    expect_refused(
        KVB_UNSUPPORTED, "the expression '(a'",
        WHOLE(STEPS("null", "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(a\"},\"behavior\":\"Isolated\"}"), ""));
    expect_refused(KVB_UNSUPPORTED, "end_of_word_suffix", WHOLE("", "\"end_of_word_suffix\":\"</w>\","));
    expect_refused(KVB_FORMAT, "model.merges: expected two tokens that make a third in entry 0",
                   "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a b\"]}}");
    expect_refused(KVB_FORMAT, "model.vocab: expected a token id for 'a'",
                   "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":-1},\"merges\":[]}}");
    expect_refused(KVB_FORMAT, "ids up to 2000000000",
                   "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":2000000000},\"merges\":[]}}");
    expect_refused(KVB_FORMAT, "added_tokens: expected an id",
                   "{\"added_tokens\":[{\"id\":1}],\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]}}");
}

// ---- expressions of a model's files may backtrack without end ----

#define SPLIT(regex, behavior)                                                                               \
    WHOLE(STEPS("null", "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" regex "\"},\"behavior\":\"" behavior \
                        "\",\"invert\":false}"),                                                             \
          "")

// Encodes `text`, repeated `times` times. *n receives the number of ids.
static kvb_status encode_run(const char *tokens, const char *text, size_t times, size_t *n)
{
    size_t each = strlen(text);
    char *run = malloc(each * times + 1);
    int32_t *ids;
    tokenizer *t = make(tokens, NULL, NULL);
    for (size_t i = 0; i < times; i++) memcpy(run + i * each, text, each);
    kvb_status status = tokenizer_encode(t, run, each * times, false, &ids, n, &err);
    tokenizer_free(t);
    free(run);
    free(ids);
    return status;
}

// Their work is limited by the text's length, in steps and, if it takes no steps, in time. An ordinary word of any
// length can be split, even if each of its characters is a place to backtrack to, and so can a long text of such words.
UNIT_TEST(test_backtracking)
{
    static const char *const hostile[] = {SPLIT("(a|a)*\\\\z", "Isolated"), SPLIT("(?:a+a+)+b|.", "Isolated"),
                                          SPLIT("(?:[^b])*b|.", "Isolated")};
    size_t n;
    for (size_t i = 0; i < sizeof hostile / sizeof *hostile; i++) {
        clock_t began = clock();
        ck_assert_int_eq(encode_run(hostile[i], "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaac", 5000, &n), KVB_UNSUPPORTED);
        ck_assert_msg(strstr(err.message, "PCRE2: match limit exceeded; give token ids"), "%s", err.message);
        ck_assert((double)(clock() - began) / CLOCKS_PER_SEC < 10);
    }
    ck_assert_int_eq(encode_run(SPLIT("(?:\\\\p{L}|\\\\p{N})+", "Removed"), "ab", 5500000, &n), KVB_OK);
    ck_assert_uint_eq(n, 0);
    ck_assert_int_eq(encode_run(SPLIT("(?:\\\\p{L}|\\\\p{N})+| ", "Isolated"), "aba ab ", 30000, &n), KVB_OK);
    ck_assert_uint_eq(n, 90000); // a space has no token
}

// Replacements that make a text longer and longer are stopped as well.
UNIT_TEST(test_growing_text)
{
    char tokens[2000] = "{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[";
    for (int i = 0; i < 16; i++)
        snprintf(tokens + strlen(tokens), sizeof tokens - strlen(tokens),
                 "%s{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},\"content\":\"aaaaaaaa\"}", i ? "," : "");
    strcat(tokens, "]},\"pre_tokenizer\":null," ADDED MODEL("") "}");
    size_t n;
    ck_assert_int_eq(encode_run(tokens, "a", 100000, &n), KVB_UNSUPPORTED);
    ck_assert_msg(strstr(err.message, "the tokenizer's normalizer makes more than"), "%s", err.message);
}

UNIT_TEST(test_folder)
{
    tokenizer *t;
    unit_refuses(tokenizer_from_folder(&t, help_folder, &err), KVB_IO, "tokenizer.json");
    help_spew(help_path("tokenizer.json"), PLAIN, strlen(PLAIN));
    help_spew(help_path("chat_template.jinja"), "{{ x }}", 7);
    ck_assert_msg(tokenizer_from_folder(&t, help_folder, &err) == KVB_OK, "%s", err.message);
    unit_strings(tokenizer_chat_template(t), "{{ x }}", tokenizer_pre(t), "tokenizer.json");
    tokenizer_free(t);
}

UNIT_MAIN_EACH("profiler: tokenizer.json", help_setup, help_teardown)
