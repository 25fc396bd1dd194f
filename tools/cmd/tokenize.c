// kvbudget tokenize: what ids a text becomes, to compare with other tokenizers and to prepare files of ids.
#include "formats/file_read.h"
#include "formats/need.h"
#include "formats/npy.h"
#include "profiler/text/model_text.h"
#include "profiler/text/tokenizer.h"
#include "profiler/text/utf8.h"
#include "profiler/weights/gguf.h"
#include "runtime/fail.h"
#include "tools/cli.h"
#include "tools/terminal.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct settings {
    const char *bos, *pre, *npy;
    bool special, chat, json, decode;
} settings;

// The whole of a file or of standard input; unlike a mapping it may be empty or a pipe. *out is malloc'd.
static kvb_status read_text_or_stdin(const char *path, char **out, size_t *size, kvb_error *err)
{
    enum { PIECE = 1 << 16 };
    bool standard = strcmp(path, "-") == 0;
    FILE *file = standard ? stdin : fopen(path, "rb");
    if (!file) return kvb_fail(err, KVB_IO, "%s: cannot be opened: %s", path, strerror(errno));
    *size = 0;
    do {
        *out = need_more(*out, *size + PIECE, 1, "bytes of text");
        *size += fread(*out + *size, 1, PIECE, file);
    } while (!feof(file) && !ferror(file));
    kvb_status status = ferror(file) ? kvb_fail(err, KVB_IO, "%s: cannot be read: %s", path, strerror(errno)) : KVB_OK;
    if (!standard) (void)fclose(file); // only read
    return status;
}

static void print_ids(const tokenizer *t, const int32_t *ids, size_t n, const settings *s)
{
    if (s->json) {
        // Names of pre-tokenizers and hexadecimal digits need no escapes.
        printf("{\"pre\": \"%s\", \"tokenizer_sha256\": \"%s\", \"n_tokens\": %zu, \"ids\": [", tokenizer_pre(t),
               tokenizer_sha256(t), n);
    }
    for (size_t i = 0; i < n; i++) printf("%s%d", i == 0 ? "" : s->json ? ", " : " ", ids[i]);
    printf(s->json ? "]}\n" : "\n");
}

// The ids of a text, in its chat template where that is wished; *bos: BOS belongs in front of them.
static kvb_status encode_text(const tokenizer *t, const char *path, const settings *s, int32_t **ids, size_t *n,
                              bool *bos, kvb_error *err)
{
    char *text = NULL;
    size_t size = 0, begin = 0;
    chat_frame frame = {0};
    kvb_status status = read_text_or_stdin(path, &text, &size, err);
    if (status == KVB_OK && s->chat) status = chat_frame_of(&frame, t, "--chat", err);
    if (frame.trim) {
        begin = utf8_spaces_before(text, size);
        size -= utf8_spaces_behind(text + begin, size - begin);
    }
    *bos = s->chat ? frame.bos : tokenizer_special(t).add_bos;
    if (status == KVB_OK)
        status = tokenizer_encode_framed(t, s->chat ? frame.front : "", text + begin, size - begin,
                                         s->chat ? frame.back : "", s->special, ids, n, err);
    chat_frame_free(&frame);
    free(text);
    return status;
}

// ids[0] is room for BOS; the text's ids follow.
static kvb_status encode_file(const tokenizer *t, const char *path, const settings *s, int32_t **ids, size_t *n,
                              kvb_error *err)
{
    size_t n_text = 0;
    int32_t *text_ids = NULL;
    bool bos;
    kvb_status status = encode_text(t, path, s, &text_ids, &n_text, &bos, err);
    if (strcmp(s->bos, "auto") != 0) bos = strcmp(s->bos, "yes") == 0;
    if (status == KVB_OK && bos && tokenizer_special(t).bos < 0)
        status = kvb_fail(err, KVB_UNSUPPORTED,
                          "the model file has no BOS token (tokenizer.ggml.bos_token_id); use --bos no");
    if (status == KVB_OK) {
        *ids = need(n_text + 1, sizeof **ids, "ids");
        *n = 0;
        if (bos) (*ids)[(*n)++] = tokenizer_special(t).bos;
        memcpy(*ids + *n, text_ids, n_text * sizeof **ids);
        *n += n_text;
    }
    free(text_ids);
    return status;
}

