#include "study/selection.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "runtime/rank.h"
#include "study/layer_map.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define FROM_FILE "learned=" // a ranking that `kvbudget learn` wrote

// Selects the contexts of --contexts a,b,c in the given order; NULL: all, in calibration order.
static kvb_status select_contexts(selection *s, const char *ids, kvb_error *err)
{
    size_t count = record_context_count(s->r);
    s->contexts = need(count, sizeof *s->contexts, "contexts");
    if (!ids)
        for (; s->n_contexts < count; s->n_contexts++) s->contexts[s->n_contexts] = s->n_contexts;
    for (const char *text = ids; text;) {
        size_t length = strcspn(text, ","), i = 0;
        for (; i < count; i++) {
            const char *id = record_context(s->r, i)->id;
            if (strlen(id) == length && memcmp(id, text, length) == 0) break;
        }
        if (i == count)
            return kvb_fail(err, KVB_ARGUMENT, "--contexts: %s has no context '%.*s'; `kvbudget inspect` lists them",
                            s->path, (int)length, text);
        for (size_t k = 0; k < s->n_contexts; k++)
            if (s->contexts[k] == i)
                return kvb_fail(err, KVB_ARGUMENT, "--contexts: '%.*s' is given twice", (int)length, text);
        s->contexts[s->n_contexts++] = i;
        text = text[length] ? text + length + 1 : NULL;
    }
    if (s->n_contexts == 0) return kvb_fail(err, KVB_FORMAT, "%s: the record holds no context", s->path);
    return KVB_OK;
}

static void list_metrics(const record_context_info *c, char *out, size_t size)
{
    size_t used = 0;
    out[0] = '\0';
    for (uint32_t i = 0; i < c->n_metrics && used < size; i++)
        used += (size_t)snprintf(out + used, size - used, "%s%s", i ? ", " : "", c->metrics[i]);
}

// Finds a metric by its full name, or by a prefix up to a ':' that only one metric has.
static kvb_status find_metric(const char **out, const record_context_info *c, const char *name, kvb_error *err)
{
    char known[256];
    size_t length = strlen(name), found = 0;
    for (uint32_t i = 0; i < c->n_metrics; i++) {
        const char *metric = c->metrics[i];
        if (strncmp(metric, name, length) != 0 || (metric[length] && metric[length] != ':')) continue;
        *out = metric;
        found++;
        if (!metric[length]) return KVB_OK;
    }
    if (found == 1) return KVB_OK;
    list_metrics(c, known, sizeof known);
    return kvb_fail(err, KVB_ARGUMENT, "--metric %s: %s; the record has %s", name,
                    found ? "several metrics begin like this" : "not in the record", known);
}

// Adds a metric at the end; one that is listed already stays where it is.
static kvb_status append_metric(selection *s, const char *metric, const kvb_ranking *ranking, kvb_error *err)
{
    for (size_t j = 0; j < s->n_metrics; j++)
        if (strcmp(s->metrics[j], metric) == 0) return KVB_OK;
    if (s->n_metrics == METRICS_MAX) return kvb_fail(err, KVB_UNSUPPORTED, "at most %d metrics at once", METRICS_MAX);
    s->rankings[s->n_metrics] = ranking;
    s->metrics[s->n_metrics++] = metric;
    return KVB_OK;
}

// Checks that the ranking is of the record's model: it has weights for all layers, the record scores of budgeted ones.
static kvb_status check_ranking_model(const selection *s, const kvb_ranking *r, kvb_error *err)
{
    layer_map layers;
    const kvb_ranking_info *info = &r->info;
    const char *model = record_text(s->r, "model_sha256");
    kvb_status status = layer_map_read(&layers, s->r, err);
    bool fits = info->n_layers == layers.n_layers && info->n_kv_heads == record_get_shape(s->r).n_kv_heads;
    layer_map_free(&layers);
    if (status != KVB_OK) return status;
    if (fits && (!*model || !*info->model_sha256 || strcasecmp(model, info->model_sha256) == 0)) return KVB_OK;
    return kvb_fail(err, KVB_MISMATCH,
                    "%s: the ranking %s, of %u layers x %u KV heads, is of another model; fit one on this record "
                    "(kvbudget learn)",
                    s->path, info->name, info->n_layers, info->n_kv_heads);
}

kvb_status selection_check_ranking(const selection *s, const kvb_ranking *r, kvb_error *err)
{
    const kvb_ranking_info *info = &r->info;
    kvb_status status = check_ranking_model(s, r, err);
    if (status != KVB_OK) return status;
    for (size_t k = 0; k < s->n_contexts; k++) {
        const record_context_info *c = selection_context(s, k);
        for (uint32_t f = 0; f < info->n_features && !record_has_metric(c, info->name); f++)
            if (!record_has_metric(c, info->metrics[f]))
                return kvb_fail(err, KVB_MISMATCH,
                                "%s: context %s has no scores of %s, which the ranking %s takes; profile with --metric "
                                "%s",
                                s->path, c->id, info->metrics[f], info->name, info->metrics[f]);
    }
    return KVB_OK;
}

