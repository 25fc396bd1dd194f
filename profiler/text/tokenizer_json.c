// A tokenizer from the files of a Hugging Face folder: tokenizer.json (the steps, BPE vocabulary and merges),
// tokenizer_config.json, generation_config.json and chat_template.jinja.
//
// Steps that are known are carried out as Hugging Face's tokenizers do; one that is not known is refused by name, since
// leaving it out would silently give other ids.
#include "formats/file_read.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "profiler/text/tokenizer_parts.h"
#include "profiler/weights/first_error.h"
#include "runtime/json.h"
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// The first error is kept; what is read after it is not used.
typedef struct json_reader {
    tokenizer *t;
    const char *name; // folder, for messages
    kvb_error *err;
    kvb_status status;
} json_reader;

static const cJSON *json_item(const cJSON *object, const char *key)
{
    return cJSON_GetObjectItemCaseSensitive(object, key);
}

static const char *json_string(const cJSON *object, const char *key)
{
    const cJSON *found = json_item(object, key);
    return cJSON_IsString(found) ? found->valuestring : NULL;
}

static bool json_is_type(const cJSON *step, const char *type)
{
    const char *text = json_string(step, "type");
    return text && strcmp(text, type) == 0;
}

static bool json_flag(const cJSON *object, const char *key, bool otherwise)
{
    const cJSON *found = json_item(object, key);
    return cJSON_IsBool(found) ? cJSON_IsTrue(found) : otherwise;
}

static void json_refuse(json_reader *r, const char *place, const char *expected, const char *found)
{
    KEEP_ERROR(r, KVB_UNSUPPORTED, "%s: %s: expected %s, found %.80s; give token ids instead of text", r->name, place,
               expected, found ? found : "nothing");
}

// A token id, or -1 if it is not one.
static int64_t json_id(const cJSON *number)
{
    double n = cJSON_IsNumber(number) ? number->valuedouble : -1;
    return n >= 0 && n < INT32_MAX && n == (double)(int64_t)n ? (int64_t)n : -1;
}

static void compile(json_reader *r, expression *out, const char *pattern, bool literal, const char *place)
{
    char where[320];
    snprintf(where, sizeof where, "%s: %s", r->name, place);
    if (r->status == KVB_OK) r->status = expression_compile(out, pattern, strlen(pattern), literal, where, r->err);
}

// {"String": "..."} or {"Regex": "..."}.
static void read_pattern(json_reader *r, const cJSON *step, const char *place, expression *out)
{
    const cJSON *pattern = json_item(step, "pattern");
    const char *literal = json_string(pattern, "String"), *regex = json_string(pattern, "Regex");
    if (literal || regex) compile(r, out, literal ? literal : regex, literal != NULL, place);
    else json_refuse(r, place, "a pattern that is a String or a Regex", NULL);
}

// ---- Steps: normalisation ----

// Returns NULL if there are too many.
static normal_step *new_normal(json_reader *r, normal_list *list, normal_kind kind, const char *text)
{
    if (list->n == STEPS_MAX) {
        json_refuse(r, "normalizer", "at most 16 steps", "more");
        return NULL;
    }
    normal_step *step = &list->steps[list->n++];
    *step = (normal_step){.kind = kind, .text = need_text("%s", text), .size = strlen(text)};
    return step;
}

static void read_normal_step(json_reader *r, const cJSON *step)
{
    normal_list *list = &r->t->normal;
    const char *prepended = json_string(step, "prepend"), *content = json_string(step, "content");
    if (json_is_type(step, "NFC")) {
        new_normal(r, list, NORMAL_NFC, "");
    } else if (json_is_type(step, "Prepend") && prepended) {
        new_normal(r, list, NORMAL_PREPEND, prepended);
    } else if (json_is_type(step, "Replace") && content) {
        normal_step *out = new_normal(r, list, NORMAL_REPLACE, content);
        if (out) read_pattern(r, step, "normalizer Replace", &out->pattern);
    } else {
        json_refuse(r, "normalizer", "NFC, Prepend, Replace or a Sequence of these", json_string(step, "type"));
    }
}

