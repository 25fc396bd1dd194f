// For LD_PRELOAD: makes one state-changing file call of a program fail.
//
// It counts the calls below the folder FAULT_DIR that change files, or promise that they are on the disk: open
// for writing, write, pwrite, ftruncate, posix_fallocate, fsync, fdatasync, close of what was open for writing, rename,
// link, symlink, unlink, mkdir, rmdir, fchmod, flock and locks of fcntl, and fflush and fclose of standard streams.
// With FAULT_LOG=FILE each is written there as "number name path". FAULT_MODE says what the FAULT_AT-th does: kill
// (SIGKILL before the call), term (SIGTERM, and a pause before the call), eio, enospc, eintr (the call is not made,
// but a close closes), short (half of a write).
// FAULT_LOCK_US: microseconds to wait before every flock, in which other processes can act.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum { SHORT = -1 };
static char placed[PATH_MAX]; // target of the last rename

static atomic_long calls;

#define REAL(name)                 \
    static __typeof__(&name) real; \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name)

static void note(long number, const char *name, const char *path)
{
    const char *log = getenv("FAULT_LOG");
    if (!log) return;
    char line[PATH_MAX + 64];
    int n = snprintf(line, sizeof line, "%ld %s %s\n", number, name, path);
    long file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0666);
    syscall(SYS_write, file, line, n);
    syscall(SYS_close, file);
}

// Counts a call. Returns 0 if it is to be made, SHORT, or the error that it is to end with.
static int hit(const char *name, const char *path)
{
    const char *folder = getenv("FAULT_DIR"), *at = getenv("FAULT_AT"), *mode = getenv("FAULT_MODE");
    size_t n = folder ? strlen(folder) : 0;
    if (!n || strncmp(path, folder, n) != 0 || (path[n] != '/' && path[n] != '\0')) return 0;
    long number = atomic_fetch_add(&calls, 1) + 1;
    note(number, name, path + n);
    if (!at || !mode || atol(at) != number) return 0;
    if (strcmp(mode, "kill") == 0) kill(getpid(), SIGKILL);
    if (strcmp(mode, "term") == 0) {
        kill(getpid(), SIGTERM);
        usleep(200000); // for a process that waits for this one
    }
    if (strcmp(mode, "short") == 0) return SHORT;
    return strcmp(mode, "eio") == 0      ? EIO
           : strcmp(mode, "enospc") == 0 ? ENOSPC
           : strcmp(mode, "eintr") == 0  ? EINTR
                                         : 0;
}

// Counts a call on a path, which is made absolute without following its last link.
static int hit_path(const char *name, int folder, const char *path)
{
    char base[PATH_MAX] = "", link[40], whole[2 * PATH_MAX + 2];
    if (path[0] == '/') return hit(name, path);
    snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
    if (readlink(link, base, sizeof base - 1) < 0) return 0;
    snprintf(whole, sizeof whole, "%s/%s", base, path);
    return hit(name, whole);
}

static int hit_file(const char *name, int file, bool only_written)
{
    char link[40], path[PATH_MAX] = "";
    int saved = errno, how = only_written ? fcntl(file, F_GETFL) : O_RDWR;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    bool counts = how >= 0 && (how & O_ACCMODE) != O_RDONLY && readlink(link, path, sizeof path - 1) > 0;
    errno = saved;
    return counts ? hit(name, path) : 0;
}

// With FAULT_MODE=unread, opening the target of the last rename for reading fails.
static int unread(const char *path)
{
    const char *mode = getenv("FAULT_MODE");
    return mode && strcmp(mode, "unread") == 0 && *placed && strcmp(path, placed) == 0 ? EIO : 0;
}

static int failed(int why)
{
    errno = why;
    return -1;
}

#define OPEN(name, parameters, before, ...)                                                        \
    int name parameters                                                                            \
    {                                                                                              \
        mode_t mode = 0;                                                                           \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                       \
            va_list args;                                                                          \
            va_start(args, flags);                                                                 \
            mode = va_arg(args, mode_t);                                                           \
            va_end(args);                                                                          \
        }                                                                                          \
        REAL(name);                                                                                \
        int why = (flags & O_ACCMODE) != O_RDONLY ? hit_path("open", before, path) : unread(path); \
        return why > 0 ? failed(why) : real(__VA_ARGS__, mode);                                    \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path, flags)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path, flags)
