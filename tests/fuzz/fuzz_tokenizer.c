// The tokenizer in two ways, told apart by the first bytes: a GGUF file is used as a vocabulary, which then encodes the
// file itself; anything else is text (after one byte of options) for the tiny vocabulary, and decoding its ids must
// give it back.
#include "profiler/text/tokenizer.h"
#include "tests/fuzz/fuzz.h"
#include "tests/tiny_vocab.h"

static tokenizer *tiny[4];

static void make_tiny(void)
{
    static const char *const pres[] = {"smollm", "llama-bpe", "qwen2", "gpt-2"};
    for (int i = 0; i < 4 && !tiny[i]; i++) {
        gguf_build b;
        gguf_file f;
        gguf_build_begin(&b, 3);
        tiny_vocab_build(&b, pres[i]);
        if (gguf_parse(&f, b.data, b.size, "tiny", NULL) != KVB_OK ||
            tokenizer_from_gguf(&tiny[i], &f, NULL, NULL) != KVB_OK)
            abort();
        gguf_close(&f);
        free(b.data);
    }
}

static int32_t *encode(const tokenizer *t, const char *text, size_t size, bool special, size_t *n)
{
    int32_t *ids;
    if (tokenizer_encode(t, text, size, special, &ids, n, NULL) != KVB_OK) abort();
    for (size_t i = 0; i < *n; i++)
        if (ids[i] < 0 || (size_t)ids[i] >= tokenizer_size(t)) abort();
    return ids;
}

static char *decode(const tokenizer *t, const int32_t *ids, size_t n, size_t *size)
{
    *size = tokenizer_decode(t, ids, n, NULL, 0);
    char *text = malloc(*size + 1);
    if (!text || tokenizer_decode(t, ids, n, text, *size) != *size) abort();
    return text;
}

// The first decoding gives the text with broken UTF-8 repaired; encoding and decoding that must not change it again.
static void round_trip(const tokenizer *t, const char *text, size_t size, bool special)
{
    size_t n, n_again, repaired_size, again_size;
    int32_t *ids = encode(t, text, size, special, &n);
    char *repaired = decode(t, ids, n, &repaired_size);
    int32_t *ids_again = encode(t, repaired, repaired_size, special, &n_again);
    char *again = decode(t, ids_again, n_again, &again_size);
    if (repaired_size < size || n != n_again || memcmp(ids, ids_again, n * sizeof *ids) != 0) abort();
    if (again_size != repaired_size || memcmp(repaired, again, again_size) != 0) abort();
    free(ids);
    free(repaired);
    free(ids_again);
    free(again);
}

static void use_vocabulary(const uint8_t *data, size_t size)
{
    gguf_file f;
    tokenizer *t;
    kvb_error err;
    if (gguf_parse(&f, data, size, "input", &err) != KVB_OK) return;
    if (tokenizer_from_gguf(&t, &f, NULL, &err) == KVB_OK || tokenizer_from_gguf(&t, &f, "llama-bpe", &err) == KVB_OK) {
        size_t n, back;
        int32_t *ids = encode(t, (const char *)data, size, true, &n);
        free(decode(t, ids, n, &back));
        free(ids);
        tokenizer_free(t);
    }
    gguf_close(&f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) return 0;
    if (size >= 4 && memcmp(data, "GGUF", 4) == 0) {
        use_vocabulary(data, size);
        return 0;
    }
    make_tiny();
    round_trip(tiny[data[0] & 3], (const char *)data + 1, size - 1, data[0] & 4);
    return 0;
}
