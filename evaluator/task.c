#include "evaluator/task_parts.h"
#include "runtime/fail.h"
#include <cJSON.h>
#include <stdlib.h>
#include <string.h>

const task_kind *const task_kinds[] = {&task_niah_single,     &task_niah_multikey,    &task_niah_multivalue,
                                       &task_niah_multiquery, &task_variable_tracing, &task_common_words,
                                       &task_frequent_words,  &task_key_value,        &task_qa};
const size_t task_kind_count = sizeof task_kinds / sizeof *task_kinds;

const char *task_name(const task_kind *kind)
{
    return kind->name;
}

const char *task_summary(const task_kind *kind)
{
    return kind->summary;
}

const task_parameter *task_parameters(const task_kind *kind)
{
    return kind->parameters;
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

static size_t parameter_place(const task_kind *kind, const char *name, size_t length)
{
    size_t i = 0;
    while (kind->parameters[i].name &&
           (strncmp(kind->parameters[i].name, name, length) != 0 || kind->parameters[i].name[length]))
        i++;
    return i;
}

uint32_t task_value(const task *t, const char *parameter)
{
    return t->values[parameter_place(t->kind, parameter, strlen(parameter))];
}

static const task_kind *find_kind(const char *name, size_t length)
{
    for (size_t i = 0; i < task_kind_count; i++)
        if (strlen(task_kinds[i]->name) == length && memcmp(task_kinds[i]->name, name, length) == 0)
            return task_kinds[i];
    return NULL;
}

static kvb_status unknown_task(const char *text, kvb_error *err)
{
    char list[256] = "";
    for (size_t i = 0; i < task_kind_count; i++) {
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", task_kinds[i]->name);
    }
    return kvb_fail(err, KVB_ARGUMENT, "task '%.60s': unknown; there are %s", text, list);
}

static kvb_status unknown_parameter(const task_kind *kind, const char *text, size_t length, kvb_error *err)
{
    char list[128] = "";
    for (size_t i = 0; kind->parameters[i].name; i++) {
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%s=N", i ? ", " : "", kind->parameters[i].name);
    }
    return kvb_fail(err, KVB_ARGUMENT, "task %s: '%.*s' is no parameter of it; there are %s", kind->name,
                    (int)(length < 60 ? length : 60), text, list);
}

// One `name=value` that ends at a colon or at the end of the text.
static kvb_status read_parameter(task *t, const char *text, size_t length, kvb_error *err)
{
    size_t name_length = strcspn(text, "=:");
    size_t place = parameter_place(t->kind, text, name_length);
    const task_parameter *p = &t->kind->parameters[place];
    if (!p->name || name_length == length || name_length == 0) return unknown_parameter(t->kind, text, length, err);
    char *end;
    unsigned long value = strtoul(text + name_length + 1, &end, 10);
    if (text[name_length + 1] < '0' || text[name_length + 1] > '9' || end != text + length || value < p->low ||
        value > p->high)
        return kvb_fail(err, KVB_ARGUMENT, "task %s: %s: expected a whole number from %u to %u, found '%.*s'",
                        t->kind->name, p->name, p->low, p->high, (int)(length < 60 ? length : 60),
                        text + name_length + 1);
    t->values[place] = (uint32_t)value;
    return KVB_OK;
}

static void write_spec(task *t)
{
    size_t used = (size_t)snprintf(t->spec, sizeof t->spec, "%s", t->kind->name);
    for (size_t i = 0; t->kind->parameters[i].name; i++)
        if (t->values[i] != t->kind->parameters[i].value && used < sizeof t->spec)
            used += (size_t)snprintf(t->spec + used, sizeof t->spec - used, ":%s=%u", t->kind->parameters[i].name,
                                     t->values[i]);
}

kvb_status task_parse(task *out, const char *text, kvb_error *err)
{
    size_t length = strcspn(text, ":");
    *out = (task){.kind = find_kind(text, length)};
    if (!out->kind) return unknown_task(text, err);
    for (size_t i = 0; out->kind->parameters[i].name; i++) out->values[i] = out->kind->parameters[i].value;
    kvb_status status = KVB_OK;
    for (text += length; *text && status == KVB_OK; text += length) {
        text++;
        length = strcspn(text, ":");
        status = read_parameter(out, text, length, err);
    }
    write_spec(out);
    return status;
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
    if (!d.context) return kvb_fail(err, KVB_MEMORY, "task %s: no memory for a context", t->spec);
    kvb_status status = t->kind->build(&d, err);
    bool broken = ferror(d.context) != 0;
    if ((fclose(d.context) != 0 || broken) && status == KVB_OK)
        status = kvb_fail(err, KVB_MEMORY, "task %s: no memory for a context", t->spec);
    if (status == KVB_OK) status = count_tokens(out, source->tokens, err);
    if (status != KVB_OK) task_sample_free(out);
    return status;
}

// The most units whose context has at most n_tokens tokens: doubling, then halving the step. More filler is never fewer tokens, as every unit
// adds some of its own.
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
            err, KVB_ARGUMENT, "task %s: %s", t->kind->name,
            source->texts ? "takes no texts; they are for the task qa"
                          : "needs texts with questions and answers; give a calibration file with --texts FILE.jsonl");
    if (n_tokens == 0 && !t->kind->whole_text)
        return kvb_fail(err, KVB_ARGUMENT, "task %s: how long? give --tokens N", t->kind->name);
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
        snprintf(out->id, sizeof out->id, "%s-%zu-%llu-%llu", t->kind->name, n_tokens, (unsigned long long)source->seed,
                 (unsigned long long)index);
    return status;
}

