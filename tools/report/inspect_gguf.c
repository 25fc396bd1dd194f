// What is in a model file: its metadata, with long texts and arrays cut short, and its tensors.
#include "tools/report/inspect_gguf.h"
#include "formats/need.h"
#include "profiler/text/utf8.h"
#include "profiler/weights/gguf.h"
#include "tools/json_print.h"
#include <cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_SHOWN = 100, ELEMENTS_SHOWN = 8 };

// A number of any type as it would stand in JSON; NaN and infinity have no JSON form and become null.
static void format_number(char out[40], gguf_value_type type, const unsigned char *p)
{
    gguf_array one = {type, 1, p, 0};
    if (type == GGUF_VALUE_F32 || type == GGUF_VALUE_F64) {
        float narrow;
        double wide;
        memcpy(&narrow, p, sizeof narrow);
        if (type == GGUF_VALUE_F64) memcpy(&wide, p, sizeof wide);
        else wide = (double)narrow;
        if (isfinite(wide)) snprintf(out, 40, type == GGUF_VALUE_F32 ? "%.9g" : "%.17g", wide);
        else strcpy(out, "null");
    } else if (type == GGUF_VALUE_BOOL) {
        strcpy(out, *p ? "true" : "false");
    } else if (type == GGUF_VALUE_U64) {
        uint64_t n = 0;
        memcpy(&n, p, sizeof n);
        snprintf(out, 40, "%llu", (unsigned long long)n);
    } else {
        snprintf(out, 40, "%lld", (long long)gguf_array_int(&one, 0));
    }
}

static size_t number_size(gguf_value_type type)
{
    static const size_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return sizes[type];
}

// Valid UTF-8 without NUL bytes, at most `max` bytes of it (0: all). The caller frees.
static char *clean_text(gguf_string s, size_t max)
{
    size_t size = max && s.size > max ? max : s.size, n;
    while (size < s.size && size > 0 && ((unsigned char)s.data[size] & 0xc0) == 0x80)
        size--; // not inside of a character
    const char *repaired;
    char *owned = NULL;
    utf8_repair(s.data, size, &repaired, &n, &owned);
    char *text = need(n + 1, 1, "characters");
    for (size_t i = 0; i < n; i++) text[i] = (char)(repaired[i] ? repaired[i] : ' ');
    free(owned);
    return text;
}

// ---- as text ----

// One line whatever the text holds: a terminal must not obey control characters of a file.
static void print_text(gguf_string s)
{
    char *text = clean_text(s, TEXT_SHOWN);
    putchar('"');
    for (const char *p = text; *p; p++) {
        unsigned char c = (unsigned char)*p;
        if (c == '\n') printf("\\n");
        else if (c == '\t') printf("\\t");
        else if (c == '"' || c == '\\') printf("\\%c", c);
        else if (c < 0x20 || c == 0x7f) printf("\\x%02x", c);
        else if (c == 0xc2 && (unsigned char)p[1] < 0xa0) printf("\\u%04x", (unsigned char)*++p); // U+0080 to U+009f
        else putchar(c);
    }
    if (s.size > TEXT_SHOWN) printf("...\" (%zu bytes)", s.size);
    else putchar('"');
    free(text);
}

static void print_array(const gguf_value *v)
{
    gguf_array rest = {v->element, v->count, v->data, v->size};
    gguf_string s;
    printf("[");
    for (uint64_t i = 0; i < v->count && i < ELEMENTS_SHOWN && v->element != GGUF_VALUE_ARRAY; i++) {
        if (i) printf(", ");
        if (gguf_next_string(&rest, &s)) {
            print_text(s);
        } else {
            char number[40];
            format_number(number, v->element, v->data + i * number_size(v->element));
            printf("%s", number);
        }
    }
    const char *rest_shown = v->element == GGUF_VALUE_ARRAY ? "..." : v->count > ELEMENTS_SHOWN ? ", ..." : "";
    printf("%s] (%llu %s)", rest_shown, (unsigned long long)v->count, gguf_value_type_name(v->element));
}

static void print_metadata(const gguf_file *f)
{
    printf("metadata (%zu)\n", f->n_values);
    for (size_t i = 0; i < f->n_values; i++) {
        const gguf_value *v = &f->values[i];
        printf("  %-42.*s ", (int)v->key.size, v->key.data);
        if (v->type == GGUF_VALUE_STRING) {
            print_text((gguf_string){(const char *)v->data, v->size});
        } else if (v->type == GGUF_VALUE_ARRAY) {
            print_array(v);
        } else {
            char number[40];
            format_number(number, v->type, v->data);
            printf("%s", number);
        }
        printf("\n");
    }
}

