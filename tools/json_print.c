#include "tools/json_print.h"
#include "formats/need.h"
#include "runtime/text.h"
#include <math.h>
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

// cJSON escapes what JSON must not hold, but knows nothing of UTF-8.
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

// ---- As text for people --------------------------------------------------------------------------------------------

static void print_number(double x)
{
    if (fabs(x) < 1e15 && x == floor(x)) printf("%.0f", x);
    else printf("%.6g", x);
}

static void print_value(const cJSON *value)
{
    if (cJSON_IsNumber(value)) {
        print_number(value->valuedouble);
    } else if (cJSON_IsBool(value)) {
        fputs(cJSON_IsTrue(value) ? "yes" : "no", stdout);
    } else if (cJSON_IsString(value)) { // quoted and escaped: a file may hold anything, a terminal should not get it
        char *text = cJSON_PrintUnformatted(value);
        size_t size = strlen(text), shown = size < TEXT_SHOWN ? size : TEXT_SHOWN;
        kvb_clean_text(text); // a line of ASCII as far as cJSON goes; not so DEL and U+0080 to U+009F
        while (shown < size && ((unsigned char)text[shown] & 0xc0) == 0x80) shown--; // not inside of a character
        printf("%.*s", (int)shown, text);
        if (shown < size) printf("...\" (%zu bytes)", strlen(value->valuestring));
        free(text);
    } else { // a list of plain values
        const cJSON *item;
        fputs("[", stdout);
        cJSON_ArrayForEach(item, value)
        {
            print_value(item);
            if (item->next) fputs(", ", stdout);
        }
        fputs("]", stdout);
    }
}

static bool is_plain(const cJSON *value)
{
    return !cJSON_IsObject(value) && !(cJSON_IsArray(value) && cJSON_IsObject(value->child));
}

// An object as lines "name: value", a list of objects with one line for the plain values of each.
static void print_document(const cJSON *object, int indent)
{
    const cJSON *item, *entry, *field;
    cJSON_ArrayForEach(item, object)
    {
        kvb_clean_text(item->string);
        printf("%*s%s:", indent, "", item->string);
        if (is_plain(item)) {
            putchar(' ');
            print_value(item);
            putchar('\n');
            continue;
        }
        putchar('\n');
        if (cJSON_IsObject(item)) {
            print_document(item, indent + 2);
            continue;
        }
        cJSON_ArrayForEach(entry, item)
        {
            printf("%*s-", indent + 2, "");
            cJSON_ArrayForEach(field, entry)
            {
                if (!is_plain(field)) continue;
                printf(" %s ", field->string);
                print_value(field);
            }
            putchar('\n');
            cJSON_ArrayForEach(field, entry)
            {
                if (is_plain(field)) continue;
                cJSON *inner = cJSON_CreateObject();
                cJSON_AddItemReferenceToObject(inner, field->string,
                                               cJSON_GetObjectItemCaseSensitive(entry, field->string));
                print_document(inner, indent + 4);
                cJSON_Delete(inner);
            }
        }
    }
}

void document_print(const cJSON *document)
{
    print_document(document, 0);
}
