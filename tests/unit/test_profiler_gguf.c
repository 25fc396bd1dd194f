// The GGUF reader on files that are built here: what it must read, and every kind of damage, which it must refuse with
// its place.
#include "folder_help.h"
#include "profiler/weights/dequant.h"
#include "profiler/weights/gguf.h"
#include "tests/gguf_build.h"

static kvb_error err;

// Parses a copy of exactly `size` bytes, so that the address sanitizer sees a read past the end.
static kvb_status parse_copy(gguf_file *f, const gguf_build *b, size_t size, unsigned char **copy)
{
    *copy = malloc(size ? size : 1);
    ck_assert_ptr_nonnull(*copy);
    memcpy(*copy, b->data, size);
    memset(&err, 0, sizeof err);
    return gguf_parse(f, *copy, size, "some.gguf", &err);
}

static void expect_refused(const gguf_build *b, kvb_status status, const char *part)
{
    gguf_file f;
    unsigned char *copy;
    kvb_status got = parse_copy(&f, b, b->size, &copy);
    ck_assert_msg(got == status, "expected %s, got %s: %s", kvb_status_name(status), kvb_status_name(got), err.message);
    ck_assert_msg(strstr(err.message, "some.gguf") && strstr(err.message, part), "'%s' is not in: %s", part,
                  err.message);
    ck_assert(f.values == NULL && f.tensors == NULL && f.n_values == 0);
    free(copy);
}

static const uint64_t matrix[] = {32, 2}, vector[] = {8};

// One of everything: scalars, arrays, nested arrays, three tensors. The last tensor ends the file without padding.
static void build_sample(gguf_build *b, uint32_t version)
{
    gguf_build_begin(b, version);
    build_key_string(b, "general.architecture", "llama");
    build_key_u32(b, "a.u32", 4000000000u);
    build_key(b, "a.i8", 1);
    build_bytes(b, "\xff", 1);
    build_key(b, "a.i16", 3);
    build_bytes(b, "\x00\x80", 2);
    build_key(b, "a.u16", 2);
    build_bytes(b, "\x34\x12", 2);
    build_key(b, "a.u64", 10);
    build_u64(b, 7);
    build_key(b, "a.u64_big", 10);
    build_u64(b, UINT64_MAX);
    build_key(b, "a.i64", 11);
    build_u64(b, (uint64_t)-5);
    build_key_f32(b, "a.f32", 1.5f);
    build_key_f32(b, "a.nan", NAN);
    build_key(b, "a.f64", 12), build_u64(b, 0x3ff8000000000000u); // 1.5
    build_key(b, "a.f64_big", 12);
    build_u64(b, 0x7fe0000000000000u);
    build_key_bool(b, "a.true", 1);
    build_key(b, "a.bad_bool", 7);
    build_bytes(b, "\2", 1);
    build_key_array(b, "a.strings", 8, 3);
    build_string(b, "one");
    build_string(b, "");
    build_string(b, "three");
    build_key_array(b, "a.ints", 5, 2);
    build_u32(b, 11);
    build_u32(b, (uint32_t)-12);
    build_key_array(b, "a.empty", 6, 0);
    build_key_array(b, "a.nested", 9, 2); // [[1, 2], [["x"]]]
    build_u32(b, 4);
    build_u64(b, 2);
    build_u32(b, 1);
    build_u32(b, 2);
    build_u32(b, 9);
    build_u64(b, 1);
    build_u32(b, 8);
    build_u64(b, 1);
    build_string(b, "x");
    build_tensor(b, "q8", 2, matrix, GGUF_TENSOR_Q8_0, 68);
    build_tensor(b, "strange", 1, vector, 77, 0);
    build_tensor(b, "f32", 1, vector, GGUF_TENSOR_F32, 32);
    build_pad(b);
    for (int i = 0; i < 68; i++) build_bytes(b, &(unsigned char){(unsigned char)i}, 1);
    build_pad(b);
    for (int i = 0; i < 8; i++) build_f32(b, (float)i / 2);
}

