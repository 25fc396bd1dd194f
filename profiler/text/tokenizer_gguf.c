// A tokenizer from the metadata of a GGUF file: byte-level BPE ("gpt2"), or SentencePiece's BPE ("llama"), whose merges
// follow from the scores.
#include "formats/need.h"
#include "formats/sha256.h"
#include "profiler/text/tokenizer_parts.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

// ---- kind and pre-tokenizer ----

static kvb_status find_pre(const pre_tokenizer **out, const gguf_file *f, const char *pre, kvb_error *err)
{
    gguf_string name = {pre, pre ? strlen(pre) : 0};
    if (!pre && !gguf_find(f, "tokenizer.ggml.pre"))
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s: tokenizer.ggml.pre is missing, so how words are cut is not known (known here: %s); "
                        "convert the model again with a current tool, or name one",
                        f->name, pre_tokenizer_names());
    kvb_status status = pre ? KVB_OK : gguf_get_string(f, "tokenizer.ggml.pre", &name, err);
    if (status != KVB_OK) return status;
    *out = pre_tokenizer_find(name);
    if (!*out)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s: tokenizer.ggml.pre: expected one of %s, found '%.*s'; give token ids instead of text",
                        f->name, pre_tokenizer_names(), (int)(name.size < 60 ? name.size : 60), name.data);
    return KVB_OK;
}

// Adds a step that prepends U+2581, or that replaces something by it.
static normal_step *add_normal(tokenizer *t, normal_kind kind)
{
    normal_step *step = &t->normal.steps[t->normal.n++];
    *step = (normal_step){.kind = kind, .text = need_text(LOW_LINE), .size = strlen(LOW_LINE)};
    return step;
}

// llama.cpp puts the space in front of every stretch between special tokens, as transformers' "legacy" form does.
static kvb_status read_sentencepiece(tokenizer *t, const gguf_file *f, kvb_error *err)
{
    bool prefix = true, squeeze = false;
    kvb_status status = gguf_get_bool(f, "tokenizer.ggml.add_space_prefix", &prefix, err);
    if (status == KVB_OK) status = gguf_get_bool(f, "tokenizer.ggml.remove_extra_whitespaces", &squeeze, err);
    if (status == KVB_OK && squeeze)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s: tokenizer.ggml.remove_extra_whitespaces: expected false, found true; give token ids "
                        "instead of text",
                        f->name);
    t->byte_fallback = true;
    t->strip_first = prefix;
    if (status != KVB_OK) return status;
    if (prefix) add_normal(t, NORMAL_PREPEND);
    t->pre = need_text("sentencepiece");
    return expression_compile(&add_normal(t, NORMAL_REPLACE)->pattern, " ", 1, true, f->name, err);
}

static kvb_status read_byte_level(tokenizer *t, const gguf_file *f, const pre_tokenizer *pre, kvb_error *err)
{
    bool prefix = false;
    kvb_status status = gguf_get_bool(f, "tokenizer.ggml.add_space_prefix", &prefix, err);
    if (status == KVB_OK && prefix)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: tokenizer.ggml.add_space_prefix: expected false, found true",
                        f->name);
    t->byte_level = true;
    t->ignore_merges = pre->ignore_merges;
    if (status == KVB_OK)
        status = expression_compile(&t->cuts[0].separator, pre->pattern, strlen(pre->pattern), false, f->name, err);
    if (status != KVB_OK) return status;
    t->cuts[0].behaviour = CUT_ISOLATED;
    t->n_cuts = 1;
    t->pre = need_text("%s", pre->name);
    return KVB_OK;
}

static kvb_status read_kind(tokenizer *t, const gguf_file *f, const char *pre, bool *default_bos, kvb_error *err)
{
    gguf_string model;
    const pre_tokenizer *found = NULL;
    kvb_status status = gguf_get_string(f, "tokenizer.ggml.model", &model, err);
    if (status != KVB_OK) return status;
    t->fuse_unknown = true;
    if (gguf_string_is(model, "llama") && !pre) {
        *default_bos = true;
        return read_sentencepiece(t, f, err);
    }
    if (!gguf_string_is(model, "gpt2"))
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s: tokenizer.ggml.model: expected gpt2 (byte-level BPE)%s, found '%.*s'; give token ids "
                        "instead of text",
                        f->name, pre ? ", the only kind with pre-tokenizers" : " or llama (SentencePiece's BPE)",
                        (int)(model.size < 60 ? model.size : 60), model.data);
    status = find_pre(&found, f, pre, err);
    if (status != KVB_OK) return status;
    *default_bos = found->add_bos;
    return read_byte_level(t, f, found, err);
}

