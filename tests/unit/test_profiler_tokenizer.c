// The tokenizer on the tiny vocabulary: against the Hugging Face tokenizers (tests/golden/tokens.json), and on
// vocabularies that do not fit together. The default model's part of the golden data is tested by
// tests/cli/real_tokens.sh.
#include "folder_help.h"
#include "tests/gguf_build.h"
#include "tests/tiny_vocab.h"
#include "tokenizer_help.h"

static kvb_error err;

static tokenizer *make(const char *pre)
{
    gguf_build b;
    gguf_file f;
    tokenizer *t;
    gguf_build_begin(&b, 3);
    tiny_vocab_build(&b, pre);
    ck_assert_msg(gguf_parse(&f, b.data, b.size, "tiny", &err) == KVB_OK, "%s", err.message);
    ck_assert_msg(tokenizer_from_gguf(&t, &f, NULL, &err) == KVB_OK, "%s", err.message);
    gguf_close(&f);
    free(b.data); // the tokenizer keeps nothing of the file
    return t;
}

static size_t encode(const tokenizer *t, const char *text, size_t size, bool special, int32_t **ids)
{
    size_t n;
    ck_assert_msg(tokenizer_encode(t, text, size, special, ids, &n, &err) == KVB_OK, "%s", err.message);
    ck_assert_ptr_nonnull(*ids);
    return n;
}

UNIT_TEST(test_golden)
{
    cJSON *all = help_json("tests/golden/tokens.json");
    int checked = 0;
    const char *const pres[] = {"smollm", "llama-bpe", "qwen2", "gpt-2"};
    for (int p = 0; p < 4; p++) {
        tokenizer *t = make(pres[p]);
        const cJSON *c;
        cJSON_ArrayForEach(c, all)
        {
            if (strcmp(cJSON_GetObjectItem(c, "model")->valuestring, "tiny") != 0) continue;
            if (strcmp(cJSON_GetObjectItem(c, "pre")->valuestring, pres[p]) != 0) continue;
            check_case(pres[p], t, c, cJSON_IsTrue(cJSON_GetObjectItem(c, "special")));
            checked++;
        }
        tokenizer_free(t);
    }
    ck_assert_int_gt(checked, 100);
    cJSON_Delete(all);
}

enum { SPACE = TINY_FIRST_BYTE + ' ', TWO_SPACES = TINY_FIRST_MERGE + 15, TOOL = TINY_FIRST_MERGE + TINY_MERGES + 1 };
static int32_t byte(char c)
{
    return TINY_FIRST_BYTE + (unsigned char)c;
}

// What distinguishes the pre-tokenizers, by hand.
UNIT_TEST(test_pre_tokenizers)
{
    tokenizer *smollm = make("smollm"), *llama = make("llama-bpe"), *qwen = make("qwen2"), *gpt = make("gpt-2");
    int32_t twelve = TINY_FIRST_MERGE + 18, cache = TINY_FIRST_MERGE + TINY_MERGES;
    EXPECT_IDS(smollm, "12", false, byte('1'), byte('2'));
    EXPECT_IDS(qwen, "12", false, byte('1'), byte('2'));
    EXPECT_IDS(gpt, "12", false, twelve);
    EXPECT_IDS(llama, "1212", false, twelve, byte('1'), byte('2')); // 121 and 2: only "12 3" merges on
    EXPECT_IDS(gpt, "1212", false, twelve, twelve);
    EXPECT_IDS(smollm, "  1", false, TWO_SPACES, byte('1'));
    EXPECT_IDS(gpt, "  1", false, SPACE, TINY_FIRST_MERGE + 20); // the second space goes with the number: "Ġ 1"
    EXPECT_IDS(llama, " cache", false, cache);                   // a whole token, though no merge makes it
    int32_t *ids;
    ck_assert_uint_gt(encode(smollm, " cache", 6, false, &ids), 1);
    free(ids);
    tokenizer_free(smollm);
    tokenizer_free(llama);
    tokenizer_free(qwen);
    tokenizer_free(gpt);
}

