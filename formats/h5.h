// The few HDF5 operations that records need, with this project's errors. Between h5_quiet and h5_loud no function
// prints HDF5's error stack to stderr; the public functions of record.h call both.
// Files may come from anywhere, and HDF5 1.10 trusts what it reads, so everything is checked before any data are read:
// only hard links, exact element types, expected shapes, the known filters, and storage that fits the file's size.
#pragma once
#include "formats/file_io.h"
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <hdf5.h>
#include <stdbool.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1 // clang says it the other way
#endif
#endif

enum { MAX_TEXT_ATTRIBUTE = 1 << 20 }; // bytes, with the closing NUL

typedef struct h5_error_printing {
    H5E_auto2_t print;
    void *data;
} h5_error_printing;

h5_error_printing h5_quiet(void); // stops HDF5's own messages; returns what to give to h5_loud
void h5_loud(h5_error_printing before);

// "FILE: /path/of/at/name: what (HDF5: its innermost message)". at < 0: the path is only `name`.
kvb_status h5_fail(kvb_error *err, kvb_status status, const char *file, hid_t at, const char *name, const char *what,
                   ...) __attribute__((format(printf, 6, 7)));

// A sum over what was written so far, or over what reading it back finds: the xor of the hashes of all attributes with
// the paths of their objects, so the order does not matter.
typedef struct h5_tally {
    unsigned char sum[64];
    uint64_t n;
} h5_tally;

// An open HDF5 file and what checks and messages need.
typedef struct h5_file {
    hid_t id;               // < 0: not open
    const char *name;       // for messages; the caller's
    uint64_t size;          // bytes
    h5_tally *tally;        // of a file that is being written, which owns it
    int descriptor;         // HDF5's, of a file opened for reading
    file_identity identity; // of what was opened
} h5_file;

// A dataset under way: written or read layer by layer, in order, while its elements go into a checksum.
typedef struct h5_set {
    hid_t id;                 // <= 0: not open
    uint32_t n, done;         // layers (1 for a list of ids), and how many are done
    struct sha256_state *sum; // NULL: none is done yet
    char sha256[65];          // of all elements: what the file says, until all are done
    hid_t transfer;           // transfer properties for reading; 0: HDF5's defaults
    bool copied;              // its checksum comes from the set that it is copied from
} h5_set;

// Creates an HDF5 file at `path`, replacing what is there, after reserving `bytes` on the disk: HDF5 does not recover
// from a write that fails while it closes a file, so a full disk must be noticed before anything is written. Closing
// releases what was not used. Bytes depend on content only (no times, fixed library bounds).
kvb_status h5_create(h5_file *out, const char *path, const char *name, uint64_t bytes, kvb_error *err);
// Finishes a file that h5_create began; `status` says how writing went. Flushes and closes the file, opens it again and
// reads everything back, because HDF5 may lose the error of a write. Returns `status`, or KVB_IO.
kvb_status h5_finish(h5_file *f, const char *path, kvb_status status, kvb_error *err);
// Closes a group, dataset or attribute that was written to, with the same rule for `status`. Does nothing if id <= 0.
kvb_status h5_end(const h5_file *f, hid_t id, kvb_status status, kvb_error *err);

kvb_status h5_make_group(hid_t *out, const h5_file *f, hid_t parent, const char *name, kvb_error *err);
kvb_status h5_put_text(const h5_file *f, hid_t object, const char *name, const char *text, kvb_error *err);
kvb_status h5_put_u32(const h5_file *f, hid_t object, const char *name, uint32_t value, kvb_error *err);
kvb_status h5_put_json(const h5_file *f, hid_t object, const cJSON *value, kvb_error *err); // named value->string
kvb_status h5_write_ids(const h5_file *f, hid_t parent, const char *name, const int32_t *ids, uint32_t n,
                        kvb_error *err);

// Creates a float32 dataset [dims], chunk [1,dims[1],dims[2]], Fletcher-32. All layers must be written, in order, and
// then h5_end_array called, which stores the checksum and closes it. The checksum is that of the set `from` if the data
// were copied from it, or that of what was written if `from` is NULL.
kvb_status h5_make_array(h5_set *out, const h5_file *f, hid_t parent, const char *name, const uint32_t dims[3],
                         bool copied, kvb_error *err);
kvb_status h5_write_layer(const h5_file *f, h5_set *array, const float *data, kvb_error *err);
kvb_status h5_end_array(const h5_file *f, h5_set *array, const h5_set *from, kvb_status status, kvb_error *err);

kvb_status h5_open(h5_file *out, const char *path, kvb_error *err);
void h5_close(h5_file *f); // for a file that was only read; does nothing if it is not open
// Fails with KVB_IO if the file on the disk is no longer the one that was opened: truncated or written to.
kvb_status h5_unchanged(const h5_file *f, kvb_error *err);

kvb_status h5_open_group(hid_t *out, const h5_file *f, hid_t parent, const char *name, kvb_error *err);
// Names of the links in a group, ascending; NULL-terminated array, each name and the array malloc'd (h5_free_names).
kvb_status h5_list(char ***names, size_t *n, const h5_file *f, hid_t group, kvb_error *err);
void h5_free_names(char **names);
bool h5_has_link(hid_t group, const char *name);
kvb_status h5_get_u32(uint32_t *out, const h5_file *f, hid_t object, const char *name, kvb_error *err);
// Reads all attributes of an object into a flat JSON object, which the caller frees.
kvb_status h5_get_json(cJSON **out, const h5_file *f, hid_t object, kvb_error *err);

// Opens an int32 list; *n receives its length, which is bounded by the file's size. An empty one must not be read.
kvb_status h5_open_ids(h5_set *out, uint32_t *n, const h5_file *f, hid_t parent, const char *name, kvb_error *err);
kvb_status h5_read_ids(const h5_file *f, h5_set *ids, int32_t *out, kvb_error *err);
// Opens a float32 dataset, which must have exactly these dimensions.
kvb_status h5_open_array(h5_set *out, const h5_file *f, hid_t parent, const char *name, const uint32_t dims[3],
                         kvb_error *err);
// Reads the next layer. After the last one it checks the checksum of all layers (KVB_FORMAT) and that the file is
// unchanged (KVB_IO).
kvb_status h5_read_layer(const h5_file *f, h5_set *array, float *out, kvb_error *err);
void h5_close_set(h5_set *set); // for a set that was only read; does nothing if it is not open

void h5_release(hid_t id); // closes a group, dataset or attribute that was only read; does nothing if id <= 0
