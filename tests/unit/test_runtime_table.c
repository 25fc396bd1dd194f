// Reading tables: what a good one says, and that no damaged one gets through.
#include "folder_help.h"
#include "test_runtime_cases.h"
#include <locale.h>

UNIT_TEST(test_names)
{
    unit_strings(kvb_status_name(KVB_OK), "OK", kvb_status_name(KVB_MISMATCH), "MISMATCH",
                 kvb_status_name(KVB_INTERRUPTED), "INTERRUPTED", kvb_status_name((kvb_status)(KVB_INTERRUPTED + 1)),
                 "UNKNOWN");
    ck_assert_str_eq(kvb_status_name((kvb_status)-1), "UNKNOWN");
    ck_assert_ptr_nonnull(strchr(kvb_version(), '.'));
    ck_assert_uint_eq(kvb_budgets_version(), KVB_BUDGETS_VERSION);
}

UNIT_TEST(test_info)
{
    table_case c = case_default();
    c.saturated_row = 99;
    kvb_table *t = case_open(&c);
    const kvb_info *info = kvb_table_info(t);
    unit_numbers(info->n_rows, 99, info->n_layers, 3, info->n_heads, 6, info->n_kv_heads, 2, info->head_dim, 64,
                 info->sink, 4, info->window, 1);
    unit_strings(info->metric, "snapkv:kvpress", info->metric_parameters,
                 "{\"window\":64,\"kernel\":5,\"pool\":\"avg\"}", info->model_sha256,
                 "0000000000000000000000000000000000000000000000000000000000000007", info->tokenizer_sha256, "");
    ck_assert_str_eq(info->scope, "global");
    ck_assert(info->max_prune == 0.99);
    unit_numbers(info->n_calibration_tokens, 2, info->calibration_tokens[1], 4125, info->n_queries_min, 12,
                 info->n_queries_max, 63);
    ck_assert_str_eq(kvb_table_metadata(t, "note"), "unknown keys are kept");
    ck_assert(!kvb_table_metadata(t, "Note") && !kvb_table_metadata(t, NULL));
    ck_assert(kvb_table_prune_ratios(t)[6 * 49 + 5] == 0.5);

    kvb_row row;
    help_ok(kvb_table_row(t, 98, &row, err));
    ck_assert(row.ratio == 0.99 && row.effective_ratio == 0.99 && row.loss == 0.99 && row.lambda == 1 - 0.99);
    ck_assert(row.lower_bound == 0.99 * 0.9 && row.table_loss == 0.99);
    ck_assert(row.saturated && row.prune_ratio[5] == 0.99 && row.std[0] == 0.99);
    help_fails(kvb_table_row(t, 99, &row, err), KVB_ARGUMENT, "case");
    ck_assert_int_eq(kvb_table_row(NULL, 0, &row, NULL), KVB_ARGUMENT);
    ck_assert(!kvb_table_info(NULL) && !kvb_table_prune_ratios(NULL));
    kvb_table_close(t);
    kvb_table_close(NULL);
}

#define BOUNDED(layers) "\"bounded_layers\":\"" layers "\",\"note\""

