#include "formats/atomic_file.h"
#include "formats/file_io.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <unistd.h>

// PATH.<8 hex digits>.partial
enum { HEX_DIGITS = 8, STREAM_BUFFER = 1 << 16, ATTEMPTS = 100 };
static const char partial_suffix[] = ".partial";
enum { LONGEST_NAME = NAME_MAX - (1 + HEX_DIGITS + (int)sizeof partial_suffix - 1) };

// A temporary file or folder that is being written.
typedef struct temporary {
    const char *path;
    struct temporary *next;
} temporary;

struct atomic_state {
    temporary self;
    int file; // -1: closed
    // A second descriptor of the open file, which keeps its lock, the sign of a living writer, until after the rename.
    int lock;
    int why;      // errno of the first write that failed, 0: none
    mode_t mode;  // of the file that is replaced
    bool replace; // whether there is one
};

// ---- What is being written ----

// Held while a temporary file is made, renamed or removed, and for good by the thread that removes them all.
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static temporary *first;

static void enlist(temporary *t, const char *path)
{
    need_before_stopping(atomic_files_remove);
    *t = (temporary){path, first};
    first = t;
}

static void strike_off(const temporary *t)
{
    temporary **at = &first;
    while (*at && *at != t) at = &(*at)->next;
    if (*at) *at = t->next;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st;
    (void)where;
    return kind == FTW_DP ? rmdir(path) : unlink(path);
}

// Removes a file, or a folder with everything in it: again where its writer has just put a folder into it.
static void remove_tree(const char *path)
{
    for (int i = ATTEMPTS; i && nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS) && errno == ENOTEMPTY; i--) continue;
}

void atomic_files_remove(void)
{
    pthread_mutex_lock(&guard);
    for (; first; first = first->next) remove_tree(first->path);
}

// ---- The target ----

static kvb_status refuse(kvb_error *err, const char *path, const char *what)
{
    return kvb_fail(err, KVB_IO, "%s: cannot write: %s", path, what);
}

// Checks that an existing target is a regular file that may be written, and remembers its mode.
static kvb_status look_at_target(struct atomic_state *s, const char *path, const struct stat *st, kvb_error *err)
{
    if (!S_ISREG(st->st_mode))
        return kvb_fail(err, KVB_ARGUMENT, "%s: is %s, expected a file that can be replaced; choose another name", path,
                        S_ISDIR(st->st_mode) ? "a folder" : "a device, pipe or socket");
    // Root could write anything, but the mode counts for root as well: somebody wanted this file to stay.
    if (!(st->st_mode & (S_IWUSR | S_IWGRP | S_IWOTH)) || faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) != 0)
        return kvb_fail(err, KVB_IO, "%s: is read-only and would be replaced; chmod u+w it, or choose another name",
                        path);
    s->replace = true;
    s->mode = st->st_mode & 07777;
    return KVB_OK;
}

// Finds the target of the final rename: `path` itself, or where the symbolic link at `path` leads.
static kvb_status resolve_target(struct atomic_state *s, char **out, const char *path, kvb_error *err)
{
    struct stat link, st;
    *out = NULL;
    bool found = lstat(path, &link) == 0;
    if (!found && errno != ENOENT) return refuse(err, path, strerror(errno));
    if (found && S_ISLNK(link.st_mode) && stat(path, &st) != 0)
        return kvb_fail(err, KVB_IO,
                        "%s: is a symbolic link that leads nowhere (%s); remove it, or choose another name", path,
                        strerror(errno));
    if (found && !S_ISLNK(link.st_mode)) st = link;
    kvb_status status = found ? look_at_target(s, path, &st, err) : KVB_OK;
    if (status != KVB_OK) return status;
    *out = found && S_ISLNK(link.st_mode) ? realpath(path, NULL) : need_text("%s", path);
    if (!*out) return refuse(err, path, strerror(errno));
    size_t length = strlen(file_base(*out));
    if (length > 0 && length <= LONGEST_NAME) return KVB_OK;
    status = kvb_fail(err, KVB_ARGUMENT, "%s: the name of a file to write has 1 to %d bytes, this one %zu", path,
                      (int)LONGEST_NAME, length);
    free(*out);
    *out = NULL;
    return status;
}