// ---- vocabulary ----

static kvb_status read_gguf_tokens(tokenizer *t, const gguf_file *f, kvb_error *err)
{
    gguf_array tokens, types = {0};
    kvb_status status = gguf_get_array(f, "tokenizer.ggml.tokens", GGUF_VALUE_STRING, &tokens, err);
    bool typed = gguf_find(f, "tokenizer.ggml.token_type") != NULL;
    if (status == KVB_OK && typed) status = gguf_get_array(f, "tokenizer.ggml.token_type", GGUF_VALUE_I32, &types, err);
    // A little more than needed: the strings' lengths are counted as well.
    if (status == KVB_OK) status = vocabulary_reserve(&t->v, f->name, tokens.count, tokens.size, err);
    if (status != KVB_OK) return status;
    if (typed && types.count != tokens.count)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: tokenizer.ggml.token_type: expected as many as tokens, %llu, found %llu; the file is "
                        "damaged",
                        f->name, (unsigned long long)tokens.count, (unsigned long long)types.count);
    gguf_string s;
    for (uint32_t id = 0; gguf_next_string(&tokens, &s); id++) {
        int64_t type = typed ? gguf_array_int(&types, id) : TOKEN_NORMAL;
        if (type < 0 || type > UINT8_MAX)
            return kvb_fail(err, KVB_FORMAT,
                            "%s: tokenizer.ggml.token_type: expected a small number for token %u, found %lld; the "
                            "file is damaged",
                            f->name, id, (long long)type);
        vocabulary_put(&t->v, id, s.data, s.size, (uint8_t)type);
    }
    return KVB_OK;
}

// Entries are "left right"; the separator is the first space that is not the first byte.
static kvb_status read_merges(tokenizer *t, const gguf_file *f, const gguf_array *merges, kvb_error *err)
{
    kvb_status status = vocabulary_reserve_merges(&t->v, f->name, merges->count, err);
    gguf_array rest = *merges;
    gguf_string s;
    for (uint32_t rank = 0; status == KVB_OK && gguf_next_string(&rest, &s); rank++) {
        const char *space = s.size > 1 ? memchr(s.data + 1, ' ', s.size - 1) : NULL;
        size_t before = space ? (size_t)(space - s.data) : 0;
        if (!space || !vocabulary_put_merge(&t->v, s.data, before, space + 1, s.size - before - 1, rank))
            status = kvb_fail(err, KVB_FORMAT,
                              "%s: tokenizer.ggml.merges: expected two tokens that make a third in entry %u, found "
                              "'%.*s'; the file is damaged",
                              f->name, rank, (int)(s.size < 60 ? s.size : 60), s.data);
    }
    return status;
}

// ---- merges from scores ----

typedef struct scored {
    float score;
    uint32_t id;
} scored;

static int higher_score_first(const void *a, const void *b)
{
    const scored *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

// SentencePiece merges pieces only; control, unknown and byte tokens never result from a merge.
static bool is_piece(const vocabulary *v, uint32_t id)
{
    return v->type[id] == TOKEN_NORMAL || v->type[id] == TOKEN_USER_DEFINED || v->type[id] == TOKEN_UNUSED;
}

static bool piece_at(const vocabulary *v, const char *text, size_t size)
{
    int64_t id = vocabulary_find(v, text, size);
    return id >= 0 && is_piece(v, (uint32_t)id);
}

// Adds a merge of this rank for every way to make the token from two pieces, unless `count`. Returns their number.
static uint64_t ways(vocabulary *v, uint32_t id, uint32_t rank, bool count)
{
    const char *text = v->text + v->start[id];
    size_t size = token_bytes(v, id);
    uint64_t n = 0;
    for (size_t cut = 1; cut < size; cut++) {
        if (((unsigned char)text[cut] & 0xc0) == 0x80) continue;
        if (!piece_at(v, text, cut) || !piece_at(v, text + cut, size - cut)) continue;
        n++;
        if (!count) vocabulary_put_merge(v, text, cut, text + cut, size - cut, rank);
    }
    return n;
}

static kvb_status read_scores(const tokenizer *t, const gguf_file *f, scored **out, kvb_error *err)
{
    gguf_array scores;
    kvb_status status = gguf_get_array(f, "tokenizer.ggml.scores", GGUF_VALUE_F32, &scores, err);
    if (status != KVB_OK) return status;
    if (scores.count != t->v.size)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: tokenizer.ggml.scores: expected as many as tokens, %u, found %llu; the file is damaged",
                        f->name, t->v.size, (unsigned long long)scores.count);
    scored *all = *out = need(t->v.size, sizeof *all, "scores");
    for (uint32_t id = 0; id < t->v.size; id++) {
        all[id].id = id;
        memcpy(&all[id].score, scores.data + sizeof(float) * (size_t)id, sizeof(float));
        if (!(all[id].score == all[id].score)) // NaN cannot be ordered
            return kvb_fail(err, KVB_FORMAT, "%s: tokenizer.ggml.scores: token %u: expected a number, found NaN",
                            f->name, id);
    }
    return KVB_OK;
}