// An edit of the header, the status that it must lead to, and a part of the message.
static const struct {
    const char *from, *to;
    kvb_status status;
    const char *message;
} edits[] = {
    {"kvbudget-table", "other", KVB_FORMAT, "\"format\""},
    {"\"format\":", "\"formal\":", KVB_FORMAT, "found nothing"},
    {"\"format_version\":\"1\"", "\"format_version\":\"3\"", KVB_VERSION, "newer kvbudget"},
    {"\"format_version\":\"1\"", "\"format_version\":\"2\"", KVB_FORMAT, "tensor \"formats\" is missing"},
    {"\"n_layers\":\"3\"", "\"n_layers\":\"4\"", KVB_FORMAT, "\"prune_ratio\": dimension 1: expected 4"},
    {"\"n_layers\":\"3\"", "\"n_layers\":\"-3\"", KVB_FORMAT, "\"n_layers\""},
    {"\"n_layers\":\"3\"", "\"n_layers\":\"0\"", KVB_FORMAT, "\"n_layers\""},
    {"\"n_layers\":\"3\"", "\"n_layers\":\"4294967299\"", KVB_FORMAT, "\"n_layers\""},
    {"\"n_layers\":\"3\"", "\"n_layers\":\" 3\"", KVB_FORMAT, "\"n_layers\""},
    {"\"n_layers\":\"3\"", "\"n_layers\":3", KVB_FORMAT, "metadata \"n_layers\": expected a string"},
    {"\"n_layers\":\"3\",", "", KVB_FORMAT, "\"n_layers\" is missing"},
    {"\"n_kv_heads\":\"2\"", "\"n_kv_heads\":\"4\"", KVB_FORMAT, "multiple of n_kv_heads"},
    {"\"n_kv_heads\":\"2\"", "\"n_kv_heads\":\"3\"", KVB_FORMAT, "dimension 2"},
    {"\"n_heads\":\"6\",\"n_kv_heads\":\"2\"", "\"n_heads\":\"1025\",\"n_kv_heads\":\"1025\"", KVB_UNSUPPORTED, "1024"},
    {"\"head_dim\":\"64\"", "\"head_dim\":\"64x\"", KVB_FORMAT, "\"head_dim\""},
    {"\"sink\":\"4\"", "\"sink\":\"\"", KVB_FORMAT, "\"sink\""},
    {"\"metric\":\"snapkv:kvpress\"", "\"metric\":\"\"", KVB_FORMAT, "\"metric\""},
    {"\\\"window\\\":64", "window", KVB_FORMAT, "\"metric_parameters\""},
    {"\"tokenizer_sha256\":\"\"", "\"tokenizer_sha256\":\"abc\"", KVB_FORMAT, "\"tokenizer_sha256\""},
    {"0.99\"", "1.01\"", KVB_FORMAT, "\"max_prune\""},
    {"0.99\"", "nan\"", KVB_FORMAT, "\"max_prune\""},
    {"0.99\"", "0,99\"", KVB_FORMAT, "\"max_prune\""},
    {"1600,4125", "", KVB_FORMAT, "\"calibration_tokens\""},
    {"1600,4125", "1600,,4125", KVB_FORMAT, "\"calibration_tokens\""},
    {"1600,4125", "1600,0", KVB_FORMAT, "\"calibration_tokens\""},
    {"1600,4125", "1600,4125,", KVB_FORMAT, "\"calibration_tokens\""},
    {"12,63", "63", KVB_FORMAT, "\"n_queries\""},
    {"12,63", "63,12", KVB_FORMAT, "\"n_queries\""},
    {"12,63", "1,2,3", KVB_FORMAT, "\"n_queries\""},
    {"\"note\":", "\"sink\":", KVB_FORMAT, "\"sink\" occurs twice"},
    {"\"std\":", "\"ratio\":", KVB_FORMAT, "header: \"ratio\" occurs twice"},
    {"\"std\":", "\"stg\":", KVB_FORMAT, "tensor \"std\" is missing"},
    {"\"U8\"", "\"I8\"", KVB_FORMAT, "\"saturated\": expected dtype U8"},
    {"\"U8\"", "\"U4\"", KVB_UNSUPPORTED, "unknown dtype"},
    {"\"U8\"", "8", KVB_FORMAT, "\"saturated\""},
    {"\"F64\"", "\"F32\"", KVB_FORMAT, "\"prune_ratio\": dtype F32 and shape"},
    {"[99,3,2]", "[99,2,3]", KVB_FORMAT, "dimension 1: expected 3"},
    {"[99,3,2]", "[99,6]", KVB_FORMAT, "expected 3 dimensions, found 2"},
    {"[99,3,2]", "[99,3,-2]", KVB_FORMAT, "shape[2]"},
    {"[99,3,2]", "[99,3,2.5]", KVB_FORMAT, "shape[2]"},
    {"[99,3,2]", "[4294967296,4294967296,2]", KVB_FORMAT, "do not fit"},
    {"[99,3,2]", "[9007199254740992,9007199254740992,0]", KVB_FORMAT, "do not fit"},
    {"[99,3,2]", "[1,1,1,1,1,1,99,3,2]", KVB_UNSUPPORTED, "8 dimensions"},
    {"[99,3,2]", "{}", KVB_FORMAT, "\"shape\""},
    {"[0,4752]", "[8,4760]", KVB_FORMAT, "belong to no tensor"},
    {"[4752,5544]", "[4744,5536]", KVB_FORMAT, "overlap"},
    {"[4752,5544]", "[5544,4752]", KVB_FORMAT, "begin <= end"},
    {"[4752,5544]", "[4752,1e300]", KVB_FORMAT, "begin <= end"},
    {"[4752,5544]", "[4752,5544,1]", KVB_FORMAT, "data_offsets"},
    {"\"__metadata__\":{", "\"__metadata__\":[],\"x\":{", KVB_FORMAT, "__metadata__"},
    {",\"ratio\":{", ",\"__metadata__\":{}, \"ratio\":{", KVB_FORMAT, "twice"},
    {",\"ratio\":{", ",\"ratio\"={", KVB_FORMAT, "JSON object"},
    {"unknown keys", "unknown\\u0000keys", KVB_FORMAT, "NUL"},
    {"unknown keys", "unknown \xff keys", KVB_FORMAT, "expected UTF-8, found 0xff"},
    {"\"dtype\":", "\"dtype\":\"F64\",\"dtype\":", KVB_FORMAT, "\"dtype\" occurs twice"},
    {"\\\"kernel\\\"", "\\\"window\\\"", KVB_FORMAT, "\"metric_parameters\": \"window\" occurs twice"},
    {"\\\"avg\\\"", "\\\"\\\\u0000\\\"", KVB_FORMAT, "\"metric_parameters\": byte 32: found a NUL"},
    {"snapkv:", "snap\\u001b[2Jkv:", KVB_FORMAT, "\"metric\": expected printable characters"},
    {"\"note\"", BOUNDED("3"), KVB_FORMAT, "bounded"},
    {"\"note\"", BOUNDED("1,1"), KVB_FORMAT, "bounded"},
    {"\"note\"", BOUNDED("2,0"), KVB_FORMAT, "bounded"},
    {"\"note\"", BOUNDED("0,1,2"), KVB_FORMAT, "bounded"},
    {"\"note\"", BOUNDED("1,"), KVB_FORMAT, "bounded"},
    {"\"note\"", BOUNDED(""), KVB_FORMAT, "bounded"},
    {"\"note\"", BOUNDED("x"), KVB_FORMAT, "bounded"},
    {"\"note\"", BOUNDED("0"), KVB_FORMAT, "bounded"}, // its ratios are not 0
};

