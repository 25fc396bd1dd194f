// One context as a line of calibration data: what calib.c reads.
#include "calib.h"
#include "runtime/fail.h"
#include <cjson/cJSON.h>

// Text under one key, or ids under the other; whichever is there.
static bool add_either(cJSON *line, const char *text_key, const char *text, const char *ids_key, const int32_t *ids,
                       size_t n)
{
    if (text) return cJSON_AddStringToObject(line, text_key, text);
    return cJSON_AddItemToObject(line, ids_key, cJSON_CreateIntArray(ids, (int)n));
}

// A question's place in a list: text, ids, or null where there is neither.
static bool add_element(cJSON *list, const char *text, const int32_t *ids, size_t n)
{
    cJSON *item = text ? cJSON_CreateString(text) : ids ? cJSON_CreateIntArray(ids, (int)n) : cJSON_CreateNull();
    if (cJSON_AddItemToArray(list, item)) return true;
    cJSON_Delete(item);
    return false;
}

static bool add_questions(cJSON *line, const calib_context *c)
{
    bool answered = false, texts = false, good = true;
    for (size_t i = 0; i < c->n_questions; i++) {
        answered |= c->questions[i].answer || c->questions[i].answer_ids;
        texts |= c->questions[i].answer != NULL;
    }
    cJSON *asked = cJSON_AddArrayToObject(line, c->questions[0].text ? "questions" : "question_ids");
    cJSON *answers = answered ? cJSON_AddArrayToObject(line, texts ? "answers" : "answer_ids") : NULL;
    for (size_t i = 0; good && i < c->n_questions; i++) {
        const calib_question *q = &c->questions[i];
        good = add_element(asked, q->text, q->ids, q->n_ids) &&
               (!answered || add_element(answers, q->answer, q->answer_ids, q->n_answer_ids));
    }
    return good;
}

kvb_status calib_write_line(FILE *to, const calib_context *c, kvb_error *err)
{
    cJSON *line = cJSON_CreateObject();
    bool good = cJSON_AddStringToObject(line, "sample_id", c->sample_id) &&
                add_either(line, "context", c->context, "context_ids", c->context_ids, c->n_context_ids) &&
                add_questions(line, c) &&
                (!c->has_answer_prefix || cJSON_AddStringToObject(line, "answer_prefix", c->answer_prefix));
    char *text = good ? cJSON_PrintUnformatted(line) : NULL;
    if (text) fprintf(to, "%s\n", text); // whoever closes the stream finds what went wrong with it
    kvb_status status = text ? KVB_OK : kvb_fail(err, KVB_MEMORY, "sample '%s': no memory for its line", c->sample_id);
    cJSON_free(text);
    cJSON_Delete(line);
    return status;
}
