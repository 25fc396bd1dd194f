#include "h5_io.h"
#include "file_read.h"
#include "runtime/fail.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// HDF5 1.10 loses a buffer whenever a checksum is wrong; the leak checker of the sanitized builds need not say so each
// time.
#if defined(__SANITIZE_ADDRESS__)
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:libhdf5";
}
__attribute__((visibility("default"))) const char *__lsan_default_options(void);
const char *__lsan_default_options(void)
{
    return "print_suppressions=0";
}
#endif

// ---- Errors ----

h5_error_printing h5_quiet(void)
{
    h5_error_printing before = {NULL, NULL};
    // At exit HDF5 would print that it cannot free what it lost when it met a damaged file. Every file is closed by us.
    H5dont_atexit();
    H5Eget_auto2(H5E_DEFAULT, &before.print, &before.data);
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    return before;
}

void h5_loud(h5_error_printing before)
{
    H5Eset_auto2(H5E_DEFAULT, before.print, before.data);
}

// HDF5 walks its stack from the call that failed first, which is the one that knows why.
static herr_t take_first(unsigned n, const H5E_error2_t *e, void *text)
{
    if (n == 0 && e->desc) snprintf(text, 128, "%s", e->desc);
    return 0;
}

static kvb_status fail_text(kvb_error *err, kvb_status status, const char *file, const char *path, const char *what,
                            const char *reason)
{
    return kvb_fail(err, status, "%s: %s: %s%s%s%s", file, path, what, reason[0] ? " (HDF5: " : "", reason,
                    reason[0] ? ")" : "");
}

kvb_status h5_fail(kvb_error *err, kvb_status status, const char *file, hid_t at, const char *name, const char *what,
                   ...)
{
    // The reason must be taken before anything else is asked of HDF5: each call clears the stack.
    char reason[128] = "", text[256], parent[256] = "", path[400];
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, take_first, reason);
    va_list args;
    va_start(args, what);
    vsnprintf(text, sizeof text, what, args);
    va_end(args);
    if (at >= 0) {
        H5Iget_name(at, parent, sizeof parent);
        if (strcmp(parent, "/") == 0) parent[0] = '\0';
        if (name) snprintf(path, sizeof path, "%s/%.128s", parent, name);
        else snprintf(path, sizeof path, "%s", parent[0] ? parent : "/");
    } else {
        snprintf(path, sizeof path, "%s", name ? name : "/");
    }
    return fail_text(err, status, file, path, text, reason);
}

void h5_release(hid_t id)
{
    if (id <= 0) return;
    switch (H5Iget_type(id)) {
    case H5I_GROUP:
        H5Gclose(id);
        break;
    case H5I_DATASET:
        H5Dclose(id);
        break;
    case H5I_ATTR:
        H5Aclose(id);
        break;
    default:
        H5Oclose(id);
    }
}

// ---- Files ----

// The format of HDF5 1.10, whose metadata (unlike older ones) carry checksums throughout, whatever the library's
// version; and no lock: a record is never open for writing under its final name, and some network file systems have no
// locks.
static hid_t access_list(void)
{
    hid_t fapl = H5Pcreate(H5P_FILE_ACCESS);
    if (fapl >= 0 && (H5Pset_libver_bounds(fapl, H5F_LIBVER_V110, H5F_LIBVER_V110) < 0 ||
                      H5Pset_file_locking(fapl, 0, 1) < 0 || H5Pset_fclose_degree(fapl, H5F_CLOSE_STRONG) < 0)) {
        H5Pclose(fapl);
        fapl = -1;
    }
    return fapl;
}

static kvb_status reserve(const char *path, const char *name, uint64_t bytes, kvb_error *err)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    int why = fd < 0 ? errno : posix_fallocate(fd, 0, (off_t)bytes);
    if (fd >= 0) close(fd);
    if (why)
        return kvb_fail(err, KVB_IO, "%s: cannot reserve %llu bytes on the disk: %s", name, (unsigned long long)bytes,
                        strerror(why));
    return KVB_OK;
}

kvb_status h5_create(h5_file *out, const char *path, const char *name, uint64_t bytes, kvb_error *err)
{
    *out = (h5_file){-1, name, bytes};
    kvb_status status = KVB_OK;
    hid_t fapl = access_list(), fcpl = H5Pcreate(H5P_FILE_CREATE), file = -1;
    if (fapl < 0 || fcpl < 0 || H5Pset_obj_track_times(fcpl, 0) < 0) {
        status = h5_fail(err, KVB_MEMORY, name, -1, NULL, "cannot set up HDF5");
        goto done;
    }
    status = reserve(path, name, bytes, err);
    if (status != KVB_OK) goto done;
    file = H5Fcreate(path, H5F_ACC_TRUNC, fcpl, fapl);
    if (file < 0 || H5Fclose(file) < 0) {
        status = h5_fail(err, KVB_IO, name, -1, NULL, "cannot make the HDF5 file");
        goto done;
    }
    status = reserve(path, name, bytes, err); // again, since making the file gave the reserve back
    if (status != KVB_OK) goto done;
    out->id = H5Fopen(path, H5F_ACC_RDWR, fapl);
    if (out->id < 0) status = h5_fail(err, KVB_IO, name, -1, NULL, "cannot open the HDF5 file just made");
done:
    if (fcpl >= 0) H5Pclose(fcpl);
    if (fapl >= 0) H5Pclose(fapl);
    return status;
}

