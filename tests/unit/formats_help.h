// What the tests of formats/ share: a folder of their own, whole files in memory, and a writer of small records.
#pragma once
#include "formats/atomic_file.h"
#include "formats/file_read.h"
#include "formats/record.h"
#include "unit.h"
#include <ftw.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

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

// A path in the folder; eight of them may be in use at a time.
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

// ck_assert for calls with a kvb_error: prints the message.
#define help_ok(call)                                                                      \
    do {                                                                                   \
        kvb_error e_ = {0};                                                                \
        kvb_error *err = &e_;                                                              \
        kvb_status s_ = (call);                                                            \
        ck_assert_msg(s_ == KVB_OK, "%s: %s: %s", #call, kvb_status_name(s_), e_.message); \
    } while (0)

// The call must fail with this status and a message that holds this text.
#define help_fails(call, status_, text)                                                                     \
    do {                                                                                                    \
        kvb_error e_ = {0};                                                                                 \
        kvb_error *err = &e_;                                                                               \
        kvb_status s_ = (call);                                                                             \
        ck_assert_msg(s_ == status_ && e_.status == status_, "%s: %s (%s): %s", #call, kvb_status_name(s_), \
                      kvb_status_name(e_.status), e_.message);                                              \
        ck_assert_msg(strstr(e_.message, text) != NULL, "no \"%s\" in: %s", text, e_.message);              \
    } while (0)

// Metadata of a table of a small model; `changes` is an object whose members take the place of these or join them. The
// caller frees it.
static inline cJSON *help_table_metadata(const char *changes)
{
    static const char *const pairs[][2] = {{"format", "kvbudget-table"},
                                           {"format_version", "1"},
                                           {"tool_version", "0.1.0"},
                                           {"architecture", "llama"},
                                           {"model_id", "tiny"},
                                           {"model_sha256", ""},
                                           {"tokenizer_sha256", ""},
                                           {"n_layers", "2"},
                                           {"n_heads", "4"},
                                           {"n_kv_heads", "2"},
                                           {"head_dim", "16"},
                                           {"metric", "keydiff"},
                                           {"metric_parameters", "{}"},
                                           {"sink", "4"},
                                           {"window", "1"},
                                           {"scope", "global"},
                                           {"aggregate", "mean_loss"},
                                           {"hull", "feasible"},
                                           {"max_prune", "0.99"},
                                           {"calibration_tokens", "60"},
                                           {"n_contexts", "1"},
                                           {"n_questions", "1"},
                                           {"n_queries", "1,1"},
                                           {"calibration_sha256", ""},
                                           {"record_sha256", ""}};
    cJSON *m = cJSON_CreateObject(), *other = cJSON_Parse(changes), *item = other->child;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        if (!cJSON_HasObjectItem(other, pairs[i][0])) cJSON_AddStringToObject(m, pairs[i][0], pairs[i][1]);
    for (; item; item = item->next) cJSON_AddStringToObject(m, item->string, item->valuestring);
    cJSON_Delete(other);
    return m;
}
