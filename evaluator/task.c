#include "evaluator/task.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "profiler/backend/sampler.h"
#include "runtime/fail.h"
#include <cJSON.h>
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// A stream of draws: number `step` of sample `index` of the seed. A copy continues from the same place.
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
    size_t n_tokens; // wanted, with question and answer
    FILE *context;   // receives the context
    task_sample *sample;
};

// ---- Draws ----

// Draws a number in 0 .. n-1 uniformly, n >= 1.
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

// Draws n different numbers of 0 .. pool-1 in random order, n <= pool. The caller frees them.
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

static kvb_status count_tokens(size_t *n, const char *text, const tokenizer *tokens, kvb_error *err)
{
    int32_t *ids = NULL;
    kvb_status status = tokenizer_encode(tokens, text, strlen(text), false, &ids, n, err);
    free(ids);
    return status;
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
    N_SIMPLE = N_NOUNS + N_ADJECTIVES,
    N_PAIRS = N_NOUNS * N_ADJECTIVES,
    N_WORDS = N_SIMPLE + N_PAIRS
};

enum { TASK_WORD_MAX = 48 };

// Writes word number i < N_WORDS of a list without repetition: nouns, adjectives, then both joined by a hyphen.
static void write_word(char room[TASK_WORD_MAX], uint32_t i)
{
    if (i < N_NOUNS) snprintf(room, TASK_WORD_MAX, "%s", NOUNS[i]);
    else if (i < N_SIMPLE) snprintf(room, TASK_WORD_MAX, "%s", ADJECTIVES[i - N_NOUNS]);
    else {
        i -= N_SIMPLE;
        snprintf(room, TASK_WORD_MAX, "%s-%s", ADJECTIVES[i % N_ADJECTIVES], NOUNS[i / N_ADJECTIVES]);
    }
}

static void draw_uuid(char room[37], task_random *r)
{
    static const char form[] = "xxxxxxxx-xxxx-4xxx-yxxx-xxxxxxxxxxxx";
    for (size_t i = 0; i < sizeof form; i++)
        room[i] = form[i] == 'x'   ? "0123456789abcdef"[draw_below(r, 16)]
                  : form[i] == 'y' ? "89ab"[draw_below(r, 4)]
                                   : form[i];
}

enum { NAME_MAX_ROOM = 7 };

// Draws n different names of so many letters, of the 26 from `first` ('A' or 'a') on.
static void draw_names(char (*names)[NAME_MAX_ROOM], size_t n, int letters, char first, task_random *r)
{
    for (size_t i = 0; i < n; i++) {
        size_t same;
        do {
            for (int c = 0; c < letters; c++) names[i][c] = (char)(first + draw_below(r, 26));
            names[i][letters] = '\0';
            for (same = 0; same < i && strcmp(names[same], names[i]) != 0;) same++;
        } while (same < i);
    }
}

// ---- Questions ----

// Adds a question, taking ownership of its texts, or a gold string to the last question. There is always room: the
// parameters' ranges end at these limits.
static void add_question(task_sample *s, char *text, char *prefix)
{
    s->questions[s->n_questions++] = (task_question){.text = text, .prefix = prefix};
}

static void add_gold(task_sample *s, const char *gold)
{
    task_question *q = &s->questions[s->n_questions - 1];
    q->gold[q->n_gold++] = need_text("%s", gold);
}

// ---- Hay ----
//
// Wording and order of all that follows, down to the blanks, are those of RULER's generator (NVIDIA/RULER,
// scripts/data/synthetic and scripts/synthetic.yaml): the same draws make the same bytes, which
// tests/peer/ruler_prompts.py checks.

static const char NOISE[] = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

enum { NEEDLE_MAX = 192, VALUE_MAX = 40 };

typedef struct needle {
    char key[TASK_WORD_MAX], value[VALUE_MAX], text[NEEDLE_MAX];
} needle;

