#include "tools/json_print.h"
#include "formats/need.h"
#include "runtime/text.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_SHOWN = 1000 };

static void *json_malloc(size_t size)
{
    return need(size, 1, "bytes of JSON");
}

void json_needs_memory(void)
{
    cJSON_InitHooks(&(cJSON_Hooks){json_malloc, free});
}

// Replaces bytes that are not UTF-8, which cJSON does not check.
static void make_utf8(char *text)
{
    for (size_t left = strlen(text), size; left > 0; text += size, left -= size) {
        size = kvb_utf8_size(text, left);
        if (size == 0) *text = '?';
        if (size == 0) size = 1;
    }
}

char *json_to_text(const cJSON *document)
{
    char *text = needed(cJSON_Print(document), "JSON text");
    make_utf8(text);
    return text;
}

void json_print(const cJSON *document)
{
    char *text = json_to_text(document);
    puts(text);
    cJSON_free(text);
}

static bool is_plain(const cJSON *value)
{
    return !cJSON_IsObject(value) && !(cJSON_IsArray(value) && cJSON_IsObject(value->child));
}

// Prints a value as JSON, cut if it is long, without control characters that a file may hold.
static void print_value(const cJSON *value)
{
    if (cJSON_IsNumber(value)) {
        printf(" %.10g", value->valuedouble);
        return;
    }
    char *text = cJSON_PrintUnformatted(value);
    size_t size = strlen(text), shown = size < TEXT_SHOWN ? size : TEXT_SHOWN;
    kvb_clean_text(text); // cJSON escapes ASCII's control characters, but not DEL and U+0080 to U+009F
    while (shown < size && ((unsigned char)text[shown] & 0xc0) == 0x80) shown--; // do not cut inside a character
    printf(" %.*s", (int)shown, text);
    if (shown < size) printf("... (%zu bytes)", size);
    cJSON_free(text);
}

// Prints a line for each plain value, or one line for all of a list's entry; then inner objects and lists, indented.
static void print_document(const cJSON *object, int indent, bool entry)
{
    const cJSON *item, *inner;
    for (item = object->child; entry && item; item = item->next)
        if (is_plain(item)) {
            printf(" %s", item->string);
            print_value(item);
        }
    if (entry) putchar('\n');
    cJSON_ArrayForEach(item, object)
    {
        if (is_plain(item) && entry) continue;
        kvb_clean_text(item->string);
        printf("%*s%s:", indent, "", item->string);
        if (is_plain(item)) print_value(item);
        putchar('\n');
        if (cJSON_IsObject(item)) print_document(item, indent + 2, false);
        for (inner = is_plain(item) || cJSON_IsObject(item) ? NULL : item->child; inner; inner = inner->next) {
            printf("%*s-", indent + 2, "");
            print_document(inner, indent + 4, true);
        }
    }
}

void document_print(const cJSON *document)
{
    print_document(document, 0, false);
}
