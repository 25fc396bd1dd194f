#include "atomic_file.h"
#include "runtime/fail.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

// PATH.<8 hex digits>.partial
enum { HEX_DIGITS = 8 };
static const char partial_suffix[] = ".partial";

// What the target of the final rename is: `path` itself, or where the symbolic link at `path` points.
static kvb_status resolve_target(char **out, const char *path, kvb_error *err)
{
    struct stat st;
    if (stat(path, &st) != 0) {
        if (errno != ENOENT) return kvb_fail(err, KVB_IO, "%s: cannot write: %s", path, strerror(errno));
        *out = strdup(path);
    } else if (!S_ISREG(st.st_mode)) {
        return kvb_fail(err, KVB_ARGUMENT, "%s: is %s, expected a file that can be replaced; choose another name", path,
                        S_ISDIR(st.st_mode) ? "a folder" : "a device, pipe or socket");
    } else {
        *out = realpath(path, NULL);
    }
    return *out ? KVB_OK : kvb_fail(err, KVB_MEMORY, "%s: cannot write: %s", path, strerror(errno));
}

// open(2) with 0666 lets the umask decide about the mode, as for any other file; mkstemp would fix it to 0600.
static int open_new(char *temp_path, size_t size, const char *final_path)
{
    for (int attempt = 0; attempt < 100; attempt++) {
        uint32_t number;
        if (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number) return -1;
        snprintf(temp_path, size, "%s.%0*x%s", final_path, HEX_DIGITS, number, partial_suffix);
        int fd = open(temp_path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd >= 0 || errno != EEXIST) return fd;
    }
    return -1;
}

kvb_status atomic_file_begin(atomic_file *f, const char *path, kvb_error *err)
{
    memset(f, 0, sizeof *f);
    atomic_file made = {0};
    kvb_status status = resolve_target(&made.final_path, path, err);
    if (status != KVB_OK) return status;
    size_t size = strlen(made.final_path) + 1 + HEX_DIGITS + sizeof partial_suffix;
    made.temp_path = malloc(size);
    if (!made.temp_path) {
        status = kvb_fail(err, KVB_MEMORY, "%s: no memory for its name", path);
        goto fail;
    }
    int fd = open_new(made.temp_path, size, made.final_path);
    if (fd < 0) {
        status = kvb_fail(err, KVB_IO, "%s: cannot make a file in its folder: %s", path, strerror(errno));
        goto fail;
    }
    made.stream = fdopen(fd, "w+b");
    if (!made.stream) {
        status = kvb_fail(err, KVB_IO, "%s: cannot write: %s", path, strerror(errno));
        close(fd);
        unlink(made.temp_path);
        goto fail;
    }
    *f = made;
    return KVB_OK;
fail:
    free(made.temp_path);
    free(made.final_path);
    return status;
}

// A rename is on the disk only once the folder that holds the name is synced.
static kvb_status sync_folder_of(const char *path, kvb_error *err)
{
    char *folder = strdup(path);
    if (!folder) return kvb_fail(err, KVB_MEMORY, "%s: no memory for its name", path);
    char *slash = strrchr(folder, '/');
    if (slash) slash[slash == folder ? 1 : 0] = '\0';
    int fd = open(slash ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    // Some file systems do not sync folders (EINVAL): there is nothing more to do on those.
    int failed = fd < 0 || (fsync(fd) != 0 && errno != EINVAL && errno != EROFS);
    kvb_status status = KVB_OK;
    if (failed)
        status = kvb_fail(err, KVB_IO, "%s: written, but its folder cannot be synced: %s", path, strerror(errno));
    if (fd >= 0) close(fd);
    free(folder);
    return status;
}

kvb_status atomic_file_commit(atomic_file *f, kvb_error *err)
{
    const char *what = NULL;
    if (ferror(f->stream) || fflush(f->stream) != 0) what = "cannot write";
    else if (fsync(fileno(f->stream)) != 0) what = "cannot sync";
    int why = errno;
    if (fclose(f->stream) != 0 && !what) {
        what = "cannot close";
        why = errno;
    }
    f->stream = NULL;
    if (!what && rename(f->temp_path, f->final_path) != 0) {
        what = "cannot put the finished file in place";
        why = errno;
    }
    kvb_status status = KVB_OK;
    if (what) {
        status = kvb_fail(err, KVB_IO, "%s: %s: %s; nothing was changed", f->final_path, what, strerror(why));
    } else {
        free(f->temp_path);
        f->temp_path = NULL; // it has its final name now: nothing to remove
        status = sync_folder_of(f->final_path, err);
    }
    atomic_file_abandon(f);
    return status;
}

void atomic_file_abandon(atomic_file *f)
{
    if (f->stream) fclose(f->stream);
    if (f->temp_path) unlink(f->temp_path);
    free(f->temp_path);
    free(f->final_path);
    memset(f, 0, sizeof *f);
}

kvb_status atomic_write(const char *path, const void *data, size_t size, kvb_error *err)
{
    atomic_file f;
    kvb_status status = atomic_file_begin(&f, path, err);
    if (status != KVB_OK) return status;
    if (size > 0 && fwrite(data, 1, size, f.stream) != size) {
        status =
            kvb_fail(err, KVB_IO, "%s: cannot write %zu bytes: %s; nothing was changed", path, size, strerror(errno));
        atomic_file_abandon(&f);
        return status;
    }
    return atomic_file_commit(&f, err);
}

static int is_partial_of(const char *name, const char *base)
{
    size_t n = strlen(base);
    if (strncmp(name, base, n) != 0 || name[n] != '.' || strspn(name + n + 1, "0123456789abcdef") != HEX_DIGITS)
        return 0;
    return strcmp(name + n + 1 + HEX_DIGITS, partial_suffix) == 0;
}

void atomic_file_remove_stale(const char *path)
{
    char *target = realpath(path, NULL);
    char *folder = strdup(target ? target : path);
    free(target);
    if (!folder) return;
    char *slash = strrchr(folder, '/');
    const char *base = slash ? slash + 1 : folder;
    DIR *dir = NULL;
    if (slash == folder) {
        dir = opendir("/");
    } else if (slash) {
        *slash = '\0';
        dir = opendir(folder);
    } else {
        dir = opendir(".");
    }
    for (struct dirent *e; dir && (e = readdir(dir));) {
        if (is_partial_of(e->d_name, base)) unlinkat(dirfd(dir), e->d_name, 0);
    }
    if (dir) closedir(dir);
    free(folder);
}