static int compare_numbers(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

// Writes `units` lines, NOISE or the texts of `hay`, and before drawn lines one needle each, in the order given.
static void hide_in_lines(FILE *to, task_random *r, size_t units, const needle *hay, const char *const *needles,
                          size_t n_needles)
{
    units = units > n_needles ? units : n_needles;
    uint32_t *places = pick_items(r, (uint32_t)units, n_needles);
    qsort(places, n_needles, sizeof *places, compare_numbers);
    for (size_t i = 0, next = 0; i < units; i++) {
        if (next < n_needles && places[next] == i) fprintf(to, "%s\n", needles[next++]);
        fprintf(to, "%s\n", hay ? hay[i].text : NOISE);
    }
    free(places);
}

static const char WHITE[] = " \n\r\t\f\v";

// Returns the end of the sentence that begins at `at`: after a full stop, question or exclamation mark that a blank or
// the text's end follows, or the text's end itself. (RULER asks NLTK's punkt, which knows abbreviations.)
static const char *sentence_end(const char *at)
{
    for (; *at; at++)
        if (strchr(".?!", *at) && (at[1] == ' ' || !at[1])) return at + 1;
    return at;
}

// Returns the text's first n words, joined by blanks; a text that is too short is repeated. The caller frees them.
static char *first_words(const char *text, size_t n)
{
    char *words = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&words, &size);
    needed(to, "words");
    const char *at = text;
    for (size_t i = 0; i < n; i++) {
        at += strspn(at, WHITE);
        if (!*at) at = text + strspn(text, WHITE);
        size_t length = strcspn(at, WHITE);
        fprintf(to, "%s%.*s", i ? " " : "", (int)length, at);
        at += length;
    }
    needed(fclose(to) == 0 ? words : NULL, "words");
    return words;
}

enum { N_DEPTHS = 40 };

// Writes the first `units` words of the haystack, and the needles after drawn shares of its sentences. A piece between
// two needles may be empty; it still has its two blanks.
static void hide_in_essay(task_draft *d, const char *const *needles, size_t n_needles)
{
    char *text = first_words(d->source->haystack, d->units);
    uint32_t *places = pick_items(&d->random, N_DEPTHS, n_needles);
    size_t n_sentences = 0;
    for (const char *at = text; *at; at += strspn(at, " ")) n_sentences++, at = sentence_end(at);
    for (size_t i = 0; i < n_needles; i++) // of 40 depths from 0 to 100 %, rounded
        places[i] = (uint32_t)((double)n_sentences * (round(places[i] * 100.0 / (N_DEPTHS - 1)) / 100));
    qsort(places, n_needles, sizeof *places, compare_numbers);
    const char *begin = text, *end = text;
    for (size_t i = 0, sentence = 0; i <= n_needles; i++) {
        for (; sentence < (i < n_needles ? places[i] : n_sentences); sentence++) end = sentence_end(end);
        fprintf(d->context, "%.*s", (int)(end - begin), begin);
        begin = end += strspn(end, " ");
        if (i < n_needles) fprintf(d->context, " %s ", needles[i]);
    }
    fputc('\n', d->context);
    free_all(places, text);
}

// ---- Needles in a haystack (RULER, 3) ----

// Draws needles for n_keys keys with n_values values each, then `others` needles of other keys. The caller frees them.
static needle *draw_needles(task_draft *d, size_t n_keys, size_t n_values, size_t others)
{
    const task_kind *kind = d->t->kind;
    size_t asked = n_keys * n_values;
    uint32_t *pairs = pick_items(&d->random, N_PAIRS, n_keys);
    needle *n = need(asked + others, sizeof *n, "needles");
    for (size_t i = 0; i < asked + others; i++) {
        if (i < asked && i % n_values) memcpy(n[i].key, n[i - 1].key, sizeof n[i].key);
        else if (kind->uuid_keys) draw_uuid(n[i].key, &d->random);
        else
            write_word(
                n[i].key,
                N_SIMPLE +
                    pairs[i < asked ? i / n_values : n_keys + draw_below(&d->random, (uint32_t)(N_PAIRS - n_keys))]);
        if (kind->uuid_values) draw_uuid(n[i].value, &d->random);
        else snprintf(n[i].value, VALUE_MAX, "%u", 1000000 + draw_below(&d->random, 9000000));
        snprintf(n[i].text, NEEDLE_MAX, "One of the special magic %s for %s is: %s.",
                 kind->uuid_values ? "uuids" : "numbers", n[i].key, n[i].value);
    }
    free(pairs);
    return n;
}

