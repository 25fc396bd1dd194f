#include "profiler/text/model_text.h"
#include "formats/need.h"
#include "profiler/text/jinja.h"
#include "profiler/text/utf8.h"
#include "profiler/weights/weights.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- The frame that a chat template puts around a message ----
//
// A template is a program (Jinja): it is run (jinja.h) on messages whose words it cannot know, and what surrounds
// them is the frame.

// Spaces that no template writes: they show whether it keeps the message's own.
#define PAD_BEFORE "\t \n\t"
#define PAD_BEHIND "\t\n \t"

static const char *frame_kind(const chat_frame *f)
{
    static const struct {
        const char *name, *mark; // the first one whose mark is in the frame applies
    } kinds[] = {{"phi4", "<|im_sep|>"},   {"chatml", "<|im_start|>"},   {"llama3", "<|start_header_id|>"},
                 {"gpt-oss", "<|start|>"}, {"gemma", "<start_of_turn>"}, {"mistral", "[INST]"},
                 {"phi3", "<|end|>"}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strstr(f->front, kinds[i].mark) || strstr(f->back, kinds[i].mark)) return kinds[i].name;
    return "other";
}

static kvb_status refuse_template(const char *name, const char *why, kvb_error *err)
{
    return kvb_fail(err, KVB_UNSUPPORTED,
                    "%s: chat template: %s; wrap the texts yourself and give --special in the place of --chat", name,
                    why);
}

// Runs the template; *front and *back, malloc'd, receive what it writes before and after `word`, pads included.
static kvb_status text_around(char **front, char **back, const char *template, const jinja_input *in, const char *word,
                              const char *name, kvb_error *err)
{
    char *text;
    *front = *back = NULL;
    kvb_status status = jinja_render(&text, template, in, name, err);
    if (status != KVB_OK) return status;
    const char *at = strstr(text, word);
    if (!at || strstr(at + 1, word)) {
        status = refuse_template(name, at ? "it writes the message twice" : "it does not write the message", err);
    } else {
        *front = need_text("%.*s", (int)(at - text), text);
        *back = need_text("%s", at + strlen(word));
    }
    free(text);
    return status;
}

// Removes the pads if the template has kept them; *trim: it has not. Returns false if it has kept one of them only.
static bool take_pads(char *front, char *back, bool *trim)
{
    size_t n = strlen(front), before = sizeof PAD_BEFORE - 1, behind = sizeof PAD_BEHIND - 1;
    bool left = n >= before && memcmp(front + n - before, PAD_BEFORE, before) == 0;
    bool right = strncmp(back, PAD_BEHIND, behind) == 0;
    if (left != right) return false;
    if (left) {
        front[n - before] = '\0';
        memmove(back, back + behind, strlen(back + behind) + 1);
    }
    *trim = !left;
    return true;
}

// Moves BOS from the front to f->bos.
static void take_bos(chat_frame *f, const char *bos)
{
    size_t n = bos ? strlen(bos) : 0;
    f->bos = n && strncmp(f->front, bos, n) == 0;
    if (f->bos) memmove(f->front, f->front + n, strlen(f->front + n) + 1);
}

kvb_status chat_frame_read(chat_frame *out, const char *template, const char *bos, const char *eos, const char *name,
                           kvb_error *err)
{
    static const char word[] = "Qmessage7", other[] = "It was,\n\n in 1999,  another\tone: \xC3\xA9!";
    char *front = NULL, *back = NULL;
    *out = (chat_frame){0};
    const jinja_input padded = {PAD_BEFORE "Qmessage7" PAD_BEHIND, bos, eos}, plain = {other, bos, eos};
    kvb_status status = text_around(&out->front, &out->back, template, &padded, word, name, err);
    if (status == KVB_OK && !take_pads(out->front, out->back, &out->trim))
        status = refuse_template(name, "it leaves out spaces on one side of the message only", err);
    if (status == KVB_OK) status = text_around(&front, &back, template, &plain, other, name, err);
    if (status == KVB_OK && (strcmp(front, out->front) != 0 || strcmp(back, out->back) != 0))
        status = refuse_template(name, "its output depends on the message", err);
    free_all(front, back);
    if (status != KVB_OK) {
        chat_frame_free(out);
        return status;
    }
    take_bos(out, bos);
    out->kind = frame_kind(out);
    return KVB_OK;
}

