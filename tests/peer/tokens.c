// Prints the token ids of a text, or the text of ids, to compare with other tokenizers (tests/peer/compare_tokens.py,
// train_tokenizers.py, compare_chat.py).
//
// usage: tokens MODEL TEXT [--bos yes|no|auto] [--chat] [--special] [--pre NAME] [--npy FILE | --hash]
//        tokens MODEL IDS.npy --decode
// Prints the ids on one line, or writes them as int32. TEXT is a file, or - for standard input. --hash prints the
// tokenizer's hash.
#include "formats/file_read.h"
#include "formats/need.h"
#include "formats/npy.h"
#include "profiler/text/model_text.h"
#include "profiler/text/utf8.h"
#include "profiler/weights/gguf.h"
#include "runtime/fail.h"
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char *bos = "auto", *pre, *npy;
static int special, chat, hash, decode;

// Reads all of a file or of standard input, which may be empty or a pipe.
static kvb_status read_text(const char *path, char **out, size_t *size, kvb_error *err)
{
    enum { PIECE = 1 << 16 };
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
    if (!file) return kvb_fail(err, KVB_IO, "%s: cannot be opened", path);
    do {
        *out = need_more(*out, *size + PIECE, 1, "bytes of text");
        *size += fread(*out + *size, 1, PIECE, file);
    } while (!feof(file) && !ferror(file));
    kvb_status status = ferror(file) ? kvb_fail(err, KVB_IO, "%s: cannot be read", path) : KVB_OK;
    (void)fclose(file); // only read
    return status;
}

static kvb_status encode(const tokenizer *t, const char *path, kvb_error *err)
{
    char *text = NULL;
    int32_t *ids = NULL;
    size_t size = 0, begin = 0, n = 0;
    chat_frame frame = {0};
    kvb_status status = read_text(path, &text, &size, err);
    if (status == KVB_OK && chat) status = chat_frame_of(&frame, t, "--chat", err);
    if (frame.trim) {
        begin = utf8_spaces_before(text, size);
        size -= utf8_spaces_behind(text + begin, size - begin);
    }
    bool first = strcmp(bos, "auto") != 0 ? strcmp(bos, "yes") == 0 : chat ? frame.bos : tokenizer_special(t).add_bos;
    if (status == KVB_OK)
        status = tokenizer_encode_framed(t, chat ? frame.front : "", text + begin, size - begin, chat ? frame.back : "",
                                         special, &ids, &n, err);
    int32_t *all = need(n + 1, sizeof *all, "ids");
    all[0] = tokenizer_special(t).bos;
    if (n) memcpy(all + first, ids, n * sizeof *ids);
    n += first;
    if (status == KVB_OK && npy) status = npy_write(npy, NPY_I32, 1, &(uint64_t){n}, all, err);
    for (size_t i = 0; status == KVB_OK && !npy && i < n; i++) printf("%s%d", i ? " " : "", all[i]);
    if (status == KVB_OK && !npy) puts("");
    chat_frame_free(&frame);
    free(all);
    free(ids);
    free(text);
    return status;
}

static kvb_status print_text(const tokenizer *t, const char *path, kvb_error *err)
{
    file_view view;
    npy_array array;
    kvb_status status = file_map(&view, path, err);
    if (status == KVB_OK) status = npy_parse(&array, view.data, view.size, path, err);
    if (status != KVB_OK) return status;
    int32_t *ids = need(array.count + 1, sizeof *ids, "ids");
    status = npy_to_i32(&array, ids, path, err);
    size_t size = status == KVB_OK ? tokenizer_decode(t, ids, array.count, NULL, 0) : 0;
    char *text = need(size + 1, 1, "bytes of text");
    if (status == KVB_OK) tokenizer_decode(t, ids, array.count, text, size);
    fwrite(text, 1, size, stdout);
    free(text);
    free(ids);
    file_unmap(&view);
    return status;
}

// Opens the tokenizer of a GGUF file, which needs no weights, or of a Hugging Face folder.
static kvb_status open_tokenizer(tokenizer **out, const char *path, kvb_error *err)
{
    struct stat info;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) return tokenizer_from_folder(out, path, err);
    gguf_set set;
    kvb_status status = gguf_set_open(&set, path, err);
    if (status == KVB_OK) status = tokenizer_from_gguf(out, &set.files[0], pre, err);
    gguf_set_close(&set);
    return status;
}

int main(int argc, char **argv)
{
    const struct option options[] = {
        {"bos", 1, NULL, 'b'},       {"pre", 1, NULL, 'p'}, {"npy", 1, NULL, 'n'},     {"chat", 0, &chat, 1},
        {"special", 0, &special, 1}, {"hash", 0, &hash, 1}, {"decode", 0, &decode, 1}, {0}};
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == '?') return 2;
        if (c) *(c == 'b' ? &bos : c == 'p' ? &pre : &npy) = optarg;
    }
    if (argc - optind != 2) {
        fprintf(stderr, "tokens: expected a model and a text\n");
        return 2;
    }
    kvb_error err = {0};
    tokenizer *t = NULL;
    kvb_status status = open_tokenizer(&t, argv[optind], &err);
    if (status == KVB_OK && hash) puts(tokenizer_sha256(t));
    else if (status == KVB_OK) status = (decode ? print_text : encode)(t, argv[optind + 1], &err);
    tokenizer_free(t);
    if (status != KVB_OK) fprintf(stderr, "tokens: %s\n", err.message);
    return status != KVB_OK;
}
