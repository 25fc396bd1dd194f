// What validate --certificate prints, as text and as JSON.
#include "runtime/fail.h"
#include "tools/json_print.h"
#include "tools/report/study_report.h"
#include <math.h>

static bool add_row(cJSON *rows, const table_check *k, const kvb_row *row, uint32_t r, const char *fault)
{
    cJSON *item = cJSON_CreateObject();
    return item && cJSON_AddItemToArray(rows, item) && cJSON_AddNumberToObject(item, "ratio", row->ratio) &&
           cJSON_AddNumberToObject(item, "lower_bound", row->lower_bound) &&
           cJSON_AddNumberToObject(item, "proved_bound", k->bound[r]) &&
           cJSON_AddNumberToObject(item, "loss", row->loss) &&
           cJSON_AddNumberToObject(item, "table_loss", k->table_loss[r]) &&
           (fault ? cJSON_AddStringToObject(item, "fault", fault) : cJSON_AddNullToObject(item, "fault"));
}

// Every row: to the JSON list, or, without one, those that do not hold to standard output. *slack: how far stored
// bounds are from our own.
static kvb_status report_rows(cJSON *list, const table_check *k, uint32_t *faults, double *slack, kvb_error *err)
{
    for (uint32_t r = 0; r < k->options.n_rows; r++) {
        kvb_row row;
        kvb_status status = kvb_table_row(k->table, r, &row, err);
        if (status != KVB_OK) return status;
        const char *fault = table_check_fault(k, &row, r);
        *faults += fault != NULL;
        *slack = fmax(*slack, fabs(k->bound[r] - row.lower_bound));
        if (list && !add_row(list, k, &row, r, fault)) return kvb_fail(err, KVB_MEMORY, "no memory for the JSON text");
        if (!list && fault)
            printf(
                "  %g %%: %s: stored loss %.12g, bound %.12g, table %.12g; from the record: bound %.12g, table %.12g\n",
                100 * row.ratio, fault, row.loss, row.lower_bound, row.table_loss, k->bound[r], k->table_loss[r]);
    }
    return KVB_OK;
}

kvb_status report_table_check(const table_check *k, bool json, uint32_t *faults, kvb_error *err)
{
    double slack = 0;
    cJSON *list = json ? cJSON_CreateArray() : NULL;
    kvb_status status = json && !list ? kvb_fail(err, KVB_MEMORY, "no memory for the JSON text") : KVB_OK;
    *faults = 0;
    if (status == KVB_OK) status = report_rows(list, k, faults, &slack, err);
    if (status == KVB_OK && json) status = json_print(list, err);
    if (status == KVB_OK && !json)
        printf("%s: %u of %u rows hold against %s (%u questions, %s); bounds differ from our own by %.2g of the mass "
               "at the most\n",
               k->path, k->options.n_rows - *faults, k->options.n_rows, k->from.path, k->pairs.n_pairs, k->pairs.metric,
               slack);
    cJSON_Delete(list);
    return status;
}
