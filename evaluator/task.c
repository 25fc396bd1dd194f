#include "evaluator/task_parts.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <cJSON.h>
#include <stdlib.h>
#include <string.h>

const task_kind *const task_kinds[] = {&task_niah_single,     &task_niah_multikey,    &task_niah_multivalue,
                                       &task_niah_multiquery, &task_variable_tracing, &task_common_words,
                                       &task_frequent_words,  &task_key_value,        &task_qa};
const size_t task_kind_count = sizeof task_kinds / sizeof *task_kinds;

const spec_row *task_spec(const task_kind *kind)
{
    return &kind->spec;
}

const char *task_summary(const task_kind *kind)
{
    return kind->summary;
}

task_rule task_rule_of(const task_kind *kind)
{
    return kind->rule;
}

bool task_needs_texts(const task_kind *kind)
{
    return kind->whole_text;
}

uint32_t task_new_tokens(const task_kind *kind)
{
    return kind->new_tokens;
}

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

char *task_answer_text(const task_question *q)
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
    cJSON_AddStringToObject(line, "sample_id", s->id);
    cJSON_AddStringToObject(line, "context", s->context);
    cJSON *questions = cJSON_AddArrayToObject(line, "questions"), *answers = cJSON_AddArrayToObject(line, "answers"),
          *golds = cJSON_AddArrayToObject(line, "gold");
    for (size_t i = 0; i < s->n_questions; i++) {
        const task_question *q = &s->questions[i];
        char *answer = task_answer_text(q);
        cJSON_AddItemToArray(questions, cJSON_CreateString(q->text));
        cJSON_AddItemToArray(answers, cJSON_CreateString(answer));
        cJSON_AddItemToArray(golds, cJSON_CreateStringArray((const char *const *)q->gold, (int)q->n_gold));
        free(answer);
    }
    cJSON_AddStringToObject(line, "answer_prefix", "");
    cJSON_AddStringToObject(line, "task", t->spec);
    cJSON_AddNumberToObject(line, "seed", (double)seed);
    cJSON_AddNumberToObject(line, "n_tokens", (double)s->n_tokens);
    char *text = cJSON_PrintUnformatted(line);
    kvb_status status = KVB_OK;
    if (fprintf(to, "%s\n", text) < 0)
        status = kvb_fail(err, KVB_IO, "task %s: a line of JSON cannot be written", t->spec);
    cJSON_free(text);
    cJSON_Delete(line);
    return status;
}
