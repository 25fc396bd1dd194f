#include "evaluator/task.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "profiler/backend/sampler.h"
#include "runtime/fail.h"
#include <cJSON.h>
#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

// A stream of draws: number `step` of sample `index` of the seed. Copying it goes on from the same place.
typedef struct task_random {
    uint64_t seed, index;
    uint32_t stream, step;
} task_random;

// What a generator works with. It is called several times with the same draws and growing `units` until the context is
// long enough.
struct task_draft {
    const task *t;
    const task_source *source;
    task_random random;
    size_t units;    // of filler: sentences, words, pairs
    size_t n_tokens; // wanted
    FILE *context;   // receives the context
    task_sample *sample;
};

// ---- Draws ----

// Uniform in 0 .. n-1, n >= 1.
static uint32_t draw_below(task_random *r, uint32_t n)
{
    return (uint32_t)(sampler_uniform(r->seed, r->index, r->stream, r->step++) * n);
}

static void shuffle_items(task_random *r, uint32_t *items, size_t n)
{
    for (size_t i = n; i > 1; i--) {
        uint32_t j = draw_below(r, (uint32_t)i), item = items[j];
        items[j] = items[i - 1];
        items[i - 1] = item;
    }
}

// n different numbers of 0 .. pool-1 in random order, n <= pool. The caller frees them.
static uint32_t *pick_items(task_random *r, uint32_t pool, size_t n)
{
    uint32_t *items = need(pool, sizeof *items, "numbers");
    for (uint32_t i = 0; i < pool; i++) items[i] = i;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = i + draw_below(r, pool - i), item = items[j];
        items[j] = items[i];
        items[i] = item;
    }
    return items;
}

// ---- Words ----

static const char *const NOUNS[] = {
    "apple",    "anchor",  "arrow",   "badge",    "banana",   "basket",  "beach",    "bell",    "bench",  "bicycle",
    "blanket",  "boat",    "book",    "bottle",   "box",      "branch",  "bread",    "bridge",  "brush",  "bucket",
    "button",   "cabin",   "cake",    "camera",   "candle",   "canoe",   "carpet",   "castle",  "chair",  "cheese",
    "cherry",   "clock",   "cloud",   "coat",     "coffee",   "coin",    "copper",   "cotton",  "crown",  "cup",
    "curtain",  "desert",  "diamond", "dinner",   "doctor",   "door",    "dragon",   "drum",    "eagle",  "engine",
    "farm",     "feather", "fence",   "field",    "finger",   "fire",    "flag",     "flower",  "forest", "fork",
    "garden",   "gate",    "glass",   "glove",    "goat",     "grape",   "guitar",   "hammer",  "harbor", "hat",
    "honey",    "horse",   "hotel",   "island",   "jacket",   "jewel",   "key",      "kitchen", "ladder", "lake",
    "lamp",     "leaf",    "lemon",   "letter",   "library",  "lion",    "market",   "mirror",  "monkey", "moon",
    "mountain", "museum",  "needle",  "nest",     "notebook", "ocean",   "onion",    "orange",  "oven",   "owl",
    "paint",    "palace",  "paper",   "parrot",   "pencil",   "pepper",  "piano",    "pillow",  "planet", "plate",
    "pocket",   "pond",    "potato",  "prince",   "rabbit",   "radio",   "rain",     "ribbon",  "river",  "robot",
    "rocket",   "rope",    "rose",    "salad",    "sand",     "school",  "scissors", "shadow",  "sheep",  "ship",
    "shirt",    "shoe",    "silver",  "snow",     "soap",     "spider",  "spoon",    "spring",  "stone",  "storm",
    "sugar",    "summer",  "sword",   "table",    "teacher",  "temple",  "ticket",   "tiger",   "tower",  "train",
    "tree",     "tunnel",  "turtle",  "umbrella", "valley",   "village", "violin",   "wagon",   "wall",   "water",
    "whale",    "wheel",   "window",  "winter",   "wolf",     "yellow",
};
static const char *const ADJECTIVES[] = {
    "able",   "ancient", "angry",  "bitter", "bold",    "brave",   "bright", "broken", "calm",   "careful", "cheap",
    "clean",  "clever",  "cold",   "common", "crisp",   "curious", "dark",   "deep",   "dry",    "eager",   "early",
    "empty",  "famous",  "fast",   "fierce", "final",   "flat",    "fresh",  "gentle", "golden", "grand",   "green",
    "happy",  "heavy",   "hidden", "hollow", "honest",  "huge",    "humble", "kind",   "large",  "lazy",    "light",
    "little", "lonely",  "loud",   "lucky",  "modern",  "narrow",  "neat",   "noble",  "noisy",  "odd",     "old",
    "pale",   "patient", "plain",  "polite", "proud",   "quick",   "quiet",  "rare",   "rich",   "rough",   "round",
    "royal",  "rusty",   "sharp",  "shiny",  "short",   "silent",  "simple", "slow",   "small",  "smooth",  "soft",
    "solid",  "sour",    "square", "steep",  "strange", "strong",  "sweet",  "tall",   "tame",   "tender",  "thick",
    "thin",   "tiny",    "tired",  "warm",   "weak",    "wide",    "wild",   "wise",
};
enum {
    N_NOUNS = sizeof NOUNS / sizeof *NOUNS,
    N_ADJECTIVES = sizeof ADJECTIVES / sizeof *ADJECTIVES,
    N_WORDS = N_NOUNS + N_ADJECTIVES + N_NOUNS * N_ADJECTIVES
};