// Returns a token's text, malloc'd, or NULL if there is no such token.
static char *token_text(const tokenizer *t, int32_t id)
{
    if (id < 0) return NULL;
    size_t size = tokenizer_decode(t, &id, 1, NULL, 0);
    char *text = need(size + 1, 1, "bytes of a token");
    tokenizer_decode(t, &id, 1, text, size);
    return text;
}

kvb_status chat_frame_of(chat_frame *out, const tokenizer *t, const char *name, kvb_error *err)
{
    const char *template = tokenizer_chat_template(t);
    *out = (chat_frame){0};
    if (!template)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s: has no chat template; expected one in tokenizer_config.json, chat_template.jinja or the "
                        "GGUF file; leave out --chat",
                        name);
    char *bos = token_text(t, tokenizer_special(t).bos), *eos = token_text(t, tokenizer_special(t).eos);
    kvb_status status = chat_frame_read(out, template, bos, eos, name, err);
    free_all(bos, eos);
    return status;
}

void chat_frame_free(chat_frame *f)
{
    free_all(f->front, f->back);
    *f = (chat_frame){0};
}

// ---- Opening ----

static kvb_status read_id(int32_t *out, const weights *w, weight_key key, uint32_t vocabulary, kvb_error *err)
{
    double id = -1;
    bool found;
    char name[96];
    kvb_status status = weights_number(w, key, &id, &found, err);
    if (status == KVB_OK && found && !(id >= 0 && id < vocabulary))
        return kvb_fail(err, KVB_FORMAT, "%s: %s: expected a token id below %u, found %.10g; the file is damaged",
                        w->name, weights_key_name(w, key, name), vocabulary, id);
    *out = (int32_t)id;
    return status;
}

// For models without a tokenizer: only what the files state. A tokenizer also knows the defaults of its kind.
static kvb_status read_special_ids(model_text *t, const weights *w, kvb_error *err)
{
    double add_bos = 0;
    bool found;
    kvb_status status = read_id(&t->special.bos, w, WEIGHT_BOS, t->vocabulary, err);
    if (status == KVB_OK) status = read_id(&t->special.eos, w, WEIGHT_EOS, t->vocabulary, err);
    if (status == KVB_OK) status = read_id(&t->special.eot, w, WEIGHT_EOT, t->vocabulary, err);
    if (status == KVB_OK) status = weights_number(w, WEIGHT_ADD_BOS, &add_bos, &found, err);
    t->special.add_bos = add_bos != 0;
    return status;
}

// A token without a row is never decoded, and cannot be put in front of a text.
static int32_t id_with_row(int32_t id, uint32_t vocabulary)
{
    return id >= 0 && (uint32_t)id < vocabulary ? id : -1;
}

kvb_status tokenizer_open(tokenizer **out, const weights *w, const char *pre, kvb_error *err)
{
    const gguf_file *file = weights_gguf_file(w);
    const char *folder = weights_folder_path(w);
    *out = NULL;
    if (file) return tokenizer_from_gguf(out, file, pre, err);
    if (pre)
        return kvb_fail(err, KVB_ARGUMENT, "--pre: %s defines its own way of splitting words; leave it out", folder);
    return tokenizer_from_folder(out, folder, err);
}

static kvb_status read_tokenizer(model_text *t, const weights *w, const model_text_options *o, kvb_error *err)
{
    kvb_error unread;
    if (o->without_tokenizer) return read_special_ids(t, w, err);
    kvb_status status = tokenizer_open(&t->tokens, w, o->pre, &unread);
    if (status != KVB_OK && o->for_plan && !o->pre) return KVB_OK;
    if (status != KVB_OK) return kvb_fail(err, status, "%s", unread.message);
    const special_ids own = tokenizer_special(t->tokens);
    t->special = (special_ids){id_with_row(own.bos, t->vocabulary), id_with_row(own.eos, t->vocabulary),
                               id_with_row(own.eot, t->vocabulary), own.add_bos};
    if (t->special.add_bos && t->special.bos < 0)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: texts begin with token %d (BOS), but the embedding has %u rows; expected a tokenizer of "
                        "this model",
                        t->name, own.bos, t->vocabulary);
    return KVB_OK;
}

kvb_status model_text_open(model_text *out, const weights *w, uint32_t vocabulary, const model_text_options *options,
                           kvb_error *err)
{
    const model_text_options none = {0};
    *out = (model_text){.vocabulary = vocabulary};
    snprintf(out->name, sizeof out->name, "%s", w->name);
    kvb_status status = read_tokenizer(out, w, options ? options : &none, err);
    if (status != KVB_OK) model_text_close(out);
    return status;
}