static void hide_needles(task_draft *d, const needle *n, size_t count)
{
    const char **texts = need(count, sizeof *texts, "needles");
    uint32_t *order = pick_items(&d->random, (uint32_t)count, count);
    for (size_t i = 0; i < count; i++) texts[i] = n[order[i]].text;
    if (d->t->kind->hay == HAY_ESSAY) hide_in_essay(d, texts, count);
    else
        hide_in_lines(d->context, &d->random, d->units, d->t->kind->hay == HAY_NEEDLES ? n + count : NULL, texts,
                      count);
    free_all(order, texts);
}

// Adds one question that asks for all values of n_keys keys; keys[i] is the first of a key's n_values needles.
static void ask_for_keys(task_draft *d, const needle *const *keys, size_t n_keys, size_t n_values, const char *kind)
{
    bool single = n_keys * n_values == 1;
    char list[TASK_MAX_GOLD * (TASK_WORD_MAX + 6)] = "";
    for (size_t i = 0, used = 0; i < n_keys; i++)
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%s%s", i ? ", " : "",
                                 i && i + 1 == n_keys ? "and " : "", keys[i]->key);
    add_question(
        d->sample,
        need_text("What %s the special magic %s for %s mentioned in the provided text? ", single ? "is" : "are all",
                  kind, list),
        need_text("The special magic %s for %s mentioned in the provided text %s", kind, list, single ? "is" : "are"));
    for (size_t i = 0; i < n_keys; i++)
        for (size_t k = 0; k < n_values; k++) add_gold(d->sample, keys[i][k].value);
}

static kvb_status build_niah(task_draft *d, kvb_error *err)
{
    const task_kind *kind = d->t->kind;
    const struct task_niah_settings *set = &d->t->set.niah;
    size_t asked = (size_t)set->questions * set->queries, n_keys = asked > set->keys ? asked : set->keys,
           count = n_keys * set->values;
    bool single = set->queries * set->values == 1;
    const char *type = kind->uuid_values ? single ? "uuid" : "uuids" : single ? "number" : "numbers";
    if (kind->hay == HAY_ESSAY && count > N_DEPTHS)
        return kvb_fail(err, KVB_ARGUMENT, "task %s: %zu needles, but a text has places for %d", d->t->spec, count,
                        N_DEPTHS);
    size_t lines = kind->hay != HAY_NEEDLES ? 0 : d->units > count ? d->units : count;
    needle *n = draw_needles(d, n_keys, set->values, lines);
    fprintf(d->context,
            "%s special magic %s %s hidden within the following text. Make sure to memorize it. I will quiz you about "
            "the %s afterwards.\n",
            single ? "A" : "Some", type, single ? "is" : "are", type);
    hide_needles(d, n, count);
    uint32_t *order = pick_items(&d->random, (uint32_t)n_keys, asked);
    for (size_t q = 0; q < set->questions; q++) {
        const needle *keys[TASK_MAX_GOLD];
        for (size_t i = 0; i < set->queries; i++) keys[i] = &n[order[q * set->queries + i] * set->values];
        ask_for_keys(d, keys, set->queries, set->values, type);
    }
    free_all(order, n);
    return KVB_OK;
}

// ---- Variable tracking (RULER 3.2): VAR A = 12345, VAR B = VAR A, ... ----