UNIT_TEST(test_special)
{
    tokenizer *t = make("smollm");
    int32_t *ids;
    EXPECT_IDS(t, "<|im_start|>a<|im_end|>", true, TINY_IM_START, byte('a'), TINY_IM_END);
    EXPECT_IDS(t, "a<tool>", true, byte('a'), TOOL);
    EXPECT_IDS(t, "a<tool>", false, byte('a'), TOOL); // user-defined tokens are part of the text
    size_t n = encode(t, "<|im_start|>", 12, false, &ids);
    ck_assert_uint_gt(n, 1); // a control token is not
    for (size_t i = 0; i < n; i++) ck_assert_int_ne(ids[i], TINY_IM_START);
    free(ids);
    unit_numbers(tokenizer_special(t).bos, TINY_IM_START, tokenizer_special(t).eos, TINY_IM_END,
                 tokenizer_special(t).eot, -1);
    ck_assert(!tokenizer_special(t).add_bos);
    ck_assert_uint_eq(tokenizer_size(t), 300);
    ck_assert_str_eq(tokenizer_pre(t), "smollm");
    tokenizer_free(t);
    t = make("llama-bpe");
    ck_assert(!tokenizer_special(t).add_bos); // the file says false
    tokenizer_free(t);
    tokenizer_free(NULL);
}

static uint64_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

// Byte-level text that is UTF-8 comes back unchanged, and any other bytes come back as their repair.
UNIT_TEST(test_round_trip)
{
    static const char *const pieces[] = {"the ", "  ",  "\n",     "12",  "你好",   "\xff",     "\xe4\xbd", "é",
                                         "😀",    "'ll", "<tool>", "\0x", "\r\n\t", "\xed\xa0", ">",        "nd an"};
    uint64_t state = 20261127;
    tokenizer *t = make("qwen2");
    for (int round = 0; round < 2000; round++) {
        char text[512], back[2048], again[2048];
        size_t size = 0;
        for (uint64_t k = next_random(&state) % 20; k-- > 0;) {
            const char *piece = pieces[next_random(&state) % 16];
            size_t n = *piece ? strlen(piece) : 2;
            memcpy(text + size, piece, n);
            size += n;
        }
        int32_t *ids, *ids_again;
        size_t n = encode(t, text, size, true, &ids), n_back = tokenizer_decode(t, ids, n, back, sizeof back);
        ck_assert_uint_le(n_back, sizeof back);
        size_t n_again =
            encode(t, back, n_back, true, &ids_again); // the repaired text has the same ids, and is not repaired again
        ck_assert_msg(n == n_again && memcmp(ids, ids_again, n * sizeof *ids) == 0, "round %d", round);
        ck_assert_uint_eq(tokenizer_decode(t, ids_again, n_again, again, sizeof again), n_back);
        ck_assert_mem_eq(back, again, n_back);
        bool broken = false;
        for (size_t i = 0; i < size; i++)
            broken |=
                (unsigned char)text[i] == 0xff || (unsigned char)text[i] == 0xed || (unsigned char)text[i] == 0xe4;
        if (!broken) ck_assert_msg(n_back == size && memcmp(back, text, size) == 0, "round %d", round);
        free(ids);
        free(ids_again);
    }
    tokenizer_free(t);
}

UNIT_TEST(test_decode)
{
    tokenizer *t = make("smollm");
    const int32_t ids[] = {
        TINY_IM_START,  -1, 300, INT32_MAX, INT32_MIN, TINY_FIRST_MERGE + 34, TOOL, TINY_FIRST_MERGE + 33,
        TINY_FIRST_BYTE};
    static const char expected[] = "<|im_start|>\xe4\xbd\xa0<tool>\xe4\xbd"; // and a NUL: the token of byte 0
    char out[64];
    memset(out, '#', sizeof out);
    unit_numbers(tokenizer_decode(t, ids, 9, NULL, 0), sizeof expected, tokenizer_decode(t, ids, 9, out, 14),
                 sizeof expected);
    ck_assert_mem_eq(out, expected, 14);
    ck_assert_int_eq(out[14], '#'); // nothing after cap
    ck_assert_uint_eq(tokenizer_decode(t, ids, 9, out, sizeof out), sizeof expected);
    ck_assert_mem_eq(out, expected, sizeof expected);
    ck_assert_uint_eq(tokenizer_decode(t, ids, 0, out, sizeof out), 0);
    int32_t *none;
    size_t n = 7;
    ck_assert(tokenizer_encode(t, NULL, 0, true, &none, &n, &err) == KVB_OK && n == 0 && none != NULL);
    free(none);
    tokenizer_free(t);
}