static void check_scalars(const gguf_file *f)
{
    static const struct {
        const char *key;
        double number; // NAN: refused
        bool whole;    // from 0 to 2^32 - 1
    } numbers[] = {{"a.u32", 4000000000u, true},
                   {"a.u16", 0x1234, true},
                   {"a.u64", 7, true},
                   {"a.true", 1, true},
                   {"a.i8", -1, false},
                   {"a.i16", -32768, false},
                   {"a.i64", -5, false},
                   {"a.f32", 1.5, false},
                   {"a.f64", 1.5, false},
                   {"a.f64_big", 0x1p1023, false},
                   {"a.u64_big", NAN, false},
                   {"a.nan", NAN, false},
                   {"a.bad_bool", NAN, false},
                   {"a.ints", NAN, false},
                   {"general.architecture", NAN, false}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        double x = 9;
        uint32_t u = 9;
        bool good = !isnan(numbers[i].number);
        ck_assert_int_eq(gguf_get_number(f, numbers[i].key, &x, &err), good ? KVB_OK : KVB_FORMAT);
        ck_assert_msg(x == (good ? numbers[i].number : 9), "%s: %g", numbers[i].key, x); // refused: untouched
        ck_assert(good || strstr(err.message, numbers[i].key));
        ck_assert_int_eq(gguf_get_u32(f, numbers[i].key, &u, &err), numbers[i].whole ? KVB_OK : KVB_FORMAT);
        ck_assert_uint_eq(u, numbers[i].whole ? numbers[i].number : 9);
    }
    double x = 2.5;
    uint32_t u = 9;
    bool flag = false;
    gguf_string s;
    ck_assert(gguf_get_number(f, "a.absent", &x, &err) == KVB_OK && x == 2.5);
    ck_assert(gguf_get_u32(f, "a.absent", &u, &err) == KVB_OK && u == 9);
    ck_assert(gguf_get_bool(f, "a.true", &flag, &err) == KVB_OK && flag);
    ck_assert(gguf_get_bool(f, "a.absent", &flag, &err) == KVB_OK && flag);
    ck_assert_int_eq(gguf_get_bool(f, "a.bad_bool", &flag, &err), KVB_FORMAT);
    ck_assert_int_eq(gguf_get_bool(f, "a.u32", &flag, &err), KVB_FORMAT);
    ck_assert_int_eq(gguf_get_string(f, "general.architecture", &s, &err), KVB_OK);
    ck_assert(gguf_string_is(s, "llama") && !gguf_string_is(s, "llam") && !gguf_string_is(s, "llama2"));
    ck_assert_int_eq(gguf_get_string(f, "a.u32", &s, &err), KVB_FORMAT);
    ck_assert_int_eq(gguf_get_string(f, "a.absent", &s, NULL), KVB_FORMAT);
}

static void check_arrays(const gguf_file *f)
{
    gguf_array a;
    gguf_string s;
    ck_assert_int_eq(gguf_get_array(f, "a.strings", GGUF_VALUE_STRING, &a, &err), KVB_OK);
    ck_assert_uint_eq(a.count, 3);
    ck_assert(gguf_next_string(&a, &s) && gguf_string_is(s, "one"));
    ck_assert(gguf_next_string(&a, &s) && gguf_string_is(s, ""));
    ck_assert(gguf_next_string(&a, &s) && gguf_string_is(s, "three") && !gguf_next_string(&a, &s) && a.size == 0);
    ck_assert_int_eq(gguf_get_array(f, "a.ints", GGUF_VALUE_I32, &a, &err), KVB_OK);
    ck_assert(gguf_array_int(&a, 0) == 11 && gguf_array_int(&a, 1) == -12);
    unit_refuses(gguf_get_array(f, "a.ints", GGUF_VALUE_STRING, &a, &err), KVB_FORMAT,
                 "expected an array of string, found an array of i32");
    ck_assert_int_eq(gguf_get_array(f, "a.u32", GGUF_VALUE_I32, &a, &err), KVB_FORMAT);
    ck_assert_int_eq(gguf_get_array(f, "a.empty", GGUF_VALUE_F32, &a, &err), KVB_OK);
    ck_assert_uint_eq(a.count, 0);
    ck_assert_int_eq(gguf_get_array(f, "a.nested", GGUF_VALUE_ARRAY, &a, &err), KVB_OK);
    ck_assert_uint_eq(a.count, 2);
}

