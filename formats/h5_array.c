// The part of h5_io.h about groups and arrays.
#include "h5_io.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

// ---- Groups ----

static hid_t no_times(hid_t property_class)
{
    hid_t list = H5Pcreate(property_class);
    if (list >= 0 && H5Pset_obj_track_times(list, 0) < 0) {
        H5Pclose(list);
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
    if (list >= 0) H5Pclose(list);
    return status;
}

bool h5_has_link(hid_t group, const char *name)
{
    return H5Lexists(group, name, H5P_DEFAULT) > 0;
}

// Soft and external links are refused: an external one would make HDF5 open any other file.
static kvb_status open_object(hid_t *out, const h5_file *f, hid_t parent, const char *name, H5I_type_t kind,
                              kvb_error *err)
{
    *out = -1;
    const char *expected = kind == H5I_GROUP ? "a group" : "a dataset";
    if (!h5_has_link(parent, name))
        return h5_fail(err, KVB_FORMAT, f->name, parent, name, "is missing, expected %s", expected);
    H5L_info_t link;
    if (H5Lget_info(parent, name, &link, H5P_DEFAULT) < 0 || link.type != H5L_TYPE_HARD)
        return h5_fail(err, KVB_UNSUPPORTED, f->name, parent, name, "expected %s, found a link to elsewhere", expected);
    hid_t object = H5Oopen(parent, name, H5P_DEFAULT);
    if (object < 0) return h5_fail(err, KVB_FORMAT, f->name, parent, name, "damaged");
    if (H5Iget_type(object) != kind) {
        kvb_status status = h5_fail(err, KVB_FORMAT, f->name, parent, name, "expected %s", expected);
        H5Oclose(object);
        return status;
    }
    *out = object;
    return KVB_OK;
}

kvb_status h5_open_group(hid_t *out, const h5_file *f, hid_t parent, const char *name, kvb_error *err)
{
    return open_object(out, f, parent, name, H5I_GROUP, err);
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
        size_t capacity = list->capacity ? 2 * list->capacity : 16;
        char **larger = reallocarray(list->names, capacity, sizeof *larger);
        if (!larger) return -1;
        list->names = larger;
        list->capacity = capacity;
    }
    char *copy = strdup(name);
    list->names[list->n] = copy;
    if (!copy) return -1;
    list->names[++list->n] = NULL;
    return 0;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

kvb_status h5_list(char ***names, size_t *n, const h5_file *f, hid_t group, kvb_error *err)
{
    name_list list = {calloc(1, sizeof(char *)), 0, 1};
    hsize_t position = 0;
    *names = NULL;
    *n = 0;
    if (!list.names) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory", f->name);
    if (H5Literate(group, H5_INDEX_NAME, H5_ITER_INC, &position, take_name, &list) < 0) {
        kvb_status status = h5_fail(err, KVB_FORMAT, f->name, group, NULL, "cannot read the names in this group");
        h5_free_names(list.names);
        return status;
    }
    qsort(list.names, list.n, sizeof *list.names, compare_names);
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

// Makes a dataset in chunks with Fletcher-32; one without elements is contiguous, since HDF5 has no chunks of size 0.
static kvb_status make_dataset(hid_t *out, const h5_file *f, hid_t parent, const char *name, hid_t type, int rank,
                               const hsize_t *dims, const hsize_t *chunk, int level, kvb_error *err)
{
    *out = -1;
    hid_t space = H5Screate_simple(rank, dims, NULL), list = no_times(H5P_DATASET_CREATE);
    bool ready = space >= 0 && list >= 0 && H5Pset_fill_time(list, H5D_FILL_TIME_NEVER) >= 0;
    if (ready && dims[0] > 0) {
        ready = H5Pset_chunk(list, rank, chunk) >= 0;
        if (ready && level > 0) ready = H5Pset_shuffle(list) >= 0 && H5Pset_deflate(list, (unsigned)level) >= 0;
        ready = ready && H5Pset_fletcher32(list) >= 0;
    }
    if (ready) *out = H5Dcreate2(parent, name, type, space, H5P_DEFAULT, list, H5P_DEFAULT);
    kvb_status status = KVB_OK;
    if (*out < 0) status = h5_fail(err, KVB_IO, f->name, parent, name, "cannot make the dataset");
    if (list >= 0) H5Pclose(list);
    if (space >= 0) H5Sclose(space);
    return status;
}

kvb_status h5_write_ids(const h5_file *f, hid_t parent, const char *name, const int32_t *ids, uint32_t n,
                        kvb_error *err)
{
    hsize_t dims[1] = {n};
    hid_t set;
    kvb_status status = make_dataset(&set, f, parent, name, H5T_STD_I32LE, 1, dims, dims, 0, err);
    if (status == KVB_OK && n > 0 && H5Dwrite(set, H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, ids) < 0)
        status = h5_fail(err, KVB_IO, f->name, parent, name, "cannot write");
    if (set >= 0 && H5Dclose(set) < 0 && status == KVB_OK)
        status = h5_fail(err, KVB_IO, f->name, parent, name, "cannot write");
    return status;
}

kvb_status h5_make_array(hid_t *out, const h5_file *f, hid_t parent, const char *name, const uint32_t dims[3],
                         int level, kvb_error *err)
{
    hsize_t all[3] = {dims[0], dims[1], dims[2]}, chunk[3] = {1, dims[1], dims[2]};
    return make_dataset(out, f, parent, name, H5T_IEEE_F32LE, 3, all, chunk, level, err);
}

// Moves one layer of a [L,G,T] dataset to `out` or, when that is NULL, from `in`.
static kvb_status move_layer(const h5_file *f, hid_t array, uint32_t layer, void *out, const void *in, kvb_error *err)
{
    hsize_t dims[3] = {0}, start[3] = {layer, 0, 0};
    hid_t space = H5Dget_space(array), memory = -1;
    kvb_status status = KVB_OK;
    bool selected = false;
    if (space >= 0 && H5Sget_simple_extent_dims(space, dims, NULL) == 3) {
        dims[0] = 1;
        memory = H5Screate_simple(3, dims, NULL);
        selected = memory >= 0 && H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, dims, NULL) >= 0;
    }
    if (out) {
        if (!selected || H5Dread(array, H5T_NATIVE_FLOAT, memory, space, H5P_DEFAULT, out) < 0)
            status = h5_fail(err, KVB_FORMAT, f->name, array, NULL, "layer %u: damaged", layer);
    } else if (!selected || H5Dwrite(array, H5T_NATIVE_FLOAT, memory, space, H5P_DEFAULT, in) < 0) {
        status = h5_fail(err, KVB_IO, f->name, array, NULL, "layer %u: cannot write", layer);
    }
    if (memory >= 0) H5Sclose(memory);
    if (space >= 0) H5Sclose(space);
    return status;
}

kvb_status h5_write_layer(const h5_file *f, hid_t array, uint32_t layer, const float *data, kvb_error *err)
{
    return move_layer(f, array, layer, NULL, data, err);
}

// ---- Reading arrays ----

// The storage that the format prescribes: one chunk per layer (or list of ids), [shuffle, deflate,] Fletcher-32. For
// any other filter HDF5 would look for a plug-in and run it; without a checksum damage would go unnoticed.
static bool filters_expected(hid_t list, bool *deflated)
{
    static const H5Z_filter_t plain[] = {H5Z_FILTER_FLETCHER32};
    static const H5Z_filter_t packed[] = {H5Z_FILTER_SHUFFLE, H5Z_FILTER_DEFLATE, H5Z_FILTER_FLETCHER32};
    int n = H5Pget_nfilters(list);
    *deflated = n == 3;
    if (n != 1 && n != 3) return false;
    const H5Z_filter_t *expected = n == 1 ? plain : packed;
    for (int i = 0; i < n; i++) {
        unsigned flags, config, values[8];
        size_t n_values = 8;
        if (H5Pget_filter2(list, (unsigned)i, &flags, &n_values, values, 0, NULL, &config) != expected[i]) return false;
    }
    return true;
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

// Deflate makes nothing smaller than 1/1032.
enum { MAX_DEFLATE = 1032 };

// The storage must be there for all elements: HDF5 would else make up fill values for whatever size the header claims.
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
    bool deflated = false;
    uint64_t stored = H5Dget_storage_size(set);
    if (!chunks_expected(list, rank, dims)) wrong = "expected one chunk per layer of an array or per list of ids";
    else if (!filters_expected(list, &deflated))
        wrong = "expected the filters Fletcher-32, or shuffle, deflate, Fletcher-32";
    else if (stored > f->size || (deflated ? stored < bytes / MAX_DEFLATE : stored < bytes))
        wrong = "its shape needs other than the bytes that are stored";
    H5Pclose(list);
    return wrong;
}

// Opens a dataset of this exact element type and rank; dims receives its shape.
static kvb_status open_dataset(hid_t *out, hsize_t *dims, int rank, hid_t wanted, const h5_file *f, hid_t parent,
                               const char *name, kvb_error *err)
{
    hid_t set;
    kvb_status status = open_object(&set, f, parent, name, H5I_DATASET, err);
    *out = -1;
    if (status != KVB_OK) return status;
    hid_t type = H5Dget_type(set), space = H5Dget_space(set);
    if (type < 0 || H5Tequal(type, wanted) <= 0)
        status = h5_fail(err, KVB_FORMAT, f->name, parent, name, "expected elements of type %s, little-endian",
                         wanted == H5T_STD_I32LE ? "int32" : "float32");
    else if (space < 0 || !H5Sis_simple(space) || H5Sget_simple_extent_ndims(space) != rank ||
             H5Sget_simple_extent_dims(space, dims, NULL) != rank)
        status = h5_fail(err, KVB_FORMAT, f->name, parent, name, "expected %d dimension%s", rank, rank > 1 ? "s" : "");
    if (type >= 0) H5Tclose(type);
    if (space >= 0) H5Sclose(space);
    if (status == KVB_OK) *out = set;
    else H5Dclose(set);
    return status;
}

// The first thing to look at after open_dataset; releases the dataset when its storage is not as it must be.
static kvb_status accept_storage(hid_t *set, const h5_file *f, hid_t parent, const char *name, int rank,
                                 const hsize_t *dims, kvb_error *err)
{
    const char *wrong = check_storage(f, *set, rank, dims);
    if (!wrong) return KVB_OK;
    H5Dclose(*set);
    *set = -1;
    return h5_fail(err, KVB_FORMAT, f->name, parent, name, "%s", wrong);
}

kvb_status h5_open_ids(hid_t *out, uint32_t *n, const h5_file *f, hid_t parent, const char *name, kvb_error *err)
{
    hsize_t dims[1];
    kvb_status status = open_dataset(out, dims, 1, H5T_STD_I32LE, f, parent, name, err);
    if (status == KVB_OK) status = accept_storage(out, f, parent, name, 1, dims, err);
    if (status == KVB_OK) *n = (uint32_t)dims[0]; // HDF5 keeps a chunk, here the whole list, below 2^32 bytes
    return status;
}

kvb_status h5_open_array(hid_t *out, const h5_file *f, hid_t parent, const char *name, const uint32_t dims[3],
                         kvb_error *err)
{
    hsize_t found[3];
    kvb_status status = open_dataset(out, found, 3, H5T_IEEE_F32LE, f, parent, name, err);
    if (status != KVB_OK) return status;
    if (found[0] == dims[0] && found[1] == dims[1] && found[2] == dims[2])
        return accept_storage(out, f, parent, name, 3, found, err);
    H5Dclose(*out);
    *out = -1;
    return h5_fail(err, KVB_FORMAT, f->name, parent, name,
                   "expected shape [%u,%u,%u] (layers, KV heads, tokens), found [%llu,%llu,%llu]", dims[0], dims[1],
                   dims[2], (unsigned long long)found[0], (unsigned long long)found[1], (unsigned long long)found[2]);
}

// The chunk at `start` must be there, not have left out a filter (a set bit of the mask) other than deflate, which is
// left out where it would not help, and be of the right size where it is not compressed: HDF5 would read past a shorter
// one.
static kvb_status check_chunk(const h5_file *f, hid_t set, const hsize_t *start, kvb_error *err)
{
    enum { DEFLATE_LEFT_OUT = 1 << 1, CHECKSUM_SIZE = 4 };
    hid_t list = H5Dget_create_plist(set);
    hsize_t chunk[3], stored = 0;
    unsigned mask = 0;
    haddr_t address = HADDR_UNDEF;
    bool deflated = false;
    const char *wrong = NULL;
    int rank = list < 0 ? -1 : H5Pget_chunk(list, 3, chunk);
    if (rank < 0 || !filters_expected(list, &deflated) ||
        H5Dget_chunk_info_by_coord(set, start, &mask, &address, &stored) < 0 || address == HADDR_UNDEF) {
        wrong = "a chunk is missing";
    } else {
        uint64_t bytes = 4; // a chunk has less than 2^32 bytes
        for (int i = 0; i < rank; i++) bytes *= chunk[i];
        if (mask != 0 && !(deflated && mask == DEFLATE_LEFT_OUT)) wrong = "a chunk has no checksum";
        else if ((!deflated || mask != 0) && stored != bytes + CHECKSUM_SIZE)
            wrong = "a chunk has another size than its elements need";
    }
    if (list >= 0) H5Pclose(list);
    return wrong ? h5_fail(err, KVB_FORMAT, f->name, set, NULL, "at layer %llu: %s",
                           (unsigned long long)(rank == 3 ? start[0] : 0), wrong)
                 : KVB_OK;
}

kvb_status h5_read_ids(const h5_file *f, hid_t ids, int32_t *out, kvb_error *err)
{
    hsize_t start[1] = {0};
    kvb_status status = check_chunk(f, ids, start, err);
    if (status == KVB_OK && H5Dread(ids, H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, out) < 0)
        status = h5_fail(err, KVB_FORMAT, f->name, ids, NULL, "damaged");
    return status;
}

kvb_status h5_read_layer(const h5_file *f, hid_t array, uint32_t layer, float *out, kvb_error *err)
{
    hsize_t start[3] = {layer, 0, 0};
    kvb_status status = check_chunk(f, array, start, err);
    return status == KVB_OK ? move_layer(f, array, layer, out, NULL, err) : status;
}