// Refuses very long tokens: looking at all ways to cut a token takes time that grows with the square of its length.
static kvb_status check_lengths(const vocabulary *v, const gguf_file *f, kvb_error *err)
{
    enum { LONGEST = 4096 };
    for (uint32_t id = 0; id < v->size; id++)
        if (is_piece(v, id) && token_bytes(v, id) > LONGEST)
            return kvb_fail(
                err, KVB_UNSUPPORTED,
                "%s: tokenizer.ggml.tokens: token %u has %u bytes, expected at most %d; the file is damaged", f->name,
                id, token_bytes(v, id), LONGEST);
    return KVB_OK;
}

static kvb_status merges_from_scores(tokenizer *t, const gguf_file *f, kvb_error *err)
{
    scored *all = NULL;
    kvb_status status = read_scores(t, f, &all, err);
    if (status == KVB_OK) status = check_lengths(&t->v, f, err);
    uint64_t n = 0;
    for (uint32_t id = 0; status == KVB_OK && id < t->v.size; id++)
        n += is_piece(&t->v, id) ? ways(&t->v, id, 0, true) : 0;
    if (status == KVB_OK) status = vocabulary_reserve_merges(&t->v, f->name, n, err);
    if (status == KVB_OK) {
        qsort(all, t->v.size, sizeof *all, higher_score_first);
        for (uint32_t i = 0, rank = 0; i < t->v.size; i++) {
            if (i && all[i].score != all[i - 1].score) rank++;
            if (is_piece(&t->v, all[i].id)) ways(&t->v, all[i].id, rank, false);
        }
    }
    free(all);
    return status;
}

// ---- special tokens ----

static kvb_status read_id(const tokenizer *t, const gguf_file *f, const char *key, int32_t *id, kvb_error *err)
{
    uint32_t n = 0;
    *id = -1;
    kvb_status status = gguf_get_u32(f, key, &n, err);
    if (status != KVB_OK || !gguf_find(f, key)) return status;
    if (n >= t->v.size)
        return kvb_fail(err, KVB_FORMAT, "%s: %s: expected a token id below %u, found %u; the file is damaged", f->name,
                        key, t->v.size, n);
    *id = (int32_t)n;
    return KVB_OK;
}

static kvb_status read_special_ids(tokenizer *t, const gguf_file *f, bool default_bos, kvb_error *err)
{
    kvb_status status = read_id(t, f, "tokenizer.ggml.bos_token_id", &t->special.bos, err);
    if (status == KVB_OK) status = read_id(t, f, "tokenizer.ggml.eos_token_id", &t->special.eos, err);
    if (status == KVB_OK) status = read_id(t, f, "tokenizer.ggml.eot_token_id", &t->special.eot, err);
    if (status == KVB_OK) status = read_id(t, f, "tokenizer.ggml.unknown_token_id", &t->unknown, err);
    t->special.add_bos = default_bos && t->special.bos >= 0;
    if (status == KVB_OK) status = gguf_get_bool(f, "tokenizer.ggml.add_bos_token", &t->special.add_bos, err);
    if (status == KVB_OK && t->special.add_bos && t->special.bos < 0)
        return kvb_fail(
            err, KVB_FORMAT,
            "%s: tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing; the file is damaged",
            f->name);
    tokenizer_add_end(t, t->special.eos);
    tokenizer_add_end(t, t->special.eot);
    return status;
}

// SentencePiece looks for user-defined tokens after it has put a space in front of the text and replaced spaces.
static kvb_status put_special(tokenizer *t, uint32_t id, kvb_error *err)
{
    const char *text = t->v.text + t->v.start[id];
    size_t size = token_bytes(&t->v, id);
    if (t->byte_level || t->v.type[id] == TOKEN_CONTROL) {
        added_put(&t->raw, id, text, size, 0);
        return KVB_OK;
    }
    normal_list replace = {.n = 1};
    replace.steps[0] = t->normal.steps[t->normal.n - 1];
    return added_put_normalised(&t->normalised, &replace, id, text, size, 0, err);
}

