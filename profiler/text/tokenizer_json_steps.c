// The steps of tokenizer.json: what happens to a text before its words are merged.
//
// Steps that are known are carried out as Hugging Face's tokenizers do; one that is not known is refused by name, since
// a step left out gives other ids without a word.
#include "profiler/text/tokenizer_json_parts.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const cJSON *json_item(const cJSON *object, const char *key)
{
    return cJSON_GetObjectItemCaseSensitive(object, key);
}

const char *json_string(const cJSON *object, const char *key)
{
    const cJSON *found = json_item(object, key);
    return cJSON_IsString(found) ? found->valuestring : NULL;
}

bool json_is_type(const cJSON *step, const char *type)
{
    const char *text = json_string(step, "type");
    return text && strcmp(text, type) == 0;
}

bool json_flag(const cJSON *object, const char *key, bool otherwise)
{
    const cJSON *found = json_item(object, key);
    return cJSON_IsBool(found) ? cJSON_IsTrue(found) : otherwise;
}

kvb_status json_refuse(const json_reader *r, const char *place, const char *expected, const char *found)
{
    return kvb_fail(r->err, KVB_UNSUPPORTED, "%s: %s: expected %s, found %.80s; give token ids instead of text",
                    r->name, place, expected, found ? found : "nothing");
}

kvb_status json_no_memory(const json_reader *r)
{
    return kvb_fail(r->err, KVB_MEMORY, "%s: not enough memory for the tokenizer", r->name);
}

// {"String": "..."} or {"Regex": "..."}.
static kvb_status read_pattern(const json_reader *r, const cJSON *step, const char *place, expression *out)
{
    const cJSON *pattern = json_item(step, "pattern");
    const char *literal = json_string(pattern, "String"), *regex = json_string(pattern, "Regex");
    if (!literal && !regex) return json_refuse(r, place, "a pattern that is a String or a Regex", NULL);
    const char *text = literal ? literal : regex;
    char where[320];
    snprintf(where, sizeof where, "%s: %s", r->name, place);
    return expression_compile(out, text, strlen(text), literal != NULL, where, r->err);
}

// ---- normalisation ----

static kvb_status new_normal(const json_reader *r, normal_list *list, normal_kind kind, const char *text,
                             normal_step **out)
{
    if (list->n == STEPS_MAX) return json_refuse(r, "normalizer", "at most 16 steps", "more");
    normal_step *step = *out = &list->steps[list->n];
    *step = (normal_step){.kind = kind};
    if (text && !(step->text = strdup(text))) return json_no_memory(r);
    step->size = text ? strlen(text) : 0;
    list->n++;
    return KVB_OK;
}

static kvb_status read_normal_step(const json_reader *r, const cJSON *step)
{
    normal_step *out = NULL;
    normal_list *list = &r->t->normal;
    if (json_is_type(step, "NFC")) return new_normal(r, list, NORMAL_NFC, NULL, &out);
    if (json_is_type(step, "Prepend") && json_string(step, "prepend"))
        return new_normal(r, list, NORMAL_PREPEND, json_string(step, "prepend"), &out);
    if (json_is_type(step, "Replace") && json_string(step, "content")) {
        kvb_status status = new_normal(r, list, NORMAL_REPLACE, json_string(step, "content"), &out);
        return status == KVB_OK ? read_pattern(r, step, "normalizer Replace", &out->pattern) : status;
    }
    return json_refuse(r, "normalizer", "NFC, Prepend, Replace or a Sequence of these", json_string(step, "type"));
}

// A step, or a Sequence of steps under `key`, each through `read`; null and absent are no step.
static kvb_status each_step(const json_reader *r, const cJSON *step, const char *key,
                            kvb_status (*read)(const json_reader *, const cJSON *))
{
    if (!step || cJSON_IsNull(step)) return KVB_OK;
    if (!json_is_type(step, "Sequence")) return read(r, step);
    kvb_status status = KVB_OK;
    const cJSON *inner;
    cJSON_ArrayForEach(inner, json_item(step, key)) if (status == KVB_OK) status = read(r, inner);
    return status;
}

// ---- cutting ----