UNIT_TEST(test_edited_headers)
{
    for (size_t i = 0; i < sizeof edits / sizeof edits[0]; ++i) {
        table_case c = case_default();
        c.edit_from = edits[i].from, c.edit_to = edits[i].to;
        size_t size;
        unsigned char *bytes = case_bytes(&c, &size, NULL);
        kvb_error err = {KVB_OK, ""};
        kvb_table *t = (kvb_table *)&err;
        kvb_status status = kvb_table_open_memory(&t, bytes, size, "some/table.safetensors", NULL, &err);
        ck_assert_msg(status == edits[i].status && strstr(err.message, edits[i].message) &&
                          strstr(err.message, "some/table.safetensors: ") == err.message,
                      "%s -> %s: %s \"%s\"", edits[i].from, edits[i].to, kvb_status_name(status), err.message);
        ck_assert_int_eq(err.status, status);
        ck_assert_ptr_null(t);
        free(bytes);
    }
}

UNIT_TEST(test_bad_numbers)
{
    static const struct {
        size_t tensor, element;
        double value;
        kvb_status status;
        const char *message;
    } bad[] = {{0, 593, NAN, KVB_NUMERIC, "\"prune_ratio\": element 593"},
               {0, 0, -1e-9, KVB_FORMAT, "\"prune_ratio\": element 0"},
               {0, 7, 1.0000001, KVB_FORMAT, "\"prune_ratio\": element 7"},
               {1, 49, 0.51, KVB_FORMAT, "\"ratio\": element 49: expected 0.5"},
               {2, 3, -0.5, KVB_FORMAT, "\"std\""},
               {3, 98, INFINITY, KVB_NUMERIC, "\"loss\""},
               {4, 0, -INFINITY, KVB_NUMERIC, "\"lower_bound\""},
               {5, 0, NAN, KVB_NUMERIC, "\"lambda\""},
               {6, 0, NAN, KVB_NUMERIC, "\"table_loss\""},
               {7, 0, 1.5, KVB_FORMAT, "\"effective_ratio\""}};
    table_case c = case_default();
    kvb_table *t;
    kvb_error err;
    size_t size, data;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
        unsigned char *bytes = case_bytes(&c, &size, &data);
        case_put(bytes + data + case_offset(&c, bad[i].tensor) + 8 * bad[i].element, bad[i].value);
        kvb_status status = kvb_table_open_memory(&t, bytes, size, "f", NULL, &err);
        ck_assert_msg(status == bad[i].status && strstr(err.message, bad[i].message), "%zu: %s", i, err.message);
        free(bytes);
    }
    unsigned char *bytes = case_bytes(&c, &size, &data);
    bytes[data + case_offset(&c, 8) + 5] = 2;
    unit_refuses(kvb_table_open_memory(&t, bytes, size, "f", NULL, &err), KVB_FORMAT, "\"saturated\": element 5");
    free(bytes);
}