// The word number i of a list without repetition: nouns, adjectives, then both joined by a hyphen.
enum { TASK_WORD_MAX = 48 };

static void write_word(char room[TASK_WORD_MAX], uint32_t i)
{
    i %= N_WORDS;
    if (i < N_NOUNS) snprintf(room, TASK_WORD_MAX, "%s", NOUNS[i]);
    else if (i < N_NOUNS + N_ADJECTIVES) snprintf(room, TASK_WORD_MAX, "%s", ADJECTIVES[i - N_NOUNS]);
    else {
        i -= N_NOUNS + N_ADJECTIVES;
        snprintf(room, TASK_WORD_MAX, "%s-%s", ADJECTIVES[i % N_ADJECTIVES], NOUNS[i / N_ADJECTIVES]);
    }
}

static void draw_uuid(char room[37], task_random *r)
{
    static const char form[] = "xxxxxxxx-xxxx-4xxx-8xxx-xxxxxxxxxxxx";
    for (size_t i = 0; i < sizeof form; i++) room[i] = form[i] == 'x' ? "0123456789abcdef"[draw_below(r, 16)] : form[i];
}

// ---- Questions ----

// The caller owns the text.
static char *formatted(const char *format, va_list list)
{
    char *text;
    return needed(vasprintf(&text, format, list) < 0 ? NULL : text, "questions");
}

// Adds a question, or a gold string to the last question. There is place: the parameters' ranges end at these limits.
static void __attribute__((format(printf, 2, 3))) add_question(task_sample *s, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    s->questions[s->n_questions++] = (task_question){.text = formatted(format, list)};
    va_end(list);
}

static void add_gold(task_sample *s, const char *gold)
{
    task_question *q = &s->questions[s->n_questions - 1];
    q->gold[q->n_gold++] = need_text("%s", gold);
}

// ---- Hay ----

// RULER's noise haystack.
static const char NOISE[] = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

// The end of the sentence that begins at `at`: behind a full stop, question or exclamation mark that a blank follows,
// or the text's end.
static const char *sentence_end(const char *at)
{
    for (; *at; at++)
        if (strchr(".?!", *at) && (at[1] == ' ' || at[1] == '\n' || !at[1])) return at + 1;
    return at;
}

static const char *skip_blanks(const char *at)
{
    return at + strspn(at, " \n\r\t");
}

static size_t count_sentences(const char *text)
{
    size_t n = 0;
    for (text = skip_blanks(text); *text; text = skip_blanks(sentence_end(text))) n++;
    return n;
}

static int compare_places(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Writes `units` sentences of the haystack with the needles at random places among them, in random order.
static void hide_in_hay(task_draft *d, const char *const *needles, size_t n_needles)
{
    const char *hay = d->source->haystack ? d->source->haystack : NOISE, *begin = skip_blanks(hay), *at = begin;
    size_t n_sentences = count_sentences(hay);
    // Places are shares of the context, so that they stay where they are while the hay grows.
    double *places = need(n_needles, sizeof *places, "needles");
    uint32_t *order = need(n_needles, sizeof *order, "needles");
    for (size_t i = 0; i < n_needles; i++) {
        places[i] = draw_below(&d->random, 1u << 20) * 0x1p-20;
        order[i] = (uint32_t)i;
    }
    qsort(places, n_needles, sizeof *places, compare_places);
    shuffle_items(&d->random, order, n_needles);
    // Another text begins elsewhere, so that samples differ; noise has nowhere else to begin.
    for (uint32_t skip = d->source->haystack ? draw_below(&d->random, (uint32_t)n_sentences) : 0; skip; skip--)
        at = skip_blanks(sentence_end(at));
    size_t next = 0;
    for (size_t i = 0; i <= d->units; i++) {
        for (; next < n_needles && (i == d->units || places[next] * (double)d->units < (double)i); next++)
            fprintf(d->context, "%s ", needles[order[next]]);
        if (i == d->units) break;
        const char *end = sentence_end(at);
        fprintf(d->context, "%.*s ", (int)(end - at), at);
        at = skip_blanks(end);
        if (!*at) at = begin;
    }
    free(places);
    free(order);
}

// ---- Needles in a haystack: one, one among other keys, several values of one key, several keys in one question
// (RULER, 3) ----

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
        draw_uuid(value, &d->random);
        return;
    }
    uint32_t digits = d->t->set.niah.digits;
    for (uint32_t i = 0; i < digits; i++)
        value[i] = (char)(i ? '0' + draw_below(&d->random, 10) : '1' + draw_below(&d->random, 9));
    value[digits] = '\0';
}