enum { HOPS_MAX = 10 };

#define TRACE_QUESTION "Question: Find all variables that are assigned the value %u in the text above. "
#define TRACE_PREFIX                                                                                             \
    "Answer: According to the chain(s) of variable assignment in the text above, %u variables are assigned the " \
    "value %u, they are: "

// Writes a chain of n assignments among lines of noise. Fills names[0 .. n-1], of so many letters each, and the value.
static void write_chain(FILE *to, task_random *r, uint32_t n, int letters, size_t noises, char (*names)[NAME_MAX_ROOM],
                        uint32_t *value)
{
    char lines[HOPS_MAX + 1][32];
    const char *needles[HOPS_MAX + 1];
    draw_names(names, n, letters, 'A', r);
    *value = 10000 + draw_below(r, 89999);
    for (uint32_t i = 0; i < n; i++) {
        if (i == 0) snprintf(lines[i], sizeof lines[i], "VAR %.6s = %u", names[i], *value);
        else snprintf(lines[i], sizeof lines[i], "VAR %.6s = VAR %.6s ", names[i], names[i - 1]);
        needles[i] = lines[i];
    }
    fprintf(to, "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n");
    hide_in_lines(to, r, noises, NULL, needles, n);
}

// Writes RULER's solved example in front of the text, with as much noise as fits into 500 tokens, at least five lines.
static kvb_status show_solved_chain(task_draft *d, uint32_t n, kvb_error *err)
{
    enum { EXAMPLE_TOKENS = 500, EXAMPLE_LINES = 5 };
    char names[HOPS_MAX + 1][NAME_MAX_ROOM], *best = NULL, *text = NULL;
    const task_random begin = d->random;
    kvb_status status = KVB_OK;
    for (size_t noises = EXAMPLE_LINES, n_tokens = 0, size = 0; status == KVB_OK; noises++) {
        uint32_t value;
        FILE *to = open_memstream(&text, &size);
        needed(to, "examples");
        d->random = begin;
        write_chain(to, &d->random, n, 3, noises, names, &value);
        fprintf(to, TRACE_QUESTION TRACE_PREFIX, value, n, value);
        needed(fclose(to) == 0 ? text : NULL, "examples");
        status = count_tokens(&n_tokens, text, d->source->tokens, err);
        if (best && n_tokens > EXAMPLE_TOKENS) break;
        free(best);
        best = text;
        text = NULL;
    }
    fputs(best, d->context);
    for (uint32_t i = 0; i < n; i++) fprintf(d->context, " %s", names[i]);
    fputs("\n\n", d->context);
    free_all(best, text);
    return status;
}

static kvb_status build_tracking(task_draft *d, kvb_error *err)
{
    uint32_t n = d->t->set.tracking.hops + 1, value;
    char names[HOPS_MAX + 1][NAME_MAX_ROOM];
    kvb_status status = show_solved_chain(d, n, err);
    write_chain(d->context, &d->random, n, 5, d->units, names, &value);
    add_question(d->sample, need_text(TRACE_QUESTION, value), need_text(TRACE_PREFIX, n, value));
    for (uint32_t i = 0; i < n; i++) add_gold(d->sample, names[i]);
    return status;
}

// ---- Common words (RULER 3.3): a numbered list in which ten words appear more often than the others ----

enum { N_COMMON = 10 };

#define LIST_QUESTION "Question: What are the 10 most common words in the above list? "
#define LIST_PREFIX "Answer: The top 10 words that appear most often in the list are:"

