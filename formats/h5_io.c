#include "h5_io.h"
#include "file_read.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include <errno.h>
#include <fcntl.h>
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
    bool no_memory = errno == ENOMEM; // of HDF5's or of a callback's malloc: no damage then
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
    *out = (h5_file){.id = -1, .name = name, .size = bytes, .descriptor = -1, .tally = calloc(1, sizeof *out->tally)};
    kvb_status status = KVB_OK;
    hid_t fapl = access_list(), fcpl = H5Pcreate(H5P_FILE_CREATE), file = -1;
    if (fapl < 0 || fcpl < 0 || !out->tally || H5Pset_obj_track_times(fcpl, 0) < 0) {
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
    h5_tally found;
    kvb_error why = {0};
    kvb_status status = h5_open(&back, path, &why);
    back.name = f->name;
    back.sums = true;
    if (status == KVB_OK) status = h5_read_back(&found, &back, &why);
    if (status == KVB_OK && memcmp(&found, f->tally, sizeof found) != 0)
        status = kvb_fail(&why, KVB_IO, "%s: %llu of %llu attributes and groups are there, or others", f->name,
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
        status = h5_fail(err, KVB_IO, f->name, -1, NULL, "cannot write the HDF5 file to its end");
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

// Whether datasets must have checksums is said by the format version, of records and of parts alike. A version that
// cannot be read is an error: without it the checksums of a good record would go unread.
static kvb_status look_at_version(h5_file *f, kvb_error *err)
{
    uint32_t version = 0;
    htri_t there = H5Aexists(f->id, "format_version");
    if (there < 0) return h5_fail(err, KVB_FORMAT, f->name, -1, NULL, "format_version: cannot be looked for");
    kvb_status status = there ? h5_get_u32(&version, f, f->id, "format_version", err) : KVB_OK;
    f->sums = version >= 2;
    return status;
}

// HDF5's own descriptor, so that what is looked at is what HDF5 reads.
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
    if (status == KVB_OK) status = look_at_version(out, err);
    if (status != KVB_OK) h5_close(out);
    return status;
}

kvb_status h5_unchanged(const h5_file *f, kvb_error *err)
{
    file_identity now;
    if (f->descriptor < 0) return KVB_OK;
    if (!file_identify(&now, f->descriptor))
        return kvb_fail(err, KVB_IO, "%s: cannot read its size: %s", f->name, strerror(errno));
    if (file_same(&f->identity, &now)) return KVB_OK;
    return kvb_fail(
        err, KVB_IO,
        "%s: was changed while it was read (%llu bytes when it was opened, %llu now); try again when nobody "
        "writes it",
        f->name, (unsigned long long)f->identity.size, (unsigned long long)now.size);
}

kvb_status h5_open_memory(h5_file *out, const void *data, size_t size, const char *name, kvb_error *err)
{
    *out = (h5_file){.id = -1, .name = name, .size = size, .descriptor = -1};
    kvb_status status = check_superblock(data, size, name, err);
    if (status != KVB_OK) return status;
    hid_t fapl = access_list();
    // The image is copied; HDF5's prototype merely lacks the const.
    if (fapl >= 0 && H5Pset_fapl_core(fapl, 1 << 16, 0) >= 0 &&
        H5Pset_file_image(fapl, (void *)(uintptr_t)data, size) >= 0)
        out->id = H5Fopen(name, H5F_ACC_RDONLY, fapl);
    if (out->id < 0) status = h5_fail(err, KVB_FORMAT, name, -1, NULL, "damaged, or not an HDF5 file");
    if (fapl >= 0) (void)H5Pclose(fapl);
    if (status == KVB_OK) status = look_at_version(out, err);
    if (status != KVB_OK) h5_close(out);
    return status;
}