// Every prefix of a file, and the file with bytes after it.
UNIT_TEST(test_truncated)
{
    table_case c = case_default();
    size_t size;
    unsigned char *bytes = case_bytes(&c, &size, NULL);
    kvb_table *t;
    kvb_error err;
    for (size_t n = 0; n < size; ++n) {
        unsigned char *copy = malloc(n ? n : 1); // exactly n bytes, so that the sanitizer sees a read past the end
        memcpy(copy, bytes, n);
        kvb_status status = kvb_table_open_memory(&t, copy, n, "cut.safetensors", NULL, &err);
        ck_assert_msg(status == KVB_FORMAT && !t && strstr(err.message, "cut.safetensors"), "%zu: %d", n, status);
        free(copy);
    }
    unsigned char *longer = calloc(1, size + 1);
    memcpy(longer, bytes, size);
    unit_refuses(kvb_table_open_memory(&t, longer, size + 1, "long", NULL, &err), KVB_FORMAT, "1 more bytes");
    free(longer);
    free(bytes);
}

// Every bit of the header and a sample of the others: an error that names the file, or a table that still works.
UNIT_TEST(test_bit_flips)
{
    table_case c = case_default();
    size_t size, data, opened = 0;
    unsigned char *bytes = case_bytes(&c, &size, &data);
    kvb_error err;
    kvb_table *t;
    for (size_t bit = 0; bit < size * 8; bit += bit < data * 8 ? 1 : 61) {
        uint32_t keep[64];
        bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
        err.message[0] = 0;
        if (kvb_table_open_memory(&t, bytes, size, "flipped", NULL, &err) == KVB_OK) {
            ++opened;
            ck_assert_int_eq(kvb_budgets(t, 0.8, 997, NULL, keep, 64, NULL), KVB_OK);
            kvb_table_close(t);
        } else {
            ck_assert_msg(!t && strncmp(err.message, "flipped: ", 9) == 0, "bit %zu: %s", bit, err.message);
        }
        bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    ck_assert_uint_gt(opened, 0);
    free(bytes);
}

// Headers that are hostile rather than damaged.
UNIT_TEST(test_hostile)
{
    static const char *const headers[] = {"{}", "[]", "1", "{\"a\":1}", "{\"a\":{}}", "\"x\"", "{\"__metadata__\":{}}"};
    kvb_table *t;
    unsigned char buffer[4096] = {0};
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; ++i) {
        size_t n = strlen(headers[i]);
        buffer[0] = (unsigned char)n;
        buffer[1] = 0;
        memcpy(buffer + 8, headers[i], n);
        help_fails(kvb_table_open_memory(&t, buffer, 8 + n, NULL, NULL, err), KVB_FORMAT, "<memory>");
    }
    buffer[0] = 0xf0; // 4080 opening brackets: deeper than any parser should follow
    buffer[1] = 0x0f;
    memset(buffer + 8, '[', sizeof buffer - 8);
    help_fails(kvb_table_open_memory(&t, buffer, sizeof buffer, NULL, NULL, err), KVB_FORMAT, "");
    memset(buffer, 0xff, 8);
    help_fails(kvb_table_open_memory(&t, buffer, sizeof buffer, NULL, NULL, err), KVB_FORMAT, "");
    help_fails(kvb_table_open_memory(&t, NULL, 0, NULL, NULL, err), KVB_ARGUMENT, "");
    ck_assert_int_eq(kvb_table_open_memory(NULL, buffer, 8, NULL, NULL, NULL), KVB_ARGUMENT);

    table_case c = case_default();
    c.edit_from = "unknown keys";
    c.edit_to = "unknown\tkeys"; // room for a NUL, put below
    size_t size;
    unsigned char *bytes = case_bytes(&c, &size, NULL);
    *(unsigned char *)memchr(bytes + 8, '\t', size - 8) = 0;
    help_fails(kvb_table_open_memory(&t, bytes, size, "f", NULL, err), KVB_FORMAT, "NUL");
    free(bytes);
}

