#include "tools/memory.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>

bool memory_parse(const char *text, uint64_t *bytes)
{
    char *end;
    if (!isdigit((unsigned char)text[0])) return false; // no signs, no "inf"
    if (text[0] == '0' && (text[1] == 'x' || text[1] == 'X')) return false;
    double value = strtod(text, &end);
    static const char units[] = "KMGT";
    while (*end == ' ') end++;
    const char *unit = *end ? strchr(units, toupper((unsigned char)*end)) : NULL;
    if (unit) {
        bool binary = end[1] == 'i';
        for (const char *u = units; u <= unit; u++) value *= binary ? 1024 : 1000;
        end += 1 + binary;
    }
    if (strcasecmp(end, "b") == 0) end++;
    if (*end || !(value >= 1) || value > 0x1p62) return false;
    *bytes = (uint64_t)value;
    return true;
}

// Returns the number after `key` in a file of "key: 123 kB" lines, in bytes; 0 if it is not there.
static uint64_t read_field(const char *path, const char *key)
{
    FILE *f = fopen(path, "r");
    char line[256];
    uint64_t found = 0;
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0) found = strtoull(line + strlen(key), NULL, 10) * 1024;
    if (f) (void)fclose(f); // only read
    return found;
}

static bool read_number(const char *path, uint64_t *out)
{
    FILE *f = fopen(path, "r");
    unsigned long long value = 0;
    bool good = f && fscanf(f, "%20llu", &value) == 1; // "max": no limit
    if (f) (void)fclose(f);                            // only read
    *out = value;
    return good;
}

uint64_t memory_address_room(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return UINT64_MAX;
    uint64_t used = read_field("/proc/self/status", "VmSize:");
    return used < limit.rlim_cur ? limit.rlim_cur - used : 0;
}

uint64_t memory_free(void)
{
    static const char *const limits[][2] = {
        {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},                                  // version 2
        {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"}}; // version 1
    uint64_t bytes = read_field("/proc/meminfo", "MemAvailable:");
    for (int i = 0; i < 2; i++) {
        uint64_t limit, used;
        if (!read_number(limits[i][0], &limit) || !read_number(limits[i][1], &used)) continue;
        uint64_t left = used < limit ? limit - used : 1;
        if (!bytes || left < bytes) bytes = left;
    }
    uint64_t room = memory_address_room();
    return room < bytes ? room : bytes;
}

uint64_t memory_resident(void)
{
    return read_field("/proc/self/status", "VmRSS:");
}

uint64_t memory_peak(void)
{
    return read_field("/proc/self/status", "VmHWM:");
}
