// Vocabulary, merges and added tokens of tokenizer.json.
#include "profiler/text/tokenizer_json_parts.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

// cJSON ends a string at its first NUL, so \u0000 was replaced by the noncharacter U+FDD0 (tokenizer_json.c); here it
// comes back, in place. Once for each string of the tree; returns the bytes.
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

int64_t json_id(const cJSON *number)
{
    double n = cJSON_IsNumber(number) ? number->valuedouble : -1;
    return n >= 0 && n < INT32_MAX && n == (double)(int64_t)n ? (int64_t)n : -1;
}

static kvb_status highest_id(const json_reader *r, const cJSON *vocab, const cJSON *added, int64_t *highest)
{
    const cJSON *entry;
    *highest = -1;
    int64_t count = 0;
    cJSON_ArrayForEach(entry, vocab)
    {
        int64_t id = json_id(entry);
        if (id < 0)
            return kvb_fail(r->err, KVB_FORMAT, "%s: model.vocab: expected a token id for '%.60s'", r->name,
                            entry->string);
        if (id > *highest) *highest = id;
        count++;
    }
    cJSON_ArrayForEach(entry, added)
    {
        int64_t id = json_id(json_item(entry, "id"));
        if (id < 0 || !json_string(entry, "content"))
            return kvb_fail(r->err, KVB_FORMAT, "%s: added_tokens: expected an id and a content in entry %lld", r->name,
                            (long long)count);
        if (id > *highest) *highest = id;
        count++;
    }
    // Ids may have holes, but memory follows the file's size.
    if (*highest >= 4 * count + 65536)
        return kvb_fail(r->err, KVB_FORMAT, "%s: %lld tokens with ids up to %lld; the file is damaged", r->name,
                        (long long)count, (long long)*highest);
    return KVB_OK;
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

static kvb_status read_tokens(const json_reader *r, const cJSON *vocab, const cJSON *added)
{
    int64_t highest;
    kvb_status status = highest_id(r, vocab, added, &highest);
    if (status != KVB_OK) return status;
    token_text *all = calloc((size_t)highest + 2, sizeof *all);
    if (!all) return json_no_memory(r);
    collect(all, vocab, added);
    uint64_t bytes = 0;
    for (int64_t id = 0; id <= highest; id++) bytes += all[id].size;
    status = vocabulary_reserve(&r->t->v, r->name, (uint64_t)(highest + 1), bytes, r->err);
    for (int64_t id = 0; id <= highest && status == KVB_OK; id++) {
        if (all[id].text) vocabulary_put(&r->t->v, (uint32_t)id, all[id].text, all[id].size, all[id].type);
        else vocabulary_skip(&r->t->v, (uint32_t)id);
    }
    free(all);
    return status;
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

static kvb_status read_merges(const json_reader *r, const cJSON *merges)
{
    const cJSON *entry;
    uint64_t n = 0;
    cJSON_ArrayForEach(entry, merges) n++;
    kvb_status status = vocabulary_reserve_merges(&r->t->v, r->name, n, r->err);
    uint32_t rank = 0;
    cJSON_ArrayForEach(entry, merges)
    {
        if (status == KVB_OK && !put_merge(&r->t->v, entry, rank))
            status = kvb_fail(r->err, KVB_FORMAT, "%s: model.merges: expected two tokens that make a third in entry %u",
                              r->name, rank);
        rank++;
    }
    return status;
}

kvb_status json_read_vocabulary(const json_reader *r, const cJSON *root)
{
    const cJSON *model = json_item(root, "model"), *vocab = json_item(model, "vocab"),
                *merges = json_item(model, "merges");
    const char *unknown = json_string(model, "unk_token");
    if (!json_is_type(model, "BPE") && !(json_item(model, "merges") && !json_item(model, "type")))
        return json_refuse(r, "model.type", "BPE", json_string(model, "type"));
    if (!cJSON_IsObject(vocab) || !cJSON_IsArray(merges))
        return kvb_fail(r->err, KVB_FORMAT, "%s: model: expected an object vocab and a list merges", r->name);
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++)
        if (json_string(model, affixes[i]) && *json_string(model, affixes[i]))
            return json_refuse(r, affixes[i], "none", json_string(model, affixes[i]));
    r->t->byte_fallback = json_flag(model, "byte_fallback", false);
    r->t->ignore_merges = json_flag(model, "ignore_merges", false);
    r->t->fuse_unknown = json_flag(model, "fuse_unk", false);
    kvb_status status = read_tokens(r, vocab, json_item(root, "added_tokens"));
    if (status == KVB_OK) status = read_merges(r, merges);
    if (status == KVB_OK && unknown) r->t->unknown = (int32_t)vocabulary_find(&r->t->v, unknown, strlen(unknown));
    return status;
}

// ---- added tokens ----

kvb_status json_read_added(const json_reader *r, const cJSON *root)
{
    tokenizer *t = r->t;
    kvb_status status = KVB_OK;
    const cJSON *entry;
    cJSON_ArrayForEach(entry, json_item(root, "added_tokens"))
    {
        uint32_t id = (uint32_t)json_id(json_item(entry, "id"));
        bool special = json_flag(entry, "special", false);
        uint8_t flags = (uint8_t)((json_flag(entry, "lstrip", false) ? ADDED_LSTRIP : 0) |
                                  (json_flag(entry, "rstrip", false) ? ADDED_RSTRIP : 0) |
                                  (json_flag(entry, "single_word", false) ? ADDED_SINGLE_WORD : 0));
        const char *text = t->v.text + t->v.start[id];
        size_t size = token_bytes(&t->v, id);
        if (status != KVB_OK) break;
        if (t->normal.n && json_flag(entry, "normalized", !special))
            status = added_put_normalised(&t->normalised, &t->normal, id, text, size, flags, r->err);
        else status = added_put(&t->raw, id, text, size, flags, r->err);
    }
    added_sort(&t->raw);
    added_sort(&t->normalised);
    return status;
}
