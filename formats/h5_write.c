// The part of h5_io.h about writing arrays.
#include "h5_io.h"
#include "runtime/fail.h"
#include "sha256.h"
#include <string.h>

// Makes a dataset in chunks with Fletcher-32; one without elements is contiguous, since HDF5 has no chunks of size 0.
static kvb_status make_dataset(h5_set *out, const h5_file *f, hid_t parent, const char *name, hid_t type, int rank,
                               const hsize_t *dims, const hsize_t *chunk, int level, kvb_error *err)
{
    *out = (h5_set){.id = -1, .n = rank == 3 ? (uint32_t)dims[0] : 1};
    hid_t space = H5Screate_simple(rank, dims, NULL), list = h5_no_times(H5P_DATASET_CREATE);
    bool ready = space >= 0 && list >= 0 && H5Pset_fill_time(list, H5D_FILL_TIME_NEVER) >= 0;
    if (ready && dims[0] > 0) {
        ready = H5Pset_chunk(list, rank, chunk) >= 0;
        if (ready && level > 0) ready = H5Pset_shuffle(list) >= 0 && H5Pset_deflate(list, (unsigned)level) >= 0;
        ready = ready && H5Pset_fletcher32(list) >= 0;
    }
    if (ready) out->id = H5Dcreate2(parent, name, type, space, H5P_DEFAULT, list, H5P_DEFAULT);
    kvb_status status = KVB_OK;
    if (out->id < 0) status = h5_fail(err, KVB_IO, f->name, parent, name, "cannot make the dataset");
    if (list >= 0) (void)H5Pclose(list); // in memory
    if (space >= 0) (void)H5Sclose(space);
    return status;
}

kvb_status h5_sum_layer(h5_set *set, const h5_file *f, const void *layer, size_t size, kvb_error *err)
{
    kvb_error why = {0};
    kvb_status status = set->sum ? KVB_OK : sha256_begin(&set->sum, &why);
    if (status == KVB_OK) status = sha256_add(set->sum, layer, size, &why);
    if (status == KVB_OK) return KVB_OK;
    return h5_fail(err, status, f->name, set->id, NULL, "%s", why.message);
}

// Stores the checksum and closes.
static kvb_status end_set(const h5_file *f, h5_set *set, kvb_status status, kvb_error *err)
{
    if (status == KVB_OK && !set->copied) {
        if (!set->sum) status = h5_sum_layer(set, f, "", 0, err);
        if (status == KVB_OK) status = sha256_end(set->sum, set->sha256, err);
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
    kvb_status status = make_dataset(&set, f, parent, name, H5T_STD_I32LE, 1, dims, dims, 0, err);
    if (status == KVB_OK && n > 0 && H5Dwrite(set.id, H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, ids) < 0)
        status = h5_fail(err, KVB_IO, f->name, parent, name, "cannot write");
    if (status == KVB_OK && n > 0) status = h5_sum_layer(&set, f, ids, n * sizeof *ids, err);
    return end_set(f, &set, status, err);
}

kvb_status h5_make_array(h5_set *out, const h5_file *f, hid_t parent, const char *name, const uint32_t dims[3],
                         int level, bool copied, kvb_error *err)
{
    hsize_t all[3] = {dims[0], dims[1], dims[2]}, chunk[3] = {1, dims[1], dims[2]};
    kvb_status status = make_dataset(out, f, parent, name, H5T_IEEE_F32LE, 3, all, chunk, level, err);
    out->copied = copied;
    return status;
}

kvb_status h5_write_layer(const h5_file *f, h5_set *array, const float *data, kvb_error *err)
{
    hsize_t dims[3] = {0}, start[3] = {array->done, 0, 0};
    hid_t space = H5Dget_space(array->id), memory = -1;
    bool written = false;
    if (space >= 0 && H5Sget_simple_extent_dims(space, dims, NULL) == 3) {
        dims[0] = 1;
        memory = H5Screate_simple(3, dims, NULL);
        written = memory >= 0 && H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, dims, NULL) >= 0 &&
                  H5Dwrite(array->id, H5T_NATIVE_FLOAT, memory, space, H5P_DEFAULT, data) >= 0;
    }
    kvb_status status = KVB_OK;
    if (!written) status = h5_fail(err, KVB_IO, f->name, array->id, NULL, "layer %u: cannot write", array->done);
    if (memory >= 0) (void)H5Sclose(memory);
    if (space >= 0) (void)H5Sclose(space);
    array->done++;
    if (status != KVB_OK || array->copied) return status;
    return h5_sum_layer(array, f, data, (size_t)dims[1] * dims[2] * sizeof *data, err);
}

kvb_status h5_end_array(const h5_file *f, h5_set *array, const h5_set *from, kvb_status status, kvb_error *err)
{
    if (from) memcpy(array->sha256, from->sha256, sizeof array->sha256);
    return end_set(f, array, status, err);
}
