// Writing a record: parts in a folder of their own, which become one file at the end.
#include "formats/need.h"
#include "formats/record_internal.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// ---- The folder of parts ----
//
// PATH.parts/ holds head.h5 (the root), lock, context-<id>.h5 and question-<10 digits>-<id>.h5. A folder without
// head.h5 holds nothing that counts: head.h5 comes first and goes first. A file `replace` says that the record at PATH
// is being done again: it is not extended, and is replaced when this run is finished.
typedef enum part_kind { PART_CONTEXT, PART_QUESTION, PART_LOSSES, PART_KINDS } part_kind;

typedef struct record_part {
    char id[65];
    part_kind kind;
    uint32_t question;
    bool in_base; // not a file: taken from the finished record that is being extended
} record_part;

static const char *const kind_names[PART_KINDS] = {"context", "question", "losses"};
static const char head_name[] = RECORD_HEAD, lock_name[] = "lock", replace_name[] = "replace";

static char *path_in(const char *folder, const char *name)
{
    return need_text("%s/%s", folder, name);
}

enum { PART_NAME_MAX = 128 };

static void part_name(char name[PART_NAME_MAX], const char *id, part_kind kind, uint32_t question)
{
    if (kind == PART_CONTEXT) snprintf(name, PART_NAME_MAX, "context-%s.h5", id);
    else snprintf(name, PART_NAME_MAX, "%s-%010u-%s.h5", kind_names[kind], question, id);
}

static char *part_path(const char *folder, const char *id, part_kind kind, uint32_t question)
{
    char name[PART_NAME_MAX];
    part_name(name, id, kind, question);
    return path_in(folder, name);
}

static bool exists_in(const char *folder, const char *name)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof path, "%s/%s", folder, name);
    return n > 0 && (size_t)n < sizeof path && path_exists(path); // no file has a longer path
}

// The reverse of part_path. Returns false for any other name.
static bool parse_part_name(record_part *out, const char *name)
{
    size_t length = strlen(name), skip = strcspn(name, "-") + 1;
    *out = (record_part){.kind = PART_CONTEXT};
    while (out->kind < PART_KINDS &&
           (strncmp(name, kind_names[out->kind], skip - 1) != 0 || strlen(kind_names[out->kind]) != skip - 1))
        out->kind++;
    if (out->kind == PART_KINDS || !kvb_ends_with(name, ".h5")) return false;
    if (out->kind != PART_CONTEXT) {
        unsigned long long number = strtoull(name + skip, NULL, 10);
        if (strspn(name + skip, "0123456789") != 10 || name[skip + 10] != '-' || number > UINT32_MAX) return false;
        out->question = (uint32_t)number;
        skip += 11;
    }
    if (length - 3 <= skip || length - 3 - skip > CONTEXT_ID_MAX) return false;
    memcpy(out->id, name + skip, length - 3 - skip);
    return context_id_valid(out->id);
}

// Whether a file in the folder, other than the head itself, belongs to the run.
static bool is_of_run(const char *name)
{
    record_part ignored;
    return parse_part_name(&ignored, name) || strcmp(name, replace_name) == 0;
}

// Whether it is a temporary file of one of these, or of the head.
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

// Never follows a symbolic link, so that nothing of another folder is taken for ours.
static int open_folder(const char *folder)
{
    return file_open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
}

// Opens the folder as a stream of names. Returns NULL with errno set.
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