// Words of a quarter of a megabyte. A quadratic loop would take an hour here, so the test's time limit is the check.
UNIT_TEST(test_long_words)
{
    enum { SIZE = 1 << 18 };
    static const char *const pres[] = {"smollm", "llama-bpe", "qwen2", "gpt-2"};
    static const char *const units[] = {"a", " ", "\n", "!", "in", "1", "the", " \n", "\xff", "你", "'s", "<"};
    char *text = malloc(SIZE + 8);
    ck_assert_ptr_nonnull(text);
    for (int p = 0; p < 4; p++) {
        tokenizer *t = make(pres[p]);
        for (int u = 0; u < 12; u++) {
            size_t size = 0, unit = strlen(units[u]);
            for (; size < SIZE; size += unit) memcpy(text + size, units[u], unit);
            int32_t *ids;
            size_t n = encode(t, text, size, true, &ids);
            ck_assert_uint_gt(n, 0);
            ck_assert_uint_eq(tokenizer_decode(t, ids, n, NULL, 0), units[u][0] == '\xff' ? 3 * size : size);
            free(ids);
        }
        tokenizer_free(t);
    }
    free(text);
}

// ---- vocabularies made by hand: "a", "b", "ab", then perhaps more ----

typedef struct parts {
    const char *model, *pre; // NULL: left out
    const char *merge;
    uint32_t n_types, bos, unknown; // UINT32_MAX: left out
    int add_bos;                    // -1: left out
    bool prefix;
} parts;

static const parts WHOLE = {"gpt2", "gpt-2", "a b", 3, UINT32_MAX, UINT32_MAX, -1, false};

static kvb_status make_parts(tokenizer **t, const parts *p)
{
    gguf_build b;
    gguf_file f;
    gguf_build_begin(&b, 3);
    if (p->model) build_key_string(&b, "tokenizer.ggml.model", p->model);
    if (p->pre) build_key_string(&b, "tokenizer.ggml.pre", p->pre);
    build_key_array(&b, "tokenizer.ggml.tokens", 8, 3), build_string(&b, "a"), build_string(&b, "b"),
        build_string(&b, "ab");
    if (p->n_types != UINT32_MAX) build_key_array(&b, "tokenizer.ggml.token_type", 5, p->n_types);
    for (uint32_t i = 0; p->n_types != UINT32_MAX && i < p->n_types; i++) build_u32(&b, 1);
    if (p->merge) build_key_array(&b, "tokenizer.ggml.merges", 8, 1), build_string(&b, p->merge);
    if (p->bos != UINT32_MAX) build_key_u32(&b, "tokenizer.ggml.bos_token_id", p->bos);
    if (p->unknown != UINT32_MAX) build_key_u32(&b, "tokenizer.ggml.unknown_token_id", p->unknown);
    if (p->add_bos >= 0) build_key_bool(&b, "tokenizer.ggml.add_bos_token", p->add_bos);
    if (p->prefix) build_key_bool(&b, "tokenizer.ggml.add_space_prefix", 1);
    ck_assert_int_eq(gguf_parse(&f, b.data, b.size, "parts.gguf", &err), KVB_OK);
    kvb_status status = tokenizer_from_gguf(t, &f, NULL, &err);
    gguf_close(&f);
    free(b.data);
    return status;
}

