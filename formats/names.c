#include "names.h"
#include <string.h>

bool context_id_valid(const char *id)
{
    size_t n = strspn(id, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-");
    return n >= 1 && n <= CONTEXT_ID_MAX && id[n] == '\0' && strcmp(id, ".") != 0 && strcmp(id, "..") != 0;
}

bool metric_name_valid(const char *name)
{
    size_t n = 0;
    for (; name[n]; n++) {
        if (name[n] <= ' ' || name[n] > '~' || name[n] == '/' || n >= METRIC_NAME_MAX) return false;
    }
    return n >= 1 && strcmp(name, ".") != 0;
}
