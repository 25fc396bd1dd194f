// The .npy reader and writer: headers as numpy makes them, every type converted, and each kind of damage refused.
#include "formats/npy.h"
#include "formats_help.h"

// Returns a file with this version, header text and data, which the caller frees.
static unsigned char *make(size_t *size, int major, const char *header, const void *data, size_t data_size)
{
    size_t n = strlen(header), prefix = major == 1 ? 10 : 12;
    *size = prefix + n + data_size;
    unsigned char *p = malloc(*size);
    memcpy(p, "\x93NUMPY", 6);
    p[6] = (unsigned char)major;
    p[7] = 0;
    for (size_t i = 8; i < prefix; i++) p[i] = (unsigned char)(n >> 8 * (i - 8));
    memcpy(p + prefix, header, n);
    if (data_size) memcpy(p + prefix + n, data, data_size);
    return p;
}

static kvb_status parse(npy_array *out, int major, const char *header, size_t data_size, kvb_error *err)
{
    static const unsigned char zeros[256];
    size_t size;
    unsigned char *p = make(&size, major, header, zeros, data_size);
    kvb_status status = npy_parse(out, p, size, "x.npy", err);
    free(p);
    return status;
}

UNIT_TEST(headers)
{
    npy_array a;
    help_ok(parse(&a, 1, "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), }          \n", 48, err));
    ck_assert(a.type == NPY_F64 && a.n_dims == 2 && a.shape[0] == 2 && a.shape[1] == 3 && a.count == 6);
    help_ok(parse(&a, 2, "{\"shape\":(5,),\"fortran_order\":False,\"descr\":\"<f4\"}", 20, err));
    ck_assert(a.type == NPY_F32 && a.n_dims == 1 && a.count == 5);
    help_ok(parse(&a, 3, "{'descr': '<i8', 'fortran_order': False, 'shape': (), }\n", 8, err));
    ck_assert(a.type == NPY_I64 && a.n_dims == 0 && a.count == 1);
    help_ok(parse(&a, 1, "{'descr': '<i4', 'fortran_order': False, 'shape': (0, 99999999999, 99999999999)}", 0, err));
    ck_assert_uint_eq(a.count, 0);
    static const struct {
        kvb_status status;
        const char *header, *message;
        int major;
    } bad[] = {
        {KVB_UNSUPPORTED, "{'descr': '<f8', 'fortran_order': True, 'shape': (6,)}", "ascontiguousarray", 1},
        {KVB_UNSUPPORTED, "{'descr': '>f8', 'fortran_order': False, 'shape': (6,)}", ">f8", 1},
        {KVB_UNSUPPORTED, "{'descr': '|O', 'fortran_order': False, 'shape': (6,)}", "|O", 1},
        {KVB_FORMAT, "{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (6,)}", "plain type", 1},
        {KVB_FORMAT, "{'descr': '<f8', 'shape': (6,)}", "fortran_order is missing", 1},
        {KVB_FORMAT, "{'fortran_order': False, 'shape': (6,)}", "descr is missing", 1},
        {KVB_FORMAT, "{'descr': '<f8', 'fortran_order': False}", "shape is missing", 1},
        {KVB_FORMAT, "{'descr': '<f8', 'fortran_order': False, 'shape': (6)}", "byte", 1},
        {KVB_FORMAT, "{'descr': '<f8', 'fortran_order': False, 'shape': (-6,)}", "byte", 1},
        {KVB_FORMAT, "{'descr': '<f8', 'fortran_order': False, 'shape': (1,2,3,4,5,6,7,8,9)}", "byte", 1},
        {KVB_FORMAT, "{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999999,)}", "byte", 1},
        {KVB_FORMAT, "{'descr': '<f8', 'fortran_order': False, 'shape': (4294967296,4294967296)}", "bytes of data", 1},
        {KVB_FORMAT, "{'descr': '<f8', 'fortran_order': False, 'shape': (2305843009213693952,)}", "bytes of data", 1},
        {KVB_FORMAT, "{'descr': '<f8', 'fortran_order': False, 'shape': (5,)}", "40 bytes of data", 1},
        {KVB_FORMAT, "{'descr': '<f8', 'fortran_order': False, 'shape': (7,)}", "56 bytes of data", 1},
        {KVB_FORMAT, "{'descr': '<f8', 'fortran_order': False, 'shape': (6,)} x", "byte", 1},
        {KVB_FORMAT, "", "byte 10", 1},
        {KVB_FORMAT, "{", "byte 10", 1},
        {KVB_FORMAT, "{'descr", "byte", 1},
        {KVB_VERSION, "{'descr': '<f8', 'fortran_order': False, 'shape': (6,)}", "version 4.0", 4},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        help_fails(parse(&a, bad[i].major, bad[i].header, 48, err), bad[i].status, bad[i].message);
}

UNIT_TEST(write_and_read)
{
    const double values[6] = {0, -0.0, 1e300, 3.5, -7, 1.0 / 3};
    const uint64_t shape[3] = {1, 2, 3};
    const char *path = help_path("a.npy");
    help_ok(npy_write(path, NPY_F64, 3, shape, values, err));
    size_t size;
    unsigned char *data = help_slurp(path, &size);
    ck_assert_uint_eq(size, 128 + 48);
    static const char expected[] =
        "\x93NUMPY\x01\0\x76\0{'descr': '<f8', 'fortran_order': False, 'shape': (1, 2, 3), }";
    ck_assert(memcmp(data, expected, sizeof expected - 1) == 0 && data[127] == '\n');
    npy_array a;
    help_ok(npy_parse(&a, data, size, path, err));
    double back[6];
    help_ok(npy_to_f64(&a, back, path, err));
    ck_assert(memcmp(back, values, sizeof back) == 0);
    float single[6];
    help_ok(npy_to_f32(&a, single, path, err));
    ck_assert(single[3] == 3.5F && isinf(single[2]));
    help_fails(npy_to_i32(&a, (int32_t[6]){0}, path, err), KVB_UNSUPPORTED, "<f8");
    free(data);
    const int64_t big[3] = {-5, INT32_MAX, INT64_C(1) << 40};
    for (uint64_t n = 0; n <= 3; n++) { // one dimension of 0 to 3 elements
        help_ok(npy_write(path, NPY_I64, 1, &n, big, err));
        data = help_slurp(path, &size);
        help_ok(npy_parse(&a, data, size, path, err));
        int32_t ids[3];
        if (n < 3) help_ok(npy_to_i32(&a, ids, path, err));
        if (n == 2) ck_assert(ids[0] == -5 && ids[1] == INT32_MAX);
        if (n == 3) help_fails(npy_to_i32(&a, ids, path, err), KVB_NUMERIC, "element 2");
        help_fails(npy_to_f32(&a, single, path, err), KVB_UNSUPPORTED, "<i8");
        if (n == 3) help_ok(npy_to_f64(&a, back, path, err));
        free(data);
    }
    help_ok(npy_write(path, NPY_F32, 0, NULL, single, err));
    help_fails(npy_write(path, NPY_F32, 9, shape, single, err), KVB_ARGUMENT, "9 dimensions");
}

UNIT_TEST(damage)
{
    const int32_t values[4] = {1, 2, 3, 4};
    const uint64_t shape[2] = {2, 2};
    help_ok(npy_write(help_path("a.npy"), NPY_I32, 2, shape, values, err));
    size_t size, refused = 0;
    unsigned char *good = help_slurp(help_path("a.npy"), &size);
    for (size_t i = 0; i < size + 8 * size; i++) {
        size_t length = i < size ? i : size;
        unsigned char *copy = malloc(length ? length : 1);
        memcpy(copy, good, length);
        if (i >= size) copy[(i - size) / 8] ^= (unsigned char)(1 << (i - size) % 8);
        npy_array a;
        kvb_error e;
        if (npy_parse(&a, copy, length, "a.npy", &e) == KVB_OK) {
            double *out = malloc(a.count * sizeof *out + 1);
            npy_to_f64(&a, out, "a.npy", NULL);
            free(out);
            ck_assert_uint_eq(length, size);
        } else {
            refused++;
            ck_assert_msg(strstr(e.message, "a.npy: ") && (strstr(e.message, "byte") || strstr(e.message, "header")),
                          "%s", e.message);
        }
        free(copy);
    }
    ck_assert_uint_ge(refused, size + 8 * 50);
    free(good);
}

UNIT_MAIN_EACH("formats_npy", help_setup, help_teardown)
