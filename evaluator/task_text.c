// Draws, words and hay: what the tasks are made of.
#include "evaluator/task_parts.h"
#include "formats/need.h"
#include "profiler/backend/sampler.h"
#include "runtime/fail.h"
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

uint32_t task_below(task_random *r, uint32_t n)
{
    return (uint32_t)(sampler_uniform(r->seed, r->index, r->stream, r->step++) * n);
}

void task_shuffle(task_random *r, uint32_t *items, size_t n)
{
    for (size_t i = n; i > 1; i--) {
        uint32_t j = task_below(r, (uint32_t)i), item = items[j];
        items[j] = items[i - 1];
        items[i - 1] = item;
    }
}

uint32_t *task_pick(task_random *r, uint32_t pool, size_t n)
{
    uint32_t *items = need(pool, sizeof *items, "numbers");
    for (uint32_t i = 0; i < pool; i++) items[i] = i;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = i + task_below(r, pool - i), item = items[j];
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
enum { N_NOUNS = sizeof NOUNS / sizeof *NOUNS, N_ADJECTIVES = sizeof ADJECTIVES / sizeof *ADJECTIVES };

uint32_t task_noun_count(void)
{
    return N_NOUNS;
}

uint32_t task_word_count(void)
{
    return N_NOUNS + N_ADJECTIVES + N_NOUNS * N_ADJECTIVES;
}

void task_word(char room[TASK_WORD_MAX], uint32_t i)
{
    i %= task_word_count();
    if (i < N_NOUNS) snprintf(room, TASK_WORD_MAX, "%s", NOUNS[i]);
    else if (i < N_NOUNS + N_ADJECTIVES) snprintf(room, TASK_WORD_MAX, "%s", ADJECTIVES[i - N_NOUNS]);
    else {
        i -= N_NOUNS + N_ADJECTIVES;
        snprintf(room, TASK_WORD_MAX, "%s-%s", ADJECTIVES[i % N_ADJECTIVES], NOUNS[i / N_ADJECTIVES]);
    }
}

void task_uuid(char room[37], task_random *r)
{
    static const char form[] = "xxxxxxxx-xxxx-4xxx-8xxx-xxxxxxxxxxxx";
    for (size_t i = 0; i < sizeof form; i++) room[i] = form[i] == 'x' ? "0123456789abcdef"[task_below(r, 16)] : form[i];
}

// ---- Questions ----

// The caller owns the text.
static char *formatted(const char *format, va_list list)
{
    char *text;
    return needed(vasprintf(&text, format, list) < 0 ? NULL : text, "questions");
}

kvb_status task_ask(task_sample *s, kvb_error *err, const char *format, ...)
{
    if (s->n_questions == TASK_MAX_QUESTIONS)
        return kvb_fail(err, KVB_ARGUMENT, "task: at most %d questions fit a context", TASK_MAX_QUESTIONS);
    va_list list;
    va_start(list, format);
    char *text = formatted(format, list);
    va_end(list);
    s->questions[s->n_questions++] = (task_question){.text = text};
    return KVB_OK;
}

kvb_status task_gold(task_sample *s, kvb_error *err, const char *format, ...)
{
    task_question *q = &s->questions[s->n_questions - 1];
    if (q->n_gold == TASK_MAX_GOLD)
        return kvb_fail(err, KVB_ARGUMENT, "task: at most %d gold strings fit a question", TASK_MAX_GOLD);
    va_list list;
    va_start(list, format);
    char *text = formatted(format, list);
    va_end(list);
    q->gold[q->n_gold++] = text;
    return KVB_OK;
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

kvb_status task_hide(task_draft *d, const char *const *needles, size_t n_needles, kvb_error *err)
{
    const char *hay = d->source->haystack ? d->source->haystack : NOISE, *begin = skip_blanks(hay), *at = begin;
    size_t n_sentences = count_sentences(hay);
    if (n_sentences == 0) return kvb_fail(err, KVB_ARGUMENT, "task %s: the haystack holds no sentence", d->t->spec);
    // Places are shares of the context, so that they stay where they are while the hay grows.
    double *places = need(n_needles, sizeof *places, "needles");
    uint32_t *order = need(n_needles, sizeof *order, "needles");
    for (size_t i = 0; i < n_needles; i++) {
        places[i] = task_below(&d->random, 1u << 20) * 0x1p-20;
        order[i] = (uint32_t)i;
    }
    qsort(places, n_needles, sizeof *places, compare_places);
    task_shuffle(&d->random, order, n_needles);
    // Another text begins elsewhere, so that samples differ; noise has nowhere else to begin.
    for (uint32_t skip = d->source->haystack ? task_below(&d->random, (uint32_t)n_sentences) : 0; skip; skip--)
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
    return KVB_OK;
}