UNIT_TEST(test_reads_everything)
{
    for (uint32_t version = 2; version <= 3; version++) {
        gguf_build b;
        gguf_file f;
        unsigned char *copy;
        build_sample(&b, version);
        ck_assert_msg(parse_copy(&f, &b, b.size, &copy) == KVB_OK, "%s", err.message);
        unit_numbers(f.version, version, f.alignment, 32, f.n_values, b.n_values);
        check_scalars(&f);
        check_arrays(&f);

        const gguf_tensor *q8 = gguf_tensor_find(&f, "q8"), *strange = gguf_tensor_find(&f, "strange"),
                          *f32 = gguf_tensor_find(&f, "f32");
        ck_assert(q8 && strange && f32 && !gguf_tensor_find(&f, "absent") && !gguf_find(&f, "q8"));
        ck_assert(q8->n_dims == 2 && q8->dims[0] == 32 && q8->dims[1] == 2 && q8->dims[2] == 1 && q8->n_values == 64 &&
                  q8->size == 68);
        ck_assert_mem_eq(q8->data, "\0\1\2\3", 4);
        ck_assert(strange->data == NULL && strange->type == 77);
        float y[8];
        ck_assert_int_eq(dequant_rows(strange->type, strange->data, 8, y, &err), KVB_UNSUPPORTED);
        ck_assert_int_eq(dequant_rows(f32->type, f32->data, 8, y, &err), KVB_OK);
        ck_assert(y[0] == 0 && y[7] == 3.5f);
        gguf_close(&f);
        gguf_close(&f); // a closed file may be closed again
        free(copy);
        free(b.data);
    }
}

UNIT_TEST(test_every_truncation)
{
    gguf_build b;
    build_sample(&b, 3);
    for (size_t size = 0; size < b.size; size++) {
        gguf_file f;
        unsigned char *copy;
        ck_assert_msg(parse_copy(&f, &b, size, &copy) == KVB_FORMAT, "%zu of %zu bytes were taken", size, b.size);
        ck_assert_msg(strstr(err.message, "some.gguf") && (strstr(err.message, "byte")), "%s", err.message);
        free(copy);
    }
    free(b.data);
}

// Reads everything in a file that was accepted.
static void walk(const gguf_file *f)
{
    static volatile unsigned sum; // keeps the reads
    for (size_t i = 0; i < f->n_values; i++) {
        const gguf_value *v = &f->values[i];
        for (size_t k = 0; k < v->size; k++) sum += v->data[k];
        gguf_array rest = {v->element, v->count, v->data, v->size};
        gguf_string s;
        if (v->type == GGUF_VALUE_ARRAY)
            while (gguf_next_string(&rest, &s)) sum += (unsigned)s.size;
    }
    for (size_t i = 0; i < f->n_tensors; i++) {
        const gguf_tensor *t = &f->tensors[i];
        float *y = t->data && t->n_values < 1 << 20 ? malloc(t->n_values * sizeof *y) : NULL;
        if (y) ck_assert_int_eq(dequant_rows(t->type, t->data, t->n_values, y, NULL), KVB_OK);
        free(y);
    }
}

UNIT_TEST(test_every_bit_flip)
{
    gguf_build b;
    build_sample(&b, 3);
    size_t taken = 0;
    for (size_t bit = 0; bit < 8 * b.size; bit++) {
        gguf_file f;
        unsigned char *copy;
        b.data[bit / 8] ^= (unsigned char)(1 << bit % 8);
        if (parse_copy(&f, &b, b.size, &copy) == KVB_OK) {
            taken++;
            walk(&f);
            gguf_close(&f);
        } else {
            ck_assert_msg(strstr(err.message, "some.gguf"), "%s", err.message);
        }
        b.data[bit / 8] ^= (unsigned char)(1 << bit % 8);
        free(copy);
    }
    // Flips in texts, numbers and weights give another valid file; those in the magic bytes do not.
    ck_assert(taken > 0 && taken < 8 * b.size - 32);
    free(b.data);
}

UNIT_TEST(test_refused_headers)
{
    gguf_build b;
    gguf_build_begin(&b, 3);
    memcpy(b.data, "GGML", 4);
    expect_refused(&b, KVB_FORMAT, "byte 0");
    memcpy(b.data, "GGUF\1\0\0", 8);
    expect_refused(&b, KVB_UNSUPPORTED, "byte 4");
    memcpy(b.data, "GGUF\0\0\0\3", 8);
    expect_refused(&b, KVB_UNSUPPORTED, "big-endian");
    memcpy(b.data, "GGUF\4\0\0", 8);
    expect_refused(&b, KVB_VERSION, "found 4");
    memcpy(b.data, "GGUF\3\0\0", 8);
    memset(b.data + 8, 0xff, 8); // 2^64 - 1 tensors
    expect_refused(&b, KVB_FORMAT, "byte 8");
    memset(b.data + 8, 0, 8);
    memset(b.data + 16, 0x7f, 8); // metadata entries
    expect_refused(&b, KVB_FORMAT, "byte 8");
    memset(b.data + 16, 0, 8);
    gguf_file f;
    ck_assert_int_eq(gguf_parse(&f, b.data, b.size, "empty.gguf", &err), KVB_OK); // nothing in it, but well-formed
    ck_assert(gguf_find(&f, "x") == NULL && gguf_tensor_find(&f, "x") == NULL);
    gguf_close(&f);
    free(b.data);
}

