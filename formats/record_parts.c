#include "atomic_file.h"
#include "formats/need.h"
#include "names.h"
#include "record_internal.h"
#include "runtime/fail.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char head_name[] = "head.h5", lock_name[] = "lock", replace_name[] = "replace";

static char *join(const char *folder, const char *name)
{
    return need_text("%s/%s", folder, name);
}

char *parts_path(const char *record_path)
{
    return need_text("%s.parts", record_path);
}

char *parts_head_path(const char *folder)
{
    return join(folder, head_name);
}

enum { PART_NAME_MAX = 128 };

static void part_name(char name[PART_NAME_MAX], const char *id, bool is_question, uint32_t question)
{
    if (is_question) snprintf(name, PART_NAME_MAX, "question-%010u-%s.h5", question, id);
    else snprintf(name, PART_NAME_MAX, "context-%s.h5", id);
}

char *part_path(const char *folder, const char *id, bool is_question, uint32_t question)
{
    char name[PART_NAME_MAX];
    part_name(name, id, is_question, question);
    return join(folder, name);
}

char *part_losses_path(const char *folder, const char *id, uint32_t question)
{
    return need_text("%s/losses-%010u-%s.h5", folder, question, id);
}

static const char kept_before[] = "prefill-", kept_after[] = ".kept";

char *parts_kept_path(const char *folder, const char *id)
{
    return need_text("%s/%s%s%s", folder, kept_before, id, kept_after);
}

bool path_exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

static bool exists_in(const char *folder, const char *name)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof path, "%s/%s", folder, name);
    return n > 0 && (size_t)n < sizeof path && path_exists(path); // no file has a longer path
}

bool part_exists(const char *folder, const char *id, bool is_question, uint32_t question)
{
    char name[PART_NAME_MAX];
    part_name(name, id, is_question, question);
    return exists_in(folder, name);
}