// Of a GGUF file, or of a Hugging Face folder.
static kvb_status open_tokenizer(tokenizer **out, const char *path, const char *pre, kvb_error *err)
{
    struct stat info;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) {
        if (pre) return kvb_fail(err, KVB_ARGUMENT, "--pre: %s defines its own way of splitting words", path);
        return tokenizer_from_folder(out, path, err);
    }
    gguf_set set;
    kvb_status status = gguf_set_open(&set, path, err);
    if (status == KVB_OK) status = tokenizer_from_gguf(out, &set.files[0], pre, err);
    if (status == KVB_OK) status = gguf_set_check(&set, err);
    if (status != KVB_OK) {
        tokenizer_free(*out);
        *out = NULL;
    }
    gguf_set_close(&set);
    return status;
}

// The text of the ids in a .npy file, byte for byte as the tokens have it.
static kvb_status print_decoded(const tokenizer *t, const char *path, kvb_error *err)
{
    file_view view;
    npy_array array;
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    status = npy_parse(&array, view.data, view.size, path, err);
    int32_t *ids = status == KVB_OK ? need(array.count + 1, sizeof *ids, "ids") : NULL;
    if (status == KVB_OK) status = npy_to_i32(&array, ids, path, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    if (status == KVB_OK) {
        size_t size = tokenizer_decode(t, ids, array.count, NULL, 0);
        char *text = need(size + 1, 1, "bytes of text");
        tokenizer_decode(t, ids, array.count, text, size);
        terminal_put_bytes(text, size); // main looks at what became of it
        free(text);
    }
    free(ids);
    file_unmap(&view);
    return status;
}

static int tokenize_main(const cli_command *self, int argc, char **argv)
{
    settings s = {.bos = "auto"};
    const cli_option options[] = {
        {"bos", 0, CLI_CHOICE, &s.bos, "yes|no|auto",
         "put the model's BOS token in front; auto (default): as the file says"},
        {"chat", 0, CLI_FLAG, &s.chat, NULL, "take the text as a user's message in the model's own chat template"},
        {"special", 0, CLI_FLAG, &s.special, NULL,
         "take \"<|im_start|>\" and the like in the text as the tokens that they name"},
        {"pre", 0, CLI_TEXT, &s.pre, "NAME",
         "use this pre-tokenizer instead of the file's: smollm, llama-bpe, qwen2, gpt-2"},
        {"npy", 0, CLI_WRITES(FILE_ARRAY), &s.npy, "FILE",
         "write the ids to FILE as NumPy int32 instead of printing them"},
        {"json", 0, CLI_FLAG, &s.json, NULL, "print one JSON object with the ids and the tokenizer's hash"},
        {"decode", 0, CLI_FLAG, &s.decode, NULL, "TEXT is a .npy file of ids; print their text"},
        {0}};
    int first = 0;
    int code = cli_parse(self, options, argc, argv, &first);
    if (code != EXIT_DONE) return code < 0 ? EXIT_DONE : code;
    if (argc - first != 2) return cli_usage_error(self, "expected a model and a text file (or - for standard input)");
    if ((s.npy != NULL) + s.json + s.decode > 1)
        return cli_usage_error(self, "--npy, --json and --decode exclude each other");

    kvb_error err;
    tokenizer *t = NULL;
    int32_t *ids = NULL;
    size_t n = 0;
    kvb_status status = open_tokenizer(&t, argv[first], s.pre, &err);
    if (status == KVB_OK && s.decode) status = print_decoded(t, argv[first + 1], &err);
    else if (status == KVB_OK) status = encode_file(t, argv[first + 1], &s, &ids, &n, &err);
    if (status == KVB_OK && s.npy) status = npy_write(s.npy, NPY_I32, 1, &(uint64_t){n}, ids, &err);
    else if (status == KVB_OK && !s.decode) print_ids(t, ids, n, &s);
    free(ids);
    tokenizer_free(t);
    return status == KVB_OK ? EXIT_DONE : cli_failed(self, &err);
}

const cli_command cmd_tokenize = {
    .name = "tokenize",
    .synopsis = "tokenize MODEL TEXT",
    .summary = "print the token ids that a text becomes",
    .details =
        "Encodes the file TEXT (or standard input, -) with the tokenizer of the model, a GGUF file or a Hugging\n"
        "Face folder with a tokenizer.json, and prints the ids on one line. Text that is not UTF-8 is read as\n"
        "Python's errors='replace' reads it.\n"
        "\n"
        "Examples:\n"
        "  kvbudget tokenize model.gguf text.txt\n"
        "  echo 'Hello' | kvbudget tokenize model.gguf - --bos yes\n"
        "  kvbudget tokenize model.gguf text.txt --npy context_ids.npy\n",
    .run = tokenize_main,
};