// A key or a tensor with one fault.
typedef struct gguf_fault {
    const char *key; // NULL: a tensor
    uint32_t type;   // of the value, or of the tensor
    uint64_t value;  // of the key: u32, or u64 if the type is 8 bytes wide
    uint32_t n_dims;
    uint64_t dims[5], offset;
    const char *name; // of the tensor
    const char *part;
} gguf_fault;

static const gguf_fault faults[] = {
    {.key = "", .type = 4, .value = 1, .part = "a key of 1 to 65535 bytes"},
    {.key = "a\033[2J", .type = 4, .value = 1, .part = "0x1b"},
    {.key = "k", .type = 13, .part = "value type"},
    {.key = "k", .type = 8, .value = UINT64_MAX, .part = "18446744073709551615 more bytes"},
    {.key = "general.alignment", .type = 4, .value = 48, .part = "general.alignment"},
    {.key = "general.alignment", .type = 4, .value = 0, .part = "general.alignment"},
    {.key = "general.alignment", .type = 8, .value = 0, .part = "general.alignment"},
    {.name = "t", .n_dims = 0, .part = "1 to 4 dimensions"},
    {.name = "t", .n_dims = 5, .dims = {1, 1, 1, 1, 1}, .part = "1 to 4 dimensions"},
    {.name = "t", .n_dims = 2, .dims = {8, 0}, .part = "dimension 1 is 0"},
    {.name = "t", .n_dims = 3, .dims = {1u << 31, 1u << 31, 1u << 31}, .part = "tensor t"},
    {.name = "t", .n_dims = 1, .dims = {(uint64_t)1 << 62}, .part = "tensor t"},
    {.name = "t", .n_dims = 1, .dims = {8}, .type = GGUF_TENSOR_Q8_0, .part = "multiple of 32"},
    {.name = "t", .n_dims = 4, .dims = {256, 1, 1, 1}, .part = "tensor t: expected 1024 bytes"},
    {.name = "t", .n_dims = 1, .dims = {8}, .offset = 4, .part = "multiple of 32"},
    {.name = "t", .n_dims = 1, .dims = {8}, .offset = UINT64_MAX - 31, .part = "tensor t: expected 32 bytes"},
    {.name = "0123456789012345678901234567890123456789012345678901234567890123456789",
     .n_dims = 1,
     .dims = {8},
     .part = "1 to 64 bytes"},
};

static void add_fault(gguf_build *b, const gguf_fault *fault)
{
    if (fault->name) {
        b->data_offset = fault->offset;
        build_tensor(b, fault->name, fault->n_dims, fault->dims, fault->type, 32);
        return;
    }
    build_key(b, fault->key, fault->type);
    if (fault->type == 8) build_u64(b, fault->value);
    else build_u32(b, (uint32_t)fault->value);
}

static void fault_array_count(gguf_build *b)
{
    build_key_array(b, "k", 4, UINT64_MAX / 4);
    build_u32(b, 1);
}

static void fault_string_count(gguf_build *b)
{
    build_key_array(b, "k", 8, 1000);
    build_u32(b, 1);
}

static void fault_array_type(gguf_build *b)
{
    build_key_array(b, "k", 13, 0);
}

static void fault_twice(gguf_build *b)
{
    build_key_u32(b, "k", 1);
    build_key_u32(b, "j", 1);
    build_key_u32(b, "k", 2);
}

static void fault_depth(gguf_build *b)
{
    build_key_array(b, "k", 9, 1);
    for (int i = 0; i < 50; i++) build_u32(b, 9), build_u64(b, 1);
}

static void fault_tensor_twice(gguf_build *b)
{
    build_tensor(b, "t", 1, vector, 0, 0);
    build_tensor(b, "t", 1, vector, 0, 0);
}