static void expect_parts_refused(parts p, kvb_status status, const char *part)
{
    tokenizer *t = (tokenizer *)&err; // anything but NULL
    kvb_status got = make_parts(&t, &p);
    ck_assert_msg(got == status && t == NULL, "'%s': expected %s, got %s", part, kvb_status_name(status),
                  kvb_status_name(got));
    ck_assert_msg(strstr(err.message, part) && strstr(err.message, "parts.gguf"), "'%s' is not in: %s", part,
                  err.message);
}
#define REFUSED(status, part, ...)             \
    do {                                       \
        parts p = WHOLE;                       \
        __VA_ARGS__;                           \
        expect_parts_refused(p, status, part); \
    } while (0)

UNIT_TEST(test_refusals)
{
    REFUSED(KVB_FORMAT, "tokenizer.ggml.model", p.model = NULL);
    REFUSED(KVB_FORMAT, "tokenizer.ggml.scores", p.model = "llama");
    REFUSED(KVB_UNSUPPORTED, "found 'bert'", p.model = "bert");
    REFUSED(KVB_UNSUPPORTED, "smollm, llama-bpe, qwen2, gpt-2", p.pre = NULL);
    REFUSED(KVB_UNSUPPORTED, "tekken, dbrx, found 'falcon'", p.pre = "falcon");
    REFUSED(KVB_FORMAT, "tokenizer.ggml.merges", p.merge = NULL);
    REFUSED(KVB_FORMAT, "entry 0, found 'b a'", p.merge = "b a");
    REFUSED(KVB_FORMAT, "entry 0, found 'ab'", p.merge = "ab");
    REFUSED(KVB_FORMAT, "entry 0, found ''", p.merge = "");
    REFUSED(KVB_FORMAT, "entry 0, found 'a '", p.merge = "a ");
    REFUSED(KVB_FORMAT, "as many as tokens, 3, found 2", p.n_types = 2);
    REFUSED(KVB_FORMAT, "below 3, found 3", p.bos = 3);
    REFUSED(KVB_FORMAT, "bos_token_id is missing", p.add_bos = 1);
    REFUSED(KVB_UNSUPPORTED, "add_space_prefix", p.prefix = true);
}

UNIT_TEST(test_incomplete_vocabularies)
{
    tokenizer *t;
    parts p = WHOLE;
    p.n_types = UINT32_MAX; // types are optional
    ck_assert_msg(make_parts(&t, &p) == KVB_OK, "%s", err.message);
    EXPECT_IDS(t, "abba", false, 2, 1, 0);
    EXPECT_IDS(t, "axab", false, 0,
               2); // no token for x and no unknown token: x vanishes, as in Hugging Face's tokenizers
    ck_assert(tokenizer_special(t).bos == -1 && tokenizer_special(t).eos == -1 && !tokenizer_special(t).add_bos);
    tokenizer_free(t);
    p.unknown = 2, p.bos = 2, p.pre = "llama-bpe";
    ck_assert_msg(make_parts(&t, &p) == KVB_OK, "%s", err.message);
    EXPECT_IDS(t, "axyzab", false, 0, 2, 2); // one unknown token for a run
    EXPECT_IDS(t, "x", false, 2);
    ck_assert(tokenizer_special(t).add_bos); // Llama 3 does, unless the file says otherwise
    tokenizer_free(t);
}

UNIT_TEST(test_hash)
{
    tokenizer *a = make("smollm"), *b = make("smollm"), *c = make("qwen2");
    ck_assert_uint_eq(strlen(tokenizer_sha256(a)), 64);
    ck_assert_str_eq(tokenizer_sha256(a), tokenizer_sha256(b));
    ck_assert_str_ne(tokenizer_sha256(a), tokenizer_sha256(c));
    // A fixed value, because records and tables on disk hold it.
    ck_assert_str_eq(tokenizer_sha256(a), "b9de9f0627da3e55fea83de63ae1394b6bdc610e55c5ea48219bc90347943904");
    tokenizer_free(a);
    tokenizer_free(b);
    tokenizer_free(c);
}

UNIT_MAIN("profiler: tokenizer")