bool parts_have_head(const char *folder)
{
    return exists_in(folder, head_name);
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

static bool is_kept_name(const char *name)
{
    char id[CONTEXT_ID_MAX + 1];
    size_t length = strlen(name), before = sizeof kept_before - 1, after = sizeof kept_after - 1;
    if (length <= before + after || length - before - after > CONTEXT_ID_MAX) return false;
    if (strncmp(name, kept_before, before) != 0 || strcmp(name + length - after, kept_after) != 0) return false;
    snprintf(id, sizeof id, "%.*s", (int)(length - before - after), name + before);
    return context_id_valid(id);
}

static bool is_losses_name(const char *name)
{
    part ignored;
    char question[PART_NAME_MAX];
    if (strncmp(name, "losses-", 7) != 0) return false;
    int length = snprintf(question, sizeof question, "question-%.110s", name + 7); // longer ones are of nobody
    return strlen(name) <= 110 && length > 0 && parse_part_name(&ignored, question);
}

// What belongs to the run whose head the folder has, the head itself aside.
static bool is_of_run(const char *name)
{
    part ignored;
    if (is_losses_name(name)) return true;
    return parse_part_name(&ignored, name) || is_kept_name(name) || strcmp(name, replace_name) == 0;
}

// A temporary file of one of these or of the head.
static bool is_partial(const char *name)
{
    static const char suffix[] = ".00000000.partial";
    size_t length = strlen(name), cut = sizeof suffix - 1;
    char base[NAME_MAX + 1];
    if (length <= cut || length > NAME_MAX) return false;
    snprintf(base, sizeof base, "%.*s", (int)(length - cut), name);
    return atomic_file_is_partial(name, base, length - cut) && (strcmp(base, head_name) == 0 || is_of_run(base));
}

// ---- The folder ----

// Never through a symbolic link, so that nothing of another folder is taken for ours.
static int open_folder(const char *folder)
{
    return file_open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
}

// The folder as a stream of names; NULL with errno.
static DIR *list_folder(const char *folder)
{
    int file = open_folder(folder);
    DIR *dir = file < 0 ? NULL : fdopendir(file);
    if (!dir && file >= 0) (void)file_close(file); // only read
    return dir;
}

static kvb_status cannot_remove(const char *folder, const char *name, kvb_error *err)
{
    return kvb_fail(err, KVB_IO, "%s/%s: cannot be removed: %s", folder, name, strerror(errno));
}

// Removes unfinished files; without a head also finished parts, which then belong to a record that was assembled.
static kvb_status clean(const char *folder, kvb_error *err)
{
    DIR *dir = list_folder(folder);
    if (!dir) return kvb_fail(err, KVB_IO, "%s: cannot read the folder: %s", folder, strerror(errno));
    bool has_head = faccessat(dirfd(dir), head_name, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
    kvb_status status = KVB_OK;
    for (struct dirent *e; (e = readdir(dir));) {
        bool orphan = !has_head && is_of_run(e->d_name);
        if ((orphan || is_partial(e->d_name)) && unlinkat(dirfd(dir), e->d_name, 0) != 0 && errno != ENOENT &&
            status == KVB_OK)
            status = cannot_remove(folder, e->d_name, err);
    }
    (void)closedir(dir); // only read
    return status;
}

// ---- The lock ----

typedef enum lock_attempt { LOCK_HELD, LOCK_AGAIN, LOCK_FAILED } lock_attempt;

// Whether the name still leads to the file that was locked: the process that had it before may have removed it.
static bool is_current(int file, const char *path)
{
    struct stat mine, named;
    return fstat(file, &mine) == 0 && lstat(path, &named) == 0 && mine.st_dev == named.st_dev &&
           mine.st_ino == named.st_ino;
}

static lock_attempt try_lock(int *lock, const char *folder, const char *path, kvb_error *err)
{
    struct stat st;
    if (mkdir(folder, 0777) == 0) {
        if (!file_sync_folder(folder)) {
            kvb_fail(err, KVB_IO, "%s: cannot sync its folder: %s", folder, strerror(errno));
            rmdir(folder);
            return LOCK_FAILED;
        }
    } else if (errno != EEXIST) {
        kvb_fail(err, KVB_IO, "%s: cannot make the folder: %s", folder, strerror(errno));
        return LOCK_FAILED;
    }
    int dir = open_folder(folder),
        file = dir < 0 ? -1 : file_open_at(dir, lock_name, O_RDWR | O_CREAT | O_NOFOLLOW, 0666);
    int why = errno;
    if (dir >= 0) (void)file_close(dir);              // only read
    if (file < 0 && why == ENOENT) return LOCK_AGAIN; // removed just now by who had it
    if (file < 0) {
        bool link = lstat(dir < 0 ? folder : path, &st) == 0 && S_ISLNK(st.st_mode);
        kvb_fail(err, KVB_IO, "%s: cannot be locked: %s", dir < 0 ? folder : path,
                 link ? "is a symbolic link, and what it leads to may not be ours; remove it" : strerror(why));
        return LOCK_FAILED;
    }
    if (!file_lock(file, false)) {
        (void)file_close(file); // never written to
        kvb_fail(err, KVB_IO, "%s: another process is writing this record; wait for it or stop it", folder);
        return LOCK_FAILED;
    }
    if (is_current(file, path)) {
        *lock = file;
        return LOCK_HELD;
    }
    (void)file_close(file);
    return LOCK_AGAIN;
}

kvb_status parts_lock(int *lock, const char *folder, kvb_error *err)
{
    enum { ATTEMPTS = 1000 };
    *lock = -1;
    char *path = join(folder, lock_name);
    lock_attempt result = LOCK_AGAIN;
    for (int i = 0; i < ATTEMPTS && result == LOCK_AGAIN; i++) result = try_lock(lock, folder, path, err);
    free(path);
    if (result == LOCK_AGAIN)
        return kvb_fail(err, KVB_IO, "%s: other processes make and remove the folder all the time", folder);
    if (result == LOCK_FAILED) return KVB_IO;
    kvb_status status = clean(folder, err);
    if (status == KVB_OK) return KVB_OK;
    (void)file_close(*lock);
    *lock = -1;
    return status;
}

// ---- Parts ----

kvb_status parts_scan(part **parts, size_t *n, uint64_t *bytes, const char *folder, kvb_error *err)
{
    size_t capacity = 0;
    *parts = NULL;
    *n = 0;
    *bytes = 0;
    DIR *dir = list_folder(folder);
    if (!dir) return kvb_fail(err, KVB_IO, "%s: cannot read the folder: %s", folder, strerror(errno));
    kvb_status status = KVB_OK;
    for (struct dirent *e; (e = readdir(dir));) {
        part one;
        struct stat st;
        bool counted = parse_part_name(&one, e->d_name);
        if (!counted && !is_losses_name(e->d_name)) continue;
        if (fstatat(dirfd(dir), e->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
            status = kvb_fail(err, KVB_IO, "%s/%s: cannot read its size: %s", folder, e->d_name, strerror(errno));
            break;
        }
        if (!counted) {
            *bytes += (uint64_t)st.st_size;
            continue;
        }
        if (*n == capacity) {
            capacity = capacity ? 2 * capacity : 64;
            *parts = need_more(*parts, capacity, sizeof **parts, "parts");
        }
        *bytes += (uint64_t)st.st_size;
        (*parts)[(*n)++] = one;
    }
    (void)closedir(dir); // only read
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
    atomic_file mark;
    kvb_status status = atomic_file_begin_own(&mark, path, err);
    if (status == KVB_OK) status = atomic_file_commit(&mark, err);
    free(path);
    return status;
}

bool parts_replace(const char *folder)
{
    return exists_in(folder, replace_name);
}

kvb_status parts_clear(const char *folder, kvb_error *err)
{
    int dir = open_folder(folder);
    if (dir < 0) return kvb_fail(err, KVB_IO, "%s: cannot open the folder: %s", folder, strerror(errno));
    kvb_status status = KVB_OK;
    if (unlinkat(dir, head_name, 0) != 0 && errno != ENOENT) status = cannot_remove(folder, head_name, err);
    (void)file_close(dir); // only read
    return status == KVB_OK ? clean(folder, err) : status;
}

kvb_status parts_remove(const char *folder, kvb_error *err)
{
    kvb_status status = parts_clear(folder, err);
    char *lock = status == KVB_OK ? join(folder, lock_name) : NULL;
    if (lock && unlink(lock) != 0 && errno != ENOENT) status = cannot_remove(folder, lock_name, err);
    // Stays when the user put something into it.
    if (status == KVB_OK && rmdir(folder) != 0 && errno != ENOTEMPTY && errno != EEXIST && errno != ENOENT)
        status = kvb_fail(err, KVB_IO, "%s: cannot be removed: %s", folder, strerror(errno));
    free(lock);
    return status;
}