// Calls `read` for a step, or for each step of a Sequence, which are under `key`; null and absent are no step.
static void each_step(json_reader *r, const cJSON *step, const char *key, void (*read)(json_reader *, const cJSON *))
{
    if (!step || cJSON_IsNull(step)) return;
    if (!json_is_type(step, "Sequence")) {
        read(r, step);
        return;
    }
    const cJSON *inner;
    cJSON_ArrayForEach(inner, json_item(step, key))
    {
        read(r, inner);
    }
}

// ---- Steps: cutting ----

// Returns NULL if there are too many.
static cut_step *new_cut(json_reader *r, cut_behaviour behaviour)
{
    if (r->t->n_cuts == STEPS_MAX) {
        json_refuse(r, "pre_tokenizer", "at most 16 steps", "more");
        return NULL;
    }
    cut_step *step = &r->t->cuts[r->t->n_cuts++];
    *step = (cut_step){.behaviour = behaviour};
    return step;
}

static void read_split(json_reader *r, const cJSON *step)
{
    static const struct {
        const char *name;
        cut_behaviour behaviour;
    } known[] = {{"Removed", CUT_REMOVED},
                 {"Isolated", CUT_ISOLATED},
                 {"MergedWithPrevious", CUT_PREVIOUS},
                 {"MergedWithNext", CUT_NEXT},
                 {"Contiguous", CUT_CONTIGUOUS}};
    const char *name = json_string(step, "behavior");
    for (size_t i = 0; name && i < sizeof known / sizeof *known; i++) {
        if (strcmp(name, known[i].name) != 0) continue;
        cut_step *out = new_cut(r, known[i].behaviour);
        if (!out) return;
        out->invert = json_flag(step, "invert", false);
        read_pattern(r, step, "pre_tokenizer Split", &out->separator);
        return;
    }
    json_refuse(r, "pre_tokenizer Split", "a behavior of tokenizers", name);
}

static void new_pattern_cut(json_reader *r, const char *pattern, bool literal, cut_behaviour behaviour)
{
    cut_step *out = new_cut(r, behaviour);
    if (out) compile(r, &out->separator, pattern, literal, "pre_tokenizer");
}

static void read_byte_level(json_reader *r, const cJSON *step)
{
    r->t->byte_level = true;
    if (json_flag(step, "add_prefix_space", true)) {
        if (r->t->n_cuts)
            json_refuse(r, "pre_tokenizer ByteLevel behind other steps", "add_prefix_space false", "true");
        normal_step *space = new_normal(r, &r->t->before_words, NORMAL_PREPEND, " ");
        if (space) space->unless_there = true;
    }
    if (json_flag(step, "use_regex", true)) new_pattern_cut(r, gpt2_pattern, false, CUT_ISOLATED);
}

// Spaces become the replacement, one is put in front, and words begin with it.
static void read_metaspace(json_reader *r, const cJSON *step)
{
    const char *mark = json_string(step, "replacement"), *scheme = json_string(step, "prepend_scheme");
    if (!scheme) scheme = json_flag(step, "add_prefix_space", true) ? "always" : "never";
    if (!mark || r->t->n_cuts) {
        json_refuse(r, "pre_tokenizer Metaspace", "a replacement, and no step before", mark);
        return;
    }
    normal_step *spaces = new_normal(r, &r->t->before_words, NORMAL_REPLACE, mark);
    if (spaces) compile(r, &spaces->pattern, " ", true, "pre_tokenizer");
    normal_step *front = strcmp(scheme, "never") == 0 ? NULL : new_normal(r, &r->t->before_words, NORMAL_PREPEND, mark);
    if (front) {
        front->unless_there = true;
        front->first_only = strcmp(scheme, "first") == 0;
    }
    if (json_flag(step, "split", true)) new_pattern_cut(r, mark, true, CUT_NEXT);
}

static void read_cut_step(json_reader *r, const cJSON *step)
{
    if (json_is_type(step, "Split")) read_split(r, step);
    else if (json_is_type(step, "ByteLevel")) read_byte_level(r, step);
    else if (json_is_type(step, "Metaspace")) read_metaspace(r, step);
    else if (json_is_type(step, "Digits"))
        new_pattern_cut(r, digit_pattern, false,
                        json_flag(step, "individual_digits", false) ? CUT_ISOLATED : CUT_CONTIGUOUS);
    else
        json_refuse(r, "pre_tokenizer", "Split, ByteLevel, Digits, Metaspace or a Sequence of these",
                    json_string(step, "type"));
}