// n_keys keys with n_values values each; keys are nouns while there are enough. The caller frees them.
static needle *draw_needles(size_t n_keys, size_t n_values, task_draft *d)
{
    uint32_t pool = n_keys <= N_NOUNS ? N_NOUNS : N_WORDS;
    uint32_t *words = pick_items(&d->random, pool, n_keys);
    needle *n = need(n_keys * n_values, sizeof *n, "needles");
    for (size_t i = 0; i < n_keys * n_values; i++) {
        write_word(n[i].key, words[i / n_values]);
        draw_value(n[i].value, d);
        snprintf(n[i].text, sizeof n[i].text, "The special magic %s for %s is: %s.", kind_of(d->t), n[i].key,
                 n[i].value);
    }
    free(words);
    return n;
}

static void hide_needles(task_draft *d, const needle *n, size_t count)
{
    const char **texts = need(count, sizeof *texts, "needles");
    for (size_t i = 0; i < count; i++) texts[i] = n[i].text;
    fprintf(d->context,
            "Some special magic %ss are hidden within the following text. Make sure to memorize them. I will quiz you "
            "about the %ss afterwards.\n",
            kind_of(d->t), kind_of(d->t));
    hide_in_hay(d, texts, count);
    free(texts);
}

// One question for each of the first `questions` keys.
static kvb_status build_keys(task_draft *d, size_t n_keys, size_t questions)
{
    const char *kind = kind_of(d->t);
    needle *n = draw_needles(n_keys, 1, d);
    hide_needles(d, n, n_keys);
    for (size_t i = 0; i < questions; i++) {
        add_question(d->sample,
                     "\nWhat is the special magic %s for %s mentioned in the provided text?\nThe special magic "
                     "%s for %s mentioned in the provided text is:",
                     kind, n[i].key, kind, n[i].key);
        add_gold(d->sample, n[i].value);
    }
    free(n);
    return KVB_OK;
}

static kvb_status build_single(task_draft *d, kvb_error *err)
{
    (void)err;
    return build_keys(d, 1, 1);
}

static kvb_status build_multikey(task_draft *d, kvb_error *err)
{
    uint32_t keys = d->t->set.niah.keys, questions = d->t->set.niah.questions;
    if (questions > keys)
        return kvb_fail(err, KVB_ARGUMENT, "task %s: %u questions, but only %u keys to ask for", d->t->spec, questions,
                        keys);
    return build_keys(d, keys, questions);
}

// One question for all `count` values of these needles, whose keys stand in it as `keys`.
static kvb_status build_list(task_draft *d, needle *n, size_t count, const char *keys)
{
    const char *kind = kind_of(d->t);
    hide_needles(d, n, count);
    add_question(d->sample,
                 "\nWhat are all the special magic %ss for %s mentioned in the provided text?\nThe special magic "
                 "%ss for %s mentioned in the provided text are:",
                 kind, keys, kind, keys);
    for (size_t i = 0; i < count; i++) add_gold(d->sample, n[i].value);
    free(n);
    return KVB_OK;
}

static kvb_status build_multivalue(task_draft *d, kvb_error *err)
{
    size_t values = d->t->set.niah.values;
    needle *n = draw_needles(1, values, d);
    (void)err;
    return build_list(d, n, values, n->key);
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
    needle *n = draw_needles(queries, 1, d);
    (void)err;
    list_keys(keys, sizeof keys, n, queries);
    return build_list(d, n, queries, keys);
}

#define VALUE_PARAMETERS                                                     \
    SPEC(struct task_niah_settings, digits, 7, 1, 32, "digits of a number"), \
        SPEC_ON_OFF(struct task_niah_settings, uuid, 0, "1: values are UUIDs instead of numbers")

static const task_kind task_niah_single = {.spec = {.name = "niah_single", .parameters = {VALUE_PARAMETERS}},
                                           .summary = "find the value of the one key that is hidden in the text",
                                           .rule = TASK_ALL,
                                           .new_tokens = 16,
                                           .build = build_single};
