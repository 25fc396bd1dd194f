#include "formats/h5.h"
#include "formats/file_read.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "runtime/fail.h"
#include "runtime/text.h"
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
    bool no_memory = errno == ENOMEM; // HDF5's or a callback's malloc failed: then nothing is damaged
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
    if (no_memory && status == KVB_FORMAT)
        return fail_text(err, KVB_MEMORY, file, path, "not enough memory to read this", reason);
    return fail_text(err, status, file, path, text, reason);
}

static herr_t close_object(hid_t id)
{
    switch (H5Iget_type(id)) {
    case H5I_GROUP:
        return H5Gclose(id);
    case H5I_DATASET:
        return H5Dclose(id);
    case H5I_ATTR:
        return H5Aclose(id);
    default:
        return H5Oclose(id);
    }
}

void h5_release(hid_t id)
{
    if (id > 0) (void)close_object(id); // only read: nothing is lost
}

kvb_status h5_end(const h5_file *f, hid_t id, kvb_status status, kvb_error *err)
{
    if (id <= 0 || close_object(id) >= 0 || status != KVB_OK) return status;
    return h5_fail(err, KVB_IO, f->name, -1, NULL, "cannot write");
}

// ---- Attributes ----

// Adds one attribute to a tally; `object` may be any open object.
static kvb_status tally_add(h5_tally *t, const h5_file *f, hid_t object, const char *name, const void *bytes,
                            size_t size, kvb_error *err)
{
    char path[512] = "", hex[65];
    if (H5Iget_name(object, path, sizeof path) < 0) return h5_fail(err, KVB_FORMAT, f->name, -1, name, "has no path");
    sha256_state *s = sha256_begin();
    sha256_add(s, path, strlen(path) + 1);
    sha256_add(s, name, strlen(name) + 1);
    sha256_add(s, bytes, size);
    sha256_end(s, hex);
    for (size_t i = 0; i < sizeof t->sum; i++) t->sum[i] ^= (unsigned char)hex[i];
    t->n++;
    return KVB_OK;
}

