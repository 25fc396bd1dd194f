// The part of h5_io.h about attributes.
#include "h5_io.h"
#include "runtime/fail.h"
#include "sha256.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- Attributes ----

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
        status = h5_tally_add(f->tally, f, object, name, value, H5Tget_size(memory_type), err);
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

// ---- Checksums ----

kvb_status h5_tally_add(h5_tally *t, const h5_file *f, hid_t object, const char *name, const void *bytes, size_t size,
                        kvb_error *err)
{
    char path[512] = "", hex[65];
    if (H5Iget_name(object, path, sizeof path) < 0) return h5_fail(err, KVB_FORMAT, f->name, -1, name, "has no path");
    sha256_state *s;
    kvb_status status = sha256_begin(&s, err);
    if (status == KVB_OK) status = sha256_add(s, path, strlen(path) + 1, err);
    if (status == KVB_OK) status = sha256_add(s, name, strlen(name) + 1, err);
    if (status == KVB_OK) status = sha256_add(s, bytes, size, err);
    if (status == KVB_OK) status = sha256_end(s, hex, err);
    sha256_free(s);
    for (size_t i = 0; i < sizeof t->sum && status == KVB_OK; i++) t->sum[i] ^= (unsigned char)hex[i];
    t->n++;
    return status;
}

kvb_status h5_get_sum(h5_set *set, const h5_file *f, kvb_error *err)
{
    set->sha256[0] = '\0';
    if (H5Aexists(set->id, "sha256") <= 0) {
        if (!f->sums) return KVB_OK;
        return h5_fail(err, KVB_FORMAT, f->name, set->id, NULL, "has no attribute sha256, its checksum");
    }
    cJSON *value = open_and_read_attribute(set->id, "sha256");
    const char *text = cJSON_IsString(value) ? value->valuestring : "";
    bool good = strlen(text) == 64 && strspn(text, "0123456789abcdef") == 64;
    if (good) memcpy(set->sha256, text, sizeof set->sha256);
    cJSON_Delete(value);
    return good ? KVB_OK
                : h5_fail(err, KVB_FORMAT, f->name, set->id, NULL,
                          "attribute sha256: expected 64 hexadecimal digits in lower case");
}
