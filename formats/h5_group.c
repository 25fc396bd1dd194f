// The part of h5_io.h about groups, and reading a file back.
#include "h5_io.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

hid_t h5_no_times(hid_t property_class)
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
    hid_t list = h5_no_times(H5P_GROUP_CREATE);
    *out = list < 0 ? -1 : H5Gcreate2(parent, name, H5P_DEFAULT, list, H5P_DEFAULT);
    kvb_status status = KVB_OK;
    if (*out < 0) status = h5_fail(err, KVB_IO, f->name, parent, name, "cannot make the group");
    else if (f->tally) status = h5_tally_add(f->tally, f, *out, "", NULL, 0, err);
    if (list >= 0) (void)H5Pclose(list);
    return status;
}

bool h5_has_link(hid_t group, const char *name)
{
    return H5Lexists(group, name, H5P_DEFAULT) > 0;
}

// Soft and external links are refused: an external one would make HDF5 open any other file.
kvb_status h5_open_any(hid_t *out, const h5_file *f, hid_t parent, const char *name, const char *expected,
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
    kvb_status status = h5_open_any(out, f, parent, name, "a group", err);
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
    unsigned char *bytes = malloc(info->data_size + 1);
    hid_t attribute = bytes ? H5Aopen(object, name, H5P_DEFAULT) : -1;
    hid_t type = attribute < 0 ? -1 : H5Aget_type(attribute);
    if (type >= 0 && H5Tget_size(type) == info->data_size && H5Aread(attribute, type, bytes) >= 0)
        t->status = h5_tally_add(t->tally, t->f, object, name, bytes, info->data_size, t->err);
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

// Every element of a dataset, against its checksum.
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
    void *layer = status == KVB_OK ? malloc(size * 4 + 1) : NULL; // both element types have 4 bytes
    if (status == KVB_OK && !layer) status = kvb_fail(err, KVB_MEMORY, "%s: not enough memory for a layer", f->name);
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
        status = h5_open_any(&object, f, group, names[i], "a group or a dataset", err);
        if (status == KVB_OK && H5Iget_type(object) == H5I_GROUP) {
            status = h5_tally_add(out, f, object, "", NULL, 0, err);
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

kvb_status h5_read_back(h5_tally *out, const h5_file *f, kvb_error *err)
{
    *out = (h5_tally){0};
    return read_group(out, f, f->id, err);
}