// ---- Vocabulary and merges ----

// cJSON ends a string at its first NUL, so hide_nul has replaced \u0000 by the noncharacter U+FDD0; this restores the
// NULs in place. Returns the text's bytes. Must be called only once for each string of the tree.
static size_t show_nul(char *text)
{
    char *out = text;
    for (const char *p = text; *p;) {
        bool hidden = strncmp(p, "\xef\xb7\x90", 3) == 0;
        char c = hidden ? '\0' : *p;
        p += hidden ? 3 : 1;
        *out++ = c;
    }
    return (size_t)(out - text);
}

typedef struct token_text {
    const char *text; // belongs to the JSON tree; NULL: the id is not used
    size_t size;
    uint8_t type;
} token_text;

// Returns the highest token id, or -1 after an error.
static int64_t highest_id(json_reader *r, const cJSON *vocab, const cJSON *added)
{
    const cJSON *entry;
    int64_t highest = -1, count = 0;
    cJSON_ArrayForEach(entry, vocab)
    {
        int64_t id = json_id(entry);
        if (id < 0)
            KEEP_ERROR(r, KVB_FORMAT, "%s: model.vocab: expected a token id for '%.60s'", r->name, entry->string);
        if (id > highest) highest = id;
        count++;
    }
    cJSON_ArrayForEach(entry, added)
    {
        int64_t id = json_id(json_item(entry, "id"));
        if (id < 0 || !json_string(entry, "content"))
            KEEP_ERROR(r, KVB_FORMAT, "%s: added_tokens: expected an id and a content in entry %lld", r->name,
                       (long long)count);
        if (id > highest) highest = id;
        count++;
    }
    // Ids may have gaps, but memory must stay in proportion to the file's size.
    if (highest >= 4 * count + 65536)
        KEEP_ERROR(r, KVB_FORMAT, "%s: %lld tokens with ids up to %lld; the file is damaged", r->name, (long long)count,
                   (long long)highest);
    return r->status == KVB_OK ? highest : -1;
}

static void collect(token_text *all, const cJSON *vocab, const cJSON *added)
{
    const cJSON *entry;
    cJSON_ArrayForEach(entry, vocab) all[json_id(entry)] =
        (token_text){entry->string, show_nul(entry->string), TOKEN_NORMAL};
    cJSON_ArrayForEach(entry, added)
    {
        char *text = json_item(entry, "content")->valuestring;
        all[json_id(json_item(entry, "id"))] =
            (token_text){text, show_nul(text), json_flag(entry, "special", false) ? TOKEN_CONTROL : TOKEN_USER_DEFINED};
    }
}

static void read_json_tokens(json_reader *r, const cJSON *vocab, const cJSON *added)
{
    int64_t highest = highest_id(r, vocab, added);
    if (r->status != KVB_OK) return;
    token_text *all = need((size_t)highest + 2, sizeof *all, "tokens");
    collect(all, vocab, added);
    uint64_t bytes = 0;
    for (int64_t id = 0; id <= highest; id++) bytes += all[id].size;
    r->status = vocabulary_reserve(&r->t->v, r->name, (uint64_t)(highest + 1), bytes, r->err);
    for (int64_t id = 0; id <= highest && r->status == KVB_OK; id++) {
        if (all[id].text) vocabulary_put(&r->t->v, (uint32_t)id, all[id].text, all[id].size, all[id].type);
        else vocabulary_skip(&r->t->v, (uint32_t)id);
    }
    free(all);
}

