// Constraints of engines: making and reading them, and what they mean in tokens. limits_round.c keeps to them.
#include "limits.h"
#include "fail.h"
#include "json.h"
#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- making ----

kvb_status kvb_limits_init(kvb_limits *m, uint32_t n_layers, uint32_t n_kv_heads, kvb_error *err)
{
    size_t n = (size_t)n_layers * n_kv_heads;
    *m = (kvb_limits){.n_layers = n_layers, .n_kv_heads = n_kv_heads, .block = 1, .ranks = 1};
    m->least = calloc(n, sizeof *m->least);
    m->most = calloc(n, sizeof *m->most);
    m->cap = calloc(n_layers, sizeof *m->cap);
    if (!m->least || !m->most || !m->cap) {
        kvb_limits_free(m);
        return kvb_fail(err, KVB_MEMORY, "constraints: not enough memory for %zu heads", n);
    }
    for (size_t h = 0; h < n; h++) m->most[h] = 1;
    for (uint32_t l = 0; l < n_layers; l++) m->cap[l] = 1;
    return KVB_OK;
}

void kvb_limits_free(kvb_limits *m)
{
    free(m->least);
    free(m->most);
    free(m->cap);
    *m = (kvb_limits){0};
}

static kvb_status read_count(const cJSON *item, const char *name, uint32_t least, uint32_t *out, kvb_error *err)
{
    double value = cJSON_IsNumber(item) ? item->valuedouble : -1;
    if (!(value >= least && value <= 1 << 24) || value != floor(value)) {
        return kvb_fail(err, KVB_FORMAT, "%s: metadata \"constraints\": %s: expected a whole number from %u to 2^24",
                        name, item->string, (unsigned)least);
    }
    *out = (uint32_t)value;
    return KVB_OK;
}

static kvb_status read_shares(const cJSON *item, const char *name, size_t count, double *out, kvb_error *err)
{
    size_t i = 0;
    const cJSON *element;
    if (!cJSON_IsArray(item) || (size_t)cJSON_GetArraySize(item) != count) {
        return kvb_fail(err, KVB_FORMAT, "%s: metadata \"constraints\": %s: expected an array of %zu shares", name,
                        item->string, count);
    }
    cJSON_ArrayForEach(element, item)
    {
        double share = cJSON_IsNumber(element) ? element->valuedouble : -1;
        if (!(share >= 0 && share <= 1)) {
            return kvb_fail(err, KVB_FORMAT,
                            "%s: metadata \"constraints\": %s: element %zu: expected a share from 0 to 1", name,
                            item->string, i);
        }
        out[i++] = share;
    }
    return KVB_OK;
}

static kvb_status read_item(kvb_limits *m, const cJSON *item, const char *name, kvb_error *err)
{
    size_t n = (size_t)m->n_layers * m->n_kv_heads;
    const char *key = item->string;
    if (strcmp(key, "block") == 0) return read_count(item, name, 1, &m->block, err);
    if (strcmp(key, "levels") == 0) return read_count(item, name, 0, &m->levels, err);
    if (strcmp(key, "ranks") == 0) return read_count(item, name, 1, &m->ranks, err);
    if (strcmp(key, "by_layer") == 0 && cJSON_IsBool(item)) {
        m->by_layer = cJSON_IsTrue(item);
        return KVB_OK;
    }
    if (strcmp(key, "least") == 0) return read_shares(item, name, n, m->least, err);
    if (strcmp(key, "most") == 0) return read_shares(item, name, n, m->most, err);
    if (strcmp(key, "layer_cap") == 0) return read_shares(item, name, m->n_layers, m->cap, err);
    return kvb_fail(err, KVB_UNSUPPORTED,
                    "%s: metadata \"constraints\": \"%.40s\" is not known to this version; use a newer kvbudget", name,
                    key);
}

kvb_status kvb_limits_parse(kvb_limits *m, const char *text, uint32_t n_layers, uint32_t n_kv_heads, const char *name,
                            kvb_error *err)
{
    cJSON *all;
    const cJSON *item;
    kvb_status status = kvb_limits_init(m, n_layers, n_kv_heads, NULL);
    if (status) return kvb_fail(err, status, "%s: not enough memory for the constraints", name);
    status = kvb_json_object(&all, text, strlen(text), name, "metadata \"constraints\"", err);
    cJSON_ArrayForEach(item, all)
    {
        if (!status) status = read_item(m, item, name, err);
    }
    if (!status) {
        kvb_error inner;
        if (kvb_limits_check(m, &inner))
            status = kvb_fail(err, KVB_FORMAT, "%s: metadata \"constraints\": %s", name, inner.message);
    }
    cJSON_Delete(all);
    if (status) kvb_limits_free(m);
    return status;
}

// ---- meaning ----

kvb_status kvb_limits_check(const kvb_limits *m, kvb_error *err)
{
    if (m->n_kv_heads % m->ranks != 0) {
        return kvb_fail(err, KVB_ARGUMENT, "%u ranks: expected a divisor of the %u KV heads of a layer",
                        (unsigned)m->ranks, (unsigned)m->n_kv_heads);
    }
    if (m->levels && m->ranks > 1) {
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "equal totals of %u ranks and at most %u budgets per layer cannot be had together: few budgets "
                        "rarely add up to equal totals; choose one of the two",
                        (unsigned)m->ranks, (unsigned)m->levels);
    }
    for (uint32_t l = 0; l < m->n_layers; l++) {
        for (uint32_t p = 0; p < m->ranks; p++) {
            uint32_t own = m->n_kv_heads / m->ranks;
            size_t first = (size_t)l * m->n_kv_heads + (size_t)p * own;
            double least = 0;
            for (size_t h = first; h < first + own; h++) {
                least += m->least[h];
                if (m->least[h] > m->most[h]) {
                    return kvb_fail(err, KVB_ARGUMENT,
                                    "layer %u, KV head %zu: must keep at least %g and at most %g of its tokens",
                                    (unsigned)l, h % m->n_kv_heads, m->least[h], m->most[h]);
                }
            }
            if (least > m->cap[l] * own + 1e-9) {
                return kvb_fail(err, KVB_ARGUMENT,
                                "layer %u: its heads must keep at least %g of their tokens, but its cap is %g",
                                (unsigned)l, least / own, m->cap[l]);
            }
        }
    }
    return KVB_OK;
}

uint32_t kvb_limits_units(const kvb_limits *m, uint32_t n_tokens)
{
    return n_tokens / m->block + (n_tokens % m->block != 0);
}

uint32_t kvb_limits_least(const kvb_limits *m, size_t head, uint32_t n_tokens)
{
    double units = ceil((m->least[head] * n_tokens - KVB_LIMITS_GRACE) / m->block);
    uint32_t all = kvb_limits_units(m, n_tokens);
    return units < 1 ? 1 : units < all ? (uint32_t)units : all;
}

uint32_t kvb_limits_most(const kvb_limits *m, size_t head, uint32_t n_tokens)
{
    uint32_t all = kvb_limits_units(m, n_tokens);
    return m->most[head] >= 1 ? all : (uint32_t)floor((m->most[head] * n_tokens + KVB_LIMITS_GRACE) / m->block);
}

uint64_t kvb_limits_cap(const kvb_limits *m, uint32_t layer, uint32_t n_tokens)
{
    uint64_t own = m->n_kv_heads / m->ranks;
    if (m->cap[layer] >= 1) return own * kvb_limits_units(m, n_tokens);
    return (uint64_t)floor((m->cap[layer] * (double)own * n_tokens + KVB_LIMITS_GRACE) / m->block);
}