static kvb_status add_ranking(selection *s, const kvb_ranking *ranking, kvb_error *err)
{
    kvb_status status = selection_check_ranking(s, ranking, err);
    return status == KVB_OK ? append_metric(s, ranking->info.name, ranking, err) : status;
}

// Opens the file of learned=FILE and adds its ranking.
static kvb_status open_ranking(selection *s, const char *path, kvb_error *err)
{
    if (s->n_opened == METRICS_MAX) return kvb_fail(err, KVB_UNSUPPORTED, "at most %d metrics at once", METRICS_MAX);
    kvb_status status = kvb_ranking_open(&s->opened[s->n_opened], path, err);
    return status == KVB_OK ? add_ranking(s, s->opened[s->n_opened++], err) : status;
}

static kvb_status add_metric(selection *s, const char *metric, kvb_error *err)
{
    for (size_t k = 0; k < s->n_contexts; k++) {
        const record_context_info *c = selection_context(s, k);
        if (!record_has_metric(c, metric))
            return kvb_fail(err, KVB_MISMATCH, "%s: context %s has no scores of %s; leave it out with --contexts",
                            s->path, c->id, metric);
    }
    return append_metric(s, metric, NULL, err);
}

static kvb_status select_metrics(selection *s, const selection_request *wanted, kvb_error *err)
{
    const record_context_info *first = selection_context(s, 0);
    kvb_status status = KVB_OK;
    for (size_t k = 0; k < wanted->n_metrics && status == KVB_OK; k++) {
        const char *name = wanted->metrics[k], *metric = NULL;
        if (strncmp(name, FROM_FILE, strlen(FROM_FILE)) == 0) {
            status = open_ranking(s, name + strlen(FROM_FILE), err);
            continue;
        }
        if (wanted->carried && strcmp(name, wanted->carried->info.name) == 0) {
            status = add_ranking(s, wanted->carried, err);
            continue;
        }
        if (strcmp(name, "all") != 0) {
            status = find_metric(&metric, first, name, err);
            if (status == KVB_OK) status = add_metric(s, metric, err);
            continue;
        }
        for (uint32_t i = 0; i < first->n_metrics && status == KVB_OK; i++)
            status = add_metric(s, first->metrics[i], err);
    }
    if (status == KVB_OK && s->n_metrics == 0)
        return kvb_fail(err, KVB_FORMAT, "%s: context %s has no scores of any metric", s->path, first->id);
    return status;
}

kvb_status selection_open(selection *s, const char *path, const selection_request *wanted, kvb_error *err)
{
    *s = (selection){.path = path, .max_questions = wanted->max_questions};
    kvb_status status = record_open(&s->r, path, err);
    if (status == KVB_OK && record_shard(s->r))
        status =
            kvb_fail(err, KVB_MISMATCH, "%s: is shard %.20s of a run; put all shards together first (kvbudget merge)",
                     path, record_shard(s->r));
    if (status == KVB_OK) status = select_contexts(s, wanted->contexts, err);
    return status == KVB_OK ? select_metrics(s, wanted, err) : status;
}

void selection_close(selection *s)
{
    for (size_t i = 0; i < s->n_opened; i++) kvb_ranking_close(s->opened[i]);
    record_close(s->r);
    free(s->contexts);
    *s = (selection){0};
}

const kvb_ranking *selection_ranking(const selection *s, const char *metric)
{
    for (size_t i = 0; i < s->n_metrics; i++)
        if (s->metrics[i] == metric) return s->rankings[i];
    return NULL;
}

const record_context_info *selection_context(const selection *s, size_t k)
{
    return record_context(s->r, s->contexts[k]);
}

bool selection_has(const selection *s, const record_question_info *q, uint32_t index)
{
    return q->n_queries > 0 && index < s->max_questions;
}

uint32_t selection_count(const selection *s, size_t k)
{
    const record_context_info *c = selection_context(s, k);
    uint32_t n = 0;
    for (uint32_t q = 0; q < c->n_questions; q++) n += selection_has(s, &c->questions[q], q);
    return n;
}

kvb_status selection_require_model(const selection *s, const char *sha256, const char *other, kvb_error *err)
{
    const char *own = record_text(s->r, "model_sha256");
    if (!*own || !*sha256 || strcasecmp(own, sha256) == 0) return KVB_OK;
    return kvb_fail(err, KVB_MISMATCH,
                    "%s and %s are of different models: the weights have SHA-256 %.16s... and %.16s...", s->path, other,
                    own, sha256);
}
