// What the generators of tasks share; included by evaluator/task*.c alone.
#pragma once
#include "evaluator/task.h"

// A stream of draws: number `step` of sample `index` of the seed. Copying it goes on from the same place.
typedef struct task_random {
    uint64_t seed, index;
    uint32_t stream, step;
} task_random;

uint32_t task_below(task_random *r, uint32_t n); // uniform in 0 .. n-1, n >= 1
void task_shuffle(task_random *r, uint32_t *items, size_t n);
// n different numbers of 0 .. pool-1 in random order, malloc'd. n <= pool.
uint32_t *task_pick(task_random *r, uint32_t pool, size_t n);

// What a generator works with. It is called several times with the same draws and growing `units` until the context is
// long enough.
typedef struct task_draft {
    const task *t;
    const task_source *source;
    task_random random;
    size_t units;    // of filler: sentences, words, pairs
    size_t n_tokens; // wanted
    FILE *context;   // receives the context
    task_sample *sample;
} task_draft;

struct task_kind {
    spec_row spec; // name and parameters, whose values are in task.set
    const char *summary;
    task_rule rule;
    uint32_t new_tokens;
    bool whole_text; // made from source->texts instead of filler
    kvb_status (*build)(task_draft *d, kvb_error *err);
};

// The word number i of a list without repetition: nouns, adjectives, then both joined by a hyphen.
enum { TASK_WORD_MAX = 48 };
void task_word(char room[TASK_WORD_MAX], uint32_t i);
uint32_t task_noun_count(void);
uint32_t task_word_count(void); // of different words that task_word has
void task_uuid(char room[37], task_random *r);

// Adds a question, or a gold string to the last question, by format. KVB_ARGUMENT: there is no place left.
kvb_status task_ask(task_sample *s, kvb_error *err, const char *format, ...) __attribute__((format(printf, 3, 4)));
kvb_status task_gold(task_sample *s, kvb_error *err, const char *format, ...) __attribute__((format(printf, 3, 4)));

// Writes `units` sentences of the haystack with the needles at random places among them, in random order.
kvb_status task_hide(task_draft *d, const char *const *needles, size_t n_needles, kvb_error *err);

extern const task_kind task_niah_single, task_niah_multikey, task_niah_multivalue, task_niah_multiquery;
extern const task_kind task_variable_tracing, task_common_words, task_frequent_words, task_key_value, task_qa;
