// The reader of result documents, which report may get from anybody: those that it accepts have flat rows and all
// parts.
#include "tests/fuzz/fuzz.h"
#include "tools/report/results.h"

static void check(int holds)
{
    if (!holds) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    results_document r;
    kvb_error err;
    const cJSON *row, *cell;
    if (results_parse(&r, (const char *)data, size, "fuzz.json", &err) != KVB_OK) {
        check(r.document == NULL && strncmp(err.message, "fuzz.json: ", 11) == 0);
        return 0;
    }
    check(*r.command && r.rows && r.details && r.settings && r.inputs && r.arguments);
    cJSON_ArrayForEach(row, r.rows)
    {
        check(cJSON_IsObject(row));
        cJSON_ArrayForEach(cell, row)
        {
            interval x = results_interval_at(row, cell->string);
            check(cJSON_IsNumber(cell) == !isnan(x.value) || !isfinite(cell->valuedouble));
            check(cJSON_IsString(cell) || !*results_text(row, cell->string));
        }
    }
    results_close(&r);
    check(r.document == NULL);
    return 0;
}