// An entry is "left right" or ["left", "right"].
static bool put_merge(vocabulary *v, const cJSON *entry, uint32_t rank)
{
    const cJSON *left = entry->child, *right = left ? left->next : NULL;
    if (cJSON_IsString(left) && cJSON_IsString(right)) {
        size_t left_size = show_nul(left->valuestring), right_size = show_nul(right->valuestring);
        return vocabulary_put_merge(v, left->valuestring, left_size, right->valuestring, right_size, rank);
    }
    if (!cJSON_IsString(entry)) return false;
    size_t size = show_nul(entry->valuestring);
    const char *text = entry->valuestring, *space = size > 1 ? memchr(text + 1, ' ', size - 1) : NULL;
    size_t before = space ? (size_t)(space - text) : 0;
    return space && vocabulary_put_merge(v, text, before, space + 1, size - before - 1, rank);
}

static void read_merges(json_reader *r, const cJSON *merges)
{
    const cJSON *entry;
    uint64_t n = 0;
    cJSON_ArrayForEach(entry, merges) n++;
    if (r->status == KVB_OK) r->status = vocabulary_reserve_merges(&r->t->v, r->name, n, r->err);
    uint32_t rank = 0;
    cJSON_ArrayForEach(entry, merges)
    {
        if (r->status == KVB_OK && !put_merge(&r->t->v, entry, rank))
            KEEP_ERROR(r, KVB_FORMAT, "%s: model.merges: expected two tokens that make a third in entry %u", r->name,
                       rank);
        rank++;
    }
}

static void read_vocabulary(json_reader *r, const cJSON *root)
{
    const cJSON *model = json_item(root, "model"), *vocab = json_item(model, "vocab"),
                *merges = json_item(model, "merges");
    const char *unknown = json_string(model, "unk_token");
    if (!json_is_type(model, "BPE") && !(merges && !json_item(model, "type")))
        json_refuse(r, "model.type", "BPE", json_string(model, "type"));
    if (!cJSON_IsObject(vocab) || !cJSON_IsArray(merges))
        KEEP_ERROR(r, KVB_FORMAT, "%s: model: expected an object vocab and a list merges", r->name);
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++)
        if (json_string(model, affixes[i]) && *json_string(model, affixes[i]))
            json_refuse(r, affixes[i], "none", json_string(model, affixes[i]));
    r->t->byte_fallback = json_flag(model, "byte_fallback", false);
    r->t->ignore_merges = json_flag(model, "ignore_merges", false);
    r->t->fuse_unknown = json_flag(model, "fuse_unk", false);
    read_json_tokens(r, vocab, json_item(root, "added_tokens"));
    read_merges(r, merges);
    if (r->status == KVB_OK && unknown) r->t->unknown = (int32_t)vocabulary_find(&r->t->v, unknown, strlen(unknown));
}

// ---- Added tokens ----

static void read_added(json_reader *r, const cJSON *root)
{
    tokenizer *t = r->t;
    const cJSON *entry;
    cJSON_ArrayForEach(entry, json_item(root, "added_tokens"))
    {
        if (r->status != KVB_OK) break;
        uint32_t id = (uint32_t)json_id(json_item(entry, "id"));
        bool special = json_flag(entry, "special", false);
        uint8_t flags = (uint8_t)((json_flag(entry, "lstrip", false) ? ADDED_LSTRIP : 0) |
                                  (json_flag(entry, "rstrip", false) ? ADDED_RSTRIP : 0));
        const char *text = t->v.text + t->v.start[id];
        size_t size = token_bytes(&t->v, id);
        if (json_flag(entry, "single_word", false)) json_refuse(r, "added_tokens", "single_word false", "true");
        else if (t->normal.n && json_flag(entry, "normalized", !special))
            r->status = added_put_normalised(&t->normalised, &t->normal, id, text, size, flags, r->err);
        else added_put(&t->raw, id, text, size, flags);
    }
    added_sort(&t->raw);
    added_sort(&t->normalised);
}

// ---- What the other files say ----

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

static void read_ends(tokenizer *t, const cJSON *generation)
{
    const cJSON *end = json_item(generation, "eos_token_id"), *list = cJSON_IsArray(end) ? end : NULL, *one;
    tokenizer_add_end(t, t->special.eos);
    if (cJSON_IsNumber(end)) tokenizer_add_end(t, (int32_t)json_id(end));
    cJSON_ArrayForEach(one, list)
    {
        tokenizer_add_end(t, (int32_t)json_id(one));
    }
}

static void read_template(tokenizer *t, const cJSON *config)
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
    if (text) t->chat_template = need_text("%s", text);
}

