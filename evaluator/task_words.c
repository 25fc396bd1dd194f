// Tasks over lists of words: variable tracing, common words, frequent words, key-value pairs.
#include "evaluator/task_parts.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- Variable tracing (RULER 3.2): VAR A = 12345. VAR B = VAR A. ... ----

enum { VARIABLE_MAX = 6, HOPS_MAX = TASK_MAX_GOLD - 1 };

#define TRACE_QUESTION                                                                                            \
    "\nQuestion: Find all variables that are assigned the value %u in the text above.\nAnswer: According to the " \
    "chain(s) of variable assignment in the text above, %u variables are assigned the value %u, they are:"

static void draw_variable(char name[VARIABLE_MAX], task_random *r, uint32_t number)
{
    // The number's letters stand first, so no two variables of a sample are called alike.
    name[0] = (char)('A' + number % 26);
    name[1] = (char)('A' + number / 26 % 26);
    for (int i = 2; i < VARIABLE_MAX - 1; i++) name[i] = (char)('A' + task_below(r, 26));
    name[VARIABLE_MAX - 1] = '\0';
}

// A solved example in front of the text, as RULER gives one: it shows what an answer looks like. Its names are in lower
// case, the sample's are not.
static void show_traced_example(task_draft *d, uint32_t names)
{
    char name[VARIABLE_MAX] = "", last[VARIABLE_MAX], answer[(HOPS_MAX + 1) * (VARIABLE_MAX + 1)] = "";
    uint32_t value = 10000 + task_below(&d->random, 90000);
    for (uint32_t i = 0; i < names; i++) {
        size_t used = strlen(answer);
        memcpy(last, name, sizeof last);
        draw_variable(name, &d->random, i);
        for (int c = 0; c < VARIABLE_MAX - 1; c++) name[c] = (char)(name[c] - 'A' + 'a');
        if (i == 0) fprintf(d->context, "VAR %s = %u. ", name, value);
        else fprintf(d->context, "VAR %s = VAR %s. ", name, last);
        fprintf(d->context, "The grass is green. ");
        snprintf(answer + used, sizeof answer - used, " %s", name);
    }
    fprintf(d->context, TRACE_QUESTION "%s\n\n", value, names, value, answer);
}

// The assignments of all chains, and the value of the first. The caller frees needles[0 .. count-1].
static void draw_chains(task_draft *d, uint32_t count, uint32_t names, char (*variables)[VARIABLE_MAX],
                        const char **needles, uint32_t *value)
{
    uint32_t *numbers = task_pick(&d->random, 26 * 26, count);
    for (uint32_t i = 0; i < count; i++) {
        draw_variable(variables[i], &d->random, numbers[i]);
        if (i % names == 0) {
            uint32_t number = 10000 + task_below(&d->random, 90000);
            while (i && number == *value) number = 10000 + task_below(&d->random, 90000);
            *value = i ? *value : number;
            needles[i] = need_text("VAR %s = %u.", variables[i], number);
        } else {
            needles[i] = need_text("VAR %s = VAR %s.", variables[i], variables[i - 1]);
        }
    }
    free(numbers);
}

static kvb_status build_tracing(task_draft *d, kvb_error *err)
{
    uint32_t chains = d->t->set.tracing.chains, names = d->t->set.tracing.hops + 1, count = chains * names, value = 0;
    char variables[8 * (HOPS_MAX + 1)][VARIABLE_MAX];
    const char *needles[8 * (HOPS_MAX + 1)] = {0};
    draw_chains(d, count, names, variables, needles, &value);
    fprintf(d->context, "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n");
    if (d->t->set.tracing.example) show_traced_example(d, names);
    kvb_status status = task_hide(d, needles, count, err);
    if (status == KVB_OK) status = task_ask(d->sample, err, TRACE_QUESTION, value, names, value);
    for (uint32_t i = 0; status == KVB_OK && i < names; i++) status = task_gold(d->sample, err, "%s", variables[i]);
    for (uint32_t i = 0; i < count; i++) free((char *)(uintptr_t)needles[i]);
    return status;
}

