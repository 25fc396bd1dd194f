#include "tools/named_files.h"
#include "formats/atomic_file.h"
#include "formats/file_io.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

typedef struct named_file {
    char *path;   // as it was given
    char *real;   // the same without symbolic links; if it does not exist, its folder's real path and its name
    char *option; // that writes it; NULL: it is read
    bool exists, folder, regular;
    dev_t device;
    ino_t inode;
} named_file;

static struct {
    named_file *items;
    size_t n;
    bool force;
} named;

// ---- Where a file is ------------------------------------------------------------------------------------------------

// Returns the path without symbolic links (malloc'd), or NULL if it is unknown, as in a folder that does not exist.
static char *find_real(const char *path)
{
    char *real = realpath(path, NULL);
    if (real || errno != ENOENT) return real;
    char *folder = file_folder(path), *real_folder = realpath(folder, NULL);
    if (real_folder) real = need_text("%s/%s", strcmp(real_folder, "/") == 0 ? "" : real_folder, file_base(path));
    free_all(folder, real_folder);
    return real;
}

static named_file locate(const char *path, const char *option)
{
    struct stat st = {0};
    bool exists = stat(path, &st) == 0;
    return (named_file){.path = need_text("%s", path),
                        .real = find_real(path),
                        .option = option ? need_text("%s", option) : NULL,
                        .exists = exists,
                        .folder = exists && S_ISDIR(st.st_mode),
                        .regular = exists && S_ISREG(st.st_mode),
                        .device = st.st_dev,
                        .inode = st.st_ino};
}

static void forget(named_file *f)
{
    free_all(f->path, f->real, f->option);
}

static void remember(named_file f)
{
    named.items = need_more(named.items, named.n + 1, sizeof *named.items, "file names");
    named.items[named.n++] = f;
}

static bool is_same(const named_file *a, const named_file *b)
{
    if (a->exists && b->exists) return a->device == b->device && a->inode == b->inode;
    return a->real && b->real && strcmp(a->real, b->real) == 0;
}

static bool is_inside(const named_file *f, const named_file *folder)
{
    size_t n = folder->real ? strlen(folder->real) : 0;
    return folder->folder && n > 0 && f->real && strncmp(f->real, folder->real, n) == 0 && f->real[n] == '/';
}

void named_files_begin(bool force)
{
    for (size_t i = 0; i < named.n; i++) forget(&named.items[i]);
    free(named.items);
    named.items = NULL;
    named.n = 0;
    named.force = force;
}

// ---- What is read ---------------------------------------------------------------------------------------------------

static void remember_input(const char *path)
{
    named_file f = locate(path, NULL);
    if (f.exists) remember(f);
    else forget(&f);
}

// Remembers all parts of a model whose first file is named like model-00001-of-00003.gguf.
static void remember_split(const char *path)
{
    static const char FORM[] = "-00001-of-00003.gguf";
    size_t n = strlen(path), form = sizeof FORM - 1;
    if (n <= form) return;
    const char *end = path + n - form;
    for (size_t i = 0; i < form; i++)
        if (isdigit((unsigned char)FORM[i]) ? !isdigit((unsigned char)end[i]) : FORM[i] != end[i]) return;
    long count = strtol(end + 10, NULL, 10);
    for (long i = 1; i <= count; i++) {
        char *other = need_text("%.*s-%05ld-of-%05ld.gguf", (int)(n - form), path, i, count);
        remember_input(other);
        free(other);
    }
}

void named_input(const char *path)
{
    remember_input(path);
    remember_split(path);
    const char *equals = strchr(path, '=');
    if (equals) remember_input(equals + 1);
    for (const char *colon = strchr(path, ':'); colon; colon = strchr(colon + 1, ':')) {
        const char *from = equals && equals < colon ? equals + 1 : path;
        char *file = need_copy(from, (size_t)(colon - from) + 1, 1, "characters");
        file[colon - from] = '\0';
        remember_input(file);
        free(file);
    }
    if (!kvb_ends_with(path, ".npy")) return;
    char *beside = need_text("%.*s.json", (int)strlen(path) - 4, path);
    remember_input(beside);
    free(beside);
}

// ---- What a file holds ----------------------------------------------------------------------------------------------

typedef struct file_start {
    char bytes[1 << 16];
    size_t size;
} file_start;

// Tells whether the first line is names or numbers with `mark` between them, or the file is a single empty line.
static bool is_columns(const file_start *f, char mark)
{
    size_t n = 0, marks = 0;
    for (; n < f->size && f->bytes[n] != '\n'; n++)
        if (f->bytes[n] == mark) marks++;
        else if (!isalnum((unsigned char)f->bytes[n]) && !strchr("_.+-", f->bytes[n])) return false;
    return marks > 0 || (n == 0 && f->size == 1);
}