static kvb_status check_folder(const char *final_path, const char *path, kvb_error *err)
{
    char *folder = file_folder(final_path);
    struct stat st;
    bool good = stat(folder, &st) == 0;
    if (good && !S_ISDIR(st.st_mode)) errno = ENOTDIR, good = false;
    good = good && faccessat(AT_FDCWD, folder, W_OK | X_OK, AT_EACCESS) == 0;
    int why = errno;
    free(folder);
    return good ? KVB_OK : kvb_fail(err, KVB_IO, "%s: cannot make a file in its folder: %s", path, strerror(why));
}

kvb_status atomic_file_check(const char *path, kvb_error *err)
{
    struct atomic_state s = {0};
    char *final_path;
    kvb_status status = resolve_target(&s, &final_path, path, err);
    if (status == KVB_OK) status = check_folder(final_path, path, err);
    free(final_path);
    return status;
}

// ---- The stream ----

static ssize_t stream_write(void *cookie, const char *data, size_t size)
{
    struct atomic_state *s = cookie;
    if (s->why == 0 && file_write_all(s->file, data, size)) return (ssize_t)size;
    if (s->why == 0) s->why = errno;
    errno = s->why;
    return 0; // how fopencookie is told of a failure
}

static int stream_seek(void *cookie, off64_t *offset, int whence)
{
    off64_t at = lseek(((struct atomic_state *)cookie)->file, *offset, whence);
    if (at < 0) return -1;
    *offset = at;
    return 0;
}

static FILE *open_stream(struct atomic_state *s)
{
    FILE *stream = fopencookie(s, "wb", (cookie_io_functions_t){.write = stream_write, .seek = stream_seek});
    if (stream) setvbuf(stream, NULL, _IOFBF, STREAM_BUFFER); // if there is no memory, the default buffer stays
    return stream;
}

// ---- Beginning ----

// Locks the new file, so that nobody takes it for a leftover. Returns false if somebody did before it was locked.
static bool hold(struct atomic_state *s)
{
    struct stat st;
    file_lock(s->file, true);
    if (fstat(s->file, &st) == 0 && st.st_nlink == 0) return false;
    s->lock = fcntl(s->file, F_DUPFD_CLOEXEC, 0);
    return true;
}

// Allocates room for a temporary name. Not to be done under `guard`, which need() takes when it ends the program.
static char *make_room(const char *final_path)
{
    return need(strlen(final_path) + 1 + HEX_DIGITS + sizeof partial_suffix, 1, "bytes of a name");
}

static bool name_temporary(char *path, const char *final_path)
{
    uint32_t number;
    if (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number) return false;
    sprintf(path, "%s.%0*x%s", final_path, HEX_DIGITS, number, partial_suffix); // fits by make_room
    return true;
}

// open(2) with 0666 lets the umask decide about the mode, as for any other file; mkstemp would fix it to 0600.
static bool open_new(struct atomic_state *s, char *path, const char *final_path)
{
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        if (!name_temporary(path, final_path)) return false;
        s->file = file_open(path, O_RDWR | O_CREAT | O_EXCL, 0666);
        if (s->file < 0 && errno == EEXIST) continue;
        if (s->file < 0 || hold(s)) return s->file >= 0;
        if (!file_close(s->file)) return false;
        s->file = -1;
    }
    errno = EEXIST;
    return false;
}

static void close_all(struct atomic_state *s)
{
    if (s->file >= 0) (void)file_close(s->file); // what it holds is given up
    if (s->lock >= 0) (void)file_close(s->lock);
    free(s);
}

// Makes the temporary file; on failure the caller closes what is open.
static kvb_status begin(atomic_file *f, struct atomic_state *s, char *final_path, const char *path, kvb_error *err)
{
    char *temp_path = make_room(final_path);
    pthread_mutex_lock(&guard);
    bool made = open_new(s, temp_path, final_path);
    if (made) enlist(&s->self, temp_path);
    pthread_mutex_unlock(&guard);
    FILE *stream = made && (!s->replace || fchmod(s->file, s->mode) == 0) ? open_stream(s) : NULL;
    *f = (atomic_file){stream, temp_path, final_path, s};
    if (stream) return KVB_OK;
    return kvb_fail(err, KVB_IO, "%s: cannot %s: %s", path, made ? "write" : "make a file in its folder",
                    strerror(errno));
}

