#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L // uselocale()
#endif
#include "json.h"
#include "fail.h"
#include "text.h"
#include <cjson/cJSON.h>
#include <errno.h>
#include <locale.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#ifdef __APPLE__
#include <xlocale.h>
#endif

// Whether the escape at `at` is \u0000.
static bool is_zero_escape(const char *at, size_t left)
{
    return left >= 6 && memcmp(at, "\\u0000", 6) == 0;
}

// Refuses what cJSON wrongly accepts, by looking at the text itself.
static kvb_status check_text(const char *text, size_t size, const char *name, const char *place, kvb_error *err)
{
    for (size_t i = 0, step; i < size; i += step) {
        step = kvb_utf8_size(text + i, size - i);
        if (step == 0) {
            return kvb_fail(err, KVB_FORMAT, "%s: %s: byte %zu: expected UTF-8, found 0x%02x; the file is damaged",
                            name, place, i, (unsigned char)text[i]);
        }
        if (text[i] == '\0' || is_zero_escape(text + i, size - i)) {
            return kvb_fail(err, KVB_FORMAT, "%s: %s: byte %zu: found a NUL character; the file is damaged", name,
                            place, i);
        }
        if (text[i] == '\\' && i + 1 < size && text[i + 1] == '\\') step = 2; // no escape begins at the second one
    }
    return KVB_OK;
}

static int compare_keys(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

// Sets *twice to a key that one object of the tree has twice, if there is one. cJSON limits how deep a tree can be.
static kvb_status find_twice(const cJSON *tree, const char **twice)
{
    size_t n = 0;
    const cJSON *item;
    kvb_status status = KVB_OK;
    cJSON_ArrayForEach(item, tree)
    {
        if (item->child && !status && !*twice) status = find_twice(item, twice);
        ++n;
    }
    if (status || *twice || !cJSON_IsObject(tree) || n < 2) return status;
    const char **keys = malloc(n * sizeof *keys);
    if (!keys) return KVB_MEMORY;
    n = 0;
    cJSON_ArrayForEach(item, tree) keys[n++] = item->string;
    qsort(keys, n, sizeof *keys, compare_keys);
    for (size_t i = 1; i < n && !*twice; i++)
        if (strcmp(keys[i - 1], keys[i]) == 0) *twice = keys[i];
    free(keys);
    return KVB_OK;
}

// cJSON reads numbers with strtod(), whose decimal point depends on the host program's locale. Its own workaround only
// handles points of one byte. uselocale() affects this thread alone.
cJSON *kvb_json_parse(const char *text, size_t size, const char **end, bool *no_memory)
{
    int before_errno = errno;
    errno = 0;
#ifdef LC_ALL_MASK
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0), before = plain ? uselocale(plain) : (locale_t)0;
#endif
    cJSON *tree = cJSON_ParseWithLengthOpts(text, size, end, 0);
    if (no_memory) *no_memory = !tree && errno == ENOMEM;
#ifdef LC_ALL_MASK
    if (plain) uselocale(before);
    if (plain) freelocale(plain);
#endif
    errno = before_errno;
    return tree;
}

kvb_status kvb_json_object(cJSON **out, const char *text, size_t size, const char *name, const char *place,
                           kvb_error *err)
{
    const char *end = text, *twice = NULL;
    bool no_memory = false;
    kvb_status status = check_text(text, size, name, place, err);
    *out = NULL;
    if (status) return status;
    cJSON *tree = kvb_json_parse(text, size, &end, &no_memory);
    if (no_memory) return kvb_fail(err, KVB_MEMORY, "%s: %s: not enough memory", name, place);
    while (tree && end < text + size && strchr(" \t\r\n", *end)) ++end;
    if (!cJSON_IsObject(tree) || end < text + size) {
        status = kvb_fail(err, KVB_FORMAT,
                          "%s: %s: expected a JSON object of %zu bytes, found something else at byte %zu; the file is "
                          "damaged",
                          name, place, size, cJSON_IsObject(tree) || !tree ? (size_t)(end - text) : 0);
    }
    if (!status && find_twice(tree, &twice))
        status = kvb_fail(err, KVB_MEMORY, "%s: %s: not enough memory", name, place);
    if (!status && twice) status = kvb_fail(err, KVB_FORMAT, "%s: %s: \"%.64s\" occurs twice", name, place, twice);
    if (status) cJSON_Delete(tree);
    else *out = tree;
    return status;
}