kvb_status h5_close(h5_file *f, kvb_error *err)
{
    if (f->id < 0) return KVB_OK;
    hid_t id = f->id;
    f->id = -1;
    if (H5Fclose(id) < 0) return h5_fail(err, KVB_IO, f->name, -1, NULL, "cannot write the HDF5 file to its end");
    return KVB_OK;
}

// Only superblocks 2 and 3 are let in: with them HDF5 reads nothing whose checksum it has not verified, while the older
// format has no checksums and HDF5 1.10 is known to crash on damaged files of that kind.
static kvb_status check_superblock(const unsigned char *data, size_t size, const char *name, kvb_error *err)
{
    static const unsigned char signature[8] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};
    if (size < 48 || memcmp(data, signature, sizeof signature) != 0)
        return kvb_fail(err, KVB_FORMAT, "%s: byte 0: expected the signature of an HDF5 file", name);
    if (data[8] != 2 && data[8] != 3)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s: byte 8: HDF5 superblock version %u, expected 2 or 3; write it with library bounds v110 "
                        "(h5py: libver='v110')",
                        name, data[8]);
    return KVB_OK;
}

kvb_status h5_open(h5_file *out, const char *path, kvb_error *err)
{
    *out = (h5_file){-1, path, 0};
    file_view view;
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    status = check_superblock(view.data, view.size, path, err);
    out->size = view.size;
    file_unmap(&view);
    if (status != KVB_OK) return status;
    hid_t fapl = access_list();
    out->id = fapl < 0 ? -1 : H5Fopen(path, H5F_ACC_RDONLY, fapl);
    if (out->id < 0) status = h5_fail(err, KVB_FORMAT, path, -1, NULL, "damaged, or not an HDF5 file");
    if (fapl >= 0) H5Pclose(fapl);
    return status;
}

kvb_status h5_open_memory(h5_file *out, const void *data, size_t size, const char *name, kvb_error *err)
{
    *out = (h5_file){-1, name, size};
    kvb_status status = check_superblock(data, size, name, err);
    if (status != KVB_OK) return status;
    hid_t fapl = access_list();
    // The image is copied; HDF5's prototype merely lacks the const.
    if (fapl >= 0 && H5Pset_fapl_core(fapl, 1 << 16, 0) >= 0 &&
        H5Pset_file_image(fapl, (void *)(uintptr_t)data, size) >= 0)
        out->id = H5Fopen(name, H5F_ACC_RDONLY, fapl);
    if (out->id < 0) status = h5_fail(err, KVB_FORMAT, name, -1, NULL, "damaged, or not an HDF5 file");
    if (fapl >= 0) H5Pclose(fapl);
    return status;
}

// ---- Attributes ----

static kvb_status put_attribute(const h5_file *f, hid_t object, const char *name, hid_t type, hid_t memory_type,
                                const void *value, kvb_error *err)
{
    hid_t space = H5Screate(H5S_SCALAR);
    hid_t attribute = type < 0 || space < 0 ? -1 : H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    kvb_status status = KVB_OK;
    if (attribute < 0 || H5Awrite(attribute, memory_type, value) < 0)
        status = h5_fail(err, KVB_IO, f->name, object, name, "cannot write the attribute");
    if (attribute >= 0) H5Aclose(attribute);
    if (space >= 0) H5Sclose(space);
    return status;
}

// Texts have their own length: HDF5's variable-length strings live in a heap without checksums.
kvb_status h5_put_text(const h5_file *f, hid_t object, const char *name, const char *text, kvb_error *err)
{
    hid_t type = H5Tcopy(H5T_C_S1);
    kvb_status status;
    if (type < 0 || H5Tset_size(type, strlen(text) + 1) < 0 || H5Tset_cset(type, H5T_CSET_UTF8) < 0)
        status = h5_fail(err, KVB_MEMORY, f->name, object, name, "cannot make the type of this text");
    else status = put_attribute(f, object, name, type, type, text, err);
    if (type >= 0) H5Tclose(type);
    return status;
}

kvb_status h5_put_u32(const h5_file *f, hid_t object, const char *name, uint32_t value, kvb_error *err)
{
    return put_attribute(f, object, name, H5T_STD_U32LE, H5T_NATIVE_UINT32, &value, err);
}

// An enumeration, which is h5py's way of storing a boolean.
static kvb_status put_bool(const h5_file *f, hid_t object, const char *name, bool value, kvb_error *err)
{
    const int8_t no = 0, yes = 1;
    hid_t type = H5Tenum_create(H5T_STD_I8LE);
    kvb_status status;
    if (type < 0 || H5Tenum_insert(type, "FALSE", &no) < 0 || H5Tenum_insert(type, "TRUE", &yes) < 0)
        status = h5_fail(err, KVB_MEMORY, f->name, object, name, "cannot make the type of this boolean");
    else status = put_attribute(f, object, name, type, type, value ? &yes : &no, err);
    if (type >= 0) H5Tclose(type);
    return status;
}