// ---- Common words (RULER 3.3): a numbered list in which ten words stand more often than the others ----

static kvb_status build_common(task_draft *d, kvb_error *err)
{
    uint32_t common = d->t->set.common.common, often = d->t->set.common.often, rarely = d->t->set.common.rarely;
    size_t rare = d->units, length = (size_t)common * often + rare * rarely;
    if (common + rare > task_word_count())
        return kvb_fail(
            err, KVB_ARGUMENT,
            "task %s: %zu different words are wanted, there are %u; ask for fewer tokens or a larger rarely=",
            d->t->spec, common + rare, task_word_count());
    // Simple words as long as there are enough: the same draw for every number of units.
    uint32_t simple = task_noun_count(), *words = task_pick(&d->random, simple, common),
             *list = need(length, sizeof *list, "words");
    bool *taken = need(task_word_count(), sizeof *taken, "words");
    size_t n = 0;
    for (uint32_t i = 0; i < common; i++) {
        taken[words[i]] = true;
        for (uint32_t k = 0; k < often; k++) list[n++] = words[i];
    }
    for (uint32_t word = 0; n < length; word++)
        for (uint32_t k = 0; !taken[word] && k < rarely; k++) list[n++] = word;
    task_shuffle(&d->random, list, length);
    fprintf(d->context, "Below is a numbered list of words. In these words, some appear more often than others. "
                        "Memorize the ones that appear most often.\n");
    char word[TASK_WORD_MAX];
    for (size_t i = 0; i < length; i++) {
        task_word(word, list[i]);
        fprintf(d->context, "%zu. %s ", i + 1, word);
    }
    kvb_status status =
        task_ask(d->sample, err,
                 "\nQuestion: What are the %u most common words in the above list?\nAnswer: The top %u words that "
                 "appear most often in the list are:",
                 common, common);
    for (uint32_t i = 0; status == KVB_OK && i < common; i++) {
        task_word(word, words[i]);
        status = task_gold(d->sample, err, "%s", word);
    }
    free(words);
    free(list);
    free(taken);
    return status;
}

// ---- Frequent words (RULER 3.3): made-up words whose frequencies follow Zipf's law with exponent 2 ----

enum { CODED_WORDS = 64, CODED_LENGTH = 6 };

static void draw_coded(char word[CODED_LENGTH + 1], task_random *r)
{
    for (int i = 0; i < CODED_LENGTH; i++) word[i] = (char)('a' + task_below(r, 26));
    word[CODED_LENGTH] = '\0';
}

// The rank that a uniform draw falls on: rank k has the share k^-2 / sum.
static uint32_t draw_rank(task_random *r, double exponent)
{
    double sum = 0, draw;
    for (uint32_t k = 1; k <= CODED_WORDS; k++) sum += pow(k, -exponent);
    draw = task_below(r, 1u << 24) * 0x1p-24 * sum;
    for (uint32_t k = 1; k < CODED_WORDS; k++)
        if ((draw -= pow(k, -exponent)) < 0) return k - 1;
    return CODED_WORDS - 1;
}

static kvb_status build_frequent(task_draft *d, kvb_error *err)
{
    char words[CODED_WORDS][CODED_LENGTH + 1];
    size_t counts[CODED_WORDS] = {0};
    double exponent = d->t->set.frequent.zipf / 10.0;
    for (uint32_t i = 0; i < CODED_WORDS; i++) draw_coded(words[i], &d->random);
    fprintf(d->context, "Read the following coded text and track the frequency of each coded word. Find the three most "
                        "frequently appeared coded words. ");
    for (size_t i = 0; i < d->units; i++) {
        uint32_t rank = draw_rank(&d->random, exponent);
        counts[rank]++;
        fprintf(d->context, "%s ", words[rank]);
    }
    // The draw need not follow the law: what was really written counts; ties go to the better rank.
    bool taken[CODED_WORDS] = {false};
    kvb_status status =
        task_ask(d->sample, err,
                 "\nQuestion: What are the three most frequently appeared words in the above coded text?\n"
                 "Answer: According to the coded text above, the three most frequently appeared words are:");
    for (int i = 0; status == KVB_OK && i < 3; i++) {
        uint32_t best = CODED_WORDS;
        for (uint32_t k = 0; k < CODED_WORDS; k++)
            if (!taken[k] && (best == CODED_WORDS || counts[k] > counts[best])) best = k;
        taken[best] = true;
        status = task_gold(d->sample, err, "%s", words[best]);
    }
    return status;
}