// What a file of each kind looks like: every property that is given must hold.
static const struct {
    const char *name; // in messages: "expected ... there"
    kvb_file_kind container;
    const char *begins, *mentions;
    char columns; // the mark between the columns of its first line
} KINDS[FILE_KINDS] = {
    [FILE_RECORD] = {"a record", .container = KVB_FILE_RECORD},
    [FILE_TABLE] = {"a table", .container = KVB_FILE_SAFETENSORS, .mentions = "kvbudget-table"},
    [FILE_RANKING] = {"a learned ranking", .container = KVB_FILE_SAFETENSORS, .mentions = "kvbudget-rank"},
    [FILE_ARRAY] = {"an array (.npy)", .container = KVB_FILE_ARRAY},
    [FILE_TABLE_ARRAY] = {"an array (.npy)", .container = KVB_FILE_ARRAY},
    [FILE_METADATA] = {"an array's metadata", .begins = "{", .mentions = "kvbudget-"},
    [FILE_CSV] = {"CSV", .columns = ','},
    [FILE_LINES] = {"lines of JSON", .begins = "{\""},
    [FILE_LENGTHS] = {"lengths of layers", .begins = "{", .mentions = "\"compression_ratios\""},
    [FILE_SHARES] = {"shares of heads", .begins = "{", .mentions = "\"L0H0\""},
    [FILE_PICTURE] = {"a picture", .mentions = "<svg"},
    [FILE_PAGE] = {"an HTML page", .begins = "<!DOCTYPE html>"},
    [FILE_RESULTS] = {"results as JSON", .begins = "{", .mentions = "kvbudget-results"},
    [FILE_REFINED_TABLE] = {"a table", .container = KVB_FILE_SAFETENSORS, .mentions = "kvbudget-table"},
};

static bool looks_like(const file_start *f, file_kind kind)
{
    const char *begins = KINDS[kind].begins, *mentions = KINDS[kind].mentions;
    kvb_file_kind container = KINDS[kind].container;
    if (container != KVB_FILE_OTHER && kvb_kind_of_file(f->bytes, f->size) != container) return false;
    if (begins && (f->size < strlen(begins) || memcmp(f->bytes, begins, strlen(begins)) != 0)) return false;
    if (mentions && !memmem(f->bytes, f->size, mentions, strlen(mentions))) return false;
    return !KINDS[kind].columns || is_columns(f, KINDS[kind].columns);
}

// Tells whether the file is of this kind, or empty. What cannot be read is left to atomic_file_check().
static bool holds_kind(const char *path, file_kind kind)
{
    FILE *file = KINDS[kind].name ? fopen(path, "rb") : NULL;
    if (!file) return true;
    file_start *start = need(1, sizeof *start, "first bytes of a file");
    start->size = fread(start->bytes, 1, sizeof start->bytes, file);
    bool good = start->size == 0 || looks_like(start, kind);
    (void)fclose(file); // only read
    free(start);
    return good;
}

// ---- What is written ------------------------------------------------------------------------------------------------

static kvb_status compare_output(const named_file *out, bool own_kind, kvb_error *err)
{
    for (size_t i = 0; i < named.n; i++) {
        const named_file *other = &named.items[i];
        bool same = is_same(out, other);
        if (same && !other->option)
            return kvb_fail(err, KVB_ARGUMENT, "%s: would be both read and written; give %s another name", out->path,
                            out->option);
        if (same && strcmp(out->option, other->option) != 0)
            return kvb_fail(err, KVB_ARGUMENT, "%s: %s and %s would write the same file; give one another name",
                            out->path, other->option, out->option);
        if (!same && !other->option && !own_kind && is_inside(out, other))
            return kvb_fail(err, KVB_ARGUMENT,
                            "%s: is inside %s, which is read, and would be replaced; give %s another name", out->path,
                            other->path, out->option);
    }
    return KVB_OK;
}

static kvb_status take_output(const char *path, const char *option, file_kind kind, kvb_error *err)
{
    named_file out = locate(path, option);
    bool own_kind = !out.regular || holds_kind(path, kind);
    kvb_status status = compare_output(&out, own_kind, err);
    if (status == KVB_OK && !own_kind && !named.force)
        status = kvb_fail(err, KVB_ARGUMENT,
                          "%s: exists and is not %s, and %s would replace it; give another name, or --force", path,
                          KINDS[kind].name, option);
    if (status == KVB_OK && kind != FILE_ANY && kind != FILE_RECORD) status = atomic_file_check(path, err);
    if (status == KVB_OK) remember(out);
    else forget(&out);
    return status;
}

// Registers the first `length` characters of `path` with another ending.
static kvb_status take_beside(const char *path, int length, const char *ending, const char *option, file_kind kind,
                              kvb_error *err)
{
    char *beside = need_text("%.*s%s", length, path, ending);
    kvb_status status = take_output(beside, option, kind, err);
    free(beside);
    return status;
}

kvb_status named_output(const char *path, const char *option, unsigned told, kvb_error *err)
{
    static const struct {
        const char *ending;
        file_kind kind;
    } results[] = {{".json", FILE_RESULTS}, {".csv", FILE_CSV}, {".svg", FILE_PICTURE}, {".cells", FILE_LOG}};
    int length = (int)strlen(path);
    file_kind kind = told & ~(unsigned)FILE_PER_METRIC;
    kvb_status status = KVB_OK;
    struct stat st;
    if (kind != told && (strstr(path, "{metric}") || (stat(path, &st) == 0 && S_ISDIR(st.st_mode)))) return KVB_OK;
    if (!*path || (kind == FILE_RESULTS_SET && path[length - 1] == '/'))
        return kvb_fail(err, KVB_ARGUMENT, "%s: expected a file's name, found '%s'", option, path);
    if (kind == FILE_RESULTS_SET) {
        for (size_t i = 0; status == KVB_OK && i < sizeof results / sizeof *results; i++)
            status = take_beside(path, length, results[i].ending, option, results[i].kind, err);
        return status;
    }
    status = take_output(path, option, kind, err);
    if (kind == FILE_TABLE_ARRAY) {
        length -= kvb_ends_with(path, ".npy") ? 4 : 0;
        if (status == KVB_OK) status = take_beside(path, length, ".json", option, FILE_METADATA, err);
    }
    if (status == KVB_OK && kind == FILE_REFINED_TABLE)
        status = take_beside(path, length, ".cells", option, FILE_LOG, err);
    return status;
}