// ---- As calibration data ----

static bool add_question(cJSON *questions, cJSON *answers, cJSON *golds, const task_question *q)
{
    char *joined = NULL;
    size_t size = 0;
    FILE *answer = open_memstream(&joined, &size);
    if (!answer) return false;
    for (size_t i = 0; i < q->n_gold; i++) fprintf(answer, "%s%s", i ? ", " : " ", q->gold[i]);
    bool done = fclose(answer) == 0;
    cJSON *gold = cJSON_CreateStringArray((const char *const *)q->gold, (int)q->n_gold);
    done = done && cJSON_AddItemToArray(questions, cJSON_CreateString(q->text)) &&
           cJSON_AddItemToArray(answers, cJSON_CreateString(joined)) && cJSON_AddItemToArray(golds, gold);
    free(joined);
    return done;
}

kvb_status task_write_jsonl(FILE *to, const task *t, const task_sample *s, uint64_t seed, kvb_error *err)
{
    cJSON *line = cJSON_CreateObject();
    bool done =
        cJSON_AddStringToObject(line, "sample_id", s->id) && cJSON_AddStringToObject(line, "context", s->context);
    cJSON *questions = cJSON_AddArrayToObject(line, "questions"), *answers = cJSON_AddArrayToObject(line, "answers"),
          *golds = cJSON_AddArrayToObject(line, "gold");
    for (size_t i = 0; done && i < s->n_questions; i++)
        done = add_question(questions, answers, golds, &s->questions[i]);
    done = done && cJSON_AddStringToObject(line, "answer_prefix", "") &&
           cJSON_AddStringToObject(line, "task", t->spec) && cJSON_AddNumberToObject(line, "seed", (double)seed) &&
           cJSON_AddNumberToObject(line, "n_tokens", (double)s->n_tokens);
    char *text = done ? cJSON_PrintUnformatted(line) : NULL;
    kvb_status status = KVB_OK;
    if (!text) status = kvb_fail(err, KVB_MEMORY, "task %s: no memory for a line of JSON", t->spec);
    else if (fprintf(to, "%s\n", text) < 0)
        status = kvb_fail(err, KVB_IO, "task %s: a line of JSON cannot be written", t->spec);
    cJSON_free(text);
    cJSON_Delete(line);
    return status;
}