static kvb_status put_attribute(const h5_file *f, hid_t object, const char *name, hid_t type, hid_t memory_type,
                                const void *value, kvb_error *err)
{
    hid_t space = H5Screate(H5S_SCALAR);
    hid_t attribute = type < 0 || space < 0 ? -1 : H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    kvb_status status = KVB_OK;
    if (attribute < 0 || H5Awrite(attribute, memory_type, value) < 0)
        status = h5_fail(err, KVB_IO, f->name, object, name, "cannot write the attribute");
    status = h5_end(f, attribute, status, err);
    if (space >= 0) (void)H5Sclose(space); // in memory, as are types
    // Little-endian in the file as in memory, so the bytes are those that reading back will find.
    if (status == KVB_OK && f->tally)
        status = tally_add(f->tally, f, object, name, value, H5Tget_size(memory_type), err);
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
    if (type >= 0) (void)H5Tclose(type);
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
    if (type >= 0) (void)H5Tclose(type);
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

static cJSON *read_text_attribute(hid_t attribute, hid_t type)
{
    size_t size = H5Tget_size(type);
    if (H5Tis_variable_str(type) != 0 || size == 0 || size > MAX_TEXT_ATTRIBUTE) return NULL;
    char *text = need(size + 1, 1, "characters of an attribute"); // at most MAX_TEXT_ATTRIBUTE
    cJSON *value = H5Aread(attribute, type, text) >= 0 ? cJSON_CreateString(text) : NULL;
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
        return read_text_attribute(attribute, type);
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
    if (space >= 0) (void)H5Sclose(space);
    if (type >= 0) (void)H5Tclose(type);
    if (attribute >= 0) (void)H5Aclose(attribute);
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

// ---- Groups ----

// A list of creation properties without time stamps; < 0: no memory.
static hid_t no_times(hid_t property_class)
{
    hid_t list = H5Pcreate(property_class);
    if (list >= 0 && H5Pset_obj_track_times(list, 0) < 0) {
        (void)H5Pclose(list);
        list = -1;
    }
    return list;
}

kvb_status h5_make_group(hid_t *out, const h5_file *f, hid_t parent, const char *name, kvb_error *err)
{
    hid_t list = no_times(H5P_GROUP_CREATE);
    *out = list < 0 ? -1 : H5Gcreate2(parent, name, H5P_DEFAULT, list, H5P_DEFAULT);
    kvb_status status = KVB_OK;
    if (*out < 0) status = h5_fail(err, KVB_IO, f->name, parent, name, "cannot make the group");
    else if (f->tally) status = tally_add(f->tally, f, *out, "", NULL, 0, err);
    if (list >= 0) (void)H5Pclose(list);
    return status;
}

bool h5_has_link(hid_t group, const char *name)
{
    return H5Lexists(group, name, H5P_DEFAULT) > 0;
}

// Soft and external links are refused: an external one would make HDF5 open any other file.
static kvb_status open_any(hid_t *out, const h5_file *f, hid_t parent, const char *name, const char *expected,
                           kvb_error *err)
{
    *out = -1;
    if (!h5_has_link(parent, name))
        return h5_fail(err, KVB_FORMAT, f->name, parent, name, "is missing, expected %s", expected);
    H5L_info_t link;
    if (H5Lget_info(parent, name, &link, H5P_DEFAULT) < 0 || link.type != H5L_TYPE_HARD)
        return h5_fail(err, KVB_UNSUPPORTED, f->name, parent, name, "expected %s, found a link to elsewhere", expected);
    *out = H5Oopen(parent, name, H5P_DEFAULT);
    return *out < 0 ? h5_fail(err, KVB_FORMAT, f->name, parent, name, "damaged") : KVB_OK;
}

kvb_status h5_open_group(hid_t *out, const h5_file *f, hid_t parent, const char *name, kvb_error *err)
{
    kvb_status status = open_any(out, f, parent, name, "a group", err);
    if (status != KVB_OK || H5Iget_type(*out) == H5I_GROUP) return status;
    status = h5_fail(err, KVB_FORMAT, f->name, parent, name, "expected a group");
    h5_release(*out);
    *out = -1;
    return status;
}

typedef struct name_list {
    char **names;
    size_t n, capacity;
} name_list;

static herr_t take_name(hid_t group, const char *name, const H5L_info_t *info, void *data)
{
    (void)group;
    (void)info;
    name_list *list = data;
    if (list->n + 1 >= list->capacity) {
        list->capacity = list->capacity ? 2 * list->capacity : 16;
        list->names = need_more(list->names, list->capacity, sizeof *list->names, "names in a record");
    }
    list->names[list->n++] = need_text("%s", name);
    list->names[list->n] = NULL;
    return 0;
}

kvb_status h5_list(char ***names, size_t *n, const h5_file *f, hid_t group, kvb_error *err)
{
    name_list list = {need(1, sizeof(char *), "names in a record"), 0, 1};
    hsize_t position = 0;
    *names = NULL;
    *n = 0;
    if (H5Literate(group, H5_INDEX_NAME, H5_ITER_INC, &position, take_name, &list) < 0) {
        kvb_status status = h5_fail(err, KVB_FORMAT, f->name, group, NULL, "cannot read the names in this group");
        h5_free_names(list.names);
        return status;
    }
    *names = list.names;
    *n = list.n;
    return KVB_OK;
}

void h5_free_names(char **names)
{
    for (size_t i = 0; names && names[i]; i++) free(names[i]);
    free(names);
}

// ---- Writing arrays ----

// Feeds a layer of `size` bytes to the checksum of a set.
static void sum_layer(h5_set *set, const void *layer, size_t size)
{
    if (!set->sum) set->sum = sha256_begin();
    sha256_add(set->sum, layer, size);
}

static void end_sum(h5_set *set, char out[65])
{
    sha256_end(set->sum, out);
    set->sum = NULL;
}

// Makes a dataset in chunks with Fletcher-32; one without elements is contiguous, since HDF5 has no chunks of size 0.
static kvb_status make_dataset(h5_set *out, const h5_file *f, hid_t parent, const char *name, hid_t type, int rank,
                               const hsize_t *dims, const hsize_t *chunk, kvb_error *err)
{
    *out = (h5_set){.id = -1, .n = rank == 3 ? (uint32_t)dims[0] : 1};
    hid_t space = H5Screate_simple(rank, dims, NULL), list = no_times(H5P_DATASET_CREATE);
    bool ready = space >= 0 && list >= 0 && H5Pset_fill_time(list, H5D_FILL_TIME_NEVER) >= 0;
    if (ready && dims[0] > 0) ready = H5Pset_chunk(list, rank, chunk) >= 0 && H5Pset_fletcher32(list) >= 0;
    if (ready) out->id = H5Dcreate2(parent, name, type, space, H5P_DEFAULT, list, H5P_DEFAULT);
    kvb_status status = KVB_OK;
    if (out->id < 0) status = h5_fail(err, KVB_IO, f->name, parent, name, "cannot make the dataset");
    if (list >= 0) (void)H5Pclose(list); // in memory
    if (space >= 0) (void)H5Sclose(space);
    return status;
}

// Stores the checksum and closes.
static kvb_status end_set(const h5_file *f, h5_set *set, kvb_status status, kvb_error *err)
{
    if (status == KVB_OK && !set->copied) {
        sum_layer(set, "", 0); // for an empty list
        end_sum(set, set->sha256);
    }
    if (status == KVB_OK) status = h5_put_text(f, set->id, "sha256", set->sha256, err);
    status = h5_end(f, set->id, status, err);
    sha256_free(set->sum);
    *set = (h5_set){.id = -1};
    return status;
}

kvb_status h5_write_ids(const h5_file *f, hid_t parent, const char *name, const int32_t *ids, uint32_t n,
                        kvb_error *err)
{
    hsize_t dims[1] = {n};
    h5_set set;
    kvb_status status = make_dataset(&set, f, parent, name, H5T_STD_I32LE, 1, dims, dims, err);
    if (status == KVB_OK && n > 0 && H5Dwrite(set.id, H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, ids) < 0)
        status = h5_fail(err, KVB_IO, f->name, parent, name, "cannot write");
    if (status == KVB_OK && n > 0) sum_layer(&set, ids, n * sizeof *ids);
    return end_set(f, &set, status, err);
}

kvb_status h5_make_array(h5_set *out, const h5_file *f, hid_t parent, const char *name, const uint32_t dims[3],
                         bool copied, kvb_error *err)
{
    hsize_t all[3] = {dims[0], dims[1], dims[2]}, chunk[3] = {1, dims[1], dims[2]};
    kvb_status status = make_dataset(out, f, parent, name, H5T_IEEE_F32LE, 3, all, chunk, err);
    out->copied = copied;
    return status;
}

// Where the next layer of an array lies in the file, and its shape in memory.
typedef struct layer_space {
    hid_t file, memory;
    size_t bytes;
} layer_space;

static bool layer_space_open(layer_space *out, const h5_set *array)
{
    hsize_t dims[3] = {0}, start[3] = {array->done, 0, 0};
    *out = (layer_space){H5Dget_space(array->id), -1, 0};
    if (out->file < 0 || H5Sget_simple_extent_dims(out->file, dims, NULL) != 3) return false;
    dims[0] = 1;
    out->bytes = (size_t)dims[1] * dims[2] * sizeof(float);
    out->memory = H5Screate_simple(3, dims, NULL);
    return out->memory >= 0 && H5Sselect_hyperslab(out->file, H5S_SELECT_SET, start, NULL, dims, NULL) >= 0;
}

static void layer_space_close(const layer_space *s)
{
    if (s->memory >= 0) (void)H5Sclose(s->memory);
    if (s->file >= 0) (void)H5Sclose(s->file);
}

kvb_status h5_write_layer(const h5_file *f, h5_set *array, const float *data, kvb_error *err)
{
    layer_space s;
    kvb_status status = KVB_OK;
    if (!layer_space_open(&s, array) || H5Dwrite(array->id, H5T_NATIVE_FLOAT, s.memory, s.file, H5P_DEFAULT, data) < 0)
        status = h5_fail(err, KVB_IO, f->name, array->id, NULL, "layer %u: cannot write", array->done);
    layer_space_close(&s);
    array->done++;
    if (status == KVB_OK && !array->copied) sum_layer(array, data, s.bytes);
    return status;
}

kvb_status h5_end_array(const h5_file *f, h5_set *array, const h5_set *from, kvb_status status, kvb_error *err)
{
    if (from) memcpy(array->sha256, from->sha256, sizeof array->sha256);
    return end_set(f, array, status, err);
}

// ---- Reading arrays ----

// Reads the dataset's attribute sha256.
static kvb_status get_sum(h5_set *set, const h5_file *f, kvb_error *err)
{
    if (H5Aexists(set->id, "sha256") <= 0)
        return h5_fail(err, KVB_FORMAT, f->name, set->id, NULL, "has no attribute sha256, its checksum");
    cJSON *value = open_and_read_attribute(set->id, "sha256");
    const char *text = cJSON_IsString(value) ? value->valuestring : "";
    bool good = strlen(text) == 64 && strspn(text, "0123456789abcdef") == 64;
    if (good) memcpy(set->sha256, text, sizeof set->sha256);
    cJSON_Delete(value);
    return good ? KVB_OK
                : h5_fail(err, KVB_FORMAT, f->name, set->id, NULL,
                          "attribute sha256: expected 64 hexadecimal digits in lower case");
}

// The storage that the format prescribes: one chunk per layer (or list of ids) with Fletcher-32. For any other filter
// HDF5 would look for a plug-in and run it; without a checksum damage would go unnoticed.
static bool filter_expected(hid_t list)
{
    unsigned flags, config, values[8];
    size_t n_values = 8;
    return H5Pget_nfilters(list) == 1 &&
           H5Pget_filter2(list, 0, &flags, &n_values, values, 0, NULL, &config) == H5Z_FILTER_FLETCHER32;
}

static bool chunks_expected(hid_t list, int rank, const hsize_t *dims)
{
    hsize_t chunk[3];
    if (H5Pget_layout(list) != H5D_CHUNKED || H5Pget_chunk(list, 3, chunk) != rank) return false;
    for (int i = 0; i < rank; i++) {
        if (chunk[i] != (rank == 3 && i == 0 ? 1 : dims[i])) return false;
    }
    return true;
}

// The storage must be there for all elements: otherwise HDF5 makes up fill values for any size that a header claims.
static const char *check_storage(const h5_file *f, hid_t set, int rank, const hsize_t *dims)
{
    uint64_t bytes = 4;
    for (int i = 0; i < rank; i++) {
        if (__builtin_mul_overflow(bytes, dims[i], &bytes)) return "its shape is too large";
    }
    if (bytes == 0) return NULL; // no element, nothing stored
    hid_t list = H5Dget_create_plist(set);
    if (list < 0) return "damaged dataset";
    const char *wrong = NULL;
    uint64_t stored = H5Dget_storage_size(set);
    if (!chunks_expected(list, rank, dims)) wrong = "expected one chunk per layer of an array or per list of ids";
    else if (!filter_expected(list)) wrong = "expected the filter Fletcher-32 alone";
    else if (stored > f->size || stored < bytes) wrong = "its shape does not match the number of bytes stored";
    (void)H5Pclose(list);
    return wrong;
}

// Opens a dataset of this exact element type and rank; dims receives its shape.
static kvb_status open_dataset(h5_set *out, hsize_t *dims, int rank, hid_t wanted, const h5_file *f, hid_t parent,
                               const char *name, kvb_error *err)
{
    *out = (h5_set){.id = -1};
    kvb_status status = open_any(&out->id, f, parent, name, "a dataset", err);
    if (status != KVB_OK) return status;
    if (H5Iget_type(out->id) != H5I_DATASET) {
        status = h5_fail(err, KVB_FORMAT, f->name, parent, name, "expected a dataset");
        h5_close_set(out);
        return status;
    }
    hid_t type = H5Dget_type(out->id), space = H5Dget_space(out->id);
    if (type < 0 || H5Tequal(type, wanted) <= 0)
        status = h5_fail(err, KVB_FORMAT, f->name, parent, name, "expected elements of type %s, little-endian",
                         wanted == H5T_STD_I32LE ? "int32" : "float32");
    else if (space < 0 || !H5Sis_simple(space) || H5Sget_simple_extent_ndims(space) != rank ||
             H5Sget_simple_extent_dims(space, dims, NULL) != rank)
        status = h5_fail(err, KVB_FORMAT, f->name, parent, name, "expected %d dimension%s", rank, rank > 1 ? "s" : "");
    if (type >= 0) (void)H5Tclose(type);
    if (space >= 0) (void)H5Sclose(space);
    if (status != KVB_OK) h5_close_set(out);
    return status;
}

// Skips Fletcher-32, which finds nothing that SHA-256 does not and takes as long. Without memory for that, it stays on.
static void skip_fletcher(h5_set *set)
{
    set->transfer = H5Pcreate(H5P_DATASET_XFER);
    if (set->transfer > 0 && H5Pset_edc_check(set->transfer, H5Z_DISABLE_EDC) >= 0) return;
    if (set->transfer > 0) (void)H5Pclose(set->transfer);
    set->transfer = 0;
}

// To be called right after open_dataset(); closes the dataset if its storage is not as it must be.
static kvb_status accept_storage(h5_set *set, const h5_file *f, hid_t parent, const char *name, int rank,
                                 const hsize_t *dims, kvb_error *err)
{
    const char *wrong = check_storage(f, set->id, rank, dims);
    kvb_status status = KVB_OK;
    if (wrong) status = h5_fail(err, KVB_FORMAT, f->name, parent, name, "%s", wrong);
    else status = get_sum(set, f, err);
    if (status == KVB_OK) skip_fletcher(set);
    set->n = rank == 3 ? (uint32_t)dims[0] : 1;
    if (status != KVB_OK) h5_close_set(set);
    return status;
}

kvb_status h5_open_ids(h5_set *out, uint32_t *n, const h5_file *f, hid_t parent, const char *name, kvb_error *err)
{
    hsize_t dims[1];
    kvb_status status = open_dataset(out, dims, 1, H5T_STD_I32LE, f, parent, name, err);
    if (status == KVB_OK) status = accept_storage(out, f, parent, name, 1, dims, err);
    if (status == KVB_OK) *n = (uint32_t)dims[0]; // HDF5 keeps a chunk, here the whole list, below 2^32 bytes
    return status;
}

kvb_status h5_open_array(h5_set *out, const h5_file *f, hid_t parent, const char *name, const uint32_t dims[3],
                         kvb_error *err)
{
    hsize_t found[3];
    kvb_status status = open_dataset(out, found, 3, H5T_IEEE_F32LE, f, parent, name, err);
    if (status != KVB_OK) return status;
    if (found[0] == dims[0] && found[1] == dims[1] && found[2] == dims[2])
        return accept_storage(out, f, parent, name, 3, found, err);
    h5_close_set(out);
    return h5_fail(err, KVB_FORMAT, f->name, parent, name,
                   "expected shape [%u,%u,%u] (layers, KV heads, tokens), found [%llu,%llu,%llu]", dims[0], dims[1],
                   dims[2], (unsigned long long)found[0], (unsigned long long)found[1], (unsigned long long)found[2]);
}

void h5_close_set(h5_set *set)
{
    h5_release(set->id);
    if (set->transfer > 0) (void)H5Pclose(set->transfer);
    sha256_free(set->sum);
    *set = (h5_set){.id = -1};
}

// The chunk at `start` must be there, with its checksum (a set bit of the mask is a filter that was left out), and be
// of the right size: HDF5 would read past a shorter one.
static kvb_status check_chunk(const h5_file *f, hid_t set, const hsize_t *start, kvb_error *err)
{
    enum { CHECKSUM_SIZE = 4 };
    hid_t list = H5Dget_create_plist(set);
    hsize_t chunk[3], stored = 0;
    unsigned mask = 0;
    haddr_t address = HADDR_UNDEF;
    const char *wrong = NULL;
    int rank = list < 0 ? -1 : H5Pget_chunk(list, 3, chunk);
    if (rank < 0 || H5Dget_chunk_info_by_coord(set, start, &mask, &address, &stored) < 0 || address == HADDR_UNDEF) {
        wrong = "a chunk is missing";
    } else {
        uint64_t bytes = 4; // a chunk has less than 2^32 bytes
        for (int i = 0; i < rank; i++) bytes *= chunk[i];
        if (mask != 0) wrong = "a chunk has no checksum";
        else if (stored != bytes + CHECKSUM_SIZE) wrong = "a chunk has another size than its elements need";
    }
    if (list >= 0) (void)H5Pclose(list);
    return wrong ? h5_fail(err, KVB_FORMAT, f->name, set, NULL, "at layer %llu: %s",
                           (unsigned long long)(rank == 3 ? start[0] : 0), wrong)
                 : KVB_OK;
}

// Counts one more layer. After the last one, all elements must be those that were written, and the file the one that
// was opened: HDF5 reads zeros where a file was cut short, and zeros pass Fletcher-32.
static kvb_status check_sum(const h5_file *f, h5_set *set, const void *layer, size_t size, kvb_error *err)
{
    char found[65] = "";
    sum_layer(set, layer, size);
    if (++set->done < set->n) return KVB_OK;
    end_sum(set, found);
    kvb_status status = h5_unchanged(f, err);
    if (status == KVB_OK && strcmp(found, set->sha256) != 0)
        status = h5_fail(err, KVB_FORMAT, f->name, set->id, NULL,
                         "damaged: its SHA-256 is %.16s..., its attribute sha256 says %.16s...", found, set->sha256);
    memcpy(set->sha256, found, sizeof found);
    return status;
}

kvb_status h5_read_ids(const h5_file *f, h5_set *ids, int32_t *out, kvb_error *err)
{
    hsize_t start[1] = {0}, n[1] = {0};
    kvb_status status = check_chunk(f, ids->id, start, err);
    hid_t space = status == KVB_OK ? H5Dget_space(ids->id) : -1;
    if (status == KVB_OK && (space < 0 || H5Sget_simple_extent_dims(space, n, NULL) != 1 ||
                             H5Dread(ids->id, H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, ids->transfer, out) < 0))
        status = h5_fail(err, KVB_FORMAT, f->name, ids->id, NULL, "damaged");
    if (space >= 0) (void)H5Sclose(space);
    return status == KVB_OK ? check_sum(f, ids, out, n[0] * sizeof *out, err) : status;
}

kvb_status h5_read_layer(const h5_file *f, h5_set *array, float *out, kvb_error *err)
{
    hsize_t start[3] = {array->done, 0, 0};
    kvb_status status = check_chunk(f, array->id, start, err);
    if (status != KVB_OK) return status;
    layer_space s;
    if (!layer_space_open(&s, array) ||
        H5Dread(array->id, H5T_NATIVE_FLOAT, s.memory, s.file, array->transfer, out) < 0)
        status = h5_fail(err, KVB_FORMAT, f->name, array->id, NULL, "layer %u: damaged", array->done);
    layer_space_close(&s);
    return status == KVB_OK ? check_sum(f, array, out, s.bytes, err) : status;
}

// ---- Reading back ----

typedef struct attribute_tally {
    h5_tally *tally;
    const h5_file *f;
    kvb_error *err;
    kvb_status status;
} attribute_tally;

static herr_t tally_attribute(hid_t object, const char *name, const H5A_info_t *info, void *data)
{
    attribute_tally *t = data;
    // The size can be trusted: this process has written the attribute itself.
    unsigned char *bytes = need(info->data_size, 1, "bytes of an attribute");
    hid_t attribute = H5Aopen(object, name, H5P_DEFAULT);
    hid_t type = attribute < 0 ? -1 : H5Aget_type(attribute);
    if (type >= 0 && H5Tget_size(type) == info->data_size && H5Aread(attribute, type, bytes) >= 0)
        t->status = tally_add(t->tally, t->f, object, name, bytes, info->data_size, t->err);
    else t->status = h5_fail(t->err, KVB_FORMAT, t->f->name, object, name, "damaged attribute");
    if (type >= 0) (void)H5Tclose(type);
    h5_release(attribute);
    free(bytes);
    return t->status == KVB_OK ? 0 : -1;
}

static kvb_status tally_attributes(h5_tally *out, const h5_file *f, hid_t object, kvb_error *err)
{
    attribute_tally t = {out, f, err, KVB_OK};
    hsize_t position = 0;
    if (H5Aiterate2(object, H5_INDEX_NAME, H5_ITER_INC, &position, tally_attribute, &t) < 0 && t.status == KVB_OK)
        return h5_fail(err, KVB_FORMAT, f->name, object, NULL, "cannot read the attributes");
    return t.status;
}

// Reads every element of a dataset, and so checks its checksum.
static kvb_status read_set(const h5_file *f, hid_t parent, const char *name, hid_t object, kvb_error *err)
{
    hsize_t dims[3] = {0};
    hid_t space = H5Dget_space(object);
    int rank = space < 0 || H5Sget_simple_extent_ndims(space) > 3 ? -1 : H5Sget_simple_extent_dims(space, dims, NULL);
    if (space >= 0) (void)H5Sclose(space);
    h5_set set = {0};
    uint32_t n = 0, shape[3] = {(uint32_t)dims[0], (uint32_t)dims[1], (uint32_t)dims[2]};
    kvb_status status =
        rank == 3 ? h5_open_array(&set, f, parent, name, shape, err) : h5_open_ids(&set, &n, f, parent, name, err);
    size_t size = rank == 3 ? (size_t)shape[1] * shape[2] : n;
    void *layer = need(status == KVB_OK ? size : 0, 4, "elements of a layer"); // both types have 4 bytes
    if (status == KVB_OK && rank != 3 && n > 0) status = h5_read_ids(f, &set, layer, err);
    for (uint32_t l = 0; rank == 3 && l < shape[0] && status == KVB_OK; l++)
        status = h5_read_layer(f, &set, layer, err);
    free(layer);
    h5_close_set(&set);
    return status;
}

static kvb_status read_group(h5_tally *out, const h5_file *f, hid_t group, kvb_error *err)
{
    char **names = NULL;
    size_t n = 0;
    kvb_status status = tally_attributes(out, f, group, err);
    if (status == KVB_OK) status = h5_list(&names, &n, f, group, err);
    for (size_t i = 0; i < n && status == KVB_OK; i++) {
        hid_t object;
        status = open_any(&object, f, group, names[i], "a group or a dataset", err);
        if (status == KVB_OK && H5Iget_type(object) == H5I_GROUP) {
            status = tally_add(out, f, object, "", NULL, 0, err);
            if (status == KVB_OK) status = read_group(out, f, object, err);
        } else if (status == KVB_OK) {
            status = tally_attributes(out, f, object, err);
            if (status == KVB_OK) status = read_set(f, group, names[i], object, err);
        }
        h5_release(object);
    }
    h5_free_names(names);
    return status;
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
        (void)H5Pclose(fapl);
        fapl = -1;
    }
    return fapl;
}

static kvb_status reserve(const char *path, const char *name, uint64_t bytes, kvb_error *err)
{
    int file = file_open(path, O_RDWR, 0), why = file < 0 ? errno : EINTR;
    while (file >= 0 && why == EINTR) why = posix_fallocate(file, 0, (off_t)bytes);
    if (file >= 0 && !file_close(file) && !why) why = errno;
    if (why)
        return kvb_fail(err, KVB_IO, "%s: cannot reserve %llu bytes on the disk: %s", name, (unsigned long long)bytes,
                        strerror(why));
    return KVB_OK;
}

kvb_status h5_create(h5_file *out, const char *path, const char *name, uint64_t bytes, kvb_error *err)
{
    *out = (h5_file){
        .id = -1, .name = name, .size = bytes, .descriptor = -1, .tally = need(1, sizeof *out->tally, "tallies")};
    kvb_status status = KVB_OK;
    hid_t fapl = access_list(), fcpl = H5Pcreate(H5P_FILE_CREATE), file = -1;
    if (fapl < 0 || fcpl < 0 || H5Pset_obj_track_times(fcpl, 0) < 0) {
        status = h5_fail(err, KVB_MEMORY, name, -1, NULL, "not enough memory to set up HDF5");
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
    if (fcpl >= 0) (void)H5Pclose(fcpl); // lists in memory
    if (fapl >= 0) (void)H5Pclose(fapl);
    return status;
}

// Opens what was written and compares: every dataset has its checksum, everything else is in the tally.
static kvb_status check_written(const h5_file *f, const char *path, kvb_error *err)
{
    h5_file back;
    h5_tally found = {0};
    kvb_error why = {0};
    kvb_status status = h5_open(&back, path, &why);
    back.name = f->name;
    if (status == KVB_OK) status = read_group(&found, &back, back.id, &why);
    if (status == KVB_OK && memcmp(&found, f->tally, sizeof found) != 0)
        status = kvb_fail(&why, KVB_IO, "%s: read back %llu of %llu attributes and groups, or different ones", f->name,
                          (unsigned long long)found.n, (unsigned long long)f->tally->n);
    h5_close(&back);
    if (status == KVB_OK || status == KVB_MEMORY)
        return status == KVB_OK ? KVB_OK : kvb_fail(err, status, "%s", why.message);
    return kvb_fail(err, KVB_IO, "%s; this was read back after writing it: it is not what was written", why.message);
}

kvb_status h5_finish(h5_file *f, const char *path, kvb_status status, kvb_error *err)
{
    hid_t id = f->id;
    f->id = -1;
    if (id >= 0 && status == KVB_OK && H5Fflush(id, H5F_SCOPE_GLOBAL) < 0)
        status = h5_fail(err, KVB_IO, f->name, -1, NULL, "cannot finish writing the HDF5 file");
    if (id >= 0 && H5Fclose(id) < 0 && status == KVB_OK)
        status = h5_fail(err, KVB_IO, f->name, -1, NULL, "cannot close the HDF5 file");
    if (status == KVB_OK) status = check_written(f, path, err);
    free(f->tally);
    f->tally = NULL;
    return status;
}

void h5_close(h5_file *f)
{
    if (f->id >= 0) (void)H5Fclose(f->id); // only read
    f->id = -1;
}

// Only superblocks 2 and 3 are let in: with them HDF5 reads nothing whose checksum it has not verified, while the older
// format has no checksums and HDF5 1.10 is known to crash on damaged files of that kind.
static kvb_status check_superblock(const unsigned char *data, size_t size, const char *name, kvb_error *err)
{
    static const unsigned char signature[8] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};
    if (size < 48 || memcmp(data, signature, sizeof signature) != 0) {
        return kvb_fail(err, KVB_FORMAT,
                        "%s: byte 0: expected a record, which begins with the signature of HDF5, found %s", name,
                        kvb_kind_name(kvb_kind_of_file(data, size)));
    }
    if (data[8] != 2 && data[8] != 3)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s: byte 8: HDF5 superblock version %u, expected 2 or 3; write it with library bounds v110 "
                        "(h5py: libver='v110')",
                        name, data[8]);
    return KVB_OK;
}