static void read_configs(tokenizer *t, const cJSON *root, const cJSON *config, const cJSON *generation)
{
    int32_t front = template_bos(t, json_item(root, "post_processor"));
    t->special.bos = find_text(t, config_token(config, "bos_token"));
    if (t->special.bos < 0) t->special.bos = front;
    t->special.eos = find_text(t, config_token(config, "eos_token"));
    t->special.add_bos = t->special.bos >= 0 && (front == t->special.bos || json_flag(config, "add_bos_token", false));
    read_ends(t, generation);
    read_template(t, config);
}

// Decoding takes a space off the front of a text if encoding puts one there.
static void read_decoder(tokenizer *t)
{
    const normal_list *lists[] = {&t->normal, &t->before_words};
    for (int k = 0; k < 2; k++)
        for (size_t i = 0; i < lists[k]->n; i++)
            if (lists[k]->steps[i].kind == NORMAL_PREPEND && !t->byte_level) t->strip_first = true;
}

// Returns NULL if there is no such file, or after an error.
static cJSON *parse(json_reader *r, json_text text, const char *what)
{
    if (r->status != KVB_OK || !text.data) return NULL;
    const char *end = NULL;
    bool no_memory;
    cJSON *root = kvb_json_parse(text.data, text.size, &end, &no_memory);
    if (no_memory) KEEP_ERROR(r, KVB_MEMORY, "%s: %s: not enough memory", r->name, what);
    else if (!root)
        KEEP_ERROR(r, KVB_FORMAT, "%s: %s: not JSON, near byte %zu", r->name, what,
                   end ? (size_t)(end - text.data) : 0);
    return root;
}

// Points *text to a copy with \ufdd0, a noncharacter, for each \u0000: cJSON ends a string at its first NUL (show_nul
// restores it). The caller frees *copy, which is NULL if there is no \u0000.
static void hide_nul(json_text *text, char **copy)
{
    static const char nul[] = "\\u0000";
    *copy = NULL;
    if (!text->data || !memmem(text->data, text->size, nul, 6)) return;
    *copy = need_copy(text->data, text->size, 1, "bytes of tokenizer.json");
    for (size_t at = 0; at + 6 <= text->size; at += (*copy)[at] == '\\' ? 2 : 1)
        if (memcmp(*copy + at, nul, 6) == 0) memcpy(*copy + at, "\\ufdd0", 6);
    text->data = *copy;
}

kvb_status tokenizer_from_json(tokenizer **out, const char *name, json_text tokens, json_text config,
                               json_text generation, kvb_error *err)
{
    *out = NULL;
    json_reader r = {.t = tokenizer_new(), .name = name, .err = err};
    char *copy;
    json_text plain = tokens;
    hide_nul(&plain, &copy);
    cJSON *root = parse(&r, plain, "tokenizer.json"), *settings = parse(&r, config, "tokenizer_config.json"),
          *ends = parse(&r, generation, "generation_config.json");
    r.t->pre = need_text("tokenizer.json");
    if (r.status == KVB_OK) {
        each_step(&r, json_item(root, "normalizer"), "normalizers", read_normal_step);
        each_step(&r, json_item(root, "pre_tokenizer"), "pretokenizers", read_cut_step);
        read_vocabulary(&r, root);
        read_added(&r, root);
    }
    if (r.status == KVB_OK) {
        tokenizer_find_bytes(r.t);
        read_decoder(r.t);
        read_configs(r.t, root, settings, ends);
        sha256_hex(tokens.data, tokens.size, r.t->sha256);
    }
    cJSON_Delete(root);
    free(copy);
    cJSON_Delete(settings);
    cJSON_Delete(ends);
    if (r.status == KVB_OK) *out = r.t;
    else tokenizer_free(r.t);
    return r.status;
}

// ---- The files ----

// Maps a file of the folder; *out is zero if there is none.
static kvb_status map_if_there(file_view *out, const char *folder, const char *file, kvb_error *err)
{
    *out = (file_view){0};
    char *path = need_text("%s/%s", folder, file);
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
        t->chat_template = need_text("%.*s", (int)view.size, (const char *)view.data);
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