static kvb_status begin_at(atomic_file *f, const char *path, bool own, kvb_error *err)
{
    *f = (atomic_file){0};
    struct atomic_state *s = need(1, sizeof *s, "files to write");
    s->file = s->lock = -1;
    char *final_path = own ? need_text("%s", path) : NULL;
    kvb_status status = own ? KVB_OK : resolve_target(s, &final_path, path, err);
    if (status != KVB_OK) {
        free(s);
        return status;
    }
    if (!own) atomic_file_remove_stale(final_path);
    status = begin(f, s, final_path, path, err);
    if (status != KVB_OK) atomic_file_abandon(f);
    return status;
}

kvb_status atomic_file_begin(atomic_file *f, const char *path, kvb_error *err)
{
    return begin_at(f, path, false, err);
}

kvb_status atomic_file_begin_own(atomic_file *f, const char *path, kvb_error *err)
{
    return begin_at(f, path, true, err);
}

// ---- Ending ----

// Puts the whole stream on the disk and closes its descriptor. Returns NULL, or what could not be done, with errno set.
static const char *finish_writing(atomic_file *f)
{
    struct atomic_state *s = f->state;
    bool flushed = fflush(f->stream) == 0 && !ferror(f->stream) && s->why == 0;
    int why = s->why ? s->why : errno;
    bool closed = fclose(f->stream) == 0; // frees the stream; the descriptor stays
    f->stream = NULL;
    if (!flushed || !closed) {
        errno = s->why ? s->why : flushed ? errno : why;
        return "cannot write";
    }
    if (!file_sync(s->file)) return "cannot sync";
    closed = file_close(s->file);
    s->file = -1;
    return closed ? NULL : "cannot close";
}

kvb_status atomic_file_commit(atomic_file *f, kvb_error *err)
{
    const char *what = finish_writing(f);
    kvb_status status = KVB_OK;
    pthread_mutex_lock(&guard);
    bool placed = !what && rename(f->temp_path, f->final_path) == 0;
    int why = errno;
    if (placed) strike_off(&f->state->self);
    pthread_mutex_unlock(&guard);
    if (!placed) {
        if (!what) what = "cannot put the finished file in place";
        status = kvb_fail(err, KVB_IO, "%s: %s: %s; nothing was changed", f->final_path, what, strerror(why));
    } else {
        free(f->temp_path);
        f->temp_path = NULL; // it has its final name now: nothing to remove
        if (!file_sync_folder(f->final_path))
            status = kvb_fail(err, KVB_IO, "%s: written, but its folder cannot be synced: %s", f->final_path,
                              strerror(errno));
    }
    atomic_file_abandon(f);
    return status;
}

void atomic_file_abandon(atomic_file *f)
{
    if (f->stream) (void)fclose(f->stream); // it is thrown away
    if (f->temp_path) {
        pthread_mutex_lock(&guard);
        if (f->state->self.path) unlink(f->temp_path);
        strike_off(&f->state->self);
        pthread_mutex_unlock(&guard);
    }
    if (f->state) close_all(f->state);
    free_all(f->temp_path, f->final_path);
    *f = (atomic_file){0};
}

kvb_status atomic_write(const char *path, const void *data, size_t size, kvb_error *err)
{
    atomic_file f;
    kvb_status status = atomic_file_begin(&f, path, err);
    if (status != KVB_OK) return status;
    if (size > 0) fwrite(data, 1, size, f.stream);
    return atomic_file_commit(&f, err); // finds what went wrong with the stream
}

// ---- What killed writers left ----

bool atomic_file_is_partial(const char *name, const char *base, size_t base_length)
{
    if (strncmp(name, base, base_length) != 0 || name[base_length] != '.') return false;
    const char *number = name + base_length + 1;
    return strspn(number, "0123456789abcdef") == HEX_DIGITS && strcmp(number + HEX_DIGITS, partial_suffix) == 0;
}