OPEN(openat, (int folder, const char *path, int flags, ...), folder, folder, path, flags)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, folder, path, flags)

ssize_t write(int file, const void *data, size_t n)
{
    REAL(write);
    int why = hit_file("write", file, true);
    return why > 0 ? failed(why) : real(file, data, why == SHORT && n > 1 ? n / 2 : n);
}

#define PWRITE(name, offset)                                                                    \
    ssize_t name(int file, const void *data, size_t n, offset at)                               \
    {                                                                                           \
        REAL(name);                                                                             \
        int why = hit_file("pwrite", file, true);                                               \
        return why > 0 ? failed(why) : real(file, data, why == SHORT && n > 1 ? n / 2 : n, at); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define ON_FILE(name, shown, only_written, parameters, ...) \
    int name parameters                                     \
    {                                                       \
        REAL(name);                                         \
        int why = hit_file(shown, file, only_written);      \
        return why > 0 ? failed(why) : real(__VA_ARGS__);   \
    }
ON_FILE(ftruncate, "ftruncate", true, (int file, off_t size), file, size)
ON_FILE(ftruncate64, "ftruncate", true, (int file, off64_t size), file, size)
ON_FILE(fsync, "fsync", false, (int file), file)
ON_FILE(fdatasync, "fdatasync", false, (int file), file)
ON_FILE(fchmod, "fchmod", false, (int file, mode_t mode), file, mode)

#define ALLOCATE(name, offset)                       \
    int name(int file, offset at, offset size)       \
    {                                                \
        REAL(name);                                  \
        int why = hit_file("fallocate", file, true); \
        return why > 0 ? why : real(file, at, size); \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

int flock(int file, int how)
{
    REAL(flock);
    const char *wait = getenv("FAULT_LOCK_US");
    int why = hit_file("flock", file, false);
    if (wait) usleep((useconds_t)atoi(wait));
    return why > 0 ? failed(why) : real(file, how);
}

int close(int file)
{
    REAL(close);
    int why = hit_file("close", file, true), result = real(file);
    return why > 0 ? failed(why) : result;
}

int rename(const char *from, const char *to)
{
    REAL(rename);
    int why = hit_path("rename", AT_FDCWD, to);
    snprintf(placed, sizeof placed, "%s", to);
    return why > 0 ? failed(why) : real(from, to);
}

#define ON_PATH(name, shown, folder, path, parameters, ...) \
    int name parameters                                     \
    {                                                       \
        REAL(name);                                         \
        int why = hit_path(shown, folder, path);            \
        return why > 0 ? failed(why) : real(__VA_ARGS__);   \
    }
ON_PATH(link, "link", AT_FDCWD, to, (const char *from, const char *to), from, to)
ON_PATH(symlink, "symlink", AT_FDCWD, path, (const char *to, const char *path), to, path)
ON_PATH(unlink, "unlink", AT_FDCWD, path, (const char *path), path)
ON_PATH(unlinkat, "unlink", folder, path, (int folder, const char *path, int flags), folder, path, flags)
ON_PATH(mkdir, "mkdir", AT_FDCWD, path, (const char *path, mode_t mode), path, mode)
ON_PATH(rmdir, "rmdir", AT_FDCWD, path, (const char *path), path)

// glibc's streams make system calls without passing through this file, so fflush and fclose themselves fail. After a
// failed fflush the data may still be written at exit; the program has been told of the failure all the same.
#define ON_STREAM(name, whole)                                                                     \
    int name(FILE *stream)                                                                         \
    {                                                                                              \
        REAL(name);                                                                                \
        int file = stream ? fileno(stream) : -1, why = file < 0 ? 0 : hit_file(#name, file, true); \
        if (why > 0 && (whole)) real(stream);                                                      \
        return why > 0 ? failed(why) : real(stream);                                               \
    }
ON_STREAM(fflush, false)
ON_STREAM(fclose, true)
