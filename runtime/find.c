// Finds the table of a model among those in a folder, such as the ready tables that come with kvbudget.
#include "fail.h"
#include "safetensors.h"
#include "table.h"
#include "text.h"
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { PATH_SIZE = 4096, NO_FIT = 0, FITS_BY_NAME = 1, FITS_BY_HASH = 2 };

typedef struct folder_search {
    const kvb_expectation *mine;
    const kvb_weights *weights; // never NULL
    int fit;                    // of the best table so far, whose path is `best`
    char best[PATH_SIZE], nearest[PATH_SIZE];
    char reason[320]; // why `nearest`, of the first table that comes near, does not fit
    unsigned n_tables;
} folder_search;

// ---- Names ----

static int lower_case(int c)
{
    return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c;
}

static bool same_letters(const char *a, const char *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (lower_case(a[i]) != lower_case(b[i])) return false;
    return true;
}

// The length of a GGUF file's name without what says how numbers are stored: "-Q8_0.gguf", ".q4_k_m.gguf"; of any
// other name its whole length.
static size_t length_of_name(const char *name)
{
    static const char *const formats[] = {"q", "iq", "f16", "f32", "bf16"};
    size_t n = strlen(name), at;
    if (n < 6 || !same_letters(name + n - 5, ".gguf", 5)) return n;
    for (n -= 5, at = n; at > 0 && name[at - 1] != '-' && name[at - 1] != '.'; at--) {
    }
    for (size_t i = 0; at > 1 && i < sizeof formats / sizeof *formats; i++) {
        size_t length = strlen(formats[i]);
        const char *digit = name + at + length;
        if (length <= n - at && same_letters(name + at, formats[i], length) &&
            (formats[i][length - 1] != 'q' || (*digit >= '1' && *digit <= '8')))
            return at - 1;
    }
    return n;
}

// Whether `name` is in a list of names with commas between. One without '/' is compared with what follows theirs.
static bool is_in_names(const char *names, const char *name)
{
    size_t n = length_of_name(name);
    while (names && *names) {
        size_t length = strcspn(names, ","), from = 0;
        for (size_t i = 0; i < length && !strchr(name, '/'); i++)
            if (names[i] == '/') from = i + 1;
        if (length - from == n && same_letters(names + from, name, n)) return true;
        names += length + (names[length] == ',');
    }
    return false;
}

// ---- One table ----

static int fit_of_weights(const folder_search *s, const kvb_table *t)
{
    const kvb_weights files = {.file_sha256 = s->weights->file_sha256, .n_files = s->weights->n_files};
    const char *hash = s->mine->model_sha256, *name = s->weights->hf_id;
    if (hash && *hash && kvb_same_hash(hash, t->info.model_sha256)) return FITS_BY_HASH;
    if (files.n_files && kvb_table_check_weights(t, &files, NULL) == KVB_OK) return FITS_BY_HASH;
    return name && *name &&
                   (is_in_names(kvb_table_metadata(t, "hf_id"), name) ||
                    is_in_names(kvb_table_metadata(t, "model_names"), name))
               ? FITS_BY_NAME
               : NO_FIT;
}

static void look_at_table(folder_search *s, const kvb_table *t, const char *path)
{
    kvb_expectation others = *s->mine;
    kvb_error why = {KVB_OK, ""};
    const char *names = kvb_table_metadata(t, "model_names");
    int fit = fit_of_weights(s, t);
    others.model_sha256 = NULL;
    bool agrees = kvb_table_check(t, &others, &why) == KVB_OK;
    s->n_tables++;
    if (agrees && (fit > s->fit || (fit && fit == s->fit && strcmp(path, s->best) < 0))) {
        s->fit = fit;
        memcpy(s->best, path, strlen(path) + 1);
    }
    if ((!agrees && !fit) || (*s->nearest && strcmp(path, s->nearest) > 0)) return;
    memcpy(s->nearest, path, strlen(path) + 1);
    if (!agrees) snprintf(s->reason, sizeof s->reason, "%.300s", why.message);
    else
        snprintf(s->reason, sizeof s->reason,
                 "%.90s has this shape and is for %.120s; if your weights are those, give its path", t->name,
                 names && *names ? names : "other weights");
}

// ---- A folder ----

// Damaged files and others that are no tables are passed over.
static kvb_status look_at_file(folder_search *s, const char *folder, const char *name, kvb_error *err)
{
    char path[PATH_SIZE];
    kvb_table *table;
    int n = snprintf(path, sizeof path, "%s/%s", folder, name);
    if (n < 0 || (size_t)n >= sizeof path)
        return kvb_fail(err, KVB_ARGUMENT, "%s: expected a path of at most %d bytes", folder, PATH_SIZE - 1);
    kvb_status status = kvb_table_open(&table, path, NULL, err);
    if (status == KVB_OK) look_at_table(s, table, path);
    kvb_table_close(table);
    return status == KVB_MEMORY ? status : KVB_OK;
}

static kvb_status fail_not_found(const folder_search *s, const char *folder, kvb_error *err)
{
    const kvb_expectation *m = s->mine;
    char shape[96];
    snprintf(shape, sizeof shape, "%u layers with %u query and %u KV heads of %u numbers", (unsigned)m->n_layers,
             (unsigned)m->n_heads, (unsigned)m->n_kv_heads, (unsigned)m->head_dim);
    if (*s->nearest)
        return kvb_fail(err, KVB_MISMATCH, "no ready table for \"%.80s\", %s: %s; `kvbudget tune` makes one",
                        s->weights->hf_id ? s->weights->hf_id : "", shape, s->reason);
    return kvb_fail(err, KVB_MISMATCH,
                    "no ready table for \"%.80s\": none of the %u in %.160s is for %s; `kvbudget tune` makes one",
                    s->weights->hf_id ? s->weights->hf_id : "", s->n_tables, folder, shape);
}

kvb_status kvb_table_find(char *path, size_t cap, const char *folder, const kvb_expectation *mine,
                          const kvb_weights *weights, kvb_error *err)
{
    static const kvb_weights nothing;
    folder_search s = {.mine = mine, .weights = weights ? weights : &nothing};
    kvb_status status = KVB_OK;
    if (!path || !cap || !folder || !mine || (s.weights->n_files && !s.weights->file_sha256))
        return kvb_fail(err, KVB_ARGUMENT, "kvb_table_find: path, folder, mine and hashes must not be NULL");
    if (!mine->n_layers || !mine->n_heads || !mine->n_kv_heads || !mine->head_dim)
        return kvb_fail(err, KVB_ARGUMENT, "kvb_table_find: the model's shape: expected four numbers, found a 0");
    DIR *open = opendir(folder);
    if (!open) return kvb_fail(err, KVB_IO, "%s: opening the folder: %s", folder, strerror(errno));
    for (const struct dirent *d; !status && (d = readdir(open));)
        if (kvb_ends_with(d->d_name, ".safetensors")) status = look_at_file(&s, folder, d->d_name, err);
    (void)closedir(open);
    if (status) return status;
    if (!s.fit) return fail_not_found(&s, folder, err);
    if (strlen(s.best) >= cap)
        return kvb_fail(err, KVB_CAPACITY, "%s: its path takes %zu bytes, found room for %zu", s.best,
                        strlen(s.best) + 1, cap);
    memcpy(path, s.best, strlen(s.best) + 1);
    return KVB_OK;
}
