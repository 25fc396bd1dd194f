// What validate --certificate prints as text, and adds to its results.
#include "tools/report/study_report.h"
#include "tools/report/words.h"
#include <math.h>

static void add_row(results *to, const table_check *k, const kvb_row *row, uint32_t r, const char *fault)
{
    cJSON *item = results_row(to);
    cJSON_AddStringToObject(item, "metric", k->pairs.metric);
    cJSON_AddNumberToObject(item, "ratio", row->ratio);
    cJSON_AddNumberToObject(item, "lower_bound", row->lower_bound);
    cJSON_AddNumberToObject(item, "proved_bound", k->bound[r]);
    cJSON_AddNumberToObject(item, "loss", row->loss);
    cJSON_AddNumberToObject(item, "table_loss", k->table_loss[r]);
    if (fault) cJSON_AddStringToObject(item, "fault", fault);
    else cJSON_AddNullToObject(item, "fault");
}

kvb_status report_table_check(const table_check *k, results *to, uint32_t *faults, kvb_error *err)
{
    double slack = 0; // how far stored bounds are from our own
    *faults = 0;
    for (uint32_t r = 0; r < k->options.n_rows; r++) {
        kvb_row row;
        kvb_status status = kvb_table_row(k->table, r, &row, err);
        if (status != KVB_OK) return status;
        const char *fault = table_check_fault(k, &row, r);
        *faults += fault != NULL;
        slack = fmax(slack, fabs(k->bound[r] - row.lower_bound));
        if (to) add_row(to, k, &row, r, fault);
        else if (fault)
            printf(
                "  %g %%: %s: stored loss %.12g, bound %.12g, table %.12g; from the record: bound %.12g, table %.12g\n",
                100 * row.ratio, fault, row.loss, row.lower_bound, row.table_loss, k->bound[r], k->table_loss[r]);
    }
    if (!to)
        printf("%s: %u of %u rows hold against %s (%u %s, %s); bounds differ from our own by %.2g of the mass "
               "at the most\n",
               k->path, k->options.n_rows - *faults, k->options.n_rows, k->from.path, k->pairs.n_pairs,
               plural(k->pairs.n_pairs, "question", "questions"), k->pairs.metric, slack);
    return KVB_OK;
}
