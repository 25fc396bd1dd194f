#include "json_file.h"
#include "atomic_file.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

kvb_status json_write(const char *path, const cJSON *value, kvb_error *err)
{
    char *text = value ? cJSON_Print(value) : NULL;
    if (!text) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory", path);
    atomic_file f;
    kvb_status status = atomic_file_begin(&f, path, err);
    if (status == KVB_OK) {
        fprintf(f.stream, "%s\n", text);
        status = atomic_file_commit(&f, err); // finds what went wrong with the stream
    }
    free(text);
    return status;
}

cJSON *json_exact(double x)
{
    char text[32];
    if (!isfinite(x)) return cJSON_CreateNull();
    snprintf(text, sizeof text, "%.17g", x);
    if (strchr(text, ',')) return cJSON_CreateNumber(x); // a locale with another point: cJSON knows it
    return cJSON_CreateRaw(text);
}

bool json_add_exact(cJSON *object, const char *name, double x)
{
    return cJSON_AddItemToObject(object, name, json_exact(x));
}
