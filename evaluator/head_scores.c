#include "evaluator/head_scores.h"
#include "formats/file_read.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- Reading ----

// What was read: one number per layer and head, before groups are averaged or repeated.
typedef struct score_grid {
    float *values; // [n_layers, columns]
    uint32_t columns;
} score_grid;

// Numbers in lines; every line as many.
static kvb_status parse_tsv(score_grid *g, const char *text, const char *path, uint32_t n_layers, uint32_t most,
                            kvb_error *err)
{
    g->values = need((size_t)n_layers * most, sizeof *g->values, "head scores");
    uint32_t layer = 0;
    for (const char *line = text; *line; layer++) {
        uint32_t n = 0;
        const char *end = line + strcspn(line, "\n");
        while (line < end) {
            char *after;
            double value = strtod(line, &after);
            if (after == line || after > end || n == most || layer == n_layers)
                return kvb_fail(err, KVB_FORMAT, "%s: line %u: expected %u lines of at most %u numbers, found '%.*s'",
                                path, layer + 1, n_layers, most, (int)(end - line < 24 ? end - line : 24), line);
            if (layer == 0) g->columns = n + 1;
            if (n < g->columns) g->values[(size_t)layer * g->columns + n] = (float)value;
            n++;
            line = after + strspn(after, " \t\r");
        }
        if (n != g->columns || n == 0)
            return kvb_fail(err, KVB_FORMAT, "%s: line %u has %u numbers, expected %u", path, layer + 1, n, g->columns);
        line = *end ? end + 1 : end;
    }
    if (layer != n_layers)
        return kvb_fail(err, KVB_MISMATCH, "%s: %u lines, expected one for each of %u layers", path, layer, n_layers);
    return KVB_OK;
}

// Groups of query heads are averaged, or KV heads repeated, to what is wanted.
static kvb_status fit_groups(const score_grid *g, const char *path, uint32_t n_layers, uint32_t n_heads,
                             uint32_t n_kv_heads, bool query_heads, float *out, kvb_error *err)
{
    uint32_t group = n_heads / n_kv_heads, wanted = query_heads ? n_heads : n_kv_heads;
    if (g->columns != n_heads && g->columns != n_kv_heads)
        return kvb_fail(err, KVB_MISMATCH, "%s: %u heads in a layer, expected %u query or %u KV heads", path,
                        g->columns, n_heads, n_kv_heads);
    for (size_t i = 0; i < (size_t)n_layers * g->columns; i++)
        if (!isfinite(g->values[i]) || g->values[i] < 0)
            return kvb_fail(err, KVB_NUMERIC, "%s: layer %zu, head %zu: expected a score of 0 or more, found %g", path,
                            i / g->columns, i % g->columns, (double)g->values[i]);
    for (uint32_t l = 0; l < n_layers; l++)
        for (uint32_t h = 0; h < wanted; h++) {
            const float *row = g->values + (size_t)l * g->columns;
            double sum = 0;
            uint32_t first = g->columns == wanted ? h : query_heads ? h / group : h * group;
            uint32_t n = g->columns > wanted ? group : 1;
            for (uint32_t i = 0; i < n; i++) sum += row[first + i];
            out[(size_t)l * wanted + h] = (float)(sum / n);
        }
    return KVB_OK;
}

kvb_status head_scores_parse(const void *data, size_t size, const char *path, uint32_t n_layers, uint32_t n_heads,
                             uint32_t n_kv_heads, bool query_heads, float *out, kvb_error *err)
{
    score_grid g = {0};
    char *text = need(size + 1, 1, "characters"); // strtod needs an end
    memcpy(text, data, size);
    kvb_status status = parse_tsv(&g, text, path, n_layers, n_heads, err);
    free(text);
    if (status == KVB_OK) status = fit_groups(&g, path, n_layers, n_heads, n_kv_heads, query_heads, out, err);
    free(g.values);
    return status;
}

kvb_status head_scores_read(const char *path, uint32_t n_layers, uint32_t n_heads, uint32_t n_kv_heads,
                            bool query_heads, float *out, kvb_error *err)
{
    file_view view;
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    status = head_scores_parse(view.data, view.size, path, n_layers, n_heads, n_kv_heads, query_heads, out, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    file_unmap(&view);
    return status;
}