// Removes a temporary file or folder unless its writer still holds a lock on it, or there are no locks to tell.
static void remove_if_stale(const char *path)
{
    int file = file_open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK, 0);
    struct stat st;
    if (file < 0) return;
    if (fstat(file, &st) == 0 && (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode)) && flock(file, LOCK_EX | LOCK_NB) == 0)
        remove_tree(path);
    (void)file_close(file); // gives up the lock
}

void atomic_file_remove_stale(const char *path)
{
    char *target = realpath(path, NULL), *folder = file_folder(target ? target : path);
    const char *base = file_base(target ? target : path);
    DIR *dir = opendir(folder);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        if (!atomic_file_is_partial(e->d_name, base, strlen(base))) continue;
        char *left = need_text("%s/%s", folder, e->d_name);
        remove_if_stale(left);
        free(left);
    }
    if (dir) (void)closedir(dir);
    free_all(folder, target);
}

// ---- Folders ----

// Removes slashes at the end of the name, and follows symbolic links.
static kvb_status resolve_folder(char **out, const char *dir, kvb_error *err)
{
    struct stat st;
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/') n--;
    bool found = lstat(dir, &st) == 0;
    *out = found ? realpath(dir, NULL) : need_text("%.*s", (int)n, dir);
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

// Makes and locks the temporary folder. Returns false with errno set. If a name is taken, it tries another.
static bool make_folder(atomic_folder *f)
{
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        if (!name_temporary(f->temp_path, f->final_path)) return false;
        if (mkdir(f->temp_path, 0777) != 0 && errno == EEXIST) continue;
        f->lock = file_open(f->temp_path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
        if (f->lock < 0 && errno == ENOENT) continue; // somebody took it for a leftover before it was locked
        if (f->lock >= 0) (void)file_lock(f->lock, true);
        else rmdir(f->temp_path);
        return f->lock >= 0;
    }
    return false;
}

static void folder_forget(atomic_folder *f)
{
    free_all(f->self, f->temp_path, f->final_path);
    *f = (atomic_folder){.lock = -1};
}

kvb_status atomic_folder_begin(atomic_folder *f, const char *dir, kvb_error *err)
{
    *f = (atomic_folder){.lock = -1};
    kvb_status status = resolve_folder(&f->final_path, dir, err);
    if (status == KVB_OK) status = check_empty(f->final_path, err);
    if (status == KVB_OK) {
        atomic_file_remove_stale(f->final_path);
        f->self = need(1, sizeof *f->self, "folders to write");
        f->temp_path = make_room(f->final_path);
        pthread_mutex_lock(&guard);
        bool made = make_folder(f);
        int why = errno;
        if (made) enlist(f->self, f->temp_path);
        pthread_mutex_unlock(&guard);
        if (!made) status = kvb_fail(err, KVB_IO, "%s: cannot make the folder: %s", dir, strerror(why));
    }
    if (status != KVB_OK) folder_forget(f);
    return status;
}

kvb_status atomic_folder_end(atomic_folder *f, kvb_status status, kvb_error *err)
{
    if (!f->temp_path) return status;
    if (status == KVB_OK && !file_sync(f->lock))
        status = kvb_fail(err, KVB_IO, "%s: cannot sync: %s", f->final_path, strerror(errno));
    pthread_mutex_lock(&guard);
    if (status == KVB_OK && rename(f->temp_path, f->final_path) != 0)
        status =
            kvb_fail(err, KVB_IO, "%s: cannot put the finished folder in place: %s", f->final_path, strerror(errno));
    if (status != KVB_OK) remove_tree(f->temp_path);
    strike_off(f->self);
    pthread_mutex_unlock(&guard);
    if (status == KVB_OK && !file_sync_folder(f->final_path))
        status =
            kvb_fail(err, KVB_IO, "%s: written, but its folder cannot be synced: %s", f->final_path, strerror(errno));
    (void)file_close(f->lock); // gives up the lock
    folder_forget(f);
    return status;
}
