// A tokenizer from the files of a Hugging Face folder: tokenizer.json (the steps, BPE vocabulary and merges),
// tokenizer_config.json, generation_config.json and chat_template.jinja.
#include "profiler/text/tokenizer_json.h"
#include "formats/file_read.h"
#include "formats/sha256.h"
#include "profiler/text/tokenizer_json_parts.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int32_t find_text(const tokenizer *t, const char *text)
{
    return text ? (int32_t)vocabulary_find(&t->v, text, strlen(text)) : -1;
}

// The token that TemplateProcessing puts in front of a text, or -1.
static int32_t template_bos(const tokenizer *t, const cJSON *processor)
{
    int32_t found = -1;
    const cJSON *inner;
    cJSON_ArrayForEach(inner, json_item(processor, "processors")) if (found < 0) found = template_bos(t, inner);
    if (!json_is_type(processor, "TemplateProcessing")) return found;
    const cJSON *first = json_item(json_item(processor, "single"), "SpecialToken");
    if (!first && json_item(processor, "single"))
        first = json_item(json_item(processor, "single")->child, "SpecialToken");
    return first ? find_text(t, json_string(first, "id")) : found;
}

// A token of tokenizer_config.json: its text, or an object with `content`.
static const char *config_token(const cJSON *config, const char *key)
{
    const char *text = json_string(config, key);
    return text ? text : json_string(json_item(config, key), "content");
}

static kvb_status read_ends(const json_reader *r, const cJSON *generation)
{
    const cJSON *end = json_item(generation, "eos_token_id"), *one;
    kvb_status status = tokenizer_add_end(r->t, r->t->eos, r->err);
    if (status == KVB_OK && cJSON_IsNumber(end)) status = tokenizer_add_end(r->t, (int32_t)json_id(end), r->err);
    if (cJSON_IsArray(end))
        cJSON_ArrayForEach(one, end) if (status == KVB_OK) status =
            tokenizer_add_end(r->t, (int32_t)json_id(one), r->err);
    return status;
}

static kvb_status read_template(const json_reader *r, const cJSON *config)
{
    const cJSON *found = json_item(config, "chat_template"), *entry;
    const char *text = cJSON_IsString(found) ? found->valuestring : NULL;
    if (cJSON_IsArray(found)) {
        cJSON_ArrayForEach(entry, found)
        {
            const char *name = json_string(entry, "name");
            if (!text || (name && strcmp(name, "default") == 0)) text = json_string(entry, "template");
        }
    }
    if (!text) return KVB_OK;
    r->t->chat_template = strdup(text);
    return r->t->chat_template ? KVB_OK : json_no_memory(r);
}

static kvb_status read_configs(const json_reader *r, const cJSON *root, const cJSON *config, const cJSON *generation)
{
    tokenizer *t = r->t;
    int32_t front = template_bos(t, json_item(root, "post_processor"));
    t->bos = find_text(t, config_token(config, "bos_token"));
    if (t->bos < 0) t->bos = front;
    t->eos = find_text(t, config_token(config, "eos_token"));
    t->add_bos = t->bos >= 0 && (front == t->bos || json_flag(config, "add_bos_token", false));
    kvb_status status = read_ends(r, generation);
    return status == KVB_OK ? read_template(r, config) : status;
}

// A space goes off the front of decoded text where one was put there.
static void read_decoder(const json_reader *r)
{
    const normal_list *lists[] = {&r->t->normal, &r->t->before_words};
    for (int k = 0; k < 2; k++)
        for (size_t i = 0; i < lists[k]->n; i++)
            if (lists[k]->steps[i].kind == NORMAL_PREPEND && !r->t->byte_level) r->t->strip_first = true;
}

static kvb_status fill(const json_reader *r, const cJSON *root, const cJSON *config, const cJSON *generation)
{
    kvb_status status = tokenizer_set_pre(r->t, "tokenizer.json", r->err);
    if (status == KVB_OK) status = json_read_steps(r, root);
    if (status == KVB_OK) status = json_read_vocabulary(r, root);
    if (status == KVB_OK) status = json_read_added(r, root);
    if (status != KVB_OK) return status;
    tokenizer_find_bytes(r->t);
    read_decoder(r);
    return read_configs(r, root, config, generation);
}

static cJSON *parse(const json_reader *r, json_text text, const char *what, kvb_status *status)
{
    if (*status != KVB_OK || !text.data) return NULL;
    const char *end = NULL;
    bool no_memory;
    cJSON *root = kvb_json_parse(text.data, text.size, &end, &no_memory);
    if (no_memory) *status = kvb_fail(r->err, KVB_MEMORY, "%s: %s: not enough memory", r->name, what);
    else if (!root)
        *status = kvb_fail(r->err, KVB_FORMAT, "%s: %s: not JSON, near byte %zu", r->name, what,
                           end ? (size_t)(end - text.data) : 0);
    return root;
}