// Removes unfinished files. Without a head it removes finished parts too: their record has been assembled already.
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
    if (file < 0 && why == ENOENT) return LOCK_AGAIN; // whoever had it has just removed it
    if (file < 0) {
        bool link = lstat(dir < 0 ? folder : path, &st) == 0 && S_ISLNK(st.st_mode);
        kvb_fail(err, KVB_IO, "%s: cannot be locked: %s", dir < 0 ? folder : path,
                 link ? "is a symbolic link, which may lead to files that are not ours; remove it" : strerror(why));
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

// Makes and locks the folder, and removes what killed writers left in it. *lock receives a descriptor to close. A
// folder or lock that is a symbolic link is refused: what is removed here must be ours.
static kvb_status parts_lock(int *lock, const char *folder, kvb_error *err)
{
    enum { ATTEMPTS = 1000 };
    *lock = -1;
    char *path = path_in(folder, lock_name);
    lock_attempt result = LOCK_AGAIN;
    for (int i = 0; i < ATTEMPTS && result == LOCK_AGAIN; i++) result = try_lock(lock, folder, path, err);
    free(path);
    if (result == LOCK_AGAIN)
        return kvb_fail(err, KVB_IO, "%s: other processes keep creating and removing the folder", folder);
    if (result == LOCK_FAILED) return KVB_IO;
    kvb_status status = clean(folder, err);
    if (status == KVB_OK) return KVB_OK;
    (void)file_close(*lock);
    *lock = -1;
    return status;
}

// ---- Parts ----

// Lists every part of a folder, in no order; *bytes receives the sum of their sizes.
static kvb_status parts_scan(record_part **parts, size_t *n, uint64_t *bytes, const char *folder, kvb_error *err)
{
    size_t capacity = 0;
    *parts = NULL;
    *n = 0;
    *bytes = 0;
    DIR *dir = list_folder(folder);
    if (!dir) return kvb_fail(err, KVB_IO, "%s: cannot read the folder: %s", folder, strerror(errno));
    kvb_status status = KVB_OK;
    for (struct dirent *e; (e = readdir(dir));) {
        record_part one;
        struct stat st;
        if (!parse_part_name(&one, e->d_name)) continue;
        if (fstatat(dirfd(dir), e->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
            status = kvb_fail(err, KVB_IO, "%s/%s: cannot read its size: %s", folder, e->d_name, strerror(errno));
            break;
        }
        *bytes += (uint64_t)st.st_size;
        if (one.kind == PART_LOSSES) continue; // they come with their question
        if (*n == capacity) {
            capacity = capacity ? 2 * capacity : 64;
            *parts = need_more(*parts, capacity, sizeof **parts, "parts");
        }
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

static kvb_status parts_mark_replace(const char *folder, kvb_error *err)
{
    char *path = path_in(folder, replace_name);
    atomic_file mark;
    kvb_status status = atomic_file_begin_own(&mark, path, err);
    if (status == KVB_OK) status = atomic_file_commit(&mark, err);
    free(path);
    return status;
}

static bool parts_replace(const char *folder)
{
    return exists_in(folder, replace_name);
}

// Removes the parts, head first; the lock and the folder stay.
static kvb_status parts_clear(const char *folder, kvb_error *err)
{
    int dir = open_folder(folder);
    if (dir < 0) return kvb_fail(err, KVB_IO, "%s: cannot open the folder: %s", folder, strerror(errno));
    kvb_status status = KVB_OK;
    if (unlinkat(dir, head_name, 0) != 0 && errno != ENOENT) status = cannot_remove(folder, head_name, err);
    (void)file_close(dir); // only read
    return status == KVB_OK ? clean(folder, err) : status;
}

// Removes the files that belong to the folder, head first, and the folder when nothing else is in it.
static kvb_status parts_remove(const char *folder, kvb_error *err)
{
    kvb_status status = parts_clear(folder, err);
    char *lock = status == KVB_OK ? path_in(folder, lock_name) : NULL;
    if (lock && unlink(lock) != 0 && errno != ENOENT) status = cannot_remove(folder, lock_name, err);
    // The folder stays if the user has put something into it.
    if (status == KVB_OK && rmdir(folder) != 0 && errno != ENOTEMPTY && errno != EEXIST && errno != ENOENT)
        status = kvb_fail(err, KVB_IO, "%s: cannot be removed: %s", folder, strerror(errno));
    free(lock);
    return status;
}

// Room for the HDF5 structures of one part, beside its arrays.
enum { PART_OVERHEAD = 1 << 16 };

struct record_writer {
    char *path, *folder;
    int lock;    // descriptor
    bool joined; // another process holds the folder
    record_shape shape;
    cJSON *attributes;
    record *base;   // the finished record that this run extends, or NULL
    bool adds;      // RECORD_ADD: the base has other attributes, and perhaps not all metrics
    cJSON *metrics; // then the metrics of the record that it becomes, one member each; else NULL
};

// ---- Beginning ----

static kvb_status refuse_existing(const record_writer *w, kvb_error *err)
{
    if (parts_have_head(w->folder))
        return kvb_fail(err, KVB_MISMATCH,
                        "%s: holds an unfinished run; continue it with --resume, or start again with --force",
                        w->folder);
    if (path_exists(w->path))
        return kvb_fail(err, KVB_MISMATCH, "%s: exists; add to it with --resume, or replace it with --force", w->path);
    return KVB_OK;
}

static kvb_status compare_roots(const record_shape *held_shape, const cJSON *held, const record_writer *w,
                                const char *name, kvb_error *err)
{
    root_difference d;
    if (!record_root_differs(&d, held_shape, held, &w->shape, w->attributes)) return KVB_OK;
    return kvb_fail(
        err, KVB_MISMATCH,
        "%s: begun with %s = %s, now %s; give the same model and options, --force to start again, or another name",
        name, d.name, d.held, d.given);
}

static kvb_status write_head(const record_writer *w, const char *path, kvb_error *err)
{
    atomic_file out;
    h5_file f;
    kvb_status status = atomic_file_begin_own(&out, path, err);
    if (status != KVB_OK) return status;
    uint64_t bytes = PART_OVERHEAD;
    const cJSON *a;
    cJSON_ArrayForEach(a, w->attributes) bytes += 512 + (cJSON_IsString(a) ? strlen(a->valuestring) : 0);
    status = h5_create(&f, out.temp_path, path, bytes, err);
    if (status == KVB_OK) status = record_root_write(&f, &w->shape, w->attributes, err);
    status = h5_finish(&f, out.temp_path, status, err);
    if (status == KVB_OK) return atomic_file_commit(&out, err);
    atomic_file_abandon(&out);
    return status;
}

static kvb_status compare_head(const record_writer *w, const char *path, kvb_error *err)
{
    h5_file f;
    record_shape shape;
    cJSON *attributes = NULL;
    kvb_status status = h5_open(&f, path, err);
    if (status == KVB_OK) status = record_root_read(&f, &shape, &attributes, err);
    root_difference d;
    if (status == KVB_OK && w->adds && record_root_differs(&d, &shape, attributes, &w->shape, w->attributes))
        status =
            kvb_fail(err, KVB_MISMATCH,
                     "%s: holds an addition that was stopped, with %s = %s, now %s; give the command that began it, "
                     "or throw away what it has made with --add --force",
                     w->folder, d.name, d.held, d.given);
    else if (status == KVB_OK) status = compare_roots(&shape, attributes, w, w->folder, err);
    cJSON_Delete(attributes);
    h5_close(&f);
    return status;
}

static kvb_status open_base(record_writer *w, kvb_error *err)
{
    if (!w->adds && !path_exists(w->path)) return KVB_OK;
    kvb_status status = record_open(&w->base, w->path, err);
    if (status == KVB_OK && w->adds) status = record_check_base(&w->metrics, w->base, w->attributes, err);
    if (status != KVB_OK || w->adds) return status;
    return compare_roots(&w->base->shape, w->base->attributes, w, w->path, err);
}

// The process that holds the folder has made it, cleaned it, and decided whether it extends a finished record.
static kvb_status join_folder(record_writer *w, kvb_error *err)
{
    char *head = path_in(w->folder, head_name);
    kvb_status status = KVB_OK;
    if (!path_exists(head))
        status = kvb_fail(err, KVB_IO,
                          "%s: this process does not see the folder of the run; all processes need one file "
                          "system, or --shard and kvbudget merge",
                          w->folder);
    if (status == KVB_OK) status = compare_head(w, head, err);
    if (status == KVB_OK && !parts_replace(w->folder)) status = open_base(w, err);
    free(head);
    return status;
}

static kvb_status begin(record_writer *w, record_start start, kvb_error *err)
{
    if (w->joined) return join_folder(w, err);
    // Looked at before the folder is made, so that a refusal leaves nothing behind, and again when no one else can
    // write.
    kvb_status status = atomic_file_check(w->path, err);
    if (status == KVB_OK && start == RECORD_NEW) status = refuse_existing(w, err);
    if (status == KVB_OK) status = parts_lock(&w->lock, w->folder, err);
    if (status == KVB_OK && start == RECORD_NEW) status = refuse_existing(w, err);
    if (status == KVB_OK && start == RECORD_ADD_ANEW) status = parts_clear(w->folder, err);
    if (status == KVB_OK && w->adds && parts_replace(w->folder))
        status = kvb_fail(err, KVB_MISMATCH,
                          "%s: holds a run that replaces the record; end that first, with --resume, or throw away what "
                          "it has made with --add --force",
                          w->folder);
    if (status == KVB_OK) atomic_file_remove_stale(w->path);
    if (status == KVB_OK && start == RECORD_REPLACE) {
        status = parts_clear(w->folder, err);
        if (status == KVB_OK) status = parts_mark_replace(w->folder, err);
    }
    if (status == KVB_OK && !parts_replace(w->folder)) status = open_base(w, err);
    char *head = path_in(w->folder, head_name);
    if (status == KVB_OK) status = path_exists(head) ? compare_head(w, head, err) : write_head(w, head, err);
    if (w->lock >= 0 && status != KVB_OK && !parts_have_head(w->folder))
        (void)parts_remove(w->folder, NULL); // nothing was there before
    free(head);
    return status;
}

kvb_status record_begin(record_writer **out, const char *path, const record_shape *shape, const cJSON *attributes,
                        record_start start, kvb_error *err)
{
    *out = NULL;
    kvb_status status = record_shape_check(shape, path, err);
    if (status == KVB_OK) status = record_attributes_check(attributes, path, err);
    if (status != KVB_OK) {
        if (err)
            err->status = KVB_ARGUMENT; // the shape's check is shared with the reader, where it is the file's fault
        return KVB_ARGUMENT;
    }
    record_writer *w = need(1, sizeof *w, "writers");
    w->lock = -1;
    w->joined = start == RECORD_JOIN || start == RECORD_ADD_JOIN;
    w->adds = start == RECORD_ADD || start == RECORD_ADD_ANEW || start == RECORD_ADD_JOIN;
    w->shape = *shape;
    w->path = need_text("%s", path);
    w->folder = parts_path(path);
    w->attributes = attributes ? cJSON_Duplicate(attributes, 1) : cJSON_CreateObject();
    h5_error_printing before = h5_quiet();
    status = begin(w, start, err);
    h5_loud(before);
    if (status == KVB_OK) *out = w;
    else record_writer_free(w);
    return status;
}

void record_writer_free(record_writer *w)
{
    if (!w) return;
    record_close(w->base);
    cJSON_Delete(w->metrics);
    if (w->lock >= 0) (void)file_close(w->lock); // unlocks; nothing was written through it
    cJSON_Delete(w->attributes);
    free_all(w->folder, w->path, w);
}

// ---- What is there ----

static const record_context_info *find_in_base(const record_writer *w, const char *id)
{
    return w->base ? record_find_context(w->base, id) : NULL;
}

static bool base_has_question(const record_writer *w, const char *id, uint32_t question)
{
    const record_context_info *c = find_in_base(w, id);
    for (uint32_t i = 0; c && i < c->n_questions; i++)
        if (c->questions[i].number == question) return true;
    return false;
}

static bool has_part(const record_writer *w, const char *id, part_kind kind, uint32_t question)
{
    char name[PART_NAME_MAX];
    if (!context_id_valid(id)) return false;
    part_name(name, id, kind, question);
    return exists_in(w->folder, name);
}

bool record_writer_has_context(const record_writer *w, const char *id)
{
    const record_context_info *c = find_in_base(w, id);
    return has_part(w, id, PART_CONTEXT, 0) || (c && record_has_metrics(c, w->metrics));
}

bool record_writer_has_question(const record_writer *w, const char *id, uint32_t question)
{
    if (has_part(w, id, PART_QUESTION, question)) return true;
    return base_has_question(w, id, question);
}

// ---- Putting ----

// One part under way: a small record that holds nothing but one context, or one question or its losses.
typedef struct part_file {
    atomic_file out;
    h5_file h5;
    char *path;
    hid_t contexts, context;
} part_file;

// Takes ownership of `path`, even on failure. part_end() must follow, with the status of the writing.
static kvb_status part_begin(part_file *p, char *path, const char *id, uint64_t bytes, kvb_error *err)
{
    *p = (part_file){.h5 = {.id = -1}, .contexts = -1, .context = -1, .path = path};
    kvb_status status = atomic_file_begin_own(&p->out, p->path, err);
    if (status == KVB_OK) status = h5_create(&p->h5, p->out.temp_path, p->path, bytes + PART_OVERHEAD, err);
    if (status == KVB_OK) status = h5_make_group(&p->contexts, &p->h5, p->h5.id, "contexts", err);
    if (status == KVB_OK) status = h5_make_group(&p->context, &p->h5, p->contexts, id, err);
    return status;
}

// Finishes a part whose contents were written with `status`; removes it unless that is KVB_OK.
static kvb_status part_end(part_file *p, kvb_status status, kvb_error *err)
{
    status = h5_end(&p->h5, p->context, status, err);
    status = h5_end(&p->h5, p->contexts, status, err);
    if (p->h5.tally) status = h5_finish(&p->h5, p->out.temp_path, status, err);
    if (status == KVB_OK) status = atomic_file_commit(&p->out, err);
    else atomic_file_abandon(&p->out);
    free(p->path);
    return status;
}

static kvb_status check_ids(const char *path, const char *id, const char *what, const int32_t *ids, uint32_t n,
                            kvb_error *err)
{
    if (n > 0 && !ids) return kvb_fail(err, KVB_ARGUMENT, "%s: context %s: %s is NULL", path, id, what);
    for (uint32_t i = 0; i < n; i++) {
        if (ids[i] < -1)
            return kvb_fail(err, KVB_ARGUMENT, "%s: context %s: %s %u is %d, expected a token id", path, id, what, i,
                            ids[i]);
    }
    return KVB_OK;
}

static kvb_status check_id(const record_writer *w, const char *id, kvb_error *err)
{
    if (context_id_valid(id)) return KVB_OK;
    return kvb_fail(err, KVB_ARGUMENT, "%s: context id \"%.80s\": expected " CONTEXT_ID_RULE, w->path, id);
}

// Checks names and numbers of arrays by metric; question < 0 stands for the context.
static kvb_status check_metrics(const record_writer *w, const char *id, int64_t question, piece_kind kind,
                                uint32_t n_tokens, const char *const *metrics, const float *const *arrays, size_t n,
                                kvb_error *err)
{
    char of_question[40] = "";
    if (question >= 0) snprintf(of_question, sizeof of_question, "question %lld: ", (long long)question + 1);
    kvb_status status = KVB_OK;
    for (size_t m = 0; m < n && status == KVB_OK; m++) {
        if (!metric_name_valid(metrics[m]))
            return kvb_fail(err, KVB_ARGUMENT, "%s: metric \"%.130s\": expected " METRIC_NAME_RULE, w->path,
                            metrics[m]);
        for (size_t k = 0; k < m; k++) {
            if (strcmp(metrics[k], metrics[m]) == 0)
                return kvb_fail(err, KVB_ARGUMENT, "%s: metric %s is given twice", w->path, metrics[m]);
        }
        char *where =
            need_text("%s: context %s: %s%s of %s", w->path, id, of_question, record_pieces[kind].name, metrics[m]);
        status = piece_check(&w->shape, kind, n_tokens, arrays[m], where, err);
        free(where);
    }
    return status;
}

// Writes a group of arrays by metric.
static kvb_status write_metrics(const record_writer *w, const h5_file *f, hid_t parent, piece_kind kind,
                                uint32_t n_tokens, const char *const *metrics, const float *const *arrays, size_t n,
                                kvb_error *err)
{
    hid_t group;
    kvb_status status = h5_make_group(&group, f, parent, record_pieces[kind].name, err);
    for (size_t m = 0; m < n && status == KVB_OK; m++)
        status = piece_write(f, &w->shape, group, metrics[m], kind, n_tokens, arrays[m], err);
    return h5_end(f, group, status, err);
}

kvb_status record_put_context(record_writer *w, const char *id, const int32_t *token_ids, uint32_t n_tokens,
                              const char *const *metrics, const float *const *scores, size_t n_metrics, kvb_error *err)
{
    kvb_status status = check_id(w, id, err);
    if (status == KVB_OK) status = record_tokens_check(&w->shape, n_tokens, w->path, err);
    if (status == KVB_OK) status = check_ids(w->path, id, "token", token_ids, n_tokens, err);
    if (status == KVB_OK) status = check_metrics(w, id, -1, PIECE_SCORES, n_tokens, metrics, scores, n_metrics, err);
    if (status != KVB_OK) return status;
    h5_error_printing before = h5_quiet();
    part_file p;
    status = part_begin(&p, part_path(w->folder, id, PART_CONTEXT, 0), id,
                        n_metrics * piece_bytes(&w->shape, PIECE_SCORES, n_tokens) + n_tokens * sizeof(int32_t), err);
    if (status == KVB_OK) status = h5_write_ids(&p.h5, p.context, "token_ids", token_ids, n_tokens, err);
    if (status == KVB_OK)
        status = write_metrics(w, &p.h5, p.context, PIECE_SCORES, n_tokens, metrics, scores, n_metrics, err);
    status = part_end(&p, status, err);
    h5_loud(before);
    return status;
}

// Finds T of a context that was stored before. Fails with KVB_ARGUMENT if it was not.
static kvb_status find_n_tokens(uint32_t *out, const record_writer *w, const char *id, kvb_error *err)
{
    const record_context_info *c = find_in_base(w, id);
    char *path = part_path(w->folder, id, PART_CONTEXT, 0);
    kvb_status status = KVB_OK;
    if (path_exists(path)) {
        h5_file f;
        hid_t context = -1;
        h5_set ids = {.id = -1};
        status = h5_open(&f, path, err);
        if (status == KVB_OK) status = record_open_group(&context, &f, id, NULL, err);
        if (status == KVB_OK) status = h5_open_ids(&ids, out, &f, context, "token_ids", err);
        h5_close_set(&ids);
        h5_release(context);
        h5_close(&f);
    } else if (c) {
        *out = c->n_tokens;
    } else {
        status = kvb_fail(err, KVB_ARGUMENT, "%s: context %s must be written before its questions", w->path, id);
    }
    free(path);
    return status;
}

static kvb_status check_losses(const record_writer *w, const char *id, uint32_t question, const record_losses *l,
                               kvb_error *err)
{
    const char *order = RECORD_GAIN_ORDER, *kind = RECORD_PACKING_KIND;
    kvb_status status = check_metrics(w, id, question, PIECE_CURVES, 0, l->metrics, l->curves, l->n, err);
    if (status == KVB_OK && l->gains)
        status = check_metrics(w, id, question, PIECE_GAINS, 0, &order, &l->gains, 1, err);
    if (status == KVB_OK && l->packings)
        status = check_metrics(w, id, question, PIECE_PACKINGS, 0, &kind, &l->packings, 1, err);
    return status;
}

static uint64_t losses_bytes(const record_writer *w, const record_losses *l)
{
    return l ? (l->n + 2) * piece_bytes(&w->shape, PIECE_CURVES, 0) : 0;
}

static kvb_status check_question(const record_writer *w, const char *id, uint32_t question, const record_question *q,
                                 uint32_t n_tokens, kvb_error *err)
{
    if ((q->n_queries == 0) != (q->oracle == NULL))
        return kvb_fail(err, KVB_ARGUMENT, "%s: context %s: question %u: %u queries %s oracle", w->path, id, question,
                        q->n_queries, q->oracle ? "and an" : "but no");
    char *where = need_text("%s: context %s: question %u: oracle", w->path, id, question);
    kvb_status status = q->oracle ? piece_check(&w->shape, PIECE_ORACLE, n_tokens, q->oracle, where, err) : KVB_OK;
    free(where);
    if (status == KVB_OK) status = check_ids(w->path, id, "suffix token", q->suffix_ids, q->n_suffix, err);
    if (status == KVB_OK) status = check_ids(w->path, id, "answer token", q->answer_ids, q->n_answer, err);
    return status == KVB_OK && q->losses ? check_losses(w, id, question, q->losses, err) : status;
}

// Makes the group of a question in a part.
static kvb_status make_question(hid_t *questions, hid_t *group, const part_file *p, uint32_t question, kvb_error *err)
{
    char name[16];
    snprintf(name, sizeof name, "%u", question);
    *group = -1;
    kvb_status status = h5_make_group(questions, &p->h5, p->context, "questions", err);
    return status == KVB_OK ? h5_make_group(group, &p->h5, *questions, name, err) : status;
}

static kvb_status write_losses(const record_writer *w, const h5_file *f, hid_t group, const record_losses *l,
                               kvb_error *err)
{
    const char *order = RECORD_GAIN_ORDER, *kind = RECORD_PACKING_KIND;
    kvb_status status = write_metrics(w, f, group, PIECE_CURVES, 0, l->metrics, l->curves, l->n, err);
    if (status == KVB_OK && l->gains) status = write_metrics(w, f, group, PIECE_GAINS, 0, &order, &l->gains, 1, err);
    if (status == KVB_OK && l->packings)
        status = write_metrics(w, f, group, PIECE_PACKINGS, 0, &kind, &l->packings, 1, err);
    return status;
}

static kvb_status write_question(const record_writer *w, const part_file *p, uint32_t question,
                                 const record_question *q, uint32_t n_tokens, kvb_error *err)
{
    hid_t questions, group;
    kvb_status status = make_question(&questions, &group, p, question, err);
    if (status == KVB_OK) status = h5_put_u32(&p->h5, group, "n_queries", q->n_queries, err);
    if (status == KVB_OK) status = h5_write_ids(&p->h5, group, "suffix_ids", q->suffix_ids, q->n_suffix, err);
    if (status == KVB_OK) status = h5_write_ids(&p->h5, group, "answer_ids", q->answer_ids, q->n_answer, err);
    if (status == KVB_OK && q->oracle)
        status = piece_write(&p->h5, &w->shape, group, "oracle", PIECE_ORACLE, n_tokens, q->oracle, err);
    if (status == KVB_OK && q->losses) status = write_losses(w, &p->h5, group, q->losses, err);
    status = h5_end(&p->h5, group, status, err);
    return h5_end(&p->h5, questions, status, err);
}

kvb_status record_put_question(record_writer *w, const char *id, uint32_t question, const record_question *q,
                               kvb_error *err)
{
    kvb_status status = check_id(w, id, err);
    if (status != KVB_OK) return status;
    h5_error_printing before = h5_quiet();
    uint32_t n_tokens = 0;
    status = find_n_tokens(&n_tokens, w, id, err);
    if (status == KVB_OK) status = check_question(w, id, question, q, n_tokens, err);
    if (status == KVB_OK) {
        part_file p;
        uint64_t others = ((uint64_t)q->n_suffix + q->n_answer) * sizeof(int32_t) + losses_bytes(w, q->losses);
        status = part_begin(&p, part_path(w->folder, id, PART_QUESTION, question), id,
                            (q->oracle ? piece_bytes(&w->shape, PIECE_ORACLE, n_tokens) : 0) + others, err);
        if (status == KVB_OK) status = write_question(w, &p, question, q, n_tokens, err);
        status = part_end(&p, status, err);
    }
    h5_loud(before);
    return status;
}

kvb_status record_put_losses(record_writer *w, const char *id, uint32_t question, const record_losses *l,
                             kvb_error *err)
{
    kvb_status status = check_id(w, id, err);
    if (status == KVB_OK) status = check_losses(w, id, question, l, err);
    if (status != KVB_OK) return status;
    h5_error_printing before = h5_quiet();
    part_file p;
    hid_t questions = -1, group = -1;
    status = part_begin(&p, part_path(w->folder, id, PART_LOSSES, question), id, losses_bytes(w, l), err);
    if (status == KVB_OK) status = make_question(&questions, &group, &p, question, err);
    if (status == KVB_OK) status = write_losses(w, &p.h5, group, l, err);
    status = h5_end(&p.h5, group, status, err);
    status = h5_end(&p.h5, questions, status, err);
    status = part_end(&p, status, err);
    h5_loud(before);
    return status;
}

// ---- Assembling a record from its parts, and from the finished record that is extended ----

// Order: by id, the context before its questions, questions by number, and a part before what it replaces in the base.
static int compare_parts(const void *a, const void *b)
{
    const record_part *x = a, *y = b;
    int order = strcmp(x->id, y->id);
    if (order == 0) order = (int)x->kind - (int)y->kind;
    if (order == 0) order = (x->question > y->question) - (x->question < y->question);
    return order ? order : x->in_base - y->in_base;
}

static bool same_part(const record_part *x, const record_part *y)
{
    return strcmp(x->id, y->id) == 0 && x->kind == y->kind && x->question == y->question;
}

static record_part *add_base_parts(record_part *out, const record *base)
{
    for (size_t i = 0; base && i < base->n; i++) {
        const record_context_info *c = &base->contexts[i].info;
        for (uint32_t q = 0; q <= c->n_questions; q++) { // the last one stands for the context itself
            record_part one = {.kind = q < c->n_questions ? PART_QUESTION : PART_CONTEXT, .in_base = true};
            snprintf(one.id, sizeof one.id, "%s", c->id);
            if (one.kind == PART_QUESTION) one.question = c->questions[q].number;
            *out++ = one;
        }
    }
    return out;
}

// Collects all that goes into the record, sorted, each once. *n_files receives how many parts are files.
static kvb_status collect(record_part **all, size_t *n, size_t *n_files, uint64_t *bytes, const record_writer *w,
                          kvb_error *err)
{
    kvb_status status = parts_scan(all, n_files, bytes, w->folder, err);
    if (status != KVB_OK) return status;
    size_t n_base = 0;
    for (size_t i = 0; w->base && i < w->base->n; i++) n_base += 1 + w->base->contexts[i].info.n_questions;
    record_part *larger = *all = need_more(*all, *n_files + n_base, sizeof *larger, "parts");
    record_part *end = add_base_parts(larger + *n_files, w->base);
    if (w->base) *bytes += w->base->file.size;
    size_t total = (size_t)(end - larger), kept = 0;
    qsort(larger, total, sizeof *larger, compare_parts);
    for (size_t i = 0; i < total; i++) {
        if (kept == 0 || !same_part(&larger[kept - 1], &larger[i])) larger[kept++] = larger[i];
    }
    *n = kept;
    return KVB_OK;
}

// Finds the parts of one context: [*first, *first + *count), the context itself first.
static bool find_context_parts(const record_part *all, size_t n, const char *id, size_t *first, size_t *count)
{
    size_t i = 0;
    while (i < n && strcmp(all[i].id, id) != 0) i++;
    *first = i;
    while (i < n && strcmp(all[i].id, id) == 0) i++;
    *count = i - *first;
    return *count > 0 && all[*first].kind == PART_CONTEXT;
}

static kvb_status check_list(const record_writer *w, const record_part *all, size_t n, const char *const *ids,
                             size_t n_ids, kvb_error *err)
{
    size_t used = 0;
    for (size_t i = 0; i < n_ids; i++) {
        size_t first, count;
        if (!find_context_parts(all, n, ids[i], &first, &count))
            return kvb_fail(err, KVB_ARGUMENT, "%s: context \"%.64s\" has not been written yet", w->path, ids[i]);
        for (size_t k = 0; k < i; k++) {
            if (strcmp(ids[k], ids[i]) == 0)
                return kvb_fail(err, KVB_ARGUMENT, "%s: context %s is listed twice", w->path, ids[i]);
        }
        used += count;
        if (!record_writer_has_context(w, ids[i]))
            return kvb_fail(err, KVB_MISMATCH, "%s: context %s has no scores of the metrics that are added", w->path,
                            ids[i]);
    }
    for (size_t p = 0; p < n && used < n; p++) {
        size_t i = 0;
        while (i < n_ids && strcmp(ids[i], all[p].id) != 0) i++;
        if (i == n_ids)
            return kvb_fail(err, KVB_MISMATCH,
                            "%s: holds context %s, which is not in the list of this run; give all "
                            "calibration files, or remove its parts",
                            w->folder, all[p].id);
    }
    return KVB_OK;
}

// Copies a context, or a question with its losses, from the files that have something of it: what was put now, before
// the finished record.
static kvb_status copy_part(record_output *out, const record_writer *w, const record_part *p, kvb_error *err)
{
    char *paths[2] = {NULL, NULL};
    h5_file opened[2] = {{.id = -1}, {.id = -1}};
    const h5_file *from[3];
    size_t n = 0;
    kvb_status status = KVB_OK;
    if (!p->in_base) paths[0] = part_path(w->folder, p->id, p->kind, p->question);
    if (p->kind == PART_QUESTION) paths[1] = part_path(w->folder, p->id, PART_LOSSES, p->question);
    for (int i = 0; i < 2 && status == KVB_OK; i++) {
        if (!paths[i] || (i == 1 && !path_exists(paths[i]))) continue;
        status = h5_open(&opened[i], paths[i], err);
        from[n++] = &opened[i];
    }
    bool held = p->kind == PART_QUESTION ? base_has_question(w, p->id, p->question) : p->in_base || w->adds;
    if (held && find_in_base(w, p->id)) from[n++] = &w->base->file;
    if (status == KVB_OK)
        status = p->kind == PART_QUESTION ? record_output_question(out, p->id, p->question, from, n, err)
                                          : record_output_context(out, p->id, from, n, err);
    for (int i = 0; i < 2; i++) {
        h5_close(&opened[i]);
        free(paths[i]);
    }
    return status;
}

static kvb_status assemble(const record_writer *w, const record_part *all, size_t n, uint64_t bytes,
                           const char *const *ids, size_t n_ids, kvb_error *err)
{
    record_output out;
    kvb_status status = record_output_begin(&out, w->path, &w->shape, w->attributes, bytes, err);
    for (size_t i = 0; i < n_ids && status == KVB_OK; i++) {
        size_t first, count;
        find_context_parts(all, n, ids[i], &first, &count);
        for (size_t k = 0; k < count && status == KVB_OK; k++) status = copy_part(&out, w, &all[first + k], err);
    }
    return record_output_end(&out, status, err);
}

static bool base_is_complete(const record_writer *w, size_t n_files, const char *const *ids, size_t n_ids)
{
    root_difference ignored;
    if (!w->base || n_files > 0 || w->base->n != n_ids) return false;
    if (record_root_differs(&ignored, &w->shape, w->base->attributes, &w->shape, w->attributes)) return false;
    for (size_t i = 0; i < n_ids; i++) {
        if (strcmp(w->base->contexts[i].id, ids[i]) != 0) return false;
    }
    return true;
}

kvb_status record_finish(record_writer *w, const char *const *context_ids_in_order, size_t n, kvb_error *err)
{
    if (w->joined) return kvb_fail(err, KVB_ARGUMENT, "%s: only the process that began the run can finish it", w->path);
    h5_error_printing before = h5_quiet();
    record_part *all = NULL;
    size_t n_parts = 0, n_files = 0;
    uint64_t bytes = 0;
    kvb_status status = collect(&all, &n_parts, &n_files, &bytes, w, err);
    if (status == KVB_OK) status = check_list(w, all, n_parts, context_ids_in_order, n, err);
    if (status == KVB_OK && !base_is_complete(w, n_files, context_ids_in_order, n))
        status = assemble(w, all, n_parts, bytes, context_ids_in_order, n, err);
    // The new record is in place and has been read back: only now are the parts of no use.
    if (status == KVB_OK) status = parts_remove(w->folder, err);
    free(all);
    h5_loud(before);
    return status;
}
