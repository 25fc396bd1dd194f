#include "tools/cmd/tune_texts.h"
#include "formats/atomic_file.h"
#include "formats/calib.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "profiler/calib_make.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include "tools/cli.h"
#include <dirent.h>
#include <stdlib.h>
#include <string.h>

enum { OWN_CONTEXTS = 4, SELECT_EVERY = 3 };

static int is_text_name(const struct dirent *d)
{
    return kvb_ends_with(d->d_name, ".txt") || kvb_ends_with(d->d_name, ".jsonl");
}

// Reads the text of a file, or the first context of calibration data. The caller frees *text, also after a failure.
static kvb_status read_tune_text(char **text, size_t *size, const char *path, kvb_error *err)
{
    if (kvb_ends_with(path, ".jsonl")) {
        calib_file from;
        kvb_status status = calib_load(&from, path, err);
        if (status != KVB_OK) return status;
        if (from.contexts[0].context) *text = need_text("%s", from.contexts[0].context);
        else status = kvb_fail(err, KVB_ARGUMENT, "%s: expected texts, found token ids", path);
        *size = *text ? strlen(*text) : 0;
        calib_free(&from);
        return status;
    }
    return cli_read_text(text, size, path, err);
}

// Adds a text, unless it is too short. Takes ownership of the path, which is malloc'd.
static kvb_status add_tune_text(tune_texts *t, char *path, tune_part part, bool own, const tokenizer *tokens,
                                size_t least, kvb_error *err)
{
    tune_text one = {path, part, own, 0, ""};
    char *text = NULL;
    size_t size = 0;
    int32_t *ids = NULL;
    kvb_status status = read_tune_text(&text, &size, path, err);
    if (status == KVB_OK) status = tokenizer_encode(tokens, text, size, false, &ids, &one.n_tokens, err);
    if (status == KVB_OK) sha256_hex(text, size, one.sha256);
    free_all(text, ids);
    for (size_t i = 0; i < t->count && status == KVB_OK; i++)
        if (strcmp(t->items[i].sha256, one.sha256) == 0)
            status = kvb_fail(err, KVB_ARGUMENT, "%s: the same text as %s; give it once", path, t->items[i].path);
    if (status == KVB_OK && own && one.n_tokens < least)
        status = kvb_fail(err, KVB_ARGUMENT, "%s: %zu tokens, expected at least %zu; give a longer text or --tokens",
                          path, one.n_tokens, least);
    if (status != KVB_OK || one.n_tokens < least) {
        t->too_short += status == KVB_OK;
        free(path);
        return status;
    }
    t->items = need_more(t->items, t->count + 1, sizeof *t->items, "texts");
    t->items[t->count++] = one;
    return KVB_OK;
}

static kvb_status add_folder(tune_texts *t, const char *data, const char *folder, tune_part part, uint32_t select_every,
                             const tokenizer *tokens, size_t least, kvb_error *err)
{
    struct dirent **names;
    char *where = need_text("%s%s", data, folder);
    int n = scandir(where, &names, is_text_name, alphasort);
    kvb_status status = n < 0 ? kvb_fail(err, KVB_IO, "%s: cannot be listed", where) : KVB_OK;
    for (int i = 0; i < n; i++) {
        tune_part its = select_every && i % (int)select_every == 0 ? PART_SELECT : part;
        if (status == KVB_OK)
            status = add_tune_text(t, need_text("%s/%s", where, names[i]->d_name), its, false, tokens, least, err);
        free(names[i]);
    }
    if (n >= 0) free(names);
    free(where);
    return status;
}