UNIT_TEST(test_refused_contents)
{
    const struct {
        void (*build)(gguf_build *b);
        kvb_status status;
        const char *part;
    } others[] = {{fault_array_count, KVB_FORMAT, "claims 4611686018427387903 elements of type u32"},
                  {fault_string_count, KVB_FORMAT, "claims 1000 elements of type string"},
                  {fault_array_type, KVB_FORMAT, "value type"},
                  {fault_twice, KVB_FORMAT, "key k is in the file twice"},
                  {fault_depth, KVB_UNSUPPORTED, "nested"},
                  {fault_tensor_twice, KVB_FORMAT, "tensor t is in the file twice"}};
    enum { N_FAULTS = sizeof faults / sizeof *faults, N_OTHERS = sizeof others / sizeof *others };
    for (size_t i = 0; i < N_FAULTS + N_OTHERS; i++) {
        bool other = i >= N_FAULTS;
        gguf_build b;
        gguf_build_begin(&b, 3);
        if (other) others[i - N_FAULTS].build(&b);
        else add_fault(&b, &faults[i]);
        build_pad(&b);
        for (int k = 0; k < 16; k++) build_u32(&b, 0);
        expect_refused(&b, other ? others[i - N_FAULTS].status : KVB_FORMAT,
                       other ? others[i - N_FAULTS].part : faults[i].part);
        free(b.data);
    }
}

UNIT_TEST(test_alignment)
{
    gguf_build b;
    gguf_file f;
    gguf_build_begin(&b, 3);
    build_key_u32(&b, "general.alignment", 8);
    b.data_offset = 8; // not a multiple of 32
    build_tensor(&b, "t", 1, vector, 0, 32);
    while (b.size % 8) build_bytes(&b, "", 1);
    size_t start = b.size;
    build_u64(&b, 0);
    for (int i = 0; i < 8; i++) build_f32(&b, 1);
    ck_assert_msg(gguf_parse(&f, b.data, b.size, "x", &err) == KVB_OK, "%s", err.message);
    ck_assert_ptr_eq(gguf_tensor_find(&f, "t")->data, b.data + start + 8);
    gguf_close(&f);
    free(b.data);
}

// 200,000 keys, found one by one: seconds if lookups walked the list, and hours if duplicates were looked for pairwise.
UNIT_TEST(test_many_keys)
{
    enum { KEYS = 200000 };
    gguf_build b;
    gguf_file f;
    char key[32];
    gguf_build_begin(&b, 3);
    for (uint32_t i = 0; i < KEYS; i++) {
        snprintf(key, sizeof key, "key.%u", i * 7919 % KEYS);
        build_key_u32(&b, key, i);
    }
    ck_assert_int_eq(gguf_parse(&f, b.data, b.size, "x", &err), KVB_OK);
    for (uint32_t i = 0; i < KEYS; i++) {
        uint32_t found = 0;
        snprintf(key, sizeof key, "key.%u", i * 7919 % KEYS);
        ck_assert_int_eq(gguf_get_u32(&f, key, &found, &err), KVB_OK);
        ck_assert_uint_eq(found, i);
    }
    gguf_close(&f);
    free(b.data);
}

UNIT_TEST(test_open)
{
    const char *path = help_path("m.gguf");
    gguf_file f;
    gguf_build b;
    ck_assert_int_eq(gguf_open(&f, path, &err), KVB_IO);
    ck_assert_int_ne(gguf_open(&f, help_folder, &err), KVB_OK);
    build_sample(&b, 3);
    for (size_t cut = 0; cut < 2; cut++) {
        help_spew(path, b.data, b.size - cut);
        ck_assert_int_eq(gguf_open(&f, path, &err), cut ? KVB_FORMAT : KVB_OK);
        ck_assert(cut ? strstr(err.message, path) != NULL : strcmp(f.name, path) == 0);
        gguf_close(&f);
    }
    free(b.data);
}

UNIT_TEST(test_names)
{
    unit_strings(gguf_tensor_type_name(GGUF_TENSOR_BF16), "BF16", gguf_tensor_type_name(GGUF_TENSOR_Q6_K), "Q6_K",
                 gguf_tensor_type_name(GGUF_TENSOR_Q8_0), "Q8_0", gguf_tensor_type_name(23), "IQ4_XS",
                 gguf_tensor_type_name(4), "unknown");
    unit_strings(gguf_tensor_type_name(UINT32_MAX), "unknown", gguf_value_type_name(GGUF_VALUE_F64), "f64",
                 gguf_value_type_name(13), "unknown");
    gguf_file f;
    char name[600];
    memset(name, 'p', sizeof name - 1);
    name[sizeof name - 1] = 0;
    ck_assert_int_eq(gguf_parse(&f, "", 0, name, &err), KVB_FORMAT);
    ck_assert_int_eq(gguf_parse(&f, "", 0, name, NULL), KVB_FORMAT);
}

UNIT_MAIN_EACH("profiler: gguf", help_setup, help_teardown)