static kvb_status put_number(const h5_file *f, hid_t object, const char *name, double x, kvb_error *err)
{
    int64_t whole = fabs(x) <= 9007199254740992.0 ? (int64_t)x : 0;
    if ((double)whole == x && !(x == 0 && signbit(x))) // -0.0 has no integer
        return put_attribute(f, object, name, H5T_STD_I64LE, H5T_NATIVE_INT64, &whole, err);
    return put_attribute(f, object, name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, &x, err);
}

kvb_status h5_put_json(const h5_file *f, hid_t object, const cJSON *value, kvb_error *err)
{
    if (cJSON_IsString(value)) return h5_put_text(f, object, value->string, value->valuestring, err);
    if (cJSON_IsNumber(value)) return put_number(f, object, value->string, value->valuedouble, err);
    return put_bool(f, object, value->string, cJSON_IsTrue(value), err);
}

static cJSON *read_text(hid_t attribute, hid_t type)
{
    size_t size = H5Tget_size(type);
    if (H5Tis_variable_str(type) != 0 || size == 0 || size > MAX_TEXT_ATTRIBUTE) return NULL;
    char *text = calloc(size + 1, 1);
    cJSON *value = text && H5Aread(attribute, type, text) >= 0 ? cJSON_CreateString(text) : NULL;
    free(text);
    return value;
}

static cJSON *read_attribute(hid_t attribute, hid_t type)
{
    int64_t whole;
    double real;
    int8_t yes;
    size_t size = H5Tget_size(type);
    switch (H5Tget_class(type)) {
    case H5T_STRING:
        return read_text(attribute, type);
    case H5T_INTEGER:
        if (size > 8 || H5Aread(attribute, H5T_NATIVE_INT64, &whole) < 0) return NULL;
        return cJSON_CreateNumber((double)whole);
    case H5T_FLOAT:
        if (size > 8 || H5Aread(attribute, H5T_NATIVE_DOUBLE, &real) < 0) return NULL;
        return isfinite(real) ? cJSON_CreateNumber(real) : NULL;
    case H5T_ENUM:
        if (size != 1 || H5Aread(attribute, type, &yes) < 0) return NULL;
        return cJSON_CreateBool(yes);
    default:
        return NULL;
    }
}

static cJSON *open_and_read_attribute(hid_t object, const char *name)
{
    hid_t attribute = H5Aopen(object, name, H5P_DEFAULT);
    hid_t type = attribute < 0 ? -1 : H5Aget_type(attribute);
    hid_t space = type < 0 ? -1 : H5Aget_space(attribute);
    cJSON *value = NULL;
    if (space >= 0 && H5Sget_simple_extent_type(space) == H5S_SCALAR) value = read_attribute(attribute, type);
    if (space >= 0) H5Sclose(space);
    if (type >= 0) H5Tclose(type);
    if (attribute >= 0) H5Aclose(attribute);
    return value;
}

kvb_status h5_get_u32(uint32_t *out, const h5_file *f, hid_t object, const char *name, kvb_error *err)
{
    cJSON *value = H5Aexists(object, name) > 0 ? open_and_read_attribute(object, name) : NULL;
    double x = cJSON_IsNumber(value) ? value->valuedouble : -1;
    cJSON_Delete(value);
    if (!(x >= 0 && x <= UINT32_MAX) || x != (double)(uint32_t)x)
        return h5_fail(err, KVB_FORMAT, f->name, object, name, "expected an attribute, a whole number of 32 bits");
    *out = (uint32_t)x;
    return KVB_OK;
}

typedef struct attribute_walk {
    const h5_file *f;
    cJSON *into;
    kvb_error *err;
    kvb_status status;
} attribute_walk;

static herr_t take_attribute(hid_t object, const char *name, const H5A_info_t *info, void *data)
{
    (void)info;
    attribute_walk *walk = data;
    cJSON *value = open_and_read_attribute(object, name);
    if (value && cJSON_AddItemToObject(walk->into, name, value)) return 0;
    cJSON_Delete(value);
    walk->status = h5_fail(walk->err, KVB_FORMAT, walk->f->name, object, name,
                           "damaged attribute, or not a number, a boolean or a text of fixed length (at most 1 MiB)");
    return -1;
}

kvb_status h5_get_json(cJSON **out, const h5_file *f, hid_t object, kvb_error *err)
{
    attribute_walk walk = {f, cJSON_CreateObject(), err, KVB_OK};
    *out = NULL;
    if (!walk.into) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory", f->name);
    hsize_t position = 0;
    if (H5Aiterate2(object, H5_INDEX_NAME, H5_ITER_INC, &position, take_attribute, &walk) < 0 && walk.status == KVB_OK)
        walk.status = h5_fail(err, KVB_FORMAT, f->name, object, NULL, "cannot read the attributes");
    if (walk.status != KVB_OK) {
        cJSON_Delete(walk.into);
        return walk.status;
    }
    *out = walk.into;
    return KVB_OK;
}
