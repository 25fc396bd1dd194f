// Tables for the runtime's tests, made byte by byte here, so that the reader is not tested against our own writer.
#pragma once
#include "unit.h"

enum { CASE_ROWS = 99, CASE_HEADER_MAX = 8192 };

// What differs between the tables of the tests; see case_default().
typedef struct table_case {
    uint32_t n_layers, n_kv_heads;
    uint32_t sink, window;
    const char *calibration_tokens;
    const double *prune_ratio;       // [99, L, G], or NULL for row ratios in every head
    const char *edit_from, *edit_to; // text of the header to replace, or NULL
    uint32_t saturated_row;          // 1-based; 0: none
} table_case;

static inline table_case case_default(void)
{
    return (table_case){3, 2, 4, 1, "1600,4125", NULL, NULL, NULL, 0};
}

// Order of the tensors in the data part.
static const char *const case_tensors[] = {
    "prune_ratio", "ratio", "std", "loss", "lower_bound", "lambda", "table_loss", "effective_ratio", "saturated"};

static inline int case_is_3d(size_t tensor)
{
    return tensor == 0 || tensor == 2;
}

// Offset of a tensor in the data part; tensor 9 is the end.
static inline size_t case_offset(const table_case *c, size_t tensor)
{
    size_t heads = (size_t)c->n_layers * c->n_kv_heads, offset = 0;
    for (size_t i = 0; i < tensor; ++i) offset += i == 8 ? CASE_ROWS : CASE_ROWS * 8 * (case_is_3d(i) ? heads : 1);
    return offset;
}

static inline void case_replace(char *text, const char *old, const char *to)
{
    char *at = strstr(text, old);
    ck_assert_msg(at, "test error: the header does not contain %s", old);
    size_t rest = strlen(at + strlen(old)) + 1;
    ck_assert_uint_lt(strlen(text) + strlen(to), CASE_HEADER_MAX);
    memmove(at + strlen(to), at + strlen(old), rest);
    memcpy(at, to, strlen(to));
}

static inline void case_header(const table_case *c, char *text)
{
    int n = snprintf(
        text, CASE_HEADER_MAX,
        "{\"__metadata__\":{\"format\":\"kvbudget-table\",\"format_version\":\"1\",\"tool_version\":\"0.1.0\","
        "\"architecture\":\"llama\",\"model_id\":\"tiny\",\"model_sha256\":\"%064d\",\"tokenizer_sha256\":\"\","
        "\"n_layers\":\"%u\",\"n_heads\":\"%u\",\"n_kv_heads\":\"%u\",\"head_dim\":\"64\",\"metric\":\"snapkv:"
        "kvpress\","
        "\"metric_parameters\":\"{\\\"window\\\":64,\\\"kernel\\\":5,\\\"pool\\\":\\\"avg\\\"}\",\"sink\":\"%u\","
        "\"window\":\"%u\",\"scope\":\"global\",\"aggregate\":\"mean_ratio\",\"hull\":\"feasible\",\"max_prune\":\"0."
        "99\","
        "\"calibration_tokens\":\"%s\",\"n_contexts\":\"2\",\"n_questions\":\"30\",\"n_queries\":\"12,63\","
        "\"calibration_sha256\":\"\",\"record_sha256\":\"\",\"note\":\"unknown keys are kept\"}",
        7, c->n_layers, 3 * c->n_kv_heads, c->n_kv_heads, c->sink, c->window, c->calibration_tokens);
    for (size_t i = 0; i < 9; ++i) {
        char more[64] = "";
        if (case_is_3d(i)) snprintf(more, sizeof more, ",%u,%u", c->n_layers, c->n_kv_heads);
        n += snprintf(text + n, (size_t)(CASE_HEADER_MAX - n),
                      ",\"%s\":{\"dtype\":\"%s\",\"shape\":[99%s],\"data_offsets\":[%zu,%zu]}", case_tensors[i],
                      i == 8 ? "U8" : "F64", more, case_offset(c, i), case_offset(c, i + 1));
    }
    n += snprintf(text + n, (size_t)(CASE_HEADER_MAX - n), "}");
    ck_assert_int_lt(n, CASE_HEADER_MAX);
    if (c->edit_from) case_replace(text, c->edit_from, c->edit_to);
    while (strlen(text) % 8) strcat(text, " ");
}

static inline void case_put(unsigned char *at, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    for (int i = 0; i < 8; ++i) at[i] = (unsigned char)(bits >> 8 * i);
}

// Returns the whole file, which the caller frees. `data` (may be NULL) receives the offset of the data part.
static inline unsigned char *case_bytes(const table_case *c, size_t *size, size_t *data)
{
    char header[CASE_HEADER_MAX + 8];
    case_header(c, header);
    size_t header_size = strlen(header), start = 8 + header_size, heads = (size_t)c->n_layers * c->n_kv_heads;
    *size = start + case_offset(c, 9);
    unsigned char *bytes = malloc(*size);
    ck_assert_ptr_nonnull(bytes);
    memset(bytes, 0, 8);
    bytes[0] = (unsigned char)header_size;
    bytes[1] = (unsigned char)(header_size >> 8);
    memcpy(bytes + 8, header, header_size);
    for (size_t t = 0; t < 8; ++t) {
        unsigned char *at = bytes + start + case_offset(c, t);
        size_t columns = case_is_3d(t) ? heads : 1;
        for (size_t i = 0; i < CASE_ROWS * columns; ++i, at += 8) {
            double row = (double)(i / columns + 1) / 100;
            case_put(at, t == 0 && c->prune_ratio        ? c->prune_ratio[i]
                         : t == 0 || t == 1 || t == 7    ? row
                         : t == 5 /* lambda falls */     ? 1 - row
                         : t == 4 /* bound below loss */ ? row * 0.9
                                                         : row);
        }
    }
    unsigned char *saturated = bytes + start + case_offset(c, 8);
    memset(saturated, 0, CASE_ROWS);
    if (c->saturated_row) saturated[c->saturated_row - 1] = 1;
    if (data) *data = start;
    return bytes;
}

static inline kvb_table *case_open(const table_case *c)
{
    kvb_error err;
    kvb_table *table = NULL;
    size_t size;
    unsigned char *bytes = case_bytes(c, &size, NULL);
    kvb_status status = kvb_table_open_memory(&table, bytes, size, "case", NULL, &err);
    ck_assert_msg(status == KVB_OK, "%s", status ? err.message : "");
    free(bytes);
    return table;
}

// Returns the seed, and prints it, so that a failure can be repeated with KVB_SEED=...
static inline uint64_t case_seed(const char *test)
{
    const char *given = getenv("KVB_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : 20260101;
    printf("%s: KVB_SEED=%llu\n", test, (unsigned long long)seed);
    return seed;
}

static inline uint64_t case_random(uint64_t *state) // splitmix64
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline double case_uniform(uint64_t *state)
{
    return (double)(case_random(state) >> 11) / 9007199254740992.0;
}
