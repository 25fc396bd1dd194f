// What lies between a file and kvb_table_open: the safetensors container by its specification, texts and digits, and an
// engine's limits in whole units.
#include "runtime/json.h"
#include "runtime/limits.h"
#include "runtime/safetensors.h"
#include "runtime/sha256.h"
#include "runtime/text.h"
#include "unit.h"
#include <cJSON.h>

static unsigned char bytes[4096];
static kvb_error err;

// Makes a file in `bytes` with this header and n_data bytes of data, which count up. Returns its size.
static size_t make(const char *header, size_t n_data)
{
    size_t n = strlen(header);
    for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)((uint64_t)n >> 8 * i);
    memcpy(bytes + 8, header, n);
    for (size_t i = 0; i < n_data; i++) bytes[8 + n + i] = (unsigned char)i;
    return 8 + n + n_data;
}

// The examples of FIPS 180-4 (the last one, a million times "a", in pieces that do not fit the blocks), and lengths at
// which the padding takes another block.
UNIT_TEST(hashes)
{
    static const struct {
        const char *text, *hash;
    } cases[] = {{"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
                 {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
                 {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                  "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
                 {"0123456789012345678901234567890123456789012345678901234",
                  "f34d5a0f80c0cbf84c8c0b90218c22637abd199965249da736a20143c8c9c9d9"},
                 {"0123456789012345678901234567890123456789012345678901234567890123",
                  "9674d9e078535b7cec43284387a6ee39956188e735a85452b0050b55341cda56"}};
    char hex[65];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvb_sha256(&(kvb_bytes){cases[i].text, strlen(cases[i].text)}, 1, hex);
        ck_assert_str_eq(hex, cases[i].hash);
    }
    static char a[1001];
    kvb_bytes pieces[1000];
    memset(a, 'a', sizeof a);
    for (size_t i = 0; i < 1000; i++) pieces[i] = (kvb_bytes){a, i % 2 ? 999 : 1001};
    kvb_sha256(pieces, 1000, hex);
    ck_assert_str_eq(hex, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

UNIT_TEST(container)
{
    size_t size = make("{\"__metadata__\":{\"k\":\"v\",\"\":\"empty\"},"
                       "\"z\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[6,22]},"
                       "\"a\":{\"dtype\":\"U8\",\"shape\":[2,3],\"data_offsets\":[0,6]}}",
                       22);
    kvb_safetensors file;
    ck_assert_msg(kvb_safetensors_parse(&file, bytes, size, "f", &err) == KVB_OK, "%s", err.message);
    ck_assert_uint_eq(file.n_tensors, 2);
    const kvb_tensor *a = kvb_safetensors_find(&file, "a"), *z = kvb_safetensors_find(&file, "z");
    ck_assert(a && z && a < z); // sorted by name
    ck_assert(a->n_dims == 2 && a->shape[0] == 2 && a->shape[1] == 3 && a->size == 6 && a->data[5] == 5);
    ck_assert(z->n_dims == 1 && z->shape[0] == 2 && z->size == 16 && z->data == a->data + 6);
    ck_assert_str_eq(z->dtype, "F64");
    ck_assert(!kvb_safetensors_find(&file, "b") && !kvb_safetensors_find(&file, ""));
    unit_strings(kvb_safetensors_metadata(file.header, "k"), "v", kvb_safetensors_metadata(file.header, ""), "empty");
    ck_assert_ptr_null(kvb_safetensors_metadata(file.header, "no"));
    kvb_safetensors_free(&file);
    kvb_safetensors_free(&file); // may be freed again
    ck_assert_ptr_null(file.header);
}

UNIT_TEST(damaged_containers)
{
    const struct {
        const char *header;
        size_t n_data;
        kvb_status status;
    } cases[] = {
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,3]}}", 3, KVB_FORMAT}, // not its size
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}", 3, KVB_FORMAT}, // a hole
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 3, KVB_FORMAT}, // bytes left
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 3, KVB_FORMAT}, // beyond the end
        {"{\"a\":{\"dtype\":\"X9\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2, KVB_UNSUPPORTED},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,2],\"data_offsets\":[0,2]}}", 2, KVB_UNSUPPORTED},
        {"{\"a\":{\"dtype\":\"F64\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
         KVB_FORMAT}, // wraps
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,2]}}", 2, KVB_FORMAT},
        {"{\"__metadata__\":{\"k\":1}}", 0, KVB_FORMAT}, // values must be strings
        {"[]", 0, KVB_FORMAT},
        {"{", 0, KVB_FORMAT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t size = make(cases[i].header, cases[i].n_data);
        kvb_safetensors file;
        memset(&file, 1, sizeof file);
        kvb_status status = kvb_safetensors_parse(&file, bytes, size, "name", &err);
        ck_assert_msg(status == cases[i].status, "%s: %s", cases[i].header, kvb_status_name(status));
        ck_assert_msg(strstr(err.message, "name") != NULL, "%s", err.message);
        ck_assert_ptr_null(file.header);
        ck_assert_uint_eq(file.n_tensors, 0);
    }
    kvb_safetensors file;
    for (size_t size = 0; size < 8; size++)
        ck_assert_int_eq(kvb_safetensors_parse(&file, bytes, size, "name", &err), KVB_FORMAT);
    memset(bytes, 0xff, 8); // a header of 2^64 - 1 bytes
    ck_assert_int_ne(kvb_safetensors_parse(&file, bytes, sizeof bytes, "name", &err), KVB_OK);
}

