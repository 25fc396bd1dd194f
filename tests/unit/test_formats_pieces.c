// The small parts of formats/: valid names, JSON files, element types, weights as text, hashes of open files, files of
// our own folder, mapped pages that are given back.
#include "formats/json_file.h"
#include "formats/names.h"
#include "formats/npy.h"
#include "formats/sha256.h"
#include "formats/table_write.h"
#include "formats_help.h"

// SHA-256 of "abc": FIPS 180-4, appendix B.1 of its first edition.
#define ABC "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

UNIT_TEST(names)
{
    char longest[130];
    memset(longest, 'x', sizeof longest);
    longest[64] = 0;
    ck_assert(context_id_valid("a") && context_id_valid("A-z_0.9") && context_id_valid("...") &&
              context_id_valid(longest));
    longest[64] = 'x', longest[65] = 0;
    ck_assert(!context_id_valid(longest));
    const char *no_context[] = {"", ".", "..", "a/b", "a b", "a:b", "\xc3\xa4", "a\n"};
    for (size_t i = 0; i < sizeof no_context / sizeof *no_context; i++) ck_assert(!context_id_valid(no_context[i]));
    longest[65] = 'x', longest[128] = 0;
    ck_assert(metric_name_valid("snapkv:kvpress:window=32") && metric_name_valid("..") && metric_name_valid(longest));
    longest[128] = 'x', longest[129] = 0;
    ck_assert(!metric_name_valid(longest));
    const char *no_metric[] = {"", ".", "a/b", "a b", "a\tb", "\x7f", "\xc3\xa4"};
    for (size_t i = 0; i < sizeof no_metric / sizeof *no_metric; i++) ck_assert(!metric_name_valid(no_metric[i]));
}

UNIT_TEST(members_of_an_object)
{
    cJSON *o = cJSON_CreateObject();
    json_put(o, "text %s yes %d no %d third %g none %g most %u large %zu", "a %s", true, false, 1.0 / 3, NAN,
             UINT32_MAX, (size_t)1 << 40);
    char *text = cJSON_PrintUnformatted(o);
    ck_assert_str_eq(text, "{\"text\":\"a %s\",\"yes\":true,\"no\":false,\"third\":0.33333333333333331,\"none\":null,"
                           "\"most\":4294967295,\"large\":1099511627776}");
    cJSON_free(text);
    cJSON_Delete(o);
}

UNIT_TEST(json_files)
{
    const char *path = help_path("a.json");
    cJSON *value = cJSON_Parse("{\"b\": [1, 0.5], \"a\": \"\\u00e4\"}");
    help_ok(json_write(path, value, err));
    size_t size;
    char *text = (char *)help_slurp(path, &size);
    ck_assert_uint_eq(text[size - 1], '\n');
    cJSON *again = cJSON_Parse(text);
    ck_assert(cJSON_Compare(value, again, 1));
    help_fails(json_write(path, NULL, err), KVB_MEMORY, "memory");
    free(text);
    text = (char *)help_slurp(path, &size); // unchanged by the failed write
    cJSON *still = cJSON_Parse(text);
    ck_assert(cJSON_Compare(value, still, 1));
    help_fails(json_write(help_path("no/b.json"), value, err), KVB_IO, "no/b.json");
    free(text);
    cJSON_Delete(value);
    cJSON_Delete(again);
    cJSON_Delete(still);
}

UNIT_TEST(element_types)
{
    const size_t sizes[] = {[NPY_F32] = 4, [NPY_F64] = 8, [NPY_I32] = 4, [NPY_I64] = 8};
    for (npy_type t = NPY_F32; t <= NPY_I64; t++) ck_assert_uint_eq(npy_type_size(t), sizes[t]);
}

UNIT_TEST(weights_as_text)
{
    const double weight[2][3] = {{0.25, 0.75, 0}, {1.0 / 3, 1.0 / 3, 1.0 / 3}};
    double again[2][3];
    char *text = table_weights_print(*weight, 2, 3);
    ck_assert_ptr_nonnull(text);
    help_ok(table_weights_parse(*again, text, 2, 3, 0.75, "t", err));
    ck_assert_mem_eq(again, weight, sizeof weight); // every bit of a double comes back
    help_fails(table_weights_parse(*again, text, 2, 3, 0.7, "t", err), KVB_FORMAT, "t");
    help_fails(table_weights_parse(*again, text, 3, 2, 1, "t", err), KVB_FORMAT, "t");
    cJSON_free(text);
}