// ---- Key-value retrieval (Liu et al., arXiv 2307.03172): JSON of random keys and values ----

static kvb_status build_pairs(task_draft *d, kvb_error *err)
{
    uint32_t questions = d->t->set.pairs.questions;
    size_t n = d->units > questions ? d->units : questions;
    bool uuid = d->t->set.pairs.uuid;
    char(*pairs)[2][40] = need(n, sizeof *pairs, "pairs");
    uint32_t *asked = task_pick(&d->random, (uint32_t)n, questions);
    kvb_status status = KVB_OK;
    fprintf(d->context, "Extract the value corresponding to the specified key in the JSON object below.\n\n{");
    for (size_t i = 0; i < n; i++) {
        for (int k = 0; k < 2; k++) {
            if (uuid) task_uuid(pairs[i][k], &d->random);
            else snprintf(pairs[i][k], sizeof pairs[i][k], "%06u", task_below(&d->random, 1000000));
        }
        fprintf(d->context, "%s\"%s\": \"%s\"", i ? ",\n " : "", pairs[i][0], pairs[i][1]);
    }
    fprintf(d->context, "}\n");
    for (uint32_t i = 0; status == KVB_OK && i < questions; i++) {
        status = task_ask(d->sample, err, "\nKey: \"%s\"\nCorresponding value: \"", pairs[asked[i]][0]);
        if (status == KVB_OK) status = task_gold(d->sample, err, "%s", pairs[asked[i]][1]);
    }
    free(pairs);
    free(asked);
    return status;
}

const task_kind task_variable_tracing = {
    .spec = {.name = "vt",
             .parameters = {SPEC(struct task_tracing_settings, chains, 1, 1, 8, "independent chains of assignments"),
                            SPEC(struct task_tracing_settings, hops, 4, 1, HOPS_MAX,
                                 "assignments after the first of a chain"),
                            SPEC_ON_OFF(struct task_tracing_settings, example, 1,
                                        "1: a solved example stands in front, as in RULER")}},
    .summary = "variable tracing: name all variables that got one value, over several assignments",
    .rule = TASK_ALL,
    .new_tokens = 40,
    .build = build_tracing};
const task_kind task_common_words = {
    .spec = {.name = "cwe",
             .parameters = {SPEC(struct task_common_settings, common, 10, 1, TASK_MAX_GOLD, "words to find"),
                            SPEC(struct task_common_settings, often, 30, 2, 10000,
                                 "times that each of them stands in the list"),
                            SPEC(struct task_common_settings, rarely, 3, 1, 100,
                                 "times that every other word stands there")}},
    .summary = "common words extraction: the words that stand most often in a numbered list",
    .rule = TASK_ALL,
    .new_tokens = 64,
    .build = build_common};
const task_kind task_frequent_words = {.spec = {.name = "fwe",
                                                .parameters = {SPEC(struct task_frequent_settings, zipf, 20, 10, 60,
                                                                    "ten times the exponent of Zipf's law")}},
                                       .summary = "frequent words extraction: the three most frequent made-up words",
                                       .rule = TASK_ALL,
                                       .new_tokens = 40,
                                       .build = build_frequent};
const task_kind task_key_value = {
    .spec = {.name = "kv",
             .parameters = {SPEC(struct task_pairs_settings, questions, 1, 1, TASK_MAX_QUESTIONS,
                                 "keys asked for over one context"),
                            SPEC_ON_OFF(struct task_pairs_settings, uuid, 1, "0: six digits instead of UUIDs")}},
    .summary = "key-value retrieval: the value of a key in a JSON object of random pairs",
    .rule = TASK_ALL,
    .new_tokens = 40,
    .build = build_pairs};