// UTF-8 by its definition: all two-byte beginnings, and the edges of longer sequences.
UNIT_TEST(sequences_of_utf8)
{
    for (int a = 0; a < 256; a++)
        for (int b = 0; b < 256; b++) {
            const char at[2] = {(char)a, (char)b};
            size_t want = a < 0x80 ? 1 : a >= 0xc2 && a <= 0xdf && (b & 0xc0) == 0x80 ? 2 : 0;
            ck_assert_msg(kvb_utf8_size(at, 2) == want, "%02x %02x: %zu", a, b, kvb_utf8_size(at, 2));
        }
    static const struct {
        const char *text;
        size_t size;
    } longer[] = {{"\xe0\xa0\x80", 3},     {"\xe0\x9f\xbf", 0},     {"\xed\x9f\xbf", 3},     {"\xed\xa0\x80", 0},
                  {"\xef\xbf\xbf", 3},     {"\xf0\x90\x80\x80", 4}, {"\xf0\x8f\xbf\xbf", 0}, {"\xf4\x8f\xbf\xbf", 4},
                  {"\xf4\x90\x80\x80", 0}, {"\xf5\x80\x80\x80", 0}, {"\xe2\x82", 0},         {"\x80", 0}};
    for (size_t i = 0; i < sizeof longer / sizeof *longer; i++)
        ck_assert_msg(kvb_utf8_size(longer[i].text, strlen(longer[i].text)) == longer[i].size, "case %zu", i);
    ck_assert_uint_eq(kvb_utf8_size("\xe2\x82\xac", 2), 0); // the third byte may not be read
}

UNIT_TEST(cleaned_texts)
{
    char text[] = "a\tb\033[2J\x7f \xc3\xa9 \xff\xc3 \xc2\x9b end",
         turned[] = "a\xe2\x80\xae+\xe2\x81\xa6\xd8\x9c\xe2\x80\x93";
    kvb_clean_text(turned);
    ck_assert_str_eq(turned, "a???+?????\xe2\x80\x93"); // an override, an isolate, a mark; not a dash
    kvb_clean_text(text);
    ck_assert_str_eq(text, "a?b?[2J? \xc3\xa9 ?? ?? end");
    ck_assert(kvb_is_shown("\xe2\x80\x93", 3) && !kvb_is_shown("\xe2\x80\xae", 3) && !kvb_is_shown("\xff", 0));
}