// Writes a list of n different words, the first ten `often` times, the rest `rarely`. Returns them; the caller frees.
static uint32_t *write_list(task_draft *d, size_t n, size_t often, size_t rarely)
{
    size_t length = N_COMMON * often + (n - N_COMMON) * rarely, at = 0;
    uint32_t *words = pick_items(&d->random, n > N_SIMPLE ? (uint32_t)n : N_SIMPLE, n),
             *list = need(length, sizeof *list, "words");
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < (i < N_COMMON ? often : rarely); k++) list[at++] = words[i];
    shuffle_items(&d->random, list, length);
    fprintf(d->context, "Below is a numbered list of words. In these words, some appear more often than others. "
                        "Memorize the ones that appear most often.\n");
    for (size_t i = 0; i < length; i++) {
        char word[TASK_WORD_MAX];
        write_word(word, list[i]);
        fprintf(d->context, "%zu. %s%c", i + 1, word, i + 1 < length ? ' ' : '\n');
    }
    free(list);
    return words;
}

static kvb_status build_common(task_draft *d, kvb_error *err)
{
    bool brief = d->n_tokens < 4096; // RULER's frequencies for short contexts
    size_t n = d->units > N_COMMON ? d->units : N_COMMON;
    char word[TASK_WORD_MAX];
    if (n > N_WORDS)
        return kvb_fail(err, KVB_ARGUMENT,
                        "task cwe: %zu different words are wanted, there are %d; ask for fewer tokens", n, N_WORDS);
    uint32_t *words = brief ? write_list(d, 20, 3, 1) : write_list(d, 40, 10, 3);
    fputs(LIST_QUESTION LIST_PREFIX, d->context);
    for (uint32_t i = 0; i < N_COMMON; i++) {
        write_word(word, words[i]);
        fprintf(d->context, " %u. %s", i + 1, word);
    }
    free(words);
    fputc('\n', d->context);
    words = brief ? write_list(d, n, 6, 1) : write_list(d, n, 30, 3);
    add_question(d->sample, need_text(LIST_QUESTION), need_text(LIST_PREFIX));
    for (uint32_t i = 0; i < N_COMMON; i++) {
        write_word(word, words[i]);
        add_gold(d->sample, word);
    }
    free(words);
    return KVB_OK;
}

// ---- Frequent words (RULER 3.3): made-up words whose counts are those of a zeta distribution with exponent 2 ----

static kvb_status build_frequent(task_draft *d, kvb_error *err)
{
    size_t answer = d->t->kind->new_tokens, room = d->n_tokens > answer ? d->n_tokens - answer : 0,
           n = room / 50 > 4 ? room / 50 : 4, length = 0;
    char(*names)[NAME_MAX_ROOM] = need(n, sizeof *names, "words");
    uint32_t *list = need(d->units + 1, sizeof *list, "words");
    draw_names(names, n, 6, 'a', &d->random);
    snprintf(names[0], sizeof names[0], "..."); // the most frequent one is noise
    for (uint32_t k = 0; k < n; k++) {
        size_t times = (size_t)((double)d->units * pow(k + 1, -2.0) / (M_PI * M_PI / 6)); // zeta(2)
        while (times--) list[length++] = k;
    }
    shuffle_items(&d->random, list, length);
    fprintf(d->context, "Read the following coded text and track the frequency of each coded word. Find the three most "
                        "frequently appeared coded words. ");
    for (size_t i = 0; i < length; i++) fprintf(d->context, "%s%s", i ? " " : "", names[list[i]]);
    fputc('\n', d->context);
    add_question(
        d->sample,
        need_text("Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
                  "most frequently appeared words in the above coded text? "),
        need_text("Answer: According to the coded text above, the three most frequently appeared words are:"));
    for (int i = 1; i <= 3; i++) add_gold(d->sample, names[i]);
    free_all(names, list);
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
    fprintf(d->context, "Extract the value corresponding to the specified key in the JSON object below.\n\n{");
    for (size_t i = 0; i < n; i++) {
        for (int k = 0; k < 2; k++)
            if (uuid) draw_uuid(pairs[i][k], &d->random);
            else snprintf(pairs[i][k], sizeof pairs[i][k], "%06u", draw_below(&d->random, 1000000));
        fprintf(d->context, "%s\"%s\": \"%s\"", i ? ",\n " : "", pairs[i][0], pairs[i][1]);
    }
    fprintf(d->context, "}\n");
    for (uint32_t i = 0; i < questions; i++) {
        add_question(d->sample, need_text("\nKey: \"%s\"\nCorresponding value: \"", pairs[asked[i]][0]),
                     need_text("%s", ""));
        add_gold(d->sample, pairs[asked[i]][1]);
    }
    free_all(pairs, asked);
    return KVB_OK;
}

