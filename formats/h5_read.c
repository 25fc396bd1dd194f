// The part of h5_io.h about reading arrays.
#include "h5_io.h"
#include "runtime/fail.h"
#include "sha256.h"
#include <string.h>

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

// Deflate can make 1/1032 of zeros. Real scores and importance have digits that do not compress: an array larger than
// SMALL_ARRAY bytes and MAX_RATIO times its whole file would only fill the memory of who opens it.
enum { MAX_DEFLATE = 1032, MAX_RATIO = 16, SMALL_ARRAY = 64 << 20 };

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
    else if (bytes > SMALL_ARRAY && bytes / MAX_RATIO > f->size)
        wrong = "its shape takes more than 16 times the memory of the whole file; no profile compresses like that";
    (void)H5Pclose(list);
    return wrong;
}

// Opens a dataset of this exact element type and rank; dims receives its shape.
static kvb_status open_dataset(h5_set *out, hsize_t *dims, int rank, hid_t wanted, const h5_file *f, hid_t parent,
                               const char *name, kvb_error *err)
{
    *out = (h5_set){.id = -1};
    kvb_status status = h5_open_any(&out->id, f, parent, name, "a dataset", err);
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

// Fletcher-32 finds nothing that SHA-256 does not, and takes as long. Without memory for the list it is looked at.
static void skip_fletcher(h5_set *set)
{
    set->transfer = H5Pcreate(H5P_DATASET_XFER);
    if (set->transfer > 0 && H5Pset_edc_check(set->transfer, H5Z_DISABLE_EDC) >= 0) return;
    if (set->transfer > 0) (void)H5Pclose(set->transfer);
    set->transfer = 0;
}

// The first thing to look at after open_dataset; closes the dataset when its storage is not as it must be.
static kvb_status accept_storage(h5_set *set, const h5_file *f, hid_t parent, const char *name, int rank,
                                 const hsize_t *dims, kvb_error *err)
{
    const char *wrong = check_storage(f, set->id, rank, dims);
    kvb_status status = KVB_OK;
    if (wrong) status = h5_fail(err, KVB_FORMAT, f->name, parent, name, "%s", wrong);
    else status = h5_get_sum(set, f, err);
    if (status == KVB_OK && set->sha256[0]) skip_fletcher(set);
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
    if (list >= 0) (void)H5Pclose(list);
    return wrong ? h5_fail(err, KVB_FORMAT, f->name, set, NULL, "at layer %llu: %s",
                           (unsigned long long)(rank == 3 ? start[0] : 0), wrong)
                 : KVB_OK;
}

// One more layer went through. With the last one all elements must be those that were written, and the file the one
// that was opened: HDF5 reads zeros where a file was cut short, and zeros pass Fletcher-32.
static kvb_status check_sum(const h5_file *f, h5_set *set, const void *layer, size_t size, kvb_error *err)
{
    char found[65] = "";
    kvb_status status = h5_sum_layer(set, f, layer, size, err);
    if (status != KVB_OK || ++set->done < set->n) return status;
    status = sha256_end(set->sum, found, err);
    if (status == KVB_OK) status = h5_unchanged(f, err);
    if (status == KVB_OK && set->sha256[0] && strcmp(found, set->sha256) != 0)
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
    hsize_t dims[3] = {0}, start[3] = {array->done, 0, 0};
    kvb_status status = check_chunk(f, array->id, start, err);
    if (status != KVB_OK) return status;
    hid_t space = H5Dget_space(array->id), memory = -1;
    bool read = false;
    if (space >= 0 && H5Sget_simple_extent_dims(space, dims, NULL) == 3) {
        dims[0] = 1;
        memory = H5Screate_simple(3, dims, NULL);
        read = memory >= 0 && H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, dims, NULL) >= 0 &&
               H5Dread(array->id, H5T_NATIVE_FLOAT, memory, space, array->transfer, out) >= 0;
    }
    if (!read) status = h5_fail(err, KVB_FORMAT, f->name, array->id, NULL, "layer %u: damaged", array->done);
    if (memory >= 0) (void)H5Sclose(memory);
    if (space >= 0) (void)H5Sclose(space);
    return status == KVB_OK ? check_sum(f, array, out, (size_t)dims[1] * dims[2] * sizeof *out, err) : status;
}