static kvb_status new_cut(const json_reader *r, cut_step **out)
{
    if (r->t->n_cuts == STEPS_MAX) return json_refuse(r, "pre_tokenizer", "at most 16 steps", "more");
    *out = &r->t->cuts[r->t->n_cuts++];
    **out = (cut_step){.behaviour = CUT_ISOLATED};
    return KVB_OK;
}

static kvb_status read_split(const json_reader *r, const cJSON *step)
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
    cut_step *out = NULL;
    for (size_t i = 0; name && i < sizeof known / sizeof *known; i++) {
        if (strcmp(name, known[i].name) != 0) continue;
        kvb_status status = new_cut(r, &out);
        if (status != KVB_OK) return status;
        out->behaviour = known[i].behaviour;
        out->invert = json_flag(step, "invert", false);
        return read_pattern(r, step, "pre_tokenizer Split", &out->separator);
    }
    return json_refuse(r, "pre_tokenizer Split", "a behavior of tokenizers", name);
}

static kvb_status new_pattern_cut(const json_reader *r, const char *pattern, cut_behaviour behaviour)
{
    cut_step *out = NULL;
    kvb_status status = new_cut(r, &out);
    if (status != KVB_OK) return status;
    out->behaviour = behaviour;
    return expression_compile(&out->separator, pattern, strlen(pattern), false, r->name, r->err);
}

static kvb_status read_byte_level(const json_reader *r, const cJSON *step)
{
    normal_step *space = NULL;
    r->t->byte_level = true;
    kvb_status status = KVB_OK;
    if (json_flag(step, "add_prefix_space", true)) {
        if (r->t->n_cuts)
            return json_refuse(r, "pre_tokenizer ByteLevel behind other steps", "add_prefix_space false", "true");
        status = new_normal(r, &r->t->before_words, NORMAL_PREPEND, " ", &space);
        if (status == KVB_OK) space->unless_there = true;
    }
    if (status == KVB_OK && json_flag(step, "use_regex", true)) status = new_pattern_cut(r, gpt2_pattern, CUT_ISOLATED);
    return status;
}

// Spaces become the replacement, one is put in front, and words begin with it.
static kvb_status read_metaspace(const json_reader *r, const cJSON *step)
{
    const char *mark = json_string(step, "replacement"), *scheme = json_string(step, "prepend_scheme");
    if (!scheme) scheme = json_flag(step, "add_prefix_space", true) ? "always" : "never";
    if (!mark || r->t->n_cuts)
        return json_refuse(r, "pre_tokenizer Metaspace", "a replacement, and no step before", mark);
    normal_step *out = NULL;
    cut_step *cut = NULL;
    kvb_status status = new_normal(r, &r->t->before_words, NORMAL_REPLACE, mark, &out);
    if (status == KVB_OK) status = expression_compile(&out->pattern, " ", 1, true, r->name, r->err);
    if (status == KVB_OK && strcmp(scheme, "never") != 0) {
        status = new_normal(r, &r->t->before_words, NORMAL_PREPEND, mark, &out);
        if (status == KVB_OK) {
            out->unless_there = true;
            out->first_only = strcmp(scheme, "first") == 0;
        }
    }
    if (status != KVB_OK || !json_flag(step, "split", true)) return status;
    status = new_cut(r, &cut);
    if (status != KVB_OK) return status;
    cut->behaviour = CUT_NEXT;
    return expression_compile(&cut->separator, mark, strlen(mark), true, r->name, r->err);
}

static kvb_status read_cut_step(const json_reader *r, const cJSON *step)
{
    if (json_is_type(step, "Split")) return read_split(r, step);
    if (json_is_type(step, "ByteLevel")) return read_byte_level(r, step);
    if (json_is_type(step, "Metaspace")) return read_metaspace(r, step);
    if (json_is_type(step, "Digits"))
        return new_pattern_cut(r, digit_pattern,
                               json_flag(step, "individual_digits", false) ? CUT_ISOLATED : CUT_CONTIGUOUS);
    return json_refuse(r, "pre_tokenizer", "Split, ByteLevel, Digits, Metaspace or a Sequence of these",
                       json_string(step, "type"));
}

kvb_status json_read_steps(const json_reader *r, const cJSON *root)
{
    kvb_status status = each_step(r, json_item(root, "normalizer"), "normalizers", read_normal_step);
    if (status != KVB_OK) return status;
    return each_step(r, json_item(root, "pre_tokenizer"), "pretokenizers", read_cut_step);
}
