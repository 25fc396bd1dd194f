#include "formats/table_weights.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include <cjson/cJSON.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

static bool read_row(double *weight, const cJSON *row, uint32_t n_texts, double cap)
{
    const cJSON *item;
    uint32_t n = 0;
    double sum = 0;
    if (!cJSON_IsArray(row)) return false;
    cJSON_ArrayForEach(item, row)
    {
        if (n == n_texts || !cJSON_IsNumber(item)) return false;
        double value = item->valuedouble;
        if (!(value >= 0 && value <= cap * (1 + 1e-9))) return false;
        sum += weight[n++] = value;
    }
    return n == n_texts && fabs(sum - 1) <= 1e-9;
}

kvb_status table_weights_parse(double *weight, const char *text, uint32_t n_rows, uint32_t n_texts, double cap,
                               const char *name, kvb_error *err)
{
    bool no_memory = false;
    cJSON *rows = text ? kvb_json_parse(text, strlen(text), NULL, &no_memory) : NULL;
    if (no_memory) return kvb_fail(err, KVB_MEMORY, "%s: metadata \"text_weights\": not enough memory", name);
    const cJSON *row = cJSON_IsArray(rows) ? rows->child : NULL;
    uint32_t r = 0;
    for (; r < n_rows && row && read_row(weight + (size_t)r * n_texts, row, n_texts, cap); r++) row = row->next;
    bool whole = r == n_rows && !row;
    cJSON_Delete(rows);
    if (whole) return KVB_OK;
    return kvb_fail(err, KVB_FORMAT,
                    "%.160s: metadata \"text_weights\": row %u: expected %u rows of %u numbers from 0 to %.4g with the "
                    "sum 1; solve the record again",
                    name, r, n_rows, n_texts, cap);
}

char *table_weights_print(const double *weight, uint32_t n_rows, uint32_t n_texts)
{
    cJSON *rows = cJSON_CreateArray();
    bool ok = rows != NULL;
    for (uint32_t r = 0; r < n_rows && ok; r++)
        ok = cJSON_AddItemToArray(rows, cJSON_CreateDoubleArray(weight + (size_t)r * n_texts, (int)n_texts));
    char *text = ok ? cJSON_PrintUnformatted(rows) : NULL;
    cJSON_Delete(rows);
    return text;
}
