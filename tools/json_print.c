#include "tools/json_print.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool ran_out;

static void *watched_malloc(size_t size)
{
    void *p = malloc(size);
    ran_out |= !p;
    return p;
}

void *json_calloc(size_t n, size_t size)
{
    void *p = calloc(n, size);
    ran_out |= !p;
    return p;
}

void json_lacks_memory(void)
{
    ran_out = true;
}

void json_watch_memory(void)
{
    cJSON_Hooks hooks = {watched_malloc, free};
    cJSON_InitHooks(&hooks);
}

bool json_ran_out(void)
{
    return ran_out;
}

// cJSON escapes what JSON must not hold, but knows nothing of UTF-8.
static void make_utf8(char *text)
{
    for (size_t left = strlen(text), size; left > 0; text += size, left -= size) {
        size = kvb_utf8_size(text, left);
        if (size == 0) *text = '?';
        if (size == 0) size = 1;
    }
}

char *json_text(const cJSON *document, kvb_error *err)
{
    char *text = document ? cJSON_Print(document) : NULL;
    if (text && !ran_out) {
        make_utf8(text);
        return text;
    }
    cJSON_free(text);
    (void)kvb_fail(err, KVB_MEMORY, "not enough memory for the JSON text");
    return NULL;
}

kvb_status json_print(const cJSON *document, kvb_error *err)
{
    char *text = json_text(document, err);
    if (!text) return KVB_MEMORY;
    puts(text);
    cJSON_free(text);
    return KVB_OK;
}
