#include "atomic_folder.h"
#include "atomic_file.h"
#include "file_io.h"
#include "runtime/fail.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st;
    (void)where;
    return kind == FTW_DP ? rmdir(path) : unlink(path);
}

static bool remove_tree(const char *path)
{
    return nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS) == 0;
}

static int open_folder(const char *path)
{
    return file_open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
}

// What killed writers left; a living one holds a lock on its own.
static void remove_stale(const char *final_path)
{
    char *parent = file_folder(final_path), *path = NULL;
    const char *base = file_base(final_path);
    DIR *dir = parent ? opendir(parent) : NULL;
    for (struct dirent *e; dir && (e = readdir(dir));) {
        if (!atomic_file_is_partial(e->d_name, base, strlen(base))) continue;
        if (asprintf(&path, "%s/%s", parent, e->d_name) < 0) break;
        int file = open_folder(path);
        if (file >= 0 && file_lock(file, false)) (void)remove_tree(path); // stays where it cannot be removed
        if (file >= 0) (void)file_close(file);                            // only its lock
        free(path);
    }
    if (dir) (void)closedir(dir); // only read
    free(parent);
}

// The name without slashes at its end, and where a symbolic link leads.
static kvb_status resolve(char **out, const char *dir, kvb_error *err)
{
    struct stat st;
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/') n--;
    bool found = lstat(dir, &st) == 0;
    *out = found ? realpath(dir, NULL) : strndup(dir, n);
    if (*out) return KVB_OK;
    return kvb_fail(err, KVB_IO, "%s: cannot make the folder: %s", dir, strerror(errno));
}

static kvb_status check_empty(const char *dir, kvb_error *err)
{
    DIR *open_dir = opendir(dir);
    if (!open_dir && errno == ENOENT) return KVB_OK;
    if (!open_dir) return kvb_fail(err, KVB_IO, "%s: cannot read the folder: %s", dir, strerror(errno));
    bool empty = true;
    for (struct dirent *e; (e = readdir(open_dir));)
        empty = empty && (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0);
    (void)closedir(open_dir); // only read
    if (empty) return KVB_OK;
    return kvb_fail(err, KVB_ARGUMENT, "%s: is not empty; give a new folder, so that nothing old is mixed in", dir);
}

static kvb_status make_new(atomic_folder *f, const char *dir, kvb_error *err)
{
    for (int attempt = 0; attempt < 100; attempt++) {
        uint32_t number;
        free(f->temp_path);
        f->temp_path = NULL;
        if (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number) break;
        if (asprintf(&f->temp_path, "%s.%08x.partial", f->final_path, number) < 0) {
            f->temp_path = NULL;
            return kvb_fail(err, KVB_MEMORY, "%s: no memory for its name", dir);
        }
        if (mkdir(f->temp_path, 0777) != 0 && errno == EEXIST) continue;
        f->lock = open_folder(f->temp_path);
        if (f->lock < 0 && errno == ENOENT) continue; // somebody took it for a leftover, before the lock
        if (f->lock >= 0) (void)file_lock(f->lock, true);
        if (f->lock >= 0) return KVB_OK;
        break;
    }
    kvb_status status = kvb_fail(err, KVB_IO, "%s: cannot make the folder: %s", dir, strerror(errno));
    if (f->temp_path) rmdir(f->temp_path); // there when only its lock failed
    return status;
}

kvb_status atomic_folder_begin(atomic_folder *f, const char *dir, kvb_error *err)
{
    *f = (atomic_folder){.lock = -1};
    kvb_status status = resolve(&f->final_path, dir, err);
    if (status == KVB_OK) status = check_empty(f->final_path, err);
    if (status == KVB_OK) remove_stale(f->final_path);
    if (status == KVB_OK) status = make_new(f, dir, err);
    if (status == KVB_OK) return KVB_OK;
    free(f->temp_path);
    free(f->final_path);
    *f = (atomic_folder){.lock = -1};
    return status;
}

kvb_status atomic_folder_end(atomic_folder *f, kvb_status status, kvb_error *err)
{
    if (!f->temp_path) return status;
    if (status == KVB_OK && !file_sync(f->lock))
        status = kvb_fail(err, KVB_IO, "%s: cannot sync: %s", f->final_path, strerror(errno));
    if (status == KVB_OK && rename(f->temp_path, f->final_path) != 0)
        status =
            kvb_fail(err, KVB_IO, "%s: cannot put the finished folder in place: %s", f->final_path, strerror(errno));
    if (status != KVB_OK) (void)remove_tree(f->temp_path); // what stays goes with the next run
    else if (!file_sync_folder(f->final_path))
        status =
            kvb_fail(err, KVB_IO, "%s: written, but its folder cannot be synced: %s", f->final_path, strerror(errno));
    (void)file_close(f->lock); // only its lock
    free(f->temp_path);
    free(f->final_path);
    *f = (atomic_folder){.lock = -1};
    return status;
}