// Identifies the file by HDF5's own descriptor, so that what is checked is what HDF5 reads.
static kvb_status identify(h5_file *f, hid_t fapl, kvb_error *err)
{
    void *handle = NULL;
    if (H5Fget_vfd_handle(f->id, fapl, &handle) < 0 || !handle || !file_identify(&f->identity, *(const int *)handle))
        return h5_fail(err, KVB_IO, f->name, -1, NULL, "cannot read its size");
    f->descriptor = *(const int *)handle;
    if ((uint64_t)f->identity.size == f->size) return KVB_OK;
    return kvb_fail(err, KVB_IO, "%s: was changed while it was opened; try again when nobody writes it", f->name);
}

kvb_status h5_open(h5_file *out, const char *path, kvb_error *err)
{
    *out = (h5_file){.id = -1, .name = path, .descriptor = -1};
    file_view view;
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    status = check_superblock(view.data, view.size, path, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    out->size = view.size;
    file_unmap(&view);
    if (status != KVB_OK) return status;
    hid_t fapl = access_list();
    out->id = fapl < 0 ? -1 : H5Fopen(path, H5F_ACC_RDONLY, fapl);
    if (out->id < 0) status = h5_fail(err, KVB_FORMAT, path, -1, NULL, "damaged, or not an HDF5 file");
    else status = identify(out, fapl, err);
    if (fapl >= 0) (void)H5Pclose(fapl);
    if (status != KVB_OK) h5_close(out);
    return status;
}

kvb_status h5_unchanged(const h5_file *f, kvb_error *err)
{
    file_identity now;
    if (!file_identify(&now, f->descriptor))
        return kvb_fail(err, KVB_IO, "%s: cannot read its size: %s", f->name, strerror(errno));
    if (file_same(&f->identity, &now)) return KVB_OK;
    return kvb_fail(
        err, KVB_IO,
        "%s: was changed while it was read (%llu bytes when it was opened, %llu now); try again when nobody "
        "writes it",
        f->name, (unsigned long long)f->identity.size, (unsigned long long)now.size);
}
