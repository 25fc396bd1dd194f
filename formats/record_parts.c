#include "atomic_file.h"
#include "names.h"
#include "record_internal.h"
#include "runtime/fail.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const char head_name[] = "head.h5", lock_name[] = "lock", replace_name[] = "replace";

static char *join(const char *folder, const char *name)
{
    char *path = NULL;
    return asprintf(&path, "%s/%s", folder, name) < 0 ? NULL : path;
}

char *parts_path(const char *record_path)
{
    char *path = NULL;
    return asprintf(&path, "%s.parts", record_path) < 0 ? NULL : path;
}

char *parts_head_path(const char *folder)
{
    return join(folder, head_name);
}

char *part_path(const char *folder, const char *id, bool is_question, uint32_t question)
{
    char name[128];
    if (is_question) snprintf(name, sizeof name, "question-%010u-%s.h5", question, id);
    else snprintf(name, sizeof name, "context-%s.h5", id);
    return join(folder, name);
}

bool path_exists(const char *path)
{
    return path && access(path, F_OK) == 0;
}

// The reverse of part_path. False for any other name.
static bool parse_part_name(part *out, const char *name)
{
    memset(out, 0, sizeof *out);
    size_t length = strlen(name);
    if (length < 3 || strcmp(name + length - 3, ".h5") != 0) return false;
    size_t skip;
    if (strncmp(name, "context-", 8) == 0) {
        skip = 8;
    } else if (strncmp(name, "question-", 9) == 0 && strspn(name + 9, "0123456789") == 10 && name[19] == '-') {
        unsigned long long number = strtoull(name + 9, NULL, 10);
        if (number > UINT32_MAX) return false;
        out->is_question = true;
        out->question = (uint32_t)number;
        skip = 20;
    } else {
        return false;
    }
    if (length - 3 <= skip || length - 3 - skip > CONTEXT_ID_MAX) return false;
    memcpy(out->id, name + skip, length - 3 - skip);
    return context_id_valid(out->id);
}

static bool is_partial(const char *name)
{
    size_t length = strlen(name);
    return length > 8 && strcmp(name + length - 8, ".partial") == 0;
}

// Removes unfinished files; without a head also finished parts, which then belong to a record that was assembled.
static void clean(const char *folder)
{
    char *head = parts_head_path(folder);
    bool has_head = path_exists(head);
    free(head);
    DIR *dir = opendir(folder);
    part ignored;
    for (struct dirent *e; dir && (e = readdir(dir));) {
        bool orphan = !has_head && (parse_part_name(&ignored, e->d_name) || strcmp(e->d_name, replace_name) == 0);
        if (orphan || is_partial(e->d_name)) unlinkat(dirfd(dir), e->d_name, 0);
    }
    if (dir) closedir(dir);
}

kvb_status parts_lock(int *lock, const char *folder, kvb_error *err)
{
    *lock = -1;
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return kvb_fail(err, KVB_IO, "%s: cannot make the folder: %s", folder, strerror(errno));
    char *path = join(folder, lock_name);
    if (!path) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory", folder);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    int why = errno;
    free(path);
    if (fd < 0) return kvb_fail(err, KVB_IO, "%s: cannot write into the folder: %s", folder, strerror(why));
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) { // other errors: a file system without locks
        close(fd);
        return kvb_fail(err, KVB_IO, "%s: another process is writing this record; wait for it or stop it", folder);
    }
    clean(folder);
    *lock = fd;
    return KVB_OK;
}

kvb_status parts_scan(part **parts, size_t *n, uint64_t *bytes, const char *folder, kvb_error *err)
{
    size_t capacity = 0;
    *parts = NULL;
    *n = 0;
    *bytes = 0;
    DIR *dir = opendir(folder);
    if (!dir) return kvb_fail(err, KVB_IO, "%s: cannot read the folder: %s", folder, strerror(errno));
    kvb_status status = KVB_OK;
    for (struct dirent *e; (e = readdir(dir));) {
        part one;
        struct stat st;
        if (!parse_part_name(&one, e->d_name)) continue;
        if (fstatat(dirfd(dir), e->d_name, &st, 0) != 0) {
            status = kvb_fail(err, KVB_IO, "%s/%s: cannot read its size: %s", folder, e->d_name, strerror(errno));
            break;
        }
        if (*n == capacity) {
            capacity = capacity ? 2 * capacity : 64;
            part *larger = reallocarray(*parts, capacity, sizeof *larger);
            if (!larger) {
                status = kvb_fail(err, KVB_MEMORY, "%s: not enough memory for %zu parts", folder, capacity);
                break;
            }
            *parts = larger;
        }
        *bytes += (uint64_t)st.st_size;
        (*parts)[(*n)++] = one;
    }
    closedir(dir);
    if (status != KVB_OK) {
        free(*parts);
        *parts = NULL;
        *n = 0;
    }
    return status;
}

kvb_status parts_mark_replace(const char *folder, kvb_error *err)
{
    char *path = join(folder, replace_name);
    kvb_status status =
        path ? atomic_write(path, "", 0, err) : kvb_fail(err, KVB_MEMORY, "%s: not enough memory", folder);
    free(path);
    return status;
}

bool parts_replace(const char *folder)
{
    char *path = join(folder, replace_name);
    bool found = path_exists(path);
    free(path);
    return found;
}

void parts_clear(const char *folder)
{
    char *head = parts_head_path(folder);
    if (head) unlink(head);
    if (!path_exists(head)) clean(folder);
    free(head);
}

void parts_remove(const char *folder)
{
    char *lock = join(folder, lock_name);
    parts_clear(folder);
    if (lock) unlink(lock);
    rmdir(folder); // stays when the user put something into it
    free(lock);
}