// ---- Questions about texts that come with answers (calibration files that were held out) ----
//
// Sample i is line i of the file. Cut to a length, a text keeps the questions whose answer can still be found in it: at
// least four fifths of the answer's words are in what is left.

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

// Cuts a text to n_tokens tokens (0: all), then to the last full stop if one is near the cut. The caller frees *out.
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
        add_question(d->sample, need_text("\n\nQuestion: %s%s", q->text, c->answer_prefix), need_text("%s", ""));
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

// ---- Scores ----
// kvpress's for RULER (evaluation/benchmarks/ruler/calculate_metrics.py, string_match_all); SQuAD's F1 for sentences.

static bool holds(const char *answer, const char *gold)
{
    char *plain = need(strlen(answer) + 1, 1, "characters"), *to = plain;
    for (; *answer; answer++)
        if ((unsigned char)*answer >= 0x20) *to++ = *answer; // line ends go too
    bool found = strcasestr(plain, gold) != NULL;
    free(plain);
    return found;
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

// Lists the words of the first line that is not empty, without punctuation and articles, as SQuAD normalises answers.
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
    return rule == TASK_ALL && n_gold ? sum / (double)n_gold : best;
}

bool task_score_is_final(task_rule rule, const char *answer, char *const *gold, size_t n_gold)
{
    if (rule != TASK_F1) return task_score(rule, answer, gold, n_gold) == 1;
    while (isspace((unsigned char)*answer)) answer++;
    return strchr(answer, '\n') != NULL;
}

// ---- Tasks ----

#define QUESTIONS(settings, most, meaning) SPEC(settings, questions, 1, 1, most, meaning)
// A task of RULER's with needles. If the questions name more keys than `keys`, as many as they name are hidden.
#define NIAH(label, hay_, uuid_keys_, uuid_values_, keys_, values_, queries_, about)                             \
    {                                                                                                            \
        .spec = {.name = label,                                                                                  \
                 .parameters = {SPEC(struct task_niah_settings, keys, keys_, 1, 256, "keys hidden in the text"), \
                                SPEC(struct task_niah_settings, values, values_, 1, 4, "values of a key"),       \
                                SPEC(struct task_niah_settings, queries, queries_, 1, 4,                         \
                                     "keys that a question asks for"),                                           \
                                QUESTIONS(struct task_niah_settings, 20,                                         \
                                          "questions over one context, each for other keys")}},                  \
        .summary = about, .rule = TASK_ALL, .new_tokens = 128, .hay = hay_, .uuid_keys = uuid_keys_,             \
        .uuid_values = uuid_values_, .build = build_niah                                                         \
    }