UNIT_TEST(hash_of_an_open_file)
{
    char hex[65];
    const char *path = help_path("a");
    help_spew(path, "abc", 3);
    int file = open(path, O_RDONLY);
    ck_assert_int_eq(lseek(file, 2, SEEK_SET), 2);
    help_ok(sha256_descriptor_hex(file, path, hex, err));
    ck_assert_str_eq(hex, ABC);
    ck_assert_int_eq(lseek(file, 0, SEEK_CUR), 2); // where it was
    close(file);
    help_fails(sha256_descriptor_hex(file, "closed", hex, err), KVB_IO, "closed");
}

UNIT_TEST(files_of_our_folder)
{
    ck_assert(atomic_file_is_partial("run.h5.0123abcd.partial", "run.h5", 6));
    const char *others[] = {"run.h5",
                            "run.h5.0123abcd",
                            "run.h5.0123abc.partial",
                            "run.h5.0123abcde.partial",
                            "run.h5.0123ABCD.partial",
                            "other.h5.0123abcd.partial",
                            "run.h5.0123abcd.partial.h5",
                            "run.h5.partial"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        ck_assert_msg(!atomic_file_is_partial(others[i], "run.h5", 6), "%s", others[i]);

    // A link is replaced, not followed: its target does not change.
    const char *link = help_path("link"), *target = help_path("target");
    help_spew(target, "old", 3);
    ck_assert_int_eq(symlink(target, link), 0);
    atomic_file f;
    help_ok(atomic_file_begin_own(&f, link, err));
    ck_assert(atomic_file_is_partial(strrchr(f.temp_path, '/') + 1, "link", 4));
    fputs("new", f.stream);
    help_ok(atomic_file_commit(&f, err));
    struct stat st;
    ck_assert(lstat(link, &st) == 0 && S_ISREG(st.st_mode) && st.st_size == 3);
    size_t size;
    unsigned char *text = help_slurp(target, &size);
    ck_assert_str_eq((char *)text, "old");
    free(text);
}

UNIT_TEST(pages_given_back)
{
    enum { SIZE = 3 << 20 };
    unsigned char *data = malloc(SIZE);
    for (size_t i = 0; i < SIZE; i++) data[i] = (unsigned char)(i * 2654435761u >> 13);
    const char *path = help_path("big");
    help_spew(path, data, SIZE);
    file_view view;
    help_ok(file_map(&view, path, err));
    ck_assert_mem_eq(view.data, data, SIZE);
    file_forget(&view);
    ck_assert_mem_eq(view.data, data, SIZE); // read again when they are needed
    help_ok(file_check(&view, path, err));
    file_unmap(&view);
    ck_assert_ptr_null(view.data);
    file_unmap(&view);
    help_ok(file_check(&view, path, err)); // a zero view is allowed
    free(data);
}

// The checksum covers the line before it. A flipped bit or a missing checksum is detected.
UNIT_TEST(sealed_lines)
{
    cJSON *object = cJSON_CreateObject();
    char expected[200], hash[65];
    cJSON_AddNumberToObject(object, "a", 1);
    char *line = json_sealed_line(object);
    sha256_hex("{\"a\":1", 6, hash);
    snprintf(expected, sizeof expected, "{\"a\":1,\"sha256\":\"%s\"}\n", hash);
    ck_assert_str_eq(line, expected);
    size_t n = strlen(line) - 1;
    ck_assert(json_line_holds(line, n));
    for (size_t bit = 0; bit < 8 * n; bit++) {
        line[bit / 8] = (char)(line[bit / 8] ^ 1 << bit % 8);
        ck_assert_msg(!json_line_holds(line, n), "bit %zu", bit);
        line[bit / 8] = (char)(line[bit / 8] ^ 1 << bit % 8);
    }
    for (size_t size = 0; size < n; size++) {
        ck_assert(!json_line_holds(line, size));
    }
    free(line);
    cJSON_Delete(object);
}

UNIT_MAIN_EACH("formats_pieces", help_setup, help_teardown)