static const task_kind task_niah_multikey = {
    .spec = {.name = "niah_multikey",
             .parameters = {VALUE_PARAMETERS,
                            SPEC(struct task_niah_settings, keys, 4, 2, 256, "keys hidden in the text"),
                            SPEC(struct task_niah_settings, questions, 1, 1, TASK_MAX_QUESTIONS,
                                 "questions asked about one context, each for another key")}},
    .summary = "find the value of one key, with other keys in the text",
    .rule = TASK_ALL,
    .new_tokens = 16,
    .build = build_multikey};
static const task_kind task_niah_multivalue = {
    .spec = {.name = "niah_multivalue",
             .parameters = {VALUE_PARAMETERS,
                            SPEC(struct task_niah_settings, values, 4, 2, TASK_MAX_GOLD, "values of the key")}},
    .summary = "find all values of one key",
    .rule = TASK_ALL,
    .new_tokens = 64,
    .build = build_multivalue};
static const task_kind task_niah_multiquery = {
    .spec = {.name = "niah_multiquery",
             .parameters = {VALUE_PARAMETERS, SPEC(struct task_niah_settings, queries, 4, 2, TASK_MAX_GOLD,
                                                   "keys that the question asks for")}},
    .summary = "find the values of several keys in one answer",
    .rule = TASK_ALL,
    .new_tokens = 64,
    .build = build_multiquery};

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
    for (int i = 2; i < VARIABLE_MAX - 1; i++) name[i] = (char)('A' + draw_below(r, 26));
    name[VARIABLE_MAX - 1] = '\0';
}

