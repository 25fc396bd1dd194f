#include "formats/file_io.h"
#include "formats/need.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

int file_open_at(int folder, const char *name, int flags, mode_t mode)
{
    int file;
    do file = openat(folder, name, flags | O_CLOEXEC, mode);
    while (file < 0 && errno == EINTR);
    return file;
}

int file_open(const char *path, int flags, mode_t mode)
{
    return file_open_at(AT_FDCWD, path, flags, mode);
}

bool file_write_all(int file, const void *data, size_t size)
{
    const char *at = data;
    while (size > 0) {
        ssize_t n = write(file, at, size);
        if (n < 0 && errno != EINTR) return false;
        if (n == 0) { // cannot happen with a regular file, but must not go on for ever
            errno = EIO;
            return false;
        }
        if (n > 0) at += n, size -= (size_t)n;
    }
    return true;
}

bool file_sync(int file)
{
    int failed;
    do failed = fsync(file);
    while (failed && errno == EINTR);
    return !failed;
}

bool file_truncate(int file, off_t size)
{
    int failed;
    do failed = ftruncate(file, size);
    while (failed && errno == EINTR);
    return !failed;
}

bool file_close(int file)
{
    return close(file) == 0 || errno == EINTR;
}

bool file_lock(int file, bool wait)
{
    int failed;
    do failed = flock(file, wait ? LOCK_EX : LOCK_EX | LOCK_NB);
    while (failed && errno == EINTR);
    return !failed || errno != EWOULDBLOCK;
}

char *file_folder(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (!slash) return need_text(".");
    return need_text("%.*s", slash == path ? 1 : (int)(slash - path), path);
}

const char *file_base(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

bool file_sync_folder(const char *path)
{
    char *folder = file_folder(path);
    int file = file_open(folder, O_RDONLY | O_DIRECTORY, 0);
    free(folder);
    if (file < 0) return false;
    bool synced = file_sync(file) || errno == EINVAL || errno == EROFS;
    int why = errno;
    bool closed = file_close(file);
    if (!synced) errno = why;
    return synced && closed;
}

bool path_exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

bool file_identify(file_identity *out, int file)
{
    struct stat st;
    if (fstat(file, &st) != 0) return false;
    *out = (file_identity){st.st_dev, st.st_ino, st.st_size, st.st_mtim};
    return true;
}

bool file_same(const file_identity *a, const file_identity *b)
{
    return a->device == b->device && a->inode == b->inode && a->size == b->size &&
           a->changed.tv_sec == b->changed.tv_sec && a->changed.tv_nsec == b->changed.tv_nsec;
}
