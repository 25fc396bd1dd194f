#include "tools/report/table_npy.h"
#include "formats/table_export.h"
#include "profiler/metric/scorer.h"
#include "runtime/json.h"
#include <stdio.h>
#include <stdlib.h>
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

kvb_status write_table_npy(const char *path, const table_content *t, kvb_error *err)
{
    cJSON *press = press_of_table(t->metadata);
    kvb_status status = table_export_npy(path, t, press, err);
    char *warning = table_kvpress_warning(t, press);
    if (status == KVB_OK && *warning) fprintf(stderr, "warning: %s: %s\n", path, warning);
    free(warning);
    cJSON_Delete(press);
    return status;
}