const task_kind task_kinds[] = {
    NIAH("niah_single_1", HAY_NOISE, false, false, 1, 1, 1, "the number of a key, in noise"),
    NIAH("niah_single_2", HAY_ESSAY, false, false, 1, 1, 1, "the number of a key, in a text (--haystack)"),
    NIAH("niah_single_3", HAY_ESSAY, false, true, 1, 1, 1, "the UUID of a key, in a text"),
    NIAH("niah_multikey_1", HAY_ESSAY, false, false, 4, 1, 1, "the number of one key of four, in a text"),
    NIAH("niah_multikey_2", HAY_NEEDLES, false, false, 1, 1, 1, "the number of one key among many"),
    NIAH("niah_multikey_3", HAY_NEEDLES, true, true, 1, 1, 1, "the UUID of one key, which is a UUID too"),
    NIAH("niah_multivalue", HAY_ESSAY, false, false, 1, 4, 1, "all four numbers of one key, in a text"),
    NIAH("niah_multiquery", HAY_ESSAY, false, false, 1, 1, 4, "the numbers of four keys in one answer, in a text"),
    {.spec = {.name = "vt",
              .parameters = {SPEC(struct task_tracking_settings, hops, 4, 1, HOPS_MAX, "assignments after the first")}},
     .summary = "variable tracking: all variables that got one value, over several assignments",
     .rule = TASK_ALL,
     .new_tokens = 30,
     .build = build_tracking},
    {.spec = {.name = "cwe"},
     .summary = "common words extraction: the ten most frequent words of a numbered list",
     .rule = TASK_ALL,
     .new_tokens = 120,
     .build = build_common},
    {.spec = {.name = "fwe"},
     .summary = "frequent words extraction: the three most frequent made-up words",
     .rule = TASK_ALL,
     .new_tokens = 50,
     .build = build_frequent},
    {.spec = {.name = "kv",
              .parameters = {QUESTIONS(struct task_pairs_settings, TASK_MAX_QUESTIONS,
                                       "keys asked for over one context"),
                             SPEC_ON_OFF(struct task_pairs_settings, uuid, 1, "0: six digits instead of UUIDs")}},
     .summary = "key-value retrieval: the value of a key in a JSON object of random pairs",
     .rule = TASK_ALL,
     .new_tokens = 40,
     .build = build_pairs},
    {.spec = {.name = "qa",
              .parameters = {SPEC(struct task_qa_settings, questions, TASK_MAX_QUESTIONS, 1, TASK_MAX_QUESTIONS,
                                  "questions asked about one text")}},
     .summary = "questions about texts that were held out (--texts FILE.jsonl)",
     .rule = TASK_F1,
     .new_tokens = 32,
     .whole_text = true,
     .build = build_qa},
};
const size_t task_kind_count = sizeof task_kinds / sizeof *task_kinds;

static const spec_row *task_row(size_t i)
{
    return i < task_kind_count ? &task_kinds[i].spec : NULL;
}

kvb_status task_parse(task *out, const char *text, kvb_error *err)
{
    static const spec_list tasks = {"task", task_row, NULL};
    size_t row;
    *out = (task){0};
    kvb_status status = spec_read(&tasks, text, 0, strlen(text), &row, &out->set, err);
    if (status != KVB_OK) return status;
    out->kind = &task_kinds[row];
    return spec_write_all(out->spec, sizeof out->spec, &tasks, &out->kind->spec, &out->set, err);
}

// ---- Length ----

void task_sample_free(task_sample *s)
{
    for (size_t i = 0; i < s->n_questions; i++) {
        free_all(s->questions[i].text, s->questions[i].prefix);
        for (size_t k = 0; k < s->questions[i].n_gold; k++) free(s->questions[i].gold[k]);
    }
    free(s->context);
    memset(s, 0, sizeof *s);
}

// FNV-1a of the task's text, so that draws of different tasks do not resemble each other.
static uint32_t stream_of(const char *text)
{
    uint32_t h = 2166136261u;
    for (; *text; text++) h = (h ^ (unsigned char)*text) * 16777619u;
    return h;
}

// Counts the tokens of the context, and of all that RULER's length includes.
static kvb_status measure_sample(task_sample *s, const task *t, const tokenizer *tokens, kvb_error *err)
{
    size_t most = 0;
    kvb_status status = count_tokens(&s->n_tokens, s->context, tokens, err);
    for (size_t i = 0; status == KVB_OK && i < s->n_questions; i++) {
        size_t n;
        char *all = need_text("%s%s", s->questions[i].text, s->questions[i].prefix);
        status = count_tokens(&n, all, tokens, err);
        most = n > most ? n : most;
        free(all);
    }
    s->length = s->n_tokens + most + t->kind->new_tokens;
    return status;
}

