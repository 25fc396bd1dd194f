#include "tools/json_print.h"
#include "formats/need.h"
#include "runtime/text.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *json_malloc(size_t size)
{
    return need(size, 1, "bytes of JSON");
}

void json_needs_memory(void)
{
    cJSON_InitHooks(&(cJSON_Hooks){json_malloc, free});
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

char *json_text(const cJSON *document)
{
    char *text = needed(cJSON_Print(document), "JSON text");
    make_utf8(text);
    return text;
}

void json_print(const cJSON *document)
{
    char *text = json_text(document);
    puts(text);
    cJSON_free(text);
}
