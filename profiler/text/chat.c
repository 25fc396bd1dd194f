#include "profiler/text/chat.h"
#include "formats/need.h"
#include "profiler/text/jinja.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Spaces that no template writes, so that it shows whether the message's own are there.
#define PAD_BEFORE "\t \n\t"
#define PAD_BEHIND "\t\n \t"

static const char *kind_of(const chat_frame *f)
{
    static const struct {
        const char *name, *mark; // the first whose mark the frame has
    } kinds[] = {{"phi4", "<|im_sep|>"},   {"chatml", "<|im_start|>"},   {"llama3", "<|start_header_id|>"},
                 {"gpt-oss", "<|start|>"}, {"gemma", "<start_of_turn>"}, {"mistral", "[INST]"},
                 {"phi3", "<|end|>"}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strstr(f->front, kinds[i].mark) || strstr(f->back, kinds[i].mark)) return kinds[i].name;
    return "other";
}

static kvb_status refuse(const char *name, const char *why, kvb_error *err)
{
    return kvb_fail(err, KVB_UNSUPPORTED,
                    "%s: chat template: %s; wrap the texts yourself and give --special in the place of --chat", name,
                    why);
}

// What the template writes before and behind `message`, with its pads; both malloc'd.
static kvb_status around(char **front, char **back, const char *template, const jinja_input *in, const char *word,
                         const char *name, kvb_error *err)
{
    char *text;
    *front = *back = NULL;
    kvb_status status = jinja_render(&text, template, in, name, err);
    if (status != KVB_OK) return status;
    const char *at = strstr(text, word);
    if (!at || strstr(at + 1, word)) {
        status = refuse(name, at ? "it writes the message twice" : "it does not write the message", err);
    } else {
        *front = need_text("%.*s", (int)(at - text), text);
        *back = need_text("%s", at + strlen(word));
    }
    free(text);
    return status;
}

// Takes the pads off that the template has left; false: it left some of the spaces.
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

// BOS belongs to the text's begin, not to the front.
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
    kvb_status status = around(&out->front, &out->back, template, &padded, word, name, err);
    if (status == KVB_OK && !take_pads(out->front, out->back, &out->trim))
        status = refuse(name, "it leaves out spaces on one side of the message only", err);
    if (status == KVB_OK) status = around(&front, &back, template, &plain, other, name, err);
    if (status == KVB_OK && (strcmp(front, out->front) != 0 || strcmp(back, out->back) != 0))
        status = refuse(name, "what it writes depends on the message", err);
    free(front);
    free(back);
    if (status != KVB_OK) {
        chat_frame_free(out);
        return status;
    }
    take_bos(out, bos);
    out->kind = kind_of(out);
    return KVB_OK;
}

// A token's text; NULL: there is no such token.
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
    free(bos);
    free(eos);
    return status;
}

void chat_frame_free(chat_frame *f)
{
    free(f->front);
    free(f->back);
    *f = (chat_frame){0};
}
