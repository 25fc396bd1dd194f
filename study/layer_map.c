#include "study/layer_map.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

enum { MAX_LAYERS = 4096 }; // that a record may list as bounded

static uint32_t count_listed(const char *text)
{
    uint32_t n = *text != '\0';
    for (; *text; text++) n += *text == ',';
    return n;
}

// Reads one layer of the list, up to a comma or the end. Returns false unless it is a number in [least, end).
static bool read_layer(const char **text, uint32_t least, uint32_t end, uint32_t *out)
{
    char *rest;
    if (**text < '0' || **text > '9') return false;
    unsigned long value = strtoul(*text, &rest, 10);
    if (value < least || value >= end || (*rest && *rest != ',')) return false;
    *out = (uint32_t)value;
    *text = rest + (*rest == ',');
    return true;
}

kvb_status layer_map_read(layer_map *out, const record *r, kvb_error *err)
{
    static const char key[] = "bounded_layers";
    const char *text = record_text(r, key), *at = text;
    uint32_t listed = count_listed(text), least = 0, layer = 0;
    *out = (layer_map){.n_budgeted = record_get_shape(r).n_layers};
    out->n_layers = out->n_budgeted;
    if (!listed) return KVB_OK;
    if (listed > MAX_LAYERS)
        return kvb_fail(err, KVB_FORMAT, "record: attribute %s lists %u layers, expected at most %d", key, listed,
                        MAX_LAYERS);
    out->n_layers += listed;
    out->bounded = need(out->n_layers, sizeof *out->bounded, "layers");
    for (uint32_t i = 0; i < listed; i++, least = layer + 1) {
        if (!read_layer(&at, least, out->n_layers, &layer))
            return kvb_fail(err, KVB_FORMAT,
                            "record: attribute %s: expected ascending layers below %u, commas between, found '%.60s'",
                            key, out->n_layers, text);
        out->bounded[layer] = true;
    }
    return KVB_OK;
}

void layer_map_free(layer_map *m)
{
    free(m->bounded);
    *m = (layer_map){0};
}

uint32_t layer_map_place(const layer_map *m, uint32_t layer)
{
    uint32_t place = 0;
    if (!m->bounded) return layer;
    for (uint32_t l = 0; l < layer; l++) place += !m->bounded[l];
    return m->bounded[layer] ? UINT32_MAX : place;
}

double *layer_map_spread(const layer_map *m, const double *values, size_t rows, size_t heads)
{
    double *all = need(rows * m->n_layers * heads, sizeof *all, "numbers of a table"), *to = all;
    for (size_t r = 0; r < rows; r++)
        for (uint32_t l = 0; l < m->n_layers; l++, to += heads) {
            if (m->bounded && m->bounded[l]) continue;
            memcpy(to, values, heads * sizeof *to);
            values += heads;
        }
    return all;
}