static kvb_status index_special(tokenizer *t, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (uint32_t id = 0; id < t->v.size && status == KVB_OK; id++)
        if (t->v.type[id] == TOKEN_CONTROL || t->v.type[id] == TOKEN_USER_DEFINED) status = put_special(t, id, err);
    added_sort(&t->raw);
    added_sort(&t->normalised);
    return status;
}

static kvb_status read_template(tokenizer *t, const gguf_file *f, kvb_error *err)
{
    gguf_string text;
    if (!gguf_find(f, "tokenizer.chat_template")) return KVB_OK;
    kvb_status status = gguf_get_string(f, "tokenizer.chat_template", &text, err);
    if (status == KVB_OK) t->chat_template = need_text("%.*s", (int)text.size, text.data);
    return status;
}

// ---- identity ----

static void hash_number(sha256_state *s, uint32_t n)
{
    unsigned char bytes[4] = {(unsigned char)n, (unsigned char)(n >> 8), (unsigned char)(n >> 16),
                              (unsigned char)(n >> 24)};
    sha256_add(s, bytes, sizeof bytes);
}

static void hash_text(sha256_state *s, const char *text, size_t size)
{
    hash_number(s, (uint32_t)size);
    sha256_add(s, text, size);
}

// Hashes each merge's text as in the file, or each token's score.
static void hash_ranks(sha256_state *s, const gguf_array *ranks)
{
    hash_number(s, (uint32_t)ranks->count);
    if (ranks->type != GGUF_VALUE_STRING) sha256_add(s, ranks->data, ranks->size);
    gguf_array rest = *ranks;
    for (gguf_string text; ranks->type == GGUF_VALUE_STRING && gguf_next_string(&rest, &text);)
        hash_text(s, text.data, text.size);
}

// Hashes what decides the ids, in one canonical form, numbers as u32 little-endian, texts as u32 length and bytes:
// "kvbudget-tokenizer-1", name of the pre-tokenizer, the text "+" if SentencePiece's kind puts a space in front,
// unknown id (as u32), number of tokens, each token's text and type, number of merges and each merge's text as in the
// file, or number of scores and the scores.
static void hash_tokenizer(tokenizer *t, const gguf_array *ranks)
{
    static const char kind[] = "kvbudget-tokenizer-1";
    const vocabulary *v = &t->v;
    sha256_state *s = sha256_begin();
    hash_text(s, kind, sizeof kind - 1);
    hash_text(s, t->pre, strlen(t->pre));
    if (t->strip_first) hash_text(s, "+", 1);
    hash_number(s, (uint32_t)t->unknown);
    hash_number(s, v->size);
    for (uint32_t id = 0; id < v->size; id++) {
        hash_text(s, v->text + v->start[id], token_bytes(v, id));
        hash_number(s, v->type[id]);
    }
    hash_ranks(s, ranks);
    sha256_end(s, t->sha256);
}

static kvb_status fill(tokenizer *t, const gguf_file *f, const char *pre, kvb_error *err)
{
    gguf_array ranks = {0};
    bool default_bos = false;
    kvb_status status = read_kind(t, f, pre, &default_bos, err);
    if (status == KVB_OK) status = read_gguf_tokens(t, f, err);
    if (status == KVB_OK)
        status = t->byte_level ? gguf_get_array(f, "tokenizer.ggml.merges", GGUF_VALUE_STRING, &ranks, err)
                               : gguf_get_array(f, "tokenizer.ggml.scores", GGUF_VALUE_F32, &ranks, err);
    if (status == KVB_OK) status = t->byte_level ? read_merges(t, f, &ranks, err) : merges_from_scores(t, f, err);
    if (status == KVB_OK) tokenizer_find_bytes(t);
    if (status == KVB_OK) status = read_special_ids(t, f, default_bos, err);
    if (status == KVB_OK) status = index_special(t, err);
    if (status == KVB_OK) status = read_template(t, f, err);
    if (status == KVB_OK) hash_tokenizer(t, &ranks);
    return status;
}

kvb_status tokenizer_from_gguf(tokenizer **out, const gguf_file *f, const char *pre, kvb_error *err)
{
    *out = NULL;
    tokenizer *t = tokenizer_new();
    kvb_status status = fill(t, f, pre, err);
    if (status == KVB_OK) *out = t;
    else tokenizer_free(t);
    return status;
}