UNIT_TEST(test_files)
{
    const char *path = help_path("t.safetensors");
    char long_path[600];
    kvb_table *t;
    kvb_error err;
    table_case c = case_default();
    size_t size;
    unsigned char *bytes = case_bytes(&c, &size, NULL);
    help_spew(path, bytes, size);
    free(bytes);

    ck_assert_int_eq(kvb_table_open(&t, path, NULL, &err), KVB_OK);
    kvb_table_close(t);
    kvb_table_options small = {1000};
    ck_assert_int_eq(kvb_table_open(&t, path, &small, &err), KVB_UNSUPPORTED);
    ck_assert(!t && strstr(err.message, path));
    small.max_bytes = size - 1;
    ck_assert_int_eq(kvb_table_open(&t, path, &small, &err), KVB_UNSUPPORTED);
    small.max_bytes = size;
    ck_assert_int_eq(kvb_table_open(&t, path, &small, &err), KVB_OK);
    kvb_table_close(t);

    unit_refuses(kvb_table_open(&t, help_folder, NULL, &err), KVB_IO, help_folder);
    ck_assert_int_eq(unlink(path), 0);
    unit_refuses(kvb_table_open(&t, path, NULL, &err), KVB_IO, "No such file");
    ck_assert_int_eq(kvb_table_open(NULL, path, NULL, &err), KVB_ARGUMENT);
    ck_assert_int_eq(kvb_table_open(&t, NULL, NULL, &err), KVB_ARGUMENT);
    // A name that is longer than the message must not push out what is wrong.
    memset(long_path, 'a', sizeof long_path - 1);
    long_path[sizeof long_path - 1] = 0;
    unit_refuses(kvb_table_open_memory(&t, "", 0, long_path, NULL, &err), KVB_FORMAT, "expected at least 8 bytes");
}

// Escapes that only look like \u0000.
UNIT_TEST(test_backslashes)
{
    table_case c = case_default();
    c.edit_from = "unknown keys", c.edit_to = "\\\\u0000 \\u00001 \\u000a";
    size_t size;
    unsigned char *bytes = case_bytes(&c, &size, NULL);
    kvb_table *t;
    ck_assert_int_eq(kvb_table_open_memory(&t, bytes, size, "f", NULL, NULL), KVB_FORMAT); // \u00001 is a NUL and a 1
    free(bytes);
    c.edit_to = "\\\\u0000 \\u0001 \\u000a";
    t = case_open(&c);
    ck_assert_str_eq(kvb_table_metadata(t, "note"), "\\u0000 \1 \n are kept");
    kvb_table_close(t);
}

// A host program's locale may write 0,5, or 0\u066b5 with a decimal point of two bytes. If the sources of glibc's
// locales are installed, these locales are made for this test.
UNIT_TEST(test_locales)
{
    static const char *const names[] = {"de_DE", "ps_AF"};
    char command[256];
    table_case c = case_default();
    c.edit_from = "\"note\":\"unknown keys are kept\"";
    c.edit_to = "\"constraints\":\"{\\\"least\\\":[0.25,0.5,0,0,1e-1,0],\\\"layer_cap\\\":[1,0.75,1]}\"";
    setenv("LOCPATH", help_folder, 1);
    uint32_t plain[6], keep[6];
    kvb_table *t = case_open(&c);
    ck_assert_int_eq(kvb_budgets(t, 0.9, 1000, NULL, plain, 6, NULL), KVB_OK);
    ck_assert_uint_eq(plain[1], 500);
    kvb_table_close(t);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(command, sizeof command, "localedef -i %s -f UTF-8 %s/%s 2>/dev/null", names[i], help_folder,
                 names[i]);
        if (system(command) != 0 || !setlocale(LC_ALL, names[i])) {
            printf("test_locales: %s cannot be made here\n", names[i]);
            continue;
        }
        ck_assert_str_ne(localeconv()->decimal_point, ".");
        t = case_open(&c);
        ck_assert_int_eq(kvb_budgets(t, 0.9, 1000, NULL, keep, 6, NULL), KVB_OK);
        ck_assert_mem_eq(keep, plain, sizeof keep);
        ck_assert_str_eq(setlocale(LC_ALL, NULL), names[i]); // the host's locale has not changed
        kvb_table_close(t);
    }
    setlocale(LC_ALL, "C");
}