static void print_tensors(const gguf_file *f)
{
    printf("tensors (%zu); shapes as rows x columns\n", f->n_tensors);
    for (size_t i = 0; i < f->n_tensors; i++) {
        const gguf_tensor *t = &f->tensors[i];
        printf("  %-42.*s %-6s ", (int)t->name.size, t->name.data, gguf_tensor_type_name(t->type));
        for (uint32_t d = t->n_dims; d-- > 0;) printf("%llu%s", (unsigned long long)t->dims[d], d ? " x " : "");
        printf("%s\n", t->data ? "" : "   (kvbudget cannot read this type)");
    }
}

// Returns whether every tensor is of a known type, so that the bytes are all there are.
static bool sum_tensors(const gguf_file *f, double *values, uint64_t *bytes)
{
    bool readable = true;
    *values = 0;
    *bytes = 0;
    for (size_t i = 0; i < f->n_tensors; i++) {
        *values += (double)f->tensors[i]
                       .n_values; // shapes of unreadable types are not bounded by the file: a sum of u64 could wrap
        *bytes += f->tensors[i].size;
        readable &= f->tensors[i].data != NULL;
    }
    return readable;
}

static void print_all(const gguf_file *f)
{
    double values;
    uint64_t bytes;
    bool readable = sum_tensors(f, &values, &bytes);
    printf("GGUF version %u, alignment %u\n", f->version, f->alignment);
    print_metadata(f);
    print_tensors(f);
    printf("total: %.0f values in %llu bytes", values, (unsigned long long)bytes);
    if (readable && f->n_tensors) printf(", %.2f bits per value", 8 * (double)bytes / values);
    printf("\n");
}

// ---- as JSON ----

static cJSON *text_item(gguf_string s)
{
    char *text = clean_text(s, 0);
    cJSON *item = cJSON_CreateString(text);
    free(text);
    return item;
}

static cJSON *number_item(gguf_value_type type, const unsigned char *p)
{
    char number[40];
    format_number(number, type, p);
    return cJSON_CreateRaw(number);
}

static cJSON *array_item(const gguf_value *v)
{
    gguf_array rest = {v->element, v->count, v->data, v->size};
    gguf_string s;
    cJSON *item = cJSON_CreateObject(), *first;
    cJSON_AddStringToObject(item, "element", gguf_value_type_name(v->element));
    cJSON_AddNumberToObject(item, "count", (double)v->count);
    first = cJSON_AddArrayToObject(item, "first");
    for (uint64_t i = 0; i < v->count && i < ELEMENTS_SHOWN && v->element != GGUF_VALUE_ARRAY; i++)
        cJSON_AddItemToArray(first, gguf_next_string(&rest, &s)
                                        ? text_item(s)
                                        : number_item(v->element, v->data + i * number_size(v->element)));
    return item;
}

static cJSON *tensor_item(const gguf_tensor *t)
{
    cJSON *item = cJSON_CreateObject(), *shape;
    cJSON_AddItemToObject(item, "name", text_item(t->name));
    cJSON_AddStringToObject(item, "type", gguf_tensor_type_name(t->type));
    shape = cJSON_AddArrayToObject(item, "shape");
    for (uint32_t d = t->n_dims; d-- > 0;) cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)t->dims[d]));
    cJSON_AddNumberToObject(item, "bytes", (double)t->size);
    cJSON_AddBoolToObject(item, "readable", t->data != NULL);
    return item;
}

static void print_json(const gguf_file *f)
{
    double values;
    uint64_t bytes;
    (void)sum_tensors(f, &values, &bytes);
    cJSON *root = cJSON_CreateObject(), *metadata, *tensors;
    cJSON_AddStringToObject(root, "format", "gguf");
    cJSON_AddNumberToObject(root, "version", f->version);
    cJSON_AddNumberToObject(root, "alignment", f->alignment);
    cJSON_AddNumberToObject(root, "n_values", values);
    cJSON_AddNumberToObject(root, "n_bytes", (double)bytes);
    metadata = cJSON_AddObjectToObject(root, "metadata");
    for (size_t i = 0; i < f->n_values; i++) {
        const gguf_value *v = &f->values[i];
        char *key = clean_text(v->key, 0);
        cJSON_AddItemToObject(metadata, key,
                              v->type == GGUF_VALUE_STRING  ? text_item((gguf_string){(const char *)v->data, v->size})
                              : v->type == GGUF_VALUE_ARRAY ? array_item(v)
                                                            : number_item(v->type, v->data));
        free(key);
    }
    tensors = cJSON_AddArrayToObject(root, "tensors");
    for (size_t i = 0; i < f->n_tensors; i++) cJSON_AddItemToArray(tensors, tensor_item(&f->tensors[i]));
    json_print(root);
    cJSON_Delete(root);
}

int inspect_gguf(const char *path, bool json, kvb_error *err)
{
    gguf_file f;
    kvb_status status = gguf_open(&f, path, err);
    if (status != KVB_OK) return status;
    json ? print_json(&f) : print_all(&f);
    status = file_check(&f.map, path, err);
    gguf_close(&f);
    return status;
}