// A solved example in front of the text, as RULER gives one: it shows what an answer looks like. Its names are in lower
// case, the sample's are not.
static void show_traced_example(task_draft *d, uint32_t names)
{
    char name[VARIABLE_MAX] = "", last[VARIABLE_MAX], answer[(HOPS_MAX + 1) * (VARIABLE_MAX + 1)] = "";
    uint32_t value = 10000 + draw_below(&d->random, 90000);
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
    uint32_t *numbers = pick_items(&d->random, 26 * 26, count);
    for (uint32_t i = 0; i < count; i++) {
        draw_variable(variables[i], &d->random, numbers[i]);
        if (i % names == 0) {
            uint32_t number = 10000 + draw_below(&d->random, 90000);
            while (i && number == *value) number = 10000 + draw_below(&d->random, 90000);
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
    (void)err;
    uint32_t chains = d->t->set.tracing.chains, names = d->t->set.tracing.hops + 1, count = chains * names, value = 0;
    char variables[8 * (HOPS_MAX + 1)][VARIABLE_MAX];
    const char *needles[8 * (HOPS_MAX + 1)] = {0};
    draw_chains(d, count, names, variables, needles, &value);
    fprintf(d->context, "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n");
    if (d->t->set.tracing.example) show_traced_example(d, names);
    hide_in_hay(d, needles, count);
    add_question(d->sample, TRACE_QUESTION, value, names, value);
    for (uint32_t i = 0; i < names; i++) add_gold(d->sample, variables[i]);
    for (uint32_t i = 0; i < count; i++) free((char *)(uintptr_t)needles[i]);
    return KVB_OK;
}

// ---- Common words (RULER 3.3): a numbered list in which ten words stand more often than the others ----

static kvb_status build_common(task_draft *d, kvb_error *err)
{
    uint32_t common = d->t->set.common.common, often = d->t->set.common.often, rarely = d->t->set.common.rarely;
    size_t rare = d->units, length = (size_t)common * often + rare * rarely;
    if (common + rare > N_WORDS)
        return kvb_fail(
            err, KVB_ARGUMENT,
            "task %s: %zu different words are wanted, there are %u; ask for fewer tokens or a larger rarely=",
            d->t->spec, common + rare, N_WORDS);
    // Simple words as long as there are enough: the same draw for every number of units.
    uint32_t simple = N_NOUNS, *words = pick_items(&d->random, simple, common),
             *list = need(length, sizeof *list, "words");
    bool *taken = need(N_WORDS, sizeof *taken, "words");
    size_t n = 0;
    for (uint32_t i = 0; i < common; i++) {
        taken[words[i]] = true;
        for (uint32_t k = 0; k < often; k++) list[n++] = words[i];
    }
    for (uint32_t word = 0; n < length; word++)
        for (uint32_t k = 0; !taken[word] && k < rarely; k++) list[n++] = word;
    shuffle_items(&d->random, list, length);
    fprintf(d->context, "Below is a numbered list of words. In these words, some appear more often than others. "
                        "Memorize the ones that appear most often.\n");
    char word[TASK_WORD_MAX];
    for (size_t i = 0; i < length; i++) {
        write_word(word, list[i]);
        fprintf(d->context, "%zu. %s ", i + 1, word);
    }
    add_question(d->sample,
                 "\nQuestion: What are the %u most common words in the above list?\nAnswer: The top %u words that "
                 "appear most often in the list are:",
                 common, common);
    for (uint32_t i = 0; i < common; i++) {
        write_word(word, words[i]);
        add_gold(d->sample, word);
    }
    free(words);
    free(list);
    free(taken);
    return KVB_OK;
}

// ---- Frequent words (RULER 3.3): made-up words whose frequencies follow Zipf's law with exponent 2 ----

enum { CODED_WORDS = 64, CODED_LENGTH = 6 };

static void draw_coded(char word[CODED_LENGTH + 1], task_random *r)
{
    for (int i = 0; i < CODED_LENGTH; i++) word[i] = (char)('a' + draw_below(r, 26));
    word[CODED_LENGTH] = '\0';
}

// The rank that a uniform draw falls on: rank k has the share k^-2 / sum.
static uint32_t draw_rank(task_random *r, double exponent)
{
    double sum = 0, draw;
    for (uint32_t k = 1; k <= CODED_WORDS; k++) sum += pow(k, -exponent);
    draw = draw_below(r, 1u << 24) * 0x1p-24 * sum;
    for (uint32_t k = 1; k < CODED_WORDS; k++)
        if ((draw -= pow(k, -exponent)) < 0) return k - 1;
    return CODED_WORDS - 1;
}

static kvb_status build_frequent(task_draft *d, kvb_error *err)
{
    (void)err;
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
    add_question(d->sample, "\nQuestion: What are the three most frequently appeared words in the above coded text?\n"
                            "Answer: According to the coded text above, the three most frequently appeared words are:");
    for (int i = 0; i < 3; i++) {
        uint32_t best = CODED_WORDS;
        for (uint32_t k = 0; k < CODED_WORDS; k++)
            if (!taken[k] && (best == CODED_WORDS || counts[k] > counts[best])) best = k;
        taken[best] = true;
        add_gold(d->sample, words[best]);
    }
    return KVB_OK;
}

// ---- Key-value retrieval (Liu et al., arXiv 2307.03172): JSON of random keys and values ----

static kvb_status build_pairs(task_draft *d, kvb_error *err)
{
    uint32_t questions = d->t->set.pairs.questions;
    size_t n = d->units > questions ? d->units : questions;
    bool uuid = d->t->set.pairs.uuid;
    char(*pairs)[2][40] = need(n, sizeof *pairs, "pairs");
    uint32_t *asked = pick_items(&d->random, (uint32_t)n, questions);
    (void)err;
    fprintf(d->context, "Extract the value corresponding to the specified key in the JSON object below.\n\n{");
    for (size_t i = 0; i < n; i++) {
        for (int k = 0; k < 2; k++) {
            if (uuid) draw_uuid(pairs[i][k], &d->random);
            else snprintf(pairs[i][k], sizeof pairs[i][k], "%06u", draw_below(&d->random, 1000000));
        }
        fprintf(d->context, "%s\"%s\": \"%s\"", i ? ",\n " : "", pairs[i][0], pairs[i][1]);
    }
    fprintf(d->context, "}\n");
    for (uint32_t i = 0; i < questions; i++) {
        add_question(d->sample, "\nKey: \"%s\"\nCorresponding value: \"", pairs[asked[i]][0]);
        add_gold(d->sample, pairs[asked[i]][1]);
    }
    free(pairs);
    free(asked);
    return KVB_OK;
}

static const task_kind task_variable_tracing = {
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
static const task_kind task_common_words = {
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
static const task_kind task_frequent_words = {
    .spec = {.name = "fwe",
             .parameters = {SPEC(struct task_frequent_settings, zipf, 20, 10, 60,
                                 "ten times the exponent of Zipf's law")}},
    .summary = "frequent words extraction: the three most frequent made-up words",
    .rule = TASK_ALL,
    .new_tokens = 40,
    .build = build_frequent};
static const task_kind task_key_value = {
    .spec = {.name = "kv",
             .parameters = {SPEC(struct task_pairs_settings, questions, 1, 1, TASK_MAX_QUESTIONS,
                                 "keys asked for over one context"),
                            SPEC_ON_OFF(struct task_pairs_settings, uuid, 1, "0: six digits instead of UUIDs")}},
    .summary = "key-value retrieval: the value of a key in a JSON object of random pairs",
    .rule = TASK_ALL,
    .new_tokens = 40,
    .build = build_pairs};

// ---- Questions about texts that come with answers (calibration files that were held out) ----
//
// Sample i is line i of the file. Cut to a length, a text keeps the questions whose answer can still be found in it: at
// least four fifths of the answer's words stand in what is left.

// Letters, digits and every byte beyond ASCII make up words.
static bool in_word(unsigned char c)
{
    return isalnum(c) || c >= 0x80;
}

static bool holds_word(const char *text, const char *word, size_t length)
{
    for (const char *at = text; *at; at++)
        if (strncasecmp(at, word, length) == 0 && (at == text || !in_word((unsigned char)at[-1]))) return true;
    return false;
}

static bool answer_stands_in(const char *text, const char *answer)
{
    size_t words = 0, found = 0;
    while (*answer) {
        size_t length = 0;
        while (in_word((unsigned char)answer[length])) length++;
        if (length) {
            words++;
            found += holds_word(text, answer, length);
        }
        answer += length ? length : 1;
    }
    return words && found * 5 >= words * 4;
}

// The text's first n_tokens tokens, cut back to the last end of a sentence where one is near. malloc'd.
static kvb_status cut_text(char **out, const char *text, const tokenizer *tokens, size_t n_tokens, kvb_error *err)
{
    int32_t *ids = NULL;
    size_t n = 0;
    kvb_status status = tokenizer_encode(tokens, text, strlen(text), false, &ids, &n, err);
    if (status != KVB_OK) return status;
    if (n_tokens && n > n_tokens) n = n_tokens;
    size_t size = tokenizer_decode(tokens, ids, n, NULL, 0);
    *out = need(size + 1, 1, "characters");
    tokenizer_decode(tokens, ids, n, *out, size);
    char *stop = size < strlen(text) ? strrchr(*out, '.') : NULL;
    if (stop && (size_t)(stop - *out) > size / 2) stop[1] = '\0';
    free(ids);
    return KVB_OK;
}

static kvb_status build_qa(task_draft *d, kvb_error *err)
{
    const calib_file *file = d->source->texts;
    if (d->random.index >= file->count)
        return kvb_fail(err, KVB_ARGUMENT, "task qa: sample %llu is asked for, the file has %zu texts",
                        (unsigned long long)d->random.index, file->count);
    const calib_context *c = &file->contexts[d->random.index];
    size_t most = d->t->set.qa.questions;
    if (!c->context)
        return kvb_fail(err, KVB_ARGUMENT, "task qa: sample '%s' holds token ids, expected text", c->sample_id);
    char *text = NULL;
    kvb_status status = cut_text(&text, c->context, d->source->tokens, d->n_tokens, err);
    if (status == KVB_OK) fputs(text, d->context);
    for (size_t i = 0; status == KVB_OK && i < c->n_questions && d->sample->n_questions < most; i++) {
        const calib_question *q = &c->questions[i];
        if (!q->text || !q->answer || !answer_stands_in(text, q->answer)) continue;
        add_question(d->sample, "\n\nQuestion: %s%s", q->text, c->answer_prefix);
        add_gold(d->sample, q->answer);
    }
    if (status == KVB_OK && d->sample->n_questions == 0)
        status =
            kvb_fail(err, KVB_ARGUMENT,
                     "task qa: sample '%s': no question with an answer in its first %zu tokens; use a longer --tokens",
                     c->sample_id, d->n_tokens);
    snprintf(d->sample->id, sizeof d->sample->id, "%s", c->sample_id);
    free(text);
    return status;
}

static const task_kind task_qa = {
    .spec = {.name = "qa",
             .parameters = {SPEC(struct task_qa_settings, questions, TASK_MAX_QUESTIONS, 1, TASK_MAX_QUESTIONS,
                                 "questions asked about one text")}},
    .summary = "questions about texts that were held out (--texts FILE.jsonl)",
    .rule = TASK_F1,
    .new_tokens = 32,
    .whole_text = true,
    .build = build_qa};

// ---- Scores as RULER gives them (string_match_all, string_match_part), and SQuAD's F1 for answers that are sentences
// ----

// The gold string without outer blanks and final full stop.
static const char *trim(const char *gold, size_t *length)
{
    while (isspace((unsigned char)*gold)) gold++;
    *length = strlen(gold);
    while (*length && (isspace((unsigned char)gold[*length - 1]) || gold[*length - 1] == '.')) --*length;
    return gold;
}

static bool holds(const char *answer, const char *gold)
{
    size_t length;
    gold = trim(gold, &length);
    for (; *answer; answer++)
        if (strncasecmp(answer, gold, length) == 0) return true;
    return length == 0;
}

typedef struct word {
    const char *at;
    size_t length;
    bool used;
} word;

static bool is_article(const char *at, size_t length)
{
    return (length == 1 && strncasecmp(at, "a", 1) == 0) || (length == 2 && strncasecmp(at, "an", 2) == 0) ||
           (length == 3 && strncasecmp(at, "the", 3) == 0);
}

// Words of the first line that is not empty, without punctuation and articles, as SQuAD normalises answers.
static size_t split_line(word *out, size_t cap, const char *text)
{
    size_t n = 0;
    while (isspace((unsigned char)*text)) text++;
    while (*text && *text != '\n') {
        size_t length = 0;
        while (isalnum((unsigned char)text[length]) || (unsigned char)text[length] >= 0x80) length++;
        if (length && !is_article(text, length) && n < cap) out[n++] = (word){text, length, false};
        text += length ? length : 1;
    }
    return n;
}

static double f1(const char *answer, const char *gold)
{
    enum { WORDS = 256 };
    word said[WORDS], wanted[WORDS];
    size_t n_said = split_line(said, WORDS, answer), n_wanted = split_line(wanted, WORDS, gold), common = 0;
    for (size_t i = 0; i < n_said; i++)
        for (size_t k = 0; k < n_wanted; k++) {
            if (wanted[k].used || wanted[k].length != said[i].length ||
                strncasecmp(wanted[k].at, said[i].at, said[i].length) != 0)
                continue;
            wanted[k].used = true;
            common++;
            break;
        }
    return common ? 2.0 * (double)common / (double)(n_said + n_wanted) : 0;
}

double task_score(task_rule rule, const char *answer, char *const *gold, size_t n_gold)
{
    double sum = 0, best = 0;
    for (size_t i = 0; i < n_gold; i++) {
        double one = rule == TASK_F1 ? f1(answer, gold[i]) : holds(answer, gold[i]);
        sum += one;
        best = one > best ? one : best;
    }
    return rule == TASK_ALL ? (n_gold ? sum / (double)n_gold : 0) : best;
}

bool task_score_is_final(task_rule rule, const char *answer, char *const *gold, size_t n_gold)
{
    if (rule != TASK_F1) return task_score(rule, answer, gold, n_gold) == 1;
    while (isspace((unsigned char)*answer)) answer++;
    return strchr(answer, '\n') != NULL;
}

// ---- Tasks ----

const task_kind *const task_kinds[] = {&task_niah_single,     &task_niah_multikey,    &task_niah_multivalue,
                                       &task_niah_multiquery, &task_variable_tracing, &task_common_words,
                                       &task_frequent_words,  &task_key_value,        &task_qa};
const size_t task_kind_count = sizeof task_kinds / sizeof *task_kinds;

static const spec_row *task_row(size_t i)
{
    return i < task_kind_count ? &task_kinds[i]->spec : NULL;
}

kvb_status task_parse(task *out, const char *text, kvb_error *err)
{
    static const spec_list tasks = {"task", task_row, NULL};
    size_t row;
    *out = (task){0};
    kvb_status status = spec_read(&tasks, text, 0, strlen(text), &row, &out->set, err);
    if (status != KVB_OK) return status;
    out->kind = task_kinds[row];
    return spec_write_all(out->spec, sizeof out->spec, &tasks, &out->kind->spec, &out->set, err);
}

// ---- Length ----

void task_sample_free(task_sample *s)
{
    for (size_t i = 0; i < s->n_questions; i++) {
        free(s->questions[i].text);
        for (size_t k = 0; k < s->questions[i].n_gold; k++) free(s->questions[i].gold[k]);
    }
    free(s->context);
    memset(s, 0, sizeof *s);
}

// FNV-1a of the task's text: draws of different tasks do not resemble each other.
static uint32_t stream_of(const char *text)
{
    uint32_t h = 2166136261u;
    for (; *text; text++) h = (h ^ (unsigned char)*text) * 16777619u;
    return h;
}

static kvb_status count_tokens(task_sample *s, const tokenizer *tokens, kvb_error *err)
{
    int32_t *ids = NULL;
    kvb_status status = tokenizer_encode(tokens, s->context, strlen(s->context), false, &ids, &s->n_tokens, err);
    free(ids);
    return status;
}

// The sample with so many units of filler.
static kvb_status build_with(task_sample *out, const task *t, const task_source *source, size_t n_tokens,
                             uint64_t index, size_t units, kvb_error *err)
{
    memset(out, 0, sizeof *out);
    size_t size = 0;
    task_draft d = {t,     source,   {source->seed, index, stream_of(t->spec), 0},
                    units, n_tokens, open_memstream(&out->context, &size),
                    out};
    needed(d.context, "contexts");
    kvb_status status = t->kind->build(&d, err);
    bool broken = ferror(d.context) != 0; // for a lack of memory
    needed(fclose(d.context) == 0 && !broken ? out->context : NULL, "contexts");
    if (status == KVB_OK) status = count_tokens(out, source->tokens, err);
    if (status != KVB_OK) task_sample_free(out);
    return status;
}

// The most units whose context has at most n_tokens tokens: doubling, then halving the step. More filler is never fewer
// tokens, as every unit adds some of its own.
static kvb_status fit_units(size_t *units, const task *t, const task_source *source, size_t n_tokens, uint64_t index,
                            kvb_error *err)
{
    size_t best = 0, step = 1;
    for (bool growing = true; step;) {
        task_sample probe;
        kvb_status status = build_with(&probe, t, source, n_tokens, index, best + step, err);
        if (status != KVB_OK) return status;
        bool fits = probe.n_tokens <= n_tokens;
        task_sample_free(&probe);
        if (fits) best += step;
        growing = growing && fits;
        step = growing ? step * 2 : step / 2;
        if (best > n_tokens) break; // a unit has a token at least
    }
    *units = best;
    return KVB_OK;
}

kvb_status task_make(task_sample *out, const task *t, const task_source *source, size_t n_tokens, uint64_t index,
                     kvb_error *err)
{
    memset(out, 0, sizeof *out);
    if (t->kind->whole_text != (source->texts != NULL))
        return kvb_fail(
            err, KVB_ARGUMENT, "task %s: %s", t->kind->spec.name,
            source->texts ? "takes no texts; they are for the task qa"
                          : "needs texts with questions and answers; give a calibration file with --texts FILE.jsonl");
    if (source->haystack && count_sentences(source->haystack) == 0)
        return kvb_fail(err, KVB_ARGUMENT, "task %s: the haystack holds no sentence", t->spec);
    if (n_tokens == 0 && !t->kind->whole_text)
        return kvb_fail(err, KVB_ARGUMENT, "task %s: how long? give --tokens N", t->kind->spec.name);
    size_t units = 0;
    kvb_status status = KVB_OK;
    if (!t->kind->whole_text) status = fit_units(&units, t, source, n_tokens, index, err);
    if (status == KVB_OK) status = build_with(out, t, source, n_tokens, index, units, err);
    if (status == KVB_OK && n_tokens && out->n_tokens > n_tokens) {
        status = kvb_fail(err, KVB_ARGUMENT, "task %s: does not fit into %zu tokens, its shortest context has %zu",
                          t->spec, n_tokens, out->n_tokens);
        task_sample_free(out);
    }
    if (status == KVB_OK && !out->id[0])
        snprintf(out->id, sizeof out->id, "%s-%zu-%llu-%llu", t->kind->spec.name, n_tokens,
                 (unsigned long long)source->seed, (unsigned long long)index);
    return status;
}

// ---- As calibration data ----

// The answer that is expected: the gold strings joined by ", " behind a blank; malloc'd.
static char *join_gold(const task_question *q)
{
    char *joined = need_text("%s%s", q->n_gold ? " " : "", q->n_gold ? q->gold[0] : "");
    for (size_t i = 1; i < q->n_gold; i++) {
        char *longer = need_text("%s, %s", joined, q->gold[i]);
        free(joined);
        joined = longer;
    }
    return joined;
}

kvb_status task_write_jsonl(FILE *to, const task *t, const task_sample *s, uint64_t seed, kvb_error *err)
{
    cJSON *line = cJSON_CreateObject();
    json_put(line, "sample_id %s context %s", s->id, s->context);
    cJSON *questions = cJSON_AddArrayToObject(line, "questions"), *answers = cJSON_AddArrayToObject(line, "answers"),
          *golds = cJSON_AddArrayToObject(line, "gold");
    for (size_t i = 0; i < s->n_questions; i++) {
        const task_question *q = &s->questions[i];
        char *answer = join_gold(q);
        cJSON_AddItemToArray(questions, cJSON_CreateString(q->text));
        cJSON_AddItemToArray(answers, cJSON_CreateString(answer));
        cJSON_AddItemToArray(golds, cJSON_CreateStringArray((const char *const *)q->gold, (int)q->n_gold));
        free(answer);
    }
    json_put(line, "answer_prefix %s task %s seed %g n_tokens %g", "", t->spec, (double)seed, (double)s->n_tokens);
    char *text = cJSON_PrintUnformatted(line);
    kvb_status status = KVB_OK;
    if (fprintf(to, "%s\n", text) < 0)
        status = kvb_fail(err, KVB_IO, "task %s: a line of JSON cannot be written", t->spec);
    cJSON_free(text);
    cJSON_Delete(line);
    return status;
}
