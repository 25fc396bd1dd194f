// Question answering on texts that come with questions and answers (calibration files that were held out).
//
// Sample i is line i of the file. Cut to a length, a text keeps the questions whose answer can still be found in it: at
// least four fifths of the answer's words stand in what is left.
#include "evaluator/task_parts.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

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
        status = task_ask(d->sample, err, "\n\nQuestion: %s%s", q->text, c->answer_prefix);
        if (status == KVB_OK) status = task_gold(d->sample, err, "%s", q->answer);
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

const task_kind task_qa = {.spec = {.name = "qa",
                                    .parameters = {SPEC(struct task_qa_settings, questions, TASK_MAX_QUESTIONS, 1,
                                                        TASK_MAX_QUESTIONS, "questions asked about one text")}},
                           .summary = "questions about texts that were held out (--texts FILE.jsonl)",
                           .rule = TASK_F1,
                           .new_tokens = 32,
                           .whole_text = true,
                           .build = build_qa};