// cJSON ends a string at its first NUL: a copy with \ufdd0, a noncharacter, for each \u0000 (tokenizer_json_vocab.c
// turns it back). *copy is NULL where the text has none, and the caller's to free.
static kvb_status hide_nul(const json_reader *r, json_text *text, char **copy)
{
    static const char nul[] = "\\u0000";
    *copy = NULL;
    if (!text->data || !memmem(text->data, text->size, nul, 6)) return KVB_OK;
    *copy = malloc(text->size);
    if (!*copy) return json_no_memory(r);
    memcpy(*copy, text->data, text->size);
    for (size_t at = 0; at + 6 <= text->size; at += (*copy)[at] == '\\' ? 2 : 1)
        if (memcmp(*copy + at, nul, 6) == 0) memcpy(*copy + at, "\\ufdd0", 6);
    text->data = *copy;
    return KVB_OK;
}

kvb_status tokenizer_from_json(tokenizer **out, const char *name, json_text tokens, json_text config,
                               json_text generation, kvb_error *err)
{
    *out = NULL;
    json_reader r = {tokenizer_new(), name, err};
    if (!r.t) return json_no_memory(&r);
    char *copy;
    json_text plain = tokens;
    kvb_status status = hide_nul(&r, &plain, &copy);
    cJSON *root = parse(&r, plain, "tokenizer.json", &status);
    cJSON *settings = parse(&r, config, "tokenizer_config.json", &status);
    cJSON *ends = parse(&r, generation, "generation_config.json", &status);
    if (status == KVB_OK) status = fill(&r, root, settings, ends);
    if (status == KVB_OK) status = sha256_hex(tokens.data, tokens.size, r.t->sha256, err);
    cJSON_Delete(root);
    free(copy);
    cJSON_Delete(settings);
    cJSON_Delete(ends);
    if (status == KVB_OK) *out = r.t;
    else tokenizer_free(r.t);
    return status;
}

// ---- the files ----

// A file of the folder; one that is not there is a zero view.
static kvb_status map_if_there(file_view *out, const char *folder, const char *file, kvb_error *err)
{
    *out = (file_view){0};
    char *path;
    if (asprintf(&path, "%s/%s", folder, file) < 0) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory", folder);
    kvb_status status = access(path, F_OK) == 0 ? file_map(out, path, err) : KVB_OK;
    free(path);
    return status;
}

static kvb_status read_jinja(tokenizer *t, const char *folder, kvb_error *err)
{
    file_view view;
    kvb_status status = map_if_there(&view, folder, "chat_template.jinja", err);
    if (status == KVB_OK && view.data) {
        free(t->chat_template);
        t->chat_template = strndup((const char *)view.data, view.size);
        if (!t->chat_template) status = kvb_fail(err, KVB_MEMORY, "%s: not enough memory for a chat template", folder);
    }
    if (status == KVB_OK) status = file_check(&view, folder, err);
    file_unmap(&view);
    return status;
}

static json_text as_text(file_view view)
{
    return (json_text){(const char *)view.data, view.size};
}

kvb_status tokenizer_from_folder(tokenizer **out, const char *folder, kvb_error *err)
{
    *out = NULL;
    file_view tokens = {0}, config = {0}, generation = {0};
    kvb_status status = map_if_there(&tokens, folder, "tokenizer.json", err);
    if (status == KVB_OK && !tokens.data)
        status = kvb_fail(err, KVB_IO,
                          "%s: expected a tokenizer.json; write one with transformers: "
                          "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), or give token ids",
                          folder);
    if (status == KVB_OK) status = map_if_there(&config, folder, "tokenizer_config.json", err);
    if (status == KVB_OK) status = map_if_there(&generation, folder, "generation_config.json", err);
    if (status == KVB_OK)
        status = tokenizer_from_json(out, folder, as_text(tokens), as_text(config), as_text(generation), err);
    const file_view *const read[] = {&tokens, &config, &generation};
    for (int i = 0; i < 3 && status == KVB_OK; i++) status = file_check(read[i], folder, err);
    if (status == KVB_OK) status = read_jinja(*out, folder, err);
    if (status != KVB_OK) {
        tokenizer_free(*out);
        *out = NULL;
    }
    file_unmap(&tokens);
    file_unmap(&config);
    file_unmap(&generation);
    return status;
}
