// A test's own folder, which help_teardown() removes, and whole files in it.
#pragma once
#include "unit.h"
#include <cjson/cJSON.h>
#include <ftw.h>
#include <stdarg.h>
#include <time.h>

static char help_folder[64];

static inline void help_setup(void)
{
    strcpy(help_folder, "/tmp/kvb-formats-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(help_folder));
}

static inline int help_remove_one(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st;
    (void)kind;
    (void)where;
    return remove(path);
}

static inline void help_remove(const char *path)
{
    nftw(path, help_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static inline void help_teardown(void)
{
    help_remove(help_folder);
}

// Returns a path in the folder; eight of them may be in use at a time.
static inline const char *help_path(const char *format, ...)
{
    static char paths[8][256];
    static int next;
    char *path = paths[next++ % 8];
    int n = snprintf(path, 256, "%s/", help_folder);
    va_list args;
    va_start(args, format);
    vsnprintf(path + n, 256 - (size_t)n, format, args);
    va_end(args);
    return path;
}

static inline unsigned char *help_slurp(const char *path, size_t *size)
{
    FILE *f = fopen(path, "rb");
    ck_assert_msg(f != NULL, "%s", path);
    fseek(f, 0, SEEK_END);
    *size = (size_t)ftell(f);
    rewind(f);
    unsigned char *data = malloc(*size + 1);
    ck_assert_uint_eq(fread(data, 1, *size, f), *size);
    fclose(f);
    data[*size] = 0;
    return data;
}

// Reads a whole file as JSON, which the caller deletes.
static inline cJSON *help_json(const char *path)
{
    size_t size;
    char *text = (char *)help_slurp(path, &size);
    cJSON *o = cJSON_ParseWithLength(text, size);
    ck_assert_msg(o != NULL, "%s: %s", path, text);
    free(text);
    return o;
}

static inline void help_same_file(const char *a, const char *b)
{
    size_t n, m;
    unsigned char *x = help_slurp(a, &n), *y = help_slurp(b, &m);
    ck_assert_msg(n == m && memcmp(x, y, n) == 0, "%s and %s differ", a, b);
    free(x);
    free(y);
}

static inline void help_spew(const char *path, const void *data, size_t size)
{
    FILE *f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(data, 1, size, f), size);
    fclose(f);
}

static inline bool help_exists(const char *path)
{
    return access(path, F_OK) == 0;
}

static inline unsigned help_seed(void)
{
    const char *given = getenv("SEED");
    unsigned seed = given ? (unsigned)strtoul(given, NULL, 10) : (unsigned)time(NULL);
    printf("seed %u (repeat with SEED=%u)\n", seed, seed);
    fflush(stdout);
    return seed;
}