// Builds the sample with so many units of filler. On failure *out is zero.
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
    if (status == KVB_OK) status = measure_sample(out, t, source->tokens, err);
    if (status != KVB_OK) task_sample_free(out);
    return status;
}

// Finds the most units with which the sample takes at most n_tokens tokens, by doubling and then halving the step. More
// filler hardly ever takes fewer tokens, since every unit adds some of its own.
static kvb_status fit_units(size_t *units, const task *t, const task_source *source, size_t n_tokens, uint64_t index,
                            kvb_error *err)
{
    size_t best = 0, step = 1;
    for (bool growing = true; step;) {
        task_sample probe;
        kvb_status status = build_with(&probe, t, source, n_tokens, index, best + step, err);
        if (status != KVB_OK) return status;
        bool fits = probe.length <= n_tokens;
        task_sample_free(&probe);
        if (fits) best += step;
        growing = growing && fits;
        step = growing ? step * 2 : step / 2;
        if (best > n_tokens) break; // a unit has at least one token
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
    if (t->kind->hay == HAY_ESSAY && (!source->haystack || !source->haystack[strspn(source->haystack, WHITE)]))
        return kvb_fail(err, KVB_ARGUMENT, "task %s: hides needles in a text; give one with --haystack FILE", t->spec);
    if (n_tokens == 0 && !t->kind->whole_text)
        return kvb_fail(err, KVB_ARGUMENT, "task %s: how long should a sample be? give --tokens N", t->kind->spec.name);
    size_t units = 0;
    kvb_status status = KVB_OK;
    if (!t->kind->whole_text) status = fit_units(&units, t, source, n_tokens, index, err);
    if (status == KVB_OK) status = build_with(out, t, source, n_tokens, index, units, err);
    if (status == KVB_OK && !t->kind->whole_text && out->length > n_tokens) {
        status = kvb_fail(err, KVB_ARGUMENT,
                          "task %s: does not fit into %zu tokens, the shortest has %zu with question and answer",
                          t->spec, n_tokens, out->length);
        task_sample_free(out);
    }
    if (status == KVB_OK && !out->id[0])
        snprintf(out->id, sizeof out->id, "%s-%zu-%llu-%llu", t->kind->spec.name, n_tokens,
                 (unsigned long long)source->seed, (unsigned long long)index);
    return status;
}

// ---- As calibration data ----

// Returns the expected answer, a blank and the gold strings joined by ", ". The caller frees it.
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
    bool alone = s->n_questions == 1; // a line has one prefix
    cJSON *line = cJSON_CreateObject();
    json_put(line, "sample_id %s context %s", s->id, s->context);
    cJSON *questions = cJSON_AddArrayToObject(line, "questions"), *answers = cJSON_AddArrayToObject(line, "answers"),
          *golds = cJSON_AddArrayToObject(line, "gold");
    for (size_t i = 0; i < s->n_questions; i++) {
        const task_question *q = &s->questions[i];
        char *answer = join_gold(q);
        char *text = need_text("%s%s", q->text, alone ? "" : q->prefix);
        cJSON_AddItemToArray(questions, cJSON_CreateString(text));
        free(text);
        cJSON_AddItemToArray(answers, cJSON_CreateString(answer));
        cJSON_AddItemToArray(golds, cJSON_CreateStringArray((const char *const *)q->gold, (int)q->n_gold));
        free(answer);
    }
    json_put(line, "answer_prefix %s task %s seed %g n_tokens %g", alone ? s->questions[0].prefix : "", t->spec,
             (double)seed, (double)s->n_tokens);
    char *text = cJSON_PrintUnformatted(line);
    kvb_status status = KVB_OK;
    if (fprintf(to, "%s\n", text) < 0)
        status = kvb_fail(err, KVB_IO, "task %s: a line of JSON cannot be written", t->spec);
    cJSON_free(text);
    cJSON_Delete(line);
    return status;
}
