#include "formats/json_file.h"
#include "formats/atomic_file.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdarg.h>
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
    if (strchr(text, ',')) return cJSON_CreateNumber(x); // a locale with a decimal comma: cJSON handles it
    return cJSON_CreateRaw(text);
}

bool json_add_exact(cJSON *object, const char *name, double x)
{
    return cJSON_AddItemToObject(object, name, json_exact(x));
}

void json_put(cJSON *object, const char *members, ...)
{
    char name[64], kind;
    int length;
    va_list args;
    va_start(args, members);
    for (; sscanf(members, " %63s %%%c%n", name, &kind, &length) == 2; members += length) {
        if (kind == 's') cJSON_AddStringToObject(object, name, va_arg(args, const char *));
        else if (kind == 'd') cJSON_AddBoolToObject(object, name, va_arg(args, int));
        else if (kind == 'g') cJSON_AddNumberToObject(object, name, va_arg(args, double));
        else if (kind == 'u') cJSON_AddNumberToObject(object, name, va_arg(args, unsigned));
        else cJSON_AddNumberToObject(object, name, (double)va_arg(args, size_t)), length++; // the u of %zu
    }
    va_end(args);
}

static const char seal_begin[] = ",\"sha256\":\"", seal_end[] = "\"}";
enum { HASH = 64, SEAL = sizeof seal_begin - 1 + HASH + sizeof seal_end - 1 };

char *json_sealed_line(const cJSON *object)
{
    char hash[HASH + 1], *text = needed(cJSON_PrintUnformatted(object), "lines of a log");
    size_t n = strlen(text) - 1; // up to its last brace
    sha256_hex(text, n, hash);
    char *line = need_text("%.*s%s%s%s\n", (int)n, text, seal_begin, hash, seal_end);
    cJSON_free(text);
    return line;
}

bool json_line_holds(const char *line, size_t size)
{
    char hash[HASH + 1];
    if (size <= SEAL || memcmp(line + size - SEAL, seal_begin, sizeof seal_begin - 1) != 0 ||
        memcmp(line + size - (sizeof seal_end - 1), seal_end, sizeof seal_end - 1) != 0)
        return false;
    sha256_hex(line, size - SEAL, hash);
    return memcmp(line + size - SEAL + sizeof seal_begin - 1, hash, HASH) == 0;
}