// A message is one line without control characters, and keeps its beginning and end, however long the path is.
UNIT_TEST(test_messages)
{
    char path[5000], *end;
    kvb_table *t;
    kvb_error err;
    ck_assert_int_eq(kvb_table_open(&t, "no\n\033[2J\177\302\233\377 g\303\266ne.safetensors", NULL, &err), KVB_IO);
    ck_assert_str_eq(err.message, "no??[2J???? g\303\266ne.safetensors: opening: No such file or directory");
    for (size_t length = 300; length < 4090; length += 53) {
        memset(path, 'a', length);
        for (size_t i = 0; i + 1 < length; i += 2) memcpy(path + i, "\303\266", 2); // no letter may be cut in half
        memcpy(path, "begin", 5);
        path[4] = 'n';
        strcpy(path + length, "/end.safetensors");
        ck_assert_int_eq(kvb_table_open(&t, path, NULL, &err), KVB_IO);
        ck_assert_uint_lt(strlen(err.message), sizeof err.message);
        ck_assert(strncmp(err.message, "begin", 4) == 0 && (end = strstr(err.message, "/end.safetensors: opening: ")));
        ck_assert(strlen(end) > 30);
        ck_assert_msg(length < 470 || strstr(err.message, " ... "), "%s", err.message);
        ck_assert_ptr_null(strstr(err.message + 6, "?"));
    }
}

UNIT_TEST(test_check)
{
    table_case c = case_default();
    kvb_table *t = case_open(&c);
    kvb_expectation e = {0};
    help_ok(kvb_table_check(t, &e, err));
    e = (kvb_expectation){.n_layers = 3, .n_heads = 6, .n_kv_heads = 2, .head_dim = 64, .metric = "snapkv:kvpress"};
    e.model_sha256 = "0000000000000000000000000000000000000000000000000000000000000007";
    e.has_protection = 1, e.sink = 4, e.window = 1;
    help_ok(kvb_table_check(t, &e, err));
    kvb_expectation other = e;
    other.n_kv_heads = 8;
    help_fails(kvb_table_check(t, &other, err), KVB_MISMATCH, "case: n_kv_heads: expected 8, the table says 2");
    other = e;
    other.sink = 0;
    help_fails(kvb_table_check(t, &other, err), KVB_MISMATCH, "sink: expected 0, the table says 4");
    other.has_protection = 0;
    help_ok(kvb_table_check(t, &other, err));
    other.metric = "keydiff";
    help_fails(kvb_table_check(t, &other, err), KVB_MISMATCH,
               "metric: expected keydiff, the table says snapkv:kvpress");
    other.model_sha256 = "000000000000000000000000000000000000000000000000000000000000000A";
    help_fails(kvb_table_check(t, &other, err), KVB_MISMATCH, "model_sha256");
    table_case open = case_default();
    open.edit_from = "0000000000000000000000000000000000000000000000000000000000000007", open.edit_to = "";
    kvb_table *of_no_hash = case_open(&open);
    help_fails(kvb_table_check(of_no_hash, &(kvb_expectation){.model_sha256 = ""}, err), KVB_MISMATCH,
               "expected a hash, got none");
    kvb_table_close(of_no_hash);
    unit_numbers(kvb_table_check(t, NULL, NULL), KVB_ARGUMENT, kvb_table_check(NULL, &e, NULL), KVB_ARGUMENT);
    kvb_table_close(t);
}

UNIT_MAIN_EACH("runtime_table", help_setup, help_teardown)
