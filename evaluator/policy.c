#include "evaluator/policy_parts.h"
#include "profiler/scorer_parts.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const policy_kind *const policy_kinds[] = {&policy_full,      &policy_morphkv, &policy_tova,     &policy_h2o,
                                           &policy_streaming, &policy_keydiff, &policy_lagkv,    &policy_topk,
                                           &policy_quest,     &policy_sparq,   &policy_rocketkv, &policy_rocketkv_mt};
const size_t policy_kind_count = sizeof policy_kinds / sizeof *policy_kinds;

const char *policy_name(const policy_kind *kind)
{
    return kind->name;
}

const char *policy_summary(const policy_kind *kind)
{
    return kind->summary;
}

const scorer_parameter *policy_parameters(const policy_kind *kind)
{
    return kind->parameters;
}

static size_t parameter_place(const policy_kind *kind, const char *name, size_t length)
{
    size_t i = 0;
    while (kind->parameters[i].name &&
           (strncmp(kind->parameters[i].name, name, length) != 0 || kind->parameters[i].name[length]))
        i++;
    return i;
}

double policy_value(const policy *p, const char *parameter)
{
    size_t i = parameter_place(p->kind, parameter, strlen(parameter));
    return p->kind->parameters[i].name ? p->values[i] : NAN;
}

static kvb_status unknown_policy(const char *text, kvb_error *err)
{
    char list[320] = "";
    for (size_t i = 0; i < policy_kind_count; i++) {
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", policy_kinds[i]->name);
    }
    return kvb_fail(err, KVB_ARGUMENT, "policy '%.60s': unknown; there are %s", text, list);
}

// A choice by its name ("max" of "sum|max"), or a number.
static bool read_value(double *out, const scorer_parameter *p, const char *text, size_t length)
{
    const char *choice = p->choices;
    for (int i = 0; choice; i++) {
        size_t n = strcspn(choice, "|");
        if (n == length && memcmp(choice, text, n) == 0) {
            *out = i;
            return true;
        }
        choice = choice[n] ? choice + n + 1 : NULL;
    }
    char *end;
    *out = strtod(text, &end);
    return length > 0 && end == text + length && *out >= p->low && *out <= p->high &&
           (!p->integer || *out == floor(*out));
}

static kvb_status read_parameter(policy *p, const char *text, size_t length, kvb_error *err)
{
    size_t name = strcspn(text, "=:"), place = parameter_place(p->kind, text, name);
    const scorer_parameter *q = &p->kind->parameters[place];
    int shown = (int)(length < 60 ? length : 60);
    if (!q->name || name == 0 || name >= length)
        return kvb_fail(err, KVB_ARGUMENT, "policy %s: '%.*s' is no parameter of it; see kvbudget help task",
                        p->kind->name, shown, text);
    if (!read_value(&p->values[place], q, text + name + 1, length - name - 1))
        return kvb_fail(err, KVB_ARGUMENT, "policy %s: %s: expected %s%s from %g to %g, found '%.*s'", p->kind->name,
                        q->name, q->choices ? q->choices : "a number",
                        q->integer && !q->choices ? " without fraction" : "", q->low, q->high, shown, text + name + 1);
    return KVB_OK;
}

// Adds ":name=value", a choice by its word.
static void write_parameter(policy *p, const scorer_parameter *q, double value)
{
    size_t used = strlen(p->spec), left = sizeof p->spec - used;
    const char *choice = q->choices;
    for (int i = 0; choice && i < (int)value; i++) choice += strcspn(choice, "|") + 1;
    if (choice) snprintf(p->spec + used, left, ":%s=%.*s", q->name, (int)strcspn(choice, "|"), choice);
    else snprintf(p->spec + used, left, ":%s=%g", q->name, value);
}

static void write_spec(policy *p)
{
    snprintf(p->spec, sizeof p->spec, "%s", p->kind->name);
    for (size_t i = 0; p->kind->parameters[i].name; i++)
        if (p->values[i] != p->kind->parameters[i].value) write_parameter(p, &p->kind->parameters[i], p->values[i]);
}

kvb_status policy_parse(policy *out, const char *text, kvb_error *err)
{
    size_t length = strcspn(text, ":");
    kvb_status status = KVB_OK;
    *out = (policy){0};
    for (size_t i = 0; i < policy_kind_count; i++)
        if (strlen(policy_kinds[i]->name) == length && memcmp(policy_kinds[i]->name, text, length) == 0)
            out->kind = policy_kinds[i];
    if (!out->kind) return unknown_policy(text, err);
    for (size_t i = 0; out->kind->parameters[i].name; i++) out->values[i] = out->kind->parameters[i].value;
    for (text += length; *text && status == KVB_OK; text += length) {
        text++;
        length = strcspn(text, ":");
        status = read_parameter(out, text, length, err);
    }
    if (status == KVB_OK && out->kind->metric) status = metric_parse(&out->scores, out->kind->metric, err);
    if (status == KVB_OK) write_spec(out);
    return status;
}

bool policy_reads_blocks(const policy *p)
{
    return p->kind->block && policy_value(p, "prefill") > 0;
}

uint32_t policy_largest_block(const policy *p)
{
    if (!policy_reads_blocks(p)) return 0;
    uint32_t first = p->kind->block(p, 0), next = p->kind->block(p, first);
    return first > next ? first : next;
}

uint32_t policy_best(const float *scores, uint32_t n, uint32_t keep, uint32_t sinks, uint32_t recent, uint32_t *out)
{
    kvb_select(scores, n, keep, sinks, recent, out, n, NULL);
    return keep < n ? keep : n;
}

void policy_group_rows(float *out, float *scratch, const layer_view *view, uint32_t g, uint32_t first, uint32_t n)
{
    uint32_t group = view->n_heads / view->n_kv_heads;
    attention_rows(out, view, g * group, first, n);
    for (uint32_t h = 1; h < group; h++) {
        attention_rows(scratch, view, g * group + h, first, n);
        for (size_t i = 0; i < (size_t)n * view->n_tokens; i++) out[i] += scratch[i];
    }
}

kvb_status policy_new_turn(policy_head *h, kv_span span, kvb_error *err)
{
    return h->p->kind->turn ? h->p->kind->turn(h, span, err) : KVB_OK;
}

// ---- Nothing evicted ----

static kvb_status keep_all(policy_head *h, const layer_view *view, const float *scores, uint32_t *keep,
                           uint32_t *n_keep, kvb_error *err)
{
    (void)h, (void)scores, (void)err;
    for (uint32_t i = 0; i < view->n_tokens; i++) keep[i] = i;
    *n_keep = view->n_tokens;
    return KVB_OK;
}

const policy_kind policy_full = {.name = "full", .summary = "the whole cache", .prefill = keep_all};