void model_text_close(model_text *t)
{
    tokenizer_free(t->tokens);
    chat_frame_free(&t->chat);
    *t = (model_text){.tokens = NULL};
}

kvb_status model_text_use_chat(model_text *t, kvb_error *err)
{
    if (!t->tokens)
        return kvb_fail(err, KVB_ARGUMENT,
                        "--chat wraps texts, but only token ids are given, which are taken as they are");
    chat_frame_free(&t->chat);
    return chat_frame_of(&t->chat, t->tokens, t->name, err);
}

bool model_text_begins_with_bos(const model_text *t)
{
    return t->special.bos >= 0 && (t->chat.kind ? t->chat.bos : t->special.add_bos);
}

bool model_text_ends_answer(const model_text *t, int32_t id)
{
    bool listed = t->tokens && tokenizer_is_end(t->tokens, id); // generation_config.json may name several
    return id >= 0 && (listed || id == t->special.eos || id == t->special.eot);
}

// ---- Encoding and decoding ----

// Tokens that were added to a vocabulary have no row if nobody has made the embedding longer; transformers' conversion
// from GGUF adds such tokens. They do no harm until a text contains one.
static kvb_status check_embedding_rows(const model_text *t, const int32_t *ids, size_t n, kvb_error *err)
{
    for (size_t i = 0; i < n; i++) {
        if (ids[i] >= 0 && (uint32_t)ids[i] < t->vocabulary) continue;
        char text[33];
        size_t size = tokenizer_decode(t->tokens, &ids[i], 1, text, sizeof text - 1);
        text[size < sizeof text ? size : sizeof text - 1] = '\0';
        return kvb_fail(err, KVB_ARGUMENT,
                        "token %zu of the text is \"%s\" with id %d, but the embedding has %u rows: the tokenizer was "
                        "given tokens that the model does not know; leave it out of the text",
                        i, text, ids[i], t->vocabulary);
    }
    return KVB_OK;
}

static kvb_status encode_framed(const model_text *t, const char *front, const char *text, size_t size, const char *back,
                                int32_t **ids, size_t *n, kvb_error *err)
{
    enum { BYTES_PER_TOKEN = 4 }; // of a plan's guess
    if (!t->tokens) {
        *n = size / BYTES_PER_TOKEN + 1;
        *ids = need(*n, sizeof **ids, "token ids");
        return KVB_OK;
    }
    kvb_status status = tokenizer_encode_framed(t->tokens, front, text, size, back, t->parse_special, ids, n, err);
    if (status == KVB_OK) status = check_embedding_rows(t, *ids, *n, err);
    if (status == KVB_OK) return KVB_OK;
    free(*ids);
    *ids = NULL;
    *n = 0;
    return status;
}

kvb_status model_text_encode(const model_text *t, text_part part, const char *text, size_t size, int32_t **ids,
                             size_t *n, kvb_error *err)
{
    const chat_frame *f = &t->chat;
    if (!f->kind || part == TEXT_ALONE) return encode_framed(t, "", text, size, "", ids, n, err);
    if (part == TEXT_CONTEXT) {
        size_t left_out = f->trim ? utf8_spaces_before(text, size) : 0;
        return encode_framed(t, f->front, text + left_out, size - left_out, "", ids, n, err);
    }
    if (f->trim) size -= utf8_spaces_behind(text, size);
    return encode_framed(t, "", text, size, f->back, ids, n, err);
}

kvb_status model_text_encode_question(const model_text *t, const char *text, const char *answer_prefix, int32_t **ids,
                                      size_t *n, kvb_error *err)
{
    const chat_frame *f = &t->chat;
    size_t size = strlen(text);
    char *joined = need_text("%s%s", f->kind ? f->back : text, answer_prefix);
    if (f->kind && f->trim) size -= utf8_spaces_behind(text, size);
    kvb_status status = f->kind ? encode_framed(t, "", text, size, joined, ids, n, err)
                                : encode_framed(t, "", joined, strlen(joined), "", ids, n, err);
    free(joined);
    return status;
}

char *model_text_decode(const model_text *t, const int32_t *ids, size_t n, size_t *size)
{
    size_t bytes = tokenizer_decode(t->tokens, ids, n, NULL, 0);
    char *text = need(bytes + 1, 1, "characters");
    tokenizer_decode(t->tokens, ids, n, text, bytes);
    if (size) *size = bytes;
    return text;
}
