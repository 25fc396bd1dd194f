// Scores as RULER gives them (string_match_all, string_match_part), and SQuAD's F1 for answers that are sentences.
#include "evaluator/task.h"
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

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