// Decimal digits up to a maximum, and where reading ends.
UNIT_TEST(decimal_digits)
{
    const struct {
        const char *text;
        uint64_t max, value;
        int rest; // where reading ends; -1: refused
    } cases[] = {
        {"0", 1, 0, 1},
        {"1.5", 1, 1, 1},
        {"2", 1, 0, -1}, // a single digit above a maximum that is below 10
        {"9", 1, 0, -1},
        {"9", 8, 0, -1},
        {"8", 8, 8, 1},
        {"11", 9, 0, -1},
        {"007,", 9, 7, 3},
        {"4294967295", UINT32_MAX, UINT32_MAX, 10},
        {"4294967296", UINT32_MAX, 0, -1},
        {"18446744073709551615", UINT64_MAX, UINT64_MAX, 20},
        {"18446744073709551616", UINT64_MAX, 0, -1},
        {"", 9, 0, -1},
        {"-1", 9, 0, -1},
        {" 1", 9, 0, -1},
        {"+1", 9, 0, -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *end = cases[i].text;
        uint64_t value = 77;
        bool read = kvb_read_digits(&end, cases[i].max, &value);
        ck_assert_msg(read == (cases[i].rest >= 0), "'%s' up to %llu", cases[i].text, (unsigned long long)cases[i].max);
        unit_numbers(end - cases[i].text, read ? cases[i].rest : 0, value, read ? cases[i].value : 77);
    }
}

// Bytes after the first NUL count, so sizes are given.
UNIT_TEST(kinds_of_files)
{
    static const struct {
        const char *bytes;
        size_t size;
        kvb_file_kind kind;
    } cases[] = {
        {"GGUF\3\0\0\0", 8, KVB_FILE_MODEL},
        {"GGU", 3, KVB_FILE_OTHER},
        {"\x89HDF\r\n\x1a\n", 8, KVB_FILE_RECORD},
        {"\x89HDF\r\n\x1a", 7, KVB_FILE_OTHER},
        {"\x93NUMPY\1\0", 8, KVB_FILE_ARRAY},
        {"\x40\1\0\0\0\0\0\0{\"a\"", 11, KVB_FILE_SAFETENSORS},
        {"\x40\1\0\0\0\0\0\0", 8, KVB_FILE_OTHER},
        {"\x40\1\0\0\1\0\0\0{\"a\"", 11, KVB_FILE_OTHER}, // a header of 4 GiB
        {"{\"context\": \"a\"}", 16, KVB_FILE_OTHER},
        {"", 0, KVB_FILE_OTHER},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        ck_assert_int_eq(kvb_kind_of_file(cases[i].bytes, cases[i].size), cases[i].kind);
    unit_strings(kvb_kind_name(KVB_FILE_MODEL), "a model (GGUF)", kvb_kind_name(KVB_FILE_RECORD), "a record (HDF5)",
                 kvb_kind_name(KVB_FILE_ARRAY), "an array (.npy)");
    unit_strings(kvb_kind_name(KVB_FILE_SAFETENSORS), "safetensors, as tables and weights are",
                 kvb_kind_name(KVB_FILE_OTHER), "something else");
}

UNIT_TEST(ends_of_names)
{
    ck_assert(kvb_ends_with("ids.npy", ".npy") && kvb_ends_with(".npy", ".npy") && kvb_ends_with("ids", ""));
    ck_assert(!kvb_ends_with("ids.npy", ".np") && !kvb_ends_with("npy", ".npy") && !kvb_ends_with("", ".npy"));
}

UNIT_TEST(parsed_json)
{
    bool no_memory;
    const char *end;
    cJSON *json = kvb_json_parse("{\"a\": 1.5} rest", 10, &end, &no_memory);
    ck_assert(json && !no_memory && cJSON_GetObjectItem(json, "a")->valuedouble == 1.5);
    cJSON_Delete(json);
    ck_assert(!kvb_json_parse("[1, x]", 6, &end, &no_memory) && !no_memory);
    ck_assert_str_eq(end, "x]");
    ck_assert_ptr_null(kvb_json_parse("{\"a\": 1.5}", 9, NULL, &no_memory)); // the closing brace may not be read
    ck_assert(!no_memory);
}

UNIT_TEST(limits_in_units)
{
    kvb_limits m;
    ck_assert_msg(kvb_limits_init(&m, 2, 4, &err) == KVB_OK, "%s", err.message);
    ck_assert(kvb_limits_units(&m, 1000) == 1000 && kvb_limits_least(&m, 3, 1000) == 1); // no head is left empty
    ck_assert(kvb_limits_most(&m, 3, 1000) == 1000 && kvb_limits_cap(&m, 1, 1000) == 4000);

    m.least[3] = 0.3, m.most[3] = 0.7, m.cap[1] = 0.1;
    ck_assert(kvb_limits_least(&m, 3, 1000) == 300 && kvb_limits_most(&m, 3, 1000) == 700);
    ck_assert(kvb_limits_cap(&m, 1, 1000) == 400 && kvb_limits_cap(&m, 0, 1000) == 4000);

    m.block = 16; // pages: the last one counts in full; a share rounds up as a lower limit, down as an upper one
    ck_assert(kvb_limits_units(&m, 1000) == 63 && kvb_limits_units(&m, 16) == 1 && kvb_limits_units(&m, 17) == 2);
    ck_assert(kvb_limits_least(&m, 3, 1000) == 19 && kvb_limits_most(&m, 3, 1000) == 43);
    ck_assert_uint_eq(kvb_limits_cap(&m, 1, 1000), 25);

    m.ranks = 2; // a cap is the layer's; each of two ranks holds half of its heads
    ck_assert_uint_eq(kvb_limits_cap(&m, 1, 1000), 12);
    kvb_limits_free(&m);
    ck_assert_ptr_null(m.least);
}

UNIT_MAIN("runtime_parts")
