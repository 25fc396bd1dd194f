#include "tools/report/table_npy.h"
#include "formats/table_export.h"
#include "profiler/metric/scorer.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include <string.h>

cJSON *press_of_table(const cJSON *metadata)
{
    const char *name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(metadata, "metric"));
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(metadata, "metric_parameters"));
    bool no_memory = false;
    cJSON *parameters = text ? kvb_json_parse(text, strlen(text), NULL, &no_memory) : NULL;
    cJSON *press = no_memory ? NULL : metric_press_of(name ? name : "", parameters);
    cJSON_Delete(parameters);
    return press;
}

kvb_status write_table_npy(const char *path, uint32_t n_rows, uint32_t n_layers, uint32_t n_kv_heads,
                           const double *prune_ratio, const cJSON *metadata, kvb_error *err)
{
    cJSON *press = press_of_table(metadata);
    kvb_status status = press ? KVB_OK : kvb_fail(err, KVB_MEMORY, "%s: not enough memory", path);
    if (status == KVB_OK)
        status = table_export_npy(path, n_rows, n_layers, n_kv_heads, prune_ratio, metadata, press, err);
    cJSON_Delete(press);
    return status;
}
