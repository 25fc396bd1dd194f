// The file that a stopped run leaves: what is written is read, every damage is found and told, half a file never is.
#include "formats/kept_file.h"
#include "formats_help.h"

static const kept_header header = {"00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff", 3, 5};
static const float floats[5] = {1, -2, 0.5f, 3e38f, 0};

static void write_one(const char *path)
{
    kept_file *f;
    help_remove(path);
    help_ok(kept_file_create(&f, path, &header, err));
    help_ok(kept_file_put(f, floats, 2, err));
    ck_assert(!help_exists(path)); // not before its end
    help_ok(kept_file_put(f, floats + 2, 3, err));
    help_ok(kept_file_end(f, KVB_OK, err));
}

static kvb_status read_one(const char *path, float out[5], kvb_error *problem)
{
    kept_file *f;
    kvb_status status = kept_file_open(&f, path, problem);
    if (status == KVB_OK) status = kept_file_get(f, out, 5, problem);
    return kept_file_end(f, status, problem);
}

UNIT_TEST(test_write_and_read)
{
    const char *path = help_path("a.kept");
    float out[5];
    size_t size;
    write_one(path);
    help_ok(read_one(path, out, err));
    ck_assert_int_eq(memcmp(out, floats, sizeof out), 0);
    free(help_slurp(path, &size));
    ck_assert_uint_eq(size, kept_file_bytes(5));
    kept_file *f;
    help_ok(kept_file_open(&f, path, err));
    ck_assert_str_eq(kept_file_header(f)->key, header.key);
    ck_assert(kept_file_header(f)->layers == 3 && kept_file_header(f)->floats == 5);
    help_fails(kept_file_get(f, out, 6, err), KVB_FORMAT, "6 floats are wanted, but 5 are left");
    help_fails(kept_file_end(f, KVB_OK, err), KVB_ARGUMENT, "0 of 5 floats");
    help_fails(kept_file_open(&f, help_path("none.kept"), err), KVB_IO, "none.kept");
    ck_assert_ptr_null(f);
}

UNIT_TEST(test_half_a_file_is_none)
{
    const char *path = help_path("half.kept");
    kept_file *f;
    help_ok(kept_file_create(&f, path, &header, err));
    help_ok(kept_file_put(f, floats, 4, err));
    help_fails(kept_file_end(f, KVB_OK, err), KVB_ARGUMENT, "4 of 5 floats");
    ck_assert(!help_exists(path));
    help_ok(kept_file_create(&f, path, &header, err));
    ck_assert_int_eq(kept_file_end(f, KVB_NUMERIC, NULL), KVB_NUMERIC); // what its maker failed with
    ck_assert(!help_exists(path));
}

UNIT_TEST(test_every_damage_is_found)
{
    const char *path = help_path("a.kept");
    float out[5];
    size_t size;
    write_one(path);
    unsigned char *bytes = help_slurp(path, &size);
    for (size_t at = 0; at < size; at++) {
        kvb_error problem = {0};
        bytes[at] ^= 0x10;
        help_spew(path, bytes, size);
        bytes[at] ^= 0x10;
        kvb_status status = read_one(path, out, &problem);
        ck_assert_msg(status == KVB_FORMAT && strstr(problem.message, "a.kept"), "byte %zu: %d, %s", at, status,
                      problem.message);
    }
    for (size_t left = 1; left < size; left++) {
        kvb_error problem = {0};
        help_spew(path, bytes, left);
        ck_assert_msg(read_one(path, out, &problem) == KVB_FORMAT, "cut to %zu bytes: %s", left, problem.message);
    }
    free(bytes);
}

UNIT_TEST(test_headers)
{
    static const struct {
        size_t at;
        char is;
        const char *says;
    } cases[] = {{0, 'K', "byte 0"},   {16, 'g', "byte 0"},      {80, ' ', "byte 0"},        {81, '9', "byte 0"},
                 {85, '-', "byte 0"},  {91, ' ', "byte 0"},      {92, '9', "byte 0"},        {100, 'x', "byte 0"},
                 {112, '0', "byte 0"}, {94, '1', "header says"}, {111, '6', "header says 6"}};
    char bytes[KEPT_HEADER + 20 + KEPT_SUM];
    kept_header out;
    memset(bytes, 'f', sizeof bytes);
    snprintf(bytes, KEPT_HEADER + 1, "kvbudget-kept 1\n%s\n%010u\n%020u\n", header.key, 3, 5);
    help_ok(kept_header_read(&out, bytes, sizeof bytes, "x", err));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char before = bytes[cases[i].at];
        bytes[cases[i].at] = cases[i].is;
        help_fails(kept_header_read(&out, bytes, sizeof bytes, "x", err), KVB_FORMAT, cases[i].says);
        bytes[cases[i].at] = before;
    }
}

UNIT_MAIN_ONCE("formats kept", help_setup, help_teardown)
