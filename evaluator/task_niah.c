// Needles in a haystack: one, one among other keys, several values of one key, several keys in one question (RULER,
// section 3).
#include "evaluator/task_parts.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

enum { NEEDLE_MAX = 192, VALUE_MAX = 40 };

typedef struct needle {
    char key[TASK_WORD_MAX], value[VALUE_MAX], text[NEEDLE_MAX];
} needle;

static const char *kind_of(const task *t)
{
    return t->set.niah.uuid ? "uuid" : "number";
}

static void draw_value(char value[VALUE_MAX], task_draft *d)
{
    if (d->t->set.niah.uuid) {
        task_uuid(value, &d->random);
        return;
    }
    uint32_t digits = d->t->set.niah.digits;
    for (uint32_t i = 0; i < digits; i++)
        value[i] = (char)(i ? '0' + task_below(&d->random, 10) : '1' + task_below(&d->random, 9));
    value[digits] = '\0';
}

// n_keys keys with n_values values each; keys are nouns while there are enough. The caller frees them.
static needle *draw_needles(size_t n_keys, size_t n_values, task_draft *d)
{
    uint32_t pool = n_keys <= task_noun_count() ? task_noun_count() : task_word_count();
    uint32_t *words = task_pick(&d->random, pool, n_keys);
    needle *n = need(n_keys * n_values, sizeof *n, "needles");
    for (size_t i = 0; i < n_keys * n_values; i++) {
        task_word(n[i].key, words[i / n_values]);
        draw_value(n[i].value, d);
        snprintf(n[i].text, sizeof n[i].text, "The special magic %s for %s is: %s.", kind_of(d->t), n[i].key,
                 n[i].value);
    }
    free(words);
    return n;
}

static kvb_status hide_needles(task_draft *d, const needle *n, size_t count, kvb_error *err)
{
    const char **texts = need(count, sizeof *texts, "needles");
    for (size_t i = 0; i < count; i++) texts[i] = n[i].text;
    fprintf(d->context,
            "Some special magic %ss are hidden within the following text. Make sure to memorize them. I will quiz you "
            "about the %ss afterwards.\n",
            kind_of(d->t), kind_of(d->t));
    kvb_status status = task_hide(d, texts, count, err);
    free(texts);
    return status;
}

static kvb_status ask_single(task_draft *d, const needle *n, kvb_error *err)
{
    const char *kind = kind_of(d->t);
    kvb_status status =
        task_ask(d->sample, err,
                 "\nWhat is the special magic %s for %s mentioned in the provided text?\nThe special magic "
                 "%s for %s mentioned in the provided text is:",
                 kind, n->key, kind, n->key);
    return status == KVB_OK ? task_gold(d->sample, err, "%s", n->value) : status;
}

// One question for each of the first `questions` keys.
static kvb_status build_keys(task_draft *d, size_t n_keys, size_t questions, kvb_error *err)
{
    needle *n = draw_needles(n_keys, 1, d);
    kvb_status status = hide_needles(d, n, n_keys, err);
    for (size_t i = 0; status == KVB_OK && i < questions; i++) status = ask_single(d, &n[i], err);
    free(n);
    return status;
}

static kvb_status build_single(task_draft *d, kvb_error *err)
{
    return build_keys(d, 1, 1, err);
}

static kvb_status build_multikey(task_draft *d, kvb_error *err)
{
    uint32_t keys = d->t->set.niah.keys, questions = d->t->set.niah.questions;
    if (questions > keys)
        return kvb_fail(err, KVB_ARGUMENT, "task %s: %u questions, but only %u keys to ask for", d->t->spec, questions,
                        keys);
    return build_keys(d, keys, questions, err);
}

static kvb_status build_multivalue(task_draft *d, kvb_error *err)
{
    size_t values = d->t->set.niah.values;
    const char *kind = kind_of(d->t);
    needle *n = draw_needles(1, values, d);
    kvb_status status = hide_needles(d, n, values, err);
    if (status == KVB_OK)
        status =
            task_ask(d->sample, err,
                     "\nWhat are all the special magic %ss for %s mentioned in the provided text?\nThe special magic "
                     "%ss for %s mentioned in the provided text are:",
                     kind, n->key, kind, n->key);
    for (size_t i = 0; status == KVB_OK && i < values; i++) status = task_gold(d->sample, err, "%s", n[i].value);
    free(n);
    return status;
}

// "a, b, and c"
static void list_keys(char *out, size_t size, const needle *n, size_t count)
{
    size_t used = 0;
    out[0] = '\0';
    for (size_t i = 0; i < count && used < size; i++)
        used += (size_t)snprintf(out + used, size - used, "%s%s%s", i ? ", " : "", i && i + 1 == count ? "and " : "",
                                 n[i].key);
}

static kvb_status build_multiquery(task_draft *d, kvb_error *err)
{
    char keys[TASK_MAX_GOLD * (TASK_WORD_MAX + 6)];
    size_t queries = d->t->set.niah.queries;
    const char *kind = kind_of(d->t);
    needle *n = draw_needles(queries, 1, d);
    kvb_status status = hide_needles(d, n, queries, err);
    if (status == KVB_OK) {
        list_keys(keys, sizeof keys, n, queries);
        status =
            task_ask(d->sample, err,
                     "\nWhat are all the special magic %ss for %s mentioned in the provided text?\nThe special magic "
                     "%ss for %s mentioned in the provided text are:",
                     kind, keys, kind, keys);
    }
    for (size_t i = 0; status == KVB_OK && i < queries; i++) status = task_gold(d->sample, err, "%s", n[i].value);
    free(n);
    return status;
}

#define VALUE_PARAMETERS                                                     \
    SPEC(struct task_niah_settings, digits, 7, 1, 32, "digits of a number"), \
        SPEC_ON_OFF(struct task_niah_settings, uuid, 0, "1: values are UUIDs instead of numbers")

const task_kind task_niah_single = {.spec = {.name = "niah_single", .parameters = {VALUE_PARAMETERS}},
                                    .summary = "find the value of the one key that is hidden in the text",
                                    .rule = TASK_ALL,
                                    .new_tokens = 16,
                                    .build = build_single};
const task_kind task_niah_multikey = {
    .spec = {.name = "niah_multikey",
             .parameters = {VALUE_PARAMETERS,
                            SPEC(struct task_niah_settings, keys, 4, 2, 256, "keys hidden in the text"),
                            SPEC(struct task_niah_settings, questions, 1, 1, TASK_MAX_QUESTIONS,
                                 "questions asked about one context, each for another key")}},
    .summary = "find the value of one key, with other keys in the text",
    .rule = TASK_ALL,
    .new_tokens = 16,
    .build = build_multikey};
const task_kind task_niah_multivalue = {
    .spec = {.name = "niah_multivalue",
             .parameters = {VALUE_PARAMETERS,
                            SPEC(struct task_niah_settings, values, 4, 2, TASK_MAX_GOLD, "values of the key")}},
    .summary = "find all values of one key",
    .rule = TASK_ALL,
    .new_tokens = 64,
    .build = build_multivalue};
const task_kind task_niah_multiquery = {
    .spec = {.name = "niah_multiquery",
             .parameters = {VALUE_PARAMETERS, SPEC(struct task_niah_settings, queries, 4, 2, TASK_MAX_GOLD,
                                                   "keys that the question asks for")}},
    .summary = "find the values of several keys in one answer",
    .rule = TASK_ALL,
    .new_tokens = 64,
    .build = build_multiquery};
