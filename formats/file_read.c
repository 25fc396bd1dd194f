#include "formats/file_read.h"
#include "formats/file_guard.h"
#include "runtime/fail.h"
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

kvb_status file_map(file_view *out, const char *path, kvb_error *err)
{
    *out = (file_view){0};
    // O_NONBLOCK: opening a pipe must not wait for a writer; it means nothing for regular files.
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return kvb_fail(err, KVB_IO, "%s: cannot open: %s", path, strerror(errno));
    struct stat st;
    kvb_status status = KVB_OK;
    if (fstat(fd, &st) != 0) {
        status = kvb_fail(err, KVB_IO, "%s: cannot read its size: %s", path, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        status = kvb_fail(err, KVB_ARGUMENT, "%s: is %s, expected a file", path,
                          S_ISDIR(st.st_mode) ? "a folder" : "a device, pipe or socket");
    } else if (st.st_size == 0) {
        status = kvb_fail(err, KVB_FORMAT, "%s: the file is empty", path);
    } else {
        void *data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED)
            status =
                kvb_fail(err, KVB_IO, "%s: cannot map %lld bytes: %s", path, (long long)st.st_size, strerror(errno));
        else *out = (file_view){data, (size_t)st.st_size, fd, file_guard_begin(data, (size_t)st.st_size), st.st_mtim};
    }
    if (!out->data) (void)close(fd); // only read
    return status;
}

kvb_status file_check(const file_view *view, const char *path, kvb_error *err)
{
    struct stat st;
    if (!view->data) return KVB_OK;
    if (fstat(view->fd, &st) != 0) return kvb_fail(err, KVB_IO, "%s: cannot read its size: %s", path, strerror(errno));
    if ((uint64_t)st.st_size != view->size)
        return kvb_fail(err, KVB_IO, "%s: had %zu bytes when it was opened and has %lld now: another program writes it",
                        path, view->size, (long long)st.st_size);
    if (file_guard_hit(view->guard))
        return kvb_fail(err, KVB_IO, "%s: a part of it could not be read; is the disk in order?", path);
    if (st.st_mtim.tv_sec != view->changed.tv_sec || st.st_mtim.tv_nsec != view->changed.tv_nsec)
        return kvb_fail(err, KVB_IO, "%s: was changed by another program while it was read", path);
    return KVB_OK;
}

void file_forget(const file_view *view)
{
    if (view->data)
        madvise((void *)(uintptr_t)view->data, view->size, MADV_DONTNEED); // only a hint: errors change nothing
}

void file_unmap(file_view *view)
{
    if (view->data) {
        file_guard_end(view->guard);
        munmap((void *)(uintptr_t)view->data, view->size); // munmap takes no const; nothing is written
        (void)close(view->fd);                             // only read
    }
    *view = (file_view){0};
}
