// Cases of golden data for tokenizers: {"hex": text, "ids": [...]}.
#pragma once
#include "profiler/text/tokenizer.h"
#include "unit.h"
#include <cjson/cJSON.h>

// Turns hexadecimal digits into bytes, which the caller frees; returns how many.
static inline size_t from_hex(const char *hex, char **out)
{
    size_t n = strlen(hex) / 2;
    *out = malloc(n + 1);
    ck_assert_ptr_nonnull(*out);
    for (size_t i = 0; i < n; i++) {
        char digits[3] = {hex[2 * i], hex[2 * i + 1], 0};
        (*out)[i] = (char)strtol(digits, NULL, 16);
    }
    return n;
}

// Checks that a case's text becomes its ids. `kind` is for messages; with `special`, control tokens are recognized.
static inline void check_case(const char *kind, const tokenizer *t, const cJSON *c, bool special)
{
    const char *hex = cJSON_GetObjectItem(c, "hex")->valuestring;
    const cJSON *expected = cJSON_GetObjectItem(c, "ids");
    char *text;
    int32_t *ids;
    size_t size = from_hex(hex, &text), n;
    help_ok(tokenizer_encode(t, text, size, special, &ids, &n, err));
    ck_assert_msg(n == (size_t)cJSON_GetArraySize(expected), "%s: %s: expected %d ids, got %zu", kind, hex,
                  cJSON_GetArraySize(expected), n);
    const cJSON *id = expected->child;
    for (size_t i = 0; i < n; i++, id = id->next)
        ck_assert_msg(ids[i] == id->valueint, "%s: %s: id %zu: expected %d, got %d", kind, hex, i, id->valueint,
                      ids[i]);
    free(ids);
    free(text);
}

// Checks that a text becomes these ids; with `special`, control tokens are recognized.
static inline void expect_ids(const tokenizer *t, const char *text, bool special, const int32_t *expected,
                              size_t n_expected)
{
    int32_t *ids;
    size_t n;
    help_ok(tokenizer_encode(t, text, strlen(text), special, &ids, &n, err));
    ck_assert_msg(n == n_expected, "%s: expected %zu ids, got %zu", text, n_expected, n);
    for (size_t i = 0; i < n; i++) ck_assert_msg(ids[i] == expected[i], "%s: id %zu is %d", text, i, ids[i]);
    free(ids);
}
#define EXPECT_IDS(t, text, special, ...)                        \
    expect_ids(t, text, special, (const int32_t[]){__VA_ARGS__}, \
               sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))