kvb_status tune_texts_open(tune_texts *t, char *const *own, size_t n_own, const tokenizer *tokens, uint32_t n_tokens,
                           uint32_t n_next, kvb_error *err)
{
    static const tune_part turns[] = {PART_CALIBRATE, PART_CALIBRATE, PART_SELECT, PART_JUDGE};
    size_t least = (size_t)n_tokens + n_next;
    char *data = NULL;
    *t = (tune_texts){0};
    kvb_status status = cli_program_folder(&data, "KVBUDGET_DATA", "calib-data", "texts", err);
    for (size_t i = 0; i < n_own && status == KVB_OK; i++)
        status = add_tune_text(t, need_text("%s", own[i]), turns[i % 4], true, tokens, least, err);
    if (status == KVB_OK) status = add_folder(t, data, "", PART_CALIBRATE, 0, tokens, least, err);
    if (status == KVB_OK) status = add_folder(t, data, "/plain", PART_CALIBRATE, SELECT_EVERY, tokens, least, err);
    if (status == KVB_OK) status = add_folder(t, data, "/eval", PART_JUDGE, 0, tokens, least, err);
    free(data);
    for (int p = 0; p < PART_COUNT && status == KVB_OK; p++)
        if (tune_texts_count(t, (tune_part)p) == 0)
            status = kvb_fail(err, KVB_ARGUMENT, "no text of %zu tokens is left to %s on; give longer ones or --tokens",
                              least, (const char *[]){"calibrate", "choose", "judge"}[p]);
    if (status != KVB_OK) tune_texts_close(t);
    return status;
}

void tune_texts_close(tune_texts *t)
{
    for (size_t i = 0; i < t->count; i++) free(t->items[i].path);
    free(t->items);
    *t = (tune_texts){0};
}

size_t tune_texts_count(const tune_texts *t, tune_part part)
{
    size_t n = 0;
    for (size_t i = 0; i < t->count; i++) n += t->items[i].part == part;
    return n;
}

void tune_texts_limit(tune_texts *t, tune_part part, size_t most)
{
    size_t kept = 0, seen = 0;
    for (size_t i = 0; i < t->count; i++) {
        bool its = t->items[i].part == part;
        seen += its;
        if (its && seen > most) free(t->items[i].path);
        else t->items[kept++] = t->items[i];
    }
    t->count = kept;
}

size_t tune_text_contexts(const tune_text *t, size_t length)
{
    size_t fits = t->n_tokens / length, most = t->own && t->part == PART_CALIBRATE ? OWN_CONTEXTS : 1;
    return fits < 1 ? 1 : fits < most ? fits : most;
}

static kvb_status make_contexts(calib_file *made, const tune_text *text, calib_recipe recipe, const tokenizer *tokens,
                                kvb_error *err)
{
    char *bytes = NULL;
    size_t size = 0;
    recipe.n_contexts = tune_text_contexts(text, recipe.n_tokens + recipe.n_answer);
    if (text->n_tokens < recipe.n_tokens + recipe.n_answer)
        recipe.n_answer = text->n_tokens - recipe.n_tokens; // at least what tune_texts_open asks for
    kvb_status status = read_tune_text(&bytes, &size, text->path, err);
    if (status == KVB_OK && recipe.n_lines) { // a text may lack lines to ask for
        calib_file trial = {0};
        if (calib_make_of_text(&trial, &recipe, tokens, text->path, bytes, size, NULL) != KVB_OK) recipe.n_lines = 0;
        calib_free(&trial);
    }
    if (status == KVB_OK) status = calib_make_of_text(made, &recipe, tokens, text->path, bytes, size, err);
    free(bytes);
    return status;
}

kvb_status tune_texts_write(const tune_texts *t, size_t first, size_t last, const tokenizer *tokens, uint32_t n_tokens,
                            uint32_t n_answer, uint32_t n_lines, const char *path, kvb_error *err)
{
    const calib_recipe recipe = {
        .n_tokens = n_tokens, .n_lines = n_lines, .n_continued = 1, .n_answer = n_answer, .seed = 1};
    calib_file made = {0};
    atomic_file file;
    kvb_status status = KVB_OK;
    for (size_t i = 0, seen = 0; i < t->count && status == KVB_OK; i++) {
        if (t->items[i].part != PART_CALIBRATE || seen++ < first || seen > last) continue;
        status = make_contexts(&made, &t->items[i], recipe, tokens, err);
    }
    if (status == KVB_OK) status = atomic_file_begin(&file, path, err);
    for (size_t i = 0; i < made.count && status == KVB_OK; i++) calib_write_line(file.stream, &made.contexts[i]);
    if (status == KVB_OK) status = atomic_file_commit(&file, err);
    calib_free(&made);
    return status;
}
